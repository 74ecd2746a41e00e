"""Sessions: what is parked comes back bit for bit, whatever happens in between, or not at all."""

import os
import random
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from blocks import CONFIGS
from mambakit import LanguageModel, ModelConfig, generate, load_model, save_model, stream
from mambakit.blocks import caches
from mambakit.inference import Engine, State
from mambakit.inference.sessions import UNFINISHED, Sessions, identity
from test_caches import assert_same

KILLS = int(os.environ.get("MAMBAKIT_KILLS", "30"))
KEYS = ["", "a", "A", "a/b", "../../outside", "..", "\0", "\n", "käse 🧀", "\ud800", "x" * 10_000, "unfinished", "key"]


def make_model(name: str = "mamba2", seed: int = 1) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(ModelConfig(block=CONFIGS[name], n_layer=2, vocab_size=50))


def make_state(number: int, size: int = 10) -> State:
    """One that says in all its parts which it is."""
    part = torch.full((1, size), float(number))
    return State((7, number), torch.tensor([[number, 0.5]]), [(part, None), part + 1])


def check_state(got: State, want: State) -> None:
    assert got.ids == want.ids
    assert_same([got.x_1d, got.cache], [want.x_1d, want.cache])


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3", "mamba3-quaternion"])
def test_a_parked_conversation_goes_on_after_a_restart(name, tmp_path):
    model, first, second = make_model(name), [1, 2, 3, 4, 5], [6, 7]
    run = stream(model, first, max_new_tokens=4, temperature=0)
    list(run)
    ids = (*first, *run.tokens[0].tolist())
    with torch.no_grad():
        x_1sd, cache = model.backbone(model.embed(torch.tensor([ids])))
    parked = State(ids, x_1sd[:, -1], cache)
    Sessions(tmp_path, model).park("chat", parked)
    again = Sessions(tmp_path, make_model(name))
    assert again.keys() == ["chat"]
    assert "chat" in again
    resumed = again.resume("chat")
    check_state(resumed, parked)
    got, want = (generate(model, second, max_new_tokens=9, temperature=0, cache=c) for c in (resumed.cache, cache))
    assert torch.equal(got, want)


def test_an_engine_goes_on_from_what_another_parked(tmp_path):
    model, prompt, more = make_model(), [1, 2, 3, 4, 5], [6, 7]

    def answer(ids: list[int], state: State | None = None) -> Any:
        engine = Engine(model)
        request = engine.add(ids, max_new_tokens=6, temperature=0, keep_state=True, state=state)
        engine.run()
        return request

    first = answer(prompt)
    sessions = Sessions(tmp_path, model)
    sessions.park("chat", first.state)
    ids = [*prompt, *first.tokens, *more]
    again = answer(ids, sessions.resume("chat"))
    assert again.reused_tokens == len(prompt) + 6
    assert again.tokens == answer(ids).tokens
    sessions.branch("chat", "another")
    sessions.park("chat", again.state)
    assert answer(ids, sessions.rollback("chat")).tokens == again.tokens
    assert answer([*prompt, *first.tokens, 9], sessions.resume("another")).reused_tokens == len(prompt) + 6


def test_states_of_another_model_are_refused(tmp_path):
    model, other = make_model(), make_model(seed=2)
    Sessions(tmp_path, model).park("chat", make_state(1))
    for sessions in (Sessions(tmp_path, other), Sessions(tmp_path, make_model("mamba1"))):
        with pytest.raises(ValueError, match=r"\.safetensors was parked by another model; use a folder for each"):
            sessions.resume("chat")
    check_state(Sessions(tmp_path).resume("chat"), make_state(1))
    save_model(model, tmp_path / "model")
    assert identity(load_model(tmp_path / "model")) == identity(model)
    before = identity(model)
    model.backbone.embedding.weight.data[3, 3] += 1e-3
    assert identity(model) != before


def test_keys_are_any_strings(tmp_path):
    inside = tmp_path / "sessions"
    sessions = Sessions(inside)
    for number, key in enumerate(KEYS):
        sessions.park(key, make_state(number))
    assert sorted(Sessions(inside).keys()) == sorted(KEYS)
    assert len(sessions) == len(KEYS)
    for number, key in enumerate(KEYS):
        check_state(sessions.resume(key), make_state(number))
    assert os.listdir(tmp_path) == ["sessions"], "nothing is written elsewhere"
    for key in KEYS[1:]:
        sessions.delete(key)
        sessions.delete(key)
    assert sessions.keys() == [KEYS[0]]
    with pytest.raises(ValueError, match="there is no session 'a'"):
        sessions.resume("a")
    with pytest.raises(ValueError, match="key is 5, expected a string"):
        sessions.park(5, make_state(1))
    assert not list((inside / UNFINISHED).iterdir())


def test_rollback(tmp_path):
    sessions = Sessions(tmp_path, versions=3)
    for number in range(5):
        sessions.park("chat", make_state(number))
    check_state(sessions.rollback("chat", 0), make_state(4))
    with pytest.raises(ValueError, match="cannot go back 3 states in session 'chat', at most 2 of 3 kept ones"):
        sessions.rollback("chat", 3)
    with pytest.raises(ValueError, match="cannot go back -1 states, expected a whole number of at least 0"):
        sessions.rollback("chat", -1)
    check_state(sessions.rollback("chat"), make_state(3))
    check_state(Sessions(tmp_path).resume("chat"), make_state(3))
    sessions.park("chat", make_state(9))
    check_state(sessions.resume("chat"), make_state(9))
    check_state(sessions.rollback("chat", 2), make_state(2))
    with pytest.raises(ValueError, match="at most 0 of 1 kept ones"):
        sessions.rollback("chat")


def test_branches_share_the_past_and_nothing_else(tmp_path):
    sessions = Sessions(tmp_path)
    for number in range(3):
        sessions.park("trunk", make_state(number, 50_000))
    before = sum({path.stat().st_ino: path.stat().st_size for path in files(tmp_path)}.values())
    for branch in range(100):
        sessions.branch("trunk", f"branch {branch}")
    after = sum({path.stat().st_ino: path.stat().st_size for path in files(tmp_path)}.values())
    assert after - before < 100 * 100, "keys only"
    sessions.park("trunk", make_state(10))
    sessions.park("branch 3", make_state(11))
    check_state(sessions.rollback("branch 4", 2), make_state(0, 50_000))
    sessions.delete("trunk")
    for key, want in [
        ("branch 3", make_state(11)),
        ("branch 4", make_state(0, 50_000)),
        ("branch 99", make_state(2, 50_000)),
    ]:
        check_state(sessions.resume(key), want)
    with pytest.raises(ValueError, match="session 'branch 5' exists; delete it first"):
        sessions.branch("branch 3", "branch 5")
    with pytest.raises(ValueError, match="there is no session 'trunk' to branch from"):
        sessions.branch("trunk", "other")
    assert "other" not in sessions
    for path in sessions._folder("branch 7").glob("*.safetensors"):
        path.unlink()
    assert "branch 7" not in sessions, "as if killed before its first state was there"
    sessions.branch("branch 3", "branch 7")
    check_state(sessions.resume("branch 7"), make_state(11))


def test_damaged_files_are_named_and_not_loaded(tmp_path):
    sessions, draw = Sessions(tmp_path), random.Random(0)
    sessions.park("chat", make_state(1))
    sessions.park("chat", make_state(2))
    older, path = (file for file in files(tmp_path) if file.suffix == ".safetensors")
    whole = path.read_bytes()
    damages = [whole[:cut] for cut in (0, 1, 8, len(whole) // 2, len(whole) - 1)]
    damages += [whole + b"\0", whole[:-1] + b"\1", b"\xff" * len(whole)]
    for _ in range(200):
        at = draw.randrange(len(whole))
        damages.append(whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :])
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{path} is damaged"):
            sessions.resume("chat")
    check_state(sessions.rollback("chat", 1), make_state(1))
    older.write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{older} is damaged"):
        sessions.rollback("chat", 0)
    (older.parent / "key").write_text("tree")
    with pytest.raises(ValueError, match="key is damaged: it holds another key"):
        sessions.keys()


def test_a_failed_park_leaves_what_was_there(tmp_path, monkeypatch):
    sessions = Sessions(tmp_path)
    sessions.park("chat", make_state(1))
    before = files(tmp_path)
    with pytest.raises(ValueError, match="a cache is made of lists, tuples"):
        sessions.park("chat", State((1,), torch.zeros(1, 2), {"no": "cache"}))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for key in ("chat", "new"):
        with pytest.raises(OSError, match="No space left"):
            sessions.park(key, make_state(2))
    monkeypatch.undo()
    assert files(tmp_path) == before
    check_state(sessions.resume("chat"), make_state(1))


def test_thousands_of_sessions_take_no_memory(tmp_path, monkeypatch):
    # What is on the disk does not matter here.
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("memory is read from /proc")
    sessions = Sessions(tmp_path)
    for number in range(50):
        sessions.park(f"session {number}", make_state(number, 5000))
    before = resident()
    for number in range(50, 1000):
        sessions.park(f"session {number}", make_state(number, 5000))
    assert resident() - before < 4 << 20, "the states are 40 MB"
    again = Sessions(tmp_path)
    assert len(again) == 1000
    for number in range(0, 1000, 37):
        check_state(again.resume(f"session {number}"), make_state(number, 5000))


def test_a_large_state_is_back_at_once(tmp_path):
    sessions, cache = Sessions(tmp_path), [torch.randn(1, 24, 64, 128) for _ in range(24)]
    state = State(tuple(range(2000)), torch.randn(1, 768), cache)
    assert sum(part.nbytes for part in cache) > 18e6
    sessions.park("chat", state)
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        resumed = sessions.resume("chat")
        seconds.append(time.perf_counter() - began)
    check_state(resumed, state)
    assert min(seconds) < 0.05


def test_max_bytes_removes_what_was_used_longest_ago(tmp_path):
    one = len_of(tmp_path / "one", make_state(1, 5000))
    sessions = Sessions(tmp_path / "all", max_bytes=10 * one)
    for number in range(10):
        sessions.park(f"session {number}", make_state(number, 5000))
        os.utime(*key_time(sessions, f"session {number}", number))
    assert len(sessions) == 10
    sessions.resume("session 0")
    sessions.branch("session 0", "a branch")
    sessions.park("session 10", make_state(10, 5000))
    left = {"session 0", "a branch", "session 10", *(f"session {number}" for number in range(4, 10))}
    assert set(sessions.keys()) == left, "down to seven eighths, and a branch costs nothing"
    with pytest.raises(ValueError, match=r"a state of \d+ bytes does not fit into max_bytes of "):
        sessions.park("large", make_state(1, 60_000))
    for number in range(20, 24):
        sessions.park("session 10", make_state(number, 14_000))
    check_state(sessions.resume("session 10"), make_state(23, 14_000))
    assert sum({path.stat().st_ino: path.stat().st_size for path in files(tmp_path / "all")}.values()) < 10.1 * one
    for name in ("versions", "max_bytes"):
        with pytest.raises(ValueError, match=f"{name} is 0, expected a positive whole number"):
            Sessions(tmp_path, **{name: 0})


def len_of(path: Path, state: State) -> int:
    Sessions(path).park("one", state)
    return max(file.stat().st_size for file in files(path))


def key_time(sessions: Sessions, key: str, seconds: int) -> tuple[Path, tuple[int, int]]:
    return sessions._folder(key) / "key", (10**9 + seconds, 10**9 + seconds)


def test_threads(tmp_path):
    sessions = Sessions(tmp_path, versions=1)
    sessions.park("common", make_state(0))

    def work(thread: int) -> None:
        for turn in range(15):
            number = 100 * thread + turn
            sessions.park("common", make_state(number))
            got = sessions.resume("common")
            check_state(got, make_state(got.ids[1]))
            sessions.park(f"own {thread}", make_state(number))
            check_state(sessions.resume(f"own {thread}"), make_state(number))
            sessions.branch(f"own {thread}", f"branch {thread}")
            sessions.delete(f"branch {thread}")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert sorted(sessions.keys()) == ["common", *(f"own {thread}" for thread in range(6))]


def test_leftovers_of_the_dead_are_removed(tmp_path):
    Sessions(tmp_path)
    for name, age in (("old", 10_000), ("new", 10)):
        (tmp_path / UNFINISHED / name).mkdir()
        then = time.time() - age
        os.utime(tmp_path / UNFINISHED / name, (then, then))
    Sessions(tmp_path)
    assert os.listdir(tmp_path / UNFINISHED) == ["new"]


def test_killed_while_parking(tmp_path):
    told = subprocess.run([sys.executable, __file__, tmp_path], capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("whole") == KILLS, told.stdout


def killed_while_parking(folder: Path) -> None:
    """Children that park one state after the other, each killed at a random moment; what they left is looked at."""
    torch.set_num_threads(1)  # others would not be there in the children
    draw, last = random.Random(0), 0
    large = 100_000
    Sessions(folder).park("chat", make_state(0, large))
    for _ in range(KILLS):
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            sessions = Sessions(folder)
            for number in range(last + 1, last + 10_000):
                sessions.park("chat", make_state(number, large))
                os.write(tell, b".")
            os._exit(1)
        os.close(tell)
        os.read(told, 1)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        last += 1
        while dots := os.read(told, 1000):
            last += len(dots)
        os.close(told)
        resumed = Sessions(folder).resume("chat")
        # Told of or not, the one after the last may be there, too.
        assert resumed.ids[1] in (last, last + 1), (resumed.ids, last)
        last = resumed.ids[1]
        check_state(resumed, make_state(last, large))
        print("whole", len(os.listdir(folder / UNFINISHED)))


if __name__ == "__main__":
    killed_while_parking(Path(sys.argv[1]))


def test_what_is_no_state(tmp_path):
    sessions, state = Sessions(tmp_path), State((1, 2), torch.ones(1, 3), (torch.ones(1, 2),))
    for wrong in (None, (1, 2), state._replace(ids=(1.5,)), state._replace(ids=(-1,)), state._replace(ids=(2**64,))):
        with pytest.raises(ValueError, match="expected the State of a request, with token ids"):
            sessions.park("a", wrong)  # type: ignore[arg-type]
    assert len(sessions) == 0


@pytest.mark.parametrize(
    "content", [[None, "ids", 3, None], [None], (1, 2, 3, 4), [None, torch.ones(2), torch.ones(1), None]], ids=str
)
def test_caches_that_are_no_states(tmp_path, content):
    """A whole file with the right checksum that `park` did not write."""
    sessions = Sessions(tmp_path)
    sessions.park("a", State((1, 2), torch.ones(1, 3), (torch.ones(1, 2),)))
    caches.save(content, tmp_path / "made")
    made = (tmp_path / "made").read_bytes()
    (sessions._folder("a") / f"00000009.{zlib.crc32(made):08x}.safetensors").write_bytes(made)
    with pytest.raises(ValueError, match="holds no state of a session"):
        sessions.resume("a")


def test_files_of_others_are_left_alone(tmp_path):
    sessions, state = Sessions(tmp_path), State((1, 2), torch.ones(1, 3), (torch.ones(1, 2),))
    sessions.park("a", state)
    (sessions._folder("a") / "mine.safetensors").write_bytes(b"x")
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / "00000001.00000000.safetensors").write_bytes(b"")
    sessions.park("a", state)
    assert sessions.resume("a").ids == (1, 2)
    assert sessions.keys() == ["a"]
    assert len(sessions) == 1
