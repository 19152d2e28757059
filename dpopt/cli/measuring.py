"""Commands that measure something other than a suite: what a step costs, and how private it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dpopt.cli.console import ERR, OUT, report_problems

if TYPE_CHECKING:
    from pandas import DataFrame


def bench(overrides: Sequence[str]) -> None:
    """Time engines and optimizers side by side; prints the tables and stores them with the record and a bar chart."""
    from dpopt.bench import run as benchmark
    from dpopt.results import speed

    chosen = benchmark.settings(overrides)
    _measured("bench", "speed", speed, chosen.results, chosen.plots, lambda: benchmark.bench(chosen, ERR))


def audit(overrides: Sequence[str]) -> int:
    """Bound the epsilon that optimizers really spend from below, and that of mechanisms broken on purpose."""
    from dpopt.audit import command as auditing
    from dpopt.results import audits

    chosen = auditing.settings(overrides)
    suite = chosen.suite
    rows = _measured("audit", "audit", audits, suite.results, suite.plots, lambda: auditing.run(chosen, ERR))
    problems = audits.problems(rows)
    report_problems(problems)
    return 1 if problems else 0


def _measured(
    kind: str, needs: str, shown: ModuleType, results: Path, plots: Path, measure: Callable[[], dict[str, Any]]
) -> DataFrame:
    """Measure, and keep the record as a measurement of a `kind` with its table and the figures that need its frame."""
    from dpopt.results import figures
    from dpopt.store import Store

    chosen = [plot for plot in figures.plots(plots) if plot.needs == needs]
    store = Store(results)
    store.check_writable()  # before minutes of work whose record nobody could keep
    record = measure()
    folder, frame, text = store.add(kind, record), shown.frame(record), shown.markdown(record)
    store.write(folder / "table.md", text)
    for plot in chosen:
        drawn = plot.figure(frame)  # None where all that was measured has failed
        for end, content in figures.render(drawn).items() if drawn else ():
            store.write(folder / f"{plot.name}.{end}", content)
    OUT.print(text)
    OUT.print(f"written to {folder}/")
    return frame
