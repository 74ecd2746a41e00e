"""`mambakit convert`: formats there and back, and what they cannot say."""

import json

import pytest
import torch

import mambakit as mk
from mambakit.cli.main import main
from mambakit.text.tokens import Bytes
from trainer_cases import make_model


def convert(*arguments) -> int:
    return main(["convert", *map(str, arguments)])


def equal(folder, model) -> bool:
    found = mk.load_model(folder).state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_there_and_back(tmp_path, capsys):
    model = make_model()
    mk.save_model(model, tmp_path / "own")
    Bytes().save(tmp_path / "own")
    assert convert(tmp_path / "own", tmp_path / "official", "--format=official") == 0
    assert "in the format 'official'" in capsys.readouterr().out
    assert (tmp_path / "official" / "pytorch_model.bin").exists()
    back = (tmp_path / "official", tmp_path / "back", "--format=mambakit", "--a-activation=heavy_tail", "--json")
    assert convert(*back) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "mambakit"
    assert equal(tmp_path / "back", model)
    assert (tmp_path / "back" / "text.json").read_bytes() == (tmp_path / "own" / "text.json").read_bytes()


def test_for_transformers_in_another_dtype(tmp_path):
    block = mk.Mamba2Config(d_model=16, state_rank=8, per_head_dim=8)
    model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=1, vocab_size=64))
    mk.save_model(model, tmp_path / "run" / "model")
    assert convert(tmp_path / "run", tmp_path / "hf", "--format=hf", "--dtype=bfloat16") == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "mamba2"
    assert mk.load_model(tmp_path / "hf").backbone.layers[0].mixer.in_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("format", "message"), [("hf", 'has no Mamba-3; "mambakit" and "official" have'), (None, "there is no directory")]
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, format, message):
    mk.save_model(make_model(), tmp_path / "own")
    source = tmp_path / ("own" if format else "absent")
    assert convert(source, tmp_path / "to", "--format", format or "official") == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert message in told[0]
    assert not (tmp_path / "to").exists()


def test_two_dashes_are_no_value(tmp_path, capsys):
    assert convert(tmp_path / "own", tmp_path / "to", "--format=--") == 2
    assert capsys.readouterr().err == (
        "mambakit convert: --format=--: two dashes by themselves are no value; they end the options\n"
    )
    assert convert("--format=hf", "--", "--x=--", tmp_path / "to") == 2  # a folder of that name
    assert "there is no directory --x=--" in capsys.readouterr().err


def test_a_checkpoint_of_a_run(tmp_path, capsys):
    """As it was saved, with the run's tokens; what is damaged or asked for in vain is one line."""
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question. " * 40)
    sizes = ["--family=mamba2", "--d-model=16", "--layers=1", "--state-rank=8", "--head-dim=8", "--batch=2"]
    sizes += ["--seq-len=16", "--steps=2", "--warmup=1", "--held-out=0.2", "--no-tensorboard"]
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *sizes]) == 0
    [step] = (tmp_path / "run" / "checkpoints").iterdir()
    trained = mk.load_model(tmp_path / "run")
    for format in ("mambakit", "official", "hf"):
        assert convert(step, tmp_path / format, "--format", format) == 0
        assert equal(tmp_path / format, trained)
        assert mk.load_tokenizer(tmp_path / format).encode("to") == mk.load_tokenizer(tmp_path / "run").encode("to")
    capsys.readouterr()
    assert convert(step, tmp_path / "to", "--format=hf", "--norm-group-size=8") == 2
    assert "--norm-group-size is for checkpoints of others" in capsys.readouterr().err
    (step / "state.pt").write_bytes(b"?")
    assert convert(step, tmp_path / "to", "--format=hf") == 2
    assert "is damaged (state.pt is not what was written)" in capsys.readouterr().err
