"""The ledger of a run: its unit, its draws, in order, the noise of every release; and the plan that a run is held to.

Accountants tell what a ledger costs. Its rate and its length follow from public numbers, as does the usual delta.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, Literal, NamedTuple

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.fields import MANY, Checked, Positive

_MOST_DRAWS = 2**53
"""The longest ledger: up to here, numbers of draws are numbers in double precision."""

_SEVERAL = (
    "one ledger has one unit: a record may move what was bounded for its person by twice the bound, and a person has"
    " many records; train all runs by the same `unit`"
)
_UNNAMED = (
    "persons without a name may be others in each run; where they are the same, each run says so by `unit_name`, or"
    " Ledger(earlier, Unit('person', NAME)) of an earlier one"
)


class Words(NamedTuple):
    """How texts speak of a unit: which data sets are neighbours, the unit as a subject, an example of several."""

    adjacency: str
    was: str
    several: str


UNITS = {
    "record": Words("add or remove one record", "any one record was", "such as all those of one person"),
    "person": Words(
        "add or remove all records of one person", "all records of any one person were", "such as a family"
    ),
}
"""The words for each kind of `Unit`."""


@dataclass(frozen=True)
class Unit(Checked):
    """The unit of privacy: whose contribution to a release is bounded, and whose presence epsilon is about.

    Attributes:
        kind: a record, or a person with all of their records.
        name: of persons, what tells them from other groups of records, such as the column that says whose each is.
            Those of two runs without a name are not the same.
    """

    kind: Literal["record", "person"] = "record"
    name: str = ""

    @classmethod
    def stated(cls, record: Mapping[str, Any]) -> Unit:
        """That of a run's record, for ledgers that were stored without one; ConfigError if it is none."""
        return cls(record.get("unit", "record"), record.get("unit_column", ""))

    @classmethod
    def of_all(cls, units: Sequence[Unit], where: str = "ledger") -> Unit:
        """The one unit of draws that are charged together, the record where there are none.

        Raises:
            ConfigError: names `where`: they have several, or nobody can know that they have one.
        """
        distinct = [*dict.fromkeys(units)] or [cls()]
        if len(distinct) > 1:
            raise ConfigError(where, " and ".join(map(str, distinct)), _SEVERAL)
        if len(units) > 1 and distinct == [cls("person")]:
            raise ConfigError(where, "person", _UNNAMED)
        return distinct[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()


@dataclass(frozen=True)
class Draw:
    """One Poisson subsample and everything that was released from it.

    Attributes:
        rate: probability with which each record joins the draw, in (0, 1].
        noises: noise multiplier (noise standard deviation / L2 sensitivity) of each release; 0 means not private.
    """

    rate: float
    noises: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError("Draw.rate", self.rate, "expected a probability in (0, 1]")
        for noise in self.noises:
            if not 0 <= noise <= sys.float_info.max:  # a whole number may be larger and no float
                raise ConfigError("Draw.noises", noise, "expected a finite noise multiplier >= 0")

    @property
    def effective_noise(self) -> float:
        """Noise multiplier of the one Gaussian release that this draw amounts to: 1/s^2 = sum of 1/s_j^2.

        Zero where any release is un-noised, infinity where nothing was released.
        """
        # Below it 1/s^2 is no number, and too little noise must never count as some.
        if any(noise < 1e-150 for noise in self.noises):
            return 0.0
        # Releases of one draw see one subsample, so they compose before amplification by subsampling.
        precision = math.fsum(noise**-2 for noise in self.noises)
        return precision**-0.5 if precision else math.inf


class Ledger:
    """An ordered, append-only list of draws of one unit, stored run-length encoded; equal if unit and all draws are.

    Args:
        draws: the first ones; a ledger is copied.
        unit: that of every draw; by default that of `draws` if they are a ledger, else the record. A ledger of
            persons without a name can be given one.

    Raises:
        ConfigError: `draws` are a ledger of persons, and `unit` is the record.
    """

    def __init__(self, draws: Iterable[Draw] = (), unit: Unit | None = None) -> None:
        of_draws: Unit | None = getattr(draws, "unit", None)
        self.unit: Unit = unit or of_draws or Unit()
        if of_draws and of_draws.kind == "person" and self.unit.kind == "record":
            raise ConfigError("ledger", str(of_draws), "a record costs more in a run by persons than its ledger says")
        self._runs: list[tuple[Draw, int]] = []
        self._draws = 0
        for draw in draws:
            self.append(draw)

    def append(self, draw: Draw, count: int = 1) -> None:
        """Add `count` equal draws at the end; ConfigError for fewer than one, or too many in all."""
        if not 1 <= count <= _MOST_DRAWS - self._draws:
            raise ConfigError("draws", count, f"expected 1 to {_MOST_DRAWS:,} in all")
        self._draws += count
        # Equal draws one after the other are one entry, so that ten million of them cost no more than one.
        if self._runs and self._runs[-1][0] == draw:
            count += self._runs.pop()[1]
        self._runs.append((draw, count))

    def counts(self) -> Counter[Draw]:
        """The number of times that each distinct draw occurs: accountants need no more, as the order does not count."""
        total: Counter[Draw] = Counter()
        for draw, count in self._runs:
            total[draw] += count
        return total

    def starts_with(self, other: Ledger) -> bool:
        """True if this ledger begins with the draws of `other`, which are of its unit."""
        return not other or self.first(len(other)) == other

    def first(self, draws: int) -> Ledger:
        """The ledger of the first `draws` draws, or of all where there are fewer."""
        head = Ledger(unit=self.unit)
        for draw, count in self._runs:
            if len(head) < draws:
                head.append(draw, min(count, draws - len(head)))
        return head

    def __add__(self, other: Ledger) -> Ledger:
        """The ledger of two runs on the same data, one after the other; ConfigError as `Unit.of_all`."""
        joined = Ledger(unit=Unit.of_all([each.unit for each in (self, other) if each] or [self.unit]))
        for draw, count in self._runs + other._runs:
            joined.append(draw, count)
        return joined

    def __iter__(self) -> Iterator[Draw]:
        for draw, count in self._runs:
            yield from repeat(draw, count)

    def __len__(self) -> int:
        return self._draws

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and (self._runs, self.unit) == (other._runs, other.unit)

    def __repr__(self) -> str:
        return f"Ledger({len(self)} draws, {len(self.counts())} distinct, unit {self.unit})"

    def to_json(self) -> str:
        """Canonical JSON: the unit but for the record, the distinct draws, the runs as [index of the draw, count].

        Floats survive exactly.
        """
        unit = {} if self.unit == Unit() else {"unit": asdict(self.unit)}
        distinct = {draw: index for index, draw in enumerate(dict(self._runs))}
        draws = [{"rate": draw.rate, "noises": draw.noises} for draw in distinct]
        runs = [[distinct[draw], count] for draw, count in self._runs]
        return json.dumps({"schema": 1, **unit, "draws": draws, "runs": runs}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, unit: Unit | None = None) -> Ledger:
        """The ledger that `to_json` wrote, of `unit` if it says none; ConfigError if the text is no such ledger."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError("ledger", text[:60], f"not a ledger: {error}") from error
        return cls.of(content, unit)

    @classmethod
    def of(cls, content: Any, unit: Unit | None = None) -> Ledger:
        """The ledger whose JSON was read to `content`; see `from_json`."""
        try:
            # By their names: a key that this version does not know is refused.
            draws = [Draw(**{**entry, "noises": tuple(entry["noises"])}) for entry in content["draws"]]
            if more := content.keys() - {"schema", "unit", "draws", "runs"}:
                raise ValueError(f"it has the keys {sorted(more)}")
            ledger = cls(unit=Unit(**content["unit"]) if "unit" in content else unit)
            for index, count in content["runs"]:
                # Python would count a negative index from the end, and take 2.0 for a number of draws.
                if not isinstance(count, int) or count < 1 or index < 0:
                    raise ValueError(f"[{index!r}, {count!r}] is no draw's number and a number of draws")
                ledger.append(draws[index], count)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError("ledger", str(content)[:60], f"not a ledger: {error}") from error
        return ledger


@dataclass(frozen=True)
class Plan:
    """The releases that a run may make, and their noise; calibration makes one, and an oracle holds a run to it.

    Attributes:
        noise: noise multiplier (noise std / L2 sensitivity) for each kind of release: "gradient", "losses", "counts".
        ledger: the draws that the run will leave.
        epsilon: what `ledger` spends at `delta` by `accountant`; at most the target, unless the plan is scaled down.
        rate: Poisson sampling probability q.
        draws: number of draws T.
        dimension: number d of trained parameters.
        delta: the target's delta.
        accountant: name of the accountant that epsilon is stated by.
    """

    noise: Mapping[str, float]
    ledger: Ledger
    epsilon: float
    rate: float
    draws: int
    dimension: int
    delta: float
    accountant: str


class NonPrivate(Plan):
    """The plan of a run at epsilon = infinity: same draws, same clipping, no noise; its ledger says so."""


def sampling_rate(batch_size: float, examples: int) -> float:
    """Q = B/N.

    Raises:
        ConfigError: B is not in [1, N].
    """
    if not 1 <= batch_size <= examples:
        raise ConfigError("batch_size", batch_size, f"expected 1 to {examples}, the number of training records")
    return batch_size / examples


def number_of_draws(epochs: float, batch_size: float, examples: int) -> int:
    """T = epochs N / B, rounded.

    Raises:
        ConfigError: it is no number, none, or larger than `fields.MANY`.
    """
    fields.convert(epochs, Positive, "epochs", {})
    draws = epochs * examples / batch_size
    # Before `round`, which fails with an error of its own on a product that overflows.
    if draws > MANY:
        raise ConfigError("epochs", epochs, f"makes {draws:.3g} draws, expected at most {MANY:.0e}")
    if round(draws) < 1:
        least = batch_size / examples
        raise ConfigError("epochs", epochs, f"makes no draw: one of B = {batch_size:g} takes {least:.3g} epochs")
    return round(draws)


def default_delta(examples: int) -> float:
    """N^-1.1, where no delta is given: below 1/N, at which publishing one record whole would be private."""
    return examples**-1.1
