from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from dpopt.workloads.data import catalogue, checksums
from dpopt.workloads.data.catalogue import SplitEntry


@pytest.fixture
def own_texts(tmp_path, monkeypatch):
    """A function that replaces a data set of texts by others, in a folder and a cache of the test's own."""
    monkeypatch.setenv("DPOPT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("DPOPT_CACHE", str(tmp_path / "cache"))

    def put(name, **splits):
        dataset, parts = catalogue.entry(name), {}
        for split, (inputs, targets) in splits.items():
            source = dataset.part(split).source
            file = tmp_path / "data" / name / f"{source}-0.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.table({dataset.inputs: inputs, dataset.targets: targets}), file)
            parts[split] = SplitEntry(source, len(inputs), checksums.of_texts(inputs), _checksum(targets))
        monkeypatch.setitem(catalogue.entries(), name, replace(dataset, splits=parts))
        return tmp_path

    return put


def _checksum(targets):
    import numpy as np

    of_labels = not isinstance(targets[0], str)
    return checksums.of_arrays([np.asarray(targets, np.int64)]) if of_labels else checksums.of_texts(targets)
