"""The official language model, block by block."""

import json
import math
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mambakit.blocks.modules import Linear
from mambakit.compat.mamba_ssm.models.config_mamba import MambaConfig
from mambakit.compat.mamba_ssm.modules.block import Block, add_and_norm
from mambakit.compat.mamba_ssm.modules.mamba2 import Mamba2
from mambakit.compat.mamba_ssm.modules.mamba3 import Mamba3
from mambakit.compat.mamba_ssm.modules.mamba_simple import Mamba
from mambakit.compat.mamba_ssm.modules.mha import MHA
from mambakit.compat.mamba_ssm.modules.mlp import GatedMLP
from mambakit.compat.mamba_ssm.ops.triton.layer_norm import RMSNorm
from mambakit.compat.mamba_ssm.utils.generation import GenerationMixin
from mambakit.compat.mamba_ssm.utils.hf import load_config_hf, load_state_dict_hf

__all__ = ["MambaLMHeadModel", "MixerModel", "create_block"]

LAYERS = {"Mamba1": Mamba, "Mamba2": Mamba2, "Mamba3": Mamba3}


def create_block(
    d_model: int,
    d_intermediate: int = 0,
    ssm_cfg: dict[str, Any] | None = None,
    attn_layer_idx: list[int] | None = None,
    attn_cfg: dict[str, Any] | None = None,
    norm_epsilon: float = 1e-5,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
    fused_add_norm: bool = False,
    layer_idx: int | None = None,
    device: Any = None,
    dtype: Any = None,
) -> Block:
    if not isinstance(d_intermediate, int):
        raise TypeError("create_block takes d_intermediate second; calls in the order of mamba_ssm 1.x need keywords")
    made = {"device": device, "dtype": dtype}
    if layer_idx in (attn_layer_idx or ()):
        mixer_cls = partial(MHA, layer_idx=layer_idx, **(attn_cfg or {}), **made)
    else:
        options = dict(ssm_cfg or {})
        layer = options.pop("layer", "Mamba1")
        if layer not in LAYERS:
            raise ValueError(f"ssm_cfg['layer'] = {layer!r} is unknown, expected one of {', '.join(LAYERS)}")
        mixer_cls = partial(LAYERS[layer], layer_idx=layer_idx, **options, **made)
    mlp_cls: Any = nn.Identity
    if d_intermediate:
        mlp_cls = partial(GatedMLP, hidden_features=d_intermediate, out_features=d_model, **made)
    norm_cls = partial(RMSNorm if rms_norm else nn.LayerNorm, eps=norm_epsilon, **made)
    block = Block(d_model, mixer_cls, mlp_cls, norm_cls, fused_add_norm, residual_in_fp32)
    block.layer_idx = layer_idx  # type: ignore[assignment]
    return block


def _init_weights(
    module: nn.Module,
    n_layer: int,
    initializer_range: float = 0.02,
    rescale_prenorm_residual: bool = True,
    n_residuals_per_layer: int = 1,
) -> None:
    """Zero biases, normal embeddings, and projections into the residual smaller the more of them there are."""
    if isinstance(module, nn.Linear) and module.bias is not None and not getattr(module.bias, "_no_reinit", False):
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=initializer_range)
    if rescale_prenorm_residual:
        for name, parameter in module.named_parameters():
            if name in ("out_proj.weight", "fc2.weight"):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                with torch.no_grad():
                    parameter /= math.sqrt(n_residuals_per_layer * n_layer)


class MixerModel(nn.Module):
    """Ids to the normed residual stream."""

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_intermediate: int = 0,
        vocab_size: int | None = None,
        ssm_cfg: dict[str, Any] | None = None,
        attn_layer_idx: list[int] | None = None,
        attn_cfg: dict[str, Any] | None = None,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = False,
        initializer_cfg: dict[str, Any] | None = None,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        if not isinstance(vocab_size, int):
            raise TypeError("MixerModel needs vocab_size, fourth; calls in the order of mamba_ssm 1.x need keywords")
        made = {"device": device, "dtype": dtype}
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        self.embedding = nn.Embedding(vocab_size, d_model, **made)
        common = (d_intermediate, ssm_cfg, attn_layer_idx, attn_cfg, norm_epsilon, rms_norm)
        after = (residual_in_fp32, fused_add_norm)
        self.layers = nn.ModuleList(create_block(d_model, *common, *after, i, **made) for i in range(n_layer))
        self.norm_f = (RMSNorm if rms_norm else nn.LayerNorm)(d_model, eps=norm_epsilon, **made)
        residuals = 2 if d_intermediate else 1
        self.apply(partial(_init_weights, n_layer=n_layer, **(initializer_cfg or {}), n_residuals_per_layer=residuals))

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any
    ) -> dict[int, Any]:
        layers = enumerate(self.layers)
        return {i: layer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs) for i, layer in layers}  # type: ignore[operator]

    def forward(self, input_ids: Tensor, inference_params: Any = None, **mixer_kwargs: Any) -> Tensor:
        hidden_states, residual = self.embedding(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, inference_params=inference_params, **mixer_kwargs)
        return add_and_norm(self.norm_f, hidden_states, residual, self.fused_add_norm, self.residual_in_fp32)[0]


class CausalLMOutput(NamedTuple):
    logits: Tensor


class MambaLMHeadModel(nn.Module, GenerationMixin):
    """Ids to logits over the padded vocabulary, as officially."""

    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict[str, Any] | None = None,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.config = config
        multiple = config.pad_vocab_size_multiple
        vocab_size = -(-config.vocab_size // multiple) * multiple
        self.backbone = MixerModel(
            d_model=config.d_model,
            n_layer=config.n_layer,
            d_intermediate=config.d_intermediate,
            vocab_size=vocab_size,
            ssm_cfg=config.ssm_cfg,
            attn_layer_idx=config.attn_layer_idx,
            attn_cfg=config.attn_cfg,
            rms_norm=config.rms_norm,
            initializer_cfg=initializer_cfg,
            fused_add_norm=config.fused_add_norm,
            residual_in_fp32=config.residual_in_fp32,
            device=device,
            dtype=dtype,
        )
        self.lm_head = Linear(config.d_model, vocab_size, bias=False, device=device, dtype=dtype)
        self.apply(partial(_init_weights, n_layer=config.n_layer, **(initializer_cfg or {})))
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any
    ) -> dict[int, Any]:
        return self.backbone.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        **mixer_kwargs: Any,
    ) -> CausalLMOutput:
        """`.logits` of all tokens, or of the last `num_last_tokens`. As officially, `position_ids` have no effect."""
        hidden_states = self.backbone(input_ids, inference_params=inference_params, **mixer_kwargs)
        return CausalLMOutput(self.lm_head(hidden_states[:, -num_last_tokens:] if num_last_tokens else hidden_states))

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name: str | os.PathLike[str], device: Any = None, dtype: Any = None, **kwargs: Any
    ) -> "MambaLMHeadModel":
        """The model in a directory or on the hub, in the official format. No code from the files is run."""
        values = load_config_hf(pretrained_model_name)
        if "model_type" in values or values.get("format") == "mambakit":
            raise ValueError(f"{pretrained_model_name} is not in the official format; mambakit.load_model reads it")
        config = MambaConfig(**values)
        if config.ssm_cfg.get("layer") == "Mamba3" and "a_activation" not in config.ssm_cfg:
            warnings.warn(
                "official Mamba-3 checkpoints do not say how A is activated; assuming heavy_tail, as mamba_ssm does "
                "since June 2026. For weights made before that put a_activation: softplus into ssm_cfg in config.json",
                UserWarning,
                stacklevel=2,
            )
        model = cls(config, device=device, dtype=dtype, **kwargs)
        model.load_state_dict(load_state_dict_hf(pretrained_model_name, device=device, dtype=dtype))
        return model

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """`config.json` and `pytorch_model.bin` as the official package reads them."""
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), directory / "pytorch_model.bin")
        (directory / "config.json").write_text(json.dumps(vars(self.config), indent=4), encoding="utf-8")
