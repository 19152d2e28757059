"""DP-Muon against torch's Muon and Adam, on the releases of a noisy run."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import dpopt
from dpopt.errors import ConfigError
from dpopt.optimizers.base import is_matrix
from dpopt.optimizers.dp_muon import orthogonal
from dpopt.privacy.oracle import ReplayOracle
from dpopt.testing.task import Task
from dpopt.types import Release, laid_out


@pytest.mark.parametrize("adam", [None, ["2."]], ids=str)
def test_matrices_take_muons_step_and_the_rest_adams(adam):
    task = Task(dtype=torch.float64)
    recording = task.record(dpopt.create("dp_muon", lr=0.02, adam=adam))
    layout = recording.layout
    parameters = [nn.Parameter(part.of(recording.start).clone()) for part in layout]
    by_muon = [part.name in ("0.weight", "2.weight") and part.layer + "." not in (adam or ()) for part in layout]
    muon = torch.optim.Muon(
        [p for p, is_its in zip(parameters, by_muon, strict=True) if is_its],
        lr=0.02,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [p for p, is_its in zip(parameters, by_muon, strict=True) if not is_its]
    rest = torch.optim.Adam(others, lr=0.02, betas=(0.9, 0.95))
    for (release,) in recording.releases:
        for part, parameter in zip(layout, parameters, strict=True):
            parameter.grad = part.of(release.value)
        muon.step()
        rest.step()
    for part, parameter, is_muons in zip(layout, parameters, by_muon, strict=True):
        expected, reached, start = parameter.detach(), part.of(recording.final.theta), part.of(recording.start)
        # torch's iteration is in bfloat16, which has eight bits.
        tolerance = 0.02 if is_muons else 1e-9
        assert (reached - expected).norm() <= tolerance * (expected - start).norm(), part.name


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5), (2, 12)], ids=str)
def test_singular_values_become_nearly_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.T @ orthogonal(matrix, 5) @ v.T
    assert ((turned.diagonal() > 0.65) & (turned.diagonal() < 1.25)).all()
    torch.testing.assert_close(turned, turned.diagonal().diag(), rtol=0, atol=1e-9)
    assert not orthogonal(torch.zeros(shape), 5).any()


def test_what_counts_as_a_matrix():
    shapes = [((4, 3, 2, 2), "Conv2d"), ((4, 3), "Linear"), ((4, 3), "Embedding"), ((4,), "Linear"), ((), "Own")]
    shapes += [((1, 3), "Linear"), ((4, 1), "Linear"), ((1, 3, 3), "Own"), ((4, 3), "EmbeddingBag")]
    layout = laid_out((f"{number}.weight", *each) for number, each in enumerate(shapes))
    assert [is_matrix(part) for part in layout] == [True, True, *[False] * 7]


def test_a_convolutions_kernel_is_a_matrix_of_its_outputs_and_the_rest():
    optimizer, g = dpopt.create("dp_muon", lr=0.5), torch.randn(48, generator=torch.Generator().manual_seed(0))
    plan = dataclasses.replace(Task().plan(optimizer, epsilon=math.inf), dimension=48)
    oracle = ReplayOracle([[Release(g, 0.0)]], plan, layout=laid_out([("0.weight", (4, 3, 2, 2), "Conv2d")]))
    moved = optimizer.step(optimizer.init(torch.zeros(48)), oracle).theta.view(4, 12)
    # Singular values of 1 would make a root mean square of 0.2 lr; the iteration leaves them between 0.7 and 1.2.
    torch.testing.assert_close(moved, -0.5 * 0.2 * 12**0.5 * orthogonal(g.view(4, 12), 5))
    assert 0.7 <= moved.square().mean().sqrt() / (0.5 * 0.2) <= 1.2


def test_rounds_have_an_end_as_each_is_traced():
    with pytest.raises(ConfigError, match=r"^dp_muon\.rounds: 10000 .* \[1, 100\]"):
        dpopt.create("dp_muon", rounds=10_000)
