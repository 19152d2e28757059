import pytest
import torch

import dpopt
from dpopt.privacy import Draw, Ledger, Plan, Release, ReplayOracle, TraceOracle


def replay(gradients, rate):
    """An oracle that hands out the given gradients [draws, d], one a draw."""
    draws, dimension = gradients.shape
    ledger = Ledger([Draw(rate, (1.0,))] * draws)
    plan = Plan({"gradient": 1.0}, ledger, 1.0, rate, draws, dimension, 1e-5, "pld")
    return ReplayOracle([[Release(gradient, 0.1)] for gradient in gradients], plan)


def run(name, draws, rate, **fields):
    """The states of a whole run on random gradients."""
    gradients = 0.1 * torch.randn(draws, 50, generator=torch.Generator().manual_seed(0))
    optimizer, oracle = dpopt.create(name, **fields), replay(gradients, rate)
    state, states = optimizer.init(torch.zeros(50)), []
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
        states.append(state)
    return states, gradients


def test_decay_is_equation_5_1():
    """4 epochs of 10 draws: 10 steps of ADADP, then eta_50 / (1 + 0.1 k) for the k-th epoch, k = 1 and 2."""
    states, _ = run("adadp_hybrid", 40, 0.1)
    assert len(states) == 10 + 20
    found = float(states[9].eta)
    expected = [found / 1.1] * 10 + [found / 1.2] * 10
    assert [float(state.eta) for state in states[10:]] == pytest.approx(expected)


def test_before_the_switch_it_is_adadp():
    (hybrid, _), (adadp, _) = run("adadp_hybrid", 40, 0.1), run("adadp", 40, 0.1)
    for ours, theirs in zip(hybrid[:10], adadp[:10], strict=True):
        assert torch.equal(ours.theta, theirs.theta)
        assert torch.equal(ours.eta, theirs.eta)
    assert not torch.equal(hybrid[10].theta, adadp[10].theta)


def test_after_the_switch_it_is_dp_sgd():
    states, gradients = run("adadp_hybrid", 40, 0.1)
    step = states[14].theta - states[13].theta
    torch.testing.assert_close(step, -float(states[14].eta) * gradients[24], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("draws_per_epoch", [49, 7, 3])
def test_an_epoch_ends_where_its_draws_end(draws_per_epoch):
    """49 (1/49) < 1 in floating point."""
    states, _ = run("adadp_hybrid", 4 * draws_per_epoch, 1 / draws_per_epoch)
    etas = [float(state.eta) for state in states[-2 * draws_per_epoch :]]
    assert len(set(etas[:draws_per_epoch])) == 1
    assert len(set(etas[draws_per_epoch:])) == 1
    assert etas[0] > etas[-1]


@pytest.mark.parametrize(
    ("draws", "fields", "adaptive", "plain"),
    [
        (40, {}, 10, 20),
        (41, {}, 10, 21),
        (42, {}, 10, 22),
        (40, {"adaptive_epochs": 0.7}, 3, 34),
        (40, {"adaptive_epochs": 0.05}, 0, 40),
        (41, {"adaptive_epochs": 9.0}, 21, 0),
    ],
    ids=str,
)
def test_an_odd_draw_goes_to_dp_sgd(draws, fields, adaptive, plain):
    """A step before the switch takes two draws, one after it takes one; an ADADP run of odd length ends in one."""
    optimizer, oracle = dpopt.create("adadp_hybrid", **fields), TraceOracle(3, 0.1, draws)
    state, taken = optimizer.init(oracle.theta), []
    while oracle.draws_left:
        before = oracle.draws_left
        state = optimizer.step(state, oracle)
        taken.append(before - oracle.draws_left)
    if plain:
        assert taken == [2] * adaptive + [1] * plain
    else:
        assert taken == [2] * (adaptive - 1) + [1]
