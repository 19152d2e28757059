"""A published suite: cells and curves, and the tables and figures that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dpopt.errors import ConfigError
from dpopt.results import collecting, figures, papers, ranking, tables
from dpopt.results.results import Results
from dpopt.store import Damaged, Store, checksums
from dpopt.store.published import ABOUT, CELLS, PublishedStore

TEXTS = ("table.md", "table.csv", "table.tex", "ranking_epsilon.md", "ranking_epsilon.csv")
"""The tables of a published folder."""


class Mismatch(NamedTuple):
    """A published file that is not what its folder's cells give.

    Attributes:
        path: of the file.
        reason: what is different.
        is_error: false where the file could not be compared.
    """

    path: Path
    reason: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def publish(results: Results, to: Path, plots: Path, chosen: Sequence[str] | None = None) -> list[Path]:
    """Write all of a suite into the folder `to`/SUITE, tables and figures from what was written there.

    Args:
        results: of the whole suite.
        to: folder of published suites.
        plots: folder of the figures' files.
        chosen: names of the figures; by default those that the folder has, and all in a new one.

    Returns:
        The files.

    Raises:
        ConfigError: `results` is a part of a suite, or has nothing finished.
    """
    if results.part:
        raise ConfigError("publish", dict(results.part), "expected the whole suite")
    if results.every.empty:
        raise ConfigError("suite", results.suite, "no finished rows to publish")
    _write_frames(results, to / results.suite)
    return _write(load_published(to, results.suite), to / results.suite, plots, chosen)


def remake(to: Path, suite: str, plots: Path) -> list[Path]:
    """Make a published suite's frames, tables and figures again, of its cells, ledgers and records; gives the files."""
    known = load_published(to, suite)
    _write_frames(known, to / suite)
    return _write(load_published(to, suite), to / suite, plots, None)


def load_published(to: Path, suite: str) -> Results:
    """What a folder of published suites holds of one."""
    return Results(PublishedStore(to), suite)


def check(to: Path, suite: str, plots: Path) -> Iterator[Mismatch]:
    """The published files that differ from what the cells give: every table and figure is made again and compared."""
    known, folder = load_published(to, suite), to / suite
    for problem in known.problems:
        yield Mismatch(folder / CELLS, problem)
    texts = _texts(known)
    for name in TEXTS:
        path = folder / name
        if path.exists() and (name not in texts or path.read_text("utf-8") != texts[name]):
            yield Mismatch(path, "the cells give another table")
    for path in sorted(folder.glob("*.svg")):
        yield from _check_figure(known, path, plots)


def _check_figure(known: Results, path: Path, plots: Path) -> Iterator[Mismatch]:
    try:
        drawn = figures.render(known.plot(path.stem, plots), ["svg"])["svg"]
    except ConfigError as error:
        yield Mismatch(path, f"cannot be drawn from what is published ({error})", is_error=False)
        return
    if drawn != path.read_bytes():
        yield Mismatch(path, "the cells give another figure")


def _write_frames(results: Results, folder: Path) -> None:
    store, frames = Store(folder.parent), collecting.parquet(results)
    for name, frame in frames.items():
        store.write(folder / name, collecting.as_bytes(frame))
    store.write(folder / ABOUT, collecting.about(results))


def _write(known: Results, folder: Path, plots: Path, chosen: Sequence[str] | None) -> list[Path]:
    store, there = Store(folder.parent), [path.stem for path in folder.glob("*.svg")]
    for name, content in _texts(known).items():
        store.write(folder / name, content)
    for name in chosen or there or [plot.name for plot in figures.plots(plots) if plot.needs in figures.OF_SUITES]:
        try:
            store.write(folder / f"{name}.svg", figures.render(known.plot(name, plots), ["svg"])["svg"])
        except ConfigError:
            if chosen:
                raise  # of all figures, some show what this suite has not
    files = [path for path in checksums.contents(folder.parent) if path.is_relative_to(folder)]
    try:
        checksums.seal(store, folder.parent, files, replaces=folder)
    except Damaged as error:
        raise ConfigError("to", str(folder.parent), f"{error}; `dpopt seal` writes it anew") from error
    return files


def _texts(known: Results) -> dict[str, str]:
    """The tables by their files' names, with a paper's numbers where the suite names one."""
    comparison, ranks, remarks = known.table(), known.ranking(), list[str]()
    manifest = known.store.manifest(known.suite)
    if manifest.get("published"):
        comparison, remarks = papers.beside(comparison, manifest)
    made = tables.as_table(comparison, known.suite, (), remarks)
    found = {"table.md": f"{made.markdown}\n", "table.csv": made.csv, "table.tex": made.latex}
    if not ranks.empty:
        found |= {f"ranking_epsilon.{kind}": text for kind, text in ranking.files(ranks).items()}
    return found
