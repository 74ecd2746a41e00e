"""An opt-in tuner: the SSD core's tiles timed on the device, the fastest kept for it."""

from typing import Any

import torch

from mambakit.kernels.triton import tiles
from mambakit.kernels.triton.backend import EXACT
from mambakit.kernels.triton.ssd import backward, forward

SHAPE = (4, 2048, 1, 24, 64, 1, 128)
"""b, s, m, h, p, g, r: a Mamba-2 of 130 million parameters."""


def milliseconds(call: Any) -> float:
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 10


def tune() -> list[dict[str, Any]]:
    """Time every candidate of both passes on every device here; returns what was measured."""
    rows = []
    known = dict(tiles.tuned())
    for device in (torch.device("cuda", i) for i in range(torch.cuda.device_count())):
        chosen: dict[str, list[int]] = {}
        for dtype in (torch.bfloat16, torch.float32):
            for pass_, candidates in tiles.CANDIDATES.items():
                timed = [(time_tiles(pass_, each, device, dtype), each) for each in candidates]
                chosen[tiles.key_of(pass_, EXACT.inputs[dtype], 1)] = list(min(timed)[1])
                rows += [
                    {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "pass": pass_}
                    | {"tiles": list(each), "ms": round(ms, 3)}
                    for ms, each in timed
                ]
        known[torch.cuda.get_device_name(device)] = chosen
    tiles.write_cache(tiles.cache_folder() / "tiles.json", known)
    tiles.tuned.cache_clear()
    return rows


def time_tiles(pass_: str, these: tiles.Tiles, device: torch.device, dtype: torch.dtype) -> float:
    b, s, m, h, p, g, r = SHAPE
    data = [
        torch.randn(size, device=device, dtype=dtype) for size in ((b, s, m, h, p), (b, s, m, g, r), (b, s, m, g, r))
    ]
    weights = [torch.rand(b, s, h, device=device) for _ in range(2)]
    state = torch.zeros(b, h, p, r, device=device)
    inputs = (*data, -weights[0], *weights, state, None, 0)
    name = torch.cuda.get_device_name(device)
    tiles.tuned.cache_clear()
    tiles.tuned()[name] = {tiles.key_of(pass_, EXACT.inputs[dtype], 1): list(these)}
    if pass_ == "forward":
        return milliseconds(lambda: forward(EXACT, *inputs))
    return milliseconds(lambda: backward(EXACT, [data[0], state], *inputs, [True] * 7))
