"""A model of vectors: projection, stack, norm, projection."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from mambakit.blocks.block import Options, check_flags, check_projected
from mambakit.blocks.config import check_positive
from mambakit.models.class_tokens import (
    ClassCache,
    ClassTokens,
    Cursor,
    Marker,
    batch_with_cursors,
    check_markers,
    check_one_sequence,
    check_step_without_cursors,
    length_after,
    plan_levels,
)
from mambakit.models.flow import Flow
from mambakit.models.layer import make_norm
from mambakit.models.stack import Stack, StackCache, StackConfig
from mambakit.ops.shapes import check_dense
from mambakit.ops.ssd_path import SsdPath


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig(StackConfig):
    """A stack, and the widths of the vectors that go in and come out.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> config = mk.LatentConfig(block=block, n_layer=2, d_input=3, d_output=1)
    """

    d_input: int
    d_output: int
    final_norm: bool = True
    class_tokens: tuple[Marker, ...] = ()
    """Markers of learned input rows; see `class_tokens.py`."""

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        check_positive(self, "d_input", "d_output")
        check_markers("class_tokens", self.class_tokens)


class LatentModel(nn.Module):
    """Vectors to vectors: `y_bsO, cache = model(x_bsI, cache)`, with the contract of a block.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LatentModel(mk.LatentConfig(block=block, n_layer=2, d_input=3, d_output=1))
        >>> y_bs1, cache = model(torch.randn(2, 100, 3))
        >>> y_bs1.shape
        torch.Size([2, 100, 1])
    """

    def __init__(self, config: LatentConfig, *, device: Any = None, dtype: Any = None, **options: Any):
        """`options`, `grad_horizon` and `checkpoint_layers`, are the stack's."""
        super().__init__()
        self.config = config
        made = {"device": device, "dtype": dtype}
        d_model = config.d_model
        self.in_proj = nn.Linear(config.d_input, d_model, **made)
        self.stack = Stack(config, **options, **made)
        self.norm_f = make_norm(d_model, config.rms_norm, config.norm_eps, **made) if config.final_norm else None
        self.out_proj = nn.Linear(d_model, config.d_output, **made)
        self.class_tokens = ClassTokens(config.class_tokens, config.d_input, **made) if config.class_tokens else None

    def fresh_cache(self, batch: int, length: int | None = None) -> StackCache:
        """Nothing seen yet. `length` is that of the sequence to come, where class tokens need to know it."""
        if self.class_tokens is None:
            return self.stack.fresh_cache(batch, length)
        inner = self.stack.fresh_cache(batch, length_after(self.config.class_tokens, length))
        return ClassCache(inner, (Cursor(0, length),))

    def forward(
        self, x_bsI: Tensor, cache: StackCache | None = None, **options: Unpack[Options]
    ) -> tuple[Tensor, StackCache]:
        """Outputs of tokens and class rows, and the cache; the options are a stack's.

        With a cache from `fresh_cache`, the sequence continues where it stands; without one, `x_bsI` is all of it.
        """
        self.check_input(x_bsI, 3)
        with SsdPath.of(options.get("path")).around():
            if self.class_tokens is not None:
                return self.advance(x_bsI, cache, options)
            x_bsd, after = self.stack(self.in_proj(x_bsI), cache, **options)
            return self.out(x_bsd), after

    def step(self, x_bI: Tensor, cache: StackCache | None = None) -> tuple[Tensor, StackCache]:
        """One token. With a cursor also the rows around it; the output is that of the last of them."""
        self.check_input(x_bI, 2)
        if self.class_tokens is not None:
            if isinstance(cache, ClassCache):
                y_bsO, after = self(x_bI[:, None], cache)
                return y_bsO[:, -1], after
            check_step_without_cursors(self.class_tokens)
        x_bd, cache = self.stack.step(self.in_proj(x_bI), cache)
        return self.out(x_bd), cache

    def step_infinite(self, x_bI: Tensor) -> Tensor:
        """What `step` converges to when the same token comes for ever; Mamba-3 only."""
        self.check_input(x_bI, 2)
        return self.out(self.stack.step_infinite(self.in_proj(x_bI)))

    def prime(self, cache: StackCache) -> tuple[Tensor | None, StackCache]:
        """Let the rows through that the next token would be preceded by. The last output, or None if there are none."""
        if self.class_tokens is None:
            x_bd, cache = self.stack.prime(cache)
            return None if x_bd is None else self.out(x_bd), cache
        none_b0I = self.in_proj.weight.new_zeros(batch_with_cursors(cache), 0, self.config.d_input)
        y_bsO, cache = self.advance(none_b0I, cache, {}, prime=True)
        return (y_bsO[:, -1] if y_bsO.shape[1] else None), cache

    def advance(
        self, x_bsI: Tensor, cache: StackCache | None, options: Options, prime: bool = False
    ) -> tuple[Tensor, StackCache]:
        """`forward` with class tokens; with `prime` only the rows before the next token, and no token."""
        assert self.class_tokens is not None
        check_one_sequence(options)
        mask_bs = options.get("mask_bs")
        if mask_bs is not None:
            check_flags("mask_bs", mask_bs, x_bsI)
        inner, splices, cursors = plan_levels([(0, self.class_tokens)], cache, x_bsI.shape[1], prime)
        flow = Flow(x_bsI, mask_bs).insert(splices[0][0])
        options = {**options, "mask_bs": flow.mask_bs}
        x_bsd, inner = self.stack.advance(self.in_proj(flow.x), inner, options, prime)
        return self.out(x_bsd), inner if cursors is None else ClassCache(inner, cursors)

    def out(self, x: Tensor) -> Tensor:
        # Without a norm, the residual may still be wider than the layers.
        x = x.to(self.out_proj.weight.dtype) if self.norm_f is None else self.norm_f(x)
        return self.out_proj(x)

    def check_input(self, x: Tensor, axes: int) -> None:
        check_dense("x", x)
        if not isinstance(x, Tensor) or x.dim() != axes or x.shape[-1] != self.config.d_input:
            wanted = "batch, sequence" if axes == 3 else "batch"
            given = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            raise ValueError(f"x {given}, expected ({wanted}, d_input = {self.config.d_input})")
        check_projected(self, "x", x)
