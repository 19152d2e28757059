"""Who is best with the same budget, the runs of all searches included, and how sure that is.

A method is a label of the suite. All that the suite varies for it beside the target epsilon (its grid, batch size,
epochs, clip) is one search, made anew for each seed; of all its runs the best on the validation split is released.
Methods meet in blocks. `reached` gives the score of each seed in each block, `ranking` compares them within blocks,
`average_ranks` over workloads, and `against` every method with one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpopt.errors import ConfigError, unknown
from dpopt.results import choosing, pricing, statistics
from dpopt.results.choosing import Row, grouped
from dpopt.results.frames import GROUP
from dpopt.results.pricing import ROUNDING
from dpopt.results.scores import shown, without_score
from dpopt.results.tables import BEST, PAGE, compared, dagger, limit, uppers
from dpopt.results.writing import Column, Table, marks, named, texts, unless_nan
from dpopt.store.bits import unpacked
from dpopt.store.runs import RESULTS, Store

BUDGETS = {"epsilon": "total ε", "draws": "draws", "gradients": "gradient evaluations", "seconds": "seconds"}
"""Kind of budget -> its name in tables."""
# Runs that agree in these are one search, for each seed.
_SEARCH = ["workload", "label", "epsilon_target"]
BLOCK = ["workload", "epsilon", "budget"]
_UNSCORED = ["test_unscored", "tested"]
_ENTRY = ["by", *BLOCK, "label", "seed", "tuning", "runs", "score", "test", "failed", *_UNSCORED, "spent", "right"]
_EMPTY = dict.fromkeys(("rank", "mean", "std", "difference", "low", "high", "p"), math.nan)
_EMPTY |= dict.fromkeys(("is_first", "is_best", "is_highest"), False) | {"unranked": ""}
"""A method without a rank has these, and the reason."""
_NONE: Row = {"test": math.nan, "spent": math.nan, "failed": False}
"""Of a search of which nothing fits the budget."""
_NOTHING, _BY_HAND = "nothing fits", "set by hand"

_NOTE = (
    f"Δ: mean distance to the first; 95 % intervals, corrected for all rows. p: of being as good. {BEST} "
    f"Italics: set by hand, not ranked. {PAGE}"
)
_AGAINST = (
    "Scores minus those of {baseline}, paired by seed, with 95 % intervals, corrected for the workloads of a row. "
    "Bold: told apart. ‡: over seeds alone. Better, worse: on how many workloads. {page}"
)


def reached(store: Store, cells: pd.DataFrame, by: str = "epsilon", budgets: Sequence[float] = ()) -> pd.DataFrame:
    """One row for each block, method and seed: the score that its budget lets it reach.

    A search with several settings of which none validates in any seed is left out: nothing but the test split would
    tell which of them it releases.

    By "epsilon", a block is a workload and a total epsilon, and a method's entry the search with the largest total
    that fits. By the others, a block is a workload, a target epsilon and a budget. The runs of a search advance
    together, so that r runs have taken r draws for each that a curve shows, and the score is that of the last curve
    entry within the budget, of the run that whole runs selected.

    Args:
        store, cells: the runs, and the frame of `frames.load`; rows without privacy are left out.
        by: of `BUDGETS`. Seconds are those of computing, or, where a run of the workload has none, on the clock.
        budgets: amounts of it; by default the workload's target epsilons, or else what the cheapest method of a block
            takes in all (for that seed of it which takes the most).

    Returns:
        The columns `_ENTRY`. `test` is NaN if the run has `failed` (no result, diverged, not finite) or if no search
        fits the budget; `spent`, what the search has used of the budget, is NaN if none fits. By "epsilon", `right`
        says which test records are right, see `store.bits`.

    Raises:
        ConfigError: unknown `by`, a budget that is not positive, or a workload whose runs differ in delta, or, by
            seconds, in the device.
    """
    private = cells[cells["epsilon_target"] < math.inf]
    if by not in BUDGETS:
        raise unknown("by", by, BUDGETS)
    for at, budget in enumerate(budgets):
        if not 0 < budget < math.inf or budget in budgets[:at]:
            raise ConfigError("budgets", budget, "expected positive numbers, each once")
    for column in ("delta", "device") if by == "seconds" and "device" in cells else ("delta",):
        for workload, values in private.groupby("workload")[column]:
            if values.nunique() > 1:
                allowed = f"runs of {workload} must have the same to be compared by {BUDGETS[by]}"
                raise ConfigError(column, sorted(values.dropna().unique().tolist()), allowed)
    searches = list(_searches(store, private, by))
    entries = _by_epsilon(searches, budgets) if by == "epsilon" else _by_cost(store, searches, budgets)
    return pd.DataFrame(({"by": by} | entry for entry in entries), columns=_ENTRY)


def _searches(store: Store, cells: pd.DataFrame, by: str) -> Iterator[Row]:
    # Each search and seed whose runs have all ended: its release, and the `total` of the budget that its runs take.
    rows, selected = cells.to_dict("records"), choosing.select(cells).to_dict("records")
    released, whole = grouped(selected, [*_SEARCH, "seed"]), grouped(selected, _SEARCH)
    totals = {search: _epsilon(store, runs) for search, runs in whole.items()} if by == "epsilon" else {}
    # Seconds of computing, but where a run of the workload has none the clock's: no workload is measured by both.
    clocked = {row["workload"] for row in rows if _has(row, "seconds_train") and not _has(row, "seconds_cpu")}
    for place, runs in grouped(rows, [*_SEARCH, "seed"]).items():
        search, chosen, settings = place[:-1], released.get(place, []), len(grouped(runs, GROUP))
        states = {run["state"] for run in runs}
        has_failed = "failed" in states and states <= {*RESULTS, "failed"}
        is_complete = len(chosen) == settings
        whole_runs = whole.get(search, [])
        has_no_score = all(run["selected_by"] == -math.inf for run in whole_runs)
        # Nothing but the test split would choose among settings without a score; if all have diverged, it has failed.
        is_blind = has_no_score and len(grouped(whole_runs, GROUP)) > 1
        is_blind = is_blind and any(run["state"] != "diverged" for run in whole_runs)
        if not (has_failed or is_complete) or is_blind:
            continue
        entry: Row = dict(zip([*_SEARCH, "seed"], place, strict=True)) | dict.fromkeys(["test", *_UNSCORED], math.nan)
        entry |= {"tuning": choosing.tuning(runs), "runs": len(runs), "score": None, "failed": True}
        entry["total"] = totals.get(search, search[-1]) if by == "epsilon" else math.nan
        if is_complete:
            best = max(chosen, key=lambda run: run["selected_by"])
            entry |= {key: best.get(key, math.nan) for key in _UNSCORED} | {"runs": sum(run["runs"] for run in chosen)}
            is_chosen = len(chosen) == 1 or best["selected_by"] > -math.inf
            is_scored = math.isfinite(best["test_score"]) and not entry["test_unscored"] > 0
            if is_chosen and is_scored and best["state"] != "diverged":
                clock = "seconds_train" if best["workload"] in clocked else "seconds_cpu"
                # Without gradients a draw is two passes forward, where a gradient is three: one forward, two back.
                points = (run.get("gradients_per_draw", 1.0) or 2 / 3 for run in runs)
                gradients = (run["draws"] * run["batch_size"] * each for run, each in zip(runs, points, strict=True))
                costs = {
                    "draws": sum(run["draws"] for run in runs),
                    "gradients": sum(gradients),
                    "seconds": sum(run.get(clock, math.nan) for run in runs),
                }
                entry |= {"failed": False, "score": best["score"], "test": best["test_score"]}
                # Whole runs alone: a run that is stopped earlier has another model.
                entry["right"] = store.record(best["run_id"]).get("right") if by == "epsilon" else None
                entry |= {"run_id": best["run_id"], "run_draws": best["draws"], "total": costs.get(by, entry["total"])}
        yield entry


def _has(row: Row, key: str) -> bool:
    return not math.isnan(row.get(key, math.nan))


def _epsilon(store: Store, selected: Sequence[Row]) -> float:
    if len(grouped(selected, GROUP)) == 1:
        return max(pricing.price(store, run)[0] for run in selected)
    delta, accountant = selected[0]["delta"], selected[0]["accountant"]
    charges = (choosing.together(run["charges"] for run in runs) for runs in grouped(selected, ["seed"]).values())
    return max(pricing.epsilon_of_runs(store, each, delta, accountant) for each in charges)


def _by_epsilon(searches: Sequence[Row], budgets: Sequence[float]) -> Iterator[Row]:
    for _, rows in sorted(grouped(searches, ["workload"]).items()):
        for budget in budgets or sorted({row["epsilon_target"] for row in rows}):
            for of_label in grouped(rows, ["label"]).values():
                block = {"epsilon": budget, "budget": budget}
                if fitting := [row for row in of_label if row["total"] <= budget * ROUNDING]:
                    # A public choice: taking the best of several targets would be a search that nobody paid for.
                    largest = max(fitting, key=lambda row: row["total"])["epsilon_target"]
                    chosen = [row for row in fitting if row["epsilon_target"] == largest]
                    yield from (row | block | {"spent": row["total"]} for row in chosen)
                else:
                    yield from (of_seed[0] | block | _NONE for of_seed in grouped(of_label, ["seed"]).values())


def _by_cost(store: Store, searches: Sequence[Row], budgets: Sequence[float]) -> Iterator[Row]:
    if all(row["failed"] for row in searches):
        return
    for (_, target), rows in sorted(grouped(searches, ["workload", "epsilon_target"]).items()):
        totals = [
            [row["total"] for row in of_label if _has(row, "total")] for of_label in grouped(rows, ["label"]).values()
        ]
        cheapest = min(map(max, filter(None, totals)), default=None)
        for budget in budgets or ([] if cheapest is None else [cheapest]):
            yield from (row | {"epsilon": target, "budget": budget} | _end(store, row, budget) for row in rows)


def _end(store: Store, search: Row, budget: float) -> Row:
    if search["failed"]:
        return _NONE | {"failed": True}
    if search["total"] <= budget * ROUNDING:
        return {"test": search["test"], "spent": search["total"], "failed": False}
    unit = search["total"] / search["run_draws"]  # of the budget, for a draw of each run of the search
    passed = [entry for entry in store.curve(search["run_id"]) if entry["draw"] * unit <= budget * ROUNDING]
    if not passed:
        return _NONE
    test, unscored = passed[-1].get(f"test_{search['score']}"), passed[-1].get("test_unscored", math.nan)
    test = math.nan if test is None or not math.isfinite(test) or unscored > 0 else test
    return {"test": test, "spent": passed[-1]["draw"] * unit, "failed": math.isnan(test), "test_unscored": unscored}


def _lacking(block: pd.DataFrame) -> list[str]:
    """The methods of a block of `reached` that its budget lets reach nothing, in some seed."""
    return list(block["label"][block["spent"].isna() & ~block["failed"]].unique())


def _unscored(block: pd.DataFrame) -> list[str]:
    """The methods of a block of `reached` that have, in some seed, test records without a finite score."""
    return list(block["label"][block["test_unscored"] > 0].unique())


def _unranked(block: pd.DataFrame) -> list[str]:
    """The methods of a block of `reached` without a rank: unscored, lacking, or set by hand."""
    return [*_unscored(block), *_lacking(block), *block["label"][block["tuning"] == "fixed"].unique()]


def ranking(entries: pd.DataFrame) -> pd.DataFrame:
    """One row for each block and method of `reached`'s frame, best first.

    A block has the seeds that all its methods have finished: seeds are paired, as they have the split and the draws in
    common. Blocks with fewer than two methods are left out.

    Returns:
        `runs` are the mean over seeds, `spent` is the most; `rank`, ties sharing their average; `difference`, `low` and
        `high` to the first of the block (see `statistics.difference`), corrected for the others; `p`, `visible`,
        `is_best`, `is_highest`: see `tables.compared`. Failures are imputed by the worst score of the
        block; methods without a score of their own share the last rank. The rank is NaN and `unranked` says why for a
        method that was set by hand, that a budget lets reach nothing in some seed, or that has test records without a
        finite score.
    """
    blocks = [] if entries.empty else entries.groupby(BLOCK, sort=False)
    return pd.DataFrame([row for _, block in blocks for row in _block(block)])


def imputed(block: pd.DataFrame) -> pd.DataFrame:
    """The scores [seeds, labels] of a block's methods, see `ranking`; those of a method without any are -inf."""
    tests = _tests(block)
    scores = tests.fillna(tests.min(axis=None))
    scores.loc[:, tests.isna().all()] = -math.inf
    return scores


def _tests(block: pd.DataFrame) -> pd.DataFrame:
    # Seeds are paired, as they have the split and the draws in common: only those that all methods have count.
    block = block[~block["label"].isin(_unranked(block))]
    block = block[block["seed"].isin(set.intersection(set(block["seed"]), *block.groupby("label")["seed"].agg(set)))]
    return block.pivot(index="seed", columns="label", values="test")


def _block(entries: pd.DataFrame) -> Iterator[Row]:
    tests = _tests(entries)
    if entries["label"].nunique() < 2 or tests.isna().to_numpy().all():  # which none at all are, too
        return
    scores = imputed(entries)
    is_unranked = entries["label"].isin(_unranked(entries))
    ranked = entries[entries["seed"].isin(scores.index) & ~is_unranked]
    unit = shown(ranked["score"].dropna().iloc[0])
    means = scores.mean().round(statistics.DIGITS)  # equal sums in another order are equal
    ranks = means.rank(ascending=False).sort_values(kind="stable")
    best = scores[ranks.index[0]]
    there = tests.fillna(tests.min(axis=None))
    standing = compared(tests)
    rows: dict[str, Row] = standing.drop(columns="visible").to_dict("index")
    block = {"score": ranked["score"].dropna().iloc[0], "visible": standing["visible"].iloc[0]}
    for label, rank in ranks.items():
        of_label = rows[label] | {"mean": there[label].mean(), "std": there[label].std(), "difference": 0.0}
        if label != best.name:
            # Corrected as p is, so that the interval of a row that may be the best holds 0.
            differences, largest = (there[label] - best).to_numpy(), unit.ends[1] - unit.ends[0]
            pairs = statistics.difference(differences, len(there.columns) - 1, largest)
            of_label |= {"difference": pairs.mean, "low": pairs.low, "high": pairs.high}
        place = _of_method(ranked[ranked["label"] == label]) | block | _EMPTY
        yield place | {"rank": rank, "is_first": rank == ranks.iloc[0]} | of_label
    lacking = _lacking(entries)
    for label, of_label in entries[is_unranked].groupby("label", sort=False):
        reason = without_score(of_label) or (_NOTHING if label in lacking else _BY_HAND)
        means = of_label["test"].agg(["mean", "std"]).to_dict() if reason == _BY_HAND else {}
        yield _of_method(of_label) | block | _EMPTY | {"unranked": reason} | means


def _of_method(entries: pd.DataFrame) -> Row:
    place = {key: entries[key].iloc[0] for key in ("by", *BLOCK, "label", "tuning")}
    counts = {"runs": entries["runs"].mean(), "seeds": len(entries), "failures": int(entries["failed"].sum())}
    return place | counts | {"spent": entries["spent"].max()}


def average_ranks(frame: pd.DataFrame) -> pd.DataFrame:
    """The average ranks of the methods that are in every block of `ranking`'s frame, best first.

    `first` and `failures` (of replicates) are counts over all blocks.
    """
    rows = everywhere(frame)
    table = rows.groupby("label", sort=False).agg({"tuning": "first", "is_first": "sum", "failures": "sum"})
    # Blocks of one workload have records and seeds in common, so ranks are averaged within workloads first.
    table.insert(1, "rank", _by_workload(rows).mean())
    return table.rename(columns={"is_first": "first"}).sort_values("rank", kind="stable").reset_index()


def everywhere(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `ranking`'s frame for methods that are in every block, ranked among themselves."""
    rows = frame[frame.groupby("label")["rank"].transform("count") == frame.groupby(BLOCK).ngroups]
    rows = rows.assign(rank=rows.groupby(BLOCK)["rank"].rank())
    is_least = rows["rank"] == rows.groupby(BLOCK)["rank"].transform("min")
    return rows.assign(is_first=is_least & (rows["failures"] < rows["seeds"]))


def _by_workload(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.pivot_table(index="workload", columns="label", values="rank", aggfunc="mean")


def rank_test(frame: pd.DataFrame) -> tuple[float, float] | None:
    """Friedman's test of `average_ranks`: p, and how far apart two of them must be to differ, at 5 % for all pairs.

    None with fewer than `statistics.ENOUGH` workloads, or than two methods.
    """
    # Workloads count and not blocks: the more budgets share records, the less each of them adds.
    ranks = _by_workload(everywhere(frame)).to_numpy()
    workloads, methods = ranks.shape
    if workloads < statistics.ENOUGH or methods < 2:
        return None
    return statistics.friedman(ranks), statistics.critical_difference(methods, workloads)


def verdict(frame: pd.DataFrame) -> str:
    """`rank_test` in a sentence, or why there is none."""
    workloads = frame["workload"].nunique()
    if test := rank_test(frame):
        sign = "≤" if test[0] <= statistics.LEAST_P else "="
        return (
            f"Friedman's test over {workloads} workloads: p {sign} {test[0]:.2g}. Average ranks less than "
            f"{test[1]:.2f} apart are not shown to differ at 5 % (Nemenyi)."
        )
    return (
        f"Average ranks are not tested: that takes {statistics.ENOUGH} workloads (budgets of one workload share its "
        f"records and seeds) and two methods that are in all blocks; here are {workloads} and "
        f"{everywhere(frame)['label'].nunique()}."
    )


def as_tables(ranks: pd.DataFrame, names: Mapping[str, str] | None = None) -> list[Table]:
    """`ranking`'s frame as people read it, by `names` of workloads and labels: every block, and the averages."""
    if ranks.empty:
        return [Table(pd.DataFrame({"nothing to rank": []}), numbers=ranks)]
    frame = named(ranks, names)
    by, scores = frame["by"].iloc[0], frame["score"].unique()
    epsilon = "total ε" if by == "epsilon" else "target ε"
    columns = [
        Column("workload", "workload"),
        Column(epsilon, "epsilon", "{:g}".format),
        *([] if by == "epsilon" else [Column(BUDGETS[by], "budget", _amount)]),
        Column("rank", "rank", unless_nan("{:g}".format, "-")),
        Column("method", text=method),
        *(Column(shown(score).label, text=partial(scored, score=score)) for score in scores),
        Column("Δ", text=_difference),
        Column("p", "p", unless_nan("{:.2g}".format, "-")),
        Column("runs", "runs", "{:.3g}".format),
        Column("spent", "spent", unless_nan(uppers(frame["spent"]) if by == "epsilon" else _amount, "-")),
        Column("seeds", "seeds"),
    ]
    averages = [
        Column("method", text=method),
        Column("average rank", "rank", "{:.2f}".format),
        *(Column(name, key) for name, key in (("first", "first"), ("failed", "failures"))),
    ]
    title = f"Ranks at equal {BUDGETS[by]}"
    marked = ["method", *(shown(score).label for score in scores)]
    bold, italic = marks(frame["is_highest"], marked), marks(frame["unranked"] == _BY_HAND, marked)
    optional = ["runs", "p", "seeds", "spent", "Δ"]
    first = frame.groupby(BLOCK, sort=False).cumcount() == 0
    rules = {at: "" for at, is_first in enumerate(first) if is_first}
    of_blocks = {"bold": bold, "italic": italic, "numbers": ranks, "optional": optional, "by": "workload"}
    blocks = Table(texts(frame, columns), title, _NOTE, limit(frame), **of_blocks, rules=rules)
    return [blocks, Table(texts(average_ranks(frame), averages), f"{title}, on average", verdict(frame))]


def method(row: Row) -> str:
    """A method as tables and figures name it."""
    return f"{row['label']} (set by hand)" if row["tuning"] == "fixed" else row["label"]


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def scored(row: Row, score: str) -> str:
    """The score of a method in a block, with the number of its seeds that have failed; the reason if it has none."""
    if row["score"] != score:
        return ""
    if row["unranked"] not in ("", _BY_HAND):
        return row["unranked"]
    failures = f" ({row['failures']} failed)" if row["failures"] else ""
    return shown(score).text(row["mean"], row["std"]) + failures + dagger(row)


def _difference(row: Row) -> str:
    return "first" if row["is_first"] else shown(row["score"]).difference(row["difference"], row["low"], row["high"])


def files(tables: Sequence[Table]) -> dict[str, str]:
    """`as_tables` as Markdown, and the blocks as CSV."""
    return {"md": "\n\n".join(table.markdown for table in tables) + "\n", "csv": tables[0].csv}


def against(entries: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """One row for each other method and workload: the distance from one method of `reached`'s frame.

    Returns:
        `blocks` (budgets that are averaged), `seeds` (pairs), and of the paired differences to the baseline `mean`,
        `low`, `high` and `p`, corrected for the number of workloads that the method has; `records`, the test records
        that these allow for, NaN where they are about this test split; `verdict`: 1 where the method is better, -1
        where it is worse, 0 where neither is shown.

    Raises:
        ConfigError: no such method, or none to compare it with.
    """
    labels = [] if entries.empty else list(entries["label"].unique())
    if baseline not in labels:
        raise unknown("against", baseline, labels)
    pairs: list[Row] = []
    for workload, of_workload in entries.groupby("workload", sort=False):
        blocks = []
        for _, block in of_workload.groupby(BLOCK, sort=False):
            tests = block["test"].mask(block["failed"], block["test"].min())
            scores = block.assign(test=tests).pivot(index="seed", columns="label", values="test")
            blocks.append(scores.drop(columns={*_lacking(block), *_unscored(block)}))
        means = sum(blocks[1:], blocks[0]) / len(blocks)  # not a number where a block lacks a seed or a method
        score = of_workload["score"].dropna().unique()[:1]  # none where all have failed
        for label in means.columns.drop(baseline) if baseline in means else ():
            differences = (means[label] - means[baseline]).dropna()
            if len(differences):
                place = {"label": label, "workload": workload, "score": score[0], "blocks": len(blocks)}
                pairs.append(place | {"seeds": len(differences), "differences": differences, "entries": of_workload})
    if not pairs:
        why = "on no workload it and another ranked row have scores at every budget"
        raise ConfigError("against", baseline, f"{why}; a search that is not charged has no rank")
    counts = Counter(row["label"] for row in pairs)
    rows = []
    for row in sorted(pairs, key=lambda row: labels.index(row["label"])):
        differences, comparisons = row.pop("differences"), counts[row["label"]]
        by_record = _by_record(row.pop("entries"), differences.index, row["label"], baseline)
        least, largest = shown(row["score"]).ends
        if by_record is None:
            distance = statistics.difference(differences.to_numpy(), comparisons, largest - least)
        else:
            distance = statistics.crossed(by_record, comparisons, largest - least)
        row["records"] = math.nan if by_record is None else by_record.shape[1]
        is_shown = distance.p < 1 - statistics.CONFIDENCE
        rows.append(row | distance._asdict() | {"verdict": int(math.copysign(1, distance.mean)) if is_shown else 0})
    return pd.DataFrame(rows)


def _by_record(entries: pd.DataFrame, seeds: pd.Index, label: str, baseline: str) -> NDArray[np.float64] | None:
    """The differences on each test record, shape [seeds, records], averaged over blocks; None where a run lacks it."""
    if len(seeds) < statistics.FEWEST:
        return None
    means = []
    for method in (label, baseline):
        runs = entries[(entries["label"] == method) & entries["seed"].isin(seeds)].sort_values("seed", kind="stable")
        has_bits = runs["right"].map(lambda text: isinstance(text, str)).all()
        if runs["failed"].any() or not has_bits or runs["tested"].nunique() > 1:
            return None
        rows = [unpacked(*pair) for pair in zip(runs["right"], runs["tested"].astype(int), strict=True)]
        means.append(np.array(rows).reshape(len(seeds), -1, len(rows[0])).mean(axis=1))
    return means[0] - means[1]


def against_table(
    distances: pd.DataFrame, baseline: str, by: str = "epsilon", names: Mapping[str, str] | None = None
) -> Table:
    """`against`'s frame as people read it: a row for each method, those that are better most often first."""
    frame, baseline = named(distances, names), (names or {}).get(baseline, baseline)
    order = frame.groupby("label", sort=False)[["verdict", "mean"]].mean()
    order = order.sort_values(["verdict", "mean"], ascending=False, kind="stable").reset_index()
    of = {(row["label"], row["workload"]): row for row in frame.to_dict("records")}
    names = {row["workload"]: f"{row['workload']}, {shown(row['score']).label}" for row in of.values()}
    counts = Counter(zip(frame["label"], frame["verdict"], strict=True))

    def distance(line: Row, workload: str) -> str:
        row = of.get((line["label"], workload))
        if not row:
            return ""
        about = "" if row["records"] > 0 else " ‡"
        return shown(row["score"]).difference(row["mean"], row["low"], row["high"]) + about

    columns = [
        Column("method", "label"),
        *(Column(name, text=partial(distance, workload=workload)) for workload, name in names.items()),
        *(
            Column(name, "label", lambda label, sign=sign: str(counts[label, sign]))
            for name, sign in (("better", 1), ("worse", -1))
        ),
    ]
    labels = list(order["label"])
    bold = {(labels.index(label), names[workload]) for (label, workload), row in of.items() if row["verdict"]}
    title, note = f"Against {baseline}, at equal {BUDGETS[by]}", _AGAINST.format(baseline=baseline, page=PAGE)
    return Table(texts(order, columns), title, note, bold=bold, numbers=distances)
