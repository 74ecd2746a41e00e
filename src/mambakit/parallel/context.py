"""Context parallelism: every rank has a share of each sequence, and blocks pass on what crosses its ends."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mambakit.arguments import check_flag, check_kind
from mambakit.blocks.block import Block
from mambakit.models.bidirectional import BidirectionalStack
from mambakit.models.class_tokens import ClassTokens
from mambakit.ops.boundary import Across, Boundary, all_gather
from mambakit.parallel.meshes import SummedGradients, group_of

Model = TypeVar("Model", bound=nn.Module)

_running = threading.local()

FLAGS = ("mask_bs", "reset_bs", "cu_seqlens", "cache")
"""What all ranks have to give, or none."""


def context_parallel(model: Model, mesh: Any, *, sum_gradients: bool = True) -> Model:
    """The same module, called by every rank of `mesh` with its own share of the sequences, in the order of the ranks.

    Shares are contiguous and of any lengths. Outputs are those of the share. `mask_bs` and `reset_bs` are the share's
    too; `cu_seqlens` is that of the whole sequence. The cache that goes in is the one before the whole sequence, and
    the one that comes out the one after it, on every rank. Gradients of parameters are those of the sum of all ranks'
    losses, on every rank; all ranks have to call `backward`. `sum_gradients=False` leaves that sum to DDP, if it is
    around the model and its group has this mesh in it; FSDP2 is noticed.

    ValueError for what looks across a sequence in other ways: stacks of two directions and class tokens.

    Examples:
        >>> import os, tempfile
        >>> store = f"file://{os.path.join(tempfile.mkdtemp(), 'store')}"
        >>> torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        >>> block = mk.Mamba3Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> model = mk.parallel.context_parallel(model, mesh)
        >>> logits_bsw, cache = model(torch.randint(256, (2, 100)))
        >>> torch.distributed.destroy_process_group()
    """
    group = group_of(mesh)
    check_kind("model", model, nn.Module, "a model")
    check_flag("sum_gradients", sum_gradients)
    check_model(model)
    calls = Calls(group, sum_gradients)
    model.register_forward_pre_hook(calls.begin, with_kwargs=True, prepend=True)
    model.register_forward_hook(calls.end, always_call=True)
    if hasattr(model, "step"):
        # One token has no shares.
        model.step = MethodType(step_of_whole, model)  # type: ignore[assignment]
    return model


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Inside, a context-parallel model takes what it is called with for whole sequences, on each rank by itself.

    For evaluation and generation, with other sequences on every rank if that is wanted.

    Examples:
        >>> with mk.parallel.whole_sequences():
        ...     pass  # logits_bsw, cache = model(ids_bs)
    """
    before, _running.whole = is_whole(), True
    try:
        yield
    finally:
        _running.whole = before


def is_whole() -> bool:
    return getattr(_running, "whole", False)


def splits_sequences(model: nn.Module) -> bool:
    """Whether calls of it, or of a module in it, take what they are given for a rank's share."""
    return not is_whole() and any(isinstance(hook, Calls) for module in model.modules() for hook in hooks_of(module))


def check_model(model: nn.Module) -> None:
    if any(isinstance(hook, Calls) for hook in hooks_of(model)):
        raise ValueError(f"this {type(model).__name__} is context parallel already")
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise ValueError(f"a {type(model).__name__} has no block whose sequences could be split")
    for module in model.modules():
        if isinstance(module, BidirectionalStack):
            raise ValueError("a BidirectionalStack reads sequences from both ends, which context parallelism does not")
        if isinstance(module, ClassTokens):
            raise ValueError("class tokens have places in a whole sequence, and context parallelism has shares of it")
        if isinstance(module, Block) and not module.splits:
            raise ValueError(f"{type(module).__name__} does not say how shares of a sequence go on from each other")


def hooks_of(model: nn.Module) -> list[Any]:
    return [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]


def step_of_whole(model: Any, *given: Any, **named: Any) -> Any:
    if not is_whole():
        raise ValueError(
            "step takes one token, which cannot be split among ranks; call it inside of whole_sequences(), or that "
            "of a model that is not context parallel"
        )
    return type(model).step(model, *given, **named)


class Calls:
    """What a model's calls are between: a boundary, and parameters whose gradients are summed."""

    def __init__(self, group: Any, sum_gradients: bool):
        self.group, self.sum_gradients = group, sum_gradients
        self.open: list[ExitStack] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Calls":
        return Calls(self.group, self.sum_gradients)

    def begin(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        stack = ExitStack()
        self.open.append(stack)
        if is_whole():
            return args, named
        edge = Boundary(self.group)
        named = self.checked(edge, args, named)
        if self.sum_gradients:
            stack.enter_context(SummedGradients(model, self.group))
        stack.enter_context(Across(edge))
        return args, named

    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.open.pop().close()

    def checked(self, edge: Boundary, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """That all ranks call alike; with `cu_seqlens` as this rank has it."""
        x = args[0] if args else next((x for name, x in named.items() if name not in FLAGS), None)
        if not isinstance(x, Tensor) or x.dim() < 2:
            raise ValueError("a context-parallel model is called with a tensor of batch and sequence first")
        given = {**dict.fromkeys(FLAGS), **named}
        given["cache"] = args[1] if len(args) > 1 else given["cache"]
        facts = [*x.shape[:2], int(torch.is_grad_enabled()), *(int(given[name] is not None) for name in FLAGS)]
        told_jX = all_gather(torch.tensor(facts, device=x.device), self.group).tolist()
        for name, at in (("rows", 0), ("gradients", 2), *((name, 3 + i) for i, name in enumerate(FLAGS))):
            found = [told[at] for told in told_jX]
            if len(set(found)) > 1:
                raise ValueError(f"the ranks differ in {name}: {found}; all have to call alike, but for their shares")
        cu_seqlens = given["cu_seqlens"]
        if cu_seqlens is None:
            return named
        shares = [told[1] for told in told_jX]
        if int(cu_seqlens[-1]) != sum(shares):
            raise ValueError(
                f"cu_seqlens ends at {int(cu_seqlens[-1])}, and the ranks' shares have {sum(shares)} tokens in all; "
                "give that of the whole sequence"
            )
        first = sum(shares[: edge.rank])
        return {**named, "cu_seqlens": (cu_seqlens - first).clamp(0, x.shape[1])}
