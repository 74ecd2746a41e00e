"""Bad input to a block: one clear `ValueError`."""

import pytest
import torch

from blocks import FAMILIES, make_block, random_cache, tokens
from calls import Wrapped
from mambakit import SsdPath, caches


@pytest.fixture(params=FAMILIES)
def block(request):
    return make_block(request.param)


def test_wrong_width(block):
    d = block.config.d_model
    with pytest.raises(ValueError, match=f"x_bsd is {d + 1} wide, but this block's d_model is {d}"):
        block(torch.zeros(2, 3, d + 1, dtype=torch.float64))
    with pytest.raises(ValueError, match=rf"x_bsd needs 3 axes .* got \(2, {d}\)"):
        block(torch.zeros(2, d, dtype=torch.float64))
    with pytest.raises(ValueError, match=rf"step takes one token, .* got \(2, 1, {d}\)"):
        block.step(torch.zeros(2, 1, d, dtype=torch.float64))


@pytest.mark.parametrize("grad", [False, True])
def test_wrong_dtype(block, grad):
    block.float()
    x, mask = tokens(block, 2, 3), torch.ones(2, 3, dtype=torch.bool)
    with torch.set_grad_enabled(grad):
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float16, torch.float64):
            wrong = rf"is {dtype}, expected torch\.float32, as the projections"
            named = pytest.raises(ValueError, match=f"^x_bsd {wrong}")
            named_token = pytest.raises(ValueError, match=f"^x_bd {wrong}")
            with named:
                block(x.to(dtype))
            with named:
                block(x.to(dtype), mask_bs=mask)
            with named_token:
                block.step(x[:, 0].to(dtype))
            if hasattr(block, "step_infinite"):
                with named_token:
                    block.step_infinite(x[:, 0].to(dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            block(x.bfloat16())
            with pytest.raises(ValueError, match=r"^x_bsd is torch\.int64"):
                block(x.long())


def test_other_errors_of_torch_pass(block):
    """Only what its dtype brought about is laid to the input's charge."""
    del block.in_proj.weight
    with pytest.raises(AttributeError, match="weight"):
        block(tokens(block, 2, 3))


def test_cache_of_another_family(block):
    other = make_block("mamba2" if type(block).__name__ == "Mamba1" else "mamba1")
    family, foreign = type(block).__name__, type(other).__name__
    with pytest.raises(ValueError, match=f"{family} needs a {family}Cache, got {foreign}Cache"):
        block(tokens(block, 2, 3), other.fresh_cache(2))


def test_cache_of_another_batch_or_shape(block):
    with pytest.raises(ValueError, match=r"cache\.\w+ has shape \(3, .* expected \(2, .* for 2 rows"):
        block(tokens(block, 2, 3), block.fresh_cache(3))
    with pytest.raises(ValueError, match=r"for 3 rows"):
        block(tokens(block, 1, 4), block.fresh_cache(1), cu_seqlens=torch.tensor([0, 1, 2, 4]))


def test_cache_on_another_device(block):
    with pytest.raises(ValueError, match=r"cache\.\w+ is on meta but x_bsd on cpu"):
        block(tokens(block, 2, 3), caches.to(block.fresh_cache(2), device="meta"))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 4, 2, 6], "cu_seqlens falls from 4 to 2 at sequence 1"),
        ([1, 4, 6], "cu_seqlens runs from 1 to 6, expected 0 to 6 tokens"),
        ([0, 4], "cu_seqlens runs from 0 to 4, expected 0 to 6 tokens"),
        ([0], "cu_seqlens has to be a vector of integers"),
        ([0.0, 6.0], "cu_seqlens has to be a vector of integers"),
        ([0j, 6j], "cu_seqlens has to be a vector of integers"),
    ],
)
def test_packing(block, bounds, message):
    with pytest.raises(ValueError, match=message):
        block(tokens(block, 1, 6), cu_seqlens=torch.tensor(bounds))


def test_packing_wants_a_batch_of_one(block):
    with pytest.raises(ValueError, match="packs sequences into a batch of one, got a batch of 2"):
        block(tokens(block, 2, 6), cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.parametrize("name", ["mask_bs", "reset_bs"])
def test_flags(block, name):
    x = tokens(block, 2, 6)
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 5\), expected \(2, 6\)"):
        block(x, **{name: torch.ones(2, 5, dtype=torch.bool)})
    for dtype in (torch.float32, torch.complex64, torch.uint64):
        with pytest.raises(ValueError, match=f"{name} has to be boolean, got {dtype}"):
            block(x, **{name: torch.ones(2, 6).to(dtype)})
    with pytest.raises(ValueError, match=f"{name} is on meta but x_bsd on cpu"):
        block(x, **{name: torch.ones(2, 6, dtype=torch.bool, device="meta")})


def test_what_is_no_tensor(block):
    x, cache = tokens(block, 1, 3), block.fresh_cache(1)
    for name in ("mask_bs", "reset_bs", "cu_seqlens"):
        with pytest.raises(ValueError, match=f"^{name} has to be a tensor, got list$"):
            block(x, **{name: [0, 3]})
    for name in block.cache_shapes(1):
        with pytest.raises(ValueError, match=rf"^cache\.{name} is NoneType, expected a floating-point tensor$"):
            block(x, cache._replace(**{name: None}))
        with pytest.raises(ValueError, match=rf"^cache\.{name} is torch\.int64, expected a floating-point tensor$"):
            block(x, cache._replace(**{name: getattr(cache, name).long()}))


def test_what_has_no_numbers(block):
    x, bounds = tokens(block, 1, 3), torch.tensor([0, 3])
    with pytest.raises(ValueError, match=r"^x_bsd is on meta but the projection's weight on cpu; move"):
        block(x.to("meta"))
    for given in (bounds.to("meta"), Wrapped(bounds)):
        with pytest.raises(ValueError, match=r"^cu_seqlens is a \w+ on \w+, expected a plain tensor with numbers$"):
            block(x, cu_seqlens=given)


def test_empty_batches_and_sequences_are_right_answers(block):
    d = block.config.d_model
    y, cache = block(tokens(block, 0, 5))
    assert y.shape == (0, 5, d)
    y, _ = block(tokens(block, 2, 0))
    assert y.shape == (2, 0, d)
    y, after = block(tokens(block, 1, 0), cu_seqlens=torch.tensor([0, 0, 0]))
    assert y.shape == (1, 0, d)
    assert len(after[0]) == 2
    cache = random_cache(block, 2)
    y, _ = block(tokens(block, 2, 3), cache, mask_bs=torch.zeros(2, 3, dtype=torch.bool))
    assert not y.any()


@pytest.mark.parametrize("batch", [-1, 0.5, "x", True, 10**30, None], ids=str)
def test_batches_that_are_none(block, batch):
    with pytest.raises(ValueError, match=f"batch is {batch!r}, expected a whole number of at least 0"):
        block.fresh_cache(batch)


def test_a_reset_of_another_kind(block):
    with pytest.raises(ValueError, match="reset_b is a sparse_coo tensor"):
        block.step(tokens(block, 2, 1)[:, 0], reset_b=torch.ones(2, dtype=torch.bool).to_sparse())


def test_unknown_arguments(block):
    with pytest.raises(TypeError, match="inference_params"):
        block(tokens(block, 1, 2), inference_params=None)


def test_paths_and_pathways():
    one, three = make_block("mamba1"), make_block("mamba3")
    with pytest.raises(ValueError, match="Mamba-1 has one scan and takes no path"):
        one(tokens(one, 1, 3), path=SsdPath.serial())
    with pytest.raises(ValueError, match="pathway 'triple' is unknown; choose from single, double"):
        three.fresh_cache(1).with_pathway("triple")
    with pytest.raises(ValueError, match="pathway 'triple' is unknown"):
        three.fresh_cache(1, pathway="triple")


def test_cache_of_another_precision(block):
    with pytest.raises(ValueError, match=r"cache\.\w+ is torch.float32 but x_bsd torch.float64; use float64 for both"):
        block(tokens(block, 2, 3), caches.to(block.fresh_cache(2), dtype=torch.float32))
