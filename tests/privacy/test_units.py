"""A ledger is of one unit, and an epsilon is claimed by an accountant that bounds it."""

import json
import math
from functools import partial

import pytest
import short
from scipy.optimize import brentq
from scipy.stats import norm

import dpopt
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.privacy import ACCOUNTANTS, Accountant, Draw, Ledger, ReplayOracle, Unit, calibrate, epsilon
from dpopt.privacy.selection import After, repeated, selection_rule, selection_spec
from dpopt.results.pricing import composed
from dpopt.suites.plan import plan
from dpopt.suites.suite import load_suite
from dpopt.training import checkpoint
from dpopt.training.statement import Statement

DRAW, WHO = Draw(0.25, (2.0,)), Unit("person", "who")
ROWS, NAMELESS, OF_WHO, OF_HOUSES = (
    Ledger([DRAW] * 8, unit) for unit in (Unit(), Unit("person"), WHO, Unit("person", "house"))
)
SIZES = {"rate": 0.25, "draws": 8, "dimension": 14, "epsilon": 2.0, "delta": 1e-5, "accountant": "rdp"}
plan_of = partial(calibrate, dpopt.create("dp_sgd"))


class Runs(dict):
    """A store: run id -> ledger."""

    ledger = dict.get

    def record(self, run_id):
        return {"cell": {"seed": run_id}}


@pytest.mark.parametrize(
    ("one", "two"), [(ROWS, OF_WHO), (OF_WHO, ROWS), (OF_WHO, OF_HOUSES), (NAMELESS, NAMELESS)], ids=repr
)
def test_draws_of_several_units_are_not_charged_together(one, two):
    for charge in (
        lambda: one + two,
        lambda: plan_of(**SIZES | {"epsilon": 9.0}, unit=two.unit, selection=After(one)),
        lambda: composed(Runs(one=one, two=two), {"one": 1, "two": 1}),
    ):
        with pytest.raises(ConfigError, match=r"^ledger: '(record|person)"):
            charge()


def test_a_ledger_keeps_its_unit():
    made = [Ledger(OF_WHO), OF_WHO.first(8), repeated(OF_WHO, 1), Ledger() + OF_WHO, OF_WHO + Ledger()]
    made += [Ledger.from_json(OF_WHO.to_json()), selection_rule(selection_spec(After(OF_WHO))).spent]
    assert all(each == OF_WHO != ROWS for each in made)
    assert repeated(OF_WHO, 2) == OF_WHO + OF_WHO
    assert [OF_WHO.starts_with(each.first(3)) for each in (OF_WHO, ROWS)] == [True, False]


def test_a_checkpoint_of_an_earlier_version_has_the_unit_of_its_plan():
    planned = plan_of(**SIZES, unit=Unit("person"))
    old = {"ledger": Ledger(list(planned.ledger)[:2]).to_json(), "leaves": [1], "elapsed": (0, 0), "curve": "[]"}
    assert checkpoint.reached(old, 0, planned).ledger == planned.ledger.first(2)
    assert ReplayOracle([], planned).ledger.unit == planned.ledger.unit == Unit("person")


def test_json_has_the_unit_only_where_it_is_not_the_record():
    content = json.loads(ROWS.to_json())
    assert list(content) == ["schema", "draws", "runs"]
    assert json.loads(OF_WHO.to_json()) == content | {"unit": {"kind": "person", "name": "who"}}
    draw = content["draws"][0] | {"sampling": "balls"}
    for change in ({"draws": [draw]}, {"sampling": "balls"}, {"unit": {"kind": "house"}}, {"unit": "person"}):
        with pytest.raises(ConfigError, match=r"^ledger: .* not a ledger: "):
            Ledger.of(content | change)


def mu_gdp(events, delta):
    """By the central limit theorem (Bu et al. 2020), which holds for no number of draws."""
    mu = math.sqrt(sum(count * rate**2 * math.expm1(noise**-2) for rate, noise, count in events))
    return brentq(lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta, 0, 50)


def test_what_is_no_upper_bound_can_be_computed_and_not_claimed(monkeypatch, capsys):
    monkeypatch.setitem(ACCOUNTANTS, "clt", Accountant(mu_gdp, False, False, "Gaussian DP by a limit", ()))
    ledger = Ledger([Draw(0.01, (1.0,))] * 30)
    assert 0 < epsilon(ledger, 1e-5, "clt") < epsilon(ledger, 1e-5, "pld") / 2
    assert main(["epsilon", "rate=0.01", "noise=1", "draws=30", "delta=1e-5", "accountant=[clt,pld]"]) == 0
    assert [line.endswith("NO UPPER BOUND)") for line in capsys.readouterr().out.splitlines()] == [True, False]
    for claim in (
        lambda: short.fit(train="read after that", accountant="clt"),
        lambda: plan_of(**SIZES | {"accountant": "clt"}),
        lambda: plan(load_suite("quickstart", accountant="clt")),
        lambda: Statement.of({"accountant": "clt", "delta": 1e-5}, ledger),
    ):
        with pytest.raises(ConfigError, match=r"^accountant: 'clt' .* expected one of pld, rdp, prv, autodp$"):
            claim()
