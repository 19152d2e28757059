import json

import numpy as np
import pytest
import torch
from scipy import signal

import dpopt
from dpopt import registry
from dpopt.errors import ConfigError
from dpopt.optimizers.doppler import DOPPLER
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import Release

DEFAULT = {"a": (1.0, -1.98342955, 0.98549544), "b": (1.6332e-4, 3.2665e-4, 1.6332e-4)}
FILTERS = [
    DEFAULT,
    {"a": (1.0, -0.9), "b": (0.1,)},
    {"a": (1.0,), "b": (0.25, 0.25, 0.25, 0.25)},
    {"a": (1.0, -0.5, 0.3, 0.1), "b": (0.2, 0.1)},
]


def filtered(gradients, std=0.0, **fields):
    """What plain SGD is handed by the filter, and the noise it is told of, for gradients [steps, d]."""
    seen = []

    class Spy(DPSGD):
        def direction(self, state, gradient):
            seen.append(gradient)
            return super().direction(state, gradient)

    optimizer = DOPPLER(base=Spy(), **fields)
    state = optimizer.init(torch.zeros_like(gradients[0]))
    for gradient in gradients:
        _, state = optimizer.direction(state, Release(gradient, std))
    return torch.stack([release.value for release in seen]), [float(release.std) for release in seen]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_filter_is_scipys(fields):
    gradients = torch.randn(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = signal.lfilter(fields["b"], fields["a"], gradients.numpy(), axis=0)
    normalizer = signal.lfilter(fields["b"], fields["a"], np.ones(200))
    np.testing.assert_allclose(filtered(gradients, **fields)[0], expected / normalizer[:, None], rtol=1e-9)


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_noise_is_the_energy_of_the_impulse_response(fields):
    """Var(m_t / c_t) = sigma_w^2 sum_{s <= t} h_s^2 / c_t^2."""
    h = signal.lfilter(fields["b"], fields["a"], np.eye(1, 300)[0])
    expected = 0.3 * np.sqrt(np.cumsum(h**2)) / np.cumsum(h)
    np.testing.assert_allclose(filtered(torch.zeros(300, 1), std=0.3, **fields)[1], expected, rtol=1e-7)


@pytest.mark.parametrize(("lr", "converges"), [(0.0140, True), (0.0150, False)])
def test_default_filter_is_stable_for_small_steps_only(lr, converges):
    """Gradient descent on theta^2 / 2: the closed loop's largest root crosses the unit circle at lr = 0.0145."""
    optimizer = dpopt.create("doppler", base="dp_sgd")
    state, size = optimizer.init(torch.ones(1, dtype=torch.float64)), []
    for _ in range(2000):
        direction, state = optimizer.direction(state, Release(state.theta, 0.0))
        state = state._replace(theta=state.theta - lr * direction)
        size.append(float(state.theta.abs()))
    assert (max(size[-300:]) < max(size[1000:1300])) == converges


def test_a_base_of_a_base_survives_json():
    inner = {"name": "doppler", "a": [1, -0.9], "b": [0.1], "base": {"name": "dp_sgd", "momentum": 0.5}}
    made = dpopt.create("hyfreedp", base=inner)
    spec = json.loads(json.dumps(registry.spec("optimizer", "hyfreedp", made)))
    assert registry.from_spec("optimizer", spec) == made
    assert made.base.base == DPSGD(momentum=0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a": [2, 0.5]}, r"DOPPLER\.a: .* expected 1 first"),
        ({"a": [1, -1.0]}, r"DOPPLER\.a: .* unit circle"),
        ({"a": [1, float("nan")]}, r"doppler\.a\[1\]"),
        ({"b": [0, 1]}, r"DOPPLER\.b: .* c_t > 0 at every step, .* one is 0"),
        ({"a": [1.0], "b": [1.0, -1.0, 1.0]}, r"DOPPLER\.b: .* one is 0"),
        ({"a": [1.0, -0.9], "b": [0.1, -0.15, 0.0]}, r"DOPPLER\.b: .* one is -0\.5"),
        ({"base": "fiber"}, r"DOPPLER\.base: .* plain gradient at theta_t"),
    ],
)
def test_bad_configuration(fields, message):
    with pytest.raises(ConfigError, match=message):
        dpopt.create("doppler", **fields)


@pytest.mark.parametrize("fields", [{}, {"a": [1.0, -0.9], "b": [0.1, -0.15, 0.051]}, {"a": [1.0], "b": [0.5, 0.5]}])
def test_the_least_c_t_is_that_of_the_recursion(fields):
    made = dpopt.create("doppler", **fields)
    c = signal.lfilter(made.b, made.a, np.ones(20_000))
    assert made._least_unit() == pytest.approx(min(c), rel=1e-9)
