import math
from itertools import pairwise, product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.results import axes, drawing, figures
from dpopt.results.drawing import styles_of
from dpopt.results.naming import readable_names
from dpopt.results.results import Results

PLOTS = Path(__file__).parents[2] / "plots"
ALL = {plot.name: plot for plot in figures.plots(PLOTS)}
OF_TABLES = [plot for plot in ALL.values() if plot.needs in ("comparison", "curves", "ranking")]
NORMS = {"norms": {"q5": 0.5, "q50": 1.0, "q95": 2.0}, "clipped": 0.5, "best": {"C": 0.7}}
WEIGHTS = {"class_weights": {"0.1": [0.1, 0.2], "1.0": [0.5, 0.9]}, "class_norms": [2.0, 1.0]}
NOTED = {"examples": 1000, "noise": {"gradient": 1.0}, "diagnostics": WEIGHTS, "entry": {"diagnostics": NORMS}}
CLASSES = {"scores": {"class_accuracy": [0.2, 0.5, 0.8]}}

CAPS = ("_", "|")
"""At the ends of bars, beside a marker."""


@pytest.fixture(scope="module")
def known(recorded):
    return Results(recorded, "made")


@pytest.fixture(scope="module")
def two(maker_of, tmp_path_factory):
    """Two workloads on which the methods rank in opposite orders; each lacks one of them, one method varies C and B."""
    maker = maker_of(tmp_path_factory.mktemp("two") / "results")
    for workload, sign, missing in (("digits_mlp", 1, "late"), ("mnist_mlp", -1, "early")):
        for epsilon in (1.0, 3.0):
            for place, label in enumerate(("early", "dp_adam", "hyfreedp", "late")):
                score = 0.6 + 0.1 * sign * place
                options = {"epsilon": epsilon, "workload": workload, "eta": 1e-3, **CLASSES}
                if label != missing:
                    maker.add(label, 0, score, score, **options)
            for clip, size, lr in product((0.1, 1.0), (64, 128), (0.1, 1.0)):
                tuned = {"tuned": {"lr": lr}, "tuning": "grid", "batch_size": size}
                maker.add("swept", 0, 0.55 + clip / 100, 0.55, **options, **tuned, **NOTED)
                maker.clip(clip)
        maker.add("ceiling", 0, 0.99, 0.99, epsilon=math.inf, workload=workload)
    return Results(maker.done(), "made")


def styles_by_name(results):
    """The suite's styles by the names that figures show."""
    return {results.names[label]: style for label, style in results.styles.items()}


def look(artist):
    """Colour, marker and dash of what stands for a label; none for what it has not."""
    if isinstance(artist, BarContainer):
        return look(artist.patches[0])
    if isinstance(artist, Patch):
        return to_hex(artist.get_facecolor()), None, None
    if isinstance(artist, ErrorbarContainer):
        line, _, bars = artist.lines
        assert {to_hex(colour) for bar in bars for colour in bar.get_colors()} == {to_hex(line.get_color())}
        return look(line)
    if not isinstance(artist, Line2D):
        return to_hex(artist.get_edgecolor()[0]), None, None
    marker = None if artist.get_marker() in ("None", "none", "", None, *CAPS) else artist.get_marker()
    joined = artist.get_linestyle() not in ("None", "none", "")
    return to_hex(artist.get_color()), marker, dashes(artist) if joined else None


def dashes(line):
    offset, pattern = line._unscaled_dash_pattern
    return offset, pattern and tuple(pattern)


def labelled(figure):
    """Of each panel: the text and look of all that is labelled."""
    for axis in figure.axes:
        yield [(text, look(artist)) for artist, text in zip(*axis.get_legend_handles_labels(), strict=True)]


def legends(figure):
    """The text and look of each entry of a legend, which may be drawn by several artists."""
    for legend in [*figure.legends, *(held for axis in figure.axes if (held := axis.get_legend()))]:
        entries = [entry for column in legend._legend_handle_box.get_children() for entry in column.get_children()]
        for area, text in (entry.get_children() for entry in entries):
            yield text.get_children()[0].get_text(), together(area.get_children())


def together(artists):
    looks = [look(artist) for artist in artists]
    assert len({colour for colour, _, _ in looks}) == 1
    return looks[0][0], *(next((found for found in kind if found), None) for kind in list(zip(*looks, strict=True))[1:])


def check(figure, styles):
    """Each label has one look in all panels and legends, a suite's its style; a legend names all that is shown."""
    shown = [pair for panel in labelled(figure) for pair in panel]
    in_legend = list(legends(figure))
    assert not in_legend or {text for text, _ in in_legend} == {text for text, _ in shown}
    looks = {}
    for text, found in shown + in_legend:
        assert looks.setdefault(text, found) == found, text
        label = max((label for label in styles if text.startswith(label)), key=len, default=None)
        if label:
            style = styles[label]
            assert found[0] == style.colour.lower()
            assert found[1] == (None if text.endswith("(ε = ∞)") else style.marker), "a ceiling is a line across"
            assert "∞" in text or found[2] in (None, dashes(Line2D([], [], linestyle=style.dash)))
    return {text for text, _ in shown}


@pytest.mark.parametrize(
    "plot", [plot for plot in ALL.values() if plot.needs in figures.OF_SUITES], ids=lambda p: p.name
)
def test_a_label_looks_the_same_wherever_it_is(plot, two):
    if (figure := two.draw(plot)) is None:
        assert plot.name in ("average_ranks", "performance_profile", "rate_transfer"), "too few workloads, or seeds"
        return
    texts = check(figure, styles_by_name(two))
    assert texts
    if plot in OF_TABLES and plot.name != "accuracy_by_method":  # whose rows are named, and colours say how they search
        assert {"early", "late"} <= texts


def test_figures_of_no_suite_have_one_look_for_each_label():
    audit = pd.DataFrame(product(("optimizer", "control"), (1.0, 3.0)), columns=["kind", "epsilon_target"])
    audit = audit.assign(name="x", failure="", epsilon=2.0, worst_case=1.0, one_run=0.5, one_run_fdp=0.7)
    assert "one run" in check(ALL["audit"].figure(audit), {})
    rest = {plot.name for plot in ALL.values() if plot.needs not in figures.OF_SUITES}
    assert rest == {"audit", "step_cost"}, "and bars of step_cost are named beside them"


def test_a_part_of_a_suite_keeps_its_styles(two):
    part = Results(two.store, "made", {"optimizers": ["late", "hyfreedp"]})
    assert part.styles == two.styles == styles_of(["early", "dp_adam", "hyfreedp", "swept", "late"]) | two.styles
    assert list(two.styles).index("late") > 0
    assert check(part.plot("accuracy_vs_epsilon", PLOTS), styles_by_name(two)) == {"late", "HyFreeDP"}


def test_forty_labels_can_be_told_apart():
    styles = styles_of(f"method_{k}" for k in range(40))
    assert len({(style.colour, style.marker, str(style.dash)) for style in styles.values()}) == 40
    assert len({(style.colour, str(style.dash)) for style in styles.values()}) == 40, "without markers as well"
    assert {style.dash for style in list(styles.values())[: len(drawing.COLOURS)]} == {"-"}


def test_methods_that_differ_in_a_number_share_marker_and_dash():
    names = ["alone", "one_1e-8", "one_1e-2", "one", "other_1e-8", "other_1e-2", "third_1", *"abcdefg"]
    styles = styles_of(names)
    assert list(styles) == names
    looks = {label: style[1:] for label, style in styles.items()}
    assert looks["one_1e-8"] == looks["one_1e-2"] == looks["one"] != looks["other_1e-8"] == looks["other_1e-2"]
    assert styles["one_1e-8"].colour == styles["other_1e-8"].colour != styles["one_1e-2"].colour
    for part in ("marker", "dash"):
        assert len({(style.colour, getattr(style, part)) for style in styles.values()}) == len(names)


def test_accuracy_figure_plots_the_tables_numbers(known):
    panel = known.plot("accuracy_vs_epsilon", PLOTS).axes[0]
    lines = {container.get_label(): container.lines[0].get_xydata().tolist() for container in panel.containers}
    rows = known.comparison.query("label == 'hyfreedp'").sort_values("epsilon_target")
    assert lines["HyFreeDP"] == pytest.approx(rows[["epsilon_with_tuning", "mean"]].to_numpy() * [1, 100])
    searched = known.comparison.query("label == 'dp_adam'").sort_values("epsilon_target")
    assert lines["DP-Adam"] == pytest.approx(searched[["epsilon_with_tuning", "mean"]].to_numpy() * [1, 100])
    hollow = {x for line in panel.lines if line.get_markerfacecolor() == "white" for x in line.get_xdata()}
    is_over = searched["epsilon_with_tuning"] > searched["epsilon_target"] * 1.001
    assert hollow == set(searched["epsilon_with_tuning"][is_over]), "what it spent; one run of it is a faint tick"
    assert "for reference" in {text for text, _ in legends(panel.figure)}
    faint = [line.get_xydata() for line in panel.lines if line.get_alpha() == 0.5 and len(line.get_xdata())]
    assert faint == [pytest.approx(searched[["epsilon_single", "mean"]].to_numpy() * [1, 100])]
    assert [text.get_text() for text in panel.get_xticklabels()][:2] == ["1", "3"]


def drawn(plot, frame):
    return plot.figure(frame, styles_of(frame["label"]))


def rates(seeds, tuning="self", start=1e-6):
    """Curves of `seeds` runs that start at 1e-6 and find 1e-1, 1e-2, ..."""
    rows = [
        {"workload": "w", "epsilon_target": 1.0, "label": "found", "tuning": tuning, "run_id": str(seed), "lr": start}
        | {"draw": draw, "eta": 1e-6 if draw == 5 else 10.0 ** -(1 + seed)}
        for seed in range(seeds)
        for draw in (5, 10)
    ]
    return drawn(ALL["learning_rate"], pd.DataFrame(rows))


@pytest.mark.parametrize(("seeds", "middle"), [(3, 1e-2), (4, 10**-2.5)])
def test_rates_of_many_seeds_are_a_line_in_a_band(seeds, middle):
    figure = rates(seeds)
    (panel,) = figure.axes
    (line,) = [line for line in panel.lines if line.get_label() == "found"]
    assert line.get_xydata() == pytest.approx(np.array([[0, 1e-6], [5, 1e-6], [10, middle]]))
    band = np.concatenate([path.vertices for path in panel.collections[0].get_paths()])
    assert set(band[band[:, 0] == 10, 1]) == {10.0**-seeds, 1e-1}
    assert [text for text, _ in legends(figure)] == ["found", "median over seeds", "least to largest"]


def test_bounds_of_losses_are_a_line_in_a_band_and_older_curves_have_none(known):
    rows = known.frame("curves")
    assert drawn(ALL["clipping_bound"], rows.drop(columns="bound")) is None
    runs = rows[rows["label"] == "hyfreedp"].query("epsilon_target == 3")
    runs = runs.assign(bound=[10.0 ** (seed % 3) for seed in runs["seed"]])
    assert runs["seed"].nunique() == 3
    (panel,) = drawn(ALL["clipping_bound"], pd.concat([runs, rows.query("label == 'dp_adam'")])).axes
    (line,) = [line for line in panel.lines if line.get_label() == "hyfreedp"]
    assert line.get_xydata() == pytest.approx(np.array([[50, 10], [100, 10]]))
    band = np.concatenate([path.vertices for path in panel.collections[0].get_paths()])
    assert set(band[:, 1]) == {1.0, 100.0}


@pytest.mark.parametrize("plot", OF_TABLES, ids=lambda plot: plot.name)
def test_two_scores_share_no_axis(plot, known):
    frame = known.frame(plot.needs)
    other = frame.assign(score="log_likelihood", workload="mixture")
    if plot.needs == "curves":
        other = other.rename(columns={"test_accuracy": "test_log_likelihood"})
    figure = drawn(plot, pd.concat([frame, other], ignore_index=True))
    if plot.name in ("average_ranks", "performance_profile"):
        assert figure is None, "two workloads are too few"
        return
    labels = {text for panel in figure.axes for text in (panel.get_xlabel(), panel.get_ylabel())}
    assert not plot.name.startswith("accuracy") or "test log-likelihood (nats)" in labels
    for panel in figure.axes:
        for group in (panel.get_shared_x_axes(), panel.get_shared_y_axes()):
            siblings = group.get_siblings(panel)
            together = {text for other in siblings for text in (other.get_xlabel(), other.get_ylabel())}
            assert not {"test accuracy (%)", "test log-likelihood (nats)"} <= together


def test_a_new_figure_needs_no_other_edit(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import matplotlib.pyplot as plt\nNEEDS = 'comparison'\ndef draw(frame, styles):\n    return plt.figure()\n"
    )
    assert [plot.name for plot in figures.plots(tmp_path)] == ["mine"]
    (tmp_path / "bad.py").write_text("NEEDS = 'records'\n")
    with pytest.raises(ConfigError, match="NEEDS"):
        figures.plots(tmp_path)
    (tmp_path / "bad.py").write_text("NEEDS = \n")
    with pytest.raises(ConfigError, match=r"bad\.py.* cannot be imported: SyntaxError"):
        figures.plots(tmp_path)
    with pytest.raises(ConfigError, match="folder"):
        figures.plots(tmp_path / "nowhere")


def test_a_legend_is_of_all_panels_in_the_suites_order():
    frame = pd.DataFrame({"workload": ["a", "b"], "epsilon_target": [1.0, 1.0]})
    figure, found = drawing.panels(frame, 2, 2)
    for axis in found.values():
        axis.plot([0, 1], label="ceiling")
        axis.plot([0, 1], label="same (set by hand)")
    found["b", 1.0].plot([0, 1], label="same_but_longer")
    found["b", 1.0].plot([0, 1], label="first")
    drawing.legend(figure, styles_of(["first", "same_but_longer", "same"]))
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["first", "same_but_longer", "same (set by hand)", "ceiling"]


@pytest.mark.parametrize(("name", "along"), [("accuracy_vs_epsilon", "y"), ("accuracy_by_method", "x")])
def test_a_failing_method_is_on_the_axis(maker, name, along):
    for label, test in {"hyfreedp": 0.1, "dp_adam": 0.90, "fiber": 0.92, "adadp": 0.93}.items():
        for epsilon in (1.0, 3.0):
            maker.add(label, 0, test, test, epsilon=epsilon)
    (axis,) = Results(maker.done(), "made").plot(name, PLOTS).axes
    low, high = getattr(axis, f"get_{along}lim")()
    assert low < 10 < 93 < high
    assert getattr(axis, f"get_{along}scale")() == "linear"


@pytest.mark.parametrize("along", ["x", "y"])
def test_ticks_are_whole_numbers_where_there_is_room(along):
    _, axis = plt.subplots()
    axis.set(xlim=(71.5, 97.5), ylim=(71.5, 97.5))
    of = getattr(axis, f"{along}axis")
    axes.whole_ticks(of, 6)
    ticks = [tick for tick in of.get_majorticklocs() if 71.5 <= tick <= 97.5]
    assert ticks == [75, 80, 85, 90, 95]
    getattr(axis, f"set_{along}lim")(90.1, 90.9)
    axes.whole_ticks(of, 5)
    assert len([tick for tick in of.get_majorticklocs() if 90.1 <= tick <= 90.9]) > 1, "too short for whole numbers"


def test_ticks_of_epsilons_that_are_near_do_not_touch():
    _, axis = plt.subplots()
    axis.plot([0.3, 20], [0, 1])
    axes.run_axis(axis, [0.31, 0.33, 1.0, 1.5, 8.0], "ε")
    shown = [text.get_text() for text in axis.get_xticklabels()]
    assert shown == ["0.31", "1", "1.5", "8", "20"]


def test_bars_end_where_a_score_ends():
    rows = pd.DataFrame({"score": "accuracy", "mean": [0.95, 0.5, 0.02], "std": [0.1, 0.1, math.nan], "seeds": 3})
    assert axes.bars(rows) == pytest.approx(np.array([[10, 10, 0], [5, 10, 0]]))
    assert not axes.bars(rows.assign(seeds=2)).any(), "the spread of two seeds shows nothing"
    assert axes.bars(rows.assign(score="log_likelihood")) == pytest.approx(np.array([[0.1, 0.1, 0]] * 2))


def test_a_figure_of_an_unfinished_suite_says_so(maker):
    for label in ("adadp", "dp_adam"):
        maker.add(label, 0, 0.5, 0.5)
    maker.add("adadp", 1, 0.5, 0.5, status="missing")
    figure = Results(maker.done(), "made").plot("accuracy_vs_epsilon", PLOTS)
    assert figure.get_suptitle().startswith("1 of 3 cells have no result")


def test_no_figure_is_of_one_point(maker):
    for seed in range(3):
        maker.add("adadp", seed, 0.5, 0.5)
        maker.add("ceiling", seed, 0.9, 0.9, epsilon=math.inf)
    known = Results(maker.done(), "made")
    for name in ("accuracy_vs_epsilon", "accuracy_by_method"):
        assert known.draw(ALL[name]) is None


def test_methods_have_one_order_in_all_panels(two):
    """And one shade for each epsilon; the ceiling is in each panel."""
    figure = two.plot("accuracy_by_method", PLOTS)
    first, second = figure.axes
    names = [text.get_text() for text in first.get_yticklabels()]
    assert sorted(names) == ["DP-Adam", "HyFreeDP", "early", "late", "swept"]
    assert [text.get_text() for text in second.get_yticklabels()] == [""] * 5
    for axis, place in ((first, "mnist_mlp"), (second, "digits_mlp")):
        rows = two.comparison[(two.comparison["workload"] == place) & (two.comparison["epsilon_target"] == 3)]
        means = dict(zip(rows["label"].map(two.names), 100 * rows["mean"], strict=True))
        at = {names[int(y + 0.3)]: x for held in axis.containers if held.get_label().endswith("target ε = 3")
              for x, y in held.lines[0].get_xydata()}  # fmt: skip
        assert at == pytest.approx(means)
        assert [line.get_xdata()[0] for line in axis.lines if line.get_label() == "best without privacy"] == [99]


def test_ceilings_are_dashed_lines_in_each_panel_of_draws(known):
    figure = known.plot("accuracy_over_draws", PLOTS)
    titles = [" ".join(axis.get_title().split()) for axis in figure.axes]
    assert titles == ["digits MLP, target ε = 1", "digits MLP, target ε = 3"]
    for axis in figure.axes:
        (line,) = [line for line in axis.lines if line.get_label() == "ceiling (ε = ∞)"]
        assert line.get_ydata() == pytest.approx([98, 98])
        assert line.get_linestyle() == "--"


def test_figures_that_have_nothing_to_show_do_not_keep_others_from_being_drawn(matrix, capsys, tmp_path, monkeypatch):
    """Without privacy nothing was spent, and constant learning rates have nothing to be compared with."""
    monkeypatch.chdir(tmp_path)
    known = Results(matrix, "made", {"epsilon": [math.inf]})
    for name in ("accuracy_vs_epsilon", "learning_rate"):
        assert known.draw(ALL[name]) is None
        with pytest.raises(ConfigError, match="nothing finished that it could show"):
            known.plot(name, PLOTS)
    assert main(["plot", "suite=made", f"results={matrix.root}", "epsilon=inf"]) == 0
    printed = capsys.readouterr().out
    assert "accuracy_over_draws.svg" in printed
    assert "learning_rate" not in printed
    for name, reason in (("learning_rate", "nothing finished that it could show"), ("audit", "`dpopt audit` draws it")):
        assert main(["plot", "suite=made", f"results={matrix.root}", "epsilon=inf", f"figure={name}"]) == 2
        assert reason in capsys.readouterr().err


def test_workloads_are_named_by_what_tells_them_apart():
    image = {"name": "images", "architecture": "vit_tiny_patch16_224.augreg_in21k", "subset": "head", "size": None}
    specs = [
        {**image, "data": "cifar10"},
        {**image, "data": "cifar10", "size": 64},
        {**image, "data": "cifar100_subset"},
        {"name": "sst2_minilm", "data": "sst2", "encoder": "minilm", "subset": "lora"},
        {"name": "digits_mlp", "hidden": 64},
        {"name": "my_own"},
    ]
    names = ["ViT-Ti head, CIFAR-10", "ViT-Ti head, CIFAR-10, size 64", "ViT-Ti head, CIFAR-100 subset"]
    assert readable_names(specs) == [*names, "MiniLM LoRA, SST-2", "digits MLP", "my own"]
    again = {**image, "data": "cifar10", "name": "mine"}
    assert len(set(readable_names([*specs, again]))) == 7


def test_ticks_of_a_narrow_panel_do_not_touch():
    """Drawn, no two numbers overlap, however many and however long."""
    with drawing.on_page(5.5):
        figure, panels, _ = drawing.subplots(1, 4, 3, 3)
        for panel in panels[0]:
            panel.plot([0.5, 2000], [0, 1])
            axes.run_axis(panel, [0.5, 2, 8, 128, 512, 1024, 2048], "ε")
        figure.draw_without_rendering()
    for panel in panels[0]:
        boxes = [text.get_window_extent() for text in panel.get_xticklabels()]
        assert len(boxes) > 2
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))


def test_long_names_leave_room_for_what_is_drawn(maker):
    for label in ("dp_adam", f"a_very_{10 * 'long_'}name"):
        for seed in range(3):
            maker.add(label, seed, 0.5, 0.5 + 0.1 * seed)
    figure = Results(maker.done(), "made").plot("accuracy_by_method", PLOTS)
    figure.draw_without_rendering()
    (panel,) = figure.axes
    assert panel.get_window_extent().width / figure.dpi > 2, "inches"
