"""The kinds of release: gradient, losses, counts. Each is one class, and so is a further one; see `types.Query`.

What a query holds comes from an optimizer, and is read before it is used (`read`): vectors as plain tensors of the
engine's type, bounds and weights as one number each, and each of them once.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from dpopt.clipping.rules import ELEMENTWISE, Bounded, ByGroup, Veiled, check_alone
from dpopt.errors import ConfigError
from dpopt.types import ClipRule, Layout, Number, Points, Query, Record, Vector

_LEAST, LARGEST = 1e-30, 1e30
"""The range of a sensitivity: float32 rounds the noise of a smaller one to nothing, of a larger one to infinity."""


@dataclass(frozen=True)
class Gradient(Query):
    """The clipped gradient; see `Batch.gradient`. It is the one kind whose sum is a vector [d]."""

    kind: ClassVar[str] = "gradient"
    at: Points
    clip: ClipRule
    scale: Vector | None = None
    shift: Vector | None = None

    @property
    def sensitivity(self) -> Number:
        return self.clip.sensitivity

    @property
    def points(self) -> list[tuple[Number, Vector]]:
        """Weighted points; a single vector counts with weight one."""
        return [(1.0, self.at)] if isinstance(self.at, Tensor) else list(self.at)

    @property
    def frame(self) -> Tensor | None:
        """Scale and shift as a clipping engine takes them."""
        if self.shift is None:
            return self.scale
        return torch.stack([torch.ones_like(self.shift) if self.scale is None else self.scale, self.shift])

    @property
    def centre(self) -> Vector | None:
        # Times the expected number of records of a draw, over the expected batch: how many there are is not told.
        return None if self.shift is None or self.frame is None else self.frame.prod(dim=0)

    def contribution(self, record: Record) -> Tensor:
        raise NotImplementedError("the clipping engine sums gradients without making each of them")


@dataclass(frozen=True)
class Losses(Query):
    """Mean losses at k points, clipped to [0, bound] and centred at bound/2; see `Batch.losses`."""

    kind: ClassVar[str] = "losses"
    at: Sequence[Vector]
    bound: Number

    def __post_init__(self) -> None:
        if isinstance(self.bound, int | float) and not 0 < self.bound < math.inf:
            raise ConfigError("losses.bound", self.bound, "expected a finite bound > 0")

    @property
    def probed(self) -> Sequence[Vector]:
        return self.at

    @property
    def releases(self) -> int:
        return len(self.at)

    @property
    def sensitivity(self) -> Number:
        return self.bound / 2

    @property
    def centre(self) -> Number:
        return self.bound / 2

    def contribution(self, record: Record) -> Tensor:
        # Centred, a record moves the sum by half the bound under add/remove.
        centred = record.losses.clamp(min=0).clamp(max=self.bound) - self.bound / 2
        return torch.where(record.losses.isfinite(), centred, math.nan)


@dataclass(frozen=True)
class Below(Query):
    """The share of records whose gradient was not longer than `bound`, centred at 1/2; see `Batch.below`."""

    kind: ClassVar[str] = "counts"
    follows: ClassVar[str | None] = Gradient.kind
    bound: Number

    @property
    def sensitivity(self) -> Number:
        return 0.5

    @property
    def centre(self) -> Number:
        return 0.5

    def contribution(self, record: Record) -> Tensor:
        bound = self.bound.to(record.norm.dtype) if isinstance(self.bound, Tensor) else self.bound
        # Centred, a record moves the sum by 1/2; a norm that is not a number is below nothing.
        return (record.norm <= bound).double().unsqueeze(0) - 0.5


GRADIENT, LOSSES, COUNTS = Gradient.kind, Losses.kind, Below.kind
KINDS: dict[str, type[Query]] = {kind.kind: kind for kind in (Gradient, Losses, Below)}
"""The kernel's own kinds of release."""
_OWN = frozenset(KINDS.values())


@dataclass(frozen=True)
class Space:
    """The type and the place in which vectors and numbers are read.

    Attributes:
        dimension: length d of a vector.
        dtype, device: of vectors; numbers are float64, on the same device.
        has_values: false for tensors whose values cannot be read (`privacy.opaque`), which stay as they are.
        layout: of the model whose gradients are clipped; empty where none are, or its parameters have no names.
    """

    dimension: int
    dtype: torch.dtype
    device: torch.device
    has_values: bool = True
    layout: Layout = ()

    def vector(self, value: Any, where: str, *, is_copied: bool = False) -> Vector:
        """`value` as a plain tensor [d], in new memory where it `is_copied`; else a ConfigError."""
        if not isinstance(value, Tensor) or value.shape != (self.dimension,):
            shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else value
            raise ConfigError(where, shape, f"expected a tensor of shape [{self.dimension}]")
        return self._plain(value, self.dtype, is_copied)

    def number(self, value: Any, where: str) -> Number:
        """`value` as a float, or as a new plain tensor of shape [] if it is a tensor; else a ConfigError."""
        if isinstance(value, Tensor) and not value.dim():
            return self._plain(value, torch.float64, is_copied=True)
        if isinstance(value, bool) or not isinstance(value, int | float):
            shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else value
            raise ConfigError(where, shape, "expected one number")
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(where, value, "expected a number of double precision") from error

    def _plain(self, tensor: Tensor, dtype: torch.dtype, is_copied: bool) -> Tensor:
        if not self.has_values:
            return tensor.detach()
        if type(tensor) in (Tensor, nn.Parameter):
            return tensor.detach().to(self.device, dtype, copy=is_copied)
        # A subclass could look at whatever it is computed with, so its numbers are copied without asking it.
        with torch._C.DisableTorchFunctionSubclass():
            return torch.empty(tensor.shape, dtype=dtype, device=self.device).copy_(tensor.detach())


_Reader = Callable[[Any, str, Space], Any]
"""(value of a field, its name in errors, the space) -> the value as the kernel's own; else a ConfigError."""


class Asked(NamedTuple):
    """A query as the kernel has read it, see `Query`: each value was read once and cannot change afterwards."""

    query: Query
    kind: str
    follows: str | None
    releases: int
    sensitivity: Number
    centre: Number | Vector | None


def read(query: Query, space: Space) -> Asked:
    """`query` as it is answered and charged.

    Raises:
        ConfigError: no query, or something in it that cannot be used; names the field.
    """
    if not isinstance(query, Query):
        raise ConfigError("query", query, "expected a `Query`, such as `Gradient`, `Losses` or `Below`")
    kind = str(query.kind)
    # Everything is read before anything is charged, and once: what is computed with later is the kernel's own.
    plain = {name: reader(getattr(query, name), f"{kind}.{name}", space) for name, reader in _readers(type(query))}
    query = dataclasses.replace(query, **plain)
    releases, centre = query.releases, query.centre
    if not isinstance(releases, int) or releases < 1:
        raise ConfigError(f"{kind}.releases", releases, "expected at least 1")
    sensitivity = space.number(query.sensitivity, f"{kind}.sensitivity")
    if isinstance(sensitivity, Tensor):  # its value is not looked at: it is moved to where float32 noise is noise
        sensitivity = sensitivity.nan_to_num(nan=LARGEST).clamp(_LEAST, LARGEST)
    elif not (_LEAST <= sensitivity <= LARGEST or sensitivity == math.inf):
        allowed = f"expected {_LEAST:g} to {LARGEST:g}, or infinity where nothing is noised"
        raise ConfigError(f"{kind}.sensitivity", sensitivity, allowed)
    if centre is not None and type(query) is not Gradient:
        centre = space.number(centre, f"{kind}.centre")
    asked = Asked(query, kind, query.follows, int(releases), sensitivity, centre)
    if type(query) not in _OWN:  # what is wrong with it shows now, whoever is in the draw
        contributions(asked, torch.ones(len(query.probed), 2, dtype=torch.float64), torch.ones(2))
    return asked


def contributions(asked: Asked, losses: Tensor, norms: Tensor) -> Tensor:
    """The contributions of n records to the m sums of a query, each by itself, shape [m, n].

    Args:
        losses: of each record at the points that the query probes, [k, n].
        norms: of each record's gradient, [n].

    Raises:
        ConfigError: the query's contribution looks at a value, or is not one number for each sum.
    """

    def of_one(losses: Tensor, norm: Tensor) -> Tensor:
        if type(asked.query) in _OWN:
            return asked.query.contribution(Record(losses, norm))
        return asked.query.contribution(Record(losses.as_subclass(Veiled), norm.as_subclass(Veiled)))

    try:
        # Shown one record at a time, a contribution cannot depend on the others.
        each = vmap(of_one, in_dims=(1, 0), out_dims=-1)(losses, norms)
    except Exception as error:  # a query of one's own can fail in any way
        reason = f"expected torch's operations on one record ({type(error).__name__}: {error})"
        raise ConfigError(f"{asked.kind}.contribution", asked.query, reason) from error
    if each.shape != (asked.releases, len(norms)):
        shape, expected = f"shape {list(each.shape[:-1])}", f"expected one number for each of {asked.releases} releases"
        raise ConfigError(f"{asked.kind}.contribution", shape, expected)
    return each


@cache
def _readers(kind: type[Query]) -> tuple[tuple[str, _Reader], ...]:
    """The name of each field of a kind of query, and the function that reads it."""
    annotations = typing.get_type_hints(kind)
    return tuple((field.name, _reader(annotations[field.name])) for field in dataclasses.fields(kind))


def _reader(hint: Any) -> _Reader:
    if hint in (Number, float):
        return _number
    read = _rule if hint is ClipRule else _vector if hint in (Vector, Vector | None) else _points
    if type(None) not in typing.get_args(hint):
        return read
    return lambda value, where, space: None if value is None else read(value, where, space)


def _number(value: Any, where: str, space: Space) -> Number:
    return space.number(value, where)


def _rule(value: Any, where: str, space: Space) -> Bounded:
    if type(value) is ByGroup:  # without a layout no gradient is clipped by groups, and the sensitivity is the same
        groups = _groups(value.groups, space.layout) if space.layout else None
        return dataclasses.replace(_rule(value.inner, where, space), groups=groups)
    if type(value) in ELEMENTWISE:
        # It is shown all norms at once: its fields become plain numbers, which run no code and stay as they are.
        names = [field.name for field in dataclasses.fields(value)]
        numbers = tuple(space.number(getattr(value, name), f"{where}.{name}") for name in names)
        # A rule of equal floats is made and checked once; a tensor may hold another number each time.
        are_floats = all(type(number) is float for number in numbers)
        value = _made(type(value), numbers) if are_floats else type(value)(*numbers)
    elif isinstance(value, ClipRule):
        check_alone(value)
    else:
        raise ConfigError(where, value, "expected a clip rule: a `sensitivity`, and a `factor` for each norm")
    return Bounded(value, space.number(value.sensitivity, f"{where}.sensitivity"))


@lru_cache(maxsize=256)
def _made(kind: type[Any], numbers: tuple[float, ...]) -> Any:
    return kind(*numbers)


@lru_cache(maxsize=64)
def _groups(groups: str | None, layout: Layout) -> tuple[int, ...]:
    return ByGroup(groups=groups).partition(layout)


def _vector(value: Any, where: str, space: Space) -> Vector:
    # A scale is used for the norms and again for the sum: a change in between would move the sum beyond its bound.
    return space.vector(value, where, is_copied=True)


def _points(value: Any, where: str, space: Space) -> Any:
    if not (isinstance(value, list | tuple) and value):
        return space.vector(value, where)
    points: list[Any] = []
    for i, part in enumerate(value):
        place = f"{where}[{i}]"
        if not isinstance(part, tuple):
            points.append(space.vector(part, place))
        elif len(part) == 2:
            points.append((space.number(part[0], place), space.vector(part[1], place)))
        else:
            raise ConfigError(place, part, "expected a pair (weight, vector)")
    return tuple(points)
