"""Two jobs of a hospital, from raw files to predictions and a statement: few commands, of which one fails first."""

import hashlib
import json
import shutil
import stat

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import dpopt
from dpopt.cli import main
from dpopt.workloads.data import catalogue, own

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
    assert "ranges.age='[0,100]'" in error
    assert "values.sex='[a,b]'" in error
    assert "drop='[NAME]'" in error
    assert {path.name for path in here.iterdir()} == before, "a failed command leaves nothing"

    assert dpopt_("fit", "from=patients.csv", *PUBLIC, *QUICK, "tuned=none", "to=model") == 0
    printed = capsys.readouterr()
    first = (here / "model" / "statement.txt").read_text().splitlines()[0]
    assert first.startswith("In words: whether all records of any one person were among the training data changes")
    assert "at most 7.39 (e to the power of epsilon)" in first
    assert first in printed.out
    assert "Choices: Whoever made this statement says that there was no other run" in printed.out
    assert "Defaults, which nobody chose for these data: delta, optimizer, batch_size." in printed.out
    assert f"for you alone to read: data/patients/, {here}/cache/tables/" in printed.out
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

    # Another key: what the command wrote before is written again. Nothing of the records stays.
    words = [word.replace("[0,100]", "[18,100]") for word in PUBLIC]
    assert dpopt_("fit", "from=patients.csv", *words, *QUICK, "keep=false", "to=again") == 0
    assert "has changed since data/patients.yaml was made (age): it is made again" in capsys.readouterr().out
    assert not list((here / "data").iterdir())
    assert not list(here.glob("cache/tables/*/*.npy"))

    # What is handed on predicts elsewhere, without data, and tells nothing that was not charged.
    (here / "elsewhere").mkdir()
    shutil.copytree("again", "elsewhere/model", ignore=shutil.ignore_patterns("private"))
    shutil.copy("patients.csv", "elsewhere/new.csv")
    monkeypatch.chdir(here / "elsewhere")
    assert dpopt_("predict", "model=model", "from=new.csv", "to=predictions.csv") == 0
    result = dpopt.load("model")
    assert (
        result.predict(frame.drop(columns="readmitted")).tolist()
        == pd.read_csv("predictions.csv")["prediction"].to_list()
    )
    assert result.curve == []
    assert not [key for key in result.record if key.startswith("test_")]


def test_what_is_handed_on_has_no_scores_and_copies_are_the_owners(here):
    assert dpopt_("fit", "from=patients.csv", *PUBLIC, *QUICK, "to=model") == 0
    record = json.loads((here / "model" / "record.json").read_text())
    full = dpopt.load("model")
    assert full.curve
    assert {key for key in full.record if key not in record} == {"test_loss", "test_accuracy", "train_seconds"}
    entry = (here / "data" / "patients.yaml").read_text()
    sums = [line.split(": ")[1] for line in entry.splitlines() if line.strip().startswith(("inputs:", "targets:"))]
    assert len([each for each in sums if len(each) == 64]) == 4
    assert "# Public with this file: the SHA-256 of the records" in entry
    handed = [path for path in (here / "model").iterdir() if path.name != "private"]
    for path in handed:
        text = path.read_bytes().decode(errors="replace")
        assert not [each for each in sums if len(each) == 64 and each in text], path
        assert f"{full.record['test_accuracy']:.4g}" not in text or path.suffix == ".safetensors"
    version = catalogue.entry("patients").version
    assert version not in (here / "model" / "statement.txt").read_text(), "it follows from the records"
    assert hashlib.sha256((here / "model" / "model.safetensors").read_bytes()).hexdigest() in str(full.statement())
    copies = own.copies("patients")
    assert len(copies) == 3
    for folder in [*copies, here / "model" / "private"]:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_rows_of_a_person_are_on_one_side_of_the_split(here):
    assert dpopt_("fit", "from=patients.csv", *PUBLIC, *QUICK, "to=model") == 0
    sides = [set(owners(split)) for split in ("train", "test")]
    assert not sides[0] & sides[1]
    assert dpopt.load("model").record["examples"] == len(sides[0])
    assert dpopt.load("model").record["unit"] == "person"


def owners(split):
    return pd.read_parquet(f"data/patients/{split}-00000-of-00001.parquet")["patient_id"]


def test_an_entry_that_somebody_changed_is_not_written_again(here, capsys):
    assert dpopt_("fit", "from=patients.csv", *PUBLIC, *QUICK, "to=model") == 0
    file = here / "data" / "patients.yaml"
    file.write_text(file.read_text().replace("none stated", "mine"))
    words = [word.replace("[0,100]", "[18,100]") for word in PUBLIC]
    assert dpopt_("fit", "from=patients.csv", *words, *QUICK, "keep=false", "to=again") == 2
    assert "move data/patients.yaml and data/patients/ away" in " ".join(capsys.readouterr().err.split())
    assert "mine" in file.read_text()
    assert (here / "data" / "patients").exists()


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
    assert "(size, splits): it is made again" in capsys.readouterr().out.replace("splits, size", "size, splits")
    assert dpopt_("predict", "model=small", "from=photos/normal", "to=small.csv") == 0
    assert len(pd.read_csv("small.csv")) == 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["from=patients.csv", "to=predictions.csv"], "expected the columns bmi too"),
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
