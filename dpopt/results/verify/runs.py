"""Run directories: what their files say of each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpopt.files import Damaged
from dpopt.results.verify import claims
from dpopt.results.verify.claims import Claims
from dpopt.results.verify.finding import Finding, expect
from dpopt.store.runs import Store

PROVENANCE = {"commit", "dirty", "versions", "python", "device"}


def load(store: Store, run_id: str) -> Claims:
    """What a finished run claims.

    Raises:
        FileNotFoundError: it is not finished.
        Damaged: it cannot be read.
    """
    record = store.record(run_id)
    if not isinstance(record["provenance"], dict):
        raise Damaged(f"{store.place(run_id)}: `provenance` is not a mapping")
    return Claims(run_id, run_id, record["cell"], store.ledger(run_id), record)


def check(store: Store, of: Claims) -> Iterator[Finding]:
    """Every claim of a finished run that does not hold."""
    yield from claims.check(of)
    if missing := sorted(PROVENANCE - of.numbers["provenance"].keys()):
        yield Finding(of.run_id, "provenance", "all there", f"no {', '.join(missing)}")
    yield from _curve(of, store.run(of.run_id).curve)


def _curve(of: Claims, curve: list[dict[str, Any]] | None) -> Iterator[Finding]:
    """Draws ascend to the last, whose entry is what the record says of the end.

    A run without draws has no curve, nor has one that was published without.
    """
    record = of.numbers
    if not record["draws"] or curve is None:
        return
    draws = [entry["draw"] for entry in curve]
    yield from expect(of.run_id, "last draw of its curve", record["draws"], draws[-1] if draws else None)
    yield from expect(of.run_id, "order of its curve", draws, sorted(set(draws)))
    for entry in curve[-1:]:
        for key in entry.keys() & record.keys() - {"diagnostics"}:
            yield from expect(of.run_id, f"{key} at the end of its curve", record[key], entry[key])
