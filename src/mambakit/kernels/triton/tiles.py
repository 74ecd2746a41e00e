"""Tiles of the SSD core per architecture, from the table that the compile gate writes; nothing is tuned at run time."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.kernels.triton.backend import interpreted

TABLE = Path(__file__).with_name("gate.json")


class Tiles(NamedTuple):
    BT: int
    """Rows of a chunk, tokens times ranks."""
    BP: int
    BR: int
    warps: int
    stages: int = 1


CANDIDATES = {
    "forward": (*(Tiles(64, 64, 64, warps) for warps in (4, 8)), *(Tiles(rows, 32, 32, 4) for rows in (64, 32, 16))),
    "backward": (
        *(Tiles(32, 32, 32, warps) for warps in (4, 8)),
        *(Tiles(32, 16, 16, 4), Tiles(16, 32, 32, 4), Tiles(16, 16, 16, 4)),
    ),
}
"""In the order in which the gate tries them; the first that fits is the table's."""


def cache_folder() -> Path:
    """For what was found on this machine's devices: verdicts and tiles."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mambakit" / "triton"


@cache
def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text("utf-8")) if TABLE.is_file() else {"tiles": {}, "refused": {}}


@cache
def tuned() -> dict[str, Any]:
    """What `mambakit tune` found."""
    return read_cache(cache_folder() / "tiles.json")


def read_cache(file: Path) -> dict[str, Any]:
    """What is kept in a file of the cache folder: nothing, if it is damaged or not there."""
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def write_cache(file: Path, values: dict[str, Any]) -> None:
    """At once or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(values, indent=1), "utf-8")
    draft.replace(file)


@cache
def target_of(index: int | None) -> str:
    """The gate's word for a device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def key_of(pass_: str, parts: int, ranks: int, head: str = "") -> str:
    """Which tiles serve a call: by its pass, the bfloat16 numbers of an input, and the size of a head; without it, for
    heads that the gate did not see, by whether there are ranks to sum over."""
    # Two parts fit where three do.
    return f"{pass_} {1 if parts == 1 else 3}" + (f" {head}" if head else " ranks" if ranks > 1 else "")


def tiles_for(pass_: str, parts: int, v_bsmhp: Tensor, b_bsmgr: Tensor) -> Tiles:
    """The table's, or what was tuned; the smallest where nobody knows the device."""
    device, (m, _, p), r = v_bsmhp.device, v_bsmhp.shape[2:], b_bsmgr.shape[4]
    if device.type != "cuda":
        return CANDIDATES[pass_][0]
    tuned_ones, gates = tuned().get(torch.cuda.get_device_name(device), {}), table()["tiles"]
    for found in (tuned_ones, gates.get(target_of(device.index), {})):
        for head in (f"{p}x{r}x{m}", ""):
            if (key := key_of(pass_, parts, m, head)) in found:
                return Tiles(*found[key])
    return CANDIDATES[pass_][-1]


def why_refused(shape: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the gate found that a shape does not fit a device: forward, and backward where gradients may be wanted."""
    if interpreted() or device.type != "cuda":
        return None
    refused = table()["refused"].get(target_of(device.index), {})
    # What fits in float32 fits in float16, which has fewer parts.
    end = "bfloat16" if dtype == torch.bfloat16 else "float32"
    return refused.get(f"{shape}, {end}") or (
        refused.get(f"{shape}, backward, {end}") if torch.is_grad_enabled() else None
    )


why_refused._dynamo_marked_constant = True  # type: ignore[attr-defined]
