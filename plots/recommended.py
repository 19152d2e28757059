"""Test score at the C and B that `dpopt recommend` puts in the middle, against the best of a sweep over both.

Of the sweep's values the nearest count, and of two that are equally near the smaller. The learning rate is searched.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dpopt.errors import ConfigError
from dpopt.results.axes import run_axis
from dpopt.results.choosing import validated_best
from dpopt.results.drawing import COLOURS, Styles, by_method, gridded, legend, sweeps, workload_panels
from dpopt.results.scores import shown

NEEDS = "sweep"
SEARCHED, RECOMMENDED = "C, B and η searched", "C and B recommended, η searched"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """A panel for each workload, number of epochs and method. `recommend` is told nothing of the model and the data.

    Where it refuses, as with too few epochs, the point is left out.
    """
    tried = gridded(sweeps(frame))
    panel_of = by_method(tried, ["workload", "epochs"])
    place = [*panel_of, "epsilon_target"]
    best = validated_best(tried, place)
    if best.empty:
        return None
    middles = pd.DataFrame(row for _, rows in tried.groupby(place) for row in _recommended(rows))
    points = pd.concat([best.assign(of=SEARCHED), middles.assign(of=RECOMMENDED)])
    figure, panels = workload_panels(points, 3.2, 2.6, by=panel_of)
    for panel, rows in panels:
        unit = shown(rows["score"].iloc[0])
        for name, colour in ((SEARCHED, COLOURS[0]), (RECOMMENDED, COLOURS[1])):
            line = rows.loc[rows["of"] == name].sort_values("epsilon_target")
            means, spreads = unit.factor * line["mean"], unit.factor * line["std"].fillna(0)
            panel.errorbar(line["epsilon_target"], means, spreads, fmt="o-", ms=4, color=colour, label=name)
        panel.set(ylabel=f"test {unit.label}")
        run_axis(panel, rows["epsilon_target"], "ε")
    legend(figure)
    return figure


def _recommended(rows: pd.DataFrame) -> Iterator[pd.Series]:
    """Of the rows of one place, the one that is nearest to what is recommended there; none where nothing is."""
    from dpopt.study.recommend import recommend  # which takes torch with it, and figures load without

    known = rows.iloc[0]
    try:
        grid = recommend(round(known["examples"]), known["epsilon_target"], known["epochs"], delta=known["delta"])
    except ConfigError:
        return
    middles = {"clip": grid.clips, "batch_size": grid.batch_sizes}
    rows = rows.sort_values([*middles])  # a tie must not go to the row with the higher test score
    steps = pd.DataFrame({name: np.log(rows[name]) - np.median(np.log(values)) for name, values in middles.items()})
    yield rows.loc[steps.abs().sum(axis=1).round(6).idxmin()]
