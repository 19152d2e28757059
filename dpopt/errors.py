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
    """The error for a name that is not among `choices`: says the problem, the nearest name or what there is."""
    names, text = sorted(map(str, choices)), name if isinstance(name, str) else shown(name)
    # A beginning is meant more often than a name of like letters. 0.5: lower ones share but a few.
    begun = [each for each in names if len(text) > 2 and each.startswith(text)]
    near = begun or get_close_matches(text, names, n=1, cutoff=0.5)
    before = f"{problem}; " if problem else ""
    hint = f"did you mean {near[0]!r}? " if near else ""
    listed = "" if near and len(names) > 12 else f"known: {', '.join(names) or 'none'}"
    return ConfigError(field, name, f"{before}{hint}{listed}".rstrip())


class Held(Exception):
    """Another process runs the cell, or has finished it: leave it alone and look again later."""
