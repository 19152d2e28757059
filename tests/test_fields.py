import pickle
from dataclasses import dataclass
from typing import Literal

import pytest

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.fields import Count, Decay, Positive


@dataclass(frozen=True)
class Example:
    lr: Positive = 1.0
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    steps: Count = 5
    tau: Positive | None = None
    mode: Literal["a", "b"] = "a"
    flag: bool = False
    name: str = "x"
    taps: tuple[Positive, ...] = (1.0,)


def test_plain_data_becomes_fields():
    made = fields.build(Example, {"lr": "1e-3", "betas": [0.5, 0], "steps": 3.0, "tau": None, "flag": True}, "example")
    assert made == Example(1e-3, (0.5, 0.0), 3, None, "a", True)


@pytest.mark.parametrize("taps", [[1], [1, "2e-1", 3.0]])
def test_a_tuple_of_any_length(taps):
    assert fields.build(Example, {"taps": taps}, "example").taps == tuple(float(tap) for tap in taps)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lrr": 1}, r"example.lrr.*did you mean 'lr'"),
        ({"lr": 0}, r"example.lr: 0.0 cannot be used; expected a number in \(0, inf\)"),
        ({"lr": float("nan")}, "example.lr"),
        ({"lr": True}, "example.lr"),
        ({"lr": [1]}, "example.lr"),
        ({"betas": [0.5]}, "list of 2"),
        ({"betas": [0.5, 1.0]}, r"example.betas\[1\]"),
        ({"steps": 2.5}, "whole number"),
        ({"steps": 0}, "example.steps"),
        ({"tau": -1}, "example.tau"),
        ({"mode": "c"}, "known: a, b"),
        ({"flag": 1}, "example.flag"),
        ({"name": 3}, "example.name"),
        ({"taps": []}, "example.taps: .* expected a list of values"),
        ({"taps": 1.0}, "example.taps: .* expected a list of values"),
        ({"taps": [1, 2, -3]}, r"example.taps\[2\]"),
    ],
)
def test_bad_values_name_the_field(values, message):
    with pytest.raises(ConfigError, match=message):
        fields.build(Example, values, "example")


def test_objects_are_checked_when_made():
    from dpopt.optimizers.dp_sgd import DPSGD

    with pytest.raises(ConfigError, match=r"DPSGD\.lr"):
        DPSGD(lr=-1.0)
    with pytest.raises(ConfigError, match=r"DPSGD\.clip"):
        DPSGD(clip=0.5)  # type: ignore[arg-type]


def test_an_error_arrives_from_another_process():
    error = ConfigError("lr", -1, "expected a number > 0")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (ConfigError, str(error))


def test_keys_of_a_mapping_that_mean_the_same():
    with pytest.raises(ConfigError, match="a key is repeated"):
        fields.convert({3: 5, "3.0": 6}, dict[float, float], "epochs", {})
