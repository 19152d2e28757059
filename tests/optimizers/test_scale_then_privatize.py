"""Scale-then-privatize against a float64 loop over examples, and its plain limit."""

import numpy as np
import pytest
import torch
from torch import nn

import dpopt
from dpopt.clipping import engine
from dpopt.privacy import DataOracle, Draw, Ledger, Plan

N, D, DRAWS = 30, 4, 15


def oracle(noise=0.0, transcript=None):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1, 3.0])
    y = torch.randn(N, generator=generator, dtype=torch.float64)
    model = nn.Linear(D, 1, bias=False).double()
    made = engine(model, lambda output, target: (output.squeeze(-1) - target).square() / 2)
    plan = Plan({"gradient": noise}, Ledger([Draw(1.0, (noise,))] * DRAWS), 1.0, 1.0, DRAWS, D, 1e-5, "pld")
    return DataOracle(made, x, y, plan, draw_seed=1, noise_seed=2, transcript=transcript), x.numpy(), y.numpy()


def run(optimizer, asked):
    states = [optimizer.init(torch.zeros(D, dtype=torch.float64))]
    while asked.draws_left:
        states.append(optimizer.step(states[-1], asked))
    return states[1:]


@pytest.mark.parametrize("bound", [0.5, 100.0])
def test_equals_a_loop_over_examples(bound):
    asked, x, y = oracle()
    states = run(dpopt.create("scale_then_privatize", lr=0.1, clip=bound, eps_root=1e-4), asked)
    theta, m, v = np.zeros(D), np.zeros(D), np.zeros(D)
    for t in range(1, DRAWS + 1):
        s = 1 / (np.sqrt(v + 1e-4) + 1e-8)
        total = np.zeros(D)
        for xi, yi in zip(x, y, strict=True):
            g = s * (theta @ xi - yi) * xi
            total += g * min(1.0, bound / np.linalg.norm(g))
        g = total / N / s
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        theta = theta - 0.1 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(states[-1].theta.numpy(), theta, rtol=1e-9)


def test_noise_is_put_back_in_the_gradients_scale():
    """Recomputed from the transcript: what Adam averages is the release over s."""
    transcript = []
    asked, _, _ = oracle(noise=2.0, transcript=transcript)
    states = run(dpopt.create("scale_then_privatize", clip=3.0), asked)
    m = v = torch.zeros(D, dtype=torch.float64)
    for state, (release,) in zip(states, transcript, strict=True):
        assert release.std == pytest.approx(2.0 * 3.0 / N)
        g = release.value * ((v + 1e-4).sqrt() + 1e-8)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        torch.testing.assert_close(state.m, m)
        torch.testing.assert_close(state.v, v)
