"""The budget that HyFreeDP's two published noise rules claim to spend, and that of runs with that noise, as a figure.

    python benchmarks/hyfreedp_accounting.py results/published/hyfreedp_accounting

takes a minute and writes `fig_hyfreedp_accounting.svg`, and in `budget.md` the share of epsilon that is left for the
losses, "less than 1 %" by the paper's Table 8. The run: 50,000 records, B = 1,000, 250 gradients,
delta = N^-1.1, gradient noise 1.01 times plain DP-SGD's; three probes of the loss every K draws, on the gradient's draw
or all on one further draw.
"""

import math
import sys
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from dpopt.audit.published import hyfreedp_noise
from dpopt.privacy import Draw, Ledger, epsilon
from dpopt.privacy.calibration import solve_noise
from dpopt.privacy.ledger import default_delta
from dpopt.results import figures
from dpopt.results.drawing import GREY, styles_of

EXAMPLES, BATCH_SIZE, DRAWS = 50_000, 1_000, 250
DELTA = default_delta(EXAMPLES)
EPSILON = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
PROBE_EVERY = (1, 5, 20)
RULES = ("independent", "additive")
BATCHES = {"same": "probes on the gradient's draw", "fresh": "probes on a fresh draw"}
ACCOUNTANT = "rdp"
"""The paper's."""
INFLATION = 1.01
"""The paper's gamma: the gradients' noise over that of plain DP-SGD."""


def ledger(gradient, losses, probe_every, batch):
    """The ledger of a run that has these noise multipliers; `batch` of `BATCHES`."""
    rate, rounds, probes = BATCH_SIZE / EXAMPLES, math.ceil(DRAWS / probe_every), (losses,) * 3
    of_run = Ledger()
    of_run.append(Draw(rate, (gradient, *probes) if batch == "same" else probes), rounds)
    if plain := DRAWS - rounds if batch == "same" else DRAWS:
        of_run.append(Draw(rate, (gradient,)), plain)
    return of_run


def measured(claims=EPSILON, probe_every=PROBE_EVERY):
    """A row for each rule, claimed epsilon, number K of draws between rounds, and draw that the probes look at."""
    rows = []
    for rule, claimed, every in product(RULES, claims, probe_every):
        run = {"rate": BATCH_SIZE / EXAMPLES, "draws": DRAWS, "delta": DELTA, "accountant": ACCOUNTANT}
        gradient, losses, _ = hyfreedp_noise(rule=rule, epsilon=claimed, probe_every=every, **run)
        row = {"rule": rule, "epsilon_claimed": claimed, "probe_every": every}
        row |= {"noise_gradient": gradient, "noise_losses": losses}
        for batch in BATCHES:
            spent = epsilon(ledger(gradient, losses, every, batch), DELTA, ACCOUNTANT)
            rows.append(row | {"batch": batch, "epsilon_true": spent})
    return pd.DataFrame(rows)


def left(claimed, inflation=INFLATION):
    """The share of `claimed` that the gradients' noise, `inflation` times plain DP-SGD's, leaves for the losses."""

    def gradients(noise):
        of_run = Ledger()
        of_run.append(Draw(BATCH_SIZE / EXAMPLES, (noise,)), DRAWS)
        return of_run

    plain = solve_noise(gradients, claimed, DELTA, ACCOUNTANT)
    return 1 - epsilon(gradients(inflation * plain), DELTA, ACCOUNTANT) / claimed


def budget(claims=(1, 3, 8)):
    """A table of the shares in Markdown."""
    lines = ["| ε | left for the losses (%) |", "|--:|--:|"]
    lines += [f"| {claimed} | {100 * left(claimed):.1f} |" for claimed in claims]
    noise = f"the gradients' noise is {INFLATION} times plain DP-SGD's; by {ACCOUNTANT}."
    of_run = f"{EXAMPLES:,} records, B = {BATCH_SIZE:,}, {DRAWS} draws, δ = {DELTA:.2e}; {noise}"
    return "\n".join([*lines, "", of_run, ""])


def draw(frame):
    """A column a rule, a row a probe batch, a line for each K; above the diagonal, more is spent than claimed."""
    rules = [rule for rule in RULES if (frame["rule"] == rule).any()]
    batches = [batch for batch in BATCHES if (frame["batch"] == batch).any()]
    size = (3.6 * len(rules), 3.1 * len(batches))
    figure, axes = plt.subplots(len(batches), len(rules), figsize=size, sharex=True, sharey=True, squeeze=False)
    for batch, line in zip(batches, axes, strict=True):
        for rule, axis in zip(rules, line, strict=True):
            panel(axis, frame[(frame["rule"] == rule) & (frame["batch"] == batch)])
            axis.set_title(f"{rule} rule,\n{BATCHES[batch]}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("claimed ε")
    for axis in axes[:, 0]:
        axis.set_ylabel("true ε")
    scale(axes[0][0], sorted(frame["epsilon_claimed"].unique()), frame["epsilon_true"].max())
    figure.tight_layout()
    axes[0][-1].legend(
        title="a round of probes\nevery K draws", bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False
    )
    return figure


def panel(axis, rows):
    """One rule and probe batch."""
    claimed = sorted(rows["epsilon_claimed"])
    axis.plot(claimed, claimed, color=GREY, linewidth=0.8, label="true = claimed")
    lines = {f"K = {every}": line for every, line in rows.sort_values("epsilon_claimed").groupby("probe_every")}
    for label, style in styles_of(lines).items():
        line = lines[label]
        axis.plot(line["epsilon_claimed"], line["epsilon_true"], markersize=4, label=label, **style.line)
    ratio = rows["epsilon_true"] / rows["epsilon_claimed"]
    text = f"true / claimed: {ratio.min():.2f} to {ratio.max():.2f}"
    axis.text(0.05, 0.95, text, transform=axis.transAxes, va="top", size=9)
    axis.grid(alpha=0.3)


def scale(axis, claimed, largest):
    """Logarithmic, with plain numbers; all panels share the axes."""
    axis.set(xscale="log", yscale="log")
    above = [mark for mark in (12, 20, 50, 100) if claimed[-1] < mark < 1.3 * largest]
    axis.set_xticks(claimed, [f"{mark:g}" for mark in claimed])
    axis.set_yticks([*claimed, *above], [f"{mark:g}" for mark in (*claimed, *above)])
    axis.minorticks_off()


def main(folder):
    """Solve the rules and draw them, and write the shares."""
    figures.save(draw(measured()), folder, "fig_hyfreedp_accounting", ["svg"])
    (folder / "budget.md").write_text(budget())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
