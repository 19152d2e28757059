"""Mutation testing: what the tests do not notice when one line of the package is wrong.

    python tests/mutation [list=kernel] [count=200] [only=PART OF A NAME] [results=FILE]

makes `count` one-line mutants of the modules of a list of `TARGETS` (kernel or house), spread evenly and always the
same, and runs tests that call what each changes, as many as `STEPS` says, until one fails. Each processor has a copy of
the tree, in which it tries one mutant after the other.
The tests are run once to learn which these are. Both are kept in a file, so that a stopped run goes on; survivors are
tried again, and so are mutants whose tests have changed. Mutants that change nothing that a test could see are listed,
with the reason, in `equivalent.txt`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import cache_from_source
from itertools import accumulate, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import trial
from mutants import Mutant, mutants
from rich.console import Console
from rich.progress import track

T, R = TypeVar("T"), TypeVar("R")
ROOT = Path(__file__).parents[2]
APART = {
    "privacy/data.py": ["tests/privacy/test_distributed.py"],
    "runs/worker.py": ["tests/runs/test_supervisor.py"],
}
"""Module -> tests that call it in processes of their own, where it is not seen; they come last."""


@dataclass(frozen=True)
class Target:
    """Modules that are changed, and the folders whose tests should notice."""

    modules: tuple[str, ...]
    folders: tuple[str, ...]
    count: int


TARGETS = {
    "kernel": Target(
        (
            *(f"privacy/{name}.py" for name in ("queries", "data", "oracle", "sampling", "ledger", "accountants")),
            *(f"privacy/{name}.py" for name in ("privacy_loss", "calibration")),
            *(f"clipping/{name}.py" for name in ("rules", "flat", "state", "joins", "mixing", "evaluation")),
        ),
        ("tests/privacy", "tests/clipping"),
        200,
    ),
    "house": Target(
        (
            *("store/leases.py", "store/runs.py", "store/manifests.py", "files.py", "fields.py", "markup.py"),
            *(f"suites/{name}.py" for name in ("plan", "rows", "searches")),
            *(f"results/{name}.py" for name in ("choosing", "pricing", "statistics", "ranking", "tables")),
            *("results/verify/claims.py", "training/checkpoint.py", "training/saved.py", "runs/worker.py"),
        ),
        ("tests",),
        300,
    ),
}
STEPS = (10, 40, 200)
"""Seconds of tests that are tried before further ones are even collected; after the last, a mutant has survived."""


class Tests:
    """Which tests call which functions; found out once for each file of tests, as it is.

    Args:
        kept: plain data, {file: {"digest": of its text, "tests": {test: [seconds, functions]}}}, which `keep` adds to.
        tree: a copy of the project.
    """

    def __init__(self, kept: dict[str, Any], tree: Path, folders: Sequence[str]) -> None:
        self._kept = kept
        self._files = {
            str(path.relative_to(tree)): path for part in folders for path in sorted((tree / part).rglob("test_*.py"))
        }

    def unknown(self) -> list[str]:
        """Files of tests that are new or have changed."""
        digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self._files.items()}
        return sorted(name for name in digests if self._kept.get(name, {}).get("digest") != digests[name])

    def keep(self, name: str, outcome: trial.Outcome) -> None:
        """Note what each test of a file calls."""
        digest = hashlib.sha256(self._files[name].read_bytes()).hexdigest()
        self._kept[name] = {"digest": digest, "tests": {test: list(seen) for test, seen in outcome.seen.items()}}

    def has(self, test: str) -> bool:
        """True if there is a test of this name."""
        file = test.split("::")[0]
        return file in self._files and test in self._kept[file]["tests"]

    def of(self, mutant: Mutant, first: str = "") -> dict[str, float]:
        """Tests that call what is changed, and the seconds each takes.

        `first` comes first, if it is there, then those of the file that is named after the module or has most of them;
        quick ones before others.

        What is outside of functions, or is called once for all tests, concerns all that call anything in the module.
        """
        every = {t: seen for name in self._files for t, seen in self._kept[name]["tests"].items()}
        place = f"{mutant.module} {mutant.function}"
        chosen = {t: seconds for t, (seconds, called) in every.items() if place in called}
        if not chosen or _runs_once(mutant):
            chosen = {t: seconds for t, (seconds, called) in every.items() if mutant.module in " ".join(called)}
        files = Counter(test.split("::")[0] for test in chosen)
        named = f"/test_{Path(mutant.module).name}"
        nearest = max(files, key=lambda file: (file.endswith(named), files[file]), default="")
        order = sorted(chosen, key=lambda test: (test != first, test.split("::")[0] != nearest, chosen[test]))
        return {test: chosen[test] for test in order}


def _runs_once(mutant: Mutant) -> bool:
    """True for the body of a class, and for a function that keeps its results: a single test is seen to call them."""
    name, body = mutant.function.rpartition(".")[2], ast.walk(ast.parse(mutant.source))
    places = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
    decorators = [ast.unparse(part) for place in places for part in place.decorator_list]
    return any(isinstance(place, ast.ClassDef) for place in places) or any("cache" in each for each in decorators)


def chosen(modules: Sequence[str], count: int, only: str) -> list[Mutant]:
    """`count` mutants over all modules, in an order that looks random and stays the same."""
    every = [mutant for module in modules for mutant in mutants(module, (ROOT / "dpopt" / module).read_text())]
    some = {mutant.name: mutant for mutant in every}
    ordered = sorted(some, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [some[name] for name in ordered[:count] if only in name]


def noticed(mutant: Mutant, tests: dict[str, float], tree: Path) -> str:
    """The test that fails in a copy of the project at `tree`; "" where the mutant survives."""
    path = tree / "dpopt" / mutant.module
    whole = path.read_text()
    _write(path, mutant.source)
    times = list(accumulate(tests.values()))
    ends = [0, *(bisect(times, seconds) + 1 for seconds in STEPS)]
    parts = [*([*tests][begin:end] for begin, end in pairwise(ends)), APART.get(mutant.module, [])]
    try:
        outcomes = (_failed(part, tree, 60 + 5 * sum(tests.get(test, 10) for test in part)) for part in parts if part)
        return next((failed for failed in outcomes if failed), "")
    finally:
        _write(path, whole)


def _write(path: Path, source: str) -> None:
    """Write a module, and forget its bytecode, which knows its source by size and second alone."""
    path.write_text(source)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _failed(tests: list[str], tree: Path, seconds: float) -> str:
    failed = trial.outcome(tests, tree, seconds).failed
    if failed != trial.NOT_FOUND:
        return failed
    functions = dict.fromkeys(test.split("[")[0] for test in tests)  # the name of a case may hold what is changed
    return trial.outcome([*functions], tree, seconds).failed


def _each(work: Callable[[T, Path], R], things: Sequence[T], trees: Sequence[Path]) -> Iterator[tuple[T, R]]:
    """`work` on each thing, in order, in a tree that nobody else uses then."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def done(thing: T) -> R:
        tree = free.get()
        try:
            return work(thing, tree)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        yield from zip(things, pool.map(done, things), strict=True)


def _copies(folder: str) -> list[Path]:
    """Copies of the project, one for each processor, with a history of one commit, where records come from."""
    trees = [Path(folder) / f"project{number}" for number in range(os.cpu_count() or 1)]
    for tree in trees:
        shutil.copytree(ROOT, tree, ignore=_left_out)
        for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "as it is"]):
            subprocess.run(["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a@b", *command], check=True)
    return trees


def _left_out(folder: str, names: list[str]) -> set[str]:
    """The names in a folder of the project that its copy does without."""
    if Path(folder) == ROOT / "results":
        return {*names} - {"README.md", "published"}
    return {".git", ".venv", "__pycache__"}


def main(arguments: list[str]) -> int:
    """Run what is not known yet, and print the survivors; 1 where more than 5 % survive."""
    options = dict(argument.split("=", 1) for argument in arguments)
    file = Path(options.get("results", ROOT / "results" / "mutation.json"))
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"tests": {}, "noticed": {}}
    excused = (Path(__file__).parent / "equivalent.txt").read_text().splitlines()
    target = TARGETS[options.get("list", "kernel")]
    some = chosen(target.modules, int(options.get("count", target.count)), options.get("only", ""))
    console = Console()
    trial.start()
    with tempfile.TemporaryDirectory() as folder:
        trees = _copies(folder)
        tests = Tests(kept["tests"], trees[0], target.folders)
        changed = tests.unknown()
        learned = _each(lambda name, tree: trial.outcome([name], tree, 3600, is_watched=True), changed, trees)
        for name, outcome in track(learned, "what tests call", total=len(changed), console=console):
            if outcome.failed:
                console.print(f"[red]error:[/red] fails as it is: {outcome.failed}")
            else:
                tests.keep(name, outcome)
                file.write_text(json.dumps(kept, indent=1))
        if tests.unknown():
            return 2
        # a file of tests that has changed may notice less: its mutants are tried again
        earlier = {
            mutant.name: test
            for mutant in some
            if (test := kept["noticed"].get(mutant.name)) and (not tests.has(test) or test.split("::")[0] in changed)
        }
        kept["noticed"] = {name: test for name, test in kept["noticed"].items() if name not in earlier}
        file.write_text(json.dumps(kept, indent=1))
        todo = [mutant for mutant in some if mutant.name not in kept["noticed"] and mutant.name not in excused]
        tried = _each(lambda it, tree: noticed(it, tests.of(it, first=earlier.get(it.name, "")), tree), todo, trees)
        for mutant, test in track(tried, "mutants", total=len(todo), console=console):
            if test:
                kept["noticed"][mutant.name] = test
                file.write_text(json.dumps(kept, indent=1))
            else:
                console.print(f"survived: {mutant.name}", markup=False, soft_wrap=True)
    excusable = [mutant for mutant in some if mutant.name in excused]
    alive = len([mutant for mutant in some if mutant.name not in kept["noticed"]]) - len(excusable)
    console.print(
        f"{len(some)} mutants: {len(some) - alive - len(excusable)} noticed, {alive} survived, "
        f"{len(excusable)} change nothing"
    )
    return 1 if alive > 0.05 * len(some) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
