"""Our own low-rank adapters: idle at first, merged without a change, saved apart, and the same in peft."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import mambakit as mk
from compare import check
from mambakit.compat.auto import MambakitForCausalLM
from mambakit.models.lora import adapters

VOCAB = 50
BLOCKS = {
    "mamba1": mk.Mamba1Config(d_model=32, state_rank=8),
    "mamba2": mk.Mamba2Config(d_model=32, state_rank=16, per_head_dim=16),
    "mamba3": mk.Mamba3Config(d_model=32, state_rank=16, per_head_dim=16),
}
HYBRID = (
    (mk.Mamba2Config(d_model=32, state_rank=16, per_head_dim=16), mk.MLPConfig(32, 64)),
    (mk.AttentionConfig(32, 2), mk.MoEConfig(32, 32, 4, 2)),
)


def make(name: str) -> mk.LanguageModel:
    torch.manual_seed(0)
    if name == "hybrid":
        return mk.LanguageModel(mk.ModelConfig(layers=HYBRID, vocab_size=VOCAB))
    return mk.LanguageModel(mk.ModelConfig(block=BLOCKS[name], n_layer=2, vocab_size=VOCAB))


def trained(model: mk.LanguageModel, rank: int = 4, **options) -> mk.LanguageModel:
    """With adapters that are not at their idle start."""
    mk.add_lora(model, rank, **options)
    for _, adapter in adapters(model):
        torch.nn.init.normal_(adapter.lora_B.weight, std=0.2)
    return model


IDS = torch.arange(24).reshape(2, 12) * 7 % VOCAB


@pytest.mark.parametrize("name", [*BLOCKS, "hybrid"])
def test_adapters_start_idle_and_merge_without_a_change(name, tmp_path):
    base = make(name)
    model = mk.add_lora(make(name), 4)
    assert torch.equal(model(IDS)[0], base(IDS)[0])
    assert {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    model = trained(make(name)).double()
    with torch.no_grad():
        want, steps = model(IDS)[0], mk.generate(model, IDS, max_new_tokens=8, temperature=0)
        assert (want - base.double()(IDS)[0]).abs().max() > 0.01
        merged = mk.merge_lora(model)
        check(1e-12, {"logits": merged(IDS)[0]}, {"logits": want})
        assert torch.equal(mk.generate(merged, IDS, max_new_tokens=8, temperature=0), steps)
    assert not list(adapters(merged))
    assert all(p.requires_grad for p in merged.parameters())
    mk.save_model(merged, tmp_path)


def test_decoding_in_one_call_does_not_forget_them():
    """A model of plain float32 projections is decoded by a kernel, which knows no adapters."""
    model = trained(make("mamba2"), targets=["out_proj"])
    tokens = mk.generate(model, IDS[:1], max_new_tokens=12, temperature=0)
    assert torch.equal(tokens, mk.generate(mk.merge_lora(model), IDS[:1], max_new_tokens=12, temperature=0))


@pytest.mark.parametrize("name", ["mamba1", "mamba3", "hybrid"])
def test_saved_apart_and_read_by_us_and_by_peft(name, tmp_path):
    mk.save_model(make(name), tmp_path / "base")
    model = trained(make(name))
    for _ in range(2):  # the second replaces the first
        mk.save_lora(model, tmp_path / "adapter", base=tmp_path / "base")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    with torch.no_grad():
        want = model(IDS)[0]
        again = mk.load_lora(mk.load_model(tmp_path / "base"), tmp_path / "adapter")
        assert torch.equal(again(IDS)[0], want)
        check(1e-5, {"logits": mk.load_model(tmp_path / "adapter")(IDS)[0]}, {"logits": want})
        wrapped = MambakitForCausalLM.wrap(mk.load_model(tmp_path / "base"))
        theirs = peft.PeftModel.from_pretrained(wrapped, str(tmp_path / "adapter"))
        check(1e-5, {"logits": theirs(input_ids=IDS).logits}, {"logits": want})


def test_adapters_of_peft_are_read(tmp_path):
    base = make("mamba2")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules=["in_proj", "out_proj"])
    theirs = peft.get_peft_model(MambakitForCausalLM.wrap(make("mamba2")), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
        theirs.save_pretrained(tmp_path)
        check(1e-5, {"l": mk.load_lora(base, tmp_path)(IDS)[0]}, {"l": theirs(input_ids=IDS).logits})


def test_what_cannot_be(tmp_path):
    model = make("mamba2")
    with pytest.raises(ValueError, match="rank = 0 has to be a positive integer"):
        mk.add_lora(model, 0)
    with pytest.raises(ValueError, match="no projections called fc9; it has in_proj, lm_head, out_proj"):
        mk.add_lora(model, 2, targets=["fc9", "in_proj"])
    with pytest.raises(ValueError, match="no adapters to merge"):
        mk.merge_lora(model)
    with pytest.raises(ValueError, match="no adapters to save"):
        mk.save_lora(model, tmp_path / "x")
    trained(model)
    with pytest.raises(ValueError, match="has adapters already"):
        mk.add_lora(model, 2)
    with pytest.raises(ValueError, match="save_lora saves them, merge_lora"):
        mk.save_model(model, tmp_path / "x")
    with pytest.raises(ValueError, match="holds rounded weights"):
        mk.merge_lora(trained(mk.quantize(make("mamba2"), 8)))
    mk.save_lora(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match="does not name its model"):
        mk.load_model(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"does not fit the model: backbone.layers.0.mixer.in_proj.lora_B.weight"):
        mk.load_lora(make("mamba3"), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for changed, message in [
        ({"peft_type": "IA3"}, "only LORA is read"),
        ({"use_dora": True}, "sets use_dora, which is not read here"),
        ({"r": "4"}, "expected positive numbers"),
        ({"peft_type": "a\nb"}, r"peft_type = 'a\\nb', and only LORA"),
        ({"r": 1 << 16}, r"lora_A.weight \d+x\d+ for 65536x"),
    ]:
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(ValueError, match=message):
            mk.load_lora(make("mamba2"), tmp_path / "adapter")


def test_what_does_not_fit_leaves_the_model_alone(tmp_path):
    mk.save_lora(trained(make("mamba2")), tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = sorted(weights)[-1]
    for wrong in (weights[name][1:], weights[name].long()):
        save_file({**weights, name: wrong.clone()}, tmp_path / "adapter_model.safetensors")
        model = make("mamba2")
        with pytest.raises(ValueError, match=f"does not fit the model: {name.removeprefix('base_model.model.')}"):
            mk.load_lora(model, tmp_path)
        assert next(adapters(model), None) is None
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_adapter_of_itself_is_refused(tmp_path):
    mk.save_model(make("mamba2"), tmp_path / "model")
    mk.save_lora(trained(make("mamba2")), tmp_path / "one", base=tmp_path / "model")
    mk.save_lora(trained(make("mamba2")), tmp_path / "two", base=tmp_path / "one")
    mk.load_model(tmp_path / "two")
    mk.save_lora(trained(make("mamba2")), tmp_path / "one", base=tmp_path / "two")
    with pytest.raises(ValueError, match="belongs to itself, or to more than 8 others"):
        mk.load_model(tmp_path / "two")
