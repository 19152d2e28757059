"""DP-MicroAdam against plain torch that keeps every gradient dense, on the releases of a noisy run."""

import math

import pytest
import torch

import dpopt
from dpopt.testing.task import Task


@pytest.mark.parametrize(("density", "window"), [(0.01, 10), (0.2, 4), (1.0, 1)])
def test_the_steps_are_those_of_plain_torch(density, window):
    fields = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "density": density, "window": window}
    recording = Task(dtype=torch.float64).record(dpopt.create("dp_microadam", **fields))
    theta, waiting, passed = recording.start, torch.zeros_like(recording.start), []
    for t, (release,) in enumerate(recording.releases, start=1):
        waiting = waiting + release.value
        least = waiting.abs().sort(descending=True).values[math.ceil(density * len(theta)) - 1]
        passed.append(torch.where(waiting.abs() >= least, waiting, 0.0))
        waiting = waiting - passed[-1]
        kept = list(enumerate(reversed(passed[-window:])))
        m = sum(0.2 * 0.8**age * value for age, value in kept) / (1 - 0.8**t)
        v = sum(0.05 * 0.95**age * value**2 for age, value in kept) / (1 - 0.95**t)
        theta = theta - 0.05 * m / (v.sqrt() + 1e-3)
    torch.testing.assert_close(recording.final.theta, theta)
    torch.testing.assert_close(recording.final.error, waiting)
