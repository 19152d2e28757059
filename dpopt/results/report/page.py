"""The page of a suite: its tables and figures with the command that makes each again, problems and provenance.

It holds no date and nothing of the machine that sets it: the same store gives the same bytes.
"""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from dpopt.errors import ConfigError
from dpopt.results import figures
from dpopt.results.figures import Plot
from dpopt.results.report.sheet import grid, inline, sheet, text
from dpopt.results.scores import shown
from dpopt.results.tables import further_scores
from dpopt.results.writing import Table, named
from dpopt.store.runs import RESULTS, SETTLED, Store

_STATES = (*SETTLED, "running", "interrupted", "pending")


def _failures(store: Store, failed: pd.DataFrame) -> list[dict[str, Any]]:
    """The reasons why cells failed, with the end of the first one's traceback; cells of one reason stand together."""
    reasons: dict[str, dict[str, Any]] = {}
    for row in failed.to_dict("records"):
        error = store.error(row["run_id"])
        end = "\n".join(error["traceback"].strip().splitlines()[-6:])  # which name place and reason
        failure = reasons.setdefault(error["reason"], {"reason": error["reason"], "traceback": end, "cells": []})
        place = f"{row['label']} on {row['workload']}, target ε = {row['epsilon_target']:g}, seed {row['seed']}"
        failure["cells"].append(f"{row['run_id']}: {place}")
    return list(reasons.values())


def _setting(cells: pd.DataFrame) -> dict[str, str]:
    """The values that were planned on each axis."""
    keys = {"workload": "workloads", "label": "rows", "epsilon_target": "target ε", "delta": "δ"}
    keys |= {"batch_size": "B", "epochs": "epochs", "clip": "C", "seed": "seeds", "accountant": "accountant"}
    # A dash is a value too: a suite may have rows with a clipping bound and rows without.
    values = {name: [*map(text, sorted(cells[key].dropna().unique()))] for key, name in keys.items()}
    dashes = {name: ["–"] if cells[key].isna().any() else [] for key, name in keys.items()}
    return {name: ", ".join(values[name] + dashes[name]) for name in values}


def _provenance(cells: pd.DataFrame) -> pd.DataFrame:
    """With which code, versions and devices cells were run, and how many cells with each: what, value, cells."""
    cells = cells[cells["state"].isin(RESULTS)].drop_duplicates("run_id")
    if "commit" in cells:
        # Files that are tracked and were changed make the commit say less than it seems to.
        pairs = zip(cells["commit"], cells["dirty"], strict=True)
        code = [f"{commit} with changed files" if dirty else commit for commit, dirty in pairs]
        cells = cells.assign(code=pd.Series(code, cells.index, dtype=object).where(cells["commit"].notna()))
    names = {"code": "commit", "python": "Python", "device": "device"}
    names |= {key: key.removeprefix("version_") for key in cells if key.startswith("version_")}
    rows = []
    for key, name in names.items():
        counts = cells.get(key, pd.Series(dtype=str)).dropna().astype(str).value_counts().sort_index()
        rows += [{"what": name, "value": value, "cells": str(count)} for value, count in counts.items()]
    return pd.DataFrame(rows, columns=["what", "value", "cells"])


def _sentence(rows: pd.DataFrame) -> str:
    """The rows of a workload in a sentence: the highest mean at each target epsilon, and what is not shown worse."""
    workload, score, clauses = rows["workload"].iloc[0], shown(rows["score"].iloc[0]), []
    for target, block in rows[~rows["is_reference"] & rows["mean"].notna()].groupby("epsilon_target"):
        is_tested = block["is_highest"].any()  # which takes another row, and seeds
        first = block[block["is_highest"] if is_tested else block["mean"] == block["mean"].max()]
        named = " and ".join(first["label"])
        others = block["is_best"].sum() - len(first)
        more = f"; {others} more not shown to be worse" if others > 0 else "" if is_tested else "; not tested"
        numbers = ", ".join(score.text(*pair) for pair in zip(first["mean"], first["std"], strict=True))
        clauses.append(f"{named} at ε = {target:g} ({numbers}{more})")
    if not clauses:
        return f"{workload}: no row keeps to its ε."
    return f"{workload}: the highest mean test {score.label} is that of {', '.join(clauses)}."


def _tables(results: Any, of_suite: str) -> list[Table]:
    """The tables, each with its command; the first has all scores, and the numbers of a paper that the suite names."""
    every = list[Table]()
    if not results.every.empty:
        scores, has_paper = further_scores(results.table()), bool(results.manifest.get("published"))
        options = [f"scores=[{','.join(scores)}]"] if scores else []
        try:
            table = results.show(scores=scores, compare=has_paper)
            options += ["compare=published"] * has_paper
        except ConfigError as error:
            table = results.show(scores=scores)
            table = replace(table, details=f"{table.details} Published numbers are left out: {error}.")
        every.append(replace(table, command=shlex.join(["dpopt", "table", *shlex.split(of_suite), *options])))
    if effects := results.clip_batch():
        every.append(effects)
    return every + [replace(table, command=f"dpopt rank {of_suite}") for table in results.ranks()]


def page(results: Any, plots: Path, of_suite: str) -> str:
    """The page of a `results.Results`, however much of it is done; first a sentence and a figure for each workload.

    `plots` is the folder of the figures' files, and `of_suite` chooses the suite in a command.
    """
    store, suite, cells, draw = results.store, results.suite, results.cells, results.draw
    chosen = named(results.comparison, results.names)
    every = {plot.name: plot for plot in figures.plots(plots) if plot.needs in figures.OF_SUITES}
    lead, first = every.pop("accuracy_vs_epsilon", None), list[dict[str, Any]]()
    private = chosen if chosen.empty else chosen[chosen["epsilon_target"] < math.inf]
    for workload, rows in [] if private.empty else private.groupby("workload", sort=False):
        figure = _drawing(lead, partial(draw, workload=workload), f"first-{len(first)}") if lead else {}
        first.append({"svg": "", **figure, "sentence": _sentence(rows)})
    counts = cells.drop_duplicates("run_id")["state"].value_counts()
    listed = [f"{counts[state]} {state}" for state in _STATES if state in counts]
    failed = cells[cells["state"] == "failed"].drop_duplicates("run_id")
    return sheet(
        suite,
        _tables(results, of_suite),
        [_drawing(plot, draw, f"figure-{k}") for k, plot in enumerate(every.values(), 1)],
        store.manifest(suite).get("description", ""),
        first=first,
        suite=suite,
        title=f"{suite}: dpopt report",
        arguments=of_suite,
        states=f"{counts.sum()} {'cell' if counts.sum() == 1 else 'cells'}: {', '.join(listed)}.",
        failures=_failures(store, failed),
        damages=[problem for problem in results.problems if problem.split(" ")[0] not in set(failed["run_id"])],
        unfinished=counts.sum() - sum(counts.get(state, 0) for state in SETTLED),
        setting=_setting(cells),
        provenance=grid(Table(_provenance(cells), "What the finished cells were run with")),
    )


def _drawing(plot: Plot, draw: Callable[[Plot], Any], place: str) -> dict[str, str]:
    import matplotlib.pyplot as plt

    # The file's docstring has the caption in its first line, and how the figure is read in the rest.
    documented = inspect.cleandoc(getattr(plot.draw, "__globals__", {}).get("__doc__") or plot.name)
    caption, _, rest = documented.replace("`", "").partition("\n")
    legend = " ".join(f"{rest} {inspect.getdoc(plot.draw) or ''}".replace("`", "").split())
    before = plt.get_fignums()
    drawn, problem = "", "nothing that it needs is stored"
    try:
        if figure := draw(plot):
            drawn, problem = inline(figure, place, caption), ""
    except Exception as error:  # the file is anyone's, and the suite may be half done
        problem = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    for number in set(plt.get_fignums()) - set(before):
        plt.close(number)
    return {"name": plot.name, "caption": caption, "legend": legend, "svg": drawn, "problem": problem}
