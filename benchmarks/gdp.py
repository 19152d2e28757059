"""The budget that mu-GDP states for a run, and the one that the run spends, as a figure: mu-GDP is no upper bound.

    python benchmarks/gdp.py FOLDER

takes two minutes and writes `fig_gdp.svg` and `.png`. Eq. 9 of the HyFreeDP paper (Liu and Bu, "Towards
hyperparameter-free optimization with differential privacy", ICLR 2025) states a budget by a central limit theorem for
many draws (Bu, Dong, Long and Su 2020), and as if each loss had a subsample of its own. It lies here, not in the
package, so that no run can be accounted by it.
"""

import math
import sys
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from dpopt.audit.estimators import gaussian_epsilon
from dpopt.privacy import Draw, Ledger, epsilon
from dpopt.results import figures
from dpopt.results.drawing import GREY, styles_of

RATE, DELTA, PROBE_EVERY = 0.01, 1e-5, 5
DRAWS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
NOISE, LOSSES = (0.6, 0.8, 1.0, 2.0, 4.0), (1.0, 2.0, 4.0, 8.0)
"""Noise multipliers: of DP-SGD's gradient; of each of three probed losses, beside a gradient's of 1."""


def stated(rate, draws, noise, losses=math.inf, probe_every=PROBE_EVERY, delta=DELTA):
    """The epsilon that Eq. 9 states, no bound; `losses`: the noise of three losses every `probe_every` draws."""
    each = math.expm1(1 / noise**2) + 3 / probe_every * math.expm1(1 / losses**2)
    return gaussian_epsilon(rate * math.sqrt(draws * each), delta)


def spent(rate, draws, noise, losses=math.inf, probe_every=PROBE_EVERY, delta=DELTA):
    """The epsilon of such a run by its privacy loss distribution; the losses come from the gradient's draw."""
    rounds = 0 if math.isinf(losses) else math.ceil(draws / probe_every)
    ledger = Ledger()
    for noises, count in (((noise, *[losses] * 3), rounds), ((noise,), draws - rounds)):
        if count:
            ledger.append(Draw(rate, noises), count)
    return epsilon(ledger, delta)


def measured():
    """A row for each run: DP-SGD with each of `NOISE`, HyFreeDP with each of `LOSSES`."""
    runs = [(noise, math.inf) for noise in NOISE] + [(1.0, losses) for losses in LOSSES]
    rows = [(*run, draws, stated(RATE, draws, *run), spent(RATE, draws, *run)) for run, draws in product(runs, DRAWS)]
    return pd.DataFrame(rows, columns=["noise", "losses", "draws", "stated", "spent"])


def draw(frame):
    """DP-SGD's budgets, and the stated share of the spent one for DP-SGD and HyFreeDP; below 1 too little is stated."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), sharex=True, layout="constrained")
    plain, probed = (frame[frame["losses"].map(math.isinf) == is_plain] for is_plain in (True, False))
    for column, dash in {"spent": "-", "stated": ":"}.items():
        lines(left, plain, "noise", "σ", plain[column], dash)
    lines(middle, plain, "noise", "σ", plain["stated"] / plain["spent"])
    lines(right, probed, "losses", "$σ_l$", probed["stated"] / probed["spent"])
    left.set(xscale="log", yscale="log", ylabel="ε (line: spent, dotted: μ-GDP)", title="DP-SGD")
    middle.set(ylim=(0, 1.1), ylabel="ε stated by μ-GDP / ε spent", title="DP-SGD")
    right.set(ylim=(0, 1.1), title=f"HyFreeDP, σ = 1, K = {PROBE_EVERY}")
    for axis in (middle, right):
        axis.axhline(1, color=GREY, linewidth=0.8)
        axis.legend(frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    for axis in (left, middle, right):
        axis.set_xlabel(f"draws at q = {RATE:g}, δ = {DELTA:g}")
        axis.grid(alpha=0.3)
    return figure


def lines(axis, frame, key, symbol, values, dash="-"):
    """`values` over draws, a line for each value of `key`."""
    groups = {f"{symbol} = {value:g}": rows for value, rows in frame.groupby(key)}
    for label, style in styles_of(groups).items():
        rows = groups[label]
        axis.plot(rows["draws"], values[rows.index], markersize=4, label=label, **style.line | {"linestyle": dash})


def main(folder):
    """Compute and draw."""
    figures.save(draw(measured()), folder, "fig_gdp")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
