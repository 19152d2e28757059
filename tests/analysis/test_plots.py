import math
from pathlib import Path

import pandas as pd
import pytest

from dpopt.analysis import figures, frames, ranking, tables
from dpopt.errors import ConfigError

PLOTS = Path(__file__).parents[2] / "plots"
OF_SUITES = [plot for plot in figures.plots(PLOTS) if plot.needs in ("comparison", "selected", "curves", "ranking")]


@pytest.fixture
def needs(matrix):
    cells = frames.load(matrix, "made").cells
    selected = frames.select(cells)
    return {
        "ranking": ranking.ranking(matrix, cells),
        "selected": selected,
        "comparison": tables.comparison(matrix, selected),
        "curves": frames.curves(matrix, selected),
    }


@pytest.mark.parametrize("plot", OF_SUITES, ids=lambda plot: plot.name)
def test_every_figure_draws_what_is_stored(plot, needs, tmp_path):
    figure = plot.draw(needs[plot.needs])
    legends = [held for panel in figure.axes if (held := panel.get_legend())] + figure.legends
    named = {text.get_text() for held in legends for text in held.get_texts()}
    named |= {text.get_text() for panel in figure.axes for text in panel.get_yticklabels()}
    assert any("hyfreedp" in text for text in named)
    assert any("dp_adam" in text for text in named)
    assert all(panel.get_xlabel() for panel in figure.axes)
    for path in figures.save(figure, tmp_path, plot.name):
        assert path.stat().st_size > 5000


def test_accuracy_figure_plots_the_tables_numbers(needs):
    plot = next(plot for plot in figures.plots(PLOTS) if plot.name == "accuracy_vs_epsilon")
    panel = plot.draw(needs["comparison"]).axes[0]
    lines = {container.get_label(): container.lines[0].get_xydata().tolist() for container in panel.containers}
    rows = needs["comparison"].query("label == 'hyfreedp'").sort_values("epsilon_target")
    assert lines["hyfreedp"] == pytest.approx(rows[["epsilon_single", "mean"]].to_numpy() * [1, 100])
    crosses = {x for line in panel.lines if line.get_marker() == "x" for x in line.get_xdata()}
    assert crosses == set(needs["comparison"].query("label == 'dp_adam'")["epsilon_with_tuning"])


def test_a_learning_rate_that_is_lost_does_not_hide_the_others(needs):
    plot = next(plot for plot in figures.plots(PLOTS) if plot.name == "learning_rate")
    curves = needs["curves"].copy()
    curves.loc[curves["label"] == "hyfreedp", "eta"] = 1e-300
    panel = plot.draw(curves).axes[0]
    drawn = {line.get_label(): min(line.get_ydata()) for line in panel.lines}
    assert drawn["hyfreedp"] == 1e-12
    assert drawn["dp_adam"] == curves.query("label == 'dp_adam'")["eta"].min()
    assert panel.get_ylabel() == "learning rate (at least 1e-12)"


@pytest.mark.parametrize("plot", OF_SUITES, ids=lambda plot: plot.name)
def test_figures_of_another_score_are_in_its_unit(plot, needs):
    frame = needs[plot.needs].assign(score="log_likelihood", workload="mixture")
    if plot.needs == "curves":
        frame = frame.rename(columns={"test_accuracy": "test_log_likelihood"})
    labels = {text for panel in plot.draw(frame).axes for text in (panel.get_xlabel(), panel.get_ylabel())}
    assert not any("accuracy" in text or "%" in text for text in labels)
    if plot.name.startswith("accuracy"):
        assert "test log-likelihood (nats)" in labels


@pytest.mark.parametrize("plot", OF_SUITES, ids=lambda plot: plot.name)
def test_two_scores_share_no_axis(plot, needs):
    frame = needs[plot.needs]
    other = frame.assign(score="log_likelihood", workload="mixture")
    if plot.needs == "curves":
        other = other.rename(columns={"test_accuracy": "test_log_likelihood"})
    figure = plot.draw(pd.concat([frame, other], ignore_index=True))
    for panel in figure.axes:
        for group in (panel.get_shared_x_axes(), panel.get_shared_y_axes()):
            together = {
                text for other in group.get_siblings(panel) for text in (other.get_xlabel(), other.get_ylabel())
            }
            assert not {"test accuracy (%)", "test log-likelihood (nats)"} <= together


def test_a_new_figure_needs_no_other_edit(tmp_path, needs):
    (tmp_path / "mine.py").write_text(
        "import matplotlib.pyplot as plt\nNEEDS = 'selected'\ndef draw(frame):\n    return plt.figure()\n"
    )
    assert [plot.name for plot in figures.plots(tmp_path)] == ["mine"]
    (tmp_path / "bad.py").write_text("NEEDS = 'records'\n")
    with pytest.raises(ConfigError, match="NEEDS"):
        figures.plots(tmp_path)
    with pytest.raises(ConfigError, match="folder"):
        figures.plots(tmp_path / "nowhere")


def test_panels_are_blank_where_there_is_nothing():
    frame = pd.DataFrame({"workload": ["a", "a", "b"], "epsilon_target": [1.0, math.inf, 1.0]})
    figure, axes = figures.panels(frame, 2, 2)
    assert set(axes) == {("a", 1.0), ("a", math.inf), ("b", 1.0)}
    assert [axis.get_title() for axis in figure.axes] == ["a, ε = 1", "a, ε = ∞", "b, ε = 1", "b, ε = ∞"]
    assert [axis.axison for axis in figure.axes] == [True, True, True, False]


def test_a_label_of_several_panels_is_in_the_legend_once():
    frame = pd.DataFrame({"workload": ["a", "b"], "epsilon_target": [1.0, 1.0]})
    figure, axes = figures.panels(frame, 2, 2)
    for axis in axes.values():
        axis.plot([0, 1], label="same")
    axes["b", 1.0].plot([0, 1], label="other")
    figures.legend(figure)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["same", "other"]
