"""Groups of parameters for optimizers: what decays, what does not, and the maps that go to Muon.

Muon treats a weight as one linear map. A fused projection is several, stacked as rows so that one product computes
them all. Here each map becomes a leaf of its own that shares memory with its rows: a step on the leaf is a step on the
weight, and the forward does not change. Backward passes hand the gradient of the weight over to its maps.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mambakit.arguments import check_flag, check_kind, check_number
from mambakit.blocks.shares import Parts

# Step sizes, decays and trapezoid weights are one number per head, or the bottleneck to it: nothing to orthogonalise.
ADAMW_MAPS = frozenset({"dt", "A", "lambda"})
MUON = {
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
}


def param_groups(
    module: nn.Module, *, weight_decay: float = 0.1, muon: bool = False, hooks: bool = True
) -> list[dict[str, Any]]:
    """Every trainable parameter of `module` in exactly one group, ready for `torch.optim`.

    A group says with `"optimizer"` what it is meant for: `"adamw"` or, with `muon=True`, `"muon"`. Nothing but matrices
    decays, also those that a block stacks along a first axis and names in `stacked_maps`, and of these no biases, norms
    or parameters flagged `_no_weight_decay`.

    With `muon=True` the projections that a block names in `independent_maps` are split into their maps. Those of a
    fused weight are leaves that share its memory and receive its gradient, while its own `grad` is None after a
    backward pass. So clear and clip gradients by the groups, not by `module.parameters()`. Calling again returns the
    same leaves; `muon=False` makes the fused weights ordinary parameters again.

    With `hooks=False` gradients stay on the fused weights, where DistributedDataParallel averages them, until the
    caller moves them: `hand_over(weight.grad, maps_of(weight).values())`.

    Examples:
        >>> net = torch.nn.Sequential(mk.TensorOnly(mk.Mamba2(d_model=64, per_head_dim=16)), torch.nn.Linear(64, 10))
        >>> optimizer = torch.optim.AdamW(mk.param_groups(net, weight_decay=0.1), lr=1e-3)
    """
    check_kind("module", module, nn.Module, "a module")
    check_number("weight_decay", weight_decay, least=0)
    check_flag("muon", muon)
    check_flag("hooks", hooks)
    muon_maps: list[Tensor] = []
    decaying: list[Tensor] = []
    constant: list[Tensor] = []
    projections = _projections(module) if muon else {}
    for parameter, decays in _trainable(module).items():
        if parameter in projections:
            for name, leaf in _split(parameter, projections[parameter], hooks).items():
                (decaying if name in ADAMW_MAPS else muon_maps).append(leaf)
        else:
            _join(parameter)
            (decaying if decays else constant).append(parameter)
    groups = [
        {"params": muon_maps, "weight_decay": weight_decay, "optimizer": "muon", **MUON},
        {"params": decaying, "weight_decay": weight_decay, "optimizer": "adamw"},
        {"params": constant, "weight_decay": 0.0, "optimizer": "adamw"},
    ]
    return [group for group in groups if group["params"]]


def maps_of(weight: nn.Parameter) -> dict[str, nn.Parameter]:
    """The leaves that `param_groups(muon=True)` split `weight` into, by name, in the order of its rows; {} if none."""
    maps = _MAPS.get(weight)
    return {} if maps is None else dict(maps.leaves)


def hand_over(grad: Tensor, leaves: Iterable[nn.Parameter]) -> None:
    """Give a weight's gradient to the leaves that hold its rows in order, added to what they have."""
    leaves = list(leaves)
    for leaf, part in zip(leaves, grad.split([len(leaf) for leaf in leaves]), strict=True):
        if leaf.grad is None:
            leaf.grad = part
        else:
            leaf.grad += part


def _trainable(module: nn.Module) -> dict[nn.Parameter, bool]:
    """Every trainable parameter, and whether it decays."""
    found: dict[nn.Parameter, bool] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad:
                found.setdefault(parameter, _decays(owner, name, parameter))
    return found


def _decays(owner: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    # A copy of a module loses its parameters' flags; A_log is the one matrix that would then decay.
    flagged = getattr(parameter, "_no_weight_decay", False) or name == "A_log"
    is_norm = "norm" in type(owner).__name__.lower()
    is_stacked = owner.is_stacked if isinstance(owner, Parts) else name in getattr(owner, "stacked_maps", ())
    axes = 3 if is_stacked else 2
    return parameter.dim() == axes and not (flagged or is_norm or name.endswith("bias"))


def _projections(module: nn.Module) -> dict[nn.Parameter, dict[str, int]]:
    """The trainable weights that consist of independent maps, and the rows of each map in order."""
    found = {}
    for owner in module.modules():
        for name, rows in getattr(owner, "independent_maps", {}).items():
            # An adapter around the projection shows the weight of its base layer, often frozen.
            weight = getattr(getattr(owner, name), "weight", None)
            if isinstance(weight, Parts):
                # Maps by themselves already.
                maps = {n: part for n, part in weight.named_parameters() if part.requires_grad}
                found |= {part: {name: len(part)} for name, part in maps.items()}
            elif isinstance(weight, nn.Parameter) and weight.requires_grad:
                # Of one map a rank may know its own rows only.
                rows = {name: len(weight) for name in rows} if len(rows) == 1 else rows
                if weight.dim() != 2 or len(weight) != sum(rows.values()):
                    raise ValueError(f"{name}.weight of shape {tuple(weight.shape)} does not have the rows of {rows}")
                found[weight] = {name: count for name, count in rows.items() if count}
    return found


class _Maps:
    """The leaves of one weight. As a hook of the weight it hands its gradient over to them."""

    def __init__(self, weight: nn.Parameter, rows: dict[str, int], hooks: bool):
        self.rows, self.hooks = rows, hooks
        parts = weight.detach().split(list(rows.values()))
        self.leaves = {name: nn.Parameter(part) for name, part in zip(rows, parts, strict=True)}
        self.handle = weight.register_post_accumulate_grad_hook(self) if hooks else None

    def __call__(self, weight: Tensor) -> None:
        if not self.share_memory_with(weight):
            raise RuntimeError(
                "a weight has moved since param_groups() split it, so its optimizer would step on memory left behind; "
                "call param_groups() again and make a new optimizer"
            )
        assert weight.grad is not None  # the hook runs after it has been accumulated
        hand_over(weight.grad, self.leaves.values())
        weight.grad = None

    def share_memory_with(self, weight: Tensor) -> bool:
        return next(iter(self.leaves.values())).data_ptr() == weight.data_ptr()


# Beside the parameters, not on them: what is on a parameter would be pickled with it.
_MAPS = WeakIdKeyDictionary()


def _split(weight: nn.Parameter, rows: dict[str, int], hooks: bool) -> dict[str, nn.Parameter]:
    """The leaves of `weight`, the same at every call as long as they share its memory; itself if it is one map."""
    maps = _MAPS.get(weight)
    if maps is not None and (maps.rows, maps.hooks) == (rows, hooks) and maps.share_memory_with(weight):
        return maps.leaves
    _join(weight)
    if len(rows) == 1:
        return dict.fromkeys(rows, weight)
    _MAPS[weight] = maps = _Maps(weight, rows, hooks)
    return maps.leaves


def _join(weight: nn.Parameter) -> None:
    """Undo `_split`: the weight keeps its gradients again."""
    maps = _MAPS.pop(weight, None)
    if maps is not None and maps.handle is not None:
        maps.handle.remove()
