"""Quantized weights: each against a plain loop, whole models against their originals, and the loss on text."""

import argparse
import copy
import json
import random
import shutil
import typing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blocks import CONFIGS
from compare import check
from mambakit import (
    AttentionConfig,
    LanguageModel,
    Mamba1Config,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
    MoE,
    MoEConfig,
    ParallelConfig,
    generate,
    load_model,
    save_model,
)
from mambakit.models.quantization import bits_per_token, quantization_report, quantize, weight_bytes
from mambakit.models.quantized_linear import (
    LEVELS,
    NF4,
    STRETCHES,
    Bfloat16Linear,
    Int4Linear,
    Int8Linear,
    IntegerInt4Linear,
    QuantizedLinear,
    rounded_input,
)

FAMILIES = ("mamba1", "mamba1-bare", "mamba2", "mamba3", "mamba3-mimo")
MAKERS = {"bfloat16": Bfloat16Linear, "int8": Int8Linear, "int4": lambda linear: Int4Linear(linear, 32)}
NARROW = {
    "bfloat16": lambda linear: Bfloat16Linear(linear, "bfloat16"),
    "int8": lambda linear: Int8Linear(linear, "int8"),
    "int4": IntegerInt4Linear,
}
SHAPES = [(5, 64), (3, 50), (7, 32), (2, 1)]


def make_linear(rows: int, width: int, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(width, rows, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(rows, width) * torch.logspace(-3, 2, rows)[:, None])
        linear.weight[0] = 0
        linear.weight[-1, : width // 2] = 0  # groups without any weight
    return linear


def make_model(name: str, **options) -> LanguageModel:
    torch.manual_seed(1)
    config = ModelConfig(block=CONFIGS[name], n_layer=2, vocab_size=50, d_intermediate=8, **options)
    model = LanguageModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def int4_oracle(row: list[float], group_size: int) -> list[float]:
    """One row, quantized and back, group by group and weight by weight."""
    result = []
    for start in range(0, len(row), group_size):
        group = row[start : start + group_size]
        tries = []
        for stretch in STRETCHES:
            scale = float((torch.tensor(max(map(abs, group))) * stretch).bfloat16())
            values = [min((scale * code for code in NF4), key=lambda v, w=w: abs(v - w)) for w in group]
            tries.append((sum((v - w) ** 2 for v, w in zip(values, group, strict=True)), values))
        result += min(tries, key=lambda tried: tried[0])[1]
    return result


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_int8_against_a_loop(rows, width):
    linear = make_linear(rows, width)
    got = Int8Linear(linear)
    assert got.weight_int8.dtype == torch.int8
    for o, row in enumerate(linear.weight.tolist()):
        scale = max(map(abs, row)) / 127
        want = [scale * round(w / scale) if scale else 0.0 for w in row]
        assert got.weight[o].tolist() == pytest.approx(want, rel=1e-5, abs=0)
        assert max(abs(v - w) for v, w in zip(got.weight[o].tolist(), row, strict=True)) <= 0.5001 * scale


@pytest.mark.parametrize("group_size", [32, 8])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_int4_against_a_loop(rows, width, group_size):
    linear = make_linear(rows, width)
    got = Int4Linear(linear, group_size)
    groups = -(-width // group_size)
    assert got.weight_int4.shape == (rows, groups * group_size // 2)
    assert got.scales.shape == (rows, groups)
    assert (got.weight_int4.dtype, got.scales.dtype) == (torch.uint8, torch.bfloat16)
    for o, row in enumerate(linear.weight.tolist()):
        assert got.weight[o].tolist() == pytest.approx(int4_oracle(row, group_size), rel=1e-5, abs=0)


def integer_int4_oracle(row: list[float]) -> list[float]:
    """One row, quantized and back, group by group and weight by weight."""
    scale, result = max(map(abs, row)) / 127, []
    for start in range(0, len(row), 32):
        group = [w / scale if scale else 0.0 for w in row[start : start + 32]]
        tries = []
        for stretch in STRETCHES:
            part = min(255, round(255 / 127 * stretch * max(map(abs, group))))
            values = [
                min((round(level * part / 255) for level in LEVELS), key=lambda v, w=w: abs(v - w)) for w in group
            ]
            tries.append((sum((v - w) ** 2 for v, w in zip(values, group, strict=True)), values))
        result += [scale * value for value in min(tries, key=lambda tried: tried[0])[1]]
    return result


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_integer_int4_against_a_loop(rows, width):
    linear = make_linear(rows, width)
    got = IntegerInt4Linear(linear)
    groups = -(-width // 64) * 2
    assert got.weight_int4.shape == (rows, 17 * groups)
    assert (got.weight_int4.dtype, got.scales.dtype) == (torch.uint8, torch.float32)
    for o, row in enumerate(linear.weight.tolist()):
        want, found = integer_int4_oracle(row), got.weight[o].tolist()
        # Of two values that are equally near, either one.
        assert sum((w - v) ** 2 for w, v in zip(row, found, strict=True)) == pytest.approx(
            sum((w - v) ** 2 for w, v in zip(row, want, strict=True)), rel=1e-4, abs=1e-12
        )


def test_integer_int4_is_as_good_as_nf4():
    gaussian = gaussian_linear()
    assert relative_error(IntegerInt4Linear(gaussian), gaussian) < 0.083


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounded_rows(name, dtype):
    """With gradients, which pass as if nothing were rounded, and without, by a kernel where there is one."""
    got = NARROW[name](make_linear(7, 50))
    x = torch.randn(2, 3, 50).to(dtype).requires_grad_()
    wide = x.detach().to(torch.promote_types(dtype, torch.float32))
    near = rounded_input(wide, got.activations).double()
    assert (near - wide).abs().max() / wide.abs().max() < 1 / 250
    want = F.linear(near, got.weight.double(), None if got.bias is None else got.bias.double())
    y = got(x)
    (slope,) = torch.autograd.grad(y.double().sum(), x)
    slopes = got.weight.double().sum(0).expand(2, 3, -1)
    with torch.no_grad():
        results = {"y": y, "d x": slope, "without gradients": got(x)}
    check(1e-2 if dtype == torch.bfloat16 else 1e-6, results, {"y": want, "d x": slopes, "without gradients": want})


def test_int4_error_is_bounded():
    linear = make_linear(64, 128)
    got = Int4Linear(linear, 32)
    weight, error = (
        linear.weight.detach().unflatten(1, (-1, 32)),
        (got.weight - linear.weight.detach()).unflatten(1, (-1, 32)),
    )
    largest = weight.abs().amax(-1, keepdim=True)
    # NF4's widest gap is 0.304: the plain scale is off by half of it, and the chosen one is better in squares.
    assert (error.square().sum(-1) <= (0.153 * largest).square().sum(-1) * 32).all()
    gaussian = Int4Linear(gaussian_linear(), 32)
    assert relative_error(gaussian, gaussian_linear()) < 0.083


def gaussian_linear() -> nn.Linear:
    linear = nn.Linear(256, 256, bias=False)
    with torch.no_grad():
        linear.weight.normal_(generator=torch.Generator().manual_seed(0))
    return linear


def relative_error(got: QuantizedLinear, want: nn.Linear) -> float:
    return float((got.weight - want.weight.detach()).norm() / want.weight.detach().norm())


def test_packing_is_as_documented():
    linear = nn.Linear(32, 1, bias=False)
    codes = [int(c) for c in torch.randint(16, (32,))]
    codes[0] = 15  # the largest weight, so that the scale is 1
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[NF4[c] for c in codes]]))
    got = Int4Linear(linear, 32)
    assert got.scales.tolist() == [[1.0]]
    assert got.weight_int4[0].tolist() == [codes[j] | codes[j + 16] << 4 for j in range(16)]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_forward_is_the_decoded_weight(monkeypatch, make, dtype, bias):
    monkeypatch.setattr("mambakit.models.quantized_linear.BLOCK", 3 * 50)  # several blocks, the last one shorter
    linear = make_linear(7, 50, bias=bias)
    got = make(linear)
    x = torch.randn(2, 3, 50).to(dtype).requires_grad_()
    want = F.linear(x.double(), got.weight.double(), None if linear.bias is None else linear.bias.double())
    y = got(x)
    assert y.dtype == dtype
    (slope,) = torch.autograd.grad(y.double().sum(), x)
    slopes = got.weight.double().sum(0).expand(2, 3, -1)
    check(1e-2 if dtype == torch.bfloat16 else 1e-6, {"y": y, "d x": slope}, {"y": want, "d x": slopes})


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_is_the_same_product(make, dtype):
    """Few rows without gradients take the kernel, with the same result."""
    got = make(make_linear(33, 50))
    x = torch.randn(3, 50).to(dtype)
    want = got(x)
    with torch.no_grad():
        check(1e-2 if dtype == torch.bfloat16 else 1e-6, {"y": got(x)}, {"y": want})


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_moved_to_another_dtype(make):
    """Buffers that are no longer what the kernel reads are decoded by torch."""
    got = make(make_linear(5, 40)).to(torch.float64)
    x = torch.randn(2, 40)
    with torch.no_grad():
        check(1e-6, {"y": got(x)}, {"y": F.linear(x.double(), got.weight, got.bias)})


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_models(name, bits):
    model, ids = make_model(name), torch.randint(50, (2, 20))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    quantized = quantize(model, bits, activations="float32")
    replaced = {key for key, module in quantized.named_modules() if isinstance(module, QuantizedLinear)}
    kinds = {key.rpartition(".")[2] for key in replaced}
    assert kinds == {"in_proj", "out_proj", "fc1", "fc2", "lm_head"} | ({"x_proj"} if "mamba1" in name else set())
    assert len(replaced) == 2 * (len(kinds) - 1) + 1
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(quantized.backbone.embedding.weight, model.backbone.embedding.weight)
    assert quantized.backbone.embedding.weight is not model.backbone.embedding.weight

    decoded = make_model(name, tie_embeddings=False)
    decoded.load_state_dict(
        {
            key: quantized.get_submodule(key.rpartition(".")[0]).weight if key.endswith("weight") else value
            for key, value in before.items()
        }
    )
    with torch.no_grad():
        want, got = decoded(ids)[0], quantized(ids)[0]
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-3)
        apart = float((got - model(ids)[0]).norm() / got.norm())
        rounded = quantize(model, bits)
        rounded_apart = float((rounded(ids)[0] - model(ids)[0]).norm() / got.norm())
    assert 1e-6 < apart < {16: 0.1, 8: 0.1, 4: 0.6}[bits]
    assert {own.activations for own in rounded.modules() if isinstance(own, QuantizedLinear)} == {
        "bfloat16" if bits == 16 else "int8"
    }
    assert 1e-6 < rounded_apart < {16: 0.1, 8: 0.15, 4: 0.6}[bits]


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_save_and_load(tmp_path, name, bits):
    quantized = quantize(make_model(name), bits)
    save_file(quantized.state_dict(), tmp_path / "model.safetensors")
    fresh = quantize(LanguageModel(quantized.config), bits)
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    prompts = [[1, 2, 3], [4]]
    assert torch.equal(
        generate(fresh, prompts, max_new_tokens=9, seed=1), generate(quantized, prompts, max_new_tokens=9, seed=1)
    )
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in quantized.state_dict().items())


def test_other_dtypes_follow_the_model():
    quantized = quantize(make_model("mamba3"), 4).to(torch.bfloat16)
    assert quantized.backbone.layers[0].mixer.in_proj.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert quantized(torch.tensor([[1, 2, 3]]))[0].dtype == torch.bfloat16


def library_text(length: int) -> Tensor:
    """Bytes of Python's own source."""
    text = b"".join(Path(module.__file__).read_bytes() for module in (argparse, random, typing))
    return torch.tensor(list(text[:length]))


def test_loss_on_text():
    text = library_text(60_000)
    train, held = text[:-8192].unfold(0, 128, 128), text[-8192:].view(-1, 128)
    block = Mamba2Config(d_model=64, state_rank=16, per_head_dim=32)
    model = LanguageModel(ModelConfig(block=block, n_layer=2, vocab_size=256))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(60):
        ids = train[torch.randint(len(train), (8,), generator=torch.Generator().manual_seed(step))]
        loss = F.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    reports = {bits: quantization_report(model, quantize(model, bits), held) for bits in (16, 8, 4)}
    assert reports[8]["bits_per_token"] < 5.5, "the model has to have learned something to lose"
    assert abs(reports[16]["change"]) < 0.002
    assert abs(reports[8]["change"]) < 0.005
    assert 0 < reports[4]["change"] < 0.15
    assert reports[4]["bytes_quantized"] < reports[8]["bytes_quantized"] < reports[16]["bytes_quantized"]
    assert reports[16]["bytes_quantized"] < reports[16]["bytes"]


def test_report_counts_bits_and_bytes():
    model, ids = make_model("mamba2"), torch.randint(50, (2, 10))
    with torch.no_grad():
        probability = model(ids)[0].double().softmax(-1)
    want = [-float(probability[b, s, ids[b, s + 1]].log2()) for b in range(2) for s in range(9)]
    assert bits_per_token(model, ids) == pytest.approx(sum(want) / 18, rel=1e-5)
    sizes = {id(p): 4 * p.numel() for p in model.parameters()}
    assert weight_bytes(model) == sum(sizes.values())
    head = quantize(model, 8).lm_head
    assert isinstance(head, Int8Linear)
    assert weight_bytes(head) == 56 * 8 + 56 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits is 3, expected 16, 8 or 4"),
        ({"bits": 8, "group_size": 32}, "group_size = 32 is for 4 bits"),
        ({"bits": 16, "group_size": 32}, "16 bits have no scales"),
        ({"bits": 4, "group_size": 7}, "group_size is 7, expected a positive even number"),
        ({"bits": 4, "group_size": 0}, "group_size is 0"),
        ({"in_place": torch.zeros(2)}, r"in_place is tensor\(\[0., 0.\]\), expected True or False"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        quantize(make_model("mamba2"), **options)


def test_models_that_cannot_be_quantized():
    with pytest.raises(ValueError, match="quantized already"):
        quantize(quantize(make_model("mamba2"), 8), 4)
    with pytest.raises(ValueError, match="none of the projections"):
        quantize(nn.Sequential(nn.Linear(3, 3)))
    model = make_model("mamba2")
    with torch.no_grad():
        model.backbone.layers[1].mixer.in_proj.weight[0, 0] = float("nan")  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match=r"NaN or an infinity: backbone\.layers\.1\.mixer\.in_proj"):
        quantize(model)
    model.lm_head = nn.Sequential(model.lm_head)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"not nn\.Linear: lm_head; merge adapters"):
        quantize(model)
    with pytest.raises(ValueError, match="at least 2"):
        bits_per_token(model, torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("tokens", [1, 30])
def test_experts_are_their_decoded_matrices(bits, tokens):
    """Each expert's rows with that expert's matrix, by the kernel for few rows and without it."""
    torch.manual_seed(0)
    block = MoE(MoEConfig(40, 24, 5, 2, d_latent=36)).eval()
    quantized = quantize(block, bits, activations="float32")
    decoded = copy.deepcopy(block)
    with torch.no_grad():
        for name in ("latent_in", "latent_out"):
            getattr(decoded, name).weight.copy_(getattr(quantized, name).weight)
        for name in ("experts_in", "experts_out"):
            stacked = getattr(quantized, name)
            assert isinstance(stacked, QuantizedLinear)
            getattr(decoded, name).copy_(stacked.weight.view_as(getattr(block, name)))
    x = torch.randn(1, tokens, 40)
    want = decoded(x)[0]
    check(1e-5, {"with gradients": quantized(x)[0]}, {"with gradients": want}, floor=1e-3)
    with torch.no_grad():
        check(1e-5, {"without": quantized(x)[0]}, {"without": want}, floor=1e-3)
        assert quantized(x[:, :0])[0].shape == (1, 0, 40)
    assert weight_bytes(quantized) < {16: 0.56, 8: 0.34, 4: 0.25}[bits] * weight_bytes(block)


MIXED = ModelConfig(
    layers=(
        (Mamba2Config(d_model=32, state_rank=8, per_head_dim=8), MoEConfig(32, 24, 4, 2, "sigmoid", d_shared=24)),
        (ParallelConfig(AttentionConfig(32, 4, bias=True), Mamba1Config(d_model=32)), MLPConfig(32, 40, bias=True)),
    ),
    vocab_size=70,
)


def made(name: str) -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(MIXED) if name == "hybrid" else make_model(name)


@pytest.mark.parametrize("activations", [None, "float32"])
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", [*FAMILIES, "hybrid"])
def test_a_checkpoint_has_the_same_bits(name, bits, activations, tmp_path):
    quantized = quantize(made(name), bits, activations=activations)
    save_model(quantized, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.config == quantized.config
    want, got = quantized.state_dict(), again.state_dict()
    assert want.keys() == got.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype
        assert torch.equal(got[key], tensor), key
    assert [str(m) for m in again.modules()] == [str(m) for m in quantized.modules()]
    ids = torch.randint(50, (2, 20))
    assert torch.equal(again(ids)[0], quantized(ids)[0])
    prompts = [[1, 2, 3], [4]]
    assert torch.equal(*(generate(m, prompts, max_new_tokens=9, seed=1) for m in (again, quantized)))
    described = json.loads((tmp_path / "model" / "config.json").read_text())["quantization"]
    plain = {16: {"format": "bfloat16"}, 8: {"format": "int8"}, 4: {"format": "nf4", "group_size": 32}}
    rounded = {16: {"activations": "bfloat16"}, 8: {"activations": "int8"}, 4: {}}
    narrow = {4: {"format": "int4"}}.get(bits, plain[bits]) | rounded[bits]
    assert described["lm_head"] == (plain[bits] if activations else narrow)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_in_place(bits):
    model, again = make_model("mamba1"), make_model("mamba1")
    want, got = quantize(model, bits).state_dict(), quantize(again, bits, in_place=True)
    assert got is again
    assert want.keys() == got.state_dict().keys()
    assert all(torch.equal(tensor, want[key]) for key, tensor in got.state_dict().items())


def test_choices():
    model = make_model("mamba2")
    mixed = quantize(model, 4, head_bits=8)
    assert isinstance(mixed.lm_head, Int8Linear)
    assert isinstance(mixed.backbone.layers[0].mixer.in_proj, IntegerInt4Linear)  # type: ignore[union-attr]
    grouped = quantize(model, 4, group_size=64)
    assert isinstance(grouped.lm_head, Int4Linear), "groups of another size have rows as they are"
    for arguments, message in (
        ({"bits": 8, "activations": "bfloat16"}, "expected 'float32' or 'int8' for 8 bits"),
        ({"bits": 16, "activations": "int8"}, "expected 'float32' or 'bfloat16' for 16 bits"),
        ({"bits": 4, "activations": "int8", "group_size": 64}, "group_size is 64, expected 32"),
        ({"bits": 4, "head_bits": 5}, "head_bits is 5, expected 16, 8 or 4"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize(model, **arguments)


def test_checkpoints_of_other_dtypes(tmp_path):
    """Of a half-precision model everything is as it was; a dtype asked for is that of what is not quantized."""
    torch.manual_seed(0)
    half = quantize(LanguageModel(make_model("mamba2").config, dtype=torch.bfloat16), 4, group_size=8)
    save_model(half, tmp_path / "half")
    again = load_model(tmp_path / "half")
    ids = torch.randint(50, (1, 9))
    assert torch.equal(again(ids)[0], half(ids)[0])
    assert again.lm_head.weight.dtype == torch.bfloat16
    wide = load_model(tmp_path / "half", dtype=torch.float32)
    assert wide(ids)[0].dtype == torch.float32
    assert wide.lm_head.scales.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"lm_head\.scales is torch\.float64, expected torch\.bfloat16"):
        save_model(half.double(), tmp_path / "wide")
    assert not (tmp_path / "wide").exists()


def test_other_formats_have_no_quantized_weights(tmp_path):
    quantized = quantize(make_model("mamba2", tie_embeddings=False), 8)
    with pytest.raises(
        ValueError, match=r'cannot express|the format "official" takes no quantized model; give the one'
    ):
        save_model(quantized, tmp_path / "official", "official")


def changed(config: dict, tensors: dict, name: str) -> None:
    formats = config["quantization"]
    match name:
        case "nowhere":
            formats["backbone.layers.9.mixer.in_proj"] = {"format": "int8"}
        case "norm":
            formats["backbone.layers.0.norm"] = {"format": "int8"}
        case "unknown":
            formats["lm_head"] = {"format": "int3"}
        case "group":
            formats["lm_head"] = {"format": "nf4", "group_size": 10**12}
        case "extra":
            formats["lm_head"] = {"format": "int8", "group_size": 32}
        case "list":
            config["quantization"] = ["lm_head"]
        case "none":
            config["quantization"] = {}
        case "not said":
            del formats["lm_head"]
        case "other":
            formats["lm_head"] = {"format": "nf4", "group_size": 32}
        case "type":
            tensors["lm_head.weight_int8"] = tensors["lm_head.weight_int8"].view(torch.uint8)
        case "integers":
            tensors["backbone.norm_f.weight"] = tensors["backbone.norm_f.weight"].to(torch.int8)
        case "scales":
            tensors["lm_head.scales"] = tensors["lm_head.scales"].to(torch.bfloat16)
        case "shape":
            tensors["lm_head.scales"] = tensors["lm_head.scales"][:-1].clone()


WRONG = {
    "nowhere": "matrices that the model does not have, or that stay as they are: 'backbone.layers.9.mixer.in_proj'",
    "norm": "or that stay as they are: 'backbone.layers.0.norm'",
    "unknown": "quantization has 'lm_head': {'format': 'int3'}, expected a format of bfloat16, int8, nf4",
    "group": "'group_size': 1000000000000",
    "extra": "'group_size': 32}, expected a format",
    "list": "quantization = ['lm_head'], expected names of matrices",
    "none": "quantization = {}, expected names",
    "not said": "left over lm_head.scales, lm_head.weight_int8",
    "other": "missing lm_head.weight_int4; left over lm_head.weight_int8; lm_head.scales is [56] instead of [56, 1]",
    "type": "lm_head.weight_int8 is torch.uint8, expected torch.int8",
    "integers": "backbone.norm_f.weight is torch.int8, expected floating-point numbers",
    "scales": "lm_head.scales is torch.bfloat16, expected torch.float32",
    "shape": "lm_head.scales is [55] instead of [56]",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_checkpoints_are_refused_in_one_line(name, tmp_path):
    save_model(quantize(make_model("mamba2"), 8), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    changed(config, tensors, name)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load_model(tmp_path / "model")
    assert WRONG[name] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loaded_embedding_stays_in_its_file(tmp_path):
    model = quantize(make_model("mamba2"), 8)
    save_model(model, tmp_path / "model")
    loaded, ids_bs = load_model(tmp_path / "model"), torch.arange(12).view(2, 6)
    want = model(ids_bs)[0]
    with torch.no_grad():
        loaded.backbone.embedding.weight += 1.0  # its own, not the file's
    again = load_model(tmp_path / "model")
    assert torch.equal(again(ids_bs)[0], want)
    save_model(again, tmp_path / "model")  # replaces what it is mapped from
    assert torch.equal(load_model(tmp_path / "model")(ids_bs)[0], want)
    shutil.rmtree(tmp_path / "model")
    assert torch.equal(again(ids_bs)[0], want)
