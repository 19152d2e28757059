"""A short run of `fit`, as tests change it: 12 draws at the rate of the conformance task, so noise is solved once."""

import torch
import torch.nn.functional as F
from torch import nn

import dpopt


def loss(output, target):
    return F.cross_entropy(output, target, reduction="none")


def records(n=60, d=4):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def fit(model=None, train=None, loss=loss, **changes):
    options = {"optimizer": "dp_adam", "epsilon": 5.0, "delta": 1e-5, "epochs": 4, "batch_size": 20, "seed": 0}
    options |= {"accountant": "rdp", "progress": False, **changes}
    if model is None:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
    return dpopt.fit(model, loss, records() if train is None else train, **options)


def sparing(step):
    """The `step` of an optimizer, but that it asks for nothing in its last draw, though it planned to."""

    def less(self, state, oracle):
        if state.theta.device.type == "meta" or oracle.draws_left > 1:
            return step(self, state, oracle)
        with oracle.draw():
            return state

    return less


def weights(result):
    """The trained parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in result.model.parameters() if p.requires_grad])
