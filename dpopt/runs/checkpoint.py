"""The file that a stopped cell goes on from, see `training.checkpoint`: one file in its run directory.

The store keeps the file's checksum with it. Whatever is wrong with a checkpoint, its cell starts over: nothing else
that an unfinished run has left behind is read.
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from dpopt.privacy.ledger import Ledger
from dpopt.privacy.plan import Plan
from dpopt.store.runs import Store
from dpopt.study.diagnostics import Diagnostics
from dpopt.training import checkpoint
from dpopt.training.checkpoint import Elapsed, Reached


def dump(run_id: str, reached: Reached, diagnostics: Diagnostics | None) -> bytes:
    """A checkpoint's content."""
    return checkpoint.dump(reached, run_id=run_id, **({"diagnostics": diagnostics.state()} if diagnostics else {}))


def load(store: Store, run_id: str, initial: Any, plan: Plan, diagnostics: Diagnostics | None) -> Reached:
    """The place where a run goes on: at its last checkpoint, or at its beginning where there is none that can be used.

    Args:
        initial: the state before the first step, whose structure and device are the checkpoint's.
        plan: what the run may release.
        diagnostics: brought to where they were.
    """
    try:
        return _loaded(store.load_checkpoint(run_id), run_id, initial, plan, diagnostics)
    except FileNotFoundError:
        pass
    except Exception as error:  # whatever is wrong with the file, the cell can start over
        print(f"run {run_id}: checkpoint cannot be used ({error}); starting over", flush=True)
    return Reached(initial, Ledger(), Elapsed(), [])


def _loaded(content: bytes, run_id: str, initial: Any, plan: Plan, diagnostics: Diagnostics | None) -> Reached:
    saved = checkpoint.parse(content, pytree.tree_leaves(initial)[0].device)
    if saved["run_id"] != run_id:
        raise ValueError(f"it belongs to run {saved['run_id']}")
    reached = checkpoint.reached(saved, initial, plan)
    if diagnostics is not None:
        diagnostics.restore(saved["diagnostics"])
    return reached
