"""Angles and quaternions, their running totals and what they turn equal plain loops, whole, split and segmented."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compare import GRADIENT, VALUE, check, gradients, leaves
from mambakit.ops.quaternion import (
    conjugate,
    multiply,
    quaternion_product,
    rotate_quaternion,
    running_quaternion,
    unit_quaternion,
)
from mambakit.ops.rotation import rotate, running_angle
from oracles.elementwise import (
    angle_loop,
    multiply_loop,
    quaternion_loop,
    rotate_loop,
    rotate_quaternion_loop,
    unit_quaternion_loop,
)

LENGTHS = [0, 1, 2, 3, 4, 17]
CUTS = [[5], [1, 2, 3], [3, 16], [8, 9, 12], []]
PAIRINGS = pytest.mark.parametrize("pairing", ["interleaved", "half"])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def agree(got: dict[str, Tensor], want: dict[str, Tensor], got_in: dict[str, Tensor], want_in: dict[str, Tensor]):
    """Values and all gradients under independent heads on every output."""
    heads = {name: torch.randn_like(tensor) for name, tensor in want.items()}
    check(VALUE[torch.float64], got, want)
    check(GRADIENT[torch.float64], gradients(got, heads, got_in), gradients(want, heads, want_in))


def segment_ids(cuts: list[int], b: int = 2, s: int = 17) -> Tensor:
    ids_s = torch.bucketize(torch.arange(s), torch.tensor(cuts, dtype=torch.long), right=True)
    return (2 * ids_s - 3).expand(b, -1)


def separate_runs(loop: Any, per_token: list[Tensor], carry: Tensor | None, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """`loop(*per_token, carry)` on each segment alone, only the first with the carry."""
    totals, last = [], carry
    for start, end in zip([0, *cuts], [*cuts, per_token[0].shape[1]], strict=True):
        total, last = loop(*(t[:, start:end] for t in per_token), carry if start == 0 else None)
        totals.append(total)
    assert last is not None
    return torch.cat(totals, dim=1), last


def directions(angle_bsha: Tensor, last_bha: Tensor) -> dict[str, Tensor]:
    """Angles are defined up to whole turns, so they are compared by where they point."""
    named = {"angle": angle_bsha, "last": last_bha}
    return {name: torch.stack((torch.cos(angle), torch.sin(angle))) for name, angle in named.items()}


def angle_inputs(b: int = 2, s: int = 17, h: int = 3, a: int = 2) -> dict[str, Tensor]:
    return {"rot_bsa": random(b, s, a), "dt_bsh": random(b, s, h).exp(), "angle_bha": 3 * random(b, h, a)}


@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("s", LENGTHS)
@pytest.mark.parametrize("a", [0, 2])
def test_angle_equals_the_loop(s: int, a: int, carried: bool):
    tensors = angle_inputs(s=s, a=a)
    if not carried:
        del tensors["angle_bha"]
    mine, loop = leaves(tensors), leaves(tensors)
    got, want = running_angle(**mine, rotation_range=1.7), angle_loop(**loop, rotation_range=1.7)
    assert all((angle.abs() <= math.pi).all() for angle in got)
    agree(directions(*got), directions(*want), mine, loop)


@pytest.mark.parametrize("cut", [0, 1, 8, 17])
def test_split_with_the_angle_equals_the_whole(cut: int):
    tensors = angle_inputs()
    parts, whole = leaves(tensors), leaves(tensors)
    rot_bsa, dt_bsh, angle_bha = parts.values()
    first_bsha, angle_bha = running_angle(rot_bsa[:, :cut], dt_bsh[:, :cut], 2.0, angle_bha)
    rest_bsha, angle_bha = running_angle(rot_bsa[:, cut:], dt_bsh[:, cut:], 2.0, angle_bha)
    got = directions(torch.cat((first_bsha, rest_bsha), dim=1), angle_bha)
    agree(got, directions(*running_angle(**whole, rotation_range=2.0)), parts, whole)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("carried", [True, False])
def test_angle_segments_equal_separate_runs(cuts: list[int], carried: bool):
    tensors = angle_inputs()
    if not carried:
        del tensors["angle_bha"]
    packed, apart = leaves(tensors), leaves(tensors)
    got = running_angle(**packed, rotation_range=1.0, segments_bs=segment_ids(cuts))

    def loop(rot_bsa: Tensor, dt_bsh: Tensor, carry: Tensor | None):
        return angle_loop(rot_bsa, dt_bsh, 1.0, carry)

    want = separate_runs(loop, [apart["rot_bsa"], apart["dt_bsh"]], apart.get("angle_bha"), cuts)
    agree(directions(*got), directions(*want), packed, apart)


@pytest.mark.parametrize("s", [0, 1])
@pytest.mark.parametrize("running", [running_angle, running_quaternion])
def test_one_segment_is_the_whole(running: Any, s: int):
    inputs = angle_inputs(s=s) if running is running_angle else quaternion_inputs(s=s)
    got = running(**inputs, segments_bs=torch.full((2, s), 5))
    check(1e-14, named(*got), named(*running(**inputs)))


def test_segments_may_differ_between_rows():
    tensors = angle_inputs(s=6)
    segments_bs = torch.tensor([[0, 0, 1, 1, 1, 1], [4, 4, 4, 4, 4, 7]])
    got_bsha, _ = running_angle(**tensors, rotation_range=1.0, segments_bs=segments_bs)
    for row in range(2):
        alone = {name: t[row : row + 1] for name, t in tensors.items()}
        want_bsha, _ = running_angle(**alone, rotation_range=1.0, segments_bs=segments_bs[row : row + 1])
        check(1e-13, {"angle": got_bsha[row : row + 1]}, {"angle": want_bsha})


@pytest.mark.parametrize("pieces", [1, 100])
def test_float32_angle_stays_true_over_100000_tokens(pieces: int):
    rot_bsa, dt_bsh = torch.randn(1, 100_000, 2) + 0.5, torch.rand(1, 100_000, 1)
    want_bsha = (dt_bsh.double()[..., None] * math.pi * torch.tanh(rot_bsa.double())[:, :, None]).cumsum(dim=1)
    angles, last_bha = [], None
    for rot, dt in zip(rot_bsa.chunk(pieces, dim=1), dt_bsh.chunk(pieces, dim=1), strict=True):
        angle_bsha, last_bha = running_angle(rot, dt, angle_bha=last_bha)
        angles.append(angle_bsha)
    gap = torch.cat(angles, dim=1).double() - want_bsha
    assert want_bsha.abs().max() > 1e4
    assert angles[0].dtype == torch.float32
    assert torch.cat(angles, dim=1).abs().max() <= torch.tensor(math.pi)
    assert torch.atan2(torch.sin(gap), torch.cos(gap)).abs().max() < 1e-4


def test_derivatives_of_the_angle():
    inputs = tuple(leaves(angle_inputs(b=1, s=4, h=2)).values())

    def run(rot_bsa: Tensor, dt_bsh: Tensor, angle_bha: Tensor):
        outputs = directions(*running_angle(rot_bsa, dt_bsh, 2.0, angle_bha, segments_bs=segment_ids([2], 1, 4)))
        return tuple(outputs.values())

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@PAIRINGS
@pytest.mark.parametrize(("r", "a"), [(8, 4), (8, 2), (6, 1), (6, 0)])
@pytest.mark.parametrize("m", [1, 3])
def test_rotation_equals_the_loop(m: int, r: int, a: int, pairing: str):
    tensors = {"x_bsmhr": random(2, 5, m, 3, r), "angle_bsha": 4 * random(2, 5, 3, a)}
    mine, loop = leaves(tensors), leaves(tensors)
    agree({"y": rotate(**mine, pairing=pairing)}, {"y": rotate_loop(**loop, pairing=pairing)}, mine, loop)


@PAIRINGS
def test_derivatives_of_the_rotation(pairing: str):
    inputs = tuple(leaves({"x_bsmhr": random(1, 2, 2, 1, 6), "angle_bsha": random(1, 2, 1, 2)}).values())
    assert torch.autograd.gradcheck(lambda x, angle: rotate(x, angle, pairing), inputs)
    assert torch.autograd.gradgradcheck(lambda x, angle: rotate(x, angle, pairing), inputs)


@PAIRINGS
@given(r=st.integers(0, 5), data=st.data())
def test_rotation_keeps_lengths_and_products(pairing: str, r: int, data: st.DataObject):
    a = data.draw(st.integers(0, r))
    b_bsmhr, c_bsmhr, angle_bsha = random(1, 3, 2, 2, 2 * r), random(1, 3, 2, 2, 2 * r), 9 * random(1, 3, 2, a)
    turned_b, turned_c = rotate(b_bsmhr, angle_bsha, pairing), rotate(c_bsmhr, angle_bsha, pairing)
    got = {"length": turned_b.norm(dim=-1), "product": (turned_b * turned_c).sum(-1)}
    check(1e-12, got, {"length": b_bsmhr.norm(dim=-1), "product": (b_bsmhr * c_bsmhr).sum(-1)})


def quaternion_inputs(b: int = 2, s: int = 17, h: int = 3, j: int = 2) -> dict[str, Tensor]:
    inputs = {"q_bshj4": random(b, s, h, j, 4), "carry_bhj4": random(b, h, j, 4)}
    return {name: q / q.norm(dim=-1, keepdim=True) for name, q in inputs.items()}


def named(total_bshj4: Tensor, last_bhj4: Tensor) -> dict[str, Tensor]:
    return {"total": total_bshj4, "last": last_bhj4}


def test_hamilton_product():
    left, right = random(5, 1, 4), random(5, 3, 4)
    check(1e-14, {"product": multiply(left, right)}, {"product": multiply_loop(left, right)})
    unit = left / left.norm(dim=-1, keepdim=True)
    check(1e-14, {"product": multiply(unit, conjugate(unit))}, {"product": torch.eye(4)[:1].expand(5, 1, 4)})


def test_unit_quaternion_of_narrow_step_sizes():
    """At least float32 all through: products of step sizes are not rounded to theirs."""
    rot_bshj3, dt_bsh = torch.randn(2, 5, 4, 2, 3).bfloat16(), torch.rand(2, 5, 4).bfloat16()
    want_bshj4 = unit_quaternion(rot_bshj3.double(), dt_bsh.double())
    check(1e-6, {"q": unit_quaternion(rot_bshj3, dt_bsh)}, {"q": want_bshj4})


def test_unit_quaternion_equals_the_loop():
    tensors = {"rot_bshj3": random(2, 5, 3, 2, 3), "dt_bsh": random(2, 5, 3).exp()}
    mine, loop = leaves(tensors), leaves(tensors)
    got = unit_quaternion(**mine, rotation_range=1.7)
    agree({"q": got}, {"q": unit_quaternion_loop(**loop, rotation_range=1.7)}, mine, loop)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_zero_generator_is_the_identity_with_a_finite_gradient(dtype: torch.dtype):
    rot_bshj3 = torch.zeros(1, 1, 2, 1, 3, dtype=dtype, requires_grad=True)
    dt_bsh = torch.tensor([[[0.5, 0.25]]], dtype=dtype, requires_grad=True)
    q_bshj4 = unit_quaternion(rot_bshj3, dt_bsh, 2.0)
    d_rot, d_dt = torch.autograd.grad(q_bshj4.sum(), (rot_bshj3, dt_bsh))
    assert torch.equal(q_bshj4.detach(), torch.eye(4)[0].expand_as(q_bshj4).to(q_bshj4.dtype))
    want = (dt_bsh * 2.0 * math.pi / 2)[..., None, None].expand_as(d_rot)
    check(torch.finfo(dtype).eps, {"d_rot": d_rot, "d_dt": d_dt}, {"d_rot": want, "d_dt": torch.zeros(1, 1, 2)})


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e-12, 1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e25])
def test_generator_of_any_size(size: float):
    """Float32 squares leave their range below 1e-19 and above 1e19; direction, length and gradient must not notice."""
    rot = (torch.tensor([3.0, -4.0, 12.0]) / 13 * size).expand(1, 1, 1, 1, 3).clone().requires_grad_()
    q_bshj4 = unit_quaternion(rot, torch.full((1, 1, 1), 0.5))
    (d_rot,) = torch.autograd.grad(q_bshj4[..., 1:].sum(), rot)
    turn = 0.5 * math.pi * math.tanh(size) / 2
    want = torch.tensor([math.cos(turn), *(math.sin(turn) * n / 13 for n in (3, -4, 12))], dtype=torch.float64)
    check(1e-6, {"q": q_bshj4}, {"q": want.expand_as(q_bshj4)})
    check(
        1e-5, {"axis": q_bshj4[..., 1:] / q_bshj4[..., 1:].abs().max()}, {"axis": (want[1:] / want[3]).expand_as(rot)}
    )
    assert d_rot.isfinite().all()
    if size < 1e-4:
        check(1e-6, {"d_rot": d_rot}, {"d_rot": torch.full_like(rot, math.pi / 4)})


@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("s", LENGTHS)
def test_quaternion_equals_the_loop(s: int, carried: bool):
    tensors = quaternion_inputs(s=s)
    if not carried:
        del tensors["carry_bhj4"]
    mine, loop = leaves(tensors), leaves(tensors)
    got, want = named(*running_quaternion(**mine)), named(*quaternion_loop(**loop))
    if s == 0 and carried:  # The loop hands an unused carry on as it is, without the projection to unit length.
        check(VALUE[torch.float64], got, want)
    else:
        agree(got, want, mine, loop)


@pytest.mark.parametrize("cut", [0, 1, 8, 17])
def test_split_with_the_quaternion_equals_the_whole(cut: int):
    tensors = quaternion_inputs()
    parts, whole = leaves(tensors), leaves(tensors)
    q_bshj4, carry_bhj4 = parts.values()
    first_bshj4, carry_bhj4 = running_quaternion(q_bshj4[:, :cut], carry_bhj4)
    rest_bshj4, carry_bhj4 = running_quaternion(q_bshj4[:, cut:], carry_bhj4)
    got = named(torch.cat((first_bshj4, rest_bshj4), dim=1), carry_bhj4)
    agree(got, named(*running_quaternion(**whole)), parts, whole)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("carried", [True, False])
def test_quaternion_segments_equal_separate_runs(cuts: list[int], carried: bool):
    tensors = quaternion_inputs()
    if not carried:
        del tensors["carry_bhj4"]
    packed, apart = leaves(tensors), leaves(tensors)
    got = running_quaternion(**packed, segments_bs=segment_ids(cuts))
    want = separate_runs(quaternion_loop, [apart["q_bshj4"]], apart.get("carry_bhj4"), cuts)
    agree(named(*got), named(*want), packed, apart)


@pytest.mark.parametrize("segmented", [False, True])
def test_derivatives_of_the_quaternion_product(segmented: bool):
    # Off the unit sphere too: the result does not depend on lengths, and the gradient has to say so.
    inputs = tuple(leaves({"q": 1.3 * random(1, 4, 1, 2, 4), "carry": 0.8 * random(1, 1, 2, 4)}).values())
    segments_bs = segment_ids([2], 1, 4) if segmented else None

    def run(q_bshj4: Tensor, carry_bhj4: Tensor):
        return running_quaternion(q_bshj4, carry_bhj4, segments_bs=segments_bs)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_float32_quaternion_stays_unit_and_true_over_5000_tokens():
    rot_bshj3, dt_bsh = torch.randn(1, 5000, 1, 2, 3), torch.rand(1, 5000, 1)
    q_bshj4 = unit_quaternion(rot_bshj3, dt_bsh)
    total_bshj4, last_bhj4 = running_quaternion(q_bshj4)
    exact_bshj4, _ = running_quaternion(unit_quaternion(rot_bshj3.double(), dt_bsh.double()))
    assert (total_bshj4.double().norm(dim=-1) - 1).abs().max() < 1e-6
    assert (total_bshj4 - exact_bshj4).abs().max() < 1e-4
    assert torch.equal(last_bhj4, total_bshj4[:, -1])


@pytest.mark.parametrize(("r", "j"), [(8, 2), (10, 2), (8, 1), (6, 0)])
@pytest.mark.parametrize("m", [1, 3])
def test_quaternion_rotation_equals_the_loop(m: int, r: int, j: int):
    tensors = {"x_bsmhr": random(2, 5, m, 3, r), "q_bshj4": quaternion_inputs(s=5, j=j)["q_bshj4"]}
    mine, loop = leaves(tensors), leaves(tensors)
    agree({"y": rotate_quaternion(**mine)}, {"y": rotate_quaternion_loop(**loop)}, mine, loop)


def test_derivatives_of_the_generator_and_the_quaternion_rotation():
    rot_and_dt = tuple(leaves({"rot": random(1, 2, 2, 1, 3), "dt": random(1, 2, 2).exp()}).values())
    assert torch.autograd.gradcheck(unit_quaternion, rot_and_dt)
    assert torch.autograd.gradgradcheck(unit_quaternion, rot_and_dt)
    x_and_q = tuple(leaves({"x": random(1, 2, 2, 1, 6), "q": random(1, 2, 1, 1, 4)}).values())
    assert torch.autograd.gradcheck(rotate_quaternion, x_and_q)
    assert torch.autograd.gradgradcheck(rotate_quaternion, x_and_q)


@given(j=st.integers(0, 3), rest=st.integers(0, 3))
def test_quaternion_rotation_keeps_lengths_and_products(j: int, rest: int):
    q_bshj4 = quaternion_inputs(b=1, s=3, h=2, j=j)["q_bshj4"]
    b_bsmhr, c_bsmhr = random(1, 3, 2, 2, 4 * j + rest), random(1, 3, 2, 2, 4 * j + rest)
    turned_b, turned_c = rotate_quaternion(b_bsmhr, q_bshj4), rotate_quaternion(c_bsmhr, q_bshj4)
    got = {"length": turned_b.norm(dim=-1), "product": (turned_b * turned_c).sum(-1)}
    check(1e-12, got, {"length": b_bsmhr.norm(dim=-1), "product": (b_bsmhr * c_bsmhr).sum(-1)})


def test_turning_b_and_c_is_turning_the_state():
    """`conj(Q_t) c . conj(Q_s) b = c . (q_t ... q_{s+1}) b`: the factored form is the recurrence it stands for."""
    q_bshj4 = quaternion_inputs(b=1, s=4, h=1, j=1)["q_bshj4"]
    total_bshj4, _ = running_quaternion(q_bshj4)
    b_bsmhr, c_bsmhr = random(1, 4, 1, 1, 4), random(1, 4, 1, 1, 4)
    turned_b, turned_c = rotate_quaternion(b_bsmhr, total_bshj4), rotate_quaternion(c_bsmhr, total_bshj4)
    written = b_bsmhr[0, 1, 0, 0]
    for t in (2, 3):
        written = multiply_loop(q_bshj4[0, t, 0, 0], written)
    got, want = turned_c[0, 3, 0, 0] @ turned_b[0, 1, 0, 0], c_bsmhr[0, 3, 0, 0] @ written
    check(1e-12, {"read": got}, {"read": want})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_turns_in_float32(dtype: torch.dtype):
    x_bsmhr = random(1, 6, 2, 3, 8).to(dtype)
    rot_bsa, dt_bsh, rot_bshj3 = random(1, 6, 3).to(dtype), torch.rand(1, 6, 3), random(1, 6, 3, 2, 3).to(dtype)
    angle_bsha, last_bha = running_angle(rot_bsa, dt_bsh)
    total_bshj4, last_bhj4 = running_quaternion(unit_quaternion(rot_bshj3, dt_bsh))
    assert {t.dtype for t in (angle_bsha, last_bha, total_bshj4, last_bhj4)} == {torch.float32}
    got = {"plane": rotate(x_bsmhr, angle_bsha), "quaternion": rotate_quaternion(x_bsmhr, total_bshj4)}
    exact_bsha, _ = angle_loop(rot_bsa.double(), dt_bsh.double(), 1.0)
    exact_bshj4, _ = quaternion_loop(unit_quaternion_loop(rot_bshj3.double(), dt_bsh.double(), 1.0))
    want = {
        "plane": rotate_loop(x_bsmhr.double(), exact_bsha, "interleaved"),
        "quaternion": rotate_quaternion_loop(x_bsmhr.double(), exact_bshj4),
    }
    assert {t.dtype for t in got.values()} == {dtype}
    check(torch.finfo(dtype).eps, got, want)


def test_autocast_changes_nothing():
    x_bsmhr, rot_bsa, dt_bsh = torch.randn(1, 6, 2, 3, 8), torch.randn(1, 6, 3), torch.rand(1, 6, 3)
    rot_bshj3 = torch.randn(1, 6, 3, 2, 3)

    def turn_both() -> list[Tensor]:
        angle_bsha, _ = running_angle(rot_bsa, dt_bsh)
        q_bshj4, _ = running_quaternion(unit_quaternion(rot_bshj3, dt_bsh))
        return [angle_bsha, q_bshj4, rotate(x_bsmhr, angle_bsha), rotate_quaternion(x_bsmhr, q_bshj4)]

    want = turn_both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = turn_both()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_quaternion_product_is_a_proper_operator():
    torch.library.opcheck(quaternion_product, tuple(leaves(quaternion_inputs(s=5)).values()))


def test_quaternion_product_compiles_in_one_graph():
    def turn(q_bshj4: Tensor, carry_bhj4: Tensor, x_bshj4: Tensor) -> Tensor:
        return multiply(conjugate(quaternion_product(q_bshj4, carry_bhj4)), x_bshj4)

    tensors = quaternion_inputs() | {"x_bshj4": random(2, 17, 3, 2, 4)}
    compiled, eager = leaves(tensors), leaves(tensors)
    got = torch.compile(turn, fullgraph=True, backend="aot_eager")(*compiled.values())
    agree({"y": got}, {"y": turn(*eager.values())}, compiled, eager)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotate(torch.zeros(1, 2, 1, 3, 8), torch.zeros(1, 2, 3, 2), "gptj"), "pairing = 'gptj' is unknown"),
        (lambda: rotate(torch.zeros(1, 2, 1, 3, 7), torch.zeros(1, 2, 3, 2)), "even state axis of at least 4"),
        (lambda: rotate(torch.zeros(1, 2, 1, 3, 4), torch.zeros(1, 2, 3, 3)), "3 angles need .* at least 6 .* got 4"),
        (lambda: rotate(torch.zeros(1, 2, 1, 3, 8), torch.zeros(1, 2, 4, 2)), "axis 'h' is 4 in angle_bsha but 3"),
        (lambda: rotate_quaternion(torch.zeros(1, 2, 1, 3, 7), torch.zeros(1, 2, 3, 2, 4)), "at least 8 .* got 7"),
        (lambda: unit_quaternion(torch.zeros(1, 2, 3, 2, 4), torch.zeros(1, 2, 3)), "rot_bshj3 needs size 3"),
        (lambda: running_quaternion(torch.zeros(1, 2, 3, 2, 3)), "q_bshj4 needs size 4"),
        (lambda: running_angle(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3)), "axis 's' is 3 in dt_bsh but 2 in rot_bsa"),
        (
            lambda: running_angle(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), segments_bs=torch.tensor([[1, 0]])),
            "segments_bs falls from 1 to 0",
        ),
        (
            lambda: running_quaternion(torch.zeros(1, 2, 3, 1, 4), segments_bs=torch.zeros(1, 2)),
            "segments_bs has to hold integer ids",
        ),
    ],
)
def test_bad_input_is_named(call: Any, message: str):
    with pytest.raises(ValueError, match=message):
        call()
