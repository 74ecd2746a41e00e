"""Tensor parallelism: every rank has a share of each block's heads, and of the vocabulary."""

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mambakit.arguments import check_kind
from mambakit.blocks.block import Block
from mambakit.blocks.family import family_of
from mambakit.blocks.modules import CausalConv1d, GatedRMSNorm, Linear, RMSNorm, is_plain
from mambakit.blocks.moe import Router
from mambakit.blocks.parallel import Parallel
from mambakit.blocks.shares import Part, Parts, Shares, Split, run
from mambakit.models.language_model import LanguageModel
from mambakit.ops.team import Team, sum_out
from mambakit.parallel.meshes import Summed, group_of, is_divided, plain
from mambakit.parallel.vocabulary import divide_vocabulary, why_no_vocabulary

Model = TypeVar("Model", bound=nn.Module)
KNOWN = (Linear, nn.Linear, Router, RMSNorm, GatedRMSNorm, CausalConv1d)
"""Modules inside of blocks that do what they say, with any number of heads."""


def tensor_parallel(model: Model, mesh: Any) -> Model:
    """The same module, of which every rank of `mesh` has a share: heads, hidden channels, rows of the vocabulary.

    All ranks have to have the same model before, and call it alike, with the same tokens; each has the results of the
    whole one. Caches are those of a rank's own heads. `mesh` is of one dimension, such as `mesh["tensor"]`. Do this
    before `context_parallel` and `fully_shard`, and before an optimizer is made: parameters are new objects.

    A parameter that is divided is a DTensor. One that stacks several maps, such as `in_proj.weight`, has become a
    module with a parameter for each: `in_proj.weight.z`. `joined` brings these back together.

    ValueError for numbers of heads, channels or rows that cannot be divided among the ranks.

    Examples:
        >>> import os, tempfile
        >>> store = f"file://{os.path.join(tempfile.mkdtemp(), 'store')}"
        >>> torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
        >>> block = mk.Mamba3Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> model = mk.parallel.tensor_parallel(model, mesh["tensor"])
        >>> logits_bsw, cache = model(torch.randint(256, (2, 100)))
        >>> torch.distributed.destroy_process_group()
    """
    check_kind("model", model, nn.Module, "a model")
    group = group_of(mesh)
    team = Team(group, dist.get_rank(group), dist.get_world_size(group))
    # All of it is asked before any of it is done.
    plans = checked_plans(model, team)
    with_words = [module for module in model.modules() if isinstance(module, LanguageModel)]
    together = {inner for outer in side_by_side(model) for inner in outer.modules()}
    for block, plan in plans:
        Lane(block, plan, mesh, team, sums=block not in together)
    for outer in side_by_side(model):
        Sides(outer, team)
    for language_model in with_words:
        rows = run(language_model.config.padded_vocab_size)
        divide_vocabulary(language_model, team, partial(divided, split=rows, mesh=mesh, team=team))
    return model


def checked_plans(model: nn.Module, team: Team) -> list[tuple[Block, Shares]]:
    """How each block is divided; ValueError if something in the model cannot be."""
    if any(isinstance(hook, Lane) for module in model.modules() for hook in hooks_of(module)):
        raise ValueError(f"this {type(model).__name__} is tensor parallel already")
    plans = list(plans_of(model, team))
    if not plans:
        raise ValueError(f"a {type(model).__name__} has no block whose width could be divided")
    for module in model.modules():
        if isinstance(module, LanguageModel) and (problem := why_no_vocabulary(module, team)):
            raise ValueError(problem)
    return plans


def plans_of(module: nn.Module, team: Team) -> Iterator[tuple[Block, Shares]]:
    """The outermost blocks whose families say how they are divided."""
    if isinstance(module, Block):
        plan = family_of(module).shares
        if plan is not None:
            shares = plan(module.config, team)
            check_modules(module)
            yield module, shares
            return
        if not any(isinstance(inner, Block) for inner in list(module.modules())[1:]):
            raise ValueError(f"{type(module).__name__} does not say how its width is divided among ranks")
    for inner in module.children():
        yield from plans_of(inner, team)


def side_by_side(module: nn.Module) -> Iterator[Parallel]:
    """The outermost blocks that consist of blocks, whose outputs are added up anyway."""
    if isinstance(module, Parallel):
        yield module
        return
    for inner in module.children():
        yield from side_by_side(inner)


def check_modules(block: Block) -> None:
    for name, module in list(block.named_modules())[1:]:
        if not isinstance(module, Block) and not any(is_plain(module, kind) for kind in KNOWN):
            told = f"{name} of a {type(block).__name__} is a {type(module).__name__}"
            raise ValueError(
                f"{told}, or hooks are on it, which tensor parallelism cannot divide; merge adapters first"
            )


def hooks_of(module: nn.Module) -> list[Any]:
    return [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]


def lane_of(block: nn.Module) -> "Lane | None":
    """How a block is divided, if it is."""
    return next((hook for hook in hooks_of(block) if isinstance(hook, Lane)), None)


class Lane:
    """A rank's share of a block: between calls its parameters are divided, in a call it is a block with fewer heads."""

    def __init__(self, block: Block, plan: Shares, mesh: Any, team: Team, sums: bool):
        self.team, self.once, self.sums = team, plan.once, sums
        """`sums`: inputs' gradients and outputs, which what is around it does otherwise."""
        plan_of, config = family_of(block).shares, block.config
        assert plan_of is not None
        self.caches = [plan_of(config, team._replace(rank=rank)).cache for rank in range(team.size)]
        """How each rank has the cache's tensors."""
        for name, replacement in plan.modules.items():
            if hasattr(block, name):
                setattr(block, name, replacement(getattr(block, name)))
        self.names: dict[str, Split | None] = {}
        for name, parameter in list(block.named_parameters()):
            split = plan.parameters.get(name)
            self.names[name] = split
            if split is not None:
                put(block, name, divided(parameter, split, mesh, team))
        block.config = plan.config
        for path, config in plan.inside.items():
            block.get_submodule(path).config = config  # type: ignore[assignment]
        for name, value in plan.attributes.items():
            setattr(block, name, value)
        for name, tensor in self.local(block, [], {}).items():
            owner, attribute = whose(block, name)
            if attribute == "weight":
                resize(owner, tensor.shape)
        block.register_forward_pre_hook(self.begin, with_kwargs=True)
        block.register_forward_hook(self.end, always_call=True)

    def local(self, block: Block, common: list[Tensor], found: dict[int, int]) -> dict[str, Tensor]:
        """Plain tensors of this rank's share; `common` in the place of parameters that every rank has, where found."""
        local = {}
        for name, split in self.names.items():
            owner, attribute = whose(block, name)
            parts = owner._modules.get(attribute)
            kept = {"": owner._parameters[attribute]} if parts is None else parts._parameters
            tensors = [common[found[id(p)]] if id(p) in found else p for p in kept.values()]
            tensors = [plain(tensor) for tensor in tensors if tensor is not None]
            if split is not None:
                tensors = [taken(t, p, split.axis) for t, p in zip(tensors, split.parts, strict=True)]
            tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors, 0 if split is None else split.axis)
            local[name] = tensor * float(self.team.rank == 0) if name in self.once else tensor
        return local

    def begin(self, block: Block, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        common, found = [], {}
        if torch.is_grad_enabled():
            ours = [p for p in block.parameters() if p.requires_grad and not is_divided(p)]
            found = {id(parameter): at for at, parameter in enumerate(ours)}
            common, args, named = summed(self.team, ours, args, named, with_input=self.sums)
        for name, tensor in self.local(block, common, found).items():
            owner, attribute = whose(block, name)
            owner.__dict__[attribute] = tensor
        return args, named

    def end(self, block: Block, args: tuple[Any, ...], output: Any) -> Any:
        for name in self.names:
            owner, attribute = whose(block, name)
            owner.__dict__.pop(attribute, None)
        if output is None:
            # Something was raised.
            return None
        if not self.sums:
            return output
        y_bsd, *rest = output
        return (sum_out(y_bsd, self.team), *rest)


class Sides:
    """Blocks side by side, each of them divided: one sum of what they give, and one of their inputs' gradients."""

    def __init__(self, outer: Parallel, team: Team):
        self.team = team
        outer.register_forward_pre_hook(self.begin, with_kwargs=True)
        outer.register_forward_hook(self.end)

    def begin(self, outer: Parallel, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return summed(self.team, [], args, named)[1:] if torch.is_grad_enabled() else (args, named)

    def end(self, outer: Parallel, args: tuple[Any, ...], output: Any) -> Any:
        y_bsd, *rest = output
        return (sum_out(y_bsd, self.team), *rest)


def summed(
    team: Team, parameters: list[nn.Parameter], args: tuple[Any, ...], named: dict[str, Any], with_input: bool = True
) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
    """Parameters, and arguments whose input, if it is wanted, are the same tensors with gradients summed at once."""
    x_bsd = args[0] if args else named.get("x_bsd")
    flows = with_input and isinstance(x_bsd, Tensor) and x_bsd.requires_grad
    # The input last.
    given = (*parameters, x_bsd) if flows else (*parameters,)
    common: list[Any] = list(Summed.apply(team.group, *given)) if given else []  # type: ignore[arg-type]
    if flows and args:
        args = (common[-1], *args[1:])
    elif flows:
        named = {**named, "x_bsd": common[-1]}
    return common, args, named


def divided(parameter: nn.Parameter, split: Split, mesh: Any, team: Team) -> "nn.Parameter | Parts":
    pieces = parameter.detach().split([part.size for part in split.parts], split.axis)
    made = {
        part.name: own_part(parameter, piece, part, split.axis, mesh, team)
        for part, piece in zip(split.parts, pieces, strict=True)
    }
    return next(iter(made.values())) if len(made) == 1 else Parts(split, made)


def own_part(parameter: nn.Parameter, piece: Tensor, part: Part, axis: int, mesh: Any, team: Team) -> nn.Parameter:
    """A DTensor of this rank's run of it, or all of it; with the flags of the whole parameter."""
    from torch.distributed.tensor import DTensor, Shard

    if part.taken is None:
        # A copy, so that the whole is forgotten.
        piece = piece.chunk(team.size, axis)[team.rank].clone(memory_format=torch.contiguous_format)
        piece = DTensor.from_local(piece, mesh, [Shard(axis)], run_check=False)
    else:
        piece = piece.clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(piece, requires_grad=parameter.requires_grad)
    for flag, value in vars(parameter).items():
        setattr(made, flag, value)
    return made


def taken(tensor: Tensor, part: Part, axis: int) -> Tensor:
    if part.taken is None or part.taken == tuple(range(part.size)):
        return tensor
    return tensor.index_select(axis, torch.tensor(part.taken, device=tensor.device))


def whose(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def put(block: nn.Module, name: str, made: "nn.Parameter | Parts") -> None:
    owner, attribute = whose(block, name)
    if isinstance(made, Parts):
        made.is_stacked = attribute in getattr(owner, "stacked_maps", ())
        del owner._parameters[attribute]
        owner.add_module(attribute, made)
    else:
        owner._parameters[attribute] = made


def resize(module: nn.Module, shape: torch.Size) -> None:
    """Tell a module the sizes of its weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
    elif isinstance(module, nn.Conv1d):
        module.in_channels = module.out_channels = module.groups = shape[0]
