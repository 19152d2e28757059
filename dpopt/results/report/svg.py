"""Figures as SVG that can stand beside others in one HTML page, the same bytes each time."""

from __future__ import annotations

import io
import re
from typing import Any
from xml.etree import ElementTree

# A dark page would have white boxes, were these not the page's colours.
_INKS = {"#000000": "var(--ink)", "#ffffff": "var(--paper)"}


def render(figure: Any, name: str, label: str) -> str:
    """A matplotlib figure as an `<svg>` element, as wide as drawn at most; the figure is left open.

    Args:
        figure: what to draw.
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
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]
