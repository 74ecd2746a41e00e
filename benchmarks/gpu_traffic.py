"""What kernels move and compute, ours and the official ones, counted without a GPU: for the tables of docs/gpu.md.

Ours from the launches of a call: every tensor once, what has to move at least, and the arithmetic of each kernel. The
official ones from the tensors that their kernels exchange (state-spaces/mamba, and causal-conv1d for the convolution),
in the same way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.kernels.triton import causal_conv, fused_step, mamba3_prepare, norm, selective_scan, ssd
from mambakit.kernels.triton.backend import EXACT
from mambakit.kernels.triton.launch import Launch, recording
from mambakit.ops.norm import GATE_FIRST, NORM_FIRST

B, S, H, P, R, K = 8, 2048, 24, 64, 128, 4
"""8 x 2048 tokens of a model of 130 million parameters; Mamba-1 has states of N, decoding ROWS rows of a token."""
WIDTH, N, ROWS, A = H * P, 16, 64, 32
ROW = torch.bfloat16


class Cost(NamedTuple):
    kernel: str
    moved: float
    """Bytes."""
    computed: float
    """Additions, multiplications and functions, each as one."""


def empty(*size: int, dtype: torch.dtype = ROW) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def wide(*size: int) -> Tensor:
    return empty(*size, dtype=torch.float32)


def bytes_of(launch: Launch) -> int:
    return sum(x.numel() * x.element_size() for x in launch.arguments if isinstance(x, Tensor))


def products(launch: Launch) -> float:
    """Of the core, each product counted once, however many parts it is taken in."""
    n = launch.sizes
    tokens, ranks, own, heads = B * S, n["M"], n["BT"], n["H"]
    rows = tokens * ranks
    state, pairs_r, pairs_p = (2.0 * rows * heads * x for x in (n["P"] * n["R"], own * n["R"], own * n["P"]))
    return {
        "ssd.walk_states": state,
        "ssd.read_chunks": state + pairs_r + pairs_p,
        "ssd.grad_values": 2 * state + pairs_r + 2 * pairs_p + 2.0 * rows * heads * own * own,
        "ssd.grad_keys": 2 * state + pairs_p * (n["R"] // n["BR"]) + 4.0 * rows * n["G"] * own * n["R"],
    }[launch.kernel]


def elementwise(launch: Launch) -> float:
    """Of everything else: how often its innermost expression is evaluated times what is in it."""
    n, (file, name) = launch.sizes, launch.kernel.split(".")
    if file == "selective_scan":
        states = float(B * S * WIDTH * n["R"])
        return states * (27 if name == "scan_backward" else 7 if launch.arguments[10] is not None else 5)
    if file == "causal_conv":
        channels = float(B * S * n["V"])
        return channels * (n["K"] * (2 * n["K"] + 12) if name == "convolve_backward" else 2 * n["K"] + 4)
    if file == "norm":
        rows = launch.arguments[0].shape[0]
        return {"finish": 24.0, "finish_backward": 40.0}[name] * rows * n["M"] * n["WIDTH"]
    if file == "mamba3_prepare":
        turned = float(B * S * n["M"] * n["H"] * n["R"])
        return {"prepare": 6.0, "grad_vectors": 6.0, "grad_angles": 20.0}[name] * turned
    rows = ROWS * n.get("H", 1)
    state = rows * (n["P"] if "P" in n else n["I"]) * n.get("R", n.get("K", 1))
    return {"mamba1_conv": 2.0, "mamba1_scan": 7.0, "mamba2": 6.0, "mamba3": 3.0 + 6.0 * n.get("M", 1)}[name] * state


def ours(call: Callable[..., Any], *inputs: Any) -> list[Cost]:
    with recording() as log:
        call(*inputs)
    count = {True: products, False: elementwise}
    return [
        Cost(
            launch.kernel.split(".")[1] + (", mirrored" if launch.sizes.get("BACK") else ""),
            bytes_of(launch),
            count[launch.kernel.startswith("ssd.")](launch),
        )
        for launch in log
    ]


def kernels() -> dict[str, list[Cost]]:
    """Of every operation and pass, its launches."""
    needs, segments = [True] * 9, None
    found = {}
    for name, m, g in (("SSD, Mamba-2", 1, 1), ("SSD, Mamba-3", 1, H), ("SSD, Mamba-3 of 4 ranks", 4, H)):
        v, b = empty(B, S, m, H, P), empty(B, S, m, g, R)
        core = (v, b, b, *(wide(B, S, H) for _ in range(3)), wide(B, H, P, R), segments, 0)
        found[f"{name}, forward"] = ours(ssd.forward, EXACT, *core)
        found[f"{name}, backward"] = ours(ssd.backward, EXACT, [v, core[6]], *core, needs)
    x, bc = empty(B, S, WIDTH), empty(B, S, 1, N)
    scan = (x, x, wide(WIDTH, N), bc, bc, None, wide(WIDTH), x, wide(WIDTH), None, True)
    found["selective scan, forward"] = ours(selective_scan.scan, *scan)
    found["selective scan, backward"] = ours(selective_scan.scan_backward, [x, wide(B, WIDTH, N)], *scan, needs)
    conv = (x, empty(WIDTH, K), empty(WIDTH), None, None, None, [WIDTH], True)
    found["convolution, forward"] = ours(causal_conv.convolve, *conv)
    found["convolution, backward"] = ours(causal_conv.convolve_backward, [x, empty(B, WIDTH, K)], *conv, needs)
    rows = empty(B * S, WIDTH)
    for name, m, group, order in (("norm", 1, WIDTH, GATE_FIRST), ("norm of 4 ranks", 4, P, NORM_FIRST)):
        mimo = [empty(m, WIDTH) if m > 1 else None] * 3
        ends = (empty(B * S, m, WIDTH), rows, empty(WIDTH), rows, *mimo, empty(WIDTH), group, order, 1e-5)
        found[f"{name}, forward"] = ours(norm.finish, *ends)
        found[f"{name}, backward"] = ours(norm.finish_backward, [rows], *ends, needs)
    keys, out = empty(B, S, 1, 1, R), empty(B, S, 1, H, R)
    turned = (keys, keys, empty(R), empty(R), empty(H, 1, R), empty(H, 1, R))
    turned = (*turned, empty(B, S, A), wide(B, S, H), wide(B, H, A), None, 1e-5, 1.0, True)
    found["B and C of Mamba-3, forward"] = ours(mamba3_prepare.prepare, *turned)
    grads = [out, out, wide(B, H, A)]
    found["B and C of Mamba-3, backward"] = ours(mamba3_prepare.prepare_backward, grads, *turned, needs)
    return found | steps()


def steps() -> dict[str, list[Cost]]:
    """A token of ROWS rows, in float32."""
    b, v = ROWS, WIDTH + 2 * R
    conv = (wide(b, 2 * WIDTH), wide(b, WIDTH, K), wide(WIDTH, K), wide(WIDTH), None)
    first = (wide(b, 2 * WIDTH), wide(b, WIDTH), wide(b, WIDTH), wide(b, 48 + 2 * N), wide(b, WIDTH, N))
    second = (wide(b, WIDTH + v + H), wide(b, v, K), wide(b, H, P, R), wide(v, K), wide(v), *[wide(H)] * 3)
    third = (wide(b, 2 * WIDTH + 2 * R + 3 * H + A), wide(b, H, P, R), wide(b, 1, H, R), wide(b, H, P), wide(b, H, A))
    third = (*third, wide(H), wide(R), wide(R), wide(H, 1, R), wide(H, 1, R), None, None, None, wide(H), wide(WIDTH))
    return {
        "a token of Mamba-1": ours(fused_step.mamba1_step_conv, *conv)
        + ours(fused_step.mamba1_step, *first, wide(WIDTH, N), wide(WIDTH), None),
        "a token of Mamba-2": ours(
            fused_step.mamba2_step, *second, wide(WIDTH), None, None, WIDTH, 1e-5, 0.0, 1.0, False
        ),
        "a token of Mamba-3": ours(
            fused_step.mamba3_step, *third, None, None, A, False, False, True, 1e-5, 0.0, 1.0, 1e-4, 1.0
        ),
    }


def official(chunk: int = 256) -> dict[str, list[Cost]]:
    """What the official kernels exchange for the same, Mamba-3's in chunks of 64."""
    x, bc, per_head, each = 2.0 * B * S * WIDTH, 2.0 * B * S * R, 4.0 * B * S * H, 2.0 * B * S * H * R
    states, pairs = 4.0 * B * (S // chunk) * H * P * R, 4.0 * B * S * chunk
    state, own_p, own_r = (2.0 * B * S * H * y for y in (P * R, chunk * P, chunk * R))
    cumsum = Cost("cumulative sums", 2.5 * per_head, 0)
    written = Cost("states of chunks", x + bc + 2 * per_head + states, state)
    passing = Cost("states passed on", 2 * states, 0)
    matched = Cost("C B of a chunk", 2 * bc + pairs, 2.0 * B * S * chunk * R)
    both = Cost("gradients through C B", 2 * (pairs + 4 * bc), 4.0 * B * S * chunk * R)
    found = {
        "SSD, Mamba-2, forward": [
            *(cumsum, written, passing, matched),
            Cost("outputs", pairs + 2 * x + 2 * per_head + bc + states, state + own_p),
        ],
        "SSD, Mamba-2, backward": [
            *(cumsum, matched, written, passing),
            Cost("gradients of states", bc + x + per_head + states, state),
            Cost("the same passed on", 3 * states, 0),
            Cost("of values", 3 * x + pairs + bc + states / 2 + 3 * per_head, state + own_p),
            Cost("of B", x + states / 2 + 3 * bc + 3 * per_head, state),
            Cost("of C", x + states / 2 + 3 * bc + 2 * per_head, state),
            Cost("of C B", 2 * x + 2 * per_head + pairs, own_p),
            both,
            Cost("of decays", 2 * x + 3 * per_head + pairs, own_p),
            Cost("cumulative sums back", 4 * per_head, 0),
        ],
    }
    short = 4.0 * B * (S // 64) * H * P * R
    angles, fused, back = 4.0 * B * S * H * A, 2 * state + (own_p + own_r) * 64 / chunk, 2 * own_p + 3 * own_r
    found["SSD, Mamba-3, forward"] = [
        Cost("all but the angles", 4 * x + 2 * bc + 2 * each + angles + short / 2 + 7 * per_head, fused),
        Cost("angles", angles + 2.0 * B * S * A + per_head, 0),
    ]
    found["SSD, Mamba-3, backward"] = [
        Cost("gate", 5 * x, 0),
        Cost("B, C and values", 4 * each + 3 * x + short / 2 + 5 * per_head, 4 * state + back * 64 / chunk),
        Cost("turns", 2 * each + 4 * bc + 2 * angles + 4 * per_head, 0),
        Cost("step sizes", 6 * per_head, 0),
        Cost("angles", 2 * angles + 4.0 * B * S * A + 2 * per_head, 0),
    ]
    vectors, kept, scans = 2.0 * B * S * N, 8.0 * B * WIDTH * N * -(-S // 2048), 1.0 * B * S * WIDTH * N
    found["selective scan, forward"] = [Cost("all", 5 * x + 2 * vectors + kept, 7 * scans)]
    found["selective scan, backward"] = [Cost("all", 8 * x + 2 * vectors + 4 * vectors + kept, 27 * scans)]
    found["convolution, forward"] = [Cost("all", 2 * x, (2 * K + 4) * x / 2)]
    found["convolution, backward"] = [Cost("all", 3 * x, (4 * K + 12) * x / 2)]
    found["norm, forward"] = [Cost("all", 3 * x, 12 * x / 2)]
    found["norm, backward"] = [Cost("all", 5 * x, 30 * x / 2)]
    row, whole = 4.0 * ROWS * WIDTH, 4.0 * ROWS * WIDTH * R
    window, products_ = 4.0 * ROWS * (WIDTH + 2 * R) * K, 1.0 * ROWS * WIDTH * R
    found["a token of Mamba-1"] = [
        Cost("convolution", 2 * 4.0 * ROWS * WIDTH * K + 2 * row, 2.0 * ROWS * WIDTH * K),
        Cost("state", 2 * 4.0 * ROWS * WIDTH * N + 4 * row, 7.0 * ROWS * WIDTH * N),
    ]
    found["a token of Mamba-2"] = [
        Cost("convolution", 2 * window + 2 * window / K, 2.0 * ROWS * (WIDTH + 2 * R) * K),
        Cost("state", 2 * whole + 3 * row, 6 * products_),
        Cost("norm", 3 * row, 24.0 * ROWS * WIDTH),
    ]
    return found
