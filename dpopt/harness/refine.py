"""Further points of a search, proposed by Optuna around the best of its grid.

Each search is a study in the journal of its suite: first the points of the grid with their scores, then what was asked
for, in rounds. Nothing is asked for while a round has no scores, so a suite that is planned again has the same cells.
A proposal depends on the scores before it and on the study's name alone: a journal that was lost comes again. Processes
that plan one suite take turns with its journal, so that each sees what the others have asked for.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dpopt import files
from dpopt.errors import ConfigError, Held
from dpopt.privacy.sampling import derive
from dpopt.store import leases

Point = dict[str, Any]
Ends = dict[str, tuple[Any, Any]]

ROUND = 5
"""Points proposed at once. On made-up surfaces of accuracy over (C, B, eta), with the noise of a validation set, 20
points after a grid of 18 do as well in rounds of 5 as one by one, and worse in one round; after a grid of 96 all do
alike."""
POLL = 0.1
"""Seconds between two looks at whether the journal is free."""


class Journal(NamedTuple):
    """The journal of a suite.

    Attributes:
        path: its file.
        storage: Optuna's, which keeps it there.
    """

    path: Path
    storage: Any


def ends(points: Sequence[Point]) -> Ends:
    """What a grid can be refined in: names whose values are several positive numbers, with the smallest and largest.

    The ends are limits: whoever wrote the grid chose batches that fit into memory and decays below 1.
    """
    columns = {name: [point[name] for point in points] for name in points[0]}
    return {
        name: (min(values), max(values))
        for name, values in columns.items()
        if all(map(_is_positive, values)) and min(values) < max(values)
    }


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Be the only process at the journal `path`, without a last line that a kill has cut short; waits for the others.

    It is a lease, as cells have: results may lie on a file system without locks.
    """
    held = path.with_suffix(".lease")
    watch = leases.Watch(held)
    while True:
        try:
            lease = leases.Lease(held)
            break
        except Held:
            while not watch.try_free():
                time.sleep(POLL)
    with lease:
        mended(path)  # the next line would be lost with the one that was cut short
        yield


def open_journal(path: Path) -> Journal:
    """The journal in `path`, which is made where there is none.

    Raises:
        ConfigError: Optuna is not installed, or the file is none of its journals.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("refine", "optuna", "is not installed: pip install 'dpopt[refine]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with alone(path):
        return Journal(path, _storage(path))


def _storage(path: Path) -> Any:
    from optuna.storages import journal

    try:
        return journal.JournalStorage(journal.JournalFileBackend(str(path)))
    except Exception as error:  # whatever it stumbles over, the file is at fault
        allowed = f"it cannot be read ({type(error).__name__}: {error}); move it away, and it is made again"
        raise ConfigError("refine", str(path), allowed) from error


def proposals(
    journal: Journal,
    name: str,
    grid: Sequence[tuple[Point, float]],
    number: int,
    score: Callable[[int, Point], float | None],
) -> list[Point]:
    """The points proposed so far, in their order: all `number` of them, or those up to the first unfinished round.

    Numbers are sought between the ends of the grid, evenly on a logarithmic scale to begin with, and have 3 significant
    digits; everything else stays as it is in the grid's best point.

    Args:
        journal: of `open_journal`.
        name: of the study: the same for the same grid and scores.
        grid: points with their scores, larger is better; -inf for a run that diverged.
        number: how many to propose.
        score: index and point of a proposal -> its score, or None while there is none.
    """
    limits, best = ends([point for point, _ in grid]), max(grid, key=lambda pair: pair[1])[0]
    held = {key: value for key, value in best.items() if key not in limits}
    beside = [(point, score) for point, score in grid if all(point[key] == value for key, value in held.items())]
    with alone(journal.path):
        study, space = _study(journal.storage, name, beside, limits)
        while True:
            trials = study.get_trials(deepcopy=False)[len(beside) :]
            points = [held | _rounded(trial.params, limits) for trial in trials]
            is_enough = len(trials) >= number
            is_round = is_enough or len(trials) % ROUND == 0
            is_waiting = is_round and not _tell(study, trials, points, score)
            if is_enough or is_waiting:
                return points[:number]
            _ask(study, space, len(trials))


def _study(storage: Any, name: str, grid: list[tuple[Point, float]], limits: Ends) -> tuple[Any, dict[str, Any]]:
    """The study, with the grid as its first trials, and the space that it searches."""
    import optuna
    from optuna.distributions import FloatDistribution, IntDistribution

    space: dict[str, Any] = {
        key: (IntDistribution if isinstance(low, int) else FloatDistribution)(low, high, log=True)
        for key, (low, high) in limits.items()
    }
    if name in optuna.get_all_study_names(storage):
        study = optuna.load_study(storage=storage, study_name=name)
    else:  # to create it writes a line, also where there is one
        study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
    for point, value in grid[len(study.get_trials(deepcopy=False)) :]:  # those that a plan which was killed left out
        params = {key: point[key] for key in space}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=value))
    return study, space


def _ask(study: Any, space: dict[str, Any], index: int) -> None:
    """Add a proposal to the study.

    Asking writes a line of the journal for each number, and a kill between them would leave a part of a point. So a
    copy of the study is asked, and the point added as one line.
    """
    import optuna

    copy = optuna.create_study(direction="maximize", sampler=_sampler(study.study_name, index))
    copy.add_trials(study.get_trials(deepcopy=False))
    running = {"state": optuna.trial.TrialState.RUNNING, "distributions": space}
    study.add_trial(optuna.trial.create_trial(params=copy.ask(space).params, **running))


def _sampler(name: str, index: int) -> Any:
    """A tree-structured Parzen estimator, made anew for each proposal: its random numbers do not depend on a restart.

    It joins the numbers into one density, and counts what was asked for and has no score as bad, lest a round repeats
    itself. The grid replaces its random start.
    """
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls two of the options experimental
        seed = derive("refine", name, index) % 2**32
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=1)


def _tell(study: Any, trials: list[Any], points: list[Point], score: Callable[[int, Point], float | None]) -> bool:
    """Tell the scores that have come in, each once; whether now all have."""
    is_complete = True
    for index, (trial, point) in enumerate(zip(trials, points, strict=True)):
        if trial.state.is_finished():
            continue
        value = score(index, point)
        is_complete &= value is not None
        if value is not None:
            study.tell(trial.number, value, skip_if_finished=True)
    return is_complete


def _rounded(point: Point, limits: Ends) -> dict[str, Any]:
    """Numbers of 3 significant digits, none beyond its end."""
    return {
        key: value if isinstance(low, int) else min(max(float(f"{value:.3g}"), low), high)
        for key, (low, high) in limits.items()
        for value in [point[key]]
    }


def mended(journal: Path) -> Path:
    """A journal without a last line that a kill has cut short."""
    content = journal.read_bytes() if journal.exists() else b""
    if not content.endswith(b"\n") and content:
        files.write(journal, content[: content.rfind(b"\n") + 1])
    return journal
