"""Mamba-3: its config, its cache, its block, its record."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mambakit.arguments import shown
from mambakit.blocks import block as rows
from mambakit.blocks.config import BlockConfig, check_divides, check_positive, check_range, check_types, expanded
from mambakit.blocks.family import Family, FusedStep, head_notes, register, ssd_flops
from mambakit.blocks.fixed_point import response
from mambakit.blocks.mamba3_boundary import pass_cache
from mambakit.blocks.modules import Linear, RMSNorm, init_dt_bias, is_plain, last_token, mark
from mambakit.blocks.shares import Part, Shares, along, expand_for, grouped, groups_of, run, shared, whole
from mambakit.ops.activations import heavy_tail, softplus, step_size
from mambakit.ops.boundary import boundary, linked
from mambakit.ops.expand_ranks import expand_ranks
from mambakit.ops.fused_step import MAMBA3_STEP, is_step, take_step
from mambakit.ops.mamba3_prepare import add_bias, mamba3_prepare
from mambakit.ops.norm import finish
from mambakit.ops.quaternion import IDENTITY, rotate_quaternion, running_quaternion, unit_quaternion
from mambakit.ops.quaternion_prepare import quaternion_prepare
from mambakit.ops.rotation import checked_range, rotate_all, running_angle
from mambakit.ops.ssd import learned_start
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.team import Team
from mambakit.ops.trapezoid import PATHWAYS, trapezoid

A_ACTIVATIONS = {"heavy_tail": heavy_tail, "softplus": softplus}
ROTATIONS = ("complex", "quaternion")
PIECE = 7 << 20
"""Numbers that B of all heads may have at once, where no gradient is wanted. Allocators keep blocks of 32 MB for the
next call and give back larger ones, and then touching fresh memory takes longer than the arithmetic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba3Config(BlockConfig):
    """The sizes and choices of a Mamba-3 block; official defaults, and burn-mamba's in `Mamba3Config.burn`.

    Examples:
        >>> mk.Mamba3Config(d_model=64, per_head_dim=16, is_mimo=True, mimo_rank=2).rotation
        'complex'
        >>> mk.Mamba3Config.burn(d_model=64, per_head_dim=16).a_activation
        'softplus'
    """

    d_model: int
    expand: float = 2
    state_rank: int = 128
    per_head_dim: int = 64
    ngroups: int = 1
    is_mimo: bool = False
    mimo_rank: int = 4
    """Write and read vectors per token; counts only with `is_mimo`."""
    rope_fraction: float = 0.5
    """Share of the state that rotates."""
    rotation: str = "complex"
    rotation_range: float = 1.0
    """Largest turn per unit of step size, in half turns."""
    a_activation: str = "heavy_tail"
    """The official code changed from `"softplus"` to `"heavy_tail"` in June 2026; parameters look the same."""
    a_floor: float = 1e-4
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    dt_limit: tuple[float, float] = (0.0, math.inf)
    is_outproj_norm: bool = False
    norm_eps: float = 1e-5
    learnable_init_states: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        sizes = ("d_model", "expand", "state_rank", "per_head_dim", "ngroups", "mimo_rank", "d_inner")
        check_positive(self, *sizes, "rotation_range", "a_floor", "norm_eps", "dt_init_floor")
        checked_range(self.rotation_range)
        check_divides("per_head_dim", self.per_head_dim, "d_inner", self.d_inner)
        check_divides("ngroups", self.ngroups, "nheads", self.nheads)
        check_divides("2", 2, "state_rank", self.state_rank)
        check_range("dt_limit", self.dt_limit)
        check_range("(dt_min, dt_max)", (self.dt_min, self.dt_max), positive=True)
        if self.a_activation not in A_ACTIVATIONS:
            raise ValueError(f"a_activation = {self.a_activation!r} is unknown; choose from {', '.join(A_ACTIVATIONS)}")
        if self.rotation not in ROTATIONS:
            raise ValueError(f"rotation = {self.rotation!r} is unknown; choose from {', '.join(ROTATIONS)}")
        if self.rope_fraction not in (0.0, 0.5, 1.0):
            raise ValueError(f"rope_fraction = {self.rope_fraction} has to be 0, 0.5 or 1")
        if self.rotation == "quaternion":
            check_divides("4", 4, "state_rank", self.state_rank)
            if self.rope_dim % 4:
                raise ValueError(
                    f"quaternions turn blocks of 4, but rope_fraction leaves {self.rope_dim} state entries"
                )

    @classmethod
    def burn(cls, *, d_model: int, **changed: Any) -> "Mamba3Config":
        """burn-mamba's defaults; its RMSNorm epsilon is that of float32."""
        preset = {
            "rope_fraction": 1.0,
            "rotation_range": 2.0,
            "a_activation": "softplus",
            "norm_eps": 8.1585e-8,
            "dt_limit": (0.0, 65504.0),
        }
        return cls(d_model=d_model, **{**preset, **changed})

    @property
    def d_inner(self) -> int:
        return expanded(self)

    @property
    def nheads(self) -> int:
        return self.d_inner // self.per_head_dim

    @property
    def ranks(self) -> int:
        """`mimo_rank` where it counts, else 1."""
        return self.mimo_rank if self.is_mimo else 1

    @property
    def rope_dim(self) -> int:
        """State entries that rotate, an even number."""
        return int(self.state_rank * self.rope_fraction) // 2 * 2

    @property
    def rotation_shape(self) -> tuple[int, ...]:
        """Of one token's cumulative rotation. Without any, one angle or quaternion is kept that turns nothing."""
        if self.rotation == "quaternion":
            return (self.nheads, max(self.rope_dim // 4, 1), 4)
        return (self.nheads, max(self.rope_dim // 2, 1))

    @property
    def rotation_channels(self) -> int:
        """Projected channels that rotations come from: angles are shared by the heads, quaternions are not."""
        if self.rotation == "quaternion":
            return 3 * self.nheads * self.rotation_shape[1]
        return self.rotation_shape[1]

    @property
    def pairing(self) -> str:
        return "half" if self.is_mimo else "interleaved"


class Mamba3Cache(NamedTuple):
    """What Mamba-3 carries from one call to the next. Both pathways end a call in the same state.

    Examples:
        >>> cache = mk.Mamba3(mk.Mamba3Config(d_model=64, per_head_dim=16)).fresh_cache(batch=2)
        >>> cache.pathway, cache.with_pathway("double").pathway
        ('single', 'double')
    """

    ssm_bhpr: Tensor
    k_state_bmhr: Tensor
    """B of the last token: normed, biased, rotated. The next token's trapezoid still needs its left end."""
    v_state_bhp: Tensor
    """x of the last token, before `mimo_x`."""
    rotation: Tensor
    """Cumulative: angles `[b, h, a]` in [-pi, pi], or unit quaternions `[b, h, j, 4]`."""
    pathway: str = "single"
    """How `forward` computes from here: `"single"` or `"double"`."""

    def with_pathway(self, pathway: str) -> "Mamba3Cache":
        if pathway not in PATHWAYS:
            raise ValueError(f"pathway {shown(pathway)} is unknown; choose from {', '.join(PATHWAYS)}")
        return self._replace(pathway=pathway)


class Token(NamedTuple):
    """What the projection of a sequence yields, B and C as they are before norm, bias and rotation."""

    z_bshp: Tensor
    x_bshp: Tensor
    b_bsmgr: Tensor
    c_bsmgr: Tensor
    dt_bsh: Tensor
    da_bsh: Tensor
    lambda_bsh: Tensor
    rot_bsR: Tensor


class Mamba3(rows.Block[Mamba3Config, Mamba3Cache]):
    """A Mamba-3 block; call it as `y_bsd, cache = block(x_bsd, cache)`.

    Examples:
        >>> block = mk.Mamba3(mk.Mamba3Config(d_model=64, per_head_dim=16, state_rank=32))
        >>> x_bsd, mask_bs = torch.randn(2, 100, 64), torch.ones(2, 100, dtype=torch.bool)
        >>> mask_bs[1, :30] = False  # the second row is shorter
        >>> y_bsd, cache = block(x_bsd, mask_bs=mask_bs)
        >>> alone_bsd, _ = block(x_bsd[1:, 30:])
        >>> torch.allclose(y_bsd[1, 30:], alone_bsd[0], atol=1e-4)
        True
    """

    config_class, cache_class, splits = Mamba3Config, Mamba3Cache, True
    restarts = leans = lines_per_head = True

    def __init__(self, config: Mamba3Config | None = None, *, device: Any = None, dtype: Any = None, **fields: Any):
        super().__init__(config, **fields)
        config = self.config
        made = {"device": device, "dtype": dtype}
        wide = {"device": device, "dtype": torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)}
        h, m, p, r = config.nheads, config.ranks, config.per_head_dim, config.state_rank
        self.in_proj = Linear(config.d_model, sum(self.projected), bias=False, **made)
        self.dt_bias = mark(nn.Parameter(torch.empty(h, **wide)), keep_init=True)
        self.B_bias = mark(nn.Parameter(torch.empty(h, m, r, **wide)))
        self.C_bias = mark(nn.Parameter(torch.empty(h, m, r, **wide)))
        self.B_norm = RMSNorm(r, config.norm_eps, **made)
        self.C_norm = RMSNorm(r, config.norm_eps, **made)
        if config.is_mimo:
            self.mimo_x, self.mimo_z, self.mimo_o = (nn.Parameter(torch.empty(h, m, p, **wide)) for _ in range(3))
        self.D = mark(nn.Parameter(torch.empty(h, **wide)))
        if config.is_outproj_norm:
            self.norm = RMSNorm(config.d_inner, config.norm_eps, group_size=p, **made)
        self.out_proj = Linear(config.d_inner, config.d_model, bias=False, **made)
        if config.learnable_init_states:
            self.init_states = mark(nn.Parameter(torch.empty(h, p, r, **wide)))
        self.reset_parameters()

    @property
    def per_head_dim(self) -> int:
        return self.config.per_head_dim

    @property
    def projected(self) -> tuple[int, ...]:
        """Widths of z, x, B, C, dt, A, lambda and the rotation in the input projection."""
        config = self.config
        i, h, mgr = config.d_inner, config.nheads, config.ranks * config.ngroups * config.state_rank
        return (i, i, mgr, mgr, h, h, h, config.rotation_channels)

    def reset_parameters(self) -> None:
        """The official initialisation, projections included."""
        config = self.config
        for layer in (self.in_proj, self.out_proj, self.B_norm, self.C_norm):
            layer.reset_parameters()
        if config.is_outproj_norm:
            self.norm.reset_parameters()
        init_dt_bias(self.dt_bias, config.dt_min, config.dt_max, config.dt_init_floor)
        for ones in (self.B_bias, self.C_bias, self.D):
            nn.init.ones_(ones)
        if config.is_mimo:
            nn.init.constant_(self.mimo_x, 1 / config.ranks)
            nn.init.ones_(self.mimo_z)
            nn.init.constant_(self.mimo_o, 1 / config.ranks)
        if config.learnable_init_states:
            nn.init.zeros_(self.init_states)

    @property
    def independent_maps(self) -> dict[str, dict[str, int]]:
        """The maps that each projection stacks, with their rows in order."""
        names = ("z", "x", "B", "C", "dt", "A", "lambda", "rotation")
        return {"in_proj": dict(zip(names, self.projected, strict=True)), "out_proj": {"y": self.config.d_model}}

    def cache_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        config = self.config
        h, p, r = config.nheads, config.per_head_dim, config.state_rank
        return {
            "ssm_bhpr": (batch, h, p, r),
            "k_state_bmhr": (batch, config.ranks, h, r),
            "v_state_bhp": (batch, h, p),
            "rotation": (batch, *config.rotation_shape),
        }

    def fresh_cache(self, batch: int, pathway: str = "single") -> Mamba3Cache:
        """Nothing seen yet; the state is the learned one where there is one."""
        shapes = self.cache_shapes(batch)
        if self.config.learnable_init_states:
            ssm_bhpr = self.learned("init_states", batch)
        else:
            ssm_bhpr = self.zeros(shapes["ssm_bhpr"], like=self.D)
        narrow = self.B_norm.weight
        return Mamba3Cache(
            ssm_bhpr,
            self.zeros(shapes["k_state_bmhr"], like=narrow),
            self.zeros(shapes["v_state_bhp"], like=narrow),
            self.no_rotation(batch),
        ).with_pathway(pathway)

    def no_rotation(self, batch: int) -> Tensor:
        rotation = self.zeros((batch, *self.config.rotation_shape), like=self.D)
        return rotation + rotation.new_tensor(IDENTITY) if self.config.rotation == "quaternion" else rotation

    def step_infinite(self, x_bd: Tensor) -> Tensor:
        """What `step` converges to when the same token comes for ever."""
        rows.check_token(self, x_bd)
        rows.check_input(self, x_bd[:, None])
        token = self.describe(self.in_proj(x_bd[:, None]), None)
        v_bsmhp = self.per_rank(token.x_bshp)
        wide_b, wide_c = (t.to(token.dt_bsh.dtype) for t in self.per_head(token))
        answer_bsmhr = response(self.config, wide_b, token.dt_bsh, token.da_bsh, token.lambda_bsh, token.rot_bsR)
        read_bsmjh = torch.einsum("bsmhr,bsjhr->bsmjh", wide_c, answer_bsmhr)
        y_bsmhp = torch.einsum("bsmjh,bsjhp->bsmhp", read_bsmjh, v_bsmhp.to(wide_b.dtype)).to(v_bsmhp.dtype)
        return self.finish(y_bsmhp, token)[:, 0]

    def run(
        self,
        x_bsd: Tensor,
        cache: Mamba3Cache,
        path: SsdPath,
        segments_bs: Tensor | None,
        lengths_b: Tensor | None,
        fresh_b: Tensor | None = None,
    ) -> tuple[Tensor, Mamba3Cache]:
        edge, pieces = boundary(), self.pieces(x_bsd)
        if pieces > 1 and edge is None and segments_bs is None and lengths_b is None:
            y = []
            for piece_bsd in x_bsd.tensor_split(pieces, 1):
                y_bsd, cache = self.run(piece_bsd, cache, path, None, None)
                y.append(y_bsd)
            return torch.cat(y, 1), cache
        projected_bsX = self.in_proj(x_bsd)
        if edge is None and is_step(projected_bsX, segments_bs, lengths_b, self.parameters()):
            fused = self.fused_step(projected_bsX, cache, fresh_b)
            if fused is not None:
                return fused
        if fresh_b is not None:
            cache = self.restarted(cache, fresh_b)
        token = self.describe(projected_bsX, lengths_b)
        # Only turns between tokens count: a share's own start from nothing, whatever those before it did.
        turned = cache.rotation if edge is None else self.no_rotation(len(x_bsd))
        b_bsmhr, c_bsmhr, rotation = self.rotate(token, turned, segments_bs)
        y_start = state_start = None
        if self.config.learnable_init_states and segments_bs is not None:
            y_start, state_start = learned_start(self.init_states, c_bsmhr, token.da_bsh, segments_bs)
        entering, after = cache, None
        if edge is not None:
            entering, after = pass_cache(
                self, edge, cache, token, b_bsmhr, rotation, state_start, segments_bs, lengths_b
            )
        y_bsmhp, state_bhpr = trapezoid(
            self.per_rank(token.x_bshp),
            b_bsmhr,
            c_bsmhr,
            token.da_bsh,
            token.dt_bsh,
            token.lambda_bsh,
            entering.ssm_bhpr,
            self.per_rank(entering.v_state_bhp[:, None])[:, 0],
            entering.k_state_bmhr,
            pathway=cache.pathway,
            path=path,
            segments_bs=segments_bs,
        )
        if y_start is not None and state_start is not None:
            y_bsmhp, state_bhpr = y_bsmhp + y_start.to(y_bsmhp.dtype), state_bhpr + state_start
        if after is not None:
            return self.finish(linked(y_bsmhp, *entering[:3]), token), after
        cache = Mamba3Cache(
            state_bhpr,
            last_token(b_bsmhr, cache.k_state_bmhr, lengths_b),
            last_token(token.x_bshp, cache.v_state_bhp, lengths_b),
            rotation,
            cache.pathway,
        )
        return self.finish(y_bsmhp, token), cache

    def pieces(self, x_bsd: Tensor) -> int:
        """Into how many a sequence is cut. One where there are gradients: they need B and C whole anyway."""
        config, (b, s, _) = self.config, x_bsd.shape
        # The compiler first: it would take the length for one below 256 ever after.
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or s < 256:
            return 1
        most = max(PIECE // max(b * config.ranks * config.nheads * config.state_rank, 1), 1)
        return -(-s // most)

    def fused_step(
        self, projected_bsX: Tensor, cache: Mamba3Cache, fresh_b: Tensor | None = None
    ) -> tuple[Tensor, Mamba3Cache] | None:
        """What `run` returns for one token, by a kernel; None where none applies."""
        if why_not_fused(self) is not None or not all(is_plain(norm, RMSNorm) for norm in norms_of(self)):
            return None
        start_hpr = self.init_states if self.config.learnable_init_states else None
        stepped = take_step(MAMBA3_STEP, (projected_bsX[:, 0], *cache[:4]), step_fields(self), fresh_b, start_hpr)
        if stepped is None:
            return None
        y_bi, *after = stepped
        return self.out_proj(y_bi[:, None]), Mamba3Cache(*after, pathway=cache.pathway)

    def describe(self, projected_bsX: Tensor, lengths_b: Tensor | None) -> Token:
        """All a token says about itself: values, gate, B and C, coefficients."""
        config = self.config
        lines = (config.ranks, config.ngroups, config.state_rank)
        z_bsi, x_bsi, b_bsG, c_bsG, dt_bsh, a_bsh, trap_bsh, rot_bsR = projected_bsX.split(self.projected, -1)
        heads = (config.nheads, config.per_head_dim)
        dt_bsh = step_size(dt_bsh, self.dt_bias, config.dt_limit)
        dt_bsh = rows.hide_padding(dt_bsh, lengths_b)
        # The floor before the sign: a clamp after it would turn decay into growth.
        decay_bsh = A_ACTIVATIONS[config.a_activation](a_bsh).clamp(min=config.a_floor)
        return Token(
            z_bshp=z_bsi.unflatten(-1, heads),
            x_bshp=x_bsi.unflatten(-1, heads),
            b_bsmgr=b_bsG.unflatten(-1, lines),
            c_bsmgr=c_bsG.unflatten(-1, lines),
            dt_bsh=dt_bsh,
            da_bsh=-dt_bsh * decay_bsh,
            lambda_bsh=torch.sigmoid(trap_bsh.to(dt_bsh.dtype)),
            rot_bsR=rot_bsR,
        )

    def per_head(self, token: Token) -> tuple[Tensor, Tensor]:
        """B and C with norm and bias."""
        b_bsmhr = add_bias(self.B_norm(token.b_bsmgr), self.B_bias)
        return b_bsmhr, add_bias(self.C_norm(token.c_bsmgr), self.C_bias)

    def rotate(self, token: Token, carried: Tensor, segments_bs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """B and C with norm and bias, turned by the rotation up to each token, in the dtype of x; the last rotation."""
        config, dtype = self.config, token.x_bshp.dtype
        are_plain = is_plain(self.B_norm, RMSNorm) and is_plain(self.C_norm, RMSNorm)
        if are_plain and self.B_norm.eps == self.C_norm.eps:
            sides = (token.b_bsmgr, token.c_bsmgr, self.B_norm.weight, self.C_norm.weight, self.B_bias, self.C_bias)
            how = {"eps": self.B_norm.eps, "rotation_range": config.rotation_range, "segments_bs": segments_bs}
            # Without rotation the one angle or quaternion that is kept turns nothing.
            if config.rotation == "quaternion":
                angles = config.rope_dim // 4
                rot_bshj3 = token.rot_bsR.unflatten(-1, (*config.rotation_shape[:2], 3))[:, :, :, :angles]
                prepared = quaternion_prepare(*sides, rot_bshj3, token.dt_bsh, carried[:, :, :angles], **how)
            else:
                angles = config.rope_dim // 2
                turns = (token.rot_bsR[..., :angles], token.dt_bsh, carried[..., :angles])
                prepared = mamba3_prepare(*sides, *turns, pairing=config.pairing, **how)
            b_bsmhr, c_bsmhr, last = prepared
            return b_bsmhr, c_bsmhr, last if angles else self.no_rotation(len(b_bsmhr))
        b_bsmhr, c_bsmhr = self.per_head(token)
        if config.rope_dim == 0:
            return b_bsmhr.to(dtype), c_bsmhr.to(dtype), self.no_rotation(len(b_bsmhr))
        if config.rotation == "quaternion":
            rot_bshj3 = token.rot_bsR.unflatten(-1, (*config.rotation_shape[:2], 3))
            q_bshj4 = unit_quaternion(rot_bshj3, token.dt_bsh, config.rotation_range)
            total_bshj4, last = running_quaternion(q_bshj4, carried, segments_bs=segments_bs)
            b_bsmhr, c_bsmhr = (rotate_quaternion(t, total_bshj4) for t in (b_bsmhr, c_bsmhr))
        else:
            angle_bsha, last = running_angle(
                token.rot_bsR, token.dt_bsh, config.rotation_range, carried, segments_bs=segments_bs
            )
            b_bsmhr, c_bsmhr = rotate_all((b_bsmhr, c_bsmhr), angle_bsha, config.pairing)
        return b_bsmhr.to(dtype), c_bsmhr.to(dtype), last

    def per_rank(self, x_bshp: Tensor) -> Tensor:
        """Values: a copy of x for every rank, each with its own weights."""
        return expand_ranks(x_bshp, self.mimo_x) if self.config.is_mimo else x_bshp[:, :, None]

    def finish(self, y_bsmhp: Tensor, token: Token) -> Tensor:
        """Skip, norm, gate, contraction of the ranks, output projection."""
        config = self.config
        y_bsmi, x_bsi, z_bsi = (t.flatten(-2) for t in (y_bsmhp, token.x_bshp, token.z_bshp))
        skip_i = self.D[:, None].expand(-1, config.per_head_dim).flatten()
        names = ("mimo_x", "mimo_z", "mimo_o") if config.is_mimo else ()
        mimo = {f"{name}_mi": getattr(self, name).transpose(0, 1).flatten(1) for name in names}
        norm = self.norm if config.is_outproj_norm else None
        if norm is not None and not is_plain(norm, RMSNorm):
            v_bsmi = self.per_rank(token.x_bshp).flatten(-2)
            y_bsmi = norm((y_bsmi + skip_i * v_bsmi).to(v_bsmi.dtype))
            norm, skip_i = None, torch.zeros_like(skip_i)
        y_bsi = finish(
            y_bsmi,
            x_bsi,
            skip_i,
            z_bsi,
            None if norm is None else norm.weight,
            config.norm_eps if norm is None else norm.eps,
            group_size=config.per_head_dim,
            norm_before_gate=True,
            **mimo,
        )
        return self.out_proj(y_bsi)


def norms_of(block: Mamba3) -> list[RMSNorm]:
    return [block.B_norm, block.C_norm, *([block.norm] if block.config.is_outproj_norm else [])]


def why_not_fused(block: Mamba3) -> str | None:
    """What the fused step does not know."""
    return "has norms with different eps" if len({getattr(norm, "eps", None) for norm in norms_of(block)}) > 1 else None


def step_fields(block: Mamba3) -> dict[str, Tensor | float | None]:
    config = block.config
    return {
        **{"heads": config.nheads, "p": config.per_head_dim, "r": config.state_rank, "groups": config.ngroups},
        **{"ranks": config.ranks, "angles": config.rope_dim // (4 if config.rotation == "quaternion" else 2)},
        "quaternions": config.rotation == "quaternion",
        **{"half": config.pairing == "half", "heavy_tail": config.a_activation == "heavy_tail"},
        **{"dt_bias": block.dt_bias, "B_norm": block.B_norm.weight, "C_norm": block.C_norm.weight},
        **{"B_bias": block.B_bias, "C_bias": block.C_bias, "D": block.D},
        **{name: getattr(block, name) if config.is_mimo else None for name in ("mimo_x", "mimo_z", "mimo_o")},
        "norm_weight": block.norm.weight if config.is_outproj_norm else None,
        "norm_eps": block.B_norm.eps,
        **dict(zip(("dt_low", "dt_high"), config.dt_limit, strict=True)),
        **{"a_floor": config.a_floor, "rotation_range": config.rotation_range},
    }


def shares(config: Mamba3Config, team: Team) -> Shares:
    """Heads are divided, with their groups of B and C where these can be; the angles they share are on every rank."""
    h, i, ranks = config.nheads, config.d_inner, config.ranks
    own = shared(config, "nheads", h, team)
    taken = groups_of(h, config.ngroups, team)
    b, c = (grouped(name, config.ngroups, config.state_rank, taken, team, ranks) for name in "BC")
    turns = config.rotation_channels
    rotation = Part("rotation", turns) if config.rotation == "quaternion" else whole("rotation", turns)
    heads = (Part("dt", h), Part("A", h), Part("lambda", h))
    names = ("dt_bias", "B_bias", "C_bias", "D", "mimo_x", "mimo_z", "mimo_o", "init_states")
    expand = expand_for(own * config.per_head_dim, config.d_model)
    return Shares(
        config=replace(config, expand=expand, ngroups=len(taken)),
        parameters={
            "in_proj.weight": along(0, Part("z", i), Part("x", i), b, c, *heads, rotation),
            **dict.fromkeys(names, run(h)),
            **{"norm.weight": run(i), "out_proj.weight": run(i, 1)},
        },
        cache={name: run(h, 2 if name == "k_state_bmhr" else 1) for name in Mamba3Cache._fields[:4]},
    )


FAMILY = register(
    Family(
        name="mamba3",
        title="Mamba-3",
        block=Mamba3,
        sizes={
            "d_inner": ("out_proj.weight", 1, "d_inner"),
            "nheads": ("dt_bias", 0, "nheads"),
            "state_rank": ("B_norm.weight", 0, "state_rank"),
            "mimo_rank": ("B_bias", 1, "ranks"),
        },
        resolved={"mimo_rank": "ranks"},
        shares=shares,
        # B and C are every head's own.
        flops=lambda config, tokens: ssd_flops(config, tokens, groups=config.nheads, ranks=config.ranks),
        variants={"mamba3-mimo": {"is_mimo": True}},
        at_hand={"state_rank": 64},
        example={"d_model": 24, "state_rank": 12, "per_head_dim": 12},
        step=FusedStep(
            fields=step_fields,
            projections=("in_proj", "out_proj"),
            places={"ssm_bhpr": "state", "k_state_bmhr": "k_state", "v_state_bhp": "v_state", "rotation": "angle"},
            notes=("ssm_bhpr", lambda block: head_notes(block.config, 2 * block.config.ranks)),
            why_not=why_not_fused,
        ),
    )
)
