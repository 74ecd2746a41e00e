"""Mixtures of experts equal plain loops and transformers' own; what is absent changes nothing; experts stay in use."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import mambakit as mk
from blocks import tokens
from compare import check, with_gradients
from mambakit.blocks.family import from_dict, to_dict
from mambakit.blocks.moe import balance_loss
from mambakit.blocks.param_groups import param_groups
from mambakit.ops.grouped_product import grouped_product
from oracles import experts as oracle

F64 = torch.float64
PLAIN = mk.MoEConfig(8, 6, 5, 2)
CONFIGS = {
    "softmax": PLAIN,
    "unnormalized": replace(PLAIN, normalize=False, scale=1.7),
    "chosen": replace(PLAIN, router="softmax_chosen", top_k=3, activation="gelu", d_shared=7),
    "sigmoid": replace(PLAIN, router="sigmoid", normalize=False, gated=False, activation="relu2"),
    "groups": mk.MoEConfig(8, 6, 12, 4, "sigmoid", scale=2.5, groups=4, top_groups=2, activation="gelu_tanh"),
    "latent": mk.MoEConfig(
        8, 6, 6, 2, "sigmoid", groups=3, top_groups=3, gated=False, activation="relu2", d_shared=5, d_latent=4
    ),
    "groups of one": mk.MoEConfig(8, 6, 4, 2, "sigmoid", groups=4, top_groups=3, activation="relu"),
    "all": replace(PLAIN, top_k=5, normalize=False),
    "one": replace(PLAIN, n_experts=1, top_k=1),
}


def make(config: mk.MoEConfig, dtype: torch.dtype = F64) -> mk.MoE:
    torch.manual_seed(0)
    block = mk.MoE(config, dtype=dtype)
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor += 0.3 * torch.randn_like(tensor)
    return block


@pytest.fixture(params=CONFIGS)
def block(request) -> mk.MoE:
    return make(CONFIGS[request.param])


def test_equals_the_loops(block):
    """Values and every gradient."""
    x = tokens(block, 2, 7)
    with torch.no_grad():
        check(1e-12, {"y": block(x)[0]}, {"y": oracle.moe(x, block.config, block.state_dict())})

    def loops(block: mk.MoE, x: Tensor) -> Tensor:
        return oracle.moe(x, block.config, {**dict(block.named_parameters()), **dict(block.named_buffers())})

    check(1e-10, with_gradients(block, lambda m, x: m(x)[0], x), with_gradients(block, loops, x))


@pytest.mark.parametrize("name", ["softmax", "chosen", "latent", "groups"])
def test_gradients_once_and_twice(name):
    block = make(CONFIGS[name])
    names, values = zip(*((n, p.detach().requires_grad_()) for n, p in block.named_parameters()), strict=True)
    x = tokens(block, 1, 3).requires_grad_()

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        y, _ = functional_call(block, dict(zip(names, parameters, strict=True)), (x,))
        return y

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *values), fast_mode=True)


def test_sizes_without_tokens(block):
    for shape in ((0, 3), (2, 0), (0, 0)):
        x = torch.zeros(*shape, 8, dtype=F64, requires_grad=True)
        y, _ = block(x)
        y.sum().backward()
        assert y.shape == x.shape
        assert x.grad is not None
        with torch.no_grad():
            assert block(x)[0].shape == x.shape
        assert block.balance is None
        block(x)
        assert block.balance.isfinite()


@pytest.mark.parametrize("grad", [False, True])
def test_sizes_without_numbers(block, grad):
    x = torch.zeros(2, 3, 8, dtype=F64, device="meta")
    with torch.set_grad_enabled(grad):
        assert block.to("meta")(x)[0].shape == x.shape


def test_one_token_and_masks(block):
    """A step is a call; absent tokens change nothing, whatever they are, and neither do resets and packing."""
    x = tokens(block, 3, 5)
    y, cache = block(x)
    steps = torch.stack([block.step(x[:, t], cache)[0] for t in range(5)], 1)
    check(1e-12, {"y": steps, "infinite": block.step_infinite(x[:, 2])}, {"y": y, "infinite": y[:, 2]})
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]]).bool()
    wild = torch.where(mask[..., None], x, 1e3 * torch.randn_like(x))
    kept = y.masked_fill(~mask[..., None], 0)
    check(1e-12, {"y": block(wild, mask_bs=mask)[0]}, {"y": kept})
    balance = block.balance
    block(x[mask][None])
    check(1e-12, {"balance": balance}, {"balance": block.balance})
    packed, _ = block(x.reshape(1, 15, 8), cu_seqlens=torch.tensor([0, 4, 4, 15]), reset_bs=torch.ones(1, 15).bool())
    check(1e-12, {"y": packed.reshape(3, 5, 8)}, {"y": y})


def test_balance(block):
    x = tokens(block, 2, 6)
    block(x)
    want = oracle.balance(x.flatten(0, 1), block.config, dict(block.state_dict()))
    check(1e-12, {"balance": block.balance}, {"balance": want})
    grad = torch.autograd.grad(block.balance, block.router.weight)[0]
    leaf = block.router.weight.detach().clone().requires_grad_()
    weights = {**block.state_dict(), "router.weight": leaf}
    want_grad = torch.autograd.grad(oracle.balance(x.flatten(0, 1), block.config, weights), leaf)[0]
    check(1e-12, {"d router": grad}, {"d router": want_grad})


@pytest.mark.parametrize("name", ["softmax", "chosen"])
def test_balance_is_that_of_transformers(name):
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import load_balancing_loss_func

    block = make(CONFIGS[name])
    x, config = tokens(block, 2, 6), block.config
    block(x)
    theirs = load_balancing_loss_func((block.router(x.flatten(0, 1)),), config.n_experts, config.top_k)
    check(1e-6, {"balance": config.top_k * block.balance}, {"balance": theirs})


def test_balance_is_for_training_only():
    block = make(PLAIN)
    x = tokens(block, 2, 6)
    assert balance_loss(block) is None
    block(x)
    assert block.balance is not None
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert copied.balance is None
        assert torch.equal(copied(x)[0], block(x)[0])
    with torch.no_grad():
        block(x)
    assert block.balance is None
    block(x)
    block.eval()(x)
    assert block.balance is None
    stack = nn.ModuleList([make(PLAIN), make(CONFIGS["sigmoid"]), nn.Linear(2, 2), make(PLAIN).eval()])
    for part in (stack[0], stack[1], stack[3]):
        part(x)
    loss = balance_loss(stack)
    check(1e-12, {"loss": loss}, {"loss": (stack[0].balance + stack[1].balance) / 2})
    loss.backward()
    assert stack[0].router.weight.grad.abs().sum() > 0
    assert stack[0].experts_in.grad is None


def test_balance_is_least_where_all_are_alike():
    block = make(replace(PLAIN, n_experts=4, top_k=4))
    block(tokens(block, 2, 6))
    check(1e-12, {"balance": block.balance}, {"balance": torch.ones((), dtype=F64)})


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_models_are_copied_after_training(kind):
    model = model_of(PLAIN)
    logits, _ = model(torch.arange(6)[None])
    (logits.sum() + balance_loss(model)).backward()
    copied = copy.deepcopy(model) if kind == "deepcopy" else pickle.loads(pickle.dumps(model))
    check(0, {"y": copied(torch.arange(6)[None])[0]}, {"y": logits})


def model_of(config: mk.MoEConfig, **others: Any) -> mk.LanguageModel:
    torch.manual_seed(0)
    mamba = mk.Mamba2Config(d_model=8, state_rank=4, per_head_dim=4)
    return mk.LanguageModel(mk.ModelConfig(layers=((mamba, config), (config,)), vocab_size=20, **others))


def test_checkpointed_layers():
    """The same gradients, also of the loss that balances, which leaves the layer beside its output."""
    model = model_of(replace(PLAIN, d_shared=4)).double()
    ids, found = torch.arange(12).reshape(2, 6), []
    for checkpointed in (False, True):
        model.backbone.checkpoint_layers = checkpointed
        logits, _ = model(ids)
        left = [part.balance for part in model.modules() if isinstance(part, mk.MoE)]
        loss = logits.square().sum() + balance_loss(model)
        found.append(
            dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True))
        )
        # What a layer leaves when it is computed again would keep all of its activations.
        after = [part.balance for part in model.modules() if isinstance(part, mk.MoE)]
        assert all(one is other for one, other in zip(left, after, strict=True))
    check(1e-10, found[1], found[0])


@pytest.mark.parametrize("name", ["softmax", "latent"])
def test_narrow_dtypes(name):
    """Tokens choose as in float32, and sums are as exact as the experts' outputs."""
    wide = make(CONFIGS[name], torch.float32)
    x = tokens(wide, 2, 9).bfloat16()
    narrow = mk.MoE(wide.config, dtype=torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    wide.load_state_dict({n: t.float() for n, t in narrow.state_dict().items()})
    assert torch.equal(narrow.route(x.flatten(0, 1)).expert_nc, wide.route(x.flatten(0, 1).float()).expert_nc)
    y, want = narrow(x)[0], wide(x.float())[0]
    assert y.dtype == torch.bfloat16
    check(2e-2, {"y": y}, {"y": want})
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(wide.route(x.flatten(0, 1).float()).expert_nc, narrow.route(x.flatten(0, 1)).expert_nc)
        y = wide(x.float())[0]
    y.float().sum().backward()
    check(2e-2, {"y": y}, {"y": want})
    with pytest.raises(ValueError, match=r"x_bsd is torch\.float64, expected torch\.bfloat16"):
        narrow(x.double())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["softmax", "groups", "latent"])
def test_compile_and_export(name):
    """In one graph, for any number of tokens that go to an expert."""
    torch._dynamo.reset()
    block = make(CONFIGS[name], torch.float32)
    compiled = torch.compile(lambda m, x: m(x)[0], fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x = tokens(block, 2, 9, seed)
        check(1e-5, with_gradients(block, compiled, x), with_gradients(block, lambda m, x: m(x)[0], x))
    with torch.no_grad():
        check(1e-5, {"y": compiled(block, x)}, {"y": block(x)[0]})
    block.eval()
    program = torch.export.export(block, (x,))
    for seed in range(3, 6):
        x = tokens(block, 2, 9, seed)
        check(1e-5, {"y": program.module()(x)[0]}, {"y": block(x)[0]})


def test_only_chosen_experts_are_read():
    """The weights of all others may be anything."""
    block = make(PLAIN)
    x = tokens(block, 1, 1)
    (chosen,) = block.route(x[0]).expert_nc.tolist()
    want = block(x)[0]
    with torch.no_grad():
        for e in set(range(5)) - set(chosen):
            block.experts_in[e] = torch.nan
        assert torch.equal(block(x)[0], want)
    assert torch.equal(block(x)[0], want)
    block(x)[0].sum().backward()
    unused = [e for e in range(5) if e not in chosen]
    assert block.experts_in.grad[unused].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_grouped_product(grad, dtype):
    """Few rows and many, and matrices without any."""
    weight = torch.randn(4, 6, 32, dtype=dtype)
    for counts in ([0, 0, 0, 0], [1, 0, 2, 1], [0, 40, 0, 3]):
        x = torch.randn(sum(counts), 32, dtype=dtype)
        which = torch.arange(4).repeat_interleave(torch.tensor(counts))
        with torch.set_grad_enabled(grad):
            y = grouped_product(x, weight, torch.tensor(counts))
        check(1e-5 if dtype != torch.bfloat16 else 1e-2, {"y": y}, {"y": (weight[which] @ x[..., None])[..., 0]})


def test_operator():
    weight, x = torch.randn(3, 6, 4, dtype=F64), torch.randn(5, 4, dtype=F64)
    inputs = (x.requires_grad_(), weight.requires_grad_(), torch.tensor([2, 0, 3]), "torch")
    torch.library.opcheck(torch.ops.mambakit.grouped_product.default, inputs)


def test_parameter_groups(block):
    """Experts decay and are not Muon's, nor is the router; every parameter is in one group."""
    names = {id(p): n for n, p in block.named_parameters()}
    groups = param_groups(block, muon=True)
    decaying = [p for g in groups if g["optimizer"] == "adamw" and g["weight_decay"] for p in g["params"]]
    assert {"router.weight", "experts_in", "experts_out"} == {names[id(p)] for p in decaying}
    assert len([p for g in param_groups(block) for p in g["params"]]) == len(names)
    assert {names[id(p)] for g in param_groups(block) if g["weight_decay"] for p in g["params"]} == set(names.values())
    shares = sum(p.numel() for g in groups for p in g["params"])
    assert shares == sum(p.numel() for p in block.parameters())


def test_models_start_with_small_outputs():
    """Each expert as an MLP of its own would, by the number of layers."""
    config = mk.MoEConfig(8, 50, 4, 2)
    model = model_of(config)
    for name in ("backbone.layers.0.mixer2", "backbone.layers.1.mixer"):
        largest_e = model.get_submodule(name).experts_out.abs().amax((1, 2))
        bound = (50 * 2) ** -0.5
        assert (largest_e <= bound).all()
        assert (largest_e > 0.9 * bound).all()
    lone = mk.MoE(config)
    for stack, width in ((lone.experts_in, 8), (lone.experts_out, 50)):
        assert 0.9 < stack.abs().max() * width**0.5 <= 1


def test_adapters_reach_every_projection():
    """Experts aside, which are no modules; merged and unmerged are equal."""
    import peft

    block = make(CONFIGS["latent"])
    x = tokens(block, 2, 4)
    names = ["router", "latent_in", "latent_out", "fc1", "fc2"]
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False), block)
    y, _ = block(x)
    y.square().sum().backward()
    added = {name: p for name, p in block.named_parameters() if "lora_" in name}
    assert len(added) == 2 * len(names)
    assert all(p.grad is not None and p.grad.any() for p in added.values())
    for module in block.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.merge()
    check(1e-10, {"y": block(x)[0]}, {"y": y})


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_quantized_models_keep_the_router(bits):
    model = model_of(replace(PLAIN, d_shared=64)).eval()
    model(torch.arange(6)[None])
    small = mk.quantize(model, bits=bits)
    for name in ("backbone.layers.0.mixer2", "backbone.layers.1.mixer"):
        ours, theirs = small.get_submodule(name), model.get_submodule(name)
        assert torch.equal(ours.router.weight, theirs.router.weight)
        assert type(ours.experts_in) is type(ours.experts_out) is type(ours.shared.fc1)
        assert type(theirs.experts_in) is torch.nn.Parameter, "it itself stays as it is"
        assert type(ours.shared.fc1) is not type(theirs.shared.fc1)
    logits, want = small(torch.arange(6)[None])[0], model(torch.arange(6)[None])[0]
    assert torch.isfinite(logits).all()
    assert (logits - want).abs().max() < 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 6}, "top_k = 6 is more than n_experts = 5$"),
        ({"top_k": 0}, "top_k = 0 has to be positive"),
        ({"n_experts": 0}, "n_experts = 0 has to be positive"),
        ({"d_hidden": 0}, "d_hidden = 0 has to be positive"),
        ({"scale": 0}, "scale = 0 has to be positive"),
        ({"d_latent": 0}, "d_latent = 0 has to be positive"),
        ({"d_shared": -1}, "d_shared = -1 has to be 0"),
        ({"router": "hash"}, "router = 'hash' is unknown; choose one of softmax, softmax_chosen, sigmoid"),
        ({"activation": "mish"}, "activation = 'mish' is unknown; choose one of silu,"),
        ({"router": "sigmoid", "groups": 2}, "n_experts = 5 is not a multiple of groups = 2"),
        ({"groups": 5}, 'groups = 5 is for the router "sigmoid", and router is "softmax"'),
        ({"top_groups": 2}, "top_groups = 2 is more than groups = 1"),
        (
            {"router": "sigmoid", "groups": 5, "top_groups": 1},
            "top_k = 2 is more than the 1 experts in top_groups = 1 of groups = 5",
        ),
    ],
)
def test_what_configs_refuse(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **fields)


def test_configs_as_json(block):
    config = block.config
    assert from_dict(to_dict(config)) == config == mk.MoEConfig.from_json(config.to_json())
    assert to_dict(config)["family"] == "moe"


# transformers' own.


def compare(ours: mk.MoE, theirs: nn.Module, weights: dict[str, Tensor]) -> None:
    assert set(ours.state_dict()) == set(weights)
    ours.load_state_dict({name: tensor.detach() for name, tensor in weights.items()})
    x = tokens(ours, 2, 9)
    with torch.no_grad():
        y, want = ours(x)[0], theirs(x)
        # In float64 too: they route in float32 whatever the dtype.
        check(1e-6, {"y": y, "step": ours.step(x[:, 3])[0]}, {"y": want, "step": want[:, 3]})


def moved(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(0.4 * torch.randn_like(tensor))
    return module.to(dtype).eval()


def value_first(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-2)
    return torch.cat([up, gate], -2)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)


@DTYPES
@pytest.mark.parametrize("latent", [None, 6])
@pytest.mark.parametrize("normalized", [False, True])
def test_nemotron(latent, normalized, dtype):
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    there = NemotronHConfig(
        hidden_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=10,
        moe_shared_expert_intermediate_size=12,
        moe_latent_size=latent,
        n_group=4,
        topk_group=2,
        norm_topk_prob=normalized,
        routed_scaling_factor=2.5,
        mlp_bias=True,
        layers_block_type=["moe"],
    )
    there._experts_implementation = "eager"
    theirs = moved(NemotronHMoE(there), dtype)
    config = mk.MoEConfig(
        16, 10, 8, 3, "sigmoid", normalized, 2.5, 4, 2, False, "relu2", 12, d_latent=latent, bias=True
    )
    names = {
        "gate.weight": "router.weight",
        "gate.e_score_correction_bias": "correction_bias",
        "experts.up_proj": "experts_in",
        "experts.down_proj": "experts_out",
    }
    for part, ours in {
        "shared_experts.up_proj": "shared.fc1",
        "shared_experts.down_proj": "shared.fc2",
        "fc1_latent_proj": "latent_in",
        "fc2_latent_proj": "latent_out",
    }.items():
        names |= {f"{part}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}
    compare(mk.MoE(config, dtype=dtype), theirs, {names[n]: t for n, t in theirs.state_dict().items()})


@DTYPES
def test_granite(dtype):
    from transformers import GraniteMoeHybridConfig
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

    there = GraniteMoeHybridConfig(
        hidden_size=16,
        intermediate_size=10,
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=12,
        mamba_n_heads=4,
    )
    there._experts_implementation = "eager"
    theirs, shared = moved(granite.GraniteMoeHybridMoE(there), dtype), moved(granite.GraniteMoeHybridMLP(there), dtype)
    weights = {
        "router.weight": theirs.router.weight,
        "experts_in": value_first(theirs.experts.gate_up_proj),
        "experts_out": theirs.experts.down_proj,
        "shared.fc1.weight": value_first(shared.input_linear.weight),
        "shared.fc2.weight": shared.output_linear.weight,
    }

    class Both(nn.Module):
        def forward(self, x):
            return theirs(x) + shared(x)

    config = mk.MoEConfig(16, 10, 6, 3, "softmax_chosen", d_shared=12)
    compare(mk.MoE(config, dtype=dtype), Both(), weights)


@DTYPES
def test_jamba(dtype):
    from transformers import JambaConfig
    from transformers.models.jamba.modeling_jamba import JambaSparseMoeBlock

    there = JambaConfig(hidden_size=16, intermediate_size=10, num_experts=6, num_experts_per_tok=2)
    there._experts_implementation = "eager"
    theirs = moved(JambaSparseMoeBlock(there), dtype)
    weights = {
        "router.weight": theirs.router.weight,
        "experts_in": value_first(theirs.experts.gate_up_proj),
        "experts_out": theirs.experts.down_proj,
    }
    config = mk.MoEConfig(16, 10, 6, 2, normalize=False)
    compare(mk.MoE(config, dtype=dtype), theirs, weights)
