"""Noise for a target epsilon, solved for the ledger that the optimizer will leave, never on the wrong side of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import groupby
from typing import Any, NamedTuple

import scipy  # its modules are imported when they are first used: they take half a second

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.privacy import accountants, caching
from dpopt.privacy.accountants import Charge
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.ledger import Draw, Ledger, NonPrivate, Plan, Unit
from dpopt.privacy.opaque import ValueRead
from dpopt.privacy.oracle import BudgetSpent, TraceOracle
from dpopt.privacy.queries import GRADIENT
from dpopt.privacy.selection import Selection, selection_spec
from dpopt.types import Layout, Optimizer, laid_out

_Structure = tuple[tuple[tuple[str, ...], int], ...]
"""Run-length encoded kinds of release of every draw: ((kinds, count), ...)."""
_TRACED = laid_out([("0.weight", (2, 3), "Linear"), ("0.bias", (2,), "Linear")])
"""The layout of the vectors that an optimizer is traced with: what it releases may not depend on how many there are."""
_TOLERANCE = 2e-5
"""The most that a calibrated epsilon may stay below its target, relative to it."""
_FAR = 50.0
"""An epsilon by RDP that is above every target worth a privacy loss distribution."""
_NOISE_RANGE = (0.05, 1e6)
"""Noise multipliers that calibration considers."""


def calibrate(
    optimizer: Optimizer,
    *,
    rate: float,
    draws: int,
    dimension: int,
    epsilon: float,
    delta: float,
    accountant: str = "pld",
    selection: Selection | None = None,
    unit: Unit | None = None,
) -> Plan:
    """The least noise with which `draws` draws of `optimizer` cost at most `epsilon`.

    The optimizer is run once against a `TraceOracle`, and the noise is solved for the ledger that it leaves. Where it
    makes releases of further kinds beside gradients, gradients get `optimizer.noise_inflation` times the noise that
    they would need alone, and the other kinds together spend exactly what is left (HyFreeDP, Eq. 10, under the joint
    rule for one draw). `optimizer.shares`, kind -> number, divides that among them: 1/noise^2 of a kind is in
    proportion to its share, by default the same for all. Without gradients, the kinds divide the whole.

    Args:
        optimizer: any registered or own optimizer.
        rate: Poisson sampling probability, in (0, 1].
        draws: number of draws, from 1 to 10^7; each is traced.
        dimension: number of trained parameters.
        epsilon: target, > 0; infinity gives a `NonPrivate` plan.
        delta: target, in (0, 1).
        accountant: see `accountants.epsilon`; an upper bound.
        selection: where the run is one of a search, what the whole search costs; `epsilon` is then the search's.
        unit: of privacy, by default the record; the plan's ledger says it.

    Raises:
        ConfigError: a value out of range, a `selection` that has spent for another unit, or a target that no noise in
            `_NOISE_RANGE` reaches.
    """
    _validate(rate, draws, dimension, epsilon, delta, accountant)
    require_bounded(optimizer, epsilon)
    structure = trace(optimizer, rate=rate, draws=draws)
    ledger_of = partial(_ledger, structure, rate, unit)
    common: dict[str, Any] = {"rate": rate, "draws": draws, "dimension": dimension}
    common |= {"delta": delta, "accountant": accountant}
    kinds = sorted({kind for release, _ in structure for kind in release})
    if epsilon == math.inf:
        noise = dict.fromkeys(kinds, 0.0)
        return NonPrivate(noise, ledger_of(noise), math.inf, **common)
    # From here on there is noise to be solved, for this structure alone: what the optimizer computes plays no part.
    inflation, shares = _division(optimizer, kinds)
    charge = selection.epsilon if selection else accountants.epsilon
    searched = selection_spec(selection) if selection else None
    problem = (structure, rate, kinds, inflation, shares, epsilon, delta, accountant, searched)
    packages = {name for each in (accountant, "rdp") for name in accountants.ACCOUNTANTS[each].packages}
    versions = [f"{name} {version(name)}" for name in sorted(packages)]
    path = caching.place("calibration", [problem, _TOLERANCE, versions])

    def planned(noise: dict[str, float]) -> Plan:
        ledger = ledger_of(noise)
        return Plan(noise, ledger, accountants.epsilon(ledger, delta, accountant), **common)

    # Epsilon is computed for noise of the cache, too: a file can neither lower what is claimed nor change a result.
    def kept() -> Plan | None:
        cached = caching.read(path) or {}
        if cached.keys() != set(kinds) or not all(0 < value < math.inf for value in cached.values()):
            return None
        plan = planned(cached)
        is_right = (1 - 2 * _TOLERANCE) * epsilon <= charge(plan.ledger, delta, accountant) <= epsilon
        return plan if is_right else None

    if plan := kept():
        return plan
    # The workers of a suite come to the same noise at the same time: one solves it, the others wait.
    with caching.alone(path):
        if plan := kept():
            return plan
        solve = partial(solve_noise, epsilon=epsilon, delta=delta, accountant=accountant, charge=charge)
        noise = _solve_kinds(kinds, ledger_of, inflation, shares, solve)
        caching.write(path, noise)
        return planned(noise)


def require_bounded(optimizer: Optimizer, epsilon: float) -> None:
    """Raise `ConfigError` for an infinite clipping bound at a finite epsilon: its noise would be infinite."""
    clip = getattr(optimizer, "clip", None)
    if epsilon < math.inf and clip is not None and clip.sensitivity == math.inf:
        raise ConfigError("clip", "inf", f"a finite bound is needed at epsilon {epsilon:g}")


class _Cost(NamedTuple):
    """The queries of an optimizer, on average: draws a step, gradients a draw, and charged values a draw."""

    draws_per_step: float
    gradients_per_draw: float
    releases_per_draw: float


def cost(optimizer: Optimizer, draws: int = 60) -> _Cost:
    """The `_Cost` over a run of `draws` draws, counted without data; raises as `trace`."""
    if isinstance(optimizer, Isolated):
        return _Cost(*optimizer.cost())
    oracle = _oracle(0.1, draws, _TRACED)
    steps = _traced(optimizer, oracle)
    return _Cost(draws / steps, sum(oracle.points) / draws, sum(map(len, oracle.kinds)) / draws)


def trace(optimizer: Optimizer, *, rate: float, draws: int, layout: Layout = _TRACED) -> _Structure:
    """Which releases each of `draws` draws of `optimizer` makes, without data.

    Raises:
        ConfigError: the state is no such tuple, a step takes no draw or one too many, or reads a released value.
    """
    # In a process of its own it is traced there: reading it here would run its code beside the data.
    if isinstance(optimizer, Isolated):
        return optimizer.trace(rate=rate, draws=draws)
    return _trace(optimizer, rate, draws, layout)


@lru_cache(maxsize=1024)
def _trace(optimizer: Optimizer, rate: float, draws: int, layout: Layout) -> _Structure:
    oracle = _oracle(rate, draws, layout)
    _traced(optimizer, oracle)
    # Run-length encoded, as a ledger is: it is compared, hashed and cached.
    return tuple((kinds, len(list(run))) for kinds, run in groupby(oracle.kinds))


def _oracle(rate: float, draws: int, layout: Layout) -> TraceOracle:
    return TraceOracle(layout[-1].slice.stop, rate, draws, layout=layout)


def _traced(optimizer: Optimizer, oracle: TraceOracle) -> int:
    steps = 0
    try:
        state = optimizer.init(oracle.theta)
        _require_state(state, optimizer, "init", oracle.dimension)
        while oracle.draws_left:
            before = oracle.draws_left
            state = optimizer.step(state, oracle)
            if not steps:
                _require_state(state, optimizer, "step", oracle.dimension)
            steps += 1
            if oracle.draws_left == before:
                reason = "its step asked for nothing; expected at least one draw"
                raise ConfigError("optimizer", type(optimizer).__name__, reason)
    except BudgetSpent as error:
        reason = f"`step` asks for a draw that it cannot have ({error}); look at `oracle.draws_left` first"
        raise ConfigError("optimizer", type(optimizer).__name__, reason) from error
    except (RuntimeError, NotImplementedError) as error:
        if not isinstance(error, ValueRead) and "meta" not in str(error):
            raise
        reason = f"`step` reads the value of a tensor, so what it releases could depend on data ({error})"
        raise ConfigError("optimizer", type(optimizer).__name__, reason) from error
    return steps


def _require_state(state: Any, optimizer: Optimizer, method: str, dimension: int) -> None:
    shape = getattr(getattr(state, "theta", None), "shape", None)
    if getattr(state, "_fields", ())[:1] != ("theta",) or shape != (dimension,):
        kind = type(state).__name__ if shape is None else f"{type(state).__name__}, theta {list(shape)}"
        allowed = f"expected a NamedTuple of tensors whose first field is `theta`, shape [d], here [{dimension}]"
        raise ConfigError(f"{type(optimizer).__name__}.{method}", kind, allowed)


def _division(optimizer: Optimizer, kinds: Sequence[str]) -> tuple[float | None, dict[str, float]]:
    inflation: float | None = getattr(optimizer, "noise_inflation", None)
    shares = dict(getattr(optimizer, "shares", {}))
    for kind, share in shares.items():
        if kind not in kinds or not 0 < share < math.inf:
            reason = f"expected numbers > 0 for kinds that it releases: {', '.join(kinds)}"
            raise ConfigError("optimizer.shares", {kind: share}, reason)
    if len(kinds) > 1 and GRADIENT in kinds and (inflation is None or inflation <= 1):
        reason = "releases of several kinds, gradients among them, need a field `noise_inflation` > 1"
        raise ConfigError("optimizer", f"releases {', '.join(kinds)}", reason)
    # The gradients' share follows from the inflation, so only the other kinds divide what is left.
    others = [kind for kind in kinds if kind != GRADIENT]
    return inflation, {kind: float(shares.get(kind, 1.0)) for kind in others}


def _solve_kinds(
    kinds: Sequence[str],
    ledger_of: Callable[[Mapping[str, float]], Ledger],
    inflation: float | None,
    shares: Mapping[str, float],
    solve: Callable[[Callable[[float], Ledger]], float],
) -> dict[str, float]:
    # First the gradients' noise is solved, as if they were alone (HyFreeDP, Eq. 10), then one number that the noise of
    # all other kinds follows from: 1/noise^2 of a kind is in proportion to its share.
    gradient = {}
    if GRADIENT in kinds:
        alone = solve(lambda noise: ledger_of({GRADIENT: noise}))
        gradient = {GRADIENT: alone * inflation if shares and inflation else alone}

    def noises(common: float) -> dict[str, float]:
        return gradient | {kind: common / share**0.5 for kind, share in shares.items()}

    return noises(solve(lambda common: ledger_of(noises(common)))) if shares else gradient


def _ledger(structure: _Structure, rate: float, unit: Unit | None, noise: Mapping[str, float]) -> Ledger:
    ledger = Ledger(unit=unit)
    for kinds, count in structure:
        ledger.append(Draw(rate, tuple(noise[kind] for kind in kinds if kind in noise)), count)
    return ledger


def solve_noise(
    ledger_of: Callable[[float], Ledger],
    epsilon: float,
    delta: float,
    accountant: str,
    charge: Charge = accountants.epsilon,
) -> float:
    """The smallest noise whose ledger costs at most `epsilon`, to `_TOLERANCE`, from the safe side.

    Args:
        ledger_of: noise multiplier -> ledger; epsilon must not grow with the noise.
        epsilon, delta, accountant: see `calibrate`.
        charge: what a ledger costs.

    Raises:
        ConfigError: even the largest noise of `_NOISE_RANGE` spends more than `epsilon`.
    """

    def spent(log_noise: float, by: str) -> float:
        return charge(ledger_of(math.exp(log_noise)), delta, by)

    def excess(log_noise: float, far: float) -> float:
        # A numerical privacy loss distribution grows with epsilon; where RDP is far above the target, so is the truth.
        quick = spent(log_noise, "rdp")
        over = (quick if quick > far else spent(log_noise, accountant)) / epsilon - 1
        return 0.0 if -_TOLERANCE <= over <= 0 else over + _TOLERANCE / 2

    low, high = (math.log(noise) for noise in _NOISE_RANGE)
    least = spent(high, accountant)
    if least > epsilon:
        is_loose = accountant != "pld" and spent(high, "pld") <= epsilon
        instead = ": accountant=pld reaches it, with less noise" if is_loose else ""
        raise ConfigError("epsilon", epsilon, f"not reached by a noise multiplier up to {_NOISE_RANGE[1]:g}{instead}")
    # RDP is cheap and shaped like the others: its root, for a target scaled to its own floor, is a good first guess.
    floor = spent(high, "rdp")
    target = epsilon * floor / least if floor > epsilon and least > 0 else epsilon
    guess = _root(lambda s: spent(s, "rdp") - target, low, high)
    root = high
    for far in (2 * epsilon + 0.5, _FAR):  # the second where RDP is loose, as it is for a delta near rate * draws
        function = partial(excess, far=far)
        root = _root(function, *_bracket(function, guess, low, high))
        if spent(root, accountant) >= (1 - 2 * _TOLERANCE) * epsilon:
            break
    # The safe side: a root is where the sign changes, to rounding, and may spend a little more than the target.
    while spent(root, accountant) > epsilon:
        root += _TOLERANCE / 4
    return math.exp(root)


def _bracket(function: Callable[[float], float], guess: float, low: float, high: float) -> tuple[float, float]:
    step = 0.03 if function(guess) > 0 else -0.03
    end = guess
    while low < end < high and (function(end) > 0) == (step > 0):
        guess, end, step = end, min(max(end + step, low), high), 2 * step
    return min(guess, end), max(guess, end)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    if function(low) <= 0:
        return low
    if function(high) > 0:
        return high
    return scipy.optimize.root_scalar(function, bracket=(low, high), method="brentq", xtol=1e-9).root


def score_noise(selection: Selection, epsilon: float, delta: float, accountant: str) -> float:
    """Noise multiplier of the scores of a search, by which they cost at most `epsilon` on the records they look at.

    A score is one Gaussian release of a sum over records that are not trained on; 0 where none is released.
    """
    charged = selection.scores(epsilon)
    if charged is None or charged[1] == math.inf:
        return 0.0
    rule, target = charged
    return solve_noise(lambda noise: Ledger([Draw(1.0, (noise,))]), target, delta, accountant, rule.epsilon)


def _validate(rate: float, draws: int, dimension: int, epsilon: float, delta: float, accountant: str) -> None:
    if not 0 < rate <= 1:
        raise ConfigError("rate", rate, "expected a probability in (0, 1]: batch size / number of examples")
    if not (1 <= draws <= fields.MANY and draws == int(draws)):  # each is traced
        raise ConfigError("draws", draws, f"expected a whole number from 1 to {fields.MANY:,}")
    if dimension < 1:
        raise ConfigError("dimension", dimension, "expected at least 1 trained parameter")
    if not epsilon > 0:
        raise ConfigError("epsilon", epsilon, "expected > 0 (inf trains without noise)")
    accountants.check_claim(delta, accountant)
