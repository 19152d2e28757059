"""Adaptive clipping: its rule against a loop, where the bound goes, and what its count costs."""

import numpy as np
import pytest
import torch
from torch import nn

import dpopt
from dpopt.clipping import Abadi, engine
from dpopt.errors import ConfigError
from dpopt.privacy import DataOracle, Draw, Ledger, Plan, calibrate

N, D, DRAWS = 101, 4, 60


def oracle(noise=(0.0, 0.0), rate=1.0):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    y = 3 * torch.randn(N, generator=generator, dtype=torch.float64)
    model = nn.Linear(D, 1, bias=False).double()
    made = engine(model, lambda output, target: (output.squeeze(-1) - target).square() / 2)
    kinds = {"gradient": noise[0], "counts": noise[1]}
    plan = Plan(kinds, Ledger([Draw(rate, noise)] * DRAWS), 1.0, rate, DRAWS, D, 1e-5, "pld")
    return DataOracle(made, x, y, plan, draw_seed=1, noise_seed=2), x.numpy(), y.numpy()


def run(optimizer, asked):
    states = [optimizer.init(torch.zeros(D, dtype=torch.float64))]
    while asked.draws_left:
        states.append(optimizer.step(states[-1], asked))
    return states


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_equals_a_loop_and_finds_the_quantile(quantile):
    asked, x, y = oracle()
    states = run(dpopt.create("adaptive_clip", lr=1e-3, initial_bound=5.0, quantile=quantile), asked)
    theta, bound = np.zeros(D), 5.0
    for state in states:
        np.testing.assert_allclose(state.theta.numpy(), theta, rtol=1e-9, atol=1e-12)
        assert float(state.bound) == pytest.approx(bound, rel=1e-9)
        gradients = (x @ theta - y)[:, None] * x
        norms = np.linalg.norm(gradients, axis=1)
        theta = theta - 1e-3 * (gradients * np.minimum(1, bound / norms)[:, None]).mean(0)
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
    moved, _, _ = oracle(noise=(2.0, 3.0), rate=0.5)
    plain, _, _ = oracle(noise=(2.0, 3.0), rate=0.5)
    sgd, state = dpopt.create("dp_sgd", lr=0.1, clip=Abadi(0.7)), None
    for wanted in run(fixed, moved)[1:]:
        state = sgd.init(torch.zeros(D, dtype=torch.float64)) if state is None else state
        with plain.draw() as batch:
            _, state = sgd.direction(state, gradient := batch.gradient(state.theta, sgd.clip))
            batch.below(0.7)
        state = state._replace(theta=state.theta - 0.1 * gradient.value)
        torch.testing.assert_close(wanted.theta, state.theta, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"noise_inflation": 1.0}, r"noise_inflation: .* in \(1, inf\)"),
        ({"base": {"name": "dp_adam", "lr": 0.5}}, "set lr beside base"),
        ({"quantile": 1.0}, "quantile"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ConfigError, match=message):
        dpopt.create("adaptive_clip", **fields)
