import numpy as np
import pytest
import torch
from scipy import stats

from dpopt.privacy import sampling


def test_draws_are_a_function_of_seed_and_number():
    first = sampling.poisson_rows(5, 7, 1000, 0.1)
    sampling.poisson_rows(5, 8, 1000, 0.1)
    np.testing.assert_array_equal(sampling.poisson_rows(5, 7, 1000, 0.1), first)
    assert not np.array_equal(sampling.poisson_rows(5, 8, 1000, 0.1), first)
    assert not np.array_equal(sampling.poisson_rows(6, 7, 1000, 0.1), first)


def test_every_record_joins_on_its_own_with_the_rate():
    """Marginals, pairs and sizes over 4,000 draws; a shuffle would fail the size test, a fixed size the pair test."""
    member = np.zeros((4000, 60))
    for draw in range(len(member)):
        member[draw, sampling.poisson_rows(1, draw, 60, 0.3)] = 1
    sizes = member.sum(1)
    assert stats.binomtest(int(member.sum()), member.size, 0.3).pvalue > 1e-6
    observed = np.bincount(sizes.astype(int), minlength=61)[10:27]
    expected = stats.binom.pmf(np.arange(10, 27), 60, 0.3)
    assert stats.chisquare(observed, expected / expected.sum() * observed.sum()).pvalue > 1e-6
    correlation = np.corrcoef(member.T)[np.triu_indices(60, 1)] * np.sqrt(len(member))
    assert stats.kstest(correlation, "norm").pvalue > 1e-6


def test_rate_one_takes_everyone_and_a_draw_may_be_empty():
    np.testing.assert_array_equal(sampling.poisson_rows(0, 0, 50, 1.0), np.arange(50))
    assert len(sampling.poisson_rows(0, 0, 50, 1e-12)) == 0


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 23])
def test_physical_batches_hold_every_row_once(count):
    rows = np.arange(100, 100 + count)
    batches = sampling.physical_batches(rows, 8)
    assert all(len(part) == len(mask) == 8 for part, mask in batches)
    np.testing.assert_array_equal(np.concatenate([part[mask] for part, mask in batches] or [rows]), rows)
    assert len(batches) == -(-count // 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_standard_normal_and_never_repeats(dtype):
    first = sampling.gaussian(3, 0, 0, 200_000, dtype)
    assert first.dtype == dtype
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-6
    assert float(first.abs().max()) > 4
    for draw, release in ((0, 1), (1, 0), (2**40, 0)):
        other = sampling.gaussian(3, draw, release, 200_000, dtype)
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 5 / 200_000**0.5
    assert torch.equal(sampling.gaussian(3, 0, 0, 200_000, dtype), first)


def test_noise_seeds_do_not_collide_where_32_bits_would():
    """torch's CPU generator keeps 32 bits of a seed: keys 2^32 apart would share all their noise."""
    a, b = (sampling.gaussian(seed, 0, 0, 8, torch.float32) for seed in (1, 1 + 2**32))
    assert not torch.equal(a, b)


def test_membership_and_noise_never_share_a_stream():
    members = sampling._stream(9, sampling._ROWS, 3).random(4)
    noise = sampling._stream(9, sampling._NOISE, 3).random(4)
    assert not np.allclose(members, noise)


def test_derived_seeds():
    assert sampling.derive("a", 1) == sampling.derive("a", 1)
    assert (
        len({sampling.derive("a", 1), sampling.derive("a", 2), sampling.derive("b", 1), sampling.derive(["a", 1])}) == 4
    )
    assert 0 <= sampling.derive("x") < 2**128
