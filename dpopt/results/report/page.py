"""The page of a suite: its tables and figures with the command that makes each again, problems and provenance.

It holds no date and nothing of the machine that sets it: the same store gives the same bytes.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from dpopt.errors import ConfigError
from dpopt.results import figures, papers, tables
from dpopt.results.report import content, svg
from dpopt.results.report.sheet import Drawing, grid, sheet
from dpopt.results.results import Results
from dpopt.results.writing import Table


def page(
    known: Results,
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    further: Sequence[Table] = (),
) -> str:
    """The page of a suite, however much of it is done.

    Args:
        known: what is stored of the suite.
        folder: of the figures, usually `plots`.
        overrides: of the command line, for the commands on the page; by default the suite's name alone.
        further: tables to show below the comparison.

    Raises:
        ConfigError: a file in `folder` is no figure.
    """
    store, suite, given = known.store, known.suite, shlex.join(overrides or [f"suite={known.suite}"])
    manifest, cells, comparison = store.manifest(suite), known.cells, known.table()
    drawn = [plot for plot in figures.plots(folder) if plot.needs in figures.OF_SUITES]
    return sheet(
        suite,
        [*_of_suite(known.comparison, comparison, manifest, given), *further],
        [draw(plot, known, f"figure-{k}") for k, plot in enumerate(drawn, 1)],
        manifest.get("description", ""),
        suite=suite,
        title=f"{suite}: dpopt report",
        given=given,
        states=content.states(cells),
        failures=content.failures(store, cells),
        damages=content.damages(known.stored),
        unfinished=int(cells.drop_duplicates("run_id")["state"].isin(["running", "interrupted", "pending"]).sum()),
        setting=content.setting(cells),
        provenance=grid(Table(content.provenance(cells), "What the finished cells were run with")),
    )


def _of_suite(chosen: pd.DataFrame, comparison: pd.DataFrame, manifest: Mapping[str, Any], given: str) -> list[Table]:
    """The headline of the chosen settings and the comparison of all, with the numbers of a paper that is named."""
    if comparison.empty:
        return []
    best, scores = content.headline(chosen), tables.further_scores(comparison)
    options, remarks = [f"scores=[{','.join(scores)}]"] if scores else [], list[str]()
    if manifest.get("published"):
        try:
            comparison, remarks = papers.beside(comparison, manifest, scores)
            options.append("compare=published")
        except ConfigError as error:
            remarks = [f"Published numbers are left out: {error}."]
    command = " ".join(["dpopt table", given, *map(shlex.quote, options)])
    all_rows = replace(tables.as_table(comparison, "Every finished row", scores, remarks), command=command)
    return [Table(best, "Best private methods", content.HEADLINE_NOTE), all_rows] if len(best) else [all_rows]


def draw(plot: figures.Plot, known: Results, place: str) -> Drawing:
    """One figure, its ids beginning with `place`; where it cannot be drawn the page has all but this figure."""
    import matplotlib.pyplot as plt

    (caption, legend), before = _captions(plot), plt.get_fignums()
    drawn, problem = "", "nothing that it needs is stored"
    try:
        if figure := known.draw(plot):
            drawn, problem = svg.render(figure, place, caption), ""
    except Exception as error:  # the file is anyone's, and the suite may be half done
        problem = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    for number in set(plt.get_fignums()) - set(before):
        plt.close(number)
    return Drawing(plot.name, caption, legend, Markup(drawn), problem)


def _captions(plot: figures.Plot) -> tuple[str, str]:
    """What a figure's file says that it shows, and how it says that it is read."""
    said = inspect.cleandoc(getattr(plot.draw, "__globals__", {}).get("__doc__") or plot.name)
    caption, _, rest = said.replace("`", "").partition("\n")
    return caption, " ".join(f"{rest} {inspect.getdoc(plot.draw) or ''}".replace("`", "").split())
