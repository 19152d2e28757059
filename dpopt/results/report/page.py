"""The page of a suite: its tables and figures with the command that makes each again, problems and provenance.

It holds no date and nothing of the machine that sets it: the same store gives the same bytes.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from dpopt.errors import ConfigError
from dpopt.results import figures, papers, tables
from dpopt.results.figures import Plot
from dpopt.results.frames import Stored
from dpopt.results.report import content, svg
from dpopt.results.report.sheet import Drawing, grid, sheet
from dpopt.results.writing import Table
from dpopt.store.runs import Store


def tables_of(
    chosen: pd.DataFrame, comparison: pd.DataFrame, manifest: Mapping[str, Any], of_suite: str
) -> list[Table]:
    """The headline and the table of every finished row, with the numbers of a paper that the suite names.

    Args:
        chosen, comparison: `tables.comparison` of one setting for each method, and of all.
        of_suite: the arguments of a command that chooses the suite and its part.
    """
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
    command = " ".join(["dpopt table", of_suite, *map(shlex.quote, options)])
    all_rows = replace(tables.as_table(comparison, "Every finished row", scores, remarks), command=command)
    return [Table(best, "Best private methods", content.HEADLINE_NOTE), all_rows] if len(best) else [all_rows]


def page(
    store: Store,
    suite: str,
    stored: Stored,
    tables: Sequence[Table],
    draw: Callable[[Plot], Any],
    plots: Path,
    of_suite: str,
) -> str:
    """The page of a suite, however much of it is done.

    Args:
        store, suite, stored: the suite's cells, and where they lie.
        tables: to show, with the commands that make them again.
        draw: gives a figure of the suite; None where it has nothing to show.
        plots: folder of the figures' files.
        of_suite: see `tables_of`.

    Raises:
        ConfigError: a file in `plots` is no figure.
    """
    cells, chosen = stored.cells, [plot for plot in figures.plots(plots) if plot.needs in figures.OF_SUITES]
    return sheet(
        suite,
        tables,
        [_drawing(plot, draw, f"figure-{k}") for k, plot in enumerate(chosen, 1)],
        store.manifest(suite).get("description", ""),
        suite=suite,
        title=f"{suite}: dpopt report",
        arguments=of_suite,
        states=content.states(cells),
        failures=content.failures(store, cells),
        damages=content.damages(stored),
        unfinished=int(cells.drop_duplicates("run_id")["state"].isin(["running", "interrupted", "pending"]).sum()),
        setting=content.setting(cells),
        provenance=grid(Table(content.provenance(cells), "What the finished cells were run with")),
    )


def _drawing(plot: Plot, draw: Callable[[Plot], Any], place: str) -> Drawing:
    import matplotlib.pyplot as plt

    # The file's docstring has the caption in its first line, and how the figure is read in the rest.
    documented = inspect.cleandoc(getattr(plot.draw, "__globals__", {}).get("__doc__") or plot.name)
    caption, _, rest = documented.replace("`", "").partition("\n")
    legend = " ".join(f"{rest} {inspect.getdoc(plot.draw) or ''}".replace("`", "").split())
    before = plt.get_fignums()
    drawn, problem = "", "nothing that it needs is stored"
    try:
        if figure := draw(plot):
            drawn, problem = svg.render(figure, place, caption), ""
    except Exception as error:  # the file is anyone's, and the suite may be half done
        problem = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    for number in set(plt.get_fignums()) - set(before):
        plt.close(number)
    return Drawing(plot.name, caption, legend, Markup(drawn), problem)
