"""AdamW, or Muon for the maps that projections consist of and AdamW for the rest; the same over any number of ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mambakit.blocks.param_groups import maps_of, param_groups
from mambakit.models.language_model import LanguageModel
from mambakit.parallel.pieces import Box, Layout, Pieces
from mambakit.training.muon import Map, Muon
from mambakit.training.processes import Ranks
from mambakit.training.settings import TrainSettings

BETAS = (0.9, 0.95)


class Place(NamedTuple):
    """Rows of a weight that are stepped on by themselves."""

    weight: str
    first: int
    rows: int


class Optimizers:
    """Steps on all of a model's parameters, which it spreads over the ranks first.

    What is stepped on, and every state, is what a rank has of it: ordinary tensors that share the parameters' memory.
    """

    def __init__(self, model: LanguageModel, settings: TrainSettings, ranks: Ranks):
        muon = settings.optimizer == "muon"
        groups = param_groups(model, weight_decay=settings.weight_decay, muon=muon, hooks=False)
        labels: dict[Tensor, str] = {}
        self._places: dict[str, Place] = {}
        """By label, which is the same however the model lies on the ranks."""
        for name, weight in model.named_parameters():
            maps, first = maps_of(weight), 0
            for part, leaf in maps.items():
                labels[leaf] = f"{name}[{part}]"
                self._places[labels[leaf]] = Place(name, first, len(leaf))
                first += len(leaf)
            if not maps:
                labels[weight] = name
                self._places[name] = Place(name, 0, len(weight) if weight.dim() else 0)
        ranks.shard(model)
        self._ranks, self._weights, self.layout = ranks, dict(model.named_parameters()), Layout(model)
        stepped = [[labels[parameter] for parameter in group.pop("params")] for group in groups]
        self._places = {label: self._places[label] for group in stepped for label in group}
        whole = self.layout.pieces({name: weight for name, weight in self._weights.items() if weight.requires_grad})
        self._parts = {
            label: pieces._replace(own=tuple(nn.Parameter(own) for own in pieces.own))
            for label, pieces in ((label, self._pieces(label, whole)) for label in self._places)
        }
        """By label, what optimizers step on."""
        self._boxes = ranks.gather({label: pieces.boxes for label, pieces in self._parts.items()})
        """Of every rank."""
        adamws, self._optimizers = [], []
        for group, own in zip(groups, stepped, strict=True):
            if group.pop("optimizer") == "muon":
                self._optimizers.append(Muon([self._map(label) for label in own], group, settings.lr, *self._who))
            else:
                adamws.append({**group, "params": [part for label in own for part in self._parts[label].own]})
        self._optimizers.insert(0, torch.optim.AdamW(adamws, lr=settings.lr, betas=BETAS))

    @property
    def _who(self) -> tuple[int, int]:
        return self._ranks.rank, self._ranks.world

    def _pieces(self, label: str, whole: dict[str, Pieces]) -> Pieces:
        weight, first, rows = self._places[label]
        return whole[weight].rows(first, rows) if whole[weight].shape else whole[weight]

    def _map(self, label: str) -> Map:
        rows, columns = self._parts[label].shape
        return Map((rows, columns), list(self._parts[label].own), [boxes[label] for boxes in self._boxes])

    def collect(self) -> float:
        """Bring the gradients to what is stepped on; the norm of all of them, the same on every rank."""
        grads = {}
        for name, weight in self._weights.items():
            if weight.requires_grad:
                assert weight.grad is not None, f"{name} has no gradient"
                grads[name], weight.grad = weight.grad, None
        whole = self.layout.pieces(grads)
        counted = []
        for label, parts in self._parts.items():
            pieces = self._pieces(label, whole)
            for part, box, grad in zip(parts.own, pieces.boxes, pieces.own, strict=True):
                part.grad = grad
                if self._is_first_with(label, box):
                    counted.append(grad)
        norm = float(nn.utils.get_total_norm(counted)) if counted else 0.0
        return norm if self._ranks.world == 1 else math.sqrt(self._ranks.sums(norm**2)[0])

    def _is_first_with(self, label: str, box: Box) -> bool:
        """Of several ranks that have the same numbers, the one that counts them."""
        return not any(box in boxes[label] for boxes in self._boxes[: self._ranks.rank])

    def step(self, lr: float, shrink: float = 1.0) -> None:
        """One step along the collected gradients times `shrink`."""
        if shrink != 1.0:
            for grad in self._gradients():
                grad.mul_(shrink)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    def clear(self) -> None:
        """Forget all gradients, collected or not."""
        for parameter in (*self._weights.values(), *(part for pieces in self._parts.values() for part in pieces.own)):
            parameter.grad = None

    def not_finite(self) -> list[str]:
        """Labels of collected gradients that are no finite numbers in this rank's share."""
        grads = {label: [p.grad for p in parts.own if p.grad is not None] for label, parts in self._parts.items()}
        return [label for label, own in grads.items() if not all(bool(torch.isfinite(g).all()) for g in own)]

    def _gradients(self) -> list[Tensor]:
        return [part.grad for pieces in self._parts.values() for part in pieces.own if part.grad is not None]

    def shares(self) -> dict[str, Pieces]:
        """Momenta and counts of steps by label and kind: what this rank has of them, in place."""
        found = {}
        for label, parts in self._parts.items():
            states = [next((o.state[part] for o in self._optimizers if part in o.state), {}) for part in parts.own]
            for kind in dict.fromkeys(kind for state in states for kind in state):
                found[f"{label}/{kind}"] = _laid_out(parts, [state[kind] for state in states])
        return found

    def fresh(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Pieces]:
        """What `shares` is of states with these names and whole shapes, which are to be filled."""
        kinds: dict[str, dict[str, Sequence[int]]] = {}
        for name, shape in shapes.items():
            label, _, kind = name.rpartition("/")
            kinds.setdefault(label, {})[kind] = shape
        if kinds and kinds.keys() != self._parts.keys():
            differing = ", ".join(sorted(kinds.keys() ^ self._parts.keys())[:5])
            raise ValueError(f"the checkpoint's optimizer does not belong to this model: {differing}")
        for optimizer in self._optimizers:
            optimizer.state.clear()
            stepped = {part for group in optimizer.param_groups for part in group["params"]}
            for label, shape_of in kinds.items():
                for part in (part for part in self._parts[label].own if part in stepped):
                    # Counts of steps are numbers that stay on the CPU.
                    optimizer.state[part] = {
                        kind: torch.zeros_like(part, requires_grad=False) if len(shape) else torch.tensor(0.0)
                        for kind, shape in shape_of.items()
                    }
        return self.shares()


def _laid_out(parts: Pieces, states: list[Tensor]) -> Pieces:
    """States lie as what they belong to, and counts of steps are the same for all of its parts."""
    if states[0].dim():
        return parts._replace(own=tuple(states))
    return Pieces((), (Box((), ()),) * len(states), tuple(states))
