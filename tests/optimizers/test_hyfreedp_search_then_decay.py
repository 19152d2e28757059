"""HyFreeDP's losses in a trial run: what is derived in the docstring holds."""

import math
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch

import dpopt
from dpopt.errors import ConfigError
from dpopt.optimizers.hyfreedp_search_then_decay import FAR, LARGEST, NEAR
from dpopt.privacy import Release
from dpopt.privacy.calibration import trace

S = 0.01


def rule(base="dp_sgd", **fields):
    return dpopt.create("hyfreedp_search_then_decay", base=base, **fields)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def state_of(optimizer, eta=0.1, bound=1e9, rounds=0.0, is_usable=1.0):
    state = optimizer.init(torch.zeros(1, dtype=torch.float64))
    return state._replace(eta=number(eta), bound=number(bound), rounds=number(rounds), is_usable=number(is_usable))


def read(losses, s=S, **state):
    """The factor x and the next state after a round that released `losses`."""
    optimizer = rule()
    x, following = optimizer._read(state_of(optimizer, **state), Release(torch.tensor(losses, dtype=torch.float64), s))
    return float(x), following


class Parabola:
    """Loss 5 + curvature |theta|^2 / 2 with a clipped gradient and noise: `noise` in it, S in each loss."""

    def __init__(self, draws, curvature=1.0, noise=0.0, seed=0):
        self.rate, self.expected_batch, self.draws_total, self.draws_left = 0.1, 10.0, draws, draws
        self.curvature, self.noise, self.random = curvature, noise, np.random.default_rng(seed)
        self.released = []

    @property
    def asked(self):
        return sum(len(release.value) for release in self.released)

    @contextmanager
    def draw(self):
        self.draws_left -= 1
        yield self

    def gradient(self, at, clip):
        (_, theta), *_ = at
        drawn = torch.from_numpy(self.random.standard_normal(len(theta)))
        return Release((self.curvature > 0) * theta / (theta.norm() + 0.01) + self.noise * drawn, self.noise)

    def losses(self, at, bound):
        exact = np.array([5 + self.curvature * float(theta.square().sum()) / 2 for theta in at])
        noised = exact.clip(0, float(bound)) + S * self.random.standard_normal(len(at))
        self.released.append(Release(torch.from_numpy(noised), S))
        return self.released[-1]


def searched(oracle, start, base="dp_sgd", theta=None, **fields):
    """The state after the trial."""
    optimizer = rule(base, lr=start, **fields)
    state = optimizer.init(torch.full((4,), 0.5, dtype=torch.float64) if theta is None else theta)
    while oracle.asked < 3 * optimizer.rounds:
        state = optimizer.step(state, oracle)
    return state


@pytest.mark.parametrize("curvature", [0.3, 10.0])
@pytest.mark.parametrize("start", [1e-8, 1e-4, 1.0])
def test_the_minimums_scale_is_found_in_ten_rounds(start, curvature):
    """The minimum is at a distance of 1, clipped gradients have a length of 1: a trial of 1 to 10 steps gets there."""
    noise = {"noise": 0.3}  # 0.6 in all, against a gradient of 1
    found = [float(searched(Parabola(50, curvature, seed=seed, **noise), start).eta) for seed in range(20)]
    assert all(0.05 < eta < 3 for eta in found), found


@pytest.mark.parametrize("start", [1e-8, 1.0])
def test_on_noise_alone_the_start_stands(start):
    """No loss depends on theta: eta ends where it began, but for the false discoveries, one in 31,600 rounds."""
    ends = [float(searched(Parabola(50, curvature=0.0, noise=1.0, seed=seed), start).eta) for seed in range(50)]
    assert sum(eta == start for eta in ends) == 50


@pytest.mark.parametrize(
    ("rounds", "losses", "x"),
    [  # 0: before curvature is seen, 1: in the first round after that
        pytest.param(0, [5.0, 5.0, 5.0], FAR, id="nothing to be seen"),
        pytest.param(0, [4.9, 5.0, 5.1], 1 / FAR, id="uphill"),
        pytest.param(0, [5.03, 5.0, 5.03], FAR, id="curved, within its noise"),
        pytest.param(0, [6.0, 5.0, 6.0], 1, id="at the bottom"),
        pytest.param(0, [6.05, 5.0, 6.0], 1 + FAR * 0.05 / 4.1, id="curved, downhill"),
        pytest.param(1, [5.0, 5.0, 5.0], LARGEST, id="nothing more to be seen"),
        pytest.param(1, [4.9, 4.95, 5.0], 1 / LARGEST, id="uphill now"),
        pytest.param(1, [5.02, 5.0, 5.025], LARGEST, id="curved, within twice its noise"),
        pytest.param(1, [5.2, 5.0, 7.0], 1 - NEAR * 1.8 / 4.4, id="too far"),
    ],
)
def test_what_a_round_says(rounds, losses, x):
    assert read(losses, rounds=float(rounds))[0] == pytest.approx(x)


def test_the_bound_of_losses_at_most_halves():
    assert float(read([-1.0, -1.0, -1.0], bound=1.0)[1].bound) == 0.5
    assert float(read([0.1, 0.1, 0.1], bound=0.4)[1].bound) == pytest.approx(0.3)


def test_saturated_losses_bring_eta_down_once_there_were_others():
    x, before = read([1.0, 0.95, 1.0], bound=1.0, is_usable=0.0)
    assert (x, float(before.eta), float(before.is_usable), float(before.rounds)) == (1, 0.1, 0, 0)
    assert float(before.bound) == pytest.approx(2.95)
    assert read([1.0, 0.95, 1.0], bound=1.0)[0] == 1 / FAR
    x, later = read([1.0, 0.95, 1.0], bound=1.0, rounds=3.0)
    assert (x, float(later.rounds)) == (pytest.approx(LARGEST ** (-1 / 3)), 3)  # it counts for no mean
    _, usable = read([0.5, 0.5, 0.5], bound=1.0, is_usable=0.0)
    assert float(usable.is_usable) == 1


def test_eta_stays_a_positive_number():
    shapes = [1.0, 2.0, 4.0], [4.0, 2.0, 1.0], [1.0, 1.0, 1.0]
    for eta, losses, rounds in product((5e-324, 1e308), shapes, (0.0, 3.0)):
        assert 0 < float(read(losses, 1e-9, eta=eta, rounds=rounds)[1].eta) < math.inf


@pytest.mark.parametrize("draws", [1, 4, 37, 300])
def test_it_releases_no_more_than_hyfreedp(draws):
    def count(name):
        return sum(kinds.count("losses") * times for kinds, times in trace(dpopt.create(name), rate=0.1, draws=draws))

    own = count("hyfreedp_search_then_decay")
    assert own == 3 * min(10, math.ceil(draws / 5))
    assert own <= count("hyfreedp")


@pytest.mark.parametrize("fields", [{"noise_inflation": 1.0}, {"rounds": 0}, {"base": {"name": "dp_sgd", "lr": 0.7}}])
def test_bad_fields(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        dpopt.create("hyfreedp_search_then_decay", **fields)


def test_a_base_that_looks_along_its_last_step_is_refused():
    """The trial moves theta by other steps, and back to the start: the base would look where nobody went."""
    with pytest.raises(ConfigError, match=r"SearchThenDecay\.base: .* at theta_t alone"):
        rule(base="fiber")
