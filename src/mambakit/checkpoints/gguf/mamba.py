"""Mamba-1, also Falcon-Mamba's, and Mamba-2 in GGUF files."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from mambakit.blocks.mamba1 import Mamba1Config
from mambakit.blocks.mamba2 import Mamba2Config
from mambakit.checkpoints.fitting import EMBEDDING, HEAD
from mambakit.checkpoints.gguf.described import NORM_EPS, Described
from mambakit.checkpoints.gguf.tensors import Layout
from mambakit.models.language_model import ModelConfig

MODEL = {"block_count": "n_layer", NORM_EPS: "norm_eps"}
SHARED = {"embedding_length": "d_model", "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_rank"}


def read_mamba(file: Described) -> ModelConfig:
    """Falcon-Mamba's norms on dt, B and C have the epsilon of the others, as in llama.cpp."""
    fields = file.fields(Mamba1Config, {**SHARED, "ssm.time_step_rank": "dt_rank"}, {"ssm.dt_b_c_rms": "dt_b_c_norm"})
    inner, width = file.size("ssm.inner_size"), file.size("embedding_length")
    if fields.get("dt_b_c_norm"):
        fields |= {"dt_b_c_norm_weight": False, "norm_eps": file.values.get(NORM_EPS)}
    return model_of(file, lambda: Mamba1Config(expand=ratio(inner, width), **fields, **biases(file)))


def read_mamba2(file: Described) -> ModelConfig:
    names = {**SHARED, "ssm.group_count": "ngroups", "ssm.inner_size": "d_inner", NORM_EPS: "norm_eps"}
    fields = file.fields(Mamba2Config, names)
    inner, heads, width = file.size("ssm.inner_size"), file.size("ssm.time_step_rank"), file.size("embedding_length")
    if inner % heads:
        file.lint.refuse(f"mamba2.ssm.inner_size = {inner} is not a multiple of the {heads} heads, ssm.time_step_rank")
    if inner % width == 0:
        # As other formats say it.
        fields |= {"d_inner": None, "expand": inner // width}
    return model_of(file, lambda: Mamba2Config(per_head_dim=inner // heads, **fields, **biases(file)))


def model_of(file: Described, block: Callable[[], Any]) -> ModelConfig:
    """The config of a model of such blocks only; ValueError says all that is wrong."""
    fields, rows = file.fields(ModelConfig, MODEL), file.vocabulary()
    if file.lint.buildable:
        try:
            # The vocabulary is padded already.
            padded = {"vocab_size": rows, "pad_vocab_size_multiple": 1}
            return ModelConfig(block=block(), tie_embeddings=file.is_tied(), **padded, **fields)
        except (ValueError, ArithmeticError) as error:
            file.lint.add(str(error))
    file.lint.close()
    raise AssertionError("a config that cannot be built has a reason")


def biases(file: Described) -> dict[str, Any]:
    """Metadata does not tell."""
    return {"bias": file.has("ssm_in.bias"), "conv_bias": file.has("ssm_conv1d.bias")}


def ratio(inner: int, width: int) -> float:
    """By which the model's width becomes the inner one."""
    if inner % width == 0:
        return inner // width
    nearest = inner / width
    return nearest if int(nearest * width) == inner else math.nextafter(nearest, math.inf)


OUTSIDE = {"token_embd.weight": EMBEDDING, "output_norm.weight": "backbone.norm_f.weight", "output.weight": HEAD}
MIXER = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_in.bias": "in_proj.bias",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_out.weight": "out_proj.weight",
    "ssm_out.bias": "out_proj.bias",
}
MIXER1 = {
    **MIXER,
    "ssm_x.weight": "x_proj.weight",
    "ssm_dt.weight": "dt_proj.weight",
    "ssm_dt.bias": "dt_proj.bias",
}
MIXER2 = {**MIXER, "ssm_dt.bias": "dt_bias", "ssm_norm.weight": "norm.weight"}
FLATTENED = ("ssm_a", "ssm_d", "ssm_norm.weight")
"""Of Mamba-2."""


def inside(prefix: str, names: dict[str, str]) -> dict[str, str]:
    return {theirs: prefix + ours for theirs, ours in names.items()}


class Architecture(NamedTuple):
    config: Callable[[Described], ModelConfig]
    layout: Layout


NORM = {"attn_norm.weight": "norm.weight"}
ARCHITECTURES = {
    "mamba": Architecture(read_mamba, Layout(outside=OUTSIDE, inside={**NORM, **inside("mixer.", MIXER1)})),
    "mamba2": Architecture(
        read_mamba2, Layout(outside=OUTSIDE, inside={**NORM, **inside("mixer.", MIXER2)}, flattened=FLATTENED)
    ),
}
