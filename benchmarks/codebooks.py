"""Relative error of 4-bit codebooks in groups of 32, with the scale as the largest weight and with the best of seven.

python -m benchmarks.codebooks
"""

import torch
from torch import Tensor

from benchmarks.measure import table
from mambakit.models.quantized_linear import NF4, STRETCHES

COUNT, GROUP = 128_000, 32
CODEBOOKS = {
    "-7 to 7": torch.arange(-7, 8) / 7,
    # The largest weight becomes -8 by the sign of its scale.
    "-8 to 7": torch.arange(-8, 8) / -8,
    "NF4": torch.tensor(NF4),
}


def samples() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "normal": torch.randn(COUNT),
        "uniform, as initialised": torch.rand(COUNT) * 2 - 1,
        "Student t, 5 degrees": torch.distributions.StudentT(5.0).sample((COUNT,)),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample((COUNT,)),
    }


def relative_error(weights: Tensor, codebook: Tensor, factors: Tensor) -> float:
    """Root mean square error over root mean square, each group with the best of its largest weight times `factors`."""
    groups = weights.view(-1, GROUP)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    best = torch.full_like(largest, torch.inf)
    for factor in factors:
        scaled = (groups / (factor * largest))[..., None]
        rounded = codebook[(scaled - codebook).abs().argmin(-1)] * factor * largest
        best = torch.minimum(best, (rounded - groups).square().sum(1, keepdim=True))
    return (best.sum() / groups.square().sum()).sqrt().item()


def main() -> None:
    searches = {"": torch.ones(1), ", searched": torch.tensor(STRETCHES)}
    columns = [(name, search) for search in searches for name in CODEBOOKS]
    rows = [
        [label, *(f"{relative_error(w, CODEBOOKS[name], searches[search]):.3f}" for name, search in columns)]
        for label, w in samples().items()
    ]
    print(table(["weights", *(name + search for name, search in columns)], rows))


if __name__ == "__main__":
    main()
