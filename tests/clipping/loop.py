"""What clipped sums are compared with: plain autograd, one example and one point at a time."""

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dpopt.clipping import Abadi, Automatic, Clipped, Normalized

RULES = [Abadi(0.3), Abadi(float("inf")), Automatic(1.0, 0.1), Normalized(0.3)]
ONE, TWO = (1.0,), (1.7, -0.7)


class Truth(NamedTuple):
    """`Clipped`, and two numbers that say how exact a result can be.

    Attributes:
        scale: the largest entry of any example's clipped gradient; their sum may be zero.
        condition: the largest sum_k |w_k g_k|^2 / |sum_k w_k g_k|^2 of any example.
    """

    total: Tensor
    losses: Tensor
    norms: Tensor
    scale: float
    condition: float


def squared(output, target):
    """A loss for outputs of any shape: mean squared distance to a number per example."""
    return (output.flatten(1) - target[:, None]).square().mean(1)


def cross_entropy(output, target):
    return F.cross_entropy(output, target, reduction="none")


def cast(x, dtype):
    """`x` in the precision `dtype`, unless it holds token ids."""
    return x.to(dtype) if x.is_floating_point() else x


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def gradient(model, loss, theta, x, y):
    """Loss and flat gradient at `theta` of the one example in `x` and `y`."""
    parameters = trained(model)
    for parameter, value in zip(parameters, theta.split([p.numel() for p in parameters]), strict=True):
        parameter.data, parameter.grad = value.view_as(parameter).clone(), None
    value = loss(model(x), y).sum()
    value.backward()
    flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return value.detach(), torch.cat([g.flatten() for g in flat])


def loop(model, loss, points, x, y, mask, clip, factors=None, dtype=torch.float64):
    """The truth about the rows in `mask`, computed in `dtype`; the norms and losses of other rows are zero.

    Each coordinate of a combined gradient is multiplied by its entry of `factors`.
    """
    model, x, y = copy.deepcopy(model).to(dtype), cast(x, dtype), cast(y, dtype)
    total = torch.zeros(sum(p.numel() for p in trained(model)), dtype=dtype)
    norms, losses = torch.zeros(len(x), dtype=dtype), torch.zeros(len(points), len(x), dtype=dtype)
    scale, condition = 0.0, 1.0
    for i in mask.nonzero().flatten().tolist():
        pairs = [gradient(model, loss, theta.to(dtype), x[i : i + 1], y[i : i + 1]) for _, theta in points]
        parts = [weight * g for (weight, _), (_, g) in zip(points, pairs, strict=True)]
        parts = parts if factors is None else [factors.to(dtype) * part for part in parts]
        combined = sum(parts)
        norms[i], losses[:, i] = combined.norm(), torch.stack([value for value, _ in pairs])
        clipped = combined * clip.factor(norms[i])
        total += clipped
        scale = max(scale, clipped.abs().max().item())
        condition = max(condition, sum(part.norm().item() ** 2 for part in parts) / max(norms[i].item() ** 2, 1e-300))
    return Truth(total, losses, norms, scale, condition)


def ask(made, points, x, y, mask, clip, factors=None):
    """`Clipped` as the engine `made` has it, with zeros where `loop` has them."""
    total, losses, norms = made.clipped(points, x, y, mask, clip, factors)
    assert losses.shape == (len(points), len(x))
    assert norms.shape == (len(x),)
    return Clipped(total, *(torch.where(mask, value, 0.0) for value in (losses, norms)))


def off(actual, expected):
    """The largest error of an entry."""
    assert actual.shape == expected.shape
    return (actual.double() - expected).abs().max().item() if expected.numel() else 0.0


def assert_near(actual, expected, tolerance=1e-5, scale=None, rounding=0.0):
    """|actual - expected| <= tolerance * scale + rounding, where `scale` is max|expected| if it is not given."""
    error, scale = off(actual, expected), off(expected, 0 * expected) if scale is None else scale
    assert error <= tolerance * scale + rounding, f"off by {error:.1e} where the largest is {scale:.1e}"


def around(theta, weights, spread=0.1):
    """Weighted points near `theta`."""
    return [(weight, theta + spread * torch.randn_like(theta)) for weight in weights]


def check(model, made, x, y, *, loss=squared, weights=ONE, clip=RULES[0], mask=None):
    """The engine `made` for `model` and `loss` equals the loop at points near the model's parameters.

    So it does, for the first two rows, where the coordinates are scaled before clipping.

    The truth is the loop in float64, and what is compared is relative to the largest entry: to 1e-10 in float64 and
    1e-5 in float32, or 80 machine epsilons times `condition` where two points all but cancel (a norm from inner
    products loses as much). To that comes a small multiple of what float32 costs the loop itself: some drawn models,
    like a norm over two features, lose digits however they are differentiated.
    """
    mask = torch.ones(len(x), dtype=torch.bool) if mask is None else mask
    points = around(made.theta, weights)
    compare(made, model, loss, points, x, y, mask, clip)
    compare(made, model, loss, points, x, y, mask & (torch.arange(len(x)) < 2), clip, torch.rand_like(made.theta) * 3)


def compare(made, *problem):
    """The engine `made` equals the loop in one `problem`: the arguments of `loop`."""
    actual, truth = ask(made, *problem[2:]), loop(*problem)
    dtype = actual.total.dtype
    tolerance = max(1e-5 if dtype == torch.float32 else 1e-10, 80 * torch.finfo(dtype).eps * truth.condition)
    plain = loop(*problem, dtype=dtype) if dtype == torch.float32 else truth
    for name, scale in (("total", truth.scale), ("norms", None), ("losses", None)):
        value, expected = getattr(actual, name), getattr(truth, name)
        try:
            assert_near(value, expected, tolerance, scale, 4 * off(getattr(plain, name), expected))
        except AssertionError as error:
            raise AssertionError(f"{name} {error}") from None


def everything(model):
    """What must not change: values bit for bit, where they lie, modes, attributes, hooks, random numbers."""
    tensors = {name: (value.clone(), value.data_ptr()) for name, value in model.state_dict().items()}
    modules = [
        (m.training, sorted(vars(m)), [len(v) for k, v in vars(m).items() if k.endswith("_hooks")])
        for m in model.modules()
    ]
    return tensors, modules, torch.get_rng_state()


def assert_unchanged(model, before):
    tensors, modules, random = everything(model)
    assert modules == before[1]
    assert torch.equal(random, before[2])
    assert tensors.keys() == before[0].keys()
    for name, (value, place) in tensors.items():
        assert torch.equal(value, before[0][name][0]), name
        assert place == before[0][name][1], name
