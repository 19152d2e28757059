import math

import pytest
import torch

from dpopt.errors import ConfigError
from dpopt.study.weights import QUANTILES, class_weights, norm_quantiles, relative_weights

NORMS = torch.tensor([0.5, 2.0, 4.0, 8.0, 0.0])
LABELS = torch.tensor([0, 0, 1, 1, 3])


def test_class_weights_by_hand():
    weights = class_weights(NORMS, LABELS, 2.0, 4)
    assert weights[[0, 1, 3]].tolist() == pytest.approx([1.0, (0.5 + 0.25) / 2, 1.0])
    assert math.isnan(weights[2])


def test_what_an_engine_leaves_out_weighs_nothing():
    norms = torch.tensor([1.0, math.nan, math.inf])
    assert class_weights(norms, torch.zeros(3), 1.0, 1).tolist() == pytest.approx([1 / 3])
    assert class_weights(norms, torch.zeros(3), math.inf, 1).tolist() == pytest.approx([1 / 3])


def test_relative_weights_divide_by_the_class_that_a_small_bound_favours():
    """At C = 1 class 0 has the largest weight, 0.75; at C = 4 it has 1 and class 1 has 0.75."""
    norms, labels = NORMS[:4], LABELS[:4]
    assert relative_weights(norms, labels, 1.0, 2).tolist() == pytest.approx([1.0, (0.25 + 0.125) / 2 / 0.75])
    assert relative_weights(norms, labels, 4.0, 2).tolist() == pytest.approx([1.0, 0.75])


def test_the_favoured_class_is_the_same_for_every_bound():
    """Class 1 has a larger mean weight at C = 1, class 0 at C = 10."""
    norms, labels = torch.tensor([5.0, 5.0, 0.5, 40.0]), torch.tensor([0, 0, 1, 1])
    assert class_weights(norms, labels, 1.0, 2).argmax() == 1
    assert class_weights(norms, labels, 10.0, 2).argmax() == 0
    assert relative_weights(norms, labels, 10.0, 2)[1] == 1
    assert relative_weights(norms, labels, 10.0, 2)[0] > 1


def test_quantiles():
    norms = torch.arange(101.0)
    assert norm_quantiles(norms) == pytest.approx({f"q{100 * level:g}": 100 * level for level in QUANTILES})
    assert norm_quantiles(torch.cat([norms, torch.tensor([math.inf, math.nan])])) == norm_quantiles(norms)
    assert all(map(math.isnan, norm_quantiles(torch.zeros(0)).values()))
    assert list(norm_quantiles(norms))[3] == "q50"


@pytest.mark.parametrize(
    ("norms", "labels", "clip", "name"),
    [
        (NORMS, LABELS[:3], 1.0, "labels"),
        (NORMS, LABELS, 0.0, "clip"),
        (NORMS, LABELS + 1, 1.0, "labels"),
        (NORMS, LABELS - 1, 1.0, "labels"),
    ],
)
def test_bad_input(norms, labels, clip, name):
    with pytest.raises(ConfigError, match=name):
        class_weights(norms, labels, clip, 4)
