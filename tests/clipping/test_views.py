import random

import pytest
import torch
from loop import cross_entropy as loss
from torch import nn

import dpopt
from dpopt.clipping import Abadi, engine
from dpopt.clipping.views import multiplied, refuse_mixing, refuse_sharing
from dpopt.errors import ConfigError
from dpopt.privacy import DataOracle, calibrate

RECORDS, VIEWS = 6, 5


def flipped(x):
    """Each image is mirrored with probability 1/2, shifted and dimmed."""
    mirrored = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)
    return torch.rand(len(x), 1, 1, 1, dtype=x.dtype) * mirrored.roll(int(torch.randint(3, ())), -1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(self.table(x))).mean(1))


def convolutional():
    front = nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(4, 8), nn.ReLU()
    return nn.Sequential(*front, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 2))


def images():
    return torch.randn(RECORDS, 3, 8, 8)


def swapped(x):
    return torch.where(torch.rand(x.shape) < 0.3, torch.randint_like(x, 7), x)


CASES = {
    "convolutions": (convolutional, images, flipped),
    "words": (Words, lambda: torch.randint(7, (RECORDS, 4)), swapped),
}


def over(model, transform, augment, multiplicity, dims=4):
    return multiplied(model, loss, transform=transform, augment=augment, multiplicity=multiplicity, dims=dims)


def expected_sum(model, views, y, bound):
    """Loss and gradient norm of each record and the clipped sum, by autograd on one view of one record at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total, losses, norms = 0, [], []
    for record, target in zip(views, y, strict=True):
        alone = [loss(model(view[None]), target[None])[0] for view in record]
        gradients = [torch.cat([g.flatten() for g in torch.autograd.grad(each, parameters)]) for each in alone]
        gradient = torch.stack(gradients).mean(0)
        norms.append(gradient.norm())
        total = total + gradient * (bound / gradient.norm()).clamp(max=1)
        losses.append(torch.stack(alone).mean().detach())
    return torch.stack(losses), torch.stack(norms), total


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["auto", "vmap"])
def test_the_mean_gradient_over_views_is_clipped_once(name, kind):
    torch.manual_seed(0)
    build, inputs, augment = CASES[name]
    model, x, y = build().double(), inputs(), torch.arange(RECORDS) % 2
    x = x.double() if x.is_floating_point() else x
    twice = over(model, lambda x: x, augment, VIEWS, x.ndim)
    views = twice.transform(x)
    assert views.shape == (RECORDS, VIEWS, *x.shape[1:])
    made = engine(twice.model, twice.loss, kind, sample=(views[:3], y[:3]), batch=RECORDS)
    assert made.name == ("bookkeeping" if kind == "auto" else "vmap")
    losses, norms, _ = expected_sum(model, views, y, 1.0)
    bound = float(norms.median())  # some are clipped
    _, _, total = expected_sum(model, views, y, bound)
    found = made.clipped([(1.0, made.theta)], views, y, torch.ones(RECORDS, dtype=torch.bool), Abadi(bound))
    torch.testing.assert_close(found.losses[0], losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.norms, norms, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.total, total, rtol=1e-6, atol=1e-6)
    each = [made.clipped_sum([(1.0, made.theta)], views[i : i + 1], y[i : i + 1], one, Abadi(bound)) for i in range(2)]
    assert all(float(part.norm()) <= bound * (1 + 1e-9) for part in each)
    torch.testing.assert_close(made.outputs(made.theta, x), model.eval()(x).detach())


one = torch.ones(1, dtype=torch.bool)


def test_views_differ_and_an_augmentation_in_place_does_not_add_up():
    x = torch.ones(3, 4)
    assert torch.equal(
        over(nn.Identity(), lambda x: x, lambda x: x.mul_(2), 3).transform(x), torch.full((3, 3, 4), 2.0)
    )
    views = over(nn.Identity(), lambda x: x, lambda x: x + torch.rand(len(x), 1), 3).transform(x)
    assert len(views.flatten(0, 1)[:, 0].unique()) == 9


def test_an_oracle_releases_what_the_twin_finds():
    """Transform, views, padding and physical batches together; without noise."""
    torch.manual_seed(0)
    model, x, y = convolutional().double(), images().double().repeat(5, 1, 1, 1), torch.arange(30) % 2
    seen = []

    def noted(x):
        seen.append(flipped(x))
        return seen[-1]

    made = over(model, lambda x: 2 * x, noted, VIEWS)
    clipper = engine(made.model, made.loss, "bookkeeping", sample=(made.transform(x[:3]), y[:3]), batch=15)
    optimizer = dpopt.create("dp_sgd", lr=1.0, clip=0.05)
    plan = calibrate(optimizer, rate=0.5, draws=1, dimension=clipper.dimension, epsilon=float("inf"), delta=1e-4)
    inputs = []
    oracle = DataOracle(
        clipper, x, y, plan, draw_seed=1, noise_seed=2, physical_batch=4, transform=made.transform, watch=inputs.append
    )
    start = clipper.theta
    end = optimizer.step(optimizer.init(start), oracle).theta
    kept = [(part.x[part.mask], part.y[part.mask]) for part in inputs]
    views, targets = (torch.cat(part) for part in zip(*kept, strict=True))
    assert views.shape[1] == VIEWS
    assert len(views) not in (0, 30)
    _, _, total = expected_sum(model, views, targets, 0.05)
    torch.testing.assert_close((start - end) * 15, total, rtol=1e-6, atol=1e-6)


def mixup(x):
    share = torch.rand(len(x), 1, 1, 1)
    return share * x + (1 - share) * x[torch.randperm(len(x))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (mixup, "depends on the others"),
        (lambda x: x / x.amax(), "depends on the others"),
        (lambda x: x.flip(0), "depends on the others"),
        (lambda x: x * random.random(), "once and that another time"),
    ],
)
def test_a_change_that_mixes_records_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        refuse_mixing(change, images(), "augment")


@pytest.mark.parametrize("kind", [torch.uint8, torch.int64])
@pytest.mark.parametrize("change", [lambda x: x.float() / x.amax(), lambda x: x.float() - (x == x.amax()).sum()])
def test_a_change_of_whole_numbers_that_mixes_is_refused(change, kind):
    """Their largest value is often the same in every batch."""
    pixels = (images() * 100).clamp(0, 255).to(kind)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = 255, 0
    with pytest.raises(ConfigError, match="depends on the others"):
        refuse_mixing(change, pixels, "transform")
    refuse_mixing(lambda x: x.float() / 255, pixels, "transform")
    refuse_mixing(lambda x: torch.eye(256)[x.long()], pixels, "transform")


@pytest.mark.parametrize("refuse", [refuse_mixing, refuse_sharing])
@pytest.mark.parametrize("change", [flipped, lambda x: x, lambda x: x.mul_(2), lambda x: x + torch.randn_like(x)])
def test_a_change_of_each_record_alone_is_accepted_and_leaves_all_as_it_was(change, refuse):
    x, state = images(), torch.get_rng_state()
    before = x.clone()
    refuse(change, x, "augment")
    refuse_sharing(flipped_together, x[:1], "augment")  # of one record nothing can be told
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


def flipped_together(x):
    return x.flip(-1) if torch.rand(()) < 0.5 else x


def shifted_together(x):
    return x + torch.randn(())


@pytest.mark.parametrize("change", [flipped_together, shifted_together])
def test_random_numbers_that_records_share_are_refused(change):
    """Which records are in one batch depends on who is in the draw: one more record would change those of others."""
    with pytest.raises(ConfigError, match="for a whole batch") as error:
        refuse_sharing(change, images(), "augment")
    assert change.__name__ in str(error.value)


@pytest.mark.parametrize("blank", [0, 0.5])
def test_random_numbers_that_records_share_are_seen_behind_symmetric_ones(blank):
    """A flip changes nothing of them: only the last record is other than its mirror image."""
    x = images()
    x[:-1] = x[:-1] + x[:-1].flip(-1) if blank else 0.0
    assert torch.equal(x[:-1], x[:-1].flip(-1))
    with pytest.raises(ConfigError, match="for a whole batch"):
        refuse_sharing(flipped_together, x, "augment")
    refuse_sharing(flipped, x, "augment")
    refuse_sharing(flipped_together, x[:-1], "augment")  # as its text says
