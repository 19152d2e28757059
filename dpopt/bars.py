"""One bar for all that takes time: on a terminal, in a notebook (with ipywidgets or without), elsewhere as lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from dpopt.markup import line

_T = TypeVar("_T")
_LINES = 20  # about as many are printed of a phase where there is neither a terminal nor a notebook
_PAUSE = 0.2  # seconds between two changes of a bar, but for a new phase and the end of one
Show = Callable[..., None]
listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
"""Is told, in place of a bar, how far `watched` steps are: in a worker, whose bar is its supervisor's."""
has_spoken = False
"""True once something was shown or printed."""


@contextmanager
def bar(console: Console | None, is_shown: bool = True, has_lines: bool = False, **options: Any) -> Iterator[Show]:
    """Within it, `show(phase, done, total, detail)` shows a phase and how far it is; all is gone at the end.

    Without a console nothing is shown. With `has_lines` a line is printed now and then where there is no terminal and
    no notebook; `options` are of rich's `Progress`.
    """
    is_shown, console = is_shown and console is not None, console or Console(stderr=True)
    described = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (SpinnerColumn(), described, BarColumn(20), TimeElapsedColumn(), TimeRemainingColumn())
    is_drawn = is_shown and console.is_terminal
    html: Any = None
    handle: Any = None
    if is_shown and console.is_jupyter:  # rich would need ipywidgets
        from IPython.display import HTML, display  # type: ignore[import-not-found]

        html, handle = HTML, display(HTML(""), display_id=True)
    phase, began, changed, printed = "", time.monotonic(), 0.0, 0
    with Progress(*columns, console=console, disable=not is_drawn, transient=True, **options) as drawn:
        task = drawn.add_task("", total=None)

        def show(text: str, done: int = 0, total: int | None = None, detail: str = "") -> None:
            global has_spoken
            has_spoken |= is_shown
            nonlocal phase, began, changed, printed
            now, is_new = time.monotonic(), text != phase
            if is_new:
                drawn.reset(task, total=total)
                phase, began, printed = text, now, 0
            elif done != total and now < changed + _PAUSE:
                return
            count = f" {done:,} of {total:,}" if total and (done or has_lines) else ""
            shown, changed = line(f"{text}{count}{detail and f', {detail}'}"), now
            drawn.update(task, completed=done, total=total, description=shown, refresh=True)
            if handle:
                value = f' value="{done}" max="{total}"' if total else ""
                handle.update(html(f"<progress{value}></progress> {escape(shown)}, {now - began:.0f} s"))
            elif is_shown and has_lines and not is_drawn and (is_new or (total and done * _LINES // total > printed)):
                printed = done * _LINES // total if total else 0
                console.print(shown)

        try:
            yield show
        finally:
            if handle:
                handle.update(html(""))


def watched(steps: Iterable[_T], total: int, what: str, each: int = 1, has_lines: bool = False) -> Iterator[_T]:
    """The `steps`, of `each` things and of `total` in all, with a bar where somebody watches; see `bar`, `listener`."""
    last, tell = time.monotonic(), listener.get()
    with bar(None if tell else Console(stderr=True), has_lines=has_lines) as show:
        show(what, 0, total)
        for number, step in enumerate(steps, 1):
            done = min(number * each, total)
            if tell and time.monotonic() > last + 1:
                tell(f"{what} {done:,} of {total:,}")
                last = time.monotonic()
            show(what, done, total)
            yield step
