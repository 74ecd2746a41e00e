"""Hydra's mixer: two shifted scans added up and a gated norm, on the functions inside of the official ones.

python -m mambakit.compat examples/gallery/quasiseparable.py
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false
import torch
import torch.nn.functional as F
from mamba_ssm.ops.triton.layernorm_gated import _layer_norm_bwd, _layer_norm_fwd
from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_bwd, _mamba_chunk_scan_combined_fwd

torch.manual_seed(0)
BATCH, LENGTH, HEADS, WIDTH, STATE, CHUNK = 2, 11, 2, 3, 4, 4


def shifted(y):
    """One token later, so that no token is read by its own scan; forward and backward halves added."""
    y = F.pad(y, (0, 0, 0, 0, 1, 0))[:, :-1]
    forward, backward = y.chunk(2)
    return forward + backward.flip(1)


class Mixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, dt_bias, z, weight):
        both = [torch.cat((t, t.flip(1))) for t in (x, dt, B, C)]
        scan, *_ = _mamba_chunk_scan_combined_fwd(
            *(both[0], both[1], A, both[2], both[3], CHUNK), dt_bias=dt_bias, dt_softplus=True
        )
        y = shifted(scan).flatten(2).flatten(0, 1)
        out, _, rstd = _layer_norm_fwd(
            y, weight, None, 1e-5, z=z.flatten(0, 1), norm_before_gate=True, is_rms_norm=True
        )
        ctx.save_for_backward(x, dt, A, B, C, dt_bias, z, weight, scan, y, rstd)
        return out.view_as(z)

    @staticmethod
    def backward(ctx, dout):
        x, dt, A, B, C, dt_bias, z, weight, scan, y, rstd = ctx.saved_tensors
        dy, dweight, _, dz = _layer_norm_bwd(
            *(dout.flatten(0, 1), y, weight, None, 1e-5, None, rstd, z.flatten(0, 1)),
            norm_before_gate=True,
            is_rms_norm=True,
        )
        dy = dy.view_as(z).unflatten(-1, (HEADS, WIDTH))
        d_scan = torch.cat((dy, dy.flip(1)))
        d_scan = F.pad(d_scan[:, 1:], (0, 0, 0, 0, 0, 1))
        both = [torch.cat((t, t.flip(1))) for t in (x, dt, B, C)]
        dx, ddt, dA, dB, dC, _, _, d_bias, _ = _mamba_chunk_scan_combined_bwd(
            *(d_scan, both[0], both[1], A, both[2], both[3], scan, CHUNK), dt_bias=dt_bias, dt_softplus=True
        )
        dx, ddt, dB, dC = (t[:BATCH] + t[BATCH:].flip(1) for t in (dx, ddt, dB, dC))
        return dx, ddt, dA, dB, dC, d_bias, dz.view_as(z), dweight


def by_hand(x, dt, A, B, C, dt_bias, z, weight):
    """The same as a sum over all pairs of tokens, with autograd."""
    step = F.softplus(dt + dt_bias)
    outputs = []
    for t in range(LENGTH):
        y = torch.zeros_like(x[:, 0])
        for s in range(LENGTH):
            if s == t:
                continue
            # The decay of all tokens after the writer up to the one before the reader.
            between = step[:, s + 1 : t] if s < t else step[:, t + 1 : s]
            decay = torch.exp((between * A).sum(1))
            read = t - 1 if s < t else t + 1
            y = y + (decay * step[:, s] * (C[:, read] * B[:, s]).sum(-1))[..., None] * x[:, s]
        outputs.append(y.flatten(1))
    y = torch.stack(outputs, dim=1)
    return y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5) * weight * F.silu(z)


shapes = [(BATCH, LENGTH, HEADS, WIDTH), (BATCH, LENGTH, HEADS), (HEADS,)]
shapes += [(BATCH, LENGTH, 1, STATE)] * 2 + [(HEADS,), (BATCH, LENGTH, HEADS * WIDTH), (HEADS * WIDTH,)]
inputs = [torch.randn(*shape) for shape in shapes]
inputs[2] = -torch.rand(HEADS)
inputs = [t.requires_grad_() for t in inputs]
results = []
for function in (Mixer.apply, by_hand):
    out = function(*inputs)
    results.append([out, *torch.autograd.grad(torch.sin(out).sum(), inputs)])
worst = max((a - b).abs().max().item() / (1 + b.abs().max().item()) for a, b in zip(*results, strict=True))
assert worst < 1e-4, worst
print(f"two shifted scans and a gated norm, {len(inputs)} gradients: error {worst:.0e}")
