"""A grid of (C, B, eta) to begin a search with, from public numbers and the rules of a paper.

Rehn et al., "On optimal hyperparameters for differentially private deep transfer learning", ICLR 2026, arXiv
2510.20616. The paper gives directions: C grows with the difficulty of the problem (less privacy budget, fewer epochs, a
weaker model, harder data); B is the smallest batch of the plateau of cumulative noise that leaves enough steps; with
DP-Adam the best eta often grows with sqrt(B). The numbers that a grid needs beside them, constants below, are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.fields import Checked, Count, Many, NonNegative, Positive, Probability
from dpopt.sizes import default_delta, number_of_draws
from dpopt.study.batch_size import MIN_STEPS, TOLERANCE, Noise, best_batch, noise_table, plateau

Capacity = Literal["weak", "strong"]
Difficulty = Literal["easy", "hard"]

CENTRE = 1.0
"""The bound in the middle of the grid for a problem of medium difficulty: the field's usual default."""
HALF_DECADE = math.sqrt(10)
"""The grid's step in C and eta, and what each sign of a harder or an easier problem moves C by."""
TIGHT, LOOSE = 1.0, 8.0
"""The epsilon up to which privacy counts as tight, and that from which on it counts as loose."""
FEW_EPOCHS, MANY_EPOCHS = 5.0, 40.0
"""The epochs up to which compute counts as limited, and those from which on it counts as plentiful."""
LR, LR_BATCH = 3e-3, 1000
"""The middle of the learning rates of DP-Adam, and the batch size at which it is this."""
LOOK = 1.5
"""Batch sizes are tried down to the first whose cumulative noise is this many times the least."""
PUBLIC = (
    "All inputs are public: the grid itself costs no privacy. Searching it on private records does; charge for its "
    "runs, or select among them privately."
)


@dataclass(frozen=True)
class Recommendation:
    """A grid to begin with; the search over it has to be paid for like any other.

    Attributes:
        batch_sizes, clips, learning_rates: B, C and eta, for a joint grid with DP-Adam.
        assumptions: what was assumed, and which numbers are our choice and not the paper's.
        noise: cumulative noise over the batch sizes that were tried, from the largest down.
    """

    batch_sizes: tuple[int, ...]
    clips: tuple[float, ...]
    learning_rates: tuple[float, ...]
    assumptions: tuple[str, ...]
    noise: tuple[Noise, ...]


@dataclass(frozen=True)
class Problem(Checked):
    """What is publicly known of a problem.

    Args:
        examples: number N of training records.
        epsilon: target, finite.
        epochs: passes over the data that there is time for.
        delta: target; None: N^-1.1.
        capacity: of the model, where it can be told.
        difficulty: of the data, where it can be told from public knowledge.
        min_steps: the fewest steps that a run may take.
        tolerance: how far above the least the cumulative noise may be.
        accountant: see `dpopt.privacy.epsilon`.
    """

    examples: Count
    epsilon: Positive
    epochs: Positive
    delta: Probability | None = None
    capacity: Capacity | None = None
    difficulty: Difficulty | None = None
    min_steps: Many = MIN_STEPS
    tolerance: NonNegative = TOLERANCE
    accountant: str = "pld"


def recommend(examples: int, epsilon: float, epochs: float, **known: Any) -> Recommendation:
    """A (C, B, eta) grid to begin with, from public numbers alone.

    Args:
        examples, epsilon, epochs, known: see `Problem`.

    Raises:
        ConfigError: a value out of range, an unknown field, too few epochs, or a target that no noise reaches.
    """
    problem = fields.build(Problem, {"examples": examples, "epsilon": epsilon, "epochs": epochs, **known}, "recommend")
    table = tuple(_tried(problem))
    best = best_batch(table, problem.tolerance, problem.min_steps)
    at = table.index(best)
    sizes = sorted(row.batch_size for row in table[max(0, at - 1) : at + 2])
    signs = _signs(problem)
    clip = CENTRE * HALF_DECADE ** sum(signs.values())
    lr = LR * math.sqrt(best.batch_size / LR_BATCH)
    assumptions = (PUBLIC, _about_batch(problem, table, best), _about_clip(clip, signs), _about_lr(lr))
    return Recommendation(tuple(sizes), _spread(clip), _spread(lr), assumptions, table)


def _tried(problem: Problem) -> Iterator[Noise]:
    """The noise of the largest batch that leaves enough steps, then downwards until it is clear of the plateau."""
    rows = noise_table(
        _batch_sizes(problem),
        examples=problem.examples,
        epochs=problem.epochs,
        epsilon=problem.epsilon,
        delta=default_delta(problem.examples) if problem.delta is None else problem.delta,
        accountant=problem.accountant,
    )
    least = math.inf
    for row in rows:
        yield row
        least = min(least, row.cumulative)
        if row.cumulative > LOOK * least:
            return


def _batch_sizes(problem: Problem) -> list[int]:
    """The full batch and all smaller powers of two that leave enough steps, from the largest down."""
    N, powers = problem.examples, [2**k for k in range(problem.examples.bit_length())]
    least = problem.epochs * N / fields.MANY
    sizes = sorted({N, *(size for size in powers if least <= size < N)}, reverse=True)
    allowed = [size for size in sizes if number_of_draws(problem.epochs, size, N) >= problem.min_steps]
    if not allowed:
        reason = f"with {N} records, no batch size leaves {problem.min_steps} to {fields.MANY:.0e} steps"
        raise ConfigError("epochs", problem.epochs, reason)
    return allowed


def _signs(problem: Problem) -> dict[str, int]:
    """What is known of the problem's difficulty: 1 for each sign that it is hard, -1 for each that it is easy."""
    signs = {
        f"epsilon {problem.epsilon:g}": (problem.epsilon <= TIGHT) - (problem.epsilon >= LOOSE),
        f"{problem.epochs:g} epochs": (problem.epochs <= FEW_EPOCHS) - (problem.epochs >= MANY_EPOCHS),
        f"a {problem.capacity} model": (problem.capacity == "weak") - (problem.capacity == "strong"),
        f"{problem.difficulty} data": (problem.difficulty == "hard") - (problem.difficulty == "easy"),
    }
    return {name: sign for name, sign in signs.items() if sign}


def _spread(centre: float) -> tuple[float, ...]:
    """Five values half a decade apart around `centre`, to two digits."""
    return tuple(float(f"{centre * HALF_DECADE**k:.1e}") for k in range(-2, 3))


def _about_batch(problem: Problem, table: tuple[Noise, ...], best: Noise) -> str:
    sizes = [row.batch_size for row in plateau(table, problem.tolerance)]
    reach = f"from {min(sizes)} to {max(sizes)}" if len(sizes) > 1 else f"{sizes[0]} alone"
    return (
        f"B: of the batches that leave {problem.min_steps} steps, those {reach} keep the cumulative noise "
        f"sigma sqrt(T) within {100 * problem.tolerance:g} % of the least; {best.batch_size} is the smallest and takes "
        f"{best.steps} steps. The rule is the paper's; the tolerance and powers of two are our choice, and {MIN_STEPS} "
        "steps is its number for CIFAR-100 and ViT-Tiny, which differs between data sets."
    )


def _about_clip(clip: float, signs: Mapping[str, int]) -> str:
    moves = ", ".join(f"{name} ({'up' if sign > 0 else 'down'})" for name, sign in signs.items())
    return (
        f"C: {clip:.2g} in the middle, which is {CENTRE:g} moved by half a decade for each sign of a harder problem "
        f"(up) or an easier one (down): {moves or 'none'}. The directions are the paper's. Our choice are the middle, "
        f"how far it moves, and what counts: epsilon up to {TIGHT:g} or from {LOOSE:g} on, up to {FEW_EPOCHS:g} epochs "
        f"or from {MANY_EPOCHS:g} on, and what is told of model and data. Full fine-tuning of large models may want "
        "far larger C, as the paper notes."
    )


def _about_lr(lr: float) -> str:
    return (
        f"eta: {lr:.2g} in the middle, that is {LR:g} at B = {LR_BATCH} (our choice), growing with sqrt(B), which the "
        "paper often sees with DP-Adam. It is the same for every C: Adam undoes a factor that all gradients share, so "
        "eta and C are decoupled as by the paper's normalised clipping, while sigma C / B stays well above Adam's eps. "
        "Other optimizers need a grid of their own."
    )


def snippet(grid: Recommendation) -> str:
    """The grid as YAML for a suite file; DP-Adam searches eta for each C and B."""
    values = (grid.batch_sizes, grid.clips, grid.learning_rates)
    sizes, clips, rates = (f"[{', '.join(map(_yaml, several))}]" for several in values)
    settings = f"settings:\n  dp_adam:\n    grid: {{lr: {rates}}}"
    return f"batch_size: {sizes}\nclip: {clips}\noptimizers: [dp_adam]\n{settings}"


def _yaml(value: float) -> str:
    """A number that YAML reads as one: it takes 3e-05 for a string."""
    if isinstance(value, int):
        return str(value)
    return f"{value:g}" if 1e-4 <= value < 1e6 else f"{value:.1e}"


def report(grid: Recommendation) -> str:
    """The table of cumulative noise, the grid as YAML, and what was assumed."""
    header = f"{'B':>8} {'steps':>8} {'sigma':>10} {'sigma sqrt(T)':>14} {'sigma/B':>10}"
    rows = [
        f"{size:>8} {steps:>8} {sigma:>10.4f} {sigma * math.sqrt(steps):>14.2f} {sigma / size:>10.2e}"
        for size, steps, sigma in grid.noise
    ]
    return "\n".join([header, *rows, "", snippet(grid), "", *(f"- {line}" for line in grid.assumptions)])


def main(given: Mapping[str, Any]) -> str:
    """What `dpopt recommend` prints.

    Args:
        given: the keys of `conf/base/recommend.yaml`, which are the fields of `Problem`.

    Raises:
        ConfigError: as `recommend`.
    """
    return report(recommend(**given))
