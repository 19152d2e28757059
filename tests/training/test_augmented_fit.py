"""`augment`, `multiplicity` and `average` of `fit`, and the noise of runs that differ in these or anything else."""

import math
from functools import partial
from itertools import combinations

import pytest
import short
import torch
import torch.nn.functional as F
from short import loss
from torch import nn

import dpopt
from dpopt.errors import ConfigError
from dpopt.privacy import epsilon

pytestmark = pytest.mark.filterwarnings("ignore:seed")


def data(n=60):
    x = torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0, 0].sum(-1) > 0).long()


def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


def flipped(x):
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)


def doubled(x):
    return 2 * x


def fit(**changes):
    return short.fit(**{"optimizer": "dp_sgd", "seed": 1, "test": data(), "model": model(), "train": data(), **changes})


def test_views_cost_nothing_and_are_evaluated_on_the_plain_records():
    plain, viewed = fit(), fit(augment=flipped, multiplicity=4)
    assert viewed.ledger == plain.ledger
    assert epsilon(viewed.ledger, 1e-5, "rdp") == viewed.record["epsilon"] <= 5.0
    assert (plain.record["multiplicity"], viewed.record["multiplicity"]) == (1, 4)
    assert not torch.equal(viewed.model[1].weight, plain.model[1].weight)
    x, y = data()
    assert viewed.record["test_loss"] == pytest.approx(float(loss(viewed.model(x), y).mean()))
    assert viewed.record["test_accuracy"] == pytest.approx(float((viewed.model(x).argmax(1) == y).double().mean()))


def test_a_constant_augmentation_trains_as_on_the_changed_records():
    x, y = data()
    one = {"epsilon": math.inf, "test": None}
    expected = fit(train=(2 * x, y), **one).model[1].weight
    for views in (1, 3):
        torch.testing.assert_close(fit(augment=doubled, multiplicity=views, **one).model[1].weight, expected)


def test_views_repeat_with_the_seed_and_do_not_touch_the_generator():
    weights = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        weights.append(fit(augment=flipped, multiplicity=2).model[1].weight)
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*weights)
    assert not torch.equal(fit(augment=flipped, multiplicity=3).model[1].weight, weights[0])


def dropping(p):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.Dropout(p))


DIFFERENT = [
    {},
    {"augment": lambda x: 1.0001 * x},
    {"augment": lambda x: 1.0001 * x, "multiplicity": 2},
    {"augment": flipped},
    {"augment": flipped, "physical_batch": 8},
    # Of a thousand numbers one is dropped, so that a few records show nothing of it.
    *({"model": dropping(p), **how} for p in (0.1, 0.001) for how in ({}, {"physical_batch": 8}, {"engine": "vmap"})),
    {"model": dropping(0.5)},
    {"epsilon": 0.4},
    {"optimizer": dpopt.create("dp_sgd", lr=2.0)},
    {"transform": lambda x: 1.0002 * x},
    {"loss": partial(F.cross_entropy, reduction="none", label_smoothing=0.1)},
    {"train": (data()[0], torch.cat([1 - data()[1][:1], data()[1][1:]]))},
]


def test_runs_that_differ_in_anything_never_share_noise():
    """Their sums differ, by what a random layer draws too: shared noise of one seed would cancel, or be solved for."""
    one = {"epochs": 1 / 3, "optimizer": dpopt.create("dp_sgd", lr=1.0), "epsilon": 0.1, "test": None}
    start = model()[1].weight.detach()
    moved = [fit(**(one | changes)).model[1].weight.detach() - start for changes in DIFFERENT]
    for first, second in combinations((step / step.norm() for step in moved), 2):
        assert float((first - second).norm()) > 0.3


def test_a_model_without_random_layers_has_the_same_noise_for_any_physical_batch():
    one, other = (fit(physical_batch=size).model[1].weight for size in (8, 60))
    torch.testing.assert_close(one, other)


def test_an_average_is_of_the_same_releases():
    points = []
    result = fit(average=0.5, callback=points.append)
    plain = fit()
    assert result.ledger == plain.ledger
    assert result.record["average"] == 0.5
    assert plain.record["average"] == 0
    assert not torch.equal(result.model[1].weight, plain.model[1].weight)
    assert torch.equal(fit(average=0.0).model[1].weight, plain.model[1].weight)
    x, y = data()
    assert points[-1]["test_loss"] == pytest.approx(float(loss(result.model(x), y).mean()))


def test_an_average_is_that_of_the_parameters_on_the_way():
    """Without noise, the parameters after t draws are those of a run of t draws: rate and seed are the same."""
    one = {"epsilon": math.inf, "test": None}
    ends = torch.stack([fit(epochs=t / 3, **one).model[1].weight.detach() for t in range(1, 7)]).double()
    weights = 0.8 ** torch.arange(5, -1, -1).double()
    expected = torch.einsum("t,tij->ij", weights, ends) / weights.sum()
    torch.testing.assert_close(
        fit(epochs=2, average=0.8, **one).model[1].weight.double(), expected, rtol=1e-5, atol=1e-6
    )


class Stop(Exception):
    pass


def test_a_killed_run_goes_on_with_its_average_and_its_views(tmp_path):
    options = {"augment": flipped, "multiplicity": 2, "average": 0.9}
    expected = fit(**options)
    draws = []

    def stop(entry):
        draws.append(entry["draw"])
        if len(draws) == 7:
            raise Stop

    with pytest.raises(Stop):
        fit(**options, checkpoint=tmp_path, callback=stop)
    result = fit(**options, checkpoint=tmp_path)
    assert result.record["resumed_at"] == draws[-1]
    assert torch.equal(result.model[1].weight, expected.model[1].weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multiplicity": 3}, "multiplicity: 3 cannot be used; .* give `augment`"),
        ({"average": 1.0}, "average"),
        ({"augment": lambda x: x - x.mean(0)}, "augment: .* depends on the others"),
        ({"augment": lambda x: x.flip(-1) if torch.rand(()) < 0.5 else x}, "augment: .* for a whole batch"),
        ({"transform": lambda x: x + torch.randn(())}, "transform: .* for a whole batch"),
        ({"augment": lambda x: x.flatten(1)}, "augment: .* expected a tensor such as the inputs"),
        ({"augment": lambda x: x.fly()}, "augment: .* AttributeError"),
        ({"transform": lambda x: x - x.mean(0)}, "transform: .* depends on the others"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ConfigError, match=message):
        fit(**changes)
