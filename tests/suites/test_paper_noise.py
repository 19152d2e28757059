"""Suites in which HyFreeDP has the noise of its paper's accounting."""

import math
import re

import pytest

from dpopt import load_suite
from dpopt.audit.published import hyfreedp_noise
from dpopt.privacy import Draw, Ledger, epsilon
from dpopt.privacy.ledger import default_delta, number_of_draws
from dpopt.suites.plan import plan

EXAMPLES = {"hyfreedp_paper_noise": 1257, "hyfreedp_paper_noise_mnist": 55_000}


@pytest.mark.slow
@pytest.mark.parametrize("target", [1, 3, 8])
@pytest.mark.parametrize("suite", EXAMPLES)
def test_a_row_at_its_epsilon_has_the_papers_noise(suite, target):
    """Calibration gives gradients `noise_inflation` times what spends epsilon alone, and losses what spends the rest.

    Rows with the paper's standard deviation have twice its multiplier, as centring halves the sensitivity of losses.
    """
    rows = re.compile(rf"paper(_std)?_states{target}(_1e-2)?")
    cells = {entry.label: entry.cell for entry in plan(load_suite(suite, seeds=[0])) if rows.fullmatch(entry.label)}
    first, examples = next(iter(cells.values())), EXAMPLES[suite]
    draws, delta = number_of_draws(first.epochs, first.batch_size, examples), default_delta(examples)
    rate, rounds = first.batch_size / examples, math.ceil(draws / 5)
    run = {"rate": rate, "draws": draws, "delta": delta, "epsilon": target}
    gradient, losses, _ = hyfreedp_noise(rule="independent", **run)

    def spent(count, *noises):
        ledger = Ledger()
        ledger.append(Draw(rate, noises), count)
        if count < draws:
            ledger.append(Draw(rate, noises[:1]), draws - count)
        return epsilon(ledger, delta, "rdp")

    assert len(cells) == (4 if suite == "hyfreedp_paper_noise" else 2)
    assert {"_std_" in label for label in cells} == {True, False}
    for label, cell in cells.items():
        noise = losses * (2 if "_std_" in label else 1)
        alone = gradient / cell.optimizer["noise_inflation"]
        assert (cell.accountant, cell.delta) == ("rdp", delta)
        # Losses get what about 1 % of epsilon pays for, so their noise is right to three digits.
        assert cell.epsilon == pytest.approx(spent(rounds, gradient, noise, noise, noise), rel=1e-5)
        assert cell.epsilon == pytest.approx(spent(draws, alone), rel=2e-5)
