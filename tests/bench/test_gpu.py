"""The slices of `make gpu`, with steps that are one-line scripts, and one real step."""

import json
import os
import signal
import subprocess
import sys
import time

import gpu
import pytest

from dpopt.errors import ConfigError

ROW = "import json, sys; open(sys.argv[1], 'a').write(json.dumps({'a': 1}) + '\\n'); "
HANG = (
    ROW + "import subprocess, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
)


def attempt(folder, script, limit=60.0, left=3600.0, name="cost-mlp"):
    return gpu.attempt(name, ["-c", script], folder, limit, left)


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        (ROW, "done", ""),
        (ROW + "open(sys.argv[1], 'a').write('{\"b\": ')", "done", ""),  # a row that was cut short is left out
        (ROW + "raise ValueError('a mistake')", "failed", "exit code 1: ValueError: a mistake"),
        (ROW + "sys.stderr.write('bye'); sys.exit(3)", "failed", "exit code 3: bye"),
    ],
)
def test_a_step_keeps_its_rows_and_says_how_it_ended(script, status, reason, tmp_path):
    record = attempt(tmp_path, script)
    assert (record["status"], record["rows"]) == (status, [{"a": 1}])
    assert record["reason"].partition("\n")[0] == reason
    assert json.loads((tmp_path / "cost-mlp.json").read_text()) == record


@pytest.mark.parametrize(
    ("limit", "left", "status", "reason"),
    [(2.0, 60.0, "failed", "it takes more than 2 seconds"), (60.0, 2.0, "cut", "the slice ended")],
)
def test_a_step_that_hangs_is_ended_with_all_that_it_has_started(limit, left, status, reason, tmp_path):
    record = attempt(tmp_path, HANG, limit, left)
    assert (record["status"], record["reason"]) == (status, reason)
    is_gone((tmp_path / "cost-mlp.log").read_text().split()[0])


def is_gone(pid):
    """Wait until a process has ended; one that does not lets the test run into its own limit."""
    while subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip(" \nZ"):
        time.sleep(0.05)


@pytest.mark.slow
def test_nothing_outlives_a_slice_that_is_killed(tmp_path):
    script = f"import sys; sys.path.append({os.path.dirname(gpu.__file__)!r}); import gpu; from pathlib import Path; "
    script += "gpu.attempt('cost-mlp', ['-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'], "
    parent = subprocess.Popen([sys.executable, "-c", f"{script}Path({str(tmp_path)!r}), 600, 600)"])
    log = tmp_path / "cost-mlp.log"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    is_gone(log.read_text().strip())


def test_every_step_can_be_made_and_reported(tmp_path):
    for step in f"{gpu.CARD} {gpu.REHEARSAL}".split():
        assert step.split("-")[0] in gpu.LIMITS
    timed = {"contender": "bookkeeping", "baseline": "non_private", "time_ratio": 1.25, "memory_ratio": 1.5}
    rows = [timed, {"check": "c", "name": "n", "status": "failed"}, {"contender": "vmap", "batch": 64}]
    rows += [{"contender": "run", "cells_per_hour": 1234.0}, {"states": {"done": 2}, "cells": 3}]
    line = gpu.finding({"reason": "", "rows": rows})
    assert (
        line == "0 of 1 checks passed; bookkeeping 1.25 (memory 1.50); failed: n, c; vmap 64; run 1,234/h; 2 of 3 cells"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [(["steps=cots"], "cost"), (["minutes=-1"], "minutes"), (["device=cuda"], "device"), (["minute=3"], "minutes")],
)
def test_bad_keys_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        gpu.main(["device=cpu", *words])


@pytest.mark.slow
def test_a_slice_goes_on_where_the_last_one_ended(tmp_path, capsys):
    keys = ["device=cpu", "steps=conformance-mlp", f"results={tmp_path}"]
    assert gpu.main([*keys, "minutes=0.1"]) == 0  # no step has a place
    assert "| conformance-mlp             | not yet" in capsys.readouterr().out
    assert gpu.main([*keys, "minutes=5"]) == 0
    assert "checks passed" in capsys.readouterr().out
    before = time.monotonic()
    assert gpu.main([*keys, "minutes=5"]) == 0
    (record,) = tmp_path.glob("gpu/*/steps/conformance-mlp.json")
    assert json.loads(record.read_text())["status"] == "done"
    assert record.stat().st_mtime < time.time() - (time.monotonic() - before)  # it was not done again
