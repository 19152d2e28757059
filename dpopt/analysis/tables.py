"""The comparison table of a suite, as Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd

from dpopt import registry
from dpopt.analysis.frames import GROUP, epsilon_with_tuning
from dpopt.store.runs import Store

NOTE = (
    "Test accuracy: mean ± standard deviation over seeds; best private method of each block in bold. "
    "Runs: trained models per seed, of which the best on the validation split is reported. "
    "ε single: spent by that one run; ε with tuning: by all runs of its search (naive composition; not charged where a "
    "value was set by hand). Both are for the training records, recomputed from the ledgers that the runs left; the "
    "validation records that a search looks at are not covered."
)


def comparison(store: Store, selected: pd.DataFrame) -> pd.DataFrame:
    """One row for each group of `select`'s frame, best first within a workload and a target epsilon.

    Returns:
        Numbers only: `accuracy`, `accuracy_std` (sample standard deviation; NaN for one seed), `seeds`, `runs`,
        `epsilon_single` and `epsilon_with_tuning` (the largest over the seeds), `is_best`, beside the group's keys;
        and `note`, what the registry says of the optimizer.
    """
    if selected.empty:
        return pd.DataFrame()
    rows = []
    for keys, group in selected.groupby(GROUP, sort=False):
        spent = [
            epsilon_with_tuning(store, row["run_ids"], row["delta"], row["accountant"])
            for row in group.to_dict("records")
        ]
        rows.append(
            {
                **dict(zip(GROUP, keys, strict=True)),
                "tuning": group["tuning"].iloc[0],
                "accuracy": group["test_accuracy"].mean(),
                "accuracy_std": group["test_accuracy"].std(),
                "seeds": len(group),
                "runs": int(group["runs"].max()),
                "diverged": int((group["state"] == "diverged").sum()),
                "delta": group["delta"].max(),
                "epsilon_single": group["epsilon"].max(),
                "epsilon_with_tuning": max(spent),
                "note": _note(group["optimizer"].iloc[0]),
            }
        )
    table = pd.DataFrame(rows)
    block = [key for key in GROUP if key != "label"]
    table = table.sort_values(
        ["workload", "epsilon_target", "batch_size", "epochs", "clip", "accuracy"], ascending=[True] * 5 + [False]
    )
    is_private = table["epsilon_target"] < math.inf
    best = table.groupby(block)["accuracy"].transform("max")
    return table.assign(is_best=is_private & (table["accuracy"] == best)).reset_index(drop=True)


def readable(table: pd.DataFrame, bold: Callable[[str], str]) -> pd.DataFrame:
    """`comparison`'s frame as people read it; what `setting` says is left out."""
    if table.empty:
        return pd.DataFrame({"no finished rows": []})

    def accuracy(row: pd.Series) -> str:
        spread = "" if math.isnan(row["accuracy_std"]) else f" ± {100 * row['accuracy_std']:.1f}"
        text = f"{100 * row['accuracy']:.1f}{spread}"
        return bold(text) if row["is_best"] else text

    columns = {
        "workload": table["workload"],
        "target ε": table["epsilon_target"].map(_number),
        "optimizer": table["label"],
        "accuracy (%)": table.apply(accuracy, axis=1),
        "tuning": table["tuning"],
        "runs": table["runs"].astype(str),
        "ε single": table["epsilon_single"].map(upper),
        "ε with tuning": table["epsilon_with_tuning"].map(upper).where(table["tuning"] != "fixed", "not charged"),
        "seeds": table["seeds"].astype(str),
        "B": table["batch_size"].map(_number),
        "epochs": table["epochs"].map(_number),
        "C": table["clip"].map(_number),
        "δ": table["delta"].map("{:.1e}".format),
        "diverged": table["diverged"].astype(str),
    }
    dropped = [*_constant(table), *(["C"] if table["clip"].nunique() == 1 else [])]
    return pd.DataFrame(columns).drop(columns=dropped)


def _note(optimizer: str) -> str:
    known = registry.entries("optimizer")  # results may be of an optimizer that is not installed here
    return known[optimizer].note if optimizer in known else ""


def footer(table: pd.DataFrame) -> str:
    """What belongs below the table: what all rows share, what the columns mean, and notes to single rows."""
    notes = {} if table.empty else table[table["note"] != ""].groupby("note", sort=False)["label"].unique()
    return " ".join([f"{setting(table)}. {NOTE}", *(f"{', '.join(labels)}: {note}" for note, labels in notes.items())])


def setting(table: pd.DataFrame) -> str:
    """What all rows share and the table therefore leaves out, in one line."""
    return ", ".join(f"{name} = {value}" for name, value in _constant(table).items())


def _constant(table: pd.DataFrame) -> dict[str, str]:
    """The columns of `readable` that say the same in every row, with their value."""
    names = {"workload": "workload", "B": "batch_size", "epochs": "epochs", "δ": "delta", "seeds": "seeds"}
    constant = {}
    for name, key in names.items():
        if table.empty or table[key].nunique() != 1:
            continue
        value = table[key].iloc[0]
        constant[name] = value if isinstance(value, str) else f"{value:.1e}" if key == "delta" else _number(value)
    if not table.empty and not table["diverged"].any():
        constant["diverged"] = "0"
    return constant


def upper(value: float) -> str:
    """Three significant digits, rounded up: a printed epsilon is never below the spent one."""
    if value == 0 or math.isinf(value):
        return _number(value)
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-9) * unit:.3g}"


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def markdown(table: pd.DataFrame) -> str:
    """GitHub Markdown with the note below."""
    text = readable(table, "**{}**".format).to_markdown(index=False, disable_numparse=True)
    return f"{text}\n\n{footer(table)}\n"


def csv(table: pd.DataFrame) -> str:
    """All numbers at full precision."""
    return table.to_csv(index=False)


def latex(table: pd.DataFrame) -> str:
    """A booktabs tabular with caption; needs \\usepackage{booktabs}."""
    text = readable(table, r"\textbf{{{}}}".format)
    names = {
        "target ε": r"target $\varepsilon$",
        "ε single": r"$\varepsilon$ single",
        "ε with tuning": r"$\varepsilon$ with tuning",
        "δ": r"$\delta$",
        "accuracy (%)": r"accuracy (\%)",
    }
    text = text.rename(columns=names).map(
        lambda cell: cell.replace("_", r"\_").replace("±", r"$\pm$").replace("∞", r"$\infty$")
    )
    caption = (
        footer(table)
        .replace("δ", r"$\delta$")
        .replace("_", r"\_")
        .replace("ε", r"$\varepsilon$")
        .replace("±", r"$\pm$")
        .replace("%", r"\%")
    )
    return text.style.hide(axis="index").to_latex(hrules=True, caption=caption, position="t")


def html(table: pd.DataFrame, title: str) -> str:
    """A page of its own that needs no network."""
    body = readable(table, "<b>{}</b>".format).style.hide(axis="index").to_html()
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"{head}<h1>{title}</h1>{body}<p>{footer(table)}</p></html>\n"


STYLE = (
    "body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:left}"
)
FORMATS = {"md": markdown, "csv": csv, "tex": latex}
