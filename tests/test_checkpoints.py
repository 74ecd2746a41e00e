"""Models on disk: round trips, other packages' files, what is refused, and that saving is all or nothing."""

import io
import json
import math
import pickle
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compare import error
from mambakit import LanguageModel, Mamba1Config, Mamba2Config, Mamba3Config, ModelConfig
from mambakit.checkpoints import load_model, save_model
from mambakit.checkpoints import writing as checkpoint_writing
from mambakit.inference.generation import generate
from mambakit.models.multi_gate import MultiGateConfig
from mambakit.models.schedules import Cyclic
from their_releases import norm_width

WIDTH = {"d_model": 16, "state_rank": 8}
HEADS = {**WIDTH, "per_head_dim": 8}
BLOCKS = {
    "mamba1": Mamba1Config(**WIDTH),
    "mamba1-options": Mamba1Config(**WIDTH, conv_kernel=3, dt_rank=2, bias=True, conv_bias=False, expand=3),
    "mamba2": Mamba2Config(**HEADS),
    "mamba2-options": Mamba2Config(**HEADS, bias=True, dt_limit=(0.01, 0.5), ngroups=2, norm_group_size=32),
    "mamba2-groups": Mamba2Config(**HEADS, ngroups=2),
    "mamba3": Mamba3Config(**HEADS),
    "mamba3-options": Mamba3Config(**HEADS, is_mimo=True, mimo_rank=2, is_outproj_norm=True, rope_fraction=1.0),
}
OURS_ALONE = {
    "mamba2-states": Mamba2Config(**HEADS, learnable_init_states=True, norm_eps=0.02),
    "mamba3-quaternion": Mamba3Config(**HEADS, rotation="quaternion", a_activation="softplus", dt_limit=(0.0, 9.0)),
}
STACK_OPTIONS = {
    "virtual": Cyclic(5),
    "ignore_first_residual": True,
    "multi_gate": MultiGateConfig(n_streams=2),
    "stack_latents": ("start",),
}
OFFICIAL = [name for name in BLOCKS if name != "mamba2-options"]
TRANSFORMERS = [name for name in BLOCKS if not name.startswith("mamba3")]
NORM_OF_ALL = r"over all \d+ channels, .*transformers before 5\.23 without .* the same; from 5\.23 on .*group by itself"
NORM_PER_GROUP = r"per group, over \d+ channels, .*transformers from 5\.23 on .* the same; before, without .* together"
ACTIVATION_WARNING = "ignore:official Mamba-3 checkpoints do not say:UserWarning"


def make(block, **options) -> LanguageModel:
    """A small model no parameter of which is at its initial value."""
    model = LanguageModel(ModelConfig(block=block, **{"n_layer": 2, "vocab_size": 21, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def assert_same(got: LanguageModel, want: LanguageModel) -> None:
    """Bit by bit, and tied alike."""
    a, b = got.state_dict(), want.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name
    assert (got.lm_head.weight is got.backbone.embedding.weight) == want.config.tie_embeddings


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def edit_config(directory: Path, **changed) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def edit_weights(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def named_at_once(directory: Path, about: str, *parts: str) -> str:
    """Loading fails with one message that says what it is about and each of the parts; returns it."""
    with pytest.raises(ValueError, match=about) as caught:
        load_model(directory)
    message = str(caught.value)
    assert not [part for part in parts if part not in message], message
    return message


def save_for_transformers(model: LanguageModel, directory: Path, **options) -> dict[str, int]:
    """With the warning that models of several groups give; returns what loads the same model."""
    block: Any = model.config.block
    if getattr(block, "ngroups", 1) == 1:
        save_model(model, directory, format="transformers", **options)
        return {}
    told = NORM_OF_ALL if block.norm_width == block.ssm_width else NORM_PER_GROUP
    with pytest.warns(UserWarning, match=told) as caught:
        save_model(model, directory, format="transformers", **options)
    (warning,) = caught
    assert warning.filename == __file__
    assert f"Pass norm_group_size={block.norm_width} to load_model" in str(warning.message)
    return {"norm_group_size": block.norm_width}


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint in our format, untied, to be damaged."""
    save_model(make(BLOCKS["mamba2"], tie_embeddings=False), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def official(tmp_path) -> Path:
    save_model(make(BLOCKS["mamba2"]), tmp_path / "model", format="official")
    return tmp_path / "model"


class TestRoundTrips:
    @pytest.mark.parametrize("name", [*BLOCKS, *OURS_ALONE])
    @pytest.mark.parametrize("tied", [True, False])
    def test_ours_keeps_everything(self, name, tied, tmp_path):
        block = {**BLOCKS, **OURS_ALONE}[name]
        options = {"rms_norm": False, "norm_eps": 1e-6, "d_intermediate": 40, "residual_in_fp32": False}
        model = make(block, tie_embeddings=tied, **options)
        save_model(model, tmp_path / "model")
        loaded = load_model(tmp_path / "model")
        assert loaded.config == model.config
        assert_same(loaded, model)

    def test_ours_names_its_type_but_need_not(self, saved):
        model, path = load_model(saved), saved / "config.json"
        config = json.loads(path.read_text())
        assert config.pop("model_type") == "mambakit"
        path.write_text(json.dumps(config))
        assert_same(load_model(saved), model)

    def test_ours_keeps_what_only_our_stacks_have(self, tmp_path):
        model = make(BLOCKS["mamba2"], **STACK_OPTIONS)
        save_model(model, tmp_path / "model")
        loaded = load_model(tmp_path / "model")
        assert loaded.config == model.config
        assert_same(loaded, model)
        for format in ("official", "transformers"):
            with pytest.raises(
                ValueError, match=r"virtual = .*ignore_first_residual = True, multi_gate = .*stack_latents"
            ):
                save_model(model, tmp_path / format, format=format)

    @pytest.mark.filterwarnings(ACTIVATION_WARNING)
    @pytest.mark.parametrize("name", OFFICIAL)
    @pytest.mark.parametrize("tied", [True, False])
    def test_official(self, name, tied, tmp_path):
        model = make(BLOCKS[name], tie_embeddings=tied, d_intermediate=40, rms_norm=False)
        save_model(model, tmp_path / "model", format="official")
        loaded = load_model(tmp_path / "model")
        assert loaded.config == model.config
        assert_same(loaded, model)

    @pytest.mark.parametrize("name", TRANSFORMERS)
    @pytest.mark.parametrize("tied", [True, False])
    def test_transformers(self, name, tied, tmp_path):
        model = make(BLOCKS[name], tie_embeddings=tied)
        groups = save_for_transformers(model, tmp_path / "model")
        loaded = load_model(tmp_path / "model", **groups)
        assert_same(loaded, model)
        assert loaded.config.vocab_size == model.config.padded_vocab_size == 24
        assert save_for_transformers(loaded, tmp_path / "again") == groups
        again = load_model(tmp_path / "again", **groups)
        assert_same(again, model)
        assert again.config == loaded.config
        ids_bs = torch.randint(0, 21, (2, 5))
        torch.testing.assert_close(again(ids_bs)[0][..., :21], model(ids_bs)[0])

    @pytest.mark.parametrize("format", ["mambakit", "official", "transformers"])
    def test_in_parts(self, format, tmp_path):
        model = make(BLOCKS["mamba2"])
        save_model(model, tmp_path / "model", format=format, max_shard_bytes=4000)
        parts = [path for path in (tmp_path / "model").iterdir() if "-of-" in path.name]
        assert len(parts) > 2
        assert any(name.endswith(".index.json") for name in names(tmp_path / "model"))
        assert_same(load_model(tmp_path / "model"), model)

    def test_marks_for_optimizers_are_kept(self, tmp_path):
        model = make(BLOCKS["mamba2"])
        save_model(model, tmp_path / "model")
        loaded = load_model(tmp_path / "model")
        for name, parameter in model.named_parameters():
            assert vars(loaded.get_parameter(name)) == vars(parameter), name

    def test_the_random_state_is_left_alone(self, saved):
        torch.manual_seed(3)
        load_model(saved)
        after = torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(after, torch.rand(1))


class TestDtypes:
    def test_stored_dtype_is_kept_and_decays_stay_wide(self, tmp_path):
        model = LanguageModel(
            ModelConfig(block=BLOCKS["mamba3-options"], n_layer=1, vocab_size=9), dtype=torch.bfloat16
        )
        save_model(model, tmp_path / "model")
        assert_same(load_model(tmp_path / "model"), model)

    def test_decays_stored_narrow_become_wide(self, saved):
        edit_weights(saved, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
        mixer = load_model(saved).backbone.layers[0].mixer
        assert mixer.in_proj.weight.dtype == torch.bfloat16
        assert mixer.A_log.dtype == mixer.dt_bias.dtype == mixer.D.dtype == torch.float32

    def test_dtype_argument(self, saved):
        half = load_model(saved, dtype=torch.float16).backbone.layers[0].mixer
        assert (half.in_proj.weight.dtype, half.A_log.dtype) == (torch.float16, torch.float32)
        assert {p.dtype for p in load_model(saved, dtype=torch.float64).parameters()} == {torch.float64}
        with pytest.raises(ValueError, match=r"torch.int8"):
            load_model(saved, dtype=torch.int8)

    def test_narrowing_that_nobody_asked_for_is_told(self, saved):
        edit_weights(saved, lambda t: t.update({n: v.bfloat16() for n, v in t.items() if n.endswith("in_proj.weight")}))
        with pytest.warns(UserWarning, match=r"become narrower: .*norm_f\.weight \(torch.float32\)"):
            load_model(saved)

    def test_device(self, saved):
        assert {p.device.type for p in load_model(saved, device="meta").parameters()} == {"meta"}


class TestOfficialFiles:
    def test_config_is_as_the_official_package_writes_it(self, tmp_path):
        save_model(make(BLOCKS["mamba3-options"]), tmp_path / "model", format="official")
        assert json.loads((tmp_path / "model" / "config.json").read_text()) == {
            "d_model": 16,
            "d_intermediate": 0,
            "n_layer": 2,
            "vocab_size": 21,
            "ssm_cfg": {
                "layer": "Mamba3",
                "d_state": 8,
                "headdim": 8,
                "is_mimo": True,
                "mimo_rank": 2,
                "is_outproj_norm": True,
                "rope_fraction": 1.0,
            },
            "attn_layer_idx": [],
            "attn_cfg": {},
            "rms_norm": True,
            "residual_in_fp32": True,
            "fused_add_norm": True,
            "pad_vocab_size_multiple": 8,
            "tie_embeddings": True,
        }

    def test_head_is_stored_when_tied_but_need_not_be(self, official):
        path = official / "pytorch_model.bin"
        tensors = torch.load(path, weights_only=True)
        assert torch.equal(tensors["lm_head.weight"], tensors["backbone.embedding.weight"])
        tensors["backbone.embeddings.weight"] = tensors.pop("backbone.embedding.weight")
        model = load_model(official)
        del tensors["lm_head.weight"]
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
        assert_same(load_model(official), model)

    def test_a_tied_head_that_is_another_is_refused(self, official):
        tensors = torch.load(official / "pytorch_model.bin", weights_only=True)
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
        torch.save(tensors, official / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"the head is tied, but lm_head.weight differs"):
            load_model(official)

    def test_safetensors_beside_an_official_config(self, official):
        model = load_model(official)
        tensors = torch.load(official / "pytorch_model.bin", weights_only=True)
        (official / "pytorch_model.bin").unlink()
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, official / "model.safetensors")
        assert_same(load_model(official), model)

    def test_activation_of_mamba3_is_asked_for(self, tmp_path):
        save_model(make(BLOCKS["mamba3"]), tmp_path / "model", format="official")
        with pytest.warns(UserWarning, match='a_activation="softplus"'):
            assert load_model(tmp_path / "model").config.block.a_activation == "heavy_tail"
        assert load_model(tmp_path / "model", a_activation="softplus").config.block.a_activation == "softplus"
        with pytest.raises(ValueError, match="a_activation = 'sigmoid' is unknown"):
            load_model(tmp_path / "model", a_activation="sigmoid")

    def test_choices_that_are_none(self, saved, tmp_path):
        with pytest.raises(ValueError, match="a_activation = 'softplus' was given, but this is a mamba2 model"):
            load_model(saved, a_activation="softplus")
        with pytest.raises(ValueError, match=r"norm_group_size = 16 was given, but config.json says None"):
            load_model(saved, norm_group_size=16)
        assert load_model(saved, norm_group_size=32).config.block.norm_width == 32
        save_model(make(BLOCKS["mamba3"]), tmp_path / "other")
        with pytest.raises(ValueError, match=r"but config.json says 'heavy_tail'"):
            load_model(tmp_path / "other", a_activation="softplus")


class TestTransformers:
    """Against the package itself."""

    SIZES: ClassVar = {
        "vocab_size": 24,
        "hidden_size": 16,
        "state_size": 8,
        "num_hidden_layers": 2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }

    def theirs(self, kind: str, **options):
        config = getattr(transformers, f"{kind}Config")(**self.SIZES, **options)
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            ("Mamba", {}),
            (
                "Mamba",
                {"use_bias": True, "tie_word_embeddings": False, "time_step_rank": 3, "layer_norm_epsilon": 1e-3},
            ),
            ("Mamba2", {"head_dim": 8, "num_heads": 4, "n_groups": 1}),
            ("Mamba2", {"head_dim": 8, "num_heads": 4, "n_groups": 2, "time_step_limit": (0.01, math.inf)}),
            ("Mamba2", {"head_dim": 8, "num_heads": 4, "n_groups": 1, "layer_norm_epsilon": 0.02}),
        ],
    )
    @pytest.mark.parametrize("shard", ["5GB", "4KB"])
    def test_theirs_load_here(self, kind, options, shard, tmp_path):
        model = self.theirs(kind, **options)
        model.save_pretrained(tmp_path, max_shard_size=shard)
        groups = {"norm_group_size": norm_width(model)} if options.get("n_groups") == 2 else {}
        ours = load_model(tmp_path, **groups)
        self.agree(ours, model)
        # Without their cache: their decoding forgets `time_step_limit`.
        ids_bs = torch.randint(0, 21, (2, 13))
        want = model.generate(ids_bs, max_new_tokens=8, do_sample=False, use_cache=False)[:, 13:]
        assert torch.equal(generate(ours, ids_bs, max_new_tokens=8, temperature=0), want)

    @pytest.mark.parametrize("name", TRANSFORMERS)
    @pytest.mark.parametrize("max_shard_bytes", [None, 4000])
    def test_ours_load_there(self, name, max_shard_bytes, tmp_path):
        ours = make(BLOCKS[name])
        groups = save_for_transformers(ours, tmp_path / "model", max_shard_bytes=max_shard_bytes)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
        theirs, report = loaded
        assert not any(report.values()), report
        assert theirs.config.tie_word_embeddings
        if not groups or groups["norm_group_size"] == norm_width(theirs):
            self.agree(ours, theirs.eval())
        else:
            # As the warning says: another release computes it.
            assert self.difference(ours, theirs.eval()) > 0.01

    def agree(self, ours, theirs):
        assert self.difference(ours, theirs) <= 1e-4

    @torch.no_grad()
    def difference(self, ours, theirs) -> float:
        ids_bs = torch.randint(0, 21, (2, 13))
        got, want = ours(ids_bs)[0], theirs(ids_bs).logits
        return error(got, want[..., : got.shape[-1]], 1e-6)

    def test_which_release_norms_what(self):
        """What warnings and docs say of releases holds for the one that is installed."""
        major, minor = map(int, transformers.__version__.split(".")[:2])
        model = self.theirs("Mamba2", head_dim=8, num_heads=4, n_groups=2)
        assert norm_width(model) == (16 if (major, minor) >= (5, 23) else 32)

    @pytest.mark.parametrize("infinity", ["Infinity", '{"__float__": "Infinity"}'])
    def test_both_spellings_of_infinity(self, infinity, tmp_path):
        save_model(make(BLOCKS["mamba2"]), tmp_path, format="transformers")
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace("{", f'{{"time_step_limit": [0.5, {infinity}],', 1))
        assert load_model(tmp_path).config.block.dt_limit == (0.5, math.inf)

    def test_left_over_official_fields_are_held_to_the_others(self, tmp_path):
        save_model(make(BLOCKS["mamba1"]), tmp_path, format="transformers")
        edit_config(tmp_path, d_model=16, n_layer=2, ssm_cfg={}, rms_norm=True, fused_add_norm=True, d_inner=32)
        load_model(tmp_path)
        edit_config(tmp_path, d_model=17, hidden_act="gelu", quantization_config={}, use_bias=1)
        with pytest.raises(ValueError, match="unknown field quantization_config; use_bias = 1 is not true or false"):
            load_model(tmp_path)
        edit_config(tmp_path, use_bias=False)
        with pytest.raises(ValueError, match="quantization_config") as caught:
            load_model(tmp_path)
        assert "d_model = 17, but only 16" in str(caught.value)
        assert "hidden_act = 'gelu', but only 'silu'" in str(caught.value)


class TestWhatFormatsCannotExpress:
    @pytest.mark.parametrize(
        ("block", "options", "format", "named"),
        [
            (Mamba3Config(**HEADS), {}, "transformers", "no Mamba-3"),
            (Mamba2Config(**HEADS), {"d_intermediate": 64}, "transformers", "d_intermediate = 64"),
            (Mamba2Config(**HEADS), {"rms_norm": False}, "transformers", "rms_norm = False"),
            (Mamba2Config(**HEADS, expand=1.5), {}, "transformers", "num_heads"),
            (Mamba2Config(**HEADS, ngroups=2, norm_group_size=8), {}, "transformers", "block.norm_group_size = 8"),
            (Mamba2Config(**HEADS, norm_group_size=16), {}, "transformers", "block.norm_group_size = 16"),
            (Mamba2Config(**HEADS, d_ssm=16), {}, "transformers", "num_heads"),
            (Mamba2Config(**HEADS, D_has_hdim=True), {}, "transformers", "block.D_has_hdim = True"),
            (Mamba2Config(**HEADS), {"norm_eps": 1e-6}, "transformers", "cannot express norm_eps = 1e-06"),
            (Mamba2Config(**HEADS, norm_eps=1e-6), {}, "transformers", "cannot express norm_eps = 1e-05"),
            (Mamba2Config(**HEADS, norm_eps=1e-6), {}, "official", "block.norm_eps = 1e-06"),
            (Mamba1Config(**WIDTH), {"norm_eps": 1e-6}, "official", "norm_eps = 1e-06"),
            (Mamba2Config(**HEADS, expand=1.5), {}, "official", "block.expand = 1.5"),
            (Mamba2Config(**HEADS, learnable_init_states=True), {}, "official", "block.learnable_init_states = True"),
            (Mamba2Config(**HEADS, ngroups=2, norm_group_size=32), {}, "official", "block.norm_group_size = 32"),
            (Mamba3Config(**HEADS, rotation="quaternion"), {}, "official", "block.rotation = 'quaternion'"),
            (Mamba3Config(**HEADS, a_activation="softplus"), {}, "official", "block.a_activation = 'softplus'"),
            (Mamba3Config(**HEADS, rope_fraction=0.0), {}, "official", "rope_fraction = 0"),
        ],
    )
    def test_is_refused_before_anything_is_written(self, block, options, format, named, tmp_path):
        with pytest.raises(ValueError, match=named):
            save_model(make(block, **options), tmp_path / "model", format=format)
        assert not names(tmp_path)

    def test_all_fields_are_named_at_once(self, tmp_path):
        block = Mamba3Config(**HEADS, rotation="quaternion", dt_limit=(0.0, 5.0), norm_eps=1e-6)
        with pytest.raises(ValueError, match=r"rotation = .*dt_limit = .*norm_eps = "):
            save_model(make(block), tmp_path / "model", format="official")

    def test_parameters_that_the_config_does_not_have(self, tmp_path):
        model = make(BLOCKS["mamba1"])
        model.extra = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match=r"left over extra.bias, extra.weight"):
            save_model(model, tmp_path / "model")

    def test_arguments(self, tmp_path):
        with pytest.raises(
            ValueError, match="format = 'gguf' is unknown; choose from mambakit, official, transformers"
        ):
            save_model(make(BLOCKS["mamba1"]), tmp_path, format="gguf")
        with pytest.raises(ValueError, match="takes a LanguageModel, got a Linear"):
            save_model(torch.nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="max_shard_bytes = 0"):
            save_model(make(BLOCKS["mamba1"]), tmp_path, max_shard_bytes=0)


class TestMalformedConfigs:
    def test_absent(self, saved):
        (saved / "config.json").unlink()
        with pytest.raises(ValueError, match=r"there is no config\.json in"):
            load_model(saved)

    @pytest.mark.parametrize("text", ["{", "", "[1]", '"text"', "\xff", "[" * 100_000])
    def test_not_json_or_no_object(self, saved, text):
        (saved / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"config\.json (is not JSON|holds a)"):
            load_model(saved)

    @pytest.mark.parametrize("layer", ["Mamba4", None, 3, ["Mamba2"]])
    def test_unknown_layer(self, official, layer):
        edit_config(official, ssm_cfg={"layer": layer})
        with pytest.raises(ValueError, match=r"ssm_cfg.layer = .* is unknown, expected one of Mamba1, Mamba2, Mamba3"):
            load_model(official)

    def test_every_wrong_field_is_named_at_once(self, official):
        ssm = {"layer": "Mamba2", "state_rank": 8, "d_staet": 8, "headdim": "8", "chunk_size": 64, "dt_limit": [1]}
        edit_config(official, ssm_cfg=ssm, n_layers=2, n_layer=2.5, attn_layer_idx=[0], tie_embeddings=0)
        message = named_at_once(
            official,
            r"config\.json, read in the format 'official'",
            "unknown field n_layers",
            "unknown field ssm_cfg.d_staet",
            "unknown field ssm_cfg.state_rank",
            "ssm_cfg.headdim = '8' is not an integer",
            "ssm_cfg.dt_limit = [1] is not a list of 2 numbers",
            "n_layer = 2.5 is not an integer",
            "tie_embeddings = 0 is not true or false",
            "attn_layer_idx = [0]: layers of attention",
        )
        assert "chunk_size" not in message

    def test_values_that_no_model_has(self, official):
        edit_config(official, ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 7, "typo": 1})
        with pytest.raises(ValueError, match=r"unknown field ssm_cfg.typo; d_inner = 32 is not a multiple of"):
            load_model(official)

    @pytest.mark.parametrize("model_type", ["llama", "zamba2", None, ["mamba"]])
    def test_other_models(self, official, model_type):
        edit_config(official, model_type=model_type)
        with pytest.raises(ValueError, match=r"model_type = .* is not supported, expected one of mamba, mamba2, nemo"):
            load_model(official)

    @pytest.mark.parametrize(
        "changed",
        [
            {"version": 2},
            {"more": 1},
            {"model": 3},
            {"model": {}},
            {"model": {"block": {"family": "mamba1"}}},
            {"model_type": "llama"},
        ],
    )
    def test_ours(self, saved, changed):
        edit_config(saved, **changed)
        with pytest.raises(ValueError, match=r"config\.json, read in the format 'mambakit'"):
            load_model(saved)

    @pytest.mark.parametrize(
        ("changed", "named"),
        [
            ({"n_layer": 10**9}, "n_layer asks for 1000000000, and at most 1048576"),
            ({"n_layer": 2**64}, "18446744073709551616, which is no size of anything"),
            ({"virtual": {"schedule": "Cyclic", "n": 10**9}}, "virtual.n asks for 1000000000, and at most 10000"),
            ({"virtual": {"schedule": "Custom", "indices": [0] * 10_001}}, "virtual.indices asks for 10001, and"),
            ({"virtual": {"schedule": "Cyclic", "n": "3"}}, "virtual.n = '3' is not an integer"),
            (
                {"virtual": {"schedule": "Custom", "indices": ["0"]}},
                "virtual.indices = ('0',) is not a list",
            ),
            ({"virtual": {"schedule": [], "n": 3}}, "schedule is [], expected one of Cyclic"),
            ({"multi_gate": {"n_streams": 10**9}}, "n_streams = 1000000000"),
            ({"multi_gate": {"n_streams": "x"}}, "model.multi_gate.n_streams = 'x' is not an integer"),
            ({"multi_gate": 3}, "wrong type"),
            ({"n_layer": "2", "norm_eps": None}, "model.n_layer = '2' is not an integer; model.norm_eps = None"),
            ({"stack_latents": 3}, "model.stack_latents = 3 is not a list"),
            ({"stack_latents": [[]]}, "model.stack_latents"),
            ({"block": []}, "block = [] is of the wrong type, expected an object"),
            ({"block": 3}, "wrong type"),
            ({"vocab_size": 10**9}, "vocab_size = 1000000000"),
            ({"d_intermediate": 10**12}, "d_intermediate = 1000000000000"),
        ],
    )
    def test_models_that_cannot_be(self, saved, changed, named):
        model = json.loads((saved / "config.json").read_text())["model"]
        edit_config(saved, model={**model, **changed})
        named_at_once(saved, "config.json", named)

    @pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("d_model", 10**9),
            ("d_model", 10**9 + 1),
            ("d_model", 2**64),
            ("d_model", "16"),
            ("state_rank", 10**9),
            ("expand", 1e300),
            ("expand", 1e12),
            ("expand", "inf"),
            ("per_head_dim", 10**9),
            ("conv_kernel", 2**62),
            ("dt_limit", [0, [1]]),
            ("norm_group_size", -4),
            ("dt_rank", 10**15),
            ("family", ["mamba1"]),
        ],
    )
    def test_blocks_that_cannot_be(self, name, field, value, tmp_path):
        save_model(make(BLOCKS[name]), tmp_path)
        model = json.loads((tmp_path / "config.json").read_text())["model"]
        edit_config(tmp_path, model={**model, "block": {**model["block"], field: value}})
        with pytest.raises(ValueError, match=r"config\.json"):
            load_model(tmp_path)

    @pytest.mark.parametrize("depth", [40, 900, 100_000])
    @pytest.mark.parametrize("place", ["ssm_cfg", "attn_cfg", "n_layer"])
    def test_nested_too_deep(self, official, depth, place):
        config = json.loads((official / "config.json").read_text())
        text = json.dumps({**config, place: "here"}).replace('"here"', "[" * depth + "]" * depth)
        (official / "config.json").write_text(text)
        named_at_once(official, r"config\.json is (nested|not JSON)")

    @pytest.mark.parametrize("content", ['{"a": {"__float__": []}}', '{"a": {"__float__": "x"}}'])
    def test_tagged_floats_that_are_none(self, saved, content):
        (saved / "config.json").write_text(content)
        named_at_once(saved, r"config\.json is not JSON")

    def test_too_large_to_be_read(self, saved):
        with open(saved / "config.json", "ab") as file:
            file.truncate(10**10)
        named_at_once(saved, r"config\.json has 10,000,000,000 bytes")

    def test_no_file(self, saved):
        (saved / "config.json").unlink()
        (saved / "config.json").mkdir()
        named_at_once(saved, r"there is no config\.json in")


class TestMalformedWeights:
    def test_a_small_file_for_a_large_model(self, official):
        """Views of one number stand for as many as they like."""
        tensors = torch.load(official / "pytorch_model.bin", weights_only=True)
        spread = {name: torch.zeros(1).expand(10**6, 10**6) for name in tensors}
        torch.save(spread, official / "pytorch_model.bin")
        named_at_once(official, r"pytorch_model\.bin holds tensors of")

    def test_more_tensors_than_any_model_has(self, saved):
        header = {f"{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(200_000)}
        text = json.dumps(header).encode()
        (saved / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        named_at_once(saved, r"model\.safetensors holds 200000 tensors")

    def test_missing_left_over_and_misshapen_are_listed_at_once(self, saved):
        def change(tensors):
            del tensors["backbone.norm_f.weight"], tensors["backbone.layers.1.mixer.D"]
            tensors["more"] = torch.ones(1)
            for name in ("backbone.embedding.weight", "lm_head.weight"):
                tensors[name] = torch.ones(32, 16)
            tensors["backbone.layers.0.mixer.dt_bias"] = torch.ones(5)

        edit_weights(saved, change)
        named_at_once(
            saved,
            r"the weights in .* do not fit its config\.json",
            "missing backbone.layers.1.mixer.D, backbone.norm_f.weight",
            "left over more",
            "backbone.embedding.weight is [32, 16] instead of [24, 16]",
            "lm_head.weight is [32, 16] instead of [24, 16]",
            "the tensors have a vocabulary padded to a multiple of 8 = 32, the config gives 24",
            "the tensors have nheads = 5, the config gives 4",
        )

    def test_sizes_are_told_from_the_tensors(self, official):
        edit_config(official, n_layer=3, ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 8, "ngroups": 2})
        with pytest.raises(ValueError, match="conv_dim = 48, the config gives 64") as caught:
            load_model(official)
        assert "n_layer = 2, the config gives 3" in str(caught.value)

    def test_an_absurd_number_of_layers_is_not_built(self, official):
        edit_config(official, n_layer=10**6)
        with pytest.raises(ValueError, match="the config has 1000000 layers"):
            load_model(official)

    @pytest.mark.parametrize("format", ["mambakit", "official"])
    @pytest.mark.parametrize("kept", [0, 3, 100, -7])
    def test_cut_short(self, format, kept, tmp_path):
        save_model(make(BLOCKS["mamba1"]), tmp_path, format=format)
        path = next(path for path in tmp_path.iterdir() if path.name != "config.json")
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(ValueError, match=path.name):
            load_model(tmp_path)

    def test_no_weights(self, saved):
        (saved / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"no weights in .*: no model\.safetensors or pytorch_model\.bin"):
            load_model(saved)

    @pytest.mark.parametrize("legacy", [True, False])
    @pytest.mark.parametrize("hidden", [True, False])
    def test_code_in_a_pickle_is_not_run(self, official, legacy, hidden, tmp_path):
        class Malicious:
            def __reduce__(self):
                return Path.touch, (tmp_path / "ran",)

        payload = {"backbone.norm_f.weight": Malicious()} if hidden else Malicious()
        path = official / "pytorch_model.bin"
        if legacy:
            path.write_bytes(pickle.dumps(payload))
        else:
            torch.save(payload, path)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin was refused: .* None of it was run"):
            load_model(official)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        "content",
        [
            [torch.ones(1)],
            {"a": {"b": torch.ones(1)}},
            {"a": 1},
            {1: torch.ones(1)},
            {"a": torch.ones(1, dtype=torch.int8)},
            {"a": torch.ones(2, 2).to_sparse()},
            {"a": torch.ones(1, device="meta")},
        ],
    )
    def test_what_is_no_mapping_of_floats(self, official, content):
        torch.save(content, official / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin holds (no plain mapping|tensors that are not plain)"):
            load_model(official)


class TestMalformedParts:
    @pytest.fixture
    def parts(self, tmp_path) -> Path:
        save_model(make(BLOCKS["mamba2"]), tmp_path / "model", max_shard_bytes=4000)
        return tmp_path / "model"

    def edit_index(self, directory, **changed):
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], **changed}}))

    def test_absent_parts_are_listed(self, parts):
        first, second = sorted(path for path in parts.iterdir() if "-of-" in path.name)[:2]
        first.unlink()
        second.unlink()
        with pytest.raises(ValueError, match=f"files that are not there: {first.name}, {second.name}"):
            load_model(parts)

    @pytest.mark.parametrize("name", ["../other.safetensors", "/etc/hostname", "a/b.bin", "config.json", "", ".."])
    def test_files_elsewhere_are_not_read(self, parts, name):
        self.edit_index(parts, **{"lm_head.weight": name})
        with pytest.raises(ValueError, match="names files that are not weights beside it"):
            load_model(parts)

    def test_index_and_files_disagree(self, parts):
        last = sorted(path.name for path in parts.iterdir() if "-of-" in path.name)[-1]
        self.edit_index(parts, **{"backbone.nothing": last})
        with pytest.raises(ValueError, match=f"disagree about backbone.nothing in {last}"):
            load_model(parts)

    @pytest.mark.parametrize("content", ["{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
    def test_no_weight_map(self, parts, content):
        (parts / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ValueError, match="has no weight_map"):
            load_model(parts)


class TestPlaces:
    def test_not_there(self, tmp_path):
        for path in (tmp_path / "nothing", str(tmp_path / "nothing"), "./nothing", "a/b/c", ""):
            with pytest.raises(ValueError, match=r"there is no directory|config.json"):
                load_model(path)

    def test_a_file(self, saved):
        with pytest.raises(ValueError, match="is a file; give the directory"):
            load_model(saved / "model.safetensors")

    def test_hub_gives_config_and_one_kind_of_weights(self, official, monkeypatch):
        asked = []

        def snapshot_download(name, allow_patterns):
            asked.append((name, allow_patterns))
            return str(official)

        monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
        assert_same(load_model("someone/mamba"), load_model(official))
        # Descriptions are small, and the tokenizer's are among them.
        first = ["*.json", "*.jinja", "model.safetensors", "model-*.safetensors", "adapter_model.safetensors"]
        assert asked == [("someone/mamba", first)]

    def test_hub_weights_in_pickles_are_the_second_choice(self, tmp_path, official, monkeypatch):
        (tmp_path / "empty").mkdir()
        answers = [tmp_path / "empty", official]
        hub = types.SimpleNamespace(snapshot_download=lambda name, allow_patterns: answers.pop(0))
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        assert_same(load_model("mamba"), load_model(official))

    def test_hub_out_of_reach(self, monkeypatch):
        def snapshot_download(name, allow_patterns):
            raise ConnectionError("no network\nand more")

        hub = types.SimpleNamespace(snapshot_download=snapshot_download)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        with pytest.raises(ValueError, match=r"no directory someone/mamba, and the hub did not give it: no network$"):
            load_model("someone/mamba")
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ValueError, match=r"no directory someone/mamba; .* pip install huggingface_hub"):
            load_model("someone/mamba")


class TestSavingIsAllOrNothing:
    def test_a_checkpoint_is_replaced_and_its_company_kept(self, tmp_path):
        save_model(make(BLOCKS["mamba2"]), tmp_path / "model", max_shard_bytes=4000)
        (tmp_path / "model" / "tokenizer.json").write_text("{}")
        (tmp_path / "model" / "logs").mkdir()
        (tmp_path / "model" / "logs" / "config.json").write_text("kept")
        model = make(BLOCKS["mamba1"])
        save_model(model, tmp_path / "model")
        assert names(tmp_path / "model") == {"config.json", "model.safetensors", "tokenizer.json", "logs"}
        assert (tmp_path / "model" / "logs" / "config.json").read_text() == "kept"
        assert names(tmp_path) == {"model"}
        assert_same(load_model(tmp_path / "model"), model)

    def test_new_empty_and_nested_directories(self, tmp_path):
        (tmp_path / "empty").mkdir()
        for place in ("empty", "new", "nested/deep"):
            save_model(make(BLOCKS["mamba1"]), tmp_path / place)
            load_model(tmp_path / place)

    def test_a_link_goes_on_pointing_to_the_directory(self, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        save_model(make(BLOCKS["mamba1"]), tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        load_model(tmp_path / "real")

    @pytest.mark.parametrize("content", [None, '{"model_type": "llama"}', "{"])
    def test_foreign_directories_are_refused(self, tmp_path, content):
        (tmp_path / "notes.txt").write_text("mine")
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        before = names(tmp_path)
        with pytest.raises(ValueError, match="is not empty and holds no checkpoint"):
            save_model(make(BLOCKS["mamba1"]), tmp_path)
        assert names(tmp_path) == before
        with pytest.raises(ValueError, match="is a file; give a directory"):
            save_model(make(BLOCKS["mamba1"]), tmp_path / "notes.txt")

    @pytest.mark.parametrize("broken", ["save_file", "write_json", "_swap"])
    def test_a_failed_write_leaves_the_old_one(self, tmp_path, monkeypatch, broken):
        model = make(BLOCKS["mamba1"])
        save_model(model, tmp_path / "model")

        def fail(*_, **__):
            raise OSError("no space left")

        where = "mambakit.checkpoints.models" if broken == "write_json" else checkpoint_writing.__name__
        monkeypatch.setattr(f"{where}.{broken}", fail)
        with pytest.raises(OSError, match="no space left"):
            save_model(make(BLOCKS["mamba1"]), tmp_path / "model")
        assert names(tmp_path) == {"model"}
        assert_same(load_model(tmp_path / "model"), model)

    @pytest.mark.parametrize("format", ["mambakit", "official"])
    def test_a_full_disk_is_an_os_error(self, tmp_path, format):
        """Whatever the packages that write make of it."""
        resource = pytest.importorskip("resource")
        model = make(BLOCKS["mamba2"])
        save_model(model, tmp_path / "model", format=format)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        try:
            with pytest.raises(OSError, match="large"):
                save_model(make(BLOCKS["mamba2"]), tmp_path / "model", format=format)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert names(tmp_path) == {"model"}
        assert_same(load_model(tmp_path / "model"), model)

    def test_a_failed_swap_puts_the_old_one_back(self, tmp_path, monkeypatch):
        model = make(BLOCKS["mamba1"])
        save_model(model, tmp_path / "model")
        rename = checkpoint_writing.os.rename

        def second_fails(source, target):
            if str(source).endswith(".tmp"):
                raise OSError("busy")
            rename(source, target)

        monkeypatch.setattr(checkpoint_writing.os, "rename", second_fails)
        with pytest.raises(OSError, match="busy"):
            save_model(make(BLOCKS["mamba1"]), tmp_path / "model")
        assert names(tmp_path) == {"model"}
        assert_same(load_model(tmp_path / "model"), model)

    def test_saving_onto_the_files_a_model_came_from(self, saved):
        model = load_model(saved)
        save_model(model, saved)
        assert_same(load_model(saved), model)


def test_configs_of_official_models_survive_any_value(tmp_path):
    """Options that published checkpoints do not use."""
    block = Mamba2Config(**HEADS, d_ssm=16, ngroups=2, D_has_hdim=True, rmsnorm=False, dt_limit=(0.1, math.inf))
    model = make(replace(block, A_init_range=(2, 3)), pad_vocab_size_multiple=16)
    save_model(model, tmp_path, format="official")
    assert load_model(tmp_path).config == model.config


@pytest.mark.parametrize("raised", [KeyboardInterrupt, OSError])
def test_what_ends_a_write_is_told_as_it_is(raised, tmp_path, monkeypatch):
    """torch's writer makes a RuntimeError of it, in a command a traceback."""

    class Cut(io.FileIO):
        def write(self, content):
            if self.tell():
                raise raised
            return super().write(content)

    monkeypatch.setattr(checkpoint_writing, "open", Cut, raising=False)
    with pytest.raises(raised):
        checkpoint_writing.write_pickle({"weight": torch.ones(3)}, tmp_path / "weights.bin")
