"""The report of a session: one table of all steps, and tables and figures of what they measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tabulate import tabulate

from dpopt.gpu.session import Session
from dpopt.gpu.steps import Step
from dpopt.store import Store

Record = dict[str, Any]
SHORT = {"opacus_hooks": "hooks", "opacus_ghost": "ghost"}
WIDTH = 80
"""Characters of a reason that the table shows."""
REHEARSED = "A rehearsal at the smallest shapes: its numbers say nothing"
FOR_TABLES, FOR_FIGURES = ("pandas",), ("pandas", "matplotlib")


def summary(session: Session, steps: Sequence[Step], left_out: dict[str, str]) -> str:
    """One line for each step: what became of it, and what it found."""
    rows = []
    for step in steps:
        record = session.record(step)
        if record is None:
            rows.append({"step": step.name, "status": "left out" if step.name in left_out else "not yet", "s": ""})
        else:
            mark = "" if record["setting"]["key"] == session.setting["key"] else " *"
            status, seconds = f"{record['status']}{mark}", f"{record['seconds']:.0f}"
            rows.append({"step": step.name, "status": status, "s": seconds, "found": finding(record)})
    return tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True)


def finding(record: Record) -> str:
    """What a step found, or why it did not, in a line."""
    rows, reason = record["rows"], record["reason"].partition("\n")[0][:WIDTH]
    told = next(tell for key, tell in FINDINGS if key in rows[0])(rows) if rows else ""
    return "; ".join(filter(None, [reason, told]))


def _checks(rows: Sequence[Record]) -> str:
    failed = [f"{row['name']}: {row['check']}" for row in rows if row["status"] == "failed"]
    passed = sum(row["status"] == "passed" for row in rows)
    named = f"; failed: {', '.join(failed[:3])}" if failed else ""
    return f"{passed} of {len(rows)} checks passed{named}{' ...' if len(failed) > 3 else ''}"


def _times(rows: Sequence[Record]) -> str:
    others = [row for row in rows if row["contender"] != row["baseline"]]
    return ", ".join(f"{_short(row['contender'])} {_ratios(row)}" for row in others)


def _ratios(row: Record) -> str:
    if row["time_ratio"] is None:
        return "fails"
    memory = f" (memory {row['memory_ratio']:.2f})" if row["memory_ratio"] else ""
    return f"{row['time_ratio']:.2f}{memory}"


def _largest(rows: Sequence[Record]) -> str:
    return ", ".join(f"{_short(row['contender'])} {'fails' if row['batch'] is None else row['batch']}" for row in rows)


def _per_hour(rows: Sequence[Record]) -> str:
    numbers = [(row["contender"], row["cells_per_hour"]) for row in rows]
    return ", ".join(f"{name} {'fails' if number is None else f'{number:,.0f}/h'}" for name, number in numbers)


def _cells(rows: Sequence[Record]) -> str:
    row = rows[-1]
    done = row["states"].get("done", 0) + row["states"].get("diverged", 0)
    why = [f"{count} failed: {reason[:WIDTH]}" for reason, count in row["why"].items()]
    return "; ".join([f"{done} of {row['cells']} cells", *why])


FINDINGS: tuple[tuple[str, Callable[[Sequence[Record]], str]], ...] = (
    ("check", _checks),
    ("time_ratio", _times),
    ("batch", _largest),
    ("cells_per_hour", _per_hour),
    ("states", _cells),
)
"""A key that the rows of a kind of step have -> how they are told."""


def _short(name: str) -> str:
    return SHORT.get(name, name)


def write(session: Session, steps: Sequence[Step], left_out: dict[str, str], plots: Path) -> list[str]:
    """Write `table.md` and the figures into the session's folder; returns the packages that were missing for it."""
    records = [record for step in steps if (record := session.record(step))]
    store, folder = Store(session.folder), session.folder
    title = session.setting["device"] if "memory" in session.setting["hardware"] else REHEARSED
    parts = [f"# {title}", origin(session.setting), summary(session, steps, left_out)]
    parts += [*_differing(session, records), *_left_out(left_out)]
    missing = [package for package in FOR_FIGURES if find_spec(package) is None]
    if not set(FOR_TABLES) & set(missing):
        parts += tables(records)
    store.write(folder / "table.md", "\n\n".join(parts) + "\n")
    if not missing:
        for name, content in figures(records, plots):
            store.write(folder / f"{name}.svg", content)
    return missing


def origin(setting: Record) -> str:
    """Which device, versions and code, in one line."""
    hardware = setting["hardware"]
    parts = [f"torch {setting['torch']}", f"Python {setting['python']}"]
    parts += [f"{key} {hardware[key]}" for key in ("driver", "cuda", "cudnn", "capability") if hardware.get(key)]
    parts += [f"{hardware['memory'] / 2**30:.0f} GiB"] if "memory" in hardware else []
    parts += [f"{package} {setting['versions'][package]}" for package in ("opacus", "timm", "transformers")]
    return ", ".join([*parts, f"commit {setting['commit']}", f"code {setting['code']}"])


def _differing(session: Session, records: Iterable[Record]) -> list[str]:
    """What steps were measured with that another session made."""
    own = session.setting["key"]
    others = {record["step"]: record["setting"] for record in records if record["setting"]["key"] != own}
    return [f"\\* {step} was measured with {setting['device']}, {origin(setting)}." for step, setting in others.items()]


def _left_out(left_out: dict[str, str]) -> list[str]:
    return [f"Left out: {', '.join(left_out_line(left_out))}."] if left_out else []


def left_out_line(left_out: dict[str, str]) -> Iterator[str]:
    """The steps that are left out, by reason."""
    for reason in dict.fromkeys(left_out.values()):
        yield f"{', '.join(name for name, why in left_out.items() if why == reason)} ({reason})"


def tables(records: Sequence[Record]) -> list[str]:
    """What the steps measured, in full."""
    from dpopt.results import speed

    parts = []
    timed = _rows(records, "time_ratio")
    if timed:
        parts += [*speed.blocks({"rows": timed}), speed.NOTE]
    for key, title, columns in DETAILS:
        if rows := _rows(records, key):
            shown = [{name: row.get(column) for name, column in columns.items()} for row in rows]
            parts += [f"## {title}", tabulate(shown, headers="keys", tablefmt="pipe", floatfmt=".4g", missingval="")]
    for row in _rows(records, "states"):
        parts += [f"## Suite {row['suite']}: {_cells([row])}", *_made(row), row["table"].strip()]
    return parts


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


DETAILS = (
    ("batch", "The largest physical batch", _same("case", "contender", "batch", "seconds", "end", "failure")),
    (
        "cells_per_hour",
        "Cells per hour",
        _same("suite", "contender", "cells") | {"cells per hour": "cells_per_hour"} | _same("failure"),
    ),
    ("check", "Conformance", _same("kind", "name", "check", "status", "detail")),
)
"""A key of rows, a title, and column -> key for the tables that are not those of `dpopt bench`."""


def _made(row: Record) -> list[str]:
    return [f"Trained on {', '.join(f'{place} ({count})' for place, count in row['made'].items())}."]


def _rows(records: Iterable[Record], key: str) -> list[Record]:
    return [row for record in records for row in record["rows"] if key in row]


def figures(records: Sequence[Record], plots: Path) -> Iterator[tuple[str, bytes]]:
    """Name and SVG of each figure that there is something for."""
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.results import figures as drawing
    from dpopt.results import speed

    timed = _rows(records, "time_ratio")
    for plot in drawing.plots(plots) if timed and plots.is_dir() else ():
        for name, rows in speed.parts(speed.frame({"rows": timed})).items() if plot.needs == "speed" else ():
            yield f"{plot.name}_{name}", drawing.render(plot.figure(rows))["svg"]
