"""Training runs that are killed, starved of disk and doubled at random moments, each brought to its end. Not a test.

`python torture.py FOLDER KILLS [SEED]`, or `make torture`. Every end has to be that of a run nobody touched, bit for
bit. Processes are forked, so that torch is imported once; moments are drawn in computing time, so that load does not
matter.
"""

import contextlib
import io
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from shutil import rmtree

os.environ["OMP_WAIT_POLICY"] = (
    "PASSIVE"  # before torch is imported: threads that wait for each other leave the core free
)

import torch

import mambakit as mk
from forked_runs import end_after
from mambakit.cli.main import main
from mambakit.cli.run_options import holds_run
from mambakit.training.run import LOG, read_log
from mambakit.training.run_checkpoints import RunCheckpoints
from ranks import forked, outcome
from trainer_cases import make_documents

STEPS = 24
OPTIONS = ["--d-model=16", "--layers=1", "--state-rank=8", "--head-dim=8", "--batch=4", "--seq-len=16", "--warmup=2"]
OPTIONS += [f"--steps={STEPS}", "--evaluate-every=8", "--save-every=3", "--held-out=0.2", "--no-tensorboard"]
KINDS = [(optimizer, threads) for optimizer in ("adamw", "muon") for threads in (1, 2)]
SIGNALS = {
    "KILL": [signal.SIGKILL],
    "TERM": [signal.SIGTERM],
    "INT": [signal.SIGINT],
    "INT INT": [signal.SIGINT, signal.SIGINT],
}
STOPPED = {0, 130, -signal.SIGKILL, -signal.SIGTERM}
ONE_IN = 20
"""Kills to a full disk and to a second writer."""


class Torture:
    def __init__(self, folder: Path, seed: int):
        self.folder, self.draw, self.count = folder, random.Random(seed), Counter()
        self.data = folder / "data"
        self.data.mkdir(parents=True)
        for name, content in make_documents():
            (self.data / name).write_bytes(content)
        # Here, so that no process after this one has to import anything.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            assert main(["train", str(self.data), "--out", str(folder / "first"), *OPTIONS, "--optimizer=muon"]) == 0
        rmtree(folder / "first")
        self.seconds = {kind: self.untouched(kind) for kind in KINDS}

    def untouched(self, kind: tuple[str, int]) -> float:
        """Make the run to compare with; the computing time it took."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert outcome(self.start(kind, self.whole(kind))) == 0, self.said(self.whole(kind))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def whole(self, kind: tuple[str, int]) -> Path:
        return self.folder / f"whole-{kind[0]}-{kind[1]}"

    def start(self, kind: tuple[str, int], out: Path, *, signals=(), after: float = 0.0, file_bytes: int = 0) -> int:
        """A process that begins the run in `out`, or goes on with it."""

        def work() -> None:
            try:
                self.train(kind, out, signals, after, file_bytes)
            except KeyboardInterrupt:  # before or after what main looks after
                os._exit(130)
            except Exception:
                resource.setrlimit(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1:] * 2)
                with open(self.log_of(out), "a") as said:
                    traceback.print_exc(file=said)

        return forked(work)

    def train(self, kind: tuple[str, int], out: Path, signals, after: float, file_bytes: int) -> None:
        optimizer, threads = kind
        torch.set_num_threads(threads)
        arguments = ["train", str(self.data), "--out", str(out), *OPTIONS, f"--optimizer={optimizer}"]
        if signals:
            end_after(after, signals)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        with open(self.log_of(out), "a") as file:
            # What is said would be cut short by the limit too.
            said = io.StringIO() if file_bytes else file
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                if file_bytes:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, limits[1]))
                code = main([*arguments, "--resume"] if holds_run(out) else arguments)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            if isinstance(said, io.StringIO):
                file.write(said.getvalue())
        os._exit(code)

    def log_of(self, out: Path) -> Path:
        return self.folder / f"{out.name}.txt"

    def said(self, out: Path) -> str:
        return self.log_of(out).read_text(errors="replace")

    def finish(self, kind: tuple[str, int], out: Path) -> None:
        """Bring the run to its end and compare it with the untouched one."""
        code = outcome(self.start(kind, out))
        assert code == 0, (code, self.said(out))
        whole = self.whole(kind)
        assert read_log(out / LOG) == read_log(whole / LOG), f"{out}: the log differs"
        expected = mk.load_model(whole / "model").state_dict()
        for name, tensor in mk.load_model(out / "model").state_dict().items():
            assert torch.equal(tensor, expected[name]), f"{out}: {name} differs"
        got, want = (RunCheckpoints(path / "checkpoints").newest() for path in (out, whole))
        assert same(got.state, want.state), f"{out}: the last checkpoint differs"
        left = [path for path in out.rglob(".*") if path.name != ".run.json"]
        assert not left, f"left over: {left}"
        assert "Traceback" not in self.said(out), self.said(out)
        rmtree(out)
        self.log_of(out).unlink()
        self.count["runs"] += 1

    def kill(self, kills: int) -> None:
        """So many kills, in as many runs as that takes."""
        done = 0
        while done < kills:
            kind = self.draw.choice(KINDS)
            out = self.folder / f"killed-{done}"
            while done < kills:
                name = self.draw.choices(list(SIGNALS), weights=[3, 1, 1, 1])[0]
                after = self.draw.uniform(0, 0.4) * self.seconds[kind]
                code = outcome(self.start(kind, out, signals=SIGNALS[name], after=after))
                assert code in STOPPED, (name, code, self.said(out))
                if code == 0:
                    break
                done += 1
                self.count[name] += 1
                if done % 50 == 0:
                    print(f"{done} kills in {self.count['runs'] + 1} runs", flush=True)
            self.finish(kind, out)

    def starve(self, times: int) -> None:
        """No file may be larger than some number of bytes, as on a disk with little left; then there is room again."""
        for i in range(times):
            kind, out = self.draw.choice(KINDS), self.folder / f"full-{i}"
            for _ in range(2):
                code = outcome(self.start(kind, out, file_bytes=self.draw.choice([1, 300, 3000, 20_000, 100_000])))
                last = (self.said(out).splitlines() or [""])[-1]
                assert code == 0 or (code == 2 and last.startswith("mambakit train: ")), (code, self.said(out))
                self.count["full disks"] += code == 2
            self.finish(kind, out)

    def double(self, times: int) -> None:
        """Two processes in one folder, the second somewhat later; one of them may be killed."""
        for i in range(times):
            kind, out = self.draw.choice(KINDS), self.folder / f"doubled-{i}"
            kill = {"signals": SIGNALS["KILL"], "after": self.draw.uniform(0.2, 1) * self.seconds[kind]}
            first = self.start(kind, out, **(kill if self.draw.random() < 0.3 else {}))
            time.sleep(self.draw.uniform(0, 0.5) * self.seconds[kind])
            codes = [outcome(self.start(kind, out)), outcome(first)]
            assert set(codes) <= {0, 2, -signal.SIGKILL}, (codes, self.said(out))
            self.count["second writers refused"] += 2 in codes
            self.finish(kind, out)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def run(folder: Path, kills: int, seed: int) -> None:
    # A process that has computed on several threads cannot be forked into another that does.
    torch.set_num_threads(1)
    began = time.perf_counter()
    torture = Torture(folder, seed)
    torture.kill(kills)
    torture.starve(-(-kills // ONE_IN))
    torture.double(-(-kills // ONE_IN))
    counts = ", ".join(f"{count} {name}" for name, count in torture.count.items())
    print(f"{kills} kills, 0 losses, {time.perf_counter() - began:.0f} s: {counts}")


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
