import pytest

from dpopt.audit import controls

CONTROLS = [
    pytest.param(control, id=control.name, marks=pytest.mark.slow if control.name == "separate_subsamples" else [])
    for control in controls()
]


def test_the_controls_are_those_of_the_guide():
    names = {"realised_batch", "bare_losses", "raw_rejection", "raw_step_size", "shared_noise", "separate_subsamples"}
    names |= {"last_bits"}
    assert {control.name for control in controls()} == names


@pytest.mark.parametrize("control", CONTROLS)
def test_a_mistake_is_flagged_and_its_repair_is_not(control):
    assert control.bound(control.scores()) > control.epsilon
    assert control.bound(control.scores(is_repaired=True)) <= control.epsilon
    for is_repaired in (False, True):
        plan = control.build(is_repaired).plan
        assert plan.delta == control.delta
        assert all(noise > 0 for noise in plan.noise.values())
        assert 0.99 * control.epsilon < plan.epsilon <= control.epsilon
