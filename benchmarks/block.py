"""Forward, training and step of one block per family, beside the same block in transformers and mambapy.

python -m benchmarks.block            both shapes, all peers (about ten minutes)
python -m benchmarks.block --quick    the small shape only
python -m benchmarks.block --bfloat16 ours alone, the wide shape: bfloat16 beside float32
python -m benchmarks.block --bfloat16 --families "Mamba-3 MIMO" --what train    some rows of it

Peers get our weights and their outputs are compared, so that all compute the same. They need the `bench` extra.
"""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.measure import gemm_task, interleaved, median, table, write_json
from mambakit import Mamba1, Mamba1Config, Mamba2, Mamba2Config, Mamba3, Mamba3Config

# A small block, and the width of a 130M model.
SHAPES = {
    "small": {"batch": 2, "tokens": 256, "trained": 256, "d_model": 256, "state_rank": 64, "per_head_dim": 64},
    "wide": {"batch": 1, "tokens": 2048, "trained": 512, "d_model": 768, "state_rank": 128, "per_head_dim": 64},
}

# Steps timed as one task.
STEPS = 16
KINDS = ("forward", "train", "step")


def ours(n: dict[str, int]) -> dict[str, nn.Module]:
    heads: dict[str, Any] = {key: n[key] for key in ("d_model", "state_rank", "per_head_dim")}
    return {
        "Mamba-1": Mamba1(Mamba1Config(d_model=n["d_model"])),
        "Mamba-2": Mamba2(Mamba2Config(**heads)),
        "Mamba-3": Mamba3(Mamba3Config(**heads)),
        "Mamba-3 MIMO": Mamba3(Mamba3Config(**heads, is_mimo=True, mimo_rank=4)),
    }


def our_tasks(block: nn.Module, x: torch.Tensor, trained: int) -> dict[str, Callable[[], Any]]:
    with torch.no_grad():
        cache = block(x[:, :8])[1]

    def forward():
        with torch.no_grad():
            return block(x)[0]

    def step():
        with torch.no_grad():
            return block.step(x[:, 0], cache)  # type: ignore[operator]

    return {"forward": forward, "train": lambda: train(block, lambda: block(x[:, :trained])[0]), "step": step}


def train(module: nn.Module, run: Callable[[], torch.Tensor]) -> None:
    module.zero_grad()
    run().square().mean().backward()


def transformers_tasks(family: str, block: Any, x: torch.Tensor, trained: int) -> dict[str, Callable[[], Any]]:
    import transformers

    transformers.logging.set_verbosity_error()
    config = block.config
    if family == "Mamba-1":
        from transformers.models.mamba.modeling_mamba import MambaMixer as Mixer

        settings = transformers.MambaConfig(
            hidden_size=config.d_model, state_size=config.state_rank, num_hidden_layers=1, expand=2
        )
    else:
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Mixer

        settings = transformers.Mamba2Config(
            hidden_size=config.d_model,
            state_size=config.state_rank,
            head_dim=config.per_head_dim,
            num_heads=config.nheads,
            n_groups=1,
            num_hidden_layers=1,
            expand=2,
        )
    mixer = Mixer(settings, layer_idx=0)  # type: ignore[arg-type]  # each mixer meets its own config
    mixer.load_state_dict(block.state_dict())
    cache = transformers.DynamicCache(config=settings)
    with torch.no_grad():
        mixer(x[:, :8], cache_params=cache)

    def forward():
        with torch.no_grad():
            return mixer(x)

    def step():
        with torch.no_grad():
            return mixer(x[:, :1], cache_params=cache)

    return {"forward": forward, "train": lambda: train(mixer, lambda: mixer(x[:, :trained])), "step": step}


def mambapy_tasks(block: Any, x: torch.Tensor, trained: int) -> dict[str, Callable[[], Any]]:
    from mambapy.mamba import MambaBlock, MambaConfig

    peer = MambaBlock(MambaConfig(d_model=block.config.d_model, n_layers=1, d_state=block.config.state_rank))
    peer.load_state_dict(block.state_dict())
    inner, kernel = block.config.d_inner, block.config.conv_kernel
    # Its cache starts empty: no state, and the convolution's inputs but the newest.
    cache = (None, torch.zeros(len(x), inner, kernel - 1))

    def forward():
        with torch.no_grad():
            return peer(x)

    def step():
        with torch.no_grad():
            return peer.step(x[:, 0], cache)

    return {"forward": forward, "train": lambda: train(peer, lambda: peer(x[:, :trained])), "step": step}


def repeated(step: Callable[[], Any]) -> Callable[[], Any]:
    """Several steps as one task, as decoding runs them: a single one would mostly measure cold caches."""

    def steps():
        for _ in range(STEPS):
            step()

    return steps


def available(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def measure(shape: str, threads: int, repeats: int, wanted: list[str]) -> list[dict[str, Any]]:
    n = SHAPES[shape]
    trained = n["trained"]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    x = torch.randn(n["batch"], n["tokens"], n["d_model"])
    gemm, flops = gemm_task()
    tasks: dict[Any, Callable[[], Any]] = {"gemm": gemm}
    for family, block in ours(n).items():
        libraries = {"mambakit": our_tasks(block, x, trained)}
        if available("transformers") and family in ("Mamba-1", "Mamba-2"):
            libraries["transformers"] = transformers_tasks(family, block, x, trained)
        if available("mambapy") and family == "Mamba-1":
            libraries["mambapy"] = mambapy_tasks(block, x, trained)
        want = libraries["mambakit"]["forward"]()
        for library, runs in libraries.items():
            difference = ((runs["forward"]() - want).abs().max() / want.abs().max()).item()
            assert difference < 1e-3, f"{library} computes another {family}: {difference}"
            runs["step"] = repeated(runs["step"])
            tasks |= {(family, library, what): run for what, run in runs.items() if what in wanted}
    # Steps by themselves: after a training step that took gigabytes, a step mostly waits for memory.
    steps = {name: tasks.pop(name) for name in list(tasks) if name[-1] == "step"}
    times = interleaved(tasks, repeats) | interleaved(steps, 3 * repeats)
    rate = flops / median(times.pop("gemm")) / 1e9
    return [
        {
            "shape": shape,
            "threads": threads,
            "family": family,
            "library": library,
            "what": what,
            "ms": 1e3 * median(seconds) / (STEPS if what == "step" else 1),
            "times": len(seconds),
            "gemm_gflops": rate,
        }
        for (family, library, what), seconds in times.items()
    ]


def narrow_tasks(family: str, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Training and forward in float32, with everything in bfloat16 (`.to`), and with float32 parameters (autocast)."""
    n = SHAPES["wide"]
    block, narrow = ours(n)[family], ours(n)[family].to(torch.bfloat16)
    x_narrow = x.bfloat16()

    def under_autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)[0]

    runs: dict[str, tuple[nn.Module, Callable[[], torch.Tensor]]] = {
        "float32": (block, lambda: block(x)[0]),
        "bfloat16": (narrow, lambda: narrow(x_narrow)[0]),
        "autocast": (block, under_autocast),
    }

    def forward(run: Callable[[], torch.Tensor]) -> None:
        with torch.no_grad():
            run()

    return {f"train {name}": partial(train, *of) for name, of in runs.items()} | {
        f"forward {name}": partial(forward, run) for name, (_, run) in runs.items()
    }


def measure_bfloat16(threads: int, repeats: int, families: list[str], wanted: list[str]) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    rows, kinds = [], [what for what in ("train", "forward") if what in wanted]
    for family in families:
        for tokens in (512, 2048):
            x = torch.randn(1, tokens, SHAPES["wide"]["d_model"], generator=torch.Generator().manual_seed(0))
            gemms = {f"gemm {dtype}": gemm_task(dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
            own = {name: task for name, task in narrow_tasks(family, x).items() if name.split()[0] in kinds}
            tasks = {name: task for name, (task, _) in gemms.items()} | own
            times = {name: median(seconds) for name, seconds in interleaved(tasks, repeats).items()}
            rates = [flops / times[name] / 1e9 for name, (_, flops) in gemms.items()]
            rows += [
                {
                    **{"threads": threads, "family": family, "tokens": tokens, "what": what, "products": rates},
                    **{name: 1e3 * times[f"{what} {name}"] for name in ("float32", "bfloat16", "autocast")},
                }
                for what in kinds
            ]
    return rows


def show_bfloat16(rows: list[dict[str, Any]]) -> None:
    heads = ["threads", "family", "tokens", "what", "float32 ms", "bfloat16 ms", "of float32", "autocast of float32"]
    lines = []
    for row in rows:
        sizes = [str(row[key]) for key in ("threads", "family", "tokens", "what")]
        ratios = [f"{row[name] / row['float32']:.2f}" for name in ("bfloat16", "autocast")]
        rates = [f"{rate:.0f}" for rate in row["products"]]
        lines.append([*sizes, f"{row['float32']:.1f}", f"{row['bfloat16']:.1f}", *ratios, " / ".join(rates)])
    print(table([*heads, "products G/s float32 / bfloat16"], lines))


def show(rows: list[dict[str, Any]]) -> None:
    cells = {(r["shape"], r["threads"], r["family"], r["library"], r["what"]): r["ms"] for r in rows}
    lines = []
    wanted = list(dict.fromkeys(r["what"] for r in rows))
    for shape, threads, family, library in dict.fromkeys(
        (r["shape"], r["threads"], r["family"], r["library"]) for r in rows
    ):
        line = [shape, str(threads), family, library]
        for what in wanted:
            ms, own = cells[shape, threads, family, library, what], cells[shape, threads, family, "mambakit", what]
            line.append(f"{ms:.2f}" if library == "mambakit" else f"{ms:.2f} ({ms / own:.1f}x)")
        lines.append(line)
    print(table(["shape", "threads", "family", "library", *(f"{what} ms" for what in wanted)], lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small shape only")
    parser.add_argument("--what", nargs="+", choices=KINDS, default=list(KINDS), help="what to time")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts to measure at")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved rounds (median)")
    parser.add_argument("--bfloat16", action="store_true", help="bfloat16 beside float32 instead of other libraries")
    families = list(ours(SHAPES["small"]))
    parser.add_argument("--families", nargs="+", choices=families, default=families, help="with --bfloat16: of these")
    arguments = parser.parse_args()
    if arguments.bfloat16:
        chosen = arguments.repeats, arguments.families, arguments.what
        rows = [row for threads in arguments.threads for row in measure_bfloat16(threads, *chosen)]
        show_bfloat16(rows)
        print(f"\nwritten to {write_json('block_bfloat16', {'shape': SHAPES['wide'], 'rows': rows}).name}")
        return
    shapes = ["small"] if arguments.quick else list(SHAPES)
    rows = [
        row
        for t in arguments.threads
        for shape in shapes
        for row in measure(shape, t, arguments.repeats, arguments.what)
    ]
    print(f"\nfloat32; {SHAPES}\nin brackets: times our time\n")
    show(rows)
    print(f"\nwritten to {write_json('block', {'shapes': SHAPES, 'rows': rows}).name}")


if __name__ == "__main__":
    main()
