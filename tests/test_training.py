"""`fit` trains any model with any optimizer, states what it spends, and keeps what is secret."""

import json
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from devices import ON_CUDA
from short import fit, records, weights
from torch import nn

import dpopt
from dpopt.errors import ConfigError
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import DataOracle, epsilon, sampling
from dpopt.privacy.sampling import derive
from dpopt.training import fitting

pytestmark = pytest.mark.filterwarnings("ignore:seed")


@pytest.mark.parametrize("name", ["dp_sgd", "hyfreedp", "adadp", "torch_optim"])
def test_optimizers_of_every_kind_train_a_model_of_ones_own(name):
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(4, 2), records()
    before = model.weight.detach().clone()
    result = fit(model, optimizer=name, test=(x, y))
    assert result.model is model
    assert not torch.equal(model.weight, before)
    assert epsilon(result.ledger, 1e-5, "rdp") == result.record["epsilon"] <= 5.0
    assert result.record["status"] == "done"
    assert len(result.ledger) == result.record["draws"] == result.curve[-1]["draw"] == 12
    assert result.record["test_accuracy"] == pytest.approx(float((model(x).argmax(1) == y).double().mean()))


def test_training_works_and_without_noise_says_so():
    longer = {"train": records(400), "test": records(400), "epochs": 10, "batch_size": 100}
    private = fit(optimizer=dpopt.create("dp_adam", lr=0.05), **longer).record
    assert private["test_accuracy"] > 0.85
    record = fit(epsilon=math.inf, optimizer=dpopt.create("dp_adam", lr=0.1, clip="inf"), **longer).record
    assert record["test_accuracy"] > 0.95
    assert (record["private"], record["epsilon"], record["noise"]) == (False, math.inf, {"gradient": 0.0})


def test_bfloat16_trains_almost_the_same_model_in_float32():
    plain, half = (fit(precision=precision, epsilon=math.inf).model.weight for precision in ("float32", "bfloat16"))
    assert half.dtype == torch.float32
    assert not torch.equal(half, plain)
    torch.testing.assert_close(half, plain, rtol=0.05, atol=0.02)


def test_stored_bytes_are_transformed_batch_by_batch():
    x, y = records()
    stored = (x * 40 + 128).clamp(0, 255).to(torch.uint8)

    def transform(batch):
        return (batch.float() - 128) / 40

    # Without noise, which depends on the records as they are stored.
    plain = fit(train=(transform(stored), y), test=(transform(stored), y), epsilon=math.inf)
    result = fit(train=(stored, y), test=(stored, y), transform=transform, epsilon=math.inf)
    torch.testing.assert_close(result.model.weight, plain.model.weight)
    assert result.record["test_loss"] == pytest.approx(plain.record["test_loss"])
    floats = fit(train=(stored.float(), y), epsilon=math.inf)
    assert torch.equal(weights(fit(train=(stored, y), epsilon=math.inf)), weights(floats))


def test_the_record_holds_what_a_privacy_statement_needs():
    record = json.loads(json.dumps(fit(seed=None).record))
    guarantee = {"adjacency": "add or remove one record", "unit": "record", "sampling": "Poisson"}
    sizes = {"batch_size": 20, "epochs": 4, "examples": 60, "rate": 1 / 3, "draws": 12}
    versions = {"dpopt": dpopt.__version__, "torch": torch.__version__}
    stated = {**guarantee, **sizes, "versions": versions, "seed_is_secret": True}
    assert {key: record[key] for key in stated} == stated


def test_a_result_is_shown_in_a_line():
    result = fit(test=records())
    spent, measured = (result.record[name] for name in ("epsilon", "test_accuracy"))
    assert repr(result).startswith(f"FitResult(status='done', epsilon={spent}, delta=1e-05, draws=12, test_loss=")
    assert repr(result).endswith(f", test_accuracy={measured})")


class Seeds(NamedTuple):
    """What a run makes its random numbers from; `secret` is None where it was given a number."""

    secret: int | None
    draws: int
    noise: int


@pytest.fixture
def seeds(monkeypatch):
    """The seeds of each run of `fit`, in order."""
    runs, secrets = [], []

    def take():
        secrets.append(sampling.secret_seed())
        return secrets[-1]

    class Watched(DataOracle):
        def __init__(self, *args, draw_seed, noise_seed, **rest):
            runs.append(Seeds(secrets.pop() if secrets else None, draw_seed, noise_seed))
            super().__init__(*args, draw_seed=draw_seed, noise_seed=noise_seed, **rest)

    monkeypatch.setattr(fitting, "secret_seed", take)
    monkeypatch.setattr(fitting, "DataOracle", Watched)
    return runs


def test_a_number_repeats_a_run_and_a_secret_is_another_each_time_and_costs_the_same():
    first, second, public, again, other = (fit(seed=seed) for seed in (None, None, 0, 0, 1))
    assert torch.equal(weights(public), weights(again))
    for one, two in ((first, second), (first, public), (public, other)):
        assert not torch.equal(weights(one), weights(two))
        assert one.record["epsilon"] == two.record["epsilon"] <= 5.0
        assert one.ledger == two.ledger
        assert one.record.keys() == two.record.keys()


def test_an_optimizer_whose_code_was_changed_has_other_noise(seeds):
    class Mine(DPSGD):
        def step(self, state, oracle):
            return super().step(state, oracle)

    class Edited(DPSGD):
        def step(self, state, oracle):
            return super().step(super().step(state, oracle), oracle)

    Edited.__qualname__ = Mine.__qualname__
    for optimizer in (Mine(), Mine(), Edited()):
        fit(optimizer=optimizer)
    assert seeds[0] == seeds[1] != seeds[2]


def test_runs_of_one_seed_share_no_draws_where_one_counts_the_other(seeds):
    whole = fit()
    for options in ({}, {"epsilon": 8.0, "epochs": 2, "spent": whole.ledger}):
        fit(**options)
    assert seeds[0] == seeds[1]
    assert len({run.draws for run in seeds}) == len({run.noise for run in seeds}) == 2


def test_a_secret_seed_is_not_kept(seeds, caplog, capfd, monkeypatch):
    with caplog.at_level(0):
        result = fit(seed=None, progress=True)
    assert result.record["seed"] is None
    said = [json.dumps(result.record), json.dumps(result.curve), result.ledger.to_json(), repr(result)]
    said += [caplog.text, *capfd.readouterr(), repr(result.model.state_dict())]
    for number in seeds[0]:
        for text in (str(number), f"{number:x}"):
            assert not any(text in where for where in said)
    # It is the same run all the same: whoever knew the secret could make it again.
    monkeypatch.setattr(fitting, "secret_seed", lambda: seeds[0].secret)
    assert torch.equal(weights(fit(seed=None)), weights(result))


def test_membership_and_noise_both_come_from_the_secret(seeds):
    """Known noise can be taken off a release, and known draws are not amplified."""
    for seed in (None, None, 3):
        fit(seed=seed)
    first, second, public = seeds
    assert len({*first, *second}) == 6
    assert [run.draws for run in (first, second)] == [derive("draws", run.secret) for run in (first, second)]
    assert public[:2] == (None, derive("draws", 3))


def weighted(weight):
    weights = torch.tensor([1.0, weight])
    return lambda output, target: F.cross_entropy(output, target, weights, reduction="none")


class Stopped(nn.Module):
    """The same outputs for any `share`, and another gradient."""

    def __init__(self, share):
        super().__init__()
        torch.manual_seed(0)
        self.share, self.layer, self.head = share, nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.layer(x)
        return self.head(h.detach() * self.share + h * (1 - self.share))


def test_runs_of_one_seed_with_another_loss_or_model_do_not_share_noise(seeds):
    """Their first releases would differ by their sums alone. The first records tell most of them apart not at all."""
    data = torch.randn(200, 4), torch.arange(200) // 100
    frozen = [nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)) for _ in range(2)]
    for model in frozen:
        nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)
    for model, loss in (
        *((Stopped(0.0), weighted(weight)) for weight in (1.0, 1.0, 3.0)),
        (Stopped(0.5), weighted(1.0)),
        *((model, weighted(1.0)) for model in frozen),
    ):
        fit(model, data, loss=loss, seed=2**50, epochs=0.1)
    noise = [run.noise for run in seeds]
    assert noise[0] == noise[1]
    assert len(set(noise)) == 5


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_gradients_that_a_caller_switched_off_are_taken(around):
    torch.manual_seed(0)
    model, data = nn.Linear(4, 2), records()
    before = model.weight.detach().clone()
    with around():
        result = fit(model, data)
    assert result.record["status"] == "done"
    assert not torch.equal(model.weight, before)


class Rare(nn.Module):
    """Treats a whole batch otherwise where one record holds the rarest token."""

    def __init__(self):
        super().__init__()
        self.table, self.one, self.two = nn.Embedding(50, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        h = self.table(x).mean(1)
        return self.one(h) + self.two(h) if bool((x == 49).any()) else self.one(h)


@pytest.mark.filterwarnings("ignore:model. the loss never uses two")
def test_a_model_that_looks_for_a_rare_token_sees_single_records():
    torch.manual_seed(0)
    x = torch.randint(0, 49, (400, 6))
    x[37, 0] = x[251, 3] = 49
    data = x, (x[:, 0] > 20).long()
    with pytest.raises(ConfigError, match="losses of a batch are not those of its examples"):
        fit(Rare(), data, engine="bookkeeping")
    with pytest.raises(ConfigError, match="engine='loop'"):
        fit(Rare(), data)
    assert fit(Rare(), data, epochs=0.1, engine="loop").record["evaluation"] == "loop"


def test_mode_of_the_model_is_kept():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).eval()
    fit(model)
    assert not model.training
    assert fit(model.train()).model.training


def test_a_vector_target_has_a_loss_but_no_accuracy():
    x, _ = records()
    pair = x, x @ torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    result = fit(train=pair, test=pair, loss=lambda o, y: (o - y).square().mean(1), optimizer="dp_sgd", epsilon=50.0)
    assert "test_accuracy" not in result.record
    assert result.record["test_loss"] < result.curve[0]["test_loss"]


class Overflow(nn.Linear):
    """Has no finite output for records whose first number is large, or gives one class nothing there."""

    def __init__(self, bad):
        super().__init__(4, 2)
        self.bad = bad

    def forward(self, x):
        return super().forward(x).masked_fill((x[:, :1] > 1) & torch.tensor([True, False]), self.bad)


@pytest.mark.parametrize(("bad", "engine"), [(math.nan, "auto"), (math.inf, "vmap")])
def test_a_record_without_finite_outputs_counts_as_wrong_and_is_said(bad, engine):
    x, y = records()
    is_scored = x[:, 0] <= 1
    result = fit(Overflow(bad), train=(x[is_scored], y[is_scored]), test=(x, y), engine=engine)
    unscored = int((~is_scored).sum())
    hits = (result.model(x).argmax(1) == y) & is_scored
    assert result.record["test_accuracy"] == pytest.approx(float(hits.double().mean()))
    assert math.isnan(result.record["test_loss"])
    assert (result.record["test_unscored"], result.record["status"]) == (unscored, "done")
    assert all(parameter.isfinite().all() for parameter in result.model.parameters())


@ON_CUDA
@pytest.mark.parametrize("name", ["dp_sgd", "hyfreedp"])
def test_a_run_on_a_gpu_goes_through_and_without_noise_ends_as_on_the_cpu(cuda, name):
    common = {"optimizer": name, "test": records()}
    expected = fit(**common, epsilon=math.inf, device="cpu").curve
    with cuda.there():
        found = fit(**common, epsilon=math.inf, device="cuda").curve
        private = fit(**common, device="cuda").record
    assert private["status"] == "done"
    assert private["epsilon"] <= 5.0
    for entry, other in zip(found, expected, strict=True):
        assert entry == {key: pytest.approx(value, rel=1e-3) for key, value in other.items()}
