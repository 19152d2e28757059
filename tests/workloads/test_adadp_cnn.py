"""ADADP's network for CIFAR-10 above frozen convolutions, on fabricated images."""

import fabricated
import pytest
import torch
import torch.nn.functional as F

from dpopt import registry
from dpopt.workloads import adadp, data


@pytest.fixture
def weights(root, monkeypatch):
    for name in ("cifar10", "cifar100_subset"):
        fabricated.images(monkeypatch, root, name)
    return fabricated.adadp_checkpoint(root)


def create(**fields):
    return registry.create_workload("cifar10_adadp", validation=8, **fields)


def test_the_network_is_the_papers():
    workload = registry.create_workload("cifar10_adadp")
    assert sum(p.numel() for p in workload.model().parameters()) == 1_055_000
    assert (workload.examples, workload.batch_size, workload.epochs, workload.clip) == (45_000, 200, 100, 3)


def test_features_are_those_of_the_convolutions(weights):
    pool, test = create().load()
    pixels = data.images("cifar10", "train").x
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    h = (pixels / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    for layer in ("conv1", "conv2"):
        h = F.max_pool2d(F.conv2d(h, weights[f"{layer}.weight"], weights[f"{layer}.bias"]).relu(), 3, stride=2)
    torch.testing.assert_close(pool.x, h.flatten(1), rtol=1e-4, atol=1e-5)
    assert pool.x.shape == (48, 1600)
    assert len(test.x) == 20


def test_our_own_convolutions_learn_and_are_trained_once(weights, monkeypatch):
    for name, value in {"epochs": 4, "batch": 12, "rate": 0.04}.items():
        monkeypatch.setitem(adadp.RECIPE, name, value)
    monkeypatch.setattr(adadp.features, "cores", lambda: 1)
    losses = []
    entropy = F.cross_entropy

    def watched(*args):
        losses.append(entropy(*args))
        return losses[-1]

    monkeypatch.setattr(adadp.F, "cross_entropy", watched)
    workload = create(convolutions="pretrained", pretraining="cifar100_subset")
    workload.check()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    weights = adadp.pretrained("cifar100_subset")
    assert torch.equal(torch.get_rng_state(), before)
    steps = len(losses)
    assert steps == 4 * 4
    assert torch.stack(losses[-4:]).mean() < torch.stack(losses[:4]).mean() - 0.15
    pool, _ = workload.load()
    assert len(losses) == steps
    with torch.no_grad():
        expected = adadp._frozen(weights)(adadp.normalised(data.images("cifar10", "train").x))
    torch.testing.assert_close(pool.x, expected)
    assert not torch.allclose(pool.x, create().load()[0].x, atol=0.1)


def test_crops_move_images_over_black_ground_and_flips_mirror_them():
    torch.manual_seed(0)
    image = torch.arange(1, 49, dtype=torch.uint8).view(3, 4, 4)
    padded = F.pad(image, [2] * 4)
    allowed = {
        tuple(crop.flatten().tolist())
        for i in range(5)
        for j in range(5)
        for window in [padded[:, i : i + 4, j : j + 4]]
        for crop in (window, window.flip(-1))
    }
    seen = {tuple(x.flatten().tolist()) for x in adadp._cropped_and_flipped(image.expand(2000, 3, 4, 4), padding=2)}
    assert seen == allowed


def test_what_is_missing(weights, monkeypatch, root):
    assert create().missing() == []
    assert [entry.name for entry in create(convolutions="pretrained").missing()] == ["cifar100"]
    (root / "checkpoints" / f"{adadp.OFFICIAL}.safetensors").unlink()
    assert [entry.name for entry in create().missing()] == [adadp.OFFICIAL]
    monkeypatch.delenv("DPOPT_DATA")
    assert "set DPOPT_DATA" in str(create().missing()[-1])
    assert create().outline().record.x.shape == (1, adadp.FEATURES)
