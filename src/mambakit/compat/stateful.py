"""What the official blocks have in common: states that are kept by layer and updated in place."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mambakit.arguments import shown
from mambakit.blocks.block import check_projected, entry_weight
from mambakit.blocks.modules import CausalConv1d
from mambakit.compat.packing import from_rows, hide_padding, packed, segments_of, to_rows
from mambakit.compat.slots import check_writable
from mambakit.ops.causal_conv import correlate
from mambakit.ops.shapes import FLOATS, check_beside, check_tensors
from mambakit.ops.ssd_path import SsdPath


class Stateful:
    """Mixed into a block of ours. `states` are the official tuple, a `cache` is ours."""

    layer_idx: int | None = None
    # Plain attributes, as officially: subclasses assign them.
    d_model: Any = None
    fresh_cache: Any

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _get_states_from_cache(
        self, inference_params: Any, batch_size: int, initialize_states: bool = False
    ) -> tuple[Tensor, ...]:
        """This layer's states in `inference_params`, made if there are none; subclasses call it by this name."""
        if self.layer_idx is None:
            raise ValueError("inference_params keep states by layer: construct each block with a layer_idx of its own")
        memory = getattr(inference_params, "key_value_memory_dict", None)
        if not isinstance(memory, dict):
            raise ValueError(f"inference_params is a {type(inference_params).__name__}, expected InferenceParams")
        if self.layer_idx not in memory:
            memory[self.layer_idx] = self.allocate_inference_cache(batch_size, inference_params.max_seqlen)
        elif initialize_states:
            write(memory[self.layer_idx], [torch.zeros_like(state) for state in memory[self.layer_idx]])
        states = memory[self.layer_idx]
        check_rows(self.layer_idx, states, batch_size)
        return states

    def run_or_step(
        self,
        x_bsd: Tensor,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """A prompt from fresh states, which go into `inference_params`; after it, one token from the states there.

        `seq_idx` (b, s) or `cu_seqlens` restart at every packed sequence; the latter, in a batch of one, keeps states
        of each. Tokens after the last one are padding: they leave no states, and without `seq_idx` give zeros.
        """
        check_sequence(self, x_bsd, seq_idx)
        if cu_seqlens is not None:
            check_vector("cu_seqlens", cu_seqlens)
        rows = len(x_bsd) if cu_seqlens is None else len(cu_seqlens) - 1
        states = None if inference_params is None else self._get_states_from_cache(inference_params, rows)
        is_decoding = inference_params is not None and inference_params.seqlen_offset > 0
        if states is not None and is_decoding:
            if seq_idx is not None or cu_seqlens is not None:
                raise ValueError("a decoding step takes one token per sequence: seq_idx and cu_seqlens are for prompts")
            return self.step_of(one_token(x_bsd), states)
        fresh = self.fresh_cache(rows)
        if cu_seqlens is not None:
            layout = packed(x_bsd, cu_seqlens, seq_idx)
            ids_rl = None if seq_idx is None else to_rows(layout, seq_idx[..., None])[..., 0]
            out, cache = self.continue_from(to_rows(layout, x_bsd), fresh, None, layout.lengths_r, ids_rl)
            out = from_rows(layout, out, x_bsd.shape[1])
            end = len(layout.back_n)
            if seq_idx is not None and end < x_bsd.shape[1]:
                out = torch.cat((out[:, :end], self.run_or_step(x_bsd[:, end:], seq_idx[:, end:])), dim=1)
        else:
            segments_bs = segments_of(seq_idx, *x_bsd.shape[:2])
            out, cache = self.continue_from(x_bsd, fresh, segments_bs, None, seq_idx)
        if states is not None:
            write(states, self.states_of(cache))
        return out

    def step_of(self: Any, x_b1d: Tensor, states: tuple[Tensor, ...]) -> Tensor:
        return self.step(x_b1d, *states)[0]

    def states_of(self, cache: Any) -> Sequence[Tensor]:
        """The official states that a cache of ours stands for."""
        return cache

    def continue_from(
        self: Any,
        x_bsd: Tensor,
        cache: Any,
        segments_bs: Tensor | None = None,
        lengths_b: Tensor | None = None,
        ids_bs: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Our block from a cache of ours; a convolution's output is zero where `ids_bs` is negative."""
        return self.run(x_bsd, cache, SsdPath(), segments_bs, lengths_b)


class WithConvolution(Stateful):
    """A block with a convolution, whose states are its window and that of the scan."""

    cache_of: Any
    """Makes a cache of ours of the two states."""

    def continue_from(
        self: Any,
        x_bsd: Tensor,
        cache: Any,
        segments_bs: Tensor | None = None,
        lengths_b: Tensor | None = None,
        ids_bs: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        return type(self).run(WithWindow(self, ids_bs), x_bsd, cache, SsdPath(), segments_bs, lengths_b)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One token (b, 1, d); the states are updated in place and returned."""
        check_tensors({"hidden_states": hidden_states, "conv_state": conv_state, "ssm_state": ssm_state})
        check_sequence(self, one_token(hidden_states))
        check_states(self, self.cache_of(conv_state, ssm_state), hidden_states)
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        out, cache = self.continue_from(one_token(hidden_states), self.cache_of(conv_state, ssm_state.to(wide)))
        write((conv_state, ssm_state), cache)
        return out, conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Any = None, **unused: Any
    ) -> tuple[Tensor, ...]:
        """Zero states: convolution (b, v, k) and ssm (b, .., r), the latter at least float32 unless `dtype` says."""
        states = tuple(self.fresh_cache(batch_size))
        check_dtype(dtype)
        return states if dtype is None else tuple(state.to(dtype) for state in states)


def check_sequence(block: Any, x_bsd: Tensor, seq_idx: Tensor | None = None) -> None:
    """That it can enter the block's first projection, and that ids of its tokens lie beside it."""
    check_tensors({"hidden_states": x_bsd})
    if x_bsd.dim() != 3:
        raise ValueError(f"hidden_states needs 3 axes (batch, sequence, width), got shape {tuple(x_bsd.shape)}")
    weight = entry_weight(block)
    if weight is not None and x_bsd.shape[2] != weight.shape[-1]:
        raise ValueError(f"hidden_states is {x_bsd.shape[2]} wide, but this block takes {weight.shape[-1]} channels")
    check_projected(block, "hidden_states", x_bsd)
    if seq_idx is not None:
        check_tensors({"seq_idx": seq_idx})
        check_beside("hidden_states", x_bsd, "seq_idx", seq_idx)


def check_states(block: Any, cache: Any, x: Tensor) -> None:
    """That a cache made of official states is one for the rows of such an input, and can be written to."""
    for name, shape in block.cache_shapes(len(x)).items():
        state = getattr(cache, name)
        if tuple(state.shape) != shape or state.dtype not in FLOATS:
            given = f"the state {name} is {state.dtype} of shape {tuple(state.shape)}"
            raise ValueError(f"{given}, expected floating-point numbers of {shape}, as allocate_inference_cache gives")
        check_beside("hidden_states", x, f"the state {name}", state)
        check_writable("a state", state)


def check_dtype(dtype: Any) -> None:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in FLOATS):
        raise ValueError(f"dtype is {shown(dtype)}, expected a floating-point one: {', '.join(map(str, FLOATS))}")


def check_vector(name: str, tensor: Tensor) -> None:
    check_tensors({name: tensor})
    if tensor.dim() != 1 or not len(tensor):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected bounds such as [0, 3, 7]")


def check_rows(layer_idx: int | None, states: Sequence[Tensor], rows: int) -> None:
    if len(states[0]) != rows:
        raise ValueError(
            f"layer {layer_idx} has states of {len(states[0])} sequences, but {rows} came; use new InferenceParams"
        )


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
    """A block as its `run` wants it: `conv1d` takes the inputs before the sequence in place of the padding.

    Tokens with a negative id have nothing to scan, so zero comes out of scan, skip, gate and norm.
    """

    def __init__(self, block: Any, ids_bs: Tensor | None = None, **changed: Any):
        self.block = block
        self.config = replace(block.config, **changed) if changed else block.config
        self.conv1d = without_padding(block.conv1d)
        if ids_bs is not None:
            self.gate = lambda *around: hide_padding(block.gate(*around), ids_bs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)
