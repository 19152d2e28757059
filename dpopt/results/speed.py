"""Records of `dpopt bench` -> a frame -> tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dpopt.markup import MARKDOWN
from dpopt.results.writing import Table

TITLES = {
    "engine": "Engines: one step of private SGD against non-private SGD",
    "optimizer": "Optimizers: one draw against the baseline's",
}
BLOCK = ["kind", "case", "subset", "precision"]
"""What contenders that are compared have in common."""
NUMBERS = ["seconds", "time_ratio", "time_ratio_low", "time_ratio_high", "memory", "memory_ratio"]
NOTE = (
    "Time: ratio of medians, in parentheses the quartiles of the single rounds' ratios; in every round each row of a "
    "block made one call in turn. Memory: peak of all live tensors in a step, parameters and data included. "
    "Opacus / this: how many times longer the faster of Opacus' engines takes."
)


def frame(record: Mapping[str, Any]) -> pd.DataFrame:
    """One row for each contender, as in the record; `over_opacus` is the faster Opacus engine's time over its own."""
    rows = pd.DataFrame([{"precision": "float32", **row} for row in record["rows"]])  # older records name none
    rows[NUMBERS] = rows[NUMBERS].astype(float)  # where everything failed, there are none to tell the type
    is_opacus = rows["contender"].str.startswith("opacus") & (rows["failure"] == "")
    best = rows[is_opacus].groupby(BLOCK)["seconds"].min().rename("opacus")
    return rows.join(best, on=BLOCK).assign(over_opacus=lambda joined: joined["opacus"] / joined["seconds"])


def parts(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of many cases, divided among figures: all parameters trained, a case's subsets, optimizers, bfloat16."""
    usual, is_engine = frame["precision"] == "float32", frame["kind"] == "engine"
    found = {"full": usual & is_engine & (frame["subset"] == "full")}
    for case in frame[frame["subset"] != "full"]["case"].unique():
        found[case] = usual & is_engine & (frame["case"] == case)
    found |= {"optimizers": usual & ~is_engine, "bfloat16": ~usual}
    return {name: frame[chosen] for name, chosen in found.items() if chosen.any()}


def markdown(record: Mapping[str, Any]) -> str:
    """The tables of a record, with what was left out and where they come from."""
    left_out = [f"Left out: {line}." for line in record["skipped"]]
    return "\n\n".join([*blocks(record), NOTE, *map(MARKDOWN.escape, [f"{setting(record)}.", *left_out])]) + "\n"


def blocks(record: Mapping[str, Any]) -> list[str]:
    """A title and a table for each kind of contender in a record."""
    rows, parts = frame(record), []
    for kind, title in TITLES.items():
        if (rows["kind"] == kind).any():
            parts += [f"## {title}", Table(_readable(rows[rows["kind"] == kind], kind)).markdown]
    return parts


def setting(record: Mapping[str, Any]) -> str:
    """Where and how a record was measured, in one line."""
    device = record["provenance"]["device"]
    return f"{device}, {record['threads']} threads of {record['cores']} cores, {origin(record, 'torch', 'opacus')}"


def origin(record: Mapping[str, Any], *packages: str) -> str:
    """With which versions of `packages`, at which commit and when a record was made."""
    made = record["provenance"]
    versions = [f"{package} {made['versions'][package]}" for package in packages]
    dirty = " with changes" if made["dirty"] else ""
    return ", ".join([*versions, f"commit {str(made['commit'])[:12]}{dirty}", record["started"]])


def _readable(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    columns = {
        "case": rows["case"],
        "trained": rows.apply(lambda row: f"{row['subset']} ({row['trained']:,})", axis=1),
        "precision": rows["precision"],
        "B": rows["batch_size"].astype(str),
        kind: rows["contender"],
        "baseline": rows["baseline"],
        "ms": rows["seconds"].map(lambda value: "fails" if pd.isna(value) else f"{1e3 * value:,.1f}"),
        "time": rows.apply(_time, axis=1),
        "MB": rows["memory"].map(lambda value: "" if pd.isna(value) else f"{value / 1e6:.1f}"),
        "memory": rows["memory_ratio"].map(_ratio),
        "Opacus / this": rows["over_opacus"].map(_ratio),
    }
    without = ["baseline" if kind == "engine" else "Opacus / this"]
    without += ["precision"] if set(rows["precision"]) == {"float32"} else []
    return pd.DataFrame(columns).drop(columns=without)


def _time(row: pd.Series) -> str:
    if pd.isna(row["time_ratio"]):
        return row["failure"][:60]
    return f"{_ratio(row['time_ratio'])} ({_ratio(row['time_ratio_low'])}-{_ratio(row['time_ratio_high'])})"


def _ratio(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
