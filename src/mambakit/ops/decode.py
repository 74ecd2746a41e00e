"""One token of every row through a whole language model: embedding, layers, norm and head as one operation.

The layers are fused steps in a row. Kernels only: where none takes a model, it is stepped module by module.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from mambakit.ops.few_rows import Weights
from mambakit.ops.operation import Operation


class Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    centred: bool
    """LayerNorm, otherwise RMSNorm."""
    eps: float


class Layer(NamedTuple):
    step: str
    """The operation of the block's fused step."""
    fields: Mapping[str, Tensor | float | None]
    """What that operation reads beside the token and the states, by name."""
    prepared: Callable[[], Mapping[str, Tensor]]
    """More of it, computed from parameters, which it does not follow: asked for anew with every load."""
    matrices: Mapping[str, Weights]
    """The projections of the block and of the gated MLP, if there is one."""
    norm: Norm
    norm2: Norm | None


class Model(NamedTuple):
    embedding: Tensor
    layers: Sequence[Layer]
    norm_f: Norm
    head: Weights
    vocab_size: int


class Decoding(Protocol):
    """A packed model. Parameters are read where they lie."""

    def load(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on from these states, by the names that fused steps give them; steps change them in place."""
        ...

    def step(self, ids_b: Tensor) -> Tensor:
        """Logits after one more token of every row."""
        ...


DECODE = Operation("decode")
"""Its kernels make a `Decoding` of a `Model`."""
