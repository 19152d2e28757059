"""Records of `dpopt bench` -> a frame -> tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dpopt.markup import MARKDOWN
from dpopt.results.writing import Column, Table, texts, unless_nan

_TITLES = {
    "engine": "Engines: one step of private SGD against non-private SGD",
    "optimizer": "Optimizers: one draw against the baseline's",
}
_BLOCK = ["kind", "case", "subset", "precision", "threads"]
_NUMBERS = ["seconds", "time_ratio", "time_ratio_low", "time_ratio_high", "memory", "memory_ratio"]
NOTE = (
    "Time: ratio of medians, in parentheses the quartiles of the single rounds' ratios; in every round each row of a "
    "block made one call in turn. Memory: peak of all live tensors in a step, parameters and data included. "
    "Opacus / this: how many times longer the faster of Opacus' engines takes."
)


def frame(record: Mapping[str, Any]) -> pd.DataFrame:
    """One row for each contender, as in the record; `over_opacus` is the faster Opacus engine's time over its own."""
    older = {"precision": "float32", "threads": record.get("threads")}  # rows of older records name none
    rows = pd.DataFrame([older | row for row in record["rows"]])
    rows[_NUMBERS] = rows[_NUMBERS].astype(float)  # where everything failed, there are none to tell the type
    is_opacus = rows["contender"].str.startswith("opacus") & (rows["failure"] == "")
    best = rows[is_opacus].groupby(_BLOCK)["seconds"].min().rename("opacus")
    return rows.join(best, on=_BLOCK).assign(over_opacus=lambda joined: joined["opacus"] / joined["seconds"])


def markdown(record: Mapping[str, Any]) -> str:
    """The tables of a record, with its setting and the cases that were left out."""
    left_out = [f"Left out: {line}." for line in record["skipped"]]
    return "\n\n".join([*blocks(record), NOTE, *map(MARKDOWN.escape, [f"{setting(record)}.", *left_out])]) + "\n"


def blocks(record: Mapping[str, Any]) -> list[str]:
    """A title and a table for each kind of contender in a record."""
    rows, parts = frame(record), []
    for kind, title in _TITLES.items():
        if len(part := rows[rows["kind"] == kind]):
            table = texts(part, _columns(kind))
            needless = {"precision": set(part["precision"]) == {"float32"}, "threads": part["threads"].nunique() == 1}
            parts += [f"## {title}", Table(table.drop(columns=[*filter(needless.get, needless)])).markdown]
    return parts


def setting(record: Mapping[str, Any]) -> str:
    """Device, threads and versions of a record, in one line."""
    device = record["provenance"]["device"]
    threads = " and ".join(map(str, dict.fromkeys(frame(record)["threads"])))
    return f"{device}, {threads} threads of {record['cores']} cores, {origin(record, 'torch', 'opacus')}"


def origin(record: Mapping[str, Any], *packages: str) -> str:
    """Versions of `packages`, commit and time of a record."""
    origin = record["provenance"]
    versions = [f"{package} {origin['versions'][package]}" for package in packages]
    dirty = " with changes" if origin["dirty"] else ""
    return ", ".join([*versions, f"commit {str(origin['commit'])[:12]}{dirty}", record["started"]])


def _columns(kind: str) -> list[Column]:
    def time(row: Mapping[str, Any]) -> str:
        if pd.isna(row["time_ratio"]):
            return row["failure"][:60]  # a longer reason would make the table too wide to read
        return f"{_ratio(row['time_ratio'])} ({_ratio(row['time_ratio_low'])}-{_ratio(row['time_ratio_high'])})"

    return [
        Column("case", "case"),
        Column("trained", text=lambda row: f"{row['subset']} ({row['trained']:,})"),
        Column("precision", "precision"),
        Column("threads", "threads"),
        Column("B", "batch_size"),
        Column(kind, "contender"),
        *([] if kind == "engine" else [Column("baseline", "baseline")]),
        Column("ms", "seconds", unless_nan(lambda value: f"{1e3 * value:,.1f}", "fails")),
        Column("time", text=time),
        Column("MB", "memory", unless_nan(lambda value: f"{value / 1e6:.1f}")),
        Column("memory", "memory_ratio", unless_nan(_ratio)),
        *([Column("Opacus / this", "over_opacus", unless_nan(_ratio))] if kind == "engine" else []),
    ]


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
