"""Two processes that train one cell together, against the same cell in one process."""

import dataclasses
import os
import signal

import pytest
from small_suites import train_cell

from dpopt.errors import ConfigError
from dpopt.runs.run_suite import run_suite
from dpopt.runs.supervisor import Supervisor
from dpopt.store import Store
from dpopt.suites.plan import plan


def test_two_processes_leave_the_record_of_one(write_suite, store, tmp_path):
    suite = write_suite(overrides=["optimizers=[hyfreedp,adadp]", "seeds=0", "workers=2", "device=cpu"])
    outcome = run_suite(suite, store.root, engine="span", progress=False)
    assert (outcome.ran, outcome.failed) == (2, {})
    alone = Store(tmp_path / "alone")
    for cell in (entry.cell for entry in plan(suite)):
        expected = train_cell(cell, alone, device="cpu")
        record = store.record(cell.run_id)
        assert record["processes"] == 2
        assert "processes" not in expected
        for key in ("epsilon", "noise", "draws", "status", "cell", "examples"):
            assert record[key] == expected[key]
        assert store.ledger(cell.run_id) == alone.ledger(cell.run_id)
        for mine, theirs in zip(store.curve(cell.run_id), alone.curve(cell.run_id), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-3)  # an accuracy may change by a record or two


def test_what_goes_wrong_in_one_process_ends_the_cell_and_no_other(write_suite, store):
    """The second process of a group is killed in a long cell; then a cell fails in both; then one ends well."""
    suite = write_suite(overrides=["optimizers=[hyfreedp,adadp]", "seeds=0", "device=cpu", "grace=600"])
    long, short = (entry.cell for entry in plan(suite))
    outdated, killed, news = dataclasses.replace(short, kernel=1), [], []

    def tell(each):
        news.append(each)
        if each.kind == "begin" and each.run_id == long.run_id and not killed:
            killed.append(boss.slots[0].processes[1].pid)
            os.kill(killed[0], signal.SIGKILL)

    boss = Supervisor(suite, store, [long, outdated, short], [("cpu", "cpu")], tell)
    boss.run(lambda: False)
    begun = [each.run_id for each in news if each.kind == "begin"]
    assert begun.count(long.run_id) == 2, "it was tried again"
    assert store.state(long.run_id) == store.state(short.run_id) == "done"
    draws = [entry["draw"] for entry in store.curve(long.run_id)]
    assert draws == sorted(set(draws)), "two processes wrote"
    assert "revision" in store.error(outdated.run_id)["reason"]
    assert [each.kind for each in news].count("ready") == 3, "a new group after each"


def test_what_cannot_be_trained_together_is_refused_before_anything_starts(write_suite, store):
    suite = write_suite(overrides=["workloads=[gmm]", "optimizers=[adadp]", "seeds=0", "device=cpu", "workers=2"])
    with pytest.raises(ConfigError, match=r"engine: 'span' .*records of gmm share random numbers: say workers=1"):
        run_suite(suite, store.root, engine="span", progress=False)
    assert not store.suites()
