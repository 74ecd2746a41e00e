"""Generation: batches, pieces, caches and streams change nothing; draws, filters and stops do what they say."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from blocks import CONFIGS
from calls import Wrapped
from mambakit import LanguageModel, ModelConfig
from mambakit.inference.engine import Engine
from mambakit.inference.generation import generate, stream
from mambakit.inference.prefix_cache import PrefixCache
from mambakit.inference.sampling import Sampler, draw, penalise, row_seeds, uniform

FAMILIES = ("mamba1", "mamba2", "mamba3", "mamba2-learned", "mamba3-quaternion")
VOCABULARY = 50
LENGTHS = (1, 50, 7, 2, 23, 16, 3, 31)
FILTERS = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
]


def make_model(name: str = "mamba2", dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Two layers whose next token depends on all they have read, and seldom repeats the last one."""
    torch.manual_seed(1)
    config = ModelConfig(block=CONFIGS[name], n_layer=2, vocab_size=VOCABULARY, tie_embeddings=False)
    model = LanguageModel(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return model


@pytest.fixture(params=FAMILIES)
def model(request) -> LanguageModel:
    return make_model(request.param)


def make_prompts(lengths=LENGTHS, seed: int = 0) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=make) for length in lengths]


def padded(prompts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Prompts as one tensor with tokens that mean something else as padding, and the mask that says so."""
    longest = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), longest), 9), torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        where = slice(longest - len(prompt), None) if side == "left" else slice(None, len(prompt))
        ids[row, where], mask[row, where] = prompt, True
    return ids, mask


def slowly(model: LanguageModel, prompt: Tensor, new: int) -> list[int]:
    """Greedy generation that reads everything again for every token."""
    ids = prompt.tolist()
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_is_the_most_likely_token_each_time(model):
    prompts = make_prompts((1, 6, 13))
    want = [slowly(model, prompt, 12) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=12, temperature=0).tolist() == want
    assert len({tuple(row) for row in want}) == 3, "the prompts have to matter"


@pytest.mark.parametrize("options", [{"temperature": 0}, *FILTERS], ids=str)
def test_batches_equal_one_by_one(model, options):
    prompts, seeds = make_prompts(), list(range(len(LENGTHS)))
    together = generate(model, prompts, max_new_tokens=20, seed=seeds, **options)
    alone = [
        generate(model, p[None], max_new_tokens=20, seed=[s], **options) for p, s in zip(prompts, seeds, strict=True)
    ]
    assert together.shape == (len(prompts), 20)
    assert torch.equal(together, torch.cat(alone))


def test_every_length_to_50(model):
    prompts = make_prompts(range(1, 51))
    together = generate(model, prompts, max_new_tokens=5, temperature=0, prefill_chunk=16)
    alone = [generate(model, prompt, max_new_tokens=5, temperature=0) for prompt in prompts]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_named_by_a_mask(model, side):
    prompts = make_prompts()
    ids, mask = padded(prompts, side)
    options = {"max_new_tokens": 8, "seed": 3}
    assert torch.equal(generate(model, ids, mask_bs=mask, **options), generate(model, prompts, **options))


def test_forms_of_one_prompt():
    model, (prompt,) = make_model(), make_prompts((9,))
    forms = [prompt, prompt[None], prompt.int(), prompt.tolist(), [prompt], [prompt.tolist()], tuple(prompt.tolist())]
    results = [generate(model, form, max_new_tokens=6, seed=2) for form in forms]
    assert results[0].shape == (1, 6)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_prefill_in_pieces_equals_whole(model, chunk):
    prompts = make_prompts()
    whole = stream(model, prompts, max_new_tokens=10, temperature=0, prefill_chunk=1000)
    pieces = stream(model, prompts, max_new_tokens=10, temperature=0, prefill_chunk=chunk)
    assert torch.allclose(whole._logits_aw, pieces._logits_aw, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.stack(list(whole), 1), torch.stack(list(pieces), 1))


def test_prefill_holds_one_piece_at_a_time(monkeypatch):
    model, lengths = make_model(), []
    embed, logits = model.embed, model.logits
    monkeypatch.setattr(model, "embed", lambda ids: (lengths.append(ids.shape[1]), embed(ids))[1])
    shapes = []
    monkeypatch.setattr(model, "logits", lambda x: (shapes.append(tuple(x.shape)), logits(x))[1])
    stream(model, make_prompts((50, 33)), max_new_tokens=1, prefill_chunk=16)
    assert lengths == [16, 16, 16, 2], "the prompt is read in pieces"
    assert shapes == [(2, 8)], "logits are computed for the last token only"


def test_continue_from_a_cache(model):
    first, second = make_prompts((5, 11, 2)), make_prompts((3, 1, 8), seed=1)
    both = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    want = generate(model, both, max_new_tokens=9, temperature=0)
    cache = stream(model, first, max_new_tokens=0).cache
    assert torch.equal(generate(model, second, max_new_tokens=9, temperature=0, cache=cache), want)


@pytest.mark.parametrize("taken", [0, 1, 4, 9])
def test_stream_equals_generate_and_its_cache_continues(model, taken):
    prompts, more = make_prompts((4, 17)), make_prompts((3, 3), seed=1)
    want = generate(model, prompts, max_new_tokens=9, seed=5)
    run = stream(model, prompts, max_new_tokens=9, seed=5)
    given = [next(run) for _ in range(taken)]
    assert run.tokens.shape == (2, taken)
    assert all(torch.equal(token, want[:, i]) for i, token in enumerate(given))
    read = [torch.cat([p, row, m]) for p, row, m in zip(prompts, run.tokens, more, strict=True)]
    after = generate(model, more, max_new_tokens=6, temperature=0, cache=run.cache)
    assert torch.equal(after, generate(model, read, max_new_tokens=6, temperature=0))
    assert [token.tolist() for token in run] == want[:, taken:].T.tolist(), (
        "reading the cache leaves the stream as it was"
    )
    assert torch.equal(run.tokens, want)


def test_caches_of_rows_end_with_their_rows(model):
    prompts, more = make_prompts((4, 17, 9)), make_prompts((3, 3, 3), seed=1)
    free = generate(model, prompts, max_new_tokens=12, seed=5)
    run = stream(model, prompts, max_new_tokens=12, seed=5, stop=[int(free[0, 3]), free[1, 6:9].tolist()])
    list(run)
    ends = [end_of(row.tolist(), [[int(free[0, 3])], free[1, 6:9].tolist()]) for row in free]
    assert ends[0] != ends[1] < 12 > ends[0], "two rows have to stop at different tokens"
    read = [torch.cat([p, row[:end], m]) for p, row, end, m in zip(prompts, run.tokens, ends, more, strict=True)]
    after = generate(model, more, max_new_tokens=6, temperature=0, cache=run.cache)
    assert torch.equal(after, generate(model, read, max_new_tokens=6, temperature=0))


def end_of(tokens: list[int], stops: list[list[int]]) -> int:
    """How many tokens a row has when the first stop is complete."""
    for count in range(1, len(tokens) + 1):
        if any(len(stop) <= count and tokens[count - len(stop) : count] == stop for stop in stops):
            return count
    return len(tokens)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_stops(model, length):
    prompts = make_prompts()
    free = generate(model, prompts, max_new_tokens=25, seed=5)
    stops = [free[0, 4 : 4 + length].tolist(), free[3, 10 : 10 + length].tolist(), [0] * 30]
    ends = [end_of(row.tolist(), stops) for row in free]
    got = generate(model, prompts, max_new_tokens=25, seed=5, stop=stops, pad_id=77)
    assert min(ends) < 25, "some row has to stop"
    assert got.shape[1] == max(ends)
    for row, end in enumerate(ends):
        assert got[row].tolist() == free[row, :end].tolist() + [77] * (got.shape[1] - end)


def test_stops_of_both_kinds_and_all_rows():
    model = make_model()
    prompts = make_prompts((4, 17))
    free = generate(model, prompts, max_new_tokens=25, seed=5)
    stop = [int(free[0, 2]), free[1, 3:5].tolist()]
    got = generate(model, prompts, max_new_tokens=25, seed=5, stop=stop)
    ends = [end_of(row.tolist(), [[stop[0]], stop[1]]) for row in free]
    assert got.shape[1] == max(ends) < 25, "generation ends with the last row"
    assert torch.equal(
        generate(model, prompts[:1], max_new_tokens=25, seed=5, stop=int(free[0, 2])), free[:1, : ends[0]]
    )


def test_stops_are_looked_for_in_new_tokens_only():
    model, prompt = make_model(), torch.tensor([7, 7, 7, 3])
    first = int(generate(model, prompt, max_new_tokens=1, temperature=0))
    got = generate(model, prompt, max_new_tokens=4, temperature=0, stop=[[3, first], 7 if first != 7 else 8])
    assert got.shape[1] > 1


def test_seeds(model):
    prompts = make_prompts((5, 5, 5))
    same = [prompts[0]] * 4
    torch.manual_seed(0)
    once = generate(model, same, max_new_tokens=15, seed=11)
    state = torch.get_rng_state()
    torch.manual_seed(99)
    assert torch.equal(generate(model, same, max_new_tokens=15, seed=11), once), "the global generator plays no part"
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state), "and is left alone"
    assert len({tuple(row) for row in once.tolist()}) == 4, "rows draw for themselves"
    assert not torch.equal(generate(model, same, max_new_tokens=15, seed=12), once)
    assert torch.equal(generate(model, same[:1], max_new_tokens=15, seed=[11]), once[:1])
    others = [prompts[0], *prompts[1:], prompts[2]]
    assert torch.equal(generate(model, others, max_new_tokens=15, seed=11)[0], once[0]), "nor do the other rows"
    seeds = row_seeds(11, 4).tolist()
    assert torch.equal(generate(model, same, max_new_tokens=15, seed=seeds), once)


def test_without_a_seed_torch_decides():
    model, prompt = make_model(), make_prompts((5,))
    torch.manual_seed(3)
    once = [generate(model, prompt, max_new_tokens=15) for _ in range(2)]
    torch.manual_seed(3)
    again = [generate(model, prompt, max_new_tokens=15) for _ in range(2)]
    assert torch.equal(torch.cat(once), torch.cat(again))
    assert not torch.equal(once[0], once[1])


def filtered_oracle(logits: list[float], o: dict) -> list[float]:
    """Probabilities after the filters of `o`, one rule after the other, by plain loops."""
    scaled = [x / o.get("temperature", 1.0) for x in logits]
    order = sorted(range(len(logits)), key=lambda w: (-scaled[w], w))
    kept = set(order)
    if "top_k" in o:
        kept = {w for w in kept if scaled[w] >= scaled[order[o["top_k"] - 1]]}
    if "top_p" in o:
        total, mass, chosen = sum(math.exp(scaled[w]) for w in kept), 0.0, set()
        for w in (w for w in order if w in kept):
            if mass >= o["top_p"]:
                break
            chosen.add(w)
            mass += math.exp(scaled[w]) / total
        kept = chosen
    if "min_p" in o:
        kept = {w for w in kept if math.exp(scaled[w]) >= o["min_p"] * math.exp(scaled[order[0]])}
    total = sum(math.exp(scaled[w]) for w in kept)
    return [math.exp(scaled[w]) / total if w in kept else 0.0 for w in range(len(logits))]


@pytest.mark.parametrize("options", [{}, *FILTERS, {"top_p": 0.01}, {"min_p": 1.0}, {"top_k": 1}], ids=str)
def test_filters_against_plain_rules(options):
    options = {key: value for key, value in options.items() if key != "repetition_penalty"}
    logits_bw = 2 * torch.randn(20, VOCABULARY, dtype=torch.float64)
    logits_bw[0] = 0.25  # all equally likely
    sampler = Sampler(**options)
    got = sampler.filtered(logits_bw / sampler.temperature).softmax(-1)
    want = torch.tensor([filtered_oracle(row, options) for row in logits_bw.tolist()], dtype=torch.float64)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(got > 0, want > 0)


def test_repetition_penalty_against_a_loop():
    model, prompt = make_model(dtype=torch.float64), make_prompts((6,))[0]
    ids = prompt.tolist()
    for _ in range(15):
        with torch.no_grad():
            row = model(torch.tensor([ids]))[0][0, -1].tolist()
        scores = [(x / 1.8 if x > 0 else x * 1.8) if w in ids else x for w, x in enumerate(row)]
        ids.append(scores.index(max(scores)))
    got = generate(model, prompt, max_new_tokens=15, temperature=0, repetition_penalty=1.8)
    assert got[0].tolist() == ids[6:]
    assert got[0].tolist() != generate(model, prompt, max_new_tokens=15, temperature=0)[0].tolist()


def test_repetition_penalty_on_both_sides_of_zero():
    logits, seen = torch.tensor([[2.0, -2.0, 2.0, -2.0]]), torch.tensor([[True, True, False, False]])
    assert penalise(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]


def chi_square(chosen: Tensor, probability: Tensor) -> float:
    """Distance of counts from what they should be; about its degrees of freedom when the draws are right."""
    expected = probability * len(chosen)
    return float(((chosen.bincount(minlength=len(probability)) - expected).square() / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("over", ["seeds", "rows", "positions"])
def test_frequencies_are_the_probabilities(temperature, over):
    logits, draws = torch.linspace(-1, 1, 12), 20_000
    if over == "positions":
        uniforms = torch.cat([uniform(row_seeds(5, 20), position) for position in range(draws // 20)])
    else:
        uniforms = uniform(torch.arange(draws) if over == "seeds" else row_seeds(5, draws), 3)
    chosen = Sampler(temperature=temperature).choose(logits.expand(draws, -1), None, uniforms)
    # 11 degrees of freedom: above 31 once in a thousand.
    assert chi_square(chosen, (logits.double() / temperature).softmax(0)) < 31
    assert chi_square(chosen, (logits.double() / (1.3 * temperature)).softmax(0)) > 31


def test_draws_stay_within_what_is_likely():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    for level, token in ((0.0, 1), (0.2689, 1), (0.269, 3), (1 - 2.0**-52, 3)):
        assert draw(logits, torch.tensor([level], dtype=torch.float64)).tolist() == [token]
    values = uniform(torch.arange(-50_000, 50_000), 0)
    assert 0 <= values.min() <= values.max() < 1
    assert len(values.unique()) == 100_000


def test_padding_of_the_vocabulary_is_never_produced():
    model = make_model()
    assert model.config.padded_vocab_size > VOCABULARY
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY:] = 1e3 * model.lm_head.weight.sum(0)
    for options in ({"temperature": 0}, {"temperature": 3.0, "seed": 1}):
        assert generate(model, make_prompts(), max_new_tokens=30, **options).max() < VOCABULARY


def test_low_temperatures_become_greedy():
    model, prompts = make_model(), make_prompts()
    assert torch.equal(
        generate(model, prompts, max_new_tokens=10, temperature=1e-30, seed=1),
        generate(model, prompts, max_new_tokens=10, temperature=0),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    got = generate(make_model(dtype=dtype), make_prompts(), max_new_tokens=5, top_p=0.9, seed=0)
    assert got.shape == (len(LENGTHS), 5)
    assert got.dtype == torch.int64


def test_caches_take_part_in_training_afterwards():
    model, prompts = make_model(), make_prompts((6, 6))
    run = stream(model, prompts, max_new_tokens=2, seed=0)
    next(run)
    logits, _ = model(torch.stack(prompts), run.cache)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not run.tokens.is_inference()


def test_no_new_tokens():
    assert generate(make_model(), make_prompts((3, 4)), max_new_tokens=0).shape == (2, 0)


@pytest.mark.parametrize("seed", [None, 4])
def test_prefix_cache_is_exact(model, seed):
    base = make_prompts((40,))[0]
    prompts = [
        torch.cat([base[:n], tail]) for n, tail in zip((40, 40, 16, 20), make_prompts((3, 9, 5, 1), 1), strict=True)
    ]
    options = {"max_new_tokens": 8, "prefill_chunk": 8, "seed": seed, "temperature": 0.0 if seed is None else 1.0}
    known = PrefixCache()
    want = generate(model, prompts, **options)
    assert torch.equal(generate(model, prompts, **options, prefix_cache=known), want)
    assert (known.hits, known.misses, known.reused_tokens) == (3, 1, 40 + 16 + 16)
    assert torch.equal(generate(model, prompts, **options, prefix_cache=known), want)
    assert (known.hits, known.misses) == (7, 1)
    assert known.reused_tokens == 72 + sum(map(len, prompts)), "a known prompt is not read at all"


def test_prefix_cache_continues_from_the_longest_match(monkeypatch):
    model, known, lengths = make_model(), PrefixCache(), []
    embed = model.embed
    monkeypatch.setattr(model, "embed", lambda ids: (lengths.append(ids.shape[-1]), embed(ids))[1])
    prompt = make_prompts((30,))[0]
    stream(model, prompt[:20], max_new_tokens=0, prefill_chunk=8, prefix_cache=known)
    stream(model, prompt, max_new_tokens=0, prefill_chunk=8, prefix_cache=known)
    assert lengths == [8, 8, 4, 4, 6], "continues at 20, then keeps to multiples of the chunk"
    assert len(known) == 5
    changed = prompt.clone()
    changed[7] = (changed[7] + 1) % VOCABULARY
    stream(model, changed, max_new_tokens=0, prefill_chunk=8, prefix_cache=known)
    assert known.misses == 2, "one token apart is another prompt"


def test_prefix_cache_forgets_the_least_recently_used():
    model, known = make_model(), PrefixCache(max_entries=2)
    one, two, three = make_prompts((5, 5, 5))
    for prompt in (one, two, one, three):
        stream(model, prompt, max_new_tokens=0, prefix_cache=known)
    assert (len(known), known.hits, known.misses) == (2, 1, 3)
    stream(model, one, max_new_tokens=0, prefix_cache=known)
    assert known.hits == 2, "one was used after two"
    stream(model, two, max_new_tokens=0, prefix_cache=known)
    assert known.misses == 4


def test_prefix_cache_keeps_to_its_bytes():
    model, free = make_model(), PrefixCache()
    prompts = make_prompts((5, 6, 7, 8))
    for prompt in prompts:
        stream(model, prompt, max_new_tokens=0, prefix_cache=free)
    one = free.nbytes // 4
    assert free.nbytes == 4 * one > 0
    tight, none = PrefixCache(max_bytes=2 * one), PrefixCache(max_bytes=one - 1)
    for known in (tight, none):
        for prompt in prompts:
            stream(model, prompt, max_new_tokens=0, prefix_cache=known)
    assert (len(tight), tight.nbytes, len(none), none.nbytes) == (2, 2 * one, 0, 0)
    tight.clear()
    assert (len(tight), tight.nbytes) == (0, 0)


def test_prefix_cache_belongs_to_a_model():
    model, known, prompt = make_model(), PrefixCache(), make_prompts((9,))
    generate(model, prompt, max_new_tokens=3, prefix_cache=known)
    with pytest.raises(ValueError, match="holds states of another model"):
        generate(make_model("mamba1"), prompt, max_new_tokens=3, prefix_cache=known)


def add_noise(model: LanguageModel) -> None:
    with torch.no_grad():
        model.backbone.embedding.weight += torch.randn_like(model.backbone.embedding.weight)


def train_fused(model: LanguageModel) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)
    model(torch.arange(9)[None])[0].square().sum().backward()
    versions = [parameter._version for parameter in model.parameters()]
    optimizer.step()
    assert versions == [parameter._version for parameter in model.parameters()], "what makes this one hard to see"


def write_to_data(model: LanguageModel) -> None:
    model.backbone.embedding.weight.data.mul_(-1)


def write_by_numpy(model: LanguageModel) -> None:
    array = model.backbone.embedding.weight.detach().numpy()
    array[:, 1::2] *= -1


def double(module, args, output):
    return output * 2


def exchange_hooks(model: LanguageModel) -> None:
    hooks = model.backbone.layers[0].norm._forward_hooks  # type: ignore[union-attr]
    hooks[next(iter(hooks))] = double


def change_eps(model: LanguageModel) -> None:
    model.backbone.layers[0].norm.eps = 10.0  # type: ignore[union-attr]


def change_config(model: LanguageModel) -> None:
    mixer: Any = model.backbone.layers[0].mixer
    mixer.config = replace(mixer.config, dt_limit=(5.0, 6.0))


def replace_method(model: LanguageModel) -> None:
    model.embed = lambda ids, embed=model.embed: embed(ids) * 2  # type: ignore[method-assign]


def exchange_layers(model: LanguageModel) -> None:
    layers = model.backbone.layers
    layers[0], layers[1] = layers[1], layers[0]


CHANGES = [add_noise, train_fused, write_to_data, write_by_numpy, exchange_hooks, change_eps, change_config]
CHANGES += [replace_method, exchange_layers]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_prefix_cache_forgets_what_another_model_made(change):
    # float64, where no kernel has numbers of its own and every attribute counts.
    model, known, prompt = make_model(dtype=torch.float64), PrefixCache(), make_prompts((9,))
    model.backbone.layers[0].norm.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    before = stream(model, prompt, max_new_tokens=0, prefix_cache=known)
    change(model)
    again = stream(model, prompt, max_new_tokens=0, prefix_cache=known)
    want = stream(model, prompt, max_new_tokens=0)
    assert not torch.equal(want._logits_aw, before._logits_aw)
    assert torch.equal(again._logits_aw, want._logits_aw)
    stream(model, prompt, max_new_tokens=0, prefix_cache=known)
    assert (known.hits, known.misses) == (1, 2), "it stays as it is, and so does the prefix"


def test_prefix_cache_forgets_what_autocast_made():
    model, known, prompt = make_model(), PrefixCache(), make_prompts((9,))
    with torch.autocast("cpu", torch.bfloat16):
        stream(model, prompt, max_new_tokens=0, prefix_cache=known)
    again = stream(model, prompt, max_new_tokens=0, prefix_cache=known)
    assert torch.equal(again._logits_aw, stream(model, prompt, max_new_tokens=0)._logits_aw)


def test_prefix_cache_takes_nothing_made_by_weights_of_before():
    """Who began to read a prompt before the weights changed may keep a state after it."""
    model, known = make_model(), PrefixCache()
    before = known.serve(model)
    add_noise(model)
    now = known.serve(model)
    known.keep(before, [1, 2], torch.zeros(1, 8), ())
    assert len(known) == 0
    known.keep(now, [1, 2], torch.zeros(1, 8), ())
    assert known.longest(before, [1, 2]) is None
    assert known.longest(now, [1, 2]) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": []}, "ids holds no prompts"),
        (
            {"ids": torch.zeros(2, 0, dtype=torch.int64)},
            r"prompt 0 has shape \(0,\), expected a sequence of at least one",
        ),
        ({"ids": [[1, 2], []]}, r"prompt 1 has shape \(0,\)"),
        ({"ids": torch.zeros(1, 2, 3, dtype=torch.int64)}, r"ids has 3 axes, expected \[batch, s\]"),
        ({"ids": torch.tensor(3)}, "ids has 0 axes"),
        ({"ids": torch.zeros(1, 3)}, r"prompt 0 is of torch\.float32, expected integer token ids"),
        ({"ids": [True, False]}, r"prompt 0 is of torch\.bool"),
        ({"ids": "hello"}, "ids is text, expected token ids"),
        ({"ids": [[1, VOCABULARY]]}, "prompt 0 has ids from 1 to 50, but this model's are 0 to 49"),
        ({"ids": [[-1]]}, "prompt 0 has ids from -1 to -1"),
        ({"mask_bs": torch.ones(1, 4, dtype=torch.bool)}, r"mask_bs of shape \(1, 4\) needs ids of the same two axes"),
        ({"ids": [[1, 2, 3]], "mask_bs": torch.ones(1, 3, dtype=torch.bool)}, "got ids in a list"),
        ({"mask_bs": torch.ones(1, 3)}, "mask_bs has to be boolean"),
        ({"mask_bs": torch.zeros(1, 3, dtype=torch.bool)}, r"prompt 0 has shape \(0,\)"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1, expected a whole number of at least 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"temperature": -1}, "temperature is -1, expected a finite number at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0, expected a whole number of at least 1"),
        ({"top_p": 0}, "top_p is 0, expected a finite number above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1, expected a finite number at least 0 and at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a finite number above 0"),
        ({"stop": [VOCABULARY]}, "stop 0 has ids from 50 to 50"),
        ({"stop": [3, []]}, r"stop 1 has shape \(0,\)"),
        ({"stop": ["end"]}, "stop 0 is 'end', expected integer token ids"),
        ({"seed": 1.5}, "seed is 1.5, expected a number, one number per row, or None"),
        ({"seed": [1, 2]}, "seed has 2 numbers for 1 rows"),
        ({"pad_id": None}, "pad_id is None, expected a token id"),
        ({"pad_id": 1 << 64}, "pad_id is 18446744073709551616, expected a token id"),
        ({"ids": {1: 2}}, "ids is a dict, expected a tensor, a list of token ids or a list of prompts"),
        ({"ids": 3}, "ids is a int"),
        ({"ids": torch.ones(1, 3, dtype=torch.int64, device="meta")}, "ids is a Tensor on meta, expected a plain"),
        ({"ids": [torch.ones(3, dtype=torch.int64).to_sparse()]}, "prompt 0 is a sparse_coo tensor"),
        ({"mask_bs": [[True] * 3]}, "mask_bs has to be a tensor, got list"),
        ({"seed": torch.ones(1, device="meta")}, "seed is a Tensor on meta"),
        ({"prefix_cache": {}}, "prefix_cache is a dict, expected a PrefixCache or None"),
        ({"stop": torch.tensor(3)}, "stop is a Tensor, expected an id, or a list of ids"),
        ({"cache": torch.tensor(3.0)}, "cache has to be a tuple of .* layers' caches or None, got a Tensor"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0, expected a whole number of at least 1"),
    ],
    ids=str,
)
def test_bad_arguments(options, message):
    options = {"ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 2, **options}
    with pytest.raises(ValueError, match=message):
        generate(make_model(), **options)
    with pytest.raises(ValueError, match=message):
        stream(make_model(), **options)


def test_ids_of_another_kind():
    wrapped = Wrapped(torch.ones(3, dtype=torch.int64))
    for ids, told in ((wrapped, "ids is a Wrapped"), ([[1], wrapped], "prompt 1 is a Wrapped")):
        with pytest.raises(ValueError, match=told):
            generate(make_model(), ids, max_new_tokens=1)


def test_ids_that_become_fake():
    """Tensors made in a fake mode have no numbers, those of lists neither."""
    model = make_model()
    with FakeTensorMode():
        for made in (model, make_model()):
            with pytest.raises(ValueError, match="prompt 0 is a FakeTensor on cpu, expected a plain"):
                generate(made, [1, 2], max_new_tokens=1)
            with pytest.raises(ValueError, match="ids is a FakeTensor on cpu, expected a plain"):
                Engine(made).add([1, 2], 1)


def test_bad_caches():
    model, ids = make_model(), torch.tensor([[1, 2, 3]])
    cache = model.fresh_cache(2)
    with pytest.raises(ValueError, match=r"expected .* for 1 rows"):
        generate(model, ids, max_new_tokens=2, cache=cache)
    with pytest.raises(ValueError, match="a prefix_cache knows prompts from their start"):
        generate(model, ids, max_new_tokens=2, cache=model.fresh_cache(1), prefix_cache=PrefixCache())
    for name in ("max_entries", "max_bytes"):
        with pytest.raises(ValueError, match=f"{name} is 0, expected a positive whole number"):
            PrefixCache(**{name: 0})


def test_a_model_without_numbers_is_refused():
    with pytest.raises(ValueError, match="the model is on the meta device"):
        generate(make_model().to("meta"), [1], max_new_tokens=1)


def test_latents_are_refused():
    config = ModelConfig(block=CONFIGS["mamba2"], n_layer=2, vocab_size=VOCABULARY, stack_latents=("start",))
    with pytest.raises(ValueError, match="generation is for models without latents"):
        generate(LanguageModel(config), [1, 2], max_new_tokens=1)


ABSURD = [2**64, 10**400, 10**5000, -(2**64), 5e-324, 1e-40, 1e308, math.inf, math.nan, True, "1", None]


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_absurd_numbers_are_refused_or_do_what_they_say(name):
    """The sampler itself, with a token that may not come: a draw is one of the others, whatever is asked for."""
    logits_bw, seen_bw = torch.tensor([[1.0, 2.0, -math.inf, -1.0]]), torch.tensor([[True, False, True, True]])
    for value in ABSURD:
        told = None
        try:
            sampler = Sampler(**{name: value})
        except ValueError as error:
            told = str(error)
        if told is not None:
            assert told.startswith(f"{name} is "), value
            assert len(told) < 200
            continue
        for level in (0.0, 0.5, 1 - 2.0**-52):
            picked = sampler.choose(logits_bw, seen_bw, torch.tensor([level], dtype=torch.float64)).tolist()
            assert picked[0] in (0, 1, 3), value


def test_what_has_to_be_given_is_not_none():
    model = make_model()
    for name in ("temperature", "prefill_chunk", "pad_id"):
        with pytest.raises(ValueError, match=f"^{name} is None, expected"):
            generate(model, [1], **{"max_new_tokens": 1, name: None})
    with pytest.raises(ValueError, match=r"max_new_tokens is None .* give max_new_tokens or a stop"):
        generate(model, [1], max_new_tokens=None)
    ends = generate(model, [1], max_new_tokens=40, seed=3)[0].tolist()
    assert (
        generate(model, [1], max_new_tokens=None, stop=ends[20], seed=3)[0].tolist() == ends[: ends.index(ends[20]) + 1]
    )


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_broken_weights_are_named(temperature):
    model = make_model()
    with torch.no_grad():
        model.backbone.norm_f.weight[0] = math.nan  # type: ignore[index]
    with pytest.raises(ValueError, match="logits are not finite"):
        generate(model, [1, 2], max_new_tokens=2, temperature=temperature)
