"""Stored numbers from the official implementation; how they were made is in their README."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import ALGORITHMS, dtype_of, path_of
from compare import error, load_golden
from mambakit import SsdPath, ssd, trapezoid
from mambakit.ops.norm import rms_norm
from mambakit.ops.rotation import rotate, running_angle

# The fused kernels compute in float32, everything else in float64.
FLOAT64 = 1e-9
VALUE = {torch.float64: FLOAT64, torch.float32: 1e-5}
GRADIENT = {torch.float64: FLOAT64, torch.float32: 1e-4}
FLOOR = 1e-6

algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


def compare(
    case: dict, compute: Callable[[dict[str, Tensor]], dict[str, Tensor]], dtype: torch.dtype = torch.float64
) -> None:
    """Outputs and every gradient in `dtype`; a bfloat16 case also in its own dtype, at its own tolerance."""
    stored = load_golden(case)
    given = {name: t for name, t in stored.items() if name.startswith(("in.", "param."))}
    wide = {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.items()}
    leaves = {name: t.clone().requires_grad_() for name, t in wide.items() if t.is_floating_point()}
    got = compute({**wide, **leaves})
    outputs = {name[4:]: want for name, want in stored.items() if name.startswith("out.")}
    missing = outputs.keys() - got.keys()
    assert not missing, f"not compared: {sorted(missing)}"
    errors = {name: distance(name, got[name], want) for name, want in outputs.items()}
    if case["loss_terms"]:
        loss = sum((got[term] * stored[f"head.{term}"].to(dtype)).sum() for term in case["loss_terms"])
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)  # type: ignore[arg-type]
        for name, grad in zip(leaves, grads, strict=True):
            want = stored.get(f"grad.{name}")
            assert (want is None) == (grad is None), f"gradient of {name}"
            if grad is not None and want is not None:
                errors[f"grad.{name}"] = error(grad, want, FLOOR)
    bad = {
        name: f"{e:.3g}"
        for name, e in errors.items()
        if not e <= (GRADIENT if name.startswith("grad.") else VALUE)[dtype]
    }
    assert not bad, bad
    if "bfloat16" in case["tol"]:
        narrow = compute(given)
        assert error(narrow["y"], stored["out.y"], FLOOR) <= case["tol"]["bfloat16"]["out"]


def distance(name: str, got: Tensor, want: Tensor) -> float:
    if not name.endswith("angle_state"):
        return error(got, want, FLOOR)
    turn = torch.remainder(got - want + torch.pi, 2 * torch.pi) - torch.pi
    return turn.abs().max().item()


def continued(config: dict, whole: Callable[[dict, dict | None], dict], tokens: dict[str, int], x: dict) -> dict:
    """One call over everything, and the two calls around `split` that have to give the same.

    `whole(inputs, states)` runs a stretch; `tokens` names the time axis of every input.
    """
    out = whole(x, None)
    split = config.get("split")
    if not split:
        return out

    def part(start: int, stop: int | None) -> dict:
        return {
            name: t.narrow(tokens[name], start, (t.shape[tokens[name]] if stop is None else stop) - start)
            if name in tokens
            else t
            for name, t in x.items()
        }

    first = whole(part(0, split), None)
    second = whole(part(split, None), first)
    result = dict(out)
    for name, t in first.items():
        if name == "y":
            joined = torch.cat([t, second["y"]], 1)
            assert error(joined, out["y"], FLOOR) <= VALUE[joined.dtype]
        else:
            result[f"split.{name}"] = t
            assert distance(name, second[name], out[name]) <= VALUE[t.dtype], name
    return result


@algorithms
@pytest.mark.golden("ssd_minimal")
def test_ssd_minimal(case, algorithm):
    config, path = case["config"], path_of(algorithm, case["config"]["block_len"])

    def whole(x, states):
        one = torch.ones_like(x["in.A"])
        entering = x.get("in.initial_states") if states is None else states["final_state"]
        per_head = (x[name][:, :, None] for name in ("in.X", "in.B", "in.C"))
        y, state = ssd(*per_head, x["in.A"], one, one, entering, path=path)
        return {"y": y[:, :, 0], "final_state": state}

    tokens = dict.fromkeys(("in.X", "in.A", "in.B", "in.C"), 1)
    compare(case, lambda x: continued(config, whole, tokens, x), dtype_of(algorithm))


def step_size(dt: Tensor, x: dict, config: dict) -> Tensor:
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    if "in.dt_bias" in x:
        dt = dt + x["in.dt_bias"]
    if config.get("dt_softplus", True):
        dt = torch.where(dt > 38, dt, torch.log1p(torch.exp(dt.clamp(max=38))))
    return dt.clamp(*config.get("dt_limit", (0.0, float("inf"))))


@algorithms
@pytest.mark.golden("ssd_combined")
def test_ssd_combined(case, algorithm):
    config, path = case["config"], path_of(algorithm, case["config"]["chunk_size"])

    def whole(x, states):
        dt = step_size(x["in.dt"], x, config)
        entering = x.get("in.initial_states") if states is None else states["final_state"]
        segments = x.get("in.seq_idx")
        data = (x[name][:, :, None] for name in ("in.x", "in.B", "in.C"))
        wide = None if entering is None else entering.to(dt.dtype)
        y, state = ssd(*data, dt * x["in.A"], dt, dt, wide, path=path, segments_bs=segments)
        y = y[:, :, 0]
        if "in.D" in x:
            skip = x["in.D"]
            y = y + (skip if skip.dim() == 2 else skip[:, None]) * x["in.x"]
        if "in.z" in x:
            y = y * F.silu(x["in.z"])
        out = {"y": y, "final_state": state}
        if "segments" in config and x["in.x"].shape[0] == 1:
            out["varlen_states"] = varlen_states(x, dt, config["segments"][0])
        return out

    def varlen_states(x, dt, lengths):
        """The state at the end of every packed sequence, by running each alone."""
        states, start = [], 0
        for i, length in enumerate(lengths):
            part = slice(start, start + length)
            data = (x[name][:, part, None] for name in ("in.x", "in.B", "in.C"))
            entering = x.get("in.initial_states") if i == 0 else None
            states.append(ssd(*data, (dt * x["in.A"])[:, part], dt[:, part], dt[:, part], entering, path=path)[1][0])
            start += length
        return torch.stack(states)

    tokens = dict.fromkeys(("in.x", "in.dt", "in.B", "in.C", "in.z"), 1)
    compare(case, lambda x: continued(config, whole, tokens, x), dtype_of(algorithm))


@pytest.mark.golden("ssm_update", where=lambda case: "nheads" in case["config"])
def test_ssm_update_with_heads(case):
    """Every (channel, state) pair of a head has its own decay: a head each for the core, one token at a time."""
    config = case["config"]

    def steps(x):
        heads, p, r = config["nheads"], config["dim"], config["dstate"]
        pairs = (heads, p, r)
        state = x["in.state"].reshape(-1, heads * p * r, 1, 1)
        outputs = []
        for t in range(config["steps"]):
            dt = F.softplus(x["in.dt"][:, t] + x.get("in.dt_bias", torch.zeros((), dtype=torch.float64)), threshold=38)
            dt_pair = dt[..., None].expand(-1, *pairs).flatten(1)[:, None]
            decay = (dt[..., None] * x["in.A"]).flatten(1)[:, None]

            def pair(value):
                return value.expand(-1, *pairs).reshape(-1, 1, 1, heads * p * r, 1)

            repeat = heads // config["ngroups"]
            v = pair(x["in.x"][:, t, :, :, None])
            b, c = (pair(x[n][:, t].repeat_interleave(repeat, 1)[:, :, None]) for n in ("in.B", "in.C"))
            y_pair, state = ssd(v, b, c, decay, dt_pair, dt_pair, state)
            y = y_pair.reshape(-1, *pairs).sum(-1)
            if "in.D" in x:
                y = y + x["in.D"] * x["in.x"][:, t]
            outputs.append(y * F.silu(x["in.z"][:, t]) if "in.z" in x else y)
        return {
            "y": torch.stack(outputs, 1),
            "final_state": state.reshape(-1, *pairs),
            "state": state.reshape(-1, *pairs),
        }

    compare(case, steps)


def mamba3_core(x: dict, config: dict, states: dict | None, segments_bs: Tensor | None = None) -> dict:
    """The official Mamba-3 functions, SISO and MIMO, from the ops: bias, rotate, scan, skip, norm, gate, contract."""
    mimo = "in.MIMO_V" in x
    wide = torch.promote_types(x["in.V"].dtype, torch.float32)
    v_bshp, dt_bsh, da_bsh = x["in.V"], x["in.DT"].transpose(1, 2), x["in.ADT"].transpose(1, 2)
    lambda_bsh = torch.sigmoid(x["in.Trap"].transpose(1, 2).to(wide))
    heads = v_bshp.shape[2]
    if states is None and "in.ssm_state" in x:
        states = {name[3:]: t for name, t in x.items() if name.endswith("_state")}
    # The official angles come per head: as many rows as heads.
    angles = [
        running_angle(
            x["in.Angles"][:, :, i],
            dt_bsh[:, :, i : i + 1],
            1.0,
            None if states is None else states["angle_state"][:, i : i + 1],
            segments_bs=segments_bs,
        )
        for i in range(heads)
    ]
    angle_bsha, angle_bha = (torch.cat([a[k] for a in angles], 2 - k) for k in (0, 1))

    def side(name: str) -> Tensor:
        y = x[f"in.{name}"] if mimo else x[f"in.{name}"][:, :, None]
        bias = x[f"in.{name}_bias"].transpose(0, 1) if mimo else x[f"in.{name}_bias"][None]
        y = y.to(wide).repeat_interleave(heads // y.shape[3], 3) + bias
        pairing = "half" if mimo and not config.get("rotate_pairwise") else "interleaved"
        return rotate(y, angle_bsha, pairing).to(v_bshp.dtype)

    def expand(name: str, y: Tensor) -> Tensor:
        """`[..., h, p]` to one copy per rank, each with its own weights."""
        return (y[..., None, :, :] * x[f"in.{name}"].transpose(0, 1)).to(y.dtype) if mimo else y[..., None, :, :]

    b_bsmhr, c_bsmhr = side("K"), side("Q")
    v_bsmhp = expand("MIMO_V", v_bshp)
    carried = {}
    if states is not None:
        k_state = states["k_state"] if mimo else states["k_state"][:, None]
        carried = {
            "state_bhpr": states["ssm_state"],
            "v_last_bmhp": expand("MIMO_V", states["v_state"]),
            "b_last_bmgr": k_state,
        }
    y, state = trapezoid(
        v_bsmhp,
        b_bsmhr,
        c_bsmhr,
        da_bsh,
        dt_bsh,
        lambda_bsh,
        **carried,
        pathway=config["pathway"],
        path=SsdPath(chunk_len=config["chunk_size"]),
        segments_bs=segments_bs,
    )
    if "in.D" in x:
        y = y + x["in.D"][:, None] * v_bsmhp
    if "in.outproj_norm_weight" in x:
        y = rms_norm(y) * x["in.outproj_norm_weight"]
    if "in.Z" in x:
        y = y * F.silu(expand("MIMO_Z", x["in.Z"]))
    if config.get("contract", True):
        y = (y * x["in.MIMO_O"].transpose(0, 1)).sum(2) if mimo else y[:, :, 0]
    k_state = b_bsmhr[:, -1] if mimo else b_bsmhr[:, -1, 0]
    return {"y": y, "angle_state": angle_bha, "ssm_state": state, "k_state": k_state, "v_state": v_bshp[:, -1]}


MAMBA3_TOKENS = {
    **dict.fromkeys(("in.Q", "in.K", "in.V", "in.Z", "in.Angles"), 1),
    **dict.fromkeys(("in.ADT", "in.DT", "in.Trap"), 2),
}


def packed_states(whole: Callable, x: dict, lengths: list[int]) -> dict:
    """One segmented call for `y` where no states enter, and every sequence alone for the states."""
    start, rows = 0, []
    for i, length in enumerate(lengths):
        alone = {n: t.narrow(MAMBA3_TOKENS[n], start, length) if n in MAMBA3_TOKENS else t for n, t in x.items()}
        alone = {n: t[i : i + 1] if n.endswith("_state") else t for n, t in alone.items()}
        rows.append(whole(alone, None))
        start += length
    out = {name: torch.cat([row[name] for row in rows], 1 if name == "y" else 0) for name in rows[0]}
    if "in.ssm_state" not in x:
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        together = whole(x, None, ids)
        assert error(together["y"], out["y"], FLOOR) <= FLOAT64
        for name in ("angle_state", "ssm_state"):
            assert distance(name, together[name], out[name][-1:]) <= FLOAT64, name
    return out


@pytest.mark.parametrize("pathway", ["single", "double"])
@pytest.mark.golden("mamba3_siso", "mamba3_mimo")
def test_mamba3_cores(case, pathway):
    config = {**case["config"], "pathway": pathway}

    def whole(x, states, segments_bs=None):
        return mamba3_core(x, config, states, segments_bs)

    def compute(x):
        if "segments" in config:
            return packed_states(whole, x, config["segments"])
        return continued(config, whole, MAMBA3_TOKENS, x)

    compare(case, compute)
