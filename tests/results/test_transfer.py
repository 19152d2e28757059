"""Rates that are taken from one epsilon to another, from cells whose scores are known."""

import math

import pandas as pd
import pytest

from dpopt.results.transfer import transfers

TESTS = {1.0: {0.1: 0.7, 1.0: 0.5}, 8.0: {0.1: 0.8, 1.0: 0.9}}
"""epsilon -> rate -> test score; validation scores are in the same order."""


ALIKE = {"label": "one", "workload": "digits", "batch_size": 100, "epochs": 2.0, "clip": math.nan, "tuning": "grid"}
ALIKE |= {"stage": "", "selection": "", "is_widened": False, "is_trained": True, "state": "done", "score": "accuracy"}


def cells(tests=TESTS, seeds=(0, 1), **replaced):
    rows = [
        {"run_id": f"{epsilon}-{rate}-{seed}", "epsilon_target": epsilon, "tuned": f'{{"lr": {rate}}}', "seed": seed}
        | {"test_score": score + 0.01 * seed, "selection_score": score, "search": number, "searches": [("", 0)]}
        for epsilon, rates in tests.items()
        for number, (rate, score) in enumerate(rates.items())
        for seed in seeds
    ]
    return pd.DataFrame(rows).assign(**ALIKE | replaced)


def test_what_is_lost_is_the_difference_of_test_scores():
    found = transfers(cells()).set_index(["epsilon_from", "epsilon_target"])
    assert found.loc[(8.0, 1.0), "loss"] == pytest.approx(0.7 - 0.5)
    assert found.loc[(1.0, 8.0), "loss"] == pytest.approx(0.9 - 0.8)
    assert set(found["seeds"]) == {2}


def test_each_seed_takes_its_own_choice():
    frame = cells()
    first = (frame["seed"] == 0) & (frame["epsilon_target"] == 8)
    frame.loc[first, "selection_score"] = [0.9, 0.8]  # seed 0 chooses the small rate at epsilon 8, and so loses nothing
    found = transfers(frame).set_index(["epsilon_from", "epsilon_target"])
    assert found.loc[(8.0, 1.0), "loss"] == pytest.approx((0 + 0.2) / 2)
    assert found.loc[(1.0, 8.0), "loss"] == pytest.approx((0 + 0.1) / 2)


def test_one_choice_for_all_seeds_is_that_of_the_mean():
    frame = cells(seeds=(0, 1, 2))
    first = (frame["seed"] == 0) & (frame["epsilon_target"] == 8)
    frame.loc[first, "selection_score"] = [0.85, 0.8]  # one seed of three chooses the small rate; the mean does not
    found = transfers(frame).set_index(["epsilon_from", "epsilon_target"])
    assert found.loc[(8.0, 1.0), ["loss", "shared_loss"]].tolist() == pytest.approx([0.4 / 3, 0.2])
    assert (found["shared_loss"] > 0).all()
    frame.loc[first, "selection_score"] = [3.0, 0.0]
    found = transfers(frame).set_index(["epsilon_from", "epsilon_target"])
    assert (found["shared_loss"] == 0).all()


def test_one_choice_for_all_seeds_is_never_a_rate_that_diverged():
    """Its score, taken before that, may be the best."""
    frame = cells(seeds=(0, 1, 2))
    best = (frame["epsilon_target"] == 8) & (frame["tuned"] == '{"lr": 1.0}')
    frame.loc[best & (frame["seed"] == 0), ["state", "selection_score"]] = "diverged", 5.0
    found = transfers(frame).set_index(["epsilon_from", "epsilon_target"])
    assert (found["shared_loss"] == 0).all(), "the rate that is best at epsilon 1 is the only one without a failure"
    again = frame[best].assign(state="diverged", selection_score=9.0, test_score=0.0, run_id="again", search=7)
    once, twice = transfers(cells(seeds=(0, 1, 2))), transfers(pd.concat([cells(seeds=(0, 1, 2)), again]))
    assert twice.equals(once), "of two runs of a point the one that has not diverged counts"


def test_only_finished_grids_of_several_epsilons_are_looked_at():
    for replaced in ({"tuning": "self"}, {"tuning": "fixed"}, {"tuned": "{}"}, {"state": "failed"}):
        assert transfers(cells(**replaced)).empty
    assert transfers(cells({1.0: TESTS[1.0]})).empty
    assert transfers(pd.DataFrame()).empty


def test_a_point_that_was_trained_twice_counts_as_a_table_takes_it():
    again = cells().assign(test_score=0.1, selection_score=0.0, run_id="again")  # such as with another accountant
    assert transfers(pd.concat([cells(), again])).equals(transfers(cells()))


def test_searches_that_are_not_finished_choose_nothing():
    """Seed 2 lacks a run at epsilon 8: neither its scores nor its choice count, for one point for all seeds either."""
    frame = cells(seeds=(0, 1, 2))
    third = (frame["seed"] == 2) & (frame["epsilon_target"] == 8)
    frame.loc[third & (frame["tuned"] == '{"lr": 0.1}'), "selection_score"] = 9.0
    lost = third & (frame["tuned"] == '{"lr": 1.0}')
    frame.loc[lost, ["state", "test_score", "selection_score"]] = "pending", None, None
    found = transfers(frame).set_index(["epsilon_from", "epsilon_target"])
    assert found.loc[(1.0, 8.0), ["shared_loss", "shared_seeds"]].tolist() == pytest.approx([0.1, 2])
    assert found.loc[(8.0, 1.0), ["loss", "shared_loss"]].tolist() == pytest.approx([0.2, 0.2])
