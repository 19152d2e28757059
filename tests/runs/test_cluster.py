"""Many small cells in few jobs of submitit's local cluster, one of which is killed with all of its processes."""

import os
import signal
import threading
from pathlib import Path

import pytest
from small_suites import QUICK

from dpopt.runs.run_suite import run_suite
from dpopt.store import Store
from dpopt.suites.plan import plan
from dpopt.suites.suite import load_suite


def ancestors(pid):
    """A process and those that it descends from, up to this one."""
    line = []
    while pid not in (0, 1, os.getpid()):
        line.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return line


@pytest.mark.slow
@pytest.mark.parametrize(("cells", "jobs"), [(24, 3), (2100, 6)])
def test_few_jobs_run_many_cells_and_one_may_die(tmp_path, cells, jobs):
    pytest.importorskip("submitit")
    (tmp_path / "many.yaml").write_text(QUICK + f"optimizers: [adadp]\nseeds: {[*range(cells)]}\n")
    options = {"cluster": "local", "folder": str(tmp_path / "slurm"), "timeout_min": 60}
    suite = load_suite(tmp_path / "many.yaml", engine="slurm", workers=jobs, device="cpu", options=options)
    store = Store(tmp_path / "results")
    names, killed = [entry.cell.run_id for entry in plan(suite)], []

    def kill():
        while not killed and not ended.wait(0.05):
            holder = next(filter(None, map(store.holder, names)), None)
            if holder and sum(store.state(name) == "done" for name in names[:50]) > 2:
                killed.extend(ancestors(holder.pid))
                for pid in reversed(killed):  # from the job's first process on, so that none is started again
                    os.kill(pid, signal.SIGKILL)

    ended, killer = threading.Event(), threading.Thread(target=kill)
    killer.start()
    try:
        outcome = run_suite(suite, store.root, progress=False)
    finally:
        ended.set()
        killer.join()
    assert len(killed) >= 3, "a worker, its supervisor and the job"
    assert (outcome.ran, outcome.failed, outcome.damaged) == (cells, {}, [])
    assert {store.state(name) for name in names} == {"done"}
    submitted = list((tmp_path / "slurm").glob("*_submitted.pkl"))
    assert len(submitted) <= jobs, "others take the cells of the one that is gone"


def test_a_suite_without_a_number_of_workers_has_few_jobs(tmp_path):
    slurm = pytest.importorskip("dpopt.runs.slurm")
    (tmp_path / "many.yaml").write_text(QUICK + "optimizers: [adadp]\n")
    options = {"cluster": "local", "folder": str(tmp_path / "slurm")}
    rooms = [
        slurm.Launcher(load_suite(tmp_path / "many.yaml", options=options | more, **keys)).room
        for keys, more in (({}, {}), ({"workers": 50}, {}), ({"workers": 50}, {"at_once": 7}))
    ]
    assert rooms == [20, 50, 7]
