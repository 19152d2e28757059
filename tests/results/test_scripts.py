"""Scripts in benchmarks/ that make a published file, and the one that compares two versions of the results."""

import math
import re
import shutil
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis import gdp as opacus_gdp
from scipy.stats import norm
from stored import rewrite

from dpopt.privacy import Draw, Ledger, accountants
from dpopt.store import Store

ROOT = Path(__file__).parents[2]


def script(name):
    return SimpleNamespace(**run_path(str(ROOT / "benchmarks" / f"{name}.py")))


SELECTION, COMPARE, GDP = script("adadp_selection"), script("compare"), script("gdp")


def test_the_published_table_of_private_selection_is_made_again(tmp_path):
    published = ROOT / "results" / "published" / "adadp_cifar10"
    folder = shutil.copytree(published, tmp_path / "adadp_cifar10", ignore=shutil.ignore_patterns("*.svg"))
    (folder / "selection.md").unlink()
    SELECTION.main(folder)
    assert (folder / "selection.md").read_bytes() == (published / "selection.md").read_bytes()


@pytest.mark.parametrize("runs", [1, 7.5])
def test_the_outcome_of_private_selection_is_that_of_the_procedure(runs):
    generator = np.random.default_rng(0)
    validation, test = generator.random(6), generator.random(6)
    group = pd.DataFrame({"seed": 0, "validation_score": validation, "test_score": test, "state": "done"})
    released = []
    for _ in range(20_000):
        drawn = generator.integers(6, size=generator.geometric(1 / runs))
        released.append(test[drawn[np.argmax(validation[drawn])]])
    expected = pytest.approx((np.mean(released), np.std(released)), abs=0.01)
    assert SELECTION.outcome(group, runs) == expected

    # A run without a score is never released.
    scores = {"validation_score": [0.8, math.nan, 0.99], "test_score": [0.7, 0.1, 0.2]}
    group = pd.DataFrame({"seed": 0, "state": ["done", "done", "diverged"], **scores})
    assert SELECTION.outcome(group, 1e6)[0] == pytest.approx(0.7, abs=1e-4)


@pytest.mark.slow
def test_what_the_papers_rules_spend():
    """At K = 5 the independent rule spends 4.9 where it says 3; the additive one, and a draw of its own, do not."""
    accounting = script("hyfreedp_accounting")
    frame = accounting.measured([3.0], [5]).set_index(["rule", "batch"])
    row = frame.loc["independent", "same"]
    numbers = row[["noise_gradient", "noise_losses", "epsilon_true"]].tolist()
    assert numbers == pytest.approx([0.9321, 1.704, 4.917], rel=0.015)
    assert (frame.loc["additive", "epsilon_true"] < 3).all()
    for rule in accounting.RULES:
        assert frame.loc[rule, "fresh"]["epsilon_true"] < frame.loc[rule, "same"]["epsilon_true"]
    same, fresh = (accounting.ledger(1.0, 2.0, 5, batch).counts() for batch in accounting.BATCHES)
    assert same == {Draw(0.02, (1.0, 2.0, 2.0, 2.0)): 50, Draw(0.02, (1.0,)): 200}
    assert fresh == {Draw(0.02, (2.0, 2.0, 2.0)): 50, Draw(0.02, (1.0,)): 250}


def test_losses_get_more_than_one_percent_of_the_budget():
    """The published share at epsilon = 3, here by bisection of another accountant's epsilon over the noise."""
    published = (ROOT / "results" / "published" / "hyfreedp_accounting" / "budget.md").read_text()
    shares = {int(row[0]): float(row[1]) for row in re.findall(r"^\| (\d) \| ([\d.]+) \|$", published, re.MULTILINE)}
    assert list(shares) == [1, 3, 8]

    def by_opacus(noise):
        accountant = RDPAccountant()
        accountant.history = [(noise, 0.02, 250)]
        return accountant.get_epsilon(50_000**-1.1)

    low, high = 0.8, 1.2
    for _ in range(12):
        noise = (low + high) / 2
        low, high = (noise, high) if by_opacus(noise) > 3 else (low, noise)
    assert shares[3] == pytest.approx(100 * (1 - by_opacus(1.01 * high) / 3), abs=0.1)


def test_mu_gdp_is_no_upper_bound_and_no_accountant():
    """Eq. 9 of HyFreeDP is Opacus' formula. At the epsilon that it states, the exact delta of one draw is too large."""
    rate, delta, noise = GDP.RATE, GDP.DELTA, 0.8
    of_opacus = opacus_gdp.compute_eps_poisson(steps=1000, noise_multiplier=noise, sample_rate=rate, delta=delta)
    assert GDP.stated(rate, 1000, noise) == pytest.approx(of_opacus, rel=1e-6)
    assert GDP.stated(rate, 100, noise, noise, probe_every=3) == pytest.approx(GDP.stated(rate, 200, noise))
    assert GDP.spent(rate, 100, 4, 4, probe_every=1) == pytest.approx(GDP.spent(rate, 100, 2), rel=1e-3)
    ratio = math.exp(GDP.stated(rate, 1, noise))  # the likelihoods' with and without a record is larger from x on
    x = noise**2 * math.log((ratio - 1 + rate) / rate) + 0.5
    assert rate * norm.sf((x - 1) / noise) + (1 - rate - ratio) * norm.sf(x / noise) > 50 * delta
    for name in accountants.ACCOUNTANTS:  # by whatever name
        assert accountants.epsilon(Ledger([Draw(0.01, (1.0,))] * 30), 1e-5, name) > 2 * GDP.stated(0.01, 30, 1.0)


def version(maker, root, shift=0.0, first=0, seeds=4):
    """A folder of the suite "made" whose scores of one row are shifted, its ids beginning with `first`."""
    written = type(maker)(root)
    written.cells = [None] * first
    for seed in range(seeds):
        for lr in (0.1, 1.0):
            test = 0.5 + 0.01 * seed + shift * (1 + 0.1 * seed)
            written.add("dp_adam", seed, 0.5, test, tuned={"lr": lr}, tuning="grid")
        written.add("hyfreedp", seed, 0.5, 0.7)
    del written.cells[:first]
    written.done()
    return root


@pytest.mark.parametrize("first", [0, 100], ids=["paired by id", "paired by place"])
def test_a_shift_of_scores_is_a_difference_of_its_row(maker, tmp_path, capsys, first):
    old = version(maker, tmp_path / "old")
    assert COMPARE.main(old, version(maker, tmp_path / "again", first=first)) == 0
    new = version(maker, tmp_path / "new", 0.1, first)
    assert COMPARE.main(old, new) == 1
    assert "12 cells in both, 8 changed, 0 differences of epsilon, 0 missing" in capsys.readouterr().out
    pairs = COMPARE.paired(COMPARE.load(old), COMPARE.load(new))
    rows = COMPARE.summary(pairs, COMPARE.changes(pairs, COMPARE.load(old))["pair"]).set_index("label")
    assert rows["changed"].to_dict() == {"dp_adam": 8, "hyfreedp": 0}
    assert rows["Δ"]["dp_adam"].startswith("+11.50 [+9."), "four seeds, not eight cells, make the interval"


def test_epsilons_and_missing_cells_are_differences(maker, tmp_path, capsys):
    old, fewer = version(maker, tmp_path / "old"), version(maker, tmp_path / "fewer", seeds=2)
    assert COMPARE.main(old, fewer) == 1
    assert "6 missing" in capsys.readouterr().out
    assert COMPARE.main(fewer, old) == 0, "a new version may have more"
    rewrite(Store(old), f"{0:016x}", epsilon=COMPARE.load(old)["epsilon"][0] * (1 + 1e-8))
    assert COMPARE.main(fewer, old) == 1
    capsys.readouterr()
    rewrite(Store(old), f"{0:016x}", test_accuracy=math.nan)
    COMPARE.main(fewer, old)
    assert "not finite" in capsys.readouterr().out
