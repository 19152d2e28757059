"""Workloads whose score is not accuracy, and the further scores of a run."""

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from small_suites import train_cell

from dpopt import registry
from dpopt.results import choosing, frames, tables
from dpopt.runs import train as cells
from dpopt.suites.plan import manifest, plan
from dpopt.workloads.synthetic import SyntheticLogReg


@dataclass(frozen=True)
class Likelihood(SyntheticLogReg):
    """The same records, judged by the log-likelihood of their labels."""

    score: ClassVar[str] = "log_likelihood"
    seen: ClassVar[list[Any]] = []

    def metric(self, output, target):
        return -F.cross_entropy(output, target, reduction="none")

    def report(self, predict, split):
        output = predict(split.x)
        self.seen.append((output, split))
        hits = output.argmax(-1) == split.y
        by_class = [float(hits[split.y == label].double().mean()) for label in range(2)]
        return {
            "macro_accuracy": sum(by_class) / 2,
            "by_class": by_class,
            "worst": -math.inf,
            "nested": {"nan": math.nan},
        }


@pytest.fixture
def likelihood(monkeypatch):
    made = registry.from_spec
    Likelihood.seen.clear()
    monkeypatch.setattr(
        registry, "from_spec", lambda kind, spec: Likelihood(dim=4) if kind == "workload" else made(kind, spec)
    )


def run_all(suite, store, label):
    planned = [entry for entry in plan(suite) if entry.label == label]
    records = [train_cell(entry.cell, store) for entry in planned]
    store.extend_suite(suite.name, manifest(suite, planned))
    return records


def test_a_record_names_its_score_and_holds_the_further_ones(write_suite, store, likelihood):
    record, _ = run_all(write_suite(), store, "adadp")
    assert record["score"] == "log_likelihood"
    assert record["test_log_likelihood"] == pytest.approx(-record["test_loss"])
    assert {"validation_log_likelihood", "test_log_likelihood"} <= store.curve(record["run_id"])[-1].keys()
    assert "test_accuracy" not in record
    output, split = Likelihood.seen[0]
    assert F.cross_entropy(output, split.y).item() == pytest.approx(record["test_loss"], rel=1e-5)
    scores = record["scores"]
    assert scores["macro_accuracy"] == pytest.approx(sum(scores["by_class"]) / 2)
    assert scores["worst"] is None
    assert scores["nested"] == {"nan": None}
    assert json.loads(json.dumps(scores, allow_nan=False)) == store.record(record["run_id"])["scores"]


def test_accuracy_is_not_named_and_has_no_empty_scores(write_suite, store):
    record, _ = run_all(write_suite(), store, "adadp")
    assert "test_accuracy" in record
    assert not {"score", "scores"} & record.keys()


def test_selection_tables_and_frames_go_by_the_score(write_suite, store, likelihood):
    run_all(write_suite(), store, "dp_sgd")
    loaded = frames.load(store, "small").cells
    assert set(loaded["score"]) == {"log_likelihood"}
    selected = choosing.select(loaded)
    best = loaded.groupby("seed")["validation_log_likelihood"].max()
    assert sorted(selected["validation_log_likelihood"]) == sorted(best)
    table = tables.comparison(store, selected)
    assert table["mean"].tolist() == [pytest.approx(selected["test_log_likelihood"].mean())]
    assert table["score_macro_accuracy"].tolist() == [pytest.approx(selected["score_macro_accuracy"].mean())]
    assert table["score_worst"].isna().all()
    text = tables.as_table(table, "small", ["macro_accuracy"]).markdown
    assert "log-likelihood (nats)" in text
    assert "macro accuracy (%)" in text
    assert f"{table['mean'][0]:.3f} ± " in text
    assert "Test score: mean" in text
    curves = frames.curves(store, selected)
    assert curves["test_log_likelihood"].notna().all()
    assert set(curves["score"]) == {"log_likelihood"}


def test_a_diverged_run_is_a_record_without_further_scores(write_suite, store, likelihood, monkeypatch):
    step = type(registry.create("dp_sgd")).step
    diverged = lambda self, state, oracle: (new := step(self, state, oracle))._replace(theta=new.theta * math.nan)  # noqa: E731
    monkeypatch.setattr(type(registry.create("dp_sgd")), "step", diverged)
    records = run_all(write_suite(), store, "dp_sgd")
    assert {record["status"] for record in records} == {"diverged"}
    assert all(math.isnan(record["test_log_likelihood"]) for record in records)
    assert not any("scores" in record for record in records)
    results = frames.load(store, "small")
    assert results.problems == []
    selected = choosing.select(results.cells)
    assert len(selected) == 2
    assert "not finite" in tables.as_table(tables.comparison(store, selected), "small").markdown


def test_predict_takes_any_number_of_stored_inputs_and_does_not_train(write_suite):
    cell = next(entry.cell for entry in plan(write_suite()) if entry.label == "dp_sgd")
    ready = cells.prepare(cell, device="cpu")
    dropping = torch.nn.Sequential(torch.nn.Dropout(0.5), ready.model)
    from dpopt import clipping
    from dpopt.training import predictor

    engine = clipping.engine(dropping.train(), ready.workload.loss, "vmap")
    predict = predictor(engine, dropping, engine.theta, lambda x: 2 * x)
    x = torch.randn(5000, 4)
    assert torch.allclose(predict(x), ready.model(2 * x), atol=1e-5)
    assert dropping.training


@dataclass(frozen=True)
class Overflowing(SyntheticLogReg):
    """Test records whose first number is large have no finite output, whatever the parameters are."""

    def transform(self, x):
        return x / (x[:, :1].abs() < 1)


def test_a_search_looks_at_its_score_and_the_parameters_and_never_at_test_outputs(write_suite, store, monkeypatch):
    """Outputs that are not finite count as wrong; that there are any is in the record, and changes no selection."""
    made = registry.from_spec
    monkeypatch.setattr(
        registry, "from_spec", lambda kind, spec: Overflowing(dim=4) if kind == "workload" else made(kind, spec)
    )
    records = run_all(write_suite(), store, "dp_sgd")
    assert {record["status"] for record in records} == {"done"}, "the parameters are finite"
    for record in records:
        ready = cells.prepare(cells.Cell.from_content(record["cell"]), device="cpu")
        x = ready.watched["test"].x
        unscored = int((x[:, 0].abs() >= 1).sum())
        assert 0 < unscored == record["test_unscored"] < record["tested"] == len(x)
        assert math.isnan(record["test_loss"])
        assert record["test_accuracy"] <= 1 - unscored / len(x)
        assert store.curve(record["run_id"])[-1]["test_unscored"] == unscored
    selected = choosing.select(frames.load(store, "small").cells)
    assert (selected["selected_by"] == selected["validation_accuracy"]).all()
