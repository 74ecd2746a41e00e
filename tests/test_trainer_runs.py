"""Whole runs in processes of their own: killed, resumed, spread over ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mambakit as mk
from mambakit.checkpoints.adapters import WEIGHTS
from mambakit.cli.main import main
from mambakit.training.run import read_log
from trainer_cases import REFUSED, losses

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")


def forked_runs(what: str, folder: Path) -> str:
    return started("forked_runs.py", what, folder)


def started(script: str, *arguments: object) -> str:
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, HERE / script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_twenty_kills_leave_the_losses_bit_identical(tmp_path):
    assert forked_runs("kills", tmp_path).startswith("20 kills in ")
    expected = losses(tmp_path / "whole")
    assert len(expected) == 40
    for folder in tmp_path.glob("killed-*"):
        assert losses(folder) == expected
        assert not list((folder / "checkpoints").glob(".*")), "something unfinished was left"
        for name, tensor in mk.load_model(folder / "model").state_dict().items():
            assert torch.equal(tensor, mk.load_model(tmp_path / "whole" / "model").state_dict()[name]), name


def test_kills_full_disks_and_second_writers_leave_the_end_bit_identical(tmp_path):
    """A little of `make torture`, through the command line."""
    assert started("torture.py", tmp_path / "runs", 5).splitlines()[-1].startswith("5 kills, 0 losses")


def test_a_bad_step_of_one_rank_is_one_of_all(tmp_path):
    assert forked_runs("bad_steps", tmp_path).count("both ranks agree") == 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    forked_runs("ranks", folder)
    return folder


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("run", ["2-{}", "2-{}-segments", "2-{}-then-1", "1-then-2-{}"])
def test_ranks_give_the_losses_of_one_process(ranks, run, parallel):
    """In float64, where noise is far below anything that could be wrong."""
    found = losses(ranks / run.format(parallel))
    assert len(found) == 8
    assert found == pytest.approx(losses(ranks / "1"), abs=1e-9)
    assert found != [found[0]] * 8


def test_ranks_that_share_sequences_give_the_losses_of_one_process(tmp_path):
    forked_runs("contexts", tmp_path)
    expected = losses(tmp_path / "1")
    for run in ("2-ddp", "2-fsdp", "4-ddp", "4-fsdp", "2-fsdp-then-1", "1-then-4-ddp", "2-ddp-then-4-fsdp"):
        found = losses(tmp_path / run)
        assert len(found) == 8
        assert found == pytest.approx(expected, abs=1e-9), run


def test_ranks_that_share_heads_give_the_losses_of_one_process(tmp_path):
    forked_runs("tensors", tmp_path)
    expected = losses(tmp_path / "1")
    runs = ["2-ddp", "4-ddp", "4-fsdp", "4-ddp-both", "4-fsdp-both", "4-fsdp-both-then-1", "1-then-4-ddp"]
    for run in runs:
        found = losses(tmp_path / run)
        assert len(found) == 8
        assert found == pytest.approx(expected, abs=1e-9), run
    wanted = mk.load_model(tmp_path / "1" / "model").state_dict()
    for name, tensor in mk.load_model(tmp_path / "4-fsdp-both" / "model").state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-7, rtol=0)
    assert losses(tmp_path / "4-fsdp-muon") == pytest.approx(losses(tmp_path / "1-muon"), abs=2e-3)
    check_conversion(tmp_path / "4-fsdp-both", "official", tmp_path / "converted")


def test_torchrun_gives_the_losses_of_one_process(tmp_path):
    """Of the command itself, on ranks that share sequences, heads and parameters."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}. " for n in range(400)))
    tiny = ["--d-model=16", "--layers=1", "--state-rank=8", "--head-dim=8", "--batch=4", "--seq-len=16", "--warmup=2"]
    tiny += ["--steps=6", "--held-out=0.2", "--no-tensorboard", "--json"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--no-python"]
    mambakit = Path(sys.executable).parent / "mambakit"
    shared = ["--context-parallel=2", "--tensor-parallel=2", "--parallel=fsdp"]
    for out, command in (("one", [mambakit]), ("four", [sys.executable, *torchrun, mambakit])):
        done = subprocess.run(
            [*command, "train", text, "--out", tmp_path / out, *tiny, *(shared if out == "four" else [])],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    found, expected = (read_log(tmp_path / out / "log.jsonl")[-1]["bits_per_byte"] for out in ("four", "one"))
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "run",
    [
        *("2-ddp-muon", "2-fsdp-muon", "1-then-2-ddp-muon", "1-then-2-fsdp-muon", "2-fsdp-then-2-ddp-muon"),
        *("2-fsdp-then-4-fsdp-muon", "4-fsdp-then-1-muon"),
    ],
)
def test_ranks_give_the_losses_of_one_process_with_muon(ranks, run):
    assert losses(ranks / run) == pytest.approx(losses(ranks / "1-muon"), abs=1e-12)


def test_two_ranks_have_half_of_what_one_has(tmp_path):
    """Parameters, gradients and states, counted; and nothing else is alive that would make more than 0.6 of it."""
    told = [line.split() for line in forked_runs("memory", tmp_path).splitlines()]
    for optimizer in ("adamw", "muon"):
        counted = {
            world: [tuple(map(int, line[2:])) for line in told if line[:2] == [optimizer, world]] for world in "12"
        }
        [(one, alive)] = counted["1"]
        assert len(counted["2"]) == 2
        # A matrix whose rows are not even leaves one rank with a row more.
        assert all(share <= 0.51 * one and rest <= 0.6 * alive for share, rest in counted["2"]), counted


def test_the_command_goes_on_with_other_ranks_and_meshes(tmp_path):
    """In double precision nothing is lost. In float32 Muon rounds to bfloat16 inside: a resumed run is as far off as
    one of a single process whose weights are off by a rounding at the start.
    """
    forked_runs("resumes", tmp_path)

    def off(run: str, from_: str) -> float:
        found, expected = losses(tmp_path / run), losses(tmp_path / from_)
        assert len(found) == len(expected) == 24
        return max(abs(a - b) for a, b in zip(found, expected, strict=True))

    assert off("resumed-adamw-exact", "whole-adamw-exact") <= 1e-9
    assert off("resumed-muon-exact", "whole-muon-exact") <= 1e-9
    assert off("resumed-adamw", "whole-adamw") <= 1e-5
    noise = off("nudged-muon", "whole-muon")
    assert noise < 1e-3
    assert off("resumed-muon", "whole-muon") <= 10 * noise


def test_ranks_that_cannot_run_say_so_once(tmp_path):
    """One line of one rank, before anything is written."""
    *refused, other_width, other_optimizer, behind, other_mesh = forked_runs("refused", tmp_path).splitlines()
    assert len(refused) == len(REFUSED)
    for line, (options, why) in zip(refused, REFUSED, strict=True):
        codes, is_left, *said = line.split("|")
        told = [text for text in said if text]
        assert codes == "[2, 2, 2, 2]", options
        assert is_left == "False", options
        assert len(told) == 1, told
        assert told[0].startswith("mambakit train: ")
        assert why in told[0]
    for line, why in (
        (other_width, "has d_model = 16; resuming cannot make it 32"),
        (other_optimizer, "has optimizer = 'adamw'; resuming cannot make it 'muon'"),
        (behind, "the run is at step 2 already; --steps 1 is behind it"),
        (other_mesh, "has batch = 4; resuming cannot make it 2"),
    ):
        codes, is_left, *said = line.split("|")
        told = [text for text in said if text]
        assert codes == "[2, 2, 2, 2]"
        assert len(told) == 1, told
        assert why in told[0]


def test_shares_of_checkpoints(tmp_path):
    """Written aside, damaged, or with a full disk on one of two ranks."""
    told = forked_runs("aside", tmp_path).splitlines()
    for run in ("2", "2-damaged"):
        assert losses(tmp_path / run) == pytest.approx(losses(tmp_path / "1"), abs=1e-12)
    assert [line for line in told if "shares/__1_0.distcp is not what was written" in line and "one before" in line]
    assert "going on from step 6" in told
    full = [line for line in told if line.startswith("step 1 could not be saved")]
    assert len(full) == 2
    assert len(set(full)) == 1
    assert full[0].endswith("the last checkpoint is that of step 0")


@pytest.mark.parametrize("format", ["mambakit", "official"])
@pytest.mark.parametrize("run", ["2-fsdp-muon", "2-fsdp-then-4-fsdp-muon"])
def test_what_ranks_wrote_in_shares_is_converted(ranks, run, format, tmp_path):
    check_conversion(ranks / run, format, tmp_path / "converted")


def check_conversion(run: Path, format: str, target: Path) -> None:
    """The last checkpoint has the weights that the run ended with, bit for bit in float32, in which it saved them."""
    last = max((run / "checkpoints").iterdir())
    assert len(list((last / "shares").glob("*.distcp"))) > 1
    assert main(["convert", str(last), str(target), "--format", format, "--dtype=float32"]) == 0
    activation = "heavy_tail" if format == "official" else None
    found = mk.load_model(target, a_activation=activation).state_dict()
    expected = mk.load_model(run / "model").state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("run", ["2-ddp", "2-fsdp", "2-fsdp-then-1"])
def test_ranks_save_the_model_of_one_process(ranks, run):
    expected = mk.load_model(ranks / "1" / "model").state_dict()
    found = mk.load_model(ranks / run / "model").state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-7, rtol=0)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_train_the_adapters_of_one_process(ranks, parallel):
    """The same losses and the same adapters saved, in float64."""
    run = ranks / f"2-{parallel}-lora"
    assert losses(run) == pytest.approx(losses(ranks / "1-lora"), abs=1e-9)
    assert losses(run) != losses(ranks / f"2-{parallel}")
    found, expected = (load_file(folder / "adapter" / WEIGHTS) for folder in (run, ranks / "1-lora"))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-7, rtol=0)
