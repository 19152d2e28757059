"""Where a number came from: code, versions, device. Not part of a cell's identity."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = (
    *("dpopt", "torch", "numpy", "cryptography", "opacus", "dp-accounting", "autodp"),
    *("datasets", "scikit-learn", "timm", "transformers", "peft"),
    *("prodigyopt", "dadaptation", "dog-optimizer", "schedulefree"),
)


@cache
def provenance(device: torch.device) -> dict[str, Any]:
    """Where a number came from that was computed on `device`."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {**source(), "device": f"{device.type} {name}"}


def source() -> dict[str, Any]:
    """Commit, whether tracked files were changed, package versions and Python; needs no torch."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
    }


def unknown_commits(commits: Iterable[str]) -> list[str]:
    """Those of `commits` that this source tree's history does not hold; all where there is no history."""
    return [commit for commit in commits if _git("cat-file", "-e", f"{commit}^{{commit}}") is None]


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
