"""What the official kernels of `mamba3_mimo` compute around them."""

from mambakit.compat.gpu_only import gpu_only

__getattr__ = gpu_only(
    __name__,
    kernels="bwd_dadt_cumsum_fused_kernel bwd_segsum_dadt_kernel bwd_dtrap_ddt_kernel dacs_segsum_kernel_varlen "
    "dacs_segsum_kernel bwd_dadt_cumsum_fused_kernel_varlen bwd_segsum_dadt_kernel_varlen "
    "bwd_dtrap_ddt_kernel_varlen",
    partial="bwd_dadt_fused_triton bwd_dtrap_ddt_triton compute_dacs_segsum_triton_varlen compute_dacs_segsum_triton "
    "bwd_segsum_ddt_from_dSSdA_ref bwd_ddt_from_ddA_cs_rev_ref bwd_ddt_from_ddA_cs_ref compute_dtrap_ddt_ref "
    "compute_dacs_segsum_ref compute_dacs_segsum_ref_varlen bwd_dadt_fused_varlen_ref compute_dtrap_ddt_varlen_ref "
    "bwd_dadt_fused_triton_varlen bwd_dtrap_ddt_triton_varlen",
    tiles="_build_varlen_chunk_mapping",
    tests="test_bwd_ddt_fused_correctness test_dtrap_ddt_correctness test_dacs_segsum_correctness_varlen "
    "test_dacs_segsum_correctness test_bwd_dadt_fused_varlen_correctness test_dtrap_ddt_varlen_correctness "
    "benchmark_bwd_ddt benchmark_dacs_segsum benchmark_dtrap_ddt",
)
