"""`mambakit quantize`: a checkpoint that every verb reads, with the bits that were there before saving."""

import json
import subprocess
import sys

import pytest
import torch

import mambakit as mk
from mambakit.cli.main import main
from mambakit.cli.serve import model_name
from mambakit.text.tokens import Bytes
from trainer_cases import make_documents, make_model

TEXT = b"\n".join(content for _, content in make_documents())


@pytest.fixture
def own(tmp_path):
    mk.save_model(make_model(), tmp_path / "own")
    Bytes().save(tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "text.txt").write_bytes(TEXT)
    return tmp_path / "own"


def quantize(*arguments) -> int:
    return main(["quantize", *map(str, arguments)])


def said(capsys, *arguments) -> str:
    assert main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("bits", [8, 4])
def test_every_verb_reads_it_with_the_same_bits(own, bits, capsys, monkeypatch):
    out = own.with_name("small")
    assert quantize(own, out, "--bits", bits, "--report", own.with_name("text.txt")) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert f"5 in {'int8' if bits == 8 else 'int4'}: " in first
    assert "MB on disk become" in first
    assert f"({len(TEXT):,} bytes)" in second
    want = mk.quantize(mk.load_model(own), bits)
    got = mk.load_model(out)
    assert all(torch.equal(tensor, got.state_dict()[name]) for name, tensor in want.state_dict().items())
    assert {path.name for path in own.iterdir()} == {path.name for path in out.iterdir()}

    ids = [256, *b"the state"]
    tokens = mk.generate(want, ids, max_new_tokens=12, temperature=0)[0].tolist()
    options = ("--max-new-tokens=12", "--temperature=0")
    text = said(capsys, "generate", out, "--prompt", "the state", *options, "--keep-going")
    assert text == Bytes().decode(tokens) + "\n"
    monkeypatch.setattr("sys.stdin.readline", iter(["the state\n", ""]).__next__)
    chat = said(capsys, "chat", out, *options)
    monkeypatch.setattr("sys.stdin.readline", iter(["the state\n", ""]).__next__)
    assert chat == said(capsys, "chat", own, *options, "--quantize", bits)
    said(capsys, "convert", out, out.with_name("again"), "--format=mambakit")
    assert (out.with_name("again") / "config.json").read_bytes() == (out / "config.json").read_bytes()


def test_serve_answers_with_the_same_text(own):
    """In a process of its own: what clients get from the file is what they get from the model in memory."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    assert quantize(own, own.with_name("small"), "--bits=8", "--json") == 0
    answers = []
    for arguments in ([own.with_name("small")], [own, "--quantize=8"]):
        command = [sys.executable, "-m", "mambakit.cli.main", "serve", *map(str, arguments), "--port=0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                address = process.stdout.readline().split()[-1]
                body = {
                    "model": model_name(str(arguments[0])),
                    "prompt": "the state",
                    "max_tokens": 12,
                    "temperature": 0,
                }
                answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
                answers.append(answer["choices"][0]["text"])
            finally:
                process.terminate()
    assert answers[0] == answers[1]


def test_the_report(own, capsys):
    out = own.with_name("small")
    text = ("--report", own.with_name("text.txt"), "--json")
    assert quantize(own, out, "--bits=4", "--group-size=16", *text) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_quantized"] == (out / "model.safetensors").stat().st_size < found["bytes"]
    assert found["matrices"] == 5
    # 257 ids of equal probability, about, in a model that has learned nothing.
    assert found["bits_per_byte"] == pytest.approx(8, abs=0.3)
    assert found["bits_per_byte_quantized"] == pytest.approx(found["bits_per_byte"], abs=0.1)
    assert found["bits_per_byte_quantized"] != found["bits_per_byte"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits=3"], "bits is 3, expected 16, 8 or 4"),
        (["--bits=8", "--group-size=32"], "group_size = 32 is for 4 bits"),
        (["--bits=4", "--group-size=7"], "group_size is 7, expected a positive even number"),
        (["--bits=8", "--report=absent.txt"], "there is no file or folder absent.txt"),
    ],
)
def test_bad_input_is_one_line(own, capsys, arguments, message):
    assert quantize(own, own.with_name("small"), *arguments) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert message in told
    assert not own.with_name("small").exists()


def test_what_is_there_or_quantized_is_one_line(own, capsys):
    small = own.with_name("small")
    assert quantize(own, small, "--bits=8") == 0
    for arguments, message in (
        ([small, own.with_name("twice")], "the model is quantized already; quantize the one it was made from"),
        ([own, small], "small exists already; give a new folder, or remove it first"),
        ([own, own.with_name("text.txt")], "text.txt exists already"),
        ([own.with_name("absent"), own.with_name("other")], "there is no directory"),
    ):
        assert quantize(*arguments, "--bits=8") == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert message in told
    assert main(["serve", str(small), "--quantize=8"]) == 2
    assert "is quantized already" in capsys.readouterr().err
