"""A new optimizer is one Python file and one YAML file; everything else finds it by itself."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = '''"""Sign descent on the private gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dpopt.fields import Positive
from dpopt.optimizers.base import Direction
from dpopt.types import Release, Vector


class State(NamedTuple):
    """theta_t."""

    theta: Vector


@dataclass(frozen=True)
class DPSign(Direction):
    """theta_{t+1} = theta_t - lr sign(g_t)."""

    lr: Positive = 0.01

    def init(self, theta: Vector) -> State:
        return State(theta)

    def direction(self, state: State, gradient: Release) -> tuple[Vector, State]:
        return gradient.value.sign(), state
'''
YAML = """target: dpopt.optimizers.dp_sign:DPSign
summary: sign of the private gradient
reference: this test
family: sgd
grid: {lr: [0.003, 0.01]}
"""


@pytest.fixture
def scratch(tmp_path):
    for name in ("dpopt", "benchmarks", "plots", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "out"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "dpopt" / "optimizers" / "dp_sign.py").write_text(PYTHON)
    (tmp_path / "dpopt" / "conf" / "optimizer" / "dp_sign.yaml").write_text(YAML)
    return tmp_path


def run(scratch, *arguments):
    """Run Python in the scratch tree; `-m` puts that tree before any installed dpopt."""
    done = subprocess.run([sys.executable, *arguments], cwd=scratch, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_one_python_file_and_one_yaml_file(scratch):
    assert "dp_sign" in run(scratch, "-m", "dpopt", "list")
    suite = ["suite=quickstart", "optimizers=[dp_sign,adadp]", "seeds=0", "epsilon=3", "epochs=2", "accountant=rdp"]
    printed = run(scratch, "-m", "dpopt", "run", *suite, "engine=inline")
    assert "3 cells run, 0 were done, 0 failed" in printed
    assert "dp_sign" in run(scratch, "-m", "dpopt", "table", "suite=quickstart")
    covered = ["tests/conformance", "tests/test_registry.py", "tests/test_layers.py", "tests/test_training.py"]
    tested = run(scratch, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", "dp_sign", *covered)
    for part in ("is_pure", "replays_bit_for_bit", "hyfreedp-over-dp_sign", "import_no_data", "trains_a_model"):
        assert any(part in line and "dp_sign" in line and "PASSED" in line for line in tested.splitlines()), part
