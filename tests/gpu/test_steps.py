"""The table of steps: what it asks of `work` exists, slices have room for it, and what cannot be had is left out."""

import inspect
from importlib.machinery import ModuleSpec

import pytest

from dpopt.bench.cases import CASES
from dpopt.errors import ConfigError
from dpopt.gpu import steps as table_of_steps
from dpopt.gpu.run import REPORTING
from dpopt.gpu.session import MARGIN
from dpopt.gpu.steps import BATCH, LEAST, NEEDS, Step, missing, select, table
from dpopt.gpu.work import WORK, Job
from dpopt.harness.suite import load_suite, suite_files
from dpopt.workloads.models import SUBSETS

CARD, REHEARSAL = table(140 * 2**30), table(None)
JOB = Job("", {}, "cpu", "nowhere")
SLICE = 9 * 60 - REPORTING - 30
"""Seconds of a slice of nine minutes, once it has begun."""


@pytest.mark.parametrize("step", CARD + REHEARSAL, ids=lambda step: step.name)
def test_every_step_can_be_asked_for(step):
    inspect.signature(WORK[step.work]).bind(JOB, **step.arguments)
    assert step.arguments.get("case", "mlp") in CASES
    assert step.arguments.get("subset", "full") in SUBSETS


@pytest.mark.parametrize("steps", [CARD, REHEARSAL], ids=["card", "rehearsal"])
def test_names_are_unique_and_fit_a_file(steps):
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") for name in names)


def test_every_step_has_a_place_in_a_slice_of_nine_minutes():
    assert max(step.limit for step in CARD) < SLICE


def test_a_rehearsal_has_a_place_in_three_minutes():
    """As long as no step takes more than is usual; the last ones keep what they have done."""
    work = sum(step.usual or 0 for step in REHEARSAL)
    last = max(step.limit if step.resumes else MARGIN * step.usual for step in REHEARSAL)
    assert last < 3 * 60 - REPORTING
    assert 0.5 * work < 3 * 60 - REPORTING - last  # `usual` is what the slowest of them takes


def test_a_rehearsal_has_every_kind_of_step():
    kinds = [{step.work for step in steps} for steps in (CARD, REHEARSAL)]
    assert kinds[0] == kinds[1] == set(WORK)


def test_what_was_asked_for_is_in_the_table():
    arguments = [(step.work, step.arguments.get("case"), step.arguments.get("subset")) for step in CARD]
    for case in ("mlp", "cnn", "wrn", "vit_tiny_224", "vit_small_224", "vit_base_224", "gpt2_small"):
        assert ("cost", case, "full") in arguments
    for case in ("vit_tiny_224", "vit_small_224", "vit_base_224"):
        assert {subset for work, name, subset in arguments if (work, name) == ("cost", case)} == set(SUBSETS)
    assert CARD[0].name == "conformance-optimizers"
    assert [step.arguments["suite"] for step in CARD if step.resumes] == ["hyfreedp_table2_small", "adadp_cifar10"]


@pytest.mark.parametrize(("gigabytes", "base", "mlp"), [(140, 64, 4096), (40, 64, 4096), (24, 32, 2048), (8, 8, 512)])
def test_batches_are_as_large_as_the_memory_allows(gigabytes, base, mlp):
    found = {step.name: step.arguments.get("batch_size") for step in table(gigabytes * 2**30)}
    assert (found["cost-vit_base_224-full"], found["cost-mlp-full"]) == (base, mlp)
    assert found["draws-vit_base_224"] == found["batch-vit_base_224"] == base
    assert all(size is None or size >= LEAST for size in found.values())


def test_every_timed_case_says_what_it_needs():
    assert set(BATCH) <= set(NEEDS)
    assert set(BATCH) <= set(CASES)


def test_steps_are_chosen_by_name_or_by_how_it_begins():
    assert select(CARD, None) == CARD
    assert {step.work for step in select(CARD, ["cost"])} == {"cost"}
    assert [step.name for step in select(CARD, ["cost-wrn"])] == ["cost-wrn-full"]
    assert [step.name for step in select(CARD, ["draws-mlp", "conformance-cnn"])] == ["conformance-cnn", "draws-mlp"]
    with pytest.raises(ConfigError, match="did you mean 'draws'"):
        select(CARD, ["draw"])
    with pytest.raises(ConfigError, match="steps"):
        select(CARD, ["cost-vit"])  # not the beginning of a name: that of a part of one


def test_a_step_without_its_package_is_left_out(monkeypatch):
    there = {"timm": ModuleSpec("timm", None)}
    monkeypatch.setattr(table_of_steps, "find_spec", there.get)
    assert missing(Step("a", "cost", needs=("timm",))) == ""
    assert missing(Step("a", "cost", needs=("timm", "peft", "opacus"))) == "no package peft"


@pytest.fixture
def _no_data(monkeypatch):
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    table_of_steps._suite_missing.cache_clear()
    yield
    table_of_steps._suite_missing.cache_clear()


@pytest.mark.usefixtures("_no_data")
def test_a_suite_without_its_data_is_left_out(monkeypatch, tmp_path):
    assert missing(Step("a", "suite", suite=("quickstart",))) == ""
    assert missing(Step("a", "suite", suite=("no_such_suite",))) == "no suite no_such_suite"
    monkeypatch.setattr(table_of_steps, "find_spec", lambda package: None)
    assert "DPOPT_DATA" in missing(Step("a", "suite", suite=("mnist_five_epochs",)))
    monkeypatch.setenv("DPOPT_DATA", str(tmp_path))
    table_of_steps._suite_missing.cache_clear()
    assert "expected mnist/train-*.parquet" in missing(Step("a", "suite", suite=("mnist_five_epochs",)))


@pytest.mark.parametrize("step", [step for step in REHEARSAL if step.suite], ids=lambda step: step.name)
def test_rehearsed_suites_need_no_data(step):
    name, *overrides = step.suite
    if name in suite_files():
        assert load_suite(name, overrides).workloads == ("digits_mlp",)
