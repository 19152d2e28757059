"""Opaque tensors against PyTorch's own without values, those on `meta`."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from dpopt.privacy.opaque import ValueRead, opaque

N = 3

GIVING = {
    "arithmetic": lambda x: (x + 1) * x / 2 - x,
    "in place": lambda x: x.clone().mul_(2).add_(x, alpha=0.1),
    "fused": lambda x: torch.lerp(x, x, 0.1).addcmul_(x, x, value=2),
    "into a tensor on meta": lambda x: torch.zeros(N, device=x.device).add_(x),
    "compared": lambda x: x > x.mean(),
    "chosen": lambda x: torch.where(x > 0, x, x.new_zeros(())),
    "indexed": lambda x: x[0],
    "several": lambda x: torch.sort(x).indices,
    "list of them": lambda x: torch._foreach_mul([x, x], 2.0)[1],
    "iterated": lambda x: list(x)[1],
    "deep copy": lambda x: copy.deepcopy(x),
}

READING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "Python's max": lambda x: max(x),
    "numpy": lambda x: x.numpy(),
    "ufunc": lambda x: np.add(x, 1),
    "data_ptr": lambda x: x.data_ptr(),
    "pickle": lambda x: pickle.dumps(x),
    "tensor of numbers": lambda x: torch.tensor([x[0], x[1]]),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "where": lambda x: torch.where(x > 0),
    "assigned out": lambda x: torch.zeros(N).__setitem__(0, x[0]),
    "copied out": lambda x: torch.zeros(N).copy_(x),
    "out": lambda x: torch.add(x, 1, out=torch.zeros(N)),
}


@pytest.mark.parametrize("name", GIVING)
def test_operations_give_tensors_of_the_same_shape_and_type_that_hold_nothing(name):
    plain, found = GIVING[name](torch.ones(N)), GIVING[name](opaque(torch.ones(N)))
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype)
    assert (found.is_meta, found.device.type) == (True, "meta")
    assert type(found) is type(opaque(torch.ones(1))) or name == "into a tensor on meta"


@pytest.mark.parametrize("name", READING)
def test_values_cannot_be_read(name):
    with pytest.raises(ValueRead, match="value"):
        READING[name](opaque(torch.ones(N)))


def test_what_is_no_value_is_told():
    x = opaque(torch.ones(2, N))
    assert (x.shape, len(x), x.ndim, x.dim(), x.numel(), x.size(1)) == ((2, N), 2, 2, 2, 2 * N, N)
    assert (x.dtype, x.is_floating_point(), x.is_cuda, x.requires_grad) == (torch.float32, True, False, False)
    assert repr(x) == "Opaque(shape=[2, 3], dtype=torch.float32)"


def test_tracing_does_not_import_what_takes_seconds_to_import():
    program = (
        "import sys, dpopt; from dpopt.privacy.calibration import cost; cost(dpopt.create('hyfreedp'));"
        "sys.exit(str([name for name in ('torch._dynamo', 'sympy') if name in sys.modules]))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stderr.strip() == "[]"
