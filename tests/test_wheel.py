"""The installed package does what the documentation says, in an empty folder."""

import pytest
from installed import Installed

SMALL = ("suite=quickstart", "optimizers=[adadp]", "epsilon=8", "seeds=0")
FIGURES = """
from pathlib import Path
import dpopt
from dpopt.results import figures

print(dpopt.__file__, [plot.name for plot in figures.plots(Path("plots"))])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_nothing_of_it_is_the_source_tree_and_one_more_figure_stands_beside_its_own(installed, tmp_path):
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots/mine.py").write_text("NEEDS = 'comparison'\ndraw = print\n")
    where = installed.execute("-c", FIGURES, where=tmp_path)
    assert all(part in where for part in ("site-packages", "'mine'", "'accuracy_vs_epsilon'"))


@pytest.mark.slow
def test_a_shipped_suite_is_listed_trained_and_shown(installed, tmp_path):
    listed = installed.run("list", where=tmp_path)
    assert "quickstart" in listed
    assert "prodigy" in listed
    installed.run("run", *SMALL, where=tmp_path)
    assert "adadp" in installed.run("table", "suite=quickstart", where=tmp_path)
    installed.run("plot", "suite=quickstart", where=tmp_path)
    assert (tmp_path / "plots/out/quickstart/accuracy_vs_epsilon.svg").stat().st_size > 5000
    installed.run("report", "suite=quickstart", where=tmp_path)
    page = (tmp_path / "results/suites/quickstart/report.html").read_text()
    assert "<svg" in page
    assert "accuracy_vs_epsilon" in page


@pytest.mark.parametrize(
    ("suite", "extra"),
    [
        ("whole_field", "parameter-free"),
        pytest.param("e2e_gpt2_random", "text", marks=pytest.mark.slow),
        pytest.param("sst2_lora", "text", marks=pytest.mark.slow),
    ],
)
def test_a_suite_that_needs_an_extra_says_so_before_any_work(installed, tmp_path, suite, extra):
    printed = installed.run("run", f"suite={suite}", where=tmp_path, code=2)
    assert f"pip install 'dpopt[{extra}]'" in " ".join(printed.split())


def test_a_suite_of_ones_own_may_begin_with_one_that_comes_with_dpopt(installed, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/mine.yaml").write_text("defaults: [quickstart, _self_]\nseeds: 0\nepsilon: 3\n")
    printed = installed.run("plan", "suite=mine", "optimizers=[adadp]", where=tmp_path)
    assert "1 distinct cells of suite mine" in " ".join(printed.split())
