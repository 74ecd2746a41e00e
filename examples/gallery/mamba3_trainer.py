"""A `Mamba3` layer inside someone else's trainer: its own modules around it, mixed precision, gradient clipping.

python -m mambakit.compat examples/gallery/mamba3_trainer.py
"""

# pyright: reportMissingImports=false
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from mamba_ssm import Mamba3


class Mixer(nn.Module):
    """The trainer's own residual layer; the sequence model is one of its options."""

    def __init__(self, width, layer_idx, **mixer_kwargs):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixer = Mamba3(d_model=width, layer_idx=layer_idx, **mixer_kwargs)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(x)


class Parity(nn.Module):
    """The running parity of bits, which needs a state that turns."""

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(2, width)
        siso = {"d_state": 16, "headdim": 16, "chunk_size": 64}
        mimo = {**siso, "is_mimo": True, "mimo_rank": 2, "chunk_size": 32, "is_outproj_norm": True}
        self.layers = nn.ModuleList([Mixer(width, 0, **siso), Mixer(width, 1, **mimo)])
        self.head = nn.Linear(width, 2)

    def forward(self, bits):
        x = self.embed(bits)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Trainer:
    """Parameter groups by name, autocast, clipping, an average of the weights: nothing here knows Mamba."""

    def __init__(self, model, lr=4e-3, clip=1.0, decay=0.95):
        self.model, self.clip, self.decay = model, clip, decay
        self.average = copy.deepcopy(model)
        free = {n for n, p in model.named_parameters() if p.dim() < 2 or getattr(p, "_no_weight_decay", False)}
        groups = [
            {"params": [p for n, p in model.named_parameters() if n not in free], "weight_decay": 0.05},
            {"params": [p for n, p in model.named_parameters() if n in free], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr)

    def step(self, inputs, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1 - self.decay)
        return loss.item(), norm.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = Trainer(Parity())
    losses = []
    for step in range(60):
        bits = torch.randint(2, (32, 12))
        loss, norm = trainer.step(bits, bits.cumsum(1) % 2)
        losses.append(loss)
        if step % 15 == 0:
            print(f"step {step}: loss {loss:.3f}, gradient norm {norm:.2f}")
    print(f"loss from {losses[0]:.3f} to {losses[-1]:.3f}")
    assert losses[-1] < 0.9 * losses[0]
    restored = Parity()
    restored.load_state_dict(trainer.average.state_dict())
