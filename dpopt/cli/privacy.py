"""Commands that compute from public numbers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dpopt import fields
from dpopt.cli.console import OUT
from dpopt.errors import ConfigError
from dpopt.fields import Bound, Count, Few, Fraction, Many, Positive, Probability, Several, key


@dataclass(frozen=True, kw_only=True)
class Epsilon:
    """Print the epsilon of a run: rate, noise and draws of the gradient, and HyFreeDP's probes if there are any."""

    rate: Fraction = key("Poisson sampling probability q = B/N")
    noise: Positive | tuple[Positive, ...] = key("noise multiplier of the gradient; a list: all releases of one draw")
    draws: Count = key("number T of draws")
    delta: Probability = key("of (epsilon, delta)")
    probe_noise: Positive | None = key("noise multiplier of each probed loss (HyFreeDP)", None)
    probe_every: Count = key("probes every K draws, in the gradient's draw", 5)
    probes: Few = key("losses per round of probes", 3)
    runs: Count = key("naive composition of this many runs", 1)
    accountant: Several[str] = key("pld, rdp, prv, autodp or another accountant, or a list", ("pld",))

    def __call__(self) -> None:
        from dpopt.privacy import Draw, Ledger, accountants

        for name in self.accountant:
            accountants.check(self.delta, name)
        ledger, rounds, noise = Ledger(), 0, tuple(fields.listed(self.noise))
        if self.probe_noise is not None:  # probes are released in the gradient's draw, and share its sampling
            rounds = -(-self.draws // self.probe_every)
            ledger.append(Draw(self.rate, noise + (self.probe_noise,) * self.probes), rounds * self.runs)
        if self.draws > rounds:
            ledger.append(Draw(self.rate, noise), (self.draws - rounds) * self.runs)
        for name in self.accountant:
            spent = _up(accountants.epsilon(ledger, self.delta, name))
            # A table has such a number in italics; here there are none.
            limit = "" if accountants.ACCOUNTANTS[name].is_upper_bound else ", NO UPPER BOUND"
            OUT.print(f"epsilon = {spent}  ({name}, delta = {self.delta}{limit})")


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Print the least noise with which an optimizer reaches a target epsilon."""

    optimizer: str = key("its name, as `dpopt list what=optimizers` shows", "dp_sgd")
    fields: dict[str, Any] = key("fields.lr=0.1: hyperparameters of the optimizer", {})
    epsilon: Bound = key("the target")
    delta: Probability | None = key("N^-1.1 by default", None)
    examples: Count | None = key("N and B give the rate B/N ...", None)
    batch_size: Count | None = key("B", None)
    rate: Fraction | None = key("... or the rate itself", None)
    epochs: Positive | None = key("epochs N/B draws ...", None)
    draws: Many | None = key("... or the number of draws itself", None)
    dimension: Count = key("trained parameters; noise multipliers do not depend on it", 1000)
    accountant: str = key("pld, rdp, prv, autodp or another accountant", "pld")

    def __call__(self) -> None:
        from dpopt import registry
        from dpopt.privacy import calibrate
        from dpopt.privacy.ledger import default_delta, number_of_draws, sampling_rate

        rate, draws, delta = self.rate, self.draws, self.delta
        if rate is None:
            rate = sampling_rate(_need(self.batch_size, "batch_size"), _need(self.examples, "examples"))
        if draws is None:
            draws = number_of_draws(_need(self.epochs, "draws or epochs"), rate, 1)
        if delta is None:
            delta = default_delta(_need(self.examples, "delta or examples"))
        optimizer = registry.make("optimizer", self.optimizer, self.fields)
        sizes: dict[str, Any] = {"rate": rate, "draws": draws, "dimension": self.dimension}
        plan = calibrate(optimizer, epsilon=self.epsilon, delta=delta, accountant=self.accountant, **sizes)
        for kind, noise in plan.noise.items():
            OUT.print(f"noise multiplier ({kind}) = {_up(noise)}")
        OUT.print(f"epsilon = {_up(plan.epsilon)}  ({plan.accountant}, delta = {plan.delta}, {plan.draws} draws)")


def _up(value: float) -> str:
    # Rounded up, so that printed noise is enough, and a printed epsilon is not below the spent one.
    return f"{math.ceil(value * 1e5 - 1e-9) / 1e5:.5f}" if math.isfinite(value) else "inf"


def _need(value: Any, name: str) -> Any:
    if value is None:
        raise ConfigError(name, None, "is missing")
    return value
