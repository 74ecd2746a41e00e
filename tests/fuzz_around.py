"""Calls of what stands around models: configs, official blocks, adapters, quantization, files, sessions, text, export.

Each is a function with arguments that fit; the fuzzer puts others in their places.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm

import mambakit as mk
from blocks import CONFIGS
from fuzz_kinds import one_rank
from mambakit.checkpoints.gguf.writing import save_gguf
from mambakit.compat import mamba_ssm as compat
from mambakit.inference import Engine, export
from mambakit.inference.constraints import Constraint
from mambakit.inference.decoder import Decoder
from mambakit.inference.requests import State
from mambakit.inference.sampling import Sampler
from mambakit.inference.sessions import Sessions
from mambakit.models.quantization import quantization_report
from mambakit.text.chat import Chat
from mambakit.text.tokens import Bytes
from mambakit.training.settings import TrainSettings

VOCABULARY = 260
Around = tuple[Callable[..., Any], dict[str, Any]]


def make_model(name: str = "mamba2") -> Any:
    return mk.LanguageModel(mk.ModelConfig(block=CONFIGS[name], n_layer=2, vocab_size=VOCABULARY))


def odd_models() -> list[Callable[[], Any]]:
    """In the place of a model: such as some functions take and others have to refuse."""
    return [
        lambda: make_model().to("meta"),
        lambda: make_model().half(),
        lambda: make_model().to(torch.bfloat16),
        lambda: make_model().double(),
        lambda: mk.quantize(make_model(), 8),
        lambda: mk.quantize(make_model(), 4).to(torch.bfloat16),
        lambda: mk.quantize(make_model(), 8).to("meta"),
        lambda: mk.add_lora(make_model(), 2),
        lambda: mk.add_lora(make_model("mamba1"), 2).to("meta"),
        lambda: make_model("attention-window"),
        lambda: make_model("mamba3").requires_grad_(False),
        lambda: make_model().backbone,
        lambda: make_model().backbone.layers[0].mixer,
        lambda: torch.nn.Sequential(make_model()),
        lambda: torch.nn.DataParallel(make_model()),
        lambda: torch.nn.Linear(2, 2),
        lambda: torch.nn.Identity(),
        lambda: broken_model(torch.nan),
        lambda: broken_model(torch.inf),
        lambda: parametrized(make_model()),
    ]


def broken_model(number: float) -> Any:
    model = make_model()
    with torch.no_grad():
        model.backbone.layers[0].mixer.in_proj.weight[0, 0] = number
    return model


def parametrized(model: Any) -> Any:
    weight_norm(model.backbone.layers[0].mixer.in_proj)
    return model


class Theirs:
    """A function of the caller's, which may raise what it likes: that comes back to the caller, as it is."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.raised = function, []

    def __call__(self, *given: Any, **named: Any) -> Any:
        try:
            return self.function(*given, **named)
        except Exception as error:
            self.raised.append(error)
            raise

    def is_source_of(self, error: Exception | None) -> bool:
        assert len(self.raised) <= 1, "called again after it raised"
        return any(one is error for one in self.raised)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def saved(model: Any, format: Any, max_shard_bytes: Any, dtype: Any, device: Any) -> None:
    with folder() as place:
        mk.save_model(model, place / "m", format, max_shard_bytes=max_shard_bytes)
        mk.load_model(place / "m", dtype=dtype, device=device)


def loaded(**options: Any) -> None:
    with folder() as place:
        mk.save_model(make_model(), place / "m")
        mk.load_model(**{"path_or_hub_name": place / "m", **options})


def adapted(rank: Any, alpha: Any, targets: Any, base: Any) -> None:
    with folder() as place:
        model = mk.add_lora(make_model(), rank, alpha=alpha, targets=targets)
        model(torch.tensor([[1, 2]]))
        mk.save_lora(model, place / "a", base=base)
        mk.load_lora(make_model(), place / "a")
        mk.merge_lora(model)


def adapter_of(model: Any, directory: Any) -> None:
    mk.load_lora(model, directory)


def quantized(model: Any, **options: Any) -> None:
    mk.quantize(model, **options)(torch.tensor([[1, 2]]))


def reported(model: Any, ids_bs: Any) -> None:
    quantization_report(model, mk.quantize(make_model()), ids_bs)


def parked(key: Any, state: Any, n: Any, new_key: Any, versions: Any, max_bytes: Any) -> None:
    with folder() as place:
        sessions = Sessions(place, versions=versions, max_bytes=max_bytes)
        sessions.park(key, state)
        sessions.park(key, state)
        sessions.resume(key)
        sessions.rollback(key, n)
        sessions.branch(key, new_key)
        sessions.delete(new_key)
        sessions.keys()


def made_state() -> State:
    engine = Engine(make_model())
    request = engine.add([1, 2, 3], 2, keep_state=True)
    engine.run()
    assert request.state is not None
    return request.state


def continued(state: Any, ids: Any) -> None:
    """Another request from a state, beside one that it must not disturb."""
    engine = Engine(make_model())
    other = engine.add([1, 2], 3)
    known = list(state.ids) if isinstance(state, State) else []
    request = engine.add(known + ids if isinstance(ids, list) else ids, 2, state=state)
    engine.run()
    assert len(other.tokens) == 3
    if request.error is not None:
        raise request.error


def text_of(model: Any, tokenizer: Any, prompt: Any, **options: Any) -> None:
    mk.generate_text(model, tokenizer, prompt, **options)


def spoken(text: Any, ids: Any, messages: Any, add_generation_prompt: Any) -> None:
    tokenizer = mk.load_tokenizer("bytes")
    tokenizer.encode(text)
    tokenizer.decode(ids)
    tokenizer.apply_chat_template(messages, add_generation_prompt)


def templated(template: Any, messages: Any, tools: Any, named: Any) -> None:
    Chat(Bytes(), template, named=named).render(messages, tools)


def prefixed(max_entries: Any, max_bytes: Any, ids: Any) -> None:
    known, model = mk.PrefixCache(max_entries=max_entries, max_bytes=max_bytes), make_model()
    for _ in range(2):
        mk.generate(model, ids, max_new_tokens=2, prefix_cache=known)


def continued_text(model: Any, ids: Any, **options: Any) -> None:
    for _ in zip(range(3), mk.stream(model, ids, **options), strict=False):
        pass


def served(model: Any, **options: Any) -> None:
    engine = Engine(model, **options)
    request = engine.add([1, 2, 3], 2, temperature=0)
    engine.run()
    if request.error is not None:
        raise request.error


def sent_to_llama(model: Any, kind: Any) -> None:
    with folder() as place:
        save_gguf(model, place / "m.gguf", kind)
        mk.load_model(place / "m.gguf")


def split_sequences(model: Any, mesh: Any, sum_gradients: Any) -> None:
    mk.parallel.context_parallel(model, mesh, sum_gradients=sum_gradients)
    model(torch.tensor([[1, 2, 3]]))


def split_widths(model: Any, mesh: Any) -> None:
    mk.parallel.tensor_parallel(model, mesh)
    _, cache = model(torch.tensor([[1, 2, 3]]))
    mk.parallel.share_of_cache(model, mk.parallel.whole_cache(model, cache))
    named = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in model.named_parameters()}
    mk.parallel.parted(model, mk.parallel.joined(model, named))


def in_parts(model: Any, tensors: Any, cache: Any) -> None:
    mk.parallel.parted(mk.parallel.tensor_parallel(make_model(), one_rank()), tensors)
    mk.parallel.parted(model, tensors)
    mk.parallel.joined(model, tensors)
    mk.parallel.whole_cache(model, cache)
    mk.parallel.share_of_cache(model, cache)


def decoded(model: Any, ids_b: Any, batch: Any) -> None:
    decoder = Decoder(model)
    decoder.load(model.fresh_cache(batch))
    decoder.step(ids_b)
    decoder.cache()


def chosen(logits_bw: Any, **options: Any) -> None:
    uniform_b = torch.full((2,), 0.5, dtype=torch.float64)
    seen_bw = torch.tensor([[True, False, True], [False, False, True]])
    picks = Sampler(**options).choose(torch.tensor([[0.1, 2.0, -1.0], [float("-inf"), 0.0, 1.0]]), seen_bw, uniform_b)
    assert 0 <= int(picks.min()) <= int(picks.max()) < 3


def with_backend(name: Any) -> None:
    with mk.use_backend(name):
        make_model()(torch.tensor([[1, 2]]))


def grouped(module: Any, weight_decay: Any, muon: Any, hooks: Any) -> None:
    groups = mk.param_groups(module, weight_decay=weight_decay, muon=muon, hooks=hooks)
    filled = [{"params": group["params"]} for group in groups if group["params"]]
    if filled:  # torch wants one
        torch.optim.AdamW(filled)


def stacked(**fields: Any) -> None:
    stack = mk.Stack(mk.StackConfig(**fields))
    stack(torch.randn(1, 3, stack.d_model))


def modelled(**fields: Any) -> None:
    model = mk.LanguageModel(mk.ModelConfig(**fields))
    model(torch.tensor([[0, 1]]))
    mk.ModelConfig.from_json(model.config.to_json())


def both_ways(**fields: Any) -> None:
    stack = mk.BidirectionalStack(mk.BidirectionalConfig(**fields))
    stack(torch.randn(1, 3, stack.d_model))


def latent(**fields: Any) -> None:
    mk.LatentModel(mk.LatentConfig(**fields))(torch.randn(1, 3, 5))


def gated(**fields: Any) -> None:
    config = mk.MultiGateConfig(**fields)
    mk.Stack(mk.StackConfig(block=CONFIGS["mamba2"], n_layer=2, multi_gate=config))(torch.randn(1, 3, 8))


def scheduled(schedule: Any) -> None:
    mk.Stack(mk.StackConfig(block=CONFIGS["mamba2"], n_layer=3, virtual=schedule))(torch.randn(1, 3, 8))


def cyclic(n: Any) -> None:
    scheduled(mk.Cyclic(n))
    scheduled(mk.Stretched(n))


def custom(indices: Any) -> None:
    scheduled(mk.Custom(indices))


def configured(text: Any, n_layer: Any, block: Any, virtual: Any) -> None:
    mk.ModelConfig.from_json(text)
    values = mk.StackConfig(block=BLOCK, n_layer=2).to_dict()
    mk.StackConfig.from_dict({**values, "n_layer": n_layer, "block": block, "virtual": virtual})


def official(name: str) -> Callable[..., Any]:
    """A prompt and a token through one of the official modules."""
    options = {"headdim": 4} if name == "Mamba2" else {}

    def ran(hidden_states: Any, token: Any, states: Any, batch_size: Any, dtype: Any, **packing: Any) -> None:
        block = getattr(compat, name)(8, d_state=4, **options)
        block(hidden_states, **packing)
        block.step(token, *(states if isinstance(states, tuple) else (states,) * 2))
        block.allocate_inference_cache(batch_size, 9, dtype=dtype)

    return ran


def explained(call: Any, x: Any) -> None:
    call = Theirs(call) if call is len else call
    try:
        list(map(str, mk.explain(call, x)))
    except Exception as error:
        if not isinstance(call, Theirs) or not call.is_source_of(error):
            raise


def only_tensor(block: Any, x_bsd: Any) -> None:
    mk.TensorOnly(block)(x_bsd)


def states_of(model: Any, batch: Any) -> None:
    export.state_names(model)
    export.fresh_state(model, batch)


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SAMPLING = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
BLOCK = CONFIGS["mamba2"]
ONES = torch.ones(2, 3, dtype=torch.int64)


def official_call(name: str) -> Around:
    given = {"hidden_states": torch.randn(2, 3, 8), "token": torch.randn(2, 1, 8), "batch_size": 2, "dtype": None}
    heads = (2, 4, 4, 4) if name == "Mamba2" else (2, 16, 4)
    given |= {"states": (torch.randn(2, 24 if name == "Mamba2" else 16, 4), torch.randn(heads))}
    packing = {"seq_idx": torch.tensor([[0, 0, 1], [-1, 0, 2]])} if name == "Mamba2" else {}
    return official(name), given | packing


def around() -> list[Callable[[], Around]]:
    """Each made anew: some calls change what they are given."""
    text = {"max_new_tokens": 3, "stop": ["a", 3], "seed": 1, **SAMPLING}
    training = {n: getattr(TrainSettings(steps=3), n) for n in TrainSettings.__dataclass_fields__}
    return [
        lambda: (
            saved,
            {"model": make_model(), "format": "official", "max_shard_bytes": None, "dtype": None, "device": None},
        ),
        lambda: (
            loaded,
            {
                "dtype": torch.float64,
                "device": "cpu",
                "a_activation": None,
                "norm_group_size": None,
                "dt_limit": None,
                "revision": None,
            },
        ),
        lambda: (adapted, {"rank": 2, "alpha": 3.0, "targets": ("in_proj",), "base": ""}),
        lambda: (mk.add_lora, {"model": make_model(), "rank": 2}),
        lambda: (mk.merge_lora, {"model": mk.add_lora(make_model(), 2)}),
        lambda: (mk.save_lora, {"model": mk.add_lora(make_model(), 2), "directory": tempfile.mkdtemp(), "base": "x"}),
        lambda: (quantized, {"model": make_model(), "bits": 4, "group_size": 32}),
        lambda: (
            quantized,
            {"model": make_model(), "bits": 8, "activations": "int8", "head_bits": 16, "in_place": True},
        ),
        lambda: (reported, {"model": make_model(), "ids_bs": torch.ones(1, 4, dtype=torch.int64)}),
        lambda: (parked, {"key": "k", "state": made_state(), "n": 1, "new_key": "l", "versions": 2, "max_bytes": None}),
        lambda: (continued, {"state": made_state(), "ids": [4]}),
        lambda: (text_of, {"model": make_model(), "tokenizer": mk.load_tokenizer("bytes"), "prompt": "hi", **text}),
        lambda: (text_of, {"model": make_model(), "tokenizer": mk.load_tokenizer("bytes"), "prompt": MESSAGES, **text}),
        lambda: (spoken, {"text": "é", "ids": [72, 105], "messages": MESSAGES, "add_generation_prompt": True}),
        lambda: (templated, {"template": TEMPLATE, "messages": MESSAGES, "tools": None, "named": {"bos_token": "x"}}),
        lambda: (mk.load_tokenizer, {"path_or_hub_name": "bytes"}),
        lambda: (prefixed, {"max_entries": 2, "max_bytes": 10**6, "ids": [1, 2, 3]}),
        lambda: (decoded, {"model": make_model(), "ids_b": torch.tensor([1, 2]), "batch": 2}),
        lambda: (chosen, {"logits_bw": None, **SAMPLING}),
        lambda: (with_backend, {"name": "torch"}),
        lambda: (grouped, {"module": make_model(), "weight_decay": 0.1, "muon": True, "hooks": True}),
        lambda: (stacked, {"block": BLOCK, "n_layer": 2, "layers": None, "virtual": None, "multi_gate": None}),
        lambda: (
            modelled,
            {"block": BLOCK, "n_layer": 2, "vocab_size": 20, "tie_embeddings": True, "pad_vocab_size_multiple": 8},
        ),
        lambda: (both_ways, {"block": BLOCK, "n_layer": 2, "virtual": None}),
        lambda: (latent, {"block": BLOCK, "n_layer": 2, "d_input": 5, "d_output": 3, "stack_latents": ()}),
        lambda: (gated, {"n_streams": 2}),
        lambda: (mk.depth_aware_bias, {"n_mixing": 3, "n_streams": 2}),
        lambda: (scheduled, {"schedule": mk.Cyclic(4)}),
        lambda: (cyclic, {"n": 4}),
        lambda: (custom, {"indices": (0, 1, 2, 1)}),
        lambda: (
            configured,
            {
                "text": make_model().config.to_json(),
                "n_layer": 2,
                "block": {"family": "mamba2", **BLOCK.to_dict()},
                "virtual": {"schedule": "Cyclic", "n": 3},
            },
        ),
        lambda: official_call("Mamba"),
        lambda: official_call("Mamba2"),
        lambda: (explained, {"call": mk.Mamba2(BLOCK), "x": torch.randn(1, 3, 8)}),
        lambda: (only_tensor, {"block": mk.Mamba2(BLOCK), "x_bsd": torch.randn(1, 3, 8)}),
        lambda: (states_of, {"model": make_model(), "batch": 2}),
        lambda: (mk.accelerate, {"model": torch.nn.Linear(2, 2)}),
        lambda: (
            Constraint,
            {"wanted": {"regex": "[ab]+"}, "tokenizer": Bytes(), "vocab_size": VOCABULARY, "max_new_tokens": 4},
        ),
        lambda: (TrainSettings, training),
        lambda: (mk.SsdPath, {"algorithm": "serial", "chunk_len": 8, "backend": "auto"}),
        lambda: (Engine, {"model": make_model(), "max_rows": 2, "prefill_chunk": 3, "prefill_rows": 1}),
        lambda: (served, {"model": make_model(), "backend": "auto", "speculate": "auto", "max_rows": 2}),
        lambda: (continued_text, {"model": make_model(), "ids": [1, 2], "speculate": "ngram", "draft": None}),
        lambda: (split_sequences, {"model": make_model(), "mesh": one_rank(), "sum_gradients": True}),
        lambda: (split_widths, {"model": make_model(), "mesh": one_rank()}),
        lambda: (
            in_parts,
            {
                "model": make_model(),
                "tensors": dict(make_model().named_parameters()),
                "cache": make_model().fresh_cache(2),
            },
        ),
        lambda: (mk.parallel.token_losses, {"model": make_model(), "ids_bs": ONES, "next_bs": ONES, "cache": None}),
        lambda: (sent_to_llama, {"model": make_model(), "kind": "F32"}),
    ]


AROUND, ODD_MODELS = around(), odd_models()
