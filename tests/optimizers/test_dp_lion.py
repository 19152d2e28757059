"""DP-Lion and DP-SignSGD against plain torch, on the releases of a noisy run."""

import pytest
import torch

import dpopt
from dpopt.testing.task import Task


@pytest.mark.parametrize(
    ("name", "betas", "decay"),
    [("dp_lion", (0.9, 0.99), 0.0), ("dp_lion", (0.5, 0.8), 0.1), ("dp_signsgd", (0, 0), 0.0)],
)
def test_the_steps_are_those_of_plain_torch(name, betas, decay):
    fields = {} if name == "dp_signsgd" else {"betas": betas}
    recording = Task(dtype=torch.float64).record(dpopt.create(name, lr=0.02, weight_decay=decay, **fields))
    theta, m = recording.start, torch.zeros_like(recording.start)
    for (release,) in recording.releases:
        c = betas[0] * m + (1 - betas[0]) * release.value
        m = betas[1] * m + (1 - betas[1]) * release.value
        theta = theta - 0.02 * (torch.sign(c) + decay * theta)
    torch.testing.assert_close(recording.final.theta, theta)
