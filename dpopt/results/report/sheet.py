"""Tables and figures on one HTML page: tables can be sorted, and nothing is loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dpopt.markup import lines
from dpopt.results.writing import Table

_HERE = Path(__file__).parent
_NUMBER = re.compile(r"([-−+]?)(\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|∞)(?=[\s%]|$)")
"""A number that a text begins with: "91.2 ± 0.4", "1.0e-05", "∞"; not "3d_cnn"."""


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


def sheet(
    heading: str, tables: Sequence[Table], figures: Sequence[Drawing] = (), description: str = "", **more: Any
) -> str:
    """A page; with `more`, see `page`, that of a suite. What is not made as markup stays text."""
    style, script = ((_HERE / name).read_text("utf-8") for name in ("page.css", "page.js"))
    # The page allows this one script by its digest, so that nothing in a table can run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    templates = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        finalize=lambda value: lines(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["breakable"] = _breakable
    parts = {"suite": "", "states": "", "title": heading, "heading": heading, "description": description} | more
    parts |= {"tables": [grid(table) for table in tables], "figures": figures}
    template = templates.get_template("page.html")
    return template.render(**parts, style=Markup(style), script=Markup(script), digest=digest)


def grid(table: Table) -> dict[str, Any]:
    """A table as the template takes it: columns and cells with their texts, and the numbers that they sort by."""
    kinds = dict.fromkeys(table.italic, "reference") | dict.fromkeys(table.bold, "strong")
    names, rows, columns = [str(name) for name in table.frame], [], []
    for at, row in enumerate(table.frame.itertuples(index=False, name=None)):
        shown = zip(names, map(text, row), strict=True)
        rows.append([{"text": cell, "number": number(cell), "kind": kinds.get((at, name), "")} for name, cell in shown])
    for at, name in enumerate(names):
        filled = [row[at]["number"] != "" for row in rows if row[at]["text"]]
        # Half of them are enough: a column of numbers also has words, such as "not charged".
        columns.append({"name": name, "is_numeric": any(filled) and sum(filled) >= len(filled) / 2})
    return {"title": table.title, "columns": columns, "rows": rows, "note": table.note, "command": table.command}


def text(value: Any) -> str:
    """A value as people read it; nothing for what is missing."""
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return ""
    return f"{value:.4g}".replace("inf", "∞") if isinstance(value, float) else str(value)


def number(text: str) -> str:
    """The number that `text` begins with, as JavaScript reads it; empty where there is none."""
    match = _NUMBER.match(text)
    if not match:
        return ""
    sign, digits = match.groups()
    return sign.replace("−", "-").replace("+", "") + digits.replace(",", "").replace("∞", "Infinity")


def _breakable(text: str) -> Markup:
    """A name as markup that a narrow column may break after its punctuation."""
    return Markup(re.sub(r"([(=,_])", r"\1<wbr>", str(escape(lines(text)))))
