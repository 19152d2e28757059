"""The one bar: as lines, in a notebook without ipywidgets, and told to a supervisor by a worker."""

import io
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from dpopt import bars


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(bars, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook's cell has shown, in order: IPython without ipywidgets."""
    shown, module = [], ModuleType("IPython.display")
    module.HTML = str
    module.display = lambda text, display_id: SimpleNamespace(update=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # to import it fails
    return shown


def test_a_notebook_shows_one_bar_and_no_warning(notebook, clock):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with bars.bar(Console(force_jupyter=True)) as show:
            show("trying the <model>")
            for draw in range(1, 4):
                clock.seconds += 1
                show("training: draws", draw, 3)
    assert notebook == [
        "<progress></progress> trying the &lt;model&gt;, 0 s",
        '<progress value="1" max="3"></progress> training: draws 1 of 3, 0 s',
        '<progress value="2" max="3"></progress> training: draws 2 of 3, 1 s',
        '<progress value="3" max="3"></progress> training: draws 3 of 3, 2 s',
        "",  # it is gone at the end
    ]


def test_a_log_has_a_line_now_and_then(clock):
    log = io.StringIO()
    with bars.bar(Console(file=log, width=200), has_lines=True) as show:
        show("starting 2 workers")
        for done in range(1001):
            clock.seconds += 1
            show("cells", done, 1000, "fiber, ε = 1")
    start, *lines = log.getvalue().splitlines()
    assert start == "starting 2 workers"
    assert lines == [f"cells {done:,} of 1,000, fiber, ε = 1" for done in range(0, 1001, 50)]


def test_nothing_is_shown_where_nobody_asks(notebook):
    with bars.bar(Console(force_jupyter=True), is_shown=False) as show:
        show("training", 1, 2)
    assert notebook == []


def test_a_worker_tells_of_what_it_computes(clock, capfd):
    notes = []
    token = bars.listener.set(notes.append)
    for _ in bars.watched(range(4), 60_000, "computing features", each=16_000):
        clock.seconds += 0.6
    bars.listener.reset(token)
    assert notes == ["computing features 48,000 of 60,000"], "at most once in a second"
    assert capfd.readouterr() == ("", "")
