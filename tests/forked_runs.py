"""Runs of a tiny trainer in processes of their own, forked so that torch is imported once. Not a test: tests start it.

`python forked_runs.py WHAT FOLDER` with one of the functions named at the end; results are the logs in FOLDER.
"""

import copy
import os
import random
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
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from blocks import FAMILIES, make_block, tensors_of, tokens
from compare import check
from mambakit import generate
from mambakit.text.tokens import Bytes
from mambakit.training.objective import Objective
from mambakit.training.processes import Ranks, whole
from mambakit.training.run import train
from trainer_cases import Silent, losses, make_model, make_trainer

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


def on_ranks(parallel: str, world: int, work: Callable[[Ranks], None], context: int = 1, tensor: int = 1) -> None:
    """So many processes that know each other; some may have shares of the same rows, some of the same heads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def one(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = Ranks(parallel, "cpu", context, tensor)
        work(ranks)
        ranks.close()

    codes = [outcome(child) for child in [forked(lambda rank=rank: one(rank)) for rank in range(world)]]
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
    spread(folder / "1-lora", "ddp", 1, lora=2, **exact)
    for parallel in ("ddp", "fsdp"):
        spread(folder / f"2-{parallel}-lora", parallel, 2, lora=2, **exact)


def contexts(folder: Path) -> None:
    """Ranks that share sequences, alone and with others that have other rows."""
    exact = {"steps": 8, "dtype": torch.float64}
    spread(folder / "1", "ddp", 1, **exact)
    for parallel in ("ddp", "fsdp"):
        spread(folder / f"2-{parallel}", parallel, 2, context=2, accumulate=2, **exact)
        spread(folder / f"4-{parallel}", parallel, 4, context=2, boundaries="reset", **exact)
    resumed(folder / "2-fsdp", folder / "2-fsdp-then-1", "ddp", 1, **exact)
    resumed(folder / "1", folder / "1-then-4-ddp", "ddp", 4, context=4, **exact)


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
    }[sys.argv[1]](Path(sys.argv[2]))
