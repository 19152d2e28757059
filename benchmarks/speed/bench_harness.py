"""The cost of the harness itself with 10,000 cells, each command as a user starts it, under pytest-benchmark:

    pytest benchmarks/speed/bench_harness.py --benchmark-columns=median

The results folder is made of one real replicate of `quickstart` (59 cells, half a minute), whose records, ledgers and
curves stand for those of all other seeds under the run ids of these. `peak_mib` is the most memory that a command held.
"""

import json
import os
import subprocess
import sys
import threading

import pytest

from dpopt.store import Store
from dpopt.suites.plan import plan
from dpopt.suites.suite import load_suite

CELLS = 10_000
SUITE = "quickstart"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A finished suite of `CELLS` cells or a few more."""
    root = tmp_path_factory.mktemp("harness") / "results"
    _dpopt(root, "run", "seeds=[0]")
    store, one = Store(root), plan(load_suite(SUITE, ["seeds=[0]"]))
    seeds = range(-(-CELLS // len(one)))
    planned = plan(load_suite(SUITE, [f"seeds={list(seeds)}"]))
    first = {_key(entry.cell): entry.cell.run_id for entry in one}
    for entry in planned:
        _stand_in(store, first[_key(entry.cell)], entry.cell)
    return root, f"seeds={list(seeds)}"


def _key(cell):
    return json.dumps({**cell.content(), "seed": 0}, sort_keys=True)


def _stand_in(store, source, cell):
    if store.is_settled(cell.run_id):
        return
    run = store.run(source)
    record = {**run.record, "run_id": cell.run_id, "cell": cell.content()}
    store.write(store.folder(cell.run_id, "run.json"), run._replace(record=record).line())


def _dpopt(root, command, *overrides):
    """Run a command to its end; returns the most memory that it held, in MiB."""
    words = [sys.executable, "-m", "dpopt", command, f"suite={SUITE}", f"results={root}", *overrides]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout))
    reader.start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    reader.join()
    assert process.returncode == 0, "".join(lines)
    return usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, KiB here


@pytest.mark.parametrize("command", ["plan", "run", "status", "table"])
def test_command(benchmark, results, command):
    """`run` finds every cell done."""
    root, seeds = results
    further = [seeds] if command in ("plan", "run") else []
    peak = benchmark.pedantic(_dpopt, (root, command, *further), rounds=1)
    benchmark.extra_info["peak_mib"] = round(peak)
