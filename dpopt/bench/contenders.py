"""The contenders that are timed: functions that set everything up and return one training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpopt import clipping, registry
from dpopt.bench.cases import Case
from dpopt.clipping import Abadi
from dpopt.optimizers.dp_adam import DPAdam
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import DataOracle, Draw, Ledger, Plan, TraceOracle
from dpopt.privacy.calibration import trace
from dpopt.privacy.isolation import Isolated
from dpopt.types import Optimizer

LR, CLIP, NOISE = 1e-3, 1, 1.0
"""Learning rate, clipping bound and noise multiplier of all engines; steps are small, so that no model diverges."""
_PRIVACY: dict[str, Any] = {"noise_multiplier": NOISE, "max_grad_norm": CLIP}

Step = Callable[[], None]


class Task(NamedTuple):
    """The training that a step is of."""

    case: Case
    subset: str  # of the parameters, which is trained
    device: torch.device
    precision: str = "float32"

    def make(self) -> tuple[nn.Module, Tensor, Tensor]:
        return self.case.make(self.subset, self.device)


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    name: str
    # Number of calls -> a function that may be called so often. It is called in another process, so it must pickle;
    # whatever it raises is this row's result.
    build: Callable[[int], Step]
    baseline: str  # name of the contender that it is compared with
    draws: int = 1  # that one call takes, by which its time is divided


def non_private(task: Task, calls: int) -> Step:
    """Plain SGD on the mean loss."""
    model, x, y = task.make()
    return _stepped(_sgd(model), lambda: task.case.loss(model(x), y).mean(), task)


def _private(
    optimizer: Optimizer,
    engine: str,
    task: Task,
    calls: int,
    *,
    steps: int = 1,
    rate: float = 1.0,
    is_whole: bool = False,
    isolate: bool = False,
) -> Step:
    """`steps` steps of `optimizer` as a run makes them: sampling, gather, clipped sum, noise, update, ledger.

    At rate 1 every draw holds exactly the batch, in as few physical batches as the engine finds memory for, or in one
    (`is_whole`). At another rate draws are random, of as many records as the batch on average, and padded as in a run.
    With `isolate` the optimizer is in a process of its own.
    """
    records = round(task.case.batch_size / rate)
    model, x, y = task._replace(case=dataclasses.replace(task.case, batch_size=records)).make()
    clipper = clipping.engine(model, task.case.loss, engine, sample=(x[:3], y[:3]), precision=task.precision)
    # Twice what is needed: a method that changes half-way is measured as it begins.
    plan = _fixed_plan(optimizer, clipper.dimension, 2 * calls * _draws_of(optimizer, steps), rate)
    # At rate 1 a run's rounding up of a draw would only add empty rows, which plain SGD does not have.
    size = records if is_whole else min(records, clipper.physical_batch(records)) if rate == 1 else None
    oracle = DataOracle(clipper, x, y, plan, draw_seed=0, noise_seed=1, physical_batch=size)
    stepped = Isolated(optimizer) if isolate else optimizer
    state = stepped.init(clipper.theta)

    def step() -> None:
        nonlocal state
        for _ in range(steps):
            state = stepped.step(state, oracle)

    return step


def _opacus_hooks(task: Task, calls: int) -> Step:
    """Opacus' default: hooks make per-example gradients, DP-SGD clips and adds noise."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model, x, y = task.make()
    hooked: Any = GradSampleModule(model)
    optimizer = DPOptimizer(_sgd(model), expected_batch_size=task.case.batch_size, **_PRIVACY)
    return _stepped(optimizer, lambda: task.case.loss(hooked(x), y).mean(), task)


def _opacus_ghost(task: Task, calls: int) -> Step:
    """Opacus' ghost clipping: norms without per-example gradients, and a second backward pass."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, x, y = task.make()
    hooked: Any = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP)
    optimizer = DPOptimizerFastGradientClipping(_sgd(model), expected_batch_size=task.case.batch_size, **_PRIVACY)
    criterion: Any = partial(task.case.loss)
    criterion.reduction = "mean"  # an attribute that it sets to "none" before each call
    private_loss = DPLossFastGradientClipping(hooked, optimizer, criterion)
    return _stepped(optimizer, lambda: private_loss(hooked(x), y), task)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    # What is not trained has no gradient that the optimizers of Opacus could clip.
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)


def _stepped(optimizer: Any, loss: Callable[[], Any], task: Task) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(task.device.type, dtype=torch.bfloat16, enabled=task.precision == "bfloat16"):
            value = loss()
        value.backward()
        optimizer.step()

    return step


_SGD = DPSGD(LR, Abadi(CLIP))
ENGINES: dict[str, Callable[..., Step]] = {
    "bookkeeping": partial(_private, _SGD, "bookkeeping"),
    "poisson": partial(_private, _SGD, "bookkeeping", rate=0.25),
    "isolated": partial(_private, _SGD, "bookkeeping", isolate=True),
    "opacus_hooks": _opacus_hooks,
    "opacus_ghost": _opacus_ghost,
    "vmap": partial(_private, _SGD, "vmap"),
}
"""The ways to make a private step of SGD, by name. "poisson" is book-keeping on draws of random size, "isolated" is
book-keeping with the optimizer in a process of its own."""


def engine_group(names: Sequence[str], task: Task) -> list[Contender]:
    """Non-private SGD and the engines `names`, all compared with it."""
    builders = {"non_private": non_private} | {name: ENGINES[name] for name in names}
    return [Contender(name, partial(build, task), "non_private") for name, build in builders.items()]


def optimizer_group(names: Sequence[str], probe_every: Sequence[int], task: Task) -> list[Contender]:
    """DP-Adam and the optimizers `names`, compared with it; one that takes another for its base, with that.

    An optimizer with a field `probe_every` is measured at each K given, over whole rounds of K steps.
    """
    group = {"dp_adam": (DPAdam(), "dp_adam", 1)}
    for name in names:
        optimizer = registry.create(name)
        base = getattr(optimizer, "base", None)
        baseline = f"base of {name}" if base else "dp_adam"
        if base:
            # With the owner's clipping rule, so that the ratio is of the step size's rule alone.
            group[baseline] = (dataclasses.replace(base, clip=getattr(optimizer, "clip", base.clip)), baseline, 1)
        if hasattr(optimizer, "probe_every"):
            for k in probe_every:
                group[f"{name} K={k}"] = (dataclasses.replace(optimizer, probe_every=k), baseline, k)
        else:
            group[name] = (optimizer, baseline, 1)
    return [
        Contender(name, partial(_private, each, "auto", task, steps=steps), baseline, _draws_of(each, steps))
        for name, (each, baseline, steps) in group.items()
    ]


def _draws_of(optimizer: Optimizer, steps: int) -> int:
    oracle = TraceOracle(1, 1.0, 8 * steps)  # no optimizer takes eight draws for a step
    state = optimizer.init(oracle.theta)
    for _ in range(steps):
        state = optimizer.step(state, oracle)
    return oracle.draws_taken


def _fixed_plan(optimizer: Optimizer, dimension: int, draws: int, rate: float) -> Plan:
    # Any noise costs the same time, so none is calibrated, and the plan states no epsilon.
    structure = trace(optimizer, rate=rate, draws=draws)
    ledger = Ledger()
    for kinds, count in structure:
        ledger.append(Draw(rate, (NOISE,) * len(kinds)), count)
    noise = {kind: NOISE for kinds, _ in structure for kind in kinds}
    return Plan(noise, ledger, float("inf"), rate, draws, dimension, delta=1.0, accountant="none")
