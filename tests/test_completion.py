"""What a shell is offered on Tab, and that help texts name the keys that commands take."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpopt.cli import COMMANDS, main
from dpopt.cli.completion import offers

ROOT = Path(__file__).parents[1]
MADE_UP = "no_such_key=1"
TAKEN_OFF = {"plan": {"timed_draws"}}
"""Keys that a command takes before it reads the others."""


def offered(line):
    """What may follow `line`, without the program's name; its last word is the one that is begun."""
    command, *before, prefix = line.split(" ")
    return [word for word in offers(prefix, before, COMMANDS[command]) if word.startswith(prefix)]


@pytest.fixture(autouse=True)
def _in_the_source_tree(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run suite=quicks", ["suite=quickstart"]),
        ("run suite=quickstart optim", ["optimizers="]),
        ("run diagnostics=", ["diagnostics=true", "diagnostics=false"]),
        ("run suite=quickstart optimizers=hyfreedp_n", ["optimizers=hyfreedp_noise_aware"]),
        ("run suite=quickstart optimizers=[fiber,dp_adamb", [f"optimizers=[fiber,dp_adambc{end}" for end in ",]"]),
        ("run suite=quickstart optimizers=[fiber,fib", []),
        ("table compare=", ["compare=published"]),
        ("plot figure=average_", ["figure=average_ranks"]),
        ("plot plots=tests figure=test_complet", ["figure=test_completion"]),
        ("audit controls=f", ["controls=false"]),
        ("new op", ["optimizer"]),
        ("new optimizer su", []),
    ],
)
def test_offers(line, words):
    assert offered(line) == words


@pytest.mark.parametrize("name", [name for name in COMMANDS if not COMMANDS[name].words])
def test_help_names_the_keys_that_a_command_takes(name, capsys):
    """Against the error for a key that there is not, which lists those that there are."""
    command = COMMANDS[name]
    named = command.values().keys() - TAKEN_OFF.get(name, set())
    suite = ["suite=quickstart"] if "suite" in named else []
    assert all(f"{key}=" in command.help or f"{key}:" in command.help for key in named)
    assert main([name, *suite, MADE_UP]) == 2
    known = re.search(r"known: (.*)", " ".join(capsys.readouterr().err.split()))[1].split(", ")
    assert named - {"suite"} == {key.partition("=")[0] for key in known} - {"suite"}


def test_bash_completes():
    script = """
    eval "$(register-python-argcomplete dpopt)"
    COMP_LINE="dpopt run suite=quicks"; COMP_POINT=${#COMP_LINE}
    _python_argcomplete dpopt
    echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.stdout.split() == ["quickstart"], "bash takes what follows = for a word"


def test_completing_imports_nothing_that_takes_seconds():
    code = "import sys, os; sys.argv = ['dpopt']; os._exit = lambda code: None; from dpopt.cli import main\n"
    code += "try: main([])\nexcept SystemExit: pass\nprint([*{'hydra', 'omegaconf', 'torch'} & {*sys.modules}])"
    line = "dpopt run eng"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": os.devnull}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
