"""Continue prompts: a stream is a few requests that are read and decoded together, by the parts of an engine."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mambakit.arguments import check_count, shown
from mambakit.blocks.caches import concat, select
from mambakit.inference.constraints import Constraint
from mambakit.inference.decoder import Decoder, check_states, make_decoder
from mambakit.inference.engine import check_model, reading_backend
from mambakit.inference.prefix_cache import PrefixCache, check_prefix_cache
from mambakit.inference.prompts import Ids, Stop, read_prompts, read_stops
from mambakit.inference.reading import Known, Reading
from mambakit.inference.requests import Request, Stops
from mambakit.inference.rows import Group, choose
from mambakit.inference.sampling import Sampler, row_seeds
from mambakit.inference.speculation import Speculation, make_source
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
    Afterwards it gives `pad_id`. The iterator ends after `max_new_tokens` tokens, or earlier with the last row; where
    something else ends every row, `max_new_tokens` may be None.

    `constraint` is the form that every row's text has to have, a JSON schema, `{"regex": ...}` or `{"grammar": ...}`:
    only tokens that go with it are chosen, and a row ends when it is complete. `tokenizer`, one of
    `mambakit.text.tokens`, says what tokens stand for.

    `backend` is how tokens are computed: `"torch"` by torch's operators, `"cpu"` each in one call of the CPU kernels,
    which raises `ValueError` where a model is not made for that, `"auto"` by the fastest that applies.

    `speculate="ngram"` computes several tokens at a time where the text repeats itself, for one prompt; `"auto"` does
    so where it applies. `draft`, a smaller model of the same tokens, guesses what comes next itself. Tokens stay those
    of `"off"`.

    `states="bfloat16"` keeps the states of Mamba-2 in half the memory between tokens, which is most of what many rows
    read and write; a model that is not decoded in one call, or has other states, raises `ValueError`. See
    docs/generation.md for how far they drift. It is not combined with guessing ahead.

    Gradients are not recorded, but caches are ordinary tensors that later calls may go on from with gradients.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> run = mk.stream(model, [72, 105], max_new_tokens=4, seed=1)
        >>> for token_b in run:
        ...     print(token_b.shape)
        torch.Size([1])
        torch.Size([1])
        torch.Size([1])
        torch.Size([1])
        >>> more_bs = mk.generate(model, [33], max_new_tokens=2, cache=run.cache)
    """

    def __init__(
        self,
        model: LanguageModel,
        ids: Ids,
        *,
        max_new_tokens: int | None,
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
        draft: LanguageModel | None = None,
        states: str = "float32",
    ):
        check_count("max_new_tokens", max_new_tokens, least=0, optional=True)
        check_count("prefill_chunk", prefill_chunk, least=1)
        check_model(model)
        check_backend(backend)
        check_prefix_cache(prefix_cache)
        check_states(model, backend, states)
        if states != "float32" and (speculate != "off" or draft is not None):
            raise ValueError(f'states="{states}": tokens are computed one by one then; leave out speculate and draft')
        if type(pad_id) is not int or abs(pad_id) >= 2**63:
            raise ValueError(f"pad_id is {shown(pad_id)}, expected a token id")
        if cache is not None and prefix_cache is not None:
            raise ValueError("a prefix_cache knows prompts from their start; leave it out when continuing a cache")
        sampler = Sampler(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
        )
        self._model, self._backend, self._states, self._pad_id = model, backend, states, pad_id
        vocabulary, self._max_new_tokens = model.config.vocab_size, max_new_tokens
        prompts, endings = read_prompts(ids, mask_bs, vocabulary), read_stops(stop, vocabulary)
        if max_new_tokens is None and not endings and constraint is None:
            raise ValueError("max_new_tokens is None and nothing else ends the text; give max_new_tokens or a stop")
        self._requests = [
            Request(
                prompt,
                max_new_tokens=max_new_tokens,
                sampler=sampler,
                seed=own_seed,
                stops=Stops(endings),
                constraint=None
                if constraint is None
                else Constraint(constraint, tokenizer, vocabulary, max_new_tokens),
                keep_state=True,
            )
            for prompt, own_seed in zip(prompts, row_seeds(seed, len(prompts)).tolist(), strict=True)
        ]
        self._going = self._requests
        """Those that get another token; only they are computed."""
        self._ended: dict[Request, Any] = {}
        """Those that ended before others, with their caches."""
        self._given: list[Tensor] = []
        self._is_behind = False
        """Whether tokens are given out that are not in the cache yet."""
        self._source = make_source(speculate, draft, model, prompts, backend)
        self._speculation: Speculation | None = None
        self._group: Group | None = None
        # "auto" makes one when the first token is taken in.
        self._decoder = make_decoder(model, backend, states) if backend == "cpu" else None
        with torch.no_grad(), use_backend(reading_backend(backend)):
            if prefix_cache is None:
                x_bd, self._prompt_cache = Reading(model, self._requests, prefill_chunk, cache=cache).finish()
            else:
                # Row by row, so that later ones may go on from earlier ones.
                known = Known(prefix_cache, model, passing=True)
                ends = [Reading(model, [one], prefill_chunk, known=known).finish() for one in self._requests]
                x_bd, self._prompt_cache = torch.cat([x_1d for x_1d, _ in ends]), concat([cache for _, cache in ends])
            self._logits_aw = model.logits(x_bd)
        self._best: list[int] | None = None
        """The likeliest tokens by these logits, where they are known."""

    @property
    def tokens(self) -> Tensor:
        """What has been given out so far, `[batch, new]`."""
        if not self._given:
            return self._logits_aw.new_empty(len(self._requests), 0, dtype=torch.int64)
        return torch.stack(self._given, 1)

    @property
    def cache(self) -> Any:
        """The cache after the prompts and every token given out so far, each row's up to its own end.

        It continues with the tokens that come next: `generate(model, more_ids, cache=run.cache)`. A token is taken into
        it when the next one is asked for or when this is read, so that the last one costs nothing if nobody reads it.
        """
        self._take_in()
        if self._group is None:
            return self._prompt_cache
        if not self._ended:
            return self._group.cache()
        rows = [*self._ended, *self._group.requests]
        every = concat([*self._ended.values(), self._group.cache()])
        return select(every, [rows.index(request) for request in self._requests])

    def __next__(self) -> Tensor:
        if len(self._given) == self._max_new_tokens or not self._going:
            raise StopIteration
        self._take_in()
        # Logits are recorded nowhere: they were made without gradients.
        for request, reason in zip(self._going, choose(self._going, self._logits_aw, self._best), strict=True):
            if request.error is not None:
                self._going = []
                raise request.error
            if reason is not None:
                request.finish(reason)
        self._is_behind, count = True, len(self._given) + 1
        newest = [one.tokens[-1] if len(one.tokens) == count else self._pad_id for one in self._requests]
        self._given.append(torch.tensor(newest, device=self._logits_aw.device))
        if any(request.done for request in self._going):
            self._going = [request for request in self._going if not request.done]
        return self._given[-1]

    def _take_in(self) -> None:
        """Bring cache and logits up to the tokens given out, and let go of the rows that ended before others."""
        if not self._is_behind:
            return
        with torch.no_grad():
            group = self._group = self._group or self._make_group()
            group.take_in()
            if len(self._going) < len(group.requests) and self._going:
                for request in [request for request in group.requests if request.done]:
                    self._ended[request] = group.row(request)
                    group.leave(request)
                self._going = list(group.requests)
        self._logits_aw, self._best, self._is_behind = group.logits_bw, group.best, False

    def _make_group(self) -> Group:
        decoder, source = self._decoder or make_decoder(self._model, self._backend, self._states), self._source
        if source is not None and isinstance(decoder, Decoder):
            self._speculation = Speculation(decoder, lambda ids: source)
        group = Group(decoder, speculation=self._speculation)
        group.load(self._requests, self._prompt_cache)
        self._prompt_cache = self._decoder = None
        return group


def generate(model: LanguageModel, ids: Ids, **options: Any) -> Tensor:
    """The tokens that follow the prompts, `[batch, new]`: all that `Stream` gives with the same arguments.

    Examples:
        >>> block = mk.Mamba2Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> mk.generate(model, [[72, 105], [87, 104, 121]], max_new_tokens=8, temperature=0.8, seed=1).shape
        torch.Size([2, 8])
    """
    run = Stream(model, ids, **options)
    for _ in run:
        pass
    return run.tokens


generate.__signature__ = inspect.signature(Stream).replace(return_annotation=Tensor)  # type: ignore[attr-defined]
stream = Stream
