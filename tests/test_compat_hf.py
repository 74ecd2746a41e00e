"""`mambakit.accelerate`: transformers' models with our scans give the same outputs, caches, texts and gradients."""

import pytest
import torch

import mambakit as mk
from their_releases import CHECKPOINTING, calls_of

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
HYBRID = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def causal(name: str, **options):
    """Makes a model of this family of transformers."""
    config = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, f"{name}ForCausalLM")(config(**options))


EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
BAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
ZAMBA_HEADS = {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 16}
ZAMBA_LAYERS = {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1}
MODELS = {
    "mamba": causal("Mamba", **SIZES, state_size=5),
    "falcon_mamba": causal("FalconMamba", **SIZES, state_size=5),
    "mamba2": causal("Mamba2", **SIZES, num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=16),
    "jamba": causal("Jamba", **HYBRID, **EXPERTS, mamba_d_state=5, use_mamba_kernels=False),
    "bamba": causal("Bamba", **HYBRID, **BAMBA_HEADS, mamba_d_state=16, attn_layer_indices=[1]),
    "zamba2": causal("Zamba2", **HYBRID, **ZAMBA_HEADS, **ZAMBA_LAYERS, mamba_d_state=16),
}


def make(name: str):
    torch.manual_seed(0)
    model = MODELS[name]()
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal_and_undo_gives_back(name):
    model, ids = make(name), torch.randint(3, 50, (2, 37))
    before_forwards = [type(module).forward for module in model.modules()]
    with torch.no_grad():
        before = model(ids).logits
        done = mk.accelerate(model)
        after = model(ids).logits
        done.undo()
        again = model(ids).logits
    assert done.mixers
    assert done.functions
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert torch.equal(again, before)
    assert [type(module).forward for module in model.modules()] == before_forwards


@pytest.mark.parametrize("name", MODELS)
def test_generation_is_equal(name):
    """With transformers' own cache: a prompt at once, then tokens one by one."""
    model, ids = make(name), torch.randint(3, 50, (2, 9))
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **settings)
    mk.accelerate(model)
    assert torch.equal(model.generate(ids, **settings), before)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_caches_are_equal(name):
    """After a prompt, after one token, after several more: transformers' object, with the same states in it."""
    model, ids = make(name), torch.randint(3, 50, (2, 12))

    @torch.no_grad()
    def run():
        cache, seen = None, []
        for part in ids.split((7, 1, 4), dim=1):
            result = model(part, cache_params=cache, use_cache=True)
            cache = result.cache_params
            states = [s.clone() for layer in cache.layers for s in (layer.conv_states[0], layer.recurrent_states[0])]
            seen += [result.logits, *states]
        return type(cache), seen

    kind, before = run()
    mk.accelerate(model)
    after_kind, after = run()
    assert after_kind is kind
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
def test_narrow_models_are_equal_up_to_rounding(name):
    model, ids = make(name).bfloat16(), torch.randint(3, 50, (2, 21))
    with torch.no_grad():
        before = model(ids).logits
        mk.accelerate(model)
        after = model(ids).logits
    assert after.dtype == before.dtype
    assert (after - before).abs().max() < 0.03 * before.abs().max()


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_equal(name, checkpointing):
    model, ids = make(name).train(), torch.randint(3, 50, (2, 21))
    if checkpointing:
        getattr(model, f"{CHECKPOINTING}_enable")()

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    before = gradients()
    mk.accelerate(model)
    after = gradients()
    assert calls_of(model.backbone.layers[0].mixer, gradients) == 1 + checkpointing
    assert before.keys() == after.keys()
    for key in before:
        torch.testing.assert_close(after[key], before[key], rtol=1e-3, atol=1e-5, msg=lambda text, key=key: key + text)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_padding_on_the_left_is_equal(name):
    model, ids = make(name), torch.randint(3, 50, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
        mk.accelerate(model)
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, before, rtol=1e-4, atol=1e-5)


def replaced(model):
    return [module for module in model.modules() if "forward" in vars(module)]


def test_only_this_model_changes():
    one, other = make("mamba2"), make("mamba2")
    done = mk.accelerate(one)
    assert {type(module).__name__ for module in replaced(one)} == {
        *("Mamba2Mixer", "MambaRMSNormGated", "Mamba2RMSNorm", "Linear")
    }
    assert not replaced(other)
    done.undo()
    assert not replaced(one)
    done.undo()


def test_what_others_replaced_in_a_layer_stays():
    model = make("mamba")
    mine = model.lm_head.forward = lambda x: torch.zeros(*x.shape[:-1], 50)
    done = mk.accelerate(model)
    with torch.no_grad():
        assert not model(torch.tensor([[5, 6]])).logits.any()
    done.undo()
    assert model.lm_head.forward is mine


def test_errors():
    with pytest.raises(ValueError, match="no mixers"):
        mk.accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="a loaded model"):
        mk.accelerate("state-spaces/mamba-130m")
    model = make("mamba")
    mk.accelerate(model)
    with pytest.raises(ValueError, match="replaced already"):
        mk.accelerate(model)
