"""The feature cache: what a frozen backbone gives, computed once, the same on any number of cores."""

import os
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from dpopt.workloads import features

pytestmark = pytest.mark.usefixtures("root")


def backbone():
    """Differs in training mode, and depends on the order of the weights."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.ReLU())


def records(n=50):
    return torch.randint(0, 256, (n, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_features_are_the_outputs_in_evaluation_mode():
    x = records()
    computed = features.cached({"name": "a"}, backbone, x, lambda x: x.float() / 255, batch=7)
    expected = backbone().eval()(x.float() / 255).detach()
    assert computed.dtype == torch.float32
    assert not computed.requires_grad
    torch.testing.assert_close(computed, expected)
    assert features.computed(backbone, records(0), torch.Tensor.float).shape == (0, 5)


def test_they_are_computed_once_for_each_key():
    calls = []

    def counted():
        calls.append(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))

    torch.set_num_threads(2)
    random = torch.get_rng_state()
    first = features.cached({"name": "a"}, counted, records(), torch.Tensor.float)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == 2
    again = features.cached({"name": "a"}, counted, records(), torch.Tensor.float)
    other = features.cached({"name": "b"}, counted, records(9), torch.Tensor.float)
    assert torch.equal(first, again)
    assert len(other) == 9
    assert len(calls) == 2


def test_the_number_of_cores_changes_no_bit(monkeypatch):
    x = torch.randn(300, 64)

    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    results = []
    for count in (1, 4):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, count=count: set(range(count)))
        results.append(features.computed(layers, x, lambda x: x, batch=64))
    assert np.array_equal(*results)


def test_parts_are_let_go_one_by_one():
    """Each may hold all that it was taken from."""
    parts_so_far = []

    def parts():
        for start in range(0, 20, 2):
            assert sum(array() is not None for array in parts_so_far) <= 1, "more than the part before is still there"
            tokens = np.repeat(np.arange(start, start + 2.0, dtype=np.float32)[:, None, None], 5, axis=1)
            parts_so_far.append(weakref.ref(tokens))
            yield tokens[:, 0]
            del tokens

    assert features._joined(parts(), 20).ravel().tolist() == list(range(20))
    assert len(parts_so_far) == 10


def test_checksums_of_weights():
    weights = {"a": torch.ones(2), "b": torch.zeros(3)}
    expected = features.checksum_of(weights)
    assert features.checksum_of(dict(reversed(weights.items()))) == expected
    for changed in ({"a": torch.ones(2), "c": torch.zeros(3)}, {**weights, "b": torch.tensor([0.0, 0.0, 1e-30])}):
        assert features.checksum_of(changed) != expected
