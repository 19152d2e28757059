"""What `torch_optim` imports is installed; what lies in the current folder is not run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpopt.errors import ConfigError
from dpopt.optimizers import _installed
from dpopt.optimizers.torch_optim import TorchOptim

MARK = """
from pathlib import Path
Path("was_here").write_text("run")
"""
EVIL = f"""{MARK}
import torch
class X(torch.optim.SGD):
    pass
"""
SUITE = """
defaults: [suite, _self_]
workloads: [synthetic_logreg]
optimizers: [mine]
settings: {{mine: {{name: torch_optim, tuning: fixed, fields: {{optimizer: {path}}}}}}}
epsilon: [2]
accountant: rdp
"""
ROOT = Path(__file__).parents[2]


def python(folder, *arguments):
    """Run Python in `folder`, which is the first place where it looks for modules."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def write(path, text=EVIL):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_suite_runs_nothing_of_the_results_beside_it(tmp_path):
    """Such as a file that came with a measurement of someone else."""
    write(tmp_path / "results" / "bench" / "ab12" / "evil.py", MARK)
    write(tmp_path / "suite_of_mine.yaml", SUITE.format(path="results.bench.ab12.evil.X"))
    said = python(tmp_path, "-m", "dpopt", "plan", "suite=suite_of_mine.yaml")
    assert said.returncode == 2
    assert "TorchOptim.optimizer: 'results.bench.ab12.evil.X'" in " ".join(said.stderr.split())
    assert "is not installed" in " ".join(said.stderr.split())
    assert "Traceback" not in said.stderr
    assert not (tmp_path / "was_here").exists()
    assert python(tmp_path, "-c", "import results.bench.ab12.evil").returncode == 0
    assert (tmp_path / "was_here").exists(), "Python itself would have run it"


def test_nothing_is_imported_from_the_current_folder(tmp_path, monkeypatch):
    """Nor in place of an installed package."""
    write(tmp_path / "schedulefree" / "__init__.py")
    for module in [module for module in sys.modules if module.partition(".")[0] == "schedulefree"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with pytest.raises(ConfigError, match="is not installed"):
        TorchOptim("schedulefree.X")
    assert not (tmp_path / "was_here").exists()
    assert "schedulefree" not in sys.modules


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project that is installed editably, with a package, and a results folder beside it."""
    known = tmp_path / "site-packages" / "my_project-1.dist-info"
    write(known / "METADATA", "Metadata-Version: 2.1\nName: my-project\nVersion: 1\n")
    origin = {"url": (tmp_path / "my project").as_uri(), "dir_info": {"editable": True}}
    write(known / "direct_url.json", json.dumps(origin))
    write(tmp_path / "site-packages" / "plain_one.py")
    write(tmp_path / "my project" / "my_package" / "__init__.py")
    write(tmp_path / "my project" / "results" / "bench" / "evil.py")
    monkeypatch.setattr(_installed.site, "getsitepackages", lambda: [str(tmp_path / "site-packages")])
    monkeypatch.setattr(_installed.site, "ENABLE_USER_SITE", False)
    for folder in ("my project", "site-packages"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.chdir(tmp_path / "my project")
    return tmp_path


@pytest.mark.parametrize("lists", [None, "my_package\n"])
def test_installed_is_what_lies_in_site_packages_or_is_an_editable_projects_own(project, lists):
    if lists:
        write(project / "site-packages" / "my_project-1.dist-info" / "top_level.txt", lists)
    else:
        (project / "my project" / "my_package").rename(project / "my project" / "my_project")
    _installed.require("plain_one")
    _installed.require("my_package" if lists else "my_project")
    with pytest.raises(ImportError, match="results is not installed"):
        _installed.require("results.bench.evil")
    assert not (project / "my project" / "was_here").exists(), "nothing was imported to find out"


def test_what_the_program_has_imported_is_at_hand(project, monkeypatch):
    write(project / "my project" / "own.py")
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises(ConfigError, match=r"own\.py is not installed"):
        TorchOptim("own.X")
    import own  # type: ignore[import-not-found]

    assert isinstance(TorchOptim("own.X").wrap(torch.ones(2)), own.X)
    monkeypatch.delitem(sys.modules, own.__name__)


@pytest.mark.parametrize("path", ["Adam", "", "torch.optim.", "no_such_package.Adam", "torch.nn.Linear", "os.system"])
def test_what_is_no_path_of_an_optimizer_is_one_clear_error(path):
    with pytest.raises(ConfigError, match=r"TorchOptim\.optimizer"):
        TorchOptim(path)
