"""The state machine of `dpopt gpu` on steps that are one-line scripts: order, budget, failures, going on."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dpopt.errors import ConfigError
from dpopt.gpu import session as sessions
from dpopt.gpu.session import Session, work
from dpopt.gpu.steps import Step

SETTING = {"device": "cuda Card", "key": "0"}
LONG = 3600.0


def step(name, script="", **fields):
    """A step that runs `script`, in which `rows` is the file for its rows and `row` appends one."""
    return Step(name, "none", {"script": script}, **{"limit": 60.0, **fields})


BEGIN = """
import json, sys
rows = open(sys.argv[1], "a")
def row(**row): print(json.dumps(row), file=rows, flush=True)
"""


def command(chosen, rows):
    return [sys.executable, "-c", BEGIN + chosen.arguments["script"], str(rows)]


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path / "card-0", SETTING, command)


def run(session, *steps, seconds=LONG, **options):
    return work(session, steps, time.monotonic() + seconds, **options)


def test_steps_are_done_in_their_order_and_once(session, tmp_path):
    log = tmp_path / "log"
    steps = [step(name, f"open({str(log)!r}, 'a').write({name!r}); row(found={name!r})") for name in "abc"]
    assert run(session, *steps).ran == dict.fromkeys("abc", "done")
    again = run(session, *steps)
    assert (again.ran, again.settled, again.waiting) == ({}, ["a", "b", "c"], [])
    assert log.read_text() == "abc"
    record = session.record(steps[1])
    assert (record["rows"], record["status"], record["reason"]) == ([{"found": "b"}], "done", "")
    assert record["setting"] == SETTING
    assert 0 < record["seconds"] < 60


def test_only_records_are_left_of_what_went_well(session):
    run(session, step("a", "row(found=1); print('chatter')"))
    assert [file.name for file in (session.folder / "steps").iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("row(found=1); raise ValueError('a mistake')", "exit code 1: ValueError: a mistake"),
        ("row(found=1); print('bye'); sys.exit(3)", "exit code 3: bye"),
        ("row(found=1); import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("row(found=1); import os; os.abort()", "killed by signal 6"),
    ],
)
def test_a_step_that_dies_keeps_its_rows_and_stops_no_other(session, script, reason):
    bad, good = step("bad", script), step("good")
    assert run(session, bad, good).ran == {"bad": "failed", "good": "done"}
    record = session.record(bad)
    assert record["reason"].startswith(reason)
    assert record["rows"] == [{"found": 1}]
    assert (session.folder / "steps" / "bad.log").exists()


def test_what_a_failed_step_said_last_is_kept(session):
    run(session, step("bad", "print(*range(100), sep='\\n'); sys.exit(1)"))
    lines = session.record(step("bad"))["reason"].splitlines()
    assert lines[0] == "exit code 1: 99"
    assert lines[1:] == [str(number) for number in range(100 - sessions.LINES, 100)]


def test_a_step_that_hangs_is_ended_with_all_that_it_has_started(session, tmp_path):
    script = f"""
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
row(found=1)
time.sleep(600)
"""
    hangs = step("hangs", script, limit=2.0)
    started = time.monotonic()
    assert run(session, hangs, step("next")).ran == {"hangs": "failed", "next": "done"}
    assert time.monotonic() - started < 30
    record = session.record(hangs)
    assert (record["reason"], record["rows"]) == ("it takes more than 2 seconds", [{"found": 1}])
    assert is_gone(int((tmp_path / "child").read_text()))


def is_gone(pid, seconds=20):
    """Whether a process ends within some seconds."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def test_failed_steps_are_begun_again_only_where_that_is_asked_for(session, tmp_path):
    mend = tmp_path / "mended"
    bad = step("bad", f"import os; sys.exit(not os.path.exists({str(mend)!r}))")
    assert run(session, bad).ran == {"bad": "failed"}
    mend.touch()
    assert run(session, bad).settled == ["bad"]
    assert run(session, bad, retry=True).ran == {"bad": "done"}
    assert run(session, bad, retry=True).settled == ["bad"]
    assert not (session.folder / "steps" / "bad.log").exists()


def test_a_step_that_cannot_end_in_time_is_not_begun(session):
    long, short = step("long", limit=100.0), step("short", limit=5.0)
    found = run(session, long, short, seconds=20)
    assert (found.ran, found.waiting) == ({"short": "done"}, ["long"])
    assert run(session, long, short, seconds=1000).ran == {"long": "done"}


def test_nothing_is_begun_once_the_time_is_up(session):
    assert run(session, step("a", limit=0.1), seconds=-1).waiting == ["a"]


def test_what_it_took_elsewhere_on_the_same_device_tells_whether_a_step_has_a_place(session, tmp_path):
    long = step("long", limit=100.0)
    other = dataclasses.replace(session, folder=tmp_path / "card-1", setting=SETTING | {"key": "1"})
    run(other, long)
    assert session.expected(long) < 5
    other_device = dataclasses.replace(session, setting=SETTING | {"device": "cuda Other"})
    assert other_device.expected(long) == 100
    assert run(session, long, seconds=20).ran == {"long": "done"}


def test_what_it_took_where_the_table_was_made_tells_it_too(session):
    assert session.expected(step("a", limit=100.0, usual=20.0)) == 20 * sessions.MARGIN
    assert session.expected(step("a", limit=25.0, usual=20.0)) == 25


def test_a_step_that_the_slice_cuts_off_is_begun_again_in_the_next(session):
    slow = step("slow", "import time; time.sleep(3)", limit=50.0, usual=0.1)
    assert run(session, slow, seconds=1.5).ran == {"slow": "cut"}
    assert session.record(slow)["reason"] == "the slice ended"
    assert run(session, slow, seconds=20).waiting == ["slow"]  # it has shown that it needs longer than usual
    assert run(session, slow, seconds=60).ran == {"slow": "done"}


RESUMES = """
import pathlib, signal, time
done = pathlib.Path({file!r})
def stop(number, frame): sys.exit(75)
signal.signal(signal.SIGINT, stop)
while done.stat().st_size < 12:
    time.sleep(0.25)
    with done.open("a") as file: file.write("x")
row(states=done.stat().st_size)
"""


def test_a_step_that_resumes_goes_on_in_the_next_slice(session, tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "GRACE", 5.0)
    file = tmp_path / "done"
    file.touch()
    suite = step("suite", RESUMES.format(file=str(file)), limit=5.5, resumes=True)
    assert run(session, suite, seconds=6).ran == {"suite": "cut"}
    assert 0 < file.stat().st_size < 12
    assert run(session, suite, seconds=5).waiting == ["suite"]
    assert run(session, suite, seconds=60).ran == {"suite": "done"}
    assert session.record(suite)["rows"] == [{"states": 12}]


def test_a_step_that_does_not_hear_that_the_slice_ends_is_ended(session, monkeypatch):
    monkeypatch.setattr(sessions, "GRACE", 1.0)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    started = time.monotonic()
    assert run(session, step("deaf", deaf, limit=1.0, resumes=True), seconds=3).ran == {"deaf": "cut"}
    assert time.monotonic() - started < 20


def test_a_row_that_was_cut_short_is_left_out(session):
    bad = step("bad", "row(found=1); rows.write('{\"found\": '); rows.flush(); sys.exit(1)")
    run(session, bad)
    assert session.record(bad)["rows"] == [{"found": 1}]


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00" * 100])
def test_a_record_that_cannot_be_read_is_made_again(session, content):
    a = step("a", "row(found=1)")
    run(session, a)
    (session.folder / "steps" / "a.json").write_text(content)
    assert run(session, a).ran == {"a": "done"}
    assert session.record(a)["rows"] == [{"found": 1}]


def test_two_sessions_never_work_in_one_folder(session):
    with session.alone(), pytest.raises(ConfigError, match="another `dpopt gpu`"), session.alone():
        pass
    with session.alone():
        assert json.loads((session.folder / "setting.json").read_text()) == SETTING


def test_progress_is_told(session, capsys):
    from rich.console import Console

    run(session, step("good"), step("bad", "sys.exit('why')"), console=Console(width=200))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1/2 good: done after ")
    assert lines[1].startswith("2/2 bad: failed after ")
    assert lines[1].endswith("exit code 1: why")


SESSION = """
import json, sys, time
from pathlib import Path
from dpopt.gpu.session import Session, work
from dpopt.gpu.steps import Step

folder, seconds = Path(sys.argv[1]), {"a": "0", "b": sys.argv[2], "c": "0"}
SCRIPT = '''
import os, sys, time
from dpopt.gpu.tether import end_with_input
end_with_input()
with open(sys.argv[2], "a") as log:
    print(sys.argv[1], os.getpid(), file=log)
time.sleep(float(sys.argv[3]))
'''
def command(step, rows):
    return [sys.executable, "-c", SCRIPT, step.name, str(folder / "log"), seconds[step.name]]
session = Session(folder / "card", {"device": "cuda Card", "key": "0"}, command)
with session.alone():
    found = work(session, [Step(name, "none", limit=1000) for name in "abc"], time.monotonic() + 3600)
print(json.dumps(found.ran))
"""


def test_a_session_that_is_killed_loses_the_step_in_flight_and_nothing_else(tmp_path):
    log = tmp_path / "log"
    first = subprocess.Popen([sys.executable, "-c", SESSION, str(tmp_path), "600"], start_new_session=True)
    limit = time.monotonic() + 120
    while not (log.exists() and "b " in log.read_text()):
        assert first.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    in_flight = int(log.read_text().split()[-1])
    assert is_gone(in_flight), "the step lives on"
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(tmp_path), "0"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"b": "done", "c": "done"}
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["a", "b", "b", "c"]
