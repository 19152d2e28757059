"""What a run changes before it begins, and what becomes of being asked to stop."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dpopt.errors import ConfigError
from dpopt.runs import engines, stopping
from dpopt.runs import execute as executing
from dpopt.runs import run_suite as running
from dpopt.runs.run_suite import run_suite
from dpopt.suites import estimate
from dpopt.suites.plan import plan

FEW = ["optimizers=[dp_sgd]", "seeds=0", "device=cpu"]
ONE = """
suite = dpopt.load_suite({
    "name": "mine", "workloads": ["digits_mlp"], "optimizers": ["torch_optim"], "epsilon": 3, "seeds": 0, "epochs": 1,
    "settings": {"torch_optim": {"tuning": "fixed", "fields": {"optimizer": OPTIMIZER}}}, "workers": 1, "device": "cpu",
})
print(dpopt.run_suite(suite, engine="local", progress=False))
"""
BARE = "import dpopt\n" + ONE.replace("OPTIMIZER", "'torch.optim.SGD'")
GUARDED = f"""
import dpopt
import torch

class Mine(torch.optim.SGD):
    pass

if __name__ == "__main__":
{textwrap.indent(ONE.replace("OPTIMIZER", "'__main__.Mine'"), "    ")}
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
    monkeypatch.setattr(running.engines, "create", lambda *given: pytest.fail("an engine was made for nothing"))
    assert len(run_suite(suite, store.root, engine="inline", progress=False).failed) == 2


def test_a_retry_that_takes_too_long_keeps_the_failures(write_suite, store, monkeypatch):
    suite = write_suite(overrides=[*FEW, "max_hours=1"])
    failed = [entry.cell.run_id for entry in plan(suite)]
    for run_id in failed:
        store.fail(run_id, "out of luck", "where")
    monkeypatch.setattr(
        running.probe, "timings", lambda rows, *given: dict.fromkeys(range(len(rows)), estimate.Timing(draw=3600))
    )
    with pytest.raises(ConfigError, match="max_hours: 1"):
        run_suite(suite, store.root, engine="inline", progress=False, retry=True)
    assert {store.error(run_id)["traceback"] for run_id in failed} == {"where"}
    assert not store.suites()
    assert len(run_suite(suite, store.root, engine="inline", progress=False).failed) == 2, "nothing waits"


def test_a_stop_at_the_end_of_a_stage_is_heard(write_searches, store, monkeypatch):
    suite, drive = write_searches(["optimizers=[linear]", "seeds=0", "device=cpu"]), executing._drive

    def asked_at_the_end(*given):
        drive(*given)
        stopping.ask()

    monkeypatch.setattr(executing, "_drive", asked_at_the_end)
    first, second = (run_suite(suite, store.root, engine="inline", progress=False) for _ in range(2))
    assert (first.ran, first.is_stopped) == (4, True)
    assert (second.ran, second.is_stopped) == (1, False), "nothing is left"


@pytest.fixture
def engines_made(monkeypatch):
    """The engines that are made, each with how often it was closed."""
    made, create = list[Any](), engines.create

    def counted(*given):
        engine: Any = create(*given)
        close, engine.closed = engine.close, 0

        def closed():
            engine.closed += 1
            close()

        engine.close = closed
        made.append(engine)
        return engine

    monkeypatch.setattr(engines, "create", counted)
    return made


def test_one_engine_runs_all_rounds(write_suite, store, engines_made):
    outcome = run_suite(write_suite(overrides=[*FEW, "widen=3"]), store.root, engine="inline", progress=False)
    assert outcome.ran > 2, "a second round, beyond the grid"
    assert [engine.closed for engine in engines_made] == [1, 1], "the first was only tried"


@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt()])
def test_the_engine_is_closed_where_planning_ends_a_run(write_suite, store, engines_made, monkeypatch, error):
    extend = type(store).extend_suite

    def extend_once(self, *given):
        monkeypatch.setattr(type(store), "extend_suite", ends)
        return extend(self, *given)

    def ends(*given):
        assert [engine.closed for engine in engines_made] == [1, 0], "it may be needed again"
        raise error

    monkeypatch.setattr(type(store), "extend_suite", extend_once)
    with pytest.raises(type(error)):
        run_suite(write_suite(overrides=[*FEW, "widen=3"]), store.root, engine="inline", progress=False)
    assert [engine.closed for engine in engines_made] == [1, 1]


@pytest.mark.parametrize(
    ("script", "is_piped"), [(BARE, False), (BARE, True), (GUARDED, False)], ids=["bare", "piped", "guarded"]
)
def test_a_script_runs_a_suite_in_workers(tmp_path, script, is_piped):
    """Without a guard, and with one where a worker needs a class of the script."""
    file = tmp_path / "script.py"
    file.write_text(script)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-" if is_piped else str(file)],
        input=script if is_piped else "",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "ran=1, skipped=0, failed={}" in done.stdout, done.stderr
    assert done.stdout.count("ran=") == 1, "a worker ran the script again"
