"""`dpopt gpu`: where a slice works, what it leaves and says; and the whole rehearsal, twice and after a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.gpu import report
from dpopt.gpu import run as runs
from dpopt.gpu.session import Session
from dpopt.gpu.steps import Step, table
from dpopt.store.provenance import code, hardware

ROOT = Path(__file__).parents[2]
SETTING = {
    "device": "cuda Card",
    "hardware": {"name": "Card", "memory": 2**34, "driver": "1.2", "cuda": "13.0", "cudnn": 9, "capability": "9.0"},
    "torch": "2.11",
    "python": "3.12",
    "versions": {"opacus": "1.6", "timm": None, "transformers": "5"},
    "code": "c0de",
    "commit": None,
    "dirty": False,
    "key": "0",
}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=auto", "there is no CUDA device; device=cpu rehearses"),
        ("device=cuda", "there is no CUDA device"),
        ("device=tpu", "expected auto, cpu, cuda"),
        ("minutes=0", "minutes"),
        ("minutes=soon", "minutes"),
        ("retry=perhaps", "retry"),
        ("step=cost", "did you mean 'steps'"),
    ],
)
def test_bad_input_gets_one_clear_error(override, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["gpu", override, f"results={tmp_path}"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_keys():
    chosen = runs.settings(["device=cpu", "minutes=2.5", "steps=[cost,draws-mlp]", "retry=true", "results=a"])
    assert (chosen.minutes, chosen.steps, chosen.retry) == (2.5, ("cost", "draws-mlp"), True)
    assert (chosen.device, chosen.results, chosen.plots) == ("cpu", Path("a"), Path("plots"))
    assert runs.settings(["device=cpu"]).steps is None
    assert runs.settings(["device=cpu", "steps=cost"]).steps == ("cost",)


class Answering:
    """Stands for the process that looks at the device."""

    def __init__(self, look):
        self.device = look.device

    def ask(self, method):
        return (SETTING, "") if self.device == "cuda" else (SETTING | {"hardware": {"name": "x86_64"}}, "")

    def close(self):
        pass


def settings_for(device, results):
    return runs.GpuKeys(minutes=9, device=device, steps=None, retry=False, results=results, plots=ROOT / "plots")


def test_a_rehearsal_never_touches_what_is_published(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "Remote", Answering)
    rehearsal = runs._session(settings_for("cpu", tmp_path))
    assert rehearsal.folder == tmp_path / "gpu" / "x86-64-0"
    job = json.loads(rehearsal.command(table(None)[-1], tmp_path / "rows")[3])
    assert Path(job["store"]) == rehearsal.folder / "store"
    card = runs._session(settings_for("cuda", tmp_path))
    assert card.folder == tmp_path / "published" / "gpu" / "card-0"
    assert Path(json.loads(card.command(table(2**34)[-1], tmp_path / "rows")[3])["store"]) == tmp_path


def test_a_device_that_cannot_be_looked_at_is_an_error(monkeypatch, tmp_path):
    class Broken(Answering):
        def ask(self, method):
            return None, "RuntimeError: CUDA error: invalid device ordinal"

    monkeypatch.setattr(runs, "Remote", Broken)
    with pytest.raises(ConfigError, match="invalid device ordinal"):
        runs._session(settings_for("cuda:9", tmp_path))


def test_another_version_or_other_code_is_another_session(monkeypatch):
    import torch

    look = runs.Look("cpu")
    first = look.setting()
    assert look.setting() == first
    monkeypatch.setattr(runs, "code", lambda: "other")
    assert look.setting()["key"] != first["key"]
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert look.setting()["key"] != first["key"]
    monkeypatch.undo()
    monkeypatch.setattr(runs, "provenance", lambda place: {**original(place), "commit": "another"})
    assert look.setting()["key"] == first["key"]  # documents may change


original = runs.provenance


def test_code_is_that_of_every_file(tmp_path, monkeypatch):
    copy = shutil.copytree(ROOT / "dpopt", tmp_path / "dpopt", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("dpopt.store.provenance.__file__", str(copy / "harness" / "provenance.py"))
    before = code()
    (copy / "conf" / "base" / "gpu.yaml").write_text("minutes: 8\n")
    assert len({before, code(), code()}) == 2
    monkeypatch.undo()
    assert code() == before


def test_the_cpu_is_known_by_its_kind():
    import torch

    assert list(hardware(torch.device("cpu"))) == ["name"]


TIMES = {"time_ratio": 1.25, "memory_ratio": 1.5, "contender": "bookkeeping", "baseline": "non_private"}
ROWS = {
    "conformance": [
        {"kind": "engine", "name": "vmap, mlp", "check": "repeats", "status": "failed", "detail": "why", "seconds": 1},
        {"kind": "engine", "name": "vmap, mlp", "check": "agrees", "status": "passed", "detail": "", "seconds": 1},
    ],
    "cost": [
        {"kind": "engine", "case": "mlp", "subset": "full", "batch_size": 8, "precision": "float32", "trained": 9}
        | {"parameters": 9, "draws_per_call": 1, "rounds": 5, "seconds": 1.0, "memory": 10, "failure": ""}
        | {"time_ratio_low": 1.0, "time_ratio_high": 2.0, "baseline": "non_private", **changes}
        for changes in (
            TIMES | {"contender": "non_private", "time_ratio": 1.0, "memory_ratio": 1.0},
            TIMES,
            TIMES
            | {"contender": "opacus_ghost", "seconds": None, "time_ratio": None, "memory_ratio": None}
            | {"memory": None, "time_ratio_low": None, "time_ratio_high": None, "failure": "OutOfMemoryError: CUDA"},
        )
    ],
    "batch": [
        {
            "case": "mlp",
            "subset": "full",
            "contender": name,
            "batch": size,
            "seconds": 0.1,
            "end": "memory",
            "failure": "",
        }
        for name, size in (("non_private", 512), ("opacus_hooks", 64), ("opacus_ghost", None))
    ],
    "cells": [
        {"suite": "quickstart", "contender": "dpopt run", "cells": 9, "seconds": 1.0, "cells_per_hour": 12345.6}
        | {"failure": ""},
        {"suite": "quickstart", "contender": "Opacus", "cells": 9, "seconds": 1.0, "cells_per_hour": None}
        | {"failure": "exit code 1: why"},
    ],
    "suite": [
        {"suite": "adadp_cifar10", "cells": 9, "states": {"done": 3, "diverged": 1, "failed": 1, "pending": 4}}
        | {"why": {"no memory": 1}, "made": {"cuda Card, c0ffee": 4}, "table": "| a table |\n"}
    ],
}
FINDINGS = {
    "conformance": "1 of 2 checks passed; failed: vmap, mlp: repeats",
    "cost": "bookkeeping 1.25 (memory 1.50), ghost fails",
    "batch": "non_private 512, hooks 64, ghost fails",
    "cells": "dpopt run 12,346/h, Opacus fails",
    "suite": "4 of 9 cells; 1 failed: no memory",
}


@pytest.fixture
def session(tmp_path):
    made = Session(tmp_path / "card-0", SETTING, lambda step, rows: [])
    (made.folder / "steps").mkdir(parents=True)
    for name, rows in ROWS.items():
        record = {"step": name, "status": "done", "reason": "", "seconds": 7.4, "rows": rows, "setting": SETTING}
        (made.folder / "steps" / f"{name}.json").write_text(json.dumps(record))
    return made


STEPS = [Step(name, "none") for name in (*ROWS, "without", "later")]


def change(session, name, **changes):
    path = session.folder / "steps" / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", FINDINGS)
def test_what_a_step_found_is_told_in_a_line(session, name):
    assert report.finding(session.record(Step(name, "none"))) == FINDINGS[name]


def test_why_a_step_failed_is_told_with_what_it_found(session):
    change(session, "cost", status="failed", reason="exit code 1: Error\nmore")
    record = session.record(Step("cost", "none"))
    assert report.finding(record) == f"exit code 1: Error; {FINDINGS['cost']}"
    assert report.finding(record | {"rows": []}) == "exit code 1: Error"


def test_the_table_has_a_line_for_every_step(session):
    lines = report.summary(session, STEPS, {"without": "no package timm"}).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [cell[0] for cell in cells] == [step.name for step in STEPS]
    assert [cell[1] for cell in cells] == ["done"] * len(ROWS) + ["left out", "not yet"]
    assert [cell[3] for cell in cells[: len(ROWS)]] == [*FINDINGS.values()]


def test_what_a_session_leaves(session):
    assert report.write(session, STEPS, {"without": "no package timm"}, ROOT / "plots") == []
    text = (session.folder / "table.md").read_text()
    assert text.startswith("# cuda Card\n")
    for said in ("driver 1.2", "cuda 13.0", "torch 2.11", "Python 3.12", "16 GiB", "code c0de", "timm None"):
        assert said in text
    for said in ("Left out: without (no package timm).", "| opacus_ghost | fails", "OutOfMemoryError: CUDA"):
        assert said in text
    assert "## Suite adadp_cifar10: 4 of 9 cells" in text
    assert "Trained on cuda Card, c0ffee (4)." in text
    assert "| a table |" in text
    assert "exit code 1: why" in text
    assert {file.name for file in session.folder.glob("*.svg")} == {"step_cost_full.svg"}


def test_steps_of_another_session_are_marked(session):
    other = SETTING | {"key": "1", "code": "01d", "torch": "2.10"}
    change(session, "cost", setting=other)
    report.write(session, STEPS, {}, ROOT / "plots")
    text = (session.folder / "table.md").read_text()
    assert "| done * " in text
    assert "\\* cost was measured with cuda Card, torch 2.10" in text


def test_without_pandas_there_is_the_table_of_steps(session, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda package: None)
    assert report.write(session, STEPS, {}, ROOT / "plots") == ["pandas", "matplotlib"]
    assert FINDINGS["cost"] in (session.folder / "table.md").read_text()
    assert not list(session.folder.glob("*.svg"))


def test_without_the_folder_of_figures_there_are_tables(session, tmp_path):
    report.write(session, STEPS, {}, tmp_path / "nowhere")
    assert "## Engines" in (session.folder / "table.md").read_text()


def test_where_everything_failed_there_still_are_tables(session):
    rows = [row | {key: None for key in ROWS["cost"][2] if ROWS["cost"][2][key] is None} for row in ROWS["cost"]]
    change(session, "cost", rows=[row | {"failure": "no memory"} for row in rows])
    report.write(session, STEPS, {}, ROOT / "plots")
    assert "| non_private  | fails" in (session.folder / "table.md").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_hands_its_keys_on():
    words = ["make", "-n", "gpu", "minutes=3", "device=cpu", "steps=[cost,draws]", "PYTHON=python3", "WHEELS=nowhere"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in said.splitlines() if "dpopt gpu" in line]
    assert set(line.split()[3:]) == {"gpu", "'minutes=3'", "'device=cpu'", "'steps=[cost,draws]'"}


def rehearse(results, *more, **options):
    words = [sys.executable, "-m", "dpopt", "gpu", "device=cpu", f"results={results}", *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def records(results):
    return {path.stem: json.loads(path.read_text()) for path in results.glob("gpu/*/steps/*.json")}


@pytest.mark.slow
def test_a_rehearsal_is_killed_and_goes_on_and_then_does_nothing(tmp_path):
    first = rehearse(tmp_path, "minutes=60", start_new_session=True)
    limit = time.monotonic() + 600
    while len(records(tmp_path)) < 2:
        assert first.poll() is None, first.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    before = records(tmp_path)
    started = time.monotonic()
    second = rehearse(tmp_path, "minutes=3")
    told, _ = second.communicate()
    assert time.monotonic() - started < 180 + 30, "the slice is longer than it may be"
    for _ in range(5):  # on a busy machine one slice does not suffice
        if "not yet" not in told and " cut " not in told:
            break
        second = rehearse(tmp_path, "minutes=10")
        told, _ = second.communicate()
    assert second.returncode == 0, told
    after = records(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {record["status"] for record in after.values()} == {"done"}
    third = rehearse(tmp_path, "minutes=3")
    told, progress = third.communicate()
    assert third.returncode == 0
    assert "nothing to do" in progress
    assert records(tmp_path) == after
    folder = next((tmp_path / "gpu").iterdir())
    assert {"table.md", "setting.json", "step_cost_full.svg"} <= {file.name for file in folder.iterdir()}
    assert not (tmp_path / "published").exists()
    assert not (tmp_path / "runs").exists()
