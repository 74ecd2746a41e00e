"""The whole-model decoding step; see csrc/decode.h."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.few_rows import matrix
from mambakit.kernels.cpu.library import pointer, run
from mambakit.kernels.cpu.structs import (
    Decode,
    DecodeLayer,
    DecodeModel,
    Mamba1Step,
    Mamba2Step,
    Mamba3Step,
    Matrix,
    Norm,
    Struct,
)
from mambakit.ops import decode
from mambakit.ops.few_rows import Weights

STEPS: dict[str, tuple[int, type[Struct]]] = {
    "mamba1_step": (1, Mamba1Step),
    "mamba2_step": (2, Mamba2Step),
    "mamba3_step": (3, Mamba3Step),
}
"""The fused steps by their operations, each with its number and struct in decode.h."""


class Decoding:
    """See `ops.decode.Decoding`."""

    def __init__(self, model: decode.Model):
        self._held: list[Any] = []  # what the structs point to
        self._steps: list[tuple[Struct, decode.Layer]] = []
        self._layers = (DecodeLayer * len(model.layers))(*map(self._pack_layer, model.layers))
        head = self._pack_matrix(model.head)
        head.rows = model.vocab_size  # the others only pad
        self._model = DecodeModel(
            width=model.embedding.shape[1],
            layers=len(self._layers),
            embedding=self._address(model.embedding),
            layer=ctypes.addressof(self._layers),
            norm_f=self._pack_norm(model.norm_f),
            head=head,
        )

    def load(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self._states = states  # kept alive
        self._prepared = [layer.prepared() for _, layer in self._steps]
        for (step, _), prepared in zip(self._steps, self._prepared, strict=True):
            for name, tensor in prepared.items():
                setattr(step, name, pointer(tensor))
        for layer, own in zip(self._layers, states, strict=True):
            for name, tensor in own.items():
                setattr(layer, name, pointer(tensor))

    def step(self, ids_b: Tensor) -> Tensor:
        ids_b = ids_b.contiguous()
        if ids_b.dtype != torch.int64 or ids_b.device.type != "cpu":
            raise ValueError(f"ids_b is {ids_b.dtype} on {ids_b.device}, expected int64 on the CPU")
        logits_bw = torch.empty(len(ids_b), self._model.head.rows)
        model = ctypes.addressof(self._model)
        run(Decode(model=model, batch=len(ids_b), ids=pointer(ids_b), logits=pointer(logits_bw)))
        return logits_bw

    def _pack_layer(self, layer: decode.Layer) -> DecodeLayer:
        number, struct = STEPS[layer.step]
        names = layer.fields.keys() | layer.prepared().keys()
        assert names == {name for name, *_ in struct._fields_}, "what is not given would be zero"
        step = struct(
            **{name: self._address(it) if isinstance(it, Tensor) else it for name, it in layer.fields.items()}
        )
        self._steps.append((step, layer))
        packed = DecodeLayer(family=number, step=ctypes.addressof(step), norm=self._pack_norm(layer.norm))
        if layer.norm2 is not None:
            packed.norm2 = self._pack_norm(layer.norm2)
        for name, weights in layer.matrices.items():
            setattr(packed, name, self._pack_matrix(weights))
        return packed

    def _pack_matrix(self, weights: Weights) -> Matrix:
        self._held += [t.detach() for t in (weights.weight, weights.scales, weights.bias) if t is not None]
        return matrix(weights)

    def _pack_norm(self, norm: decode.Norm) -> Norm:
        return Norm(
            weight=self._address(norm.weight),
            bias=None if norm.bias is None else self._address(norm.bias),
            width=norm.weight.numel(),
            centred=norm.centred,
            eps=norm.eps,
        )

    def _address(self, tensor: Tensor) -> int:
        # An alias of its own keeps the memory, whatever becomes of the parameter.
        self._held.append(tensor.detach())
        return tensor.data_ptr()


decode.DECODE.implement(CPU, Decoding)
