"""Which methods need their clipping bound C and batch size B tuned, and whether that changes with epsilon.

Everything is paired by seed. The learning rate of a run is the one that its search selects, as in tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dpopt.results import statistics
from dpopt.results.scores import shown
from dpopt.results.tables import number
from dpopt.results.writing import Table

NO_CLIP = 0.0
"""Stands for the C of a method without one."""
BLOCK = ["workload", "epochs"]
PARTS = ("C", "B", "both")
LOST, GAINED = "lost", "gained"
_COLUMNS = [*BLOCK, "score", "label", "is_failing", "epsilon_target", "effect", "part"]
_COLUMNS += ["mean", "low", "high", "p", "seeds"]
BEHIND = 20.0
"""Points of an accuracy: a method that is further behind the best one is not compared, as what fails needs nothing."""
_NO_CLAIM = "These seeds show no method that needs C and B tuned more than the others."
_NOTE = (
    "Points of test accuracy (any other score as it is), mean over seeds with the half-width of the 95 % interval "
    "(Student's, paired by seed); bold where the interval leaves out 0. Lost a step away: against the cell that "
    "validates best, mean of the neighbours. Gained: over the fixed pair, where C and B of a seed are those that "
    "validate best on the other seeds. Choosing C and B is not in ε."
)


class Grid(NamedTuple):
    """The runs of a method at one epsilon: rows are settings (B, C), columns are seeds that have all of them."""

    tests: pd.DataFrame  # scores as they are shown (accuracies in percent); the worst where one is not finite
    validations: pd.DataFrame  # scores that settings are chosen by; -inf for a run that has diverged
    fixed: tuple[float, float] | None  # the fixed pair; None where the method was not run with it
    factor: float  # 100 where the scores are percentages, see `scores.Shown`

    @property
    def chosen(self) -> tuple[float, float] | None:
        """The setting with the best mean validation score over seeds; None where none has one."""
        return _best(self.validations)

    def lost(self, part: str) -> pd.Series | None:
        """Score lost one step of the grid away from `chosen` in C or in B, mean of the neighbours, for each seed."""
        chosen = self.chosen
        if chosen is None or part == "both":
            return None
        line = self._line(chosen, part)
        at = line.index(chosen)
        near = line[max(0, at - 1) : at] + line[at + 1 : at + 2]
        return self.tests.loc[chosen] - self.tests.loc[near].mean() if near else None

    def gained(self, part: str) -> pd.Series | None:
        """Score gained over `fixed` by tuning C, B or both, for each seed.

        The setting of a seed has the best mean validation score over the other seeds: one seed's validation records are
        too few to choose among all settings. Seeds share most of what they choose by, so that an interval over seeds
        does not hold all of the choice's variation.
        """
        if self.fixed is None or self.tests.shape[1] < 2:
            return None
        line = self._line(self.fixed, part)
        choices = {seed: _best(self.validations.loc[line].drop(columns=seed)) for seed in self.tests}
        if len(line) < 2 or None in choices.values():
            return None
        fixed = self.tests.loc[self.fixed]
        return pd.Series({seed: self.tests.at[choice, seed] - fixed[seed] for seed, choice in choices.items()})

    def _line(self, setting: tuple[float, float], part: str) -> list[tuple[float, float]]:
        """The settings, in order, that differ from `setting` in `part` alone."""
        kept = {"C": slice(0, 1), "B": slice(1, 2), "both": slice(0)}[part]
        return [other for other in self.tests.index if other[kept] == setting[kept]]


def _best(validations: pd.DataFrame) -> tuple[float, float] | None:
    means = validations.mean(axis="columns")
    return means.idxmax() if means.max() > -math.inf else None


def fixed_pair(block: pd.DataFrame) -> tuple[float, float]:
    """B and C to begin with: the middle B, of those that all methods have if that is not one of them; C = 1.

    Where no method has C = 1 it is the middle one. Of two in the middle it is the upper one.
    """
    shared = set.intersection(*(set(rows["batch_size"]) for _, rows in block.groupby("label")))
    size, clips = _middle({*block["batch_size"]}), {*block["clip"]} - {NO_CLIP} or {NO_CLIP}
    return size if size in shared or not shared else _middle(shared), 1.0 if 1.0 in clips else _middle(clips)


def _middle(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 2]


def blocks(settings: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The rows of each workload and number of epochs of `Results.settings`, where C is `NO_CLIP` if there is none.

    Methods of one setting are left out, and so are values of B and C that a method with several of them lacks: on a
    finer grid a step costs less.
    """
    settings = settings.assign(clip=settings["clip"].fillna(NO_CLIP)).reset_index(drop=True)
    for _, block in settings.groupby(BLOCK, sort=False):
        counts = block.groupby("label")[["batch_size", "clip"]].transform("nunique")
        block, counts = (frame[counts.max(axis="columns") > 1] for frame in (block, counts))
        for column in counts:
            several = block[column][counts[column] > 1].groupby(block["label"]).agg(set)
            if len(several) and len(shared := set.intersection(*several)) > 1:
                is_shared = block[column].isin(shared) | (counts[column] == 1)
                block, counts = block[is_shared], counts[is_shared]
        if grids(block):
            yield block


def grids(block: pd.DataFrame) -> dict[tuple[str, float], Grid]:
    """The grid of each label and target epsilon of a block; those that no seed has whole are left out."""
    size, clip = fixed_pair(block)
    of_methods = {}
    for place, rows in block.groupby(["label", "epsilon_target"]):
        factor = shown(rows["score"].iloc[0]).factor
        tests = factor * rows["test_score"].where(np.isfinite(rows["test_score"]))
        rows = rows.assign(test_score=tests.fillna(tests.min()))
        table = rows.pivot(index=["batch_size", "clip"], columns="seed", values=["test_score", "selected_by"])
        whole = table["test_score"].dropna(axis="columns").columns
        clips = sorted({*rows["clip"]})
        pair = size, clips[0] if len(clips) == 1 else clip
        if len(whole):
            scores = (table[name][whole] for name in ("test_score", "selected_by"))
            of_methods[place] = Grid(*scores, pair if pair in table.index else None, factor)
    return of_methods


def needs(of_methods: Mapping[tuple[str, float], Grid]) -> pd.DataFrame:
    """The score that a step in C and a step in B cost together, mean over epsilons: rows are seeds, columns labels.

    A method without C pays for B alone. NaN where a method lacks one of the epsilons, or was run with one C or one B.
    """
    table = pd.DataFrame({place: _cost(grid) for place, grid in of_methods.items()}).stack(level=0, future_stack=True)
    return table.mean(axis="columns", skipna=False).unstack()


def _cost(grid: Grid) -> pd.Series:
    parts = ("B",) if NO_CLIP in grid.tests.index.unique("clip") else ("C", "B")
    lost = [grid.lost(part) for part in parts]
    return pd.Series(math.nan, grid.tests.columns) if any(each is None for each in lost) else sum(lost[1:], lost[0])


def failing(of_methods: Mapping[tuple[str, float], Grid]) -> set[str]:
    """The labels whose chosen settings are on average over epsilon more than 20 points behind those of the best method.

    A method that has chance accuracy for every C and B would else be the one that needs them least. None where the
    score is no accuracy.
    """
    if any(grid.factor != 100 for grid in of_methods.values()):
        return set()
    chosen = {place: grid.chosen for place, grid in of_methods.items()}
    means = {place: of_methods[place].tests.loc[at].mean() if at else -math.inf for place, at in chosen.items()}
    scores = pd.Series(means)
    behind = (scores.groupby(level=1).transform("max") - scores).groupby(level=0).mean()
    return {*behind.index[~(behind <= BEHIND)]}


def by_need(of_methods: Mapping[tuple[str, float], Grid]) -> list[str]:
    """The labels, from the one that needs C and B tuned least; those that are `failing` are last."""
    means, last = needs(of_methods).mean(), failing(of_methods)
    return sorted(means.index, key=lambda label: (label in last, math.isnan(means[label]), means[label]))


def effects(settings: pd.DataFrame) -> pd.DataFrame:
    """The cost of a step away from the best C and B, and the gain by tuning them, of `Results.settings`.

    Returns:
        One row for each workload, number of epochs, method, target epsilon, `effect` (`LOST`, `GAINED`) and `part`
        (`PARTS`): `mean` over seeds, `low`, `high`, `p` (see `statistics.difference`) and `seeds`; in the unit in which
        `score` is shown; `is_failing` of `failing` methods. Methods that need C and B least stand first.
    """
    rows = []
    for block in blocks(settings):
        of_methods, targets = grids(block), sorted(block["epsilon_target"].unique())
        left_out = failing(of_methods)
        shared = block[[*BLOCK, "score"]].iloc[0].to_dict()
        for label, target in product(by_need(of_methods), targets):
            if grid := of_methods.get((label, target)):
                for effect, part in product((LOST, GAINED), PARTS):
                    by_seed = grid.lost(part) if effect == LOST else grid.gained(part)
                    if by_seed is not None:
                        numbers = statistics.difference(by_seed.to_numpy())._asdict() | {"seeds": len(by_seed)}
                        of = {"label": label, "is_failing": label in left_out, "epsilon_target": target}
                        rows.append(shared | of | {"effect": effect, "part": part} | numbers)
    return pd.DataFrame(rows, columns=_COLUMNS)


def claims(block: pd.DataFrame) -> list[str]:
    """Sentences on the methods of a block that need C and B tuned least and most, and on changes with epsilon.

    Named are the methods that may be the first or the last by `needs` (`statistics.standing`), where these are at most
    half of those that are compared. Where seeds show nothing, nothing is claimed.
    """
    of_methods, unit = grids(block), shown(block["score"].iloc[0])
    left_out = sorted(failing(of_methods))
    cost = needs(of_methods).dropna(axis="columns", how="all").drop(columns=left_out, errors="ignore")
    ends = []
    for name, sign in (("least", -1), ("most", 1)):
        may_be = statistics.standing(sign * cost.to_numpy()).may_be_best if cost.size else np.zeros(0, bool)
        if 0 < may_be.sum() <= len(may_be) / 2:
            means = cost.mean()[may_be].sort_values(ascending=sign < 0)
            named = [f"{label} ({mean:.1f})".replace("(-", "(−") for label, mean in means.items()]
            ends.append(f"{name}: {_named(named, 'or')}")
    explained = f"In brackets: {unit.points} that a step in C and one in B cost, mean over ε"
    sentences = [_NO_CLAIM] if len(cost.columns) > 1 else []
    if ends:
        sentences = [f"Needs C and B tuned {'; '.join(ends)}. {explained}."]
    compared = {place: grid for place, grid in of_methods.items() if place[0] not in left_out}
    sentences += [_change(compared, *sorted(block["epsilon_target"].agg(["min", "max"])))]
    if left_out:
        sentences += [f"Not compared, as more than {BEHIND:g} {unit.points} behind: {_named(left_out, 'and')}."]
    return list(filter(None, sentences))


def _change(of_methods: Mapping[tuple[str, float], Grid], low: float, high: float) -> str:
    # The cost of a step at the smallest epsilon against the largest, with p < 5 % corrected for all pairs.
    changes = {}
    for label, part in product(sorted({label for label, _ in of_methods}), PARTS[:2]):
        ends = [of_methods[label, end].lost(part) for end in (low, high) if (label, end) in of_methods]
        if low < high and len(ends) == 2 and all(end is not None for end in ends):
            changes[label, part] = (ends[0] - ends[1]).dropna().to_numpy()
    tests = {key: statistics.difference(values, len(changes)) for key, values in changes.items() if len(values)}
    clauses = []
    for part, (word, sign) in product(PARTS[:2], (("more", 1), ("less", -1))):
        labels = [
            label
            for (label, of), test in tests.items()
            if of == part and test.p < 1 - statistics.CONFIDENCE and sign * test.mean > 0
        ]
        clauses += [f"{word} in {part} for {_named(labels, 'and')}"] if labels else []
    if clauses:
        return f"At ε = {number(low)} a step costs {', '.join(clauses)} than at ε = {number(high)}."
    return f"No step is shown to cost more or less at ε = {number(low)} than at {number(high)}." if tests else ""


def _named(names: Sequence[str], joint: str) -> str:
    return f" {joint} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def as_table(effects: pd.DataFrame) -> Table:
    """`effects`' frame as people read it, a row for each method and epsilon; CSV has all numbers."""
    columns = {(LOST, part): f"{part}: lost a step away" for part in PARTS[:2]}
    columns |= {(GAINED, part): f"{part}: gained" for part in PARTS}
    rows, bold = [], set[tuple[int, str]]()
    for (workload, epochs, label, target), cells in effects.groupby([*BLOCK, "label", "epsilon_target"], sort=False):
        row = {"workload": workload, "epochs": number(epochs), "optimizer": label, "target ε": number(target)}
        for cell in cells.to_dict("records"):
            name = columns[cell["effect"], cell["part"]]
            row[name], is_shown = entry(cell)
            bold |= {(len(rows), name)} if is_shown else set()
        rows.append(row)
    names = ["workload", "epochs", "optimizer", "target ε", *columns.values()]
    frame = pd.DataFrame(rows, columns=names).fillna("")
    return Table(frame, "Which methods need C and B tuned", _NOTE, bold=bold, numbers=effects)


def entry(effect: Mapping[str, Any]) -> tuple[str, bool]:
    """The mean of a row of `effects` with the half-width of its interval, and True if that leaves out 0."""
    decimals, half = shown(effect["score"]).decimals, effect["high"] - effect["mean"]
    text = f"{effect['mean']:.{decimals}f}" + (f" ± {half:.{decimals}f}" if math.isfinite(half) else "")
    return text, effect["low"] * effect["high"] > 0
