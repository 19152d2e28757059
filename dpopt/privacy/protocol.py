"""The types an optimizer is written against: it sees an oracle, and all that an oracle hands out is privatised."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

Vector: TypeAlias = Tensor
"""All trained parameters, or something of their shape, as one contiguous tensor of shape [d]."""
Points: TypeAlias = Vector | Sequence[tuple[float, Vector]]
"""One point, or weighted points (w_k, theta_k) whose gradients are combined per example before clipping."""


@dataclass(frozen=True)
class Release:
    """A noised value and what is publicly known of its noise.

    Attributes:
        value: shape [d] for a gradient, [k] for k losses; already divided by the expected batch size.
        std: standard deviation of the privacy noise in each coordinate of `value`.
    """

    value: Tensor
    std: float | Tensor


@runtime_checkable
class ClipRule(Protocol):
    """How one example's gradient is bounded."""

    @property
    def sensitivity(self) -> float:
        """The largest L2 norm that a clipped gradient can have."""
        ...

    def factor(self, norm: Tensor) -> Tensor:
        """The factor each gradient is multiplied by, given its L2 norm; both of shape [n]."""
        ...


class Batch(Protocol):
    """One Poisson draw, open for queries until its `with` block ends."""

    def gradient(self, at: Points, clip: ClipRule, scale: Vector | None = None) -> Release:
        """(sum_i clip(s * sum_k w_k grad f_i(theta_k)) + noise) / expected_batch, shape [d].

        The points are combined per example, each coordinate is multiplied by its `scale` s, shape [d] (by default 1),
        and what comes out is clipped once. The release is of the scaled gradient: dividing by s is the caller's.
        """
        ...

    def losses(self, at: Sequence[Vector], bound: float | Tensor) -> Release:
        """Mean loss at each point, clipped to [0, bound] per example and noised; float64, shape [len(at)]."""
        ...

    def below(self, bound: float | Tensor) -> Release:
        """Share of the examples whose gradient was not longer than `bound`, noised; float64, shape [1].

        (sum_i (b_i - 1/2) + noise) / expected_batch + 1/2, where b_i is 1 if the L2 norm of example i in the draw's
        last `gradient` query, before clipping, is at most `bound`, and else 0. Its sensitivity is 1/2.
        """
        ...


class Oracle(Protocol):
    """The only way to the data. Every attribute is public."""

    @property
    def dimension(self) -> int:
        """Number d of trained parameters."""
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
