"""Attention, for the layers of hybrid models that have it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.blocks.modules import Linear, convolve
from mambakit.compat.arguments import refuse_unknown
from mambakit.compat.stateful import PaddedConv1d, check_rows, without_padding

__all__ = ["MHA"]


class MHA(nn.Module):
    """Multi-head attention, optionally behind a short convolution and beside a gated MLP; `causal` or not."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        head_dim: int | None = None,
        mlp_dim: int = 0,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        d_conv: int = 0,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_interleaved: bool = False,
        device: Any = None,
        dtype: Any = None,
        **unknown: Any,
    ):
        refuse_unknown("MHA", unknown)
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.embed_dim, self.layer_idx, self.d_conv, self.causal = embed_dim, layer_idx, d_conv, causal
        self.num_heads, self.num_heads_kv = num_heads, num_heads if num_heads_kv is None else num_heads_kv
        if num_heads % self.num_heads_kv:
            raise ValueError(f"num_heads = {num_heads} is not a multiple of num_heads_kv = {num_heads_kv}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim = {embed_dim} is not a multiple of num_heads = {num_heads}; give head_dim")
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.softmax_scale, self.mlp_dim = softmax_scale, -(-mlp_dim // 256) * 256
        self.rotary_emb_dim, self.rotary_emb_base = rotary_emb_dim, rotary_emb_base
        self.rotary_emb_interleaved = rotary_emb_interleaved
        qkv_dim = self.head_dim * (self.num_heads + 2 * self.num_heads_kv)
        self.in_proj = Linear(embed_dim, qkv_dim + self.mlp_dim, bias=qkv_proj_bias, **made)
        if d_conv > 0:
            self.conv1d = PaddedConv1d(qkv_dim, d_conv, True, **made)
        out_dim = self.head_dim * self.num_heads + self.mlp_dim // 2
        self.out_proj = Linear(out_dim, embed_dim, bias=out_proj_bias, **made)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None) -> tuple[Tensor, Any]:
        """Keys and values (b, max_seqlen, 2, heads, width), and the last inputs of the convolution if there is one."""
        dtype = self.out_proj.weight.dtype if dtype is None else dtype
        made = {"device": self.out_proj.weight.device, "dtype": dtype}
        kv_cache = torch.zeros(batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim, **made)
        if self.d_conv == 0:
            return kv_cache, None
        return kv_cache, torch.zeros(batch_size, self.conv1d.in_channels, self.d_conv, **made)

    def forward(self, x: Tensor, inference_params: Any = None) -> Tensor:
        """(b, s, d) to (b, s, d). With `inference_params` the tokens come after those that its states hold."""
        past, kv_cache, window = 0, None, None
        if inference_params is not None:
            check_offsets(inference_params)
            memory = inference_params.key_value_memory_dict
            if self.layer_idx not in memory:
                memory[self.layer_idx] = self.allocate_inference_cache(len(x), inference_params.max_seqlen)
            past, (kv_cache, window) = inference_params.seqlen_offset, memory[self.layer_idx]
            check_rows(self.layer_idx, [kv_cache], len(x))
        qkv, x_mlp = self.in_proj(x).split((self.in_proj.out_features - self.mlp_dim, self.mlp_dim), dim=-1)
        if self.d_conv > 0:
            qkv = self.convolved(qkv, window, past)
        kv_dim = self.num_heads_kv * self.head_dim
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)) for t in qkv.split((qkv.shape[-1] - 2 * kv_dim, kv_dim, kv_dim), -1)
        )
        q, k = self.turned(q, past), self.turned(k, past)
        if kv_cache is not None:
            end = past + x.shape[1]
            if end > kv_cache.shape[1]:
                raise ValueError(f"token {end} is beyond max_seqlen = {kv_cache.shape[1]} of inference_params")
            with torch.no_grad():
                kv_cache[:, past:end] = torch.stack((k, v), dim=2)
            k, v = kv_cache[:, :end].to(q.dtype).unbind(2)
        y = self.attend(q, k, v, past).flatten(-2)
        if self.mlp_dim > 0:
            value, gate = x_mlp.chunk(2, dim=-1)
            y = torch.cat((y, value * F.silu(gate)), dim=-1)
        return self.out_proj(y)

    def convolved(self, qkv_bsv: Tensor, window: Tensor | None, past: int) -> Tensor:
        if past == 0 or window is None:
            before = qkv_bsv.new_zeros(len(qkv_bsv), qkv_bsv.shape[2], self.d_conv)
        else:
            before = window
        y_bsv, after = convolve(without_padding(self.conv1d), qkv_bsv, before, None, None)  # type: ignore[arg-type]
        if window is not None:
            with torch.no_grad():
                window.copy_(after)
        return y_bsv

    def turned(self, x_bshp: Tensor, past: int) -> Tensor:
        """Rotary embedding of the first `rotary_emb_dim` channels."""
        width = self.rotary_emb_dim
        if width == 0:
            return x_bshp
        wide = torch.promote_types(x_bshp.dtype, torch.float32)
        rate = self.rotary_emb_base ** (-torch.arange(0, width, 2, dtype=wide, device=x_bshp.device) / width)
        position = torch.arange(past, past + x_bshp.shape[1], dtype=wide, device=x_bshp.device)
        cos, sin = (f(position[:, None] * rate)[:, None] for f in (torch.cos, torch.sin))
        turned, rest = x_bshp.split((width, x_bshp.shape[-1] - width), dim=-1)
        pairs = turned.unflatten(-1, (-1, 2)) if self.rotary_emb_interleaved else turned.unflatten(-1, (2, -1)).mT
        first, second = pairs.unbind(-1)
        pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
        turned = pairs.flatten(-2) if self.rotary_emb_interleaved else pairs.mT.flatten(-2)
        return torch.cat((turned.to(x_bshp.dtype), rest), dim=-1)

    def attend(self, q_bshp: Tensor, k_btgp: Tensor, v_btgp: Tensor, past: int) -> Tensor:
        s, t = q_bshp.shape[1], k_btgp.shape[1]
        k, v = (x.repeat_interleave(self.num_heads // self.num_heads_kv, dim=2) for x in (k_btgp, v_btgp))
        seen_st = torch.ones(s, t, dtype=torch.bool, device=q_bshp.device).tril(past) if self.causal else None
        heads_first = (x.transpose(1, 2) for x in (q_bshp, k, v))
        y = F.scaled_dot_product_attention(*heads_first, attn_mask=seen_st, scale=self.softmax_scale)
        return y.transpose(1, 2)


def check_offsets(params: Any) -> None:
    """The official attention has more ways to say which rows a call is for, and how long each is."""
    offset, lengths_b = getattr(params, "batch_size_offset", 0), getattr(params, "lengths_per_sample", None)
    if offset:
        raise ValueError(f"batch_size_offset = {offset}: MHA takes all rows of a batch at once")
    if params.seqlen_offset and lengths_b is not None and bool((lengths_b != params.seqlen_offset).any()):
        raise ValueError(
            f"lengths_per_sample is {lengths_b.tolist()}, but MHA knows one length, "
            f"seqlen_offset = {params.seqlen_offset}"
        )


def _update_kv_cache(kv: Tensor, inference_params: Any, layer_idx: int | None) -> Tensor:
    """Keys and values (b, s, 2, heads, width) put behind those in the cache; all of them up to here."""
    kv_cache, _ = inference_params.key_value_memory_dict[layer_idx]
    start, first = inference_params.batch_size_offset, inference_params.seqlen_offset
    rows = slice(start, start + len(kv))
    with torch.no_grad():
        kv_cache[rows, first : first + kv.shape[1]] = kv
    return kv_cache[rows, : first + kv.shape[1]]
