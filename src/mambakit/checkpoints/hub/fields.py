"""What the files of this folder share: a config's fields as a dataclass, read from JSON values and written back."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any, ClassVar, TypeVar

from mambakit.blocks.attention import AttentionConfig
from mambakit.blocks.config import BlockConfig
from mambakit.blocks.mamba2 import Mamba2Config
from mambakit.blocks.mlp import ACTIVATIONS
from mambakit.blocks.parallel import ParallelConfig
from mambakit.checkpoints.fields import Lint, same, shown
from mambakit.checkpoints.gated_norm import whole_assumed
from mambakit.checkpoints.names import Names, Table
from mambakit.models.language_model import ModelConfig

Kind = TypeVar("Kind", bound=BlockConfig)
MAX_LAYERS = 10_000
UNREAD = {
    *("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "return_dict", "output_hidden_states"),
    *("output_attentions", "output_router_logits", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type", "use_mamba_kernels", "num_logits_to_keep", "_attn_implementation"),
    *("_attn_implementation_autoset", "use_mambapy", "use_associative_scan", "max_position_embeddings"),
    *("initializer_range", "rescale_prenorm_residual"),  # only how the weights started
    *("attention_dropout", "hidden_dropout", "router_aux_loss_coef", "z_loss_coefficient"),  # only in training
}
ATTENTION = ("attention", "full_attention")
MAMBA = ("mamba", "linear_attention")
"""What layers are called: by older files, and by newer ones."""
FEED_FORWARD: dict[str, Table] = {
    "attention": {"in_proj": ("q_proj", "k_proj", "v_proj"), "out_proj": "o_proj"},
    "mlp": {"fc1": ("up_proj", "gate_proj"), "fc2": "down_proj"},
}
"""Names inside blocks that most formats share."""
DECODER: dict[str, Any] = {
    "embedding": "model.embed_tokens.weight",
    "norm_f": "model.final_layernorm.",
    "layer": "model.layers.{}.",
    "norms": ("input_layernorm.", "pre_ff_layernorm."),
}
"""And names around them, for `Names`."""


class HubConfig(ABC):
    """Base of the dataclasses whose fields are those of a `config.json`, with transformers' types and defaults."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    names: ClassVar[Names]
    unread: ClassVar[set[str]] = set()
    """Fields of this format, beside `UNREAD`, that change nothing that is computed here."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Fields with the one value that is supported."""

    @abstractmethod
    def config(self) -> ModelConfig:
        """ValueError names the fields that do not go together."""

    @classmethod
    @abstractmethod
    def of(cls, config: ModelConfig) -> "HubConfig":
        """The fields of a model of ours; ValueError says why it is no such model."""

    def left_open(self) -> dict[str, str]:
        """Arguments of `load_model` that decide what the file does not, each with what is assumed otherwise."""
        return {}

    @classmethod
    def read(cls, values: dict[str, Any]) -> "HubConfig":
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a dataclass
        lint = Lint()
        lint.types(cls, values, same(*known))
        for name, only in cls.fixed.items():
            if values.get(name, only) != only:
                lint.add(f"{name} = {shown(values[name])} is not supported, only {only!r}")
        lint.close()
        other = sorted(values.keys() - set(known) - UNREAD - cls.unread - cls.fixed.keys())
        if other:
            warnings.warn(f"fields of config.json that are not read: {', '.join(other)}", UserWarning, stacklevel=5)
        return cls(**{name: values[name] for name in known if name in values})

    def write(self) -> dict[str, Any]:
        # Its defaults are the tokens of one tokenizer, which this model need not have.
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        written = {"architectures": [self.architecture], "model_type": self.model_type, **self.fixed, **tokens}
        values = asdict(self)  # type: ignore[call-overload]  # a dataclass
        if values.get("time_step_limit") == (0.0, float("inf")):
            # The default. Versions differ in how they write infinity, which is not JSON.
            del values["time_step_limit"]
        return {**written, **{name: value for name, value in values.items() if value is not None}}


def check_layers(name: str, count: int) -> None:
    if not 0 < count <= MAX_LAYERS:
        raise ValueError(f"{name} asks for {count} layers, expected 1 to {MAX_LAYERS}")


def head_width(d_model: int, heads: int, d_head: int | None = None) -> int:
    if heads <= 0 or (d_model % heads and d_head is None):
        raise ValueError(f"hidden_size = {d_model} is not a multiple of num_attention_heads = {heads}")
    return d_model // heads if d_head is None else d_head


def inner_width(expand: float, d_model: int, heads: int, d_head: int | str | None, where: str = "mamba_") -> int:
    """The width that heads have together, which has to be the one that the expansion gives."""
    width = int(expand * d_model)
    if d_head in ("auto", None):
        d_head = width // heads if heads > 0 else 0
    if not isinstance(d_head, int) or heads * d_head != width or width <= 0:
        told = f"{where}n_heads = {heads} times {where}d_head = {d_head}"
        raise ValueError(f"{told} is not {where}expand * hidden_size = {width}")
    return width


def only(config: ModelConfig, kind: type[Kind]) -> Kind | None:
    """The one config of a kind that all layers share; None where there is no such block."""
    found = {block: None for blocks in config.blocks for block in flat(blocks) if type(block) is kind}
    if len(found) > 1:
        raise ValueError(f"its layers have {len(found)} different {kind.__name__}s, where one is expected")
    return next(iter(found), None)


def flat(blocks: tuple[BlockConfig, ...]) -> Iterator[BlockConfig]:
    """With the parts of parallel blocks in their place."""
    for block in blocks:
        yield from (block.a, block.b) if isinstance(block, ParallelConfig) else (block,)


def kinds(config: ModelConfig) -> list[tuple[str, ...]]:
    """For each layer, the names of its blocks' configs without "Config"."""
    return [tuple(type(block).__name__.removesuffix("Config") for block in blocks) for blocks in config.blocks]


def expect_kinds(config: ModelConfig, *allowed: tuple[str, ...]) -> list[tuple[str, ...]]:
    found = kinds(config)
    for i, layer in enumerate(found):
        if layer not in allowed:
            told = " or ".join(" + ".join(one) for one in allowed)
            raise ValueError(f"layer {i} is {' + '.join(layer)}, where {told} is expected")
    return found


def rope_of(parameters: Mapping[str, Any] | None, values: Any) -> tuple[float, float]:
    """Theta and the fraction of the channels, from newer files' `rope_parameters` or older ones' single fields."""
    parameters = parameters or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default" or getattr(values, "rope_scaling", None):
        raise ValueError(f"rope of the kind {shown(kind)} is not supported, only the default one")
    theta = parameters.get("rope_theta", getattr(values, "rope_theta", None) or 10000.0)
    fraction = parameters.get("partial_rotary_factor", 1.0)
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", fraction)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"rope_parameters.{name} = {shown(value)} is not a positive number")
    return float(theta), float(fraction)


def attention_fields(attention: AttentionConfig | None) -> dict[str, int]:
    """The numbers of heads, which without any attention are those of the defaults, and their width if it is free."""
    if attention is None:
        return {}
    found = {"num_attention_heads": attention.n_heads, "num_key_value_heads": attention.kv_heads}
    whole = attention.n_heads * attention.head_width == attention.d_model
    return found if whole else {**found, "head_dim": attention.head_width}


def as_limit(limit: Any) -> tuple[float, float]:
    low, high = (0.0, float("inf")) if limit is None else limit
    return float(low), float(high)


def mamba2_block(values: Any, *, eps: float) -> Mamba2Config:
    """Of files whose fields begin with `mamba_`: a gated norm over all channels, the gate first."""
    inner = inner_width(values.mamba_expand, values.hidden_size, values.mamba_n_heads, values.mamba_d_head)
    return Mamba2Config(
        d_model=values.hidden_size,
        d_inner=inner,
        state_rank=values.mamba_d_state,
        per_head_dim=inner // values.mamba_n_heads,
        ngroups=values.mamba_n_groups,
        conv_kernel=values.mamba_d_conv,
        norm_group_size=inner,
        norm_eps=eps,
        dt_limit=as_limit(values.time_step_limit),
        conv_bias=values.mamba_conv_bias,
        bias=values.mamba_proj_bias,
    )


def mamba2_fields(block: Mamba2Config | None) -> dict[str, Any]:
    if block is None:
        return {}
    return {
        "mamba_n_heads": block.nheads,
        "mamba_d_head": block.per_head_dim,
        "mamba_n_groups": block.ngroups,
        "mamba_d_state": block.state_rank,
        "mamba_d_conv": block.conv_kernel,
        # A fraction does not come back and is refused.
        "mamba_expand": max(1, block.inner_width // block.d_model),
        "mamba_conv_bias": block.conv_bias,
        "mamba_proj_bias": block.bias,
        "time_step_limit": block.dt_limit,
    }


def grouped_norm(values: Any) -> dict[str, str]:
    """What files of several groups leave open: transformers has computed the norm in two ways."""
    if values.mamba_n_groups == 1:
        return {}
    inner = values.mamba_expand * values.hidden_size
    return {"norm_group_size": whole_assumed(values.mamba_n_groups, inner)}


def activation(field: str, theirs: str) -> str:
    """What our MLPs call an activation of transformers."""
    ours = {their_activation(name): name for name in ACTIVATIONS}
    if theirs not in ours:
        raise ValueError(f"{field} = {shown(theirs)} is unknown, expected one of {', '.join(ours)}")
    return ours[theirs]


def their_activation(ours: str) -> str:
    return {"gelu_tanh": "gelu_pytorch_tanh"}.get(ours, ours)
