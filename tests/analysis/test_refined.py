"""Points that a refinement has added: shown beside the grid, and charged with it."""

import json
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from dpopt.analysis import drawing, frames, selection
from dpopt.analysis.results import Results

PLOTS = Path(__file__).parents[2] / "plots"
FURTHER = {(3.0, 500): 0.9, (0.3, 200): 0.4}


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def add(maker, clip, size, validation, lr=0.1, **flags):
    run_id = maker.add("dp_adam", 0, validation, validation - 0.1, tuned={"lr": lr}, tuning="grid")
    entry = maker.cells[-1]
    entry |= flags
    entry["cell"]["optimizer"]["clip"]["bound"] = clip
    entry["cell"]["batch_size"] = size
    more = {"cell": entry["cell"], "examples": 1e4, "noise": {"gradient": 1.0}}
    record = maker.store.record(run_id) | more
    maker.store.write(maker.store.folder(run_id) / "record.json", json.dumps(record))


@pytest.fixture
def refined(maker):
    """A grid of C in 0.1, 1, 10 and B in 100, 1000, best at C = 1 and B = 1000, and two points beside it."""
    for size in (100, 1000):
        for clip in (0.1, 1.0, 10.0):
            add(maker, clip, size, 0.5 + 0.1 * (clip == 1) + 0.1 * (size == 1000))
    for (clip, size), validation in FURTHER.items():
        add(maker, clip, size, validation, refined=True)
    store = maker.done()
    return Results(store, "made")


def test_the_best_point_is_shown_and_the_whole_search_charged(refined):
    (row,) = refined.comparison.to_dict("records")
    assert (row["clip"], row["batch_size"], row["runs"]) == (3.0, 500, 8)
    assert row["mean"] == pytest.approx(0.8)
    every = list(refined.cells["run_id"])
    assert row["epsilon_with_tuning"] == frames.composed(refined.store, every, row["delta"], "rdp")


def test_points_that_follow_from_all_seeds_are_charged_with_all_seeds(maker):
    ids = []
    for seed in (0, 1):
        for lr, validation in ((0.1, 0.5), (1.0, 0.6), (0.3, 0.7)):
            ids.append(maker.add("dp_adam", seed, validation, 0.5, tuned={"lr": lr}, tuning="grid"))
            maker.cells[-1] |= {"refined": lr == 0.3}
    found = Results(maker.done(), "made")
    assert [sorted(row) for row in found.selected["run_ids"]] == [sorted(ids)] * 2
    assert list(found.selected["runs"]) == [3, 3]


def test_which_rows_are_refined(refined):
    rows = refined.sweep[refined.sweep["is_refined"]]
    assert {(row.clip, row.batch_size) for row in rows.itertuples()} == set(FURTHER)
    assert len(drawing.gridded(refined.sweep)) == 6


def test_the_rates_of_a_sweep_are_those_that_searches_select(maker):
    for size, lr in product((100, 1000), (0.1, 1.0)):
        for clip in (0.1, 1.0):
            add(maker, clip, size, 0.5 + 0.1 * ((size == 1000) == (lr == 1.0)), lr)
    found = Results(maker.done(), "made").rates
    assert {row.batch_size: row.lr for row in found.itertuples()} == {100: 0.1, 1000: 1.0}
    assert len(found) == 4


def test_rates_that_nothing_searches_are_not_drawn(refined):
    assert refined.rates.empty


def test_private_selection_is_simulated_for_the_grid_alone(refined):
    outcome = selection.private_selection(refined.store, refined.cells, runs=(2,))
    assert len(outcome) == 6


def test_the_heat_map_has_them_between_its_cells(refined):
    (axis,) = refined.plot("clip_batch_heatmap", PLOTS).axes
    assert axis.images[0].get_array().shape == (2, 3)
    places = {(3.0, 500): (1 + np.log10(3), np.log10(5)), (0.3, 200): (np.log10(3), np.log10(2))}
    (circles,) = axis.collections
    found = dict(zip(map(tuple, np.round(circles.get_offsets(), 6)), circles.get_array(), strict=True))
    assert found == pytest.approx(
        {tuple(np.round(places[at], 6)): 100 * (score - 0.1) for at, score in FURTHER.items()}
    )
    (ring,) = axis.lines
    assert (ring.get_xdata().item(), ring.get_ydata().item()) == pytest.approx(places[3.0, 500])
    assert not axis.patches, "the best is no cell of the grid"


def test_lines_join_the_grid_alone(refined):
    for name, grid, further in (("clip", [0.1, 1, 10], [0.3, 3]), ("batch", [100, 1000], [200, 500])):
        axis = refined.plot(f"accuracy_vs_{name}", PLOTS).axes[0]
        swept = [sorted(line.get_xdata()) for line in axis.lines]
        assert grid in swept
        assert further in swept
        joined = [sorted(line.get_xdata()) for line in axis.lines if line.get_linestyle() == "-"]
        assert joined == [grid]
    single = refined.plot("cumulative_noise", PLOTS).axes[-1]
    assert [list(line.get_xdata()) for line in single.lines] == [[100, 1000]]
