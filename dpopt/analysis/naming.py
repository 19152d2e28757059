"""Names of workloads in tables; needs no pandas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any


def workload_names(specs: list[dict[str, Any]]) -> dict[str, str]:
    """A name for each distinct workload, by its JSON: where several share the registered name, with what differs.

    How many records are held out is part of the name only where nothing else tells two workloads apart.
    """
    distinct = {json.dumps(spec, sort_keys=True): spec for spec in specs}
    short = {key: _named(spec, distinct.values(), {"validation"}) for key, spec in distinct.items()}
    shared = Counter(short.values())
    return {
        key: short[key] if shared[short[key]] == 1 else _named(spec, distinct.values())
        for key, spec in distinct.items()
    }


def _named(spec: dict[str, Any], all_specs: Iterable[dict[str, Any]], without: Collection[str] = ()) -> str:
    others = [other for other in all_specs if other["name"] == spec["name"]]
    differing = [key for key, value in spec.items() if any(other.get(key) != value for other in others)]
    shown = [key for key in differing if key not in without and spec[key] is not None]  # None: as the model has it
    given = ", ".join(f"{key}={spec[key]}" for key in shown)
    return f"{spec['name']}({given})" if given else spec["name"]
