"""Commands that compute from public numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpopt import fields
from dpopt.cli.console import OUT
from dpopt.errors import ConfigError
from dpopt.fields import Bound, Count, Few, Fraction, Many, Positive, Probability, Several

if TYPE_CHECKING:
    from dpopt.privacy import Ledger, Plan


@dataclass(frozen=True)
class EpsilonKeys:
    """The keys of `dpopt epsilon`; `conf/base/epsilon.yaml` documents them."""

    rate: Fraction
    noise: tuple[Positive, ...]
    draws: Count
    delta: Probability
    probe_noise: Positive | None
    probe_every: Count
    probes: Few
    runs: Count
    accountant: Several[str]

    def ledger(self) -> Ledger:
        """What the runs leave, one after the other."""
        from dpopt.privacy import Draw, Ledger

        ledger, rounds = Ledger(), 0
        if self.probe_noise is not None:
            rounds = -(-self.draws // self.probe_every)
            ledger.append(Draw(self.rate, self.noise + (self.probe_noise,) * self.probes), rounds * self.runs)
        if self.draws > rounds:
            ledger.append(Draw(self.rate, self.noise), (self.draws - rounds) * self.runs)
        return ledger


@dataclass(frozen=True)
class CalibrateKeys:
    """The keys of `dpopt calibrate`; `conf/base/calibrate.yaml` documents them."""

    optimizer: str
    fields: dict[str, Any]
    epsilon: Bound
    delta: Probability | None
    examples: Count | None
    batch_size: Count | None
    rate: Fraction | None
    epochs: Positive | None
    draws: Many | None
    dimension: Count
    accountant: str

    def plan(self) -> Plan:
        """The least noise that reaches the target."""
        from dpopt import registry
        from dpopt.privacy import calibrate
        from dpopt.sizes import default_delta, number_of_draws, sampling_rate

        rate, draws, delta = self.rate, self.draws, self.delta
        if rate is None:
            rate = sampling_rate(_need(self.batch_size, "batch_size"), _need(self.examples, "examples"))
        if draws is None:
            draws = number_of_draws(_need(self.epochs, "draws or epochs"), rate, 1)
        if delta is None:
            delta = default_delta(_need(self.examples, "delta or examples"))
        return calibrate(
            registry.make("optimizer", self.optimizer, self.fields),
            rate=rate,
            draws=draws,
            dimension=self.dimension,
            epsilon=self.epsilon,
            delta=delta,
            accountant=self.accountant,
        )


def epsilon(overrides: Sequence[str]) -> None:
    """Print what a run spends: rate, noise and draws of the gradient, and HyFreeDP's probes if there are any."""
    from dpopt import configurations
    from dpopt.privacy import accountants

    given = configurations.command("epsilon", overrides)
    asked = fields.build(EpsilonKeys, given | {"noise": fields.listed(given["noise"])}, "epsilon")
    for name in asked.accountant:
        accountants.check(asked.delta, name)
    for name in asked.accountant:
        spent = accountants.epsilon(asked.ledger(), asked.delta, name)
        OUT.print(f"epsilon = {_up(spent)}  ({name}, delta = {asked.delta})")


def calibrate(overrides: Sequence[str]) -> None:
    """Print the least noise with which an optimizer reaches a target epsilon."""
    from dpopt import configurations

    given = configurations.command("calibrate", overrides)
    none = {} if given["fields"] is not None else {"fields": {}}
    plan = fields.build(CalibrateKeys, given | none, "calibrate").plan()
    for kind, noise in plan.noise.items():
        OUT.print(f"noise multiplier ({kind}) = {_up(noise)}")
    OUT.print(
        f"epsilon = {_up(plan.epsilon)}  ({plan.accountant}, delta = {plan.delta}, {plan.draws} draws)",
    )


def _up(value: float) -> str:
    """Five decimals, rounded up: printed noise is enough, and a printed epsilon is not below the spent one."""
    return f"{math.ceil(value * 1e5 - 1e-9) / 1e5:.5f}" if math.isfinite(value) else "inf"


def _need(value: Any, name: str) -> Any:
    if value is None:
        raise ConfigError(name, None, "is missing")
    return value
