"""Several runs at once against the ordinary engines, one run at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
from loop import ONE, RULES, TWO, around, assert_near, off
from timm.layers import StdConv2d
from torch import nn
from torch.func import vmap

from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.flat import clip_factors
from dpopt.clipping.lot import LotEngine, together
from dpopt.clipping.recording import Unsupported
from dpopt.clipping.vmap import VmapEngine
from dpopt.workloads.base import mlp

RUNS, EXAMPLES = 3, 5


class Text(nn.Module):
    """Words are looked up, and the same table scores them."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.norm(self.table(ids)) + 1).mean(1)


def pixels(*shape):
    return lambda: torch.randn(RUNS, EXAMPLES, *shape)


MODELS = {
    "mlp": (lambda: mlp(6, 5, 4), pixels(2, 3)),
    "in place": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4)), pixels(6)),
    "sequences": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.RMSNorm(9), nn.Tanh(), Mean(), nn.Linear(9, 4)),
        pixels(3, 6),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2), nn.Tanh()),
            *(nn.Conv2d(6, 9, 3), nn.Flatten(), nn.Linear(9, 4)),
        ),
        pixels(2, 5, 5),
    ),
    "text": (Text, lambda: torch.randint(7, (RUNS, EXAMPLES, 3))),
}


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def loss(output, target):
    return F.cross_entropy(output, target, reduction="none")


def problem(name):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, x, y = make(), inputs(), torch.randint(4, (RUNS, EXAMPLES))
    return model, x, y, torch.rand(RUNS, EXAMPLES) < 0.8


def matrices(theta, weights):
    """Weighted points of all runs."""
    runs = [around(theta, weights) for _ in range(RUNS)]
    return [(weight, torch.stack([points[k][1] for points in runs])) for k, weight in enumerate(weights)]


def clipped(engine, points, x, y, mask, clip, scale=None):
    """What `ClippingEngine.clipped` gives, for all runs."""
    seen = engine.examined(points, x, y, scale)
    return seen.sums(vmap(lambda norm, row: clip_factors(clip, norm, row))(seen.norms, mask)), seen.losses, seen.norms


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("weights", [ONE, TWO], ids=["one point", "two points"])
@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
def test_each_run_has_what_it_has_alone(name, weights, is_scaled):
    model, x, y, mask = problem(name)
    engine = LotEngine(model, loss)
    points = matrices(engine.theta, weights)
    scale = torch.rand(RUNS, engine.dimension) * 3 if is_scaled else None
    for clip in RULES:
        totals, losses, norms = clipped(engine, points, x, y, mask, clip, scale)
        again = engine.lot_losses([thetas for _, thetas in points], x, y)
        assert_near(again, losses.double())
        for other in (BookkeepingEngine(model, loss), VmapEngine(model, loss)):
            for run in range(RUNS):
                own = [(weight, thetas[run]) for weight, thetas in points]
                alone = other.clipped(own, x[run], y[run], mask[run], clip, None if scale is None else scale[run])
                assert_near(totals[run], alone.total.double(), 1e-4)
                assert_near(losses[:, run], alone.losses.double(), 1e-4)
                assert_near(norms[run], alone.norms.double(), 1e-4)


def test_every_model_here_can_be_verified():
    for name in MODELS:
        model, x, y, _ = problem(name)
        LotEngine(model, loss).verify_lot(x[0], y[0])


def test_a_run_whose_numbers_are_lost_leaves_the_others_alone():
    model, x, y, mask = problem("mlp")
    engine = LotEngine(model, loss)
    points = matrices(engine.theta, ONE)
    sound = clipped(engine, points, x, y, mask, RULES[0])
    points[0][1][1] = math.nan
    totals, losses, norms = clipped(engine, points, x, y, mask, RULES[0])
    for lost, kept in zip((totals, losses[0], norms), (sound[0], sound[1][0], sound[2]), strict=True):
        assert torch.equal(lost[[0, 2]], kept[[0, 2]])
    assert norms[1].isnan().all()
    assert not totals[1].any(), "no example of it has a gradient"


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_record_that_is_not_finite_contributes_nothing(value):
    model, x, y, mask = problem("mlp")
    engine, mask = LotEngine(model, loss), torch.ones_like(mask)
    points = matrices(engine.theta, ONE)
    x[1, 2] = value
    totals, _, norms = clipped(engine, points, x, y, mask, RULES[0])
    assert totals.isfinite().all()
    alone = BookkeepingEngine(model, loss).clipped([(1.0, points[0][1][1])], x[1], y[1], mask[1], RULES[0])
    assert_near(totals[1], alone.total.double(), 1e-4)
    assert torch.equal(norms[1].isfinite(), alone.norms.isfinite())


def test_a_bound_may_differ_between_runs():
    model, x, y, mask = problem("mlp")
    engine = LotEngine(model, loss)
    points, bounds = matrices(engine.theta, ONE), torch.tensor([0.1, 1.0, 10.0])
    seen = engine.examined(points, x, y)
    kind = type(RULES[3])

    def factors(bound, norm, row):
        return torch.minimum(1 / norm, 1 / bound) * row

    totals = seen.sums(vmap(factors)(bounds, seen.norms, mask))
    for run, bound in enumerate(bounds.tolist()):
        alone = engine.clipped([(1.0, points[0][1][run])], x[run], y[run], mask[run], kind(bound))
        assert_near(totals[run], alone.total.double(), 1e-4)


class Mixing(nn.Module):
    """Takes the mean over the batch away, once it is told to."""

    def __init__(self, model):
        super().__init__()
        self.model, self.is_on = model, False

    def forward(self, x):
        return self.model(x - x.mean(0) if self.is_on else x)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(Own(), nn.Linear(6, 4)), "Own"),
        (nn.Sequential(StdConv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 4)), "StdConv2d"),
    ],
    ids=["own layer", "standardized"],
)
def test_layers_that_need_their_parameters_are_refused(model, reason):
    with pytest.raises(Unsupported, match=reason):
        LotEngine(model, loss)


def test_models_that_draw_random_numbers_are_refused():
    engine = LotEngine(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4)), loss)
    with pytest.raises(Unsupported, match="random"):
        engine.verify_lot(torch.randn(3, 6), torch.tensor([0, 1, 2]))


def test_a_batch_of_training_shows_that_examples_mix():
    """As for one run, see `test_mixing`: by the records of the first."""
    model, x, y, _ = problem("mlp")
    mixes = Mixing(model)
    engine = LotEngine(mixes, loss)
    engine.verify_lot(x[0], y[0])
    points = matrices(engine.theta, ONE)
    mixes.is_on = True
    with pytest.raises(Unsupported, match="other examples"):
        engine.examined(points, x, y)
    mixes.is_on = False
    engine.examined(points, x, y)


def test_verification_finds_a_wrong_engine(monkeypatch):
    engine = LotEngine(mlp(6, 5, 4), loss)
    right = LotEngine._views
    monkeypatch.setattr(LotEngine, "_views", lambda self, thetas: right(self, thetas.flip(0)))
    with pytest.raises(Unsupported):
        engine.verify_lot(torch.randn(3, 6), torch.tensor([0, 1, 2]))


def test_together_sees_all_runs():
    def both(a, b):
        assert (a.shape, b.shape) == ((RUNS, 2), (RUNS, 4))
        return a.sum(1), b * 2

    first, second = vmap(lambda a, b: together(both, a, b), in_dims=(0, None))(torch.ones(RUNS, 2), torch.ones(4))
    assert first.tolist() == [2.0] * RUNS
    assert second.tolist() == [[2.0] * 4] * RUNS
    with pytest.raises(RuntimeError, match="outside"):
        together(both, torch.ones(2), torch.ones(4))
    assert off(first, torch.full((RUNS,), 2.0)) == 0
