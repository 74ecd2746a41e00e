"""One side of `benchmarks.compare`: the cells of one source tree, each run when its name comes in.

Public names only, so that any two versions fit.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import mambakit as mk

STEPS = 20
SHAPES = {"small": (256, 2, 256, 64, 64), "wide": (768, 1, 512, 64, 128)}
"""d_model, batch, tokens, per_head_dim, state_rank."""
Cells = Iterator[tuple[str, Callable[[], Any]]]


def blocks(shape: str) -> dict[str, Any]:
    width, _, _, p, r = SHAPES[shape]
    heads: dict[str, Any] = {"d_model": width, "per_head_dim": p, "state_rank": r}
    return {
        "Mamba-1": mk.Mamba1(mk.Mamba1Config(d_model=width)),
        "Mamba-2": mk.Mamba2(mk.Mamba2Config(**heads)),
        "Mamba-3": mk.Mamba3(mk.Mamba3Config(**heads)),
        "Mamba-3 MIMO": mk.Mamba3(mk.Mamba3Config(**heads, is_mimo=True)),
    }


def kernel_cells() -> Cells:
    v, bc = torch.randn(1, 2048, 1, 24, 64), torch.randn(1, 2048, 1, 1, 128)
    da = -torch.rand(1, 2048, 24)
    leaves = [t.clone().requires_grad_() for t in (v, bc, bc, da, -da, -da)]
    for backend in ("cpu", "torch"):
        path = mk.SsdPath(backend=backend)
        yield f"SSD forward {backend}", lambda path=path: mk.ssd(v, bc, bc, da, -da, -da, path=path)
        yield f"SSD train {backend}", lambda path=path: mk.ssd(*leaves, path=path)[0].sum().backward()
    for family, block in blocks("wide").items():
        for backend in ("cpu", "torch"):
            yield from block_cells(f"{family} {backend}", block, torch.randn(1, 512, 768), mk.SsdPath(backend=backend))


def block_cells(name: str, block: Any, x: Any, path: Any) -> Cells:
    def forward() -> None:
        with torch.no_grad():
            block(x, path=path)

    def train() -> None:
        block.zero_grad()
        block(x, path=path)[0].square().mean().backward()

    yield f"{name} forward", forward
    yield f"{name} train", train


def step_cells() -> Cells:
    for shape, (width, batch, tokens, _, _) in SHAPES.items():
        for family, block in blocks(shape).items():
            x = torch.randn(batch, tokens, width)
            with torch.no_grad():
                cache = block(x)[1]

            def steps(block=block, x_bd=x[:, 0], cache=cache) -> None:
                with torch.no_grad():
                    for _ in range(STEPS):
                        block.step(x_bd, cache)

            yield f"{family} {shape} steps", steps
            if shape == "small":
                yield from block_cells(f"{family} {shape}", block, x, None)


def decode_cells() -> Cells:
    for name, config in (("Mamba-2", mk.Mamba2Config(d_model=768)), ("Mamba-1", mk.Mamba1Config(d_model=768))):
        model = mk.LanguageModel(mk.ModelConfig(block=config, n_layer=24, vocab_size=50_288)).requires_grad_(False)
        formats = {"float32": model, "int8": mk.quantize(model, 8)} if name == "Mamba-2" else {"float32": model}
        ways = [(f"{format} x{rows}", one, rows, "auto") for format, one in formats.items() for rows in (1, 8)]
        for title, one, rows, backend in [*ways, ("torch x1", model, 1, "torch"), ("torch x8", model, 8, "torch")]:
            ids = torch.ones(rows, 8, dtype=torch.int64)
            run = mk.stream(one, ids, max_new_tokens=1 << 30, temperature=0.0, backend=backend)
            yield f"{name} decode {title}", lambda run=run: [next(run) for _ in range(3)]
        yield f"{name} prefill 512", lambda model=model: mk.stream(model, [1] * 512, max_new_tokens=0)


CELLS = {"kernels": kernel_cells, "block": step_cells, "decode": decode_cells}


def work(what: str, threads: int) -> None:
    """One tree's side: make the cells, name them, then run the one named on each line that comes in."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    cells = dict(CELLS[what]())
    for run in cells.values():
        run()
    print("\t".join(cells), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        cells[line.strip()]()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
