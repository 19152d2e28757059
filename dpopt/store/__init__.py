"""The only code that writes `results/`."""

from __future__ import annotations

from pathlib import Path

from dpopt.store.runs import Damaged, Store

__all__ = ["Damaged", "Store", "open_results"]


def open_results(root: Path) -> Store:
    """The store in a results folder, or in a folder of published suites."""
    from dpopt.store.published import CELLS, PublishedStore

    is_plain = (root / "runs").is_dir() or (root / "suites").is_dir()
    return PublishedStore(root) if not is_plain and any(root.glob(f"*/{CELLS}")) else Store(root)
