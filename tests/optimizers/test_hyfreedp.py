import numpy as np
import pytest
import torch

import dpopt
from dpopt.errors import ConfigError
from dpopt.privacy import Release


def fit(losses, eta=0.1, r_l=10.0, **fields):
    """The next (eta, R_l) after a probe round that released `losses` at -m..m."""
    optimizer = dpopt.create("hyfreedp", **fields)
    released = Release(torch.tensor(losses, dtype=torch.float64), 0.1)
    now = {"eta": torch.tensor(eta, dtype=torch.float64), "bound": torch.tensor(r_l, dtype=torch.float64)}
    state = optimizer._adapted(optimizer.init(torch.zeros(1))._replace(**now), released)
    return float(state.eta), float(state.bound)


def parabola(at, slope, curvature, eta, m=1):
    """Losses of a parabola with its minimum at step size slope/curvature, at -m..m."""
    return [at + slope * j * eta + curvature / 2 * (j * eta) ** 2 for j in range(-m, m + 1)]


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("minimum", [0.06, 0.1, 0.18])
def test_a_parabola_gives_its_minimum_exactly(m, minimum):
    losses = parabola(2.0, 5 * minimum, 5.0, 0.1, m)
    assert fit(losses, probes=2 * m + 1)[0] == pytest.approx(minimum)


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param(parabola(2.0, 1.0, -5.0, 0.1), id="concave"),
        pytest.param(parabola(2.0, -1.0, 5.0, 0.1), id="uphill"),
        pytest.param([10.0, 10.0, 10.0], id="saturated"),
        pytest.param([2.0, 2.0, 2.0], id="flat"),
    ],
)
def test_guards_leave_eta_unchanged(losses):
    assert fit(losses)[0] == 0.1


def test_with_five_probes_the_intercept_is_free():
    """b/a of these losses is 0.266 with a free intercept, and 0.248 where it is held at L_0, as Eq. 6 of the paper."""
    losses, x = np.array([1.0, 1.3, 1.5, 1.9, 2.6]), 0.1 * np.arange(-2, 3)
    curvature, slope, _ = np.polyfit(x, losses, 2)
    held, _, _, _ = np.linalg.lstsq(np.stack([x, x**2], axis=1), losses - losses[2])
    assert fit(losses.tolist(), probes=5, guards="none")[0] == pytest.approx(slope / (2 * curvature))
    assert (slope / (2 * curvature), held[0] / (2 * held[1])) == pytest.approx((0.266, 0.248), abs=5e-4)


def test_an_eta_too_small_to_fit_stays_a_number():
    """Noise may shrink eta for thousands of draws; its square, and then the distance of the points, is 0 in float64."""
    for eta in (1e-160, 5e-324, 0.0):
        assert eta / 2 <= fit([1.0, 2.0, 4.0], eta=eta)[0] <= 2 * eta


def test_clamp_and_smoothing():
    far, near = parabola(2.0, 5.0, 5.0, 0.1), parabola(2.0, 0.05, 5.0, 0.1)
    assert fit(far)[0] == pytest.approx(0.2)
    assert fit(near)[0] == pytest.approx(0.05)
    assert fit(far, smoothing=0.9)[0] == pytest.approx(0.9 * 0.1 + 0.1 * 0.2)


@pytest.mark.parametrize(
    ("guards", "far", "uphill", "saturated"),
    [("signs", 1.0, 0.1, 0.1), ("clamp", 0.2, 0.05, 0.15), ("none", 1.0, -0.2, 0.15)],
)
def test_each_guard_alone(guards, far, uphill, saturated):
    """b/a is 1, -0.2 and 0.15, from 0.1."""
    assert fit(parabola(2.0, 5.0, 5.0, 0.1), guards=guards)[0] == pytest.approx(far)
    assert fit(parabola(2.0, -1.0, 5.0, 0.1), guards=guards)[0] == pytest.approx(uphill)
    assert fit(parabola(9.5, 0.75, 5.0, 0.1), guards=guards)[0] == pytest.approx(saturated)


def test_the_bound_has_a_floor():
    assert fit([-5.0, -5.0, -5.0])[1] == 1e-3


def test_conservative_bound_grows_from_one_to_three_losses():
    """Losses of 5 saturate R_l = 1: the bound goes 1 -> 3 -> 9 -> 15 and eta waits until it can see."""
    bound, seen = 1.0, []
    for _ in range(4):
        clipped = [min(loss, bound) for loss in (4.9, 5.0, 5.2)]
        eta, bound = fit(clipped, r_l=bound)
        seen.append((round(bound, 6), eta != 0.1))
    assert seen == [(3.0, False), (9.0, False), (15.1, True), (15.1, True)]


def test_probe_points_lie_along_the_step():
    optimizer = dpopt.create("hyfreedp", probes=5)
    theta, direction = torch.zeros(2), torch.tensor([1.0, -2.0])
    points = optimizer._probe_points(theta, torch.tensor(0.1).double(), direction)
    torch.testing.assert_close(torch.stack(points)[:, 0], torch.tensor([-0.2, -0.1, 0.0, 0.1, 0.2]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"probes": 4}, "odd"),
        ({"base": "hyfreedp"}, "direction"),
        ({"base": {"name": "dp_adam", "lr": 0.5}}, "set lr beside base"),
    ],
)
def test_bad_configuration(fields, message):
    with pytest.raises(ConfigError, match=message):
        dpopt.create("hyfreedp", **fields)
