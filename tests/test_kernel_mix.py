"""The kernels around the scan equal their plain twins on random shapes, at any number of threads, in every build."""

import os
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocks import MAMBAS, make_block, random_cache, tokens
from blocks import results as block_outcome
from compare import check
from mambakit import SsdPath, use_backend
from mambakit.kernels.cpu.library import library, why_missing
from mambakit.ops.causal_conv import CAUSAL_CONV, convolve_in_parts
from mambakit.ops.expand_ranks import EXPAND_RANKS, expand_ranks
from mambakit.ops.mamba3_prepare import MAMBA3_PREPARE, mamba3_prepare
from mambakit.ops.norm import FINISH, finish, rms_norm
from mambakit.ops.quaternion_prepare import QUATERNION_PREPARE, quaternion_prepare

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=f"no kernels: {why_missing()}")

# For each kernel, in two halves: 200 shapes in all. MAMBAKIT_FUZZ=2000 for a long run.
SHAPES = int(os.environ.get("MAMBAKIT_FUZZ", "34"))
VALUE, GRADIENT = 1e-5, 1e-4

Case = tuple[Callable[..., list[Tensor]], dict[str, Tensor]]


@pytest.fixture(params=[1, 2])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def sometimes(chance: float, tensor: Tensor) -> Tensor | None:
    return tensor if random.random() < chance else None


def some_segments(b: int, s: int) -> Tensor:
    return (torch.rand(b, s) < random.choice([0.02, 0.2, 0.8])).long().cumsum(1) * random.choice([1, 3])


def in_a_wider_row(tensor: Tensor) -> Tensor:
    """The same values as a slice of rows that hold more, as a block's projection does."""
    return torch.nn.functional.pad(tensor, (random.randint(0, 5), random.randint(0, 5)))[..., : tensor.shape[-1]]


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def conv_case() -> Case:
    b, s, k = random.randint(1, 3), random.choice([0, 1, 2, 5, 33, 64, 65, 150]), random.choice([1, 2, 3, 4, 4, 4, 7])
    widths = [random.choice([1, 3, 16, 17, 40, 530]) for _ in range(random.randint(1, 3))]
    v = sum(widths)
    segments_bs = sometimes(0.5, some_segments(b, s))
    lengths_b = sometimes(0.4, torch.randint(0, s + 1, (b,)))
    if lengths_b is not None and segments_bs is not None:
        # As rows are laid out: whatever lies beyond a row's end repeats the segment of its last token.
        for row, length in enumerate(lengths_b.tolist()):
            segments_bs[row, length:] = segments_bs[row, max(length - 1, 0) : max(length, 1)]
    silu = random.random() < 0.7

    def run(backend: str, x, weight, bias=None, window=None) -> list[Tensor]:
        tensors = (x, weight, bias, window, segments_bs, lengths_b)
        parts, after = convolve_in_parts(*tensors, widths, silu=silu, backend=backend)
        return [*parts, after]

    return run, given(
        x=in_a_wider_row(torch.randn(b, s, v)),
        weight=torch.randn(v, k),
        bias=sometimes(0.7, torch.randn(v)),
        window=sometimes(0.7, torch.randn(b, v, k)),
    )


def finish_case() -> Case:
    b, s, m = random.randint(1, 3), random.choice([0, 1, 2, 17, 70]), random.choice([1, 1, 2, 4])
    group = random.choice([1, 3, 16, 17, 64, 100])
    i = group * random.randint(1, 5)
    options = {"group_size": group, "norm_before_gate": random.random() < 0.5, "eps": random.choice([1e-5, 0.03])}

    def run(backend: str, y, x, skip, z, weight=None, **mimo) -> list[Tensor]:
        return [finish(y, x, skip, z, weight, backend=backend, **options, **mimo)]

    return run, given(
        y=torch.randn(b, s, m, i),
        x=in_a_wider_row(torch.randn(b, s, i)),
        skip=torch.randn(i),
        z=in_a_wider_row(torch.randn(b, s, i)),
        weight=sometimes(0.7, torch.randn(i)),
        mimo_x_mi=sometimes(0.4, torch.randn(m, i)),
        mimo_z_mi=sometimes(0.4, torch.randn(m, i)),
        mimo_o_mi=sometimes(0.4, torch.randn(m, i)),
    )


def norm_case() -> Case:
    group = random.choice([1, 3, 16, 17, 64, 100])
    shape = (random.randint(1, 3), random.choice([0, 1, 2, 17, 70]), group * random.randint(1, 5))

    def run(backend: str, x, weight=None) -> list[Tensor]:
        return [rms_norm(x, weight, 1e-4, group, backend=backend)]

    return run, given(x=in_a_wider_row(torch.randn(shape)), weight=sometimes(0.7, torch.randn(shape[-1])))


def prepare_case() -> Case:
    b, s, m, g = (
        random.randint(1, 3),
        random.choice([0, 1, 2, 40, 64, 65, 150]),
        random.choice([1, 1, 4]),
        random.randint(1, 2),
    )
    h, r = g * random.randint(1, 3), 2 * random.choice([1, 2, 3, 8, 9, 16, 25, 64])
    a = random.choice([0, r // 4, r // 2, random.randint(0, r // 2)])
    options = {
        "eps": random.choice([1e-5, 0.03]),
        "rotation_range": random.choice([1.0, 2.0]),
        "pairing": random.choice(["interleaved", "half"]),
        "segments_bs": sometimes(0.5, some_segments(b, s)),
    }

    def run(backend: str, b, c, b_weight, c_weight, b_bias, c_bias, rot, dt, angle=None) -> list[Tensor]:
        turned_b, turned_c, last = mamba3_prepare(
            b, c, b_weight, c_weight, b_bias, c_bias, rot, dt, angle, **options, backend=backend
        )
        # Angles are defined up to whole turns.
        return [turned_b, turned_c, last.cos(), last.sin()]

    return run, given(
        b=in_a_wider_row(torch.randn(b, s, m * g * r)).unflatten(-1, (m, g, r)),
        c=in_a_wider_row(torch.randn(b, s, m * g * r)).unflatten(-1, (m, g, r)),
        b_weight=torch.randn(r),
        c_weight=torch.randn(r),
        b_bias=torch.randn(h, m, r),
        c_bias=torch.randn(h, m, r),
        rot=in_a_wider_row(torch.randn(b, s, a)),
        dt=torch.rand(b, s, h),
        angle=sometimes(0.7, 3 * torch.randn(b, h, a)),
    )


def quaternion_case() -> Case:
    b, s, m, g = (
        random.randint(1, 3),
        random.choice([0, 1, 2, 40, 64, 65, 150]),
        random.choice([1, 1, 4]),
        random.randint(1, 2),
    )
    h, r = g * random.randint(1, 3), random.choice([1, 4, 8, 18, 32, 50, 64, 76])
    j = random.choice([0, r // 8, r // 4, random.randint(0, r // 4)])
    options = {
        "eps": random.choice([1e-5, 0.03]),
        "rotation_range": random.choice([1.0, 2.0]),
        "segments_bs": sometimes(0.5, some_segments(b, s)),
    }

    def run(backend: str, b, c, b_weight, c_weight, b_bias, c_bias, rot, dt, carry=None) -> list[Tensor]:
        tensors = (b, c, b_weight, c_weight, b_bias, c_bias, rot, dt, carry)
        return list(quaternion_prepare(*tensors, **options, backend=backend))

    return run, given(
        b=in_a_wider_row(torch.randn(b, s, m * g * r)).unflatten(-1, (m, g, r)),
        c=in_a_wider_row(torch.randn(b, s, m * g * r)).unflatten(-1, (m, g, r)),
        b_weight=torch.randn(r),
        c_weight=torch.randn(r),
        b_bias=torch.randn(h, m, r),
        c_bias=torch.randn(h, m, r),
        rot=in_a_wider_row(torch.randn(b, s, h * j * 3) * random.choice([1e-3, 1, 3])).unflatten(-1, (h, j, 3)),
        dt=torch.rand(b, s, h),
        carry=sometimes(0.7, torch.randn(b, h, j, 4)),
    )


def ranks_case() -> Case:
    b, s, h, m, p = random.randint(1, 3), random.choice([0, 1, 2, 70]), random.randint(1, 3), random.randint(1, 4), 17

    def run(backend: str, x, weight) -> list[Tensor]:
        return [expand_ranks(x, weight, backend=backend)]

    x_bsi = in_a_wider_row(torch.randn(b, s, h * p))
    return run, given(x=x_bsi.unflatten(-1, (h, p)), weight=torch.randn(h, m, p))


DATA = ("x", "y", "z", "b", "c", "rot", "window")
CASES = {
    **{"ranks": ranks_case, "prepare": prepare_case, "quaternions": quaternion_case},
    **{"conv": conv_case, "finish": finish_case, "norm": norm_case},
}


def results(case: Case, backend: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and all gradients; inputs keep the strides they have."""
    run, tensors = case
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in tensors.items()}
    outputs = run(backend, **leaves)
    make = torch.Generator().manual_seed(0)
    heads = [torch.randn(t.shape, generator=make, dtype=torch.float64).to(dtype) for t in outputs]
    loss = sum((t * head).sum() for t, head in zip(outputs, heads, strict=True))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {
        f"d {name}": torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), grads, strict=True)
    }
    return {str(i): t for i, t in enumerate(outputs)}, named


def random_cases(kind: str, seed: int, count: int):
    random.seed(seed)
    torch.manual_seed(seed)
    return (CASES[kind]() for _ in range(count))


@pytest.mark.parametrize("kind", CASES)
def test_random_shapes(kind, threads):
    for number, case in enumerate(random_cases(kind, threads, SHAPES // 2)):
        values, grads = results(case, "cpu", torch.float32)
        want_values, want_grads = results(case, "torch", torch.float64)
        try:
            check(VALUE, values, want_values)
            check(GRADIENT, grads, want_grads)
        except AssertionError as failure:
            shapes = {name: tuple(t.shape) for name, t in case[1].items()}
            raise AssertionError(f"case {number}, {shapes}: {failure}") from None


def narrow_results(case: Case, data: torch.dtype, rest: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Outputs and gradients for data rounded to bfloat16 and held in `data`, parameters in `rest`."""
    run, tensors = case
    dtypes = {name: data if name in DATA else rest for name in tensors}
    rounded = {name: t.bfloat16() if name in DATA else t for name, t in tensors.items()}
    leaves = {name: t.detach().to(dtypes[name]).requires_grad_() for name, t in rounded.items()}
    outputs = run(backend, **leaves)
    make = torch.Generator().manual_seed(0)
    heads = [torch.randn(t.shape, generator=make).bfloat16() for t in outputs]
    loss = sum((t.double() * head.double()).sum() for t, head in zip(outputs, heads, strict=True))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {f"d {name}": g for name, g in zip(leaves, grads, strict=True) if g is not None}
    assert all(g.dtype == dtypes[name[2:]] for name, g in found.items())
    return {str(i): t for i, t in enumerate(outputs)} | found


@pytest.mark.parametrize("kind", CASES)
def test_random_shapes_in_bfloat16(kind):
    """Data in bfloat16 is rounded once, when it is written; sums are float32."""
    for number, case in enumerate(random_cases(kind, 3, SHAPES // 4)):
        got = narrow_results(case, torch.bfloat16, torch.float32, "cpu")
        want = narrow_results(case, torch.float64, torch.float64, "torch")
        try:
            check(2**-8, got, {name: t for name, t in want.items() if got[name].dtype == torch.bfloat16})
            check(GRADIENT, got, {name: t for name, t in want.items() if got[name].dtype == torch.float32})
        except AssertionError as failure:
            shapes = {name: tuple(t.shape) for name, t in case[1].items()}
            raise AssertionError(f"case {number}, {shapes}: {failure}") from None


@pytest.mark.parametrize("kind", CASES)
def test_same_bits_in_every_run_and_on_any_threads(kind):
    for case in random_cases(kind, 5, 12):
        runs = []
        for count in (1, 1, 2, 2):
            torch.set_num_threads(count)
            values, grads = results(case, "cpu", torch.float32)
            runs.append({**values, **grads})
        torch.set_num_threads(1)
        assert all(torch.equal(run[name], runs[0][name]) for run in runs for name in runs[0])


def op_inputs() -> dict[str, tuple]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    segments_bs, lengths_b = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 2]]), torch.tensor([5, 3])
    return {
        "conv": (
            CAUSAL_CONV,
            (leaf(2, 5, 9), leaf(9, 4), leaf(9), leaf(2, 9, 4), None, None, [9], True),
        ),
        "conv packed": (
            CAUSAL_CONV,
            (leaf(2, 5, 9), leaf(9, 3), None, None, segments_bs, lengths_b, [4, 2, 3], False),
        ),
        "finish": (
            FINISH,
            (leaf(6, 1, 8), leaf(6, 8), leaf(8), leaf(6, 8), None, None, None, leaf(8), 4, 1, 1e-5),
        ),
        "ranks": (EXPAND_RANKS, (leaf(5, 6), leaf(3, 6))),
        "prepare": (
            MAMBA3_PREPARE,
            (
                *(leaf(2, 5, 3, 1, 8), leaf(2, 5, 3, 1, 8), leaf(8), leaf(8), leaf(2, 3, 8), leaf(2, 3, 8)),
                *(leaf(2, 5, 2), leaf(2, 5, 2), leaf(2, 2, 2), segments_bs, 1e-5, 1.0, True),
            ),
        ),
        "quaternions": (
            QUATERNION_PREPARE,
            (
                *(leaf(2, 5, 3, 1, 8), leaf(2, 5, 3, 1, 8), leaf(8), leaf(8), leaf(2, 3, 8), leaf(2, 3, 8)),
                *(leaf(2, 5, 2, 2, 3), leaf(2, 5, 2), leaf(2, 2, 2, 4), segments_bs, 1e-5, 1.0),
            ),
        ),
        "finish ranks": (
            FINISH,
            (leaf(6, 3, 8), leaf(6, 8), leaf(8), leaf(6, 8), leaf(3, 8), leaf(3, 8), leaf(3, 8), None, 8, 0, 1e-5),
        ),
    }


@pytest.mark.parametrize("name", ["conv", "conv packed", "finish", "finish ranks", "prepare", "quaternions", "ranks"])
def test_operators_are_what_torch_expects(name):
    operation, inputs = op_inputs()[name]
    torch.library.opcheck(operation.operator, (*inputs, "cpu"))


def test_norms_can_be_differentiated_twice():
    """Layers have a norm whatever the path of their block; the paths that allow it need this of it."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def second(backend: str) -> tuple[Tensor, ...]:
        y = rms_norm(x, weight, backend=backend)
        (d_x,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(d_x.pow(2).sum(), (x, weight))

    for got, want in zip(second("cpu"), second("torch"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def block_results(name: str, dtype: torch.dtype, backend: str, **how: Tensor) -> dict[str, Tensor]:
    block, cache = make_block(name).to(dtype), random_cache(make_block(name), 2)
    rows = len(how["cu_seqlens"]) - 1 if "cu_seqlens" in how else 2
    cache = type(cache)(*(t[:1].expand(rows, *t.shape[1:]).to(dtype) if isinstance(t, Tensor) else t for t in cache))
    x = tokens(block, 1 if "cu_seqlens" in how else 2, 75)
    path = None if name.startswith("mamba1") else SsdPath(backend=backend)
    return block_outcome(block, lambda block, x, cache: block(x, cache, path=path, **how), x, cache)


@pytest.mark.parametrize("name", [name for name in MAMBAS if not name.startswith("mamba1")])
def test_blocks_equal_their_plain_twins(name):
    """In every way a block can be called: outputs, caches and all gradients."""
    torch.manual_seed(1)
    mask_bs, reset_bs = torch.rand(2, 75) < 0.8, torch.rand(2, 75) < 0.1
    ways = {
        "whole": {},
        "masked": {"mask_bs": mask_bs},
        "resets": {"reset_bs": reset_bs},
        "masked resets": {"mask_bs": mask_bs, "reset_bs": reset_bs},
        "packed": {"cu_seqlens": torch.tensor([0, 1, 3, 70, 75])},
    }
    for way, how in ways.items():
        got, want = block_results(name, torch.float32, "cpu", **how), block_results(name, torch.float64, "torch", **how)
        try:
            check(
                2 * VALUE,
                {n: t for n, t in got.items() if n[:2] != "d "},
                {n: t for n, t in want.items() if n[:2] != "d "},
            )
            check(GRADIENT, got, want)
        except AssertionError as failure:
            raise AssertionError(f"{way}: {failure}") from None


@pytest.mark.parametrize("name", MAMBAS)
def test_blocks_in_bfloat16_are_as_exact_as_with_float32_inside(name, request):
    """Against float64 with the same rounded parameters, in the mean of every tensor: at most twice the error."""

    def of(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
        """Outputs and gradients, those of parameters for each of six inputs."""
        block, found = make_block(name, dtype=torch.float32).bfloat16().to(dtype), {}
        for seed in range(6):
            x = tokens(block, 2, 70, seed).bfloat16().to(dtype).requires_grad_()
            block.zero_grad()
            with use_backend(backend):
                y, _ = block(x)
                (y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)).sum().backward()
            for key, tensor in {"y": y, "x": x.grad, **{n: p.grad for n, p in block.named_parameters()}}.items():
                found.setdefault(key, []).append(torch.zeros(1) if tensor is None else tensor.detach().double())
        return {key: torch.stack(tensors) for key, tensors in found.items()}

    want, new = of(torch.float64, "torch"), of(torch.bfloat16, "cpu")
    request.getfixturevalue("without_extension")
    former = of(torch.bfloat16, "cpu")
    far = {n: ((new[n] - t).norm(), (former[n] - t).norm(), t.norm()) for n, t in want.items()}
    bad = {n: [f"{e:.2e}" for e in errors] for n, errors in far.items() if errors[0] > 2 * errors[1] + 1e-3 * errors[2]}
    assert not bad


@pytest.mark.parametrize("isa", [] if why_missing() else library().usable[1:])
def test_other_instruction_sets(isa):
    here = os.path.abspath(__file__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", here, "-k", "random_shapes"],
        env={**os.environ, "MAMBAKIT_ISA": isa, "MAMBAKIT_FUZZ": "10"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
