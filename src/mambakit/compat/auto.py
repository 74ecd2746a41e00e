"""mambakit's models behind transformers' interfaces: `AutoModelForCausalLM`, `generate`, `pipeline`, `Trainer`.

Importing this module registers them. Files stay mambakit's: `from_pretrained` is `load_model`, `save_pretrained` is
`save_model`, and each reads what the other writes.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GenerationMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput

from mambakit.blocks import caches
from mambakit.checkpoints import load_model
from mambakit.checkpoints.formats import MODEL_TYPE
from mambakit.compat.auto_config import MambakitConfig
from mambakit.compat.auto_files import GENERATION, find, one_device, read_dtype, write_among_others
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.models.stack import StackCache
from mambakit.ops.boundary import boundary, next_labels
from mambakit.parallel.context import splits_sequences

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# transformers calls by name and asks models to take the arguments they have a use for.


@dataclass
class MambakitCache:
    """States after `length` tokens, padding included. A call returns a new one and leaves the one it got as it was."""

    states: StackCache
    length: int

    is_croppable = is_compileable = False

    def get_seq_length(self) -> int:
        return self.length


@dataclass
class MambakitOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    cache_params: MambakitCache | None = None


class MambakitForCausalLM(PreTrainedModel, GenerationMixin):
    """A `LanguageModel` for transformers, with the same names of parameters."""

    config_class = MambakitConfig
    config: MambakitConfig
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    _is_stateful = True
    _supports_context_parallel = False
    _tied_weights_keys = {"lm_head.weight": "backbone.embedding.weight"}  # noqa: RUF012  # as transformers declares it

    def __init__(self, config: MambakitConfig, model: LanguageModel | None = None):
        """A new model, or one of the parts of `model`."""
        super().__init__(config)
        model = LanguageModel(config.model_config, dtype=config.dtype) if model is None else model
        if model.backbone.levels:
            raise ValueError("a model with latents has outputs that belong to no token, which transformers cannot take")
        self.backbone, self.lm_head = model.backbone, model.lm_head
        self.gradient_checkpointing = model.backbone.checkpoint_layers
        self.post_init()

    @classmethod
    def wrap(cls, model: LanguageModel) -> "MambakitForCausalLM":
        """Share the weights of a model that is there already."""
        return cls(MambakitConfig(model=model.config.to_dict(), dtype=model.lm_head.weight.dtype), model)

    @property
    def language_model(self) -> LanguageModel:
        """The same weights for `mk.generate`, and all else that takes a model of mambakit."""
        model = LanguageModel.__new__(LanguageModel)
        nn.Module.__init__(model)
        model.config, model.backbone, model.lm_head = (
            cast(ModelConfig, self.backbone.config),
            self.backbone,
            self.lm_head,
        )
        return model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache_params: MambakitCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> MambakitOutput | tuple[Any, ...]:
        """Logits, and with `labels` the loss of telling each from the tokens before it; -100 does not count.

        Padding that `attention_mask` marks, on either side, has no effect. `cache_params` continues an earlier call,
        whose tokens the mask may have too.
        """
        if output_hidden_states or output_attentions:
            raise ValueError(
                "hidden states are not kept, and there are no attentions; hooks on backbone.layers see all"
            )
        model = self.language_model
        if labels is not None and boundary() is None and splits_sequences(model):
            raise ValueError(
                "context_parallel is on a module inside, so the labels of other ranks' tokens are not known here; "
                f"call it with the {type(self).__name__} itself"
            )
        if inputs_embeds is None and input_ids is not None:
            x_bsd = model.embed(input_ids)
        elif inputs_embeds is not None and input_ids is None:
            x_bsd = inputs_embeds
        else:
            raise ValueError("give either input_ids or inputs_embeds")
        states, seen = (None, 0) if cache_params is None else (cache_params.states, cache_params.length)
        x_bsd, states = model.backbone(x_bsd, states, mask_bs=present(attention_mask, x_bsd))
        # 0 keeps all, as everywhere in transformers.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = MambakitOutput(logits=model.logits(x_bsd[:, kept]))
        if labels is not None:
            counted: dict[str, Any] = {"vocab_size": self.config.vocab_size, "num_items_in_batch": num_items_in_batch}
            if (edge := boundary()) is not None:
                # The sum over the ranks is the loss of the whole sequence.
                counted["shift_labels"], items = next_labels(edge, labels, ignored=-100)
                counted["num_items_in_batch"] = items if num_items_in_batch is None else num_items_in_batch
            output.loss = self.loss_function(logits=output.logits, labels=labels, **counted)
        if use_cache or (use_cache is None and self.config.use_cache and not self.training):
            output.cache_params = MambakitCache(states, seen + x_bsd.shape[1])
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache_params: MambakitCache | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        if is_first_iteration and attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError('prompts have to end in a token: pad on the left, tokenizer.padding_side = "left"')
        if is_first_iteration and cache_params is not None:
            next_sequence_length = input_ids.shape[1] - cache_params.length
            if next_sequence_length < 1:
                raise ValueError(
                    f"cache_params has seen {cache_params.length} tokens, and input_ids has {input_ids.shape[1]}; give "
                    "the whole text with something new at its end"
                )
        given = {"cache_params": cache_params, "attention_mask": attention_mask, **options}
        given |= {"next_sequence_length": next_sequence_length, "is_first_iteration": is_first_iteration}
        return cast(Any, super()).prepare_inputs_for_generation(input_ids, **given)

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, *args: Any, **options: Any) -> Any:
        kind = generation_config.cache_implementation
        if kind is not None:
            raise ValueError(f"cache_implementation = {kind!r} is for attention; leave it out")
        # transformers would make a cache of its own here; the first call of `forward` returns ours.

    def _reorder_cache(self, cache: MambakitCache, row_b: Tensor) -> MambakitCache:
        """The rows of those beams that go on."""
        return MambakitCache(caches.select(cache.states, row_b), cache.length)

    def _init_weights(self, module: nn.Module) -> None:
        """mambakit's modules initialise themselves."""

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, every_n_layers: int = 1
    ) -> None:
        options = getattr(gradient_checkpointing_func, "keywords", {})
        function = getattr(gradient_checkpointing_func, "func", checkpoint)
        if enable and (every_n_layers != 1 or function is not checkpoint or options != {"use_reentrant": False}):
            raise ValueError('layers are checkpointed one by one, with {"use_reentrant": False} and no other options')
        self.backbone.checkpoint_layers = self.gradient_checkpointing = enable

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def resize_token_embeddings(self, *args: Any, **options: Any) -> Any:
        raise ValueError("a mambakit model keeps its vocabulary; make one with another vocab_size and copy the rows")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        config: MambakitConfig | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        subfolder: str = "",
        generation_config: GenerationConfig | None = None,
        a_activation: str | None = None,
        norm_group_size: int | None = None,
        **options: Any,
    ) -> "MambakitForCausalLM":
        """What `load_model` reads, in any of its formats, from a directory or from the hub."""
        directory = find(pretrained_model_name_or_path, options) / subfolder
        model = load_model(
            directory,
            dtype=read_dtype(torch_dtype if dtype is None else dtype),
            device=one_device(device_map),
            a_activation=a_activation,
            norm_group_size=norm_group_size,
        )
        if config is not None and config.model_config != model.config:
            raise ValueError(f"the config differs from that of {directory}, which a loaded model has to have")
        made = cls.wrap(model)
        made.name_or_path = made.config.name_or_path = str(pretrained_model_name_or_path)
        if config is not None:
            made.config.use_cache, made.config.return_dict = config.use_cache, config.return_dict
        if generation_config is None and (directory / GENERATION).is_file():
            generation_config = GenerationConfig.from_pretrained(directory)
        made.generation_config = generation_config or made.generation_config
        return made.eval()

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        max_shard_size: int | None = None,
        **options: Any,
    ) -> None:
        """What `save_model` writes, among whatever else the directory holds, and how to generate."""
        unknown = sorted(name for name, value in options.items() if value)
        if unknown:
            raise ValueError(f"a mambakit model is saved without {', '.join(unknown)}")
        if getattr(self, "_hf_peft_config_loaded", False):
            raise ValueError("adapters were added to this model; peft.get_peft_model makes one that saves them")
        if not is_main_process:
            return
        model = self.language_model
        if state_dict is not None:
            model = LanguageModel(self.config.model_config, device="meta")
            model.load_state_dict(state_dict, assign=True)
        write_among_others(model, Path(save_directory), max_shard_size)
        self.generation_config.save_pretrained(save_directory)


def register() -> None:
    """Let `AutoConfig` and `AutoModelForCausalLM` know the directories that `save_model` writes."""
    AutoConfig.register(MODEL_TYPE, MambakitConfig, exist_ok=True)
    AutoModelForCausalLM.register(MambakitConfig, MambakitForCausalLM, exist_ok=True)


def present(attention_mask: Tensor | None, x_bsd: Tensor) -> Tensor | None:
    """Which of these tokens are there, or None if all are."""
    if attention_mask is None:
        return None
    rows, length = x_bsd.shape[:2]
    if attention_mask.dim() != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}, expected a flag per token, {(rows, length)}"
        )
    mask_bs = attention_mask[:, attention_mask.shape[1] - length :].bool()
    return None if mask_bs.all() else mask_bs


register()
