"""Scores as tables and figures show them: accuracies in percent, any other score as it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd

_NAMES = {
    "bleu": "BLEU",
    "cider": "CIDEr",
    "log_likelihood": "log-likelihood (nats)",
    "meteor": "METEOR",
    "nist": "NIST",
    "nll": "NLL (nats)",
    "rouge_l": "ROUGE-L",
}
"""Labels of scores whose usual name is not their key with blanks."""


class Shown(NamedTuple):
    """The look of one score: its label with the unit, what a stored value is multiplied by, decimals in a table."""

    label: str
    factor: float
    decimals: int

    @property
    def points(self) -> str:
        """The unit of a difference."""
        return "points" if self.factor == 100 else self.label

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest value that there can be, as stored: two differ by as much at most."""
        return (0.0, 1.0) if self.factor == 100 else (-math.inf, math.inf)

    def interval(self, low: float, high: float, form: str = "") -> str:
        """Two ends in brackets; nothing where there are none."""
        if not math.isfinite(low + high):
            return ""
        return f"[{self.factor * low:{form}.{self.decimals}f}, {self.factor * high:{form}.{self.decimals}f}]"

    def difference(self, mean: float, low: float, high: float) -> str:
        """A difference with the interval around it; a dash where there is none."""
        if math.isnan(mean):
            return "-"
        return f"{self.factor * mean:+.{self.decimals}f} {self.interval(low, high, '+')}".strip()

    def text(self, mean: float, std: float = math.nan) -> str:
        """A mean, with the standard deviation where there is one; a mean that is not finite says so."""
        spread = "" if math.isnan(std) else f" ± {self.factor * std:.{self.decimals}f}"
        return f"{self.factor * mean:.{self.decimals}f}{spread}" if math.isfinite(mean) else "not finite"


def without_score(runs: pd.DataFrame) -> str:
    """For how many test records released runs have outputs that are not finite, in a sentence; empty for none."""
    count = runs["test_unscored"].sum() if "test_unscored" in runs else 0
    if not count:
        return ""
    tested = f" of {runs['tested'].sum():,.0f}" if runs["tested"].notna().all() else ""
    return f"{count:,.0f}{tested} test records without a finite score"


def shown(score: str) -> Shown:
    """The look of the score of this name; names that end in "accuracy" are shares."""
    name = _NAMES.get(score, score.replace("_", " "))
    return Shown(f"{name} (%)", 100.0, 1) if score.endswith("accuracy") else Shown(name, 1.0, 3)
