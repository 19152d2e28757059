"""Models and losses that mix examples: book-keeping refuses them, and `auto` refuses them or follows them exactly."""

import copy
import itertools
import logging
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from loop import TWO, check, loop, squared
from test_architectures import assert_unchanged, everything
from torch import nn
from zoo import Of, batch_norm, floats, ids, mlp, spectral

import dpopt
from dpopt.clipping import Abadi, engine, mixing
from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.vmap import VmapEngine
from dpopt.errors import ConfigError

N = 12


class Case(NamedTuple):
    """A model that mixes.

    Attributes:
        build: makes it.
        inputs: makes n records.
        outlier: what the first record is multiplied by.
        loss: see `engine`.
        is_followed: `vmap` can do it, one example at a time.
    """

    build: object
    inputs: object = floats(4)
    outlier: float = 1.0
    loss: object = squared
    is_followed: bool = True


def below(function, **members):
    """A linear layer above what mixes."""
    return lambda: nn.Sequential(Of(function, **members), nn.Linear(4, 3))


def between(function):
    """What mixes, between layers."""
    return lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Of(function), nn.Linear(4, 3))


def centred(m, x):
    return x - x.mean(0)


def only(condition, function=centred):
    """`function` where `condition` holds of the module and the batch."""
    return lambda m, x: function(m, x) if condition(m, x) else x


def many(m, x):
    return len(x) > 5


def scaled(m, x):
    """By the largest number of the batch, if that is large."""
    return x / (x.abs().max() / 6).clamp(min=1)


def scaled_if_number(m, x):
    """The same, with a guard against what is not finite."""
    return x / (x.abs().max() / 6).nan_to_num(1.0, 1.0, 1.0).clamp(min=1)


def quantised(m, x):
    """Per-tensor fake quantisation to four bits, straight through."""
    step = x.abs().max() / 7
    return x + ((x / step).round() * step - x).detach()


class Experts(nn.Module):
    """Each expert takes at most max(4, n/2) of n examples, the first come."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(4, 2), nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        chosen = shares.argmax(-1, keepdim=True) == torch.arange(2)
        place = chosen.cumsum(0)
        kept = (chosen & (place <= max(4, len(x) // 2))) * shares
        return self.head(x + sum(expert(x) * kept[:, k, None] for k, expert in enumerate(self.experts)))


def counts_calls(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    return x - x.mean(0) if m.calls > 4 else x


def remembers(m, x):
    """State across batches in an attribute."""
    m.seen = 0.9 * getattr(m, "seen", 0.0) + 0.1 * x.detach().mean(0)
    return x - m.seen


def tracks(m, x):
    """State across batches in a buffer."""
    m.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - m.average


class Rescaled(torch.autograd.Function):
    """Gradients of the whole batch are made one long."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient.norm() / 100).clamp(min=1)


class OwnRule(torch.autograd.Function):
    """Mixes under `vmap` alone."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient

    @staticmethod
    def vmap(info, dims, x):
        return x - x.mean(dims[0], keepdim=True), dims[0]


def hooked(m, x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / gradient.norm())
    return x


def marks_largest(m, x):
    return x + F.one_hot(x.argmax(0), len(x)).T


def text(function):
    """What mixes ids, below an embedding."""
    return lambda: nn.Sequential(Of(function), nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3))


def swapped(m, x):
    return m.layer(x.flip(0)).flip(0) if many(m, x) else m.layer(x)


def noisy():
    """Mixes in training only, where dropout hides what it does."""
    return nn.Sequential(Of(only(lambda m, x: m.training)), nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


REVIEWED = {
    "more_than_five": Case(below(only(many))),
    "capacity": Case(Experts),
    "large": Case(below(scaled), outlier=50.0),
    "weak": Case(below(lambda m, x: x + 1e-3 * x.mean(0)), outlier=1e5),
    "quantised": Case(below(quantised), outlier=50.0),
    "positive": Case(below(only(lambda m, x: (x >= 0).all())), lambda n: torch.rand(n, 4), is_followed=False),
}
MIXING = REVIEWED | {
    "mean": Case(below(centred)),
    "mean_of_hidden": Case(between(centred)),
    "mean_in_training": Case(below(only(lambda m, x: m.training))),
    "of_logarithms": Case(below(lambda m, x: centred(m, x.log())), lambda n: torch.rand(n, 4)),
    "guarded": Case(below(scaled_if_number), outlier=50.0),
    "guarded_and_many": Case(below(only(many, scaled_if_number)), outlier=50.0),
    "weakest": Case(below(lambda m, x: x + 1e-12 * x.mean(0))),
    "weakest_and_many": Case(below(only(many, lambda m, x: x + 1e-12 * x.mean(0)))),
    "neighbours": Case(below(lambda m, x: x + x.roll(1, 0))),
    "mirrored": Case(below(only(many, lambda m, x: x + x.flip(0)))),
    "half_a_batch_away": Case(below(only(many, lambda m, x: x + x.roll(len(x) // 2, 0)))),
    "sums_so_far": Case(below(lambda m, x: x.cumsum(0))),
    "sums_to_come": Case(below(only(many, lambda m, x: x.flip(0).cumsum(0).flip(0)))),
    "sorted": Case(below(lambda m, x: x.sort(0).values)),
    "largest": Case(below(marks_largest), is_followed=False),
    "softmax_of_batch": Case(below(lambda m, x: x.softmax(0))),
    "size_of_batch": Case(below(lambda m, x: x / len(x))),
    "size_of_large_batch": Case(below(only(many, lambda m, x: x / len(x)))),
    "singular_value": Case(below(lambda m, x: x / torch.linalg.matrix_norm(x, 2))),
    "statistics": Case(below(lambda m, x: F.batch_norm(x, None, None, training=True)), is_followed=False),
    "control_flow": Case(below(lambda m, x: 2 * x if x.sum() > 0 else x), is_followed=False),
    "calls": Case(below(counts_calls), is_followed=False),
    "memory": Case(below(remembers), is_followed=False),
    "buffer": Case(below(tracks, average=nn.Buffer(torch.zeros(4))), is_followed=False),
    "backward": Case(between(lambda m, x: Rescaled.apply(x)), is_followed=False),
    "gradient_hook": Case(between(hooked)),
    "hidden_in_backward": Case(between(lambda m, x: x + (x.mean(0) - x.mean(0).detach()))),
    "tiny_gradients": Case(between(centred), loss=lambda output, target: 1e-9 * squared(output, target)),
    "swapped_rows": Case(lambda: Of(swapped, layer=nn.Linear(4, 3))),
    "text": Case(text(lambda m, x: (x + x.roll(1, 0)) % 7), ids(7, 3)),
    "text_longest": Case(text(lambda m, x: torch.where(x == x.max(), 0, x)), ids(7, 3)),
    "text_many": Case(text(only(many, lambda m, x: (x + x.sum(0)) % 7)), ids(7, 3)),
}


def made(case, name, **options):
    """The engine, a batch of N records and whether it is known to be decided."""
    torch.manual_seed(0)
    model, x, y = case.build(), case.inputs(N), torch.randn(N)
    if case.outlier != 1:
        x[0] *= case.outlier
    sample = {"sample": (x[4:7], y[4:7])} if options.pop("sampled", True) else {}
    return model, engine(model, case.loss, name, **sample, **options), x, y


def clipped_sum(engine, x, y):
    return engine.clipped_sum([(1.0, engine.theta)], x, y, torch.ones(len(x), dtype=torch.bool), Abadi(0.1))


@pytest.mark.parametrize("name", [*MIXING, "noisy"])
def test_models_that_mix_are_refused_or_followed_one_example_at_a_time(name):
    case = Case(noisy) if name == "noisy" else MIXING[name]
    with pytest.raises(ConfigError):
        clipped_sum(*made(case, "bookkeeping", batch=N)[1:])
    if name == "noisy":  # its dropout leaves nothing to compare
        return
    try:
        model, chosen, x, y = made(case, "vmap", batch=N)
        total = clipped_sum(chosen, x, y)
    except ConfigError:
        assert not case.is_followed
        return
    everyone = torch.ones(N, dtype=torch.bool)
    truth = loop(model, case.loss, [(1.0, chosen.theta)], x, y, everyone, Abadi(0.1)).total
    assert case.is_followed
    assert (total - truth).norm() <= 1e-6 * truth.norm()


@pytest.mark.parametrize("name", [*REVIEWED, "noisy", "mean_of_hidden", "swapped_rows", "text_longest"])
def test_without_a_sample_the_first_batch_tells(name):
    case = Case(noisy) if name == "noisy" else MIXING[name]
    with pytest.raises(ConfigError):
        clipped_sum(*made(case, "bookkeeping", sampled=False)[1:])


@pytest.mark.parametrize("name", REVIEWED)
def test_without_the_look_for_mixing_they_would_be_wrong(name, monkeypatch):
    """The records here show what the models do."""
    case = REVIEWED[name]
    monkeypatch.setattr(mixing, "_must_not_mix", lambda *arguments: None)
    torch.manual_seed(0)
    model, x, y = case.build(), case.inputs(N), torch.randn(N)
    x[0] *= case.outlier
    points, everyone = [(1.0, torch.cat([p.detach().flatten() for p in model.parameters()]))], torch.ones(N).bool()
    total = BookkeepingEngine(model, case.loss).clipped_sum(points, x, y, everyone, Abadi(0.1))
    truth = loop(model, case.loss, points, x, y, everyone, Abadi(0.1)).total
    assert (total - truth).norm() > 0.05 * truth.norm()


def use(made, *batches):
    """The last clipped sum of `batches`."""
    for x in batches:
        total = clipped_sum(made, x, torch.randn(len(x)))
    return total


@pytest.mark.parametrize("sizes", [(5,), (0, 1, 5)], ids=str)
def test_small_batches_hide_nothing(sizes):
    torch.manual_seed(0)
    made = engine(MIXING["mean"].build(), squared, "bookkeeping")
    with pytest.raises(ConfigError, match="example"):
        use(made, *(torch.rand(n, 4) for n in sizes))


@pytest.mark.parametrize("bad", [1, 5])
def test_bad_rows_in_the_first_batch_hide_nothing(bad):
    torch.manual_seed(0)
    made = engine(MIXING["mean_of_hidden"].build(), squared, "bookkeeping")
    x = torch.randn(5, 4)
    x[:bad] = math.nan
    with pytest.raises(ConfigError, match="example"):
        use(made, x, torch.randn(5, 4))


# The look at a batch of training.


def late():
    """Mixes once it is told to."""
    return Of(lambda m, x: m.layer(centred(m, x) if m.is_on else x), layer=nn.Linear(4, 3))


@pytest.mark.parametrize("kind", ["bookkeeping", "auto"])
def test_a_batch_of_training_shows_what_verification_did_not(kind):
    torch.manual_seed(0)
    model = late()
    model.is_on = False
    made = engine(model, squared, kind, sample=(torch.randn(3, 4), torch.randn(3)), batch=N)
    model.is_on = True
    x, y, before = torch.randn(N, 4), torch.randn(N), everything(model)
    with pytest.raises(ConfigError, match="other examples"):
        clipped_sum(made, x, y)
    assert_unchanged(model, before)


def passes(model, made, sizes):
    """How often the model is run for batches of these sizes."""
    counts = []
    for n in sizes:
        runs = []
        handle = model.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        clipped_sum(made, torch.randn(n, 6), torch.randn(n))
        handle.remove()
        counts.append(len(runs))
    return counts


def test_a_batch_is_looked_at_where_it_is_twice_as_large_as_any_before():
    torch.manual_seed(0)
    model = mlp()
    made = engine(model, squared, "bookkeeping", sample=(torch.randn(3, 6), torch.randn(3)))
    first, *rest = passes(model, made, [3, 5, 6, 11, 12, 2, 12, 25])
    assert first > 1
    assert [count > 1 for count in rest] == [False, True, False, True, False, False, True]


@pytest.mark.parametrize("kind", ["bookkeeping", "vmap"])
def test_the_look_changes_no_result_and_no_random_number(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(), nn.Linear(9, 3))
    made = engine(model, squared, kind, sample=(torch.randn(3, 6), torch.randn(3)))
    x, y = torch.randn(N, 6), torch.randn(N)
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        found.append((clipped_sum(made, x, y), torch.get_rng_state()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_model_that_takes_only_what_data_hold_is_tried_with_that():
    """Numbers by which it looks something up cannot be huge."""
    torch.manual_seed(0)

    def forward(m, x):
        table = m.table(x[:, 0].long())
        return m.head(torch.cat([table, x if m.is_quiet else centred(m, x)], 1))

    model = Of(forward, table=nn.Embedding(3, 2), head=nn.Linear(6, 3))
    x = torch.cat([torch.arange(N)[:, None] % 3, torch.randn(N, 3)], 1)
    for model.is_quiet in (True, False):
        assert not mixing.takes_extremes(model, squared, x, torch.randn(N))
    model.is_quiet = True
    check(model, engine(model, squared, "bookkeeping", sample=(x[:3], torch.randn(3)), batch=N), x, torch.randn(N))
    model.is_quiet = False
    with pytest.raises(ConfigError, match="example"):
        engine(model, squared, "bookkeeping", sample=(x[:3], torch.randn(3)), batch=N)
    assert mixing.takes_extremes(mlp(), squared, torch.randn(2, 6), torch.randn(2))


def test_passes_that_do_not_repeat_are_refused():
    torch.manual_seed(0)
    model = Of(lambda m, x: m.layer(x) * (1 + 1e-6 * next(m.numbers)), layer=nn.Linear(4, 3))
    model.numbers = itertools.repeat(0)
    made = engine(model, squared, "bookkeeping", sample=(torch.randn(3, 4), torch.randn(3)))
    model.numbers = itertools.count()
    with pytest.raises(ConfigError, match="twice"):
        clipped_sum(made, torch.randn(N, 4), torch.randn(N))


def test_a_batch_that_memory_does_not_hold_is_halved():
    sizes = []

    def run(x):
        sizes.append(len(x))
        if len(x) > 5:
            raise torch.OutOfMemoryError
        return (x.sum(1),)

    assert mixing.must_not_mix(run, torch.randn(17, 3), True) == 4
    assert sizes == [17, 8, 4, 4, 4]
    with pytest.raises(torch.OutOfMemoryError):
        mixing.must_not_mix(lambda x: run(torch.randn(9)), torch.randn(2, 3), True)


# Whole numbers, each column from a table of its own.


def entities(sizes):
    """A table a column."""

    def forward(m, x):
        return m.head(torch.cat([table(x[:, i]) for i, table in enumerate(m.tables)], 1))

    tables = nn.ModuleList(nn.Embedding(size, 3) for size in sizes)
    return Of(forward, tables=tables, head=nn.Linear(3 * len(sizes), 2)), sizes


def buffered(sizes):
    """An index into a buffer that is not trained, and a shift by another column."""

    def forward(m, x):
        return m.head(m.rows[x[:, 0]] + x[:, 1:2] * m.slope)

    rows = nn.Buffer(torch.randn(sizes[0], 4))
    return Of(forward, rows=rows, slope=nn.Parameter(torch.randn(4)), head=nn.Linear(4, 2)), sizes[:2]


def one_hots(sizes):
    def forward(m, x):
        return m.head(torch.cat([torch.eye(size).to(m.head.weight)[x[:, i]] for i, size in enumerate(sizes)], 1))

    return Of(forward, head=nn.Linear(sum(sizes), 2)), sizes


def beside_real(sizes):
    """Indices in a tensor of real numbers."""

    def forward(m, x):
        return m.head(torch.cat([m.table(x[:, 0].long()), x[:, 1:]], 1))

    return Of(forward, table=nn.Embedding(sizes[0], 3), head=nn.Linear(2 + len(sizes), 2)), sizes


@settings(max_examples=10, deadline=None)
@given(
    build=st.sampled_from([entities, buffered, one_hots, beside_real]),
    sizes=st.lists(st.sampled_from([1, 2, 5, 40, 1000]), min_size=2, max_size=5),
    kind=st.sampled_from(["bookkeeping", "vmap"]),
    seed=st.integers(0, 99),
)
def test_columns_may_be_indices_into_tables_of_different_sizes(build, sizes, kind, seed):
    torch.manual_seed(seed)
    model, sizes = build(sizes)
    x = torch.stack([torch.randint(size, (N,)) for size in sizes], 1)
    x = x.float() if build is beside_real else x
    made = engine(model, squared, kind, sample=(x[:3], torch.randn(3)), batch=N)
    check(model, made, x, torch.randn(N))


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(900, 4), nn.Embedding(30, 4)

    def forward(self, user, item, price=None):
        score = (self.users(user) * self.items(item)).sum(1)
        return score if price is None else score * price


@pytest.mark.parametrize("kind", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("is_priced", [True, False], ids=["beside real numbers", "whole"])
def test_named_inputs_may_be_indices_into_tables_of_different_sizes(kind, is_priced):
    torch.manual_seed(0)
    inputs = {"user": torch.randint(900, (100,)), "item": torch.randint(30, (100,))}
    inputs |= {"price": torch.rand(100)} if is_priced else {}
    options = {"epsilon": 8, "delta": 1e-3, "epochs": 0.4, "batch_size": 20, "accountant": "rdp", "progress": False}
    record = dpopt.fit(
        Recommender(), lambda o, y: (o - y) ** 2, (inputs, torch.rand(100)), optimizer="dp_sgd", engine=kind, **options
    ).record
    assert record["status"] == "done"


@pytest.mark.parametrize("length", [5, 7, 9, 11])
def test_bert_takes_the_three_inputs_of_its_tokenizer(length):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 200, "num_labels": 2}
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes
    )
    ids = torch.randint(1, 200, (16, length)) * (torch.arange(length) < max(2, 0.7 * length))
    data = {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": torch.zeros_like(ids)}
    model, targets = transformers.BertForSequenceClassification(config), torch.randint(2, (16,))
    options = {"epsilon": 8, "delta": 1e-2, "epochs": 0.5, "batch_size": 8, "accountant": "rdp", "progress": False}
    record = dpopt.fit(
        model,
        nn.CrossEntropyLoss(reduction="none"),
        (data, targets),
        optimizer="dp_sgd",
        engine="bookkeeping",
        **options,
    ).record
    assert record["status"] == "done"


# What a trial leaves behind.


class Messy(nn.Module):
    """Changes all that a module has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.cache, self.calls, self.kept = {}, 0, torch.zeros(4)

    def forward(self, x):
        self.steps += 1
        self.calls += 1
        self.cache[self.calls] = x.detach()
        self.kept += x.detach().mean(0).to(self.kept)
        self.layer.register_forward_hook(lambda *_: None)
        return self.layer(x) + torch.rand(3).to(x)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_trial_leaves_a_model_as_it_was(dtype):
    torch.manual_seed(0)
    model = Messy()
    own = model.layer.register_forward_hook(lambda *_: None)
    before, kept, cache = everything(model), model.kept.clone(), model.cache
    with mixing.trial(model, dtype), torch.no_grad():
        assert model(torch.randn(2, 4, dtype=dtype)).dtype == (dtype or torch.float32)
        model.eval()
        for p in model.parameters():
            p.zero_()
    assert_unchanged(model, before)
    assert torch.equal(model.kept, kept)
    assert model.cache is cache == {}
    assert model.calls == 0
    own.remove()
    assert not model.layer._forward_hooks


@pytest.mark.parametrize("is_eval", [True, False])
def test_verification_leaves_the_vectors_of_spectral_norm_alone(is_eval):
    torch.manual_seed(0)
    model, inputs = spectral(is_eval)
    x, y = inputs(N), torch.randn(N)
    before = everything(model)
    if is_eval:
        made = engine(model, squared, sample=(x[:3], y[:3]), batch=N)
        assert_unchanged(model, before)
        check(model, made, x, y)
    else:
        with pytest.raises(ConfigError, match=r"_u.*evaluation mode"):
            engine(model, squared, sample=(x[:3], y[:3]))
        assert_unchanged(model, before)


# Batch normalisation.


@pytest.mark.parametrize("kind", ["bookkeeping", "vmap"])
def test_frozen_statistics_stay_frozen(kind):
    """Also where the harness puts the whole model into training mode."""
    torch.manual_seed(0)
    model, inputs = batch_norm(nn.BatchNorm2d, 2)
    made = engine(model, squared, kind, sample=(inputs(3), torch.randn(3)), batch=N)
    values = copy.deepcopy(model.state_dict())
    model.train()
    x, y = inputs(N), torch.randn(N)
    total = clipped_sum(made, x, y)
    truth = loop(model.eval(), squared, [(1.0, made.theta)], x, y, torch.ones(N).bool(), Abadi(0.1)).total
    assert (total - truth).norm() <= 1e-6 * truth.norm()
    model.train()
    torch.testing.assert_close(made.outputs(made.theta, x), model.eval()(x).detach())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_a_normalisation_that_comes_to_mix_is_refused_before_it_sees_a_batch():
    model, inputs = batch_norm(nn.BatchNorm2d, 2)
    made = engine(model, squared, sample=(inputs(3), torch.randn(3)))
    model[1] = nn.BatchNorm2d(4)
    with pytest.raises(ConfigError, match=r"BatchNorm2d.*evaluation mode"):
        clipped_sum(made, inputs(N), torch.randn(N))
    assert not model[1].running_mean.any()


def tracks_anew(m, x):
    """Makes another buffer of the old one."""
    m.average = 0.9 * m.average + 0.1 * x.detach().mean(0)
    return x - m.average


@pytest.mark.parametrize("track", [tracks, tracks_anew])
def test_a_buffer_that_changes_in_training_is_put_back(track):
    torch.manual_seed(0)
    members = {"average": nn.Buffer(torch.zeros(4)), "layer": nn.Linear(4, 3)}
    model = Of(lambda m, x: m.layer(track(m, x) if m.is_on else x), **members)
    model.is_on = False
    made = engine(model, squared, sample=(torch.randn(3, 4), torch.randn(3)))
    model.is_on = True
    with pytest.raises(ConfigError, match=r"average.*buffer"):
        clipped_sum(made, torch.randn(N, 4), torch.randn(N))
    assert not model.average.any()


# Nothing leaves by autograd.


@pytest.mark.parametrize("kind", [BookkeepingEngine, VmapEngine])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_result_has_a_graph(kind, dtype):
    torch.manual_seed(0)
    made = kind(mlp().to(dtype), squared)
    x, y = torch.randn(N, 6, dtype=dtype).requires_grad_(), torch.randn(N, dtype=dtype).requires_grad_()
    theta, scale = made.theta.requires_grad_(), torch.ones(made.dimension, dtype=dtype).requires_grad_()
    weight = torch.tensor(0.5, requires_grad=True)
    everyone = torch.ones(N, dtype=torch.bool)
    clipped = made.clipped([(weight, theta), (1.0, theta)], x, y, everyone, Abadi(), scale)
    results = [*clipped, made.losses([theta], x, y, everyone), made.outputs(theta, x)]
    assert not any(result.requires_grad for result in results)
    assert made.losses([theta], x[:0], y[:0], everyone[:0]).shape == (1, 0)


@pytest.mark.parametrize("kind", [BookkeepingEngine, VmapEngine])
def test_a_weight_is_one_number(kind):
    made = kind(mlp(), squared)
    weights = torch.ones(N, 1)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        made.clipped([(weights, made.theta)], torch.randn(N, 6), torch.randn(N), torch.ones(N).bool(), Abadi())


# What engines say.


def test_a_sample_is_checked_at_once():
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="example"):
        engine(MIXING["mean_of_hidden"].build(), squared, "bookkeeping", sample=(torch.randn(3, 4), torch.randn(3)))


@pytest.mark.parametrize("sampled", [True, False])
def test_auto_falls_back_and_says_why(sampled, caplog):
    torch.manual_seed(0)
    model, sample = MIXING["mean_of_hidden"].build(), (torch.randn(3, 4), torch.randn(3))
    with caplog.at_level(logging.WARNING, "dpopt"):
        made = engine(model, squared, "auto", sample=sample if sampled else None)
        check(model, made, torch.randn(5, 4), torch.randn(5), weights=TWO)
    assert ["vmap" in record.getMessage() for record in caplog.records if record.name.startswith("dpopt")] == [True]


def test_auto_is_silent_where_book_keeping_works(caplog):
    torch.manual_seed(0)
    model = mlp()
    check(model, engine(model, squared, "auto"), torch.randn(5, 6), torch.randn(5))
    assert not caplog.records


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "1.*BatchNorm1d.*GroupNorm"),
        (nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True)), "1.*InstanceNorm1d"),
        (nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), "0.*Embedding.*max_norm"),
        (nn.Sequential(nn.Embedding(4, 4, scale_grad_by_freq=True)), "0.*Embedding.*scale_grad_by_freq"),
        (nn.Sequential(nn.Embedding(4, 4, max_norm=1.0).requires_grad_(False), nn.Linear(4, 2)), "0.*max_norm"),
        (nn.Sequential(nn.EmbeddingBag(4, 4, max_norm=1.0), nn.Linear(4, 2)), "0.*EmbeddingBag.*max_norm"),
        (nn.Linear(4, 2).requires_grad_(False), "requires_grad"),
    ],
)
@pytest.mark.parametrize("name", ["bookkeeping", "auto", "vmap"])
def test_models_that_no_engine_trains(model, message, name):
    with pytest.raises(ConfigError, match=message):
        engine(model, squared, name)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, lambda out, y: squared(out, y)[:, None], lambda out, y: (out - 1).square()],
    ids=["one number", "a column", "one per output"],
)
def test_a_loss_that_is_not_one_value_per_example_is_refused(loss, n):
    made = engine(nn.Linear(4, 2), loss, "bookkeeping")
    with pytest.raises(ConfigError, match="loss"):
        made.clipped_sum([(1.0, made.theta)], torch.randn(n, 4), torch.randn(n, 2), torch.ones(n).bool(), Abadi())
