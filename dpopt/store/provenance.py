"""The origin of a number: code, versions, device. Not part of a cell's identity."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpopt._paths import source_tree

if TYPE_CHECKING:
    import torch

_PACKAGES = (
    *("dpopt", "torch", "numpy", "cryptography", "opacus", "dp-accounting", "autodp"),
    *("datasets", "scikit-learn", "timm", "transformers", "peft"),
    *("prodigyopt", "dadaptation", "dog-optimizer", "schedulefree"),
)


@cache
def provenance(device: torch.device) -> dict[str, Any]:
    """The origin of a number that is computed on `device`."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {**source(), "device": f"{device.type} {name}", "cpu": cpu()}


def source() -> dict[str, Any]:
    """Commit, whether tracked files were changed, package versions and Python; needs no torch."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {package: _version(package) for package in _PACKAGES},
        "python": platform.python_version(),
    }


def code() -> str:
    """The first 16 hex digits of a SHA-256 over the package's files: which code it is, without a history."""
    package, content = Path(__file__).parents[1], hashlib.sha256()
    # Relative names: the same code has one hash wherever it is installed.
    for file in sorted(path for kind in ("py", "yaml") for path in package.rglob(f"*.{kind}")):
        content.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return content.hexdigest()[:16]


def unknown_commits(commits: Iterable[str]) -> list[str]:
    """Those of `commits` that this source tree's history does not hold; all where there is no history."""
    return [commit for commit in commits if _git("cat-file", "-e", f"{commit}^{{commit}}") is None]


def _git(*arguments: str) -> str | None:
    tree = source_tree()  # None for an installed package, which may lie in the folder of another project
    return output("git", "-C", str(tree), *arguments) if tree else None


@cache
def cpu() -> str:
    """The model of this machine's CPU where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    models = (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name")
    return next(models, platform.processor() or platform.machine())


def output(*command: str) -> str | None:
    """The text that a program prints, without its last line's end; None where it fails or is not there."""
    try:  # a limit, as git may wait for a lock or for a file system that is gone
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
