import io
import math
import subprocess
import sys

import pandas as pd
import pytest
import scipy.stats

from dpopt import registry
from dpopt.cli import main
from dpopt.markup import MARKDOWN
from dpopt.results import choosing, frames, tables
from dpopt.results.report.sheet import sheet


@pytest.fixture
def table(matrix):
    return tables.comparison(matrix, choosing.select(frames.load(matrix, "made").cells))


def made(maker):
    store = maker.done()
    return tables.comparison(store, choosing.select(frames.load(store, "made").cells))


def test_comparison(table):
    assert list(table["label"]) == ["hyfreedp", "dp_adam", "hyfreedp", "dp_adam", "ceiling"], "references last"
    first = table.iloc[1]
    assert first[["mean", "std", "seeds", "runs"]].tolist() == pytest.approx([0.6, 0.1, 3, 2])
    assert first["epsilon_with_tuning"] > first["epsilon_single"]
    assert table["is_reference"].tolist() == [False, True, False, True, True]
    assert not table["is_best"].any(), "a search that is not paid for is no rival; who has none is not bold"
    ceiling = table.iloc[-1]
    assert ceiling["epsilon_single"] == ceiling["epsilon_with_tuning"] == math.inf


def test_formats_hold_the_same_numbers(table):
    made = tables.as_table(table.assign(is_highest=~table["is_reference"]), "made")
    markdown, latex, html = made.markdown, made.latex, sheet("made", [made])
    assert "*60.0 ± 10.0*" in markdown
    assert "**70.0 ± 0.0**" in markdown
    assert r"\textit{60.0 $\pm$ 10.0}" in latex
    assert r"\textbf{70.0 $\pm$ 0.0}" in latex
    assert r"dp\_adam" in latex
    assert "accuracy (%)" not in latex
    assert html.count('class="strong"') == html.count('class="number strong"') == 2
    assert html.count('class="reference"') == html.count('class="number reference"') == 2
    assert markdown.count("*for reference:*") == html.count('<tr class="heading">') == 2
    assert latex.count(r"\textit{for reference}") == made._repr_html_().count("<i>for reference:</i>") == 2
    assert markdown.index("*for reference:*") < markdown.index("*60.0 ± 10.0*"), "above the rows"
    assert "://" not in html
    for text in (markdown, html):
        assert "ε with tuning: of the whole search" in text
        assert "docs/guide/tables.md" in text
    assert r"made: digits\_mlp, B = 128" in latex
    read = pd.read_csv(io.StringIO(made.csv))
    assert read["mean"].tolist() == pytest.approx(table["mean"].tolist())


def test_two_scores_stand_in_columns_of_their_own(table):
    table = table.assign(is_highest=~table["is_reference"])
    other = table.assign(workload="mixture", score="log_likelihood", mean=-table["mean"], note="")
    both = pd.concat([table, other], ignore_index=True)
    shown = tables.as_table(both, "made").styled(MARKDOWN)
    own = shown["workload"] == "mixture"
    assert set(shown.loc[own, "accuracy (%)"]) == set(shown.loc[~own, "log-likelihood (nats)"]) == {""}
    assert shown.loc[own, "log-likelihood (nats)"].tolist()[:2] == ["**-0.400 ± 0.000**", "*-0.600 ± 0.100*"]


def test_a_row_that_spends_its_target_but_for_rounding_is_compared(maker):
    maker.add("adadp", 0, 0.5, 0.7)
    cells = choosing.select(frames.load(store := maker.done(), "made").cells)
    for target, is_reference in ((1.0, False), (1 - 1e-5, True)):
        table = tables.comparison(store, cells.assign(epsilon_target=target * cells["epsilon"]))
        assert table["is_reference"].tolist() == [is_reference]


def test_nothing_printed_is_below_what_is_spent(table):
    for value in (0.99999, 1.0, 2.541, 7.8401, 21.7004, 123.4, 1e-3):
        assert value * (1 - 1e-9) <= float(tables.upper(value)) <= value * 1.011
    assert (tables.upper(0.0), tables.upper(math.inf)) == ("0", "∞")

    for delta, printed in ((1e-5, "1.0e-05"), (6.1038e-6, "6.2e-06"), (9.97e-6, "1.0e-05")):
        assert f"δ = {printed}" in tables.as_table(table.assign(delta=delta), "made").title


def test_epsilons_of_a_column_have_one_number_of_decimals_and_are_never_below_what_was_spent():
    values = [0.3951, 1.17511, 2.0, 18.30001, math.inf]
    text = tables.uppers([*values, math.nan])
    assert [*map(text, values)] == ["0.396", "1.176", "2.000", "18.301", "∞"]
    assert [*map(tables.uppers([1.0, 2.99951, 8.0, 1914.2]), (1.0, 2.99951, 8.0, 1914.2))] == ["1", "3", "8", "1920"]
    assert tables.uppers([2e-5, 3.0])(2e-5) == tables.upper(2e-5), "many decimals would hide what is small"
    assert tables.uppers([0.0, 0.3951])(0.0) == "0.000", "zero is not small"


def test_the_limit_names_all_numbers_of_seeds():
    blocks = pd.DataFrame({"seeds": [3, 2], "visible": [0.02, 0.1], "score": "accuracy"})
    assert tables.limit(blocks).startswith("With 2 to 3 seeds, a difference below about 2.0 to 10.0 points")


def test_one_seed_has_no_spread_and_nothing_is_an_empty_table(maker):
    maker.add("adadp", 0, 0.5, 0.5)
    store = maker.done()
    selected = choosing.select(frames.load(store, "made").cells)
    text = tables.as_table(tables.comparison(store, selected), "made").markdown
    assert " 50.0 " in text
    assert "**" not in text
    assert "Nothing is tested" in text
    assert tables.INTERVAL not in text
    empty = tables.comparison(store, selected.head(0))
    assert "no finished rows" in tables.as_table(empty, "made").markdown


def test_a_method_without_privacy_is_for_no_reference_in_a_wide_table(maker, capsys):
    for seed in range(3):
        maker.add("dp_adam", seed, 0.5, 0.6 + 0.01 * seed)
        maker.add("adam_nonprivate", seed, 0.5, 0.9, epsilon=math.inf, tuned={"lr": 0.1}, tuning="fixed")
    assert main(["table", "suite=made", f"results={maker.done().root}", "layout=wide", "format=latex"]) == 0
    printed = capsys.readouterr().out
    assert "90.0" in printed
    assert "for reference" not in printed


def test_reading_results_does_not_import_torch(matrix):
    code = (
        "import sys; from dpopt.cli import main; "
        f"main(['table', 'suite=made', 'results={matrix.root}']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_what_the_registry_says_of_an_optimizer_is_below_the_table(maker):
    for label in ("prodigy", "dp_adam"):
        maker.add(label, 0, 0.5, 0.5)
    table = made(maker)
    note = registry.entry("optimizer", "prodigy").note
    shown = tables.as_table(table, "made")
    assert f"prodigy: {note[:20]}" in shown.files()["md"]
    assert f"prodigy: {note[:20]}" in sheet("made", [shown])
    assert note[:20] not in shown.note + shown.latex
    assert "dp_adam: " not in shown.markdown


def test_who_spent_more_neither_is_bold_nor_sets_the_best(maker):
    for seed in range(4):
        maker.add("prodigy", seed, 0.5, 0.8 + 0.001 * seed)
        maker.add("adadp", seed, 0.5, 0.79 - 0.001 * seed, batch_size=64)  # which meets the others at equal epsilon
        maker.add("by_hand", seed, 0.5, 0.95, tuned={"lr": 0.1}, tuning="fixed")
        for lr in (0.1, 1.0):
            maker.add("dp_adam", seed, 0.5, 0.9, tuned={"lr": lr}, tuning="grid")
    table = made(maker).set_index("label")
    assert set(table.index[table["is_reference"]]) == {"by_hand", "dp_adam"}
    assert set(table.index[table["is_best"]]) == {"prodigy"}
    assert table["p"][["by_hand", "dp_adam"]].isna().all()
    assert table["p"]["adadp"] < 0.05
    shown = tables.as_table(table.reset_index(), "made")
    assert "*95.0 ± 0.0*" in shown.markdown
    assert "With 4 seeds, a difference below about" in shown.details


@pytest.mark.parametrize(
    ("order", "lost"),
    [
        (("adadp", "prodigy", "dog"), [math.nan] * 4),
        (("dog", "prodigy", "adadp"), [math.nan] * 4),
        (("dog", "prodigy", "adadp"), [-math.inf, 0.697, 0.697, 0.697]),
    ],
)
def test_a_diverged_run_counts_as_the_worst_of_its_block(maker, order, lost):
    """What dog has lost counts as the worst score of the block, 0.697, wherever its row stands."""
    for seed in range(4):
        scores = {"adadp": 0.8 + 0.001 * seed, "prodigy": 0.7 - 0.001 * seed, "dog": lost[seed]}
        for label in order:
            status = "done" if math.isfinite(scores[label]) else "diverged"
            maker.add(label, seed, 0.5, scores[label], status=status)
    table = made(maker).set_index("label")
    assert table["diverged"]["dog"] == sum(not math.isfinite(score) for score in lost)
    assert math.isnan(table["low"]["dog"])
    assert "diverged" in tables.as_table(table.reset_index(), "made").frame
    best, second, last = ([0.8, 0.801, 0.802, 0.803], [0.7, 0.699, 0.698, 0.697], [0.697] * 4)
    by_adadp, by_prodigy = (
        scipy.stats.ttest_rel(rival, last, alternative="greater").pvalue for rival in (best, second)
    )
    assert table["p"]["dog"] == pytest.approx(2 * min(by_adadp, by_prodigy))
    assert table["p"]["prodigy"] == pytest.approx(2 * scipy.stats.ttest_rel(best, second, alternative="greater").pvalue)
    assert table["is_best"].to_dict() == {"adadp": True, "prodigy": False, "dog": False}


@pytest.mark.parametrize(("is_seen", "bold", "italic"), [("", "**{}**", "*{}*"), ("1", "\x1b[1m{}", "\x1b[3m{}")])
def test_marks_are_seen_on_a_terminal_and_elsewhere(is_seen, bold, italic, maker, monkeypatch, capsys):
    for seed, noise in enumerate((0.00, 0.01, 0.02)):
        maker.add("best", seed, 0.5, 0.9 + noise)
        maker.add("worst", seed, 0.5, 0.1 + noise**2)
        maker.add("by hand", seed, 0.5, 0.95 + noise, tuned={"lr": 0.1}, tuning="fixed")
    monkeypatch.setenv("FORCE_COLOR", is_seen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["table", "suite=made", f"results={maker.done().root}"]) == 0
    printed = capsys.readouterr().out
    assert bold.format("best") in printed
    assert italic.format("by hand") in printed
    assert printed.index("for reference:") < printed.index("by hand"), "below the rows that keep to epsilon"
    notes = printed[printed.index("Test score: mean") :].splitlines()[:-1]
    assert len(notes) > 1
    assert max(map(len, notes)) <= 108, "but for the codes that a terminal does not show"
