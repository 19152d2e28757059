"""An optimizer in a process of its own gives the same numbers, and gets at nothing but releases."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
from dataclasses import dataclass, field
from pathlib import Path

import attacks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wrong import CHEATS, PLAIN, Scaled

import dpopt
from dpopt import registry
from dpopt.errors import ConfigError
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import confinement, isolation
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.queries import Below
from dpopt.privacy.wire import TENSORS, Answer, Channel, IsolatedFailure, NotImportable
from dpopt.suites.suite import load_suite
from dpopt.testing.privacy import ends_the_same_when_isolated
from dpopt.testing.task import Task, require_same
from dpopt.types import ClipRule

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "isolation.md"


def run(optimizer):
    task = Task()
    oracle = task.oracle(task.plan(optimizer))
    return task.run(optimizer, oracle), oracle


def test_the_numbers_are_the_same_bit_for_bit():
    expected, oracle = run(dpopt.create("hyfreedp"))
    isolated = Isolated("hyfreedp")
    found, answering = run(isolated)
    require_same(found, expected, "isolation changes numbers")
    assert answering.ledger == oracle.ledger
    assert repr(isolated) == repr(dpopt.create("hyfreedp"))
    assert found.eta == expected.eta


AGAIN = ("again", "saved tensors", "profiler", "module hook")
"""Cheats that differ from others in how they would look at records, of which there are none in their process."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in AGAIN else []) for name in CHEATS]
)
def test_a_cheat_ends_in_an_error_or_where_it_would_have_without_a_look(name):
    cheat = CHEATS[name]
    try:
        found, _ = run(Isolated(cheat))
    except (IsolatedFailure, ConfigError):
        return
    # What it does where it sees nothing; in this process the graph is gone as well.
    blind = {"graph": cheat, "tap": Scaled()}.get(name, PLAIN)
    assert torch.equal(found.theta, run(blind)[0].theta)


@pytest.mark.parametrize("name", ["stack", "function mode", "unwrap", "scale twice", "peek"])
def test_conformance_finds_what_steals(name):
    """The wrong optimizers that look at records, whatever their way, end elsewhere where there are none: those of the
    test above do cheat."""
    with pytest.raises((AssertionError, ConfigError, dpopt.privacy.UnplannedRelease, TypeError)):
        ends_the_same_when_isolated(CHEATS[name])


def test_a_query_of_an_optimizer_that_dpopt_ships_is_answered():
    require_same(run(Isolated("dpzero"))[0], run(dpopt.create("dpzero"))[0], "isolation changes numbers")


@dataclass(frozen=True)
class HalfClip:
    """A rule of a plug-in: Abadi's with half of the bound."""

    bound: float = 2.0
    cache: list = field(default_factory=list, compare=False)

    @property
    def sensitivity(self):
        return self.bound / 2

    def factor(self, norm):
        return (self.sensitivity / norm).clamp(max=1)


@dataclass(frozen=True)
class Above(Below):
    """A query of a plug-in."""

    kind = "above"

    def contribution(self, record):
        return -super().contribution(record)


@dataclass(frozen=True)
class Plugged(DPSGD):
    """Honest, with a rule and a query of its own."""

    clip: ClipRule = HalfClip()
    noise_inflation: float = 1.1

    def step(self, state, oracle):
        with oracle.draw() as batch:
            gradient = batch.gradient(state.theta, self.clip)
            share = batch.ask(Above(1.0)).value[0]
        return state._replace(theta=state.theta - self.lr * share.to(gradient.value) * gradient.value)


def local_rule(name):
    @dataclass(frozen=True)
    class Local(HalfClip):
        pass

    Local.__qualname__ = name or Local.__qualname__
    return Local()


@dataclass(frozen=True)
class UsesALocalRule(DPSGD):
    def step(self, state, oracle):
        with oracle.draw() as batch:
            return state._replace(theta=batch.gradient(state.theta, local_rule("")).value)


@pytest.mark.parametrize("name", ["", "NotHere", "HalfClip"])
def test_a_rule_has_to_be_what_its_name_stands_for(name):
    ours, _theirs = socket.socketpair()
    with pytest.raises(NotImportable, match="another process can import"):
        Channel(ours, imports=True).send(clip=local_rule(name))


def test_queries_and_rules_of_a_plugin_are_compared_by_their_names():
    ends_the_same_when_isolated(Plugged())
    with pytest.raises(ConfigError, match="dpopt's queries and clip rules"):
        run(Isolated(Plugged()))

    @dataclass(frozen=True)
    class Local(DPSGD):
        pass

    with pytest.raises(unittest.SkipTest, match="sent to a process of its own"):
        ends_the_same_when_isolated(Local())
    with pytest.raises(unittest.SkipTest, match="another process can import"):
        ends_the_same_when_isolated(UsesALocalRule())


@dataclass(frozen=True)
class Dies(DPSGD):
    def step(self, state, oracle):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Talks(DPSGD):
    """Writes to the terminal, and dies with codes for it."""

    def step(self, state, oracle):
        for stream in (1, 2):
            os.write(stream, b"\x1b[2Jepsilon 0.01")
        print("\x1b[2Jepsilon 0.01", flush=True)
        raise ZeroDivisionError("\x1b[2Jepsilon 0.01")


def test_nothing_that_it_writes_reaches_the_terminal_as_it_is(capfd):
    with pytest.raises(IsolatedFailure, match=r"␛\[2Jepsilon 0\.01") as failure:
        run(Isolated(Talks()))
    assert "\x1b" not in str(failure.value)
    assert capfd.readouterr() == ("", "")


def test_what_goes_wrong_there_is_told_here():
    with pytest.raises(IsolatedFailure, match="has ended"):
        run(Isolated(Dies()))
    with pytest.raises(ConfigError, match="did you mean 'fiber'"):
        Isolated("fibre")
    with pytest.raises(ConfigError, match="cannot be sent"):
        Isolated(lambda: None)


PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
from dpopt.optimizers.dp_sgd import DPSGD
try:
    Path(__file__).with_name("written").touch()
except OSError:
    pass
@dataclass(frozen=True)
class Plugged(DPSGD):
    pass
"""


def test_code_of_an_isolated_plugin_runs_in_its_own_process_alone(tmp_path, monkeypatch):
    """A suite is planned, and its cell trained, in this process; neither imports it, nor does what is not confined."""
    (tmp_path / "unread.py").write_text(PLUGIN)
    (tmp_path / "unread_sgd.yaml").write_text("summary: unread\ngrid: {lr: [0.5]}\n")
    information = tmp_path / "unread-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: unread\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[dpopt.optimizers]\nunread_sgd = unread:Plugged\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.entries.cache_clear()
    try:
        content = {"workloads": ["synthetic_logreg"], "optimizers": ["unread_sgd"], "epsilon": 2, "batch_size": 800}
        suite = load_suite({"name": "unread", **content, "epochs": 1, "seeds": [0], "accountant": "rdp"}, isolate=True)
        assert [cell.optimizer["lr"] for cell in suite.cells()] == [0.5]  # of the file beside it
        assert dpopt.run_suite(suite, tmp_path / "results", engine="inline", progress=False).ran == 1
    finally:
        registry.entries.cache_clear()
    assert "unread" not in sys.modules
    if confinement.landlock_version():
        assert not (tmp_path / "written").exists()


def test_its_process_ends_with_it():
    isolated = Isolated("dp_sgd")
    channel = isolated._channel
    isolated.close()
    with pytest.raises((IsolatedFailure, ValueError)):
        channel.send(do="fetch")


# A child that sends what no honest one does.

POINT = {"$tensor": 0}
ABADI = {"$class": "abadi", "fields": {"bound": 1.0}}


def asked(**fields):
    return {"do": "ask", "query": {"$class": "gradient", "fields": {"at": POINT, "clip": ABADI, **fields}}}


def framed(text, *tensors):
    return len(text).to_bytes(8, "little") + text + b"".join(tensors)


HOSTILE = {
    "no class": {"do": "ask", "query": {"$class": [], "fields": {}}},
    "no query": {
        "do": "ask",
        "query": {"$class": "dpopt.optimizers.torch_optim:import_module", "fields": {"name": "os"}},
    },
    "not dpopt's": {"do": "ask", "query": {"$class": "os:getcwd", "fields": {}}},
    "bound that is no number": asked(clip={"$class": "abadi", "fields": {"bound": [1]}}),
    "huge number": {"do": "ask", "query": {"$class": "losses", "fields": {"at": [POINT], "bound": 10**400}}},
    "one tensor at two places": asked(at=[[1.0, POINT], [1.0, POINT]]),
    "places of no tensors": {"do": "done", "places": {"theta": -1}},
    "unknown wish": {"do": "eval"},
    "no JSON": framed(b"\xff\x00"),
    "deep": framed(b"[" * 100_000),
    "endless": (2**62).to_bytes(8, "little"),
    "negative shape": framed(b'[{}, [["float32", [-1, 75]]]]'),
    "huge shape": framed(b'[{}, [["float32", [1000000000000]]]]'),
    "too many tensors": framed(b"[{}, [%s]]" % b",".join([b'["float32", []]'] * (TENSORS + 1)), bytes(4 * TENSORS + 4)),
}


def played(*messages):
    """An isolated optimizer whose process answers with these messages, in order."""
    ours, theirs = socket.socketpair()

    def play():
        with theirs.dup() as kept:
            channel = Channel(theirs)
            for message in messages:
                if isinstance(message, bytes):
                    channel._file.write(message)
                    channel._file.flush()
                else:
                    channel.send(**message)
            kept.shutdown(socket.SHUT_WR)
            while kept.recv(2**16):
                pass  # as long as the other end is open, it can be written to

    threading.Thread(target=play, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "_connect", lambda: ours)
        return Isolated("dp_sgd")


def test_a_message_that_cannot_be_read_is_one_error():
    task = Task()
    plan = task.plan(PLAIN)
    for message in HOSTILE.values():
        optimizer = played({"text": "x"}, {"places": {"theta": 0}}, {"do": "draw"}, message)
        with pytest.raises(IsolatedFailure, match=r"cannot be read|has ended"):
            optimizer.step(optimizer.init(task.engine.theta), task.oracle(plan))


def test_a_state_that_is_none_is_one_error():
    long = torch.zeros(75, dtype=torch.float64)
    for leaves in ([], [torch.zeros(74)], [long], [torch.zeros(75)], [torch.zeros(75), "x"]):
        optimizer = played({"text": "x"}, {"places": {"theta": 0, "momentum": 1}}, {"leaves": leaves})
        with pytest.raises(IsolatedFailure):
            _ = optimizer.init(torch.zeros(75)).theta


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([*Answer.__annotations__]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$class", "$tensor", "fields", *Answer.__annotations__]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(body=JSON, head=JSON | st.lists(st.tuples(st.sampled_from(["float32", "bool", "x"]), JSON), max_size=2))
def test_whatever_is_sent_is_read_or_one_error(body, head):
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(framed(json.dumps([body, head]).encode()) + bytes(64))
        theirs.shutdown(socket.SHUT_WR)
        try:
            answer = Channel(ours).receive(TENSORS, 64, Answer)
        except IsolatedFailure:
            return
        assert type(answer) is Answer


def test_a_query_has_a_bounded_number_of_tensors():
    task = Task()
    theta = task.engine.theta
    ours, _theirs = socket.socketpair()
    with pytest.raises(ConfigError, match=f"may use {TENSORS} in a query"):
        Channel(ours).send(query=dpopt.privacy.queries.Losses([theta] * (TENSORS + 1), 1.0))


# The attacks of the page.


def table():
    """Attack -> outcome in each column of the page's table."""
    rows = [line.strip("| ").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in rows[1:]}


def outcomes(column):
    return {name for name, cells in table().items() if cells[column] == "possible"}


def test_the_table_holds_all_attacks():
    assert list(table()) == list(attacks.ATTACKS)
    assert {cell for cells in table().values() for cell in cells} == {"possible", "refused"}


@pytest.mark.skipif(confinement.landlock_version() < 6, reason="needs Linux 6.12, whose Landlock knows of signals")
def test_the_attacks_of_a_confined_optimizer_end_as_the_table_says():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        # as an import of autodp does; here it is the folder of all secrets
        patch.setattr(sys, "path", [*sys.path, ".."])
        assert set(attacks.succeeded()) == outcomes(0 if os.geteuid() == 0 else 2)


def as_other_user():
    """The options of `subprocess.run` for a user without rights, and an interpreter that this user may start."""
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    for python in (sys.executable, shutil.which("python3", path="/usr/bin")):
        version = [python, "-c", f"import sys; assert sys.version_info[:2] == {sys.version_info[:2]}"]
        try:
            if subprocess.run(version, **nobody, check=False).returncode == 0:
                return python, nobody
        except OSError:
            continue
    pytest.skip("no interpreter that another user may start")


@pytest.mark.slow
@pytest.mark.skipif(confinement.landlock_version() < 6, reason="needs Linux 6.12, whose Landlock knows of signals")
@pytest.mark.parametrize(("column", "is_root"), [(0, True), (1, True), (2, False), (3, False)])
def test_attacks_end_as_the_table_says(column, is_root, tmp_path):
    """In a folder that holds a module of the name of a library's: what lies there is not imported."""
    if os.geteuid():
        pytest.skip("needs root, which can be both")
    python, options = (sys.executable, {}) if is_root else as_other_user()
    (tmp_path / "torch.py").write_text("raise SystemExit('imported from the current folder')")
    tmp_path.chmod(0o755)
    script = Path(attacks.__file__)
    path = [str(PAGE.parents[2]), str(script.parent), *(entry for entry in sys.path if "site-packages" in entry)]
    environment = {"PYTHONPATH": os.pathsep.join(path), "PATH": "/usr/bin", "DPOPT_CACHE": "/nonexistent"}
    command = [python, str(script), *["--without-landlock"] * (column % 2)]
    done = subprocess.run(
        command, **options, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) == outcomes(column)


def test_a_system_without_landlock_is_said_once(monkeypatch, caplog):
    started = []

    class Started:
        def __init__(self, command, pass_fds, **options):
            started.append((command, options))
            self.descriptor = os.dup(pass_fds[0])

        poll = terminate = lambda self: None

    monkeypatch.setattr(isolation, "_nursery", None)
    monkeypatch.setattr(isolation, "landlock_version", lambda: 0)
    monkeypatch.setattr(isolation.subprocess, "Popen", Started)
    monkeypatch.setenv("A_SECRET", "x")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for _ in range(2):
        isolation._connect().close()
    assert [record.message for record in caplog.records] == [
        "isolate: without Landlock, the optimizer may open the files that this user may"
    ]
    (((_, options),)) = started
    assert options["start_new_session"]
    assert "A_SECRET" not in options["env"]
    assert options["env"]["OMP_NUM_THREADS"] == "1"
    os.close(isolation._nursery[2].descriptor)


def test_the_trainer_hides_its_memory_from_then_on():
    Isolated("dp_sgd").close()
    if confinement._LIBC:
        assert confinement._LIBC.prctl(3, 0, 0, 0, 0) == 0
    assert re.search("core dumps", PAGE.read_text())
