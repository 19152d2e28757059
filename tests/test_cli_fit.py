"""`dpopt fit`: from a file, a data set or a workload to a folder that `dpopt.load` reads."""

import math
import os
import stat
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

import dpopt
from dpopt import registry
from dpopt.cli import main
from dpopt.privacy import epsilon
from dpopt.workloads import data
from dpopt.workloads.data import own

PUBLIC = ["ranges.age=[18,90]", "ranges.income=[0,100]", "values.city=[a,b,c]"]
QUICK = ["epsilon=3", "accountant=rdp", "batch_size=200"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    age, income, city = random.integers(18, 90, 400), random.normal(50, 15, 400), random.choice(list("abc"), 400)
    label = np.where(age + income > 104, "yes", "no")
    pd.DataFrame({"age": age, "income": income, "city": city, "label": label}).to_csv("people.csv", index=False)
    return tmp_path


def test_from_a_file_to_a_folder(here, capsys):
    words = ["from=people.csv", "target=label", *PUBLIC, "optimizer=dp_adam", "fields.lr=0.05", "options.hidden=8"]
    assert main(["fit", *words, *QUICK, "epochs=20", "to=folder", "keep=true"]) == 0
    printed = capsys.readouterr().out
    model = registry.create_workload("table", data="people", hidden=8).model()
    result = dpopt.load("folder", model)
    assert str(result.statement()) in printed
    assert epsilon(result.ledger, result.record["delta"], "rdp") <= 3 == result.record["epsilon_target"]
    assert result.record["delta"] == result.record["examples"] ** -1.1
    assert result.record["seed_is_secret"]
    test = data.table("people", "test")
    right = float((model(test.x).argmax(1) == test.y).double().mean())
    assert right == pytest.approx(result.record["test_accuracy"])
    assert f"test_accuracy = {right:.4g}" in printed
    assert right > 0.7
    words = ["data=people", "optimizer=adadp", *QUICK, "options.hidden=0", "average=0.9", "epochs=1", "to=linear"]
    assert main(["fit", *words]) == 0
    linear = dpopt.load("linear", registry.create_workload("table", data="people", hidden=0).model())
    assert linear.record["average"] == 0.9
    assert "ADADP" in linear.record["optimizer"]


def test_a_workload_and_a_checkpoint(here):
    words = ["workload=synthetic_logreg", "options.dim=3", "optimizer=dp_sgd", "epsilon=inf", "epochs=0.5"]
    assert main(["fit", *words, "checkpoint=kept", "to=one"]) == 0
    assert main(["fit", *words, "checkpoint=kept", "to=two"]) == 0
    one, two = (dpopt.load(name, torch.nn.Linear(3, 2)) for name in ("one", "two"))
    assert torch.equal(one.model.weight, two.model.weight)
    assert two.record["resumed_at"] == len(one.ledger)
    assert one.record["batch_size"] == 256
    assert math.isinf(one.record["epsilon"])


SAID = ["optimizer=dp_sgd", *QUICK, "epochs=4", "to=folder"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["from=people.csv", *SAID[:-1]], "the key `to` is missing"),
        (["from=people.csv", *SAID[:-1], "to=people.csv"], "to: 'people.csv' cannot be used; it exists"),
        (SAID, "expected one of workload=NAME, data=NAME and from=PATH"),
        (["workload=digits_mlp", "data=mnist", *SAID], "fit: ['workload', 'data'] cannot be used; expected one of"),
        (["from=people.csv", "fields.lr=1", *SAID[1:]], "fields: {'lr': 1} cannot be used; expected them with optim"),
        (["data=mnist", "keep=true", *SAID], "expected from=PATH"),
        (["target=label", *SAID], "expected from=PATH"),
        (["from=nowhere.csv", *SAID], "from: 'nowhere.csv' cannot be used; there is nothing"),
        (["from=People.csv", *SAID], "name: 'People' cannot be used; expected words of small letters"),
        (["from=people.csv", "drop=[age,income,city]", *SAID], "expected an input beside the target"),
        (["from=people.csv", "target=labl", *SAID], "did you mean 'label'"),
        (["from=people.csv", "ranges.agee=[0,1]", *SAID], "did you mean 'age'"),
        (["from=people.csv", *SAID[1:], "optimizer=dp_sdg"], "did you mean 'dp_sgd'"),
        (["from=people.csv", *SAID, "device=cuda:77"], "device: 'cuda:77'"),
        (["workload=digits_mpl", *SAID], "did you mean 'digits_mlp'"),
    ],
)
def test_what_cannot_be_used_is_one_error_before_any_work(words, message, here, capsys):
    assert main(["fit", *words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("error: ")
    assert message in error
    assert sorted(path.name for path in here.iterdir() if path.name != "cache") == ["people.csv"]


def test_what_is_public_has_to_be_stated(here, capsys):
    assert main(["fit", "from=people.csv", *SAID]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "say what is public of each, whatever the records are" in error
    assert "'ranges.age=[0,100]'" in error
    assert sorted(path.name for path in here.iterdir() if path.name != "cache") == ["people.csv"]


def test_nothing_of_the_records_stays_unless_that_is_asked_for(here, capsys, monkeypatch):
    monkeypatch.setenv("DPOPT_CACHE", str(here / "cache"))
    words = ["fit", "from=people.csv", *PUBLIC, "optimizer=dp_sgd", *QUICK, "epochs=0.5"]
    places = []
    monkeypatch.setattr(own, "keep", partial(noted_place, places, own.keep))
    assert main([*words, "checkpoint=run", "to=one"]) == 0
    assert {path.name for path in here.iterdir()} == {"people.csv", "one", "run"}
    assert os.environ["DPOPT_CACHE"] == str(here / "cache")
    assert main([*words, "checkpoint=run", "to=two"]) == 0
    one, two = (dpopt.load(name) for name in ("one", "two"))
    assert torch.equal(one.model[1].weight, two.model[1].weight)
    assert two.record["resumed_at"] == len(one.ledger) > 0
    # A mistake that shows late leaves nothing either, so the corrected command works.
    assert main([*words, "keep=true", "engine=none", "to=three"]) == 2
    assert main([*words, "keep=true", "batch_size=1e6", "to=three"]) == 2
    assert {path.name for path in here.iterdir()} == {"people.csv", "one", "two", "run"}
    assert main([*words, "keep=true", "to=three"]) == 0
    assert {path.name for path in here.iterdir()} == {"people.csv", "one", "two", "three", "run", "data"}
    assert places == [(0o700, ["cache", "people"])]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (here / "data" / "people").iterdir()] == [0o600] * 2
    assert data.entry("people").columns["age"].range == (18, 90)
    # What is kept is touched by nothing but its owner, whatever a later command does.
    before = {path: path.read_bytes() for path in (here / "data").rglob("*.*")}
    assert main([*words, "keep=true", "to=four"]) == 2
    assert main([*words, "to=one"]) == 2
    assert main([*[word for word in words if "age" not in word], "ranges.age=[0,90]", "to=four"]) == 0
    assert {path: path.read_bytes() for path in (here / "data").rglob("*.*")} == before
    assert "data/people exists" in " ".join(capsys.readouterr().err.split())


def noted_place(places, keep, entry):
    folder = entry.folder.parent
    places.append((stat.S_IMODE(folder.stat().st_mode), sorted(path.name for path in folder.iterdir())))
    return keep(entry)
