"""The claims of one run, held to what its cell and its ledger say, and every epsilon to a second opinion.

A second opinion is from another library, by another method, and tight like the first. `prv` (Opacus, after Gopi, Lee
and Wutschitz, "Numerical composition of differential privacy", NeurIPS 2021) composes the privacy loss by Fourier
transforms of its density; `pld` (dp-accounting) rounds the loss itself to a grid, from the safe side. They share no
code. A tight bound sees both mistakes: a claim below it is too low to be true, and one by a tight accountant that is
above it is not what its ledger spends. Bounds by Renyi divergences (`rdp`, `autodp`) are up to 40 % above the tight
ones on ledgers that occur here, so a claim by those is held to the first test alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dpopt.cells import identity
from dpopt.errors import cut
from dpopt.privacy import accountants
from dpopt.privacy.accountants import Event
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.selection import After, BestOf, Composed, Selection, Simulated, repeated, selection_rule
from dpopt.results import pricing
from dpopt.store.bits import unpacked
from dpopt.store.runs import UNREADABLE

_SAME = 1e-6
"""Relative difference allowed between two epsilons of one accountant: its versions differ in last places."""
_LAST_PLACES = 1e-12
_ABSOLUTE, _RELATIVE = 0.02, 0.002
"""Difference allowed between two tight accountants. `prv` adds its discretisation error of 0.01 to an epsilon that may
itself be wrong by as much; the rest is for the grid of `pld`, which is felt in runs of over 10^4 draws."""


class Finding(NamedTuple):
    """A claim that does not hold: where (run id or file), of what, and the value that comes out in its place."""

    where: str
    what: str
    claimed: Any
    result: Any

    def __str__(self) -> str:
        # An error ends with its reason, so more of it is shown.
        shown = (cut(f"{each}", 400 if isinstance(each, Exception) else 120) for each in (self.claimed, self.result))
        return f"{self.where}: {self.what}: claimed {next(shown)}, found {next(shown)}"


class Claims(NamedTuple):
    """One run, as its record states it."""

    where: str  # its name in findings
    ledger: Ledger
    numbers: Mapping[str, Any]  # the record: it is held to its "cell" and to the ledger, and older ones lack keys
    curve: list[dict[str, Any]] | None  # None where it was not published

    @property
    def cell(self) -> Mapping[str, Any]:
        return self.numbers["cell"]

    @property
    def target(self) -> float:
        """The epsilon that was asked for: of the run, or of its search where that is charged."""
        return float(self.cell["epsilon"])

    @property
    def rule(self) -> Selection | None:
        """The rule by which the search is charged that the run is part of."""
        return selection_rule(self.cell["selection"]) if self.cell.get("selection") else None

    @property
    def is_trained(self) -> bool:
        """True if the run has any draws: a search may come out with no runs."""
        return not self.cell.get("untrained", False)

    def spent(self, rule: Selection | None = None) -> float:
        """Epsilon of the ledger, alone or by a rule for searches, by the accountant of record."""
        return pricing.spent(self.ledger, self.cell["delta"], self.cell["accountant"], rule)

    def expect(self, what: str, claimed: Any, result: Any, relative: float | None = None) -> Iterator[Finding]:
        """A finding where the two differ, as numbers by more than `relative` of their size. NaN equals itself."""
        is_near = relative is not None and math.isclose(claimed, result, rel_tol=relative)
        if not is_near and claimed != result and not (claimed != claimed and result != result):
            yield Finding(self.where, what, claimed, result)


def check(claims: Claims) -> Iterator[Finding]:
    """Every claim that does not hold; what cannot even be looked at is a finding too."""
    for single in _CHECKS:  # one that fails leaves the others to be made: a record may be wrong in several places
        try:
            yield from single(claims)
        except UNREADABLE as error:
            what = single.__name__.strip("_").replace("_", " ")
            yield Finding(claims.where, what, "that it can be checked", f"{type(error).__name__}: {error}")


def _stated(claims: Claims) -> Iterator[Finding]:
    """The name is the hash of the cell, and what is said of the cell beside it is what the cell says."""
    yield from claims.expect("run id of its cell", claims.numbers["run_id"], identity(claims.cell))
    if missing := sorted({"commit", "dirty", "versions", "python", "device"} - claims.numbers["provenance"].keys()):
        yield Finding(claims.where, "provenance", "all there", f"no {', '.join(missing)}")
    for key in {"delta", "accountant"} & claims.numbers.keys():  # older records lack the accountant, their cells do not
        yield from claims.expect(key, claims.numbers[key], claims.cell[key])
    kind = claims.ledger.unit.kind
    yield from claims.expect("unit", claims.numbers.get("unit", kind), kind)
    if "private" in claims.numbers:
        yield from claims.expect("private", claims.numbers["private"], claims.target < math.inf)
    stated, whole = float(claims.numbers["epsilon_target"]), claims.cell.get("selection", {}).get("total")
    # Older records of a part of a search state the target of the whole search, which their cell names too.
    yield from claims.expect("epsilon_target", stated, whole if stated == whole else claims.target)


def _draws(claims: Claims) -> Iterator[Finding]:
    """The ledger has as many draws as the cell's epochs are, all at the rate B/N; N is public and only stated."""
    cell, numbers = claims.cell, claims.numbers
    yield from claims.expect("draws", numbers["draws"], len(claims.ledger))
    rates = {draw.rate for draw in claims.ledger.counts()}
    if "rate" in numbers and rates:
        yield from claims.expect("rate of its ledger", {numbers["rate"]}, rates)
    if claims.is_trained and "examples" in numbers:
        batch, examples = cell["batch_size"], numbers["examples"]
        planned = max(1, round(cell["epochs"] * examples / batch))  # by the formula, not by the code that planned it
        yield from claims.expect("draws of its epochs", numbers["draws"], planned)
        for rate in rates:
            drawn = batch / examples / cell.get("dry_run", 1.0)  # as many draws as the whole run, of smaller batches
            yield from claims.expect("rate of B and N", rate, drawn, _LAST_PLACES)


def _noise(claims: Claims) -> Iterator[Finding]:
    """Every release of the ledger has the noise of one of the kinds that the plan had, and each kind occurs."""
    # Which kind is released in which draw follows from the optimizer's code, which need not be installed here.
    released = {noise for draw in claims.ledger.counts() for noise in draw.noises}
    if "noise" in claims.numbers:
        yield from claims.expect("noise of its ledger", set(claims.numbers["noise"].values()), released)


def _epsilon(claims: Claims) -> Iterator[Finding]:
    """The epsilon of the ledger, by the accountant of record and by a second one."""
    stated, accountant = float(claims.numbers["epsilon"]), claims.cell["accountant"]
    accountants.check_claim(claims.cell["delta"], accountant)
    yield from claims.expect("epsilon", stated, claims.spent(), _SAME)
    second = second_opinion(claims.ledger, claims.cell["delta"], accountant)
    if disagrees(stated, second, accountant):
        yield Finding(claims.where, "epsilon by a second accountant", stated, second)


def _search(claims: Claims) -> Iterator[Finding]:
    """The epsilon of the whole search, or of a run that is charged alone, which must not be above its target."""
    where, rule, delta, accountant = claims.where, claims.rule, claims.cell["delta"], claims.cell["accountant"]
    total = float(claims.numbers["epsilon" if rule is None else "epsilon_total"])
    if rule is not None:
        # A search that comes out with no runs has nothing to compute from, and is charged its target all the same.
        spent = claims.spent(rule) if claims.is_trained else claims.target
        yield from claims.expect("epsilon of the search", total, spent, _SAME)
        second = second_opinion(claims.ledger, delta, accountant, rule)
        if disagrees(total, second, accountant, rule, is_bound=not claims.is_trained):
            yield Finding(where, "epsilon of the search by a second accountant", total, second)
    # A run that is scaled down has the whole run's noise on smaller batches: it is meant to spend more.
    if claims.cell.get("dry_run", 1.0) == 1 and total > claims.target * (1 + _LAST_PLACES):
        yield Finding(where, "epsilon at most its target", claims.target, total)


def _released_score(claims: Claims) -> Iterator[Finding]:
    """A score that a search releases has the noise that it is charged for, and is what that noise makes of it."""
    released, rule = claims.numbers.get("released_score", {}), claims.rule
    if "noise" not in released:  # as in records that were published before it was kept
        return
    charged = rule.scores(claims.target) if rule else None
    if charged is None:
        yield Finding(claims.where, "released score", "one that is charged", "no rule by which it would be")
        return
    score_rule, budget = charged
    release = claims._replace(ledger=Ledger([Draw(1.0, (released["noise"],))]))
    if (spent := release.spent(score_rule)) > budget * (1 + _LAST_PLACES):
        yield Finding(claims.where, "epsilon of the released scores", budget, spent)
    examples = released["noise"] / released["std"]
    yield from claims.expect("noise of a share of records", examples, round(examples), 1e-9)
    held_out = claims.cell["workload"].get("validation")
    if isinstance(held_out, int) and held_out > 1:
        yield from claims.expect("records that are held out", round(examples), held_out)
    from dpopt.privacy.sampling import derive  # where torch is; nothing else here needs it

    score = claims.numbers[f"validation_{claims.numbers.get('score', 'accuracy')}"]
    normal = np.random.default_rng(derive("score", claims.numbers["run_id"])).standard_normal()
    yield from claims.expect("released score", released["value"], score + released["std"] * normal, 1e-9)


def _ends(claims: Claims) -> Iterator[Finding]:
    """The draws of the curve ascend to the last, whose entry is what the record says of the end."""
    # An accuracy is a whole number of test records, divided by how many these are.
    right = float(claims.numbers.get("tested", math.nan)) * float(claims.numbers.get("test_accuracy", math.nan))
    if math.isfinite(right):
        yield from claims.expect("test records that are right", right, round(right), 1e-9)
    if "right" in claims.numbers:
        bits = unpacked(claims.numbers["right"], claims.numbers["tested"])
        yield from claims.expect("test records that are right", right, float(bits.sum()), 1e-9)
    if not claims.numbers["draws"] or claims.curve is None:
        return
    draws = [entry["draw"] for entry in claims.curve]
    yield from claims.expect("last draw of its curve", claims.numbers["draws"], draws[-1] if draws else None)
    yield from claims.expect("order of its curve", draws, sorted(set(draws)))
    for entry in claims.curve[-1:]:  # its diagnostics are of a few draws, those of the record of the whole run
        for key in entry.keys() & claims.numbers.keys() - {"diagnostics"}:
            yield from claims.expect(f"{key} at the end of its curve", claims.numbers[key], entry[key])


_CHECKS = (_stated, _draws, _noise, _epsilon, _search, _released_score, _ends)


def second_opinion(ledger: Ledger, delta: float, accountant: str, rule: Selection | None = None) -> float | None:
    """Epsilon by a tight accountant that is not `accountant`; None where it gives none, or nothing is spent.

    With the rule of a search whose runs leave `ledger`, it is what they spend together, or a lower bound on that.
    """
    share = rule.share if isinstance(rule, Simulated) else 1.0
    match rule:
        case Composed(runs):
            ledger = repeated(ledger, runs)
        case After(spent):
            ledger = spent + ledger
        # The best of a random number of runs has no accountant but Renyi divergences. It costs at least one run.
    second = _tight(accountants.events(ledger), delta, "pld" if accountant == "prv" else "prv")
    return None if second is None else second / share


def disagrees(
    claimed: float, second: float | None, accountant: str, rule: Selection | None = None, is_bound: bool = False
) -> bool:
    """True if a claim lies further from a second opinion than the errors of both explain.

    Args:
        claimed, accountant: epsilon by the accountant of record.
        second: of `second_opinion`; with None nobody disagrees.
        rule: of the search that both are about, if they are.
        is_bound: the second opinion is a lower bound, above which a claim may lie, as it is of a random number of runs.
    """
    if second is None:
        return False
    # A rule that takes a single run to spend a share of the search divides both by it, and their errors with them.
    # A bound that is not tight may lie far above the truth, but no bound may lie below it.
    slack = _ABSOLUTE / (rule.share if isinstance(rule, Simulated) else 1.0) + _RELATIVE * second
    is_bound = is_bound or isinstance(rule, BestOf) or not accountants.ACCOUNTANTS[accountant].is_tight
    return claimed < second - slack or (not is_bound and claimed > second + slack)


@lru_cache(maxsize=4096)  # the seeds of a row leave one ledger, and a tight bound takes seconds
def _tight(spent: tuple[Event, ...], delta: float, accountant: str) -> float | None:
    ledger = Ledger()
    for rate, noise, count in spent:
        ledger.append(Draw(rate, (noise,)), count)
    if not spent:
        return None
    try:
        second = accountants.epsilon(ledger, delta, accountant)
    except (ArithmeticError, ValueError, RuntimeError, MemoryError):  # numerically out of its reach
        return None
    return second if math.isfinite(second) else None
