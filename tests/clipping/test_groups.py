"""Clipping by groups of parameters: one backward pass, one noise, a sensitivity of sqrt(sum C^2)."""

import math
import socket
import sys
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import short
import torch
from loop import around, cast, cross_entropy, gradient, squared
from torch import Tensor, nn
from zoo import MODELS

import dpopt
import dpopt.testing
from dpopt import registry
from dpopt.clipping import Abadi, Automatic, ByGroup, Normalized, clip_rule, clip_spec, engine, flat, rules
from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.rules import AtBound
from dpopt.errors import ConfigError
from dpopt.optimizers.base import is_matrix
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import DataOracle
from dpopt.privacy.queries import Gradient
from dpopt.privacy.wire import Channel
from dpopt.testing import Task, task

ENGINES = ["bookkeeping", "vmap", "loop"]
WEIGHTS = [(1.0,), (0.7, 0.5)]


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def problem(made):
    x, y = torch.randn(9, 5, dtype=made.theta.dtype), torch.randint(0, 3, (9,))
    return x, y, torch.arange(9) != 4


def masks(made):
    """A vector of ones and zeros for each layer."""
    layers = list(dict.fromkeys(part.layer for part in made.layout))
    for layer in layers:
        yield torch.cat([torch.full((math.prod(p.shape),), float(p.layer == layer)) for p in made.layout]).to(
            made.theta
        )


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("rule", [Abadi(0.3), Automatic(0.3, 0.1), Normalized(0.3)], ids=str)
def test_one_query_is_a_masked_query_for_each_layer(name, weights, rule):
    made = engine(network(), cross_entropy, name)
    x, y, mask = problem(made)
    points = around(made.theta, weights)
    grouped = made.clipped(points, x, y, mask, ByGroup(rule))
    # Of two groups with equal shares, each is clipped as g -> s rule(g / s), s^2 = 1/2.
    s = 0.5**0.5
    alone = [made.clipped(points, x, y, mask, rule, scale / s) for scale in masks(made)]
    torch.testing.assert_close(grouped.total, s * sum(each.total for each in alone), rtol=1e-9, atol=1e-12)
    whole = made.clipped(points, x, y, mask, rule)
    torch.testing.assert_close((grouped.norms, grouped.losses), (whole.norms, whole.losses))
    assert not torch.allclose(grouped.total, whole.total)


@pytest.mark.parametrize("name", ENGINES)
def test_abadis_bound_is_divided_and_automatic_clipping_is_of_each_group(name):
    made = engine(network(), cross_entropy, name)
    x, y, mask = problem(made)
    points, bounds = [(1.0, made.theta)], (0.05, 0.05)
    rule = ByGroup(Abadi(math.hypot(*bounds)), groups="^0")
    assert rule.sensitivity == math.hypot(*bounds)
    alone = [made.clipped_sum(points, x, y, mask, Abadi(c), s) for c, s in zip(bounds, masks(made), strict=True)]
    torch.testing.assert_close(made.clipped_sum(points, x, y, mask, rule), sum(alone), rtol=1e-9, atol=1e-12)
    automatic = made.clipped_sum(points, x, y, mask, ByGroup(Automatic(2**0.5, 2**0.5 * 0.01)))
    alone = [made.clipped_sum(points, x, y, mask, Automatic(1.0, 0.01), scale) for scale in masks(made)]
    torch.testing.assert_close(automatic, sum(alone), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ENGINES)
def test_one_group_is_the_rule_itself(name):
    made = engine(network(), cross_entropy, name)
    x, y, mask = problem(made)
    scale = torch.rand_like(made.theta)
    one, plain = (
        made.clipped_sum([(1.0, made.theta)], x, y, mask, rule, scale) for rule in (ByGroup(groups=r"\."), Abadi())
    )
    torch.testing.assert_close(one, plain, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Masked(DPSGD):
    """A query of bound C for each layer, in one draw."""

    def step(self, state, oracle):
        scale = torch.cat([torch.full(part.shape, float(part.layer == "0")).flatten() for part in oracle.layout])
        with oracle.draw() as batch:
            each = [batch.gradient(state.theta, self.clip, s.to(state.theta)).value for s in (scale, 1 - scale)]
        return state._replace(theta=state.theta - self.lr * (each[0] * scale + each[1] * (1 - scale)))


def test_noise_is_as_much_as_that_of_a_query_for_each_layer():
    optimizers = [DPSGD(), DPSGD(clip=ByGroup(Abadi(2**0.5))), Masked()]
    plain, grouped, masked = (Task().record(optimizer).releases[0][0].std for optimizer in optimizers)
    assert grouped == pytest.approx(2**0.5 * plain, rel=1e-6)
    assert masked == pytest.approx(grouped, rel=1e-4)  # solved for another ledger


@pytest.mark.parametrize("name", MODELS)
def test_every_parameters_norm_is_that_of_its_gradients(name):
    """On them rests the bound of a group; those of a whole model would hide what is wrong with a small parameter."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model, x, y = model.double(), cast(inputs(4), torch.float64), torch.randn(4).double()
    made = BookkeepingEngine(model, squared)
    squares = made.per_example([(1.0, made.theta)], x, y).squares
    rows = torch.stack([gradient(model, squared, made.theta, x[i : i + 1], y[i : i + 1])[1] for i in range(4)])
    for part, square in zip(made.layout, squares, strict=True):
        expected = rows[:, part.slice].square().sum(1)
        found = torch.zeros(4).double() if square is None else square
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12 * float(rows.square().sum()), msg=part.name)


def checks_of(optimizer):
    return {check.name: check for check in dpopt.testing.checks(optimizer)}


@pytest.mark.parametrize("name", ["bounds_one_record", "adds_the_stated_gradient_noise", "survives_yaml"])
@pytest.mark.parametrize("clip", [ByGroup(Automatic()), ByGroup(Abadi(0.5), "bias|2")], ids=str)
def test_optimizers_that_clip_by_group_conform(name, clip):
    checks_of(DPSGD(clip=clip))[name]()


@dataclass(frozen=True)
class Grown:
    """A rule whose bound was released after its sensitivity was stated."""

    bound: Tensor
    sensitivity = 1.0

    def factor(self, norm):
        return (self.bound / norm).clamp(max=1)


@pytest.mark.parametrize("rule", [Grown, AtBound])
def test_a_released_bound_moves_no_group_beyond_its_share(rule, monkeypatch):
    made = engine(network(), cross_entropy)
    x, y, mask = problem(made)
    asked, one = ByGroup(rule(torch.tensor(10.0))), torch.arange(9) == 0
    total = made.clipped_sum([(1e4, made.theta)], x, y, mask & one, asked)
    assert total.norm() <= 1 + 1e-9
    for scale in masks(made):
        assert 0.1 < (total * scale).norm() <= 0.5**0.5 + 1e-9
    if rule is Grown:  # it is the engine that cuts it off
        monkeypatch.setattr(flat, "clip_factors", lambda clip, norm, mask: clip.factor(norm) * mask)
        assert made.clipped_sum([(1e4, made.theta)], x, y, mask & one, asked).norm() > 5


class NoiseOfEachGroup(DataOracle):
    """Wrong: each group has the noise of its own bound alone, so that both together tell twice as much."""

    def _add_noise(self, total, std, charged):
        before = total.clone()
        super()._add_noise(total, std, charged)
        groups = charged.asked.query.clip.groups
        share = (max(groups) + 1) ** -0.5
        total.copy_(before + share * (total - before))


def test_noise_of_each_groups_own_bound_is_found(monkeypatch):
    check = checks_of(DPSGD(clip=ByGroup()))["adds_the_stated_gradient_noise"]
    check()
    monkeypatch.setattr(task, "DataOracle", NoiseOfEachGroup)
    with pytest.raises(AssertionError, match="chi-square"):
        check()


class Shared(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x).tanh())


@pytest.mark.parametrize("name", ENGINES)
def test_a_shared_parameter_is_in_one_group(name):
    torch.manual_seed(0)
    made = engine(Shared().double(), cross_entropy, name)
    assert ByGroup().partition(made.layout) == (0, 0, 1)  # one.weight, one.bias, two.bias
    x, y, mask = torch.randn(6, 4).double(), torch.randint(0, 4, (6,)), torch.ones(6, dtype=torch.bool)
    points = [(1.0, made.theta)]
    alone = [made.clipped_sum(points, x, y, mask, Abadi(0.1), scale) for scale in masks(made)]
    grouped = made.clipped_sum(points, x, y, mask, ByGroup(Abadi(0.1 * 2**0.5)))
    torch.testing.assert_close(grouped, sum(alone), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ENGINES)
def test_a_record_that_is_not_finite_contributes_to_no_group(name):
    made = engine(network(), cross_entropy, name)
    x, y, mask = problem(made)
    clean = made.clipped_sum([(1.0, made.theta)], x, y, mask & (torch.arange(9) != 2), ByGroup())
    x[2, 0] = math.nan
    torch.testing.assert_close(made.clipped_sum([(1.0, made.theta)], x, y, mask, ByGroup()), clean)


def test_groups_are_by_layer_or_by_name():
    layout = engine(network(), cross_entropy).layout
    assert ByGroup().partition(layout) == (0, 0, 1, 1)
    assert ByGroup(groups="bias").partition(layout) == (0, 1, 0, 1)
    assert ByGroup(groups=r"bias|^\d").partition(layout) == (0, 0, 1, 1)
    assert ByGroup(groups=r"(?:bias|other)").partition(layout) == (0, 1, 0, 1)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    model = nn.Sequential(OrderedDict(stem=nn.Linear(2, 2), blocks=nn.Sequential(*blocks)))
    layout = engine(model, cross_entropy).layout
    assert ByGroup(groups=r"blocks\.\d+").partition(layout) == (0, 0, 1, 1, 1, 1, 2, 2, 2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda layout: ByGroup(groups="head").partition(layout), r"clip.groups: 'head'.*2\.weight"),
        (lambda layout: ByGroup(groups="(?=0)").partition(layout), r"finds no text in a parameter's name among"),
        (lambda layout: ByGroup(groups="bias|wieght").partition(layout), r"'wieght' finds no text"),
        (lambda layout: ByGroup(groups="(0"), "ByGroup.groups.*a regular expression"),
        (lambda layout: ByGroup(ByGroup()), "a rule without groups"),
        (lambda layout: clip_rule({"rule": "by_group", "inner": "automat"}), "did you mean 'automatic'"),
    ],
)
def test_wrong_groups_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make(engine(network(), cross_entropy).layout)


def test_groups_of_any_field_are_looked_at_before_training():
    """DP2-RMSProp asks with its second rule half an epoch in."""
    inner = dpopt.create("dp2_rmsprop", scaled_clip={"rule": "by_group", "groups": "head"})
    with pytest.raises(ConfigError, match=r"^scaled_clip\.groups: 'head'.*weight, bias"):
        short.fit(optimizer=inner, callback=lambda entry: pytest.fail("trained"))


def test_an_embedding_of_ones_own_class_is_one():
    kind = type("Positions", (nn.Embedding,), {})
    layout = engine(nn.Sequential(kind(5, 4), nn.Flatten(), nn.Linear(4, 2)), cross_entropy, "vmap").layout
    assert [is_matrix(part) for part in layout] == [False, True, False]


def test_a_refused_query_charges_nothing():
    checked = Task()
    oracle = checked.oracle(checked.plan(DPSGD()))
    with oracle.draw() as batch:
        with pytest.raises(ConfigError, match=r"clip\.groups"):
            batch.gradient(checked.engine.theta, ByGroup(groups="head"))
        batch.gradient(checked.engine.theta, ByGroup(groups="2"))


def test_specs_round_trip():
    for value in ("by_group", {"rule": "by_group", "inner": {"rule": "psac", "bound": 2}, "groups": "a|b"}):
        rule = clip_rule(value)
        assert clip_rule(clip_spec(rule)) == rule
        made = dpopt.create("dp_adam", clip=value)
        assert registry.from_spec("optimizer", registry.spec("optimizer", "dp_adam", made)) == made
    assert clip_spec(ByGroup())["inner"] == {"rule": "abadi", "bound": 1.0}


def test_an_isolated_optimizer_may_clip_by_group():
    asked = Gradient(torch.zeros(3), ByGroup(Automatic(), groups="bias|2"))
    ours, theirs = map(Channel, socket.socketpair())
    ours.send(query=asked)
    got = theirs.receive(1, 100)["query"]
    assert got.clip == asked.clip


OWN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Halved:
    bound: float = 1.0

    @property
    def sensitivity(self):
        return self.bound / 2

    def factor(self, norm):
        return (self.bound / norm).clamp(max=1) / 2
"""


def test_a_rule_of_another_distribution_has_a_name(tmp_path, monkeypatch):
    about = tmp_path / "own_rules-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own_rules\nVersion: 1.0\n")
    points = "halved = own_rules:Halved\nabadi = own_rules:Halved\nmissing = no_such_module:Rule\n"
    points += "gone = own_rules:Gone\nplain = own_rules:dataclass\n"
    (about / "entry_points.txt").write_text(f"[dpopt.clip_rules]\n{points}")
    (tmp_path / "own_rules.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    rules._points.cache_clear()
    try:
        assert registry.spec("optimizer", "dp_sgd", DPSGD())["clip"] == {"rule": "abadi", "bound": 1.0}
        assert "own_rules" not in sys.modules  # a list of names imports nothing
        made = dpopt.create("dp_sgd", clip={"rule": "by_group", "inner": {"rule": "halved", "bound": 0.5}})
        assert made.clip.sensitivity == 0.25
        described = registry.spec("optimizer", "dp_sgd", made)
        assert described["clip"]["inner"] == {"rule": "halved", "bound": 0.5}
        assert registry.from_spec("optimizer", described) == made
        assert type(clip_rule("abadi")) is Abadi  # no name of the kernel's can be taken
        with pytest.raises(ConfigError, match="did you mean 'halved'"):
            clip_rule("halfed")
        for name, reason in (("missing", "cannot be imported"), ("gone", "cannot"), ("plain", "a frozen dataclass")):
            with pytest.raises(ConfigError, match=f"^clip rule {name}: .*{reason}"):
                clip_rule(name)
    finally:
        rules._points.cache_clear()
        sys.modules.pop("own_rules", None)
