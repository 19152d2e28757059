"""Statistics against worked examples, enumeration, and simulation with a known truth."""

from itertools import chain, combinations, permutations, product

import numpy as np
import pytest
import scipy.stats

from dpopt.analysis.statistics import BCA_FROM, cliques, critical_difference, difference, friedman, holm, profile


@pytest.mark.parametrize("pairs", [BCA_FROM - 2, 20])
def test_intervals_cover_a_known_difference(pairs):
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        seeds = generator.normal(0, 3, pairs)  # what pairs have in common cancels
        ours, best = seeds + 1 + generator.normal(0, 0.5, pairs), seeds + generator.normal(0, 0.5, pairs)
        found = difference(ours - best)
        covered += found.low <= 1 <= found.high
        assert found.low < found.mean < found.high
        assert found.high - found.low < 2.5
    assert 0.9 <= covered / 200 < 1


def test_few_pairs_claim_little():
    found = difference(np.array([0.01, 0.02, 0.06]))
    assert found.mean == pytest.approx(0.03)
    assert (found.low, found.high) == pytest.approx((0.01, 0.06))
    assert found.p == pytest.approx(2 / 2**3)


def test_sign_flips_are_counted_exactly():
    values = np.array([0.3, -0.1, 0.5, 0.2, 0.7])
    flipped = [np.dot(signs, values) for signs in product((-1, 1), repeat=len(values))]
    extreme = np.mean(np.abs(flipped) >= values.sum() - 1e-12)
    assert difference(values).p == pytest.approx(extreme)


def test_a_single_pair_and_equal_pairs():
    assert np.isnan(difference(np.array([0.5]))[1:]).all()
    assert difference(np.array([0.5, 0.5]))[:3] == (0.5, 0.5, 0.5)
    assert difference(np.zeros(4)).p == 1


def test_holm_of_a_worked_example():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.6, np.nan, 0.02])) == pytest.approx([0.6, np.nan, 0.04], nan_ok=True)


def test_holm_is_the_closure_of_bonferroni():
    """A hypothesis is rejected where Bonferroni rejects every intersection that it is part of."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        p = generator.random(5) ** 2
        subsets = list(chain.from_iterable(combinations(range(5), size) for size in range(1, 6)))
        closed = [max(min(1, len(s) * p[list(s)].min()) for s in subsets if index in s) for index in range(5)]
        assert holm(p) == pytest.approx(closed)


def test_friedmans_statistic_is_scipys():
    scores = np.random.default_rng(0).integers(0, 4, (9, 5))  # with ties
    ranks = scipy.stats.rankdata(scores, axis=1)
    expected = scipy.stats.friedmanchisquare(*scores.T)
    assert friedman(ranks).statistic == pytest.approx(expected.statistic)
    assert friedman(ranks).p == pytest.approx(expected.pvalue, abs=0.05)


def test_friedmans_p_is_that_of_all_permutations():
    ranks = np.array([[1, 2, 3], [1, 3, 2], [1, 2, 3], [2, 1, 3]], dtype=float)
    observed = ((ranks.sum(axis=0) - 8) ** 2).sum()
    rows = list(permutations((1.0, 2.0, 3.0)))
    every = [((np.sum(rest, axis=0) - 8) ** 2).sum() >= observed for rest in product(rows, repeat=4)]
    assert friedman(ranks).p == pytest.approx(np.mean(every), abs=0.015)
    assert friedman(np.full((4, 3), 2.0)) == (0, 1)


def test_the_critical_difference_of_demsars_example():
    """Four variants of C4.5 on 14 data sets (Demšar 2006, section 3.2.2)."""
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


def test_cliques_are_the_largest_groups():
    averages = np.array([1.0, 1.9, 2.5, 4.0, 4.2])
    assert cliques(averages, 1.0) == [(0, 1), (1, 2), (3, 4)]
    assert cliques(averages, 0.1) == []
    assert cliques(averages, 9.0) == [(0, 4)]


def test_a_profile_counts_blocks_within_a_distance():
    distances, shares = profile(np.array([0.0, 2.0, 0.5, np.inf, 2.0]))
    assert distances.tolist() == [0, 0.5, 2]
    assert shares.tolist() == [0.2, 0.4, 0.8]
    distances, shares = profile(np.array([np.inf, 1.0]))
    assert (distances.tolist(), shares.tolist()) == ([0, 1], [0, 0.5])
