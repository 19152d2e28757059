"""Commands that say what stored results are worth: collected with checksums, verified, merged and compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import track

from dpopt import fields
from dpopt.cli.console import ERR, OUT, given, names, report_problems, stored
from dpopt.errors import ConfigError
from dpopt.fields import Name

if TYPE_CHECKING:
    from dpopt.store import Store

SHOWN = 200
"""The most findings that are printed."""
FEW = 10
"""The most names that are printed in one line."""


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
    to, plots = Path(asked["to"]), Path(asked["plots"])
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
    claim does not hold.
    """
    from dpopt.results.verify import verify as check

    asked = given(overrides, {"results": "results", "suite": None})
    verified = check(_results(asked["results"]), asked["suite"], _track)
    _print_lines(map(str, verified.findings[:SHOWN]), len(verified.findings))
    report_problems(verified.remarks)
    counts = ", ".join(f"{count} {kind}" for kind, count in verified.checked.items())
    OUT.print(f"{counts or 'nothing'} verified: {len(verified.findings)} mismatches")
    return 1 if verified.findings else 0


def merge(arguments: Sequence[str]) -> int:
    """Copy the results of the folder FROM into results=INTO: finished runs, planned cells of suites, measurements.

    FROM may also be the folder above it, or a tar archive of either, compressed or not. It may be a folder of published
    suites, or of one: its runs come back with those of their curves that are published. Runs that an older version has
    published with a part of their records cannot come back, and count as damaged. Nothing is overwritten, no link
    is followed, and what no such folder has is left out. Ends with 1 where a run has different results in the two
    folders, or cannot be read; these stay as they are. A merge that was interrupted goes on when it is started again.
    """
    from dpopt.store import Store
    from dpopt.store.archives import unpacked
    from dpopt.store.merge import merge as merged
    from dpopt.store.merge import results_in

    ((source,), asked) = _positional(arguments, "FROM", results="results")
    into = Store(Path(asked["results"]))
    with unpacked(Path(source)) if Path(source).is_file() else nullcontext(Path(source)) as folder:
        there = results_in(folder, source)
        into.check_writable()
        done = merged(there, into, _track)
    for run_id in done.conflicts:
        OUT.print(f"conflict {run_id}: different results in {source} and {asked['results']}")
    report_problems(done.damaged)
    if done.left_out:
        _print_line(f"left out of {source}, as links or no files of a results folder: ", sorted(done.left_out))
    for suite, added in done.suites.items():
        OUT.print(f"suite {suite}: {added} planned cells added")
    OUT.print(
        f"{len(done.copied)} runs copied, {done.same} were here, {done.unfinished} unfinished there, "
        f"{len(done.running)} being run here, {len(done.conflicts)} conflicts, {len(done.damaged)} damaged, "
        f"{done.measurements} measurements copied",
    )
    return 1 if done.conflicts or done.damaged else 0


def _print_line(title: str, names: Sequence[str]) -> None:
    """Print names in one line, the first few of many."""
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:FEW])
    rest = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    OUT.print(f"{title}{shown}{rest}", highlight=False, markup=False, soft_wrap=True)


def _print_lines(lines: Iterable[str], total: int) -> None:
    """Print at most `SHOWN` lines, and how many more of `total` there are."""
    for line in lines:
        OUT.print(line)
    if total > SHOWN:
        OUT.print(f"... and {total - SHOWN} more")


def _results(folder: str) -> Store:
    """The store in a folder that must exist."""
    from dpopt.store import Store, checksums

    if not Path(folder).is_dir():
        raise ConfigError("results", folder, "no such folder")
    if Path(folder, checksums.NAME).is_file():
        raise ConfigError("results", folder, "holds collected or published files: expected the results folder above it")
    return Store(Path(folder))


def _track(sequence: Sequence[Any], title: str) -> Iterable[Any]:
    """A bar on a terminal, elsewhere a line before each kind."""
    if not ERR.is_terminal and len(sequence) > 1:
        ERR.print(f"{len(sequence)} {title}")
    return track(sequence, title, console=ERR, disable=not ERR.is_terminal, transient=True)


def _positional(arguments: Sequence[str], names: str, **known: Any) -> tuple[list[str], dict[str, Any]]:
    """The words that have no key, as many as `names` has, and what `given` makes of the others."""
    words = [argument for argument in arguments if "=" not in argument]
    if len(words) != len(names.split()):
        raise ConfigError("arguments", " ".join(words), f"expected {names}")
    for word in words:
        fields.convert(word, Name, names, {})
    return words, given([argument for argument in arguments if "=" in argument], known)
