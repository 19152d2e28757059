"""The parts that optimizers share: directions, and the step of constant size that scales one.

A *direction* turns one private gradient into an update direction; a *step-size rule* scales it. `Direction.step` is the
constant step size; `HyFreeDP` finds the size itself and takes any direction as its base.

Updates are memory-bound: each takes as few passes over its vectors as torch's fused operations allow (`torch.add` with
`alpha`, `lerp`, `addcmul`). Operations in place only ever change a tensor that the same function has just made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpopt import fields
from dpopt.clipping.rules import Abadi
from dpopt.errors import ConfigError
from dpopt.fields import Positive
from dpopt.types import Batch, ClipRule, Oracle, Part, Release, Vector


@dataclass(frozen=True)
class Configured:
    """A frozen dataclass of hyperparameters whose values are checked when it is made.

    Attributes:
        revision: part of every result's identity; raise it when the same fields may give other numbers than before.
    """

    revision: ClassVar[int] = 1

    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True)
class Direction(Configured):
    """A direction G_t with a constant step size: theta_{t+1} = theta_t - lr G_t.

    A subclass is a frozen dataclass that defines `init` and `direction`, and `points` if it looks elsewhere than at
    theta_t. One draw a step.

    Args:
        lr: step size eta.
        clip: how one example's gradient is bounded.
    """

    lr: Positive = 0.1
    clip: ClipRule = Abadi(1.0)

    def init(self, theta: Vector) -> Any:
        """The state before the first step: a NamedTuple of tensors whose first field is `theta`, shape [d]."""
        raise _undefined(
            self, "init", "the state before the first step, a NamedTuple of tensors that begins with theta"
        )

    def points(self, state: Any) -> Sequence[tuple[float, Vector]]:
        """The weighted points (w_k, theta_k) at which the next gradient is observed."""
        return [(1.0, state.theta)]

    def observe(self, state: Any, batch: Batch, clip: ClipRule) -> Release:
        """The private gradient that `direction` takes, by one query of `batch`; shape [d]."""
        return batch.gradient(self.points(state), clip)

    def direction(self, state: Any, gradient: Release) -> tuple[Vector, Any]:
        """The direction G_t, shape [d], and the state with everything but `theta` advanced."""
        raise _undefined(self, "direction", _DIRECTED)

    def step(self, state: Any, oracle: Oracle) -> Any:
        """One draw, one private gradient, one step of size `lr`."""
        with oracle.draw() as batch:
            gradient = self.observe(state, batch, self.clip)
        direction, state = directed(self, state, gradient)
        return state._replace(theta=descend(state.theta, direction, scalar(state.theta, self.lr)))


_DIRECTED = "two values: the direction, a tensor [d] as theta is, and the state, a NamedTuple that begins with theta"
"""The result of `Direction.direction`."""


def directed(base: Direction, state: Any, gradient: Release) -> tuple[Vector, Any]:
    """The result of `base.direction`; ConfigError if it is something else than a direction and a state."""
    result: Any = base.direction(state, gradient)
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)
    if not is_pair or result[0].shape != state.theta.shape or getattr(result[1], "_fields", ())[:1] != ("theta",):
        parts = result if type(result) is tuple else [result]
        shown = ", ".join(f"Tensor {list(p.shape)}" if isinstance(p, Tensor) else type(p).__name__ for p in parts)
        raise ConfigError(f"{type(base).__name__}.direction", shown, f"expected {_DIRECTED}")
    return result


def _undefined(optimizer: Direction, method: str, what: str) -> ConfigError:
    return ConfigError(f"{type(optimizer).__name__}.{method}", None, f"define it; it gives {what}")


def require_base(base: Direction, owner: str, *, sees: Sequence[str] = ()) -> None:
    """Refuse a base direction that decides what the class `owner` decides in its place.

    That is `lr` and `clip`, which have to be its defaults, and the methods of `Direction` that `sees` names: "points",
    "observe" or both. Raises `ConfigError`.
    """
    plain = type(base)()
    for name in ("lr", "clip"):
        if getattr(base, name) != getattr(plain, name):
            raise ConfigError(f"{owner}.base.{name}", getattr(base, name), f"set {name} beside base")
    for name in sees:
        if getattr(type(base), name) is not getattr(Direction, name):
            gradient = "plain gradient at theta_t" if "observe" in sees else "gradient at theta_t alone"
            raise ConfigError(f"{owner}.base", base, f"expected a direction that sees the {gradient}")


def two_points(theta: Vector, previous: Vector, kappa: float, gamma: float) -> list[tuple[float, Vector]]:
    """The two-point observation of DiSK and FiBeR: points and weights that extrapolate along the last step.

    a at theta + gamma (theta - previous) and 1 - a at theta, with a = (1 - kappa)/(kappa gamma); a point of weight 0 is
    left out.
    """
    a = (1 - kappa) / (kappa * gamma)
    ahead = torch.lerp(previous, theta, 1 + gamma)
    return [(weight, point) for weight, point in ((a, ahead), (1 - a, theta)) if weight]


def ema(average: Vector, value: Vector, decay: float) -> Vector:
    """The moving average decay * average + (1 - decay) * value."""
    return torch.lerp(average, value, 1 - decay)


def ema_square(average: Vector, value: Vector, decay: float) -> Vector:
    """The moving average decay * average + (1 - decay) * value^2."""
    return (decay * average).addcmul_(value, value, value=1 - decay)


def descend(theta: Vector, direction: Vector, size: Tensor) -> Vector:
    """The point theta - size * direction, for a step size that is a tensor."""
    return torch.addcmul(theta, direction, size, value=-1)


def scalar(like: Tensor, value: float | Tensor = 0.0) -> Tensor:
    """A float64 number on `like`'s device: counts and step sizes stay tensors, so that no step waits for one."""
    if isinstance(value, Tensor):
        return value.to(like.device, torch.float64)
    return like.new_full((), value, dtype=torch.float64)


def scalars(like: Tensor, values: Iterable[float | Tensor]) -> Tensor:
    """Float64 numbers on `like`'s device, shape [k]; `new_tensor` would copy them there, and wait for it."""
    return torch.stack([scalar(like, value) for value in values])


def is_matrix(part: Part) -> bool:
    """True for two rows and columns or more, where a convolution's kernel is [out, rest]; not for embeddings."""
    rows, *rest = part.shape or (1,)
    return min(rows, math.prod(rest)) > 1 and not part.module.startswith("Embedding")


def expected_epoch(draws: float, rate: float) -> int:
    """Number of the expected epoch, from 1, that the next of `draws` taken draws falls into."""
    # Rounding may put an epoch's last draw a hair short of a whole number of epochs.
    return 1 + math.floor(draws * rate + 1e-9)
