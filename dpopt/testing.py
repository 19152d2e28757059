"""Conformance checks for optimizers: what every registered one must pass, callable from a plug-in's own tests.

    import dpopt, pytest

    @pytest.mark.parametrize("check", dpopt.testing.checks(MyOptimizer()), ids=str)
    def test_conformance(check):
        check()

A check runs the optimizer on a small synthetic task and raises `AssertionError` where a rule is broken.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpopt import clipping
from dpopt.privacy import accountants
from dpopt.privacy.calibration import calibrate, trace
from dpopt.privacy.oracle import BudgetSpent, DataOracle, ReplayOracle, Transcript
from dpopt.privacy.plan import Plan
from dpopt.privacy.protocol import ClipRule, Optimizer, Points, Release, Vector

EXAMPLES, BATCH, DRAWS, EPSILON, DELTA = 60, 20, 12, 5.0, 1e-5


@dataclass(frozen=True)
class Check:
    """One rule. Call it to check; `name` says which it is."""

    name: str
    run: Callable[[], None]

    def __call__(self) -> None:
        self.run()

    def __str__(self) -> str:
        return self.name


def checks(optimizer: Optimizer) -> Iterator[Check]:
    """The rules that an optimizer must keep, as callables that raise `AssertionError` where it does not."""
    for function in (
        is_frozen_configuration,
        is_pure,
        leaves_the_planned_ledger,
        spends_at_most_the_target,
        replays_bit_for_bit,
        stops_when_the_budget_is_spent,
        resumes_bit_for_bit,
        adds_the_stated_gradient_noise,
        bounds_one_record,
        survives_bad_records_and_empty_draws,
        plans_the_same_for_any_dimension,
    ):
        yield Check(function.__name__, partial(function, optimizer))


class Task:
    """Logistic regression with a hidden layer on random data: 3 classes, 5 features, 60 records.

    Args:
        scale: the loss is multiplied by it; 0 makes all gradients zero.
    """

    def __init__(self, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(EXAMPLES, 5, generator=generator)
        self.y = torch.randint(0, 3, (EXAMPLES,), generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.engine = clipping.engine(model, lambda o, t: scale * F.cross_entropy(o, t, reduction="none"))

    def plan(self, optimizer: Optimizer, epsilon: float = EPSILON, rate: float = BATCH / EXAMPLES) -> Plan:
        """A plan of 12 draws, by RDP, which is quick."""
        return calibrate(
            optimizer,
            rate=rate,
            draws=DRAWS,
            dimension=self.engine.dimension,
            epsilon=epsilon,
            delta=DELTA,
            accountant="rdp",
        )

    def oracle(self, plan: Plan, transcript: Transcript | None = None, **changes: Any) -> DataOracle:
        """An oracle over the task's data."""
        options: dict[str, Any] = {"draw_seed": 1, "noise_seed": 2, "transcript": transcript, **changes}
        x, y = options.pop("x", self.x), options.pop("y", self.y)
        return DataOracle(self.engine, x, y, plan, **options)

    def run(self, optimizer: Optimizer, oracle: Any, state: Any = None, until: int = 0) -> Any:
        """Step from `state`, or from the start, until at most `until` draws are left."""
        state = optimizer.init(self.engine.theta) if state is None else state
        while oracle.draws_left > until:
            state = optimizer.step(state, oracle)
        return state


def is_frozen_configuration(optimizer: Optimizer) -> None:
    """A frozen, hashable dataclass that equals a copy of itself."""
    assert dataclasses.is_dataclass(optimizer), "not a dataclass"
    copy = dataclasses.replace(optimizer)  # type: ignore[type-var]
    assert copy == optimizer, "a copy is not equal"
    assert hash(copy) == hash(optimizer), "not frozen, so it has no stable hash"


def is_pure(optimizer: Optimizer) -> None:
    """`step` changes no state in place, keeps dtype and shape, leaves the global generator alone, starts from theta."""
    task = Task()
    theta = task.engine.theta
    state = optimizer.init(theta)
    assert torch.equal(state[0], theta), "the state's first field is not theta"
    before = [leaf.clone() for leaf in _tensors(state)]
    generator = torch.get_rng_state()
    after = optimizer.step(state, task.oracle(task.plan(optimizer)))
    assert torch.equal(torch.get_rng_state(), generator), "`step` uses the global random generator"
    for old, leaf, new in zip(before, _tensors(state), _tensors(after), strict=True):
        assert torch.equal(old, leaf), "`step` changes its state in place"
        assert (new.dtype, new.shape, new.device) == (old.dtype, old.shape, old.device), "`step` changes a dtype"


def leaves_the_planned_ledger(optimizer: Optimizer) -> None:
    """The ledger after a run is the one that calibration traced without data."""
    task = Task()
    plan = task.plan(optimizer)
    oracle = task.oracle(plan)
    task.run(optimizer, oracle)
    assert oracle.ledger == plan.ledger, f"{oracle.ledger} is not the planned {plan.ledger}"


def spends_at_most_the_target(optimizer: Optimizer) -> None:
    """Recomputed epsilon is at most the target, and within 1 % of it; a second accountant agrees that it is enough."""
    plan = Task().plan(optimizer)
    spent = accountants.epsilon(plan.ledger, DELTA, "rdp")
    assert 0.99 * EPSILON <= spent <= EPSILON, f"{spent} spent, {EPSILON} allowed"
    assert accountants.epsilon(plan.ledger, DELTA, "pld") <= EPSILON, "PLD says that more is spent"


def replays_bit_for_bit(optimizer: Optimizer) -> None:
    """Fed with the recorded releases and no data, it ends at the same parameters: it is post-processing."""
    task, transcript = Task(), []
    plan = task.plan(optimizer)
    oracle = task.oracle(plan, transcript)
    final = task.run(optimizer, oracle)
    replay = ReplayOracle(transcript, plan, expected_batch=oracle.expected_batch)
    assert torch.equal(task.run(optimizer, replay).theta, final.theta), "the result depends on more than the releases"


def stops_when_the_budget_is_spent(optimizer: Optimizer) -> None:
    """No step after the last draw."""
    task = Task()
    oracle = task.oracle(task.plan(optimizer))
    state = task.run(optimizer, oracle)
    try:
        optimizer.step(state, oracle)
    except BudgetSpent:
        return
    raise AssertionError("a step was possible after the last draw")


def resumes_bit_for_bit(optimizer: Optimizer) -> None:
    """Half the draws, saved and loaded, then the rest: the same parameters as without the stop."""
    task = Task()
    plan = task.plan(optimizer)
    whole = task.run(optimizer, task.oracle(plan))
    first = task.oracle(plan)
    half = task.run(optimizer, first, until=DRAWS // 2)
    leaves, structure = pytree.tree_flatten(half)
    file = io.BytesIO()
    torch.save(leaves, file)
    file.seek(0)
    loaded = pytree.tree_unflatten(torch.load(file, weights_only=True), structure)
    resumed = task.run(optimizer, task.oracle(plan, ledger=first.ledger), loaded)
    assert torch.equal(resumed.theta, whole.theta), "a run that was stopped ends elsewhere"


def adds_the_stated_gradient_noise(optimizer: Optimizer) -> None:
    """With all gradients zero, released gradients have the stated standard deviation (chi-square test, 1 in 10^6)."""
    task, transcript = Task(scale=0.0), []
    plan = task.plan(optimizer)
    oracle = _Neighbours(task.oracle(plan, transcript), None)
    task.run(optimizer, oracle)
    gradients = [release for draw in transcript for release in draw if len(release.value) == plan.dimension]
    assert gradients, "no gradient was released"
    for release, clip in zip(gradients, oracle.clips, strict=True):
        expected = plan.noise["gradient"] * clip.sensitivity / oracle.expected_batch
        assert math.isclose(float(release.std), expected, rel_tol=1e-6), "the stated std is not sigma C / B"
    total = sum(float((release.value.double() / release.std).square().sum()) for release in gradients)
    freedom = len(gradients) * plan.dimension
    assert 5e-7 < stats.chi2.cdf(total, freedom) < 1 - 5e-7, f"chi-square {total} with {freedom} degrees of freedom"


def bounds_one_record(optimizer: Optimizer) -> None:
    """One more record, with a huge gradient and loss, moves no query by more than its declared sensitivity."""
    task = Task()
    plan = task.plan(optimizer, epsilon=math.inf, rate=1.0)
    more_x, more_y = torch.cat([task.x, torch.full((1, 5), 1e4)]), torch.cat([task.y, task.y[:1]])
    oracle = _Neighbours(task.oracle(plan), task.oracle(plan, x=more_x, y=more_y))
    task.run(optimizer, oracle)
    assert oracle.largest > 0, "the record moved nothing, so nothing was checked"


def survives_bad_records_and_empty_draws(optimizer: Optimizer) -> None:
    """Records that hold NaN do not poison the run; empty draws release noise and are counted."""
    task = Task()
    x = task.x.clone()
    x[::7] = math.nan
    plan = task.plan(optimizer)
    assert task.run(optimizer, task.oracle(plan, x=x)).theta.isfinite().all(), "a NaN record poisoned the run"
    rare = task.plan(optimizer, rate=1e-9)
    oracle = task.oracle(rare)
    # The expected batch is tiny, so the noise is huge: theta may go anywhere, but the draws count and add noise.
    task.run(optimizer, oracle)
    assert oracle.ledger == rare.ledger, "empty draws were not counted"


def plans_the_same_for_any_dimension(optimizer: Optimizer) -> None:
    """What is released depends on public numbers only, not on the model's size."""
    small, large = (trace(optimizer, rate=0.1, draws=DRAWS, dimension=d) for d in (3, 1000))
    assert small == large, "the structure of the ledger depends on the dimension"


class _Neighbours:
    """An oracle whose queries are also put to a neighbouring data set, to see how far the one record moves them."""

    def __init__(self, oracle: DataOracle, neighbour: DataOracle | None) -> None:
        self._oracle, self._neighbour = oracle, neighbour
        self.clips: list[ClipRule] = []
        self.largest = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)

    @contextmanager
    def draw(self) -> Iterator[_NeighbourBatch]:
        with self._oracle.draw() as batch:
            if self._neighbour is None:
                yield _NeighbourBatch(self, batch, None)
                return
            with self._neighbour.draw() as other:
                yield _NeighbourBatch(self, batch, other)

    def compare(self, release: Release, other: Release, sensitivity: float, offset: float) -> None:
        # Sums, not means: the two oracles divide by different (public) batch sizes, and losses are centred.
        mine = (release.value.double() - offset) * self._oracle.expected_batch
        theirs = (other.value.double() - offset) * self._neighbour.expected_batch  # type: ignore[union-attr]
        moved = float((mine - theirs).norm())
        assert moved <= sensitivity * (1 + 1e-4) + 1e-4, f"one record moved a query by {moved}, declared {sensitivity}"
        self.largest = max(self.largest, moved)


class _NeighbourBatch:
    def __init__(self, parent: _Neighbours, batch: Any, other: Any) -> None:
        self._parent, self._batch, self._other = parent, batch, other

    def gradient(self, at: Points, clip: ClipRule) -> Release:
        self._parent.clips.append(clip)
        release = self._batch.gradient(at, clip)
        if self._other:
            self._parent.compare(release, self._other.gradient(at, clip), clip.sensitivity, 0.0)
        return release

    def losses(self, at: Sequence[Vector], bound: float | Tensor) -> Release:
        release = self._batch.losses(at, bound)
        if self._other:
            sensitivity = float(bound) / 2 * math.sqrt(len(at))
            self._parent.compare(release, self._other.losses(at, bound), sensitivity, float(bound) / 2)
        return release


def _tensors(state: Any) -> list[Tensor]:
    leaves, _ = pytree.tree_flatten(state)
    assert all(isinstance(leaf, Tensor) for leaf in leaves), "the state holds something that is not a tensor"
    return leaves
