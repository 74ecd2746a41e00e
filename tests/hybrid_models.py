"""Tiny random hybrids of transformers, every parameter moved off its initial value."""

from typing import Any

import torch

TOKENS = {"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
SIZES = {"hidden_size": 32, "intermediate_size": 40, **ATTENTION}
NEMOTRON = {
    **{"layers_block_type": ["mamba", "moe", "attention", "mlp"], "head_dim": 6, "intermediate_size": 48},
    **{"ssm_state_size": 8, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8},
    **{"n_routed_experts": 4, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24},
}
GRANITE = {
    **{"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4},
    **{"num_experts_per_tok": 2, "shared_intermediate_size": 44, "embedding_multiplier": 3.0, "logits_scaling": 6.0},
    **{"residual_multiplier": 0.4, "attention_multiplier": 0.2, "rms_norm_eps": 1e-4},
}
FALCON_H1 = {
    **{"num_hidden_layers": 2, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2},
    **{"mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    **{"ssm_multipliers": [0.5, 0.7, 1.3, 0.9, 1.1], "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8},
    **{"attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1, "key_multiplier": 0.6},
    **{"mlp_multipliers": [0.7, 1.4], "embedding_multiplier": 5.0, "lm_head_multiplier": 0.3},
}
JAMBA = {
    **{"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 3},
    **{"expert_layer_offset": 2, "num_experts": 4, "mamba_d_state": 8, "rms_norm_eps": 1e-5},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("NemotronH", NEMOTRON),
    "nemotron_h-groups": (
        "NemotronH",
        {
            **NEMOTRON,
            **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "mlp_bias": True},
            **{"routed_scaling_factor": 2.5, "moe_latent_size": 12, "use_bias": True, "mlp_hidden_act": "silu"},
        },
    ),
    "nemotron_h-dense": (
        "NemotronH",
        # Its head is its own all the same.
        {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "tie_word_embeddings": True},
    ),
    "granitemoehybrid": ("GraniteMoeHybrid", {**MAMBA2, **GRANITE}),
    "granitemoehybrid-dense": (
        "GraniteMoeHybrid",
        {
            **MAMBA2,
            **GRANITE,
            **{"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True, "head_dim": 12},
        },
    ),
    "falcon_h1": ("FalconH1", FALCON_H1),
    "falcon_h1-plain": (
        "FalconH1",
        {
            **FALCON_H1,
            **{"mamba_rms_norm": False, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True},
            **{"projectors_bias": True, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        },
    ),
    "falcon_h1-norm-first": ("FalconH1", {**FALCON_H1, "mamba_norm_before_gate": True}),
    "bamba": ("Bamba", {**MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "bamba-bias": (
        "Bamba",
        {
            **MAMBA2,
            **{"num_hidden_layers": 2, "attn_layer_indices": [0], "attention_bias": True, "mlp_bias": True},
            **{"mamba_proj_bias": True, "tie_word_embeddings": True, "head_dim": 12},
        },
    ),
    "jamba": ("Jamba", JAMBA),
    "jamba-dense": ("Jamba", {**JAMBA, "num_experts": 1, "mamba_proj_bias": True}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8, "num_hidden_layers": 2, "mixer_rms_eps": 1e-4}),
}


def fields(name: str) -> dict[str, Any]:
    """Of a config."""
    kind, options = KINDS[name]
    return {**TOKENS, **({"hidden_size": 32} if kind == "FalconMamba" else SIZES), **options}


def theirs(name: str, **changed: Any) -> Any:
    import transformers  # which takes seconds, and who only wants fields need not wait

    kind, _ = KINDS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(**{**fields(name), **changed})
    model = getattr(transformers, kind + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()
