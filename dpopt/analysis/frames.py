"""Records of a suite as data frames: one row a cell, one row a selected run, one row a curve entry."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby, zip_longest
from operator import itemgetter, or_
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from dpopt.analysis.naming import row_names, workload_names
from dpopt.errors import ConfigError, unknown
from dpopt.privacy.accountants import epsilon
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.selection import BestOf, selection_rule
from dpopt.store.identity import clipping_bound
from dpopt.store.runs import RESULTS, Damaged, Store, released_score, score_or_worst

GROUP = ["workload", "label", "epsilon_target", "batch_size", "epochs", "clip"]
"""What one table row stands for; its seeds are replicates, and its other cells are the tuning runs of each seed.

`clip` is NaN where there is no bound: group with `dropna=False`."""
SWEPT = ["batch_size", "epochs", "clip"]
"""What a suite may vary beside methods, workloads and epsilon."""
REFINED = ["workload", "label", "epsilon_target", "epochs"]
"""Whose grid, over all batch sizes, bounds and seeds, the points of one refinement follow from."""


@dataclass(frozen=True)
class Stored:
    """What is stored of a suite.

    Attributes:
        cells: one row for each planned cell, finished or not: its place in the suite, its state, its metrics. `score`
            names the one that counts, `test_score` and `validation_score` hold it; further ones are `score_NAME`.
        problems: one line for each damaged or foreign file, and each failed cell.
    """

    cells: pd.DataFrame
    problems: list[str]


OF_ENTRY: dict[str, Callable[[Mapping[str, Any], str], set[Any]]] = {
    "optimizers": lambda entry, workload: {entry["label"]},
    "epsilon": lambda entry, workload: {float(entry.get("target", entry["cell"]["epsilon"]))},
    "seeds": lambda entry, workload: {entry["cell"]["seed"]},
    "workloads": lambda entry, workload: {entry["cell"]["workload"]["name"], workload},
}
"""Key that rows are chosen by -> what it may be for an entry of a manifest, whose workload tables name so."""


def in_part(entries: Sequence[Mapping[str, Any]], part: Mapping[str, Sequence[Any]]) -> list[bool]:
    """Whether each entry of a manifest has one of the values of every key of `part`.

    Raises:
        ConfigError: no entry has one of the values, or none has one of every key.
    """
    workloads = _workloads(entries)
    has = {key: [OF_ENTRY[key](*pair) for pair in zip(entries, workloads, strict=True)] for key in part}
    for key, values in part.items():
        present = set[Any]().union(*has[key])
        for value in values:
            if value not in present:
                raise unknown(key, value, present)
    kept = [all(has[key][at].intersection(values) for key, values in part.items()) for at in range(len(entries))]
    if part and not any(kept):
        raise ConfigError(", ".join(part), {key: list(values) for key, values in part.items()}, "no row has all of it")
    return kept


def _workloads(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The name of each entry's workload in tables."""
    specs = [entry["cell"]["workload"] for entry in entries]
    names = workload_names(specs)
    return [names[json.dumps(spec, sort_keys=True)] for spec in specs]


def load(store: Store, suite: str, part: Mapping[str, Sequence[Any]] | None = None) -> Stored:
    """Read what `store` holds of `suite`; nothing there can make this fail except a missing manifest.

    Args:
        part: key of `OF_ENTRY` -> its values in the rows that are kept; by default all are.

    Raises:
        ConfigError: the suite was never planned in this store, or has no such row.
    """
    rows, problems, entries = [], store.foreign(), store.manifest(suite)["cells"]
    known, columns = set[tuple[str, str]](), (row_names(entries), _workloads(entries), in_part(entries, part or {}))
    for entry, label, workload, is_kept in zip(entries, *columns, strict=True):
        place = label, entry["run_id"]
        if place in known or not is_kept:
            continue  # a suite may name a cell more than once; it is one run
        known.add(place)
        cell, run_id = entry["cell"], entry["run_id"]
        row: dict[str, Any] = {
            "run_id": run_id,
            "label": label,
            "tuning": entry["tuning"],
            "tuned": json.dumps(entry["tuned"], sort_keys=True),
            "workload": workload,
            "optimizer": cell["optimizer"]["name"],
            "lr": cell["optimizer"].get("lr"),
            "epsilon_target": float(entry.get("target", cell["epsilon"])),
            "selection": json.dumps(cell["selection"], sort_keys=True) if "selection" in cell else "",
            "stage": entry.get("stage", ""),
            "is_refined": entry.get("refined", False),
            "widen": entry.get("widen", 0),
            "search": cell.get("search", 0),
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
        rows.append(row)
    problems += [*_mixed(rows), *_forked(rows)]
    return Stored(pd.DataFrame(rows), problems)


def _mixed(rows: list[dict[str, Any]]) -> list[str]:
    """Mark runs as damaged whose score is not that of their workload's first run: a table has one score."""
    scores: dict[str, str] = {}
    problems = []
    for row in rows:
        score = row.get("score")
        if score and score != scores.setdefault(row["workload"], score):
            row["state"] = "damaged"
            problems.append(
                f"{row['run_id']}: its score is {score}, that of {row['workload']} {scores[row['workload']]}"
            )
    return problems


def _forked(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Mark the second of two runs as damaged that continue one grid with different points.

    Two machines have then disagreed on its best point. Both runs have the same number and so the same draws, which cost
    more together than two runs with draws of their own.
    """
    known = set[tuple[Any, ...]]()
    for row in filter(itemgetter("is_widened"), rows):
        place = *(str(row[key]) for key in GROUP), row["seed"], row["selection"], row["search"]
        if place in known:
            row["state"] = "damaged"
            yield f"{row['run_id']}: another run goes on from the same grid otherwise; keep one of the two"
        known.add(place)


def _outcome(store: Store, run_id: str, cell: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a finished cell's record; its epsilon is recomputed from its ledger and must be the stated one."""
    record, path = store.record(run_id), store.folder(run_id, "record.json")
    ledger = store.ledger(run_id)
    if record["cell"] != cell:
        raise Damaged(f"{path}: its cell is not the planned one")
    kept = (
        "epsilon",
        "epsilon_total",
        "draws",
        "examples",
        "dimension",
        "eta",
        "seconds_train",
        "seconds_cpu",
        "seconds_prepare",
        "tested",
    )
    names = [key for key in record if key.startswith(("test_", "validation_")) or key in kept]
    score = record.get("score", "accuracy")
    try:
        spent = epsilon(ledger, cell["delta"], cell["accountant"])
        _check_total(path, ledger, cell, record)
        numbers = {key: float(record[key]) for key in names}
        numbers |= {f"noise_{kind}": float(value) for kind, value in record.get("noise", {}).items()}
        numbers["test_score"] = numbers[f"test_{score}"]
        numbers["validation_score"] = numbers.get(f"validation_{score}", math.nan)
        numbers["selection_score"] = released_score(record)
        further = _further(record.get("scores", {}))
        origin = _origin(record["provenance"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise Damaged(f"{path}: {type(error).__name__} {error}") from error
    if not math.isclose(numbers["epsilon"], spent, rel_tol=1e-6):
        raise Damaged(f"{path}: states epsilon {numbers['epsilon']}, its ledger spends {spent}")
    return {"state": record["status"], "score": score} | numbers | further | origin


def _check_total(path: Path, ledger: Ledger, cell: dict[str, Any], record: dict[str, Any]) -> None:
    """Raise `Damaged` where a record does not state what its search spends, recomputed from its ledger."""
    if "selection" not in cell:
        return
    stated = float(record.get("epsilon_total", math.nan))
    rule = selection_rule(cell["selection"])
    is_trained = not cell.get("untrained", False)
    spent = rule.epsilon(ledger, cell["delta"], cell["accountant"]) if is_trained else float(cell["epsilon"])
    if not math.isclose(stated, spent, rel_tol=1e-6):
        raise Damaged(f"{path}: states epsilon {stated} for its search, which spends {spent}")


def _further(scores: dict[str, Any]) -> dict[str, float]:
    """The numbers among a record's further scores; null is one that could not be computed."""
    numbers = {name: math.nan if value is None else value for name, value in scores.items()}
    return {f"score_{name}": float(value) for name, value in numbers.items() if isinstance(value, int | float)}


def _origin(provenance: dict[str, Any]) -> dict[str, Any]:
    """What a published frame says of where a number came from."""
    versions = {f"version_{name}": value for name, value in provenance.get("versions", {}).items()}
    return {key: provenance.get(key) for key in ("commit", "dirty", "device", "cpu", "python")} | versions


def select(cells: pd.DataFrame) -> pd.DataFrame:
    """The run that each replicate would release: its best on the validation split, never on the test split.

    A search that is charged goes by the scores that its runs have released, noise included; one in several parts
    releases its last run. A run that has diverged, or whose score is not a number, is the worst.

    Selection is made for each seed on its own, as someone with one private data set would. A group with a tuning run
    that has no result is left out: the best of what happened to finish is not what the procedure releases.

    Returns:
        One row for each group and seed, with `selected_by` (its score, -inf where that is the worst), `runs` (trained
        runs of that group and seed), `run_ids` (what the search is charged for: those runs, and one again for each that
        a grid which widens might still have made; where a refinement has added a point, all runs of the grid and the
        refinement, of all seeds, as points follow from means over them), `selection` ("" where runs of several rules
        are compared: a rule prices one search, and of several all runs are charged), and `edges`: which of the selected
        numbers are the largest ("lr ↑") or smallest that the label's search tries.
    """
    cells = cells.assign(widen=cells.get("widen", 0), is_widened=cells.get("is_widened", False))  # new columns
    ends = _ends(cells[~cells["is_widened"]])
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in cells.to_dict("records"):
        place = tuple("" if pd.isna(row[key]) else row[key] for key in (*GROUP, "seed"))  # two NaN are not equal
        groups.setdefault(place, []).append(row)
    refinements: dict[tuple[Any, ...], list[list[dict[str, Any]]]] = {}
    for rows in groups.values():
        refinements.setdefault(_refinement(rows), []).append(rows)
    chosen = []
    for rows in groups.values():
        last = "final" if any(row["stage"] for row in rows) else ""
        released = [row for row in rows if row["stage"] == last]
        searches = refinements[_refinement(rows)] if any(row["is_refined"] for row in rows) else [rows]
        is_damaged = any(row["state"] == "damaged" for search in searches for row in search)
        if not released or is_damaged or not all(row["state"] in RESULTS for row in rows):
            continue
        best = max(released, key=_selected_by)
        runs, run_ids = sum(row["is_trained"] for row in rows), together(map(_charged, searches))
        edges = "" if last else _edges(best, ends[best["workload"], best["label"]], rows)
        own = {"selected_by": _selected_by(best), "runs": runs, "run_ids": run_ids, "edges": edges}
        is_one_rule = len({row["selection"] for row in rows}) == 1
        chosen.append({**best, **own, "selection": best["selection"] if is_one_rule else ""})
    return pd.DataFrame(chosen)


def _selected_by(row: Mapping[str, Any]) -> float:
    return score_or_worst(row["selection_score"], row["state"])


def _refinement(rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    return tuple(rows[0][key] for key in REFINED)


def together(searches: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The runs of several searches: a run that is part of several is named as often as by one of them."""
    named: Iterator[Counter[str]] = map(Counter, searches)
    return tuple(reduce(or_, named, Counter[str]()).elements())


def _charged(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """The runs of a group and seed, and the first again for each that a grid which widens might have made and has not.

    How many it makes follows from scores, so that these are charged too. All runs of one such search release the same;
    those of another rule were another search. A run without a result has released nothing.
    """
    searches: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        searches.setdefault(row["selection"], []).append(row)
    charged = [row["run_id"] for row in rows if row["state"] in RESULTS]
    for search in searches.values():
        unmade = max(row["widen"] for row in search) - sum(row["is_widened"] for row in search)
        charged += [search[0]["run_id"]] * unmade
    return tuple(charged)


def _ends(cells: pd.DataFrame) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Smallest and largest value of each number that a label is searched over, by workload and label."""
    found: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for row in cells[["workload", "label", "tuned"]].drop_duplicates().to_dict("records"):
        ends = found.setdefault((row["workload"], row["label"]), {})
        for name, value in _numbers(row["tuned"]):
            low, high = ends.get(name, (value, value))
            ends[name] = min(low, value), max(high, value)
    return found


def _numbers(tuned: str) -> list[tuple[str, float]]:
    return [(name, value) for name, value in json.loads(tuned).items() if type(value) in (int, float)]


def _edges(row: Mapping[str, Any], ends: Mapping[str, tuple[float, float]], rows: list[dict[str, Any]]) -> str:
    """The numbers of a point that are at an end of what its label's grids and the `rows` of its search try; which."""
    marks, tried = [], [dict(_numbers(other["tuned"])) for other in rows]
    for name, value in _numbers(row["tuned"]):
        values = [*ends.get(name, ()), *(point[name] for point in tried if name in point)]
        low, high = min(values), max(values)
        marks += [f"{name} {'↑' if value == high else '↓'}"] if low < high and value in (low, high) else []
    return ", ".join(marks)


def validated_best(settings: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The row of each group whose mean `selected_by` is the best; of equal ones that with the smallest setting.

    None of several rows without a score: nothing but the test split tells them apart.
    """
    own = settings.groupby(list(by))["selected_by"]
    told = settings[(own.transform("size") == 1) | (own.transform("max") > -math.inf)]
    return settings.loc[told.sort_values(SWEPT, kind="stable").groupby(list(by))["selected_by"].idxmax()]


def curves(store: Store, selected: pd.DataFrame, with_diagnostics: bool = False) -> pd.DataFrame:
    """The curves of the selected runs: one row for each entry, with the run's place in the suite.

    A run that does not find its own learning rate has its constant one as `eta`.
    """
    entries = []
    for row in selected.to_dict("records"):
        place = {key: row[key] for key in (*GROUP, "seed", "tuning", "run_id", "score", "lr")}
        entries += [{"eta": row["lr"], **entry, **place} for entry in store.curve(row["run_id"])]
    frame = pd.DataFrame(entries)
    return frame if with_diagnostics else frame.drop(columns="diagnostics", errors="ignore")


class Price(NamedTuple):
    """What a search spends on the records that are trained on.

    Attributes:
        with_tuning: all of it. The best of a random number of runs costs what its rule says. A number that is not
            random hides nothing: the search costs what all of its runs do, whatever a simulation says.
        composed: all of its runs, one after the other.
    """

    with_tuning: float
    composed: float


def epsilon_with_tuning(store: Store, selected: Mapping[str, Any]) -> float:
    """What the search behind a row of `select` spends in all."""
    return price(store, selected).with_tuning


def price(store: Store, selected: Mapping[str, Any]) -> Price:
    """What the search behind a row of `select` spends."""
    rule = selection_rule(json.loads(selected["selection"])) if selected["selection"] else None
    total = composed(store, selected["run_ids"], selected["delta"], selected["accountant"])
    return Price(float(selected["epsilon_total"]) if isinstance(rule, BestOf) else total, total)


def composed(store: Store, run_ids: Sequence[str], delta: float, accountant: str) -> float:
    """What runs cost one after the other, each on the same data.

    Runs with the same seed and number within a search (`search` of a cell) share their draws, as where a suite was run
    again with other values of a grid: what they cost is more than if their draws were independent. So their k-th draws
    are charged as one, which releases what all of them do, at the largest of their rates. That is an upper bound: to be
    in a smaller draw is to be in the larger one and to win a coin that depends on no data, and a release that is left
    to a coin is a degraded one. What is left of the longest run is charged alone. A run that is named again stands for
    a further one with draws of its own, see `select`.
    """
    ledgers, named = dict[tuple[Any, ...], list[Ledger]](), Counter[str]()
    for run_id in run_ids:
        cell, again = store.record(run_id)["cell"], named[run_id]
        draws = (run_id, again) if again else (cell["seed"], cell.get("search", 0))
        ledgers.setdefault(draws, []).append(store.ledger(run_id))
        named[run_id] += 1
    counts, total = Counter[Draw](), Ledger()
    for alike in ledgers.values():
        counts.update(alike[0].counts() if len(alike) == 1 else _merged(alike))
    for draw, count in counts.items():
        total.append(draw, count)
    return epsilon(total, delta, accountant)


def _merged(ledgers: Sequence[Ledger]) -> Counter[Draw]:
    """How often each draw occurs where the k-th draws of all ledgers are one; see `composed`."""
    merged = Counter[Draw]()
    for draws, same in groupby(zip_longest(*ledgers)):
        there = [draw for draw in draws if draw is not None]
        noises = tuple(noise for draw in there for noise in draw.noises)
        merged[Draw(max(draw.rate for draw in there), noises)] += sum(1 for _ in same)
    return merged
