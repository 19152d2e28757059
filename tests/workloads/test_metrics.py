import math
from importlib.metadata import EntryPoint

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, log_loss, recall_score, roc_auc_score

from dpopt.workloads import metrics
from dpopt.workloads.metrics import area_under_curve, classification_report


def test_scores_agree_with_scikit_learn():
    torch.manual_seed(0)
    targets = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2])
    outputs = torch.randn(10, 3) + torch.nn.functional.one_hot(targets, 3)
    report = classification_report(outputs, targets, 3)
    predicted = outputs.argmax(dim=1)
    assert report["macro_accuracy"] == pytest.approx(balanced_accuracy_score(targets, predicted))
    assert report["class_accuracy"] == pytest.approx(recall_score(targets, predicted, average=None))
    assert report["nll"] == pytest.approx(log_loss(targets, outputs.double().softmax(dim=1)))


def test_a_class_without_records_has_no_accuracy_and_no_weight():
    report = classification_report(torch.tensor([[5.0, 0, 0], [5.0, 0, 0]]), torch.tensor([0, 2]), 3)
    assert report["class_accuracy"] == [1.0, None, 0.0]
    assert report["macro_accuracy"] == 0.5


def test_area_under_the_curve_agrees_with_scikit_learn():
    torch.manual_seed(0)
    targets = torch.randint(0, 2, (200,))
    outputs = (3 * torch.randn(200, 2) + torch.nn.functional.one_hot(targets, 2)).round()  # with many ties
    scores = outputs[:, 1] - outputs[:, 0]
    assert area_under_curve(outputs, targets) == pytest.approx(roc_auc_score(targets, scores))
    assert area_under_curve(torch.zeros(4, 2), torch.arange(4) % 2) == 0.5
    assert area_under_curve(outputs, torch.ones_like(targets)) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 1, slice(None)])
def test_a_record_whose_outputs_are_not_all_finite_counts_as_wrong(bad, column):
    """As in a sum over the others, with the record on the losing side of every pair."""
    generator = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(40, 2, generator=generator), torch.arange(40) % 2
    rows = torch.tensor([0, 1, 2, 7])
    outputs[rows, column] = bad
    rest = torch.ones(40, dtype=torch.bool)
    rest[rows] = False
    hits = (outputs.argmax(1) == targets) & rest
    report = classification_report(outputs, targets, 2)
    assert report["class_accuracy"] == pytest.approx([float(hits[k::2].sum()) / 20 for k in range(2)])
    assert math.isnan(report["nll"])
    score = (outputs[:, 1] - outputs[:, 0]).double()
    pairs = [(i, j) for i in range(1, 40, 2) for j in range(0, 40, 2)]
    won = sum(bool(rest[i] & rest[j] & (score[i] > score[j])) for i, j in pairs)
    assert area_under_curve(outputs, targets) == pytest.approx(won / len(pairs))


def test_a_metric_of_another_package_is_a_score_of_each_classifier(monkeypatch):
    point = EntryPoint("largest", "torch:amax", "dpopt.metrics")
    monkeypatch.setattr(metrics, "entry_points", lambda group: [point] if group == "dpopt.metrics" else [])
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda outputs, targets: float(outputs.max()) + len(targets))
    metrics._of_packages.cache_clear()
    try:
        report = classification_report(torch.tensor([[0.0, 5.0], [1.0, 0.0]]), torch.tensor([1, 0]), 2)
    finally:
        monkeypatch.undo()
        metrics._of_packages.cache_clear()
    assert (report["largest"], report["macro_accuracy"]) == (7.0, 1.0)
