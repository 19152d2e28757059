"""One kind of error for bad input: it names the field, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """A value that the user gave cannot be used; raised before any work starts."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: {shown(value)} cannot be used; {allowed}")
        self._parts = field, value, allowed
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return ConfigError, self._parts  # it has to arrive from another process


class Missing(ConfigError):
    """Data, weights or a package that a run needs and that are not on this machine.

    Args:
        kind, name: "data", "weights" or "package", and its name.
        hub: the hub's name for it where it is loaded from there when it is first needed; else empty: no run can begin.
    """

    def __init__(self, field: str, value: object, allowed: str, kind: str, name: str, hub: str = "") -> None:
        super().__init__(field, value, allowed)
        self.kind, self.name, self.hub = kind, name, hub


def shown(value: object) -> str:
    """`value` as an error shows it, whatever it is."""
    try:
        return cut(repr(value))
    except Exception:  # numbers of thousands of digits have none, and a foreign class may raise anything
        return f"a {type(value).__name__} that cannot be shown"


def cut(text: str, most: int = 400) -> str:
    """`text` without its middle where it is longer than about `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def unknown(field: str, name: object, choices: Iterable[object], problem: str = "") -> ConfigError:
    """The error for a name that is not among `choices`: says the problem, and the nearest names."""
    names, asked = sorted(map(str, choices)), name if isinstance(name, str) else shown(name)
    # "eps" is epsilon, and not epochs; "ghost" is opacus_ghost.
    longer = [each for each in names if len(asked) > 2 and f"_{asked}" in f"_{each}"]
    # 0.6: lower ones suggest names that share but a few letters.
    near = longer if len(longer) == 1 else get_close_matches(asked, names, n=1, cutoff=0.6)
    listed = f"known: {', '.join(names) or 'none'}"
    if len(names) > 50:  # nobody reads all
        listed = f"the nearest of {len(names)}: {', '.join(get_close_matches(asked, names, n=3, cutoff=0))}"
    hint = f"did you mean {near[0]!r}?" if near else listed
    return ConfigError(field, name, f"{problem}; {hint}" if problem else hint)


class Held(Exception):
    """Another process runs the cell, or has finished it: leave it alone and look again later."""
