import math
from itertools import pairwise

import pytest
import torch

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


def test_interval_search_is_brute_force():
    compared = 0
    for seed in range(60):
        gradients, noise = random_set(seed)
        clip, error = optimal_clip(gradients, noise)
        (least, at), *others = brute_force(gradients, noise)
        assert error.total == pytest.approx(least, rel=1e-9, abs=1e-300)
        assert error == mse(gradients, clip, noise)
        for other in torch.linspace(0, 1.1 * float(gradients.norm(dim=1).max()), 9).tolist():  # no bound is better
            assert error.total <= direct(gradients, other, noise) * (1 + 1e-9) + 1e-20
        if all(other > least * (1 + 1e-6) for other, there in others if abs(there - at) > 1e-9 * at):
            assert clip == pytest.approx(at, rel=1e-9, abs=1e-300)
            compared += 1
    assert compared > 40, "most sets have one minimum, so that bounds are compared"


def test_mse_is_what_the_clip_rule_loses_and_the_noise_adds():
    gradients, _ = random_set(8)
    for clip in (0.3, 2.5, 100.0):
        found = mse(gradients, clip, 0.7)
        factors = Abadi(clip).factor(gradients.norm(dim=1))
        assert found.bias == pytest.approx(float(((1 - factors) @ gradients).square().sum()), abs=1e-12)
        noise = 0.7 * clip * torch.randn(20_000, gradients.shape[1], generator=torch.Generator().manual_seed(0))
        assert found.noise == pytest.approx(float(noise.square().sum(1).mean()), rel=0.02)
        assert found.total == found.bias + found.noise
    assert mse(gradients, 0.0, 3.0) == pytest.approx(MSE(float(gradients.sum(0).square().sum()), 0.0))
    assert mse(gradients, math.inf, 0.0) == MSE(0.0, 0.0)
    assert optimal_clip(gradients, 0.0) == (float(gradients.norm(dim=1).max()), MSE(0.0, 0.0))
    assert mse(gradients, math.inf, 1.0) == MSE(0.0, math.inf)


def test_by_hand():
    """Of one gradient g, G.N = ||g|| and N.N = 1; of four equal ones, G.N = 16 ||g|| and N.N = 16."""
    one = torch.tensor([[3.0, 4.0]])
    clip, error = optimal_clip(one, 0.5)
    assert (clip, error.total) == pytest.approx((5 / (1 + 0.25 * 2), 25 * 0.5 / 1.5))
    assert optimal_clip(one.repeat(4, 1), 2.0)[0] == pytest.approx(16 * 5 / (16 + 4 * 2))
    assert optimal_clip(torch.zeros(4, 3), 1.0) == (0.0, MSE(0.0, 0.0))
    assert optimal_clip(torch.cat([torch.zeros(4, 2), one]), 0.5) == (clip, error)


def test_gradients_that_cancel_are_clipped_to_nothing():
    assert optimal_clip(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 1.0) == (0.0, MSE(0.0, 0.0))
    against = torch.tensor([[6.0, 0.0], *[[-1.0, 0.0]] * 5])  # clipping all to one length would turn the sum round
    clip, error = optimal_clip(against, 100.0)
    assert clip == 0.0
    assert error.total == pytest.approx(1.0)


def test_chunks_change_nothing(monkeypatch):
    gradients, noise = random_set(11)
    clip, error = optimal_clip(gradients, noise)
    for chunk in (1, 2 * gradients.shape[1], 5 * gradients.shape[1]):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        by_parts, of_parts = optimal_clip(gradients, noise)
        assert by_parts == pytest.approx(clip, rel=1e-13)
        assert of_parts == pytest.approx(error, rel=1e-12)


def test_single_precision_is_worked_on_in_double():
    gradients = random_set(11)[0].float()
    assert optimal_clip(gradients, 0.1) == optimal_clip(gradients.double(), 0.1)


@pytest.mark.parametrize(
    ("gradients", "clip", "noise", "name"),
    [
        (torch.ones(0, 3), 1.0, 1.0, "gradients"),
        (torch.tensor([[1.0, 1.0], [1.0, math.nan]]), 1.0, 1.0, "row 1"),
        (torch.tensor([[math.inf, 1.0]]), 1.0, 1.0, "row 0"),
        (torch.ones(2, 3), -1.0, 1.0, "clip"),
        (torch.ones(2, 3), 1.0, -1.0, "noise_multiplier"),
    ],
)
def test_bad_input(gradients, clip, noise, name):
    with pytest.raises(ConfigError, match=name):
        mse(gradients, clip, noise)
    if name != "clip":
        with pytest.raises(ConfigError, match=name):
            optimal_clip(gradients, noise)
