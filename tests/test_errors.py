"""Bad input gives one `ValueError` that says what was given, what was expected and what to do."""

import inspect

import pytest
import torch

from calls import OPERATIONS, names_of, tensors_of
from cases import core_inputs
from mambakit import Mamba2SsdInput, Mamba3DoubleSsdInput, Mamba3SingleSsdInput, SsdPath, ssd, trapezoid
from test_burn_mamba import BUNDLES, SHAPES, random_fields


def inputs(**changed):
    return {**core_inputs(2, 6, 1, 4, 3, 2, 5), **changed}


def double(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"da_bsh": double(2, 5, 4)}, "axis 's' is 5 in da_bsh but 6 in v_bsmhp"),
        ({"b_bsmgr": double(3, 6, 1, 2, 5)}, "axis 'b' is 3 in b_bsmgr but 2 in v_bsmhp"),
        ({"c_bsmgr": double(2, 6, 1, 2, 4)}, "axis 'r' is 4 in c_bsmgr but 5 in b_bsmgr"),
        ({"c_bsmgr": double(2, 6, 2, 2, 5)}, "axis 'm' is 2 in c_bsmgr but 1 in v_bsmhp"),
        ({"w_now_bsh": double(2, 6, 3)}, "axis 'h' is 3 in w_now_bsh but 4 in v_bsmhp"),
        ({"state_bhpr": double(2, 4, 2, 5)}, "axis 'p' is 2 in state_bhpr but 3 in v_bsmhp"),
        ({"v_bsmhp": double(2, 6, 4, 3)}, r"v_bsmhp needs 5 axes \(b, s, m, h, p\), got shape \(2, 6, 4, 3\)"),
        ({"w_later_bsh": None}, "w_later_bsh has to be a tensor, got None"),
        ({"da_bsh": 0.5}, "da_bsh has to be a tensor, got float"),
        (
            {"b_bsmgr": double(2, 6, 1, 3, 5), "c_bsmgr": double(2, 6, 1, 3, 5)},
            "axis 'h' is 4 in v_bsmhp, not a multiple of axis 'g', which is 3",
        ),
        ({"v_bsmhp": torch.zeros(2, 6, 1, 4, 3)}, "b_bsmgr is torch.float64 but v_bsmhp is torch.float32; cast one"),
        ({"da_bsh": torch.zeros(2, 6, 4)}, "da_bsh is torch.float32 but v_bsmhp is torch.float64; use float64 for all"),
        ({"v_bsmhp": torch.zeros(2, 6, 1, 4, 3, dtype=torch.int64)}, "v_bsmhp is torch.int64, expected float16"),
        ({"da_bsh": torch.zeros(2, 6, 4, dtype=torch.complex128)}, "da_bsh is torch.complex128, expected float16"),
        ({"da_bsh": torch.zeros(2, 6, 4, dtype=torch.float64, device="meta")}, "da_bsh is on meta but v_bsmhp on cpu"),
    ],
)
def test_the_core_names_what_does_not_fit(changed, message):
    with pytest.raises(ValueError, match=message):
        ssd(**inputs(**changed))


@pytest.mark.parametrize(
    ("operation", "name"),
    [(operation, name) for operation in OPERATIONS for name, optional in names_of(operation).items() if not optional],
)
def test_what_is_needed_is_not_none(operation, name):
    with pytest.raises(ValueError, match=f"^{name} has to be a tensor, got None$"):
        OPERATIONS[operation](**tensors_of(operation) | {name: None})
    with pytest.raises(ValueError, match=f"^{name} has to be a tensor, got list$"):
        OPERATIONS[operation](**tensors_of(operation) | {name: [1.0]})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_may_be_none_may_be(operation):
    optional = [name for name, may_be_none in names_of(operation).items() if may_be_none]
    for left_out in [[], optional, *([name] for name in optional)]:
        if ("v_last_bmhp" in left_out) == ("b_last_bmgr" in left_out):
            OPERATIONS[operation](**tensors_of(operation) | dict.fromkeys(left_out))


@pytest.mark.parametrize(
    ("segments_bs", "message"),
    [
        (torch.tensor([[0, 0, 1, 1, 0, 0]] * 2), "segments_bs falls from 1 to 0 at token 4 of row 0"),
        (torch.zeros(2, 5, dtype=torch.int64), "axis 's' is 5 in segments_bs but 6 in v_bsmhp"),
        (torch.zeros(2, 6), "segments_bs has to hold integer ids, got torch.float32"),
        (torch.zeros(2, 6, dtype=torch.bool), "segments_bs has to hold integer ids, got torch.bool"),
    ],
)
def test_segments(segments_bs, message):
    with pytest.raises(ValueError, match=message):
        ssd(**inputs(), segments_bs=segments_bs)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="chunk_len"):
        ssd(**inputs(), chunk_len=4)
    with pytest.raises(TypeError, match="seq_idx"):
        Mamba2SsdInput(**random_fields("mamba2", SHAPES[0], torch.float32), seq_idx=None)
    with pytest.raises(TypeError, match="positional"):
        Mamba2SsdInput(*random_fields("mamba2", SHAPES[0], torch.float32).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "fast"}, "algorithm 'fast' is unknown; choose from minimal, serial, serial_recalculated"),
        ({"backend": "tpu"}, "backend 'tpu' is unknown; choose from auto, torch, cpu, triton"),
        ({"chunk_len": 0}, "chunk_len is 0, expected a positive integer or None"),
        ({"chunk_len": -4}, "chunk_len is -4, expected a positive integer"),
        ({"chunk_len": 2.5}, "chunk_len is 2.5, expected a positive integer"),
        ({"chunk_len": 10**30}, "chunk_len is 10+, expected a positive integer"),
        ({"chunk_len": True}, "chunk_len is True, expected a positive integer"),
    ],
)
def test_paths(arguments, message):
    with pytest.raises(ValueError, match=message):
        SsdPath(**arguments)


def test_a_path_is_an_ssd_path():
    with pytest.raises(ValueError, match="path is 'serial', expected an SsdPath"):
        ssd(**inputs(), path="serial")  # type: ignore[arg-type]


def test_a_backend_asked_for_by_name_runs_or_raises():
    with pytest.raises(ValueError, match=r'backend "triton" cannot run ssd: .*(Triton is|no GPU|on cpu)'):
        ssd(**inputs(), path=SsdPath(backend="triton"))


@pytest.mark.parametrize("kind", BUNDLES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_sanity_names_every_bad_tensor(kind, bad):
    fields = random_fields(kind, SHAPES[0], torch.float32)
    BUNDLES[kind](**fields).sanity()
    fields["init_state_hpr"] = torch.zeros_like(fields["initial_state_bhpr"][0])
    for name, tensor in fields.items():
        broken = {key: t.clone() for key, t in fields.items()}
        broken[name].view(-1)[-2:] = bad
        counts = "2 NaN and 0 infinite" if bad != bad else "0 NaN and 2 infinite"
        with pytest.raises(ValueError, match=f"^{name} holds {counts} of {tensor.numel()} values$"):
            BUNDLES[kind](**broken).sanity()


def test_sanity_lists_all_of_them():
    fields = random_fields("single", SHAPES[0], torch.float32)
    fields["gamma_bnlh"][0, 0, 0, 0] = float("nan")
    fields["da_bnlh"][0, 0] = -float("inf")
    with pytest.raises(ValueError, match=r"da_bnlh holds 0 NaN and 8 infinite .*; gamma_bnlh holds 1 NaN"):
        Mamba3SingleSsdInput(**fields).sanity()


def test_bundles_check_when_they_are_made():
    fields = random_fields("double", SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match="axis 'l' is 3 in da_bnlh but 4 in v_bnlmhp"):
        Mamba3DoubleSsdInput(**{**fields, "da_bnlh": fields["da_bnlh"][:, :, :3]})
    with pytest.raises(ValueError, match=r"b_bnlmhr is torch.float64 but v_bnlmhp is torch.float32"):
        Mamba3DoubleSsdInput(**{**fields, "b_bnlmhr": fields["b_bnlmhr"].double()})
    empty = {name: t[:, :0] if "_bn" in name else t for name, t in fields.items()}
    with pytest.raises(ValueError, match="at least one chunk of one token, got n = 0 and l = 4"):
        Mamba3DoubleSsdInput(**empty)


def test_trapezoid():
    core = inputs()
    tokens = {name: core[name] for name in ("v_bsmhp", "b_bsmgr", "c_bsmgr", "da_bsh")}
    tokens |= {"dt_bsh": core["w_now_bsh"], "lambda_bsh": core["w_later_bsh"]}
    with pytest.raises(ValueError, match="pathway 'triple' is unknown; choose from single, double"):
        trapezoid(**tokens, pathway="triple")
    with pytest.raises(ValueError, match="describe one token: give both or neither"):
        trapezoid(**tokens, v_last_bmhp=core["v_bsmhp"][:, 0])
    with pytest.raises(ValueError, match="axis 's' is 5 in lambda_bsh but 6 in v_bsmhp"):
        trapezoid(**{**tokens, "lambda_bsh": core["w_now_bsh"][:, 1:]})


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (operation, name)
        for operation, function in OPERATIONS.items()
        for name in ("eps", "rotation_range")
        if name in inspect.signature(function).parameters
    ],
)
@pytest.mark.parametrize("value", [None, "x", True, float("nan"), float("inf"), 10**400, torch.zeros(2, 2)], ids=str)
def test_numbers(operation, name, value):
    with pytest.raises(ValueError, match=f"^{name} is .*, expected a finite number$"):
        OPERATIONS[operation](**tensors_of(operation) | {name: value})


@pytest.mark.parametrize(
    "operation", [name for name, op in OPERATIONS.items() if "rotation_range" in inspect.signature(op).parameters]
)
@pytest.mark.parametrize("value", [1e30, -1e30, 10_001])
def test_turns_without_digits(operation, value):
    """Kernels made NaN of the largest, and any other angle of the rest than float64 does."""
    with pytest.raises(ValueError, match=r"^rotation_range is .*, expected at most 10000 half turns$"):
        OPERATIONS[operation](**tensors_of(operation), rotation_range=value)


@pytest.mark.parametrize(
    ("operation", "name"),
    [("causal_conv", "silu"), ("selective_scan", "dt_softplus"), ("finish", "norm_before_gate")],
)
@pytest.mark.parametrize("value", [None, "x", 1, torch.zeros(2, 2)], ids=str)
def test_flags(operation, name, value):
    with pytest.raises(ValueError, match=f"^{name} is .*, expected True or False$"):
        OPERATIONS[operation](**tensors_of(operation) | {name: value})


@pytest.mark.parametrize("word", [None, [], 3, torch.zeros(2, 2)], ids=str)
def test_words(word):
    with pytest.raises(ValueError, match="is unknown; choose from"):
        SsdPath(algorithm=word)
    with pytest.raises(ValueError, match="is unknown; choose from"):
        SsdPath(backend=word)
