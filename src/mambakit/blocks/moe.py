"""A mixture of experts: its config, its block, its record, and the loss that keeps its experts in use."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mambakit.arguments import shown
from mambakit.blocks.config import BlockConfig, check_divides, check_positive, check_types
from mambakit.blocks.family import Family, FusedStep, register
from mambakit.blocks.mlp import MLP, MLPConfig, activate, check_activation
from mambakit.blocks.mlp import shares as mlp_shares
from mambakit.blocks.modules import Linear
from mambakit.blocks.shares import Part, Shares, along, run, shared
from mambakit.blocks.stateless import NoCache, Stateless
from mambakit.ops.boundary import boundary
from mambakit.ops.grouped_product import grouped_product
from mambakit.ops.shapes import full_precision
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.team import Team

ROUTERS = ("softmax", "softmax_chosen", "sigmoid")


@dataclass(frozen=True, slots=True)
class MoEConfig(BlockConfig):
    """Experts, how a token's are chosen and what they weigh.

    Examples:
        >>> config = mk.MoEConfig(64, 128, n_experts=8, top_k=2, d_shared=128)
    """

    d_model: int
    d_hidden: int
    """Of each expert."""
    n_experts: int
    top_k: int
    """How many experts a token goes to."""
    router: str = "softmax"
    """What a chosen expert weighs: `"softmax"` over all, `"softmax_chosen"` over the chosen ones alone, or `"sigmoid"`,
    with a bias that counts for the choice but not for the weight."""
    normalize: bool = True
    """Weights are divided by their sum; those of `"softmax_chosen"` add up to 1 in any case."""
    scale: float = 1.0
    """What weights are multiplied by, after that."""
    groups: int = 1
    """Groups of neighbouring experts, for `"sigmoid"`. The choice is among the experts of some groups only."""
    top_groups: int = 1
    """How many: those whose two best experts have the largest sum."""
    gated: bool = True
    activation: str = "silu"
    d_shared: int = 0
    """Hidden width of an expert that every token goes to; 0 is none."""
    d_latent: int | None = None
    """Width of what experts read and write, between projections that they share; None is `d_model`, without any."""
    bias: bool = field(default=False, kw_only=True)
    """Of the shared expert and the projections around the experts, which have none."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "d_model", "d_hidden", "n_experts", "top_k", "scale", "groups", "top_groups")
        check_activation(self.activation)
        if self.d_latent is not None:
            check_positive(self, "d_latent")
        if self.router not in ROUTERS:
            raise ValueError(f"router = {shown(self.router)} is unknown; choose one of {', '.join(ROUTERS)}")
        if self.d_shared < 0:
            raise ValueError(f"d_shared = {self.d_shared} has to be 0 (no shared expert) or positive")
        if self.router != "sigmoid" and self.groups != 1:
            raise ValueError(f'groups = {self.groups} is for the router "sigmoid", and router is "{self.router}"')
        check_divides("groups", self.groups, "n_experts", self.n_experts)
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups = {self.top_groups} is more than groups = {self.groups}")
        if self.top_k > self.eligible:
            among = f"the {self.eligible} experts in top_groups = {self.top_groups} of groups = {self.groups}"
            among = among if self.groups > 1 else f"n_experts = {self.n_experts}"
            raise ValueError(f"top_k = {self.top_k} is more than {among}")

    @property
    def eligible(self) -> int:
        """How many experts a token's are chosen from."""
        return self.n_experts // self.groups * self.top_groups

    @property
    def width(self) -> int:
        """Of what experts read and write."""
        return self.d_model if self.d_latent is None else self.d_latent


class Routing(NamedTuple):
    """Where tokens go; `c` is a choice, of which a token has `top_k`."""

    weight_nc: Tensor
    expert_nc: Tensor
    score_ne: Tensor
    """Of every expert, before the choice."""


class Router(Linear):
    """A projection in at least float32, under autocast too: near a tie, rounding would choose another expert."""

    def forward(self, input: Tensor) -> Tensor:
        wide = torch.promote_types(torch.promote_types(input.dtype, self.weight.dtype), torch.float32)
        with full_precision(input.device):
            if self.weight.dtype == wide:
                return super().forward(input.to(wide))
            return F.linear(input.to(wide), self.weight.to(wide))


class MoE(Stateless[MoEConfig]):
    """Of `n_experts` MLPs each token goes to `top_k`, and the sum of what they return, weighted, is its output.

    The experts are `experts_in[e]` and `experts_out[e]`, as `fc1` and `fc2` of an MLP. Only those chosen are computed.

    Examples:
        >>> y_bsd, _ = mk.MoE(mk.MoEConfig(64, 128, n_experts=8, top_k=2))(torch.randn(2, 10, 64))
        >>> y_bsd.shape
        torch.Size([2, 10, 64])
    """

    config_class = MoEConfig
    entry = "experts_in"
    stacked_maps = ("experts_in", "experts_out")

    def __init__(self, config: MoEConfig | None = None, *, device: Any = None, dtype: Any = None, **fields: Any):
        super().__init__(config, **fields)
        config = self.config
        made = {"device": device, "dtype": dtype}
        e, d, X = config.n_experts, config.d_model, config.width
        self.router = Router(d, e, bias=False, **made)
        if config.router == "sigmoid":
            # Not trained by gradients, which the choice has none of.
            wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
            self.register_buffer("correction_bias", torch.zeros(e, device=device, dtype=wide))
        self.experts_in = nn.Parameter(torch.empty(e, config.d_hidden * (2 if config.gated else 1), X, **made))
        self.experts_out = nn.Parameter(torch.empty(e, X, config.d_hidden, **made))
        if config.d_latent is not None:
            self.latent_in = Linear(d, X, bias=config.bias, **made)
            self.latent_out = Linear(X, d, bias=config.bias, **made)
        if config.d_shared:
            self.shared = MLP(shared_config(config), **made)
        self.copies = 1
        """Ranks that all compute the same `balance`, each with its part of the gradient."""
        self.balance: Tensor | None = None
        """Of the last call, if it was one of training: `n_experts * sum_e fraction_e * probability_e`.

        `fraction` is the part of all choices that fell on an expert, `probability` its mean share of the scores. It is
        1 where all experts are alike, and has gradients.
        """
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every expert as an `nn.Linear` of its own would be."""
        self.router.reset_parameters()
        with torch.no_grad():
            for stack in (self.experts_in, self.experts_out):
                bound = stack.shape[-1] ** -0.5
                stack.uniform_(-bound, bound)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has had no call yet, and tensors with a history can be neither copied nor pickled.
        return {**self.__dict__, "balance": None}

    @property
    def independent_maps(self) -> dict[str, dict[str, int]]:
        """The maps that each projection stacks; experts and router, which makes choices, are not for Muon."""
        if self.config.d_latent is None:
            return {}
        return {"latent_in": {"x": self.config.width}, "latent_out": {"y": self.config.d_model}}

    def run(
        self, x_bsd: Tensor, cache: NoCache, path: SsdPath, segments_bs: Tensor | None, lengths_b: Tensor | None
    ) -> tuple[Tensor, NoCache]:
        config, x_nd = self.config, x_bsd.flatten(0, 1)
        routing = self.route(x_nd)
        counted = self.training and torch.is_grad_enabled()
        balance = self.balance_of(routing, present(x_bsd, lengths_b)) if counted else None
        if not in_backward():
            self.balance = balance
        if config.d_latent is None:
            y_nd = self.mix(x_nd, routing)
        else:
            y_nd = self.latent_out(self.mix(self.latent_in(x_nd), routing))
        y_bsd = y_nd.unflatten(0, x_bsd.shape[:2])
        return (y_bsd + self.shared(x_bsd)[0] if config.d_shared else y_bsd), cache

    def route(self, x_nd: Tensor) -> Routing:
        config, logit_ne = self.config, self.router(x_nd)
        if config.router == "sigmoid":
            score_ne = logit_ne.sigmoid()
            liking_ne = self.in_top_groups(score_ne + self.correction_bias)
        else:
            # By logits, of which no two become the same number 0.
            score_ne, liking_ne = logit_ne.softmax(-1), logit_ne
        expert_nc = liking_ne.topk(config.top_k, dim=-1).indices
        if config.router == "softmax_chosen":
            weight_nc = logit_ne.gather(1, expert_nc).softmax(-1)
        else:
            weight_nc = score_ne.gather(1, expert_nc)
            if config.normalize:
                weight_nc = weight_nc / (weight_nc.sum(-1, keepdim=True) + 1e-20)
        return Routing(weight_nc if config.scale == 1 else weight_nc * config.scale, expert_nc, score_ne)

    def in_top_groups(self, liking_ne: Tensor) -> Tensor:
        """Minus infinity for the experts of other groups."""
        g, chosen = self.config.groups, self.config.top_groups
        if chosen == g:
            return liking_ne
        liking_ngE = liking_ne.unflatten(1, (g, -1))
        best_ng = liking_ngE.topk(min(2, liking_ngE.shape[2]), dim=-1).values.sum(-1)
        others_ng = torch.ones_like(best_ng, dtype=torch.bool).scatter(1, best_ng.topk(chosen, dim=-1).indices, False)
        return liking_ngE.masked_fill(others_ng[..., None], -torch.inf).flatten(1)

    def mix(self, x_nX: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of what each token's experts make of it, added up in the dtype of the weights."""
        config = self.config
        # Pairs of a token and one of its experts, in the order of the experts.
        expert_N = routing.expert_nc.flatten()
        order_N = expert_N.argsort()
        token_N = order_N // config.top_k
        counts_e = count(expert_N, torch.ones_like(expert_N), config.n_experts)
        hidden = activate(apply_experts(self.experts_in, x_nX[token_N], counts_e), config.gated, config.activation)
        y_NX = apply_experts(self.experts_out, hidden, counts_e)
        weighted_NX = y_NX * routing.weight_nc.flatten()[order_N, None]
        zeros_nX = weighted_NX.new_zeros(x_nX.shape)
        return zeros_nX.index_add(0, token_N, weighted_NX).to(y_NX.dtype)

    def balance_of(self, routing: Routing, present_n: Tensor) -> Tensor:
        score_ne, expert_nc = routing.score_ne, routing.expert_nc
        if self.config.router == "sigmoid":
            score_ne = score_ne / (score_ne.sum(-1, keepdim=True) + 1e-20)
        present_n = present_n.to(score_ne.dtype)
        tokens, scored_e = present_n.sum(), present_n @ score_ne
        chosen_e = count(expert_nc.flatten(), present_n.repeat_interleave(self.config.top_k), self.config.n_experts)
        edge = boundary()
        if edge is not None:
            tokens, scored_e, chosen_e = (all_j.sum(0) for all_j in edge.gather(tokens, scored_e, chosen_e))
        balance = self.config.n_experts / self.config.top_k * (chosen_e @ scored_e) / tokens.clamp(min=1) ** 2
        return balance if self.copies == 1 else balance.detach() + (balance - balance.detach()) / self.copies


def shared_config(config: MoEConfig) -> MLPConfig:
    """Of the expert that every token goes to."""
    return MLPConfig(config.d_model, config.d_shared, config.gated, config.activation, config.bias)


def apply_experts(experts: Tensor | nn.Module, x_Ni: Tensor, counts_e: Tensor) -> Tensor:
    """The product of each row with its expert's matrix; quantized ones are a module."""
    return experts(x_Ni, counts_e) if isinstance(experts, nn.Module) else grouped_product(x_Ni, experts, counts_e)


def count(expert_N: Tensor, weight_N: Tensor, n_experts: int) -> Tensor:
    """The sum of the weights of each expert's pairs. Unlike `bincount` of a size that compilers know."""
    return weight_N.new_zeros(n_experts).index_add(0, expert_N, weight_N)


def present(x_bsd: Tensor, lengths_b: Tensor | None) -> Tensor:
    """Which of all tokens in a row are no padding."""
    b, s, _ = x_bsd.shape
    if lengths_b is None:
        return torch.ones(b * s, dtype=torch.bool, device=x_bsd.device)
    return (torch.arange(s, device=x_bsd.device) < lengths_b[:, None]).flatten()


def in_backward() -> bool:
    """Whether a checkpointed layer is computed again: what it leaves behind then would outlive the pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def balance_loss(model: nn.Module) -> Tensor | None:
    """The mean of `balance` over all mixtures of a model after a call in training; None if there are none.

    Add a hundredth of it, or so, to the loss. Weights used by several virtual layers count with the last one's tokens.
    """
    found = [part.balance for part in model.modules() if isinstance(part, MoE) and part.balance is not None]
    return torch.stack(found).mean() if found else None


def step_fields(block: MoE) -> dict[str, Any]:
    config = block.config
    same = ("top_k", "groups", "top_groups", "activation", "gated", "normalize")
    return {
        **{name: getattr(config, name) for name in same},
        **{"experts": config.n_experts, "hidden": config.d_hidden, "weight_scale": config.scale},
        "rule": config.router,
        "correction_bias": block.correction_bias if config.router == "sigmoid" else None,
    }


def shares(config: MoEConfig, team: Team) -> Shares:
    """Every expert's hidden channels are divided; all ranks choose the same experts."""
    hidden, own = config.d_hidden, shared(config, "d_hidden", config.d_hidden, team)
    gate = hidden if config.gated else 0
    parameters, once, inside = {}, ["latent_out.bias"], {}
    if config.d_shared:
        shared(config, "d_shared", config.d_shared, team)
        beside = mlp_shares(shared_config(config), team)
        inside["shared"] = beside.config
        parameters |= {f"shared.{name}": split for name, split in beside.parameters.items()}
        once += [f"shared.{name}" for name in beside.once]
    return Shares(
        config=replace(config, d_hidden=own, d_shared=config.d_shared // team.size),
        parameters={
            "experts_in": along(1, Part("value", hidden), Part("gate", gate)),
            "experts_out": run(hidden, 2),
            **parameters,
        },
        once=tuple(once),
        inside=inside,
        attributes={"copies": team.size},
    )


FAMILY = register(
    Family(
        name="moe",
        title="MoE",
        block=MoE,
        sizes={
            "n_experts": ("experts_in", 0, "n_experts"),
            "d_hidden": ("experts_out", 2, "d_hidden"),
            "width": ("experts_out", 1, "width"),
        },
        flops=lambda config, tokens: (
            2.0 * tokens * config.top_k * config.width * config.d_hidden * (3 if config.gated else 2)
        ),
        example={"d_model": 24, "d_hidden": 16, "n_experts": 4, "top_k": 2},
        step=FusedStep(
            fields=step_fields,
            projections=("router", "experts_in", "experts_out", "latent_in", "latent_out"),
            inside=lambda block: (block, block.shared) if block.config.d_shared else (block,),
            modules=(Router,),
        ),
        shares=shares,
        alone=False,
    )
)
