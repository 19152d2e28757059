"""The figures of the (C, B, eta) study, on frames whose numbers are known."""

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from intervals import student

from dpopt.results import figures, hard_classes
from dpopt.results.drawing import styles_of
from dpopt.results.results import Results

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
        place |= {"score": "accuracy", "std": float("nan"), "seeds": 1, "examples": N, "draws": epochs * N / size}
        place |= {"noise_gradient": size**0.5 / epsilon}
        for clip in CLIPS:
            mean = accuracy(clip, size, epsilon)
            rows.append(place | {"label": "dp_adam", "clip": clip, "mean": mean, "selected_by": mean})
        rows.append(place | {"label": "auto_s", "clip": 1.0, "mean": 0.4, "selected_by": 0.4})
    return pd.DataFrame(rows)


def test_nothing_is_chosen_where_nothing_validates(sweep):
    sweep = sweep[sweep["workload"] == "easy"].assign(selected_by=-np.inf)
    for name in ("accuracy_vs_clip", "accuracy_vs_batch", "automatic_clipping"):
        assert draw(name, sweep.assign(delta=1e-5)) is None
    one = sweep[sweep["batch_size"] == 64]
    assert lines(draw("accuracy_vs_clip", one).axes[0], "target ε = 1") == pytest.approx(
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
    highest = {
        label: lines(panels[f"easy\n2 epochs\n{label}"], "target ε = 1").max(0)[1] for label in ("dp_adam", "fiber")
    }
    assert highest == pytest.approx({"dp_adam": 60, "fiber": 40})


def lines(axis, label):
    (line,) = [line for line in axis.lines if line.get_label() == label]
    return line.get_xydata()


def test_accuracy_over_clip_takes_the_best_batch(sweep):
    axis = draw("accuracy_vs_clip", sweep).axes[0]
    assert lines(axis, "target ε = 1") == pytest.approx(np.array([[0.1, 50.0], [1.0, 55.0], [10.0, 60.0]]))
    assert lines(axis, "target ε = 8") == pytest.approx(np.array([[0.1, 56.0], [1.0, 51.0], [10.0, 46.0]]))
    circles = sorted(tuple(line.get_xydata()[0].round(6)) for line in axis.lines if line.get_markersize() == 11)
    assert circles == [(0.1, 56.0), (10.0, 60.0)]


def test_accuracy_over_batch_shows_where_steps_are_few(sweep):
    figure = draw("accuracy_vs_batch", sweep)
    two, ten = figure.axes[:2]
    assert lines(two, "target ε = 1") == pytest.approx(np.array([[64, 60.0], [256, 57.0], [1024, 54.0]]))
    assert lines(two, "T = 20 steps")[0][0] == pytest.approx(2 * N / 20)
    assert "T = 20 steps" not in [line.get_label() for line in ten.lines]  # at B = 2,048, beyond the largest


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
        assert lines(axis, f"target ε = {epsilon:g}") == pytest.approx(expected)
    assert [text.get_text() for text in axis.texts] == [f"power {power:.2f}"] * 2
    reference = lines(axis, "∝ √B")
    assert reference[:, 1] / reference[0, 1] == pytest.approx(np.sqrt(np.array(SIZES) / SIZES[0]))


def test_cumulative_noise_is_relative_to_the_largest_batch(sweep):
    figure = draw("cumulative_noise", sweep)
    # sigma = sqrt(B) / epsilon and T = E N / B: their cumulative noise is the same for every B.
    assert [y for _, y in lines(figure.axes[0], "target ε = 1")] == pytest.approx([1, 1, 1])
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


def norms(clips):
    """Norms that grow with B and C, and fall with epsilon."""
    rows = []
    for epsilon, size, clip, epochs, epoch in product(EPSILONS, SIZES, clips, EPOCHS, (1.0, 2.0)):
        scale = epochs * size * (1 if np.isnan(clip) else clip) / epsilon
        place = {"workload": "easy", "label": "dp_adam", "epsilon_target": epsilon, "batch_size": size, "clip": clip}
        quantiles = {"q5": epoch * scale, "q50": 2 * epoch * scale, "q95": 3 * epoch * scale}
        rows.append(place | {"epochs": epochs, "epoch": epoch, "best_clip": 4 * epoch * scale} | quantiles)
    return pd.DataFrame(rows)


@pytest.mark.parametrize("clips", [CLIPS, (np.nan,)], ids=["with C", "without"])
def test_norms_have_a_band_for_each_epsilon_at_one_clip_and_batch(clips):
    axis = draw("gradient_norms", norms(clips)).axes[0]
    assert lines(axis, "target ε = 8") == pytest.approx(10 * 256 / 8 * np.array([[0, 2], [0, 4]]) + [[1, 0], [2, 0]])
    bands = [held for held in axis.collections if held.get_label() != "5 to 95 % of the examples"]
    assert len(bands) == len(EPSILONS)
    assert {"median", "5 to 95 % of the examples", "best bound C*"} <= set(faces(axis.figure))
    dots = [line.get_ydata() for line in axis.lines if line.get_marker() == "o" and len(line.get_ydata())]
    assert np.array(dots) == pytest.approx(10 * 256 * np.array([[4, 8], [0.5, 1]]))
    assert axis.get_title() == f"easy\ndp_adam\n{'C = 1' if clips == CLIPS else 'no C'}, B = 256, 10 epochs"


def test_norms_of_an_epsilon_that_lacks_the_setting_are_not_those_of_another():
    frame = norms(CLIPS)
    lacking = frame[(frame["epsilon_target"] == 1) | (frame["batch_size"] != 256)]
    labels = {line.get_label() for line in draw("gradient_norms", lacking).axes[0].lines}
    assert [f"target ε = {epsilon:g}" in labels for epsilon in EPSILONS] == [True, False]


HARD, EASY = (3, 7), (0, 5)
"""Two of ten classes each."""


def of_classes(seeds=(0, 1, 2)):
    """A larger C helps two hard classes, less for later seeds, and costs two easy ones; the larger B validates best."""
    generator, rows = np.random.default_rng(0), []
    for label, clip, size, epsilon, seed in product(("dp_adam", "auto_s"), CLIPS, SIZES, EPSILONS, seeds):
        for y in range(10):
            level = 0.3 if y in HARD else 0.9 if y in EASY else 0.6
            gain = CLIPS.index(clip) * ((y in HARD) * (0.04 - 0.01 * seed) - 0.02 * (y in EASY)) * (label == "dp_adam")
            accuracy = level + gain * (size == SIZES[-1]) + 0.01 * generator.random()
            place = {"workload": "easy", "label": label, "epsilon_target": epsilon, "batch_size": size, "epochs": 2.0}
            place |= {"clip": clip if label == "dp_adam" else np.nan, "seed": seed, "score": "accuracy"}
            run = {"run_id": f"{label} {clip} {size} {epsilon} {seed}", "selected_by": 0.5 + size * 1e-4}
            rows.append(place | run | {"label_of_class": y, "accuracy": accuracy})
    return pd.DataFrame(rows)


def test_changes_of_classes_are_those_of_the_runs_that_validate_best():
    frame = of_classes()
    changes = hard_classes.changes(frame).set_index(["group", "clip"])
    assert len(changes) == 3 * len(CLIPS)
    chosen = frame[(frame["label"] == "dp_adam") & (frame["batch_size"] == SIZES[-1])]
    groups = {"hardest fifth": HARD, "easiest fifth": EASY, "all classes": range(10)}
    for (group, classes), clip in product(groups.items(), CLIPS):
        means = chosen[chosen["label_of_class"].isin(classes)].groupby(["clip", "seed"])["accuracy"].mean()
        by_seed, row = means[clip] - means[CLIPS[0]], changes.loc[(group, clip)]
        assert row["mean"] == pytest.approx(by_seed.mean(), abs=1e-12)
        if clip != CLIPS[0]:
            assert (row["low"], row["high"]) == pytest.approx(student(by_seed))
    assert changes.at[("hardest fifth", 10.0), "mean"] == pytest.approx(2 * 0.03, abs=0.01)


def test_classes_are_ranked_by_runs_that_are_not_compared():
    """Of the compared runs the hard classes are the best here, which must not change who is called hard."""
    frame = of_classes()
    is_compared = frame["label"] == "dp_adam"
    other = frame.assign(accuracy=frame["accuracy"].where(~is_compared, 1 - frame["accuracy"]))
    groups = hard_classes.groups(other[~is_compared])
    assert [set(groups[name]) for name in (hard_classes.HARDEST, hard_classes.EASIEST)] == [set(HARD), set(EASY)]
    gains = [hard_classes.changes(of).set_index(["group", "clip"])["mean"] for of in (frame, other)]
    assert gains[1].to_numpy() == pytest.approx(-gains[0].to_numpy())
    assert hard_classes.changes(frame[is_compared]).empty
    assert draw("hard_classes", frame[is_compared]) is None


def test_a_seed_that_lacks_a_bound_at_an_epsilon_is_compared_without_it():
    frame = of_classes()
    is_lacking = (frame["clip"] == 10) & (frame["epsilon_target"] == 8) & (frame["seed"] == 0)
    without = frame[(frame["epsilon_target"] != 8) | (frame["seed"] != 0) | (frame["label"] != "dp_adam")]
    changes = [hard_classes.changes(of) for of in (frame[~is_lacking], without)]
    assert [set(of.pop("left_out")) for of in changes] == [{1}, {0}]
    assert changes[0].equals(changes[1])


def test_the_figure_of_classes_shows_changes_and_writes_those_that_are_far():
    frame = of_classes()
    is_failing = (frame["clip"] == 10) & frame["label_of_class"].isin(EASY)
    frame = frame.assign(accuracy=frame["accuracy"].mask(is_failing, 0.0))
    axis = draw("hard_classes", frame).axes[0]
    changes = hard_classes.changes(frame)
    drawn = {held.get_label(): held.lines[0].get_ydata() for held in axis.containers}
    assert list(drawn) == list(hard_classes.GROUPS)
    for group, values in drawn.items():
        assert values == pytest.approx(100 * changes.loc[changes["group"] == group, "mean"].to_numpy())
    far = [changes.query("group == @group and clip == 10")["mean"].iloc[0] for group in hard_classes.GROUPS[1:]]
    assert [text.get_text() for text in axis.texts] == [f"−{-100 * value:.0f}" for value in far]
    low, high = axis.get_ylim()
    assert low == -high


def test_classes_of_one_seed_have_no_interval():
    changes = hard_classes.changes(of_classes(seeds=(0,)))
    assert changes[["low", "high"]].isna().all(axis=None)
    assert np.isfinite(draw("hard_classes", of_classes(seeds=(0,))).axes[0].get_ylim()).all()


def test_scores_of_classes_are_those_of_the_records(maker):
    for clip, size, seed in product((0.1, 1.0), (64, 128), (0, 1)):
        classes = [clip / 10, size / 1000, seed / 10]
        maker.add("dp_adam", seed, 0.5, 0.6, batch_size=size, scores={"class_accuracy": classes})
        maker.clip(clip)
    frame = Results(maker.done(), "made").class_scores
    assert len(frame) == 8 * 3
    for row in frame.to_dict("records"):
        expected = (row["clip"] / 10, row["batch_size"] / 1000, row["seed"] / 10)
        assert row["accuracy"] == expected[row["label_of_class"]]


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
    assert " ".join(axis.get_title().split()) == "easy, target ε = 1 dp_adam"
    assert all(tick == int(tick) for tick in axis.get_xticks()), "of classes"
    assert axis.get_xlabel() == "class, easiest to hardest\n(by its weight at C = 1)"


def test_all_epsilon_is_on_the_axis():
    rows = [
        {"workload": "easy", "label": label, "epsilon_target": target, "tuning": tuning, "score": "accuracy"}
        | {"epsilon_with_tuning": factor * target, "mean": 0.5, "std": 0.01, "seeds": 3}
        | {"epsilon_single": target, "is_reference": factor > 1}
        for label, tuning, factor in (("free", "grid", 3), ("hyfreedp", "self", 1))
        for target in EPSILONS
    ]
    axis = draw("accuracy_vs_epsilon", pd.DataFrame(rows)).axes[0]
    drawn = {held.get_label(): held.lines[0] for held in axis.containers}
    assert drawn["free"].get_xdata().tolist() == [3, 24]
    hollow = [line for line in axis.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in hollow] == [[3, 24]]
    assert hollow[0].get_zorder() > drawn["free"].get_zorder(), "the full markers below them are not seen"
    assert drawn["hyfreedp"].get_xdata().tolist() == [1, 8]
    assert drawn["hyfreedp"].get_markerfacecolor() != "white"
