"""The compile gate: kernels compiled for GPUs that are not here fit them, and one compilation serves every length."""

import importlib
import importlib.util
import json
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import gpu_tables

from cases import INTERPRETED
from mambakit.kernels.triton import (
    causal_conv,
    fused_step,
    gate,
    mamba3_prepare,
    norm,
    selective_scan,
    source,
    ssd,
    tiles,
)
from mambakit.kernels.triton.backend import EXACT
from mambakit.kernels.triton.launch import function, recording
from mambakit.kernels.triton.shapes import HEADS, shapes
from mambakit.kernels.triton.tiles import TABLE, Tiles

compiles = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or INTERPRETED,
    reason="Triton is not installed (mambakit[gpu]), or runs its interpreter",
)
ROWS = json.loads(TABLE.read_text("utf-8"))
# Of each maker one; MAMBAKIT_GATE=1 for all of the table.
SOME = [("sm_90", "ssd 64x128, ranks 1", "bfloat16"), ("gfx942", "ssd 64x128, ranks 1", "bfloat16")]
CHECKED = [(r["target"], r["shape"], r["dtype"]) for r in ROWS["rows"]] if os.environ.get("MAMBAKIT_GATE") else SOME


def test_the_table_is_about_these_kernels():
    today = {(shape.name, gate.dtype_of(shape)): gate.about(shape) for shape in gate.all_shapes()}
    old = {(r["shape"], r["dtype"]) for r in ROWS["rows"] if today.get((r["shape"], r["dtype"])) != r["about"]}
    assert not old, "the kernels have changed: make gpu-gate"


def test_a_row_is_about_its_kernels(monkeypatch, tmp_path):
    """What has changed is compiled anew, and nothing else; another Triton is another table."""
    definitions, shape = source.definitions, next(s for s in shapes(torch.float32) if s.name == "finish 64, ranks 4")
    other = next(s for s in shapes(torch.float32) if s.name == "causal_conv")
    monkeypatch.setattr(gate, "all_shapes", lambda: iter((shape, other)))
    table = {"triton": "3", "tiles": {}, "refused": {}, "rows": []}
    rows = [{"target": "sm_90", "shape": s.name, "dtype": "float32", "about": gate.about(s)} for s in (shape, other)]
    for row in rows:
        gate.add(table, row | {"kernels": {}, "reason": "too large"})
    gate.write_table(table, tmp_path / "table.json")
    monkeypatch.setattr(gate.importlib.metadata, "version", lambda name: "3")
    assert gate.read_table(tmp_path / "table.json") == table
    changed = {"norm": source.definitions("norm") | {"norm.gate_of": ("other", [])}}
    monkeypatch.setattr(source, "definitions", lambda file: changed.get(file) or definitions(file))
    monkeypatch.setattr(gate, "kernel_hash", source.kernel_hash.__wrapped__)
    left = gate.read_table(tmp_path / "table.json")
    assert [row["shape"] for row in left["rows"]] == ["causal_conv"]
    assert left["refused"] == {"sm_90": {"causal_conv, float32": "the compile gate refused it: too large"}}
    monkeypatch.setattr(gate.importlib.metadata, "version", lambda name: "4")
    assert gate.read_table(tmp_path / "table.json")["rows"] == []


@compiles
def test_a_thread_reads_its_own_states(tmp_path, monkeypatch):
    """Mamba-1's backward keeps states in memory between two loops; on AMD a barrier does not wait for stores."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = next(s for s in shapes(torch.bfloat16) if s.name == "selective_scan 16, backward")
    code = gate.compile_for("gfx942", shape.launches[-1]).asm["ttgir"]
    found = re.findall(r"buffer_(store|load) .*%own\S*\].*, (#\w+)>", code)
    assert [kind for kind, _ in found] == ["store", "load"]
    assert len({layout for _, layout in found}) == 1


@compiles
def test_float32_is_no_shorter_than_it_says(tmp_path, monkeypatch):
    """Products are of bfloat16 parts with float32 sums: never of TF32 operands."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = next(s for s in shapes(torch.float32) if s.name == "ssd 64x16, ranks 1")
    call = gate.with_tiles(shape.launches[0], Tiles(16, 32, 32, 4))
    code = gate.compile_for("sm_80", call).asm["ptx"]
    assert set(re.findall(r"mma\.sync\S*", code)) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}


def test_every_row_fits_or_says_why_not():
    for row in ROWS["rows"]:
        refused = ROWS["refused"].get(row["target"], {}).get(f"{row['shape']}, {row['dtype']}")
        assert (row["reason"] is None) == (refused is None)
        if row["reason"] is None:
            for kernel, found in row["kernels"].items():
                assert gate.why_not(row["target"], found, kernel.startswith("ssd.")) is None
                assert found["atomics"] == 0


def test_the_page_has_the_table():
    """All of docs/gpu.md that is made from it or from the kernels, and what was not compiled too."""
    page = gpu_tables.PAGE.read_text("utf-8")
    assert gpu_tables.fill(page) == page, "python -m benchmarks.gpu_tables"


def test_the_core_fits_everywhere():
    """Mamba-2's and Mamba-3's heads of 64 with states of 128, forward and backward, on every target."""
    fits = {(r["target"], r["shape"], r["dtype"]) for r in ROWS["rows"] if r["reason"] is None}
    for target in gate.TARGETS:
        for end in ("", ", backward"):
            assert (target, f"ssd 64x128, ranks 1{end}", "bfloat16") in fits


def test_every_kernel_asks_for_what_the_gate_compiled(monkeypatch):
    """By the same names: what is refused is found."""
    asked: list[str] = []
    modules = (causal_conv, fused_step, mamba3_prepare, norm, selective_scan, ssd)
    for module in modules:
        monkeypatch.setattr(module, "why_refused", lambda shape, dtype, device: asked.append(shape))
    x, bsi = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)
    causal_conv.why_not(x, torch.zeros(4, 4), None, None)
    norm.why_not(bsi)
    selective_scan.why_not(bsi, bsi, torch.zeros(4, 16))
    fused_step.why_not(x, "mamba1_step_conv")
    fused_step.why_not_mamba1(torch.zeros(1, 4, 16))
    for p, r, m in HEADS:
        mamba3_prepare.why_not(torch.zeros(1, 1, m, 1, r))
        ssd.why_not(torch.zeros(1, 1, m, 1, p), torch.zeros(1, 1, m, 1, r))
        state = torch.zeros(1, 1, p, r)
        if m == 1:
            fused_step.why_not_mamba2(x, x, state)
        fused_step.why_not_mamba3(x, state, torch.zeros(1, m, 1, r), x, x)
    names = {shape.name.removesuffix(", backward") for shape in shapes(torch.float32)}
    assert set(asked) == names


def test_what_is_refused_goes_to_torch(monkeypatch):
    """With the gate's reason; backward only where gradients are wanted, and float16 as float32."""
    refused = {"sm_90": {"ssd 8x8, ranks 1, float32": "no", "ssd 8x9, ranks 1, backward, bfloat16": "not back"}}
    monkeypatch.setattr(tiles, "table", lambda: {"tiles": {}, "refused": refused})
    monkeypatch.setattr(tiles, "interpreted", lambda: False)
    monkeypatch.setattr(tiles, "target_of", lambda index: "sm_90")
    cuda = torch.device("cuda")
    assert tiles.why_refused("ssd 8x8, ranks 1", torch.float32, cuda) == "no"
    assert tiles.why_refused("ssd 8x8, ranks 1", torch.float16, cuda) == "no"
    assert tiles.why_refused("ssd 8x8, ranks 1", torch.bfloat16, cuda) is None
    assert tiles.why_refused("ssd 8x9, ranks 1", torch.bfloat16, cuda) == "not back"
    with torch.no_grad():
        assert tiles.why_refused("ssd 8x9, ranks 1", torch.bfloat16, cuda) is None


def test_tiles_of_a_device(monkeypatch):
    """A head's own, else those that fit all heads, else the smallest; what was tuned before the table's."""

    def shaped(*shape: int) -> Any:
        return SimpleNamespace(shape=shape, device=torch.device("cuda", 0))

    def chosen(p: int, m: int, parts: int = 1) -> Tiles:
        return tiles.tiles_for("forward", parts, shaped(1, 1, m, 2, p), shaped(1, 1, m, 1, 8))

    own, common, ranked, tuned = (Tiles(n, n, n, 4) for n in (64, 32, 16, 128))
    found = {"forward 1 8x8x1": own, "forward 1": common, "forward 3 ranks": ranked}
    monkeypatch.setattr(tiles, "table", lambda: {"tiles": {"sm_90": found}, "refused": {}})
    monkeypatch.setattr(tiles, "target_of", lambda index: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    monkeypatch.setattr(tiles, "tuned", dict)
    assert chosen(8, 1) == own
    assert chosen(9, 1) == common
    assert chosen(8, 2, parts=2) == chosen(8, 2, parts=3) == ranked
    assert chosen(8, 2) == tiles.CANDIDATES["forward"][-1]
    monkeypatch.setattr(tiles, "tuned", lambda: {"card": {"forward 1": tuned}})
    assert chosen(8, 1) == tuned


@compiles
@pytest.mark.parametrize(("target", "name", "dtype"), CHECKED)
def test_compiles_as_the_table_says(target, name, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = next(shape for shape in shapes(getattr(torch, dtype)) if shape.name == name)
    want = next(r for r in ROWS["rows"] if (r["target"], r["shape"], r["dtype"]) == (target, name, dtype))
    launches = shape.launches
    if "tiles" in want:
        launches = [gate.with_tiles(call, Tiles(*want["tiles"])) for call in launches]
    assert gate.judge(target, launches) == (want["kernels"], want["reason"])


def specializations(call, *inputs) -> dict[str, set[str]]:
    """What Triton would compile for the launches of a call, by its own rules."""
    jit, compiler, backends = map(
        importlib.import_module, ("triton.runtime.jit", "triton.compiler", "triton.backends.compiler")
    )
    backend = compiler.make_backend(backends.GPUTarget("cuda", 90, 32))
    found: dict[str, set[str]] = {}
    with recording() as log:
        call(*inputs)
    for launch in log:
        kernel = function(launch.kernel)
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, _ = bind(*launch.arguments, **launch.sizes)
        name = launch.kernel + str(launch.sizes.get("BACK", ""))
        found.setdefault(name, set()).add(str(specialization))
    return found


@compiles
def test_twenty_lengths_are_one_compilation():
    found: dict[str, set[str]] = {}
    for s in (1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 255, 256, 300):
        v, b = torch.zeros(2, s, 1, 3, 16), torch.zeros(2, s, 1, 1, 16)
        weights = [torch.zeros(2, s, 3) for _ in range(3)]
        state, segments = torch.zeros(2, 3, 16, 16), torch.zeros(2, s, dtype=torch.int64)
        core = (v, b, b, *weights, state, segments, 0)
        x, bc, needs = torch.zeros(2, s, 48), torch.zeros(2, s, 1, 16), [True] * 9
        conv = (x, torch.zeros(48, 4), torch.zeros(48), torch.zeros(2, 48, 4), segments, None, [48], True)
        rows = x.flatten(0, 1)
        ends = (rows[:, None], rows, torch.zeros(48), rows, None, None, None, torch.zeros(48), 48, 1, 1e-5)
        turned = (b, b, torch.zeros(16), torch.zeros(16), torch.zeros(3, 1, 16), torch.zeros(3, 1, 16))
        turned = (*turned, torch.zeros(2, s, 4), weights[0], torch.zeros(2, 3, 4), segments, 1e-5, 1.0, True)
        out = torch.zeros(2, s, 1, 3, 16)
        scan = (x, x, torch.zeros(48, 16), bc, bc, None, torch.zeros(48), x, torch.zeros(48), None, True)
        for call in (
            (ssd.forward, EXACT, *core),
            (ssd.backward, EXACT, [v, state], *core, needs),
            (causal_conv.convolve, *conv),
            (causal_conv.convolve_backward, [x, conv[3]], *conv, needs),
            (norm.finish, *ends),
            (norm.finish_backward, [rows], *ends, needs),
            (mamba3_prepare.prepare, *turned),
            (mamba3_prepare.prepare_backward, [out, out, turned[8]], *turned, needs),
            (selective_scan.scan, *scan),
            (selective_scan.scan_backward, [x, torch.zeros(2, 48, 16)], *scan, needs),
        ):
            for name, keys in specializations(*call).items():
                found.setdefault(f"{call[0].__module__}.{call[0].__name__} {name}", set()).update(keys)
    assert len(found) > 10
    assert {name: len(keys) for name, keys in found.items() if len(keys) > 1} == {}
