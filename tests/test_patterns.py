"""The language of `--layers`, and runs of hybrids."""

import json
import shutil

import pytest
import torch

import mambakit as mk
from mambakit.blocks.moe import balance_loss
from mambakit.cli.main import main
from mambakit.models.patterns import read_pattern
from mambakit.training.objective import Objective

A, B = mk.MLPConfig(4, 8), mk.MLPConfig(4, 12)
BLOCKS = {"M2": lambda: A, "A": lambda: B}


@pytest.mark.parametrize(
    ("pattern", "want"),
    [
        ("M2", [(A,)]),
        ("M2 M2 A", [(A,), (A,), (B,)]),
        ("2*M2 A", [(A,), (A,), (B,)]),
        ("M2+A A", [(A, B), (B,)]),
        ("2*(M2 A)", [(A,), (B,), (A,), (B,)]),
        ("2*(M2 2*(A M2+A)) A", 2 * [(A,), (B,), (A, B), (B,), (A, B)] + [(B,)]),
        ("M2|A+M2", [(mk.ParallelConfig(A, B), A)]),
        ("M2|A|M2", [(mk.ParallelConfig(mk.ParallelConfig(A, B), A),)]),
        ("(M2)", [(A,)]),
        (" 3 * M2 ", [(A,)] * 3),
    ],
)
def test_patterns(pattern, want):
    assert read_pattern(pattern, BLOCKS) == tuple(want)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("M2 X", "at 'X': expected one of M2, A"),
        ("M2+", "at its end: expected one of M2, A"),
        ("M2||A", r"at '\|'"),
        ("(M2", "at its end: expected a layer"),
        ("M2)", r"at '\)': expected a layer"),
        ("()", r"1 to 1000 layers|expected a layer"),
        ("2*", "at its end: expected a layer"),
        ("0*M2", "expected 1 to 1000 layers"),
        ("1001*M2", "expected 1 to 1000 layers"),
        ("999*(999*(M2))", "expected 1 to 1000 layers"),
        ("M2,A", "at ','"),
    ],
)
def test_what_makes_no_sense(pattern, told):
    with pytest.raises(ValueError, match=told):
        read_pattern(pattern, BLOCKS)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(4):
        (tmp_path / "text" / f"{i}.txt").write_text("state and scan and gate and attention " * (20 + i))
    return tmp_path / "text"


SIZES = [
    "--d-model=16",
    "--head-dim=8",
    "--batch=2",
    "--seq-len=24",
    "--warmup=1",
    "--no-tensorboard",
    "--state-rank=8",
]


@pytest.mark.parametrize("layers", ["M2 A", "M1+F A+F", "M3|A+E", "A"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_hybrids_train_and_generate(layers, optimizer, text, tmp_path, capsys):
    out = tmp_path / "run"
    run = ["train", str(text), f"--layers={layers}", f"--optimizer={optimizer}", "--experts=3", *SIZES]
    assert main([*run, "--steps=6", "--save-every=3", "--out", str(out)]) == 0
    assert mk.load_model(out / "model").config.n_layer == len(layers.split())
    steps = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert ("balance" in steps[0]) == ("E" in layers)
    assert main(["generate", str(out), "--prompt=state", "--max-new-tokens=5", "--seed=1"]) == 0
    assert capsys.readouterr().out


def test_resumed_in_the_middle(text, tmp_path):
    """With keys and values carried from step to step."""
    run = ["train", str(text), "--layers=M2+E A", "--boundaries=carry", "--window=40", *SIZES, "--steps=8"]
    assert main([*run, "--save-every=4", "--out", str(tmp_path / "whole")]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    saved = sorted((tmp_path / "part" / "checkpoints").iterdir())
    shutil.rmtree(saved[-1])
    assert main(["train", "--resume", "--out", str(tmp_path / "part")]) == 0
    weights = [mk.load_model(tmp_path / name / "model").state_dict() for name in ("whole", "part")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_layers_computed_again_change_nothing(text, tmp_path):
    weights = []
    for flag in ([], ["--checkpoint-layers"]):
        out = tmp_path / f"run{len(flag)}"
        assert main(["train", str(text), "--layers=M2+E A", "--steps=3", *SIZES, *flag, "--out", str(out)]) == 0
        weights.append(mk.load_model(out / "model").state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-6)


def test_families_that_make_no_model_alone(text, tmp_path, capsys):
    assert main(["train", str(text), "--family=mlp", "--out", str(tmp_path / "run"), *SIZES]) == 2
    assert "--family mlp makes no model alone" in capsys.readouterr().err


@pytest.mark.parametrize("segment_len", [None, 4])
def test_balance_is_part_of_the_objective(segment_len):
    torch.manual_seed(0)
    config = mk.ModelConfig(layers=((mk.MoEConfig(8, 12, 4, 2),), (mk.MoEConfig(8, 12, 4, 1),)), vocab_size=16)
    model = mk.LanguageModel(config).double()
    pairs = torch.randint(16, (2, 8, 2))
    plain, _ = Objective(model, segment_len)(pairs)
    objective = Objective(model, segment_len, balance=0.5)
    loss, _ = objective(pairs)
    assert objective.balanced is not None
    torch.testing.assert_close(loss, plain + 0.5 * objective.balanced, rtol=1e-12, atol=0)
    loss.backward()
    router = model.get_parameter("backbone.layers.0.mixer.router.weight")
    assert router.grad is not None
    assert router.grad.abs().max() > 0
    model.eval()
    assert objective(pairs)[0] == plain
    assert balance_loss(model) is None
