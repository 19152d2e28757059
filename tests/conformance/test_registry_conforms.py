"""Every registered optimizer, plug-ins included, keeps every rule of `dpopt.testing`."""

import pytest

import dpopt
from dpopt.optimizers.base import Direction

CASES = [(name, check) for name in dpopt.optimizers() for check in dpopt.testing.checks(dpopt.create(name))]
DIRECTIONS = [name for name in dpopt.optimizers() if isinstance(dpopt.create(name), Direction)]
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
} | {f"hyfreedp-over-{name}": ("hyfreedp", {"base": name}) for name in DIRECTIONS}
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
