"""The `dpopt` command: each subcommand takes keys and their values, such as `suite=quickstart seeds=[0,1]`."""

from __future__ import annotations

import argparse
import gc
import os
import threading
from collections.abc import Sequence

from dpopt import __version__, bars
from dpopt.cli.completion import answer
from dpopt.cli.console import ERR, complain
from dpopt.cli.fitting import Fit, Predict
from dpopt.cli.keys import Command
from dpopt.cli.listing import List
from dpopt.cli.new import KINDS, new
from dpopt.cli.privacy import Calibrate, Epsilon
from dpopt.cli.results import Leaderboard, Plot, Publish, Rank, Report, Status, Table, Verify
from dpopt.cli.running import Cancel, PlanKeys, SuiteKeys, audit, bench, plan, retry, run
from dpopt.errors import ConfigError
from dpopt.files import Damaged
from dpopt.workloads.data_keys import DataKeys


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 where cells failed, 2 for input or files that cannot be used."""
    os.environ["MPLBACKEND"] = "Agg"  # figures go to files, and the machine may have no display
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        answer(parser, COMMANDS)
    chosen = parser.parse_args(arguments)
    name = chosen.command
    command = COMMANDS[name]
    # These train, and their garbage may hold large tensors; the others read thousands of records, which all stay.
    if command.run not in (run, retry, Fit, bench, audit):
        gc.set_threshold(1_000_000)
    if ERR.is_terminal:  # two seconds without a word are long
        reminder = threading.Timer(2.0, lambda: bars.has_spoken or ERR.print(f"dpopt {name}: at work ..."))
        reminder.daemon = True
        reminder.start()
    try:
        word = "" if not chosen.overrides or set("=~+") & set(chosen.overrides[0]) else chosen.overrides[0]
        if word and (named := next((key for key in ("suite", "what") if key in command.values()), "")):
            chosen.overrides[0] = f"{named}={word}"  # `dpopt run quickstart`
        keys = [override.partition("=")[0].lstrip("+") for override in chosen.overrides if "=" in override]
        if repeated := next((key for key in keys if keys.count(key) > 1), None):
            # one of the two values would not count
            raise ConfigError(repeated, list(chosen.overrides), "the key is given twice")
        return command(chosen.overrides, name)
    except (ConfigError, OSError) as error:
        complain("error", str(error))
        return 2
    except Damaged as error:
        complain("error", f"{error}; move the folder of this run away to run the cell again")
        return 2
    except KeyboardInterrupt:
        ERR.print("interrupted; run the same command again to go on")
        return 130


def _parser() -> argparse.ArgumentParser:
    listed = []
    for name, command in COMMANDS.items():
        listed += [f"\n{_HEADINGS[name]}:"] if name in _HEADINGS else []
        listed.append(f"  {name:<13}{command.text}")
    parser = argparse.ArgumentParser(
        prog="dpopt",
        description="Benchmark differentially private adaptive optimizers.",
        epilog="\n".join([*listed, "\n`dpopt COMMAND --help` shows the keys that a command takes."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dpopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help="one of those below")
    for name, command in COMMANDS.items():
        added = commands.add_parser(
            name,
            description=command.description,
            epilog=command.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("overrides", nargs="*", metavar=command.usage, help="keys and their values")
    return parser


_HEADINGS = {
    "list": "names and new files",
    "fit": "a model of your own",
    "plan": "run a suite",
    "table": "read its results",
    "publish": "publish and verify",
    "audit": "privacy and cost",
}
"""First command of a group -> what stands above the group."""
_OF_SUITE = "suite=NAME KEY=VALUE"
COMMANDS: dict[str, Command] = {
    "list": Command(List, "optimizers, workloads, data sets and suites"),
    "new": Command(
        new,
        "the files of a new optimizer, suite or data set",
        DataKeys,
        words=tuple(KINDS),
        usage="KIND NAME KEY=VALUE",
    ),
    "fit": Command(Fit, "a private model of a data file, a data set or a workload"),
    "predict": Command(Predict, "what such a model says of new records"),
    "plan": Command(plan, "a suite's cells by state, and their cost", PlanKeys, ("suite",), usage=_OF_SUITE),
    "run": Command(run, "train what is not done of a suite", SuiteKeys, ("suite",), usage=_OF_SUITE),
    "status": Command(Status, "how far a suite is, and what failed"),
    "cancel": Command(Cancel, "ask the processes that run a suite to stop"),
    "retry": Command(retry, "run failed cells again", SuiteKeys, ("suite",), usage=_OF_SUITE),
    "table": Command(Table, "the comparison table"),
    "rank": Command(Rank, "who is best with the same budget, and how sure that is"),
    "leaderboard": Command(Leaderboard, "ranks over the workloads of several suites"),
    "plot": Command(Plot, "the figures, from stored results"),
    "report": Command(Report, "tables and figures as one HTML page"),
    "publish": Command(Publish, "a suite's published folder, or whether those there are right"),
    "verify": Command(Verify, "compute every stored epsilon again, and check all files"),
    "audit": Command(audit, "empirical lower bounds on epsilon", files=("audit", "suite")),
    "epsilon": Command(Epsilon, "the epsilon of a run"),
    "calibrate": Command(Calibrate, "the noise for a target epsilon"),
    "bench": Command(bench, "the cost of a private step", files=("bench",)),
}
