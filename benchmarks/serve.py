"""Requests a second and the time to the first token at 1, 4 and 16 clients: our server, transformers' and one by one.

    python -m benchmarks.serve [--d-model 768 --layers 24] [--prompt 64 --new 32] [--requests 3]

One Mamba-2 checkpoint for both; every client asks for one answer after the other, streamed, each after a prompt of its
own, so that nothing is reused. "One by one" is the same requests through an engine in this process: the rate of a
server that costs nothing and does one at a time. Servers run with the same number of threads, one after the other.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch

import mambakit as mk
from benchmarks.measure import median, progress, table, write_json
from mambakit.inference import Engine
from mambakit.text.tokens import Bytes, TokenizerFile

CLIENTS = (1, 4, 16)
START_SECONDS = 120


def make_folder(folder: Path, d_model: int, layers: int) -> None:
    """A checkpoint that both servers read, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    torch.manual_seed(0)
    block = mk.Mamba2Config(d_model=d_model)
    mk.save_model(
        mk.LanguageModel(mk.ModelConfig(block=block, n_layer=layers, vocab_size=264)), folder, format="transformers"
    )
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    made.train_from_iterator([], trainers.BpeTrainer(vocab_size=257, special_tokens=special, initial_alphabet=alphabet))
    made.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0], "pad_token": special[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def prompts(count: int, length: int) -> list[str]:
    """Different from their first characters on."""
    return [(f"{number:06d} " * length)[:length] for number in range(count)]


class Server:
    """A process that answers at `url` once it is ready."""

    def __init__(self, name: str, command: list[str], url: str, threads: int):
        self.name, self.url = name, url
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        settings = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=settings)

    def wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.3)
        raise RuntimeError(f"{self.name} did not start: {self.log()}")

    def log(self) -> str:
        self._log.seek(0)
        return " ".join(self._log.read().split())[-400:]

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ask(client: httpx.Client, model: str, prompt: str, new: int, more: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds to the first token and to the end, and how many pieces of text came."""
    began, first, pieces = time.perf_counter(), 0.0, 0
    body = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 1.0, "stream": True, "seed": 1, **more}
    with client.stream("POST", "/v1/completions", json=body, timeout=300) as answer:
        if answer.status_code != 200:
            raise RuntimeError(answer.read().decode()[:300])
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                first = first or time.perf_counter() - began
                pieces += 1
    return first, time.perf_counter() - began, pieces


def run_clients(url: str, model: str, texts: list[str], clients: int, new: int, more: dict[str, Any]) -> dict[str, Any]:
    left, found, failed = list(texts), [], []
    lock = threading.Lock()

    def work() -> None:
        with httpx.Client(base_url=url) as client:
            while True:
                with lock:
                    if not left or failed:
                        return
                    text = left.pop()
                try:
                    found.append(ask(client, model, text, new, more))
                except (RuntimeError, httpx.HTTPError, ValueError, KeyError) as error:
                    failed.append(str(error))

    began = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if failed:
        raise RuntimeError(failed[0])
    return {
        "clients": clients,
        "requests_per_second": len(found) / seconds,
        "first_token_ms": 1e3 * median([first for first, _, _ in found]),
        "answer_ms": 1e3 * median([whole for _, whole, _ in found]),
        "pieces": median([float(pieces) for _, _, pieces in found]),
    }


def one_by_one(folder: Path, texts: list[str], new: int) -> dict[str, Any]:
    tokens = TokenizerFile(folder / "tokenizer.json")
    engine = Engine(mk.load_model(folder).eval())
    engine.add(tokens.encode(texts[0].encode()), max_new_tokens=4)
    engine.run()  # what is made once
    firsts = []
    began = time.perf_counter()
    for text in texts:
        start = time.perf_counter()
        request = engine.add(tokens.encode(text.encode()), max_new_tokens=new, seed=1)
        while not request.tokens:
            engine.step()
        firsts.append(time.perf_counter() - start)
        engine.run()
    seconds = time.perf_counter() - began
    return {"clients": 1, "requests_per_second": len(texts) / seconds, "first_token_ms": 1e3 * median(firsts)}


FORM = {
    "type": "array",
    "minItems": 3,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}


def compare_forms(d_model: int, layers: int, repeats: int) -> dict[str, Any]:
    """Milliseconds per token at batch 1 of free text and of text that has to be JSON, in turns, with many seeds.

    That is the median over answers, each with all it took from putting it in line to its end. On one thread it is the
    processor's time, which others on the machine hardly change.
    """
    torch.manual_seed(0)
    config = mk.ModelConfig(block=mk.Mamba2Config(d_model=d_model), n_layer=layers, vocab_size=Bytes.vocab_size)
    engine = Engine(mk.LanguageModel(config).eval(), tokenizer=Bytes())
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {"free": [], "constrained": []}
    for turn in range(repeats + 1):
        for name, constraint in (("free", None), ("constrained", FORM)):
            begun = clock()
            request = engine.add([65], max_new_tokens=200, seed=turn, constraint=constraint)
            engine.run()
            if turn:  # the first makes what is made once
                times[name].append(1e3 * (clock() - begun) / len(request.tokens))
    free, constrained = (median(times[name]) for name in ("free", "constrained"))
    return {"d_model": d_model, "layers": layers, "free_ms": free, "constrained_ms": constrained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--forms", action="store_true", help="instead: what a constraint costs per token")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.forms:
        found = [compare_forms(args.d_model, args.layers, 3), compare_forms(256, 4, 21)]
        head = ["model", "free, ms per token", "constrained", "ratio"]
        lines = [(f"{one['d_model']} x {one['layers']}", one["free_ms"], one["constrained_ms"]) for one in found]
        print(table(head, [[name, f"{a:.3f}", f"{b:.3f}", f"{b / a:.3f}"] for name, a, b in lines]))
        print(write_json("forms", {"settings": vars(args), "rows": found}))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "served"
        make_folder(folder, args.d_model, args.layers)
        rows.append({"server": "one by one", **one_by_one(folder, prompts(3, args.prompt), args.new)})
        python = sys.executable
        ours = [python, "-m", "mambakit.cli.main", "serve", str(folder), "--port", "8397"]
        theirs = [str(Path(python).parent / "transformers"), "serve", str(folder), "--port", "8398", "--device", "cpu"]
        servers: list[tuple[str, list[str], str, dict[str, Any]]] = [
            ("mambakit serve", ours, "http://127.0.0.1:8397", {"ignore_eos": True})
        ]
        if not args.without_transformers:
            servers.append(("transformers serve", theirs, "http://127.0.0.1:8398", {}))
        for name, command, url, more in servers:
            server = Server(name, command, url, args.threads)
            try:
                server.wait()
                shown = folder.name if name.startswith("mambakit") else str(folder)
                run_clients(url, shown, prompts(2, 20), 1, 4, more)
                for clients in CLIENTS:
                    progress(f"{name}: {clients} clients")
                    texts = prompts(clients * args.requests, args.prompt)
                    texts = [f"{clients} {text}" for text in texts]
                    rows.append({"server": name, **run_clients(url, shown, texts, clients, args.new, more)})
            except RuntimeError as error:
                rows.append({"server": name, "failed": f"{error} {server.log()}"[:600]})
            finally:
                server.stop()
    head = ["server", "clients", "requests/s", "first token, ms", "answer, ms"]
    fields = ("requests_per_second", "first_token_ms", "answer_ms")
    print(
        table(
            head,
            [
                [row["server"], str(row["clients"]), *(f"{row[field]:.2f}" if field in row else "" for field in fields)]
                for row in rows
                if "failed" not in row
            ],
        )
    )
    for row in rows:
        if "failed" in row:
            print(f"{row['server']} failed: {row['failed']}")
    print(write_json("serve", {"settings": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
