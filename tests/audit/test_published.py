"""What the HyFreeDP paper's noise rules claim, and what they spend."""

import pytest

from dpopt.audit.published import hyfreedp_noise
from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger, epsilon

DELTA = 50_000**-1.1
SIZES = {"rate": 0.02, "draws": 250, "delta": DELTA}
SPENT = {1: (5.862, 1.030), 3: (1.704, 4.917), 8: (0.910, 17.65)}  # target -> (noise of the losses, what is spent)


@pytest.mark.parametrize("target", [3, *(pytest.param(target, marks=pytest.mark.slow) for target in (1, 8))])
def test_the_papers_rule_spends_more_than_it_says(target):
    losses, truth = SPENT[target]
    _, found, spent = hyfreedp_noise(rule="independent", epsilon=target, **SIZES)
    assert found == pytest.approx(losses, rel=1.5e-2)
    assert spent == pytest.approx(truth, rel=2.5e-2)
    assert spent > target


def test_the_papers_additive_rule():
    gradient, losses, _ = hyfreedp_noise(rule="additive", epsilon=3, **SIZES)
    gradients, probes = Ledger(), Ledger()
    gradients.append(Draw(0.02, (gradient,)), 250)
    probes.append(Draw(0.02, (losses,)), 150)
    assert epsilon(gradients, DELTA, "rdp") + epsilon(probes, DELTA, "rdp") == pytest.approx(3, rel=1e-4)


def test_an_argument_out_of_range_is_named():
    with pytest.raises(ConfigError, match="did you mean 'additive'"):
        hyfreedp_noise(rule="aditive", epsilon=3, **SIZES)
