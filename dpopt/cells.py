"""The identity of a run. Equal cells give equal results; the place and the time of a run are no part of it.

Needs no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpopt.errors import ConfigError


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        workload, optimizer: as `registry.spec` describes them.
        epsilon: target; infinity trains without noise.
        delta, accountant: see `dpopt.privacy.epsilon`.
        batch_size: expected batch size B.
        epochs: expected passes over the training data.
        seed: replicate number.
        search: number of the run within a search, over all batch sizes, clipping bounds and epochs that it tries. The
            runs of one search have draws of their own, so that composing them one after the other is what they cost;
            runs of different searches are paired by number and seed.
        kernel: `sampling.REVISION` of the draws and the noise that it is run with; no other can run it.
        selection: where the run is one of a search that is charged, the rule by which (see `selection_spec`); `epsilon`
            is then the search's.
        untrained: a search whose number of runs came out as 0 releases the model as it was initialised.
        diagnostics: True if gradient norms and what is computed from them go into the curve; they are not private.
        average: decay of the weights in the average of the parameters, which is evaluated and is the result; 0 for
            none, see `Averaged`. It changes no release.
        grid: True where releases are rounded to a public grid (see `BaseOracle`), as those of a
            user's own data are.
    """

    workload: dict[str, Any]
    optimizer: dict[str, Any]
    epsilon: float
    delta: float
    accountant: str
    batch_size: int
    epochs: float
    seed: int
    search: int = 0
    kernel: int = 1
    selection: dict[str, Any] | None = None
    untrained: bool = False
    diagnostics: bool = False
    average: float = 0.0
    grid: bool = False

    def content(self) -> dict[str, Any]:
        """The cell as plain JSON data; infinity becomes "inf"."""
        return dict(self._content)

    @cached_property
    def _content(self) -> dict[str, Any]:
        # A field at its default is left out, so that cells older than the field keep their ids.
        values = ((field, plain(getattr(self, field.name))) for field in dataclasses.fields(self))
        return {field.name: value for field, value in values if value != field.default}

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Cell:
        """The cell that `content` describes.

        Raises:
            ConfigError: it has a field that cells no longer have (`dry_run`, a run with less noise than its epsilon
                asks for): such a run can be read, and not repeated.
        """
        if unknown := sorted(content.keys() - {field.name for field in dataclasses.fields(cls)}):
            raise ConfigError(f"cell.{unknown[0]}", content[unknown[0]], "cells of this version have no such field")
        return cls(**{**content, "epsilon": float(content["epsilon"])})

    @cached_property
    def run_id(self) -> str:
        """The cell's name, see `identity`."""
        return identity(self._content)

    @property
    def releases(self) -> str:
        """The name of the cell's releases: its run id without an average, as the average changes no release."""
        return dataclasses.replace(self, average=0.0).run_id


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """JSON data with `change` made to every value in it that is no mapping and no list; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    return [mapped(item, change) for item in value] if isinstance(value, list | tuple) else change(value)


def plain(value: Any) -> Any:
    """`value` as JSON data: tuples become lists, infinity becomes "inf"."""
    return mapped(value, lambda each: "inf" if each == math.inf else each)


def finite(value: Any) -> Any:
    """JSON data with null in place of the numbers that JSON does not have."""
    return mapped(value, lambda each: None if isinstance(each, float) and not math.isfinite(each) else each)


def identity(cell: Mapping[str, Any]) -> str:
    """The run id of a cell's content: the first 16 hex digits of the SHA-256 over its canonical JSON.

    Raises:
        ValueError: the content holds a number that JSON does not know.
    """
    # Every published run id is a hash of these bytes: another separator or order would orphan all of them.
    text = json.dumps(cell, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def clipping_bound(cell: Mapping[str, Any]) -> float:
    """The clipping bound C that a cell is trained with; NaN where its clip rule has none, or finds its own."""
    optimizer, rule = cell["optimizer"], None
    # A filter has no clip rule; that of the optimizer inside it is the one that counts.
    while rule is None and isinstance(optimizer, Mapping):
        optimizer, rule = optimizer.get("base"), optimizer.get("clip")
    bounded = bounded_rule(rule)
    return float(bounded["bound"]) if bounded else math.nan


def bounded_rule(clip: Any) -> Mapping[str, Any] | None:
    """Of a clip rule as plain data the one whose bound is C: itself or that of its groups; None where there is no C."""
    rule = clip["inner"] if isinstance(clip, Mapping) and clip.get("rule") == "by_group" else clip
    return rule if isinstance(rule, Mapping) and rule.get("rule") in ("abadi", "normalized") else None
