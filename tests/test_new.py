"""`dpopt new` writes what works, in a copy of the source tree and as a package; but for a template without a rule."""

import errno
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module, reload
from pathlib import Path

import pytest
import yaml

import dpopt
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.privacy import calibrate
from dpopt.suites.suite import load_suite

ROOT = Path(__file__).parents[1]


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def run(folder, *arguments, **environment):
    """Run Python in `folder`; `-m` puts it before any installed dpopt."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A source tree without anything in it, the current folder inside it."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "dpopt" / "conf" / "optimizer").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "dpopt")
    return tmp_path


def written(path):
    """Write a rule into a template, as its error asks for."""
    path.write_text(re.sub(r" +raise ConfigError.*\n", "", path.read_text()))


def test_what_is_written_passes_the_checks_once_it_has_a_rule(folder, monkeypatch):
    """The two files that a source tree gets, in this process: the class, made of its entry, does what all must do."""
    assert main(["new", "optimizer", "dp_smooth"]) == 0
    monkeypatch.syspath_prepend(folder / "dpopt-dp-smooth")
    template = import_module("dpopt_dp_smooth.dp_smooth")
    with pytest.raises(ConfigError, match="write your rule"):
        calibrate(template.DPSmooth(), rate=0.1, draws=3, dimension=2, epsilon=1.0, delta=1e-5, accountant="rdp")
    written(folder / "dpopt-dp-smooth" / "dpopt_dp_smooth" / "dp_smooth.py")
    optimizer = reload(template).DPSmooth(lr=0.1)
    rules = {check.name: check for check in dpopt.testing.checks(optimizer)}
    for name in ("survives_yaml", "imports_no_data", "is_pure", "replays_bit_for_bit", "bounds_one_record"):
        rules[name]()


@pytest.mark.slow
def test_in_the_source_tree_it_is_two_files_that_the_tests_find(tmp_path):
    for name in ("dpopt", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    before = files(tmp_path)
    printed = run(tmp_path, "-B", "-m", "dpopt", "new", "optimizer", "dp_smooth")
    assert files(tmp_path) - before == {"dpopt/optimizers/dp_smooth.py", "dpopt/conf/optimizer/dp_smooth.yaml"}
    written(tmp_path / "dpopt" / "optimizers" / "dp_smooth.py")
    (step,) = [line.split()[1:] for line in printed.splitlines() if line.strip().startswith("python -m pytest")]
    tested = run(tmp_path, *step, "-v", "-p", "no:cacheprovider").splitlines()
    for part in ("is_pure", "replays_bit_for_bit", "equals_its_declared_limits", "bounds_one_record"):
        assert any(part in line and "dp_smooth" in line and "PASSED" in line for line in tested), part


def test_a_plug_in_names_what_it_is(folder, capsys):
    assert main(["new", "optimizer", "smooth2"]) == 0
    printed = capsys.readouterr().out
    root = folder / "dpopt-smooth2"
    inside = {"__init__.py", "smooth2.py", "smooth2.yaml"}
    assert files(root) == {"pyproject.toml", "tests/test_smooth2.py"} | {f"dpopt_smooth2/{name}" for name in inside}
    assert all(name in printed for name in files(root))
    content = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert content["entry-points"] == {"dpopt.optimizers": {"smooth2": "dpopt_smooth2.smooth2:Smooth2"}}
    assert content["dependencies"] == [f"dpopt>={dpopt.__version__}", "torch"]
    assert not any("$" in path.read_text() for path in root.rglob("*.*") if path.is_file())


SIGN = """import torch
from dataclasses import dataclass
from typing import Any, NamedTuple
from dpopt.optimizers.base import Direction

class State(NamedTuple):
    theta: Any

@dataclass(frozen=True)
class SignDescent(Direction):
    lr: float = 0.01

    def init(self, theta):
        return State(theta)

    def direction(self, state, gradient):
        return torch.sign(gradient.value), state
"""


def test_a_file_of_ones_own_becomes_the_package(folder, monkeypatch, capsys):
    Path("mine.py").write_text(SIGN)
    assert main(["new", "optimizer", "sign_steps", "from=mine.py"]) == 0
    root = folder / "dpopt-sign-steps"
    assert (root / "dpopt_sign_steps" / "sign_steps.py").read_text() == SIGN
    entry = yaml.safe_load((root / "dpopt_sign_steps" / "sign_steps.yaml").read_text())
    assert entry["target"] == "dpopt_sign_steps.sign_steps:SignDescent"
    assert entry["grid"] == {"lr": [0.001, 0.003, 0.01, 0.03, 0.1]}
    assert "limits" not in entry
    assert "SignDescent()" in (root / "tests" / "test_sign_steps.py").read_text()
    monkeypatch.syspath_prepend(root)
    optimizer = import_module("dpopt_sign_steps.sign_steps").SignDescent()
    next(check for check in dpopt.testing.checks(optimizer) if check.name == "replays_bit_for_bit")()


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1\n", "expected one class"), ("class A(:\n", "cannot be read"), (None, "cannot be read")],
)
def test_a_file_without_a_rule_is_refused(text, message, folder, capsys):
    if text:
        Path("mine.py").write_text(text)
    assert main(["new", "optimizer", "mine", "from=mine.py"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (folder / "dpopt-mine").exists()


def test_a_suite_can_be_planned_at_once(folder, capsys):
    assert main(["new", "suite", "mine"]) == 0
    assert files(folder) == {"benchmarks/mine.yaml"}
    suite = load_suite("mine", ["seeds=0"])
    assert suite.optimizers == ("dp_adam", "fiber", "hyfreedp")
    assert main(["plan", "suite=mine", f"results={folder}", "optimizers=hyfreedp", "accountant=rdp"]) == 0
    assert "9 distinct cells of suite mine" in capsys.readouterr().out


def test_the_source_tree_is_found_from_within(tree):
    assert main(["new", "suite", "mine"]) == 0
    assert main(["new", "optimizer", "smooth"]) == 0
    assert files(tree) == {
        "pyproject.toml",
        "benchmarks/mine.yaml",
        "dpopt/conf/optimizer/smooth.yaml",
        "dpopt/optimizers/smooth.py",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer"], "expected a kind"),
        (["optimiser", "dp_sign"], "did you mean 'optimizer'"),
        (["optimizer", "DPSign"], "small letters"),
        (["optimizer", "../dp_sign"], "small letters"),
        (["optimizer", "lambda"], "small letters"),
        (["optimizer", "null"], "small letters"),
        (["optimizer", "all"], "small letters"),
        (["optimizer", "fiber"], "is registered"),
        (["optimizer", "direction"], "a class Direction would hide"),
        (["suite", "quickstart"], "quickstart.yaml is a suite of that name"),
    ],
)
def test_a_name_that_cannot_be_used_writes_nothing(arguments, message, folder, capsys):
    assert main(["new", *arguments]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.startswith("error: ")
    assert message in printed
    assert files(folder) == set()


def test_nothing_is_overwritten(tree, capsys):
    mine = tree / "dpopt" / "conf" / "optimizer" / "smooth.yaml"
    mine.write_text("mine")
    assert main(["new", "optimizer", "smooth"]) == 2
    assert "smooth.yaml exists" in capsys.readouterr().err
    assert files(tree) == {"pyproject.toml", "dpopt/conf/optimizer/smooth.yaml"}
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("arguments", [["optimizer", "smooth"], ["data", "mine", "from=mine.csv"]])
def test_where_nothing_can_be_written_is_one_error(arguments, folder, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("dpopt.files.write", refuse)
    assert main(["new", *arguments]) == 2
    assert "error: new: " in (said := capsys.readouterr().err)
    assert "cannot be written: Read-only file system" in said
    assert files(folder) == set()
