"""What a plan costs: counted exactly, timed by finished cells or by probes that leave nothing behind."""

import dataclasses
import re

import pytest
from small_suites import train_cell

from dpopt.cli import console, main
from dpopt.markup import duration
from dpopt.runs import probe
from dpopt.runs.prepare import prepare
from dpopt.suites import estimate
from dpopt.suites.plan import cheapest_first, draws, plan


@pytest.fixture
def planned(write_suite):
    return plan(write_suite(overrides=["optimizers=[dp_sgd,fiber,adadp]", "batch_size=[800,1600]"]))


def test_counts_are_those_of_the_plan(planned, store):
    rows = estimate.rows(planned, store)
    assert [(row.label, row.cells[0].batch_size) for row in rows] == [
        (label, size) for label in ("dp_sgd", "fiber", "adadp") for size in (800, 1600)
    ]
    small = {row.label: row for row in rows if row.cells[0].batch_size == 800}
    assert [len(small[label].cells) for label in ("dp_sgd", "adadp")] == [4, 2]  # two rates, two seeds
    assert {row.draws for row in small.values()} == {(20, 20)}  # 2 epochs of 8000 records
    assert small["dp_sgd"].gradients == 4 * 20 * 800
    assert small["adadp"].gradients == 2 * 20 * 800
    assert small["fiber"].gradients == 2 * len(small["fiber"].cells) * 20 * 800  # two points a draw


def test_finished_cells_are_timed_without_a_probe(planned, store, write_suite):
    rows = estimate.rows(planned, store)
    record = train_cell(rows[0].cells[0], store, device="cpu")
    store.fail(rows[0].cells[1].run_id, "no luck")
    store.begin(rows[0].cells[2].run_id, {})
    store.folder(rows[0].cells[2].run_id, "run.json").write_text("{")
    row = estimate.rows(planned, store)[0]
    assert (row.done, row.states.count("failed"), row.states.count("damaged"), len(row.waiting)) == (1, 1, 1, 1)
    assert row.gradients == 20 * 800
    suite = write_suite(overrides=["device=cpu"])
    others = estimate.rows(planned, store)[1:]
    probe.find_times([row, *others], store, suite)
    assert row.timing.seconds(20) == pytest.approx(record["seconds_prepare"] + record["seconds_train"])
    assert row.seconds == pytest.approx(row.timing.seconds(20))
    assert all(other.timing.is_estimate for other in others)


def test_times_of_another_device_do_not_count(planned, store, write_suite, monkeypatch):
    train_cell(planned[0].cell, store, device="cpu")
    monkeypatch.setattr(probe, "provenance", lambda device: {"device": "cuda Another"})
    rows = estimate.rows(planned, store)
    probe.find_times(rows, store, write_suite(overrides=["device=cpu"]))
    assert all(row.timing.is_estimate for row in rows)


def test_timing_a_cell_draws_and_leaves_nothing(planned, store):
    timing = probe._measure(planned[0].cell, 5, "cpu", None, isolate=False)
    assert 0 < timing.draw < 5
    assert timing.prepare > 0
    assert timing.evaluate > 0
    assert timing.memory > 10e6
    assert not store.root.exists()


@pytest.mark.parametrize(("limit", "taken"), [(5, 6), (1, 2), (100, 20)])
def test_a_probe_takes_no_more_draws_than_it_must(write_suite, limit, taken):
    """ADADP takes two draws a step; a plan has 20."""
    cell = next(entry.cell for entry in plan(write_suite()) if entry.label == "adadp")
    ready = prepare(cell, device="cpu")
    _, state, steps = probe._draw(ready, limit)
    assert ready.oracle.draws_taken == taken
    assert steps == 10
    assert not state.theta.equal(ready.state.theta)


def test_a_probe_that_fails_says_why_and_the_others_go_on(planned, store, write_suite, monkeypatch):
    """Answers come in any order."""
    wrong, right, *_ = estimate.rows(planned, store)
    answers = [(1, estimate.Timing(draw=3.0), ""), (0, None, "another revision")]
    monkeypatch.setattr(probe, "side_by_side", lambda probes, at_once: (each for each in answers[: len(probes)]))
    probe.find_times([wrong, right], store, write_suite(overrides=["device=cpu", "workers=2"]), limit=2)
    assert (wrong.timing.failure, wrong.seconds) == ("another revision", None)
    assert right.seconds == 3.0 * 20 * len(right.waiting) / (1 if right.cells[0].batch_size == 800 else 2)


def test_the_command_prints_counts_and_estimates(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(console.OUT, "_width", 200)  # a parallel worker's console has a size that COLUMNS cannot change
    arguments = ["suite=quickstart", "workloads=[{name: synthetic_logreg, dim: 3}]", "optimizers=[adadp]", "seeds=0"]
    arguments += ["epsilon=4", "accountant=rdp", "epochs=1", f"results={tmp_path / 'results'}", "device=cpu"]
    assert main(["plan", *arguments, "timed_draws=4"]) == 0
    probed = capsys.readouterr().out
    table, _, rest = probed.partition("adadp")
    assert table.splitlines()[0] == "synthetic logistic regression: d = 8, 24 FLOPs a gradient"
    heads = "optimizer tuning cells done failed to run draws gradients FLOPs ms/draw MB hours"
    assert sorted(" ".join(table.splitlines()[1:]).split()) == sorted(heads.split())
    row = ["adadp", *rest.splitlines()[0].split()]
    assert row[:7] == ["adadp", "self", "1", "0", "0", "1", "31"]
    assert float(row[7]) == pytest.approx(31 * 256, rel=0.05)
    time = r"\S+ (seconds|minutes)"
    clock = rf"about {time} with workers = \d+( \({time} if it were one\))?, {time} of it to start$"
    assert re.search(clock, probed.strip())
    assert not (tmp_path / "results").exists()
    for words in (["plan", *arguments, "timed_draws=none"], ["run", *arguments, "timed_draws=3"]):
        assert main(words) == 2
        assert "timed_draws" in capsys.readouterr().err


def test_cells_that_train_nothing_tell_no_times(write_searches, store, monkeypatch):
    """A search may come out without a run: its cell is done at once, and no draw of it can be timed."""
    suite = write_searches(["optimizers=[poisson]", "device=cpu", f"seeds={list(range(8))}".replace(" ", "")])
    planned = sorted(plan(suite), key=lambda entry: not entry.cell.untrained)
    train_cell(planned[0].cell, store, device="cpu")
    (row,) = estimate.rows(planned, store)
    assert row.draws == (0, 4)
    assert row.waiting[0].untrained, "another one comes first"
    probe.find_times([row], store, suite)
    assert row.timing.is_estimate
    asked = []
    monkeypatch.setattr(probe, "side_by_side", lambda probes, at_once: (asked.extend(probes) for _ in ()))
    monkeypatch.setattr(probe, "partial", lambda work, cell, *_: asked.append(cell))
    nothing = dataclasses.replace(row, cells=row.cells[1:2], states=row.states[1:2])
    probe.find_times([row, nothing], store, suite, limit=2)
    assert [cell.untrained for cell in asked] == [False]


def test_cheap_cells_come_first(planned):
    ordered = cheapest_first(planned)
    gradients = {entry.cell.run_id: entry.gradients_per_draw * draws(entry.cell) for entry in planned}
    spent = [gradients[cell.run_id] * cell.batch_size for cell in ordered]
    assert spent == sorted(spent)
    assert len(set(spent)) > 1
    assert {cell.run_id for cell in ordered} == gradients.keys()
    cheap = [entry.cell for entry in planned if gradients[entry.cell.run_id] * entry.cell.batch_size == spent[0]]
    assert ordered[: len(cheap)] == cheap, "the plan's order where they cost the same"


def test_the_start_counts_and_is_named_where_it_is_much(planned, store):
    rows = estimate.rows(planned, store)
    for row in rows:
        row.timing = estimate.Timing(draw=1e-3)
    seconds = sum(row.seconds for row in rows)
    assert estimate.summary(rows, 1, 3 * seconds).endswith(
        f"about {duration(4 * seconds)} with workers = 1, {duration(3 * seconds)} of it to start"
    )
    assert estimate.summary(rows, 1, 0.1 * seconds).endswith(f"about {duration(1.1 * seconds)} with workers = 1")
