"""Mamba-3's write and read vectors from what a token projects: norm, bias per head, rotation."""

from typing import Any

from torch import Tensor

from mambakit.arguments import number
from mambakit.ops.norm import rms_norm
from mambakit.ops.operation import Outputs, TorchOperation
from mambakit.ops.rotation import check_pairing, check_pairs, checked_range, rotate_all, running_angle
from mambakit.ops.shapes import Sizes, bind, check_floats, check_integers, check_segments


def _outputs(b_bsmgr: Tensor, c_bsmgr: Tensor, *others: Any) -> Outputs:
    b, s, m, _, r = b_bsmgr.shape
    rot_bsa, dt_bsh = others[4:6]
    h = dt_bsh.shape[2]
    return [*((t, (b, s, m, h, r)) for t in (b_bsmgr, c_bsmgr)), (dt_bsh, (b, h, rot_bsa.shape[2]))]


def check_sizes(
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_r: Tensor,
    c_weight_r: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    rot_bsa: Tensor,
    dt_bsh: Tensor,
    angle_bha: Tensor | None,
    segments_bs: Tensor | None,
    *others: Any,
) -> None:
    required = {"b_bsmgr": b_bsmgr, "c_bsmgr": c_bsmgr, "b_weight_r": b_weight_r, "c_weight_r": c_weight_r}
    required |= {"b_bias_hmr": b_bias_hmr, "c_bias_hmr": c_bias_hmr, "rot_bsa": rot_bsa, "dt_bsh": dt_bsh}
    size = bind(required, angle_bha=angle_bha, segments_bs=segments_bs)
    check_pairs(size.a, size.r)
    check_groups(size)
    if segments_bs is not None:
        check_integers("segments_bs", segments_bs)


def check_groups(size: Sizes) -> None:
    if size.g == 0 or size.h % size.g:
        raise ValueError(f"axis 'h' is {size.h} in dt_bsh, not a multiple of axis 'g', which is {size.g} in b_bsmgr")


MAMBA3_PREPARE = TorchOperation(
    "mamba3_prepare",
    "Tensor b_bsmgr, Tensor c_bsmgr, Tensor b_weight_r, Tensor c_weight_r, Tensor b_bias_hmr, Tensor c_bias_hmr, "
    "Tensor rot_bsa, Tensor dt_bsh, Tensor? angle_bha, Tensor? segments_bs, float eps, float rotation_range, "
    "bool neighbours",
    _outputs,
    check=check_sizes,
    floats=9,
)
"""B and C per head, `[b, s, m, h, r]`, and the angles after the last token."""


def mamba3_prepare(
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_r: Tensor,
    c_weight_r: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    rot_bsa: Tensor,
    dt_bsh: Tensor,
    angle_bha: Tensor | None = None,
    *,
    eps: float = 1e-5,
    rotation_range: float = 1.0,
    pairing: str = "interleaved",
    segments_bs: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """B and C per head, `rotate(rms_norm(b) + bias)` by `running_angle`, and the angle after the last token.

    Returns `b_bsmhr` and `c_bsmhr` in the dtype of `b`. Head `i` belongs to group `i // (h / g)`.
    """
    tensors = (b_bsmgr, c_bsmgr, b_weight_r, c_weight_r, b_bias_hmr, c_bias_hmr, rot_bsa, dt_bsh, angle_bha)
    check_sizes(*tensors, segments_bs)
    check_pairing(pairing)
    eps, rotation_range = number("eps", eps), checked_range(rotation_range)
    data: dict[str, Tensor | None] = {"b_bsmgr": b_bsmgr, "c_bsmgr": c_bsmgr, "rot_bsa": rot_bsa}
    named = dict(zip(MAMBA3_PREPARE.names, tensors, strict=False))
    check_floats(data, {name: tensor for name, tensor in named.items() if name not in data})
    kernel = MAMBA3_PREPARE.choose(backend, *tensors, segments_bs)
    if kernel is not None:
        if segments_bs is not None:
            check_segments(segments_bs)
        b_bsmhr, c_bsmhr, last_bha = kernel(*tensors, segments_bs, eps, rotation_range, pairing == "interleaved")
        return b_bsmhr.to(b_bsmgr.dtype), c_bsmhr.to(b_bsmgr.dtype), last_bha
    angle_bsha, last_bha = running_angle(rot_bsa, dt_bsh, rotation_range, angle_bha, segments_bs=segments_bs)
    sides = ((b_bsmgr, b_weight_r, b_bias_hmr), (c_bsmgr, c_weight_r, c_bias_hmr))
    b_bsmhr, c_bsmhr = rotate_all(tuple(normed(*side, eps) for side in sides), angle_bsha, pairing)
    return b_bsmhr.to(b_bsmgr.dtype), c_bsmhr.to(b_bsmgr.dtype), last_bha


def normed(x_bsmgr: Tensor, weight_r: Tensor, bias_hmr: Tensor, eps: float) -> Tensor:
    """Norm and bias in torch's operators."""
    return add_bias(rms_norm(x_bsmgr, weight_r, eps, backend="torch"), bias_hmr)


def add_bias(x_bsmgr: Tensor, bias_hmr: Tensor) -> Tensor:
    """`[b, s, m, g, r]` to one vector per head, each with its own bias."""
    bias_mgqr = bias_hmr.transpose(0, 1).unflatten(1, (x_bsmgr.shape[3], -1))
    return (x_bsmgr[..., None, :] + bias_mgqr).flatten(3, 4)
