"""The `dpopt` command: each subcommand takes Hydra overrides such as `suite=quickstart seeds=[0,1]`."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence

from dpopt import __version__
from dpopt.cli.command import Command
from dpopt.cli.completion import answer, completion
from dpopt.cli.console import ERR, complain
from dpopt.cli.fitting import fit
from dpopt.cli.known import list_
from dpopt.cli.measuring import audit, bench
from dpopt.cli.new import new
from dpopt.cli.privacy import calibrate, epsilon
from dpopt.cli.results import leaderboard, plot, rank, report, status, table
from dpopt.cli.running import cancel, plan, retry, run
from dpopt.cli.trust import collect, publish, seal, verify
from dpopt.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 where cells failed, 2 for input or files that cannot be used."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        answer(parser, COMMANDS)
    chosen = parser.parse_args(arguments)
    command = COMMANDS["plan" if getattr(chosen, "dry_run", False) else chosen.command]
    if command.function not in (run, retry, fit, bench, audit):  # these train, and their garbage may hold large tensors
        gc.set_threshold(100_000)  # importing torch and reading thousands of records makes much that lives, no garbage
    try:
        _refuse_repeated(chosen.overrides)
        return command.function(chosen.overrides) or 0
    except (ConfigError, OSError) as error:
        complain("error", str(error))
        return 2
    except KeyboardInterrupt:
        ERR.print("interrupted; run the same command again to go on")
        return 130
    except Exception as error:
        from dpopt.store import Damaged  # here, as it loads numpy, for which Tab would have to wait

        if not isinstance(error, Damaged):
            raise
        complain("error", f"{error}; move the folder of this run away to run the cell again")
        return 2


def _refuse_repeated(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for a key that is given twice: one of the two values would not count."""
    keys = [override.partition("=")[0].lstrip("+") for override in overrides if "=" in override]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(repeated, list(overrides), "the key is given twice")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpopt", description="Benchmark differentially private adaptive optimizers.")
    parser.add_argument("--version", action="version", version=f"dpopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.text,
            description=command.description,
            epilog=command.defaults,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument(
            "overrides", nargs="*", metavar=command.arguments, help="keys and their values, as Hydra reads them"
        )
        if name in ("run", "retry"):
            added.add_argument("--dry-run", action="store_true", help="train nothing: show what `dpopt plan` shows")
    return parser


SUITE, STORED = ("suite",), ("stored",)
OF_SUITE = "suite=NAME KEY=VALUE"

COMMANDS: dict[str, Command] = {
    "list": Command(list_, "optimizers, workloads, data sets and suites"),
    "fit": Command(fit, "a private model of a data file, a data set or a workload", ("fit",)),
    "plan": Command(plan, "a suite's cells by state, and what they cost", SUITE, OF_SUITE),
    "run": Command(run, "train what is not done of a suite", SUITE, OF_SUITE),
    "status": Command(status, "how far a suite is, and what failed", STORED),
    "cancel": Command(cancel, "ask the processes that run a suite to stop", STORED),
    "retry": Command(retry, "run failed cells again", SUITE, OF_SUITE),
    "collect": Command(collect, "a suite's records as Parquet, with checksums", STORED),
    "publish": Command(publish, "a suite's published folder, or whether those there are right"),
    "seal": Command(seal, "checksums of what is published"),
    "verify": Command(verify, "compute every stored epsilon again, and check all files"),
    "table": Command(table, "the comparison table", STORED),
    "rank": Command(rank, "who is best with the same budget, and how sure that is", STORED),
    "leaderboard": Command(leaderboard, "ranks over the workloads of several suites", STORED, "suite=[A,B] KEY=VALUE"),
    "plot": Command(plot, "the figures, from stored results", STORED),
    "report": Command(report, "tables and figures as one HTML page", STORED),
    "bench": Command(bench, "what a private step costs", ("bench",)),
    "audit": Command(audit, "empirical lower bounds on epsilon", ("audit", "suite")),
    "epsilon": Command(epsilon, "what a run spends", ("epsilon",)),
    "calibrate": Command(calibrate, "the noise for a target epsilon", ("calibrate",)),
    "new": Command(new, "the files of a new optimizer, suite or data set", arguments="optimizer|suite|data NAME"),
    "completion": Command(completion, "completion for bash, zsh or fish", arguments="bash|zsh|fish"),
}
