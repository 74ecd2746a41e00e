"""The whole-model decoding step: the structs of csrc/decode.h and the steps' headers, and the call.

Every struct has the fields of its twin in C++, in the same order.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_bool, c_double, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.backend import CPU
from mambakit.kernels.cpu.few_rows import Matrix, matrix
from mambakit.kernels.cpu.library import kernel, pointer
from mambakit.ops import decode
from mambakit.ops.few_rows import Weights

Fields = list[tuple[str, Any]]


def fields(kind: Any, names: str) -> Fields:
    return [(name, kind) for name in names.split()]


class Norm(ctypes.Structure):
    _fields_ = [*fields(c_void_p, "weight bias"), *fields(c_int64, "width centred"), ("eps", c_double)]


class Mamba1Step(ctypes.Structure):
    _fields_ = [*fields(c_int64, "channels r k"), *fields(c_void_p, "conv_weight conv_bias A_log A D")]


class Mamba2Step(ctypes.Structure):
    _fields_ = [
        *fields(c_int64, "heads p r groups k mlp"),
        *fields(c_void_p, "conv_weight conv_bias dt_bias A_log D norm_weight"),
        ("norm_group", c_int64),
        *fields(c_float, "norm_eps dt_low dt_high"),
        *fields(c_bool, "D_per_channel norm_before_gate"),
    ]


class Mamba3Step(ctypes.Structure):
    _fields_ = [
        *fields(c_int64, "heads p r groups ranks angles"),
        *fields(c_bool, "half heavy_tail"),
        *fields(c_void_p, "dt_bias B_norm C_norm B_bias C_bias mimo_x mimo_z mimo_o D norm_weight"),
        *fields(c_float, "norm_eps dt_low dt_high a_floor rotation_range"),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("family", c_int64),
        ("step", c_void_p),
        *fields(Norm, "norm norm2"),
        *fields(Matrix, "in_proj out_proj x_proj dt_proj fc1 fc2"),
        *fields(c_void_p, "state window k_state v_state angle"),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *fields(c_int64, "width layers"),
        *fields(c_void_p, "embedding layer"),
        ("norm_f", Norm),
        ("head", Matrix),
    ]


STEPS: dict[str, tuple[int, type[ctypes.Structure]]] = {
    "mamba1_step": (1, Mamba1Step),
    "mamba2_step": (2, Mamba2Step),
    "mamba3_step": (3, Mamba3Step),
}
"""The fused steps by their operations, each with its number and struct in decode.h."""


class Decoding:
    """See `ops.decode.Decoding`."""

    def __init__(self, model: decode.Model):
        self._held: list[Any] = []  # what the structs point to
        self._steps: list[tuple[ctypes.Structure, decode.Layer]] = []
        self._layers = (Layer * len(model.layers))(*map(self._pack_layer, model.layers))
        head = self._pack_matrix(model.head)
        head.rows = model.vocab_size  # the others only pad
        self._model = Model(
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
        kernel("decode", "ppip")(ctypes.addressof(self._model), pointer(ids_b), len(ids_b), pointer(logits_bw))
        return logits_bw

    def _pack_layer(self, layer: decode.Layer) -> Layer:
        number, struct = STEPS[layer.step]
        names = layer.fields.keys() | layer.prepared().keys()
        assert names == {name for name, *_ in struct._fields_}, "a struct would take others without a word"
        step = struct(
            **{name: self._address(it) if isinstance(it, Tensor) else it for name, it in layer.fields.items()}
        )
        self._steps.append((step, layer))
        packed = Layer(family=number, step=ctypes.addressof(step), norm=self._pack_norm(layer.norm))
        if layer.norm2 is not None:
            packed.norm2 = self._pack_norm(layer.norm2)
        for name, weights in layer.matrices.items():
            setattr(packed, name, self._pack_matrix(weights))
        return packed

    def _pack_matrix(self, weights: Weights) -> Matrix:
        self._held += [t.detach() for t in (weights.weight, weights.scales, weights.bias) if t is not None]
        return matrix(weights)

    def _pack_norm(self, norm: decode.Norm) -> Norm:
        bias = None if norm.bias is None else self._address(norm.bias)
        return Norm(self._address(norm.weight), bias, norm.weight.numel(), norm.centred, norm.eps)

    def _address(self, tensor: Tensor) -> int:
        # An alias of its own keeps the memory, whatever becomes of the parameter.
        self._held.append(tensor.detach())
        return tensor.data_ptr()


decode.DECODE.implement(CPU, Decoding)
