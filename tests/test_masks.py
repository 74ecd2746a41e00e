"""Padding anywhere, resets and packing equal processing each piece alone, gradients included."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import pad

import mambakit as mk
from blocks import CONFIGS, leaf_cache, leaves_of, make_block, random_cache, tensors_of, tokens, weighed
from compare import check

every = pytest.mark.parametrize("name", CONFIGS)
warmth = pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])


def gather(rows: list[dict]) -> dict:
    return {name: torch.cat(as_long([row[name] for row in rows])) for name in rows[0]}


def as_long(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """All as long as the longest, by zeros at the end."""
    longest = max(part.shape[1] if part.dim() > 1 else 0 for part in parts)
    return [pad(p, (0, 0) * (p.dim() - 2) + (0, longest - p.shape[1])) if p.dim() > 1 else p for p in parts]


def row_of(cache, i: int):
    return None if cache is None else type(cache)(*(t[i : i + 1] if isinstance(t, torch.Tensor) else t for t in cache))


def compared(block, x, cache, together, alone) -> None:
    """Both ways through the same loss: outputs, caches, and gradients of tokens, entering cache and parameters."""
    results = []
    for run in (together, alone):
        leaf = x.detach().clone().requires_grad_()
        entering = None if cache is None else leaf_cache(cache)
        out = run(leaf, entering)
        inputs = leaves_of(block, leaf, entering)
        grads = torch.autograd.grad(weighed(out), list(inputs.values()), allow_unused=True)
        named = zip(inputs.items(), grads, strict=True)
        results.append(out | {f"d {n}": torch.zeros_like(t) if g is None else g for (n, t), g in named})
    check(1e-10, *results)


MASKS = {
    "left": "00011111 00000001 11111111",
    "right": "11100000 11111111 10000000",
    "inside": "10110101 01111110 11000011",
    "mixed": "00101100 11100101 01010101",
    "a row without any": "00000000 11111111 00010000",
    "nothing": "00000000 00000000 00000000",
}


def flags(text: str) -> torch.Tensor:
    return torch.tensor([[mark == "1" for mark in row] for row in text.split()])


@every
@warmth
@pytest.mark.parametrize("pattern", MASKS)
def test_masked_tokens_are_as_if_deleted(name, warm, pattern):
    block, mask = make_block(name), flags(MASKS[pattern])
    x = tokens(block, 3, 8)
    cache = random_cache(block, 3) if warm else None

    def together(x, entering):
        y, last = block(x, entering, mask_bs=mask)
        assert not y[~mask].any()
        return {"y": y, **tensors_of(last)}

    def alone(x, entering):
        rows = []
        for i in range(3):
            y, last = block(x[i : i + 1, mask[i]], row_of(entering, i))
            places = mask[i].nonzero().expand(-1, x.shape[2])
            rows.append({"y": torch.zeros_like(x[i]).scatter(0, places, y[0])[None], **tensors_of(last)})
        return gather(rows)

    compared(block, x, cache, together, alone)


@every
@warmth
def test_packed_sequences_with_their_own_caches(name, warm):
    block = make_block(name)
    bounds = [0, 3, 3, 4, 11, 12]
    x = tokens(block, 1, 12)
    cache = random_cache(block, 5) if warm else None

    def together(x, entering):
        y, last = block(x, entering, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        return {"y": y, **tensors_of(last)}

    def alone(x, entering):
        outputs, rows = [], []
        for i, (start, stop) in enumerate(pairwise(bounds)):
            y, last = block(x[:, start:stop], row_of(entering, i))
            outputs.append(y)
            rows.append(tensors_of(last))
        return {"y": torch.cat(outputs, 1), **gather(rows)}

    compared(block, x, cache, together, alone)


RESETS = {
    "inside": "00010010 00000000 01101001",
    "at the start": "10000000 10010000 00000001",
    "everywhere": "11111111 00000000 10101010",
}


def run_pieces(block, x, entering, resets, keep):
    """Row by row, token by token with a fresh cache at each reset; `keep` are the tokens that count."""
    rows = []
    for i in range(len(x)):
        cache, outputs, start = row_of(entering, i), [], 0
        bounds = [t for t in range(x.shape[1]) if resets[i, t]]
        for stop in [*bounds, x.shape[1]]:
            piece = torch.arange(start, stop)[keep[i, start:stop]]
            y, cache = block(x[i : i + 1, piece], cache)
            padded = torch.zeros_like(x[i, start:stop])
            outputs.append(padded.scatter(0, (piece - start)[:, None].expand(-1, x.shape[2]), y[0]))
            cache, last, start = block.fresh_cache(1), cache, stop
            if stop == x.shape[1]:
                cache = last
        rows.append({"y": torch.cat(outputs)[None], **tensors_of(cache)})
    return gather(rows)


@every
@warmth
@pytest.mark.parametrize("pattern", RESETS)
def test_resets(name, warm, pattern):
    block, resets = make_block(name), flags(RESETS[pattern])
    x = tokens(block, 3, 8)
    cache = random_cache(block, 3) if warm else None

    def together(x, entering):
        y, last = block(x, entering, reset_bs=resets)
        return {"y": y, **tensors_of(last)}

    every_token = torch.ones_like(resets)
    compared(block, x, cache, together, lambda x, entering: run_pieces(block, x, entering, resets, every_token))


@every
@pytest.mark.parametrize("pattern", [p for p in MASKS if p != "nothing"])
def test_resets_and_masks_together(name, pattern):
    """A reset at an absent token takes effect all the same: for the next token, or for the cache if none follows."""
    block, mask = make_block(name), flags(MASKS[pattern])
    resets = flags("00100010 01000001 00010100")
    x, cache = tokens(block, 3, 8), random_cache(block, 3)

    def together(x, entering):
        y, last = block(x, entering, mask_bs=mask, reset_bs=resets)
        return {"y": y, **tensors_of(last)}

    compared(block, x, cache, together, lambda x, entering: run_pieces(block, x, entering, resets, mask))


@pytest.mark.parametrize("name", ["mamba1", "mamba2-learned", "mamba3-learned", "attention-window"])
def test_packing_with_masks_and_resets(name):
    block, bounds = make_block(name), [0, 5, 8]
    mask, resets = flags("10111011"), flags("00010010")
    x, cache = tokens(block, 1, 8), random_cache(block, 2)

    def together(x, entering):
        y, last = block(x, entering, mask_bs=mask, reset_bs=resets, cu_seqlens=torch.tensor(bounds))
        return {"y": y, **tensors_of(last)}

    def alone(x, entering):
        pieces = []
        for i, (start, stop) in enumerate(pairwise(bounds)):
            part = slice(start, stop)
            pieces.append(run_pieces(block, x[:, part], row_of(entering, i), resets[:, part], mask[:, part]))
        joined = gather([{n: t for n, t in piece.items() if n != "y"} for piece in pieces])
        return {"y": torch.cat([piece["y"] for piece in pieces], 1), **joined}

    compared(block, x, cache, together, alone)


@every
def test_what_absent_tokens_hold_does_not_matter(name):
    block, mask = make_block(name), flags(MASKS["mixed"])
    x = tokens(block, 3, 8)
    want = block(x, mask_bs=mask)
    for garbage in (float("nan"), float("inf"), 1e30):
        got = block(x.masked_fill(~mask[..., None], garbage), mask_bs=mask)
        assert torch.equal(got[0], want[0])
        for field, t in tensors_of(got[1]).items():
            assert torch.equal(t, tensors_of(want[1])[field]), field


@every
def test_steps_after_a_padded_prefill(name):
    """The cache after left padding continues as without it."""
    block, mask = make_block(name), flags("00011111 11111111")
    x, more = tokens(block, 2, 8), tokens(block, 2, 2, seed=9)
    _, cache = block(x, mask_bs=mask)
    _, alone = block(x[:1, 3:])
    for t in range(2):
        y, cache = block.step(more[:, t], cache)
        want, alone = block.step(more[:1, t], alone)
        check(1e-12, {"y": y[:1]}, {"y": want})


def test_integer_masks_are_understood():
    block, mask = make_block("mamba2"), flags(MASKS["mixed"])
    x = tokens(block, 3, 8)
    assert torch.equal(block(x, mask_bs=mask.long())[0], block(x, mask_bs=mask)[0])


@every
@warmth
@pytest.mark.parametrize("shape", [(2, 0), (0, 0), (0, 3)], ids=["no token", "nothing", "no row"])
@pytest.mark.parametrize("given", [("mask_bs",), ("reset_bs",), ("mask_bs", "reset_bs")], ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_where_there_is_nothing_nothing_happens(name, warm, shape, given, dtype):
    block = make_block(name, dtype)
    x, cache = tokens(block, *shape), random_cache(block, shape[0]) if warm else block.fresh_cache(shape[0])
    y, after = block(x, cache if warm else None, **dict.fromkeys(given, torch.ones(shape, dtype=torch.bool)))
    assert y.shape == x.shape
    y.sum().backward()
    check(1e-10 if dtype == torch.float64 else 1e-6, tensors_of(after), tensors_of(cache))


@every
def test_packed_sequences_without_a_token(name):
    block = make_block(name)
    x, cache, flags = tokens(block, 1, 0), random_cache(block, 2), torch.ones(1, 0, dtype=torch.bool)
    y, after = block(x, cache, mask_bs=flags, reset_bs=flags, cu_seqlens=torch.tensor([0, 0, 0]))
    assert y.shape == x.shape
    check(1e-10, tensors_of(after), tensors_of(cache))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_that_starts_afresh(name):
    block = make_block(name)
    cache, x = random_cache(block, 2), tokens(block, 2, 1)[:, 0]
    y, after = block.step(x, cache, reset_b=torch.tensor([False, True]))
    kept, fresh = block.step(x[:1], mk.caches.select(cache, [0])), block.step(x[1:])
    torch.testing.assert_close(y, torch.cat([kept[0], fresh[0]]), rtol=0, atol=1e-12)
    joined = mk.caches.concat([kept[1], fresh[1]])
    for name, tensor in tensors_of(after).items():
        torch.testing.assert_close(tensor, tensors_of(joined)[name], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"reset_b needs 1 axis \(batch = 2\), got \(2, 1\)"):
        block.step(x, cache, reset_b=torch.zeros(2, 1, dtype=torch.bool))
