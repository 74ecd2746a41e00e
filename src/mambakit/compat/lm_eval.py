"""mambakit's models for lm-eval, EleutherAI's evaluation harness: `--model mambakit --model_args pretrained=DIR`.

lm-eval knows models of other packages once they are imported. `python -m mambakit.compat.lm_eval` is its command line
with this one; in a program, importing this module registers it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

# lm-eval is an extra, which not every environment has.
from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from torch import Tensor
from tqdm import tqdm

from mambakit.blocks.caches import select
from mambakit.checkpoints import load_model
from mambakit.checkpoints.files import DTYPES
from mambakit.inference.generation import Stream, prefill
from mambakit.inference.prompts import read_prompts
from mambakit.models.language_model import LanguageModel
from mambakit.text.tokens import Tokens, read_tokens

AUTO_BATCH = 16
LM_EVAL_DEVICE = "cuda:0"
"""What lm-eval asks for where nobody said anything, so it cannot be insisted on."""
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")
GENERATION = {"until", "do_sample", "temperature", "max_gen_toks", "max_new_tokens", *SAMPLING}
Item = TypeVar("Item")


@register_model("mambakit")
class MambakitLM(TemplateLM):
    """Texts of any length, each as a whole: a state has no window, so nothing is cut off.

    `pretrained` is a directory that `load_model` reads, and `tokenizer` is "bytes" or a `tokenizer.json`, by default
    what the directory says. `batch_size` texts are read together, `chunk` tokens at a time; neither changes results
    beyond rounding. With `add_bos_token` every text begins with the token that stands between documents.
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        chunk: int = 512,
        max_gen_toks: int = 256,
        add_bos_token: bool = False,
        a_activation: str | None = None,
        norm_group_size: int | None = None,
    ):
        super().__init__()
        known = {str(kind).removeprefix("torch."): kind for kind in DTYPES}
        if dtype != "auto" and dtype not in known:
            raise ValueError(f"dtype = {dtype!r} is not one of auto, {', '.join(known)}")
        if batch_size == "auto":
            batch_size = max_batch_size or AUTO_BATCH
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f'batch_size = {batch_size!r} has to be a positive number or "auto"')
        if device == LM_EVAL_DEVICE and not torch.cuda.is_available():
            device = "cpu"
        choices = {"a_activation": a_activation, "norm_group_size": norm_group_size}
        self.tokens = read_tokens(Path(pretrained), tokenizer)
        self.model = load_model(pretrained, device=device, dtype=known.get(dtype), **choices).eval()
        if self.tokens.vocab_size > self.model.config.padded_vocab_size:
            vocab_size = self.model.config.vocab_size
            raise ValueError(f"the tokenizer has {self.tokens.vocab_size} tokens, but the model knows {vocab_size}")
        self._device = self.model.lm_head.weight.device
        self.batch_size, self.chunk = int(batch_size), chunk
        self.max_gen_toks, self.add_bos_token = max_gen_toks, add_bos_token

    @property
    def eot_token_id(self) -> int:
        end = self.tokens.end
        if end >= self.model.config.vocab_size:
            raise ValueError("this task has texts without context, and the model has no token to start a document with")
        return end

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        starts = self.add_bos_token if add_special_tokens is None else add_special_tokens and self.add_bos_token
        return [self.eot_token_id] * starts + self.tokens.encode(string.encode())

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """A context that several continuations share, as the answers to a question do, is read once."""
        empty = [text for text, _, continuation in requests if not continuation]
        if empty:
            raise ValueError(f"nothing to tell: the continuation of {empty[0]} has no tokens")
        places: dict[tuple[int, ...], list[int]] = {}
        for place, (_, context, _) in enumerate(requests):
            places.setdefault(tuple(context), []).append(place)
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for contexts in batches(sorted(places, key=len, reverse=True), self.batch_size):
                x_bd, cache = self.read(contexts)
                asked = [(row, place) for row, context in enumerate(contexts) for place in places[context]]
                asked.sort(key=lambda pair: -len(requests[pair[1]][2]))
                for part in batches(asked, self.batch_size):
                    rows = [row for row, _ in part]
                    continuations = [requests[place][2] for _, place in part]
                    scores = follow(self.model, x_bd[rows], select(cache, rows), continuations, self.chunk)
                    for (_, place), score in zip(part, scores, strict=True):
                        results[place] = score
                        if requests[place][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[place][0], score)
                    bar.update(len(part))
        return [results[place] for place in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Each text from a document's start, as one."""
        texts = [request.args[0] for request in requests]
        asked = [(None, [self.eot_token_id], self.tokens.encode(text.encode())) for text in texts]
        scores = [score for score, _ in self._loglikelihood_tokens(asked, disable_tqdm)]
        for text, score in zip(texts, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score)
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(repr(sorted(request.args[1].items())), []).append(place)
        results: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for alike in places.values():
                encoded = {place: self.tok_encode(requests[place].args[0]) or [self.eot_token_id] for place in alike}
                for part in batches(sorted(alike, key=lambda place: -len(encoded[place])), self.batch_size):
                    texts = self.generate([encoded[place] for place in part], requests[part[0]].args[1])
                    for place, text in zip(part, texts, strict=True):
                        results[place] = text
                        self.cache_hook.add_partial("generate_until", requests[place].args, text)
                    bar.update(len(part))
        return [results[place] for place in range(len(requests))]

    def generate(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        """The texts that follow, each up to the first of its stops or to where the document ends."""
        unknown = sorted(name for name, value in settings.items() if name not in GENERATION and value is not None)
        if unknown:
            raise ValueError(f"generation settings {', '.join(unknown)} are unknown; mambakit has {sorted(GENERATION)}")
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else [text for text in until if text]
        samples, temperature = settings.get("do_sample"), settings.get("temperature")
        if temperature is None or samples is False:
            temperature = 1.0 if samples else 0.0
        sampling: dict[str, Any] = {name: settings.get(name) for name in SAMPLING}
        stream = Stream(
            self.model,
            prompts,
            max_new_tokens=settings.get("max_gen_toks") or settings.get("max_new_tokens") or self.max_gen_toks,
            temperature=temperature,
            stop=stop_ids(self.tokens, until, self.model.config.vocab_size),
            prefill_chunk=self.chunk,
            **sampling,
        )
        rows: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        for token_b in stream:
            for row, token in enumerate(token_b.tolist()):
                if not ended[row]:
                    rows[row].append(token)
                    ended[row] = token == self.tokens.end or any(
                        text in self.tokens.decode(rows[row]) for text in until
                    )
            if all(ended):
                break
        return [before_any(until, self.tokens.decode(row)) for row in rows]

    @torch.no_grad()
    def read(self, contexts: Sequence[Sequence[int]]) -> tuple[Tensor, Any]:
        prompts = read_prompts(contexts, None, self.model.config.vocab_size, self._device)
        return prefill(self.model, prompts, None, self.chunk)


@torch.no_grad()
def follow(
    model: LanguageModel, x_bd: Tensor, cache: Any, continuations: list[list[int]], chunk: int
) -> list[tuple[float, bool]]:
    """The log-likelihood of each continuation, and whether every token of it is the likeliest.

    `x_bd` and `cache` are those after the tokens before. What fills up shorter continuations comes after their end and
    so has no effect.
    """
    longest = max(map(len, continuations))
    filled = [continuation + [0] * (longest - len(continuation)) for continuation in continuations]
    target_bs = torch.tensor(filled, device=x_bd.device)
    length_b = torch.tensor([len(continuation) for continuation in continuations], device=x_bd.device)
    present_bs = torch.arange(longest, device=x_bd.device) < length_b[:, None]
    total_b = torch.zeros(len(continuations), dtype=torch.float64)
    greedy_b = torch.ones(len(continuations), dtype=torch.bool)
    for start in range(0, longest, chunk):
        here_bs, asked_bs = target_bs[:, start : start + chunk], present_bs[:, start : start + chunk]
        # After the last token of all, nothing is asked for.
        taken_bs = here_bs if start + chunk < longest else here_bs[:, :-1]
        before_bsd = x_bd[:, None]
        if taken_bs.shape[1]:
            x_bsd, cache = model.backbone(model.embed(taken_bs), cache)
            before_bsd = torch.cat([before_bsd, x_bsd], 1)[:, : here_bs.shape[1]]
            x_bd = x_bsd[:, -1]
        row_N = asked_bs.nonzero()[:, 0].cpu()
        logits_Nw, target_N = model.logits(before_bsd[asked_bs]), here_bs[asked_bs]
        wide = torch.promote_types(logits_Nw.dtype, torch.float32)
        told_N = torch.log_softmax(logits_Nw, -1, dtype=wide).gather(1, target_N[:, None])[:, 0]
        total_b.index_add_(0, row_N, told_N.cpu().double())
        greedy_b[row_N[(logits_Nw.argmax(-1) != target_N).cpu()]] = False
    return list(zip(total_b.tolist(), greedy_b.tolist(), strict=True))


def stop_ids(tokens: Tokens, until: list[str], vocab_size: int) -> list[int | list[int]]:
    """What ends a row at once: the document's end, and stops that these tokens are sure to write."""
    ends: list[int | list[int]] = [tokens.end] if tokens.end < vocab_size else []
    encoded = [(text, tokens.encode(text.encode())) for text in until]
    return ends + [ids for text, ids in encoded if ids and tokens.decode(ids) == text]


def before_any(until: list[str], text: str) -> str:
    for stop in until:
        text = text.split(stop)[0]
    return text


def batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


if __name__ == "__main__":
    cli_evaluate()
