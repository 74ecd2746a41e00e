"""`mambakit bench`: the rows it promises, its report, and its complaints. Times are not looked at."""

import json

import pytest

from mambakit.blocks.mamba2 import Mamba2, Mamba2Config
from mambakit.cli.main import main
from mambakit.tools.benchmark import module_flops

SMALL = ["bench", "--d-model", "32", "--tokens", "20", "--per-head-dim", "8", "--state-rank", "8", "--repeats", "1"]


def test_rows_and_report(tmp_path, capsys):
    paths = ["--algorithms", "minimal", "serial_recalculated", "--chunk-lens", "5", "16", "--backends", "torch"]
    assert main([*SMALL, *paths, "--out", str(tmp_path / "report")]) == 0
    result = json.loads((tmp_path / "report" / "bench.json").read_text())
    rows = [(row["kind"], row["algorithm"], row["chunk_len"]) for row in result["rows"]]
    expected = [
        (kind, algorithm, length)
        for algorithm in ("minimal", "serial_recalculated")
        for length in (5, 16)
        for kind in ("forward", "train", "step")
    ]
    assert rows == expected
    assert all(row["ms"] > 0 and row["peak_mb"] > 0 and row["ran"] == "torch" for row in result["rows"])
    assert result["limits"]["gemm_gflops"] > 0
    assert result["limits"]["read_gb_s"] > 0
    page = (tmp_path / "report" / "bench.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("<!doctype html>", "")
    assert (tmp_path / "report" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "serial_recalculated" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["mamba1", "mamba3", "mamba3-mimo"])
def test_families(family, capsys):
    assert main([*SMALL, "--family", family, "--kinds", "forward", "--backends", "auto", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["kind"] == "forward"


def test_model(capsys):
    model = ["--what", "model", "--layers", "2", "--vocabulary", "50", "--backends", "torch", "--json"]
    assert main([*SMALL, *model]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3


@pytest.mark.parametrize(
    "option", ["--batch=" + "9" * 30, "--tokens=" + "9" * 30, "--chunk-lens=" + "9" * 30, "--threads=0", "--threads=-1"]
)
def test_numbers_beyond_all_sizes_are_one_line(option, capsys):
    assert main([*SMALL, option]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"mambakit bench: {option.partition('=')[0]} is ") or "chunk_len is 999" in told
    assert told.count("\n") == 1


def test_bad_sizes_are_one_line(capsys):
    assert main(["bench", "--tokens", "0"]) == 2
    assert "--tokens is 0" in capsys.readouterr().err
    assert main([*SMALL, "--per-head-dim", "7"]) == 2
    assert "per_head_dim" in capsys.readouterr().err


def test_flops_of_a_block_by_hand():
    block = Mamba2(Mamba2Config(d_model=32, per_head_dim=8, state_rank=8))
    projections = 2 * 10 * (32 * (2 * 64 + 2 * 8 + 8) + 64 * 32)
    scan = 2 * 10 * (64 * (8 + 64) + 2 * 64 * 8)
    assert module_flops(block, 10) == projections + scan
