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
from tqdm import tqdm

from mambakit.checkpoints import load_model
from mambakit.checkpoints.files import DTYPES
from mambakit.inference import Engine, Request
from mambakit.text.tokens import read_tokens

AUTO_BATCH = 16
LM_EVAL_DEVICE = "cuda:0"
"""What lm-eval asks for where nobody said anything, so it cannot be insisted on."""
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")
GENERATION = {"until", "do_sample", "temperature", "max_gen_toks", "max_new_tokens", *SAMPLING}
Item = TypeVar("Item")
Key = TypeVar("Key")


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
                read = self.run({context: {"ids": context, "keep_state": True} for context in contexts})
                asked = [place for context in contexts for place in places[context]]
                asked.sort(key=lambda place: -len(requests[place][2]))
                told = self.run({place: following(*requests[place][1:], read) for place in asked})
                for place, request in told.items():
                    results[place] = score(request)
                    if requests[place][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[place][0], results[place])
                bar.update(len(told))
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
        """The texts that follow, each up to the first of its stops or to where the document ends."""
        encoded = [self.tok_encode(request.args[0]) or [self.eot_token_id] for request in requests]
        order = sorted(range(len(requests)), key=lambda place: -len(encoded[place]))
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            asked = {place: {"ids": encoded[place], **self.options(requests[place].args[1])} for place in order}
            answers = self.run(asked, lambda request: bar.update(request.done))
        for place, answer in answers.items():
            self.cache_hook.add_partial("generate_until", requests[place].args, answer.text)
        return [answers[place].text for place in range(len(requests))]

    def options(self, settings: dict[str, Any]) -> dict[str, Any]:
        """A request's settings in the words of the engine."""
        unknown = sorted(name for name, value in settings.items() if name not in GENERATION and value is not None)
        if unknown:
            raise ValueError(f"generation settings {', '.join(unknown)} are unknown; mambakit has {sorted(GENERATION)}")
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else [text for text in until if text]
        samples, temperature = settings.get("do_sample"), settings.get("temperature")
        if temperature is None or samples is False:
            temperature = 1.0 if samples else 0.0
        end = self.tokens.end
        return {
            "max_new_tokens": settings.get("max_gen_toks") or settings.get("max_new_tokens") or self.max_gen_toks,
            "temperature": temperature,
            "stop": [*([end] if end < self.model.config.vocab_size else []), *until],
            **{name: settings.get(name) for name in SAMPLING},
        }

    def run(self, asked: dict[Key, dict[str, Any]], on_token: Any = None) -> dict[Key, Request]:
        """Requests through an engine, by their names; those that ask for no tokens get none."""
        engine = Engine(
            self.model,
            self.batch_size,
            tokenizer=self.tokens,
            prefill_chunk=self.chunk,
            prefill_rows=self.batch_size,
        )
        added = {name: engine.add(**{"max_new_tokens": 0, **one}, on_token=on_token) for name, one in asked.items()}
        engine.run()
        for request in added.values():
            if request.error is not None:
                raise request.error
        return added


def following(context: list[int], continuation: list[int], read: dict[tuple[int, ...], Request]) -> dict[str, Any]:
    """Ask for the log-probabilities of a continuation, whose context has been read."""
    state = read[tuple(context)].state
    return {"ids": [*context, *continuation], "echo": len(context), "logprobs": 1, "state": state}


def score(request: Request) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether every token of it is the likeliest."""
    told = request.prompt_logprobs
    return sum(one.logprob for one in told), all(one.logprob >= max(one.likeliest.values()) for one in told)


def batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


if __name__ == "__main__":
    cli_evaluate()
