"""Proof on the device: a kernel is compared there, once, with torch's operators before `"auto"` uses it.

Compilers for GPUs have been silently wrong before, and no test of ours has ever run on one. A verdict is kept per
device, version of Triton and source of the kernels. The fused steps have no plain form: they are compared with those
of the CPU.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.kernels.triton.source import source_hash
from mambakit.kernels.triton.tiles import cache_folder, read_cache, write_cache
from mambakit.ops.backends import _Setting
from mambakit.ops.causal_conv import causal_conv
from mambakit.ops.mamba3_prepare import mamba3_prepare
from mambakit.ops.norm import finish
from mambakit.ops.operation import OPERATIONS
from mambakit.ops.selective_scan import selective_scan
from mambakit.ops.ssd import ssd
from mambakit.ops.ssd_path import SsdPath

_now = threading.local()
"""`proving`, while a kernel is asked for by name to be compared."""
_found: dict[Path, dict[str, list["Finding"]]] = {}
"""What this process has found, by file and key."""
LIMITS = {torch.float32: (2e-5, 2e-4), torch.bfloat16: (1e-2, 3e-2), torch.float16: (2e-3, 6e-3)}
"""Largest error of values and of gradients, relative to the largest element."""
Case = tuple[Callable[..., Any], dict[str, Tensor], dict[str, Any]]


class Finding(NamedTuple):
    operation: str
    dtype: str
    case: str
    error: float
    limit: float
    reason: str = ""
    """What was raised instead of a result."""

    @property
    def passed(self) -> bool:
        return not self.reason and self.error <= self.limit


def drawer() -> Callable[..., Tensor]:
    source = torch.Generator().manual_seed(11)
    return lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64)


def some_segments(b: int, s: int) -> Tensor:
    return (torch.arange(s) // 37).expand(b, s).contiguous()


def ssd_cases() -> dict[str, Case]:
    found = {}
    for p, r, m, g in ((64, 128, 1, 1), (64, 128, 4, 2), (128, 64, 1, 1), (48, 100, 3, 1), (16, 16, 2, 2)):
        draw, (b, s, h) = drawer(), (1, 150, 2)
        tensors = {
            "v_bsmhp": draw(b, s, m, h, p),
            "b_bsmgr": draw(b, s, m, g, r) / 8,
            "c_bsmgr": draw(b, s, m, g, r) / 8,
        }
        tensors |= {"da_bsh": -draw(b, s, h).abs(), "w_now_bsh": draw(b, s, h), "w_later_bsh": draw(b, s, h)}
        tensors["state_bhpr"] = draw(b, h, p, r)
        found[f"{p}x{r}, ranks {m}"] = (core, tensors, {"segments_bs": some_segments(b, s) if m < 4 else None})
    return found


def core(backend: str, **given: Any) -> Any:
    return ssd(**given, path=SsdPath(backend=backend))


def scan_cases() -> dict[str, Case]:
    found = {}
    for i, r, g in ((96, 16, 1), (10, 3, 2)):
        draw, (b, s) = drawer(), (2, 70)
        tensors = {
            "x_bsi": draw(b, s, i),
            "dt_bsi": draw(b, s, i),
            "a_ir": -draw(i, r).abs(),
            "b_bsgr": draw(b, s, g, r),
        }
        tensors |= {"c_bsgr": draw(b, s, g, r), "state_bir": draw(b, i, r), "skip_i": draw(i), "z_bsi": draw(b, s, i)}
        tensors["dt_bias_i"] = draw(i)
        options = {"dt_softplus": True, "segments_bs": some_segments(b, s)}
        found[f"states of {r}"] = (lambda backend, **given: selective_scan(**given, backend=backend), tensors, options)
    return found


def conv_cases() -> dict[str, Case]:
    found = {}
    for v, k in ((70, 4), (7, 2)):
        draw, (b, s) = drawer(), (2, 70)
        tensors = {"x_bsv": draw(b, s, v), "weight_vk": draw(v, k), "bias_v": draw(v), "window_bvk": draw(b, v, k)}
        options = {"silu": True, "segments_bs": some_segments(b, s)}
        found[f"{k} taps"] = (lambda backend, **given: causal_conv(**given, backend=backend), tensors, options)
    return found


def finish_cases() -> dict[str, Case]:
    found = {}
    for i, group, m, first in ((1536, 1536, 1, False), (2560, 2560, 1, False), (96, 48, 4, True)):
        draw, (b, s) = drawer(), (2, 9)
        tensors = {"y_bsmi": draw(b, s, m, i), "x_bsi": draw(b, s, i), "skip_i": draw(i), "z_bsi": draw(b, s, i)}
        tensors["weight_i"] = draw(i)
        if m > 1:
            tensors |= {f"mimo_{name}_mi": draw(m, i) for name in "xzo"}
        options = {"group_size": group, "norm_before_gate": first}
        found[f"groups of {group}, ranks {m}"] = (
            lambda backend, **given: finish(**given, backend=backend),
            tensors,
            options,
        )
    return found


def prepare_cases() -> dict[str, Case]:
    found = {}
    for r, m, pairing in ((128, 1, "interleaved"), (20, 3, "half")):
        draw, (b, s, h, g, a) = drawer(), (2, 40, 4, 2, r // 4)
        tensors = {"b_bsmgr": draw(b, s, m, g, r), "c_bsmgr": draw(b, s, m, g, r), "b_weight_r": draw(r)}
        tensors |= {"c_weight_r": draw(r), "b_bias_hmr": draw(h, m, r), "c_bias_hmr": draw(h, m, r)}
        tensors |= {"rot_bsa": draw(b, s, a), "dt_bsh": draw(b, s, h).abs() / 9, "angle_bha": draw(b, h, a)}
        options = {"pairing": pairing, "segments_bs": some_segments(b, s)}
        found[f"states of {r}, ranks {m}"] = (turned, tensors, options)
    return found


def turned(backend: str, **given: Any) -> Any:
    b, c, angle = mamba3_prepare(**given, backend=backend)
    # Angles are defined up to whole turns.
    return b, c, angle.cos(), angle.sin()


CASES = {
    "ssd": ssd_cases,
    "selective_scan": scan_cases,
    "causal_conv": conv_cases,
    "finish": finish_cases,
    "mamba3_prepare": prepare_cases,
}
WIDE = {"da_bsh", "w_now_bsh", "w_later_bsh", "state_bhpr", "a_ir", "state_bir", "dt_bsh", "angle_bha"}
"""What stays float32 beside narrow data."""


def results(
    case: Case, backend: str, device: torch.device, dtype: torch.dtype | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients; with no dtype in float64, of the numbers that float64 gets from the narrow ones."""
    function, tensors, options = case
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    leaves = {name: x.to(device, dtype).requires_grad_() for name, x in tensors.items()}
    with torch.enable_grad():
        found = function(backend, **leaves, **options)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        draw = drawer()
        loss = sum((y.double() * draw(*y.shape).to(device)).sum() for y in outputs)
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return [y.detach() for y in outputs], list(grads)


def relative(found: Tensor, expected: Tensor) -> float:
    worst = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1.0)
    return float(torch.nan_to_num(worst, torch.inf))


def measure(operation: str, device: torch.device, dtype: torch.dtype) -> list[Finding]:
    """Every case of an operation on a device, its kernels against torch's operators in float64."""
    if operation in STEPS:
        return [measure_step(operation, device)] if dtype == torch.float32 else []
    found, (limit, gradient_limit) = [], LIMITS[dtype]
    for name, (function, tensors, options) in CASES[operation]().items():
        rounded = {n: x.to(torch.float32 if n in WIDE else dtype) for n, x in tensors.items()}
        named = (operation, str(dtype).removeprefix("torch."), name)
        try:
            got = results((function, rounded, options), "triton", device, None)
            want = results((function, rounded, options), "torch", device, torch.float64)
            pairs = [zip(*both, strict=True) for both in zip(got, want, strict=True)]
            # Here at the latest a device says what went wrong on it.
            values, grads = (max(relative(a, b) for a, b in part) for part in pairs)
        except Exception as problem:  # a compiler's or a driver's, of many kinds
            found.append(Finding(*named, float("nan"), limit, in_a_line(problem)))
            continue
        found += [Finding(*named, values, limit), Finding(*named[:2], f"{name}, gradients", grads, gradient_limit)]
    return found


def in_a_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


def step_inputs(operation: str) -> list[Any]:
    draw, (b, h, p, r, m, i, k) = drawer(), (2, 4, 48, 20, 2, 70, 4)
    if operation == "mamba1_step_conv":
        found: list[Any] = [draw(b, 2 * i), draw(b, i, k), draw(i, k), draw(i), None]
    elif operation == "mamba1_step":
        found = [draw(b, 2 * i), draw(b, i), draw(b, i), draw(b, 5 + 32), draw(b, i, 16), draw(i, 16) / 4, draw(i)]
        found += [None]
    elif operation == "mamba2_step":
        v = h * p + 2 * r
        found = [
            draw(b, h * p + v + h),
            draw(b, v, k),
            draw(b, h, p, r),
            draw(v, k),
            draw(v),
            draw(h),
            draw(h),
            draw(h),
        ]
        found += [draw(h * p), None, None, h * p, 1e-5, 0.0, 10.0, False]
    else:
        angles = 5
        found = [draw(b, 2 * h * p + 2 * m * r + 3 * h + angles), draw(b, h, p, r), draw(b, m, h, r), draw(b, h, p)]
        found += [draw(b, h, angles), draw(h), draw(r), draw(r), draw(h, m, r), draw(h, m, r)]
        found += [*(draw(h, m, p) for _ in range(3)), draw(h), draw(h * p), None, None]
        found += [angles, False, False, True, 1e-5, 0.0, 10.0, 1e-4, 1.0]
    return [x.float() if isinstance(x, Tensor) else x for x in found]


STEPS = ("mamba1_step_conv", "mamba1_step", "mamba2_step", "mamba3_step")


def measure_step(operation: str, device: torch.device) -> Finding:
    kernels, inputs = OPERATIONS[operation].kernels, step_inputs(operation)
    limit, _ = LIMITS[torch.float32]
    named = (operation, "float32", "a token")
    reason = kernels["cpu"].backend.why_missing()
    if reason is not None:
        return Finding(*named, float("nan"), limit, f"nothing to compare with: the CPU kernels are missing, {reason}")
    want = kernels["cpu"].forward(*inputs)
    try:
        got = kernels["triton"].forward(*(x.to(device) if isinstance(x, Tensor) else x for x in inputs))
        return Finding(*named, max(relative(a.cpu(), b) for a, b in zip(got, want, strict=True)), limit)
    except Exception as problem:  # a compiler's or a driver's, of many kinds
        return Finding(*named, float("nan"), limit, in_a_line(problem))


def verdict_file(device: torch.device) -> Path:
    """Another device, Triton or kernel has another file, so that no verdict outlives what it was about."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    about = (name, torch.__version__, importlib.metadata.version("triton"), source_hash())
    return cache_folder() / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:24]}.json"


def kept(file: Path) -> dict[str, Any]:
    """What is known about a device, from the file and from this process, which may not be able to write it."""
    return read_cache(file) | _found.get(file, {})


def keep(file: Path, key: str, rows: list[Finding]) -> None:
    """Beside what other processes have found meanwhile: the ranks of a run all begin at once."""
    _found.setdefault(file, {})[key] = rows
    # But what is about the room that was left and not about the kernel.
    lasting = {name: rows for name, rows in kept(file).items() if "OutOfMemoryError" not in str(rows)}
    with contextlib.suppress(OSError):  # no room, or no right to write: the next process asks again
        write_cache(file, lasting)


def is_known(operation: str, device: str, dtype: torch.dtype) -> bool:
    """Whether a verdict can be given without running anything."""
    return f"{operation} {dtype}" in kept(verdict_file(torch.device(device)))


def findings(operation: str, device: torch.device, dtype: torch.dtype) -> list[Finding]:
    """What was found before, or is found now and kept."""
    file, key = verdict_file(device), f"{operation} {dtype}"
    if key not in kept(file):
        _now.proving = True
        try:
            # Not what somebody asks about who wants to know who runs what.
            with _Setting("notes", None):
                rows = measure(operation, device, dtype)
        finally:
            _now.proving = False
        keep(file, key, rows)
    return [Finding(*row) for row in kept(file)[key]]


def verdict(operation: str, device: str, dtype: torch.dtype) -> str | None:
    """None: right numbers on this device; otherwise what went wrong, in a clause."""
    return None if getattr(_now, "proving", False) else kept_verdict(operation, device, dtype)


@functools.cache
def kept_verdict(operation: str, device: str, dtype: torch.dtype) -> str | None:
    for finding in findings(operation, torch.device(device), dtype):
        if not finding.passed:
            wrong = finding.reason or f"its error is {finding.error:.1e}, {finding.limit:.0e} is allowed"
            return f"it failed its proof on this device ({finding.dtype}, {finding.case}): {wrong}"
    return None


def all_findings(device: torch.device) -> list[Finding]:
    """Of every operation and dtype."""
    return [row for name in (*CASES, *STEPS) for dtype in LIMITS for row in findings(name, device, dtype)]
