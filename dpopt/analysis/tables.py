"""The comparison table of a suite, as Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpopt import markup, registry
from dpopt.analysis.frames import GROUP, composed, epsilon_with_tuning
from dpopt.analysis.scores import shown
from dpopt.markup import HTML, LATEX, MARKDOWN, Style
from dpopt.store.runs import Store

NOTE = (
    "Test {scores}: mean ± standard deviation over seeds; best private method of each block in bold. "
    "Runs: trained models per seed (the mean over seeds), of which the best on the validation split is reported. "
    "ε single: spent by that one run; ε with tuning: by its whole search (not charged where a value was set by hand); "
    "ε composed, where that differs: by all runs one after the other, more than a random number of them spends. All "
    "for the training records, recomputed from the ledgers that the runs left; the validation records that a search "
    "looks at are covered where its scores are noised, by the same ε, and else not."
)


def comparison(store: Store, selected: pd.DataFrame) -> pd.DataFrame:
    """One row for each group of `select`'s frame, best first within a workload and a target epsilon.

    Returns:
        Beside the group's keys: `score` (what was measured), its `mean` and `std` on the test split (sample standard
        deviation; NaN for one seed), the same of further scores as `score_NAME` and `score_NAME_std`, `seeds`, `runs`,
        `validation` (what was selected by), `examples` N, `draws` T and `noise_gradient` (noise multiplier), means;
        `epsilon_single`, `epsilon_with_tuning` and `epsilon_composed` (the largest over the seeds), `is_best`;
        `is_refined`, whether the grid has no such setting; and `note`, what the registry says of the optimizer.
    """
    if selected.empty:
        return pd.DataFrame()
    rows = []
    for keys, group in selected.groupby(GROUP, sort=False, dropna=False):
        searches = group.to_dict("records")
        rows.append(
            {
                **dict(zip(GROUP, keys, strict=True)),
                "tuning": group["tuning"].iloc[0],
                **_scores(group),
                "seeds": len(group),
                "runs": float(group["runs"].mean()),
                "diverged": int((group["state"] == "diverged").sum()),
                "is_refined": bool(group["is_refined"].all()),
                "validation": group["selection_score"].mean(),
                **{name: group[name].mean() for name in ("examples", "draws", "noise_gradient") if name in group},
                "delta": group["delta"].max(),
                "epsilon_single": group["epsilon"].max(),
                "epsilon_with_tuning": max(epsilon_with_tuning(store, row) for row in searches),
                "epsilon_composed": max(
                    composed(store, row["run_ids"], row["delta"], row["accountant"]) for row in searches
                ),
                "note": _note(group["optimizer"].iloc[0]),
            }
        )
    table = pd.DataFrame(rows)
    block = ["workload", "epsilon_target", "batch_size", "epochs"]
    table = table.sort_values([*block, "mean"], ascending=[True] * len(block) + [False])
    is_private = table["epsilon_target"] < math.inf
    best = table.groupby(block)["mean"].transform("max")
    return table.assign(is_best=is_private & (table["mean"] == best)).reset_index(drop=True)


def _scores(group: pd.DataFrame) -> dict[str, Any]:
    """What counts as `score`, `mean` and `std`, and every further score; not a number where one seed's is not."""
    columns = {"mean": group["test_score"]} | {name: group[name] for name in group if name.startswith("score_")}
    means = {name: values.mean(skipna=False) for name, values in columns.items()}
    spreads = {name: values.std(skipna=False) for name, values in columns.items()}
    return (
        {"score": group["score"].iloc[0]}
        | means
        | {f"{name}_std".removeprefix("mean_"): std for name, std in spreads.items()}
    )


def further_scores(table: pd.DataFrame) -> list[str]:
    """The further scores that some row of `comparison`'s frame has."""
    return [name.removeprefix("score_") for name in table if name.startswith("score_") and f"{name}_std" in table]


def readable(table: pd.DataFrame, style: Style, scores: Sequence[str] = ()) -> pd.DataFrame:
    """`comparison`'s frame as people read it, with the score of a block's best row in bold; what `setting` says is left
    out.

    Args:
        table: of `comparison`, with or without the columns that `published.beside` adds.
        style: of the format that it is for.
        scores: further scores to show.
    """
    if table.empty:
        return pd.DataFrame({"no finished rows": []})
    columns = {
        "workload": table["workload"],
        "target ε": table["epsilon_target"].map(number),
        "optimizer": table["label"],
        **_main_scores(table),
        **_further_scores(table, scores),
        "tuning": table["tuning"],
        "runs": table["runs"].map("{:.3g}".format),
        "ε single": table["epsilon_single"].map(upper),
        "ε with tuning": table["epsilon_with_tuning"].map(upper).where(table["tuning"] != "fixed", "not charged"),
        "ε composed": table["epsilon_composed"].map(upper),
        "seeds": table["seeds"].astype(str),
        "B": table["batch_size"].map(number),
        "epochs": table["epochs"].map(number),
        "C": table["clip"].map(number),
        "δ": table["delta"].map("{:.1e}".format),
        "diverged": table["diverged"].astype(str),
    }
    dropped = list(_constant(table))
    dropped += ["ε composed"] if (table["epsilon_composed"] == table["epsilon_with_tuning"]).all() else []
    frame = pd.DataFrame(columns).drop(columns=dropped).astype(str).map(style.escape)
    for score in table["score"].unique():
        best = (table["score"] == score) & table["is_best"]
        frame.loc[best, shown(score).label] = frame.loc[best, shown(score).label].map(style.bold)
    return frame.rename(columns=style.escape)


def _main_scores(table: pd.DataFrame) -> dict[str, list[str]]:
    """A column for each score that counts in some row, with the published numbers beside it."""
    columns = {}
    for score in table["score"].unique():
        own = table["score"] == score
        columns[shown(score).label] = _texts(table, "mean", score, own)
        columns |= _published(table, "published", score, own)
    return columns


def _further_scores(table: pd.DataFrame, scores: Sequence[str]) -> dict[str, list[str]]:
    """A column for each of `scores`, empty where a row has no such number, with the published numbers beside it."""
    columns = {}
    for score in scores:
        columns[shown(score).label] = _texts(table, f"score_{score}", score, table[f"score_{score}"].notna())
        columns |= _published(table, f"published_{score}", score, pd.Series(True, index=table.index))
    return columns


def _texts(table: pd.DataFrame, column: str, score: str, rows: pd.Series) -> list[str]:
    """The numbers of a column and their deviations as text; empty but for `rows`."""
    spread = "std" if column == "mean" else f"{column}_std"
    numbers = zip(table[column], table[spread], rows, strict=True)
    return [shown(score).text(mean, std) if is_shown else "" for mean, std, is_shown in numbers]


def _published(table: pd.DataFrame, column: str, score: str, rows: pd.Series) -> dict[str, list[str]]:
    """The paper's numbers and where in the paper they are; no column where there are none to show."""
    rows = rows & table[column].notna() if column in table else rows & False
    texts = _texts(table, column, score, rows) if rows.any() else []
    cells = [f"{t} ({where})" if t else "" for t, where in zip(texts, table.get(f"{column}_in", ""), strict=False)]
    return {f"published {shown(score).label}": cells} if cells else {}


def _note(optimizer: str) -> str:
    known = registry.entries("optimizer")  # results may be of an optimizer that is not installed here
    return known[optimizer].note if optimizer in known else ""


def footer(table: pd.DataFrame, remarks: Sequence[str] = ()) -> str:
    """What belongs below the table: what all rows share, what the columns mean, notes to single rows, `remarks`."""
    if table.empty:
        return ""
    scores = " and ".join(shown(score).label.removesuffix(" (%)") for score in table["score"].unique())
    notes = table[table["note"] != ""].groupby("note", sort=False)["label"].unique()
    to_rows = [f"{', '.join(labels)}: {note}" for note, labels in notes.items()]
    return " ".join([f"{setting(table)}. {NOTE.format(scores=scores)}", *to_rows, *remarks])


def setting(table: pd.DataFrame) -> str:
    """What all rows share and the table therefore leaves out, in one line."""
    return ", ".join(f"{name} = {value}" for name, value in _constant(table).items())


def _constant(table: pd.DataFrame) -> dict[str, str]:
    """The columns of `readable` that say the same in every row, with their value."""
    names = {"workload": "workload", "B": "batch_size", "epochs": "epochs", "C": "clip", "δ": "delta", "seeds": "seeds"}
    constant = {}
    for name, key in names.items():
        if table.empty or table[key].nunique(dropna=False) != 1:
            continue
        value = table[key].iloc[0]
        constant[name] = value if isinstance(value, str) else f"{value:.1e}" if key == "delta" else number(value)
    if not table.empty and not table["diverged"].any():
        constant["diverged"] = "0"
    return constant


def upper(value: float) -> str:
    """Three significant digits, rounded up: a printed epsilon is never below the spent one."""
    if value == 0 or math.isinf(value):
        return number(value)
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-9) * unit:.3g}"


def number(value: float) -> str:
    """A setting as tables show it; a dash where there is none."""
    return (
        "–" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    )


def files(table: pd.DataFrame, title: str, scores: Sequence[str] = (), remarks: Sequence[str] = ()) -> dict[str, str]:
    """The table as the contents of files, by their kind.

    Args:
        table: see `readable`.
        title: of the page.
        scores: see `readable`; the CSV holds all.
        remarks: see `footer`.
    """
    note = footer(table, remarks)
    return {
        "md": f"{_pipes(readable(table, MARKDOWN, scores))}\n\n{MARKDOWN.escape(note)}\n",
        "csv": csv(table),
        "tex": latex(readable(table, LATEX, scores), LATEX.escape(note)),
        "html": html(readable(table, HTML, scores), HTML.escape(note), HTML.escape(title)),
    }


def markdown(text: pd.DataFrame) -> str:
    """A frame of plain texts as a table of GitHub's Markdown."""
    return _pipes(text.map(MARKDOWN.escape).rename(columns=MARKDOWN.escape))


def _pipes(escaped: pd.DataFrame) -> str:
    return escaped.to_markdown(index=False, disable_numparse=True)


def csv(table: pd.DataFrame) -> str:
    """A frame as CSV; its numbers at full precision, its texts no formulas."""

    def shown(value: Any) -> Any:
        return markup.csv(value) if isinstance(value, str) else value

    return table.map(shown).rename(columns=shown).to_csv(index=False)


def latex(escaped: pd.DataFrame, note: str) -> str:
    """A booktabs tabular with caption; needs \\usepackage{booktabs}."""
    return escaped.style.hide(axis="index").to_latex(hrules=True, caption=note, position="t")


def html(escaped: pd.DataFrame, note: str, title: str) -> str:
    """A page of its own that needs no network."""
    body = escaped.style.hide(axis="index").set_uuid("table").to_html()  # a random one would differ each time
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"{head}<h1>{title}</h1>{body}<p>{note}</p></html>\n"


STYLE = (
    "body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:left}"
)
