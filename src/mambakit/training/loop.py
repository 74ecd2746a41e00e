"""One run: steps, evaluations, and its whole state to save and to go on from."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambakit.blocks import caches
from mambakit.models.language_model import LanguageModel
from mambakit.models.lora import adapters, wrap
from mambakit.parallel.context import whole_sequences
from mambakit.parallel.parts import share_of_cache, whole_cache
from mambakit.parallel.pieces import Pieces
from mambakit.training.batches import Rows
from mambakit.training.examples import HeldOutAnswers, Packed
from mambakit.training.objective import Objective, bits_per_byte
from mambakit.training.optimizers import Optimizers
from mambakit.training.processes import Ranks
from mambakit.training.run_checkpoints import Part, Saved
from mambakit.training.schedules import share_of_peak
from mambakit.training.settings import FREE, TrainSettings
from mambakit.training.shares import MODEL, OPTIMIZERS, Whole, gathered

SHOWN = 8
"""So many names in a message, of more only how many."""


class Step(NamedTuple):
    number: int
    """Steps done, this one included."""
    loss: float
    """Mean over the tokens that count, of all ranks, in nats, before the step. What keeps experts in use is no part."""
    lr: float
    norm: float
    """Of the gradient, before it was clipped."""
    stop: bool
    """A rank was asked to stop."""
    skipped: str | None = None
    """Why nothing was learned from it, where that is so."""
    balance: float | None = None
    """`balance_loss` of the experts: 1 where all are used alike. None without any."""
    tokens: int = 0
    """Read by this rank, padding among them."""


class HeldOut(NamedTuple):
    """Documents to evaluate on."""

    documents_s: Sequence[Tensor]
    bytes_of: Sequence[int]
    measure = "bits_per_byte"

    @property
    def size(self) -> int:
        return sum(self.bytes_of)

    def first(self, at_least: int) -> "HeldOut":
        """So many whole documents that they have `at_least` bytes, or all."""
        count, total = 0, 0
        while count < len(self.bytes_of) and total < at_least:
            total += self.bytes_of[count]
            count += 1
        return HeldOut(self.documents_s[:count], self.bytes_of[:count])

    def evaluate(self, model: LanguageModel, ranks: Ranks | None = None) -> float:
        return bits_per_byte(model, self.documents_s, self.size, ranks)


class Trainer:
    """Trains `model` on `rows`. Every rank has one and calls its methods together with the others."""

    def __init__(
        self,
        model: LanguageModel,
        settings: TrainSettings,
        rows: Rows | Packed,
        held_out: HeldOut | HeldOutAnswers,
        ranks: Ranks | None = None,
    ):
        self.settings, self.rows, self.held_out = settings, rows, held_out
        self.ranks = ranks or Ranks()
        self.ranks.check(model, settings)
        self.model = model.to(self.ranks.device)
        self.optimizers = Optimizers(self.model, settings, self.ranks)
        self.ranks.split(self.model)
        self._objective = Objective(self.model, settings.segment_len, settings.balance)
        self.objective = self.ranks.averaging(self._objective)
        self.step = 0
        self.skipped = 0
        """Steps that were passed over, in the whole run."""
        self.stop_asked = False
        own = settings.batch // self.ranks.replicas
        part = own // settings.accumulate
        starts = range(self.ranks.replica * own, (self.ranks.replica + 1) * own, part)
        self._parts = [slice(start, start + part) for start in starts]
        self._carried: list[Any] = [None] * settings.accumulate
        self._sharing = self.ranks.world // self.ranks.replicas
        """So many ranks have the same rows, one after the other."""

    def advance(self) -> Step:
        """One step on the next rows.

        A loss or gradients that are no finite numbers raise ValueError and leave the run as it was. Up to
        `skip_bad_steps` times in a run such rows are passed over instead: the next ones follow with fresh states.
        """
        try:
            carried, loss, balance, tokens = self._go_back()
            norm = self.optimizers.collect()
            flags = float(self.stop_asked), float(not math.isfinite(norm))
            total, balance_of_all, stops, bad = self.ranks.sums(loss, balance or 0.0, *flags)
            loss = total / self.ranks.world
            lr = self.settings.lr * share_of_peak(self.step, self.settings)
            problem = self._problem(loss, norm) if bad or not math.isfinite(loss) else None
            if problem is None:
                self.optimizers.step(lr, self.settings.clip / norm if norm > self.settings.clip else 1.0)
            elif self.skipped < self.settings.skip_bad_steps:
                # The states may be no numbers either.
                carried, self.skipped = [None] * len(carried), self.skipped + 1
            else:
                raise ValueError(problem + self._ways_out())
        finally:
            self.optimizers.clear()
        self._carried, self.step = carried if self.rows.carries else [None] * len(carried), self.step + 1
        shown = None if balance is None else balance_of_all / self.ranks.world
        return Step(self.step, loss, lr, norm, stops > 0, problem, shown, tokens)

    def _go_back(self) -> tuple[list[Any], float, float | None, int]:
        """Gradients of the next rows on the weights; the states after these rows, this rank's loss, balance, tokens."""
        carried, loss, balance, tokens = list(self._carried), 0.0, None, 0
        for i, rows in enumerate(self._parts):
            batch = self.rows.at(self.step, rows)
            pairs_bs2 = self.ranks.tokens_of(batch.pairs_bs2)
            reset_bs = None if batch.reset_bs is None else self.ranks.tokens_of(batch.reset_bs)
            tokens += pairs_bs2[..., 0].numel()
            cache = None if batch.starts_afresh else carried[i]
            is_last = i == len(self._parts) - 1
            with nullcontext() if is_last else self.ranks.without_averaging(self.objective):
                with self._autocast():
                    part_loss, carried[i] = self.objective(
                        pairs_bs2.to(self.ranks.device),
                        cache,
                        reset_bs=None if reset_bs is None else reset_bs.to(self.ranks.device),
                        scale=batch.scale,
                    )
                balanced = self._objective.balanced
                (part_loss / len(self._parts)).backward()
            loss += part_loss.item() / len(self._parts)
            if balanced is not None:
                share = balanced.item() / len(self._parts)
                balance, loss = (balance or 0.0) + share, loss - self.settings.balance * share
        self.ranks.average(self.model)
        return carried, loss, balance, tokens

    def _problem(self, loss: float, norm: float) -> str:
        """What is wrong with this step. Every rank has to ask, and gets the same answer."""
        labels = sorted(set().union(*self.ranks.gather(self.optimizers.not_finite())))
        found = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {norm}"
        at = f"{found} at step {self.step + 1}"
        return f"{at} (no finite gradient of {_some(labels)})" if labels else at

    def _ways_out(self) -> str:
        were = "1 step was" if self.skipped == 1 else f"{self.skipped} steps were"
        before = f"{were} skipped before; " if self.skipped else ""
        return f"; {before}a lower learning rate (--lr) may help, and --skip-bad-steps N passes over up to N such steps"

    def evaluate(self, at_least: int | None = None) -> float:
        """Bits per byte of held-out documents, or the loss per token of held-out answers.

        Of all, or of so many that they have `at_least` bytes or tokens.
        """
        held_out = self.held_out if at_least is None else self.held_out.first(at_least)
        with self._autocast(), whole_sequences():
            return held_out.evaluate(self.model, self.ranks)

    def saved(self, *, copied: bool = False) -> Saved:
        """The run as it stands, the same for any number of ranks. Every rank has to ask.

        Tensors share the run's memory, as those of `state_dict()` do, unless they are to be copied: write or copy them
        before the next step.
        """
        own = self._own_carried()
        # Ranks that share rows carry the same.
        carried = None if own is None else caches.concat(self.ranks.gather(own)[:: self._sharing])
        tensors = gathered(self.shares(), self.ranks)
        if copied:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        state = {
            **self._facts(),
            "model": {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)},
            "optimizers": _by_label(tensors),
        }
        return Saved(self.step, state, carried)

    def part(self, *, copied: bool = False) -> Part:
        """What this rank writes of a checkpoint. Tensors share the run's memory, unless they are to be copied."""
        shares = self.shares()
        if copied:
            shares = {
                n: pieces._replace(own=tuple(o.detach().clone() for o in pieces.own)) for n, pieces in shares.items()
            }
        carried = self._own_carried()
        carried = carried if self.ranks.rank % self._sharing == 0 else None
        return Part(self.step, self._facts(), shares, carried, (self.ranks.replica, self.ranks.replicas))

    def _own_carried(self) -> Any:
        """Of this rank's rows, with all heads."""
        if self._carried[0] is None:
            return None
        return caches.to(whole_cache(self.model, caches.concat(self._carried)), "cpu")

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors of the model and the optimizers."""
        return {
            "settings": asdict(self.settings),
            "config": self.model.config.to_dict(),
            "random": _random_state(),
            "skipped": self.skipped,
        }

    def shares(self) -> dict[str, Pieces]:
        """What this rank has of the trained parameters and of the optimizers' states, in place."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        weights = {MODEL + name: pieces for name, pieces in self.optimizers.layout.pieces(named).items()}
        return weights | {OPTIMIZERS + name: pieces for name, pieces in self.optimizers.shares().items()}

    def restore(self, saved: Saved) -> None:
        """Go on from `saved`; ValueError if it was made under other settings, or is beyond the last step."""
        if saved.step > self.settings.steps:
            raise ValueError(f"the run is at step {saved.step} already; --steps {self.settings.steps} is behind it")
        made = {**asdict(TrainSettings(steps=self.settings.steps)), **saved.state["settings"]}
        for name, value in asdict(self.settings).items():
            if name not in FREE and made[name] != value:
                raise ValueError(f"the run was made with {name} = {made[name]!r}, not {value!r}")
        source = saved.shares or Whole(_flat(saved.state))
        shapes = source.shapes()
        own = {name: pieces.shape for name, pieces in self.shares().items() if name.startswith(MODEL)}
        differing = {n for n, _ in {n: s for n, s in shapes.items() if n.startswith(MODEL)}.items() ^ own.items()}
        if differing:
            names = sorted(name.removeprefix(MODEL) for name in differing)
            raise ValueError(f"the checkpoint is of another model: {_some(names)}")
        kept = {n.removeprefix(OPTIMIZERS): shape for n, shape in shapes.items() if n.startswith(OPTIMIZERS)}
        self.optimizers.fresh(kept)
        source.fill(self.shares())
        _restore_random_state(saved.state["random"])
        self._carried = [None] * len(self._parts)
        if saved.carried is not None:
            everyone = share_of_cache(self.model, caches.to(saved.carried, self.ranks.device))
            self._carried = [caches.select(everyone, range(rows.start, rows.stop)) for rows in self._parts]
        # Not in checkpoints from before steps could be skipped.
        self.step, self.skipped = saved.step, saved.state.get("skipped", 0)

    def weights(self, *, frozen: bool = False) -> dict[str, Tensor]:
        """Whole parameters by name, on the CPU: those that are trained, or all. Every rank has to ask."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad or frozen}
        return gathered(self.optimizers.layout.pieces(named), self.ranks)

    def whole_model(self) -> LanguageModel:
        """A model of its own with all parameters, adapters too, on the CPU. Every rank has to ask."""
        weights = self.weights(frozen=True)
        model, found = LanguageModel(self.model.config), dict(adapters(self.model))
        if found:
            one = next(iter(found.values()))
            wrap(model, found, one.rank, one.alpha)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        return model

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.ranks.device.type, torch.bfloat16, enabled=self.settings.autocast is not None, cache_enabled=False
        )


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a whole checkpoint by the names that they have in one of shares."""
    momenta = {f"{label}/{kind}": t for label, kinds in state["optimizers"].items() for kind, t in kinds.items()}
    parts = (MODEL, state["model"]), (OPTIMIZERS, momenta)
    return {prefix + name: tensor for prefix, named in parts for name, tensor in named.items()}


def _by_label(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The other way."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZERS):
            label, _, kind = name.removeprefix(OPTIMIZERS).rpartition("/")
            found.setdefault(label, {})[kind] = tensor
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
