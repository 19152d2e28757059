"""Every code block of the README and the documentation is run, or checked against what it calls."""

from __future__ import annotations

import json
import lzma
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from runpy import run_path

import matplotlib as mpl
import pytest
import yaml

from dpopt import configurations, registry
from dpopt.cli import COMMANDS, listing, main
from dpopt.errors import ConfigError
from dpopt.results.leaderboard import Leaderboard
from dpopt.results.results import load_results
from dpopt.suites.suite import load_suite

TREE = Path(__file__).parents[1]
TUTORIALS = sorted((TREE / "docs" / "tutorials").glob("*.md"))
LONG = ("matrix", "results", "optimizer", "fit", "paper", "notebook")
"""Tutorials that take long."""
PAGES = [
    *(TREE / name for name in ("README.md", "CONTRIBUTING.md")),
    *(
        path
        for path in sorted((TREE / "docs").rglob("*.md"))
        if "generated" not in path.parts and path not in TUTORIALS
    ),
]
LINKING = sorted({*PAGES, *TUTORIALS, TREE / "ARCHITECTURE.md", TREE / "results" / "README.md"})
SHOWN = r"^`{3,}\{(?:image|figure|include|literalinclude)\} (\S+)$"
LINK = re.compile(rf"\]\(([^()\s]+)\)|{SHOWN}|\{{download\}}`([^`<>]+)`", re.MULTILINE)
BUILT = {TREE / "docs" / "generated" / f"{what}.md": f"dpopt list what={what}" for what in listing.LISTED}
"""Pages of the built site alone that a tracked page may link to -> the command that shows the same."""
FENCE = re.compile(r"^(`{3,})(\S*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
PROSE = ("", "text", "mermaid")
"""Blocks that are no code, beside directives in braces."""


@dataclass(frozen=True)
class Block:
    """A code block: its language, its text, the number of its first line."""

    kind: str
    text: str
    line: int

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a shell block, also those that `&&` joins, without comments and variables in front."""
        lines = self.text.replace("\\\n", " ").replace("&&", "\n").splitlines()
        split = [shlex.split(line, comments=True) for line in lines]
        return [words for words in ([*dropwhile(re.compile("[A-Z_]+=").match, line)] for line in split) if words]


def blocks(path: Path) -> list[Block]:
    text = path.read_text("utf-8")
    found = [(m[2], m[3], text.count("\n", 0, m.start(3))) for m in FENCE.finditer(text)]
    return [Block(kind, content, line) for kind, content, line in found if kind not in PROSE and kind[0] != "{"]


def check_shell(words: list[str]) -> None:
    """Raise where a command would not be understood; nothing is run."""
    program, *arguments = words
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (TREE / "Makefile").read_text(), re.MULTILINE), words
    elif program == "pip":
        for extra in re.findall(r"dpopt\[(\w+)\]", " ".join(arguments)):
            assert f"\n{extra} = [" in (TREE / "pyproject.toml").read_text(), words
    elif program in ("python", "pytest"):
        if "-m" in arguments:
            assert find_spec(arguments[arguments.index("-m") + 1]), words
    elif program == "dpopt":
        check_dpopt(*arguments)
    else:
        assert program in ("eval", "git", "cd", "mkdir", "rsync", "cp"), words


def check_dpopt(name: str, *arguments: str) -> None:
    command = COMMANDS[name]
    overrides = [word for word in arguments if "=" in word]
    keys = command.values()
    for override in overrides:
        assert override.partition("=")[0].lstrip("+").split(".")[0] in keys, (name, override, sorted(keys))
    suites = [word.partition("=")[2] for word in overrides if word.startswith("suite=")]
    of_suite = configurations.keys("suite") if name in ("plan", "run") else []
    for suite in suites[0].strip("[]").split(",") if suites else []:
        load_suite(suite, [o for o in overrides if o.partition("=")[0].lstrip("+").split(".")[0] in of_suite])


def check_yaml(text: str) -> None:
    """A suite, or a part of one, can be loaded; so can the entry of an optimizer or a data set be read."""
    content = yaml.safe_load(text)
    if {"settings", "workloads"} & content.keys():
        whole = {"name": "shown", "optimizers": list(content.get("settings", ["adadp"])), "workloads": ["digits_mlp"]}
        load_suite({**whole, **{key: value for key, value in content.items() if key != "defaults"}})


def run_page(path: Path) -> None:
    """Run the blocks of a page one after the other, in the current folder.

    A block that begins with a comment that is a path is that file; Python's other blocks share their names.
    """
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(path):
        if named := re.match(r"# ([\w/]+\.\w+)\n", block.text):
            Path(named[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(named[1]).write_text(block.text)
        elif block.kind == "python":
            exec(compile("\n" * block.line + block.text, str(path), "exec"), names)
        elif block.kind == "bash":
            for words in block.commands:
                assert words[0] == "dpopt", words
                assert main(words[1:]) == 0, words
        else:
            pytest.fail(f"a block of {block.kind!r} in {path.name}, line {block.line}")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LONG)) for path in TUTORIALS],
    ids=lambda path: path.stem,
)
def test_a_tutorial_runs_as_it_is(path, tmp_path, monkeypatch, capsys):
    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run_page(path)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(TREE)))
def test_a_page_shows_what_there_is(path, tmp_path, monkeypatch, capsys):
    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    for name in ("results/published", "plots"):
        Path(name).symlink_to(TREE / name)
    for block in blocks(path):
        if block.kind == "python":
            code = compile("\n" * block.line + block.text, str(path), "exec", dont_inherit=True)
            exec(code, {"__name__": "page"})
        elif block.kind == "yaml":
            check_yaml(block.text)
        elif block.kind == "bash":
            for words in block.commands:
                check_shell(words)
        else:
            pytest.fail(f"a block of {block.kind!r} in {path.name}, line {block.line}")


@pytest.mark.parametrize(
    "shown", ["dpopt run suite=quickstrat", "dpopt table suite=quickstart optimizer=a", "make all"]
)
def test_what_there_is_not_is_noticed(shown):
    with pytest.raises((AssertionError, ConfigError)):
        check_shell(shlex.split(shown))


def links(text: str) -> list[str]:
    """The files that a page links to or shows, without anchors; other sites and anchors of its own are left out."""
    found = [next(filter(None, match.groups())).partition("#")[0] for match in LINK.finditer(text)]
    return [target for target in found if target and "://" not in target]


@pytest.fixture(scope="module")
def tracked() -> set[Path]:
    """The files and folders that a clone has."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=TREE, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no clone")
    files = {TREE / name for name in done.stdout.split("\0") if name}
    return files | {folder for path in files for folder in path.parents if folder.is_relative_to(TREE)}


@pytest.mark.parametrize("path", LINKING, ids=lambda path: str(path.relative_to(TREE)))
def test_a_page_links_to_what_a_clone_has(path, tracked):
    text = path.read_text("utf-8")
    targets = {Path(os.path.normpath(path.parent / target)) for target in links(text)}
    assert targets - tracked - BUILT.keys() == set()
    assert [command for page, command in BUILT.items() if page in targets and f"`{command}`" not in text] == []


@pytest.mark.parametrize(
    "text",
    ["[table](generated/published_leaderboard.md)", "```{image} a.svg\n```", "{download}`a.xlsx`", "[b](a.md#c)"],
)
def test_a_link_that_a_clone_has_not_is_noticed(text, tracked):
    assert {Path(os.path.normpath(TREE / "docs" / target)) for target in links(text)} - tracked - BUILT.keys()


def test_a_generated_page_says_what_each_optimizer_takes():
    conf, rows = run_path(str(TREE / "docs" / "conf.py")), listing.LISTED["optimizers"]()
    text = conf["optimizers"](rows)
    assert [name for name in registry.optimizers() if f"## {name}\n" not in text] == []
    assert "| `lr` |" in " ".join(text.split())


def test_core_hours_are_those_of_the_records(tmp_path):
    """Runs that two suites hold count once in all; of runs that noted no processor time it is the time that passed."""
    published, hours = TREE / "results" / "published", {}
    for name in ("minilm_head", "quickstart"):
        (tmp_path / name).symlink_to(published / name)
        lines = lzma.decompress((published / name / "runs.jsonl.xz").read_bytes()).splitlines()
        records = [json.loads(line)["record"] for line in lines]
        times = [each["seconds_prepare"] + each.get("seconds_cpu", each["seconds_train"]) for each in records]
        assert ("seconds_cpu" in records[0]) == (name == "quickstart")
        hours[name] = sum(times) / 3600
    (tmp_path / "again").symlink_to(published / "quickstart")
    conf = run_path(str(TREE / "docs" / "conf.py"))
    lines = conf["compute"](conf["records"](tmp_path)).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]
    expected = [hours["quickstart"], hours["minilm_head"], hours["quickstart"], sum(hours.values())]
    assert [row[rows[0].index("core hours")] for row in rows[1:]] == [f"{each:.2f}" for each in expected]


def test_a_page_of_a_suite_says_how_many_of_its_runs_had_uncommitted_changes():
    conf = run_path(str(TREE / "docs" / "conf.py"))
    made = [{"provenance": {"dirty": k < 1500}} for k in range(4000)]
    assert "1,500 of 4,000 runs were trained from a source tree with uncommitted changes" in conf["uncommitted"](made)
    assert conf["uncommitted"](made[1500:]) == ""


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(TREE)}
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for page in ("index", "tutorials/fit", "generated/optimizers", "generated/published_quickstart", "reference/api"):
        assert (tmp_path / "site" / f"{page}.html").stat().st_size > 5000
    sweep = (tmp_path / "site" / "generated" / "published_clip_batch_sweep.html").read_text("utf-8")
    assert "1,837 of 9,030 runs" in sweep


@pytest.mark.slow
@pytest.mark.parametrize("block", ["", "newer"])
def test_the_leaderboards_page_is_made_of_the_published_records(block):
    published = TREE / "results" / "published"
    suites = sorted(path.parent.name for path in published.glob("leaderboard*/runs.jsonl.xz"))
    newer = re.search(r"^NEWER := (.+)$", (TREE / "Makefile").read_text(), re.MULTILINE)[1].split(",")
    board = Leaderboard([load_results(published, suite) for suite in (newer if block else suites)])
    made = board.page(TREE / "plots", "dp_adam")
    folder = TREE / "docs" / "leaderboard" / block
    assert {name for name, content in made.items() if _bytes(content) != (folder / name).read_bytes()} == set()


def _bytes(content):
    return content.encode() if isinstance(content, str) else content
