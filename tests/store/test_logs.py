"""What TensorBoard and W&B are told of runs: all of the curve, and nothing twice where a run goes on."""

import math
import pickle
import time

import pytest
from fabricated import SMALL

from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.store import Store, logs
from dpopt.store.logs import LoggedStore

RUN = "ab" + "0" * 14
CELL = {
    "workload": {"name": "digits_mlp", "hidden": 64},
    "optimizer": {"name": "dp_adam", "lr": 0.01, "betas": [0.9, 0.999]},
    "epsilon": "inf",
    "seed": 3,
}
LEDGER = '{"draws": [], "runs": []}'


def entries(*draws):
    return [
        {"draw": draw, "test_loss": 1 / draw, "test_accuracy": None if draw == 20 else draw / 100} for draw in draws
    ]


def record(**more):
    kept = {"epsilon_target": None, "delta": None, "provenance": {}}
    return {"schema": 1, "run_id": RUN, "cell": CELL, "status": "done", "draws": 40, "epsilon": 2.5, **kept, **more}


def train(store, *draws, passed=0):
    """What `harness.cell.run` tells the store of a run that goes on after draw `passed`."""
    store.begin(RUN, CELL)
    store.restart_curve(RUN, [entry for entry in store.curve(RUN) if entry["draw"] <= passed])
    for entry in entries(*draws):
        store.append_curve(RUN, entry)


@pytest.fixture
def board(tmp_path):
    """A store that logs to TensorBoard, and what is read there of the run: tag -> [(step, value)], text, parameters."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    def shown():
        known = EventAccumulator(str(tmp_path / "tensorboard" / "digits_mlp" / "dp_adam" / RUN)).Reload()
        scalars = {tag: [(e.step, e.value) for e in known.Scalars(tag)] for tag in known.Tags()["scalars"]}
        text = {tag: known.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in known.Tags()["tensors"]}
        given = {}
        for value in known.PluginTagToContent("hparams").values() if "final/epsilon" in scalars else ():
            start = HParamsPluginData.FromString(value).session_start_info.hparams
            given |= {name: start[name].number_value or start[name].string_value for name in start}
        return scalars, text, given

    return LoggedStore(tmp_path, ("tensorboard",)), shown


def test_tensorboard_shows_curve_parameters_and_outcome(board):
    store, shown = board
    train(store, 10, 20, 30)
    assert dict(shown()[0]["test_loss"]) == pytest.approx({10: 1 / 10, 20: 1 / 20, 30: 1 / 30}), "while it runs"
    store.finish(RUN, record(noise={"gradient": 1.5}, test_accuracy=0.9, private=True, eta=math.inf), LEDGER)
    scalars, text, given = shown()
    assert [step for step, _ in scalars["test_accuracy"]] == [10, 30], "null is no number"
    final = {tag: values for tag, values in scalars.items() if tag.startswith("final/")}
    assert final.keys() == {"final/epsilon", "final/draws", "final/noise/gradient", "final/test_accuracy"}
    assert final["final/epsilon"] == [(40, 2.5)]
    assert "done" in text["status/text_summary"]
    assert given["optimizer/lr"] == 0.01
    assert given["optimizer/betas"] == "[0.9, 0.999]"
    assert (given["epsilon"], given["seed"]) == ("inf", 3)


def test_tensorboard_shows_a_run_that_went_on_once(board):
    store, shown = board
    train(store, 10, 20, 30)
    store.fail(RUN, "ValueError: no luck")
    assert "no luck" in shown()[1]["failure/text_summary"]
    again = pickle.loads(pickle.dumps(LoggedStore(store.root, store.logs)))
    train(again, 20, 30, 40, passed=10)
    again.finish(RUN, record(), LEDGER)
    assert [step for step, _ in shown()[0]["test_loss"]] == [10, 20, 30, 40]


def test_wandb_holds_a_run_that_went_on_once(tmp_path, monkeypatch):
    """Without a network: its own process writes files, a while after a run has ended."""
    run = pytest.importorskip("wandb").Run
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    steps, codes, log, finish = [], [], run.log, run.finish
    monkeypatch.setattr(run, "log", lambda run, data, step: steps.append(step) or log(run, data, step=step))
    monkeypatch.setattr(run, "finish", lambda run, exit_code: codes.append(exit_code) or finish(run, exit_code))
    store = LoggedStore(tmp_path, ("wandb",))
    train(store, 10, 20, 30)
    store.fail(RUN, "ValueError: no luck")
    again = LoggedStore(store.root, store.logs)
    train(again, 20, 30, 40, passed=10)
    again.finish(RUN, record(test_accuracy=0.9), LEDGER)
    assert (steps, codes) == ([10, 20, 30, 40], [1, 0])
    held, until = b"", time.monotonic() + 120
    while not all(words in held for words in (b"no luck", b"dp_adam", b"test_accuracy", b"epsilon")):
        assert time.monotonic() < until, held
        time.sleep(0.05)
        held = b"".join(path.read_bytes() for path in tmp_path.glob(f"wandb/offline-run-*-{RUN}*/*.wandb"))


def test_wandb_without_a_key_is_refused_before_any_work(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **_: False)
    monkeypatch.setattr(wandb, "setup", lambda: type("Setup", (), {"settings": wandb.Settings(mode="online")}))
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        LoggedStore(tmp_path, ("wandb",))


def broken(*arguments):
    """A log that ends with its first entry."""

    def write(*arguments):
        raise OSError("no space left")

    return write


def test_an_error_of_a_log_does_not_cost_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(logs._LOGS, "json", broken)
    store = LoggedStore(tmp_path, ("json",))
    train(store, 10, 20)
    store.finish(RUN, record(), LEDGER)
    assert [entry["draw"] for entry in store.curve(RUN)] == [10, 20]
    assert Store(tmp_path).folder(RUN).joinpath("run.json").exists()
    assert capsys.readouterr().out.splitlines() == [f"run {RUN}: json logs no more of it: OSError: no space left"]


def test_a_missing_package_is_one_error_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logs, "find_spec", lambda name: None)
    assert main(["run", *SMALL, "seeds=0", f"results={tmp_path}", "log=tensorboard"]) == 2
    assert "pip install 'dpopt[tensorboard]'" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.rglob("cell.json"))
    assert main(["run", *SMALL, "seeds=0", f"results={tmp_path}", "log=[tensorbord]"]) == 2
    assert "'tensorbord'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_suite_is_logged_where_it_asks_for_it(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    assert main(["run", *SMALL, "seeds=0", f"results={tmp_path / 'logged'}", "log=[tensorboard]"]) == 0
    assert main(["run", *SMALL, "seeds=0", f"results={tmp_path / 'plain'}"]) == 0
    (folder,) = (tmp_path / "logged" / "tensorboard" / "synthetic_logreg" / "hyfreedp").iterdir()
    assert list(folder.glob("events.*"))
    assert not (tmp_path / "plain" / "tensorboard").exists()
    logged, plain = Store(tmp_path / "logged"), Store(tmp_path / "plain")
    assert logged.curve(folder.name) == plain.curve(folder.name) != []
