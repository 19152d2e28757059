"""The task that the checks run optimizers on, and what a run of it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpopt import clipping
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.privacy.ledger import Plan
from dpopt.privacy.oracle import ReplayOracle, Transcript
from dpopt.types import Layout, Optimizer, Release, Vector

_EXAMPLES, _BATCH, DRAWS, EPSILON, DELTA = 60, 20, 12, 5.0, 1e-5


class Recording(NamedTuple):
    """A finished run: its start, plan and expected batch, all it released, the state it ended in, and its layout."""

    start: Vector
    plan: Plan
    expected_batch: float
    releases: Transcript
    final: Any
    layout: Layout

    @property
    def tensors(self) -> list[Tensor]:
        releases = [release for draw in self.releases for release in draw]
        return [part for release in releases for part in (release.value, release.std) if isinstance(part, Tensor)]

    def oracle(self, to: Callable[[Tensor], Tensor] = lambda value: value) -> ReplayOracle:
        """An oracle that hands out the releases again, each tensor put through `to`."""
        releases = [
            [Release(to(each.value), to(each.std) if isinstance(each.std, Tensor) else each.std) for each in draw]
            for draw in self.releases
        ]
        # Never asked for: it tells the type and the place of vectors where no gradient does.
        releases[-1].append(Release(to(self.start), 0.0))
        return ReplayOracle(releases, self.plan, expected_batch=self.expected_batch, layout=self.layout)

    def replay(self, optimizer: Optimizer, to: Callable[[Tensor], Tensor] = lambda value: value) -> Any:
        """The state in which `optimizer` ends, given the releases and no data."""
        return advance(optimizer, optimizer.init(to(self.start)), self.oracle(to))


class Task:
    """Logistic regression with a hidden layer on random data: 3 classes, 5 features, 60 records.

    Args:
        scale: the loss is multiplied by it; 0 makes all gradients zero.
        dtype, device: of the data and the model.
    """

    def __init__(
        self, scale: float = 1.0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(_EXAMPLES, 5, generator=generator).to(device, dtype)
        self.y = torch.randint(0, 3, (_EXAMPLES,), generator=generator).to(device)
        # The caller's random numbers stay as they are: checks are called in any order.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(device, dtype)
        # Where all gradients are zero, book-keeping has nothing to be verified by.
        name = "auto" if scale else "vmap"
        self.loss = lambda o, t: scale * F.cross_entropy(o, t, reduction="none")
        self.engine = clipping.engine(self.model, self.loss, name)

    def plan(self, optimizer: Optimizer, epsilon: float = EPSILON, rate: float = _BATCH / _EXAMPLES) -> Plan:
        """A plan of 12 draws, by RDP, which is quick; its noise is solved once for all that release alike."""
        sizes: dict[str, Any] = {"rate": rate, "draws": DRAWS, "dimension": self.engine.dimension}
        return calibrate(optimizer, **sizes, epsilon=epsilon, delta=DELTA, accountant="rdp")

    def oracle(self, plan: Plan, transcript: Transcript | None = None, **changes: Any) -> DataOracle:
        """An oracle over the task's data."""
        options: dict[str, Any] = {"draw_seed": 1, "noise_seed": 2, "transcript": transcript, **changes}
        return DataOracle(self.engine, options.pop("x", self.x), options.pop("y", self.y), plan, **options)

    def run(self, optimizer: Optimizer, oracle: Any, state: Any = None, until: int = 0) -> Any:
        """Step from `state`, or from the start, until at most `until` draws are left."""
        return advance(optimizer, optimizer.init(self.engine.theta) if state is None else state, oracle, until)

    def record(self, optimizer: Optimizer) -> Recording:
        """A run to the end, with everything that it released."""
        plan, transcript = self.plan(optimizer), []
        oracle = self.oracle(plan, transcript)
        final = self.run(optimizer, oracle)
        return Recording(self.engine.theta, plan, oracle.expected_batch, transcript, final, oracle.layout)


def advance(optimizer: Optimizer, state: Any, oracle: Any, until: int = 0) -> Any:
    """Step from `state` until at most `until` draws are left."""
    while (left := oracle.draws_left) > until:
        state = optimizer.step(state, oracle)
        assert oracle.draws_left < left, "a step asked for nothing, so there would be no end"
    return state


def tensors(state: Any) -> list[Tensor]:
    """The leaves of `state`, which are all tensors."""
    leaves, _ = pytree.tree_flatten(state)
    strange = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)}
    assert not strange, f"the state holds something that is not a tensor: {', '.join(sorted(strange))}"
    return leaves


def pairs(state: Any, other: Any) -> list[tuple[Tensor, Tensor]]:
    """The leaves of two states, side by side."""
    ours, theirs = tensors(state), tensors(other)
    assert len(ours) == len(theirs), f"the state holds {len(ours)} tensors at one time and {len(theirs)} at another"
    return list(zip(ours, theirs, strict=True))


def require_same(state: Any, expected: Any, complaint: str) -> None:
    """Raise `AssertionError` unless two states are equal bit for bit, leaf by leaf."""
    for number, (leaf, other) in enumerate(pairs(state, expected)):
        if not torch.equal(leaf, other):
            is_alike = leaf.shape == other.shape
            off = f"{float((leaf.double() - other.double()).abs().max()):.3g}" if is_alike else f"shape {[*leaf.shape]}"
            raise AssertionError(f"{complaint}: leaf {number} of the state differs by {off}")


def require_near(end: Tensor, expected: Tensor, start: Tensor, tolerance: float, complaint: str) -> None:
    """Raise `AssertionError` unless `end` is `expected` but for `tolerance` of the way from `start`, and rounding."""
    rounding = DRAWS * torch.finfo(end.dtype).eps  # what 12 steps lose
    end, expected, start = (tensor.double().cpu() for tensor in (end, expected, start))
    way, off = float((expected - start).norm()), float((end - expected).norm())
    allowed = tolerance * way + rounding * float(expected.norm())
    assert off <= allowed, f"{complaint}: {off:.3g} apart after a way of {way:.3g}, {allowed:.3g} allowed"
