"""Mamba-1's scan: equal to the recurrence in values and gradients, whatever the length, blocks, groups and dtype."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import DTYPE
from compare import GRADIENT, VALUE, check, gradients, leaves, load_golden
from mambakit.kernels.cpu.library import why_missing
from mambakit.ops import selective_scan as module
from mambakit.ops.selective_scan import SELECTIVE_SCAN, selective_scan
from oracles.selective_scan import selective_scan_loop

# Entries per block and fewest tokens in it, for rows of 6 channels and 3 state entries (18 entries a token).
BLOCKS = {"default": None, "one token": (1, 1), "4 tokens, one row": (72, 4), "5 tokens, two rows": (180, 5)}


no_kernels = pytest.mark.skipif(why_missing() is not None, reason=f"no kernels: {why_missing()}")
both = pytest.mark.parametrize("backend", [b if b != "cpu" else pytest.param(b, marks=no_kernels) for b in DTYPE])
VALUES = {"torch": 1e-10, "cpu": 1e-5, "triton": 1e-5}
GRADIENTS = {"torch": 1e-9, "cpu": 1e-4, "triton": 1e-4}


@contextmanager
def block_size(elements_and_tokens: tuple[int, int] | None):
    if elements_and_tokens is None:
        yield
        return
    elements, tokens = elements_and_tokens
    with mock.patch.multiple(module, BLOCK_ELEMENTS=elements, BLOCK_TOKENS=tokens):
        yield


def draw(b=3, s=9, i=6, r=3, g=2, dt_scale=1.0, state=True) -> dict[str, Tensor]:
    tensors = {
        "x_bsi": torch.randn(b, s, i),
        "dt_bsi": torch.rand(b, s, i) * dt_scale,
        "a_ir": -3 * torch.rand(i, r) - 0.01,
        "b_bsgr": torch.randn(b, s, g, r),
        "c_bsgr": torch.randn(b, s, g, r),
    }
    if state:
        tensors["state_bir"] = torch.randn(b, i, r)
    return {name: t.double() for name, t in tensors.items()}


def draw_complex(**sizes) -> dict[str, Tensor]:
    tensors = draw(**sizes)
    phases = {name: torch.randn_like(tensors[name]) for name in tensors.keys() - {"x_bsi", "dt_bsi"}}
    return {name: torch.complex(t, phases[name]) if name in phases else t for name, t in tensors.items()}


def run(scan, tensors: dict[str, Tensor], **options) -> dict[str, Tensor]:
    y_bsi, state_bir = scan(**tensors, **options)
    return {"y": y_bsi, "state": torch.view_as_real(state_bir) if state_bir.is_complex() else state_bir}


def cast(tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """In the dtype that `backend` is tested in."""
    return {name: t if t.is_complex() else t.to(DTYPE[backend]) for name, t in tensors.items()}


def agree(tensors: dict[str, Tensor], backend: str, **options) -> None:
    """Values and every gradient equal the loop's, with independent heads on `y` and on the state."""
    given = leaves(cast(tensors, backend))
    exact = leaves({name: t if t.is_complex() else t.double() for name, t in given.items()})
    got, want = run(selective_scan, given, backend=backend, **options), run(selective_scan_loop, exact, **options)
    check(VALUES[backend], got, want)
    heads = {name: torch.randn_like(t) for name, t in want.items()}
    check(GRADIENTS[backend], gradients(got, heads, given), gradients(want, heads, exact))


def cut(tensors: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """The same tokens only, without the entering state."""
    return {
        name: t if name == "a_ir" else t[:, start:stop] for name, t in tensors.items() if name not in ("state_bir",)
    }


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("s", [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17])
def test_equals_the_loop(s, blocks):
    with block_size(blocks):
        agree(draw(s=s), "torch")


@no_kernels
@pytest.mark.parametrize("s", [0, 1, 2, 9, 31, 32, 33, 63, 64, 65, 130])
def test_the_kernel_equals_the_loop(s):
    agree(draw(s=s), "cpu")


@both
@pytest.mark.parametrize("s", [0, 1, 9, 70])
@pytest.mark.parametrize("left_out", ["nothing", "skip_i", "z_bsi", "dt_bias_i", "dt_softplus"])
def test_what_is_around_the_scan(left_out, s, backend):
    """Bias and softplus of the step sizes, skip and gate of the output."""
    tensors = draw(s=s)
    tensors["dt_bsi"] = torch.randn(3, s, 6).double()
    tensors |= {"skip_i": torch.randn(6), "z_bsi": torch.randn(3, s, 6), "dt_bias_i": torch.randn(6)}
    dt_softplus = left_out != "dt_softplus"
    if not dt_softplus:
        tensors |= {"dt_bsi": tensors["dt_bsi"].abs(), "dt_bias_i": tensors["dt_bias_i"].abs()}
    tensors.pop(left_out, None)
    given = leaves(cast(tensors, backend))
    exact = leaves(given, torch.float64)
    inner = {name: t for name, t in exact.items() if name not in ("skip_i", "z_bsi", "dt_bias_i")}
    dt_bsi = inner["dt_bsi"] + exact["dt_bias_i"] if "dt_bias_i" in exact else inner["dt_bsi"]
    inner["dt_bsi"] = torch.logaddexp(dt_bsi, torch.zeros_like(dt_bsi)) if dt_softplus else dt_bsi
    want = run(selective_scan_loop, inner)
    want["y"] = want["y"] + exact["skip_i"] * exact["x_bsi"] if "skip_i" in exact else want["y"]
    want["y"] = want["y"] * F.silu(exact["z_bsi"]) if "z_bsi" in exact else want["y"]
    got = run(selective_scan, given, dt_softplus=dt_softplus, backend=backend)
    check(VALUES[backend], got, want)
    heads = {name: torch.randn_like(t) for name, t in want.items()}
    check(GRADIENTS[backend], gradients(got, heads, given), gradients(want, heads, exact))


@pytest.mark.parametrize("s", [28, 29, 30, 57])
def test_equals_the_loop_around_the_default_block(s):
    tensors = draw(b=1, s=s, i=600, r=15, g=1)
    _, token_slices = module.plan_blocks(tensors["x_bsi"], tensors["a_ir"])
    assert token_slices[0].stop == 29
    agree(tensors, "torch")


@both
@pytest.mark.parametrize("g", [1, 2, 3, 6])
def test_groups_are_runs_of_channels(g, backend):
    with block_size((72, 4)):
        agree(draw(g=g), backend)


@both
def test_starts_from_zero_without_a_state(backend):
    agree(draw(state=False), backend)
    agree(draw(state=False, s=1), backend)


@pytest.mark.parametrize("s", [0, 1, 9])
def test_complex_states_stand_for_conjugate_pairs(s):
    with block_size((72, 4)):
        agree(draw_complex(s=s), "torch")


def test_a_complex_a_takes_real_b_and_c():
    tensors = draw_complex()
    tensors |= {name: tensors[name].real.clone() for name in ("b_bsgr", "c_bsgr")}
    agree(tensors, "torch")


@pytest.mark.parametrize(
    ("blocks", "backend"), [*((size, "torch") for size in BLOCKS.values()), pytest.param(None, "cpu", marks=no_kernels)]
)
def test_segments_restart_the_state(blocks, backend):
    ids = [[0, 0, 0, 0, 1, 1, 1, 1, 2], [5, 5, 6, 7, 9, 9, 9, 9, 9], [1, 1, 1, 1, 1, 2, 2, 2, 2]]
    with block_size(blocks):
        agree(draw(), backend, segments_bs=torch.tensor(ids))


@both
@pytest.mark.parametrize("edge", [1, 3, 4, 5, 8])
def test_packed_equals_separate(edge, backend):
    tensors = cast(draw(b=1), backend)
    segments_bs = (torch.arange(9) >= edge).long()[None]
    with block_size((72, 4)):
        packed = run(selective_scan, tensors, segments_bs=segments_bs, backend=backend)
        first = run(selective_scan, {**cut(tensors, 0, edge), "state_bir": tensors["state_bir"]}, backend=backend)
        second = run(selective_scan, cut(tensors, edge, 9), backend=backend)
    check(
        1e-12 if backend == "torch" else 1e-6,
        packed,
        {"y": torch.cat((first["y"], second["y"]), dim=1), "state": second["state"]},
    )


@both
@pytest.mark.parametrize(
    "wanted", [["x_bsi"], ["dt_bsi"], ["a_ir"], ["b_bsgr"], ["c_bsgr"], ["state_bir"], ["a_ir", "c_bsgr"]]
)
def test_only_some_inputs_need_gradients(wanted, backend):
    tensors = draw()
    got, want = leaves(cast(tensors, backend)), leaves(tensors)
    for name in tensors.keys() - set(wanted):
        got[name].requires_grad_(False)
    with block_size((72, 4)):
        outputs = run(selective_scan, got, backend=backend)
    exact = run(selective_scan_loop, want)
    heads = {name: torch.randn_like(t) for name, t in exact.items()}
    got_grads = gradients(outputs, heads, {name: got[name] for name in wanted})
    check(GRADIENTS[backend], got_grads, gradients(exact, heads, {name: want[name] for name in wanted}))


@both
@pytest.mark.parametrize("used", ["y", "state"])
def test_an_output_left_out_of_the_loss_counts_as_zero(used, backend):
    tensors = draw()
    got, want = leaves(cast(tensors, backend)), leaves(tensors)
    heads = {used: torch.randn_like(run(selective_scan_loop, tensors)[used])}
    got_grads = gradients(run(selective_scan, got, backend=backend), heads, got)
    check(GRADIENTS[backend], got_grads, gradients(run(selective_scan_loop, want), heads, want))


def test_gradcheck():
    with block_size((72, 4)):
        inputs = [t.requires_grad_() for t in draw(b=2, s=6, i=2, r=2).values()]
        assert torch.autograd.gradcheck(selective_scan, inputs)


@both
def test_a_second_derivative_raises(backend):
    given = leaves(cast(draw(), backend))
    y_bsi, _ = selective_scan(**given, backend=backend)
    (d_x_bsi,) = torch.autograd.grad(y_bsi.square().sum(), given["x_bsi"], create_graph=True)
    with pytest.raises(RuntimeError, match="selective_scan has no second derivative here"):
        d_x_bsi.square().sum().backward()


@both
def test_keeps_the_inputs_only(backend):
    given = leaves(cast(draw(s=50), backend))
    kept = []
    with block_size((72, 4)), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        selective_scan(**given, backend=backend)
    assert sorted(t.data_ptr() for t in kept) == sorted(t.data_ptr() for t in given.values())


def test_holds_the_states_of_one_block_and_one_per_block():
    given, block_sizes, kept_sizes = leaves(draw(b=7, s=50)), [], []
    scan_block, block_gradients = module.scan_block, module.block_gradients

    def watch_block(*arguments):
        decay_lbgrp, state_lbgrp = scan_block(*arguments)
        block_sizes.append(state_lbgrp.numel())
        return decay_lbgrp, state_lbgrp

    def watch_kept(tokens, a_grp, state_bgrp, *rest):
        kept_sizes.append(state_bgrp.untyped_storage().nbytes() // state_bgrp.element_size())
        return block_gradients(tokens, a_grp, state_bgrp, *rest)

    with block_size((180, 5)), mock.patch.multiple(module, scan_block=watch_block, block_gradients=watch_kept):
        y_bsi, state_bir = selective_scan(**given, backend="torch")
        (y_bsi.sum() + state_bir.sum()).backward()
    assert max(block_sizes) == 2 * 18 * 5
    assert max(kept_sizes) == 2 * 18


@both
@pytest.mark.parametrize("s", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype, s, backend):
    tensors = {name: t.to(dtype) for name, t in draw(s=s).items()}
    given, exact = leaves(tensors), leaves(tensors, torch.float64)
    with block_size((72, 4)):
        got = run(selective_scan, given, backend=backend)
    want = run(selective_scan_loop, exact)
    assert got["y"].dtype == dtype
    assert got["state"].dtype == torch.float32
    check(VALUE[dtype], {"y": got["y"]}, {"y": want["y"]})
    check(VALUE[torch.float32], {"state": got["state"]}, {"state": want["state"]})
    heads = {name: torch.randn_like(t).to(dtype) for name, t in want.items()}
    got_grads = gradients(got, heads, given)
    assert all(grad.dtype == dtype for grad in got_grads.values())
    check(GRADIENT[dtype], got_grads, gradients(want, heads, exact))


@both
@pytest.mark.parametrize("s", [1, 9])
def test_narrow_inputs_go_with_wide_decays(s, backend):
    tensors = draw(s=s)
    mixed = {n: t.bfloat16() if n in ("x_bsi", "b_bsgr", "c_bsgr") else t.float() for n, t in tensors.items()}
    given, exact = leaves(mixed), leaves(mixed, torch.float64)
    got, want = run(selective_scan, given, backend=backend), run(selective_scan_loop, exact)
    check(VALUE[torch.float32], {"state": got["state"]}, {"state": want["state"]})
    check(VALUE[torch.bfloat16], got, want)


@both
@pytest.mark.parametrize("s", [1, 9])
def test_autocast_changes_nothing(s, backend):
    tensors = {name: t.float() for name, t in draw(s=s).items()}
    plain, inside = leaves(tensors), leaves(tensors)
    want = run(selective_scan, plain, backend=backend)
    heads = {name: torch.randn_like(t) for name, t in want.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(selective_scan, inside, backend=backend)
        got_grads = gradients(got, heads, inside)
    check(0, got, want)
    check(0, got_grads, gradients(want, heads, plain))


@both
@pytest.mark.parametrize("dt", [100.0, 1e-6])
def test_strong_and_tiny_decays_in_float32(dt, backend):
    tensors = {name: t.float() for name, t in draw(s=40, dt_scale=dt).items()}
    given, exact = leaves(tensors), leaves(tensors, torch.float64)
    with block_size((72, 4)):
        got = run(selective_scan, given, backend=backend)
    want = run(selective_scan_loop, exact)
    check(1e-5, got, want, floor=1e-12)
    heads = {name: torch.randn_like(t) for name, t in want.items()}
    check(1e-4, gradients(got, heads, given), gradients(want, heads, exact), floor=1e-12)


@both
@pytest.mark.parametrize("s", [1, 40])
def test_an_entry_that_forgets_everything(s, backend):
    """`a` of -inf is as any whose decay underflows: zero, and so are its gradients."""
    tensors = draw(s=s)
    forgets_ir = torch.rand(6, 3) < 0.5
    given = leaves(cast({**tensors, "a_ir": tensors["a_ir"].masked_fill(forgets_ir, -torch.inf)}, backend))
    exact = leaves({**tensors, "a_ir": tensors["a_ir"].masked_fill(forgets_ir, -1e300)}, torch.float64)
    got, want = run(selective_scan, given, backend=backend), run(selective_scan_loop, exact)
    check(VALUES[backend], got, want)
    heads = {name: torch.randn_like(t) for name, t in want.items()}
    check(GRADIENTS[backend], gradients(got, heads, given), gradients(want, heads, exact))


@both
def test_inputs_may_have_any_strides(backend):
    tensors = cast(draw(), backend)
    flipped = {name: t.transpose(0, -1).contiguous().transpose(0, -1) for name, t in tensors.items()}
    given, plain = leaves(flipped), leaves(tensors)
    assert not given["x_bsi"].is_contiguous()
    got, want = (run(selective_scan, inputs, backend=backend) for inputs in (given, plain))
    check(VALUES[backend], got, want)
    heads = {name: torch.randn_like(t).expand_as(t) for name, t in want.items()}
    check(GRADIENTS[backend], gradients(got, heads, given), gradients(want, heads, plain))


@both
def test_an_empty_batch_gives_an_empty_result(backend):
    y_bsi, state_bir = selective_scan(**cast(draw(b=0), backend), backend=backend)
    assert y_bsi.shape == (0, 9, 6)
    assert state_bir.shape == (0, 6, 3)


@both
@pytest.mark.parametrize("s", [0, 1, 9])
def test_outputs_share_no_memory_with_inputs(s, backend):
    tensors = cast(draw(s=s), backend)
    for out in selective_scan(**tensors, backend=backend):
        assert all(
            out.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() or not t.numel()
            for t in tensors.values()
        )


sizes = st.fixed_dictionaries(
    {"b": st.integers(1, 3), "s": st.integers(2, 20), "r": st.integers(1, 4), "g": st.integers(1, 3)}
)
blocks = st.tuples(st.integers(1, 300), st.integers(1, 7))


@both
@settings(max_examples=40)
@given(sizes, blocks, st.data())
def test_splitting_anywhere_changes_nothing(backend, sizes, blocks, data):
    tensors = cast(draw(**sizes, i=2 * sizes["g"]), backend)
    middle = data.draw(st.integers(0, sizes["s"]))
    with block_size(blocks):
        first = run(selective_scan, {**cut(tensors, 0, middle), "state_bir": tensors["state_bir"]}, backend=backend)
        rest = {**cut(tensors, middle, sizes["s"]), "state_bir": first["state"]}
        second = run(selective_scan, rest, backend=backend)
    got = {"y": torch.cat((first["y"], second["y"]), dim=1), "state": second["state"]}
    check(1e-12 if backend == "torch" else 1e-6, got, run(selective_scan, tensors, backend=backend))


@both
@settings(max_examples=40)
@given(sizes, blocks, st.data())
def test_no_token_sees_a_later_one(backend, sizes, blocks, data):
    tensors = cast(draw(**sizes, i=2 * sizes["g"]), backend)
    changed = data.draw(st.integers(1, sizes["s"] - 1))
    other = {
        name: t
        if name in ("a_ir", "state_bir")
        else torch.cat((t[:, :changed], torch.rand_like(t[:, changed:])), dim=1)
        for name, t in tensors.items()
    }
    with block_size(blocks):
        got, want = (run(selective_scan, inputs, backend=backend) for inputs in (other, tensors))
    assert torch.equal(got["y"][:, :changed], want["y"][:, :changed])
    assert not torch.equal(got["y"][:, changed], want["y"][:, changed])


@settings(max_examples=40)
@given(sizes, blocks, st.floats(-3, 3))
def test_linear_in_x_and_state(sizes, blocks, scale):
    one, two = draw(**sizes, i=2 * sizes["g"]), draw(**sizes, i=2 * sizes["g"])
    summed = {**one, **{name: one[name] + scale * two[name] for name in ("x_bsi", "state_bir")}}
    other = {**one, **{name: two[name] for name in ("x_bsi", "state_bir")}}
    with block_size(blocks):
        of_one, of_other, of_sum = (run(selective_scan, tensors) for tensors in (one, other, summed))
    check(1e-11, of_sum, {name: of_one[name] + scale * of_other[name] for name in of_one})


@both
@settings(max_examples=40)
@given(sizes, blocks, st.data())
def test_segments_anywhere_equal_the_loop(backend, sizes, blocks, data):
    steps = data.draw(st.lists(st.integers(0, 1), min_size=sizes["b"] * sizes["s"], max_size=sizes["b"] * sizes["s"]))
    segments_bs = torch.tensor(steps).view(sizes["b"], sizes["s"]).cumsum(dim=1)
    with block_size(blocks):
        agree(draw(**sizes, i=2 * sizes["g"]), backend, segments_bs=segments_bs)


def official_scan(tensors: dict[str, Tensor], config: dict, start: int, stop: int, state: Tensor | None = None):
    """The official interface: `u`, `delta`, `z` as (b, d, l). In float32 and bfloat16 it is the kernel that runs."""
    get = {name.removeprefix("in."): t for name, t in tensors.items()}
    dtype = get["u"].dtype
    batch = len(get["u"])

    def per_group(t: Tensor) -> Tensor:
        if t.dim() == 2:
            return t.expand(batch, stop - start, *t.shape)
        t_bgrs = t if t.dim() == 4 else t[:, None]
        if config.get("complex"):
            t_bgrs = torch.view_as_complex(t_bgrs.unflatten(-1, (-1, 2)))
        return t_bgrs[..., start:stop].permute(0, 3, 1, 2)

    b_bsgr, c_bsgr = per_group(get["B"]), per_group(get["C"])
    groups = max(b_bsgr.shape[2], c_bsgr.shape[2])
    b_bsgr, c_bsgr = (t.repeat_interleave(groups // t.shape[2], dim=2) for t in (b_bsgr, c_bsgr))
    a_ir = torch.complex(get["A_re"], get["A_im"]) if config.get("complex") else get["A"]
    u_bsi, dt_bsi = (get[name][..., start:stop].mT for name in ("u", "delta"))
    y_bsi, last_bir = selective_scan(
        u_bsi,
        dt_bsi,
        a_ir,
        b_bsgr,
        c_bsgr,
        state,
        skip_i=get.get("D"),
        z_bsi=get["z"][..., start:stop].mT if "z" in get else None,
        dt_bias_i=get.get("delta_bias"),
        dt_softplus=config.get("softplus", True),
    )
    outputs = {"y": y_bsi.mT.to(dtype)}
    if config.get("complex"):
        return outputs | {"last_state_re": last_bir.real, "last_state_im": last_bir.imag}, last_bir
    return outputs | {"last_state": last_bir}, last_bir


@pytest.mark.golden("mamba1_scan")
@pytest.mark.parametrize("blocks", [None, (72, 4)], ids=["one block", "small blocks"])
def test_golden_scan(case, blocks):
    for dtype, tolerance in case["tol"].items():
        if dtype == "float64":
            tolerance = {"out": 1e-9, "grad": 1e-9}
        with block_size(blocks):
            compare_with_golden(case, load_golden(case), dtype, tolerance["out"], tolerance["grad"])


def compare_with_golden(case, stored: dict[str, Tensor], dtype: str, out: float, grad: float) -> None:
    """Outputs, gradients, and the states and outputs of a run in two parts. Bfloat16 cases are stored as bfloat16."""
    inputs = {name: t for name, t in stored.items() if name.startswith("in.")}
    given = leaves(inputs, None if dtype == "bfloat16" else getattr(torch, dtype))
    length = stored["in.u"].shape[-1]
    got, _ = official_scan(given, case["config"], 0, length)
    check(out, got, {name: stored[f"out.{name}"] for name in got}, floor=1e-6)
    heads = {name: stored[f"head.{name}"] for name in case["loss_terms"]}
    grads = {name.removeprefix("grad."): t for name, t in stored.items() if name.startswith("grad.")}
    check(grad, gradients(got, heads, given), grads, floor=1e-6)
    if split := case["config"].get("split"):
        first, state = official_scan(given, case["config"], 0, split)
        check(out, first, {name: stored[f"out.split.{name}"] for name in first if name != "y"}, floor=1e-6)
        rest, _ = official_scan(given, case["config"], split, length, state)
        check(
            out,
            rest,
            {name: stored[f"out.{name}"][..., split:] if name == "y" else stored[f"out.{name}"] for name in rest},
            floor=1e-6,
        )


@pytest.mark.golden("ssm_update")
@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_update(case, dtype, one_by_one):
    stored = load_golden(case)
    get = {name.removeprefix("in."): t.to(dtype) for name, t in stored.items() if name.startswith("in.")}
    if "nheads" in case["config"]:
        merged = {"x": (2, 3), "dt": (2, 3), "z": (2, 3), "A": (0, 1), "D": (0, 1), "dt_bias": (0, 1), "state": (1, 2)}
        get |= {name: get[name].flatten(*axes) for name, axes in merged.items() if name in get}
    else:
        get |= {name: get[name].unsqueeze(2) for name in ("B", "C")}
    dt_bsi = get["dt"] + get["dt_bias"] if "dt_bias" in get else get["dt"]
    dt_bsi = torch.logaddexp(dt_bsi, torch.zeros_like(dt_bsi))
    state_bir, length = get["state"], dt_bsi.shape[1]
    spans = [slice(t, t + 1) for t in range(length)] if one_by_one else [slice(0, length)]
    y = []
    for span in spans:
        per_token = (get["x"][:, span], dt_bsi[:, span], get["A"], get["B"][:, span], get["C"][:, span])
        y_bsi, state_bir = selective_scan(*per_token, state_bir)
        y.append(y_bsi + get["D"] * get["x"][:, span] if "D" in get else y_bsi)
    y_bsi = torch.cat(y, dim=1) * (F.silu(get["z"]) if "z" in get else 1)
    got = {"y": y_bsi.view_as(stored["out.y"]), "final_state": state_bir.view_as(stored["out.final_state"])}
    tolerance = 1e-9 if dtype == torch.float64 else case["tol"]["float32"]["out"]
    check(tolerance, got, {name: stored[f"out.{name}"] for name in got}, floor=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dt_bsi": torch.rand(3, 8, 6)}, "axis 's' is 8 in dt_bsi but 9 in x_bsi"),
        ({"a_ir": torch.rand(5, 3)}, "axis 'i' is 5 in a_ir but 6 in x_bsi"),
        ({"c_bsgr": torch.rand(3, 9, 2, 4)}, "axis 'r' is 4 in c_bsgr but 3 in a_ir"),
        ({"b_bsgr": torch.rand(3, 9, 3)}, "b_bsgr needs 4 axes"),
        ({"b_bsgr": torch.rand(3, 9, 4, 3), "c_bsgr": torch.rand(3, 9, 4, 3)}, "6, not a multiple of the 4 groups"),
        ({"b_bsgr": torch.rand(3, 9, 0, 3), "c_bsgr": torch.rand(3, 9, 0, 3)}, "6, not a multiple of the 0 groups"),
        ({"state_bir": torch.rand(2, 6, 3)}, "axis 'b' is 2 in state_bir but 3 in x_bsi"),
        ({"x_bsi": torch.ones(3, 9, 6, dtype=torch.int64)}, "x_bsi is torch.int64"),
        ({"a_ir": torch.rand(6, 3, dtype=torch.float64)}, "a_ir is torch.float64 but x_bsi is torch.float32"),
        ({"b_bsgr": torch.rand(3, 9, 2, 3, dtype=torch.complex64)}, "b_bsgr.*complex"),
        ({"x_bsi": torch.rand(3, 9, 6, dtype=torch.complex64)}, "x_bsi.*complex"),
        ({"c_bsgr": torch.rand(3, 9, 2, 3, device="meta")}, "c_bsgr is on meta but x_bsi on cpu"),
        ({"segments_bs": torch.tensor([[0, 1, 0, 0, 0, 0, 0, 0, 0]] * 3)}, "segments_bs falls from 1 to 0 at token 2"),
        ({"segments_bs": torch.zeros(3, 9)}, "integer ids"),
    ],
)
def test_bad_input_is_named(change, message):
    tensors = {name: t.float() for name, t in draw().items()}
    with pytest.raises(ValueError, match=message):
        selective_scan(**{**tensors, **change})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_opcheck(dtype):
    tensors = draw_complex() if dtype.is_complex else draw()
    x_bsi, dt_bsi, a_ir, b_bsgr, c_bsgr, state_bir = (
        t.to(torch.complex64 if t.is_complex() else torch.float32) for t in tensors.values()
    )
    if dtype == torch.bfloat16:
        x_bsi, b_bsgr, c_bsgr = (t.to(dtype) for t in (x_bsi, b_bsgr, c_bsgr))
    fresh_bs = torch.arange(9).expand(3, 9) == 5
    floats = (x_bsi, dt_bsi, a_ir, b_bsgr, c_bsgr, state_bir)
    around = (None, None, None, fresh_bs, False)
    torch.library.opcheck(SELECTIVE_SCAN.operator, (*(t.clone().requires_grad_() for t in floats), *around, "torch"))
    needs = [True, False, True, True, False, True, False, False, False]
    torch.library.opcheck(SELECTIVE_SCAN.operator_backward, ([x_bsi, state_bir], *floats, *around, needs, "torch"))


@no_kernels
@pytest.mark.parametrize("state", [True, False])
def test_opcheck_of_the_kernel(state):
    tensors = {name: t.float() for name, t in draw(i=130, g=1, state=state).items()}
    floats = [*tensors.values(), *([] if state else [None]), torch.randn(130), torch.randn(3, 9, 130), torch.randn(130)]
    fresh_bs = torch.arange(9).expand(3, 9) == 5
    leaves = (None if t is None else t.clone().requires_grad_() for t in floats)
    torch.library.opcheck(SELECTIVE_SCAN.operator, (*leaves, fresh_bs, True, "cpu"))
    needs = [t is not None and name != "b_bsgr" for name, t in zip([*tensors, *"hdzb"], floats, strict=False)]
    d_last_bir = torch.randn(3, 130, 3)
    given = ([floats[0], d_last_bir], *floats, fresh_bs, True, needs, "cpu")
    torch.library.opcheck(SELECTIVE_SCAN.operator_backward, given)


def test_the_kernel_is_refused_by_name():
    with pytest.raises(ValueError, match='backend "cpu" cannot run selective_scan'):
        selective_scan(**draw(), backend="cpu")
    with pytest.raises(ValueError, match='backend "cpu" cannot run selective_scan'):
        selective_scan(**draw_complex(), backend="cpu")


@both
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiles_in_one_graph(backend):
    tensors = {name: t.float() for name, t in draw().items()}
    segments_bs = torch.tensor([[0] * 4 + [1] * 5] * 3)
    compiled, eager = leaves(tensors), leaves(tensors)
    got = run(torch.compile(selective_scan, fullgraph=True), compiled, segments_bs=segments_bs, backend=backend)
    want = run(selective_scan, eager, segments_bs=segments_bs, backend=backend)
    check(1e-6, got, want)
    heads = {name: torch.randn_like(t) for name, t in want.items()}
    check(1e-6, gradients(got, heads, compiled), gradients(want, heads, eager))


@both
def test_exports_as_one_operator(backend):
    class Scan(torch.nn.Module):
        def forward(self, x_bsi, dt_bsi, a_ir, b_bsgr, c_bsgr):
            return selective_scan(x_bsi, dt_bsi, a_ir, b_bsgr, c_bsgr, backend=backend)

    tensors = cast(draw(state=False), backend)
    length = torch.export.Dim("length", min=2)
    dynamic = {name: None if name == "a_ir" else {1: length} for name in tensors}
    exported = torch.export.export(Scan(), (), kwargs=tensors, dynamic_shapes=dynamic)
    called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert called.count(SELECTIVE_SCAN.operator) == 1
    longer = cast(draw(state=False, s=21), backend)
    got, want = exported.module()(**longer), selective_scan_loop(**longer)
    check(VALUES[backend], dict(zip("ys", got, strict=True)), dict(zip("ys", want, strict=True)))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_outputs_are_rounded_once(dtype, length, backend):
    """After skip and gate: each element is the nearest number to the exact one, as far as float32 knows."""
    shapes = {"x_bsi": (2, length, 8), "dt_bsi": (2, length, 8), "a_ir": (8, 4), "b_bsgr": (2, length, 1, 4)}
    shapes |= {"c_bsgr": (2, length, 1, 4), "skip_i": (8,), "z_bsi": (2, length, 8)}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    tensors |= {"dt_bsi": tensors["dt_bsi"].abs(), "a_ir": -tensors["a_ir"].abs()}
    got_bsi, _ = selective_scan(**tensors, backend=backend)
    want_bsi, _ = selective_scan(**{name: t.double() for name, t in tensors.items()}, backend="torch")
    off = (got_bsi.double() - want_bsi).abs() / (want_bsi.abs() + 0.01)
    assert off.max() < 0.51 * torch.finfo(dtype).eps
