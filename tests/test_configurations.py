"""A suite takes nothing from its surroundings: no secret of the environment gets into a manifest."""

import json
import os

import pytest

from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.store import Store
from dpopt.suites.suite import load_suite

SECRET = "do not tell"
SUITE = """
defaults: {defaults}
workloads: [{{name: synthetic_logreg, dim: 3}}]
optimizers: [dp_sgd]
settings: {{dp_sgd: {{tuning: fixed}}}}
epsilon: [2]
accountant: rdp
"""
REACHING = [
    "${oc.env:SECRET}",
    "${oc.env:NOT_SET,${oc.env:SECRET}}",
    "${hydra:runtime.cwd}",
    "${${accountant}:SECRET}",
    "\n${oc.env:\nSECRET}",
]


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)


@pytest.fixture
def written(tmp_path):
    """Write a suite and give its path."""

    def write(more="", defaults="[suite, _self_]", name="small"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(SUITE.format(defaults=defaults) + more)
        return path

    return write


@pytest.mark.parametrize("text", REACHING)
def test_a_suite_asks_nothing_of_its_surroundings(written, text):
    with pytest.raises(ConfigError, match="takes nothing from its surroundings") as raised:
        load_suite(str(written(f"published: {{methods: {{x: [1, {json.dumps(text)}]}}}}\n")))
    assert SECRET not in str(raised.value)


def test_nor_does_an_override(written, tmp_path, capsys):
    for override in ("description", "settings.dp_sgd.fields.lr", "+options.x"):
        assert main(["run", f"suite={written()}", f"{override}=${{oc.env:SECRET}}"]) == 2
        said = capsys.readouterr()
        assert "takes nothing from its surroundings" in " ".join(said.err.split())
        assert SECRET not in said.out + said.err
    assert not list(tmp_path.rglob("suite.json"))


def test_what_a_suite_has_to_say_is_named(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text("defaults: [suite, _self_]\nsettings: {a: {clip: '???'}}\nclip: ${settings.a.clip}\n")
    with pytest.raises(ConfigError, match=r"^small\.optimizers, small\.settings\.a\.clip: None cannot be used; "):
        load_suite(str(path))


def test_a_suite_may_refer_to_its_own_keys(written):
    suite = load_suite(str(written("description: B is ${batch_size}, ${epsilon}\nbatch_size: 100\nclip: ${epsilon}\n")))
    assert (suite.description, suite.clip) == ("B is 100, [2]", (2.0,))


@pytest.mark.parametrize(
    "defaults",
    [
        "[suite, {folder}/elsewhere/other, _self_]",
        "[suite, other@_global_, _self_]",
        "[suite, {{elsewhere: other}}, _self_]",
        "[suite, leads_out, _self_]",
    ],
)
def test_a_suite_begins_with_files_beside_it_alone(written, tmp_path, defaults):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.yaml").write_text(f"description: {SECRET}\n")
    written("", "[suite, ../elsewhere/other, _self_]", "leads_out")
    with pytest.raises(ConfigError, match="names of files in the same folder"):
        load_suite(str(written("", defaults.format(folder=tmp_path))))
    written("clip: 3\n", name="beside")
    assert load_suite(str(written("", "[beside, _self_]"))).clip == (3.0,)


def test_a_suite_does_not_set_hydra(written, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.yaml").write_text(f"description: {SECRET}\n")
    setting = f"{{searchpath: ['file://{tmp_path}/elsewhere']}}"
    for text in (f"hydra: {setting}\n", f"<<: {{hydra: {setting}}}\n"):
        with pytest.raises(ConfigError, match="Hydra itself"):
            load_suite(str(written(text, "[suite, other, _self_]")))


def test_files_that_lead_back_to_themselves(written):
    written("", "[one, _self_]", "two")
    with pytest.raises(ConfigError, match=r"one -> two -> one.*back to itself"):
        load_suite(str(written("", "[two, _self_]", "one")))
    with pytest.raises(ConfigError, match="suite -> suite"):
        load_suite(str(written(name="suite")))


def test_no_value_of_the_environment_is_in_a_manifest(written, tmp_path, capsys):
    arguments = [f"suite={written('description: of ${optimizers}')}", f"results={tmp_path / 'results'}"]
    assert main(["run", *arguments, "batch_size=8000", "epochs=1", "seeds=0", "engine=inline"]) == 0
    text = json.dumps(Store(tmp_path / "results").manifest("small"))
    assert "of ['dp_sgd']" in text
    assert SECRET not in text
    assert os.environ["HOME"] not in text


def test_a_callers_own_hydra_stays(written):
    from hydra import compose, initialize
    from hydra.core.config_store import ConfigStore
    from hydra.version import getbase

    ConfigStore.instance().store("private", {"key": 5}, group="dpopt")
    with initialize(None, version_base="1.2"):
        assert load_suite(str(written())).accountant == "rdp"
        assert compose("dpopt/private").dpopt.key == 5
        assert getbase().minor == 2
    ConfigStore.instance().repo.pop("dpopt")
