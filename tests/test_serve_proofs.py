"""What a server for many has to hold out: nobody hears of others, nothing grows, nothing is lost.

Small numbers by default; MAMBAKIT_PROOFS=1000 (`make serve-proofs`) for those of the claims.
"""

import json
import os
import random
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import mambakit as mk
from mambakit.inference import Engine
from mambakit.inference.sessions import Sessions
from mambakit.text.tokens import Bytes
from serve_cases import make_service, running
from test_cli_serve import Served
from trainer_cases import make_model

COUNT = int(os.environ.get("MAMBAKIT_PROOFS", "60"))
FULL = COUNT >= 1000
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc")


def resident(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "tiny"
    mk.save_model(make_model(), folder)
    Bytes().save(folder)
    return folder


def test_nobody_hears_of_others(folder):
    """Eight at a time, some of which go away: each answer is that of running alone, after a secret of its own."""
    model, draw = make_model().eval(), random.Random(0)
    asked = []
    for number in range(COUNT):
        secret = f"{draw.getrandbits(64):016x}"
        body = {"prompt": f"The word is {secret}. ", "max_tokens": draw.randrange(4, 30), "seed": number}
        body |= {"temperature": draw.choice([0, 1.0]), "ignore_eos": True, "stream": True, "logprobs": 0}
        asked.append((body, draw.randrange(1, 6) if draw.random() < 0.25 else None))

    def one(client, body, leave_after):
        ids = []
        with client.stream("POST", "/v1/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                ids += event["choices"][0]["logprobs"]["tokens"]
                if leave_after is not None and len(ids) >= leave_after:
                    return ids  # and the connection is dropped
        return ids

    with Served(folder) as served:
        memory = []

        def ask(given):
            with httpx.Client(base_url=served.url) as client:
                found = one(client, *given)
            memory.append(resident(served.process.pid))
            return found

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, asked))
        text = httpx.get(f"{served.url}/metrics").text
        assert "mambakit_active_requests 0.0" in text
    alone = Engine(model)
    shown = [f"bytes:\\x{id:02x}" for id in range(257)]
    cut = 0
    for (body, leave_after), got in zip(asked, found, strict=True):
        options = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"], "seed": body["seed"]}
        request = alone.add(list(body["prompt"].encode()), **options)
        alone.run()
        want = [chr(id) if id < 128 else "<id 256>" if id == 256 else shown[id] for id in request.tokens]
        if leave_after is None:
            assert got == want
        else:
            cut += len(got) < len(want)
            assert got == want[: len(got)]
    assert cut
    if FULL:
        early, late = statistics.median(memory[COUNT // 5 : COUNT // 4]), statistics.median(memory[-COUNT // 20 :])
        print(f"resident after a fifth {early / 1e6:.1f} MB, at the end {late / 1e6:.1f} MB")
        assert late < 1.05 * early


def test_who_leaves_takes_his_logits_along():
    """Between two steps one of three goes away: the others go on with their own logits."""
    model = make_model().eval()

    def alone(number):
        engine = Engine(model)
        request = engine.add([number] * 5, max_new_tokens=12, temperature=0)
        engine.run()
        return request.tokens

    for gone in range(3):
        engine = Engine(model)
        requests = [engine.add([number] * 5, max_new_tokens=12, temperature=0) for number in (65, 66, 67)]
        for _ in range(4):
            engine.step()
        requests[gone].cancel()
        engine.run()
        for number, request in zip((65, 66, 67), requests, strict=True):
            assert request.tokens == alone(number)[: len(request.tokens)]
            assert request is requests[gone] or len(request.tokens) == 12


def test_parked_sessions(folder, tmp_path):
    """Conversations of many users: no memory, found after a restart, back within 50 ms beyond their new tokens."""
    with Served(folder, "--sessions", tmp_path, "--max-tokens", 4) as served, httpx.Client(timeout=60) as client:

        def ask(**body):
            answer = client.post(f"{served.url}/v1/responses", json={"max_output_tokens": 4, "temperature": 0, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        for number in range(30):
            ask(input=f"warm {number}")
        before = resident(served.process.pid)
        parked = [ask(input=f"user {number}")["id"] for number in range(COUNT)]
        grown = resident(served.process.pid) / before
        print(f"resident of the server {grown:.3f} times what it was before {COUNT} sessions")
        assert not FULL or grown < 1.05
    with Served(folder, "--sessions", tmp_path) as served, httpx.Client(timeout=60) as client:
        ask(input="warm")
        for number in range(3):
            ask(input="hi", previous_response_id=parked[number])
        resumed, fresh = [], []
        for number in range(3, COUNT, max(1, COUNT // 50)):
            began = time.perf_counter()
            then = ask(input="and", previous_response_id=parked[number], store=False)
            resumed.append(time.perf_counter() - began)
            known = json.loads((tmp_path / "responses" / f"{parked[number]}.json").read_text())["ids"]
            assert then["usage"]["input_tokens_details"]["cached_tokens"] == len(known)
            began = time.perf_counter()
            ask(input=f"and {number}", store=False)
            fresh.append(time.perf_counter() - began)
        extra = statistics.median(resumed) - statistics.median(fresh)
        print(
            f"resuming takes {1e3 * extra:.1f} ms more than a new conversation's {1e3 * statistics.median(fresh):.1f}"
        )
        assert extra < 0.05


def test_branches_read_nothing_again(tmp_path):
    """100 ways on from one conversation: all of the past is known to each of them."""
    from mambakit.serving.store import StoreOnDisk

    service = make_service()
    service.store = StoreOnDisk(tmp_path, Sessions(tmp_path / "states", service.model, versions=1))
    with running(service) as url, httpx.Client(base_url=url, timeout=60) as client:

        def ask(**body):
            return client.post("/v1/responses", json={"max_output_tokens": 4, "temperature": 0, **body}).json()

        trunk = ask(input="a long story " * 40)
        known = len(service.store.get(trunk["id"]).ids)
        for number in range(100):
            used = ask(input=f"way {number}", previous_response_id=trunk["id"])["usage"]
            assert used["input_tokens_details"]["cached_tokens"] >= known
            assert used["input_tokens"] - used["input_tokens_details"]["cached_tokens"] < 40


def test_bad_clients(folder):
    """Connections opened and dropped, half requests, bad bytes: memory and descriptors stay what they were."""
    connections = 10_000 if FULL else 300
    with Served(folder) as served:
        host, port = served.url.removeprefix("http://").split(":")
        pid = served.process.pid

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{pid}/fd"))

        def whole() -> None:
            body = {"prompt": "a", "max_tokens": 3}
            assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200

        def opened(count: int) -> None:
            for place in range(count):
                with socket.create_connection((host, int(port)), timeout=20) as sock:
                    if place % 4 == 1:
                        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc"[: place % 40 + 1])
                    elif place % 4 == 2:
                        sock.sendall(b"\xff\xfe\x00 / HTTP/9\r\n\r\n")
                    elif place % 4 == 3:
                        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30\r\n\r\n"
                        sock.sendall(head + b'{"prompt": "\xff')

        whole()
        opened(200)
        time.sleep(0.5)
        before, files = resident(pid), descriptors()
        threads = [threading.Thread(target=opened, args=(connections // 4,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        whole()
        slow = []
        for _ in range(min(connections, 200)):  # asking for nothing, all at once, while others are served
            sock = socket.create_connection((host, int(port)), timeout=20)
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            slow.append(sock)
        began = time.monotonic()
        whole()
        assert time.monotonic() - began < 10
        for sock in slow:
            sock.close()
        until = time.monotonic() + 20
        while descriptors() > files + 2 and time.monotonic() < until:
            time.sleep(0.1)
        grown = resident(pid) / before
        print(f"{connections} connections: {grown:.3f} times the memory, {descriptors()} of {files} files")
        assert descriptors() <= files + 2
        assert not FULL or grown < 1.05
        body = b'{"prompt": "\xff"}'
        answer = httpx.post(f"{served.url}/v1/completions", content=body)
        assert answer.status_code == 400
        assert "not UTF-8" in answer.json()["error"]["message"]
