"""Stacks and latent models: virtual layers, residuals, the gradient horizon, and the contract of a block."""

import math
import pickle
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

from blocks import CONFIGS, differentiable, weighed
from compare import check
from mambakit import caches
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.models.latent_model import LatentConfig, LatentModel
from mambakit.models.layer import make_norm
from mambakit.models.multi_gate import MultiGateConfig
from mambakit.models.schedules import Custom, Cyclic, Stretched
from mambakit.models.stack import Stack, StackConfig
from oracles import composition
from test_parity import forward, steps

GATE = MultiGateConfig(n_streams=2, init_bias=-0.5, init_bias_step=0.3)
STACKS: dict[str, tuple[StackConfig, int | None]] = {
    "mamba1": (StackConfig(block=CONFIGS["mamba1"], n_layer=2, rms_norm=False, d_intermediate=9), None),
    "mlp": (StackConfig(block=CONFIGS["mamba2"], n_layer=2, d_intermediate=9), None),
    "cyclic": (StackConfig(block=CONFIGS["mamba3"], n_layer=2, virtual=Cyclic(5), d_intermediate=9), None),
    "stretched": (StackConfig(block=CONFIGS["mamba2"], n_layer=2, virtual=Stretched(3)), 1),
    "custom": (
        StackConfig(block=CONFIGS["mamba3-learned"], n_layer=3, virtual=Custom((2, 0, 0)), ignore_first_residual=True),
        None,
    ),
    "alone": (
        StackConfig(block=CONFIGS["mamba1"], n_layer=3, ignore_first_residual=True, ignore_last_residual=True),
        2,
    ),
    "gated": (StackConfig(block=CONFIGS["mamba3"], n_layer=2, virtual=Cyclic(4), d_intermediate=9, multi_gate=GATE), 3),
    "gated-alone": (
        StackConfig(
            block=CONFIGS["mamba2"],
            n_layer=2,
            virtual=Stretched(4),
            ignore_first_residual=True,
            ignore_last_residual=True,
            multi_gate=MultiGateConfig(n_streams=2, per_virtual_layer=True),
        ),
        0,
    ),
}
every = pytest.mark.parametrize("name", STACKS)


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """Every parameter off its initial value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


def make_stack(name: str) -> Stack:
    torch.manual_seed(0)
    config, horizon = STACKS[name]
    stack = moved(Stack(config, grad_horizon=horizon, dtype=torch.float64))
    assert isinstance(stack, Stack)
    return stack


def tokens(stack: Stack, batch: int, length: int, seed: int = 4) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, stack.d_model, generator=make, dtype=torch.float64)


def tensors_in(cache: Any, where: str = "cache") -> dict[str, Tensor]:
    """A cache's tensors by their places in it."""
    if isinstance(cache, Tensor):
        return {where: cache}
    if not isinstance(cache, tuple):
        return {}
    names: Any = getattr(cache, "_fields", range(len(cache)))
    inside = (tensors_in(part, f"{where}.{name}") for name, part in zip(names, cache, strict=True))
    return {name: tensor for part in inside for name, tensor in part.items()}


def flat(cache: Any) -> dict[str, Tensor]:
    """A cache's tensors by name, angles as directions."""
    named = {}
    for name, tensor in tensors_in(cache).items():
        is_angle = name.endswith("rotation") and tensor.dim() == 3
        named |= {f"{name} cos": tensor.cos(), f"{name} sin": tensor.sin()} if is_angle else {name: tensor}
    return named


def leaves(cache: Any) -> tuple[Any, ...]:
    copy = caches.clone(caches.detach(cache))
    for tensor in tensors_in(copy).values():
        if differentiable(tensor):
            tensor.requires_grad_()
    return copy


def results(stack, run, x: Tensor, cache: Any = None) -> dict[str, Tensor]:
    """Outputs, cache and every gradient of `run(stack, x, cache) -> (y, cache)`."""
    x = x.detach().clone().requires_grad_()
    entering = None if cache is None else leaves(cache)
    y, last = run(stack, x, entering)
    out = {"y": y, **flat(last)}
    inputs = {"x": x, **dict(stack.named_parameters())}
    inputs |= {name: tensor for name, tensor in tensors_in(entering, "entering").items() if differentiable(tensor)}
    grads = torch.autograd.grad(weighed(out), list(inputs.values()), allow_unused=True)
    named = zip(inputs.items(), grads, strict=True)
    return out | {f"d {name}": torch.zeros_like(t) if grad is None else grad for (name, t), grad in named}


def pieces(*cuts):
    def run(stack, x, cache):
        outputs = []
        for start, stop in zip((0, *cuts), (*cuts, x.shape[1]), strict=True):
            y, cache = stack(x[:, start:stop], cache)
            outputs.append(y)
        return torch.cat(outputs, 1), cache

    return run


@every
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
def test_cut_anywhere(name, warm):
    stack = make_stack(name)
    x = tokens(stack, 2, 7)
    cache = caches.detach(stack(tokens(stack, 2, 3, seed=8))[1]) if warm else None
    want = results(stack, forward, x, cache)
    assert len(stack(x)[1]) == len(stack.order)
    for run in (steps, pieces(2), pieces(1, 1, 5)):
        check(1e-9, results(stack, run, x, cache), want)


@every
def test_values_are_those_of_the_layers_one_by_one(name):
    """With the gradient horizon set where there is one: it must not show."""
    stack = make_stack(name)
    config = stack.config
    x = tokens(stack, 1, 5)

    def layer(real):
        part = stack.layers[real]
        mlp = config.d_intermediate > 0

        def run(x_sd):
            if not config.rms_norm:
                return part(x_sd[None])[0][0]
            block = lambda u: part.mixer(u[None])[0][0]  # noqa: E731
            weights = (part.norm2.weight, part.mlp.fc1.weight, part.mlp.fc2.weight) if mlp else (None, x_sd, x_sd)
            return composition.gated_layer(block, x_sd, part.norm.weight, *weights)

        return run

    layers = [layer(real) for real in stack.order]
    alone = (config.ignore_first_residual, config.ignore_last_residual)
    if config.multi_gate is None:
        want = composition.sum_stack(layers, x[0], *alone)
    else:
        by = range(len(layers)) if config.multi_gate.per_virtual_layer else stack.order
        gates = [dict(stack.residual.gates[i].named_parameters()) for i in by]
        want = composition.gated_stack(layers, gates, x[0], config.multi_gate.n_streams, *alone)
    check(1e-12, {"y": stack(x)[0][0]}, {"y": want})


@pytest.mark.parametrize(
    ("schedule", "n_layer", "order"),
    [
        (Cyclic(7), 3, (0, 1, 2, 0, 1, 2, 0)),
        (Cyclic(2), 3, (0, 1)),
        (Stretched(7), 3, (0, 0, 0, 1, 1, 2, 2)),
        (Stretched(6), 3, (0, 0, 1, 1, 2, 2)),
        (Stretched(2), 4, (0, 2)),
        (Custom((1, 0, 1, 1)), 2, (1, 0, 1, 1)),
    ],
)
def test_schedules(schedule, n_layer, order):
    config = StackConfig(block=CONFIGS["mamba1"], n_layer=n_layer, virtual=schedule)
    assert config.order == order
    assert StackConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual": Cyclic(0)}, "no virtual layers"),
        ({"virtual": Custom(())}, "no virtual layers"),
        ({"virtual": Custom((0, 2))}, r"layers \[2\]"),
        ({"virtual": Custom((-1, 0))}, r"layers \[-1\]"),
        ({"virtual": "cyclic"}, "expected Cyclic"),
        ({"stack_latents": ("front",)}, "'front'"),
        ({"stack_latents": (-1,)}, "-1"),
        ({"stack_latents": (True,)}, "True"),
        ({"layer_latents": (("start",),)}, "1 entries for 2 layers"),
        ({"layer_latents": ((), (1.5,))}, "1.5"),
    ],
)
def test_configs_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        StackConfig(block=CONFIGS["mamba1"], n_layer=2, **options)


def test_configs_from_json():
    config = LatentConfig(
        block=CONFIGS["mamba3"],
        n_layer=2,
        virtual=Custom((1, 1, 0)),
        multi_gate=GATE,
        stack_latents=("start", 3),
        layer_latents=(("end",), ()),
        class_tokens=("middle",),
        d_input=3,
        d_output=4,
    )
    assert LatentConfig.from_json(config.to_json()) == config
    values = config.to_dict()
    for change, message in (
        ({"virtual": {"schedule": "Spiral", "n": 3}}, "Spiral"),
        ({"virtual": {"schedule": "Cyclic", "indices": 3}}, "field n"),
        ({"multi_gate": {"streams": 3}}, r"no field 'streams' \(here: n_streams\)"),
    ):
        with pytest.raises(ValueError, match=message):
            LatentConfig.from_dict({**values, **change})


@pytest.mark.parametrize("gate", [None, GATE], ids=["sum", "gated"])
@pytest.mark.parametrize("horizon", [0, 1, 2, 4, 9])
def test_gradients_stop_at_the_horizon(gate, horizon):
    """Against the same layers with the cut written out."""
    torch.manual_seed(0)
    config = StackConfig(block=CONFIGS["mamba2"], n_layer=2, virtual=Cyclic(4), multi_gate=gate)
    stack = moved(Stack(config, grad_horizon=horizon, dtype=torch.float64))
    assert isinstance(stack, Stack)

    def by_hand(stack, x, cache):
        cut, start = max(0, 4 - horizon), x
        streams = stack.residual.seed(x)
        after = []
        for q in range(5):
            if q == cut and cut:
                x = x.detach() + (start - start.detach())
                if streams is not None:
                    streams = streams.detach() + (start - start.detach())[..., None, :]
            if q == 4:
                return x, tuple(after)
            delta, leaving = stack.layers[q % 2](x, cache[q])
            if q < cut:
                leaving = caches.detach(leaving)
            x, streams = stack.residual.join(q, x, streams, delta)
            after.append(leaving)

    x, cache = tokens(stack, 2, 4), caches.detach(stack(tokens(stack, 2, 3, seed=8))[1])
    want = results(stack, by_hand, x, cache)
    check(1e-12, results(stack, forward, x, cache), want)
    check(1e-9, results(stack, steps, x, cache), want)
    norms = {q: want[f"d entering.{q}.ssm_bhpr"].norm() for q in range(4)}
    assert [q for q in range(4) if norms[q] > 0] == list(range(max(0, 4 - horizon), 4))


def test_at_horizon_zero_the_input_has_the_outputs_gradient():
    stack = make_stack("cyclic")
    stack.grad_horizon = 0
    x = tokens(stack, 2, 3).requires_grad_()
    y, _ = stack(x)
    head = torch.randn_like(y)
    assert torch.equal(*torch.autograd.grad((y * head).sum(), x), head)
    assert not stack.step(x.detach()[:, 0])[0].requires_grad
    with torch.no_grad():
        assert not stack(x)[0].requires_grad
    stack.grad_horizon = -1
    with pytest.raises(ValueError, match="-1"):
        stack(x)


@every
def test_checkpointed_layers_have_the_same_gradients(name):
    stack = make_stack(name)
    x, cache = tokens(stack, 2, 5), caches.detach(stack(tokens(stack, 2, 3, seed=8))[1])
    want = results(stack, forward, x, cache)
    calls = [0]
    for layer in stack.layers:
        layer.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    stack.checkpoint_layers = True
    check(1e-12, results(stack, forward, x, cache), want)
    differentiated = len(stack.order) if stack.grad_horizon is None else stack.grad_horizon
    assert calls[0] == len(stack.order) + differentiated
    with torch.no_grad():
        stack(x)
    assert calls[0] == 2 * len(stack.order) + differentiated


MASK = torch.tensor([[m == "1" for m in row] for row in ("000111", "110011", "101100", "000000")])


@every
def test_masked_tokens_are_as_if_deleted(name):
    stack = make_stack(name)
    stack.grad_horizon = None
    x, cache = tokens(stack, 4, 6), caches.detach(stack(tokens(stack, 4, 3, seed=8))[1])
    x[~MASK] = math.nan

    def together(stack, x, cache):
        y, last = stack(x, cache, mask_bs=MASK)
        assert not y[~MASK].any()
        return y, last

    def alone(stack, x, cache):
        rows, last = [], []
        for i in range(4):
            y, leaving = stack(x[i : i + 1, MASK[i]], caches.select(cache, [i]))
            rows.append(
                torch.zeros(1, 6, x.shape[2], dtype=x.dtype).index_put(
                    (torch.tensor([0]), MASK[i].nonzero()[:, 0]), y[0]
                )
            )
            last.append(leaving)
        return torch.cat(rows), caches.concat(last)

    check(1e-10, results(stack, together, x, cache), results(stack, alone, x, cache))


@every
def test_packing_and_resets_are_separate_sequences(name):
    stack = make_stack(name)
    x = tokens(stack, 1, 7)
    bounds = [0, 3, 4, 7]
    cut = list(pairwise(bounds))

    def alone(stack, x, cache):
        done = [stack(x[:, i:j]) for i, j in cut]
        return torch.cat([y for y, _ in done], 1), caches.concat([c for _, c in done])

    def packed(stack, x, cache):
        return stack(x, cu_seqlens=torch.tensor(bounds))

    def reset(stack, x, cache):
        return stack(x, reset_bs=torch.tensor([[t in bounds for t in range(7)]]))

    want = results(stack, alone, x)
    check(1e-10, results(stack, packed, x), want)
    y, last = reset(stack, x, None)
    check(1e-10, {"y": y, **flat(last)}, {"y": want["y"], **flat(caches.select(alone(stack, x, None)[1], [2]))})


@pytest.mark.parametrize("name", ["cyclic", "custom", "gated"])
def test_step_infinite(name):
    torch.manual_seed(0)
    config = STACKS[name][0]
    values = {**config.to_dict(), "d_input": 3, "d_output": 2}
    model = moved(LatentModel(LatentConfig.from_dict(values), dtype=torch.float64))
    assert isinstance(model, LatentModel)
    with torch.no_grad():
        for layer in model.stack.layers:
            layer.mixer.dt_bias.fill_(1.0)  # type: ignore[union-attr, operator]
    x = 0.5 * torch.randn(2, 3, dtype=torch.float64)
    far = model(x[:, None].expand(-1, 2500, -1))[0][:, -1]
    check(1e-8, {"y": model.step_infinite(x)}, {"y": far})


@pytest.mark.parametrize("name", ["mamba1", "mlp"])
def test_step_infinite_needs_mamba3(name):
    stack = make_stack(name)
    with pytest.raises(ValueError, match="mamba3 blocks only"):
        stack.step_infinite(tokens(stack, 1, 1)[:, 0])


def test_what_a_stack_refuses():
    stack = make_stack("cyclic")
    x = tokens(stack, 2, 3)
    _, cache = stack(x)
    for wrong, message in ((cache[:4], "of 4 layers, but this stack has 5"), (cache[0], "got a Mamba3Cache")):
        with pytest.raises(ValueError, match=message):
            stack(x, wrong)
        with pytest.raises(ValueError, match=message):
            stack.step(x[:, 0], wrong)
    for call in (lambda: stack(x[..., :5]), lambda: stack.step(x[:, 0, :5]), lambda: stack.step_infinite(x[:, 0, :5])):
        with pytest.raises(ValueError, match="d_model is 8"):
            call()
    with pytest.raises(ValueError, match="2 axes"):
        stack.step(x)
    with pytest.raises(ValueError, match=r"mask_bs has shape \(2, 2\)"):
        stack(x, mask_bs=torch.ones(2, 2, dtype=torch.bool))


@pytest.mark.parametrize("final_norm", [False, True])
def test_latent_model(final_norm):
    """Projection, stack, norm, projection; any cut gives the same."""
    config, _ = STACKS["mlp"]
    values = {**config.to_dict(), "d_input": 3, "d_output": 2, "final_norm": final_norm}
    torch.manual_seed(0)
    model = moved(LatentModel(LatentConfig.from_dict(values), dtype=torch.float64))
    assert isinstance(model, LatentModel)
    x = torch.randn(2, 6, 3, dtype=torch.float64)

    def by_hand(model, x, cache):
        x, cache = model.stack(x @ model.in_proj.weight.T + model.in_proj.bias, cache)
        x = composition.norm_rows(x) * model.norm_f.weight if final_norm else x
        return x @ model.out_proj.weight.T + model.out_proj.bias, cache

    cache = caches.detach(model(torch.randn(2, 3, 3, dtype=torch.float64))[1])
    want = results(model, by_hand, x, cache)
    for run in (forward, steps, pieces(0, 4)):
        check(1e-9, results(model, run, x, cache), want)
    assert model.prime(cache) == (None, cache)
    for call in (lambda: model(x[..., :2]), lambda: model(x[0]), lambda: model.step(x)):
        with pytest.raises(ValueError, match="d_input = 3"):
            call()


def test_a_bfloat16_model_keeps_a_wide_residual():
    config = LatentConfig(
        block=CONFIGS["mamba2"], n_layer=3, multi_gate=GATE, d_input=3, d_output=2, final_norm=False, d_intermediate=4
    )
    model = LatentModel(config, dtype=torch.bfloat16)
    x = torch.randn(2, 4, 3).bfloat16()
    assert model(x)[0].dtype == torch.bfloat16
    assert model.step(x[:, 0])[0].dtype == torch.bfloat16
    wide = model.stack(model.in_proj(x))[0]
    assert wide.dtype == torch.float32
    assert (wide != wide.bfloat16().float()).any()


def test_a_language_model_takes_the_same_options():
    torch.manual_seed(0)
    config = ModelConfig(block=CONFIGS["mamba3"], n_layer=2, virtual=Cyclic(3), multi_gate=GATE, vocab_size=11)
    model = LanguageModel(config, dtype=torch.float64)
    ids = torch.randint(0, 11, (2, 5))
    logits, cache = model(ids)
    assert len(cache) == 3
    one_by_one, last = steps(model, ids, None)
    check(1e-10, {"y": one_by_one, **flat(last)}, {"y": logits, **flat(cache)})


def test_muon_gets_the_maps_of_the_mlp():
    from mambakit.blocks.param_groups import param_groups

    stack = make_stack("mlp")
    muon = {
        tuple(p.shape)
        for group in param_groups(stack, muon=True)
        if group["optimizer"] == "muon"
        for p in group["params"]
    }
    assert {(128, 8), (8, 128)} <= muon
    param_groups(stack)


@pytest.mark.parametrize("rms_norm", [False, True])
def test_norms_are_called_as_modules(rms_norm):
    """What wraps or watches a norm counts, before each layer and after the last, in steps too."""
    config = ModelConfig(block=CONFIGS["mamba2"], n_layer=2, d_intermediate=9, rms_norm=rms_norm, vocab_size=11)
    model = LanguageModel(config)
    norms = [model.backbone.norm_f, *(norm for layer in model.backbone.layers for norm in (layer.norm, layer.norm2))]
    called = set()
    for norm in norms:
        norm.register_forward_hook(lambda module, *_: called.add(module))
    _, cache = model(torch.tensor([[1, 2, 3]]))
    assert called == set(norms)
    called.clear()
    model.step(torch.tensor([4]), cache)
    assert called == set(norms)


@pytest.mark.parametrize("rms_norm", [False, True])
def test_norms_of_a_wide_residual(rms_norm):
    """Computed wide, returned in the layer's dtype."""
    norm = make_norm(8, rms_norm, 1e-5, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.add_(torch.randn(8))
    x = torch.randn(5, 8)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, deepcopy(norm).float()(x).bfloat16())


@every
@pytest.mark.parametrize("checkpointed", [False, True])
def test_unknown_options_are_refused(name, checkpointed):
    stack = make_stack(name)
    stack.checkpoint_layers = checkpointed
    for option in ("masks", "prime", "debug", "use_reentrant"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            stack(tokens(stack, 1, 2), **{option: True})


class Subclass(Stack):
    """A class with another name, as `fully_shard` and `parametrize` make them too."""


def copied(stack: Stack) -> Stack:
    return deepcopy(stack)


def pickled(stack: Stack) -> Stack:
    return pickle.loads(pickle.dumps(stack))


def subclassed(stack: Stack) -> Stack:
    other = Subclass(stack.config, grad_horizon=stack.grad_horizon, dtype=torch.float64)
    other.load_state_dict(stack.state_dict())
    return other


def parametrized(stack: Stack) -> Stack:
    for layer in stack.layers:
        for norm in (layer.norm, *([layer.norm2] if stack.config.d_intermediate else [])):
            parametrize.register_parametrization(norm, "weight", torch.nn.Identity())
    return stack


@every
@pytest.mark.parametrize("wrap", [copied, pickled, subclassed, parametrized])
def test_wrapped_stacks(name, wrap):
    """Outputs, caches and gradients of calls and steps."""
    stack = make_stack(name)
    x, cache = tokens(stack, 2, 3), caches.detach(stack(tokens(stack, 2, 2, seed=8))[1])
    want = results(stack, forward, x, cache)
    other = wrap(stack)
    for run in (forward, steps):
        got = results(other, run, x, cache)
        check(1e-9, {n.replace("parametrizations.weight.original", "weight"): t for n, t in got.items()}, want)


def test_checkpointing_is_a_flag():
    with pytest.raises(ValueError, match="checkpoint_layers is 2, expected True or False"):
        Stack(StackConfig(block=CONFIGS["mamba2"], n_layer=2), checkpoint_layers=2)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@every
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_sharded_stacks(name, one_rank):
    """Shares of parameters are whole only while a module is called, so a step has to be a call."""
    stack = make_stack(name)
    x = tokens(stack, 2, 3)
    want = {way.__name__: results(stack, way, x) for way in (forward, steps)}
    for layer in stack.layers:
        fully_shard(layer, mesh=one_rank)
    fully_shard(stack, mesh=one_rank)
    for way in (forward, steps):
        stack.zero_grad()
        inputs = x.clone().requires_grad_()
        y, cache = way(stack, inputs, None)
        out = {"y": y, **flat(cache)}
        make = torch.Generator().manual_seed(5)
        sum((t * torch.randn(t.shape, generator=make, dtype=t.dtype)).sum() for t in out.values()).backward()
        grads = {n: p.grad.full_tensor() for n, p in stack.named_parameters() if p.grad is not None}
        assert len(grads) > 2 or stack.grad_horizon == 0
        out |= {f"d {n}": grad for n, grad in {"x": inputs.grad, **grads}.items()}
        check(1e-9, out, {n: want[way.__name__][n] for n in out})


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_a_sharded_language_model(one_rank):
    model = LanguageModel(ModelConfig(block=CONFIGS["mamba2"], n_layer=2, vocab_size=11), dtype=torch.float64)
    ids = torch.randint(0, 11, (2, 4))
    with torch.no_grad():
        want, last = model(ids)
        fully_shard(model, mesh=one_rank)
        got, cache = steps(model, ids, None)
    check(1e-10, {"y": got, **flat(cache)}, {"y": want, **flat(last)})


@pytest.mark.parametrize("residual_in_fp32", [False, True])
def test_dtypes(residual_in_fp32):
    config = StackConfig(block=CONFIGS["mamba2"], n_layer=2, residual_in_fp32=residual_in_fp32)
    stack, x = Stack(config), torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match=r"^x_bsd is torch\.int64, expected torch\.float32, as the projections"):
        stack(x.long())
    # Norms take any dtype and give the layers theirs.
    check(1e-2, {"y": stack(x.half())[0]}, {"y": stack(x.half().float())[0]})
    model = LatentModel(LatentConfig(block=CONFIGS["mamba2"], n_layer=2, d_input=3, d_output=2))
    for x in (torch.zeros(2, 5, 3, dtype=torch.int64), torch.zeros(2, 5, 3, dtype=torch.float16)):
        for run, given in ((model, x), (model.step, x[:, 0])):
            with pytest.raises(ValueError, match=rf"^x is {x.dtype}, expected torch\.float32, as the projections"):
                run(given)


@pytest.mark.parametrize("grad", [False, True])
def test_token_ids(grad):
    model = LanguageModel(ModelConfig(block=CONFIGS["mamba2"], n_layer=1, vocab_size=40))
    ids = torch.arange(6).view(2, 3)
    with torch.set_grad_enabled(grad):
        for wrong in (ids + 36, ids - 1, ids + 2**40):
            given = f"from {int(wrong.min())} to {int(wrong.max())}"
            with pytest.raises(ValueError, match=f"^the ids go {given}, but the vocabulary is 0 to 39$"):
                model(wrong)
        with pytest.raises(ValueError, match=r"^the ids go from 40 to 40, but the vocabulary is 0 to 39$"):
            model.step(torch.tensor([40]))
        for wrong in (ids.float(), ids.to(torch.int16), ids.bool()):
            with pytest.raises(ValueError, match=rf"^ids_bs is {wrong.dtype}, expected torch\.int64$"):
                model(wrong)
        with pytest.raises(ValueError, match=r"^ids_bs needs 2 axes \(batch, sequence\), got \(3,\)$"):
            model(ids[0])
        with pytest.raises(ValueError, match=r"^ids_b needs 1 axis \(batch\), got \(2, 3\)$"):
            model.step(ids)
        with pytest.raises(ValueError, match=r"^ids_bs needs 2 axes \(batch, sequence\), got list$"):
            model([[1, 2]])
        with pytest.raises(ValueError, match=r"^ids_bs is on meta but embedding on cpu"):
            model(ids.to("meta"))
        model(ids.int())


@pytest.mark.parametrize("latents", [(), ("start",)], ids=str)
def test_inputs_where_no_weights_are(latents):
    stack = Stack(StackConfig(block=CONFIGS["mamba1"], n_layer=2, stack_latents=latents))
    with pytest.raises(ValueError, match="x_bsd is on meta but the first weight on cpu"):
        stack(torch.zeros(1, 3, 6, device="meta"))
