"""Attention against plain loops; its cache, which grows; its window and positions; layers it shares with others."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mambakit as mk
from blocks import CONFIGS, make_block, random_cache, results, tensors_of, tokens, weighed
from compare import check
from mambakit import AttentionConfig, caches
from mambakit.ops import attention
from mambakit.ops.backends import overwriting
from mambakit.ops.rope import turn, turns
from oracles.attention import attention as oracle
from test_gradients import LargestTensor
from test_parity import forward, split_at, steps

NAMES = [name for name in CONFIGS if name.startswith("attention")]
every = pytest.mark.parametrize("name", NAMES)
F64 = torch.float64


@every
@pytest.mark.parametrize("resets", [(), (4,), (1, 2, 6)], ids=str)
def test_equals_plain_loops(name, resets):
    """Outputs, keys and values by slot, and all gradients."""
    block, window = make_block(name), CONFIGS[name].window  # type: ignore[attr-defined]

    def ours(x_bsd):
        reset_bs = torch.zeros(x_bsd.shape[:2], dtype=torch.bool)
        reset_bs[:, list(resets)] = True
        y_bsd, cache = block(x_bsd, reset_bs=reset_bs)
        return {"y": y_bsd, **tensors_of(cache)}

    def looped(x_bsd):
        rows, kept = zip(*(oracle(block, x_sd, resets) for x_sd in x_bsd), strict=True)
        seen = x_bsd.shape[1] - max(resets, default=0)
        slots = [position % (window or seen) for position in range(seen - len(kept[0]), seen)]
        k_btgp, v_btgp = torch.zeros(2, len(x_bsd), 64, *kept[0][0][0].shape, dtype=F64)
        for b, pairs in enumerate(kept):
            k_btgp = k_btgp.index_put((torch.tensor(b), torch.tensor(slots)), torch.stack([k for k, _ in pairs]))
            v_btgp = v_btgp.index_put((torch.tensor(b), torch.tensor(slots)), torch.stack([v for _, v in pairs]))
        position_b = torch.full((len(x_bsd),), seen)
        return {"y": torch.stack(rows), "k_btgp": k_btgp, "v_btgp": v_btgp, "position_b": position_b}

    found = []
    for run in (ours, looped):
        x_bsd = tokens(block, 2, 9).requires_grad_()
        out = run(x_bsd)
        inputs = {"x": x_bsd, **dict(block.named_parameters())}
        grads = torch.autograd.grad(weighed(out), list(inputs.values()))
        found.append(out | {f"d {n}": grad for n, grad in zip(inputs, grads, strict=True)})
    check(1e-12, *found)


@every
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("way", ["whole", "reset_bs", "mask_bs", "both"])
def test_pieces_do_not_matter(name, warm, way, monkeypatch):
    """A sequence of several pieces as one of a single piece, rows of different lengths included."""
    block = make_block(name)
    make = torch.Generator().manual_seed(1)
    given = {"whole": (), "both": ("mask_bs", "reset_bs")}.get(way, (way,))
    chance = {"mask_bs": 0.8, "reset_bs": 0.15}
    options = {key: torch.rand(3, 23, generator=make) < chance[key] for key in given}
    cache = None
    if warm:
        _, cache = block(tokens(block, 3, 6), mask_bs=torch.arange(6) < torch.tensor([[0], [2], [6]]))

    def run(block, x, cache):
        return block(x, cache, **options)

    want = results(block, run, tokens(block, 3, 23), cache)
    monkeypatch.setattr(attention, "PIECE", 4)
    check(1e-12, results(block, run, tokens(block, 3, 23), cache), want)


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_window_is_a_band(window):
    """Against one softmax over all pairs, those outside the band at minus infinity."""
    torch.manual_seed(0)
    block = mk.Attention(AttentionConfig(8, 2, window=window), dtype=F64)
    x_bsd = tokens(block, 2, 12)
    q_bhsp, k_bhsp, v_bhsp = block.in_proj(x_bsd).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    far_st = torch.arange(12)[:, None] - torch.arange(12)
    scores = (q_bhsp @ k_bhsp.mT / 2).masked_fill((far_st < 0) | (far_st >= window), -torch.inf)
    want = block.out_proj((scores.softmax(-1) @ v_bhsp).transpose(1, 2).flatten(2))
    check(1e-12, {"y": block(x_bsd)[0]}, {"y": want})


def test_positions_far_out():
    """At 100,000 and beyond to the last digits of float32."""
    position_bs = torch.tensor([[99_999, 100_000, 10_000_000]])
    x_bshp = torch.randn(1, 3, 2, 10)
    want_x = x_bshp.double()
    for q in range(4):
        angle_bs1 = position_bs[..., None].double() / 10_000.0 ** (2 * q / 8)
        one, other = x_bshp[..., q].double(), x_bshp[..., q + 4].double()
        want_x[..., q] = one * angle_bs1.cos() - other * angle_bs1.sin()
        want_x[..., q + 4] = other * angle_bs1.cos() + one * angle_bs1.sin()
    check(1e-6, {"x": turn(x_bshp, *turns(position_bs, 8, 10_000.0, torch.float32))}, {"x": want_x})


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 130])
@pytest.mark.parametrize("window", [None, 3, 64, 100])
def test_a_cache_has_as_many_slots_as_it_needs(length, window):
    """However it came about; with a window no more than that takes."""
    block = mk.Attention(AttentionConfig(8, 2, window=window, rope_theta=100.0), dtype=F64)
    x_bsd = tokens(block, 2, length)
    held = min(length, window or length)
    want = forward(block, x_bsd, None)
    assert want[1].k_btgp.shape == want[1].v_btgp.shape == (2, -(-held // 64) * 64, 2, 4)
    assert want[1].position_b.tolist() == [length, length]
    assert not want[1].k_btgp[:, held:].any()
    assert want[1].k_btgp.is_contiguous()
    ways = {"split": split_at(min(50, length), min(64, length))} | ({"steps": steps} if length else {})
    with torch.no_grad():
        for way in ways.values():
            y_bsd, cache = way(block, x_bsd, block.fresh_cache(2))
            check(1e-12, {"y": y_bsd, **tensors_of(cache)}, {"y": want[0], **tensors_of(want[1])})


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 40, 70])
def test_who_owns_a_cache_may_have_it_overwritten(window):
    """A token goes to its slot and nothing is copied, until there is no slot; the values are those of any other way."""
    block = mk.Attention(AttentionConfig(8, 2, window=window), dtype=F64)
    x_bsd, cache = tokens(block, 2, 150), block.fresh_cache(2)
    want, places = steps(block, x_bsd, None), []
    outputs = []
    for x_bd in x_bsd.unbind(1):
        with overwriting():
            y_bd, cache = block.step(x_bd, cache)
        outputs.append(y_bd)
        places.append((cache.k_btgp.data_ptr(), cache.v_btgp.data_ptr(), cache.k_btgp.shape[1]))
    check(1e-12, {"y": torch.stack(outputs, 1), **tensors_of(cache)}, {"y": want[0], **tensors_of(want[1])})
    changes = [t for t in range(1, 150) if places[t] != places[t - 1]]
    assert changes == [t for t in (64, 128) if window is None or t < window]


@torch.no_grad()
@every
def test_rows_of_different_lengths_go_on_together(name, tmp_path):
    """Joined, stored, loaded and cut apart: each as it would be alone."""
    block = make_block(name)
    alone = [block(tokens(block, 1, length, seed=length))[1] for length in (0, 3, 70, 64)]
    joined = caches.concat(alone)
    assert joined.k_btgp.shape[:2] == (4, max(cache.k_btgp.shape[1] for cache in alone))
    caches.save(joined, tmp_path / "cache")
    cache, more = caches.load(tmp_path / "cache"), tokens(block, 4, 8)
    for run in (steps, forward, split_at(3)):
        y_bsd, after = run(block, more, cache)
        for row, entering in enumerate(alone):
            want, leaving = run(block, more[row : row + 1], entering)
            slots = leaving.k_btgp.shape[1]
            own = tensors_of(caches.select(after, [row]))
            assert not own["k_btgp"][:, slots:].any()
            own |= {key: own[key][:, :slots] for key in ("k_btgp", "v_btgp")}
            check(1e-12, {"y": y_bsd[row : row + 1], **own}, {"y": want, **tensors_of(leaving)})
    # What a longer row needed is given back.
    first = caches.select(after, [0])
    assert block.step(more[:1, 0], first)[1].k_btgp.shape[1] == 64


def test_the_rows_of_any_cache():
    block = make_block("attention")
    assert caches.rows(block.fresh_cache(3)) == 3
    assert caches.rows([None, (random_cache(make_block("mamba3"), 2), block.fresh_cache(2))]) == 2
    with pytest.raises(ValueError, match="a cache without a tensor does not say how many rows"):
        caches.rows((None, ()))


@pytest.mark.parametrize("fields", [{}, {"window": 100}], ids=str)
@pytest.mark.parametrize("way", ["fresh", "warm", "resets"])
def test_no_tensor_is_as_long_as_the_sequence_on_both_sides(fields, way):
    block = mk.Attention(AttentionConfig(4, 1, **fields))
    x_bsd, cache = torch.randn(1, 1500, 4), None
    if way == "warm":
        cache = block(torch.randn(1, 7, 4))[1]
    reset_bs = torch.arange(1500)[None] % 700 == 0 if way == "resets" else None
    with LargestTensor() as largest:
        block(x_bsd, cache, reset_bs=reset_bs)
    assert largest.numel < 1500 * 600


CONFIG_ERRORS = [
    ({"d_model": 10, "n_heads": 4}, "d_model = 10 is not a multiple of n_heads = 4; try 5 or 2"),
    ({"d_model": 8, "n_heads": 4, "n_kv_heads": 3}, "n_heads = 4 is not a multiple of n_kv_heads = 3; try"),
    ({"d_model": 8, "n_heads": 0}, "n_heads = 0 has to be positive"),
    ({"d_model": 8, "n_heads": 2, "n_kv_heads": 0}, "n_kv_heads = 0 has to be positive"),
    ({"d_model": 8, "n_heads": 2, "head_dim": -4}, "head_dim = -4 has to be positive"),
    ({"d_model": 8, "n_heads": 2, "window": 0}, "window = 0 has to be positive"),
    ({"d_model": 8, "n_heads": 2, "scale": 0.0}, r"scale = 0\.0 has to be positive"),
    ({"d_model": 8, "n_heads": 2, "rope_theta": 0.0}, r"rope_theta = 0\.0 has to be positive"),
    ({"d_model": 8, "n_heads": 2, "rope_fraction": 1.5}, r"rope_fraction = 1\.5 has to be above 0 and at most 1"),
    (
        {"d_model": 8, "n_heads": 2, "head_dim": 6, "rope_theta": 10.0, "rope_fraction": 0.5},
        r"rope_fraction = 0\.5 turns 3 of head_dim = 6 channels, expected an even number",
    ),
]


@pytest.mark.parametrize(("fields", "message"), CONFIG_ERRORS)
def test_configs_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**fields)


def test_what_a_config_leaves_open():
    config = AttentionConfig(64, 8, 2, rope_theta=1e4, rope_fraction=0.5, key_scale=0.5)
    assert (config.kv_heads, config.head_width, config.rope_width) == (2, 8, 4)
    assert (config.query_width, config.projected_width) == (64, 96)
    assert config.softmax_scale == pytest.approx(0.5 * 8**-0.5)
    assert AttentionConfig(64, 8, scale=0.25).softmax_scale == 0.25
    assert mk.Attention(config).in_proj.weight.shape == (96, 64)
    with pytest.raises(TypeError, match="positional"):
        AttentionConfig(64, 8, 2, 8, None, None, 1.0, None, False, 0.5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c._replace(v_btgp=c.v_btgp[:, :9]), "cache.k_btgp has 64 slots but cache.v_btgp 9"),
        (lambda c: c._replace(position_b=c.position_b[:1]), r"cache.position_b is torch.int64 of shape \(1,\)"),
        (
            lambda c: c._replace(position_b=c.position_b.int()),
            r"is torch.int32 .* expected torch.int64 of shape \(2,\)",
        ),
        (lambda c: c._replace(position_b=c.position_b + 60), r"is \[65, 65\], which does not fit the 64 slots"),
        (lambda c: c._replace(position_b=-c.position_b), r"is \[-5, -5\], which does not fit"),
        (lambda c: c._replace(k_btgp=c.k_btgp[..., :2]), r"cache.k_btgp has shape .* expected \(2, any, 2, 4\)"),
    ],
)
def test_caches_that_do_not_fit(change, message):
    block = make_block("attention")
    with pytest.raises(ValueError, match=message):
        block(tokens(block, 2, 3), change(random_cache(block, 2)))


M2 = CONFIGS["mamba2"]
MLP = mk.MLPConfig(8, 12)
LAYERS = {
    "by turns": ((M2, MLP), (CONFIGS["attention-rope"], MLP)),
    "two in a layer": ((CONFIGS["attention-window"], M2), (CONFIGS["attention"], MLP)),
}


def flat(cache: Any) -> dict[str, Tensor]:
    if isinstance(cache, Tensor):
        return {"": cache}
    parts = enumerate(cache) if isinstance(cache, tuple) else ()
    return {f"{i} {name}": tensor for i, part in parts for name, tensor in flat(part).items()}


@pytest.mark.parametrize("layers", LAYERS)
def test_a_stack_with_attention_is_cut_anywhere(layers):
    """Forward = steps = any split = masked = packed: outputs, caches and gradients."""
    torch.manual_seed(0)
    stack = mk.Stack(mk.StackConfig(layers=LAYERS[layers]), dtype=F64)
    mask_bs = torch.ones(2, 14, dtype=torch.bool)
    mask_bs[0, [0, 3, 13]] = mask_bs[1, [1, 2, 7]] = False

    def masked(stack, x_bsd, cache):
        wide_bsd = x_bsd.new_full((2, 14, 8), 3.0).masked_scatter(mask_bs[..., None], x_bsd)
        y_bsd, cache = stack(wide_bsd, cache, mask_bs=mask_bs)
        return y_bsd[mask_bs].view(2, 11, 8), cache

    def packed(stack, x_bsd, cache):
        y_bsd, cache = stack(x_bsd.flatten(0, 1)[None], cache, cu_seqlens=torch.tensor([0, 11, 22]))
        return y_bsd.view(2, 11, 8), cache

    found = []
    for run in (forward, steps, split_at(3), split_at(1, 2, 9), masked, packed):
        x_bsd = tokens(make_block("attention"), 2, 11).requires_grad_()
        y_bsd, cache = run(stack, x_bsd, None)
        out = {"y": y_bsd, **flat(cache)}
        inputs = {"x": x_bsd, **dict(stack.named_parameters())}
        grads = torch.autograd.grad(weighed(out), list(inputs.values()))
        found.append(out | {f"d {n}": grad for n, grad in zip(inputs, grads, strict=True)})
    for other in found[1:]:
        check(1e-10, other, found[0])


def test_a_model_with_attention_generates():
    """Token by token what the whole sequence says, prompts of different lengths side by side."""
    torch.manual_seed(0)
    model = mk.LanguageModel(mk.ModelConfig(layers=LAYERS["by turns"], vocab_size=30), dtype=torch.float32).eval()
    prompts = [torch.tensor([3, 5, 2, 9]), torch.tensor([7, 1])]
    got = mk.generate(model, prompts, max_new_tokens=70, temperature=0)
    for prompt, new in zip(prompts, got, strict=True):
        with torch.no_grad():
            logits_bsw, _ = model(torch.cat([prompt, new])[None])
        assert torch.equal(logits_bsw[0, len(prompt) - 1 : -1].argmax(-1), new)
