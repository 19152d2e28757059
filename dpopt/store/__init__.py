"""The only code that writes `results/`."""

from __future__ import annotations

from pathlib import Path

from dpopt.files import Damaged
from dpopt.store.runs import Store

__all__ = ["Damaged", "Store", "open_results"]


def open_results(root: Path) -> Store:
    """The store in a results folder, or in a folder of published suites."""
    from dpopt.store.published import PublishedStore, is_published

    return PublishedStore(root) if is_published(root) else Store(root)
