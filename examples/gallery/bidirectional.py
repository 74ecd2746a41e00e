"""A bidirectional encoder: two `Mamba` blocks per layer, one of them over the flipped sequence.

python -m mambakit.compat examples/gallery/bidirectional.py
"""

# pyright: reportMissingImports=false
import torch
import torch.nn as nn
import torch.nn.functional as F
from mamba_ssm import Mamba
from mamba_ssm.ops.triton.layer_norm import RMSNorm


class BiMambaWrapper(nn.Module):
    """Forward and backward in one module, their projections shared, as models of DNA have it."""

    def __init__(self, d_model, **mamba_kwargs):
        super().__init__()
        self.mamba_fwd = Mamba(d_model=d_model, **mamba_kwargs)
        self.mamba_rev = Mamba(d_model=d_model, **mamba_kwargs)
        self.mamba_rev.in_proj.weight = self.mamba_fwd.in_proj.weight
        self.mamba_rev.out_proj.weight = self.mamba_fwd.out_proj.weight

    def forward(self, hidden_states, inference_params=None):
        out = self.mamba_fwd(hidden_states, inference_params=inference_params)
        return out + self.mamba_rev(hidden_states.flip(dims=(1,))).flip(dims=(1,))


class Encoder(nn.Module):
    def __init__(self, vocab_size, d_model=48, n_layer=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.norms = nn.ModuleList(RMSNorm(d_model) for _ in range(n_layer))
        self.layers = nn.ModuleList(BiMambaWrapper(d_model, d_state=8, d_conv=4, expand=2) for _ in range(n_layer))
        self.norm_f = RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids):
        x, residual = self.embedding(ids), None
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x, residual = norm(x, residual=residual, prenorm=True, residual_in_fp32=True)
            x = layer(x)
        return self.head(self.norm_f(x, residual=residual))


def make_batch(n, length=24, letters=4):
    """Every position has to name the letter two places on, or the first ones at the end: it takes both directions."""
    ids = torch.randint(letters, (n, length))
    return ids, ids.roll(-2, dims=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Encoder(vocab_size=4)
    no_decay = [p for p in model.parameters() if getattr(p, "_no_weight_decay", False)]
    decay = [p for p in model.parameters() if not getattr(p, "_no_weight_decay", False)]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    for step in range(50):
        ids, answers = make_batch(16)
        loss = F.cross_entropy(model(ids).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    ids, answers = make_batch(64)
    accuracy = (model(ids).argmax(-1) == answers).float().mean().item()
    print(f"accuracy {accuracy:.2f}")
    assert accuracy > 0.8
