import dataclasses
import functools
import io
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import scipy.stats
import torch
from small_suites import train_cell
from stored import stable

from dpopt import registry
from dpopt.cells import Cell
from dpopt.errors import ConfigError
from dpopt.privacy import Ledger, epsilon, sampling
from dpopt.privacy.calibration import score_noise
from dpopt.privacy.selection import Composed
from dpopt.runs import train as cells
from dpopt.runs.prepare import prepare
from dpopt.runs.worker import attempt
from dpopt.store import Store
from dpopt.store.bits import packed, unpacked
from dpopt.suites.plan import plan
from dpopt.training import steps
from dpopt.workloads.base import Split
from dpopt.workloads.synthetic import SyntheticLogReg


def planned_cell(write_suite, label, overrides=()):
    return next(entry.cell for entry in plan(write_suite(overrides=overrides)) if entry.label == label)


def save(store, run_id, content):
    """A checkpoint that is whole, whatever it says."""
    file = io.BytesIO()
    torch.save(content, file)
    store.save_checkpoint(run_id, file.getvalue())


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the run may catch it."""


def test_a_record_says_what_was_run_and_spent(write_suite, store):
    cell = planned_cell(write_suite, "hyfreedp")
    record = train_cell(cell, store)
    assert record.items() <= store.record(cell.run_id).items()
    assert store.state(cell.run_id) == "done"
    ledger = store.ledger(cell.run_id)
    assert epsilon(ledger, record["delta"], "rdp") == record["epsilon"] <= record["epsilon_target"] == 2
    assert epsilon(ledger, record["delta"], "pld") <= 2
    assert len(ledger) == record["draws"] == 20
    assert record["test_accuracy"] > 0.4
    assert record["provenance"]["versions"]["torch"] == torch.__version__.split("+")[0]
    curve = store.curve(cell.run_id)
    assert [entry["draw"] for entry in curve] == list(range(1, 21))
    assert curve[-1]["test_accuracy"] == record["test_accuracy"]


def test_the_curve_holds_the_bound_that_an_optimizer_adapts(write_suite, store, tmp_path):
    """As its state has it after each draw; a step-size rule's own rounds of losses, every fifth draw, change it."""
    ready = prepare(cell := planned_cell(write_suite, "hyfreedp"), device="cpu")
    bounds = [float(state.bound) for state, _ in steps(ready.stepper, ready.oracle, ready.state)]
    record = train_cell(cell, store)
    assert [entry["bound"] for entry in store.curve(cell.run_id)] == bounds
    assert (record["bound"], len(set(bounds))) == (bounds[-1], 4)
    few = train_cell(cell, other := Store(tmp_path / "other"), marks=4)
    assert [entry["draw"] for entry in other.curve(cell.run_id)] == [5, 10, 15, 20]
    assert stable(record) == stable(few), "entries of the curve change nothing else"
    plain = planned_cell(write_suite, "dp_sgd")
    assert not {"eta", "bound"} & train_cell(plain, store).keys()
    assert "bound" not in store.curve(plain.run_id)[-1]


def test_a_record_holds_which_test_records_are_right(write_suite, store, tmp_path, monkeypatch):
    cell = planned_cell(write_suite, "hyfreedp")
    record = train_cell(cell, store)
    right = unpacked(record["right"], record["tested"])
    assert 0 < right.mean() == record["test_accuracy"] < 1
    whole = SyntheticLogReg.metric  # a score of which a record can have a share leaves no bits
    monkeypatch.setattr(SyntheticLogReg, "metric", lambda *args: whole(*args) / 2)
    halved = train_cell(cell, Store(tmp_path / "other"))
    assert "right" not in halved
    assert halved["test_accuracy"] == record["test_accuracy"] / 2
    with pytest.raises(ValueError, match="expected 9 bits, in 2 bytes and not 1"):
        unpacked(packed(right[:8]), 9)
    with pytest.raises(ValueError, match="expected 8 bits"):
        unpacked("AAAA", 8)


def kill_half_way(at_marks, cell, store, **options):
    """Train a cell until its eleventh draw, with a checkpoint at each."""

    def kill(draws):
        if draws > 10:
            raise Killed

    with at_marks(kill), pytest.raises(Killed):
        train_cell(cell, store, checkpoint_seconds=0, **options)


def test_an_isolated_cell_is_the_same_cell(write_suite, store, tmp_path, at_marks):
    """And goes on where one that was not isolated was killed, as its checkpoints are the same."""
    cell = planned_cell(write_suite, "hyfreedp", ["settings.hyfreedp.average=0.9"])
    quiet = Store(tmp_path / "quiet")
    whole = train_cell(cell, quiet)
    kill_half_way(at_marks, cell, store)
    isolated = train_cell(cell, store, isolate=True)
    assert isolated.pop("isolated")
    assert stable(isolated) == stable(whole)
    assert store.curve(cell.run_id) == quiet.curve(cell.run_id)
    kill_half_way(at_marks, cell, again := Store(tmp_path / "again"), isolate=True)
    assert stable(train_cell(cell, again)) == stable(whole)


def test_a_cell_killed_after_its_last_draw_is_finished_from_its_checkpoint(write_suite, store, tmp_path, monkeypatch):
    """Its times go on counting, and its metrics are the final ones whatever became of its curve's file."""
    cell = planned_cell(write_suite, "dp_sgd")
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "finish", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            train_cell(cell, store, checkpoint_seconds=0)
    saved = torch.load(io.BytesIO(store.load_checkpoint(cell.run_id)), weights_only=True)
    wall, cpu = saved["elapsed"]
    assert min(wall, cpu) > 0
    save(store, cell.run_id, saved | {"elapsed": (1000 + wall, 500 + cpu)})
    store.restart_curve(cell.run_id, store.curve(cell.run_id)[:3])
    record = train_cell(cell, store)
    assert 1000 < record["seconds_train"] < 1500
    assert 500 < record["seconds_cpu"] < 1000
    assert stable(record) == stable(train_cell(cell, Store(tmp_path / "quiet")))
    assert record["draws"] == len(store.curve(cell.run_id)) == 20


def test_a_checkpoint_of_another_plan_starts_over(write_suite, store, tmp_path, capsys):
    """Had the noise been solved anew to another value, draws already taken would not be those of the plan."""
    from dpopt.privacy import Draw, Ledger

    cell = planned_cell(write_suite, "dp_sgd")
    store.begin(cell.run_id, cell.content())
    leaves = [torch.zeros(10), torch.zeros(10)]
    save(store, cell.run_id, {"run_id": cell.run_id, "leaves": leaves, "ledger": Ledger([Draw(0.1, (9.0,))]).to_json()})
    assert stable(train_cell(cell, store)) == stable(train_cell(cell, Store(tmp_path / "quiet")))
    assert "not how the planned" in capsys.readouterr().out


def test_numbers_do_not_depend_on_threads_or_global_state(write_suite, store, tmp_path):
    cell = planned_cell(write_suite, "hyfreedp")
    first = train_cell(cell, store)
    torch.manual_seed(123)
    torch.set_num_threads(2)
    assert stable(train_cell(cell, Store(tmp_path / "again"))) == stable(first)


def test_seeds_pair_optimizers_but_not_their_noise(write_suite):
    one, other = (planned_cell(write_suite, label) for label in ("dp_sgd", "adadp"))
    first, second = (prepare(cell, device="cpu").oracle for cell in (one, other))
    assert first._draw_seed == second._draw_seed
    assert first._noise_seed != second._noise_seed
    assert one.run_id != other.run_id


def test_the_runs_of_a_search_have_draws_of_their_own(write_suite):
    """Mistake 1 in a search: runs that share their draws cost more than one after the other."""
    searched = [entry.cell for entry in plan(write_suite()) if entry.label == "dp_sgd" and entry.cell.seed == 0]
    assert [cell.search for cell in searched] == [0, 1]
    ready = [prepare(cell, device="cpu") for cell in searched]
    assert len({one.oracle._draw_seed for one in ready}) == 2
    assert ready[0].engine.theta.equal(ready[1].engine.theta), "they begin with the same weights"
    assert "search" not in searched[0].content()


def test_a_cell_of_an_older_kernel_loads_and_is_not_run_as_if_it_were_of_this_one(write_suite, store):
    cell = planned_cell(write_suite, "dp_sgd")
    assert cell.content()["kernel"] == cell.kernel == sampling.REVISION
    content = {key: value for key, value in cell.content().items() if key != "kernel"}
    old = Cell.from_content(content)
    assert (old.content(), old.kernel) == (content, 1)
    assert old.run_id != cell.run_id
    with pytest.raises(ConfigError, match=r"cell\.kernel: 1.*revision"):
        train_cell(old, store)
    assert store.state(old.run_id) == "pending"
    with pytest.raises(ConfigError, match=r"cell\.dry_run: 8\.0 .*no such field"):
        Cell.from_content(content | {"dry_run": 8.0})


@dataclass(frozen=True)
class Stored(SyntheticLogReg):
    """The same records, stored ten times too large; flipped in training where `flips`."""

    flips: ClassVar[bool] = False

    def load(self):
        pool, test = super().load()
        return Split(pool.x * 10, pool.y), Split(test.x * 10, test.y)

    def transform(self, x):
        return x / 10

    def augment(self, x):
        return torch.where(torch.rand(len(x), 1) < 0.5, -x, x) if self.flips else x


Stored.__name__ = SyntheticLogReg.__name__  # the split depends on it


def test_records_are_transformed_everywhere_and_augmented_in_training_only(write_suite, store, tmp_path, monkeypatch):
    def run(name, workload):
        made = {"workload": workload(dim=4), "optimizer": optimizer}
        monkeypatch.setattr(registry, "from_spec", lambda what, spec: made[what])
        return stable(train_cell(cell, Store(tmp_path / name)))

    cell = planned_cell(write_suite, "dp_sgd")
    optimizer = registry.from_spec("optimizer", cell.optimizer)
    plain, stored = run("plain", SyntheticLogReg), run("stored", Stored)
    assert stored["test_accuracy"] == pytest.approx(plain["test_accuracy"], abs=0.01)
    assert stored["validation_loss"] == pytest.approx(plain["validation_loss"], rel=1e-3)
    monkeypatch.setattr(Stored, "flips", True)
    flipped = run("flipped", Stored)
    assert flipped["test_loss"] > plain["test_loss"] + 0.05
    assert flipped == run("again", Stored)


def test_a_failure_is_noted_and_is_no_result(write_suite, store):
    suite = write_suite(overrides=["device=cpu"])
    cell = plan(suite)[0].cell
    old = dataclasses.replace(cell, optimizer={**cell.optimizer, "revision": 0})
    with store.lease(old.run_id) as lease:
        kind, reason = attempt(old, store, lease, suite)
    assert kind == "failed"
    assert "revision" in reason
    assert store.state(old.run_id) == "failed"
    assert "ConfigError" in store.error(old.run_id)["traceback"]


def test_the_released_score_is_the_raw_one_with_the_stated_noise(write_searches, monkeypatch):
    """Over many run ids: normal, of the stated standard deviation, and the same for the same run."""
    monkeypatch.setattr(cells, "score_noise", functools.cache(score_noise))
    cell = planned_cell(write_searches, "composed", ["optimizers=[composed]"])
    final = {"validation_accuracy": 0.5}
    oracle, workload = SimpleNamespace(ledger=Ledger()), SimpleNamespace(score="accuracy")

    def score_of(seed):
        ready = SimpleNamespace(cell=dataclasses.replace(cell, seed=seed), oracle=oracle, workload=workload)
        return cells._charge(ready, final, 1000)["released_score"]

    released = [score_of(seed) for seed in range(800)]
    (std,) = {entry["std"] for entry in released}
    (noise,) = {entry["noise"] for entry in released}
    assert std == noise / 1000
    assert noise == score_noise(Composed(3), 2.0, cell.delta, "rdp") > 1
    deviations = np.array([entry["value"] - 0.5 for entry in released]) / std
    assert len(set(deviations)) == 800
    assert scipy.stats.kstest(deviations, "norm").pvalue > 1e-3
    again = score_of(5)
    assert again == released[5]


def test_a_run_of_a_charged_search_records_what_it_releases(write_searches, store):
    cell = planned_cell(write_searches, "composed", ["optimizers=[composed]"])
    record = train_cell(cell, store)
    released = record["released_score"]
    noise = np.random.default_rng(sampling.derive("score", cell.run_id)).standard_normal()
    assert released["value"] == pytest.approx(record["validation_accuracy"] + released["std"] * noise)
    assert released["std"] == released["noise"] / 1000, "its records held out"
    assert 0.001 < released["std"] < 0.1
    assert record.items() <= store.record(cell.run_id).items()
    without = dataclasses.replace(cell, selection=None)
    assert not {"epsilon_total", "released_score"} & train_cell(without, store).keys()


def test_a_search_without_privacy_needs_no_noise(write_searches, store):
    cell = planned_cell(write_searches, "composed", ["optimizers=[composed]", "epsilon=inf"])
    record = train_cell(cell, store)
    assert record["epsilon"] == record["epsilon_total"] == "inf"
    assert "released_score" not in record


def test_an_untrained_cell_releases_the_model_as_it_was_initialised(write_searches, store):
    cell = dataclasses.replace(planned_cell(write_searches, "poisson", ["optimizers=[poisson]"]), untrained=True)
    ready, record = prepare(cell, device="cpu"), train_cell(cell, store, device="cpu")
    torch.manual_seed(sampling.derive("init", cell.workload, cell.seed) >> 65)
    initial = ready.workload.model()
    x, y = ready.watched["test"]
    assert record["test_accuracy"] == pytest.approx((initial(x).argmax(1) == y).float().mean().item())
    assert (record["epsilon"], record["epsilon_total"], record["draws"]) == (0, cell.epsilon, 0)
    assert (record["status"], record["noise"]) == ("done", {})
    assert [entry["draw"] for entry in store.curve(cell.run_id)] == [0]
    assert len(store.ledger(cell.run_id)) == 0
