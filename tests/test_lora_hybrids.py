"""Adapters of the real `peft` on every projection of a language model with every kind of block."""

import peft
import pytest
import torch

import mambakit as mk
from compare import check
from mambakit.models.language_model import LanguageModel, ModelConfig
from test_parity import steps
from test_stack import moved

HEADS = {"d_model": 8, "state_rank": 8, "per_head_dim": 4}
LAYERS = (
    (mk.Mamba1Config(d_model=8, state_rank=3, dt_rank=2, dt_b_c_norm=True), mk.MLPConfig(8, 12)),
    (mk.AttentionConfig(8, 2, rope_theta=100.0), mk.MoEConfig(8, 6, 4, 2, "sigmoid", d_shared=5, d_latent=4)),
    (mk.ParallelConfig(mk.Mamba2Config(**HEADS), mk.AttentionConfig(8, 4, 2)), mk.MLPConfig(8, 12, False, "relu2")),
    (mk.ParallelConfig(mk.AttentionConfig(8, 2, window=3), mk.MoEConfig(8, 6, 3, 1)),),
    (mk.Mamba3Config(**HEADS), mk.MoEConfig(8, 6, 4, 2)),
)
LINEAR = ["in_proj", "out_proj", "x_proj", "dt_proj", "fc1", "fc2", "router", "latent_in", "latent_out"]
EXPERTS = ["experts_in", "experts_out"]
WAYS = {
    "named": {"target_modules": LINEAR, "target_parameters": EXPERTS},
    "modules": {"target_modules": LINEAR},
    "parameters": {"target_modules": [], "target_parameters": EXPERTS},
    "all-linear": {"target_modules": "all-linear"},
}
every = pytest.mark.parametrize("way", WAYS)


class Model(torch.nn.Module):
    """peft hands down what a call was given, but not the name of what it was called by."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, ids_bs, cache=None):
        return self.model(ids_bs, cache)


def adapted(way: str):
    """The model, and its adapters off their idle start."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(layers=LAYERS, vocab_size=20, tie_embeddings=False), dtype=torch.float64)
    moved(model)
    wrapped = peft.get_peft_model(Model(model), peft.LoraConfig(r=2, lora_alpha=4, **WAYS[way])).double()
    adapters = {n: p for n, p in wrapped.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return wrapped, model, adapters


def ids() -> torch.Tensor:
    return torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(1))


def expected(way: str) -> list[str]:
    """What is to be reached; a parameter's adapter stands where the block is that holds it."""
    model = LanguageModel(ModelConfig(layers=LAYERS, vocab_size=20))
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    linear = [name for name in linear if name != "lm_head" or way == "all-linear"]
    blocks = [name.rpartition(".")[0] for name, _ in model.named_parameters() if name.endswith(tuple(EXPERTS))]
    asked = WAYS[way]
    return sorted(asked["target_modules"] and linear) + sorted(blocks if "target_parameters" in asked else [])


@every
def test_adapters_take_part(way):
    wrapped, model, adapters = adapted(way)
    for half in (".lora_A.default.weight", ".lora_B.default.weight"):
        places = [n.removesuffix(half).replace(".base_layer", "") for n in adapters if n.endswith(half)]
        assert sorted(places) == sorted(f"base_model.model.model.{name}" for name in expected(way))
    y, _ = wrapped(ids())
    with wrapped.disable_adapter():
        assert not torch.allclose(y, wrapped(ids())[0])
    grads = torch.autograd.grad(y.square().sum(), list(adapters.values()))
    idle = [n for n, grad in zip(adapters, grads, strict=True) if not grad.any()]
    assert not idle, f"no gradient: {idle}"

    stepped, _ = steps(model, ids(), model.fresh_cache(2))
    step_grads = torch.autograd.grad(stepped.square().sum(), list(adapters.values()))
    check(
        1e-9,
        {"y": stepped, **dict(zip(adapters, step_grads, strict=True))},
        {"y": y, **dict(zip(adapters, grads, strict=True))},
    )


@every
@torch.no_grad()
def test_merging_changes_nothing(way):
    wrapped, _, _ = adapted(way)
    want, tokens = wrapped(ids())[0], ids().tolist()
    before = mk.generate(wrapped.base_model.model.model, tokens, max_new_tokens=6, temperature=0)
    wrapped.merge_adapter()
    check(1e-10, {"y": wrapped(ids())[0]}, {"y": want})
    wrapped.unmerge_adapter()
    check(1e-10, {"y": wrapped(ids())[0]}, {"y": want})
    merged = wrapped.merge_and_unload()
    if way == "named":
        # peft takes away what is around a block first, and then no longer finds what was inside it.
        merged = wrapped.merge_and_unload()
    check(1e-10, {"y": merged(ids())[0]}, {"y": want})
    assert type(merged.model) is LanguageModel
    assert merged.model.state_dict().keys() == LanguageModel(merged.model.config).state_dict().keys()
    assert torch.equal(mk.generate(merged.model, tokens, max_new_tokens=6, temperature=0), before)


@pytest.mark.parametrize("way", ["modules", "named"])
@torch.no_grad()
def test_generation_in_float32_hears_adapters(way):
    """Where one call per token would be possible without them."""
    wrapped, model, _ = adapted(way)
    model = model.float()
    tokens = mk.generate(model, ids().tolist(), max_new_tokens=6, temperature=0)
    logits = model(torch.cat([ids(), tokens[:, :-1]], 1))[0][:, ids().shape[1] - 1 :]
    assert torch.equal(logits.argmax(-1), tokens)
    with wrapped.disable_adapter():
        assert not torch.equal(mk.generate(model, ids().tolist(), max_new_tokens=6, temperature=0), tokens)
