"""A decoding step in fused kernels: each family's, from the input projection's output on.

Each function returns what `run` returns, or None where the kernels do not apply: more than one token, padding or
segments, gradients, other dtypes or devices, a module that is more than its parameters. Projections stay modules that
are called: what wraps them counts.
"""

from typing import Any

from torch import Tensor

from mambakit.blocks.modules import CausalConv1d, GatedRMSNorm, RMSNorm, is_plain
from mambakit.ops import fused_step as step
from mambakit.ops.backends import use_kernels
from mambakit.ops.ssd_path import SsdPath


def is_step(projected_bsX: Tensor, path: SsdPath | None, segments_bs: Tensor | None, lengths_b: Tensor | None) -> bool:
    """One token of every row, and kernels that might take it."""
    whole = projected_bsX.shape[1] == 1 and segments_bs is None and lengths_b is None
    return whole and use_kernels(SsdPath.of(path).backend)


def mamba1(
    block: Any,
    projected_bsX: Tensor,
    cache: Any,
    path: SsdPath | None,
    segments_bs: Tensor | None,
    lengths_b: Tensor | None,
) -> tuple[Tensor, Any] | None:
    if not is_step(projected_bsX, path, segments_bs, lengths_b):
        return None
    conv = block.conv1d
    if not is_plain(conv, CausalConv1d):
        return None
    projected_bX = projected_bsX[:, 0]
    tensors = (projected_bX, *cache, conv.weight, conv.bias, block.A_log, block.D)
    if not step.can_fuse(SsdPath.of(path).backend, tensors, block.parameters()):
        return None
    x_bi, window_bik = step.mamba1_step_conv(projected_bX, cache.conv_bik, conv.weight, conv.bias)
    dt_b_c_bX = block.x_proj(x_bi[:, None])
    dt_bsi = block.dt_proj(dt_b_c_bX[..., : block.config.dt_width])
    y_bi, state_bir = step.mamba1_step(
        projected_bX, x_bi, dt_bsi[:, 0], dt_b_c_bX[:, 0], cache.ssm_bir, block.A_log, block.D
    )
    return block.out_proj(y_bi[:, None]), type(cache)(window_bik, state_bir)


def mamba2(
    block: Any,
    projected_bsX: Tensor,
    cache: Any,
    path: SsdPath | None,
    segments_bs: Tensor | None,
    lengths_b: Tensor | None,
) -> tuple[Tensor, Any] | None:
    if not is_step(projected_bsX, path, segments_bs, lengths_b):
        return None
    config, conv = block.config, block.conv1d
    norm = block.norm if config.rmsnorm else None
    if not is_plain(conv, CausalConv1d) or (norm is not None and not is_plain(norm, GatedRMSNorm)):
        return None
    projected_bX = projected_bsX[:, 0]
    weight, group, eps, before_gate = None, config.norm_width, 0.0, False
    if norm is not None:
        weight, group, eps, before_gate = norm.weight, norm.group_size, norm.eps, norm.norm_before_gate
    parameters = (conv.weight, conv.bias, block.dt_bias, block.A_log, block.D, weight)
    if not step.can_fuse(SsdPath.of(path).backend, (projected_bX, *cache, *parameters), block.parameters()):
        return None
    y_bi, *after = step.mamba2_step(projected_bX, *cache, *parameters, group, eps, before_gate, *config.dt_limit)
    return block.out_proj(y_bi[:, None]), type(cache)(*after)


def mamba3(
    block: Any,
    projected_bsX: Tensor,
    cache: Any,
    path: SsdPath | None,
    segments_bs: Tensor | None,
    lengths_b: Tensor | None,
) -> tuple[Tensor, Any] | None:
    if not is_step(projected_bsX, path, segments_bs, lengths_b):
        return None
    config = block.config
    norm = block.norm if config.is_outproj_norm else None
    norms = [module for module in (block.B_norm, block.C_norm, norm) if module is not None]
    if config.rotation != "complex" or not all(is_plain(module, RMSNorm) for module in norms):
        return None
    projected_bX, carried = projected_bsX[:, 0], cache[:4]
    mimo = (block.mimo_x, block.mimo_z, block.mimo_o) if config.is_mimo else (None, None, None)
    parameters = (
        *(block.dt_bias, block.B_norm.weight, block.C_norm.weight, block.B_bias, block.C_bias, *mimo, block.D),
        None if norm is None else norm.weight,
    )
    if not step.can_fuse(SsdPath.of(path).backend, (projected_bX, *carried, *parameters), block.parameters()):
        return None
    y_bi, *after = step.mamba3_step(
        *(projected_bX, *carried, *parameters, config.rope_dim // 2),
        *(config.pairing == "half", config.a_activation == "heavy_tail", block.B_norm.eps),
        *(*config.dt_limit, config.a_floor, config.rotation_range),
    )
    return block.out_proj(y_bi[:, None]), type(cache)(*after, cache.pathway)
