"""Proof on the device, in the interpreter: a broken kernel is caught and not used, a verdict outlives nothing."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from blocks import make_block, random_cache, tokens
from cases import INTERPRETED
from mambakit.kernels.triton import backend, fused_step, mamba3_prepare, norm, prove, selective_scan, ssd, tiles
from mambakit.kernels.triton import causal_conv as causal_conv_kernels
from mambakit.ops.causal_conv import CAUSAL_CONV, causal_conv
from mambakit.ops.operation import OPERATIONS, explain

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs in the processes of test_triton_interpreter.py")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def trusted_like_a_gpu(tmp_path, monkeypatch):
    """Verdicts in a folder of their own, and asked for as on a GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert backend.why_missing() is None, "asked before the interpreter hides itself, and remembered"
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    monkeypatch.delitem(CAUSAL_CONV.kernels, "cpu")
    prove.kept_verdict.cache_clear()
    yield
    prove.kept_verdict.cache_clear()
    prove._found.clear()


def break_it(monkeypatch, error: float) -> None:
    kernel = CAUSAL_CONV.kernels["triton"]

    def wrong(*inputs):
        return [y * (1 + error) for y in kernel.forward(*inputs)]

    monkeypatch.setitem(CAUSAL_CONV.kernels, "triton", dataclasses.replace(kernel, forward=wrong))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 5, 8), torch.randn(8, 4)


def test_a_right_kernel_is_used():
    (choice,) = explain(causal_conv, *inputs())
    assert choice.ran == "triton"
    assert prove.verdict_file(CPU).is_file()


def test_a_damaged_verdict_is_found_anew():
    explain(causal_conv, *inputs())
    whole = prove.verdict_file(CPU).read_bytes()
    for damaged in (b"", whole[:20], b"[]", b"\xff"):
        prove.verdict_file(CPU).write_bytes(damaged)
        prove._found.clear()  # as in a process of its own
        prove.kept_verdict.cache_clear()
        (choice,) = explain(causal_conv, *inputs())
        assert choice.ran == "triton"
        assert list(tiles.read_cache(prove.verdict_file(CPU))) == ["causal_conv torch.float32"]


def test_a_broken_kernel_is_caught_and_not_used(monkeypatch):
    break_it(monkeypatch, 1e-3)
    (choice,) = explain(causal_conv, *inputs())
    assert choice.ran == "torch"
    assert "failed its proof on this device (float32, 4 taps): its error is" in choice.passed_over["triton"]
    x, weight = inputs()
    with pytest.warns(UserWarning, match=r'"triton" runs causal_conv because it was asked for: it failed its proof'):
        y, _ = causal_conv(x, weight, backend="triton")
    assert torch.allclose(y, causal_conv(x, weight, backend="torch")[0] * 1.001)


def test_a_kernel_that_raises_is_caught(monkeypatch):
    def fail(*_):
        raise RuntimeError("out of resources")

    kernel = CAUSAL_CONV.kernels["triton"]
    monkeypatch.setitem(CAUSAL_CONV.kernels, "triton", dataclasses.replace(kernel, forward=fail))
    verdict = prove.verdict("causal_conv", "cpu", torch.float32)
    assert verdict is not None
    assert "RuntimeError: out of resources" in verdict


def test_a_verdict_is_kept_until_something_changes(monkeypatch):
    measured = []
    finding = prove.Finding("causal_conv", "float32", "4 taps", 0.0, 1e-5)
    monkeypatch.setattr(prove, "measure", lambda *about: measured.append(about) or [finding])
    for _ in range(2):
        assert prove.findings("causal_conv", CPU, torch.float32) == [finding]
    assert len(measured) == 1
    monkeypatch.setattr(prove, "source_hash", lambda: "other sources")
    prove.findings("causal_conv", CPU, torch.float32)
    assert len(measured) == 2
    monkeypatch.setattr(prove.importlib.metadata, "version", lambda name: "another Triton")
    prove.findings("causal_conv", CPU, torch.float32)
    assert len(measured) == 3


def test_ranks_that_prove_at_once(monkeypatch):
    """They share a file: nobody stumbles over another's draft, and what others have found stays."""
    ready = threading.Barrier(8)

    def measure(operation, device, dtype):
        ready.wait()
        return [prove.Finding(operation, "float32", "a case", 0.0, 1e-5)]

    monkeypatch.setattr(prove, "measure", measure)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            prove.verdict_file(CPU).unlink(missing_ok=True)
            prove._found.clear()
            list(pool.map(lambda i: prove.findings(f"operation{i}", CPU, torch.float32), range(8)))
            assert len(prove.kept(prove.verdict_file(CPU))) == 8
    assert [file.suffix for file in prove.verdict_file(CPU).parent.iterdir()] == [".json"]


def test_a_verdict_that_cannot_be_written(monkeypatch, tmp_path):
    """Holds for the process; a damaged file is none."""
    (tmp_path / "mambakit").write_text("no folder")
    assert prove.verdict("causal_conv", "cpu", torch.float32) is None
    assert prove.is_known("causal_conv", "cpu", torch.float32)
    monkeypatch.setattr(prove, "_found", {})
    assert not prove.is_known("causal_conv", "cpu", torch.float32)
    (tmp_path / "mambakit").unlink()
    prove.verdict_file(CPU).parent.mkdir(parents=True)
    prove.verdict_file(CPU).write_text('{"causal_conv torch.flo')
    assert not prove.is_known("causal_conv", "cpu", torch.float32)


def test_no_memory_is_no_verdict_for_long(monkeypatch):
    """The next process asks again; so it does not after a kernel that failed, at whichever call the device says so."""

    def fail(*_):
        raise problem

    monkeypatch.setattr(prove, "relative", fail)
    for problem, stays in ((torch.OutOfMemoryError("full"), False), (RuntimeError("illegal address"), True)):
        verdict = prove.verdict("causal_conv", "cpu", torch.float32)
        assert verdict is not None
        assert str(problem) in verdict
        prove.kept_verdict.cache_clear()
        prove._found.clear()
        assert prove.is_known("causal_conv", "cpu", torch.float32) is stays


def test_a_compiler_waits_for_the_proof():
    """What nobody has proved is proved while a graph is traced, and the graph has the kernel."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, weight: causal_conv(x, weight)[0], backend=backend, fullgraph=True)
    x, weight = inputs()
    assert torch.equal(compiled(x, weight), causal_conv(x, weight, backend="triton")[0])
    assert prove.is_known("causal_conv", "cpu", torch.float32)
    (graph,) = graphs
    assert [node.args[-1] for node in graph.graph.nodes if "causal_conv" in str(node.target)] == ["triton"]


def test_a_captured_graph_uses_what_was_proved_before(monkeypatch):
    """It cannot wait for a proof, and needs none where there is one."""
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    verdict = backend.verdict("causal_conv", "cpu", torch.float32)
    assert verdict is not None
    assert "a graph's capture cannot wait for" in verdict
    capturing = False
    prove.findings("causal_conv", CPU, torch.float32)
    capturing = True
    assert backend.verdict("causal_conv", "cpu", torch.float32) is None


def test_what_the_gate_refuses_goes_to_torch(monkeypatch):
    """Every operation of blocks and of their steps, with the gate's reason; by name it is an error."""
    for module in (causal_conv_kernels, fused_step, mamba3_prepare, norm, selective_scan, ssd):
        monkeypatch.setattr(module, "why_refused", lambda shape, dtype, device: f"refused {shape}")
    ours = {name: operation for name, operation in OPERATIONS.items() if "triton" in operation.kernels}
    for operation in ours.values():
        monkeypatch.delitem(operation.kernels, "cpu", raising=False)
    choices = []
    for name in ("mamba1", "mamba2", "mamba3-mimo"):
        block = make_block(name, torch.float32)
        x_bsd, cache = tokens(block, 2, 5), random_cache(block, 2)
        choices += explain(block, x_bsd, cache)
        with torch.no_grad():
            choices += explain(block.step, x_bsd[:, 0], cache)
    found = {choice.operation: choice for choice in choices if choice.operation in ours}
    # The step whose first half is refused is not begun.
    assert found.keys() == ours.keys() - {"mamba1_step_conv"}
    for choice in found.values():
        assert choice.ran == "torch"
        assert choice.passed_over["triton"].startswith("refused ")
    with pytest.raises(
        ValueError, match=r'"triton" cannot run causal_conv: refused causal_conv; "auto" and "torch" run'
    ):
        causal_conv(*inputs(), backend="triton")


@pytest.mark.parametrize("operation", [*prove.STEPS, "finish", "mamba3_prepare"])
def test_every_proof_passes(operation):
    findings = prove.findings(operation, CPU, torch.float32)
    assert findings
    assert all(finding.passed for finding in findings), findings
