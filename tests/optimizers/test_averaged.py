import math

import pytest
import torch

import dpopt
from dpopt.errors import ConfigError
from dpopt.optimizers.averaged import Averaged
from dpopt.testing import Task, checks

CASES = [
    pytest.param(check, id=f"{name}-{check}")
    for name, decay in (("dp_sgd", 0.5), ("adaptive_clip", 0.9))
    for check in checks(Averaged(dpopt.create(name), decay))
    if check.name != "survives_yaml"  # it has no entry: a cell holds the optimizer and the decay, each by itself
    if name == "dp_sgd" or check.name in ("spends_at_most_the_target", "adds_the_stated_gradient_noise")
]


@pytest.mark.parametrize("check", CASES)
def test_it_keeps_the_rules_of_optimizers(check):
    check()


def iterates(optimizer):
    """The parameters after each step, and the ledger."""
    task = Task()
    plan = task.plan(dpopt.create("dp_adam"))
    oracle = task.oracle(plan)
    state = optimizer.init(task.engine.theta)
    states = []
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
        states.append(state)
    return states, oracle.ledger


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_it_is_the_weighted_mean_of_the_parameters_after_each_step(decay):
    base = dpopt.create("dp_adam", lr=0.05)
    plain, ledger = iterates(base)
    states, same = iterates(Averaged(base, decay))
    assert same == ledger
    for t, state in enumerate(states, 1):
        weights = torch.tensor([decay ** (t - k) for k in range(1, t + 1)], dtype=torch.float64)
        stack = torch.stack([each.theta for each in plain[:t]]).double()
        torch.testing.assert_close(state.theta.double(), weights @ stack / weights.sum(), rtol=1e-5, atol=1e-6)
        assert torch.equal(state.base.theta, plain[t - 1].theta)
    if decay == 0:
        assert torch.equal(states[-1].theta, plain[-1].theta)


def test_a_learning_rate_and_a_bound_are_shown_where_there_are_some():
    state = Averaged(dpopt.create("hyfreedp", lr=1e-3, initial_bound=2.0), 0.9).init(torch.zeros(3))
    assert (float(state.eta), float(state.bound)) == (1e-3, 2.0)
    without = Averaged(dpopt.create("dp_sgd"), 0.9).init(torch.zeros(3))
    assert not hasattr(without, "eta")
    assert not hasattr(without, "bound")


@pytest.mark.parametrize("decay", [1.0, math.nan])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(ConfigError, match=r"^Averaged\.decay: "):
        Averaged(dpopt.create("dp_sgd"), decay)
