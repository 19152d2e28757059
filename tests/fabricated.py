"""Tiny data sets and checkpoints in the layouts of the real ones, so that real workloads run without real data."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO

import numpy as np
import torch

from dpopt.workloads.data import catalogue, records
from dpopt.workloads.data.catalogue import Column, Entry, SplitEntry
from dpopt.workloads.data.source import open_source

COUNTS = {"train": 48, "test": 20}
WORDS = ["the", "food", "at", "this", "place", "near", "river", "is", "cheap", "and", "good", "for", "children"]
VIT = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2}
"""Options of `timm.create_model` for a vision transformer that runs in milliseconds."""
SMALL = [
    "suite=quickstart",
    "workloads=[{name: synthetic_logreg, dim: 3}]",
    "optimizers=[hyfreedp]",
    "epsilon=4",
    "epochs=1",
    "accountant=rdp",
    "engine=inline",
]
"""Arguments of `dpopt run` for cells that take a second."""


def images(monkeypatch, root, name, side=32):
    """Random images in the layout of the data set `name`, which from now on has as many records as `COUNTS` says.

    The labels go through all classes in turn.
    """
    dataset = catalogue.entry(name)
    generator, shape = np.random.default_rng(0), (side, side) if dataset.channels == 1 else (side, side, 3)
    splits = {}
    for split, count in COUNTS.items():
        pictures = generator.integers(0, 256, (count, *shape), dtype=np.uint8)
        labels = np.arange(count) % dataset.classes
        write(root, dataset, split, [encoded(picture) for picture in pictures], labels)
        sums = records.of_arrays([pictures]), records.of_arrays([labels])
        splits[split] = SplitEntry(dataset.part(split).source, count, *sums)
    small = replace(dataset, splits=splits, size=side if dataset.size else None)
    monkeypatch.setitem(catalogue.entries(), name, small)
    return small


def table(monkeypatch, root, name):
    """A table with a column of numbers and one of categories, which both miss values.

    The larger the number, the more often the class is 1.
    """
    columns = {"age": Column(range=(0, 100)), "job": Column(values=("nurse", "cook"))}
    splits = {split: SplitEntry(split, count) for split, count in COUNTS.items()}
    facts = {"licence": "none", "reference": "these tests", "classes": 2}
    small = Entry(name=name, kind="table", columns=columns, targets="label", splits=splits, **facts)
    generator = np.random.default_rng(0)
    for split, count in COUNTS.items():
        ages = generator.uniform(-10, 110, count)
        rows = {
            "age": [None if age < 0 else age for age in ages],
            "job": [[None, "nurse", "cook", "smith"][number] for number in generator.integers(0, 4, count)],
        }
        labels = (ages + generator.normal(0, 20, count) > 50).astype(np.int64)
        put(root, small, split, rows | {"label": labels})
        source = open_source(replace(small, folder=root / name), split)
        splits[split] = SplitEntry(split, count, records.of_columns(small, source), records.of_arrays([labels]))
    monkeypatch.setitem(catalogue.entries(), name, small)
    return small


def texts(monkeypatch, root, name):
    """Random words in the layout of the data set of texts or of pairs `name`."""
    dataset = catalogue.entry(name)
    generator, splits = np.random.default_rng(0), {}
    for split, count in {split: COUNTS.get(split, 8) for split in dataset.splits}.items():
        inputs = [" ".join(generator.choice(WORDS, 6)) for _ in range(count)]
        of_pairs = [" ".join(generator.choice(WORDS, 9)) for _ in range(count)]
        labels = np.arange(count) % max(dataset.classes, 2)
        is_pairs = dataset.kind == "pairs"
        write(root, dataset, split, inputs, of_pairs if is_pairs else labels)
        of_targets = records.of_texts(of_pairs) if is_pairs else records.of_arrays([labels])
        splits[split] = SplitEntry(dataset.part(split).source, count, records.of_texts(inputs), of_targets)
    small = replace(dataset, splits=splits)
    monkeypatch.setitem(catalogue.entries(), name, small)
    return small


def encoded(pixels):
    from PIL import Image

    content = BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return {"bytes": content.getvalue(), "path": None}


def write(root, dataset, split, inputs, targets):
    """One split as a Parquet file with the columns of the entry `found`."""
    put(root, dataset, split, {dataset.inputs: inputs, dataset.targets: targets})


def put(root, dataset, split, columns):
    import pyarrow as pa
    from pyarrow.parquet import write_table

    (root / dataset.name).mkdir(parents=True, exist_ok=True)
    write_table(pa.table(columns), root / dataset.name / f"{dataset.part(split).source}-00000-of-00001.parquet")


def vit_checkpoint(root, architecture, **options):
    """Random weights of a tiny version of timm's `architecture`, where its checkpoint is looked for."""
    import timm
    from safetensors.torch import save_file

    (root / "checkpoints").mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = timm.create_model(architecture, pretrained=False, **{**VIT, **options})
        # timm starts biases at zero and scales at one, which would hide whether they are loaded.
        weights = {name: value + 0.02 * torch.randn_like(value) for name, value in model.state_dict().items()}
    file = root / "checkpoints" / f"{architecture}.fp16.safetensors"
    save_file({name: value.half() for name, value in weights.items()}, file)
    return file


def adadp_checkpoint(root):
    """Random convolutions where ADADP's official ones are looked for."""
    from safetensors.torch import save_file

    from dpopt.workloads import adadp

    (root / "checkpoints").mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        weights = {name: value.detach() for name, value in adadp.convolutions().named_parameters()}
    save_file(weights, root / "checkpoints" / f"{adadp.OFFICIAL}.safetensors")
    return weights


def noted(arguments):
    """Note the cells of a suite, as `dpopt run` does before it trains them; gives the store.

    Args:
        arguments: of the command line.
    """
    from dpopt.cli.keys import suite_name
    from dpopt.runs.run_suite import open_store
    from dpopt.suites.plan import manifest, plan
    from dpopt.suites.suite import load_suite

    name, rest = suite_name(arguments)
    suite = load_suite(name, rest)
    store = open_store(suite)
    store.extend_suite(suite.name, manifest(suite, plan(suite)))
    return store
