"""Data sets: what the entries say, and loading from Parquet files in a hub's layout."""

import hashlib
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from fabricated import encoded
from PIL import Image

from dpopt.errors import ConfigError
from dpopt.fields import cache_root
from dpopt.workloads import data
from dpopt.workloads.data import catalogue, records, source
from dpopt.workloads.data.catalogue import SplitEntry

pytestmark = pytest.mark.usefixtures("root")
BICUBIC = Image.Resampling.BICUBIC


def write(root, name, split, columns, files=1):
    """A split in the hub's layout, in as many files as asked for."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    (root / name).mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    step = -(-len(table) // files)
    for number in range(files):
        file = root / name / f"{split}-{number:05}-of-{files:05}.parquet"
        write_table(table.slice(number * step, step), file)


@pytest.fixture
def register(monkeypatch):
    """A function that puts an entry like a known one, with other fields, among the known ones."""

    def add(like, name="tiny", records=4, sums=("", ""), **changes):
        splits = {split: SplitEntry(split, records, *sums) for split in ("train", "test")}
        dataset = replace(catalogue.entry(like), **{"name": name, "splits": splits} | changes)
        monkeypatch.setitem(catalogue.entries(), name, dataset)
        return dataset

    return add


def pictures(*shapes, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


def sums_of(arrays, labels):
    return records.of_arrays(arrays), records.of_arrays([np.asarray(labels, dtype="<i8")])


GREY, LABELS = pictures(*[(28, 28)] * 4), [3, 1, 9, 0]
CODED = [encoded(pixels) for pixels in GREY]


@pytest.fixture
def grey(root, register):
    """Four images of 28 x 28 with known checksums."""
    for split in ("train", "test"):
        write(root, "tiny", split, {"image": CODED, "label": LABELS}, files=2)
    register("mnist", sums=sums_of(GREY, LABELS))


def test_colour_images_have_their_channels_first(root, register, monkeypatch):
    """In batches, of which the last one is smaller."""
    monkeypatch.setattr(source, "ROWS", 4)
    pixels, labels = pictures(*[(32, 32, 3)] * 10), list(range(10))
    write(root, "tiny", "train", {"img": [encoded(p) for p in pixels], "label": labels})
    register("cifar10", records=10, sums=sums_of(pixels, labels))
    x, y = data.images("tiny", "train")
    assert np.array_equal(x, np.stack(pixels).transpose(0, 3, 1, 2))
    assert y.tolist() == labels


def test_images_that_vary_become_centre_squares(root, register):
    """And those of other modes are converted."""
    wide, high, square = pictures((40, 80, 3), (90, 30, 3), (20, 20, 3))
    write(root, "tiny", "train", {"image": [encoded(p) for p in (wide, high, square)], "label": [0, 1, 2]})
    register("food101", records=3)
    x, _ = data.images("tiny", "train", size=20)
    smaller = [np.asarray(Image.fromarray(p).resize(s, BICUBIC)) for p, s in ((wide, (40, 20)), (high, (20, 60)))]
    expected = np.stack([smaller[0][:, 10:30], smaller[1][20:40], square])
    assert np.array_equal(x, expected.transpose(0, 3, 1, 2))
    assert data.images("tiny", "train", size=8).x.shape == (3, 3, 8, 8)
    dull, clear = pictures((5, 5), (5, 5, 4))
    write(root, "modes", "train", {"image": [encoded(dull), encoded(clear)], "label": [0, 1]})
    register("food101", "modes", records=2)
    x, _ = data.images("modes", "train", size=5)
    assert np.array_equal(x, np.stack([np.stack([dull] * 3), clear[..., :3].transpose(2, 0, 1)]))


def test_other_files_without_known_checksum_are_decoded_anew_and_must_agree(root, register):
    register("mnist", records=2)
    one, two = pictures((28, 28), (28, 28))
    columns = {"image": [encoded(one), encoded(two)], "label": [0, 1]}
    for split in ("train", "test"):
        write(root, "tiny", split, columns)
    first, before = data.images("tiny", "train"), data.fingerprint("tiny")
    write(root, "tiny", "train", columns | {"other": ["x" * 99] * 2})
    assert data.fingerprint("tiny") != before
    assert torch.equal(data.images("tiny", "train").x, first.x)
    write(root, "tiny", "train", columns | {"image": [encoded(two), encoded(one)], "other": ["x", "y"]})
    with pytest.raises(ConfigError, match=r"tiny\.train\.image.*loaded first.*delete"):
        data.images("tiny", "train")


def test_the_size_is_part_of_what_is_kept_but_not_of_the_checksum(root, register):
    register("food101", records=1)
    for split in ("train", "test"):
        write(root, "tiny", split, {"image": [encoded(pictures((6, 6, 3))[0])], "label": [0]})
    assert data.fingerprint("tiny")["resizing"] == 1
    assert [data.images("tiny", "train", size).x.shape[-1] for size in (2, 3, 2)] == [2, 3, 2]


@pytest.mark.parametrize(
    ("like", "inputs", "targets"),
    [("sst2", ("", "one", "ünï\x00 two"), [1, 0, 1]), ("e2e_nlg", ("name[A]", "name[B]"), ("A is.", "B is."))],
)
def test_texts_and_pairs(root, register, like, inputs, targets):
    dataset, is_pairs = catalogue.entry(like), like == "e2e_nlg"
    write(root, "tiny", "train", {dataset.inputs: list(inputs), dataset.targets: list(targets)}, files=2)
    of_targets = records.of_texts(targets) if is_pairs else sums_of([], targets)[1]
    register(like, records=len(inputs), sums=(records.of_texts(inputs), of_targets))
    loaded, labels = data.texts("tiny", "train")
    assert loaded == ((inputs, targets) if is_pairs else inputs)
    assert (labels.dtype, labels.tolist()) == (torch.int64, [0, 0] if is_pairs else targets)


def test_checksum_of_texts_tells_where_one_ends():
    assert records.of_texts(["ab", "c"]) != records.of_texts(["a", "bc"])
    lengths = (2).to_bytes(8, "little") + (1).to_bytes(8, "little")
    assert records.of_texts(["é", "c"]) == hashlib.sha256(lengths + "éc".encode()).hexdigest()


PICTURE = CODED[0]
BROKEN = {
    "labels": ({"image": CODED, "label": [3, 1, 9, 1]}, r"tiny\.train\.label: .*differ from the known"),
    "column": ({"img": [PICTURE] * 4, "label": [0] * 4}, r"tiny\.train: \['img', 'label'\].*columns image and label"),
    "count": ({"image": [PICTURE] * 3, "label": [0] * 3}, r"tiny\.train: 3 .*expected 4 records"),
    "pixels": ({"image": [PICTURE] * 4, "label": [3, 1, 9, 0]}, r"tiny\.train\.image: .*differ from the known"),
    "range": ({"image": [PICTURE] * 4, "label": [0, 1, 2, 10]}, r"tiny\.train\.label.*numbers from 0 to 9"),
    "missing": ({"image": [PICTURE] * 4, "label": [0, 1, None, 2]}, r"tiny\.train\[2\].*label is missing"),
    "no image": ({"image": [PICTURE, None] * 2, "label": [0] * 4}, r"tiny\.train\[1\]\.image.*expected an image"),
    "bytes": (
        {"image": [PICTURE, {"bytes": b"x", "path": None}] * 2, "label": [0] * 4},
        r"tiny\.train\[1\]\.image.*expected an image",
    ),
    "shape": (
        {"image": [encoded(pictures((28, 27))[0])] * 4, "label": [0] * 4},
        r"tiny\.train\[0\]\.image: \(27, 28\).*28 x 28 pixels",
    ),
}


@pytest.mark.parametrize(("columns", "message"), BROKEN.values(), ids=BROKEN)
def test_other_records_are_refused_and_not_kept(grey, root, columns, message):
    for file in (root / "tiny").iterdir():
        file.unlink()
    write(root, "tiny", "train", columns)
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            data.images("tiny", "train")
    assert not [path for path in (cache_root() / "images").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sentence": ["a", None], "label": [0, 1]}, r"tiny\.train\[1\].*sentence is missing"),
        ({"sentence": [1, 2], "label": [0, 1]}, r"tiny\.train\[0\]\.sentence: 1 .*expected a text"),
        ({"sentence": ["a", "b"], "label": [0, 0]}, r"tiny\.train\.label: .*differ from the known"),
        ({"sentence": ["ab", ""], "label": [0, 1]}, r"tiny\.train\.sentence: .*differ from the known"),
    ],
)
def test_other_texts_are_refused(root, register, columns, message):
    write(root, "tiny", "train", columns)
    register("sst2", records=2, sums=(records.of_texts(["a", "b"]), sums_of([], [0, 1])[1]))
    with pytest.raises(ConfigError, match=message):
        data.texts("tiny", "train")


@pytest.mark.parametrize("begins", [b"no", b"PAR1"])
def test_a_file_that_is_not_parquet_or_breaks_off(grey, root, begins):
    """It is read once: what was decoded before is not looked at again."""
    first = data.images("tiny", "test")
    for file in (root / "tiny").glob("test-*"):
        file.write_text("not read again")
    assert torch.equal(data.images("tiny", "test").x, first.x)
    file = next((root / "tiny").glob("train-*"))
    rest = file.read_bytes()[500:] if begins == b"PAR1" else b""  # the footer, and so the counts, are whole
    file.write_bytes(begins + bytes(496) + rest)
    with pytest.raises(ConfigError, match=r"(?s)tiny: .*cannot be loaded.*set DPOPT_DATA.*ylecun/mnist"):
        data.images("tiny", "train")


def test_a_missing_split_is_found_by_a_cheap_look(grey, root):
    assert data.missing("tiny") == []
    for file in (root / "tiny").glob("test-*"):
        file.unlink()
    (absent,) = data.missing("tiny")
    assert re.search(r"DPOPT_DATA.*tiny/test-\*\.parquet.*ylecun/mnist", str(absent))
    assert (absent.kind, absent.name, absent.hub) == ("data", "tiny", "")


def test_a_set_of_the_hub_that_was_never_loaded(monkeypatch, tmp_path):
    """It is missing until the hub's own cache holds it; whether the hub is asked for it is said by HF_HUB_OFFLINE."""
    monkeypatch.delenv("DPOPT_DATA")
    (absent,) = data.missing("cifar100_subset")  # which is on no hub
    assert re.search(r"DPOPT_DATA: None .*cifar100_subset/SPLIT-\*\.parquet$", str(absent))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    for is_offline, hub in ((False, "uoft-cs/cifar100"), (True, "")):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
        (absent,) = data.missing("cifar100")
        assert absent.hub == hub
        assert "go online once to load uoft-cs/cifar100" in str(absent)
    (tmp_path / "uoft-cs___cifar100").mkdir()
    assert data.missing("cifar100") == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: data.entry("minst"), "did you mean 'mnist'"),
        (lambda: data.images("mnist", "tset"), "did you mean 'test'"),
        (lambda: data.texts("mnist", "train"), "kind text or pairs, not image"),
        (lambda: data.images("sst2", "train"), "kind image, not text"),
        (lambda: data.images("mnist", "train", 32), r"mnist\.size: 32 .*28 x 28"),
        (lambda: data.images("food101", "train"), r"food101\.size: None .*vary in size"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": (0.5, 0.5)}, "mean"),
        ({"std": (1.0, 1.0, 1.0)}, "mean"),
        ({"classes": 0}, "classes"),
        ({"splits": {"train": SplitEntry("train", 3)}}, "test"),
    ],
)
def test_an_entry_that_contradicts_itself(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(catalogue.entry("mnist"), **changes)
    with pytest.raises(ConfigError, match="both or of none"):
        SplitEntry("train", 3, inputs="abc")


# The hub


@pytest.fixture
def hub(grey, root, monkeypatch):
    """Loads from the folder when the hub is asked, and returns the arguments that it was asked with."""
    import datasets

    asked, load = [], datasets.load_dataset

    def from_folder(*arguments, split, **others):
        asked.append((*arguments, split, others))
        files = [str(file) for file in sorted((root / "tiny").glob(f"{split}-*"))]
        return load("parquet", data_files={split: files}, split=split, cache_dir=str(root / "hub"))

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    monkeypatch.delenv("DPOPT_DATA")
    return asked


def test_the_hub_gives_the_same_as_the_folder(hub, register):
    """It is asked once, and not by a cheap look."""
    register("mnist", config="c", revision="r", sums=sums_of(GREY, LABELS))
    data.missing("tiny")
    sums = [*sums_of(GREY, LABELS)]
    assert data.fingerprint("tiny") == {"name": "tiny", "splits": {"train": sums, "test": sums}}
    assert not hub
    for _ in range(2):
        x, y = data.images("tiny", "train")
    assert hub == [("ylecun/mnist", "c", "train", {"revision": "r"})]
    assert np.array_equal(x, np.stack(GREY))
    assert y.tolist() == LABELS


def test_without_known_checksums_the_hub_revision_decides(hub, register):
    register("mnist")
    first, again = data.images("tiny", "train"), data.images("tiny", "train")
    assert torch.equal(first.x, again.x)
    assert data.fingerprint("tiny") == data.fingerprint("tiny")
    (_, config, revision) = data.fingerprint("tiny")["splits"]["train"]
    assert config is None
    assert revision


def test_a_hub_that_does_not_answer(register, monkeypatch):
    import datasets

    def fail(*arguments, **others):
        raise ConnectionError("no way there")

    register("mnist")
    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.delenv("DPOPT_DATA")
    for call in (lambda: data.images("tiny", "train"), lambda: data.fingerprint("tiny")):
        with pytest.raises(ConfigError, match=r"no way there.*set DPOPT_DATA.*go online once"):
            call()


def test_no_progress_bars_where_nobody_watches(hub, capfd):
    data.images("tiny", "train")
    assert capfd.readouterr() == ("", "")


# Checkpoints


def test_checkpoints(root, monkeypatch):
    folder = root / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("README.md", "vit_tiny.a.safetensors", "vit_tiny.b.safetensors", "conv.safetensors"):
        (folder / name).touch()
    assert data.checkpoint("conv") == folder / "conv.safetensors"
    assert data.checkpoint("vit_tiny.a.") == folder / "vit_tiny.a.safetensors"
    with pytest.raises(ConfigError, match=r"checkpoint: 'vit_tiny' .*vit_tiny\.a\.safetensors, vit_tiny\.b"):
        data.checkpoint("vit_tiny")
    with pytest.raises(ConfigError, match=r"checkpoint: 'resnet' .*conv\.safetensors"):
        data.checkpoint("resnet")
    monkeypatch.delenv("DPOPT_DATA")
    assert data.checkpoint("resnet") is None


# The entries


@pytest.mark.parametrize("dataset", map(data.entry, data.entries()), ids=data.entries())
def test_entries_are_complete(dataset):
    assert dataset.licence
    assert dataset.reference
    assert dataset.inputs != dataset.targets
    assert dataset.hub is None or dataset.hub.count("/") == 1
    assert dataset.classes == len({*dataset.class_names}) or (not dataset.class_names and dataset.hub)
    assert all(0 < value < 1 for value in (*dataset.mean, *dataset.std))
    for part in dataset.splits.values():
        assert {len(part.inputs), len(part.targets)} in ({0}, {64})
        assert part.inputs or "no checksum is known" in dataset.note


# The real data

REAL = ("mnist", "fashion_mnist", "gtsrb_32", "cifar10", "cifar100_subset", "20_newsgroups", "sst2", "e2e_nlg")
REAL_FOLDER = os.environ.get("DPOPT_DATA", "")


@pytest.mark.slow
@pytest.mark.skipif(not REAL_FOLDER, reason="needs DPOPT_DATA")
@pytest.mark.parametrize("name", REAL)
def test_real_sets_are_the_known_ones(monkeypatch, name):
    monkeypatch.setenv("DPOPT_DATA", REAL_FOLDER)
    dataset = data.entry(name)
    assert data.missing(name) == []
    for split, part in dataset.splits.items():
        assert part.inputs  # loading compares
        loaded = (data.images if dataset.kind == "image" else data.texts)(name, split)
        assert len(loaded[1]) == part.records
        if dataset.kind == "image":
            assert loaded[0].shape[-2:] == (dataset.size, dataset.size)
            x, axes = loaded[0].double() / 255, (0, 1, 2) if dataset.channels == 1 else (0, 2, 3)
            if split == "train" and name in ("mnist", "fashion_mnist", "cifar10"):
                seen = [np.atleast_1d(x.mean(axes)), np.atleast_1d(x.std(axes))]
                assert np.allclose(seen, [dataset.mean, dataset.std], atol=1e-4)
        if dataset.classes:
            assert loaded[1].unique().tolist() == list(range(dataset.classes))
