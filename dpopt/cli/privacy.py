"""Commands that compute from public numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpopt import fields
from dpopt.cli.console import OUT
from dpopt.errors import ConfigError

if TYPE_CHECKING:
    pass


def epsilon(overrides: Sequence[str]) -> None:
    """Print what a run spends: rate, noise and draws of the gradient, and HyFreeDP's probes if there are any."""
    from dpopt.harness.suite import BASE, compose_config
    from dpopt.privacy import Draw, Ledger
    from dpopt.privacy import epsilon as spent

    given = compose_config(BASE, "epsilon", overrides)
    rate = _field(given, "rate", float)
    noises = given["noise"] if isinstance(given["noise"], list) else [given["noise"]]
    gradient = tuple(fields.convert(noise, fields.Positive, "noise", {}) for noise in noises)
    draws, runs = _field(given, "draws", fields.Count), _field(given, "runs", fields.Count)
    probe = _field(given, "probe_noise", fields.Positive | None)
    rounds = math.ceil(draws / _field(given, "probe_every", fields.Count)) if probe is not None else 0
    ledger = Ledger()
    if rounds:
        ledger.append(Draw(rate, gradient + (probe,) * _field(given, "probes", fields.Count)), rounds * runs)
    if draws > rounds:
        ledger.append(Draw(rate, gradient), (draws - rounds) * runs)
    names = given["accountant"] if isinstance(given["accountant"], list) else [given["accountant"]]
    delta = _field(given, "delta", float)
    for name in names:
        OUT.print(f"epsilon = {_up(spent(ledger, delta, name))}  ({name}, delta = {delta:g})", highlight=False)


def calibrate(overrides: Sequence[str]) -> None:
    """Print the least noise with which an optimizer reaches a target epsilon."""
    from dpopt import create
    from dpopt.harness.suite import BASE, compose_config
    from dpopt.privacy import calibrate as solve
    from dpopt.training import number_of_draws, sampling_rate

    given = compose_config(BASE, "calibrate", overrides)
    optimizer = create(given["optimizer"], **given["fields"])
    examples, batch = (_field(given, key, fields.Count | None) for key in ("examples", "batch_size"))
    rate, draws = _field(given, "rate", float | None), _field(given, "draws", fields.Count | None)
    epochs, delta = _field(given, "epochs", fields.Positive | None), _field(given, "delta", float | None)
    if rate is None:
        rate = sampling_rate(_need(batch, "batch_size"), _need(examples, "examples"))
    if draws is None:
        draws = number_of_draws(_need(epochs, "draws or epochs"), rate, 1)
    plan = solve(
        optimizer,
        rate=rate,
        draws=draws,
        dimension=_field(given, "dimension", fields.Count),
        epsilon=_field(given, "epsilon", fields.Bound),
        delta=_need(examples, "delta or examples") ** -1.1 if delta is None else delta,
        accountant=given["accountant"],
    )
    for kind, noise in plan.noise.items():
        OUT.print(f"noise multiplier ({kind}) = {_up(noise)}", highlight=False)
    OUT.print(
        f"epsilon = {_up(plan.epsilon)}  ({plan.accountant}, delta = {plan.delta:g}, {plan.draws} draws)",
        highlight=False,
    )


def recommend(overrides: Sequence[str]) -> None:
    """Print a grid of clipping bound, batch size and learning rate to begin with, from public numbers alone."""
    from dpopt.harness.suite import BASE, compose_config
    from dpopt.study.recommend import main as recommended

    OUT.print(recommended(compose_config(BASE, "recommend", overrides)), highlight=False, markup=False)


def _field(given: dict[str, Any], key: str, hint: Any) -> Any:
    return fields.convert(given[key], hint, key, {})


def _up(value: float) -> str:
    """Five digits, rounded up: printed noise is enough, and a printed epsilon is not below the spent one."""
    return f"{math.ceil(value * 1e5 - 1e-9) / 1e5:.5f}" if math.isfinite(value) else "inf"


def _need(value: Any, name: str) -> Any:
    if value is None:
        raise ConfigError(name, None, "is missing")
    return value
