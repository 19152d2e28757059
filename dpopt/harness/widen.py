"""Further points of a search, one at a time, while the point that it would release lies at an end of its grid.

Which point is next follows from the scores before it, so the search is an adaptive composition. How many runs are made
follows from the scores too, so charging only those would claim too little: all that may be made are charged. The choice
must not change what a run releases (`are_alike`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dpopt.harness.refine import Point, ends
from dpopt.privacy.calibration import trace
from dpopt.types import Optimizer

Known = Sequence[tuple[Point, float]]
"""Points with their scores, larger is better; of equal ones the first is the best."""


def further(
    grid: Known, number: int, accepts: Callable[[Point], bool], score: Callable[[int, Point], float | None]
) -> list[Point]:
    """The further points so far, in their order: at most `number`, none after one that has no score.

    Args:
        grid: all points of a grid.
        number: how many to add at most.
        accepts: whether a point can be run; one that cannot ends the search in its direction.
        score: index and point of a further run -> its score, or None while there is none.
    """
    known, found = list(grid), list[Point]()
    while len(found) < number:
        point = next(filter(accepts, beyond(known)), None)
        if point is None:
            break
        found.append(point)
        value = score(len(found) - 1, point)
        if value is None:
            break
        known.append((point, value))
    return found


def beyond(known: Known) -> Iterator[Point]:
    """The best point moved beyond each end that it lies at, in the order of the fields.

    An end is the smallest or largest value that was tried of a field; fields are those of `refine.ends`. The ratio of
    the end to its neighbour is continued, to 3 significant digits: 0.1, 0.3, 1 are followed by 3.33. Whole numbers stay
    whole.
    """
    points, best = [point for point, _ in known], max(known, key=lambda pair: pair[1])[0]
    for name, (low, high) in ends(points).items():
        values = sorted({point[name] for point in points})
        for end, neighbour in ((low, values[1]), (high, values[-2])):
            value = _rounded(end * end / neighbour, isinstance(end, int))
            if best[name] == end and 0 < value < math.inf and not low <= value <= high:
                yield best | {name: value}


def _rounded(value: float, is_whole: bool) -> float:
    return round(float(f"{value:.3g}")) if is_whole else float(f"{value:.3g}")


def are_alike(optimizers: Iterable[Optimizer], rate: float, draws: int) -> bool:
    """Whether runs of all `optimizers` leave the same ledger at one target.

    Args:
        optimizers, rate, draws: see `calibration.calibrate`.

    Raises:
        ConfigError: as `calibration.trace`.
    """
    return len({_releases(optimizer, rate, draws) for optimizer in optimizers}) == 1


def _releases(optimizer: Optimizer, rate: float, draws: int) -> tuple[Any, ...]:
    """What each draw releases, and how the noise is divided among the kinds: all that calibration goes by."""
    shares = tuple(sorted(getattr(optimizer, "shares", {}).items()))
    return trace(optimizer, rate=rate, draws=draws), getattr(optimizer, "noise_inflation", None), shares
