"""Class rows: where they stand, and that calls, steps and primes in any order emit one and the same sequence."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocks import CONFIGS
from compare import check
from mambakit import caches
from mambakit.models.class_tokens import ClassCache, ClassTokens, Cursor, fresh_cursors, length_after, plan
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.models.latent_model import LatentConfig, LatentModel
from mambakit.models.multi_gate import MultiGateConfig
from mambakit.models.schedules import Cyclic
from mambakit.models.stack import Stack, StackConfig
from oracles import composition

NAMES = "ABCD"


@pytest.mark.parametrize(
    ("length", "markers", "want"),
    [
        (4, ("start",), "A0 0 1 2 3"),
        (4, ("middle",), "0 1 A0 2 3"),
        (5, ("middle",), "0 1 A0 2 3 4"),
        (4, ("end",), "0 1 2 3 A0"),
        (4, (1, 3), "0 A0 1 2 A1 3"),
        (4, (4, 9), "0 1 2 3"),
        (2, ("end", 0, "start", "end"), "A2 A1 0 1 A0 A3"),
        (3, (1, "middle", "start"), "A2 0 A1 A0 1 2"),
        (1, ("middle", "start", 0), "A1 A0 A2 0"),
        (3, (2, "end", 7, 3), "0 1 A0 2 A1"),
    ],
)
def test_where_rows_stand(length, markers, want):
    named = {f"A{i}": ("A", i) for i in range(4)} | {str(t): t for t in range(length)}
    expected = [named[word] for word in want.split()]
    assert composition.insert(list(range(length)), markers, "A") == expected
    places, cursor = plan(markers, Cursor(0, length), length)
    assert [i if i < length else ("A", i - length) for i in places] == expected
    assert cursor == Cursor(len(expected), length)
    assert length_after(markers, length) == len(expected)


class Chain:
    """Levels that pass symbols on, with `plan` and cursors alone."""

    def __init__(self, levels: list[tuple], length: int | None):
        self.levels = levels
        modules = [(0, ClassTokens(markers, 1)) for markers in levels]
        self.cursors = list(fresh_cursors(modules, length))

    def send(self, symbols: list, prime: bool = False) -> list:
        for n, markers in enumerate(self.levels):
            q = len(symbols)
            places, self.cursors[n] = plan(markers, self.cursors[n], q, prime)
            symbols = [symbols[i] if i < q else (NAMES[n], i - q) for i in places]
        return symbols


def whole(levels: list[tuple], length: int) -> list:
    symbols = list(range(length))
    for name, markers in zip(NAMES, levels, strict=False):
        symbols = composition.insert(symbols, markers, name)
    return symbols


def test_any_order_of_calls_emits_one_sequence():
    """4000 random chains of one to four levels, cut and primed at random, against inserting into a list."""
    choose = random.Random(0)
    emitted_ahead = 0
    for _ in range(4000):
        length, known = choose.randint(1, 9), choose.random() < 0.7
        kinds = ["start", "middle", "end"] if known else ["start"]
        levels = [
            tuple(choose.choice([*kinds, choose.randint(0, 11)]) for _ in range(choose.randint(0, 4)))
            for _ in range(choose.randint(1, 4))
        ]
        chain, got, t = Chain(levels, length if known else None), [], 0
        while t < length:
            for _ in range(choose.choice([0, 0, 1, 2])):
                ahead = chain.send([], prime=True)
                emitted_ahead += len(ahead)
                got += ahead
            size = choose.choice([0, 1, 1, 2, length])
            got += chain.send(list(range(t, min(t + size, length))))
            t = min(t + size, length)
        # Without a length, a row beyond the end cannot be told from one before the next token.
        if known and choose.random() < 0.5:
            assert chain.send([], prime=True) == []
        assert got == whole(levels, length), (levels, length, known)
    assert emitted_ahead > 2000


MARKERS = st.lists(st.sampled_from(["start", "middle", "end"]) | st.integers(0, 8), max_size=4).map(tuple)


@given(levels=st.lists(MARKERS, min_size=1, max_size=3), length=st.integers(1, 7), primed=st.integers(0, 7))
def test_steps_with_one_prime(levels, length, primed):
    chain, got = Chain(levels, length), []
    for t in range(length):
        if t == primed:
            first = chain.send([], prime=True)
            assert chain.send([], prime=True) == []
            got += first
        got += chain.send([t])
    assert got == whole(levels, length)


GATE = MultiGateConfig(n_streams=3, init_bias=-0.5)
BASE = LatentConfig(block=CONFIGS["mamba2"], n_layer=2, d_input=3, d_output=4, class_tokens=("middle", "start", 3))
MODELS: dict[str, tuple[dict, int | None]] = {
    "tokens": ({}, None),
    "stack": ({"class_tokens": (), "stack_latents": ("end", 1, "start"), "block": CONFIGS["mamba3-quaternion"]}, None),
    "layers": ({"class_tokens": (), "virtual": Cyclic(3), "layer_latents": (("start", "end"), (2,))}, None),
    "all": (
        {
            "virtual": Cyclic(4),
            "stack_latents": ("end", 4),
            "layer_latents": (("middle", "start"), ("end",)),
            "multi_gate": GATE,
            "d_intermediate": 5,
        },
        None,
    ),
    "horizon": ({"virtual": Cyclic(4), "stack_latents": ("end", 4), "layer_latents": (("middle",), ("start",))}, 2),
    "gated-horizon": (
        {
            "virtual": Cyclic(4),
            "layer_latents": (("middle",), ("start", "end")),
            "multi_gate": GATE,
            "class_tokens": (),
        },
        1,
    ),
    "none-differentiated": ({"layer_latents": (("middle",), ("start",)), "multi_gate": GATE}, 0),
}
every = pytest.mark.parametrize("name", MODELS)
LENGTH = 6


def make_model(name: str) -> LatentModel:
    torch.manual_seed(0)
    options, horizon = MODELS[name]
    model = LatentModel(replace(BASE, **options), grad_horizon=horizon, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def inputs(batch: int = 2) -> Tensor:
    return torch.randn(batch, LENGTH, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def with_gradients(model: LatentModel, run, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = run(model, x)
    head = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
    named = {"x": x, **dict(model.named_parameters())}
    grads = torch.autograd.grad((y * head).sum(), list(named.values()), allow_unused=True)
    pairs = zip(named.items(), grads, strict=True)
    return {"y": y} | {f"d {n}": torch.zeros_like(t) if g is None else g for (n, t), g in pairs}


def place(x: Tensor, rows: Tensor, markers: tuple) -> Tensor:
    """Rows into `[b, s, ...]`, one by one."""
    items = composition.insert(list(range(x.shape[1])), markers, "row")
    return torch.stack([x[:, item] if isinstance(item, int) else rows[item[1]].expand_as(x[:, 0]) for item in items], 1)


def by_hand(model: LatentModel, x: Tensor) -> Tensor:
    stack, config = model.stack, model.config
    if model.class_tokens is not None:
        x = place(x, model.class_tokens.weight, config.class_tokens)
    x = model.in_proj(x)
    if config.stack_latents:
        x = place(x, stack.stack_latents.weight, config.stack_latents)
    n = len(stack.order)
    cut = 0 if stack.grad_horizon is None else n - stack.grad_horizon
    carry, streams = x - x.detach(), stack.residual.seed(x)
    for q, real in enumerate([*stack.order, None]):
        if q == cut and cut:
            x = x.detach() + carry
            streams = None if streams is None else streams.detach() + carry[:, :, None]
        if real is None:
            break
        if config.layer_latents and config.layer_latents[real]:
            markers, rows = config.layer_latents[real], stack.layer_latents[str(real)].weight  # type: ignore[index]
            assert isinstance(rows, Tensor)
            x, carry = place(x, rows, markers), place(carry, rows - rows.detach(), markers)
            streams = None if streams is None else place(streams, rows[:, None], markers)
        x, streams = stack.residual.join(q, x, streams, stack.layers[real](x)[0])
    return model.out(x)


def rows_ahead(model: LatentModel, empty: Tensor, cache) -> Tensor:
    """The outputs of all rows; `prime` returns the last."""
    if model.class_tokens is not None:
        return model.advance(empty, cache, {}, prime=True)[0]
    return model.out(model.stack.advance(model.in_proj(empty), cache, {}, prime=True)[0])


def in_parts(*cuts: int, prime: bool = False):
    def run(model, x):
        cache, outputs = model.fresh_cache(len(x), x.shape[1]), []
        for start, stop in zip((0, *cuts), (*cuts, x.shape[1]), strict=True):
            if prime:
                before = cache
                _, cache = model.prime(cache)
                if offset(cache) > offset(before):
                    outputs.append(rows_ahead(model, x[:, :0], before))
            y, cache = model(x[:, start:stop], cache)
            outputs.append(y)
        return torch.cat(outputs, 1)

    return run


def offset(cache) -> int:
    """How much has left the last level."""
    inner = cache.inner
    return inner.cursors[-1].offset if isinstance(inner, ClassCache) else cache.cursors[-1].offset


@every
def test_a_whole_call_and_its_parts(name):
    model, x = make_model(name), inputs()
    want = with_gradients(model, by_hand, x)
    check(1e-10, with_gradients(model, lambda model, x: model(x)[0], x), want)
    for run in (in_parts(2, 3), in_parts(1, 1, 5), in_parts(0, 3, prime=True), in_parts(1, 2, 3, 4, 5, prime=True)):
        check(1e-9, with_gradients(model, run, x), want)


def cursors_of(cache) -> list[Cursor]:
    return [*cache.cursors, *(cursors_of(cache.inner) if isinstance(cache.inner, ClassCache) else ())]


def tensors_of(cache) -> list[Tensor]:
    if isinstance(cache, Tensor):
        return [cache]
    return [t for part in cache for t in tensors_of(part)] if isinstance(cache, tuple) else []


@every
def test_steps_return_the_last_output(name):
    """Each step's output is the whole call's at the place where the step ended; so is prime's."""
    model, x = make_model(name), inputs()
    want, _ = model(x)
    for primed in (False, True):
        cache = model.fresh_cache(2, LENGTH)
        seen = 0
        for t in range(LENGTH):
            if primed:
                before = cache
                y, cache = model.prime(cache)
                if y is None:
                    assert cursors_of(cache) == cursors_of(before)
                    pairs = zip(tensors_of(cache), tensors_of(before), strict=True)
                    assert all(torch.equal(*pair) for pair in pairs)
                else:
                    seen += 1
                    check(1e-10, {"y": y}, {"y": want[:, offset(cache) - 1]})
            y, cache = model.step(x[:, t], cache)
            check(1e-10, {"y": y}, {"y": want[:, offset(cache) - 1]})
        assert offset(cache) == want.shape[1]
        assert seen > 0 or not primed
        with torch.no_grad(), pytest.raises(ValueError, match=f"said to have {LENGTH} tokens"):
            model.step(x[:, 0], cache)


@every
def test_absent_tokens_do_not_count_for_values(name):
    """A mask leaves rows where the padded sequence has them, and what is absent has no effect."""
    model, x = make_model(name), inputs(1)
    mask = torch.tensor([[False, True, True, False, True, False]])
    want = model(x, mask_bs=mask)[0]
    noise = x.masked_fill(~mask[..., None], 1e3)
    got, _ = model(noise, mask_bs=mask)
    check(1e-12, {"y": got}, {"y": want})
    cache = model.fresh_cache(1, LENGTH)
    first, cache = model(noise[:, :4], cache, mask_bs=mask[:, :4])
    last, _ = model(x[:, 4:], cache, mask_bs=mask[:, 4:])
    check(1e-10, {"y": torch.cat([first, last], 1)}, {"y": want})


def test_start_and_end_stand_around_the_present_tokens():
    model = LatentModel(replace(BASE, class_tokens=("start", "end")), dtype=torch.float64)
    x, mask = inputs(1), torch.tensor([[False, True, True, False, True, False]])
    got, _ = model(x, mask_bs=mask)
    there = [0, *(t + 1 for t in range(LENGTH) if mask[0, t]), LENGTH + 1]
    check(1e-12, {"y": got[:, there]}, {"y": model(x[:, mask[0]])[0]})


def test_without_cursors():
    """A call is a whole sequence; steps leave rows out, or refuse if rows wait for a length."""
    config = StackConfig(block=CONFIGS["mamba1"], n_layer=2, stack_latents=("start",), layer_latents=((2,), ()))
    stack = Stack(config, dtype=torch.float64)
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    plain = Stack(StackConfig(block=CONFIGS["mamba1"], n_layer=2), dtype=torch.float64)
    plain.load_state_dict({n: t for n, t in stack.state_dict().items() if "latents" not in n})
    cache = want_cache = None
    for t in range(4):
        y, cache = stack.step(x[:, t], cache)
        want, want_cache = plain.step(x[:, t], want_cache)
        assert torch.equal(y, want)
    assert type(stack(x)[1]) is tuple
    assert stack(x, cache)[0].shape[1] == 6
    for markers in ("middle", "end"):
        late = Stack(StackConfig(block=CONFIGS["mamba1"], n_layer=2, stack_latents=(markers,)), dtype=torch.float64)
        assert late(x)[0].shape[1] == 5
        with pytest.raises(ValueError, match="cursors"):
            late.step(x[:, 0])
        with pytest.raises(ValueError, match="length"):
            late.step(x[:, 0], late.fresh_cache(2))
    model = make_model("tokens")
    with pytest.raises(ValueError, match="cursors"):
        model.step(inputs()[:, 0])
    for part in (stack, model):
        with pytest.raises(ValueError, match="cursors"):
            part.prime(part.fresh_cache(2)[0])  # type: ignore[arg-type]


def test_an_unknown_length_is_enough_for_start_and_numbers():
    config = ModelConfig(
        block=CONFIGS["mamba3"], n_layer=2, vocab_size=9, stack_latents=("start",), layer_latents=((2,), ("start",))
    )
    torch.manual_seed(0)
    model = LanguageModel(config, dtype=torch.float64)
    ids = torch.randint(0, 9, (2, 5))
    whole, _ = model(ids)
    assert whole.shape == (2, 8, 9)
    first, cache = model(ids[:, :3], model.fresh_cache(2))
    second, cache = model(ids[:, 3:4], cache)
    last, cache = model.step(ids[:, 4], cache)
    check(1e-12, {"y": torch.cat([first, second, last[:, None]], 1)}, {"y": whole})


def test_caches_below_the_horizon_carry_no_gradients():
    """Not even those that no row has reached yet."""
    config = StackConfig(block=CONFIGS["mamba2"], n_layer=2, layer_latents=((), ("start",)))
    stack = Stack(config, grad_horizon=1, dtype=torch.float64)
    cache = stack.fresh_cache(2)
    for tensor in tensors_of(cache):
        tensor.requires_grad_()
    assert isinstance(cache, ClassCache)
    y, after = stack.prime(cache)
    assert isinstance(after, ClassCache)
    assert y is not None
    assert not any(t.requires_grad for t in tensors_of(after.inner[0]))
    assert all(t.requires_grad for t in tensors_of(after.inner[1]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled():
    stack = make_model("horizon").stack
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    compiled = torch.compile(stack, backend="aot_eager", fullgraph=True)
    check(1e-12, {"y": compiled(x)[0]}, {"y": stack(x)[0]})


def test_caches_with_cursors_are_values(tmp_path):
    model, x = make_model("all"), inputs()
    with torch.no_grad():
        _, cache = model(x[:, :3], model.fresh_cache(2, LENGTH))
        caches.save(cache, tmp_path / "cache")
        loaded = caches.load(tmp_path / "cache")
        want, _ = model(x[:, 3:], cache)
        assert torch.equal(model(x[:, 3:], loaded)[0], want)
        swapped, _ = model(x[[1, 0], 3:], caches.select(cache, [1, 0]))
    check(1e-14, {"y": swapped}, {"y": want[[1, 0]]})
    with pytest.raises(ValueError, match="offset"):
        caches.concat([cache, model.fresh_cache(2, LENGTH)])


def test_what_class_rows_refuse():
    model, x = make_model("all"), inputs()
    flags = torch.zeros(2, LENGTH, dtype=torch.bool)
    with pytest.raises(ValueError, match="row of its own"):
        model(x, reset_bs=flags)
    with pytest.raises(ValueError, match="row of its own"):
        model.stack(model.in_proj(x), reset_bs=flags)
    with pytest.raises(ValueError, match="row of its own"):
        model(x[:1], cu_seqlens=torch.tensor([0, LENGTH]))
    with pytest.raises(ValueError, match="tokens here, but 6 have come"):
        model(x, model.fresh_cache(2, 5))
    stack_cache = model.stack.fresh_cache(2, LENGTH)
    assert isinstance(stack_cache, ClassCache)
    with pytest.raises(ValueError, match="levels of class latents"):
        model.stack(model.in_proj(x), stack_cache._replace(cursors=stack_cache.cursors[:2]))
    with pytest.raises(ValueError, match="expected one"):
        model(x, stack_cache)
    with pytest.raises(ValueError, match="ClassCache"):
        Stack(StackConfig(block=CONFIGS["mamba2"], n_layer=2)).step(torch.zeros(2, 8), stack_cache)


def test_no_tokens():
    """Rows that precede a token never come; with or without cursors, a sequence of none is the same."""
    model, x = make_model("all"), inputs()
    y, _ = model(x[:, :0], model.fresh_cache(2, 0))
    check(1e-14, {"y": y}, {"y": model(x[:, :0])[0]})
    y, cache = model(x[:, :0], model.fresh_cache(2, LENGTH))
    assert y.shape[1] == 0
    check(1e-10, {"y": model(x, cache)[0]}, {"y": model(x)[0]})


def test_initial_rows_are_small():
    rows = ClassTokens(tuple(range(50)), 200).weight
    assert rows.shape == (50, 200)
    assert rows.std().item() == pytest.approx(0.02, rel=0.1)
