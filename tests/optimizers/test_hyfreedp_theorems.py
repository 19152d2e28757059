"""Theorem 1, Corollary 1 and Table 1 of the HyFreeDP paper, for losses and gradients as an oracle releases them.

Liu and Bu, "Towards hyperparameter-free optimization with differential privacy", ICLR 2025. Two things differ from the
paper here. Losses are clipped to [0, R_l]: Eq. 7 as printed turns a negative loss into R_l, as min(R_l/L, 1) L = R_l.
And they are centred at R_l/2, so that the noise is sigma_l R_l/(2B) at the same noise multiplier, half of Table 1's.
"""

import math

import numpy as np
import pytest
import torch
from scipy.stats import expon, norm
from torch import nn

from dpopt.clipping import engine
from dpopt.privacy import DataOracle, Draw, Ledger, Plan

SIGMA = 1.5


def oracle(losses, rate=1.0, noise=0.0, releases=1, draws=1):
    """One of records with these losses [n] at theta = 0 and no gradient, for draws of `releases` releases."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    clipping = engine(model, lambda output, target: output.squeeze(-1) + target)
    ledger = Ledger([Draw(rate, (noise,) * releases)] * draws)
    plan = Plan({"gradient": noise, "losses": noise}, ledger, 1.0, rate, draws, 1, 1e-5, "pld")
    x = torch.zeros(len(losses), 1, dtype=torch.float64)
    return DataOracle(clipping, x, losses, plan, draw_seed=1, noise_seed=2)


def released(asked, bound, points=1):
    """The release of the losses of one draw, `points` times with a noise of its own."""
    with asked.draw() as batch:
        return batch.losses([torch.zeros(1).double()] * points, bound)


def quantiles(distribution, n):
    """Those of n equally distant probabilities, which stand for the distribution."""
    return torch.from_numpy(distribution.ppf((np.arange(n) + 0.5) / n))


def bias(losses, bound):
    return float(released(oracle(losses), bound).value - losses.mean())


def test_clipping_bias_is_theorem_1s():
    """|E L~ - mean L| = (1/B) sum_i (L_i - R_l) 1(L_i > R_l), which falls in R_l and is 0 from the largest loss on."""
    losses = quantiles(expon(scale=2), 2000)
    bounds = (0.5, 1.0, 2.0, 4.0, float(losses.max()))
    biases = [bias(losses, bound) for bound in bounds]
    expected = [-sum(loss - bound for loss in losses.tolist() if loss > bound) / len(losses) for bound in bounds]
    assert biases == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert biases == sorted(biases)
    # Its limit, (E[L | L > R_l] - R_l) P(L > R_l), is 2 exp(-R_l/2) for the exponential distribution of mean 2.
    assert biases[:4] == pytest.approx([-2 * math.exp(-bound / 2) for bound in bounds[:4]], rel=0.02)


def test_variance_is_theorem_1s_for_one_batch():
    """Var L~ = (sigma_l R_l/B)^2, here of half the noise; and E |noise| = sqrt(2/pi) of its root (Table 1)."""
    losses, points = quantiles(expon(scale=2), 50), 1000
    for bound in (1.0, 3.0):
        asked, std = oracle(losses, noise=SIGMA, releases=points), SIGMA * bound / 2 / len(losses)
        release = released(asked, bound, points)
        noise = release.value - losses.clamp(max=bound).mean()
        assert float(noise.var()) == pytest.approx(std**2, rel=5 * math.sqrt(2 / points))
        assert float(noise.abs().mean()) == pytest.approx(math.sqrt(2 / math.pi) * std, rel=4 / math.sqrt(points))
        assert float(release.std) == pytest.approx(std)


def test_variance_over_batches_is_larger_than_theorem_1s():
    """Sampling adds (1 - q)/(q n^2) sum_i (c_i - R_l/2)^2, c_i the clipped losses, and leaves the mean as it is."""
    losses, q, bound, draws = quantiles(expon(scale=2), 200), 0.25, 3.0, 400
    clipped, asked = losses.clamp(max=bound), oracle(losses, rate=q, noise=SIGMA, draws=draws)
    measured = torch.cat([released(asked, bound).value for _ in range(draws)])
    sampling = (1 - q) / (q * len(losses) ** 2) * float((clipped - bound / 2).square().sum())
    variance = (SIGMA * bound / 2 / (q * len(losses))) ** 2 + sampling
    assert float(measured.var()) == pytest.approx(variance, rel=3 * math.sqrt(2 / draws))
    assert float(measured.mean() - clipped.mean()) == pytest.approx(0, abs=4 * math.sqrt(variance / draws))


@pytest.mark.parametrize(("mu", "alpha"), [(0.5, 0.0), (0.5, 2.0), (3.0, 1.0), (12.0, 0.0), (12.0, 2.0)])
def test_bias_of_gaussian_losses_is_corollary_1s(mu, alpha):
    """L_i ~ N(mu, xi^2): the bias is xi h(alpha), h(a) = phi(a) - a (1 - Phi(a)), alpha = (R_l - mu)/xi (Eq. 8).

    Eq. 8 is about min(L, R_l); clipping at 0 too adds xi h(mu/xi) in the other direction, which is 0 at mu = 8 xi.
    """
    xi = 1.5
    above, below = (xi * (norm.pdf(a) - a * norm.sf(a)) for a in (alpha, mu / xi))
    assert bias(quantiles(norm(mu, xi), 20_000), mu + alpha * xi) == pytest.approx(below - above, abs=1e-4)
