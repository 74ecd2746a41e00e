"""The small modules blocks are made of. They keep the official parameter names."""

import math
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.ops import few_rows
from mambakit.ops.backends import asked
from mambakit.ops.boundary import boundary, linked, pass_window
from mambakit.ops.causal_conv import convolve_in_parts, correlate, last_inputs
from mambakit.ops.norm import gated_rms_norm

Module = TypeVar("Module", bound=nn.Module)


class Linear(nn.Linear):
    """`nn.Linear` that multiplies the few rows of a decoding step as fast as the weight can be read.

    By a kernel where there is one. Otherwise, on the CPU, by a batched product of the matrix's halves, which reads it
    at twice the speed of torch's product with a row. A real `nn.Linear` by type and parameters, so adapters and
    quantizers find what they know.
    """

    def forward(self, input: Tensor) -> Tensor:
        # A compiler has its own way with a torch operator.
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            few = input.numel() <= few_rows.most_rows(input.dtype) * self.in_features
            if asked() != "torch" and few and self.is_read_by(input):
                y = few_rows.multiply(input, self.stored())
                if y is not None:
                    return y
            if self.is_decoding(input):
                return self.multiply_halves(input)
        return super().forward(input)

    def is_read_by(self, input: Tensor) -> bool:
        """Whether kernels multiply the two as they are."""
        return input.dtype == self.weight.dtype and input.dtype in (torch.float32, torch.bfloat16)

    def is_decoding(self, input: Tensor) -> bool:
        if (
            torch.is_grad_enabled()
            or input.device.type != "cpu"
            or not 0 < input.numel() <= 4 * self.in_features
            or self.out_features % 2
        ):
            return False
        weight, dtype = self.weight, input.dtype
        wide = dtype == weight.dtype and (dtype == torch.float32 or dtype == torch.float64)
        return wide and weight.is_contiguous() and not torch.is_autocast_enabled("cpu")

    def stored(self) -> few_rows.Weights:
        """The weight as the decoding kernels read it."""
        return few_rows.Weights(few_rows.plain_format(self.weight), self.in_features, self.weight, None, self.bias)

    def multiply_halves(self, input: Tensor) -> Tensor:
        shape, k, bias = (*input.shape[:-1], self.out_features), self.in_features, self.bias
        x_2kB = input.reshape(1, -1, k).mT.expand(2, -1, -1)
        y_2nB = torch.bmm(self.weight.view(2, -1, k), x_2kB)
        if y_2nB.shape[2] > 1:
            # Contiguous: what follows is slow on a transposed result.
            y_2nB = y_2nB.flatten(0, 1).mT.contiguous()
        y = y_2nB.view(shape)
        return y if bias is None else y + bias


class RMSNorm(nn.Module):
    """RMSNorm with one weight per channel; `group_size` as in `ops.norm`.

    Returns the weight's dtype: a residual wider than its layer is normed wide and goes on narrow.
    """

    def __init__(
        self, width: int, eps: float = 1e-5, group_size: int | None = None, device: Any = None, dtype: Any = None
    ):
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return gated_rms_norm(x, None, weight, self.eps, group_size=self.group_size).to(weight.dtype)


class GatedRMSNorm(RMSNorm):
    """RMSNorm of a gated input, or gated RMSNorm: `norm_before_gate` says which."""

    def __init__(self, width: int, group_size: int | None, norm_before_gate: bool, eps: float = 1e-5, **made: Any):
        super().__init__(width, eps, group_size, **made)
        self.norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return gated_rms_norm(
            x, z, self.weight, self.eps, group_size=self.group_size, norm_before_gate=self.norm_before_gate
        )


class CausalConv1d(nn.Conv1d):
    """`Conv1d` that, when depthwise and unpadded, computes in the layout of channels-last data.

    A real `Conv1d` by constructor, parameters and results, so that adapters which wrap one, or make more of its type,
    find what they know.
    """

    @property
    def is_depthwise(self) -> bool:
        """One filter per channel, nothing padded or left out."""
        depthwise = self.groups == self.in_channels == self.out_channels
        return depthwise and self.padding == (0,) and self.stride == (1,) and self.dilation == (1,)

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_depthwise:
            return super().forward(input)
        return correlate(input.mT, self.weight[:, 0], self.bias).mT


def convolve(
    conv: nn.Module, x_bsv: Tensor, window_bvk: Tensor, segments_bs: Tensor | None, lengths_b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`conv` over the window and `x`, and the window after the last of each row's `lengths` tokens.

    The module is called once, whatever wraps it. Each new segment is preceded by zeros of its own, which is what keeps
    its taps from reaching across.
    """
    window_bvk = window_bvk.to(x_bsv.dtype)
    k = window_bvk.shape[2]
    spaced_bSv = torch.cat([window_bvk[:, :, 1:].mT, x_bsv], 1)
    if segments_bs is None:
        return conv(spaced_bSv.mT).mT, last_inputs(x_bsv, window_bvk, k, None, lengths_b)
    starts_bs = torch.nn.functional.pad(segments_bs[:, 1:] != segments_bs[:, :-1], (1, 0))
    shift_bs = starts_bs.cumsum(1) * (k - 1)
    place_bs = torch.arange(x_bsv.shape[1], device=x_bsv.device) + shift_bs
    total = int(place_bs.max()) + k if place_bs.numel() else k - 1
    spaced_bSv = x_bsv.new_zeros(x_bsv.shape[0], total, x_bsv.shape[2])
    spaced_bSv = torch.cat([window_bvk[:, :, 1:].mT, spaced_bSv[:, k - 1 :]], 1)
    spaced_bSv = spaced_bSv.scatter(1, (place_bs + k - 1)[..., None].expand_as(x_bsv), x_bsv)
    y_bSv = conv(spaced_bSv.mT).mT
    y_bsv = y_bSv.gather(1, place_bs[..., None].expand(-1, -1, y_bSv.shape[2]))
    return y_bsv, last_inputs(x_bsv, window_bvk, k, segments_bs if x_bsv.shape[1] else None, lengths_b)


def convolve_silu(
    conv: nn.Module,
    x_bsv: Tensor,
    window_bvk: Tensor,
    widths: list[int],
    segments_bs: Tensor | None,
    lengths_b: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """`silu(conv(x))` cut into `widths`, and the window as `convolve` gives it."""
    edge, entering_bvk, last_bvk = boundary(), window_bvk, None
    if edge is not None:
        entering_bvk, last_bvk = pass_window(edge, x_bsv, window_bvk, segments_bs, lengths_b)
    if is_plain(conv, CausalConv1d) and conv.is_depthwise:
        tensors = (x_bsv, conv.weight.squeeze(1), conv.bias, entering_bvk.to(x_bsv.dtype), segments_bs, lengths_b)
        parts, window_bvk = convolve_in_parts(*tensors, widths, silu=True)
    else:
        y_bsv, window_bvk = convolve(conv, x_bsv, entering_bvk, segments_bs, lengths_b)
        parts = list(F.silu(y_bsv).split(widths, dim=-1))
    return (parts, window_bvk) if last_bvk is None else ([linked(part, entering_bvk) for part in parts], last_bvk)


def is_plain(module: nn.Module, kind: type[Module]) -> TypeGuard[Module]:
    """Whether calling `module` does what `kind` says and no more: no adapter around it, nothing hooked into it."""
    if type(module) is not kind:
        return False
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and "forward" not in vars(module)


def last_token(x_bsX: Tensor, before_bX: Tensor, lengths_b: Tensor | None) -> Tensor:
    """The entry of each row's last token, or what was before for a row without any. Axes start with b, s."""
    if lengths_b is None:
        # A copy: a view would keep the whole sequence alive.
        return x_bsX[:, -1].clone() if x_bsX.shape[1] else before_bX
    all_bSX = torch.cat([before_bX[:, None].to(x_bsX.dtype), x_bsX], 1)
    return all_bSX[torch.arange(len(lengths_b), device=lengths_b.device), lengths_b]


def init_dt_bias(bias: Tensor, dt_min: float, dt_max: float, floor: float) -> None:
    """Draw step sizes log-uniformly and store what softplus maps onto them."""
    if bias.is_meta:
        return
    log_dt = torch.rand_like(bias, dtype=torch.float32) * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)
    dt = torch.exp(log_dt).clamp(min=floor)
    with torch.no_grad():
        bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def mark(parameter: nn.Parameter, *, keep_init: bool = False) -> nn.Parameter:
    """Flags that trainers of the official package read: no weight decay, and no second initialisation."""
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    if keep_init:
        parameter._no_reinit = True  # type: ignore[attr-defined]
    return parameter
