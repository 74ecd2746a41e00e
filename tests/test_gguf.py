"""GGUF files, as llama.cpp's converter writes them: the weights come back, and bad files are refused in one line."""

import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compare import check
from mambakit import LanguageModel, Mamba1Config, Mamba2Config, ModelConfig, load_model
from mambakit.checkpoints.names import Renamed, same
from mambakit.cli.main import main

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

TYPE = gguf.GGMLQuantizationType
ALWAYS_F32 = ("conv1d.weight", "A_log", "D", "norm.weight", "norm_f.weight")
BLOCKS = {
    "mamba1": Mamba1Config(d_model=32, state_rank=5, dt_rank=3, conv_kernel=3),
    "mamba1-odd": Mamba1Config(
        d_model=32, expand=1.25, state_rank=1, dt_rank=2, conv_kernel=1, conv_bias=False, bias=True
    ),
    "mamba1-rms": Mamba1Config(
        d_model=32, state_rank=4, dt_rank=2, dt_b_c_norm=True, dt_b_c_norm_weight=False, norm_eps=1e-3
    ),
    "mamba2": Mamba2Config(d_model=32, state_rank=16, per_head_dim=16, norm_eps=1e-3),
    "mamba2-groups": Mamba2Config(d_model=32, d_inner=72, state_rank=8, per_head_dim=8, ngroups=3, norm_eps=1e-3),
}


def make(name: str, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(
        ModelConfig(block=BLOCKS[name], n_layer=2, vocab_size=48, norm_eps=1e-3, pad_vocab_size_multiple=1, **options)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def metadata(model: LanguageModel) -> dict[str, Any]:
    """By the names of the writer's methods."""
    block: Any = model.config.block
    first = isinstance(block, Mamba1Config)
    return {
        "context_length": 2**20,
        "embedding_length": block.d_model,
        "feed_forward_length": 0,
        "head_count": 0,
        "block_count": model.config.n_layer,
        "ssm_conv_kernel": block.conv_kernel,
        "ssm_inner_size": block.d_inner if first else block.inner_width,
        "ssm_state_size": block.state_rank,
        "ssm_time_step_rank": block.dt_width if first else block.nheads,
        **({"ssm_dt_b_c_rms": block.dt_b_c_norm} if first else {"ssm_group_count": block.ngroups}),
        "layer_norm_rms_eps": model.config.norm_eps,
        "token_list": [f"token {i}" for i in range(48)],
        "token_scores": [0.5] * 48,
        "file_type": 0,
    }


def written(
    path: Path,
    model: LanguageModel,
    kind: str = "F32",
    *,
    weights: dict[str, Tensor] | None = None,
    architecture: str | None = None,
    change: Callable[[dict[str, Any], dict[str, tuple[Any, np.ndarray]]], None] | None = None,
) -> dict[str, tuple[Any, np.ndarray]]:
    """What llama.cpp's converter would write of the model, and the tensors of it; `change` may alter both first."""
    block: Any = model.config.block
    first = isinstance(block, Mamba1Config)
    architecture = architecture or ("mamba" if first else "mamba2")
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MAMBA if first else gguf.MODEL_ARCH.MAMBA2, model.config.n_layer)
    tensors: dict[str, tuple[Any, np.ndarray]] = {}
    for name, tensor in (weights or model.state_dict()).items():
        if name == "lm_head.weight" and model.config.tie_embeddings:
            continue
        name = name.replace("backbone.embedding.", "backbone.embeddings.").replace(".dt_bias", ".dt_proj.bias")
        called = known.get_name(name, try_suffixes=(".weight", ".bias"))
        assert called is not None
        if name.endswith("conv1d.weight"):
            tensor = tensor.squeeze()
        if name.endswith("A_log"):
            tensor = -torch.exp(tensor)
        if not first and name.endswith((".A_log", ".D")):
            tensor = tensor[:, None]
        if name.endswith("mixer.norm.weight"):
            tensor = tensor.reshape(block.ngroups, -1)
        array, type = tensor.numpy(), TYPE[kind]
        if name.endswith(ALWAYS_F32) or array.ndim == 1:
            type = TYPE.F32
        elif array.shape[-1] % gguf.GGML_QUANT_SIZES[type][0]:
            type = TYPE.F16
        tensors[called] = type, gguf.quants.quantize(array, type)
    fields = metadata(model)
    if change is not None:
        change(fields, tensors)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    for name, (type, array) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_comes_back(name, tied, tmp_path):
    """The very config, the very weights but for the logarithm of A, and so the logits."""
    model = make(name, tie_embeddings=tied)
    written(tmp_path / "model.gguf", model)
    again = load_model(tmp_path / "model.gguf")
    assert again.config == model.config
    weights = model.state_dict()
    for key, tensor in again.state_dict().items():
        if key.endswith("A_log"):
            check(1e-6, {key: tensor}, {key: weights[key]})
            check(1e-7, {key: tensor.exp()}, {key: weights[key].exp()})
        else:
            assert torch.equal(tensor, weights[key]), key
    ids = torch.randint(48, (2, 11))
    check(1e-5, {"logits": again(ids)[0]}, {"logits": model(ids)[0]}, floor=1e-3)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["mamba1", "mamba2-groups"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
def test_types(name, kind, dtype, tmp_path):
    """The numbers that the package reads, in float32 or in the dtype asked for."""
    stored = written(tmp_path / "model.gguf", make(name), kind)
    assert kind in {type.name for type, _ in stored.values()}
    model = load_model(tmp_path / "model.gguf", dtype=dtype)
    for ours, theirs in (("in_proj.weight", "ssm_in.weight"), ("out_proj.weight", "ssm_out.weight")):
        type, array = stored[f"blk.1.{theirs}"]
        want = torch.from_numpy(gguf.quants.dequantize(array, type)).to(dtype or torch.float32)
        got = model.backbone.layers[1].mixer.get_parameter(ours)
        assert got.dtype == (dtype or torch.float32)
        assert torch.equal(got, want), ours
    type, array = stored["token_embd.weight"]
    want = torch.from_numpy(gguf.quants.dequantize(array, type)).to(dtype or torch.float32)
    assert torch.equal(model.lm_head.weight, want)
    assert model.lm_head.weight is model.backbone.embedding.weight


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 48, "layer_norm_epsilon": 1e-3}
PEERS = {
    "mamba1": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(**SIZES, state_size=5, time_step_rank=3, conv_kernel=3)
    ),
    "mamba1-rms": lambda: transformers.FalconMambaForCausalLM(
        transformers.FalconMambaConfig(**SIZES, state_size=4, time_step_rank=2, mixer_rms_eps=1e-3)
    ),
    "mamba2": lambda: transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(**SIZES, state_size=16, head_dim=16, num_heads=4, n_groups=1, chunk_size=8)
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_equals_transformers(name, tmp_path):
    torch.manual_seed(1)
    peer: Any = PEERS[name]().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    weights = {key: tensor for key, tensor in peer.state_dict().items() if "layernorm" not in key}
    written(tmp_path / "model.gguf", make(name, tie_embeddings=peer.config.tie_word_embeddings), weights=weights)
    model = load_model(tmp_path / "model.gguf")
    ids = torch.randint(48, (2, 13))
    with torch.no_grad():
        check(1e-5, {"logits": model(ids)[0]}, {"logits": peer(ids).logits}, floor=1e-3)


def test_convert(tmp_path):
    model = make("mamba2", tie_embeddings=False)
    written(tmp_path / "model.gguf", model, "Q8_0")
    main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "hf"), "--format", "hf"])
    weights = load_model(tmp_path / "model.gguf").state_dict()
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(peer.lm_head.weight, weights["lm_head.weight"])


def test_the_norm_may_be_taken_otherwise(tmp_path):
    written(tmp_path / "model.gguf", make("mamba2-groups"))
    block: Any = load_model(tmp_path / "model.gguf", norm_group_size=72).config.block
    assert block.norm_width == 72


def drop(*names: str) -> Any:
    def change(fields, tensors):
        for name in names:
            fields.pop(name, None)
            tensors.pop(name, None)

    return change


def put(fields: dict[str, Any] | None = None, **tensors: tuple[Any, np.ndarray]) -> Any:
    def change(was, stored):
        was |= fields or {}
        stored |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    return change


FLAT = np.zeros((4, 144), np.uint8)
WRONG = {
    "mamba2.ssm.state_size": drop("ssm_state_size"),
    "missing mamba2.embedding_length, mamba2.ssm.conv_kernel": drop("ssm_conv_kernel", "embedding_length"),
    "mamba2.ssm.time_step_rank is None, expected a positive integer": drop("ssm_time_step_rank"),
    "there is no token_embd.weight of two axes": drop("token_embd.weight"),
    "missing backbone.layers.1.mixer.A_log": drop("blk.1.ssm_a"),
    "mamba2.block_count asks for 4294967295": put({"block_count": 2**32 - 1}),
    "the config has 1000000 layers, but there are 20 tensors in all": put({"block_count": 10**6}),
    "inner_size = 64 is not a multiple of the 5 heads": put({"ssm_time_step_rank": 5}),
    "state_rank = 4294967295, but no tensor has an axis above": put({"ssm_state_size": 2**32 - 1}),
    "norm_eps = 0.0 has to be positive": put({"layer_norm_rms_eps": 0.0}),
    "tensors of the type Q4_K are not read; F32, F16, BF16, Q8_0, Q4_0 are": put(
        blk__0__ssm_in__weight=(TYPE.Q4_K, FLAT)
    ),
    "of the type I32": put(extra=(TYPE.I32, np.zeros(4, np.int32))),
    "tensors that are not known: 'blk.0.attn_q.weight'": put(
        blk__0__attn_q__weight=(TYPE.F32, np.zeros(4, np.float32))
    ),
    "blk.0.ssm_a has numbers that are not negative": put(blk__0__ssm_a=(TYPE.F32, np.zeros((4, 1), np.float32))),
    "mixer.D is [5] instead of [4]": put(blk__0__ssm_d=(TYPE.F32, np.zeros((5, 1), np.float32))),
    "is no whole tensor": put(blk__0__ssm_d=(TYPE.F32, np.zeros((0, 1), np.float32))),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named(message, tmp_path):
    path = tmp_path / "model.gguf"
    written(path, make("mamba2"), change=WRONG[message])
    with pytest.raises(ValueError) as caught:
        load_model(path)
    told = str(caught.value)
    assert message in told
    assert str(path) in told
    assert "\n" not in told


def test_other_architectures(tmp_path):
    path = tmp_path / "model.gguf"
    written(path, make("mamba1"), architecture="llama")
    with pytest.raises(
        ValueError, match="the architecture 'llama' is not supported, expected one of mamba, mamba2, falcon-h1, "
    ):
        load_model(path)


def test_no_such_file(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*none\.gguf"):
        load_model(tmp_path / "none.gguf")
    for i, content in enumerate((b"", b"GG", b"GGML" * 20, b"PK\3\4")):
        other = tmp_path / f"{i}.gguf"
        other.write_bytes(content)
        with pytest.raises(ValueError, match="it does not start with GGUF"):
            load_model(str(other))
    (tmp_path / "old.gguf").write_bytes(b"GGUF" + b"\1\0\0\0" * 20)
    with pytest.raises(ValueError, match="version = 1, but versions 2 and 3 are read"):
        load_model(tmp_path / "old.gguf")


def test_without_the_package(tmp_path, monkeypatch):
    written(tmp_path / "model.gguf", make("mamba1"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"model\.gguf needs gguf: pip install gguf"):
        load_model(tmp_path / "model.gguf")


def test_parts_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="it is one of 3 parts; join them with llama-gguf-split --merge"):
        load_model(path)


def test_cut_short(tmp_path):
    path = tmp_path / "model.gguf"
    written(path, make("mamba2"))
    content = path.read_bytes()
    make_random = random.Random(0)
    for size in [*range(4, 200, 7), *(make_random.randrange(200, len(content) - 32) for _ in range(60))]:
        # Another file each time: one that is still mapped cannot be written everywhere.
        cut = tmp_path / f"{size}.gguf"
        cut.write_bytes(content[:size])
        with pytest.raises(ValueError, match="it is cut short"):
            load_model(cut)


def header(*parts: bytes | int | tuple[str, int]) -> bytes:
    """Integers take eight bytes, or as many as the letter says."""
    sizes = {"I": 4, "Q": 8}
    out = b"GGUF\3\0\0\0"
    for part in parts:
        if isinstance(part, bytes):
            out += part
        else:
            code, number = part if isinstance(part, tuple) else ("Q", part)
            out += number.to_bytes(sizes[code], "little")
    return out


HOSTILE = {
    "18446744073709551615 tensors, and at most": header(2**64 - 1, 0),
    "9223372036854775807 fields, and at most": header(0, 2**63 - 1),
    "bytes of text in one piece, and at most": header(0, 1, 2**60),
    "1152921504606846976 values in one list, and at most": header(0, 1, 1, b"a", ("I", 9), ("I", 0), 2**60),
    "bytes should follow byte": header(0, 1, 1, b"a", ("I", 9), ("I", 10), 2**21),
    "list of the type 9": header(0, 1, 1, b"a", *[("I", 9)] * 2, 1, bytes(400)),
    "unknown type 77": header(0, 1, 1, b"a", ("I", 77)),
    "is no UTF-8": header(0, 1, 1, b"\xff", ("I", 77)),
    "has 4000000000 axes": header(1, 0, 1, b"a", ("I", 4_000_000_000)),
    "it has 'a' twice": header(0, 2, *[1, b"a", ("I", 4), ("I", 1)] * 2),
    "the tensor 'a' twice": header(2, 0, *[1, b"a", ("I", 1), 1, ("I", 0), 0] * 2),
    "general.alignment = 0": header(0, 1, 17, b"general.alignment", ("I", 4), ("I", 0)),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_headers_are_refused_in_no_time(message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[message])
    with pytest.raises(ValueError) as caught:
        load_model(path)
    assert message in str(caught.value)


def test_shared_numbers_are_refused(tmp_path):
    """Many tensors of the same bytes would be a large model in a small file."""
    path = tmp_path / "model.gguf"
    written(path, make("mamba1"), "Q4_0")
    content = bytearray(path.read_bytes())
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        # All of them start where the file's data starts, and one has all of it.
        place = tensor.field.offset + 8 + len(tensor.name) + 4 + 8 * len(tensor.shape) + 4
        content[place : place + 8] = bytes(8)
        if tensor.name == "output_norm.weight":
            start = tensor.field.offset + 8 + len(tensor.name) + 4
            rest = (len(content) - reader.data_offset) // 4 - 8
            content[start : start + 8] = rest.to_bytes(8, "little")
    other = tmp_path / "other.gguf"
    other.write_bytes(content)
    with pytest.raises(ValueError, match=r"its tensors have [\d,]+ bytes, but the file only"):
        load_model(other)


@pytest.mark.parametrize("name", ["mamba2", "granite-experts", "jamba"])
def test_damaged_files_raise_nothing_else(name, tmp_path):
    path = tmp_path / "model.gguf"
    if name == "mamba2":
        written(path, make(name))
    else:
        converted(path, *hybrid(name), tmp_path / "hub")
    content = path.read_bytes()
    end = gguf.GGUFReader(path).data_offset
    make_random = random.Random(1)
    refused = []
    for i in range(300):
        damaged = bytearray(content)
        for _ in range(make_random.choice([1, 1, 2, 8])):
            damaged[make_random.randrange(end)] = make_random.choice([0, 1, 9, 127, 255, make_random.randrange(256)])
        other = tmp_path / f"{i % 8}.gguf"
        other.write_bytes(damaged)
        try:
            load_model(other)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert not [told for told in refused if "\n" in told]


BODY = {"vocab_size": 48, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
DEEP = {**BODY, "num_hidden_layers": 4, "intermediate_size": 64, "rms_norm_eps": 1e-3}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_expand": 2}
TYPES = ["mamba", "attention", "mamba", "mamba"]
SCALES = {"attention_multiplier": 0.3, "embedding_multiplier": 1.7, "residual_multiplier": 0.22, "logits_scaling": 1.5}
GRANITE = {**DEEP, **HEADS, **SCALES, "layer_types": TYPES, "shared_intermediate_size": 96}
NEMOTRON = {
    **{**BODY, "head_dim": 16, "intermediate_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
    **{"ssm_state_size": 4, "layer_norm_epsilon": 1e-3, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
}
EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "n_group": 1}
HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "falcon_h1": (
        "FalconH1",
        "falcon-h1",
        {
            **{**DEEP, **HEADS, "mamba_n_groups": 2, "mamba_d_ssm": 64, "head_dim": 16},
            **{"mamba_rms_norm": True, "mamba_norm_before_gate": False, "ssm_multipliers": [0.5, 1.25, 0.7, 1.5, 2.0]},
            **{"ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.2, "attention_in_multiplier": 0.9},
            **{"attention_out_multiplier": 1.1, "key_multiplier": 0.6, "mlp_multipliers": [0.7, 1.3]},
            **{"embedding_multiplier": 1.6, "lm_head_multiplier": 0.4},
        },
    ),
    "falcon_h1-gate": ("FalconH1", "falcon-h1", {**DEEP, **HEADS, "mamba_d_ssm": 64, "head_dim": 8}),
    "bamba": ("Bamba", "granitehybrid", {**DEEP, **HEADS, "attn_layer_indices": [1, 3]}),
    "granite": ("GraniteMoeHybrid", "granitehybrid", {**GRANITE, "num_local_experts": 0}),
    "granite-experts": ("GraniteMoeHybrid", "granitehybrid", {**GRANITE, "num_local_experts": 4}),
    "jamba": (
        "Jamba",
        "jamba",
        {
            **{**DEEP, "mamba_d_state": 4, "mamba_dt_rank": 3, "num_experts": 4, "num_experts_per_tok": 2},
            **{"attn_layer_period": 4, "attn_layer_offset": 2},
        },
    ),
    "nemotron": ("NemotronH", "nemotron_h", NEMOTRON),
    "nemotron-experts": (
        "NemotronH",
        "nemotron_h_moe",
        {**NEMOTRON, **EXPERTS, "layers_block_type": ["mamba", "attention", "moe", "moe"]},
    ),
}


def of_layers(config: Any, architecture: str) -> dict[str, Any]:
    """What the converter says of layers and experts, by the names of the writer's methods."""
    kv = config.num_key_value_heads
    if architecture == "falcon-h1":
        fields = {"head_count_kv": kv, "key_length": config.head_dim, "rope_freq_base": 10000.0}
        return {**fields, "feed_forward_length": config.intermediate_size}
    if architecture == "jamba":
        attends = [i % config.attn_layer_period == config.attn_layer_offset for i in range(4)]
        experts = {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        kvs = [kv * attend for attend in attends]
        return {**experts, "head_count_kv": kvs, "feed_forward_length": config.intermediate_size}
    kinds = config.layers_block_type if architecture.startswith("nemotron") else config.layer_types
    attends = [kind in ("attention", "full_attention") for kind in kinds]
    fields = {"head_count_kv": [kv * attend for attend in attends]}
    if architecture.startswith("nemotron"):
        is_moe = architecture.endswith("moe")
        width = config.moe_intermediate_size if is_moe else config.intermediate_size
        fields |= {"feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds]}
        fields |= {"key_length": config.head_dim}
        if is_moe:
            fields |= {
                "expert_count": config.n_routed_experts,
                "expert_used_count": config.num_experts_per_tok,
                "expert_feed_forward_length": width,
                "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
                "expert_weights_norm": config.norm_topk_prob,
                "expert_weights_scale": config.routed_scaling_factor,
                "expert_group_count": config.n_group,
            }
        return fields
    fields |= {"feed_forward_length": config.intermediate_size}
    if config.model_type == "bamba":
        return {**fields, "rope_scaling_finetuned": True, "rope_dimension_count": 4, "rope_freq_base": 10000.0}
    if config.num_local_experts:
        fields |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    return {
        **fields,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "attention_scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "rope_scaling_finetuned": False,
    }


def of_mixer(config: Any) -> dict[str, Any]:
    given = vars(config)
    if config.model_type == "jamba":
        inner, groups, heads = 2 * config.hidden_size, {}, config.mamba_dt_rank
    elif config.model_type == "nemotron_h":
        heads, groups = config.mamba_num_heads, {"ssm_group_count": config.n_groups}
        inner = heads * config.mamba_head_dim
    else:
        heads, groups = config.mamba_n_heads, {"ssm_group_count": config.mamba_n_groups}
        inner = heads * config.mamba_d_head
    return {
        **groups,
        "ssm_conv_kernel": given.get("mamba_d_conv") or given["conv_kernel"],
        "ssm_state_size": given.get("mamba_d_state") or given["ssm_state_size"],
        "ssm_inner_size": inner,
        "ssm_time_step_rank": heads,
        "layer_norm_rms_eps": given.get("rms_norm_eps") or given["layer_norm_epsilon"],
        "embedding_length": config.hidden_size,
        "block_count": 4,
        "head_count": config.num_attention_heads,
    }


def beside(tensor: Tensor, heads: int) -> Tensor:
    """Rows of pairs half a head apart put side by side."""
    return tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def multiplied(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Falcon-H1's weights with its multipliers in them."""
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    module = name.split(".")[-2]
    if module == "in_proj":
        width, gr = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        parts = tensor.split((width, width, gr, gr, config.mamba_n_heads))
        both = zip(parts, config.ssm_multipliers, strict=True)
        return torch.cat([part * factor * config.ssm_in_multiplier for part, factor in both])
    return tensor * factors.get(module, 1.0)


def converted(
    path: Path, peer: Any, architecture: str, folder: Path, kind: str = "F32", drop: str = "", **changes: Any
) -> dict[str, Tensor]:
    """What llama.cpp's converter would write of a hybrid of transformers."""
    peer.save_pretrained(folder)
    config = peer.config
    known = gguf.get_tensor_name_map({name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture], 4)
    stacked: dict[str, list[Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        if config.model_type == "falcon_h1" and tensor.dim() > 1 and "conv1d" not in name:
            tensor = multiplied(name, tensor, config)
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            number = layer.split(".")[2]
            stacked.setdefault(f"model.layers.{number}.mlp.experts.{rest.split('.', 1)[1]}", []).append(tensor)
        elif "input_linear" in name:
            of = "_exps" if "block_sparse" in name else "_shexp" if config.num_local_experts else ""
            number = name.split(".")[2]
            halves = tensor.chunk(2, -2)
            tensors |= {
                f"blk.{number}.ffn_{part}{of}.weight": half for part, half in zip(("gate", "up"), halves, strict=True)
            }
        elif "shared_mlp.output_linear" in name and not config.num_local_experts:
            tensors[f"blk.{name.split('.')[2]}.ffn_down.weight"] = tensor
        else:
            if architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
                for ending, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
                    tensor = beside(tensor, heads) if name.endswith(f"{ending}.weight") else tensor
            if name.endswith("A_log"):
                tensor = -torch.exp(tensor)
            if architecture != "jamba" and name.endswith((".A_log", ".D")):
                tensor = tensor[:, None]
            if name.endswith("conv1d.weight"):
                tensor = tensor.squeeze()
            if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
                tensor = tensor.reshape(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
            name = name.replace(".dt_bias", ".dt_proj.bias").replace(
                "e_score_correction_bias", "e_score_correction.bias"
            )
            called = known.get_name(name, try_suffixes=(".weight", ".bias"))
            assert called is not None, name
            tensors[called] = tensor
    for name, parts in stacked.items():
        tensors[known.get_name(name, try_suffixes=(".weight",))] = torch.stack(parts)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**of_mixer(config), **of_layers(config, architecture), **changes}.items():
        getattr(writer, f"add_{name}")(value)
    for name, tensor in tensors.items():
        if name != drop:
            type = TYPE[kind] if tensor.dim() > 1 and tensor.shape[-1] % 32 == 0 else TYPE.F32
            writer.add_tensor(name, gguf.quants.quantize(tensor.contiguous().numpy(), type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def hybrid(name: str) -> tuple[Any, str]:
    torch.manual_seed(2)
    kind, architecture, options = HYBRIDS[name]
    peer = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**options)).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return peer, architecture


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_equal_transformers(name, tmp_path):
    peer, architecture = hybrid(name)
    converted(tmp_path / "model.gguf", peer, architecture, tmp_path / "hub")
    # transformers limits Nemotron's steps in a forward.
    limit = {"dt_limit": (peer.config.time_step_min, float("inf"))} if architecture.startswith("nemotron") else {}
    model = load_model(tmp_path / "model.gguf", **limit)
    ids = torch.randint(48, (2, 13))
    with torch.no_grad():
        check(1e-5, {"logits": model(ids)[0]}, {"logits": peer(ids).logits}, floor=1e-3)
    if name == "falcon_h1":
        return  # whose weights have the multipliers in them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = load_model(tmp_path / "hub").state_dict()
    assert weights.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        if key.endswith("A_log"):
            check(1e-6, {key: tensor}, {key: weights[key]})
        else:
            assert torch.equal(tensor, weights[key]), key


def test_quantized_experts(tmp_path):
    peer, architecture = hybrid("jamba")
    tensors = converted(tmp_path / "model.gguf", peer, architecture, tmp_path / "hub", "Q8_0")
    weights = load_model(tmp_path / "model.gguf", dtype=torch.float64).backbone.layers[1].state_dict()
    (got,) = (tensor for key, tensor in weights.items() if key.endswith("experts_out"))
    raw = gguf.quants.quantize(tensors["blk.1.ffn_down_exps.weight"].numpy(), TYPE.Q8_0)
    assert torch.equal(got, torch.from_numpy(gguf.quants.dequantize(raw, TYPE.Q8_0)).double())


WRONG_HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "head_count_kv is array([0, 2, 0]": ("granite", {"head_count_kv": [0, 2, 0]}),
    "head_count_kv has [1, 2], expected one number beside 0": ("granite", {"head_count_kv": [0, 2, 1, 0]}),
    "layers with attention do not follow one another at equal distances": ("jamba", {"head_count_kv": [2, 2, 0, 2]}),
    "a gate and what it is for, are not two of one shape": ("granite", {"drop": "blk.2.ffn_up.weight"}),
    "missing model.layers.1.feed_forward.experts.0.up_proj.weight": ("jamba", {"drop": "blk.1.ffn_up_exps.weight"}),
    "convert the model with --no-mtp": ("nemotron-experts", {"nextn_predict_layers": 1}),
    "block_count asks for 4000000": ("bamba", {"block_count": 4_000_000}),
    "top_k = 9 is more than n_experts = 4": ("granite-experts", {"expert_used_count": 9}),
    "hidden_size = 32 is not a multiple of num_attention_heads = 5": ("bamba", {"head_count": 5}),
    "ssm.inner_size = 64 is not a multiple of the 7 heads": ("falcon_h1", {"ssm_time_step_rank": 7}),
}


@pytest.mark.parametrize("message", WRONG_HYBRIDS)
def test_what_is_wrong_with_hybrids_is_named(message, tmp_path):
    name, changes = WRONG_HYBRIDS[message]
    converted(tmp_path / "model.gguf", *hybrid(name), tmp_path / "hub", **changes)
    with pytest.raises(ValueError) as caught:
        load_model(tmp_path / "model.gguf")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_taken_is_let_go():
    """A tensor that was made from a file, not mapped, should not live beside the model's copy of it."""
    stored = {"a": torch.ones(2), "b": torch.zeros(3)}
    ours = Renamed(stored, [same("x", "a"), same("y", "b")])
    assert torch.equal(ours.take("x"), torch.ones(2))
    assert (list(ours), list(stored)) == (["y"], ["b"])
