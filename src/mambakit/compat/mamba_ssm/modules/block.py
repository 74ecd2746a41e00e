"""A mixer between a norm and a residual."""

from typing import Any

import torch
from torch import Tensor, nn

from mambakit.compat.mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn

__all__ = ["Block"]


class Block(nn.Module):
    """Adds what the block before left to the residual, norms it and mixes it; with an MLP, once more.

    `forward` returns the mixed part and the residual, not yet added: the next block does that.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Any,
        mlp_cls: Any,
        norm_cls: Any = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ):
        super().__init__()
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        self.norm = norm_cls(dim)
        self.mixer = mixer_cls(dim)
        if mlp_cls is nn.Identity:
            self.mlp = None
        else:
            self.norm2 = norm_cls(dim)
            self.mlp = mlp_cls(dim)
        if fused_add_norm and not isinstance(self.norm, nn.LayerNorm | RMSNorm):
            raise ValueError(f"fused_add_norm takes LayerNorm or RMSNorm, got {type(self.norm).__name__}")

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, inference_params: Any = None, **mixer_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        hidden_states, residual = self.add_and_norm(self.norm, hidden_states, residual)
        hidden_states = self.mixer(hidden_states, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            hidden_states, residual = self.add_and_norm(self.norm2, hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def add_and_norm(self, norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_and_norm(norm, x, residual, self.fused_add_norm, self.residual_in_fp32)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any) -> Any:
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)


def add_and_norm(
    norm: Any, x: Tensor, residual: Tensor | None, is_fused: bool, residual_in_fp32: bool
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual` and that sum. Fused, the norm sees the sum before it is rounded."""
    if is_fused:
        return layer_norm_fn(
            x,
            norm.weight,
            norm.bias,
            residual=residual,
            eps=norm.eps,
            prenorm=True,
            residual_in_fp32=residual_in_fp32,
            is_rms_norm=isinstance(norm, RMSNorm),
        )
    residual = x if residual is None else x + residual
    normed = norm(residual.to(norm.weight.dtype))
    if residual_in_fp32:
        residual = residual.to(torch.promote_types(residual.dtype, torch.float32))
    return normed, residual
