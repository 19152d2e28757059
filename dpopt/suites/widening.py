"""Further points of a search, one at a time, while the point that it would release lies at an end of its grid.

Which point is next follows from the scores before it, so the search is an adaptive composition. How many runs are made
follows from the scores too, so charging only those would claim too little: all that may be made are charged. The choice
must not change what a run releases (`same_releases`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dpopt.privacy.calibration import trace
from dpopt.types import Optimizer

_Point = dict[str, Any]
_Scored = Sequence[tuple[_Point, float]]
"""Points with their scores, larger is better; of equal ones the first is the best."""


def ends(points: Sequence[_Point]) -> dict[str, tuple[Any, Any]]:
    """The fields in which a grid has ends, with the smallest and the largest value: several positive numbers."""
    columns = {name: [point[name] for point in points] for name in points[0]}
    return {
        name: (min(values), max(values))
        for name, values in columns.items()
        if all(map(_is_positive, values)) and min(values) < max(values)
    }


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def beyond(scored: _Scored) -> Iterator[_Point]:
    """The best point moved beyond each end that it lies at, in the order of the fields.

    An end is the smallest or largest value that was tried of a field; fields are those of `ends`. The ratio of the end
    to its neighbour is continued, to 3 significant digits: 0.1, 0.3, 1 are followed by 3.33. Whole numbers stay whole.
    """
    points, best = [point for point, _ in scored], max(scored, key=lambda pair: pair[1])[0]
    for name, (low, high) in ends(points).items():
        values = sorted({point[name] for point in points})
        for end, neighbour in ((low, values[1]), (high, values[-2])):
            value = float(f"{end * end / neighbour:.3g}")
            value = round(value) if isinstance(end, int) else value
            if best[name] == end and 0 < value < math.inf and not low <= value <= high:
                yield best | {name: value}


def same_releases(optimizers: Iterable[Optimizer], rate: float, draws: int) -> bool:
    """True if runs of all `optimizers` leave the same ledger at one target; raises as `calibration.trace`.

    Calibration goes by what each draw releases and by how the noise is divided among the kinds, so these are compared.
    """
    releases = {
        (
            trace(optimizer, rate=rate, draws=draws),
            getattr(optimizer, "noise_inflation", None),
            tuple(sorted(getattr(optimizer, "shares", {}).items())),
        )
        for optimizer in optimizers
    }
    return len(releases) == 1
