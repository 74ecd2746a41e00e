"""What is asked of a mesh, and gradients that are sums over one."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mambakit.arguments import check_number

BUCKET = 1 << 24
"""Numbers that are summed at once."""


def group_of(mesh: Any) -> Any:
    """The ranks of a mesh of one dimension."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}, expected a DeviceMesh; init_device_mesh() makes one")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        one = f'such as mesh["{names[0]}"]' if names else "one of its dimensions, which need names for that"
        raise ValueError(f"mesh has {mesh.ndim} dimensions, expected one of them, {one}")
    return mesh.get_group()


class Summed(torch.autograd.Function):
    """The tensors themselves, whose gradients are summed over the ranks: at the end of the backward pass, all at once.

    A rank without a gradient for one of them takes part with zeros.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *d_tensors: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        sums: list[Tensor] = [*d_tensors]
        for places in buckets(d_tensors):
            flat = torch.cat([d_tensors[at].flatten() for at in places])
            dist.all_reduce(flat, group=ctx.group)
            for at, part in zip(places, flat.split([d_tensors[at].numel() for at in places]), strict=True):
                sums[at] = part.view(d_tensors[at].shape)
        return (None, *sums)


def buckets(tensors: tuple[Tensor, ...]) -> Iterator[list[int]]:
    """Places of tensors of one dtype, `BUCKET` numbers or one tensor at a time."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        found, size = [], 0
        for at, tensor in enumerate(tensors):
            if tensor.dtype != dtype:
                continue
            if found and size + tensor.numel() > BUCKET:
                yield found
                found, size = [], 0
            found.append(at)
            size += tensor.numel()
        yield found


def is_divided(tensor: Any) -> bool:
    """Whether it is a DTensor. Not by its type, which brings a compiler along that takes long to import."""
    return hasattr(tensor, "to_local")


def plain(tensor: Any) -> Tensor:
    """What this rank has of it, with gradients."""
    return tensor.to_local() if is_divided(tensor) else tensor


def placed_as(like: Any, own: Tensor) -> Tensor:
    """What this rank has, as the tensor that `like` is."""
    if not is_divided(like):
        return own
    layout = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return type(like).from_local(own, like.device_mesh, like.placements, **layout)


def average_gradients(model: nn.Module, group: Any) -> None:
    """Gradients become their means over the ranks of a group, which all have some for the same parameters."""
    grads = tuple(plain(parameter.grad) for parameter in model.parameters() if parameter.grad is not None)
    for places in buckets(grads):
        flat = torch.cat([grads[at].flatten() for at in places])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for at, part in zip(places, flat.split([grads[at].numel() for at in places]), strict=True):
            grads[at].copy_(part.view(grads[at].shape))


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Shrink all gradients together to a norm of at most `max_norm`; what it was before. Every rank has to ask.

    The norm is that of the whole model's gradients, whatever shares of them ranks have, and the same on all of them.

    Examples:
        >>> block = mk.Mamba2(d_model=64, per_head_dim=16)
        >>> block(torch.randn(1, 10, 64))[0].sum().backward()
        >>> norm = mk.parallel.clip_gradients(block, 1.0)
    """
    check_number("max_norm", max_norm, above=0)
    grads: list[Any] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    squares: dict[Any, Tensor] = {}
    for grad in grads:
        mesh: Any = grad.device_mesh if is_divided(grad) else None
        if mesh is not None and any(
            place and placement.is_replicate()
            for place, placement in zip(mesh.get_coordinate(), grad.placements, strict=True)
        ):
            # Another rank counts these.
            square = torch.zeros((), dtype=torch.float64, device=grad.device)
        else:
            square = torch.linalg.vector_norm(plain(grad)).double().square()
        squares[mesh] = squares[mesh] + square if mesh in squares else square
    for mesh, square in squares.items():
        groups = [] if mesh is None else mesh.get_all_groups()
        for group in groups:
            dist.all_reduce(square, group=group)
    norm = math.sqrt(sum(float(square) for square in squares.values()))
    if norm > max_norm:
        for grad in grads:
            plain(grad).mul_(max_norm / norm)
    return norm


class SummedGradients:
    """Inside, a model's parameters have gradients that are summed over the ranks of a group.

    Under FSDP2 they have not: it reduces gradients over its own mesh, of which the group's has to be a part.
    """

    def __init__(self, model: nn.Module, group: Any):
        self.model, self.group = model, group
        self.places: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __enter__(self) -> None:
        modules = list(self.model.modules())
        # Imported here, since it brings a compiler along that takes as long to import as torch.
        from torch.distributed.fsdp import FSDPModule

        if not torch.is_grad_enabled() or any(isinstance(module, FSDPModule) for module in modules):
            return
        self.places = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        # Once each, whoever shares them.
        parameters = list(dict.fromkeys(parameter for _, _, parameter in self.places))
        if not parameters:
            return
        own = [plain(parameter) for parameter in parameters]
        sums = Summed.apply(self.group, *own)
        summed = {old: placed_as(old, new) for old, new in zip(parameters, sums, strict=True)}  # type: ignore[arg-type]
        for module, name, parameter in self.places:
            module._parameters[name] = summed[parameter]  # type: ignore[assignment]

    def __exit__(self, *raised: object) -> None:
        for module, name, parameter in self.places:
            module._parameters[name] = parameter
