"""Commands that say what stored results are worth: collected with checksums, verified, merged and compared."""

from __future__ import annotations

import shutil
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.progress import track

from dpopt import fields
from dpopt.cli.console import ERR, OUT, print_table, report_problems, stored
from dpopt.errors import ConfigError, unknown

if TYPE_CHECKING:
    from dpopt.store import Store

SHOWN = 200
"""The most findings that are printed."""


def collect(overrides: Sequence[str]) -> None:
    """Write a suite's cells and the curves of its selected runs as Parquet, with checksums.json beside them."""
    from dpopt.analysis import collecting

    name, store, labels, _ = stored(overrides)
    written, problems = collecting.collect(store, name, labels)
    for path, rows in written.items():
        OUT.print(f"{path}: {rows} rows", highlight=False)
    report_problems(problems)


def seal(overrides: Sequence[str]) -> None:
    """Note what lies in results/published, with checksums, for `dpopt verify` to hold it to.

    results=FOLDER has it elsewhere.
    """
    from dpopt.store import checksums

    store = _results(_given(overrides, results="results")["results"])
    root = store.root / "published"
    if not root.is_dir():
        raise ConfigError("results", str(store.root), "has no folder `published`")
    files = checksums.contents(root)
    path = checksums.seal(store, root, files)
    OUT.print(f"{path}: {len(files)} files", highlight=False)


def verify(overrides: Sequence[str]) -> int:
    """Compute every stored epsilon again with two accountants, and check names, checksums and published files.

    suite=NAME looks at one suite only, results=FOLDER elsewhere. Ends with 1 where a claim does not hold.
    """
    from dpopt.analysis.verify import verify as check

    given = _given(overrides, results="results", suite=None)
    verified = check(_results(given["results"]), given["suite"], _track)
    _print_lines(map(str, verified.findings[:SHOWN]), len(verified.findings))
    report_problems(verified.remarks)
    counts = ", ".join(f"{count} {kind}" for kind, count in verified.checked.items())
    OUT.print(f"{counts or 'nothing'} verified: {len(verified.findings)} mismatches", highlight=False)
    return 1 if verified.findings else 0


def merge(arguments: Sequence[str]) -> int:
    """Copy the results of the folder FROM into results=INTO: finished runs, planned cells of suites, measurements.

    FROM may be a tar archive of such a folder, compressed or not. Nothing is overwritten. Ends with 1 where a run has
    different results in the two folders, or cannot be read; these stay as they are. A merge that was interrupted goes
    on when it is started again.
    """
    from dpopt.store import Store
    from dpopt.store.merge import merge as merged

    ((source,), given) = _positional(arguments, "FROM", results="results")
    with _unpacked(source) as there:
        done = merged(there, Store(Path(given["results"])), _track)
    for run_id in done.conflicts:
        OUT.print(f"conflict {run_id}: different results in {source} and {given['results']}", highlight=False)
    report_problems(done.damaged)
    for suite, added in done.suites.items():
        OUT.print(f"suite {suite}: {added} planned cells added", highlight=False)
    OUT.print(
        f"{len(done.copied)} runs copied, {done.same} were here, {done.unfinished} unfinished there, "
        f"{len(done.running)} being run here, {len(done.conflicts)} conflicts, {len(done.damaged)} damaged, "
        f"{done.measurements} measurements copied",
        highlight=False,
    )
    return 1 if done.conflicts or done.damaged else 0


def compare(arguments: Sequence[str]) -> int:
    """Compare two results folders, or two files that `dpopt collect` wrote, cell by cell.

    suite=NAME compares one suite, tolerance=1e-6 sets the relative difference from which numbers differ (those of
    epsilons always do). Ends with 0 where NEW has every result of OLD with the same numbers, and may have more; with 1
    where a number differs or a result is missing.
    """
    from dpopt.analysis import compare as comparing

    ((old, new), given) = _positional(arguments, "OLD NEW", suite=None, tolerance=str(comparing.TOLERANCE))
    tolerance = fields.convert(given["tolerance"], fields.NonNegative, "tolerance", {})
    before, after = (comparing.load(Path(side), given["suite"]) for side in (old, new))
    found = comparing.compare(before, after, tolerance)
    print_table(comparing.readable(comparing.summary(found)))
    differences = comparing.lines(found)
    _print_lines(differences[:SHOWN], len(differences))
    OUT.print(
        f"{len(found.pairs)} cells in both, {found.pairs['is_changed'].sum()} changed, {len(found.epsilons)} "
        f"differences of epsilon, {len(found.missing)} missing in {new}, {len(found.added)} added",
        highlight=False,
    )
    return 0 if found.is_same else 1


def _print_lines(lines: Iterable[str], total: int) -> None:
    """Print at most `SHOWN` lines, and how many more of `total` there are."""
    for line in lines:
        OUT.print(line, highlight=False, markup=False)
    if total > SHOWN:
        OUT.print(f"... and {total - SHOWN} more", highlight=False)


def _results(folder: str, key: str = "results") -> Store:
    """The store in a folder that must exist."""
    from dpopt.store import Store

    if not Path(folder).is_dir():
        raise ConfigError(key, folder, "no such folder")
    return Store(Path(folder))


@contextmanager
def _unpacked(source: str) -> Iterator[Store]:
    """The store in a folder, or in an archive of one, which lies in a temporary folder meanwhile."""
    from dpopt.store import Store

    if not Path(source).is_file():
        yield _results(source, "FROM")
        return
    with TemporaryDirectory() as folder:
        try:
            with tarfile.open(source) as archive:
                _unpack(archive, Path(folder).resolve())
        except (tarfile.TarError, OSError, EOFError, LZMAError, zlib.error) as error:
            raise ConfigError("FROM", source, f"no tar archive that can be unpacked ({error})") from error
        yield Store(Path(folder))


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Write an archive's files into `folder`.

    The standard library has filters against archives that mean harm, but not before Python 3.11.4.

    Raises:
        TarError: a member is a link or a device, or lies elsewhere.
    """
    for member in archive:
        target = (folder / member.name).resolve()
        if not (member.isfile() or member.isdir()) or not target.is_relative_to(folder):
            raise tarfile.TarError(f"{member.name} is no file below the folder")
        if content := archive.extractfile(member):
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, target.open("wb") as out:
                shutil.copyfileobj(content, out)


def _track(sequence: Sequence[Any], title: str) -> Iterable[Any]:
    """A bar on a terminal."""
    return track(sequence, title, console=ERR, disable=not ERR.is_terminal, transient=True)


def _given(overrides: Sequence[str], **known: Any) -> dict[str, Any]:
    """What the command line gives of `known`, which holds the defaults."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if key not in known or not equals:
            raise unknown("override", override if not equals else key, known)
        known[key] = value
    return known


def _positional(arguments: Sequence[str], names: str, **known: Any) -> tuple[list[str], dict[str, Any]]:
    """The words that have no key, as many as `names` has, and what `_given` makes of the others."""
    words = [argument for argument in arguments if "=" not in argument]
    if len(words) != len(names.split()):
        raise ConfigError("arguments", " ".join(words), f"expected {names}")
    return words, _given([argument for argument in arguments if "=" in argument], **known)
