"""The price of releasing the best of a random number of runs, against known answers."""

import csv
import math
from pathlib import Path

import pytest

from dpopt.errors import ConfigError
from dpopt.privacy.accountants import epsilon
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.selection import best_of
from dpopt.privacy.solving import solve_noise

DELTA = 1e-5
LINES = [line for line in (Path(__file__).parent / "selection.csv").read_text().splitlines() if line[0] != "#"]
ROWS = list(csv.DictReader(LINES))


def run(noise: float, draws: int = 500) -> Ledger:
    ledger = Ledger()
    for _ in range(draws):
        ledger.append(Draw(0.02, (noise,)))
    return ledger


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['single']}x{row['mean_runs']}")
def test_known_answers(row):
    ledger, runs = run(solve_noise(run, float(row["single"]), DELTA, "rdp")), int(row["mean_runs"])
    for number in ("logarithmic", "geometric", "poisson"):
        assert best_of(ledger, DELTA, runs=runs, number=number) == pytest.approx(float(row[number]), rel=0.005)
    naive = Ledger()
    for _ in range(runs):
        naive = naive + ledger
    assert epsilon(naive, DELTA, "rdp") == pytest.approx(float(row["naive"]), rel=0.005)


def test_one_run_costs_what_a_run_costs():
    alone = epsilon(run(2.0), DELTA, "rdp")
    for number in ("logarithmic", "geometric"):  # the bound is over fewer orders, never below the truth
        assert alone <= best_of(run(2.0), DELTA, runs=1, number=number) < 1.01 * alone


def test_more_runs_cost_more():
    costs = [best_of(run(2.0), DELTA, runs=runs) for runs in (1, 2, 4, 16, 64, 256)]
    assert costs == sorted(costs)
    assert costs[0] < costs[1]


def test_runs_without_noise_or_without_releases():
    assert best_of(run(0.0), DELTA, runs=4) == math.inf
    assert best_of(Ledger(), DELTA, runs=4) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"runs": 0.5}, "selection.runs"),
        ({"runs": math.inf}, "selection.runs"),
        ({"runs": math.nan}, "selection.runs"),
        ({"runs": 3, "number": "poison"}, "poisson"),
        ({"runs": 3, "delta": 0}, "delta"),
    ],
)
def test_what_cannot_be_used_is_refused(arguments, named):
    with pytest.raises(ConfigError, match=named):
        best_of(run(2.0), **{"delta": DELTA, **arguments})
