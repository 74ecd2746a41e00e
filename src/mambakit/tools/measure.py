"""Timing by interleaved repetition, peak memory by counting allocations, and the machine's own limits beside them."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before the profiler is first used: it announces every start on stderr otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch


def interleaved(
    tasks: dict[Any, Callable[[], Any]],
    repeats: int,
    seconds: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Seconds of every task, in rounds that run each once: noise hits all of them alike.

    The first round warms up and is not counted. A task that has used up `seconds` sits out the rest, but has one count.
    """
    times: dict[Any, list[float]] = {name: [] for name in tasks}
    spent = dict.fromkeys(tasks, 0.0)
    for turn in range(repeats + 1):
        for done, (name, task) in enumerate(tasks.items()):
            if spent[name] > seconds and times[name]:
                continue
            progress(f"round {turn}/{repeats}, {done + 1} of {len(tasks)}: {name}")
            start = clock()
            task()
            took = clock() - start
            spent[name] += took
            # What took long needed no warming up, and is too slow to run twice for nothing.
            if turn or took > seconds / 2:
                times[name].append(took)
    progress("")
    return times


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def median(times: list[float]) -> float:
    return statistics.median(times)


def gemm_task(dtype: torch.dtype = torch.float32, size: int = 2048) -> tuple[Callable[[], Any], float]:
    """One large matrix product and its FLOPs: what the machine can do at best."""
    left, right = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    return lambda: left @ right, 2.0 * size**3


def read_task(megabytes: int = 640) -> tuple[Callable[[], Any], int]:
    """One pass over memory that no cache holds, and its bytes: how fast weights can be read at best."""
    memory = torch.ones(megabytes * 250_000)
    return lambda: memory.sum(), memory.nbytes


def peak_bytes(task: Callable[[], Any]) -> int:
    """The most memory `task` held at once beyond what was there before, by torch's own allocations."""
    task()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        task()
    found, trees = [], list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while trees:
        event = trees.pop()
        trees += event.children
        if type(event.extra_fields).__name__ == "_ExtraFields_Allocation":
            found.append((event.start_time_ns, event.extra_fields))
    # What was there before may be freed too, which says nothing about the task; the profiler knows the sizes of some.
    live: dict[int, int] = {}
    total = peak = 0
    for _, allocation in sorted(found, key=lambda each: each[0]):
        if allocation.alloc_size > 0:  # type: ignore[attr-defined]  # not in the stubs
            live[allocation.ptr] = allocation.alloc_size  # type: ignore[attr-defined]
            total += allocation.alloc_size  # type: ignore[attr-defined]
        else:
            total -= live.pop(allocation.ptr, 0)  # type: ignore[attr-defined]
        peak = max(peak, total)
    return peak


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [headings, *rows]
    ]
    return "\n".join(f"| {line} |" for line in [lines[0], " | ".join("-" * width for width in widths), *lines[1:]])
