import math
from dataclasses import replace

import pandas as pd
import pytest

from dpopt.cli import main
from dpopt.results.progress import progress
from dpopt.store.leases import Holder

CELLS = pd.DataFrame(
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
"""Four runs: two of a kind, of which one is done; one of another kind; one that runs."""
TOOK = {"seconds_prepare": [1.0, math.nan, 5.0, math.nan], "seconds_train": [9.0, math.nan, 35.0, math.nan]}
HOLDERS = {"d": Holder("here", 7, is_gone=False, age=3.2, fraction=0.25)}


def test_what_is_left_follows_from_runs_alike():
    frame, seconds = progress(CELLS.assign(**TOOK), HOLDERS)
    assert seconds == pytest.approx(10 + 0.75 * 40)
    (row,) = frame.to_dict("records")
    assert row.pop("left") == "30 seconds"
    texts = ["d", "digits_mlp", "fiber", "∞", "0", "25%", "process 7 of here", "3 s"]
    assert list(row.values()) == texts


@pytest.mark.parametrize("fraction", [0.25, None])
def test_nothing_is_said_of_time_while_nothing_is_done(fraction):
    frame, seconds = progress(CELLS, {"d": replace(HOLDERS["d"], fraction=fraction)})
    assert math.isnan(seconds)
    assert frame["left"].item() == "?"
    assert math.isnan(progress(CELLS.assign(**TOOK), {})[1])


def test_no_row_breaks_at_eighty_columns(maker, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run_id = maker.add("hyfreedp_search_then_decay", 0, 0.5, 0.5, status="missing", workload="newsgroups_minilm_lora")
    maker.add("hyfreedp_search_then_decay", 1, 0.5, 0.5)
    store = maker.done()
    with store.lease(run_id):
        assert main(["status", "suite=made", f"results={store.root}"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "HyFreeDP, search then decay" in printed
