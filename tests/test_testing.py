"""The conformance checks must be able to fail: each is shown an optimizer that breaks its rule."""

import math
from dataclasses import dataclass

import pytest
import torch

import dpopt
from dpopt.clipping import Abadi
from dpopt.errors import ConfigError
from dpopt.optimizers.dp_sgd import DPSGD, State
from dpopt.privacy import DataOracle, UnplannedRelease, sampling


@dataclass(frozen=True)
class InPlace(DPSGD):
    def step(self, state, oracle):
        new = super().step(state, oracle)
        state.theta.copy_(new.theta)
        return state


@dataclass(frozen=True)
class OwnNoise(DPSGD):
    def step(self, state, oracle):
        new = super().step(state, oracle)
        return new._replace(theta=new.theta + 0.1 * torch.randn(new.theta.shape, device=new.theta.device))


@dataclass(frozen=True)
class SideDoor(DPSGD):
    """Takes the data from behind the oracle."""

    def step(self, state, oracle):
        new = super().step(state, oracle)
        return new._replace(theta=new.theta + oracle._x.mean()) if isinstance(oracle, DataOracle) else new


@dataclass(frozen=True)
class HiddenMemory(DPSGD):
    """Keeps its momentum outside the state."""

    memory = {}

    def step(self, state, oracle):
        new = super().step(state, oracle)
        if new.theta.is_meta:
            return new
        sum_so_far = self.memory[id(oracle)] = self.memory.get(id(oracle), 0) + new.theta
        return new._replace(theta=sum_so_far)


@dataclass(frozen=True)
class LyingRule:
    """Clips at 5 and declares 1."""

    @property
    def sensitivity(self):
        return 1.0

    def factor(self, norm):
        return (5 / norm).clamp(max=1)


@dataclass(frozen=True)
class SizeDependent(DPSGD):
    """Releases more for larger models."""

    def step(self, state, oracle):
        new = super().step(state, oracle)
        if oracle.dimension > 500 and oracle.draws_left:
            return super().step(new, oracle)
        with oracle.draw() if oracle.draws_left and oracle.dimension <= 500 else _nothing():
            return new


class _nothing:  # noqa: N801
    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


@dataclass(frozen=True)
class DropsPrecision(DPSGD):
    def step(self, state, oracle):
        new = super().step(state, oracle)
        return State(new.theta.double(), new.momentum)


@dataclass(frozen=True)
class TwiceForOne(DPSGD):
    """Two queries where the plan was traced with one: extra releases only when there is data."""

    def step(self, state, oracle):
        with oracle.draw() as batch:
            gradient = batch.gradient(state.theta, self.clip)
            if not state.theta.is_meta:
                gradient = batch.gradient(state.theta, self.clip)
        return state._replace(theta=state.theta - self.lr * gradient.value)


@dataclass
class Thawed:
    lr: float = 0.1

    init = DPSGD.init
    step = DPSGD.step


BREAKERS = [
    (InPlace(), "is_pure"),
    (OwnNoise(), "is_pure"),
    (DropsPrecision(), "is_pure"),
    (SideDoor(), "replays_bit_for_bit"),
    (HiddenMemory(), "resumes_bit_for_bit"),
    (SizeDependent(), "plans_the_same_for_any_dimension"),
    (Thawed(), "is_frozen_configuration"),
]


@pytest.mark.parametrize(("optimizer", "name"), BREAKERS, ids=[f"{type(o).__name__}-{n}" for o, n in BREAKERS])
def test_a_broken_optimizer_is_caught(optimizer, name):
    check = next(check for check in dpopt.testing.checks(optimizer) if check.name == name)
    with pytest.raises((AssertionError, TypeError)):
        check()


def test_a_rule_that_lies_about_its_sensitivity_is_held_to_it():
    """The engine caps every example at the declared sensitivity, so that the noise is never scaled to a lie."""
    for check in dpopt.testing.checks(DPSGD(clip=LyingRule())):
        check()


def test_an_unplanned_release_is_refused_in_the_middle_of_a_run():
    check = next(c for c in dpopt.testing.checks(TwiceForOne()) if c.name == "leaves_the_planned_ledger")
    with pytest.raises(UnplannedRelease):
        check()


def test_noise_that_is_not_the_stated_is_caught(monkeypatch):
    """Mistake 20: a sigma in the record that is not the one added."""
    original = sampling.add_gaussian
    monkeypatch.setattr(sampling, "add_gaussian", lambda total, std, *where: original(total, 0.8 * std, *where))
    check = next(c for c in dpopt.testing.checks(DPSGD(clip=Abadi(0.5))) if c.name == "adds_the_stated_gradient_noise")
    with pytest.raises(AssertionError, match="chi-square"):
        check()


def test_a_check_has_a_name_for_pytest():
    names = [str(check) for check in dpopt.testing.checks(DPSGD())]
    assert len(set(names)) == len(names) > 8


def test_reading_a_release_to_decide_is_caught():
    @dataclass(frozen=True)
    class Stops(DPSGD):
        def step(self, state, oracle):
            new = super().step(state, oracle)
            return new if float(new.theta.norm()) < math.inf else state

    with pytest.raises(ConfigError, match="reads the value"):
        next(iter(c for c in dpopt.testing.checks(Stops()) if c.name == "spends_at_most_the_target"))()
