"""The figures of the (C, B, eta) study, on frames whose numbers are known."""

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dpopt.results import figures
from dpopt.results.drawing import styles_of

PLOTS = {plot.name: plot for plot in figures.plots(Path(__file__).parents[2] / "plots")}
CLIPS, SIZES, EPSILONS, EPOCHS = (0.1, 1.0, 10.0), (64, 256, 1024), (1.0, 8.0), (2.0, 10.0)
N = 4096


def draw(name, frame):
    return PLOTS[name].figure(frame, styles_of(frame["label"]))


def accuracy(clip, size, epsilon):
    """Best at C = 10 and B = 64 for epsilon 1, at C = 0.1 and B = 1024 for epsilon 8."""
    sign = 1 if epsilon == 1 else -1
    return 0.5 + 0.05 * sign * CLIPS.index(clip) - 0.03 * sign * SIZES.index(size)


@pytest.fixture
def sweep():
    rows = []
    for workload, epochs, epsilon, size in product(("easy", "hard"), EPOCHS, EPSILONS, SIZES):
        place = {"workload": workload, "epochs": epochs, "epsilon_target": epsilon, "batch_size": size}
        place |= {"score": "accuracy", "std": float("nan"), "examples": N, "draws": epochs * N / size}
        place |= {"noise_gradient": size**0.5 / epsilon}
        for clip in CLIPS:
            mean = accuracy(clip, size, epsilon)
            rows.append(place | {"label": "dp_adam", "clip": clip, "mean": mean, "selected_by": mean})
        rows.append(place | {"label": "auto_s", "clip": 1.0, "mean": 0.4, "selected_by": 0.4})
    return pd.DataFrame(rows)


def test_the_heat_map_marks_the_best_cell(sweep):
    figure = draw("clip_batch_heatmap", sweep)
    panels = {axis.get_title(): axis for axis in figure.axes}
    assert len(panels) == 2 * len(EPOCHS) * len(EPSILONS)
    for title, (x, y) in {"easy\n2 epochs, ε = 1": (2, 0), "hard\n10 epochs, ε = 8": (0, 2)}.items():
        (mark,) = panels[title].patches
        assert (mark.get_x() + mark.get_width() / 2, mark.get_y() + mark.get_height() / 2) == pytest.approx((x, y))
    table = panels["easy\n2 epochs, ε = 1"].images[0].get_array()
    assert table[0].tolist() == pytest.approx([50, 55, 60])
    assert table[:, 0].tolist() == pytest.approx([50, 47, 44])


def test_heat_maps_have_one_scale_and_a_column_for_methods_without_a_bound(sweep):
    auto = sweep["label"] == "auto_s"
    steep = (sweep["label"] == "dp_adam") & (sweep["workload"] == "easy") & (sweep["clip"] == 0.1)
    frame = sweep.assign(clip=sweep["clip"].mask(auto), mean=sweep["mean"] - 0.3 * steep)
    panels = {axis.get_title(): axis for axis in draw("clip_batch_heatmap", frame).axes}
    assert len(panels) == 2 * len(EPOCHS) * len(EPSILONS) * 2
    limits = {title: axis.images[0].get_clim() for title, axis in panels.items()}
    assert [high - low for low, high in limits.values()] == pytest.approx([20] * len(panels)), "of a loss of 46 points"
    assert limits["hard\ndp_adam\n2 epochs, ε = 1"][1] == pytest.approx(60), "the best of the panel"
    without = panels["easy\nauto_s\n2 epochs, ε = 1"]
    assert [text.get_text() for text in without.get_xticklabels()] == ["no C"]
    assert without.images[0].get_array().shape == (len(SIZES), 1)


def test_nothing_is_marked_or_chosen_where_nothing_validates(sweep):
    sweep = sweep[sweep["workload"] == "easy"].assign(selected_by=-np.inf)
    for axis in draw("clip_batch_heatmap", sweep).axes:
        assert not axis.patches
    for name in ("accuracy_vs_clip", "accuracy_vs_batch", "automatic_clipping"):
        assert draw(name, sweep.assign(delta=1e-5)) is None
    one = sweep[sweep["batch_size"] == 64]
    assert lines(draw("accuracy_vs_clip", one).axes[0], "ε = 1") == pytest.approx(
        np.array([[0.1, 50.0], [1.0, 55.0], [10.0, 60.0]])
    )


@pytest.fixture
def two(sweep):
    """The sweep of a second method, 20 points below and with other noise."""
    own = sweep[sweep["label"] == "dp_adam"]
    other = own.assign(label="fiber", mean=own["mean"] - 0.2, noise_gradient=own["batch_size"] ** 0.75)
    return pd.concat([sweep, other], ignore_index=True)


def test_two_methods_have_panels_of_their_own(two):
    panels = {axis.get_title(): axis for axis in draw("accuracy_vs_clip", two).axes}
    assert len(panels) == 2 * 2 * len(EPOCHS)
    highest = {label: lines(panels[f"easy\n2 epochs\n{label}"], "ε = 1").max(0)[1] for label in ("dp_adam", "fiber")}
    assert highest == pytest.approx({"dp_adam": 60, "fiber": 40})


def lines(axis, label):
    (line,) = [line for line in axis.lines if line.get_label() == label]
    return line.get_xydata()


def test_accuracy_over_clip_takes_the_best_batch(sweep):
    axis = draw("accuracy_vs_clip", sweep).axes[0]
    assert lines(axis, "ε = 1") == pytest.approx(np.array([[0.1, 50.0], [1.0, 55.0], [10.0, 60.0]]))
    assert lines(axis, "ε = 8") == pytest.approx(np.array([[0.1, 56.0], [1.0, 51.0], [10.0, 46.0]]))
    circles = sorted(tuple(line.get_xydata()[0].round(6)) for line in axis.lines if line.get_markersize() == 11)
    assert circles == [(0.1, 56.0), (10.0, 60.0)]


def test_accuracy_over_batch_shows_where_steps_are_few(sweep):
    figure = draw("accuracy_vs_batch", sweep)
    two, ten = figure.axes[:2]
    assert lines(two, "ε = 1") == pytest.approx(np.array([[64, 60.0], [256, 57.0], [1024, 54.0]]))
    for axis, epochs in ((two, 2), (ten, 10)):
        assert lines(axis, "T = 20 steps")[0][0] == pytest.approx(epochs * N / 20)


def rates(power):
    """Rates that grow as B to the `power`, times a factor of C and seed whose geometric mean is 1."""
    rows = []
    for workload, epochs, epsilon, size, clip, seed in product(("easy",), EPOCHS, EPSILONS, SIZES, CLIPS, (0, 1)):
        lr = epsilon * 1e-4 * size**power * 10 ** (CLIPS.index(clip) - 1) * 2 ** (1 - 2 * seed)
        place = {"workload": workload, "epochs": epochs, "epsilon_target": epsilon, "batch_size": size, "clip": clip}
        rows.append(place | {"label": "dp_adam", "seed": seed, "lr": lr})
    return pd.DataFrame(rows)


def test_the_best_rate_grows_by_the_power_that_is_written():
    power = 1.2
    axis = draw("best_rate_vs_batch", rates(power)).axes[0]
    for epsilon in EPSILONS:
        expected = np.array([[size, epsilon * 1e-4 * size**power] for size in SIZES])
        assert lines(axis, f"ε = {epsilon:g}") == pytest.approx(expected)
    assert [text.get_text() for text in axis.texts] == [f"power {power:.2f}"] * 2
    reference = lines(axis, "∝ √B")
    assert reference[:, 1] / reference[0, 1] == pytest.approx(np.sqrt(np.array(SIZES) / SIZES[0]))


def test_cumulative_noise_is_relative_to_the_largest_batch(sweep):
    figure = draw("cumulative_noise", sweep)
    # sigma = sqrt(B) / epsilon and T = E N / B: their cumulative noise is the same for every B.
    assert [y for _, y in lines(figure.axes[0], "ε = 1")] == pytest.approx([1, 1, 1])
    single = figure.axes[2].lines[0].get_ydata()
    assert single == pytest.approx([4, 2, 1])


def faces(figure):
    """What a legend says, with the face of its markers."""
    (legend,) = figure.legends
    faces = [getattr(handle, "get_markerfacecolor", str)() for handle in legend.legend_handles]
    return dict(zip([text.get_text() for text in legend.get_texts()], faces, strict=True))


def test_automatic_clipping_meets_the_tuned_bound(sweep):
    axis = draw("automatic_clipping", sweep).axes[0]
    drawn = {held.get_label(): held.lines[0].get_xydata() for held in axis.containers}
    assert drawn["dp_adam, C tuned"] == pytest.approx(np.array([[1.0, 60.0], [8.0, 56.0]]))
    assert drawn["auto_s"] == pytest.approx(np.array([[1.0, 40.0], [8.0, 40.0]]))


def test_norms_have_a_band_for_each_epsilon():
    rows = [
        {"workload": "easy", "label": "dp_adam", "epsilon_target": epsilon, "epoch": epoch, "best_clip": 3 / epsilon}
        | {"q5": epoch / epsilon, "q50": 2 * epoch / epsilon, "q95": 3 * epoch / epsilon}
        for epsilon in EPSILONS
        for epoch in (1.0, 2.0)
    ]
    axis = draw("gradient_norms", pd.DataFrame(rows)).axes[0]
    assert lines(axis, "ε = 8") == pytest.approx(np.array([[1.0, 0.25], [2.0, 0.5]]))
    bands = [held for held in axis.collections if held.get_label() != "5 to 95 % of the examples"]
    assert len(bands) == len(EPSILONS)
    assert {"median", "5 to 95 % of the examples", "best bound C*"} <= set(faces(axis.figure))


def test_class_weights_are_sorted_and_relative():
    rows = [
        {"workload": "easy", "label": "dp_adam", "epsilon_target": 1.0, "label_of_class": y, "bound": bound}
        | {"weight": min(1.0, bound / norm)}
        for y, norm in enumerate((8.0, 2.0, 4.0))
        for bound in (0.1, 1.0, 7.3, 10.0)
    ]
    axis = draw("class_weights", pd.DataFrame(rows)).axes[0]
    assert [y for _, y in lines(axis, "C = 1")] == pytest.approx([1, 0.5, 0.25])
    assert [y for _, y in lines(axis, "C = 10")] == pytest.approx([1, 1, 1])
    assert {line.get_label() for line in axis.lines} == {"C = 0.1", "C = 1", "C = 10"}
    assert axis.get_title() == "easy\ndp_adam, ε = 1"
    assert axis.get_xlabel() == "class, easiest to hardest\n(by its weight at C = 1)"


def test_all_epsilon_is_on_the_axis():
    rows = [
        {"workload": "easy", "label": label, "epsilon_target": target, "tuning": tuning, "score": "accuracy"}
        | {"epsilon_with_tuning": factor * target, "mean": 0.5, "std": 0.01}
        for label, tuning, factor in (("free", "grid", 3), ("hyfreedp", "self", 1))
        for target in EPSILONS
    ]
    axis = draw("accuracy_vs_total_epsilon", pd.DataFrame(rows)).axes[0]
    drawn = {held.get_label(): held.lines[0] for held in axis.containers}
    assert drawn["free"].get_xdata().tolist() == [3, 24]
    assert drawn["free"].get_markerfacecolor() == "white"
    assert drawn["hyfreedp"].get_xdata().tolist() == [1, 8]
    assert drawn["hyfreedp"].get_markerfacecolor() != "white"
