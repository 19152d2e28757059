"""Text from anyone in what dpopt writes: labels and names are shown as they are, whatever a format would make of them.

A label comes from a suite file or from results that were merged, so it may be made to be more than a label: a command
of LaTeX, a formula of a spreadsheet, HTML, colours of a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape
from typing import NamedTuple

_PICTURES = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_UNSEEN = [*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029, *range(0xD800, 0xE000)]
"""Further control characters, those that turn the direction of writing, line ends, and halves of characters."""
_LINE = _PICTURES | dict.fromkeys(_UNSEEN, 0xFFFD)
_LINES = {code: shown for code, shown in _LINE.items() if chr(code) not in "\n\t"}
_LATEX = {sign: rf"\{sign}" for sign in "{}$&#%_"} | {sign: f"{{{sign}}}" for sign in "[]*"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
_LATEX |= {"±": r"$\pm$", "∞": r"$\infty$", "δ": r"$\delta$", "ε": r"$\varepsilon$", "σ": r"$\sigma$"}
_LATEX |= {"Δ": r"$\Delta$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "†": r"\dag{}", "–": "--"}
# LaTeX's fonts have no pictures of control characters.
_LATEX |= dict.fromkeys(map(chr, _LINE.values()), "?")
_MARKDOWN = re.compile(r"[\\`*<>|$~]|(?<![^\W_])_|_(?![^\W_])|&(?=[#\w])|!(?=\[)|\](?=[\[(:])")
"""An underscore within a word and a bracket that makes no link stay as they are."""
_FORMULA = re.compile(r"(?![+-]?[\d.]+(e[+-]?\d+)?\Z)\s*[=+\-@＝＋－＠]")  # but for a plain number


class TextFormat(NamedTuple):
    """The texts of a format: `escape` gives what shows a text on one line, the others take what it gives."""

    escape: Callable[[str], str]
    bold: Callable[[str], str]
    italic: Callable[[str], str]


def lines(text: str) -> str:
    """`text` with control characters made visible, but for line ends and tabs."""
    return text.translate(_LINES)


def line(text: str) -> str:
    """`text` on one line, with control characters made visible."""
    return text.translate(_LINE)


def csv(text: str) -> str:
    """`text` as a cell that no spreadsheet takes for a formula."""
    return f"'{line(text)}" if _FORMULA.match(text) else line(text)


def figure(text: str) -> str:
    """`text` as matplotlib takes it."""
    return line(text).replace("$", r"\$")


def _markdown(text: str) -> str:
    return _MARKDOWN.sub(lambda sign: f"\\{sign[0]}", line(text))


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in line(text))


PLAIN = TextFormat(line, str, str)
MARKDOWN = TextFormat(_markdown, "**{}**".format, "*{}*".format)
LATEX = TextFormat(_latex, r"\textbf{{{}}}".format, r"\textit{{{}}}".format)
HTML = TextFormat(lambda text: escape(line(text)), "<b>{}</b>".format, "<i>{}</i>".format)
TERMINAL = TextFormat(line, "\x1b[1m{}\x1b[0m".format, "\x1b[3m{}\x1b[0m".format)
"""With the codes of ANSI X3.64, of which `escape` leaves none."""
MARKED = TextFormat(line, "**{}**".format, "*{}*".format)
"""For the columns of a terminal where they are read elsewhere, in a file or a pager."""


def duration(seconds: float) -> str:
    """Seconds as a reader takes them in: "40 seconds", "12 minutes", "3.5 hours"."""
    if seconds < 60:
        return f"{seconds:.2g} seconds"
    return f"{seconds / 60:.2g} minutes" if seconds < 7200 else f"{seconds / 3600:.3g} hours"


FALLEN = "the learning rate ended more than 10 times below its start, as its probes saw noise"


def fallen(noise: Mapping[str, float], start: float, end: float) -> str:
    """`FALLEN`, with the numbers, where a rule that probes losses (a kind of `noise`) ended so far below; else ""."""
    return f"{FALLEN} ({start:.1e}, {end:.1e})" if "losses" in noise and 0 < end < start / 10 else ""
