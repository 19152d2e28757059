"""Coordinates that stay where they are: post-processing, so it costs no privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from dpopt.types import Optimizer, Oracle, Vector


@dataclass(frozen=True)
class Held:
    """Steps as another optimizer does, and sets some coordinates of theta back after each step.

    They are those of parameters that the loss never uses, of which a release holds noise alone. The vectors keep their
    length, so draws, noise and ledger are the other optimizer's. It has no name in the registry.

    Args:
        base: the optimizer; its state is this one's.
        spans: (start, stop) of the coordinates; public.
    """

    base: Optimizer
    spans: tuple[tuple[int, int], ...]

    def init(self, theta: Vector) -> Any:
        return self.base.init(theta)

    def step(self, state: Any, oracle: Oracle) -> Any:
        kept = [state.theta[start:stop].clone() for start, stop in self.spans]
        # The first leaf of a state is theta, also where the state is in another process.
        (theta, *rest), form = pytree.tree_flatten(self.base.step(state, oracle))
        theta = theta.clone()
        for (start, stop), values in zip(self.spans, kept, strict=True):
            theta[start:stop] = values
        return pytree.tree_unflatten([theta, *rest], form)
