"""Caches as values: any structure in, the same structure out; rows, files and histories hold what was put in."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import mambakit as mk
from calls import Wrapped
from mambakit import caches

BLOCKS = {
    "mamba1": lambda: mk.Mamba1(mk.Mamba1Config(d_model=8, state_rank=4)),
    "mamba2": lambda: mk.Mamba2(mk.Mamba2Config(d_model=8, state_rank=8, per_head_dim=8)),
    "mamba3": lambda: mk.Mamba3(mk.Mamba3Config(d_model=8, state_rank=8, per_head_dim=8)),
    "mamba3_quaternion_mimo": lambda: mk.Mamba3(
        mk.Mamba3Config(d_model=8, state_rank=8, per_head_dim=8, rotation="quaternion", is_mimo=True, mimo_rank=2)
    ),
    "attention": lambda: mk.Attention(mk.AttentionConfig(8, 2, rope_theta=100.0)),
    "attention_window": lambda: mk.Attention(mk.AttentionConfig(8, 4, 2, window=3)),
}


@pytest.fixture(params=BLOCKS)
def block(request) -> Any:
    return BLOCKS[request.param]()


def used_cache(block, batch: int, tokens: int = 3) -> Any:
    with torch.no_grad():
        return block(torch.randn(batch, tokens, 8))[1]


def used_model_cache(batch: int) -> list[Any]:
    """A nesting as a model has it: lists and tuples, a gap, and both pathways."""
    one, two, three = (used_cache(BLOCKS[name](), batch) for name in ("mamba1", "mamba2", "mamba3"))
    attention = used_cache(BLOCKS["attention_window"](), batch, 70)
    return [one, (two, None), [three, three.with_pathway("double")], attention]


def flat(cache: Any) -> list[Any]:
    """Tensors and settings in order, with the type of everything that holds them."""
    if isinstance(cache, list | tuple):
        return [type(cache), *(leaf for part in cache for leaf in flat(part))]
    return [cache]


def tensors(cache: Any) -> list[Tensor]:
    return [leaf for leaf in flat(cache) if isinstance(leaf, Tensor)]


def assert_same(got: Any, want: Any) -> None:
    """Same structure, same bits, same dtypes."""
    assert len(flat(got)) == len(flat(want))
    for a, b in zip(flat(got), flat(want), strict=True):
        if isinstance(b, Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        else:
            assert a == b


def test_clone_has_memory_of_its_own_and_passes_gradients_on():
    cache = [used_cache(BLOCKS["mamba3"](), 2), None]
    cache[0] = cache[0]._replace(ssm_bhpr=cache[0].ssm_bhpr.requires_grad_())
    copy = caches.clone(cache)
    assert_same(copy, cache)
    assert not {t.data_ptr() for t in tensors(copy)} & {t.data_ptr() for t in tensors(cache)}
    copy[0].ssm_bhpr.sum().backward()
    assert cache[0].ssm_bhpr.grad is not None


def test_detach_cuts_gradients(block):
    x = torch.randn(2, 3, 8, requires_grad=True)
    cache = block(x)[1]
    assert any(t.requires_grad for t in tensors(cache))
    assert not any(t.requires_grad for t in tensors(caches.detach(cache)))
    assert_same(caches.detach(cache), cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_to_gives_the_dtypes_a_block_of_that_dtype_has(block, dtype):
    moved = caches.to(used_cache(block, 2), dtype=dtype)
    want = (
        block.to(dtype).fresh_cache(2)
        if dtype == torch.float64
        else type(block)(block.config, dtype=dtype).fresh_cache(2)
    )
    assert [t.dtype for t in tensors(moved)] == [t.dtype for t in tensors(want)]


def test_to_leaves_integers_alone_and_moves_to_a_device():
    cache = [(torch.arange(3), torch.ones(3)), 7]
    assert [t.dtype for t in tensors(caches.to(cache, dtype=torch.bfloat16))] == [torch.int64, torch.bfloat16]
    assert {t.device.type for t in tensors(caches.to(cache, "meta"))} == {"meta"}
    with pytest.raises(ValueError, match="floating-point"):
        caches.to(cache, dtype=torch.int32)


@pytest.mark.parametrize("index", [[2, 0, 0], torch.tensor([2, 0, 0]), []])
def test_select_takes_rows_in_order(index):
    cache = used_model_cache(3)
    for got, all_rows in zip(tensors(caches.select(cache, index)), tensors(cache), strict=True):
        assert torch.equal(got, all_rows[torch.as_tensor(index).long()])


@pytest.mark.parametrize("index", [[True, False, True], torch.tensor([False, True, False]), [False] * 3])
def test_select_takes_a_choice_of_rows(index):
    cache = used_model_cache(3)
    for got, all_rows in zip(tensors(caches.select(cache, index)), tensors(cache), strict=True):
        assert torch.equal(got, all_rows[torch.as_tensor(index)])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 3], r"rows \[3\].*cache\[0\].conv_bik has rows 0 to 2"),
        ([-1], r"rows \[-1\]"),
        ([True, False], "index_b has 2 booleans, but .* has 3 rows"),
        ([0.0], "torch.float32"),
        (torch.tensor(1), "shape"),
        (None, "index_b has to be a list or vector of row numbers, or of a boolean for each row, got None"),
        (torch.tensor([1], device="meta"), "index_b is a Tensor on meta, expected a plain tensor with numbers"),
    ],
)
def test_select_refuses_what_is_no_row(index, message):
    with pytest.raises(ValueError, match=message):
        caches.select(used_model_cache(3), index)


def test_concat_undoes_select():
    cache = used_model_cache(5)
    assert_same(caches.concat([caches.select(cache, [0]), caches.select(cache, [1, 2, 3, 4])]), cache)


def test_rows_computed_together_and_apart_are_the_same(block):
    block = block.double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    together = block(x)[1]
    apart = caches.concat([block(x[:1])[1], block(x[1:])[1]])
    for got, want in zip(tensors(apart), tensors(together), strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_concat_refuses_what_differs():
    cache = used_model_cache(2)
    single = cache[2][0]
    cases = [
        ([], "at least one"),
        ([cache, cache[:2]], "cache is a list of 4 in cache 0 but a list of 2 in cache 1"),
        ([single, single.with_pathway("double")], "cache.pathway is 'single' in cache 0 but 'double' in cache 1"),
        ([cache[0], cache[1][0]], "a Mamba1Cache in cache 0 but a Mamba2Cache"),
        ([[single, None], [single, single]], r"cache\[1\] is None in cache 0 but a Mamba3Cache"),
        ([single, caches.to(single, dtype=torch.bfloat16)], "k_state_bmhr is .*float32.* but .*bfloat16"),
        ([[torch.ones(2, 3)], [torch.ones(2, 4)]], r"cache\[0\] is \(3,\) .* but \(4,\)"),
        ([{"state": torch.ones(1)}], "cache is a dict"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            caches.concat(given)


def test_files_hold_structure_and_bits(tmp_path):
    cache = [*used_model_cache(2), caches.to(used_cache(BLOCKS["mamba2"](), 2), dtype=torch.bfloat16)]
    caches.save(cache, tmp_path / "cache.safetensors")
    assert_same(caches.load(tmp_path / "cache.safetensors"), cache)
    assert os.listdir(tmp_path) == ["cache.safetensors"]
    assert {t.device.type for t in tensors(caches.load(tmp_path / "cache.safetensors", "meta"))} == {"meta"}


def test_files_hold_expanded_and_shared_tensors(tmp_path):
    config = mk.Mamba2Config(d_model=8, state_rank=8, per_head_dim=8, learnable_init_states=True)
    fresh = mk.Mamba2(config).fresh_cache(3)
    caches.save([fresh, fresh], tmp_path / "cache")
    assert_same(caches.load(tmp_path / "cache"), [fresh, fresh])


class OtherCache(NamedTuple):
    window: Tensor
    position: int


def test_a_kind_of_cache_has_to_be_known_before_it_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "KINDS", dict(caches.KINDS))
    cache = (OtherCache(torch.ones(2, 3), 4),)
    with pytest.raises(ValueError, match=r"cache\[0\] is a OtherCache.*register\(OtherCache\)"):
        caches.save(cache, tmp_path / "cache")
    caches.register(OtherCache)
    caches.save(cache, tmp_path / "cache")
    assert_same(caches.load(tmp_path / "cache"), cache)
    with pytest.raises(ValueError, match="already known"):
        caches.register(type("OtherCache", (), {}))


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, fails):
    def full(*_):
        raise OSError("no space left on device")

    path = tmp_path / "cache"
    old = used_cache(BLOCKS["mamba1"](), 2)
    caches.save(old, path)
    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        with pytest.raises(OSError, match="no space"):
            caches.save(used_cache(BLOCKS["mamba1"](), 2), path)
    assert_same(caches.load(path), old)
    assert os.listdir(tmp_path) == ["cache"]


def foreign_files(whole: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "truncated": whole[:-1],
        "half": whole[: len(whole) // 2],
        "longer": whole + b"\0",
        "text": b"a line of text, not a cache\n" * 10,
        "kind": whole.replace(b"Mamba1Cache", b"Mamba9Cache"),
        "field": whole.replace(b'\\"ssm_bir\\": ', b'\\"ssm_bix\\": '),
        "version": whole.replace(b'"mambakit_cache":"1"', b'"mambakit_cache":"9"'),
        "structure": whole.replace(b'\\"fields\\"', b'\\"feilds\\"'),
    }


@pytest.mark.parametrize("damage", foreign_files(b""))
def test_a_file_that_is_no_cache_says_so(tmp_path, damage):
    path = tmp_path / "cache"
    caches.save(used_cache(BLOCKS["mamba1"](), 2), path)
    whole = path.read_bytes()
    path.write_bytes(foreign_files(whole)[damage])
    assert path.read_bytes() != whole
    with pytest.raises(ValueError, match="cache"):
        caches.load(path)


@pytest.mark.parametrize(
    "structure", ["[" * 100_000, '{"list": [' * 990 + '{"tensor": "a"}' + "]}" * 990, "[1]", "3", "{"]
)
def test_hostile_structures_say_so(tmp_path, structure):
    save_file({"a": torch.ones(2)}, tmp_path / "cache", {"mambakit_cache": "1", "structure": structure})
    with pytest.raises(ValueError, match="holds a cache whose structure does not fit its tensors"):
        caches.load(tmp_path / "cache")
    with pytest.raises(ValueError, match="device is 'nowhere', which torch does not know"):
        caches.load(tmp_path / "cache", device="nowhere")


def test_tensors_beyond_the_structure_are_refused(tmp_path):
    path = tmp_path / "cache"
    caches.save([torch.ones(2)], path)
    with safe_open(path, "pt") as file:
        save_file({"cache[0]": torch.ones(2), "cache[1]": torch.ones(2)}, path, file.metadata())
    with pytest.raises(ValueError, match=r"does not name: cache\[1\]"):
        caches.load(path)


def test_a_loaded_cache_is_not_the_file(tmp_path):
    path = tmp_path / "cache"
    cache = [torch.randn(1000)]
    caches.save(cache, path)
    loaded = caches.load(path)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(bytes(size))
    assert_same(loaded, cache)


def test_weights_are_no_cache(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no cache of mambakit's format 1: found no metadata"):
        caches.load(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError):
        caches.load(tmp_path / "missing")


def decode(step, x_bsd: Tensor, cache: Any, history: caches.History | None = None) -> tuple[list[Tensor], Any]:
    outputs = []
    for x_bd in x_bsd.unbind(1):
        y_bd, cache = step(x_bd, cache)
        outputs.append(y_bd)
        if history is not None:
            history.push(cache)
    return outputs, cache


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 3])
def test_after_a_rollback_it_is_as_if_the_tokens_never_were(block, k):
    certain, guessed, after = torch.randn(2, 4, 8), torch.randn(2, k, 8), torch.randn(2, 3, 8)
    history = caches.History(k + 1)
    outputs, cache = decode(block.step, certain, None, history)
    kept = caches.clone(cache)
    decode(block.step, guessed, cache, history)
    back = history.rollback(k)
    assert_same(back, kept)  # the steps since have not written into it
    again, end = decode(block.step, after, back)
    want, want_end = decode(block.step, torch.cat([certain, after], 1), None)
    assert_same(outputs + again, want)
    assert_same(end, want_end)


class TwoBlocks(nn.Module):
    """A model's cache is a list: one entry per block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([BLOCKS["mamba1"](), BLOCKS["mamba3"]()])

    def step(self, x_bd, cache):
        out = []
        for block, own in zip(self.blocks, cache or [None, None], strict=True):
            x_bd, own = block.step(x_bd, own)  # type: ignore[operator]  # a block
            out.append(own)
        return x_bd, out


@torch.no_grad()
def test_a_model_rolls_back_as_a_whole():
    model = TwoBlocks()
    x = torch.randn(1, 6, 8)
    history = caches.History(4)
    _, cache = decode(model.step, x[:, :3], None, history)
    decode(model.step, torch.randn(1, 2, 8), cache, history)
    again, _ = decode(model.step, x[:, 3:], history.rollback(2))
    assert_same(again, decode(model.step, x, None)[0][3:])


@pytest.mark.parametrize("number", [None, 0.5, True, 10**30, torch.zeros(2, 2)], ids=str)
def test_a_history_counts_in_whole_numbers(number):
    with pytest.raises(ValueError, match="keeps nothing; choose a whole number of 1 or more"):
        caches.History(number)
    history = caches.History(3)
    history.push(used_model_cache(1))
    with pytest.raises(ValueError, match="cannot go back"):
        history.rollback(number)


def test_tensors_without_rows():
    cache, told = (torch.tensor(1.0),), r"cache\[0\] has no axes"
    for function in (caches.rows, lambda cache: caches.select(cache, [0]), lambda cache: caches.concat([cache, cache])):
        with pytest.raises(ValueError, match=told):
            function(cache)


def test_what_is_no_dtype_or_device():
    cache = used_model_cache(1)
    with pytest.raises(
        ValueError, match=r"^cache.* is on the meta device and has no numbers that could be brought to cpu"
    ):
        caches.to(caches.to(cache, "meta"), "cpu")
    assert caches.to(caches.to(cache, "meta"), dtype=torch.float64)[0][0].is_meta
    with pytest.raises(
        ValueError, match=r"cannot become torch.float8_e4m3fn; choose a floating-point one: torch.float16"
    ):
        caches.to(cache, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="device is 'vulkan', which torch does not know or have here"):
        caches.to(cache, "vulkan")
    with pytest.raises(ValueError, match=r"dtype is \(\), expected a torch.dtype"):
        caches.to(cache, dtype=())  # type: ignore[arg-type]
    for device in ("nowhere", 0.5):
        with pytest.raises(ValueError, match=f"device is {device!r}, which torch does not know"):
            caches.to(cache, device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["meta", "to_sparse", "wrapped"])
def test_what_has_no_numbers_is_not_saved(tmp_path, kind):
    x = torch.ones(2, 3)
    made = {"meta": lambda: x.to("meta"), "to_sparse": x.to_sparse, "wrapped": lambda: Wrapped(x)}[kind]()
    with pytest.raises(ValueError, match=r"^cache\[1\] is a "):
        caches.save((x, made), tmp_path / "cache")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_numbers_are_not_saved(tmp_path):
    x = torch.ones(2, 3)
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    with pytest.raises(ValueError, match=r"^cache\[1\] is torch.qint8; dequantize\(\) gives its numbers"):
        caches.save((x, quantized), tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def test_a_history_keeps_as_many_as_it_says():
    history = caches.History(3)
    with pytest.raises(ValueError, match="go back 0 of 0 kept"):
        history.rollback(0)
    for i in range(5):
        history.push([i])
    assert len(history) == 3
    assert history.rollback(0) == [4]
    assert history.rollback(1) == [3]
    assert len(history) == 2
    with pytest.raises(ValueError, match="go back 2 of 2 kept caches, at most 1"):
        history.rollback(2)
    with pytest.raises(ValueError, match="go back -1"):
        history.rollback(-1)
    assert history.rollback(1) == [2]
    with pytest.raises(ValueError, match="length 0"):
        caches.History(0)


def test_the_file_can_be_named_by_a_string(tmp_path: Path):
    caches.save(None, str(tmp_path / "nothing"))
    assert caches.load(str(tmp_path / "nothing")) is None
