"""What HyFreeDP's published noise rules claim to spend, and what runs with that noise do spend, as a frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Literal, get_args

import pandas as pd

from dpopt.privacy.accountants import epsilon as spent
from dpopt.privacy.ledger import Draw, Ledger
from dpopt.privacy.published import PublishedNoise, hyfreedp_noise
from dpopt.sizes import default_delta

EXAMPLES, BATCH_SIZE, DRAWS = 50_000, 1_000, 250
DELTA = default_delta(EXAMPLES)
EPSILON = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
PROBE_EVERY = (1, 5, 20)
Rule = Literal["independent", "additive"]
Batch = Literal["same", "fresh"]
"""Whether the three probes of a round look at the gradient's own draw, or share one further draw."""


def frame(
    epsilon: Sequence[float] = EPSILON, probe_every: Sequence[int] = PROBE_EVERY, accountant: str = "rdp"
) -> pd.DataFrame:
    """One row for each rule, probe batch, claimed epsilon and number K of draws between probe rounds.

    The run: 50,000 records, B = 1,000, 250 gradients, delta = N^-1.1, gradient noise 1.01 times plain DP-SGD's.

    Args:
        epsilon: what the rules claim.
        probe_every: values of K.
        accountant: of both numbers; the paper's is RDP.

    Returns:
        `rule`, `batch`, `epsilon_claimed`, `probe_every`, `epsilon_true`, and the noise multipliers that the rule sets,
        `noise_gradient` and `noise_losses`.
    """
    rows = []
    for rule, claimed, every in product(get_args(Rule), epsilon, probe_every):
        noise = hyfreedp_noise(
            rule=rule,
            rate=BATCH_SIZE / EXAMPLES,
            draws=DRAWS,
            epsilon=claimed,
            delta=DELTA,
            probe_every=every,
            accountant=accountant,
        )
        for batch in get_args(Batch):
            truth = spent(ledger(noise.gradient, noise.losses, every, batch), DELTA, accountant)
            rows.append(_row(rule, batch, claimed, every, truth, noise))
    return pd.DataFrame(rows)


def ledger(gradient: float, losses: float, probe_every: int, batch: Batch) -> Ledger:
    """What a run of `DRAWS` gradients leaves.

    Args:
        gradient, losses: noise multipliers of the gradient and of each of a round's three losses.
        probe_every: K; there are DRAWS / K rounds, rounded up.
        batch: see `Batch`.
    """
    rate, rounds, probes = BATCH_SIZE / EXAMPLES, math.ceil(DRAWS / probe_every), (losses,) * 3
    probed = (gradient, *probes) if batch == "same" else probes
    plain = DRAWS - rounds if batch == "same" else DRAWS
    made = Ledger()
    made.append(Draw(rate, probed), rounds)
    if plain:
        made.append(Draw(rate, (gradient,)), plain)
    return made


def _row(rule: str, batch: str, claimed: float, every: int, truth: float, noise: PublishedNoise) -> dict[str, object]:
    return {
        "rule": rule,
        "batch": batch,
        "epsilon_claimed": claimed,
        "probe_every": every,
        "epsilon_true": truth,
        "noise_gradient": noise.gradient,
        "noise_losses": noise.losses,
    }
