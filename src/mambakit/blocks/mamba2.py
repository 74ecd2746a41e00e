"""Mamba-2: its config, its cache, its block, its record."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.blocks import block as rows
from mambakit.blocks import fused_step
from mambakit.blocks.config import BlockConfig, check_divides, check_positive, check_range
from mambakit.blocks.family import Family, FusedStep, register, ssd_flops
from mambakit.blocks.modules import (
    CausalConv1d,
    GatedRMSNorm,
    Linear,
    around_scan,
    convolve_silu,
    init_dt_bias,
    is_plain,
    mark,
)
from mambakit.ops.activations import step_size
from mambakit.ops.norm import finish, plain_norm
from mambakit.ops.ssd import learned_start, one_token, scan
from mambakit.ops.ssd_path import SsdPath


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config(BlockConfig):
    d_model: int
    expand: float = 2
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
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    dt_limit: tuple[float, float] = (0.0, math.inf)
    conv_bias: bool = True
    bias: bool = False
    learnable_init_states: bool = False

    def __post_init__(self) -> None:
        sizes = ("d_model", "expand", "state_rank", "per_head_dim", "ngroups", "conv_kernel", "d_inner", "ssm_width")
        check_positive(self, *sizes, "dt_min", "dt_init_floor")
        if self.ssm_width > self.d_inner:
            raise ValueError(f"d_ssm = {self.d_ssm} is above d_inner = {self.d_inner}")
        check_divides("per_head_dim", self.per_head_dim, "d_inner" if self.d_ssm is None else "d_ssm", self.ssm_width)
        check_divides("ngroups", self.ngroups, "nheads", self.nheads)
        check_divides("norm_group_size", self.norm_width, "d_ssm", self.ssm_width)
        check_range("A_init_range", self.A_init_range, positive=True)
        check_range("dt_limit", self.dt_limit)
        check_range("(dt_min, dt_max)", (self.dt_min, self.dt_max), positive=True)

    @property
    def d_inner(self) -> int:
        return int(self.expand * self.d_model)

    @property
    def ssm_width(self) -> int:
        """`d_ssm` as a number."""
        return self.d_inner if self.d_ssm is None else self.d_ssm

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


class Mamba2Cache(NamedTuple):
    """What Mamba-2 carries from one call to the next."""

    conv_bvk: Tensor
    """The last inputs of the convolution, newest last."""
    ssm_bhpr: Tensor


class Mamba2(rows.Block[Mamba2Config, Mamba2Cache]):
    """A Mamba-2 block; call it as `y_bsd, cache = block(x_bsd, cache)`."""

    config_class, cache_class = Mamba2Config, Mamba2Cache

    def __init__(self, config: Mamba2Config | None = None, *, device: Any = None, dtype: Any = None, **fields: Any):
        super().__init__(config, **fields)
        config = self.config
        made = {"device": device, "dtype": dtype}
        wide = {"device": device, "dtype": torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)}
        h, p, v = config.nheads, config.per_head_dim, config.conv_dim
        groups = 2 * config.ngroups * config.state_rank
        self.in_proj = Linear(config.d_model, 2 * config.d_inner + groups + h, bias=config.bias, **made)
        self.conv1d = CausalConv1d(v, v, config.conv_kernel, groups=v, bias=config.conv_bias, **made)
        self.dt_bias = mark(nn.Parameter(torch.empty(h, **wide)), keep_init=True)
        self.A_log = mark(nn.Parameter(torch.empty(h, **wide)))
        self.D = mark(nn.Parameter(torch.empty(h * p if config.D_has_hdim else h, **wide)))
        if config.rmsnorm:
            self.norm = GatedRMSNorm(config.ssm_width, config.norm_width, config.norm_before_gate, **made)
        self.out_proj = Linear(config.d_inner, config.d_model, bias=config.bias, **made)
        if config.learnable_init_states:
            self.init_states = mark(nn.Parameter(torch.empty(h, p, config.state_rank, **wide)))
        self.reset_parameters()

    @property
    def per_head_dim(self) -> int:
        return self.config.per_head_dim

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
        width, mlp, gr = config.ssm_width, config.d_inner - config.ssm_width, config.ngroups * config.state_rank
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
        path: SsdPath | None,
        segments_bs: Tensor | None,
        lengths_b: Tensor | None,
    ) -> tuple[Tensor, Mamba2Cache]:
        config, path = self.config, SsdPath.of(path)
        width, mlp, gr = config.ssm_width, config.d_inner - config.ssm_width, config.ngroups * config.state_rank
        projected_bsX = self.in_proj(x_bsd)
        if fused := fused_step.mamba2(self, projected_bsX, cache, path, segments_bs, lengths_b):
            return fused
        if segments_bs is None and lengths_b is None and self.is_plain_step(projected_bsX, cache, path):
            y_bi, cache = self.run_token(projected_bsX[:, 0], cache)
            return self.out_proj(y_bi[:, None]), cache
        z_mlp, x_mlp, z_bsi, xbc_bsv, dt_bsh = projected_bsX.split(
            (mlp, mlp, width, config.conv_dim, config.nheads), dim=-1
        )
        backend = around_scan(path)
        (x_bsi, b_bsG, c_bsG), window_bvk = convolve_silu(
            self.conv1d, xbc_bsv, cache.conv_bvk, [width, gr, gr], segments_bs, lengths_b, backend
        )
        x_bshp = x_bsi.unflatten(-1, (config.nheads, config.per_head_dim))
        b_bsmgr, c_bsmgr = (t.unflatten(-1, (1, config.ngroups, config.state_rank)) for t in (b_bsG, c_bsG))

        dt_bsh = step_size(dt_bsh, self.dt_bias, config.dt_limit)
        dt_bsh = rows.hide_padding(dt_bsh, lengths_b)
        da_bsh = -dt_bsh * torch.exp(self.A_log.to(dt_bsh.dtype))
        y_bsmhp, state_bhpr = scan(
            x_bshp[:, :, None], b_bsmgr, c_bsmgr, da_bsh, dt_bsh, dt_bsh, cache.ssm_bhpr, path, segments_bs
        )
        if config.learnable_init_states and segments_bs is not None:
            y_start, state_start = learned_start(self.init_states, c_bsmgr, da_bsh, segments_bs)
            y_bsmhp, state_bhpr = y_bsmhp + y_start.to(y_bsmhp.dtype), state_bhpr + state_start

        y_bsi = self.gate(y_bsmhp.flatten(-2), x_bsi, z_bsi, backend)
        if mlp:
            y_bsi = torch.cat([F.silu(z_mlp) * x_mlp, y_bsi], -1)
        return self.out_proj(y_bsi), Mamba2Cache(window_bvk, state_bhpr)

    def is_plain_step(self, projected_bsX: Tensor, cache: Mamba2Cache, path: SsdPath) -> bool:
        """Whether `run_token` may take this: one token in one wide dtype, no gradients, modules that nothing wraps."""
        if projected_bsX.shape[1] != 1 or path.backend == "cpu" or torch.is_grad_enabled():
            return False
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(projected_bsX.device.type):
            return False
        if not is_plain(self.conv1d, CausalConv1d) or (self.config.rmsnorm and not is_plain(self.norm, GatedRMSNorm)):
            return False
        dtypes = {projected_bsX.dtype, cache.conv_bvk.dtype, cache.ssm_bhpr.dtype, self.D.dtype}
        return dtypes in ({torch.float32}, {torch.float64})

    def run_token(self, projected_bX: Tensor, cache: Mamba2Cache) -> tuple[Tensor, Mamba2Cache]:
        """What `run` computes between the projections, in as few operators as one token needs."""
        config, conv = self.config, self.conv1d
        width, mlp, gr = config.ssm_width, config.d_inner - config.ssm_width, config.ngroups * config.state_rank
        z_mlp, x_mlp, z_bi, xbc_bv, dt_bh = projected_bX.split((mlp, mlp, width, config.conv_dim, config.nheads), 1)
        # Channels last in memory: numbers that are added up lie apart, which is faster.
        window_bvk = torch.cat((cache.conv_bvk.mT[:, 1:], xbc_bv[:, None]), 1).mT
        xbc_bv = (window_bvk * conv.weight.squeeze(1)).sum(-1)
        xbc_bv = F.silu(xbc_bv if conv.bias is None else xbc_bv + conv.bias)
        x_bi, b_bG, c_bG = xbc_bv.split((width, gr, gr), 1)
        x_bmhp = x_bi.view(-1, 1, config.nheads, config.per_head_dim)
        b_bmgr, c_bmgr = (t.view(-1, 1, config.ngroups, config.state_rank) for t in (b_bG, c_bG))
        dt_bh = step_size(dt_bh, self.dt_bias, config.dt_limit)
        da_bh = -dt_bh * torch.exp(self.A_log)
        y_bmhp, state_bhpr = one_token(x_bmhp, b_bmgr, c_bmgr, da_bh, dt_bh, dt_bh, cache.ssm_bhpr)
        y_bi = torch.addcmul(y_bmhp, x_bmhp, self.D.view(config.nheads, -1)).view(-1, width)
        if config.rmsnorm:
            norm = self.norm
            y_bi = plain_norm(y_bi, z_bi, norm.weight, norm.eps, norm.group_size or width, norm.norm_before_gate)
        else:
            y_bi = y_bi * F.silu(z_bi)
        if mlp:
            y_bi = torch.cat([F.silu(z_mlp) * x_mlp, y_bi], -1)
        return y_bi, Mamba2Cache(window_bvk, state_bhpr)

    def gate(self, y_bsmi: Tensor, x_bsi: Tensor, z_bsi: Tensor, backend: str) -> Tensor:
        """Skip, gate and norm."""
        config = self.config
        skip_i = self.D.view(config.nheads, -1).expand(-1, config.per_head_dim).flatten()
        if not config.rmsnorm:
            return finish(y_bsmi, x_bsi, skip_i, z_bsi, backend=backend)
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
            backend=backend,
        )


def step_fields(block: Mamba2) -> dict[str, Tensor | float | None]:
    config, conv = block.config, block.conv1d
    norm = block.norm if config.rmsnorm else None
    return {
        **{"heads": config.nheads, "p": config.per_head_dim, "r": config.state_rank, "groups": config.ngroups},
        **{"k": config.conv_kernel, "mlp": config.d_inner - config.ssm_width},
        **{"conv_weight": conv.weight, "conv_bias": conv.bias},
        **{"dt_bias": block.dt_bias, "A_log": block.A_log, "D": block.D},
        "norm_weight": None if norm is None else norm.weight,
        "norm_group": config.norm_width if norm is None else norm.group_size,
        "norm_eps": 0.0 if norm is None else norm.eps,
        **dict(zip(("dt_low", "dt_high"), config.dt_limit, strict=True)),
        "D_per_channel": config.D_has_hdim,
        "norm_before_gate": norm is not None and norm.norm_before_gate,
    }


FAMILY = register(
    Family(
        name="mamba2",
        title="Mamba-2",
        block=Mamba2,
        sizes={
            "d_inner": ("out_proj.weight", 1, "d_inner"),
            "nheads": ("dt_bias", 0, "nheads"),
            "conv_dim": ("conv1d.weight", 0, "conv_dim"),
        },
        resolved={"d_ssm": "ssm_width", "norm_group_size": "norm_width"},
        flops=lambda config, tokens: ssd_flops(config, tokens, groups=config.ngroups),
        at_hand={"state_rank": 64},
        example={"d_model": 24, "state_rank": 10, "per_head_dim": 12, "ngroups": 2},
        step=FusedStep(fields=step_fields, places={"conv_bvk": "window", "ssm_bhpr": "state"}),
    )
)
