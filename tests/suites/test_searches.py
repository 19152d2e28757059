"""Searches: which runs they make, what all of these are charged, and what is released in the end."""

from collections import Counter

import pytest
from small_suites import train_cell

from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger, epsilon
from dpopt.privacy.selection import After, BestOf, Composed, Part, Simulated, selection_rule
from dpopt.results import choosing, frames, pricing
from dpopt.suites import rows as rows_of_suites
from dpopt.suites import searches
from dpopt.suites.plan import plan
from dpopt.suites.schema import Setting

GRID = {"lr": [0.1, 1.0, 10.0], "momentum": [0.0, 0.9]}
SPENT = Ledger([Draw(1.0, (30.0,))])


def setting(kind, **changes):
    return Setting("dp_sgd", {}, kind, changes.pop("grid", GRID), **changes)


def runs(kind, rule, epsilon=2.0, seed=0, **changes):
    return searches.runs(setting(kind, **changes), rule, epsilon, ({"name": "digits_mlp"}, seed))


def test_a_grid_is_run_point_by_point():
    found = runs("grid", None)
    assert [(run.point["lr"], run.point["momentum"]) for run in found] == [
        *((0.1, 0.0), (0.1, 0.9), (1.0, 0.0), (1.0, 0.9), (10.0, 0.0), (10.0, 0.9))
    ]
    assert [run.number for run in found] == list(range(6))
    assert {run.selection for run in found} == {None}
    assert {run.selection for run in runs("grid", Composed(6))} == {Composed(6)}
    assert searches.points({}) == [{}]


def test_random_search_draws_points_without_replacement():
    found = [runs("random", None, runs=4, seed=seed) for seed in range(30)]
    assert all(len({str(run.point) for run in search}) == len(search) == 4 for search in found)
    assert len({str([run.point for run in search]) for search in found}) > 25
    assert found[3] == runs("random", None, runs=4, seed=3)
    assert [run.point for run in runs("random", None, epsilon=8.0, runs=4, seed=3)] == [run.point for run in found[3]]


@pytest.mark.parametrize("number", ["logarithmic", "geometric", "poisson"])
def test_a_private_search_makes_as_many_runs_as_drawn_with_replacement(number):
    rule = BestOf(number, 4)
    found = {seed: runs("private", rule, seed=seed) for seed in range(300)}
    trained = {seed: [run for run in search if not run.untrained] for seed, search in found.items()}
    sizes = [len(search) for search in trained.values()]
    assert sum(sizes) / len(sizes) == pytest.approx(4, abs=1)
    assert len(set(sizes)) > 5
    for search in trained.values():
        assert [run.number for run in search] == list(range(len(search)))
        assert all(run.point in searches.points(GRID) and run.selection is rule for run in search)
    drawn = [str(run.point) for search in trained.values() for run in search]
    assert all(
        drawn.count(str(point)) / len(drawn) == pytest.approx(1 / 6, abs=0.06) for point in searches.points(GRID)
    )
    assert any(len({str(run.point) for run in search}) < len(search) < 6 for search in trained.values())


def test_linear_scaling_searches_at_two_small_epsilons():
    found = runs("linear_scaling", None, 5.0, grid={"lr": [0.1, 1.0, 10.0]}, runs=2)
    assert [run.epsilon for run in found] == [0.5, 0.5, 1.0, 1.0]
    assert {run.selection for run in found} == {Part(4, 5.0)}
    assert {run.stage for run in found} == {"search"}
    assert [run.number for run in found] == [0, 1, 2, 3]
    for pair in (found[:2], found[2:]):
        assert len({run.point["lr"] for run in pair}) == 2


def test_the_learning_rate_of_linear_scaling_is_the_line_through_both_searches():
    """Best at 0.1: lr 0.2; best at 0.2: lr 0.5; so 3 per unit of epsilon, and 0.2 + 3 (0.4 - 0.1) at 0.4."""
    outcomes = [(0.1, 0.2, 0.8), (0.1, 0.9, 0.7), (0.2, 0.2, 0.5), (0.2, 0.5, 0.6)]
    assert searches.linear_scaling(outcomes, 0.4) == pytest.approx(0.2 + 3 * 0.3)


@pytest.mark.parametrize(
    ("low", "high", "own", "expected"),
    [
        (0.9, 0.1, 0.8, 0.1),  # the line falls below the grid: -4.7
        (0.1, 0.9, 0.8, 0.9 * 0.8 / 0.2),  # it is above: 5.7; the largest grows as epsilon does
        (0.1, 0.9, 0.15, 0.5),  # own epsilon between the searches'
        (0.1, 0.9, 0.1, 0.1),
        (0.5, 0.5, 0.8, 0.5),
        (0.9, 0.9, 0.15, 0.9),  # the largest never shrinks
    ],
)
def test_the_learning_rate_of_linear_scaling_stays_near_the_grid(low, high, own, expected):
    outcomes = [(e, lr, float(lr == best)) for e, best in ((0.1, low), (0.2, high)) for lr in (0.1, 0.5, 0.9)]
    assert searches.linear_scaling(outcomes, own) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "changes", "rule"),
    [
        ("grid", {}, None),
        ("grid", {"selection": {"rule": "composed"}}, Composed(6)),
        ("random", {"runs": 4, "selection": {"rule": "composed"}}, Composed(4)),
        ("grid", {"selection": {"rule": "simulated", "share": 0.9}}, Simulated(0.9)),
        ("private", {"selection": {"rule": "poisson", "runs": 3}}, BestOf("poisson", 3)),
        ("linear_scaling", {"runs": 2, "grid": {"lr": [1, 2]}}, None),
        ("fixed", {"grid": {}}, None),
    ],
)
def test_the_rule_of_a_row(kind, changes, rule):
    assert searches._check(setting(kind, **changes), "s") == rule


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("grid", {"grid": {}}, r"s\.grid"),
        ("grid", {"grid": {"lr": []}}, r"s\.grid\.lr"),
        ("grid", {"grid": {"lr": 0.1}}, r"s\.grid\.lr: 0\.1"),
        ("random", {}, r"s\.runs: None.*1 to 6"),
        ("random", {"runs": 7}, r"s\.runs: 7.*1 to 6"),
        ("grid", {"runs": 3}, r"s\.runs: 3.*grid"),
        ("linear_scaling", {"runs": 2}, r"s\.grid: .*momentum.*lr alone"),
        ("linear_scaling", {"runs": 2, "grid": {"lr": [1, 2]}, "selection": {"rule": "composed"}}, r"s\.selection"),
        ("private", {}, r"s\.selection: None.*rule"),
        ("private", {"selection": {"rule": "composed", "runs": 3}}, r"s\.selection\.rule: 'composed'.*geometric"),
        ("private", {"selection": {"rule": "poisson", "runs": 0}}, r"selection\.runs: 0"),
        ("grid", {"selection": {"rule": "poisson", "runs": 3}}, r"s\.selection\.rule: 'poisson'.*simulated"),
        ("grid", {"selection": {"rule": "part", "runs": 3, "total": 1}}, r"s\.selection\.rule: 'part'"),
        ("grid", {"selection": {"rule": "composed", "runs": 2}}, r"s\.selection\.runs: 2"),
        ("fixed", {"grid": {}, "selection": {"rule": "composed"}}, r"s\.selection.*fixed is not charged"),
    ],
)
def test_what_does_not_go_together_is_refused(kind, changes, named):
    with pytest.raises(ConfigError, match=named):
        searches._check(setting(kind, **changes), "s")


def rows(searched, label, seed=None):
    store, planned = searched
    found = [entry for entry in planned if entry.label == label and seed in (None, entry.cell.seed)]
    return store, found


def test_every_charged_search_states_its_target(searched):
    """What a search spends by its rule, recomputed from the ledger of one of its runs, is the suite's epsilon."""
    store, planned = searched
    charged = [entry for entry in planned if entry.cell.selection and not entry.cell.untrained and not entry.stage]
    assert {entry.label for entry in charged} == {
        "composed", "few", "simulated", "logarithmic", "poisson", "adadp", "hyfreedp"
    }  # fmt: skip
    for entry in charged:
        record, ledger = store.record(entry.cell.run_id), store.ledger(entry.cell.run_id)
        assert 2 * (1 - 1e-4) <= record["epsilon_total"] <= 2
        assert record["epsilon_total"] == selection_rule(entry.cell.selection).epsilon(
            ledger, record["delta"], record["accountant"]
        )
        assert record["epsilon"] == epsilon(ledger, record["delta"], "rdp") < 0.95 * record["epsilon_total"]


def test_a_simulated_search_costs_more_than_it_says(searched):
    store, found = rows(searched, "simulated", seed=0)
    record, ids = store.record(found[0].cell.run_id), [entry.cell.run_id for entry in found]
    assert record["epsilon"] == pytest.approx(0.9 * 2, rel=1e-4)
    assert record["epsilon_total"] == pytest.approx(record["epsilon"] / 0.9)
    assert "released_score" not in record
    assert pricing.epsilon_of_runs(store, Counter(ids), found[0].cell.delta, "rdp") > 1.2 * record["epsilon_total"]


def test_both_kinds_of_noise_are_solved_for_the_search(searched):
    store, found = rows(searched, "hyfreedp", seed=0)
    noise = store.record(found[0].cell.run_id)["noise"]
    _, alone = rows(searched, "free", seed=0)
    assert noise["gradient"] > 1.3 * store.record(alone[0].cell.run_id)["noise"]["gradient"]
    assert noise["losses"] > noise["gradient"]


def test_the_last_run_of_linear_scaling_waits_for_the_others_and_pays_for_them(searched):
    for seed in (0, 1):
        store, found = rows(searched, "linear", seed)
        assert [entry.stage for entry in found] == ["search"] * 4 + ["final"]
        assert [entry.cell.epsilon for entry in found] == [0.2, 0.2, 0.4, 0.4, 2]
        assert {entry.target for entry in found} == {2}
        ledgers = [store.ledger(entry.cell.run_id) for entry in found]
        total = Ledger()
        for ledger in ledgers:
            total = total + ledger
        spent = epsilon(total, found[0].cell.delta, "rdp")
        record = store.record(found[-1].cell.run_id)
        assert 2 * (1 - 1e-4) <= spent <= 2
        assert record["epsilon_total"] == spent
        assert 0.4 < record["epsilon"] < 2
        assert "released_score" not in record
        assert found[-1].cell.search == 4
        assert 0.1 <= found[-1].tuned["lr"] <= 10 * max(1, record["epsilon"] / 0.4)
        assert found[-1].cell.optimizer["lr"] == found[-1].tuned["lr"]


def test_the_last_run_follows_from_what_the_searches_released(searched, monkeypatch):
    """Its learning rate from their noised scores, its epsilon from what their ledgers leave of the target."""
    store, found = rows(searched, "linear", 0)
    seen = []
    monkeypatch.setattr(rows_of_suites, "linear_scaling", lambda *given: seen.append(given) or 0.7)
    last = rows_of_suites._last_run(found[:4], store, rows_of_suites.maker(isolate=False))
    ((outcomes, left),) = seen
    for entry, outcome in zip(found, outcomes, strict=False):
        record = store.record(entry.cell.run_id)
        assert record["released_score"]["value"] != record["validation_accuracy"]
        assert outcome == (entry.cell.epsilon, entry.tuned["lr"], record["released_score"]["value"])
    spent = Ledger()
    for entry in found[:4]:
        spent = spent + store.ledger(entry.cell.run_id)
    assert last == searches.Run(4, {"lr": 0.7}, 2.0, After(spent), stage="final")
    assert left == pytest.approx(store.record(found[4].cell.run_id)["epsilon"], rel=1e-6)
    assert left < 1.99


def test_the_last_run_is_planned_once_all_others_are_done(write_searches, searched):
    store, _ = searched

    class Known:
        """The store, but for one run that is said to be in another state."""

        ledger = store.ledger

        def __init__(self, run_id, state):
            self.run_id, self.as_state = run_id, state

        def record(self, run_id):
            """Epsilon as another version of the accountant might have computed it."""
            record = store.record(run_id)
            return record | {"epsilon": record["epsilon"] * (1 - 1e-9 * (run_id == self.run_id))}

        def state(self, run_id):
            return self.as_state if run_id == self.run_id else store.state(run_id)

    suite = write_searches(["optimizers=[linear]", "seeds=0"])
    first = plan(suite)
    assert [entry.stage for entry in first] == ["search"] * 4
    ends = [
        len(plan(suite, Known(first[2].cell.run_id, state))) for state in ("pending", "failed", "interrupted", "done")
    ]
    assert ends == [4, 4, 4, 5]
    assert plan(suite, Known(first[2].cell.run_id, "done")) == plan(suite, store)


def test_linear_scaling_takes_learning_rates_that_are_texts(write_searches, store):
    """YAML has 1e-2 for a text."""
    numbers = ["optimizers=[linear]", "settings.linear.grid.lr=['1e-1','1','10']", "seeds=0"]
    suite = write_searches(numbers)
    for entry in plan(suite):
        train_cell(entry.cell, store, device="cpu")
    *_, last = plan(suite, store)
    assert last.stage == "final"
    assert last.cell.optimizer["lr"] == last.tuned["lr"] >= 0.1


def test_the_last_run_is_planned_once_where_no_rule_has_a_bound(write_searches, searched, monkeypatch):
    store, _ = searched
    last = searches.Run(4, {"lr": 0.5}, 2.0, After(SPENT), stage="final")
    monkeypatch.setattr(rows_of_suites, "_last_run", lambda found, results, make: last)
    monkeypatch.setattr(rows_of_suites, "_all_done", lambda found, results: True)
    planned = plan(write_searches(["optimizers=[linear]", "seeds=0", "clip=[0.1,1]"]), store)
    assert [entry.stage for entry in planned] == (["search"] * 4 + ["final"]) * 2
    one = ["optimizers=[linear]", "seeds=0", "clip=[0.1,1]", "settings.linear.fields={clip: automatic}"]
    assert [entry.stage for entry in plan(write_searches(one), store)] == ["search"] * 4 + ["final"]


def test_a_search_has_a_name_that_one_which_is_made_again_at_other_numbers_has_not(write_searches, searched):
    _, planned = searched
    searches = {(entry.label, entry.cell.seed): set() for entry in planned}
    for entry in planned:
        searches[entry.label, entry.cell.seed].add(entry.search_id)
    assert all(len(names) == 1 for names in searches.values()), "the last run of linear scaling is of its search"
    assert len(set().union(*searches.values())) == len(searches)

    def named(*sizes):
        row = ["optimizers=[logarithmic]", f"batch_size={list(sizes)}", "seeds=[0,1,2,3]"]
        made = plan(write_searches(row))
        return {(e.cell.seed, e.cell.search): e.search_id for e in made if e.cell.batch_size == 8000}

    one, further, again = named(8000), named(8000, 4000), named(4000, 8000)
    assert one == further == named(8000)
    assert not one.keys() & again.keys(), "its runs have numbers of their own"
    assert len({*one.values()}) == len({*again.values()}) == 4
    assert not {*one.values()} & {*again.values()}


def test_what_is_released_of_each_search(searched):
    store, planned = searched
    selected = choosing.select(frames.load(store, "searches").cells).set_index(["label", "seed"])
    assert len(selected) == 9 * 2
    assert (selected.loc["linear", "stage"] == "final").all()
    assert (selected.loc["linear", "runs"] == 5).all()
    assert set(selected.loc["linear", "run_id"]) == {e.cell.run_id for e in planned if e.stage == "final"}
    (untrained,) = [entry.cell for entry in planned if entry.cell.untrained]
    assert selected.loc[("poisson", untrained.seed), "runs"] == 0
    for label in ("composed", "logarithmic", "adadp", "hyfreedp"):
        for seed in (0, 1):
            ids = [e.cell.run_id for e in planned if (e.label, e.cell.seed) == (label, seed)]
            scores = {run_id: store.record(run_id)["released_score"]["value"] for run_id in ids}
            assert selected.loc[(label, seed), "run_id"] == max(scores, key=scores.__getitem__)
            assert selected.loc[(label, seed), "runs"] == len(ids)


def test_a_search_with_a_run_that_is_not_done_releases_nothing(searched):
    store, _ = searched
    cells = frames.load(store, "searches").cells
    for label, stage in (("composed", ""), ("linear", "search"), ("linear", "final")):
        lost = cells[(cells["label"] == label) & (cells["stage"] == stage) & (cells["seed"] == 0)].index[0]
        state = cells["state"].where(cells.index != lost, "pending")
        found = choosing.select(cells.assign(state=state))
        assert set(found[found["label"] == label]["seed"]) == {1}
    searching = cells[cells["stage"] != "final"]
    assert "linear" not in set(choosing.select(searching)["label"]), "the searches of linear scaling release no model"


def test_what_searches_really_spend(searched):
    """Free and simulated searches are above the target, those that pay are not; a random number may stop early."""
    store, _ = searched
    selected = choosing.select(frames.load(store, "searches").cells)
    total = {(row["label"], row["seed"]): pricing.price(store, row)[0] for row in selected.to_dict("records")}
    for (label, _), spent in total.items():
        assert (spent > 2.4) == (label in ("free", "simulated"))
        assert label in ("free", "simulated", "poisson") or spent == pytest.approx(2, rel=1e-4)
    private = selected[selected["tuning"] == "private"]
    assert set(private["label"]) == {"logarithmic", "poisson", "adadp"}
    for row in private.to_dict("records"):
        assert total[row["label"], row["seed"]] == row["epsilon_total"]


def test_candidates_of_private_selection_release_alike(write_suite):
    """The price of the best of a random number is known where all candidates leave one ledger."""
    setting = "{name: hyfreedp, tuning: private, selection: {rule: poisson, runs: 2}, grid: {%s}}"
    suite = write_suite(overrides=["optimizers=[hyfreedp]", f"settings.hyfreedp={setting % 'probe_every: [1, 2]'}"])
    with pytest.raises(
        ConfigError, match=r"settings\.hyfreedp\.grid: \['probe_every'\] .*differ in what a run releases"
    ):
        plan(suite)
    assert plan(write_suite(overrides=["optimizers=[hyfreedp]", f"settings.hyfreedp={setting % 'lr: [0.1, 1]'}"]))


def test_an_isolated_suite_plans_the_same_cells(write_searches, searched):
    store, planned = searched
    assert plan(write_searches(["isolate=true"]), store) == planned
