"""What one record contributes to each kind of release, and what a kind of one's own must be."""

import math
from dataclasses import dataclass

import pytest
import torch

from dpopt.errors import ConfigError
from dpopt.privacy import Query
from dpopt.privacy.queries import Below, Losses, Space, contributions, read
from dpopt.types import Record

D = 3
SPACE = Space(D, torch.float32, torch.device("cpu"))
BOUNDS = pytest.mark.parametrize("convert", [float, torch.tensor], ids=["float", "tensor"])


@BOUNDS
def test_a_loss_is_clipped_to_zero_and_the_bound_and_centred(convert):
    """A loss may be negative, as a log-likelihood of densities is."""
    losses = torch.tensor([-3.0, 0.0, 0.5, 2.0, 7.0], dtype=torch.float64)
    query = Losses([torch.zeros(D)] * len(losses), convert(2.0))
    found = query.contribution(Record(losses, torch.tensor(1.0)))
    assert found.tolist() == [-1.0, -1.0, -0.5, 1.0, 1.0]
    assert float(found.abs().max()) == query.sensitivity == query.centre


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_no_contribution(loss):
    record = Record(torch.tensor([loss], dtype=torch.float64), torch.tensor(1.0))
    assert not Losses([torch.zeros(D)], 2.0).contribution(record).isfinite()


@BOUNDS
@pytest.mark.parametrize(
    ("norm", "expected"), [(0.0, 0.5), (0.999, 0.5), (1.0, 0.5), (1.001, -0.5), (math.inf, -0.5), (math.nan, -0.5)]
)
def test_a_norm_that_is_not_longer_than_the_bound_counts(convert, norm, expected):
    query = Below(convert(1.0))
    assert query.contribution(Record(torch.zeros(0), torch.tensor(norm))).tolist() == [expected]
    assert query.sensitivity == abs(expected)


def asked(said, made=1):
    """A kind of one's own, as the kernel reads it, that says it makes `said` releases, and makes `made`."""

    @dataclass(frozen=True)
    class Own(Query):
        kind = "own"
        sensitivity = 1.0
        releases = said

        def contribution(self, record):
            return record.norm.expand(made)

    return read(Own(), SPACE)


@pytest.mark.parametrize("releases", [0, -1, 1.0, "1"])
def test_a_query_makes_at_least_one_release(releases):
    with pytest.raises(ConfigError, match=r"own\.releases"):
        asked(releases)


@pytest.mark.parametrize(("said", "made"), [(1, 2), (2, 1), (1, 0)])
def test_a_query_makes_as_many_releases_as_it_says(said, made):
    with pytest.raises(ConfigError, match=f"one number for each of {said} releases"):
        asked(said, made)


def test_contributions_are_a_row_for_each_release():
    norms = torch.tensor([0.5, 1.5, 2.5])
    found = contributions(asked(2, 2), torch.zeros(0, 3), norms)
    torch.testing.assert_close(found, norms.expand(2, 3))
