import hashlib
import json
import math
import resource
import stat
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import short
import torch
from huggingface_hub import ModelCard
from torch import nn
from torch.utils.data import TensorDataset

import dpopt
from dpopt.errors import ConfigError
from dpopt.store import Damaged
from dpopt.training import saved

pytestmark = pytest.mark.filterwarnings("ignore:seed")

SEED = 918273645546372819


class Tied(nn.Module):
    """Two layers of one weight, and a buffer."""

    def __init__(self, is_tied=True, dtype=torch.float32):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        if is_tied:
            self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([2.0]))
        self.to(dtype)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(self.scale * x)))))


def fit(model=None, **changes):
    options = {"seed": SEED, "test": short.records(), **changes}
    torch.manual_seed(0)
    return short.fit(Tied() if model is None else model, **options)


@pytest.fixture(scope="module")
def trained():
    return fit()


@pytest.fixture
def folder(trained, tmp_path):
    return trained.save(tmp_path / "models" / "tied")


def same(model, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def strict(text):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("changes", [{}, {"epsilon": math.inf, "model": Tied(dtype=torch.float64)}])
def test_what_is_saved_is_loaded(changes, tmp_path):
    result = fit(**changes)
    result.curve[0]["test_loss"] = math.nan
    model = Tied(dtype=result.model.head.weight.dtype)
    result.save(tmp_path / "it")
    loaded = dpopt.load(tmp_path / "it", model)
    assert loaded.model is model
    assert same(model, result.model)
    assert model.second.weight is model.first.weight
    sums = {"weights_sha256": hashlib.sha256((tmp_path / "it" / "model.safetensors").read_bytes()).hexdigest()}
    assert loaded.record == {**result.record, **sums, "seed": None}
    assert loaded.ledger == result.ledger
    assert [sorted(map(repr, entry.items())) for entry in loaded.curve] == [
        sorted(map(repr, entry.items())) for entry in result.curve
    ]
    assert str(loaded.statement()) == str(replace(result, record=result.record | sums).statement())
    for name in ("record.json", "model.json", "ledger.json", "statement.json", "checksums.json", "private.json"):
        strict((tmp_path / "it" / name).read_text())


def test_a_folder_is_complete_without_the_seed_and_nothing_else_is_left(trained, folder):
    names = {*saved._CHECKED, "README.md", "checksums.json", "private.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert [path.name for path in folder.parent.iterdir()] == ["tied"]
    assert (folder / "statement.txt").read_text() == f"{dpopt.load(folder).statement()}\n"
    assert "Anyone who knows the seed" in (folder / "statement.txt").read_text()
    assert not [path for path in folder.rglob("*.*") if str(SEED).encode() in path.read_bytes()]
    assert stat.S_IMODE((folder / "private.json").stat().st_mode) == 0o600


def test_scores_are_apart_and_without_them_there_is_all_else(trained, folder):
    score = f"{trained.record['test_accuracy']:.4g}"
    assert "test_accuracy" not in (folder / "record.json").read_text() + (folder / "README.md").read_text()
    assert f'"test_accuracy":{trained.record["test_accuracy"]}' in (folder / "private.json").read_text()
    text = str(dpopt.load(folder).statement())
    assert f"test_accuracy = {score}" not in text
    (folder / "private.json").unlink()
    loaded = dpopt.load(folder, Tied())
    assert loaded.curve == []
    assert str(loaded.statement()) == text
    assert same(loaded.model, trained.model)


def test_scores_that_were_changed_are_found(folder):
    path = folder / "private.json"
    path.write_text(path.read_text().replace("0.", "1.", 1))
    with pytest.raises(Damaged, match=r"private\.json: not as it was written"):
        dpopt.load(folder)


def test_test_records_without_a_score_are_nowhere_but_in_the_private_file(tmp_path):
    """What an output of a test record is, is computed without noise."""
    result = fit()
    result.record["test_unscored"] = 7
    result.save(tmp_path / "it")
    for path in (tmp_path / "it").iterdir():
        if path.suffix in (".json", ".txt", ".md") and path.name != "private.json":
            assert "unscored" not in path.read_text()
            assert "without a finite score" not in path.read_text()
    assert dpopt.load(tmp_path / "it").record["test_unscored"] == 7


def test_predictions_are_the_models(trained, folder):
    x, _ = short.records(30)
    with torch.no_grad():
        outputs = trained.model.eval()(x)
    loaded = dpopt.load(folder, Tied())
    for result in (trained, loaded):
        assert result.predict(x).tolist() == outputs.argmax(1).tolist()
        assert result.predict(x.numpy()).tolist() == outputs.argmax(1).tolist()
        assert np.allclose(result.predict_proba(x), outputs.softmax(1), atol=1e-6)
        assert result.predict(TensorDataset(x, torch.zeros(30))).tolist() == outputs.argmax(1).tolist()
        with pytest.raises(ConfigError, match="x: 'Tensor'"):
            result.predict(x[:, :2])
    with pytest.raises(ConfigError, match="load with a model"):
        dpopt.load(folder).predict(x)


def test_predictions_take_columns_by_the_names_of_training_and_need_the_transform(tmp_path):
    x, y = short.records()
    frame = pd.DataFrame(x.numpy(), columns=list("abcd")).assign(label=y.numpy())
    result = fit(nn.Linear(4, 2), train=frame, test=None, transform=lambda x: 2 * x)
    result.save(tmp_path / "it")
    other = frame[["label", "d", "b", "a", "c"]].assign(more="text")
    expected = (2 * x @ result.model.weight.T + result.model.bias).argmax(1).tolist()
    assert result.predict(other).tolist() == expected
    loaded = dpopt.load(tmp_path / "it", nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"give `dpopt\.load` the <lambda>"):
        loaded.predict(other)
    loaded = dpopt.load(tmp_path / "it", nn.Linear(4, 2), transform=lambda x: 2 * x)
    assert loaded.predict(other).tolist() == expected
    with pytest.raises(ConfigError, match="there is no column b"):
        loaded.predict(frame.drop(columns="b"))


def test_columns_with_numbers_as_names_predict():
    x, y = short.records()
    frame = pd.DataFrame(x.numpy()).assign(label=y.numpy())
    result = fit(nn.Linear(4, 2), train=frame, test=None)
    assert result.predict(frame).tolist() == result.predict(x).tolist()


def test_a_list_holds_rows():
    """Of two numbers too, which are no record (input, target)."""
    x, y = short.records()
    result = fit(nn.Linear(2, 2), train=(x[:, :2], y), test=None)
    assert result.predict(x[:, :2].tolist()).tolist() == result.predict(x[:, :2]).tolist()


def test_whole_targets_of_one_column_are_no_classes():
    """A count has one output, and so has a logit: neither is a score for each class."""
    x, _ = short.records()
    model = nn.Linear(4, 1)
    result = short.fit(model, (x, torch.arange(60) % 5), lambda output, y: (output[:, 0] - y) ** 2, test=None)
    assert np.allclose(result.predict(x), model(x).detach())
    with pytest.raises(ConfigError, match="there are no classes"):
        result.predict_proba(x)


def test_a_regression_predicts_numbers():
    x, _ = short.records()
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    result = short.fit(model, (x, x[:, 0]), lambda output, y: (output - y) ** 2)
    assert np.allclose(result.predict(x), model(x).detach())
    with pytest.raises(ConfigError, match="there are no classes"):
        result.predict_proba(x)
    model[0].weight.data[0, 0] = math.nan
    with pytest.raises(ConfigError, match="not finite"):
        result.predict(x)


def test_the_card_is_one_of_the_hub_and_may_be_edited(trained, folder):
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {"library_name": "dpopt", "tags": ["differential-privacy"]}
    assert str(dpopt.load(folder).statement()) in card.text
    assert f"A `{Tied.__module__}.Tied` that was trained" in card.text
    (folder / "README.md").write_text("mine")
    assert dpopt.load(folder).record["status"] == "done"


def test_what_was_tuned_stays_with_the_model(trained, tmp_path):
    trained.save(tmp_path / "it", tuned=["The learning rate was chosen among five."])
    assert "chosen among five" in str(dpopt.load(tmp_path / "it").statement())
    assert "tuned" not in trained.record


def test_without_a_model_there_is_all_else(trained, folder):
    loaded = dpopt.load(folder)
    assert loaded.model is None
    assert loaded.statement() == replace(trained.statement(), weights_sha256=loaded.record["weights_sha256"])
    with pytest.raises(ConfigError, match="load with a model"):
        loaded.save(folder.parent / "again")


def test_privatized_recurrent_layers_are_loaded(tmp_path):
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.layer(x.unsqueeze(-1))[0][:, -1])

    first, second = (dpopt.privatize(Read()).model for _ in range(2))
    fit(first).save(tmp_path / "it")
    dpopt.load(tmp_path / "it", second)
    x = torch.randn(3, 4)
    assert torch.equal(first(x), second(x))


def test_an_existing_folder_is_refused_and_left(trained, folder):
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        trained.save(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before


def test_a_failure_leaves_nothing(trained, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(saved, "_card", fail)
    with pytest.raises(KeyboardInterrupt):
        trained.save(tmp_path / "it")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", saved._CHECKED)
def test_a_changed_or_lost_file_is_found(name, folder):
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(Damaged, match=f"{name}: changed"):
        dpopt.load(folder)
    path.unlink()
    with pytest.raises(Damaged, match=f"{name}: gone"):
        dpopt.load(folder)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_no_saved_run(make, tmp_path):
    make(tmp_path / "it")
    with pytest.raises(ConfigError, match="holds no saved run"):
        dpopt.load(tmp_path / "it")


class Other(Tied):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Other, r"model.head.bias: 'float32 \[3\]' cannot be used; the saved model has float32 \[2\]"),
        (lambda: Tied(dtype=torch.float64), r"float64 .* the saved model has float32"),
        (lambda: nn.Linear(4, 2), "model.bias: 'float32 .* the saved model has no tensor"),
        (lambda: nn.Sequential(Tied()), "model.0.first.bias"),
    ],
)
def test_another_architecture_is_refused_and_left(make, message, folder):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        dpopt.load(folder, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tied_weights_fill_untied_ones_and_not_the_other_way_round(trained, folder):
    untied = Tied(is_tied=False)
    dpopt.load(folder, untied)
    assert torch.equal(untied.second.weight, trained.model.first.weight)
    fit(untied).save(folder.parent / "untied")
    with pytest.raises(ConfigError, match="two tensors here"):
        dpopt.load(folder.parent / "untied", Tied())


def test_a_full_disk_leaves_no_part_of_a_saved_model(tmp_path, trained):
    """Nothing is written beyond `room` bytes a file, as where a disk is full: weights, and what is beside them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 600, 1000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            with pytest.raises(ConfigError, match=r"^folder: '.*kept' cannot be used; cannot be written: .*too large"):
                trained.save(tmp_path / "kept")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.iterdir()) == []
