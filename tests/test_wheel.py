"""The installed package does what the documentation says, in an empty folder, up to a newcomer's first hour."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from dpopt._extras import EXTRAS

TREE = Path(__file__).parents[1]

SUITE = """\
defaults: [suite, _self_]
description: two data sets of one's own, a method of one's own beside two others
workloads:
  - {name: table, data: loans, validation: 40}
  - {name: images, data: flowers, architecture: test_vit, size: 32, validation: 10}
optimizers: [mine, adadp_equilibrium, dp_sgd]
settings:
  mine: {name: sign_descent, tuning: fixed}
  dp_sgd: {grid: {lr: [0.3, 1]}}
batch_size: 20
epochs: 2
epsilon: 3
seeds: [0, 1]
"""
SHOW = """
from pathlib import Path
import dpopt
from dpopt.cli import main
from dpopt.results import figures

print(dpopt.__file__, [plot.name for plot in figures.plots(Path("plots"))])
assert main(["plan", "suite=mine", "optimizers=[adadp]"]) == 0
"""


class Installed:
    """dpopt as `pip install` brings it: its wheel in an environment with nothing of the source tree, and no extra."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "env" / "bin" / "python"
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=TREE, check=True, timeout=120
        )
        venv.create(folder / "env", symlinks=True)
        required = folder / "required" / "site-packages"  # by this name packages know what is installed
        required.mkdir(parents=True)
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if path.name not in EXTRAS and not path.name.startswith(("dpopt", "_dpopt", "__editable__")):
                (required / path.name).symlink_to(path)
        (next(folder.glob("env/lib/*/site-packages")) / "required.pth").write_text(str(required))
        wheel = next(folder.glob("*.whl"))
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-deps", "--no-index"]
        subprocess.run([*pip, wheel], check=True, timeout=120)

    def run(self, *arguments: str, where: Path, code: int = 0, **environment: str) -> str:
        """What `dpopt ARGUMENTS` prints in a folder; it has to end with `code`."""
        return self.execute("-m", "dpopt", *arguments, where=where, code=code, **environment)

    def execute(self, *arguments: str, where: Path, code: int = 0, **environment: str) -> str:
        """What Python with these arguments prints in a folder; it has to end with `code`."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "DPOPT_DATA", "COLUMNS")}
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=where,
            env={**kept, "COLUMNS": "200", **environment},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_files_of_ones_own_stand_beside_those_that_come_with_it(installed, tmp_path):
    """A figure and a suite, which may begin with another; nothing of the package is the source tree."""
    for folder in ("plots", "benchmarks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "plots/mine.py").write_text("NEEDS = 'comparison'\ndraw = print\n")
    (tmp_path / "benchmarks/mine.yaml").write_text("defaults: [quickstart, _self_]\nseeds: 0\nepsilon: 3\n")
    printed = " ".join(installed.execute("-c", SHOW, where=tmp_path).split())
    for part in ("site-packages", "'mine'", "'accuracy_vs_epsilon'", "1 distinct cells of suite mine"):
        assert part in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "extra"), [("whole_field", "parameter-free"), ("e2e_gpt2_random", "text"), ("sst2_lora", "text")]
)
def test_a_suite_that_needs_an_extra_says_so_before_any_work(installed, tmp_path, suite, extra):
    printed = installed.run("run", f"suite={suite}", where=tmp_path, code=2)
    assert f"pip install 'dpopt[{extra}]'" in " ".join(printed.split())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the newcomer stands; the tests below follow each other there."""
    return tmp_path_factory.mktemp("place")


@pytest.mark.slow
def test_quickstart(installed, place):
    for command in ("run", "table", "plot", "report"):
        installed.run(command, "suite=quickstart", *(["seeds=0"] if command == "run" else []), where=place)
    assert "quickstart" in installed.run("list", "what=suites", where=place)
    assert "prodigy" in installed.run("list", where=place)
    drawn = {path.name for path in (place / "plots/out/quickstart").iterdir()}
    assert {"accuracy_vs_epsilon.svg", "accuracy_over_draws.svg"} <= drawn
    assert (place / "results/suites/quickstart/report.html").stat().st_size > 50_000


@pytest.mark.slow
def test_ones_own_data(installed, place):
    generator = np.random.default_rng(0)
    rows = [f"{generator.integers(18, 100)},{generator.choice(['none', 'office'])},{i % 2}" for i in range(300)]
    (place / "loans.csv").write_text("\n".join(["age,job,repaid", *rows]))
    for i in range(60):
        folder = place / "photos" / ("rose" if i % 2 else "tulip")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (40, 36, 3), np.uint8)).save(folder / f"{i}.png")
    state = ("ranges.age=[18,100]", "values.job=[none,office]")
    installed.run("new", "data", "loans", "from=loans.csv", "target=repaid", *state, where=place)
    installed.run("new", "data", "flowers", "from=photos", "size=32", where=place)
    listed = installed.run("list", "what=data", where=place)
    assert "loans" in listed
    assert "flowers" in listed


@pytest.mark.slow
def test_ones_own_optimizer(installed, place):
    installed.run("new", "optimizer", "sign_descent", where=place)
    pip = [sys.executable, "-m", "pip", "--python", str(installed.python), "install", "-q", "--no-deps"]
    package = place / "dpopt-sign-descent"
    (written,) = package.rglob("sign_descent.py")
    written.write_text(re.sub(r" +raise ConfigError.*\n", "", written.read_text()))  # the template's refusal
    subprocess.run([*pip, "--no-build-isolation", str(package)], check=True, timeout=300)
    tested = installed.execute("-m", "pytest", "-v", str(package), where=place).splitlines()
    assert any("replays_bit_for_bit" in line and "PASSED" in line for line in tested)
    (row,) = [line for line in installed.run("list", "what=optimizers", where=place).splitlines() if "sign_d" in line]
    assert "lr: " in row, "the YAML file is in the wheel"


@pytest.mark.slow
def test_a_suite_of_all_that(installed, place):
    (place / "benchmarks").mkdir()
    (place / "benchmarks/all_mine.yaml").write_text(SUITE)
    installed.run("run", "suite=all_mine", where=place)
    installed.run("table", "suite=all_mine", "scores=auc", where=place)
    table = pd.read_csv(place / "results/suites/all_mine/table.csv")
    assert set(table["label"]) == {"mine", "adadp_equilibrium", "dp_sgd"}
    assert table["workload"].nunique() == 2
    assert "auc" in " ".join(table)
    installed.run("rank", "suite=all_mine", where=place)
    installed.run("plot", "suite=all_mine", where=place)
    installed.run("report", "suite=all_mine", where=place)
    assert "mine" in (place / "results/suites/all_mine/report.html").read_text()
    assert "0 mismatches" in installed.run("verify", where=place)
