"""Which modules may be imported because a suite, a record or an argument names them: those that someone has installed.

Importing a module runs it. The current folder is on Python's path (`python -m`), and what lies below it, results that
were merged among others, is not there to be run.
"""

from __future__ import annotations

import json
import os
import site
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dpopt._extras import EXTRAS, hint

__all__ = ["EXTRAS", "NotInstalled", "hint", "require"]


class NotInstalled(ImportError):
    """There is such a module, in a place whose modules are not imported by name."""


def require(module: str) -> None:
    """Refuse a module that neither the program has imported already nor a distribution has installed.

    Installed is what lies in `site-packages`, and of an editable installation the top-level modules that are its own,
    not all that its folder holds. Nothing is imported to find out. Raises `NotInstalled`, or as an import does.
    """
    if module in sys.modules:
        return
    top = module.partition(".")[0]
    spec = find_spec(top)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {top!r}")
    for place in spec.submodule_search_locations or [str(spec.origin)]:
        folder = Path(os.path.realpath(place)).parent
        if not any(map(folder.is_relative_to, (*_sites(), *_editable(top)))):
            raise NotInstalled(f"{place} is not installed: `pip install` its project, if you trust it")


def _sites() -> list[Path]:
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [Path(os.path.realpath(folder)) for folder in (*site.getsitepackages(), *user)]


def _editable(top: str) -> Iterator[Path]:
    """Folders of the editable installations that have a top-level module of this name."""
    for distribution in distributions(path=list(map(str, _sites()))):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            # By its own name where it does not list its top-level modules.
            names = (distribution.read_text("top_level.txt") or distribution.name.replace("-", "_")).split()
            if top in names:
                yield Path(os.path.realpath(unquote(urlsplit(origin["url"]).path)))
