import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

import dpopt
from dpopt.clipping import Abadi
from dpopt.errors import ConfigError
from dpopt.optimizers.base import Configured
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import Draw, Ledger, NonPrivate, caching, calibrate, calibration, epsilon
from dpopt.privacy.calibration import cost

DELTA = 50_000**-1.1
HYFREEDP = {"rate": 0.02, "draws": 250, "dimension": 10, "delta": DELTA, "accountant": "rdp"}
TABLE = {1: (1.6177, 9.266, 5.997), 3: (0.9321, 5.717, 1.994)}
"""target -> (sigma_g, sigma_l of probes in the gradient's draw, in a fresh one)"""


SECOND = [pytest.param("prv", 0.5, marks=pytest.mark.slow), pytest.param("autodp", 4.0, marks=pytest.mark.slow)]


@pytest.mark.parametrize("target", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_hyfreedp_noise(target):
    gradient, joint, fresh = TABLE[target]
    plan = calibrate(dpopt.create("hyfreedp"), epsilon=target, **HYFREEDP)
    assert plan.noise["gradient"] == pytest.approx(gradient, rel=2e-3)
    assert plan.noise["losses"] == pytest.approx(joint, rel=1e-2)
    assert target * (1 - 3e-5) <= epsilon(plan.ledger, DELTA, "rdp") <= target
    more = {**HYFREEDP, "draws": 300}
    assert calibrate(dpopt.create("hyfreedp", probe_batch="fresh"), epsilon=target, **more).noise[
        "losses"
    ] == pytest.approx(fresh, rel=1e-2)


@pytest.mark.parametrize(("accountant", "target"), [("pld", 0.5), *SECOND])
def test_every_accountant_calibrates_from_the_safe_side(accountant, target):
    plan = calibrate(DPSGD(), rate=0.05, draws=60, dimension=5, epsilon=target, delta=1e-5, accountant=accountant)
    assert 0.999 * target <= epsilon(plan.ledger, 1e-5, accountant) == plan.epsilon <= target


def test_infinite_epsilon_is_not_private():
    plan = calibrate(dpopt.create("hyfreedp"), epsilon=math.inf, **HYFREEDP)
    assert isinstance(plan, NonPrivate)
    assert plan.noise == {"gradient": 0.0, "losses": 0.0}
    assert epsilon(plan.ledger, DELTA) == math.inf


BAD = {"epsilon": [0.0, math.nan], "delta": [0.0], "rate": [0.0, 1.5], "draws": [0, 2.5, 10**12], "dimension": [0]}


@pytest.mark.parametrize("field", BAD)
def test_bad_input(field):
    for value in BAD[field]:
        with pytest.raises(ConfigError, match=f"^{field}: "):
            calibrate(DPSGD(), **{**HYFREEDP, "epsilon": 1.0, field: value})


def test_unreachable_target(monkeypatch):
    monkeypatch.setattr(calibration, "_NOISE_RANGE", (0.05, 2.0))
    with pytest.raises(ConfigError, match="not reached"):
        calibrate(DPSGD(), rate=1.0, draws=10, dimension=1, epsilon=0.1, delta=1e-5, accountant="rdp")


@dataclass(frozen=True)
class Peeking(Configured):
    """Takes a second draw only if the first one's gradient is large: what it spends depends on what it sees."""

    def init(self, theta) -> Any:
        return DPSGD().init(theta)

    def step(self, state, oracle):
        state = DPSGD().step(state, oracle)
        return DPSGD().step(state, oracle) if state.theta.norm() > 1 else state


@dataclass(frozen=True)
class Greedy(Peeking):
    def step(self, state, oracle):
        return DPSGD().step(DPSGD().step(state, oracle), oracle)


def raising(error):
    def step(self, state, oracle):
        raise error

    return step


def test_steps_that_cannot_be_planned():
    """The errors of an optimizer are its own, but for those of tensors without values."""
    assert calibrate(Greedy(), epsilon=1.0, **HYFREEDP).draws == 250
    for step, error, reason in (
        (Greedy.step, ConfigError, "draws_left"),
        (Peeking.step, ConfigError, "reads the value of a tensor"),
        (lambda self, state, oracle: state, ConfigError, "asked for nothing"),
        (raising(RuntimeError("Tensor.item() cannot be called on meta tensors")), ConfigError, "reads the value"),
        (raising(NotImplementedError("Cannot copy out of meta tensor; no data!")), ConfigError, "reads the value"),
        (raising(RuntimeError("no luck")), RuntimeError, "no luck"),
        (raising(NotImplementedError("not yet")), NotImplementedError, "not yet"),
    ):
        optimizer = dataclass(frozen=True)(type("Changed", (Peeking,), {"step": step, "__module__": __name__}))()
        with pytest.raises(error, match=reason):
            calibrate(optimizer, epsilon=1.0, **{**HYFREEDP, "draws": 251})


@dataclass(frozen=True)
class Dividing(Peeking):
    """Asks for some kinds of release in each draw."""

    kinds: tuple = ("gradient", "losses")
    noise_inflation: float | None = 1.1
    shares: tuple = ()

    def step(self, state, oracle):
        with oracle.draw() as batch:
            for kind in self.kinds:
                if kind == "gradient":
                    batch.gradient(state.theta, Abadi(1.0))
                elif kind == "losses":
                    batch.losses([state.theta], 1.0)
                else:
                    batch.below(1.0)
        return state


def noise(shares=(), **fields):
    return calibrate(Dividing(shares=tuple(dict(shares).items()), **fields), epsilon=1.0, **HYFREEDP).noise


def test_losses_alone_take_the_whole_budget():
    alone = calibrate(DPSGD(), epsilon=1.0, **HYFREEDP).noise["gradient"]
    assert noise(kinds=("losses",), noise_inflation=None) == {"losses": pytest.approx(alone, rel=1e-9)}


@pytest.mark.parametrize(("shares", "ratio"), [({}, 1.0), ({"losses": 0.25}, 2.0), ({"counts": 4}, 2.0)])
def test_a_share_divides_the_variance_and_is_one_by_default(shares, ratio):
    found = noise(kinds=("gradient", "losses", "counts"), shares=shares)
    assert found["counts"] * ratio == pytest.approx(found["losses"])


def test_shares_and_inflations_that_cannot_be_used_are_refused():
    for shares in ({"losses": 0.0}, {"losses": math.inf}, {"losses": math.nan}, {"counts": 1.0}):
        with pytest.raises(ConfigError, match=r"optimizer\.shares"):
            noise(shares=shares)
    for inflation in (None, 1.0):
        with pytest.raises(ConfigError, match="noise_inflation"):
            noise(noise_inflation=inflation)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPOPT_CACHE", str(tmp_path))
    return tmp_path / "calibration"


def test_cache_saves_the_search(own_cache, monkeypatch):
    first = calibrate(DPSGD(), epsilon=1.0, **HYFREEDP)
    monkeypatch.setattr(calibration, "solve_noise", lambda *_: pytest.fail("solved again"))
    assert calibrate(DPSGD(lr=3.0), epsilon=1.0, **HYFREEDP).noise == first.noise


def test_of_workers_that_need_the_same_noise_one_solves_it(own_cache, monkeypatch):
    solved, both = [], threading.Barrier(2)
    read, solve = caching.read, calibration.solve_noise

    def missed(path):
        if (numbers := read(path)) is None and not solved:
            with suppress(threading.BrokenBarrierError):  # the second look of the one that solves
                both.wait(timeout=1)
        return numbers

    monkeypatch.setattr(caching, "read", missed)
    monkeypatch.setattr(calibration, "solve_noise", lambda *args, **keys: solved.append(1) or solve(*args, **keys))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: calibrate(DPSGD(), epsilon=1.0, **HYFREEDP), range(2))
    assert first == second
    assert len(solved) == 1


NO_CACHE = ["", "{", '{"numbers": 1, "sha256": 2}']
CHANGED = [{"gradient": 0.0}, {"gradient": 0.5}, {"gradient": 1000.0}, {"gradient": math.nan}, {"losses": 3.0}]


def test_a_cache_that_is_damaged_or_changed_changes_nothing(own_cache):
    """Epsilon is computed again where the checksum is right; where it is not, not even the last places count."""
    first = calibrate(DPSGD(), epsilon=1.0, **HYFREEDP)
    (file,) = own_cache.glob("*.json")
    whole, noise = file.read_bytes(), caching.read(file)
    for bit in range(0, 8 * len(whole), 7):  # each place of a byte comes
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        assert caching.read(file) in (None, noise)
    for content in NO_CACHE + CHANGED:
        if isinstance(content, str):
            file.write_text(content)
        else:
            caching.write(file, content)
        assert calibrate(DPSGD(), epsilon=1.0, **HYFREEDP) == first


def test_an_infinite_bound_needs_infinite_epsilon():
    unclipped = dpopt.create("dp_sgd", clip="inf")
    with pytest.raises(ConfigError, match="a finite bound is needed"):
        calibrate(unclipped, epsilon=1.0, **HYFREEDP)
    assert calibrate(unclipped, epsilon=math.inf, **HYFREEDP).epsilon == math.inf


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("fiber", {}, (1, 2, 1)),
        ("adadp", {}, (2, 1, 1)),
        ("adadp_hybrid", {}, (60 / 45, 1, 1)),
        ("hyfreedp", {"probe_batch": "fresh"}, (60 / 50, 5 / 6, 5 / 6 + 3 / 6)),
    ],
)
def test_cost_is_counted(name, fields, expected):
    assert cost(dpopt.create(name, **fields)) == pytest.approx(expected)


@pytest.mark.slow
def test_the_budget_is_used_where_renyi_is_loose():
    plan = calibrate(DPSGD(), rate=1e-4, draws=700, dimension=4, epsilon=1.0, delta=1e-4)
    assert 0.999 <= plan.epsilon <= 1
    assert epsilon(plan.ledger, 1e-4, "rdp") > 2.5


# The search for the noise, on costs that are formulas.


ASKED = []
"""Accountant and noise of what was charged for."""


def solve(truth, quick, epsilon):
    """The noise that costs `epsilon` where noise costs `truth(noise)`, or `quick(noise)` by RDP."""
    ASKED.clear()

    def charge(ledger, delta, by):
        (noise,) = next(iter(ledger)).noises
        ASKED.append((by, noise))
        return quick(noise) if by == "rdp" else truth(noise)

    return calibration.solve_noise(lambda noise: Ledger([Draw(1.0, (noise,))]), epsilon, 1e-5, "pld", charge)


def test_dear_evaluations_are_few_and_none_far_above_the_target():
    """A privacy loss distribution grows with epsilon."""
    solve(lambda noise: 2 / noise, lambda noise: 2.2 / noise, 1.0)
    dear = [noise for by, noise in ASKED if by == "pld"]
    assert len(dear) < 15
    assert max(2.2 / noise for noise in dear) <= 2.5


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("loose", [1.0, 1.1, 5.0, 1000.0])
def test_the_cost_is_just_below_the_target_however_loose_the_guess(epsilon, loose):
    noise = solve(lambda noise: 20 / noise, lambda noise: loose * 20 / noise, epsilon)
    assert 20 / noise <= epsilon
    if loose * epsilon < max(calibration._FAR, 2 * epsilon):  # where RDP says more, its own noise is near enough
        assert 20 / noise >= (1 - 2 * calibration._TOLERANCE) * epsilon


@pytest.mark.parametrize("quick", [lambda noise: 4 + 2 / noise, lambda noise: max(2 / noise - 0.1, 0)], ids=range(2))
def test_a_guess_that_cannot_reach_the_target_is_a_guess(quick):
    """RDP's cost may have a floor, which no noise gets below, or be nothing where the truth is little."""
    noise = solve(lambda noise: 2 / noise, quick, 3.0)
    assert (1 - 2 * calibration._TOLERANCE) * 3 <= 2 / noise <= 3


def test_a_cost_that_jumps_ends_on_its_safe_side():
    noise = solve(lambda noise: 2.0 if noise < 3 else 0.5, lambda noise: 2 / noise, 1.0)
    assert noise == pytest.approx(3, rel=1e-4)
    assert noise >= 3


def test_a_target_that_the_least_noise_meets():
    noise = solve(lambda noise: 1 / noise, lambda noise: 1 / noise, 100.0)
    assert noise == pytest.approx(calibration._NOISE_RANGE[0])
