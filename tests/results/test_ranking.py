"""Rankings of made-up records and frames whose answers are known."""

import io
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from intervals import student
from stored import rewrite

from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.markup import MARKDOWN
from dpopt.results import choosing, figures, frames, pricing, ranking, statistics, tables
from dpopt.results.drawing import styles_of
from dpopt.results.results import Results

PLOTS = {plot.name: plot for plot in figures.plots(Path(__file__).parents[2] / "plots")}


PLENTY = [1e9]


def ranked(store, by="epsilon", budgets=PLENTY, **columns):
    """The ranking by label, of one block."""
    cells = frames.load(store, "made").cells.assign(**columns)
    frame = ranking.ranking(ranking.reached(store, cells, by, budgets))
    return frame if frame.empty else frame.set_index("label")


@pytest.fixture
def searched(maker):
    """A search of two runs, which wins where it is not charged, and a method that needs none; three seeds."""
    for seed in range(3):
        for lr, validation, test in ((0.1, 0.6, 0.2), (1.0, 0.8, 0.9)):
            maker.add("dp_adam", seed, validation, test + 0.01 * seed, tuned={"lr": lr}, tuning="grid")
        maker.add("hyfreedp", seed, 0.7, 0.6 + 0.01 * seed)
    return maker


def test_means_that_differ_by_rounding_alone_share_a_rank(maker):
    for seed, (one, other) in enumerate(((0.1, 0.3), (0.2, 0.2), (0.3, 0.1))):
        maker.add("one", seed, 0.5, one)
        maker.add("other", seed, 0.5, other)
    frame = ranked(maker.done())
    assert frame["mean"]["one"] != frame["mean"]["other"]
    assert list(frame["rank"]) == [1.5, 1.5]


def test_who_wins_before_tuning_is_charged_loses_at_equal_total_epsilon(searched):
    store = searched.done()
    comparison = tables.comparison(store, choosing.select(frames.load(store, "made").cells)).set_index("label")
    assert comparison["mean"].idxmax() == "dp_adam"
    total = comparison["epsilon_with_tuning"]["dp_adam"]
    single = comparison["epsilon_with_tuning"]["hyfreedp"]

    table = ranked(store, budgets=[single])
    assert table["rank"].fillna(-1).to_dict() == {"hyfreedp": 1, "dp_adam": -1}
    assert table.loc["dp_adam", ["mean", "spent", "difference", "p"]].isna().all()
    blocks, averages = ranking.as_tables(table.reset_index())
    assert blocks.frame["accuracy (%)"].tolist() == ["61.0 ± 1.0", "nothing fits"]
    assert averages.frame["method"].tolist() == ["hyfreedp"]

    table = ranked(store, budgets=[total])
    assert table["rank"].to_dict() == {"dp_adam": 1, "hyfreedp": 2}
    assert table["spent"].to_dict() == {"dp_adam": total, "hyfreedp": single}
    assert table["mean"].to_dict() == pytest.approx({"dp_adam": 0.91, "hyfreedp": 0.61})
    assert table["difference"].to_dict() == pytest.approx({"dp_adam": 0, "hyfreedp": -0.3})


def test_the_larger_target_that_fits_is_taken_and_not_the_better_score(maker):
    for epsilon, score in ((1.0, 0.9), (3.0, 0.5)):
        maker.add("adadp", 0, score, score, epsilon=epsilon)
        maker.add("dp_adam", 0, 0.7, 0.7, epsilon=epsilon)
    table = ranked(maker.done())
    assert table["mean"].to_dict() == {"dp_adam": 0.7, "adadp": 0.5}


def test_budgets_are_the_targets_where_none_is_given(maker):
    for label in ("dp_adam", "hyfreedp"):
        maker.add(label, 0, 0.5, 0.5, epsilon=1.0)
        maker.add(label, 0, 0.5, 0.7, epsilon=4.0)
        maker.add(label, 0, 0.5, 0.9, epsilon=math.inf)
    store = maker.done()
    cells = frames.load(store, "made").cells
    spent = sorted(set(tables.comparison(store, choosing.select(cells))["epsilon_single"]))[:2]
    cells["epsilon_target"] = cells["epsilon_target"].replace({1.0: spent[0], 4.0: spent[1]})
    frame = ranking.ranking(ranking.reached(store, cells))
    assert frame.groupby("epsilon")["mean"].unique().map(list).to_dict() == {spent[0]: [0.5], spent[1]: [0.7]}
    assert frame["is_first"].all()


def test_settings_are_part_of_the_search(maker):
    for clip, validation, test in ((0.1, 0.9, 0.5), (1.0, 0.8, 0.7)):
        maker.add("dp_adam", 0, validation, test)
        maker.clip(clip)
    maker.add("hyfreedp", 0, 0.6, 0.6)
    store = maker.done()
    table = ranked(store)
    assert table.loc["dp_adam", ["mean", "runs"]].tolist() == [0.5, 2]
    ids = tuple(entry["run_id"] for entry in maker.cells[:2])
    assert table["spent"]["dp_adam"] == pytest.approx(pricing.epsilon_of_runs(store, Counter(ids), 1e-5, "rdp"))
    assert table["spent"]["dp_adam"] > 1.3 * table["spent"]["hyfreedp"]
    assert ranked(store, tuning="private")["spent"]["dp_adam"] == table["spent"]["dp_adam"], "no rule prices several"


def test_equal_draws_pay_for_all_runs_of_a_search(searched):
    table = ranked(searched.done(), "draws", ())
    assert table["budget"].tolist() == [100, 100]
    assert table["spent"].tolist() == [100, 100]
    assert table["mean"].to_dict() == pytest.approx({"hyfreedp": 0.61, "dp_adam": 0.91 / 2}), "at draw 50 of 100"
    assert ranked(searched.store, "draws", [200])["mean"]["dp_adam"] == pytest.approx(0.91)
    assert math.isnan(ranked(searched.store, "draws", [99])["mean"]["dp_adam"]), "its curve begins at draw 50"


def test_equal_gradients_count_points(searched):
    store = searched.done()
    assert ranked(store, "gradients", ())["budget"].iloc[0] == 100 * 128
    points = pd.Series([1, 1, 5] * 3)
    table = ranked(store, "gradients", (), gradients_per_draw=points)
    assert table["budget"].iloc[0] == 2 * 100 * 128
    assert table["mean"]["dp_adam"] == pytest.approx(0.91)
    assert math.isnan(table["mean"]["hyfreedp"]), "the curve of 500 evaluations a record begins after 250"
    table = ranked(store, "gradients", (), gradients_per_draw=pd.Series([0, 0, 5] * 3))
    assert table["budget"].iloc[0] == pytest.approx(2 * 100 * 128 * 2 / 3), "losses alone are two passes of three"


def test_seconds_are_of_computing_where_all_runs_have_them(searched):
    store, wall, cpu = searched.done(), [4.0, 4.0, 10.0] * 3, [2.0, 2.0, 3.0] * 3
    table = ranked(store, "seconds", (), seconds_train=wall, seconds_cpu=cpu)
    assert table["budget"].iloc[0] == 3
    cpu[4] = math.nan
    table = ranked(store, "seconds", (), seconds_train=wall, seconds_cpu=cpu)
    assert table["budget"].iloc[0] == 8
    assert ranked(store, "seconds", ()).empty, "no times are stored"


def test_failures_count_as_the_worst_score_and_are_marked(maker):
    for seed in range(3):
        maker.add("dp_adam", seed, 0.8, 0.8)
        maker.add("adadp", seed, 0.7, 0.5 + 0.1 * seed)
        maker.add("hyfreedp", seed, 0.7, 0.01, status="diverged" if seed else "done")
        maker.add("dp_sgd", seed, 0.9, 0.9, status="failed" if seed == 2 else "done")
    table = ranked(maker.done())
    assert table["failures"].to_dict() == {"dp_adam": 0, "dp_sgd": 1, "adadp": 0, "hyfreedp": 2}
    means = {"dp_adam": 0.8, "dp_sgd": (0.9 + 0.9 + 0.01) / 3, "adadp": 0.6, "hyfreedp": 0.01}
    assert table["mean"].to_dict() == pytest.approx(means)
    texts = ranking.as_tables(table.reset_index())[0].frame.set_index("method")["accuracy (%)"]
    assert "(1 failed)" in texts["dp_sgd"]
    assert "(2 failed)" in texts["hyfreedp"]


def test_what_was_set_by_hand_is_shown_and_not_ranked(maker):
    """As on the leaderboard; no other row gains or loses by it."""
    for seed in range(3):
        for label, test in (("adadp", 0.7), ("dp_adam", 0.6)):
            maker.add(label, seed, 0.5, test + 0.01 * seed**2)
    without = ranked(maker.done())
    for seed in range(3):
        maker.add("warm", seed, 0.5, 0.9, tuned={"lr": 0.1}, tuning="fixed")
    table = ranked(maker.done())
    assert table["rank"].fillna(-1).to_dict() == {"adadp": 1, "dp_adam": 2, "warm": -1}
    pd.testing.assert_frame_equal(table.loc[without.index, without.columns], without)
    blocks, averages = ranking.as_tables(table.reset_index())
    shown = blocks.styled(MARKDOWN).set_index("method").loc["*warm (set by hand)*"]
    assert (shown["rank"], shown["accuracy (%)"], shown["Δ"]) == ("-", "*90.0 ± 0.0*", "-")
    assert list(averages.frame["method"]) == ["adadp", "dp_adam"]


def test_a_row_with_one_run_that_was_set_by_hand_is_not_ranked(maker):
    """Though it is not the first."""
    for seed in range(3):
        maker.add("adadp", seed, 0.5, 0.7 + 0.01 * seed)
        maker.add("dp_adam", seed, 0.5, 0.8, tuned={"lr": 0.1}, tuning="grid")
    maker.add("dp_adam", 2, 0.6, 0.9, tuned={"lr": 0.2}, tuning="fixed")
    store = maker.done()
    assert ranked(store)["rank"].fillna(-1).to_dict() == {"adadp": 1, "dp_adam": -1}
    table = Results(store, "made").comparison.set_index("label")
    assert table["is_reference"].to_dict() == {"adadp": False, "dp_adam": True}


def test_the_highest_mean_is_bold_and_a_dagger_marks_what_is_not_shown_to_be_worse(maker):
    for seed, noise in enumerate((-0.02, 0.0, 0.02)):
        for label, test in (("first", 0.9), ("near", 0.89 - 2 * noise), ("far", 0.5)):
            maker.add(label, seed, 0.5, test + noise)
    table = ranked(maker.done())
    texts = ranking.as_tables(table.reset_index())[0].styled(MARKDOWN)["accuracy (%)"].tolist()
    assert texts == ["**90.0 ± 2.0**", "89.0 ± 2.0 †", "50.0 ± 2.0"]
    assert table["is_best"].to_dict() == {"first": True, "near": True, "far": False}
    pair = ranked(maker.store, seed=[0] * 3 + [1] * 3 + [2] * 3, state=["done"] * 6 + ["pending"] * 3)
    assert not pair[["is_best", "is_highest"]].any(axis=None), "two seeds show nothing"
    assert pair[["low", "high", "p"]].isna().all(axis=None)


def test_intervals_of_a_block_are_corrected_for_its_rows(maker):
    scores = {"first": [0.80, 0.82, 0.85], "second": [0.70, 0.75, 0.71], "third": [0.50, 0.60, 0.52]}
    for label, tests in scores.items():
        for seed, test in enumerate(tests):
            maker.add(label, seed, 0.5, test)
    table = ranked(maker.done())
    for label in ("second", "third"):
        differences = np.subtract(scores[label], scores["first"])
        interval = scipy.stats.t.interval(1 - 0.05 / 2, 2, differences.mean(), scipy.stats.sem(differences))
        assert table.loc[label, ["low", "high"]].tolist() == pytest.approx(interval)


def test_an_interval_of_a_difference_ends_where_scores_end(maker):
    for seed, low in enumerate((0.0, 0.01, 0.4)):
        maker.add("first", seed, 0.5, 1.0)
        maker.add("second", seed, 0.5, low)
    row = ranked(maker.done()).loc["second"]
    assert row["low"] == -1 < row["difference"] < row["high"]


def test_an_interval_of_a_score_without_ends_has_none(maker):
    for seed, low in enumerate((-2.0, -2.5, -3.5)):
        for label, value in (("first", -1.0), ("second", low)):
            scores = {"test_log_likelihood": value, "validation_log_likelihood": value}
            rewrite(maker.store, maker.add(label, seed, 0.5, 0.5), score="log_likelihood", **scores)
    row = ranked(maker.done()).loc["second"]
    assert [row["low"], row["high"]] == pytest.approx(student([-1.0, -1.5, -2.5]))


def test_a_method_without_a_score_is_below_all_that_have_one(maker):
    """What counts as the worst score is no tie with the method that has it."""
    for seed in range(3):
        maker.add("dp_adam", seed, 0.5, 0.8)
        maker.add("adadp", seed, 0.5, 0.5)
        maker.add("dog", seed, 0.5, 0.5, status="failed")
        maker.add("prodigy", seed, 0.5, 0.9, status="diverged")
    frame = ranked(maker.done())
    assert frame["rank"].to_dict() == {"dp_adam": 1, "adadp": 2, "dog": 3.5, "prodigy": 3.5}
    assert frame["mean"]["dog"] == 0.5
    assert frame["failures"].to_dict() == {"dp_adam": 0, "adadp": 0, "dog": 3, "prodigy": 3}
    assert not frame.loc[["dog", "prodigy"], ["is_first", "is_best"]].any(axis=None)


@pytest.mark.parametrize(("status", "firsts"), [("done", 2), ("failed", 1)])
def test_the_first_is_one_of_those_in_all_blocks_and_has_a_score(maker, status, firsts):
    """A guest is the best of the second block, or the only one that reaches anything there."""
    for label, test in (("adadp", 0.8), ("prodigy", 0.6)):
        maker.add(label, 0, 0.5, test)
        maker.add(label, 0, 0.5, test, workload="gmm", status=status)
    maker.add("guest", 0, 0.5, 0.9, workload="gmm")
    table = ranking.average_ranks(ranked(maker.done()).reset_index()).set_index("label")
    assert table["first"].to_dict() == {"adadp": firsts, "prodigy": 0}


@pytest.mark.parametrize("damage", ["record", "pending"])
def test_a_seed_that_is_not_known_to_have_failed_is_not_finished(maker, damage):
    """A damaged record is no failure; and while a cell is pending beside one that failed, nothing is known yet."""
    for seed in range(3):
        maker.add("hyfreedp", seed, 0.5, 0.5)
        lost = [maker.add("dp_adam", seed, 0.5, 0.1 * seed, tuned={"lr": lr}, tuning="grid") for lr in (0.1, 1.0)]
    if damage == "record":
        (maker.store.folder(lost[0]) / "run.json").write_text("{")
    else:
        for run_id in lost:
            (maker.store.folder(run_id) / "run.json").unlink()
        maker.store.fail(lost[0], "ValueError: no luck")
    frame = ranked(maker.done())
    assert frame["seeds"].tolist() == [2, 2]
    assert frame["failures"].tolist() == [0, 0]


def test_settings_that_nothing_but_the_test_split_tells_apart_are_not_ranked(maker):
    """Those that all diverge have failed, and of one setting there is nothing to choose."""
    for label, validation, status in (("blind", math.nan, "done"), ("seen", 0.5, "done"), ("lost", 0.5, "diverged")):
        for clip, score, test in ((0.1, math.nan, 0.3), (1.0, validation, 0.9)):
            maker.add(label, 0, score, test, status=status)
            maker.clip(clip)
    maker.add("dp_adam", 0, math.nan, 0.5)
    frame = ranked(maker.done())
    assert frame["mean"].to_dict() == {"seen": 0.9, "dp_adam": 0.5, "lost": 0.5}
    assert frame["failures"].to_dict() == {"seen": 0, "dp_adam": 0, "lost": 1}


def test_pairs_are_seeds_and_ties_share_a_rank(maker):
    """What seeds have in common is not noise: unpaired, the difference of 0.01 would drown."""
    for seed in range(8):
        maker.add("dp_adam", seed, 0.5, 0.3 + 0.05 * seed)
        maker.add("hyfreedp", seed, 0.5, 0.29 + 0.05 * seed + 1e-4 * (-1) ** seed)
        for label in ("adadp", "dp_sgd"):
            maker.add(label, seed, 0.5, 0.1)
    table = ranked(maker.done())
    assert table["rank"].to_dict() == {"dp_adam": 1, "hyfreedp": 2, "adadp": 3.5, "dp_sgd": 3.5}
    row = table.loc["hyfreedp"]
    assert row["low"] < row["difference"] < row["high"] < -0.009
    assert row["p"] < 1e-9
    assert table["is_best"].to_dict() == {"dp_adam": True, "hyfreedp": False, "adadp": False, "dp_sgd": False}


def test_a_search_of_a_random_number_of_runs_costs_its_rule(searched):
    store = searched.done()
    cells = frames.load(store, "made").cells
    is_search = cells["label"] == "dp_adam"
    rule = '{"number": "geometric", "rule": "geometric", "runs": 2.0}'
    cells = cells.assign(epsilon_total=2.5, selection=np.where(is_search, rule, ""))
    cells = cells.assign(tuning=np.where(is_search, "private", "self")).drop(index=[0])
    table = ranking.ranking(ranking.reached(store, cells, budgets=PLENTY)).set_index("label")
    assert table.loc["dp_adam", ["spent", "runs", "mean"]].tolist() == pytest.approx([2.5, 5 / 3, 0.91])
    table = ranking.ranking(ranking.reached(store, cells, by="draws")).set_index("label")
    assert table["mean"]["dp_adam"] == pytest.approx((0.9 + (0.91 + 0.92) / 2) / 3), "seed 0 has made one run"


def test_what_cannot_be_compared_is_refused(searched):
    store = searched.done()
    for by, budget, word in (("epochs", 1.0, "draws"), ("draws", 0.0, "positive"), ("draws", math.inf, "positive")):
        with pytest.raises(ConfigError, match=word):
            ranked(store, by, [budget])
    with pytest.raises(ConfigError, match="delta"):
        ranked(store, delta=[1e-5, 1e-5, 1e-6] * 3)
    with pytest.raises(ConfigError, match="device"):
        ranked(store, "seconds", device=["cpu", "cpu", "cuda"] * 3, seconds_train=1.0)
    assert len(ranked(store, device=["cpu", "cpu", "cuda"] * 3)) == 2, "an epsilon is that of any device"


def frame(scores, levels=(1.0,)):
    """A ranking of methods whose scores are the same for every seed: {workload: {method: score}}."""
    rows = []
    for workload, methods in scores.items():
        ranks = pd.Series(methods).rank(ascending=False)
        best = max(methods.values())
        for level in levels:
            for label, score in methods.items():
                place = {"by": "epsilon", "workload": workload, "epsilon": level, "budget": level, "label": label}
                numbers = {"mean": score, "difference": score - best, "rank": ranks[label], "is_first": score == best}
                counts = {"tuning": "self", "score": "accuracy", "seeds": 3, "failures": 0, "unranked": ""}
                rows.append({**place, **numbers, **counts})
    return pd.DataFrame(rows)


def test_average_ranks_are_of_workloads():
    parts = frame({"digits": {"a": 0.9, "b": 0.8}}, levels=(1.0, 3.0, 8.0)), frame({"mnist": {"a": 0.1, "b": 0.7}})
    table = ranking.average_ranks(pd.concat(parts)).set_index("label")
    assert table["rank"].to_dict() == {"a": 1.5, "b": 1.5}
    assert table["first"].to_dict() == {"a": 3, "b": 1}


def scattered(workloads):
    generator = np.random.default_rng(0)
    centres = {"a": 0.5, "b": 0.51, "c": 0.9}
    noisy = [{name: centre + 0.02 * generator.random() for name, centre in centres.items()} for _ in range(workloads)]
    return frame({f"w{number}": scores for number, scores in enumerate(noisy)})


def test_ranks_are_tested_with_enough_workloads_only():
    assert ranking.rank_test(scattered(statistics.ENOUGH))
    assert ranking.rank_test(scattered(statistics.ENOUGH - 1)) is None
    assert "not tested" in ranking.verdict(scattered(statistics.ENOUGH - 1))
    many_levels = frame({"digits": {"a": 0.5, "b": 0.6}}, levels=range(1, 21))
    assert ranking.rank_test(many_levels) is None, "twenty budgets of one workload are one workload"
    two, one = (frame({f"w{number}": scores for number in range(9)}) for scores in ({"a": 0.5, "b": 0.6}, {"a": 0.5}))
    assert ranking.rank_test(two)[0] == pytest.approx(2 / 2**9, abs=0.002)
    assert ranking.rank_test(one) is None
    p, critical = ranking.rank_test(scattered(9))
    assert p < 0.01
    assert critical == statistics.critical_difference(3, 9)
    assert f"Friedman's test over 9 workloads: p = {p:.2g}." in ranking.verdict(scattered(9))


def bars(figure):
    return [line for line in figure.axes[0].lines if line.get_linewidth() == 3]


def drawn(name, rows):
    return PLOTS[name].figure(rows, styles_of(rows["label"]))


def test_bars_of_the_critical_difference_need_enough_workloads():
    few, enough = (drawn("average_ranks", scattered(count)) for count in (statistics.ENOUGH - 1, 9))
    assert few is None
    averages = ranking.average_ranks(scattered(9))
    assert averages["label"].tolist()[0] == "c"
    joined = [sorted(line.get_ydata()) for line in bars(enough)]
    assert joined == [[1, 2]], "a and b do not differ; c does from both"
    cliques = PLOTS["average_ranks"].draw.__globals__["_cliques"]
    assert cliques(np.array([1.0, 1.9, 2.5, 4.0, 4.2]), 1.0) == [(0, 1), (1, 2), (3, 4)], "the largest groups"


def test_profiles_plot_shares_of_blocks():
    scores = {"digits": {"a": 0.9, "b": 0.8}} | {f"task {k}": {"a": 0.5, "b": 0.7} for k in range(5)}
    scores["digits"]["rare"] = 0.9
    rows = frame(scores)
    rows = rows[(rows["workload"] != "task 0") | (rows["label"] == "b")]
    axis = drawn("performance_profile", rows).axes[0]
    lines = {line.get_label(): line.get_xydata()[:-1] for line in axis.lines}
    assert lines["a"] == pytest.approx(np.array([[0, 1 / 6], [20, 5 / 6]])), "and never 1"
    assert lines["b"] == pytest.approx(np.array([[0, 5 / 6], [10, 1]]))
    assert lines["rare"] == pytest.approx(np.array([[0, 1 / 6]])), "it is in one block of six"
    assert drawn("performance_profile", rows[rows["workload"] != "task 4"]) is None, "five workloads are too few"


def test_a_method_without_a_finite_score_for_each_test_record_is_shown_and_never_ranked(maker):
    """Chosen as any other, since a search does not look at test outputs; and no other row gains or loses by it."""
    for seed in range(3):
        for label, test in (("adadp", 0.7), ("dp_adam", 0.6)):
            maker.add(label, seed, 0.5, test + 0.01 * seed)
    without = ranked(store := maker.done())
    for seed in range(3):
        bad = {"test_unscored": 1, "tested": 400} if seed == 1 else {"tested": 400}
        maker.add("dp_sgd", seed, 0.9, 0.95, entry={**bad, "draw": 50}, **bad)
    table = ranked(store := maker.done())
    assert table["rank"].fillna(-1).to_dict() == {"adadp": 1, "dp_adam": 2, "dp_sgd": -1}
    pd.testing.assert_frame_equal(table.loc[without.index, without.columns], without, check_dtype=False)
    blocks, averages = ranking.as_tables(table.reset_index())
    shown = blocks.frame.set_index("method").loc["dp_sgd"]
    assert (shown["rank"], shown["accuracy (%)"]) == ("-", "1 of 1,200 test records without a finite score")
    assert list(averages.frame["method"]) == ["adadp", "dp_adam"]
    comparison = tables.comparison(store, choosing.select(frames.load(store, "made").cells)).set_index("label")
    assert comparison["diverged"].to_dict() == {"adadp": 0, "dp_adam": 0, "dp_sgd": 1}
    assert comparison["is_reference"].to_dict() == {"adadp": False, "dp_adam": False, "dp_sgd": True}
    assert not comparison["is_best"]["dp_sgd"]
    text = tables.as_table(comparison.reset_index(), "made").markdown
    assert "dp_sgd: 1 of 1,200 test records without a finite score, which counts as diverged: not ranked." in text


def test_a_run_without_a_test_score_counts_as_one_that_failed(maker):
    for seed in range(2):
        maker.add("adadp", seed, 0.5, 0.7)
        maker.add("dp_adam", seed, 0.5, math.nan if seed else 0.8)
    assert ranked(maker.done())["failures"].to_dict() == {"adadp": 0, "dp_adam": 1}


@pytest.mark.parametrize(("entry", "end"), [({"test_unscored": 3}, {}), ({}, {"test_unscored": 1})])
def test_a_method_whose_outputs_are_not_finite_at_the_budget_or_at_the_end_is_not_ranked_either(maker, entry, end):
    """With one other method the block is shown all the same."""
    maker.add("adadp", 0, 0.5, 0.7, tested=400)
    maker.add("dp_sgd", 0, 0.5, 0.9, entry=entry, tested=400, **end)
    assert ranked(maker.done(), "draws", [50.0])["rank"].fillna(-1).to_dict() == {"adadp": 1, "dp_sgd": -1}


SEEDS = 8


def entries(shift, seed=0):
    """What `ranking.reached` would give: two budgets on each workload; `shift`: label -> workload -> points."""
    rows, random = [], np.random.default_rng(seed)
    for workload in ("one", "two", "three"):
        for budget in (1.0, 3.0):
            common = random.normal(0.5, 0.1, SEEDS)
            for label, shifts in {"base": {}, **shift}.items():
                tests = common + shifts.get(workload, 0.0) + random.normal(0, 0.01, SEEDS)
                place = {"workload": workload, "epsilon": budget, "budget": budget, "label": label}
                place |= {"score": "accuracy", "failed": False, "test_unscored": 0, "spent": budget, "right": None}
                rows += [place | {"seed": seed, "test": test} for seed, test in enumerate(tests)]
    return pd.DataFrame(rows)


def test_differences_are_those_of_a_paired_test_corrected_for_the_workloads():
    of = entries({"other": {"one": 0.05, "two": -0.05}})
    found = ranking.against(of, "base").set_index("workload")
    for workload, own in of.groupby("workload"):
        means = own.groupby(["label", "seed"])["test"].mean()
        test = scipy.stats.ttest_rel(means["other"], means["base"])
        interval = test.confidence_interval(1 - 0.05 / 3)
        row = found.loc[workload]
        assert row["p"] == pytest.approx(min(1, 3 * test.pvalue))
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
        assert (row["seeds"], row["blocks"]) == (SEEDS, 2)
    assert found["verdict"].to_dict() == {"one": 1, "two": -1, "three": 0}


def test_noise_is_told_apart_no_more_often_than_stated():
    found = [ranking.against(entries({"other": {}}, seed), "base")["verdict"].any() for seed in range(20)]
    assert sum(found) <= 4  # 1 is expected; more than 4 have a probability of 0.0026


def test_a_failure_is_the_worst_and_a_budget_that_reaches_nothing_leaves_the_workload_out():
    of = entries({"other": {}, "third": {}})
    is_failed = (of["label"] == "other") & (of["workload"] == "one") & (of["seed"] == 2) & (of["epsilon"] == 1)
    is_lacking = (of["label"] == "third") & (of["workload"] == "two") & (of["epsilon"] == 3)
    of["failed"] = is_failed
    of["test"] = of["test"].mask(is_failed | is_lacking)
    of["spent"] = of["spent"].mask(is_failed | is_lacking)
    found = ranking.against(of, "base").set_index(["label", "workload"])
    block = of[(of["workload"] == "one") & (of["epsilon"] == 1)]
    imputed = of.assign(test=of["test"].mask(is_failed, block["test"].min()))
    means = imputed[imputed["workload"] == "one"].groupby(["label", "seed"])["test"].mean()
    assert found["mean"]["other", "one"] == pytest.approx((means["other"] - means["base"]).mean())
    assert ("third", "two") not in found.index
    assert len(found) == 5


@pytest.mark.parametrize("lacking", ["other", "base"])
def test_a_budget_that_some_seeds_reach_nothing_with_leaves_the_workload_out(lacking):
    """The seeds that do are those that were lucky; a ranking has no rank for the method."""
    of = entries({"other": {}, "third": {}})
    unlucky = (of["label"] == lacking) & (of["workload"] == "one") & (of["epsilon"] == 1) & (of["seed"] % 2 == 0)
    of[["test", "spent"]] = of[["test", "spent"]].mask(unlucky)
    found = ranking.against(of, "base").set_index(["label", "workload"])
    assert ("other", "one") not in found.index
    assert (("third", "one") in found.index) == (lacking == "other")
    assert (found["seeds"] == SEEDS).all()


def test_the_baseline_must_be_there_with_something_to_compare():
    for of in (entries({}), entries({"other": {}}).assign(test=np.nan, spent=np.nan)):
        with pytest.raises(ConfigError, match="against: 'base' cannot be used; on no workload"):
            ranking.against(of, "base")
    with pytest.raises(ConfigError, match="against: 'bas' cannot be used; did you mean 'base'"):
        ranking.against(entries({"other": {}}), "bas")


def test_commands_write_distances_from_one_method(maker, capsys):
    for seed in range(2):
        maker.add("dp_adam", seed, 0.5, 0.5 + 0.01 * seed)
        maker.add("dp_sgd", seed, 0.5, 0.6 + 0.012 * seed)
    store = maker.done()
    here = f"results={store.root}"
    assert main(["rank", "suite=made", here, "against=dp_adam"]) == 0
    written = pd.read_csv(io.StringIO((store.suite_folder("made") / "against_dp_adam_epsilon.csv").read_text()))
    pd.testing.assert_frame_equal(written, Results(store, "made").against("dp_adam"))
    assert main(["leaderboard", "suite=made", here, "against=dp_adam", f"to={store.root / 'page'}"]) == 0
    of_page = pd.read_csv(io.StringIO((store.root / "page" / "leaderboard_against.csv").read_text()))
    pd.testing.assert_frame_equal(of_page[["label", "mean", "p"]], written[["label", "mean", "p"]])
    assert "Scores minus those of DP-Adam" in " ".join(capsys.readouterr().out.split())
    assert main(["leaderboard", "suite=made", here, "against=dp_adam", "by=gradients"]) == 0


def test_a_block_in_which_nothing_fits_is_left_out(searched):
    assert ranked(searched.done(), budgets=[1e-3]).empty
