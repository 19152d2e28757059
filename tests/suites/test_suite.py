import json
from pathlib import Path

import pytest

from dpopt.errors import ConfigError
from dpopt.suites import rows
from dpopt.suites.plan import plan
from dpopt.suites.suite import load_suite, suite_files
from dpopt.workloads.data import catalogue
from dpopt.workloads.digits import DigitsMLP
from dpopt.workloads.vision import ImageClassification

BAD_OVERRIDES = [
    ("epsilonn=3", "did you mean 'epsilon'"),
    ("epsilon", "expected key=value"),
    ("epsilon=-1", r"quickstart\.epsilon: -1.0"),
    ("seeds=[0,0]", "repeated"),
    ("settings.dp_sgd.fields.clip=inf", "a finite bound is needed"),
    ("optimizers=[fibr]", "did you mean 'fiber'"),
    ("optimizers=[{name: fiber}]", "expected names"),
    ("workloads=[mnist]", "did you mean 'mnist_mlp'"),
    ("workloads=[{name: digits_mlp, hiden: 3}]", "did you mean 'hidden'"),
    ("workloads=[{name: digits_mlp, validation: 0}]", "needs `validation` records"),
    ("batch_size=5000", "expected 1 to 1257"),
    ("epochs=1e12", "epochs: 1000000000000.0 .* draws, expected at most"),
    ("epochs={1: 2, 3: 4}", "expected a number for epsilon 8 too"),
    ("epochs={}", "expected a number for each epsilon"),
    ("accountant=rpd", "did you mean 'rdp'"),
    ("engine=locl", "did you mean 'local'"),
    ("clip=[1,2", "quickstart.yaml"),
    ("optimizers=[dp_sgd,dp_sgd]", "optimizers: .* repeated"),
    ("settings.dp_sgd.grid.lr=[1,1.0]", r"dp_sgd\.grid\.lr: .* repeated"),
    ("workloads=[digits_mlp,{name: digits_mlp, hidden: 64}]", "workloads: .* repeated"),
    ("settings.dp_sgd.fields={name: x}", r"dp_sgd\.name"),
    ("settings.dp_adam.fields.lr=0.3", r"dp_adam\.fields\.lr: 0\.3 .* the row's grid has values of it"),
    ("settings.dp_adam.grd=3", "did you mean 'grid'"),
    ("settings.dp_adam.tuning=self", "fixed"),
    ("settings.hyfreedp.tuning=grid", "expected field -> values"),
    (
        "settings.dp_adam={tuning: fixed, grid: {lr: [0.5, 1.0]}}",
        r"dp_adam\.grid: .*0.5.* fixed searches nothing: .* null",
    ),
    ("settings.hyfreedp={tuning: self, grid: {lr: [0.1]}}", r"hyfreedp\.grid: .* self searches nothing"),
    ("settings.dp_adam.grid.lr=[0.1,'0.10']", r"dp_adam\.grid\.lr: .* repeated"),
    ("settings.dp_adam.grid.lrr=[3]", "did you mean 'lr'"),
    ("settings.dp_adam.average=1", r"settings\.dp_adam\.average: 1.* \[0, 1\)"),
    (
        "settings.dp_adam.fields.clip={rule: by_group, groups: nothere}",
        r"dp_adam\.clip\.groups: 'nothere' .*1\.weight",
    ),
    ("settings.disk.grd=3", "did you mean 'grid'"),
    ("settings.nobody.fields={}", r"quickstart\.settings: 'nobody' .* no label of the suite, .* known: adadp, "),
    ("settings.dp_adam.clip={rule: automatic}", r"dp_adam\.clip: .*automatic.* a clip rule belongs under `fields`"),
    ("settings.adam_nonprivat.clip=3", r"settings: 'adam_nonprivat' .* did you mean 'adam_nonprivate'"),
    ("optimizers=[adam_nonprivat]", r"optimizers: 'adam_nonprivat' .* did you mean 'adam_nonprivate'"),
]


def test_a_value_in_python_is_what_an_override_is():
    values = {"settings": {"dp_adam": {"average": 0.9, "fields": {"clip": {"rule": "abadi"}}}}}
    words = ["settings.dp_adam.average=0.9", "settings.dp_adam.fields.clip={rule: abadi}"]
    assert load_suite("quickstart", **values).settings == load_suite("quickstart", words).settings


def test_groups_wait_for_the_shapes_of_a_model(monkeypatch):
    def outline(self):
        raise ConfigError("data", "x", "there is no file")

    monkeypatch.setattr(DigitsMLP, "outline", outline)
    plan(load_suite("quickstart", ["settings.dp_adam.fields.clip={rule: by_group, groups: nothere}"]))


@pytest.mark.parametrize(("override", "message"), BAD_OVERRIDES, ids=[o for o, _ in BAD_OVERRIDES])
def test_bad_overrides_name_the_field(override, message):
    with pytest.raises(ConfigError, match=message):
        plan(load_suite("quickstart", [override]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [suite, _self_]\noptimizers: [dp_sgd]\nepsilons: [1]\n", "did you mean 'epsilon'"),
        ("defaults: [suite, _self_]\n", "optimizers"),
        ("defaults: [suite, _self_]\noptimizers: [dp_sgd\n", "small.yaml"),
        ("defaults: [suite, _self_]\noptimizers: [dp_sgd]\nsettings: [1]\n", "settings"),
    ],
)
def test_bad_files(write_suite, text, message):
    with pytest.raises(ConfigError, match=message):
        write_suite(text)


def test_a_suite_may_lie_beside_its_results(write_suite, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "plots").mkdir()
    assert write_suite(overrides=["results=elsewhere", "plots=here"]).results == Path("elsewhere")


def test_a_suite_may_start_from_another_and_take_away_its_grid_by_null(write_suite):
    write_suite(name="first")
    text = (
        "defaults: [first, _self_]\noptimizers: [dp_sgd]\nepsilon: 7\nsettings: {dp_sgd: {tuning: fixed, grid: null}}\n"
    )
    planned = plan(write_suite(text, name="second"))
    assert {(entry.tuning, entry.cell.epsilon) for entry in planned} == {("fixed", 7)}


def test_keys_that_are_given_to_a_file_without_defaults(tmp_path):
    path = tmp_path / "bare.yaml"
    path.write_text("optimizers: [dp_sgd]\n")
    with pytest.raises(ConfigError, match="begin the file with"):
        load_suite(path, settings={"dp_sgd": {}})


@pytest.mark.parametrize("name", [".", "..", "x/.."])
def test_a_name_that_leads_to_another_folder(name):
    with pytest.raises(ConfigError, match=r"suite\.name: '\.\.?'"):
        load_suite({"name": name, "optimizers": ["dp_sgd"]})


@pytest.mark.parametrize(("said", "problem"), [({}, "None .* a text"), ({"name": "suite"}, "another name")])
def test_a_suite_that_is_given_as_its_content_has_a_name_of_its_own(said, problem):
    with pytest.raises(ConfigError, match=rf"suite\.name: .*{problem}"):
        load_suite({**said, "optimizers": ["dp_sgd"]})


LOCAL = {
    "adadp_cifar10",
    "adadp_cifar10_noise",
    "adadp_cifar10_own",
    "adadp_cifar10_search",
    "clip_batch_sweep",
    "film_small",
    "vit_tiny_head",
    "vit_tiny_subsets",
}
"""Suites on data or checkpoints that are on no hub."""
CHECKPOINTS = [
    "adadp_conv_cifar100",
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    *(f"vit_{size}_patch16_224.augreg_in21k" for size in ("tiny", "small", "base")),
]


@pytest.fixture
def files_without_content(tmp_path, monkeypatch):
    """A data folder with every file that a plan looks for; a plan reads none but configurations."""
    for name, entry in catalogue.entries().items():
        for part in entry.splits.values():
            _touch(tmp_path / name / f"{part.source}-00000-of-00001.parquet")
    for name in CHECKPOINTS:
        _touch(tmp_path / "checkpoints" / f"{name}.safetensors")
    for name, content in {"distilbert-base-uncased": {}, "gpt2": {}}.items():
        _touch(tmp_path / "checkpoints" / name / "config.json").write_text(json.dumps(content))
    monkeypatch.setenv("DPOPT_DATA", str(tmp_path))


def _touch(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


def _kept(function):
    """`function`, computed once for each subject that prints alike."""
    answers = {}

    def answer(subject):
        if repr(subject) not in answers:
            answers[repr(subject)] = function(subject)
        return answers[repr(subject)]

    return answer


COST, CHECK = _kept(rows.cost), _kept(ImageClassification.check)
"""Of the rows and workloads that suites have in common."""


@pytest.mark.parametrize("name", suite_files())
def test_shipped_suites_can_be_planned(name, request, monkeypatch):
    """Those on the hub's data without a data folder."""
    monkeypatch.setattr(rows, "cost", COST)
    monkeypatch.setattr(ImageClassification, "check", lambda workload: CHECK(workload))
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    if name in LOCAL:
        request.getfixturevalue("files_without_content")
    assert plan(load_suite(name, ["seeds=0"]))


def test_scalars_and_overrides():
    suite = load_suite("quickstart", ["seeds=4", "epsilon=[1,inf]", "settings.dp_adam.grid.lr=[0.5]"])
    assert (suite.seeds, suite.epsilon, suite.settings["dp_adam"]["grid"]) == ((4,), (1, float("inf")), {"lr": [0.5]})
    assert [load_suite("quickstart", [f"physical_batch={n}"]).physical_batch for n in ("auto", 64)] == [None, 64]
    suite = load_suite("quickstart", ["optimizers=[dp_adamw]", "settings.dp_adamw.tuning=fixed", "seeds=0"])
    assert {entry.tuning for entry in plan(suite)} == {"fixed"}, "a searchable method without a search is set by hand"
    suite = load_suite("quickstart", ["optimizers=[adam_nonprivate]", "seeds=0"])
    assert {(entry.label, entry.cell.epsilon) for entry in plan(suite)} == {("adam_nonprivate", float("inf"))}
