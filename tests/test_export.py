"""Programs for other runtimes equal the model itself: torch.export, ONNX in onnxruntime, AOTInductor."""

import shutil

import pytest
import torch

import mambakit as mk
from mambakit.inference.export import (
    export_prefill,
    export_step,
    fresh_state,
    save_onnx,
    save_step_package,
    state_names,
)
from mambakit.ops.decompositions import plain_selective_scan, plain_ssd
from mambakit.ops.selective_scan import scan_tokens
from mambakit.ops.ssd_recalculated import recalculated

CONFIGS = {
    "mamba1": mk.Mamba1Config(d_model=16, state_rank=4),
    "mamba2": mk.Mamba2Config(d_model=16, state_rank=8, per_head_dim=8, ngroups=2),
    "mamba3": mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8),
    "mamba3-mimo": mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8, is_mimo=True, mimo_rank=2),
}
M2, MLP = mk.Mamba2Config(d_model=16, state_rank=8, per_head_dim=8), mk.MLPConfig(16, 24)
LAYERS = {
    "experts": ((M2, mk.MoEConfig(16, 8, 4, 2, "sigmoid", d_shared=8)),),
    "parallel": ((mk.ParallelConfig(M2, mk.ParallelConfig(CONFIGS["mamba1"], MLP)), M2), (MLP,)),
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _plain_empty():
    """Exporters do not know the filling of `empty`."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def make_model(name: str) -> mk.LanguageModel:
    torch.manual_seed(0)
    layers = LAYERS[name] if name in LAYERS else ((CONFIGS[name],),)
    return mk.LanguageModel(mk.ModelConfig(layers=layers, vocab_size=40)).eval()


def eager(model, ids, state=None):
    from mambakit.inference.export import filled, flat

    with torch.no_grad():
        cache = None if state is None else filled(model.fresh_cache(1), tuple(state))
        logits, cache = model(ids, cache)
    return [logits, *flat(cache)]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*CONFIGS, *LAYERS])
def test_torch_export(name):
    """Prefill, then a step from its state; the batch is free."""
    model = make_model(name)
    prefill, step = export_prefill(model, 11).module(), export_step(model).module()
    for batch in (1, 3):
        ids = torch.randint(40, (batch, 11))
        found = prefill(ids, *fresh_state(model, batch))
        expected = eager(model, ids)
        assert_equal(found, expected)
        after = step(ids[:, 0], *found[1:])
        expected = eager(model, ids[:, :1], expected[1:])
        assert_equal(after, [expected[0][:, 0], *expected[1:]])


@pytest.mark.parametrize("name", [*CONFIGS, *LAYERS])
def test_onnx(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make_model(name)
    prefill, step = (
        runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"]) for file in save_onnx(model, tmp_path)
    )
    names = state_names(model)
    assert [put.name for put in step.get_inputs()] == ["ids", *names]
    assert prefill.get_inputs()[0].shape == ["batch", "sequence"]
    assert prefill.get_outputs()[0].shape == ["batch", "sequence", 40]
    assert all(put.shape[0] == "batch" for put in [*step.get_inputs(), *step.get_outputs()])
    ids = torch.randint(40, (3, 9))

    def feed(ids, state):
        tensors = dict(zip(["ids", *names], [ids, *state], strict=True))
        return {name: torch.as_tensor(tensor).numpy() for name, tensor in tensors.items()}

    for length in (4, 130, 9):  # the last one is gone on from
        ids = torch.randint(40, (3, length))
        found = prefill.run(None, feed(ids, fresh_state(model, 3)))
        assert_equal(found, eager(model, ids))
    expected = eager(model, ids)
    assert_equal(found, expected)
    for turn in range(3):
        found = step.run(None, feed(ids[:, turn], found[1:]))
        expected = eager(model, ids[:, turn : turn + 1], expected[1:])
        assert_equal(found, [expected[0][:, 0], *expected[1:]])


@pytest.mark.skipif(not shutil.which("g++"), reason="AOTInductor compiles C++")
def test_step_package(tmp_path):
    model = make_model("mamba2")
    run = torch._inductor.aoti_load_package(str(save_step_package(model, tmp_path / "step.pt2")))
    ids = torch.randint(40, (2,))
    expected = eager(model, ids[:, None], fresh_state(model, 2))
    assert_equal(run(ids, *fresh_state(model, 2)), [expected[0][:, 0], *expected[1:]])


@pytest.mark.parametrize("segmented", [False, True])
def test_decompositions_equal_their_operators(segmented):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    segments = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 5]]) if segmented else None
    args = (normal(2, 7, 2, 4, 3), normal(2, 7, 2, 2, 5), normal(2, 7, 2, 2, 5), -normal(2, 7, 4).abs())
    args = (*args, normal(2, 7, 4), normal(2, 7, 4), normal(2, 4, 3, 5), segments, 3)
    for one, other in zip(plain_ssd(*args, "torch"), recalculated(*args), strict=True):
        torch.testing.assert_close(one, other)
    fresh = None if segments is None else torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    args = (normal(2, 7, 6), normal(2, 7, 6).abs(), -normal(6, 4).abs(), normal(2, 7, 2, 4), normal(2, 7, 2, 4))
    args = (*args, normal(2, 6, 4), None, None, None, fresh, False)
    for one, other in zip(plain_selective_scan(*args, "torch"), scan_tokens(*args), strict=True):
        torch.testing.assert_close(one, other)


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="at least 2"):
        export_prefill(make_model("mamba2"), 1)
    with pytest.raises(ValueError, match=r"end in \.pt2"):
        save_step_package(make_model("mamba2"), tmp_path / "step.so")
    with pytest.raises(ValueError, match="LanguageModel"):
        export_step(mk.Mamba2(CONFIGS["mamba2"]))


def test_quantized_models_are_refused():
    with pytest.raises(ValueError, match="quantized models are not exported; export the one it was made from"):
        export_step(mk.quantize(make_model("mamba2"), 8))


def test_no_compiler_is_one_line(monkeypatch, tmp_path):
    from torch._inductor import cpp_builder, exc

    def refuse():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", refuse)
    with pytest.raises(
        ValueError, match=r"AOTInductor compiles C\+\+, and no compiler was found; install g\+\+ or set CXX"
    ):
        save_step_package(make_model("mamba2"), tmp_path / "step.pt2")
