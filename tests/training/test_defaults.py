"""What `fit` does where nobody says otherwise, and what it says of a rule that has failed."""

import math
from pathlib import Path

import pytest
import short
import torch
import yaml
from torch import nn

import dpopt
from dpopt import registry
from dpopt.errors import ConfigError
from dpopt.results import tables
from dpopt.training import fitting

pytestmark = pytest.mark.filterwarnings("ignore:seed")
SUITE = Path(__file__).parents[2] / "benchmarks" / "leaderboard.yaml"


def test_only_epsilon_has_no_default():
    row = yaml.safe_load(SUITE.read_text())["settings"]["adadp_equilibrium_average"]
    expected = registry.create(row["name"], **row["fields"])
    assert (fitting.default_optimizer(), fitting.AVERAGE) == (expected, row["average"])
    x, y = short.records(300)
    result = dpopt.fit(nn.Linear(4, 2), short.loss, (x, y), epsilon=3, accountant="rdp", progress=False)
    record = result.record
    assert record["defaults"] == ["average", "batch_size", "delta", "epochs", "optimizer"]
    assert (record["average"], record["epochs"], record["batch_size"]) == (0.95, 10, 256)
    more = dpopt.fit(nn.Linear(4, 2), short.loss, short.records(12_000), epsilon=3, epochs=0.1, progress=False)
    assert more.record["batch_size"] == 300, "a fortieth of many records"
    assert record["delta"] == 300**-1.1
    assert record["optimizer"] == repr(expected)
    assert "Defaults, which nobody chose for these data: average, batch_size, delta, epochs, optimizer." in str(
        result.statement()
    )
    assert short.fit(optimizer="dp_sgd").record["average"] == 0, "an average belongs to the default optimizer alone"


def test_real_targets_have_a_default_of_their_own():
    """A squared error has a curvature that the leaderboard's constant does not know: at a rate of 10 it swings."""
    x, _ = short.records(300)
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    result = dpopt.fit(model, nn.MSELoss(reduction="none"), (x, x[:, 0]), epsilon=8, accountant="rdp", progress=False)
    assert result.record["optimizer"] == repr(registry.create("dp_adam"))
    assert result.record["average"] == 0.95


def test_a_rule_whose_probes_see_noise_says_so():
    """At a tiny epsilon the parabola's minimum is noise: each accepted one is nearer than the last."""
    rule = dpopt.create("hyfreedp", probe_every=1)
    with pytest.warns(UserWarning, match=r"optimizer: the learning rate ended more than 10 times below its start"):
        result = short.fit(optimizer=rule, epsilon=0.01, epochs=40)
    assert result.curve[-1]["eta"] < 1e-5
    assert "its probes saw noise" in result.record["doubt"]
    assert "Status: done, the learning rate ended more than 10 times below" in str(result.statement())
    assert registry.entry("optimizer", "hyfreedp").note


def test_a_rule_that_finds_its_rate_is_looked_at_in_its_own_process():
    """The first rate is read before the first step: of an isolated optimizer the latest state alone can be had."""
    here, isolated = (short.fit(optimizer="hyfreedp", isolate=isolate) for isolate in (False, True))
    assert isolated.record.get("doubt") == here.record.get("doubt")
    assert all(map(torch.equal, here.model.parameters(), isolated.model.parameters()))


def test_a_constant_that_is_below_its_cap_is_no_failure():
    assert "doubt" not in short.fit(optimizer="adadp_equilibrium").record


def test_tables_count_the_seeds_whose_rate_fell():
    runs = [{"lr": 1e-4, "eta": eta, "noise_losses": 8.0} for eta in (2e-6, 1e-4, 9e-6)]
    assert tables._fallen(runs).startswith("In 2 of 3 seeds the learning rate ended more than 10 times below")
    assert tables._fallen([run | {"noise_losses": math.nan} for run in runs]) == ""
    assert tables._fallen([{"lr": run["lr"], "noise_losses": 8.0} for run in runs]) == ""
    assert tables._fallen([{"lr": 1.0, "noise_losses": 8.0, "eta": 0.1}]) == "", "no more than 10 times"


def test_what_to_say_in_place_of_an_argument_is_for_fit_alone():
    with pytest.raises(ConfigError, match="privatize takes no such argument") as error:
        dpopt.privatize(nn.Linear(4, 2), steps=3)
    assert "epochs" not in str(error.value)
