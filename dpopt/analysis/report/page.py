"""The page itself: tables that can be sorted, figures that stand in it, and the command that makes each again.

It holds no date and nothing of the machine that sets it: the same store gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dpopt.analysis import figures, published, tables
from dpopt.analysis.report import content, svg
from dpopt.analysis.report.content import Part
from dpopt.analysis.results import Results
from dpopt.errors import ConfigError
from dpopt.markup import PLAIN, lines

HERE = Path(__file__).parent
NUMBER = re.compile(r"([-−+]?)(\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|∞)(?=[\s%]|$)")
"""A number that a text begins with: "91.2 ± 0.4", "1.0e-05", "∞"; not "3d_cnn"."""


class Column(NamedTuple):
    """A column's name, and whether it holds numbers."""

    name: str
    is_numeric: bool


class Cell(NamedTuple):
    """A cell's text, and the number in it as JavaScript reads it; empty for none."""

    text: str
    number: str


class Row(NamedTuple):
    """The cells of a row, and whether it is set in bold."""

    cells: list[Cell]
    is_strong: bool


class Table(NamedTuple):
    """A `Part` as the template takes it."""

    title: str
    columns: list[Column]
    rows: list[Row]
    note: str
    command: str


class Drawing(NamedTuple):
    """One figure of the page.

    Attributes:
        name: its file in `plots/`, without `.py`.
        caption: what it shows.
        legend: how it is read.
        svg: an `<svg>` element; empty where there is none.
        problem: why there is none.
    """

    name: str
    caption: str
    legend: str
    svg: Markup
    problem: str


def page(
    known: Results,
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    further: Sequence[Part] = (),
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
    return _set(
        suite=suite,
        description=manifest.get("description", ""),
        given=given,
        states=content.states(cells),
        tables=[_table(part) for part in [*_of_suite(known.comparison, comparison, manifest, given), *further]],
        figures=[draw(plot, known, f"figure-{k}") for k, plot in enumerate(drawn, 1)],
        failures=content.failures(store, cells),
        damages=content.damages(known.stored),
        unfinished=int(cells.drop_duplicates("run_id")["state"].isin(["running", "interrupted", "pending"]).sum()),
        setting=content.setting(cells),
        provenance=_table(Part("What the finished cells were run with", content.provenance(cells))),
    )


def _of_suite(chosen: pd.DataFrame, comparison: pd.DataFrame, manifest: Mapping[str, Any], given: str) -> list[Part]:
    """The headline of the chosen settings and the comparison of all, with the numbers of a paper that is named."""
    if comparison.empty:
        return []
    best, scores = content.headline(chosen), tables.further_scores(comparison)
    options, remarks = [f"scores=[{','.join(scores)}]"] if scores else [], list[str]()
    if manifest.get("published"):
        try:
            comparison, remarks = published.beside(comparison, manifest, scores)
            options.append("compare=published")
        except ConfigError as error:
            remarks = [f"Published numbers are left out: {error}."]
    rows, strong = tables.readable(comparison, PLAIN, scores), list(comparison["is_best"])
    command = " ".join(["dpopt table", given, *map(shlex.quote, options)])
    all_rows = Part("Every finished row", rows, tables.footer(comparison, remarks), command, strong)
    return [Part("Best private methods", best, content.HEADLINE_NOTE), all_rows] if len(best) else [all_rows]


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


def _table(part: Part) -> Table:
    lines = [[_cell(value) for value in row] for row in part.frame.itertuples(index=False, name=None)]
    columns = [Column(str(name), _is_numeric(line[at] for line in lines)) for at, name in enumerate(part.frame)]
    rows = [Row(*pair) for pair in zip(lines, part.strong or [False] * len(lines), strict=True)]
    return Table(part.title, columns, rows, part.note, part.command)


def _is_numeric(cells: Iterable[Cell]) -> bool:
    """Whether at least half of what is not empty are numbers."""
    filled = [cell.number != "" for cell in cells if cell.text]
    return any(filled) and sum(filled) >= len(filled) / 2


def _cell(value: Any) -> Cell:
    text = content.text(value)
    return Cell(text, number(text))


def number(text: str) -> str:
    """The number that `text` begins with, as JavaScript reads it; empty where there is none."""
    found = NUMBER.match(text)
    if not found:
        return ""
    sign, digits = found.groups()
    return sign.replace("−", "-").replace("+", "") + digits.replace(",", "").replace("∞", "Infinity")


def breakable(text: str) -> Markup:
    """A name as markup that a narrow column may break after its punctuation."""
    return Markup(re.sub(r"([(=,_])", r"\1<wbr>", str(escape(lines(text)))))


def _set(**parts: Any) -> str:
    """The parts in the page's template: what is not made as markup stays text."""
    style, script = ((HERE / name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    templates = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        finalize=lambda value: lines(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["breakable"] = breakable
    template = templates.get_template("page.html")
    return template.render(**parts, style=Markup(style), script=Markup(script), digest=digest)
