"""What is claimed of one run, and whether its cell and its ledger bear that out.

A record claims it, and so does a row of published Parquet: both hold the cell, the ledger and numbers, and both are
held to the same checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpopt.privacy.accountants import epsilon
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.selection import BestOf, Selection, selection_rule
from dpopt.results.verify import opinions
from dpopt.results.verify.finding import Finding, expect, expect_close
from dpopt.store.identity import identity
from dpopt.store.runs import UNREADABLE

SAME = 1e-6
"""How far, relatively, an epsilon may lie from what the same accountant finds: its versions differ in last places."""
LAST_PLACES = 1e-12


@dataclass(frozen=True)
class Claims:
    """One run, as someone states it.

    Attributes:
        where: how findings name it.
        run_id: its name.
        cell: the content of its cell.
        ledger: what it released.
        numbers: what is stated, by the keys of a record; what a row of Parquet does not hold is not there.
    """

    where: str
    run_id: str
    cell: Mapping[str, Any]
    ledger: Ledger
    numbers: Mapping[str, Any]

    @property
    def target(self) -> float:
        """The epsilon that was asked for: of the run, or of its search where that is charged."""
        return float(self.cell["epsilon"])

    @property
    def rule(self) -> Selection | None:
        """How the search that the run is part of is charged."""
        return selection_rule(self.cell["selection"]) if self.cell.get("selection") else None

    @property
    def is_trained(self) -> bool:
        """Whether the run has any draws: a search may come out with no runs."""
        return not self.cell.get("untrained", False)

    def spent(self, rule: Selection | None = None) -> float:
        """What the ledger spends, alone or by a rule for searches, according to the accountant of record."""
        of = rule.epsilon if rule else epsilon
        return of(self.ledger, self.cell["delta"], self.cell["accountant"])


def check(claims: Claims) -> Iterator[Finding]:
    """Every claim that does not hold; what cannot even be looked at is a finding too."""
    for single in CHECKS:
        try:
            yield from single(claims)
        except UNREADABLE as error:
            what = single.__name__.strip("_").replace("_", " ")
            yield Finding(claims.where, what, "that it can be checked", f"{type(error).__name__}: {error}")


def _run_id(claims: Claims) -> Iterator[Finding]:
    """The name is the hash of the cell."""
    yield from expect(claims.where, "run id of its cell", claims.run_id, identity(claims.cell))


def _stated(claims: Claims) -> Iterator[Finding]:
    """What is said of the cell beside it is what the cell says."""
    for key in {"delta", "accountant"} & claims.numbers.keys():  # older records lack the accountant, their cells do not
        yield from expect(claims.where, key, claims.numbers[key], claims.cell[key])
    if "private" in claims.numbers:
        yield from expect(claims.where, "private", claims.numbers["private"], claims.target < math.inf)
    if "epsilon_target" in claims.numbers:
        yield from expect(claims.where, "epsilon_target", float(claims.numbers["epsilon_target"]), claims.target)


def _draws(claims: Claims) -> Iterator[Finding]:
    """The ledger has as many draws as the cell's epochs are, all at the rate B/N; N is public and only stated.

    A run that is scaled down takes as many draws, from batches that are smaller by that factor.
    """
    where, cell, numbers = claims.where, claims.cell, claims.numbers
    yield from expect(where, "draws", numbers["draws"], len(claims.ledger))
    rates = {draw.rate for draw in claims.ledger.counts()}
    if "rate" in numbers and rates:
        yield from expect(where, "rate of its ledger", {numbers["rate"]}, rates)
    if claims.is_trained and "examples" in numbers:
        batch, examples = cell["batch_size"], numbers["examples"]
        planned = max(1, round(cell["epochs"] * examples / batch))  # by the formula, not by the code that planned it
        yield from expect(where, "draws of its epochs", numbers["draws"], planned)
        for rate in rates:
            found = batch / examples / cell.get("dry_run", 1.0)
            yield from expect_close(where, "rate of B and N", rate, found, LAST_PLACES)


def _tested(claims: Claims) -> Iterator[Finding]:
    """An accuracy is a whole number of the test records, divided by how many these are."""
    tested, accuracy = (float(claims.numbers.get(key, math.nan)) for key in ("tested", "test_accuracy"))
    if math.isfinite(tested * accuracy):
        right = tested * accuracy
        yield from expect_close(claims.where, "test records that are right", right, round(right), 1e-9)


def _noise(claims: Claims) -> Iterator[Finding]:
    """Every release of the ledger has the noise of one of the kinds that the plan had, and each kind occurs.

    Which kind is released in which draw follows from the optimizer's code, and is not looked at here.
    """
    released = {noise for draw in claims.ledger.counts() for noise in draw.noises}
    if "noise" in claims.numbers:
        yield from expect(claims.where, "noise of its ledger", set(claims.numbers["noise"].values()), released)


def _epsilon(claims: Claims) -> Iterator[Finding]:
    """What the ledger spends, by the accountant of record and by a second one."""
    where, stated = claims.where, float(claims.numbers["epsilon"])
    yield from expect_close(where, "epsilon", stated, claims.spent(), SAME)
    delta, accountant = claims.cell["delta"], claims.cell["accountant"]
    second = opinions.tight(claims.ledger, delta, accountant)
    if opinions.disagrees(stated, second, accountant):
        yield Finding(where, "epsilon by a second accountant", stated, second)


def _search(claims: Claims) -> Iterator[Finding]:
    """What the whole search spends, by its rule and by a second opinion on it; it must not be above what was asked for.

    The same holds for a run that is charged alone, unless it is scaled down: then it is meant to spend more.
    """
    where, rule, delta, accountant = claims.where, claims.rule, claims.cell["delta"], claims.cell["accountant"]
    total = float(claims.numbers["epsilon" if rule is None else "epsilon_total"])
    if rule is not None:
        found = claims.spent(rule) if claims.is_trained else claims.target
        yield from expect_close(where, "epsilon of the search", total, found, SAME)
        second = opinions.of_search(rule, claims.ledger, delta, accountant)
        is_bound = isinstance(rule, BestOf) or not claims.is_trained
        if opinions.disagrees(total, second, accountant, is_bound, opinions.share_of(rule)):
            yield Finding(where, "epsilon of the search by a second accountant", total, second)
    if claims.cell.get("dry_run", 1.0) == 1 and total > claims.target * (1 + LAST_PLACES):
        yield Finding(where, "epsilon at most its target", claims.target, total)


def _released_score(claims: Claims) -> Iterator[Finding]:
    """A score that a search releases has the noise that it is charged for, and is what that noise makes of it."""
    released, rule = claims.numbers.get("released_score"), claims.rule
    if released is None:
        return
    charged = rule.scores(claims.target) if rule else None
    if charged is None:
        yield Finding(claims.where, "released score", "one that is charged", "no rule by which it would be")
        return
    score_rule, budget = charged
    release = Ledger([Draw(1.0, (released["noise"],))])
    spent = score_rule.epsilon(release, claims.cell["delta"], claims.cell["accountant"])
    if spent > budget * (1 + LAST_PLACES):
        yield Finding(claims.where, "epsilon of the released scores", budget, spent)
    examples = released["noise"] / released["std"]
    yield from expect_close(claims.where, "noise of a share of records", examples, round(examples), 1e-9)
    held_out = claims.cell["workload"].get("validation")
    if isinstance(held_out, int) and held_out > 1:
        yield from expect(claims.where, "records that are held out", round(examples), held_out)
    yield from expect_close(claims.where, "released score", released["value"], _noised(claims, released), 1e-9)


def _noised(claims: Claims, released: Mapping[str, float]) -> float:
    from dpopt.privacy.sampling import derive  # where torch is; nothing else here needs it

    score = claims.numbers.get("score", "accuracy")
    normal = np.random.default_rng(derive("score", claims.run_id)).standard_normal()
    return claims.numbers[f"validation_{score}"] + released["std"] * normal


CHECKS: tuple[Callable[[Claims], Iterator[Finding]], ...] = (
    *(_run_id, _stated, _draws, _tested),
    *(_noise, _epsilon, _search, _released_score),
)
