"""What a notebook shows: names on Tab, results as tables, each figure once."""

from html import escape

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from small_suites import QUICK

import dpopt
from dpopt.results.writing import Table
from dpopt.training.saved import FitResult


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A suite of two cells."""
    root = tmp_path_factory.mktemp("notebook")
    (root / "two.yaml").write_text(QUICK + "optimizers: [dp_sgd]\nsettings: {dp_sgd: {tuning: fixed}}\nseeds: [0, 1]\n")
    dpopt.run_suite(dpopt.load_suite(root / "two.yaml"), root / "results", progress=False)
    return dpopt.load_results(root / "results", "two")


def test_tab_offers_the_interface_and_nothing_else():
    assert dir(dpopt) == sorted(dpopt.__all__)
    assert all(hasattr(dpopt, name) for name in dir(dpopt))


def test_results_are_the_table_that_the_command_prints(results):
    shown = results._repr_html_()
    assert "Results of suite two: 2 done" in shown
    frame = results.show().frame
    assert shown.count("<tr") == 2 + len(frame) == 3, "names of columns, the heading of rows for reference, the rows"
    assert all(f"<th>{escape(name)}</th>" in shown for name in frame)


def test_a_label_is_no_markup():
    shown = Table(pd.DataFrame({"<a>": ["<script>", "b"]}), bold={(0, "<a>")}, note="<i>")._repr_html_()
    assert "<b>&lt;script&gt;</b>" in shown
    assert "<script>" not in shown
    assert "&lt;a&gt;" in shown
    assert "&lt;i&gt;" in shown


def test_a_figure_is_shown_once(results):
    before = plt.get_fignums()
    figure = results.plot("accuracy_over_draws")
    assert plt.get_fignums() == before, "pyplot's backend for notebooks shows each that is left open"
    figure.savefig("/dev/null", format="svg")


def test_a_result_shows_its_statement():
    x = torch.randn(40, 3)
    y = (x[:, 0] > 0).long()
    result = dpopt.fit(
        *(torch.nn.Linear(3, 2), lambda out, y: torch.nn.functional.cross_entropy(out, y, reduction="none"), (x, y)),
        **{"optimizer": "dp_sgd", "epsilon": 3.0, "delta": 1e-2, "accountant": "rdp"},
        **{"epochs": 1, "batch_size": 20, "progress": False},
    )
    assert "FitResult(status=&#x27;done&#x27;" in result._repr_html_()
    statement = result.statement()
    assert statement._repr_html_() in result._repr_html_()
    assert f"epsilon = {result.record['epsilon']:.3g}"[:14] in statement._repr_html_()
    unruly = FitResult(result.model, result.record | {"optimizer": "<img src=x>"}, result.ledger, result.curve)
    assert "<img" not in unruly._repr_html_()
