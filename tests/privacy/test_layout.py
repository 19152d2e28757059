"""An optimizer is told the names, shapes and places of its parameters, the same by every oracle."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

import dpopt.testing
from dpopt.clipping import engine
from dpopt.fields import Positive
from dpopt.optimizers.base import Direction
from dpopt.privacy import TraceOracle
from dpopt.testing import Task
from dpopt.types import Part, Vector, laid_out


class State(NamedTuple):
    theta: Vector


@dataclass(frozen=True)
class Rows(Direction):
    """Every row of a matrix moves by a step of one length, and every vector as a whole."""

    lr: Positive = 0.05

    def init(self, theta):
        return State(theta)

    def step(self, state, oracle):
        with oracle.draw() as batch:
            gradient = batch.gradient(state.theta, self.clip).value
        parts = [part.of(gradient) for part in oracle.layout]
        moved = [part / part.norm(dim=-1, keepdim=True).clamp(min=1e-6) if part.dim() else part for part in parts]
        return State(state.theta - self.lr * torch.cat([each.reshape(-1) for each in moved]))


CHECKS = [check for check in dpopt.testing.checks(Rows()) if check.name != "imports_no_data"]  # a test does


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_what_views_its_vector_as_matrices_conforms(check):
    check()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.head.weight, self.scale = self.table.weight, nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return self.scale * self.head(self.table(x).mean(1))


def test_a_layout_is_of_the_trained_parameters_and_a_shared_one_is_there_once():
    made = engine(Tied(), nn.CrossEntropyLoss(reduction="none"))
    expected = [Part("scale", (), "Tied", 0), Part("table.weight", (5, 3), "Embedding", 1)]
    assert made.layout == (*expected, Part("head.bias", (5,), "Linear", 16))
    assert [part.layer for part in made.layout] == ["", "table", "head"]
    vector = torch.arange(21.0)
    assert torch.equal(torch.cat([part.of(vector).flatten() for part in made.layout]), vector)
    assert made.layout[1].of(vector).data_ptr() == vector[1:].data_ptr()


def test_every_oracle_tells_it():
    task, optimizer = Task(), Rows()
    recording = task.record(optimizer)
    assert [part.shape for part in recording.layout] == [(8, 5), (8,), (3, 8), (3,)]
    assert recording.oracle().layout == recording.layout
    assert TraceOracle(3, 0.1, 1).layout == laid_out([("theta", (3,), "")])
    with pytest.raises(dpopt.errors.ConfigError, match="read, not set"):
        task.oracle(recording.plan).layout = ()


@dataclass(frozen=True)
class Counting(Rows):
    """Asks as often as there are parameters, which a plan cannot know."""

    def step(self, state, oracle):
        with oracle.draw() as batch:
            for _ in oracle.layout:
                batch.gradient(state.theta, self.clip)
        return state


def test_releases_that_follow_the_layout_are_refused():
    task = Task()
    with pytest.raises(dpopt.privacy.UnplannedRelease, match="the plan holds"):
        task.record(Counting())
    check = {str(check): check for check in dpopt.testing.checks(Counting())}["plans_the_same_for_any_dimension"]
    with pytest.raises(AssertionError, match="the layout"):
        check()
