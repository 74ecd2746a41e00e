"""The official cases of Mamba-3, SISO and MIMO, and of generation with packed prompts; see test_compat_official."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from oracles.elementwise import rotate_loop
from oracles.ssd import mamba3
from test_compat import installed, official  # noqa: F401 - a fixture
from test_compat_official import BHALF, BOTH, FULL, HALF, TRITON, grid, sized

SISO = f"{TRITON}.mamba3"


def relative(got, want, is_angle=False):
    """The published measure: the error that 95 % of the entries that are not tiny stay below."""
    got, want = got.detach().float(), want.detach().float()
    gap = (got - want).abs()
    if is_angle:
        gap = (torch.remainder(got - want + torch.pi, 2 * torch.pi) - torch.pi).abs()
    gap = gap if is_angle else gap / (want.abs() + 1e-6)
    gap = gap[want.abs() >= 1e-2].flatten()
    return gap.kthvalue(max(1, -(-95 * gap.numel() // 100))).values.item() if gap.numel() else 0.0


def reference(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, states, MIMO_V, pairing):
    """Ranked outputs before any projection, and the states, token by token in float32. Z is applied by the caller."""
    heads, wide = V.shape[2], torch.float32
    angle = torch.cumsum(torch.pi * torch.tanh(Angles.to(wide)) * DT.mT[..., None], dim=1)
    angle = angle if states is None else angle + states[0][:, None]
    q, k = (
        rotate_loop(t.to(wide).repeat_interleave(heads // t.shape[3], dim=3) + bias.transpose(0, 1), angle, pairing)
        for t, bias in ((Q, Q_bias), (K, K_bias))
    )
    v = V.to(wide)[:, :, None] * (1 if MIMO_V is None else MIMO_V.transpose(0, 1))
    zeros = torch.zeros(len(V), heads, V.shape[3], Q.shape[-1])
    if states is None:
        entering = (zeros, torch.zeros_like(v[:, 0]), torch.zeros_like(k[:, 0]))
    else:
        entering = (states[1], states[3][:, None], states[2][:, None])
    y, state = mamba3(v, k, q, ADT.mT, DT.mT, torch.sigmoid(Trap.to(wide)).mT, *entering)
    y = y if D is None else y + D[:, None] * v
    return y, (angle[:, -1], state, k[:, -1], V[:, -1].to(wide))


def siso_inputs(batch, seqlen, states=False, rows=None, heads=None):
    heads, groups, r, p = heads or sized(32, 4), sized(4, 2), sized(128, 16), sized(64, 8)
    Q, K = (F.rms_norm(torch.randn(batch, seqlen, groups, r, dtype=BHALF), (r,)) for _ in range(2))
    DT = torch.exp(
        torch.empty(batch, heads, seqlen).uniform_(torch.log(torch.tensor(0.001)), torch.log(torch.tensor(0.1)))
    )
    given = {"Q": Q, "K": K, "V": torch.randn(batch, seqlen, heads, p, dtype=BHALF)}
    given |= {"ADT": -torch.empty(batch, heads, seqlen).uniform_(1, 16) * DT, "DT": DT}
    given |= {"Trap": torch.rand(batch, heads, seqlen, dtype=BHALF)}
    given |= {name: torch.randn(heads, r, dtype=BHALF) for name in ("Q_bias", "K_bias")}
    given |= {"Angles": torch.randn(batch, seqlen, heads, r // 4), "D": torch.ones(heads)}
    given |= {"Z": torch.randn(batch, seqlen, heads, p, dtype=BHALF)}
    n = rows or batch
    shapes = [(n, heads, r // 4), (n, heads, p, r), (n, heads, r), (n, heads, p)]
    return given, tuple(torch.randn(*shape) for shape in shapes) if states else None


def siso_reference(given, states):
    ranked = {n: t[:, :, None] if n in "QK" else t[:, None] if "bias" in n else t for n, t in given.items()}
    y, after = reference(**ranked, states=states, MIMO_V=None, pairing="interleaved")
    return y[:, :, 0] * F.silu(given["Z"].float()), (after[0], after[1], after[2][:, 0], after[3])


def check_states(got, want, rtol):
    for i, (one, two) in enumerate(zip(got, want, strict=True)):
        assert relative(one, two, is_angle=i == 0) < rtol


def test_siso_steps():
    torch.manual_seed(42)
    given, states = siso_inputs(sized(128, 2), sized(2345, 40), states=True)
    want, after = siso_reference(given, states)
    step, outputs = official(f"{SISO}.mamba3_siso_step", "mamba3_siso_step"), []
    for t in range(given["V"].shape[1]):
        token = {n: g[:, t] for n, g in given.items() if n in ("Q", "K", "V", "Angles", "Z")}
        token |= {n: given[n][..., t] for n in ("ADT", "DT", "Trap")}
        out, states = step(**token, **{n: given[n] for n in ("Q_bias", "K_bias", "D")}, Input_States=states)
        outputs.append(out)
    assert relative(torch.stack(outputs, dim=1), want) < 5e-2
    check_states(states, after, 5e-2)


@pytest.mark.parametrize("packed", BOTH)
def test_siso_combined(packed):
    """Forward and backward, in two halves with states between them, or packed."""
    torch.manual_seed(42)
    combined = official(f"{SISO}.mamba3_siso_combined", "mamba3_siso_combined")
    lengths = sized([2345 + i for i in range(8)], [31, 32, 33]) if packed else [sized(2345, 75)]
    batch, total = (1, sum(lengths)) if packed else (sized(16, 2), lengths[0])
    given, _ = siso_inputs(batch, total)
    got, want = ({n: t.clone().requires_grad_() for n, t in given.items()} for _ in range(2))
    time = {n: 2 if n in ("ADT", "DT", "Trap") else 1 for n in given if "bias" not in n and n != "D"}
    bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)

    def part(inputs, start, end):
        return {n: t.narrow(time[n], start, end - start) if n in time else t for n, t in inputs.items()}

    if packed:
        out, *states = combined(**got, return_final_states=True, cu_seqlens=bounds)
        results = [siso_reference(part(want, *pair), None) for pair in pairwise(bounds.tolist())]
        out_ref = torch.cat([y for y, _ in results], dim=1)
        after = [torch.cat(rows) for rows in zip(*(s for _, s in results), strict=True)]
    else:
        half = total // 2
        first, *middle = combined(**part(got, 0, half), return_final_states=True)
        second, *states = combined(**part(got, half, total), Input_States=tuple(middle), return_final_states=True)
        out = torch.cat((first, second), dim=1)
        out_ref, after = siso_reference(want, None)
    assert relative(out, out_ref) < 1e-1
    check_states(states, after, 1e-1)
    head = torch.randn_like(out_ref)
    (out.float() * head).sum().backward()
    (out_ref * head).sum().backward()
    for name in given:
        assert relative(got[name].grad, want[name].grad, name == "Angles") < 1e-1, name


CASES = [(16, 64, 4), (32, 64, 4), (64, 64, 4), (128, 64, 4), (256, 64, 4), (64, 128, 4), (128, 32, 4), (128, 128, 4)]
CASES += [(128, 64, 8), (128, 64, 2), (128, 64, 1)]


@grid("case, form", 6, {"case": CASES, "form": ["reduced", "by rank", "normed"]})
def test_mimo(case, form):
    """Outputs, states and gradients within a tenth of the largest entry."""
    torch.manual_seed(0)
    n, p, r = case if FULL else (min(case[0], 32), min(case[1], 16), case[2])
    b, s, h = sized(4, 1), sized(2048, 48), sized(16, 4)
    given = {"Q": torch.randn(b, s, r, 1, n, dtype=BHALF), "K": torch.randn(b, s, r, 1, n, dtype=BHALF)}
    given |= {"V": torch.randn(b, s, h, p, dtype=BHALF)}
    dt = F.softplus(-3 + torch.randn(b, h, s))
    given |= {"ADT": -dt * torch.rand(b, h, s), "DT": dt, "Trap": torch.rand(b, h, s, dtype=BHALF)}
    given |= {"Q_bias": torch.randn(h, r, n), "K_bias": torch.randn(h, r, n), "MIMO_V": torch.randn(h, r, p) / r}
    given |= {"Angles": torch.rand(b, s, h, n // 4), "D": torch.randn(h)}
    by_rank = form == "by rank"
    gate = {} if by_rank else {"MIMO_Z": torch.randn(h, r, p), "MIMO_Out": torch.randn(h, r, p) / r}
    gate |= {} if by_rank else {"Z": torch.randn(b, s, h, p, dtype=BHALF)}
    given |= gate | ({"outproj_norm_weight": torch.randn(h, p)} if form == "normed" else {})
    got, want = ({n: t.clone().requires_grad_() for n, t in given.items()} for _ in range(2))
    absent = dict.fromkeys(("MIMO_Z", "MIMO_Out", "Z"))
    out, *states = official("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo", "mamba3_mimo")(
        **{**absent, **got},
        chunk_size=16,
        rotary_dim_divisor=4,
        dtype=BHALF,
        return_state=True,
        fuse_pregate_headwise_rms_norm=form == "normed",
    )
    scanned = {n: want[n] for n in given if n not in ("MIMO_Z", "MIMO_Out", "Z", "outproj_norm_weight")}
    y, after = reference(**scanned, Z=None, states=None, pairing="half")
    if form == "normed":
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * want["outproj_norm_weight"]
    if not by_rank:
        y = y * F.silu(want["Z"].float()[:, :, None] * want["MIMO_Z"].transpose(0, 1))
        y = (y * want["MIMO_Out"].transpose(0, 1)).sum(2)

    def within(label, one, two):
        gap = (one.float() - two.float()).abs().max() / two.float().abs().max().clamp(min=1e-5)
        assert gap < 0.1, (label, gap)

    within("out", out, y)
    for label, one, two in zip(("ssm", "k", "v"), states[1:], after[1:], strict=True):
        within(label, one, two)
    head = torch.randn_like(y)
    (out.float() * head).sum().backward()
    (y * head).sum().backward()
    for name in given:
        within(name, got[name].grad, want[name].grad)


@pytest.mark.filterwarnings("ignore:Mamba3 ignores use_tilelang")
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("is_outproj_norm", BOTH)
def test_steps_are_the_forward_pass(rank, is_outproj_norm):
    torch.manual_seed(0)
    heads, seqlen, batch = sized(64, 4), 32, sized(128, 2)
    options = {
        "d_state": sized(128, 32),
        "headdim": 64,
        "is_mimo": rank > 1,
        "mimo_rank": rank,
        "use_tilelang": rank > 1,
    }
    options |= {"is_outproj_norm": is_outproj_norm, "layer_idx": 0, "dtype": BHALF, "chunk_size": 64 // rank}
    block = official("mamba_ssm", "Mamba3")(heads * 64 // 2, **options)
    x = torch.randn(batch, seqlen, heads * 64 // 2, dtype=BHALF)
    with torch.no_grad():
        want, states, outputs = block(x), block.allocate_inference_cache(batch, seqlen), []
        for t in range(seqlen):
            out, *states = block.step(x[:, t], *states)
            outputs.append(out)
    torch.testing.assert_close(torch.stack(outputs, dim=1), want, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("rank", [1, 2])
def test_packed_sequences_of_a_block(rank):
    torch.manual_seed(0)
    options = {"d_state": 64, "headdim": 64, "is_mimo": rank > 1, "mimo_rank": 2, "chunk_size": 16, "dtype": BHALF}
    block, lengths = official("mamba_ssm", "Mamba3")(128, **options), [17, 25, 19]
    parts = [torch.randn(1, n, 128, dtype=BHALF) for n in lengths]
    packed = torch.cat(parts, dim=1).requires_grad_()
    out = block(packed, cu_seqlens=F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32))
    for got, part in zip(out.split(lengths, dim=1), parts, strict=True):
        torch.testing.assert_close(got, block(part), rtol=0, atol=5e-2)
    out.float().sum().backward()
    for name, leaf in {"x": packed, **dict(block.named_parameters())}.items():
        assert leaf.grad is not None, name
        assert leaf.grad.isfinite().all(), name


def model():
    torch.manual_seed(2357)
    config = official("mamba_ssm.models.config_mamba", "MambaConfig")(
        d_model=sized(1024, 128),
        n_layer=4,
        vocab_size=sized(50277, 1003),
        ssm_cfg={"layer": "Mamba2"},
        rms_norm=True,
        residual_in_fp32=True,
        fused_add_norm=True,
        pad_vocab_size_multiple=16,
    )
    return official("mamba_ssm", "MambaLMHeadModel")(config, dtype=HALF)


@torch.no_grad()
def test_generation():
    lm = model()
    x = torch.randint(0, 1000, (3, 20))
    want = lm(x).logits[:, 9:-1]
    options = {"output_scores": True, "return_dict_in_generate": True, "cg": True, "teacher_outputs": x}
    scores = torch.stack(lm.generate(x[:, :10], max_length=20, **options).scores, dim=1)
    assert torch.allclose(scores, want, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("padded", BOTH)
@torch.no_grad()
def test_generation_of_packed_prompts(padded):
    """Within twice the error of generating one after the other; with padding the bounds end before the tokens."""
    lm, genlen, lengths = model(), sized(20, 6), sized([170, 65, 100], [70, 25, 40])
    lengths = [*lengths, sized(512, 160) - sum(lengths)] if padded else lengths
    real = len(lengths) - padded
    xs = [torch.randint(0, 1000, (1, n)) for n in lengths]
    ids = torch.repeat_interleave(torch.arange(real), torch.tensor(lengths[:real]))[None].to(torch.int32)
    want = lm(torch.cat(xs[:real], dim=1), seq_idx=ids).logits.split(lengths[:real], dim=1)
    want = torch.cat([logits[:, -genlen - 1 : -1] for logits in want])
    options = {"output_scores": True, "return_dict_in_generate": True, "cg": True}
    alone = [
        torch.stack(lm.generate(x[:, :-genlen], max_length=x.shape[1], teacher_outputs=x, **options).scores, dim=1)
        for x in xs[:real]
    ]
    prompts = torch.tensor([n - genlen for n in lengths])
    bounds = F.pad(prompts.cumsum(0), (1, 0)).to(torch.int32)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), prompts)[None].to(torch.int32)
    if padded:
        bounds[-1] = bounds[-2]
    params = official("mamba_ssm.utils.generation", "InferenceParams")(max_seqlen=2048, max_batch_size=len(lengths))
    tokens = torch.cat([x[:, :-genlen] for x in xs], dim=1)
    logits = lm(tokens, inference_params=params, seq_idx=ids, cu_seqlens=bounds).logits
    scores = [logits[0, bounds[1:] - 1][:, None]]
    for i in range(genlen - 1):
        params.seqlen_offset += 1
        token = torch.stack([x[0, i - genlen] for x in xs])[:, None]
        scores.append(lm(token, inference_params=params, num_last_tokens=1).logits)
    got = torch.cat(scores, dim=1)[:real]
    # Both may be zero here: all is rounded once, from float32.
    assert (got - want).abs().max() <= 2 * (torch.cat(alone) - want).abs().max()
