"""Image workloads on tiny fabricated data: what the model sees, what is trained, and features in place of images."""

import re

import fabricated
import pytest
import torch
import torch.nn.functional as F

import dpopt
from dpopt import clipping, registry
from dpopt.errors import ConfigError
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.workloads import data, models, vision
from dpopt.workloads.base import Split

TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
OPTIONS = dict(fabricated.VIT)


@pytest.fixture(autouse=True)
def _small_data(root, monkeypatch):
    fabricated.images(monkeypatch, root, "cifar10")
    fabricated.vit_checkpoint(root, TINY)


def vit(**fields):
    defaults = {"architecture": TINY, "pretrained": True, "subset": "head", "options": OPTIONS}
    return registry.create_workload("images", **{**defaults, **fields})


def trained(model, loss, split, transform):
    """Parameters after six private draws."""
    engine = clipping.engine(model, loss)
    optimizer = dpopt.create("dp_sgd", lr=0.5)
    privacy = {"epsilon": 8.0, "delta": 1e-3, "accountant": "rdp"}
    plan = calibrate(optimizer, rate=0.25, draws=6, dimension=engine.dimension, **privacy)
    oracle = DataOracle(engine, *split, plan, draw_seed=1, noise_seed=2, transform=transform)
    state = optimizer.init(engine.theta)
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
    return state.theta


def test_a_private_run_on_features_is_the_run_of_the_whole_model():
    workload = vit()
    network = workload._network(workload._checkpoint())
    slow = trained(network, workload.loss, data.images("cifar10", "train"), workload.preparation)
    pool, _ = workload.load()
    fast = trained(workload.model(), workload.loss, pool, workload.transform)
    noise_only = trained(workload.model(), workload.loss, Split(torch.zeros_like(pool.x), pool.y), None)
    assert len(fast) == 24 * 10 + 10
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    assert (fast - noise_only).norm() > 0.1 * fast.norm()


def test_features_are_computed_once_and_the_backbone_is_not_made_again(root, monkeypatch):
    named = vit().load()[0].x
    assert torch.equal(vit(architecture=TINY.partition(".")[0]).load()[0].x, named)  # the tag is timm's default
    with_dropout = vit(options={**OPTIONS, "proj_drop_rate": 0.1})
    assert (with_dropout.uses_features, with_dropout.load()[0].x.dtype) == (False, torch.uint8)
    monkeypatch.setattr(vision.models, "timm_model", lambda *args, **options: pytest.fail("made again"))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    pool, _ = vit(validation=8).load()
    assert torch.equal(torch.get_rng_state(), before)
    assert pool.x.shape == (48, 24)
    assert vit().model()(pool.x).shape == (48, 10)
    fabricated.vit_checkpoint(root, TINY, qkv_bias=False)
    with pytest.raises(pytest.fail.Exception):
        vit(options={**OPTIONS, "qkv_bias": False}).load()  # other weights


@pytest.mark.parametrize("subset", ["film", "bitfit", "lora", "full"])
def test_a_checkpoint_without_its_classifier(subset):
    workload = vit(subset=subset)
    assert not workload.uses_features
    pool, _ = workload.load()
    network = workload.model()
    head = network.get_classifier()
    assert not head.weight.any()
    assert all(parameter.requires_grad for parameter in head.parameters())
    features = vit().load()[0].x
    with torch.no_grad():
        seen = network.forward_head(network.forward_features(workload.transform(pool.x)), pre_logits=True)
    torch.testing.assert_close(seen, features)


@pytest.mark.parametrize(
    ("name", "width", "trained"),
    [("mnist", 3969, 39_700), pytest.param("cifar10", 15_552, 155_530, marks=pytest.mark.slow)],
)
def test_scattering_coefficients_are_features(monkeypatch, root, name, width, trained):
    """Counts are those of Tramèr and Boneh 2021."""
    dataset = fabricated.images(monkeypatch, root, name, 28 if width == 3969 else 32)
    workload = registry.create_workload(f"{name}_scatter", validation=8)
    pool, test = workload.load()
    images = data.images(name, "train").x.view(48, dataset.channels, dataset.size, dataset.size)
    expected = models.scatter_features(dataset.channels, dataset.size)(images / 255)
    torch.testing.assert_close(pool.x, expected, rtol=1e-4, atol=1e-4)
    assert test.x.shape == (fabricated.COUNTS["test"], width)
    model = workload.model()
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained
    assert model.weight.any()
    assert sum(p.numel() for p in workload.outline().model.parameters()) == trained


def test_a_part_of_the_records_is_always_the_same(monkeypatch, root):
    fabricated.images(monkeypatch, root, "mnist", 28)
    whole, part = (registry.create_workload("mnist_cnn", validation=8, records=records) for records in (None, 20))
    assert (whole.examples, part.examples, len(part.load()[1].y)) == (40, 12, len(whole.load()[1].y))
    first, second = ({bytes(x.numpy()) for split in part.splits(seed)[:2] for x in split.x} for seed in (0, 1))
    assert first == second < {bytes(x.numpy()) for x in whole.load()[0].x}
    assert not torch.equal(part.load()[0].x, whole.load()[0].x[:20])
    with pytest.raises(ConfigError, match=r"workload.records: 49 .*expected at most 48"):
        registry.create_workload("mnist_cnn", validation=8, records=49)


def test_pixels_that_their_authors_do_not_normalise(monkeypatch, root):
    fabricated.images(monkeypatch, root, "mnist", 28)
    x = data.images("mnist", "train").x
    workload = registry.create_workload("mnist_cnn", validation=8)
    torch.testing.assert_close(workload.transform(x), x[:, None] / 255)
    other = registry.create_workload("images", data="mnist", architecture="opacus_conv")
    torch.testing.assert_close(other.transform(x), (x[:, None] / 255 - 0.1307) / 0.3081)


@pytest.mark.slow
def test_a_frozen_backbone_may_have_batch_normalisation(root):
    import timm
    from safetensors.torch import save_file

    name = "resnet18.a1_in1k"
    network = timm.create_model(name)
    with torch.no_grad():
        network.bn1.running_mean.normal_()
    save_file(network.state_dict(), root / "checkpoints" / f"{name}.safetensors")
    workload = vit(architecture=name, options={}, size=32)
    workload.check()
    network.reset_classifier(0)
    with torch.no_grad():
        expected = network.eval()(workload.preparation(data.images("cifar10", "train").x))
    torch.testing.assert_close(workload.load()[0].x, expected)


def test_images_are_resized_and_normalised():
    x = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    prepared = vision.Preparation(20, 3, (0.4, 0.5, 0.6), (0.1, 0.2, 0.3))(x)
    resized = F.interpolate(x.double() / 255, (20, 20), mode="bicubic", antialias=True).clamp(0, 1)
    mean, std = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1), torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    torch.testing.assert_close(prepared, ((resized - mean) / std).float(), rtol=1e-4, atol=1e-4)
    unchanged = vision.Preparation(8, 3, (0, 0, 0), (1, 1, 1))(x)
    torch.testing.assert_close(unchanged * 255, x.float())
    grey = vision.Preparation(8, 3, (0.5,) * 3, (0.5,) * 3)(x[:, 0])  # repeated for a model of colour images
    assert torch.equal(grey, grey[:, :1].expand(-1, 3, -1, -1))
    assert vision.Preparation(8, 1, (0.5,), (0.5,))(x[:, 0]).shape == (3, 1, 8, 8)


@pytest.mark.parametrize(
    ("architecture", "channels"),
    [("opacus_conv", 1), ("adadp_mlp", 1), ("wrn_16_4", 3), ("resnet18", 3)],
)
def test_models_from_scratch_take_grey_images(monkeypatch, root, architecture, channels):
    fabricated.images(monkeypatch, root, "mnist", side=28)
    workload = registry.create_workload("images", data="mnist", architecture=architecture)
    workload.check()
    x = workload.transform(workload.load()[0].x[:2])
    assert x.shape[1] == channels
    assert workload.model()(x).shape == (2, 10)
    assert "BatchNorm2d" not in {type(module).__name__ for module in workload.model().modules()}


def test_sizes(monkeypatch, root):
    assert vit(options={}).preparation.size == 224
    assert vit(options={}, size=64)._options == {"img_size": 64}
    assert vit(options={}, pretrained=False, subset="full").preparation.size == 32
    fabricated.images(monkeypatch, root, "food101", side=40)
    large = registry.create_workload("images", data="food101", architecture="two_conv", size=16)
    assert large.load()[0].x.shape == (48, 3, 16, 16)
    with pytest.raises(ConfigError, match=r"workload\.size"):
        registry.create_workload("images", data="food101", architecture="two_conv").load()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": "sst2"}, "data set of images"),
        ({"data": "cifar11"}, "did you mean 'cifar10'"),
        ({"architecture": "wrn_16_4", "options": {}}, "only timm's have checkpoints"),
        ({"architecture": "scatter", "options": {}}, "only timm's have checkpoints"),
        ({"subset": "heads"}, "did you mean 'head'"),
        ({"validation": 48}, "expected 0 to 47"),
    ],
)
def test_fields_that_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        vit(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "no_such_model"}, "timm.list_models"),
        ({"data": "food101", "architecture": "two_conv", "pretrained": False, "options": {}}, r"workload\.size"),
        ({"architecture": "vit_tinny_patch16_224", "pretrained": False, "subset": "full"}, "did you mean 'vit_tiny"),
        ({"pretrained": False, "subset": "full", "options": {"dept": 1}}, "timm cannot make it"),
        ({"architecture": "scatter", "pretrained": False, "size": 30, "options": {}}, "multiple of 4"),
        ({"architecture": "scatter", "pretrained": False, "subset": "film", "options": {}}, "no such parameters"),
        ({"architecture": "resnet18.a1_in1k", "subset": "film", "options": {}}, "bn1.*mixes the examples"),
    ],
)
def test_workloads_that_cannot_be_run_are_refused_when_planned(root, monkeypatch, fields, message):
    fabricated.images(monkeypatch, root, "food101", side=40)
    (root / "checkpoints" / "resnet18.a1_in1k.safetensors").write_text("not read")
    with pytest.raises(ConfigError, match=message):
        vit(**fields).check()


def test_a_checkpoint_that_is_nowhere(root, monkeypatch):
    """Shapes are told without it; how it is to be had depends on where weights are looked for."""
    workload = vit(architecture="vit_small_patch16_224.augreg_in21k", subset="full")
    workload.check()
    assert workload.outline().model.get_classifier().weight.shape == (10, 24)
    (absent,) = workload.missing()
    assert re.search("expected one such file", str(absent))
    assert (absent.kind, absent.name, absent.hub) == ("weights", "vit_small_patch16_224.augreg_in21k", "")
    monkeypatch.delenv("DPOPT_DATA")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", root)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda hub, name: None)
    hubs = [("data", "uoft-cs/cifar10"), ("weights", "timm/vit_small_patch16_224.augreg_in21k")]
    assert [(entry.kind, entry.hub) for entry in workload.missing()] == hubs
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda hub, name: f"{root}/{name}")
    assert [entry.kind for entry in workload.missing()] == ["data"]
