"""What functions around models refuse, each in one line that names the argument."""

from pathlib import Path

import pytest
import torch

import mambakit as mk
from mambakit.arguments import check_count, find_device, find_path, shown
from mambakit.cli import main as cli
from mambakit.models.quantization import quantization_report
from trainer_cases import make_model

IDS = torch.ones(1, 4, dtype=torch.int64)


def test_shown_is_a_line():
    assert shown(torch.zeros(2, 2)) == "tensor([[0., 0.], [0., 0.]])"
    assert shown(10**5000) == "a int"
    assert len(shown("x" * 1000)) == 80


def test_counts_and_their_ends():
    check_count("n", 3, least=3, most=3)
    check_count("n", None, least=3, optional=True)
    for value in (2, 4, 3.0, True, None, "3"):
        with pytest.raises(ValueError, match=r"^n is .*, expected a whole number of at least 3 and at most 3$"):
            check_count("n", value, least=3, most=3)


@pytest.mark.parametrize("device", ["nowhere", "vulkan", 10**30, b"\xff", None, []], ids=str)
def test_devices(device):
    with pytest.raises(ValueError, match=r"^device is .*, which torch does not know or have here"):
        find_device(device)


@pytest.mark.parametrize("path", [None, b"x", 3, "\ud800"], ids=ascii)
def test_paths(path):
    with pytest.raises(ValueError, match=r"^place is "):
        find_path("place", path)
    assert find_path("place", "x") == Path("x")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mk.add_lora(None, 2), "model is a NoneType, expected a model"),
        (lambda: mk.add_lora(make_model(), 10**30), "rank = 1000"),
        (lambda: mk.add_lora(make_model(), 2, alpha="x"), "alpha is 'x', expected a finite number"),
        (lambda: mk.add_lora(make_model(), 2, alpha=float("inf")), "alpha is inf"),
        (lambda: mk.add_lora(make_model(), 2, targets=None), "targets is None, expected names"),
        (lambda: mk.merge_lora(3), "model is a int"),
        (lambda: mk.save_lora(mk.add_lora(make_model(), 2), None), "directory is None"),
        (lambda: mk.load_lora(None, "x"), "model is a NoneType"),
        (lambda: mk.quantize(None), "model is a NoneType"),
        (lambda: mk.quantize(make_model(), []), r"bits is \[\], expected 16, 8 or 4"),
        (lambda: mk.quantize(make_model(), 4, 2**40), "group_size is 1099511627776"),
        (lambda: quantization_report(make_model(), make_model(), None), "ids_bs has to be a tensor"),
        (lambda: quantization_report(torch.nn.Linear(2, 2), make_model(), IDS), "model is a Linear, expected a Lang"),
        (lambda: quantization_report(make_model().to("meta"), make_model(), IDS), "and has no numbers"),
        (lambda: mk.quantize(make_model().to("meta")), "in_proj.weight is a Parameter on meta"),
        (lambda: mk.save_model(make_model().to("meta"), "x"), "norm.weight is on the meta device or a fake"),
        (lambda: mk.save_lora(mk.add_lora(make_model(), 2).to("meta"), "x"), "lora_A.weight is on the meta device"),
        (lambda: make_model().to("meta")(IDS), "ids_bs is on cpu but embedding on meta"),
        (lambda: mk.parallel.tensor_parallel(None, None), "model is a NoneType"),
        (lambda: mk.parallel.joined(make_model(), None), "tensors is a NoneType"),
        (lambda: mk.parallel.parted(None, {}), "model is a NoneType"),
        (lambda: mk.parallel.whole_cache(torch.nn.Linear(2, 2), ()), "model is a Linear, expected a Stack"),
        (lambda: mk.parallel.share_of_cache(make_model(), 3), "cache is a int, expected"),
        (lambda: mk.parallel.token_losses(None, IDS, IDS), "model is a NoneType"),
        (lambda: mk.parallel.token_losses(make_model(), IDS, IDS[:, 1:]), r"next_bs is torch.int64 of shape \(1, 3\)"),
        (lambda: mk.parallel.token_losses(make_model(), IDS, IDS - 2), "next_bs holds -1, expected 0 to"),
        (lambda: mk.load_model("x", dtype=[]), r"dtype = \[\] is not one of"),
        (lambda: mk.load_model("x", device="nowhere"), "device is 'nowhere'"),
        (lambda: mk.load_model(None), "path_or_hub_name is None"),
        (lambda: mk.save_model(make_model(), "x", []), r"format = \[\] is unknown"),
        (lambda: mk.save_model(make_model(), "x", max_shard_bytes="x"), "max_shard_bytes = 'x'"),
        (lambda: mk.param_groups(None), "module is a NoneType"),
        (lambda: mk.param_groups(make_model(), muon=torch.zeros(2)), r"muon is tensor\(\[0., 0.\]\), expected True"),
        (lambda: mk.depth_aware_bias(-1, 2), "n_mixing is -1"),
        (lambda: mk.explain(None), "call is a NoneType"),
        (lambda: mk.load_tokenizer(None), "path_or_hub_name is None"),
    ],
)
def test_around_models(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        call()
    assert not list(tmp_path.iterdir())


def test_a_model_that_no_machine_has_room_for(tmp_path, capsys):
    (tmp_path / "text").write_text("some text " * 100)
    arguments = ["--steps=1", "--d-model=100000000", "--head-dim=100000000", "--layers=1", "--batch=1", "--seq-len=8"]
    assert cli.main(["train", str(tmp_path / "text"), "--out", str(tmp_path / "run"), *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
