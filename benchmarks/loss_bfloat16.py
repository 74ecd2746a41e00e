"""Loss curves in bfloat16 beside float32: 200 steps on the standard library's text, the same batches, three seeds.

python -m benchmarks.loss_bfloat16

"bfloat16" is `torch.autocast`: products, scans and activations in bfloat16, parameters, their gradients and AdamW in
float32, as `mambakit train --autocast bfloat16` trains.
"""

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.measure import progress, table, write_json
from mambakit import LanguageModel, Mamba1Config, Mamba2Config, Mamba3Config, ModelConfig

BLOCKS = {
    "Mamba-1": Mamba1Config(d_model=96),
    "Mamba-2": Mamba2Config(d_model=96, state_rank=32, per_head_dim=32),
    "Mamba-3": Mamba3Config(d_model=96, state_rank=32, per_head_dim=32),
    "Mamba-3 MIMO": Mamba3Config(d_model=96, state_rank=32, per_head_dim=32, is_mimo=True, mimo_rank=2),
}
SEEDS, LAST = 3, 20


def text() -> torch.Tensor:
    files = sorted(Path(contextlib.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def losses(block: Any, data: torch.Tensor, seed: int, steps: int, narrow: bool) -> list[float]:
    torch.manual_seed(seed)
    model = LanguageModel(ModelConfig(block=block, n_layer=2, vocab_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curve = []
    for _ in range(steps):
        starts = torch.randint(len(data) - 129, (4,))
        ids = torch.stack([data[start : start + 129] for start in starts])
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            logits = model(ids[:, :-1])[0]
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    data, rows = text(), []
    for family, block in BLOCKS.items():
        ends = {}
        for narrow in (False, True):
            curves = [losses(block, data, seed, arguments.steps, narrow) for seed in range(SEEDS)]
            ends[narrow] = torch.tensor(curves)[:, -LAST:].mean(1)
            progress(f"{family}, {'bfloat16' if narrow else 'float32'}: {ends[narrow].tolist()}")
        apart = (ends[True] - ends[False]).abs().max().item()
        spread = (ends[False].max() - ends[False].min()).item()
        rows.append([family, *(f"{ends[narrow].mean():.4f}" for narrow in ends), f"{apart:.4f}", f"{spread:.4f}"])
    print(table(["family", "float32", "bfloat16", "apart with one seed", "apart between seeds"], rows))
    print(f"\nwritten to {write_json('loss_bfloat16', {'steps': arguments.steps, 'rows': rows}).name}")


if __name__ == "__main__":
    main()
