"""Triton's kernels on tensors larger than any memory: every address a program would touch lies within them.

A program runs in the interpreter with pointers into nothing; what it would load is zero, what it would store is
looked at and forgotten. Sizes are beyond 2^31 elements, where offsets in 32 bits turn negative.
"""

import dataclasses
import importlib
import random

import pytest
import torch

from cases import INTERPRETED
from mambakit.kernels.triton import causal_conv, fused_step, mamba3_prepare, norm, selective_scan, ssd
from mambakit.kernels.triton.backend import EXACT
from mambakit.kernels.triton.launch import Launch, function, recording

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs in the processes of test_triton_interpreter.py")
NEEDS = [True] * 9


def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def calls() -> dict[str, tuple]:
    """Few tokens in many rows: programs are short and their numbers high."""
    b, s, h, p, r = 1_100_000, 7, 16, 32, 16
    wide, ids = h * p, empty(b, s, dtype=torch.int64)
    v, k, per_head = empty(b, s, 2, h, p), empty(b, s, 2, 1, r), empty(b, s, h)
    core = (v, k, k, per_head, per_head, per_head, empty(b, h, p, r), ids, 0)
    x, bc = empty(b, s, wide), empty(b, s, 1, r)
    conv = (x, empty(wide, 4), empty(wide), empty(b, wide, 4), ids, empty(b, dtype=torch.int64), [wide], True)
    scan = (x, x, empty(wide, r), bc, bc, empty(b, wide, r), empty(wide), x, empty(wide))
    scan = (*scan, empty(b, s, dtype=torch.bool), True)
    rows = empty(b * s, wide)
    ends = (empty(b * s, 2, wide), rows, empty(wide), rows, *[empty(2, wide)] * 3, empty(wide), p, 2, 1e-5)
    long = empty(800_000, 5120)
    parted = (long[:, None], long, empty(5120), long, None, None, None, empty(5120), 5120, 1, 1e-5)
    bias, keys = empty(128, 4, 64), empty(b, s, 4, 1, 64)
    angles = (empty(b, s, 4), empty(b, s, 128), empty(b, 128, 4), ids, 1e-5, 1.0, True)
    turned = (keys, keys, empty(64), empty(64), bias, bias, *angles)
    out = empty(b, s, 4, 128, 64)
    step1 = (empty(b, 2 * wide), empty(b, wide), empty(b, wide), empty(b, 9 + 2 * r), empty(b, wide, r), empty(wide, r))
    v2 = wide + 2 * r
    step2 = (empty(b, wide + v2 + h), empty(b, v2, 4), empty(b, h, p, r), empty(v2, 4), empty(v2))
    step3 = (empty(b, 2 * wide + 4 * r + 3 * h + 4), empty(b, h, p, r), empty(b, 2, h, r), empty(b, h, p))
    step3 = (*step3, empty(b, h, 4), empty(h), empty(r), empty(r), *[empty(h, 2, r)] * 2, *[empty(h, 2, p)] * 3)
    return {
        "ssd": (ssd.forward, EXACT, *core),
        "ssd backward": (ssd.backward, EXACT, [v, core[6]], *core, NEEDS),
        "conv": (causal_conv.convolve, *conv),
        "conv backward": (causal_conv.convolve_backward, [x, conv[3]], *conv, NEEDS),
        "finish": (norm.finish, *ends),
        "finish backward": (norm.finish_backward, [rows], *ends, NEEDS),
        "wide finish": (norm.finish, *parted),
        "wide finish backward": (norm.finish_backward, [long], *parted, NEEDS),
        "prepare": (mamba3_prepare.prepare, *turned),
        "prepare backward": (mamba3_prepare.prepare_backward, [out, out, angles[2]], *turned, NEEDS),
        "scan": (selective_scan.scan, *scan),
        "scan backward": (selective_scan.scan_backward, [x, empty(b, wide, r)], *scan, NEEDS),
        "mamba1_step_conv": (fused_step.mamba1_step_conv, step1[0], conv[3], conv[1], conv[2], None),
        "mamba1_step": (fused_step.mamba1_step, *step1, empty(wide), None),
        "mamba2_step": (
            fused_step.mamba2_step,
            *(*step2, *[empty(h)] * 3, empty(wide), None, None, wide, 1e-5, 0.0, 1.0, False),
        ),
        "mamba3_step": (
            fused_step.mamba3_step,
            *(*step3, empty(h), empty(wide), None, None, 4, False, False, True, 1e-5, 0.0, 1.0, 1e-4, 1.0),
        ),
    }


class Nowhere:
    """What a kernel takes for a tensor: a dtype and an address."""

    def __init__(self, tensor: torch.Tensor, place: int):
        self.dtype, self.first = tensor.dtype, place << 44
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.end = self.first + (last + 1) * tensor.element_size()

    def data_ptr(self) -> int:
        return self.first


def run_some(call: Launch, monkeypatch: pytest.MonkeyPatch) -> int:
    """The first, the last and a few programs of a launch; how many addresses they touched."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    numpy, builder = importlib.import_module("numpy"), interpreter.interpreter_builder
    known: dict[int, Nowhere] = {}
    for i, x in enumerate(call.arguments):
        if isinstance(x, torch.Tensor):
            known[i] = Nowhere(x, i + 1)
    arguments = [known.get(i, x) for i, x in enumerate(call.arguments)]
    touched = 0

    def look(pointers, mask):
        nonlocal touched
        found = pointers.data.astype(numpy.uint64)[numpy.broadcast_to(mask.data, pointers.data.shape)]
        inside = numpy.zeros(found.shape, bool)
        for one in known.values():
            inside |= (found >= one.first) & (found < one.end)
        touched += found.size
        assert inside.all(), f"{call.kernel} touches {hex(int(found[~inside][0]))}"

    def load(self, pointers, mask, other, *_):
        look(pointers, mask)
        dtype = pointers.get_element_ty()
        return interpreter.TensorHandle(numpy.zeros(pointers.data.shape, interpreter._get_np_dtype(dtype)), dtype)

    some = {0, call.programs - 1, *(random.randrange(call.programs) for _ in range(2))}
    pids = sorted(some)
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
    with monkeypatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
        patch.setattr(type(builder), "create_masked_load", load)
        patch.setattr(
            type(builder), "create_masked_store", lambda self, pointers, value, mask, *_: look(pointers, mask)
        )
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=True))
        patch.setattr(builder, "set_grid_dim", lambda *_: set_dim(call.programs, 1, 1))
        patch.setattr(builder, "set_grid_idx", lambda x, y, z: set_idx(pids[x], y, z))
        function(call.kernel)[(len(pids),)](*arguments, **call.sizes)
    return touched


@pytest.mark.parametrize("name", calls() if INTERPRETED else ())
def test_addresses(name, monkeypatch):
    random.seed(0)
    with recording() as log:
        function_, *inputs = calls()[name]
        function_(*inputs)
    assert log
    sizes = [x.numel() for launch in log for x in launch.arguments if isinstance(x, torch.Tensor)]
    assert max(sizes) > 2**31
    for launch in log:
        assert run_some(launch, monkeypatch) > 0
