import math

import pytest
import torch

from dpopt.clipping import Abadi, Automatic, Normalized, clip_rule, clip_spec
from dpopt.clipping.rules import AtBound
from dpopt.errors import ConfigError

NORMS = torch.tensor([0.0, 1e-6, 0.3, 1.0, 5.0, 1e12])


@pytest.mark.parametrize("rule", [Abadi(0.5), Automatic(2.0, 0.1), Normalized(0.5)], ids=str)
def test_no_clipped_norm_exceeds_the_sensitivity(rule):
    clipped = NORMS * rule.factor(NORMS)
    assert clipped.isfinite().all()
    assert clipped.max() <= rule.sensitivity * (1 + 1e-6)
    assert clipped[-1] == pytest.approx(rule.sensitivity, rel=1e-5)


def test_formulas():
    torch.testing.assert_close(Abadi(2.0).factor(torch.tensor([1.0, 4.0])), torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(Automatic(2.0, 0.5).factor(torch.tensor([1.5])), torch.tensor([1.0]))
    torch.testing.assert_close(Normalized(2.0).factor(torch.tensor([1.0, 4.0])), torch.tensor([0.5, 0.25]))
    assert Automatic().sensitivity == Normalized(7.0).sensitivity == 1  # mistake 20: the noise is sigma, not sigma C
    torch.testing.assert_close(Abadi(math.inf).factor(NORMS), torch.ones(6))


def test_defaults_are_the_papers():
    """AUTO-S has gamma = 0.01; all bounds are one."""
    assert clip_spec(Abadi()) == {"rule": "abadi", "bound": 1.0}
    assert clip_spec(Automatic()) == {"rule": "automatic", "bound": 1.0, "stabilizer": 0.01}
    assert clip_spec(Normalized()) == {"rule": "normalized", "bound": 1.0}


@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_a_bound_may_be_a_tensor(bound):
    rule, same = AtBound(torch.tensor(bound)), Normalized(bound)
    torch.testing.assert_close(rule.factor(NORMS), same.factor(NORMS))
    assert rule.sensitivity == same.sensitivity


@pytest.mark.parametrize("rule", [Abadi(0.25), Abadi(math.inf), Automatic(1.0, 0.02), Normalized(3.0)], ids=str)
def test_spec_round_trip(rule):
    assert clip_rule(clip_spec(rule)) == rule


def test_short_forms():
    assert clip_rule(0.5) == Abadi(0.5)
    assert clip_rule("inf") == Abadi(math.inf)
    assert clip_rule("automatic") == Automatic()
    assert clip_rule(Normalized(2.0)) == Normalized(2.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("automatc", "did you mean 'automatic'"),
        (-1.0, "clip.bound"),
        (True, "expected a bound"),
        ({"bound": 1.0}, "expected a bound, or a rule"),
        ({"rule": "abadi", "bond": 1.0}, "did you mean 'bound'"),
        ({"rule": "normalized", "bound": "inf"}, "clip.bound"),
    ],
)
def test_bad_rules(value, message):
    with pytest.raises(ConfigError, match=message):
        clip_rule(value)
