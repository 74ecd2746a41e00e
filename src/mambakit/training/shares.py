"""Tensors that lie in pieces on the ranks: brought together, written by torch's distributed checkpoints, read back."""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as recorded
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mambakit.parallel.pieces import Box, Pieces, put_together
from mambakit.training.processes import Ranks

METADATA = ".metadata"
MODEL, OPTIMIZERS = "model/", "optimizers/"
"""What the names of a checkpoint's tensors begin with."""
KNOWN = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (*recorded.__all__, "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "WindowsPath")),
    *(("torch", name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "uint8")),
}
"""What the description of a checkpoint may consist of. It is a pickle, and nothing else in it is called."""


def gathered(shares: Mapping[str, Pieces], ranks: Ranks) -> dict[str, Tensor]:
    """Whole tensors on the CPU. Every rank has to ask; alone, they share the run's memory."""
    if ranks.world == 1:
        return {name: pieces.own[0].cpu() for name, pieces in shares.items()}
    everyone = ranks.gather(
        {n: pieces._replace(own=tuple(own.cpu() for own in pieces.own)) for n, pieces in shares.items()}
    )
    found = {}
    for name in dict.fromkeys(name for having in everyone for name in having):
        there = [having[name] for having in everyone if name in having]
        parts = [pair for pieces in there for pair in zip(pieces.boxes, pieces.own, strict=True)]
        found[name] = put_together(there[0].shape, parts)
    return found


class Whole:
    """Tensors to take pieces of."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def fill(self, shares: Mapping[str, Pieces]) -> None:
        for name, pieces in shares.items():
            for box, own in zip(pieces.boxes, pieces.own, strict=True):
                own.copy_(box.of(self._tensors[name]))


class Stored:
    """What `write_shares` left in a folder, for whatever ranks there are now."""

    def __init__(self, folder: Path):
        self._reader = _Reader(folder)
        self._tensors: dict[str, Any] = self._reader.read_metadata().state_dict_metadata

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.size) for name, tensor in self._tensors.items()}

    def fill(self, shares: Mapping[str, Pieces]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            # Each rank reads what it needs, whatever the others do.
            load(dict.fromkeys(shares), storage_reader=self._reader, planner=_Load(shares), no_dist=True)

    def whole(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names begin so, by what follows."""
        kinds = {name: kind for name, kind in self._tensors.items() if name.startswith(prefix)}
        found = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
        self.fill({n: Pieces(tuple(t.shape), (Box((0,) * t.dim(), tuple(t.shape)),), (t,)) for n, t in found.items()})
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def write_shares(shares: Mapping[str, Pieces], folder: Path, group: Any) -> None:
    """Every rank writes what it has, and of what several have one does. OSError as when the disk is full."""
    try:
        writer = FileSystemWriter(folder)
        save(dict.fromkeys(shares), storage_writer=writer, planner=_Save(shares), process_group=group)
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        raise next((one for one in failures if isinstance(one, OSError)), OSError(str(failures[0]))) from error


class _Save(DefaultSavePlanner):
    def __init__(self, shares: Mapping[str, Pieces]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shares = shares

    def create_local_plan(self) -> SavePlan:
        self._found: dict[tuple[str, torch.Size | None], Tensor] = {}
        items = []
        for name, pieces in self._shares.items():
            for box, own in zip(pieces.boxes, pieces.own, strict=True):
                index = recorded.MetadataIndex(name, torch.Size(box.start))
                if (name, index.offset) in self._found:
                    continue
                self._found[name, index.offset] = own
                kind = recorded.TensorProperties.create_from_tensor(own.detach())
                data = TensorWriteData(chunk=_chunk(box), properties=kind, size=torch.Size(pieces.shape))
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: recorded.MetadataIndex) -> Any:
        return self._found[index.fqn, index.offset]


class _Load(DefaultLoadPlanner):
    def __init__(self, shares: Mapping[str, Pieces]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shares = shares

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, pieces in self._shares.items():
            stored: Any = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, stored, [_chunk(box) for box in pieces.boxes])
        return LoadPlan(items)

    def lookup_tensor(self, index: recorded.MetadataIndex) -> Tensor:
        assert index.index is not None
        return self._shares[index.fqn].own[index.index]


def _chunk(box: Box) -> recorded.ChunkStorageMetadata:
    return recorded.ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **options: Any) -> recorded.Metadata:
        path = Path(self.path) / METADATA
        with open(path, "rb") as file:
            try:
                found = _Unpickler(file).load()
            except Exception as error:  # damaged pickles raise almost anything
                raise ValueError(f"{path} is not what describes a checkpoint: {error}") from error
        if not isinstance(found, recorded.Metadata):
            raise ValueError(f"{path} is not what describes a checkpoint")
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in KNOWN:
            raise ValueError(f"{module}.{name} has no place in it")
        return super().find_class(module, name)
