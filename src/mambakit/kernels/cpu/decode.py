"""The whole-model decoding step; see csrc/decode.h."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.few_rows import matrix
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.pages import GATHERED, MOVED, gather
from mambakit.kernels.cpu.structs import (
    AttentionPart,
    Decode,
    DecodeModel,
    DecodePart,
    Mamba1Part,
    Mamba2Part,
    Mamba3Part,
    MlpPart,
    MoePart,
    Norm,
)
from mambakit.ops import decode
from mambakit.ops.few_rows import Weights

PARTS: dict[str, tuple[int, type[Any]]] = {
    "mamba1": (1, Mamba1Part),
    "mamba2": (2, Mamba2Part),
    "mamba3": (3, Mamba3Part),
    "mlp": (4, MlpPart),
    "attention": (5, AttentionPart),
    "moe": (6, MoePart),
}
"""The kinds of parts, each with its number and struct in decode.h."""
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
ROUTERS = ("softmax", "softmax_chosen", "sigmoid")
WORDS = {word: number for words in (ACTIVATIONS, ROUTERS) for number, word in enumerate(words)}
"""The numbers of part_mlp.h and part_moe.h."""


class Call:
    """What a step is called with: all but its tokens and logits stays, while rows stay where they are."""

    def __init__(self, model: Any, batch: int, at: decode.At):
        self.at = at
        self.ids, self.best = (ctypes.c_int64 * batch)(), (ctypes.c_int64 * batch)()
        self.struct = Decode(
            model=ctypes.addressof(model),
            batch=batch,
            ids=ctypes.addressof(self.ids),
            text=pointer(at.text_b),
            before=pointer(at.before_b),
            after=pointer(at.after_b),
            run=pointer(at.runs),
            runs=0 if at.runs is None else len(at.runs),
            again=pointer(at.again),
            stays=at.stays,
            best=ctypes.addressof(self.best),
        )


class Decoding:
    """See `ops.decode.Decoding`."""

    def __init__(self, model: decode.Model):
        self._call: Call | None = None
        """The last one."""
        self._held: list[Any] = []  # what the structs point to
        self._blocks: list[Any] = []
        self._given = model.parts
        self._parts = (DecodePart * len(model.parts))(*map(self._pack_part, model.parts))
        head = self._pack_matrix(model.head)
        head.rows = model.vocab_size  # the others only pad
        self._model = DecodeModel(
            width=model.embedding.columns,
            parts=len(self._parts),
            embedding=self._pack_matrix(model.embedding, read_whole=False),
            part=ctypes.addressof(self._parts),
            norm_f=self._pack_norm(model.norm_f),
            head=head,
            embedding_scale=model.embedding_scale,
            logits_scale=model.logits_scale,
        )

    def load(self, states: Sequence[Mapping[str, Tensor | int | None]]) -> None:
        self._prepared = [part.prepared() for part in self._given]  # kept alive
        for block, prepared in zip(self._blocks, self._prepared, strict=True):
            fill(block, prepared)
        self._put(states, GATHERED)

    def move(self, states: Sequence[Mapping[str, Tensor | int | None]]) -> None:
        self._put(states, MOVED)

    def _put(self, states: Sequence[Mapping[str, Tensor | int | None]], gathered: int) -> None:
        self._states = states  # kept alive
        for block, own in zip(self._blocks, states, strict=True):
            for state in own.values():
                if isinstance(state, Tensor):
                    gather(state, gathered)
            fill(block, own)

    def step(self, ids: Sequence[int], at: decode.At) -> tuple[Tensor, list[int]]:
        call = self._call
        if call is None or call.at is not at:
            call = self._call = Call(self._model, len(ids), at)
        call.ids[:] = ids
        logits_bw = torch.empty(len(ids), self._model.head.rows)
        call.struct.logits = logits_bw.data_ptr()
        run(call.struct)
        return logits_bw, call.best[:]

    def _pack_part(self, part: decode.Part) -> DecodePart:
        number, struct = PARTS[part.kind]
        block: Any = struct()
        given = part.fields.keys() | part.prepared().keys() | part.projections.keys() | set(part.carried)
        assert given == set(fields_of(block)), "what is not given would be zero"
        self._held += [value.detach() for value in part.fields.values() if isinstance(value, Tensor)]
        fill(block, part.fields)
        for name, weights in part.projections.items():
            if weights is not None:
                setattr(block, name, self._pack_matrix(weights))
        self._blocks.append(block)
        return DecodePart(
            kind=number,
            block=ctypes.addressof(block),
            norm=self._pack_norm(part.norm),
            scale=part.scale,
            beside=part.beside,
        )

    def _pack_matrix(self, weights: Weights, read_whole: bool = True) -> Any:
        self._held += [t.detach() for t in (weights.weight, weights.scales, weights.bias) if t is not None]
        if read_whole:
            gather(weights.weight)
        return matrix(weights)

    def _pack_norm(self, norm: decode.Norm) -> Norm:
        return Norm(
            weight=self._address(norm.weight),
            bias=None if norm.bias is None else self._address(norm.bias),
            width=norm.weight.numel(),
            centred=norm.centred,
            eps=norm.eps,
            scale=norm.scale,
        )

    def _address(self, tensor: Tensor) -> int:
        # An alias of its own keeps the memory, whatever becomes of the parameter.
        self._held.append(tensor.detach())
        return tensor.data_ptr()


def fields_of(block: Any) -> list[str]:
    """Of a part's struct and of the step's inside."""
    return [name for struct in (block, block.step) for name, *_ in struct._fields_ if name != "step"]


def fill(block: Any, values: Mapping[str, Any]) -> None:
    """Set fields by name: tensors by their addresses, words by their numbers."""
    own = {name for name, *_ in block._fields_}
    for name, value in values.items():
        value = pointer(value) if isinstance(value, Tensor) else value
        setattr(block if name in own else block.step, name, WORDS[value] if isinstance(value, str) else value)


decode.DECODE.implement(CPU, Decoding)
