"""Workers and supervisors are killed and stopped at random; cells raise, hang and exhaust memory: nothing is lost."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import unruly
from small_suites import train_cell
from stored import copied, finished_runs

from dpopt.store import Store
from dpopt.store.runs import _UNFINISHED

BAD = {"raises": "out of temper", "hangs": "longer than", "grows": "allocate"}


class Storm:
    """A suite of calm cells and bad ones, and a results folder that any number of supervisors work on.

    Args:
        folder: where everything is.
        calm: number of calm cells.
        pause: seconds that each of their twenty draws takes.
        timeout: seconds that a cell may take.
        bad: what the bad cells do, of `BAD`.
    """

    def __init__(
        self, folder: Path, calm: int, pause: float, timeout: float, bad: tuple[str, ...] = tuple(BAD)
    ) -> None:
        unruly.install(folder / "package")
        self.results, self.suite = folder / "results", folder / "storm.yaml"
        words = {"moods": f"[{', '.join(('calm', *bad))}]", "pause": pause, "timeout": timeout}
        self.suite.write_text(unruly.SUITE.format(dims=list(range(21, 20 + calm)), **words))
        paths = (str(folder / "package"), *filter(None, [os.environ.get("PYTHONPATH")]))
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.log = folder / "log.txt"
        self.bad, self.total, self.pause = bad, calm + len(bad), pause

    def start(self, *overrides: str, **environment: str) -> subprocess.Popen:
        words = [sys.executable, "-m", "dpopt", "run", f"suite={self.suite}", f"results={self.results}", *overrides]
        with self.log.open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, env={**self.environment, **environment})

    @property
    def ended(self) -> int:
        """How many cells have ended."""
        return sum(1 for kind in ("run", "error") for _ in self.results.glob(f"runs/*/*/{kind}.json"))

    def wait_for(self, cells: int, supervisors: list[subprocess.Popen], limit: float) -> None:
        until = time.monotonic() + limit
        while self.ended < cells and any(each.poll() is None for each in supervisors):
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)

    def finish(self, supervisors: list[subprocess.Popen], limit: float) -> None:
        for each in supervisors:
            assert each.wait(limit) == 1, self.log.read_text()

    def check(self, interrupted: int = 0) -> None:
        """All calm cells have a result, one each; the bad ones are listed with their reasons; nothing else is left.

        Args:
            interrupted: cells that may have files beside their result which nobody reads: their worker was killed right
                after the rename, or they were begun here and their result was copied from elsewhere.
        """
        store, beside = Store(self.results), 0
        cells = store.manifest("storm")["cells"]
        assert len({entry["run_id"] for entry in cells}) == len(cells) == self.total
        assert len(store.run_ids()) == self.total, "no other cell was run"
        assert store.foreign() == []
        for entry in cells:
            run_id, mood = entry["run_id"], entry["cell"]["workload"]["mood"]
            left = {file.name for file in store.folder(run_id).iterdir()}
            if mood == "calm":
                assert store.state(run_id) == "done", store.error(run_id)
                assert [item["draw"] for item in store.curve(run_id)] == [4, 8, 12, 16, 20]
                assert left <= {"run.json", "lease", *_UNFINISHED}
                beside += left != {"run.json"}
            else:
                assert store.state(run_id) == "failed"
                assert BAD[mood] in store.error(run_id)["reason"]
                assert store.error(run_id)["kind"] == ("timeout" if mood == "hangs" else "failed")
                assert left <= {"cell.json", "curve.jsonl", "error.json", "lease"}
                assert "lease" not in left or store.holder(run_id).is_gone
        assert beside <= interrupted
        said = self.log.read_text()
        assert all(BAD[mood] in said for mood in self.bad), said


def children(pid: int) -> list[int]:
    """The worker processes of a supervisor."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def quiet(storm: Storm, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, str]:
    """The records of the calm cells, run one after the other in this process."""
    from dpopt import registry
    from dpopt.cells import Cell

    monkeypatch.syspath_prepend(str(storm.suite.parent / "package"))
    registry.entries.cache_clear()
    for entry in Store(storm.results).manifest("storm")["cells"]:
        if entry["cell"]["workload"]["mood"] == "calm":
            train_cell(Cell.from_content(entry["cell"]), Store(folder), device="cpu")
    registry.entries.cache_clear()
    return finished_runs(folder)


def spare(storm: Storm, chance: random.Random) -> int:
    """Leave all as it is."""
    return 0


def damage(storm: Storm, chance: random.Random) -> int:
    """Flip a bit in each checkpoint; how many."""
    flipped = 0
    for path in storm.results.glob("runs/*/*/checkpoint.pt"):
        with contextlib.suppress(FileNotFoundError):  # its cell has just ended
            content = bytearray(path.read_bytes())
            bit = chance.randrange(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
            path.with_name("damaged").write_bytes(content)
            path.with_name("damaged").replace(path)
            flipped += 1
    return flipped


def rage(
    storm: Storm,
    blows: list[str],
    start: list[Callable[[], subprocess.Popen]],
    limit: float = 3000,
    harm: Callable[..., int] = spare,
) -> int:
    """Deal blows at random until all are spent, then let the suite finish.

    Args:
        blows: "worker" and "parent" are killed, "stop" has a worker stand still for a while.
        start: one function for each supervisor; called again when it was killed.
        harm: what else is done to the results after a blow.

    Returns:
        The sum of what `harm` gave.
    """
    harmed, chance, supervisors, stopped = 0, random.Random(0), [call() for call in start], list[int]()
    chance.shuffle(blows)
    for number, blow in enumerate(blows, 1):
        storm.wait_for(min(storm.total - 4, number * (storm.total - 4) // (len(blows) + 1)), supervisors, limit)
        at, until = chance.randrange(len(supervisors)), time.monotonic() + limit
        while not (workers := children(supervisors[at].pid)):
            assert supervisors[at].poll() is None, storm.log.read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 20 * storm.pause))  # anywhere in a cell
        victim = supervisors[at].pid if blow == "parent" else chance.choice(workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP if blow == "stop" else signal.SIGKILL)
            stopped += [victim] if blow == "stop" else []
        while len(stopped) > (blow == "stop"):  # the one before goes on
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped.pop(0), signal.SIGCONT)
        harmed += harm(storm, chance)
        if blow == "parent":
            supervisors[at].wait()
            supervisors[at] = start[at]()
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    storm.finish(supervisors, limit)
    return harmed


def test_a_worker_and_a_supervisor_that_are_killed_cost_nothing(tmp_path, monkeypatch):
    """The short form of the storms below: a kill in the middle of a cell, and one of the supervisor alone."""
    storm = Storm(tmp_path, calm=4, pause=0.02, timeout=3000, bad=("raises", "grows"))
    rage(storm, ["worker", "parent"], [storm.start])
    storm.check(interrupted=1)
    assert finished_runs(storm.results) == quiet(storm, monkeypatch, tmp_path / "quiet")


@pytest.mark.slow
def test_a_storm_over_two_supervisors(tmp_path, monkeypatch):
    """Of which one has a clock that is an hour wrong, and goes wrong by another hour while it runs."""
    storm = Storm(tmp_path, calm=57, pause=0.03, timeout=60)
    blows = ["worker"] * 10 + ["parent"] * 3 + ["stop"] * 4
    rage(storm, blows, [storm.start, lambda: storm.start(UNRULY_CLOCK="3600")])
    storm.check(interrupted=1)
    assert finished_runs(storm.results) == quiet(storm, monkeypatch, tmp_path / "quiet")


@pytest.mark.slow
def test_a_storm_that_damages_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("UNRULY_CHECKPOINTS", "0.3")
    storm = Storm(tmp_path, calm=57, pause=0.1, timeout=3000, bad=("raises", "grows"))
    assert rage(storm, ["worker"] * 16 + ["parent"] * 4, [storm.start], harm=damage) > 10
    assert "does not have the checksum" in storm.log.read_text()
    storm.check(interrupted=1)
    assert finished_runs(storm.results) == quiet(storm, monkeypatch, tmp_path / "quiet")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "slurm"])
def test_a_storm_on_clusters(tmp_path, monkeypatch, engine):
    """Two jobs of a Ray cluster started here, or of submitit's local executor; one worker is killed half-way."""
    pytest.importorskip({"ray": "ray", "slurm": "submitit"}[engine])
    storm = Storm(tmp_path, calm=12, pause=0.2, timeout=3000, bad=("raises", "grows"))
    options = [f"options.folder={tmp_path / 'jobs'}", "options.cluster=local"]
    supervisor = storm.start(f"engine={engine}", *(options if engine == "slurm" else []))
    storm.wait_for(6, [supervisor], 600)
    os.kill(holder(storm), signal.SIGKILL)
    assert supervisor.wait(900) == 1, storm.log.read_text()
    with storm.log.open("a") as log:  # a job tells its own log what failed; the run tells it at the end
        log.write(" ".join(BAD.values()))
    storm.check(interrupted=1)
    assert finished_runs(storm.results) == quiet(storm, monkeypatch, tmp_path / "quiet")


def holder(storm: Storm) -> int:
    """The process that runs a calm cell."""
    store, until = Store(storm.results), time.monotonic() + 300
    cells = store.manifest("storm")["cells"]
    calm = {entry["run_id"] for entry in cells if entry["cell"]["workload"]["mood"] == "calm"}
    while time.monotonic() < until:
        for file in storm.results.glob("runs/*/*/lease"):
            known = store.holder(file.parent.name)
            if known is not None and file.parent.name in calm:
                return known.pid
        time.sleep(0.01)
    raise AssertionError("no calm cell is running")


@pytest.mark.slow
def test_engines_are_exchanged_in_the_middle_of_a_suite(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    storm = Storm(tmp_path, calm=12, pause=0.1, timeout=60)
    for engine, cells in (("local", 4), ("ray", 8)):
        supervisor = storm.start(f"engine={engine}")
        storm.wait_for(cells, [supervisor], 600)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(120) == 130
    storm.finish([storm.start("engine=local")], 900)
    storm.check()
    assert finished_runs(storm.results) == quiet(storm, monkeypatch, tmp_path / "quiet")


@pytest.mark.slow
def test_folders_that_were_begun_apart_are_copied_both_ways(tmp_path, monkeypatch):
    """Each has finished cells that the other has begun: a copy that skips what exists damages and doubles nothing."""
    bad = ("raises", "grows")
    storms = [Storm(tmp_path / name, calm=12, pause=0.1, timeout=3000, bad=bad) for name in ("one", "other")]
    monkeypatch.setenv("UNRULY_CHECKPOINTS", "0.1")
    for number, storm in enumerate(storms):
        storm.environment["UNRULY_CHECKPOINTS"] = "0.1"
        supervisor = storm.start("seeds=0", f"workers={1 + number}")
        storm.wait_for(5, [supervisor], 600)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(120) == 130
    for source, target in (storms, storms[::-1]):
        copied(source.results, target.results)
    for storm in storms:
        storm.finish([storm.start("seeds=0")], 600)
        storm.check(interrupted=3)
    assert (
        finished_runs(storms[0].results)
        == finished_runs(storms[1].results)
        == quiet(storms[0], monkeypatch, tmp_path / "quiet")
    )
