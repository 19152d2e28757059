from dataclasses import replace

import fabricated
import numpy as np
import pytest

from dpopt.workloads.data import catalogue, records
from dpopt.workloads.data.catalogue import SplitEntry


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The folder of data sets and checkpoints, which is empty, beside a cache of the test's own."""
    monkeypatch.setenv("DPOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DPOPT_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def own_texts(root, monkeypatch):
    """A function that replaces a data set of texts by others, and returns the folder of data sets."""

    def put(name, **splits):
        dataset, parts = catalogue.entry(name), {}
        for split, (inputs, targets) in splits.items():
            fabricated.write(root, dataset, split, inputs, targets)
            is_labelled = not isinstance(targets[0], str)
            of_targets = records.of_arrays([np.asarray(targets)]) if is_labelled else records.of_texts(targets)
            source = dataset.part(split).source
            parts[split] = SplitEntry(source, len(inputs), records.of_texts(inputs), of_targets)
        monkeypatch.setitem(catalogue.entries(), name, replace(dataset, splits=parts))
        return root

    return put
