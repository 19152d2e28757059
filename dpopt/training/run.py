"""A run of `fit` from its first draw, or from its checkpoint, to its record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dpopt import __version__
from dpopt.clipping import ClippingEngine
from dpopt.privacy.data import DataOracle
from dpopt.privacy.distributed import Processes, digest
from dpopt.privacy.plan import Plan
from dpopt.training.checkpoint import Elapsed, Reached
from dpopt.training.goal import Goal
from dpopt.training.loop import Phases, observe, steps, summary
from dpopt.training.resuming import Checkpoint, Seeds, put_off
from dpopt.training.subject import Subject, kept_modes

GUARANTEE = {"adjacency": "add or remove one record", "unit": "record", "sampling": "Poisson"}
"""What epsilon and delta are about, in words of the record."""
CHECKPOINT_SECONDS = 60.0
"""At least so much time lies between two checkpoints."""
Callback = Callable[[dict[str, Any]], None]


@dataclass
class FitRun:
    """What is needed to train, and to say afterwards what was done.

    Attributes:
        goal, subject, engine, plan, oracle: what is trained how, on what, with how much noise.
        reached: where it begins or goes on.
        file, seeds, start: its checkpoint, and what that holds beside how far the run is.
        callback: called with each entry of the curve.
    """

    goal: Goal
    subject: Subject
    engine: ClippingEngine
    plan: Plan
    oracle: DataOracle
    reached: Reached
    file: Checkpoint
    seeds: Seeds
    start: str
    callback: Callback | None

    @classmethod
    def of(
        cls,
        goal: Goal,
        subject: Subject,
        seen: Subject,
        engine: ClippingEngine,
        plan: Plan,
        file: Checkpoint,
        callback: Callback | None,
        *,
        processes: Processes,
        engine_name: str,
        physical_batch: int | None,
    ) -> FitRun:
        """The run at its beginning, or where its checkpoint is.

        `seen` is the subject as the engine trains it, on views of the records where these are augmented.

        Raises:
            ConfigError: the checkpoint is another run's, or processes differ.
        """
        if processes.size > 1:
            model = digest(*subject.model.state_dict().values())
            processes.agree(subject.device, model=model, checkpoint=file.seeds)
        seeds = file.seeds or goal.seeds(plan, subject, seen, engine, processes, [engine_name, physical_batch])
        start = engine.theta
        with processes.together() as settle:
            reached = file.reached(goal.stepper.init(start), plan)
            settle()
        oracle = DataOracle(
            engine,
            *subject.train,
            plan,
            draw_seed=seeds.draws,
            noise_seed=seeds.noise,
            physical_batch=physical_batch,
            transform=seen.transform,
            device=subject.device,
            ledger=reached.ledger,
            processes=processes,
        )
        return cls(goal, subject, engine, plan, oracle, reached, file, seeds, file.start or digest(start), callback)

    def train(self, phases: Phases) -> Reached:
        """Take all draws that are left; the curve grows, and checkpoints are written.

        Raises:
            KeyboardInterrupt: after a checkpoint, which it names, where the run has a file.
        """
        begin, state, curve = Elapsed.now(), self.reached.state, list(self.reached.curve)

        def now() -> Reached:
            return Reached(state, self.oracle.ledger, self.reached.elapsed.since(begin), curve)

        phases.begin("training", self.plan.draws)
        self._save(now(), self.seeds)
        saved = begin.wall
        with self.file.told(), kept_modes(self.subject.model), put_off(self.file.is_kept) as interrupted:
            self.subject.model.train()
            for state, is_mark in steps(self.goal.stepper, self.oracle, self.reached.state):
                phases.at(self.oracle.draws_taken)
                if is_mark:
                    curve.append(self._observed(state))
                is_told, is_last = is_mark and self.callback is not None, interrupted.is_set()
                # Draws that are taken again release the same but for rounding: nobody is to have seen what they gave.
                if is_told or is_last or time.perf_counter() - saved >= CHECKPOINT_SECONDS:
                    self._save(now(), self.seeds)
                    saved = time.perf_counter()
                if is_told and self.callback and self.oracle.processes.is_first:
                    self.callback(dict(curve[-1]))
                if is_last:
                    raise KeyboardInterrupt
        return now()

    def finish(self, end: Reached, teaches: bool) -> dict[str, Any]:
        """Put the result into the model, and say what was done; the seeds are gone from the checkpoint then.

        Args:
            end: what `train` gives.
            teaches: whether any record had something to learn from.

        Raises:
            RuntimeError: see `summary`; the model is as it was.
        """
        spent = summary(self.plan, self.oracle, end.state, self.goal.epsilon, len(self.subject.train.x))
        if spent["status"] == "done" and not (teaches and digest(end.state.theta) != self.start):
            spent["status"] = "no_signal"
        if end.curve[-1].get("test_unscored"):
            spent["status"] = "diverged"
        self._save(end, None)
        self.engine.load(end.state.theta)
        return {
            "seed": self.goal.seed,
            "seed_is_secret": self.goal.seed is None,
            "batch_size": self.goal.batch_size,
            "epochs": self.goal.epochs,
            "average": self.goal.average,
            "multiplicity": self.goal.multiplicity,
            **GUARANTEE,
            **spent,
            **self.goal.unused.record,
            **({"tested": len(self.subject.held_out["test"].x)} if self.subject.held_out else {}),
            **{key: value for key, value in end.curve[-1].items() if key not in ("draw", "epoch", "eta")},
            "train_seconds": end.elapsed.wall,
            "resumed_at": len(self.reached.ledger),
            "processes": self.oracle.processes.size,
            "versions": {"dpopt": __version__, "torch": str(torch.__version__)},
        }

    def _observed(self, state: Any) -> dict[str, Any]:
        of = self.subject
        return observe(self.engine, of.model, state, self.oracle, of.loss, of.metric, of.held_out, of.transform)

    def _save(self, reached: Reached, seeds: Seeds | None) -> None:
        self.file.save(reached, seeds, self.start)
