"""What `dpopt gpu` does: one table of steps, the most valuable first, and a rehearsal of each kind for the CPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

from dpopt.bench.cases import REHEARSED
from dpopt.errors import ConfigError, unknown
from dpopt.harness import plan as planning
from dpopt.harness.suite import load_suite, suite_files

FULL = 40 * 2**30
"""Bytes of memory with which a device takes the batches of `BATCH`; with less, they are smaller by powers of two."""
BATCH = {
    "mlp": 4096,
    "cnn": 1024,
    "wrn": 256,
    "vit_tiny_224": 256,
    "vit_small_224": 128,
    "vit_base_224": 64,
    "gpt2_small": 32,
}
"""Examples of a timed step: enough to keep a large device busy."""
LEAST = 8
"""Examples that a step has on any device."""
LIMIT, USUAL = 120.0, 20.0
"""Seconds that a step of a rehearsal may take, and what each takes at most on two cores that do nothing else."""
SUBSETS = ("bitfit", "film", "lora", "head")
TIMM, HF, PEFT = ("timm",), ("transformers",), ("timm", "transformers", "peft")


@dataclass(frozen=True)
class Step:
    """A part of the work that has a process of its own.

    Attributes:
        name: unique; begins with its kind ("cost-wrn-full").
        work: the function of `work` that does it.
        arguments: of that function.
        limit: seconds that it may take. A step that resumes may take what is left of a slice, but not less.
        usual: seconds that it has taken where the table was made; None where nobody has timed it.
        needs: packages.
        suite: name and overrides of a suite that has to be at hand, with its data and weights.
        resumes: what was done is kept where the slice ends, and the next one goes on from there.
    """

    name: str
    work: str
    arguments: dict[str, Any] = field(default_factory=dict)
    limit: float = 150.0
    usual: float | None = None
    needs: tuple[str, ...] = ()
    suite: tuple[str, ...] = ()
    resumes: bool = False


def table(memory: int | None) -> list[Step]:
    """The steps on a device with so many bytes of memory; None rehearses them on the CPU."""
    return _rehearsal() if memory is None else _card(min(1.0, memory / FULL))


def _card(share: float) -> list[Step]:
    small, vits = ("mlp", "cnn", "wrn"), ("vit_tiny_224", "vit_small_224", "vit_base_224")
    batch = {case: max(LEAST, _power_of_two(full * share)) for case, full in BATCH.items()}

    def cost(case: str, subset: str) -> Step:
        arguments = {"case": case, "subset": subset, "batch_size": batch[case]}
        return Step(f"cost-{case}-{subset}", "cost", arguments, needs=PEFT if subset == "lora" else NEEDS[case])

    def of_case(kind: str, case: str, limit: float) -> Step:
        return Step(f"{kind}-{case}", kind, {"case": case, "batch_size": batch[case]}, limit, needs=NEEDS[case])

    return [
        Step("conformance-optimizers", "conform_optimizers", limit=240),
        *(
            Step(f"conformance-{case}", "conform_engines", {"case": case}, 120, needs=NEEDS[case])
            for case in (*small, "vit", "gpt2")
        ),
        *(cost(case, "full") for case in ("vit_base_224", "vit_tiny_224", "mlp", "cnn", "vit_small_224")),
        *(cost(case, "full") for case in ("gpt2_small", "wrn")),
        *(of_case("draws", case, 180) for case in ("vit_tiny_224", "vit_base_224", "mlp")),
        *(cost(case, subset) for subset in SUBSETS for case in reversed(vits)),
        *(of_case("batch", case, 240) for case in ("vit_base_224", "vit_tiny_224", "cnn", "gpt2_small")),
        *(of_case("bfloat16", case, 150) for case in ("vit_base_224", "vit_tiny_224", "gpt2_small")),
        _cells("digits", "quickstart", ["optimizers=[dp_sgd,dp_adam]", "seeds=[0,1]"], ("sklearn",)),
        _cells("mnist", "mnist_five_epochs", ["optimizers=[dp_adam]", "seeds=[0]", "epochs=1", "batch_size=200"]),
        *(_suite(name, []) for name in ("hyfreedp_table2_small", "adadp_cifar10")),
    ]


def _rehearsal() -> list[Step]:
    """One step of each kind, in seconds."""
    tiny = {"batch_size": REHEARSED, "tiny": True}
    digits = ["workloads=[digits_mlp]", "epsilon=3", "seeds=[0]", "epochs=1", "batch_size=128", "accountant=rdp"]
    one = ["optimizers=[dp_sgd]", "settings.dp_sgd.grid.lr=[1.0]", *digits]

    def of_case(kind: str, case: str, needs: tuple[str, ...] = (), **arguments: Any) -> Step:
        return Step(kind, kind.partition("-")[0], {"case": case, **tiny, **arguments}, needs=needs)

    steps = [
        Step("conformance-optimizers", "conform_optimizers", {"names": ["dp_adam", "hyfreedp", "adadp"]}),
        Step("conformance-mlp", "conform_engines", {"case": "mlp", "tiny": True}),
        of_case("cost-mlp-full", "mlp", subset="full", engines=["bookkeeping", "opacus_hooks"]),
        of_case("cost-vit_tiny_224-bitfit", "vit_tiny_224", TIMM, subset="bitfit", engines=["bookkeeping"]),
        of_case("draws-mlp", "mlp", optimizers=["hyfreedp"], probe_every=[1]),
        of_case("batch-mlp", "mlp", engines=["bookkeeping"], most=4 * REHEARSED),
        of_case("bfloat16-mlp", "mlp", engines=["bookkeeping"]),
        _cells("digits", "quickstart", one, ("sklearn",), only=["Opacus, one model at a time", "dpopt run"]),
        _suite("hyfreedp_table2_small", ["optimizers=[hyfreedp]", *digits], ("sklearn",)),
        _suite("adadp_cifar10", ["optimizers=[adadp]", *digits], ("sklearn",)),
    ]
    return [step if step.resumes else dataclasses.replace(step, limit=LIMIT, usual=USUAL) for step in steps]


NEEDS = {
    **dict.fromkeys(("mlp", "cnn"), ()),
    **dict.fromkeys(("wrn", "vit", "vit_tiny_224", "vit_small_224", "vit_base_224"), TIMM),
    **dict.fromkeys(("gpt2", "gpt2_small"), HF),
}
"""The packages that a case's model comes from."""


def _power_of_two(most: float) -> int:
    """The largest one that is not above `most`; 0 below 1."""
    return 2 ** int(most).bit_length() // 2


def _cells(name: str, suite: str, overrides: list[str], needs: tuple[str, ...] = (), **more: Any) -> Step:
    arguments = {"suite": suite, "overrides": overrides, **more}
    return Step(f"cells-{name}", "cells", arguments, 360, needs=("opacus", *needs), suite=(suite, *overrides))


def _suite(name: str, overrides: list[str], needs: tuple[str, ...] = ()) -> Step:
    arguments = {"suite": name, "overrides": overrides}
    return Step(f"suite-{name}", "suite", arguments, 45, needs=needs, suite=(name, *overrides), resumes=True)


def select(steps: Sequence[Step], names: Iterable[str] | None) -> list[Step]:
    """The steps of those names, or whose names begin so ("cost", "cost-wrn"); all where none are given.

    Raises:
        ConfigError: no step has such a name.
    """
    if names is None:
        return list(steps)
    chosen = [(name, [step for step in steps if f"{step.name}-".startswith(f"{name}-")]) for name in names]
    for name, found in chosen:
        if not found:
            kinds = {step.name.partition("-")[0] for step in steps}
            raise unknown("steps", name, [*sorted(kinds), *(step.name for step in steps)])
    wanted = {step.name for _, found in chosen for step in found}
    return [step for step in steps if step.name in wanted]


def missing(step: Step) -> str:
    """What the step needs and cannot have here; empty if nothing."""
    packages = [package for package in step.needs if find_spec(package) is None]
    return f"no package {packages[0]}" if packages else _suite_missing(step.suite) if step.suite else ""


@cache
def _suite_missing(suite: tuple[str, ...]) -> str:
    name, *overrides = suite
    if name not in suite_files():
        return f"no suite {name}"
    try:
        absent = planning.missing(load_suite(name, overrides))
        if absent and not os.environ.get("DPOPT_DATA") and find_spec("datasets") is None:
            return "no data: DPOPT_DATA is not set, and there is no package datasets to ask the hub with"
        return next((str(entry) for entry in absent if not entry.hub), "")
    except ConfigError as error:
        return str(error)
