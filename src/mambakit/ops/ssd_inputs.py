"""The seeds' input bundles: chunked tensors with their names, each a filling of the core."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mambakit.ops.shapes import bind, check_floats
from mambakit.ops.ssd import ssd
from mambakit.ops.ssd_path import SsdPath


class _Bundle(ABC):
    """What the three bundles share: `run` and `sanity` over the fields of the dataclass."""

    initial_state_bhpr: Tensor
    init_state_hpr: Tensor | None

    def __post_init__(self) -> None:
        named = self._tensors()
        size = bind(named)
        if size.n < 1 or size.l < 1:
            raise ValueError(f"a bundle needs at least one chunk of one token, got n = {size.n} and l = {size.l}")
        data: dict[str, Tensor | None] = {
            name: tensor for name, tensor in named.items() if name[:2] in ("x_", "v_", "b_", "c_")
        }
        check_floats(data, {name: tensor for name, tensor in named.items() if name not in data})

    def _tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # a dataclass
        if self.init_state_hpr is None:
            del named["init_state_hpr"]
        return named

    @abstractmethod
    def run(self, path: SsdPath | None = None) -> tuple[Tensor, Tensor]:
        """Outputs in chunks and the state after the last. The bundle's own chunk length rules, not the path's."""

    def sanity(self) -> None:
        """Raise `ValueError` naming every tensor that holds a NaN or an infinity, and how many."""
        found = []
        for name, tensor in self._tensors().items():
            nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            if nans or infinities:
                found.append(f"{name} holds {nans} NaN and {infinities} infinite of {tensor.numel()} values")
        if found:
            raise ValueError("; ".join(found))

    def _state(self) -> Tensor:
        """The entering state: what the cache holds plus what is learned, the latter the same for every row."""
        if self.init_state_hpr is None:
            return self.initial_state_bhpr
        return self.initial_state_bhpr + self.init_state_hpr


def _with_chunk_len(path: SsdPath | None, chunk_len: int) -> SsdPath:
    return replace(SsdPath.of(path), chunk_len=chunk_len)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mamba2SsdInput(_Bundle):
    """Mamba-2: `h = exp(dt a) h + dt x (x) B`, `y = h C + D x`.

    Examples:
        >>> b, n, l, h, p, g, r = 2, 3, 32, 4, 16, 1, 8
        >>> bundle = mk.Mamba2SsdInput(
        ...     x_bnlhp=torch.randn(b, n, l, h, p), dt_bnlh=torch.rand(b, n, l, h), a_decay_h=-torch.rand(h),
        ...     b_bnlgr=torch.randn(b, n, l, g, r), c_bnlgr=torch.randn(b, n, l, g, r), d_h=torch.ones(h),
        ...     initial_state_bhpr=torch.zeros(b, h, p, r))
        >>> y_bnlhp, state_bhpr = bundle.run(mk.SsdPath.minimal())
    """

    x_bnlhp: Tensor
    dt_bnlh: Tensor
    """Step sizes after softplus and clamping."""
    a_decay_h: Tensor
    """Negative."""
    b_bnlgr: Tensor
    c_bnlgr: Tensor
    d_h: Tensor
    """The skip, per head or (`hp`) per channel."""
    initial_state_bhpr: Tensor
    init_state_hpr: Tensor | None = None
    """A learned state, added to the initial one in every row."""

    def _tensors(self) -> dict[str, Tensor]:
        named = super()._tensors()
        if isinstance(self.d_h, Tensor) and self.d_h.dim() == 2:
            named["d_hp"] = named.pop("d_h")
        return named

    def run(self, path: SsdPath | None = None) -> tuple[Tensor, Tensor]:
        n, l = self.x_bnlhp.shape[1:3]
        x_bshp, dt_bsh = self.x_bnlhp.flatten(1, 2), self.dt_bnlh.flatten(1, 2)
        wide = torch.promote_types(dt_bsh.dtype, torch.float32)
        da_bsh = dt_bsh.to(wide) * self.a_decay_h.to(wide)
        y_bsmhp, state_bhpr = ssd(
            x_bshp[:, :, None],
            self.b_bnlgr.flatten(1, 2)[:, :, None],
            self.c_bnlgr.flatten(1, 2)[:, :, None],
            da_bsh,
            dt_bsh,
            dt_bsh,
            self._state(),
            path=_with_chunk_len(path, l),
        )
        skip_hp = self.d_h if self.d_h.dim() == 2 else self.d_h[:, None]
        y_bshp = (y_bsmhp[:, :, 0] + skip_hp * x_bshp).to(x_bshp.dtype)
        return y_bshp.unflatten(1, (n, l)), state_bhpr


class _Mamba3Bundle(_Bundle):
    v_bnlmhp: Tensor
    b_bnlmhr: Tensor
    c_bnlmhr: Tensor
    da_bnlh: Tensor

    def _run(self, w_now_bnlh: Tensor, w_later_bnlh: Tensor, path: SsdPath | None) -> tuple[Tensor, Tensor]:
        n, l = self.v_bnlmhp.shape[1:3]
        per_token = [self.v_bnlmhp, self.b_bnlmhr, self.c_bnlmhr, self.da_bnlh, w_now_bnlh, w_later_bnlh]
        v, b, c, da, w_now, w_later = (t.flatten(1, 2) for t in per_token)
        y_bsmhp, state_bhpr = ssd(v, b, c, da, w_now, w_later, self._state(), path=_with_chunk_len(path, l))
        return y_bsmhp.unflatten(1, (n, l)), state_bhpr


@dataclass(frozen=True, kw_only=True, eq=False)
class Mamba3DoubleSsdInput(_Mamba3Bundle):
    """One of the two scans of Mamba-3's double pathway; the trapezoid's coefficient is already in `v`.

    Examples:
        >>> b, n, l, m, h, p, r = 2, 3, 32, 1, 4, 16, 8
        >>> bundle = mk.Mamba3DoubleSsdInput(
        ...     v_bnlmhp=torch.randn(b, n, l, m, h, p), b_bnlmhr=torch.randn(b, n, l, m, h, r),
        ...     c_bnlmhr=torch.randn(b, n, l, m, h, r), da_bnlh=-torch.rand(b, n, l, h),
        ...     initial_state_bhpr=torch.zeros(b, h, p, r))
        >>> y_bnlmhp, state_bhpr = bundle.run()
    """

    v_bnlmhp: Tensor
    b_bnlmhr: Tensor
    """Normed, biased, rotated, per head."""
    c_bnlmhr: Tensor
    da_bnlh: Tensor
    """Log-decay `dt a`, at most 0."""
    initial_state_bhpr: Tensor
    init_state_hpr: Tensor | None = None

    def run(self, path: SsdPath | None = None) -> tuple[Tensor, Tensor]:
        one_bnlh = torch.ones_like(self.da_bnlh)
        return self._run(one_bnlh, one_bnlh, path)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mamba3SingleSsdInput(_Mamba3Bundle):
    """Mamba-3's single pathway: `gamma` weighs what a token sees of itself, `scale` what later ones see.

    Examples:
        >>> b, n, l, m, h, p, r = 2, 3, 32, 1, 4, 16, 8
        >>> bundle = mk.Mamba3SingleSsdInput(
        ...     v_bnlmhp=torch.randn(b, n, l, m, h, p), b_bnlmhr=torch.randn(b, n, l, m, h, r),
        ...     c_bnlmhr=torch.randn(b, n, l, m, h, r), da_bnlh=-torch.rand(b, n, l, h),
        ...     gamma_bnlh=torch.rand(b, n, l, h), scale_bnlh=torch.rand(b, n, l, h),
        ...     initial_state_bhpr=torch.zeros(b, h, p, r))
        >>> bundle.sanity()  # raises where a tensor holds a NaN
        >>> y_bnlmhp, state_bhpr = bundle.run()
    """

    v_bnlmhp: Tensor
    """Not scaled."""
    b_bnlmhr: Tensor
    c_bnlmhr: Tensor
    da_bnlh: Tensor
    gamma_bnlh: Tensor
    """lambda_t dt_t"""
    scale_bnlh: Tensor
    """gamma_t + (1 - lambda_{t+1}) dt_{t+1}, the second term zero at the last token of the call"""
    initial_state_bhpr: Tensor
    """With the boundary write of the token before the call already in it."""
    init_state_hpr: Tensor | None = None

    def run(self, path: SsdPath | None = None) -> tuple[Tensor, Tensor]:
        return self._run(self.gamma_bnlh, self.scale_bnlh, path)
