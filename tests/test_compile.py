"""`torch.compile(fullgraph=True)` and `torch.export` of forward and step equal eager."""

import shutil

import pytest
import torch

from blocks import CONFIGS, FAMILIES, MAMBAS, make_block, random_cache, results, tensors_of, tokens
from compare import check

# Inductor compiles C++ here; `aot_eager` traces the same graph, gradients included, without it.
INDUCTOR = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "cl"))), reason="needs a C++ compiler")
BACKENDS = [
    *(
        pytest.param(name, "aot_eager", id=f"{name}-aot_eager")
        for name in ("mamba2-mlp", "mamba3-mimo", "mamba3-learned", "attention-rope", "attention-window")
    ),
    *(
        pytest.param(name, "inductor", marks=INDUCTOR, id=f"{name}-inductor")
        for name in ("mamba1", "mamba2", "mamba3", "attention")
    ),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    # Inductor cannot compile while `empty` is being filled.
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_compile(name, backend):
    """Outputs, caches and gradients of a call and of a step."""
    block = make_block(name, torch.float32)
    x, cache = tokens(block, 2, 9), random_cache(block, 2)

    def step(block, x, cache):
        y, cache = block.step(x[:, 0], cache)
        return y[:, None], cache

    for run in (lambda block, x, cache: block(x, cache), step):
        compiled = torch.compile(run, fullgraph=True, backend=backend)
        # How much room attention's cache needs depends on what is in it.
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            check(1e-5, results(block, compiled, x, cache), results(block, run, x, cache))


class Step(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x_bd, cache):
        return self.block.step(x_bd, cache)


@pytest.mark.parametrize("name", CONFIGS)
def test_export(name):
    block = make_block(name, torch.float32)
    x, cache = tokens(block, 2, 9), random_cache(block, 2)
    for module, given in ((block, (x, cache)), (Step(block), (x[:, 0], cache))):
        program = torch.export.export(module, given)
        got, want = program.module()(*given), module(*given)
        check(1e-6, {"y": got[0], **tensors_of(got[1])}, {"y": want[0], **tensors_of(want[1])})


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in MAMBAS])
def test_export_with_a_free_length(name):
    """One program for every length: the scans are single operators, not unrolled loops."""
    block = make_block(name, torch.float32)
    cache = random_cache(block, 2)
    length = torch.export.Dim("length", min=4, max=4096)
    program = torch.export.export(
        block,
        (tokens(block, 2, 9), cache),
        dynamic_shapes={"x_bsd": {1: length}, "cache": type(cache)(*[None] * len(cache))},
    )
    operators = [str(node.target) for node in program.graph.nodes if "mambakit" in str(node.target)]
    assert any("ssd" in op or "selective_scan" in op for op in operators), operators
    for s in (4, 30, 200):
        x = tokens(block, 2, s)
        got, want = program.module()(x, cache), block(x, cache)
        check(1e-5, {"y": got[0], **tensors_of(got[1])}, {"y": want[0], **tensors_of(want[1])})
