"""Checkpoints of the official package and of transformers: their logits, gradients and greedy continuations."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from compare import GOLDEN, error, load_golden
from mambakit.checkpoints import load_model, save_model
from test_checkpoints import save_for_transformers

FLOOR = 1e-6


def load(case, **options):
    """The model of a case, with what its format leaves open as its manifest has it."""
    if case["model_config"].get("ssm_cfg", {}).get("layer") == "Mamba3":
        options["a_activation"] = case["A_activation"]
    if case.get("gated_norm"):
        options["norm_group_size"] = case["model_config"]["expand"] * case["model_config"]["hidden_size"]
    return load_model(GOLDEN / case["dir"], **options)


def padded_logits(model, ids_bs):
    """With the rows that only pad the vocabulary, which the stored logits have too."""
    x_bsd, _ = model.backbone(model.embed(ids_bs))
    return model.lm_head(model.backbone.norm_f(x_bsd))


def is_hybrid(case):
    return bool(case["model_config"].get("attn_layer_idx"))


def is_supported(case):
    return not is_hybrid(case)


@pytest.mark.golden("lm_official", "lm_hf", where=is_supported)
def test_logits(case):
    want = load_golden(case)
    model = load(case)
    with torch.no_grad():
        full = padded_logits(model, want["input_ids"])
        cut, _ = model(want["input_ids"])
    assert error(full, want["logits_f32"], FLOOR) <= case["tol"]["float32"]["out"]
    torch.testing.assert_close(cut, full[..., : case["model_config"]["vocab_size"]])


@pytest.mark.golden("lm_official", where=is_supported)
def test_logits_and_every_gradient_in_float64(case):
    want = load_golden(case)
    model = load(case, dtype=torch.float64)
    ids_bs = want["input_ids"]
    logits = padded_logits(model, ids_bs)
    assert error(logits, want["logits"], FLOOR) <= case["tol"]["float64"]["out"]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_bs[:, 1:].flatten())
    assert error(loss[None], want["ce_loss"], FLOOR) <= case["tol"]["float64"]["out"]
    loss.backward()
    stored = {name[5:]: tensor for name, tensor in want.items() if name.startswith("grad.")}
    got = dict(model.named_parameters())
    assert got.keys() == stored.keys()
    bad = {n: error(got[n].grad, g, FLOOR) for n, g in stored.items()}
    assert all(e <= case["tol"]["float64"]["grad"] for e in bad.values()), bad


@pytest.mark.golden("lm_official", "lm_hf", where=is_supported)
def test_greedy_continuation(case):
    want = load_golden(case)
    prompt, ids = want["greedy_prompt"], want["greedy_ids"]
    assert torch.equal(ids[:, : prompt.shape[1]], prompt)
    model = load(case)
    with torch.no_grad():
        logits, cache = model(prompt)
        following = logits[:, -1]
        for t in range(prompt.shape[1], ids.shape[1]):
            token = following.argmax(-1)
            assert torch.equal(token, ids[:, t]), f"token {t}"
            following, cache = model.step(token, cache)


@pytest.mark.golden("lm_official", where=is_hybrid)
def test_attention_is_refused(case):
    with pytest.raises(ValueError, match=r"attn_layer_idx = \[1\]: layers of attention are not supported"):
        load_model(GOLDEN / case["dir"])


@pytest.mark.golden("lm_hf", where=lambda case: case["model_config"].get("n_groups", 1) > 1)
def test_groups_are_kept_unless_the_caller_says_otherwise(case):
    groups = case["model_config"]["n_groups"]
    width = case["model_config"]["expand"] * case["model_config"]["hidden_size"]
    told = (
        rf"transformers from 5\.23 on\. transformers before 5\.23 without .* all {width}; pass norm_group_size={width}"
    )
    with pytest.warns(UserWarning, match=told):
        model = load_model(GOLDEN / case["dir"])
    assert model.config.block.norm_width == width // groups
    want = load_golden(case)
    logits, _ = model(want["input_ids"])
    assert error(logits, want["logits_f32"], FLOOR) > 0.01


# Fields that old files lack, and what they meant then.
ABSENT = {"d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}, "tie_embeddings": True}


@pytest.mark.golden("lm_official", where=lambda case: all(case["model_config"][n] == v for n, v in ABSENT.items()))
def test_old_configs_take_the_official_defaults(case, tmp_path):
    config = dict(case["model_config"])
    (tmp_path / "config.json").write_text(json.dumps({n: v for n, v in config.items() if n not in ABSENT}))
    (tmp_path / "pytorch_model.bin").write_bytes((GOLDEN / case["weights"]).read_bytes())
    activation = {"a_activation": case["A_activation"]} if "A_activation" in case else {}
    assert load_model(tmp_path, **activation).config == load(case).config


@pytest.mark.golden("lm_official", where=is_supported)
def test_saving_gives_back_the_official_files(case, tmp_path):
    save_model(load(case), tmp_path, format="official")
    config = json.loads((tmp_path / "config.json").read_text())
    want = dict(case["model_config"])
    # Speed only, or the default spelled out.
    want["ssm_cfg"] = {"layer": "Mamba1", **{n: v for n, v in want["ssm_cfg"].items() if n != "chunk_size"}}
    if want["ssm_cfg"].get("mimo_rank") == 4:
        del want["ssm_cfg"]["mimo_rank"]
    assert config == {**want, "fused_add_norm": True}
    stored = torch.load(GOLDEN / case["weights"], weights_only=True)
    got = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert got.keys() == stored.keys()
    assert all(torch.equal(got[name], stored[name]) and got[name].dtype == stored[name].dtype for name in stored)


@pytest.mark.golden("lm_hf")
def test_saving_gives_back_the_files_of_transformers(case, tmp_path):
    save_for_transformers(load(case), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    want = case["model_config"]
    limit = config.pop("time_step_limit", want.get("time_step_limit"))
    assert limit == want.get("time_step_limit")
    assert config == {name: want[name] for name in config}
    stored, got = load_file(GOLDEN / case["weights"]), load_file(tmp_path / "model.safetensors")
    assert got.keys() == stored.keys()
    assert all(torch.equal(got[name], stored[name]) for name in stored)
