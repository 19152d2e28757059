"""Every registered optimizer, plug-ins included, keeps every rule of `dpopt.testing`."""

import pytest
from devices import Card

import dpopt
from dpopt.optimizers.base import Direction
from dpopt.testing.numerics import never_waits_for_the_device, same_on_cuda
from dpopt.testing.task import Task, advance

CASES = [(name, check) for name in dpopt.optimizers() for check in dpopt.testing.checks(dpopt.create(name))]
DIRECTIONS = [name for name in dpopt.optimizers() if isinstance(dpopt.create(name), Direction)]
BASES = {name: name for name in DIRECTIONS} | {
    # The default filter rings for longer than a check runs, and only small learning rates of its own get round that.
    "doppler": {"name": "doppler", "a": [1, -0.9], "b": [0.1]},
}
VARIANTS = {
    "hyfreedp-fresh": ("hyfreedp", {"probe_batch": "fresh"}),
    "hyfreedp-five-probes": ("hyfreedp", {"probes": 5, "probe_every": 2}),
    "hyfreedp-literal-smoothed": ("hyfreedp", {"bound": "literal", "smoothing": 0.9}),
    "adadp-code": ("adadp", {"factor": "sqrt", "keep": "half", "error_scale": 10**0.5, "reject": True, "tau": None}),
    "fiber-exact": ("fiber", {"correction": "exact"}),
    "fiber-unfiltered": ("fiber", {"correction": "unfiltered"}),
    "fiber-off-one-point": ("fiber", {"correction": "off", "kappa": 1.0}),
    "dp_sgd-automatic-momentum": ("dp_sgd", {"clip": "automatic", "momentum": 0.9}),
    "dp_adam-normalized": ("dp_adam", {"clip": {"rule": "normalized", "bound": 0.1}}),
    "disk-over-momentum": ("disk", {"base": {"name": "dp_sgd", "momentum": 0.9}}),
    "disk-over-dp_adambc": ("disk", {"base": "dp_adambc", "kappa": 0.4}),
    "doppler-over-momentum": ("doppler", {"base": {"name": "dp_sgd", "momentum": 0.9}, "a": [1, -0.9], "b": [0.1]}),
    "doppler-over-dp_adambc": ("doppler", {"base": "dp_adambc"}),
    "scheduled-inverse-time": ("scheduled", {"schedule": "inverse_time"}),
    "scheduled-warm-linear": ("scheduled", {"schedule": "linear", "warmup": 0.25, "final": 0.1}),
    "search-over-momentum": ("hyfreedp_search_then_decay", {"base": {"name": "dp_sgd", "momentum": 0.9}}),
    "search-over-scaled": ("hyfreedp_search_then_decay", {"base": "scale_then_privatize", "rounds": 2}),
    "search-over-doppler": ("hyfreedp_search_then_decay", {"base": "doppler"}),
    "search-in-most-draws": ("hyfreedp_search_then_decay", {"lr": 1e-6, "probe_every": 1, "rounds": 8}),
    "hyfreedp-over-disk-over-dp_adambc": ("hyfreedp", {"base": {"name": "disk", "base": "dp_adambc"}}),
    "adaptive_clip-over-fiber": ("adaptive_clip", {"base": {"name": "fiber", "correction": "exact"}}),
    "adaptive_clip-over-scale_then_privatize": ("adaptive_clip", {"base": "scale_then_privatize"}),
    "adadp_hybrid-third": ("adadp_hybrid", {"adaptive_epochs": 1.0, "factor": "sqrt", "keep": "half"}),
} | {
    f"{rule}-over-{name}": (rule, {"base": base}) for rule in ("hyfreedp", "scheduled") for name, base in BASES.items()
}
VARIANT_CASES = [
    pytest.param(check, id=f"{label}-{check}")
    for label, (name, fields) in VARIANTS.items()
    for check in dpopt.testing.checks(dpopt.create(name, **fields))
]


@pytest.mark.parametrize(("name", "check"), CASES, ids=[f"{name}-{check}" for name, check in CASES])
def test_registered_optimizer(name, check):
    check()


@pytest.mark.parametrize("check", VARIANT_CASES)
def test_variant(check):
    check()


# On the GPU that there is; the imitated one is among the checks above.


def optimizer_of(label):
    name, fields = VARIANTS.get(label, (label, {}))
    return dpopt.create(name, **fields)


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
