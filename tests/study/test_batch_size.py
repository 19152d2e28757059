import math
from itertools import pairwise

import pytest
from scipy import optimize, stats

from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger, epsilon
from dpopt.study.batch_size import Noise, best_batch, noise_table

PROBLEM = {"examples": 2000, "epochs": 10, "epsilon": 1.0, "delta": 1e-5, "accountant": "rdp"}
MADE = [Noise(8, 100, 1.5), Noise(16, 49, 1.5), Noise(32, 25, 2.04), Noise(64, 16, 2.5), Noise(128, 4, 4.0)]
"""Cumulative noise 15, 10.5, 10.2, 10 and 8."""


def test_noise_is_what_the_target_needs():
    for row in noise_table([20, 200, 2000], **PROBLEM):
        assert row.steps == 20_000 // row.batch_size
        for factor, is_within in ((1.0, True), (0.999, False)):
            ledger = Ledger()
            ledger.append(Draw(row.batch_size / 2000, (factor * row.noise_multiplier,)), row.steps)
            assert (epsilon(ledger, 1e-5, "rdp") <= 1.0) == is_within


def test_full_batches_add_up_to_the_gaussian_mechanism():
    """T full batches at sigma cost what one does at sigma / sqrt(T), which Balle and Wang (2018) give exactly."""

    def excess(noise):
        a, b = 1 / (2 * noise) - noise, -1 / (2 * noise) - noise
        return stats.norm.cdf(a) - math.e * stats.norm.cdf(b) - 1e-5

    exact = optimize.brentq(excess, 0.5, 50)
    for epochs in (3, 30):
        (row,) = noise_table([2000], **{**PROBLEM, "epochs": epochs, "accountant": "pld"})
        assert row.steps == epochs
        assert row.cumulative == pytest.approx(epochs * exact, rel=1e-3)


@pytest.mark.slow
def test_cumulative_noise_saturates():
    rows = list(noise_table([8, 64, 256, 512], **PROBLEM))
    assert best_batch(rows) == rows[1]
    assert rows[0].cumulative > 1.15 * rows[1].cumulative
    for smaller, larger in pairwise(rows):  # the noise of a step falls up to the largest
        assert larger.noise_multiplier / larger.batch_size < 0.75 * smaller.noise_multiplier / smaller.batch_size


def test_best_batch_is_the_smallest_of_the_plateau_that_leaves_enough_steps():
    assert best_batch(MADE, 0.05, min_steps=10) == MADE[1]
    assert best_batch(MADE, 0.025, min_steps=10) == MADE[2]
    assert best_batch(MADE, 0.0, min_steps=1) == MADE[4]
    assert best_batch(MADE, 0.32, min_steps=1) == MADE[1]
    assert best_batch(MADE, 0.05, min_steps=50) == MADE[0]
    assert best_batch(MADE) == MADE[1]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: best_batch([]), "table"),
        (lambda: best_batch(MADE, -0.1), "tolerance"),
        (lambda: best_batch(MADE, min_steps=0), "min_steps"),
        (lambda: best_batch(MADE, min_steps=101), "at most 100"),
        (lambda: list(noise_table([3000], **PROBLEM)), "batch_size"),
        (lambda: list(noise_table([10], **{**PROBLEM, "epochs": 0})), "epochs"),
        (lambda: list(noise_table([10], **{**PROBLEM, "epsilon": math.inf})), "epsilon"),
        (lambda: list(noise_table([10], **{**PROBLEM, "delta": 0.0})), "delta"),
    ],
)
def test_bad_input(function, name):
    with pytest.raises(ConfigError, match=name):
        function()
