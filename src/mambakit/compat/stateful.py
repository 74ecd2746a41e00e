"""What the official blocks have in common: states that are kept by layer and updated in place."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mambakit.blocks.modules import CausalConv1d
from mambakit.ops.causal_conv import correlate


class Stateful:
    """Mixed into a block of ours. `states` are the official tuple, a `cache` is ours."""

    layer_idx: int | None = None
    # Plain attributes, as officially: subclasses assign them.
    d_model: Any = None

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _get_states_from_cache(
        self, inference_params: Any, batch_size: int, initialize_states: bool = False
    ) -> tuple[Tensor, ...]:
        """This layer's states in `inference_params`, made if there are none; subclasses call it by this name."""
        if self.layer_idx is None:
            raise ValueError("inference_params keep states by layer: construct each block with a layer_idx of its own")
        memory = inference_params.key_value_memory_dict
        if self.layer_idx not in memory:
            memory[self.layer_idx] = self.allocate_inference_cache(batch_size, inference_params.max_seqlen)
        elif initialize_states:
            write(memory[self.layer_idx], [torch.zeros_like(state) for state in memory[self.layer_idx]])
        states = memory[self.layer_idx]
        if states[0].shape[0] != batch_size:
            raise ValueError(
                f"layer {self.layer_idx} has states of {states[0].shape[0]} sequences, but {batch_size} came; "
                "use new InferenceParams"
            )
        return states


def write(states: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Into the states, without gradients: they would grow with every token."""
    with torch.no_grad():
        for state, value in zip(states, values, strict=True):
            state.copy_(value)


def one_token(x_bsd: Tensor) -> Tensor:
    """The token of a decoding step, which has a sequence axis of one."""
    if x_bsd.dim() != 3 or x_bsd.shape[1] != 1:
        raise ValueError(f"a decoding step takes one token per sequence, (batch, 1, width), got {tuple(x_bsd.shape)}")
    return x_bsd


class PaddedConv1d(CausalConv1d):
    """Padded on both sides, as the official blocks' convolution is: callers cut its output to the sequence."""

    def __init__(self, channels: int, taps: int, bias: bool, **made: Any):
        super().__init__(channels, channels, taps, groups=channels, padding=taps - 1, bias=bias, **made)
        # A list, so that it is no submodule with parameters of its own.
        self.twin = [CausalConv1d(channels, channels, taps, groups=channels, bias=bias, device="meta")]

    def forward(self, input: Tensor) -> Tensor:
        pad = self.kernel_size[0] - 1
        return correlate(input.mT, self.weight[:, 0], self.bias, pad=(pad, pad)).mT


def without_padding(conv: Any) -> Callable[[Tensor], Tensor]:
    """The convolution as our blocks call it, with the inputs before the sequence in front."""
    hooked = any((conv._forward_hooks, conv._forward_pre_hooks, conv._backward_hooks, conv._backward_pre_hooks))
    if type(conv) is PaddedConv1d and not hooked and not torch.compiler.is_compiling():
        twin = conv.twin[0]
        twin._parameters.update(conv._parameters)
        return twin
    # Something wraps it and has to be called.
    return lambda x_bvS: conv(x_bvS)[..., conv.kernel_size[0] - 1 : x_bvS.shape[-1]]


class WithWindow:
    """A block as its `run` wants it: `conv1d` takes the inputs before the sequence in place of the padding."""

    def __init__(self, block: Any, **changed: Any):
        self.block = block
        self.config = replace(block.config, **changed) if changed else block.config
        self.conv1d = without_padding(block.conv1d)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)
