"""Findings, evidence and README say what the published runs say: tables are made again, numbers in words compared."""

import re
from pathlib import Path
from runpy import run_path

import pytest

TREE = Path(__file__).parents[1]
MADE = run_path(str(TREE / "docs" / "evidence.py"))
TEXTS = {path: path.read_text("utf-8") for path in MADE["PAGES"]}
PARTS = [(path, name) for path, text in TEXTS.items() for _, name, _ in MADE["MARKED"].findall(text)]
FINDINGS = TREE / "docs" / "findings.md"
CODE = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)
SECTIONS = re.split(r"^## ", TEXTS[FINDINGS], flags=re.MULTILINE)[1:]
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")
CHOSEN = {"0.95", "0.01", "0.1"}
"""An average, a registered rate and a bound C that prose names: values that were chosen, not measured."""


def words(text):
    """The number of words outside tables, code and comments."""
    return len(re.sub(r"^(\||<!--).*$", "", CODE.sub("", text), flags=re.MULTILINE).split())


def rows(text):
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("path", "name"),
    [pytest.param(*part, marks=[pytest.mark.slow] * (part[1] in MADE["OF_RUNS"])) for part in PARTS],
    ids=lambda part: part if isinstance(part, str) else part.stem,
)
def test_a_table_is_what_the_published_runs_give(path, name):
    assert MADE["filled"](TEXTS[path], [name]) == TEXTS[path]


def test_a_table_that_was_changed_by_hand_is_noticed():
    changed = TEXTS[FINDINGS].replace("| HyFreeDP, the paper", "| HyFreeDP, some paper", 1)
    assert MADE["filled"](changed, ["summary"]) == TEXTS[FINDINGS] != changed


def test_each_table_is_shown():
    assert {name for _, name in PARTS} == set(MADE["TABLES"])


def test_findings_and_readme_are_short():
    assert words(TEXTS[FINDINGS]) <= 1500
    assert words(TEXTS[TREE / "README.md"]) <= 500


@pytest.mark.parametrize("section", SECTIONS, ids=range(1, len(SECTIONS) + 1))
def test_a_finding_shows_and_says_how_sure_it_is(section):
    assert rows(section) or "![" in section
    assert len(rows(section)) <= 6 + 2
    assert "**For you:**" in section
    assert "**How sure:**" in section
    evidence = re.search(r"\[Evidence\]\((evidence/\w+\.md)\)", section)[1]
    text = (FINDINGS.parent / evidence).read_text("utf-8")
    prose = re.sub(r"\]\([^)]*\)|^\|.*$", "", section, flags=re.MULTILINE)
    shown = {*NUMBER.findall("\n".join(rows(section)) + text), *CHOSEN}
    assert {*NUMBER.findall(prose)} - shown == set()


def test_the_readme_says_of_its_figure_what_its_table_says():
    text = TEXTS[TREE / "README.md"]
    caption = re.search(r"^\*The digits.*?\*$", text, re.MULTILINE | re.DOTALL)[0]
    assert len(NUMBER.findall(caption)) == 4
    assert {*NUMBER.findall(caption)} <= {*NUMBER.findall("\n".join(rows(text)))}


def test_each_page_of_evidence_is_of_a_finding():
    linked = set(re.findall(r"\[Evidence\]\((evidence/\w+\.md)\)", TEXTS[FINDINGS]))
    assert linked == {str(path.relative_to(FINDINGS.parent)) for path in FINDINGS.parent.glob("evidence/*.md")} - {
        "evidence/index.md"
    }
    assert len(SECTIONS) == len(linked) == 10
