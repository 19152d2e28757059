"""Releases on a public grid: one rounding to a power of two near std 2^-12, whatever is released and by whom."""

import math
import shutil
from pathlib import Path

import pytest
import short
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dpopt
from dpopt.clipping import ByGroup
from dpopt.privacy import DataOracle
from dpopt.privacy.sampling import grid_step, round_to_grid

pytestmark = pytest.mark.filterwarnings("ignore:seed", "ignore:unit", "ignore:model. its run began")
STORED = Path(__file__).parents[1] / "golden" / "without_grid.pt"
STDS = st.floats(2.0**-113, 1e33) | st.integers(-113, 100).map(lambda k: math.nextafter(2.0**k, 0))


@given(STDS, st.integers(0, 99), st.sampled_from((torch.float32, torch.float64)), st.floats(1e-3, 1e4))
def test_values_are_rounded_once_to_the_nearest_multiple(std, seed, dtype, size):
    step = grid_step(std)
    assert std * 2.0**-13 < step <= std * 2.0**-12
    assert math.frexp(step)[0] == 0.5  # a power of two
    noise = torch.randn(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = (noise * std * size).to(dtype)
    for form in (std, torch.full((50,), std, dtype=torch.float64)):
        rounded = values.clone()
        round_to_grid(rounded, form)
        assert bool((rounded.double() / step % 1 == 0).all())
        assert float((rounded.double() - values.double()).abs().max()) <= step / 2


@pytest.mark.parametrize(("std", "value"), [(0.0, 9.0), (math.inf, 9.0), (math.nan, 9.0), (1e-40, 1e-35)])
def test_without_noise_there_is_no_grid_and_below_float32_values_stay_finite(std, value):
    values = torch.tensor([value])
    round_to_grid(values, std)
    assert abs(values - torch.tensor([value])) <= 2.0**-127


CASES = {
    "two draws": {"optimizer": "adadp"},
    "losses": {"optimizer": "hyfreedp"},
    "counts, adaptive bound": {"optimizer": "adaptive_clip"},
    "groups": {"optimizer": dpopt.create("dp_sgd", clip=ByGroup())},
    "persons": {"unit": [row // 2 for row in range(60)], "batch_size": 10},
    "isolated": {"isolate": True},
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_fit_releases_is_on_the_grid(case, monkeypatch):
    steps, answer = [], DataOracle.answer

    def watched(self, charged):
        release = answer(self, charged)
        steps.extend((release.value.double() - (charged.asked.centre or 0.0)) / grid_step(release.std))
        return release

    monkeypatch.setattr(DataOracle, "answer", watched)
    result = short.fit(**CASES[case])
    assert len(steps) > 100
    assert max(abs(each - each.round()) for each in steps) < 1e-6  # which the centre of losses rounds
    assert result.record["grid"] is True
    assert "rounded to a public grid" in str(result.statement())


def test_a_run_that_began_without_the_grid_ends_without_it(tmp_path):
    """File and end are those of dpopt before there was a grid; it stopped after half of its draws."""
    shutil.copy(STORED, tmp_path / "checkpoint.pt")
    x = torch.arange(60.0).reshape(30, 2).sin()
    loss, optimizer = nn.CrossEntropyLoss(reduction="none"), dpopt.create("dp_sgd", lr=1.0)

    def fit(**changes):
        model = nn.Linear(2, 2)
        torch.nn.utils.vector_to_parameters(torch.zeros(6), model.parameters())
        return short.fit(model, (x, (x[:, 0] > 0).long()), loss, optimizer=optimizer, batch_size=10, **changes)

    result = fit(checkpoint=tmp_path)
    assert (result.record["resumed_at"], "grid" in result.record) == (6, False)
    before = [-1.773952, -0.5429906, 1.4523803, 0.07413052, 0.35039774, 0.0641977]
    # Another kind of processor may differ in the last places; the grid moves this by 4e-5.
    torch.testing.assert_close(short.weights(result), torch.tensor(before), rtol=0, atol=1e-6)
    # With the grid, the same arguments have other noise: both runs would tell what was rounded.
    assert float((short.weights(fit()) - short.weights(result)).abs().max()) > 0.01
