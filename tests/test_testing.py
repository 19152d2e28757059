"""The conformance checks must be able to fail: each is shown an optimizer that breaks its rule."""

import dataclasses
import gc
import math
import random
import unittest
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

import dpopt
from dpopt import registry, testing
from dpopt.clipping import Abadi, Normalized, flat
from dpopt.errors import ConfigError
from dpopt.optimizers.base import Direction, scalar
from dpopt.optimizers.dp_sgd import DPSGD, State
from dpopt.privacy import DataOracle, caching, calibration, data, sampling
from dpopt.testing import numerics
from dpopt.testing.imports import forbidden_imports
from dpopt.testing.numerics import TARGETS, Exact
from dpopt.testing.privacy import _strict
from dpopt.testing.task import Task
from dpopt.types import Release


@dataclass
class Thawed:
    lr: float = 0.1

    init = DPSGD.init
    step = DPSGD.step


@dataclass(frozen=True)
class NoRevision:
    lr: float = 0.1


@dataclass(frozen=True)
class Forgetful(DPSGD):
    """Made again from its fields it is another."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "lr", self.lr / 2)


def sgd(name="Changed", base=DPSGD, **methods):
    """DP-SGD with other methods, or another class so."""
    return dataclass(frozen=True)(type(name, (base,), {"__module__": __name__, **methods}))()


def then(change):
    """A step of DP-SGD, of whose new state `change` makes another, given the state before and the oracle too."""
    return lambda self, state, oracle: change(DPSGD.step(self, state, oracle), state, oracle)


def moved(by):
    """A step of DP-SGD, after which theta is moved by what `by` says of the oracle."""
    return then(lambda new, state, oracle: new._replace(theta=new.theta + by(oracle)))


def in_place(new, state, oracle):
    state.theta.copy_(new.theta)
    return state


def keeps_theta(self, theta):
    """Leaves the state that it is given as it is, but not the theta."""
    state = DPSGD.init(self, theta.clone())
    theta.add_(1)
    return state


def rewrites_releases(self, state, gradient):
    return gradient.value.mul_(2), state


def own_noise(self, state, oracle):
    new = DPSGD.step(self, state, oracle)
    return new._replace(theta=new.theta + 0.1 * torch.randn(new.theta.shape, device=new.theta.device))


@dataclass(frozen=True)
class LooksAround(DPSGD):
    """Steps to where the records in memory say, the first time."""

    def step(self, state, oracle):
        new = super().step(state, oracle)
        if oracle.draws_left < oracle.draws_total - 1:
            return new
        found = [each._x.mean() for each in gc.get_objects() if type(each) is DataOracle]
        return new._replace(theta=new.theta + (found[0] if found else 0.0))


def grows(self, state, oracle):
    """Has one tensor more in its state after a step."""
    new = DPSGD.step(self, State(state.theta, state.theta.new_zeros(0)), oracle)
    return State(new.theta, (new.momentum, new.momentum))


def twice_for_one(self, state, oracle):
    """Two queries where the plan was traced with one: extra releases only when there is data."""
    with oracle.draw() as batch:
        gradient = batch.gradient(state.theta, self.clip)
        if not state.theta.is_meta:
            gradient = batch.gradient(state.theta, self.clip)
    return state._replace(theta=state.theta - self.lr * gradient.value)


def less_than_planned(self, state, oracle):
    """Leaves its last draw without a query where there is data."""
    if oracle.draws_left > 1 or state.theta.is_meta:
        return DPSGD.step(self, state, oracle)
    with oracle.draw():
        return state


@dataclass(frozen=True)
class LyingRule:
    """Clips at 5 and declares 1."""

    @property
    def sensitivity(self):
        return 1.0

    def factor(self, norm):
        return (5 / norm).clamp(max=1)


def more_for_larger_models(self, state, oracle):
    new = DPSGD.step(self, state, oracle)
    if oracle.dimension > 500 and oracle.draws_left:
        return DPSGD.step(self, new, oracle)
    if oracle.draws_left:
        with oracle.draw():
            pass
    return new


MEMORY = {}


def remembers_outside(new, state, oracle):
    """Keeps its momentum outside the state."""
    if new.theta.is_meta:
        return new
    sum_so_far = MEMORY[id(oracle)] = MEMORY.get(id(oracle), 0) + new.theta
    return new._replace(theta=sum_so_far)


@dataclass(frozen=True)
class OtherTheSecondTime(DPSGD):
    """Takes smaller steps in the second run that this process makes; calibration is none."""

    runs = [0]

    def init(self, theta):
        self.runs[0] += not theta.is_meta
        return super().init(theta)

    def direction(self, state, gradient):
        return gradient.value / max(1, self.runs[0]), state


class Remembering(NamedTuple):
    theta: torch.Tensor
    steps: torch.Tensor


@dataclass(frozen=True)
class CountsOnItself(Direction):
    """Its theta is right after a resume, but a count of steps, kept in the object, is not."""

    def init(self, theta):
        object.__setattr__(self, "steps", 0)
        return Remembering(theta, scalar(theta))

    def direction(self, state, gradient):
        object.__setattr__(self, "steps", getattr(self, "steps", 0) + 1)
        return gradient.value, state._replace(steps=scalar(state.theta, self.steps))


@dataclass(frozen=True)
class Ascends(DPSGD):
    def direction(self, state, gradient):
        return -gradient.value, state


def along(change, name="Changed"):
    """DP-SGD along what `change` makes of the private gradient."""
    return sgd(name, direction=lambda self, state, gradient: (change(gradient.value), state))


@dataclass(frozen=True)
class FloatMomentum(DPSGD):
    momentum: float = 0.9

    def init(self, theta):
        return State(theta, torch.zeros(len(theta), device=theta.device))


def sized(by):
    """DP-SGD with steps of the size, and gradients clipped by the rule, that `by` says of itself and the oracle."""

    def step(self, state, oracle):
        size, clip = by(self, oracle)
        with oracle.draw() as batch:
            gradient = batch.gradient(state.theta, clip).value
        return state._replace(theta=state.theta - size * gradient)

    return sgd(step=step)


def taken(oracle):
    return oracle.draws_total - oracle.draws_left


@dataclass(frozen=True)
class SecondBeta(DPSGD):
    """Averages with the first of its two betas."""

    betas: tuple[float, float] = (0.9, 0.5)

    def direction(self, state, gradient):
        momentum = self.betas[0] * state.momentum + gradient.value
        return momentum, State(state.theta, momentum)

    def init(self, theta):
        return State(theta, torch.zeros_like(theta))


@dataclass(frozen=True)
class CountsInVain(DPSGD):
    """Pays for a count in each draw, and never looks at it."""

    noise_inflation: float = 1.001

    def observe(self, state, batch, clip):
        gradient = super().observe(state, batch, clip)
        batch.below(clip.bound)
        return gradient


SHORT = along(lambda value: value[1:], "OneShort")
SIDE_DOOR = sgd(step=moved(lambda oracle: oracle._x.mean() if isinstance(oracle, DataOracle) else 0.0))
VECTOR = sgd("VectorAlone", direction=lambda self, state, gradient: gradient.value)


class Broken(NamedTuple):
    """An optimizer that a check must refuse, saying `message`; or one that it must refuse where `patch` holds."""

    check: str
    optimizer: object
    message: str
    patch: str = ""
    error: type[BaseException] = AssertionError


BROKEN = [
    Broken("is_frozen_configuration", Thawed(), "unhashable", error=TypeError),
    Broken("is_frozen_configuration", NoRevision(), "`revision` is None"),
    Broken("survives_yaml", Forgetful(), "comes back from YAML"),
    Broken("ends_the_same_when_isolated", LooksAround(), "depends on the process"),
    Broken("has_a_complete_entry", DPSGD(), "summary is missing", "no_summary"),
    Broken("has_a_complete_entry", DPSGD(), "expected a number in", "grid_out_of_range", ConfigError),
    Broken("equals_its_declared_limits", DPSGD(), r"is not .*dp_adam.* apart after", "wrong_limit"),
    Broken("equals_its_declared_limits", DPSGD(), "it releases something else", "limit_of_other_releases"),
    Broken("can_be_traced", sgd(step=then(lambda new, state, _: new if new.theta.norm() < 1 else state)), "reads the "),
    Broken("can_be_traced", sgd("A", Direction), r"^A\.init: None .* it gives the state before the first step"),
    Broken("can_be_traced", VECTOR, r"^VectorAlone\.direction: 'Tensor \[8\]' .* expected two values"),
    Broken("can_be_traced", dpopt.create("hyfreedp", base=SHORT), r"^OneShort\.direction: 'Tensor \[7\], State'"),
    Broken(
        "can_be_traced",
        sgd("A", init=lambda self, theta: State(theta.view(2, -1), torch.zeros_like(theta))),
        r"^A\.init: 'State, theta \[2, 4\]' .* shape \[d\], here \[8\]",
    ),
    Broken("is_pure", sgd(step=then(in_place)), "state in place"),
    Broken("is_pure", sgd(init=keeps_theta), "does not start at theta"),
    Broken("is_pure", sgd(direction=rewrites_releases), "a release is changed in place"),
    Broken("is_pure", sgd(step=own_noise), "random generator"),
    Broken("is_pure", sgd(step=moved(lambda _: 0 * np.random.random())), "random generator"),
    Broken(
        "is_pure", sgd(step=then(lambda new, *_: State(new.theta, new.momentum.double()))), "makes .*float64.* of .*32"
    ),
    Broken("is_pure", sgd(step=moved(lambda _: 0 * random.random())), "random generator"),
    *(
        Broken("is_pure", sgd(step=moved(lambda _, seed=seed: 0 * bool(seed(0)))), "random generator")
        for seed in (random.seed, np.random.seed, torch.manual_seed)
    ),
    Broken("is_pure", sgd(step=grows), "2 tensors at one time and 3"),
    Broken("leaves_the_planned_ledger", sgd(step=twice_for_one), "^leaves_the_planned_ledger: draw 0: "),
    Broken("leaves_the_planned_ledger", sgd(step=less_than_planned), "is not the planned"),
    Broken("spends_at_most_the_target", DPSGD(), "spent, 5.0 allowed", "too_little_noise"),
    Broken("replays_bit_for_bit", SIDE_DOOR, r"depends on more than the releases: leaf 0 .* differs by \d"),
    Broken(
        "sees_only_the_protocol", sgd(step=moved(lambda o: len(o.ledger))), "`oracle.ledger` is not in the protocol"
    ),
    Broken("sees_only_the_protocol", sgd(step=moved(lambda o: type(o) is DataOracle)), "depends on which oracle"),
    Broken("imports_no_data", dpopt.create("hyfreedp", base=Ascends()), "test_testing: dpopt.privacy.DataOracle"),
    Broken(
        "stops_when_the_budget_is_spent",
        sgd(step=lambda self, state, oracle: DPSGD.step(self, state, oracle) if oracle.draws_left else state),
        "after the last draw",
    ),
    Broken("adds_the_stated_gradient_noise", DPSGD(clip=Abadi(0.5)), "chi-square", "less_noise"),
    Broken("adds_the_stated_gradient_noise", dpopt.create("hyfreedp"), "losses: the stated std", "wrong_loss_std"),
    Broken("adds_the_stated_gradient_noise", dpopt.create("dpzero"), "chi-square", "no_noise"),
    Broken("bounds_one_record", DPSGD(clip=LyingRule()), r"\(gradient\) by [45]\.\d+, not 1", "trusting_engine"),
    Broken("bounds_one_record", dpopt.create("hyfreedp"), r"\(losses\) by", "unbounded_losses"),
    Broken("bounds_one_record", dpopt.create("adaptive_clip"), r"\(counts\) by", "uncentred_counts"),
    Broken("survives_bad_records_and_empty_draws", along(torch.sqrt), "poisoned the run"),
    Broken("survives_bad_records_and_empty_draws", DPSGD(), "an empty draw poisoned", "mean_of_the_draw"),
    Broken("plans_the_same_for_any_dimension", sgd(step=more_for_larger_models), "depends on the dimension"),
    Broken("clips_as_stated", sized(lambda self, _: (self.lr, Abadi(1.0))), r"bounded by \[1.0\], where .*=0.5"),
    Broken(
        "clips_as_stated", sized(lambda self, _: (self.lr, Abadi(min(self.clip.bound, 1.5)))), r"\[1.5\], where .*=2"
    ),
    Broken("clips_as_stated", sized(lambda self, _: (self.lr, Normalized(self.clip.bound))), r"\[1.0\], where"),
    Broken("every_field_changes_the_end", sized(lambda self, _: (0.5, self.clip)), "on lr, momentum, weight_decay, "),
    Broken("every_field_changes_the_end", sized(lambda self, _: (self.lr, Abadi(1.0))), r"on clip\.bound, momentum"),
    Broken("every_field_changes_the_end", SecondBeta(), r"depends on betas\.1, momentum"),
    Broken("every_release_changes_the_end", CountsInVain(), r"release 1 \(counts\) is paid for and not used"),
    Broken(
        "every_release_changes_the_end",
        sized(lambda self, oracle: (self.lr * (taken(oracle) % 4 < 3), self.clip)),
        r"release 3 \(gradient\) is paid",
    ),
    Broken(
        "leaves_the_batch_size_to_the_oracle",
        sized(lambda self, oracle: (self.lr / oracle.expected_batch, self.clip)),
        "depends on the expected batch: leaf 0",
    ),
    Broken(
        "ends_near_its_best",
        sized(lambda self, oracle: (self.lr * (1 - 1.5 * taken(oracle) / oracle.draws_total), self.clip)),
        r"a quadratic falls to 0\.\d+ of its first value and ends at",
    ),
    Broken("resumes_bit_for_bit", sgd(step=then(remembers_outside)), "a run that was stopped ends elsewhere"),
    Broken("resumes_bit_for_bit", CountsOnItself(), "leaf 1 of the state differs by 6"),
    Broken("works_without_noise", Ascends(), "a quadratic never falls to 0.1 of"),
    Broken("agrees_in_float64", along(lambda v: v + 1e3 - 1e3), r"differ in leaf 0 .* apart after a way of"),
    Broken("agrees_in_float64", along(lambda v: v.bfloat16().to(v.dtype)), "_to_copy makes a vector torch.bfloat16 in"),
    Broken("agrees_in_float64", FloatMomentum(), "aten::zeros makes a vector torch.float32 in torch.float64"),
    Broken("same_on_cuda", OtherTheSecondTime(), "^GPU and CPU differ in leaf 0", "cpu_as_gpu"),
]


@pytest.fixture
def patches(monkeypatch):
    """Ways to break what is around an optimizer, by name."""

    def entry(**changes):
        changed = dataclasses.replace(registry.entry("optimizer", "dp_sgd"), **changes)
        everything = {**registry.entries("optimizer"), "dp_sgd": changed}
        monkeypatch.setattr(registry, "entries", lambda group: everything)

    def limit(fields, equals):
        entry(limits=[{"fields": fields, "equals": equals}])

    def released(kind, change):
        original = DataOracle.answer

        def answer(oracle, charged):
            release = original(oracle, charged)
            return change(oracle, release) if charged.asked.kind == kind else release

        monkeypatch.setattr(DataOracle, "answer", answer)

    def too_little_noise():
        monkeypatch.setattr(caching, "read", lambda *_: None)
        monkeypatch.setattr(caching, "write", lambda *_: None)
        monkeypatch.setattr(calibration, "_solve_kinds", lambda *_: {"gradient": 1.0})

    def wrong_std(oracle, release):
        return Release(release.value, 2 * release.std)

    def shifted(oracle, release):
        return Release(3 + release.value, release.std)

    def unbounded(asked, losses, norms, mask):
        return torch.where(mask, losses.nan_to_num(), 0.0).sum(dim=1)

    def realised_batch(oracle, release):
        rows = sum(int(inputs()[2].sum()) for inputs in oracle._batch._records.inputs)
        return Release(release.value / rows if rows else release.value * math.nan, release.std)

    original = sampling.add_gaussian
    return {
        "no_summary": lambda: entry(summary=""),
        "grid_out_of_range": lambda: entry(grid={"lr": [0.1, -1]}),
        "wrong_limit": lambda: limit({"lr": 0.01}, {"name": "dp_adam", "lr": 0.01}),
        "limit_of_other_releases": lambda: limit({}, {"name": "hyfreedp"}),
        "too_little_noise": too_little_noise,
        "less_noise": lambda: monkeypatch.setattr(
            sampling, "add_gaussian", lambda total, std, *where: original(total, 0.8 * std, *where)
        ),
        "no_noise": lambda: monkeypatch.setattr(sampling, "add_gaussian", lambda *noise: None),
        "wrong_loss_std": lambda: released("losses", wrong_std),
        "trusting_engine": lambda: monkeypatch.setattr(
            flat, "clip_factors", lambda clip, norm, mask: clip.factor(norm) * mask
        ),
        "unbounded_losses": lambda: monkeypatch.setattr(data, "sums", unbounded),
        "uncentred_counts": lambda: released("counts", shifted),
        "mean_of_the_draw": lambda: released("gradient", realised_batch),
        "cpu_as_gpu": lambda: (
            monkeypatch.setattr(numerics, "DEVICE", "cpu"),
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True),
        ),
    }


def test_every_check_has_been_seen_to_fail_and_has_a_name_for_pytest():
    assert {broken.check for broken in BROKEN} == {str(check) for check in testing.checks(DPSGD())}


def test_methods_that_have_special_cases_declare_them():
    methods = {"fiber", "disk", "scheduled", "doppler", "adadp_equilibrium", "adadp_hybrid"}
    assert {name for name, entry in registry.entries("optimizer").items() if entry.limits} >= methods


def check_of(optimizer, name):
    return next(check for check in testing.checks(optimizer) if check.name == name)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda b: f"{b.check}-{b.patch or b.message}")
def test_what_breaks_a_rule_is_caught(broken, patches):
    if broken.patch:
        patches[broken.patch]()
    with pytest.raises(broken.error, match=broken.message):
        check_of(broken.optimizer, broken.check)()


def test_of_what_cannot_be_traced_one_check_says_so_and_the_others_are_skipped():
    outcomes = {}
    for check in testing.checks(VECTOR):
        try:
            check()
        except Exception as error:
            outcomes[check.name] = error
    failed = [name for name, error in outcomes.items() if not isinstance(error, unittest.SkipTest)]
    assert failed == ["imports_no_data", "can_be_traced"]
    skipped = {str(error) for name, error in outcomes.items() if name not in failed}
    assert skipped == {"it is not registered", "it cannot be traced, see `can_be_traced`"}
    assert {rule.__name__ for rule in testing.RULES} - set(outcomes) == {"is_frozen_configuration", "survives_yaml"}


def excepted(**exceptions):
    @dataclass(frozen=True)
    class Excepted(Ascends):
        conformance_exceptions = exceptions

    return Excepted()


@pytest.mark.parametrize(
    ("exceptions", "message"),
    [
        ({"works_without_nose": "a typing error"}, "did you mean 'works_without_noise'"),
        ({"replays_bit_for_bit": "it would rather not"}, "known: agrees_in_float64"),
        ({"clips_as_stated": "it clips by half of it"}, "known: agrees_in_float64"),
        ({"works_without_noise": " "}, "expected the reason"),
    ],
)
def test_an_exception_skips_its_check_and_needs_a_rule_that_has_some_and_a_reason(exceptions, message):
    with pytest.raises(ConfigError, match=message):
        list(testing.checks(excepted(**exceptions)))
    optimizer = excepted(works_without_noise="it goes up on purpose")
    with pytest.raises(unittest.SkipTest, match="on purpose"):
        check_of(optimizer, "works_without_noise")()
    check_of(optimizer, "is_frozen_configuration")()


def test_a_view_shows_the_protocol_and_nothing_else():
    task = Task()
    view = _strict(task.oracle(task.plan(DPSGD())))
    assert (view.draws_left, view.draws_total, view.dimension, view.expected_batch) == (12, 12, 75, 20)
    with pytest.raises(AssertionError, match=r"`oracle\.draws_left` is set"):
        view.draws_left = 100
    with view.draw() as batch:
        assert batch.gradient(task.engine.theta, Abadi(1.0)).value.shape == (75,)
        for name in ("noises", "_oracle", "__dict__", "number"):
            with pytest.raises(AssertionError, match=rf"`batch\.{name}`"):
                getattr(batch, name)
    assert view.draws_left == 11


@pytest.mark.parametrize("name", TARGETS)
def test_targets_are_zero_at_their_least_and_start_above(name):
    objective, shapes = TARGETS[name]
    dimension = sum(map(math.prod, shapes))
    least = 1 - 2.0 * (torch.arange(dimension) % 2)  # also from the fifth entry on, where a sum's matrix begins
    assert objective(least) == 0
    assert objective(torch.zeros(dimension)) > 0.5


def test_the_exact_oracle_clips_scales_combines_and_counts():
    oracle = Exact("a quadratic", 120)
    start = oracle.start
    minus = -(1 - 2.0 * (torch.arange(10) % 2))  # the gradient at 0, of norm sqrt(10)
    with oracle.draw() as batch:
        plain = batch.gradient(start, Abadi(math.inf))
        torch.testing.assert_close(plain.value, minus)
        assert plain.std == 0
        assert batch.below(3.2).value.item() == 1
        assert batch.below(3.1).value.item() == 0
        torch.testing.assert_close(batch.gradient(start, Abadi(1.0)).value, minus / math.sqrt(10))
        torch.testing.assert_close(batch.gradient(start, Abadi(9.0), torch.full((10,), 2.0)).value, 2 * minus)
        points = [(3.0, start), (-2.0, -minus)]  # the gradient vanishes at the second
        torch.testing.assert_close(batch.gradient(points, Abadi(math.inf)).value, 3 * minus)
        assert batch.losses([start, -minus], 3.0).value.tolist() == [3.0, 0.0]
        assert batch.losses([start], 9.0).value.tolist() == [5.0]


PLUGGED = {
    "__init__": "",
    "method": "import math, dpopt\nimport torch.nn\nfrom plugged.shared import x\nfrom . import near",
    "near": "import dpopt.clipping.rules\nfrom dpopt import types\ndef f():\n    import os.path\n    open('x')",
    "shared": "import collections.abc\nfrom dpopt.privacy import oracle\nx = 1",
}
"""A plug-in's package: its method takes a base class from a module of its own."""


def test_imports_of_a_plugin_are_followed(tmp_path, monkeypatch):
    (tmp_path / "plugged").mkdir()
    for name, text in PLUGGED.items():
        (tmp_path / "plugged" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert forbidden_imports("plugged.method") == [
        *("plugged.method: dpopt", "plugged.near: open", "plugged.near: os.path"),
        "plugged.shared: dpopt.privacy.oracle",
    ]


def test_what_is_sound_passes():
    """Of a class that is not registered; and a rule that lies about its sensitivity is held to it by the engine."""
    check_of(Ascends(clip=Abadi(0.5), lr=1e-30), "survives_yaml")()
    check_of(DPSGD(clip=LyingRule()), "bounds_one_record")()
