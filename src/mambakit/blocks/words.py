"""Words of other libraries and what stands for them here, for messages; `mambakit.compat` understands them."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

OURS = {
    "d_state": ("state_rank",),
    "state_size": ("state_rank",),
    "ssm_state_size": ("state_rank",),
    "headdim": ("per_head_dim", "head_dim"),
    "head_dim": ("per_head_dim",),
    "per_head_dim": ("head_dim",),
    "d_conv": ("conv_kernel",),
    "n_groups": ("ngroups",),
    "A_floor": ("a_floor",),
    "hidden_size": ("d_model",),
    "dim": ("d_model",),
    "embed_dim": ("d_model",),
    "num_heads": ("n_heads",),
    "nheads": ("n_heads",),
    "num_kv_heads": ("n_kv_heads",),
    "num_key_value_heads": ("n_kv_heads",),
    "hidden_features": ("d_hidden",),
    "intermediate_size": ("d_hidden", "d_intermediate"),
    "num_experts": ("n_experts",),
    "num_hidden_layers": ("n_layer",),
    "n_layers": ("n_layer",),
    "num_layers": ("n_layer",),
    "mask": ("mask_bs",),
    "attention_mask": ("mask_bs",),
    "seq_idx": ("cu_seqlens", "reset_bs"),
    "past_key_values": ("cache",),
    "inference_params": ("cache",),
    "input_ids": ("ids_bs",),
}
"""By the word of others: the first that is known where it was used."""
NOTES = {
    "labels": "take the loss of what comes back: torch.nn.functional.cross_entropy(logits_bsw.flatten(0, 1), ...)",
    "chunk_size": "a call says it: path=SsdPath(chunk_len=...)",
    "chunk_len": "a call says it: path=SsdPath(chunk_len=...)",
    "use_mem_eff_path": "a call says how to run: path=SsdPath(...)",
    "use_fast_path": "a call says how to run: path=SsdPath(...)",
    "layer_idx": "leave it out: caches are passed, not looked up",
    "d_model": "it is the block's: block=Mamba2Config(d_model=...)",
}
"""Where nothing stands for it."""


class UnknownNameError(ValueError, TypeError):
    """A field or an argument that is not known; the message says what it is called here, if anything."""


def check_known(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """UnknownNameError `what` with the names that are not known, and what to write instead."""
    unknown = sorted(set(given).difference(known))
    if unknown:
        advice = {name: _advice(name, known) for name in unknown}
        named = ", ".join(repr(name) + (f" ({told})" if told else "") for name, told in advice.items())
        told = "" if all(advice.values()) else f"; known are {', '.join(sorted(known))}"
        raise UnknownNameError(f"{what} {named}{told}")


def _advice(name: str, known: Collection[str]) -> str:
    ours = [word for word in OURS.get(name, ()) if word in known]
    if not ours and name not in NOTES:
        ours = get_close_matches(name, known, 1, 0.8)
    return f"here: {ours[0]}" if ours else NOTES.get(name, "")
