"""The installed package does what the documentation says, in an empty folder."""

import pytest
from installed import Installed

SMALL = ("suite=quickstart", "optimizers=[adadp]", "epsilon=8", "seeds=0")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def empty(tmp_path):
    return tmp_path


def test_nothing_of_it_is_the_source_tree(installed, empty):
    where = installed.execute("-c", "import dpopt; print(dpopt.__file__)", where=empty)
    assert "site-packages" in where
    assert installed.run("--version", where=empty).startswith("dpopt ")


@pytest.mark.slow
def test_a_shipped_suite_is_listed_trained_and_shown(installed, empty):
    listed = installed.run("list", where=empty)
    assert "quickstart" in listed
    assert "prodigy" in listed
    installed.run("run", *SMALL, where=empty)
    assert "adadp" in installed.run("table", "suite=quickstart", where=empty)
    installed.run("plot", "suite=quickstart", where=empty)
    assert (empty / "plots/out/quickstart/accuracy_vs_epsilon.svg").stat().st_size > 5000
    installed.run("report", "suite=quickstart", where=empty)
    page = (empty / "results/suites/quickstart/report.html").read_text()
    assert "<svg" in page
    assert "accuracy_vs_epsilon" in page


@pytest.mark.parametrize(
    ("suite", "extra"), [("whole_field", "parameter-free"), ("e2e_gpt2_random", "text"), ("sst2_lora", "text")]
)
def test_a_suite_that_needs_an_extra_says_so_before_any_work(installed, empty, suite, extra):
    printed = installed.run("run", f"suite={suite}", where=empty, code=2)
    assert f"pip install 'dpopt[{extra}]'" in " ".join(printed.split())


def test_a_suite_of_ones_own_may_begin_with_one_that_comes_with_dpopt(installed, empty):
    (empty / "benchmarks").mkdir()
    (empty / "benchmarks/mine.yaml").write_text("defaults: [quickstart, _self_]\nseeds: 0\nepsilon: 3\n")
    printed = installed.run("plan", "suite=mine", "optimizers=[adadp]", where=empty)
    assert "1 distinct cells of suite mine" in " ".join(printed.split())


def test_one_more_figure_stands_beside_those_that_come_with_dpopt(installed, empty):
    (empty / "plots").mkdir()
    (empty / "plots/mine.py").write_text("NEEDS = 'comparison'\ndraw = print\n")
    listed = installed.execute("-c", LIST, where=empty)
    assert "mine" in listed
    assert "accuracy_vs_epsilon" in listed


LIST = """
from pathlib import Path
from dpopt.results import figures

print([plot.name for plot in figures.plots(Path("plots"))])
"""
