"""Commands that say what stored results are worth: collected with checksums, verified and compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.progress import track

from dpopt import fields
from dpopt.cli.console import ERR, OUT, given, names, report_problems, stored
from dpopt.errors import ConfigError

if TYPE_CHECKING:
    from dpopt.store import Store

SHOWN = 200
"""The most findings that are printed."""


def collect(overrides: Sequence[str]) -> None:
    """Write a suite's cells and the curves of its selected runs as Parquet, with checksums.json beside them."""
    from dpopt.results import collecting

    results, _ = stored(overrides)
    results.store.check_writable()
    written, problems = collecting.collect(results)
    for path, rows in written.items():
        OUT.print(f"{path}: {rows} rows")
    report_problems(problems)


def publish(overrides: Sequence[str]) -> int:
    """Write a suite's folder of results/published: cells, curves, ledgers, records, tables, ranking and figures.

    figures=[NAME] draws these figures, to=FOLDER writes elsewhere. Runs are read from results=FOLDER, the files of
    figures from plots=FOLDER. check=true writes nothing: it makes every published table and figure again from the
    published cells, of suite=NAME or of all suites, and ends with 1 where a file is different. remake=true writes all
    of them again from the published cells.
    """
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.results import publishing
    from dpopt.store.published import PublishedStore

    asked = given(overrides, {**_PUBLISH, "suite": None})
    to, plots = fields.path(asked["to"], "to"), fields.path(asked["plots"], "plots")
    is_check, is_remade = (_is_true(asked[key], key) for key in ("check", "remake"))
    if not (is_check or is_remade):
        of_suite = [f"suite={asked['suite']}"] if asked["suite"] else []
        results, _ = stored([*of_suite, f"results={asked['results']}"])
        chosen = names(asked["figures"], "figures") or None
        for path in publishing.publish(results, to, plots, chosen):
            OUT.print(str(path))
        return 0
    suites = [asked["suite"]] if asked["suite"] else PublishedStore(to).suites()
    if is_remade:
        for suite in suites:
            OUT.print(f"{suite}: {len(publishing.remake(to, suite, plots))} files")
        return 0
    found = [each for suite in _track(suites, "suites") for each in publishing.check(to, suite, plots)]
    _print_lines(map(str, found[:SHOWN]), len(found))
    errors = sum(each.is_error for each in found)
    OUT.print(f"{len(suites)} published suites made again: {errors} differences, {len(found) - errors} remarks")
    return 1 if errors else 0


def _is_true(text: str, key: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(key, text, "expected true or false")
    return text == "true"


_PUBLISH = {
    "results": "results",
    "to": "results/published",
    "plots": "plots",
    "figures": None,
    "check": "false",
    "remake": "false",
}


def seal(overrides: Sequence[str]) -> None:
    """Note what lies in results/published, with checksums, for `dpopt verify` to hold it to.

    results=FOLDER has it elsewhere.
    """
    from dpopt.store import checksums

    store = _results(given(overrides, {"results": "results"})["results"])
    root = store.root / "published"
    if not root.is_dir():
        raise ConfigError("results", str(store.root), "has no folder `published`")
    files = checksums.contents(root)
    path = checksums.seal(store, root, files)
    OUT.print(f"{path}: {len(files)} files")


def verify(overrides: Sequence[str]) -> int:
    """Compute every stored epsilon again with two accountants, and check names, checksums and published files.

    suite=NAME looks at one suite only, here and in `published`; results=FOLDER has them elsewhere. Ends with 1 where a
    claim does not hold, or where there is nothing to verify.
    """
    from dpopt.results.verify import verify as check

    asked = given(overrides, {"results": "results", "suite": None})
    verified = check(_results(asked["results"]), asked["suite"], _track)
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


def _results(folder: str) -> Store:
    """The store in a folder that must exist."""
    from dpopt.store import Store, checksums

    root = fields.path(folder, "results")
    if not root.is_dir():
        raise ConfigError("results", folder, "no such folder")
    if (root / checksums.NAME).is_file():
        raise ConfigError("results", folder, "holds collected or published files: expected the results folder above it")
    return Store(root)


def _track(sequence: Sequence[Any], title: str) -> Iterable[Any]:
    """A bar on a terminal, elsewhere a line before each kind."""
    if not ERR.is_terminal and len(sequence) > 1:
        ERR.print(f"{len(sequence)} {title}")
    return track(sequence, title, console=ERR, disable=not ERR.is_terminal, transient=True)
