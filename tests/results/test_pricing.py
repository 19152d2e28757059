from collections import Counter

import pandas as pd
import pytest

from dpopt.cli import main
from dpopt.privacy import Draw, Ledger, caching, epsilon
from dpopt.privacy.selection import After, BestOf, Composed, Simulated
from dpopt.results import choosing, frames, pricing, tables
from dpopt.results.publishing import publish
from dpopt.results.results import Results


def test_a_search_is_charged(matrix):
    """Mistake 8: two runs on the same data cost what two runs cost."""
    selected = choosing.select(frames.load(matrix, "made").cells)
    row = selected[(selected["label"] == "dp_adam") & (selected["epsilon_target"] == 3)].iloc[0]
    once = ledger((0.1, (5 / 3**0.85,), 100))
    assert row["epsilon"] == epsilon(once, 1e-5, "rdp")
    assert pricing.price(matrix, row)[0] == epsilon(once + once, 1e-5, "rdp")


def ledger(*parts):
    """Of (rate, noises, count)."""
    made = Ledger()
    for rate, noises, count in parts:
        made.append(Draw(rate, noises), count)
    return made


class Runs:
    """A store of runs: id -> (seed, number within its search, ledger)."""

    def __init__(self, **runs):
        self.runs = runs

    def ledger(self, run_id):
        return self.runs[run_id][2]

    def record(self, run_id):
        seed, number, _ = self.runs[run_id]
        return {"cell": {"seed": seed} | ({"search": number} if number else {})}


ONE, OTHER = ledger((0.1, (2.0,), 30), (0.1, (2.0, 5.0), 20)), ledger((0.2, (3.0,), 40))
TOGETHER = ledger((0.2, (2.0, 3.0), 30), (0.2, (2.0, 5.0, 3.0), 10), (0.1, (2.0, 5.0), 10))


def test_runs_that_share_their_draws_are_charged_as_one_draw_each():
    """As a suite leaves them that is run again with other values: the same record is in the k-th draw of both."""
    store = Runs(one=(0, 0, ONE), other=(0, 0, OTHER), third=(0, 0, OTHER), apart=(0, 1, OTHER), seed=(1, 0, OTHER))
    spent = pricing.epsilon_of_runs(store, Counter(["one", "other"]), 1e-5, "rdp")
    assert spent == epsilon(TOGETHER, 1e-5, "rdp") > 1.05 * epsilon(ONE + OTHER, 1e-5, "rdp")
    for further in ("apart", "seed"):
        assert pricing.epsilon_of_runs(store, Counter(["one", further]), 1e-5, "rdp") == epsilon(
            ONE + OTHER, 1e-5, "rdp"
        )
    three = ledger((0.2, (2.0, 3.0, 3.0), 30), (0.2, (2.0, 5.0, 3.0, 3.0), 10), (0.1, (2.0, 5.0), 10))
    assert pricing.epsilon_of_runs(store, Counter(["one", "other", "third"]), 1e-5, "rdp") == epsilon(
        three, 1e-5, "rdp"
    )


def test_a_run_that_is_charged_again_is_a_further_one():
    store = Runs(one=(0, 0, ONE), other=(0, 0, OTHER))
    spent = pricing.epsilon_of_runs(store, Counter(["one", "other", "one", "one"]), 1e-5, "rdp")
    assert spent == epsilon(TOGETHER + ONE + ONE, 1e-5, "rdp")


def test_a_search_that_was_planned_again_with_other_values_is_charged_for_shared_draws(maker):
    """`dpopt run suite=made settings.dp_adam.grid.lr=[0.1,1]`, and again with [10]: its run has the number 0 too."""
    for number, lr in ((0, 0.1), (1, 1.0), (0, 10.0)):
        maker.add("dp_adam", 0, 0.5, 0.5, tuned={"lr": lr}, tuning="grid", search=number)
    noise = 5 / 3**0.85
    (row,) = choosing.select(frames.load(maker.done(), "made").cells).to_dict("records")
    expected = epsilon(ledger((0.1, (noise, noise), 100), (0.1, (noise,), 100)), 1e-5, "rdp")
    assert pricing.price(maker.store, row)[0] == expected
    assert tables.comparison(maker.store, pd.DataFrame([row]))["epsilon_composed"].tolist() == [expected]


BEST_OF = {"rule": "geometric", "runs": 2.0}


def selected(store):
    return choosing.select(frames.load(store, "made").cells)


def test_the_price_of_a_search_is_its_rules_only_where_the_number_of_runs_is_random(maker):
    scores = [(0.5, 0.5, 0.5)] * 4
    maker.add_search("private", 0, scores, BEST_OF)
    maker.add_search("composed", 0, scores, {"rule": "composed", "runs": 4})
    maker.add_search("simulated", 0, [(None, 0.5, 0.5)] * 4, {"rule": "simulated", "share": 0.85})
    store = maker.done()
    rows = {row["label"]: row for row in selected(store).to_dict("records")}
    composed = pricing.epsilon_of_runs(store, rows["private"]["charges"], 1e-5, "rdp")
    price = {label: pricing.price(store, row)[0] for label, row in rows.items()}
    assert price["composed"] == rows["composed"]["epsilon_total"] == composed
    assert price["simulated"] == composed > 1.5 * rows["simulated"]["epsilon_total"]
    ledger = store.ledger(rows["private"]["run_id"])
    assert price["private"] == BestOf("geometric", 2).epsilon(ledger, 1e-5) < composed


RULES = [None, BestOf("geometric", 4.0), Composed(3), Simulated(0.5), After(ledger((0.1, (4.0,), 7)))]


@pytest.fixture(autouse=True)
def nothing_in_memory():
    pricing._READ.clear()


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of what is kept."""
    monkeypatch.setenv("DPOPT_CACHE", str(tmp_path))
    return tmp_path / "epsilon"


def fails(*_):
    pytest.fail("computed, or read, again")


@pytest.mark.parametrize(
    ("accountant", "rule"), [("pld", None), ("pld", RULES[1]), *(("rdp", rule) for rule in RULES[1:])], ids=repr
)
def test_what_is_kept_has_the_bits_of_what_is_computed(accountant, rule, kept, monkeypatch):
    mixed = ledger((0.1, (3.0, 5.0), 20), (0.2, (1.7,), 9))
    found = pricing.spent(mixed, 1e-5, accountant, rule)
    assert found == (rule.epsilon if rule else epsilon)(mixed, 1e-5, accountant)
    for place in ("accountants.epsilon", "selection.BestOf.epsilon"):
        monkeypatch.setattr(f"dpopt.privacy.{place}", fails)
    monkeypatch.setattr(pricing, "epsilon", fails)
    assert pricing.spent(mixed, 1e-5, accountant, rule) == found
    pricing._READ.clear()
    assert pricing.spent(mixed, 1e-5, accountant, rule) == found
    assert len(list(kept.iterdir())) == 1


def test_all_that_decides_an_epsilon_decides_where_it_is_kept(kept, monkeypatch):
    def files(*arguments):
        pricing.spent(*arguments)
        return len(list(kept.iterdir()))

    run = ledger((0.1, (3.0,), 20))
    others = [ledger((0.1, (3.0,), 21)), ledger((0.1, (3.0000000000000004,), 20)), ledger((0.11, (3.0,), 20))]
    given = [(run, 1e-5, "rdp"), *((other, 1e-5, "rdp") for other in others), (run, 2e-5, "rdp"), (run, 1e-5, "pld")]
    given += [(run, 1e-5, "rdp", rule) for rule in (*RULES[1:], BestOf("poisson", 4.0), Composed(4))]
    assert [files(*arguments) for arguments in given] == list(range(1, len(given) + 1))
    machine = {"code": "other", "cpu": "other", "version": "0", "platform.python_version": "3", "platform.platform": ""}
    for number, (name, value) in enumerate(machine.items(), len(given) + 1):
        pricing._arithmetic.cache_clear()
        monkeypatch.setattr(f"dpopt.results.pricing.{name}", lambda *_, said=value: said)
        assert files(*given[0]) == number
    pricing._arithmetic.cache_clear()


def test_a_flipped_bit_changes_no_epsilon(kept):
    run = ledger((0.1, (3.0,), 20))
    found = pricing.spent(run, 1e-5, "rdp")
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        pricing._READ.clear()
        assert pricing.spent(run, 1e-5, "rdp") == found
    assert file.read_bytes() == whole, "made again"


def test_many_at_once_have_the_bits_of_single_ones(kept, monkeypatch):
    runs = [ledger((0.1, (3.0,), draws), (0.2, (4.0, 9.0), 3)) for draws in range(1, 9)]
    charges = [(run, 1e-5, "rdp") for run in runs] + [(runs[0], 1e-5, "rdp", rule) for rule in RULES[1:]]
    alone = [(rule[0].epsilon if rule else epsilon)(*run) for *run, rule in ((*each[:3], each[3:]) for each in charges)]
    pricing.ahead([*charges, (runs[0], 1e-5, "none"), *charges])
    assert len(list(kept.iterdir())) == len(charges)
    for place in ("pricing.epsilon", "pricing.caching.read"):
        monkeypatch.setattr(f"dpopt.results.{place}", fails)
    assert [pricing.spent(*charge) for charge in charges] == alone
    with pytest.raises(pytest.fail.Exception):
        pricing.spent(runs[0], 1e-5, "none")


def test_many_at_once_are_computed_anew_where_all_is(kept):
    charges = [(ledger((0.1, (3.0,), draws)), 1e-5, "rdp") for draws in range(1, 9)]
    pricing.ahead(charges)
    pricing._READ.update(dict.fromkeys(pricing._READ, 0.0))
    with pricing.computed_anew():
        pricing.ahead(charges)
        assert [pricing.spent(*charge) for charge in charges] == [epsilon(*charge) for charge in charges]
    assert {pricing.spent(*charge) for charge in charges} == {0.0}


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPOPT_CACHE", str(tmp_path / "file"))
    assert pricing.spent(ONE, 1e-5, "rdp") == epsilon(ONE, 1e-5, "rdp")


def test_verification_takes_nothing_that_was_kept(matrix, monkeypatch, capsys, tmp_path):
    """Not of runs, and not of published tables; a value that is wrong there changes what a reader sees alone."""
    publish(Results(matrix, "made"), matrix.root / "published", tmp_path)
    here = f"results={matrix.root}"
    main(["verify", here])
    said = capsys.readouterr()
    monkeypatch.setattr(caching, "read", fails)
    pricing._READ.clear()
    with pytest.raises(pytest.fail.Exception):
        main(["table", "suite=made", here])
    capsys.readouterr()
    main(["verify", here])
    assert capsys.readouterr().out == said.out
    assert "published/made" not in said.out
