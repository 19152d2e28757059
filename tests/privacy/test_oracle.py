import math

import pytest
import torch
from noise import gaussian
from torch import nn

import dpopt
import dpopt.testing
from dpopt.clipping import Abadi, engine
from dpopt.errors import ConfigError
from dpopt.privacy import (
    BudgetSpent,
    DataOracle,
    Draw,
    Ledger,
    Plan,
    ReplayOracle,
    TraceOracle,
    Unit,
    UnplannedRelease,
    sampling,
)
from dpopt.privacy.opaque import ValueRead
from dpopt.types import Release

N, D = 40, 4


def regression():
    torch.manual_seed(0)
    model = nn.Linear(D, 1, bias=False)
    return engine(model, lambda output, target: (output.squeeze(-1) - target).square() / 2)


def data(n=N):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, D, generator=generator), torch.randn(n, generator=generator)


def plan(*draws, noise=None):
    noise = {"gradient": 1.0, "losses": 2.0} if noise is None else noise
    return Plan(noise, Ledger(draws), 1.0, draws[0].rate, len(draws), D, 1e-5, "pld")


def oracle(the_plan, x=None, y=None, **changes):
    default_x, default_y = data()
    x, y = default_x if x is None else x, default_y if y is None else y
    return DataOracle(regression(), x, y, the_plan, **{"draw_seed": 1, "noise_seed": 2, **changes})


def quiet(rate, draws=1, losses=0):
    return plan(*[Draw(rate, (0.0,) * (1 + losses))] * draws, noise={"gradient": 0.0, "losses": 0.0})


def test_counters_and_ledger():
    planned = plan(Draw(0.5, (1.0, 2.0, 2.0)), Draw(0.5, (1.0,)))
    asked = oracle(planned)
    theta = torch.zeros(D)
    assert (asked.dimension, asked.rate, asked.expected_batch) == (D, 0.5, N / 2)
    assert (asked.draws_total, asked.draws_left) == (2, 2)
    with asked.draw() as batch:
        batch.gradient(theta, Abadi(1.0))
        batch.losses([theta, theta], 1.0)
    with asked.draw() as batch:
        batch.gradient(theta, Abadi(1.0))
    assert asked.ledger == planned.ledger
    with pytest.raises(BudgetSpent), asked.draw():
        pass


def test_what_is_not_planned_is_refused():
    theta, single = torch.zeros(D), plan(Draw(0.5, (1.0,)), Draw(0.5, (1.0,)))
    with oracle(single).draw() as batch:
        batch.gradient(theta, Abadi(1.0))
        with pytest.raises(UnplannedRelease, match="the plan holds releases"):
            batch.losses([theta], 1.0)
        with pytest.raises(UnplannedRelease):
            batch.gradient(theta, Abadi(1.0))
    with pytest.raises(UnplannedRelease, match="closed"):
        batch.gradient(theta, Abadi(1.0))
    only_gradients = plan(Draw(0.5, (1.0,)), noise={"gradient": 1.0})
    with oracle(only_gradients).draw() as batch, pytest.raises(UnplannedRelease, match="kind 'losses'"):
        batch.losses([theta], 1.0)
    only_counts = plan(Draw(0.5, (2.0,)), noise={"counts": 2.0})
    with oracle(only_counts).draw() as batch, pytest.raises(UnplannedRelease, match="last gradient"):
        batch.below(1.0)


def test_draws_do_not_nest():
    """Mistake 1 by the back door: releases of an outer draw would see the inner one's records."""
    asked = oracle(plan(Draw(0.5, (1.0,)), Draw(0.5, (1.0,))))
    with asked.draw(), pytest.raises(UnplannedRelease, match="a draw is open"), asked.draw():
        pass
    assert asked.draws_left == 1
    with asked.draw() as batch:
        batch.gradient(torch.zeros(D), Abadi(1.0))


def test_gradient_divides_by_the_expected_batch():
    """Mistake 2: dividing by the realised batch size makes the noise depend on the data."""
    x, y = data()
    asked = oracle(quiet(0.25), x, y)
    with asked.draw() as batch:
        mean = batch.gradient(torch.zeros(D), Abadi(math.inf)).value
    rows = torch.from_numpy(sampling.poisson_rows(1, 0, N, 0.25))
    assert len(rows) != N / 4
    total = (-y[rows, None] * x[rows]).sum(0)
    torch.testing.assert_close(mean, total / (N / 4))


def release_in_batches(size):
    """A gradient and two losses of a noisy draw of about 256 records, cut into physical batches of `size`."""
    x, y = data(1024)
    asked = oracle(plan(Draw(0.25, (1.0, 2.0, 2.0))), x, y, physical_batch=size)
    theta = torch.ones(D)
    with asked.draw() as batch:
        gradient = batch.gradient(theta, Abadi(1.0)).value
        losses = batch.losses([theta, 2 * theta], 3.0).value
    return gradient, losses, asked.ledger


def test_releases_do_not_depend_on_the_physical_batch():
    """Mistakes 12 and 13: partial batches count, and accumulation adds no noise."""
    whole = release_in_batches(None)
    for size in (1, 7, 64, 256):
        gradient, losses, ledger = release_in_batches(size)
        torch.testing.assert_close(gradient, whole[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(losses, whole[1], rtol=1e-5, atol=1e-7)
        assert ledger == whole[2]


def test_nothing_but_numbers_is_released():
    """A tensor counts its changes in place, of which there is one for each physical batch."""
    few, many = ([part._version for part in release_in_batches(size)[:2]] for size in (1, 256))
    assert few == many


class Counting:
    """An engine that counts the points of its forward passes."""

    def __init__(self, inner):
        self._inner = inner
        self.gradients, self.losses_only = 0, 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def clipped(self, points, *rest):
        self.gradients += len(points)
        return self._inner.clipped(points, *rest)

    def losses(self, points, *rest):
        self.losses_only += len(points)
        return self._inner.losses(points, *rest)


def probe(spoil=lambda theta: theta, at=((1.0, 1.0),), **changes):
    """Losses at the points of a gradient and at one more point, and the engine that counted."""
    counting = Counting(regression())
    x, y = data()
    points = [(weight, torch.full((D,), value)) for weight, value in at]
    asked = DataOracle(
        counting, x, y, plan(Draw(0.5, (1.0, *(2.0,) * (len(at) + 1)))), draw_seed=1, noise_seed=2, **changes
    )
    with asked.draw() as batch:
        batch.gradient(points, Abadi(1.0))
        probed = [spoil(theta) for _, theta in points]
        losses = batch.losses([torch.zeros(D), *probed], 3.0).value
    return losses, counting


@pytest.mark.parametrize("at", [((1.0, 1.0),), ((1.7, 1.0), (-0.7, 2.0))], ids=["one", "two"])
@pytest.mark.parametrize("size", [None, 7])
def test_losses_at_the_gradients_own_points_are_not_computed_again(at, size):
    again, recomputing = probe(torch.clone, at, physical_batch=size)
    known, reusing = probe(at=at, physical_batch=size)
    torch.testing.assert_close(known, again)
    batches = reusing.gradients // len(at)
    assert reusing.losses_only == batches
    assert recomputing.losses_only == batches * (1 + len(at))


def test_a_point_changed_in_place_is_evaluated_again_and_so_is_one_of_another_draw():
    losses, counting = probe(lambda theta: theta.add_(1.0))
    assert counting.losses_only == 2
    torch.testing.assert_close(losses, probe(lambda theta: theta + 1.0)[0])
    counting, theta, seen = Counting(regression()), torch.ones(D), []
    (x, y), the_plan = data(), plan(*[Draw(0.5, (1.0, 2.0))] * 2)
    asked = DataOracle(counting, x, y, the_plan, draw_seed=1, noise_seed=2, watch=seen.append)
    for number, (at, computed) in enumerate(((theta, 0), (0 * theta, 1))):
        with asked.draw() as batch:
            batch.gradient(at, Abadi(1.0))
            batch.losses([theta], 3.0)
        assert counting.losses_only == computed
        assert seen[number].draw == number  # what is watched is of its draw
        truth = ((x @ at - y)[:, None] * x).norm(dim=1)[sampling.poisson_rows(1, number, N, 0.5)]
        torch.testing.assert_close(seen[number].norms[seen[number].mask], truth)


def test_each_draw_of_one_physical_batch_is_gathered_once():
    calls = []

    def transform(x):
        calls.append(len(x))
        return x

    rows = len(sampling.poisson_rows(1, 0, N, 0.5))
    for size, expected in ((None, 1), (7, 1 + 3 * math.ceil(rows / 7))):  # and once before it is charged
        calls.clear()
        asked = oracle(plan(Draw(0.5, (1.0, 2.0, 2.0))), physical_batch=size, transform=transform)
        with asked.draw() as batch:
            batch.gradient(torch.zeros(D), Abadi(1.0))
            batch.losses([torch.ones(D)], 1.0)
            batch.losses([torch.ones(D)], 1.0)
        assert len(calls) == expected


def test_bad_records_contribute_zero():
    x, y = data()
    spoiled, targets = torch.cat([x, torch.full((2, D), math.nan)]), torch.cat([y, torch.tensor([0.0, math.inf])])
    released = []
    for inputs, labels in ((x, y), (spoiled, targets)):
        asked = oracle(quiet(1.0, losses=1), inputs, labels)
        with asked.draw() as batch:
            gradient = batch.gradient(torch.zeros(D), Abadi(1.0)).value
            loss = batch.losses([torch.zeros(D)], 2.0).value - 1.0
        released.append((gradient * len(inputs), loss * len(inputs)))
    torch.testing.assert_close(released[0], released[1])


def test_all_points_share_dropout():
    """Mistake 19: with a mask of its own, each probe measures the masks and not the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 32), nn.Dropout(0.5), nn.Linear(32, 1, bias=False))
    noisy = engine(model, lambda output, target: (output.squeeze(-1) - target).square())
    still = {"gradient": 0.0, "losses": 0.0}
    the_plan = Plan(still, Ledger([Draw(1.0, (0.0, 0.0, 0.0))]), 1.0, 1.0, 1, noisy.dimension, 1e-5, "pld")
    x, y = data()
    asked = DataOracle(noisy, x, y, the_plan, draw_seed=1, noise_seed=2, physical_batch=7)
    before = torch.get_rng_state()
    with asked.draw() as batch:
        same = batch.gradient([(0.5, noisy.theta), (0.5, noisy.theta)], Abadi(math.inf))
        losses = batch.losses([noisy.theta, noisy.theta], 100.0).value
    assert losses[0] == losses[1]
    assert torch.equal(torch.get_rng_state(), before)
    single = Plan({"gradient": 0.0}, Ledger([Draw(1.0, (0.0,))]), 1.0, 1.0, 1, noisy.dimension, 1e-5, "pld")
    for is_random in (True, False):
        model.train(is_random)
        with DataOracle(noisy, x, y, single, draw_seed=1, noise_seed=2, physical_batch=7).draw() as batch:
            alone = batch.gradient(noisy.theta, Abadi(math.inf)).value
        assert torch.allclose(alone, same.value, rtol=1e-4, atol=1e-6) == is_random


def test_trace_oracle_holds_no_values():
    traced = TraceOracle(D, 0.1, 3)
    state = dpopt.create("hyfreedp", probe_every=2).init(traced.theta)
    while traced.draws_left:
        state = dpopt.create("hyfreedp", probe_every=2).step(state, traced)
    assert traced.kinds == [
        ("gradient", "losses", "losses", "losses"),
        ("gradient",),
        ("gradient", "losses", "losses", "losses"),
    ]
    assert state.theta.device.type == "meta"


def test_a_continued_oracle_leaves_its_ledger_alone():
    planned, taken = plan(*[Draw(0.5, (1.0,))] * 2), Ledger([Draw(0.5, (1.0,))])
    asked = oracle(planned, ledger=taken)
    with asked.draw() as batch:
        batch.gradient(torch.zeros(D), Abadi(1.0))
    assert (len(taken), asked.draws_left, asked.ledger) == (1, 0, planned.ledger)
    for other in (Ledger(taken, Unit("person")), Ledger([Draw(0.5, (2.0,))])):
        with pytest.raises(ConfigError, match=r"^ledger: .* how the plan begins: .* 1 distinct, unit record\)"):
            oracle(planned, ledger=other)


def test_bad_bounds_and_mismatched_plans():
    asked = oracle(plan(Draw(0.5, (1.0, 2.0))))
    with asked.draw() as batch:
        for bound in (0.0, -1.0, math.inf):
            with pytest.raises(ConfigError, match="bound"):
                batch.losses([torch.zeros(D)], bound)
    wrong = Plan({"gradient": 1.0}, Ledger([Draw(0.5, (1.0,))]), 1.0, 0.5, 1, D + 1, 1e-5, "pld")
    with pytest.raises(ConfigError, match="dimension"):
        oracle(wrong)


@pytest.mark.parametrize(("size", "points"), [(None, [(1.0, 0.0)]), (7, [(2.5, 1.0), (-1.5, 0.0)])], ids=["one", "two"])
def test_below_counts_the_gradients_of_the_last_query(points, size):
    x, y = data()
    at = [(weight, torch.full((D,), value)) for weight, value in points]
    gradients = sum(w * (x @ theta - y)[:, None] * x for w, theta in at)
    scale = torch.tensor([0.1, 1.0, 2.0, 0.0])
    the_plan = plan(Draw(1.0, (0.0,) * 4), noise={"gradient": 0.0, "counts": 0.0})
    asked = oracle(the_plan, x, y, physical_batch=size)
    with asked.draw() as batch:
        batch.gradient(at, Abadi(0.5))
        plain = batch.below(torch.tensor(1.0))
        batch.gradient(at, Abadi(0.5), scale)
        scaled = batch.below(1.0)
    assert plain.value.tolist() == pytest.approx([float((gradients.norm(dim=1) <= 1).double().mean())])
    assert scaled.value.tolist() == pytest.approx([float(((scale * gradients).norm(dim=1) <= 1).double().mean())])
    assert 0 < plain.value < 1
    assert plain.value != scaled.value
    assert plain.value.dtype == torch.float64


def test_float64_models_keep_their_precision():
    x, y = (part.double() for part in data())
    model = nn.Linear(D, 1, bias=False).double()
    double = engine(model, lambda output, target: (output.squeeze(-1) - target).square() / 2)
    for rate in (0.5, 1e-9):
        with DataOracle(double, x, y, plan(Draw(rate, (1.0,))), draw_seed=1, noise_seed=2).draw() as batch:
            assert batch.gradient(double.theta, Abadi(1.0)).value.dtype == torch.float64


def test_scaled_gradients_are_clipped_after_scaling():
    x, y = data()
    scale, theta = torch.tensor([0.1, 1.0, 20.0, 0.0]), torch.ones(D)
    asked = oracle(quiet(1.0), x, y)
    with asked.draw() as batch:
        released = batch.gradient(theta, Abadi(0.5), scale)
    gradients = scale * (x @ theta - y)[:, None] * x
    clipped = gradients * (0.5 / gradients.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(released.value, clipped.mean(0))


def test_each_release_has_the_noise_of_its_place():
    """Release j of draw t has the noise (seed, t, j), so that a run that goes on repeats none and changes none."""
    draw, still, theta = Draw(0.5, (1.0, 2.0, 2.0, 1.0, 3.0)), Draw(0.5, (0.0,) * 5), torch.ones(D)
    kinds = {"gradient": 1.0, "losses": 2.0, "counts": 3.0}
    noisy = oracle(plan(draw, draw, noise=kinds), noise_seed=9)
    silent = oracle(plan(still, still, noise=dict.fromkeys(kinds, 0.0)))
    for number in range(2):
        with noisy.draw() as one, silent.draw() as other:
            for first, std, query in (
                (0, 1.0, lambda batch: batch.gradient(theta, Abadi(1.0))),
                (1, 3.0, lambda batch: batch.losses([theta, 2 * theta], 3.0)),
                (3, 1.0, lambda batch: batch.gradient(2 * theta, Abadi(1.0))),
                (4, 1.5, lambda batch: batch.below(1.0)),
            ):
                release, mean = query(one), query(other).value
                assert release.std == std / noisy.expected_batch
                noise = gaussian(9, number, first, len(mean), mean.dtype)
                torch.testing.assert_close(release.value - mean, release.std * noise, rtol=1e-4, atol=1e-6)


class Rolling(Counting):
    """An engine that notes the random numbers that the model's dropout would have."""

    def __init__(self, inner):
        super().__init__(inner)
        self.numbers = []

    def clipped(self, *arguments):
        self.numbers.append(torch.rand(3))
        return super().clipped(*arguments)

    def losses(self, *arguments):
        self.numbers.append(torch.rand(3))
        return super().losses(*arguments)


def test_what_is_random_in_a_physical_batch_is_a_function_of_its_place():
    """Of the seed, the draw and its number within the draw; a transform's numbers are not those of dropout."""
    transformed, engine = [], Rolling(regression())

    def transform(x):
        transformed.append(torch.rand(3))
        return x

    x, y = data()
    options = {"draw_seed": 4, "noise_seed": 2, "physical_batch": 14, "transform": transform}
    asked = DataOracle(engine, x, y, plan(*[Draw(0.5, (1.0, 2.0))] * 2), **options)
    for number in range(2):
        with asked.draw() as batch:
            batch.gradient(torch.zeros(D), Abadi(1.0))
            batch.losses([torch.ones(D)], 1.0)
        assert 14 < len(sampling.poisson_rows(4, number, N, 0.5)) <= 28
        del transformed[: len(transformed) - 4]  # those of the look before the first draw is charged
        for purpose, numbers in (("dropout", engine.numbers), ("transform", transformed)):
            expected = [first_numbers(4, purpose, number, part) for part in (0, 1)] * 2
            assert torch.equal(torch.stack(numbers), torch.stack(expected))
            numbers.clear()


def first_numbers(*place):
    return torch.rand(3, generator=torch.Generator().manual_seed(sampling.derive(*place) >> 65))


@pytest.mark.parametrize(("dtype", "device"), [(torch.float64, "cpu"), (torch.float32, "meta")], ids=str)
def test_a_replay_reads_vectors_as_the_run_did(dtype, device):
    losses = Release(torch.zeros(2, dtype=torch.float64), 1.0)
    gradient = Release(torch.zeros(D, dtype=dtype, device=device), 1.0)
    space = ReplayOracle([[losses, gradient]], plan(Draw(0.5, (2.0, 2.0, 1.0)))).space
    assert (space.dimension, space.dtype, space.device) == (D, dtype, torch.device(device))


def test_what_a_trace_is_asked_with_stays_out_of_reach():
    """Else an optimizer that looks at the std of a release at a private bound would be traced as if it did not."""
    traced = TraceOracle(D, 0.1, 1)
    with traced.draw() as batch:
        bound = batch.gradient(traced.theta, Abadi(1.0)).value.norm()
        losses = batch.losses([traced.theta], bound)
    with pytest.raises(ValueRead):
        bool(losses.std > 1)
