"""The `dpopt` command: each subcommand takes Hydra overrides such as `suite=quickstart seeds=[0,1]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from dpopt.cli.console import ERR, escape
from dpopt.cli.known import list_
from dpopt.cli.measuring import audit, bench
from dpopt.cli.privacy import calibrate, epsilon, recommend
from dpopt.cli.results import collect, plot, rank, report, status, table
from dpopt.cli.running import plan, retry, run
from dpopt.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 where cells failed, 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(prog="dpopt", description="Benchmark differentially private adaptive optimizers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=function.__doc__)
        command.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    chosen = parser.parse_args(arguments)
    try:
        return COMMANDS[chosen.command][0](chosen.overrides) or 0
    except ConfigError as error:
        ERR.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        return 2
    except OSError as error:
        ERR.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        ERR.print("interrupted; run the same command again to go on")
        return 130


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int | None], str]] = {
    "list": (list_, "optimizers, workloads, data sets and suites"),
    "plan": (plan, "a suite's cells by state, and what they cost"),
    "run": (run, "train what is not done of a suite"),
    "status": (status, "how far a suite is, and what failed"),
    "retry": (retry, "run failed cells again"),
    "collect": (collect, "a suite's records as Parquet"),
    "table": (table, "the comparison table"),
    "rank": (rank, "who is best with the same budget, and how sure that is"),
    "plot": (plot, "the figures, from stored results"),
    "report": (report, "tables and figures as one HTML page"),
    "bench": (bench, "what a private step costs"),
    "audit": (audit, "empirical lower bounds on epsilon"),
    "epsilon": (epsilon, "what a run spends"),
    "calibrate": (calibrate, "the noise for a target epsilon"),
    "recommend": (recommend, "a grid of C, B and eta to begin with"),
}
