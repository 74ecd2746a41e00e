"""The convolution, as the extension of `causal_conv1d` has it. Three generations take different numbers of arguments.

Up to 1.1 there are no states, up to 1.5 results are returned, from 1.6 on they are written into arguments.
"""

from typing import Any

from torch import Tensor

from mambakit.compat.causal_conv1d.cpp_functions import (
    causal_conv1d_bwd_function,
    causal_conv1d_fwd_function,
    causal_conv1d_update_function,
)

__all__ = ["causal_conv1d_bwd", "causal_conv1d_fwd", "causal_conv1d_update"]


def causal_conv1d_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """`(.., silu)`, `(.., seq_idx, silu)`, `(.., seq_idx, initial_states, final_states_out, silu)`, or from 1.6 on
    `(.., seq_idx, initial_states, out, final_states_out, silu)`, which returns None."""
    out, final_states = None, None
    match rest:
        case (silu,):
            seq_idx, initial_states = None, None
        case (seq_idx, silu):
            initial_states = None
        case (seq_idx, initial_states, final_states, silu):
            pass
        case (seq_idx, initial_states, out, final_states, silu):
            pass
        case _:
            raise TypeError(taken("causal_conv1d_fwd", 3 + len(rest), "4, 5, 7 or 8"))
    y = causal_conv1d_fwd_function(x, weight, bias, seq_idx, initial_states, final_states, silu)
    return y if out is None else deliver((out, y))


def causal_conv1d_bwd(x: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor, *rest: Any) -> Any:
    """`(.., dx, silu)` or `(.., seq_idx, dx, silu)` for `[dx, dweight, dbias]`;
    `(.., seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu)`, which has `dinitial_states` too;
    or from 1.6 on `(.., dfinal_states, dx, dweight, dbias, dinitial_states, silu)`, which returns None."""
    given = (x, weight, bias, dout)
    match rest:
        case (dx, silu):
            return list(causal_conv1d_bwd_function(*given, None, None, None, dx, False, silu)[:3])
        case (seq_idx, dx, silu):
            return list(causal_conv1d_bwd_function(*given, seq_idx, None, None, dx, False, silu)[:3])
        case (seq_idx, initial, d_final, dx, with_initial, silu):
            return list(causal_conv1d_bwd_function(*given, seq_idx, initial, d_final, dx, with_initial, silu))
        case (seq_idx, initial, d_final, dx, dweight, dbias, d_initial, silu):
            with_initial = d_initial is not None
            grads = causal_conv1d_bwd_function(*given, seq_idx, initial, d_final, dx, with_initial, silu)
            return deliver(*zip((dweight, dbias, d_initial), grads[1:], strict=True))
    raise TypeError(taken("causal_conv1d_bwd", 4 + len(rest), "6, 7, 10 or 12"))


def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """`(.., silu)`, `(.., silu, cache_seqlens)`, `(.., silu, cache_seqlens, conv_state_indices)`, or from 1.6 on
    `(.., out, silu, cache_seqlens, conv_state_indices)`, which returns None."""
    given = (x, conv_state, weight, bias)
    if len(rest) in (1, 2, 3):
        return causal_conv1d_update_function(*given, *rest, *[None] * (3 - len(rest)))
    if len(rest) == 4:
        return deliver((rest[0], causal_conv1d_update_function(*given, *rest[1:])))
    raise TypeError(taken("causal_conv1d_update", 4 + len(rest), "5 to 8"))


def deliver(*pairs: tuple[Tensor | None, Tensor | None]) -> None:
    """Results into the arguments for them."""
    for out, values in pairs:
        if out is not None and values is not None:
            out.detach().copy_(values)


def taken(name: str, given: int, expected: str) -> str:
    return (
        f"{name} was given {given} arguments, expected {expected}, as causal_conv1d 1.0, 1.1, 1.2 to 1.5 or 1.6 has it"
    )
