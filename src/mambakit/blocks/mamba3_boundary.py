"""How a Mamba-3 cache passes through shares of a sequence that lie on different ranks.

Each share turns its B and C from its own start on: only the turn between two tokens counts. So what leaves a share is
turned back by the share's whole rotation on its way into the next, and by all of them together in a cache.
"""

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from mambakit.blocks.modules import last_token
from mambakit.ops.boundary import Boundary, Carried, own_writes, pick
from mambakit.ops.quaternion import conjugate, multiply, normalise, rotate_quaternion
from mambakit.ops.rotation import rotate, wrap
from mambakit.ops.ssd import add_write
from mambakit.ops.trapezoid import ends_of, w_later

if TYPE_CHECKING:
    from mambakit.blocks.mamba3 import Mamba3, Mamba3Cache, Mamba3Config, Token


def pass_cache(
    block: "Mamba3",
    edge: Boundary,
    cache: "Mamba3Cache",
    token: "Token",
    b_bsmhr: Tensor,
    rotation: Tensor,
    state_start: Tensor | None,
    segments_bs: Tensor | None,
    lengths_b: Tensor | None,
) -> tuple["Mamba3Cache", "Mamba3Cache"]:
    """What enters this rank's share, as its tokens are turned, and the cache after the last one.

    `b_bsmhr` is turned, and `rotation` the whole turn, from the share's start on or from the last reset inside of it.
    """
    gamma_bsh, left_bsh = ends_of(token.lambda_bsh, token.dt_bsh, segments_bs)
    later_bsh = w_later(gamma_bsh, left_bsh)
    written_bhpr, decay_bh = own_writes(block.per_rank(token.x_bshp), b_bsmhr, token.da_bsh, later_bsh, segments_bs)
    written_bhpr = written_bhpr if state_start is None else written_bhpr + state_start
    # The first token's; zero where there is none.
    left_bh = F.pad(left_bsh, (0, 0, 0, 1))[:, 0]
    lasts = [last_token(x, x.new_zeros(len(x), *x.shape[2:]), lengths_b) for x in (b_bsmhr, token.x_bshp)]
    gathered = edge.gather(written_bhpr, decay_bh, left_bh, *lasts, rotation)
    facts, config, wide = edge.facts, block.config, gathered[0].dtype

    def through(j: int, carried: Carried) -> Carried:
        written_bhpr, decay_bh, left_bh, k_bmhr, v_bhp, turn = (tensor[j] for tensor in gathered)
        state_bhpr, k_before, v_before, turn_before = carried
        state_bhpr = add_write(state_bhpr, left_bh, block.per_rank(v_before[:, None])[:, 0].to(wide), k_before)
        state_bhpr = decay_bh[..., None, None] * state_bhpr + written_bhpr
        k_bmhr, v_bhp = pick(facts.length_jb[j] > 0, (k_bmhr, v_bhp), (k_before, v_before))
        (total,) = pick(facts.is_cut_jb[j], (turn,), (one_after_the_other(config, turn_before, turn),))
        return turned_state(config, state_bhpr, turn, back=True), turned(config, k_bmhr, turn, back=True), v_bhp, total

    state_bhpr, k_bmhr, v_bhp, turn = (tensor.to(wide) for tensor in cache[:4])
    start = turned_state(config, state_bhpr, turn, back=True), turned(config, k_bmhr, turn, back=True), v_bhp, turn
    entering, after = edge.follow(start, lambda: block.fresh_cache(1)[:4], through)
    state_bhpr, k_bmhr, v_bhp, turn = after
    after = turned_state(config, state_bhpr, turn), turned(config, k_bmhr, turn), v_bhp, turn
    dtypes = (wide, cache.k_state_bmhr.dtype, cache.v_state_bhp.dtype, rotation.dtype)
    found = [tuple(x.to(dtype) for x, dtype in zip(carried, dtypes, strict=True)) for carried in (entering, after)]
    entering, after = (type(cache)(*carried, pathway=cache.pathway) for carried in found)
    return entering, after


def turned(config: "Mamba3Config", x_bmhr: Tensor, rotation: Tensor, back: bool = False) -> Tensor:
    """As B and C are, by a rotation of every head; `back` undoes it."""
    if config.rope_dim == 0:
        return x_bmhr
    if config.rotation == "quaternion":
        rotation = conjugate(rotation) if back else rotation
        return rotate_quaternion(x_bmhr[:, None], rotation[:, None])[:, 0]
    return rotate(x_bmhr[:, None], (-rotation if back else rotation)[:, None], config.pairing)[:, 0]


def turned_state(config: "Mamba3Config", state_bhpr: Tensor, rotation: Tensor, back: bool = False) -> Tensor:
    """The same for every channel's row of a state."""
    return turned(config, state_bhpr.transpose(1, 2), rotation, back).transpose(1, 2)


def one_after_the_other(config: "Mamba3Config", first: Tensor, second: Tensor) -> Tensor:
    """Two rotations as one."""
    if config.rotation == "quaternion":
        return normalise(multiply(second, first))
    return wrap(first + second)
