"""The structs that cross the border to the compiled kernels, each with the fields of its twin in csrc, in their order.

A kernel takes one of them, filled in by name; the others lie inside. The library tells how it declares them
(`MK_FIELDS` in csrc/border.h), and `difference` compares, so that one built from other sources is refused instead of
reading other memory than was meant.
"""

import ctypes
import re
from collections.abc import Iterable, Iterator
from ctypes import c_bool, c_double, c_float, c_int64, c_void_p
from itertools import zip_longest
from typing import Any, ClassVar

KINDS = {c_int64: "int64_t", c_float: "float", c_double: "double", c_bool: "bool", c_void_p: "pointer"}


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class FieldsOnly(type(ctypes.Structure)):
    """Without it, a struct takes a misspelt name as one more attribute and leaves the field zero."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        return super().__new__(cls, name, bases, {"__slots__": (), **namespace})


class Struct(ctypes.Structure, metaclass=FieldsOnly):
    """Every struct that the library knows is derived from this one."""

    kernel: ClassVar[str] = ""
    """The kernel that takes it, if one does."""


# weights.h, matvec.h


class Matrix(Struct):
    _fields_ = [*fields(c_int64, "format rows columns group"), *fields(c_void_p, "weight scales bias")]


class Matvec(Struct):
    kernel = "matvec"
    _fields_ = [("matrix", Matrix), ("batch", c_int64), *fields(c_void_p, "x y")]


class ReadMemory(Struct):
    kernel = "read_memory"
    _fields_ = [("data", c_void_p), ("floats", c_int64), ("result", c_void_p)]


# causal_conv.h


class Conv(Struct):
    _fields_ = [
        *fields(c_int64, "batch length width taps"),
        ("x", c_void_p),
        *fields(c_int64, "x_batch x_token"),
        *fields(c_void_p, "weight bias window"),
        ("window_batch", c_int64),
        *fields(c_void_p, "segments lengths"),
        ("with_silu", c_bool),
    ]


class ConvForward(Struct):
    kernel = "causal_conv"
    _fields_ = [
        ("inputs", Conv),
        ("y", c_void_p),
        *fields(c_int64, "y_batch y_token"),
        ("after", c_void_p),
        ("after_batch", c_int64),
    ]


class ConvBackward(Struct):
    kernel = "causal_conv_backward"
    _fields_ = [
        ("inputs", Conv),
        ("d_y", c_void_p),
        *fields(c_int64, "d_y_batch d_y_token"),
        ("d_after", c_void_p),
        ("after_batch", c_int64),
        ("d_x", c_void_p),
        *fields(c_int64, "d_x_batch d_x_token"),
        *fields(c_void_p, "d_weight d_bias d_window"),
        ("d_window_batch", c_int64),
    ]


# norm.h, ranks.h


class Finish(Struct):
    _fields_ = [
        *fields(c_int64, "rows ranks width group"),
        *(("y", c_void_p), ("y_row", c_int64)),
        *(("x", c_void_p), ("x_row", c_int64), ("skip", c_void_p)),
        *(("z", c_void_p), ("z_row", c_int64)),
        *fields(c_void_p, "mimo_x mimo_z mimo_o weight"),
        ("order", c_int64),
        ("eps", c_float),
    ]


class FinishForward(Struct):
    kernel = "finish"
    _fields_ = [("inputs", Finish), ("out", c_void_p)]


class FinishBackward(Struct):
    kernel = "finish_backward"
    _fields_ = [("inputs", Finish), ("d_out", c_void_p), ("d_out_row", c_int64), *fields(c_void_p, "d_y d_x d_z sums")]


class Ranks(Struct):
    _fields_ = [
        *fields(c_int64, "rows ranks width"),
        *(("x", c_void_p), ("x_row", c_int64), ("weight", c_void_p)),
    ]


class ExpandRanks(Struct):
    kernel = "expand_ranks"
    _fields_ = [("inputs", Ranks), ("v", c_void_p)]


class ExpandRanksBackward(Struct):
    kernel = "expand_ranks_backward"
    _fields_ = [("inputs", Ranks), *fields(c_void_p, "d_v d_x d_weight")]


# rotation.h, mamba3_prepare.h


class Turns(Struct):
    _fields_ = [
        *fields(c_int64, "batch length heads angles"),
        ("rot", c_void_p),
        *fields(c_int64, "rot_batch rot_token"),
        ("dt", c_void_p),
        ("range", c_double),
        *fields(c_void_p, "before segments"),
    ]


class Pairs(Struct):
    _fields_ = [*fields(c_int64, "state angles"), ("neighbours", c_bool)]


class Side(Struct):
    _fields_ = [("x", c_void_p), *fields(c_int64, "x_batch x_token"), *fields(c_void_p, "weight bias")]


class Prepare(Struct):
    _fields_ = [
        ("turns", Turns),
        ("pairs", Pairs),
        *fields(c_int64, "ranks groups"),
        ("eps", c_float),
        *fields(Side, "b c"),
        ("entering", c_void_p),
    ]


class PrepareForward(Struct):
    kernel = "mamba3_prepare"
    _fields_ = [("inputs", Prepare), *fields(c_void_p, "b c after")]


class PrepareBackward(Struct):
    kernel = "mamba3_prepare_backward"
    _fields_ = [
        ("inputs", Prepare),
        *fields(c_void_p, "d_b_out d_c_out d_after d_theta d_b d_c d_rot d_dt d_before sums"),
    ]


# selective_scan.h, selective_scan_backward.h


class PerToken(Struct):
    _fields_ = [("data", c_void_p), *fields(c_int64, "row token group")]


class Scan(Struct):
    _fields_ = [
        *fields(c_int64, "rows tokens groups channels rank part_channels softplus"),
        *fields(PerToken, "x dt z b c"),
        *fields(c_void_p, "a_ir state_bir skip_i dt_bias_i fresh_bs"),
    ]


class ScanForward(Struct):
    kernel = "selective_scan"
    _fields_ = [("inputs", Scan), *fields(c_void_p, "y_bsi last_bir")]


class ScanBackward(Struct):
    kernel = "selective_scan_backward"
    _fields_ = [
        ("inputs", Scan),
        ("dy", PerToken),
        *fields(
            c_void_p, "d_last_bir dx_bsi d_dt_bsi dz_bsi da_bir db_kbsgr dc_kbsgr d_state_bir d_skip_bi d_dt_bias_bi"
        ),
    ]


# ssd.h, ssd_forward.h, ssd_backward.h


class Sequence(Struct):
    _fields_ = [("data", c_void_p), *fields(c_int64, "batch_stride token_stride")]


class Ssd(Struct):
    _fields_ = [
        *fields(c_int64, "b s m h p g r chunk_len"),
        *fields(Sequence, "v_bsmhp b_bsmgr c_bsmgr da_bsh w_now_bsh w_later_bsh"),
        *fields(c_void_p, "segments_bs state_bhpr"),
    ]


class SsdForward(Struct):
    kernel = "ssd_forward"
    _fields_ = [("inputs", Ssd), *fields(c_void_p, "y_bsmhp last_bhpr")]


class SsdBackward(Struct):
    kernel = "ssd_backward"
    _fields_ = [
        ("inputs", Ssd),
        ("d_y_bsmhp", Sequence),
        *fields(c_void_p, "d_last_bhpr d_v_bsmhp d_b_bsmgr d_c_bsmgr d_da_bsh d_w_now_bsh d_w_later_bsh d_state_bhpr"),
        ("ranges", c_int64),
        ("shares", c_void_p),
    ]


# step_mamba1.h, step_mamba2.h, step_mamba3.h


class Mamba1Step(Struct):
    _fields_ = [*fields(c_int64, "channels r k"), *fields(c_void_p, "conv_weight conv_bias A_log A D")]


class Mamba1StepConv(Struct):
    kernel = "mamba1_step_conv"
    _fields_ = [("step", Mamba1Step), ("batch", c_int64), *fields(c_void_p, "projected window_in window_out x")]


class Mamba1StepScan(Struct):
    kernel = "mamba1_step_scan"
    _fields_ = [
        ("step", Mamba1Step),
        *fields(c_int64, "batch dt_rank"),
        *fields(c_void_p, "projected x dt dt_b_c state_in state_out out"),
    ]


class Mamba2Step(Struct):
    _fields_ = [
        *fields(c_int64, "heads p r groups k mlp"),
        *fields(c_void_p, "conv_weight conv_bias dt_bias A_log D norm_weight"),
        ("norm_group", c_int64),
        *fields(c_float, "norm_eps dt_low dt_high"),
        *fields(c_bool, "D_per_channel norm_before_gate"),
    ]


class Mamba2StepCall(Struct):
    kernel = "mamba2_step"
    _fields_ = [
        ("step", Mamba2Step),
        ("batch", c_int64),
        *fields(c_void_p, "projected window_in window_out state_in state_out out"),
    ]


class Mamba3Step(Struct):
    _fields_ = [
        *fields(c_int64, "heads p r groups ranks angles"),
        *fields(c_bool, "half heavy_tail"),
        *fields(c_void_p, "dt_bias B_norm C_norm B_bias C_bias mimo_x mimo_z mimo_o D norm_weight"),
        *fields(c_float, "norm_eps dt_low dt_high a_floor rotation_range"),
    ]


class Mamba3Carried(Struct):
    _fields_ = fields(c_void_p, "state k_state v_state angle")


class Mamba3StepCall(Struct):
    kernel = "mamba3_step"
    _fields_ = [
        ("step", Mamba3Step),
        ("batch", c_int64),
        ("projected", c_void_p),
        *fields(Mamba3Carried, "before after"),
        ("out", c_void_p),
    ]


# decode.h


class Norm(Struct):
    _fields_ = [*fields(c_void_p, "weight bias"), *fields(c_int64, "width centred"), ("eps", c_double)]


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


class Decode(Struct):
    kernel = "decode"
    _fields_ = [("model", c_void_p), ("batch", c_int64), *fields(c_void_p, "ids logits")]


# pages.h, elementwise.h


class LargePages(Struct):
    kernel = "large_pages"
    _fields_ = [("start", c_void_p), ("bytes", c_int64)]


class VectorFunction(Struct):
    kernel = "vector_function"
    _fields_ = [("which", c_int64), *fields(c_void_p, "x y"), ("n", c_int64)]


def difference(layouts: Iterable[str]) -> str | None:
    """Where the library's kernels and structs first differ from the ones here, in a clause; None: nowhere."""
    structs = Struct.__subclasses__()
    ours = {struct.__name__: list(described(struct)) for struct in structs}
    ours |= {f"{struct.kernel}()": [struct.__name__] for struct in structs if struct.kernel}
    theirs = dict(map(declared, layouts))
    for name in ours | theirs:
        if name not in theirs or name not in ours:
            return f"{name} is {'missing' if name in ours else 'new'} there"
        for their, our in zip_longest(theirs[name], ours[name], fillvalue="nothing"):
            if their != our:
                return f"{name} has {their} there where {our} is expected"
    return None


def described(struct: type[Struct]) -> Iterator[str]:
    for name, kind, *_ in struct._fields_:
        yield f"{KINDS.get(kind) or kind.__name__} {name}"


def declared(layout: str) -> tuple[str, list[str]]:
    """What `Name{const float *a, *b; int64_t c;}` or `kernel(Name)` says: a name, and its fields or its argument."""
    if layout.endswith(")"):
        kernel, _, struct = layout[:-1].partition("(")
        return f"{kernel}()", [struct]
    name, _, body = layout.rstrip("}").partition("{")
    found = []
    for declaration in filter(str.strip, body.split(";")):
        kind, *names = re.findall(r"\w+", declaration.replace("const ", ""))
        found += [f"{'pointer' if '*' in declaration else kind} {field}" for field in names]
    return name, found
