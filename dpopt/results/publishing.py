"""A published suite: its runs, and the tables and figures that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dpopt import files
from dpopt.errors import ConfigError
from dpopt.files import Damaged
from dpopt.results import figures, ranking
from dpopt.results.results import Results
from dpopt.store import Store
from dpopt.store.manifests import RUNS, note
from dpopt.store.runs import RESULTS, Archive, Run

_TEXTS = [f"table.{kind}" for kind in ("md", "csv", "tex")]
_TEXTS += [f"{name}.{kind}" for name in ("ranking_epsilon", "clip_batch") for kind in ("md", "csv")]
"""All tables that a published folder can hold; one that its runs do not give must not be there."""


def publish(
    results: Results, to: Path, plots: Path, chosen: Sequence[str] = (), *, partial: bool = False
) -> list[Path]:
    """Write all of a suite into the folder `to`/SUITE, tables and figures from what was written there; gives the files.

    Without figures in `chosen`, a new folder gets all that the suite has something to show for, and an old one the
    figures that lie in it. `ConfigError` for a part of a suite, if nothing is finished, and unless `partial` if some
    cell has no result, or a run that is published in the folder now; each table says how many cells have none.
    """
    if results.part:
        raise ConfigError("publish", dict(results.part), "expected the whole suite")
    if results.every.empty:
        raise ConfigError("suite", results.suite, "no finished rows to publish")
    if results.missing and not partial:
        how = "partial=true publishes what is there, and each table says so"
        raise ConfigError("suite", results.suite, f"{results.missing.partition(';')[0]}; {how}")
    folder, manifest = to / results.suite, results.manifest
    before = Store(to)
    listed = before.manifest(results.suite).get("figures", []) if (folder / RUNS).exists() else []
    for name in chosen:  # refused before anything is written
        figures.plots(plots, name)
    # Curves and diagnostics are most of a run, and figures show those of selected runs alone.
    kept = dict[str, Run]()
    drawn, shown = ({*frame.get("run_id", ())} for frame in (results.every, results.selected))
    for run_id in results.cells["run_id"][results.cells["state"].isin(RESULTS)]:
        run = results.store.run(run_id)
        record = {key: value for key, value in run.record.items() if key != "diagnostics" or run_id in shown}
        kept[run_id] = Run(record, run.ledger, run.curve if run_id in drawn else None)
    lost = before.archive(results.suite).runs.keys() - kept.keys()
    if lost and not partial:
        allowed = f"{len(lost)} runs that are published have no result in {results.store.root}; partial=true drops them"
        raise ConfigError("to", str(folder), allowed)
    # First the runs: tables that are older than these show when they are verified.
    files.write(folder / RUNS, Archive(manifest["cells"], kept).packed())
    note(folder, {**{key: value for key, value in manifest.items() if key != "cells"}, "figures": listed})
    return remake(to, results.suite, plots, chosen, is_new=not listed)


def remake(to: Path, suite: str, plots: Path, chosen: Sequence[str] = (), is_new: bool = False) -> list[Path]:
    """Make tables and figures of a published suite again, of its runs, and delete tables that they do not give."""
    results, folder = Results(Store(to), suite), to / suite
    about = {key: value for key, value in results.store.manifest(suite).items() if key != "cells"}
    there = [*about.get("figures", ()), *(path.stem for path in folder.glob("*.svg"))]
    every = [plot.name for plot in figures.plots(plots) if plot.needs in figures.OF_SUITES]
    wanted = chosen or (every if is_new else [path.stem for path in folder.glob("*.svg")])
    texts = _texts(results)
    for name in _TEXTS:
        if name in texts:
            files.write(folder / name, texts[name])
        else:
            (folder / name).unlink(missing_ok=True)  # of an older version, which had it to show
    for name in wanted:
        try:
            files.write(folder / f"{name}.svg", _drawn(results, name, plots))
        except ConfigError:
            if chosen or not is_new:
                raise  # of all figures, some show what this suite has not
        else:
            there.append(name)
    note(folder, {**about, "figures": sorted({*there})})
    return sorted(path for path in folder.iterdir() if path.is_file())


def differences(results: Results, plots: Path | None = None) -> Iterator[tuple[Path, str]]:
    """The files of a published suite that its runs do not give, and why; with `plots`, figures are drawn too."""
    folder = results.folder
    yield from ((folder / RUNS, problem) for problem in results.problems)
    texts = _texts(results)
    for name in _TEXTS:
        try:
            is_same = files.content(folder / name).decode() == texts.get(name)
        except FileNotFoundError:
            is_same = name not in texts
        except (Damaged, UnicodeDecodeError):
            is_same = False
        if not is_same:
            yield folder / name, "the runs give another table"
    listed = results.store.manifest(results.suite).get("figures", [])
    yield from (
        (path, "a figure that the suite does not name") for path in folder.glob("*.svg") if path.stem not in listed
    )
    for path in [] if plots is None else [folder / f"{name}.svg" for name in listed]:
        try:
            drawn = _drawn(results, path.stem, plots or Path())
            if path.exists() and files.content(path) != drawn:
                yield path, "the runs give another figure"
        except (ConfigError, Damaged) as error:
            yield path, f"cannot be drawn from what is published ({error})"


def _drawn(results: Results, name: str, plots: Path) -> bytes:
    return figures.render(results.plot(name, plots), ["svg"])["svg"]


def _texts(results: Results) -> dict[str, str]:
    table, ranks = results.show(compare=bool(results.manifest.get("published"))), results.ranks()
    texts = {f"table.{kind}": text for kind, text in table.files().items()}
    if len(ranks) > 1:
        texts |= {f"ranking_epsilon.{kind}": text for kind, text in ranking.files(ranks).items()}
    if effects := results.clip_batch():
        texts |= {"clip_batch.md": f"{effects.markdown}\n", "clip_batch.csv": effects.csv}
    return texts
