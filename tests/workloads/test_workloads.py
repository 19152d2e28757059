import numpy as np
import pytest
import sklearn.datasets
import torch

from dpopt import registry
from dpopt.errors import ConfigError
from dpopt.workloads import digits, synthetic


@pytest.mark.parametrize("name", ["breast_cancer", "digits_mlp", "synthetic_logreg", "synthetic_table"])
def test_splits_are_disjoint_complete_and_reproducible(name):
    workload = registry.create_workload(name)
    splits, again, other = workload.splits(0), workload.splits(0), workload.splits(1)
    assert len(splits.train.x) == len(splits.train.y) == workload.examples
    assert len(splits.validation.x) == workload.validation
    for one, two in zip(splits, again, strict=True):
        assert torch.equal(one.x, two.x)
    assert not torch.equal(splits.validation.x, other.validation.x)
    assert torch.equal(splits.test.x, other.test.x)
    pool, _ = workload.load()
    rows = {tuple(row.tolist()) for row in pool.x}
    held = {tuple(row.tolist()) for part in splits[:2] for row in part.x}
    assert held == rows


def test_a_pool_without_validation_records_is_not_copied(monkeypatch):
    workload = registry.create_workload("synthetic_logreg", validation=0)
    pool, test = workload.load()
    monkeypatch.setattr(type(workload), "load", lambda self: (pool, test))
    splits = workload.splits(0)
    assert splits.train.x.data_ptr() == pool.x.data_ptr()
    assert [len(part.x) for part in splits[:2]] == [workload.pool, 0]


def test_digits_are_all_there_with_pixels_up_to_one():
    splits = registry.create_workload("digits_mlp").splits(0)
    assert [len(part.x) for part in splits] == [1257, 180, 360]
    assert 0 <= float(splits.train.x.min()) <= float(splits.train.x.max()) == 1


def test_the_published_ranges_of_a_table_hold_its_records():
    """To the three digits that they are stated with: no column is clipped by more, and none is far from its ends."""
    bunch, (low, high) = sklearn.datasets.load_breast_cancer(), digits._RANGES
    width = high - low
    assert (abs(bunch.data.min(axis=0) - low) < 0.03 * width).all()
    assert (abs(bunch.data.max(axis=0) - high) < 0.03 * width).all()
    pool, test = registry.create_workload("breast_cancer").load()
    malignant = int((pool.y == 0).sum() + (test.y == 0).sum())
    assert (len(pool.y) + len(test.y), malignant) == (569, 212)


def test_a_synthetic_table_is_unbalanced_and_has_columns_that_say_nothing_new():
    x, y = synthetic._table()
    assert torch.equal((400 * x).round() / 400, x)
    expected = 0.97 * np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.04]) + 0.03 / 6
    error = 4 * np.sqrt(expected * (1 - expected) / len(y))  # of a sample, at most: clusters have nearly these sizes
    assert (abs(np.bincount(y) / len(y) - expected) < error).all()
    # 8 of 30 columns follow from others, but for the rounding; noise columns follow from nothing, not from the class.
    variances = np.linalg.eigvalsh(np.cov(x.double().numpy().T))
    assert (variances < 0.01**2 / 4).sum() == 8
    between = np.stack([x[y == number].mean(dim=0).numpy() for number in range(6)]).std(axis=0)
    assert (between < 0.03).sum() == 10


def test_a_table_that_another_library_generates_is_refused(monkeypatch):
    generate = sklearn.datasets.make_classification
    monkeypatch.setattr(
        sklearn.datasets, "make_classification", lambda *args, **rest: generate(*args, **rest | {"random_state": 1})
    )
    synthetic._table.cache_clear()
    with pytest.raises(ConfigError, match="the data differ from the known ones"):
        registry.create_workload("synthetic_table").load()


def test_mnist_is_normalised_as_it_is_used():
    """And its network is ADADP's."""
    assert sum(p.numel() for p in registry.create_workload("mnist_mlp").model().parameters()) == 334_336
    workload, stored = registry.create_workload("mnist_mlp"), torch.arange(256, dtype=torch.uint8).view(4, 8, 8)
    before = stored.clone()
    expected = (stored.double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(workload.transform(stored), expected.float())
    assert torch.equal(stored, before)
    assert torch.equal(workload.augment(stored), before)
