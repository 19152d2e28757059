"""Grids that go on beyond their ends: what is planned, that no more is, and what all of it is charged."""

import json
import math
import re
from collections import Counter
from functools import cache
from itertools import product

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from small_suites import train_cell
from stored import copied, rewrite

from dpopt.cells import clipping_bound
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.privacy.calibration import calibrate
from dpopt.registry import create
from dpopt.results import choosing, frames, pricing, tables
from dpopt.results.verify import verify
from dpopt.runs.run_suite import run_suite
from dpopt.store import Store
from dpopt.suites import protocol, searches
from dpopt.suites.plan import has_stages, manifest, plan, to_follow
from dpopt.suites.rows import _MOST_CELLS
from dpopt.suites.suite import load_suite


def moved(values, best):
    """Where the best value of a single field is moved to."""
    return [point["x"] for point in searches.beyond([({"x": value}, float(value == best)) for value in values])]


@pytest.mark.parametrize(
    ("values", "best", "expected"),
    [
        ([0.1, 0.3, 1.0], 1.0, [3.33]),
        ([0.1, 0.3, 1.0], 0.1, [0.0333]),
        ([0.1, 0.3, 1.0], 0.3, []),
        ([1.0, 0.1, 0.3], 1.0, [3.33]),
        ([16, 64], 64, [256]),
        ([16, 64], 16, [4]),
        ([1, 2], 1, []),  # half of one is no whole number above zero
        ([1000, 1001], 1001, []),  # with 3 digits it would be 1000
        ([0.0, 0.9], 0.9, []),  # no ratio
        ([False, True], True, []),
        ([0.5], 0.5, []),
        ([1.0, math.inf], 1.0, []),
        ([1e-200, 1e200], 1e200, []),  # no finite number
        ([1e-200, 1e200], 1e-200, []),
    ],
)
def test_the_ratio_of_the_last_two_values_is_continued(values, best, expected):
    found = moved(values, best)
    assert found == expected
    assert all(type(value) is type(values[0]) for value in found)


def test_of_several_ends_the_first_field_goes_on_first():
    grid = [({"lr": lr, "name": "a", "beta": beta}, lr * beta) for lr in (0.1, 1.0) for beta in (0.5, 0.9)]
    moved = [{"lr": 10.0, "name": "a", "beta": 0.9}, {"lr": 1.0, "name": "a", "beta": 1.62}]
    assert list(searches.beyond(grid)) == moved
    assert list(searches.beyond([({"lr": lr}, -math.inf) for lr in (0.1, 1.0)])) == [{"lr": 0.01}], (
        "the first of equals"
    )


def quality(point, best):
    """Best where each field has its value of `best`; 1 there."""
    return 1 - sum(math.log10(point[key] / at) ** 2 for key, at in best.items())


def test_optimizers_are_alike_whose_calibrated_ledgers_are():

    def are_alike(name, **values):
        made = [create(name, **{field: value}) for field, pair in values.items() for value in pair]
        is_alike = searches.same_releases(made, rate=1.0, draws=20)
        size = {"rate": 1.0, "draws": 20, "dimension": 10, "epsilon": 2.0, "delta": 1e-5, "accountant": "rdp"}
        assert is_alike == (len({calibrate(optimizer, **size).ledger.to_json() for optimizer in made}) == 1)
        return is_alike

    assert are_alike("dp_sgd", lr=(0.1, 10.0))
    assert are_alike("hyfreedp", lr=(1e-4, 1e-2))
    assert not are_alike("hyfreedp", probe_every=(1, 2))
    assert not are_alike("hyfreedp", noise_inflation=(1.01, 1.1))


class Results:
    """A store in which some cells are done, with scores of their own."""

    def __init__(self, best):
        self.best, self.records = best, {}

    def state(self, run_id):
        return self.records[run_id]["status"] if run_id in self.records else "pending"

    def record(self, run_id):
        return self.records[run_id]

    def finish(self, planned, **more):
        for entry in planned:
            score = quality(entry.cell.optimizer, self.best)
            self.records[entry.cell.run_id] = {"status": "done", "validation_accuracy": score, **more}

    def completed(self, suite):
        """All cells that follow, and how many rounds that took."""
        rounds, planned = 0, plan(suite, self)
        while new := [entry for entry in planned if self.state(entry.cell.run_id) == "pending"]:
            self.finish(new)
            rounds, planned = rounds + 1, plan(suite, self)
        return planned, rounds


ROW = ["workloads=[digits_mlp]", "optimizers=[dp_sgd]", "settings.dp_sgd={grid: {lr: [0.1, 0.3, 1.0]}}"]


def ids(planned):
    return [entry.cell.run_id for entry in planned]


def widened(planned):
    return [entry for entry in planned if entry.is_widened]


def test_cells_follow_until_the_best_lies_inside(write_suite):
    suite = write_suite(overrides=[*ROW, "widen=6", "epsilon=[1,4]"])
    grid = plan(suite)
    assert has_stages(suite)
    assert ids(grid) == ids(plan(write_suite(overrides=[*ROW, "epsilon=[1,4]"])))
    results = Results({"lr": 36})
    assert plan(suite, results) == grid
    planned, rounds = results.completed(suite)
    assert rounds == 5
    assert [entry for entry in planned if not entry.is_widened] == grid
    for epsilon in (1, 4):
        for seed in (0, 1):
            own = [entry for entry in widened(planned) if (entry.target, entry.cell.seed) == (epsilon, seed)]
            assert [entry.tuned["lr"] for entry in own] == [3.33, 11.1, 37.0, 123.0]
            assert [entry.cell.search for entry in own] == [k * _MOST_CELLS for k in (1, 2, 3, 4)]
            assert all(entry.cell.optimizer["lr"] == entry.tuned["lr"] for entry in own)
    assert len(planned) == 4 * 7
    noted = json.loads(json.dumps(manifest(suite, planned)))["cells"]
    assert [(cell["widen"], cell.get("widened", False)) for cell in noted] == [(6, e.is_widened) for e in planned]
    assert not any({"widen", "widened"} & cell.keys() for cell in manifest(suite, plan(write_suite()))["cells"])


@pytest.mark.parametrize(("best", "number"), [(0.3, 0), (1e9, 2), (1e-9, 2)])
def test_no_more_cells_than_asked_for(write_suite, best, number):
    suite = write_suite(overrides=[*ROW, "widen=2", "seeds=0"])
    planned, _ = Results({"lr": best}).completed(suite)
    assert len(widened(planned)) == number


def test_a_suite_that_is_planned_again_at_any_point_has_the_same_cells(write_suite):
    """One cell at a time, in another order than they are planned in."""
    suite = write_suite(overrides=[*ROW, "widen=3", "seeds=0", "clip=[0.5,2]"])
    whole, _ = Results({"lr": 36}).completed(suite)
    results, seen = Results({"lr": 36}), set()
    while left := [entry for entry in plan(suite, results) if results.state(entry.cell.run_id) == "pending"]:
        results.finish([left[-1]])
        seen.update(ids(plan(suite, results)))
    assert seen == set(ids(whole))
    assert plan(suite, results) == whole


def test_every_run_of_a_seed_has_draws_of_its_own(write_suite):
    axes = [*ROW, "clip=[0.5,2]", "batch_size=[64,128]"]
    suite = write_suite(overrides=[*axes, "widen=4"])
    planned, _ = Results({"lr": 36}).completed(suite)
    for seed in (0, 1):
        numbers = [entry.cell.search for entry in planned if entry.cell.seed == seed]
        assert len(numbers) == len(set(numbers)) == 4 * (3 + 4)
    fewer, _ = Results({"lr": 36}).completed(write_suite(overrides=[*axes, "widen=2"]))
    assert set(ids(fewer)) < set(ids(planned)), "a larger number adds cells and changes none"
    one, _ = Results({"lr": 36}).completed(write_suite(overrides=[*ROW, "clip=0.5", "batch_size=64", "widen=4"]))
    assert set(ids(one)) < set(ids(planned)), "so does a further C or B"


def test_a_rule_without_a_bound_is_widened_once(write_suite):
    row = "settings.dp_sgd={grid: {lr: [0.1, 0.3]}, fields: {clip: automatic}}"
    suite = write_suite(overrides=[*ROW[:2], row, "widen=2", "clip=[0.5,2]", "seeds=0"])
    planned, _ = Results({"lr": 1e9}).completed(suite)
    assert len(planned) == len(set(ids(planned))) == 4
    assert len({entry.cell.search for entry in planned}) == 4
    assert all(math.isnan(clipping_bound(entry.cell.content())) for entry in planned)


def test_a_value_that_the_optimizer_refuses_ends_the_search(write_suite):
    """A momentum of 0.9 * 0.9 / 0.5 is none; one below 0.5 is."""
    row = "settings.dp_sgd={grid: {lr: [0.1], momentum: [0.5, 0.9]}}"
    suite = write_suite(overrides=[*ROW[:2], row, "widen=3", "seeds=0"])
    assert widened(Results({"momentum": 0.99}).completed(suite)[0]) == []
    down = widened(Results({"momentum": 0.01}).completed(suite)[0])
    assert [entry.tuned["momentum"] for entry in down] == [0.278, 0.155, 0.0864]


def test_what_would_release_something_else_is_not_planned(write_suite, monkeypatch):
    """Probes every 40 draws and every 80 look the same in the short run that a suite is checked with."""
    monkeypatch.setattr(searches, "trace", lambda optimizer, rate, draws: optimizer.probe_every < 3 or draws == 60)
    row = "settings.hyfreedp={grid: {probe_every: [1, 2]}, tuning: grid}"
    suite = write_suite(overrides=[ROW[0], "optimizers=[hyfreedp]", row, "widen=3", "seeds=0"])
    assert widened(Results({"probe_every": 9}).completed(suite)[0]) == []


def test_a_run_that_diverged_is_the_worst(write_suite):
    suite = write_suite(overrides=[*ROW, "widen=2", "seeds=0"])
    results = Results({"lr": 1e9})
    results.finish(plan(suite))
    results.finish(plan(suite)[-1:], status="diverged")
    assert widened(plan(suite, results)) == [], "0.3 is the best of the others"


def test_a_charged_search_goes_by_the_scores_that_it_releases(write_suite):
    row = "settings.dp_sgd={grid: {lr: [0.1, 0.3, 1.0]}, selection: composed}"
    suite = write_suite(overrides=[*ROW[:2], row, "widen=2", "seeds=0"])
    results = Results({"lr": 1e9})
    for entry, released in zip(plan(suite), (0.5, 0.9, 0.4), strict=True):
        results.finish([entry], released_score={"value": released})
    assert widened(plan(suite, results)) == []
    results.finish(plan(suite)[:1], released_score={"value": 0.95})
    (entry,) = widened(plan(suite, results))
    assert entry.tuned == {"lr": 0.0333}
    assert entry.cell.selection == {"rule": "composed", "runs": 5}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("{grid: {lr: [0.1, 1]}, tuning: random, runs: 1}", "random runs no whole grid"),
        ("{grid: {lr: [0.1, 1]}, tuning: private, selection: {rule: poisson, runs: 2}}", "private runs"),
        ("{grid: {lr: [0.1, 1]}, tuning: linear_scaling, runs: 1}", "linear_scaling runs"),
        ("{grid: {lr: [0.1, 1]}, selection: {rule: simulated}}", "simulated search is not charged"),
        ("{grid: {lr: [0.1]}}", "nothing to widen"),
        ("{grid: {lr: [0.1], momentum: [0.0, 0.9]}}", "nothing to widen"),
        ("{grid: {lr: [0.1, 1], clip: [automatic, abadi]}}", "makes a row of each bound"),
        ("{name: hyfreedp, tuning: grid, grid: {probe_every: [1, 2]}}", "differ in what a run releases"),
    ],
)
def test_rows_that_cannot_be_widened(write_suite, setting, reason):
    overrides = [*ROW[:2], f"settings.dp_sgd={setting}", "widen=2"]
    with pytest.raises(ConfigError, match=rf"settings\.dp_sgd\.widen: 2 .*{reason}.*; 0 leaves"):
        plan(write_suite(overrides=overrides))
    assert plan(write_suite(overrides=[*overrides, "settings.dp_sgd.widen=0"]))


def test_a_value_of_the_grid_that_cannot_be_used_is_not_blamed_on_the_widening(write_suite):
    overrides = [*ROW[:2], "settings.dp_sgd.grid.lr=[-3]", "widen=2"]
    with pytest.raises(ConfigError, match=r"dp_sgd\.lr: -3"):
        plan(write_suite(overrides=overrides))


@pytest.mark.parametrize("tuning", ["self", "fixed"])
def test_a_row_without_a_search_is_left_by_the_suite_and_cannot_ask_for_it(write_suite, tuning):
    overrides = ["optimizers=[hyfreedp]", f"settings.hyfreedp={{tuning: {tuning}}}", "widen=2"]
    assert ids(plan(write_suite(overrides=overrides))) == ids(plan(write_suite(overrides=overrides[:2])))
    with pytest.raises(ConfigError, match=rf"hyfreedp\.widen: 1 .*{tuning}"):
        plan(write_suite(overrides=[*overrides, "+settings.hyfreedp.widen=1"]))


def test_the_manifest_tells_searches_apart(write_suite, store):
    """Of two grids whose first runs have one number, too; what a search adds is part of it."""
    named = []
    for rates in ([0.1, 0.3, 1.0], [0.03, 0.1, 0.3, 1.0]):
        row = f"settings.dp_sgd={{grid: {{lr: {rates}}}}}"
        suite = write_suite(overrides=[*ROW[:2], row, "widen=2", "epsilon=[1,4]"])
        planned, _ = Results({"lr": 36}).completed(suite)
        store.extend_suite(suite.name, manifest(suite, planned))
        for epsilon, seed in product((1, 4), (0, 1)):
            own = [e.search_id for e in planned if (e.target, e.cell.seed) == (epsilon, seed)]
            assert len(own) == len(rates) + 2
            assert len({*own}) == 1
            named.append(own[0])
    assert len({*named}) == 8
    found = frames.load(store, suite.name)
    assert not found.problems
    assert set(found.cells["search_id"]) == {*named}
    assert set(found.cells["search"]) == {0, 1, 2, 3, _MOST_CELLS, 2 * _MOST_CELLS}


def test_the_protocol_counts_runs_that_may_be_made(write_suite):
    rows = "settings={dp_sgd: {grid: {lr: [0.1, 1.0]}, widen: 3}, five: {name: dp_adam}, seven: {name: dp_adam, %s}}"
    seven = "grid: {lr: [0.1, 1.0]}, clip: [1, 2], widen: 1"
    suite = write_suite(overrides=[ROW[0], "optimizers=[dp_sgd,five,seven]", rows % seven])
    told = "searches differ in their runs: 5: dp_sgd, five; 6: seven"
    assert told in protocol.departures(plan(suite))
    assert told in protocol.departures(Results({"lr": 36}).completed(suite)[0])


def test_plan_tells_how_many_cells_may_follow(write_suite, tmp_path, capsys):
    suite = write_suite(overrides=[*ROW, "widen=2", "epsilon=[1,4]"])
    results = Results({"lr": 1.5})
    assert to_follow(plan(suite, results), results) == 2 * 4
    results.finish(plan(suite))
    assert to_follow(plan(suite, results), results) == 4, "the first of each search is planned"
    assert to_follow(results.completed(suite)[0], results) == 0, "3.33 is worse than 1"
    assert main(["plan", f"suite={tmp_path / 'small.yaml'}", *ROW, "widen=2", f"results={tmp_path}"]) == 0
    assert "up to 4 further cells follow" in capsys.readouterr().out


CHARGED = """
defaults: [suite, _self_]
workloads: [{name: synthetic_logreg, dim: 4}]
optimizers: [wide, narrow, free]
settings:
  wide: {name: dp_sgd, grid: {lr: [0.001, 0.01]}, selection: composed, widen: 3}
  narrow: {name: dp_sgd, grid: {lr: [0.001, 0.01]}, selection: composed}
  free: {name: dp_sgd, grid: {lr: [0.001, 0.01]}, widen: 3}
epsilon: [2]
accountant: rdp
batch_size: 8000
epochs: 4
seeds: [0, 1, 2]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`CHARGED`, run by `run_suite` to its end: the suite and its store."""
    folder = tmp_path_factory.mktemp("widened")
    (folder / "charged.yaml").write_text(CHARGED)
    suite, store = load_suite(str(folder / "charged.yaml")), Store(folder / "results")
    outcome = run_suite(suite, store.root, engine="inline", progress=False)
    assert not outcome.failed
    return suite, store


@cache
def spent(rate, noise, number, delta):
    """What so many Gaussian releases of samples spend one after the other, by dp-accounting's PLD."""
    release = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
    return PLDAccountant().compose(dp_event.SelfComposedDpEvent(release, number)).get_epsilon(delta)


def independent(record, runs):
    """What so many runs with a record's noise spend."""
    return spent(record["rate"], record["noise"]["gradient"], record["draws"] * runs, record["delta"])


def records(trained, label):
    suite, store = trained
    return [store.record(entry.cell.run_id) for entry in plan(suite, store) if entry.label == label]


def test_a_charged_search_never_spends_more_than_its_target(trained):
    """Whatever it makes: all five runs keep to it, and the noise of a search of two runs would not."""
    made = Counter(record["cell"]["seed"] for record in records(trained, "wide"))
    assert all(2 <= runs <= 5 for runs in made.values())
    assert sum(made.values()) > 6, "some seed has gone on"
    for record in records(trained, "wide"):
        assert record["epsilon_total"] <= 2
        assert 1.7 < independent(record, 5) <= 2
    narrow = records(trained, "narrow")[0]
    assert independent(narrow, 2) <= 2 < independent(narrow, 5)


def test_the_scores_of_a_charged_search_are_noised_for_all_runs_that_it_may_make(trained):
    """On the validation records too: one Gaussian release of each of five scores."""
    for record in records(trained, "wide"):
        assert 1.7 < spent(1.0, record["released_score"]["noise"], 5, record["delta"]) <= 2


def test_tables_charge_what_might_have_been_made(trained):
    suite, store = trained
    selected = choosing.select(frames.load(store, suite.name).cells)
    assert set(selected["label"]) == {"wide", "narrow", "free"}
    planned = plan(suite, store)
    for row in selected.to_dict("records"):
        own = [entry for entry in planned if (entry.label, entry.cell.seed) == (row["label"], row["seed"])]
        most = 2 if row["label"] == "narrow" else 5
        assert (row["runs"], row["charges"].total()) == (len(own), most)
        assert set(row["charges"]) == set(ids(own))
        charged, truth = pricing.price(store, row)[0], independent(store.record(row["run_id"]), most)
        assert 0.85 * charged < truth <= charged
        assert charged > 4 if row["label"] == "free" else charged == pytest.approx(2, rel=1e-4)
        assert charged <= 2 or row["label"] == "free"
    verified = verify(store, suite.name)
    assert (verified.checked["runs"], verified.findings) == (len(planned), [])
    notes = tables.comparison(store, selected).set_index("label")["note"]
    assert "counts 3 further runs" in notes["wide"]
    assert "further runs" not in notes["narrow"]


def test_folders_that_went_on_apart_with_unequal_bits_are_copied_both_ways(write_suite, tmp_path):
    """On two machines the best of one grid lies at other ends; each has begun what the other has finished."""
    suite = write_suite(overrides=["optimizers=[dp_sgd]", "seeds=0", "device=cpu", "widen=1", "engine=inline"])
    stores = [Store(tmp_path / name) for name in ("one", "other")]
    grid = plan(suite)
    for store, best in zip(stores, grid, strict=True):
        for entry in grid:
            train_cell(entry.cell, store, device="cpu")
            rewrite(store, entry.cell.run_id, validation_accuracy=0.5 + 0.25 * (entry is best))
        planned = plan(suite, store)
        (further,) = widened(planned)
        train_cell(further.cell, store, device="cpu")
        store.extend_suite(suite.name, manifest(suite, planned))
    ids_of = [set(store.run_ids()) for store in stores]
    for store, theirs in zip(stores, stores[::-1], strict=True):
        for run_id in set(theirs.run_ids()) - set(store.run_ids()):  # what a worker that was killed leaves
            store.begin(run_id, theirs.record(run_id)["cell"])
            store.append_curve(run_id, {"draw": 7, "epoch": 1})
            store.save_checkpoint(run_id, b"half")
    apart = [{run_id: store.run(run_id) for run_id in those} for store, those in zip(stores, ids_of, strict=True)]
    copied(stores[0].root, stores[1].root)
    copied(stores[1].root, stores[0].root)
    for store, those, others in zip(stores, apart, apart[::-1], strict=True):
        store = Store(store.root)
        assert {run_id: store.run(run_id) for run_id in store.run_ids()} == others | those, "each whole, none mixed"
        outcome = run_suite(suite, store.root, progress=False)
        assert (outcome.ran, outcome.failed, outcome.damaged) == (0, {}, [])
        (conflict,) = frames.load(store, suite.name).problems
        assert re.fullmatch(r"\w{16}: another run goes on from the same grid otherwise; keep one of the two", conflict)
