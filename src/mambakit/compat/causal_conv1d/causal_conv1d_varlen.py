"""The last inputs of every packed sequence."""

from torch import Tensor

from mambakit.arguments import check_count
from mambakit.compat.arguments import in_one_precision, of_tensors
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.packing import packed, to_rows
from mambakit.compat.references.convolution import causal_conv1d_varlen_states_ref
from mambakit.ops.shapes import bind

__all__ = ["causal_conv1d_varlen_states", "causal_conv1d_varlen_states_ref"]

__getattr__ = gpu_only(__name__, kernels="_causal_conv1d_varlen_states")


@of_tensors
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """From `x` (tokens, v), the last `state_len` inputs of each sequence, (sequences, v, state_len), newest last.

    A shorter sequence has zeros on the left.
    """
    bind(x_sv=x)
    in_one_precision(x)
    check_count("state_len", state_len, least=0, most=2**31 - 1)
    layout = packed(x[None], cu_seqlens)
    x_rlv = to_rows(layout, x[None])
    rows, slots, width = x_rlv.shape
    x_rLv = x_rlv.new_zeros(rows, state_len + slots, width)
    x_rLv[:, state_len:] = x_rlv
    return windows_ending_at(x_rLv, layout.lengths_r, state_len)


def windows_ending_at(x_rLv: Tensor, lengths_r: Tensor, state_len: int) -> Tensor:
    """Columns `length` to `length + state_len` of each row."""
    columns_rK = lengths_r[:, None] + lengths_r.new_ones(state_len).cumsum(0) - 1
    return x_rLv.gather(1, columns_rK[..., None].expand(-1, -1, x_rLv.shape[2])).mT
