"""The steps of Mamba-2's chunked scan, token by token and chunk by chunk."""

import torch
from torch import Tensor

from mambakit.compat.references.convolution import activated, widest


def chunk_state_ref(B: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor) -> Tensor:
    """What each chunk writes into the state, (b, chunks, h, p, r), as far as it is left at its end."""
    heads, (chunks, chunk_size) = x.shape[2], dt.shape[2:]
    B = B.repeat_interleave(heads // B.shape[2], dim=2)
    states = torch.zeros(
        *(len(x), chunks, heads, x.shape[3], B.shape[3]), dtype=widest(x, dt, dA_cumsum), device=x.device
    )
    for token in range(x.shape[1]):
        c, t = divmod(token, chunk_size)
        weight = torch.exp(dA_cumsum[:, :, c, -1] - dA_cumsum[:, :, c, t]) * dt[:, :, c, t]
        written = weight[..., None, None] * x[:, token, :, :, None] * B[:, token, :, None]
        states = states.index_add(1, torch.tensor([c], device=x.device), written[:, None].to(states.dtype))
    return states.to(x.dtype)


def chunk_scan_ref(
    B: Tensor,
    C: Tensor,
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    prev_states: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> Tensor:
    """`out` (b, s, h, p) of chunks that are entered by `prev_states` (b, chunks, h, p, r)."""
    heads, chunk_size, wide = x.shape[2], dt.shape[3], widest(x, dt, dA_cumsum, prev_states)
    B, C = (t.to(wide).repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    x_wide, outputs, state = x.to(wide), [], prev_states[:, 0].to(wide)
    for token in range(x.shape[1]):
        c, t = divmod(token, chunk_size)
        if t == 0:
            state, before = prev_states[:, c].to(wide), torch.zeros_like(dA_cumsum[:, :, c, 0])
        else:
            before = dA_cumsum[:, :, c, t - 1]
        decay = torch.exp(dA_cumsum[:, :, c, t] - before)[..., None, None]
        written = dt[:, :, c, t, None, None] * x_wide[:, token, :, :, None] * B[:, token, :, None]
        state = decay * state + written
        outputs.append((state * C[:, token, :, None]).sum(-1))
    out = torch.stack(outputs, dim=1)
    if D is not None:
        out = out + (D[:, None] if D.dim() == 1 else D) * x_wide
    return (out if z is None else out * activated(z.to(wide), "silu")).to(x.dtype)


def state_passing_ref(
    states: Tensor, dA_chunk_cumsum: Tensor, initial_states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The states that enter each chunk, (b, chunks, h, d), and the one after the last, (b, h, d)."""
    state = torch.zeros_like(states[:, 0]) if initial_states is None else initial_states
    entering = []
    for c in range(states.shape[1]):
        entering.append(state)
        state = torch.exp(dA_chunk_cumsum[:, :, c, None]) * state + states[:, c]
    return torch.stack(entering, dim=1), state
