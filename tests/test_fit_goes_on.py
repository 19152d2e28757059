"""A run of `fit` may be stopped and may go on after others; epsilon is of all that may have been released."""

import math

import dp_accounting
import pytest
import torch
from dp_accounting import rdp
from short import fit, records, sparing, weights

import dpopt
from dpopt.errors import ConfigError
from dpopt.files import Damaged
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import Ledger
from dpopt.privacy.ledger import Draw
from dpopt.training import fitting

pytestmark = pytest.mark.filterwarnings("ignore:seed")


def at_draw(draw):
    """A callback that ends the run at the first mark from `draw` on."""
    return lambda entry: entry["draw"] >= draw


def accounted(*runs, delta=1e-5):
    """The epsilon of runs (rate, noise, draws), by dp-accounting alone."""
    accountant = rdp.RdpAccountant()
    for rate, noise, draws in runs:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(event, draws)
    return accountant.get_epsilon(delta)


@pytest.fixture(scope="module")
def whole():
    return fit(test=records(50))


@pytest.fixture(scope="module")
def stopped():
    return fit(test=records(50), callback=at_draw(5))


def test_a_stopped_run_is_the_beginning_of_the_whole_one(whole, stopped):
    assert stopped.curve == whole.curve[:5]
    assert stopped.ledger == whole.ledger, "what a next run has to count"
    x, y = records(50)
    assert stopped.curve[-1]["test_loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(stopped.model(x), y)), rel=1e-6
    )


def test_all_planned_draws_are_charged_as_the_callback_may_have_looked_at_what_was_released(whole, stopped):
    record = stopped.record
    assert (record["status"], record["draws"], record["draws_planned"]) == ("stopped", 5, 12)
    assert record["epsilon"] == whole.record["epsilon"]
    taken = accounted((record["rate"], record["noise"]["gradient"], 5))
    assert stopped.epsilon_at(5) == pytest.approx(taken, rel=1e-9)
    assert taken < 0.9 * record["epsilon"]
    assert "stopped after 5 of 12 draws" in str(stopped.statement())
    assert stopped.statement().epsilon == record["epsilon"]
    with pytest.raises(ConfigError, match="expected more than the 5 that `spent` has spent"):
        fit(epsilon=4.9, spent=stopped.ledger)


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_only_true_ends_a_run(answer, whole):
    result = fit(test=records(50), callback=lambda entry: answer)
    assert result.record["status"] == "done"
    assert result.curve == whole.curve


def test_a_stopped_run_stays_stopped_when_its_call_is_made_again(tmp_path, stopped):
    calls = []

    def watched(entry):
        calls.append(entry["draw"])
        return entry["draw"] >= 5

    first = fit(test=records(50), callback=watched, checkpoint=tmp_path)
    again = fit(test=records(50), callback=watched, checkpoint=tmp_path)
    assert calls == [1, 2, 3, 4, 5]
    assert torch.equal(weights(first), weights(again))
    assert torch.equal(weights(first), weights(stopped))
    assert (again.record["status"], again.ledger, again.curve) == ("stopped", stopped.ledger, stopped.curve)


def test_epsilon_on_the_way_is_that_of_the_draws_up_to_there(whole):
    rate, noise = whole.record["rate"], whole.record["noise"]["gradient"]
    for entry in whole.curve[::4]:
        assert whole.epsilon_at(entry["draw"]) == pytest.approx(accounted((rate, noise, entry["draw"])), rel=1e-9)
    assert whole.epsilon_at(0) == 0
    assert whole.epsilon_at(12) == whole.record["epsilon"]
    for draw in (-1, 13, 1.5, "x", None):
        with pytest.raises(ConfigError, match=r"^draw: .* a whole number from 0 to 12"):
            whole.epsilon_at(draw)


def test_a_run_after_others_spends_what_they_left_of_epsilon(whole):
    second = fit(whole.model, epsilon=8.0, epochs=2, spent=whole.ledger)
    record = second.record
    legs = [(run["rate"], run["noise"]["gradient"], run["draws"]) for run in (whole.record, record)]
    assert record["epsilon"] == pytest.approx(accounted(*legs), rel=1e-9)
    assert 8 * (1 - 1e-4) < record["epsilon"] <= 8
    assert second.ledger == whole.ledger + Ledger(list(second.ledger)[12:])
    assert (record["draws"], record["draws_before"], len(second.ledger)) == (6, 12, 18)
    assert "and 12 draws of earlier runs" in str(second.statement())
    assert second.epsilon_at(0) == whole.record["epsilon"]
    assert second.epsilon_at(6) == record["epsilon"]
    third = fit(second.model, epsilon=9.0, epochs=1, spent=second.ledger, callback=at_draw(2))
    assert third.record["epsilon"] == pytest.approx(9, rel=1e-4)
    assert 8 < third.epsilon_at(2) < third.record["epsilon"]


def test_a_later_run_of_one_seed_has_draws_of_its_own(whole, monkeypatch):
    made, seeds = [], fitting._seeds
    monkeypatch.setattr(fitting, "_seeds", lambda *a: made.append(seeds(*a)) or made[-1])
    for spent in (None, whole.ledger):
        fit(epsilon=9.0, spent=spent)
    assert made[0][0] != made[1][0]


def test_an_optimizer_that_asks_for_less_than_it_planned_is_charged_for_all(monkeypatch):
    """What it left out may follow from what was released, and so from the records."""
    other = fit(optimizer="dp_sgd")
    monkeypatch.setattr(DPSGD, "step", sparing(DPSGD.step))
    less = fit(optimizer="dp_sgd")
    assert (less.record["status"], less.ledger) == ("done", other.ledger)
    assert less.record["epsilon"] == other.record["epsilon"] == less.statement().epsilon
    assert not torch.equal(weights(less), weights(other))


@pytest.mark.parametrize("epsilon", [1.0, 5.0])
def test_an_epsilon_that_is_spent_already_is_refused_before_training(whole, epsilon):
    with pytest.raises(ConfigError, match=r"epsilon: .*expected more than the 5 that `spent` has spent"):
        fit(epsilon=min(epsilon, whole.record["epsilon"]), spent=whole.ledger)


def test_a_ledger_is_asked_for(whole):
    with pytest.raises(ConfigError, match="spent"):
        fit(spent=whole.record)


def test_stopped_and_later_runs_can_be_saved(tmp_path, stopped):
    later = fit(stopped.model, epsilon=math.inf, spent=stopped.ledger)
    for name, result in {"stopped": stopped, "later": later}.items():
        read = dpopt.load(result.save(tmp_path / name), torch.nn.Linear(4, 2))
        assert read.ledger == result.ledger
        names = ("epsilon", "draws", "draws_before", "draws_planned", "status")
        assert [getattr(read.statement(), key) for key in names] == [getattr(result.statement(), key) for key in names]


def test_a_stopped_run_that_claims_less_is_damaged(tmp_path, stopped, monkeypatch):
    folder = stopped.save(tmp_path / "run")
    monkeypatch.setattr(dpopt.training.saved, "_check", lambda *_: None)  # whoever changes a record changes its sum
    text = (folder / "record.json").read_text()
    value = stopped.record["epsilon"]
    assert text.count(f'"epsilon": {value}') == 1
    (folder / "record.json").write_text(text.replace(f'"epsilon": {value}', '"epsilon": 0.5'))
    with pytest.raises(Damaged):
        dpopt.load(folder, torch.nn.Linear(4, 2))


@pytest.mark.parametrize("draws", [0, 1, 3, 4, 7, 9, 20])
def test_the_first_draws_of_a_ledger(draws):
    ledger = Ledger([Draw(0.1, (1.0,))] * 3 + [Draw(0.1, (1.0, 2.0))] + [Draw(0.1, (1.0,))] * 4)
    assert list(ledger.first(draws)) == list(ledger)[:draws]


def test_without_noise_nothing_is_left_to_spend():
    first = fit(epsilon=math.inf)
    second = fit(first.model, epsilon=math.inf, spent=first.ledger)
    assert second.record["epsilon"] == math.inf
    with pytest.raises(ConfigError, match="expected more than the inf"):
        fit(epsilon=3.0, spent=first.ledger)
