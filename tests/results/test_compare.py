"""Two versions of made-up results, whose differences are known."""

import json
import math

import pandas as pd
import pytest

from dpopt.cli import main
from dpopt.results import compare as comparing
from dpopt.results.collecting import collect
from dpopt.results.results import Results

SEEDS = range(4)


@pytest.fixture
def version(tmp_path, maker):
    """Write a version of the suite "made" whose scores are shifted; gives its folder."""

    def write(name, shift=0.0, *, seeds=SEEDS, first=0, epsilon=3.0):
        made = type(maker)(tmp_path / name)
        made.cells = [None] * first  # ids are numbers
        for seed in seeds:
            for lr in (0.1, 1.0):
                test = 0.5 + 0.01 * seed + shift * (1 + 0.1 * seed)
                made.add("dp_adam", seed, 0.5, test, tuned={"lr": lr}, tuning="grid", epsilon=epsilon)
            made.add("hyfreedp", seed, 0.5, 0.7)
        del made.cells[:first]
        made.done()
        return tmp_path / name

    return write


def compared(old, new, **more):
    return comparing.compare(comparing.load(old), comparing.load(new), **more)


def test_a_version_is_the_same_as_itself(version, capsys):
    old, new = version("old"), version("new")
    found = compared(old, new)
    assert found.is_same
    assert len(found.pairs) == 12
    assert not found.pairs["is_changed"].any()
    assert (comparing.summary(found)[["mean", "low", "high"]] == 0).all(axis=None)
    assert main(["compare", str(old), str(new)]) == 0
    assert "12 cells in both, 0 changed, 0 differences of epsilon, 0 missing" in capsys.readouterr().out


@pytest.mark.parametrize("first", [0, 100], ids=["by id", "by place"])
def test_shifted_scores_are_found_in_the_row_that_shifted(version, first):
    found = compared(version("old"), version("new", 0.1, first=first))
    assert not found.is_same
    assert set(found.changes["metric"]) == {"test_accuracy", "test_score"}
    assert set(found.changes["label"]) == {"dp_adam"}
    assert found.epsilons.empty
    rows = comparing.summary(found).set_index("label")
    assert rows["changed"].to_dict() == {"dp_adam": 8, "hyfreedp": 0}
    assert rows["mean"].to_dict() == pytest.approx({"dp_adam": 0.115, "hyfreedp": 0})
    assert rows["low"]["dp_adam"] < 0.115 < rows["high"]["dp_adam"]
    assert rows["low"]["dp_adam"] > 0.09, "four seeds, not eight cells, make the interval"
    assert 1e-5 < rows["p"]["dp_adam"] < 1e-3


def test_points_are_paired_by_what_they_are(version):
    """With other ids, cells meet those of their own learning rate and seed."""
    found = compared(version("old"), version("new", first=100))
    assert found.is_same
    assert (found.pairs["run_id_old"] != found.pairs["run_id_new"]).all()
    ids = found.pairs[["run_id_old", "run_id_new"]].map(lambda run_id: int(run_id, 16))
    assert (ids["run_id_new"] - ids["run_id_old"] == 100).all()


def test_what_is_missing_and_what_is_new(version, capsys):
    old, new = version("old"), version("new", seeds=[1, 2], first=100)
    found = compared(old, new)
    assert (len(found.pairs), len(found.missing), len(found.added)) == (6, 6, 0)
    assert not found.is_same
    assert main(["compare", str(old), str(new)]) == 1
    assert "no result in the new version" in capsys.readouterr().out
    assert len(compared(new, old).added) == 6
    assert main(["compare", str(new), str(old)]) == 0, "a new version may have more"


def test_a_cell_without_a_result_counts_as_missing(version):
    old, new = version("old"), version("new")
    next((new / "runs").glob("*/*/record.json")).unlink()
    assert len(compared(old, new).missing) == 1
    assert len(compared(new, old).added) == 1


def test_float_tolerance_is_for_scores_only(version):
    old, new = (comparing.load(version(name)) for name in ("old", "new"))
    new["test_score"] *= 1 + 1e-8
    assert comparing.compare(old, new).is_same
    assert not comparing.compare(old, new, tolerance=1e-9).is_same
    new["epsilon"] *= 1 + 1e-8
    found = comparing.compare(old, new, tolerance=0.1)
    assert set(found.changes["metric"]) == {"epsilon"}
    assert len(found.epsilons) == 12
    assert all(line.startswith("error: ") for line in comparing.lines(found))


def test_states_and_missing_numbers_are_compared(version):
    old, new = (comparing.load(version(name)) for name in ("old", "new"))
    new.loc[0, "state"] = "diverged"
    new.loc[1, "test_accuracy"] = float("nan")
    old["validation_accuracy"] = new["validation_accuracy"] = float("nan")
    found = comparing.compare(old, new)
    assert sorted(found.changes["metric"]) == ["state", "test_accuracy"]


@pytest.mark.parametrize("lost", ["column", "numbers"])
def test_what_the_new_version_no_longer_has_is_reported(version, lost):
    old, new = (comparing.load(version(name)) for name in ("old", "new"))
    kept = new.drop(columns="validation_accuracy") if lost == "column" else new.assign(validation_accuracy="none")
    found = comparing.compare(old, kept)
    assert not found.is_same
    assert found.changes["metric"].tolist() == ["validation_accuracy"] * 12
    assert "validation_accuracy 0.5 -> nan" in comparing.lines(found)[0]
    assert comparing.compare(kept, new).is_same, "a new version may have more"


def test_another_score_is_reported(version):
    old, new = (comparing.load(version(name)) for name in ("old", "new"))
    found = comparing.compare(old, new.assign(score="balanced_accuracy"))
    assert set(found.changes["metric"]) == {"score"}
    assert "score accuracy -> balanced_accuracy" in comparing.lines(found)[0]


def test_a_score_that_is_none_makes_no_mean(version):
    old, new = (comparing.load(version(name)) for name in ("old", "new"))
    new.loc[0, "test_score"] = float("nan")
    row = comparing.summary(comparing.compare(old, new)).set_index("label").loc[old.loc[0, "label"]]
    assert math.isfinite(row["old"])
    assert math.isnan(row["new"])
    assert math.isnan(row["mean"])


def test_parquet_is_compared_as_folders_are(version, maker, tmp_path):
    old, new = version("old"), version("new", 0.1)
    for folder in (old, new):
        collect(Results(type(maker)(folder).store, "made"))
    files = [folder / "suites" / "made" / "cells.parquet" for folder in (old, new)]
    found, by_folder = compared(*files), compared(old, new)
    pd.testing.assert_frame_equal(comparing.summary(found), comparing.summary(by_folder))
    assert len(compared(files[0], new).changes) == len(by_folder.changes)
    older = pd.read_parquet(files[0]).drop(columns=["suite", "cell", "ledger", "stage", "score", "test_score"])
    older.to_parquet(files[0])
    assert compared(files[0], old).is_same, "a file of an older version is named by its folder"


def test_the_table_names_rows_and_intervals(version, capsys):
    assert main(["compare", str(version("old")), str(version("new", 0.1)), "suite=made"]) == 1
    printed = capsys.readouterr().out
    assert "+11.50 [+" in printed
    assert "8 changed" in printed


def test_bad_input_gets_one_clear_error(version, tmp_path, capsys):
    old = str(version("old"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.parquet").write_text(json.dumps({}))
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "other.parquet")
    cases = [
        ([old], "OLD NEW"),
        ([old, "/nowhere"], "no such folder or file"),
        ([old, str(tmp_path / "empty")], "holds no cells"),
        ([old, str(tmp_path / "text.parquet")], "not Parquet"),
        ([old, str(tmp_path / "other.parquet")], "lacks"),
        ([old, old, "suite=mode"], "did you mean 'made'"),
        ([old, old, "tolerance=-1"], "tolerance"),
        ([old, old, "tolerances=1"], "did you mean 'tolerance'"),
    ]
    for arguments, message in cases:
        assert main(["compare", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
