import subprocess
import sys
from pathlib import Path

import pytest

from dpopt.privacy import Draw, Ledger, epsilon
from dpopt.results import accounting, figures

FIGURE = Path(__file__).parents[2] / "plots" / "fig_hyfreedp_accounting.py"
TABLE = {1.0: (1.6177, 5.862, 1.030), 3.0: (0.9321, 1.704, 4.917), 8.0: (0.6440, 0.910, 17.65)}
"""Target -> noise of the gradient and of a loss by the independent rule at K = 5, and what a run with them spends."""


@pytest.fixture(scope="module")
def frame():
    return accounting.frame(probe_every=[5], epsilon=list(TABLE))


def chosen(frame, **values):
    for name, value in values.items():
        frame = frame[frame[name] == value]
    return frame


@pytest.mark.parametrize("claimed", TABLE)
def test_true_epsilon_is_the_tables(claimed):
    gradient, losses, truth = TABLE[claimed]
    assert epsilon(accounting.ledger(gradient, losses, 5, "same"), accounting.DELTA, "rdp") == pytest.approx(
        truth, rel=0.01
    )


@pytest.mark.parametrize("claimed", TABLE)
def test_the_frame_is_the_table(frame, claimed):
    """At 8 a change of the noise by 1 % moves the truth by 2 %: the table's Renyi orders are not ours."""
    gradient, losses, truth = TABLE[claimed]
    (row,) = chosen(frame, rule="independent", batch="same", epsilon_claimed=claimed).to_dict("records")
    assert row["epsilon_true"] == pytest.approx(truth, rel=0.01 if claimed < 8 else 0.025)
    assert row["noise_gradient"] == pytest.approx(gradient, rel=1e-3)
    assert row["noise_losses"] == pytest.approx(losses, rel=0.015)


def test_the_independent_rule_says_too_little_and_the_additive_one_does_not(frame):
    independent, additive = (chosen(frame, rule=rule) for rule in ("independent", "additive"))
    assert (independent["epsilon_true"] > independent["epsilon_claimed"]).all()
    assert (additive["epsilon_true"] < additive["epsilon_claimed"]).all()


def test_a_fresh_draw_costs_less_than_the_gradients_own(frame):
    wide = frame.pivot_table(index=["rule", "epsilon_claimed"], columns="batch", values="epsilon_true")
    assert (wide["fresh"] < wide["same"]).all()
    assert len(frame) == 2 * 2 * 3


@pytest.mark.parametrize(("batch", "draws", "distinct"), [("same", 250, 2), ("fresh", 300, 2)])
def test_ledgers(batch, draws, distinct):
    ledger = accounting.ledger(1.0, 2.0, 5, batch)
    assert len(ledger) == draws
    assert len(ledger.counts()) == distinct
    assert ledger.counts()[Draw(0.02, (1.0, 2.0, 2.0, 2.0) if batch == "same" else (2.0, 2.0, 2.0))] == 50
    always = Ledger()
    always.append(Draw(0.02, (1.0, 2.0, 2.0, 2.0)), 250)
    assert accounting.ledger(1.0, 2.0, 1, "same") == always


def test_the_figure_shows_the_frame(frame, tmp_path):
    figure = figures._load(FIGURE).figure(frame)
    panels = {axis.get_title(): axis for axis in figure.axes}
    assert len(panels) == 4
    (panel,) = (axis for title, axis in panels.items() if "independent" in title and "gradient's" in title)
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
    rows = chosen(frame, rule="independent", batch="same")
    assert lines["K = 5"] == rows[["epsilon_claimed", "epsilon_true"]].to_numpy().tolist()
    assert all(x == y for x, y in lines["true = claimed"])
    for path in figures.save(figure, tmp_path, "accounting"):
        assert path.stat().st_size > 5000


def test_the_module_imports_no_torch():
    code = "import sys; import dpopt.results.accounting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
