"""Changes to stored runs, for tests of what readers make of them."""

from __future__ import annotations

from dpopt.store.runs import RUN, Run


def rewrite(store, run_id, /, *, ledger=None, curve=None, **changes):
    """Write a finished run again with `changes` of its record, sound but for them, whatever they say."""
    run = store.run(run_id)
    again = Run(
        {**run.record, **changes},
        run.ledger if ledger is None else ledger,
        run.curve if curve is None else curve,
    )
    store.write(store.folder(run_id, RUN), again.line())
