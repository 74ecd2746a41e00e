"""The official blocks and models: states in place, packing, subclasses, generation."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_compat import installed, official  # noqa: F401 - a fixture

SMALL = {"d_model": 16, "d_state": 8}
BLOCKS = {
    "Mamba": ("mamba_ssm.modules.mamba_simple", SMALL),
    "Mamba2": ("mamba_ssm.modules.mamba2", {**SMALL, "headdim": 8, "ngroups": 2}),
    "Mamba3": ("mamba_ssm.modules.mamba3", {**SMALL, "headdim": 8, "is_mimo": True, "mimo_rank": 2}),
}
every_block = pytest.mark.parametrize("name", BLOCKS)


def make(name, **options):
    module, given = BLOCKS[name]
    return official(module, name)(**{**given, **options})


def fresh_params(**options):
    return official("mamba_ssm.utils.generation", "InferenceParams")(max_seqlen=20, max_batch_size=2, **options)


OFFICIAL_NAMES = {
    "Mamba": {"d_model": 16, "d_state": 8, "d_conv": 4, "expand": 2, "d_inner": 32, "dt_rank": 1, "layer_idx": 3},
    "Mamba2": {
        **{"d_model": 16, "d_state": 8, "d_conv": 4, "expand": 2, "d_inner": 32, "d_ssm": 32, "headdim": 8},
        **{"ngroups": 2, "nheads": 4, "chunk_size": 256, "layer_idx": 3},
    },
    "Mamba3": {
        **{"d_model": 16, "d_state": 8, "expand": 2, "d_inner": 32, "headdim": 8, "num_bc_heads": 1, "nheads": 4},
        **{"chunk_size": 64, "is_mimo": True, "mimo_rank": 2, "A_floor": 1e-4, "layer_idx": 3},
    },
}


@every_block
def test_sizes_have_their_official_names(name):
    block = make(name, layer_idx=3)
    assert {attribute: getattr(block, attribute) for attribute in OFFICIAL_NAMES[name]} == OFFICIAL_NAMES[name]


@every_block
def test_states_are_updated_in_place_and_carry_no_gradient(name):
    block, x, params = make(name, layer_idx=1), torch.randn(2, 6, 16), fresh_params()
    states = params.key_value_memory_dict[1] = block.allocate_inference_cache(2, 20)
    before = [state.data_ptr() for state in states]
    whole = block(x)
    y = [block(x[:, :4], inference_params=params)]
    for t in (4, 5):
        params.seqlen_offset = t
        y.append(block(x[:, t : t + 1], inference_params=params))
    torch.testing.assert_close(torch.cat(y, 1), whole, rtol=1e-4, atol=1e-5)
    assert params.key_value_memory_dict[1] is states
    assert [state.data_ptr() for state in states] == before
    assert not any(state.requires_grad for state in states)
    assert all(state.abs().sum() > 0 for state in states)


@every_block
def test_a_prompt_starts_afresh(name):
    """Whatever the states held before, as after `reset`."""
    block, x, params = make(name, layer_idx=0), torch.randn(2, 6, 16), fresh_params()
    first = block(x, inference_params=params)
    params.seqlen_offset = 6
    block(x[:, :1], inference_params=params)
    params.reset(20, 2)
    torch.testing.assert_close(block(x, inference_params=params), first)


@every_block
def test_state_dtypes(name):
    states = make(name, dtype=torch.bfloat16).allocate_inference_cache(2, 20)
    assert states[1].dtype == torch.float32
    asked = make(name).allocate_inference_cache(2, 20, dtype=torch.float64)
    assert asked[-2 if name == "Mamba3" else -1].dtype == torch.float64


@pytest.mark.parametrize("name", ["Mamba2", "Mamba3"])
@pytest.mark.parametrize("by", ["seq_idx", "cu_seqlens", "both"])
def test_packed_sequences(name, by):
    block, x = make(name, layer_idx=0).double(), torch.randn(1, 9, 16).double()
    bounds, ids = torch.tensor([0, 4, 5, 9]), torch.tensor([[3] * 4 + [1] + [2] * 4])
    packing = {"seq_idx": ids, "cu_seqlens": bounds}
    packing = packing if by == "both" else {by: packing[by]}
    alone = [block(x[:, a:b]) for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(block(x, **packing), torch.cat(alone, 1))
    if by == "seq_idx":
        return
    params = fresh_params()
    block(x, **packing, inference_params=params)
    for row, (a, b) in enumerate(((0, 4), (4, 5), (5, 9))):
        single = fresh_params()
        block(x[:, a:b], inference_params=single)
        pairs = zip(params.key_value_memory_dict[0], single.key_value_memory_dict[0], strict=True)
        for packed, one in pairs:
            torch.testing.assert_close(packed[row], one[0])


def test_mamba2_takes_flat_batches():
    block, x = make("Mamba2"), torch.randn(2, 6, 16)
    torch.testing.assert_close(block(x.flatten(0, 1), seqlen=6), block(x).flatten(0, 1))


def test_the_convolution_is_padded_as_officially():
    """Modified forwards call it and cut; weights are where they look for them."""
    block, x = make("Mamba"), torch.randn(2, 32, 7)
    want = F.conv1d(x, block.conv1d.weight, block.conv1d.bias, padding=3, groups=32)
    torch.testing.assert_close(block.conv1d(x), want)
    assert isinstance(block.conv1d, nn.Conv1d)
    assert (block.d_inner, block.d_state, block.d_conv, block.dt_rank, block.expand) == (32, 8, 4, 1, 2)


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_what_wraps_the_convolution_is_called(name):
    block, x, calls = make(name), torch.randn(2, 7, 16), []
    want = block(x)
    block.conv1d.register_forward_hook(lambda *call: calls.append(call))
    torch.testing.assert_close(block(x), want)
    assert len(calls) == 1
    assert len(list(block.conv1d.parameters())) == 2


def test_a_subclass_with_a_forward_of_its_own():
    Mamba, inner = official("mamba_ssm", "Mamba"), official("mamba_ssm", "mamba_inner_fn")

    class Plain(Mamba):
        def __init__(self, d_model, **options):
            super().__init__(d_model, **options)
            self.d_model = d_model
            self.extra = nn.Parameter(torch.zeros(d_model))

        def forward(self, u, inference_params=None):
            xz = (self.in_proj.weight @ u.flatten(0, 1).T).unflatten(1, u.shape[:2]).transpose(0, 1)
            out = inner(
                *(xz, self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight),
                *(self.out_proj.weight, self.out_proj.bias, -torch.exp(self.A_log.float()), None, None),
                *(self.D.float(), self.dt_proj.bias.float()),
            )
            return out + self.extra

    torch.manual_seed(1)
    mine, x = Plain(16, d_state=8), torch.randn(2, 7, 16)
    given = make("Mamba")
    given.load_state_dict({n: t for n, t in mine.state_dict().items() if n != "extra"})
    torch.testing.assert_close(mine(x), given(x))
    mine(x).sum().backward()
    assert all(p.grad is not None for p in mine.parameters())


def test_mamba2_simple():
    """Equal to `Mamba2` with one group but for the learned state, which belongs to the id 0 alone."""
    Simple = official("mamba_ssm.modules.mamba2_simple", "Mamba2Simple")
    options = {**SMALL, "headdim": 8, "dt_limit": (0.01, 0.5), "chunk_size": 4}
    simple = Simple(**options, learnable_init_states=True).double()
    plain = official("mamba_ssm", "Mamba2")(**options).double()
    plain.load_state_dict({n: t for n, t in simple.state_dict().items() if n != "init_states"})
    x, ids = torch.randn(2, 7, 16).double(), torch.tensor([[0] * 3 + [1] * 4, [1] * 3 + [0] * 4])
    torch.testing.assert_close(simple(x), plain(x))
    nn.init.normal_(simple.init_states)
    assert (simple(x) - plain(x)).abs().max() > 1e-3
    packed = simple(x, seq_idx=ids)
    torch.testing.assert_close(packed[:1, :3], simple(x[:1, :3]))
    torch.testing.assert_close(packed[:1, 3:], plain(x[:1, 3:]))
    torch.testing.assert_close(packed[1:], plain(x, seq_idx=ids)[1:])


def test_conv_init():
    assert make("Mamba2", conv_init=1e-3).conv1d.weight.abs().max() <= 1e-3


@every_block
def test_pickling(name):
    block, x = make(name), torch.randn(1, 3, 16)
    torch.testing.assert_close(pickle.loads(pickle.dumps(block))(x), block(x))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_block_is_a_residual_layer(fused, rms):
    Block, MLP = official("mamba_ssm.modules.block", "Block"), official("mamba_ssm.modules.mlp", "GatedMLP")
    Norm = official("mamba_ssm.ops.triton.layer_norm", "RMSNorm") if rms else nn.LayerNorm
    block = Block(16, lambda dim: make("Mamba"), lambda dim: MLP(dim, 20), Norm, fused, True)
    assert block.mlp.fc1.weight.shape == (256, 16)
    x, residual = torch.randn(2, 2, 5, 16).unbind()
    hidden, total = block(x, residual)
    summed = x + residual
    mixed = summed + block.mixer(block.norm(summed))
    torch.testing.assert_close(total, mixed)
    torch.testing.assert_close(hidden, block.mlp(block.norm2(mixed)))
    old = official("mamba_ssm.modules.mamba_simple", "Block")(16, lambda dim: make("Mamba"), Norm, fused_add_norm=fused)
    assert old.mlp is None
    torch.testing.assert_close(old(x)[1], x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_attention_decodes_what_it_reads_at_once(interleaved):
    options = {"num_heads": 4, "num_heads_kv": 2, "d_conv": 3, "mlp_dim": 8, "rotary_emb_dim": 4, "causal": True}
    attention = official("mamba_ssm.modules.mha", "MHA")(16, **options, rotary_emb_interleaved=interleaved, layer_idx=0)
    x, params = torch.randn(2, 6, 16), fresh_params()
    y = [attention(x[:, :3], inference_params=params)]
    for t in (3, 4, 5):
        params.seqlen_offset = t
        y.append(attention(x[:, t : t + 1], inference_params=params))
    torch.testing.assert_close(torch.cat(y, 1), attention(x), rtol=1e-4, atol=1e-5)
    plain = official("mamba_ssm.modules.mha", "MHA")(16, **{**options, "rotary_emb_dim": 0}, layer_idx=0)
    plain.load_state_dict(attention.state_dict())
    # One token attends to itself alone, whatever its angle; several see the difference.
    torch.testing.assert_close(plain(x[:, :1]), attention(x[:, :1]))
    assert (plain(x) - attention(x)).abs().max() > 1e-3


@pytest.fixture
def model():
    config = official("mamba_ssm.models.config_mamba", "MambaConfig")
    ssm_cfg = {"layer": "Mamba2", "d_state": 8, "headdim": 8}
    torch.manual_seed(3)
    return official("mamba_ssm", "MambaLMHeadModel")(config(d_model=16, n_layer=2, vocab_size=30, ssm_cfg=ssm_cfg))


def test_generate_options(model):
    prompt = torch.randint(30, (2, 5))
    greedy = model.generate(prompt, 12)
    assert greedy.shape == (2, 12)
    assert torch.equal(greedy, model.generate(prompt, 12, cg=True))
    out = model.generate(prompt, 12, return_dict_in_generate=True, output_scores=True, vocab_size=30)
    assert torch.equal(torch.stack([s.argmax(-1) for s in out.scores], 1), out.sequences[:, 5:])
    assert {s.shape for s in out.scores} == {(2, 30)}
    assert model.generate(prompt, 12, return_dict_in_generate=True).scores is None
    first = int(greedy[0, 5])
    assert model.generate(prompt[:1], 12, eos_token_id=first).shape == (1, 6)
    teacher = torch.randint(30, (2, 9))
    assert torch.equal(model.generate(prompt, 12, teacher_outputs=teacher)[:, 5:9], teacher[:, 5:9])
    strong = model.generate(prompt, 12, repetition_penalty=1e6)
    assert all(len(set(row[5:].tolist())) == 7 for row in strong)


def test_sampling(model, capsys):
    prompt = torch.randint(30, (2, 5))
    options = {"top_k": 5, "top_p": 0.9, "temperature": 0.7}
    torch.manual_seed(0)
    one = model.generate(prompt, 12, **options)
    torch.manual_seed(0)
    assert torch.equal(one, model.generate(prompt, 12, **options, enable_timing=True))
    assert "decoding time" in capsys.readouterr().out
    sample = official("mamba_ssm.utils.generation", "sample")
    logits = torch.tensor([[0.0, 3.0, 2.0, -9.0]]).expand(500, -1)
    assert set(sample(logits, top_k=2).tolist()) == {1, 2}
    assert set(sample(logits, top_k=0, top_p=0.5).tolist()) == {1}
    assert set(sample(logits, top_k=0, min_p=0.3).tolist()) == {1, 2}
    assert set(sample(logits, top_k=0, temperature=2.0).tolist()) >= {0, 1, 2}


def test_streamer(model):
    class Streamer:
        seen, ended = [], False

        def put(self, ids):
            self.seen.append(ids)

        def end(self):
            self.ended = True

    streamer, prompt = Streamer(), torch.randint(30, (1, 5))
    ids = model.generate(prompt, 9, streamer=streamer)
    assert streamer.ended
    assert torch.equal(torch.cat(streamer.seen, 1), ids)


def test_weights_start_as_officially(model):
    """Small projections into the residual, small embeddings, zero biases but for the step sizes'."""
    backbone = model.backbone
    assert backbone.embedding.weight.std() < 0.03
    assert model.lm_head.weight is backbone.embedding.weight
    bound = 1 / (32 * 2) ** 0.5
    assert backbone.layers[0].mixer.out_proj.weight.abs().max() <= bound
    create = official("mamba_ssm.models.mixer_seq_simple", "create_block")
    init = official("mamba_ssm.models.mixer_seq_simple", "_init_weights")
    block = create(16, ssm_cfg={"d_state": 4, "bias": True}, rms_norm=True, layer_idx=0)
    bias = block.mixer.dt_proj.bias.clone()
    for module in block.modules():
        init(module, 2)
    assert not block.mixer.in_proj.bias.any()
    assert torch.equal(block.mixer.dt_proj.bias, bias)
