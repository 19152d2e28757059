"""The loop over draws that `fit` and the harness share: steps, evaluations, what was spent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpopt.clipping import ClippingEngine, Loss
from dpopt.errors import ConfigError
from dpopt.privacy import accountants
from dpopt.privacy.data import DataOracle
from dpopt.privacy.distributed import ALONE, Processes, digest
from dpopt.privacy.ledger import Ledger, NonPrivate, Plan
from dpopt.privacy.sampling import send
from dpopt.training.subject import Transform
from dpopt.types import Optimizer, Vector
from dpopt.workloads.base import EVALUATION_BATCH, Predict, Split

ADAPTED = ("eta", "bound")
"""Fields of a state that go into the curve: the optimizer's own learning rate, and its own clipping bound."""


def resolve_device(name: str | int | torch.device) -> torch.device:
    """The device `name`; "auto" is CUDA where there is one, else the CPU; ConfigError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:  # which names all that torch was ever built for
        raise ConfigError("device", name, "expected auto, cpu, cuda or cuda:N") from error
    # A name that torch knows says nothing of this machine.
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("device", name, f"not available: {str(error).splitlines()[0]}") from error
    if device.type == "meta":
        raise ConfigError("device", name, "it keeps no values")
    return device


def steps(optimizer: Optimizer, oracle: DataOracle, state: Any, marks: int = 40) -> Iterator[tuple[Any, bool]]:
    """Step until the budget is spent; yields each state, and whether one of `marks` equal parts ends with it.

    Raises:
        ConfigError: a step took no draw; without data it did, or calibration had refused it.
    """
    done = oracle.draws_taken * marks // max(1, oracle.draws_total)
    while left := oracle.draws_left:
        state = optimizer.step(state, oracle)
        if oracle.draws_left == left:  # the next one would do the same, without end
            raise ConfigError("optimizer", optimizer, "its step asked for nothing; expected at least one draw")
        now = oracle.draws_taken * marks // oracle.draws_total
        yield state, now > done
        done = now


def observe(
    engine: ClippingEngine,
    model: nn.Module,
    state: Any,
    oracle: DataOracle,
    loss: Loss,
    metric: Loss | None,
    splits: dict[str, Split],
    transform: Transform,
    score: str = "accuracy",
    batch: int = EVALUATION_BATCH,
) -> dict[str, Any]:
    """One entry of the curve: draws, epochs, what its state has of `ADAPTED`, metrics.

    Raises:
        RuntimeError: the oracle's processes have come to different parameters, so they do not compute the same.
    """
    if oracle.processes.size > 1 and len(set(oracle.processes.gather(digest(state.theta)))) > 1:
        # Each steps on its own from the same releases, so a difference means that sums were of different models.
        raise RuntimeError(f"after {oracle.draws_taken} draws the processes have different parameters")
    entry: dict[str, Any] = {"draw": oracle.draws_taken, "epoch": oracle.draws_taken * oracle.rate}
    # Only some optimizers adapt one learning rate or bound; for the others the curve has none.
    adapted = {name: torch.as_tensor(getattr(state, name)) for name in ADAPTED if hasattr(state, name)}
    entry |= {name: float(value) for name, value in adapted.items() if value.numel() == 1}
    model.eval()
    for name, split in splits.items():
        scores = evaluate(engine, state.theta, loss, metric, split, transform, score, batch, oracle.processes)
        entry |= {f"{name}_{key}": value for key, value in scores.items()}
    model.train()
    return entry


def evaluate(
    engine: ClippingEngine,
    theta: Vector,
    loss: Loss,
    metric: Loss | None,
    split: Split,
    transform: Transform,
    score: str = "accuracy",
    batch: int = EVALUATION_BATCH,
    processes: Processes = ALONE,
) -> dict[str, float]:
    """Mean loss, and mean of `metric` under the name `score`, over `split` at `theta`; `batch` records at a time.

    Several processes take turns, and all get the means.

    Returns:
        A record whose outputs are not all finite, or whose metric is not, has no score: it counts as wrong where the
        score is a share of records (its name ends in "accuracy"), and makes any other mean NaN. `unscored` says how
        many there are, if any.
    """
    without = 0.0 if score.endswith("accuracy") else math.nan
    sums = {"unscored": 0.0, "loss": 0.0} | ({score: 0.0} if metric else {})
    batches = zip(split.x.split(batch), split.y.split(batch), strict=True)
    for parts in islice(batches, processes.rank, None, processes.size):
        x, y = (send(part, theta.device) for part in parts)
        output = engine.outputs(theta, transform(x))
        with engine.state:
            values = {"loss": loss(output, y).double()} | ({score: metric(output, y).double()} if metric else {})
        # The largest of several NaN is the first: without this, such a record would be a prediction of class 0.
        is_scored = torch.ones(len(x), dtype=torch.bool, device=x.device)
        for part in pytree.tree_leaves((output, values.get(score))):
            if isinstance(part, Tensor) and part.shape[:1] == y.shape[:1]:
                is_scored &= part.isfinite().reshape(len(x), -1).all(1)
        for name, each in values.items():
            sums[name] += float(each.where(is_scored, without if name == score else math.nan).sum())
        sums["unscored"] += int((~is_scored).sum())
    # Sums and not means, as the processes have unequal shares.
    gathered = processes.gather(sums)
    totals = {key: sum(each[key] for each in gathered) for key in sums}
    unscored = int(totals.pop("unscored"))
    return {key: total / len(split.x) for key, total in totals.items()} | ({"unscored": unscored} if unscored else {})


def predictor(
    engine: ClippingEngine, model: nn.Module, theta: Vector, transform: Transform, batch: int = EVALUATION_BATCH
) -> Predict:
    """The function by which a workload's `report` gets outputs of `model` at `theta`, `batch` records at a time."""

    def predict(x: Tensor) -> Tensor:
        was_training = model.training
        model.eval()
        parts = (transform(send(part, theta.device)) for part in x.split(batch))
        outputs = torch.cat([engine.outputs(theta, part).to(x.device) for part in parts])
        model.train(was_training)
        return outputs

    return predict


def summary(plan: Plan, state: Any, target: float, examples: int, *, spent: Ledger | None = None) -> dict[str, Any]:
    """The part of a record that says what a run of `plan` spent; epsilon is recomputed from the plan's ledger.

    `spent` are the draws of earlier runs on the same records, which epsilon counts too.
    """
    epsilon = accountants.epsilon(spent + plan.ledger if spent else plan.ledger, plan.delta, plan.accountant)
    return {
        "status": "done" if bool(state.theta.isfinite().all()) else "diverged",
        "private": not isinstance(plan, NonPrivate),
        "epsilon_target": target,
        "epsilon": epsilon,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "noise": dict(plan.noise),
        "rate": plan.rate,
        "draws": plan.draws,
        "examples": examples,
        "dimension": plan.dimension,
    }
