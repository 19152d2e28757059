"""The accountant of record against closed forms and against a reference that works by other means, at any size."""

import csv
import json
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from reference.privacy_loss import epsilon as reference
from scipy import optimize, special

from dpopt.errors import ConfigError
from dpopt.privacy import ACCOUNTANTS, Draw, Ledger, accountants, epsilon, privacy_loss
from dpopt.store import Store

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
LEAST = 0.005
"""Down to this epsilon, the accountant of record is to be within 1 % of the truth."""


def ledger(events):
    made = Ledger()
    for rate, noise, count in events:
        made.append(Draw(rate, (noise,)), count)
    return made


def gaussian(noise, delta):
    """Exact epsilon of one Gaussian release (Balle and Wang 2018, Theorem 8), in logarithms for any delta."""

    def excess(eps):
        own, other = special.log_ndtr(0.5 / noise - eps * noise), eps + special.log_ndtr(-0.5 / noise - eps * noise)
        return own + math.log(-math.expm1(other - own)) - math.log(delta)

    return optimize.brentq(excess, 0, 0.5 / noise**2 + 25 / noise, xtol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("noise", [0.6, 1.7, 9.0])
@pytest.mark.parametrize("rate", [1e-7, 0.003, -math.expm1(-0.05), 0.3, 0.99, 1.0])
def test_the_loss_of_a_draw_has_the_bits_of_dp_accountings(rate, noise):
    """Also where the smallest loss is a point of the grid: at the third rate it is -0.05."""
    step = privacy_loss.COARSEST
    expected = from_gaussian_mechanism(noise, value_discretization_interval=step, sampling_prob=rate)
    loss = accountants._loss(rate, noise)
    for way in ("_pmf_remove", "_pmf_add"):
        ours, theirs = (vars(getattr(each, way)) for each in (loss, expected))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[key], theirs[key]) for key in ours)
    assert loss._symmetric == expected._symmetric == (rate == 1)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10, 1e-100])
@pytest.mark.parametrize("noise", [0.3, 1.0, 8.0, 200.0])
def test_rate_one_is_the_closed_form(noise, delta):
    """However the Gaussian is divided into draws."""
    if special.erf(1 / (math.sqrt(8) * noise)) <= delta:
        assert privacy_loss.epsilon([(1.0, noise, 1)], delta) == 0
        return
    exact = gaussian(noise, delta)
    for draws in (1, 10_000):
        found = privacy_loss.epsilon([(1.0, noise * math.sqrt(draws), draws)], delta)
        assert exact * (1 - 1e-11) <= found <= exact * 1.001


def divergence(rate, noise, eps, is_removed):
    """Hockey-stick divergence of one draw at `eps`, from the definition, in mpmath's precision."""

    def phi(x):
        return mpmath.erfc(-x / mpmath.sqrt(2)) / 2

    rest = mpmath.exp(eps if is_removed else -eps) - (1 - rate)
    if rest <= 0:
        return 1 - mpmath.exp(eps) if is_removed else mpmath.mpf(0)
    at = mpmath.mpf(0.5) + mpmath.mpf(noise) ** 2 * mpmath.log(rest / rate)
    sign = -1 if is_removed else 1
    p, q = phi(sign * at / noise), phi(sign * (at - 1) / noise)
    p, q = p, (1 - rate) * p + rate * q
    return q - mpmath.exp(eps) * p if is_removed else p - mpmath.exp(eps) * q


@pytest.mark.parametrize("is_removed", [True, False])
@pytest.mark.parametrize(("rate", "noise"), [(1e-4, 0.1), (0.01, 1.0), (0.5, 0.12), (0.999, 0.15), (1.0, 2.0)])
def test_divergences_are_the_definition(rate, noise, is_removed):
    """Also where e^loss itself would leave no digit of what is added to it."""
    points = np.array([-80.0, -35.0, -0.3, 0.0, 0.01, 0.5, 3.0, 29.0, 31.0, 36.0, 60.0])
    with mpmath.workdps(60):
        truth = [float(divergence(mpmath.mpf(rate), mpmath.mpf(noise), eps, is_removed)) for eps in points]
    found = privacy_loss._divergence(rate, noise, points, is_removed)
    assert found == pytest.approx(truth, rel=1e-9, abs=1e-300)


EVENTS = [  # fine and coarse grids, heavy and light tails, long runs, some mixed with probes
    ([(0.1, 1.0, 1)], 1e-5),
    ([(0.01, 1.0, 1000)], 1e-5),
    ([(0.00364, 8.4, 27_500)], 1e-6),
    ([(1.06e-4, 15.6, 77_862)], 1e-6),
    pytest.param([(1e-4, 0.9, 1000)], 1e-6, marks=pytest.mark.slow),
    pytest.param([(0.001, 1.0, 10_000)], 1e-12, marks=pytest.mark.slow),
    pytest.param([(0.5, 50.0, 100_000)], 1e-12, marks=pytest.mark.slow),
    ([(0.0003, 5.0, 4000), (0.0003, 4.2, 1000)], 1e-7),
    ([(0.02, 1.0, 200), (1.0, 20.0, 3), (0.3, 9.0, 10)], 1e-5),
]


@pytest.mark.parametrize(("events", "delta"), EVENTS)
def test_the_reference_agrees(events, delta):
    """The own computation alone, and whatever the accountant of record takes."""
    truth, error = reference(events, delta)
    for found in (privacy_loss.epsilon(events, delta), epsilon(ledger(events), delta)):
        assert truth - error <= found <= 1.01 * truth


def test_a_fixed_interval_fails_where_the_own_grid_does_not():
    """A run of many draws with little loss each: the interval of 1e-4 makes three times of it."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld

    rate, noise, draws = 1.06e-4, 15.6, 77_862
    truth, _ = reference([(rate, noise, draws)], 1e-6)
    fixed = pld.PLDAccountant(value_discretization_interval=1e-4)
    fixed.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), draws)
    assert fixed.get_epsilon(1e-6) > 2 * truth
    assert epsilon(ledger([(rate, noise, draws)]), 1e-6) < 1.01 * truth


@pytest.mark.parametrize(("event", "delta"), [((0.01, 0.5, 5), 1e-2), ((0.01, 0.5, 20), 1e-5), ((0.3, 1.0, 20), 1e-5)])
def test_a_wider_window_changes_nothing(event, delta, monkeypatch):
    """What lies beyond its ends is wrapped into it, where it hardly counts."""
    found, low = privacy_loss.epsilon([event], delta), privacy_loss._Sum._low
    monkeypatch.setattr(privacy_loss._Sum, "_low", lambda self, index, high: 2 * low(self, index, high) - high)
    assert privacy_loss.epsilon([event], delta) == pytest.approx(found, rel=1e-6)


def test_more_draws_and_less_noise_never_cost_less():
    draws = [privacy_loss.epsilon([(0.001, 3.0, count)], 1e-6) for count in (100, 1000, 1001, 10_000, 100_000)]
    noises = [privacy_loss.epsilon([(0.001, noise, 3000)], 1e-6) for noise in (9.0, 3.0, 2.99, 1.0, 0.5)]
    deltas = [privacy_loss.epsilon([(0.001, 3.0, 3000)], delta) for delta in (1e-2, 1e-4, 1e-8, 1e-16, 1e-64)]
    for costs in (draws, noises, deltas):
        assert costs == sorted(costs)


def test_never_above_renyi_nor_below_a_part_of_the_run():
    """At any delta that is a number, with any number of draws."""
    for delta in (1e-3, 1e-80):
        run = [(0.01, 1.0, 1000)]
        assert epsilon(ledger([(0.01, 1.0, 500)]), delta) < epsilon(ledger(run), delta)
        assert epsilon(ledger(run), delta) <= epsilon(ledger(run), delta, "rdp")


@pytest.mark.parametrize("delta", [1e-2, 1e-3, 1e-6, 1e-9, 1e-12])
def test_the_tilt_is_near_the_best(delta):
    """Chernoff's bound on the loss of a Gaussian is least at the root of 2 s^2 log 1/delta."""
    noise, step = 2.0, 1e-3
    ends = privacy_loss._ends(1.0, noise, delta * 1e-6, is_removed=True)
    loss = privacy_loss._rounded((1.0, noise, 1), ends, step, is_removed=True)
    made = privacy_loss._Sum([loss], step, 1 / noise, delta)
    best = made.tilts[np.argmin(made._chernoff(made.tilts, made.cumulants, delta))]
    assert best == pytest.approx(noise * math.sqrt(2 * math.log(1 / delta)), rel=0.06)


def test_a_record_that_is_hardly_ever_drawn_costs_nothing():
    assert epsilon(ledger([(1e-9, 0.001, 999)]), 1e-6) == 0
    assert epsilon(ledger([(1e-9, 0.001, 1001)]), 1e-6) > 0


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("noise", [1e-3, 1e9])
def test_absurd_runs_are_answered_or_refused(noise, accountant):
    for draws in (1, 10**12):
        try:
            assert 0 <= epsilon(ledger([(0.01, noise, draws)]), 1e-5, accountant) < math.inf
        except ConfigError:
            assert accountant == "prv"


def test_prv_is_refused_where_its_grid_would_be_too_large_for_the_draws_alone():
    """However little they spend: its points are ever closer to each other."""
    run = ledger([(0.01, 1e9, 10**9)])
    assert epsilon(run, 1e-5, "rdp") < 1e-3
    with pytest.raises(ConfigError, match="points"):
        epsilon(run, 1e-5, "prv")


def test_a_ledger_has_a_largest_length():
    made = ledger([(0.1, 1.0, 2**53)])
    assert len(made) == 2**53
    for count in (0, 1, 2**70):
        with pytest.raises(ConfigError, match="draws"):
            made.append(Draw(0.1, (1.0,)), count)


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_published_stays_with_the_accountant_that_it_was_made_by(every):
    """Every stored epsilon is bit for bit what dp-accounting's accountant says, as it was before there was another."""
    published = Store(PUBLISHED)
    stored = {
        (json.dumps(run.ledger), run.record["delta"], run.record["epsilon"])
        for suite in sorted(published.suites())[::every]
        for run in published.archive(suite).runs.values()
        if math.isfinite(float(run.record["epsilon"])) and run.record["cell"]["accountant"] == "pld"
    }
    runs = [(accountants.events(Ledger.from_json(text)), delta, spent) for text, delta, spent in stored]
    assert len(runs) > 10
    assert all(accountants._is_ordinary(events, delta) for events, delta, _ in runs)
    events, delta, spent = min(runs, key=lambda run: run[2])
    assert accountants._pld(events, delta) == spent


# As many runs as were once found to be up to 270 % too dear: rate 1e-4 to 1, noise 0.3 to 50, 1 to 10^5 draws, delta
# 1e-3 to 1e-10, about a quarter of them with probes in some draws.


def runs(number, seed):
    """Of runs whose loss is not beyond any use."""
    random = np.random.default_rng(seed)
    while number:
        rate = min(1.0, 10 ** random.uniform(-4, 0.2))
        noise = 0.3 * (50 / 0.3) ** random.random()
        draws = max(1, round(10 ** random.uniform(0, 5)))
        events = [(rate, noise, draws)]
        if number % 4 == 0 and draws > 5:
            probes, probe_noise = int(random.integers(1, 5)), noise * 10 ** random.uniform(-0.3, 1.2)
            probed = math.ceil(draws / int(random.integers(2, 11)))
            joint = (noise**-2 + probes * probe_noise**-2) ** -0.5
            events = [(rate, joint, probed), (rate, noise, draws - probed)]
        if privacy_loss.spread(events) < 40:
            number -= 1
            yield events, 10 ** random.uniform(-10, -3)


@pytest.mark.slow
def test_seventy_two_runs_are_within_a_hundredth_of_the_reference_and_never_below_it():
    compared = 0
    for events, delta in runs(72, seed=1):
        truth, error = reference(events, delta)
        found = epsilon(ledger(events), delta)
        assert found >= truth - error, (events, delta)
        if truth >= LEAST:
            compared += 1
            assert found <= 1.01 * truth, (events, delta, truth)
    assert compared > 45


# Every accountant, on known answers.


LINES = Path(__file__).with_name("known_answers.csv").read_text().splitlines()[1:]
ROWS = [pytest.param(row, id=f"{row['rate']}-{row['noises']}-{row['draws']}") for row in csv.DictReader(LINES)]


def drawn(rate, noises, draws):
    made = Ledger()
    made.append(Draw(rate, tuple(noises)), draws)
    return made


@pytest.mark.parametrize("row", ROWS)
def test_known_answers(row):
    made = drawn(float(row["rate"]), map(float, row["noises"].split(";")), int(row["draws"]))
    delta = float(row["delta"])
    assert epsilon(made, delta, "pld") == pytest.approx(float(row["pld"]), abs=2e-3)
    if row["rdp"]:
        assert epsilon(made, delta, "rdp") == pytest.approx(float(row["rdp"]), rel=1e-3)


def test_releases_of_one_draw_compose_before_amplification():
    """Mistake 1: the same releases, each with a subsample of its own, look much cheaper than they are."""
    joint = epsilon(drawn(0.01, [1.0, 1.0], 1000), 1e-5)
    separate = epsilon(drawn(0.01, [1.0], 2000), 1e-5)
    assert separate == pytest.approx(2.5850, abs=2e-3)
    assert joint > 1.7 * separate


def test_unnoised_release_is_infinite_and_nothing_is_free():
    assert epsilon(drawn(0.1, [1.0, 0.0], 1), 1e-5) == math.inf
    assert epsilon(Ledger(), 1e-5) == 0
    assert epsilon(drawn(0.1, [], 3), 1e-5) == 0


@pytest.mark.parametrize(("delta", "accountant"), [(0.0, "pld"), (1.0, "pld"), (1e-5, "pdl")])
def test_bad_input(delta, accountant):
    with pytest.raises(ConfigError, match="delta" if accountant == "pld" else "did you mean 'pld'"):
        epsilon(drawn(0.1, [1.0], 1), delta, accountant)
