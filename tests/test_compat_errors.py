"""Wrong or unsupported arguments raise what a user can act on."""

from inspect import signature
from typing import Any

import pytest
import torch

from test_compat import MAMBA3, installed, official  # noqa: F401 - a fixture

SCAN = ("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
SSD = ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
SPLIT = ("mamba_ssm.ops.triton.ssd_combined", "mamba_split_conv1d_scan_combined")
CONV = ("causal_conv1d", "causal_conv1d_fn")
UPDATE = ("causal_conv1d", "causal_conv1d_update")
STEP = ("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
INNER = ("mamba_ssm", "mamba_inner_fn")
SISO = (f"{MAMBA3}.mamba3_siso_combined", "mamba3_siso_combined")
MIMO = ("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo", "mamba3_mimo")
NORM = ("mamba_ssm.ops.triton.layer_norm", "layer_norm_fn")
VARLEN = ("causal_conv1d.causal_conv1d_varlen", "causal_conv1d_varlen_states")
z = torch.zeros

U = (z(2, 4, 5), z(2, 4, 5), z(4, 3))
SEQUENCE = (z(2, 5, 4, 2), z(2, 5, 4), z(4), z(2, 5, 1, 3), z(2, 5, 1, 3), 64)
TURNED = (z(1, 5, 1, 8), z(1, 5, 1, 8), z(1, 5, 2, 4), z(1, 2, 5), z(1, 2, 5), z(1, 2, 5), z(2, 8), z(2, 8))
IDS = torch.zeros(2, 5, dtype=torch.int32)
INNER_OF = (z(2, 8, 5), z(4, 1, 3), None, z(7, 4), z(4, 1), z(3, 4), None, z(4, 3))

CALLS = {
    "channels of A": (SCAN, (*U[:2], z(5, 3), z(4, 3), z(4, 3)), {}, "axis 'i' is 5 in A_ir but 4 in u_bis"),
    "axes of B": (SCAN, (*U, z(3), z(4, 3)), {}, r"B has shape \(3,\), expected axes"),
    "shape of constant B": (SCAN, (*U, z(3, 4), z(4, 3)), {}, r"B has shape \(3, 4\), expected that of A, \(4, 3\)"),
    "groups of C": (SCAN, (*U, z(4, 3), z(2, 3, 3, 5)), {}, "C has shape .* does not fit a batch of 2, 4 channels"),
    "pairs of complex B": (SCAN, (*U[:2], z(4, 3) + 0j, z(2, 3, 4), z(4, 3)), {}, "with two numbers each"),
    "activation": (CONV, (z(2, 4, 5), z(4, 3)), {"activation": "gelu"}, "activation = 'gelu' is not one of"),
    "states of packed": (CONV, (z(2, 4, 5), z(4, 3), None, IDS), {"return_final_states": True}, "seq_idx packs whole"),
    "shape of states": (CONV, (z(2, 4, 5), z(4, 3), None, None, z(2, 4, 3)), {}, r"expected \(2, 4, 2\)"),
    "unused target": (CONV, (z(2, 4, 5), z(4, 3)), {"final_states_out": z(2, 4, 2)}, "only written with"),
    "shape of seq_idx": (CONV, (z(2, 4, 5), z(4, 3), None, IDS[:, :4]), {}, "one id per token"),
    "float seq_idx": (CONV, (z(2, 4, 5), z(4, 3), None, IDS.float()), {}, "integer ids"),
    "short state": (UPDATE, (z(2, 4), z(2, 4, 1), z(4, 3)), {}, "a kernel of 3 taps needs 2"),
    "ring counts": (UPDATE, (z(2, 4), z(2, 4, 2), z(4, 3)), {"cache_seqlens": IDS[0]}, "one count per row"),
    "rows of a state": (UPDATE, (z(2, 4), z(3, 4, 2), z(4, 3)), {"conv_state_indices": torch.tensor([-1, 3])},
                        "conv_state_indices goes up to 3, but the state has 3 rows"),
    "count of rows": (UPDATE, (z(2, 4), z(3, 4, 2), z(4, 3)), {"conv_state_indices": IDS[0]}, "expected 2 integers"),
    "float rows": (STEP, (z(3, 4, 5), z(2, 4), z(2, 4), z(4, 5), z(2, 5), z(2, 5)), {"state_batch_indices": z(2)},
                   r"state_batch_indices is torch.float32 of shape \(2,\), expected 2 integers"),
    "given B with bias": (INNER, (z(2, 8, 5), *[z(1)] * 6, z(4, 3), z(4, 3)), {"B_proj_bias": z(3)}, "B was given"),
    "integers to keep": (VARLEN, (IDS.long(), IDS[0], 3), {}, "is torch.int64, expected floating-point numbers"),
    "no bounds": (SSD, SEQUENCE, {"return_varlen_states": True}, "needs cu_seqlens"),
    "packed batch": (SSD, SEQUENCE, {"cu_seqlens": torch.tensor([0, 5])}, "batch of one, got a batch of 2"),
    "shape of D": (SSD, (*SEQUENCE, z(3)), {}, "axis 'h' is 3 in D_h but 4 in x_bshp"),
    "headdim": (SPLIT, (z(2, 5, 30), z(14, 4), None, z(4), z(4), z(4), 64), {}, "headdim has to be given"),
    "no headdim": (SPLIT, (z(2, 5, 30), z(14, 4), None, z(4), z(4), z(4), 64), {"headdim": ()}, r"headdim is \(\)"),
    "no groups": (SCAN, (*U, z(4, 3), z(2, 0, 3, 5)), {}, "C has shape .* does not fit a batch of 2, 4 channels"),
    "no state": (INNER, (*INNER_OF[:7], z(4, 0)), {}, r"A has shape \(4, 0\), expected at least one entry"),
    "widths": (SPLIT, (z(2, 5, 31), z(14, 4), None, z(4), z(4), z(4), 64), {"headdim": 2}, "do not fit 4 heads of 2"),
    "bias alone": (SPLIT, (z(2, 5, 30), z(14, 4), None, z(4), z(4), z(4), 64), {"headdim": 2, "outproj_bias": z(3)},
                   "without outproj_weight"),
    "some states": (SISO, (*TURNED, z(1, 5, 2, 4)), {"Input_States": (z(1), None, None, None)}, "all four states"),
    "angles": (MIMO, (*TURNED, z(1), *[None] * 2, z(1, 5, 2, 4), None, None, 16, 4, torch.half), {},
               "rotary_dim_divisor"),
    "residual": (NORM, (z(2, 4), z(4), None), {"residual": z(3, 4)}, r"residual has shape \(3, 4\) but x has \(2, 4\)"),
    "rowscale": (NORM, (z(2, 4), z(4), None), {"x1": z(2, 4), "rowscale": z(2)}, "rowscale does not go with x1"),
    "weight": (NORM, (z(2, 4), z(3), None), {}, r"weight has shape \(3,\), expected \(4,\)"),
    "bias": (NORM, (z(2, 4), z(4), z(1, 4)), {"is_rms_norm": True}, r"bias has shape \(1, 4\), expected \(4,\)"),
    "no tensor": (NORM, (z(2, 4), z(4), 3), {}, "bias has to be a tensor, got int"),
    "flag": (NORM, (z(2, 4), z(4), None), {"prenorm": z(2, 2)}, "prenorm is a tensor, expected True or False"),
    "integers": (NORM, (IDS, z(5), None), {}, "x is torch.int32, expected float16"),
    "optional tensor": (SCAN, (*U, z(4, 3), z(4, 3)), {"D": [1.0]}, "D has to be a tensor, got list"),
    "flags for z": (STEP, (z(2, 4, 5), z(2, 4), z(2, 4), z(4, 5), z(2, 5), z(2, 5)), {"z": z(2, 4) > 0},
                    "is torch.bool, expected floating-point numbers"),
    "sparse states": (CONV, (z(2, 4, 5), z(4, 3)), {"initial_states": z(2, 4, 2).to_sparse()}, "a sparse_coo tensor"),
    "meta": (INNER, (*INNER_OF[:3], z(7, 4, device="meta"), *INNER_OF[4:]), {}, "x_proj_weight is on meta"),
    "narrow projection": (INNER, (*INNER_OF[:3], z(6, 4), *INNER_OF[4:]), {}, "do not go with A's 4 channels"),
    "out": (INNER, (*INNER_OF[:5], z(3, 5), *INNER_OF[6:]), {}, "axis 'i' is 4 in A_ir but 5 in out_proj_weight_di"),
    "dtype of a projection": (INNER, (*INNER_OF[:3], z(7, 4).half(), *INNER_OF[4:]), {}, "is torch.float16 but xz"),
    "no rows": (UPDATE, (z(()), z(2, 4, 2), z(4, 3)), {}, r"x has shape \(\) and the state \(2, 4, 2\), expected rows"),
    "ids of others": (SSD, SEQUENCE, {"seq_idx": IDS.T, "initial_states": z(2, 4, 2, 3)}, "one id per token"),
    "shared memory": (UPDATE, (z(2, 4), z(1, 4, 2).expand(2, 4, 2), z(4, 3)), {}, "has entries in the same memory"),
    "rows on meta": (UPDATE, (z(2, 4), z(3, 4, 2), z(4, 3)), {"conv_state_indices": IDS[0].to("meta")},
                     "conv_state_indices is on meta but x on cpu"),
    "packed on meta": (VARLEN, (z(5, 4, device="meta"), torch.tensor([0, 5]), 3), {}, "there are none on meta"),
    "length of a state": (VARLEN, (z(5, 4), torch.tensor([0, 5]), -1), {}, "state_len is -1"),
    "long state": (VARLEN, (z(5, 4), torch.tensor([0, 5]), 10**30), {}, "state_len is 10+, expected .* at most"),
    "counts": (UPDATE, (z(2, 4), z(2, 4, 2), z(4, 3)), {"cache_seqlens": z(2)}, "cache_seqlens has to hold counts"),
    "out of another size": (CONV, (z(2, 4, 5), z(4, 3)), {"return_final_states": True, "final_states_out": z(2, 4, 7)},
                            r"final_states_out has shape \(2, 4, 7\), expected \(2, 4, 2\)"),
    "out of integers": (CONV, (z(2, 4, 5), z(4, 3)),
                        {"return_final_states": True, "final_states_out": torch.zeros(2, 4, 2, dtype=torch.int64)},
                        "is torch.int64, expected floating-point numbers"),
    "out in one place": (CONV, (z(2, 4, 5), z(4, 3)),
                         {"return_final_states": True, "final_states_out": z(1, 4, 2).expand(2, 4, 2)},
                         "final_states_out of strides .* has entries in the same memory"),
    "out with a gradient": (CONV, (z(2, 4, 5), z(4, 3)),
                            {"return_final_states": True, "final_states_out": z(2, 4, 2, requires_grad=True)},
                            "requires a gradient and cannot be written to"),
    "one limit": (SSD, SEQUENCE, {"dt_limit": 3}, "dt_limit is 3, expected the least and the largest step size"),
    "limits of words": (SSD, SEQUENCE, {"dt_limit": ("a", "b")}, "dt_limit is .*, expected the least and the largest"),
    "no limit": (SSD, SEQUENCE, {"dt_limit": (float("nan"), 1.0)}, "dt_limit is .*, expected the least and"),
    "scale of others": (NORM, (z(2, 4), z(4), None), {"rowscale": z(3)}, r"rowscale has shape \(3,\), expected \(2,\)"),
    "a word for eps": (NORM, (z(2, 4), z(4), None), {"eps": "x"}, "eps is 'x', expected a finite number"),
    "a word for dropout": (NORM, (z(2, 4), z(4), None), {"dropout_p": "x"}, "dropout_p = 'x' has to be"),
    "axes of D": (SPLIT, (z(2, 5, 30), z(14, 4), None, z(4), z(4), z(()), 64), {"headdim": 2}, r"^D \(\), conv"),
    "a word for ids": (SPLIT, (z(2, 5, 34), z(14, 4), None, z(4), z(4), z(4), 64), {"headdim": 2, "seq_idx": "silu"},
                       "seq_idx has to be a tensor, got str"),
    "a word for rows": (UPDATE, (z(2, 4), z(3, 4, 2), z(4, 3)), {"conv_state_indices": "silu"},
                        "conv_state_indices has to be a tensor, got str"),
    "width out": (SPLIT, (z(2, 5, 34), z(14, 4), None, z(4), z(4), z(4), 64), {"headdim": 2, "outproj_weight": z(3, 9)},
                  "axis 'q' is 9 in outproj_weight_dq"),
    "complex residual": (NORM, (z(2, 4), z(4), None), {"residual": z(2, 4) + 0j}, "complex64, expected floating-point"),
    "dropout": (NORM, (z(2, 4), z(4), None), {"dropout_p": 1.5}, "dropout_p = 1.5 has to be"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_functions(what):
    where, args, options, message = CALLS[what]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        official(*where)(*args, **options)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_state_of_quantized_numbers():
    state = torch.quantize_per_tensor(z(2, 4, 2), 0.1, 0, torch.qint8)
    with pytest.raises(ValueError, match=r"the state is torch.qint8, expected floating-point numbers"):
        official(*UPDATE)(z(2, 4), state, z(4, 3), cache_seqlens=torch.tensor([0, 1]))


CLASSES = {
    "bimamba": ("Mamba", {"bimamba_type": "v2"}, TypeError, "bimamba_type belongs to a modified copy of mamba_ssm"),
    "unknown": ("Mamba2", {"d_stat": 4}, TypeError, "Mamba2 has no argument d_stat"),
    "several processes": ("Mamba2", {"process_group": object()}, NotImplementedError, "several processes"),
    "heads": ("Mamba2", {"headdim": 7}, ValueError, "not a multiple of per_head_dim = 7"),
    "rotation": ("Mamba3", {"rope_fraction": 0.25}, ValueError, "has to be 0.5 or 1.0"),
}


@pytest.mark.parametrize("what", CLASSES)
def test_classes(what):
    name, options, error, message = CLASSES[what]
    with pytest.raises(error, match=message):
        official("mamba_ssm", name)(16, **options)


def test_dropout_has_no_effect_and_says_so():
    with pytest.warns(UserWarning, match=r"dropout = 0.1 has no effect"):
        official("mamba_ssm", "Mamba3")(16, headdim=8, dropout=0.1)


def test_keywords_that_the_official_class_swallows():
    with pytest.warns(UserWarning, match=r"Mamba3 ignores rope, use_tilelang, as the official one does") as caught:
        block = official("mamba_ssm", "Mamba3")(16, headdim=8, use_tilelang=True, rope=1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    states = block.allocate_inference_cache(1, 4, unheard_of=True)
    with pytest.warns(UserWarning, match=r"Mamba3.step ignores position"):
        block.step(z(1, 16), *states, position=3)


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba3"])
def test_what_blocks_are_given(name):
    block = official("mamba_ssm", name)(16, **({} if name == "Mamba" else {"headdim": 8}), layer_idx=0)
    token, states = (z(2, 16) if name == "Mamba3" else z(2, 1, 16)), block.allocate_inference_cache(2, 9)
    wrong: list[tuple[Any, str]] = [
        (lambda: block(None), "hidden_states has to be a tensor, got None"),
        (lambda: block(z(16)), r"hidden_states needs 3 axes \(batch, sequence, width\), got shape \(16,\)"),
        (lambda: block(z(1, 3, 15)), "hidden_states is 15 wide, but this block takes 16 channels"),
        (lambda: block(z(1, 3, 16).half()), r"hidden_states is torch.float16, expected torch.float32"),
        (lambda: block(z(1, 3, 16).long()), r"hidden_states is torch.int64, expected torch.float32"),
        (lambda: block(z(1, 3, 16), inference_params="x"), "inference_params is a str, expected InferenceParams"),
        (lambda: block.step(token, *[None] * len(states)), "state has to be a tensor, got None"),
        (lambda: block.step(token.long(), *states), r"hidden_states is torch.int64, expected torch.float32"),
        (lambda: block.step(None, *states), "has to be a tensor, got None"),
        (lambda: block.step(token, *[state[:1] for state in states]), r"the state \w+ is torch.float32 of shape \(1, "),
        (
            lambda: block.step(token, *[state.long() for state in states]),
            r"the state \w+ is torch.int64 of shape \(2, ",
        ),
        (lambda: block.step(token, *[state.to("meta") for state in states]), r"the state \w+ is on meta but"),
        (lambda: block.step(token, *[state[:1].expand_as(state) for state in states]), "entries in the same memory"),
        (lambda: block.allocate_inference_cache(2, 9, dtype="x"), "dtype is 'x', expected a floating-point one"),
    ]
    if name != "Mamba":
        wrong.append((lambda: block(z(1, 3, 16), cu_seqlens=5), "cu_seqlens has to be a tensor, got int"))
        wrong.append((lambda: block(z(1, 3, 16), cu_seqlens=z(())), r"cu_seqlens has shape \(\), expected bounds"))
        ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
        wrong.append((lambda: block(z(1, 3, 16), seq_idx=ids), "seq_idx is on meta but hidden_states on cpu"))
    if name == "Mamba2":
        wrong.append((lambda: block(z(3, 16), seqlen=2), r"seqlen is 2 beside u of shape \(3, 16\), expected whole"))
        wrong.append((lambda: block(z(3, 16), seqlen="x"), "seqlen is 'x' beside u"))
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba3"])
def test_decoding(name):
    params = official("mamba_ssm.utils.generation", "InferenceParams")(max_seqlen=9, max_batch_size=1)
    make = official("mamba_ssm", name)
    options = {} if name == "Mamba" else {"headdim": 8}
    with pytest.raises(ValueError, match="a layer_idx of its own"):
        make(16, **options)(z(1, 3, 16), inference_params=params)
    block = make(16, **options, layer_idx=0)
    block(z(1, 3, 16), inference_params=params)
    with pytest.raises(ValueError, match="states of 1 sequences, but 2 came"):
        block(z(2, 3, 16), inference_params=params)
    params.seqlen_offset = 3
    with pytest.raises(ValueError, match="one token per sequence"):
        block(z(1, 2, 16), inference_params=params)


def test_rows_of_attention():
    """It keeps one length for all rows, and all rows."""
    attention = official("mamba_ssm.modules.mha", "MHA")(8, 2, causal=True, layer_idx=0)
    params = official("mamba_ssm.utils.generation", "InferenceParams")(max_seqlen=8, max_batch_size=2)
    attention(z(2, 3, 8), inference_params=params)
    params.seqlen_offset, params.lengths_per_sample = 3, torch.tensor([3, 3])
    attention(z(2, 1, 8), inference_params=params)
    params.lengths_per_sample = torch.tensor([3, 2])
    with pytest.raises(
        ValueError, match=r"lengths_per_sample is \[3, 2\], but MHA knows one length, seqlen_offset = 3"
    ):
        attention(z(2, 1, 8), inference_params=params)
    params.lengths_per_sample, params.batch_size_offset = None, 1
    with pytest.raises(ValueError, match="batch_size_offset = 1: MHA takes"):
        attention(z(1, 1, 8), inference_params=params)
    params.batch_size_offset = 0
    with pytest.raises(ValueError, match="layer 0 has states of 2 sequences, but 1 came"):
        attention(z(1, 1, 8), inference_params=params)


@pytest.mark.parametrize("learned", [False, True])
def test_what_the_simple_block_is_given(learned):
    block = official("mamba_ssm.modules.mamba2_simple", "Mamba2Simple")(16, headdim=8, learnable_init_states=learned)
    ids = torch.zeros(1, 3, dtype=torch.int64)
    wrong: list[tuple[Any, str]] = [
        (lambda: block(None), "hidden_states has to be a tensor, got None"),
        (lambda: block(z(1, 3, 15)), "hidden_states is 15 wide, but this block takes 16 channels"),
        (lambda: block(z(1, 3, 16), seq_idx=[[0, 0, 1]]), "seq_idx has to be a tensor, got list"),
        (lambda: block(z(1, 3, 16), seq_idx=ids[0]), "one id per token"),
        (lambda: block(z(1, 3, 16), seq_idx=ids.to("meta")), "seq_idx is on meta but hidden_states on cpu"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()


def test_packing_that_disagrees():
    block = official("mamba_ssm", "Mamba2")(16, headdim=8)
    ids, bounds = torch.tensor([[0, 0, 1, 1]]), torch.tensor([0, 1, 4])
    with pytest.raises(ValueError, match="disagree about where sequences start"):
        block(z(1, 4, 16), seq_idx=ids, cu_seqlens=bounds)


def test_positional_calls_of_1_x():
    models = "mamba_ssm.models.mixer_seq_simple"
    with pytest.raises(TypeError, match=r"mamba_ssm 1\.x need keywords"):
        official(models, "create_block")(16, {"d_state": 4})
    with pytest.raises(TypeError, match=r"mamba_ssm 1\.x need keywords"):
        official(models, "MixerModel")(16, 2, 100)
    with pytest.raises(ValueError, match=r"'Mamba9' is unknown, expected one of Mamba1, Mamba2, Mamba3"):
        official(models, "create_block")(16, ssm_cfg={"layer": "Mamba9"})


def test_checkpoints_in_other_formats(tmp_path):
    load = official("mamba_ssm", "MambaLMHeadModel").from_pretrained
    with pytest.raises(ValueError, match="there is no directory"):
        load(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match=r"not in the official format; mambakit\.load_model reads it"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"ssm_cfg": {"layer": "Mamba3", "d_state": 8, "headdim": 8}, "n_layer": 0}')
    with pytest.warns(UserWarning, match="how A is activated"), pytest.raises(ValueError, match="no weights in"):
        load(tmp_path)


@pytest.mark.parametrize("name", [SCAN, SSD, SPLIT, CONV, UPDATE, STEP, INNER, SISO, MIMO, NORM])
def test_required_tensors_given_as_none(name):
    call = official(*name)
    parameters = signature(call).parameters
    given = {key: z(2, 4, 5) if p.annotation is torch.Tensor else None for key, p in parameters.items()}
    required = [key for key, tensor in given.items() if tensor is not None]
    assert required
    for missing in required:
        with pytest.raises(ValueError, match=f"^{missing} has to be a tensor, got None$"):
            call(**{**given, missing: None})
