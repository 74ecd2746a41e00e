"""Which algorithm runs the scan, and how long its chunks are: `SsdPath`."""

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mambakit.arguments import number, shown
from mambakit.ops.backends import check_backend, use_backend

ALGORITHMS = ("minimal", "serial", "serial_recalculated")


class _HasSizes(Protocol):
    @property
    def state_rank(self) -> int: ...
    @property
    def per_head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SsdPath:
    """How to run the scan. It never changes the mathematics, only time and memory.

    `algorithm`: `"minimal"` (batched products only), `"serial"` (a loop over chunks for the states) or
    `"serial_recalculated"` (keeps the inputs only and recomputes the rest in its backward).
    `chunk_len=None` takes `optimal_chunk_len`. `backend="auto"` takes the fastest that supports the call; one asked for
    by name runs or raises. With `lean` a block keeps nothing but its input for the backward and computes the rest
    again, a few heads at a time, in that share of memory beyond its input, output and parameters' gradients, or about
    as little as it can: `lean=0.2` is little. See docs/algorithms.md.

    Examples:
        >>> path = mk.SsdPath.serial(chunk_len=64)
        >>> mk.SsdPath.optimal_chunk_len(state_rank=128, per_head_dim=64)
        96
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> y_bsd, cache = block(torch.randn(2, 100, 64), path=path)
    """

    algorithm: str = "serial_recalculated"
    chunk_len: int | None = None
    backend: str = "auto"
    lean: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, str) or self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm {shown(self.algorithm)} is unknown; choose from {', '.join(ALGORITHMS)}")
        check_backend(self.backend)
        if self.lean is not None and not number("lean", self.lean) > 0:
            raise ValueError(f"lean is {shown(self.lean)}, expected a share of memory such as 0.5, or None")
        if self.chunk_len is not None and (type(self.chunk_len) is not int or not 0 < self.chunk_len < 2**63):
            raise ValueError(f"chunk_len is {shown(self.chunk_len)}, expected a positive integer or None")

    @classmethod
    def of(cls, path: "SsdPath | None") -> "SsdPath":
        """`path`, or the default for None."""
        if path is not None and not isinstance(path, SsdPath):
            raise ValueError(f"path is {shown(path)}, expected an SsdPath such as SsdPath.serial(64)")
        return path or DEFAULT

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """`with path.around():` asks for the path's backend for all of a block or model, not only its scan.

        An algorithm that can be differentiated twice has torch's operators around it, which can be too.
        """
        self.check_kernels()
        backend = self.backend if self.algorithm == "serial_recalculated" else "torch"
        return contextlib.nullcontext() if backend == "auto" else use_backend(backend)

    @property
    def inside(self) -> "SsdPath":
        """The path of what runs in `around`, where the backend is asked for already."""
        return self if self.backend == "auto" else replace(self, backend="auto")

    def check_kernels(self) -> None:
        if self.algorithm != "serial_recalculated" and self.backend not in ("auto", "torch"):
            raise ValueError(
                f'backend "{self.backend}" has fused kernels for algorithm "serial_recalculated" only, '
                f'not for "{self.algorithm}"; "torch" runs all'
            )

    @classmethod
    def minimal(cls, chunk_len: int | None = None) -> "SsdPath":
        return cls("minimal", chunk_len)

    @classmethod
    def serial(cls, chunk_len: int | None = None) -> "SsdPath":
        return cls("serial", chunk_len)

    @classmethod
    def serial_recalculated(cls, chunk_len: int | None = None) -> "SsdPath":
        return cls("serial_recalculated", chunk_len)

    @staticmethod
    def optimal_chunk_len(state_rank: int, per_head_dim: int) -> int:
        """About the root of `state_rank * per_head_dim`, up to a multiple of 32, at most 512."""
        return min(-(-math.isqrt(state_rank * per_head_dim) // 32) * 32, 512)

    optimal_default = optimal_chunk_len

    def chunk_len_or_optimal(self, state_rank: int, per_head_dim: int) -> int:
        return self.chunk_len or self.optimal_chunk_len(state_rank, per_head_dim)

    def optimal_for(self, block: _HasSizes) -> "SsdPath":
        """This path with the optimal chunk length for `block`'s sizes."""
        return replace(self, chunk_len=self.optimal_chunk_len(block.state_rank, block.per_head_dim))

    @classmethod
    def default_optimal_from_block(cls, block: _HasSizes) -> "SsdPath":
        return cls().optimal_for(block)

    # burn-mamba's older helpers. "Core" is minimal there, "chunked" serial.

    @classmethod
    def core_optimal(cls, state_rank: int, per_head_dim: int) -> "SsdPath":
        return cls.minimal(cls.optimal_chunk_len(state_rank, per_head_dim))

    @classmethod
    def chunked_optimal(cls, state_rank: int, per_head_dim: int) -> "SsdPath":
        return cls.serial(cls.optimal_chunk_len(state_rank, per_head_dim))

    @classmethod
    def chunked_recalculated_optimal(cls, state_rank: int, per_head_dim: int) -> "SsdPath":
        return cls.serial_recalculated(cls.optimal_chunk_len(state_rank, per_head_dim))

    @classmethod
    def core_optimal_from_block(cls, block: _HasSizes) -> "SsdPath":
        return cls.minimal().optimal_for(block)

    @classmethod
    def chunked_optimal_from_block(cls, block: _HasSizes) -> "SsdPath":
        return cls.serial().optimal_for(block)

    @classmethod
    def chunked_recalculated_optimal_from_block(cls, block: _HasSizes) -> "SsdPath":
        return cls.serial_recalculated().optimal_for(block)

    def run(self, inputs: Any) -> Any:
        """`inputs.run(self)`, in burn-mamba's word order."""
        return inputs.run(self)


DEFAULT = SsdPath()
