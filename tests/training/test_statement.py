import dataclasses
import math
import re
from decimal import Decimal

import dp_accounting
import pytest
import short
from dp_accounting import rdp
from hypothesis import example, given
from hypothesis import strategies as st

from dpopt.privacy.ledger import Draw, Ledger
from dpopt.training import statement
from dpopt.training.statement import Statement

pytestmark = pytest.mark.filterwarnings("ignore:seed")
RECORD = {
    "optimizer": "hyfreedp",
    "seed_is_secret": True,
    "status": "done",
    "epsilon_target": 3.0,
    "epsilon": 3.0,
    "delta": 1e-5,
    "accountant": "rdp",
    "noise": {"gradient": 1.5, "losses": 9.0},
    "rate": 0.02,
    "draws": 250,
    "examples": 5000,
    "batch_size": 100,
    "epochs": 5,
    "unit": "record",
    "adjacency": "add or remove one record",
    "sampling": "Poisson",
    "versions": {"dpopt": "0.1.0", "torch": "2.6.0"},
    "isolated": False,
    "dimension": 10,
    "inputs": [],
    "transform": None,
    "classes": [],
}
LEDGER = Ledger([Draw(0.02, (1.5, 9.0))] * 250)


def by_rdp(rate, noise, draws, delta):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return rdp.RdpAccountant().compose(event, draws).get_epsilon(delta)


COPIED = {
    *("epsilon", "delta", "epsilon_target", "accountant", "draws", "rate", "examples", "batch_size", "epochs", "noise"),
    *("status", "unit", "adjacency", "sampling", "versions"),
}


def test_numbers_are_the_records_and_those_of_a_direct_computation():
    result = short.fit(optimizer="dp_sgd")
    made = result.statement()
    assert {key: getattr(made, key) for key in COPIED} == {key: result.record[key] for key in COPIED}
    assert (made.batch_size, made.epochs, made.draws) == (20, 4, 12)
    assert by_rdp(1 / 3, made.noise["gradient"], 12, 1e-5) == pytest.approx(made.epsilon, rel=2e-3)


def test_epsilon_is_that_of_the_ledger_with_all_releases_of_a_draw():
    made = Statement.of(RECORD, LEDGER)
    together = (1.5**-2 + 9.0**-2) ** -0.5
    assert made.epsilon == pytest.approx(by_rdp(0.02, together, 250, 1e-5))
    assert made.epsilon > by_rdp(0.02, 1.5, 250, 1e-5)


def test_the_text_in_full():
    text = str(Statement.of(RECORD, LEDGER, []))
    assert text == EXPECTED


EXPECTED = """\
In words: whether any one record was among the training data changes the probability of anything that the \
model may show by a factor of at most 3.02 (e to the power of epsilon), but for a probability of at most \
1e-5 (delta, 0.0500 of 1/5000).
Guarantee: record-level (epsilon, delta)-differential privacy, epsilon = 1.104 at delta = 1e-5. Training \
was to spend at most epsilon = 3.
Neighbouring data sets: add or remove one record.
Setting: central. Whoever trained held the training records; the guarantee is towards all who see what is \
published.
What may be published: the final model, all models on the way to it and all noised releases, together. What \
is computed from these alone costs nothing more.
Accesses to the data that are covered: the draws of this run.
Accounting: rdp, Rényi differential privacy (dp-accounting; Mironov et al. 2019), from the run's \
ledger.
Choices: Whoever made this statement says that there was no other run on these data, and no choice by \
looking at them.
Not covered:
- Several records at once, such as all those of one person: only the presence of a single record is hidden as \
stated.
- The number of records, and the names of columns and classes: they are taken as public.
- What was done before: cleaning, normalising, a vocabulary, pretrained weights.
- The trial before training, which looks at a few records without noise: that there was an error, a warning \
or the status no_signal.
- An optimizer that means harm: it ran in the process that holds the data. What it was answered was private; \
that it read nothing else was not enforced.
- The last digits of floating-point numbers: the guarantee is proved for real numbers, and the noise is \
rounded.
- How long the run took.
Mechanism: hyfreedp; 250 draws from 5000 records by Poisson sampling at rate 0.02: an expected batch of 100 \
and 5 epochs. Each release is a sum of what was bounded for each record, with Gaussian noise; noise \
multiplier: 1.5 (gradient), 9 (losses).
Data: not named, 5000 records. Trained: not dated.
Seed: a secret from the operating system, which was deleted when training ended.
Status: done.
Versions: dpopt 0.1.0, torch 2.6.0."""


def test_the_first_sentence_can_be_quoted_alone():
    def first(tuned, **changes):
        return str(Statement.of({**RECORD, **changes}, LEDGER, tuned)).splitlines()[0]

    assert first([]).startswith("In words: whether any one record")
    assert first([]).endswith("of 1/5000).")
    assert first([], seed_is_secret=False).endswith("), for everyone who does not know the seed.")
    assert first(None).endswith("; choices that looked at these data, of which nothing is known, are not counted.")
    assert first(["The rate was chosen."]).endswith("; choices that looked at these data, see below, are not counted.")


@pytest.mark.parametrize("delta", [1e-5, 1e-6, 3e-7, 0.001])
def test_a_delta_is_shown_as_it_was_written(delta):
    text = str(Statement.of({**RECORD, "delta": delta}, LEDGER))
    shown = re.search(r"at delta = (\S+)\. Training", text)[1]
    assert Decimal(shown) == Decimal(repr(delta))


def test_no_score_is_in_it():
    text = str(Statement.of({**RECORD, "tested": True, "test_unscored": 17}, LEDGER))
    assert "17" not in text


def test_what_is_said_follows_the_run():
    plain = str(Statement.of(RECORD, LEDGER))
    assert "Nothing is known of other runs on these data" in plain
    assert "Scores on test data" not in plain
    assert "knows the seed" not in plain
    assert "An optimizer that means harm" in plain
    tuned = ["The learning rate was chosen among five.", "So was the batch size."]
    other = {**RECORD, "seed_is_secret": False, "isolated": True, "test_loss": 0.3}
    text = str(Statement.of(other, LEDGER, tuned))
    assert "Choices: The learning rate was chosen among five. So was the batch size.\n" in text
    assert "Scores on test data" in text
    assert "Anyone who knows the seed" in text
    assert "An optimizer that means harm" not in text


@pytest.mark.parametrize("ledger", [Ledger([Draw(0.02, (0.0,))]), LEDGER + Ledger([Draw(0.02, (1.5, 0.0))])])
def test_a_release_without_noise_leaves_no_guarantee(ledger):
    """Whatever the record says."""
    made = Statement.of(RECORD, ledger)
    assert not made.private
    assert made.epsilon == math.inf
    assert str(made).startswith("There is NO privacy guarantee")
    assert "Guarantee:" not in str(made)


@given(st.floats(1e-9, 1e6))
@example(7.39)
def test_epsilon_is_rounded_up(epsilon):
    shown = statement._up(epsilon)
    assert Decimal(epsilon) <= Decimal(shown) <= Decimal(epsilon) * Decimal("1.001")


@given(st.floats(1e-3, 1e5))
def test_the_factor_in_words_is_e_to_epsilon_rounded_up(epsilon):
    text = str(dataclasses.replace(Statement.of(RECORD, LEDGER), epsilon=epsilon))
    shown = float(Decimal(re.search(r"a factor of at most (\S+) \(e", text)[1]).ln())
    assert epsilon * (1 - 1e-12) <= shown <= epsilon + 0.011


def test_what_a_record_adds():
    more = {"clip": 1.0, "defaults": ["delta", "epochs"], "data": "patients", "date": "2026-01-02", "doubt": "it fell"}
    text = str(Statement.of({**RECORD, **more, "weights_sha256": "ab" * 32}, LEDGER))
    assert "what was bounded for each record (a gradient: by an L2 norm of C = 1), with Gaussian noise" in text
    assert "Defaults, which nobody chose for these data: delta, epochs." in text
    assert "Data: patients, 5000 records. Trained: 2026-01-02." in text
    assert f"The statement holds for the weights with SHA-256 {'ab' * 32} (model.safetensors)." in text
    assert "Status: done, it fell." in text


def test_a_dict_holds_all():
    made = Statement.of(RECORD, LEDGER)
    assert set(made.to_dict()) == {field.name for field in dataclasses.fields(Statement)}
    assert made.to_dict()["epsilon"] == made.epsilon
