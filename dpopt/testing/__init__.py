"""Conformance checks for optimizers and workloads: what every registered one must pass, callable by plug-ins.

    import dpopt, pytest

    @pytest.mark.parametrize("check", dpopt.testing.checks(MyOptimizer()), ids=str)
    def test_conformance(check):
        check()

A check runs the optimizer on a small synthetic task and raises `AssertionError` where a rule is broken. Checks find
mistakes, not malice: code that tries can tell a check from a run. Code that nobody has read should run with `isolate`,
where it can only ask for what the plan holds. A rule that cannot hold for a method is excepted on its class, with the
reason; the check is then skipped:

    conformance_exceptions: ClassVar[Mapping[str, str]] = {"works_without_noise": "it needs ..."}
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from dpopt.errors import ConfigError, unknown
from dpopt.privacy.oracle import BudgetSpent
from dpopt.testing import changes, configuration, numerics, privacy, workloads
from dpopt.testing.task import Task
from dpopt.types import Optimizer
from dpopt.workloads.base import Workload

__all__ = ["EXCEPTABLE", "RULES", "Check", "Task", "checks", "workload_checks"]

RULES: tuple[Callable[[Optimizer], None], ...] = (
    configuration.is_frozen_configuration,
    configuration.survives_yaml,
    configuration.has_a_complete_entry,
    privacy.imports_no_data,
    privacy.can_be_traced,
    numerics.is_pure,
    privacy.leaves_the_planned_ledger,
    privacy.spends_at_most_the_target,
    privacy.replays_bit_for_bit,
    privacy.sees_only_the_protocol,
    privacy.ends_the_same_when_isolated,
    privacy.stops_when_the_budget_is_spent,
    privacy.adds_the_stated_gradient_noise,
    privacy.bounds_one_record,
    privacy.survives_bad_records_and_empty_draws,
    privacy.plans_the_same_for_any_dimension,
    changes.clips_as_stated,
    changes.every_field_changes_the_end,
    changes.every_release_changes_the_end,
    changes.leaves_the_batch_size_to_the_oracle,
    numerics.resumes_bit_for_bit,
    numerics.works_without_noise,
    numerics.ends_near_its_best,
    configuration.equals_its_declared_limits,
    numerics.agrees_in_float64,
    numerics.same_on_cuda,
)
_WITHOUT_A_STEP = RULES[: RULES.index(privacy.can_be_traced) + 1]
"""Rules that are checked whether or not the optimizer can be traced."""
EXCEPTABLE = frozenset(
    {
        "every_field_changes_the_end",
        "every_release_changes_the_end",
        "leaves_the_batch_size_to_the_oracle",
        "works_without_noise",
        "ends_near_its_best",
        "agrees_in_float64",
        "never_waits_for_the_device",
        "same_on_cuda",
    }
)
"""Rules that a class may be excepted from: no stated epsilon and no stored result rests on them.

`never_waits_for_the_device` needs an imitated GPU, which is in `tests/imitation` of the source tree.
"""


@dataclass(frozen=True)
class Check:
    """One rule. Call it to check; `name` says which it is."""

    name: str
    run: Callable[[], None]

    def __call__(self) -> None:
        self.run()

    def __str__(self) -> str:
        return self.name


def checks(optimizer: Optimizer) -> list[Check]:
    """The rules that an optimizer must keep, as callables that raise `AssertionError` where it does not.

    They raise `unittest.SkipTest` where the rule is excepted, or cannot be checked here. Of an optimizer that cannot be
    traced one check says so (`can_be_traced`), and those that would have to run it are skipped.

    Raises:
        ConfigError: an exception from a rule that there is not or that has none, or one without a reason.
    """
    exceptions: Mapping[str, str] = getattr(type(optimizer), "conformance_exceptions", {})
    where = f"{type(optimizer).__name__}.conformance_exceptions"
    for name, reason in exceptions.items():
        if name not in EXCEPTABLE:
            raise unknown(where, name, EXCEPTABLE)
        if not (isinstance(reason, str) and reason.strip()):
            raise ConfigError(where, {name: reason}, "expected the reason as a sentence")
    return [Check(rule.__name__, partial(_check, rule, optimizer, exceptions.get(rule.__name__))) for rule in RULES]


def workload_checks(workload: Workload) -> list[Check]:
    """The rules that a workload must keep, as callables that raise `AssertionError` where it does not.

    They raise `unittest.SkipTest` where a rule cannot be checked. The data have to be at hand.
    """
    return [Check(rule.__name__, partial(rule, workload)) for rule in workloads.RULES]


def _check(rule: Callable[[Optimizer], None], optimizer: Optimizer, exception: str | None) -> None:
    if exception:
        raise unittest.SkipTest(exception)
    if rule not in _WITHOUT_A_STEP:
        try:
            privacy.can_be_traced(optimizer)
        except Exception as error:
            raise unittest.SkipTest("it cannot be traced, see `can_be_traced`") from error
    try:
        rule(optimizer)
    except BudgetSpent as error:  # what is asked for beside data is not what was traced
        raise AssertionError(f"{rule.__name__}: {error}") from error
