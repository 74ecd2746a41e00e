"""The structs that cross the border to the compiled kernels, each with the fields of its twin in csrc, in their order.

The library tells how it declares them (`MK_FIELDS` in csrc/border.h). `difference` compares, so that a library built
from other sources is refused instead of reading other memory than was meant.
"""

import ctypes
import re
from collections.abc import Iterable, Iterator
from ctypes import c_bool, c_double, c_float, c_int64, c_void_p
from typing import Any

KINDS = {c_int64: "int64_t", c_float: "float", c_double: "double", c_bool: "bool", c_void_p: "pointer"}


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Struct(ctypes.Structure):
    """Every struct that the library knows is derived from this one."""


class Matrix(Struct):
    _fields_ = [*fields(c_int64, "format rows columns group"), *fields(c_void_p, "weight scales bias")]


class Norm(Struct):
    _fields_ = [*fields(c_void_p, "weight bias"), *fields(c_int64, "width centred"), ("eps", c_double)]


class Mamba1Step(Struct):
    _fields_ = [*fields(c_int64, "channels r k"), *fields(c_void_p, "conv_weight conv_bias A_log A D")]


class Mamba2Step(Struct):
    _fields_ = [
        *fields(c_int64, "heads p r groups k mlp"),
        *fields(c_void_p, "conv_weight conv_bias dt_bias A_log D norm_weight"),
        ("norm_group", c_int64),
        *fields(c_float, "norm_eps dt_low dt_high"),
        *fields(c_bool, "D_per_channel norm_before_gate"),
    ]


class Mamba3Step(Struct):
    _fields_ = [
        *fields(c_int64, "heads p r groups ranks angles"),
        *fields(c_bool, "half heavy_tail"),
        *fields(c_void_p, "dt_bias B_norm C_norm B_bias C_bias mimo_x mimo_z mimo_o D norm_weight"),
        *fields(c_float, "norm_eps dt_low dt_high a_floor rotation_range"),
    ]


class DecodeLayer(Struct):
    _fields_ = [
        ("family", c_int64),
        ("step", c_void_p),
        *fields(Norm, "norm norm2"),
        *fields(Matrix, "in_proj out_proj x_proj dt_proj fc1 fc2"),
        *fields(c_void_p, "state window k_state v_state angle"),
    ]


class DecodeModel(Struct):
    _fields_ = [
        *fields(c_int64, "width layers"),
        *fields(c_void_p, "embedding layer"),
        ("norm_f", Norm),
        ("head", Matrix),
    ]


class PerToken(Struct):
    _fields_ = [("data", c_void_p), *fields(c_int64, "row token group")]


class Scan(Struct):
    _fields_ = [
        *fields(c_int64, "rows tokens groups channels rank part_channels softplus"),
        *fields(PerToken, "x dt z b c"),
        *fields(c_void_p, "a_ir state_bir skip_i dt_bias_i fresh_bs"),
    ]


class ScanGradients(Struct):
    _fields_ = [
        ("dy", PerToken),
        *fields(
            c_void_p, "d_last_bir dx_bsi d_dt_bsi dz_bsi da_bir db_kbsgr dc_kbsgr d_state_bir d_skip_bi d_dt_bias_bi"
        ),
    ]


class Sequence(Struct):
    _fields_ = [("data", c_void_p), *fields(c_int64, "batch_stride token_stride")]


class Arguments(Struct):
    _fields_ = [
        *fields(c_int64, "b s m h p g r chunk_len"),
        *fields(Sequence, "v_bsmhp b_bsmgr c_bsmgr da_bsh w_now_bsh w_later_bsh"),
        *fields(c_void_p, "segments_bs state_bhpr"),
    ]


class Gradients(Struct):
    _fields_ = [
        ("d_y_bsmhp", Sequence),
        *fields(c_void_p, "d_last_bhpr d_v_bsmhp d_b_bsmgr d_c_bsmgr d_da_bsh d_w_now_bsh d_w_later_bsh d_state_bhpr"),
        ("ranges", c_int64),
        ("shares", c_void_p),
    ]


def difference(layouts: Iterable[str]) -> str | None:
    """Where the library's structs first differ from the ones here, in a clause; None: nowhere."""
    theirs = dict(map(declared, layouts))
    ours = {struct.__name__: list(described(struct)) for struct in Struct.__subclasses__()}
    for name in {**ours, **theirs}:
        if name not in theirs or name not in ours:
            return f"{name} is {'missing' if name in ours else 'new'} there"
        pairs = zip([*theirs[name], "nothing"], [*ours[name], "nothing"], strict=False)
        for their, our in pairs:
            if their != our:
                return f"{name} has {their} there where {our} is expected"
    return None


def described(struct: type[ctypes.Structure]) -> Iterator[str]:
    for name, kind, *_ in struct._fields_:
        yield f"{KINDS.get(kind) or kind.__name__} {name}"


def declared(layout: str) -> tuple[str, list[str]]:
    """A struct's name and fields from its declaration, `Name{const float *a, *b; int64_t c;}`."""
    name, _, body = layout.rstrip("}").partition("{")
    found = []
    for declaration in filter(str.strip, body.split(";")):
        kind, *names = re.findall(r"\w+", declaration.replace("const ", ""))
        found += [f"{'pointer' if '*' in declaration else kind} {field}" for field in names]
    return name, found
