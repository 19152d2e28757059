"""The page of a suite: its tables and figures with the command that makes each again, problems and provenance.

It holds no date and nothing of the machine that sets it: the same store gives the same bytes.
"""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from dpopt.errors import ConfigError
from dpopt.results import figures, papers, tables
from dpopt.results.choosing import Row
from dpopt.results.figures import Plot
from dpopt.results.frames import Stored
from dpopt.results.report.sheet import grid, inline, sheet, text
from dpopt.results.scores import shown
from dpopt.results.writing import Table
from dpopt.store.runs import RESULTS, SETTLED, Store

_STATES = (*SETTLED, "running", "interrupted", "pending")
_AXES = {"batch_size": "B", "epochs": "epochs", "clip": "C"}
_FIRST = "accuracy_vs_epsilon"
_ORIGIN = {"code": "commit", "python": "Python", "device": "device"}


_HEADLINE_NOTE = (
    "Best private method: the highest mean test score of a workload and target ε, among the rows whose whole search "
    "keeps to the target. The search includes B, C and epochs: of several settings of a method, the one that validates "
    "best counts. For reference: the best of the other private rows, whose search spends more than the target, or "
    "which have a value that was set by hand and is not charged. Whether a difference is more than chance is not "
    "tested here."
)


def _headline(table: pd.DataFrame) -> pd.DataFrame:
    """The best private rows for each workload and target epsilon, as people read them; empty where there are none."""
    varied = [key for key in _AXES if table[key].nunique() > 1]

    def named(row: Row) -> str:
        place = [f"{_AXES[key]} = {row[key]:g}" for key in varied if not math.isnan(row[key])]
        return f"{row['label']} ({', '.join(place)})" if place else row["label"]

    def best(rows: pd.DataFrame) -> Row | None:
        finite = rows[rows["mean"].notna()]
        return None if finite.empty else finite.loc[finite["mean"].idxmax()].to_dict()

    def scored(row: Row) -> str:
        return shown(row["score"]).text(row["mean"], row["std"])

    rows = []
    for (workload, target), block in table[table["epsilon_target"] < math.inf].groupby(["workload", "epsilon_target"]):
        if block["mean"].isna().all():
            continue
        first, reference = best(block[~block["is_reference"]]), best(block[block["is_reference"]])
        ceiling = best(table[(table["workload"] == workload) & (table["epsilon_target"] == math.inf)])
        priced = f"{scored(reference)}, ε with tuning {tables.charged(reference)}" if reference else ""
        rows.append(
            {
                "workload": workload,
                "target ε": f"{target:g}",
                "best private method": named(first) if first else "",
                f"test {shown(block['score'].iloc[0]).label}": scored(first) if first else "",
                "ε with tuning": tables.upper(first["epsilon_with_tuning"]) if first else "",
                "for reference": f"{named(reference)}: {priced}" if reference else "",
                "without privacy": f"{named(ceiling)}: {scored(ceiling)}" if ceiling else "",
            }
        )
    return pd.DataFrame(rows).replace("", None).dropna(axis="columns", how="all").fillna("")


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
    keys = {"workload": "workloads", "label": "rows", "epsilon_target": "target ε", "delta": "δ", **_AXES}
    keys |= {"seed": "seeds", "accountant": "accountant"}
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
    names = _ORIGIN | {key: key.removeprefix("version_") for key in cells if key.startswith("version_")}
    rows = []
    for key, name in names.items():
        counts = cells.get(key, pd.Series(dtype=str)).dropna().astype(str).value_counts().sort_index()
        rows += [{"what": name, "value": value, "cells": str(count)} for value, count in counts.items()]
    return pd.DataFrame(rows, columns=["what", "value", "cells"])


def tables_of(
    chosen: pd.DataFrame,
    comparison: pd.DataFrame,
    manifest: Mapping[str, Any],
    of_suite: str,
    named: Callable[[pd.DataFrame], pd.DataFrame] = pd.DataFrame,
) -> list[Table]:
    """The headline and the table of every finished row, with the numbers of a paper that the suite names.

    `chosen` and `comparison` are of one setting for each method and of all; `of_suite` chooses the suite in a command;
    `named` gives a frame the names that people read.
    """
    if comparison.empty:
        return []
    # Of one setting for each method: choosing one is charged there.
    best, scores = _headline(named(chosen)), tables.further_scores(comparison)
    options, remarks = [f"scores=[{','.join(scores)}]"] if scores else [], list[str]()
    if manifest.get("published"):
        try:
            comparison, remarks = papers.beside(comparison, manifest, scores)
            options.append("compare=published")
        except ConfigError as error:
            remarks = [f"Published numbers are left out: {error}."]
    command = " ".join(["dpopt table", of_suite, *map(shlex.quote, options)])
    shown = tables.as_table(named(comparison), "Every finished row", scores, remarks)
    all_rows = replace(shown, command=command, numbers=comparison)
    return [Table(best, "Best private methods", _HEADLINE_NOTE), all_rows] if len(best) else [all_rows]


def _sentence(rows: pd.DataFrame) -> str:
    """The rows of a workload in a sentence: the highest mean at each target epsilon, and what is not shown worse."""
    workload, score, clauses = rows["workload"].iloc[0], shown(rows["score"].iloc[0]), []
    compared = rows[~rows["is_reference"] & rows["mean"].notna()]
    for target, block in compared.groupby("epsilon_target"):
        best = block.loc[block["mean"].idxmax()]
        others = int(block["is_best"].sum()) - int(best["is_best"])
        more = f", {others} more not shown to be worse" if others else ""
        clauses.append(f"{best['label']} at ε = {target:g} ({score.text(best['mean'], best['std'])}{more})")
    rest = (
        f"the highest mean test {score.label} is that of {'; '.join(clauses)}" if clauses else "no row keeps to its ε"
    )
    return f"{workload}: {rest}."


def page(
    store: Store,
    suite: str,
    stored: Stored,
    chosen: pd.DataFrame,
    tables: Sequence[Table],
    draw: Callable[..., Any],
    plots: Path,
    of_suite: str,
) -> str:
    """The page of a suite, however much of it is done.

    Args:
        store, suite, stored: the suite's cells, and where they lie.
        chosen: `Results.comparison` with the names that are read; for each workload of it the page begins with a
            sentence and a figure.
        tables: to show, with the commands that make them again.
        draw: gives a figure of the suite, or of one `workload` of it; None where it has nothing to show.
        plots: folder of the figures' files.
        of_suite: see `tables_of`.
    """
    cells, every = stored.cells, {plot.name: plot for plot in figures.plots(plots) if plot.needs in figures.OF_SUITES}
    lead, first = every.pop(_FIRST, None), list[dict[str, Any]]()
    private = chosen if chosen.empty else chosen[chosen["epsilon_target"] < math.inf]
    for workload, rows in [] if private.empty else private.groupby("workload", sort=False):
        figure = _drawing(lead, partial(draw, workload=workload), f"first-{len(first)}") if lead else {}
        first.append({"svg": "", **figure, "sentence": _sentence(rows)})
    counts = cells.drop_duplicates("run_id")["state"].value_counts()
    listed = [f"{counts[state]} {state}" for state in _STATES if state in counts]
    failed = cells[cells["state"] == "failed"].drop_duplicates("run_id")
    return sheet(
        suite,
        tables,
        [_drawing(plot, draw, f"figure-{k}") for k, plot in enumerate(every.values(), 1)],
        store.manifest(suite).get("description", ""),
        first=first,
        suite=suite,
        title=f"{suite}: dpopt report",
        arguments=of_suite,
        states=f"{counts.sum()} {'cell' if counts.sum() == 1 else 'cells'}: {', '.join(listed)}.",
        failures=_failures(store, failed),
        damages=[problem for problem in stored.problems if problem.split(" ")[0] not in set(failed["run_id"])],
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
