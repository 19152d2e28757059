import math
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpopt.clipping import Abadi
from dpopt.errors import ConfigError
from dpopt.study import optimal_clip as module
from dpopt.study.optimal_clip import MSE, mse, optimal_clip


def direct(gradients, clip, noise):
    """MSE(C) by its definition: what clipping takes from the sum, squared, and the noise."""
    clipped = [g * min(1.0, clip / max(float(g.norm()), 1e-300)) for g in gradients]
    lost = torch.stack([g - c for g, c in zip(gradients, clipped, strict=True)]).sum(0)
    return float(lost.square().sum()) + (clip * noise) ** 2 * gradients.shape[1]


def brute_force(gradients, noise):
    """All candidates of Theorem 5.2 with their errors: every norm, zero, and the minimum inside every interval."""
    norms = gradients.norm(dim=1)
    ends = sorted({0.0, *norms.tolist()})
    candidates = set(ends)
    for low, high in pairwise(ends):
        longer = gradients[norms > low]
        G, N = longer.sum(0), (longer / longer.norm(dim=1, keepdim=True)).sum(0)
        inside = float(G @ N) / max(float(N @ N) + noise**2 * gradients.shape[1], 1e-300)
        if low < inside < high:
            candidates.add(inside)
    return sorted((direct(gradients, clip, noise), clip) for clip in candidates)


def random_set(seed):
    """Heavy tails, a common direction or none, ties, zeros; sometimes one example or one dimension."""
    generator = torch.Generator().manual_seed(seed)
    n, d = (int(torch.randint(1, high, (), generator=generator)) for high in (40, 15))
    g = torch.randn(n, d, generator=generator, dtype=torch.float64)
    g += (seed % 3) * torch.randn(d, generator=generator, dtype=torch.float64)
    g *= torch.randn(n, 1, generator=generator, dtype=torch.float64).mul(seed % 4).exp()
    if seed % 5 == 0:
        g[: n // 2] = g[0].clone()
    if seed % 7 == 0:
        g[n // 2 :] = 0
    return g, float(torch.rand((), generator=generator)) * 10 ** (seed % 4 - 2)


@pytest.mark.parametrize("seed", range(100))
def test_interval_search_is_brute_force(seed):
    gradients, noise = random_set(seed)
    found = optimal_clip(gradients, noise)
    (least, clip), *others = brute_force(gradients, noise)
    assert found.mse.total == pytest.approx(least, rel=1e-9, abs=1e-300)
    if all(error > least * (1 + 1e-6) for error, other in others if abs(other - clip) > 1e-9 * clip):
        assert found.clip == pytest.approx(clip, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("seed", range(10))
def test_most_random_sets_have_one_minimum(seed):
    """Otherwise the comparison of bounds would hold by saying nothing."""
    (least, clip), *others = brute_force(*random_set(seed + 1))
    assert all(error > least * (1 + 1e-6) for error, other in others if abs(other - clip) > 1e-9 * clip)


finite = st.floats(-50, 50).map(lambda value: round(value, 2))
SETS = st.integers(1, 4).flatmap(lambda d: st.lists(st.lists(finite, min_size=d, max_size=d), min_size=1, max_size=9))


@settings(deadline=None, max_examples=150)
@given(SETS, st.floats(0, 5), st.floats(0, 100))
def test_no_bound_is_better(rows, noise, clip):
    gradients = torch.tensor(rows, dtype=torch.float64)
    best = optimal_clip(gradients, noise)
    assert best.mse.total <= direct(gradients, clip, noise) * (1 + 1e-9) + 1e-20
    assert 0 <= best.clip <= float(gradients.norm(dim=1).max()) * (1 + 1e-12)
    assert best.mse == mse(gradients, best.clip, noise)


@pytest.mark.parametrize("clip", [0.3, 1.0, 2.5, 100.0])
def test_mse_is_what_the_clip_rule_loses_and_the_noise_adds(clip):
    gradients, _ = random_set(8)
    found = mse(gradients, clip, 0.7)
    factors = Abadi(clip).factor(gradients.norm(dim=1))
    assert found.bias == pytest.approx(float(((1 - factors) @ gradients).square().sum()), abs=1e-12)
    noise = 0.7 * clip * torch.randn(20_000, gradients.shape[1], generator=torch.Generator().manual_seed(0))
    assert found.noise == pytest.approx(float(noise.square().sum(1).mean()), rel=0.02)
    assert found.total == found.bias + found.noise


def test_limits_of_the_bound():
    gradients, _ = random_set(8)
    assert mse(gradients, 0.0, 3.0) == pytest.approx(MSE(float(gradients.sum(0).square().sum()), 0.0))
    assert mse(gradients, math.inf, 0.0) == MSE(0.0, 0.0)
    assert mse(gradients, math.inf, 1.0) == MSE(0.0, math.inf)


def test_without_noise_nothing_is_clipped():
    gradients, _ = random_set(8)
    assert optimal_clip(gradients, 0.0) == (float(gradients.norm(dim=1).max()), MSE(0.0, 0.0))


def test_one_example():
    """A single gradient g: G.N = ||g||, N.N = 1."""
    found = optimal_clip(torch.tensor([[3.0, 4.0]]), 0.5)
    assert found.clip == pytest.approx(5 / (1 + 0.25 * 2))
    assert found.mse.total == pytest.approx(25 * 0.5 / 1.5)


def test_gradients_of_zero():
    assert optimal_clip(torch.zeros(4, 3), 1.0) == (0.0, MSE(0.0, 0.0))
    with_zeros = torch.cat([torch.zeros(4, 2), torch.tensor([[3.0, 4.0]])])
    assert optimal_clip(with_zeros, 0.5) == optimal_clip(torch.tensor([[3.0, 4.0]]), 0.5)


def test_equal_norms():
    """Four equal gradients: G.N = 16 ||g||, N.N = 16."""
    assert optimal_clip(torch.tensor([[3.0, 4.0]] * 4), 2.0).clip == pytest.approx(16 * 5 / (16 + 4 * 2))


def test_gradients_that_cancel_are_clipped_to_nothing():
    assert optimal_clip(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 1.0) == (0.0, MSE(0.0, 0.0))
    against = torch.tensor([[6.0, 0.0], *[[-1.0, 0.0]] * 5])  # clipping all to one length would turn the sum round
    found = optimal_clip(against, 100.0)
    assert found.clip == 0.0
    assert found.mse.total == pytest.approx(1.0)


def test_chunks_change_nothing(monkeypatch):
    gradients, noise = random_set(11)
    whole = optimal_clip(gradients, noise)
    for chunk in (1, 2 * gradients.shape[1], 5 * gradients.shape[1]):
        monkeypatch.setattr(module, "CHUNK", chunk)
        parts = optimal_clip(gradients, noise)
        assert parts.clip == pytest.approx(whole.clip, rel=1e-13)
        assert parts.mse == pytest.approx(whole.mse, rel=1e-12)


def test_single_precision_is_worked_on_in_double():
    gradients = random_set(11)[0].float()
    assert optimal_clip(gradients, 0.1) == optimal_clip(gradients.double(), 0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(value):
    gradients = torch.ones(5, 3)
    gradients[3, 1] = value
    for function in (lambda: optimal_clip(gradients, 1.0), lambda: mse(gradients, 1.0, 1.0)):
        with pytest.raises(ConfigError, match="row 3"):
            function()


@pytest.mark.parametrize(
    ("gradients", "clip", "noise", "name"),
    [
        (torch.ones(0, 3), 1.0, 1.0, "gradients"),
        (torch.ones(3), 1.0, 1.0, "gradients"),
        (torch.ones(2, 3), -1.0, 1.0, "clip"),
        (torch.ones(2, 3), math.nan, 1.0, "clip"),
        (torch.ones(2, 3), 1.0, -1.0, "noise_multiplier"),
        (torch.ones(2, 3), 1.0, math.inf, "noise_multiplier"),
    ],
)
def test_bad_input(gradients, clip, noise, name):
    with pytest.raises(ConfigError, match=name):
        mse(gradients, clip, noise)


@pytest.mark.slow
def test_fifty_thousand_gradients():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(50_000, 1_000, generator=generator) + 0.3
    gradients *= torch.randn(50_000, 1, generator=generator).exp()
    started = time.perf_counter()
    found = optimal_clip(gradients, 50.0)
    print(f"{time.perf_counter() - started:.2f} s")
    norms = gradients.double().norm(dim=1)
    longer = gradients[norms > found.clip].double()
    G, N = longer.sum(0), (longer / longer.norm(dim=1, keepdim=True)).sum(0)
    assert found.clip == pytest.approx(float(G @ N) / (float(N @ N) + 50.0**2 * 1000), rel=1e-9)  # a fixed point
    for level in torch.linspace(0, 1, 30).tolist():
        assert mse(gradients, float(norms.quantile(level)), 50.0).total >= found.mse.total * (1 - 1e-12)
