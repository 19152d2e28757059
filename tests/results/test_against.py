"""Distances from one method, held against SciPy's paired test."""

import io

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.results.ranking import against
from dpopt.results.results import Results

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
                place |= {"score": "accuracy", "failed": False, "test_unscored": 0, "spent": budget}
                rows += [place | {"seed": seed, "test": test} for seed, test in enumerate(tests)]
    return pd.DataFrame(rows)


def test_differences_are_those_of_a_paired_test_corrected_for_the_workloads():
    of = entries({"other": {"one": 0.05, "two": -0.05}})
    found = against(of, "base").set_index("workload")
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
    found = [against(entries({"other": {}}, seed), "base")["verdict"].any() for seed in range(40)]
    assert sum(found) <= 6  # 2 are expected; more than 6 have a probability of 0.0034


def test_a_failure_is_the_worst_and_a_budget_that_reaches_nothing_leaves_the_workload_out():
    of = entries({"other": {}, "third": {}})
    is_failed = (of["label"] == "other") & (of["workload"] == "one") & (of["seed"] == 2) & (of["epsilon"] == 1)
    is_lacking = (of["label"] == "third") & (of["workload"] == "two") & (of["epsilon"] == 3)
    of["failed"] = is_failed
    of["test"] = of["test"].mask(is_failed | is_lacking)
    of["spent"] = of["spent"].mask(is_failed | is_lacking)
    found = against(of, "base").set_index(["label", "workload"])
    block = of[(of["workload"] == "one") & (of["epsilon"] == 1)]
    imputed = of.assign(test=of["test"].mask(is_failed, block["test"].min()))
    means = imputed[imputed["workload"] == "one"].groupby(["label", "seed"])["test"].mean()
    assert found["mean"]["other", "one"] == pytest.approx((means["other"] - means["base"]).mean())
    assert ("third", "two") not in found.index
    assert len(found) == 5


@pytest.mark.parametrize("lacking", ["other", "base"])
def test_a_budget_that_some_seeds_reach_nothing_with_leaves_the_workload_out(lacking):
    """The seeds that do are those that were lucky; a ranking has the method last."""
    of = entries({"other": {}, "third": {}})
    unlucky = (of["label"] == lacking) & (of["workload"] == "one") & (of["epsilon"] == 1) & (of["seed"] % 2 == 0)
    of[["test", "spent"]] = of[["test", "spent"]].mask(unlucky)
    found = against(of, "base").set_index(["label", "workload"])
    assert ("other", "one") not in found.index
    assert (("third", "one") in found.index) == (lacking == "other")
    assert (found["seeds"] == SEEDS).all()


def test_the_baseline_must_be_there_with_something_to_compare():
    for of in (entries({}), entries({"other": {}}).assign(test=np.nan, spent=np.nan)):
        with pytest.raises(ConfigError, match="against: 'base' cannot be used; there is no workload"):
            against(of, "base")
    with pytest.raises(ConfigError, match="against: 'bas' cannot be used; did you mean 'base'"):
        against(entries({"other": {}}), "bas")


def test_command(maker, capsys):
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
    assert "Scores minus those of dp_adam" in " ".join(capsys.readouterr().out.split())
    assert main(["leaderboard", "suite=made", here, "against=dp_adam", "by=gradients"]) == 0
