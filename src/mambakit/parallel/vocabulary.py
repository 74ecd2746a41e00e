"""A vocabulary of which every rank has some rows: embedding, head, and losses without anyone's whole logits."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from mambakit.blocks.block import Options
from mambakit.blocks.modules import Linear, is_plain
from mambakit.models.language_model import LanguageModel, check_language_model
from mambakit.ops.shapes import check_beside, check_tensors, has_numbers
from mambakit.ops.team import Team, join_last, sum_out, total
from mambakit.parallel.meshes import Summed, plain

IGNORED = -100
"""In place of a token to predict: none is asked for here."""

_running = threading.local()


def token_losses(
    model: nn.Module, ids_bs: Tensor, next_bs: Tensor, cache: Any = None, **options: Unpack[Options]
) -> tuple[Tensor, Any]:
    """Minus the log-probability of each next token in nats, 0 where that is -100, and the cache after the last.

    For any language model. The ranks of a tensor-parallel one exchange a few numbers per token and no logits.

    Examples:
        >>> block = mk.Mamba3Config(d_model=64, per_head_dim=16)
        >>> model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=256))
        >>> ids_bs = torch.randint(256, (2, 101))
        >>> loss_bs, cache = mk.parallel.token_losses(model, ids_bs[:, :-1], ids_bs[:, 1:])
        >>> loss_bs.shape
        torch.Size([2, 100])
    """
    check_language_model(model)
    check_next(next_bs, ids_bs, model.config.vocab_size)  # type: ignore[union-attr]  # it has one
    before, _running.head = getattr(_running, "head", None), Wanted()
    try:
        logits_bsw, cache = model(ids_bs, cache, **options)
        head = _running.head.found
    finally:
        _running.head = before
    logits_bsw = logits_bsw.to(torch.promote_types(logits_bsw.dtype, torch.float32))
    if head is not None:
        return Loss.apply(logits_bsw, next_bs, head.start, head.team), cache  # type: ignore[return-value]
    # mT: the vocabulary is expected second.
    return F.cross_entropy(logits_bsw.mT, next_bs, reduction="none", ignore_index=IGNORED), cache


def check_next(next_bs: Tensor, ids_bs: Tensor, vocab_size: int) -> None:
    check_tensors({"ids_bs": ids_bs, "next_bs": next_bs})
    if next_bs.shape != ids_bs.shape or next_bs.dtype != torch.int64:
        given = f"{next_bs.dtype} of shape {tuple(next_bs.shape)}"
        raise ValueError(f"next_bs is {given}, expected torch.int64 of shape {tuple(ids_bs.shape)} as ids_bs")
    check_beside("ids_bs", ids_bs, "next_bs", next_bs)
    if has_numbers(next_bs) and next_bs.is_cpu and next_bs.numel():  # others would be waited for
        wrong_bs = (next_bs < 0) & (next_bs != IGNORED) | (next_bs >= vocab_size)
        if bool(wrong_bs.any()):
            raise ValueError(f"next_bs holds {int(next_bs[wrong_bs][0])}, expected 0 to {vocab_size - 1}, or {IGNORED}")


class Wanted:
    """That a head leaves each rank its own logits, and which one did."""

    found: "Head | None" = None


def why_no_vocabulary(model: LanguageModel, team: Team) -> str | None:
    """What keeps a model's vocabulary from being divided."""
    rows, multiple = model.config.padded_vocab_size, model.config.pad_vocab_size_multiple
    if rows % team.size:
        return (
            f"{rows} rows of the vocabulary (vocab_size = {model.config.vocab_size}, in multiples of "
            f"{multiple}) cannot be divided among {team.size} tensor-parallel ranks; "
            f"make pad_vocab_size_multiple a multiple of {team.size}"
        )
    if not is_plain(model.lm_head, Linear) or not is_plain(model.backbone.embedding, nn.Embedding):
        return "the head or the embedding is not a plain one, which tensor parallelism cannot divide"
    return None


def divide_vocabulary(
    model: LanguageModel, team: Team, divide: Callable[[nn.Parameter], nn.Parameter | nn.Module]
) -> None:
    """Leave each rank its rows of embedding and head, tied or not; `divide` cuts a parameter."""
    embedding, head = model.backbone.embedding, model.lm_head
    is_tied = head.weight is embedding.weight
    rows = embedding.num_embeddings
    embedding._parameters["weight"] = divide(embedding.weight)  # type: ignore[assignment]
    head._parameters["weight"] = embedding._parameters["weight"] if is_tied else divide(head.weight)  # type: ignore[assignment]
    embedding.num_embeddings = head.out_features = rows // team.size
    Embedding(embedding, team, rows)
    Head(head, team, model.config.vocab_size)


class Rows:
    """Between calls a module's weight is divided; in a call it is a plain tensor."""

    def __init__(self, module: nn.Module, team: Team):
        self.team = team
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.end, always_call=True)

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        module.__dict__["weight"] = plain(module._parameters["weight"])

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        module.__dict__.pop("weight", None)
        return None if output is None else self.leave(output)

    def leave(self, output: Tensor) -> Tensor:
        raise NotImplementedError


class Embedding(Rows):
    def __init__(self, module: nn.Embedding, team: Team, rows: int):
        super().__init__(module, team)
        self.rows = rows
        self.start = team.rank * (rows // team.size)
        self.others: Tensor | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        super().begin(module, args)
        (ids,) = args
        self.others = (ids < self.start) | (ids >= self.start + self.rows // self.team.size)
        # What is no row of any rank's stays wrong, and is noticed as ever.
        nowhere = (ids < 0) | (ids >= self.rows)
        return ((ids - self.start).masked_fill(self.others, 0).masked_fill(nowhere, -1),)

    def leave(self, output: Tensor) -> Tensor:
        others, self.others = self.others, None
        assert others is not None
        return sum_out(output.masked_fill(others[..., None], 0), self.team)


class Head(Rows):
    def __init__(self, module: nn.Linear, team: Team, words: int):
        super().__init__(module, team)
        self.start = team.rank * module.out_features
        self.words = max(min(words - self.start, module.out_features), 0)
        """Rows of this rank that are no padding."""

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        super().begin(module, args)
        return Summed.apply(self.team.group, *args) if args[0].requires_grad else args

    def leave(self, output: Tensor) -> Tensor:
        wanted = getattr(_running, "head", None)
        if wanted is None:
            return join_last(output, self.team)
        wanted.found = self
        padding = torch.arange(output.shape[-1], device=output.device) >= self.words
        return output.masked_fill(padding, -torch.inf)


class Loss(torch.autograd.Function):
    """`-log softmax(logits)[next]` of logits whose last axis is divided among ranks, the same on all of them."""

    @staticmethod
    def forward(ctx: Any, logits_bsw: Tensor, next_bs: Tensor, start: int, team: Team) -> Tensor:  # type: ignore[override]
        own = logits_bsw.shape[-1]
        most_bs1 = total(logits_bsw.amax(-1, keepdim=True), team, dist.ReduceOp.MAX)
        exp_bsw = torch.exp(logits_bsw - most_bs1)
        is_here_bs1 = ((next_bs >= start) & (next_bs < start + own))[..., None]
        at_bs1 = (next_bs - start)[..., None].masked_fill(~is_here_bs1, 0)
        found_bs1 = (logits_bsw.gather(-1, at_bs1) - most_bs1).masked_fill(~is_here_bs1, 0)
        sum_bs1, found_bs1 = total(torch.stack([exp_bsw.sum(-1, keepdim=True), found_bs1]), team)
        counts_bs1 = (next_bs != IGNORED)[..., None]
        ctx.save_for_backward(exp_bsw.div_(sum_bs1), at_bs1, is_here_bs1, counts_bs1)
        return (sum_bs1.log() - found_bs1).masked_fill(~counts_bs1, 0)[..., 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss_bs: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        share_bsw, at_bs1, is_here_bs1, counts_bs1 = ctx.saved_tensors
        d_loss_bs1 = d_loss_bs[..., None].masked_fill(~counts_bs1, 0)
        d_logits_bsw = share_bsw * d_loss_bs1
        d_logits_bsw.scatter_add_(-1, at_bs1, -d_loss_bs1.masked_fill(~is_here_bs1, 0))
        return d_logits_bsw, None, None, None
