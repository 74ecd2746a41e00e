"""Continue prompts: read them in pieces, choose tokens one by one, give each out as it comes."""

import inspect
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.blocks.caches import concat, select
from mambakit.inference.constraints import Constraint, constrained
from mambakit.inference.decoder import make_decoder
from mambakit.inference.prefix_cache import PrefixCache, check_prefix_cache
from mambakit.inference.prompts import Ids, Prompts, Stop, check_language_model, read_prompts, read_stops
from mambakit.inference.sampling import Sampler, check_count, penalise, row_seeds, uniform
from mambakit.inference.speculation import KINDS, Speculation, close, why_not
from mambakit.models.language_model import LanguageModel
from mambakit.ops.backends import check_backend, use_backend


class Stream(Iterator[Tensor]):
    """An iterator over the tokens that follow the prompts, `[batch]` at a time; `mk.stream` is another name for it.

    `ids` is a `[batch, s]` or `[s]` tensor, a list of ids, or a list of prompts of any lengths. `mask_bs` says which of
    a tensor's ids are there (true) and which are padding, on either side. With `cache` the prompts continue what it has
    seen; `prefix_cache` saves reading what earlier prompts began with. Prompts are read on construction,
    `prefill_chunk` tokens at a time.

    `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty` are `Sampler`'s. A row's draws depend on its own
    seed and nothing else: `seed` is one number per row, or one number that gives every row its own.

    A row ends when its new tokens end in one of `stop`, a list of ids and of sequences of ids; these are given out too.
    Afterwards it gives `pad_id`. The iterator ends after `max_new_tokens` tokens, or earlier with the last row.

    `constraint` is the form that every row's text has to have, a JSON schema, `{"regex": ...}` or `{"grammar": ...}`:
    only tokens that go with it are chosen, and a row ends when it is complete. `tokenizer`, one of
    `mambakit.text.tokens`, says what tokens stand for.

    `backend` is how tokens are computed: `"torch"` by torch's operators, `"cpu"` each in one call of the CPU kernels,
    which raises `ValueError` where a model is not made for that, `"auto"` by the fastest that applies.

    `speculate="ngram"` computes several tokens at a time where the text repeats itself, for one prompt; `"auto"` does
    so where it applies. Tokens stay those of `"off"`.

    Gradients are not recorded, but caches are ordinary tensors that later calls may go on from with gradients.
    """

    def __init__(
        self,
        model: LanguageModel,
        ids: Ids,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Stop | None = None,
        seed: int | Sequence[int] | None = None,
        cache: Any = None,
        mask_bs: Tensor | None = None,
        pad_id: int = 0,
        prefill_chunk: int = 512,
        prefix_cache: PrefixCache | None = None,
        backend: str = "auto",
        constraint: dict[str, Any] | None = None,
        tokenizer: Any = None,
        speculate: str = "off",
    ):
        check_count("max_new_tokens", max_new_tokens, least=0)
        check_count("prefill_chunk", prefill_chunk, least=1)
        check_language_model(model)
        if model.backbone.levels:
            raise ValueError("generation is for models without latents: rows of all lengths would share their places")
        if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            raise ValueError(
                "generate takes whole models, and parameters of this one are shares; load a whole copy, one per process"
            )
        check_prefix_cache(prefix_cache)
        if type(pad_id) is not int or abs(pad_id) >= 2**63:
            raise ValueError(f"pad_id is {pad_id!r}, expected a token id")
        self._sampler = Sampler(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
        )
        self._model, self._max_new_tokens, self._pad_id = model, max_new_tokens, pad_id
        self._stops = read_stops(stop, model.config.vocab_size)
        prompts = read_prompts(ids, mask_bs, model.config.vocab_size, model.backbone.embedding.weight.device)
        self._seed_b = row_seeds(seed, prompts.rows)
        self._seen_bw = prompts.seen(model.config.vocab_size) if repetition_penalty is not None else None
        constrained_rows = range(0 if constraint is None else prompts.rows)
        self._constraints = [Constraint(constraint, tokenizer, model.config.vocab_size) for _ in constrained_rows]
        self._given: list[Tensor] = []
        # Only rows that go on, `a`, are computed; the caches of ended ones wait in `_ended` until they are asked for.
        self._row_a = torch.arange(prompts.rows)
        self._ended: list[tuple[Tensor, Any]] = []
        self._ends_a = torch.zeros(prompts.rows, dtype=torch.bool)
        self._pending_a: Tensor | None = None
        """Tokens given out but not yet taken into the cache."""
        check_backend(backend)
        self._backend = backend
        self._speculates = speculates(speculate, model, prompts.rows)
        self._speculation: Speculation | None = None
        self._prompt_ids = prompts.ids_bs[0].tolist() if self._speculates else []
        begun = time.perf_counter()
        # "auto" makes one when the first token is taken in.
        self._decoder = make_decoder(model, backend, prompts.rows) if backend == "cpu" else None
        with torch.no_grad(), use_backend("torch" if backend == "torch" else "auto"):
            if prefix_cache is None:
                x_bd, self._prompt_cache = prefill(model, prompts, cache, prefill_chunk)
            elif cache is not None:
                raise ValueError("a prefix_cache knows prompts from their start; leave it out when continuing a cache")
            else:
                x_bd, self._prompt_cache = prefill_by_prefix(model, prompts, prefix_cache, prefill_chunk)
            self._logits_aw = model.logits(x_bd)
        self._prefill_seconds = time.perf_counter() - begun

    @property
    def tokens(self) -> Tensor:
        """What has been given out so far, `[batch, new]`."""
        if not self._given:
            return self._logits_aw.new_empty(len(self._seed_b), 0, dtype=torch.int64)
        return torch.stack(self._given, 1)

    @property
    def cache(self) -> Any:
        """The cache after the prompts and every token given out so far, each row's up to its own end.

        It continues with the tokens that come next: `generate(model, more_ids, cache=run.cache)`. A token is taken into
        it when the next one is asked for or when this is read, so that the last one costs nothing if nobody reads it.
        """
        self._take_in()
        current = self._prompt_cache
        if current is None:
            assert self._decoder is not None
            current = self._decoder.cache()
        if not self._ended:
            return current
        row_b = torch.cat([row for row, _ in self._ended] + [self._row_a])
        return select(concat([cache for _, cache in self._ended] + [current]), row_b.argsort())

    def __next__(self) -> Tensor:
        if len(self._given) == self._max_new_tokens or bool(self._ends_a.all()):
            raise StopIteration
        with torch.no_grad():
            self._take_in()
            row_a = self._row_a
            seen_aw = None if self._seen_bw is None else self._seen_bw[row_a.to(self._seen_bw.device)]
            uniform_a = uniform(self._seed_b[row_a], len(self._given)) if self._sampler.temperature else None
            own = [self._constraints[row] for row in row_a.tolist()] if self._constraints else []
            may_aw = constrained(self._logits_aw, own)
            if self._speculation is not None and not self._speculation.is_exact:
                penalty = self._sampler.repetition_penalty
                if close(may_aw if seen_aw is None or penalty is None else penalise(may_aw, seen_aw, penalty)):
                    may_aw = constrained(self._speculation.exact(), own)
            chosen_a = self._sampler.choose(may_aw, seen_aw, uniform_a).to(self._logits_aw.device)
            self._give_out(chosen_a)
        return self._given[-1]

    def _give_out(self, chosen_a: Tensor) -> None:
        row_a = self._row_a.to(chosen_a.device)
        if self._seen_bw is not None:
            self._seen_bw[row_a, chosen_a] = True
        self._given.append(chosen_a.new_full((len(self._seed_b),), self._pad_id).index_copy_(0, row_a, chosen_a))
        self._pending_a = chosen_a
        for stop_s in self._stops:
            if len(stop_s) <= len(self._given):
                latest_as = torch.stack(self._given[-len(stop_s) :], 1)[row_a].cpu()
                self._ends_a |= (latest_as == stop_s).all(1)
        if self._constraints:
            pairs = zip(self._row_a.tolist(), chosen_a.tolist(), strict=True)
            self._ends_a |= torch.tensor([self._constraints[row].take(token) for row, token in pairs])

    def _take_in(self) -> None:
        """Bring cache and logits up to the tokens given out, and let go of the rows that ended with them."""
        if self._pending_a is None:
            return
        if self._decoder is None:
            self._decoder = make_decoder(self._model, self._backend, len(self._row_a))
        if self._speculates and not isinstance(self._decoder, Speculation):
            greedy, seconds = self._sampler.temperature == 0, self._prefill_seconds
            self._speculation = Speculation(
                self._model, self._decoder, self._prompt_ids, backend=self._backend, greedy=greedy, seconds=seconds
            )
            self._decoder = self._speculation
        with torch.no_grad():
            if self._prompt_cache is not None:
                self._decoder.load(self._prompt_cache)
                self._prompt_cache = None
            self._logits_aw = self._decoder.step(self._pending_a)
        self._pending_a = None
        if self._ends_a.any():
            ended_e, on_a = self._ends_a.nonzero()[:, 0], (~self._ends_a).nonzero()[:, 0]
            cache = self._decoder.cache()
            self._ended.append((self._row_a[ended_e], select(cache, ended_e)))
            self._decoder.load(select(cache, on_a))
            self._logits_aw = self._logits_aw[on_a.to(self._logits_aw.device)]
            self._row_a, self._ends_a = self._row_a[on_a], self._ends_a[on_a]


def speculates(asked: str, model: LanguageModel, rows: int) -> bool:
    """Whether guesses are made: those asked for by name are, or it is a ValueError."""
    if asked not in KINDS:
        raise ValueError(f"speculate is {asked!r}, expected one of {', '.join(map(repr, KINDS))}")
    reason = None if asked == "off" else why_not(model, rows)
    if asked == "ngram" and reason is not None:
        raise ValueError(f'speculate="ngram": {reason}; "auto" leaves it out')
    return asked != "off" and reason is None


def prefill(model: LanguageModel, prompts: Prompts, cache: Any, chunk: int) -> tuple[Tensor, Any]:
    """The residual stream at each prompt's last token, and the cache after it, with the memory of one chunk."""
    x_bd, present_bs = None, prompts.present_bs
    row_b = torch.arange(prompts.rows, device=prompts.ids_bs.device)
    for start in range(0, prompts.ids_bs.shape[1], chunk):
        mask_bs = present_bs[:, start : start + chunk]
        whole = bool(mask_bs.all())
        piece_bsd = model.embed(prompts.ids_bs[:, start : start + chunk])
        piece_bsd, cache = model.backbone(piece_bsd, cache, mask_bs=None if whole else mask_bs)
        last_bd = piece_bsd[row_b, mask_bs.sum(1) - 1]
        x_bd = last_bd if x_bd is None else torch.where(mask_bs.any(1, keepdim=True), last_bd, x_bd)
    assert x_bd is not None
    return x_bd, cache


def prefill_by_prefix(model: LanguageModel, prompts: Prompts, known: PrefixCache, chunk: int) -> tuple[Tensor, Any]:
    """`prefill`, row by row, each from its longest known prefix; later rows may continue from earlier ones."""
    served = known.serve(model)
    rows = zip(prompts.ids_bs, prompts.length_b.tolist(), strict=True)
    ends = [prefill_one(model, ids_s[:length], known, served, chunk) for ids_s, length in rows]
    return torch.cat([x_1d for x_1d, _ in ends]), concat([cache for _, cache in ends])


def prefill_one(model: LanguageModel, ids_s: Tensor, known: PrefixCache, served: int, chunk: int) -> tuple[Tensor, Any]:
    ids = array("i", ids_s.tolist())
    plan = known.plan(served, ids)
    start, x_1d, cache = (0, None, None) if plan.prefix is None else plan.prefix[:3]
    for end in plan.pieces(chunk):
        x_1sd, cache = model.backbone(model.embed(ids_s[None, start:end]), cache)
        x_1d, start = x_1sd[:, -1], end
        known.keep(served, ids[:end], x_1d, cache, passing=end not in plan.cuts)
    assert x_1d is not None
    return x_1d, cache


def generate(model: LanguageModel, ids: Ids, **options: Any) -> Tensor:
    """The tokens that follow the prompts, `[batch, new]`: all that `Stream` gives with the same arguments."""
    run = Stream(model, ids, **options)
    for _ in run:
        pass
    return run.tokens


generate.__signature__ = inspect.signature(Stream).replace(return_annotation=Tensor)  # type: ignore[attr-defined]
stream = Stream
