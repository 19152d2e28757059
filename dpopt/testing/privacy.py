"""Rules without which a stated epsilon does not hold. None of them can be excepted."""

from __future__ import annotations

import dataclasses
import math
import unittest
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import scipy  # its modules are imported when they are first used: `stats` takes a second
import torch

from dpopt.errors import ConfigError
from dpopt.privacy import accountants
from dpopt.privacy.calibration import cost, trace
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.oracle import Asking, BaseOracle, BudgetSpent, OpenDraw
from dpopt.privacy.queries import GRADIENT, Asked, read
from dpopt.privacy.wire import IsolatedFailure, NotImportable
from dpopt.testing.imports import MAY_USE, MAY_USE_OF_DPOPT, forbidden_imports
from dpopt.testing.task import DELTA, DRAWS, EPSILON, Task, require_same
from dpopt.types import Batch, Optimizer, Oracle, Query, Release, laid_out


def can_be_traced(optimizer: Optimizer) -> None:
    """Calibration runs it without data: `init` and `step` give states, and what is released depends on no value."""
    try:
        cost(optimizer, DRAWS)
    except ConfigError as error:
        raise AssertionError(str(error)) from error


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
    # RDP, which solved the noise, is never below the truth; PLD nearly is the truth.
    second = accountants.epsilon(plan.ledger, DELTA, "pld")
    assert second <= EPSILON, f"PLD says that {second} is spent, {EPSILON} allowed"


def replays_bit_for_bit(optimizer: Optimizer, device: str = "cpu") -> None:
    """Fed with the recorded releases and no data, it ends in the same state: it is post-processing."""
    recording = Task(device=device).record(optimizer)
    require_same(recording.replay(optimizer), recording.final, "the result depends on more than the releases")


def sees_only_the_protocol(optimizer: Optimizer) -> None:
    """It reads what `Oracle` and `Batch` declare and nothing else, and does the same where there is nothing else."""
    task = Task()
    recording = task.record(optimizer)
    # An optimizer that reads more could behave well here and otherwise beside data.
    final = task.run(optimizer, _strict(task.oracle(recording.plan)))
    require_same(final, recording.final, "the result depends on which oracle it is")


def ends_the_same_when_isolated(optimizer: Optimizer) -> None:
    """In a process of its own, which has no data to look at, it ends in the same state.

    Queries and clip rules of its own are evaluated in this process, which imports them by their names; where it cannot,
    the check is skipped.
    """
    task = Task()
    try:
        isolated: Any = Isolated(optimizer, imports=True)  # before a run here, which may leave things in the object
        recording = task.record(optimizer)
        final = task.run(isolated, task.oracle(recording.plan))
    except NotImportable as error:
        raise unittest.SkipTest(str(error)) from error
    except (IsolatedFailure, ConfigError) as error:
        raise AssertionError(f"it cannot run in a process of its own: {error}") from error
    require_same(final, recording.final, "the result depends on the process")


def imports_no_data(optimizer: Optimizer) -> None:
    """The modules of its classes, and of optimizers inside it, import only what cannot lead to data."""
    forbidden = sorted({name for module in _modules(optimizer) for name in forbidden_imports(module)})
    of_dpopt = ", ".join(f"dpopt.{name}" for name in MAY_USE_OF_DPOPT)
    allowed = f"it may import {', '.join(sorted(MAY_USE))} and {of_dpopt}"
    assert not forbidden, f"an optimizer may not use {', '.join(forbidden)}; {allowed}"


def stops_when_the_budget_is_spent(optimizer: Optimizer) -> None:
    """No step after the last draw."""
    task = Task()
    oracle = task.oracle(task.plan(optimizer))
    state = task.run(optimizer, oracle)
    try:
        # The refusal is the oracle's: an optimizer that swallows it would go on without data.
        optimizer.step(state, oracle)
    except BudgetSpent:
        return
    raise AssertionError("a step was possible after the last draw")


def adds_the_stated_gradient_noise(optimizer: Optimizer, device: str = "cpu") -> None:
    """Every release states its noise; with all losses zero, gradients have noise of that size (chi-square, 1 in 10^6).

    Where there are no gradients, those releases are tested that add no public centre to their noise.
    """
    task = Task(scale=0.0, device=device)
    plan = task.plan(optimizer)
    oracle = Neighbours(task.oracle(plan))
    task.run(optimizer, oracle)
    # With a loss that is zero everywhere, a release of gradients is its noise and nothing else.
    for asked, release in oracle.queries:
        stated = float(release.std)
        expected = plan.noise[asked.kind] * float(asked.sensitivity) / oracle.expected_batch
        assert math.isclose(stated, expected, rel_tol=1e-6), f"{asked.kind}: the stated std is {stated}, not {expected}"
    queries = [(asked, release) for asked, release in oracle.queries if asked.kind == GRADIENT]
    # With a shift records contribute even so, and not those of the noise alone.
    gradients = [
        release for asked, release in queries if asked.centre is None or not torch.as_tensor(asked.centre).any()
    ]
    noises = gradients or [release for asked, release in oracle.queries if asked.centre is None]
    assert noises, "nothing was released that could be tested"
    total = sum(float((noise.value.double() / noise.std).square().sum()) for noise in noises)
    freedom = sum(len(noise.value) for noise in noises)
    share = scipy.stats.chi2.cdf(total, freedom)
    assert 5e-7 < share < 1 - 5e-7, f"chi-square {total} with {freedom} degrees of freedom"


def bounds_one_record(optimizer: Optimizer) -> None:
    """One more record, unlike all others, moves no query by more than its declared sensitivity, wherever it lies."""
    task = Task(scale=1e4)
    # Without noise, and with every record in every draw, only the one record tells the two runs apart.
    plan = task.plan(optimizer, epsilon=math.inf, rate=1.0)
    # First and last: an engine that cuts a batch into parts could treat a border differently.
    for order in (1, -1):
        more_x, more_y = (torch.cat(parts[::order]) for parts in ((task.x, -30 * task.x[:1]), (task.y, task.y[:1])))
        oracle = Neighbours(task.oracle(plan), task.oracle(plan, x=more_x, y=more_y))
        task.run(optimizer, oracle)
        assert set(oracle.largest) == set(plan.noise), "not every kind of release was compared"
        least = min(oracle.largest.values())
        # A record that moves nothing would pass whatever the bound is.
        assert least > 0.5, f"the record moved too little to tell: {oracle.largest} of what it may"


def survives_bad_records_and_empty_draws(optimizer: Optimizer) -> None:
    """Records that hold NaN do not poison the run; empty draws release noise and are counted."""
    task = Task()
    x = task.x.clone()
    x[::7] = math.nan
    plan = task.plan(optimizer)
    assert task.run(optimizer, task.oracle(plan, x=x)).theta.isfinite().all(), "a NaN record poisoned the run"
    # Of one record, two thirds of the draws are empty.
    oracle = task.oracle(plan, x=task.x[:1], y=task.y[:1])
    assert task.run(optimizer, oracle).theta.isfinite().all(), "an empty draw poisoned the run"
    assert oracle.ledger == plan.ledger, "empty draws were not counted"


def plans_the_same_for_any_dimension(optimizer: Optimizer) -> None:
    """The structure of the ledger depends on public numbers only, not on the model's size."""
    # A ledger that follows the model could not be calibrated before the model is there.
    one = [("scale", (3,), "")]
    several = [
        ("0.weight", (8, 3, 3, 3), "Conv2d"),
        ("1.weight", (50, 8), "Embedding"),
        ("2.weight", (4, 96), "Linear"),
    ]
    small, large = (trace(optimizer, rate=0.1, draws=DRAWS, layout=laid_out(each)) for each in (one, several))
    assert small == large, "the structure of the ledger depends on the dimension or the layout"


def _modules(optimizer: Optimizer) -> set[str]:
    inner = [getattr(optimizer, field.name) for field in dataclasses.fields(optimizer)]  # type: ignore[arg-type]
    modules = {kind.__module__ for kind in type(optimizer).__mro__} - {"builtins", "abc", "dpopt.optimizers.base"}
    modules = {module for module in modules if module.partition(".")[0] not in MAY_USE}
    return modules.union(*(_modules(value) for value in inner if isinstance(value, Optimizer)))


def _strict(oracle: Any) -> Any:
    """`oracle` with the attributes that `Oracle` and `Batch` declare; any other raises `AssertionError`."""

    @contextmanager
    def draw() -> Iterator[Any]:
        with oracle.draw() as batch:
            yield _view("batch", batch, Batch)

    return _view("oracle", oracle, Oracle, draw=draw)


def _view(what: str, instance: Any, protocol: type, **changed: Any) -> Any:
    shown = {name for name in vars(protocol) if not name.startswith("_")}

    class View:
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            assert name in shown, f"`{what}.{name}` is not in the protocol"
            return changed[name] if name in changed else getattr(instance, name)

        def __setattr__(self, name: str, value: object) -> None:
            raise AssertionError(f"`{what}.{name}` is set from outside")

    return View()


class Neighbours(Asking):
    """An oracle, and its open batch, whose queries are noted, and also put to a neighbouring data set, if there is one.

    Attributes:
        queries: all queries so far as they were read, with their releases.
        largest: for each kind of release, how far the one record has moved a sum, as a share of what it may.
    """

    def __init__(self, *oracles: BaseOracle) -> None:
        self._oracles, self._batches = oracles, list[OpenDraw]()
        self.queries: list[tuple[Asked, Release]] = []
        self.largest: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracles[0], name)

    @contextmanager
    def draw(self) -> Iterator[Asking]:
        with ExitStack() as stack:
            self._batches = [stack.enter_context(oracle.draw()) for oracle in self._oracles]
            yield self

    def ask(self, query: Query) -> Release:
        asked, releases = read(query, self.space), [batch.ask(query) for batch in self._batches]
        self.queries.append((asked, releases[0]))
        if len(releases) == 2:
            # Sums, not means: the two oracles divide by different (public) batch sizes, and some sums are centred.
            mine, theirs = (
                (release.value.double() - (0.0 if asked.centre is None else asked.centre)) * oracle.expected_batch
                for release, oracle in zip(releases, self._oracles, strict=True)
            )
            moved, allowed = float((mine - theirs).norm()), float(asked.sensitivity) * math.sqrt(asked.releases)
            complaint = f"one record moved a query ({asked.kind}) by {moved}, not {allowed}"
            assert moved <= allowed * (1 + 1e-4) + 1e-4, complaint
            self.largest[asked.kind] = max(self.largest.get(asked.kind, 0.0), moved / allowed)
        return releases[0]
