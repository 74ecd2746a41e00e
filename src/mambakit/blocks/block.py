"""The one state contract: how masks, resets and packing reach a block, for all families alike.

Absent tokens behave as if they had been deleted. Present ones are gathered into rows filled up on the right, one per
batch entry or per packed sequence, and their outputs scattered back. On the right, a step size of zero is all padding
needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from mambakit.arguments import shown
from mambakit.blocks.config import BlockConfig
from mambakit.blocks.modules import Linear, is_plain
from mambakit.blocks.param_groups import param_groups
from mambakit.blocks.words import check_known
from mambakit.ops.backends import PLAIN_TENSORS
from mambakit.ops.boundary import boundary
from mambakit.ops.shapes import (
    FLOATS,
    INTEGERS,
    check_beside,
    check_boolean,
    check_dense,
    check_readable,
    check_tensors,
    is_autocast,
)
from mambakit.ops.ssd_path import SsdPath

Config = TypeVar("Config", bound=BlockConfig)
Cache = TypeVar("Cache", bound=tuple[Any, ...])


class Options(TypedDict, total=False):
    """What blocks, layers, stacks and models take by name in `forward`, and hand down; see `Block.forward`."""

    path: SsdPath | None
    mask_bs: Tensor | None
    reset_bs: Tensor | None
    cu_seqlens: Tensor | None


OPTIONS = frozenset(Options.__annotations__)


class Block(nn.Module, ABC, Generic[Config, Cache]):
    """What all families say in the same words: how a block is made and called. What it computes is its `run`."""

    config_class: type[Any]
    cache_class: type[Any]
    entry = "in_proj"
    """The module or parameter that meets the input first."""
    splits = False
    """Whether `run` knows of a `boundary()`: tokens may be shares of sequences that other ranks go on with."""
    leans = False
    """Whether heads meet in `in_proj`, `out_proj` and `outer_norm` alone, so that `SsdPath(lean=...)` can run it."""
    lines_per_head = False
    """Whether B and C are every head's own."""
    restarts = False
    """Whether `run` takes rows that start afresh before the only token, and need not have their cache changed."""
    config: Config

    def __init__(self, config: Config | None = None, **fields: Any):
        super().__init__()
        wanted = f"{type(self).__name__} takes a {self.config_class.__name__}, or its fields as keywords"
        if config is None and not fields:
            raise ValueError(f"{wanted}, got neither")
        if config is not None and fields:
            raise ValueError(f"{wanted}, and got both: {', '.join(fields)} beside a config")
        if config is not None and not isinstance(config, self.config_class):
            advice = f"; write {type(self).__name__}(d_model={config})" if isinstance(config, int) else ""
            raise ValueError(f"{wanted}, got {type(config).__name__}{advice}")
        self.config = self.config_class.from_dict(fields) if config is None else config

    @property
    def d_model(self) -> int:
        return self.config.d_model

    @property
    def state_rank(self) -> int:
        return self.config.state_rank  # type: ignore[attr-defined]  # where a family has one

    @property
    def outer_norm(self) -> nn.Module | None:
        """The norm of all heads together, last before the output projection, where there is one and nothing beside."""
        return None

    @abstractmethod
    def fresh_cache(self, batch: int) -> Cache:
        """Nothing seen yet; the state is the learned one where there is one."""

    @abstractmethod
    def cache_shapes(self, batch: int) -> dict[str, tuple[Any, ...]]:
        """Of a cache's floating-point tensors, by field; None for an axis of any length."""

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """In the dtype and on the device of a parameter, and a plain tensor even where that is a share of one."""
        check_batch(shape[0])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def learned(self, name: str, batch: int) -> Tensor:
        """A parameter for each row."""
        parameter = getattr(self, name)
        check_batch(batch)
        if hasattr(parameter, "full_tensor"):
            raise ValueError(f"{name} is a share of a parameter until the block runs; call it without a cache")
        return parameter.expand(batch, *parameter.shape)

    @abstractmethod
    def run(
        self, x_bsd: Tensor, cache: Cache, path: SsdPath, segments_bs: Tensor | None, lengths_b: Tensor | None
    ) -> tuple[Tensor, Cache]:
        """The whole block on rows filled up on the right: `lengths_b` counts their tokens (None: all are).

        `segments_bs` starts afresh at every new id; the cache belongs to the first token's. One that `restarts` takes a
        sixth argument, `fresh_b`: rows that start afresh before the only token.
        """

    def forward(
        self,
        x_bsd: Tensor,
        cache: Cache | None = None,
        *,
        path: SsdPath | None = None,
        mask_bs: Tensor | None = None,
        reset_bs: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        """Outputs and the cache after the last token; see docs/blocks.md.

        Only tokens that `mask_bs` says are there count. `reset_bs` starts afresh before a token; `cu_seqlens` packs
        sequences into a batch of one, and the cache then has a row for each.
        """
        check_input(self, x_bsd)
        path = SsdPath.of(path)
        b, s, _ = x_bsd.shape
        rows = b if cu_seqlens is None else check_packing(cu_seqlens, x_bsd)
        if cache is None:
            cache = self.fresh_cache(rows)
        else:
            self.check_cache(cache, rows, x_bsd)
        edge, ids_bs = boundary(), None
        if reset_bs is not None:
            check_flags("reset_bs", reset_bs, x_bsd)
            ids_bs = reset_bs.bool().cumsum(1)
        config = self.config
        x_bsd = x_bsd if config.in_scale == 1 else x_bsd * config.in_scale
        if mask_bs is None and cu_seqlens is None:
            if edge is not None:
                length_b = torch.full((b,), s, device=x_bsd.device)
                edge.learn(length_b, ids_bs, ids_bs[:, 0] > 0 if ids_bs is not None and s else None)
            fresh: tuple[Tensor, ...] = ()
            if edge is None and ids_bs is not None and s:
                fresh_b = ids_bs[:, 0] > 0
                if s == 1 and self.restarts:
                    fresh = (fresh_b,)
                else:
                    cache = self.restarted(cache, fresh_b)
                # The cache is now that of the first token, which may be all there is: an ordinary step.
                ids_bs = None if s == 1 else ids_bs
            with path.around():
                if path.lean is not None and not fresh and self.can_be_lean(x_bsd):
                    y_bsd, cache = lean(self, x_bsd, cache, path.inside, ids_bs, None)
                else:
                    y_bsd, cache = self.run(x_bsd, cache, path.inside, ids_bs, None, *fresh)
            return (y_bsd if config.out_scale == 1 else y_bsd * config.out_scale), cache

        if mask_bs is not None:
            check_flags("mask_bs", mask_bs, x_bsd)
        layout = lay_out(mask_bs, cu_seqlens, b, s, rows, x_bsd.device)
        segments = entering = leaving = None
        if ids_bs is not None:
            segments, entering, leaving = layout.resets(ids_bs)
        if edge is not None:
            edge.learn(layout.lengths_r, segments, entering, leaving)
        elif entering is not None:
            cache = self.restarted(cache, entering)
        with path.around():
            laid_out = (layout.gather(x_bsd), cache, path.inside, segments, layout.lengths_r)
            is_lean = path.lean is not None and self.can_be_lean(x_bsd)
            y_rld, cache = lean(self, *laid_out) if is_lean else self.run(*laid_out)
        if leaving is not None and edge is None:
            cache = self.restarted(cache, leaving)
        y_rld = y_rld if config.out_scale == 1 else y_rld * config.out_scale
        return layout.scatter(y_rld, b, s), cache

    def can_be_lean(self, x_bsd: Tensor) -> bool:
        """Whether there is something to go back through in little memory."""
        if not self.leans or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        return x_bsd.numel() > 0 and (x_bsd.requires_grad or any(p.requires_grad for p in self.parameters()))

    def step(self, x_bd: Tensor, cache: Cache | None = None, *, reset_b: Tensor | None = None) -> tuple[Tensor, Cache]:
        """One token; rows of `reset_b` start afresh before it."""
        check_token(self, x_bd)
        y_bsd, after = self(x_bd[:, None], cache, **resets(reset_b, x_bd))
        return y_bsd[:, 0], after

    def restarted(self, cache: Cache, fresh_b: Tensor) -> Cache:
        """`cache` with the rows of `fresh_b` as a fresh cache has them."""
        rows = seen(fresh_b)
        if rows == []:
            return cache
        new = self.fresh_cache(1)
        return type(cache)(
            *(
                replaced(old, fresh.to(old.dtype), fresh_b, rows) if isinstance(old, Tensor) else old
                for fresh, old in zip(new, cache, strict=True)
            )
        )

    def check_cache(self, cache: Any, rows: int, x_bsd: Tensor) -> None:
        """ValueError unless it is a cache of this block for so many rows, beside such an input."""
        check_cache(self, cache, rows, x_bsd)

    def param_groups(self, *, weight_decay: float = 0.1, muon: bool = False) -> list[dict[str, Any]]:
        """Groups of parameters for optimizers; see `blocks/param_groups.py`."""
        return param_groups(self, weight_decay=weight_decay, muon=muon)


def lean(block: Block[Any, Cache], *call: Any) -> tuple[Tensor, Cache]:
    """`block.run(*call)` in little memory."""
    # Not above: it has to know families, which have to know blocks.
    from mambakit.blocks.lean import run_lean

    return run_lean(block, *call)


class Layout(NamedTuple):
    """Where the tokens of a batch lie in rows of length `l`, and the way back."""

    take_rl: Tensor
    """Flat index of the token in each slot; slots beyond a row's length repeat its last token."""
    lengths_r: Tensor
    back_n: Tensor
    """Flat slot of every token."""
    present_n: Tensor
    last_n: Tensor
    """Flat index of the last token, present or not, that belongs to each row; -1 for a row without any."""

    def gather(self, x_bsd: Tensor) -> Tensor:
        """Rows of present tokens, zero in the slots beyond."""
        rows, slots = self.take_rl.shape
        x_rld = x_bsd.flatten(0, 1)[self.take_rl.flatten()].unflatten(0, (rows, slots))
        beyond_rl = torch.arange(slots, device=x_bsd.device) >= self.lengths_r[:, None]
        return x_rld.masked_fill(beyond_rl[..., None], 0)

    def scatter(self, y_rld: Tensor, b: int, s: int) -> Tensor:
        """Outputs at the places of their tokens, zero at absent ones."""
        if y_rld.shape[1] == 0:
            # Not fresh zeros: these have a gradient, if a zero one.
            return torch.nn.functional.pad(y_rld.flatten(0, 1), (0, 0, 0, b * s)).unflatten(0, (b, s))
        y_nd = y_rld.flatten(0, 1)[self.back_n].masked_fill(~self.present_n[:, None], 0)
        return y_nd.unflatten(0, (b, s))

    def resets(self, ids_bs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Segment ids by slot, which rows lose the state that enters them, and which the one that leaves them."""
        ids_n = ids_bs.flatten()
        segments_rl = ids_n[self.take_rl]
        # A zero before the ids, for rows without any.
        end_r = torch.nn.functional.pad(ids_n, (1, 0))[self.last_n + 1]
        if segments_rl.shape[1] == 0:
            return segments_rl, end_r > 0, torch.zeros_like(end_r, dtype=torch.bool)
        filled_r = self.lengths_r > 0
        first_r = torch.where(filled_r, segments_rl[:, 0], end_r)
        last_r = torch.where(filled_r, segments_rl[:, -1], end_r)
        return segments_rl, first_r > 0, end_r > last_r


def lay_out(
    mask_bs: Tensor | None, cu_seqlens: Tensor | None, b: int, s: int, rows: int, device: torch.device
) -> Layout:
    if device.type == "meta":
        raise ValueError("where tokens lie in masked or packed rows is read from numbers, and there are none on meta")
    count = b * s
    tokens_n = torch.arange(count, device=device)
    present_n = torch.ones(count, dtype=torch.bool, device=device) if mask_bs is None else mask_bs.flatten().bool()
    if cu_seqlens is None:
        ends_r = s * torch.arange(1, rows + 1, device=device)
    else:
        ends_r = cu_seqlens[1:].to(device=device, dtype=torch.int64)
    row_n = torch.searchsorted(ends_r, tokens_n, right=True)
    lengths_r = torch.zeros(rows, dtype=torch.int64, device=device).index_add_(0, row_n, present_n.long())
    slot_n = present_n.cumsum(0) - 1 - (lengths_r.cumsum(0) - lengths_r)[row_n]
    slots = int(lengths_r.max()) if rows else 0
    back_n = row_n * slots + slot_n.clamp(min=0)
    take_rl = torch.zeros(rows * slots, dtype=torch.int64, device=device)
    take_rl[back_n[present_n]] = tokens_n[present_n]
    take_rl = take_rl.unflatten(0, (rows, slots)) if rows * slots else take_rl.reshape(rows, slots)
    nearest_rl = torch.arange(slots, device=device).minimum((lengths_r[:, None] - 1).clamp(min=0))
    starts_r = torch.nn.functional.pad(ends_r[:-1], (1, 0))
    last_n = torch.where(ends_r > starts_r, ends_r - 1, -1)
    return Layout(take_rl.gather(1, nearest_rl), lengths_r, back_n, present_n, last_n)


def hide_padding(dt_bsX: Tensor, lengths_b: Tensor | None) -> Tensor:
    """Zero step sizes beyond each row's length: no decay, no write, no turn."""
    if lengths_b is None:
        return dt_bsX
    beyond_bs = torch.arange(dt_bsX.shape[1], device=dt_bsX.device) >= lengths_b[:, None]
    return dt_bsX.masked_fill(beyond_bs[..., None], 0)


def check_batch(batch: Any) -> None:
    if not torch.compiler.is_compiling() and (type(batch) is not int or not 0 <= batch < 2**63):
        raise ValueError(f"batch is {shown(batch)}, expected a whole number of at least 0")


def check_input(block: Any, x_bsd: Tensor) -> None:
    check_dense("x_bsd", x_bsd)
    if not isinstance(x_bsd, Tensor) or x_bsd.dim() != 3:
        given = tuple(x_bsd.shape) if isinstance(x_bsd, Tensor) else type(x_bsd).__name__
        raise ValueError(f"x_bsd needs 3 axes (batch, sequence, d_model = {block.d_model}), got {given}")
    check_width(block, "x_bsd", x_bsd)


def check_width(block: Any, name: str, x: Tensor) -> None:
    if x.shape[-1] != block.d_model:
        raise ValueError(f"{name} is {x.shape[-1]} wide, but this block's d_model is {block.d_model}")
    check_projected(block, name, x)


def check_projected(module: nn.Module, name: str, x: Tensor) -> None:
    """That `x` can enter the first projection; an adapter or a quantized one says for itself what it takes."""
    weight = entry_weight(module)
    if x.dtype not in FLOATS or (weight is not None and x.dtype != weight.dtype and not casts(x, weight)):
        wanted = next((m.weight.dtype for m in module.modules() if isinstance(m, nn.Linear)), torch.float32)
        raise ValueError(f"{name} is {x.dtype}, expected {wanted}, as the projections are; cast one of them")
    if weight is not None:
        check_beside("the projection's weight", weight, name, x)


def entry_weight(module: nn.Module) -> Tensor | None:
    """The weight that meets the input first, where that is all that meets it."""
    first: Any = getattr(module, getattr(module, "entry", "in_proj"), None)
    if isinstance(first, nn.Module) and (is_plain(first, Linear) or is_plain(first, nn.Linear)):
        return first.weight
    return first if isinstance(first, Tensor) else None


def casts(*tensors: Tensor) -> bool:
    """Whether autocast brings these to one dtype: all but float64."""
    return is_autocast(tensors[0].device) and all(tensor.dtype != torch.float64 for tensor in tensors)


def check_token(block: Any, x_bd: Tensor) -> None:
    check_dense("x_bd", x_bd)
    if not isinstance(x_bd, Tensor) or x_bd.dim() != 2:
        given = tuple(x_bd.shape) if isinstance(x_bd, Tensor) else type(x_bd).__name__
        raise ValueError(f"step takes one token, x_bd of 2 axes (batch, d_model = {block.d_model}), got {given}")
    weight = entry_weight(block)
    if weight is None or type(weight) in PLAIN_TENSORS:
        # A share of a weight is whole, and what comes to it of its dtype, only inside of a call.
        check_width(block, "x_bd", x_bd)


def resets(reset_b: Tensor | None, x_b: Tensor) -> Options:
    """Which rows start afresh before one token, as `forward` takes it."""
    if reset_b is None:
        return {}
    check_dense("reset_b", reset_b)
    if not isinstance(reset_b, Tensor) or tuple(reset_b.shape) != (len(x_b),):
        given = tuple(reset_b.shape) if isinstance(reset_b, Tensor) else type(reset_b).__name__
        raise ValueError(f"reset_b needs 1 axis (batch = {len(x_b)}), got {given}")
    check_boolean("reset_b", reset_b)
    return {"reset_bs": reset_b[:, None]}


def seen(flags_b: Tensor) -> list[int] | None:
    """Which are set; None unless looking costs nothing: no device to wait for, no compiler or gradient to mislead."""
    if not flags_b.is_cpu or type(flags_b) is not Tensor or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    return None if torch._C._are_functorch_transforms_active() else flags_b.nonzero()[:, 0].tolist()


def replaced(old: Tensor, fresh: Tensor, flags_b: Tensor, rows: list[int] | None) -> Tensor:
    """`old` with `fresh`, a batch of one, in the flagged rows. Where these are known, copies are all it takes."""
    if rows is None:
        return torch.where(flags_b.view(-1, *[1] * (old.dim() - 1)), fresh, old)
    changed = old.clone()
    for row in rows:
        changed[row] = fresh[0]
    return changed


def check_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """That what is to be handed down to blocks is what they know."""
    if any(name not in OPTIONS for name in options):
        check_known(f"{type(module).__name__}.forward() got an unexpected keyword argument", options, OPTIONS)


def check_cache(block: Block, cache: Any, rows: int, x_bsd: Tensor) -> None:
    device, double, kind = x_bsd.device, x_bsd.dtype == torch.float64, block.cache_class
    if not isinstance(cache, kind):
        given = type(cache).__name__
        raise ValueError(f"{type(block).__name__} needs a {kind.__name__}, got {given}; fresh_cache() makes one")
    for name, shape in block.cache_shapes(rows).items():
        tensor = getattr(cache, name)
        if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
            given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"cache.{name} is {given}, expected a floating-point tensor")
        check_dense(f"cache.{name}", tensor)
        if tensor.dim() != len(shape) or any(n not in (None, m) for m, n in zip(tensor.shape, shape, strict=True)):
            expected = f"({', '.join('any' if n is None else str(n) for n in shape)})"
            raise ValueError(f"cache.{name} has shape {tuple(tensor.shape)}, expected {expected} for {rows} rows")
        if tensor.device != device:
            raise ValueError(f"cache.{name} is on {tensor.device} but x_bsd on {device}; move it with caches.to()")
        if (tensor.dtype == torch.float64) != double:
            raise ValueError(f"cache.{name} is {tensor.dtype} but x_bsd {x_bsd.dtype}; use float64 for both or neither")
        check_beside("x_bsd", x_bsd, f"cache.{name}", tensor)


def check_flags(name: str, flags_bs: Tensor, x_bsd: Tensor) -> None:
    check_tensors({name: flags_bs})
    if tuple(flags_bs.shape) != tuple(x_bsd.shape[:2]):
        raise ValueError(f"{name} has shape {tuple(flags_bs.shape)}, expected {tuple(x_bsd.shape[:2])} as x_bsd has")
    check_boolean(name, flags_bs)
    check_beside("x_bsd", x_bsd, name, flags_bs)


def check_packing(cu_seqlens: Tensor, x_bsd: Tensor) -> int:
    """The number of packed sequences."""
    if x_bsd.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs sequences into a batch of one, got a batch of {x_bsd.shape[0]}")
    check_readable("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in INTEGERS:
        raise ValueError(
            "cu_seqlens has to be a vector of integers such as [0, 3, 7], "
            f"got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != x_bsd.shape[1]:
        raise ValueError(f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}, expected 0 to {x_bsd.shape[1]} tokens")
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise ValueError(f"cu_seqlens falls from {start} to {stop} at sequence {i}; bounds must not decrease")
    return len(bounds) - 1
