"""Figures as SVG that can stand beside others in one HTML page, the same bytes each time."""

from __future__ import annotations

import io
import re
from typing import Any
from xml.etree import ElementTree

REFERENCE = re.compile(r"url\(#")
INKS = {"#000000": "var(--ink)", "#ffffff": "var(--paper)"}
"""The page's colours for what a figure draws in pure black and white, so that a dark page has no white boxes."""
INK = re.compile("|".join(INKS))
POINT = 4 / 3
"""CSS pixels of a point."""


def render(figure: Any, name: str, label: str) -> str:
    """A matplotlib figure as an `<svg>` element; the figure is left open.

    Text stays text: it can be searched and copied, and takes fewer bytes than outlines do.

    Args:
        figure: what to draw.
        name: what its ids begin with; no two figures of a page may share it.
        label: what the figure shows, for those who do not see it.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata=nothing)
    return inline(buffer.getvalue(), name, label)


def inline(document: str, name: str, label: str) -> str:
    """An SVG document as an element of an HTML page, as wide as drawn at most; see `render`."""
    root = ElementTree.fromstring(document)
    for parent in root.iter():
        for style in [child for child in parent if _local(child.tag) == "style"]:
            parent.remove(style)  # would hold for the whole page; the page has the same rule for its figures
    for element in root.iter():
        element.tag = _local(element.tag)  # HTML knows the namespaces of <svg>
        attributes = {_local(key): value for key, value in element.attrib.items()}
        element.attrib = {key: _own(key, value, name) for key, value in attributes.items()}
    width = POINT * float(root.get("width", "576pt").removesuffix("pt"))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": label, "style": f"--width: {width:.0f}px"}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _own(key: str, value: str, name: str) -> str:
    """An attribute's value with its ids, and references to them, made the figure's own; colours as `INKS` has them."""
    if key == "id":
        return f"{name}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    if key == "style":
        value = INK.sub(lambda colour: INKS[colour[0]], value)
    return REFERENCE.sub(f"url(#{name}-", value)
