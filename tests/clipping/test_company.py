"""A record's output is the same in any company, or the model is run one record at a time, everywhere."""

import logging
import math

import pytest
import short
import torch
import torch.nn.functional as F
from loop import cross_entropy
from test_state import clipped_sum
from torch import nn
from zoo import MODELS, ODD, OTHERS, Of

import dpopt
from dpopt import clipping
from dpopt.clipping import engine, joins, mixing
from dpopt.errors import ConfigError

# Operations that join records.

JOINS = {
    "any": lambda x: torch.where((x > 9).any(), x / 255, x),
    "all": lambda x: x * (x > -9).all(),
    "mean": lambda x: x - x.mean(0),
    "sum": lambda x: x / x.sum(),
    "max": lambda x: x / x.max(0).values,
    "median": lambda x: x - x.median(0).values,
    "argmax": lambda x: x + x.argmax(0),
    "sort": lambda x: x + x.sort(0).values,
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "flip": lambda x: x + x.flip(0),
    "roll": lambda x: x + x.roll(1, 0),
    "slice": lambda x: x + x[:1],
    "select": lambda x: x + x[0],
    "mm": lambda x: (x @ x.T) @ x,
    "cdist": lambda x: (torch.cdist(x, x) < 1).float() @ x,
    "sort_by_default": lambda x: x.sum(1).sort().values[:, None] + x,
    "stable_sort": lambda x: x.sort(dim=0, stable=True).values,
    "index": lambda x: x[(torch.arange(len(x)) - 1).clamp(min=0)],
    "mask": lambda x: x + torch.zeros(len(x), 4).index_put((x[:, 0] > 0,), x.new_ones(())),
    "conv": lambda x: F.avg_pool1d(x.T[None], 3, 1, 1)[0].T,
    "layer_norm": lambda x: F.layer_norm(x.T, (len(x),)).T,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "in_place": lambda x: torch.zeros_like(x).add_(x.mean()),
    "through_a_view": lambda x: (lambda z: (z[:, :2].copy_(x[:, :2] - x.mean()), z)[1])(torch.zeros_like(x)),
    "folded": lambda x: x.view(-1, 2, 2).transpose(0, 1).cumsum(1).transpose(0, 1).reshape(-1, 4),
}
APART = {
    "other_axis": lambda x: x.softmax(1) + x.cumsum(1) + x.sort(1).values + x.flip(1),
    "unused": lambda x: (x.mean(0), x)[1],
    "reshaped": lambda x: x.view(-1, 2, 2).transpose(0, 1).sum(0).repeat(1, 2),
    "of_no_record": lambda x: x + torch.arange(4).float().mean() + x.new_zeros(3).sum(),
    "twice": lambda x: torch.cat([x, 2 * x])[:, :].view(2, -1, 4).sum(0),
    "each_by_its_number": lambda x: x[torch.arange(len(x)), (x > 0).long().argmax(1)][:, None] * x,
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
    "pool": lambda x: F.avg_pool1d(x[:, None], 3, 1, 1)[:, 0],
    "first_column": lambda x: x * x[:, :1] + x[:, 0:1],
}


@pytest.mark.parametrize(("are_joined", "name"), [(True, name) for name in JOINS] + [(False, name) for name in APART])
def test_operations_that_join_records_are_seen(are_joined, name):
    torch.manual_seed(0)
    change = (JOINS if are_joined else APART)[name]
    model = nn.Sequential(nn.Linear(4, 4), Of(lambda m, x: change(x)), nn.Linear(4, 2))
    seen = joins.joined(model, model, torch.randn(7, 4))
    assert (seen is not None and seen.endswith("in model.1")) == are_joined


@pytest.mark.parametrize("name", sorted(MODELS | ODD | OTHERS))
def test_no_architecture_that_keeps_records_apart_is_taken_to_join_them(name):
    torch.manual_seed(0)
    model, inputs = (MODELS | ODD | OTHERS)[name]()
    seen = joins.joined(model, model, inputs(7))
    assert (seen is not None) == (name == "first_rows")  # it adds the first record's row to each row


# Values that Python reads: there, only records tell.


def dims_bright(m, x):
    """Images may come as 0..1 or as 0..255."""
    return m.layer(x / 255 if bool((x > 1).any()) else x)


def bright(count, n=48):
    """Records of which `count` are bright, in the middle of the batch."""
    x = torch.rand(n, 4, generator=torch.Generator().manual_seed(0))
    x[(n - count) // 2 : (n + count) // 2] *= 255
    return x, torch.arange(n) % 3


def test_one_bright_record_of_a_batch_is_seen(monkeypatch):
    """Replaced records are no brighter than it is, so only the comparison with records alone shows it."""
    monkeypatch.setattr(clipping, "verify", lambda *arguments: True)
    monkeypatch.setattr(mixing, "_must_not_mix", lambda *arguments: None)
    torch.manual_seed(0)
    for count in (0, 1, 24, 48):
        made = engine(Of(dims_bright, layer=nn.Linear(4, 3)), cross_entropy, "bookkeeping", sample=bright(0))
        if count in (0, 48):
            clipped_sum(made, *bright(count))
            continue
        with pytest.raises(ConfigError, match="what model makes of an example depends"):
            clipped_sum(made, *bright(count))


def test_made_up_records_of_all_sizes_show_it_whatever_the_data():
    with pytest.raises(ConfigError, match="bookkeeping"):
        engine(Of(dims_bright, layer=nn.Linear(4, 3)), cross_entropy, "bookkeeping", sample=bright(0))


def test_gradients_alone_are_compared_too(monkeypatch):
    """In the outputs nothing shows, and `vmap` is not asked."""
    monkeypatch.setattr(clipping, "verify", lambda *arguments: True)
    monkeypatch.setattr(mixing, "_must_not_mix", lambda *arguments: None)
    plain = clipping.evaluation.outputs
    monkeypatch.setattr(clipping.evaluation, "outputs", lambda *a: 1 / 0 if a[2] == "vmap" else plain(*a))
    monkeypatch.setattr(clipping.FlatModel, "compare_in_training", lambda *arguments: None)
    hidden = nn.Sequential(nn.Linear(4, 4), Of(lambda m, x: x + x.mean(0) - x.mean(0).detach()), nn.Linear(4, 3))
    made = clipping.BookkeepingEngine(hidden, cross_entropy)
    with torch.no_grad(), pytest.raises(ConfigError, match="gradient norm"):
        made.must_be_alone(*bright(24))


# One way to evaluate.


def centred(m, x):
    return m.head(m.norm(x))


def centring(only_in_evaluation=False):
    def forward(m, x):
        return x if only_in_evaluation and m.training else x - 0.5 * x.mean(0)

    return Of(centred, norm=Of(forward), head=nn.Linear(4, 2))


@pytest.mark.parametrize("only_in_evaluation", [False, True])
def test_curve_record_and_predict_agree_where_a_record_depends_on_its_batch(only_in_evaluation, tmp_path, caplog):
    torch.manual_seed(0)
    x, y = short.records(200, 4)
    x = x + 3 * y[:, None]
    with caplog.at_level(logging.WARNING):
        result = short.fit(centring(only_in_evaluation), (x, y), test=(x[:41], y[:41]))
    assert result.record["evaluation"] == "vmap"
    assert "predict" in caplog.text
    assert "model.norm" in caplog.text
    result.save(tmp_path / "saved")
    loaded = dpopt.load(tmp_path / "saved", centring(only_in_evaluation))
    one_by_one = torch.cat([result.model.eval()(each) for each in x[:41].split(1)]).argmax(1)
    assert not torch.equal(one_by_one, result.model(x[:41]).argmax(1))  # or there is nothing to see
    for each in (result, loaded):
        right = (torch.from_numpy(each.predict(x[:41])) == y[:41]).double().mean()
        assert right == result.record["test_accuracy"] == result.curve[-1]["test_accuracy"]
        assert torch.equal(torch.from_numpy(each.predict(x[:41])), one_by_one)


def test_without_a_sample_the_first_batch_decides_how_outputs_are_made():
    torch.manual_seed(0)
    made = engine(centring(), cross_entropy)
    x, y = short.records(24, 4)
    clipped_sum(made, x, y)
    assert made.way == "vmap"
    torch.testing.assert_close(
        made.outputs(made.theta, x), torch.cat([made.outputs(made.theta, r) for r in x.split(1)])
    )


def test_a_loop_that_costs_too_much_is_refused_unless_it_is_asked_for(monkeypatch):
    """It is measured where outputs depend on the batch alone."""
    sample = bright(0)
    model = Of(lambda m, x: m.head(x / 2 if bool((x > 1).any()) else x), head=nn.Linear(4, 3))
    for most, is_refused in ((0, True), (math.inf, False)):
        monkeypatch.setattr(clipping, "_MOST_TIMES", most)
        if is_refused:
            with pytest.raises(ConfigError, match="engine='loop'"):
                engine(model, cross_entropy, sample=(255 * sample[0][:8], sample[1][:8]))
        else:
            assert engine(model, cross_entropy, sample=(255 * sample[0][:8], sample[1][:8])).name == "loop"
    monkeypatch.setattr(clipping, "_MOST_TIMES", 0)
    assert engine(model, cross_entropy, "loop", sample=sample).name == "loop"
    honest = Of(lambda m, x: m.head(torch.from_numpy(x.detach().numpy())), head=nn.Linear(4, 3))
    assert engine(honest, cross_entropy, sample=sample).name == "bookkeeping"


def test_a_batch_of_evaluation_is_looked_at_too(caplog):
    """Made-up records do not show what many records do."""

    def forward(m, x):
        return m.head(x - x.mean(0) if len(x) > 64 and not m.training else x)

    torch.manual_seed(0)
    x, y = short.records(200, 4)
    with caplog.at_level(logging.WARNING):
        result = short.fit(Of(forward, head=nn.Linear(4, 2)), (x, y), test=(x + 2, y))
    assert result.record["evaluation"] == "vmap"
    assert "in evaluation mode what model makes" in caplog.text
    assert result.record["test_accuracy"] == (torch.from_numpy(result.predict(x + 2)) == y).double().mean()


def test_random_numbers_in_evaluation_are_no_company():
    """What cannot be compared is neither refused nor run alone."""
    torch.manual_seed(0)
    x, y = short.records(100, 4)
    model = Of(lambda m, x: m.head(F.dropout(x, 0.5, not m.training)), head=nn.Linear(4, 2))
    assert "evaluation" not in short.fit(model, (x, y), test=(x, y), engine="bookkeeping").record


def test_predict_agrees_with_a_run_in_bfloat16():
    torch.manual_seed(0)
    x, y = short.records(400, 16)
    result = short.fit(nn.Sequential(nn.Linear(16, 2)), (x, y), test=(x, y), precision="bfloat16")
    outputs = result.model.eval()(x).detach()
    assert result.record["test_loss"] == pytest.approx(float(cross_entropy(outputs, y).double().mean()), rel=1e-6)


# Random models.

RULES = {
    "any": lambda z: (z > 0).any(),
    "max": lambda z: z.max() > 0,
    "quantile": lambda z: z.quantile(0.8) > 0,
    "count": lambda z: (z > 0).sum() > 2,
    "argmax": lambda z: z[z.argmax()] > 0,
    "sort": lambda z: z.sort().values[-2] > 0,
}
WAYS = ("where", "if", "kept")
"""A switch by an operation, by Python, and one that the first batch throws for good."""


class Random(nn.Module):
    """By a rule on the batch, records are shrunk or not."""

    def __init__(self, rule, way, threshold):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.rule, self.way, self.threshold, self.switch = RULES[rule], way, threshold, None

    def is_on(self, x):
        return self.rule(x.detach().amax(1) - self.threshold)

    def forward(self, x):
        if self.way == "kept":
            self.switch = self.is_on(x) if self.switch is None else self.switch
            x = torch.where(self.switch, x / 3, x)
        elif self.way == "where":
            x = torch.where(self.is_on(x), x / 3, x)
        elif bool(self.is_on(x)):
            x = x / 3
        return self.head(torch.tanh(self.body(x)))


def alone(model, x, y):
    """The clipped sum by plain autograd, each record by a model that has seen no other one."""
    total = 0.0
    for row in range(len(x)):
        model.switch = None
        loss = cross_entropy(model(x[row : row + 1]), y[row : row + 1]).sum()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        total = total + gradient * (0.5 / gradient.norm()).clamp(max=1)
    model.switch = None
    return total


def trained_wrongly(seed, draws=6):
    """Of a random model: draws whose sum is not that of its records one at a time, and of how many."""
    generator = torch.Generator().manual_seed(seed)
    rule, way = [*RULES][seed % len(RULES)], WAYS[seed // len(RULES) % len(WAYS)]
    x = torch.randn(400, 4, generator=generator)
    y = torch.randint(3, (400,), generator=generator)
    threshold = x.amax(1).quantile(torch.rand(1, generator=generator).item() ** 0.25)
    torch.manual_seed(seed)
    model = Random(rule, way, threshold)
    wrong = taken = 0
    try:
        made = engine(model, cross_entropy, sample=(x[:3], y[:3]), batch=24)
        for _ in range(draws):
            rows = torch.randperm(400, generator=generator)[:24]
            is_examined = made.is_to_be_examined(24)
            total = clipped_sum(made, x[rows], y[rows])
            taken += 1
            error = (total - alone(model, x[rows], y[rows])).norm()
            is_wrong = bool(error > 1e-5 * 0.5 * 24)
            # Where the rule was on in a batch that was looked at, nothing may be wrong.
            assert not (is_wrong and is_examined), (rule, way)
            wrong += is_wrong
    except ConfigError:
        pass
    return wrong, taken


def test_random_models_that_look_at_the_batch():
    """Where a rule is on in an examined batch they are refused or run alone; sharp_edges.md has the share of others."""
    results = [trained_wrongly(seed) for seed in range(72)]
    wrong, taken = (sum(column) for column in zip(*results, strict=True))
    assert taken > 100
    assert wrong == 0
