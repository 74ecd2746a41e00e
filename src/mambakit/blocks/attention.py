"""Attention: its config, its cache, its block, its record."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mambakit.blocks import block as rows
from mambakit.blocks.attention_boundary import gather_rows, pass_positions
from mambakit.blocks.config import BlockConfig, check_divides, check_positive, check_types
from mambakit.blocks.family import Family, FusedStep, Slots, register
from mambakit.blocks.modules import Linear
from mambakit.blocks.shares import Part, Shares, along, grouped, groups_of, run, shared
from mambakit.ops.attention import ABSENT, attend, attend_one, filled, places
from mambakit.ops.backends import may_overwrite
from mambakit.ops.boundary import boundary, linked
from mambakit.ops.rope import rates, turn, turns
from mambakit.ops.segments import segment_starts
from mambakit.ops.shapes import check_readable
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.team import Team

SLOTS = 64
"""By so many a cache grows."""


@dataclass(frozen=True, slots=True)
class AttentionConfig(BlockConfig):
    """Causal attention with shared keys, rotary embedding and a window, each if asked for.

    Examples:
        >>> config = mk.AttentionConfig(64, n_heads=8, n_kv_heads=2, rope_theta=10_000.0, window=128)
    """

    d_model: int
    n_heads: int
    n_kv_heads: int | None = None
    """Heads of keys and values, each shared by as many heads of queries (None: one for each)."""
    head_dim: int | None = None
    """Channels in a head (None: `d_model / n_heads`)."""
    scale: float | None = None
    """Of the products of queries and keys (None: `1 / sqrt(head_dim)`)."""
    rope_theta: float | None = None
    """Base of the rotary positions' wavelengths; None is no positions."""
    rope_fraction: float = 1.0
    """Share of a head's channels, the first ones, that rotary positions turn."""
    window: int | None = None
    """How many tokens a query sees, itself among them; None is all before it."""
    bias: bool = False
    key_scale: float = field(default=1.0, kw_only=True)
    """What keys are multiplied by."""

    def __post_init__(self) -> None:
        check_types(self)
        sizes = ("d_model", "n_heads", "n_kv_heads", "head_dim", "scale", "rope_theta", "window", "key_scale")
        check_positive(self, *(name for name in sizes if getattr(self, name) is not None))
        if self.head_dim is None:
            check_divides("n_heads", self.n_heads, "d_model", self.d_model)
        check_divides("n_kv_heads", self.kv_heads, "n_heads", self.n_heads)
        if not 0 < self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction = {self.rope_fraction} has to be above 0 and at most 1")
        if self.rope_theta is not None and (self.rope_width % 2 or not self.rope_width):
            turned = f"{self.rope_width} of head_dim = {self.head_width} channels"
            raise ValueError(f"rope_fraction = {self.rope_fraction} turns {turned}, expected an even number of them")

    @property
    def kv_heads(self) -> int:
        """`n_kv_heads` as a number."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        """`head_dim` as a number."""
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def product_scale(self) -> float:
        """`scale` as a number."""
        return self.head_width**-0.5 if self.scale is None else self.scale

    @property
    def softmax_scale(self) -> float:
        """Of the products with keys before these are scaled."""
        return self.product_scale * self.key_scale

    @property
    def rope_width(self) -> int:
        """Channels of a head that rotary positions turn."""
        return int(self.rope_fraction * self.head_width)

    @property
    def query_width(self) -> int:
        return self.n_heads * self.head_width

    @property
    def projected_width(self) -> int:
        """Of queries, keys and values together."""
        return self.query_width + 2 * self.kv_heads * self.head_width


class AttentionCache(NamedTuple):
    """What attention carries from one call to the next: the tokens that later ones may see.

    A row's tokens are in slots 0, 1, ... without a gap: the one at position `i` in slot `i`, or `i mod window`. The
    other slots are zero. A call returns a multiple of `SLOTS` of them, as few as hold the longest row.

    Examples:
        >>> attention = mk.Attention(mk.AttentionConfig(64, n_heads=4))
        >>> _, cache = attention(torch.randn(2, 10, 64))
    """

    k_btgp: Tensor
    """Keys by slot, turned to their positions."""
    v_btgp: Tensor
    position_b: Tensor
    """How many tokens each row has seen since its start or last reset."""

    grows = {"k_btgp": 1, "v_btgp": 1}  # noqa: RUF012  # not a field
    """The axes that differ between caches of one block; what one has more than another is zero."""


class Attention(rows.Block[AttentionConfig, AttentionCache]):
    """Causal attention with grouped queries; call it as `y_bsd, cache = block(x_bsd, cache)`.

    Examples:
        >>> attention = mk.Attention(mk.AttentionConfig(64, n_heads=4))
        >>> y_bsd, cache = attention(torch.randn(2, 10, 64))
        >>> y_bd, cache = attention.step(torch.randn(2, 64), cache)
    """

    config_class, cache_class, splits = AttentionConfig, AttentionCache, True

    def __init__(self, config: AttentionConfig | None = None, *, device: Any = None, dtype: Any = None, **fields: Any):
        super().__init__(config, **fields)
        config = self.config
        made = {"bias": config.bias, "device": device, "dtype": dtype}
        self.in_proj = Linear(config.d_model, config.projected_width, **made)
        self.out_proj = Linear(config.query_width, config.d_model, **made)

    def reset_parameters(self) -> None:
        """As `nn.Linear` starts."""
        for layer in (self.in_proj, self.out_proj):
            layer.reset_parameters()

    @property
    def independent_maps(self) -> dict[str, dict[str, int]]:
        """The maps that each projection stacks, with their rows in order."""
        keys = self.config.kv_heads * self.config.head_width
        return {
            "in_proj": {"q": self.config.query_width, "k": keys, "v": keys},
            "out_proj": {"y": self.config.d_model},
        }

    def cache_shapes(self, batch: int) -> dict[str, tuple[Any, ...]]:
        shape = (batch, None, self.config.kv_heads, self.config.head_width)
        return {"k_btgp": shape, "v_btgp": shape}

    def fresh_cache(self, batch: int) -> AttentionCache:
        weight, shape = self.in_proj.weight, (batch, 0, self.config.kv_heads, self.config.head_width)
        rows.check_batch(batch)
        position_b = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return AttentionCache(self.zeros(shape, like=weight), self.zeros(shape, like=weight), position_b)

    def restarted(self, cache: AttentionCache, fresh_b: Tensor) -> AttentionCache:
        k_btgp, v_btgp = (kept.masked_fill(fresh_b[:, None, None, None], 0) for kept in (cache.k_btgp, cache.v_btgp))
        position_b = cache.position_b.masked_fill(fresh_b, 0)
        slots = self.slots(position_b)
        return AttentionCache(with_slots(k_btgp, slots), with_slots(v_btgp, slots), position_b)

    def check_cache(self, cache: Any, rows: int, x_bsd: Tensor) -> None:
        super().check_cache(cache, rows, x_bsd)
        position_b, slots = cache.position_b, cache.k_btgp.shape[1]
        check_readable("cache.position_b", position_b)
        if cache.v_btgp.shape[1] != slots:
            raise ValueError(f"cache.k_btgp has {slots} slots but cache.v_btgp {cache.v_btgp.shape[1]}")
        if (tuple(position_b.shape), position_b.dtype, position_b.device) != ((rows,), torch.int64, x_bsd.device):
            given = f"{position_b.dtype} of shape {tuple(position_b.shape)} on {position_b.device}"
            raise ValueError(f"cache.position_b is {given}, expected torch.int64 of shape ({rows},) on {x_bsd.device}")
        if rows and not torch.compiler.is_compiling():
            least, most = (int(n) for n in filled(position_b, self.config.window).aminmax())
            if least < 0 or most > slots:
                raise ValueError(
                    f"cache.position_b is {position_b.tolist()}, which does not fit the {slots} slots of cache.k_btgp"
                )

    def slots(self, position_b: Tensor) -> int:
        """How many a cache has after so many tokens."""
        # Not `int`, which a compiler would want to know in advance.
        most = filled(position_b, self.config.window).max().item() if len(position_b) else 0
        return (most + SLOTS - 1) // SLOTS * SLOTS  # type: ignore[return-value]  # of integers

    def run(
        self,
        x_bsd: Tensor,
        cache: AttentionCache,
        path: SsdPath,
        segments_bs: Tensor | None,
        lengths_b: Tensor | None,
    ) -> tuple[Tensor, AttentionCache]:
        config, s = self.config, x_bsd.shape[1]
        h, g, p = config.n_heads, config.kv_heads, config.head_width
        starts_bs = segment_starts(segments_bs) if segments_bs is not None and s > 1 else None
        edge = boundary()
        last_b = cache.position_b
        # Nothing is in sight, so no token has been seen: the same for all rows.
        entering_b = last_b if cache.k_btgp.shape[1] else None
        if edge is not None:
            entering_b, last_b = pass_positions(edge, last_b)
        qk_bsXp, v_bsgp = self.in_proj(x_bsd).unflatten(-1, (h + 2 * g, p)).split((h + g, g), dim=2)
        if config.rope_theta is not None:
            position_bs = positions(entering_b, s, starts_bs, x_bsd.device)
            qk_bsXp = turn(qk_bsXp, *turns(position_bs, config.rope_width, config.rope_theta, qk_bsXp.dtype))
        q_bshp, k_bsgp = qk_bsXp.split((h, g), dim=2)
        # For decoding: a gradient would reach slots that hold nothing, and a compiler knows no number of slots.
        if edge is not None and entering_b is not None:
            k_bSgp, v_bSgp = gather_rows(edge, k_bsgp, v_bsgp)
            count_jb = edge.facts.length_jb
            before = self.kept(k_bSgp, v_bSgp, cache, count_jb[: edge.rank].sum(0), entering_b)
            after = self.kept(k_bSgp, v_bSgp, cache, count_jb.sum(0), last_b)
            y_bshp = linked(self.attend(q_bshp, k_bsgp, v_bsgp, before, starts_bs), *before[:2])
            return self.out_proj(y_bshp.flatten(2)), after
        if s == 1 and lengths_b is None and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            y_bshp, cache = self.one_token(q_bshp, k_bsgp, v_bsgp, cache)
        else:
            y_bshp, cache = self.any_tokens(q_bshp, k_bsgp, v_bsgp, cache, starts_bs, lengths_b)
        return self.out_proj(y_bshp.flatten(2)), cache

    def any_tokens(
        self,
        q_bshp: Tensor,
        k_bsgp: Tensor,
        v_bsgp: Tensor,
        cache: AttentionCache,
        starts_bs: Tensor | None,
        lengths_b: Tensor | None,
    ) -> tuple[Tensor, AttentionCache]:
        y_bshp = self.attend(q_bshp, k_bsgp, v_bsgp, cache, starts_bs)
        count_b = torch.full_like(cache.position_b, k_bsgp.shape[1]) if lengths_b is None else lengths_b
        position_b = cache.position_b + count_b
        if starts_bs is not None:
            # Padding belongs to the segment of the last token.
            start_b = starts_bs[:, -1]
            position_b = torch.where(start_b > 0, count_b - start_b, position_b)
        return y_bshp, self.kept(k_bsgp, v_bsgp, cache, count_b, position_b)

    def attend(
        self, q_bshp: Tensor, k_bsgp: Tensor, v_bsgp: Tensor, cache: AttentionCache, starts_bs: Tensor | None
    ) -> Tensor:
        """What tokens read of those in the cache and of each other."""
        if not q_bshp.shape[1]:
            return q_bshp
        k_bTgp, v_bTgp = (
            torch.cat((kept.to(new.dtype), new), 1) for kept, new in ((cache.k_btgp, k_bsgp), (cache.v_btgp, v_bsgp))
        )
        window = self.config.window
        return attend(
            q_bshp,
            k_bTgp,
            v_bTgp,
            self.config.softmax_scale,
            place_bt=places(cache.position_b, cache.k_btgp.shape[1], window),
            window=window,
            starts_bs=starts_bs,
        )

    def kept(
        self, k_bsgp: Tensor, v_bsgp: Tensor, cache: AttentionCache, count_b: Tensor, position_b: Tensor
    ) -> AttentionCache:
        """The cache at `position_b`, after so many tokens of each row."""
        window, (b, s, g, p), t = self.config.window, k_bsgp.shape, cache.k_btgp.shape[1]
        # A zero behind all others is for the slots that stay empty.
        k_bTgp, v_bTgp = (
            F.pad(torch.cat((kept.to(new.dtype), new), 1), (0, 0, 0, 0, 0, 1))
            for kept, new in ((cache.k_btgp, k_bsgp), (cache.v_btgp, v_bsgp))
        )
        slots = self.slots(position_b)
        place_bt = places(position_b, slots, window)
        new_bt = place_bt + count_b[:, None]
        source_bt = torch.where(new_bt < 0, torch.arange(slots, device=place_bt.device), t + new_bt)
        source_bt = source_bt.masked_fill(place_bt == ABSENT, t + s)
        row_b1 = (t + s + 1) * torch.arange(b, device=place_bt.device)[:, None]
        taken = (row_b1 + source_bt).flatten()
        k_btgp, v_btgp = (x.flatten(0, 1).index_select(0, taken).view(b, slots, g, p) for x in (k_bTgp, v_bTgp))
        return AttentionCache(k_btgp, v_btgp, position_b)

    def one_token(
        self, q_b1hp: Tensor, k_b1gp: Tensor, v_b1gp: Tensor, cache: AttentionCache
    ) -> tuple[Tensor, AttentionCache]:
        """`any_tokens` for one of each row, which goes to its slot before it is looked for."""
        window, position_b = self.config.window, cache.position_b + 1
        slot_b = cache.position_b if window is None else cache.position_b % window
        slots = self.slots(position_b)
        k_btgp, v_btgp = (
            with_token(with_slots(kept.to(new.dtype), slots), slot_b, new[:, 0])
            for kept, new in ((cache.k_btgp, k_b1gp), (cache.v_btgp, v_b1gp))
        )
        y_bhp = attend_one(q_b1hp[:, 0], k_btgp, v_btgp, self.config.softmax_scale, filled(position_b, window))
        return y_bhp[:, None], AttentionCache(k_btgp, v_btgp, position_b)


def positions(entering_b: Tensor | None, s: int, starts_bs: Tensor | None, device: torch.device) -> Tensor:
    """Of `s` new tokens, from 0 in each segment but the first; None if no row has seen any."""
    index_1s = torch.arange(s, device=device)[None]
    position_bs = index_1s if entering_b is None else entering_b[:, None] + index_1s
    return position_bs if starts_bs is None else torch.where(starts_bs > 0, index_1s - starts_bs, position_bs)


def with_slots(kept_btgp: Tensor, slots: int) -> Tensor:
    """Zeros more, or zeros less."""
    t = kept_btgp.shape[1]
    if slots == t:
        return kept_btgp
    if slots < t:
        return kept_btgp[:, :slots].contiguous()
    return F.pad(kept_btgp, (0, 0, 0, 0, 0, slots - t))


def with_token(kept_btgp: Tensor, slot_b: Tensor, new_bgp: Tensor) -> Tensor:
    place = (torch.arange(len(slot_b), device=slot_b.device), slot_b)
    return kept_btgp.index_put_(place, new_bgp) if may_overwrite() else kept_btgp.index_put(place, new_bgp)


def in_order(block: Attention, cache: AttentionCache, tokens: int) -> tuple[AttentionCache, Tensor]:
    """The tokens in sight in the order of their positions, with room for more; and the position of each row's first."""
    window, kept_b = block.config.window, filled(cache.position_b, block.config.window)
    first_b, at_t = cache.position_b - kept_b, torch.arange(max(kept_b.tolist(), default=0) + tokens)
    position_bt = first_b[:, None] + at_t
    slot_bt = position_bt if window is None else position_bt % window
    return with_tokens(cache, slot_bt, at_t < kept_b[:, None]), first_b


def in_slots(block: Attention, cache: AttentionCache, first_b: Tensor) -> AttentionCache:
    """A cache as calls return it, of one in which tokens are in order."""
    place_bt = places(cache.position_b, block.slots(cache.position_b), block.config.window)
    return with_tokens(cache, (cache.position_b - first_b)[:, None] + place_bt, place_bt != ABSENT)


def with_tokens(cache: AttentionCache, slot_bt: Tensor, present_bt: Tensor) -> AttentionCache:
    """The tokens of other slots in each, or none."""
    row_n, at_n = present_bt.nonzero(as_tuple=True)
    changed = {}
    for name in cache.grows:
        kept = getattr(cache, name)
        moved = kept.new_zeros(*slot_bt.shape, *kept.shape[2:])
        changed[name] = moved.index_put_((row_n, at_n), kept[row_n, slot_bt[row_n, at_n]])
    return cache._replace(**changed)


def pair_flops(config: AttentionConfig, tokens: int) -> float:
    """Of the two products over all pairs of a query and a key that it sees."""
    near = tokens if config.window is None else min(tokens, config.window)
    pairs = near * (near + 1) / 2 + (tokens - near) * near
    return 4.0 * pairs * config.query_width


def step_fields(block: Attention) -> dict[str, float]:
    config = block.config
    return {
        **{"heads": config.n_heads, "kv_heads": config.kv_heads, "p": config.head_width},
        **{"window": config.window or 0, "scale": config.softmax_scale, "angles": len(rates_of(config))},
    }


def rates_of(config: AttentionConfig) -> Tensor:
    """By how much a position turns each of a head's angles."""
    return torch.empty(0) if config.rope_theta is None else rates(config.rope_width, config.rope_theta)


def shares(config: AttentionConfig, team: Team) -> Shares:
    """Heads are divided, with those of keys and values where these can be; else each rank computes those it needs."""
    h, g, p = config.n_heads, config.kv_heads, config.head_width
    own = shared(config, "n_heads", h, team)
    taken = groups_of(h, g, team)
    k, v = (grouped(name, g, p, taken, team) for name in "kv")
    kept = along(2, grouped("heads", g, 1, taken, team))
    return Shares(
        config=replace(config, n_heads=own, n_kv_heads=len(taken), head_dim=p),
        parameters={
            **dict.fromkeys(("in_proj.weight", "in_proj.bias"), along(0, Part("q", h * p), k, v)),
            "out_proj.weight": run(h * p, 1),
        },
        cache={"k_btgp": kept, "v_btgp": kept},
        once=("out_proj.bias",),
    )


FAMILY = register(
    Family(
        name="attention",
        title="Attention",
        block=Attention,
        sizes={
            "n_heads * head_dim": ("out_proj.weight", 1, "query_width"),
            "(n_heads + 2 * n_kv_heads) * head_dim": ("in_proj.weight", 0, "projected_width"),
        },
        resolved={"n_kv_heads": "kv_heads", "head_dim": "head_width", "scale": "product_scale"},
        flops=pair_flops,
        shares=shares,
        needed={"n_heads": 4},
        example={"d_model": 24, "n_kv_heads": 2, "rope_theta": 10_000.0},
        step=FusedStep(
            fields=step_fields,
            prepared=lambda block: {"rates": rates_of(block.config)},
            projections=("in_proj", "out_proj"),
            places={"k_btgp": "k", "v_btgp": "v", "position_b": "position"},
            slots=Slots(in_order, in_slots),
        ),
    )
)
