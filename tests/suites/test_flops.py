"""FLOPs: of models whose closed form is known, what they say of a plan's cost, and the rates of devices."""

import json
from itertools import pairwise

import pytest
import torch
from short import loss
from small_suites import train_cell
from torch import nn

from dpopt import registry
from dpopt.runs import probe
from dpopt.suites import estimate
from dpopt.suites.plan import plan
from dpopt.workloads.base import Outline, Split, mlp, outlined


def test_an_mlps_flops_are_those_of_its_matrices():
    """Two for each weight; a backward pass makes as many again for the weights and for the inputs, but the first's."""
    sizes = (30, 20, 7, 5)
    products = [2 * a * b for a, b in pairwise(sizes)]
    forward, both = estimate.count(outlined(lambda: mlp(*sizes), sizes[:1], 1), loss)
    assert forward == sum(products)
    assert both == 3 * sum(products) - products[0]


def test_a_convolutions_flops_are_those_of_its_positions():
    """3 x 3 over 10 x 12 positions without padding, 4 channels to 6, in two groups; then a layer above it."""

    def make():
        return nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6 * 8 * 10, 5))

    convolution, linear = 2 * (8 * 10) * 6 * (4 // 2) * 9, 2 * 480 * 5
    assert estimate.count(outlined(make, (4, 10, 12), 1), loss) == (convolution + linear, 2 * convolution + 3 * linear)


def test_attention_is_counted():
    """ViT-Ti/16 at 224 pixels, 197 tokens of 192 numbers: its layers, and products of queries, keys and values."""
    spec = registry.spec("workload", "cifar10_vit_tiny", registry.create_workload("cifar10_vit_tiny", subset="full"))
    tokens, width = 197, 192
    layers = 12 * (3 + 1 + 4 + 4) * width**2 * tokens + 196 * 3 * 16**2 * width + width * 10
    attention = 12 * 2 * tokens**2 * width
    work = estimate._work_of(json.dumps(spec))
    assert work.dimension == 5_526_346
    assert work.evaluation == (5000 + 10_000) * 2 * (layers + attention)
    assert work.gradient == pytest.approx(6 * (layers + attention), rel=0.01)


def test_a_model_that_looks_at_values():
    """GPT-2 of transformers does, unless its tensors say that they are fake."""
    spec = registry.spec("workload", "e2e_gpt2_random", registry.create_workload("e2e_gpt2_random"))
    work = estimate._work_of(json.dumps(spec))
    layers, width, vocabulary, length = 2, 128, 2048, 80
    products = layers * 12 * width**2 * length + layers * 2 * length**2 * width + vocabulary * width * length
    assert work.gradient == pytest.approx(6 * products, rel=0.01)
    assert work.dimension == sum(p.numel() for p in registry.create_workload("e2e_gpt2_random").model().parameters())


class Looks(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


def test_what_cannot_be_counted():
    with pytest.raises((RuntimeError, NotImplementedError)):
        estimate.count(
            Outline(Looks(), Split(torch.empty(1, 2, device="meta"), torch.empty(1, device="meta")), 1), loss
        )
    texts = registry.create_workload("texts", encoder="someone/unknown", subset="full")
    assert estimate._work_of(json.dumps(registry.spec("workload", "texts", texts))) is None


@pytest.fixture
def rows(write_suite, store):
    """DP-SGD at two batch sizes and FiBeR, which computes two gradients a draw; two rates, one seed."""
    suite = write_suite(overrides=["optimizers=[dp_sgd,fiber]", "batch_size=[800,1600]", "seeds=0", "device=cpu"])
    return suite, estimate.rows(plan(suite), store)


def test_a_rows_flops_are_those_of_its_draws_and_its_curve(rows):
    """synthetic_logreg of 4 features: a layer of 4 to 2, whose inputs need no gradient."""
    forward = 2 * 4 * 2
    for row, points, size in zip(rows[1], (1, 1, 2, 2), (800, 1600, 800, 1600), strict=True):
        draws = 16_000 // size  # fewer than a curve has marks
        curve = draws * (1000 + 2000) * forward
        assert row.operations == len(row.waiting) * (16_000 * points * 2 * forward + curve)
        timing = row.by_flops(1e6)
        assert timing.draw == pytest.approx(points * (size * 2 * forward / 1e6 + estimate.CALL))
        each = row.operations / 1e6 / len(row.waiting)
        assert timing.seconds(draws) == pytest.approx(each + draws * points * estimate.CALL + estimate.PREPARE)


def test_times_come_before_estimates(rows, store, monkeypatch):
    suite, (first, *others) = rows
    train_cell(first.cells[0], store, device="cpu")
    monkeypatch.setattr(probe, "flops_per_second", lambda device: 1e9)
    timed = estimate.rows(plan(suite), store)
    probe.find_times(timed, store, suite)
    assert [row.timing.is_estimate for row in timed] == [False, True, True, True]
    assert timed[1].timing == others[0].by_flops(1e9)
