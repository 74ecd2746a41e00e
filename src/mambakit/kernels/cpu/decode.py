"""The whole-model decoding step: the structs of csrc/decode.h and the steps' headers, and the call.

Every struct has the fields of its twin in C++, in the same order.
"""

import ctypes
from ctypes import c_bool, c_double, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.few_rows import Matrix
from mambakit.kernels.cpu.library import kernel, pointer

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


def decode(model: Model, ids_b: Tensor) -> Tensor:
    """Logits after one more token of every row; the states that `model` points to change in place."""
    ids_b = ids_b.contiguous()
    if ids_b.dtype != torch.int64 or ids_b.device.type != "cpu":
        raise ValueError(f"ids_b is {ids_b.dtype} on {ids_b.device}, expected int64 on the CPU")
    logits_bw = torch.empty(len(ids_b), model.head.rows)
    kernel("decode", "ppip")(ctypes.addressof(model), pointer(ids_b), len(ids_b), pointer(logits_bw))
    return logits_bw
