"""Every registered optimizer, plug-ins included, keeps every rule of `dpopt.testing`."""

import pytest
from devices import Card
from imitation import RULES, never_waits_for_the_device

import dpopt
from dpopt.testing.numerics import same_on_cuda
from dpopt.testing.task import Task, advance

MOMENTUM = {"name": "dp_sgd", "momentum": 0.9}
SHORT_FILTER = {"a": [1, -0.9], "b": [0.1]}
"""The default filter of `doppler` rings for longer than a check runs, and only small learning rates get round that."""
VARIANTS = {
    "hyfreedp-five-fresh-probes": ("hyfreedp", {"probe_batch": "fresh", "probes": 5, "probe_every": 2}),
    "hyfreedp-literal-smoothed": ("hyfreedp", {"bound": "literal", "smoothing": 0.9}),
    "hyfreedp-over-disk-over-dp_adambc": ("hyfreedp", {"base": {"name": "disk", "base": "dp_adambc"}}),
    "adadp-code": ("adadp", {"factor": "sqrt", "keep": "half", "error_scale": 10**0.5, "reject": True, "tau": None}),
    "fiber-exact": ("fiber", {"correction": "exact"}),
    "fiber-off-one-point": ("fiber", {"correction": "off", "kappa": 1.0}),
    "dp_muon-by-group": ("dp_muon", {"clip": "by_group", "adam": ["2."]}),
    "dp_sgd-automatic-momentum": ("dp_sgd", {"clip": "automatic", "momentum": 0.9}),
    "disk-over-momentum": ("disk", {"base": MOMENTUM}),
    "doppler-over-momentum": ("doppler", {"base": MOMENTUM, **SHORT_FILTER}),
    "scheduled-inverse-time": ("scheduled", {"schedule": "inverse_time"}),
    "search-over-momentum": ("hyfreedp_search_then_decay", {"base": MOMENTUM}),
    "search-in-most-draws": (
        "hyfreedp_search_then_decay",
        {"base": "scale_then_privatize", "lr": 1e-6, "probe_every": 1, "rounds": 8},
    ),
    "adaptive_clip-over-fiber": ("adaptive_clip", {"base": {"name": "fiber", "correction": "exact"}}),
    "adadp_hybrid-third": ("adadp_hybrid", {"adaptive_epochs": 1.0, "factor": "sqrt", "keep": "half"}),
}
ISOLATED = "ends_the_same_when_isolated"
LONG = {"is_pure", "hyfreedp-five-fresh-probes"}
"""A rule, and a variant whose noise takes long to solve: variants keep them in the full run of tests."""
ALWAYS = {
    "can_be_traced",
    "leaves_the_planned_ledger",
    "replays_bit_for_bit",
    "bounds_one_record",
    "is_pure",
    "resumes_bit_for_bit",
}
"""The rules that a field or a base can break."""
OF_THE_CLASS = {
    "is_frozen_configuration",
    "has_a_complete_entry",
    "imports_no_data",
    ISOLATED,
    "equals_its_declared_limits",
    "same_on_cuda",
}
"""Those that no field can: the registered name has kept them."""


def optimizer_of(label):
    name, fields = VARIANTS.get(label, (label, {}))
    return dpopt.create(name, **fields)


def checks(labels):
    """(True if it is of the first optimizer of a class, a check, its id), of all of them."""
    classes = set()
    for label in labels:
        optimizer = optimizer_of(label)
        is_first = type(optimizer) not in classes
        classes.add(type(optimizer))
        yield from ((is_first, check, f"{label}-{check}") for check in dpopt.testing.checks(optimizer))


REGISTERED = [
    pytest.param(check, id=name, marks=[] if is_first or str(check) != ISOLATED else pytest.mark.slow)
    for is_first, check, name in checks(dpopt.optimizers())
]
"""All rules; a process for each preset of a class tells nothing new."""
OF_VARIANTS = [
    pytest.param(check, id=name, marks=[] if is_first and not LONG & {*name.rsplit("-", 1)} else pytest.mark.slow)
    for is_first, check, name in checks(VARIANTS)
    if str(check) in ALWAYS or (is_first and str(check) not in OF_THE_CLASS)
]


@pytest.mark.parametrize("check", REGISTERED)
def test_registered_optimizer(check):
    check()


@pytest.mark.parametrize("check", OF_VARIANTS)
def test_variant(check):
    check()


def test_rules_are_named_as_they_are():
    assert {rule.__name__ for rule in dpopt.testing.RULES} >= ALWAYS | OF_THE_CLASS


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", dpopt.optimizers())
def test_on_an_imitated_gpu(name, rule):
    rule(dpopt.create(name))


ON_A_CARD = [*dpopt.optimizers(), *VARIANTS]


@pytest.mark.gpu
@pytest.mark.parametrize("label", ON_A_CARD)
def test_on_a_card_it_ends_where_it_does_on_the_cpu(label):
    same_on_cuda(optimizer_of(label))


@pytest.mark.gpu
@pytest.mark.parametrize("label", ON_A_CARD)
def test_on_a_card_no_step_waits(label):
    optimizer = optimizer_of(label)
    if never_waits_for_the_device.__name__ in getattr(optimizer, "conformance_exceptions", {}):
        pytest.skip("it is excepted")
    recording = Task().record(optimizer)
    oracle, start = recording.oracle(lambda value: value.to("cuda")), recording.start.to("cuda")
    with Card().never_waiting():
        advance(optimizer, optimizer.init(start), oracle)
