"""Which weights each virtual layer uses: more layers than weight sets, or in another order."""

from dataclasses import dataclass
from typing import Any

from mambakit.arguments import shown

MOST_LAYERS = 2**20


@dataclass(frozen=True, slots=True)
class Cyclic:
    """All layers in order, again and again: 0 1 2 0 1 2.

    Examples:
        >>> mk.Cyclic(6).order(3)
        (0, 1, 2, 0, 1, 2)
    """

    n: int

    def order(self, n_layer: int) -> tuple[int, ...]:
        return tuple(q % n_layer for q in range(check_count(self)))


@dataclass(frozen=True, slots=True)
class Stretched:
    """Each layer several times before the next one: 0 0 1 1 2 2.

    Examples:
        >>> mk.Stretched(6).order(3)
        (0, 0, 1, 1, 2, 2)
    """

    n: int

    def order(self, n_layer: int) -> tuple[int, ...]:
        return tuple(q * n_layer // self.n for q in range(check_count(self)))


@dataclass(frozen=True, slots=True)
class Custom:
    """The index of the layer to use, for each virtual layer.

    Examples:
        >>> mk.Custom((0, 1, 1, 2)).order(3)
        (0, 1, 1, 2)
    """

    indices: tuple[int, ...]

    def order(self, n_layer: int) -> tuple[int, ...]:
        if not isinstance(self.indices, list | tuple) or not self.indices:
            raise ValueError(f"Custom({shown(self.indices)}) has no virtual layers; name the layer to use for each")
        wrong = [index for index in self.indices if type(index) is not int or not 0 <= index < n_layer]
        if wrong:
            raise ValueError(f"Custom names layers {wrong}, but n_layer = {n_layer} has 0 to {n_layer - 1}")
        return tuple(self.indices)

    def pair_order(self, n_layer: int) -> tuple[int, ...]:
        order = self.order(n_layer)
        if len(order) % 2:
            raise ValueError(f"Custom names {len(order)} layers; two directions need an even number")
        return order


# Two directions: virtual layers 2o (straight) and 2o + 1 (reverse) work side by side as pair o.


@dataclass(frozen=True, slots=True)
class StridedCyclic:
    """Straight uses the even layers, reverse the odd ones, each cyclically.

    Examples:
        >>> mk.StridedCyclic(8).pair_order(4)
        (0, 1, 2, 3, 0, 1, 2, 3)
    """

    n: int

    def pair_order(self, n_layer: int) -> tuple[int, ...]:
        pairs, even, odd = check_strided(self, n_layer)
        return interleave([2 * (o % even) for o in range(pairs)], [2 * (o % odd) + 1 for o in range(pairs)])


@dataclass(frozen=True, slots=True)
class StridedStretched:
    """Straight uses the even layers, reverse the odd ones, each several times before the next.

    Examples:
        >>> mk.StridedStretched(8).pair_order(4)
        (0, 1, 0, 1, 2, 3, 2, 3)
    """

    n: int

    def pair_order(self, n_layer: int) -> tuple[int, ...]:
        pairs, even, odd = check_strided(self, n_layer)
        straight = [2 * (o * even // pairs) for o in range(pairs)]
        return interleave(straight, [2 * (o * odd // pairs) + 1 for o in range(pairs)])


@dataclass(frozen=True, slots=True)
class SymmetricCyclic:
    """Both directions of a pair use the same layer, cyclically.

    Examples:
        >>> mk.SymmetricCyclic(8).pair_order(4)
        (0, 0, 1, 1, 2, 2, 3, 3)
    """

    n: int

    def pair_order(self, n_layer: int) -> tuple[int, ...]:
        same = [o % n_layer for o in range(check_pairs(self))]
        return interleave(same, same)


@dataclass(frozen=True, slots=True)
class SymmetricStretched:
    """Both directions of a pair use the same layer, each several times before the next.

    Examples:
        >>> mk.SymmetricStretched(8).pair_order(4)
        (0, 0, 1, 1, 2, 2, 3, 3)
    """

    n: int

    def pair_order(self, n_layer: int) -> tuple[int, ...]:
        pairs = check_pairs(self)
        same = [o * n_layer // pairs for o in range(pairs)]
        return interleave(same, same)


Schedule = Cyclic | Stretched | Custom
PairSchedule = StridedCyclic | StridedStretched | SymmetricCyclic | SymmetricStretched | Custom
KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Cyclic, Stretched, Custom, StridedCyclic, StridedStretched, SymmetricCyclic, SymmetricStretched)
}


def to_dict(schedule: Schedule | PairSchedule | None) -> dict[str, Any] | None:
    if schedule is None:
        return None
    value = list(schedule.indices) if isinstance(schedule, Custom) else schedule.n
    return {"schedule": type(schedule).__name__, "indices" if isinstance(schedule, Custom) else "n": value}


def from_dict(values: dict[str, Any] | None) -> Any:
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ValueError(f"a schedule cannot be read from {shown(values)}, expected an object with its name")
    fields = dict(values)
    kind = fields.pop("schedule", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"schedule is {shown(kind)}, expected one of {', '.join(KINDS)}")
    expected = "indices" if kind == "Custom" else "n"
    if list(fields) != [expected]:
        raise ValueError(f"{kind} has the field {expected}, got {', '.join(map(str, fields)) or 'none'}")
    if kind == "Custom" and not isinstance(fields["indices"], list | tuple):
        raise ValueError(f"indices is {shown(fields['indices'])}, expected a list of numbers of layers")
    return Custom(tuple(fields["indices"])) if kind == "Custom" else KINDS[kind](fields["n"])


def interleave(straight: list[int], reverse: list[int]) -> tuple[int, ...]:
    return tuple(index for pair in zip(straight, reverse, strict=True) for index in pair)


def check_count(schedule: Any) -> int:
    if type(schedule.n) is not int or schedule.n < 1:
        raise ValueError(f"{type(schedule).__name__}({shown(schedule.n)}) has no virtual layers; choose 1 or more")
    if schedule.n > MOST_LAYERS:
        raise ValueError(f"{type(schedule).__name__}({schedule.n}) is more than {MOST_LAYERS} virtual layers")
    return schedule.n


def check_pairs(schedule: Any) -> int:
    if check_count(schedule) % 2:
        raise ValueError(f"{type(schedule).__name__}({schedule.n}) is odd; two directions need an even number")
    return schedule.n // 2


def check_strided(schedule: Any, n_layer: int) -> tuple[int, int, int]:
    """The number of pairs, of even layers and of odd layers."""
    if n_layer < 2:
        raise ValueError(f"{type(schedule).__name__} needs a layer per direction, got n_layer = {n_layer}")
    return check_pairs(schedule), n_layer - n_layer // 2, n_layer // 2
