"""The documentation site. `make docs` builds it, with warnings as errors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd
from sphinx.application import Sphinx

from dpopt import __version__
from dpopt.cli import known
from dpopt.markup import MARKDOWN

project, author, copyright = "dpopt", "the dpopt authors", "the dpopt authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "leaderboard/leaderboard.md"]
html_theme = "furo"
html_title = f"dpopt {release}"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
suppress_warnings = ["misc.highlighting_failure"]

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
GENERATED = HERE / "generated"
LISTED = {"optimizers": "Optimizers", "workloads": "Workloads", "data": "Data sets", "models": "Trained parameters"}
"""What `dpopt list` shows -> the title of its page."""
COMPUTE = """
Everything that is published was computed on CPUs, two cores at most. No number was measured on a GPU yet: `make gpu`
measures a device in one command. Hours are those of the published runs, loading and calibration included, each on one
core beside another one. The features of a frozen backbone, which are computed once, are not in it.
"""
CLAIMS = "What the papers claim and what these runs say"
"""The section of `results/README.md` that is a page of its own."""


def generate(app: Sphinx) -> None:
    """Write the pages that are made of the registry, of the published results and of what says how these are stored."""
    shutil.rmtree(GENERATED, ignore_errors=True)
    GENERATED.mkdir()
    for what, title in LISTED.items():
        rows = [{key: MARKDOWN.escape(value) for key, value in row.items()} for row in known.LISTED[what]()]
        write(what, title, pd.DataFrame(rows).to_markdown(index=False) if what == "models" else cards(rows))
    for figure in RESULTS.glob("published/**/*.svg"):
        copy = GENERATED / "figures" / figure.relative_to(RESULTS / "published")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(figure, copy)
    for table in RESULTS.glob("published/**/table.md"):
        folder = table.parent.relative_to(RESULTS / "published")
        figures = [f"![{path.stem}](figures/{folder}/{path.name})" for path in sorted(table.parent.glob("*.svg"))]
        texts = [path.read_text("utf-8") for path in (table, *sorted(set(table.parent.glob("*.md")) - {table}))]
        write(page(folder), str(folder), "\n\n".join([*texts, *figures]))
    schema, _, claims = (RESULTS / "README.md").read_text("utf-8").partition(f"## {CLAIMS}\n")
    write("results_format", "Format of results", schema.partition("\n")[2])
    write("claims", CLAIMS, claims)
    write("compute", "Statement of compute", f"{COMPUTE}\n{compute()}")


def cards(rows: list[dict[str, str]]) -> str:
    """A section for each row, by its first value, with a line for each other one that is not empty."""
    sections = []
    for row in rows:
        (_, title), *others = row.items()
        sections += [f"## {title}", "\n".join(f"- **{key}**: {value}" for key, value in others if value)]
    return "\n\n".join(sections)


def compute() -> str:
    """A row for each published suite: its runs, and the hours that they took."""
    files = {file.parent.name: file for file in sorted(RESULTS.glob("published/*/cells.parquet"))}
    columns = ["run_id", "seconds_prepare", "seconds_train"]
    suites = {name: pd.read_parquet(file, columns=columns).drop_duplicates("run_id") for name, file in files.items()}
    shown = {f"[{name}]({page(Path(name))}.md)": runs for name, runs in suites.items()}
    shown["in all"] = pd.concat(suites.values()).drop_duplicates("run_id")
    rows = [(name, len(runs), runs[columns[1:]].sum().sum() / 3600) for name, runs in shown.items()]
    return pd.DataFrame(rows, columns=["suite", "runs", "hours"]).to_markdown(index=False, floatfmt=".2f")


def write(name: str, title: str, content: str) -> None:
    """Write a page, with links to published files leading to the pages and figures here."""
    linked = re.sub(r"\]\(published/([\w/]+?)(?:/\w+\.md)?\)", lambda found: f"]({page(Path(found[1]))}.md)", content)
    linked = linked.replace("](published/", "](figures/")
    (GENERATED / f"{name}.md").write_text(f"# {title}\n\n{linked}", "utf-8")


def page(folder: Path) -> str:
    """The name of the page of a published folder."""
    return "_".join(("published", *folder.parts))


def setup(app: Sphinx) -> None:
    """See Sphinx."""
    app.connect("builder-inited", generate)
