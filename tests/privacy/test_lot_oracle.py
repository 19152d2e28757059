"""The oracle of several runs against each run's own."""

import dataclasses
import math

import pytest
import torch
from torch.func import vmap

from dpopt import registry
from dpopt.clipping import Abadi, engine
from dpopt.clipping.lot import LotEngine
from dpopt.errors import ConfigError
from dpopt.privacy.lot import LotOracle
from dpopt.privacy.oracle import BudgetSpent, UnplannedRelease
from dpopt.privacy.protocol import Query, Release
from dpopt.testing.device import ignore, imitated_cuda, values
from dpopt.testing.task import DRAWS, Task

RUNS = 3


@pytest.fixture
def task():
    return Task()


def make(task, name, changes=(), transform=None, **planned):
    """The oracle of a lot, with that of each run, twice."""
    plan = task.plan(registry.create(name), **planned)
    plans = [dataclasses.replace(plan, **dict(changes).get(run, {})) for run in range(RUNS)]
    answering, alone = (
        [task.oracle(each, draw_seed=run, noise_seed=run + 9, transform=transform) for run, each in enumerate(plans)]
        for _ in range(2)
    )
    return LotOracle(LotEngine(task.model, task.loss), answering), answering, alone


def points(task):
    return torch.stack([task.engine.theta * (1 + 0.1 * run) for run in range(RUNS)])


def ask(thetas, query):
    """What each run gets: values and noise, [R, ...]."""

    def both(theta):
        release = query(theta)
        return release.value, release.std

    return vmap(both)(thetas)


def assert_same(lot, releases):
    for value, std, release in zip(*lot, releases, strict=True):
        assert value.dtype == release.value.dtype
        torch.testing.assert_close(value, release.value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(std, torch.as_tensor(release.std, dtype=torch.float64), rtol=1e-12, atol=0)


def test_every_kind_of_release_is_that_of_each_run(task):
    thetas, scale = points(task), torch.rand(task.engine.dimension) * 2
    for name, kind in (("hyfreedp", "losses"), ("adaptive_clip", "below")):
        oracle, answering, alone = make(task, name)
        weighted = [(1.7, thetas), (-0.7, thetas * 1.01)]
        with oracle.draw() as batch:
            gradient = ask(
                torch.stack([point for _, point in weighted], 1),
                lambda both, batch=batch: batch.gradient([(1.7, both[0]), (-0.7, both[1])], Abadi(0.3), scale),
            )
            if kind == "losses":
                second = ask(thetas, lambda theta, batch=batch: batch.losses([theta, theta * 1.1, theta], 2.0))
            else:
                second = ask(thetas, lambda theta, batch=batch: batch.below(0.4))
        expected = []
        for run, own in enumerate(alone):
            with own.draw() as batch:
                first = batch.gradient([(weight, each[run]) for weight, each in weighted], Abadi(0.3), scale)
                theta = thetas[run]
                other = batch.losses([theta, theta * 1.1, theta], 2.0) if kind == "losses" else batch.below(0.4)
                expected.append((first, other))
        assert_same(gradient, [first for first, _ in expected])
        assert_same(second, [other for _, other in expected])
        assert [each.ledger for each in answering] == [each.ledger for each in alone]


@pytest.mark.parametrize(("name", "query"), [("hyfreedp", "losses"), ("adaptive_clip", "below")])
def test_a_lot_on_a_gpu_releases_what_each_run_does(task, name, query):
    """It waits for a few numbers; but nothing is left on the CPU."""
    with imitated_cuda(ignore):
        task.model, task.x, task.y = task.model.to("cuda"), task.x.to("cuda"), task.y.to("cuda")
        task.engine = engine(task.model, task.loss, sample=(task.x, task.y))
        oracle, _, alone = make(task, name)
        thetas = points(task)
        with oracle.draw() as batch:
            first = ask(thetas, lambda theta: batch.gradient(theta, Abadi(0.3)))
            second = ask(thetas, lambda theta: second_query(batch, query, theta))
        expected = []
        for own, theta in zip(alone, thetas, strict=True):
            with own.draw() as batch:
                expected.append((batch.gradient(theta, Abadi(0.3)), second_query(batch, query, theta)))
        first, second, expected = values((first, second, [[(r.value, r.std) for r in each] for each in expected]))
    for position, lot in enumerate((first, second)):
        assert_same(lot, [Release(*each[position]) for each in expected])


def second_query(batch, query, theta):
    return batch.losses([theta, theta * 1.1, theta], 2.0) if query == "losses" else batch.below(0.4)


def test_losses_of_a_point_that_was_changed_are_computed_again(task):
    oracle, _, alone = make(task, "hyfreedp")
    thetas = points(task)
    with oracle.draw() as batch:
        ask(thetas, lambda theta: batch.gradient(theta, Abadi(1.0)))
        thetas.mul_(1.5)
        changed = ask(thetas, lambda theta: batch.losses([theta] * 3, 2.0))
    releases = []
    for own, theta in zip(alone, thetas, strict=True):
        with own.draw() as batch:
            batch.gradient(theta, Abadi(1.0))
            releases.append(batch.losses([theta] * 3, 2.0))
    assert_same(changed, releases)


def test_an_empty_draw_releases_noise(task):
    plan = task.plan(registry.create("dp_sgd"), rate=1e-9)
    answering, alone = ([task.oracle(plan, noise_seed=run) for run in range(RUNS)] for _ in range(2))
    oracle = LotOracle(LotEngine(task.model, task.loss), answering)
    with oracle.draw() as batch:
        value, _ = ask(points(task), lambda theta: batch.gradient(theta, Abadi(1.0)))
    for run, own in enumerate(alone):
        with own.draw() as batch:
            assert torch.equal(value[run], batch.gradient(task.engine.theta, Abadi(1.0)).value)


def test_what_no_plan_holds_is_refused_for_all(task):
    oracle, answering, _ = make(task, "dp_sgd")
    thetas = points(task)
    with oracle.draw() as batch:
        with pytest.raises(UnplannedRelease, match="kind 'losses'"):
            ask(thetas, lambda theta: batch.losses([theta], 1.0))
        with pytest.raises(UnplannedRelease, match="last gradient"):
            ask(thetas, lambda theta: batch.below(1.0))
        ask(thetas, lambda theta: batch.gradient(theta, Abadi(1.0)))
        with pytest.raises(UnplannedRelease, match="the plan holds releases"):
            ask(thetas, lambda theta: batch.gradient(theta, Abadi(1.0)))
    with pytest.raises(UnplannedRelease, match="closed"):
        ask(thetas, lambda theta: batch.gradient(theta, Abadi(1.0)))
    for _ in range(DRAWS - 1):
        with oracle.draw() as batch:
            ask(thetas, lambda theta, batch=batch: batch.gradient(theta, Abadi(1.0)))
    with pytest.raises(BudgetSpent), oracle.draw():
        pass
    assert all(len(own.ledger) == DRAWS for own in answering)


def test_a_bound_of_losses_is_checked(task):
    oracle, _, _ = make(task, "hyfreedp")
    with oracle.draw() as batch, pytest.raises(ConfigError, match="finite bound"):
        ask(points(task), lambda theta: batch.losses([theta] * 3, 0.0))


def test_runs_that_optimizers_could_tell_apart_are_refused(task):
    with pytest.raises(ConfigError, match="rate"):
        make(task, "dp_sgd", {1: {"rate": 0.5}}.items())
    with pytest.raises(ConfigError, match="draws_total"):
        make(task, "dp_sgd", {2: {"draws": 3}}.items())


class Noting:
    """An engine of lots that notes what is evaluated: points of gradients, points of losses, and shapes of inputs."""

    def __init__(self, inner):
        self._inner = inner
        self.gradients, self.losses_only, self.shapes = 0, 0, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def examined(self, points, x, *rest):
        self.gradients += len(points)
        self.shapes.append(tuple(x.shape[:2]))
        return self._inner.examined(points, x, *rest)

    def lot_losses(self, points, *rest):
        self.losses_only += len(points)
        return self._inner.lot_losses(points, *rest)


def test_losses_at_the_gradients_own_points_are_not_computed_again(task):
    oracle, _, _ = make(task, "hyfreedp")
    noting = oracle._engine = Noting(oracle._engine)
    with oracle.draw() as batch:

        def both(theta):
            gradient = batch.gradient([(1.7, theta), (-0.7, theta)], Abadi(1.0))
            losses = batch.losses([theta, theta + 1.0, theta], 2.0)
            return gradient.value.sum() + losses.value.sum()

        vmap(both)(points(task))
    assert (noting.gradients, noting.losses_only) == (2, 1)


def test_a_draw_is_padded_to_the_longest_run_and_no_further(task):
    oracle, answering, _ = make(task, "dp_sgd")
    noting = oracle._engine = Noting(oracle._engine)
    for _ in range(DRAWS):
        with oracle.draw() as batch:
            ask(points(task), lambda theta, batch=batch: batch.gradient(theta, Abadi(1.0)))
            longest = max(len(own._rows) for own in answering)
        runs, length = noting.shapes[-1]
        assert runs == RUNS
        assert longest <= length < longest + 8


def alone_and_together(task, query, transform=None, **changes):
    """What a query after a gradient at the same points gives all runs at once, and each run by itself."""
    oracle, _, alone = make(task, "hyfreedp", transform=transform, **changes)
    thetas, values = points(task), []
    with oracle.draw() as batch:
        ask(thetas, lambda theta: batch.gradient(theta, Abadi(1.0)))
        lot, _ = ask(thetas, lambda theta: query(batch, theta))
    for own, theta in zip(alone, thetas, strict=True):
        with own.draw() as batch:
            batch.gradient(theta, Abadi(1.0))
            values.append(query(batch, theta).value)
    return lot, torch.stack(values)


def test_a_bound_far_above_the_losses_costs_no_digits(task):
    """Centred at half of it, a loss in float32 would be rounded to a multiple of 32."""
    lot, alone = alone_and_together(task, lambda batch, theta: batch.losses([theta * 1.1] * 3, 1e9), epsilon=math.inf)
    torch.testing.assert_close(lot, alone, rtol=0, atol=1e-5)


def test_inputs_are_transformed_as_for_each_run(task):
    plain, _ = alone_and_together(task, lambda batch, theta: batch.losses([theta * 1.1] * 3, 2.0))
    lot, alone = alone_and_together(
        task, lambda batch, theta: batch.losses([theta * 1.1] * 3, 2.0), transform=lambda x: x[:, :5] * 3 + 1
    )
    torch.testing.assert_close(lot, alone, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(lot, plain)


@dataclasses.dataclass(frozen=True)
class Probes(Query):
    """The number of points that a record is told its losses at, under the name of a kind that the plan holds."""

    kind = "losses"
    releases = 3
    sensitivity = 1.0

    def contribution(self, record):
        return torch.full((3,), float(len(record.losses)), dtype=torch.float64)


def test_a_query_that_probes_nothing_is_told_no_losses(task):
    lot, alone = alone_and_together(task, lambda batch, theta: batch.ask(Probes()), epsilon=math.inf)
    assert lot.tolist() == alone.tolist() == [[0.0] * 3] * RUNS
