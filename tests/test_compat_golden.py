"""The official functions' and blocks' stored numbers, through the official names."""

import pytest
import torch

from compare import GOLDEN, error, load_golden
from test_compat import MAMBA3, installed, official  # noqa: F401 - a fixture
from test_golden import FLOAT64, FLOOR, compare, continued, distance
from test_golden_blocks import Caller


def values(x: dict, *names: str) -> list:
    return [x.get(f"in.{name}") for name in names]


@pytest.mark.golden("mamba1_scan")
@pytest.mark.parametrize("name", ["selective_scan_fn", "selective_scan_ref"])
def test_selective_scan(case, name):
    scan = official("mamba_ssm.ops.selective_scan_interface", name)
    config = case["config"]

    def run(x, length):
        u, delta, z = (None if t is None else t[..., :length] for t in values(x, "u", "delta", "z"))
        A = torch.complex(x["in.A_re"], x["in.A_im"]) if config.get("complex") else x["in.A"]
        step = 2 if config.get("complex") else 1
        B, C = (t if t.dim() == 2 else t[..., : step * length] for t in values(x, "B", "C"))
        D, bias = values(x, "D", "delta_bias")
        out, state = scan(u, delta, A, B, C, D, z, bias, config.get("softplus", True), return_last_state=True)
        torch.testing.assert_close(scan(u, delta, A, B, C, D, z, bias, config.get("softplus", True)), out)
        if config.get("complex"):
            return out, {"last_state_re": state.real, "last_state_im": state.imag}
        return out, {"last_state": state}

    def compute(x):
        y, states = run(x, config["seqlen"])
        out = {"y": y, **states}
        if config.get("split"):
            out |= {f"split.{name}": state for name, state in run(x, config["split"])[1].items()}
        return out

    compare(case, compute)


@pytest.mark.golden("ssm_update")
@pytest.mark.parametrize("name", ["selective_state_update", "selective_state_update_ref"])
def test_selective_state_update(case, name):
    update = official("mamba_ssm.ops.triton.selective_state_update", name)

    def compute(x):
        A, D, bias = values(x, "A", "D", "dt_bias")
        state, y = x["in.state"].detach().clone(), []
        kept = state.data_ptr()
        for t in range(case["config"]["steps"]):
            token, dt, B, C, z = (None if v is None else v[:, t] for v in values(x, "x", "dt", "B", "C", "z"))
            y.append(update(state, token, dt, A, B, C, D, z, bias, dt_softplus=True))
        assert state.data_ptr() == kept
        return {"y": torch.stack(y, 1), "final_state": state}

    compare(case, compute)


@pytest.mark.golden("ssd_minimal")
def test_ssd_minimal(case):
    scan = official("mamba_ssm.modules.ssd_minimal", "ssd_minimal_discrete")

    def whole(x, states):
        entering = x.get("in.initial_states") if states is None else states["final_state"]
        entering = None if entering is None else entering[:, None]
        y, state = scan(*values(x, "X", "A", "B", "C"), case["config"]["block_len"], entering)
        return {"y": y, "final_state": state}

    compare(case, lambda x: continued(case["config"], whole, dict.fromkeys(("in.X", "in.A", "in.B", "in.C"), 1), x))


@pytest.mark.golden("ssd_combined")
def test_mamba_chunk_scan_combined(case):
    scan = official("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    config = case["config"]

    def whole(x, states):
        entering = x.get("in.initial_states") if states is None else states["final_state"]
        D, z, bias, seq_idx = values(x, "D", "z", "dt_bias", "seq_idx")
        options = {"dt_softplus": config.get("dt_softplus", True), "return_final_states": True}
        options["dt_limit"] = tuple(config.get("dt_limit", (0.0, float("inf"))))
        args = (*values(x, "x", "dt", "A", "B", "C"), config["chunk_size"], D, z, bias, entering, seq_idx)
        y, state = scan(*args, **options)
        out = {"y": y, "final_state": state}
        if "out.varlen_states" in case["tensors"]:
            bounds = torch.tensor([0, *config["segments"][0]]).cumsum(0)
            packed = scan(*args, bounds, **options, return_varlen_states=True)
            torch.testing.assert_close(packed[:2], (y, state))
            out["varlen_states"] = packed[2]
        return out

    compare(case, lambda x: continued(config, whole, tokens(), x))


def tokens() -> dict[str, int]:
    return dict.fromkeys(("in.x", "in.dt", "in.B", "in.C", "in.z"), 1)


@pytest.mark.golden("rmsnorm_gated")
def test_rmsnorm_gated(case):
    config = case["config"]
    norm = official("mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
    make = official("mamba_ssm.ops.triton.layernorm_gated", "RMSNorm")
    options = {name: config.get(name) for name in ("eps", "group_size", "norm_before_gate")}

    def compute(x):
        y = norm(x["in.x"], x["param.weight"], None, x.get("in.z"), **options)
        module = make(config["shape"][-1], **options, dtype=y.dtype)
        module.weight.data.copy_(x["param.weight"])
        torch.testing.assert_close(module(x["in.x"], x.get("in.z")), y)
        return {"y": y}

    compare(case, compute)


STATES = ("angle_state", "ssm_state", "k_state", "v_state")
SEQUENCE = ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias")
MAMBA3_TOKENS = {
    **dict.fromkeys(("in.Q", "in.K", "in.V", "in.Z", "in.Angles"), 1),
    **dict.fromkeys(("in.ADT", "in.DT", "in.Trap"), 2),
}


@pytest.mark.golden("mamba3_siso")
def test_mamba3_siso_combined(case):
    scan = official(f"{MAMBA3}.mamba3_siso_combined", "mamba3_siso_combined")
    config = case["config"]

    def whole(x, states):
        entering = values(x, *STATES) if states is None else [states[name] for name in STATES]
        args = (*values(x, *SEQUENCE, "Angles", "D", "Z"), entering, config["chunk_size"], True)
        return dict(zip(("y", *STATES), scan(*args, *values(x, "cu_seqlens")), strict=True))

    compare(case, lambda x: continued(config, whole, MAMBA3_TOKENS, x))


@pytest.mark.golden("mamba3_siso", where=lambda case: "segments" not in case["config"])
def test_mamba3_siso_step(case):
    step = official(f"{MAMBA3}.mamba3_siso_step", "mamba3_siso_step")
    config = case["config"]

    def compute(x):
        b, h, p, r, a = (config[n] for n in ("batch", "nheads", "headdim", "dstate", "nangles"))
        like = x["in.V"]
        states = values(x, *STATES)
        if states[0] is None:
            states = [
                like.new_zeros(s, dtype=torch.promote_types(like.dtype, torch.float32))
                for s in ((b, h, a), (b, h, p, r), (b, h, r), (b, h, p))
            ]
        out, y = {}, []
        for t in range(config["seqlen"]):
            Q, K, V, Angles, Z = (None if v is None else v[:, t] for v in values(x, "Q", "K", "V", "Angles", "Z"))
            ADT, DT, Trap = (v[..., t] for v in values(x, "ADT", "DT", "Trap"))
            y_t, states = step(
                Q, K, V, ADT, DT, Trap, *values(x, "Q_bias", "K_bias"), Angles, *values(x, "D"), Z, states
            )
            y.append(y_t)
            if t + 1 == config.get("split"):
                out |= {f"split.{name}": state for name, state in zip(STATES, states, strict=True)}
        return {**out, "y": torch.stack(y, 1), **dict(zip(STATES, states, strict=True))}

    compare(case, compute)


def is_a_call(case):
    """The official function takes no states and rotates halves."""
    return not case["config"].get("init") and not case["config"].get("rotate_pairwise")


@pytest.mark.golden("mamba3_mimo", where=is_a_call)
def test_mamba3_mimo(case):
    scan = official("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo", "mamba3_mimo")
    config = case["config"]

    def call(x):
        args = values(x, *SEQUENCE, "MIMO_V", "MIMO_Z", "MIMO_O", "Angles", "D", "Z")
        dtype = x["in.V"].dtype
        norm = {"fuse_pregate_headwise_rms_norm": config.get("fused_norm", False)}
        norm["outproj_norm_weight"] = x.get("in.outproj_norm_weight")
        after = (config["chunk_size"], config["rotary_dim_divisor"], dtype, True, x.get("in.cu_seqlens"))
        return dict(zip(("y", *STATES), scan(*args, *after, **norm), strict=True))

    def compute(x):
        out = call(x)
        if config.get("split"):
            first = {
                n: t.narrow(MAMBA3_TOKENS[n], 0, config["split"]) if n in MAMBA3_TOKENS else t for n, t in x.items()
            }
            out |= {f"split.{name}": state for name, state in call(first).items() if name != "y"}
        return out

    compare(case, compute)


@pytest.mark.golden(
    "mamba3_mimo", where=lambda case: "split" in case["config"] and case["config"].get("contract", True)
)
def test_mamba3_mimo_token_by_token(case):
    """Rotation and update as the official block's step calls them: states in place, no gradients."""
    turn = official(f"{MAMBA3}.mamba3_mimo_rotary_step", "apply_rotary_qk_inference_fwd")
    update = official("mamba_ssm.ops.cute.mamba3.mamba3_step_fn", "mamba3_step_fn")
    config, stored = case["config"], load_golden(case)
    x = {n: t.double() if t.is_floating_point() else t for n, t in stored.items() if n.startswith("in.")}
    b, h, p, r, m = (config[n] for n in ("batch", "nheads", "headdim", "dstate", "rank"))
    a = r // config["rotary_dim_divisor"]
    shapes = dict(zip(STATES, ((b, h, a), (b, h, p, r), (b, m, h, r), (b, h, p)), strict=True))
    angle, ssm, k, v = (x.get(f"in.{n}", torch.zeros(s, dtype=torch.float64)).clone() for n, s in shapes.items())
    rank_first = {n: x[f"in.{n}"].transpose(0, 1) for n in ("Q_bias", "K_bias", "MIMO_V", "MIMO_Z", "MIMO_O")}
    got, y = {}, []
    for t in range(config["seqlen"]):
        q_t, k_t = (x[f"in.{n}"][:, t].repeat_interleave(h // config["ngroups"], 2) for n in ("Q", "K"))
        dt = x["in.DT"][..., t]
        biases = (rank_first["Q_bias"], rank_first["K_bias"])
        pairwise = config.get("rotate_pairwise", False)
        q_t, k_t, angle = turn(q_t, k_t, angle, x["in.Angles"][:, t], dt, *biases, rotate_pairwise=pairwise)
        out = torch.full((b, h, p), float("nan"), dtype=torch.float64)
        args = (ssm, k, v, x["in.ADT"][..., t] / dt, k_t, q_t, x["in.D"], x["in.V"][:, t], dt)
        projections = (rank_first["MIMO_V"], rank_first["MIMO_O"])
        gate = {"z": x["in.Z"][:, t], "zproj": rank_first["MIMO_Z"]}
        update(*args, torch.sigmoid(x["in.Trap"][..., t]), *projections, out=out, **gate)
        k, v = k_t, x["in.V"][:, t]
        y.append(out)
        if t + 1 == config["split"]:
            got |= {f"split.{n}": s.clone() for n, s in zip(STATES, (angle, ssm, k, v), strict=True)}
    got |= {"y": torch.stack(y, 1), **dict(zip(STATES, (angle, ssm, k, v), strict=True))}
    for name, tensor in got.items():
        assert distance(name, tensor, stored[f"out.{name}"]) <= FLOAT64, name


BLOCKS = {
    "mamba1_block": ("mamba_ssm.modules.mamba_simple", "Mamba"),
    "mamba2_block": ("mamba_ssm.modules.mamba2", "Mamba2"),
    "mamba3_block": ("mamba_ssm.modules.mamba3", "Mamba3"),
}
BLOCK_STATES = {
    "mamba1_block": ("conv_state", "ssm_state"),
    "mamba2_block": ("conv_state", "ssm_state"),
    "mamba3_block": ("angle_state", "ssm_state", "k_state", "v_state"),
}


@pytest.mark.golden(*BLOCKS)
def test_blocks(case):
    """Forward, prefill into `InferenceParams`, steps from there, and every gradient of the forward."""
    make = official(*BLOCKS[case["family"]])
    params = official("mamba_ssm.utils.generation", "InferenceParams")
    config, names = case["config"], BLOCK_STATES[case["family"]]
    activation = {"a_activation": config["A_activation"]} if "A_activation" in config else {}

    def compute(x):
        u = x["in.u"]
        block = make(**config["kwargs"], **activation, layer_idx=3, dtype=u.dtype)
        given = {name[6:]: t for name, t in x.items() if name.startswith("param.")}
        assert block.state_dict().keys() == given.keys()

        def call(method, *args, **options):
            weights = {f"block.{name}": t for name, t in given.items()}
            return torch.func.functional_call(Caller(block, method), weights, args, options)

        packing = {name: x[f"in.{name}"] for name in ("seq_idx", "cu_seqlens") if f"in.{name}" in x}
        out = {"y": call("forward", u, **packing)}
        if packing:
            return out
        split, length = config["split"], u.shape[1]
        whole = params(max_seqlen=length, max_batch_size=len(u))
        torch.testing.assert_close(call("forward", u, inference_params=whole), out["y"])
        out |= {f"final.{n}": s for n, s in zip(names, whole.key_value_memory_dict[3], strict=True)}
        cache = params(max_seqlen=length, max_batch_size=len(u))
        if split:
            call("forward", u[:, :split], inference_params=cache)
            states = cache.key_value_memory_dict[3]
            out |= {f"split.{n}": s.clone() for n, s in zip(names, states, strict=True)}
        else:
            cache.key_value_memory_dict[3] = block.allocate_inference_cache(len(u), length)
        steps = []
        for t in range(split, length):
            # Offset 0 would be a prompt.
            cache.seqlen_offset = max(t, 1)
            steps.append(call("forward", u[:, t : t + 1], inference_params=cache))
        if u.dtype == torch.float64:
            for n, s in zip(names, cache.key_value_memory_dict[3], strict=True):
                assert distance(n, s, out[f"final.{n}"]) <= FLOAT64, n
        return out | {"step_y": torch.cat(steps, 1)}

    compare(case, compute)


def is_mamba3(case):
    return case["model_config"]["ssm_cfg"].get("layer") == "Mamba3"


@pytest.mark.golden("lm_official")
@pytest.mark.filterwarnings("ignore:official Mamba-3 checkpoints")
def test_language_models(case):
    """Logits, loss, every gradient, and `generate`, from the official files; attention too."""
    load = official("mamba_ssm.models.mixer_seq_simple", "MambaLMHeadModel").from_pretrained
    want = load_golden(case)
    model = load(GOLDEN / case["dir"], dtype=torch.float64)
    ids = want["input_ids"]
    logits = model(ids).logits
    tol = case["tol"]["float64"]
    assert error(logits, want["logits"], FLOOR) <= tol["out"]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    stored = {name[5:]: t for name, t in want.items() if name.startswith("grad.")}
    got = dict(model.named_parameters())
    assert got.keys() == stored.keys()
    bad = {n: error(got[n].grad, g, FLOOR) for n, g in stored.items()}
    assert all(e <= tol["grad"] for e in bad.values()), bad
    vocab_size = case["model_config"]["vocab_size"]
    ids = load(GOLDEN / case["dir"]).generate(want["greedy_prompt"], want["greedy_ids"].shape[1], vocab_size=vocab_size)
    assert torch.equal(ids, want["greedy_ids"])


@pytest.mark.golden("lm_official")
@pytest.mark.filterwarnings("ignore:official Mamba-3 checkpoints")
def test_saving_gives_back_the_official_files(case, tmp_path):
    load = official("mamba_ssm.models.mixer_seq_simple", "MambaLMHeadModel").from_pretrained
    model = load(GOLDEN / case["dir"])
    model.save_pretrained(tmp_path)
    stored = torch.load(GOLDEN / case["weights"], weights_only=True)
    got = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert got.keys() == stored.keys()
    assert all(torch.equal(got[name], stored[name]) for name in stored)
    again = load(tmp_path)
    assert again.config == model.config
