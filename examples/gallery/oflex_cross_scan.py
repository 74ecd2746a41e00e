"""VMamba's cross-scan: an `autograd.Function` around `selective_scan_cuda_oflex`, four directions at once.

python -m mambakit.compat examples/gallery/oflex_cross_scan.py
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false
import selective_scan_cuda_oflex
import torch
import torch.nn.functional as F

torch.manual_seed(0)
BATCH, CHANNELS, HEIGHT, WIDTH, STATE, DIRECTIONS = 2, 6, 5, 4, 3, 4


class SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, delta_bias):
        out, x, *_ = selective_scan_cuda_oflex.fwd(u, delta, A, B, C, D, delta_bias, True, 1, True)
        ctx.save_for_backward(u, delta, A, B, C, D, delta_bias, x)
        return out

    @staticmethod
    def backward(ctx, dout):
        *inputs, x = ctx.saved_tensors
        return tuple(selective_scan_cuda_oflex.bwd(*inputs, dout.contiguous(), x, True, 1))


def scan_by_hand(u, delta, A, B, C, D, delta_bias):
    """The same, one token after the other."""
    step = F.softplus(delta + delta_bias[:, None])
    B, C = (t.repeat_interleave(u.shape[1] // t.shape[1], dim=1) for t in (B, C))
    state, outputs = 0, []
    for t in range(u.shape[-1]):
        at = step[..., t, None]
        state = torch.exp(at * A) * state + at * u[..., t, None] * B[..., t]
        outputs.append((state * C[..., t]).sum(-1) + D * u[..., t])
    return torch.stack(outputs, dim=-1)


def cross_scan(x):
    """Rows and columns of a picture, each forward and backward: (b, 4, c, h w)."""
    both = torch.stack((x.flatten(2), x.transpose(2, 3).flatten(2)), dim=1)
    return torch.cat((both, both.flip(-1)), dim=1)


def cross_merge(y):
    """The sum of the four directions, each put back in its place."""
    both = y[:, :2] + y[:, 2:].flip(-1)
    return both[:, 0] + both[:, 1].unflatten(-1, (WIDTH, HEIGHT)).transpose(2, 3).flatten(2)


def run(scan, picture, weights):
    A_log, x_proj, dt_proj, dt_bias, D = weights
    x = cross_scan(picture)
    projected = torch.einsum("bkcl,kec->bkel", x, x_proj)
    dt, B, C = projected.split((2, STATE, STATE), dim=2)
    delta = torch.einsum("bkrl,kcr->bkcl", dt, dt_proj).flatten(1, 2)
    y = scan(x.flatten(1, 2), delta, -torch.exp(A_log), B.contiguous(), C.contiguous(), D, dt_bias)
    return cross_merge(y.unflatten(1, (DIRECTIONS, CHANNELS)))


inner = DIRECTIONS * CHANNELS
shapes = [(inner, STATE), (DIRECTIONS, 2 + 2 * STATE, CHANNELS), (DIRECTIONS, CHANNELS, 2), (inner,), (inner,)]
weights = [torch.randn(*shape).mul_(0.5).requires_grad_() for shape in shapes]
picture = torch.randn(BATCH, CHANNELS, HEIGHT, WIDTH, requires_grad=True)
results = []
for scan in (SelectiveScan.apply, scan_by_hand):
    out = run(scan, picture, weights)
    results.append([out, *torch.autograd.grad(out.square().sum(), [picture, *weights])])
worst = max((a - b).abs().max().item() / (1 + b.abs().max().item()) for a, b in zip(*results, strict=True))
assert worst < 1e-5, worst
print(f"cross-scan of {HEIGHT} x {WIDTH} pixels in {DIRECTIONS} directions, with gradients: error {worst:.0e}")
