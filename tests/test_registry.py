import sys
from contextlib import suppress
from importlib.metadata import EntryPoint
from unittest import SkipTest

import pytest

import dpopt
from dpopt import registry
from dpopt.errors import ConfigError
from dpopt.optimizers.base import Direction


def test_names_and_module():
    assert dpopt.optimizers() == tuple(sorted(dpopt.optimizers()))
    assert {"dp_sgd", "dp_adam", "dp_adamw", "hyfreedp", "fiber", "adadp"} <= set(dpopt.optimizers())
    assert isinstance(dpopt.create("fiber"), dpopt.optimizers.Optimizer)
    assert dpopt.optimizers.fiber.FiBeR is type(dpopt.create("fiber"))


def test_nearest_names():
    with pytest.raises(ConfigError, match="did you mean 'fiber'"):
        dpopt.create("fibre")
    with pytest.raises(ConfigError, match="did you mean 'omega'"):
        dpopt.create("fiber", omga=0.5)
    with pytest.raises(ConfigError, match="did you mean 'digits_mlp'"):
        registry.create_workload("digits")


def test_nested_specs_round_trip():
    for base in ({"name": "fiber", "omega": 0.2}, "dp_sgd", {"name": "dp_adamw", "betas": [0.5, 0.9]}):
        made = dpopt.create("hyfreedp", base=base, clip=0.5)
        assert registry.from_spec("optimizer", registry.spec("optimizer", "hyfreedp", made)) == made


def test_hyfreedp_takes_every_direction():
    directions = [name for name in dpopt.optimizers() if isinstance(dpopt.create(name), Direction)]
    assert {"dp_sgd", "dp_adam", "fiber"} <= set(directions)
    for name in directions:
        assert type(dpopt.create("hyfreedp", base=name).base) is type(dpopt.create(name))


def test_another_revision_is_refused():
    spec = registry.spec("optimizer", "dp_sgd", dpopt.create("dp_sgd"))
    with pytest.raises(ConfigError, match="installed revision is 1"):
        registry.from_spec("optimizer", {**spec, "revision": 7})


def test_a_later_field_is_no_part_of_the_identity_at_its_default():
    usual, printed = dpopt.create("hyfreedp"), dpopt.create("hyfreedp", guards="none")
    specs = [registry.spec("optimizer", "hyfreedp", optimizer) for optimizer in (usual, printed)]
    assert [spec.pop("guards", "absent") for spec in specs] == ["absent", "none"]
    assert specs[0] == specs[1]
    assert registry.from_spec("optimizer", specs[0]) == usual
    assert registry.from_spec("optimizer", specs[0] | {"guards": "none"}) == printed


def test_only_what_changed_has_another_revision():
    for name in ("images", "sst2_minilm"):
        made = {subset: registry.create_workload(name, subset=subset) for subset in ("head", "film", "bitfit")}
        specs = {subset: registry.spec("workload", name, workload) for subset, workload in made.items()}
        assert [spec["revision"] for spec in specs.values()] == [1, 1, 2]
        assert registry.from_spec("workload", specs["bitfit"]) == made["bitfit"]
        with pytest.raises(ConfigError, match=r"revision: 1.*installed revision is 2"):
            registry.from_spec("workload", specs["bitfit"] | {"revision": 1})


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sign.py").write_text(
        "from dataclasses import dataclass\nfrom dpopt.optimizers.dp_sgd import DPSGD\n"
        "@dataclass(frozen=True)\nclass Sign(DPSGD):\n    '''Sign descent.'''\n"
        "    def direction(self, state, gradient):\n        direction, state = super().direction(state, gradient)\n"
        "        return direction.sign(), state\n"
    )
    (package / "dp_sign.yaml").write_text(
        "summary: sign of the private gradient\nreference: this test\nfamily: sgd\ngrid: {lr: [0.1]}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("dp_sign", "elsewhere.sign:Sign", "dpopt.optimizers")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "dpopt.optimizers" else [])
    registry.entries.cache_clear()
    yield
    registry.entries.cache_clear()
    sys.modules.pop("elsewhere", None)


@pytest.mark.usefixtures("plugin")
def test_another_distribution_registers_by_entry_point():
    assert "dp_sign" in dpopt.optimizers()
    entry = registry.entry("optimizer", "dp_sign")
    assert (entry.summary, entry.grid) == ("sign of the private gradient", {"lr": [0.1]})
    assert "elsewhere" not in sys.modules  # an import would run its code, also where it is to be isolated
    made = dpopt.create("dp_sign", lr=0.2)
    assert registry.from_spec("optimizer", registry.spec("optimizer", "dp_sign", made)) == made
    for check in dpopt.testing.checks(made):
        with suppress(SkipTest):
            check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected a mapping"),
        ("summary: x", "`target`"),
        ("target: a:B\ngird: {}", "did you mean 'grid'"),
    ],
)
def test_bad_entries(tmp_path, text, message):
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        registry._entry("x", file)


def test_a_target_that_is_not_there():
    with pytest.raises(ConfigError, match="cannot be imported"):
        registry.Registered("x", "dpopt.nowhere:X").load()
