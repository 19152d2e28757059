"""Diagnostics of the gradients of runs, as frames. Not private: see `dpopt.study.diagnostics`."""

from __future__ import annotations

import pandas as pd

from dpopt.results.frames import GROUP
from dpopt.store.runs import Store

_PLACE = [*GROUP, "seed", "score"]


def curves(store: Store, selected: pd.DataFrame) -> pd.DataFrame:
    """One row for each curve entry of the selected runs that holds diagnostics.

    Returns:
        The run's place in the suite; `draw`, `epoch`; `q5`, `q50`, ... of the gradient norms since the entry before;
        `clipped`, the share of them above the run's bound; and where it was estimated `best_clip`, with `best_bias`,
        `best_noise`, `own_bias` and `own_noise`: MSE(C) of the mean gradient at that bound and at the run's own.
    """
    rows = []
    for run in selected.to_dict("records"):
        place = {key: run[key] for key in _PLACE}
        for entry in store.curve(run["run_id"]):
            if isinstance(noted := entry.get("diagnostics"), dict):
                parts = {name: noted.get(name, {}) for name in ("best", "own")}
                errors = {f"{name}_{key}": value for name, part in parts.items() for key, value in part.items()}
                errors.pop("own_C", None)  # the frame of runs has it, as `clip`
                if "best_C" in errors:
                    errors["best_clip"] = errors.pop("best_C")
                numbers = noted.get("norms", {}) | errors | {"clipped": noted.get("clipped")}
                rows.append(place | {"draw": entry["draw"], "epoch": entry.get("epoch")} | numbers)
    return pd.DataFrame(rows)


def classes(store: Store, selected: pd.DataFrame) -> pd.DataFrame:
    """One row for each class and bound C of the selected runs that hold class weights.

    Returns:
        The run's place in the suite; `label_of_class`; its median gradient `norm`; `bound`, and the `weight` w_y(C)
        that is left of it, over the last quarter of the run.
    """
    rows = []
    for run in selected.to_dict("records"):
        noted = store.record(run["run_id"]).get("diagnostics", {})
        place = {key: run[key] for key in _PLACE}
        for bound, weights in noted.get("class_weights", {}).items():
            for y, (weight, norm) in enumerate(zip(weights, noted["class_norms"], strict=True)):
                rows.append(place | {"label_of_class": y, "norm": norm, "bound": float(bound), "weight": weight})
    return pd.DataFrame(rows)
