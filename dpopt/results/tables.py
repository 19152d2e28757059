"""The comparison table of a suite: what its rows score and spend, and which of them may be the best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpopt import registry
from dpopt.markup import FALLEN, fallen
from dpopt.results import layout, pricing, statistics
from dpopt.results.choosing import Row, grouped, tuning
from dpopt.results.frames import GROUP
from dpopt.results.pricing import ROUNDING
from dpopt.results.scores import shown, without_score
from dpopt.results.writing import Column, Table, marks, named, texts
from dpopt.store.runs import Store

BLOCK = ["workload", "epsilon_target"]
INTERVAL = "95 % interval"
DAGGER = "†"
_EDGES = "end of grid"
BEST = f"Bold: highest mean; {DAGGER}: not shown to be worse (95 %)."
PAGE = "All columns: docs/guide/tables.md."
"""The end of the note of each table."""
MARKS = f"{BEST} Italics: spends more than ε, or set by hand."
_CAPTION = f"Test score: mean ± standard deviation over seeds. {MARKS} ε with tuning: of the whole search."
_REFERENCE = "for reference"


def comparison(store: Store, selected: pd.DataFrame) -> pd.DataFrame:
    """One row for each group of `choosing.select`'s frame: by workload and target epsilon, best first, references last.

    Returns:
        Beside the group's keys: `score` (what was measured), its `mean` and `std` on the test split (sample standard
        deviation; NaN for one seed), `tested` records (NaN where it is no mean of zeros and ones, or they are not
        known), `low` and `high` (see `statistics.expected_score`), mean and deviation of further scores as
        `score_NAME` and `score_NAME_std`, `seeds`, `runs`, `validation` (what was selected by), `edges` (of the grid,
        and in how many seeds), `examples` N, `draws` T and `noise_gradient` (noise multiplier), means;
        `epsilon_single`, `epsilon_with_tuning` and `epsilon_composed` (the largest over the seeds); `note`, what the
        registry says of the optimizer; `is_reference`, whether it spends more than its target or cannot say; `p`,
        `visible` and `is_best` (may be the best) among the private others of its block, see `statistics.standing`, and
        `is_highest`, of the means that are compared. A row with test records without a finite score is for reference.
    """
    if selected.empty:
        return pd.DataFrame()
    rows, tests, is_unscored, entries = [], [], [], registry.entries("optimizer")
    runs = selected.to_dict("records")
    pricing.ahead((pricing.composed(store, run["charges"]), run["delta"], run["accountant"]) for run in runs)
    # A frame of its own for each group would take longer than all that is computed of its few rows.
    for group in grouped(runs, GROUP).values():
        first, widen = group[0], max(run["widen"] for run in group)
        is_diverged = [run["state"] == "diverged" or run.get("test_unscored", 0) > 0 for run in group]
        unscored = without_score(pd.DataFrame(group)) if any(is_diverged) else ""
        edges = Counter(edge for run in group if run["edges"] for edge in run["edges"].split(", "))
        prices = [pricing.price(store, run) for run in group]
        notes = [
            entries[first["optimizer"]].note if first["optimizer"] in entries else "",  # it may not be installed here
            f"ε with tuning counts {widen} further runs beyond the grid, made or not." if widen else "",
            f"{unscored}, which counts as diverged: not ranked." if unscored else "",
            _fallen(group),
        ]
        tests.append(pd.Series(_column(group, "test_score"), [run["seed"] for run in group]))
        rows.append(
            {
                **{key: first[key] for key in GROUP},
                "tuning": tuning(group),
                **_scores(group),
                "seeds": len(group),
                "runs": _mean(group, "runs"),
                "diverged": sum(is_diverged),
                "validation": _mean(group, "selection_score"),
                "edges": ", ".join(f"{edge} {count}/{len(group)}" for edge, count in sorted(edges.items())),
                **{name: _mean(group, name) for name in ("examples", "draws", "noise_gradient") if name in first},
                "delta": max(run["delta"] for run in group),
                "epsilon_single": max(run["epsilon"] for run in group),
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
    order = {**dict.fromkeys([*BLOCK, "is_reference"], True), "mean": False}
    return table.sort_values(list(order), ascending=list(order.values())).reset_index(drop=True)


def _column(group: Sequence[Row], name: str) -> NDArray[np.float64]:
    return np.array([run[name] for run in group], float)


def _mean(group: Sequence[Row], name: str) -> float:
    """Over the runs that have it."""
    values = _column(group, name)
    return math.nan if np.isnan(values).all() else np.nanmean(values)


def _fallen(group: Sequence[Row]) -> str:
    probed = [run for run in group if not math.isnan(run.get("noise_losses", math.nan))]
    fell = sum(bool(fallen({"losses": 1.0}, run["lr"], run.get("eta", math.nan))) for run in probed)
    return f"In {fell} of {len(group)} seeds {FALLEN}." if fell else ""


def _scores(group: Sequence[Row]) -> dict[str, Any]:
    first, tests = group[0], _column(group, "test_score")
    columns = {"mean": tests} | {name: _column(group, name) for name in first if name.startswith("score_")}
    # NaN if one seed's value is NaN: a mean over the others would flatter the method.
    with np.errstate(invalid="ignore"):
        means = {name: values.mean() for name, values in columns.items()}
        spreads = {name: values.std(ddof=1) if len(group) > 1 else math.nan for name, values in columns.items()}
    # Of a mean of zeros and ones it is known how the test split's size limits it.
    score = first["score"]
    tested = float(first["tested"]) if score == "accuracy" and "tested" in first else math.nan
    low, high = statistics.expected_score(tests, tested, shown(score).ends)
    return (
        {"score": score, "tested": tested, "low": low, "high": high}
        | means
        | {f"{name}_std".removeprefix("mean_"): std for name, std in spreads.items()}
    )


def _compared(table: pd.DataFrame, tests: Sequence[pd.Series]) -> pd.DataFrame:
    table = table.assign(p=math.nan, visible=math.nan, is_best=False, is_highest=False)
    chosen = table[~table["is_reference"] & (table["epsilon_target"] < math.inf)]
    for _, block in chosen.groupby(BLOCK):
        # A mean over fewer seeds is of other splits and draws: its row waits until it has those of the others.
        whole = block.index[block["seeds"] == pd.concat([tests[row] for row in block.index]).index.nunique()]
        if len(whole):
            standing = compared(pd.DataFrame({row: tests[row] for row in whole}))
            table.loc[whole, list(standing)] = standing
    # A mean that is not finite is printed as such, whatever its row has by the worst score in place of a failure.
    return table.assign(**{mark: table[mark] & np.isfinite(table["mean"]) for mark in ("is_best", "is_highest")})


def compared(tests: pd.DataFrame) -> pd.DataFrame:
    """The methods of a block, by their scores [seeds, methods]; a run without a finite score has failed.

    A failure counts as the worst score of the block: left out, a method that fails in some seeds would gain by it.

    Returns:
        A row a method: `p` and `visible`, see `statistics.standing`; `is_best`, whether it may be the best, and
        `is_highest`, whether its mean is the highest, which equal ones share, both of methods with some score.
    """
    tests = tests.where(np.isfinite(tests))
    scores = tests.fillna(tests.min(axis=None))
    standing = statistics.standing(scores.to_numpy(float))
    may_be, is_tested = tests.notna().any().to_numpy(), np.isfinite(standing.p)
    means = np.where(may_be & is_tested, scores.mean().round(statistics.DIGITS), -math.inf)
    return pd.DataFrame(
        {
            "p": standing.p,
            "visible": standing.visible,
            "is_best": standing.may_be_best & may_be,
            "is_highest": may_be & is_tested & (means == means.max()),
        },
        index=tests.columns,
    )


def dagger(row: Row) -> str:
    """The mark of a row that no other one is shown to be better than, beside the highest mean."""
    return f" {DAGGER}" if row["is_best"] and not row["is_highest"] else ""


def further_scores(table: pd.DataFrame) -> list[str]:
    """The further scores that some row of `comparison`'s frame has."""
    return [name.removeprefix("score_") for name in table if name.startswith("score_") and f"{name}_std" in table]


def as_table(
    frame: pd.DataFrame,
    title: str,
    scores: Sequence[str] = (),
    remarks: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> Table:
    """`comparison`'s frame as people read it; a column that says the same in every row is in the title instead.

    It may have the columns that `papers.beside` adds. `scores` are further scores to show, CSV has all; `remarks` are
    further sentences of the details; `names` are those of workloads and labels.
    """
    if frame.empty:
        return Table(pd.DataFrame({"no finished rows": []}), title, numbers=frame)
    table = named(frame, names)
    main = list(table["score"].unique())
    columns = [
        Column("workload", "workload"),
        # Rounded as what was spent, which is at most this.
        Column("target ε", "epsilon_target", uppers(table["epsilon_target"])),
        Column("optimizer", "label"),
        *(column for score in main for column in _of_score(table, score, "mean", "published")),
        Column(INTERVAL, text=lambda row: shown(row["score"]).interval(row["low"], row["high"])),
        *(column for score in scores for column in _of_score(table, score, f"score_{score}", f"published_{score}")),
        Column("tuning", "tuning"),
        Column(_EDGES, "edges"),
        Column("runs", "runs", "{:.3g}".format),
        Column("ε single", "epsilon_single", uppers(table["epsilon_single"])),
        _charged(table),
        Column("ε composed", "epsilon_composed", uppers(table["epsilon_composed"])),
        Column("seeds", "seeds"),
        *(column for column in _SHARED if column.name in ("B", "epochs", "C", "δ")),
        Column("diverged", "diverged"),
    ]
    shown_texts, constant = texts(table, columns), _constant(table)
    dropped = [*constant, *(name for name in (INTERVAL, _EDGES) if not shown_texts[name].any())]
    dropped += ["ε composed"] if (table["epsilon_composed"] == table["epsilon_with_tuning"]).all() else []
    dropped += [] if table["diverged"].any() else ["diverged"]
    is_reference = table["is_reference"] & (table["epsilon_target"] < math.inf)
    marked = ["optimizer", *(shown(score).label for score in main)]
    further = [shown(score).label for score in scores]
    free = [] if table.duplicated([*BLOCK, "label"]).any() else ["C", "B", "epochs"]  # else these tell rows apart
    optional = [INTERVAL, "runs", *free, "ε single", "ε composed", _EDGES, "δ", *further, "tuning", "seeds"]
    place = table[BLOCK].assign(is_reference=is_reference)
    begins = np.flatnonzero(place.ne(place.shift()).any(axis="columns"))
    setting = ", ".join(value if name == "workload" else f"{name} = {value}" for name, value in constant.items())
    heading = f"{title}: {setting}" if setting else title
    notes = table[table["note"] != ""].groupby("note", sort=False)["label"].unique()
    return Table(
        shown_texts.drop(columns=dropped),
        heading,
        f"{_CAPTION} {PAGE}",
        " ".join([limit(table), *(f"{', '.join(labels)}: {note}" for note, labels in notes.items()), *remarks]),
        f"{heading}. {_CAPTION}",
        bold=marks(table["is_highest"], marked),
        italic=marks(is_reference, marked),
        numbers=frame,
        optional=optional,
        by="workload",
        rules={int(at): _REFERENCE if is_reference.iloc[at] else "" for at in begins},
    )


def as_wide(
    frame: pd.DataFrame, title: str, methods: Sequence[str], names: Mapping[str, str], planned: pd.DataFrame
) -> Table:
    """`comparison`'s frame of one setting for each method: a row for each method, a column for each task.

    A cell says so where it has no result yet, or fewer seeds than another one of its column.

    Args:
        methods: the labels in their order; those that have rows for reference alone come last.
        names: of workloads and labels.
        planned: label, workload and target epsilon of all cells; tasks are in its order.
    """
    if frame.empty:
        return Table(pd.DataFrame({"no finished rows": []}), title, numbers=frame)
    table = named(frame, names)
    units = {workload: shown(score).label for workload, score in zip(table["workload"], table["score"], strict=True)}
    several = len(set(units.values())) > 1
    rows = named(planned[[*BLOCK, "label"]].drop_duplicates(), names).merge(table, "left", [*BLOCK, "label"])
    is_reference = rows["is_reference"].eq(True) & (rows["epsilon_target"] < math.inf)
    rows = rows.assign(
        workload=rows["workload"].map(lambda name: f"{name}, {units.get(name, '')}" if several else name),
        italic=is_reference,
        is_highest=rows["is_highest"].eq(True),
        is_short=rows["seeds"] < rows.groupby(BLOCK)["seeds"].transform("max"),
    )

    def text(row: Row) -> str:
        if math.isnan(row["seeds"]):
            return "no result"
        seeds = f" ({row['seeds']:.0f} seed{'s' * (row['seeds'] > 1)})" if row["is_short"] else ""
        return shown(row["score"]).text(row["mean"], row["std"]) + dagger(row) + seeds

    is_last = is_reference.groupby(rows["label"]).all()
    order = sorted((name for label in methods if (name := names.get(label, label)) in is_last), key=is_last.get)
    wide = layout.wide(rows, order, text)
    delta = f" (δ = {constant['δ']})" if "δ" in (constant := _constant(table)) else ""
    scores = f"{'scores' if several else units[table['workload'].iloc[0]]}, mean ± standard deviation over"
    about = f"test {scores} {_seeds(table)} seeds, at ε of the whole search{delta}"
    first = int((~is_last).sum())
    rules = {first: _REFERENCE} if 0 < first < len(order) else {}
    headed = {
        "title": f"{title}: {about}",
        "note": f"{MARKS} {PAGE}",
        "caption": f"{about[0].upper()}{about[1:]}. {MARKS}",
    }
    return replace(wide, **headed, numbers=frame, rules=rules)


def _charged(table: pd.DataFrame) -> Column:
    text = uppers(table.loc[table["tuning"] != "fixed", key := "epsilon_with_tuning"])
    return Column("ε with tuning", text=lambda row: "not charged" if row["tuning"] == "fixed" else text(row[key]))


def _of_score(table: pd.DataFrame, score: str, ours: str, theirs: str) -> Iterator[Column]:
    unit = shown(score)

    def text(row: Row, key: str) -> str:
        if row["score"] != score if ours == "mean" else row[ours] != row[ours]:
            return ""
        number = unit.text(row[key], row["std" if key == "mean" else f"{key}_std"])
        return number + (dagger(row) if key == "mean" else "")

    def published(row: Row) -> str:
        number = "" if math.isnan(row[theirs]) else text(row, theirs)
        return f"{number} ({row[f'{theirs}_in']})" if number else ""

    yield Column(unit.label, text=partial(text, key=ours))
    if theirs in table and any(map(published, table.to_dict("records"))):
        yield Column(f"published {unit.label}", text=published)


def limit(table: pd.DataFrame) -> str:
    """The difference that a table or a ranking cannot show with its seeds, in a sentence."""
    parts = []
    for score, rows in table[table["visible"].notna()].groupby("score"):
        unit, ends = shown(score), sorted({*rows["visible"].agg(["min", "max"])})
        sizes = dict.fromkeys(f"{unit.factor * end:.{unit.decimals}f}" for end in ends)
        parts.append(f"{' to '.join(sizes)} {unit.points}")
    if parts:
        least = " and ".join(parts)
        seeds = f"With {_seeds(table)} seeds"
        return f"{seeds}, a difference below about {least} (by block, the median over pairs) cannot be shown."
    least = statistics.FEWEST
    return f"Nothing is tested: that takes two rows of a block that keep to the target, with {least} seeds each."


def _seeds(table: pd.DataFrame) -> str:
    return " to ".join(map(str, dict.fromkeys(table["seeds"].agg(["min", "max"]))))


def _constant(table: pd.DataFrame) -> dict[str, str]:
    is_shared = [column for column in _SHARED if table[column.key].nunique(dropna=False) == 1]
    return {name: text(table[key].iloc[0]) for name, key, text in is_shared}


def upper(value: float) -> str:
    """Three significant digits, rounded up: a printed epsilon is never below the spent one."""
    return number(value) if value == 0 or math.isinf(value) else number(_raised(value, 3))


def uppers(values: Iterable[float]) -> Callable[[float], str]:
    """`upper` for a column: all of its `values` have the decimals of the one that needs most."""
    values = [value for value in values if math.isfinite(value)]
    decimals = max((len(upper(value).partition(".")[2]) for value in values), default=0)
    if not decimals or any(0 < value < 1e-3 for value in values):
        return upper
    unit = 10.0**decimals
    return lambda value: (
        f"{math.ceil(value * unit - 1e-9) / unit:.{decimals}f}" if math.isfinite(value) else upper(value)
    )


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
    Column("δ", "delta", lambda value: f"{_raised(value, 2):.1e}"),  # the printed epsilon holds at the printed delta
    Column("seeds", "seeds"),
]
"""Columns that the title has, and not the table, where all rows agree."""
