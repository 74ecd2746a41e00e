# type: ignore  # Triton's language: its compiler checks it
"""A kernel that is one product, for test_triton_kernels.py."""

import triton
import triton.language as tl

from mambakit.kernels.triton.code.products import mm


@triton.jit
def multiply(x, y, out, N: tl.constexpr, PARTS: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, mm(tl.load(x + at), tl.load(y + at), tl.zeros((N, N), tl.float32), PARTS, PARTS))
