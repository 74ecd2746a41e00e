"""A Mamba-2 audio model: spectrogram frames through `Mamba2` blocks, clips of several lengths packed into one row.

python -m mambakit.compat examples/gallery/audio_mamba2.py
"""

# pyright: reportMissingImports=false
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from mamba_ssm.modules.block import Block
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mlp import GatedMLP
from mamba_ssm.ops.triton.layer_norm import RMSNorm, rms_norm_fn


class AudioMamba(nn.Module):
    def __init__(self, n_freq=33, d_model=64, n_layer=2, classes=3):
        super().__init__()
        self.proj = nn.Linear(n_freq, d_model)
        mixer_cls = partial(Mamba2, d_state=16, headdim=16, d_conv=4, expand=2, ngroups=2)
        mlp_cls = partial(GatedMLP, hidden_features=128)
        norm_cls = partial(RMSNorm, eps=1e-5)
        self.layers = nn.ModuleList(
            Block(d_model, mixer_cls, mlp_cls, norm_cls=norm_cls, fused_add_norm=True, residual_in_fp32=True)
            for _ in range(n_layer)
        )
        self.norm_f = RMSNorm(d_model)
        self.head = nn.Linear(d_model, classes)

    def forward(self, frames, seq_idx=None):
        x, residual = self.proj(frames), None
        for layer in self.layers:
            x, residual = layer(x, residual, seq_idx=seq_idx)
        x = rms_norm_fn(x, self.norm_f.weight, self.norm_f.bias, residual=residual, eps=self.norm_f.eps)
        return self.head(x)


def make_clips(n, rate=2000):
    """A tone that rises, falls or stays, between 0.2 and 0.5 seconds long; log-spectrogram frames of each."""
    clips, labels = [], torch.randint(3, (n,))
    for label in labels.tolist():
        seconds = 0.2 + 0.3 * torch.rand(()).item()
        t = torch.arange(int(seconds * rate)) / rate
        slope = (600.0, -600.0, 0.0)[label]
        wave = torch.sin(2 * torch.pi * (500 * t + slope * t * t / 2)) + 0.1 * torch.randn(len(t))
        spectrum = torch.stft(wave, 64, hop_length=16, window=torch.hann_window(64), return_complex=True)
        clips.append(spectrum.abs().clamp(min=1e-3).log().T)
    return clips, labels


def pack(clips):
    lengths = torch.tensor([len(clip) for clip in clips])
    seq_idx = torch.repeat_interleave(torch.arange(len(clips), dtype=torch.int32), lengths)[None]
    return torch.cat(clips)[None], seq_idx, lengths.cumsum(0) - 1


if __name__ == "__main__":
    torch.manual_seed(0)
    model = AudioMamba()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(40):
        clips, labels = make_clips(12)
        frames, seq_idx, last = pack(clips)
        loss = F.cross_entropy(model(frames, seq_idx)[0, last], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    clips, labels = make_clips(24)
    frames, seq_idx, last = pack(clips)
    with torch.no_grad():
        packed = model(frames, seq_idx)[0, last]
        alone = torch.cat([model(clip[None])[:, -1] for clip in clips])
    torch.testing.assert_close(packed, alone, rtol=1e-3, atol=1e-3)
    accuracy = (packed.argmax(-1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.2f}, packed and alone agree")
    assert accuracy > 0.5
