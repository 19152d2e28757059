"""A label that is made to be more than a label comes out as it was written, as another parser of each format reads."""

import csv
import io
import re

import pandas as pd
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dpopt import markup
from dpopt.cli.console import complain, print_table
from dpopt.markup import LATEX, MARKDOWN, PLAIN, TERMINAL
from dpopt.results.writing import Table

PARTS = [
    r"\input{/etc/passwd}", r"\write18{id} \\[1em]", "$x_1$", "[/nope]", "[red]x", r"\[bold]", "<script>", "a|b||",
    r"\|", "[text](javascript:x)", "![x](y)", "**a** _b_ `c` ~~d~~", "&lt;", "<i>", "=HYPERLINK(1)", "+1", "-1",
    "@SUM(1)", " =1", "＝1", ":smile:", "ε ± δ", "dp_sgd", "a & b # c % d $ e ~ f ^ g", "{}", "\\",
]  # fmt: skip
HIDDEN = [
    "\x1b[31m", "\r", "\n", "\t", "\x07", "\x00", "\x7f", "\x80", "\x9b31m", "\u202e", "\u2028", "\u2066", "\ud800",
]  # fmt: skip
SIGNS = {r"\textbackslash": "\\", r"\textasciitilde": "~", r"\textasciicircum": "^", r"\textless": "<"}
SIGNS |= {r"\textgreater": ">", r"\textbar": "|", r"\pm": "±", r"\infty": "∞", r"\delta": "δ", r"\varepsilon": "ε"}
SIGNS |= {rf"\{sign}": sign for sign in "{}$&#%_"}
seen = st.lists(st.sampled_from([*PARTS, *"ab1 \\[](){}<>|*_`~$&#%^!=+-@:'\""]), min_size=1, max_size=5).map("".join)
texts = st.lists(st.sampled_from([*PARTS, *HIDDEN]) | st.characters(), min_size=1, max_size=5).map("".join)


def each(*labels):
    """Every label is tried, whatever else is drawn."""

    def decorate(test):
        for label in labels:
            test = example(label)(test)
        return settings(max_examples=40, deadline=None)(test)

    return decorate


@each(*PARTS, *HIDDEN)
@given(texts)
def test_nothing_unseen_comes_out(text):
    for style in (PLAIN, MARKDOWN, LATEX, TERMINAL):
        shown = style.escape(text)
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
        assert shown.encode()


def test_a_seen_text_stays_and_line_ends_stay_between_lines():
    assert all(markup.line(text) == markup.lines(text) == text for text in PARTS)
    assert markup.lines("a\n\tb\x1b") == "a\n\tb␛"
    assert markup.line("a\n\tb\x1b") == "a␊␉b␛"


@each(*PARTS)
@given(seen.filter(str.strip))
def test_markdown(text):
    text = " ".join(text.split())
    table = Table(pd.DataFrame({text: ["x"], "other": [text]})).markdown
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(table)
    cells = [token for token in tokens if token.type == "inline"]
    assert {child.type for cell in cells for child in cell.children} <= {"text", "text_special"}
    read = ["".join(child.content for child in cell.children) for cell in cells]
    assert read == [text, "other", "x", text]
    (inline,) = (t for t in MarkdownIt("commonmark").parse(MARKDOWN.bold(MARKDOWN.escape(text))) if t.type == "inline")
    assert "".join(child.content for child in inline.children) == text


def read_latex(text):
    """The text that LaTeX shows; an error for a command or a sign that `SIGNS` does not know."""
    tokens = re.findall(r"\\[A-Za-z]+|\\.|[^\\]", text)
    assert "".join(tokens) == text
    for token in tokens:
        assert token in SIGNS or token not in "\\&#%_~^<>|", token
    return "".join(SIGNS.get(token, "" if token in "{}$" else token) for token in tokens)


@each(*PARTS)
@given(seen)
def test_latex(text):
    assert read_latex(LATEX.escape(text)) == text
    assert not re.match(r"\s*[\[*]", LATEX.escape(text)), "after a row, these would be arguments"


@each(*PARTS)
@given(seen)
def test_csv(text):
    header, first, _ = csv.reader(io.StringIO(Table(pd.DataFrame({"label": [text, "x"], text: [1.5, -2.0]})).csv))
    for cell in (header[1], first[0]):
        assert cell in (text, f"'{text}")
        is_number = re.fullmatch(r"[+-]?[0-9.]+", cell)
        assert is_number or not re.match(r"\s*[=+\-@＝]", cell)
    assert first[1] == "1.5", "numbers stay numbers"


def test_a_number_is_no_formula_and_what_begins_as_one_may_be():
    cells = {
        "-1": "-1",
        "+2.5e-3": "+2.5e-3",
        "-1+cmd|' /C calc'!A0": "'-1+cmd|' /C calc'!A0",
        "-1\n": "'-1␊",
        "-": "'-",
    }
    assert {text: markup.csv(text) for text in cells} == cells


def test_a_table_on_the_terminal(capsys):
    for text in [*PARTS, *("a" + hidden for hidden in HIDDEN)]:
        print_table(Table(pd.DataFrame({"name": [text, "x"]}, dtype=object), text, bold={(0, "name")}))
        complain("error", text)
        out, err = capsys.readouterr()
        assert "".join(out.split()).count("".join(markup.line(text).split())) == 2, "above and in a cell"
        assert markup.lines(text).expandtabs().split() == err.removeprefix("error:").split()
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)


def test_a_figure_takes_no_text_for_mathematics(tmp_path):
    from dpopt.results import figures

    (tmp_path / "named.py").write_text(
        'NEEDS = "speed"\nimport matplotlib.pyplot as plt\n'
        "def draw(frame, styles):\n    figure = plt.figure()\n    figure.suptitle(' '.join(frame['label']))\n"
        "    return figure\n"
    )
    (plot,) = figures.plots(tmp_path)
    frame = pd.DataFrame({"label": [r"$\frac{", "$x$", "[31m"], "value": [1.0, 2.0, 3.0]})
    assert set(figures.render(plot.figure(frame))) == {"svg", "png"}
    assert frame["label"][1] == "$x$"
