"""The compiled extensions as modules, against the plain references; a copy of the package that imports them."""

import importlib
import sys

import pytest
import torch

from compare import check, gradients, leaves
from mambakit.compat import install, uninstall
from test_compat import installed, official  # noqa: F401 - a fixture

VALUE, GRADIENT = 1e-10, 1e-9
B, I, R, G, S, K = 2, 6, 3, 2, 9, 4


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def scan_inputs(length=S, complex_a=False):
    doubled = 2 if complex_a else 1
    A = -torch.rand(I, R, dtype=torch.float64)
    return {
        "u": drawn(B, I, length),
        "delta": torch.rand(B, I, length, dtype=torch.float64),
        "A": torch.complex(A, drawn(I, R)) if complex_a else A,
        "B": drawn(B, G, R, doubled * length),
        "C": drawn(B, G, R, doubled * length),
        "D": drawn(I),
        "delta_bias": drawn(I),
        "z": drawn(B, I, length),
    }


def reference(given, z=None, **options):
    """The output of the plain loop and the gradients of its inputs from a fixed head."""
    ref = official("mamba_ssm.ops.selective_scan_interface", "selective_scan_ref")
    inputs = leaves({name: t for name, t in given.items() if t is not None})
    out, state = ref(**inputs, delta_softplus=True, return_last_state=True, **options)
    head = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view_as(out)
    return out.detach(), state.detach(), head, gradients({"out": out}, {"out": head}, inputs)


def named(grads, names="u delta A B C D delta_bias"):
    return dict(zip(names.split(), grads, strict=True))


@pytest.mark.parametrize("complex_a", [False, True])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_selective_scan_cuda(gate, extras, complex_a):
    extension = importlib.import_module("selective_scan_cuda")
    given = scan_inputs(complex_a=complex_a)
    given |= {} if gate else {"z": None}
    given |= {} if extras else {"D": None, "delta_bias": None}
    want, state, head, grads = reference(given)
    args = [given[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    out, x, *out_z = extension.fwd(*args, True)
    assert len(out_z) == gate
    check(VALUE, {"out": out_z[0] if gate else out, "state": x[:, :, -1, 1::2]}, {"out": want, "state": state})
    room = torch.full((B, 2 * I, S), torch.nan, dtype=torch.float64)[:, I:]
    dz = room if gate else None
    du, ddelta, dA, dB, dC, dD, dbias, *rest = extension.bwd(*args, head, x, out, dz, True, gate)
    found = named([du, ddelta, dA, dB, dC, dD, dbias])
    assert (found["D"] is None) == (found["delta_bias"] is None) == (not extras)
    found = {name: grad for name, grad in found.items() if grad is not None}
    if gate:
        found["z"], again = rest
        assert torch.equal(room, found["z"])
        check(VALUE, {"again": again}, {"again": want})
    check(GRADIENT, found, grads)


def test_intermediate_states_of_long_sequences():
    """Products of decays and states where the official kernel keeps them, every 2048 tokens."""
    extension, ref = importlib.import_module("selective_scan_cuda"), official("mamba_ssm", "selective_scan_fn")
    given = scan_inputs(4100)
    args = [given[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")]
    x = extension.fwd(*args, True)[1]
    assert x.shape == (B, I, 3, 2 * R)
    for chunk, end in enumerate((2048, 4096, 4100)):
        cut = {name: t[..., :end] if t.shape[-1] == 4100 else t for name, t in given.items()}
        state = ref(**cut, delta_softplus=True, return_last_state=True)[1]
        step = torch.log1p(torch.exp(cut["delta"] + cut["delta_bias"][:, None])).sum(-1)
        torch.testing.assert_close(x[:, :, chunk, 1::2], state)
        torch.testing.assert_close(x[:, :, chunk, ::2], torch.exp(step[..., None] * cut["A"]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["core", "nrow", "oflex", "ndstate"])
def test_extensions_of_vmamba(name, dtype):
    extension = importlib.import_module(f"selective_scan_cuda_{name}")
    given = {n: t for n, t in scan_inputs().items() if n != "z"}
    if name == "ndstate":
        given |= {"A": given["A"][:, :1], "B": given["B"][:, :, :1], "C": given["C"][:, :, :1]}
    narrow = ("u", "delta", "B", "C")
    given = {
        n: t.to(dtype) if n in narrow else t.to(torch.promote_types(dtype, torch.float32)) for n, t in given.items()
    }
    want, _, head, grads = reference({n: t.double() for n, t in given.items()})
    args = [given[n] for n in ("u", "delta", "A", "B", "C", "D", "delta_bias")]
    if name == "ndstate":
        args[2:5] = args[2][:, 0], args[3][:, :, 0], args[4][:, :, 0]
    flex = (True,) if name == "oflex" else ()
    out, x = extension.fwd(*args, True, 1, *flex)
    assert out.dtype == (torch.float32 if flex and dtype == torch.bfloat16 else dtype)
    found = named(extension.bwd(*args, head.to(out.dtype), x, True, 1))
    if name == "ndstate":
        found |= {"A": found["A"][:, None], "B": found["B"][:, :, None], "C": found["C"][:, :, None]}
        with pytest.raises(ValueError, match="the state has one entry"):
            extension.fwd(given["u"], *args[:2], given["B"], given["C"], None, None, True, 1)
    loose = dtype == torch.bfloat16
    check(2e-2 if loose else VALUE, {"out": out}, {"out": want})
    check(2e-2 if loose else GRADIENT, found, grads)
    assert all(found[n].dtype == given[n].dtype for n in found)


def test_states_of_all_tokens():
    extension = importlib.import_module("selective_scan_cuda_oflex_rh")
    given = {n: t for n, t in scan_inputs().items() if n in ("u", "delta", "A", "B", "delta_bias")}
    inputs = leaves(given)
    step = torch.log1p(torch.exp(inputs["delta"] + inputs["delta_bias"][:, None]))
    states, state = [], torch.zeros(B, I, R, dtype=torch.float64)
    for t in range(S):
        b = inputs["B"][..., t].repeat_interleave(I // G, dim=1)
        state = torch.exp(step[..., t, None] * inputs["A"]) * state + (step * inputs["u"])[..., t, None] * b
        states.append(state)
    want = torch.stack(states, dim=-1)
    args = [*(given[n] for n in ("u", "delta", "A", "B")), drawn(I), given["delta_bias"]]
    out, x = extension.fwd(*args, True, 1, True)
    check(VALUE, {"out": out, "last": x[:, :, -1, 1::2]}, {"out": want, "last": state})
    head = torch.randn_like(want)
    du, ddelta, dA, dB, dD, dbias = extension.bwd(*args, head, x, True, 1)
    assert not dD.any()
    found = {"u": du, "delta": ddelta, "A": dA, "B": dB, "delta_bias": dbias}
    check(GRADIENT, found, gradients({"out": want}, {"out": head}, inputs))


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("generation", ["1.0", "1.1", "1.2", "1.6"])
def test_causal_conv1d_cuda(generation, bias, silu):
    extension = importlib.import_module("causal_conv1d_cuda")
    ref = official("causal_conv1d.causal_conv1d_interface", "causal_conv1d_ref")
    with_states = generation in ("1.2", "1.6")
    given = {"x": drawn(B, I, S), "weight": drawn(I, K), "bias": drawn(I)}
    given |= {"initial_states": drawn(B, I, K - 1)} if with_states else {}
    given = given if bias else {n: t for n, t in given.items() if n != "bias"}
    inputs = leaves(given)
    activation = "silu" if silu else None
    want, last = ref(**inputs, activation=activation, return_final_states=True)
    head, last_head = torch.randn_like(want), torch.randn_like(last)
    heads = {"out": head} | ({"last": last_head} if with_states else {})
    grads = gradients({"out": want, "last": last}, heads, inputs)
    x, weight, b, initial = (given.get(n) for n in ("x", "weight", "bias", "initial_states"))
    room = [torch.full_like(t, torch.nan) if t is not None else None for t in (x, weight, b, initial)]
    final = torch.full_like(last, torch.nan)
    match generation:
        case "1.0":
            out = extension.causal_conv1d_fwd(x, weight, b, silu)
            found = extension.causal_conv1d_bwd(x, weight, b, head, None, silu)
        case "1.1":
            out = extension.causal_conv1d_fwd(x, weight, b, None, silu)
            found = extension.causal_conv1d_bwd(x, weight, b, head, None, room[0], silu)
            assert torch.equal(found[0], room[0])
        case "1.2":
            out = extension.causal_conv1d_fwd(x, weight, b, None, initial, final, silu)
            found = extension.causal_conv1d_bwd(x, weight, b, head, None, initial, last_head, None, True, silu)
        case _:
            out = torch.full_like(x, torch.nan)
            assert extension.causal_conv1d_fwd(x, weight, b, None, initial, out, final, silu) is None
            assert extension.causal_conv1d_bwd(x, weight, b, head, None, initial, last_head, *room, silu) is None
            found = room
    found = dict(zip(("x", "weight", "bias", "initial_states"), found, strict=False))
    check(VALUE, {"out": out}, {"out": want})
    if with_states:
        check(VALUE, {"final": final}, {"final": last})
    check(GRADIENT, {n: t for n, t in found.items() if t is not None}, grads)


@pytest.mark.parametrize("extra", [(), (None,), (None, None), "out"])
def test_causal_conv1d_cuda_update(extra):
    extension = importlib.import_module("causal_conv1d_cuda")
    ref = official("causal_conv1d.causal_conv1d_interface", "causal_conv1d_update_ref")
    x, state, weight, bias = drawn(B, I, 1), drawn(B, I, K), drawn(I, K), drawn(I)
    got, kept = state.clone(), state.clone()
    if extra == "out":
        out = torch.empty_like(x)
        assert extension.causal_conv1d_update(x, got, weight, bias, out, True, None, None) is None
    else:
        out = extension.causal_conv1d_update(x, got, weight, bias, True, *extra)
    want = ref(x, kept, weight, bias, "silu")
    check(VALUE, {"out": out, "state": got}, {"out": want, "state": kept})


def test_numbers_of_arguments_that_no_version_takes():
    extension = importlib.import_module("causal_conv1d_cuda")
    for name in ("fwd", "bwd", "update"):
        with pytest.raises(TypeError, match="was given 13 arguments, expected"):
            getattr(extension, f"causal_conv1d_{name}")(*[None] * 13)


@pytest.mark.parametrize("place", ["fourth", "fifth", "by name"])
def test_places_of_the_activation(place):
    """Versions 1.0 and 1.1 of the convolution have it earlier."""
    conv = official("causal_conv1d", "causal_conv1d_fn")
    ref = official("causal_conv1d.causal_conv1d_interface", "causal_conv1d_ref")
    x, weight, bias = drawn(B, I, S), drawn(I, K), drawn(I)
    rest = {"fourth": ("silu",), "fifth": (None, "silu")}.get(place, ())
    named = {"activation": "silu"} if place == "by name" else {}
    torch.testing.assert_close(conv(x, weight, bias, *rest, **named), ref(x, weight, bias, activation="silu"))
    torch.testing.assert_close(ref(x, weight, bias, "silu"), ref(x, weight, bias, activation="silu"))
    with pytest.raises(NotImplementedError, match="'gelu' is not one of"):
        conv(x, weight, bias, "gelu")


COPY = {
    "__init__.py": "from mamba_ssm.ops.selective_scan_interface import scan\nMamba = 'a modified one'\n",
    "ops/__init__.py": "",
    "ops/selective_scan_interface.py": "import causal_conv1d_cuda\nfrom selective_scan_cuda import fwd as scan\n",
    "ops/triton/__init__.py": "",
    "ops/triton/layernorm.py": "import a_compiler_for_gpus\n",
    "ops/triton/of_their_own.py": "x = 'theirs'\n",
    "utils/__init__.py": "",
    "utils/generation.py": "from transformers.generation import GreedySearchDecoderOnlyOutput as Output\n",
}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A modified copy of mamba_ssm that comes to lie on the path after `install`."""
    for name, text in COPY.items():
        (tmp_path / "mamba_ssm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mamba_ssm" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "mamba_ssm"]:
        del sys.modules[name]


def test_a_copy_stays_and_is_filled_in(copy):
    assert install() == ("causal_conv1d",)
    package = importlib.import_module("mamba_ssm")
    assert package.Mamba == "a modified one"
    assert package.__file__ == str(copy / "mamba_ssm" / "__init__.py")
    assert package.scan.__module__ == "mambakit.compat.extensions.selective_scan_cuda"
    assert official("mamba_ssm.ops.triton.layernorm", "RMSNorm").__module__.startswith("mambakit.compat")
    assert official("mamba_ssm.ops.triton.of_their_own", "x") == "theirs"
    assert official("mamba_ssm.utils.generation", "Output").__name__ == "GenerateDecoderOnlyOutput"
    uninstall()
    assert not hasattr(sys.modules["transformers.generation"], "GreedySearchDecoderOnlyOutput")
    assert "selective_scan_cuda" not in sys.modules


def test_kernels_stay_where_they_run(copy, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ModuleNotFoundError, match="a_compiler_for_gpus"):
        importlib.import_module("mamba_ssm.ops.triton.layernorm")


def test_kernels_of_other_packages_stay(tmp_path, monkeypatch):
    (tmp_path / "other" / "ops" / "triton").mkdir(parents=True)
    for folder in ("other", "other/ops", "other/ops/triton"):
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "other" / "ops" / "triton" / "layer_norm.py").write_text("x = 'theirs'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert official("other.ops.triton.layer_norm", "x") == "theirs"


def test_a_real_extension_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "selective_scan_cuda.py").write_text("fwd = 'the real one'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert official("selective_scan_cuda", "fwd") == "the real one"
    del sys.modules["selective_scan_cuda"]
