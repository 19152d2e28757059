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
from dpopt.clipping import Abadi
from dpopt.clipping.rules import ByGroup
from dpopt.privacy import DataOracle
from dpopt.privacy.sampling import grid_step, round_to_grid
from dpopt.training import fitting

pytestmark = pytest.mark.filterwarnings("ignore:seed", "ignore:unit", "ignore:model. its run began")
STDS = st.floats(2.0**-113, 1e33) | st.integers(-113, 100).map(lambda k: math.nextafter(2.0**k, 0))


@given(STDS, st.integers(0, 99), st.sampled_from((torch.float32, torch.float64)), st.floats(1e-3, 1e4))
def test_values_are_rounded_once_to_the_nearest_multiple(std, seed, dtype, size):
    step, of_tensor = grid_step(std), grid_step(torch.tensor(std, dtype=torch.float64))
    assert std * 2.0**-13 < step == of_tensor <= std * 2.0**-12
    assert math.frexp(step)[0] == 0.5  # a power of two
    noise = torch.randn(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = (noise * std * size).to(dtype)
    for given_std in (std, torch.tensor(std, dtype=torch.float64), torch.full((50,), std, dtype=torch.float64)):
        rounded = values.clone()
        round_to_grid(rounded, given_std)
        assert bool((rounded.double() / step % 1 == 0).all())
        assert float((rounded.double() - values.double()).abs().max()) <= step / 2


@pytest.mark.parametrize("std", [0.0, math.inf, math.nan])
def test_without_noise_there_is_no_grid(std):
    values = torch.randn(9)
    rounded = values.clone()
    round_to_grid(rounded, std)
    assert torch.equal(rounded, values)


def test_a_std_below_the_range_of_float32_keeps_values_finite():
    for std in (1e-40, torch.tensor(1e-40, dtype=torch.float64)):
        values = torch.full((3,), 1e-35)
        round_to_grid(values, std)
        torch.testing.assert_close(values, torch.full((3,), 1e-35), rtol=0, atol=2.0**-127)


class Watched(DataOracle):
    """Notes each release, without its public centre, in steps of the grid."""

    steps: list[torch.Tensor] = []

    def answer(self, charged):
        release = super().answer(charged)
        step = 2.0 ** (math.floor(math.log2(release.std)) - 12)
        self.steps.append((release.value.double() - (charged.asked.centre or 0.0)) / step)
        return release


CASES = {
    "two draws": {"optimizer": "adadp"},
    "losses": {"optimizer": "hyfreedp"},
    "counts, adaptive bound": {"optimizer": "adaptive_clip"},
    "groups": {"optimizer": dpopt.create("dp_sgd", clip=ByGroup(Abadi(1.0)))},
    "persons": {"unit": [row // 2 for row in range(60)], "batch_size": 10},
    "isolated": {"isolate": True},
    "batch of 7": {"batch_size": 7},
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_fit_releases_is_on_the_grid(case, monkeypatch):
    monkeypatch.setattr(Watched, "steps", [])
    monkeypatch.setattr(fitting, "DataOracle", Watched)
    result = short.fit(**CASES[case])
    steps = torch.cat(Watched.steps)
    assert len(steps) > 100
    assert float((steps - steps.round()).abs().max()) < 1e-6  # which the centre of losses rounds
    assert result.record["grid"] is True
    assert "rounded to a public grid" in str(result.statement())


def test_a_run_that_began_without_the_grid_ends_without_it(tmp_path):
    """The file and the end are those of dpopt 0.2.0 before there was a grid, which stopped after half of its draws."""
    shutil.copy(Path(__file__).parents[1] / "golden" / "without_grid.pt", tmp_path / "checkpoint.pt")
    x = torch.arange(60.0).reshape(30, 2).sin()
    loss, train = nn.CrossEntropyLoss(reduction="none"), (x, (x[:, 0] > 0).long())

    def fit(**changes):
        model = nn.Linear(2, 2)
        model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
        return short.fit(model, train, loss, optimizer=dpopt.create("dp_sgd", lr=1.0), batch_size=10, **changes)

    result = fit(checkpoint=tmp_path)
    assert (result.record["resumed_at"], "grid" in result.record) == (6, False)
    before = [-1.7739520072937012, -0.5429905652999878, 1.4523802995681763, 0.07413052022457123]
    before += [0.3503977358341217, 0.06419769674539566]
    # On another kind of processor float32 may differ in its last places; a step of the grid is 30 times as much.
    torch.testing.assert_close(short.weights(result), torch.tensor(before), rtol=0, atol=1e-6)
    assert "The last digits of floating-point numbers" in str(result.statement())
    # With the grid the same arguments have other noise: under one noise, two releases differ by what was rounded.
    assert float((short.weights(fit()) - short.weights(result)).abs().max()) > 0.01
