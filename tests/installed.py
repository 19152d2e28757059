"""dpopt as `pip install` brings it: the wheel in an environment that has nothing of the source tree, and no extra."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from dpopt._extras import EXTRAS

TREE = Path(__file__).parents[1]


class Installed:
    """An environment with dpopt's wheel, the packages that it requires, and those extras that are asked for."""

    def __init__(self, folder: Path, extras: tuple[str, ...] = ()) -> None:
        self.python = folder / "env" / "bin" / "python"
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=TREE, check=True, timeout=120
        )
        venv.create(folder / "env", symlinks=True)
        required = folder / "required" / "site-packages"  # by this name packages know what is installed
        required.mkdir(parents=True)
        left_out = {module for module, extra in EXTRAS.items() if extra not in extras}
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if path.name not in left_out and not path.name.startswith(("dpopt", "_dpopt", "__editable__")):
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
