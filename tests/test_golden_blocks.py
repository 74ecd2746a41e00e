"""The official modules' stored numbers: forward, states, steps, continuation, packing and every gradient."""

import pytest
import torch

from compare import error
from mambakit import Mamba1, Mamba1Config, Mamba2, Mamba2Config, Mamba3, Mamba3Config
from test_golden import FLOAT64, FLOOR, compare, distance

BLOCKS = {
    "mamba1_block": (Mamba1, Mamba1Config),
    "mamba2_block": (Mamba2, Mamba2Config),
    "mamba3_block": (Mamba3, Mamba3Config),
}
OUR_NAMES = {"d_state": "state_rank", "d_conv": "conv_kernel", "headdim": "per_head_dim", "A_floor": "a_floor"}
IGNORED = ("chunk_size", "fuse_pregate_headwise_norm")
STATES = {
    "conv_state": ("conv_bik", "conv_bvk"),
    "ssm_state": ("ssm_bir", "ssm_bhpr"),
    "angle_state": ("rotation",),
    "k_state": ("k_state_bmhr",),
    "v_state": ("v_state_bhp",),
}


def build(case: dict, dtype: torch.dtype):
    make, config = BLOCKS[case["family"]]
    options = {OUR_NAMES.get(k, k): v for k, v in case["config"]["kwargs"].items() if k not in IGNORED}
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    if "A_activation" in case["config"]:
        options["a_activation"] = case["config"]["A_activation"]
    return make(config(**options), dtype=dtype)


def official_states(cache) -> dict[str, torch.Tensor]:
    return {name: getattr(cache, f) for name, ours in STATES.items() for f in ours if hasattr(cache, f)}


# Kernels take over in float32.
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@dtypes
@pytest.mark.golden("mamba1_block", "mamba2_block", "mamba3_block")
def test_blocks(case, dtype):
    check_block(case, "single", dtype)


@dtypes
@pytest.mark.golden("mamba3_block")
def test_mamba3_on_the_double_pathway(case, dtype):
    check_block(case, "double", dtype)


def check_block(case, pathway, dtype):
    config = case["config"]

    def compute(x):
        u = x["in.u"]
        block = build(case, u.dtype)
        names = {name for name, _ in block.named_parameters()}
        assert names == {name[6:] for name in x if name.startswith("param.")}

        def call(method, *args, **kwargs):
            """Through the stored parameters, so that gradients reach them."""
            values = {name: x[f"param.{name}"] for name in names}
            return torch.func.functional_call(
                Caller(block, method), {f"block.{n}": v for n, v in values.items()}, args, kwargs
            )

        fresh = None if pathway == "single" else block.fresh_cache(len(u), pathway="double")
        packing = {}
        if "in.seq_idx" in x:
            ids = x["in.seq_idx"]
            packing["reset_bs"] = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
        if "in.cu_seqlens" in x:
            packing["cu_seqlens"] = x["in.cu_seqlens"]
            fresh = None if fresh is None else block.fresh_cache(len(packing["cu_seqlens"]) - 1, pathway="double")
        y, last = call("forward", u, fresh, **packing)
        out = {"y": y}
        if packing:
            return out
        out |= {f"final.{name}": t for name, t in official_states(last).items()}
        split = config["split"]
        cache = fresh
        if split:
            head, cache = call("forward", u[:, :split], fresh)
            tail, end = call("forward", u[:, split:], cache)
            assert error(torch.cat([head, tail], 1), y, FLOOR) <= (FLOAT64 if u.dtype == torch.float64 else 0.05)
            out |= {f"split.{name}": t for name, t in official_states(cache).items()}
            if u.dtype == torch.float64:
                for name, t in official_states(end).items():
                    assert distance(name, t, official_states(last)[name]) <= FLOAT64, name
        steps = []
        for t in range(split, u.shape[1]):
            y_t, cache = call("step", u[:, t], cache)
            steps.append(y_t)
        return out | {"step_y": torch.stack(steps, 1)}

    compare(case, compute, dtype)


class Caller(torch.nn.Module):
    """A method of a block as the call of a module."""

    def __init__(self, block, method):
        super().__init__()
        self.block, self.method = block, method

    def forward(self, *args, **kwargs):
        return getattr(self.block, self.method)(*args, **kwargs)
