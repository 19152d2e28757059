"""What a run changes before it begins, and what becomes of being asked to stop."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from dpopt.errors import ConfigError
from dpopt.runs import launchers, stopping, worker
from dpopt.runs import run_suite as running
from dpopt.runs.remote import guarded_main
from dpopt.runs.run_suite import run_suite
from dpopt.suites import suite as suites
from dpopt.suites.plan import plan

FEW = ["optimizers=[dp_sgd]", "seeds=0", "device=cpu"]
SCRIPT = """
import dpopt
import torch

class Mine(torch.optim.SGD):
    pass

if __name__ == "__main__":
    suite = dpopt.load_suite({
        "name": "mine", "workloads": ["digits_mlp"], "optimizers": ["torch_optim"], "epsilon": 3, "accountant": "rdp",
        "settings": {"torch_optim": {"tuning": "fixed", "fields": {"optimizer": "__main__.Mine"}}},
        "epochs": 1, "seeds": 0, "workers": 1, "device": "cpu",
    })
    print(dpopt.run_suite(suite, engine="local", progress=False))
"""


@pytest.mark.parametrize(
    ("engine", "override", "named"),
    [("inline", "options.x=1", "options of engine inline"), ("span", "diagnostics=true", "its part of a draw")],
)
@pytest.mark.parametrize("retry", [False, True])
def test_what_the_engine_refuses_changes_nothing(write_suite, store, engine, override, named, retry):
    suite = write_suite(overrides=[*FEW, override])
    failed, *_ = [entry.cell.run_id for entry in plan(suite)]
    store.fail(failed, "out of luck", "where")
    with pytest.raises(ConfigError, match=named):
        run_suite(suite, store.root, engine=engine, progress=False, retry=retry)
    assert not store.suites()
    assert store.error(failed)["traceback"] == "where"


def test_an_engine_is_not_tried_for_nothing(write_suite, store, monkeypatch):
    suite = write_suite(overrides=FEW)
    for entry in plan(suite):
        store.fail(entry.cell.run_id, "out of luck")
    monkeypatch.setattr(running, "_engine", lambda *given: pytest.fail("an engine was made for nothing"))
    assert len(run_suite(suite, store.root, engine="inline", progress=False).failed) == 2


def test_a_stop_at_the_end_of_a_stage_is_heard(write_searches, store, monkeypatch):
    suite, attempt = write_searches(["optimizers=[linear]", "seeds=0", "device=cpu"]), worker.attempt
    ended = []

    def asked_at_the_end(*given):
        ended.append(attempt(*given))
        if len(ended) == 4:
            stopping.ask()
        return ended[-1]

    monkeypatch.setattr(worker, "attempt", asked_at_the_end)
    first, second = (run_suite(suite, store.root, engine="inline", progress=False) for _ in range(2))
    assert (first.ran, first.is_stopped) == (4, True)
    assert (second.ran, second.is_stopped) == (1, False), "nothing is left"


class Imagined:
    """A launcher whose jobs run cells here, one after the other, when they are looked at."""

    room, started, closed = 3, 0, 0

    def __init__(self, suite):
        assert suite.options == {"color": "red"}
        Imagined.started = Imagined.closed = 0

    def start(self, job, number):
        Imagined.started += number
        return [job] * number

    def has_ended(self, job):
        if Imagined.started > 3:  # the first three jobs die
            suite = dataclasses.replace(job.suite, options={})
            run_suite(suite, job.results, engine="inline", progress=False)
        return True

    def stop(self, job):
        pass

    def close(self):
        Imagined.closed += 1


def test_a_launchers_jobs_run_the_suite_and_are_started_again(write_suite, store, monkeypatch):
    suite = write_suite(overrides=["seeds=0", "device=cpu", "options.color=red", "engine=imagined"])
    outcome = run_suite(suite, store.root, progress=False)
    assert (outcome.ran, outcome.skipped, outcome.failed, outcome.is_stopped) == (4, 0, {}, False)
    assert (Imagined.started, Imagined.closed) == (6, 1)
    monkeypatch.setattr(Imagined, "has_ended", lambda self, job: True)
    with pytest.raises(OSError, match="9 jobs have ended, and no cell"):
        run_suite(suite, store.root / "other", progress=False)
    assert Imagined.closed == 1


@pytest.fixture(autouse=True)
def _launcher(monkeypatch):
    monkeypatch.setattr(suites, "other_engines", lambda: {"imagined": SimpleNamespace(load=lambda: Imagined)})
    monkeypatch.setattr(running, "other_engines", suites.other_engines)
    monkeypatch.setattr(launchers, "_POLL", 0.01)


@pytest.mark.slow
def test_a_script_runs_a_suite_in_workers_that_need_a_class_of_it(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.count("ran=1, skipped=0, failed={}") == 1, done.stderr


@pytest.mark.parametrize(("script", "is_kept"), [(SCRIPT, True), ("import dpopt", False), (None, False)])
def test_a_script_without_a_guard_is_not_run_again_by_processes(tmp_path, monkeypatch, script, is_kept):
    """Processes that are started anew import the main module that they find: one that is piped in they cannot."""
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "script.py")
    if script:
        (tmp_path / "script.py").write_text(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with guarded_main():
        assert (sys.modules["__main__"] is main) == is_kept
    assert sys.modules["__main__"] is main
