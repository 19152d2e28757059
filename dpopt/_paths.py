"""Places of files that come with dpopt and are not modules."""

from __future__ import annotations

from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path


def source_tree() -> Path | None:
    """The folder that holds the package where it is not installed from a wheel."""
    package = Path(__file__).parent
    # A wheel carries along in `shipped` the folders that lie beside the package in the source tree.
    return None if (package / "shipped").is_dir() else package.parent


def shipped(folder: str) -> Path:
    """A folder of files that come with dpopt, such as "benchmarks" (suites) or "plots" (figures)."""
    return (source_tree() or Path(__file__).parent / "shipped") / folder


def at_hand(folder: str, pattern: str) -> dict[str, Path]:
    """Name -> file, sorted: what comes with dpopt, and in its place what the same folder of the current one holds.

    Another distribution brings files by an entry point `NAME = package` of the group "dpopt.FOLDER".
    """
    # The later wins: a folder of the user's own replaces what is shipped, and no other distribution can.
    brought = [Path(str(resources.files(point.value))) for point in entry_points(group=f"dpopt.{folder}")]
    files = (file for place in (*brought, shipped(folder), Path(folder)) for file in place.glob(pattern))
    return dict(sorted({file.stem: file for file in files}.items()))
