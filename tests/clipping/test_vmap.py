"""The vmap engine against a loop of plain autograd over single examples."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpopt.clipping import Abadi, Automatic, Normalized, engine
from dpopt.errors import ConfigError


def cross_entropy(output, target):
    return F.cross_entropy(output, target, reduction="none")


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


def cnn():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(self.linear(torch.tanh(self.linear(x)))))


def frozen_body():
    model = mlp()
    model[0].requires_grad_(False)
    return model


MODELS = {"mlp": (mlp, (6,)), "cnn": (cnn, (1, 4, 4)), "tied": (Tied, (6,)), "frozen": (frozen_body, (6,))}


def loop(model, made, points, x, y, clip):
    """sum_i clip(sum_k w_k grad f_i(theta_k)), one example and one point at a time."""
    trained = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(made.dimension)
    for i in range(len(x)):
        combined = torch.zeros(made.dimension)
        for weight, theta in points:
            made.load(theta)
            loss = cross_entropy(model(x[i : i + 1]), y[i : i + 1]).sum()
            combined += weight * torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        total += combined * clip.factor(combined.norm()[None])
    return total


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip", [Abadi(0.3), Abadi(math.inf), Automatic(), Normalized(0.3)], ids=str)
@pytest.mark.parametrize("weights", [(1.0,), (1.7, -0.7)], ids=["one", "two"])
def test_clipped_sum_equals_a_loop(name, clip, weights):
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build()
    made = engine(model, cross_entropy, "vmap")
    x, y = torch.randn(7, *shape), torch.randint(0, 3, (7,))
    points = [(weight, made.theta + 0.1 * torch.randn(made.dimension)) for weight in weights]
    result = made.clipped_sum(points, x, y, torch.ones(7, dtype=torch.bool), clip)
    torch.testing.assert_close(result, loop(model, made, points, x, y, clip), rtol=1e-4, atol=1e-5)


def test_points_are_combined_before_clipping():
    """Mistake 16: clipping each point first has another sensitivity and another value."""
    torch.manual_seed(0)
    made = engine(mlp(), cross_entropy, "vmap")
    x, y, mask = torch.randn(5, 6), torch.randint(0, 3, (5,)), torch.ones(5, dtype=torch.bool)
    points = [(3.0, made.theta), (-2.0, made.theta + 0.5)]
    together = made.clipped_sum(points, x, y, mask, Abadi(0.1))
    apart = sum(w * made.clipped_sum([(1.0, p)], x, y, mask, Abadi(0.1)) for w, p in points)
    assert together.norm() <= 0.5001
    assert not torch.allclose(together, apart, atol=1e-3)


def test_masked_and_bad_rows_count_for_nothing():
    torch.manual_seed(0)
    made = engine(mlp(), cross_entropy, "vmap")
    x, y = torch.randn(6, 6), torch.randint(0, 3, (6,))
    clip, everyone = Abadi(0.3), torch.ones(6, dtype=torch.bool)
    expected = made.clipped_sum([(1.0, made.theta)], x[:4], y[:4], everyone[:4], clip)
    mask = torch.tensor([True] * 4 + [False] * 2)
    torch.testing.assert_close(made.clipped_sum([(1.0, made.theta)], x, y, mask, clip), expected)
    x[4], x[5, 0] = math.nan, math.inf
    torch.testing.assert_close(made.clipped_sum([(1.0, made.theta)], x, y, everyone, clip), expected)


def test_a_gradient_whose_norm_overflows_counts_for_nothing():
    torch.manual_seed(0)
    made = engine(nn.Linear(6, 3), cross_entropy, "vmap")
    x, y, mask = torch.randn(3, 6), torch.tensor([0, 1, 2]), torch.ones(3, dtype=torch.bool)
    expected = made.clipped_sum([(1.0, made.theta)], x[:2], y[:2], mask[:2], Abadi(0.3))
    x[2] = 1e30
    torch.testing.assert_close(made.clipped_sum([(1.0, made.theta)], x, y, mask, Abadi(0.3)), expected)


def test_a_model_that_mixes_examples_cannot_carry_one_into_another():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            return self.linear(x - x.mean(0))

    made = engine(Centred(), cross_entropy, "vmap")
    x, y, mask = torch.randn(4, 6), torch.randint(0, 3, (4,)), torch.ones(4, dtype=torch.bool)
    before = made.losses([made.theta], x, y, mask)[0, :3]
    x[3] = 1e6
    torch.testing.assert_close(made.losses([made.theta], x, y, mask)[0, :3], before)


def test_losses_and_outputs():
    torch.manual_seed(0)
    model = mlp()
    made = engine(model, cross_entropy, "vmap")
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    shifted = made.theta + 0.1
    losses = made.losses([made.theta, shifted], x, y, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(losses[0], cross_entropy(model(x), y).detach())
    made.load(shifted)
    torch.testing.assert_close(losses[1], cross_entropy(model(x), y).detach())
    torch.testing.assert_close(made.theta, shifted)
    torch.testing.assert_close(made.outputs(shifted, x), model(x).detach())
    assert not losses.requires_grad


@pytest.mark.parametrize("weights", [(1.0,), (1.7, -0.7)], ids=["one", "two"])
def test_losses_are_those_of_the_gradients_forward_pass(weights):
    """Dropout included: from equal generators, both methods see the same masks, at every point."""
    torch.manual_seed(0)
    made = engine(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), cross_entropy, "vmap")
    x, y, mask = torch.randn(5, 6), torch.randint(0, 3, (5,)), torch.arange(5) < 4
    thetas = [made.theta + 0.1 * k for k in range(len(weights))]
    points = list(zip(weights, thetas, strict=True))

    def at_one_seed(query, *arguments):
        torch.manual_seed(7)
        return query(*arguments)

    summed, losses, _ = at_one_seed(made.clipped, points, x, y, mask, Abadi(0.3))
    assert losses.shape == (len(weights), 5)
    torch.testing.assert_close(losses, at_one_seed(made.losses, thetas, x, y, mask))
    torch.testing.assert_close(summed, at_one_seed(made.clipped_sum, points, x, y, mask, Abadi(0.3)))
    assert not torch.allclose(losses, made.losses(thetas, x, y, mask))
    assert not losses.requires_grad


def test_frozen_parameters_are_not_in_theta():
    assert engine(frozen_body(), cross_entropy, "vmap").dimension == 5 * 3 + 3 + 2 * 5


def test_physical_batch_fits_memory():
    small = engine(mlp(), cross_entropy, "vmap")
    assert small.physical_batch(100.0) == 130
    wide = engine(nn.Linear(10_000, 1000), cross_entropy, "vmap")
    assert wide.physical_batch(100.0) == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "BatchNorm1d.*GroupNorm"),
        (nn.Linear(4, 2).requires_grad_(False), "requires_grad"),
    ],
)
def test_models_that_cannot_be_trained(model, message):
    """Mistake 10: BatchNorm mixes examples."""
    with pytest.raises(ConfigError, match=message):
        engine(model, cross_entropy, "vmap")


def test_unknown_engine():
    with pytest.raises(ConfigError, match="did you mean 'vmap'"):
        engine(mlp(), cross_entropy, "vmp")
