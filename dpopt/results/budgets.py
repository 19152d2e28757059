"""What methods reach with the same budget, where the runs of their searches are paid from it.

A method is a label of the suite. All that the suite varies for it beside the target epsilon (its grid, batch size,
epochs, clip) is one search, made anew for each seed; of all its runs the best on the validation split is released.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from dpopt.errors import ConfigError, unknown
from dpopt.results import choosing, frames, pricing
from dpopt.store.runs import RESULTS, Store

BUDGETS = {"epsilon": "total ε", "draws": "draws", "gradients": "gradient evaluations", "seconds": "seconds"}
"""What budgets are counted in -> its name in tables."""
SEARCH = ["workload", "label", "epsilon_target"]
"""Whose runs are one search, for each seed."""
BLOCK = ["workload", "epsilon", "budget"]
"""Where methods meet."""
ROUNDING = 1 + 1e-6
"""How far a budget may be overdrawn: sums of seconds and solved epsilons are not exact."""
UNSCORED = ["test_unscored", "tested"]
"""Columns of `scores.without_score`."""

Totals = Mapping[tuple[str, str, float], float]
"""What a search spends in all, by the keys in `SEARCH`."""


def reached(store: Store, cells: pd.DataFrame, by: str = "epsilon", budgets: Sequence[float] = ()) -> pd.DataFrame:
    """One row for each block, method and seed: the score that its budget lets it reach.

    A search with several settings of which none validates in any seed is left out: nothing but the test split would
    tell which of them it releases.

    By "epsilon", a block is a workload and a total epsilon, and a method's entry the search with the largest total
    that fits. That is a public choice: taking the best of several targets would be a search that nobody paid for.

    By the others, a block is a workload, a target epsilon and a budget. The runs of a search advance together, so that
    r runs have taken r draws for each that a curve shows, and the score is that of the last curve entry within the
    budget. Which run is released was found by whole runs; a search stopped there might have released another one.

    Args:
        cells: of `frames.load`; rows without privacy are left out. `gradients_per_draw` is the number of points per
            draw at which an optimizer computes gradients, 1 where there is no such column.
        by: of `BUDGETS`. Seconds are those of computing, or, where a run of the workload has none, on the clock.
        budgets: amounts of it; by default the workload's target epsilons, or else what the cheapest method of a block
            takes in all (for that seed of it which takes the most).

    Returns:
        The keys in `BLOCK`, `label`, `seed`, `tuning`, `runs` of the search; `score` (what was measured); `test`, the
        test score, NaN if the run has `failed` (no result, diverged, not finite) or if no search fits the budget;
        `spent`, what the search has used of the budget, NaN if none fits.

    Raises:
        ConfigError: unknown `by`, a budget that is not positive, or a workload whose runs differ in delta, or, by
            seconds, in the device.
    """
    private = cells[cells["epsilon_target"] < math.inf]
    _require(private, by, budgets)
    searches = _searches(private)
    if searches.empty:
        return pd.DataFrame()
    if by == "epsilon":
        blocks = list(_by_epsilon(searches, _totals(store, private), budgets))
    else:
        blocks = list(_by_cost(store, searches, by, budgets))
    columns = [*BLOCK, "label", "seed", "tuning", "runs", "score", "test", "failed", *UNSCORED, "spent"]
    return pd.concat(blocks, ignore_index=True)[columns] if blocks else pd.DataFrame()


def _require(cells: pd.DataFrame, by: str, budgets: Sequence[float]) -> None:
    if by not in BUDGETS:
        raise unknown("by", by, BUDGETS)
    for at, budget in enumerate(budgets):
        if not 0 < budget < math.inf or budget in budgets[:at]:
            raise ConfigError("budgets", budget, "expected positive numbers, each once")
    for column in ("delta", "device") if by == "seconds" and "device" in cells else ("delta",):
        for workload, values in cells.groupby("workload")[column]:
            if values.nunique() > 1:
                allowed = f"runs of {workload} must have the same to be compared by {BUDGETS[by]}"
                raise ConfigError(column, sorted(values.dropna().unique().tolist()), allowed)


def lacking(block: pd.DataFrame) -> list[str]:
    """The methods of a block of `reached` that its budget lets reach nothing, in some seed."""
    return list(block["label"][block["spent"].isna() & ~block["failed"]].unique())


def unranked(block: pd.DataFrame) -> list[str]:
    """The methods of a block of `reached` that have, in some seed, test records without a finite score."""
    return list(block["label"][block["test_unscored"] > 0].unique())


def _searches(cells: pd.DataFrame) -> pd.DataFrame:
    """One row for each search and seed whose runs have all ended: what it releases, and what all its runs took."""
    cells, keys = cells.assign(seconds=_seconds(cells)), [*SEARCH, "seed"]
    selected = choosing.select(cells)
    released = {} if selected.empty else dict(list(selected.groupby(keys)))
    untold = set() if selected.empty else {place for place, own in selected.groupby(SEARCH) if _is_untold(own)}
    rows = []
    for place, group in cells.groupby(keys, sort=False):
        chosen, states = released.get(place, selected.iloc[:0]), group["state"]
        has_failed = states.isin([*RESULTS, "failed"]).all() and (states == "failed").any()
        if (has_failed or len(chosen) == _settings(group)) and place[:-1] not in untold:
            rows.append(dict(zip(keys, place, strict=True)) | _search(group, chosen))
    return pd.DataFrame(rows)


def _is_untold(selected: pd.DataFrame) -> bool:
    """Whether a search has several settings and nothing to choose one of them by; all that diverge have failed."""
    has_no_score = (selected["selected_by"] == -math.inf).all()
    return _settings(selected) > 1 and has_no_score and not (selected["state"] == "diverged").all()


def _settings(cells: pd.DataFrame) -> int:
    """How many settings of their search `cells` are about."""
    return len(cells.drop_duplicates(frames.GROUP))


def _seconds(cells: pd.DataFrame) -> pd.Series:
    """Seconds of each run: of computing if all runs of its workload have them, else on the clock."""
    nothing = pd.Series(math.nan, index=cells.index)
    wall, cpu = (cells.get(column, nothing) for column in ("seconds_train", "seconds_cpu"))
    is_mixed = (wall.notna() & cpu.isna()).groupby(cells["workload"]).transform("any")
    return cpu.mask(is_mixed, wall)


def _search(group: pd.DataFrame, selected: pd.DataFrame) -> dict[str, Any]:
    failed = {"tuning": group["tuning"].iloc[0], "runs": len(group), "score": None, "test": math.nan, "failed": True}
    failed |= dict.fromkeys(UNSCORED, math.nan)
    if len(selected) < _settings(group):
        return failed
    best = selected.loc[selected["selected_by"].idxmax()]
    search = failed | {"runs": selected["runs"].sum()} | {key: best.get(key, math.nan) for key in UNSCORED}
    is_chosen = len(selected) == 1 or best["selected_by"] > -math.inf
    if not is_chosen or best["state"] == "diverged" or not math.isfinite(best["test_score"]):
        return search
    if search["test_unscored"] > 0:
        return search
    points = group.get("gradients_per_draw", 1.0)
    return search | {
        "failed": False,
        "score": best["score"],
        "test": best["test_score"],
        "run_id": best["run_id"],
        "run_draws": best["draws"],
        "draws": group["draws"].sum(),
        "gradients": (group["draws"] * group["batch_size"] * points).sum(),
        "seconds": group["seconds"].sum(skipna=False),
    }


def _totals(store: Store, cells: pd.DataFrame) -> Totals:
    return {keys: _total(store, choosing.select(group), keys[-1]) for keys, group in cells.groupby(SEARCH, sort=False)}


def _total(store: Store, selected: pd.DataFrame, target: float) -> float:
    """What a search spends, the largest over its seeds; its target where no seed has a result."""
    if selected.empty:
        return target
    if _settings(selected) == 1:
        return max(pricing.epsilon_with_tuning(store, row) for row in selected.to_dict("records"))
    first = selected.iloc[0]
    searched = selected.groupby("seed")["run_ids"].agg(choosing.together)
    return max(pricing.composed(store, ids, first["delta"], first["accountant"]) for ids in searched)


def _by_epsilon(searches: pd.DataFrame, totals: Totals, budgets: Sequence[float]) -> Iterator[pd.DataFrame]:
    keys = searches[SEARCH].itertuples(index=False, name=None)
    searches = searches.assign(spent=[totals[key] for key in keys])
    for _, rows in searches.groupby("workload"):
        for budget in budgets or sorted(rows["epsilon_target"].unique()):
            parts = [_within(own, budget) for _, own in rows.groupby("label", sort=False)]
            yield pd.concat(parts).assign(epsilon=budget, budget=budget)


def _within(searches: pd.DataFrame, budget: float) -> pd.DataFrame:
    """A method's searches, one for each seed, with the largest total that fits; without a result where none does."""
    fitting = searches[searches["spent"] <= budget * ROUNDING]
    if fitting.empty:
        return searches.drop_duplicates("seed").assign(test=math.nan, spent=math.nan, failed=False)
    largest = fitting["epsilon_target"][fitting["spent"].idxmax()]
    return fitting[fitting["epsilon_target"] == largest]


def _by_cost(store: Store, searches: pd.DataFrame, by: str, budgets: Sequence[float]) -> Iterator[pd.DataFrame]:
    if by not in searches:
        return
    for (_, target), rows in searches.groupby(["workload", "epsilon_target"]):
        for budget in budgets or rows.groupby("label")[by].max().dropna().nsmallest(1):
            ends = [_end(store, row, row[by], budget) for row in rows.to_dict("records")]
            yield rows.assign(epsilon=target, budget=budget, **pd.DataFrame(ends, index=rows.index))


def _end(store: Store, search: dict[str, Any], total: float, budget: float) -> dict[str, Any]:
    """Where a search of `total` cost is when `budget` is used up."""
    if search["failed"]:
        return {"test": math.nan, "spent": math.nan, "failed": True}
    if total <= budget * ROUNDING:
        return {"test": search["test"], "spent": total, "failed": False}
    unit = total / search["run_draws"]
    passed = [entry for entry in store.curve(search["run_id"]) if entry["draw"] * unit <= budget * ROUNDING]
    if not passed:
        return {"test": math.nan, "spent": math.nan, "failed": False}
    test = passed[-1].get(f"test_{search['score']}")
    unscored = passed[-1].get("test_unscored", math.nan)
    test = math.nan if test is None or not math.isfinite(test) or unscored > 0 else test
    here = {"test": test, "spent": passed[-1]["draw"] * unit, "failed": math.isnan(test)}
    return here | {"test_unscored": unscored, "tested": search["tested"]}
