"""The types an optimizer is written against: it sees an oracle, and all that an oracle hands out is privatised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

Vector: TypeAlias = Tensor
"""All trained parameters, or something of their shape, as one contiguous tensor of shape [d]."""
Number: TypeAlias = float | Tensor
"""One number; a tensor has shape []."""
Points: TypeAlias = Vector | Sequence[tuple[Number, Vector]]
"""One point, or weighted points (w_k, theta_k) whose gradients are combined per example before clipping."""


class Part(NamedTuple):
    """One trained parameter's place in a vector. All of it is public.

    Attributes:
        name: in the model's `named_parameters`; a parameter that layers share is there once, by the first one's name.
        shape: of the parameter.
        module: class name of the module that holds it, such as Linear; Embedding for classes made of that one too.
        start: its first entry in the vector.
    """

    name: str
    shape: tuple[int, ...]
    module: str
    start: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + prod(self.shape))

    @property
    def layer(self) -> str:
        """The name of its module."""
        return self.name.rpartition(".")[0]

    def of(self, vector: Vector) -> Tensor:
        """Its entries of `vector`, shape [d], as a view of its shape."""
        return vector[self.slice].view(self.shape)


Layout: TypeAlias = tuple[Part, ...]
"""The trained parameters in the order of the vector."""


def laid_out(parameters: Iterable[tuple[str, Sequence[int], str]]) -> Layout:
    """The layout of parameters one after the other, each given by its name, its shape and its module's class."""
    parts, start = list[Part](), 0
    for name, shape, module in parameters:
        parts.append(Part(name, tuple(shape), module, start))
        start = parts[-1].slice.stop
    return tuple(parts)


@dataclass(frozen=True)
class Release:
    """A noised value and what is publicly known of its noise.

    Attributes:
        value: shape [d] for a gradient, [k] for k losses; already divided by the expected batch size.
        std: standard deviation of the privacy noise in each coordinate of `value`: one for all of them, or as many.
    """

    value: Tensor
    std: Number | Vector


# Checkable, as `fields` asks of a value whether it is one.
@runtime_checkable
class ClipRule(Protocol):
    """A bound on one example's gradient."""

    @property
    def sensitivity(self) -> Number:
        """The largest L2 norm that a clipped gradient can have; 1e-30 to 1e30. It is read once for each query."""
        ...

    def factor(self, norm: Tensor) -> Tensor:
        """The factor that a gradient is multiplied by, given its L2 norm; both of one shape, [n] or [].

        It is evaluated on one norm at a time, by `torch.func.vmap`, which `repr` shows without its value; and where it
        would let a gradient be longer than the sensitivity, a smaller factor takes its place.
        """
        ...


class Record(NamedTuple):
    """One record, as a query sees it.

    Attributes:
        losses: at the points that the query probes, float64, shape [k].
        norm: L2 norm of its gradient in the draw's last gradient query, before clipping; NaN where there was none.
    """

    losses: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Query(ABC):
    """A question to an open draw: what one record contributes to a sum, how far it may move it, what is released.

    A kind of release is a frozen dataclass of this class, asked for by `batch.ask`; nothing else has to know of it. The
    oracle draws, sums, bounds, adds noise, charges and releases, once for all kinds, and `calibrate` solves a noise
    multiplier for each kind that an optimizer asks for. Fields are annotated `Vector`, `Sequence[Vector]`, `Points`,
    `Number` or `ClipRule`: they come from the optimizer, and are read accordingly.

    Attributes:
        kind: names its noise multiplier in a plan.
        follows: the kind of a query that the same draw must have answered before.
    """

    kind: ClassVar[str]
    follows: ClassVar[str | None] = None

    @property
    def releases(self) -> int:
        """Number m of sums that are released, each with noise of its own, and each charged; by default 1."""
        return 1

    @property
    @abstractmethod
    def sensitivity(self) -> Number:
        """The most that one record moves each of the sums; what it contributes beyond is cut off."""

    @property
    def centre(self) -> Number | Vector | None:
        """A public number that is added to the released means; for a gradient a vector [d]."""
        return None

    @property
    def probed(self) -> Sequence[Vector]:
        """The k points at which `contribution` is told a record's losses."""
        return ()

    @abstractmethod
    def contribution(self, record: Record) -> Tensor:
        """The contribution of one record to each sum, shape [m]; nothing, where that is not finite.

        It is evaluated under `torch.func.vmap`, so it is given one record and cannot tell which.
        """


class Batch(Protocol):
    """One Poisson draw, open for queries until its `with` block ends."""

    def gradient(self, at: Points, clip: ClipRule, scale: Vector | None = None, shift: Vector | None = None) -> Release:
        """(sum_i clip(s * sum_k w_k grad f_i(theta_k)) + noise) / expected_batch, shape [d].

        The points are combined per example, each coordinate is multiplied by its `scale` s, shape [d] (by default 1),
        and what comes out is clipped once. The release is of the scaled gradient: dividing by s is the caller's.
        With a `shift` a, shape [d], it is (sum_i clip(s * (sum_k w_k grad f_i(theta_k) - a)) + noise) / expected_batch
        + s * a: who is not in the draw contributes nothing, so the sensitivity stays that of `clip`.
        """
        ...

    def losses(self, at: Sequence[Vector], bound: Number) -> Release:
        """Mean loss at each point, clipped to [0, bound] per example and noised; float64, shape [len(at)]."""
        ...

    def below(self, bound: Number) -> Release:
        """Share of the examples whose gradient was not longer than `bound`, noised; float64, shape [1].

        (sum_i (b_i - 1/2) + noise) / expected_batch + 1/2, where b_i is 1 if the L2 norm of example i in the draw's
        last `gradient` query, before clipping, is at most `bound`, and else 0. Its sensitivity is 1/2.
        """
        ...

    def ask(self, query: Query) -> Release:
        """The answer to a query of any kind; the methods above are short for those of `dpopt.privacy.queries`.

        Raises:
            ConfigError: something in the query that cannot be used; nothing is charged then.
            UnplannedRelease: the plan holds no such release, or another query is being answered.
        """
        ...


class Oracle(Protocol):
    """The only way to the data. Every attribute is public."""

    @property
    def dimension(self) -> int:
        """Number d of trained parameters."""
        ...

    @property
    def layout(self) -> Layout:
        """Names, shapes and places of the trained parameters. While calibration traces, it is that of a small model.

        What an optimizer releases may not depend on it.
        """
        ...

    @property
    def rate(self) -> float:
        """Probability q = B/N with which a record joins a draw."""
        ...

    @property
    def expected_batch(self) -> float:
        """Expected batch size B; the constant that every sum is divided by."""
        ...

    @property
    def draws_total(self) -> int:
        """Draws that the plan holds."""
        ...

    @property
    def draws_left(self) -> int:
        """Draws that are still to be taken."""
        ...

    def draw(self) -> AbstractContextManager[Batch]:
        """Take the next draw.

        Raises:
            BudgetSpent: the plan holds no further draw.
        """
        ...


@runtime_checkable
class Optimizer(Protocol):
    """A frozen dataclass of hyperparameters. `State` is a NamedTuple of tensors whose first field is `theta`."""

    def init(self, theta: Vector) -> Any:
        """The state before the first step."""
        ...

    def step(self, state: Any, oracle: Oracle) -> Any:
        """One step: queries the oracle, returns the next state, changes nothing in place."""
        ...
