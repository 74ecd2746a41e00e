"""One scan seen from four sides: run it, split it, pack it, differentiate it.

python examples/ssd_tour.py
"""

import torch
from torch import Tensor

from mambakit import SsdPath, ssd

ALGORITHMS = (SsdPath.minimal(16), SsdPath.serial(16), SsdPath.serial_recalculated(16))


def random_tokens(batch: int, length: int) -> tuple[Tensor, ...]:
    """v, b, c, da, w_now, w_later of a Mamba-2 scan: 4 heads of 8 channels, one group, 16 state entries."""
    dt_bsh = 0.05 + 0.25 * torch.rand(batch, length, 4)
    return (
        torch.randn(batch, length, 1, 4, 8),
        torch.randn(batch, length, 1, 1, 16),
        torch.randn(batch, length, 1, 1, 16),
        -dt_bsh * torch.linspace(0.5, 1.0, 4),
        dt_bsh,
        dt_bsh,
    )


def cut(tokens: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    return tuple(tensor[:, start:stop] for tensor in tokens)


def difference(got: Tensor, want: Tensor) -> str:
    return f"{(got - want).abs().max().item():.1e}"


def gradients(tokens: tuple[Tensor, ...], path: SsdPath) -> tuple[Tensor, ...]:
    """Gradients of all inputs for a loss on the outputs and on the final state."""
    leaves = [tensor.clone().requires_grad_() for tensor in tokens]
    y, state = ssd(*leaves, path=path)
    return torch.autograd.grad(y.square().sum() + state.square().sum(), leaves)


def main() -> None:
    torch.manual_seed(0)
    tokens = random_tokens(batch=2, length=100)
    y, state = ssd(*tokens)
    print(f"scan:      y {tuple(y.shape)}, state {tuple(state.shape)}")

    first, carried = ssd(*cut(tokens, 0, 37))
    rest, carried = ssd(*cut(tokens, 37, 100), state_bhpr=carried)
    print(
        f"split:     y differs by {difference(torch.cat([first, rest], 1), y)}, state by {difference(carried, state)}"
    )

    segments_bs = (torch.arange(100) >= 37).long().expand(2, 100)
    packed, _ = ssd(*tokens, segments_bs=segments_bs)
    alone, _ = ssd(*cut(tokens, 37, 100))
    print(f"packed:    the second sequence differs from itself alone by {difference(packed[:, 37:], alone)}")

    reference = gradients(tokens, ALGORITHMS[0])
    for path in ALGORITHMS[1:]:
        got = gradients(tokens, path)
        worst = max(((g - w).abs().max() / w.abs().max()).item() for g, w in zip(got, reference, strict=True))
        print(f"gradients: {path.algorithm} differs from {ALGORITHMS[0].algorithm} by {worst:.1e} of the largest")


if __name__ == "__main__":
    main()
