"""Commands that measure something other than a suite: what a step costs, and how private it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpopt.cli.console import ERR, OUT, report_problems

if TYPE_CHECKING:
    from pandas import DataFrame

    from dpopt.results.figures import Plot
    from dpopt.store import Store


def bench(overrides: Sequence[str]) -> None:
    """Time engines and optimizers side by side; prints the tables and stores them with the record and a bar chart."""
    from dpopt.bench import run as benchmark
    from dpopt.results import figures, speed
    from dpopt.store import Store

    chosen = benchmark.settings(overrides)
    plots = [plot for plot in figures.plots(chosen.plots) if plot.needs == "speed"]
    store = Store(chosen.results)
    store.check_writable()  # before minutes of timing whose record nobody could keep
    record = benchmark.bench(chosen, ERR)
    _keep(store, store.add("bench", record), speed.markdown(record), plots, speed.frame(record))


def audit(overrides: Sequence[str]) -> int:
    """Bound the epsilon that optimizers really spend from below, and that of mechanisms broken on purpose."""
    from dpopt.audit import command as auditing
    from dpopt.results import audits, figures
    from dpopt.store import Store

    chosen = auditing.settings(overrides)
    plots = [plot for plot in figures.plots(chosen.suite.plots) if plot.needs == "audit"]
    store = Store(chosen.suite.results)
    store.check_writable()
    record = auditing.run(chosen, ERR)
    rows = audits.frame(record)
    drawn = plots if any(rows["failure"] == "") else []
    _keep(store, store.add("audit", record), audits.markdown(record), drawn, rows)
    problems = audits.problems(rows)
    report_problems(problems)
    return 1 if problems else 0


def _keep(store: Store, folder: Path, text: str, plots: list[Plot], frame: DataFrame) -> None:
    from dpopt.results import figures

    store.write(folder / "table.md", text)
    for plot in plots:
        for kind, content in figures.render(plot.figure(frame)).items():
            store.write(folder / f"{plot.name}.{kind}", content)
    OUT.print(text)
    OUT.print(f"written to {folder}/")
