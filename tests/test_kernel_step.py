"""The fused decoding steps: equal to the plain ones, taken exactly when they apply, and nothing is written into."""

import copy
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from blocks import MAKE, MAMBAS, make_block, random_cache, tensors_of, tokens
from compare import check, error, load_golden
from mambakit import Mamba1, Mamba1Config, Mamba2, Mamba2Config, Mamba3, Mamba3Config, SsdPath
from mambakit.kernels.cpu.library import library, why_missing
from mambakit.ops import fused_step as step
from mambakit.ops.backends import use_backend
from mambakit.ops.operation import OPERATIONS, Kernel
from test_golden_blocks import build, official_states

pytestmark = pytest.mark.skipif(why_missing() is not None, reason="the kernels are not built")

TOLERANCE = 1e-5
FUZZ = int(os.environ.get("MAMBAKIT_FUZZ", "200"))
OPERATORS = {"mamba1": ("mamba1_step_conv", "mamba1_step"), "mamba2": ("mamba2_step",), "mamba3": ("mamba3_step",)}
MAMBA1 = step.MAMBA1_STEP.kernels["cpu"]


@pytest.fixture
def ran(monkeypatch):
    """The names of the kernels that ran, in order."""
    names = []

    call, steps = Kernel.__call__, {name for family in OPERATORS.values() for name in family}

    def recorded(kernel, *inputs):
        if kernel.operation.name in steps:
            names.append(kernel.operation.name)
        return call(kernel, *inputs)

    monkeypatch.setattr(Kernel, "__call__", recorded)
    return names


def wide(value):
    """A block or a cache in float64, where the plain operators run."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    return type(value)(*(t.double() if isinstance(t, Tensor) else t for t in value))


def walk(block, x_bsd, cache):
    """Token by token without gradients: outputs and the tensors of the last cache."""
    outputs = []
    with torch.no_grad():
        for x_bd in x_bsd.unbind(1):
            y_bd, cache = block.step(x_bd, cache)
            outputs.append(y_bd)
    return {"y": torch.stack(outputs, 1), **tensors_of(cache)}


def check_steps(block, x_bsd, cache, tolerance=TOLERANCE):
    want = walk(wide(block), x_bsd.double(), wide(cache))
    check(tolerance, walk(block, x_bsd, cache), want, floor=1e-3)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", MAMBAS)
def test_every_option(name, batch, ran):
    block = make_block(name, torch.float32)
    check_steps(block, tokens(block, batch, 3), random_cache(block, batch))
    family = name.split("-")[0]
    assert ran == 3 * list(OPERATORS[family])


@pytest.mark.parametrize("changed", [["B_norm"], ["norm"], ["B_norm", "C_norm", "norm"]])
def test_an_epsilon_changed_by_hand(changed, ran):
    block = make_block("mamba3-mimo", torch.float32)
    for name in changed:
        getattr(block, name).eps = 0.5
    x_bsd, cache = tokens(block, 2, 3), random_cache(block, 2)
    ran.clear()
    check_steps(block, x_bsd, cache)
    assert len(ran) == (3 if len(changed) == 3 else 0)
    with torch.no_grad():
        check(TOLERANCE, {"y": block(x_bsd, cache)[0]}, {"y": walk(wide(block), x_bsd.double(), wide(cache))["y"]})


@pytest.mark.parametrize("name", MAMBAS)
def test_many_steps_are_a_forward(name):
    block = make_block(name, torch.float32)
    x, cache = tokens(block, 2, 200), random_cache(block, 2)
    with torch.no_grad():
        y, last = wide(block)(x.double(), wide(cache))
    check(1e-5, walk(block, x, cache), {"y": y, **tensors_of(last)}, floor=1e-3)


@pytest.mark.parametrize("name", MAMBAS)
def test_a_call_with_one_token_is_a_step(name, ran):
    block = make_block(name, torch.float32)
    x, cache = tokens(block, 2, 1), random_cache(block, 2)
    with torch.inference_mode():
        y, after = block(x, cache)
        y_step, after_step = block.step(x[:, 0], cache)
    assert len(ran) == 2 * len(OPERATORS[name.split("-")[0]])
    assert torch.equal(y[:, 0], y_step)
    check(0, tensors_of(after), tensors_of(after_step))


def check_restart(block, x_bsd, cache, reset_b, backend="auto"):
    """A token, before which some rows start afresh: each as it is alone, whatever it carried."""
    exact, rows = wide(block), []
    for row, starts in enumerate(reset_b.tolist()):
        entering = exact.fresh_cache(1) if starts else wide(of_row(cache, row))
        rows.append(walk(exact, x_bsd[row : row + 1].double(), entering))
    want = {name: torch.cat([one[name] for one in rows]) for name in rows[0]}
    # What is not read cannot spoil anything.
    spoilt = [t.detach().clone() if isinstance(t, Tensor) else t for t in cache]
    for tensor in filter(torch.is_tensor, spoilt):
        tensor[reset_b] = math.nan
    with torch.no_grad(), use_backend(backend):
        y_bd, after = block.step(x_bsd[:, 0], type(cache)(*spoilt), reset_b=reset_b)
    check(TOLERANCE, {"y": y_bd[:, None], **tensors_of(after)}, want, floor=1e-3)


def of_row(cache, row):
    return type(cache)(*(t[row : row + 1] if isinstance(t, Tensor) else t for t in cache))


@pytest.mark.parametrize("flags", [(True, False, True, False, False), (False,) * 3, (True,), (True, True)], ids=str)
@pytest.mark.parametrize("name", MAMBAS)
def test_rows_that_start_afresh(name, flags, ran):
    block, reset_b = make_block(name, torch.float32), torch.tensor(flags)
    check_restart(block, tokens(block, len(flags), 1), random_cache(block, len(flags)), reset_b)
    assert ran == list(OPERATORS[name.split("-")[0]])


@pytest.mark.parametrize("name", ["mamba1", "mamba2-learned", "mamba3-mimo", "mamba3-learned"])
def test_a_restart_by_any_way_is_the_same(name, ran):
    """By flags of a whole number, in a compiled step, with gradients and in torch's operators."""
    torch._dynamo.reset()
    block = make_block(name, torch.float32)
    x, cache, reset_b = tokens(block, 3, 1)[:, 0], random_cache(block, 3), torch.tensor([0, 1, 0])
    with torch.no_grad():
        y, after = block.step(x, cache, reset_b=reset_b)
        compiled = torch.compile(block.step, fullgraph=True, backend="aot_eager")(x, cache, reset_b=reset_b.bool())
        ran.clear()
        plain = block(x[:, None], cache, reset_bs=reset_b[:, None], path=SsdPath(backend="torch"))
    with_grad = block.step(x, cache, reset_b=reset_b)
    assert not ran
    with_grad[0].sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())
    for y_other, after_other in (compiled, (plain[0][:, 0], plain[1]), with_grad):
        check(1e-5, {"y": y_other, **tensors_of(after_other)}, {"y": y, **tensors_of(after)}, floor=1e-3)


# Random configs. A width of 4 is enough for a projection; all that counts comes after it.


def random_config(draw: random.Random):
    family = draw.choice(("mamba1", "mamba2", "mamba3"))
    if family == "mamba1":
        return Mamba1Config(
            d_model=4,
            expand=draw.randint(1, 700) / 4 + 0.25,
            state_rank=draw.choice((1, 2, 3, 7, 8, 15, 16, 17, 32, 64, draw.randint(1, 256))),
            conv_kernel=draw.randint(1, 6),
            conv_bias=draw.random() < 0.7,
            bias=draw.random() < 0.3,
        )
    p = draw.choice((1, 7, 16, 48, 64, 80, 128, draw.randint(1, 130)))
    groups, per_group = draw.randint(1, 3), draw.randint(1, 3)
    width = p * groups * per_group
    r = draw.choice((1, 2, 3, 16, 31, 64, 128, 256, draw.randint(1, 256)))
    dt_limit = draw.choice(((0.0, math.inf), (0.0, math.inf), (0.01, 0.5)))
    learned = draw.random() < 0.2
    if family == "mamba2":
        mlp = draw.choice((0, 0, draw.randint(1, 70)))
        divisors = [n for n in range(1, width + 1) if width % n == 0]
        return Mamba2Config(
            **{"d_model": 4, "expand": (width + mlp) / 4, "d_ssm": width, "state_rank": r, "per_head_dim": p},
            **{"ngroups": groups, "dt_limit": dt_limit, "learnable_init_states": learned},
            conv_kernel=draw.choice((1, 2, 3, 4, 4, 5)),
            D_has_hdim=draw.random() < 0.3,
            rmsnorm=draw.random() < 0.8,
            norm_before_gate=draw.random() < 0.3,
            norm_group_size=draw.choice((None, None, draw.choice(divisors))),
            conv_bias=draw.random() < 0.7,
            bias=draw.random() < 0.3,
        )
    quaternions = draw.random() < 0.3
    return Mamba3Config(
        **{
            "d_model": 4,
            "expand": width / 4,
            "state_rank": r + r % 2 if not quaternions else 8 * (r // 8 + 1),
            "per_head_dim": p,
            "ngroups": groups,
        },
        **{"dt_limit": dt_limit, "learnable_init_states": learned},
        is_mimo=draw.random() < 0.6,
        mimo_rank=draw.randint(1, 9),
        rope_fraction=draw.choice((0.0, 0.5, 1.0)),
        rotation="quaternion" if quaternions else "complex",
        rotation_range=draw.choice((1.0, 2.0)),
        a_activation=draw.choice(("heavy_tail", "softplus")),
        is_outproj_norm=draw.random() < 0.4,
    )


def random_case(seed: int):
    """A block off its initial values, three tokens, and a cache that no call has made."""
    draw = random.Random(seed)
    config, batch = random_config(draw), draw.randint(1, 5)
    torch.manual_seed(seed)
    block = MAKE[type(config)](config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    cache = block.fresh_cache(batch)
    new = {name: torch.randn(shape) for name, shape in block.cache_shapes(batch).items()}
    # Angles are what they are only in [-pi, pi], and nothing turns without any; a quaternion of any length is a turn.
    if "rotation" in new and config.rotation == "quaternion" and config.rope_dim == 0:
        new["rotation"] = cache.rotation
    elif "rotation" in new and config.rotation == "complex":
        new["rotation"] = (2 * torch.rand_like(new["rotation"]) - 1) * math.pi * (config.rope_dim > 0)
    cache = cache if draw.random() < 0.2 else cache._replace(**new)
    return block, torch.randn(batch, 3, 4), cache


@pytest.mark.parametrize("start", range(0, FUZZ, 25))
def test_random_blocks(start, ran):
    for seed in range(start, min(start + 25, FUZZ)):
        block, x, cache = random_case(seed)
        before = len(ran)
        try:
            check_steps(block, x, cache)
            check_restart(block, x[:, :1], cache, torch.rand(len(x)) < 0.5)
        except AssertionError as failure:
            raise AssertionError(f"seed {seed}, {block.config}: {failure}") from None
        assert len(ran) > before, block.config


@pytest.mark.parametrize("isa", ["avx2", "plain"])
def test_other_instruction_sets(isa):
    if isa not in library().usable:
        pytest.skip(f"this machine has no {isa}")
    settings = {"MAMBAKIT_ISA": isa, "MAMBAKIT_FUZZ": str(FUZZ // 4)}
    chosen = "random_blocks or every_option"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, __file__],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]


# Large enough for a second thread.
LARGE = {
    "mamba1": Mamba1Config(d_model=600, state_rank=32),
    "mamba2": Mamba2Config(d_model=128, ngroups=2),
    "mamba3": Mamba3Config(d_model=128),
    "mamba3-mimo": Mamba3Config(d_model=128, is_mimo=True, mimo_rank=3),
    "mamba3-quaternion": Mamba3Config(d_model=128, rotation="quaternion"),
}


@pytest.mark.parametrize("name", LARGE)
def test_threads_and_repetition_change_no_bit(name):
    torch.manual_seed(0)
    block = MAKE[type(LARGE[name])](LARGE[name])
    x, cache = tokens(block, 3, 1)[:, 0], random_cache(block, 3)

    def results():
        # The projections are not ours to repeat.
        with torch.no_grad():
            return fused(block, projected, cache)

    with torch.no_grad():
        projected = block.in_proj(x[:, None])
    first = results()
    again = [results() for _ in range(3)]
    torch.set_num_threads(2)
    try:
        again += [results() for _ in range(3)]
    finally:
        torch.set_num_threads(1)
    for other in again:
        check(0, other, first)
    check_steps(block, x[:, None], cache)


def fused(block, projected, cache) -> dict[str, Tensor]:
    """Everything but the output projection, which adds its own rounding."""
    seen = {}
    hook = block.out_proj.register_forward_pre_hook(lambda module, args: seen.update(y=args[0]))
    after = block.fused_step(projected, cache)[1]
    hook.remove()
    return {**seen, **tensors_of(after)}


@pytest.mark.parametrize("name", MAMBAS)
def test_caches_are_never_written_into(name):
    block = make_block(name, torch.float32)
    cache = random_cache(block, 2)
    kept = [t.clone() for t in cache if isinstance(t, Tensor)]
    with torch.no_grad():
        _, after = block.step(tokens(block, 2, 1)[:, 0], cache)
    for tensor, copied, new in zip(cache, kept, after, strict=False):
        assert torch.equal(tensor, copied)
        assert tensor.data_ptr() != new.data_ptr()


def operator_arguments(block, projected, cache) -> list:
    """What a block hands to its operator."""
    given, call = {}, Kernel.__call__

    def recorded(kernel, *inputs):
        given[kernel.operation.name] = list(inputs)
        return call(kernel, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "__call__", recorded)
        block.fused_step(projected[:, None], cache)
    return given[f"{type(block).__name__.lower()}_step"]


# When it is taken, and when not.


def test_the_torch_backend_stays_plain(ran):
    for name in ("mamba1", "mamba2", "mamba3"):
        block = make_block(name, torch.float32)
        with torch.no_grad():
            block(tokens(block, 2, 1), path=SsdPath(backend="torch"))
            assert not ran
            block(tokens(block, 2, 1), path=SsdPath(backend="cpu"))
            assert ran.pop() == f"{name}_step"
            ran.clear()


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
def test_gradients_take_the_plain_way(name, ran):
    block = make_block(name, torch.float32)
    x, cache = tokens(block, 2, 1)[:, 0], random_cache(block, 2)
    y, _ = block.step(x, cache)
    y.sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    block.requires_grad_(False)
    for i in range(2):
        entering = type(cache)(*(t.requires_grad_(j == i) if isinstance(t, Tensor) else t for j, t in enumerate(cache)))
        assert torch.autograd.grad(block.step(x, entering)[0].sum(), entering[i])[0].any()
        entering[i].requires_grad_(False)
    given = x.clone().requires_grad_()
    assert torch.autograd.grad(block.step(given, cache)[0].sum(), given)[0].any()
    assert not ran
    block.step(x, cache)
    assert ran, "nothing needs a gradient"
    ran.clear()
    # Trained behind the kernel: what it feeds is a constant to them.
    block.out_proj.requires_grad_()
    assert torch.autograd.grad(block.step(x, cache)[0].sum(), block.out_proj.weight)[0].any()
    assert not ran


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its formulas
@torch.no_grad()
def test_derivatives_that_reach_past_no_grad(ran):
    block = make_block("mamba3", torch.float32)
    x, cache = tokens(block, 2, 1)[:, 0], random_cache(block, 2)
    slope = torch.func.jvp(lambda x: block.step(x, cache)[0], (x,), (torch.ones_like(x),))[1]
    assert not ran
    twin, width = wide(block), 1e-6
    ends = [twin.step(x.double() + sign * width, wide(cache))[0] for sign in (1, -1)]
    check(1e-4, {"slope": slope}, {"slope": (ends[0] - ends[1]) / (2 * width)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_take_the_plain_way(dtype, ran):
    for name in ("mamba1", "mamba2", "mamba3"):
        block = make_block(name, dtype)
        with torch.no_grad():
            assert block.step(tokens(block, 2, 1)[:, 0].to(dtype))[0].dtype == dtype
    block = make_block("mamba2", torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        block.step(tokens(block, 2, 1)[:, 0])
    assert not ran


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
def test_modules_are_called(name, ran):
    """Hooks on projections run beside the kernel; hooks on what the kernel swallows keep it away."""
    block = make_block(name, torch.float32)
    x = tokens(block, 2, 1)[:, 0]
    for child, module in block.named_children():
        called = []
        hook = module.register_forward_hook(lambda *_, called=called: called.append(1))
        with torch.no_grad():
            block.step(x)
        hook.remove()
        assert called, child
        assert bool(ran) == ("proj" in child), child
        ran.clear()


@torch.no_grad()
def test_a_changed_convolution_counts(ran):
    block = make_block("mamba1", torch.float32)
    x, cache = tokens(block, 2, 1)[:, 0], random_cache(block, 2)
    before = block.step(x, cache)[0]
    block.conv1d = nn.Sequential(block.conv1d)
    ran.clear()
    torch.testing.assert_close(block.step(x, cache)[0], before)
    assert not ran


def test_masks_and_packing_take_the_plain_way(ran):
    block = make_block("mamba2", torch.float32)
    x = tokens(block, 1, 1)
    here = torch.ones(1, 1, dtype=torch.bool)
    with torch.no_grad():
        want = block(x)[0]
        ran.clear()
        for option in ({"mask_bs": here}, {"cu_seqlens": torch.tensor([0, 1])}):
            torch.testing.assert_close(block(x, **option)[0], want)
    assert not ran


# Against the official numbers.


@pytest.mark.golden("ssm_update")
def test_golden_updates(case):
    """Every channel with its own decays: Mamba-1's scan, a call for each group of heads."""
    config, x = case["config"], load_golden(case)
    groups, r = config.get("ngroups", 1), config["dstate"]
    batch, steps = x["in.x"].shape[:2]
    # Without a gate, one that lets everything through: silu(1.2784645) = 1.
    z = x.get("in.z", torch.full_like(x["in.x"], 1.2784645))
    dt = x["in.dt"] + x.get("in.dt_bias", torch.zeros(()))
    D = x.get("in.D", torch.zeros(x["in.A"].shape[:-1]))
    channels = D.numel() // groups
    states, outputs = [], []
    for g in range(groups):
        own = slice(g * channels, (g + 1) * channels)
        state = x["in.state"].flatten(1, -2)[:, own]
        A_log = (-x["in.A"]).log().flatten(0, -2)[own]
        for t in range(steps):
            value, gate, size = (v[:, t].flatten(1)[:, own] for v in (x["in.x"], z, dt))
            bc = torch.cat([x[name][:, t].reshape(batch, groups, r)[:, g] for name in ("in.B", "in.C")], 1)
            y, state = MAMBA1(torch.cat([value, gate], 1), value, size, bc, state, A_log, D.flatten()[own], None)
            outputs.append(y)
        states.append(state)
    y = torch.stack(outputs).unflatten(0, (groups, steps)).permute(2, 1, 0, 3)
    got = {"y": y.reshape_as(x["out.y"]), "final_state": torch.cat(states, 1).reshape_as(x["out.final_state"])}
    check(TOLERANCE, got, {name: x[f"out.{name}"] for name in got}, floor=1e-3)


@pytest.mark.golden("mamba1_block", "mamba2_block", "mamba3_block", where=lambda case: case["config"].get("split"))
def test_golden_blocks(case, ran):
    x = load_golden(case)
    block = build(case, torch.float32)
    block.load_state_dict({name[6:]: t for name, t in x.items() if name.startswith("param.")})
    split = case["config"]["split"]
    with torch.no_grad():
        _, cache = block(x["in.u"][:, :split].float())
        got = walk(block, x["in.u"][:, split:].float(), cache)
    assert ran
    want = {"y": x["out.y"][:, split:]}
    for name, field in official_names(cache).items():
        if f"out.final.{name}" in x:
            angle = name == "angle_state"
            want |= {"cos": x["out.final.angle_state"].cos(), "sin": x["out.final.angle_state"].sin()} if angle else {}
            want |= {} if angle else {field: x[f"out.final.{name}"]}
    check(1e-5, got, want, floor=1e-3)


def official_names(cache) -> dict[str, str]:
    """Official states by the field of our cache."""
    fields = {t.data_ptr(): field for field, t in cache._asdict().items() if isinstance(t, Tensor)}
    return {name: fields[t.data_ptr()] for name, t in official_states(cache).items()}


# As torch operators.


@pytest.mark.parametrize("name", ["mamba2-mlp", "mamba3-mimo", "mamba3", "mamba3-quaternion"])
@torch.no_grad()
def test_opcheck(name):
    block = make_block(name, torch.float32)
    arguments = operator_arguments(block, block.in_proj(tokens(block, 2, 1))[:, 0], random_cache(block, 2))
    arguments = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
    torch.library.opcheck(OPERATIONS[f"{name.split('-')[0]}_step"].operator, (*arguments, "cpu"))


@torch.no_grad()
def test_opcheck_of_mamba1():
    projected, window, state = torch.randn(2, 12), torch.randn(2, 6, 4), torch.randn(2, 6, 3)
    weight, bias, x = torch.randn(6, 1, 4), torch.randn(6), torch.randn(2, 6)
    torch.library.opcheck(
        step.MAMBA1_STEP_CONV.operator, (projected, window, weight, bias, torch.tensor([True, False]), "cpu")
    )
    rest = (torch.randn(2, 1 + 6), state, torch.randn(6, 3), bias, None)
    torch.library.opcheck(step.MAMBA1_STEP.operator, (projected, x, x, *rest, "cpu"))


def test_sizes_that_do_not_fit_are_refused():
    block = make_block("mamba2", torch.float32)
    with torch.no_grad():
        projected, cache = block.in_proj(tokens(block, 2, 1))[:, 0], random_cache(block, 2)
        arguments = operator_arguments(block, projected, cache)
        for i in (0, 1, 3, 4, 5, 6, 7, 8):
            short = arguments[i][:, :-1] if i < 2 else arguments[i][:-1]
            with pytest.raises(ValueError, match=r"expected|fit"):
                step.MAMBA2_STEP.operator(*arguments[:i], short, *arguments[i + 1 :], "cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
def test_compile_and_export(name):
    """Without gradients a traced step holds the operator."""
    torch._dynamo.reset()
    block = make_block(name, torch.float32)
    x, cache = tokens(block, 2, 1)[:, 0], random_cache(block, 2)
    with torch.no_grad():
        want = walk(block, x[:, None], cache)
        y, after = torch.compile(block.step, fullgraph=True, backend="aot_eager")(x, cache)
        check(1e-6, {"y": y[:, None], **tensors_of(after)}, want)
        program = torch.export.export(block, (x[:, None], cache))
        assert f"{name}_step" in str(program.graph)
        y, after = program.module()(x[:, None], cache)
        check(1e-6, {"y": y, **tensors_of(after)}, want)


def test_repeated_steps_are_bitwise_equal():
    for kind, config in ((Mamba1, LARGE["mamba1"]), (Mamba2, LARGE["mamba2"]), (Mamba3, LARGE["mamba3-mimo"])):
        block = kind(config)
        x, cache = tokens(block, 1, 1), random_cache(block, 1)
        first = walk(block, x, cache)
        assert all(error(walk(block, x, cache)[name], t) == 0 for name, t in first.items())
