"""States of decoding, sampling, and the loop of both."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mambakit.compat.gpu_only import gpu_only
from mambakit.inference.sampling import Sampler

__all__ = ["GenerationMixin", "InferenceParams", "decode", "sample"]

__getattr__ = gpu_only(__name__, graphs="DecodingCGCache update_graph_cache capture_graph")


@dataclass
class InferenceParams:
    """What decoding has seen: `seqlen_offset` tokens, and by layer the states they left."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Back to no tokens. States stay allocated; a prompt starts them afresh."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


@dataclass
class GenerationOutput:
    sequences: Tensor
    """The prompt and what follows, (b, length)."""
    scores: tuple[Tensor, ...] | None
    """The logits that each new token was chosen from, (b, vocabulary) each."""


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, min_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """The next ids (b) from logits (b, w). `top_k=1` is greedy, 0 no limit; `top_p=0` and `min_p=0` are none either."""
    if top_k == 1:
        return logits.argmax(dim=-1)
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p = {top_p} has to lie between 0 and 1")
    # As officially, min_p counts only where top_k does not.
    chosen = Sampler(top_k=top_k or None, top_p=top_p or None, min_p=None if top_k else min_p or None)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return torch.multinomial(torch.softmax(chosen.filtered(wide), dim=-1), num_samples=1)[:, 0]


def modify_logits_for_min_p_filtering(logits: Tensor, min_p: float) -> None:
    """Logits below `min_p` become minus infinity, in place; none with a `min_p` outside of (0, 1)."""
    if 0.0 < min_p < 1.0:
        logits.masked_fill_(logits < min_p, float("-inf"))


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """All but the `top_k` largest become minus infinity, in place."""
    logits.masked_fill_(logits < torch.topk(logits, top_k)[0][..., -1:], float("-inf"))


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """The smallest ones with a probability of at most `1 - top_p` together become minus infinity, in place."""
    if 0.0 < top_p < 1.0:
        ordered, order = torch.sort(logits)
        dropped = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        logits.masked_fill_(dropped.scatter(1, order, dropped), float("-inf"))


def modify_logit_for_repetition_penalty(
    logits: Tensor, prev_output_tokens: Tensor, repetition_penalty: float = 1.0
) -> Tensor:
    """The logits of ids that came before are made smaller, in place."""
    if repetition_penalty == 1.0:
        return logits
    score = torch.gather(logits, 1, prev_output_tokens)
    score = torch.where(score < 0, score * repetition_penalty, score / repetition_penalty)
    return logits.scatter_(1, prev_output_tokens, score)


@torch.inference_mode()
def decode(
    input_ids: Tensor,
    model: Any,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    cg: bool = False,
    enable_timing: bool = False,
    output_scores: bool = False,
    streamer: Any = None,
) -> GenerationOutput:
    """Continue prompts (b, s) to `max_length` ids, or until all of a step are `eos_token_id`.

    `teacher_outputs` (b, length) are taken as far as they go instead of samples. `cg` (CUDA graphs) has no effect.
    """
    start = time.perf_counter()
    if streamer is not None:
        streamer.put(input_ids.cpu())
    params = InferenceParams(max_seqlen=max_length, max_batch_size=len(input_ids))
    sequences, new, scores = input_ids, input_ids, []
    while True:
        logits = model(new, inference_params=params, num_last_tokens=1).logits[:, -1, :vocab_size]
        if output_scores:
            scores.append(logits.clone())
        params.seqlen_offset += new.shape[1]
        if teacher_outputs is not None and params.seqlen_offset < teacher_outputs.shape[1]:
            new = teacher_outputs[:, params.seqlen_offset, None]
        else:
            logits = modify_logit_for_repetition_penalty(logits.clone(), sequences, repetition_penalty)
            new = sample(logits, top_k, top_p, min_p, temperature)[:, None]
        sequences = torch.cat((sequences, new), dim=1)
        if streamer is not None:
            streamer.put(new.cpu())
        ended = eos_token_id is not None and bool((new == eos_token_id).all())
        if ended or params.seqlen_offset >= max_length - 1:
            break
    if streamer is not None:
        streamer.end()
    if enable_timing:
        print(f"Prompt processing + decoding time: {1000 * (time.perf_counter() - start):.0f}ms")
    return GenerationOutput(sequences, tuple(scores))


class GenerationMixin:
    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> Any:
        """`decode` with this model: ids, or with `return_dict_in_generate` an object of `sequences` and `scores`."""
        options = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
        output = decode(input_ids, self, max_length, output_scores=output_scores, **options, **kwargs)
        if not output_scores:
            output.scores = None
        return output if return_dict_in_generate else output.sequences
