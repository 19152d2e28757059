"""Run directories: what their files say of each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dpopt.results.verify import claims
from dpopt.results.verify.claims import Claims
from dpopt.results.verify.finding import Finding, expect
from dpopt.store.runs import CHECKED, WHOLE, Damaged, Store, read, sha256

PROVENANCE = {"commit", "dirty", "versions", "python", "device"}


def load(store: Store, run_id: str) -> Claims:
    """What a finished run claims.

    Raises:
        FileNotFoundError: it is not finished.
        Damaged: a file is missing, or cannot be read.
    """
    record = store.record(run_id)
    if missing := sorted(WHOLE - record.keys()):
        raise Damaged(f"record.json lacks {', '.join(missing)}")
    if not isinstance(record["cell"], dict) or not isinstance(record["provenance"], dict):
        raise Damaged("record.json: `cell` and `provenance` are not mappings")
    return Claims(run_id, run_id, record["cell"], store.ledger(run_id), record)


def check(store: Store, of: Claims) -> Iterator[Finding]:
    """Every claim of a finished run that does not hold."""
    yield from _cell(store, of)
    yield from claims.check(of)
    if missing := sorted(PROVENANCE - of.numbers["provenance"].keys()):
        yield Finding(of.run_id, "provenance", "all there", f"no {', '.join(missing)}")
    yield from _curve(of, store.curve(of.run_id))
    yield from _checksums(store, of)


def _cell(store: Store, of: Claims) -> Iterator[Finding]:
    try:
        found: Any = read(store.folder(of.run_id, "cell.json"))
    except (Damaged, FileNotFoundError) as error:
        found = error
    yield from expect(of.run_id, "cell of its record", of.cell, found)


def _curve(of: Claims, curve: list[dict[str, Any]]) -> Iterator[Finding]:
    """Draws ascend to the last, whose entry is what the record says of the end.

    A run without draws has no curve, nor has one that was merged from where its curve was not published.
    """
    record, draws = of.numbers, [entry["draw"] for entry in curve]
    if not record["draws"] or "curve.jsonl" not in record.get("checksums", CHECKED):
        return
    yield from expect(of.run_id, "last draw of its curve", record["draws"], draws[-1] if draws else None)
    yield from expect(of.run_id, "order of its curve", draws, sorted(set(draws)))
    yield from (finding for entry in curve[-1:] for finding in _final(of.run_id, record, entry))


def _final(run_id: str, record: Mapping[str, Any], entry: Mapping[str, Any]) -> Iterator[Finding]:
    for key in entry.keys() & record.keys() - {"diagnostics"}:
        yield from expect(run_id, f"{key} at the end of its curve", record[key], entry[key])


def _checksums(store: Store, of: Claims) -> Iterator[Finding]:
    """The files beside the record are those that it was written with; records of older versions do not say."""
    for name, claimed in of.numbers.get("checksums", {}).items():
        yield from expect(of.run_id, f"SHA-256 of {name}", claimed, sha256(store.folder(of.run_id, name)))
