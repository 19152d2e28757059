"""What a run that was stopped goes on from: its state, ledger, curve and times, as bytes."""

from __future__ import annotations

import io
import json
import time
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from dpopt.privacy.ledger import Ledger
from dpopt.privacy.plan import Plan


class Elapsed(NamedTuple):
    """Seconds on the clock, and seconds that this process has computed: what a run takes where it has a core alone."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Elapsed:
        """The two clocks."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, begin: Elapsed) -> Elapsed:
        """The sum of this time and that from `begin` to now."""
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


def dump(reached: Reached, **more: Any) -> bytes:
    """A checkpoint's content; `more` is what else it holds, as tensors and plain data."""
    content = {
        "leaves": pytree.tree_leaves(reached.state),
        "ledger": reached.ledger.to_json(),
        "elapsed": tuple(reached.elapsed),
        "curve": json.dumps(reached.curve),
        **more,
    }
    file = io.BytesIO()  # written as bytes, a full disk is an OSError
    torch.save(content, file)
    return file.getvalue()


def parse(content: bytes, device: torch.device) -> dict[str, Any]:
    """What was dumped, its tensors on `device`; nothing but tensors and plain data is read."""
    return torch.load(io.BytesIO(content), weights_only=True, map_location=device)


def reached(saved: dict[str, Any], initial: Any, plan: Plan) -> Reached:
    """How far the run is that left `saved`.

    Args:
        saved: what `parse` gives.
        initial: the state before the first step, whose structure is the checkpoint's.
        plan: what the run may release.

    Raises:
        ValueError: `saved` is not the beginning of a run of this plan.
    """
    taken = Ledger.from_json(saved["ledger"])
    if not plan.ledger.starts_with(taken):
        raise ValueError(f"its {taken} is not how the planned {plan.ledger} begins")
    state = pytree.tree_unflatten(saved["leaves"], pytree.tree_structure(initial))
    return Reached(state, taken, Elapsed(*saved["elapsed"]), json.loads(saved["curve"]))
