"""Mamba-1's selective scan with what stands around it, and all its gradients."""

from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.structs import PerToken, Scan, ScanBackward, ScanForward
from mambakit.ops.selective_scan import SELECTIVE_SCAN

PART_CHANNELS = 128
"""Channels that one thread takes through all tokens. The backward sums over channels part by part, so a number that
depended on the threads would make its gradients depend on them."""
RUN = 16
"""States that the backward takes through the sequence together, as in selective_scan_backward.h."""


def per_token(tensor: Tensor | None) -> PerToken:
    return PerToken() if tensor is None else PerToken(tensor.data_ptr(), *tensor.stride()[:-1])


def along_channels(tensor: Tensor | None) -> Tensor | None:
    """With its last axis contiguous: itself, if it is a slice of a projection's output."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def describe(
    x_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b_bsgr: Tensor,
    c_bsgr: Tensor,
    state_bir: Tensor | None,
    skip_i: Tensor | None,
    z_bsi: Tensor | None,
    dt_bias_i: Tensor | None,
    fresh_bs: Tensor | None,
    dt_softplus: bool,
) -> tuple[Scan, list[Any]]:
    """The inputs as the kernel reads them, and the tensors behind its pointers, which have to outlive the call."""
    rows, tokens, width = x_bsi.shape
    groups, rank = b_bsgr.shape[2:]
    x, dt, z, b, c = kept = [along_channels(t) for t in (x_bsi, dt_bsi, z_bsi, b_bsgr, c_bsgr)]
    a, state, skip, dt_bias, fresh = others = [contiguous(t) for t in (a_ir, state_bir, skip_i, dt_bias_i, fresh_bs)]
    scan = Scan(
        rows=rows,
        tokens=tokens,
        groups=groups,
        channels=width // groups,
        rank=rank,
        part_channels=PART_CHANNELS,
        softplus=dt_softplus,
        x=per_token(x),
        dt=per_token(dt),
        z=per_token(z),
        b=per_token(b),
        c=per_token(c),
        a_ir=pointer(a),
        state_bir=pointer(state),
        skip_i=pointer(skip),
        dt_bias_i=pointer(dt_bias),
        fresh_bs=pointer(fresh),
        narrow=x_bsi.dtype == torch.bfloat16,
    )
    return scan, [kept, others]


def forward(*inputs: Any) -> list[Tensor]:
    x_bsi, _, a_ir, *_ = inputs
    y_bsi, last_bir = x_bsi.new_empty(x_bsi.shape), a_ir.new_empty(len(x_bsi), *a_ir.shape)
    # `kept` holds on to copies while the kernel reads them.
    scan, kept = describe(*inputs)
    # No result of the forward depends on how channels are shared out: give every thread some.
    threads = torch.get_num_threads()
    while scan.part_channels > 16 and scan.rows * scan.groups * -(-scan.channels // scan.part_channels) < threads:
        scan.part_channels //= 2
    run(ScanForward(inputs=scan, y_bsi=pointer(y_bsi), last_bir=pointer(last_bir)))
    del kept
    return [y_bsi, last_bir]


def backward(output_grads: list[Tensor], *inputs_and_needs: Any) -> list[Tensor]:
    """The gradients of the float inputs, empty where `needs` says no."""
    *inputs, needs = inputs_and_needs
    dy_bsi, d_last_bir = output_grads
    if inputs[0].dtype == torch.bfloat16 and inputs[2].shape[1] > RUN:
        # Gradients are added up run by run of states: in float32.
        wide = (t.float() if isinstance(t, Tensor) and t.dtype == torch.bfloat16 else t for t in inputs)
        found = backward([dy_bsi.float(), d_last_bir], *wide, needs)
        return [d.to(t.dtype) if t is not None else d for d, t in zip(found, inputs, strict=False)]
    x_bsi, dt_bsi, a_ir, b_bsgr, c_bsgr, *_ = inputs
    scan, kept = describe(*inputs)
    parts = -(-scan.channels // PART_CHANNELS)
    rows = (scan.rows,)
    shapes = {
        **{"x": x_bsi.shape, "dt": dt_bsi.shape, "a": rows + a_ir.shape},
        **{"b": (parts, *b_bsgr.shape), "c": (parts, *c_bsgr.shape), "state": rows + a_ir.shape},
        **{"skip": x_bsi.shape[::2], "z": x_bsi.shape, "dt_bias": x_bsi.shape[::2]},
    }
    wanted = dict(zip(shapes, needs, strict=True))
    narrow = ("x", "dt", "z")
    dtypes = {name: x_bsi.dtype if name in narrow else torch.float32 for name in shapes}
    grads = {name: x_bsi.new_empty(shape if wanted[name] else 0, dtype=dtypes[name]) for name, shape in shapes.items()}
    dy, d_last = along_channels(dy_bsi), d_last_bir.contiguous()
    into = {name: pointer(grad) if wanted[name] else None for name, grad in grads.items()}
    run(
        ScanBackward(
            inputs=scan,
            dy=per_token(dy),
            d_last_bir=pointer(d_last),
            dx_bsi=into["x"],
            d_dt_bsi=into["dt"],
            dz_bsi=into["z"],
            da_bir=into["a"],
            db_kbsgr=into["b"],
            dc_kbsgr=into["c"],
            d_state_bir=into["state"],
            d_skip_bi=into["skip"],
            d_dt_bias_bi=into["dt_bias"],
        )
    )
    del kept
    for name in ("a", "b", "c", "skip", "dt_bias"):
        if wanted[name]:
            grads[name] = grads[name].sum(0) if len(grads[name]) != 1 else grads[name][0]
    grads["b"], grads["c"] = grads["b"].to(b_bsgr.dtype), grads["c"].to(c_bsgr.dtype)
    return list(grads.values())


SELECTIVE_SCAN.implement(CPU, forward, backward, casts=True, narrow=(0, 1, 3, 4, 7))
