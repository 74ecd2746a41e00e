"""What differs between the releases of transformers that the tests are run with."""

from transformers.modeling_utils import PreTrainedModel

NEW_NAMES = hasattr(PreTrainedModel, "activation_checkpointing_enable")
CHECKPOINTING = "activation_checkpointing" if NEW_NAMES else "gradient_checkpointing"
"""What switches it is called from 5.23 on, where the old name warns, and before."""


def norm_width(model: PreTrainedModel) -> int:
    """How many channels the gated norm of a model of theirs takes together: a group's from 5.23 on, before all."""
    norm, *_ = (module for module in model.modules() if type(module).__name__.endswith("RMSNormGated"))
    return getattr(norm, "group_size", norm.weight.numel())


def calls_of(module, run) -> int:
    """How often `run()` computes the module: recomputing in the backward pass counts."""
    calls = []
    handle = module.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        run()
    finally:
        handle.remove()
    return len(calls)
