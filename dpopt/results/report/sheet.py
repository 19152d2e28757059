"""Tables and figures on one HTML page: tables can be sorted, and nothing is loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dpopt.markup import lines
from dpopt.results.writing import Table

_HERE = Path(__file__).parent
_NUMBER = re.compile(r"([-−+]?)(\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|∞)(?=[\s%]|$)")
"""A number that a text begins with: "91.2 ± 0.4", "1.0e-05", "∞"; not "3d_cnn"."""


# A dark page would have white boxes, were these not the page's colours.
_INKS = {"#000000": "var(--ink)", "#ffffff": "var(--paper)"}


def sheet(
    heading: str, tables: Sequence[Table], figures: Sequence[Mapping[str, str]] = (), description: str = "", **more: Any
) -> str:
    """A page; with `more`, see `page`, that of a suite. What is not made as markup stays text.

    Figures have a `name`, a `caption`, a `legend` on how they are read, and `svg`, or in its place a `problem`.
    """
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
    parts = {"title": heading, "heading": heading, "description": description, "suite": "", "states": "", "first": ()}
    parts |= more
    parts |= {"tables": [grid(table) for table in tables], "figures": figures}
    template = templates.get_template("page.html")
    return template.render(**parts, style=Markup(style), script=Markup(script), digest=digest)


def grid(table: Table) -> dict[str, Any]:
    """A table as the template takes it: columns and cells with their texts, and the numbers that they sort by."""
    kinds = dict.fromkeys(table.italic, "reference") | dict.fromkeys(table.bold, "strong")
    names, rows, columns = [str(name) for name in table.frame], [], []
    for at, row in enumerate(table.frame.itertuples(index=False, name=None)):
        shown = zip(names, map(text, row), strict=True)
        rows.append(
            [{"text": cell, "number": _number(cell), "kind": kinds.get((at, name), "")} for name, cell in shown]
        )
    for at, name in enumerate(names):
        filled = [row[at]["number"] != "" for row in rows if row[at]["text"]]
        # Half of them are enough: a column of numbers also has words, such as "not charged".
        columns.append({"name": name, "is_numeric": any(filled) and sum(filled) >= len(filled) / 2})
    texts = {key: getattr(table, key) for key in ("title", "first", "note", "details", "command", "rules")}
    return texts | {"columns": columns, "rows": rows}


def text(value: Any) -> str:
    """A value as people read it; nothing for what is missing."""
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return ""
    return f"{value:.4g}".replace("inf", "∞") if isinstance(value, float) else str(value)


def _number(text: str) -> str:
    """The number that `text` begins with, as JavaScript reads it; empty where there is none."""
    match = _NUMBER.match(text)
    if not match:
        return ""
    sign, digits = match.groups()
    return sign.replace("−", "-").replace("+", "") + digits.replace(",", "").replace("∞", "Infinity")


def _breakable(text: str) -> Markup:
    """A name as markup that a narrow column may break after its punctuation."""
    return Markup(re.sub(r"([(=,_])", r"\1<wbr>", str(escape(lines(text)))))


def inline(figure: Any, name: str, label: str) -> Markup:
    """A matplotlib figure as an `<svg>` element, as wide as drawn at most, the same bytes each time; it is left open.

    Args:
        name: what its ids begin with; no two figures of a page may share it.
        label: what the figure shows, for those who do not see it.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Text stays text: it can be searched and copied, and takes fewer bytes than outlines do.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in root.iter():
        for style in [child for child in parent if _local(child.tag) == "style"]:
            parent.remove(style)  # would hold for the whole page; the page has the same rule for its figures
    for element in root.iter():
        element.tag = _local(element.tag)  # HTML knows the namespaces of <svg>
        attributes = {_local(key): value for key, value in element.attrib.items()}
        # Ids begin with the name of the figure, as those of two figures on one page would clash.
        for key, value in attributes.items():
            if key == "id":
                attributes[key] = f"{name}-{value}"
            elif key == "href" and value.startswith("#"):
                attributes[key] = f"#{name}-{value[1:]}"
            else:
                shown = re.sub("|".join(_INKS), lambda colour: _INKS[colour[0]], value) if key == "style" else value
                attributes[key] = shown.replace("url(#", f"url(#{name}-")
        element.attrib = attributes
    width = 4 / 3 * float(root.get("width", "576pt").removesuffix("pt"))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": label, "style": f"--width: {width:.0f}px"}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _local(name: str) -> str:
    return name.rpartition("}")[2]
