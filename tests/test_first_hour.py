"""What a new user types first, each complaint once: it works, or one line names the argument and what to write."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import mambakit as mk

BLOCKS = {
    "mamba1": lambda: mk.Mamba1(d_model=32, state_rank=8),
    "mamba2": lambda: mk.Mamba2(d_model=32, state_rank=8, per_head_dim=16),
    "mamba2-learned": lambda: mk.Mamba2(d_model=32, state_rank=8, per_head_dim=16, learnable_init_states=True),
    "mamba3": lambda: mk.Mamba3(d_model=32, state_rank=8, per_head_dim=16),
    "mamba3-mimo": lambda: mk.Mamba3(d_model=32, state_rank=8, per_head_dim=16, is_mimo=True, mimo_rank=2),
    "mamba3-quaternion": lambda: mk.Mamba3(d_model=32, state_rank=8, per_head_dim=16, rotation="quaternion"),
    "attention": lambda: mk.Attention(d_model=32, n_heads=4),
    "mlp": lambda: mk.MLP(d_model=32, d_hidden=16),
    "moe": lambda: mk.MoE(d_model=32, d_hidden=16, n_experts=4, top_k=2),
    "parallel": lambda: mk.Parallel(a=mk.Mamba1Config(d_model=32), b=mk.AttentionConfig(32, n_heads=4)),
}
every_block = pytest.mark.parametrize("name", BLOCKS)


def make_model(**options):
    torch.manual_seed(0)
    block = mk.Mamba2Config(d_model=32, state_rank=8, per_head_dim=16)
    return mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=40, **options))


@every_block
def test_a_block_makes_its_config(name):
    block = BLOCKS[name]()
    again = type(block)(block.config)
    assert again.config == block.config
    with pytest.raises(ValueError, match="and got both: in_scale beside a config"):
        type(block)(block.config, in_scale=2.0)
    assert block(torch.randn(2, 5, 32))[0].shape == (2, 5, 32)


def test_a_width_alone_is_told_its_name():
    with pytest.raises(ValueError, match=r"got int; write Mamba3\(d_model=32\)$"):
        mk.Mamba3(32)
    with pytest.raises(ValueError, match=r"^d_model = 32\.0 is not an integer$"):
        mk.Mamba1(d_model=32.0)
    with pytest.raises(ValueError, match=r"^state_rank = '8' is not an integer$"):
        mk.Mamba2(d_model=32, state_rank="8")
    with pytest.raises(ValueError, match=r"^expand = None is not a number$"):
        mk.Mamba3(d_model=32, expand=None)


@pytest.mark.parametrize(
    ("make", "word", "ours"),
    [
        (mk.Mamba1, "d_state", "here: state_rank"),
        (mk.Mamba1Config, "d_conv", "here: conv_kernel"),
        (mk.Mamba2, "headdim", "here: per_head_dim"),
        (mk.Mamba2Config, "d_conv", "here: conv_kernel"),
        (mk.Mamba2, "chunk_size", r"a call says it: path=SsdPath\(chunk_len=...\)"),
        (mk.Mamba2, "layer_idx", "leave it out: caches are passed, not looked up"),
        (mk.Mamba3, "d_state", "here: state_rank"),
        (mk.Mamba3Config, "headdim", "here: per_head_dim"),
        (mk.Mamba3, "A_floor", "here: a_floor"),
        (mk.Mamba3, "stat_rank", "here: state_rank"),
        (mk.Attention, "num_heads", "here: n_heads"),
        (mk.MLP, "intermediate_size", "here: d_hidden"),
        (mk.ModelConfig, "d_model", r"it is the block's: block=Mamba2Config\(d_model=...\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_other_words_are_told_ours(make, word, ours):
    sizes = {} if word == "d_model" else {"d_model": 32}
    config = getattr(make, "config_class", make).__name__
    with pytest.raises(ValueError, match=rf"^{config} has no field '{word}' \({ours}\)$"):
        make(**sizes, **{word: 4})


def test_words_that_stay_the_same():
    assert mk.Mamba2(d_model=32, expand=1, ngroups=2, per_head_dim=16).config.ngroups == 2


@every_block
def test_a_block_among_layers(name):
    torch.manual_seed(0)
    block = BLOCKS[name]()
    layers = nn.Sequential(nn.Linear(4, 32), mk.TensorOnly(block), nn.Linear(32, 3))
    x = torch.randn(2, 5, 4)
    y = layers(x)
    assert torch.equal(y, layers[2](block(layers[0](x))[0]))
    y.sum().backward()
    assert all(p.grad is not None for p in (layers[0].weight, layers[2].weight))
    mask_bs = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    assert torch.equal(mk.TensorOnly(block)(layers[0](x), mask_bs=mask_bs), block(layers[0](x), mask_bs=mask_bs)[0])


def test_stacks_among_layers():
    block = mk.Mamba1Config(d_model=8)
    both = mk.BidirectionalStack(mk.BidirectionalConfig(block=block, n_layer=2))
    layers = nn.Sequential(mk.TensorOnly(mk.Stack(mk.StackConfig(block=block, n_layer=1))), mk.TensorOnly(both))
    assert layers(torch.randn(1, 3, 8)).shape == (1, 3, 8)
    with pytest.raises(ValueError, match=r"takes a block such as Mamba3\(d_model=64\), got a Mamba1Config"):
        mk.TensorOnly(block)


@every_block
@pytest.mark.parametrize("grad", [False, True])
def test_a_step_that_starts_afresh(name, grad):
    """Rows that reset go on as new ones, the others as before, in values and caches."""
    torch.manual_seed(0)
    block = BLOCKS[name]().double()
    if hasattr(block, "init_states"):
        nn.init.normal_(block.init_states)
    before, x_bd = block(torch.randn(3, 4, 32).double())[1], torch.randn(3, 32).double()
    with torch.set_grad_enabled(grad):
        went_on, afresh = block.step(x_bd, before), block.step(x_bd)
        for reset_b in (torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.bool), torch.ones(3).bool()):
            y_bd, after = block.step(x_bd, before, reset_b=reset_b)
            assert_close(y_bd, torch.where(reset_b[:, None], afresh[0], went_on[0]))
            for row, reset in enumerate(reset_b.tolist()):
                # The caches say the same by what comes of them.
                alone = block.step(x_bd[[row]], mk.caches.select((afresh if reset else went_on)[1], [row]))[0]
                assert_close(block.step(x_bd, after)[0][[row]], alone)


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3", "mamba3-mimo"])
def test_a_step_that_starts_afresh_is_an_ordinary_step(name):
    """The same kernels run, and no other."""
    block = BLOCKS[name]()
    x_bd, cache = torch.randn(3, 32), block.fresh_cache(3)
    with torch.no_grad():
        plain = mk.explain(block.step, x_bd, cache)
        assert mk.explain(block.step, x_bd, cache, reset_b=torch.tensor([True, False, True])) == plain


def test_stacks_and_models_start_afresh():
    torch.manual_seed(0)
    block = mk.Mamba3Config(d_model=32, state_rank=8, per_head_dim=16)
    reset_b, ids_b = torch.tensor([True, False]), torch.tensor([3, 4])
    stack, x_bd = mk.Stack(mk.StackConfig(block=block, n_layer=2)).double(), torch.randn(2, 32).double()
    model = make_model().double()
    vectors = mk.LatentModel(mk.LatentConfig(block=block, n_layer=1, d_input=32, d_output=5)).double()
    for whole, token in ((stack, x_bd), (stack.layers[0], x_bd), (vectors, x_bd), (model, ids_b)):
        before = whole.step(token)[1]
        y, after = whole.step(token, before, reset_b=reset_b)
        assert_close(y, torch.where(reset_b[:, None], whole.step(token)[0], whole.step(token, before)[0]))
        assert type(after) is type(before)


def test_reset_b_is_checked_by_its_name():
    block = BLOCKS["mamba2"]()
    x_bd = torch.randn(2, 32)
    for wrong in (torch.ones(3, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"^reset_b needs 1 axis \(batch = 2\), got"):
            block.step(x_bd, reset_b=wrong)
    with pytest.raises(ValueError, match=r"^reset_b has to be boolean, got torch\.float32$"):
        block.step(x_bd, reset_b=torch.ones(2))
    with pytest.raises(ValueError, match=r"^reset_b needs 1 axis \(batch = 2\), got list$"):
        make_model().step(torch.tensor([1, 2]), reset_b=[True, False])


def test_param_groups_of_a_module_of_ones_own():
    own = nn.ModuleDict({"embed": nn.Embedding(7, 32), "mamba": BLOCKS["mamba3"](), "head": nn.Linear(32, 7)})
    for muon in (False, True):
        groups = mk.param_groups(own, weight_decay=0.2, muon=muon)
        decaying = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        assert {id(own["embed"].weight), id(own["head"].weight)} <= decaying
        assert id(own["head"].bias) not in decaying
        assert id(own["mamba"].D) not in decaying
        assert any(group["optimizer"] == "muon" for group in groups) is muon
        assert sum(p.numel() for group in groups for p in group["params"]) == sum(p.numel() for p in own.parameters())


IDS = torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(IDS, labels=IDS), "LanguageModel.* unexpected keyword argument 'labels' .*cross_entropy"),
        (lambda m: m(IDS, attention_mask=IDS), r"LanguageModel.* 'attention_mask' \(here: mask_bs\)"),
        (lambda m: m(IDS, IDS), r"^cache has to be a tuple of 2 layers' caches or None, got a Tensor$"),
        (lambda m: m(IDS + 40), r"^the ids go from 40 to 45, but the vocabulary is 0 to 39$"),
        (lambda m: m(IDS - 1), r"^the ids go from -1 to 4, but the vocabulary is 0 to 39$"),
        (lambda m: m(IDS.half()), r"^ids_bs is torch\.float16, expected torch\.int64$"),
        (lambda m: m.step(IDS[:, 0].float()), r"^ids_b is torch\.float32, expected torch\.int64$"),
        (lambda m: m.step(IDS), r"^ids_b needs 1 axis \(batch\), got \(2, 3\)$"),
        (lambda m: m.backbone(IDS), r"^x_bsd needs 3 axes \(batch, sequence, d_model = 32\), got \(2, 3\)$"),
        (lambda m: m.backbone(torch.zeros(2, 3, 32).long()), r"^x_bsd is torch\.int64, expected torch\.float32"),
        (lambda m: m.backbone.step(torch.zeros(2, 32).long()), r"^x_bd is torch\.int64, expected torch\.float32"),
        (lambda m: m.backbone(torch.zeros(2, 3, 32), mask=IDS), r"Backbone.* 'mask' \(here: mask_bs\)"),
        (lambda m: mk.generate(m, "text", max_new_tokens=1), "^ids is text, expected token ids"),
        (lambda m: mk.LanguageModel(m.config.block), "^LanguageModel takes a ModelConfig, got a Mamba2Config$"),
        (
            lambda m: mk.StackConfig(block=mk.Mamba1(d_model=8), n_layer=1),
            "^block is a Mamba1 itself",
        ),
        (
            lambda m: mk.BidirectionalConfig(block=m.config.block, n_layer=3),
            "^n_layer = 3 is odd; two directions need an even number of layers$",
        ),
    ],
)
def test_errors_name_what_was_typed(call, message):
    with pytest.raises(ValueError, match=message):
        call(make_model())


@every_block
def test_errors_of_a_block_name_what_was_typed(name):
    block = BLOCKS[name]()
    for wrong, given in ((torch.float16, torch.randn(2, 3, 32).half()), (torch.int64, torch.ones(2, 3, 32).long())):
        with pytest.raises(ValueError, match=rf"^x_bsd is {wrong}, expected torch\.float32, .*; cast one of them$"):
            block(given)
        with pytest.raises(ValueError, match=rf"^x_bd is {wrong}, expected torch\.float32, .*; cast one of them$"):
            block.step(given[:, 0])
    with pytest.raises(ValueError, match=r"^x_bd is 31 wide, but this block's d_model is 32$"):
        block.step(torch.randn(2, 31))
