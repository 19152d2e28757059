"""Commands that publish stored results and verify them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import track

from dpopt.cli.console import ERR, OUT, report_problems
from dpopt.errors import ConfigError
from dpopt.fields import Name, Several, key

if TYPE_CHECKING:
    from dpopt.store import Store

_SHOWN = 200  # one damaged ledger makes a finding for each of its runs


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Write a suite's folder of results/published: its runs, tables, ranking and figures."""

    suite: Name | None = key("the suite; with check or remake all published suites by default", None)
    results: Path = key("folder that runs are read from", Path("results"))
    to: Path = key("folder of published suites", Path("results/published"))
    plots: Path = key("folder of the figures' files", Path("plots"))
    figures: Several[Name] | None = key("[NAME]: draw these figures", None)
    check: bool = key("true: verify what is published, draw all figures that suites list, write nothing", False)
    remake: bool = key("true: write all tables and figures again from the published runs", False)

    def __call__(self) -> int:
        from dpopt.results import publishing
        from dpopt.results.results import load_results

        if self.check:
            return _verified(_results(self.to, "to"), self.suite, self.plots)
        if self.remake:
            for suite in [self.suite] if self.suite else _results(self.to, "to").suites():
                OUT.print(f"{suite}: {len(publishing.remake(self.to, suite, self.plots))} files")
            return 0
        if self.suite is None:
            raise ConfigError("suite", None, "expected suite=NAME once; `dpopt list` shows the suites")
        results = load_results(self.results, self.suite)
        for path in publishing.publish(results, self.to, self.plots, self.figures or ()):
            OUT.print(str(path))
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compute every stored epsilon again with two accountants, and check names, seals and published tables.

    Ends with 1 where a claim does not hold, or where there is nothing to verify. `dpopt publish check=true` also draws
    published figures.
    """

    suite: Name | None = key("one suite only, here and in `published`", None)
    results: Path = key("the results folder", Path("results"))

    def __call__(self) -> int:
        return _verified(_results(self.results, "results"), self.suite, None)


def _verified(store: Store, suite: str | None, plots: Path | None) -> int:
    from dpopt.results.verify import verify as check

    verified = check(store, suite, _track, plots)
    for finding in verified.findings[:_SHOWN]:
        OUT.print(str(finding))
    if (more := len(verified.findings) - _SHOWN) > 0:
        OUT.print(f"... and {more} more")
    report_problems(verified.remarks)
    counts = ", ".join(f"{count} {kind}" for kind, count in verified.checked.items())
    OUT.print(f"{counts or 'nothing'} verified: {len(verified.findings)} mismatches")
    return 1 if verified.findings or not counts else 0  # nothing verified is no success: a path may be wrong


def _results(root: Path, where: str) -> Store:
    from dpopt.store import Store

    if not root.is_dir():  # a store would make it, and find nothing wrong in it
        raise ConfigError(where, str(root), "no such folder")
    return Store(root)


def _track(sequence: Sequence[Any], title: str) -> Iterable[Any]:
    # A log keeps every state of a bar: where there is no terminal it is a line.
    if not ERR.is_terminal and len(sequence) > 1:
        ERR.print(f"{len(sequence)} {title}")
    return track(sequence, title, console=ERR, disable=not ERR.is_terminal, transient=True)
