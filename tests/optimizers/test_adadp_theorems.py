"""Lemma 1 and Theorems 8 and 10 of the ADADP paper (Koskela and Honkela, AISTATS 2020), for the optimizer on data."""

import math

import pytest
import torch
from torch import nn

import dpopt
from dpopt.audit.estimators import gaussian_epsilon
from dpopt.clipping import Abadi, engine
from dpopt.privacy import DataOracle, Draw, Ledger, Plan, epsilon

N = 4


class Scalar(nn.Module):
    """The same loss `function`(theta) for each record."""

    def __init__(self, function, start):
        super().__init__()
        self.theta, self.function = nn.Parameter(start), function

    def forward(self, x):
        return self.function(self.theta) + 0 * x[:, 0]


def stepped(function, start, eta, noise=0.0, clip=math.inf, **fields):
    """The point and the error of Eq. 4.1 after one step from `start` [d]; every record is in both draws."""
    clipping, d = engine(Scalar(function, start), lambda output, target: output, "vmap"), len(start)
    plan = Plan({"gradient": noise}, Ledger([Draw(1.0, (noise,))] * 2), 1.0, 1.0, 2, d, 1e-5, "pld")
    x = torch.zeros(N, 1, dtype=torch.float64)
    oracle = DataOracle(clipping, x, x[:, 0], plan, draw_seed=1, noise_seed=2)
    optimizer = dpopt.create("adadp", lr=eta, clip=Abadi(clip), shrink=1e-9, grow=1e9, **fields)
    state = optimizer.step(optimizer.init(start.clone()), oracle)
    return state.theta, eta / float(state.eta)  # eta_{l+1} = tau / err eta_l with tau = 1


@pytest.mark.parametrize("order", [3, 2.5], ids=["smooth", "twice differentiable"])
def test_twice_the_difference_is_the_local_error(order):
    """Lemma 1: theta(eta) - full = 2 (half - full) + O(eta^3), where theta(t) is the gradient flow.

    As printed, for any function that is twice differentiable, it is wrong: that of -w + w^2.5/2.5 has a remainder of
    order eta^2.5 at w = 0. The proof's Taylor expansion needs a Hessian that is Lipschitz.
    """
    start = torch.linspace(0.3, 0.9, 5, dtype=torch.float64) if order == 3 else torch.zeros(1, dtype=torch.float64)

    def function(w):
        return w.pow(4).sum() / 4 if order == 3 else (w.clamp(min=0).pow(2.5) / 2.5 - w).sum()

    def flow(t):
        return start / (1 + 2 * t * start.square()).sqrt() if order == 3 else t - 0.4 * t**2.5 + 0.15 * t**4 + start

    def remainder(eta):
        full, half = (stepped(function, start, eta, keep=keep)[0] for keep in ("full", "half"))
        return float((flow(eta) - full - 2 * (half - full)).norm())

    assert math.log2(remainder(0.02) / remainder(0.01)) == pytest.approx(order, abs=0.05)
    if order == 3:  # the optimizer's error is half the local one
        full, error = stepped(function, start, 0.01)
        assert 2 * error == pytest.approx(float((flow(0.01) - full).norm()), rel=0.03)


SHAPES = {
    "kink": lambda w: 100 * (w[0] - 0.01).abs(),
    "cone": lambda w: 100 * (w + 1e-9).norm(),
    "peak": lambda w: -100 * w.norm(),
}
"""Losses whose gradients are longer than C and turn round within half a step, or follow the noise of the first draw."""


@pytest.mark.parametrize(("shape", "x"), [("kink", 1.0), ("cone", 2.0), ("peak", 1.0), ("peak", 2.0)])
def test_error_of_a_step_is_within_theorem_10s_bounds(shape, x):
    r"""Theorem 10: s^2/2 <= E ||full - half||^2 / eta^2 <= s^2/2 + C^2, s^2 = d (C sigma / B)^2, for batches of B.

    As printed it is wrong: its proof drops the product of the first draw's noise n_1 and the middle gradient g_2, which
    depends on it. As g_2 is at most C long, n_2 independent, and E ||g_1 + n_1||^2 = ||g_1||^2 + s^2, it rather is

        s^2 + max(s - C, 0)^2 <= 4 E ||full - half||^2 / eta^2 <= s^2 + (C + sqrt(C^2 + s^2))^2.

    Each case attains a bound: the kink the upper one as printed (g_2 = -g_1 whatever the noise), a cone the right upper
    one, which is larger, and a peak the right lower one, which is smaller. For s >> C, as the paper's choice of tau has
    it, all are alike. A Poisson batch may be larger than B, and the error with it.
    """
    clip, eta, d = 1.5, 0.1, 20_000
    start = torch.zeros(d, dtype=torch.float64)
    theta, error = stepped(SHAPES[shape], start, eta, noise=x * N / math.sqrt(d), clip=clip)
    assert float(theta.abs().max()) < 1  # the error is not relative then
    measured, s2, c2 = 4 * error**2 / eta**2, (x * clip) ** 2, clip**2
    printed, right = 2 * s2 + 4 * c2, s2 + (clip + math.sqrt(c2 + s2)) ** 2
    attained = {"kink": printed, "cone": right, "peak": s2 + max(x - 1, 0) ** 2 * c2}[shape]
    assert measured == pytest.approx(attained, rel=5 * math.sqrt(2 / d))
    assert shape == "kink" or not 1.8 * s2 < measured < 1.1 * printed


RUNS = [(0.01, 10_000, 0.5, 1e-5), (0.02, 10_000, 0.5, 1e-5), (0.01, 40_000, 0.5, 1e-5), (0.01, 10_000, 0.2, 1e-10)]


@pytest.mark.parametrize(("rate", "draws", "target", "delta"), RUNS)
def test_noise_scales_as_in_theorem_8(rate, draws, target, delta):
    """DP-SGD is (epsilon, delta)-DP for sigma >= c_2 q sqrt(T log(1/delta)) / epsilon and epsilon < c_1 q^2 T.

    Here c_2 = sqrt 2 is enough and two thirds of it are not; at epsilon = 4 q^2 T, sqrt 2 is not. The epsilon is that
    of a Gaussian mechanism with noise sigma / (q sqrt T). As printed it is for any delta > 0, which is wrong near 1,
    where log(1/delta) and the noise vanish.
    """

    def spent(c2, target):
        noise = c2 * rate * math.sqrt(draws * math.log(1 / delta)) / target
        return epsilon(Ledger([Draw(rate, (noise,))] * draws), delta), rate * math.sqrt(draws) / noise

    (value, mu), far = spent(math.sqrt(2), target), 4 * rate**2 * draws
    assert value < target < spent(math.sqrt(2) / 1.5, target)[0]
    assert value == pytest.approx(gaussian_epsilon(mu, delta), rel=0.01)
    assert spent(math.sqrt(2), far)[0] > far
