"""What is added to a request's logits before its next token is chosen: by token, and for tokens that it has said."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mambakit.arguments import check_number, shown

MOST = 1e4
"""More than any logits differ by, and far from where float32 ends."""


class Bias:
    """`added` to the logits of tokens, minus `frequency` each time that the text has said one and `presence` once.

    The text is what is new, without the prompt, as OpenAI counts it.
    """

    def __init__(self, added_w: Tensor, frequency: float, presence: float):
        self._added_w, self._frequency, self._presence = added_w, frequency, presence
        self._said: set[int] = set()
        self._counted = 0

    def after(self, tokens: Sequence[int]) -> Tensor:
        """What is added once these have come; those of the call before come first among them."""
        for token in tokens[self._counted :]:
            self._added_w[token] -= self._frequency + (0 if token in self._said else self._presence)
            self._said.add(token)
        self._counted = len(tokens)
        return self._added_w


def make_bias(
    vocab_size: int, added: Mapping[int, float] | None, frequency: float | None, presence: float | None
) -> Bias | None:
    """None where nothing is asked for."""
    check_number("frequency_penalty", frequency, least=-MOST, most=MOST, optional=True)
    check_number("presence_penalty", presence, least=-MOST, most=MOST, optional=True)
    if added is not None and not isinstance(added, Mapping):
        raise ValueError(f"logit_bias is a {type(added).__name__}, expected numbers by token: {{id: number}}")
    if not (added or frequency or presence):
        return None
    added_w = torch.zeros(vocab_size)
    for token, number in (added or {}).items():
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias has {shown(token)}, expected ids from 0 to {vocab_size - 1}")
        check_number(f"logit_bias[{token}]", number, least=-MOST, most=MOST)
        added_w[token] = number
    return Bias(added_w, frequency or 0.0, presence or 0.0)
