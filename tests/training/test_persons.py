"""All rows of a person are one record: their mean gradient is clipped once, whoever else is there."""

import math
import uuid
import warnings

import datasets
import numpy as np
import pandas as pd
import pytest
import short
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import dpopt
from dpopt import clipping
from dpopt.clipping import Abadi
from dpopt.clipping.state import State
from dpopt.errors import ConfigError
from dpopt.files import Damaged
from dpopt.privacy import Ledger, Unit
from dpopt.training import persons, saved
from dpopt.training.subject import Layout, Subject
from dpopt.workloads.base import Split

pytestmark = pytest.mark.filterwarnings("ignore:seed", "ignore:delta", "ignore:unit")
OWNERS = ["ann", "bob", "ann", "cy", "ann", "bob", "dee", "ann"]
MOST, C = 3, 0.4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def grouped(rows, owners=OWNERS):
    (x, y), rows = short.records(8), list(rows)
    model, layout = network(), Layout(torch.float32)
    records = Split(x[rows], y[rows])
    subject = Subject(model, short.loss, records, {}, lambda x: x, layout, torch.device("cpu"), State(model))
    return persons.by_person(subject, persons.rows_of([owners[row] for row in rows]), MOST)


def clipped(rows):
    """The clipped mean gradient of one person's rows, by autograd."""
    x, y = short.records(8)
    model = network()
    short.loss(model(x[rows]), y[rows]).mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return gradient * min(1.0, C / float(gradient.norm()))


def by_engine(rows, name):
    subject = grouped(rows)
    engine = clipping.engine(subject.model, subject.loss, name, sample=subject.first)
    x, y = subject.train
    return engine.clipped_sum([(1.0, engine.theta)], subject.transform(x), y, torch.ones(len(x)), Abadi(C))


@pytest.mark.parametrize("name", ["bookkeeping", "vmap"])
def test_a_person_is_clipped_once_by_the_mean_of_the_first_rows(name):
    of_each = [[0, 2, 4], [1, 5], [3], [6]]  # the fourth row of ann is one too many
    expected = torch.stack([clipped(rows) for rows in of_each])
    assert (expected.norm(dim=1) > 0.99 * C).any(), "some are clipped"
    assert torch.allclose(by_engine(range(8), name), expected.sum(0), atol=1e-6)
    # Without ann only ann's part is gone, which is at most C long.
    without = by_engine([1, 3, 5, 6], name)
    assert torch.allclose(by_engine(range(8), name) - without, expected[0], atol=1e-6)


def test_rows_that_are_not_there_do_not_count_whatever_is_in_their_place():
    x, y = grouped(range(8)).train
    assert x.shape == (4, MOST, 4)
    assert y[..., 1].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    loss, output = persons.PersonLoss(short.loss, has_views=True), torch.randn(4, MOST, 2)
    changed = output.clone()
    changed[1, 2] = changed[2, 1:] = math.nan
    assert torch.equal(loss(output, y), loss(changed, y))


def test_fit_by_persons():
    x, y = short.records(90)
    frame = pd.DataFrame(x.numpy(), columns=list("abcd")).assign(label=y.numpy(), who=np.arange(90) // 3)
    result = short.fit(nn.Linear(4, 2), frame, unit="who", unit_rows=3, batch_size=10, test=frame, delta=None)
    record = result.record
    assert (record["examples"], record["rate"], record["unit"]) == (30, 10 / 30, "person")
    assert record["delta"] == 30**-1.1
    assert record["adjacency"] == "add or remove all records of one person"
    text = str(result.statement())
    assert "In words: whether all records of any one person were among the training data" in text
    assert "A person is a value of the column who. Of each person the first 3 rows count at most." in text
    assert "Several persons at once, such as a family" in text
    by_list = short.fit(
        nn.Linear(4, 2), frame.drop(columns="who"), unit=list(frame["who"]), unit_rows=3, batch_size=10, test=None
    )
    assert by_list.record["examples"] == 30
    # Other groups of the same rows are another run, whose noise is its own.
    torch.manual_seed(0)
    one = short.fit(nn.Linear(4, 2), (x, y), unit=np.arange(90) // 3, epsilon=1e6, batch_size=10)
    torch.manual_seed(0)
    two = short.fit(nn.Linear(4, 2), (x, y), unit=(np.arange(90) + 1) // 3, epsilon=1e6, batch_size=10)
    assert not torch.equal(short.weights(one), short.weights(two))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": list(range(59))}, "59 owners, 60 rows"),
        ({"unit": [*map(float, range(59)), math.nan]}, "59 float, 1 missing or else"),
        ({"unit": [*map(str, range(59)), None]}, "59 str, 1 missing or else"),
        ({"unit": pd.Series([*range(59), pd.NA], dtype="Int64")}, "59 int, 1 missing or else"),
        ({"unit": [1, "1"] * 30}, "30 int, 30 str"),
        ({"unit": [True, 1] * 30}, "30 bool, 30 int"),
        ({"unit": [object() for _ in range(60)]}, "60 missing or else"),
        ({"unit": np.eye(60)}, "60 missing or else"),
        ({"unit": 3, "batch_size": 1}, "1 owners, 60 rows"),
        ({"unit": [2.0**53, 1.0] * 30}, "as floats below 2"),
        (
            {"unit": list(range(60)), "train": (short.records()[0], torch.ones(60, dtype=torch.cfloat))}
            | {"loss": lambda o, t: (o[:, 0] - t.real).square()},
            r"60 owners, 60 rows, targets \[60\]",
        ),
        ({"unit": "who"}, "expected a column of a data frame"),
        ({"unit": list(range(60)), "augment": lambda x: x}, "expected it without `augment`"),
        ({"unit": list(range(60)), "unit_rows": 0}, "^unit_rows: 0"),
        ({"unit_rows": 2}, "expected it with `unit`"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        short.fit(**changes)


@pytest.mark.parametrize(
    "make",
    [
        list,
        np.array,
        lambda ids: np.array(ids, object),
        lambda ids: torch.tensor(ids, dtype=torch.float64),
        lambda ids: [torch.tensor(each) for each in ids],
        lambda ids: pd.Series(ids, dtype="Int64"),
        lambda ids: pd.Series(map(str, ids), dtype="category"),
        lambda ids: pd.to_datetime(pd.Series(ids), unit="s"),
        lambda ids: [uuid.UUID(int=each) for each in ids],
    ],
)
def test_owners_are_the_same_by_value_and_by_nothing_else(make):
    """Numbers that agree in four digits, as a tensor shows them, are two persons; equal objects are one."""
    ids = [100_000_001, 100_000_002, 100_000_001, 7, 100_000_002]
    assert persons.rows_of(make(ids)) == [[0, 2], [1, 4], [3]]


def test_a_column_of_hugging_face_and_a_test_split_without_owners():
    x, y = short.records()
    columns = {"x": x.numpy(), "label": y.numpy(), "who": [row // 3 for row in range(60)]}
    train, test = datasets.Dataset.from_dict(columns), datasets.Dataset.from_dict(columns).remove_columns("who")
    record = short.fit(train=train, unit="who", test=test, batch_size=5).record
    assert (record["examples"], record["unit_rows"], record["tested"]) == (20, 4, True)


def test_rows_of_a_person_that_repeat_are_no_persons_of_their_own():
    data = Subset(TensorDataset(*short.records()), [*range(30)] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="seed")
        short.fit(train=data, unit=[*range(30)] * 2, batch_size=10)


OF_WHO = {"unit": [row // 3 for row in range(60)], "unit_name": "who", "batch_size": 5}


@pytest.fixture(scope="module")
def by_who():
    return short.fit(**OF_WHO, epsilon=1.0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("who", {}, "person who and record' .* train all runs by the same `unit`"),
        ("who", {"unit": "house"}, "person who and person house'"),
        ("", {"unit": []}, "person' .* each run says so by `unit_name`"),
    ],
)
def test_runs_of_several_units_are_not_added_up(by_who, name, changes, message):
    with pytest.raises(ConfigError, match=f"^spent: '{message}"):
        short.fit(train="read after that", spent=Ledger(by_who.ledger, Unit("person", name)), **changes)


def test_a_person_is_the_same_in_two_runs_if_both_name_it(by_who):
    second = short.fit(**OF_WHO, spent=by_who.ledger)
    assert second.ledger.starts_with(by_who.ledger)
    assert "the column who. Of each person" in str(second.statement())


def test_a_saved_ledger_is_of_the_persons_of_its_record(by_who, tmp_path, monkeypatch):
    folder = by_who.save(tmp_path / "run")
    whole = dpopt.load(folder)
    monkeypatch.setattr(saved, "_check", lambda _: whole.record["weights_sha256"])
    assert whole.ledger == by_who.ledger
    (folder / "ledger.json").write_text(Ledger(list(by_who.ledger)).to_json())  # as earlier versions wrote it
    assert dpopt.load(folder).ledger == by_who.ledger
    (folder / "ledger.json").write_text(Ledger([*by_who.ledger]).to_json().replace("1,", '1,"unit":{},', 1))
    with pytest.raises(Damaged, match=r"record\.unit: 'person' .* it is 'record'"):
        dpopt.load(folder)


def test_a_checkpoint_is_of_its_owners(tmp_path):
    """As many persons, and the same rows in the same order."""
    short.fit(unit=[*range(30)] * 2, checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="another run's, which differs in unit:"):
        short.fit(unit=[*range(30), *range(29, -1, -1)], checkpoint=tmp_path)


def test_whoever_has_too_many_rows_is_told():
    with pytest.warns(UserWarning, match="someone has 20 rows, of which 4 count"):
        short.fit(unit=[row // 20 for row in range(60)], batch_size=2)
