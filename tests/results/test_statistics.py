"""Statistics against worked examples, enumeration, and simulation with a known truth."""

from itertools import permutations, product

import numpy as np
import pytest
import scipy.stats

from dpopt.results import statistics
from dpopt.results.statistics import (
    critical_difference,
    crossed,
    difference,
    expected_score,
    friedman,
    standing,
)


def accuracies(generator, seeds, records, mean=0.9, between=0.01, hard=0.8):
    """Accuracies of models that share a test split: records are easy or hard, and seeds have levels of their own."""
    rest = (1 - hard) / hard
    easiness = generator.beta(mean * rest, (1 - mean) * rest, records)
    chance = np.clip(easiness + generator.normal(0, between, (seeds, 1)), 0, 1)
    return (generator.random((seeds, records)) < chance).mean(axis=1)


@pytest.mark.parametrize(
    ("mean", "between", "seeds"), [(0.6, 0.003, 3), (0.6, 0.003, 10), (0.9, 0.01, 5), (0.9, 0.03, 3)]
)
def test_intervals_cover_the_expected_score(mean, between, seeds):
    """Also where all seeds have the same easy test split, which an interval over seeds alone does not allow for."""
    generator, covered, over_seeds = np.random.default_rng(0), 0, 0
    for _ in range(400):
        scores = accuracies(generator, seeds, 360, mean, between)
        both, alone = expected_score(scores, 360), expected_score(scores)
        covered += both[0] <= mean <= both[1]
        over_seeds += alone[0] <= mean <= alone[1]
        assert both[0] <= alone[0] or both[0] == 0
        assert both[1] >= alone[1] or both[1] == 1
    assert covered / 400 >= 0.925
    assert covered > over_seeds
    if between == 0.003:
        assert over_seeds < 0.7 * covered


def test_each_part_of_an_interval_alone_is_the_textbooks():
    wilson = scipy.stats.binomtest(45, 50).proportion_ci(method="wilson")
    assert expected_score(np.full(3, 0.9), 50) == pytest.approx((wilson.low, wilson.high))
    scores = np.array([0.3, 0.5, 0.45])
    assert expected_score(scores) == pytest.approx(scipy.stats.ttest_1samp(scores, 0).confidence_interval())
    assert expected_score(np.ones(3), 50)[1] == 1
    wild = np.array([0.1, 0.5, 0.99])
    assert expected_score(wild, ends=(0.0, 1.0)) == (0, 1), "no accuracy is below 0 or above 100 %"
    assert expected_score(wild)[0] < 0
    for nothing in (wild[:2], np.array([0.5, np.nan, 0.5])):
        assert np.isnan([*expected_score(nothing), *expected_score(nothing, 50)]).all()


def test_a_difference_is_students_where_pairs_differ():
    values = np.array([0.3, -0.1, 0.5, 0.2, 0.7])
    theirs = scipy.stats.ttest_1samp(values, 0)
    assert difference(values) == pytest.approx((values.mean(), *theirs.confidence_interval(), theirs.pvalue))
    assert difference(values, largest=0.4)[1:3] == pytest.approx((theirs.confidence_interval().low, 0.4))
    assert difference(-values, largest=0.4)[1:3] == pytest.approx((-0.4, -theirs.confidence_interval().low))
    assert np.isnan(difference(values[:2])[1:]).all(), "two pairs show nothing"
    equal = difference(np.full(3, 0.5))
    assert (equal.mean, equal.p) == (0.5, 0.25)
    assert np.isnan([equal.low, equal.high]).all()
    assert difference(np.zeros(4)).p == 1


def test_equal_sums_in_another_order_share_a_rank():
    block = np.array([[0.1, 0.3, 0.0], [0.2, 0.2, 0.0], [0.3, 0.1, 0.0]])
    assert block[:, 0].mean() != block[:, 1].mean()
    assert statistics._ranks_of_seeds([block], 1, _InOrder()).tolist() == [[1.5, 1.5, 3.0]]


class _InOrder:
    """A generator that draws every seed once."""

    def random(self, shape):
        return np.tile((np.arange(shape[1]) + 0.5) / shape[1], (shape[0], 1))


def test_standing_is_the_smallest_of_paired_tests_against_all_others():
    scores = np.random.default_rng(0).normal([0, 1, 2, 2.1], 0.4, (5, 4))
    found = standing(scores)
    for method in range(4):
        rivals = [scipy.stats.ttest_rel(scores[:, other], scores[:, method], alternative="greater").pvalue
                  for other in range(4) if other != method]  # fmt: skip
        assert found.p[method] == pytest.approx(min(1, 3 * min(rivals)))
    assert found.may_be_best.tolist() == [False, False, True, True]


def test_a_method_that_varies_little_shows_what_the_best_cannot():
    steps = np.arange(5.0)
    scores = np.column_stack([90 + 10 * (-1) ** steps, 88 + 0.1 * steps, 85 - 0.1 * steps])
    assert standing(scores).may_be_best.tolist() == [True, True, False]
    assert standing(scores[:, [0, 2]]).may_be_best.all()


def test_missing_seeds_equal_differences_and_single_methods():
    scores = np.array([[0.5, 0.4, 0.9, np.nan], [0.5, 0.4, np.nan, np.nan], [0.5, 0.4, np.nan, np.nan]])
    found = standing(scores)
    assert found.p[:2].tolist() == [1, 2**-3]
    assert np.isnan(found.p[2:]).all()
    assert not found.may_be_best[2:].any()
    assert np.isnan(standing(scores[:, :1]).p).all(), "who meets nobody is not shown to be the best"
    assert np.isnan(standing(scores[:2]).p).all()
    assert np.isnan(standing(scores[:2]).visible)


@pytest.mark.parametrize(("seeds", "is_equal"), [(3, True), (10, True), (5, False)])
def test_the_best_is_rarely_left_out(seeds, is_equal):
    """Of 12 methods whose scores vary by 0.3 to 5 points; some are as good as the best, or all are."""
    generator, left_out, uncorrected = np.random.default_rng(seeds), 0.0, 0.0
    behind = np.zeros(12) if is_equal else np.array([0, 0, *[1.0] * 5, *[4.0] * 5])
    for _ in range(400):
        spread = generator.permutation(np.geomspace(0.3, 5, 12))
        scores = (generator.normal(90 - behind, spread, (seeds, 12)) + generator.normal(0, 2, (seeds, 1))) / 100
        p = standing(np.round(scores * 360) / 360).p[behind == 0]
        left_out += (p <= 0.05).mean() / 400
        uncorrected += (p / 11 <= 0.05).mean() / 400
    assert left_out <= 0.06
    assert uncorrected > 0.1 or not is_equal


def test_seeds_and_records_are_both_random():
    """Intervals of 95 % hold the truth in 95 % of simulated seeds and records, those of seeds alone do not."""
    generator, held, held_by_seeds = np.random.default_rng(0), 0, 0
    for _ in range(300):
        seeds, records = generator.normal(0, 0.002, (5, 1)), generator.normal(0, 0.15, (1, 400))
        values = 0.01 + seeds + records + generator.normal(0, 0.2, (5, 400))
        both, alone = crossed(values), difference(values.mean(axis=1))
        held, held_by_seeds = held + (both.low <= 0.01 <= both.high), held_by_seeds + (alone.low <= 0.01 <= alone.high)
        assert both.mean == pytest.approx(alone.mean)
    assert 0.92 <= held / 300 <= 0.98
    assert held_by_seeds / 300 < 0.9


def test_without_an_effect_of_records_the_interval_is_that_of_seeds():
    values = np.random.default_rng(0).normal(0, 1, (6, 1)) + np.zeros((6, 50))
    assert crossed(values, 3) == pytest.approx(difference(values[:, 0], 3))
    assert crossed(np.full((3, 8), 0.25))[1:] == (0.25, 0.25, 0.0)
    assert np.isnan(crossed(values[:1]).p)
    by_luck = np.zeros((2, 360))  # both seeds have the same mean, of other records
    by_luck[0, [0, 1]] = by_luck[1, [2, 3]] = 1
    assert crossed(by_luck).p > 0.04


def test_what_is_visible_is_where_the_test_decides():
    base, generator = np.zeros(4), np.random.default_rng(0)
    noise = generator.normal(0, 1, 4)
    visible = standing(np.column_stack([base, noise - noise.mean()])).visible
    for factor, is_shown in ((1.01, True), (0.99, False)):
        found = standing(np.column_stack([base, noise - noise.mean() - factor * visible]))
        assert found.may_be_best.tolist() == [True, not is_shown]


def test_what_is_visible_is_that_of_methods_in_any_order():
    """Also where two of them share too few seeds, and so have one rival fewer than the third."""
    first = [[0.5, 0.4, np.nan], [0.61, 0.43, np.nan], [0.6, 0.45, 0.7]]
    scores = np.array([*first, [0.62, np.nan, 0.75], [0.55, np.nan, 0.6]])
    assert len({standing(scores[:, order]).visible for order in map(list, permutations(range(3)))}) == 1


def test_friedmans_p_is_that_of_all_permutations():
    ranks = np.array([[1, 2, 3], [1, 3, 2], [1, 2, 3], [2, 1, 3]], dtype=float)
    observed = ((ranks.sum(axis=0) - 8) ** 2).sum()
    rows = list(permutations((1.0, 2.0, 3.0)))
    every = [((np.sum(rest, axis=0) - 8) ** 2).sum() >= observed for rest in product(rows, repeat=4)]
    assert friedman(ranks) == pytest.approx(np.mean(every), abs=0.015)
    assert friedman(np.full((4, 3), 2.0)) == 1
    tied = scipy.stats.rankdata(np.random.default_rng(0).integers(0, 4, (9, 5)), axis=1)
    assert friedman(tied) == pytest.approx(scipy.stats.friedmanchisquare(*tied.T).pvalue, abs=0.05)


def test_the_critical_difference_of_demsars_example():
    """Four variants of C4.5 on 14 data sets (Demšar 2006, section 3.2.2)."""
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
