"""`mambakit demo`, with a smaller model and text: the same figures twice, the table, the picture."""

import json

import pytest

import mambakit as mk
from mambakit.cli import compressors, demo, why_mamba
from mambakit.cli.main import main
from trainer_cases import make_documents


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(demo, "BLOCK", mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8))
    monkeypatch.setattr(demo, "LAYERS", 1)
    monkeypatch.setattr(demo, "SHARE", 0.3)
    monkeypatch.setattr(demo, "SETTINGS", {**demo.SETTINGS, "batch": 4, "seq_len": 16})
    monkeypatch.setattr(demo, "standard_library", lambda: make_documents(40))


def test_a_second_demo_gives_identical_figures(tmp_path, capsys):
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), "--steps=4"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "what the model writes",
        "beside a Transformer",
        "32,768",
        "What to type next",
        "bits per byte",
        "mambakit (Mamba-3)",
        "gzip",
        "bz2",
        "xz",
        "zstd",
    ):
        assert part in printed
    first = (out / "demo.json").read_text()
    for picture in ("loss.png", "why.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert mk.load_model(out / "model")
    assert main(["demo", "--out", str(out), "--steps=4", "--json"]) == 0
    assert (out / "demo.json").read_text() == first
    assert json.loads(capsys.readouterr().out) == json.loads(first)


def test_nothing_else_is_overwritten(tmp_path, capsys):
    (tmp_path / "mine").write_text("keep")
    assert main(["demo", "--out", str(tmp_path), "--steps=1"]) == 2
    assert "not from an earlier demo" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "keep"


def test_the_table_says_when_there_is_no_zstd(monkeypatch):
    monkeypatch.setattr(compressors, "find_zstd", lambda: None)
    monkeypatch.setattr(demo, "find_zstd", lambda: None)
    measured = compressors.compress_all([b"a" * 1000, b"b" * 1000])
    assert [each.name for each in measured] == ["gzip -9", "bz2 -9", "xz -9e"]
    assert all(0 < each.as_one < each.file_by_file < 8 for each in measured)
    assert "zstd was not measured" in demo.table(2.0, 1.9, measured)


def test_figures_are_sizes_in_bits():
    import bz2

    contents = [b"some text " * 30, b"other text " * 20]
    found = next(each for each in compressors.compress_all(contents) if each.name == "bz2 -9")
    total = sum(map(len, contents))
    assert found.file_by_file == 8 * sum(len(bz2.compress(content)) for content in contents) / total
    assert found.as_one == 8 * len(bz2.compress(b"".join(contents))) / total


def test_the_transformer_beside_is_of_the_same_size_and_remembers_more():
    mamba = mk.LanguageModel(mk.ModelConfig(block=demo.BLOCK, n_layer=2, vocab_size=257))
    transformer = why_mamba.transformer_like(mamba)
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (mamba, transformer)]
    assert abs(sizes[1] - sizes[0]) < 0.03 * sizes[0]
    (first, last), (short, long) = why_mamba.measure([mamba, transformer], lengths=(64, 256))
    assert first.megabytes == last.megabytes
    assert long.megabytes == pytest.approx(4 * short.megabytes, rel=0.01)
    assert "256" in why_mamba.table([first, last], [short, long])
