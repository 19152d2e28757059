import pytest

from dpopt.audit import controls

QUICK = [control for control in controls() if control.name != "separate_subsamples"]
SLOW = [control for control in controls() if control not in QUICK]


@pytest.mark.parametrize("control", QUICK, ids=lambda control: control.name)
def test_a_mistake_is_flagged_and_its_repair_is_not(control):
    assert control.bound(control.scores()) > control.epsilon
    assert control.bound(control.scores(is_repaired=True)) <= control.epsilon


@pytest.mark.slow
@pytest.mark.parametrize("control", SLOW, ids=lambda control: control.name)
def test_a_mistake_that_needs_many_runs_is_flagged(control):
    assert control.bound(control.scores()) > control.epsilon
    assert control.bound(control.scores(is_repaired=True)) <= control.epsilon


@pytest.mark.parametrize("control", QUICK, ids=lambda control: control.name)
def test_a_control_claims_what_it_says(control):
    for is_repaired in (False, True):
        plan = control.build(is_repaired).plan
        assert plan.delta == control.delta
        assert 0.99 * control.epsilon < plan.epsilon <= control.epsilon
        assert all(noise > 0 for noise in plan.noise.values())


def test_names_are_unique():
    assert len({control.name for control in controls()}) == 6
