"""What people hand to `fit`: each kind of data, model and argument works, or is refused with one clear error."""

import inspect
import io
import math

import datasets
import numpy as np
import pandas as pd
import peft
import pytest
import rich
import short
import torch
from rich.console import Console
from short import loss, weights
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from transformers import BertConfig, BertForSequenceClassification, logging

import dpopt
from dpopt.errors import ConfigError
from dpopt.training import reading
from dpopt.training.reading import read
from dpopt.training.subject import Layout

pytestmark = pytest.mark.filterwarnings("ignore:seed")
logging.set_verbosity_error()
N = 60
X = np.random.default_rng(0).standard_normal((N, 4))
Y = (X[:, 0] > 0).astype(int)
TABLE = pd.DataFrame(X, columns=list("abcd")).assign(label=Y)
GOAL = TABLE.rename(columns={"label": "goal"})
CATEGORY = np.random.default_rng(1).integers(0, 5, N)
MIXED = {"numbers": X, "category": CATEGORY, "y": Y}


def linear(inputs=4):
    torch.manual_seed(0)
    return nn.Linear(inputs, 2)


def fit(train, model=None, **changes):
    return short.fit(model or linear(), train, **changes)


class Listed(Dataset):
    """A data set that makes its records one at a time."""

    def __init__(self, record, count=N):
        self.record, self.count = record, count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return self.record(number)


def hugging(table=TABLE):
    return datasets.Dataset.from_pandas(table)


def transformed():
    """Whose records are made when they are asked for, by a function of its owner."""
    return hugging().with_transform(lambda rows: {"x": X[: len(rows["a"])] * 0 + 1, "label": rows["label"]})


def pixels():
    return torch.from_numpy((X * 40 + 128).clip(0, 255).astype("uint8"))


TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
SAME = {
    "doubles": lambda: (torch.from_numpy(X), torch.from_numpy(Y)),
    "numpy": lambda: (X, Y),
    "two lists": lambda: (X.tolist(), Y.tolist()),
    "targets in a table": lambda: (TABLE[list("abcd")], TABLE[["label"]]),
    "a view in reverse": lambda: (X[::-1].copy()[::-1], Y[::-1].copy()[::-1]),
    "another byte order": lambda: (X.astype(">f8"), Y.astype(">i4")),
    "targets of another kind": lambda: (X, Y.astype("uint16")),
    "pandas pair": lambda: (TABLE[list("abcd")], TABLE["label"]),
    "DataFrame": lambda: TABLE,
    "mapping": lambda: {"x": X, "label": Y},
    "TensorDataset": lambda: TENSORS,
    "Subset": lambda: Subset(TENSORS, range(N)),
    "records": lambda: Listed(lambda i: (X[i], int(Y[i]))),
    "records with names": lambda: Listed(lambda i: {"x": X[i], "label": Y[i]}),
    "records of a mapping and a target": lambda: Listed(lambda i: ({"x": X[i]}, Y[i])),
    "DataLoader": lambda: DataLoader(TENSORS, batch_size=20, shuffle=True),
    "DataLoader of single records": lambda: DataLoader(TENSORS, batch_size=None),
    "DataLoader of a process": lambda: DataLoader(TENSORS, 20, sampler=DistributedSampler(TENSORS, 2, 0)),
    "Hugging Face": lambda: datasets.Dataset.from_dict({"x": X, "label": Y}),
    "Hugging Face from a table": hugging,
    "Hugging Face in part": lambda: hugging(TABLE.assign(t="x")).with_format("torch", columns=[*"abcd", "label"]),
}


@pytest.mark.parametrize("name", SAME)
def test_every_kind_of_data_is_read_as_the_same_records(name):
    inputs, targets = read(SAME[name](), "train")
    x, y = Layout.of(inputs, linear(), "train").split(inputs, targets, "train")
    assert torch.equal(x.float(), torch.from_numpy(X).float())
    assert torch.equal(y, torch.from_numpy(Y))


@pytest.mark.parametrize("name", ["DataFrame", "Hugging Face"])
def test_the_same_records_give_the_same_run(name):
    expected = fit((torch.from_numpy(X).float(), torch.from_numpy(Y)), test=(X, Y))
    other = fit(SAME[name](), test=SAME[name]())
    assert torch.equal(weights(other), weights(expected))
    assert other.curve == expected.curve


def test_the_target_is_found_by_its_name_and_columns_by_theirs():
    expected = fit(TABLE, test=TABLE)
    for given in (GOAL, hugging(GOAL), {name: GOAL[name] for name in GOAL}):
        assert fit(given, target="goal", test=given).curve == expected.curve


def test_bytes_and_real_numbers_become_the_type_of_the_model():
    stored = pixels()
    # Without noise, which depends on the records as they are stored.
    expected = weights(fit((stored.float() / 255, Y), model=linear().double(), epsilon=math.inf))
    found = fit((stored, Y), model=linear().double(), transform=lambda x: x.float() / 255, epsilon=math.inf)
    assert expected.dtype == torch.float64
    assert torch.equal(weights(found), expected)


def test_a_mapped_file_is_not_read_into_memory(tmp_path):
    np.save(tmp_path / "x.npy", X.astype("float32"))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert read((mapped, Y), "train")[0].data_ptr() == mapped.ctypes.data
    assert torch.equal(weights(fit((mapped, Y))), weights(fit((X, Y))))


def test_numbers_that_are_not_finite_are_counted_part_by_part(monkeypatch):
    monkeypatch.setattr(reading, "_FINITE", 9)
    with pytest.raises(ConfigError, match="in 2 of 60 records"):
        read((HOLES, Y), "train")


def test_a_category_is_an_input_for_each_stated_value():
    kinds = np.array(["red", "blue", None])[np.arange(N) % 3]
    table = TABLE.assign(kind=pd.Categorical(kinds, ["blue", "red", "green"]))
    by_hand = {"kind=blue": kinds == "blue", "kind=red": kinds == "red", "kind=green": np.zeros(N)}
    result, same = (fit(each, linear(7)) for each in (table, TABLE.assign(**by_hand)))
    assert torch.equal(weights(result), weights(same))
    assert result.record["inputs"] == [*"abcd", *by_hand]
    # A prediction takes texts, in any order of columns, also missing ones, and warns of values that nobody stated.
    expected = same.predict_proba(TABLE.assign(**by_hand))
    texts = TABLE.assign(kind=kinds)[["kind", *"dcba"]]
    for same_records in (texts, table, {name: list(texts[name]) for name in texts}):
        assert (result.predict_proba(same_records) == expected).all()
    without_blue = {**by_hand, "kind=blue": np.zeros(N)}
    with pytest.warns(UserWarning, match="x: 20 values of kind were not stated"):
        others = result.predict_proba(texts.assign(kind=np.where(kinds == "blue", "nan", kinds)))
    assert (others == same.predict_proba(TABLE.assign(**without_blue))).all()
    with pytest.raises(ConfigError, match=r"x: .* there is no column kind$"):
        result.predict(TABLE)


@pytest.mark.parametrize(
    ("column", "name"),
    [(pd.Categorical(Y, [0, 1]), "kind"), (pd.Categorical(["x"] * N), "a=b"), (pd.Categorical(["x"] * N), "clash")],
)
def test_a_category_that_predictions_could_mistake_is_refused(column, name):
    table = TABLE.assign(**{name: column, "clash=x": 1.0})
    with pytest.raises(ConfigError, match=r"^train\b"):
        fit(table)


def test_pandas_objects_of_one_index_are_paired_whatever_it_is():
    shuffled = TABLE.sample(frac=1, random_state=0)
    pair, whole = read((shuffled[list("abcd")], TABLE["label"].loc[shuffled.index]), "train"), read(shuffled, "train")
    assert torch.equal(pair[1], whole[1])
    assert all(torch.equal(pair[0][name], whole[0][name]) for name in "abcd")


class Both(nn.Module):
    """Takes numbers and a category by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.look, self.head = nn.Embedding(5, 3), nn.Linear(7, 2)

    def forward(self, numbers, category):
        return self.head(torch.cat([numbers, self.look(category)], dim=1))


class Unpacking(nn.Module):
    """The same model with one input, as one would write it by hand."""

    def __init__(self):
        super().__init__()
        self.both = Both()

    def forward(self, x):
        return self.both(x[:, :4], x[:, 4].long())


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_inputs_of_several_types_are_passed_by_name(engine):
    by_hand = np.concatenate([X.astype("float32"), CATEGORY[:, None]], axis=1)
    options = {"engine": engine, "epsilon": math.inf}  # noise depends on the type of the inputs
    expected = fit((by_hand, Y), model=Unpacking(), test=(by_hand, Y), **options)
    found = fit(MIXED, model=Both(), test=MIXED, **options)
    assert torch.equal(weights(found), weights(expected))
    assert found.curve == expected.curve


CONFIG = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=8,
    num_labels=2,
)


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(CONFIG)


def lora():
    return peft.get_peft_model(bert(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))


def tokens():
    ids = torch.randint(0, 50, (N, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(8) < torch.arange(N)[:, None] % 5 + 4
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": (ids[:, 0] > 25).long()}


class ByHand(nn.Module):
    """A model of Hugging Face with one input and one output."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, x):
        return self.inner(input_ids=x[:, 0], attention_mask=x[:, 1]).logits


def test_a_model_of_hugging_face_is_taken_as_it_is(tmp_path):
    given = tokens()
    stacked = torch.stack([given["input_ids"], given["attention_mask"]], dim=1), given["labels"]
    by_hand = ByHand(lora())
    # Without noise, which is another one for each model.
    expected = fit(stacked, model=by_hand, test=stacked, epsilon=math.inf)
    model = lora()
    found = fit(given, model=model, test=datasets.Dataset.from_dict(given), epsilon=math.inf)
    assert found.model is model
    assert torch.equal(weights(found), weights(expected))
    assert found.curve == expected.curve
    model.save_pretrained(tmp_path)


def test_logits_of_a_single_input_are_handed_to_the_loss():
    given = tokens()
    pair = given["input_ids"], given["labels"]
    assert "test_accuracy" in fit(pair, model=bert(), test=pair).record


def random_flip(number):
    return X[number] * (1 if torch.rand(()) < 0.5 else -1), Y[number]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(TENSORS)


def loader(**changes):
    return DataLoader(TENSORS, **{"batch_size": 20, **changes})


HOLES = X.copy()
HOLES[[3, 3, 50], [0, 1, 2]] = math.nan, math.inf, -math.inf
RAGGED = [[1.0] * (1 + k % 2) for k in range(N)]
BAD = {**MIXED, "category": np.where(np.arange(N) == 41, 5, CATEGORY)}
MANY = np.random.default_rng(2).random((N, 16))
MANY[40, 13] = -1


def of_logarithms(output, target):
    return (output - torch.log1p(target)).square().mean(1)


REFUSED = {
    "no target": ({"train": GOAL}, r"^train: \['a', .*give the target's name as `target`"),
    "unknown target": ({"train": GOAL, "target": "gaol"}, "^target: .* did you mean 'goal'"),
    "a target without names": ({"train": (X, Y), "target": "goal"}, "^target: .* has no name: it is the second"),
    "text": ({"train": TABLE.assign(s="x")}, r"^train\.s: .* state the values of an input by pandas.CategoricalDtype"),
    "missing values": (
        {"train": TABLE.assign(a=TABLE["a"].where(Y == 1))},
        rf"^train, a: 'NaN or infinity in {N - Y.sum()} of {N} records' .* expected finite numbers",
    ),
    "another order of labels": (
        {"train": (TABLE[list("abcd")].iloc[::-1], TABLE["label"])},
        r"^train: 'indices \[59, 58, 57\], ... and \[0, 1, 2\], ...' .*`y\.loc\[X\.index\]`.* reset_index on both",
    ),
    "counts": ({"train": (X, Y[:9])}, "^train: '60 inputs, 9 targets' .* as many inputs as targets"),
    "no records": ({"train": (X[:0], Y[:0])}, "^train: '0 inputs, 0 targets' .* at least 1"),
    "ragged columns": ({"train": datasets.Dataset.from_dict({"x": RAGGED, "y": Y})}, r"^train\.x: .* pad or resize"),
    "ragged records": ({"train": Listed(lambda i: (X[i, : 3 + i % 2], Y[i]))}, "^train: .* of one shape"),
    "names that change": ({"train": Listed(lambda i: {"x": X[i], "yz"[i > 9]: 1})}, "^train: .* other names"),
    "test of other names": ({"train": TABLE, "test": GOAL.assign(y=1)}, "^test, inputs: .* those of train: a, b, c"),
    "test of other shapes": (
        {"train": MIXED, "model": Both(), "test": {**MIXED, "numbers": X[:, :2]}},
        r"^test\.numbers: .* expected real numbers of shape \[60, 4\]",
    ),
    "a category out of range": ({"train": BAD, "model": Both()}, "^model: 'Both' .* ends in IndexError"),
    "whole numbers beside real ones": (
        {"train": {**MIXED, "category": CATEGORY + 2**60}, "model": Both()},
        r"^train\.category: .* at most 9007199254740992",
    ),
    "transform of several": ({"train": MIXED, "model": Both(), "transform": abs}, "^transform: 'abs' .* have names"),
    "a bad target in a late column": (
        {"train": (X, MANY), "model": nn.Linear(4, 16), "loss": of_logarithms},
        "^loss: .* the loss of a record is inf, that of others finite",
    ),
    "no process group": ({"train": (X, Y), "distributed": True}, "^distributed: .*init_process_group"),
    "two data sets": ({"train": datasets.DatasetDict(train=hugging())}, "^train: .* give one of them"),
    "iterable": ({"train": Endless()}, "^train: 'Endless' .* map-style"),
    "collate_fn": ({"train": loader(collate_fn=list)}, r"^train\.collate_fn: 'list' .* in the data set itself"),
    "weighted sampler": (
        {"train": loader(sampler=WeightedRandomSampler([1.0] * N, N))},
        r"^train\.sampler: 'WeightedRandomSampler' .*Subset",
    ),
    "batches of a part": (
        {"train": DataLoader(TENSORS, batch_sampler=BatchSampler(SubsetRandomSampler(range(9)), 3, False))},
        r"^train\.sampler: 'SubsetRandomSampler' .*Subset",
    ),
    "random flips": ({"train": Listed(random_flip)}, "^train: 'record .* not the same when it is read again"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        fit(**changes)


def test_a_frozen_batch_norm_stays_frozen():
    model = nn.Sequential(linear(), nn.BatchNorm1d(2))
    model[1].requires_grad_(False)
    for is_training in (True, False):
        model.train(is_training)[1].eval()
        assert fit((X, Y), model=model).record["status"] == "done"
        assert (model.training, model[1].training) == (is_training, False)
        assert torch.equal(model[1].running_mean, torch.zeros(2))


def test_a_transform_of_hugging_face_is_kept():
    ones = np.ones_like(X)
    assert torch.equal(weights(fit(transformed())), weights(fit((ones, Y))))


def test_other_arguments_of_every_day():
    weighted = torch.tensor([1.0, 3.0])
    half = fit((X, Y), precision="bfloat16", loss=lambda o, t: loss(o, t) * weighted[t], physical_batch=8, epsilon="5")
    assert half.record["status"] == "done"
    assert 4.9 < half.record["epsilon"] <= 5
    score = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    assert fit((X, X[:, 0]), model=score, loss=lambda o, t: (o - t).square()).record["status"] == "done"


DOUBTS = {
    "seed": ({"seed": 7}, "seed: whoever knows that it is 7"),
    "delta": ({"seed": None, "delta": 0.1}, r"delta: 0.1 is more than 1/N = 0.017"),
    "compiled": (
        {"seed": None, "model": torch.compile(nn.Sequential(linear()), backend="eager")},
        "model: training runs it without compilation",
    ),
    "loader": ({"seed": None, "train": loader(batch_size=32)}, "train: the loader's batch size 32 is not used.* 20 on"),
}


@pytest.mark.filterwarnings("default:seed")
@pytest.mark.parametrize("name", DOUBTS)
def test_what_is_rarely_meant_is_told_once_where_it_is_asked_for(name):
    changes, message = DOUBTS[name]
    with pytest.warns(UserWarning, match=message) as told:
        record = fit(**{"train": (X, Y), **changes}).record
    assert [warning.filename for warning in told] == [short.__file__]
    assert record["seed_is_secret"] == (name != "seed")


@pytest.mark.filterwarnings("error")
def test_nothing_is_told_of_a_usual_run():
    fit((X, Y), seed=None)
    fit((X, Y), seed=3, delta=0.1, epsilon=float("inf"))


def test_every_part_of_a_run_is_shown_by_its_name(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(rich, "_console", console)
    fit((X, Y), progress=False)
    assert console.file.getvalue() == ""
    fit((X, Y), progress=True)
    parts = ("reading the data", "trying the model", "calibrating the noise", "training: draws", "12 of 12")
    places = [console.file.getvalue().find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


def test_a_transform_in_place_changes_no_record():
    x, y = torch.from_numpy(X).float(), torch.from_numpy(Y)
    before = x.clone()
    changes = lambda x: x.mul_(2), lambda x: x * 2
    found, expected = (fit((x, y), test=(x, y), transform=change, epsilon=math.inf) for change in changes)
    assert torch.equal(x, before)
    assert found.record["test_loss"] == expected.record["test_loss"]


@pytest.mark.parametrize(
    ("status", "options"),
    [
        ("diverged", {"optimizer": dpopt.create("dp_sgd", lr=1e25)}),
        ("done", {"transform": lambda x: x / (x - 1)}),  # ones have no outputs before it either
    ],
)
def test_a_model_without_finite_outputs_has_diverged(status, options):
    result = fit((X, Y), model=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), **options)
    assert short.weights(result).isfinite().all()
    assert result.record["status"] == status


def test_what_help_shows_is_plain():
    shown = inspect.signature(dpopt.fit).parameters
    assert [shown[name].annotation for name in ("epsilon", "seed")] == [float, int | None]
