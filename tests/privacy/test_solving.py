"""The search for the noise, on costs that are formulas."""

import math

import pytest

from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger
from dpopt.privacy.solving import FAR, NOISE_RANGE, TOLERANCE, solve_noise


def solve(truth, quick, epsilon, accountant="pld"):
    """The noise that costs `epsilon` where noise costs `truth(noise)`, or `quick(noise)` by RDP; and what was asked."""
    asked = []

    def charge(ledger, delta, by):
        (noise,) = next(iter(ledger)).noises
        asked.append((by, noise))
        return quick(noise) if by == "rdp" else truth(noise)

    return solve_noise(lambda noise: Ledger([Draw(1.0, (noise,))]), epsilon, 1e-5, accountant, charge), asked


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 3.0, 8.0, 60.0])
@pytest.mark.parametrize("loose", [1.0, 1.1, 5.0, 30.0, 1000.0])
def test_the_cost_is_just_below_the_target_however_loose_the_guess(epsilon, loose):
    noise, _ = solve(lambda noise: 20 / noise, lambda noise: loose * 20 / noise, epsilon)
    assert 20 / noise <= epsilon
    if loose * epsilon < max(FAR, 2 * epsilon):  # where RDP says more, its own noise is near enough
        assert 20 / noise >= (1 - 2 * TOLERANCE) * epsilon


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_a_guess_that_cannot_reach_the_target_is_a_guess(epsilon):
    """RDP's cost may have a floor, which no noise gets below."""
    noise, _ = solve(lambda noise: 2 / noise, lambda noise: 4 + 2 / noise, epsilon)
    assert (1 - 2 * TOLERANCE) * epsilon <= 2 / noise <= epsilon


def test_a_cost_that_jumps_ends_on_its_safe_side():
    noise, _ = solve(lambda noise: 2.0 if noise < 3 else 0.5, lambda noise: 2 / noise, 1.0)
    assert noise == pytest.approx(3, rel=1e-4)
    assert noise >= 3


def test_a_target_that_the_least_noise_meets():
    noise, _ = solve(lambda noise: 1 / noise, lambda noise: 1 / noise, 100.0)
    assert noise == pytest.approx(NOISE_RANGE[0])


def test_a_target_that_no_noise_meets_is_refused():
    with pytest.raises(ConfigError, match="not reached"):
        solve(lambda noise: 1 + 1 / noise, lambda noise: 1 / noise, 1.0)


def test_dear_evaluations_are_few_and_none_far_above_the_target():
    """A privacy loss distribution grows with epsilon."""
    _, asked = solve(lambda noise: 2 / noise, lambda noise: 2.2 / noise, 1.0)
    dear = [noise for by, noise in asked if by == "pld"]
    assert len(dear) < 15
    assert max(2.2 / noise for noise in dear) <= 2.5
    assert math.isfinite(sum(dear))
