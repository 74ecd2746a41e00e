"""Publishing models and fetching them, from a hub in this process: exactly these files, a card, versions, no code."""

import functools
import json
import sys
from typing import Any

import pytest
import torch

import mambakit as mk
from fake_hub import FakeHub
from mambakit.checkpoints.card import Record, card
from mambakit.cli.main import main
from mambakit.training.publishing import read_record
from trainer_cases import make_documents, make_model

hub_package = pytest.importorskip("huggingface_hub")
NAME = "someone/tiny"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    made = FakeHub()
    monkeypatch.setattr(
        hub_package,
        "snapshot_download",
        functools.partial(hub_package.snapshot_download, endpoint=made.address, cache_dir=tmp_path / "cache"),
    )
    monkeypatch.setattr(
        hub_package, "HfApi", lambda **given: HF_API(**{**given, "endpoint": made.address, "token": "none"})
    )
    yield made
    made.close()


HF_API = hub_package.HfApi


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training run of a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "notes.txt").write_bytes(b"\n".join(content for _, content in make_documents()))
    sizes = ("--d-model=16", "--layers=1", "--head-dim=8", "--state-rank=8", "--batch=2", "--seq-len=16")
    options = ("--steps=3", "--warmup=1", "--no-tensorboard", "--json")
    assert main(["train", str(folder / "notes.txt"), "--out", str(folder / "run"), *sizes, *options]) == 0
    return folder / "run"


def files_of(hub: FakeHub, revision: str = "main") -> dict[str, bytes]:
    return hub.files[NAME, revision]


def same(a: mk.LanguageModel, b: mk.LanguageModel) -> bool:
    weights = b.state_dict()
    return all(torch.equal(tensor, weights[name]) for name, tensor in a.state_dict().items())


def head_of(text: str) -> dict[str, Any]:
    _, head, _ = text.split("---\n", 2)
    return {key: json.loads(value) for key, value in (line.split(": ", 1) for line in head.splitlines())}


def test_there_and_back(hub, run):
    """A run is published with what it needs to be talked to, and comes back by its name."""
    model = mk.load_model(run)
    address = model.push_to_hub(NAME, run=run, license="mit", private=True)
    assert address.startswith(f"{hub.address}/{NAME}/commit/")
    text = {"text.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert files_of(hub).keys() == {"README.md", "config.json", "model.safetensors", *text}
    # Versions of the client say it in one of two ways.
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"
    again = mk.from_pretrained(NAME)
    assert same(again, model)
    assert same(mk.LanguageModel.from_pretrained(NAME), model)
    fetched = {path.split("/")[-1] for path in hub.asked if "/resolve/" in path}
    assert "README.md" not in fetched


def test_the_card_tells_what_the_run_recorded(hub, run, capsys):
    assert main(["push", str(run), NAME, "--license=apache-2.0", "--tag=tiny"]) == 0
    assert f"/{NAME}/commit/" in capsys.readouterr().out
    text = files_of(hub)["README.md"].decode()
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    bits = [line["bits_per_byte"] for line in lines if "bits_per_byte" in line][-1]
    head = head_of(text)
    assert head["license"] == "apache-2.0"
    assert head["tags"] == ["mambakit", "mamba-3", "tiny"]
    assert head["library_name"] == "mambakit"
    (result,) = head["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == round(bits, 4)
    assert result["dataset"]["name"] == "notes.txt"
    for told in (
        "- Data: notes.txt\n",
        "- Steps: 3 of 32 tokens\n",
        f"held-out text: {bits:.4f}\n",
        "- Optimizer: adamw",
    ):
        assert told in text
    assert str(run.parent) not in text, "where it lay is nobody's concern"
    assert json.loads((run / "run.json").read_text())["text"] in text
    # The hub's client takes it for a card.
    data = hub_package.ModelCard(text).data
    assert (data.license, data.library_name, data.eval_results[0].metric_value) == (
        "apache-2.0",
        "mambakit",
        round(bits, 4),
    )


def test_quantized_models_are_published_too(hub, run, tmp_path):
    assert main(["quantize", str(run), str(tmp_path / "small"), "--bits=4", "--json"]) == 0
    mk.push_to_hub(tmp_path / "small", NAME, run=run, base_model="someone/large")
    head = head_of(files_of(hub)["README.md"].decode())
    assert (head["base_model"], head["tags"]) == ("someone/large", ["mambakit", "mamba-3", "int4"])
    assert same(mk.from_pretrained(NAME), mk.load_model(tmp_path / "small"))


def test_revisions(hub):
    """A branch and a commit stay what they are."""
    first, second = make_model(), make_model()
    with torch.no_grad():
        second.backbone.norm_f.weight += 1
    address = first.push_to_hub(NAME)
    second.push_to_hub(NAME, revision="later")
    assert same(mk.load_model(NAME, revision="later"), second)
    assert same(mk.load_model(NAME, revision=address.rpartition("/")[2]), first)
    assert same(mk.load_model(NAME), first)
    with pytest.raises(ValueError, match=f"no directory {NAME}, and the hub did not give it: "):
        mk.load_model(NAME, revision="absent")


def test_nothing_but_data_is_fetched(hub):
    make_model().push_to_hub(NAME)
    others = {"modeling.py": b"raise SystemExit", "setup.sh": b"", "evil.pkl": b"", "weights.pt": b""}
    files_of(hub).update(others)
    mk.from_pretrained(NAME)
    assert not [path for path in hub.asked if any(path.endswith(name) for name in others)]


def test_a_folder_instead(run, tmp_path, capsys):
    assert main(["push", str(run), NAME, "--folder", str(tmp_path / "up")]) == 0
    names = sorted(path.name for path in (tmp_path / "up").iterdir())
    assert [line.rpartition("/")[2].partition(":")[0] for line in capsys.readouterr().out.splitlines()] == names
    assert "README.md" in names
    assert same(mk.load_model(tmp_path / "up"), mk.load_model(run))
    model = make_model()
    model.save_pretrained(tmp_path / "saved")
    assert same(mk.LanguageModel.from_pretrained(tmp_path / "saved"), model)


def test_out_of_reach_is_one_line(run, monkeypatch, capsys):
    def refuse(*args: Any, **options: Any) -> Any:
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(HF_API, "create_repo", refuse)
    assert main(["push", str(run), NAME]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told == f"mambakit push: {NAME} was not published, the hub did not take it: no network"


def test_bad_input_is_one_line(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    for arguments, message in (
        ([run, "tiny"], "'tiny' is no name on the hub, expected one like owner/model"),
        ([tmp_path / "absent", NAME], "there is no directory"),
        ([run, NAME, "--folder", tmp_path / "there"], "there exists already"),
        ([run, NAME, "--run", tmp_path / "there"], "there is no run.json in"),
    ):
        assert main(["push", *map(str, arguments)]) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert message in told
    with pytest.raises(ValueError, match=r"revision = 'main' is for names on the hub, and .* is here"):
        mk.load_model(run, revision="main")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"publishing needs huggingface_hub: pip install huggingface_hub"):
        make_model().push_to_hub(NAME)


def test_cards_quote_what_they_are_told():
    record = Record(license='x" y', data=["a: b\n- c"], bits_per_byte=1.25, steps=7)
    text = card(make_model(), "o/n", record)
    assert head_of(text)["license"] == 'x" y'
    assert "- Steps: 7\n" in text


def test_runs_of_fine_tuning_name_their_base(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"data": [], "init": "someone/base", "batch": 2, "seq_len": "x"}))
    record = read_record(tmp_path)
    assert record == Record(data=["Python's standard library"], base_model="someone/base")
