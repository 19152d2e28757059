"""Workers and harnesses are killed at random, and cells raise, hang and exhaust memory: nothing is lost or doubled."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import unruly

from dpopt.store import Store

VOLATILE = ("seconds_prepare", "seconds_train", "seconds_cpu", "seconds_draw", "peak_memory", "provenance")
BAD = {"raises": "out of temper", "hangs": "longer than", "grows": "allocate"}


class Storm:
    """A suite of calm cells and three bad ones, and a results folder.

    Args:
        folder: where everything is.
        calm: number of calm cells.
        pause: seconds that each of their twenty draws takes.
        timeout: seconds that a cell may take.
    """

    def __init__(self, folder: Path, calm: int, pause: float, timeout: float) -> None:
        unruly.install(folder / "package")
        self.results, self.suite = folder / "results", folder / "storm.yaml"
        self.suite.write_text(unruly.SUITE.format(pause=pause, timeout=timeout, dims=list(range(21, 20 + calm))))
        paths = (str(folder / "package"), *filter(None, [os.environ.get("PYTHONPATH")]))
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.log = folder / "log.txt"
        self.total = calm + len(BAD)

    def command(self, *overrides: str) -> list[str]:
        return [sys.executable, "-m", "dpopt", "run", f"suite={self.suite}", f"results={self.results}", *overrides]

    def start(self, *overrides: str) -> subprocess.Popen:
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command(*overrides), stdout=log, stderr=log, env=self.environment)

    @property
    def ended(self) -> int:
        """How many cells have ended."""
        return sum(1 for kind in ("record", "error") for _ in self.results.glob(f"runs/*/*/{kind}.json"))

    def wait_for(self, cells: int, harness: subprocess.Popen, limit: float) -> None:
        until = time.monotonic() + limit
        while self.ended < cells and harness.poll() is None:
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)

    def finish(self, harness: subprocess.Popen, limit: float) -> None:
        assert harness.wait(limit) == 1, self.log.read_text()

    def check(self) -> None:
        """All calm cells have a result, one each; the bad ones are listed, each with its reason."""
        store = Store(self.results)
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
                assert left == {"run.json"}
            else:
                assert store.state(run_id) == "failed"
                assert BAD[mood] in store.error(run_id)["reason"]
                assert store.error(run_id)["kind"] == ("timeout" if mood == "hangs" else "failed")
                assert "lease.json" not in left or store.holder(run_id).is_gone
        said = self.log.read_text()
        assert all(reason in said for reason in BAD.values()), said

    def records(self) -> dict[str, str]:
        """What must not depend on the weather, of each finished cell."""
        store, found = Store(self.results), {}
        for file in self.results.glob("runs/*/*/run.json"):
            record = store.record(file.parent.name)
            stable = {key: value for key, value in record.items() if key not in VOLATILE}
            curve, ledger = store.curve(record["run_id"]), store.ledger(record["run_id"]).to_json()
            found[record["run_id"]] = json.dumps([stable, curve, ledger], sort_keys=True)
        return found


def children(pid: int) -> list[int]:
    """The worker processes of a harness."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def quiet(storm: Storm, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, str]:
    """The records of the calm cells, run one after the other in this process."""
    from dpopt import registry
    from dpopt.runs import train as cells

    monkeypatch.syspath_prepend(str(storm.suite.parent / "package"))
    registry.entries.cache_clear()
    store = Store(storm.results)
    calm = Store(folder)
    for entry in store.manifest("storm")["cells"]:
        if entry["cell"]["workload"]["mood"] == "calm":
            cells.run(cells.Cell.from_content(entry["cell"]), calm, device="cpu")
    registry.entries.cache_clear()
    return Storm.records(type("Quiet", (), {"results": folder}))  # type: ignore[arg-type]


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
    storm: Storm, kills: int, parents: int, seed: int = 0, limit: float = 3000, harm: Callable[..., int] = spare
) -> int:
    """Kill workers and harnesses at random until all kills are spent, then let the suite finish.

    Args:
        harm: what else is done to the results after a kill.

    Returns:
        The sum of what `harm` gave.
    """
    harmed = 0
    chance, harness = random.Random(seed), storm.start()
    plan = ["worker"] * kills + ["parent"] * parents
    chance.shuffle(plan)
    for number, victim in enumerate(plan, 1):
        storm.wait_for(min(storm.total - 4, number * (storm.total - 4) // (len(plan) + 1)), harness, limit)
        until = time.monotonic() + limit
        while not (workers := children(harness.pid)):
            assert harness.poll() is None, storm.log.read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.5))
        os.kill(harness.pid if victim == "parent" else chance.choice(workers), signal.SIGKILL)
        harmed += harm(storm, chance)
        if victim == "parent":
            harness.wait()
            harness = storm.start()
    storm.finish(harness, limit)
    return harmed


def shows_it_survives(tmp_path, monkeypatch, calm, kills, parents, pause, timeout):
    storm = Storm(tmp_path, calm, pause, timeout)
    rage(storm, kills, parents)
    storm.check()
    assert storm.records() == quiet(storm, monkeypatch, tmp_path / "quiet")


@pytest.mark.slow
def test_a_small_storm(tmp_path, monkeypatch):
    shows_it_survives(tmp_path, monkeypatch, calm=12, kills=2, parents=1, pause=0.02, timeout=20)


@pytest.mark.slow
def test_a_storm(tmp_path, monkeypatch):
    shows_it_survives(tmp_path, monkeypatch, calm=197, kills=30, parents=2, pause=0.03, timeout=60)


@pytest.mark.slow
def test_a_storm_that_damages_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("UNRULY_CHECKPOINTS", "0.3")
    storm = Storm(tmp_path, calm=57, pause=0.1, timeout=60)
    assert rage(storm, kills=16, parents=4, harm=damage) > 10
    said = storm.log.read_text()
    assert "does not have the checksum" in said
    storm.check()
    assert storm.records() == quiet(storm, monkeypatch, tmp_path / "quiet")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "slurm"])
def test_a_storm_on_other_engines(tmp_path, monkeypatch, engine):
    """Two actors of a Ray cluster started here, or jobs of submitit's local executor; one is killed half-way."""
    pytest.importorskip({"ray": "ray", "slurm": "submitit"}[engine])
    storm = Storm(tmp_path, calm=12, pause=0.2, timeout=60)
    options = [f"options.folder={tmp_path / 'jobs'}", "options.cluster=local", "options.at_once=2"]
    harness = storm.start(f"engine={engine}", *(options if engine == "slurm" else []))
    storm.wait_for(6, harness, 600)
    os.kill(holder(storm), signal.SIGKILL)
    storm.finish(harness, 900)
    storm.check()
    assert storm.records() == quiet(storm, monkeypatch, tmp_path / "quiet")


def holder(storm: Storm) -> int:
    """The process that runs a calm cell."""
    store, until = Store(storm.results), time.monotonic() + 300
    cells = store.manifest("storm")["cells"]
    calm = {entry["run_id"] for entry in cells if entry["cell"]["workload"]["mood"] == "calm"}
    while time.monotonic() < until:
        for file in storm.results.glob("runs/*/*/lease.json"):
            known = store.holder(file.parent.name)
            if known is not None and file.parent.name in calm:
                return known.pid
        time.sleep(0.01)
    raise AssertionError("no calm cell is running")


@pytest.mark.slow
def test_two_harnesses_share_a_folder(tmp_path, monkeypatch):
    """Each cell is run by one of them, and both end when all are done."""
    storm = Storm(tmp_path, calm=30, pause=0.05, timeout=60)
    harnesses = [storm.start(), storm.start()]
    for harness in harnesses:
        storm.finish(harness, 900)
    storm.check()
    shares = [int(number) for number in re.findall(r"(\d+) cells run", storm.log.read_text())]
    assert len(shares) == 2
    assert sum(shares) == 30
    assert min(shares) > 0
    assert storm.records() == quiet(storm, monkeypatch, tmp_path / "quiet")


@pytest.mark.slow
def test_engines_are_exchanged_in_the_middle_of_a_suite(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    storm = Storm(tmp_path, calm=12, pause=0.1, timeout=60)
    for engine, cells in (("local", 4), ("ray", 8)):
        harness = storm.start(f"engine={engine}")
        storm.wait_for(cells, harness, 600)
        harness.send_signal(signal.SIGTERM)
        assert harness.wait(120) == 130
    storm.finish(storm.start("engine=local"), 900)
    storm.check()
    assert storm.records() == quiet(storm, monkeypatch, tmp_path / "quiet")
