"""One chooser: what is asked for runs or raises, by call, by thread and by model; a backend is a registration."""

# pyright: reportPrivateImportUsage=false
import json
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import mambakit as mk
from calls import OPERATIONS as CALLS
from calls import Wrapped, names_of, negative_view, tensors_of
from compare import check
from mambakit.cli.main import main
from mambakit.ops.backends import BACKENDS, Backend, asked, register_backend, use_backend
from mambakit.ops.operation import OPERATIONS, explain
from mambakit.ops.ssd import SSD
from mambakit.ops.ssd_recalculated import recalculated, recalculated_backward

BLOCKS = {
    "mamba1": mk.Mamba1Config(d_model=32, state_rank=4),
    "mamba2": mk.Mamba2Config(d_model=32, state_rank=8, per_head_dim=8),
    "mamba3": mk.Mamba3Config(d_model=32, state_rank=8, per_head_dim=8),
    "mamba3-mimo": mk.Mamba3Config(d_model=32, state_rank=8, per_head_dim=8, is_mimo=True, mimo_rank=2),
}


def make_model(name: str = "mamba2") -> mk.LanguageModel:
    torch.manual_seed(0)
    return mk.LanguageModel(mk.ModelConfig(block=BLOCKS[name], n_layer=2, vocab_size=40, d_intermediate=16))


def ran(call, *args, **kwargs) -> set[str]:
    return {choice.ran for choice in explain(call, *args, **kwargs)}


# What is asked for.


@pytest.mark.parametrize("name", BLOCKS)
def test_torch_reaches_everything(name):
    """Norms, convolutions and linear layers too: where "torch" is asked for, by whatever way, no kernel runs."""
    model, ids = make_model(name), torch.arange(12).view(2, 6)
    path = mk.SsdPath(backend="torch")
    with torch.no_grad():
        assert "cpu" in ran(model, ids)
        assert ran(model, ids, path=path) <= {"torch"}
        cache = model(ids)[1]
        assert ran(model, ids[:, :1], cache, path=path) <= {"torch"}
        with mk.use_backend("torch"):
            assert ran(model, ids) <= {"torch"}
            assert ran(model.step, ids[:, 0], cache) <= {"torch"}
        assert ran(mk.generate, model, ids, max_new_tokens=3, backend="torch") <= {"torch"}
        assert "cpu" in ran(mk.generate, model, ids, max_new_tokens=3)
    assert ran(lambda: model(ids, path=path)[0].sum().backward()) <= {"torch"}


def test_by_name_runs_or_raises_with_the_reason():
    x, weight = torch.randn(2, 5, 8), torch.randn(8, 4)
    mk.causal_conv(x, weight, backend="cpu")
    with pytest.raises(ValueError, match=r'"cpu" cannot run causal_conv: it got a tensor of torch.float64 on cpu'):
        mk.causal_conv(x.double(), weight.double(), backend="cpu")
    with pytest.raises(ValueError, match=r'backend "triton" cannot run causal_conv: .*(Triton is|no GPU|on cpu)'):
        mk.causal_conv(x, weight, backend="triton")
    with use_backend("triton"), pytest.raises(ValueError, match=r"Triton is|no GPU|on cpu"):
        mk.causal_conv(x, weight)
    with pytest.raises(ValueError, match="backend 'tpu' is unknown; choose from auto, torch, cpu, triton"):
        use_backend("tpu")
    with pytest.raises(ValueError, match="backend 'tpu' is unknown"):
        mk.causal_conv(x, weight, backend="tpu")


def test_a_call_overrules_what_is_around_it():
    x, weight = torch.randn(2, 5, 8), torch.randn(8, 4)
    with use_backend("torch"):
        assert ran(mk.causal_conv, x, weight) == {"torch"}
        assert ran(mk.causal_conv, x, weight, backend="cpu") == {"cpu"}
    with use_backend("cpu"):
        assert ran(mk.causal_conv, x, weight, backend="torch") == {"torch"}
        with use_backend("auto"):
            assert ran(mk.causal_conv, x.double(), weight.double()) == {"torch"}
    assert asked() == "auto"


def test_explain_gives_the_reasons():
    (choice,) = explain(mk.causal_conv, torch.randn(1, 3, 4).double(), torch.randn(4, 2).double())
    assert str(choice) == "causal_conv: torch (cpu: it got a tensor of torch.float64 on cpu)"


def test_an_error_inside_leaves_nothing_changed():
    def fail() -> None:
        with use_backend("torch"):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert asked() == "auto"


# Tensors whose numbers are not where they say.

READS_ALL = (
    *("causal_conv", "selective_scan", "ssd", "gated_rms_norm", "finish"),
    *("mamba3_prepare", "quaternion_prepare", "expand_ranks"),
)
"""Operations that hand every tensor to a kernel as it comes."""


def outputs(result) -> dict:
    return dict(enumerate(result if isinstance(result, tuple) else (result,)))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("operation", "name"), [(o, name) for o in CALLS for name in names_of(o)])
def test_no_kernel_reads_a_subclass(operation, name, grad):
    call, plain = CALLS[operation], tensors_of(operation)
    wrapped = {**plain, name: Wrapped(plain[name])}
    with torch.set_grad_enabled(grad):
        check(1e-5, outputs(call(**wrapped)), outputs(call(**plain)))
        if operation in READS_ALL:
            with use_backend("cpu"), pytest.raises(ValueError, match=r"cannot run .*: it got a Wrapped, whose numbers"):
                call(**wrapped)


@pytest.mark.parametrize("operation", READS_ALL)
def test_no_kernel_misses_a_sign(operation):
    """Imaginary parts of conjugates are negative views: in memory they have the other sign."""
    plain = tensors_of(operation)
    for name, tensor in plain.items():
        if tensor.is_floating_point():
            negative = negative_view(tensor)
            assert negative.is_neg()
            check(1e-5, outputs(CALLS[operation](**{**plain, name: negative})), outputs(CALLS[operation](**plain)))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("grad", [False, True])
def test_shares_of_tensors(mesh, grad):
    """A norm once dropped its weight and a convolution crashed."""
    with torch.set_grad_enabled(grad):
        for operation in CALLS:
            plain = tensors_of(operation)
            shares = {name: distribute_tensor(tensor, mesh) for name, tensor in plain.items()}
            if "norm" not in operation:
                with pytest.raises(ValueError, match=r"is a DTensor, which this operation cannot divide; give every"):
                    CALLS[operation](**shares)
                for name in plain:
                    with pytest.raises(ValueError, match=f"^{name} is a DTensor, which this operation cannot divide"):
                        CALLS[operation](**{**plain, name: shares[name]})
                continue
            want = outputs(CALLS[operation](**plain))
            got = outputs(CALLS[operation](**shares))
            check(1e-5, {i: share.full_tensor() for i, share in got.items()}, want)
            for name in plain:
                mixed = {**plain, name: shares[name]}
                with pytest.raises(
                    ValueError, match=r"^\w+ is a (DTensor|Tensor) but x a (DTensor|Tensor), which do not"
                ):
                    CALLS[operation](**mixed)


@pytest.mark.parametrize("operation", CALLS)
def test_fake_tensors(operation):
    plain = tensors_of(operation)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in plain.items()}
        got = outputs(CALLS[operation](**fakes))
    want = outputs(CALLS[operation](**plain))
    assert {i: tensor.shape for i, tensor in got.items()} == {i: tensor.shape for i, tensor in want.items()}
    for name, fake in fakes.items():
        with pytest.raises(ValueError, match=f"^{name} is a fake tensor outside of the mode that made it"):
            CALLS[operation](**{**plain, name: fake})
        with mode, pytest.raises(ValueError, match=r" is a (\w+) but \w+ a (\w+), which do not mix"):
            CALLS[operation](**{**plain, name: fake})


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_tensors_without_memory(operation, grad):
    """Of torch's own, plain by their type; kernels once read them at address 0."""
    plain = tensors_of(operation)
    for name, tensor in plain.items():
        made = {
            "a functional tensor outside of the mode that made it": torch._to_functional_tensor(tensor),
            "a zero tensor without memory": torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
            "a sparse_coo tensor, expected a dense one": tensor.to_sparse(),
        }
        for what, given in made.items():
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=f"^{name} is {what}"):
                CALLS[operation](**{**plain, name: given})
            with pytest.raises(ValueError, match=r"cannot run ssd: it got a tensor that torch keeps in a form of its"):
                SSD.choose("cpu", given)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_kernel_reads_a_subclass_among_parameters(name):
    model, ids = make_model(name), torch.arange(12).view(2, 6)
    for module, own, parameter in [(m, n, p) for m in model.modules() for n, p in m.named_parameters(recurse=False)]:
        with torch.no_grad():
            want = model(ids)[0], model.step(ids[:, 0])[0]
            setattr(module, own, torch.nn.Parameter(Wrapped(parameter)))
            check(1e-5, outputs((model(ids)[0], model.step(ids[:, 0])[0])), outputs(want))
        setattr(module, own, parameter)


def test_a_thread_has_its_own():
    inside, seen = threading.Event(), []
    leave = threading.Event()

    def other() -> None:
        with use_backend("torch"):
            inside.set()
            leave.wait(10)
            seen.append(asked())

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    assert asked() == "auto"
    with use_backend("cpu"):
        leave.set()
        thread.join()
        assert asked() == "cpu"
    assert seen == ["torch"]
    assert asked() == "auto"


def test_eight_threads_of_generation_equal_one():
    """Mixed backends at once: every result is that of the same call alone, and nothing is left changed."""
    models = {name: make_model(name) for name in BLOCKS}
    jobs = [(name, backend, seed) for name in BLOCKS for backend in ("auto", "torch", "cpu") for seed in range(3)]

    def work(job) -> torch.Tensor:
        name, backend, seed = job
        ids = torch.arange(5 + seed).view(1, -1) % 40
        return mk.generate(models[name], ids, max_new_tokens=8, seed=seed, backend=backend)

    alone = [work(job) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, jobs))
        still = list(pool.map(lambda _: asked(), range(16)))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert set(still) == {"auto"}
    assert asked() == "auto"
    with torch.no_grad():
        assert "cpu" in ran(models["mamba2"], torch.arange(12).view(2, 6)), "auto still means the fastest"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, about its autograd functions
def test_a_compiled_model_follows_what_is_asked_for():
    torch._dynamo.reset()
    block = mk.Mamba2(BLOCKS["mamba2"])
    x = torch.randn(2, 9, 32)
    seen: list[str] = []

    def backend(graph, inputs):
        seen.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(lambda x: block(x)[0], fullgraph=True, backend=backend)
    plain = compiled(x)
    assert "mambakit.ssd" in seen[-1]
    assert "mambakit.finish" in seen[-1]
    with use_backend("torch"):
        torch.testing.assert_close(compiled(x), plain, rtol=1e-4, atol=1e-5)
    assert "mambakit.finish" not in seen[-1], "a graph made for kernels is not used when torch is asked for"
    assert len(seen) == 2


def test_checkpointed_layers_are_computed_again_as_they_were():
    model = make_model("mamba2")
    model.backbone.checkpoint_layers = True
    notes = []

    def backward_elsewhere() -> None:
        with use_backend("torch"):
            y = model(torch.arange(12).view(2, 6))[0].sum()
        notes.extend(explain(y.backward))

    backward_elsewhere()
    assert {choice.ran for choice in notes} == {"torch"}


# How far it is.


PACKAGE = str(Path(mk.__file__).parent) + os.sep


class Depth:
    """Frames of mambakit on the stack, at most, when one of `targets` is called."""

    def __init__(self, *targets: tuple[str, str]):
        self.targets, self.stacks = targets, []

    def __call__(self, frame, event, arg) -> None:
        if event != "call" or self.name(frame) not in self.targets:
            return
        names = []
        while frame is not None:
            names.append(self.name(frame))
            frame = frame.f_back
        self.stacks.append([name for name in reversed(names) if name is not None])

    def name(self, frame) -> tuple[str, str] | None:
        """File and function of a call of ours."""
        file = frame.f_code.co_filename
        return (file.removeprefix(PACKAGE), frame.f_code.co_name) if file.startswith(PACKAGE) else None


def stacks_of(depth: Depth, call) -> list[list[tuple[str, str]]]:
    sys.setprofile(depth)
    try:
        call()
    finally:
        sys.setprofile(None)
    return depth.stacks


@pytest.mark.parametrize("name", BLOCKS)
def test_a_forward_is_at_most_eight_calls_deep(name):
    """From `LanguageModel.forward` to the operator of a kernel; docs/architecture.md lists them."""
    model, ids = make_model(name), torch.arange(12).view(2, 6)
    stacks = stacks_of(Depth(("ops/operation.py", "__call__")), lambda: model(ids))
    assert stacks
    for stack in stacks:
        ours = stack[stack.index(("models/language_model.py", "forward")) :]
        assert len(ours) <= 8, ours
    norms = [s for s in stacks if ("models/layer.py", "forward") in s and "blocks/block.py" not in {f for f, _ in s}]
    for stack in norms:
        hops = stack[stack.index(("models/layer.py", "forward")) + 1 : -2]
        assert len(hops) <= 2, hops


@pytest.mark.parametrize("name", BLOCKS)
def test_a_decoded_token_is_at_most_six_calls_deep(name):
    """From `Stream.__next__` to the library's own function."""
    stream = mk.stream(make_model(name), torch.arange(4).view(1, 4), max_new_tokens=8)
    next(stream)
    stacks = stacks_of(Depth(("kernels/cpu/decode.py", "step")), lambda: next(stream))
    assert stacks
    for stack in stacks:
        ours = stack[stack.index(("inference/generation.py", "__next__")) :]
        assert len(ours) + 1 <= 6, ours  # and the call of the library


def test_the_documented_walks_are_what_runs():
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    walks: list[list[tuple[str, str]]] = []
    for number, file, function in re.findall(r"^(\d)\. `([\w/]+\.py):(\w+)`$", page, re.MULTILINE):
        walks += [[]] if number == "1" else []
        walks[-1].append((file, function))
    forward, token = walks
    model, ids = make_model("mamba2"), torch.arange(12).view(2, 6)
    assert forward in stacks_of(Depth(forward[-1]), lambda: model(ids))
    stream = mk.stream(model, ids[:1], max_new_tokens=8)
    next(stream)
    assert token in stacks_of(Depth(token[-1]), lambda: next(stream))


# A backend as a registration.


@pytest.fixture
def toy():
    """A backend with one operation, which counts its calls."""
    calls = {"forward": 0, "backward": 0}

    def forward(*inputs):
        calls["forward"] += 1
        return recalculated(*inputs)

    def backward(*grads_inputs_and_needs):
        calls["backward"] += 1
        return recalculated_backward(*grads_inputs_and_needs)

    backend = register_backend(
        Backend(name="toy", device="cpu", dtypes=(torch.float32, torch.float64), why_missing=lambda: None)
    )
    SSD.implement(backend, forward, backward)
    yield calls
    del SSD.kernels["toy"], BACKENDS["toy"]


def test_a_toy_backend_is_one_registration(toy, tmp_path, capsys):
    """Trained, generated from, saved, loaded, benched and doctored with, and nothing else is touched."""
    book = tmp_path / "book.txt"
    book.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    small = ["--d-model", "32", "--layers", "1", "--state-rank", "8", "--head-dim", "8", "--seq-len", "32"]
    with use_backend("toy"):
        code = main(
            ["train", str(book), "--out", str(tmp_path / "run"), "--steps", "2", "--batch", "2", *small, "--json"]
        )
    assert code == 0
    assert toy["forward"] > 0
    assert toy["backward"] > 0

    model = mk.load_model(tmp_path / "run" / "model")
    before = toy["forward"]
    tokens = mk.generate(model, [1, 2, 3], max_new_tokens=4, temperature=0.0, backend="toy")
    assert toy["forward"] > before
    assert torch.equal(tokens, mk.generate(model, [1, 2, 3], max_new_tokens=4, temperature=0.0, backend="torch"))
    mk.save_model(model, tmp_path / "again")
    ids = torch.arange(8).view(1, 8)
    with use_backend("toy"):
        torch.testing.assert_close(mk.load_model(tmp_path / "again")(ids)[0], model(ids)[0])

    capsys.readouterr()
    bench = ["bench", "--family", "mamba2", "--d-model", "64", "--tokens", "16", "--repeats", "1", "--json"]
    assert main([*bench, "--backends", "toy", "torch"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["ran"] for row in rows if row["backend"] == "toy"} == {"toy"}
    assert {row["ran"] for row in rows if row["backend"] == "torch"} == {"torch"}
    assert main(["doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    toys = [check for check in checks if check["backend"] == "toy"]
    assert {check["dtype"] for check in toys} == {"float32", "float64"}
    assert all(check["passed"] for check in toys)


def test_a_toy_backend_runs_what_it_has_and_raises_for_what_it_lacks(toy):
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match='backend "toy" cannot run causal_conv: it has no causal_conv'):
        mk.causal_conv(x, torch.randn(8, 4), backend="toy")
    with use_backend("toy"):
        assert ran(mk.causal_conv, x, torch.randn(8, 4)) == {"torch"}
        with pytest.raises(ValueError, match=r'"toy" cannot run ssd: it got a tensor of torch.bfloat16'):
            mk.Mamba2(BLOCKS["mamba2"], dtype=torch.bfloat16)(torch.randn(1, 3, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="a backend named 'toy' is known already"):
        register_backend(Backend(name="toy", device="cpu", dtypes=(), why_missing=lambda: None))
    with pytest.raises(ValueError, match="'toy' already has a kernel for ssd"):
        SSD.implement(BACKENDS["toy"], recalculated)


def test_every_operation_is_listed():
    assert set(OPERATIONS) >= {"ssd", "selective_scan", "causal_conv", "finish", "mamba3_prepare", "few_rows", "decode"}
