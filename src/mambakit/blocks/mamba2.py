"""Mamba-2: its config, its cache, its block, its record."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.blocks import block as rows
from mambakit.blocks.config import BlockConfig, check_divides, check_positive, check_range, check_types, expanded, fits
from mambakit.blocks.family import Family, FusedStep, head_notes, register, ssd_flops
from mambakit.blocks.modules import (
    CausalConv1d,
    GatedRMSNorm,
    Linear,
    convolve_silu,
    init_dt_bias,
    is_plain,
    mark,
)
from mambakit.blocks.shares import Part, Shares, SummedGatedRMSNorm, along, grouped, groups_of, run, shared
from mambakit.ops.activations import step_size
from mambakit.ops.boundary import boundary, linked, own_writes, pass_state
from mambakit.ops.fused_step import MAMBA2_STEP, is_step, take_step
from mambakit.ops.norm import finish
from mambakit.ops.shapes import cast
from mambakit.ops.ssd import learned_start, scan
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.team import Team

PARTS = ("z", "x", "B", "C", "dt")
"""Of `in_proj`'s output, in the order of `ssm_multipliers`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config(BlockConfig):
    """The sizes and choices of a Mamba-2 block; the defaults are the official ones.

    Examples:
        >>> config = mk.Mamba2Config(d_model=64, per_head_dim=16, state_rank=32)
        >>> config.nheads
        8
    """

    d_model: int
    expand: float = 2
    d_inner: int | None = None
    """How many inner channels there are (None: `expand * d_model`)."""
    state_rank: int = 128
    per_head_dim: int = 64
    ngroups: int = 1
    conv_kernel: int = 4
    d_ssm: int | None = None
    """How many of the inner channels go through the state space (None: all); the others are a gated MLP."""
    A_init_range: tuple[float, float] = (1, 16)
    D_has_hdim: bool = False
    """A skip weight per channel instead of per head."""
    rmsnorm: bool = True
    norm_before_gate: bool = False
    norm_group_size: int | None = None
    """Channels that share a root mean square (None: those of a group, `d_ssm / ngroups`)."""
    norm_eps: float = 1e-5
    """Of the gated norm."""
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    dt_limit: tuple[float, float] = (0.0, math.inf)
    conv_bias: bool = True
    bias: bool = False
    learnable_init_states: bool = False
    ssm_multipliers: tuple[float, float, float, float, float] | None = None
    """What z, x, B, C and dt, as `in_proj` gives them, are multiplied by (None: nothing). Not channels beyond d_ssm."""

    def __post_init__(self) -> None:
        # A wrong number of them is said in the words below.
        check_types(self, "ssm_multipliers")
        sizes = ("d_model", "expand", "state_rank", "per_head_dim", "ngroups", "conv_kernel")
        check_positive(self, *sizes)
        if not self.inner_width > 0:
            raise ValueError(f"d_inner = {self.inner_width} has to be positive")
        check_positive(self, "ssm_width", "norm_width", "norm_eps", "dt_min", "dt_init_floor")
        if self.ssm_width > self.inner_width:
            raise ValueError(f"d_ssm = {self.d_ssm} is above d_inner = {self.inner_width}")
        check_divides("per_head_dim", self.per_head_dim, "d_inner" if self.d_ssm is None else "d_ssm", self.ssm_width)
        check_divides("ngroups", self.ngroups, "nheads", self.nheads)
        check_divides("norm_group_size", self.norm_width, "d_ssm", self.ssm_width)
        if (
            not fits(self.multipliers, tuple[float, ...])
            or len(self.multipliers) != 5
            or not all(map(math.isfinite, self.multipliers))
        ):
            raise ValueError(f"ssm_multipliers = {self.multipliers} have to be five numbers, for z, x, B, C and dt")
        check_range("A_init_range", self.A_init_range, positive=True)
        check_range("dt_limit", self.dt_limit)
        check_range("(dt_min, dt_max)", (self.dt_min, self.dt_max), positive=True)

    @property
    def inner_width(self) -> int:
        """`d_inner` as a number."""
        return expanded(self) if self.d_inner is None else self.d_inner

    @property
    def ssm_width(self) -> int:
        """`d_ssm` as a number."""
        return self.inner_width if self.d_ssm is None else self.d_ssm

    @property
    def nheads(self) -> int:
        return self.ssm_width // self.per_head_dim

    @property
    def conv_dim(self) -> int:
        return self.ssm_width + 2 * self.ngroups * self.state_rank

    @property
    def norm_width(self) -> int:
        """`norm_group_size` as a number."""
        return self.norm_group_size or self.ssm_width // self.ngroups

    @property
    def multipliers(self) -> tuple[float, ...]:
        """`ssm_multipliers` as numbers."""
        return (1.0,) * 5 if self.ssm_multipliers is None else self.ssm_multipliers


class Mamba2Cache(NamedTuple):
    """What Mamba-2 carries from one call to the next.

    Examples:
        >>> cache = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16)).fresh_cache(batch=2)
        >>> cache.ssm_bhpr.shape
        torch.Size([2, 8, 16, 128])
    """

    conv_bvk: Tensor
    """The last inputs of the convolution, newest last."""
    ssm_bhpr: Tensor


class Mamba2(rows.Block[Mamba2Config, Mamba2Cache]):
    """A Mamba-2 block; call it as `y_bsd, cache = block(x_bsd, cache)`.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> x_bsd = torch.randn(1, 100, 64)
        >>> y_bsd, _ = block(x_bsd)
        >>> first_bsd, cache = block(x_bsd[:, :60])  # cut anywhere
        >>> second_bsd, _ = block(x_bsd[:, 60:], cache)
        >>> torch.allclose(y_bsd, torch.cat([first_bsd, second_bsd], 1), atol=1e-5)
        True
    """

    config_class, cache_class, splits = Mamba2Config, Mamba2Cache, True
    restarts = leans = True

    def __init__(self, config: Mamba2Config | None = None, *, device: Any = None, dtype: Any = None, **fields: Any):
        super().__init__(config, **fields)
        config = self.config
        made = {"device": device, "dtype": dtype}
        wide = {"device": device, "dtype": torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)}
        h, p, v = config.nheads, config.per_head_dim, config.conv_dim
        groups = 2 * config.ngroups * config.state_rank
        self.in_proj = Linear(config.d_model, 2 * config.inner_width + groups + h, bias=config.bias, **made)
        self.conv1d = CausalConv1d(v, v, config.conv_kernel, groups=v, bias=config.conv_bias, **made)
        self.dt_bias = mark(nn.Parameter(torch.empty(h, **wide)), keep_init=True)
        self.A_log = mark(nn.Parameter(torch.empty(h, **wide)))
        self.D = mark(nn.Parameter(torch.empty(h * p if config.D_has_hdim else h, **wide)))
        if config.rmsnorm:
            norm = (config.norm_width, config.norm_before_gate, config.norm_eps)
            self.norm = GatedRMSNorm(config.ssm_width, *norm, **made)
        self.out_proj = Linear(config.inner_width, config.d_model, bias=config.bias, **made)
        if config.learnable_init_states:
            self.init_states = mark(nn.Parameter(torch.empty(h, p, config.state_rank, **wide)))
        self.reset_parameters()

    @property
    def per_head_dim(self) -> int:
        return self.config.per_head_dim

    @property
    def outer_norm(self) -> GatedRMSNorm | None:
        config = self.config
        is_whole = config.rmsnorm and not config.norm_before_gate and config.norm_width == config.inner_width
        return self.norm if is_whole else None

    def reset_parameters(self) -> None:
        """The official initialisation, projections included."""
        config = self.config
        for layer in (self.in_proj, self.conv1d, self.out_proj):
            layer.reset_parameters()
        if config.rmsnorm:
            self.norm.reset_parameters()
        init_dt_bias(self.dt_bias, config.dt_min, config.dt_max, config.dt_init_floor)
        with torch.no_grad():
            self.A_log.uniform_(*config.A_init_range).log_()
        nn.init.ones_(self.D)
        if config.learnable_init_states:
            nn.init.zeros_(self.init_states)

    @property
    def independent_maps(self) -> dict[str, dict[str, int]]:
        """The maps that each projection stacks, with their rows in order."""
        config = self.config
        width, mlp, gr = config.ssm_width, config.inner_width - config.ssm_width, config.ngroups * config.state_rank
        return {
            "in_proj": {"z0": mlp, "x0": mlp, "z": width, "x": width, "B": gr, "C": gr, "dt": config.nheads},
            "out_proj": {"y": config.d_model},
        }

    def cache_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        config = self.config
        return {
            "conv_bvk": (batch, config.conv_dim, config.conv_kernel),
            "ssm_bhpr": (batch, config.nheads, config.per_head_dim, config.state_rank),
        }

    def fresh_cache(self, batch: int) -> Mamba2Cache:
        """Nothing seen yet; the state is the learned one where there is one."""
        shapes = self.cache_shapes(batch)
        window_bvk = self.zeros(shapes["conv_bvk"], like=self.conv1d.weight)
        if self.config.learnable_init_states:
            return Mamba2Cache(window_bvk, self.learned("init_states", batch))
        return Mamba2Cache(window_bvk, self.zeros(shapes["ssm_bhpr"], like=self.D))

    def run(
        self,
        x_bsd: Tensor,
        cache: Mamba2Cache,
        path: SsdPath,
        segments_bs: Tensor | None,
        lengths_b: Tensor | None,
        fresh_b: Tensor | None = None,
    ) -> tuple[Tensor, Mamba2Cache]:
        config = self.config
        width, mlp, gr = config.ssm_width, config.inner_width - config.ssm_width, config.ngroups * config.state_rank
        projected_bsX = self.multiply(self.in_proj(x_bsd))
        edge = boundary()
        if edge is None and is_step(projected_bsX, segments_bs, lengths_b, self.parameters()):
            fused = self.fused_step(projected_bsX, cache, fresh_b)
            if fused is not None:
                return fused
        if fresh_b is not None:
            cache = self.restarted(cache, fresh_b)
        z_mlp, x_mlp, z_bsi, xbc_bsv, dt_bsh = projected_bsX.split(
            (mlp, mlp, width, config.conv_dim, config.nheads), dim=-1
        )
        (x_bsi, b_bsG, c_bsG), window_bvk = convolve_silu(
            self.conv1d, xbc_bsv, cache.conv_bvk, [width, gr, gr], segments_bs, lengths_b
        )
        b, s, _ = x_bsi.shape
        x_bsmhp = x_bsi.view(b, s, 1, config.nheads, config.per_head_dim)
        b_bsmgr, c_bsmgr = (t.view(b, s, 1, config.ngroups, config.state_rank) for t in (b_bsG, c_bsG))

        dt_bsh = step_size(dt_bsh, self.dt_bias, config.dt_limit)
        dt_bsh = rows.hide_padding(dt_bsh, lengths_b)
        da_bsh = -dt_bsh * torch.exp(self.A_log.to(dt_bsh.dtype))
        y_start = state_start = None
        if config.learnable_init_states and segments_bs is not None:
            y_start, state_start = learned_start(self.init_states, c_bsmgr, da_bsh, segments_bs)
        state_bhpr = after_bhpr = cache.ssm_bhpr
        if edge is not None:
            written_bhpr, decay_bh = own_writes(x_bsmhp, b_bsmgr, da_bsh, dt_bsh, segments_bs)
            written_bhpr = written_bhpr if state_start is None else written_bhpr + state_start
            state_bhpr, after_bhpr = pass_state(
                edge, written_bhpr, decay_bh, state_bhpr, lambda: self.fresh_cache(1).ssm_bhpr
            )
        entering_bhpr = state_bhpr
        y_bsmhp, state_bhpr = scan(x_bsmhp, b_bsmgr, c_bsmgr, da_bsh, dt_bsh, dt_bsh, state_bhpr, path, segments_bs)
        if y_start is not None and state_start is not None:
            y_bsmhp, state_bhpr = y_bsmhp + y_start.to(y_bsmhp.dtype), state_bhpr + state_start
        if edge is not None:
            y_bsmhp, state_bhpr = linked(y_bsmhp, entering_bhpr), after_bhpr

        y_bsi = self.gate(y_bsmhp.flatten(-2), x_bsi, z_bsi)
        if mlp:
            y_bsi = torch.cat([F.silu(z_mlp) * x_mlp, y_bsi], -1)
        return self.out_proj(y_bsi), Mamba2Cache(window_bvk, state_bhpr)

    def multiply(self, projected_bsX: Tensor) -> Tensor:
        """What `in_proj` returns, times the multipliers of its parts."""
        if set(self.config.multipliers) == {1}:
            return projected_bsX
        factors = {**dict.fromkeys(("z0", "x0"), 1.0), **dict(zip(PARTS, self.config.multipliers, strict=True))}
        widths = self.independent_maps["in_proj"]
        # As exact as numbers: a narrow dtype rounds the product, not the factor.
        wide = torch.promote_types(projected_bsX.dtype, torch.float32)
        factors_X = torch.cat([projected_bsX.new_full((n,), factors[name], dtype=wide) for name, n in widths.items()])
        return cast(projected_bsX * factors_X, projected_bsX.dtype)

    def fused_step(
        self, projected_bsX: Tensor, cache: Mamba2Cache, fresh_b: Tensor | None = None
    ) -> tuple[Tensor, Mamba2Cache] | None:
        """What `run` returns for one token, by a kernel; None where none applies."""
        if not is_plain(self.conv1d, CausalConv1d) or (self.config.rmsnorm and not is_plain(self.norm, GatedRMSNorm)):
            return None
        start_hpr = self.init_states if self.config.learnable_init_states else None
        stepped = take_step(MAMBA2_STEP, (projected_bsX[:, 0], *cache), step_fields(self), fresh_b, start_hpr)
        return None if stepped is None else (self.out_proj(stepped[0][:, None]), Mamba2Cache(*stepped[1:]))

    def gate(self, y_bsmi: Tensor, x_bsi: Tensor, z_bsi: Tensor) -> Tensor:
        """Skip, gate and norm."""
        config = self.config
        skip_i = self.D.view(config.nheads, -1).expand(-1, config.per_head_dim).flatten()
        if not config.rmsnorm:
            return finish(y_bsmi, x_bsi, skip_i, z_bsi)
        norm = self.norm
        if not is_plain(norm, GatedRMSNorm):
            return norm((y_bsmi[:, :, 0] + skip_i * x_bsi).to(z_bsi.dtype), z_bsi)
        return finish(
            y_bsmi,
            x_bsi,
            skip_i,
            z_bsi,
            norm.weight,
            norm.eps,
            group_size=norm.group_size,
            norm_before_gate=norm.norm_before_gate,
        )


def step_fields(block: Mamba2) -> dict[str, Tensor | float | None]:
    config, conv = block.config, block.conv1d
    norm = block.norm if config.rmsnorm else None
    return {
        **{"heads": config.nheads, "p": config.per_head_dim, "r": config.state_rank, "groups": config.ngroups},
        **{"k": config.conv_kernel, "mlp": config.inner_width - config.ssm_width},
        **{"conv_weight": conv.weight, "conv_bias": conv.bias},
        **{"dt_bias": block.dt_bias, "A_log": block.A_log, "D": block.D},
        "norm_weight": None if norm is None else norm.weight,
        "norm_group": config.norm_width if norm is None else norm.group_size,
        "norm_eps": 0.0 if norm is None else norm.eps,
        **dict(zip(("dt_low", "dt_high"), config.dt_limit, strict=True)),
        "D_per_channel": config.D_has_hdim,
        "norm_before_gate": norm is not None and norm.norm_before_gate,
    }


def shares(config: Mamba2Config, team: Team) -> Shares:
    """Heads are divided, with their groups of B and C where these can be; else each rank computes those it needs."""
    h, p, width, mlp = config.nheads, config.per_head_dim, config.ssm_width, config.inner_width - config.ssm_width
    own = shared(config, "nheads", h, team)
    taken = groups_of(h, config.ngroups, team)
    b, c = (grouped(name, config.ngroups, config.state_rank, taken, team) for name in "BC")
    projected = (Part("z0", mlp), Part("x0", mlp), Part("z", width), Part("x", width), b, c, Part("dt", h))
    norm, is_local = config.norm_width, own * p % config.norm_width == 0
    return Shares(
        config=replace(
            config,
            d_inner=own * p + shared(config, "d_inner - d_ssm", mlp, team),
            d_ssm=own * p,
            ngroups=len(taken),
            norm_group_size=norm if is_local else math.gcd(norm, own * p),
        ),
        parameters={
            **dict.fromkeys(("in_proj.weight", "in_proj.bias"), along(0, *projected)),
            **dict.fromkeys(("conv1d.weight", "conv1d.bias"), along(0, Part("x", width), b, c)),
            **dict.fromkeys(("dt_bias", "A_log", "init_states"), run(h)),
            **{"D": run(h * p if config.D_has_hdim else h), "norm.weight": run(width)},
            "out_proj.weight": along(1, Part("y0", mlp), Part("y", width)),
        },
        cache={"conv_bvk": along(1, Part("x", width), b, c), "ssm_bhpr": run(h, 1)},
        once=("out_proj.bias",),
        modules={} if is_local else {"norm": lambda module: SummedGatedRMSNorm(module, width, team)},
    )


FAMILY = register(
    Family(
        name="mamba2",
        title="Mamba-2",
        block=Mamba2,
        sizes={
            "d_inner": ("out_proj.weight", 1, "inner_width"),
            "nheads": ("dt_bias", 0, "nheads"),
            "conv_dim": ("conv1d.weight", 0, "conv_dim"),
        },
        resolved={
            **{"d_inner": "inner_width", "d_ssm": "ssm_width", "norm_group_size": "norm_width"},
            "ssm_multipliers": "multipliers",
        },
        flops=lambda config, tokens: ssd_flops(config, tokens, groups=config.ngroups),
        shares=shares,
        at_hand={"state_rank": 64},
        example={"d_model": 24, "state_rank": 10, "per_head_dim": 12, "ngroups": 2},
        step=FusedStep(
            fields=lambda block: {
                **step_fields(block),
                **{f"{part}_scale": by for part, by in zip(PARTS, block.config.multipliers, strict=True)},
                "narrow_state": None,
            },
            projections=("in_proj", "out_proj"),
            places={"conv_bvk": "window", "ssm_bhpr": "state"},
            notes=("ssm_bhpr", lambda block: head_notes(block.config)),
            narrow="narrow_state",
        ),
    )
)
