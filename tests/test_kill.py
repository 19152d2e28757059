"""A suite that is killed, workers and all, and started again gives what it would have given."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dpopt.store import Store

VOLATILE = ("seconds_prepare", "seconds_train", "seconds_cpu", "seconds_draw", "peak_memory", "provenance")
SHORT = [
    "workloads=[{name: synthetic_logreg, dim: 5}]",
    "optimizers=[dp_sgd,hyfreedp,adadp]",
    "epsilon=3",
    "accountant=rdp",
    "epochs=10",
]


def command(results, overrides):
    return [sys.executable, "-m", "dpopt", "run", "suite=quickstart", f"results={results}", *overrides]


def records(root):
    found = {}
    for entry in Store(root).manifest("quickstart")["cells"]:
        record = Store(root).record(entry["run_id"])
        curve = Store(root).curve(entry["run_id"])
        stable = {key: value for key, value in record.items() if key not in VOLATILE}
        found[entry["run_id"]] = json.dumps(
            [stable, curve, Store(root).ledger(entry["run_id"]).to_json()], sort_keys=True
        )
    return found


def kill_in_the_middle(results, overrides, done_before):
    process = subprocess.Popen(command(results, overrides), stderr=subprocess.DEVNULL, start_new_session=True)
    limit = time.monotonic() + 300
    while len(list(results.glob("runs/*/*/run.json"))) < done_before:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)  # the parent alone: its workers must follow by themselves
    process.wait()
    while _alive(process.pid):
        assert time.monotonic() < limit, "workers live on"
        time.sleep(0.1)


def _alive(group):
    """Whether a process of the group still runs."""
    states = subprocess.run(["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True).stdout
    return not all(state.startswith("Z") for state in states.split())


def same_as_unkilled(tmp_path, overrides, kills):
    quiet, stormy = tmp_path / "quiet", tmp_path / "stormy"
    subprocess.run(command(quiet, overrides), check=True, capture_output=True)
    for done_before in kills:
        kill_in_the_middle(stormy, overrides, done_before)
    finished = subprocess.run(command(stormy, overrides), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert " 0 were done" not in finished.stderr
    assert records(stormy) == records(quiet)


def test_a_killed_suite_gives_the_same_records(tmp_path):
    same_as_unkilled(tmp_path, SHORT, kills=[3, 9])


@pytest.mark.slow
def test_the_killed_quickstart_gives_the_same_records(tmp_path):
    same_as_unkilled(tmp_path, [], kills=[20, 100])
