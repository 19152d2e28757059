"""Workloads keep the rules of `dpopt.testing` on real data too. In a module of its own: no fabricated sizes here."""

import os

import pytest

import dpopt
from dpopt import registry
from dpopt.testing import workloads

pytestmark = [pytest.mark.slow, pytest.mark.skipif("DPOPT_DATA" not in os.environ, reason="needs DPOPT_DATA")]


@pytest.mark.parametrize("rule", [rule.__name__ for rule in workloads.RULES])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mnist_mlp", {}),
        ("mnist_scatter", {}),
        ("cifar10_adadp", {}),
        ("cifar100_vit_tiny", {"data": "cifar100_subset", "validation": 1000, "size": 32}),
        ("cifar10_wrn_16_4", {}),
    ],
)
def test_on_real_data(name, fields, rule):
    """One rule."""
    checks = dpopt.testing.workload_checks(registry.create_workload(name, **fields))
    next(check for check in checks if check.name == rule)()
