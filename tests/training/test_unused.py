"""Parameters that the loss never uses stay where they are, at no cost, and are named."""

import copy
import json

import pytest
import short
import torch
import torch.nn.functional as F
from short import loss
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpopt
from dpopt.clipping.views import Multiplied
from dpopt.errors import ConfigError
from dpopt.optimizers.held import Held
from dpopt.testing import Task
from dpopt.training import fitting
from dpopt.training.trial import unused
from dpopt.workloads.base import Split

pytestmark = pytest.mark.filterwarnings("ignore:seed")
CPU = torch.device("cpu")


class Net(nn.Module):
    """Layers by name, and what `run(net, x)` makes of them."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.run(self, x)


def pooled(run=lambda m, x: m.head(torch.tanh(m.body(x)))):
    return Net(run, body=nn.Linear(4, 5), pooler=nn.Linear(5, 5), head=nn.Linear(5, 3))


def looked_up(run=lambda m, x: m.head(m.table(x).mean(1)), kind=nn.Embedding, row=0):
    return Net(run, table=kind(7, 3, padding_idx=row), head=nn.Linear(3, 7, bias=False))


def tied():
    model = looked_up()
    model.head.weight = model.table.weight
    return model


def by_value(m, x):
    return m.head(m.pooler(m.body(x)) if x.max() > 2 else m.body(x))


def by_chance(m, x):
    return m.head(m.pooler(m.body(x)) if m.training and torch.rand(()) < 0.5 else m.body(x))


def hidden(m, x):
    return m.head(checkpoint(m.pooler, m.body(x), use_reentrant=True))


POOLER = {"pooler.weight", "pooler.bias"}
CASES = {
    "none": (lambda: nn.Linear(4, 3), set()),
    "pooler": (pooled, POOLER),
    "compiled": (lambda: torch.compile(pooled(), backend="eager"), POOLER),
    "detached": (lambda: pooled(lambda m, x: m.head(m.body(x) + m.pooler(m.body(x)).detach())), POOLER),
    "bias_alone": (lambda: Net(lambda m, x: x @ m.a.weight.T, a=nn.Linear(4, 3)), {"a.bias"}),
    "padding": (looked_up, {"table.weight[0]"}),
    "other_row": (lambda: looked_up(row=5), {"table.weight[5]"}),
    "bags": (lambda: looked_up(lambda m, x: m.head(m.table(x)), nn.EmbeddingBag), {"table.weight[0]"}),
    "tied": (tied, set()),
    "padding_of_one_use": (
        lambda: looked_up(lambda m, x: m.head(m.table(x).mean(1) + F.embedding(x, m.table.weight).mean(1))),
        set(),
    ),
    "by_chance": (lambda: pooled(by_chance), set()),
    "in_a_checkpoint": (lambda: pooled(hidden), set()),
}


def records(model, n=60):
    """Records that the model takes, of which the first are like none of the made-up ones."""
    generator = torch.Generator().manual_seed(0)
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules()):
        return torch.randint(0, 7, (n, 3), generator=generator), torch.randint(3, (n,), generator=generator)
    x = 3 * torch.randn(n, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_autograd_never_gives_a_gradient(case):
    """The names, and their places: no record has a gradient there, one at a time, and some have elsewhere."""
    torch.manual_seed(0)
    make, names = CASES[case]
    model = make()
    x, y = records(model)
    seen = unused(Multiplied(model, loss, lambda x: x), Split(x, y), CPU, model)
    assert set(seen.names) == names
    assert bool(seen.spans) == bool(names)
    touched = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.bool)
    for _ in range(3):
        for row in range(30):
            model.zero_grad()
            loss(model(x[row : row + 1]), y[row : row + 1]).sum().backward()
            touched |= (
                torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
                != 0
            )
    for start, stop in seen.spans:
        assert not touched[start:stop].any()
    if case not in ("none", "by_chance"):
        assert sum(stop - start for start, stop in seen.spans) == int((~touched).sum())


def fit(model, **changes):
    return short.fit(model, records(model), **changes)


ADAMW = dpopt.create("torch_optim", optimizer="torch.optim.AdamW", lr=0.01)


@pytest.mark.filterwarnings("ignore:model. the loss never uses")
@pytest.mark.parametrize(
    "changes",
    [{"average": 0.9, "optimizer": ADAMW}, {"engine": "vmap"}],
)
def test_it_stays_and_all_else_ends_as_it_would(changes, monkeypatch):
    """Draws, noise and ledger are those of a run in which nothing is held, as these optimizers work by coordinate."""
    torch.manual_seed(0)
    model = pooled()
    start = copy.deepcopy(model.state_dict())
    result = fit(model, **changes)
    end = copy.deepcopy(model.state_dict())
    model.load_state_dict(start)
    monkeypatch.setattr(fitting, "Held", lambda optimizer, spans: optimizer)
    other = fit(model, **changes)
    assert other.ledger == result.ledger
    for name, value in other.model.state_dict().items():
        assert torch.equal(end[name], start[name] if name in POOLER else value)
        assert not torch.equal(value, start[name])


@pytest.mark.slow
def test_an_isolated_optimizer_is_averaged_and_held_too():
    """As in this process, where no record moves the row of padding."""
    torch.manual_seed(0)
    model = looked_up(row=5)
    start = copy.deepcopy(model)
    here, there = (
        fit(copy.deepcopy(start), optimizer=ADAMW, average=0.9, isolate=isolate).model.state_dict()
        for isolate in (False, True)
    )
    assert all(torch.equal(value, here[name]) for name, value in there.items())
    assert torch.equal(there["table.weight"][5], start.table.weight[5])
    assert not torch.equal(there["table.weight"][4], start.table.weight[4])


@pytest.mark.parametrize(("make", "names"), [(pooled, sorted(POOLER)), (looked_up, ["table.weight[0]"])])
def test_it_is_named_and_a_row_of_padding_stays(make, names, recwarn):
    """Of a row of padding, which any table of texts has, there is no warning."""
    torch.manual_seed(0)
    model = make()
    start = copy.deepcopy(model.state_dict())
    result = fit(model)
    assert sorted(result.record["unused"]) == names
    assert all(name in str(result.statement()) for name in names)
    assert sorted(json.loads(json.dumps(result.statement().to_dict()))["unused"]) == names
    warned = [str(warning.message) for warning in recwarn if "never uses" in str(warning.message)]
    assert len(warned) == (make is pooled)
    if make is looked_up:
        changed = (model.table.weight != start["table.weight"]).any(1)
        assert changed.tolist() == [False] + [True] * 6


@pytest.mark.filterwarnings("ignore:model. the loss never uses")
def test_records_can_refuse_what_is_held_and_not_change_it():
    """Made-up numbers are at most 1. A record beyond 2 reaches the pooler, which must not show that it is there."""
    torch.manual_seed(0)
    model, (x, y) = pooled(by_value), records(pooled())
    within = x.clamp(-1, 1)
    assert short.fit(model, (within, y), engine="loop").record["unused"] == ["pooler.weight", "pooler.bias"]
    with pytest.raises(ConfigError, match=r"model: 'pooler\.weight, pooler\.bias' .*some records use it"):
        short.fit(model, (torch.cat([within[:-1], x.new_full((1, 4), 3.0)]), y), engine="loop")
    # What made-up records use is trained, also where no record uses it.
    model = pooled(lambda m, x: m.head(m.body(x) if x.max() > 2 else m.pooler(m.body(x))))
    start = model.pooler.weight.detach().clone()
    assert "unused" not in short.fit(model, (x + 9, y), engine="loop").record
    assert not torch.equal(model.pooler.weight, start)


@pytest.mark.parametrize("name", ["fiber", "adadp", "torch_optim"])
def test_an_optimizer_keeps_its_state_and_its_ledger(name):
    task, spans = Task(), ((1, 3), (4, 5))
    optimizer = dpopt.create(name)
    start, ends = task.engine.theta, []
    for stepper in (optimizer, Held(optimizer, spans)):
        oracle = task.oracle(task.plan(optimizer))
        state = stepper.init(start)
        while oracle.draws_left:
            state = stepper.step(state, oracle)
        ends.append((state, oracle.ledger))
    (free, ledger), (kept, same) = ends
    assert same == ledger
    assert type(kept) is type(free)
    for begin, stop in spans:
        assert torch.equal(kept.theta[begin:stop], start[begin:stop])
        assert not torch.equal(free.theta[begin:stop], start[begin:stop])
