"""Adapters of the real `peft` package around projections and convolution take part in calls, steps and gradients."""

import peft
import pytest
import torch

from blocks import make_block, random_cache, tokens
from compare import check
from test_parity import steps

pytestmark = pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups > 1")


class Model(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.mixer = block

    def forward(self, x, cache=None):
        return self.mixer(x, cache)


TARGETS = {
    "mamba1": ["in_proj", "x_proj", "dt_proj", "out_proj", "conv1d"],
    "mamba2": ["in_proj", "out_proj", "conv1d"],
    "mamba3": ["in_proj", "out_proj"],
    "mamba3-mimo": ["in_proj", "out_proj"],
    "attention-rope": ["in_proj", "out_proj"],
}


def wrapped(name: str, targets: list[str] | None = None):
    """The block inside adapters that are not at their idle start."""
    block = make_block(name)
    targets = targets or TARGETS[name]
    # Adapters of a depthwise convolution need a rank that its groups divide.
    ranks = {"conv1d": block.conv1d.in_channels} if "conv1d" in targets else {}
    config = peft.LoraConfig(target_modules=targets, r=4, lora_alpha=8, rank_pattern=ranks, lora_dropout=0.0)
    model = peft.get_peft_model(Model(block), config).double()
    adapters = {n: p for n, p in model.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    return model, block, adapters


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_take_part(name):
    model, block, adapters = wrapped(name)
    assert len(adapters) == 2 * len(TARGETS[name])
    x, cache = tokens(block, 2, 7), random_cache(block, 2)
    y, _ = model(x, cache)
    with model.disable_adapter():
        assert not torch.allclose(y, model(x, cache)[0])
    grads = torch.autograd.grad(y.square().sum(), list(adapters.values()))
    idle = [n for n, grad in zip(adapters, grads, strict=True) if not grad.any()]
    assert not idle, f"no gradient: {idle}"

    stepped, _ = steps(block, x, cache)
    step_grads = torch.autograd.grad(stepped.square().sum(), list(adapters.values()))
    check(
        1e-9,
        {"y": stepped, **dict(zip(adapters, step_grads, strict=True))},
        {"y": y, **dict(zip(adapters, grads, strict=True))},
    )


@pytest.mark.parametrize("name", TARGETS)
def test_merging_changes_nothing(name):
    """All but the convolution's, which peft does not merge."""
    model, block, _ = wrapped(name, [target for target in TARGETS[name] if target != "conv1d"])
    x, cache = tokens(block, 2, 7), random_cache(block, 2)
    with torch.no_grad():
        want = model(x, cache)[0]
        merged = model.merge_and_unload()
        check(1e-9, {"y": merged(x, cache)[0]}, {"y": want})


@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
def test_a_wrapped_convolution_respects_resets(name):
    _, block, _ = wrapped(name)
    x = tokens(block, 1, 9)
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, 4] = True
    with torch.no_grad():
        y, _ = block(x, reset_bs=reset)
        want = torch.cat([block(x[:, :4])[0], block(x[:, 4:])[0]], 1)
    check(1e-10, {"y": y}, {"y": want})
