"""Each family is a filling of the core, and each special case reduces to the simpler one."""

import pytest
import torch

from cases import ALGORITHMS, dtype_of, gradient_tolerance, random_segments, value_tolerance
from compare import check, gradients, leaves
from mambakit import Mamba2SsdInput, Mamba3DoubleSsdInput, Mamba3SingleSsdInput, selective_scan, ssd, trapezoid
from oracles.ssd import mamba2, mamba3
from test_agreement import algorithms

SHAPE = {"b": 2, "s": 12, "m": 2, "h": 4, "p": 3, "g": 2, "r": 4}


def normal(axes: str, **sizes: int) -> torch.Tensor:
    return torch.randn(*({**SHAPE, **sizes}[axis] for axis in axes), dtype=torch.float64)


def uniform(axes: str, low: float, high: float) -> torch.Tensor:
    return torch.rand(*(SHAPE[axis] for axis in axes), dtype=torch.float64) * (high - low) + low


def trapezoid_inputs() -> dict:
    dt = uniform("bsh", 0.05, 0.3)
    return {
        "v_bsmhp": normal("bsmhp"),
        "b_bsmgr": normal("bsmgr"),
        "c_bsmgr": normal("bsmgr"),
        "da_bsh": -dt * uniform("h", 0.5, 1.0),
        "dt_bsh": dt,
        "lambda_bsh": uniform("bsh", 0.1, 0.9),
        "state_bhpr": normal("bhpr"),
        "v_last_bmhp": normal("bmhp"),
        "b_last_bmgr": normal("bmgr"),
    }


def oracle(inputs: dict, segments_bs=None):
    return mamba3(*inputs.values(), segments_bs=segments_bs)


@algorithms
@pytest.mark.parametrize("pathway", ["single", "double"])
@pytest.mark.parametrize("packed", [False, True])
def test_trapezoid_equals_its_recurrence(algorithm, pathway, packed):
    """Values, state and all nine gradients, the boundary write included."""
    inputs, heads = trapezoid_inputs(), {"y": normal("bsmhp"), "state": normal("bhpr")}
    segments_bs = random_segments(2, 12) if packed else None
    results = []
    for function in (
        lambda **x: trapezoid(**x, pathway=pathway, path=ALGORITHMS[algorithm], segments_bs=segments_bs),
        lambda **x: oracle(x, segments_bs),
    ):
        fresh = leaves(inputs, dtype_of(algorithm))
        y, state = function(**fresh)
        outputs = {"y": y, "state": state}
        results.append({**outputs, **gradients(outputs, heads, fresh)})
    check(gradient_tolerance(algorithm, 1e-10), *results)


@pytest.mark.parametrize("pathways", [("single", "double"), ("double", "single")])
@pytest.mark.parametrize("at", [0, 1, 5, 11, 12])
def test_pathways_switch_at_any_cut(pathways, at):
    inputs = trapezoid_inputs()
    want = oracle(inputs)
    sequence, carried = dict(list(inputs.items())[:6]), dict(list(inputs.items())[6:])
    first, state = trapezoid(**{k: t[:, :at] for k, t in sequence.items()}, **carried, pathway=pathways[0])
    if at:
        carried = {"v_last_bmhp": inputs["v_bsmhp"][:, at - 1], "b_last_bmgr": inputs["b_bsmgr"][:, at - 1]}
    carried = {**carried, "state_bhpr": state}
    second, state = trapezoid(**{k: t[:, at:] for k, t in sequence.items()}, **carried, pathway=pathways[1])
    check(1e-12, {"y": torch.cat([first, second], 1), "state": state}, {"y": want[0], "state": want[1]})


def test_without_a_token_before_the_call():
    inputs = trapezoid_inputs()
    inputs["v_last_bmhp"] = torch.zeros_like(inputs["v_last_bmhp"])
    inputs["state_bhpr"] = torch.zeros_like(inputs["state_bhpr"])
    want = oracle(inputs)
    for pathway in ("single", "double"):
        y, state = trapezoid(**dict(list(inputs.items())[:6]), pathway=pathway)
        check(1e-12, {"y": y, "state": state}, {"y": want[0], "state": want[1]})


def test_trapezoid_with_lambda_one_is_mamba2():
    inputs = {**trapezoid_inputs(), "lambda_bsh": torch.ones(2, 12, 4, dtype=torch.float64)}
    core = {name: inputs[name] for name in ("v_bsmhp", "b_bsmgr", "c_bsmgr", "da_bsh")}
    y, state = ssd(*core.values(), inputs["dt_bsh"], inputs["dt_bsh"], inputs["state_bhpr"])
    for pathway in ("single", "double"):
        got_y, got_state = trapezoid(**inputs, pathway=pathway)
        check(1e-12, {"y": got_y, "state": got_state}, {"y": y, "state": state})


def test_mamba2_bundle_is_the_core_with_dt_twice():
    x, dt, a = normal("bshp"), uniform("bsh", 0.05, 0.3), -uniform("h", 0.5, 1.0)
    b, c, state = normal("bsgr"), normal("bsgr"), normal("bhpr")
    for d in (normal("h"), normal("hp")):
        bundle = Mamba2SsdInput(
            x_bnlhp=x.unflatten(1, (3, 4)),
            dt_bnlh=dt.unflatten(1, (3, 4)),
            a_decay_h=a,
            b_bnlgr=b.unflatten(1, (3, 4)),
            c_bnlgr=c.unflatten(1, (3, 4)),
            d_h=d,
            initial_state_bhpr=state,
        )
        y, last = bundle.run()
        want = mamba2(x, dt, a, b, c, d if d.dim() == 2 else d[:, None], state)
        check(1e-12, {"y": y.flatten(1, 2), "state": last}, {"y": want[0], "state": want[1]})


def test_mamba3_bundles_are_the_two_pathways():
    """The double bundle twice, and the single one once, equal the trapezoidal recurrence."""
    inputs = trapezoid_inputs()
    v, _, _, da, dt, lam, state, v_last, b_last = inputs.values()
    b, c = (inputs[name].repeat_interleave(2, 3) for name in ("b_bsmgr", "c_bsmgr"))
    b_last = b_last.repeat_interleave(2, 2)
    want = dict(zip(("y", "state"), oracle(inputs), strict=True))
    gamma, left = lam * dt, (1 - lam) * dt
    beta = left * da.exp()

    def chunked(t):
        return t.unflatten(1, (3, 4))

    def double(v_scaled, b_scaled, entering):
        bundle = Mamba3DoubleSsdInput(
            v_bnlmhp=chunked(v_scaled),
            b_bnlmhr=chunked(b_scaled),
            c_bnlmhr=chunked(c),
            da_bnlh=chunked(da),
            initial_state_bhpr=entering,
        )
        y, last = bundle.run()
        return y.flatten(1, 2), last

    v_late = torch.cat([v_last[:, None], v[:, :-1]], 1)
    b_late = torch.cat([b_last[:, None], b[:, :-1]], 1)
    now = double(gamma[:, :, None, :, None] * v, b, state)
    late = double(beta[:, :, None, :, None] * v_late, b_late, torch.zeros_like(state))
    check(1e-12, {"y": now[0] + late[0], "state": now[1] + late[1]}, want)

    single = Mamba3SingleSsdInput(
        v_bnlmhp=chunked(v),
        b_bnlmhr=chunked(b),
        c_bnlmhr=chunked(c),
        da_bnlh=chunked(da),
        gamma_bnlh=chunked(gamma),
        scale_bnlh=chunked(gamma + torch.nn.functional.pad(left[:, 1:], (0, 0, 0, 1))),
        initial_state_bhpr=state + left[:, 0, :, None, None] * torch.einsum("bmhp,bmhr->bhpr", v_last, b_last),
    )
    y, last = single.run()
    check(1e-12, {"y": y.flatten(1, 2), "state": last}, want)


@algorithms
def test_groups_equal_repeated_heads(algorithm):
    v, b, c = normal("bsmhp"), normal("bsmgr"), normal("bsmgr")
    da, now, later = -uniform("bsh", 0.1, 1), normal("bsh"), normal("bsh")
    v, b, c, da, now, later = (t.to(dtype_of(algorithm)) for t in (v, b, c, da, now, later))
    path = ALGORITHMS[algorithm]
    want = ssd(v, b.repeat_interleave(2, 3), c.repeat_interleave(2, 3), da, now, later, path=path)
    got = ssd(v, b, c, da, now, later, path=path)
    check(value_tolerance(algorithm, 1e-12), {"y": got[0], "state": got[1]}, {"y": want[0], "state": want[1]})


def test_mamba1_is_the_core_with_one_head_per_channel_and_state():
    """One decay per (channel, state) pair: a head each, with one channel and one state entry."""
    channels, rank, length = 3, 4, 9
    x, dt = normal("bsp", s=length), torch.rand(2, length, channels, dtype=torch.float64)
    a, b, c = -torch.rand(channels, rank, dtype=torch.float64), normal("bsr", s=length), normal("bsr", s=length)
    state = normal("bpr")
    y, last = selective_scan(x, dt, a, b[:, :, None], c[:, :, None], state)

    pairs = channels * rank
    v = x[..., None].expand(-1, -1, -1, rank).reshape(2, length, 1, pairs, 1)
    dt_pair = dt[..., None].expand(-1, -1, -1, rank).reshape(2, length, pairs)
    b_pair = b[:, :, None].expand(-1, -1, channels, -1).reshape(2, length, 1, pairs, 1)
    c_pair = c[:, :, None].expand(-1, -1, channels, -1).reshape(2, length, 1, pairs, 1)
    y_pair, last_pair = ssd(v, b_pair, c_pair, dt_pair * a.flatten(), dt_pair, dt_pair, state.reshape(2, pairs, 1, 1))
    got = {"y": y_pair.reshape(2, length, channels, rank).sum(-1), "state": last_pair.reshape(2, channels, rank)}
    check(1e-12, got, {"y": y, "state": last})
