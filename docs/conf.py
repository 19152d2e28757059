"""The documentation site. `make docs` builds it, with warnings as errors."""

from __future__ import annotations

import inspect
import re
import shutil
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pandas as pd
import yaml
from sphinx.application import Sphinx

from dpopt import __version__, fields, registry
from dpopt.cli import listing
from dpopt.clipping.rules import RULES
from dpopt.errors import ConfigError
from dpopt.markup import MARKDOWN
from dpopt.optimizers.base import Direction
from dpopt.store import Store
from dpopt.types import ClipRule

project, author, copyright = "dpopt", "the dpopt authors", "the dpopt authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "leaderboard/leaderboard.md", "leaderboard/newer/leaderboard.md"]
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
"""What `dpopt list` shows -> the title of its page; a page of the source tree may link to no other generated one."""
FIELDS = f"""
A table shows the fields of each optimizer: the default under this name, and the values that are allowed. *d* is the
number of trained parameters. A *clip rule* is a number (the bound C of Abadi's rule), the name of a rule
({", ".join(f"`{name}`" for name in RULES)}), or a rule with its fields, `{{rule: automatic, bound: 1.0}}`;
[their formulas](../reference/api.md#clipping). Below each table is what the class says: its update rule, and where it
deviates from its paper.
"""
SHOWN = fields.SHOWN | {ClipRule: "a clip rule", fields.Arguments: "names with their values", types.NoneType: "`null`"}
"""An annotation that has no parts -> how a table of fields names it."""
SECTION = re.compile(r"^(Args|Raises):\n((?: {4}.*\n)+)", re.MULTILINE)
"""A section of a docstring, with what is indented under its title."""
COMPUTE = """
Suites of the device `cpu` were computed on two cores at most. Hours are those of the published runs, loading and
calibration included, each on one core beside another one: core hours are the time that the processor computed (of a
run that did not note it, the time that passed), wall hours the time that passed, which is longer where more ran on
the machine. The features of a frozen backbone, which are computed once, are not in it. A run that several suites hold
counts in each, and once in all.
`dirty`: runs whose commit had changed files.
"""
SECONDS = ["seconds_prepare", "seconds_train", "seconds_cpu"]
"""Keys of a record: loading and calibration, the loop, and the processor's time in the loop."""
CLAIMS = "What the papers claim and what these runs say"
"""The section of `results/README.md` that is a page of its own."""


def generate(app: Sphinx) -> None:
    """Write the pages that are made of the registry, of the published results and of what says how these are stored."""
    shutil.rmtree(GENERATED, ignore_errors=True)
    GENERATED.mkdir()
    pages = {"models": table, "optimizers": optimizers}
    for what, title in LISTED.items():
        rows = [{key: MARKDOWN.escape(value) for key, value in row.items()} for row in listing.LISTED[what]()]
        write(what, title, pages.get(what, cards)(rows))
    for figure in RESULTS.glob("published/**/*.svg"):
        copy = GENERATED / "figures" / figure.relative_to(RESULTS / "published")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(figure, copy)
    of_suites = records(RESULTS / "published")
    for at in sorted({path.parent for path in RESULTS.glob("published/**/*.md")}):
        folder = at.relative_to(RESULTS / "published")
        figures = [f"![{path.stem}](figures/{folder}/{path.name})" for path in sorted(at.glob("*.svg"))]
        parts = sorted(at.glob("*.md"), key=lambda path: (path.name != "table.md", path.name))
        shown = [path.read_text("utf-8") for path in parts]
        remark = uncommitted(of_suites.get(str(folder), []))
        write(page(folder), str(folder), "\n\n".join(filter(None, [remark, *shown, *figures])))
    schema, _, claims = (RESULTS / "README.md").read_text("utf-8").partition(f"## {CLAIMS}\n")
    write("results_format", "Format of results", schema.partition("\n")[2])
    write("claims", CLAIMS, claims)
    write("compute", "Statement of compute", f"{COMPUTE}\n{compute(of_suites)}")


def table(rows: list[dict[str, str]]) -> str:
    """The rows as a table in Markdown."""
    return pd.DataFrame(rows).to_markdown(index=False)


def cards(rows: list[dict[str, str]]) -> str:
    """A section for each row, by its first value, with a line for each other one that is not empty."""
    sections = []
    for row in rows:
        (_, title), *others = row.items()
        sections += [f"## {title}", "\n".join(f"- **{key}**: {value}" for key, value in others if value)]
    return "\n\n".join(sections)


def optimizers(rows: list[dict[str, str]]) -> str:
    """`cards`, and for each optimizer its default grid, its note, its fields, and what its class says."""
    sections = [FIELDS]
    for row in rows:
        entry = registry.entry("optimizer", row["optimizer"])
        kind, made = entry.load(), registry.create(entry.name)
        grid = "; ".join(f"`{name}` in {', '.join(map(plain, values))}" for name, values in entry.grid.items())
        tuning = f"by default the grid {grid}" if grid else "none"
        known_too = {"tuning": tuning, "note": entry.note, "class": f"`{kind.__module__}.{kind.__qualname__}`"}
        text, meanings = documented(kind)
        defaults = registry.spec("optimizer", entry.name, made)
        shown = [
            {
                "field": f"`{field}`",
                "default": f"`{plain(defaults.get(field, getattr(made, field)))}`",
                "allowed": bases(entry.name) if hint is Direction else allowed(hint),
                "what it is": meanings.get(field, "").replace("|", r"\|"),
            }
            for field, hint in fields.hints(kind).items()
        ]
        sections += [cards([row | known_too]), table(shown), text]
    return "\n\n".join(sections)


def bases(name: str) -> str:
    """The directions that an optimizer takes as its base: those with which it can be made."""
    taken = []
    for base in registry.optimizers():
        try:
            registry.create(name, base=base)
            taken.append(f"`{base}`")
        except ConfigError:
            continue
    return ", ".join(taken)


def allowed(hint: Any) -> str:
    """The values that the annotation of a field allows."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return str(parts[1]).replace("number", "whole number" if parts[0] is int else "number").replace("inf", "∞")
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(map(allowed, parts))
    if origin is tuple:
        each = [allowed(part) for part in parts if part is not ...]
        return f"a list, each {each[0]}" if ... in parts else f"a list: {'; '.join(each)}"
    return SHOWN[hint]


def plain(value: Any) -> str:
    """A value as a YAML file holds it, on one line."""
    value = dict(value) if isinstance(value, Mapping) else value
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1e9).removesuffix("...\n").strip()


def documented(kind: type[Any]) -> tuple[str, dict[str, str]]:
    """What the docstring of a class says in Markdown, without its arguments, and what it and its bases say of these."""
    meanings: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        for names, meaning in arguments(vars(cls).get("__doc__") or ""):
            meanings |= {name: inherited(name, meaning, meanings) for name in names}
    text = SECTION.sub(_prose, f"{inspect.cleandoc(kind.__doc__ or '')}\n")
    return text, meanings


def _prose(section: re.Match[str]) -> str:
    """What stands for a section of a docstring in the text."""
    return "" if section[1] == "Args" else f"Raises {' '.join(section[2].split())}\n"


def arguments(docstring: str) -> list[tuple[list[str], str]]:
    """Each entry of the section `Args` of a docstring: the names that it is about, and what it says."""
    body = "".join(found[2] for found in SECTION.finditer(f"{inspect.cleandoc(docstring)}\n") if found[1] == "Args")
    entries = [" ".join(entry.split()).partition(": ") for entry in re.split(r"\n(?= {4}\S)", body) if entry]
    return [(names.split(", "), meaning) for names, _, meaning in entries]


def inherited(name: str, meaning: str, known_before: Mapping[str, str]) -> str:
    """What an argument is, where its docstring says "see" and a base: what that says, and what is added about it."""
    found = re.match(r"see `\w+`(?:[.;] ?)?", meaning)
    if not found or name not in known_before:
        return meaning
    added = meaning[found.end() :]
    return f"{known_before[name]} ({added.rstrip('.')})" if re.search(rf"\b{name}\b", added) else known_before[name]


def records(root: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of each published suite."""
    # A store for each suite, as one keeps all curves that it has read.
    return {name: [run.record for run in Store(root).archive(name).runs.values()] for name in Store(root).suites()}


def dirty(of_suite: Iterable[dict[str, Any]]) -> int:
    """The number of runs whose commit had changed files."""
    return sum(bool(record["provenance"]["dirty"]) for record in of_suite)


def uncommitted(of_suite: Sequence[dict[str, Any]]) -> str:
    """A sentence on the runs of a suite that were made with uncommitted changes; empty where there are none."""
    if not (count := dirty(of_suite)):
        return ""
    return (
        f"In the tables and figures below, {count:,} of {len(of_suite):,} runs were trained from a source tree with "
        "uncommitted changes, so that the commit in their records does not say all of what was run "
        "([what that means](../guide/trust.md))."
    )


def compute(of_suites: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """A row for each published suite: its runs, those that were made with changed files, and their hours."""
    shown = {f"[{name}]({page(Path(name))}.md)": of_suite for name, of_suite in of_suites.items()}
    once = {record["run_id"]: record for of_suite in of_suites.values() for record in of_suite}  # some are in several
    rows = []
    for name, of_suite in (shown | {"in all": [*once.values()]}).items():
        prepare, train, cpu = (column for _, column in pd.DataFrame(of_suite).reindex(columns=SECONDS).items())
        hours = (sum(prepare + time) / 3600 for time in (cpu.fillna(train), train))
        devices = sorted({record["provenance"]["device"].split()[0] for record in of_suite})
        rows.append((name, len(of_suite), dirty(of_suite), ", ".join(devices), *hours))
    columns = ["suite", "runs", "dirty", "device", "core hours", "wall hours"]
    return pd.DataFrame(rows, columns=columns).to_markdown(index=False, floatfmt=".2f")


def write(name: str, title: str, content: str) -> None:
    """Write a generated page."""
    (GENERATED / f"{name}.md").write_text(f"# {title}\n\n{linked(content, '', '')}", "utf-8")


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the links of a page of the source tree to files of `results/` lead to the pages and figures here."""
    up = "../" * docname.count("/")
    source[0] = linked(source[0], f"{up}../results/", f"{up}generated/")


def linked(content: str, results: str, generated: str) -> str:
    """`content` with links into `results/` leading to what is generated of it.

    Args:
        content: Markdown.
        results: the path by which `content` reaches `results/`, with a slash at its end.
        generated: the path by which its page reaches `docs/generated/`, likewise.
    """
    link = rf"\]\({re.escape(results)}"
    suites = rf"{link}published/([\w/-]+?)(?:/\w+\.md|/)?\)"
    content = re.sub(suites, lambda found: f"]({generated}{page(Path(found[1]))}.md)", content)
    content = re.sub(rf"{link}published/", f"]({generated}figures/", content)
    content = re.sub(rf"{link}README\.md#{slug(CLAIMS)}\)", f"]({generated}claims.md)", content)
    return re.sub(rf"{link}README\.md", f"]({generated}results_format.md", content)


def slug(title: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def page(folder: Path) -> str:
    """The name of the page of a published folder."""
    return "_".join(("published", *folder.parts))


def setup(app: Sphinx) -> None:
    """See Sphinx."""
    app.connect("builder-inited", generate)
    app.connect("source-read", read)
