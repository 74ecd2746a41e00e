"""Random calls of every operation, block, model and cache function, right ones and wrong ones.

Each ends in a ValueError or TypeError of ours, or in the right answer: that of torch's operators in float64. Calls run
in child processes, so that a crash is seen; a seed repeats them all, and a call's number just that one:

    python tests/fuzz_calls.py --calls 10000 --seed 3
    python tests/fuzz_calls.py --seed 3 --only 812
"""

# pyright: reportPrivateImportUsage=false
import argparse
import contextlib
import faulthandler
import inspect
import os
import random
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import mambakit
from blocks import CONFIGS, make_block, random_cache, tokens
from calls import OPERATIONS, Wrapped, negative_view, tensors_of
from mambakit import AttentionCache, caches, use_backend

BATCH = 250
PATIENCE = 60
"""Seconds for a call that does not end."""
OURS = str(Path(mambakit.__file__).parent)
# Of the largest element; results may be sums of products of products of narrow numbers.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHER_DTYPES = (*DTYPES, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)


@dataclass
class Call:
    """`run(**arguments)`; in float64 by torch's operators it is `oracle(**arguments)`, if there is one."""

    name: str
    run: Callable[..., Any]
    arguments: dict[str, Any]
    oracle: Callable[..., Any] | None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def operation_call(draw: random.Random) -> Call:
    name = draw.choice(list(OPERATIONS))
    tensors: dict[str, Any] = tensors_of(name, draw.choice(DTYPES), draw.randrange(1 << 30))
    for optional in [n for n in tensors if draw.random() < 0.2]:
        if inspect.signature(OPERATIONS[name]).parameters[optional].default is None:
            del tensors[optional]
    if draw.random() < 0.2:
        tensors = {n: t[:, :0] if n.split("_")[-1].startswith(("bs", "bn")) else t for n, t in tensors.items()}
    return Call(name, OPERATIONS[name], tensors, OPERATIONS[name])


def block_call(draw: random.Random) -> Call:
    name, dtype = draw.choice(list(CONFIGS)), draw.choice((torch.float32, torch.float64))
    block, wide, b, s = make_block(name, dtype), make_block(name), draw.randint(0, 3), draw.choice((0, 1, 2, 7))
    wide.load_state_dict(block.state_dict())
    arguments: dict[str, Any] = {"cache": random_cache(block, b) if draw.random() < 0.5 else None}
    if draw.random() < 0.3:
        return Call(f"{name}.step", block.step, {"x_bd": tokens(block, b, 1)[:, 0], **arguments}, wide.step)
    if draw.random() < 0.2 and b:
        bounds = sorted(draw.randint(0, s) for _ in range(b - 1))
        arguments["cu_seqlens"] = torch.tensor([0, *bounds, s])
        b = 1
    for flags in ("mask_bs", "reset_bs"):
        if draw.random() < 0.3:
            arguments[flags] = torch.rand(b, s) < 0.5
    return Call(name, block, {"x_bsd": tokens(block, b, s), **arguments}, wide)


def model_call(draw: random.Random) -> Call:
    config = CONFIGS[draw.choice(list(CONFIGS))]
    model = mambakit.LanguageModel(mambakit.ModelConfig(block=config, n_layer=2, vocab_size=20))
    wide = mambakit.LanguageModel(model.config, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    ids = torch.randint(
        -1 if draw.random() < 0.1 else 0, 21 if draw.random() < 0.1 else 20, (2, draw.choice((0, 1, 5)))
    )
    if draw.random() < 0.3 and ids.numel():
        return Call("model.step", model.step, {"ids_b": ids[:, 0]}, wide.step)
    return Call("model", model, {"ids_bs": ids}, wide)


def cache_call(draw: random.Random) -> Call:
    block: Any = make_block(draw.choice(list(CONFIGS)), torch.float32)
    cache = random_cache(block, 3)
    made: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (caches.select, {"cache": cache, "index_b": torch.tensor([draw.randint(-1, 3), 1])}),
        (caches.clone, {"cache": cache}),
        (caches.concat, {"caches": [cache, random_cache(block, draw.randint(0, 2))]}),
        (caches.to, {"cache": cache, "dtype": draw.choice(OTHER_DTYPES)}),
        (block.fresh_cache, {"batch": draw.choice((0, 1, 5))}),
    ]
    function, arguments = draw.choice(made)
    return Call(function.__name__, function, arguments, None)


def mutated(tensor: Tensor, draw: random.Random) -> Any:
    """Something in the place of a tensor: often wrong, sometimes only laid out in another way."""
    # Wrong enough, and torch never ends with some views of empty DTensors.
    if tensor.is_nested or tensor.layout != torch.strided or isinstance(tensor, DTensor):
        return tensor
    axis = draw.randrange(max(tensor.dim(), 1))
    has_axis = tensor.dim() > 0 and tensor.shape[axis] > 0
    number = draw.choice((torch.nan, torch.inf, -1e4, 3e4, 1e30, 0.0))
    choices: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.choice((3, 0.5, "x", [1.0], (), {})),
        lambda: tensor.to(draw.choice(OTHER_DTYPES)),
        lambda: tensor[None],
        lambda: tensor.select(axis, 0) if has_axis else tensor,
        lambda: tensor.narrow(axis, 0, tensor.shape[axis] - 1) if has_axis else tensor,
        lambda: torch.cat([tensor, tensor], axis) if tensor.dim() else tensor,
        lambda: tensor.narrow(axis, 0, 0) if has_axis else tensor,
        lambda: tensor.narrow(axis, 0, 1).expand_as(tensor) if has_axis else tensor,
        lambda: tensor.transpose(0, axis).contiguous().transpose(0, axis) if tensor.dim() else tensor,
        lambda: tensor.transpose(0, axis) if tensor.dim() else tensor,
        lambda: torch.stack([tensor] * 3, -1)[..., 1],
        lambda: torch.cat([tensor.flatten(), tensor.flatten()])[tensor.numel() :].view(tensor.shape),
        lambda: far_apart(tensor),
        lambda: tensor.flip(axis) if tensor.dim() else tensor,
        lambda: with_one(tensor, number, draw),
        lambda: tensor * draw.choice((1e-20, 1e4, -1)),
        *[lambda: of_kind(draw.choice(list(KINDS)), tensor)] * 6,
    ]
    return made(draw.choice(choices), tensor)


def made(make: Callable[[], Any], otherwise: Any) -> Any:
    """What is made, if torch makes it."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()
    return otherwise


@cache
def one_rank() -> DeviceMesh:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


@cache
def fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


def functional(tensor: Tensor) -> Tensor:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(tensor)


def inferred(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "wrapped": Wrapped,
    "parameter": lambda tensor: nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
    "meta": lambda tensor: tensor.to("meta"),
    "negative": lambda tensor: negative_view(tensor) if tensor.dtype in DTYPES[:2] else tensor,
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "share": lambda tensor: distribute_tensor(tensor, one_rank()),
    "fake": lambda tensor: fake_mode().from_tensor(tensor),
    "functional": functional,
    "functional inside": torch._to_functional_tensor,
    "inference": inferred,
    "sparse": Tensor.to_sparse,
    "sparse rows": Tensor.to_sparse_csr,
    "oneDNN": Tensor.to_mkldnn,
    "nested": lambda tensor: torch.nested.as_nested_tensor(tensor),
    "ragged": lambda tensor: torch.nested.as_nested_tensor(tensor, layout=torch.jagged),
}
"""A tensor as one of another kind, most of them without numbers at the address they give."""


def of_kind(kind: str, tensor: Tensor) -> Tensor:
    """Of plain tensors only: torch makes some kinds of others, but never ends.

    Nor of zero tensors: by itself torch crashes in the first operator on a subclass that holds one.
    """
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_nested
    is_plain = is_plain and not torch._is_functional_tensor(tensor) and not tensor.is_inference()
    is_plain = is_plain and not tensor._is_zerotensor()
    return KINDS[kind](tensor) if is_plain else tensor


def far_apart(tensor: Tensor) -> Tensor:
    """With strides far beyond its size."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    apart = tensor.new_zeros(tensor.shape[0] * 100_003 + tensor.numel())
    strides = (100_003, *tensor[0].contiguous().stride())
    return torch.as_strided(apart, tensor.shape, strides).copy_(tensor)


def with_one(tensor: Tensor, number: float, draw: random.Random) -> Tensor:
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return tensor
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    tensor.view(-1)[draw.randrange(tensor.numel())] = number
    return tensor


def places(value: Any, where: tuple = ()) -> Iterator[tuple]:
    """Where tensors are in arguments, caches included."""
    if isinstance(value, Tensor):
        yield where
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*where, key))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from places(part, (*where, i))


def changed(value: Any, where: tuple, change: Callable[[Any], Any]) -> Any:
    if not where:
        return change(value)
    key, *rest = where
    if isinstance(value, dict):
        return {**value, key: changed(value[key], tuple(rest), change)}
    parts = [changed(part, tuple(rest), change) if i == key else part for i, part in enumerate(value)]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def make_call(draw: random.Random) -> Call:
    kind = draw.choices((operation_call, block_call, model_call, cache_call), (10, 5, 1, 1))[0]
    call = kind(draw)
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
        if tensors and all(isinstance(t, FakeTensor) for t in tensors):
            call.around = fake_mode
    return call


def has_numbers(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def numbers(tensor: Tensor) -> Tensor:
    """What a tensor of any kind holds, as a plain one; zeros if that is nothing."""
    if not has_numbers(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, Wrapped):
        return numbers(tensor.held)
    if isinstance(tensor, DTensor):
        return numbers(tensor.full_tensor())
    if isinstance(tensor, FunctionalTensor):
        return numbers(tensor.elem)
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        return numbers(torch._from_functional_tensor(tensor))
    tensor = tensor.detach()
    return (tensor if tensor.layout == torch.strided else tensor.to_dense()).resolve_neg().contiguous()


def widened(value: Any) -> Any:
    """The same numbers as plain float64 tensors."""

    def widen(tensor: Tensor) -> Tensor:
        tensor = numbers(tensor)
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.double() if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, widen, value)


def fault(call: Call, backend: str, grad: bool) -> str | None:
    """What is wrong with how a call ends, or None."""
    try:
        with use_backend(backend), torch.set_grad_enabled(grad), call.around():
            result = call.run(**call.arguments)
            if grad:
                of = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
                torch.autograd.backward([t.float().sum() for t in of])
    except (ValueError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = last.filename.startswith(OURS) or "unexpected keyword" in str(error) or "required" in str(error)
        return None if ours else f"{type(error).__name__} of {last.filename}: {error}"
    except Exception as error:
        if "Inference tensors cannot be saved for backward" in str(error):
            return None  # what torch says of them in any operation, and there is another way to say so
        return f"{type(error).__name__}: {str(error)[:200]}"
    if call.oracle is None:
        return None
    given = widened([t for t in tree_leaves(call.arguments) if isinstance(t, Tensor)])
    if any(not t.isfinite().all() or t.abs().amax() > 100 for t in given if t.numel() and t.is_floating_point()):
        return None
    with use_backend("torch"), torch.no_grad():
        want = call.oracle(**widened(call.arguments))
    return difference(result, want)


def without_empty_slots(value: Any) -> Any:
    """What lies in slots of attention's cache that hold no token is nobody's: zero on both sides."""
    if isinstance(value, AttentionCache):
        t = torch.arange(value.k_btgp.shape[1])
        empty_bt11 = (t >= value.position_b[:, None])[..., None, None]
        return value._replace(
            k_btgp=value.k_btgp.masked_fill(empty_bt11, 0), v_btgp=value.v_btgp.masked_fill(empty_bt11, 0)
        )
    if isinstance(value, list | tuple):
        parts = [without_empty_slots(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def difference(result: Any, want: Any) -> str | None:
    result, want = without_empty_slots(result), without_empty_slots(want)
    dtypes = {t.dtype for t in tree_leaves(result) if isinstance(t, Tensor)}
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
        if not off <= tolerance and largest < torch.finfo(narrowest).max:
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
        command = [sys.executable, "-X", "faulthandler", __file__, f"--seed={seed}", f"--child={start}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, f"--calls={stop - start}"], capture_output=True, text=True, check=False, env=environment
        )
        lines = done.stdout.splitlines()
        faults += [line.removeprefix("FAULT ").replace("\\n", "\n") for line in lines if line.startswith("FAULT ")]
        if not done.returncode:
            break
        last = next((int(line.split()[1]) for line in reversed(lines) if line.startswith("CALL ")), stop)
        faults.append(f"{last}: ended with {done.returncode}\n{done.stderr[-2000:]}")
        start = last + 1
    return faults


def main(calls: int, seed: int, child: int | None = None, only: int | None = None) -> int:
    if only is not None:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        print(run_one(seed, only) or "as it should be")
        return 0
    if child is not None:
        for number in range(child, child + calls):
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            print("CALL", number, flush=True)
            wrong = run_one(seed, number)
            if wrong is not None:
                print("FAULT", number, wrong.replace("\n", "\\n"), flush=True)
        return 0
    faults = [f for start in range(0, calls, BATCH) for f in run_batch(seed, start, min(start + BATCH, calls))]
    print(*faults, f"{calls} calls, seed {seed}: {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat one call and print how it ends")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    sys.exit(main(**vars(parser.parse_args())))
