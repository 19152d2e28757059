"""Two jobs of a hospital, from raw files to predictions and a statement: few commands, of which one fails first."""

import hashlib
import json
import re
import shutil
import stat

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import dpopt
from dpopt import registry
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.workloads.data import catalogue

QUICK = ["epsilon=2", "accountant=rdp", "epochs=3"]
PUBLIC = [
    *("target=readmitted", "unit=patient_id", "drop=[admitted]", "ranges.age=[0,100]", "ranges.bmi=[10,60]"),
    *("values.sex=[F,M]", "values.children=[0,1,2]"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with made-up patients.csv and photos/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    monkeypatch.setenv("DPOPT_CACHE", str(tmp_path / "cache"))
    random, n = np.random.default_rng(0), 400
    frame = pd.DataFrame(
        {
            "patient_id": random.integers(1, 250, n),
            "admitted": pd.date_range("2020-01-01", periods=n, freq="5h").strftime("%Y-%m-%d"),
            "age": random.integers(18, 95, n).astype(float),
            "bmi": random.normal(27, 5, n).round(1),
            "sex": random.choice(["F", "M"], n),
            "children": random.integers(0, 3, n).astype(float),
        }
    )
    frame["readmitted"] = np.where(frame["age"] + random.normal(0, 10, n) > 55, "yes", "no")
    for column in ("bmi", "sex", "children"):
        frame.loc[random.random(n) < 0.1, column] = None
    frame.to_csv("patients.csv", index=False)
    for name in ("normal", "lesion"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(30):
            pixels = random.integers(0, 120, (16, 16, 3)) + (name == "lesion") * 110
            Image.fromarray(pixels.astype("uint8")).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path


def dpopt_(command, *words):
    return main([command, *words])


def encoded(frame):
    """Rows as the guide says: numbers scaled to [-1, 1] and 1 where missing, categories one-hot with one for others."""
    columns = []
    for name, low, high in (("age", 0, 100), ("bmi", 10, 60)):
        scaled = 2 * (frame[name].clip(low, high) - low) / (high - low) - 1
        columns += [scaled.fillna(0), frame[name].isna()]
    for name, values in (("sex", ["F", "M"]), ("children", [0, 1, 2])):
        columns += [*(frame[name] == value for value in values), ~frame[name].isin(values)]
    return torch.tensor(np.stack([column.to_numpy(np.float32) for column in columns], axis=1))


def test_a_table(here, capsys, monkeypatch):
    before = {path.name for path in here.iterdir()}
    assert dpopt_("fit", "from=patients.csv", "target=readmitted", *QUICK, "to=model") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "'ranges.age=[0,100]'" in error
    assert "'values.sex=[a,b]'" in error
    assert "drop='[NAME]'" in error
    assert {path.name for path in here.iterdir()} == before, "a failed command leaves nothing"

    assert dpopt_("fit", "from=patients.csv", *PUBLIC, *QUICK, "tuned=none", "to=model") == 0
    assert {path.name for path in here.iterdir()} == before | {"model"}, "no copy of the records stays"
    printed = capsys.readouterr()
    first = (here / "model" / "statement.txt").read_text().splitlines()[0]
    assert first.startswith("In words: whether all records of any one person were among the training data changes")
    assert "at most 7.39 (e to the power of epsilon)" in first
    assert first in printed.out
    assert "Choices: Whoever made this statement says that there was no other run" in printed.out
    assert "Defaults, which nobody chose for these data: average, batch_size, delta, optimizer." in printed.out
    frame = pd.read_csv("patients.csv")
    if frame["patient_id"].value_counts().max() > 4:
        assert "of which 4 count" in printed.err

    assert dpopt_("predict", "model=model", "from=patients.csv", "to=predictions.csv") == 0
    predictions = pd.read_csv("predictions.csv")
    weights = load_file("model/model.safetensors")
    hidden = torch.relu(encoded(frame) @ weights["1.weight"].T + weights["1.bias"])
    expected = (hidden @ weights["3.weight"].T + weights["3.bias"]).softmax(1)
    assert np.allclose(predictions[["p_no", "p_yes"]], expected, atol=1e-5)
    assert predictions["prediction"].tolist() == ["yes" if p else "no" for p in expected.argmax(1)]
    assert (predictions["prediction"] == frame["readmitted"]).mean() > 0.6

    # What is handed on predicts elsewhere, without data, and tells nothing that was not charged.
    (here / "elsewhere").mkdir()
    shutil.copytree("model", "elsewhere/model", ignore=shutil.ignore_patterns("private.json"))
    shutil.copy("patients.csv", "elsewhere/new.csv")
    monkeypatch.chdir(here / "elsewhere")
    assert dpopt_("predict", "model=model", "from=new.csv", "to=predictions.csv") == 0
    old = frame.assign(age=130.0, sex="unknown").head(3)
    old.to_csv("old.csv")
    capsys.readouterr()
    assert dpopt_("predict", "model=model", "from=old.csv", "to=of_old.csv") == 0
    assert "warning: x: values that were not stated for training (age 3, sex 3)" in capsys.readouterr().err
    result = dpopt.load("model")
    # A number outside its range counts as the nearer end.
    inside = frame.drop(columns="readmitted").assign(bmi=frame["bmi"].clip(10, 60))
    assert result.predict(inside).tolist() == pd.read_csv("predictions.csv")["prediction"].to_list()
    assert result.curve == []
    assert not [key for key in result.record if key.startswith("test_")]


def test_what_is_handed_on_has_no_scores_and_copies_are_the_owners(here):
    assert dpopt_("fit", "from=patients.csv", *PUBLIC, *QUICK, "keep=true", "to=model") == 0
    record = json.loads((here / "model" / "record.json").read_text())
    full = dpopt.load("model")
    assert full.curve
    assert {key for key in full.record if key not in record} == {"test_loss", "test_accuracy", "train_seconds"}
    entry = (here / "data" / "patients.yaml").read_text()
    sums = [line.split(": ")[1] for line in entry.splitlines() if line.strip().startswith(("inputs:", "targets:"))]
    assert len([each for each in sums if len(each) == 64]) == 4
    assert "# Public with this file: the SHA-256 of the records" in entry
    rows = [str(len(owners(split))) for split in ("train", "test")]
    handed = [path for path in (here / "model").iterdir() if path.name != "private.json"]
    for path in handed:
        text = path.read_bytes().decode(errors="replace")
        assert not [each for each in sums if len(each) == 64 and each in text], path
        assert path.suffix == ".safetensors" or not [n for n in rows if re.search(rf"\b{n}\b", text)], "rows count"
        assert f"{full.record['test_accuracy']:.4g}" not in text or path.suffix == ".safetensors"
    version = catalogue.entry("patients").version
    assert version not in (here / "model" / "statement.txt").read_text(), "it follows from the records"
    assert hashlib.sha256((here / "model" / "model.safetensors").read_bytes()).hexdigest() in str(full.statement())
    assert stat.S_IMODE((here / "data" / "patients").stat().st_mode) == 0o700
    assert stat.S_IMODE((here / "model" / "private.json").stat().st_mode) == 0o600


def test_rows_of_a_person_are_on_one_side_of_the_split(here, capsys):
    assert dpopt_("fit", "from=patients.csv", *PUBLIC, *QUICK, "keep=true", "to=model") == 0
    sides = [set(owners(split)) for split in ("train", "test")]
    assert not sides[0] & sides[1]
    assert dpopt.load("model").record["examples"] == len(sides[0])
    assert dpopt.load("model").record["unit"] == "person"
    # A suite, which counts rows, refuses the table.
    with pytest.raises(ConfigError, match="patient_id says whose its rows are, and a suite protects single rows"):
        registry.create_workload("table", data="patients").check()
    # A split that is there already is held to the same.
    rows = datasets.Dataset.from_pandas(pd.read_csv("patients.csv"))
    datasets.DatasetDict({"train": rows.select(range(300)), "test": rows.select(range(300, 400))}).save_to_disk("split")
    assert dpopt_("fit", "from=split", *PUBLIC, *QUICK, "to=other") == 2
    assert "they have rows in more than one split" in " ".join(capsys.readouterr().err.split())


def owners(split):
    return pd.read_parquet(f"data/patients/{split}-00000-of-00001.parquet")["patient_id"]


def test_two_models_of_one_name_keep_their_classes(here):
    """Both are of `photos`, with equal numbers and shapes of images, and other folders for the classes."""
    names = []
    for number, classes in enumerate([("normal", "lesion"), ("left", "right")]):
        for old, new in zip(("normal", "lesion"), classes, strict=True):
            (here / "photos" / old).rename(here / "photos" / new) if number else None
        assert dpopt_("fit", "from=photos", *QUICK, "batch_size=20", f"to=model{number}") == 0
        names.append(sorted(classes))
    results = [dpopt.load(f"model{number}") for number in range(2)]
    for result, expected in zip(results, names, strict=True):
        assert result.record["classes"] == expected
        assert set(result.predict("photos")) <= set(expected)


def test_cells_of_predictions_are_no_formulas(here):
    frame = pd.read_csv("patients.csv")
    frame["readmitted"] = np.where(frame["readmitted"] == "yes", "=1+1", "-1")
    frame.to_csv("patients.csv", index=False)
    assert dpopt_("fit", "from=patients.csv", *PUBLIC, *QUICK, "to=model") == 0
    assert dpopt_("predict", "model=model", "from=patients.csv", "to=predictions.csv") == 0
    predictions = pd.read_csv("predictions.csv", dtype=str)
    assert list(predictions) == ["record", "prediction", "p_-1", "p_'=1+1"]
    assert set(predictions["prediction"]) <= {"-1", "'=1+1"}


def test_photos(here, capsys):
    words = ["from=photos", *QUICK, "batch_size=20", "optimizer=adadp_equilibrium"]
    assert dpopt_("fit", *words, "options.arch=two_conv", "to=model") == 2
    assert "did you mean 'architecture'" in capsys.readouterr().err
    assert dpopt_("fit", *words, "to=model") == 0
    assert dpopt_("predict", "model=model", "from=photos", "to=predictions.csv") == 0
    predictions = pd.read_csv("predictions.csv")
    assert len(predictions) == 60
    result = dpopt.load("model")
    rows = []
    for name in predictions["record"]:
        pixels = np.asarray(Image.open(name), np.float32) / 255
        rows.append((pixels.transpose(2, 0, 1) - 0.5) / 0.5)
    with torch.no_grad():
        expected = result.model.eval()(torch.tensor(np.stack(rows))).softmax(1)
    assert np.allclose(predictions[["p_lesion", "p_normal"]], expected, atol=1e-5)
    assert result.predict("photos/lesion/0.png").tolist() == predictions["prediction"][:1].tolist()
    # Of another size: each is made as large as those of the training.
    Image.new("RGB", (40, 24)).save("wide.png")
    assert result.predict_proba(["wide.png", "photos/lesion/0.png"]).shape == (2, 2)
    assert dpopt_("fit", *words, "size=8", "to=small") == 0
    assert dpopt_("predict", "model=small", "from=photos/normal", "to=small.csv") == 0
    assert len(pd.read_csv("small.csv")) == 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["from=patients.csv", "to=predictions.csv"], "there is no column bmi"),
        (["from=nowhere.csv", "to=predictions.csv"], "expected a data frame or a CSV file"),
        (["from=patients.csv", "to=patients.csv"], "to: 'patients.csv' cannot be used; it exists"),
    ],
)
def test_what_cannot_be_predicted(words, message, here, capsys):
    assert dpopt_("fit", "from=patients.csv", *PUBLIC, *QUICK, "to=model") == 0
    if "bmi" in message:
        pd.read_csv("patients.csv").drop(columns="bmi").to_csv("patients.csv", index=False)
    capsys.readouterr()
    assert dpopt_("predict", "model=model", *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (here / "predictions.csv").exists()
