import math
from functools import partial

import numpy as np
import pytest
from scipy import stats

from dpopt.audit import clopper_pearson, gaussian_epsilon, likely_threshold, one_run
from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger, epsilon

one_run_fdp = partial(one_run, is_gaussian=True)
ESTIMATORS = [clopper_pearson, one_run, one_run_fdp]


def quantiles(mean, n):
    return stats.norm.ppf((np.arange(n) + 0.5) / n) + mean


def hull(inside, outside):
    """Numbers of guesses at the vertices of the convex hull of the ROC curve, which published software tries."""
    thresholds = np.append(np.union1d(inside, outside), np.inf)
    missed, rejected = (np.searchsorted(np.sort(scores), thresholds) for scores in (inside, outside))
    kept = []
    for x, y in zip(missed.tolist(), rejected.tolist(), strict=True):
        while len(kept) > 1 and (kept[-1][1] - kept[-2][1]) * (x - kept[-2][0]) <= (y - kept[-2][1]) * (
            kept[-1][0] - kept[-2][0]
        ):
            kept.pop()
        kept.append((x, y))
    numbers = [len(inside) + len(outside) - x - y for x, y in kept]
    return [number or max(numbers) for number in numbers]  # no guess at all is a vertex too, and has its share


@pytest.mark.parametrize(
    ("estimator", "mean", "published"),
    [
        (one_run, 1, 1.13346),
        (one_run, 2, 2.311945),
        (one_run, 4, 4.395568),
        (one_run_fdp, 1, 2.164749),
        (one_run_fdp, 4, 9.133752),
    ],
)
def test_published_bounds(estimator, mean, published):
    """Values that google-deepmind/jax_privacy's tests state for 10,000 Gaussian quantiles on either side."""
    scores = quantiles(mean, 10_000), quantiles(0, 10_000)
    bound = estimator(*scores, delta=1e-6, guesses=hull(*scores))
    assert bound == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize(("mu", "delta"), [(0.3, 1e-5), (1.0, 0.1), (1.0, 1e-8), (3.0, 1e-5)])
def test_gaussian_epsilon_is_that_of_the_accountant(mu, delta):
    exact = epsilon(Ledger([Draw(1.0, (1 / mu,))]), delta)
    assert gaussian_epsilon(mu, delta) == pytest.approx(exact, abs=1e-3)
    assert gaussian_epsilon(0.0, delta) == 0


def coins(random, mean, canaries):
    members = random.random(canaries) < 0.5
    scores = random.standard_normal(canaries) + mean * members
    return scores[members], scores[~members]


@pytest.mark.parametrize("mean", [0.0, 2.5])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_bounds_exceed_the_truth_at_most_as_often_as_stated(estimator, mean):
    """Gaussian mechanism, 200 repetitions; at 10 % significance 36 or more failures have probability 0.0002."""
    random, truth = np.random.default_rng(0), gaussian_epsilon(mean, 1e-3)
    bounds = [estimator(*coins(random, mean, 600), delta=1e-3, significance=0.1) for _ in range(200)]
    assert sum(bound > truth for bound in bounds) <= 35


def test_an_exact_randomized_response_is_not_refuted_too_often():
    """Theorem 5.2 at delta 0 is tight for randomized response, so this fails for any estimator that claims more."""
    random, truth, wrong = np.random.default_rng(1), 1.5, 0
    for _ in range(300):
        members = random.random(400) < 0.5
        said = np.where(random.random(400) < 1 / (1 + math.exp(-truth)), members, ~members)
        scores = said + 1e-6 * random.random(400)
        wrong += one_run(scores[members], scores[~members], delta=0.0, significance=0.1, guesses=100) > truth
    assert 10 <= wrong <= 45


def test_bounds_are_tight_for_many_scores():
    truth, scores = gaussian_epsilon(1.0, 0.05), coins(np.random.default_rng(2), 1.0, 400_000)
    assert 0.9 * truth < clopper_pearson(*scores, delta=0.05) <= truth
    truth = gaussian_epsilon(1.0, 1e-6)
    assert 0.8 * truth < one_run_fdp(*scores, delta=1e-6, guesses=1000) <= truth


def test_clopper_pearson_against_scipy():
    random = np.random.default_rng(3)
    inside, outside = random.normal(1, 1, 70), random.normal(0, 1, 90)
    tp, fp = (inside >= 0.8).sum(), (outside >= 0.8).sum()
    limits = [stats.binomtest(k, n).proportion_ci(0.95, "exact") for k, n in ((tp, 70), (fp, 90))]
    ratios = (limits[0].low - 0.01) / limits[1].high, (1 - limits[1].high - 0.01) / (1 - limits[0].low)
    assert clopper_pearson(inside, outside, delta=0.01, threshold=0.8) == pytest.approx(math.log(max(ratios)))


def test_a_threshold_from_a_simulation_proves_more_than_one_from_half_of_the_scores():
    random, stated, split = np.random.default_rng(5), [], []
    threshold = likely_threshold(*coins(random, 2.0, 20_000), trials=200, delta=1e-5)
    for _ in range(20):
        scores = random.normal(2, 1, 200), random.normal(0, 1, 200)
        stated.append(clopper_pearson(*scores, delta=1e-5, threshold=threshold))
        split.append(clopper_pearson(*scores, delta=1e-5))
    assert np.mean(stated) > np.mean(split) + 0.3
    assert likely_threshold(np.ones(9), np.zeros(9), trials=50, delta=0.0) > 0


def test_clopper_pearson_sees_what_is_never_in():
    """A value that only runs without the canary have says as much as one that only runs with it have."""
    inside, outside = np.ones(400), np.tile([1.0, 0.0], 200)
    assert clopper_pearson(inside, np.sort(outside)[::-1], delta=0.0, threshold=0.5) > 3


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_scores_that_say_nothing(estimator):
    assert estimator(np.zeros(100), np.zeros(100), delta=1e-5) == 0
    assert estimator(np.zeros(100), np.ones(100), delta=1e-5) == 0
    assert estimator([-math.inf, math.inf], [0.0, 0.0], delta=1e-5) >= 0


@pytest.mark.parametrize("estimator", [one_run, one_run_fdp])
def test_ties_are_not_broken_by_membership(estimator):
    """With only two values, 10 % of the canaries at the higher one, no more than these can be guessed."""
    inside, outside = np.repeat([1.0, 0.0], [100, 400]), np.zeros(500)
    assert estimator(inside, outside, delta=0.01, guesses=300) <= estimator(inside, outside, delta=0.01, guesses=100)


def test_one_run_by_the_theorem_word_for_word():
    """P(v right of r) <= f(v) + 2 m delta max_i (f(v - i) - f(v)) / i, and the bound is where that is 5 %."""
    inside, outside, delta = quantiles(1.5, 60), quantiles(0, 60), 1e-3
    bound = one_run(inside, outside, delta=delta, guesses=30)
    correct = int((inside > np.sort(np.concatenate([inside, outside]))[-31]).sum())

    def probability(epsilon):
        p = math.exp(epsilon) / (1 + math.exp(epsilon))
        at_least = [sum(stats.binom.pmf(range(k, 31), 30, p)) for k in range(31)]
        gains = [(at_least[max(correct - i, 0)] - at_least[correct]) / i for i in range(1, 121)]
        return at_least[correct] + 2 * 120 * delta * max(gains)

    assert bound > 0
    assert probability(bound) == pytest.approx(0.05, rel=1e-4)


BAD = [
    {"delta": -0.1},
    {"delta": 1.0},
    {"significance": 0.0},
    {"significance": 0.5},
    {"in_scores": []},
    {"in_scores": [[1.0]]},
    {"out_scores": [math.nan]},
]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_bad_input(estimator):
    for bad in BAD:
        arguments = {"in_scores": [1.0, 2.0], "out_scores": [0.0, 1.0], "delta": 1e-5, **bad}
        with pytest.raises(ConfigError, match=next(iter(bad))):
            estimator(arguments.pop("in_scores"), arguments.pop("out_scores"), **arguments)


def test_what_only_one_estimator_refuses():
    for guesses in (0, 5, [], [1, 9], "most"):
        with pytest.raises(ConfigError, match="guesses"):
            one_run([1.0, 2.0], [0.0, 1.0], delta=1e-5, guesses=guesses)
    with pytest.raises(ConfigError, match="delta"):
        one_run_fdp([1.0], [0.0], delta=0.0)
    with pytest.raises(ConfigError, match="two"):
        clopper_pearson([1.0], [0.0], delta=1e-5)
