"""What a run that was stopped goes on from: one file with its state, ledger, curve and times.

The store keeps the file's checksum with it. Whatever is wrong with a checkpoint, its cell starts over: nothing else
that an unfinished run has left behind is read.
"""

from __future__ import annotations

import io
import json
import time
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from dpopt.privacy.ledger import Ledger
from dpopt.privacy.plan import Plan
from dpopt.store.runs import Store
from dpopt.study.diagnostics import Diagnostics


class Elapsed(NamedTuple):
    """Seconds on the clock, and seconds that this process has computed: what a run takes where it has a core alone."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Elapsed:
        """The two clocks."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, begin: Elapsed) -> Elapsed:
        """What has passed from `begin` to now, on top of this."""
        now = Elapsed.now()
        return Elapsed(self.wall + now.wall - begin.wall, self.cpu + now.cpu - begin.cpu)


class Reached(NamedTuple):
    """How far a run is.

    Attributes:
        state: of its optimizer.
        ledger: the draws that it has taken.
        elapsed: what training up to here has taken.
        curve: the entries of its curve up to here.
    """

    state: Any
    ledger: Ledger
    elapsed: Elapsed
    curve: list[dict[str, Any]]


def dump(run_id: str, reached: Reached, diagnostics: Diagnostics | None) -> bytes:
    """A checkpoint's content."""
    content = {
        "run_id": run_id,
        "leaves": pytree.tree_leaves(reached.state),
        "ledger": reached.ledger.to_json(),
        "elapsed": tuple(reached.elapsed),
        "curve": json.dumps(reached.curve),
        **({"diagnostics": diagnostics.state()} if diagnostics else {}),
    }
    file = io.BytesIO()  # written as bytes, a full disk is an OSError
    torch.save(content, file)
    return file.getvalue()


def load(store: Store, run_id: str, initial: Any, plan: Plan, diagnostics: Diagnostics | None) -> Reached:
    """Where a run goes on: at its last checkpoint, or at its beginning where there is none that can be used.

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
    leaves, structure = pytree.tree_flatten(initial)
    saved = torch.load(io.BytesIO(content), weights_only=True, map_location=leaves[0].device)
    taken = Ledger.from_json(saved["ledger"])
    if saved["run_id"] != run_id:
        raise ValueError(f"it belongs to run {saved['run_id']}")
    if not plan.ledger.starts_with(taken):
        raise ValueError(f"its {taken} is not how the planned {plan.ledger} begins")
    state = pytree.tree_unflatten(saved["leaves"], structure)
    reached = Reached(state, taken, Elapsed(*saved["elapsed"]), json.loads(saved["curve"]))
    if diagnostics is not None:
        diagnostics.restore(saved["diagnostics"])
    return reached
