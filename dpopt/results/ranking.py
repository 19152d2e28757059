"""Which method is better at equal cost, and how sure that is: ranks and paired differences within blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from dpopt.results import statistics
from dpopt.results.budgets import BLOCK, BUDGETS, lacking, reached, unranked
from dpopt.results.scores import shown, without_score
from dpopt.results.tables import limit, upper
from dpopt.results.writing import Table, marks
from dpopt.store.runs import Store

RULES = {
    "epsilon": (
        "Methods have the same total ε, which pays for the whole search on the training records (on validation records "
        "only where its scores are noised; it does not pay for how a value that is set by hand was found). Each makes "
        "the largest search that fits."
    ),
    "draws": "Methods have the same number of draws",
    "gradients": "Methods have the same number of gradient evaluations (B times the points per draw)",
    "seconds": "Methods have the same seconds of computing (on the clock where a run of the workload has no others)",
}
STOPPED = "run that is stopped there has the noise of the whole run, and has spent less than ε."
ADVANCE = (
    ", unless told otherwise as many as the cheapest of the block takes in all. The runs of a search are all charged "
    "and advance together; the score is that of the last curve entry within the budget, of the run that whole runs "
    f"selected. A {STOPPED}"
)
NOTE = (
    "Test scores: mean ± standard deviation over seeds. Δ: mean of the paired differences to the first of the block, "
    "on this test split, with Student's 95 % interval over seeds, which does not allow for the first having been found "
    "by the same seeds. p: that no "
    "other method of the block is better, by one-sided paired t tests, corrected for their number; bold: methods that "
    "may be the best, at 95 % confidence. †: so many replicates have diverged or failed and count as the worst score "
    "of the block. -: nothing fits the budget; ranked last."
)


def ranking(store: Store, cells: pd.DataFrame, by: str = "epsilon", budgets: Sequence[float] = ()) -> pd.DataFrame:
    """One row for each block and method, best first: see `budgets.reached` for blocks, arguments and errors.

    A block has the seeds that all its methods have finished: seeds are paired, as they have the split and the draws in
    common. Blocks with fewer than two methods are left out.

    Returns:
        `by`; `workload`, `epsilon`, `budget`; `label`, `tuning`, `runs` (mean over seeds); `score` (what was measured),
        `mean` and `std` on the test split; `seeds`, `failures` among them; `spent` by the search, the most over the
        seeds; `rank`, ties sharing their average; `is_first`; `difference`, `low`, `high` to the first of the block
        (see `statistics.difference`); `p`, `visible` and `is_best` (see `statistics.standing`). Failures are imputed by
        the worst score of the block. Where nothing fits the budget, all numbers are NaN but the rank. Methods without a
        score of their own share the last rank. A method with test records without a finite score has no rank (NaN), and
        `unscored` says of how many.
    """
    return of_entries(reached(store, cells, by, budgets), by)


def of_entries(entries: pd.DataFrame, by: str) -> pd.DataFrame:
    """`ranking` of what each seed reaches, see `budgets.reached`."""
    if entries.empty:
        return pd.DataFrame()
    blocks = [_block(block) for _, block in entries.groupby(BLOCK, sort=False)]
    frame = pd.DataFrame([row for rows in blocks for row in rows])
    frame.insert(0, "by", by)
    return frame


def imputed(block: pd.DataFrame) -> pd.DataFrame:
    """The scores of a block's methods, for the seeds that all of them have: [seeds, labels], see `ranking`.

    Those of a method without any score are -inf.
    """
    tests = _tests(block)
    scores = tests.fillna(tests.min(axis=None))
    scores.loc[:, tests.isna().all()] = -math.inf
    return scores


def _tests(block: pd.DataFrame) -> pd.DataFrame:
    """The test scores that a block's methods reach, for the seeds that all of them have: [seeds, labels]."""
    block = block[~block["label"].isin(unranked(block))]
    block = block[block["seed"].isin(set.intersection(set(block["seed"]), *block.groupby("label")["seed"].agg(set)))]
    tests = block.pivot(index="seed", columns="label", values="test")
    tests[lacking(block)] = math.nan
    return tests


def _block(entries: pd.DataFrame) -> list[dict[str, Any]]:
    tests, scores = _tests(entries), imputed(entries)
    if entries["label"].nunique() < 2 or tests.isna().all(axis=None):
        return []
    excluded = entries[entries["label"].isin(unranked(entries))]
    entries = entries[entries["seed"].isin(scores.index) & ~entries["label"].isin(excluded["label"])]
    means = scores.mean().round(statistics.DIGITS)  # equal sums in another order are equal
    ranks = means.rank(ascending=False).sort_values(kind="stable")
    best, score = scores[ranks.index[0]], entries["score"].dropna().iloc[0]
    there = tests.drop(columns=lacking(entries)).fillna(tests.min(axis=None))
    found = statistics.standing(there.to_numpy())
    standing = zip(there, found.p, found.may_be_best & (means[there.columns] > -math.inf), strict=True)
    numbers = {label: _numbers(there[label], best) | {"p": p, "is_best": is_best} for label, p, is_best in standing}
    rows = []
    for label, rank in ranks.items():
        place = _place(entries[entries["label"] == label]) | {"score": score, "visible": found.visible}
        rows.append(place | {"rank": rank, "is_first": rank == ranks.iloc[0]} | EMPTY | numbers.get(label, {}))
    for _, own in excluded.groupby("label", sort=False):
        place = _place(own) | {"score": score, "visible": found.visible, "unscored": without_score(own)}
        rows.append(place | {"rank": math.nan, "is_first": False} | EMPTY)
    return rows


EMPTY = dict.fromkeys(("mean", "std", "difference", "low", "high", "p"), math.nan) | {"is_best": False}
"""The numbers of a method that a budget lets reach nothing."""


def _place(own: pd.DataFrame) -> dict[str, Any]:
    """What is known of a method in a block beside its scores."""
    place = {key: own[key].iloc[0] for key in (*BLOCK, "label", "tuning")}
    counts = {"runs": own["runs"].mean(), "seeds": len(own), "failures": int(own["failed"].sum())}
    return place | counts | {"spent": own["spent"].max()}


def _numbers(scores: pd.Series, best: pd.Series) -> dict[str, float]:
    """Of a method's scores and of what they lack to the best one's, by seed."""
    found = {"mean": scores.mean(), "std": scores.std()}
    if scores.name == best.name:
        return found | {"difference": 0.0}
    pairs = statistics.difference((scores - best).to_numpy())
    return found | {"difference": pairs.mean, "low": pairs.low, "high": pairs.high}


def average_ranks(frame: pd.DataFrame) -> pd.DataFrame:
    """How the methods that are in every block of `ranking`'s frame rank on average, best first.

    Blocks of one workload have records and seeds in common, so ranks are averaged within workloads first.

    Returns:
        `label`, `tuning`, `rank`; over all blocks, `first` (how often), `failures` (of replicates) and `lacking` (in
        how many blocks nothing fits the budget).
    """
    rows = everywhere(frame)
    table = rows.assign(lacking=rows["mean"].isna()).groupby("label", sort=False)
    table = table.agg({"tuning": "first", "is_first": "sum", "failures": "sum", "lacking": "sum"})
    table.insert(1, "rank", _by_workload(rows).mean())
    return table.rename(columns={"is_first": "first"}).sort_values("rank", kind="stable").reset_index()


def everywhere(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `ranking`'s frame for methods that are in every block, ranked among themselves."""
    rows = frame[frame.groupby("label")["rank"].transform("count") == frame.groupby(BLOCK).ngroups]
    rows = rows.assign(rank=rows.groupby(BLOCK)["rank"].rank())
    is_least = rows["rank"] == rows.groupby(BLOCK)["rank"].transform("min")
    return rows.assign(is_first=is_least & has_score(rows))


def has_score(rows: pd.DataFrame) -> pd.Series:
    """Which rows of `ranking`'s frame have a score of their own: the budget lets them reach one, and not all failed."""
    return rows["mean"].notna() & (rows["failures"] < rows["seeds"])


def _by_workload(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.pivot_table(index="workload", columns="label", values="rank", aggfunc="mean")


class RankTest(NamedTuple):
    """Whether average ranks differ.

    Attributes:
        workloads: that they are averages over.
        p: of Friedman's test.
        critical: how far apart two of them must be to differ, at 5 % for all pairs together.
    """

    workloads: int
    p: float
    critical: float


def rank_test(frame: pd.DataFrame) -> RankTest | None:
    """The test of `average_ranks`; None with fewer than `statistics.ENOUGH` workloads, or than two methods.

    Workloads are what it counts, and not blocks: the more budgets share records, the less each of them adds.
    """
    ranks = _by_workload(everywhere(frame)).to_numpy()
    workloads, methods = ranks.shape
    if workloads < statistics.ENOUGH or methods < 2:
        return None
    return RankTest(workloads, statistics.friedman(ranks).p, statistics.critical_difference(methods, workloads))


def verdict(frame: pd.DataFrame) -> str:
    """`rank_test` in a sentence, or why there is none."""
    test = rank_test(frame)
    if test:
        return (
            f"Friedman's test over {test.workloads} workloads: p = {test.p:.2g}. Average ranks less than "
            f"{test.critical:.2f} apart are not shown to differ at 5 % (Nemenyi)."
        )
    return (
        f"Average ranks are not tested: that takes {statistics.ENOUGH} workloads (budgets of one workload share its "
        f"records and seeds) and two methods that are in all blocks; here are {frame['workload'].nunique()} and "
        f"{everywhere(frame)['label'].nunique()}."
    )


def _readable(frame: pd.DataFrame) -> pd.DataFrame:
    rows, by = frame.to_dict("records"), frame["by"].iloc[0]
    is_epsilon = by == "epsilon"
    columns = {
        "workload": frame["workload"],
        "total ε" if is_epsilon else "target ε": frame["epsilon"].map("{:g}".format),
        **({} if is_epsilon else {BUDGETS[by]: frame["budget"].map(_amount)}),
        "rank": [_text(row["rank"], "{:g}".format) for row in rows],
        "method": [named(row) for row in rows],
        **{shown(score).label: [_score(row, score) for row in rows] for score in frame["score"].unique()},
        "Δ": [_difference(row) for row in rows],
        "p": [_text(row["p"], "{:.2g}".format) for row in rows],
        "runs": frame["runs"].map("{:.3g}".format),
        "spent": [_text(row["spent"], upper if is_epsilon else _amount) for row in rows],
        "seeds": frame["seeds"].astype(str),
    }
    return pd.DataFrame(columns)


def named(row: dict[str, Any]) -> str:
    """A method as tables and figures name it."""
    return f"{row['label']} (set by hand)" if row["tuning"] == "fixed" else row["label"]


def _text(value: float, form: Callable[[float], str]) -> str:
    return "-" if math.isnan(value) else form(value)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _score(row: dict[str, Any], score: str) -> str:
    if row["score"] != score:
        return ""
    if math.isnan(row["rank"]):
        return row["unscored"]
    dagger = f" †{row['failures']}" if row["failures"] else ""
    return _text(row["mean"], lambda mean: shown(score).text(mean, row["std"])) + dagger


def _difference(row: dict[str, Any]) -> str:
    return "first" if row["is_first"] else shown(row["score"]).difference(row["difference"], row["low"], row["high"])


def note(frame: pd.DataFrame) -> str:
    """What belongs below the table."""
    rule = RULES[by] if (by := frame["by"].iloc[0]) == "epsilon" else RULES[by] + ADVANCE
    return f"{verdict(frame)} {rule} {NOTE} {limit(frame)}"


def as_tables(frame: pd.DataFrame) -> list[Table]:
    """`ranking`'s frame as people read it: every block, and the averages with the note below."""
    if frame.empty:
        return [Table(pd.DataFrame({"no finished blocks": []}), numbers=frame)]
    title = f"Ranks at equal {BUDGETS[frame['by'].iloc[0]]}"
    bold = marks(frame["is_best"], ["method", *(shown(score).label for score in frame["score"].unique())])
    blocks = Table(_readable(frame), title, bold=bold, numbers=frame)
    return [blocks, Table(_readable_averages(frame), f"{title}, on average", note(frame))]


def files(frame: pd.DataFrame) -> dict[str, str]:
    """Ranks of every block and on average as Markdown, with the note below; the blocks as CSV at full precision."""
    made = as_tables(frame)
    return {"md": "\n\n".join(table.markdown for table in made) + "\n", "csv": made[0].csv}


def _readable_averages(frame: pd.DataFrame) -> pd.DataFrame:
    table = average_ranks(frame)
    return pd.DataFrame(
        {
            "method": [named(row) for row in table.to_dict("records")],
            "average rank": table["rank"].map("{:.2f}".format),
            "first": table["first"].astype(str),
            "†": table["failures"].astype(str),
            "-": table["lacking"].astype(str),
        }
    )
