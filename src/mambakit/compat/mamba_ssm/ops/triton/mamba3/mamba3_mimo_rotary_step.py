"""The rotation of one token's Q and K."""

import torch
from torch import Tensor

from mambakit.compat.arguments import of_tensors
from mambakit.compat.gpu_only import gpu_only
from mambakit.compat.mamba3_core import turned_by
from mambakit.compat.references.rotary import apply_rotary_qk_inference_reference
from mambakit.ops.rotation import rotate_all
from mambakit.ops.shapes import bind

__all__ = ["apply_rotary_qk_inference_fwd", "apply_rotary_qk_inference_reference"]

__getattr__ = gpu_only(__name__, kernels="rotary_qk_inference_kernel", tests="test_correctness_qk_inference")


@of_tensors
def apply_rotary_qk_inference_fwd(
    q: Tensor,
    k: Tensor,
    angle_state: Tensor,
    angle_proj: Tensor,
    dt: Tensor,
    bias_q: Tensor | None = None,
    bias_k: Tensor | None = None,
    inplace: bool = False,
    conjugate: bool = False,
    rotate_pairwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`q` and `k` (b, m, h, r), plus biases (m, h, r), turned by the next angle, and that angle (b, h, a).

    `angle_proj` (b, h, a) is the rate before tanh, `dt` (b, h) the step. Pairs are neighbours with `rotate_pairwise`,
    else `r / 2` apart; `conjugate` turns the other way. `inplace` writes all three results into the arguments.
    """
    bind(q_bmhr=q, k_bmhr=k, angle_state_bha=angle_state, angle_proj_bha=angle_proj, dt_bh=dt)
    bind(q_bmhr=q, bias_q_mhr=bias_q, bias_k_mhr=bias_k)
    wide = torch.promote_types(q.dtype, torch.float32)
    angle_bsha, last_bha = turned_by(angle_proj[:, None].to(wide), dt[:, None].to(wide), angle_state.to(wide))
    q_wide, k_wide = (
        (t.to(wide) if bias is None else t.to(wide) + bias)[:, None] for t, bias in ((q, bias_q), (k, bias_k))
    )
    pairing = "interleaved" if rotate_pairwise else "half"
    turned = rotate_all((q_wide, k_wide), -angle_bsha if conjugate else angle_bsha, pairing)
    results = (turned[0][:, 0].to(q.dtype), turned[1][:, 0].to(k.dtype), last_bha.to(angle_state.dtype))
    if not inplace:
        return results
    with torch.no_grad():
        return q.copy_(results[0]), k.copy_(results[1]), angle_state.copy_(results[2])
