"""One of the ranks of `torchrun --max-restarts` is killed, again and again. Not a test: `test_failures.py` starts it.

`python killed_ranks.py FOLDER KILLS [SEED]`, or `make killed-ranks`. The losses at the end have to be those of a run
that nobody touched, bit for bit.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from mambakit.training.run import LOG, read_log
from trainer_cases import losses, make_documents

STEPS = 60
OPTIONS = ["--d-model=16", "--layers=1", "--state-rank=8", "--head-dim=8", "--batch=4", "--seq-len=16", "--warmup=2"]
OPTIONS += [f"--steps={STEPS}", "--evaluate-every=30", "--save-every=3", "--held-out=0.2", "--no-tensorboard"]
OPTIONS += ["--optimizer=muon", "--parallel=fsdp", "--async-checkpoints"]


def start(data: Path, out: Path, restarts: int, said: Path) -> subprocess.Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = [
        *torchrun,
        f"--max-restarts={restarts}",
        "-m",
        "mambakit.cli.main",
        "train",
        str(data),
        "--out",
        str(out),
    ]
    with open(said, "w") as file:
        return subprocess.Popen(
            [*command, *OPTIONS], stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def workers(parent: int) -> list[int]:
    """Processes that torchrun has started and that have not ended."""
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return []  # torchrun has ended itself
    found = []
    for child in children:
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"mambakit.cli.main" in command:
            found.append(int(child))
    return found


def run(folder: Path, kills: int, seed: int) -> None:
    data = folder / "data"
    data.mkdir(parents=True)
    for name, content in make_documents():
        (data / name).write_bytes(content)
    assert start(data, folder / "whole", 0, folder / "whole.txt").wait() == 0, (folder / "whole.txt").read_text()
    draw, killed, runs, messages, resumed, slowest = random.Random(seed), 0, 0, 0, 0, 0.0
    most = min(STEPS // 2, max(1, 2 * STEPS // kills))
    while killed < kills:
        out, said = folder / f"killed-{runs}", folder / f"killed-{runs}.txt"
        running = start(data, out, kills, said)
        # A run may come to its end before all kills: the next one gets the others.
        while killed < kills and (seconds := kill_one(running, out, draw, most)) is not None:
            killed, slowest = killed + 1, max(slowest, seconds)
        code, runs = running.wait(), runs + 1
        told = said.read_text()
        assert code == 0, told
        assert losses(out) == losses(folder / "whole"), "a resumed run differs"
        assert len(losses(out)) == STEPS
        # One for each death but those before the ranks knew each other.
        messages += sum(line.startswith("mambakit train: rank ") for line in told.splitlines())
        resumed += told.count("going on from step")
    print(
        f"{killed} kills, {runs} runs, {messages} messages, {resumed} resumed, the others ended within {slowest:.1f} s"
    )


def kill_one(running: subprocess.Popen, out: Path, draw: random.Random, most: int) -> float | None:
    """One of two ranks, some steps on: seconds until both were gone, or None if the run was at its end before."""
    step = steps_of(out) + draw.randint(-1, most)
    while running.poll() is None and (len(workers(running.pid)) < 2 or steps_of(out) < step):
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.1))
    both = workers(running.pid)
    if running.poll() is not None or len(both) < 2:
        return None
    os.kill(draw.choice(both), signal.SIGKILL)
    began = time.monotonic()
    while running.poll() is None and set(both) & set(workers(running.pid)):
        time.sleep(0.01)
    return time.monotonic() - began


def steps_of(out: Path) -> int:
    try:
        return max((line["step"] for line in read_log(out / LOG)), default=0)
    except OSError:
        return 0


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
