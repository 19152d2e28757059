"""A figure and a table for a paper, of three data sets with a method of one's own, by commands alone."""

import re
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest

import dpopt
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.markup import MARKED, TERMINAL
from dpopt.results import layout, ranking, tables
from dpopt.results.leaderboard import Leaderboard
from dpopt.results.naming import display_names
from dpopt.results.writing import Table

WORKLOADS = {
    "digits_mlp": "digits MLP",
    "synthetic_logreg": "synthetic logistic regression",
    "mnist_scatter": "MNIST scattering",
}
SUITE = """
defaults: [suite, _self_]
optimizers: [sign_descent, dp_adam, hyfreedp_noise_aware, by_hand]
settings:
  sign_descent: {name: dp_sgd, display: Sign & descent}
  by_hand: {name: dp_sgd, display: DP-SGD}
"""
PLOTS = Path(__file__).parents[2] / "plots"


@pytest.fixture
def paper(maker, tmp_path, monkeypatch):
    """The results of three data sets at two epsilons; the suite's file was written after they were made."""
    for at, workload in enumerate(WORKLOADS):
        for epsilon in (1.0, 3.0):
            for seed in range(3):
                of = {"epsilon": epsilon, "workload": workload}
                maker.add("sign_descent", seed, 0.5, 0.7 + 0.01 * seed + 0.02 * at, **of)
                maker.add("dp_adam", seed, 0.5, 0.6 + 0.01 * seed, **of)
                maker.add("hyfreedp_noise_aware", seed, 0.5, 0.5 + 0.01 * seed, **of)
                maker.add("by_hand", seed, 0.5, 0.9, tuned={"lr": 0.1}, tuning="fixed", **of)
    monkeypatch.chdir(tmp_path)
    Path("benchmarks").mkdir()
    Path("benchmarks/made.yaml").write_text(SUITE)
    return maker.done()


@pytest.fixture
def results(paper):
    return dpopt.load_results(paper.root, "made")


def test_latex_of_three_data_sets(paper, capsys):
    assert main(["table", "suite=made", f"results={paper.root}", "layout=wide", "format=latex"]) == 0
    text = capsys.readouterr().out
    groups = re.findall(r"\\multicolumn\{2\}\{c\}\{([^}]*)\}", text)
    assert groups == list(WORKLOADS.values()), "in the order of the suite"
    assert r"\label{tab:made}" in text
    assert re.findall(r"\\cmidrule\(lr\)\{(\d)-(\d)\}", text) == [("2", "3"), ("4", "5"), ("6", "7")]
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0]
    rows = [line.removesuffix(r" \\").split(" & ") for line in body.splitlines() if " & " in line]
    assert [row[0] for row in rows] == [r"Sign \& descent", "DP-Adam", "HyFreeDP, noise-aware", "DP-SGD"]
    assert {len(row) for row in rows} == {7}
    assert [cell.removeprefix(r"\textbf{").removesuffix("}") for cell in rows[0][1:]] == [
        *2 * [r"71.0 $\pm$ 1.0"], *2 * [r"73.0 $\pm$ 1.0"], *2 * [r"75.0 $\pm$ 1.0"]
    ]  # fmt: skip
    assert r"\multicolumn{7}{l}{\textit{for reference}} \\" in body.splitlines()[-2]
    caption = re.search(r"\\caption\{(.*)\}\n", text)[1]
    assert caption.startswith("Test accuracy (")
    assert len(caption.split()) <= 40
    csv = layout_of(paper, "csv", capsys)
    assert "sign_descent" in csv, "code reads labels"
    assert "| Sign & descent  " in layout_of(paper, "markdown", capsys)


def layout_of(paper, kind, capsys):
    assert main(["table", "suite=made", f"results={paper.root}", "layout=wide", f"format={kind}"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["table", "table layout=wide", "rank", "leaderboard", "rank against=dp_adam"])
def test_no_row_breaks_in_a_terminal_of_eighty_columns(paper, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name, *options = command.split()
    assert main([name, "suite=made", f"results={paper.root}", *options]) == 0
    printed = capsys.readouterr().out.partition("written to")[0]
    assert max(map(len, printed.splitlines())) <= 80
    for method in ("Sign & descent", "HyFreeDP, noise-aware"):
        assert method in printed


def test_columns_go_by_priority_and_rows_stay_whole():
    frame = pd.DataFrame(
        {"workload": ["a b", "c"], "method": ["one", "two"], "score": ["1.0", "2.0"], "runs": ["3", "4"]}
    )
    table = Table(frame, "title", optional=["runs"], by="workload", rules={1: "for reference"})
    assert layout.lines(table, 40)[2:] == [
        "workload  method  score  runs",
        "a b       one     1.0    3",
        "for reference:",
        "c         two     2.0    4",
    ]
    assert layout.lines(table, 19)[2:] == [
        "method  score  runs",
        "",
        "a b",
        "one     1.0    3",
        "",
        "c",
        "for reference:",
        "two     2.0    4",
    ]
    assert layout.lines(table, 13)[2] == "method  score"
    three = Table(pd.DataFrame({"method": ["one"], "a": ["1"], "b": ["22"]}))
    assert layout.lines(three, 9) == ["", "method  a", "one     1", "", "method  b", "one     22"]


def test_a_pdf_as_wide_as_a_page(paper):
    here = ["plot", "suite=made", f"results={paper.root}", f"plots={PLOTS}"]
    with pytest.raises(ConfigError, match="inches"):
        dpopt.load_results(paper.root, "made").plot("accuracy_vs_epsilon", PLOTS, width=0.5)
    assert main([*here[:3], "figure=accuracy_vs_epsilon", "width=5.5", "format=pdf"]) == 0
    (file,) = Path("plots/out/made").iterdir()
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+) ?\]", file.read_bytes())
    assert float(box[1]) == pytest.approx(5.5 * 72)


def test_texts_of_a_narrow_figure_do_not_meet(results):
    figure = results.plot("accuracy_vs_epsilon", PLOTS, width=5.5, names={"dp_adam": "Adam of 2016"})
    figure.draw_without_rendering()
    titles = [axis.title for axis in figure.axes]
    (legend,) = figure.legends
    boxes = [artist.get_window_extent() for artist in (*titles, *figure.axes, legend)]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    page = figure.bbox
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1 for box in boxes)
    assert {text.get_text() for text in legend.get_texts()} >= {"Adam of 2016", "Sign & descent"}
    assert min(text.get_fontsize() for text in (*titles, *legend.get_texts())) >= 6


def test_notes_are_short_and_name_the_page(results):
    shown = [results.show(), results.show("wide"), results.ranks()[0]]
    shown += [ranking.against_table(results.against("dp_adam"), "dp_adam")]
    shown += Leaderboard([results]).tables("dp_adam")[:-1]
    for table in shown:
        assert len(table.note.split()) <= 40
        assert not table.note or table.note.endswith(tables.PAGE)


def test_names_of_rows():
    rows = {
        "dp_adam": "dp_adam",
        "dp_adam_free": "dp_adam",
        "noise_aware_1e-2": "hyfreedp_noise_aware",
        "mine": "dp_sgd",
    }
    rows |= {"also": "dp_sgd", "dp_sgd (accountant=rdp)": "dp_sgd", "adadp_baseline": "dp_sgd", "fiber": "torch_optim"}
    assert display_names(rows, {"also": "DP-Adam"}) == {
        "dp_adam": "DP-Adam (dp_adam)",
        "dp_adam_free": "DP-Adam, free",
        "noise_aware_1e-2": "HyFreeDP, noise-aware, 1e-2",
        "mine": "mine",
        "adadp_baseline": "adadp_baseline",
        "fiber": "fiber",
        "also": "DP-Adam (also)",
        "dp_sgd (accountant=rdp)": "DP-SGD (accountant=rdp)",
    }


def test_two_rows_do_not_have_one_name(results):
    with pytest.raises(ConfigError, match="two rows or workloads"):
        results.show("wide", names={"dp_adam": "Sign & descent"})
    assert "Adam of 2016" in results.show("wide", names={"dp_adam": "Adam of 2016"}).latex


def test_a_row_that_spends_more_once_stays_above_and_seeds_are_named(maker):
    """Its other cell is bold; only rows that spend more everywhere are for reference."""
    for epsilon, lrs in ((1.0, (0.1, 0.2)), (3.0, (0.1,))):
        for seed in range(3):
            for lr in lrs:
                maker.add("dp_adam", seed, lr, 0.9 + 0.01 * seed, epsilon=epsilon, tuned={"lr": lr}, tuning="grid")
            maker.add("adadp", seed, 0.5, 0.5 + 0.02 * seed, epsilon=epsilon)
            maker.add("hyfreedp", seed, 0.5, 0.4 + 0.02 * seed, epsilon=epsilon)
    maker.add("fiber", 0, 0.5, 0.95, epsilon=3.0)
    table = dpopt.load_results(maker.done().root, "made").show("wide")
    assert table.rules == {}
    assert {table.frame["method"][at] for at, _ in table.bold} == {"ADADP", "DP-Adam"}
    assert "FiBeR" not in {table.frame["method"][at] for at, _ in table.bold}, "one seed is not compared with three"
    assert "over 1 to 3 seeds" in table.title


def test_what_is_published_does_not_depend_on_where_one_stands(paper, tmp_path, monkeypatch):
    """Names are stored with it: another suite of that name in the current folder changes nothing."""
    plots = tmp_path / "none"
    plots.mkdir()
    assert main(["publish", "suite=made", f"results={paper.root}", "to=published", f"plots={plots}"]) == 0
    text = Path("published/made/table.md").read_text()
    assert "Sign & descent" in text
    Path("benchmarks/made.yaml").write_text(SUITE.replace("Sign &", "Another"))
    assert dpopt.load_results("published", "made").show().markdown + "\n" == text
    published = Path("published").resolve()
    monkeypatch.chdir(plots)
    assert dpopt.load_results(published, "made").show().markdown + "\n" == text
    assert "Another descent" not in text


def test_a_display_name_is_no_part_of_a_cell():
    plain, named = (
        dpopt.load_suite({"name": "small", "optimizers": ["adadp"], "settings": {"adadp": more}})
        for more in ({}, {"display": "Mine"})
    )
    assert [cell.run_id for cell in plain.cells()] == [cell.run_id for cell in named.cells()]


def test_a_table_without_rows_is_latex_too():
    assert r"no finished rows \\" in Table(pd.DataFrame({"no finished rows": []}), "made").latex


def test_a_wide_table_tells_what_is_missing_from_what_the_suite_does_not_have(maker):
    for seed in range(3):
        maker.add("adadp", seed, 0.5, 0.5 + 0.01 * seed)
        maker.add("adadp", seed, 0.5, 0.5, workload="mnist_mlp")
        maker.add("fiber", seed, 0.5, 0.4, status="done" if seed else "missing")
        maker.add("prodigy", seed, 0.5, 0.4, status="missing")
    table = dpopt.load_results(maker.done().root, "made").show("wide")
    cells = table.frame.set_index("method")
    assert cells.loc["ADADP"].tolist() == ["51.0 ± 1.0", "50.0 ± 0.0"]
    assert cells.loc["FiBeR"].tolist() == ["40.0 ± 0.0 (2 seeds)", "–"]
    assert cells.loc["Prodigy"].tolist() == ["no result", "–"]
    assert r"\begin{tabular}{lrr}" in table.latex, "numbers stand below each other all the same"
    assert "4 of 12 cells have no result" in table.latex
    assert "(2 seeds)" in table.markdown


def test_asterisks_mark_cells_alone_and_titles_of_a_terminal_are_bold():
    table = Table(pd.DataFrame({"a": ["1", "2"]}), "title", by="a", rules={1: "for reference"}, bold={(0, "a")})
    assert layout.lines(table, 40, MARKED) == ["title", "", "a", "**1**", "for reference:", "2"]
    assert layout.lines(table, 40, TERMINAL)[0] == "\x1b[1mtitle\x1b[0m"
