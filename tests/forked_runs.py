"""Runs of a tiny trainer in processes of their own, forked so that torch is imported once. Not a test: tests start it.

`python forked_runs.py WHAT FOLDER` with one of the functions named at the end; results are the logs in FOLDER.
"""

import copy
import gc
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import torch
import torch._dynamo  # an optimizer's first step imports it, which each child would do by itself
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from blocks import FAMILIES, make_block, tensors_of, tokens
from compare import check
from mambakit import generate
from mambakit.cli import train as command
from mambakit.cli.main import main
from mambakit.parallel.pieces import pieces_of
from mambakit.text.tokens import Bytes
from mambakit.training import alive
from mambakit.training.objective import Objective
from mambakit.training.processes import Ranks, whole
from mambakit.training.run import Keep, train
from mambakit.training.run_checkpoints import RunCheckpoints
from mambakit.training.saving import Saving
from ranks import forked, outcome
from trainer_cases import REFUSED, Silent, losses, make_documents, make_model, make_trainer

KILLS = 20
KILLS_OF_RANKS = int(os.environ.get("KILLS", "4"))
KILLED = {"steps": 40, "save_every": 3, "evaluate_every": 10, "optimizer": "muon"}


def run(folder: Path, **changed) -> None:
    train(make_trainer(**changed), folder, Bytes(), Silent())


def end_after(seconds: float, signals: Sequence[int]) -> None:
    """Signals to this process, one after the other, when it has computed for so long, wherever it is then."""

    def wait() -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            time.sleep(0.001)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.001)

    threading.Thread(target=wait, daemon=True).start()


def kills(folder: Path) -> None:
    """20 kills at random moments of computing time, in as many runs as that takes; each run is brought to its end."""
    began = time.process_time()
    run(folder / "whole", **KILLED)
    per_step = (time.process_time() - began) / KILLED["steps"]
    draw, killed, runs = random.Random(0), 0, 0

    def until_killed(seconds: float, where: Path) -> None:
        end_after(seconds, [signal.SIGKILL])
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


def start_ranks(world: int, work: Callable[[int], None]) -> list[int]:
    """So many processes that can find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def one(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        work(rank)

    return [forked(lambda rank=rank: one(rank)) for rank in range(world)]


def on_ranks(parallel: str, world: int, work: Callable[[Ranks], None], context: int = 1, tensor: int = 1) -> None:
    """So many processes that know each other; some may have shares of the same rows, some of the same heads."""

    def one(rank: int) -> None:
        ranks = Ranks(parallel, "cpu", context, tensor)
        work(ranks)
        ranks.close()

    codes = [outcome(child) for child in start_ranks(world, one)]
    assert codes == [0] * world, codes


def spread(folder: Path, parallel: str, world: int, context: int = 1, tensor: int = 1, **changed) -> None:
    """One run on so many ranks."""

    def work(ranks: Ranks) -> None:
        train(make_trainer(ranks, **changed), folder, Bytes(), Silent())

    on_ranks(parallel, world, work, context, tensor)


def resumed(source: Path, target: Path, parallel: str, world: int, **changed) -> None:
    """The run of `source` taken up from its first checkpoint by other ranks."""
    copytree(source, target)
    rmtree(sorted((target / "checkpoints").iterdir())[-1])
    spread(target, parallel, world, **changed)


def ranks(folder: Path) -> None:
    exact = {"steps": 8, "dtype": torch.float64}
    muon = {**exact, "optimizer": "muon"}
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
    resumed(folder / "2-fsdp-muon", folder / "2-fsdp-then-4-fsdp-muon", "fsdp", 4, **muon)
    resumed(folder / "2-fsdp-then-4-fsdp-muon", folder / "4-fsdp-then-1-muon", "ddp", 1, **muon)
    spread(folder / "1-lora", "ddp", 1, lora=2, **exact)
    for parallel in ("ddp", "fsdp"):
        spread(folder / f"2-{parallel}-lora", parallel, 2, lora=2, **exact)


def rank_kills(folder: Path) -> None:
    """One of two ranks is killed at random moments of computing time; both start again, until the run is at its end."""
    before = time_of_children()
    spread(folder / "whole", "fsdp", 2, **KILLED)
    per_step = (time_of_children() - before) / 2 / KILLED["steps"]
    draw, killed, runs = random.Random(0), 0, 0
    while killed < KILLS_OF_RANKS:
        where = folder / f"killed-{runs}"
        while True:
            which, patience = draw.randrange(2), draw.uniform(0, 20) * per_step if killed < KILLS_OF_RANKS else 1e9

            def one(rank: int, which: int = which, patience: float = patience, where: Path = where) -> None:
                ranks = Ranks("fsdp", "cpu")
                if rank == which:
                    end_after(patience, [signal.SIGKILL])
                try:
                    train(make_trainer(ranks, **KILLED), where, Bytes(), Silent())
                finally:
                    ranks.close()

            codes = [outcome(child) for child in start_ranks(2, one)]
            if codes[which] == 0:
                break
            assert codes[which] == -signal.SIGKILL, codes
            killed += 1
        assert losses(where) == losses(folder / "whole"), "a resumed run differs"
        runs += 1
    print(f"{killed} kills of a rank in {runs} runs")


def time_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


MESHES = (
    (2, ("--parallel=fsdp",)),
    (4, ("--parallel=fsdp", "--context-parallel=2", "--async-checkpoints")),
    (1, ()),
    (4, ("--context-parallel=4",)),
    (4, ("--parallel=fsdp", "--context-parallel=2", "--tensor-parallel=2")),
    (1, ()),
)


SIZES = ["--d-model=16", "--layers=M2 M3", "--state-rank=8", "--head-dim=8", "--batch=4", "--seq-len=16"]
SIZES += ["--warmup=2", "--schedule=constant", "--held-out=0.2", "--no-tensorboard", "--save-every=2"]


def write_data(folder: Path) -> Path:
    data = folder / "data"
    data.mkdir()
    for name, content in make_documents():
        (data / name).write_bytes(content)
    return data


def commands(world: int, said: Path, arguments: list[str], before: Callable[[], None] = lambda: None) -> list[int]:
    """`mambakit` as torchrun starts it on so many ranks: their exit codes. What rank N says is in `said`-N."""

    def one(rank: int) -> None:
        with open(f"{said}-{rank}", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        before()
        sys.exit(main(arguments))

    return [outcome(child) for child in start_ranks(world, lambda rank: ended(lambda: one(rank)))]


def ended(work: Callable[[], None]) -> None:
    """With its own exit code."""
    try:
        work()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))


def resumes(folder: Path) -> None:
    """`mambakit train` stopped and resumed on other numbers of ranks and other meshes; and once on the least noise."""
    data = write_data(folder)

    def run_to(out: Path, steps: int, world: int, *options: str, before: Callable[[], None]) -> None:
        given = ["--resume"] if out.exists() else [str(data), *SIZES]
        said = folder / f"{out.name}-{steps}"
        codes = commands(world, said, ["train", *given, "--out", str(out), f"--steps={steps}", *options], before)
        assert codes == [0] * world, Path(f"{said}-0").read_text()

    def exactly() -> None:
        torch.set_default_dtype(torch.float64)

    steps = 4 * len(MESHES)
    for optimizer, name, before in (
        ("adamw", "adamw", lambda: None),
        ("muon", "muon", lambda: None),
        ("adamw", "adamw-exact", exactly),
        ("muon", "muon-exact", exactly),
    ):
        run_to(folder / f"whole-{name}", steps, 1, f"--optimizer={optimizer}", before=before)
        out = folder / f"resumed-{name}"
        for i, (world, options) in enumerate(MESHES):
            chosen = () if out.exists() else (f"--optimizer={optimizer}",)
            run_to(out, 4 * (i + 1), world, *options, *chosen, before=before)
    run_to(folder / "nudged-muon", steps, 1, "--optimizer=muon", before=nudge)


def nudge() -> None:
    """Runs of this process begin with weights that are off by a rounding."""
    begin = command.begin

    def nudged(*given: Any, **named: Any) -> Any:
        start = begin(*given, **named)
        with torch.no_grad():
            for parameter in start.model.parameters():
                parameter.mul_(1 + 1e-7)
        return start

    command.begin = nudged


def refused(folder: Path) -> None:
    """What four ranks say to each of these, all together, and what is left."""
    data = write_data(folder)
    for i, (options, _) in enumerate(REFUSED):
        out, said = folder / f"run-{i}", folder / f"said-{i}"
        codes = commands(4, said, ["train", str(data), *SIZES, "--out", str(out), *options])
        print(codes, out.exists(), *(Path(f"{said}-{rank}").read_text().strip() for rank in range(4)), sep="|")
    out, said = folder / "run", folder / "said"
    shared = ["--tensor-parallel=2", "--parallel=fsdp", "--steps=2"]
    assert commands(4, said, ["train", str(data), *SIZES, "--out", str(out), *shared]) == [0] * 4
    for options in (["--d-model=32"], ["--optimizer=muon"], ["--steps=1"], ["--tensor-parallel=4", "--batch=2"]):
        codes = commands(4, said, ["train", "--resume", "--out", str(out), *options])
        print(codes, out.exists(), *(Path(f"{said}-{rank}").read_text().strip() for rank in range(4)), sep="|")


def deaths(_: Path) -> None:
    """One of three ranks dies while the others wait for it, or does not answer, or fails; or all of them leave."""
    alive.QUIET, alive.GRACE = 6.0, 2.0
    for rank, how in ((1, "die"), (0, "die"), (2, "stop"), (1, "fail"), (1, "leave")):
        print("codes", *ends(rank, how), flush=True)


def ends(which: int, how: str) -> list[int]:
    def work(rank: int) -> None:
        ranks = Ranks("ddp", "cpu")
        try:
            ranks.gather(None)
            if rank == which:
                if how in ("die", "stop"):
                    os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)
                if how == "fail":
                    raise ValueError("of its own")
            if how == "leave":
                # At different times.
                time.sleep(rank)
            else:
                ranks.gather(None)
        finally:
            ranks.close()

    os.dup2(1, 2)  # so that messages are among the rest
    children = start_ranks(3, work)
    if how == "stop":
        # Who stopped it ends it too.
        codes = {rank: outcome(child) for rank, child in enumerate(children) if rank != which}
        os.kill(children[which], signal.SIGKILL)
        return [codes.get(rank, -signal.SIGKILL) for rank in range(3)]
    return [outcome(child) for child in children]


def memory(_: Path) -> None:
    """Bytes of parameters, gradients and states on each rank, and of all tensors after a step."""
    for optimizer in ("adamw", "muon"):
        for parallel, world in (("ddp", 1), ("fsdp", 2)):
            on_ranks(parallel, world, lambda ranks, optimizer=optimizer: count_bytes(ranks, optimizer))


def count_bytes(ranks: Ranks, optimizer: str) -> None:
    before = bytes_alive()
    trainer = make_trainer(ranks, optimizer=optimizer)
    trainer.advance()
    alive = bytes_alive() - before
    trainer._go_back()
    gradients = [pieces_of(p.grad) for p in trainer.model.parameters()]
    counted = sum(own.nbytes for pieces in (*trainer.shares().values(), *gradients) for own in pieces.own)
    told = ranks.gather(f"{optimizer} {ranks.world} {counted} {alive}")
    if ranks.is_first:
        print(*told, sep="\n", flush=True)


def bytes_alive() -> int:
    """Of all tensors that Python knows."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            storage = getattr(thing, "_local_tensor", thing).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def aside(folder: Path) -> None:
    """Checkpoints written while the run goes on; damaged shares; a disk that is full for one rank."""
    muon = {"steps": 8, "optimizer": "muon", "dtype": torch.float64, "save_every": 2}

    def run_aside(where: Path, world: int, parallel: str = "fsdp") -> None:
        def work(ranks: Ranks) -> None:
            train(make_trainer(ranks, **muon), where, Keep(Bytes(), aside=True), Silent())

        on_ranks(parallel, world, work)

    run_aside(folder / "1", 1, "ddp")
    run_aside(folder / "2", 2)
    copytree(folder / "2", folder / "2-damaged")
    newest = sorted((folder / "2-damaged" / "checkpoints").iterdir())[-1]
    share = newest / "shares" / "__1_0.distcp"
    share.write_bytes(share.read_bytes()[:-1] + b"?")
    on_ranks("fsdp", 2, lambda ranks: go_on_damaged(folder / "2-damaged", ranks, muon))
    on_ranks("fsdp", 2, lambda ranks: fill_disk(folder / "full", ranks, muon))


def go_on_damaged(folder: Path, ranks: Ranks, changed: dict[str, Any]) -> None:
    watch = Silent()
    train(make_trainer(ranks, **changed), folder, Bytes(), watch)
    if ranks.is_first:
        print(*watch.notes, sep="\n", flush=True)


def fill_disk(folder: Path, ranks: Ranks, changed: dict[str, Any]) -> None:
    """Only for the second rank; the first says so too, and what was begun is gone."""
    trainer = make_trainer(ranks, **changed)
    saving = Saving(trainer, RunCheckpoints(folder))
    saving.save()
    trainer.advance()
    if ranks.rank == 1:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        saving.save()
        told = ["saved"]
    except OSError as error:
        told = ranks.gather(str(error))
    if ranks.is_first:
        print(*told, sep="\n", flush=True)
        assert [path.name for path in folder.iterdir()] == ["step-000000000"]


def contexts(folder: Path) -> None:
    """Ranks that share sequences, alone and with others that have other rows."""
    exact = {"steps": 8, "dtype": torch.float64}
    spread(folder / "1", "ddp", 1, **exact)
    for parallel in ("ddp", "fsdp"):
        spread(folder / f"2-{parallel}", parallel, 2, context=2, accumulate=2, **exact)
        spread(folder / f"4-{parallel}", parallel, 4, context=2, boundaries="reset", **exact)
    resumed(folder / "2-fsdp", folder / "2-fsdp-then-1", "ddp", 1, **exact)
    resumed(folder / "1", folder / "1-then-4-ddp", "ddp", 4, context=4, **exact)
    resumed(folder / "2-ddp", folder / "2-ddp-then-4-fsdp", "fsdp", 4, context=2, **exact)


def tensors(folder: Path) -> None:
    """Ranks that share heads, alone, with others that have other rows, and with others that have other tokens."""
    exact = {"steps": 8, "dtype": torch.float64}
    spread(folder / "1", "ddp", 1, **exact)
    spread(folder / "2-ddp", "ddp", 2, tensor=2, accumulate=2, **exact)
    for parallel in ("ddp", "fsdp"):
        spread(folder / f"4-{parallel}", parallel, 4, tensor=2, **exact)
        spread(folder / f"4-{parallel}-both", parallel, 4, tensor=2, context=2, **exact)
    resumed(folder / "4-fsdp-both", folder / "4-fsdp-both-then-1", "ddp", 1, **exact)
    resumed(folder / "1", folder / "1-then-4-ddp", "ddp", 4, tensor=4, **exact)
    muon = {"optimizer": "muon", **exact}
    spread(folder / "1-muon", "ddp", 1, **muon)
    spread(folder / "4-fsdp-muon", "fsdp", 4, tensor=2, **muon)


def bad_steps(_: Path) -> None:
    """Gradients of one rank that are no numbers stop both, or are skipped by both."""
    for parallel in ("ddp", "fsdp"):
        for optimizer in ("adamw", "muon"):
            on_ranks(parallel, 2, lambda ranks, optimizer=optimizer: spoil_one(ranks, optimizer))
            print(f"{parallel} {optimizer}: both ranks agree", flush=True)


def spoil_one(ranks: Ranks, optimizer: str) -> None:
    trainer = make_trainer(ranks, optimizer=optimizer)
    forward = Objective.forward

    def spoiled(self, *args, **options):
        loss, cache = forward(self, *args, **options)
        # The root of zero has no derivative.
        return (loss + (0 * loss).sqrt() if ranks.rank == 1 and trainer.step == 1 else loss), cache

    Objective.forward = spoiled
    trainer.advance()
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    message = ""
    try:
        trainer.advance()
    except ValueError as error:
        message = str(error)
    assert "the norm of the gradient is nan at step 2 (no finite gradient of backbone" in message, message
    assert ranks.gather(message) == [message] * 2
    trainer.settings = replace(trainer.settings, skip_bad_steps=1)
    assert trainer.advance().skipped
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    check(0.0, trainer.weights(), before)
    assert trainer.advance().skipped is None
    assert ranks.gather(trainer.saved().step) == [3, 3]


def shards(_: Path) -> None:
    """Blocks with a share of each parameter on each of two ranks against whole ones; each rank has rows of its own."""
    on_ranks("fsdp", 2, compare_shards)


def compare_shards(ranks: Ranks) -> None:
    for name in FAMILIES:
        block = make_block(name)
        sharded = fully_shard(copy.deepcopy(block))
        x_bsd = tokens(block, 4, 6)
        own_bsd = x_bsd[2 * ranks.rank : 2 * ranks.rank + 2]

        def outputs(block: Any, x_bsd: Tensor) -> dict[str, Tensor]:
            y_bsd, cache = block(x_bsd[:, :4], block.fresh_cache(len(x_bsd)))
            y_bd, cache = block.step(x_bsd[:, 4], cache)
            y_bd, cache = block.step(y_bd + x_bsd[:, 5], cache)
            return {"forward": y_bsd, "step": y_bd, **tensors_of(cache)}

        want, got = outputs(block, x_bsd), outputs(sharded, own_bsd)
        own = slice(2 * ranks.rank, 2 * ranks.rank + 2)
        check(1e-10, got, {key: tensor[own] for key, tensor in want.items()})
        # The ranks' gradients are averaged.
        for found, share in ((want, 0.5), (got, 1.0)):
            (share * sum(tensor.square().sum() for tensor in found.values())).backward()
        gradients = {key: whole(p.grad) for key, p in sharded.named_parameters() if p.grad is not None}
        check(1e-9, gradients, {key: p.grad for key, p in block.named_parameters() if p.grad is not None})
        with torch.no_grad():
            y_bd, _ = sharded.step(own_bsd[:, 0])
            check(1e-10, {"y": y_bd}, {"y": block.step(own_bsd[:, 0])[0]})
        if ranks.is_first:
            print(f"{name}: forward, step, cache and gradients are those of the whole block", flush=True)
    learned = fully_shard(make_block("mamba2-learned"))
    model = make_model()
    ranks.shard(model)
    for call in (lambda: learned.fresh_cache(1), lambda: generate(model, [1, 2], max_new_tokens=2)):
        try:
            call()
        except ValueError as refusal:
            print(refusal, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {
        "kills": kills,
        "ranks": ranks,
        "shards": shards,
        "bad_steps": bad_steps,
        "contexts": contexts,
        "tensors": tensors,
        "memory": memory,
        "rank_kills": rank_kills,
        "resumes": resumes,
        "refused": refused,
        "deaths": deaths,
        "aside": aside,
    }[sys.argv[1]](Path(sys.argv[2]))
