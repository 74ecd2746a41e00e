"""Runs of a tiny trainer in processes of their own, forked so that torch is imported once. Not a test: tests start it.

`python forked_runs.py kills FOLDER` and `python forked_runs.py ranks FOLDER`; results are the logs in FOLDER.
"""

import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree

import torch

from mambakit.text.tokens import Bytes
from mambakit.training.processes import Ranks
from mambakit.training.run import train
from trainer_cases import Silent, losses, make_trainer

KILLS = 20
KILLED = {"steps": 40, "save_every": 3, "evaluate_every": 10, "optimizer": "muon"}


def forked(work: Callable[[], None]) -> int:
    """The process id of a child that does this and nothing else."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def outcome(child: int) -> int:
    """The exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: Path, **changed) -> None:
    train(make_trainer(**changed), folder, Bytes(), Silent())


def kill_after(seconds: float) -> None:
    """kill -9 of this process when it has computed for so long, wherever it is then."""

    def wait() -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def kills(folder: Path) -> None:
    """20 kills at random moments of computing time, in as many runs as that takes; each run is brought to its end."""
    began = time.process_time()
    run(folder / "whole", **KILLED)
    per_step = (time.process_time() - began) / KILLED["steps"]
    draw, killed, runs = random.Random(0), 0, 0

    def until_killed(seconds: float, where: Path) -> None:
        kill_after(seconds)
        run(where, **KILLED)

    while killed < KILLS:
        where = folder / f"killed-{runs}"
        while True:
            patience = draw.uniform(0, 10) * per_step if killed < KILLS else 1e9
            code = outcome(forked(lambda seconds=patience, where=where: until_killed(seconds, where)))
            if code == 0:
                break
            assert code == -signal.SIGKILL, code
            killed += 1
        assert losses(where) == losses(folder / "whole"), "a resumed run differs"
        runs += 1
    print(f"{killed} kills in {runs} runs")


def spread(folder: Path, parallel: str, world: int, **changed) -> None:
    """One run on so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def one(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = Ranks(parallel, "cpu")
        train(make_trainer(ranks, **changed), folder, Bytes(), Silent())
        ranks.close()

    codes = [outcome(child) for child in [forked(lambda rank=rank: one(rank)) for rank in range(world)]]
    assert codes == [0] * world, codes


def resumed(source: Path, target: Path, parallel: str, world: int, **changed) -> None:
    """The run of `source` taken up from its first checkpoint by other ranks."""
    copytree(source, target)
    rmtree(sorted((target / "checkpoints").iterdir())[-1])
    spread(target, parallel, world, **changed)


def ranks(folder: Path) -> None:
    exact = {"steps": 8, "dtype": torch.float64}
    muon = {"steps": 8, "optimizer": "muon"}
    spread(folder / "1", "ddp", 1, **exact)
    spread(folder / "1-muon", "ddp", 1, **muon)
    for parallel in ("ddp", "fsdp"):
        spread(folder / f"2-{parallel}", parallel, 2, accumulate=2, **exact)
        spread(folder / f"2-{parallel}-muon", parallel, 2, **muon)
        spread(folder / f"2-{parallel}-segments", parallel, 2, segment_len=5, **exact)
        resumed(folder / f"2-{parallel}", folder / f"2-{parallel}-then-1", "ddp", 1, **exact)
        resumed(folder / "1", folder / f"1-then-2-{parallel}", parallel, 2, **exact)
        resumed(folder / "1-muon", folder / f"1-then-2-{parallel}-muon", parallel, 2, **muon)
    resumed(folder / "2-fsdp-muon", folder / "2-fsdp-then-2-ddp-muon", "ddp", 2, **muon)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"kills": kills, "ranks": ranks}[sys.argv[1]](Path(sys.argv[2]))
