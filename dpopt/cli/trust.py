"""Commands that publish stored results and verify them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import track

from dpopt.cli.console import ERR, OUT, report_problems, stored
from dpopt.cli.keys import Stored, key
from dpopt.errors import ConfigError
from dpopt.fields import Name, Several

if TYPE_CHECKING:
    from dpopt.store import Store

SHOWN = 200
"""The most findings that are printed."""


def collect(asked: Stored) -> None:
    """Write a suite's cells and the curves of its selected runs as Parquet, with checksums.json beside them."""
    from dpopt.results import collecting

    results = stored(asked)
    results.store.check_writable()
    written, problems = collecting.collect(results)
    for path, rows in written.items():
        OUT.print(f"{path}: {rows} rows")
    report_problems(problems)


@dataclass(frozen=True, kw_only=True)
class PublishKeys:
    """Keys of `dpopt publish`."""

    suite: Name | None = key("the suite; with check or remake all published suites by default", None)
    results: Path = key("folder that runs are read from", Path("results"))
    to: Path = key("folder of published suites", Path("results/published"))
    plots: Path = key("folder of the figures' files", Path("plots"))
    figures: Several[Name] | None = key("[NAME]: draw these figures", None)
    check: bool = key("true: make all tables and figures again, write nothing, end with 1 where one differs", False)
    remake: bool = key("true: write all tables and figures again from the published cells", False)


def publish(asked: PublishKeys) -> int:
    """Write a suite's folder of results/published: cells, curves, ledgers, records, tables, ranking and figures."""
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.results import publishing
    from dpopt.results.results import load_results
    from dpopt.store.published import PublishedStore

    if not (asked.check or asked.remake):
        if asked.suite is None:
            raise ConfigError("suite", None, "expected suite=NAME once; `dpopt list` shows the suites")
        results = load_results(asked.results, asked.suite)
        for path in publishing.publish(results, asked.to, asked.plots, asked.figures):
            OUT.print(str(path))
        return 0
    suites = [asked.suite] if asked.suite else PublishedStore(asked.to).suites()
    if asked.remake:
        for suite in suites:
            OUT.print(f"{suite}: {len(publishing.remake(asked.to, suite, asked.plots))} files")
        return 0
    mismatches = [each for suite in _track(suites, "suites") for each in publishing.check(asked.to, suite, asked.plots)]
    _print_lines(map(str, mismatches[:SHOWN]), len(mismatches))
    errors, of = sum(each.is_error for each in mismatches), f"{len(suites)} published suites made again"
    OUT.print(f"{of}: {errors} differences, {len(mismatches) - errors} remarks")
    return 1 if errors else 0


@dataclass(frozen=True, kw_only=True)
class VerifyKeys:
    """Keys of `dpopt verify`."""

    suite: Name | None = key("one suite only, here and in `published`", None)
    results: Path = key("the results folder", Path("results"))


@dataclass(frozen=True, kw_only=True)
class SealKeys:
    """Keys of `dpopt seal`."""

    results: Path = key("the results folder", Path("results"))


def seal(asked: SealKeys) -> None:
    """Note the files of results/published with checksums, for `dpopt verify` to hold them to."""
    from dpopt.store import checksums

    store = _results(asked.results)
    root = store.root / "published"
    if not root.is_dir():
        raise ConfigError("results", str(store.root), "has no folder `published`")
    files = checksums.contents(root)
    path = checksums.seal(store, root, files)
    OUT.print(f"{path}: {len(files)} files")


def verify(asked: VerifyKeys) -> int:
    """Compute every stored epsilon again with two accountants, and check names, checksums and published files.

    Ends with 1 where a claim does not hold, or where there is nothing to verify.
    """
    from dpopt.results.verify import verify as check

    verified = check(_results(asked.results), asked.suite, _track)
    _print_lines(map(str, verified.findings[:SHOWN]), len(verified.findings))
    report_problems(verified.remarks)
    counts = ", ".join(f"{count} {kind}" for kind, count in verified.checked.items())
    OUT.print(f"{counts or 'nothing'} verified: {len(verified.findings)} mismatches")
    return 1 if verified.findings or not counts else 0


def _print_lines(lines: Iterable[str], total: int) -> None:
    """Print at most `SHOWN` lines, and how many more of `total` there are."""
    for line in lines:
        OUT.print(line)
    if total > SHOWN:
        OUT.print(f"... and {total - SHOWN} more")


def _results(root: Path) -> Store:
    """The store in a folder that must exist."""
    from dpopt.store import Store, checksums

    if not root.is_dir():
        raise ConfigError("results", str(root), "no such folder")
    if (root / checksums.NAME).is_file():
        raise ConfigError(
            "results", str(root), "holds collected or published files: expected the results folder above it"
        )
    return Store(root)


def _track(sequence: Sequence[Any], title: str) -> Iterable[Any]:
    """A bar on a terminal, elsewhere a line before each kind."""
    if not ERR.is_terminal and len(sequence) > 1:
        ERR.print(f"{len(sequence)} {title}")
    return track(sequence, title, console=ERR, disable=not ERR.is_terminal, transient=True)
