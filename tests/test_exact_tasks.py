"""Blocks whose every weight is written by hand solve tasks that need exactly one of their abilities, without an error.

The tasks are burn-mamba's: the running vote since a reset needs a decay that depends on the token, the three-detent
rotor a rotation that does, and products in the quaternion group rotations that do not commute. Tokens are one-hot, so a
projection may say anything about a symbol. `RESET` is always symbol 0.
"""

import math
import random

import pytest
import torch

from mambakit import Mamba2, Mamba2Config, Mamba3, Mamba3Config, SsdPath

RESET = 0
ERASE, KEEP = 60.0, -60.0  # what A's activation turns into a decay of exp(-60), and into none
SILU_OF_ONE = 1 / (1 + math.exp(-1))
LENGTH = 200
PATHS = [SsdPath.minimal(16), SsdPath.serial(32), SsdPath.serial_recalculated(64)]
PATHWAYS = ["single", "double"]


def say(block, part: str, *per_symbol: list[float]) -> None:
    """Let a part of the input projection take these values, one list per symbol."""
    sizes = block.independent_maps["in_proj"]
    start = 0
    for name, rows in sizes.items():
        if name == part:
            for symbol, values in enumerate(per_symbol):
                block.in_proj.weight[start : start + rows, symbol] = torch.tensor(values, dtype=torch.float64)
        start += rows


def blank(block) -> None:
    """Everything zero but the gate, which lets all pass, and a step size of one."""
    for parameter in block.parameters():
        parameter.zero_()
    block.dt_bias.fill_(math.log(math.e - 1))
    open_gate = [1.0] * block.independent_maps["in_proj"]["z"]
    say(block, "z", open_gate, open_gate, open_gate)
    block.out_proj.weight.copy_(torch.eye(*block.out_proj.weight.shape, dtype=torch.float64) / SILU_OF_ONE)


@torch.no_grad()
def mamba3(heads: int, share: float, ranks: int = 0, **changed) -> Mamba3:
    """A block of `heads` heads of one channel, all writing `B = e_0`; head `q` reads `C = e_q`.

    The trapezoid gives a token `share` of its write at once and the rest one token later.
    """
    sizes = {"d_model": 4, "expand": heads / 4, "per_head_dim": 1, "is_mimo": ranks > 0, "mimo_rank": max(ranks, 1)}
    block = Mamba3(Mamba3Config(**sizes, a_activation="softplus", a_floor=1e-15, **changed), dtype=torch.float64)
    blank(block)
    block.B_bias[..., 0] = 1
    for head in range(heads):
        block.C_bias[head, :, head] = 1
    if ranks:
        block.mimo_x.fill_(1 / ranks)
        block.mimo_z.fill_(1)
        block.mimo_o.fill_(1 / ranks)
    # What the trapezoid puts off, the skip adds: head 0 reads what is written now as it is.
    block.D[0] = (1 - share) * max(ranks, 1)
    later = [math.log(share / (1 - share)) if share < 1 else 60.0] * heads
    say(block, "lambda", later, later, later)
    say(block, "A", [ERASE] * heads, [KEEP] * heads, [KEEP] * heads)
    return block


def one_hot(symbols: list[int]):
    return torch.nn.functional.one_hot(torch.tensor(symbols), 4).double()


def answers(block, symbols: list[int], path: SsdPath | None = None, pathway: str | None = None):
    """What the block says at each symbol, all at once; `path=None` goes step by step."""
    x_sd = one_hot(symbols)
    with torch.no_grad():
        if path is not None:
            cache = block.fresh_cache(1, pathway) if pathway else None
            return block(x_sd[None], cache, path=path)[0][0]
        cache, said = None, []
        for x_d in x_sd:
            y_bd, cache = block.step(x_d[None], cache)
            said.append(y_bd[0])
        return torch.stack(said)


def ways(block, symbols: list[int]):
    """By step, and by every algorithm and pathway."""
    yield answers(block, symbols)
    for path in PATHS:
        for pathway in PATHWAYS if isinstance(block, Mamba3) else [None]:
            yield answers(block, symbols, path, pathway)


def streams(seed: int) -> dict[str, list[int]]:
    """Symbols 1 and 2 with resets now and then, one long run before a reset, and a drift without any."""
    rng = random.Random(seed)
    mixed = [rng.choice([1, 2]) if rng.random() < 7 / 8 else RESET for _ in range(LENGTH - 1)]
    run = [1] * (LENGTH - 3) + [RESET, 2]
    drift = [1 if rng.random() < 0.9 else 2 for _ in range(LENGTH - 1)]
    return {"mixed": [RESET, *mixed], "run": [RESET, *run], "drift": [RESET, *drift]}


def votes(symbols: list[int]) -> list[int]:
    count, counts = 0, []
    for symbol in symbols:
        count = 0 if symbol == RESET else count + (1 if symbol == 1 else -1)
        counts.append(count)
    return counts


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("stream", ["mixed", "run", "drift"])
def test_running_vote_since_reset(stream, share):
    block = mamba3(1, share, state_rank=2, rope_fraction=0.0)
    with torch.no_grad():
        say(block, "x", [0.0], [1.0], [-1.0])
    symbols = streams(1)[stream]
    expected = torch.tensor(votes(symbols), dtype=torch.float64)
    for said in ways(block, symbols):
        torch.testing.assert_close(said[:, 0], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("stream", ["mixed", "run", "drift"])
def test_running_vote_since_reset_with_mamba2(stream):
    """One step size both writes and forgets: votes take a short step along a slow decay, a reset a very long one."""
    slow, long = 1e-12, 1e14
    config = Mamba2Config(d_model=4, expand=0.5, per_head_dim=2, state_rank=1, conv_kernel=1, rmsnorm=False)
    block = Mamba2(config, dtype=torch.float64)
    with torch.no_grad():
        blank(block)
        block.A_log.fill_(math.log(slow))
        block.conv1d.weight.fill_(1)
        # One channel counts each side: the activation would bend a negative value.
        say(block, "x", [0.0, 0.0], [1.0, 0.0], [0.0, 1.0])
        for part in ("B", "C"):
            say(block, part, [1.0], [1.0], [1.0])
        say(block, "dt", [long], [0.0], [0.0])
        block.out_proj.weight[0] = (
            torch.tensor([1.0, -1.0], dtype=torch.float64) / SILU_OF_ONE**4
        )  # of x, B, C and the gate
    symbols = streams(2)[stream]
    expected = torch.tensor(votes(symbols), dtype=torch.float64)
    for said in ways(block, symbols):
        torch.testing.assert_close(said[:, 0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("stream", ["mixed", "run", "drift"])
def test_three_detent_rotor(stream, share, ranks):
    """A reset writes a unit vector; the others write nothing and turn it by a third, one way or the other."""
    block = mamba3(2, share, ranks, state_rank=2, rope_fraction=1.0)
    third = math.atanh(2 / 3)
    with torch.no_grad():
        say(block, "x", [1.0, 1.0], [0.0, 0.0], [0.0, 0.0])
        say(block, "rotation", [0.0], [third], [-third])
    symbols = streams(3)[stream]
    turns = torch.tensor([vote % 3 for vote in votes(symbols)]) * (2 * math.pi / 3)
    # The state turns against the angles that B and C are given.
    expected = torch.stack([turns.cos(), -turns.sin()], 1).double()
    for said in ways(block, symbols):
        torch.testing.assert_close(said[:, :2], expected, rtol=0, atol=1e-6)


TIMES_I = {"1": "i", "i": "-1", "j": "k", "k": "-j"}
TIMES_J = {"1": "j", "i": "-k", "j": "-1", "k": "i"}
UNITS = "1ijk"


def quaternion_group(symbols: list[int]) -> list[list[float]]:
    """Symbol 1 multiplies by i from the left, symbol 2 by j; coordinates along 1, i, j, k."""
    sign, unit, out = 1, "1", []
    for symbol in symbols:
        if symbol == RESET:
            sign, unit = 1, "1"
        else:
            product = (TIMES_I if symbol == 1 else TIMES_J)[unit]
            sign, unit = sign * (-1 if product[0] == "-" else 1), product[-1]
        out.append([float(sign * (unit == u)) for u in UNITS])
    return out


def turn_by_i_and_j(block, amount: float) -> None:
    with torch.no_grad():
        say(block, "x", [1.0] * 4, [0.0] * 4, [0.0] * 4)
        if block.config.rotation == "quaternion":
            say(block, "rotation", [0.0] * 12, [amount, 0.0, 0.0] * 4, [0.0, amount, 0.0] * 4)
        else:
            say(block, "rotation", [0.0] * 2, [amount, 0.0], [0.0, amount])


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("stream", ["mixed", "run", "drift"])
def test_quaternion_group_product(stream, share):
    """A half turn in space is a quarter of the way round the unit quaternions: i and j themselves."""
    block = mamba3(4, share, state_rank=4, rotation="quaternion", rope_fraction=1.0, rotation_range=2.0)
    turn_by_i_and_j(block, math.atanh(0.5))
    symbols = streams(4)[stream]
    expected = torch.tensor(quaternion_group(symbols), dtype=torch.float64)
    for said in ways(block, symbols):
        torch.testing.assert_close(said, expected, rtol=0, atol=1e-6)


def test_complex_rotations_lose_the_order():
    """Angles add up, so `i j` and `j i` end in the same state; as quaternions they end in opposite ones."""
    ij, ji = [RESET, 1, 2], [RESET, 2, 1]
    planes = mamba3(4, 1.0, state_rank=4, rotation="complex", rope_fraction=1.0, rotation_range=2.0)
    turn_by_i_and_j(planes, math.atanh(0.5))
    torch.testing.assert_close(answers(planes, ij)[-1], answers(planes, ji)[-1])
    quaternions = mamba3(4, 1.0, state_rank=4, rotation="quaternion", rope_fraction=1.0, rotation_range=2.0)
    turn_by_i_and_j(quaternions, math.atanh(0.5))
    torch.testing.assert_close(answers(quaternions, ij)[-1], -answers(quaternions, ji)[-1])
    assert answers(quaternions, ij)[-1].abs().max() > 0.99
