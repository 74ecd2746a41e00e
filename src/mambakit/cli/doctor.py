"""`mambakit doctor`: what is installed, what is used, and whether its numbers are right."""

import argparse
import json
import math
import sys
import time
from typing import Any

from mambakit.tools.checks import Check, devices, kernels, operations, proofs, run_checks, versions
from mambakit.tools.measure import environment, progress, table

EXAMPLE = "mambakit doctor --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> None:
    start, checks = time.perf_counter(), []
    for check in run_checks():
        checks.append(check)
        progress(f"{len(checks)} checks, {check.device} {check.dtype} {check.backend}: {check.what}")
    progress("")
    found = {
        "versions": versions(),
        "machine": environment(),
        "devices": devices(),
        "kernels": kernels(),
        "operations": dict(operations()),
        "proofs": proofs(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    if args.json:
        # NaN is no JSON: a check that could not run has no error to show.
        rows = [{**c._asdict(), "error": c.error if math.isfinite(c.error) else None} for c in checks]
        print(json.dumps({**found, "checks": [{**r, "passed": c.passed} for r, c in zip(rows, checks, strict=True)]}))
    else:
        print(describe(found, checks))
    if not all(check.passed for check in checks):
        # Nothing the caller typed is wrong, so this is no error of use: a failing check has its own exit code.
        sys.exit(1)


def describe(found: dict[str, Any], checks: list[Check]) -> str:
    lines = [f"{name:16} {version}" for name, version in found["versions"].items()]
    machine, built = found["machine"], found["kernels"]
    lines.append(f"{'processor':16} {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads")
    lines.append(f"{'devices':16} {', '.join(found['devices'])}")
    if built["built"]:
        threads = "torch's threads" if built["torch_threads"] else "one thread: torch's pool was not found"
        amx = "" if built["why_no_amx"] is None else f" (AMX: {built['why_no_amx']})"
        used = f"built and used: {built['instruction_set']} of {', '.join(built['usable'])}; {threads}; "
        used += f"instructions for narrow numbers: {built['extension']}{amx}"
    else:
        used = f"not used, torch's operators run instead: {built['reason']}"
    lines += [f"{'CPU kernels':16} {used}", ""]
    lines += [
        table(["operation", "kernels beside torch's operators"], [list(row) for row in found["operations"].items()]),
        "",
    ]

    if found["proofs"]:
        shown = [
            [
                *(row[name] for name in ("device", "operation", "dtype", "case")),
                *(f"{row['error']:.1e}", f"{row['limit']:.0e}"),
                "passed" if row["passed"] else f"FAILED, not used: {row['reason']}",
            ]
            for row in found["proofs"]
        ]
        lines += [table(["device", "operation", "dtype", "proof on the device", "error", "allowed", ""], shown), ""]
    groups: dict[tuple[str, ...], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.device, check.dtype, check.backend), []).append(check)
    rows = []
    for group, members in groups.items():
        worst = max(members, key=lambda check: check.error / check.limit if not check.reason else math.inf)
        passed = sum(check.passed for check in members)
        shown = worst.reason or f"{worst.error:.1e} of {worst.limit:.0e} allowed"
        rows.append([*group, f"{passed} of {len(members)}", f"{worst.what}: {shown}"])
    lines.append(table(["device", "dtype", "backend", "passed", "closest to its limit"], rows))
    failed = [check for check in checks if not check.passed]
    for check in failed:
        lines.append(
            f"FAILED {check.device} {check.dtype} {check.backend}, {check.what}: {check.reason or check.error}"
        )
    verdict = f"{len(failed)} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
    lines += ["", f"{verdict} in {found['seconds']} s"]
    return "\n".join(lines)
