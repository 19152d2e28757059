"""Each sentence that `dpopt.privacy.sampling` promises, against the distributions themselves."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noise import gaussian
from scipy import stats
from torch import nn

from dpopt.clipping import Abadi, engine
from dpopt.privacy import DataOracle, Draw, Ledger, Plan, sampling

SAMPLES = 5 * 10**6
UNLIKELY = 1e-6
"""Smallest p-value that chance is believed to give."""

SEEDS = st.integers(0, 2**128 - 1)


@pytest.fixture(scope="module")
def normals():
    """Float32 noise of 20 releases, shape [20, SAMPLES / 20]."""
    parts = [gaussian(17, draw, draw % 3, SAMPLES // 20) for draw in range(20)]
    return torch.stack(parts).numpy()


def membership(seed, draws, examples, rate):
    """Who is in which draw: bool [draws, examples]."""
    member = np.zeros((draws, examples), dtype=bool)
    for draw in range(draws):
        member[draw, sampling.poisson_rows(seed, draw, examples, rate)] = True
    return member


def correlations(a, b):
    """Correlation of each column of `a` with the same column of `b`, times the root of their length: normal."""
    a, b = (part - part.mean(0) for part in (a.astype(float), b.astype(float)))
    return (a * b).sum(0) / np.sqrt((a * a).sum(0) * (b * b).sum(0)) * math.sqrt(len(a))


# Who is in a draw.


@given(seed=SEEDS, draw=st.integers(0, 2**40), examples=st.integers(1, 3000), rate=st.floats(1e-6, 1))
def test_rows_are_in_range_ascending_and_the_same_each_time(seed, draw, examples, rate):
    rows = sampling.poisson_rows(seed, draw, examples, rate)
    assert rows.dtype == np.int64
    assert (np.diff(rows) > 0).all()
    assert not len(rows) or (rows[0] >= 0 and rows[-1] < examples)
    np.testing.assert_array_equal(sampling.poisson_rows(seed, draw, examples, rate), rows)


@given(seed=SEEDS, draw=st.integers(0, 2**40), examples=st.integers(1, 500), more=st.integers(1, 500))
def test_a_records_membership_does_not_depend_on_the_records_after_it(seed, draw, examples, more):
    """What add/remove adjacency asks of the sampler: everyone else joins as if the record were not there."""
    rows = sampling.poisson_rows(seed, draw, examples + more, 0.3)
    np.testing.assert_array_equal(sampling.poisson_rows(seed, draw, examples, 0.3), rows[rows < examples])


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_each_record_joins_as_often_as_the_rate_says(rate):
    member = membership(3, 5000, 400, rate)
    expected = len(member) * rate * (1 - rate)
    statistic = ((member.sum(0) - len(member) * rate) ** 2).sum() / expected
    assert UNLIKELY < stats.chi2.sf(statistic, member.shape[1]) < 1 - UNLIKELY
    statistic = ((member.sum(1) - member.shape[1] * rate) ** 2).sum() / (member.shape[1] * rate * (1 - rate))
    assert UNLIKELY < stats.chi2.sf(statistic, len(member)) < 1 - UNLIKELY


@pytest.mark.parametrize("lag", [1, 64])
def test_draws_do_not_depend_on_each_other_nor_records(lag):
    member = membership(4, 6000, 400, 0.3)
    for pair in (
        (member[lag:], member[:-lag]),  # the same record in two draws
        (member[:, lag:], member[:, :-lag]),  # two records in the same draw
        (member[lag:, lag:], member[:-lag, :-lag]),
    ):
        assert stats.kstest(correlations(*pair), "norm").pvalue > UNLIKELY


@pytest.mark.parametrize("other", [5 + 1, 5 ^ 2**127])
def test_seeds_that_differ_in_any_bit_draw_independently(other):
    a, b = (membership(seed, 6000, 100, 0.3) for seed in (5, other))
    assert stats.kstest(correlations(a, b), "norm").pvalue > UNLIKELY


@given(split=st.integers(0, 6), seeds=st.tuples(SEEDS, SEEDS))
def test_a_run_goes_on_anywhere_with_the_same_draws_and_noise(split, seeds):
    model = engine(nn.Linear(3, 1, bias=False), lambda output, y: (output.squeeze(1) - y).square(), "vmap")
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(20, 3, generator=generator), torch.randn(20, generator=generator)
    draw = Draw(0.3, (1.0, 2.0, 2.0))
    plan = Plan({"gradient": 1.0, "losses": 2.0}, Ledger([draw] * 6), 1.0, 0.3, 6, 3, 1e-5, "pld")

    def releases(taken, until):
        """What the draws `taken` to `until` release, as after an interruption."""
        ledger = Ledger([draw] * taken)
        oracle = DataOracle(model, x, y, plan, draw_seed=seeds[0], noise_seed=seeds[1], ledger=ledger)
        for _ in range(taken, until):
            with oracle.draw() as batch:
                yield batch.gradient(torch.ones(3), Abadi(1.0)).value
                yield batch.losses([torch.ones(3), torch.zeros(3)], 1.0).value

    whole, parts = [*releases(0, 6)], [*releases(0, split), *releases(split, 6)]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


# Noise.


def test_both_tails_are_as_heavy_as_a_normals(normals):
    for bound, sign in product((1, 2, 3, 4), (1, -1)):
        beyond, expected = int((sign * normals > bound).sum()), SAMPLES * stats.norm.sf(bound)
        assert stats.poisson.cdf(beyond, expected) > UNLIKELY
        assert stats.poisson.sf(beyond - 1, expected) > UNLIKELY


def test_the_whole_distribution_is_a_normals(normals):
    assert stats.kstest(normals.ravel(), "norm").pvalue > UNLIKELY


def test_the_distribution_of_pairs_is_round(normals):
    """Both numbers of a word: the angle is uniform, the squared radius exponential, and neither tells of the other."""
    block = normals[:, : 7 * sampling.CPU_BLOCK].reshape(-1, 2, sampling.CPU_BLOCK // 2).astype(np.float64)
    cos, sin = block[:, 0].ravel(), block[:, 1].ravel()
    angle, square = np.arctan2(sin, cos), (cos**2 + sin**2) / 2
    assert stats.kstest(angle, "uniform", (-math.pi, 2 * math.pi)).pvalue > UNLIKELY
    assert stats.kstest(square, "expon").pvalue > UNLIKELY
    cells = np.histogram2d(angle, stats.expon.cdf(square), bins=40)[0]
    assert stats.chisquare(cells.ravel()).pvalue > UNLIKELY


def test_releases_draws_and_blocks_do_not_depend_on_each_other(normals):
    """Correlations, and those of squares, between releases, between neighbours at lags up to a block and across it."""
    root = math.sqrt(normals.shape[1])
    for values in (normals, normals**2 - 1):
        between = np.corrcoef(values)[np.triu_indices(len(values), 1)] * root
        assert stats.kstest(between, "norm").pvalue > UNLIKELY
        flat = values.ravel().astype(np.float64)
        lags = [1, 2, 3, 64, *(sampling.CPU_BLOCK // 2 + i for i in (-1, 0, 1)), sampling.CPU_BLOCK]
        lagged = [np.corrcoef(flat[lag:], flat[:-lag])[0, 1] * math.sqrt(len(flat) - lag) for lag in lags]
        assert np.abs(lagged).max() < 5.5


class Words:
    """A source that gives the words it was made of, and for the tail those of `upper`, one after the other."""

    def __init__(self, words, upper=()):
        self.words, self.upper, self.further = words, list(upper), self

    def take(self, count):
        if count == 1 and self.upper:
            return np.array([self.upper.pop(0) << 24], dtype=np.uint64)
        assert count == len(self.words)
        return self.words


def made_of(words):
    """The two normals of each word, shape [2, n]."""
    return sampling._box_muller(Words(words), 2 * len(words), 1.0).reshape(2, -1)


def radii(upper):
    """The radius that each value of a word's upper 40 bits gives."""
    return made_of(np.asarray(upper, dtype=np.uint64) << np.uint64(24))[0]


def test_the_radius_is_the_promised_function_of_the_upper_bits():
    upper = np.random.default_rng(0).integers(0, 2**40, 10**6) >> np.random.default_rng(1).integers(0, 40, 10**6)
    upper = np.maximum(upper, 1)
    exact = np.sqrt(-2 * np.log((upper + 0.5) / 2**40))
    # Rounding u to 24 bits moves log u by 2^-24, and so the radius by 2^-24 / r, which counts for small ones.
    error = np.abs(radii(upper) - exact)
    assert (error <= 4e-7 * exact + 2**-24 / np.maximum(exact, 2**-12)).all()


def tail(*upper):
    """The radius where the upper bits of a word are 0, and those of the words after it are `upper`."""
    words = Words(np.zeros(2, dtype=np.uint64), upper * 2)
    return sampling._box_muller(words, 4, 1.0)[:2]


def test_the_tail_does_not_end():
    """Below u = 2^-40 further words decide: the radius goes on where that of k = 1 ends, and never ends itself."""
    edge = math.sqrt(80 * math.log(2))
    largest, middle, least, deeper = (tail(*upper)[0] for upper in ((2**40 - 1,), (2**39,), (1,), (0, 0, 1)))
    assert largest == pytest.approx(edge, rel=1e-6)
    assert middle == pytest.approx(math.sqrt(82 * math.log(2)), rel=1e-6)
    assert least == pytest.approx(math.sqrt(2 * (80 * math.log(2) - math.log(1.5))), rel=1e-6)
    assert deeper == pytest.approx(math.sqrt(2 * (160 * math.log(2) - math.log(1.5))), rel=1e-6)
    assert radii([1])[0] < edge
    assert (np.diff(radii(np.arange(1, 10**5))) <= 0).all()


def test_the_tail_has_the_mass_of_a_normal_one():
    upper = np.random.default_rng(3).integers(1, 2**40, 4000)
    beyond = np.array([tail(int(k))[0] for k in upper], dtype=np.float64)
    # r^2/2 beyond the edge is an exponential, as it is everywhere.
    assert stats.kstest(beyond**2 / 2 - 40 * math.log(2), "expon").pvalue > UNLIKELY


def test_words_of_the_tail_are_no_other_ones():
    words = sampling._Words(5, 1, 2)
    again = sampling._Words(5, 1, 2)
    assert again.further.take(4).tolist() == words.further.take(4).tolist()
    assert not set(words.further.take(1000).tolist()) & set(sampling._Words(5, 1, 2).take(10**5).tolist())
    assert words.take(4).tolist() == sampling._Words(5, 1, 2).take(4).tolist()


def test_a_devices_normals_are_sums_of_two():
    """Standard normal, and out to sqrt(2) times as far as torch's own."""
    made = sampling._long_tailed(torch.empty(10**6), torch.Generator().manual_seed(1)).numpy()
    assert stats.kstest(made, "norm").pvalue > UNLIKELY
    first, second = torch.randn(2, 10**6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.from_numpy(made), (first + second) / math.sqrt(2))


def test_the_lower_bits_are_the_angle():
    radius, distinct = math.sqrt(2 * math.log(2)), 0
    for angle in np.arange(2**24, dtype=np.uint64).reshape(64, -1)[::4]:
        cos, sin = made_of(angle + np.uint64(2**63))
        exact = angle * (2 * math.pi / 2**24)
        assert np.abs(cos - radius * np.cos(exact)).max() < 7e-7
        assert np.abs(sin - radius * np.sin(exact)).max() < 7e-7
        distinct += len(np.unique(cos.view(np.uint32).astype(np.uint64) << np.uint64(32) | sin.view(np.uint32)))
    assert distinct / 2**22 == pytest.approx(0.92, abs=0.01)


@given(seed=SEEDS, draw=st.integers(0, 2**40), release=st.integers(0, 2**20), size=st.integers(1, 70_000))
def test_a_shorter_release_is_no_other_one(seed, draw, release, size):
    """All is a function of (seed, draw, release): no state, and any two of them give different noise."""
    noise = gaussian(seed, draw, release, size)
    assert noise.shape == (size,)
    assert noise.isfinite().all()
    assert torch.equal(gaussian(seed, draw, release, size), noise)
    seeds = [seed ^ bit for bit in (1, 2**32, 2**64, 2**127)]  # torch's CPU generator keeps 32 bits of a seed
    for other in (*((each, draw, release) for each in seeds), (seed, draw + 1, release), (seed, draw, release + 1)):
        assert not torch.equal(gaussian(*other, max(size, 2), torch.float32)[:size], noise) or size == 1


def test_float64_noise_has_long_tails_and_a_fine_grid():
    values = gaussian(1, 0, 0, 10**6, torch.float64).numpy()
    assert stats.kstest(values, "norm").pvalue > UNLIKELY
    assert len(np.unique(values)) == len(values)
    for bound in (2, 3, 4):
        beyond, expected = int((np.abs(values) > bound).sum()), len(values) * 2 * stats.norm.sf(bound)
        assert UNLIKELY < stats.poisson.cdf(beyond, expected) < 1 - UNLIKELY


def test_secret_seeds_have_all_their_bits():
    seeds = [sampling.secret_seed() for _ in range(200)]
    assert all(50 <= sum(seed >> bit & 1 for seed in seeds) <= 150 for bit in range(128))
    assert max(seeds) < 2**128
