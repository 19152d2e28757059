"""Data of one's own: what `dpopt new data` writes where a user stands, what is found there, and what is refused."""

import hashlib
import re
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image

from dpopt import registry
from dpopt.cli import main
from dpopt.cli.listing import LISTED
from dpopt.errors import ConfigError
from dpopt.runs.prepare import prepare
from dpopt.suites import plan as planning
from dpopt.suites.suite import load_suite
from dpopt.workloads import data
from dpopt.workloads.data import catalogue


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder that is the current one, without DPOPT_DATA."""
    monkeypatch.setenv("DPOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def picture(path, seed, shape=(8, 8, 3)):
    """An image of random pixels, which are returned."""
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def photos(root, each=10, seed=0, shape=(8, 8, 3)):
    """Two classes of images in folders: the pixels by path, in the order of the paths."""
    paths = [root / name / f"test_{number:02}.png" for name in ("rose", "tulip") for number in range(each)]
    return {path: picture(path, seed + number, shape) for number, path in enumerate(paths)}


def people(rows=60):
    generator = np.random.default_rng(0)
    age = generator.integers(18, 90, rows).astype(float)
    age[3] = np.nan
    job = generator.choice(["nurse", "cook", "smith"], rows).astype(object)
    job[4] = None
    return pd.DataFrame({"age": age, "job": job, "is member": age > 50, "income": np.where(age > 40, "high", "low")})


SHORT = ["batch_size=20", "optimizers=[adadp_equilibrium]", "epsilon=8", "seeds=0", "epochs=1", "accountant=rdp"]
STATED = ["target=income", "ranges.age=[20,80]", "values.job=[nurse, cook]", "values.is member=[false, true]"]


@pytest.fixture
def stored(here):
    """The table `people`, whose columns are stated."""
    people().to_csv("people.csv", index=False)
    assert new("people", "from=people.csv", *STATED) == 0


def new(*arguments):
    return main(["new", "data", *map(str, arguments)])


def refused(capsys, *arguments):
    """The error of `new data`, which leaves nothing behind."""
    before = sorted(Path().rglob("*"))
    assert new(*arguments) == 2
    assert sorted(Path().rglob("*")) == before
    return " ".join(capsys.readouterr().err.split())


def for_tests(rows, share):
    """Row numbers by the rule that the entry states."""
    places = [int(hashlib.sha256(f"{row}".encode()).hexdigest()[:16], 16) / 16**16 for row in range(rows)]
    return [row for row, place in enumerate(places) if place < share]


# Images


def test_a_folder_of_classes(here):
    pixels = list(photos(here / "photos").values())
    (here / "photos" / "rose" / "README.md").write_text("no image")
    assert new("flowers", "from=photos", "test=0.3") == 0
    dataset, rows = data.entry("flowers"), for_tests(20, 0.3)
    assert (dataset.kind, dataset.classes, dataset.class_names, dataset.size) == ("image", 2, ("rose", "tulip"), 8)
    assert (dataset.mean, dataset.std, dataset.licence) == ((0.5,) * 3, (0.5,) * 3, "none stated")
    assert "no record has a part in" in dataset.note
    assert "SHA-256 begins below 0.3" in dataset.note
    expected = {"test": rows, "train": [row for row in range(20) if row not in rows]}
    for split, chosen in expected.items():
        x, y = data.images("flowers", split)
        assert np.array_equal(x, np.stack([pixels[row].transpose(2, 0, 1) for row in chosen]))
        assert y.tolist() == [row // 10 for row in chosen]


def test_folders_of_splits(here):
    for split, each in (("train", 3), ("test", 2)):
        photos(here / "photos" / split, each, shape=(6, 6))
    assert new("flowers", "from=photos") == 0
    dataset = data.entry("flowers")
    assert {split: part.records for split, part in dataset.splits.items()} == {"train": 6, "test": 4}
    assert (dataset.channels, "SHA-256" in dataset.note) == (1, False)
    assert data.images("flowers", "test").x.shape == (4, 6, 6)


def test_images_that_differ_are_resized_where_that_is_asked_for(here):
    picture(here / "photos" / "rose" / "wide.png", 0, (8, 20, 3))
    photos(here / "photos")
    assert new("varied", "from=photos") == 0
    assert data.entry("varied").size is None
    with pytest.raises(ConfigError, match=r"varied\.size: None .*vary in size"):
        data.images("varied", "train")
    assert new("small", "from=photos", "size=4") == 0
    assert data.entry("small").size == 4
    assert torch.equal(data.images("small", "train").x, data.images("varied", "train", 4).x)


def test_an_image_that_cannot_be_read_is_named(here, capsys):
    path = next(iter(photos(here / "photos")))
    path.write_bytes(path.read_bytes()[:60])
    assert re.search(r"from: .*photos/rose/test_00\.png.*expected an image", refused(capsys, "flowers", "from=photos"))


def test_images_of_another_folder_of_the_same_name(here, monkeypatch):
    """The cache tells them apart by the checksums of the entries, and without those by the files."""
    loaded = {}
    for is_known in (True, False):
        for folder, seed in (("one", 0), ("two", 100)):
            (here / f"{folder}{is_known}").mkdir()
            monkeypatch.chdir(here / f"{folder}{is_known}")
            pixels = photos(Path("photos"), seed=seed)
            assert new("flowers", "from=photos") == 0
            if not is_known:
                content = yaml.safe_load(Path("data/flowers.yaml").read_text())
                for part in content["splits"].values():
                    part.pop("inputs"), part.pop("targets")
                Path("data/flowers.yaml").write_text(yaml.safe_dump(content))
            train = [row for row in range(20) if row not in for_tests(20, 0.2)]
            expected = np.stack(list(pixels.values()))[train].transpose(0, 3, 1, 2)
            loaded[folder] = data.images("flowers", "train").x
            assert np.array_equal(loaded[folder], expected)
        assert not torch.equal(loaded["one"], loaded["two"])


# Tables and texts


def test_a_table_and_what_becomes_of_it(stored):
    """Against scikit-learn's encoders."""
    from sklearn.preprocessing import OneHotEncoder

    x, y = data.table("people", "train")
    frame = people().drop(index=for_tests(60, 0.2))
    assert y.tolist() == [["high", "low"].index(income) for income in frame["income"]]
    scaled = (frame["age"].clip(20, 80).fillna(50) - 50) / 30
    encoder = OneHotEncoder(categories=[["nurse", "cook"]], handle_unknown="ignore", sparse_output=False)
    jobs = encoder.fit(frame[["job"]]).transform(frame[["job"]])
    member = frame["is member"].to_numpy()
    columns = [scaled, frame["age"].isna(), *jobs.T, 1 - jobs.sum(1), ~member, member, np.zeros(len(frame))]
    assert np.allclose(x, np.stack(columns, axis=1))


def test_what_columns_may_hold_is_not_taken_from_the_records(here, capsys):
    people().to_csv("people.csv", index=False)
    assert new("people", "from=people.csv", "target=income", "ranges.age=[20,80]") == 0
    assert "state in data/people.yaml what is public of job, is member" in capsys.readouterr().out
    content = yaml.safe_load(Path("data/people.yaml").read_text())
    stated = {"age": {"range": [20, 80]}, "job": {"values": "???"}, "is member": {"values": "???"}}
    assert content["columns"] == stated
    with pytest.raises(ConfigError, match=r"people\.columns: \['job', 'is member'\].*data/people\.yaml.*no private"):
        registry.create_workload("table", data="people").check()
    content["columns"] |= {"job": {"values": ["nurse"]}}
    del content["columns"]["is member"]
    Path("data/people.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    assert data.table("people", "train").x.shape[1] == 2 + 2


def test_what_the_records_show_is_taken_where_it_is_public(here):
    people().to_csv("people.csv", index=False)
    assert new("people", "from=people.csv", "target=income", "public=true") == 0
    columns = data.entry("people").columns
    ages = people()["age"]
    assert columns["age"].range == (ages.min(), ages.max())
    assert columns["job"].values == ("cook", "nurse", "smith")
    assert columns["is member"].values == ("False", "True")


def test_a_saved_dataset_keeps_its_splits_and_class_names(here):
    rows = {"idx": [0, 1, 2], "text": ["a", "b", "ü"], "label": [1, 0, 1]}
    split = datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    datasets.DatasetDict(train=split, validation=split.select([0]), test=split.select([2, 1])).save_to_disk("saved")
    assert new("reviews", "from=saved", "inputs=text") == 0
    dataset = data.entry("reviews")
    assert (dataset.kind, dataset.class_names) == ("text", ("no", "yes"))
    assert list(dataset.splits) == ["train", "validation", "test"]
    assert data.texts("reviews", "train")[0] == ("a", "b", "ü")
    assert data.texts("reviews", "test")[1].tolist() == [1, 0]


def test_one_column_of_strings_is_texts_unless_it_is_said_to_be_categories(here, capsys):
    people()[["job", "income"]].fillna("none").to_csv("jobs.csv", index=False)
    assert new("jobs", "from=jobs.csv", "target=income") == 0
    assert data.entry("jobs").kind == "text"
    assert "expected them of a table" in refused(capsys, "table", "from=jobs.csv", "target=income", "public=true")
    assert new("table", "from=jobs.csv", "target=income", "values.job=[nurse]") == 0
    assert data.entry("table").columns["job"].values == ("nurse",)


def test_a_saved_dataset_of_images(here):
    pixels = photos(here / "photos", 3)
    rows = {"picture": [str(path) for path in pixels], "label": [0, 0, 0, 1, 1, 1], "id": list(range(6))}
    datasets.Dataset.from_dict(rows).cast_column("picture", datasets.Image()).save_to_disk("saved")
    assert new("flowers", "from=saved", "test=0.5") == 0
    train = [row for row in range(6) if row not in for_tests(6, 0.5)]
    expected = np.stack(list(pixels.values()))[train].transpose(0, 3, 1, 2)
    assert np.array_equal(data.images("flowers", "train").x, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"from: None .*expected from=PATH"),
        (["from=nowhere"], r"from: 'nowhere' .*there is nothing"),
        (["from=empty"], r"from: 'empty' .*expected CLASS/IMAGE"),
        (["from=people.csv"], r"target: 'label' .*known: age, income, is member, job"),
        (["from=people.csv", "target=age"], r"expected a class for each record"),
        (["from=people.csv", "target=income", "ranges.agge=[0,1]"], r"ranges: 'agge' .*did you mean 'age'"),
        (["from=people.csv", "target=income", "ranges.job=[0,1]"], r"ranges\.job.*expected `values`"),
        (["from=people.csv", "target=income", "ranges.age=[9,1]"], r"range: \(9\.0, 1\.0\).*smallest"),
        (["from=people.csv", "target=income", "values.income=[high]"], r"at least two classes"),
        (
            ["from=people.csv", "target=income", "values.income=[high,no]"],
            r"train\[\d+\]\.income: 'low' .*one of the classes",
        ),
        (["from=people.csv", "target=income", "test=0.00001"], r"of 60 records 0 would be for tests"),
        (["from=people.csv", "target=income", "inputs=age"], r"inputs: 'age' .*images or of texts"),
        (["from=people.csv", "target=income", "size=8"], r"size: 8 .*of images.*table"),
        (["from=people.csv", "target=income", "range.age=[0,1]"], r"range\.age.*did you mean 'ranges'"),
    ],
)
def test_what_cannot_be_used_writes_nothing(arguments, message, here, capsys):
    people().to_csv("people.csv", index=False)
    Path("empty").mkdir()
    assert re.search(message, refused(capsys, "people", *arguments))


def test_nothing_is_overwritten(stored, capsys):
    assert "data/people exists" in refused(capsys, "people", "from=people.csv", *STATED)
    assert "a data set of that name is known" in refused(capsys, "mnist", "from=people.csv", *STATED)


# The search path


def test_entries_of_the_current_folder(here, stored, monkeypatch):
    Path("data/notes.yaml").write_text("kind: of something else\n")
    Path("data/large.yaml").write_bytes(b"- 1\n" * 10**6)
    assert "people" in data.entries()
    assert {"notes", "large"}.isdisjoint(data.entries())
    rows = {row["data set"]: row for row in LISTED["data"]()}
    assert {name: row["note"] for name, row in rows.items()} == {n: each.note for n, each in data.entries().items()}
    cells = list(rows["people"].values())
    assert cells[:5] == ["people", "table", "49 train + 11 test", "2", "none stated"]
    assert cells[5:7] == ["local folder only, by data/people.yaml", "own data"]
    monkeypatch.chdir(here.parent)
    assert "people" not in data.entries()


def test_a_shipped_name_means_the_shipped_data(here):
    Path("data").mkdir()
    Path("data/mnist.yaml").write_text("kind: image\nsplits: {}\n")
    with pytest.raises(ConfigError, match=r"data: 'mnist' .*dpopt's: give that of data/mnist\.yaml another"):
        data.entry("mnist")


def test_an_entry_that_cannot_be_used_names_its_file(here):
    Path("data").mkdir()
    for text, message in {
        "splits: 3\n": r"data/mine\.yaml\.splits: 3 .*expected a mapping",
        "splits: {}\nfolder: x\n": r"data/mine\.yaml: \['folder'\] .*not for a file to say",
        "splits: {}\n": r"data/mine\.yaml: .*the key `kind` is missing",
        "splits: [\n": r"mine\.yaml.*no YAML",
    }.items():
        Path("data/mine.yaml").write_text(text)
        catalogue._with_own.cache_clear()
        with pytest.raises(ConfigError, match=message):
            data.entry("mine")


def test_files_of_an_entry_lie_beside_it_or_in_the_data_folder(here, stored, monkeypatch):
    first = data.table("people", "test")
    Path("elsewhere").mkdir()
    Path("data/people").rename("elsewhere/people")
    (absent,) = data.missing("people")
    assert re.search(r"put SPLIT-\*\.parquet into .*data/people, or set DPOPT_DATA", str(absent))
    monkeypatch.setenv("DPOPT_DATA", "elsewhere")
    assert data.missing("people") == []
    monkeypatch.setenv("DPOPT_CACHE", str(here / "another"))
    assert torch.equal(data.table("people", "test").x, first.x)


def test_a_run_is_of_one_version_of_the_data(stored):
    """Whatever decides the numbers is part of a workload's identity; what is only said of them is not."""
    file, before = Path("data/people.yaml"), registry.create_workload("table", data="people")
    assert re.fullmatch(r"people@[0-9a-f]{8}", before.data)
    assert registry.create_workload("table", data=before.data) == before
    file.write_text(file.read_text().replace("own data", "me"))
    catalogue._with_own.cache_clear()
    assert registry.create_workload("table", data="people") == before
    file.write_text(file.read_text().replace("80.0", "90.0"))
    catalogue._with_own.cache_clear()
    after = registry.create_workload("table", data="people")
    assert registry.spec("workload", "table", after) != registry.spec("workload", "table", before)
    with pytest.raises(ConfigError, match=rf"data/people\.yaml is another by now: {after.data}"):
        registry.from_spec("workload", registry.spec("workload", "table", before))


def test_cells_on_own_data_release_on_the_grid(stored):
    suite = load_suite({"name": "own", "workloads": [{"name": "table", "data": "people"}, "digits_mlp"]}, SHORT)
    own, public = (entry.cell for entry in planning.plan(suite))
    assert (own.grid, public.grid) == (True, False)
    assert prepare(own, device="cpu").oracle.grid


def test_a_changed_file_is_refused(stored):
    file = Path("data/people/train-00000-of-00001.parquet")
    changed = pd.read_parquet(file)
    changed.loc[0, "age"] = 33.5
    changed.to_parquet(file, index=False)
    with pytest.raises(ConfigError, match=r"people\.train\.columns: .*differ from the known"):
        data.table("people", "train")
