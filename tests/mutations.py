"""Damaged and hostile checkpoints, drawn from a seed. Not a test: tests and `make mutations` start it.

`python mutations.py FOLDER FIRST COUNT` loads and uses so many of them in this process, which may grow by a gigabyte.
"""

import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mambakit as mk
from hybrid_models import fields
from mambakit.checkpoints.gguf.writing import save_gguf
from mambakit.checkpoints.hub import HUB
from mambakit.cli.main import main
from mambakit.models.multi_gate import MultiGateConfig
from mambakit.models.schedules import Custom, Cyclic
from mambakit.text.tokens import Bytes, TokenizerFile, read_tokens
from trainer_cases import make_tokenizer

SECONDS, MEMORY, PATIENCE = 5.0, 2**30, 15
HEADS = {"d_model": 16, "state_rank": 8, "per_head_dim": 8}
PARALLEL = mk.ParallelConfig(mk.Mamba2Config(**HEADS), mk.AttentionConfig(16, 4, 2, rope_theta=100.0, window=9))
VALUES: list[Any] = [
    *(0, 1, -1, 2, 3, 255, 10**4, 10**5, 10**6, 10**9, 10**12, 2**31, 2**63 - 1, 2**63, 2**64, 10**100, -(2**63)),
    *(0.5, 1.5, -0.0, 1e-320, 1e20, 1e308, float("inf"), float("-inf"), float("nan")),
    *(None, True, False, "", "inf", "auto", "bytes", "x" * 1000, "\0", "a\nb\x1b[31m", "../x", "\ud800", "mamba1"),
    *([], {}, [1, 2], [[1], [2]], [0.1, "inf"], [1] * 10_000, ["start", "end"], {"a": 1}, {"": []}),
    *({"__float__": "Infinity"}, {"__float__": []}, {"__float__": "x"}),
    *(
        {"schedule": "Cyclic", "n": 10**9},
        {"schedule": "Stretched", "n": 10**7},
        {"schedule": "Custom", "indices": [0]},
    ),
    *({"schedule": "Custom", "indices": "00"}, {"schedule": [], "n": 3}, {"n_streams": 10**9}, {"n_streams": 3}),
]
RUNS_CODE = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect"}


def sources(folder: Path) -> list[Path]:
    """Whole checkpoints of each format to be damaged."""
    made: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "own": (mk.Mamba3Config(**HEADS), {}, {}),
        "wrapped": (
            mk.Mamba2Config(**HEADS, dt_limit=(0.0, 9.0)),
            {"virtual": Custom((0, 1, 0)), "multi_gate": MultiGateConfig(n_streams=2), "stack_latents": ("start", 3)},
            {},
        ),
        "hybrid": (None, {"layers": ((PARALLEL, mk.MLPConfig(16, 24)), (mk.MoEConfig(16, 8, 4, 2),))}, {}),
        "parts": (mk.Mamba1Config(d_model=16, state_rank=8), {"virtual": Cyclic(5)}, {"max_shard_bytes": 9000}),
        "official": (mk.Mamba2Config(**HEADS), {}, {"format": "official"}),
        "transformers": (mk.Mamba2Config(**HEADS), {}, {"format": "transformers", "max_shard_bytes": 20_000}),
        "quantized-8": (mk.Mamba2Config(**HEADS), {}, {}),
        "quantized-4": (mk.Mamba1Config(d_model=16, state_rank=8), {}, {"max_shard_bytes": 5000}),
    }
    for name, (block, options, saving) in made.items():
        if not (folder / name).exists():
            torch.manual_seed(0)
            short = {} if block is None else {"block": block, "n_layer": 2}
            model = mk.LanguageModel(mk.ModelConfig(**short, vocab_size=300, **options))
            _, _, bits = name.partition("-")
            mk.save_model(mk.quantize(model, int(bits)) if bits else model, folder / name, **saving)
            TokenizerFile(make_tokenizer(folder)).save(folder / name) if name == "own" else Bytes().save(folder / name)
    for name, kind in HUB.items():
        if not (folder / name).exists():
            model = mk.LanguageModel(kind.read({**fields(name), "vocab_size": 300}).config())
            mk.save_model(model, folder / name, format=name)
            Bytes().save(folder / name)
    if not (folder / "adapter").exists():
        torch.manual_seed(0)
        mk.save_lora(mk.add_lora(mk.load_model(folder / "official"), 2), folder / "adapter", base=folder / "official")
        Bytes().save(folder / "adapter")
        (folder / "gguf").mkdir()
        save_gguf(mk.load_model(folder / "official"), folder / "gguf" / "model.gguf")
        Bytes().save(folder / "gguf")
    return [folder / name for name in (*made, *HUB, "adapter", "gguf")]


def places(tree: Any, at: tuple = ()) -> list[tuple]:
    """The ways to all values of a JSON tree but the root."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [way for key, child in children for way in ((*at, key), *places(child, (*at, key)))]


def deep(draw: random.Random) -> Any:
    tree: Any = 1
    for _ in range(draw.choice([5, 50, 400, 900])):
        tree = [tree] if draw.random() < 0.5 else {"a": tree}
    return tree


def change_tree(tree: Any, draw: random.Random) -> Any:
    """One value replaced, removed, renamed, moved or wrapped."""
    ways = places(tree)
    if not ways or draw.random() < 0.03:
        return draw.choice(VALUES)
    way = draw.choice(ways)
    parent = tree
    for key in way[:-1]:
        parent = parent[key]
    what = draw.randrange(8)
    if what == 0:
        del parent[way[-1]]
    elif what == 1 and isinstance(parent, dict):
        parent[draw.choice(["n", "block", "x\ny", str(way[-1]) + "_", "virtual"])] = parent.pop(way[-1])
    elif what == 2:
        parent[way[-1]] = [parent[way[-1]]] if draw.random() < 0.5 else {"a": parent[way[-1]]}
    elif what == 3:
        parent[way[-1]] = deep(draw)
    elif what == 4 and isinstance(parent[way[-1]], int | float):
        parent[way[-1]] = parent[way[-1]] * draw.choice([2, 10, 0.5, -1]) + draw.choice([0, 1])
    else:
        parent[way[-1]] = copy.deepcopy(draw.choice(VALUES))
    return tree


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """Cut short, flipped, grown or overwritten."""
    changed, what = bytearray(content), draw.randrange(5)
    place = draw.randrange(len(changed)) if draw.random() < 0.5 else draw.randrange(min(len(changed), 600))
    if what == 0:
        return content[:place]
    if what == 1:
        changed[place:place] = draw.randbytes(draw.choice([1, 8, 1000]))
    elif what == 2:
        changed[:8] = draw.choice([0, 1, len(content), 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
    else:
        for _ in range(draw.choice([1, 1, 1, 8, 64])):
            changed[draw.randrange(len(changed)) if what == 3 else place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def change_header(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header says something else."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(change_tree(json.loads(content[8:end]), draw)).encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + content[end:]


def change(folder: Path, draw: random.Random) -> str:
    """Damage one file, or two."""
    told = []
    for _ in range(draw.choice([1, 1, 1, 2])):
        path = draw.choice(sorted(folder.iterdir()))
        if draw.random() < 0.3 and (folder / "config.json").exists():
            path = folder / "config.json"
        content = path.read_bytes()
        if not content:
            continue
        kinds: list[Callable[[bytes, random.Random], bytes]] = [change_bytes]
        if path.suffix == ".json":
            kinds = [change_bytes, *[change_json] * 4]
        elif path.suffix == ".safetensors":
            kinds = [change_bytes, change_header]
        kind = draw.choice(kinds)
        with contextlib.suppress(ValueError, RecursionError):  # what was damaged before may be no JSON any more
            path.write_bytes(kind(content, draw))
            told.append(f"{kind.__name__} of {path.name}")
    return ", ".join(told)


def change_json(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.03:
        return b"[" * draw.choice([500, 100_000])
    return json.dumps(change_tree(json.loads(content), draw)).encode("utf-8", "surrogatepass")


def use(folder: Path) -> None:
    """Everything that reads a checkpoint: ValueError is the only exception, and the verbs have none."""
    loaded = False
    with contextlib.suppress(ValueError):
        mk.load_model(folder)
        loaded = True
    with contextlib.suppress(ValueError):
        read_tokens(folder)
    verbs = {
        "generate": ["generate", str(folder), "--prompt=a", "--max-new-tokens=2"],
        "convert": ["convert", str(folder), str(folder.with_name("converted")), "--format=mambakit"],
    }
    for name, arguments in verbs.items():
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main(arguments)
        lines = said.getvalue().splitlines()
        assert code == 0 or (code == 2 and len(lines) == 1 and lines[0].startswith(f"mambakit {name}: ")), (code, lines)
        assert loaded or code == 2, f"{name} read what load_model refused"


def attack(folder: Path, seed: int) -> str | None:
    """What went wrong with the checkpoint of this number."""
    draw, target = random.Random(seed), folder / f"changed-{os.getpid()}" / "model"
    shutil.rmtree(target.parent, ignore_errors=True)
    shutil.copytree(draw.choice(sources(folder)), target)
    told = change(target, draw)
    began, problem = time.perf_counter(), None
    signal.alarm(PATIENCE)
    try:
        use(target)
    except BaseException:  # a panic of the tokenizers package is no Exception
        problem = traceback.format_exc(limit=-4)
    signal.alarm(0)
    took = time.perf_counter() - began
    if took > SECONDS:
        problem = f"{problem or ''} took {took:.1f} s"
    shutil.rmtree(target.parent)
    return None if problem is None else f"{seed} ({told}): {problem}"


def give_up(*_: Any) -> None:
    raise RuntimeError("out of patience")


def watch_for_code(event: str, args: tuple) -> None:
    if event in RUNS_CODE:
        raise AssertionError(f"a checkpoint ran {event}{args}")


def run(folder: Path, first: int, count: int) -> None:
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"  # a changed path may be a name on the hub
    torch.set_num_threads(1)
    use(sources(folder)[0])  # whatever is imported late
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    sys.addaudithook(watch_for_code)
    signal.signal(signal.SIGALRM, give_up)
    problems = [problem for seed in range(first, first + count) if (problem := attack(folder, seed))]
    for problem in problems:
        print(problem)
    print(f"{count} checkpoints, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
