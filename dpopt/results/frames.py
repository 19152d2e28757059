"""Records of a suite as data frames: one row a cell, one row a selected run, one row a curve entry."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import pandas as pd

from dpopt.cells import clipping_bound
from dpopt.errors import ConfigError, unknown
from dpopt.files import Damaged
from dpopt.privacy.selection import selection_rule
from dpopt.results import pricing
from dpopt.results.naming import readable_names, row_names, workload_names
from dpopt.store.bits import unpacked
from dpopt.store.manifests import searches
from dpopt.store.runs import RESULTS, Store, released_score

GROUP = ["workload", "label", "epsilon_target", "batch_size", "epochs", "clip"]
"""A table row; its seeds are replicates. `clip` is NaN where there is no bound: group with `dropna=False`."""
SWEPT = ["batch_size", "epochs", "clip"]
"""The keys that a suite may vary beside methods, workloads and epsilon."""
UNSAID = ""
"""Stands for constants that a manifest of an older version does not tell."""
_REPLICATE = [*GROUP, "seed", "score"]


@dataclass(frozen=True)
class Stored:
    """The records of a suite.

    A row of `cells` is a planned cell, finished or not: its place in the suite, its state, its metrics. `score` names
    the one that counts, `test_score` and `validation_score` hold it; further ones are `score_NAME`.
    """

    cells: pd.DataFrame
    problems: list[str]  # a line for each damaged or foreign file, and each failed cell


OF_ENTRY: dict[str, Callable[[Mapping[str, Any], tuple[str, ...]], set[Any]]] = {
    "optimizers": lambda entry, names: {entry["label"]},
    "epsilon": lambda entry, names: {float(entry.get("target", entry["cell"]["epsilon"]))},
    "seeds": lambda entry, names: {entry["cell"]["seed"]},
    "workloads": lambda entry, names: {entry["cell"]["workload"]["name"], *names},
}
"""Key that rows are chosen by -> what it may be for an entry of a manifest whose workload CSV and tables name so."""


def in_part(entries: Sequence[Mapping[str, Any]], part: Mapping[str, Sequence[Any]]) -> list[bool]:
    """True for each entry of a manifest that has one of the values of every key; `ConfigError` where none has."""
    if not part:
        return [True] * len(entries)
    specs = [entry["cell"]["workload"] for entry in entries]
    workloads = list(zip(workload_names(specs), readable_names(specs), strict=True))
    has = {key: [OF_ENTRY[key](*pair) for pair in zip(entries, workloads, strict=True)] for key in part}
    for key, values in part.items():
        present = set[Any]().union(*has[key])
        for value in values:
            if value not in present:
                raise unknown(key, value, present)
    kept = [all(has[key][at].intersection(values) for key, values in part.items()) for at in range(len(entries))]
    if not any(kept):
        raise ConfigError(", ".join(part), {key: list(values) for key, values in part.items()}, "no row has all of it")
    return kept


def load(store: Store, suite: str, part: Mapping[str, Sequence[Any]] | None = None) -> Stored:
    """Read what `store` holds of `suite`, or of the rows with the values of `part`, by the keys of `OF_ENTRY`.

    Only a suite without a readable part or without such a row makes this fail, by `ConfigError`.
    """
    rows, problems, entries = [], store.foreign(), store.manifest(suite)["cells"]
    if not entries:
        raise ConfigError(
            "suite", suite, "no part of it can be read: `dpopt verify` says why, `dpopt run` plans it anew"
        )
    workloads = workload_names([entry["cell"]["workload"] for entry in entries])
    seen, columns = set[tuple[str, str]](), (row_names(entries), workloads, in_part(entries, part or {}))
    for entry, label, workload, is_kept in zip(entries, *columns, strict=True):
        place = label, entry["run_id"]
        if place in seen or not is_kept:
            continue  # a suite may name a cell more than once; it is one run
        seen.add(place)
        cell, run_id, rate = entry["cell"], entry["run_id"], entry["cell"]["optimizer"]
        row: dict[str, Any] = {
            "run_id": run_id,
            "label": label,
            "tuning": entry["tuning"],
            "tuned": json.dumps(entry["tuned"], sort_keys=True),
            "chosen_on": json.dumps(entry["chosen_on"]) if "chosen_on" in entry else UNSAID,
            "workload": workload,
            "optimizer": cell["optimizer"]["name"],
            # Of another step size `lr` is only a factor, as in Prodigy, which finds its own.
            "lr": rate.get("lr") if rate.get("step_size", "lr") in ("lr", "scheduled_lr") else None,
            "epsilon_target": float(entry.get("target", cell["epsilon"])),
            "selection": json.dumps(cell["selection"], sort_keys=True) if "selection" in cell else "",
            "stage": entry.get("stage", ""),
            "widen": max(searches(entry).values()),
            "search": cell.get("search", 0),
            "search_id": entry.get("search_id", ""),  # planned by a version that told no searches apart
            "searches": tuple(searches(entry).items()),
            "is_widened": entry.get("widened", False),
            "gradients_per_draw": entry.get("gradients_per_draw", 1.0),
            "is_trained": not cell.get("untrained", False),
            "delta": cell["delta"],
            "accountant": cell["accountant"],
            "batch_size": cell["batch_size"],
            "epochs": cell["epochs"],
            "clip": clipping_bound(cell),
            "seed": cell["seed"],
        }
        try:
            row |= _outcome(store, run_id, cell)
        except FileNotFoundError:
            row["state"] = store.state(run_id)
            if row["state"] == "failed":
                problems.append(f"{run_id} ({row['label']}) failed: {store.error(run_id)['reason']}")
        except Damaged as error:
            row["state"] = "damaged"
            problems.append(f"{error}; move it away to run the cell again")
        if entry.get("refined") and row["state"] in RESULTS:  # of older versions, which charged the runs of all seeds
            row["state"] = "damaged"
            problems.append(f"{run_id}: a point of a refinement, which has no price any more; its row is left out")
        rows.append(row)
    problems += [*_misstated(store, rows), *_mixed(rows), *_mark_conflicting_searches(rows)]
    return Stored(pd.DataFrame(rows), problems)


def _misstated(store: Store, rows: list[dict[str, Any]]) -> Iterator[str]:
    # A record is a file that anyone can write: its epsilons count only if its ledger spends them.
    claims = [(row, *claim) for row in rows for claim in row.pop("claims", ())]
    pricing.ahead(charge for *_, charge in claims)
    for row, stated, of, charge in claims:
        try:
            spent = pricing.spent(*charge)
            wrong = "" if math.isclose(stated, spent, rel_tol=1e-6) else f"states epsilon {stated}{of} {spent}"
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            wrong = f"{type(error).__name__} {error}"
        if wrong:
            row["state"] = "damaged"
            yield f"{store.place(row['run_id'])}: {wrong}; move it away to run the cell again"


def _mixed(rows: list[dict[str, Any]]) -> Iterator[str]:
    # A table has one score for a workload: that of its first run.
    scores = dict[str, str]()
    for row in rows:
        score = row.get("score")
        if score and score != (first := scores.setdefault(row["workload"], score)):
            row["state"] = "damaged"
            yield f"{row['run_id']}: its score is {score}, that of {row['workload']} {first}"


def _mark_conflicting_searches(rows: list[dict[str, Any]]) -> Iterator[str]:
    # Where two machines have extended one grid differently, both runs have the same number and so the same draws:
    # together they cost more than runs with draws of their own. The first is kept.
    seen = set[tuple[Any, ...]]()
    for row in filter(itemgetter("is_widened"), rows):
        search = row["seed"], row["selection"], row["search_id"], row["search"]
        place = *(str(row[key]) for key in GROUP), *search
        if place in seen:
            row["state"] = "damaged"
            yield f"{row['run_id']}: another run goes on from the same grid otherwise; keep one of the two"
        seen.add(place)


def _outcome(store: Store, run_id: str, cell: dict[str, Any]) -> dict[str, Any]:
    record, ledger = store.record(run_id), store.ledger(run_id)
    if record["cell"] != cell:
        raise Damaged(f"{store.place(run_id)}: its cell is not the planned one")
    kept = {"epsilon", "epsilon_total", "draws", "examples", "dimension", "eta", "tested"}
    kept |= {"seconds_train", "seconds_cpu", "seconds_prepare"}
    names = [key for key in record if key.startswith(("test_", "validation_")) or key in kept]
    score = record.get("score", "accuracy")
    try:
        numbers = {key: float(record[key]) for key in names}
        charge = ledger, cell["delta"], cell["accountant"]
        claims: list[Any] = [(numbers["epsilon"], ", its ledger spends", charge)]
        if "selection" in cell:
            total, rule = float(record.get("epsilon_total", math.nan)), selection_rule(cell["selection"])
            # A run that is not trained spends nothing by itself, but its search was charged the cell's epsilon.
            if not cell.get("untrained", False):
                claims.append((total, " for its search, which spends", (*charge, rule)))
            elif not math.isclose(total, float(cell["epsilon"]), rel_tol=1e-6):
                raise ValueError(f"states epsilon {total} for its search, which spends {cell['epsilon']}")
        numbers |= {f"noise_{kind}": float(value) for kind, value in record.get("noise", {}).items()}
        numbers["test_score"] = numbers[f"test_{score}"]
        numbers["validation_score"] = numbers.get(f"validation_{score}", math.nan)
        numbers["selection_score"] = released_score(record)
        scores = {name: math.nan if value is None else value for name, value in record.get("scores", {}).items()}
        # null is a score that could not be computed; a text is none that a table could average
        further = {f"score_{name}": float(value) for name, value in scores.items() if isinstance(value, int | float)}
        origin = {key: record["provenance"].get(key) for key in ("commit", "dirty", "device", "cpu", "python")}
        versions = record["provenance"].get("versions", {})
        origin |= {f"version_{name}": value for name, value in versions.items()}
        if "right" in record:
            unpacked(record["right"], record["tested"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise Damaged(f"{store.place(run_id)}: {type(error).__name__} {error}") from error
    return {"state": record["status"], "score": score, "claims": claims} | numbers | further | origin


def curves(store: Store, selected: pd.DataFrame) -> pd.DataFrame:
    """The curves of the selected runs: one row for each entry, with the run's place in the suite.

    A run that does not find its own learning rate has its constant one as `eta`.
    """
    entries = []
    for row in selected.to_dict("records"):
        place = {key: row[key] for key in (*GROUP, "optimizer", "seed", "tuning", "run_id", "score", "lr")}
        entries += [{"eta": row["lr"], **entry, **place} for entry in store.curve(row["run_id"])]
    return pd.DataFrame(entries).drop(columns="diagnostics", errors="ignore")


def diagnostics(store: Store, selected: pd.DataFrame) -> pd.DataFrame:
    """One row for each curve entry of selected runs that holds `study.diagnostics` of gradients; not private.

    Returns:
        The run's place in the suite; `draw`, `epoch`; `q5`, `q50`, ... of the gradient norms since the entry before;
        `clipped`, the share of them above the run's bound; and where it was estimated `best_clip`, with `best_bias`,
        `best_noise`, `own_bias` and `own_noise`: MSE(C) of the mean gradient at that bound and at the run's own.
    """
    rows = []
    for run in selected.to_dict("records"):
        place = {key: run[key] for key in _REPLICATE}
        for entry in store.curve(run["run_id"]):
            if isinstance(noted := entry.get("diagnostics"), dict):
                parts = {name: noted.get(name, {}) for name in ("best", "own")}
                errors = {f"{name}_{key}": value for name, part in parts.items() for key, value in part.items()}
                numbers = noted.get("norms", {}) | errors | {"clipped": noted.get("clipped")}
                rows.append(place | {"draw": entry["draw"], "epoch": entry.get("epoch")} | numbers)
    # The run's own bound is there as `clip`.
    return pd.DataFrame(rows).rename(columns={"best_C": "best_clip"}).drop(columns="own_C", errors="ignore")


def classes(store: Store, selected: pd.DataFrame) -> pd.DataFrame:
    """One row for each class and bound C of the selected runs that hold class weights; not private.

    `norm` is the median gradient norm, and `weight` the part w_y(C) that is left of it, both late in the run.
    """
    rows = []
    for run in selected.to_dict("records"):
        noted = store.record(run["run_id"]).get("diagnostics", {})
        place = {key: run[key] for key in _REPLICATE}
        for bound, weights in noted.get("class_weights", {}).items():
            for y, (weight, norm) in enumerate(zip(weights, noted["class_norms"], strict=True)):
                rows.append(place | {"label_of_class": y, "norm": norm, "bound": float(bound), "weight": weight})
    return pd.DataFrame(rows)


def class_scores(store: Store, runs: pd.DataFrame) -> pd.DataFrame:
    """One row for each class of the runs of `choosing.select` that hold the test `accuracy` of each class."""
    rows = []
    for run in runs.to_dict("records"):
        place = {key: run[key] for key in (*_REPLICATE, "run_id", "selected_by")}
        shares = store.record(run["run_id"]).get("scores", {}).get("class_accuracy") or []
        rows += [place | {"label_of_class": y, "accuracy": share} for y, share in enumerate(shares)]
    return pd.DataFrame(rows)
