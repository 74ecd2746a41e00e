"""Hybrids of transformers: loaded here and there, in both directions, with the same numbers."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mambakit as mk
from hybrid_models import KINDS, theirs
from mambakit.checkpoints.hub import HUB
from test_checkpoints import NORM_OF_ALL, NORM_PER_GROUP
from their_releases import norm_width

every = pytest.mark.parametrize("name", KINDS)
INF = float("inf")


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 48, (batch, length), generator=torch.Generator().manual_seed(1))


def load(directory: Path, **options) -> mk.LanguageModel:
    """As transformers computes a call, without a word about what is left open, which has tests of its own."""
    if json.loads((directory / "config.json").read_text())["model_type"] == "nemotron_h":
        options = {"dt_limit": (0.001, INF), **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mk.load_model(directory, **options)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def edit(directory: Path, **changed) -> None:
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, **changed}))


@every
@torch.no_grad()
def test_theirs_and_back(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours = load(tmp_path / "theirs")
    tokens = ids(2, 21)
    want = model(tokens).logits
    close(ours(tokens)[0], want)
    mk.save_model(ours, tmp_path / "back", format="transformers", max_shard_bytes=30_000)
    there, back = stored(tmp_path / "theirs"), stored(tmp_path / "back")
    assert there.keys() == back.keys()
    assert all(torch.equal(tensor, back[key]) for key, tensor in there.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(model)
    close(again(tokens).logits, want)
    assert load(tmp_path / "back").config == ours.config
    mk.save_model(ours, tmp_path / "own")
    own = mk.load_model(tmp_path / "own")
    assert own.config == ours.config
    assert all(torch.equal(tensor, ours.state_dict()[key]) for key, tensor in own.state_dict().items())


@every
@torch.no_grad()
def test_greedy_continuations_and_padding(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)
    prompts = [ids(1, 9)[0].tolist(), ids(1, 14)[0].tolist()[3:], [5, 6]]
    together = mk.generate(ours, prompts, max_new_tokens=12, temperature=0)
    for prompt, row in zip(prompts, together, strict=True):
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert list(row)[-12:] == want[0, len(prompt) :].tolist()
    padded = torch.zeros(2, 11, dtype=torch.long)
    padded[0, 2:], padded[1, :2] = torch.tensor(prompts[0]), torch.tensor(prompts[2])
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0, 2:], mask[1, :2] = True, True
    logits = ours(padded, mask_bs=mask)[0]
    close(logits[0, 2:], ours(torch.tensor([prompts[0]]))[0][0])
    close(logits[1, :2], ours(torch.tensor([prompts[2]]))[0][0])


@pytest.mark.parametrize("name", ["nemotron_h-dense"])
@torch.no_grad()
def test_both_rules_for_step_sizes(name, tmp_path):
    model = theirs(name, time_step_min=0.05)
    for key, parameter in model.named_parameters():
        if key.endswith("dt_bias"):
            parameter.fill_(-3.5)  # softplus(-3.5) is 0.03
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"above time_step_min = 0.05 in a call.*dt_limit=\(0.05, inf\)"):
        free = mk.load_model(tmp_path)
    kept = mk.load_model(tmp_path, dt_limit=(0.05, INF))
    tokens = ids(2, 15)
    close(kept(tokens)[0], model(tokens).logits)
    # Its steps know no limit, but for the first, which is a call.
    theirs_after = model(tokens[:, :1], use_cache=True).past_key_values
    _, ours_after = kept(tokens[:, :1])
    for t in range(1, 15):
        found = model(tokens[:, t : t + 1], past_key_values=theirs_after, use_cache=True)
        logits, ours_after = free.step(tokens[:, t], ours_after)
        close(logits, found.logits[:, 0])
    assert (kept(tokens)[0] - free(tokens)[0]).abs().max() > 1e-3
    for ours in (free, kept):
        outputs, cache = [], None
        for token in tokens.unbind(1):
            logits, cache = ours.step(token, cache)
            outputs.append(logits)
        close(torch.stack(outputs, 1), ours(tokens)[0])


@pytest.mark.parametrize("name", ["granitemoehybrid", "bamba"])
@torch.no_grad()
def test_groups_of_the_gated_norm(name, tmp_path):
    model = theirs(name, mamba_n_groups=2)
    model.save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning,
        match=r"mamba_n_groups = 2.*all 64 channels, as transformers before 5.23.*, and from 5.23 on, .*per group; "
        "pass norm_group_size=32 for that, or 64 to keep this",
    ):
        assumed = mk.load_model(tmp_path)
    tokens = ids(1, 12)
    ours = {width: mk.load_model(tmp_path, norm_group_size=width) for width in (32, 64)}
    assert assumed.config == ours[64].config
    close(ours[norm_width(model)](tokens)[0], model(tokens).logits)
    assert (ours[32](tokens)[0] - ours[64](tokens)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("format", ["transformers", None])
@pytest.mark.parametrize(("width", "told"), [(32, NORM_PER_GROUP), (64, NORM_OF_ALL)])
@pytest.mark.parametrize("name", ["granitemoehybrid", "bamba"])
@torch.no_grad()
def test_groups_of_the_gated_norm_and_back(name, width, told, format, tmp_path):
    model = theirs(name, mamba_n_groups=2)
    model.save_pretrained(tmp_path / "theirs")
    ours = mk.load_model(tmp_path / "theirs", norm_group_size=width)
    with pytest.warns(UserWarning, match=told) as caught:
        mk.save_model(ours, tmp_path / "back", format=format or name)
    assert [warning.filename for warning in caught] == [__file__]
    assert mk.load_model(tmp_path / "back", norm_group_size=width).config == ours.config
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(model)
    tokens = ids(1, 12)
    got, want = again(tokens).logits, ours(tokens)[0]
    if width == norm_width(again):
        close(got, want)
    else:
        assert (got - want).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["granitemoehybrid", "bamba"])
def test_groups_of_the_gated_norm_that_no_release_has(name, tmp_path):
    theirs(name, mamba_n_groups=2).save_pretrained(tmp_path / "theirs")
    ours = mk.load_model(tmp_path / "theirs", norm_group_size=16)
    for format in ("transformers", name):
        with pytest.raises(ValueError, match=r"norm_group_size = 16"):
            mk.save_model(ours, tmp_path / "back", format=format)
    assert not (tmp_path / "back").exists()


def test_letters_of_older_files(tmp_path):
    theirs("nemotron_h").save_pretrained(tmp_path)
    want = load(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["layers_block_type"]
    edited = {**values, "hybrid_override_pattern": "ME*-", "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    assert load(tmp_path).config == want.config


def test_fields_that_nobody_reads_are_told(tmp_path):
    theirs("bamba").save_pretrained(tmp_path)
    edit(tmp_path, another_field=1)
    with pytest.warns(UserWarning, match="fields of config.json that are not read: another_field"):
        mk.load_model(tmp_path)


@pytest.mark.parametrize("kind", HUB)
def test_a_format_asked_for_by_name(kind, tmp_path):
    theirs(kind).save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    mk.save_model(ours, tmp_path / "again", format=kind)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == kind
    other = mk.LanguageModel(mk.ModelConfig(block=mk.Mamba2Config(d_model=8, per_head_dim=4), n_layer=1, vocab_size=9))
    if kind != "nemotron_h":
        with pytest.raises(ValueError, match=r"layer 0 is Mamba2, where .* is expected"):
            mk.save_model(other, tmp_path / "other", format=kind)
    assert not (tmp_path / "other").exists()


def test_what_no_model_of_transformers_has(tmp_path):
    blocks = (mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8), mk.AttentionConfig(16, 2))
    model = mk.LanguageModel(mk.ModelConfig(layers=(blocks,), vocab_size=9))
    with pytest.raises(ValueError, match=r"no model of transformers is like this one.*jamba: layer 0 is Mamba3"):
        mk.save_model(model, tmp_path / "model", format="transformers")
    with pytest.raises(ValueError, match="has no layers of several kinds"):
        mk.save_model(model, tmp_path / "model", format="official")
    mk.save_model(model, tmp_path / "model")
    assert mk.load_model(tmp_path / "model").config == model.config


class TestMalformed:
    @pytest.mark.parametrize(
        ("kind", "changed", "named"),
        [
            (
                "nemotron_h",
                {"layers_block_type": None, "hybrid_override_pattern": "MXE"},
                "hybrid_override_pattern has 'X'",
            ),
            ("nemotron_h", {"layers_block_type": ["mamba", "rnn"]}, "layers_block_type has 'rnn'"),
            ("nemotron_h", {"layers_block_type": None}, "neither layers_block_type nor hybrid_override_pattern"),
            ("nemotron_h", {"num_key_value_heads": 3}, "kv_heads"),
            ("nemotron_h", {"num_experts_per_tok": 9}, "top_k = 9 is more than n_experts = 4"),
            ("nemotron_h", {"n_group": 3}, "n_experts = 4 is not a multiple of groups = 3"),
            ("nemotron_h", {"mlp_hidden_act": "step"}, "mlp_hidden_act = 'step' is unknown"),
            ("nemotron_h", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1 is not supported"),
            ("nemotron_h", {"n_routed_experts": 6}, "missing .*experts.4.up_proj"),
            ("nemotron_h", {"hidden_size": 10**12}, "no tensor has an axis above"),
            ("granitemoehybrid", {"layer_types": ["mamba", "lstm", "mamba"]}, "layer_types has 'lstm'"),
            ("granitemoehybrid", {"num_hidden_layers": 10**9}, "num_hidden_layers asks for 1000000000 layers"),
            ("granitemoehybrid", {"num_hidden_layers": 5}, "layer_types has 3 entries for num_hidden_layers = 5"),
            (
                "granitemoehybrid",
                {"num_attention_heads": 5},
                "hidden_size = 32 is not a multiple of num_attention_heads",
            ),
            ("granitemoehybrid", {"logits_scaling": 0.0}, "division|zero|positive"),
            ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
            ("granitemoehybrid", {"rope_parameters": {"rope_type": "yarn"}}, "rope of the kind 'yarn'"),
            (
                "falcon_h1",
                {"ssm_multipliers": [1.0, 2.0]},
                r"ssm_multipliers = \[1.0, 2.0\] is not a list of 5 numbers",
            ),
            ("falcon_h1", {"mamba_n_heads": 7}, "mamba_n_heads = 7 times mamba_d_head = 8"),
            ("falcon_h1", {"mamba_proj_bias": True}, "mamba_proj_bias = True and projectors_bias = False"),
            ("bamba", {"attn_layer_indices": [7]}, r"attn_layer_indices names layers \[7\]"),
            ("bamba", {"attn_layer_indices": "all"}, "attn_layer_indices = 'all' is not"),
            ("jamba", {"attn_layer_offset": 2}, "attn_layer_offset = 2 has to be below attn_layer_period = 2"),
            ("jamba", {"num_experts": 5}, "missing .*experts.4"),
            ("falcon_mamba", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported, only 'silu'"),
            ("falcon_mamba", {"num_hidden_layers": 0}, "num_hidden_layers asks for 0 layers"),
        ],
    )
    def test_configs(self, kind, changed, named, tmp_path):
        theirs(kind).save_pretrained(tmp_path)
        edit(tmp_path, **changed)
        with pytest.raises(ValueError, match=named):
            load(tmp_path)

    @pytest.mark.parametrize("kind", HUB)
    def test_weights(self, kind, tmp_path):
        theirs(kind).save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        gone, bent = sorted(tensors)[3], sorted(tensors)[-3]
        tensors[bent] = tensors[bent][..., :-1].contiguous()
        del tensors[gone]
        save_file({**tensors, "another": torch.ones(2)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError) as caught:
            load(tmp_path)
        for told in (f"missing {gone}", "left over another", f"{bent} is "):
            assert told in str(caught.value)

    def test_a_router_of_our_own_format(self, tmp_path):
        theirs("nemotron_h").save_pretrained(tmp_path / "theirs")
        mk.save_model(load(tmp_path / "theirs"), tmp_path / "own")
        values = json.loads((tmp_path / "own" / "config.json").read_text())
        for value, told in (
            ("dice", "router = 'dice' is unknown"),
            (3, r"layers\[1\]\[0\].router = 3 is not a string"),
        ):
            values["model"]["layers"][1][0]["router"] = value
            (tmp_path / "own" / "config.json").write_text(json.dumps(values))
            with pytest.raises(ValueError, match=told):
                mk.load_model(tmp_path / "own")

    @pytest.mark.parametrize("model_type", ["zamba2", "mixtral"])
    def test_other_models(self, model_type, tmp_path):
        theirs("bamba").save_pretrained(tmp_path)
        edit(tmp_path, model_type=model_type)
        with pytest.raises(ValueError, match=f"'{model_type}' is not supported, expected one of mamba, .*falcon_mamba"):
            mk.load_model(tmp_path)
