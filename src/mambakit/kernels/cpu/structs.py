"""The structs that cross the border to the compiled kernels, declared as csrc declares them, in its order.

A kernel takes one of them, filled in by name; the others lie inside. The library tells its own declarations
(`MK_FIELDS` in csrc/border.h), and `difference` compares, so that one built from other sources is refused instead of
reading other memory than was meant.
"""

import ctypes
import re
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, ClassVar

KINDS: dict[str, Any] = {
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "pointer": ctypes.c_void_p,
}
# Name{fields} is a struct, kernel(Name) the kernel that takes it.
DECLARED = """
Matrix{int64_t format, rows, columns, group; pointer weight, scales, bias;}
Matvec{Matrix matrix; int64_t batch; pointer x, y;} matvec(Matvec)
ReadMemory{pointer data; int64_t floats; pointer result;} read_memory(ReadMemory)
Conv{int64_t batch, length, width, taps; pointer x; int64_t x_batch, x_token; pointer weight, bias, window; int64_t
  window_batch; pointer segments, lengths; bool with_silu, narrow;}
ConvForward{Conv inputs; pointer y; int64_t y_batch, y_token; pointer after; int64_t after_batch;}
  causal_conv(ConvForward)
ConvBackward{Conv inputs; pointer d_y; int64_t d_y_batch, d_y_token; pointer d_after; int64_t after_batch; pointer
  d_x; int64_t d_x_batch, d_x_token; pointer d_weight, d_bias, d_window; int64_t d_window_batch;}
  causal_conv_backward(ConvBackward)
Finish{int64_t rows, ranks, width, group; pointer y; int64_t y_row; pointer x; int64_t x_row; pointer skip, z; int64_t
  z_row; pointer mimo_x, mimo_z, mimo_o, weight; int64_t order; float eps; bool narrow;}
FinishForward{Finish inputs; pointer out;} finish(FinishForward)
FinishBackward{Finish inputs; pointer d_out; int64_t d_out_row; pointer d_y, d_x, d_z, sums;}
  finish_backward(FinishBackward)
Ranks{int64_t rows, ranks, width; pointer x; int64_t x_row; pointer weight; bool narrow;}
ExpandRanks{Ranks inputs; pointer v;} expand_ranks(ExpandRanks)
ExpandRanksBackward{Ranks inputs; pointer d_v, d_x, d_weight;} expand_ranks_backward(ExpandRanksBackward)
Turns{int64_t batch, length, heads, angles; pointer rot; int64_t rot_batch, rot_token; pointer dt; double range;
  pointer before, segments;}
Pairs{int64_t state, angles; bool neighbours;}
Side{pointer x; int64_t x_batch, x_token; pointer weight, bias;}
Prepare{Turns turns; Pairs pairs; int64_t ranks, groups; float eps; Side b, c; pointer entering; bool
  narrow;}
PrepareForward{Prepare inputs; pointer b, c, after;} mamba3_prepare(PrepareForward)
PrepareBackward{Prepare inputs; pointer d_b_out, d_c_out, d_after, d_theta, d_b, d_c, d_rot, d_dt, d_before, sums;}
  mamba3_prepare_backward(PrepareBackward)
QuaternionForward{Prepare inputs; pointer running, b, c, after;} quaternion_prepare(QuaternionForward)
QuaternionBackward{Prepare inputs; pointer d_b_out, d_c_out, d_after, running, share, d_b, d_c, d_rot, d_dt, d_before,
  sums;} quaternion_prepare_backward(QuaternionBackward)
PerToken{pointer data; int64_t row, token, group;}
Scan{int64_t rows, tokens, groups, channels, rank, part_channels, softplus; PerToken x, dt, z, b, c; pointer a_ir,
  state_bir, skip_i, dt_bias_i, fresh_bs; bool narrow;}
ScanForward{Scan inputs; pointer y_bsi, last_bir;} selective_scan(ScanForward)
ScanBackward{Scan inputs; PerToken dy; pointer d_last_bir, dx_bsi, d_dt_bsi, dz_bsi, da_bir, db_kbsgr, dc_kbsgr,
  d_state_bir, d_skip_bi, d_dt_bias_bi;} selective_scan_backward(ScanBackward)
Sequence{pointer data; int64_t batch_stride, token_stride;}
Ssd{int64_t b, s, m, h, p, g, r, chunk_len; Sequence v_bsmhp, b_bsmgr, c_bsmgr, da_bsh, w_now_bsh, w_later_bsh;
  pointer segments_bs, state_bhpr; bool narrow;}
SsdForward{Ssd inputs; pointer y_bsmhp, last_bhpr;} ssd_forward(SsdForward)
SsdBackward{Ssd inputs; Sequence d_y_bsmhp; pointer d_last_bhpr, d_v_bsmhp, d_b_bsmgr, d_c_bsmgr, d_da_bsh,
  d_w_now_bsh, d_w_later_bsh, d_state_bhpr; bool narrow_sides; int64_t ranges; pointer shares;}
  ssd_backward(SsdBackward)
Mamba1Step{int64_t channels, r, k; pointer conv_weight, conv_bias, A_log, A, D;}
Mamba1StepConv{Mamba1Step step; int64_t batch; pointer projected, window_in, window_out, x, reset;}
  mamba1_step_conv(Mamba1StepConv)
Mamba1StepScan{Mamba1Step step; int64_t batch, dt_rank; pointer projected, x, dt, dt_b_c, state_in, state_out, out,
  reset;}
  mamba1_step_scan(Mamba1StepScan)
Mamba2Step{int64_t heads, p, r, groups, k, mlp; pointer conv_weight, conv_bias, dt_bias, A_log, D, norm_weight;
  int64_t norm_group; float norm_eps, dt_low, dt_high; bool D_per_channel, norm_before_gate;}
Mamba2StepCall{Mamba2Step step; int64_t batch; pointer projected, window_in, window_out, state_in, state_out, out,
  reset, fresh_state;}
  mamba2_step(Mamba2StepCall)
Mamba3Step{int64_t heads, p, r, groups, ranks, angles; bool quaternions, half, heavy_tail; pointer dt_bias, B_norm,
  C_norm, B_bias, C_bias, mimo_x, mimo_z, mimo_o, D, norm_weight; float norm_eps, dt_low, dt_high, a_floor,
  rotation_range;}
Mamba3Carried{pointer state, k_state, v_state, angle;}
Mamba3StepCall{Mamba3Step step; int64_t batch; pointer projected; Mamba3Carried before, after; pointer out, reset,
  fresh_state;}
  mamba3_step(Mamba3StepCall)
Norm{pointer weight, bias; int64_t width, centred; double eps; float scale;}
Mamba1Part{Mamba1Step step; Matrix in_proj, x_proj, dt_proj, out_proj; bool dt_b_c_norm; pointer dt_norm,
  B_norm, C_norm; float norm_eps; pointer window, state;}
Mamba2Part{Mamba2Step step; Matrix in_proj, out_proj; float z_scale, x_scale, B_scale, C_scale, dt_scale; pointer
  window, state, notes, narrow_state;}
Mamba3Part{Mamba3Step step; Matrix in_proj, out_proj; pointer state, k_state, v_state, angle, notes;}
MlpStep{int64_t activation; bool gated; float gate_scale;}
MlpPart{MlpStep step; Matrix fc1, fc2;}
AttentionStep{int64_t heads, kv_heads, p, window; float scale; int64_t angles; pointer rates;}
AttentionPart{AttentionStep step; Matrix in_proj, out_proj; pointer k, v, first, position; int64_t
  slots;}
MoeStep{int64_t experts, top_k, hidden, groups, top_groups, rule, activation; bool gated, normalize; float
  weight_scale; pointer correction_bias;}
MoePart{MoeStep step; Matrix router, experts_in, experts_out, latent_in, latent_out;}
DecodePart{int64_t kind; pointer block; Norm norm; float scale; bool beside;}
DecodeModel{int64_t width, parts; Matrix embedding; pointer part; Norm norm_f; Matrix head; float embedding_scale,
  logits_scale;}
Decode{pointer model; int64_t batch; pointer ids, text, before, after, run; int64_t runs; pointer again; bool stays;
  pointer logits, best;} decode(Decode)
LargePages{pointer start; int64_t bytes; bool touched;} large_pages(LargePages)
VectorFunction{int64_t which; pointer x, y; int64_t n;} vector_function(VectorFunction)
"""


class FieldsOnly(type(ctypes.Structure)):
    """Without it, a struct takes a misspelt name as one more attribute and leaves the field zero."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        return super().__new__(cls, name, bases, {"__slots__": (), **namespace})


class Struct(ctypes.Structure, metaclass=FieldsOnly):
    kernel: ClassVar[str]
    """Which takes it; empty for a struct that lies inside others."""


def read(declarations: Iterable[str]) -> dict[str, list[str]]:
    """What `Name{const float *a, *b; int64_t c;}` and `kernel(Name)` say: names, with their fields or argument."""
    found: dict[str, list[str]] = {}
    for name, body, argument in re.findall(r"(\w+)(?:\{([^}]*)\}|\((\w+)\))", " ".join(declarations)):
        if argument:
            found[f"{name}()"] = [argument]
            continue
        found[name] = []
        for declaration in filter(str.strip, body.split(";")):
            kind, *fields = re.findall(r"\w+", declaration.replace("const ", ""))
            found[name] += [f"{'pointer' if '*' in declaration else kind} {field}" for field in fields]
    return found


def difference(layouts: Iterable[str]) -> str | None:
    """Where the library's kernels and structs first differ from the ones here, in a clause; None: nowhere."""
    ours, theirs = read([DECLARED]), read(layouts)
    for name in ours | theirs:
        if name not in theirs or name not in ours:
            return f"{name} is {'missing' if name in ours else 'new'} there"
        for their, our in zip_longest(theirs[name], ours[name], fillvalue="nothing"):
            if their != our:
                return f"{name} has {their} there where {our} is expected"
    return None


def _make() -> dict[str, Any]:
    declared = read([DECLARED])
    kernels = {argument: name[:-2] for name, (argument, *_) in declared.items() if name.endswith("()")}
    made: dict[str, Any] = {}
    for name, fields in declared.items():
        if not name.endswith("()"):
            kinds = [(field, {**KINDS, **made}[kind]) for kind, field in map(str.split, fields)]
            made[name] = FieldsOnly(name, (Struct,), {"_fields_": kinds, "kernel": kernels.get(name, "")})
    return made


_STRUCTS = _make()


def __getattr__(name: str) -> Any:
    """`from structs import Matrix`: a struct by its name."""
    if name in _STRUCTS:
        return _STRUCTS[name]
    raise AttributeError(f"no struct is called {name}")
