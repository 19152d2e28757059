"""What a model keeps of a batch is put back after each pass, wherever it keeps it."""

import collections
import logging
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loop import cross_entropy
from torch import nn

from dpopt.clipping import Abadi, engine
from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.state import State
from dpopt.clipping.vmap import LoopEngine, VmapEngine
from dpopt.errors import ConfigError

N, BOUND = 24, 0.5
TABLE = {}
ROWS = []
NAMES = types.SimpleNamespace()
MEAN = None


class Slots:
    __slots__ = ("mean",)


def of_helper(x, cache=[]):  # noqa: B006
    if not cache:
        cache.append(x.mean(0))
    return cache[0]


def of_function(x):
    if not hasattr(of_function, "mean"):
        of_function.mean = x.mean(0)
    return of_function.mean


def of_global(x):
    global MEAN
    MEAN = x.mean(0) if MEAN is None else MEAN
    return MEAN


def first(container):
    """The first batch's mean, in a dictionary."""
    return lambda model, x: container(model).setdefault("mean", x.mean(0))


def of_attribute(model, x):
    if model.mean is None:
        model.mean = x.mean(0)
    return model.mean


def new_attribute(model, x):
    if not hasattr(model, "anew"):
        model.anew = x.mean(0)
    return model.anew


def of_slot(model, x):
    if not hasattr(model.slots, "mean"):
        model.slots.mean = x.mean(0)
    return model.slots.mean


def of_tensor(model, x):
    if not model.tensor.any():
        model.tensor += x.mean(0)
    return model.tensor


def of_array(model, x):
    if not model.array.any():
        model.array += x.mean(0).numpy()
    return torch.from_numpy(model.array.copy())


def of_rows(rows):
    def kept(model, x):
        if not rows(model):
            rows(model).append(x.mean(0))
        return rows(model)[0]

    return kept


def of_class(model, x):
    if type(model).kept is None:
        type(model).kept = x.mean(0)
    return type(model).kept


def closed_over():
    mean = None

    def kept(model, x):
        nonlocal mean
        mean = x.mean(0) if mean is None else mean
        return mean

    return kept


def of_set(model, x):
    if not model.set:
        model.set.add(float(x.mean()))
    return torch.tensor([*model.set])


KEPT = {
    "model.anew": new_attribute,
    "model.mean": of_attribute,
    "model.cache": first(lambda model: model.cache),
    "model.nested.0.inner": first(lambda model: model.nested[0]["inner"]),
    "model.object.mean": first(lambda model: vars(model.object)),
    "model.slots.mean": of_slot,
    "model.tensor": of_tensor,
    "model.array": of_array,
    "model.queue": of_rows(lambda model: model.queue),
    "model.set": of_set,
    "Keeping.kept": of_class,
    "TABLE": first(lambda model: TABLE),
    "ROWS": of_rows(lambda model: ROWS),
    "NAMES.mean": first(lambda model: vars(NAMES)),
    "globals.MEAN": lambda model, x: of_global(x),
    "of_function": lambda model, x: of_function(x),
    "of_helper.0": lambda model, x: of_helper(x),
    "cell_contents": closed_over(),
}
"""The end of a place's name -> what keeps the mean of the first batch there, and gives it."""


class Keeping(nn.Module):
    """Shifts records by what it keeps; in the first batch by nothing, so that no record mixes with that batch."""

    kept = None

    def __init__(self, keep):
        super().__init__()
        self.layer, self.keep = nn.Linear(4, 3), keep
        self.mean, self.cache, self.slots, self.object = None, {}, Slots(), types.SimpleNamespace()
        self.nested, self.set, self.queue = ({"inner": {}},), set(), collections.deque()
        self.tensor, self.array = torch.zeros(4), np.zeros(4, np.float32)

    def forward(self, x):
        kept = self.keep(self, x.detach())
        mean = x.mean(0) if kept.numel() > 1 else x.mean()[None]
        is_new = torch.allclose(kept.double(), mean.double(), rtol=1e-3, equal_nan=True)
        return self.layer(x if is_new else x - kept)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 4, generator=generator) + 5 * seed, torch.randint(3, (N,), generator=generator)


def clipped_sum(made, x, y):
    return made.clipped_sum([(1.0, made.theta)], x, y, torch.ones(len(x), dtype=torch.bool), Abadi(BOUND))


@pytest.mark.parametrize("place", KEPT)
def test_no_draw_sees_what_an_earlier_one_left(place, caplog):
    """The sums of later draws are those of a plain layer, and the log names the place once."""
    torch.manual_seed(0)
    model = Keeping(KEPT[place])
    caplog.set_level(logging.WARNING)
    made = engine(model, cross_entropy, "bookkeeping", sample=batch(0))
    plain = engine(model.layer, cross_entropy, "bookkeeping", sample=batch(0))
    for seed in (1, 2, 3):
        torch.testing.assert_close(clipped_sum(made, *batch(seed)), clipped_sum(plain, *batch(seed)))
        outputs = made.outputs(made.theta, batch(seed)[0])
        torch.testing.assert_close(outputs, model.layer(batch(seed)[0]).detach())
    (changed,) = made.state.changed
    assert changed.endswith(place)
    assert caplog.text.count(f"{changed}: put back") == 1


def switched(name):
    """A model that from its first batch with a number above 9 on does something else, by a change named `name`."""

    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.table = nn.Linear(4, 3), {0: True, 1: True}
            self.number, self.act = torch.zeros(()), nn.Dropout(0.0)
            self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, x):
            if bool((x > 9).any()):
                CHANGES[name](self)
            is_on = 0 not in self.table or [*self.table] != [0, 1] or bool(self.number) or not self.act.training
            return self.layer(-x if is_on else x)

    return Switched()


CHANGES = {
    "another key for a value": lambda m: m.table.update({5: m.table.pop(0)}),
    "another order": lambda m: m.table.update({0: m.table.pop(0)}),
    "past a version": lambda m: m.number.data.add_(1),
    "a mode": lambda m: m.act.eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_small_changes_are_put_back_too(name):
    torch.manual_seed(0)
    model = switched(name).train()
    made = LoopEngine(model, cross_entropy)
    x, y = batch(0)
    before = clipped_sum(made, x, y)
    clipped_sum(made, torch.cat([x[1:], torch.full((1, 4), 10.0)]), y)
    torch.testing.assert_close(clipped_sum(made, x, y), before, rtol=0, atol=0)
    assert len(made.state.changed) >= 1


def test_a_frozen_parameter_changed_past_its_version_is_refused():
    model = switched("past a version")
    model.number = model.frozen
    made = LoopEngine(model, cross_entropy)
    with pytest.raises(ConfigError, match=r"model\.(number|frozen).*buffer"):
        clipped_sum(made, 10 + batch(0)[0], batch(0)[1])


@pytest.mark.parametrize("kind", [LoopEngine, VmapEngine, BookkeepingEngine])
def test_a_model_that_writes_its_parameters_writes_a_copy(kind):
    """Weights clipped in the forward pass: a look at losses or outputs must not move the point of the caller."""

    class Clamped(nn.Linear):
        def forward(self, x):
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Clamped(4, 3))
    made, (x, y) = kind(model, cross_entropy), batch(0)
    theta = made.theta
    before = theta.clone()
    made.losses([theta], x, y, torch.ones(N, dtype=torch.bool))
    made.outputs(theta, x)
    with torch.no_grad():
        made.per_example([(1.0, theta)], x, y)
    assert torch.equal(theta, before)
    assert torch.equal(made.theta, before)


def test_helpers_of_other_files_keep_nothing(tmp_path, monkeypatch):
    """In a dictionary, an attribute of a function or the file itself; a cache of calls is emptied."""
    (tmp_path / "kept_elsewhere.py").write_text(
        "import functools\nKEPT, mean = {}, None\n"
        "def of_table(x): return KEPT.setdefault('mean', x.mean(0))\n"
        "def of_function(x):\n    vars(of_function).setdefault('mean', x.mean(0))\n    return of_function.mean\n"
        "@functools.lru_cache\ndef of_cache(size): return BATCH[0].mean(0)\nBATCH = [None]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import kept_elsewhere

    def of_file(model, x):
        kept_elsewhere.mean = x.mean(0) if kept_elsewhere.mean is None else kept_elsewhere.mean
        return kept_elsewhere.mean

    def of_cache(model, x):
        kept_elsewhere.BATCH[0] = x
        return kept_elsewhere.of_cache(len(x))

    table, function = kept_elsewhere.of_table, kept_elsewhere.of_function
    for keep in (lambda m, x: table(x), lambda m, x: function(x), of_file, of_cache):
        model = Keeping(keep)
        made = BookkeepingEngine(model, cross_entropy)
        for seed in (1, 2):
            outputs = made.outputs(made.theta, batch(seed)[0])
            torch.testing.assert_close(outputs, model.layer(batch(seed)[0]).detach())
        assert made.state.changed


def test_large_arrays_are_not_copied():
    many = np.zeros(2**22)
    state = State(nn.Linear(4, 3), loss=lambda output, target: output + many[0])
    with state:
        many += 1
    assert many.all()
    assert state.changed == []


def test_a_loss_forgets_too():
    """Between two draws, and between two evaluations."""
    calls = []

    def remembering(output, target):
        calls.append(output)
        return cross_entropy(output, target) * len(calls)

    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    made, plain = (LoopEngine(layer, loss) for loss in (remembering, cross_entropy))
    x, y = batch(1)
    for _ in range(2):
        torch.testing.assert_close(clipped_sum(made, x[:1], y[:1]), clipped_sum(plain, x[:1], y[:1]))
    assert calls == []


def test_what_is_changed_between_two_passes_stays():
    """A callback may set a dropout rate."""
    torch.manual_seed(0)
    model = Keeping(first(lambda model: model.cache))
    model.keep = lambda model, x: torch.full((4,), model.shift)
    model.shift = 0.0
    made = engine(model, cross_entropy, "bookkeeping", sample=batch(0))
    x, _ = batch(1)
    for shift in (0.0, 1.0, 2.0):
        model.shift = shift
        torch.testing.assert_close(made.outputs(made.theta, x), model.layer(x - shift).detach())
    assert model.shift == 2.0
    assert made.state.changed == []


class Drifting(nn.Module):
    """Changes one of its tensors in place, or puts another in its place, once it is on."""

    def __init__(self, name):
        super().__init__()
        self.layer, self.name, self.is_on = nn.Linear(4, 3), name, False
        self.register_buffer("buffer", torch.zeros(4))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.large = torch.zeros(2**20 + 1)

    def forward(self, x):
        if self.is_on and self.name == "new":
            self.buffer = x.mean(0).detach()
        elif self.is_on:
            getattr(self, self.name)[:4] += x.mean(0).detach()
        return self.layer(x)


@pytest.mark.parametrize("name", ["buffer", "new", "frozen", "large"])
@pytest.mark.parametrize("what", ["training", "evaluation"])
def test_what_cannot_be_put_back_is_refused_in_each_pass(name, what):
    model = Drifting(name)
    made = engine(model, cross_entropy, "bookkeeping", sample=batch(0))
    clipped_sum(made, *batch(1))
    model.is_on = True
    with pytest.raises(ConfigError, match=rf"model\.{'buffer' if name == 'new' else name}.*buffer"):
        clipped_sum(made, *batch(1)) if what == "training" else made.outputs(made.theta, batch(1)[0])
    assert not model.buffer.any()


def test_a_buffer_that_is_written_with_its_own_value_does_no_harm():
    class Same(nn.Linear):
        def forward(self, x):
            self.ones.fill_(1.0)
            return super().forward(x) * self.ones

    model = Same(4, 3)
    model.register_buffer("ones", torch.ones(3))
    made = engine(model, cross_entropy, sample=batch(0))
    clipped_sum(made, *batch(1))
    assert made.state.changed == []


def test_a_buffer_changed_past_its_version_is_seen_by_the_looks():
    class Hidden(nn.Module):
        def forward(self, x):
            self.mean.data.add_(x.detach().mean())
            return x

    model = nn.Sequential(Hidden(), nn.Linear(4, 3))
    model[0].register_buffer("mean", torch.zeros(()))
    with pytest.raises(ConfigError, match=r"model\.0\.mean.*buffer"):
        engine(model, cross_entropy, "bookkeeping", sample=batch(0))


def test_what_is_large_or_not_python_is_left_alone():
    """A data set in a closure costs nothing, and odd objects do no harm."""

    class Odd:
        def __getattribute__(self, name):
            raise RuntimeError

    many = [0] * 2**15
    model = nn.Sequential(nn.Linear(4, 3))
    model.odd, model.many, model.numbers = [Odd()], many, iter(range(9))
    state = State(model, loss=lambda output, target: F.mse_loss(output, target) + many[0])
    with state:
        many.append(1)
        next(model.numbers)
    assert len(many) == 2**15 + 1
    assert state.changed == []
