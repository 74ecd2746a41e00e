"""`mambakit train`: from files to a model, resumed, interrupted, and what it says about bad input."""

import json
import os
import resource
import signal
from itertools import product

import pytest

import mambakit as mk
from mambakit.cli.main import main
from mambakit.cli.run_options import read_options
from mambakit.training.loop import Trainer
from trainer_cases import losses, make_documents, make_tokenizer

TINY = ["--d-model=16", "--layers=1", "--state-rank=8", "--head-dim=8", "--batch=4", "--seq-len=16", "--warmup=2"]
TINY += ["--evaluate-every=4", "--save-every=2", "--held-out=0.2", "--no-tensorboard"]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in make_documents():
        (folder / name).write_bytes(content)
    return folder


def train(*arguments) -> int:
    return main(["train", *map(str, arguments), *TINY])


def test_a_model_is_trained_and_can_be_loaded(data, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(data, "--out", out, "--steps=6", "--optimizer=muon", "--json") == 0
    printed, told = capsys.readouterr()
    result = json.loads(printed)
    assert 0 < result["bits_per_byte"] < 9
    assert len(losses(out)) == 6
    assert "parameters" in told
    assert "held-out text" in told
    assert "step 6/6" in told
    assert "tokens/s" in told
    model = mk.load_model(result["model"])
    assert model.config.vocab_size == 257
    assert isinstance(model.config.block, mk.Mamba3Config)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (["--family=mamba1"], mk.Mamba1Config),
        (["--family=mamba2", "--schedule=wsd", "--boundaries=carry"], mk.Mamba2Config),
        (["--mimo-rank=2", "--mlp=128", "--accumulate=2", "--segment-len=7", "--autocast=bfloat16"], mk.Mamba3Config),
    ],
)
def test_options_reach_the_model_and_the_run(data, tmp_path, options, kind):
    assert train(data, "--out", tmp_path / "out", "--steps=2", *options) == 0
    config = mk.load_model(tmp_path / "out" / "model").config
    assert isinstance(config.block, kind)
    if kind is mk.Mamba3Config:
        assert (config.block.ranks, config.d_intermediate) == (2, 128)


def test_a_tokenizer_file_goes_along_with_the_model(data, tmp_path, capsys):
    tokenizer = make_tokenizer(tmp_path)
    assert train(data, "--out", tmp_path / "out", "--steps=2", "--tokenizer", tokenizer) == 0
    assert (tmp_path / "out" / "model" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    (data / "bad").write_bytes(b"caf\xe9" * 100)
    assert train(data, "--out", tmp_path / "other", "--steps=2", "--tokenizer", tokenizer) == 2
    assert "bad is not UTF-8 (byte 0xe9 at 3)" in capsys.readouterr().err
    assert train(data, "--out", tmp_path / "other", "--steps=2") == 0  # bytes are bytes


def test_curves_are_logged_for_tensorboard(data, tmp_path):
    assert main(["train", str(data), "--out", str(tmp_path / "out"), "--steps=2", *TINY, "--tensorboard"]) == 0
    (events,) = (tmp_path / "out" / "logs").iterdir()
    assert b"train/bits_per_byte" in events.read_bytes()
    assert b"held_out/bits_per_byte" in events.read_bytes()


def test_ctrl_c_saves_and_the_run_goes_on_from_there(data, tmp_path, capsys, monkeypatch):
    assert train(data, "--out", tmp_path / "whole", "--steps=8") == 0
    advance = Trainer.advance

    def interrupted(self):
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert train(data, "--out", tmp_path / "out", "--steps=8") == 130
    assert signal.getsignal(signal.SIGINT) is before
    told = capsys.readouterr().err
    assert "stopped after step 5; saved, --resume goes on from there" in told
    assert sorted(os.listdir(tmp_path / "out" / "checkpoints")) == ["step-000000004", "step-000000005"]
    assert mk.load_model(tmp_path / "out" / "model")
    monkeypatch.undo()
    assert main(["train", "--out", str(tmp_path / "out"), "--resume"]) == 0  # options and data are those of the run
    assert "going on from step 5" in capsys.readouterr().err
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_a_full_disk_keeps_the_last_checkpoint(data, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(data, "--out", out, "--steps=4") == 0
    (out / "checkpoints" / "step-000000004" / "state.pt").write_bytes(b"damaged")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # of a file: less than a checkpoint has
    try:
        assert main(["train", "--out", str(out), "--resume"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = capsys.readouterr().err
    assert "step-000000004 is damaged (state.pt is not what was written); using the one before" in told
    assert "step 4 could not be saved" in told.splitlines()[-1]
    assert "the last checkpoint is that of step 2" in told.splitlines()[-1]
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert len(losses(out)) == 4


def test_resuming_keeps_the_run_as_it_was(data, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["train", "--out", str(out), "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
    assert train(data, "--out", out, "--steps=4") == 0
    assert train(data, "--out", out, "--steps=4") == 2
    assert "holds a run already; --resume goes on with it" in capsys.readouterr().err
    assert main(["train", "--out", str(out), "--resume", "--lr=1"]) == 2
    assert "has lr = 0.002; resuming cannot make it 1.0" in capsys.readouterr().err
    assert main(["train", "--out", str(out), "--resume", "--save-every=3", "--accumulate=2"]) == 0
    (data / "d0").write_bytes(b"changed")
    assert main(["train", "--out", str(out), "--resume"]) == 2
    assert "the text has changed" in capsys.readouterr().err


def test_bad_input_is_one_line_and_exit_code_2(data, tmp_path, capsys):
    empty, binary = tmp_path / "empty", tmp_path / "x.bin"
    empty.mkdir()
    binary.write_bytes(b"a\0b")
    out = ["--out", tmp_path / "out", "--steps=2"]
    for arguments, message in [
        ([empty, *out], "holds no text"),
        ([binary, *out], "is binary"),
        ([tmp_path / "absent", *out], "there is no file or folder"),
        ([data, "--out", data, "--steps=2"], "is not an empty folder"),
        ([data, *out, "--accumulate=3"], "3 equal parts"),
        *(([data, *out, f"--lr={lr}"], "lr = ") for lr in ("inf", "nan", "0", "-1")),
        *(([data, *out, f"--weight-decay={share}"], "weight_decay") for share in ("inf", "nan", "-1")),
        *(([data, *out, f"--balance={share}"], "balance") for share in ("inf", "nan", "-1")),
        *(([data, *out, f"--clip={most}"], "clip = ") for most in ("nan", "0", "-1")),
        *(
            ([data, *out, f"--{name}={share}"], name)
            for name in ("floor", "decay")
            for share in ("inf", "nan", "-1", "2")
        ),
        ([data, *out, "--device=vulkan"], "device is 'vulkan', which torch does not know or have here"),
        ([data, *out, "--family=mamba2", "--mimo-rank=2"], "--mimo-rank is for mamba3"),
        ([data, *out, "--tokenizer", binary], "is not a file of the tokenizers package"),
        ([data / "d1", *out], "give more text, or a smaller --batch or --seq-len"),
    ]:
        assert train(*arguments) == 2, arguments
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1
        assert message in told[0]
    assert not (tmp_path / "out").exists()


def test_a_second_process_leaves_a_run_alone(data, tmp_path, capsys, monkeypatch):
    """Whether it starts anew or resumes."""
    out, advance = tmp_path / "out", Trainer.advance

    def second(self):
        if self.step in (0, 3):
            monkeypatch.setattr(Trainer, "advance", advance)
            assert train(data, "--out", out, "--steps=6") == 2
            assert main(["train", "--out", str(out), "--resume"]) == 2
            monkeypatch.setattr(Trainer, "advance", second)
            told = capsys.readouterr().err.splitlines()[-2:]
            assert all("is in use by another run" in line for line in told)
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", second)
    assert train(data, "--out", out, "--steps=6") == 0
    monkeypatch.undo()
    assert len(losses(out)) == 6
    assert main(["train", "--out", str(out), "--resume"]) == 0


def flip(content: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def test_a_damaged_model_of_the_run_does_not_block_a_resume(data, tmp_path):
    out = tmp_path / "out"
    assert train(data, "--out", out, "--steps=2") == 0
    (out / "model" / "config.json").write_bytes(b"{")
    assert main(["train", "--out", str(out), "--resume", "--steps=3"]) == 0
    mk.load_model(out / "model")


def test_flips_in_the_options_do_not_block_a_resume(data, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(data, "--out", out, "--steps=4") == 0
    options, expected = (out / "run.json").read_bytes(), losses(out)
    chosen = json.loads(options)
    whole, _ = read_options(out)
    for place, bit in product(range(len(options)), range(8)):
        (out / "run.json").write_bytes(flip(options, place, bit))
        assert read_options(out)[0] == whole, (place, bit)
    (out / "run.json").write_bytes(flip(options, options.index(b"0.2"), 0))
    capsys.readouterr()
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert f"{out / 'run.json'} is damaged" in capsys.readouterr().err
    assert json.loads((out / "run.json").read_bytes()) == chosen
    assert losses(out) == expected
    for path in (out / "run.json", out / ".run.json"):
        path.write_bytes(b"{")
    assert main(["train", "--out", str(out), "--resume"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert str(out / "run.json") in told
    assert str(out / ".run.json") in told


def test_options_that_a_run_does_not_have_yet(data, tmp_path):
    """Runs made before an option existed, and before options had a checksum."""
    out = tmp_path / "out"
    assert train(data, "--out", out, "--steps=4") == 0
    options = json.loads((out / "run.json").read_bytes())
    for name in ("skip_bad_steps", "sha256"):
        del options[name]
    for path in (out / "run.json", out / ".run.json"):
        path.unlink()
    (out / "run.json").write_text(json.dumps(options))
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert json.loads((out / "run.json").read_bytes())["skip_bad_steps"] == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"family": "mamba7"}, "family = 'mamba7'"),
        ({"d_model": "16"}, "d_model = '16'"),
        ({"batch": None}, "batch = None"),
        ({"binary": 3}, "binary = 3"),
        ({"data": "x"}, "data = 'x'"),
        ({"d_moddl": 3}, "d_moddl"),
    ],
)
def test_options_edited_by_hand_are_checked(data, tmp_path, capsys, changed, message):
    out = tmp_path / "out"
    assert train(data, "--out", out, "--steps=2") == 0
    options = json.loads((out / "run.json").read_bytes())
    del options["sha256"]
    (out / "run.json").write_text(json.dumps({**options, **changed}))
    (out / ".run.json").unlink()
    capsys.readouterr()
    assert main(["train", "--out", str(out), "--resume"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert f"{out / 'run.json'}" in told
    assert message in told
