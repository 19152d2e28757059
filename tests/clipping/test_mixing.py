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
from loop import TWO, assert_unchanged, check, everything, loop, squared
from torch import nn
from zoo import Of, batch_norm, floats, ids, mlp

import dpopt
from dpopt.clipping import Abadi, engine, mixing
from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.state import State
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
    "positive": Case(below(only(lambda m, x: (x >= 0).all())), lambda n: torch.rand(n, 4), is_followed=False),
}
MIXING = REVIEWED | {
    "mean": Case(below(centred)),
    "mean_of_hidden": Case(between(centred)),
    "mean_in_training": Case(below(only(lambda m, x: m.training))),
    "guarded": Case(below(scaled_if_number), outlier=50.0),
    "neighbours": Case(below(lambda m, x: x + x.roll(1, 0))),
    "sums_so_far": Case(below(lambda m, x: x.cumsum(0))),
    "sums_to_come": Case(below(only(many, lambda m, x: x.flip(0).cumsum(0).flip(0)))),
    "largest": Case(below(marks_largest), is_followed=False),
    "statistics": Case(below(lambda m, x: F.batch_norm(x, None, None, training=True)), is_followed=False),
    "control_flow": Case(below(lambda m, x: 2 * x if x.sum() > 0 else x), is_followed=False),
    "buffer": Case(below(tracks, average=nn.Buffer(torch.zeros(4))), is_followed=False),
    "backward": Case(between(lambda m, x: Rescaled.apply(x)), is_followed=False),
    "gradient_hook": Case(between(hooked)),
    "hidden_in_backward": Case(between(lambda m, x: x + (x.mean(0) - x.mean(0).detach()))),
    "tiny_gradients": Case(between(centred), loss=lambda output, target: 1e-9 * squared(output, target)),
    "swapped_rows": Case(lambda: Of(swapped, layer=nn.Linear(4, 3))),
    "text": Case(text(lambda m, x: (x + x.roll(1, 0)) % 7), ids(7, 3)),
    "text_longest": Case(text(lambda m, x: torch.where(x == x.max(), 0, x)), ids(7, 3)),
}
FIRST = (*REVIEWED, "mean", "mean_of_hidden", "swapped_rows", "text_longest")


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
def test_models_that_mix_are_refused_or_followed_one_example_at_a_time(name, monkeypatch):
    case = Case(noisy) if name == "noisy" else MIXING[name]
    # With a sample, or by the first batch, whatever small ones came before and whatever rows are bad in it.
    with pytest.raises(ConfigError):
        clipped_sum(*made(case, "bookkeeping", batch=N)[1:])
    if name == "noisy" or name in FIRST:
        chosen, x, y = made(case, "bookkeeping", sampled=False)[1:]
        small = (0, 1) if name in ("mean", "mean_of_hidden") else ()
        x[0] = math.nan if small else x[0]
        with pytest.raises(ConfigError):  # noqa: PT012
            for few in (*small, N):
                clipped_sum(chosen, x[N - few :], y[N - few :])
    if name == "noisy":  # its dropout leaves nothing to compare
        return
    try:
        model, chosen, x, y = made(case, "vmap", batch=N)
        total = clipped_sum(chosen, x, y)
    except ConfigError:
        assert not case.is_followed
    else:
        assert case.is_followed
        truth = loop(model, case.loss, [(1.0, chosen.theta)], x, y, torch.ones(N).bool(), Abadi(0.1)).total
        assert (total - truth).norm() <= 1e-6 * truth.norm()
    if name in REVIEWED:  # the records here show what the models do, and without the look it would be wrong
        model, _, x, y = made(case, "bookkeeping", sampled=False)
        points = [(1.0, torch.cat([p.detach().flatten() for p in model.parameters()]))]
        monkeypatch.setattr(mixing, "_must_not_mix", lambda *arguments: None)
        monkeypatch.setattr(BookkeepingEngine, "must_be_alone", lambda *arguments: None)
        total = BookkeepingEngine(model, case.loss).clipped_sum(points, x, y, torch.ones(N).bool(), Abadi(0.1))
        truth = loop(model, case.loss, points, x, y, torch.ones(N).bool(), Abadi(0.1)).total
        assert (total - truth).norm() > 0.05 * truth.norm()


# The look at a batch of training.


def test_a_layer_whose_random_numbers_depend_on_the_records_is_refused_for_that():
    model = nn.Sequential(nn.Linear(3, 4), nn.RReLU(), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"random numbers it draws .* \(bookkeeping\).* random numbers .* \(loop\)"):
        engine(model, squared, sample=(torch.randn(4, 3), torch.randn(4)))


def test_a_model_that_takes_only_what_data_hold_is_tried_with_that():
    """Numbers by which it looks something up cannot be huge."""
    torch.manual_seed(0)

    def forward(m, x):
        table = m.table(x[:, 0].long())
        return m.head(torch.cat([table, x if m.is_quiet else centred(m, x)], 1))

    model = Of(forward, table=nn.Embedding(3, 2), head=nn.Linear(6, 3))
    x = torch.cat([torch.arange(N)[:, None] % 3, torch.randn(N, 3)], 1)
    for model.is_quiet in (True, False):
        assert not mixing.takes_extremes(State(model), model, squared, x, torch.randn(N))
    model.is_quiet = True
    check(model, engine(model, squared, "bookkeeping", sample=(x[:3], torch.randn(3)), batch=N), x, torch.randn(N))
    model.is_quiet = False
    with pytest.raises(ConfigError, match="example"):
        engine(model, squared, "bookkeeping", sample=(x[:3], torch.randn(3)), batch=N)
    assert mixing.takes_extremes(State(plain := mlp()), plain, squared, torch.randn(2, 6), torch.randn(2))


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


@settings(max_examples=10, deadline=None)
@given(
    build=st.sampled_from([entities, buffered]),
    sizes=st.lists(st.sampled_from([1, 2, 5, 40, 1000]), min_size=2, max_size=5),
    kind=st.sampled_from(["bookkeeping", "vmap"]),
    seed=st.integers(0, 99),
)
def test_columns_may_be_indices_into_tables_of_different_sizes(build, sizes, kind, seed):
    torch.manual_seed(seed)
    model, sizes = build(sizes)
    x = torch.stack([torch.randint(size, (N,)) for size in sizes], 1)
    made = engine(model, squared, kind, sample=(x[:3], torch.randn(3)), batch=N)
    check(model, made, x, torch.randn(N))


def test_bert_takes_the_three_inputs_of_its_tokenizer():
    """Named inputs, each with a table of its own."""
    torch.manual_seed(0)
    length = 9
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 200, "num_labels": 2}
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes
    )
    ids = torch.randint(1, 200, (16, length)) * (torch.arange(length) < max(2, 0.7 * length))
    data = {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": torch.zeros_like(ids)}
    model, targets = transformers.BertForSequenceClassification(config), torch.randint(2, (16,))
    options = {"epsilon": 8, "delta": 1e-2, "epochs": 0.5, "batch_size": 8, "accountant": "rdp", "progress": False}
    options |= {"optimizer": "dp_sgd", "engine": "bookkeeping"}
    record = dpopt.fit(model, nn.CrossEntropyLoss(reduction="none"), (data, targets), **options).record
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
    with mixing.trial(State(model), dtype), torch.no_grad():
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


# What engines say.


@pytest.mark.parametrize("sampled", [True, False])
def test_auto_falls_back_and_says_why(sampled, caplog):
    torch.manual_seed(0)
    model, sample = MIXING["mean_of_hidden"].build(), (torch.randn(3, 4), torch.randn(3))
    with caplog.at_level(logging.WARNING, "dpopt"):
        made = engine(model, squared, "auto", sample=sample if sampled else None)
        check(model, made, torch.randn(5, 4), torch.randn(5), weights=TWO)
        check(plain := mlp(), engine(plain, squared, "auto"), torch.randn(5, 6), torch.randn(5))  # silently
    assert ["vmap" in record.getMessage() for record in caplog.records if record.name.startswith("dpopt")] == [True]


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
def test_models_that_no_engine_trains(model, message):
    with pytest.raises(ConfigError, match=message):
        engine(model, squared)


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
