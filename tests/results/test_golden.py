"""The texts of published suites, word for word: whatever moves inside of dpopt, a reader sees the same numbers.

`python -m tests.results.test_golden` writes them anew, for a change that is meant; the difference is then read by eye.
"""

import contextlib
import io
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dpopt.cli import main

HERE = Path(__file__).parents[1] / "golden"
PUBLISHED = f"results={Path(__file__).parents[2] / 'results' / 'published'}"
PART = {"quickstart": "epsilon=3", "tuning_free": "epsilon=8", "price_of_tuning": "epsilon=1"}
"""Suites that differ in how they search, and the part that is looked at."""
COMMANDS = {
    "quickstart": ["table scores=[nll]", "rank by=draws", "rank by=seconds against=dp_sgd", "report"],
    "tuning_free": ["rank by=gradients budgets=[1e6]", "rank against=dp_adam_composed", "report"],
    "price_of_tuning": ["table", "rank", "leaderboard"],
}


class Tables(HTMLParser):
    """The tables of a page as text, a line a row, each with the paragraphs below it."""

    def __init__(self):
        super().__init__()
        self.lines, self.inside = [], ""

    def handle_starttag(self, tag, attributes):
        if tag in ("caption", "tr") or (tag == "p" and ("class", "note") in attributes):
            self.lines.append("")
            self.inside = tag
        elif tag == "section":
            self.inside = ""
        elif tag in ("td", "th") and self.lines[-1]:
            self.lines[-1] += " | "

    def handle_data(self, data):
        if self.inside:
            self.lines[-1] += " ".join(data.split(" ")).replace("\n", "")


def printed_by(suite, command):
    """What a command prints of a published suite, without what depends on the machine."""
    name, *options = command.split()
    with tempfile.TemporaryDirectory() as folder:
        where = [f"suite={suite}", PART[suite], PUBLISHED, *options]
        if name != "report":
            return run(name, *where)
        page = Path(folder, "page.html")
        run(name, *where, f"plots={folder}", f"to={page}")
        parser = Tables()
        parser.feed(page.read_text("utf-8").partition('<section aria-labelledby="problems">')[0])
        return "\n".join(line for line in parser.lines if line and not line.startswith("Made by")) + "\n"


def run(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(arguments) == 0
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def golden(suite):
    """All that is kept of a suite, a title for each command."""
    return "\n".join(f"# {command}\n{printed_by(suite, command)}" for command in COMMANDS[suite])


@pytest.mark.parametrize(
    "suite",
    ["quickstart", *(pytest.param(suite, marks=pytest.mark.slow) for suite in ("price_of_tuning", "tuning_free"))],
)
def test_readers_of_published_suites_see_the_same_texts(suite):
    assert golden(suite) == (HERE / f"{suite}.txt").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("suite", COMMANDS)
def test_each_published_suite_is_verified(suite):
    printed = run("verify", f"suite={suite}", str(PUBLISHED).removesuffix("/published"))
    assert printed.splitlines()[-1].endswith(" verified: 0 mismatches")


if __name__ == "__main__":
    for suite in sys.argv[1:] or COMMANDS:
        (HERE / f"{suite}.txt").write_text(golden(suite), "utf-8")
