"""burn-mamba's own agreement tests: their shapes, data and tolerances, for all three bundles; and its path helpers."""

from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from cases import ALGORITHMS, dtype_of
from mambakit import (
    Mamba2SsdInput,
    Mamba2SsdPath,
    Mamba3DoubleSsdInput,
    Mamba3SingleSsdInput,
    Mamba3SsdPath,
    SsdPath,
)

# b, n, l, h, p, g, r: no sharing of B and C, sharing, a single chunk.
SHAPES = [(2, 3, 4, 2, 8, 2, 8), (2, 3, 4, 4, 8, 1, 8), (2, 1, 4, 2, 8, 2, 8)]
TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.float64: (1e-10, 1e-10)}
BUNDLES = {"mamba2": Mamba2SsdInput, "double": Mamba3DoubleSsdInput, "single": Mamba3SingleSsdInput}


def random_fields(kind: str, shape, dtype: torch.dtype, m: int = 2) -> dict:
    b, n, l, h, p, g, r = shape

    def uniform(low, high, *size):
        return torch.rand(*size, dtype=dtype) * (high - low) + low

    dt, a = uniform(0.05, 0.3, b, n, l, h), uniform(-1.0, -0.5, h)
    state = 0.1 * torch.randn(b, h, p, r, dtype=dtype)
    if kind == "mamba2":
        return {
            "x_bnlhp": torch.randn(b, n, l, h, p, dtype=dtype),
            "dt_bnlh": dt,
            "a_decay_h": a,
            "b_bnlgr": torch.randn(b, n, l, g, r, dtype=dtype),
            "c_bnlgr": torch.randn(b, n, l, g, r, dtype=dtype),
            "d_h": 0.1 * torch.randn(h, dtype=dtype),
            "initial_state_bhpr": state,
        }
    fields = {
        "v_bnlmhp": torch.randn(b, n, l, m, h, p, dtype=dtype),
        "b_bnlmhr": torch.randn(b, n, l, m, h, r, dtype=dtype),
        "c_bnlmhr": torch.randn(b, n, l, m, h, r, dtype=dtype),
        "da_bnlh": dt * a,
    }
    if kind == "single":
        lam = uniform(0.0, 1.0, b, n, l, h)
        left = ((1 - lam) * dt).flatten(1, 2)
        ahead = torch.nn.functional.pad(left[:, 1:], (0, 0, 0, 1)).unflatten(1, (n, l))
        fields |= {"gamma_bnlh": lam * dt, "scale_bnlh": lam * dt + ahead}
    return {**fields, "initial_state_bhpr": state}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=["no-gqa", "gqa", "single-chunk"])
@pytest.mark.parametrize("kind", BUNDLES)
@pytest.mark.parametrize("learned", [False, True], ids=["plain", "learned-state"])
def test_paths_agree(kind, shape, dtype, learned):
    fields = random_fields(kind, shape, dtype)
    if learned:
        fields["init_state_hpr"] = 0.1 * torch.randn_like(fields["initial_state_bhpr"][0])
    values, grads, heads = {}, {}, None
    paths = {
        name: path for name, path in ALGORITHMS.items() if dtype_of(name) == torch.float64 or dtype != torch.float64
    }
    for name, path in paths.items():
        fresh = {key: t.clone().requires_grad_() for key, t in fields.items()}
        y, state = BUNDLES[kind](**fresh).run(path)
        heads = heads or (torch.randn_like(y), torch.randn_like(state))
        loss = (y * heads[0]).sum() + (state * heads[1]).sum()
        grads[name] = torch.autograd.grad(loss, list(fresh.values()))
        values[name] = (y.detach(), state.detach())
    for one, other in combinations(paths, 2):
        for what, tolerance, results in (("values", 0, values), ("gradients", 1, grads)):
            for got, want in zip(results[one], results[other], strict=True):
                worst = (got - want).abs().max().item()
                assert worst < TOLERANCE[dtype][tolerance], f"{what}: {one} and {other} differ by {worst}"


def test_a_learned_state_is_added_to_every_row():
    fields = random_fields("mamba2", SHAPES[1], torch.float64)
    learned = torch.randn_like(fields["initial_state_bhpr"][0])
    want = Mamba2SsdInput(**{**fields, "initial_state_bhpr": fields["initial_state_bhpr"] + learned}).run()
    got = Mamba2SsdInput(**fields, init_state_hpr=learned).run()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_the_bundles_chunk_length_rules():
    fields = random_fields("mamba2", SHAPES[0], torch.float64)
    want = Mamba2SsdInput(**fields).run(SsdPath.serial(4))
    got = Mamba2SsdInput(**fields).run(SsdPath.serial(3))
    assert torch.equal(got[0], want[0])
    assert torch.equal(SsdPath.serial(5).run(Mamba2SsdInput(**fields))[0], want[0])


@pytest.mark.parametrize(
    ("state_rank", "per_head_dim", "chunk_len"),
    [
        (16, 64, 32),
        (64, 64, 64),
        (128, 64, 96),
        (128, 128, 128),
        (256, 128, 192),
        (512, 512, 512),
        (1024, 1024, 512),
        (8, 8, 32),
    ],
)
def test_optimal_chunk_len(state_rank, per_head_dim, chunk_len):
    assert SsdPath.optimal_chunk_len(state_rank, per_head_dim) == chunk_len
    assert SsdPath.optimal_default(state_rank, per_head_dim) == chunk_len
    assert SsdPath().chunk_len_or_optimal(state_rank, per_head_dim) == chunk_len
    assert SsdPath(chunk_len=7).chunk_len_or_optimal(state_rank, per_head_dim) == 7


def test_helpers():
    block = SimpleNamespace(state_rank=128, per_head_dim=64)
    assert SsdPath() == SsdPath.serial_recalculated() == SsdPath("serial_recalculated", None, "auto")
    assert Mamba2SsdPath is Mamba3SsdPath is SsdPath
    assert SsdPath.default_optimal_from_block(block) == SsdPath.serial_recalculated(96)
    assert SsdPath.serial(7).optimal_for(block) == SsdPath.serial(96)
    assert SsdPath.core_optimal(128, 64) == SsdPath.core_optimal_from_block(block) == SsdPath.minimal(96)
    assert SsdPath.chunked_optimal(128, 64) == SsdPath.chunked_optimal_from_block(block) == SsdPath.serial(96)
    recalculated = SsdPath.serial_recalculated(96)
    assert SsdPath.chunked_recalculated_optimal(128, 64) == recalculated
    assert SsdPath.chunked_recalculated_optimal_from_block(block) == recalculated
    assert len({SsdPath(), SsdPath(), SsdPath.serial()}) == 2
    with pytest.raises(AttributeError):
        SsdPath().chunk_len = 3  # type: ignore[misc]
