"""A ledger is of one unit, and an epsilon is claimed by an accountant that bounds it."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import short

import dpopt
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.privacy import ACCOUNTANTS, Accountant, Draw, Ledger, ReplayOracle, Unit, calibrate
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


@pytest.mark.parametrize(
    ("one", "two"), [(ROWS, OF_WHO), (OF_WHO, ROWS), (OF_WHO, OF_HOUSES), (NAMELESS, NAMELESS)], ids=repr
)
def test_draws_of_several_units_are_not_charged_together(one, two):
    store = SimpleNamespace(ledger=[one, two].__getitem__, record=lambda run_id: {"cell": {"seed": run_id}})
    for charge in (
        lambda: one + two,
        lambda: plan_of(**SIZES | {"epsilon": 9.0}, unit=two.unit, selection=After(one)),
        lambda: composed(store, {0: 1, 1: 1}),
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
    planned = plan_of(**SIZES, unit=WHO)
    old = {"ledger": Ledger(list(planned.ledger)[:2]).to_json(), "leaves": [1], "elapsed": (0, 0), "curve": "[]"}
    assert checkpoint.reached(old, 0, planned).ledger == planned.ledger.first(2)
    assert ReplayOracle([], planned).ledger.unit == WHO


def test_json_has_the_unit_only_where_it_is_not_the_record():
    content = json.loads(ROWS.to_json())
    assert list(content) == ["schema", "draws", "runs"]
    assert json.loads(OF_WHO.to_json()) == content | {"unit": {"kind": "person", "name": "who"}}
    draw = content["draws"][0] | {"sampling": "balls"}
    for change in ({"draws": [draw]}, {"sampling": "balls"}, {"unit": {"kind": "house"}}, {"unit": "person"}):
        with pytest.raises(ConfigError, match=r"^ledger: .* not a ledger: "):
            Ledger.of(content | change)


def test_what_is_no_upper_bound_can_be_computed_and_not_claimed(monkeypatch, capsys):
    monkeypatch.setitem(ACCOUNTANTS, "clt", Accountant(lambda *_: 0.25, False, False, "Gaussian DP by a limit", ()))
    assert main(["epsilon", "rate=0.01", "noise=1", "draws=30", "delta=1e-5", "accountant=[clt,pld]"]) == 0
    assert [line.endswith("NO UPPER BOUND)") for line in capsys.readouterr().out.splitlines()] == [True, False]
    for claim in (
        lambda: short.fit(train="read after that", accountant="clt"),
        lambda: plan_of(**SIZES | {"accountant": "clt"}),
        lambda: plan(load_suite("quickstart", accountant="clt")),
        lambda: Statement.of(short.fit().record | {"accountant": "clt"}, ROWS),
    ):
        with pytest.raises(ConfigError, match=r"^accountant: 'clt' .* expected one of pld, rdp, prv, autodp$"):
            claim()
