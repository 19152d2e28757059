import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpopt.errors import ConfigError
from dpopt.workloads import models
from dpopt.workloads.base import mlp

MODELS = {
    "mlp": lambda: mlp(784, 256, 256, 10),
    "two_conv": models.two_conv,
    "opacus_conv": lambda: models.opacus_conv(channels=3, size=32),
    "tanh_conv": lambda: models.tanh_conv(channels=3, size=32),
    "wide_resnet": lambda: models.wide_resnet(depth=10, width=1),
    "vit": lambda: models.timm_model("vit_tiny_patch16_224", img_size=32, patch_size=4),
    "gpt2": lambda: models.gpt2(layers=2, width=32, heads=2, vocabulary=50, context=12),
}


def inputs(name, n=2):
    if name == "gpt2":
        return torch.randint(50, (n, 12))
    return torch.randn(n, 784) if name == "mlp" else torch.randn(n, 3, 32, 32)


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (models.two_conv, (9 * 3 + 1) * 32 + (9 * 32 + 1) * 64 + (64 * 8 * 8 + 1) * 10),
        (models.opacus_conv, 26_010),  # as Opacus' and the papers' texts state
        (models.tanh_conv, 26_010),
        (lambda: models.wide_resnet(depth=40, classes=100), 8_972_340),
        (lambda: models.gpt2(layers=1, width=8, heads=2, vocabulary=11, context=5), 11 * 8 + 5 * 8 + 12 * 64 + 15 * 8),
    ],
)
def test_parameter_counts(model, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in model().parameters()) == count


def test_shapes_that_no_network_has():
    with pytest.raises(ConfigError, match="size"):
        models.opacus_conv(size=8)
    with pytest.raises(ConfigError, match="depth"):
        models.wide_resnet(depth=18)


@pytest.fixture(scope="module")
def counts():
    return {row["model"]: row for row in models.parameter_counts()}


@pytest.mark.parametrize(
    ("name", "column", "count"),
    [
        # as the authors and timm state them, for 1,000 classes
        ("ViT-Ti/16", "all", 5_717_416 - 990 * 193),
        ("ViT-S/16", "all", 22_050_664 - 990 * 385),
        ("ViT-B/16", "all", 86_567_656 - 990 * 769),
        ("WRN-16-4", "full", 2_748_890),
        ("ADADP, MNIST", "full", 334_336),
        ("ADADP, CIFAR-10, above the convolutions", "full", 1_055_000),
        ("GPT-2 small", "full", 124_439_808),
        ("DistilBERT", "all", 66_362_880 + 2 * 769),
        ("MiniLM-L6", "all", 22_713_216 - 384 * 385 + 2 * 385),  # without the pooling layer
        # counted by hand
        ("ViT-Ti/16", "head", 10 * 193),
        ("ViT-Ti/16", "film", 25 * 2 * 192 + 10 * 193),
        ("ViT-B/16", "bitfit", 12 * (3 + 1 + 4 + 1 + 2) * 768 + 2 * 768 + 10 * 769),
        ("ViT-B/16", "lora", 12 * 8 * (4 + 2 + 5 + 5) * 768 + 10 * 769),
        ("WRN-16-4", "lora", None),
        ("GPT-2 small", "head", None),
        ("GPT-2 small", "lora", 12 * 8 * (4 + 2 + 5 + 5) * 768),
        ("MiniLM-L6", "lora", 6 * 2 * 8 * 2 * 384 + 2 * 385),
        ("DistilBERT", "film", (2 * 6 + 1) * 2 * 768 + 2 * 769),
    ],
)
def test_table_of_parameter_counts(counts, name, column, count):
    assert counts[name][column] == count


def test_opacus_network():
    """Against its example, written from the shapes in its comments."""
    model, x = models.opacus_conv(), torch.randn(2, 1, 28, 28)
    first, second, third, last = (layer for layer in model if hasattr(layer, "weight"))
    h = F.max_pool2d(F.relu(F.conv2d(F.pad(x, [3] * 4), first.weight, first.bias, 2)), 2, 1)
    assert h.shape[1:] == (16, 13, 13)
    h = F.max_pool2d(F.relu(F.conv2d(h, second.weight, second.bias, 2)), 2, 1)
    assert h.shape[1:] == (32, 4, 4)
    torch.testing.assert_close(model(x), last(F.relu(third(h.view(-1, 512)))))
    other = models.tanh_conv()
    other.load_state_dict(model.state_dict())
    assert (other(x) - model(x)).abs().max() > 0.01


@pytest.mark.parametrize("name", MODELS)
def test_outputs_do_not_depend_on_the_other_examples(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), inputs(name, 3)
    together, alone = model(x), torch.cat([model(x[i : i + 1]) for i in range(3)])
    assert together.shape == ((3, 12, 50) if name == "gpt2" else (3, 10))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_convolutions_of_a_wide_resnet_are_standardised():
    torch.manual_seed(0)
    model, x = models.wide_resnet(depth=10, width=1), torch.randn(2, 3, 32, 32)
    before = model(x)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(3).add_(0.5)
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-4)


SUBSETS = {
    ("mlp", "full"): {"1.weight", "1.bias", "3.weight", "3.bias", "5.weight", "5.bias"},
    ("mlp", "head"): {"5.weight", "5.bias"},
    ("two_conv", "bitfit"): {"0.bias", "3.bias", "7.bias", "7.weight"},
    ("wide_resnet", "film"): {
        *(f"{block}.norm{i}.{kind}" for block in (1, 2, 3) for i in (1, 2) for kind in ("weight", "bias")),
        *("4.weight", "4.bias", "8.weight", "8.bias"),
    },
    ("gpt2", "film"): {
        *(f"model.transformer.h.{i}.ln_{j}.{kind}" for i in (0, 1) for j in (1, 2) for kind in ("weight", "bias")),
        *("model.transformer.ln_f.weight", "model.transformer.ln_f.bias"),
    },
    ("vit", "head"): {"head.weight", "head.bias"},
}


@pytest.mark.parametrize(("name", "subset"), SUBSETS)
def test_subsets_hold_what_they_name(name, subset):
    model = MODELS[name]()
    assert models.trainable(model, subset) is model
    assert set(trained(model)) == SUBSETS[name, subset]


@pytest.mark.parametrize(("name", "layers", "per_layer"), [("vit", 12, 4), ("gpt2", 2, 4)])
def test_lora_starts_at_the_model_and_trains_adapters_and_head(name, layers, per_layer):
    torch.manual_seed(0)
    model, x = MODELS[name](), inputs(name)
    before = model(x)
    names = set(trained(models.trainable(model, "lora")))
    assert torch.equal(model(x), before)
    adapters = {key for key in names if "lora_" in key}
    assert len(adapters) == 2 * layers * per_layer
    assert names - adapters == ({"head.weight", "head.bias"} if name == "vit" else set())
    model(x).square().sum().backward()
    moved = [key for key, p in trained(model).items() if p.grad is not None and p.grad.any()]
    assert {key for key in adapters if "lora_B" in key} <= set(moved)


@pytest.mark.parametrize(
    ("name", "subset"), [("gpt2", "head"), ("mlp", "film"), ("two_conv", "lora"), ("mlp", "heads")]
)
def test_subsets_that_a_model_does_not_have(name, subset):
    model = MODELS[name]()
    with pytest.raises(ConfigError, match="did you mean 'head'" if subset == "heads" else "no such parameters"):
        models.trainable(model, subset)
    assert len(trained(model)) == len(list(model.parameters()))
