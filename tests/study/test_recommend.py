import inspect
import math
from dataclasses import fields

import pytest
import yaml

from dpopt import configurations
from dpopt.errors import ConfigError
from dpopt.harness.plan import plan
from dpopt.harness.suite import load_suite
from dpopt.store.identity import clipping_bound
from dpopt.study.batch_size import best_batch
from dpopt.study.recommend import Problem, main, recommend, report, snippet

QUICK = {"examples": 500, "epochs": 10, "epsilon": 4.0, "accountant": "rdp"}


def middle(values):
    return values[len(values) // 2]


def grid(**changes):
    return recommend(**{**QUICK, **changes})


def test_batch_sizes_are_the_rules_and_its_neighbours():
    found = grid()
    best = best_batch(found.noise)
    assert best.batch_size in found.batch_sizes
    assert list(found.batch_sizes) == sorted(found.batch_sizes)
    assert 2 <= len(found.batch_sizes) <= 3
    assert all(row.steps >= 20 for row in found.noise)
    assert found.noise[-1].cumulative > 1.5 * min(row.cumulative for row in found.noise) or found.noise[-1][0] == 1


def test_tighter_privacy_means_larger_bounds_and_smaller_batches():
    tight, loose = grid(epsilon=1.0), grid(epsilon=8.0)
    assert middle(tight.clips) > middle(grid().clips) > middle(loose.clips)
    assert best_batch(tight.noise).batch_size < best_batch(loose.noise).batch_size


@pytest.mark.parametrize(
    ("harder", "easier"),
    [
        ({"capacity": "weak"}, {"capacity": "strong"}),
        ({"difficulty": "hard"}, {"difficulty": "easy"}),
        pytest.param({"epochs": 4}, {"epochs": 40}, marks=pytest.mark.slow),
    ],
)
def test_harder_problems_mean_larger_bounds(harder, easier):
    up, down = grid(**harder), grid(**easier)
    assert middle(up.clips) == pytest.approx(10 * middle(down.clips), rel=0.05)
    assert "(up)" in " ".join(up.assumptions)
    assert "(down)" in " ".join(down.assumptions)


def test_fewer_epochs_mean_smaller_batches():
    assert max(grid(epochs=2).batch_sizes) < max(grid(epochs=40).batch_sizes)


def test_learning_rates_grow_with_the_root_of_the_batch_size():
    small, large = grid(epsilon=1.0), grid(epsilon=8.0)
    ratio = best_batch(large.noise).batch_size / best_batch(small.noise).batch_size
    assert ratio > 1
    assert middle(large.learning_rates) / middle(small.learning_rates) == pytest.approx(math.sqrt(ratio), rel=0.05)


def test_assumptions_say_which_numbers_are_ours():
    text = " ".join(grid().assumptions)
    assert text.count("our choice") + text.count("Our choice") >= 3
    assert "public" in text


def test_the_snippet_makes_a_suite(tmp_path):
    found = grid(capacity="strong", difficulty="easy", epsilon=8.0)
    file = tmp_path / "pasted.yaml"
    head = "defaults: [suite, _self_]\nworkloads: [synthetic_logreg]\nepsilon: 8\nepochs: 10\nseeds: 0\n"
    file.write_text(head + snippet(found) + "\n")
    cells = plan(load_suite(str(file)))
    assert len(cells) == len(found.batch_sizes) * len(found.clips) * len(found.learning_rates)
    assert {entry.cell.batch_size for entry in cells} == set(found.batch_sizes)
    assert {clipping_bound(entry.cell.content()) for entry in cells} == set(found.clips)
    assert {entry.tuned["lr"] for entry in cells} == set(found.learning_rates)


def test_yaml_reads_small_and_large_numbers_as_numbers():
    found = grid(epsilon=8.0)
    extreme = type(found)((3, 1_234_567), (1e-5, 2e7, 0.25), (3.2e-6,), (), found.noise)
    read = yaml.safe_load(snippet(extreme))
    assert read["batch_size"] == [3, 1_234_567]
    assert read["clip"] == [1e-5, 2e7, 0.25]
    assert read["settings"]["dp_adam"]["grid"]["lr"] == [3.2e-6]


def test_the_command_prints_the_grid():
    overrides = ["examples=500", "epochs=10", "epsilon=4", "accountant=rdp", "capacity=weak"]
    printed = main(configurations.command("recommend", overrides))
    assert printed == report(grid(capacity="weak"))
    for part in ("sigma sqrt(T)", "batch_size: [", "grid: {lr: [", "- C: "):
        assert part in printed


def test_the_commands_defaults_are_the_functions():
    given = configurations.command("recommend", ["examples=1", "epochs=1", "epsilon=1"])
    names = {field.name: field.default for field in fields(Problem)}
    assert given.keys() == names.keys()
    own = {name: value for name, value in names.items() if name not in ("examples", "epochs", "epsilon")}
    assert {name: given[name] for name in own} == own
    assert list(inspect.signature(recommend).parameters)[:3] == ["examples", "epsilon", "epochs"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"capacity": "medium"}, "recommend.capacity"),
        ({"difficulty": "impossible"}, "recommend.difficulty"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": 0}, "recommend.epsilon"),
        ({"examples": 0}, "recommend.examples"),
        ({"epochs": 1e-4}, "epochs"),
        ({"delta": 2.0}, "recommend.delta"),
        ({"min_step": 3}, "did you mean 'min_steps'"),
        ({"accountant": "rpd"}, "accountant"),
    ],
)
def test_bad_input(changes, name):
    with pytest.raises(ConfigError, match=name):
        grid(**changes)
