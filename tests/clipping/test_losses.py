"""A loss sees one record at a time: whatever looks at a batch is refused, and whatever does not trains as it should."""

import importlib
import logging
import pkgutil
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from loop import cross_entropy, loop
from torch import nn
from zoo import Of

import dpopt
from dpopt import workloads
from dpopt.clipping import Abadi, engine
from dpopt.clipping.losses import _SEPARABLE, RecordLoss, by_record, check_loss
from dpopt.clipping.state import State
from dpopt.clipping.views import multiplied
from dpopt.errors import ConfigError
from dpopt.privacy import DataOracle
from dpopt.privacy.ledger import Draw, Ledger, Plan
from dpopt.workloads.base import Workload

N, CLASSES = 24, 3
REFUSAL = r"^loss: 'drawn' .* record .* (alone and .* in a batch|alone it ends in)"
KINDS = ("bookkeeping", "vmap")


def one_hot(output, target):
    """The classes of a batch are as many as its largest class needs."""
    columns = F.one_hot(target)
    return -(output.log_softmax(1)[:, : columns.shape[1]] * columns).sum(1)


def masked(output, target):
    loss = cross_entropy(output, target)
    loss[target == 0] *= 0.5
    return loss


def branched(output, target):
    loss = cross_entropy(output, target)
    return torch.stack([each * 2 if each > 1 else each.square() + each for each in loss])


def gaussian(output, target):
    return F.gaussian_nll_loss(output[:, 0], target.to(output), output[:, 1].exp(), reduction="none")


def margin(output, target):
    return F.multi_margin_loss(output, target, reduction="none") + 0.1 * output.square().sum(1)


def weighted(output, target):
    return cross_entropy(output, target) * torch.tensor([1.0, 2.0, 9.0])[target].to(output)


ALONE = {f.__name__: f for f in (cross_entropy, one_hot, masked, branched, gaussian, margin, weighted)}
NEED_LOOPS = {"one_hot", "masked", "branched", "gaussian"}
BATCHES = {
    "outputs": lambda o, y: o.mean(),
    "largest output": lambda o, y: o.detach().amax(),
    "records": lambda o, y: float(len(y)),
    "records of large batches": lambda o, y: float(len(y) > 7),
    "positives": lambda o, y: (y == 1).sum(),
    "classes": lambda o, y: len(y.unique()),
    "own class": lambda o, y: (y[:, None] == y).sum(1),
    "share of own class": lambda o, y: (y[:, None] == y).double().mean(1).to(o),
    "place": lambda o, y: torch.arange(len(y)),
    "neighbour": lambda o, y: o[:, 0].roll(1),
    "so far": lambda o, y: o[:, 0].cumsum(0),
    "rank": lambda o, y: o[:, 0].argsort().argsort(),
    "first target": lambda o, y: y[0],
    "target of the next": lambda o, y: y.roll(-1),
}


@st.composite
def losses(draw):
    """A loss, and True if it looks at the batch: by a factor that differs from one by 1e-7 or more."""
    name, looks = draw(st.sampled_from(sorted(ALONE))), draw(st.booleans())
    base, share = ALONE[name], 10.0 ** draw(st.integers(-7, 0))
    statistic = BATCHES[draw(st.sampled_from(sorted(BATCHES)))]
    function = (lambda o, y: base(o, y) * (1 + share * statistic(o, y))) if looks else (lambda o, y: base(o, y))
    function.__name__ = "drawn"
    return function, looks, name in NEED_LOOPS


def problem(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    return model, torch.randn(N, 4), torch.arange(N) % CLASSES


@settings(max_examples=60, deadline=None)
@given(drawn=losses(), kind=st.sampled_from(KINDS), seed=st.integers(0, 2**16))
def test_losses_that_look_at_a_batch_are_refused_and_the_others_are_exact(drawn, kind, seed):
    loss, looks, needs_loop = drawn
    model, x, y = problem(seed)
    if looks:
        with pytest.raises(ConfigError, match=REFUSAL):
            engine(model, loss, kind, sample=(x[:6], y[:6]), batch=N)
        return
    made = engine(model, loss, kind, sample=(x[:6], y[:6]), batch=N)
    everyone, points = torch.ones(N, dtype=torch.bool), [(1.0, made.theta)]
    found = made.clipped(points, x, y, everyone, Abadi(0.3))
    truth = loop(model, loss, points, x, y, everyone, Abadi(0.3))
    assert made.loss.needs_loop is needs_loop
    assert (found.total - truth.total).norm() <= 1e-5 * truth.total.norm()
    torch.testing.assert_close(found.losses, truth.losses, rtol=1e-5, atol=1e-6, check_dtype=False)


@settings(max_examples=40, deadline=None)
@given(statistic=st.sampled_from(sorted(BATCHES)), kind=st.sampled_from(KINDS), left_out=st.integers(0, N - 1))
def test_no_record_changes_the_loss_of_another_though_nobody_has_checked(statistic, kind, left_out):
    """The shape alone: engines that were never verified, with losses that look at whatever they are shown."""
    model, x, y = problem()
    made = engine(model, lambda o, y: cross_entropy(o, y) / (1 + BATCHES[statistic](o, y)), kind)._engine
    others = torch.arange(N) != left_out
    points = [(1.0, made.theta)]
    whole, part = made.per_example(points, x, y), made.per_example(points, x[others], y[others])
    torch.testing.assert_close(whole.losses[:, others], part.losses)
    torch.testing.assert_close(whole.norms[others], part.norms)


# `fit` and cells.


class Refused(NamedTuple):
    loss: object
    targets: object
    message: str


def by_positives(output, target):
    return cross_entropy(output, target) / (target == 1).sum().clamp(min=1)


def without_number(output, target):
    return cross_entropy(output, target) * torch.where(target == 2, torch.nan, 1.0)


def broadcast(output, target):
    return ((output[:, :1] - target) ** 2).mean(1)


def dropped_without_number(output, target):
    return without_number(F.dropout(output, 0.3), target)


def never_alone(output, target):
    return F.binary_cross_entropy_with_logits(output[:, :1].squeeze(), (target > 0).to(output), reduction="none")


class Counter:
    """Keeps state: later calls weigh more."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return cross_entropy(output, target) * self.calls


class Chained:
    """After a record of a lower class, a record's loss has that one's in it: in a batch, and one after the other."""

    def __init__(self):
        self.last = 0.0, CLASSES

    def __call__(self, output, target):
        loss = cross_entropy(output, target)
        if len(loss) > 1:
            return loss + F.pad(loss[:-1] * (target[:-1] < target[1:]), (1, 0))
        (before, lower), self.last = self.last, (loss.item(), target.item())
        return torch.where(lower < target, loss + before, loss)


def classes(n):
    """Sorted, the last class rare."""
    return torch.arange(n).mul(2).div(n - 2, rounding_mode="floor").clamp(max=2)


REFUSED = {
    "positives": Refused(by_positives, classes, "'by_positives'.*alone and .* in a batch of"),
    "calls": Refused(Counter(), classes, "'Counter'.*the loss of a record is"),
    "broadcast": Refused(broadcast, torch.randn, r"'broadcast'.*alone and .* in a batch of.*\[n, 3\], \[n\]"),
    "rare class": Refused(without_number, classes, "'without_number'.*the loss of a record with target 2 is nan"),
    "random": Refused(dropped_without_number, classes, "'dropped_without_number'.*a record with target 2 is"),
    "squeeze": Refused(never_alone, classes, "'never_alone'.*of one record alone it ends in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fit_refuses_a_loss_before_the_first_draw(name, monkeypatch):
    monkeypatch.setattr(DataOracle, "draw", lambda self: pytest.fail("a draw was taken"))
    torch.manual_seed(0)
    case, n = REFUSED[name], 200
    model, options = nn.Linear(4, CLASSES), {"epsilon": 8, "delta": 1e-3, "epochs": 1, "batch_size": 20}
    data = torch.randn(n, 4), case.targets(n)
    with pytest.raises(ConfigError, match=f"^loss: {case.message}"):
        dpopt.fit(model, case.loss, data, optimizer="dp_sgd", progress=False, **options)


def test_records_are_tried_in_two_orders():
    """In the first, the losses of this one's records are those of the batch."""
    torch.manual_seed(0)
    model, loss = nn.Linear(4, CLASSES), by_record(Chained())
    with pytest.raises(ConfigError, match=r"^loss: 'Chained'.* alone and .* after other records"):
        check_loss(State(model), model, loss, torch.randn(2, 4), torch.tensor([0, 1]))


@pytest.mark.parametrize("is_late", [False, True])
def test_what_the_first_draw_shows_has_spent_nothing(is_late):
    """Also where the engine was verified before, and the model mixes only in large batches of real records."""
    torch.manual_seed(0)
    model = Of(lambda m, x: m.layer(x - x.mean(0) if m.is_on else x), layer=nn.Linear(4, CLASSES))
    x, y = torch.randn(200, 4), torch.arange(200) % CLASSES
    model.is_on = not is_late
    sample = {"sample": (x[:3], y[:3]), "batch": 100} if is_late else {}
    made = engine(model, cross_entropy, "bookkeeping", **sample)
    optimizer = dpopt.create("dp_sgd", lr=0.1)
    plan = Plan({"gradient": 1.0}, Ledger([Draw(0.5, (1.0,))] * 3), 1.0, 0.5, 3, made.dimension, 1e-3, "rdp")
    oracle = DataOracle(made, x, y, plan, draw_seed=1, noise_seed=2)
    model.is_on = True
    for _ in range(2):
        with pytest.raises(ConfigError, match="example"):
            optimizer.step(optimizer.init(made.theta), oracle)
    assert (oracle.draws_taken, len(oracle.ledger)) == (0, 0)
    model.is_on = False
    optimizer.step(optimizer.init(made.theta), oracle)
    assert (oracle.draws_taken, len(oracle.ledger)) == (1, 1)


# The ways in which a loss is called.


def test_the_losses_of_the_package_give_the_same_bits_for_a_batch_and_for_its_records():
    torch.manual_seed(0)
    made = {
        "Workload.loss": (torch.randn(N, 5), torch.randint(5, (N,))),
        "E2E.loss": (torch.randn(N, 7, 11), torch.randint(-1, 11, (N, 7)).clamp(min=0)),
        "GaussianMixture.loss": (torch.randn(N, 2), torch.zeros(N)),
    }
    for module in pkgutil.iter_modules(workloads.__path__, "dpopt.workloads."):
        importlib.import_module(module.name)
    kinds = [Workload]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each.__module__.startswith("dpopt.")]
    functions = {f"{k.__module__}:{k.__qualname__}.loss": k for k in kinds if "loss" in vars(k)}
    assert sorted(functions) == sorted(_SEPARABLE)
    for path, kind in functions.items():
        output, target = made[path.partition(":")[2]]
        loss = partial(vars(kind)["loss"], object.__new__(kind))
        ways = []
        for way in (loss, by_record(lambda o, y, loss=loss: loss(o, y)), one_after_the_other(loss)):
            leaf = output.clone().requires_grad_()
            values = way(leaf, target)
            ways.append((values, *torch.autograd.grad(values.sum(), leaf)))
        for values, gradients in ways[1:]:
            assert torch.equal(values, ways[0][0]), path
            assert torch.equal(gradients, ways[0][1]), path


def one_after_the_other(loss):
    made = RecordLoss(loss)
    made.needs_loop = True
    return made


def test_only_the_package_s_own_losses_are_called_on_a_batch():
    own = dpopt.workloads.base.Workload.loss
    calls = []

    def forged(output, target):
        calls.append(len(target))
        return cross_entropy(output, target)

    forged.__module__, forged.__qualname__, forged.__func__ = own.__module__, own.__qualname__, own
    forged.is_trusted = True
    torch.testing.assert_close(by_record(forged)(torch.randn(5, 3), torch.arange(5) % 3).shape, torch.Size([5]))
    assert calls == [1]

    class Mine(Workload):
        def loss(self, output, target):
            return cross_entropy(output, target)

    assert not by_record(Mine.loss.__get__(object.__new__(Mine))).is_trusted
    assert by_record(Workload.loss.__get__(object.__new__(Mine))).is_trusted


def test_the_slower_way_is_logged_once_with_its_cost(caplog):
    loss, output, target = by_record(gaussian), torch.randn(5, 3), torch.arange(5) % 3
    with caplog.at_level(logging.WARNING, "dpopt"):
        for _ in range(3):
            torch.testing.assert_close(loss(output, target), gaussian(output, target))
    (record,) = [each.getMessage() for each in caplog.records if each.name.startswith("dpopt")]
    assert "gaussian" in record
    assert "ms for each" in record


class Pair(NamedTuple):
    scores: torch.Tensor
    extra: dict


@pytest.mark.parametrize(
    ("made", "scores"),
    [
        (lambda t: Pair(t, {"shared": torch.tensor(2.0)}), lambda o: o.scores * o.extra["shared"] / 2),
        (
            lambda t: SimpleNamespace(scores=[t, [2.0, None, t[:, 0]]]),
            lambda o: o.scores[0] + 0 * o.scores[1][2][:, None],
        ),
    ],
    ids=["named tuple", "object"],
)
def test_outputs_of_any_structure_are_taken_row_by_row(made, scores):
    output, target = torch.randn(6, 3), torch.arange(6) % 3
    loss = lambda o, y: cross_entropy(scores(o), y)  # noqa: E731
    for way in (by_record(loss), one_after_the_other(loss)):
        torch.testing.assert_close(way(made(output), target), cross_entropy(output, target))


@dataclass(frozen=True)
class Near:
    features: torch.Tensor
    codebook: torch.Tensor


@dataclass(slots=True)
class Slots:
    features: torch.Tensor
    codebook: torch.Tensor


@pytest.mark.parametrize("size", [15, 16, 17])
@pytest.mark.parametrize(
    "kind", [lambda *parts: parts, Near, Slots, lambda *parts: {"features": parts[0], "codebook": parts[1]}]
)
def test_a_codebook_is_whole_though_it_has_as_many_rows_as_the_batch(kind, size):
    torch.manual_seed(0)
    codebook = torch.randn(16, 3)
    model = Of(lambda m, x: kind(m.layer(x), codebook), layer=nn.Linear(4, 3))

    def nearest(output, target):
        parts = output.values() if isinstance(output, dict) else output
        features, codes = parts if isinstance(output, tuple | dict) else (output.features, output.codebook)
        return (features[:, None] - codes).square().sum(-1).amin(1)

    x, y = torch.randn(20, 4), torch.zeros(20)
    made = engine(model, nearest, "bookkeeping", sample=(x[:3], y[:3]), batch=16)
    each = made.clipped([(1.0, made.theta)], x[:size], y[:size], torch.ones(size, dtype=torch.bool), Abadi(1.0))
    alone = [
        made.clipped([(1.0, made.theta)], x[i : i + 1], y[:1], torch.tensor([True]), Abadi(1.0)) for i in range(size)
    ]
    torch.testing.assert_close(each.total, sum(one.total for one in alone))


def in_place(output, target):
    output /= 2
    return cross_entropy(output, target)


def negatives(output, target):
    return F.relu(1 + output.gather(1, torch.randint(CLASSES, target.shape)[:, None])[:, 0] - output[:, 0])


def dropped(output, target):
    return cross_entropy(F.dropout(output, 0.3), target)


@pytest.mark.parametrize("loss", [in_place, negatives, dropped])
@pytest.mark.parametrize("kind", ["auto", "bookkeeping"])
def test_a_loss_may_work_in_place_and_draw_random_numbers(loss, kind):
    model, x, y = problem()
    made = engine(model, loss, kind, sample=(x[:6], y[:6]), batch=N)
    assert made.clipped([(1.0, made.theta)], x, y, torch.ones(N, dtype=torch.bool), Abadi(0.1)).norms.isfinite().all()


@pytest.mark.parametrize("statistic", ["outputs", "neighbour", "first target", "so far", "rank"])
def test_a_random_loss_that_looks_at_the_batch_is_refused(statistic):
    model, x, y = problem()
    loss = lambda o, y: dropped(o, y) * (1 + BATCHES[statistic](o, y))  # noqa: E731
    with pytest.raises(ConfigError, match=r"^loss: .*(changes with the records beside it|ends in)"):
        engine(model, loss, sample=(x[:6], y[:6]), batch=N)


def test_outputs_without_a_row_for_each_record_are_refused():
    """A loss would see those of all records."""
    with pytest.raises(ConfigError, match=r"^model: 'outputs \[3, 6\]' .* a row for each of 6 records"):
        by_record(lambda o, y: cross_entropy(o.T, y))(torch.randn(3, 6), torch.arange(6) % 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", [cross_entropy, gaussian])
def test_a_mean_over_views_takes_each_view_alone(base, kind):
    torch.manual_seed(0)
    made = multiplied(nn.Linear(4, 3), base, transform=lambda x: x, augment=lambda x: x, multiplicity=3, dims=2)
    x, y = torch.randn(6, 3, 4), torch.arange(6) % 3
    clipper = engine(made.model, made.loss, kind, sample=(x, y), batch=6)
    found = clipper.clipped([(1.0, clipper.theta)], x, y, torch.ones(6, dtype=torch.bool), Abadi(0.1))
    expected = torch.stack([base(made.model._orig_mod(x[:, k]), y) for k in range(3)], 1)
    torch.testing.assert_close(found.losses[0], expected.mean(1).detach())
    looks = multiplied(nn.Linear(4, 3), by_positives, transform=abs, augment=abs, multiplicity=3, dims=2)
    with pytest.raises(ConfigError, match="'by_positives'"):
        engine(looks.model, looks.loss, kind, sample=(x, y), batch=6)


def test_a_loss_with_weights_of_the_model_s_type_is_compared_in_it():
    """Such a loss cannot be computed in float64."""
    model, x, y = problem()
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 30.0]), reduction="none")
    assert not engine(model, loss, sample=(x, y), batch=N).loss.needs_loop
