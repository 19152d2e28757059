import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from dpopt.errors import ConfigError
from dpopt.harness import refine
from dpopt.harness.plan import manifest, plan
from dpopt.store.identity import clipping_bound

pytest.importorskip("optuna")

GRID = [{"C": c, "B": b, "lr": lr} for c, b, lr in product((0.1, 1.0, 10.0), (64, 1024), (0.01, 0.1))]


def quality(point):
    """Best at C = 3, B = 300 and lr = 0.03, of which the grid has none; 1 there."""
    best = {"C": 3.0, "B": 300, "lr": 0.03}
    return 1 - sum(math.log10(point[key] / at) ** 2 for key, at in best.items())


def proposed(path, number=20, grid=GRID, name="row", score=lambda index, point: quality(point)):
    return refine.proposals(refine.open_journal(path), name, [(p, quality(p)) for p in grid], number, score)


def test_what_a_grid_can_be_refined_in():
    points = [{"C": 1.0, "B": b, "lr": lr, "base": s} for b, lr, s in product((1, 8), (0.1, 0.2), ("adam", "sgd"))]
    assert refine.ends(points) == {"B": (1, 8), "lr": (0.1, 0.2)}
    assert refine.ends([{"x": True}, {"x": False}]) == refine.ends([{"x": 0.0}, {"x": 1.0}]) == {}
    assert refine.ends([{"C": 1.0}, {"C": math.inf}]) == {}


def test_proposals_lie_within_the_grid_and_better_it(tmp_path):
    points = proposed(tmp_path / "journal")
    assert len(points) == 20
    for point in points:
        assert 0.1 <= point["C"] <= 10
        assert 0.01 <= point["lr"] <= 0.1
        assert 64 <= point["B"] <= 1024
        assert isinstance(point["B"], int)
        assert {float(f"{point[key]:.3g}") for key in ("C", "lr")} == {point["C"], point["lr"]}
    left = 1 - max(map(quality, GRID))
    assert 1 - max(map(quality, points)) < left / 2


def test_nothing_more_is_asked_for_while_a_round_is_not_done(tmp_path):
    path, scores = tmp_path / "journal", {}
    first = proposed(path, score=lambda index, point: scores.get(index))
    assert len(first) == refine.ROUND
    content = path.read_bytes()
    assert proposed(path, score=lambda index, point: scores.get(index)) == first
    assert path.read_bytes() == content
    scores.update({index: quality(point) for index, point in enumerate(first[1:], start=1)})
    assert proposed(path, score=lambda index, point: scores.get(index)) == first
    scores[0] = quality(first[0])
    second = proposed(path, score=lambda index, point: scores.get(index))
    assert second[: refine.ROUND] == first
    assert len(second) == 2 * refine.ROUND


def test_a_score_is_told_once(tmp_path):
    path, asked = tmp_path / "journal", []

    def score(index, point):
        asked.append(index)
        return quality(point)

    points = proposed(path, score=score)
    assert sorted(asked) == list(range(20))
    assert proposed(path, score=score) == points
    assert len(asked) == 20


def test_fewer_and_more_points(tmp_path):
    path = tmp_path / "journal"
    seven = proposed(path, 7)
    assert len(seven) == 7
    assert proposed(path, 3) == seven[:3]
    assert proposed(path, 12)[:7] == seven


def test_a_journal_that_ends_anywhere_goes_on_as_it_would_have(tmp_path):
    """Also the one that is not there."""
    path = tmp_path / "suite" / "journal"
    points, lines = proposed(path), path.read_bytes().splitlines(keepends=True)
    for number in range(0, len(lines), 5):
        path.write_bytes(b"".join(lines[:number]) + lines[number][:9])
        refine.open_journal(path)
        assert path.read_bytes() == b"".join(lines[:number])
        assert proposed(path) == points


def test_two_at_one_journal_take_turns(tmp_path, monkeypatch):
    """Both propose the same round, tell its scores once, and see them before the next one."""
    alone, path, ask = proposed(tmp_path / "alone", 10), tmp_path / "journal", refine._ask
    monkeypatch.setattr(refine, "_ask", lambda *given: (time.sleep(0.05), ask(*given)))

    def slow(index, point):
        time.sleep(0.05)
        return quality(point)

    with ThreadPoolExecutor() as pool:
        for score, number in ((lambda index, point: None), 5), (slow, 10):
            both = [pool.submit(proposed, path, 10, score=score) for _ in range(2)]
            assert [each.result() for each in both] == [alone[:number]] * 2
    assert not path.with_suffix(".lease").exists()


def test_a_line_that_another_is_writing_is_not_cut_off(tmp_path):
    path = tmp_path / "journal"
    proposed(path, 5)
    whole = path.read_bytes()
    with ThreadPoolExecutor() as pool:
        with refine.alone(path):
            path.write_bytes(whole[:-9])
            waiting = pool.submit(refine.open_journal, path)
            time.sleep(0.3)
            assert not waiting.done()
            path.write_bytes(whole)
        waiting.result()
    assert path.read_bytes() == whole


def test_studies_of_one_journal_are_apart(tmp_path):
    alone = proposed(tmp_path / "alone")
    assert proposed(tmp_path / "both", name="other") != alone
    assert proposed(tmp_path / "both") == alone


def test_what_is_no_number_stays_as_it_is_in_the_best_point(tmp_path):
    grid = [point | {"base": base} for point in GRID for base in ("sgd", "adam")]
    known = [(point, quality(point) + (point["base"] == "adam")) for point in grid]
    points = refine.proposals(
        refine.open_journal(tmp_path / "journal"), "row", known, 6, lambda index, point: quality(point)
    )
    assert {point["base"] for point in points} == {"adam"}
    assert len(points) == 6


def test_numbers_stay_below_their_end(tmp_path):
    """Rounded to 3 digits, a decay above 0.9995 would be 1."""
    points = proposed(tmp_path / "journal", grid=[p | {"beta": b} for p in GRID for b in (0.9994, 0.9999)])
    assert {point["beta"] for point in points} == {0.9994, 0.9999}


def test_points_that_diverge_are_left(tmp_path):
    def score(index, point):
        return -math.inf if point["lr"] > 0.05 else quality(point)

    grid = [(point, score(0, point)) for point in GRID]
    points = refine.proposals(refine.open_journal(tmp_path / "journal"), "row", grid, 20, score)
    assert sum(point["lr"] > 0.05 for point in points) < 7  # 6 of 20 where they are drawn evenly
    assert max(score(0, point) for point in points) > max(value for _, value in grid)


def test_without_optuna(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"refine.*dpopt\[refine\]"):
        refine.open_journal(tmp_path / "journal")


def test_what_is_no_journal_is_named(tmp_path):
    path = tmp_path / "refine.journal"
    path.write_text('{"op_code": 17}\nnonsense\n')
    with pytest.raises(ConfigError, match=r"refine\.journal.*move it away"):
        refine.open_journal(path)


def bound(entry):
    return clipping_bound(entry.cell.content())


class Results:
    """A store in which some cells are done, with scores of their own."""

    def __init__(self, path):
        self.path, self.records = path, {}

    def journal(self, suite):
        return self.path / f"{suite}.journal"

    def state(self, run_id):
        return self.records[run_id]["status"] if run_id in self.records else "pending"

    def record(self, run_id):
        return self.records[run_id]

    def finish(self, planned):
        for entry in planned:
            point = {"C": bound(entry), "B": entry.cell.batch_size, "lr": entry.tuned["lr"]}
            score = quality(point) + 0.01 * entry.cell.seed
            self.records[entry.cell.run_id] = {"status": "done", "validation_accuracy": score}


AXES = [
    "workloads=[{name: digits_mlp}]",
    "optimizers=[dp_sgd]",
    "settings.dp_sgd={grid: {lr: [0.01, 0.1]}}",
    "clip=[0.1,10]",
    "batch_size=[64,512]",
]


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path)


def test_a_row_goes_on_once_its_grid_is_done(write_suite, results):
    suite = write_suite(overrides=[*AXES, "refine=8", "epsilon=[1,4]"])
    grid = plan(suite)
    assert [e.cell.run_id for e in grid] == [
        e.cell.run_id for e in plan(write_suite(overrides=[*AXES, "epsilon=[1,4]"]))
    ]
    assert plan(suite, results, results.journal) == grid
    results.finish([entry for entry in grid if entry.target == 1])
    for number in (5, 8):
        planned = plan(suite, results, results.journal)
        assert plan(suite, results, results.journal) == planned
        further = [entry for entry in planned if entry.is_refined]
        assert [entry for entry in planned if not entry.is_refined] == grid
        assert len(further) == 2 * number  # two seeds
        assert {entry.target for entry in further} == {1}
        results.finish(further)
    assert plan(suite, results, results.journal) == planned


def test_every_seed_has_the_same_points_and_draws_of_its_own(write_suite, results):
    suite = write_suite(overrides=[*AXES, "refine=5"])
    results.finish(plan(suite))
    further = [entry for entry in plan(suite, results, results.journal) if entry.is_refined]
    points = {seed: [(bound(e), e.cell.batch_size, e.tuned) for e in further if e.cell.seed == seed] for seed in (0, 1)}
    assert points[0] == points[1]
    assert [entry.cell.search for entry in further if entry.cell.seed == 0] == [8, 9, 10, 11, 12]  # the grid has 8
    for entry in further:
        assert (entry.label, entry.tuning) == ("dp_sgd", "grid")
        assert entry.cell.optimizer["lr"] == entry.tuned["lr"]


def test_the_manifest_tells_what_is_refined(write_suite, results):
    suite = write_suite(overrides=[*AXES, "refine=5", "seeds=0"])
    results.finish(plan(suite))
    cells = json.loads(json.dumps(manifest(suite, plan(suite, results, results.journal))))["cells"]
    assert [cell.get("refined", False) for cell in cells] == [False] * 8 + [True] * 5


def test_a_rule_without_a_bound_is_not_refined_in_it(write_suite, results):
    suite = write_suite(overrides=[*AXES, "settings.dp_sgd.fields={clip: automatic}", "refine=5", "seeds=0"])
    results.finish(plan(suite))
    planned = plan(suite, results, results.journal)
    assert len(planned) == len({entry.cell.run_id for entry in planned})
    assert all(entry.cell.optimizer["clip"]["rule"] == "automatic" for entry in planned)
    assert sum(entry.is_refined for entry in planned) == 5


def test_what_is_whole_is_for_the_optimizer_to_say(write_suite, results):
    """And not for a grid that writes a learning rate without a point."""
    suite = write_suite(overrides=[*AXES, "settings.dp_sgd={grid: {lr: [1, 10]}}", "refine=5"])
    results.finish(plan(suite))
    further = [entry for entry in plan(suite, results, results.journal) if entry.is_refined]
    assert any(not entry.tuned["lr"].is_integer() for entry in further)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("{grid: {lr: [0.1, 1]}, selection: composed}", "charged"),
        ("{grid: {lr: [0.1, 1]}, tuning: private, selection: {rule: poisson, runs: 2}}", "charged"),
        ("{grid: {lr: [0.1, 1]}, tuning: linear_scaling, runs: 1}", "charged"),
        ("{grid: {lr: [0.1, 1]}, tuning: random, runs: 1}", "at random"),
        ("{grid: {lr: [0.1]}}", "nothing to refine"),
        ("{tuning: fixed, grid: null}", "nothing to refine"),
    ],
)
def test_rows_that_cannot_be_refined(write_suite, results, setting, reason):
    overrides = ["workloads=[digits_mlp]", "optimizers=[dp_sgd]", f"settings.dp_sgd={setting}", "refine=5"]
    with pytest.raises(ConfigError, match=rf"settings\.dp_sgd\.refine: 5 .*{reason}.*; 0 leaves"):
        plan(write_suite(overrides=overrides))
    assert plan(write_suite(overrides=[*overrides, "settings.dp_sgd.refine=0"]), results)
    assert not results.journal("small").exists()


def test_a_search_needs_validation_records(write_suite):
    overrides = ["workloads=[{name: digits_mlp, validation: 0}]", "optimizers=[dp_sgd]", "refine=5"]
    fixed = [*overrides, "settings.dp_sgd={tuning: fixed, grid: null}", "clip=[0.1,1]"]
    assert plan(write_suite(overrides=[*fixed, "refine=0"]))
    with pytest.raises(ConfigError, match=r"refine: 5 .*validation"):
        plan(write_suite(overrides=fixed))


@pytest.mark.parametrize("number", ["-1", "2.5", "many"])
def test_a_number_of_points(write_suite, number):
    with pytest.raises(ConfigError, match="refine"):
        write_suite(overrides=[f"refine={number}"])


def test_results_are_the_same_after_a_run_that_was_interrupted(write_suite, store):
    """Real runs, stopped after each round: the store's records are what planning goes by."""
    from dpopt.harness.cell import run

    overrides = ["workloads=[{name: synthetic_logreg, dim: 4}]", "optimizers=[dp_sgd]", "refine=6"]
    suite = write_suite(overrides=[*overrides, "batch_size=8000", "seeds=0"])
    numbers = []
    for _ in range(3):
        planned = plan(suite, store, store.journal_path)
        waiting = [entry.cell for entry in planned if store.state(entry.cell.run_id) == "pending"]
        numbers.append(len(waiting))
        for cell in waiting:
            run(cell, store, device="cpu")
    assert numbers == [2, 5, 1]
    store.journal_path(suite.name).unlink()
    assert plan(suite, store, store.journal_path) == planned
