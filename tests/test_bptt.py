"""A sequence in segments is one call: values and gradients, with the memory of one segment."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mambakit as mk
from compare import check, gradients, leaves
from mambakit import caches
from mambakit.tools.measure import peak_bytes
from mambakit.training.segments import run_in_segments, segments

BLOCKS = {
    "mamba1": lambda **made: mk.Mamba1(mk.Mamba1Config(d_model=8, state_rank=4), **made),
    "mamba2": lambda **made: mk.Mamba2(mk.Mamba2Config(d_model=8, state_rank=8, per_head_dim=8), **made),
    "mamba3": lambda **made: mk.Mamba3(mk.Mamba3Config(d_model=8, state_rank=8, per_head_dim=8), **made),
    "mamba3_double": lambda **made: mk.Mamba3(mk.Mamba3Config(d_model=8, state_rank=8, per_head_dim=8), **made),
    "mamba3_quaternion_mimo": lambda **made: mk.Mamba3(
        mk.Mamba3Config(d_model=8, state_rank=8, per_head_dim=8, rotation="quaternion", is_mimo=True, mimo_rank=2),
        **made,
    ),
}
F64 = torch.float64


class Case:
    """A block in float64, an input of 11 tokens and an entering cache, all of them leaves."""

    def __init__(self, name: str):
        self.block: Any = BLOCKS[name](dtype=F64)
        with torch.no_grad():
            _, entering = self.block(torch.randn(2, 3, 8, dtype=F64))
        self.entering = entering.with_pathway("double") if name == "mamba3_double" else entering
        entering = leaves({"x": torch.randn(2, 11, 8, dtype=F64), **tensors_of(self.entering)})
        self.entering = self.entering._replace(**{f: t for f, t in entering.items() if f != "x"})
        self.inputs = entering | dict(self.block.named_parameters())
        y, cache = self.block(self.inputs["x"])
        self.heads = {name: torch.randn_like(t) for name, t in {"y": y, **tensors_of(cache)}.items()}

    def results(self, run: Callable[..., tuple[Tensor, Any]], **options: Any) -> dict[str, Tensor]:
        """Outputs, last cache and the gradients of every input, of `run(block, x, cache)`."""
        y, cache = run(self.block, self.inputs["x"], self.entering, **options)
        assert getattr(cache, "pathway", None) == getattr(self.entering, "pathway", None)
        outputs = {"y": y, **tensors_of(cache)}
        return outputs | {f"d_{name}": grad for name, grad in gradients(outputs, self.heads, self.inputs).items()}


def tensors_of(cache: Any) -> dict[str, Tensor]:
    return {field: t for field, t in cache._asdict().items() if isinstance(t, Tensor)}


def one_call(block, x, cache, **options):
    return block(x, cache, **options)


def by_hand(block, x, cache, segment_len):
    """Segments with the cache detached between them, each with its graph kept."""
    outputs = []
    for start in range(0, x.shape[1], segment_len):
        if start:
            cache = caches.detach(cache)
        y, cache = block(x[:, start : start + segment_len], cache)
        outputs.append(y)
    return torch.cat(outputs, 1), cache


@pytest.mark.parametrize("segment_len", [1, 4, 11, 20])
@pytest.mark.parametrize("name", BLOCKS)
def test_segments_are_one_call(name, segment_len):
    case = Case(name)
    want = case.results(one_call)
    check(1e-9, case.results(run_in_segments, segment_len=segment_len), want)
    assert all(want[f"d_{tensor}"].abs().max() > 0 for tensor in case.inputs)  # nothing agrees by being zero


@pytest.mark.parametrize("name", BLOCKS)
def test_masks_and_resets_are_cut_along(name):
    case = Case(name)
    flags = {"mask_bs": torch.rand(2, 11) > 0.3, "reset_bs": torch.rand(2, 11) > 0.7}
    assert not flags["mask_bs"].all()
    assert flags["reset_bs"].any()
    check(1e-9, case.results(run_in_segments, segment_len=4, **flags), case.results(one_call, **flags))


@pytest.mark.parametrize("name", BLOCKS)
def test_truncated_gradients_stop_between_segments(name):
    case = Case(name)
    got = case.results(run_in_segments, segment_len=4, truncated=True)
    check(1e-9, got, case.results(by_hand, segment_len=4))
    full = case.results(one_call)
    check(1e-9, got, {key: t for key, t in full.items() if not key.startswith("d_")})
    with pytest.raises(AssertionError, match="d_x"):
        check(1e-9, got, full)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_generator_leaves_the_truncated_gradients(name):
    block: Any = BLOCKS[name](dtype=F64)
    x, target = torch.randn(2, 11, 8, dtype=F64), torch.randn(2, 11, 8, dtype=F64)
    y, last = run_in_segments(block, x, segment_len=4, truncated=True)
    (y * target).sum().backward()
    want = {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
    block.zero_grad()

    outputs, places, cache = [], [], None
    for where, y_bld, cache in segments(block, x, segment_len=4):
        (y_bld * target[:, where]).sum().backward()
        outputs.append(y_bld.detach())
        places.append(where)
        assert not any(t.requires_grad for t in cache if isinstance(t, Tensor))
    assert places == [slice(0, 4), slice(4, 8), slice(8, 11)]
    got = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
    check(1e-9, got, want)
    check(1e-9, {"y": torch.cat(outputs, 1), **tensors_of(cache)}, {"y": y, **tensors_of(last)})


def test_paths_reach_the_block():
    block = BLOCKS["mamba1"]()
    with pytest.raises(ValueError, match="takes no path"):
        run_in_segments(block, torch.randn(1, 4, 8), segment_len=2, path=mk.SsdPath.serial())


def test_no_tokens_and_no_gradients():
    block = BLOCKS["mamba2"]()
    y, _ = run_in_segments(block, torch.randn(2, 0, 8), segment_len=3)
    assert y.shape == (2, 0, 8)
    with torch.no_grad():
        y, _ = run_in_segments(block, torch.randn(2, 5, 8), segment_len=3)
    assert not y.requires_grad


@pytest.mark.parametrize("run", [run_in_segments, segments])
def test_what_cannot_be_cut_says_so(run):
    block, x = BLOCKS["mamba2"](), torch.randn(1, 6, 8)
    for segment_len in (0, -3, 2.5):
        with pytest.raises(ValueError, match=r"segment_len is .*, expected a positive integer"):
            run(block, x, segment_len=segment_len)
    for wrong, told in ((None, "x_bsd has to be a tensor"), (x.to_sparse(), "sparse_coo"), (x[0, 0], "a batch and a")):
        with pytest.raises(ValueError, match=told):
            run(block, wrong, segment_len=2)
    with pytest.raises(ValueError, match=r"truncated is tensor\(\[0., 0.\]\), expected True or False"):
        run_in_segments(block, x, segment_len=2, truncated=torch.zeros(2))
    with pytest.raises(ValueError, match="mask_bs has to be a tensor, got str"):
        run(block, x, segment_len=2, mask_bs="x")
    with pytest.raises(ValueError, match=r"cu_seqlens.*reset_bs"):
        run(block, x, segment_len=2, cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match=r"mask_bs has shape \(1, 5\), expected \(1, 6\)"):
        run(block, x, segment_len=2, mask_bs=torch.ones(1, 5, dtype=torch.bool))


SEGMENT = 64


def wide_block(name: str) -> Any:
    return {
        "mamba1": lambda: mk.Mamba1(mk.Mamba1Config(d_model=32, state_rank=4)),
        "mamba2": lambda: mk.Mamba2(mk.Mamba2Config(d_model=32, state_rank=16, per_head_dim=16)),
        "mamba3": lambda: mk.Mamba3(mk.Mamba3Config(d_model=32, state_rank=16, per_head_dim=16)),
    }[name]()


def forward_and_backward(run: Callable[..., Any], block: Any, tokens: int) -> Callable[[], None]:
    x = torch.randn(2, tokens, 32, requires_grad=True)

    def task() -> None:
        y, _ = run(block, x)
        y.backward(torch.ones_like(y))
        x.grad = None
        block.zero_grad()

    return task


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
def test_memory_is_that_of_one_segment(name):
    block = wide_block(name)

    def run(block, x):
        return run_in_segments(block, x, segment_len=SEGMENT)

    few, many = (peak_bytes(forward_and_backward(run, block, n * SEGMENT)) for n in (8, 16))
    plain = peak_bytes(forward_and_backward(lambda block, x: block(x), block, 16 * SEGMENT))
    own = 3 * 8 * SEGMENT * 2 * 32 * 4  # y, its gradient and that of x, in 8 segments more
    carried = 8 * sum(t.nbytes for t in block.fresh_cache(2) if isinstance(t, Tensor))
    assert many - few <= own + carried + 1024, f"{many - few} bytes for 8 segments more, {own + carried} accounted for"
    assert many < 0.4 * plain, f"{many} bytes in segments, {plain} in one call"


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
def test_the_generator_needs_no_more_for_a_longer_sequence(name):
    block = wide_block(name)

    def task(x: Tensor) -> None:
        for _, y, _ in segments(block, x, segment_len=SEGMENT):
            y.square().sum().backward()
        block.zero_grad()

    few, many = (peak_bytes(lambda n=n: task(torch.zeros(2, n * SEGMENT, 32))) for n in (4, 8))
    assert many - few <= 4 * SEGMENT * 2 * 32 * 4 + 1024  # the input itself
