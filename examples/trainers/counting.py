"""What the examples here have in common: a tiny model, sequences that count upwards, a loop on one process."""

import torch
import torch.nn.functional as F
from torch import Tensor

import mambakit as mk

VOCAB, LENGTH, BATCH, STEPS, LR = 32, 16, 8, 6, 1e-2


def make_model() -> mk.LanguageModel:
    torch.manual_seed(0)
    block = mk.Mamba2Config(d_model=16, state_rank=8, per_head_dim=8)
    return mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=VOCAB))


def rows(step: int, part: int = 0, parts: int = 1) -> Tensor:
    """A share of a step's rows."""
    start_b = torch.randint(0, VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return ((start_b + torch.arange(LENGTH + 1)) % VOCAB).chunk(parts)[part]


def loss_of(model: torch.nn.Module, ids_bs: Tensor) -> Tensor:
    logits_bsw, _ = model(ids_bs[:, :-1])
    return F.cross_entropy(logits_bsw.mT, ids_bs[:, 1:])


def losses_alone() -> list[float]:
    """What all others should give too."""
    model = make_model()
    optimizer = torch.optim.AdamW(mk.param_groups(model), lr=LR)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(losses: list[float]) -> None:
    """Print losses, and fail if one process would have others."""
    print(*(f"{loss:.5f}" for loss in losses))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(losses_alone()), atol=1e-4, rtol=0)
    print("as on one process")


def compare_shapes(tensor: Tensor, shape: tuple[int, ...]) -> None:
    assert tensor.shape == shape, tensor.shape
    assert bool(torch.isfinite(tensor).all())
    print("the model of the spec gives logits of shape", tuple(tensor.shape))
