"""Whatever is given, the answer is a result or one clear error, and it comes soon: see `oddities` for what is given."""

import contextlib
import math
import random
import re
import signal
import warnings
from pathlib import Path

import datasets
import numpy as np
import oddities
import pandas as pd
import pytest
import torch
from fabricated import noted
from oddities import fit
from torch.masked import masked_tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import dpopt
from dpopt.cli import main
from dpopt.clipping.state import State
from dpopt.errors import ConfigError
from dpopt.suites.suite import suite_files
from dpopt.training import trial
from dpopt.training.subject import Layout, Subject
from dpopt.workloads.base import Split

pytestmark = pytest.mark.filterwarnings("ignore:seed")
SECONDS = 60
"""The longest that an answer may take."""


class TooLate(BaseException):
    """No answer in time; nothing that is tested may catch it."""


@contextlib.contextmanager
def soon():
    def stop(*_):
        raise TooLate(f"no answer within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a planned suite, in which commands are given."""
    here = tmp_path_factory.mktemp("odd")
    (here / "benchmarks").mkdir()
    (here / "benchmarks" / "odd.yaml").write_text(oddities.SUITE)
    (here / "plots").symlink_to(Path(__file__).parents[1] / "plots")
    with contextlib.chdir(here):
        noted(["suite=odd"])
        yield here


def answer(words, capfd):
    """What a command says of bad input; empty where it takes it."""
    capfd.readouterr()
    with soon():
        try:
            code = main(words)
        except SystemExit as usage:
            code = usage.code
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err, words
    assert code in (0, 1, 2), words
    assert "\x1b" not in out + err, words
    if code == 2:
        assert re.match(r"error: \S.* cannot be used; \S|error: \[Errno|usage: ", err), (words, err)
    return err if code == 2 else ""


REFUSED = [
    ("epsilon rate=0.1 rate=0.2 noise=1 draws=10 delta=1e-5", "rate: .* the key is given twice"),
    ("calibrate rate=0.1 draws=9 epsilon=1 delta=1e-5 fields.lr=1 +fields.lr=2", "fields.lr: .* given twice"),
    ("calibrate rate=1 draws=100 epsilon=0.01 delta=1e-10 accountant=rdp", "accountant=pld reaches it"),
    ("calibrate examples=1000 batch_size=10 epochs=1e-9 epsilon=1", "epochs: .* takes 0.01 epochs"),
    ("epsilon rate=0.1 noise=1 draws=1e30 delta=1e-5", "draws"),
    ("calibrate rate=0.1 draws=1e12 epsilon=1 delta=1e-5", "draws"),
    ("calibrate rate=0.1 draws=10 epsilon=1 delta=1e-5 accountant=[rdp]", "accountant"),
    ("epsilon rate=0.1 noise=1e400 draws=10 delta=1e-5", "infinity is `inf`"),
    ("plan suite=odd optimizers=[dp_sgd,dp_sgd]", "repeated"),
    ("cancel odd seeds=0", r"cancel: \{'seeds': .* the whole suite"),
    ("publish check=true remake=true", r"publish: \['check', 'remake'\] .* alone"),
    ("publish odd remake=true figures=[audit]", r"publish: \['remake', 'figures'\] .* alone"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_command_refuses(words, message, folder, capfd):
    assert re.search(message, answer(words.split(), capfd))


def test_a_path_at_home_is_read_by_every_command(folder, capfd, monkeypatch):
    home = folder / "home"
    monkeypatch.setenv("HOME", str(home))
    assert answer(["plan", "suite=odd", "results=~/kept"], capfd) == ""
    quick = ["workload=synthetic_logreg", "optimizer=dp_sgd", "epsilon=inf", "epochs=0.1"]
    assert answer(["fit", *quick, "to=~/model", "checkpoint=~/run"], capfd) == ""
    assert sorted(path.name for path in home.iterdir()) == ["model", "run"]
    noted(["suite=odd", "results=~/kept"])
    for words in ("table suite=odd results=~/kept", "report suite=odd results=~/kept to=~/page.html"):
        assert answer(words.split(), capfd) == ""
    assert (home / "page.html").exists()
    assert not (folder / "~").exists()


def test_some_command_lines(folder, capfd):
    """Every one is answered; most are refused, and some are right."""
    lines = list(oddities.of_cli())
    refused = [bool(answer(words, capfd)) for words in lines[:: len(lines) // 60]]
    assert len(refused) / 2 < sum(refused) < len(refused)


def plan_file(name, content, folder, capfd):
    path = folder / f"{name}.yaml"
    path.write_bytes(content)
    error = answer(["plan", f"suite={path}", "seeds=0", "epsilon=1", "results=elsewhere"], capfd)
    path.unlink()
    return error


IS_TAKEN = {"date", "escape", "surrogate"}
"""Files of `oddities.FILES` that are suites all the same."""


@pytest.mark.parametrize("name", oddities.FILES)
def test_a_file_that_is_no_suite_is_named(name, folder, capfd):
    error = plan_file(name, oddities.FILES[name], folder, capfd)
    assert (error == "") == (name in IS_TAKEN), error
    assert error == "" or name in error


def test_some_changed_suites(folder, capfd):
    """Suites that need no data with a line or a sign changed; some changes do not matter."""
    errors = []
    for k, name in enumerate(["quickstart", "price_of_tuning", "whole_field"] * 10):
        content = oddities.mutated(suite_files()[name].read_bytes(), random.Random(k))
        errors.append(plan_file(f"{name}_{k}", content, folder, capfd))
    assert 1 <= sum(error == "" for error in errors) < len(errors)


def outcome(case):
    """The result of a call, or None where it is refused with one clear error."""
    with soon(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return case.call()
        except ConfigError as error:
            message = str(error)
    assert re.match(r"\S.*: .* cannot be used; \S", message, re.DOTALL), case.name
    return None


def test_some_calls():
    results = [outcome(case) for case in [*oddities.of_fit(), *oddities.of_create()]]
    assert len(results) / 2 < results.count(None) < len(results)


Y = oddities.records()[1].numpy()
REFUSED_CALLS = [
    ({"optimizer": torch.optim.SGD}, r"^optimizer: <class .* dpopt\.create\('torch_optim', optimizer='torch\."),
    ({"optimizer": torch.optim.SGD([torch.ones(1)])}, r"(?s)^optimizer: SGD .* dpopt\.create\('torch_optim', "),
    ({"lr": 0.1}, r"^lr: .*fit takes no such argument; set fields .* where it is created, as in dpopt\.create\("),
    ({"epoch": 3}, r"^epoch: .* did you mean 'epochs'\?$"),
    ({"eps": 3}, r"^eps: .* did you mean 'epsilon'\?$"),
    ({"frobnicate": 3}, "^frobnicate: .* known: .*batch_size, .*epsilon"),
    ({"noise_multiplier": 1.1}, "^noise_multiplier: .* solved for `epsilon`; `dpopt[.]privacy[.]epsilon`"),
    ({"steps": 10}, "^steps: .* say `epochs`"),
    ({"log": "tensorboard"}, "^log: .* say `callback`"),
    (
        {"model": torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))},
        "privatize` puts GroupNorm in",
    ),
    (
        {"train": pd.DataFrame({"a": [1.0, 2], "sex": ["F", "M"], "label": [0, 1]})},
        r"^train\.sex: .*`dpopt fit from=FILE` takes both",
    ),
    (
        {"train": (np.array([["a", 1]] * 60, object), oddities.records()[1][:60])},
        "^train.*: 'texts' .* number the classes",
    ),
    ({"loss_": torch.nn.CrossEntropyLoss()}, r"^loss: .* shape \(3,\): use reduction='none'$"),
    ({"loss_": lambda output, _: output}, r"^loss: .*\[3, 2\].* squeeze or average it over all but the first axis$"),
    ({"epochs": 1e-9}, r"^epochs: 1e-09 .* makes no draw: one of B = 20 takes 0\.333 epochs$"),
    ({"train": (np.ma.masked_less(oddities.records()[0].numpy(), -1), Y)}, "^train: '[0-9]+ masked values' .* fill"),
    (
        {"train": [(np.ma.masked_less(row, -1), y) for row, y in zip(oddities.records()[0].numpy(), Y, strict=True)]},
        "^train: '[0-9]+ masked values'",
    ),
    (
        {"train": (masked_tensor(oddities.records()[0], oddities.records()[0] > -1), Y)},
        "^train: '[0-9]+ masked values'",
    ),
    (
        {"train": (oddities.records()[0].long(), oddities.records()[1])},
        "inputs int64 .* numbers stay so, give floats",
    ),
    ({"model": torch.nn.Linear(5, 2)}, r"^model: 'Linear' .* train: inputs float32 \[3, 4\] .* cannot be multiplied"),
    ({"model": torch.nn.Linear(4, 2).half()}, "^model.bias: 'torch.float16' .* float32 or float64"),
    ({"model": torch.nn.LazyLinear(2)}, "^model.weight: 'UninitializedParameter' .* no shape yet"),
    ({"model": torch.nn.Linear(4, 2, device="meta")}, "^model.weight: .* no values"),
    ({"train": (oddities.records()[0], oddities.records()[1].bool())}, r"^loss: .* targets bool \[3\]"),
    ({"test": (oddities.records()[0][:, :2], oddities.records()[1])}, r"^model: .* test: inputs float32 \[3, 2\]"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_CALLS, ids=[message for _, message in REFUSED_CALLS])
def test_fit_refuses(changes, message):
    with pytest.raises(ConfigError, match=message):
        fit(**changes)


def test_a_missing_argument_is_named():
    with pytest.raises(ConfigError, match=r"^fit: .* missing a required (keyword-only )?argument: 'epsilon'"):
        dpopt.fit(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, oddities.records(), optimizer="fiber")


def nothing():
    raise AssertionError("called")


async def later(entry):
    raise AssertionError("called")


@pytest.mark.parametrize("callback", [nothing, later])
def test_a_callback_that_cannot_be_called_is_refused_before_any_draw(callback):
    with pytest.raises(ConfigError, match=r"^callback: .* expected a function"):
        fit(callback=callback, train="not read")


WHOLE = TensorDataset(*oddities.records())
REPEATED = {
    "one record": (lambda: Subset(WHOLE, [0] * 60), 59, 60),
    "a loader": (lambda: DataLoader(Subset(WHOLE, [*range(60), 7, 7]), 20), 2, 3),
    "rows as a tensor": (lambda: Subset(WHOLE, torch.tensor([*range(60), 7, 8])), 2, 2),
    "parts that overlap": (lambda: ConcatDataset([Subset(WHOLE, range(40)), Subset(WHOLE, range(30, 60))]), 10, 2),
    "a list": (lambda: [*map(tuple, [WHOLE[0]] * 1), *(pairs := [WHOLE[k] for k in range(40)]), *pairs], 40, 2),
    "tensors twice": (lambda: ConcatDataset([WHOLE, TensorDataset(*WHOLE.tensors)]), len(WHOLE), 2),
    "Hugging Face": (lambda: hugging().select([*range(60), 3]), 1, 2),
}


def hugging():
    x, y = oddities.records()
    return datasets.Dataset.from_dict({"x": x.numpy(), "y": y.numpy()})


@pytest.mark.parametrize("name", REPEATED)
def test_a_record_that_is_there_several_times_is_told(name):
    make, again, most = REPEATED[name]
    words = rf"^train: {again} of its .* records repeat another one, .* {most} times at most: .* `unit` says whose"
    with pytest.warns(UserWarning, match=words):
        fit(train=make())


def test_records_of_equal_values_are_no_repeats():
    copies = ConcatDataset([WHOLE, TensorDataset(*map(torch.clone, WHOLE.tensors))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="seed")
        for train in (Subset(WHOLE, range(40)), copies, hugging()):
            fit(train=train)


@pytest.mark.parametrize("label", [2, -1])
def test_a_label_out_of_range_is_found_wherever_it_is(label):
    x, y = oddities.records()
    y[41] = label
    for data in ({"train": (x, y)}, {"test": (x, y)}):
        with pytest.raises(ConfigError, match=rf"^loss: .* targets int64 .* {label}.* out of bounds"):
            fit(**data)


@pytest.mark.parametrize("name", oddities.blind_losses())
def test_a_loss_that_teaches_nothing_is_told_and_noted(name):
    with pytest.warns(UserWarning, match="spends its epsilon and learns nothing"):
        record = fit(loss_=oddities.blind_losses()[name]).record
    assert record["status"] == "no_signal"
    assert 0 < record["epsilon"] <= 4


def test_one_record_that_teaches_is_enough():
    """It is among the few that are looked at, but not among the first of them."""
    x, y = oddities.records()
    x[:-1] = 1e9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="seed")
        record = fit(train=(x, y), transform=lambda x: x.masked_fill(x > 1e8, math.nan)).record
    assert record["status"] == "done"


def test_what_learns_is_told_from_what_does_not():
    """At zero weights of two layers no gradient shows what there is to learn; beside them it does."""
    x, y = oddities.records()
    with pytest.warns(UserWarning, match="none of 60 records that were looked at has a finite loss"):
        assert fit(train=(x, y), transform=lambda x: x * math.nan).record["status"] == "no_signal"
    assert fit(optimizer=dpopt.create("dp_sgd", lr=1e-30)).record["status"] == "no_signal"
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 2, bias=False))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert fit(model=model).record["status"] == "done"


def test_what_the_trial_looks_at_is_left_as_it_was():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = torch.nn.Linear(4, 2), torch.nn.Dropout(0.5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return self.dropout(self.linear(x))

    model, data = Counting().eval(), Split(*oddities.records())
    layout, device = Layout(torch.float32), torch.device("cpu")
    subject = Subject(model, oddities.loss, data, {}, lambda x: x, layout, device, State(model))
    before = torch.get_rng_state()
    trial.try_model(subject)
    assert model.seen == 0
    assert not model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_is_as_it_was_where_a_run_is_refused_or_its_ledger_is_not_the_planned_one(monkeypatch):
    from dpopt.training import fitting

    model = torch.nn.Linear(4, 2)
    start = model.weight.detach().clone()

    def refuse(*_, **__):
        raise RuntimeError("another ledger")

    monkeypatch.setattr(fitting, "summary", refuse)
    with pytest.raises(RuntimeError, match="another ledger"):
        fit(model=model)
    assert torch.equal(model.weight, start)


def test_float64_trains_as_float32_does():
    """The same noise and the same draws: what differs is rounding."""
    x, y = oddities.records()
    torch.manual_seed(0)
    single = torch.nn.Linear(4, 2)
    double = torch.nn.Linear(4, 2).double()
    double.load_state_dict(single.state_dict())
    results = [fit(model=single, epsilon=math.inf), fit(model=double, train=(x.double(), y), epsilon=math.inf)]
    assert double.weight.dtype == torch.float64
    torch.testing.assert_close(double.weight.float(), single.weight)
    assert results[0].ledger == results[1].ledger
