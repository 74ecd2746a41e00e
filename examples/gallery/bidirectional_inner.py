"""A bidirectional inner function of one's own on the compiled extensions, as Vision Mamba's forks have it.

python -m mambakit.compat examples/gallery/bidirectional_inner.py
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false
import causal_conv1d_cuda
import selective_scan_cuda
import torch
import torch.nn.functional as F

torch.manual_seed(0)
BATCH, WIDTH, LENGTH, STATE, RANK, TAPS = 2, 6, 9, 3, 2, 4


class BidirectionalInner(torch.autograd.Function):
    """Convolution, projections, and a scan in each direction; the backward pass by hand."""

    @staticmethod
    def forward(ctx, xz, conv_weight, conv_bias, x_proj, dt_proj, A, A_b, D, dt_bias):
        x, z = xz.chunk(2, dim=1)
        conv = causal_conv1d_cuda.causal_conv1d_fwd(x, conv_weight, conv_bias, None, None, None, True)
        projected = x_proj @ conv
        delta = dt_proj @ projected[:, :RANK]
        B, C = (t[:, None].contiguous() for t in projected[:, RANK:].chunk(2, dim=1))
        out, _, out_z = selective_scan_cuda.fwd(conv, delta, A, B, C, D, z, dt_bias, True)
        flipped = [t.flip(-1) for t in (conv, delta, B, C, z)]
        out_b, _, out_z_b = selective_scan_cuda.fwd(
            flipped[0], flipped[1], A_b, flipped[2], flipped[3], D, flipped[4], dt_bias, True
        )
        ctx.save_for_backward(xz, conv_weight, conv_bias, x_proj, dt_proj, A, A_b, D, dt_bias, out, out_b)
        return out_z + out_z_b.flip(-1)

    @staticmethod
    def backward(ctx, dout):
        xz, conv_weight, conv_bias, x_proj, dt_proj, A, A_b, D, dt_bias, out, out_b = ctx.saved_tensors
        x, z = xz.chunk(2, dim=1)
        conv = causal_conv1d_cuda.causal_conv1d_fwd(x, conv_weight, conv_bias, None, None, None, True)
        projected = x_proj @ conv
        delta = dt_proj @ projected[:, :RANK]
        B, C = (t[:, None].contiguous() for t in projected[:, RANK:].chunk(2, dim=1))
        dxz = torch.empty_like(xz)
        dx, dz = dxz.chunk(2, dim=1)
        d_conv, d_delta, d_A, d_B, d_C, d_D, d_bias, dz, _ = selective_scan_cuda.bwd(
            conv, delta, A, B, C, D, z, dt_bias, dout, None, out, dz, True, True
        )
        flipped = [t.flip(-1) for t in (conv, delta, B, C, z, dout)]
        b_conv, b_delta, d_A_b, b_B, b_C, b_D, b_bias, b_z = selective_scan_cuda.bwd(
            *(flipped[0], flipped[1], A_b, flipped[2], flipped[3], D, flipped[4], dt_bias, flipped[5]),
            *(None, out_b, None, True, False),
        )
        dz += b_z.flip(-1)
        d_conv, d_delta = d_conv + b_conv.flip(-1), d_delta + b_delta.flip(-1)
        d_B, d_C = (d_B + b_B.flip(-1))[:, 0], (d_C + b_C.flip(-1))[:, 0]
        d_dt_proj = torch.einsum("bil,brl->ir", d_delta, projected[:, :RANK])
        d_projected = torch.cat((dt_proj.t() @ d_delta, d_B, d_C), dim=1)
        d_x_proj = torch.einsum("brl,bil->ri", d_projected, conv)
        d_conv = d_conv + x_proj.t() @ d_projected
        _, d_weight, d_conv_bias, _ = causal_conv1d_cuda.causal_conv1d_bwd(
            x, conv_weight, conv_bias, d_conv, None, None, None, dx, False, True
        )
        return dxz, d_weight, d_conv_bias, d_x_proj, d_dt_proj, d_A, d_A_b, d_D + b_D, d_bias + b_bias


def scan_by_hand(x, step, A, B, C, D, z):
    state, outputs = 0, []
    for t in range(x.shape[-1]):
        at = step[..., t, None]
        state = torch.exp(at * A) * state + at * x[..., t, None] * B[:, None, :, t]
        outputs.append((state * C[:, None, :, t]).sum(-1) + D * x[..., t])
    return torch.stack(outputs, dim=-1) * F.silu(z)


def by_hand(xz, conv_weight, conv_bias, x_proj, dt_proj, A, A_b, D, dt_bias):
    """The same by loops, with autograd."""
    x, z = xz.chunk(2, dim=1)
    past = F.pad(x, (TAPS - 1, 0))
    conv = sum(conv_weight[:, k, None] * past[..., k : k + LENGTH] for k in range(TAPS)) + conv_bias[:, None]
    conv = F.silu(conv)
    dt, B, C = (x_proj @ conv).split((RANK, STATE, STATE), dim=1)
    step = F.softplus(dt_proj @ dt + dt_bias[:, None])
    backward = [t.flip(-1) for t in (conv, step, B, C, z)]
    return scan_by_hand(conv, step, A, B, C, D, z) + scan_by_hand(
        backward[0], backward[1], A_b, backward[2], backward[3], D, backward[4]
    ).flip(-1)


shapes = [(BATCH, 2 * WIDTH, LENGTH), (WIDTH, TAPS), (WIDTH,), (RANK + 2 * STATE, WIDTH), (WIDTH, RANK)]
inputs = [0.5 * torch.randn(*shape) for shape in shapes]
inputs += [-torch.rand(WIDTH, STATE), -torch.rand(WIDTH, STATE), torch.randn(WIDTH), torch.randn(WIDTH)]
inputs = [t.requires_grad_() for t in inputs]
results = []
for function in (BidirectionalInner.apply, by_hand):
    out = function(*inputs)
    results.append([out, *torch.autograd.grad(torch.sin(out).sum(), inputs)])
worst = max((a - b).abs().max().item() / (1 + b.abs().max().item()) for a, b in zip(*results, strict=True))
assert worst < 1e-5, worst
print(f"an inner function in both directions, {len(inputs)} gradients: error {worst:.0e}")
