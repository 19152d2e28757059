import math

import pandas as pd
import pytest

from dpopt.results import progress
from dpopt.store.leases import Holder


def cells(**took):
    """Four runs: two of a kind, of which one is done; one of another kind; one that runs."""
    frame = pd.DataFrame(
        {
            "run_id": ["a", "b", "c", "d"],
            "workload": "digits_mlp",
            "label": ["dp_adam", "dp_adam", "fiber", "fiber"],
            "epochs": 20.0,
            "batch_size": 128,
            "epsilon_target": [1.0, 3.0, 1.0, math.inf],
            "seed": 0,
            "state": ["done", "pending", "done", "running"],
        }
    )
    return frame.assign(**took)


TOOK = {"seconds_prepare": [1.0, math.nan, 5.0, math.nan], "seconds_train": [9.0, math.nan, 35.0, math.nan]}
HOLDERS = {"d": Holder("here", 7, is_gone=False, age=3.2, fraction=0.25)}


def test_what_is_left_follows_from_runs_alike():
    frame = cells(**TOOK)
    assert list(progress.expected_seconds(frame)) == [10, 10, 40, 40]
    expected = progress.expected_seconds(frame)
    at_work = progress.running(frame, HOLDERS, expected)
    assert at_work["seconds_left"].item() == pytest.approx(0.75 * 40)
    assert progress.seconds_left(frame, at_work, expected) == pytest.approx(10 + 30)


def test_nothing_is_said_of_time_while_nothing_is_done():
    frame = cells()
    expected = progress.expected_seconds(frame)
    at_work = progress.running(frame, HOLDERS, expected)
    assert math.isnan(progress.seconds_left(frame, at_work, expected))
    assert progress.readable(at_work)["left"].item() == "?"


def test_a_run_is_shown_by_what_it_is():
    frame = cells(**TOOK)
    at_work = progress.running(frame, HOLDERS, progress.expected_seconds(frame))
    (row,) = progress.readable(at_work).to_dict("records")
    assert row == {
        "run": "d",
        "workload": "digits_mlp",
        "optimizer": "fiber",
        "ε": "inf",
        "seed": "0",
        "done": "25%",
        "left": "30 seconds",
        "holder": "process 7 of here",
        "sign of life": "3 s",
    }
