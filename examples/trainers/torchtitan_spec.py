"""A model spec for torchtitan: `mambakit_spec()` is what its trainer takes for a model, with all three ways of sharing.

    pip install torchtitan
    python examples/trainers/torchtitan_spec.py

torchtitan trains on GPUs. Here the spec is made, and its model is built and called on the CPU.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from counting import VOCAB, compare_shapes
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torchtitan.protocols.model import BaseModel  # pyright: ignore[reportMissingImports]  # needs Python 3.11
from torchtitan.protocols.model_spec import ModelSpec  # pyright: ignore[reportMissingImports]

import mambakit as mk


class Mamba(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        model: dict[str, Any] = field(default_factory=dict)
        """As `mk.ModelConfig.to_dict` gives it."""

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """Nothing in it depends on the trainer's options."""

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            """Parameters, and FLOPs per token of a forward and a backward pass."""
            size = sum(parameter.numel() for parameter in model.parameters())
            return size, 6 * size

    def __init__(self, config: "Mamba.Config"):
        super().__init__()
        self.language_model = mk.LanguageModel(mk.ModelConfig.from_dict(config.model))

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.language_model(tokens)[0]

    def init_states(self, *, buffer_device: Any = None) -> None:
        for module in self.language_model.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    def verify_module_protocol(self) -> None:
        """Modules inside are mambakit's, which are ordinary ones of torch."""


def parallelize(
    model: Any, *, parallel_dims: Any, training: Any, parallelism: Any, ac_config: Any = None, **_: Any
) -> Any:
    """Heads first, then sequences, then shares of parameters."""
    inner = model.language_model
    if parallel_dims.tp_enabled:
        mk.parallel.tensor_parallel(inner, parallel_dims.get_mesh("tp"))
    if parallel_dims.cp_enabled:
        # FSDP2's mesh contains these ranks and sums their gradients.
        mk.parallel.context_parallel(inner, parallel_dims.get_mesh("cp"), sum_gradients=False)
    inner.backbone.checkpoint_layers = ac_config is not None
    if parallel_dims.fsdp_enabled:
        mesh = parallel_dims.get_mesh("fsdp")
        for layer in inner.backbone.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def mambakit_spec(config: mk.ModelConfig, flavor: str) -> ModelSpec:
    return ModelSpec(
        name="mambakit",
        flavor=flavor,
        model=Mamba.Config(model=config.to_dict()),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def main() -> None:
    block = mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8)
    spec = mambakit_spec(mk.ModelConfig(block=block, n_layer=2, vocab_size=VOCAB), "tiny")
    model = spec.model.build()
    model.verify_module_protocol()
    model.init_states()
    logits_bsw = model(torch.zeros(2, 5, dtype=torch.int64))
    compare_shapes(logits_bsw, (2, 5, VOCAB))


if __name__ == "__main__":
    main()
