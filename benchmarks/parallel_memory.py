"""Memory of one process and of each of two that share a model's parameters, or a sequence.

python -m benchmarks.parallel_memory
"""

import argparse
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch: what is freed goes back to the system at once, and so is no part of a later peak.
os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import mambakit as mk
from benchmarks.measure import resident_bytes, table, write_json
from mambakit.text.documents import Document
from mambakit.text.tokens import Bytes
from mambakit.training.batches import Rows, encode
from mambakit.training.loop import HeldOut, Trainer
from mambakit.training.processes import Ranks
from mambakit.training.settings import TrainSettings

MEGABYTE = 2**20


def peak_beyond(before: int, work: Callable[[], Any]) -> int:
    """The most resident memory of this process while it works, beyond what it had before."""
    Path("/proc/self/clear_refs").write_text("5")
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024 - before


def warm_up() -> None:
    """What torch brings along when it first computes, which no model is to blame for."""
    model = mk.LanguageModel(mk.ModelConfig(block=mk.Mamba2Config(d_model=64), n_layer=1, vocab_size=8))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 300, dtype=torch.int64))[0].sum().backward()
    optimizer.step()


def train(optimizer: str, sizes: argparse.Namespace) -> int:
    """Beyond the start of the process, in steps on few tokens, so that parameters and what belongs to them count."""
    ranks = Ranks("fsdp", "cpu")
    warm_up()
    before = resident_bytes()
    tokens, text = Bytes(), [Document("text", bytes(range(256)) * 20)]
    settings = TrainSettings(steps=10, batch=2, seq_len=8, optimizer=optimizer)
    encoded = encode(text, tokens)
    block = mk.Mamba2Config(d_model=sizes.width, state_rank=64)
    model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=sizes.layers, vocab_size=tokens.vocab_size))
    trainer = Trainer(model, settings, Rows(encoded, tokens.end, settings), HeldOut(encoded, [1]), ranks)
    trainer.advance()
    peak = peak_beyond(before, lambda: [trainer.advance() for _ in range(2)])
    ranks.close()
    return peak


def long_sequence(family: str, sizes: argparse.Namespace) -> int:
    """Beyond the model, in a forward and a backward pass."""
    torch.manual_seed(0)
    width = sizes.width // 4
    config = {
        "mamba1": lambda: mk.Mamba1Config(d_model=width),
        "mamba2": lambda: mk.Mamba2Config(d_model=width, state_rank=64),
        "mamba3": lambda: mk.Mamba3Config(d_model=width, state_rank=64),
    }[family]()
    model = mk.Stack(mk.StackConfig(block=config, n_layer=4))
    length = sizes.length
    if int(os.environ["WORLD_SIZE"]) > 1:
        ranks = Ranks("ddp", "cpu")
        mk.parallel.context_parallel(model, init_device_mesh("cpu", (ranks.world,)))
        length //= ranks.world

    def work(length: int) -> None:
        x_bsd = torch.randn(1, length, width)
        model(x_bsd)[0].square().mean().backward()

    work(300)
    model.zero_grad()
    before = resident_bytes()
    return peak_beyond(before, lambda: work(length))


def one_rank(rank: int, world: int, port: int, folder: str, what: str, sizes: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    peak = train(what, sizes) if what in ("adamw", "muon") else long_sequence(what, sizes)
    Path(folder, str(rank)).write_text(str(peak))


def measured(what: str, world: int, sizes: argparse.Namespace) -> int:
    """The largest of the ranks' peaks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        spawn(one_rank, (world, port, folder, what, sizes), nprocs=world)
        return max(int(path.read_text()) for path in Path(folder).iterdir())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=16384)
    sizes = parser.parse_args()
    rows = []
    for what in ("adamw", "muon", "mamba1", "mamba2", "mamba3"):
        one, two = (measured(what, world, sizes) for world in (1, 2))
        label = f"{what}, parameters shared (FSDP2)" if what in ("adamw", "muon") else f"{what}, sequence shared"
        rows.append({"what": label, "one": one, "each of two": two, "ratio": two / one})
    names = ["what", "one, MB", "each of two, MB", "ratio"]
    told = [
        [row["what"], *(f"{row[key] / MEGABYTE:.0f}" for key in ("one", "each of two")), f"{row['ratio']:.2f}"]
        for row in rows
    ]
    print(table(names, told))
    print(write_json("parallel_memory", {"sizes": vars(sizes), "rows": rows}))


if __name__ == "__main__":
    main()
