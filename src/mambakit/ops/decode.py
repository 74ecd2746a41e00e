"""A few tokens through a whole language model: embedding, blocks, norm and head as one operation.

Blocks are parts in a row, in the order in which a token passes them. Kernels only: where none takes a model, it is
stepped module by module.
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
    scale: float = 1.0
    """What its output is multiplied by."""


class Part(NamedTuple):
    """A block behind its norm: `x += scale * block(norm(x))`."""

    kind: str
    """The block's family."""
    fields: Mapping[str, Tensor | float | str | None]
    """What the kernels read beside the token, the projections and the states, by name."""
    prepared: Callable[[], Mapping[str, Tensor]]
    """More of it, computed from parameters, which it does not follow: asked for anew with every load."""
    projections: Mapping[str, Weights | None]
    carried: Sequence[str]
    """The names of its states."""
    norm: Norm
    scale: float
    beside: bool
    """It reads what the part before it read, without what that one added."""


class Model(NamedTuple):
    embedding: Weights
    embedding_scale: float
    parts: Sequence[Part]
    norm_f: Norm
    head: Weights
    logits_scale: float
    vocab_size: int


class Decoding(Protocol):
    """A packed model. Parameters are read where they lie."""

    def load(self, states: Sequence[Mapping[str, Tensor | int | None]]) -> None:
        """Go on from these states, those of each part by name; steps change them in place."""
        ...

    def move(self, states: Sequence[Mapping[str, Tensor | int | None]]) -> None:
        """The states lie here from now on."""
        ...

    def step(self, ids: Sequence[int], at: "At") -> tuple[Tensor, list[int]]:
        """Logits after tokens, the same as from one call for each in their order, and the likeliest after each.

        That is the first of the largest logits, -1 where they are not finite.
        """
        ...


class At(NamedTuple):
    """Where the tokens of a call belong; all are int64."""

    text_b: Tensor
    """Whose it is, for parts that keep tokens."""
    before_b: Tensor
    """The place of the small states that it reads, of each part's."""
    after_b: Tensor
    """The place of those that it writes, and of notes of what it writes into large ones."""
    runs: Tensor | None = None
    """Where several tokens are of one text, one after the other, or notes are to be written again: of each text its
    number, the first and last of its notes in `again`, the first and last of its tokens; last ones exclusive."""
    again: Tensor | None = None
    """The places of notes."""
    stays: bool = True
    """Whether notes, and the first token of each text, change its large states. Other tokens are noted only."""


DECODE = Operation("decode")
"""Its kernels make a `Decoding` of a `Model`."""
