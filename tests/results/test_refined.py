"""Points that a refinement has added: shown beside the grid, and charged with it."""

from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from stored import rewrite

from dpopt.errors import ConfigError
from dpopt.results import budgets, drawing, pricing
from dpopt.results.results import Results

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
    rewrite(maker.store, run_id, **more)


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
    assert row["epsilon_with_tuning"] == pricing.composed(refined.store, every, row["delta"], "rdp")


def test_points_that_follow_from_all_seeds_are_charged_with_all_seeds(maker):
    ids = []
    for seed in (0, 1):
        for lr, validation in ((0.1, 0.5), (1.0, 0.6), (0.3, 0.7)):
            ids.append(maker.add("dp_adam", seed, validation, 0.5, tuned={"lr": lr}, tuning="grid"))
            maker.cells[-1] |= {"refined": lr == 0.3}
    found = Results(maker.done(), "made")
    assert [sorted(row) for row in found.selected["run_ids"]] == [sorted(ids)] * 2
    assert list(found.selected["runs"]) == [3, 3]


def test_some_seeds_of_a_refined_row_are_refused(maker):
    """The runs of the others, which its points follow from too, would not be charged."""
    for seed, label in product((0, 1), ("dp_adam", "dp_sgd")):
        for lr, validation in ((0.1, 0.5), (1.0, 0.6), (0.3, 0.7)):
            maker.add(label, seed, validation, 0.5, tuned={"lr": lr}, tuning="grid")
            maker.cells[-1] |= {"refined": lr == 0.3 and label == "dp_adam"}
    store = maker.done()
    for part in ({"seeds": [0]}, {"seeds": [1], "optimizers": ["dp_sgd", "dp_adam"]}):
        with pytest.raises(ConfigError, match=r"seeds: \[\d\] .*dp_adam: refined, .*follow from all seeds"):
            Results(store, "made", part)
    assert set(Results(store, "made", {"seeds": [0], "optimizers": ["dp_sgd"]}).every["runs"]) == {3}
    for part in ({"seeds": [0, 1]}, {"optimizers": ["dp_adam"]}):
        table = Results(store, "made", part).table().set_index("label")
        assert table["epsilon_with_tuning"]["dp_adam"] == Results(store, "made").table()["epsilon_with_tuning"].max()


def searched(maker, seeds, missing=None, damaged=None):
    """For each seed a grid of C in 0.1, 1, 10 and a point that a refinement has added; gives the ids by (C, seed)."""
    ids = {}
    for seed in range(seeds):
        for clip, validation in ((0.1, 0.5), (1.0, 0.6), (10.0, 0.5), (3.0, 0.7)):
            status = "missing" if (clip, seed) == missing else "done"
            ids[clip, seed] = maker.add(
                "dp_adam", seed, validation, 0.5, tuned={"lr": 0.1}, tuning="grid", status=status
            )
            entry = maker.cells[-1]
            entry["cell"]["optimizer"]["clip"] = {"rule": "abadi", "bound": clip}
            entry |= {"refined": clip == 3.0}
            if status == "done":
                maker.change()
    store = maker.done()
    if damaged:
        (store.folder(ids[damaged]) / "run.json").write_text("{")
    return Results(store, "made"), ids


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_refined_row_is_charged_for_the_grid_that_it_follows_from(maker, seeds):
    found, ids = searched(maker, seeds)
    whole = pricing.composed(found.store, list(ids.values()), 1e-5, "rdp")
    single = pricing.composed(found.store, [ids[0.1, 0]], 1e-5, "rdp")
    table = found.table().set_index("clip")
    assert table["epsilon_with_tuning"].to_dict() == {0.1: single, 1.0: single, 10.0: single, 3.0: whole}
    assert table["epsilon_composed"][3.0] == whole > single
    assert found.comparison["epsilon_with_tuning"].tolist() == [whole]
    assert [sorted(run_ids) for run_ids in found.selected["run_ids"]] == [sorted(ids.values())] * seeds
    reached = budgets.reached(found.store, found.cells, budgets=[1e9])
    assert set(reached["spent"]) == {whole}


def test_a_run_of_another_seed_that_is_not_done_has_spent_nothing(maker):
    found, ids = searched(maker, 2, missing=(3.0, 1))
    (row,) = found.every[found.every["clip"] == 3.0].to_dict("records")
    assert sorted(row["run_ids"]) == sorted(set(ids.values()) - {ids[3.0, 1]})
    assert len(found.table()) == 4


def test_a_refined_row_whose_price_is_not_known_is_left_out(maker):
    found, _ = searched(maker, 2, damaged=(10.0, 1))
    assert set(found.every["clip"]) == {0.1, 1.0, 10.0}


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


def test_where_all_rates_diverged_none_is_the_best(maker):
    for size, lr, clip in product((100, 1000), (0.1, 1.0), (0.1, 1.0)):
        add(maker, clip, size, 0.5 + lr / 10, lr)
        if (size, clip) == (100, 0.1):
            rewrite(maker.store, maker.cells[-1]["run_id"], status="diverged")
    found = Results(maker.done(), "made")
    assert len(found.sweep) == 4
    assert {(row.batch_size, row.clip): row.lr for row in found.rates.itertuples()} == {
        (100, 1.0): 1.0,
        (1000, 0.1): 1.0,
        (1000, 1.0): 1.0,
    }


def test_rates_that_nothing_searches_are_not_drawn(refined):
    assert refined.rates.empty


def test_a_search_over_another_field_is_none_of_rates(maker):
    for size, momentum in product((100, 1000), (0.0, 0.9)):
        for clip in (0.1, 1.0):
            add(maker, clip, size, 0.5 + momentum / 10)
            maker.cells[-1]["tuned"] = {"momentum": momentum}
    found = Results(maker.done(), "made")
    assert (found.sweep["runs"] == 2).all()
    assert found.rates.empty
    with pytest.raises(ConfigError, match="nothing finished that it could show"):
        found.plot("best_rate_vs_batch", PLOTS)


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
