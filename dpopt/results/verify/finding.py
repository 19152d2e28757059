"""What `dpopt verify` finds: a claim, and what it is when it is made again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpopt.errors import cut


class Finding(NamedTuple):
    """A claim that does not hold.

    Attributes:
        where: run id or file.
        what: was claimed.
        claimed: the claim.
        found: what was found in its place.
    """

    where: str
    what: str
    claimed: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: claimed {_short(self.claimed)}, found {_short(self.found)}"


@dataclass
class Verified:
    """What became of a verification.

    Attributes:
        checked: how many of each kind of thing were looked at.
        findings: the claims that do not hold.
        remarks: what is no mismatch and yet limits what was verified, or what it is worth: a line each.
    """

    checked: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def expect(where: str, what: str, claimed: Any, found: Any) -> Iterator[Finding]:
    """A finding where the two differ; not a number equals itself, and the two infinities of JSON are one."""
    if claimed != found and not (_is_nan(claimed) and _is_nan(found)):
        yield Finding(where, what, claimed, found)


def expect_close(
    where: str, what: str, claimed: float, found: float, relative: float, absolute: float = 0.0
) -> Iterator[Finding]:
    """A finding where two numbers differ by more than both tolerances."""
    if not (math.isclose(claimed, found, rel_tol=relative, abs_tol=absolute) or (_is_nan(claimed) and _is_nan(found))):
        yield Finding(where, what, claimed, found)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _short(value: Any) -> str:
    return cut(f"{value}", 400 if isinstance(value, Exception) else 120)  # an error ends with its reason
