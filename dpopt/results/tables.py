"""The comparison table of a suite: what its rows score and spend, and which of them may be the best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from dpopt import registry
from dpopt.markup import FALLEN, fallen
from dpopt.results import pricing, statistics
from dpopt.results.choosing import Row
from dpopt.results.frames import GROUP
from dpopt.results.pricing import ROUNDING
from dpopt.results.scores import shown, without_score
from dpopt.results.writing import Column, Table, marks, texts
from dpopt.store.runs import Store

BLOCK = ["workload", "epsilon_target"]
INTERVAL = "95 % interval"
_EDGES = "end of grid"
_NOTE = (
    "Test {scores}: mean ± standard deviation over seeds. {interval} Bold: rows that may be the best of their block "
    "(workload and target ε), at 95 % confidence: no other is better in paired t tests over seeds, corrected for their "
    "number, on this test split. Compared are rows whose whole search keeps to the target ε; italics: for reference, "
    "as more was spent or a value set by hand is not charged. {limit} "
    "Runs: trained models per seed (the mean over seeds), of which the best on the validation split is reported. "
    "ε single: spent by that one run; ε with tuning: by its whole search (not charged where a value was set by hand); "
    "ε composed, where that differs: by all runs one after the other, more than a random number of them spends. All "
    "for the training records, recomputed from the ledgers that the runs left; the validation records that a search "
    "looks at are covered where its scores are noised, by the same ε; otherwise they are not covered."
)
_EDGES_NOTE = (
    "End of grid: the selected value is the largest (↑) or smallest (↓) that was tried, in so many of the seeds; a "
    "wider grid may do better."
)
_WIDEN_NOTE = (
    "Up to {} further runs beyond the grid, one at a time while the best lies at its end; ε with tuning counts them "
    "all, made or not."
)


def comparison(store: Store, selected: pd.DataFrame) -> pd.DataFrame:
    """One row for each group of `choosing.select`'s frame, best first within a workload and a target epsilon.

    Returns:
        Beside the group's keys: `score` (what was measured), its `mean` and `std` on the test split (sample standard
        deviation; NaN for one seed), `tested` records (NaN where it is no mean of zeros and ones, or they are not
        known), `low` and `high` (see `statistics.expected_score`), mean and deviation of further scores as
        `score_NAME` and `score_NAME_std`, `seeds`, `runs`, `validation` (what was selected by), `edges` (of the grid,
        and in how many seeds), `examples` N, `draws` T and `noise_gradient` (noise multiplier), means;
        `epsilon_single`, `epsilon_with_tuning` and `epsilon_composed` (the largest over the seeds); `note`, what the
        registry says of the optimizer; `is_reference`, whether it spends more than its target or cannot say; `p`,
        `visible` and `is_best` among the private others of its block, see `statistics.standing`. A row with test
        records without a finite score is for reference too.
    """
    if selected.empty:
        return pd.DataFrame()
    rows, tests, is_unscored = [], [], []
    for keys, group in selected.groupby(GROUP, sort=False, dropna=False):
        prices = [pricing.price(store, row) for row in group.to_dict("records")]
        unscored, edges = without_score(group), Counter(edge for of in group["edges"] if of for edge in of.split(", "))
        entries, optimizer, widen = registry.entries("optimizer"), group["optimizer"].iloc[0], group["widen"].max()
        notes = [
            entries[optimizer].note if optimizer in entries else "",  # results may be of one that is not installed here
            _WIDEN_NOTE.format(widen) if widen else "",
            f"{unscored}, which counts as diverged: not ranked." if unscored else "",
            _fallen(group),
        ]
        tests.append(group.set_index("seed")["test_score"])
        rows.append(
            {
                **dict(zip(GROUP, keys, strict=True)),
                "tuning": group["tuning"].iloc[0],
                **_scores(group),
                "seeds": len(group),
                "runs": float(group["runs"].mean()),
                "diverged": int(((group["state"] == "diverged") | (group.get("test_unscored", 0) > 0)).sum()),
                "is_refined": False,  # published CSV has the column
                "validation": group["selection_score"].mean(),
                "edges": ", ".join(f"{edge} {count}/{len(group)}" for edge, count in sorted(edges.items())),
                **{name: group[name].mean() for name in ("examples", "draws", "noise_gradient") if name in group},
                "delta": group["delta"].max(),
                "epsilon_single": group["epsilon"].max(),
                "epsilon_with_tuning": max(with_tuning for with_tuning, _ in prices),
                "epsilon_composed": max(composed for _, composed in prices),
                "note": " ".join(filter(None, notes)),
            }
        )
        # Only the table looks at this: a search that did would make a release that nobody charges.
        is_unscored.append(bool(unscored))
    table = pd.DataFrame(rows)
    is_over = table["epsilon_with_tuning"] > table["epsilon_target"] * ROUNDING
    table = _compared(table.assign(is_reference=is_over | (table["tuning"] == "fixed") | np.array(is_unscored)), tests)
    return table.sort_values([*BLOCK, "mean"], ascending=[True] * len(BLOCK) + [False]).reset_index(drop=True)


def _fallen(group: pd.DataFrame) -> str:
    if not {"eta", "lr", "noise_losses"} <= set(group):
        return ""
    pairs = group.loc[group["noise_losses"].notna(), ["lr", "eta"]].itertuples(index=False)
    fell = sum(bool(fallen({"losses": 1.0}, *pair)) for pair in pairs)
    return f"In {fell} of {len(group)} seeds {FALLEN}." if fell else ""


def _scores(group: pd.DataFrame) -> dict[str, Any]:
    # NaN if one seed's value is NaN: a mean over the others would flatter the method.
    columns = {"mean": group["test_score"]} | {name: group[name] for name in group if name.startswith("score_")}
    means = {name: values.mean(skipna=False) for name, values in columns.items()}
    spreads = {name: values.std(skipna=False) for name, values in columns.items()}
    score = group["score"].iloc[0]
    # Of a mean of zeros and ones it is known how the test split's size limits it.
    tested = float(group["tested"].iloc[0]) if score == "accuracy" and "tested" in group else math.nan
    low, high = statistics.expected_score(group["test_score"].to_numpy(float), tested)
    return (
        {"score": score, "tested": tested, "low": low, "high": high}
        | means
        | {f"{name}_std".removeprefix("mean_"): std for name, std in spreads.items()}
    )


def _compared(table: pd.DataFrame, tests: Sequence[pd.Series]) -> pd.DataFrame:
    table = table.assign(p=math.nan, visible=math.nan, is_best=False)
    chosen = table[~table["is_reference"] & (table["epsilon_target"] < math.inf)]
    for _, block in chosen.groupby(BLOCK):
        finite = {row: tests[row].where(np.isfinite(tests[row])) for row in block.index}
        worst = pd.concat(finite).min()  # left out, a method that diverges in some seeds would gain by it
        scores = pd.DataFrame({row: values.fillna(worst) for row, values in finite.items()})
        standing = statistics.standing(scores.to_numpy(float))
        table.loc[block.index, "p"] = standing.p
        table.loc[block.index, "visible"] = standing.visible
        table.loc[block.index, "is_best"] = standing.may_be_best & [values.notna().any() for values in finite.values()]
    return table


def further_scores(table: pd.DataFrame) -> list[str]:
    """The further scores that some row of `comparison`'s frame has."""
    return [name.removeprefix("score_") for name in table if name.startswith("score_") and f"{name}_std" in table]


def as_table(table: pd.DataFrame, title: str, scores: Sequence[str] = (), remarks: Sequence[str] = ()) -> Table:
    """`comparison`'s frame as people read it; a column that says the same in every row is in the note instead.

    It may have the columns that `papers.beside` adds. `scores` are further scores to show, CSV has all; `remarks` are
    further sentences of the note.
    """
    if table.empty:
        return Table(pd.DataFrame({"no finished rows": []}), title, numbers=table)
    main = list(table["score"].unique())
    columns = [
        Column("workload", "workload"),
        Column("target ε", "epsilon_target", upper),  # as what was spent, which is at most this
        Column("optimizer", "label"),
        *(column for score in main for column in _of_score(table, score, "mean", "published")),
        Column(INTERVAL, text=lambda row: shown(row["score"]).interval(row["low"], row["high"])),
        *(column for score in scores for column in _of_score(table, score, f"score_{score}", f"published_{score}")),
        Column("tuning", "tuning"),
        Column(_EDGES, "edges"),
        Column("runs", "runs", "{:.3g}".format),
        Column("ε single", "epsilon_single", upper),
        Column("ε with tuning", text=charged),
        Column("ε composed", "epsilon_composed", upper),
        Column("seeds", "seeds"),
        *(column for column in _SHARED if column.name in ("B", "epochs", "C", "δ")),
        Column("diverged", "diverged"),
    ]
    frame = texts(table, columns)
    dropped = [*_constant(table), *(name for name in (INTERVAL, _EDGES) if not frame[name].any())]
    dropped += ["ε composed"] if (table["epsilon_composed"] == table["epsilon_with_tuning"]).all() else []
    is_reference, marked = table["is_reference"], ["optimizer", *(shown(score).label for score in main)]
    return Table(
        frame.drop(columns=dropped),
        title,
        _footer(table, remarks),
        bold=marks(table["is_best"], marked),
        italic=marks(is_reference & (table["epsilon_target"] < math.inf), marked),
        numbers=table,
    )


def charged(row: Row) -> str:
    """Epsilon of a row's whole search, as tables show it."""
    return "not charged" if row["tuning"] == "fixed" else upper(row["epsilon_with_tuning"])


def _of_score(table: pd.DataFrame, score: str, ours: str, theirs: str) -> Iterator[Column]:
    unit = shown(score)

    def text(row: Row, key: str) -> str:
        if row["score"] != score if ours == "mean" else row[ours] != row[ours]:
            return ""
        return unit.text(row[key], row["std" if key == "mean" else f"{key}_std"])

    def published(row: Row) -> str:
        number = "" if math.isnan(row[theirs]) else text(row, theirs)
        return f"{number} ({row[f'{theirs}_in']})" if number else ""

    yield Column(unit.label, text=partial(text, key=ours))
    if theirs in table and any(map(published, table.to_dict("records"))):
        yield Column(f"published {unit.label}", text=published)


def _footer(table: pd.DataFrame, remarks: Sequence[str] = ()) -> str:
    scores = " and ".join(shown(score).label.removesuffix(" (%)") for score in table["score"].unique())
    notes = table[table["note"] != ""].groupby("note", sort=False)["label"].unique()
    to_rows = [f"{', '.join(labels)}: {note}" for note, labels in notes.items()]
    meaning = _NOTE.format(scores=scores, interval=_interval_note(table), limit=limit(table))
    edges = [_EDGES_NOTE] if table["edges"].any() else []
    setting = ", ".join(f"{name} = {value}" for name, value in _constant(table).items())
    return " ".join([f"{setting}. {meaning}", *edges, *to_rows, *remarks])


def _interval_note(table: pd.DataFrame) -> str:
    if table["low"].isna().all():
        return ""
    seeds = "the variation over seeds (Student's t)" if table["seeds"].max() > 1 else ""
    counts = sorted(table["tested"].dropna().astype(int).unique())
    records = f"the error of a test split of {' or '.join(f'{n:,}' for n in counts)} records (Wilson)" if counts else ""
    rest = ", and where a score is no accuracy for the seeds alone" if counts and table["tested"].isna().any() else ""
    return f"{INTERVAL}: of the expected score, for {' and '.join(filter(None, [seeds, records]))}{rest}."


def limit(table: pd.DataFrame) -> str:
    """The difference that a table or a ranking cannot show with its seeds, in a sentence."""
    counts = sorted(table["seeds"].unique())
    seeds = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    parts = []
    for score, rows in table[table["visible"].notna()].groupby("score"):
        unit, ends = shown(score), sorted({*rows["visible"].agg(["min", "max"])})
        sizes = dict.fromkeys(f"{unit.factor * end:.{unit.decimals}f}" for end in ends)
        parts.append(f"{' to '.join(sizes)} {'points' if unit.factor == 100 else unit.label}")
    if parts:
        least = " and ".join(parts)
        return f"With {seeds}, a difference below about {least} (by block, the median over pairs) cannot be shown."
    return "Nothing is tested: that takes two rows of a block that keep to the target, with two seeds each."


def _constant(table: pd.DataFrame) -> dict[str, str]:
    is_shared = [column for column in _SHARED if table[column.key].nunique(dropna=False) == 1]
    constant = {name: text(table[key].iloc[0]) for name, key, text in is_shared}
    return constant if table["diverged"].any() else constant | {"diverged": "0"}


def upper(value: float) -> str:
    """Three significant digits, rounded up: a printed epsilon is never below the spent one."""
    return number(value) if value == 0 or math.isinf(value) else f"{_raised(value, 3):.3g}"


def _upper_delta(value: float) -> str:
    """Two significant digits, rounded up: the printed epsilon holds at the printed delta too."""
    return f"{_raised(value, 2):.1e}"


def _raised(value: float, digits: int) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return math.ceil(value / unit - 1e-9) * unit  # a value of so many digits stays, whatever its last bit


def number(value: float) -> str:
    """A setting as tables show it; a dash where there is none."""
    return (
        "–" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    )


_SHARED = [
    Column("workload", "workload"),
    Column("B", "batch_size", number),
    Column("epochs", "epochs", number),
    Column("C", "clip", number),
    Column("δ", "delta", _upper_delta),
    Column("seeds", "seeds"),
]
"""Columns that the note has, and not the table, where all rows agree."""
