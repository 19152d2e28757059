import pytest
import torch

from dpopt import registry


@pytest.mark.parametrize("name", ["digits_mlp", "synthetic_logreg"])
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


def test_mnist_is_normalised_as_it_is_used():
    """And its network is ADADP's."""
    assert sum(p.numel() for p in registry.create_workload("mnist_mlp").model().parameters()) == 334_336
    workload, stored = registry.create_workload("mnist_mlp"), torch.arange(256, dtype=torch.uint8).view(4, 8, 8)
    before = stored.clone()
    expected = (stored.double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(workload.transform(stored), expected.float())
    assert torch.equal(stored, before)
    assert torch.equal(workload.augment(stored), before)
