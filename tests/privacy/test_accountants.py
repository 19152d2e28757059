import csv
import math
from pathlib import Path

import pytest

from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger, accountants, epsilon

LINES = Path(__file__).with_name("known_answers.csv").read_text().splitlines()[1:]
ROWS = [pytest.param(row, id=f"{row['rate']}-{row['noises']}-{row['draws']}") for row in csv.DictReader(LINES)]


def ledger(rate, noises, draws):
    made = Ledger()
    made.append(Draw(rate, tuple(noises)), draws)
    return made


@pytest.mark.parametrize("row", ROWS)
def test_known_answers(row):
    made = ledger(float(row["rate"]), map(float, row["noises"].split(";")), int(row["draws"]))
    delta = float(row["delta"])
    assert epsilon(made, delta, "pld") == pytest.approx(float(row["pld"]), abs=2e-3)
    if row["rdp"]:
        assert epsilon(made, delta, "rdp") == pytest.approx(float(row["rdp"]), rel=1e-3)


def test_releases_of_one_draw_compose_before_amplification():
    """Mistake 1: the same releases, each with a subsample of its own, look much cheaper than they are."""
    joint = epsilon(ledger(0.01, [1.0, 1.0], 1000), 1e-5)
    separate = epsilon(ledger(0.01, [1.0], 2000), 1e-5)
    assert separate == pytest.approx(2.5850, abs=2e-3)
    assert joint > 1.7 * separate


def test_order_of_draws_does_not_matter():
    a, b = ledger(0.1, [2.0], 10), ledger(0.2, [3.0], 5)
    assert epsilon(a + b, 1e-5) == epsilon(b + a, 1e-5)


def test_unnoised_release_is_infinite_and_nothing_is_free():
    assert epsilon(ledger(0.1, [1.0, 0.0], 1), 1e-5) == math.inf
    assert epsilon(Ledger(), 1e-5) == 0
    assert epsilon(ledger(0.1, [], 3), 1e-5) == 0


def test_grid_is_fine_enough_for_long_runs():
    """Mistake 6: a coarse discretisation is visibly loose above 10^4 draws."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld

    coarse = pld.PLDAccountant(value_discretization_interval=1e-2)
    coarse.compose(PoissonSampledDpEvent(1 / 300, GaussianDpEvent(2.0)), 30_000)
    fine = epsilon(ledger(1 / 300, [2.0], 30_000), 1e-6)
    assert fine == pytest.approx(1.337, abs=2e-3)
    assert coarse.get_epsilon(1e-6) > 1.02 * fine


def test_shared_losses_of_single_draws_change_no_bit():
    """dp-accounting's accountant makes the loss of every event anew; here runs and searches share it."""
    from dp_accounting import pld

    for counts in ({(0.1, 2.0): 50}, {(0.1, 2.0): 250, (1.0, 5.0): 3}, {(1.0, 5.0): 1, (0.1, 2.0): 7, (0.3, 4.0): 20}):
        made = Ledger()
        for (rate, noise), count in counts.items():
            made.append(Draw(rate, (noise,)), count)
        theirs = pld.PLDAccountant(value_discretization_interval=1e-4)
        assert epsilon(made, 1e-5) == theirs.compose(accountants.dp_event(accountants.events(made))).get_epsilon(1e-5)


@pytest.mark.parametrize(("delta", "accountant"), [(0.0, "pld"), (1.0, "pld"), (1e-5, "pdl")])
def test_bad_input(delta, accountant):
    with pytest.raises(ConfigError, match="delta" if accountant == "pld" else "did you mean 'pld'"):
        epsilon(ledger(0.1, [1.0], 1), delta, accountant)
