import math

import pytest
import torch
from torch import nn

import dpopt
from dpopt.clipping import Abadi, Automatic, Normalized, engine
from dpopt.errors import ConfigError
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import BudgetSpent, DataOracle, Draw, Ledger, Plan, TraceOracle, UnplannedRelease

N, D = 40, 4
RULES = [Abadi(0.5), Abadi(10.0), Automatic(), Automatic(2.0, 0.1), Normalized(0.5)]


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


def test_draws_do_not_nest():
    """Mistake 1 by the back door: releases of an outer draw would see the inner one's records."""
    asked = oracle(plan(Draw(0.5, (1.0,)), Draw(0.5, (1.0,))))
    with asked.draw(), pytest.raises(UnplannedRelease, match="a draw is open"), asked.draw():
        pass
    assert asked.draws_left == 1
    with asked.draw() as batch:
        batch.gradient(torch.zeros(D), Abadi(1.0))


def test_a_draw_that_fails_is_charged_for_what_it_released():
    asked = oracle(plan(Draw(0.5, (1.0,))))
    with pytest.raises(ZeroDivisionError), asked.draw() as batch:  # noqa: PT012
        batch.gradient(torch.zeros(D), Abadi(1.0))
        raise ZeroDivisionError
    assert asked.ledger == Ledger([Draw(0.5, (1.0,))])


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("points", [[(1.0, 0.0)], [(2.5, 1.0), (-1.5, 0.0)]], ids=["one", "two"])
def test_a_record_moves_the_gradient_by_at_most_the_sensitivity(rule, points):
    x, y = data()
    more_x, more_y = torch.cat([x, 1e6 * torch.ones(1, D)]), torch.cat([y, torch.tensor([-1e6])])
    at = [(weight, torch.full((D,), value)) for weight, value in points]
    sums = []
    for inputs, targets in ((x, y), (more_x, more_y)):
        asked = oracle(quiet(1.0), inputs, targets)
        with asked.draw() as batch:
            sums.append(batch.gradient(at, rule).value * asked.expected_batch)
    moved = float((sums[1] - sums[0]).norm())
    assert 0.99 * rule.sensitivity <= moved <= 1.00001 * rule.sensitivity


@pytest.mark.parametrize("value", [1e6, 0.0], ids=["huge", "zero"])
def test_a_record_moves_a_loss_by_at_most_half_the_bound(value):
    x, y = data()
    more = torch.cat([x, torch.zeros(1, D)]), torch.cat([y, torch.tensor([value])])
    sums = []
    for inputs, targets in ((x, y), more):
        asked = oracle(quiet(1.0, losses=1), inputs, targets)
        with asked.draw() as batch:
            batch.gradient(torch.zeros(D), Abadi(1.0))
            centred = batch.losses([torch.zeros(D)], 3.0).value.double() - 1.5
            sums.append(centred * asked.expected_batch)
    assert float((sums[1] - sums[0]).abs()) == pytest.approx(1.5, rel=1e-6)


def test_losses_are_clipped_means():
    x, y = data()
    asked = oracle(quiet(1.0, losses=2), x, y)
    points = [torch.zeros(D), torch.ones(D)]
    with asked.draw() as batch:
        batch.gradient(points[0], Abadi(1.0))
        released = batch.losses(points, torch.tensor(0.7))
    expected = [((x @ theta - y).square() / 2).clamp(0, 0.7).mean() for theta in points]
    torch.testing.assert_close(released.value.float(), torch.stack(expected))
    assert released.value.dtype == torch.float64


def test_gradient_divides_by_the_expected_batch():
    """Mistake 2: dividing by the realised batch size makes the noise depend on the data."""
    x, y = data()
    asked = oracle(quiet(0.25), x, y)
    with asked.draw() as batch:
        mean = batch.gradient(torch.zeros(D), Abadi(math.inf)).value
    from dpopt.privacy.sampling import poisson_rows

    rows = torch.from_numpy(poisson_rows(1, 0, N, 0.25))
    assert len(rows) != N / 4
    total = (-y[rows, None] * x[rows]).sum(0)
    torch.testing.assert_close(mean, total / (N / 4))


def test_noise_is_added_once_per_draw_whatever_the_physical_batch():
    """Mistakes 12 and 13: partial batches count, and accumulation adds no noise."""
    values = []
    for size in (1, 3, 64):
        asked = oracle(plan(Draw(0.5, (1.0,))), physical_batch=size)
        with asked.draw() as batch:
            values.append(batch.gradient(torch.ones(D), Abadi(1.0)).value)
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], values[2])


def test_released_noise_has_the_stated_std():
    releases = []
    asked = oracle(plan(*[Draw(1e-9, (1.0, 2.0))] * 3000))
    for _ in range(3000):  # draws are empty, so releases are nothing but noise
        with asked.draw() as batch:
            gradient = batch.gradient(torch.zeros(D), Abadi(0.5))
            loss = batch.losses([torch.zeros(D)], 4.0)
        releases.append((gradient.value / gradient.std, (loss.value - 2.0) / loss.std))
    assert gradient.std == pytest.approx(1.0 * 0.5 / asked.expected_batch)
    assert float(loss.std) == pytest.approx(2.0 * 2.0 / asked.expected_batch)
    for part in zip(*releases, strict=True):
        numbers = torch.cat([p.double() for p in part])
        assert float(numbers.std()) == pytest.approx(1, abs=5 / len(numbers) ** 0.5)
        assert float(numbers.mean()) == pytest.approx(0, abs=5 / len(numbers) ** 0.5)


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
    the_plan = Plan(
        {"gradient": 0.0, "losses": 0.0},
        Ledger([Draw(1.0, (0.0, 0.0, 0.0))]),
        1.0,
        1.0,
        1,
        noisy.dimension,
        1e-5,
        "pld",
    )
    x, y = data()
    asked = DataOracle(noisy, x, y, the_plan, draw_seed=1, noise_seed=2, physical_batch=7)
    before = torch.get_rng_state()
    with asked.draw() as batch:
        same = batch.gradient([(0.5, noisy.theta), (0.5, noisy.theta)], Abadi(math.inf))
        losses = batch.losses([noisy.theta, noisy.theta], 100.0).value
    assert losses[0] == losses[1]
    assert torch.equal(torch.get_rng_state(), before)
    single = Plan({"gradient": 0.0}, Ledger([Draw(1.0, (0.0,))]), 1.0, 1.0, 1, noisy.dimension, 1e-5, "pld")
    with DataOracle(noisy, x, y, single, draw_seed=1, noise_seed=2, physical_batch=7).draw() as batch:
        torch.testing.assert_close(batch.gradient(noisy.theta, Abadi(math.inf)).value, same.value)
    model.eval()
    with DataOracle(noisy, x, y, single, draw_seed=1, noise_seed=2).draw() as batch:
        assert not torch.allclose(batch.gradient(noisy.theta, Abadi(math.inf)).value, same.value)


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


def test_a_continued_oracle_leaves_the_given_ledger_alone():
    planned = plan(Draw(0.5, (1.0,)), Draw(0.5, (1.0,)))
    taken = Ledger([Draw(0.5, (1.0,))])
    asked = oracle(planned, ledger=taken)
    with asked.draw() as batch:
        batch.gradient(torch.zeros(D), Abadi(1.0))
    assert (len(taken), asked.draws_left, asked.ledger) == (1, 0, planned.ledger)


def test_bad_bounds_and_mismatched_plans():
    asked = oracle(plan(Draw(0.5, (1.0, 2.0))))
    with asked.draw() as batch:
        for bound in (0.0, -1.0, math.inf):
            with pytest.raises(ConfigError, match="bound"):
                batch.losses([torch.zeros(D)], bound)
    wrong = Plan({"gradient": 1.0}, Ledger([Draw(0.5, (1.0,))]), 1.0, 0.5, 1, D + 1, 1e-5, "pld")
    with pytest.raises(ConfigError, match="dimension"):
        oracle(wrong)


def test_fresh_probes_without_a_draw_left_are_skipped():
    optimizer = dpopt.create("hyfreedp", probe_batch="fresh", probe_every=2)
    traced = TraceOracle(D, 0.1, 4)
    state = optimizer.init(traced.theta)
    while traced.draws_left:
        state = optimizer.step(state, traced)
    assert traced.kinds == [("gradient",), ("losses",) * 3, ("gradient",), ("gradient",)]


def test_dp_sgd_over_the_oracle_descends():
    asked = oracle(quiet(1.0, draws=50))
    optimizer = DPSGD(lr=0.3, clip=Abadi(math.inf))
    x, y = data()
    state = optimizer.init(torch.zeros(D))
    while asked.draws_left:
        state = optimizer.step(state, asked)
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    torch.testing.assert_close(state.theta, best, atol=1e-3, rtol=0)
