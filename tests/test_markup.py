"""A label that is made to be more than a label comes out as it was written, as another parser of each format reads."""

import csv
import html
import io
import json
import re

import pandas as pd
import pytest
from markdown_it import MarkdownIt

from dpopt import markup
from dpopt.cli import main
from dpopt.cli.console import complain, print_table
from dpopt.markup import LATEX, MARKDOWN, TERMINAL
from dpopt.results.writing import Table

LABELS = [
    "dp_sgd",
    "a & b # c % d $ e ~ f ^ g",
    r"\input{/etc/passwd}",
    r"\write18{id} \\[1em] {} }",
    "$x_1$",
    "[/nope]",
    "[red]x[/red]",
    r"\[bold]",
    "x\\",
    "<script>alert(1)</script>",
    "a|b||c",
    r"a\|b",
    "[text](javascript:x)",
    "![x](y)",
    "**a** _b_ `c` ~~d~~ &lt; <i>",
    "=HYPERLINK(1)",
    "+1",
    "-1",
    "@SUM(1)",
    " =1",
    "＝1",
    ":smile:",
    "ε ± δ",
]
HIDDEN = ["\x1b[31mred", "a\rb", "a\nb", "a\tb", "\x07", "a\x00b", "\x9b31m", "\u202eabc", "\u2028", "\ud800", "=1\r"]
"""Labels with signs that are not seen."""


@pytest.mark.parametrize("text", [*LABELS, *HIDDEN])
@pytest.mark.parametrize("style", [markup.PLAIN, MARKDOWN, LATEX, TERMINAL])
def test_nothing_unseen_comes_out(text, style):
    shown = style.escape(text)
    assert shown.isprintable()
    assert shown.encode()


@pytest.mark.parametrize("text", LABELS)
def test_a_seen_text_stays(text):
    assert markup.line(text) == markup.lines(text) == text


def test_line_ends_stay_between_lines():
    assert markup.lines("a\n\tb\x1b") == "a\n\tb␛"
    assert markup.line("a\n\tb\x1b") == "a␊␉b␛"


@pytest.mark.parametrize("text", LABELS)
def test_markdown(text):
    table = Table(pd.DataFrame({text: ["x"], "other": [text]})).markdown
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(table)
    cells = [token for token in tokens if token.type == "inline"]
    kinds = {child.type for cell in cells for child in cell.children}
    assert kinds <= {"text", "text_special"}, kinds
    read = ["".join(child.content for child in cell.children) for cell in cells]
    assert read == [text.strip(), "other", "x", text.strip()]


@pytest.mark.parametrize("text", [text for text in LABELS if text == text.strip()])
def test_bold_markdown(text):
    (inline,) = (t for t in MarkdownIt("commonmark").parse(MARKDOWN.bold(MARKDOWN.escape(text))) if t.type == "inline")
    assert "".join(child.content for child in inline.children) == text


SIGNS = {r"\textbackslash": "\\", r"\textasciitilde": "~", r"\textasciicircum": "^", r"\textless": "<"}
SIGNS |= {r"\textgreater": ">", r"\textbar": "|", r"\pm": "±", r"\infty": "∞", r"\delta": "δ", r"\varepsilon": "ε"}
SIGNS |= {rf"\{sign}": sign for sign in "{}$&#%_"}


def read_latex(text):
    """What LaTeX shows; an error for a command or a sign that `SIGNS` does not know."""
    tokens = re.findall(r"\\[A-Za-z]+|\\.|[^\\]", text)
    assert "".join(tokens) == text
    shown = []
    for token in tokens:
        assert token in SIGNS or token not in "\\&#%_~^<>|", token
        shown.append(SIGNS.get(token, "" if token in "{}$" else token))
    return "".join(shown)


@pytest.mark.parametrize("text", LABELS)
def test_latex(text):
    assert read_latex(LATEX.escape(text)) == text
    assert not re.match(r"\s*[\[*]", LATEX.escape(text)), "after a row, these would be arguments"


@pytest.mark.parametrize("text", LABELS)
def test_csv(text):
    table = pd.DataFrame({"label": [text, "x"], text: [1.5, -2.0]})
    header, first, second = csv.reader(io.StringIO(Table(table).csv))
    for cell in (header[1], first[0]):
        assert cell in (text, f"'{text}")
        assert not re.match(r"\s*[=+\-@＝]", cell)
    assert (first[1], second[1]) == ("1.5", "-2.0"), "numbers stay numbers"


@pytest.mark.parametrize("text", [*LABELS, *HIDDEN])
def test_a_table_on_the_terminal(text, capsys):
    print_table({"name": [text], text: ["x"]})
    print_table({TERMINAL.escape(text): [TERMINAL.bold(TERMINAL.escape(text))]}, is_styled=True)
    complain("error", text)
    out, err = capsys.readouterr()
    shown = markup.line(text)
    assert out.count(shown.strip()) == 4
    assert markup.lines(text).expandtabs().split() == err.removeprefix("error:").split()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)


@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_figure_takes_no_text_for_mathematics(tmp_path):
    from dpopt.results import figures

    (tmp_path / "named.py").write_text(
        'NEEDS = "speed"\nimport matplotlib.pyplot as plt\n'
        "def draw(frame, styles):\n    figure = plt.figure()\n    figure.suptitle(' '.join(frame['label']))\n"
        "    return figure\n"
    )
    (plot,) = figures.plots(tmp_path)
    frame = pd.DataFrame({"label": [r"$\frac{", "$x$", "\x1b[31m"], "value": [1.0, 2.0, 3.0]})
    assert set(figures.render(plot.figure(frame))) == {"svg", "png"}
    assert frame["label"][1] == "$x$"


NASTY = ["[/nope]", "=cmd|x", r"\input{x}", "<script>", "a|b", "\x1b[31m$", "@x & _y_ #"]


SUITE = """
defaults: [suite, _self_]
description: <b>[/x]
workloads: [{name: synthetic_logreg, dim: 3}]
epsilon: 4
epochs: 0.2
accountant: rdp
seeds: 0
engine: inline
"""


@pytest.fixture
def nasty(tmp_path):
    """A finished suite whose labels are made to be more than labels."""
    of = {label: {"name": "dp_sgd", "tuning": "fixed", "fields": {"lr": 0.1 + k}} for k, label in enumerate(NASTY)}
    path = tmp_path / "nasty.yaml"
    path.write_text(f"{SUITE}optimizers: {json.dumps(NASTY)}\nsettings: {json.dumps(of)}\n")
    arguments = [f"suite={path}", f"results={tmp_path / 'results'}"]
    assert main(["run", *arguments]) == 0
    return arguments, tmp_path / "results" / "suites" / "nasty"


@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_suite_of_labels_that_mean_harm(nasty, capsys):
    """From the plan to the report: nothing fails, and every file shows the labels and nothing else."""
    arguments, folder = nasty
    capsys.readouterr()
    for command in ("plan", "status", "table", "rank", "report", "collect"):
        assert main([command, *arguments]) == 0, command
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        if command in ("plan", "table"):
            assert all(markup.line(label) in out for label in NASTY)
    for file in folder.iterdir():
        if file.suffix != ".parquet":
            assert "\x1b" not in file.read_text("utf-8"), file
    assert "<script>" not in (folder / "report.html").read_text("utf-8").partition("<body>")[2].partition("<script>")[0]
    assert r"\input{x}" not in (folder / "table.tex").read_text("utf-8")
    labels = {row["label"] for row in csv.DictReader((folder / "table.csv").read_text("utf-8").splitlines())}
    assert {label.removeprefix("'") for label in labels} == {markup.line(label) for label in NASTY}
    assert not any(re.match(r"[=+\-@]", label) for label in labels)
    read = MarkdownIt("commonmark").enable("table").render((folder / "table.md").read_text("utf-8"))
    assert all(html.escape(markup.line(label)) in read for label in NASTY)
