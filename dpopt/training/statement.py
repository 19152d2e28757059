"""The privacy statement of a run, in plain English and as data.

It answers what NIST SP 800-226 (2025), Ponomareva et al. 2023 ("How to DP-fy ML", Section 5.3.3) and TensorFlow
Privacy's `compute_dp_sgd_privacy_statement` ask of a claim: the setting, the unit of privacy, which data sets are
neighbours, which accesses to the data are covered, what may be published, how it was accounted, and what is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from decimal import MAX_EMAX, ROUND_CEILING, Context, Decimal
from html import escape
from typing import Any

from dpopt.errors import ConfigError
from dpopt.privacy import accountants
from dpopt.privacy.ledger import UNITS, Ledger
from dpopt.training.record import Record, Stated

_UNKNOWN = (
    "Nothing is known of other runs on these data: choices made by looking at them cost more than is stated here.",
)
_NONE = (
    "Whoever made this statement says that there was no other run on these data, and no choice by looking at them.",
)
_ROUNDED = (
    "The last digits of floating-point numbers: the guarantee is proved for real numbers, and the noise is rounded."
)
_ON_THE_GRID = (
    "Floating-point numbers: the guarantee is proved for real numbers. Each release is rounded to a public grid, but "
    "noise and sum are rounded before: a coordinate m standard deviations from zero is beside its place on the grid "
    "with a probability of about (3 + 2m) / 1000 at most."
)
"""Of float32 noise; the reasons are in `docs/guide/sharp_edges.md`."""
_DIGITS = 4
"""Significant digits of epsilon in the text; it is rounded up."""


@dataclass(frozen=True, kw_only=True)
class Statement(Stated):
    """A run's privacy; `str` gives the text.

    Attributes:
        private: whether there is a guarantee at all.
        unit: of privacy, its ledger's: what one neighbouring data set has more than the other.
        adjacency, sampling: which data sets are neighbours, and how a draw is made.
        epsilon, delta: what the run spent, recomputed from its ledger.
        epsilon_target: what it was to spend at most.
        accountant: by which epsilon was computed.
        draws, rate, examples, batch_size, epochs: number of draws, probability with which a record is in one, number of
            training records, expected number in a draw, and expected number of draws with a record.
        noise: noise multiplier (standard deviation / L2 sensitivity) of each kind of release.
        optimizer: as it was given.
        status: how the run ended.
        tuned: what was chosen by looking at the data and is not in epsilon, in sentences.
        not_covered: what else is not in epsilon, in sentences.
        versions: of the packages that trained.
        unused: parameters that the loss never uses.
        unit_rows: rows of a person that count at most, where the unit is a person; else 0.
        unit_column: the name of that unit: the column that says whose row it is.
        clip: the most that a record adds to a sum of gradients, as L2 norm; NaN where it is not one number.
        defaults: arguments that nobody chose.
        seed_is_secret: nobody knows the seed, which is kept nowhere.
        data, date, weights_sha256: the training data, the day of the end (UTC), the SHA-256 of `model.safetensors`;
            empty where they are not known, or the model is not saved.
        draws_planned: the draws of a run that was stopped early, had it gone on; else 0.
        draws_before: the draws of earlier runs on the same records, which epsilon counts.
    """

    private: bool
    tuned: tuple[str, ...]
    not_covered: tuple[str, ...]

    @classmethod
    def of(cls, record: Mapping[str, Any], ledger: Ledger, tuned: Sequence[str] | None = None) -> Statement:
        """The statement of the run that left `record` and `ledger`.

        Args:
            record, ledger: see `FitResult`.
            tuned: what was chosen by looking at these data, in sentences; empty says that nothing was. None takes what
                the record says, if it was saved with that; else it is not known.

        Raises:
            ConfigError: see `Record.of`; or the accountant is no upper bound, or cannot compute epsilon.
        """
        said = Record.of(record)
        accountants.check_claim(said.delta, said.accountant)
        if said.unit != ledger.unit.kind:
            raise ConfigError("ledger", str(ledger.unit), f"the record is of the unit {said.unit}")
        tuned = said.tuned if tuned is None else tuned
        # Not the record's number: a statement is about what is charged.
        epsilon = accountants.epsilon(ledger, said.delta, said.accountant)
        of_record = {field.name: getattr(said, field.name) for field in fields(Stated)}
        of_run: dict[str, Any] = {
            "private": math.isfinite(epsilon),
            "unit": ledger.unit.kind,
            "unit_column": ledger.unit.name,
            "adjacency": UNITS[ledger.unit.kind].adjacency,
            "epsilon": epsilon,
            "status": ", ".join(filter(None, [said.status, said.doubt])),
            "tuned": _UNKNOWN if tuned is None else (tuned,) if isinstance(tuned, str) else tuple(tuned) or _NONE,
            "not_covered": tuple(_not_covered(said, ledger.unit.kind, any(key.startswith("test_") for key in record))),
        }
        return cls(**of_record | of_run)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        none = (
            "There is NO privacy guarantee: releases had no noise, so epsilon is infinite.",
            "The model may hold training records, and is to be protected as they are.",
        )
        return "\n".join((*(self._guarantee() if self.private else none), *self._run()))

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(str(self))}</pre>'

    def _guarantee(self) -> Iterator[str]:
        # As it was written: the float 1e-5 is a little more, and would be rounded up.
        delta, exact = Decimal(repr(self.delta)), Context(prec=20, Emax=MAX_EMAX)  # no float holds e to this power
        factor = _up(Decimal(self.epsilon).exp(exact), 3)
        # To be quoted alone, the sentence holds all that it depends on.
        limits = "" if self.seed_is_secret else ", for everyone who does not know the seed"
        if self.tuned != _NONE:
            chosen = "of which nothing is known" if self.tuned == _UNKNOWN else "see below"
            limits += f"; choices that looked at these data, {chosen}, are not counted"
        yield (
            f"In words: whether {UNITS[self.unit].was} among the training data changes the probability of anything "
            f"that the model may show by a factor of at most {factor} (e to the power of epsilon), but for a "
            f"probability of at most {_up(delta, 3)} (delta, {_up(delta * self.examples, 3)} of "
            f"1/{self.examples}){limits}."
        )
        yield (
            f"Guarantee: {self.unit}-level (epsilon, delta)-differential privacy, epsilon = {_up(self.epsilon)} at "
            f"delta = {_up(delta, 3)}. Training was to spend at most epsilon = {self.epsilon_target:g}."
        )
        yield f"Neighbouring data sets: {self.adjacency}."
        if self.unit_rows:
            whose = f"A person is a value of the column {self.unit_column}. " if self.unit_column else ""
            yield f"{whose}Of each person the first {self.unit_rows} rows count at most."
        yield (
            "Setting: central. Whoever trained held the training records; the guarantee is towards all who see what is "
            "published."
        )
        yield (
            "What may be published: the final model, all models on the way to it and all noised releases, together. "
            "What is computed from these alone costs nothing more."
        )
        earlier = f" and {self.draws_before} draws of earlier runs, whose own statements describe them"
        yield f"Accesses to the data that are covered: the draws of this run{earlier if self.draws_before else ''}."
        if self.draws_planned:
            yield (
                f"The run was stopped after {self.draws} of {self.draws_planned} draws. Whoever stopped it may have "
                f"looked at what was released, so epsilon is that of all {self.draws_planned} draws."
            )
        method = accountants.ACCOUNTANTS[self.accountant].method
        yield f"Accounting: {self.accountant}, {method}, from the run's ledger."
        yield f"Choices: {' '.join(self.tuned)}"
        yield "Not covered:"
        yield from (f"- {sentence}" for sentence in self.not_covered)

    def _run(self) -> Iterator[str]:
        norm = "" if math.isnan(self.clip) else f" (a gradient: by an L2 norm of C = {self.clip:g})"
        noise = ", ".join(f"{value:.{_DIGITS}g} ({kind})" for kind, value in self.noise.items())
        yield (
            f"Mechanism: {self.optimizer}; {self.draws} draws from {self.examples} {self.unit}s by "
            f"{self.sampling} sampling at rate {self.rate:.{_DIGITS}g}: an expected batch of "
            f"{self.batch_size:g} and {self.epochs:g} epochs. Each release is a sum of what was bounded for each "
            f"{self.unit}{norm}, with Gaussian noise; noise multiplier: {noise}."
        )
        if self.defaults:
            yield f"Defaults, which nobody chose for these data: {', '.join(self.defaults)}."
        yield f"Data: {self.data or 'not named'}, {self.examples} {self.unit}s. Trained: {self.date or 'not dated'}."
        if self.seed_is_secret:
            yield "Seed: a secret from the operating system, which was deleted when training ended."
        if self.weights_sha256:
            yield f"The statement holds for the weights with SHA-256 {self.weights_sha256} (model.safetensors)."
        if self.unused:
            names = ", ".join(self.unused)
            yield f"Parameters that the loss does not use, which are as they were before training: {names}."
        yield f"Status: {self.status}."
        yield f"Versions: {', '.join(f'{name} {number}' for name, number in self.versions.items())}."


def _not_covered(record: Record, unit: str, has_scores: bool) -> Iterator[str]:
    if not record.seed_is_secret:
        yield (
            "Anyone who knows the seed: it was given, and whoever knows it can compute the draws and the noise. "
            "Towards them there is no guarantee."
        )
    yield f"Several {unit}s at once, {UNITS[unit].several}: only the presence of a single {unit} is hidden as stated."
    yield f"The number of {unit}s, and the names of columns and classes: they are taken as public."
    yield "What was done before: cleaning, normalising, a vocabulary, pretrained weights."
    yield (
        "The trial before training, which looks at a few records without noise: that there was an error, a warning or "
        "the status no_signal."
    )
    # A test split is other people's data, whose scores are released without noise.
    if record.tested or has_scores:
        yield (
            f"Scores on test data, which is not among the {record.examples} {unit}s: they have no noise, and are in "
            "`private.json`, to be kept back."
        )
    if not record.isolated:
        yield (
            "An optimizer that means harm: it ran in the process that holds the data. What it was answered was "
            "private; that it read nothing else was not enforced."
        )
    yield _ON_THE_GRID if record.grid else _ROUNDED
    yield "How long the run took."


def _up(value: float | Decimal, digits: int = _DIGITS) -> str:
    # Rounded to nearest, a printed epsilon could be below the spent one.
    rounded = Context(prec=digits, rounding=ROUND_CEILING, Emax=MAX_EMAX).create_decimal(Decimal(value))
    return f"{rounded:f}" if 1e-3 <= rounded < 10**6 else f"{rounded.normalize():e}"
