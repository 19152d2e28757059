"""A run of `fit` that was killed goes on bit for bit; what is no checkpoint of it is refused and left as it is."""

import errno
import itertools
import json
import math
import os
import signal
import stat
from functools import partial
from pathlib import Path

import pytest
import short
import torch
from short import loss, records
from torch import nn

import dpopt
from dpopt.errors import ConfigError
from dpopt.store.leases import Lease
from dpopt.training import checkpoint, fitting

pytestmark = pytest.mark.filterwarnings("ignore:seed", "ignore:model. its run began")


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def fit(start=None, **changes):
    return short.fit(start or model(), **{"test": records(50), **changes})


def outcome(result):
    """What has to be the same bit for bit."""
    weights = [p.detach().flatten().tolist() for p in result.model.parameters()]
    timeless = {k: v for k, v in result.record.items() if k not in ("train_seconds", "resumed_at")}
    return json.dumps([weights, result.curve, result.ledger.to_json(), timeless])


def killed(at, **changes):
    """Run `fit` in a process that is killed when its curve reaches draw `at`; gives the curve up to there."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        observe = fitting.observe

        def observed(*args):
            entry = observe(*args)
            os.write(writer, json.dumps(entry).encode() + b"\n")
            if entry["draw"] >= at:
                os.kill(os.getpid(), signal.SIGKILL)
            return entry

        try:
            fitting.observe = observed
            fit(**changes)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as file:
        entries = [json.loads(line) for line in file]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return entries


@pytest.fixture
def often(monkeypatch):
    """Checkpoints after every third draw, whatever the clock says; called, it starts the clock anew."""

    def start():
        ticks = itertools.count()
        monkeypatch.setattr(fitting.time, "perf_counter", lambda: next(ticks) / 3)

    start()
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", 1.0)
    return start


@pytest.mark.parametrize("name", ["hyfreedp", "adadp"])
def test_a_killed_run_goes_on_bit_for_bit(name, tmp_path, often):
    whole = fit(optimizer=name)
    first = killed(4, optimizer=name, checkpoint=tmp_path)
    second = killed(8, optimizer=name, checkpoint=tmp_path)
    result = fit(optimizer=name, checkpoint=tmp_path)
    assert outcome(result) == outcome(whole)
    assert 0 < result.record["resumed_at"] < 12
    assert whole.curve[: len(first)] == first
    assert second[-1] in whole.curve


def test_a_run_that_was_killed_before_its_first_checkpoint_after_the_start_begins_with_the_same_seeds(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", math.inf)
    entries = killed(6, checkpoint=tmp_path, seed=None)
    result = fit(checkpoint=tmp_path, seed=None)
    assert result.record["resumed_at"] == 0
    assert result.curve[: len(entries)] == entries


def test_a_secret_seed_survives_until_the_run_has_ended(tmp_path, often, monkeypatch):
    entries = killed(6, checkpoint=tmp_path, seed=None)
    file = tmp_path / "checkpoint.pt"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = checkpoint.parse(checkpoint.read_checked(file), torch.device("cpu"))["seeds"]
    result = fit(checkpoint=tmp_path, seed=None)
    assert result.curve[: len(entries)] == entries
    assert not any(seed.encode() in file.read_bytes() for seed in kept)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setattr(fitting, "_seeds", lambda *_: [int(seed, 16) for seed in kept])
    assert outcome(fit(seed=None)) == outcome(result)


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    first = fit(checkpoint=tmp_path, seed=None)
    monkeypatch.setattr(fitting.DataOracle, "draw", None)
    again = fit(model(7), checkpoint=tmp_path, seed=None)
    assert outcome(again) == outcome(first)
    assert (first.record["resumed_at"], again.record["resumed_at"]) == (0, 12)
    assert again.record["train_seconds"] >= first.record["train_seconds"]


def test_a_checkpoint_replaces_other_initial_parameters_and_says_so(tmp_path, often):
    whole = fit()
    killed(6, checkpoint=tmp_path)
    with pytest.warns(UserWarning, match="began with other parameters"):
        assert outcome(fit(model(5), checkpoint=tmp_path)) == outcome(whole)


def test_a_run_goes_on_with_other_physical_batches(tmp_path, often):
    killed(6, checkpoint=tmp_path)
    result = fit(checkpoint=tmp_path, physical_batch=7)
    assert result.record["status"] == "done"
    assert result.record["resumed_at"] > 0


def wider():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 2))


OTHERS = {
    "optimizer": {"optimizer": "dp_sgd"},
    "learning rate": {"optimizer": dpopt.create("dp_adam", lr=0.5)},
    "epsilon": {"epsilon": 5.0},
    "delta": {"delta": 1e-4},
    "epochs": {"epochs": 5},
    "batch_size": {"batch_size": 21},
    "accountant": {"accountant": "prv"},
    "precision": {"precision": "bfloat16"},
    "seed": {"seed": 4},
    "average": {"average": 0.9},
    "parameters": {"start": wider()},
    "train": {"train": (records()[0].index_fill(0, torch.tensor([40]), 0.5), records()[1])},
    "test": {"test": records(40)},
    "activation": {"start": nn.Sequential(model()[0], nn.Tanh(), *model()[2:])},
    "loss": {"loss": lambda output, target: 2 * loss(output, target)},
    "transform": {"transform": lambda x: x + 1},
    "augment": {"augment": lambda x: x + torch.randn_like(x)},
}


def test_the_checkpoint_of_another_run_is_refused_and_stays(tmp_path, often):
    """Without noise, as none is to be solved for the others; they are told from a run that has ended, too."""
    killed(6, checkpoint=tmp_path, epsilon=math.inf)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    for name, changes in OTHERS.items():
        what = {"learning rate": "optimizer", "activation": "model"}.get(name, name)
        with pytest.raises(ConfigError, match=rf"^checkpoint: .* another run's, which differs in .*{what}"):
            fit(checkpoint=tmp_path, **{"epsilon": math.inf, **changes})
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert outcome(fit(checkpoint=tmp_path, epsilon=math.inf)) == outcome(fit(epsilon=math.inf))
    with pytest.raises(ConfigError, match="another run's, which differs in seed:"):
        fit(checkpoint=tmp_path, epsilon=math.inf, seed=4)


def test_a_damaged_checkpoint_is_refused_and_stays(tmp_path, often):
    killed(6, checkpoint=tmp_path)
    file = tmp_path / "checkpoint.pt"
    sound = file.read_bytes()
    foreign = checkpoint.dump(checkpoint.Reached(torch.zeros(3), dpopt.privacy.Ledger(), checkpoint.Elapsed(), []))
    checkpoint.write_checked(tmp_path / "foreign", foreign)
    flipped = [sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :] for at in range(0, len(sound), len(sound) // 5)]
    for content in (b"", b"nothing", sound[:-1], sound[: len(sound) // 2], sound + b"0", *flipped):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"^checkpoint: .* damaged \("):
            fit(checkpoint=tmp_path)
        assert file.read_bytes() == content
    file.write_bytes((tmp_path / "foreign").read_bytes())
    with pytest.raises(ConfigError, match=r"damaged \('run'"):
        fit(checkpoint=tmp_path)
    file.write_bytes(sound)
    assert outcome(fit(checkpoint=tmp_path)) == outcome(fit())


def test_what_a_callback_is_shown_is_in_the_checkpoint_even_if_it_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", math.inf)
    seen = []

    def callback(entry):
        seen.append(entry)
        entry["test_loss"] = None  # its own copy
        if entry["draw"] == 5:
            raise KeyboardInterrupt

    start = model()
    start[2].eval()
    with pytest.raises(KeyboardInterrupt):
        fit(start, checkpoint=tmp_path, callback=callback)
    assert [m.training for m in start] == [True, True, False, True]
    start[2].train()
    result = fit(checkpoint=tmp_path, callback=callback)
    assert result.record["resumed_at"] == 5
    assert [entry["draw"] for entry in seen] == [entry["draw"] for entry in result.curve]
    assert outcome(result) == outcome(fit())


def test_a_folder_that_another_process_uses_or_that_cannot_be_written_is_refused(tmp_path):
    with Lease(tmp_path / "lease"), pytest.raises(ConfigError, match=f"run by process {os.getpid()} of"):
        fit(checkpoint=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        fit(checkpoint=tmp_path / "file" / "folder")
    fit(checkpoint=str(tmp_path / "new" / "folder"), epochs=1 / 3)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["checkpoint.pt"]


@pytest.fixture(autouse=True)
def terminal():
    """Ctrl-C as in a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupting(monkeypatch):
    """Ctrl-C in the midst of a draw, once or several times; afterwards nothing more."""

    def at(draw, times=1):
        calls, take = itertools.count(), fitting.DataOracle.draw

        def drawn(oracle):
            if next(calls) == draw:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)
            return take(oracle)

        monkeypatch.setattr(fitting.DataOracle, "draw", drawn)

    return at


@pytest.mark.parametrize("options", [{}, pytest.param({"isolate": True, "optimizer": "adadp"}, marks=pytest.mark.slow)])
def test_ctrl_c_writes_a_checkpoint_after_the_step_in_progress(options, tmp_path, monkeypatch, interrupting):
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", math.inf)
    interrupting(6)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"kept in .*checkpoint\.pt: call `fit` again"):
        fit(checkpoint=tmp_path, test=None, **options)
    assert signal.getsignal(signal.SIGINT) is handler
    result = fit(checkpoint=tmp_path, test=None, **options)
    assert 0 < result.record["resumed_at"] < 12
    assert outcome(result) == outcome(fit(test=None, **options))


def test_a_second_ctrl_c_ends_at_once_and_without_a_checkpoint_so_does_the_first(tmp_path, monkeypatch, interrupting):
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", math.inf)
    interrupting(6, times=2)
    with pytest.raises(KeyboardInterrupt):
        fit(checkpoint=tmp_path, test=None)
    assert fit(checkpoint=tmp_path, test=None).record["resumed_at"] == 0
    seen = []
    interrupting(6)
    with pytest.raises(KeyboardInterrupt):
        fit(test=None, callback=seen.append)
    assert seen[-1]["draw"] <= 6


def test_ctrl_c_that_means_something_else_is_left_alone(tmp_path, interrupting):
    noted = []
    before = signal.signal(signal.SIGINT, lambda *_: noted.append(1))
    interrupting(6)
    try:
        result = fit(checkpoint=tmp_path, test=None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == [1]
    assert result.record["status"] == "done"


def jittered(x):
    return x + 0.1 * torch.randn_like(x)


def faded(x):
    return x * (torch.rand(len(x), 1) < 0.5)


def scaled(by):
    return lambda x: by * x


class Focal:
    def __init__(self, power):
        self.power = power

    def __call__(self, output, target):
        return output[:, 0] ** self.power


def helped(code):
    """An object and a layer that call a method of this code."""

    class Rule:
        helper = code

        def __call__(self, x):
            return self.helper(x)

    class Layer(nn.Module):
        helper, forward = code, Rule.__call__

    return [Rule(), Layer()]


def frozen(seed):
    torch.manual_seed(seed)
    return nn.Linear(2, 2).requires_grad_(False)


def test_a_function_is_recognised_by_its_code_and_what_it_holds():
    """In another process too, where objects lie elsewhere and bytecode may have been run before."""
    one, same, other = scaled(2.0), scaled(2.0), scaled(3.0)
    for _ in range(99):
        one(1.0)
    assert checkpoint.fingerprint(one) == checkpoint.fingerprint(same) != checkpoint.fingerprint(other)
    assert checkpoint.fingerprint(jittered) != checkpoint.fingerprint(faded)
    assert checkpoint.fingerprint(nn.Dropout(0.1)) != checkpoint.fingerprint(nn.Dropout(0.2))
    assert checkpoint.fingerprint(partial(torch.add, 1)) != checkpoint.fingerprint(partial(torch.add, 2))
    for one, same, other in (
        (Focal(2.0), Focal(2.0), Focal(5.0)),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)),
        (frozen(1), frozen(1), frozen(2)),
        ({"a", "b", "c"}, {"c", "b", "a"}, {"a", "b"}),
        *zip(*(helped(code) for code in (lambda _, x: 2 * x, lambda _, x: 2 * x, lambda _, x: 3 * x)), strict=True),
    ):
        assert checkpoint.fingerprint(one) == checkpoint.fingerprint(same) != checkpoint.fingerprint(other)
    nested = [lambda x: [y for y in x if y > 1], lambda x: [y for y in x if y > 2]]
    assert checkpoint.fingerprint(nested[0]) != checkpoint.fingerprint(nested[1])


def test_ctrl_c_in_the_very_last_step_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt), checkpoint.put_off(Path("file")):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_full_disk_is_one_clear_error_and_nothing_is_lost(tmp_path, often, monkeypatch):
    expected, written, write = outcome(fit(epochs=1)), [], checkpoint.write_checked
    monkeypatch.setattr(checkpoint, "write_checked", lambda *args, **rest: written.append(args) or write(*args, **rest))
    often()
    fit(epochs=1, checkpoint=tmp_path / "calm")
    for full in range(len(written)):  # the room is enough for so many checkpoints
        folder, room = tmp_path / f"full{full}", iter(range(full))

        def fills(*args, room=room, **rest):
            if next(room, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(*args, **rest)

        monkeypatch.setattr(checkpoint, "write_checked", fills)
        started = model()
        often()
        with pytest.raises(ConfigError, match=r"^checkpoint: '.*checkpoint\.pt' .* No space left on device; make room"):
            fit(started, epochs=1, checkpoint=folder)
        assert all(map(torch.equal, started.parameters(), model().parameters()))
        monkeypatch.setattr(checkpoint, "write_checked", write)
        assert outcome(fit(epochs=1, checkpoint=folder)) == expected
