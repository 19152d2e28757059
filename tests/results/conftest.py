"""A store of made-up records: quick, and every number in a table is known beforehand."""

import math
import shutil
from functools import cache

import pytest
from stored import rewrite

from dpopt.privacy import Draw, Ledger
from dpopt.privacy import epsilon as epsilon_of
from dpopt.privacy.selection import selection_rule
from dpopt.store import Store

SUITE = "made"
DELTA = 1e-5


@cache
def spent(ledger):
    """What runs of a target spend: all of them leave one ledger."""
    return epsilon_of(Ledger.from_json(ledger), DELTA, "rdp")


class Maker:
    """Writes records and, at last, the manifest that holds them."""

    def __init__(self, root):
        self.store, self.cells = Store(root), []

    def add(
        self,
        label,
        seed,
        validation,
        test,
        *,
        epsilon=3.0,
        tuned=None,
        tuning="self",
        status="done",
        eta=None,
        workload="digits_mlp",
        batch_size=128,
        entry=None,
        search=None,
        **more,
    ):
        """A run with its record and two entries of its curve, each with `entry`; `more` is of the record.

        Its number within its search is `search`; by default the runs of a label, workload and seed have draws of their
        own, as in suites.
        """
        run_id, search = f"{len(self.cells):016x}", self.number(label, workload, seed) if search is None else search
        cell = {
            "workload": {"name": workload},
            "optimizer": {"name": label, "lr": (tuned or {}).get("lr", 0.25), "clip": {"rule": "abadi", "bound": 1.0}},
            "epsilon": "inf" if epsilon == float("inf") else epsilon,
            "delta": DELTA,
            "accountant": "rdp",
            "batch_size": batch_size,
            "epochs": 20.0,
            "seed": seed,
            **({"search": search} if search else {}),
        }
        rest = {"label": label, "tuning": tuning, "tuned": tuned or {}}
        self.cells.append({"run_id": run_id, "cell": cell, **rest})
        if status == "missing":
            return run_id
        self.store.begin(run_id, cell)
        if status == "failed":
            self.store.fail(run_id, "ValueError: no luck")
            return run_id
        ledger = Ledger()
        ledger.append(Draw(0.1, (0.0 if epsilon == float("inf") else 5.0 / epsilon**0.85,)), 100)
        single = spent(ledger.to_json())
        record = {
            "schema": 1,
            "run_id": run_id,
            "cell": cell,
            "status": status,
            "epsilon": "inf" if single == float("inf") else single,
            "epsilon_target": cell["epsilon"],
            "delta": DELTA,
            "draws": 100,
            "validation_accuracy": validation,
            "test_accuracy": test,
            "provenance": {},
            **more,
        }
        for draw in (50, 100):
            at = {"draw": draw, "epoch": draw / 10, "test_accuracy": test * draw / 100, **(entry or {})}
            self.store.append_curve(run_id, at | ({"eta": eta * draw, "bound": 2 * eta} if eta else {}))
        self.store.finish(run_id, record, ledger.to_json())
        return run_id

    def number(self, label, workload, seed):
        """How many runs there are of a search."""
        cells = [entry["cell"] for entry in self.cells if entry and entry["label"] == label]
        return sum(cell["workload"]["name"] == workload and cell["seed"] == seed for cell in cells)

    def clip(self, bound):
        """Let the last run have been trained with the clipping bound `bound`; NaN: by a rule without one."""
        rule = {"rule": "automatic"} if math.isnan(bound) else {"rule": "abadi", "bound": bound}
        self.change(optimizer=self.cells[-1]["cell"]["optimizer"] | {"clip": rule})

    def change(self, **fields):
        """Let the last run have been one of a cell with these fields."""
        entry = self.cells[-1]
        entry["cell"] |= fields
        rewrite(self.store, entry["run_id"], cell=entry["cell"])

    def add_search(self, label, seed, runs, rule, *, tuning="grid", target=3.0, clip=1.0, first=0, search_id=None):
        """The runs of a search that is charged by `rule`, plain data.

        Args:
            runs: for each (released score, validation, test) and, where they differ, epsilon and stage; a released
                score of None is none.
            first: number of the first run.
            search_id: what the plan has called the search; None is a plan of a version that called it nothing.
        """
        ids = []
        for number, (released, validation, test, *rest) in enumerate(runs, first):
            epsilon, stage = rest or (target, "")
            place = {"epsilon": epsilon, "tuned": {"lr": 0.1}, "tuning": tuning, "search": number}
            ids.append(self.add(label, seed, validation, test, **place))
            entry = self.cells[-1]
            entry["cell"]["optimizer"]["clip"]["bound"] = clip
            entry["cell"]["selection"] = rule(ids, self.store) if callable(rule) else rule
            if search_id:
                entry |= {"search_id": search_id}
            if stage:
                entry |= {"stage": stage, "target": target}
            total = selection_rule(entry["cell"]["selection"]).epsilon(self.store.ledger(ids[-1]), DELTA, "rdp")
            score = {"value": released, "std": 0.05, "noise": 9.0}
            more = {} if released is None else {"released_score": score}
            rewrite(self.store, ids[-1], cell=entry["cell"], epsilon_total=total, **more)
        return ids

    def done(self):
        self.store.extend_suite(SUITE, {"suite": SUITE, "description": "", "cells": self.cells})
        return self.store


@pytest.fixture
def maker(tmp_path):
    return Maker(tmp_path / "results")


def of_matrix(root):
    """Two searched points and one untuned method at two targets, three seeds, and a ceiling."""
    maker = Maker(root)
    for seed in range(3):
        for epsilon in (1.0, 3.0):
            for lr, validation, test in ((0.1, 0.6, 0.9), (1.0, 0.7 + 0.01 * seed, 0.5 + 0.1 * seed)):
                maker.add("dp_adam", seed, validation, test, epsilon=epsilon, tuned={"lr": lr}, tuning="grid")
            maker.add("hyfreedp", seed, 0.5, 0.4 + 0.3 * (epsilon > 1), epsilon=epsilon, eta=1e-3)
        maker.add("ceiling", seed, 0.99, 0.98, epsilon=float("inf"), tuning="fixed")
    return maker.done()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """The suite of `of_matrix`, not to be changed."""
    return of_matrix(tmp_path_factory.mktemp("recorded") / "results")


@pytest.fixture
def matrix(recorded, tmp_path):
    """A copy of `recorded`."""
    return Store(shutil.copytree(recorded.root, tmp_path / "results"))


@pytest.fixture(scope="session")
def maker_of():
    """Folder -> maker of a suite there, for suites that tests of a module share."""
    return Maker
