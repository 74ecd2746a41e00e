"""Mamba-3's write and read vectors where quaternions turn them: norm, bias per head, rotation."""

from typing import Any

from torch import Tensor

from mambakit.arguments import number
from mambakit.ops.mamba3_prepare import check_groups, normed
from mambakit.ops.operation import Outputs, TorchOperation
from mambakit.ops.quaternion import check_blocks, rotate_quaternion, running_quaternion, unit_quaternion
from mambakit.ops.rotation import checked_range
from mambakit.ops.shapes import bind, check_floats, check_integers, check_segments


def _outputs(b_bsmgr: Tensor, c_bsmgr: Tensor, *others: Any) -> Outputs:
    b, s, m, _, r = b_bsmgr.shape
    rot_bshj3, dt_bsh = others[4:6]
    h, j, _ = rot_bshj3.shape[2:]
    return [*((t, (b, s, m, h, r)) for t in (b_bsmgr, c_bsmgr)), (dt_bsh, (b, h, j, 4))]


def check_sizes(
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_r: Tensor,
    c_weight_r: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    rot_bshj3: Tensor,
    dt_bsh: Tensor,
    carry_bhj4: Tensor | None,
    segments_bs: Tensor | None,
    *others: Any,
) -> None:
    required = {"b_bsmgr": b_bsmgr, "c_bsmgr": c_bsmgr, "b_weight_r": b_weight_r, "c_weight_r": c_weight_r}
    required |= {"b_bias_hmr": b_bias_hmr, "c_bias_hmr": c_bias_hmr, "rot_bshj3": rot_bshj3, "dt_bsh": dt_bsh}
    size = bind(required, carry_bhj4=carry_bhj4, segments_bs=segments_bs)
    check_blocks(size.j, size.r)
    check_groups(size)
    if segments_bs is not None:
        check_integers("segments_bs", segments_bs)


def plain_prepare(
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_r: Tensor,
    c_weight_r: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    rot_bshj3: Tensor,
    dt_bsh: Tensor,
    carry_bhj4: Tensor | None,
    segments_bs: Tensor | None,
    eps: float,
    rotation_range: float,
) -> list[Tensor]:
    """`QUATERNION_PREPARE` in torch's operators."""
    q_bshj4 = unit_quaternion(rot_bshj3, dt_bsh, rotation_range)
    total_bshj4, last_bhj4 = running_quaternion(q_bshj4, carry_bhj4, segments_bs=segments_bs)
    sides = ((b_bsmgr, b_weight_r, b_bias_hmr), (c_bsmgr, c_weight_r, c_bias_hmr))
    b_bsmhr, c_bsmhr = (rotate_quaternion(normed(*side, eps), total_bshj4) for side in sides)
    return [b_bsmhr, c_bsmhr, last_bhj4]


QUATERNION_PREPARE = TorchOperation(
    "quaternion_prepare",
    "Tensor b_bsmgr, Tensor c_bsmgr, Tensor b_weight_r, Tensor c_weight_r, Tensor b_bias_hmr, Tensor c_bias_hmr, "
    "Tensor rot_bshj3, Tensor dt_bsh, Tensor? carry_bhj4, Tensor? segments_bs, float eps, float rotation_range",
    _outputs,
    check=check_sizes,
    floats=9,
    twin=plain_prepare,
)
"""B and C per head, `[b, s, m, h, r]`, and the quaternions after the last token."""


def quaternion_prepare(
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_r: Tensor,
    c_weight_r: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    rot_bshj3: Tensor,
    dt_bsh: Tensor,
    carry_bhj4: Tensor | None = None,
    *,
    eps: float = 1e-5,
    rotation_range: float = 1.0,
    segments_bs: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """B and C per head, `rotate_quaternion(rms_norm(b) + bias)` by `running_quaternion`, and the last of these.

    Returns `b_bsmhr` and `c_bsmhr` in the dtype of `b`. Head `i` belongs to group `i // (h / g)`.
    """
    tensors = (b_bsmgr, c_bsmgr, b_weight_r, c_weight_r, b_bias_hmr, c_bias_hmr, rot_bshj3, dt_bsh, carry_bhj4)
    check_sizes(*tensors, segments_bs)
    options = (number("eps", eps), checked_range(rotation_range))
    data: dict[str, Tensor | None] = {"b_bsmgr": b_bsmgr, "c_bsmgr": c_bsmgr, "rot_bshj3": rot_bshj3}
    named = dict(zip(QUATERNION_PREPARE.names, tensors, strict=False))
    check_floats(data, {name: tensor for name, tensor in named.items() if name not in data})
    if segments_bs is not None:
        check_segments(segments_bs)
    run = QUATERNION_PREPARE.choose(backend, *tensors, segments_bs) or plain_prepare
    b_bsmhr, c_bsmhr, last_bhj4 = run(*tensors, segments_bs, *options)
    return b_bsmhr.to(b_bsmgr.dtype), c_bsmhr.to(b_bsmgr.dtype), last_bhj4
