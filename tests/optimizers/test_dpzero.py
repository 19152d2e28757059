"""DPZero against a loop over records of a linear regression, whose slopes are known; its price, and its directions."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import dpopt
from dpopt.clipping import engine
from dpopt.optimizers.dpzero import normal
from dpopt.privacy import DataOracle, calibrate

N, D = 30, 4
SHAPE = {"rate": 1.0, "draws": 20, "dimension": D, "epsilon": 2.0, "delta": 1e-3, "accountant": "rdp"}


@pytest.mark.parametrize("bound", [0.7, 100.0])
def test_it_equals_a_loop_over_records(bound):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(N, *shape, generator=generator, dtype=torch.float64) for shape in ((D,), ()))
    squares = engine(nn.Linear(D, 1, bias=False).double(), lambda out, y: (out.squeeze(-1) - y).square() / 2)
    optimizer = dpopt.create("dpzero", lr=0.05, bound=bound)
    transcript = []
    plan = calibrate(optimizer, **SHAPE)
    asked = DataOracle(squares, x, y, plan, draw_seed=1, noise_seed=2, transcript=transcript)
    exact = DataOracle(squares, x, y, calibrate(optimizer, **SHAPE | {"epsilon": np.inf}), draw_seed=1, noise_seed=2)
    state = optimizer.init(torch.zeros(D, dtype=torch.float64))
    for t in range(SHAPE["draws"]):
        u, theta = normal(state.theta, t).numpy(), state.theta.numpy()
        slopes = np.clip((x.numpy() @ theta - y.numpy()) * (x.numpy() @ u), -bound, bound)
        np.testing.assert_allclose(optimizer.step(state, exact).theta, theta - 0.05 * slopes.mean() * u, rtol=1e-6)
        state = optimizer.step(state, asked)
        (release,) = transcript[-1]
        assert release.std == pytest.approx(plan.noise["contrasts"] * bound / N)
        np.testing.assert_allclose(state.theta, theta - 0.05 * float(release.value) * u)


def test_a_draw_costs_as_much_as_one_of_dp_sgd():
    assert calibrate(dpopt.create("dpzero"), **SHAPE).ledger == calibrate(dpopt.create("dp_sgd"), **SHAPE).ledger


def test_directions_are_normal_and_differ_from_draw_to_draw():
    directions = torch.stack([normal(torch.zeros(2000), number) for number in range(100)])
    assert stats.kstest(directions.flatten().numpy(), "norm").pvalue > 1e-3
    # Cosines of independent directions have a standard deviation of d^(-1/2).
    cosines = np.corrcoef(directions.numpy())[np.triu_indices(100, 1)] * 2000**0.5
    assert stats.kstest(cosines, "norm").pvalue > 1e-3
    torch.testing.assert_close(normal(torch.zeros(2000).double(), 7).float(), directions[7])
