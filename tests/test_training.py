"""Small stacks train in every dtype: no NaN, a loss like float32's, and bit for bit the same when repeated."""

import pytest
import torch
from torch import Tensor, nn

from mambakit import Mamba1, Mamba1Config, Mamba2, Mamba2Config, Mamba3, Mamba3Config

STEPS = 200
BLOCKS = {
    "mamba1": lambda dtype: Mamba1(Mamba1Config(d_model=16, state_rank=8), dtype=dtype),
    "mamba2": lambda dtype: Mamba2(Mamba2Config(d_model=16, state_rank=8, per_head_dim=8), dtype=dtype),
    "mamba3": lambda dtype: Mamba3(Mamba3Config(d_model=16, state_rank=8, per_head_dim=8), dtype=dtype),
    "mamba3-mimo": lambda dtype: Mamba3(
        Mamba3Config(d_model=16, state_rank=8, per_head_dim=8, is_mimo=True, mimo_rank=2), dtype=dtype
    ),
}


class SmallStack(nn.Module):
    """Two pre-norm blocks between an embedding and a head."""

    def __init__(self, name: str, dtype: torch.dtype):
        super().__init__()
        self.embedding = nn.Embedding(8, 16, dtype=dtype)
        self.norms = nn.ModuleList(nn.RMSNorm(16, dtype=dtype, eps=1e-5) for _ in range(2))
        self.blocks = nn.ModuleList(BLOCKS[name](dtype) for _ in range(2))
        self.head = nn.Linear(16, 8, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))[0]
        return self.head(x)


def train(name: str, dtype: torch.dtype, autocast: torch.dtype | None = None, steps: int = STEPS) -> list[float]:
    """Losses of predicting which token stood three places before."""
    torch.manual_seed(0)
    model = SmallStack(name, dtype)
    narrow = dtype != torch.float32
    # The parameters in a narrow dtype, their updates in float32: what a mixed-precision optimizer does.
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    losses = []
    for step in range(steps):
        ids = torch.randint(8, (8, 24), generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            logits = model(ids)
        loss = nn.functional.cross_entropy(logits[:, 3:].flatten(0, 1).float(), ids[:, :-3].flatten())
        model.zero_grad()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    assert narrow or all(torch.equal(m, p) for m, p in zip(masters, model.parameters(), strict=True))
    return losses


@pytest.mark.parametrize("name", BLOCKS)
def test_narrow_dtypes_learn_like_float32(name):
    runs = {
        "float32": train(name, torch.float32),
        "bfloat16": train(name, torch.bfloat16),
        "float16": train(name, torch.float16),
        "autocast": train(name, torch.float32, torch.bfloat16),
    }
    start, end = (sum(runs["float32"][part]) / 20 for part in (slice(0, 20), slice(-20, None)))
    assert end < 0.6 * start, "float32 itself has not learned"
    for run, losses in runs.items():
        assert all(loss == loss for loss in losses), f"{run}: NaN"
        final = sum(losses[-20:]) / 20
        # Noise: a tenth of what there was to learn.
        assert abs(final - end) < 0.1 * (start - end), (
            f"{run} ends at {final:.3f}, float32 at {end:.3f} from {start:.3f}"
        )


@pytest.mark.parametrize("name", BLOCKS)
def test_training_repeats_bit_for_bit(name):
    assert train(name, torch.float32, steps=40) == train(name, torch.float32, steps=40)
