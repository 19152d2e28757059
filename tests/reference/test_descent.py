"""The gain of one step of DP-SGD is bounded by the error of its gradient, as `study.optimal_clip` computes that.

Rehn et al., "On optimal hyperparameters for differentially private deep transfer learning", ICLR 2026, arXiv
2510.20616, Theorem 5.4. Let L be the mean loss of n examples, L-smooth with a constant of at most 1/eta, and let the
step use all of them (Assumption 5.1):

    theta+ = theta - eta g~,      g~ = (1/n) (sum_i clip_C(g_i) + sigma C xi),      xi ~ N(0, I_d)
    E L(theta+) <= L(theta) - (eta/2) ||grad L||^2 + (eta/2) MSE

Here MSE = E ||g~ - grad L||^2 is that of the *means*: `optimal_clip`'s MSE of the sums, divided by n^2. For smoothness
1/eta gives L(theta+) <= L - eta <grad L, g~> + (eta/2) ||g~||^2 = L - (eta/2) ||grad L||^2 + (eta/2) ||g~ - grad L||^2.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import softplus

from dpopt.clipping import Abadi
from dpopt.study.optimal_clip import mse, optimal_clip


class Task(NamedTuple):
    """A mean loss of points [k, d] -> [k], the gradients [n, d] of its examples at theta = 0, and its smoothness."""

    loss: Any
    gradients: torch.Tensor
    smooth: float


def draws(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def quadratic():
    """The mean of (3/2) ||theta - a_i||^2, for which a step of 1/3 meets the theorem with equality."""
    a = draws(30, 6, seed=0) + 1
    return Task(lambda thetas: 1.5 * (thetas[:, None] - a).square().sum(2).mean(1), -3 * a, 3.0)


def logistic():
    """Logistic regression, as smooth as the largest eigenvalue of X'X/(4n)."""
    x = draws(80, 5, seed=1)
    signs = (x[:, 0] + draws(80, seed=2)).sign()
    smooth = float(torch.linalg.eigvalsh(x.T @ x)[-1]) / (4 * len(x))
    return Task(lambda thetas: softplus(-signs * (thetas @ x.T)).mean(1), -signs[:, None] * x / 2, smooth)


def step(task, clip, noise, factor=1.0):
    """The bound, the bound without its error, the mean loss after steps of `factor` / smoothness, 4 standard errors."""
    (n, d), lr, gradients = task.gradients.shape, factor / task.smooth, task.gradients
    clipped = (Abadi(clip).factor(gradients.norm(dim=1))[:, None] * gradients).mean(0)
    after = task.loss(-lr * (clipped + (noise * clip / n if noise else 0) * draws(4000, d, seed=3)))
    plain = float(task.loss(torch.zeros(1, d).double())) - lr / 2 * float(gradients.mean(0).square().sum())
    bound = plain + lr / 2 * mse(gradients, clip, noise).total / n**2
    return bound, plain, float(after.mean()), 4 * float(after.std()) / math.sqrt(len(after)) + 1e-12


@pytest.mark.parametrize(("clip", "noise"), [(0.5, 0.0), (2.0, 4.0), (20.0, 2.0), (math.inf, 0.0)])
def test_the_bound_is_what_a_quadratic_does(clip, noise):
    bound, _, measured, error = step(quadratic(), clip, noise)
    assert measured == pytest.approx(bound, abs=error)


@pytest.mark.parametrize("factor", [0.3, 1.0])
@pytest.mark.parametrize(("clip", "noise"), [(0.1, 1.0), (1.0, 10.0), (5.0, 20.0)])
def test_the_bound_holds_for_logistic_regression(clip, noise, factor):
    bound, _, measured, error = step(logistic(), clip, noise, factor)
    assert measured <= bound + error


def test_without_its_error_or_in_longer_steps_it_is_broken():
    _, plain, measured, error = step(logistic(), 5.0, 20.0)
    assert measured > plain + error
    for task, factor in ((quadratic(), 4), (logistic(), 20)):
        bound, _, measured, error = step(task, 5.0, 2.0, factor)
        assert measured > bound + error


def test_the_optimal_clip_has_the_least_bound():
    task = logistic()
    best, _ = optimal_clip(task.gradients, 5.0)
    bounds = {clip: step(task, clip, 5.0)[0] for clip in (0.5 * best, 0.9 * best, best, 1.1 * best, 2 * best)}
    assert min(bounds, key=bounds.__getitem__) == best
