import fabricated
import pytest
import torch
import torch.nn.functional as F

from dpopt import registry
from dpopt.cells import Cell
from dpopt.clipping.views import Views
from dpopt.errors import ConfigError
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import sampling
from dpopt.runs import train as cells

FIELDS = {"data": "mnist", "architecture": "two_conv", "validation": 8}


@pytest.fixture(autouse=True)
def _small_data(root, monkeypatch):
    fabricated.images(monkeypatch, root, "mnist", 28)
    fabricated.images(monkeypatch, root, "cifar10")


def workload(**fields):
    return registry.create_workload("augmented_images", **{**FIELDS, **fields})


def cell(**fields):
    augmented = workload(**fields)
    described = registry.spec("workload", "augmented_images", augmented), registry.spec("optimizer", "dp_sgd", DPSGD())
    return Cell(*described, 4.0, 1e-3, "rdp", batch_size=10, epochs=1.0, seed=0, kernel=sampling.REVISION)


def one_by_one(x, padding):
    """Mirrored and cropped, one image after the other, with the numbers that the generator gives."""
    mirrored = torch.rand(len(x), 1, 1, 1).flatten() < 0.5
    down, right = torch.randint(2 * padding + 1, (2, len(x), 1)).flatten(1)
    images = []
    for image, flip, top, left in zip(x, mirrored, down.tolist(), right.tolist(), strict=True):
        wider = F.pad(image.flip(-1) if flip else image, (padding,) * 4, mode="reflect")
        images.append(wider[:, top : top + x.shape[2], left : left + x.shape[3]])
    return torch.stack(images)


@pytest.mark.parametrize("padding", [0, 3])
def test_each_image_is_mirrored_and_shifted_on_its_own(padding):
    x = torch.randn(20, 3, 9, 7)
    torch.manual_seed(3)
    expected = one_by_one(x, padding)
    torch.manual_seed(3)
    augmented = workload(padding=padding).augment(x)
    assert torch.equal(augmented, expected)
    assert not torch.equal(augmented, x)
    assert len({int(row) for row in (augmented - x).flatten(1).abs().sum(1) * 1e3}) > 1


def test_a_cell_trains_on_views_evaluates_plain_images_and_costs_what_it_costs_without_views(root):
    ready = cells.prepare(Cell(**{**vars(cell(multiplicity=3)), "diagnostics": True}), device="cpu")
    assert isinstance(ready.engine.model, Views)
    seen, watch = [], ready.oracle._watch
    ready.oracle._watch = lambda examples: seen.append(examples) or watch(examples)
    state = ready.optimizer.step(ready.state, ready.oracle)
    assert seen[0].x.shape[1:] == (3, 1, 28, 28)
    assert set(ready.diagnostics.entry()) > {"norms", "clipped"}  # and what needs the gradient of each record
    entry, split = ready.observe(state), ready.watched["test"]
    ready.engine.load(state.theta)
    with torch.no_grad():
        output = ready.model.eval()(ready.workload.transform(split.x))
    assert entry["test_loss"] == pytest.approx(float(F.cross_entropy(output, split.y)), rel=1e-5)
    assert cells.prepare(cell(multiplicity=1), device="cpu").plan == ready.plan


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"padding": 28}, "padding: 28 cannot be used; expected less than 28"),
        ({"multiplicity": 0}, "multiplicity"),
        ({"architecture": "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "pretrained": True, "subset": "head"}, "once"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ConfigError, match=message):
        workload(**fields).check()
