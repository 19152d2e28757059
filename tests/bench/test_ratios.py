"""The verdict of `make bench`."""

from itertools import count

from speed import ratios


def test_ratios_are_quartiles_of_rounds_that_take_turns():
    """The first round, which warms up, is left out."""
    clock, order = count(1), []

    def timed(name):
        return lambda: order.append(name) or float(next(clock))

    found = ratios.ratios({"a": (timed("a"), timed("plain")), "b": (timed("b"), lambda: 2.0)}, 2)
    assert order == ["a", "plain", "b"] * 3
    assert found["a"] == [4 / 5 + (7 / 8 - 4 / 5) * part for part in (0.25, 0.5, 0.75)]
    assert found["b"] == [3 + 1.5 * part for part in (0.25, 0.5, 0.75)]


def test_a_row_is_slower_only_beyond_the_spread():
    stored = [1.0, 1.1, 1.2]
    assert ratios.verdict([1.21, 1.3, 1.4], stored) == "slower"
    assert ratios.verdict([1.19, 1.3, 1.4], stored) == "same"
    assert ratios.verdict([0.7, 0.8, 0.99], stored) == "faster"
    assert ratios.verdict([1.0, 1.0, 1.0], None) == "new"


def test_two_runs_of_one_code_may_differ_a_little():
    assert ratios.verdict([1.64, 1.65, 1.66], [1.6, 1.61, 1.62]) == "same"
    assert ratios.verdict([1.8, 1.81, 1.82], [1.6, 1.61, 1.62]) == "slower"
