"""Optimizer groups: each parameter once, each map on its own, one step as on separately stored matrices."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import mambakit as mk
from compare import check
from mambakit.blocks.param_groups import param_groups

BLOCKS = {
    "mamba1": lambda: mk.Mamba1(mk.Mamba1Config(d_model=16, state_rank=4, bias=True)),
    "mamba2": lambda: mk.Mamba2(mk.Mamba2Config(d_model=16, state_rank=8, per_head_dim=8, ngroups=2)),
    "mamba2_mlp": lambda: mk.Mamba2(mk.Mamba2Config(d_model=16, state_rank=8, per_head_dim=8, d_ssm=16)),
    "mamba3": lambda: mk.Mamba3(mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8, is_outproj_norm=True)),
    "mamba3_mimo": lambda: mk.Mamba3(
        mk.Mamba3Config(
            d_model=16, state_rank=8, per_head_dim=8, ngroups=2, is_mimo=True, mimo_rank=3, rotation="quaternion"
        )
    ),
    "attention": lambda: mk.Attention(mk.AttentionConfig(16, 4, 2, 8, rope_theta=100.0, bias=True)),
}

# The table of the specification: the rows of every map, those for AdamW by name.
ROWS = {
    "mamba1": {"in_proj": [32, 32], "x_proj": ["dt 1", 4, 4], "out_proj": [16]},
    "mamba2": {"in_proj": [32, 32, 16, 16, "dt 4"], "out_proj": [16]},
    "mamba2_mlp": {"in_proj": [16, 16, 16, 16, 8, 8, "dt 2"], "out_proj": [16]},
    "mamba3": {"in_proj": [32, 32, 8, 8, "dt 4", "A 4", "lambda 4", 2], "out_proj": [16]},
    "mamba3_mimo": {"in_proj": [32, 32, 48, 48, "dt 4", "A 4", "lambda 4", 12], "out_proj": [16]},
    "attention": {"in_proj": [32, 16, 16], "out_proj": [16]},
}


@pytest.fixture(params=BLOCKS)
def family(request) -> str:
    return request.param


@pytest.fixture
def block(family) -> Any:
    return BLOCKS[family]()


def of(groups: list[dict[str, Any]], optimizer: str) -> list[dict[str, Any]]:
    return [group for group in groups if group["optimizer"] == optimizer]


def members(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def optimizers(groups: list[dict[str, Any]], lr: float = 0.01) -> list[torch.optim.Optimizer]:
    """One each for the groups that name it."""
    kinds = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}
    return [kind(of(groups, name), lr=lr) for name, kind in kinds.items() if of(groups, name)]


def loss_of(block, x: Tensor) -> Tensor:
    return block(x)[0].square().mean()


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def addresses(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor.element_size())


@pytest.mark.parametrize("muon", [False, True])
def test_every_trainable_element_is_in_one_group(block, muon):
    next(p for name, p in block.named_parameters() if not name.endswith("weight")).requires_grad_(False)
    held = [address for tensor in members(block.param_groups(muon=muon)) for address in addresses(tensor)]
    wanted = [address for tensor in block.parameters() if tensor.requires_grad for address in addresses(tensor)]
    assert sorted(held) == sorted(wanted)


def test_only_matrices_decay_and_no_flagged_ones(block):
    groups = block.param_groups(weight_decay=0.3)
    decay_of = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in block.named_parameters():
        projection = name.endswith("_proj.weight")
        assert decay_of[id(parameter)] == (0.3 if projection else 0.0), name


def test_a_copy_decays_the_same():
    block = BLOCKS["mamba1"]()
    copied = copy.deepcopy(block)
    assert not hasattr(copied.A_log, "_no_weight_decay")
    constant = block.param_groups()[-1]["params"], copied.param_groups()[-1]["params"]
    assert [p.shape for p in constant[0]] == [p.shape for p in constant[1]]


def test_norms_biases_and_flags_do_not_decay_whatever_their_rank():
    module = nn.ModuleDict({"norm": nn.LayerNorm([2, 3]), "linear": nn.Linear(2, 3), "embedding": nn.Embedding(4, 2)})
    module["embedding"].weight._no_weight_decay = True  # type: ignore[assignment]  # as trainers flag it
    decaying, constant = param_groups(module)
    assert decaying["params"] == [module["linear"].weight]
    assert len(constant["params"]) == 4
    assert constant["weight_decay"] == 0.0


def test_projections_are_split_as_the_table_says(family, block):
    groups = block.param_groups(muon=True)
    muon, adamw = ({p.data_ptr(): len(p) for p in members(of(groups, name))} for name in ("muon", "adamw"))
    wanted_for_muon = set()
    for name, rows in ROWS[family].items():
        weight = getattr(block, name).weight
        counts = [count if isinstance(count, int) else int(count.split()[1]) for count in rows]
        assert sum(counts) == len(weight)
        for part, count, written in zip(weight.split(counts), counts, rows, strict=True):
            assert (muon if isinstance(written, int) else adamw)[part.data_ptr()] == count
            wanted_for_muon |= {part.data_ptr()} if isinstance(written, int) else set()
    assert muon.keys() == wanted_for_muon


def separately(block) -> dict[str, list[nn.Parameter]]:
    """The block's parameters, stored as one matrix per map."""
    stored = {name: [nn.Parameter(p.detach().clone())] for name, p in block.named_parameters()}
    for name, rows in block.independent_maps.items():
        counts = [count for count in rows.values() if count]
        parts = getattr(block, name).weight.detach().split(counts)
        stored[f"{name}.weight"] = [nn.Parameter(part.clone()) for part in parts]
    return stored


def groups_of(stored: dict[str, list[nn.Parameter]], family: str) -> list[dict[str, Any]]:
    muon, decaying, constant = [], [], []
    for name, parts in stored.items():
        rows = ROWS[family].get(name.removesuffix(".weight"), [])
        for part, written in zip(parts, rows or [""], strict=True):
            if isinstance(written, int):
                muon.append(part)
            else:
                (decaying if name.endswith("_proj.weight") else constant).append(part)
    return [
        {"params": muon, "weight_decay": 0.1, "optimizer": "muon", "adjust_lr_fn": "match_rms_adamw"},
        {"params": decaying, "weight_decay": 0.1, "optimizer": "adamw"},
        {"params": constant, "weight_decay": 0.0, "optimizer": "adamw"},
    ]


def fused(stored: dict[str, list[nn.Parameter]]) -> dict[str, Tensor]:
    return {name: torch.cat(tuple(parts)) if len(parts) > 1 else parts[0] for name, parts in stored.items()}


def train(block, x: Tensor, groups: list[dict[str, Any]], parameters: Any = None) -> None:
    """Three steps with clipped gradients, through the block itself or through `parameters()` in its place."""
    steppers = optimizers(groups)
    for _ in range(3):
        for stepper in steppers:
            stepper.zero_grad()
        (functional_call(block, parameters(), (x,)) if parameters else block(x))[0].square().mean().backward()
        nn.utils.clip_grad_norm_(members(groups), 0.05)
        for stepper in steppers:
            stepper.step()


def test_steps_are_those_of_separately_stored_matrices(family, block):
    x = torch.randn(2, 8, 16)
    start = {name: p.detach().clone() for name, p in block.named_parameters()}
    stored = separately(block)
    train(block, x, groups_of(stored, family), lambda: fused(stored))
    check(0.0, dict(block.named_parameters()), start)  # so far, only the stored ones have moved
    train(block, x, block.param_groups(muon=True))
    # Muon orthogonalises in bfloat16, so a last bit of a gradient may grow to 1e-2 of one update, which is 1e-2.
    check(2e-4, dict(block.named_parameters()), fused(stored))
    assert all((p.detach() - start[name]).abs().max() > 1e-3 for name, p in block.named_parameters())


def test_a_fused_step_would_be_another(block):
    """The claim above can fail: Muon on the whole weight moves it elsewhere."""
    whole = copy.deepcopy(block)
    x = torch.randn(2, 8, 16)
    train(block, x, of(block.param_groups(muon=True), "muon"))
    one = {
        "params": [whole.in_proj.weight],
        "weight_decay": 0.1,
        "optimizer": "muon",
        "adjust_lr_fn": "match_rms_adamw",
    }
    train(whole, x, [one])
    with pytest.raises(AssertionError, match="beyond"):
        check(2e-4, {"weight": block.in_proj.weight}, {"weight": whole.in_proj.weight})


def test_gradients_add_up_until_the_optimizer_clears_them(block):
    first, second = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    reference = copy.deepcopy(block)
    groups = block.param_groups(muon=True)
    for _ in range(2):  # the second round starts from cleared gradients
        for optimizer in optimizers(groups):
            optimizer.zero_grad()
        loss_of(block, first).backward()
        loss_of(block, second).backward()
    (loss_of(reference, first) + loss_of(reference, second)).backward()
    want = {name: p.grad for name, p in reference.named_parameters()}
    got = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    for name, rows in block.independent_maps.items():
        leaves = [p for p in members(groups) if p.data_ptr() in addresses(getattr(block, name).weight)]
        assert len(leaves) == sum(1 for count in rows.values() if count)
        leaves.sort(key=Tensor.data_ptr)
        if len(leaves) > 1:
            assert f"{name}.weight" not in got
            got[f"{name}.weight"] = torch.cat([gradient(leaf) for leaf in leaves])
    check(1e-6, got, want)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_second_call_gives_the_same_leaves(set_to_none):
    block = BLOCKS["mamba2"]()
    x = torch.randn(1, 4, 16)
    groups = block.param_groups(muon=True)
    loss_of(block, x).backward()
    once = [gradient(p).clone() for p in members(groups)]
    for optimizer in optimizers(groups):
        optimizer.zero_grad(set_to_none)
    again = block.param_groups(muon=True)
    assert all(a is b for a, b in zip(members(again), members(groups), strict=True))
    loss_of(block, x).backward()
    for p, grad in zip(members(again), once, strict=True):
        assert torch.equal(gradient(p), grad)


def test_without_muon_the_weights_are_ordinary_again():
    block = BLOCKS["mamba1"]()
    block.param_groups(muon=True)
    block.param_groups()
    loss_of(block, torch.randn(1, 4, 16)).backward()
    assert all(p.grad is not None for p in block.parameters())


def test_a_step_on_a_leaf_is_noticed_by_a_stale_graph():
    block = BLOCKS["mamba2"]()
    leaves = members(of(block.param_groups(muon=True), "muon"))
    optimizer = torch.optim.Muon([leaf for leaf in leaves if leaf.data_ptr() in addresses(block.in_proj.weight)])
    x = torch.randn(1, 4, 16, requires_grad=True)
    loss = loss_of(block, x)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_moved_weight_says_so_and_can_be_split_again():
    block = BLOCKS["mamba2"]()
    before = members(block.param_groups(muon=True))
    block.double()
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"moved since param_groups\(\)"):
        loss_of(block, x).backward()
    after = members(block.param_groups(muon=True))
    assert not {id(p) for p in after} <= {id(p) for p in before}
    loss_of(block, x).backward()
    assert all(p.grad is not None for p in after)


def test_copies_and_states_know_nothing_of_it():
    block = BLOCKS["mamba3"]()
    plain = copy.deepcopy(block)
    block.param_groups(muon=True)
    assert block.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(block.state_dict())
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), plain):
        loss_of(other, torch.randn(1, 4, 16)).backward()
        assert other.in_proj.weight.grad is not None
    assert members(block.param_groups(muon=True))[0].grad is None


def test_a_split_block_can_be_freed():
    block = BLOCKS["mamba2"]()
    block.param_groups(muon=True)
    weight = weakref.ref(block.in_proj.weight)
    del block
    gc.collect()
    assert weight() is None


class Adapted(nn.Module):
    """A wrapped layer as adapter libraries make it: the base inside, frozen or not, and its weight shown outside."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("frozen", [True, False])
def test_adapters_go_to_adamw_and_a_frozen_base_nowhere(frozen):
    block = BLOCKS["mamba2"]()
    block.in_proj.requires_grad_(not frozen)
    adapted = Adapted(block.in_proj)
    block.in_proj = adapted  # type: ignore[assignment]  # as adapter libraries do
    groups = block.param_groups(muon=True)
    adamw = {id(p) for p in members(of(groups, "adamw"))}
    assert {id(adapted.lora_A.weight), id(adapted.lora_B.weight)} <= adamw
    held = {address for p in members(groups) for address in addresses(p)}
    assert held.isdisjoint(addresses(adapted.weight)) == frozen
    loss_of(block, torch.randn(1, 4, 16)).backward()
    assert all(p.grad is not None for p in members(groups))


def test_a_weight_of_another_shape_is_refused_unless_it_is_frozen():
    block = BLOCKS["mamba2"]()
    block.in_proj.weight = nn.Parameter(torch.zeros(block.in_proj.weight.numel() // 2, 1), requires_grad=False)
    held = {address for p in members(block.param_groups(muon=True)) for address in addresses(p)}
    assert held.isdisjoint(addresses(block.in_proj.weight))
    block.in_proj.weight.requires_grad_()
    with pytest.raises(ValueError, match=r"in_proj.weight of shape \(.*\) does not have the rows of"):
        block.param_groups(muon=True)


def test_a_stack_is_split_block_by_block_and_the_rest_goes_to_adamw():
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 16), **{name: BLOCKS[name]() for name in BLOCKS}})
    model["head"] = nn.Linear(16, 7, bias=False)
    model["head"].weight = model["embedding"].weight
    groups = param_groups(model, muon=True)
    alone = sum(len(members(of(model[name].param_groups(muon=True), "muon"))) for name in BLOCKS)  # type: ignore[operator]
    assert len(members(of(groups, "muon"))) == alone
    assert sum(p is model["embedding"].weight for p in members(of(groups, "adamw"))) == 1


def test_the_groups_fit_adamw_as_they_are(block):
    optimizer = torch.optim.AdamW(block.param_groups(), lr=1e-3)
    loss_of(block, torch.randn(1, 4, 16)).backward()
    before = block.out_proj.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(block.out_proj.weight, before)


@pytest.mark.parametrize("family", ["mamba1", "mamba2", "mamba3"])
def test_training_goes_down(family):
    block = BLOCKS[family]()
    x, target = torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    steppers = optimizers(block.param_groups(muon=True), lr=0.02)
    losses = []
    for _ in range(30):
        for stepper in steppers:
            stepper.zero_grad()
        loss = (block(x)[0] - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        for stepper in steppers:
            stepper.step()
    assert losses[-1] < 0.5 * losses[0]
