"""Tables: what a model is given, its sizes, and what is refused before any data are read."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import fabricated
import numpy as np
import pytest
import torch
from torch import nn

from dpopt import registry
from dpopt.errors import ConfigError
from dpopt.workloads import data, models
from dpopt.workloads.base import Split
from dpopt.workloads.data import catalogue, records
from dpopt.workloads.data.catalogue import Column
from dpopt.workloads.data.source import Source


@pytest.fixture
def people(root, monkeypatch):
    """A table with known checksums, and its files."""
    return fabricated.table(monkeypatch, root, "people")


def encoded(column, values):
    """The numbers that the values of one column become."""
    dataset = replace(catalogue.entry("people"), columns={"c": column})
    return records.encode(dataset, Source("t", ("c",), len(values), lambda name: iter([values[:2], values[2:]])))[0]


def test_numbers_are_scaled_by_the_stated_range(people):
    values = [10, 20.0, 15, None, float("nan"), -1e9, float("inf"), True]
    scaled = [-1, 1, 0, 0, 0, -1, 1, -1]
    is_missing = [0, 0, 0, 1, 1, 0, 0, 0]
    assert encoded(Column(range=(10, 20)), values).T.tolist() == [scaled, is_missing]
    assert np.isfinite(encoded(Column(range=(0, 1e-300)), [0, 1, 2])).all()
    with pytest.raises(ConfigError, match=r"t\.c: 'x' .*expected numbers"):
        encoded(Column(range=(0, 1)), [1, 2, "x"])


def test_categories_are_one_hot_and_all_others_are_one(people):
    rows = encoded(Column(values=("a", "7", "True")), ["a", 7, True, "b", None]).argmax(axis=1)
    assert rows.tolist() == [0, 1, 2, 3, 3]


def test_other_ranges_make_other_inputs_of_the_same_records(people, monkeypatch):
    before = data.table("people", "train")
    columns = people.columns | {"age": Column(range=(0, 50))}
    monkeypatch.setitem(catalogue.entries(), "people", replace(people, columns=columns))
    after = data.table("people", "train")
    assert torch.equal(after.y, before.y)
    present = before.x[:, 1] == 0
    assert torch.allclose(after.x[present, 0], (2 * before.x[present, 0] + 1).clamp(max=1))


def test_the_model(people):
    for hidden, sizes in ((0, [5, 2]), (8, [5, 8, 2]), ((8, 4), [5, 8, 4, 2])):
        model = registry.create_workload("table", data="people", hidden=hidden).model()
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        assert [layers[0].in_features, *(layer.out_features for layer in layers)] == sizes


def test_a_model_of_another_package(people, monkeypatch):
    """Of the entry points that are not asked for, none is imported; one that fails is named."""
    values = {"own": "torch.nn:Linear", "gone": "no_such:net", "other": "torch.nn:Conv2d"}
    points = {name: EntryPoint(name, value, "dpopt.models") for name, value in values.items()}
    monkeypatch.setattr(models, "outside", lambda: points)
    workload = registry.create_workload("table", data="people", architecture="own")
    assert [parameter.shape for parameter in workload.model().parameters()] == [(5, 2), (5,)]
    assert registry.spec("workload", "table", workload)["architecture"] == "own"
    plain = registry.create_workload("table", data="people")
    assert "architecture" not in registry.spec("workload", "table", plain), "ids of published cells have none"
    for name, message in (("owl", "'own'"), ("gone", "no_such"), ("other", "kernel_size")):
        with pytest.raises(ConfigError, match=rf"workload\.architecture: '{name}' .*{message}"):
            registry.create_workload("table", data="people", architecture=name).check()


def test_it_is_planned_without_files(people, monkeypatch, tmp_path):
    monkeypatch.setenv("DPOPT_DATA", str(tmp_path / "nowhere"))
    workload = registry.create_workload("table", data="people", validation=8)
    workload.check()
    assert (workload.examples, workload.outline().tested) == (40, 20)
    assert [absent.name for absent in workload.missing()] == ["people"]


def test_two_classes_have_an_area_under_the_curve(people, monkeypatch):
    workload = registry.create_workload("table", data="people")
    split = Split(torch.zeros(4, 5), torch.tensor([0, 1, 1, 0]))
    perfect = torch.tensor([[1.0, 0], [0, 1], [0, 2], [3, 0]])
    assert workload.report(lambda x: perfect, split)["auc"] == 1
    monkeypatch.setitem(catalogue.entries(), "people", replace(people, classes=3))
    assert "auc" not in workload.report(lambda x: torch.randn(4, 3), split)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"workload\.data: '' .*dpopt new data"),
        ({"data": "mnist"}, r"workload\.data: 'mnist' .*expected a table, and it is one of image"),
        ({"data": "people", "hidden": -1}, r"hidden: -1"),
        ({"data": "people", "hidden": (8, 0)}, r"hidden"),
    ],
)
def test_fields_that_cannot_be_used(people, values, message):
    with pytest.raises(ConfigError, match=message):
        registry.create_workload("table", **values)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({}, "expected `range`"),
        ({"range": (0, 1), "values": ("a",)}, "expected `range`"),
        ({"range": (1, 1)}, "smallest number"),
        ({"values": ("a", "b", "a")}, "repeated"),
    ],
)
def test_a_column_that_contradicts_itself(column, message):
    with pytest.raises(ConfigError, match=message):
        Column(**column)


def test_a_table_has_columns_and_nothing_else_has(people):
    for changes in ({"columns": {}}, {"inputs": "age"}, {"kind": "text"}):
        with pytest.raises(ConfigError, match=r"people\.columns.*expected those of a table"):
            replace(people, **changes)
