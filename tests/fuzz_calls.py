"""Random calls of every operation, block, model and cache function, right ones and wrong ones.

Each ends in a ValueError or TypeError of ours, or in the right answer: that of torch's operators in float64. Calls run
in child processes, so that a crash is seen; a seed repeats them all, and a call's number just that one:

    python tests/fuzz_calls.py --calls 10000 --seed 3
    python tests/fuzz_calls.py --seed 3 --only 812
"""

# pyright: reportPrivateImportUsage=false
import argparse
import faulthandler
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

import mambakit
from fuzz_draws import CALLS, Call
from fuzz_kinds import KINDS, changed, fake_mode, has_numbers, made, mutated, of_kind, places, widened
from mambakit import AttentionCache, use_backend

BATCH = 500
PATIENCE, WAITING = 60, 1200
"""Seconds for a call that does not end: of computing, and in all, on a machine that others use too."""
OURS = str(Path(mambakit.__file__).parent)
AS_ELSEWHERE = ("Inference tensors cannot be", "Inplace update to inference tensor", "activation = 'x' is not one of")
"""What torch says of inference tensors in any operation, and the official functions of an activation."""
# Of the largest element; results may be sums of products of products of narrow numbers.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


def make_call(draw: random.Random) -> Call:
    call = draw.choices(list(CALLS), list(CALLS.values()))[0](draw)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        at = list(places(call.arguments))
        if at:
            call.arguments = changed(call.arguments, draw.choice(at), partial(mutated, draw=draw))
    if draw.random() < 0.1:
        kind = draw.choice(list(KINDS))
        call.arguments = tree_map_only(
            Tensor, lambda tensor: made(partial(of_kind, kind, tensor), tensor), call.arguments
        )
        tensors = [t for t in tree_leaves(call.arguments) if isinstance(t, Tensor)]
        # A model's weights are not: what takes only ids would meet them in a mode of others.
        if (
            tensors
            and all(isinstance(t, FakeTensor) for t in tensors)
            and call.name.split()[0] not in ("generate", "engine")
            and not any(isinstance(one, torch.nn.Module) for one in call.arguments.values())
        ):
            call.around = fake_mode
    return call


def fault(call: Call, backend: str, grad: bool) -> str | None:
    """What is wrong with how a call ends, or None."""
    before = made(lambda: widened(call.arguments), None)  # some functions write into what they are given
    try:
        with use_backend(backend), torch.set_grad_enabled(grad), call.around():
            result = call.run(**call.arguments)
            if grad:
                given = {id(t) for t in tree_leaves(call.arguments)}
                # A cache that was only copied leads back to what is no number; that is not ours to say.
                of = [
                    t
                    for t in tree_leaves(result)
                    if isinstance(t, Tensor) and t.requires_grad and id(t) not in given and has_numbers(t)
                ]
                torch.autograd.backward([t.float().sum() for t in of])
    except (ValueError, TypeError) as error:
        return None if is_ours(error) else f"{type(error).__name__} of {place_of(error)}: {error}"
    except Exception as error:
        if any(told in str(error) for told in AS_ELSEWHERE):
            return None
        if call.name.startswith("torch.ops.") and (not reached_us(error) or "no second derivative" in str(error)):
            return None  # torch looks at an operator's inputs first, and says in its words what it does not hand on
        return f"{type(error).__name__}: {str(error)[:200]}"
    if call.oracle is None or before is None or shares_slots(call.arguments):
        return None
    given = [t for t in tree_leaves(before) if isinstance(t, Tensor)]
    if any(not t.isfinite().all() or t.abs().amax() > 100 for t in given if t.numel() and t.is_floating_point()):
        return None
    with use_backend("torch"), torch.no_grad():
        want = call.oracle(**before)
    return difference(result, want)


def is_ours(error: Exception) -> bool:
    """Whether it is meant: raised by a line of ours, or for an argument that a function does not have."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised = last.filename.startswith(OURS) and (last.line or "").startswith("raise")
    return raised or "unexpected keyword" in str(error) or "required" in str(error)


def reached_us(error: Exception) -> bool:
    return any(frame.filename.startswith(OURS) for frame in traceback.extract_tb(error.__traceback__))


def place_of(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


def without_empty_slots(value: Any) -> Any:
    """What lies in slots of attention's cache that hold no token is nobody's: zero on both sides."""
    if isinstance(value, AttentionCache) and all(isinstance(t, Tensor) and t.layout == torch.strided for t in value):
        t = torch.arange(value.k_btgp.shape[1])
        empty_bt11 = (t >= value.position_b[:, None])[..., None, None]
        return value._replace(
            k_btgp=value.k_btgp.masked_fill(empty_bt11, 0), v_btgp=value.v_btgp.masked_fill(empty_bt11, 0)
        )
    if isinstance(value, list | tuple):
        parts = [without_empty_slots(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def shares_slots(value: Any) -> bool:
    """Whether a cache of attention has one token in all slots, also in those of a window that have to be zero."""
    if isinstance(value, AttentionCache):
        strided = [t for t in value[:2] if isinstance(t, Tensor) and not t.is_nested and t.layout == torch.strided]
        return any(t.dim() > 1 and t.shape[1] > 1 and t.stride(1) == 0 for t in strided)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(shares_slots, parts))


def difference(result: Any, want: Any) -> str | None:
    result, want = without_empty_slots(result), without_empty_slots(want)
    dtypes = {t.dtype for t in tree_leaves(result) if isinstance(t, Tensor)}
    if not dtypes:
        return None
    tolerance, narrowest = max((TOLERANCE.get(dtype, 0.0), str(dtype), dtype) for dtype in dtypes)[::2]
    pairs = zip(tree_leaves(result), tree_leaves(want), strict=True)
    for i, (got, wanted) in enumerate(pairs):
        if not isinstance(got, Tensor):
            continue
        all_numbers, got = has_numbers(got), widened(got)
        if got.shape != wanted.shape:
            return f"output {i} has shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
        if not all_numbers:
            continue
        largest = float(wanted.abs().max()) if got.numel() else 0.0
        off = float((got - wanted).abs().max()) / max(1.0, largest) if got.numel() else 0.0
        if not off <= tolerance and (not narrowest.is_floating_point or largest < torch.finfo(narrowest).max):
            return f"output {i} is off by {off:.2g}, relative"
    return None


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        if value.is_nested or value.layout != torch.strided:
            return f"{value.layout} {type(value).__name__} of {value.dim()} axes, nested {value.is_nested}"
        kind = "functional " if torch._is_functional_tensor(value) else "zero " if value._is_zerotensor() else ""
        return f"{kind}{type(value).__name__}{tuple(value.shape)} {value.dtype} {value.stride()} on {value.device}"
    if isinstance(value, dict):
        return ", ".join(f"{key}={describe(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(describe, value))})"
    return repr(value)


def run_one(seed: int, number: int) -> str | None:
    draw = random.Random(f"{seed} {number}")
    torch.manual_seed(draw.randrange(1 << 30))
    call = make_call(draw)
    backend, grad = draw.choice(("auto", "auto", "torch")), draw.random() < 0.3
    wrong = fault(call, backend, grad)
    if wrong is not None:
        wrong += f"\n    {call.name}({describe(call.arguments)}), backend {backend}, grad {grad}"
    return wrong


def run_batch(seed: int, start: int, stop: int) -> list[str]:
    """In a process of its own, which says what it is about to do, and in another one after each that crashes."""
    faults = []
    while start < stop:
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            os.path.abspath(__file__),
            f"--seed={seed}",
            f"--start={start}",
            "--child",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with tempfile.TemporaryDirectory() as folder:  # some are told to write to where a word says
            done = subprocess.run(
                [*command, f"--calls={stop - start}"], capture_output=True, text=True, env=environment, cwd=folder
            )
        lines = done.stdout.splitlines()
        faults += [line.removeprefix("FAULT ").replace("\\n", "\n") for line in lines if line.startswith("FAULT ")]
        if not done.returncode:
            break
        last = next((int(line.split()[1]) for line in reversed(lines) if line.startswith("CALL ")), stop)
        faults.append(f"{last}: ended with {done.returncode}\n{done.stderr[-2000:]}")
        start = last + 1
    return faults


def lose_patience_later() -> None:
    faulthandler.register(signal.SIGPROF, chain=True)  # which then ends the process
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    faulthandler.dump_traceback_later(WAITING, exit=True)


def main(calls: int, seed: int, start: int = 0, child: bool = False, only: int | None = None) -> int:
    if only is not None:
        lose_patience_later()
        print(run_one(seed, only) or "as it should be")
        return 0
    if child:
        for number in range(start, start + calls):
            lose_patience_later()
            print("CALL", number, flush=True)
            wrong = run_one(seed, number)
            if wrong is not None:
                print("FAULT", number, wrong.replace("\n", "\\n"), flush=True)
        return 0
    faults = 0
    for first in range(start, start + calls, BATCH):
        found = run_batch(seed, first, min(first + BATCH, start + calls))
        faults += len(found)
        print(*(one + "\n" for one in found), sep="", end="", flush=True)
    print(f"{calls} calls from {start}, seed {seed}: {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first call")
    parser.add_argument("--only", type=int, help="repeat one call and print how it ends")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    sys.exit(main(**vars(parser.parse_args())))
