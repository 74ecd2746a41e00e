"""AdamW, or Muon for the maps that projections consist of and AdamW for the rest; the same over any number of ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mambakit.blocks.param_groups import hand_over, maps_of, param_groups
from mambakit.models.language_model import LanguageModel
from mambakit.training.processes import Ranks, share_of, total_norm, whole
from mambakit.training.settings import TrainSettings

BETAS = (0.9, 0.95)


class Optimizers:
    """Steps on all of a model's parameters, which it spreads over the ranks first.

    Muon needs whole matrices. Where ranks have shares of them, each steps on a whole copy and takes its share back.
    """

    def __init__(self, model: LanguageModel, settings: TrainSettings, ranks: Ranks):
        muon = settings.optimizer == "muon"
        groups = param_groups(model, weight_decay=settings.weight_decay, muon=muon, hooks=False)
        for_muon = {p for group in groups for p in group["params"] if group["optimizer"] == "muon"}
        labels: dict[Tensor, str] = {}
        self._leaves: dict[str, list[nn.Parameter]] = {}
        """By the name of a weight, what is stepped on in its place."""
        for name, weight in model.named_parameters():
            labels[weight] = name
            if leaves := maps_of(weight):
                labels |= {leaf: f"{name}[{part}]" for part, leaf in leaves.items()}
                self._leaves[name] = list(leaves.values())
            elif ranks.parallel == "fsdp" and weight in for_muon:
                self._leaves[name] = [weight]
        ranks.shard(model)
        self._weights = dict(model.named_parameters())
        self._sharded = ranks.parallel == "fsdp"
        in_place = {leaf for leaves in self._leaves.values() for leaf in leaves}
        self._stepped: dict[str, nn.Parameter] = {}
        """By label, what optimizers step on: labels are the same however the model lies on the ranks."""
        for group in groups:
            own = {labels[p]: p if p in in_place else self._weights[labels[p]] for p in group["params"]}
            self._stepped |= own
            group["params"] = list(own.values())
        muons = [group for group in groups if group.pop("optimizer") == "muon"]
        adamws = [group for group in groups if group not in muons]
        self._optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(adamws, lr=settings.lr, betas=BETAS)]
        if muons:
            self._optimizers.append(torch.optim.Muon(muons, lr=settings.lr))

    def collect(self) -> float:
        """Bring the gradients to what is stepped on; the norm of all of them, the same on every rank."""
        for name, leaves in self._leaves.items():
            grad = self._weights[name].grad
            assert grad is not None, f"{name} has no gradient"
            hand_over(whole(grad), leaves)
            self._weights[name].grad = None
        return float(total_norm(list(self._gradients().values())))

    def step(self, lr: float, shrink: float = 1.0) -> None:
        """One step along the collected gradients times `shrink`."""
        if shrink != 1.0:
            for grad in self._gradients().values():
                grad.mul_(shrink)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self._give_back()

    def clear(self) -> None:
        """Forget all gradients, collected or not."""
        for parameter in (*self._weights.values(), *self._stepped.values()):
            parameter.grad = None

    def not_finite(self) -> list[str]:
        """Labels of collected gradients that are no finite numbers in this rank's share."""
        found = {
            label: grad.to_local() if isinstance(grad, DTensor) else grad for label, grad in self._gradients().items()
        }
        return [label for label, grad in found.items() if not bool(torch.isfinite(grad).all())]

    def _gradients(self) -> dict[str, Tensor]:
        return {label: p.grad for label, p in self._stepped.items() if p.grad is not None}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Momenta and counts by label, whole. Every rank has to ask."""
        found = {}
        for label, parameter in self._stepped.items():
            state = next((o.state[parameter] for o in self._optimizers if parameter in o.state), {})
            found[label] = {key: whole(value).cpu() for key, value in state.items()}
        return found

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        """What `state` gave, on whatever ranks; the model's parameters have to be restored before."""
        if state.keys() != self._stepped.keys():
            differing = ", ".join(sorted(state.keys() ^ self._stepped.keys())[:5])
            raise ValueError(f"the checkpoint's optimizer does not belong to this model: {differing}")
        for optimizer in self._optimizers:
            for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                label = next(name for name, p in self._stepped.items() if p is parameter)
                optimizer.state[parameter] = {key: _placed(value, parameter) for key, value in state[label].items()}
        if self._sharded:
            with torch.no_grad():
                for name, leaves in self._leaves.items():
                    full = whole(self._weights[name].detach())
                    for leaf, part in zip(leaves, full.split([len(leaf) for leaf in leaves]), strict=True):
                        leaf.copy_(part)

    def _give_back(self) -> None:
        """Leaves share their weights' memory, except where a rank has only a share of the weight."""
        if not self._sharded:
            return
        with torch.no_grad():
            for name, leaves in self._leaves.items():
                weight = self._weights[name]
                weight.copy_(share_of(torch.cat([leaf.detach() for leaf in leaves]), weight))


def _placed(value: Tensor, parameter: Any) -> Tensor:
    """A copy, since steps are taken in place. Counts of steps are numbers that stay on the CPU."""
    return (share_of(value, parameter) if value.shape == parameter.shape else value).clone()
