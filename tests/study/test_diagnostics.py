"""What a run notes of its gradients is what they are, and changes nothing of the run."""

import json
import math

import pytest
import torch
from short import loss
from small_suites import train_cell
from torch import nn

from dpopt import create
from dpopt.clipping import Abadi, Automatic, engine
from dpopt.clipping.vmap import VmapEngine
from dpopt.errors import ConfigError
from dpopt.privacy import calibrate
from dpopt.privacy.data import DataOracle, Seen
from dpopt.runs import train as cells
from dpopt.store import Store
from dpopt.study.diagnostics import Diagnostics, _norm_quantiles, class_weights
from dpopt.study.optimal_clip import optimal_clip
from dpopt.suites.plan import plan
from dpopt.suites.suite import load_suite

SUITE = """
defaults: [suite, _self_]
workloads: [digits_mlp]
optimizers: [dp_sgd, auto]
settings:
  dp_sgd: {fields: {lr: 0.5}, tuning: fixed}
  auto: {name: dp_sgd, fields: {lr: 0.5, clip: automatic}, tuning: fixed}
epsilon: [2]
accountant: rdp
clip: 2
batch_size: 300
epochs: 3
seeds: 0
diagnostics: true
"""


NORMS = torch.tensor([0.5, 2.0, 4.0, 8.0, 0.0])
LABELS = torch.tensor([0, 0, 1, 1, 3])


def test_class_weights_by_hand():
    weights = class_weights(NORMS, LABELS, 2.0, 4)
    assert weights[[0, 1, 3]].tolist() == pytest.approx([1.0, (0.5 + 0.25) / 2, 1.0])
    assert math.isnan(weights[2])
    left_out = torch.tensor([1.0, math.nan, math.inf])  # an engine sums neither of the last two
    for clip in (1.0, math.inf):
        assert class_weights(left_out, torch.zeros(3), clip, 1).tolist() == pytest.approx([1 / 3])
    for wrong in ((NORMS, LABELS[:3], 1.0), (NORMS, LABELS, 0.0), (NORMS, LABELS + 1, 1.0), (NORMS, LABELS - 1, 1.0)):
        with pytest.raises(ConfigError, match=r"^(labels|clip): "):
            class_weights(*wrong, 4)


def test_quantiles():
    norms = torch.arange(101.0)
    expected = {"q0": 0, "q5": 5, "q25": 25, "q50": 50, "q75": 75, "q95": 95, "q100": 100}
    assert _norm_quantiles(norms) == pytest.approx(expected)
    assert _norm_quantiles(torch.cat([norms, torch.tensor([math.inf, math.nan])])) == pytest.approx(expected)
    assert all(map(math.isnan, _norm_quantiles(torch.zeros(0)).values()))


def trained(name="bookkeeping", physical_batch=None, **fields):
    """Diagnostics of a short run, and every example's gradient norm and label, draw by draw, from autograd alone."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3), torch.randn(60, 5), torch.randint(3, (60,))
    optimizer = create("dp_sgd", **{"lr": 0.5, "clip": Abadi(1.0)} | fields)
    clipper = engine(model, loss, name)
    size = {"rate": 0.3, "draws": 8, "dimension": clipper.dimension}
    noise_plan = calibrate(optimizer, **size, epsilon=4, delta=1e-3, accountant="rdp")
    bound = None if isinstance(optimizer.clip, Automatic) else optimizer.clip.bound
    own = Diagnostics(VmapEngine(model, loss), bound, noise_plan.noise["gradient"], 18, 8, 3)
    seen, batches = [], {}

    def watch(what):
        own(what)
        rows = what.mask.nonzero()[:, 0]
        gradients = VmapEngine(model, loss).gradients(what.points[0][1], what.x[rows], what.y[rows])
        seen.append((what.draw, gradients.norm(dim=1), what.y[rows]))
        batches.setdefault(what.draw, gradients)

    oracle = DataOracle(
        clipper, x, y, noise_plan, draw_seed=1, noise_seed=2, physical_batch=physical_batch, watch=watch
    )
    state, entries = optimizer.init(clipper.theta), []
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
        entries.append(own.entry())
    return own, entries, seen, batches, noise_plan.noise["gradient"], state


@pytest.mark.parametrize("name", ["bookkeeping", "vmap"])
def test_norms_and_the_best_bound_are_those_of_the_draw(name):
    _, entries, seen, batches, noise, _ = trained(name)
    for (draw, norms, _), entry in zip(seen, entries, strict=True):
        assert entry["private"] is False
        assert entry["norms"]["q50"] == pytest.approx(float(norms.double().quantile(0.5)), rel=1e-4)
        assert entry["norms"]["q100"] == pytest.approx(float(norms.max()), rel=1e-4)
        assert entry["clipped"] == pytest.approx(float((norms > 1).double().mean()), abs=1e-9)
        gradients, n = batches[draw], len(norms)
        clip, error = optimal_clip(gradients, noise * n / 18)
        assert entry["best"]["C"] == pytest.approx(clip, rel=1e-6)
        assert entry["best"]["bias"] == pytest.approx(error.bias / n**2, rel=1e-6)
        assert entry["own"]["noise"] == pytest.approx((noise / 18) ** 2 * gradients.shape[1], rel=1e-6)


def test_a_draw_in_several_physical_batches_counts_as_one():
    whole, parts = ([entry["norms"]["q50"] for entry in trained(physical_batch=size)[1]] for size in (None, 8))
    assert parts == pytest.approx(whole, rel=1e-4)


def test_class_weights_are_of_the_last_quarter():
    own, _, seen, *_ = trained()
    summary = own.summary()
    last = [(norms, labels) for draw, norms, labels in seen if draw >= 6]
    norms, labels = (torch.cat(parts) for parts in zip(*last, strict=True))
    assert set(summary["class_weights"]) == {"0.01", "0.1", "1", "10", "100"}
    for y in range(3):
        weight = (0.1 / norms[labels == y]).clamp(max=1).mean()
        assert summary["class_weights"]["0.1"][y] == pytest.approx(float(weight), rel=1e-4)
        assert summary["class_norms"][y] == pytest.approx(float(norms[labels == y].median()), rel=1e-4)


def test_rules_that_shorten_all_gradients_have_no_bound():
    _, entries, *_ = trained(clip=Automatic())
    assert "clipped" not in entries[0]
    assert "own" not in entries[0]
    assert entries[0]["best"]["C"] > 0


def test_the_best_bound_is_that_of_what_is_clipped():
    """Gradients are combined over the points and scaled first, as the engine does it."""
    torch.manual_seed(0)
    engine = VmapEngine(nn.Linear(5, 3), loss)
    x, y, mask = torch.randn(12, 5), torch.randint(3, (12,)), torch.arange(12) < 10
    points = [(3.0, torch.randn(18)), (-2.0, torch.randn(18))]
    scale = torch.rand(18) * 10
    (w, theta), (v, other) = points
    clipped = scale * (w * engine.gradients(theta, x[:10], y[:10]) + v * engine.gradients(other, x[:10], y[:10]))
    own = Diagnostics(engine, 1.0, 2.0, 10, 4, 3)
    own(Seen(0, points, x, y, mask, torch.ones(12), scale))
    assert own.entry()["best"]["C"] == pytest.approx(optimal_clip(clipped, 2.0)[0], rel=1e-5)


def test_empty_draws_are_no_news():
    own = Diagnostics(VmapEngine(nn.Linear(2, 2), loss), 1.0, 1.0, 4, 10, 2)
    nothing = torch.zeros(0)
    own(Seen(0, [(1.0, torch.zeros(6))], torch.zeros(0, 2), nothing.long(), nothing.bool(), nothing))
    assert math.isnan(own.entry()["norms"]["q50"])
    assert own.summary() == {"private": False}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    path = tmp_path_factory.mktemp("suite") / "diagnosed.yaml"
    path.write_text(SUITE)
    return path


def test_a_run_is_the_same_with_and_without(suite):
    found = []
    for overrides in ([], ["diagnostics=false"]):
        ready = cells.prepare(plan(load_suite(str(suite), ["optimizers=[dp_sgd]", *overrides]))[0].cell)
        # The noise goes by the cell, which says whether it is diagnosed; here both get the same.
        ready.oracle._noise_seed = 5
        state = ready.state
        while ready.oracle.draws_left:
            state = ready.optimizer.step(state, ready.oracle)
        found.append(state.theta)
    assert torch.equal(*found)


def test_a_record_says_that_they_are_not_private(suite, tmp_path):
    store = Store(tmp_path)
    for entry in plan(load_suite(str(suite))):
        record = train_cell(entry.cell, store)
        assert record["diagnostics"]["private"] is False
        assert all(noted["diagnostics"]["private"] is False for noted in store.curve(entry.cell.run_id))
        assert "diagnostics" not in {key for key in record if key.startswith("test_")}
        json.dumps(record, allow_nan=False)


@pytest.mark.slow
def test_an_isolated_optimizer_is_diagnosed_alike(suite, tmp_path):
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    for entry in plan(load_suite(str(suite))):
        record, isolated = train_cell(entry.cell, one), train_cell(entry.cell, other, isolate=True)
        assert isolated["diagnostics"] == record["diagnostics"]
        assert other.curve(entry.cell.run_id) == one.curve(entry.cell.run_id)


def test_a_killed_run_notes_the_same(suite, tmp_path, at_marks):
    class Killed(BaseException):
        pass

    def kill_half_way(draws):
        if draws > 6:
            raise Killed

    cell = plan(load_suite(str(suite), ["optimizers=[dp_sgd]"]))[0].cell
    quiet, store = Store(tmp_path / "quiet"), Store(tmp_path / "killed")
    whole = train_cell(cell, quiet)
    with at_marks(kill_half_way), pytest.raises(Killed):
        train_cell(cell, store, checkpoint_seconds=0)
    assert train_cell(cell, store)["diagnostics"] == whole["diagnostics"]
    assert store.curve(cell.run_id) == quiet.curve(cell.run_id)
