"""Every name that the official packages define in their modules, and those of modified copies that other code imports.

As of mamba_ssm 2.3.2 and its development since, causal_conv1d 1.6.1, and 1.x where it differs.
"""

NAMES = {
    "causal_conv1d": "__version__ causal_conv1d_fn causal_conv1d_update",
    "causal_conv1d.causal_conv1d_interface": (
        "causal_conv1d_fn causal_conv1d_ref causal_conv1d_update causal_conv1d_update_ref CausalConv1dFn"
    ),
    "causal_conv1d.causal_conv1d_varlen": (
        "_causal_conv1d_varlen_states causal_conv1d_varlen_states causal_conv1d_varlen_states_ref"
    ),
    "causal_conv1d.cpp_functions": (
        "_causal_conv1d_bwd_cpp _causal_conv1d_fwd_cpp _causal_conv1d_update_cpp "
        "causal_conv1d_bwd_function causal_conv1d_fwd_function causal_conv1d_update_function"
    ),
    "causal_conv1d_cuda": "causal_conv1d_bwd causal_conv1d_fwd causal_conv1d_update",
    "mamba_ssm": "__version__ Mamba Mamba2 Mamba3 mamba_inner_fn MambaLMHeadModel selective_scan_fn",
    "mamba_ssm.distributed.distributed_utils": (
        "all_gather all_gather_raw all_reduce all_reduce_raw AllGatherFunc "
        "allreduce_sequence_parallel_grad AllReduceFunc get_dim_for_local_rank reduce_scatter "
        "reduce_scatter_raw ReduceScatterFunc sync_shared_params"
    ),
    "mamba_ssm.distributed.tensor_parallel": (
        "ColumnParallelEmbedding ColumnParallelLinear parallel_linear_func ParallelEmbeddings "
        "ParallelLinearFunc RowParallelLinear VocabParallelEmbedding"
    ),
    "mamba_ssm.models.config_mamba": "MambaConfig",
    "mamba_ssm.models.mixer_seq_simple": "_init_weights create_block MambaLMHeadModel MixerModel",
    "mamba_ssm.modules.block": "Block",
    "mamba_ssm.modules.mamba2": "Mamba2",
    "mamba_ssm.modules.mamba2_simple": "Mamba2Simple",
    "mamba_ssm.modules.mamba3": "heavy_tail_activation Mamba3",
    "mamba_ssm.modules.mamba_simple": "Block Mamba",
    "mamba_ssm.modules.mha": "_update_kv_cache MHA",
    "mamba_ssm.modules.mlp": "GatedMLP",
    "mamba_ssm.modules.ssd_minimal": "segsum segsum_unstable ssd_minimal_discrete test_correctness",
    "mamba_ssm.ops.cute.mamba3.mamba3_step_fn": (
        "_bytes_of get_gmem_tiled_copy Mamba3Step mamba3_step_fn select selective_state_update_fused_ref_v2 "
        "transpose_view"
    ),
    "mamba_ssm.ops.selective_scan_interface": (
        "_check_selective_scan_cuda bimamba_inner_fn bimamba_inner_ref BiMambaInnerFn mamba_inner_fn "
        "mamba_inner_fn_no_out_proj mamba_inner_ref MambaInnerFn MambaInnerFnNoOutProj rms_norm_forward "
        "selective_scan_fn selective_scan_ref SelectiveScanFn"
    ),
    "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo": "_Mamba3Function mamba3_mimo",
    "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd": ("mamba_mimo_bwd_bwd mamba_mimo_bwd_combined mamba_mimo_bwd_fwd"),
    "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd_varlen": (
        "mamba_mimo_bwd_bwd mamba_mimo_bwd_combined_varlen mamba_mimo_bwd_fwd"
    ),
    "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_fwd": "mamba_mimo_forward mamba_mimo_fwd",
    "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_fwd_varlen": "mamba_mimo_forward_varlen mamba_mimo_fwd",
    "mamba_ssm.ops.triton.k_activations": (
        "_swiglu_bwd _swiglu_bwd_kernel _swiglu_fwd _swiglu_fwd_kernel SwiGLU swiglu"
    ),
    "mamba_ssm.ops.triton.layer_norm": (
        "_layer_norm_bwd _layer_norm_bwd_kernel _layer_norm_fwd _layer_norm_fwd_1pass_kernel config_prune "
        "configs_autotune layer_norm_fn layer_norm_linear_fn layer_norm_ref LayerNormFn LayerNormLinearFn "
        "pruned_configs_autotune rms_norm_fn rms_norm_ref RMSNorm"
    ),
    "mamba_ssm.ops.triton.layernorm": (
        "_layer_norm_bwd _layer_norm_fwd layer_norm_fn layer_norm_linear_fn layer_norm_ref LayerNormFn "
        "LayerNormLinearFn rms_norm_fn rms_norm_ref RMSNorm"
    ),
    "mamba_ssm.ops.triton.layernorm_gated": (
        "_layer_norm_bwd _layer_norm_bwd_kernel _layer_norm_fwd _layer_norm_fwd_1pass_kernel LayerNorm "
        "layernorm_fn LayerNormFn rms_norm_ref RMSNorm rmsnorm_fn"
    ),
    "mamba_ssm.ops.triton.mamba3.angle_dt": "angle_dt_bwd angle_dt_bwd_kernel angle_dt_fwd angle_dt_fwd_kernel",
    "mamba_ssm.ops.triton.mamba3.grouped_head_reduction": (
        "_finalize_qk_bias_kernel _next_power_of_2 _reduce_grouped_qk_grads_and_bias_partial_kernel "
        "reduce_grouped_qk_grads reduce_grouped_qk_grads_and_bias_triton"
    ),
    "mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step": (
        "apply_rotary_qk_inference_fwd apply_rotary_qk_inference_reference rotary_qk_inference_kernel "
        "test_correctness_qk_inference"
    ),
    "mamba_ssm.ops.triton.mamba3.mamba3_mimo_utils": (
        "_build_varlen_chunk_mapping benchmark_bwd_ddt benchmark_dacs_segsum benchmark_dtrap_ddt "
        "bwd_dadt_cumsum_fused_kernel bwd_dadt_cumsum_fused_kernel_varlen bwd_dadt_fused_triton "
        "bwd_dadt_fused_triton_varlen bwd_dadt_fused_varlen_ref bwd_ddt_from_ddA_cs_ref "
        "bwd_ddt_from_ddA_cs_rev_ref bwd_dtrap_ddt_kernel bwd_dtrap_ddt_kernel_varlen "
        "bwd_dtrap_ddt_triton bwd_dtrap_ddt_triton_varlen bwd_segsum_dadt_kernel "
        "bwd_segsum_dadt_kernel_varlen bwd_segsum_ddt_from_dSSdA_ref compute_dacs_segsum_ref "
        "compute_dacs_segsum_ref_varlen compute_dacs_segsum_triton compute_dacs_segsum_triton_varlen "
        "compute_dtrap_ddt_ref compute_dtrap_ddt_varlen_ref dacs_segsum_kernel dacs_segsum_kernel_varlen "
        "test_bwd_dadt_fused_varlen_correctness test_bwd_ddt_fused_correctness "
        "test_dacs_segsum_correctness test_dacs_segsum_correctness_varlen test_dtrap_ddt_correctness "
        "test_dtrap_ddt_varlen_correctness"
    ),
    "mamba_ssm.ops.triton.mamba3.mamba3_siso_bwd": (
        "_alloc_fn apply_dk_state_post compute_ddt_dtrap_dinput_states compute_dqktheta compute_dqkv "
        "compute_dzdo mamba3_siso_bwd_kernel_ddt_dtrap_dinput_states mamba3_siso_bwd_kernel_dk_state_post "
        "mamba3_siso_bwd_kernel_dqkv mamba3_siso_bwd_kernel_dzdo "
        "mamba3_siso_bwd_kernel_rotary_bias_angles"
    ),
    "mamba_ssm.ops.triton.mamba3.mamba3_siso_combined": (
        "_Mamba3Function _triton_alloc_fn mamba3_siso_combined Mamba3Output"
    ),
    "mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd": (
        "_alloc_fn _prune_mamba3_siso_fwd_configs mamba3_siso_fwd mamba3_siso_fwd_kernel"
    ),
    "mamba_ssm.ops.triton.mamba3.mamba3_siso_step": "_alloc_fn mamba3_siso_step mamba3_siso_step_kernel",
    "mamba_ssm.ops.triton.mamba3.utils": "cos_approx sech2_approx sigmoid_approx silu sin_approx tanh_approx",
    "mamba_ssm.ops.triton.selective_state_update": (
        "_selective_scan_update_kernel selective_state_update selective_state_update_ref"
    ),
    "mamba_ssm.ops.triton.softplus": "softplus",
    "mamba_ssm.ops.triton.ssd_bmm": (
        "_bmm_chunk_bwd _bmm_chunk_bwd_kernel _bmm_chunk_fwd _bmm_chunk_fwd_kernel init_to_zero"
    ),
    "mamba_ssm.ops.triton.ssd_chunk_scan": (
        "_chunk_scan_bwd_dC _chunk_scan_bwd_dc_kernel _chunk_scan_bwd_dcb _chunk_scan_bwd_dcb_kernel "
        "_chunk_scan_bwd_ddAcs_prev _chunk_scan_bwd_ddAcs_prev_kernel _chunk_scan_bwd_ddAcs_stable "
        "_chunk_scan_bwd_ddAcs_stable_kernel _chunk_scan_bwd_ddAcs_stable_kernel_old "
        "_chunk_scan_bwd_ddAcs_stable_old _chunk_scan_bwd_ddAcs_unstable "
        "_chunk_scan_bwd_ddAcs_unstable_kernel _chunk_scan_bwd_dstates _chunk_scan_bwd_dstates_kernel "
        "_chunk_scan_bwd_dx _chunk_scan_bwd_dx_kernel _chunk_scan_bwd_dz _chunk_scan_bwd_dz_kernel "
        "_chunk_scan_fwd _chunk_scan_fwd_kernel _chunk_scan_fwd_kernel_wip _chunk_scan_fwd_wip chunk_scan "
        "chunk_scan_ref ChunkScanFn init_to_zero"
    ),
    "mamba_ssm.ops.triton.ssd_chunk_state": (
        "_chunk_cumsum_bwd _chunk_cumsum_bwd_kernel _chunk_cumsum_fwd _chunk_cumsum_fwd_kernel "
        "_chunk_state_bwd_db _chunk_state_bwd_db_kernel _chunk_state_bwd_ddAcs_stable "
        "_chunk_state_bwd_ddAcs_stable_kernel _chunk_state_bwd_dx _chunk_state_bwd_dx_kernel "
        "_chunk_state_fwd _chunk_state_fwd_kernel _chunk_state_varlen_kernel chunk_state chunk_state_ref "
        "chunk_state_varlen ChunkStateFn init_to_zero"
    ),
    "mamba_ssm.ops.triton.ssd_combined": (
        "_chunk_scan_chunk_state_bwd_dx _chunk_scan_chunk_state_bwd_dx_kernel "
        "_mamba_chunk_scan_combined_bwd _mamba_chunk_scan_combined_fwd ensure_stride init_to_zero "
        "mamba_chunk_scan mamba_chunk_scan_combined mamba_conv1d_scan_ref "
        "mamba_split_conv1d_scan_combined mamba_split_conv1d_scan_ref MambaChunkScanCombinedFn "
        "MambaSplitConv1dScanCombinedFn selective_scan_bwd ssd_chunk_scan_combined_ref ssd_selective_scan"
    ),
    "mamba_ssm.ops.triton.ssd_state_passing": (
        "_state_passing_bwd _state_passing_bwd_kernel _state_passing_fwd _state_passing_fwd_kernel "
        "state_passing state_passing_ref StatePassingFn"
    ),
    "mamba_ssm.utils.determinism": (
        "_estimate_config_cost _filter_configs_by_block_sizes alloc_tile_workspace autotune_configs "
        "finalize_tile_workspace set_deterministic_mode use_deterministic_mode"
    ),
    "mamba_ssm.utils.generation": (
        "capture_graph decode DecodingCGCache GenerationMixin InferenceParams "
        "modify_logit_for_repetition_penalty modify_logits_for_min_p_filtering "
        "modify_logits_for_top_k_filtering modify_logits_for_top_p_filtering sample update_graph_cache"
    ),
    "mamba_ssm.utils.hf": "load_config_hf load_state_dict_hf",
    "mamba_ssm.utils.torch": "custom_amp_decorator custom_bwd custom_fwd",
    "selective_scan_cuda": "bwd fwd",
    "selective_scan_cuda_core": "bwd fwd",
    "selective_scan_cuda_ndstate": "bwd fwd",
    "selective_scan_cuda_nrow": "bwd fwd",
    "selective_scan_cuda_oflex": "bwd fwd",
    "selective_scan_cuda_oflex_rh": "bwd fwd",
}
