"""The processes of a run: who they are, what they share, and how the model lies on them."""

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  # public in its docs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mambakit.arguments import find_device
from mambakit.models.language_model import LanguageModel
from mambakit.ops.team import Team
from mambakit.parallel.context import context_parallel
from mambakit.parallel.meshes import average_gradients
from mambakit.parallel.tensor import checked_plans, tensor_parallel
from mambakit.training.alive import Alive, attempt
from mambakit.training.settings import PARALLEL, TrainSettings

T = TypeVar("T")


class Ranks:
    """This process among the others of `torchrun`; alone where there are none.

    `parallel` is "ddp", the whole model on every rank, or "fsdp", a share of every parameter on each. Neighbours, so
    many as `tensor` says, have the same tokens and a share of the heads each; `context` groups of these have the same
    rows and a share of their tokens each.
    """

    def __init__(self, parallel: str = "ddp", device: str | None = None, context: int = 1, tensor: int = 1):
        if parallel not in PARALLEL:
            raise ValueError(f"parallel = {parallel!r} is unknown; choose from {', '.join(PARALLEL)}")
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.arrange(context, tensor)
        self.parallel = parallel if self.world > 1 else None
        self.device = find_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        self._aside: Any = None
        self._alive: Alive | None = None
        if self.world > 1 and not dist.is_initialized():
            # After a restart, torchrun's store has the addresses of dead ranks under the same names.
            store = PrefixStore(f"mambakit/{attempt()}", next(rendezvous("env://"))[0])
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)
            self._alive = Alive(self.rank, self.world)

    def arrange(self, context: int, tensor: int) -> None:
        """So many ranks share sequences and heads from here on; ValueError if all ranks are no such groups."""
        for count, shared in ((context, "sequences"), (tensor, "heads"), (context * tensor, "sequences and heads")):
            if count < 1 or self.world % count:
                raise ValueError(
                    f"{self.world} processes cannot be divided into groups of {count} that share {shared}; "
                    "torchrun --nproc-per-node N starts N of them"
                )
        self.context, self.tensor, self.replicas = context, tensor, self.world // (context * tensor)
        self.group, self.lane = divmod(self.rank, tensor)
        """Which tokens are this rank's, and which share of the heads."""
        self.replica, self.place = divmod(self.group, context)
        """Which rows are this rank's, and which share of their tokens."""
        self._mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        """The one that writes and prints."""
        return self.rank == 0

    @property
    def restarted(self) -> bool:
        """Whether `torchrun --max-restarts` has started this again, after a rank had died."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

    def close(self) -> None:
        """Where an error is on its way, the others are told."""
        if self._alive is not None:
            error = sys.exc_info()[1]
            if isinstance(error, RuntimeError) and "gloo" in str(error).lower():
                self._alive.wait()
            self._alive.leave(failed=isinstance(error, Exception | SystemExit))
            dist.destroy_process_group()  # what others made is theirs

    def speaks(self, told: str) -> bool:
        """Whether no other rank has said this: where several fail alike, one of them tells why."""
        return self._alive is None or self._alive.first_with(told)

    def check(self, model: LanguageModel, settings: TrainSettings) -> None:
        """ValueError for rows, tokens or heads that cannot be divided among the ranks; nothing is changed."""
        if self.context > 1 and settings.segment_len is not None:
            raise ValueError("segments are parts of whole rows: leave out --segment-len or --context-parallel")
        parts = self.replicas * settings.accumulate
        if settings.batch % parts:
            raise ValueError(
                f"batch = {settings.batch} rows cannot be divided among {self.replicas} ranks with "
                f"accumulate = {settings.accumulate}; make it a multiple of {parts}"
            )
        if settings.seq_len % self.context:
            raise ValueError(
                f"seq_len = {settings.seq_len} tokens of a row cannot be divided among {self.context} ranks; make it a "
                f"multiple of {self.context}"
            )
        if self.tensor > 1:
            checked_plans(model, Team(None, self.lane, self.tensor))

    def sums(self, *values: float) -> list[float]:
        """Each value summed over the ranks, the same on all."""
        if self.world == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        return totals.tolist()

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, in their order, on all of them."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def aside(self) -> Any:
        """A group of all ranks for what a thread does beside the run, on the CPU."""
        if self._aside is None and self.world > 1:
            self._aside = dist.new_group(backend="gloo")
        return self._aside

    def agree(self, work: Callable[[], T]) -> list[T]:
        """What each rank's work gives, in their order, on all of them, by the group `aside`.

        If it fails on one by an OSError or a ValueError, it fails on every rank.
        """
        found, problem = None, None
        try:
            found = work()
        except (OSError, ValueError) as error:
            problem = error
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, (found, problem), group=self.aside())
        for _, failure in everyone:
            if failure is not None:
                raise failure
        return [each for each, _ in everyone]

    def share(self, value: Any) -> Any:
        """What the first rank has."""
        return self.gather(value if self.is_first else None)[0]

    def split(self, model: LanguageModel) -> None:
        """Tell the model that its tokens are shares of sequences, where they are."""
        if self.context > 1:
            # Whoever averages gradients over all ranks has summed them over these.
            context_parallel(model, self.mesh["context"], sum_gradients=False)

    def tokens_of(self, tensor_bsX: Tensor) -> Tensor:
        """This rank's tokens of its rows."""
        return tensor_bsX.chunk(self.context, 1)[self.place]

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks: by rows, by shares of their tokens, by heads."""
        if self._mesh is None:
            sizes, names = (self.replicas, self.context, self.tensor), ("data", "context", "tensor")
            self._mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
            self._tokens = self._mesh["data", "context"]._flatten("tokens")
        return self._mesh

    @property
    def tokens(self) -> DeviceMesh:
        """The ranks that have other tokens, and the same heads."""
        _ = self.mesh
        return self._tokens

    def shard(self, model: LanguageModel) -> None:
        """Leave this rank its heads, and with "fsdp" a share of each parameter. These are new objects afterwards."""
        if self.tensor > 1:
            tensor_parallel(model, self.mesh["tensor"])
        if self.parallel != "fsdp" or self.world == self.tensor:
            return
        # Nothing writes into the logits, which are a part of the padded ones.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh = self.tokens
        for layer in model.backbone.layers:
            shared: Any = fully_shard(layer, mesh=mesh)
            if self.device.type == "cpu":
                # Itself, which is there: gathering the next layer ahead would wait for it here all the same, and only
                # keep one more.
                shared.set_modules_to_backward_prefetch([shared])
        # The root too, so that parameters are the shares whenever no forward or backward is running.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)

    def averaging(self, objective: nn.Module) -> nn.Module:
        """The module to call for losses whose gradients are to be averaged over the ranks."""
        if self.parallel != "ddp" or self.tensor > 1:
            return objective
        # True of a few small parameters, and costs a copy of each.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        return DistributedDataParallel(objective)

    def average(self, model: LanguageModel) -> None:
        """What `averaging` does not know of: gradients of shares, once they are all there."""
        if self.parallel == "ddp" and self.world > self.tensor > 1:
            average_gradients(model, self.tokens.get_group())

    def without_averaging(self, objective: nn.Module) -> AbstractContextManager[Any]:
        """For all but the last of several backward passes, whose sum is averaged once."""
        return objective.no_sync() if isinstance(objective, DistributedDataParallel) else nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """A parameter, gradient or state with all ranks' shares. Every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
