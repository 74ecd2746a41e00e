"""GGUF files written here: the package gguf and `load_model` read them, llama.cpp where it is installed, all alike."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mambakit as mk
from compare import check
from mambakit.checkpoints.files import read_json
from mambakit.checkpoints.gguf.vocabulary import Vocabulary, bpe_vocabulary, byte_vocabulary
from mambakit.checkpoints.gguf.writing import save_gguf
from mambakit.cli.main import main
from mambakit.text.tokens import Bytes, TokenizerFile
from trainer_cases import make_tokenizer

gguf = pytest.importorskip("gguf")

BLOCKS: dict[str, Any] = {
    "mamba1": mk.Mamba1Config(d_model=64, state_rank=16),
    "falcon_mamba": mk.Mamba1Config(d_model=64, dt_b_c_norm=True, dt_b_c_norm_weight=False, norm_eps=1e-5),
    "mamba2": mk.Mamba2Config(d_model=64, state_rank=16, per_head_dim=16),
    "mamba2-groups": mk.Mamba2Config(d_model=64, d_inner=96, state_rank=16, per_head_dim=16, ngroups=2),
}
TEXT = "Hello, ünï 日本\n\n  x = 1\t{to be or not to be}"
KINDS = {"F32": 1e-3, "F16": 2e-3, "Q8_0": 5e-2}
"""How far llama.cpp's logits may be from ours once both have rounded a number on the edge to different sides."""


def make(name: str, **options: Any) -> mk.LanguageModel:
    torch.manual_seed(0)
    model = mk.LanguageModel(mk.ModelConfig(block=BLOCKS[name], n_layer=2, **{"vocab_size": 257, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def logits(model: mk.LanguageModel, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]))[0][0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_comes_back(name, tied, tmp_path):
    model = make(name, tie_embeddings=tied)
    again = mk.load_model(save_gguf(model, tmp_path / "model.gguf"))
    assert again.config.padded_vocab_size == 257, "the padding is left out"
    ids = [256, *TEXT.encode()]
    check(1e-6, {"logits": logits(again, ids)}, {"logits": logits(model, ids)}, floor=1e-3)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_reads_it(kind, tmp_path):
    """Names, shapes and types as llama.cpp's converter writes them."""
    model = make("mamba2-groups")
    reader = gguf.GGUFReader(save_gguf(model, tmp_path / "model.gguf", kind, byte_vocabulary(256)))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "mamba2"
    assert fields["general.file_type"] == {"F32": 0, "F16": 1, "Q8_0": 7}[kind]
    assert fields["mamba2.ssm.inner_size"] == 96
    assert fields["mamba2.ssm.group_count"] == 2
    assert fields["mamba2.block_count"] == 2
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.bos_token_id"] == fields["tokenizer.ggml.eos_token_id"] == 256
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MAMBA2, 2)
    found = {tensor.name: tensor for tensor in reader.tensors}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        theirs = name.replace("backbone.embedding.", "backbone.embeddings.").replace(".dt_bias", ".dt_proj.bias")
        assert known.get_name(theirs, try_suffixes=(".weight", ".bias")) in found
    assert len(found) == len(model.state_dict()) - 1
    # Axes in ggml's order, the innermost first.
    assert found["blk.0.ssm_a"].shape.tolist() == [1, 6]
    assert found["blk.0.ssm_norm.weight"].shape.tolist() == [48, 2]
    assert found["blk.0.ssm_conv1d.weight"].shape.tolist() == [4, 96 + 2 * 2 * 16]
    assert found["token_embd.weight"].shape.tolist() == [64, 257]
    assert found["token_embd.weight"].tensor_type.name == found["blk.1.ssm_in.weight"].tensor_type.name == kind
    for plain in ("blk.0.ssm_a", "blk.0.ssm_conv1d.weight", "blk.0.attn_norm.weight", "blk.0.ssm_dt.bias"):
        assert found[plain].tensor_type.name == "F32"
    want = -model.backbone.layers[0].mixer.A_log.exp().detach()
    assert torch.equal(torch.tensor(found["blk.0.ssm_a"].data)[:, 0], want)


def vocabulary_of(folder: Path) -> tuple[Vocabulary, TokenizerFile]:
    tokens = TokenizerFile(make_tokenizer(folder))
    return bpe_vocabulary(read_json(tokens.path), tokens.end), tokens


def round_as_llama_cpp(model: mk.LanguageModel, kind: str) -> None:
    """Below F32 it rounds what a matrix is multiplied by, too, each as the matrix is stored."""

    def rounded(module: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        if kind == "Q8_0" and inputs[0].shape[-1] % 32 == 0:
            found = gguf.quants.quantize(inputs[0].numpy(), gguf.GGMLQuantizationType.Q8_0)
            return torch.tensor(gguf.quants.dequantize(found, gguf.GGMLQuantizationType.Q8_0))
        return inputs[0].half().float()

    for part in model.modules():
        if kind != "F32" and isinstance(part, torch.nn.Linear):
            part.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BLOCKS)
def test_llama_cpp_agrees(name, kind, tmp_path):
    """The same tokens of the text, and the same logits after every one of them."""
    llama_cpp = pytest.importorskip("llama_cpp")
    vocabulary, tokens = vocabulary_of(tmp_path)
    for words, encoder in ((byte_vocabulary(256), Bytes()), (vocabulary, tokens)):
        model = make(name, vocab_size=len(words.tokens) + 3)
        path = save_gguf(model, tmp_path / "model.gguf", kind, words)
        llama = llama_cpp.Llama(str(path), logits_all=True, verbose=False, n_ctx=128)
        ids = llama.tokenize(TEXT.encode(), add_bos=True)
        assert ids == [encoder.end, *encoder.encode(TEXT.encode())]
        assert llama.detokenize(ids[1:]).decode() == TEXT
        llama.eval(ids)
        got = torch.tensor(llama.scores[: len(ids)])
        llama.close()
        same = mk.load_model(path)
        round_as_llama_cpp(same, kind)
        away_s = (got - logits(same, ids)).abs().amax(-1)
        assert away_s.median() < 1e-3
        assert away_s.max() < KINDS[kind]
        if kind == "F32":
            assert (got - logits(model, ids)).abs().max() < 1e-3


def test_llama_cpp_reads_a_model_without_tokenizer(tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    model = make("mamba2")
    llama = llama_cpp.Llama(str(save_gguf(model, tmp_path / "model.gguf")), logits_all=True, verbose=False, n_ctx=64)
    llama.eval([1, 2, 3])
    assert (torch.tensor(llama.scores[:3]) - logits(model, [1, 2, 3])).abs().max() < 1e-3
    llama.close()


def test_vocabulary_of_a_tokenizer(tmp_path):
    vocabulary, tokens = vocabulary_of(tmp_path)
    assert len(vocabulary.tokens) == tokens.vocab_size == len(set(vocabulary.tokens))
    assert vocabulary.types.count(3) == 1
    assert vocabulary.tokens[vocabulary.end] == "<|endoftext|>"
    values = json.loads(tokens.path.read_text())
    assert all(values["model"]["vocab"][text] == i for i, text in enumerate(vocabulary.tokens) if i != vocabulary.end)
    assert len(vocabulary.merges) == len(values["model"]["merges"])


def tokenizer(**changed: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    return {"model": model, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}, **changed}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "the tokenizer is a 'Unigram', and only byte-level BPE"),
        ({"model": None}, "the tokenizer is a None"),
        ({"normalizer": {"type": "Lowercase"}}, "changes text by {'type': 'Lowercase'}"),
        ({"pre_tokenizer": None}, "cuts text by None, and what is written to GGUF is that of gpt-2, llama-bpe"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "cuts text by {'type': 'Metaspace'}"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "'add_prefix_space': True"),
    ],
)
def test_tokenizers_that_llama_cpp_has_not(changed, message):
    assert bpe_vocabulary(tokenizer(), 2).cut == "gpt-2"
    with pytest.raises(ValueError) as caught:
        bpe_vocabulary(tokenizer(**changed), 2)
    assert message in str(caught.value)


M2 = {"d_model": 32, "state_rank": 8, "per_head_dim": 8}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"block": mk.Mamba3Config(**M2)}, "of Mamba-1 or Mamba-2 blocks alone, this is one of Mamba3"),
    ({"layers": ((mk.Mamba2Config(**M2), mk.MLPConfig(32, 8)),)}, "this is one of Mamba2 and MLP"),
    ({"block": mk.Mamba1Config(d_model=32, expand=3)}, "an inner width of 96, which is not twice d_model = 32"),
    ({"block": mk.Mamba2Config(**M2, bias=True, conv_bias=False)}, "no Mamba-2 with bias = True and conv_bias = False"),
    ({"block": mk.Mamba2Config(**M2, norm_before_gate=True)}, "GGUF cannot express block.norm_before_gate = True"),
    ({"block": mk.Mamba2Config(**M2, dt_limit=(0.0, 1.0))}, "GGUF cannot express block.dt_limit = (0.0, 1.0)"),
    ({"block": mk.Mamba2Config(**M2, ngroups=2, norm_group_size=64)}, "block.norm_group_size = 64"),
    ({"block": mk.Mamba2Config(**M2, norm_eps=1e-3)}, "block.norm_eps = 0.001"),
    ({"block": mk.Mamba2Config(**M2), "logits_scale": 0.5}, "logits_scale = 0.5"),
    ({"block": mk.Mamba2Config(**M2), "rms_norm": False}, "GGUF has no backbone.layers.0.norm.bias"),
    ({"block": mk.Mamba2Config(**M2), "d_intermediate": 64}, "GGUF has no backbone.layers.0.mlp.fc1.weight"),
    ({"block": mk.Mamba2Config(**M2, D_has_hdim=True)}, "block.D_has_hdim = True"),
    ({"block": mk.Mamba2Config(**M2, rmsnorm=False)}, "block.rmsnorm = False"),
    ({"block": mk.Mamba2Config(**M2, learnable_init_states=True)}, "GGUF has no backbone.layers.0.mixer.init_states"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_llama_cpp_has_not_is_one_line(fields, message, tmp_path):
    model = mk.LanguageModel(mk.ModelConfig(**{"n_layer": 1, **fields} if "block" in fields else fields, vocab_size=40))
    with pytest.raises(ValueError) as caught:
        save_gguf(model, tmp_path / "model.gguf")
    assert message in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_other_refusals(tmp_path):
    model = make("mamba2")
    with pytest.raises(ValueError, match="the type 'Q4_K' is unknown; choose from F32, F16, Q8_0"):
        save_gguf(model, tmp_path / "model.gguf", "Q4_K")
    with pytest.raises(ValueError, match=r"the type \[1.0\] is unknown"):
        save_gguf(model, tmp_path / "model.gguf", [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="file is 3, expected a string or a path"):
        save_gguf(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a GGUF file has to end in \.gguf"):
        save_gguf(model, tmp_path / "model.bin")
    with pytest.raises(ValueError, match="GGUF takes no quantized model; give the one it was made from"):
        save_gguf(mk.quantize(model, 8), tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="the tokenizer has 300 tokens, but the model knows 257"):
        save_gguf(model, tmp_path / "model.gguf", vocabulary=byte_vocabulary(299))
    with pytest.raises(ValueError, match=r"norm\.weight is on the meta device or a fake tensor"):
        save_gguf(make("mamba2").to("meta"), tmp_path / "model.gguf")
    with torch.no_grad():
        model.backbone.embedding.weight[3, 3] = 1e6
    with pytest.raises(ValueError, match=r"token_embd\.weight has numbers that F16 does not hold; choose F32"):
        save_gguf(model, tmp_path / "model.gguf", "F16")
    with torch.no_grad():
        model.backbone.embedding.weight[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"NaN or an infinity: token_embd\.weight"):
        save_gguf(model, tmp_path / "model.gguf")
    assert not any(tmp_path.iterdir())


def export(*arguments: Any) -> int:
    return main(["export", *map(str, arguments)])


def test_the_verb(tmp_path, capsys):
    """A folder that other verbs read, or a single file."""
    model = make("mamba1")
    mk.save_model(model, tmp_path / "own")
    Bytes().save(tmp_path / "own")
    assert export(tmp_path / "own", tmp_path / "out", "--format=gguf", "--type=F32") == 0
    size = (tmp_path / "out" / "model.gguf").stat().st_size
    assert f"model.gguf: {size / 1e6:.2f} MB" in capsys.readouterr().out
    text = {path.name for path in (tmp_path / "own").iterdir()} - {"config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.gguf", *text}
    ids = [256, *b"ab"]
    want = mk.generate(model, ids, max_new_tokens=8, temperature=0)
    assert torch.equal(mk.generate(mk.load_model(tmp_path / "out"), ids, max_new_tokens=8, temperature=0), want)
    options = ("--prompt=ab", "--max-new-tokens=8", "--temperature=0", "--keep-going")
    assert main(["generate", str(tmp_path / "out"), *options]) == 0
    assert capsys.readouterr().out == Bytes().decode(want[0].tolist()) + "\n"
    assert export(tmp_path / "own", tmp_path / "small.gguf", "--format=gguf", "--json") == 0
    assert list(json.loads(capsys.readouterr().out)["files"]) == [str(tmp_path / "small.gguf")]
    assert (tmp_path / "small.gguf").stat().st_size < (tmp_path / "out" / "model.gguf").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out", "--format=gguf"], "out exists already; give a new folder"),
        (["small.gguf", "--format=gguf"], "small.gguf exists already; give a new file"),
        (["new", "--format=onnx", "--type=F32"], "--type is for --format gguf"),
        (["new", "--format=gguf", "--tokens=7"], "--tokens is for --format onnx"),
        (["new", "--format=gguf"], "GGUF files are written of models of Mamba-1 or Mamba-2 blocks alone"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, capsys):
    block = mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8)
    mk.save_model(mk.LanguageModel(mk.ModelConfig(block=block, n_layer=1, vocab_size=40)), tmp_path / "own")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    (tmp_path / "small.gguf").touch()
    out, *others = arguments
    assert export(tmp_path / "own", tmp_path / out, *others) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert message in told
    assert not (tmp_path / "new").exists()


def test_a_folder_of_several_files_is_no_checkpoint(tmp_path):
    for i in range(2):
        save_gguf(make("mamba2"), tmp_path / f"{i}.gguf")
    with pytest.raises(ValueError, match=r"there is no config\.json"):
        mk.load_model(tmp_path)


def test_byte_names_are_those_of_byte_level_bpe():
    tokenizers = pytest.importorskip("tokenizers")
    names = byte_vocabulary(256).tokens[:256]
    assert sorted(names) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    cut = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for first, second in itertools.pairwise(range(128)):
        ((pieces, _),) = cut.pre_tokenize_str(chr(first) + chr(second))
        assert pieces == names[first] + names[second]
