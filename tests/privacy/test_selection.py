"""The price of releasing the best of a random number of runs, against known answers."""

import csv
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from dpopt import create
from dpopt.errors import ConfigError
from dpopt.privacy import calibration
from dpopt.privacy.accountants import epsilon
from dpopt.privacy.calibration import calibrate, score_noise, solve_noise
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.selection import (
    After,
    BestOf,
    Composed,
    Part,
    Simulated,
    repeated,
    selection_rule,
    selection_spec,
)

DELTA = 1e-5
SPENT = Ledger([Draw(1.0, (5.0,)), Draw(1.0, (3.0, 4.0))])
RULES = [
    BestOf("logarithmic", 10),
    BestOf("geometric", 3.5),
    BestOf("poisson", 10),
    Composed(4),
    Simulated(0.7),
    Part(6, 3.0),
    After(SPENT),
]
LINES = [line for line in (Path(__file__).parent / "selection.csv").read_text().splitlines() if line[0] != "#"]
ROWS = list(csv.DictReader(LINES))
SIZES = {"rate": 0.02, "draws": 500, "dimension": 5, "delta": DELTA, "accountant": "rdp"}
QUICK = SIZES | {"rate": 1.0, "draws": 20}
"""Where nothing is subsampled, divergences have a closed form."""


def named_rule(rule):
    return selection_spec(rule)["rule"]


def run(noise: float, draws: int = 500) -> Ledger:
    ledger = Ledger()
    for _ in range(draws):
        ledger.append(Draw(0.02, (noise,)))
    return ledger


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['single']}x{row['mean_runs']}")
def test_known_answers(row):
    ledger, runs = run(solve_noise(run, float(row["single"]), DELTA, "rdp")), int(row["mean_runs"])
    for number in ("logarithmic", "geometric", "poisson"):
        assert BestOf(number, runs).epsilon(ledger, DELTA) == pytest.approx(float(row[number]), rel=0.005)
    naive = Ledger()
    for _ in range(runs):
        naive = naive + ledger
    assert epsilon(naive, DELTA, "rdp") == pytest.approx(float(row["naive"]), rel=0.005)


def test_runs_without_noise_or_without_releases():
    assert BestOf("geometric", 4).epsilon(run(0.0), DELTA) == math.inf
    assert BestOf("geometric", 4).epsilon(Ledger(), DELTA) == 0


@pytest.mark.parametrize(
    ("number", "runs", "delta", "named"),
    [("poisson", 0.5, DELTA, "runs"), ("poisson", math.nan, DELTA, "runs"), ("poison", 3, DELTA, "poisson"),
     ("geometric", 3, 0, "delta")],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(number, runs, delta, named):
    with pytest.raises(ConfigError, match=named):
        BestOf(number, runs).epsilon(run(2.0), delta)


def assert_ends_at(target, rule, plan, accountant="rdp"):
    """The search costs its target, less noise would cost more, and the plan states what a single run spends."""
    assert target * (1 - 1e-4) <= rule.epsilon(plan.ledger, DELTA, accountant) <= target
    assert plan.epsilon == epsilon(plan.ledger, DELTA, accountant)
    less = Ledger()
    for draw, count in plan.ledger.counts().items():
        less.append(Draw(draw.rate, tuple((1 - 1e-3) * noise for noise in draw.noises)), count)
    assert rule.epsilon(less, DELTA, accountant) > target


@pytest.mark.parametrize(
    ("rule", "accountant"),
    [
        *((rule, "rdp") for rule in (Simulated(0.7), Part(6, 3.0), After(SPENT), BestOf("geometric", 3))),
        (Composed(3), "pld"),
    ],
    ids=str,
)
def test_a_calibrated_search_ends_at_its_target(rule, accountant):
    sizes = QUICK | {"accountant": accountant}
    assert_ends_at(3, rule, calibrate(create("dp_sgd"), epsilon=3.0, selection=rule, **sizes), accountant)


def test_two_kinds_of_noise_in_a_random_number_of_runs():
    """HyFreeDP's gradients have `noise_inflation` times what they would need alone; its losses spend the rest."""
    rule = BestOf("poisson", 3)
    plan = calibrate(create("hyfreedp", noise_inflation=1.05), epsilon=3.0, selection=rule, **QUICK)
    assert_ends_at(3, rule, plan)
    alone = calibrate(create("dp_sgd"), epsilon=3.0, selection=rule, **QUICK).noise["gradient"]
    assert plan.noise["gradient"] == pytest.approx(1.05 * alone, rel=1e-6)


def test_cached_noise_belongs_to_its_rule(tmp_path, monkeypatch):
    """The cache of calibrations must not confuse searches that differ in any field."""
    monkeypatch.setenv("DPOPT_CACHE", str(tmp_path))
    rules = [None, Composed(4), Composed(5), Simulated(0.7), Simulated(0.8), After(SPENT), Part(2, 3.0)]

    def noises():
        plans = [calibrate(create("dp_sgd"), epsilon=3.0, selection=rule, **QUICK) for rule in rules]
        return [plan.noise["gradient"] for plan in plans]

    found = noises()
    assert len(set(found)) == len(rules) - 1, "a part of a search costs what a run alone does, the others more"
    monkeypatch.setattr(calibration, "solve_noise", lambda *_: pytest.fail("solved again"))
    assert noises() == found


def test_what_rules_charge():
    """Composition is of runs one after the other."""
    ledger, several = Ledger([Draw(0.1, (2.0,)), Draw(0.1, (2.0, 9.0)), Draw(0.1, (2.0,))]), Ledger()
    for _ in range(4):
        several = several + ledger
    for accountant in ("rdp", "pld"):
        assert Composed(4).epsilon(ledger, DELTA, accountant) == epsilon(several, DELTA, accountant)
    assert repeated(ledger, 4).counts() == several.counts()

    ledger = run(2.0, 20)
    alone = epsilon(ledger, DELTA, "rdp")
    assert Simulated(0.8).epsilon(ledger, DELTA, "rdp") == pytest.approx(alone / 0.8)
    assert Part(6, 3.0).epsilon(ledger, DELTA, "rdp") == alone
    assert After(SPENT).epsilon(ledger, DELTA, "rdp") == epsilon(SPENT + ledger, DELTA, "rdp") > alone


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.scores(1.0)], ids=named_rule)
def test_the_scores_of_a_search_cost_its_target(rule):
    """Each score is one Gaussian release of a sum over records that are not trained on."""
    noise = score_noise(rule, 2.0, DELTA, "rdp")
    charge, total = (Composed(6), rule.total) if isinstance(rule, Part) else (rule, 2.0)
    spent = charge.epsilon(Ledger([Draw(1.0, (noise,))]), DELTA, "rdp")
    assert total * (1 - 1e-4) <= spent <= total


def test_the_scores_of_a_fixed_number_of_runs_against_a_closed_form():
    """k scores of a record with noise s are one with noise s / sqrt(k): Balle and Wang 2018 give its delta exactly."""
    noise = score_noise(Composed(9), 1.0, DELTA, "pld") / 3
    normal = scipy.stats.norm.cdf
    delta = normal(0.5 / noise - noise) - math.e * normal(-0.5 / noise - noise)
    assert delta == pytest.approx(DELTA, rel=0.01)


def test_no_score_is_noised_that_is_not_released():
    for rule, target in ((Simulated(), 3.0), (After(SPENT), 3.0), (Composed(4), math.inf)):
        assert score_noise(rule, target, DELTA, "rdp") == 0


LAWS = {
    "logarithmic": lambda runs: scipy.stats.logser(
        scipy.optimize.brentq(lambda p: scipy.stats.logser.mean(p) - runs, 1e-9, 1 - 1e-9)
    ),
    "geometric": lambda runs: scipy.stats.geom(1 / runs),
    "poisson": scipy.stats.poisson,
}
TIMES = 4000


@pytest.mark.parametrize("number", LAWS)
@pytest.mark.parametrize("runs", [1.5, 10.0])
def test_the_number_of_runs_has_the_stated_law(number, runs):
    law = LAWS[number](runs)
    drawn = [BestOf(number, runs).draw(seed) for seed in range(TIMES)]
    assert np.mean(drawn) == pytest.approx(runs, abs=4 * law.std() / math.sqrt(TIMES))
    counts, values = Counter(drawn), [k for k in range(200) if TIMES * law.pmf(k) >= 10]
    observed = [counts[k] for k in values]
    expected = [TIMES * law.pmf(k) for k in values]
    rest = TIMES - sum(observed), TIMES - sum(expected)
    assert scipy.stats.chisquare([*observed, rest[0]], [*expected, rest[1]]).pvalue > 1e-3


@pytest.mark.parametrize("rule", RULES, ids=named_rule)
def test_rules_are_plain_data_and_back(rule):
    content = json.loads(json.dumps(selection_spec(rule), allow_nan=False))
    assert selection_rule(content) == rule
    assert selection_spec(selection_rule(content)) == content


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, r"selection: None.*rule: one of .*logarithmic"),
        ({"runs": 3}, r"selection: .*rule: one of"),
        ({"rule": "geometrical", "runs": 3}, r"selection\.rule: 'geometrical'.*did you mean 'geometric'"),
        ({"rule": "poisson", "runs": 0}, r"selection\.runs: 0.*from 1 to 10,000"),
        ({"rule": "simulated", "share": 1.5}, r"share: 1\.5"),
        ({"rule": "after"}, r"selection\.spent: None"),
        ({"rule": "after", "spent": "{}"}, r"ledger"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused(given, named):
    with pytest.raises(ConfigError, match=named):
        selection_rule(given)
