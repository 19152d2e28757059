"""Every registered workload keeps every rule of `dpopt.testing`, on tiny fabricated data."""

import dataclasses
import random
import unittest
from contextlib import suppress
from typing import ClassVar

import fabricated
import numpy as np
import pytest
import torch
from torch import nn

import dpopt
from dpopt import registry
from dpopt.clipping.vmap import VmapEngine
from dpopt.testing import workloads
from dpopt.workloads import adadp, data, generation, mnist
from dpopt.workloads.base import Split, Workload, outlined

RULES = [rule.__name__ for rule in workloads.RULES]
VIT = {"options": dict(fabricated.VIT)}
ENCODER = {
    "pretrained": False,
    "length": 24,
    "options": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
}
GPT2 = {"pretrained": False, "layers": 1, "width": 16, "heads": 2, "vocabulary": 300, "generations": 2, "length": 60}
CASES = {
    "augmented_images": {"data": "mnist", "architecture": "two_conv", "multiplicity": 2},
    "breast_cancer": {},
    "cifar100_vit_base": VIT,
    "cifar100_vit_small": VIT,
    "cifar100_vit_tiny": VIT | {"subset": "lora"},
    "cifar10_adadp": {},
    "cifar10_adadp_own": {"pretraining": "cifar100_subset"},
    "cifar10_scatter": {},
    "cifar10_vit_base": VIT | {"subset": "bitfit"},
    "cifar10_vit_small": VIT | {"subset": "film"},
    "cifar10_vit_tiny": VIT,
    "cifar10_wrn_16_4": {},
    "digits_mlp": {},
    "e2e_gpt2": GPT2 | {"subset": "lora", "generations": 0},
    "e2e_gpt2_random": GPT2,
    "fashion_mnist_cnn": {},
    "fashion_mnist_scatter": {},
    "gmm": {},
    "images": {"data": "mnist", "architecture": "two_conv"},
    "mnist_cnn": {},
    "mnist_mlp": {},
    "mnist_scatter": {},
    "newsgroups_minilm": ENCODER,
    "newsgroups_minilm_lora": ENCODER,
    "sst2_minilm": ENCODER | {"subset": "full"},
    "sst2_minilm_lora": ENCODER,
    "synthetic_logreg": {},
    "synthetic_table": {},
    "table": {"data": "people", "hidden": (8, 4)},
    "texts": ENCODER,
}
"""The registered workloads, made small where their size is a field."""
IN_FULL = (
    "augmented_images",
    "breast_cancer",
    "cifar100_vit_tiny",
    "cifar10_adadp",
    "digits_mlp",
    "e2e_gpt2_random",
    "gmm",
    "mnist_cnn",
    "mnist_mlp",
    "mnist_scatter",
    "newsgroups_minilm",
    "newsgroups_minilm_lora",
    "synthetic_logreg",
    "synthetic_table",
    "table",
)
"""One preset of each class, and of each way in which its classes build a model: they keep all rules."""
OF_ALL = ("is_frozen_configuration", "can_be_planned", "outline_is_that_of_model_and_records")
TEXTS = ("20_newsgroups", "sst2", "e2e_nlg")
IMAGES = {"mnist": 28, "fashion_mnist": 28, "cifar10": 32, "cifar100": 32, "cifar100_subset": 32}


def check(workload, rule):
    """Run one rule."""
    next(check for check in dpopt.testing.workload_checks(workload) if check.name == rule)()


def test_every_registered_workload_is_checked():
    assert sorted(CASES) == sorted(registry.entries("workload"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All data sets and checkpoints, fabricated."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("data")
        patch.setenv("DPOPT_CACHE", str(root / "cache"))
        patch.setenv("DPOPT_DATA", str(root))
        for name, side in IMAGES.items():
            fabricated.images(patch, root, name, side)
        for name in TEXTS:
            fabricated.texts(patch, root, name)
        fabricated.table(patch, root, "people")
        for size in ("tiny", "small", "base"):
            entry = registry.entry("workload", f"cifar10_vit_{size}")
            fabricated.vit_checkpoint(root, entry.fields["architecture"])
        fabricated.adadp_checkpoint(root)
        patch.setitem(adadp.RECIPE, "epochs", 1)
        for kind in (mnist.MnistMLP, generation.E2E):
            patch.setattr(kind, "pool", fabricated.COUNTS["train"])
        for kind in {registry.entry("workload", name).load() for name in CASES}:
            if registry.entry("workload", "gmm").load() is not kind:
                patch.setattr(kind, "batch_size", 16)
        yield root


def test_one_preset_of_each_class_is_checked_in_full():
    kinds = {name: registry.entry("workload", name).load() for name in CASES}
    assert {kinds[name] for name in IN_FULL} == set(kinds.values())


def is_slow(name, rule):
    """True where the metrics of generated sentences are computed, for which a virtual machine of Java is started."""
    return name == "e2e_gpt2_random" and rule == "report_is_plain_data"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(name, rule, marks=pytest.mark.slow if is_slow(name, rule) else [])
        for name in CASES
        for rule in (RULES if name in IN_FULL else OF_ALL)
    ],
)
def test_registered_workload(folder, name, rule):
    check(registry.create_workload(name, validation=8, **CASES[name]), rule)


@dataclasses.dataclass(frozen=True)
class Sound(Workload):
    """Twenty records of three numbers, seven of them for validation."""

    validation: int = 7

    pool: ClassVar[int] = 20
    batch_size: ClassVar[int] = 5
    epochs: ClassVar[float] = 1.0

    def load(self):
        x = torch.randn(25, 3, generator=torch.Generator().manual_seed(0))
        y = torch.arange(25) % 2
        return Split(x[:20], y[:20]), Split(x[20:], y[20:])

    def model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def test_a_sound_workload_passes():
    for rule in RULES:
        with suppress(unittest.SkipTest):  # it names no data set
            check(Sound(), rule)


def changed(**methods):
    return type("Changed", (Sound,), methods)()


def splits(change):
    """Sound splits of which `change` makes others."""
    return changed(splits=lambda self, seed: change(Sound.splits(self, seed)))


def own_random_numbers(self):
    model = Sound.model(self)
    nn.init.constant_(model[0].bias, np.random.default_rng().normal())
    return model


def with_three_classes():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(change):
    return changed(loss=lambda self, output, target: Sound.loss(self, change(output), target))


BROKEN = {
    "is_frozen_configuration": [changed(__eq__=object.__eq__, __hash__=object.__hash__)],
    "can_be_planned": [changed(batch_size=0)],
    "outline_is_that_of_model_and_records": [
        changed(outline=lambda self: outlined(with_three_classes, (3,), 5)),
        changed(outline=lambda self: outlined(self.model, (4,), 5)),
        changed(outline=lambda self: Sound.outline(self)._replace(model=self.model())),
    ],
    "counts_are_as_declared": [splits(lambda s: s._replace(train=Split(*(part[1:] for part in s.train))))],
    "splits_are_disjoint": [splits(lambda s: s._replace(validation=Split(*(part[:7] for part in s.train))))],
    "splits_depend_on_the_seed_alone": [
        changed(splits=lambda self, seed: Sound.splits(self, int(torch.randint(1000, ())))),
        changed(splits=lambda self, seed: Sound.splits(self, 0)),
    ],
    "transform_is_a_function_of_each_record": [
        changed(transform=lambda self, x: x - x.mean(dim=0)),
        changed(transform=lambda self, x: x.mul_(2)),
        changed(augment=lambda self, x: x * random.random()),
        changed(augment=lambda self, x: x + x[torch.randperm(len(x))]),
    ],
    "model_is_drawn_from_the_generator": [changed(model=own_random_numbers)],
    "losses_and_scores_are_one_for_each_record": [
        changed(loss=lambda self, output, target: Sound.loss(self, output, target).mean()),
        loss_of(lambda output: output * 0),
        loss_of(lambda output: output / 0),
        changed(metric=lambda self, output, target: Sound.metric(self, output, target).mean()),
    ],
    "records_do_not_meet": [loss_of(lambda output: output - output.mean(dim=0))],
    "engines_agree": [changed(model=lambda self: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))],
    "report_is_plain_data": [
        changed(report=lambda self, predict, split: predict(split.x)),
        changed(report=lambda self, predict, split: {"nll": float("inf")}),
    ],
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_workload_fails(rule):
    for workload in BROKEN[rule]:
        with pytest.raises((AssertionError, TypeError, ValueError)):
            check(workload, rule)


def test_engines_that_let_batch_normalisation_pass_or_disagree_fail(monkeypatch):
    monkeypatch.setattr(workloads.clipping, "engine", lambda *args, **options: None)
    with pytest.raises(AssertionError, match="is accepted"):
        check(Sound(), "batch_normalisation_is_refused")
    clipped = VmapEngine.clipped

    def doubled(self, *args, **options):
        found = clipped(self, *args, **options)
        return found._replace(total=2 * found.total)

    monkeypatch.undo()
    monkeypatch.setattr(VmapEngine, "clipped", doubled)
    with pytest.raises(AssertionError, match="another clipped sum"):
        check(Sound(), "engines_agree")


def test_changed_data_fail(folder, monkeypatch):
    workload = registry.create_workload("images", data="mnist", architecture="two_conv", validation=8)
    check(workload, "data_are_the_known_ones")
    x, y = data.images("mnist", "train")
    monkeypatch.setattr(workloads.data, "images", lambda name, split: Split(x + 1, y))
    with pytest.raises(AssertionError, match="inputs are not the known"):
        check(workload, "data_are_the_known_ones")
