"""Clipping at a bound that follows the norms, and of scaled gradients: against float64 loops over examples."""

import numpy as np
import pytest
import torch
from torch import nn

import dpopt
from dpopt.clipping import Abadi, engine
from dpopt.privacy import DataOracle, Draw, Ledger, Plan, calibrate

N, D, DRAWS = 101, 4, 60


def oracle(noise=(0.0, 0.0), rate=1.0, transcript=None):
    """Linear regression on columns of different scales, its inputs and its targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 3.0, 0.3, 1.0])
    y = 3 * torch.randn(N, generator=generator, dtype=torch.float64)
    squares = engine(nn.Linear(D, 1, bias=False).double(), lambda out, y: (out.squeeze(-1) - y).square() / 2)
    kinds = dict(zip(("gradient", "counts"), noise, strict=False))
    plan = Plan(kinds, Ledger([Draw(rate, noise)] * DRAWS), 1.0, rate, DRAWS, D, 1e-5, "pld")
    return DataOracle(squares, x, y, plan, draw_seed=1, noise_seed=2, transcript=transcript), x.numpy(), y.numpy()


def run(optimizer, asked):
    states = [optimizer.init(torch.zeros(D, dtype=torch.float64))]
    while asked.draws_left:
        states.append(optimizer.step(states[-1], asked))
    return states


def clipped_mean(gradients, bound):
    norms = np.linalg.norm(gradients, axis=1)
    return (gradients * np.minimum(1, bound / norms)[:, None]).mean(0), norms


@pytest.mark.parametrize("quantile", [0.2, 0.9])
def test_adaptive_clip_equals_a_loop_and_finds_the_quantile(quantile):
    asked, x, y = oracle()
    states = run(dpopt.create("adaptive_clip", lr=1e-3, initial_bound=5.0, quantile=quantile), asked)
    theta, bound = np.zeros(D), 5.0
    for state in states:
        np.testing.assert_allclose(state.theta.numpy(), theta, rtol=1e-9, atol=1e-12)
        assert float(state.bound) == pytest.approx(bound, rel=1e-9)
        mean, norms = clipped_mean((x @ theta - y)[:, None] * x, bound)
        theta = theta - 1e-3 * mean
        bound *= np.exp(-0.2 * ((norms <= bound).mean() - quantile))
    assert (norms <= bound).mean() == pytest.approx(quantile, abs=0.1)


def test_gradient_and_count_share_the_budget_of_a_draw():
    optimizer = dpopt.create("adaptive_clip", noise_inflation=1.01)
    shape = {"rate": 0.1, "draws": 50, "dimension": D, "epsilon": 2.0, "delta": 1e-5, "accountant": "rdp"}
    plan, alone = calibrate(optimizer, **shape), calibrate(dpopt.create("dp_sgd"), **shape)
    gradient, count = plan.noise["gradient"], plan.noise["counts"]
    assert gradient == pytest.approx(1.01 * alone.noise["gradient"], rel=1e-4)
    # Jointly as much as the gradient alone (Theorem 1): 1/z^2 = 1/z_g^2 + 1/z_c^2.
    assert (gradient**-2 + count**-2) ** -0.5 == pytest.approx(alone.noise["gradient"], rel=1e-4)
    assert set(plan.ledger) == {Draw(0.1, (gradient, count))}


def test_noise_follows_the_bound():
    """With a bound that does not move it is DP-SGD clipped there, noise included."""
    fixed = dpopt.create("adaptive_clip", lr=0.1, initial_bound=0.7, clip_lr=1e-12)
    (moved, *_), (plain, *_) = (oracle(noise=(2.0, 3.0), rate=0.5) for _ in range(2))
    theta = torch.zeros(D, dtype=torch.float64)
    for wanted in run(fixed, moved)[1:]:
        with plain.draw() as batch:
            theta = theta - 0.1 * batch.gradient(theta, Abadi(0.7)).value
            batch.below(0.7)
        torch.testing.assert_close(wanted.theta, theta, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("bound", [0.5, 100.0])
def test_scale_then_privatize_equals_a_loop(bound):
    asked, x, y = oracle(noise=(0.0,))
    states = run(dpopt.create("scale_then_privatize", lr=0.1, clip=bound, eps_root=1e-4), asked)
    theta, m, v = np.zeros(D), np.zeros(D), np.zeros(D)
    for t in range(1, DRAWS + 1):
        s = 1 / (np.sqrt(v + 1e-4) + 1e-8)
        g = clipped_mean(s * (x @ theta - y)[:, None] * x, bound)[0] / s
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        theta = theta - 0.1 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(states[-1].theta.numpy(), theta, rtol=1e-9)


def test_noise_is_put_back_in_the_gradients_scale():
    """Recomputed from the transcript: what Adam averages is the release over s."""
    transcript = []
    states = run(dpopt.create("scale_then_privatize", clip=3.0), oracle((2.0,), transcript=transcript)[0])[1:]
    m = v = torch.zeros(D, dtype=torch.float64)
    for state, (release,) in zip(states, transcript, strict=True):
        assert release.std == pytest.approx(2.0 * 3.0 / N)
        g = release.value * ((v + 1e-4).sqrt() + 1e-8)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        torch.testing.assert_close(state.m, m)
        torch.testing.assert_close(state.v, v)


@pytest.mark.parametrize("more", [{}, {"scaled_lr": 0.3, "scaled_clip": 0.2}], ids=str)
def test_dp2_rmsprop_equals_a_loop(more):
    asked, x, y = oracle(noise=(0.0,))
    states = run(dpopt.create("dp2_rmsprop", lr=0.1, clip=2.0, interval=4, gamma=0.8, eps=1e-3, **more), asked)
    theta, a, phase = np.zeros(D), np.zeros(D), []
    for t in range(DRAWS):
        gradients = (x @ theta - y)[:, None] * x
        if t % 8 < 4:
            phase.append(clipped_mean(gradients, 2.0)[0])
            theta = theta - 0.1 * phase[-1]
        else:
            if t % 8 == 4:
                a, phase = 0.8 * a + 0.2 * np.mean(phase, axis=0) ** 2, []
            scaled = clipped_mean(gradients / (np.sqrt(a) + 1e-3), more.get("scaled_clip", 2.0))[0]
            theta = theta - more.get("scaled_lr", 0.1) * scaled
        np.testing.assert_allclose(states[t + 1].theta.numpy(), theta, rtol=1e-9)
