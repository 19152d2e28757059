import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats

from dpopt.audit import audit, clopper_pearson, driver, one_run_scores, simulated, worst_case
from dpopt.audit.games import _WithCanaries
from dpopt.clipping import Abadi, Automatic
from dpopt.errors import ConfigError
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.optimizers.hyfreedp import HyFreeDP
from dpopt.privacy import DataOracle, Draw, Ledger, NonPrivate, Plan, calibrate
from dpopt.testing import Task

RATE, DRAWS, D = 0.3, 6, 4


@dataclass(frozen=True)
class Everything(DPSGD):
    """All kinds of release, two points that cancel, and a scale, in every draw."""

    def step(self, state, oracle):
        theta = state.theta
        with oracle.draw() as batch:
            gradient = batch.gradient([(1.0, theta), (-1.0, theta)], self.clip, torch.full_like(theta, 1e-9))
            losses = batch.losses([theta] * D, 3.0)  # as many as there are parameters
            share = batch.below(torch.tensor(1e6))
        return state._replace(theta=theta - gradient.value - losses.value.mean() - share.value)


def plan_of(optimizer, **changes):
    settings = {"rate": RATE, "draws": DRAWS, "dimension": D, "epsilon": 3.0, "delta": 1e-3, "accountant": "rdp"}
    return calibrate(optimizer, **settings | changes)


def everything():
    noises = (1.2, *(3.0,) * D, 2.0)
    noise = {"gradient": 1.2, "losses": 3.0, "counts": 2.0}
    return Plan(noise, Ledger([Draw(RATE, noises)] * DRAWS), 1.0, RATE, DRAWS, D, 1e-3, "rdp")


def by_hand(ledger, size, is_in):
    """Log-likelihood ratios of Poisson-subsampled Gaussians with the ledger's effective noise, by hand."""
    random, total = np.random.default_rng(0), np.zeros(size)
    for draw in ledger:
        u, q = 1 / draw.effective_noise, draw.rate
        z = random.standard_normal(size) + u * (is_in & (random.random(size) < q))
        total += np.log(1 - q + q * np.exp(u * z - u * u / 2))
    return total


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        (DPSGD(), plan_of(DPSGD())),
        (DPSGD(clip=Automatic()), plan_of(DPSGD(), rate=1.0)),
        (Everything(), everything()),
    ],
    ids=["abadi", "automatic", "everything"],
)
def test_worst_case_is_exactly_what_the_ledger_says(optimizer, plan):
    """Scores of real runs have the distribution of subsampled Gaussians of the effective noise; p below 1e-4 fails."""
    scores = worst_case(optimizer, plan, trials=250, seed=3)
    for found, is_in in ((scores.inside, True), (scores.outside, False)):
        assert stats.ks_2samp(found, by_hand(plan.ledger, 50_000, is_in)).pvalue > 1e-4
    assert stats.ks_2samp(scores.inside, scores.outside).pvalue < 1e-4, "the canary was never seen"


@pytest.mark.parametrize("rate", [RATE, 1.0])
def test_a_simulation_is_what_the_ledger_says(rate):
    ledger = Ledger([Draw(rate, (1.2, 3.0)), Draw(rate, (2.0,))])
    for found, is_in in zip(simulated(ledger, size=5000), (True, False), strict=True):
        assert stats.ks_2samp(found, by_hand(ledger, 50_000, is_in)).pvalue > 1e-4


def test_too_little_noise_is_flagged_and_enough_is_not():
    plan = plan_of(DPSGD(), rate=1.0, draws=1, epsilon=1.0)
    assert clopper_pearson(*worst_case(DPSGD(), plan, trials=600), delta=1e-3) <= 1.0
    little = {"gradient": plan.noise["gradient"] / 3}
    weak = replace(plan, noise=little, ledger=Ledger([Draw(1.0, tuple(little.values()))]))
    assert clopper_pearson(*worst_case(DPSGD(), weak, trials=600), delta=1e-3) > 1.0


def test_what_cannot_be_played():
    plan = plan_of(DPSGD())
    with pytest.raises(ConfigError, match="trials"):
        worst_case(DPSGD(), plan, trials=0)
    bare = plan_of(DPSGD(), epsilon=math.inf)
    assert isinstance(bare, NonPrivate)
    with pytest.raises(ConfigError, match="noise"):
        worst_case(DPSGD(), bare, trials=1)
    task = Task()
    for canaries in (1, 76):
        with pytest.raises(ConfigError, match="canaries"):
            one_run_scores(DPSGD(), task.engine, task.x, task.y, plan=plan_of(DPSGD(), dimension=75), canaries=canaries)


def test_canaries_leave_the_records_alone():
    """Sums, losses and norms are those of the records, plus each canary that is in along its coordinate."""
    task, rule = Task(), Abadi(0.25)
    coordinates, members = torch.tensor([7, 2, 40]), torch.tensor([True, False, True])
    engine = _WithCanaries(task.engine, task.x, task.y, coordinates, members)
    rows = torch.tensor([60, 3, 61, 62, 8, 62, 0])
    mask = torch.tensor([True, True, True, True, True, False, False])
    real, points = torch.tensor([3, 8]), [(1.0, task.engine.theta)]
    found = engine.clipped(points, rows, rows, mask, rule)
    alone = task.engine.clipped(points, task.x[real], task.y[real], torch.ones(2, dtype=torch.bool), rule)
    expected = alone.total.clone()
    expected[[7, 40]] += 0.25
    torch.testing.assert_close(found.total, expected)
    torch.testing.assert_close(found.norms[[1, 4]], alone.norms)
    torch.testing.assert_close(found.losses[:, [1, 4]], alone.losses)
    assert found.losses[0, [0, 2, 3]].isnan().all()
    assert found.norms[[0, 2, 3]].tolist() == [0.0, math.inf, 0.0]
    torch.testing.assert_close(engine.losses([points[0][1]], rows, rows, mask)[:, [1, 4]], alone.losses)


@pytest.mark.parametrize("optimizer", [DPSGD(), HyFreeDP(probe_every=3)], ids=["dp_sgd", "hyfreedp"])
def test_canaries_among_records_without_gradients(optimizer):
    """Scores are those of subsampled Gaussians of the gradients' noise, alone on their coordinates."""
    task, inside, outside = Task(scale=0.0), [], []
    plan = plan_of(optimizer, dimension=task.engine.dimension)
    for seed in range(4):
        scores = one_run_scores(
            optimizer, task.engine, task.x, task.y, plan=plan, canaries=task.engine.dimension, seed=seed
        )
        assert len(scores.inside) + len(scores.outside) == task.engine.dimension
        inside.append(scores.inside)
        outside.append(scores.outside)
    gradients = Ledger([Draw(RATE, (plan.noise["gradient"],))] * DRAWS)
    for found, is_in in ((inside, True), (outside, False)):
        assert stats.ks_2samp(np.concatenate(found), by_hand(gradients, 50_000, is_in)).pvalue > 1e-4
    assert 0.4 < np.concatenate(inside).size / (4 * task.engine.dimension) < 0.6


SETTING = {"epsilon": 10.0, "delta": 1e-3, "rate": RATE, "draws": DRAWS, "accountant": "rdp"}


@pytest.mark.parametrize(
    ("optimizer", "trials"),
    [(DPSGD(), 60), pytest.param(HyFreeDP(), 200, marks=pytest.mark.slow)],
    ids=["dp_sgd", "hyfreedp"],
)
def test_an_audit_refutes_no_honest_claim(optimizer, trials):
    task = Task()
    theta = task.engine.theta
    result = audit(optimizer, **SETTING, trials=trials, canaries=60, engine=task.engine, x=task.x, y=task.y)
    assert 0 < result.worst_case <= result.epsilon <= 10.0
    assert not result.is_refuted
    assert (result.trials, result.canaries, result.significance) == (trials, 60, 0.05)
    assert torch.equal(task.engine.theta, theta), "the engine's parameters were changed"
    assert not replace(result, one_run_fdp=100.0).is_refuted, "the Gaussian bound alone refutes nothing"
    assert replace(result, one_run=result.epsilon + 0.1).is_refuted
    assert replace(result, worst_case=result.epsilon + 0.1).is_refuted


def test_an_audit_without_a_model_plays_one_game_and_needs_noise(monkeypatch):
    grids = []
    monkeypatch.setattr(
        driver, "DataOracle", lambda *a, grid, **k: grids.append(grid) or DataOracle(*a, grid=grid, **k)
    )
    result = audit(DPSGD(), **SETTING, trials=20, grid=True)
    assert grids == [True] * 40
    assert (result.one_run, result.one_run_fdp, result.canaries) == (None, None, 0)
    with pytest.raises(ConfigError, match="engine"):
        audit(DPSGD(), **SETTING, engine=Task().engine)
    with pytest.raises(ConfigError, match="noise > 0"):
        audit(DPSGD(), **{**SETTING, "epsilon": math.inf})
