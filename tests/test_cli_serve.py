"""`mambakit serve` and `mambakit chat` as processes: their first line, their end, what they refuse."""

import io
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

import mambakit as mk
from mambakit.cli.main import main
from mambakit.text.tokens import Bytes
from trainer_cases import make_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "tiny"
    mk.save_model(make_model(), folder)
    Bytes().save(folder)
    return folder


class Served:
    """`mambakit serve` as a process; `url` is where it is."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "mambakit.cli.main", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.line = self.process.stdout.readline()
        self.url = self.line.split()[-1] if self.line else ""

    def __enter__(self):
        assert self.url.startswith("http://127.0.0.1:"), self.process.communicate()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def test_a_graceful_end(model_dir):
    """Running answers are finished, new ones are not taken, and the exit code is 0."""
    with Served(model_dir, "--grace", 20) as served:
        asked = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=asked, timeout=60) as answer:
            coming = answer.iter_lines()
            next(coming)
            served.process.send_signal(signal.SIGTERM)
            lines = [line for line in coming if line]
        _, err = served.process.communicate(timeout=60)
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert served.process.returncode == 0, err
        assert err == ""
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")


def test_what_takes_longer_than_the_grace_is_cut(model_dir):
    with Served(model_dir, "--grace", 0.2, "--quantize", 8) as served:
        asked = {"prompt": "a", "max_tokens": 10**9, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=asked, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-2:]
        assert json.loads(last[0].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert last[1] == "data: [DONE]"
        served.process.communicate(timeout=60)
        assert served.process.returncode == 0


def test_a_conversation_outlives_its_server(model_dir, tmp_path):
    """A response that the end of a server cut short is kept, and one of a server that was killed."""
    asked = {"input": "hi", "max_output_tokens": 10**9, "stream": True, "temperature": 0.5}
    with Served(model_dir, "--sessions", tmp_path, "--grace", 0.2) as served:
        with httpx.stream("POST", f"{served.url}/v1/responses", json=asked, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            last = json.loads([line for line in lines if line][-1].removeprefix("data: "))
        _, err = served.process.communicate(timeout=60)
        assert served.process.returncode == 0, err
    cut = last["response"]
    ids = json.loads((tmp_path / "responses" / f"{cut['id']}.json").read_text())["ids"]
    for _ in range(2):
        with Served(model_dir, "--sessions", tmp_path) as served:
            assert httpx.get(f"{served.url}/v1/responses/{cut['id']}").json() == cut
            more = {"input": "and", "previous_response_id": cut["id"], "max_output_tokens": 3}
            answer = httpx.post(f"{served.url}/v1/responses", json=more, timeout=60).json()
            assert answer["usage"]["input_tokens_details"]["cached_tokens"] == len(ids)
            served.process.kill()
        cut = answer
        ids = json.loads((tmp_path / "responses" / f"{cut['id']}.json").read_text())["ids"]


def test_the_key_may_come_from_the_environment(model_dir, monkeypatch):
    monkeypatch.setenv("MAMBAKIT_API_KEY", "secret")
    with Served(model_dir) as served:
        assert served.line.startswith("tiny at http://")
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        assert httpx.get(f"{served.url}/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert os.environ["MAMBAKIT_API_KEY"] == "secret"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-body", "0"], "--max-body is 0, expected at least 1"),
        (["--max-session-bytes", "-1"], "--max-session-bytes is -1, expected at least 1"),
        (["--port", "70000"], "expected 0 to 65535"),
        (["--timeout", "0"], "expected seconds"),
        (["--api-key", " "], "--api-key is empty"),
        (["--max-rows", "0"], "max_rows is 0"),
        (["--host", "256.1.1.1"], "cannot listen at 256.1.1.1"),
        (["--tokenizer", "nowhere.json"], "there is no tokenizer file"),
    ],
)
def test_refusals(model_dir, arguments, message, capsys):
    assert main(["serve", str(model_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def chat(model_dir, text, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    options = ["--temperature=0", "--max-new-tokens=6", *arguments]
    assert main(["chat", str(model_dir), *options]) == 0
    return capsys.readouterr()


def test_a_chat(model_dir, monkeypatch, capsys):
    printed, told = chat(
        model_dir, "hi\n/again\n/branch\nand\n/branch 1\n/branch 7\n/nothing\n/quit\n", monkeypatch, capsys
    )
    model = mk.load_model(model_dir)

    def answer(text: str) -> str:
        ids = mk.generate(model, [256, *text.encode()], max_new_tokens=6, temperature=0, stop=[256])[0].tolist()
        return Bytes().decode(ids)

    first = answer("user: hi\nassistant: ")
    second = answer(f"user: hi\nassistant: {first}\nuser: and\nassistant: ")
    assert printed == f"{first}\n{first}\n{second}\n"
    assert "tokens/s" in told
    assert "this is branch 2 of 2, with 2 messages" in told
    assert "this is branch 1 of 2, with 2 messages" in told
    assert "there are branches 1 to 2" in told
    assert "/nothing is not known" in told
    reused = [int(line.split(", ")[2].split()[0]) for line in told.splitlines() if "reused" in line]
    assert reused[1] > 0  # the same conversation once more


def test_a_chat_is_stopped_by_an_interrupt(model_dir, monkeypatch, capsys):
    from mambakit.cli import chat as module

    push = module.Text.push
    counts = iter(range(100))

    def interrupted(self, id):
        if next(counts) == 3:
            raise KeyboardInterrupt
        return push(self, id)

    monkeypatch.setattr(module.Text, "push", interrupted)
    _, told = chat(model_dir, "hi\n/quit\n", monkeypatch, capsys, "--system", "short")
    assert told.count("tokens/s") == 1
