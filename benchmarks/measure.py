"""What every benchmark shares: the measuring tools of the package, and the JSON file it leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mambakit.tools.measure import environment, gemm_task, interleaved, median, peak_bytes, progress, table

__all__ = ["gemm_task", "interleaved", "median", "peak_bytes", "progress", "table"]
__all__ += ["peak_resident_bytes", "resident_bytes", "write_json"]

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()

    return {
        "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain") else ""),
        "command": "python -m benchmarks." + Path(sys.argv[0]).stem + "".join(f" {word}" for word in sys.argv[1:]),
        **environment(),
    }


def resident_bytes() -> int:
    """Of this process's memory, as Linux counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that it has had since the program began; `getrusage` may tell that of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def write_json(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    file.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    return file
