"""Mamba-1: its config, its cache, its block, its record."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mambakit.arguments import shown
from mambakit.blocks import block as rows
from mambakit.blocks.config import BlockConfig, check_positive, check_types, expanded
from mambakit.blocks.family import Family, FusedStep, register
from mambakit.blocks.modules import CausalConv1d, Linear, RMSNorm, convolve_silu, init_dt_bias, is_plain, mark
from mambakit.blocks.shares import Part, Shares, SummedLinear, along, expand_for, run, shared
from mambakit.ops.activations import softplus
from mambakit.ops.boundary import boundary, linked, pass_state
from mambakit.ops.fused_step import MAMBA1_STEP, MAMBA1_STEP_CONV, is_step, take_step
from mambakit.ops.norm import rms_norm
from mambakit.ops.selective_scan import SELECTIVE_SCAN, selective_scan
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.team import Team


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1Config(BlockConfig):
    """The sizes and choices of a Mamba-1 block; the defaults are the official ones.

    Examples:
        >>> config = mk.Mamba1Config(d_model=64, state_rank=16)
        >>> mk.Mamba1Config.from_dict(config.to_dict()) == config
        True
    """

    d_model: int
    expand: float = 2
    state_rank: int = 16
    conv_kernel: int = 4
    dt_rank: int | str = "auto"
    """Width of the bottleneck that step sizes come from; `"auto"` is `ceil(d_model / 16)`."""
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init: str = "random"
    """How `dt_proj.weight` starts: `"random"` or `"constant"`."""
    dt_scale: float = 1.0
    dt_init_floor: float = 1e-4
    conv_bias: bool = True
    bias: bool = False
    dt_b_c_norm: bool = False
    """RMS norms on what `x_proj` gives: dt before its projection, B and C."""
    dt_b_c_norm_weight: bool = True
    """Whether these norms have weights, as in Jamba; Falcon-Mamba has none."""
    norm_eps: float = 1e-6
    """Of these norms."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "d_model", "expand", "state_rank", "conv_kernel", "dt_min", "dt_init_floor", "d_inner")
        check_positive(self, "norm_eps")
        if not 0 <= self.dt_scale < 1e30:
            raise ValueError(f"dt_scale = {self.dt_scale} has to be 0 or more, and a number that weights can have")
        if not self.dt_min <= self.dt_max:
            raise ValueError(f"dt_min = {self.dt_min} is above dt_max = {self.dt_max}")
        if self.dt_init not in ("random", "constant"):
            raise ValueError(f'dt_init = {shown(self.dt_init)} is unknown; choose "random" or "constant"')
        if self.dt_rank != "auto" and not (isinstance(self.dt_rank, int) and self.dt_rank > 0):
            raise ValueError(f'dt_rank = {shown(self.dt_rank)} has to be a positive integer or "auto"')

    @property
    def d_inner(self) -> int:
        return expanded(self)

    @property
    def dt_width(self) -> int:
        """`dt_rank` as a number."""
        return math.ceil(self.d_model / 16) if isinstance(self.dt_rank, str) else self.dt_rank


class Mamba1Cache(NamedTuple):
    """What Mamba-1 carries from one call to the next.

    Examples:
        >>> cache = mk.Mamba1(mk.Mamba1Config(d_model=64)).fresh_cache(batch=2)
        >>> cache.conv_bik.shape, cache.ssm_bir.shape
        (torch.Size([2, 128, 4]), torch.Size([2, 128, 16]))
    """

    conv_bik: Tensor
    """The last inputs of the convolution, newest last."""
    ssm_bir: Tensor


class Mamba1(rows.Block[Mamba1Config, Mamba1Cache]):
    """A Mamba-1 block; call it as `y_bsd, cache = block(x_bsd, cache)`.

    Examples:
        >>> block = mk.Mamba1(mk.Mamba1Config(d_model=64))
        >>> y_bsd, cache = block(torch.randn(2, 100, 64))
        >>> y_bd, cache = block.step(torch.randn(2, 64), cache)
        >>> y_bsd.shape, y_bd.shape
        (torch.Size([2, 100, 64]), torch.Size([2, 64]))
    """

    config_class, cache_class, splits = Mamba1Config, Mamba1Cache, True
    restarts = True

    def __init__(self, config: Mamba1Config | None = None, *, device: Any = None, dtype: Any = None, **fields: Any):
        super().__init__(config, **fields)
        config = self.config
        made = {"device": device, "dtype": dtype}
        wide = {"device": device, "dtype": torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)}
        i, r = config.d_inner, config.state_rank
        self.in_proj = Linear(config.d_model, 2 * i, bias=config.bias, **made)
        self.conv1d = CausalConv1d(i, i, config.conv_kernel, groups=i, bias=config.conv_bias, **made)
        self.x_proj = Linear(i, config.dt_width + 2 * r, bias=False, **made)
        self.dt_proj = Linear(config.dt_width, i, **made)
        if config.dt_b_c_norm and config.dt_b_c_norm_weight:
            self.dt_norm = RMSNorm(config.dt_width, config.norm_eps, **made)
            self.B_norm, self.C_norm = (RMSNorm(r, config.norm_eps, **made) for _ in range(2))
        self.A_log = mark(nn.Parameter(torch.empty(i, r, **wide)))
        self.D = mark(nn.Parameter(torch.empty(i, **wide)))
        self.out_proj = Linear(i, config.d_model, bias=config.bias, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The official initialisation, projections included."""
        config = self.config
        for layer in (self.in_proj, self.conv1d, self.x_proj, self.out_proj):
            layer.reset_parameters()
        if config.dt_b_c_norm and config.dt_b_c_norm_weight:
            for norm in (self.dt_norm, self.B_norm, self.C_norm):
                norm.reset_parameters()
        scale = config.dt_width**-0.5 * config.dt_scale
        if config.dt_init == "constant":
            nn.init.constant_(self.dt_proj.weight, scale)
        else:
            nn.init.uniform_(self.dt_proj.weight, -scale, scale)
        init_dt_bias(self.dt_proj.bias, config.dt_min, config.dt_max, config.dt_init_floor)
        self.dt_proj.bias._no_reinit = True  # type: ignore[attr-defined]
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, config.state_rank + 1, dtype=self.A_log.dtype).log().expand_as(self.A_log))
        nn.init.ones_(self.D)

    @property
    def independent_maps(self) -> dict[str, dict[str, int]]:
        """The maps that each projection stacks, with their rows in order."""
        config = self.config
        i, r = config.d_inner, config.state_rank
        return {
            "in_proj": {"x": i, "z": i},
            "x_proj": {"dt": config.dt_width, "B": r, "C": r},
            "out_proj": {"y": config.d_model},
        }

    def cache_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        i = self.config.d_inner
        return {"conv_bik": (batch, i, self.config.conv_kernel), "ssm_bir": (batch, i, self.config.state_rank)}

    def fresh_cache(self, batch: int) -> Mamba1Cache:
        shapes = self.cache_shapes(batch)
        return Mamba1Cache(
            self.zeros(shapes["conv_bik"], like=self.conv1d.weight), self.zeros(shapes["ssm_bir"], like=self.D)
        )

    def run(
        self,
        x_bsd: Tensor,
        cache: Mamba1Cache,
        path: SsdPath,
        segments_bs: Tensor | None,
        lengths_b: Tensor | None,
        fresh_b: Tensor | None = None,
    ) -> tuple[Tensor, Mamba1Cache]:
        if path != SsdPath():
            raise ValueError(f"Mamba-1 has one scan and takes no path but one that names a backend, got {path}")
        r = self.config.state_rank
        projected_bsX = self.in_proj(x_bsd)
        edge = boundary()
        if edge is None and is_step(projected_bsX, segments_bs, lengths_b, self.parameters()):
            fused = self.fused_step(projected_bsX, cache, fresh_b)
            if fused is not None:
                return fused
        if fresh_b is not None:
            cache = self.restarted(cache, fresh_b)
        x_bsi, z_bsi = projected_bsX.chunk(2, dim=-1)
        (x_bsi,), window_bik = convolve_silu(
            self.conv1d, x_bsi, cache.conv_bik, [self.config.d_inner], segments_bs, lengths_b
        )
        dt_bsR, b_bsr, c_bsr = self.norm_dt_b_c(self.x_proj(x_bsi)).split((self.config.dt_width, r, r), dim=-1)
        dt_bsi = self.dt_proj(dt_bsR)
        a_ir = -torch.exp(self.A_log.to(torch.promote_types(dt_bsi.dtype, torch.float32)))
        # What hides padding is a step size of zero, which no softplus gives.
        softplus_inside = lengths_b is None
        if softplus_inside and edge is not None:
            # Of the two scans, each would keep its own, but for kernels, which keep none.
            scanned = x_bsi, dt_bsi, a_ir, b_bsr[:, :, None], c_bsr[:, :, None], cache.ssm_bir
            softplus_inside = SELECTIVE_SCAN.offer(*scanned) is not None
        if not softplus_inside:
            dt_bsi = rows.hide_padding(softplus(dt_bsi), lengths_b)
        inputs = (x_bsi, dt_bsi, a_ir, b_bsr[:, :, None], c_bsr[:, :, None])
        entering_bir, last_bir = cache.ssm_bir, None
        if edge is not None:
            none_bir = torch.zeros_like(cache.ssm_bir)
            _, written_bir = selective_scan(*inputs, none_bir, dt_softplus=softplus_inside, segments_bs=segments_bs)
            sum_bi = (softplus(dt_bsi) if softplus_inside else dt_bsi).sum(1)
            decay_bir = torch.exp(a_ir * sum_bi[..., None])
            decay_bir = decay_bir.masked_fill(edge.facts.is_cut_jb[edge.rank][:, None, None], 0)
            entering_bir, last_bir = pass_state(
                edge, written_bir, decay_bir, cache.ssm_bir, lambda: self.fresh_cache(1).ssm_bir
            )
        y_bsi, state_bir = selective_scan(
            *inputs, entering_bir, skip_i=self.D, z_bsi=z_bsi, dt_softplus=softplus_inside, segments_bs=segments_bs
        )
        if last_bir is not None:
            y_bsi, state_bir = linked(y_bsi, entering_bir), last_bir
        return self.out_proj(y_bsi.to(z_bsi.dtype)), Mamba1Cache(window_bik, state_bir)

    def norm_dt_b_c(self, dt_b_c_bsX: Tensor) -> Tensor:
        """What `x_proj` returns, behind the norms on its three parts where there are any."""
        config = self.config
        if not config.dt_b_c_norm:
            return dt_b_c_bsX
        parts = dt_b_c_bsX.split((config.dt_width, config.state_rank, config.state_rank), dim=-1)
        if config.dt_b_c_norm_weight:
            norms = (self.dt_norm, self.B_norm, self.C_norm)
            parts = [norm(part).to(part.dtype) for norm, part in zip(norms, parts, strict=True)]
        else:
            parts = [rms_norm(part, eps=config.norm_eps) for part in parts]
        return torch.cat(parts, -1)

    def fused_step(
        self, projected_bsX: Tensor, cache: Mamba1Cache, fresh_b: Tensor | None = None
    ) -> tuple[Tensor, Mamba1Cache] | None:
        """What `run` returns for one token, by kernels; None where they do not apply."""
        if not is_plain(self.conv1d, CausalConv1d) or MAMBA1_STEP.offer(cache.ssm_bir, self.A_log, self.D) is None:
            return None
        fields, projected_bX = step_fields(self), projected_bsX[:, 0]
        convolved = take_step(MAMBA1_STEP_CONV, (projected_bX, cache.conv_bik), fields, fresh_b)
        if convolved is None:
            return None
        x_bi, window_bik = convolved
        dt_b_c_bsX = self.norm_dt_b_c(self.x_proj(x_bi[:, None]))
        dt_bsi = self.dt_proj(dt_b_c_bsX[..., : self.config.dt_width])
        entering = (projected_bX, x_bi, dt_bsi[:, 0], dt_b_c_bsX[:, 0], cache.ssm_bir)
        scanned = take_step(MAMBA1_STEP, entering, fields, fresh_b)
        if scanned is None:
            return None
        y_bi, state_bir = scanned
        return self.out_proj(y_bi[:, None]), Mamba1Cache(window_bik, state_bir)


def step_fields(block: Mamba1) -> dict[str, Tensor | float | None]:
    config, conv = block.config, block.conv1d
    return {
        **{"channels": config.d_inner, "r": config.state_rank, "k": config.conv_kernel},
        **{"conv_weight": conv.weight, "conv_bias": conv.bias, "A_log": block.A_log, "D": block.D},
    }


def norm_fields(block: Mamba1) -> dict[str, Any]:
    """Of the norms on dt, B and C."""
    config, names = block.config, ("dt_norm", "B_norm", "C_norm")
    weighted = config.dt_b_c_norm and config.dt_b_c_norm_weight
    return {
        **{name: getattr(block, name).weight if weighted else None for name in names},
        **{"dt_b_c_norm": config.dt_b_c_norm, "norm_eps": block.dt_norm.eps if weighted else config.norm_eps},
    }


def shares(config: Mamba1Config, team: Team) -> Shares:
    """Channels are divided; what they share, dt before its projection, B and C, is a sum over all of them."""
    i = config.d_inner
    own = shared(config, "d_inner", i, team)
    names = ("conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias", "A_log", "D")
    halves = along(0, Part("x", i), Part("z", i))
    return Shares(
        config=replace(config, expand=expand_for(own, config.d_model)),
        parameters={
            **dict.fromkeys(names, run(i)),
            **dict.fromkeys(("in_proj.weight", "in_proj.bias"), halves),
            **dict.fromkeys(("x_proj.weight", "out_proj.weight"), run(i, 1)),
        },
        cache={"conv_bik": run(i, 1), "ssm_bir": run(i, 1)},
        once=("out_proj.bias",),
        modules={"x_proj": lambda module: SummedLinear(module, team)},
    )


FAMILY = register(
    Family(
        name="mamba1",
        title="Mamba-1",
        block=Mamba1,
        sizes={
            "d_inner": ("out_proj.weight", 1, "d_inner"),
            "state_rank": ("A_log", 1, "state_rank"),
            "dt_rank": ("dt_proj.weight", 1, "dt_width"),
        },
        resolved={"dt_rank": "dt_width"},
        example={"d_model": 24, "state_rank": 5},
        shares=shares,
        step=FusedStep(
            fields=lambda block: {**step_fields(block), **norm_fields(block)},
            prepared=lambda block: {"A": -torch.exp(block.A_log.detach())},
            projections=("in_proj", "x_proj", "dt_proj", "out_proj"),
            places={"conv_bik": "window", "ssm_bir": "state"},
            why_not=lambda block: None if type(block.dt_proj) is Linear else "has a quantized dt_proj",
        ),
    )
)
