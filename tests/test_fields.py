import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
    values = {"lr": "1e-3", "betas": [0.5, 0], "steps": 3.0, "tau": None, "flag": True, "taps": [1, "2e-1", 3.0]}
    assert fields.build(Example, values, "example") == Example(1e-3, (0.5, 0.0), 3, None, "a", True, taps=(1, 0.2, 3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lrr": 1}, r"example.lrr.*did you mean 'lr'"),
        ({"lr": 0}, r"example.lr: 0.0 cannot be used; expected a number in \(0, inf\)"),
        ({"lr": float("nan")}, "example.lr"),
        ({"lr": True}, "example.lr"),
        ({"betas": [0.5]}, "list of 2"),
        ({"betas": [0.5, 1.0]}, r"example.betas\[1\]"),
        ({"steps": 2.5}, "whole number"),
        ({"tau": -1}, "example.tau"),
        ({"mode": "c"}, "known: a, b"),
        ({"flag": 1}, "example.flag"),
        ({"name": 3}, "example.name"),
        ({"taps": []}, "example.taps: .* expected a list of values"),
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


def test_what_is_no_path_is_refused():
    for value in ["", " ", "\0", "a\0b", "a\nb", "\x1b[31m", "\ud800", "~nobody_of_that_name/x", b"a", 3, None, True]:
        with pytest.raises(ConfigError, match=r"^folder: .* cannot be used; expected a path: not empty"):
            fields.path(value, "folder")


def test_a_path_may_begin_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("~/a b/ü", Path("~/a b/ü"), f"{tmp_path}/a b/ü"):
        assert fields.path(value, "folder") == tmp_path / "a b" / "ü"
    assert fields.path("a~/~", "folder") == Path("a~/~")
    for name, read in (("DPOPT_DATA", fields.data_root), ("DPOPT_CACHE", fields.cache_root)):
        monkeypatch.setenv(name, "~/a b")
        assert read() == tmp_path / "a b"


ENDS = {
    "Count": (1, 10**12),
    "Natural": (0, 10**12),
    "Many": (1, 10**7),
    "Few": (1, 10**4),
    "FewOrNone": (0, 10**4),
    "Seed": (0, 2**128 - 1),
}


@pytest.mark.parametrize("name", ENDS)
def test_whole_numbers_have_a_least_and_a_largest(name):
    hint, (least, largest) = getattr(fields, name), ENDS[name]
    assert [fields.convert(value, hint, name, {}) for value in (least, largest)] == [least, largest]
    for value in (least - 1, largest + 1):
        with pytest.raises(ConfigError, match=rf"^{name}: "):
            fields.convert(value, hint, name, {})


def test_a_function_must_take_as_many_arguments_as_it_is_given():
    hint = Callable[[int, int], int]
    for value in (lambda a, b: 0, lambda a, b=1, *, c=2: 0, lambda *all: 0, max):
        assert fields.convert(value, hint, "loss", {}) is value
    for value in (lambda a: 0, lambda a, b, c: 0, lambda a, b, *, c: 0, object()):
        with pytest.raises(ConfigError, match=r"^loss: .* expected a function( of 2 arguments|, and none)"):
            fields.convert(value, hint, "loss", {})
    assert fields.convert(lambda: 0, Callable[..., int], "loss", {})() == 0


@pytest.mark.parametrize("value", [True, 1000.0, 7])
def test_a_number_in_the_place_of_a_text_is_told_of_quotes(value):
    with pytest.raises(ConfigError, match="expected a text, in quotes where YAML reads something else"):
        fields.build(Example, {"name": value}, "example")
