"""The record of a run of `fit`: plain data, of which statements, predictions and `load` read what is declared here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dpopt import fields
from dpopt.clipping.evaluation import Way
from dpopt.fields import Bound, Count, Fraction, Name, Natural, NonNegative, Positive, Probability, Range


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What a privacy statement repeats of a record; see `Statement`."""

    status: Name
    epsilon: Annotated[float, Range(0, math.inf, "[]")]
    epsilon_target: Bound
    delta: Probability
    accountant: Name
    noise: dict[str, NonNegative]
    rate: Fraction
    draws: Natural
    examples: Count
    batch_size: Positive
    epochs: Positive
    optimizer: str
    unit: Literal["record", "person"]
    adjacency: Name
    sampling: Name
    versions: dict[str, str]
    seed_is_secret: bool
    clip: Bound = math.nan
    unit_rows: Natural = 0
    unit_column: str = ""
    data: str = ""
    date: str = ""
    weights_sha256: str = ""
    draws_planned: Natural = 0
    draws_before: Natural = 0
    unused: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Record(Stated):
    """All that is read of a record, with its types. A record may hold more: that is kept as it is, and read by nobody.

    Attributes:
        isolated: the optimizer ran in a process of its own.
        tested: there were test records.
        doubt: what may be wrong with a run that came to its end, or empty.
        inputs: names of the model's inputs, in their order, where they have names.
        transform: the name of the transform of inputs, where there is one.
        grid: releases are rounded to a public grid.
        evaluation: how outputs are made, see `clipping.evaluation`.
        classes: names or numbers of the classes, in the order of the outputs; empty for another task.
    """

    isolated: bool
    inputs: list[str]
    transform: str | None
    classes: list[str | int]
    tested: bool = False
    doubt: str = ""
    tuned: list[str] | str | None = None
    grid: bool = False
    evaluation: Way = "batch"

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Record:
        """What is read of `record`; `ConfigError` names the first key that is not there or holds something else."""
        return fields.build(cls, {name: record[name] for name in fields.hints(cls) if name in record}, "record")
