"""The oracle owns what it answers with: no query can be asked so that its noise does not fit what is released."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from wrong import CHEATS, MISTAKES, PLAIN, Idle, Scaled

import dpopt.testing
from dpopt.clipping import Abadi, engine
from dpopt.clipping.rules import AtBound
from dpopt.errors import ConfigError
from dpopt.privacy import DataOracle, Draw, Ledger, Plan, Query, calibrate
from dpopt.privacy.queries import LARGEST, Below, Gradient, Losses, Space, contributions, read
from dpopt.testing.task import Task
from dpopt.types import Record

N, D = 12, 4


def oracle(noise=5.0, kinds=("gradient", "losses", "losses", "counts"), rate=1.0, dtype=torch.float32, name="auto"):
    """One draw of all records, by a linear model; enough is planned for one query of each kind."""
    torch.manual_seed(0)
    model = nn.Linear(D, 1, bias=False).to(dtype)
    made = engine(model, lambda output, target: (output.squeeze(-1) - target).square() / 2, name)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(N, D, generator=generator).to(dtype), torch.randn(N, generator=generator).to(dtype)
    noises = dict.fromkeys(kinds, noise)
    plan = Plan(noises, Ledger([Draw(rate, (noise,) * len(kinds))]), 1.0, rate, 1, D, 1e-5, "pld")
    return DataOracle(made, x, y, plan, draw_seed=1, noise_seed=2)


THETA = torch.ones(D)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused(name):
    task = Task()
    settings = {"rate": 0.3, "draws": 14, "dimension": task.engine.dimension, "epsilon": 5.0, "delta": 1e-5}
    with pytest.raises(ConfigError, match="expected"):
        task.run(MISTAKES[name], task.oracle(calibrate(MISTAKES[name], accountant="rdp", **settings)))


@dataclass(frozen=True)
class Root:
    """A rule of one's own that looks at its own norm alone."""

    sensitivity: float = 1.0

    def factor(self, norm):
        return 1 / (norm + norm.sqrt())


def test_a_rule_of_ones_own_is_possible_and_capped():
    asked = oracle(noise=0.0)
    with asked.draw() as batch:
        value = batch.gradient(THETA, Root()).value * N
    x, y = asked._x, asked._y
    gradients = (x @ THETA - y)[:, None] * x
    norms = gradients.norm(dim=1)
    torch.testing.assert_close(value, (gradients / (norms + norms.sqrt())[:, None]).sum(0))


@pytest.mark.parametrize(("name", "dtype"), [("vmap", torch.float64), ("auto", torch.float32)], ids=str)
def test_a_release_keeps_no_graph(name, dtype):
    theta, scale = (torch.ones(D, dtype=dtype, requires_grad=True) for _ in range(2))
    weight, bound = (torch.tensor(0.5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with oracle(dtype=dtype, name=name).draw() as batch:
        gradient = batch.gradient([(weight, theta), (0.5, theta)], Abadi(1.0), scale)
        losses = batch.losses([theta, theta], bound)
    assert not any(each.requires_grad for each in (gradient.value, losses.value, losses.std))
    assert gradient.value.dtype == dtype  # a float64 model keeps its precision


class TwoFaced:
    """Says 10^6 at first, 10^-6 after."""

    def __init__(self):
        self._values = iter([1e6])

    @property
    def sensitivity(self):
        return next(self._values, 1e-6)

    def factor(self, norm):
        return torch.ones_like(norm)


def test_a_sensitivity_is_read_once():
    asked = oracle(noise=1.0)
    with asked.draw() as batch:
        release = batch.gradient(THETA, TwoFaced())
    assert release.std in (1e6 / N, 1e-6 / N)
    truth = (((asked._x @ THETA - asked._y)[:, None] * asked._x).sum(0) / N).norm()
    assert release.std > 1 or release.value.norm() < 1e-3 * truth


CONVERSIONS = {"double": torch.Tensor.double, "parameter": lambda t: nn.Parameter(t.clone()), "same": torch.clone}


@pytest.mark.parametrize("rate", [1.0, 1e-9], ids=["full", "empty"])
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_an_empty_draw_looks_like_any_other(rate, convert):
    asked = oracle(rate=rate)
    with asked.draw() as batch:
        release = batch.gradient(convert(THETA), Abadi(1.0))
        losses = batch.losses([convert(THETA)] * 2, 1.0)
    assert (type(release.value), release.value.dtype) == (torch.Tensor, torch.float32)
    assert (type(losses.value), losses.value.dtype) == (torch.Tensor, torch.float64)
    for wrong in (torch.ones(D + 1), torch.ones(1, D), "theta", None):
        again = oracle(rate=rate)
        with again.draw() as batch, pytest.raises(ConfigError, match=r"gradient\.at"):
            batch.gradient(wrong, Abadi(1.0))
        assert again.ledger == Ledger([Draw(rate, ())])  # nothing was charged


@pytest.mark.parametrize("bound", [1e-44, 1e-31, 1e31])
def test_bounds_are_where_float32_noise_is_noise(bound):
    with oracle().draw() as batch:
        with pytest.raises(ConfigError, match="sensitivity"):
            batch.gradient(THETA, Abadi(bound))
        with pytest.raises(ConfigError, match="sensitivity"):
            batch.losses([THETA, THETA], bound)


def test_the_noise_of_the_least_bound_has_its_size():
    release = None
    asked = oracle(noise=0.6, rate=1e-9)
    with asked.draw() as batch:
        release = batch.gradient(THETA, Abadi(1e-30))
    assert 0.01 < float((release.value / release.std).norm()) < 10


@dataclass(frozen=True)
class Mixing(Query):
    """A kind of one's own, which says that it moves a sum by at most 1."""

    kind = "mixing"
    factor: dpopt.types.Number = 1.0

    @property
    def sensitivity(self):
        return 1.0

    def contribution(self, record):
        return (self.factor * record.norm).reshape(1)


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_a_kind_of_ones_own_is_bounded_whatever_it_says(factor):
    totals = []
    for rows in (N, N - 1):
        asked = oracle(noise=0.0, kinds=("gradient", "mixing"))
        asked._x, asked._y = asked._x[:rows] * 100, asked._y[:rows]
        with asked.draw() as batch:
            batch.gradient(THETA, Abadi(1.0))
            totals.append(batch.ask(Mixing(factor)).value * asked.expected_batch)
    assert float((totals[0] - totals[1]).abs()) <= 1.0 + 1e-9


def test_a_kind_of_ones_own_is_planned_and_charged():
    from dpopt.privacy.calibration import trace

    @dataclass(frozen=True)
    class Asking(dpopt.optimizers.dp_sgd.DPSGD):
        noise_inflation: float = 1.1
        shares = {"mixing": 2.0, "losses": 1.0}

        def step(self, state, oracle):
            with oracle.draw() as batch:
                gradient = batch.gradient(state.theta, self.clip)
                batch.ask(Mixing())
                batch.losses([state.theta], 1.0)
            return state._replace(theta=state.theta - gradient.value)

    assert trace(Asking(), rate=0.1, draws=3) == ((("gradient", "mixing", "losses"), 3),)
    sizes = {"rate": 0.1, "draws": 30, "dimension": D, "epsilon": 2.0, "delta": 1e-5, "accountant": "rdp"}
    plan = calibrate(Asking(), **sizes)
    assert 2 * 0.9999 <= plan.epsilon <= 2
    assert plan.noise["losses"] == pytest.approx(plan.noise["mixing"] * math.sqrt(2))
    alone = calibrate(dpopt.create("dp_sgd"), **sizes)
    assert plan.noise["gradient"] == pytest.approx(1.1 * alone.noise["gradient"], rel=1e-9)


@dataclass(frozen=True)
class Unsure(Mixing):
    """Its sensitivity, which a GPU may hold, is no number."""

    @property
    def sensitivity(self):
        return torch.tensor(math.nan)


def test_a_sensitivity_that_is_no_number_is_the_largest():
    sums = []
    for noise in (0.0, 1.0):
        asked = oracle(noise=noise, kinds=("gradient", "mixing"))
        with asked.draw() as batch:
            batch.gradient(THETA, Abadi(1.0))
            release = batch.ask(Unsure())
        sums.append(float(release.value * N))
    assert release.std == pytest.approx(LARGEST / N)
    assert 1e-3 < abs(sums[1] - sums[0]) / LARGEST < 6  # one normal


@dataclass(frozen=True)
class Looking(Mixing):
    """Decides by a value, so that whether it fails depends on the records."""

    def contribution(self, record):
        return torch.ones(1) if record.norm > 1 else torch.zeros(1)


def test_a_kind_that_looks_at_values_is_refused():
    asked = oracle(noise=0.0, kinds=("gradient", "mixing"))
    with asked.draw() as batch:
        batch.gradient(THETA, Abadi(1.0))
        with pytest.raises(ConfigError, match="contribution"):
            batch.ask(Looking())


def test_counters_cannot_be_set():
    asked = oracle()
    for name in ("draws_taken", "draws_left", "draws_total", "rate", "expected_batch", "dimension", "ledger", "noise"):
        with pytest.raises(ConfigError, match=f"oracle.{name}: 5 "):
            setattr(asked, name, 5)
    with pytest.raises(TypeError):
        asked.noise["gradient"] = 0.0


@pytest.mark.parametrize("name", ["again", "tap", "bound", "graph"])
def test_cheats_through_the_protocol_fail_in_the_same_process_too(name):
    cheat = CHEATS[name]
    task, plain = Task(), Task()
    found = task.run(cheat, task.oracle(task.plan(cheat))).theta
    if name == "graph":
        assert found.norm() < 100
        return
    honest = Scaled() if name == "tap" else PLAIN
    assert torch.equal(found, plain.run(honest, plain.oracle(plain.plan(honest))).theta)


@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_that_asks_for_nothing_is_an_error_and_no_endless_loop(isolate):
    x = torch.randn(20, D)
    with pytest.raises(ConfigError, match="asked for nothing"):
        dpopt.fit(
            nn.Linear(D, 2), nn.CrossEntropyLoss(reduction="none"), (x, (x[:, 0] > 0).long()), optimizer=Idle(),
            epsilon=3.0, delta=1e-3, epochs=3, batch_size=5, accountant="rdp", isolate=isolate, progress=False,
        )  # fmt: skip


# What one record contributes.


BOUNDS = pytest.mark.parametrize("convert", [float, torch.tensor], ids=["float", "tensor"])


@BOUNDS
def test_a_loss_is_clipped_to_zero_and_the_bound_and_centred(convert):
    """A loss may be negative, as a log-likelihood of densities is."""
    losses = torch.tensor([-3.0, 0.0, 0.5, 2.0, 7.0, math.inf, -math.inf, math.nan], dtype=torch.float64)
    query = Losses([torch.zeros(3)] * len(losses), convert(2.0))
    found = query.contribution(Record(losses, torch.tensor(1.0)))
    assert found[5:].isnan().all()
    found = found[:5]
    assert found.tolist() == [-1.0, -1.0, -0.5, 1.0, 1.0]
    assert float(found.abs().max()) == query.sensitivity == query.centre


@BOUNDS
@pytest.mark.parametrize(
    ("norm", "expected"), [(0.0, 0.5), (0.999, 0.5), (1.0, 0.5), (1.001, -0.5), (math.inf, -0.5), (math.nan, -0.5)]
)
def test_a_norm_that_is_not_longer_than_the_bound_counts(convert, norm, expected):
    query = Below(convert(1.0))
    assert query.contribution(Record(torch.zeros(0), torch.tensor(norm))).tolist() == [expected]
    assert query.sensitivity == abs(expected)


def bound_of(rule):
    """The bound of a rule as the kernel reads it."""
    return float(read(Gradient(THETA, rule), Space(D, torch.float32, torch.device("cpu"))).query.clip.rule.bound)


def test_a_rule_that_has_changed_is_read_and_checked_again():
    rule, bound = Abadi(2.0), torch.tensor(2.0)
    assert bound_of(rule) == bound_of(AtBound(bound)) == 2.0
    object.__setattr__(rule, "bound", 3.0)
    assert bound_of(rule) == bound_of(AtBound(bound.add_(1))) == 3.0
    for _ in range(2):
        object.__setattr__(rule, "bound", -3.0)
        with pytest.raises(ConfigError, match="bound"):
            bound_of(rule)


def own(said, made=1):
    """A kind of one's own, as the kernel reads it, that says it makes `said` releases, and makes `made`."""

    @dataclass(frozen=True)
    class Own(Query):
        kind = "own"
        sensitivity = 1.0
        releases = said

        def contribution(self, record):
            return record.norm.expand(made)

    return read(Own(), Space(3, torch.float32, torch.device("cpu")))


def test_a_query_makes_as_many_releases_as_it_says_and_at_least_one():
    for said, made in ((1, 2), (2, 1), (1, 0)):
        with pytest.raises(ConfigError, match=f"one number for each of {said} releases"):
            own(said, made)
    for releases in (0, 1.0):
        with pytest.raises(ConfigError, match=r"own\.releases"):
            own(releases)
    with oracle().draw() as batch, pytest.raises(ConfigError, match="query"):
        batch.ask("gradient")


def test_contributions_are_a_row_for_each_release():
    norms = torch.tensor([0.5, 1.5, 2.5])
    found = contributions(own(2, 2), torch.zeros(0, 3), norms)
    torch.testing.assert_close(found, norms.expand(2, 3))
