"""The compile gate: kernels compiled for GPUs that need not be here, and what their binaries say.

`python -m mambakit.kernels.triton.gate [target ...]` compiles what `gate.json` does not hold yet and writes it there. A
row is about its own kernels, their sizes and the version of Triton: what is about others than today's is left out, all
else stays. `--shapes` takes only those whose names begin so; `--into FILE` is another table, `--from FILE ...` takes
over the rows of others.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.triton.launch import Launch, function
from mambakit.kernels.triton.shapes import Shape, shapes
from mambakit.kernels.triton.source import hashed, kernel_hash
from mambakit.kernels.triton.ssd import cut
from mambakit.kernels.triton.tiles import CANDIDATES, TABLE, Tiles
from mambakit.kernels.triton.tiles import key_of as tiles_key

TARGETS: dict[str, tuple[str, Any, int]] = {
    **{f"sm_{n}": ("cuda", n, 32) for n in (80, 86, 89, 90, 100, 120)},
    **{name: ("hip", name, 64) for name in ("gfx90a", "gfx942", "gfx950")},
    "gfx1201": ("hip", "gfx1201", 32),
}
SHARED = {"cuda": 101_376, "hip": 65_536}
"""Bytes of shared memory a kernel may take: those of consumer cards."""
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
    torch.float64: "*fp64",
}
MATRIX = r"\b(HMMA|HGMMA|UTCHMMA|v_s?mfma|v_s?wmma)"


def compile_for(target: str, call: Launch) -> Any:
    """The binary of what a launch would start."""
    triton, compiler, backends = map(importlib.import_module, ("triton", "triton.compiler", "triton.backends.compiler"))
    kernel = function(call.kernel)
    values = dict(zip(kernel.arg_names, call.arguments, strict=False)) | call.sizes
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if name in call.sizes or value is None:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], attributes[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if not kernel.params[i].do_not_specialize and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = compiler.ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": call.warps, "num_stages": call.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=backends.GPUTarget(*TARGETS[target]), options=options)


def facts(binary: Any) -> dict[str, int]:
    """Bytes of shared memory and of stack, registers, matrix instructions and atomics."""
    shared = int(binary.metadata.shared)
    if "cubin" not in binary.asm:
        text = binary.asm["amdgcn"]
        count = {name: int(n) for name, n in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", text)}
        found = {"stack": count["private_segment_fixed_size"], "registers": count["vgpr_count"]}
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            used = tool("cuobjdump", "--dump-resource-usage", file.name)
            text = tool("nvdisasm", file.name)
        registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", used)[0]
        found = {"stack": int(stack), "registers": int(registers)}
    atomics = len(re.findall(r"\b(?:ATOM|RED|ATOMG|ATOMS)\b|_atomic_", text))
    return {"shared": shared, **found, "matrix": len(re.findall(MATRIX, text)), "atomics": atomics}


def tool(name: str, *arguments: str) -> str:
    """What one of the programs says that come with Triton."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None, "the gate has imported Triton"
    assert spec.origin is not None, "Triton is a package on disk"
    program = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True).stdout


def why_not(target: str, found: dict[str, int], needs_matrix: bool) -> str | None:
    """Why a compiled kernel does not pass; None if it does."""
    limit = SHARED[TARGETS[target][0]]
    if found["stack"]:
        return f"{found['stack']} bytes of stack"
    if found["shared"] > limit:
        return f"{found['shared']} bytes of shared memory, at most {limit} are there"
    if needs_matrix and not found["matrix"]:
        return "no matrix instruction"
    return f"{found['atomics']} atomics" if found["atomics"] else None


def with_tiles(call: Launch, tiles: Tiles) -> Launch:
    """The launch as it would be with these tiles."""
    return call._replace(sizes=call.sizes | cut(tiles, call.sizes), warps=tiles.warps, stages=tiles.stages)


def judge(target: str, launches: list[Launch]) -> tuple[dict[str, dict[str, int]], str | None]:
    """What the binaries of a shape's kernels say, and why one of them does not pass."""
    found: dict[str, dict[str, int]] = {}
    # What takes most registers first: where it does not fit, the rest need not be compiled.
    for call in sorted(launches, key=lambda call: call.kernel != "ssd.grad_values"):
        name = call.kernel + (" back" if call.sizes.get("BACK") else "")
        if name in found:
            continue
        try:
            found[name] = facts(compile_for(target, call))
            reason = why_not(target, found[name], call.kernel.startswith("ssd."))
        except Exception as problem:  # Triton's compiler raises of many kinds
            reason = f"does not compile: {type(problem).__name__}"
        if reason is not None:
            return found, f"{name}: {reason}"
    return found, None


def dtype_of(shape: Shape) -> str:
    return str(shape.dtype).removeprefix("torch.")


def about(shape: Shape) -> str:
    """What a row is made from: kernels, and what they are compiled for."""

    def seen(value: Any) -> Any:
        return value.dtype if isinstance(value, Tensor) else value % 16 == 0 if isinstance(value, int) else value

    calls = [
        (call.kernel, kernel_hash(call.kernel), *map(seen, call.arguments), call.sizes, call.warps, call.stages)
        for call in shape.launches
    ]
    return hashed(repr(calls), repr(CANDIDATES) if shape.name.startswith("ssd") else "")


def run(target: str, shape: Shape, chosen: dict[str, list[int]]) -> dict[str, Any]:
    """A row of the table; the core's has the first tiles that fit, or the last that do not.

    What was too large for one head, or for fewer digits or ranks, is not tried again: `chosen` has what fitted so far.
    """
    row: dict[str, Any] = {"target": target, "shape": shape.name, "dtype": dtype_of(shape), "about": about(shape)}
    if not shape.name.startswith("ssd"):
        found, reason = judge(target, shape.launches)
        return row | {"kernels": found, "reason": reason}
    pass_, size = "backward" if shape.name.endswith("backward") else "forward", shape.launches[0].sizes
    row["key"] = [pass_, size["IN"], size["M"], f"{size['P']}x{size['R']}x{size['M']}"]
    tried = [list(tiles) for tiles in CANDIDATES[pass_]]
    easier = [tiles_key(pass_, parts, ranks) for parts in (1, size["IN"]) for ranks in (1, size["M"])]
    first = max(tried.index(chosen.get(key, tried[0])) for key in easier)
    for tiles in CANDIDATES[pass_][first:]:
        found, reason = judge(target, [with_tiles(call, tiles) for call in shape.launches])
        row |= {"tiles": list(tiles), "kernels": found, "reason": reason}
        if reason is None:
            break
    return row


def read_table(file: Path) -> dict[str, Any]:
    """What a file holds about these kernels and this Triton."""
    table = {"triton": importlib.metadata.version("triton"), "tiles": {}, "refused": {}, "rows": []}
    if file.is_file():
        take_over(table, json.loads(file.read_text("utf-8")))
    return table


def write_table(table: dict[str, Any], file: Path) -> None:
    """Whole or not at all: compiling is stopped and gone on with. A row is a line."""
    rows = ",\n".join(json.dumps(row) for row in table["rows"])
    head = json.dumps({name: value for name, value in table.items() if name != "rows"})
    draft = file.with_suffix(".draft")
    draft.write_text(f'{head[:-1]}, "rows": [\n{rows}\n]}}\n', "utf-8")
    draft.replace(file)


def key_of(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["target"], row["shape"], row["dtype"]


def add(table: dict[str, Any], row: dict[str, Any]) -> None:
    """A row, and what follows from it: tiles for its head and for those that were not compiled, or a refusal."""
    table["rows"].append(row)
    if row["reason"] is not None:
        name = f"{row['shape']}, {row['dtype']}"
        table["refused"].setdefault(row["target"], {})[name] = f"the compile gate refused it: {row['reason']}"
    elif "tiles" in row:
        chosen, (pass_, parts, ranks, head) = table["tiles"].setdefault(row["target"], {}), row["key"]
        chosen[tiles_key(pass_, parts, ranks, head)] = row["tiles"]
        common, tried = tiles_key(pass_, parts, ranks), [list(tiles) for tiles in CANDIDATES[pass_]]
        chosen[common] = max(chosen.get(common, row["tiles"]), row["tiles"], key=tried.index)


def take_over(table: dict[str, Any], other: dict[str, Any]) -> None:
    """Rows that are not known yet, and about what is compiled today."""
    if other.get("triton") != table["triton"]:
        return
    known, today = {key_of(row) for row in table["rows"]}, {(s.name, dtype_of(s)): about(s) for s in all_shapes()}
    for row in other["rows"]:
        if key_of(row) not in known and today.get((row["shape"], row["dtype"])) == row["about"]:
            add(table, row)


def all_shapes() -> Iterator[Shape]:
    for dtype in (torch.bfloat16, torch.float32):
        yield from shapes(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="all if none is given")
    parser.add_argument("--dtype", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--into", type=Path, default=TABLE)
    parser.add_argument("--from", nargs="+", type=Path, dest="others", help="only take over rows")
    parser.add_argument("--shapes", nargs="+", default=[""], metavar="PREFIX", help="such as 'mamba3_step 128x128'")
    args = parser.parse_args()
    table = read_table(args.into)
    for other in args.others or ():
        take_over(table, json.loads(other.read_text("utf-8")))
    done = {key_of(row) for row in table["rows"]}
    for shape in () if args.others else all_shapes():
        if dtype_of(shape) not in args.dtype or not shape.name.startswith(tuple(args.shapes)):
            continue
        for target in args.targets or TARGETS:
            if (target, shape.name, dtype_of(shape)) in done:
                continue
            row = run(target, shape, table["tiles"].setdefault(target, {}))
            add(table, row)
            write_table(table, args.into)
            print(target, row["shape"], row["dtype"], row.get("tiles", ""), row["reason"] or "fits", flush=True)
    write_table(table, args.into)


if __name__ == "__main__":
    main()
