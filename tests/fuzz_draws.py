"""What is called: operations, blocks, stacks, models, caches, generations and engines, drawn at random."""

import contextlib
import inspect
import itertools
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mambakit as mk
from blocks import CONFIGS, random_cache, tokens
from calls import OPERATIONS, tensors_of
from fuzz_around import AROUND, ODD_MODELS, Theirs
from fuzz_compat import official_call
from fuzz_kinds import DTYPES, OTHER_DTYPES
from fuzz_verbs import command, typed
from mambakit import caches
from mambakit.blocks.family import family_of
from mambakit.inference import Engine, Request
from mambakit.ops.operation import OPERATIONS as OPERATIONS_BY_NAME
from mambakit.text.tokens import Bytes
from operator_calls import operator_calls

MLPS = {
    "mlp": mk.MLPConfig(8, 12),
    "mlp-ungated": mk.MLPConfig(8, 5, gated=False, activation="relu2", bias=True, out_scale=0.7),
}
EXPERTS = {
    "moe": mk.MoEConfig(8, 6, 4, 2),
    "moe-shared": mk.MoEConfig(8, 6, 4, 2, router="softmax_chosen", d_shared=5),
    "moe-groups": mk.MoEConfig(8, 6, 8, 3, "sigmoid", scale=1.7, groups=4, top_groups=2, gated=False, d_latent=4),
}
BESIDE = {
    "parallel": mk.ParallelConfig(CONFIGS["mamba2"], CONFIGS["attention-rope"], out_scale=0.7),
    "parallel-nested": mk.ParallelConfig(
        mk.ParallelConfig(EXPERTS["moe"], CONFIGS["attention-window"]), CONFIGS["mamba3"], in_scale=1.2
    ),
}
BLOCKS: dict[str, Any] = {**CONFIGS, **MLPS, **EXPERTS, **BESIDE}
LAYERS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "single": ((CONFIGS["mamba2"],), (EXPERTS["moe-groups"],), (CONFIGS["attention"],), (MLPS["mlp-ungated"],)),
    "pairs": ((CONFIGS["mamba3"], EXPERTS["moe-shared"]), (CONFIGS["attention-window"], MLPS["mlp"])),
    "beside": ((BESIDE["parallel"], MLPS["mlp"]), (BESIDE["parallel-nested"],)),
}
"""Hybrids, as the blocks of each layer."""
WORDS, LETTERS = 20, 260
"""Vocabularies: of most models, and of those whose tokens are text."""
TOKENS = 8
"""New ones at most, where a request names no number."""


@dataclass
class Call:
    """`run(**arguments)`; in float64 by torch's operators it is `oracle(**arguments)`, if there is one."""

    name: str
    run: Callable[..., Any]
    arguments: dict[str, Any]
    oracle: Callable[..., Any] | None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def junk(draw: random.Random) -> Any:
    """In the place of a number, a word or a list."""
    values = (None, -1, 0, 3, 10**30, 0.5, float("nan"), float("inf"), True, "x", b"x", [], [1.0], [[]], (), {}, {1: 2})
    return draw.choice((*values, object(), torch.tensor(1.5), torch.zeros(2, 2), torch.zeros(2, device="meta"), len))


def with_junk(options: dict[str, Any], names: list[str], draw: random.Random) -> dict[str, Any]:
    """Of all options one is made wrong now and then, be it given or not."""
    return {**options, draw.choice(names): junk(draw)} if draw.random() < 0.4 else options


def moved(module: nn.Module) -> nn.Module:
    """With every parameter moved off its initial value, so that none of them is idle."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


def pair(make: Callable[..., nn.Module], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A module, and the same in float64."""
    narrow, wide = moved(make(dtype=dtype)), make(dtype=torch.float64)
    wide.load_state_dict(narrow.state_dict())
    return narrow, wide


def operation_call(draw: random.Random) -> Call:
    name = draw.choice(list(OPERATIONS))
    arguments: dict[str, Any] = tensors_of(name, draw.choice(DTYPES), draw.randrange(1 << 30))
    parameters = inspect.signature(OPERATIONS[name]).parameters
    for optional in [n for n in arguments if draw.random() < 0.2]:
        if parameters[optional].default is None:
            del arguments[optional]
    if draw.random() < 0.2:
        arguments = {n: t[:, :0] if n.split("_")[-1].startswith(("bs", "bn")) else t for n, t in arguments.items()}
    others = [n for n, p in parameters.items() if p.annotation not in (Tensor, Tensor | None)]
    if others and draw.random() < 0.1:
        arguments[draw.choice(others)] = junk(draw)
    return Call(name, OPERATIONS[name], arguments, OPERATIONS[name])


def sequence_options(draw: random.Random, b: int, s: int) -> tuple[int, dict[str, Any]]:
    """The batch of the input, and masks, resets and packing beside it."""
    options: dict[str, Any] = {}
    if draw.random() < 0.2 and b:
        bounds = sorted(draw.randint(0, s) for _ in range(b - 1))
        options["cu_seqlens"] = torch.tensor([0, *bounds, s])
        b = 1
    for flags in ("mask_bs", "reset_bs"):
        if draw.random() < 0.3:
            options[flags] = torch.rand(b, s) < 0.5
    return b, with_junk(
        options, ["cu_seqlens", "mask_bs", "reset_bs", "path"], draw
    ) if draw.random() < 0.2 else options


def block_call(draw: random.Random) -> Call:
    name, dtype = draw.choice(list(BLOCKS)), draw.choice((torch.float32, torch.float64))
    config = BLOCKS[name]
    block, wide = pair(lambda **made: family_of(config).block(config, **made), dtype)
    b, s = draw.randint(0, 3), draw.choice((0, 1, 2, 7))
    arguments: dict[str, Any] = {"cache": random_cache(block, b) if draw.random() < 0.5 else None}
    if draw.random() < 0.05:
        arguments["cache"] = junk(draw)
    if draw.random() < 0.3:
        if draw.random() < 0.3:
            arguments["reset_b"] = torch.rand(b) < 0.5
        return Call(f"{name}.step", block.step, {"x_bd": tokens(block, b, 1)[:, 0], **arguments}, wide.step)
    b, options = sequence_options(draw, b, s)
    arguments |= options
    if draw.random() < 0.1 and "cu_seqlens" not in options:
        arguments["segment_len"] = draw.choice((1, 2, 50))

        def in_segments(of: Any) -> Callable[..., Any]:
            return lambda **given: mk.run_in_segments(of, **given)

        return Call(
            f"run_in_segments {name}", in_segments(block), {"x_bsd": tokens(block, b, s), **arguments}, wide_of(wide)
        )
    return Call(name, block, {"x_bsd": tokens(block, b, s), **arguments}, wide)


def wide_of(block: Any) -> Callable[..., Any]:
    """Of a block in one piece what it is in segments."""
    return lambda segment_len, **given: block(**given)


def stack_call(draw: random.Random) -> Call:
    """Stacks of one direction and of two, with and without what may wrap them, and models of continuous input."""
    kind = draw.choice(("stack", "layers", "latent", "both"))
    block = CONFIGS[draw.choice(list(CONFIGS))]
    rows: dict[str, Any] = {"stack_latents": draw.choice(((), ("start",), ("end", 1)))} if draw.random() < 0.3 else {}
    if kind == "both":
        config = mk.BidirectionalConfig(block=block, n_layer=2, **rows)
        make: Callable[..., nn.Module] = lambda **made: mk.BidirectionalStack(config, **made)  # noqa: E731
        rows = {}
    else:
        blocks = {"layers": LAYERS[draw.choice(list(LAYERS))]} if kind == "layers" else {"block": block, "n_layer": 2}
        if kind == "latent":
            latent = mk.LatentConfig(**blocks, d_input=5, d_output=3, **rows)
            make = lambda **made: mk.LatentModel(latent, **made)  # noqa: E731
        else:
            gates = mk.MultiGateConfig(n_streams=2) if draw.random() < 0.2 else None
            stack = mk.StackConfig(**blocks, multi_gate=gates, **rows)
            make = lambda **made: mk.Stack(stack, **made)  # noqa: E731
    narrow, wide = pair(make)
    b, s = draw.randint(0, 3), draw.choice((0, 1, 2, 7))
    width = 5 if kind == "latent" else narrow.d_model
    arguments: dict[str, Any] = {}
    if draw.random() < 0.5:
        arguments["cache"] = junk(draw) if draw.random() < 0.1 else made_cache(narrow, b, width)
    if draw.random() < 0.3 and kind != "both":
        x_bd = torch.randn(b, width)
        name = "x_bI" if kind == "latent" else "x_bd"
        return Call(f"{kind}.step", narrow.step, {name: x_bd, **arguments}, wide.step)
    b, options = sequence_options(draw, b, s)
    name = "x_bsI" if kind == "latent" else "x_bsd"
    return Call(kind, narrow, {name: torch.randn(b, s, width), **arguments, **options}, wide)


def made_cache(module: Any, b: int, width: int) -> Any:
    with torch.no_grad():
        return module(torch.randn(b, 3, width))[1]


def make_models(draw: random.Random, vocab_size: int = WORDS) -> tuple[Any, Any]:
    """Of one kind of block or a hybrid, and the same in float64."""
    blocks: dict[str, Any] = {"block": CONFIGS[draw.choice(list(CONFIGS))], "n_layer": 2}
    if draw.random() < 0.4:
        blocks = {"layers": LAYERS[draw.choice(list(LAYERS))]}
    config = mk.ModelConfig(**blocks, vocab_size=vocab_size, tie_embeddings=False)
    return pair(lambda **made: mk.LanguageModel(config, **made))


def sometimes_narrow(call: Call, model: Any, draw: random.Random) -> Call:
    """Of a quantized model now and then, which has no other to be compared with: `model` itself is changed."""
    if draw.random() < 0.15:
        bits = draw.choice((16, 8, 4))
        mk.quantize(model, bits, activations=draw.choice((None, "float32")), in_place=True)
        return replace(call, name=f"{call.name} of {bits} bits", oracle=None)
    return call


def model_call(draw: random.Random) -> Call:
    model, wide = make_models(draw)
    b, s = draw.randint(0, 2), draw.choice((0, 1, 5))
    low, high = -1 if draw.random() < 0.1 else 0, WORDS + 1 if draw.random() < 0.1 else WORDS
    arguments: dict[str, Any] = {}
    if draw.random() < 0.4:
        arguments["cache"] = junk(draw) if draw.random() < 0.1 else model(torch.ones(b, 3, dtype=torch.int64))[1]
    if draw.random() < 0.3:
        step = Call("model.step", model.step, {"ids_b": torch.randint(low, high, (b,)), **arguments}, wide.step)
        return sometimes_narrow(step, model, draw)
    b, options = sequence_options(draw, b, s)
    whole = Call("model", model, {"ids_bs": torch.randint(low, high, (b, s)), **arguments, **options}, wide)
    return sometimes_narrow(whole, model, draw)


def cache_call(draw: random.Random) -> Call:
    if draw.random() < 0.5:
        config = BLOCKS[draw.choice(list(BLOCKS))]
        maker: Any = family_of(config).block(config)
        cache, other = random_cache(maker, 3), random_cache(maker, draw.randint(0, 2))
    else:
        maker, _ = make_models(draw)
        cache, other = (maker(torch.ones(b, 3, dtype=torch.int64))[1] for b in (3, draw.randint(0, 2)))
    picks = draw.choice((torch.tensor([draw.randint(-1, 3), 1]), torch.tensor([True, False, True]), junk(draw)))
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (caches.select, {"cache": cache, "index_b": picks}),
        (caches.clone, {"cache": cache}),
        (caches.detach, {"cache": cache}),
        (caches.rows, {"cache": cache}),
        (caches.concat, {"caches": [cache, other]}),
        (caches.to, {"cache": cache, "dtype": draw.choice((*OTHER_DTYPES, junk(draw)))}),
        (caches.to, {"cache": cache, "device": draw.choice(("cpu", "nowhere", junk(draw)))}),
        (stored, {"cache": cache}),
        (
            rolled_back,
            {"cache": cache, "length": draw.choice((1, 3, junk(draw))), "k": draw.choice((0, 1, junk(draw)))},
        ),
        (maker.fresh_cache, {"batch": draw.choice((0, 1, 5, junk(draw)))}),
    ]
    function, arguments = draw.choice(calls)
    if draw.random() < 0.1 and "cache" in arguments:
        arguments["cache"] = junk(draw)
    return Call(function.__name__, function, arguments, None)


def stored(cache: Any) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        caches.save(cache, Path(directory) / "cache")
        return caches.load(Path(directory) / "cache")


def rolled_back(cache: Any, length: Any, k: Any) -> Any:
    history = caches.History(length)
    for _ in range(3):
        history.push(cache)
    return history.rollback(k)


SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.7, 1.0),
    "top_k": (1, 5, 50),
    "top_p": (0.5, 1.0),
    "min_p": (0.0, 0.1),
    "repetition_penalty": (0.8, 1.3),
    "stop": (3, [4, 5], [[1, 2], 7]),
}
CONSTRAINTS: tuple[Any, ...] = (
    {"regex": "[a-c]{2,4}"},
    {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]},
    {"grammar": 'start: "yes" | "no"'},
    {"regex": "("},
    {"type": 3},
    {},
)


def sampling(draw: random.Random) -> dict[str, Any]:
    chosen = {name: draw.choice(values) for name, values in SAMPLING.items() if draw.random() < 0.25}
    return {"max_new_tokens": draw.choice((0, 1, 4, TOKENS)), "seed": draw.randint(-5, 5), **chosen}


def drawn_ids(draw: random.Random, vocab_size: int) -> Any:
    """One prompt or several, as any of the things that prompts may be."""
    rows = [[draw.randrange(vocab_size) for _ in range(draw.choice((1, 2, 9)))] for _ in range(draw.randint(1, 3))]
    wrong = [draw.choice((-1, vocab_size, 2**40))]
    square = torch.randint(vocab_size, (2, 4))
    return draw.choice((rows, rows[0], torch.tensor(rows[0]), square, list(map(torch.tensor, rows)), [*rows, wrong]))


def generation_call(draw: random.Random) -> Call:
    constrained = draw.random() < 0.2
    vocab_size = LETTERS if constrained else WORDS
    model, wide = make_models(draw, vocab_size)
    arguments: dict[str, Any] = {"ids": drawn_ids(draw, vocab_size), **sampling(draw)}
    if isinstance(arguments["ids"], Tensor) and arguments["ids"].dim() == 2 and draw.random() < 0.5:
        arguments["mask_bs"] = torch.tensor([[False, True, True, True], [True, True, False, True]])
    if draw.random() < 0.2:
        arguments["cache"] = model(torch.ones(draw.choice((1, 2)), 3, dtype=torch.int64))[1]
    if draw.random() < 0.3:
        arguments["prefix_cache"] = mk.PrefixCache(max_entries=3)
    arguments |= {"speculate": draw.choice(("off", "auto", "ngram"))} if draw.random() < 0.4 else {}
    arguments |= {"prefill_chunk": draw.choice((1, 3, 100))} if draw.random() < 0.3 else {}
    arguments |= {"backend": draw.choice(("auto", "torch", "cpu"))} if draw.random() < 0.3 else {}
    if constrained:
        arguments |= {"constraint": draw.choice(CONSTRAINTS), "tokenizer": Bytes()}
    arguments = with_junk(arguments, list(inspect.signature(mk.stream).parameters)[1:], draw)
    plain = {"backend": "torch", "speculate": "off", "prefix_cache": None}
    call = Call(
        "generate", lambda **given: generated(model, given), arguments, lambda **given: generated(wide, given | plain)
    )
    return sometimes_narrow(call, model, draw)


def generated(model: Any, options: dict[str, Any]) -> Tensor:
    """Its first tokens: there may be no end to them."""
    torch.manual_seed(0)
    ids = options.pop("ids")
    run = mk.stream(model, ids, **options)
    return torch.stack([run.tokens.new_zeros(len(run.tokens)), *itertools.islice(run, TOKENS)], 1)


def engine_call(draw: random.Random) -> Call:
    constrained = draw.random() < 0.2
    vocab_size = LETTERS if constrained else WORDS
    model, wide = make_models(draw, vocab_size)
    given: dict[str, Any] = {"tokenizer": Bytes()} if constrained else {}
    given |= {"max_rows": draw.choice((1, 2))} if draw.random() < 0.3 else {}
    given |= {"prefill_chunk": draw.choice((1, 3))} if draw.random() < 0.3 else {}
    given |= {"backend": draw.choice(("auto", "torch", "cpu"))} if draw.random() < 0.3 else {}
    given |= {"prefix_cache": mk.PrefixCache(max_entries=3)} if draw.random() < 0.3 else {}
    given = with_junk(given, list(inspect.signature(Engine).parameters)[1:], draw) if draw.random() < 0.3 else given
    ids = draw.choice(([1, 2, 3], [draw.randrange(vocab_size) for _ in range(9)], torch.tensor([4, 5])))
    asked: dict[str, Any] = {"ids": ids, **sampling(draw)}
    asked |= {"constraint": draw.choice(CONSTRAINTS)} if constrained else {}
    for name, value in {"logprobs": 2, "echo": True, "ends": [1], "keep_state": True, "stop": ["a", 3]}.items():
        asked |= {name: value} if draw.random() < 0.2 else {}
    asked = with_junk(asked, list(inspect.signature(Engine.add).parameters)[1:], draw)
    call = Call(
        "engine",
        lambda **arguments: served(model, **arguments),
        {"given": given, "asked": asked},
        lambda given, asked: served(wide, given | {"backend": "torch", "prefix_cache": None}, asked, alone=True),
    )
    return sometimes_narrow(call, model, draw)


def served(model: Any, given: dict[str, Any], asked: dict[str, Any], *, alone: bool = False) -> Any:
    """The tokens of one request, and of two that come with it and are none of its business."""
    engine = Engine(model, **given)
    torch.manual_seed(0)
    told = Theirs(asked["on_token"]) if callable(asked.get("on_token")) else None
    request = engine.add(**asked | ({"on_token": told} if told else {}))
    others = [engine.add([1, 2], 4, temperature=0) for _ in range(0 if alone else 2)]
    for _ in range(40):
        if not engine.step() or len(request.tokens) >= TOKENS:
            break
    request.cancel()
    engine.run()
    assert request.done
    assert all(other.done and len(other.tokens) == 4 for other in others)
    return torch.tensor(result_of(request, told)[:TOKENS], dtype=torch.int64)


def result_of(request: Request, told: Theirs | None) -> list[int]:
    if request.error is not None and not (told and told.is_source_of(request.error)):
        raise request.error
    return request.tokens


def replaced(config: Any, draw: random.Random) -> Any:
    """A config with one field made wrong, or another."""
    name = draw.choice(list(config.__dataclass_fields__))
    return replace(config, **{name: junk(draw)})


def config_call(draw: random.Random) -> Call:
    """Of what is refused at the latest when a block is made; what is not has to run."""
    config = BLOCKS[draw.choice(list(BLOCKS))]

    def make_and_run(config: Any, number: int) -> Any:
        changed = replaced(config, random.Random(number))
        block: Any = family_of(changed).block(changed)
        return block(torch.randn(2, 3, block.d_model))

    return Call("config", make_and_run, {"config": config, "number": draw.randrange(1 << 30)}, None)


def compat_call(draw: random.Random) -> Call:
    name, run, arguments = official_call(draw)
    if draw.random() < 0.1:
        # An unknown activation is a NotImplementedError, as officially.
        arguments[draw.choice([name for name in arguments if name != "activation"])] = junk(draw)
    return Call(name, run, arguments, run)


@cache
def operator_inputs() -> dict[str, list[tuple[Any, ...]]]:
    state = torch.get_rng_state()
    with torch.no_grad(), mk.use_backend("auto"):
        found = {name: calls for name, calls in operator_calls().items() if calls}
    torch.set_rng_state(state)
    return found


def operator_call(draw: random.Random) -> Call:
    """torch operators of ours by themselves and their derivatives, whose inputs nobody has looked at."""
    if not operator_inputs():  # no kernels, no operators of theirs
        return operation_call(draw)
    name = draw.choice(list(operator_inputs()))
    operation: Any = OPERATIONS_BY_NAME[name]
    given = dict(zip(operation.names, draw.choice(operator_inputs()[name]), strict=True))
    given = {n: t.clone() if isinstance(t, Tensor) else t for n, t in given.items()}
    operator, backend = operation.operator, draw.choice(("cpu", "cpu", "cpu", "x"))
    if operation.floats and draw.random() < 0.5:
        operator, name = operation.operator_backward, f"{name}_backward"
        grads = [torch.randn(shape) for _, shape in operation.outputs(*given.values())]
        needs = [draw.random() < 0.7 for _ in range(operation.floats)]
        given = {"grads": grads[draw.random() < 0.05 :], **given, "needs": needs[draw.random() < 0.05 :]}
    for n, value in given.items():
        if not isinstance(value, Tensor) and draw.random() < 0.1:
            given[n] = other_number(value, draw)
    return Call(f"torch.ops.{name}", lambda **given: operator(*given.values()), {**given, "backend": backend}, None)


def other_number(value: Any, draw: random.Random) -> Any:
    """Of the same kind: torch sees to that."""
    if type(value) is int:
        return draw.choice((-1, 0, 1, 3, 7, 2**31, 2**62, -(2**63)))
    if type(value) is float:
        return draw.choice((-1.0, 0.0, 1e-30, 1e30, float("inf"), float("nan")))
    if isinstance(value, list) and all(type(part) is int for part in value):
        return draw.choice(([], [0], [-1, *value], [2**40], [*value, 0]))
    return value


def around_call(draw: random.Random) -> Call:
    run, arguments = draw.choice(AROUND)()
    models = [name for name in arguments if name in ("model", "module", "draft")]
    if models and draw.random() < 0.3:
        arguments[draw.choice(models)] = draw.choice(ODD_MODELS)()
        return Call(run.__name__, run, arguments, None)
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        arguments[draw.choice(list(arguments))] = junk(draw)
    return Call(run.__name__, run, arguments, None)


def verb_call(draw: random.Random) -> Call:
    return Call("command", command, typed(draw), None)


CALLS: dict[Callable[[random.Random], Call], int] = {
    operation_call: 10,
    block_call: 6,
    stack_call: 2,
    model_call: 2,
    cache_call: 2,
    generation_call: 2,
    engine_call: 2,
    config_call: 1,
    compat_call: 4,
    operator_call: 3,
    around_call: 3,
    verb_call: 1,
}
"""What is drawn, and how often."""
