"""`dpopt verify`: makes every claim of stored and published results again, from what lies beneath it.

A run's epsilon is computed anew from its ledger, by the accountant that states it and by one that shares no code with
it; its name from its cell; what it says of the plan from cell and ledger; published tables and figures from the runs
that are published. What is not verified: that the code released what the ledger says (tests of the oracles and audits
look at that), and scores, which only training again would show. Nor is it verified that no run was removed with its
entry in the suite, at the end of a search's numbers: it would be made again, with the same result; nor that the last
part of a suite is there, where another suite holds its runs: no part names it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpopt import files
from dpopt.bars import watched
from dpopt.cells import identity
from dpopt.errors import ConfigError
from dpopt.files import Damaged
from dpopt.privacy.ledger import Ledger, Unit
from dpopt.results import audits, pricing, publishing, speed
from dpopt.results.results import Results
from dpopt.results.verify.claims import Claims, Finding, check, second_opinion
from dpopt.results.verify.stated import misstated
from dpopt.store import Store, manifests
from dpopt.store.provenance import unknown_commits
from dpopt.store.runs import RESULTS, UNREADABLE, Run, address

_WIDENED = 10**6
"""Numbers from here on are those of runs beyond the end of a grid: (1 + step) * _WIDENED + number of its first run."""
_COMMIT = "are of a commit that is not in this history: "
_MEASURED = {"audit": audits.markdown, "speed": speed.markdown}
"""Folder of published measurements -> what makes the table of a record."""

__all__ = ["Finding", "Verified", "verify"]


@dataclass
class Verified:
    """The number of things of each kind that were looked at, and the claims that do not hold.

    `remarks` are lines on what is no mismatch and yet limits what was verified, or what it is worth.
    """

    checked: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def note(self, kind: str, findings: Iterable[Finding]) -> None:
        self.checked[kind] += 1
        self.findings += findings


def verify(store: Store, suite: str | None = None, plots: Path | None = None) -> Verified:
    """Verify all that `store` holds, and what its folder `published` does, or one suite of both.

    With `plots`, the folder of the figures' files, every published figure is drawn again. `ConfigError` for a suite of
    which nothing is planned or published here.
    """
    verified, published = Verified(), Store(store.root / "published")
    stores = [each for each in (store, published) if each is store or each.is_read_only]
    holding = stores if suite is None else [each for each in stores if suite in each.suites()]
    with pricing.computed_anew():
        for each in holding:
            _verify(each, [suite] if suite else each.suites(), suite is None, plots, verified)
    if not holding:
        store.manifest(str(suite))  # which says that there is no such suite, and what there is
    return verified


def _verify(store: Store, suites: list[str], is_whole: bool, plots: Path | None, verified: Verified) -> None:
    planned, elsewhere, tally, is_readable = set[str](), set[str](), Counter[str](), True
    for name in watched(suites, len(suites), "verifying suites", has_lines=True):
        # Of its own for each suite: archives are large, and a store keeps all that it has read.
        single = Store(store.root)
        try:
            entries, archived = single.manifest(name)["cells"], single.archive(name).runs
            amiss = [Finding(*each) for each in manifests.amiss(single.suite_folder(name))]
            amiss += [*_entries(single, name, entries), *misstated(name, entries)]
        except UNREADABLE as error:
            verified.note("suites", [Finding(name, "cells", "readable", error)])
            is_readable = False
            continue
        planned |= {entry["run_id"] for entry in entries}
        elsewhere |= archived.keys()
        verified.note("suites", amiss)
        for run_id, run in archived.items():
            _run(f"{name}, {run_id}", lambda run=run: run, tally, verified)
        if store.is_read_only and entries:
            differences = publishing.differences(Results(single, name), plots)
            verified.findings += [Finding(str(path), "file", "as its runs give it", why) for path, why in differences]
    directories = store.run_ids()
    run_ids = directories if is_whole else sorted(planned - (elsewhere - {*directories}))
    for run_id in watched(run_ids, len(run_ids), "verifying runs", has_lines=True):
        _run(run_id, lambda run_id=run_id: store.run(run_id), tally, verified)
    commits = {text.removeprefix(_COMMIT): text for text in tally if text.startswith(_COMMIT)}
    unknown = {commits[name] for name in unknown_commits(commits)}
    verified.remarks += [
        f"{n} runs {text}" for text, n in tally.items() if n and (text in unknown or not text.startswith(_COMMIT))
    ]
    try:
        others = set(store.suites()).difference(suites) if directories else ()
        planned.update(entry["run_id"] for name in others for entry in store.manifest(name)["cells"])
    except ConfigError:
        is_readable = False
    # A part that is gone lowers what its searches are charged. Of a suite that cannot be read all runs would be named.
    gone = sorted({*directories} - planned) if is_readable else []
    verified.findings += [
        Finding(run_id, "suite that it is a run of", "one in suites/", "none holds it") for run_id in gone
    ]
    if not is_whole:
        return
    verified.findings += [Finding(path, "a run directory", "", "something else") for path in store.foreign()]
    for path in store.measurements() if not store.is_read_only else ():  # published ones are named by hand
        verified.note("measurements", _measurement(path))
    for kind in _MEASURED if store.is_read_only else ():
        for path in sorted((store.root / kind).rglob("record.json")):
            verified.note("measurements", _measurement(path, kind))


def _run(where: str, load: Callable[[], Run], tally: Counter[str], verified: Verified) -> None:
    """Verify a run, called `where`; what is no mismatch and yet limits what it is worth goes to `tally`."""
    try:
        run = load()
        ledger = Ledger.from_json(json.dumps(run.ledger), Unit.stated(run.record))
        claims = Claims(where, ledger, run.record, run.curve)
        origin = dict(run.record["provenance"])
    except FileNotFoundError:
        verified.checked["unfinished"] += 1
        return
    except (Damaged, *UNREADABLE) as error:
        verified.note("runs", [Finding(where, "file", "whole", error)])
        return
    verified.note("runs", check(claims))
    tally[f"{_COMMIT}{origin['commit']}" if origin.get("commit") else "do not know their commit"] += 1
    tally["were made with files that differ from their commit"] += bool(origin.get("dirty"))
    with suppress(*UNREADABLE):  # which is a finding of `check`
        second = second_opinion(claims.ledger, claims.cell["delta"], claims.cell["accountant"])
        is_private = any(draw.effective_noise > 0 for draw in claims.ledger.counts())
        tally["have an epsilon that no second accountant can find"] += is_private and second is None


def _entries(store: Store, suite: str, entries: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Cells have their ids as names, and the runs of a row numbers from 0 on, as those of a widened search have."""
    numbers: dict[tuple[Any, ...], set[int]] = {}
    # A search in two parts keeps a number for its last run, which is planned when the first ones are done.
    waiting = {entry["label"] for entry in entries if "stage" in entry and store.state(entry["run_id"]) not in RESULTS}
    for entry in entries:
        cell = entry["cell"]
        if (anew := identity(cell)) != entry["run_id"]:
            yield Finding(f"suite {suite}", "run id of a planned cell", entry["run_id"], anew)
        step, first = divmod(cell.get("search", 0), _WIDENED)
        target, data = str(entry.get("target", cell["epsilon"])), json.dumps(cell["workload"], sort_keys=True)
        row = (entry["label"], target, cell["seed"], data, cell["accountant"], cell.get("average", 0.0))
        numbers.setdefault((*row, first if step else None), set()).add(step - 1 if step else first)
    for (label, target, seed, *_), present in numbers.items():
        missing = sorted(set(range(max(present))) - present)
        if missing and label not in waiting:  # a cell that is gone lowers what its search is charged
            where = f"suite {suite}, {label}, epsilon {target}, seed {seed}"
            yield Finding(where, "numbers of its runs", f"0 to {max(present)}", f"none has {missing[0]}")


def _measurement(path: Path, kind: str = "") -> Iterator[Finding]:
    """A measurement is named by what its record holds; a published one, of a `kind`, has the table of its record."""
    try:
        record = files.read(path)
        if not kind and (anew := address(record)) != path.parent.name:
            yield Finding(str(path), "name of its content", path.parent.name, anew)
        if kind and files.content(path.with_name("table.md")).decode() != _MEASURED[kind](record):
            yield Finding(str(path.with_name("table.md")), "file", "as its record gives it", "another table")
    except (Damaged, FileNotFoundError, *UNREADABLE) as error:
        yield Finding(str(path), "record", "readable", f"{type(error).__name__} {error}")
