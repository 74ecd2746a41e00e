"""A model without memory is like one with: names, shapes, types; and loading needs nothing to draw numbers with."""

import subprocess
import sys

import pytest
import torch

from blocks import CONFIGS
from mambakit import LanguageModel, Mamba1Config, MLPConfig, ModelConfig, MoEConfig, quantize, save_model
from mambakit.models.outline import outline

BLOCKS = {**CONFIGS, "mlp": MLPConfig(6, 10), "moe": MoEConfig(6, 10, n_experts=4, top_k=2)}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", BLOCKS)
def test_it_is_like_the_model(name, dtype):
    config = ModelConfig(layers=((BLOCKS[name],),), vocab_size=50)
    empty, model = outline(config, dtype), LanguageModel(config, dtype=dtype)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    want = {n: (t.shape, t.dtype, t.requires_grad) for n, t in model.named_parameters(remove_duplicate=False)}
    got = {n: (t.shape, t.dtype, t.requires_grad) for n, t in empty.named_parameters(remove_duplicate=False)}
    assert got == want
    assert empty.lm_head.weight is empty.backbone.embedding.weight
    for (_, made), (_, drawn) in zip(empty.named_parameters(), model.named_parameters(), strict=True):
        assert vars(made) == vars(drawn)


@pytest.mark.parametrize("bits", [8, 4])
def test_loading_brings_no_shape_reasoning_along(bits, tmp_path):
    blocks = Mamba1Config(d_model=8), CONFIGS["mamba2"], CONFIGS["mamba3"]
    config = ModelConfig(layers=tuple((block,) for block in blocks), vocab_size=50)
    save_model(quantize(LanguageModel(config), bits), tmp_path / "model")
    program = "import sys, mambakit; mambakit.load_model(sys.argv[1]); print('sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "model"], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
