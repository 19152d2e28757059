"""The book-keeping engine against plain autograd: every layer type, uses that break book-keeping, and its promises."""

import math
from contextlib import nullcontext
from functools import partial
from itertools import cycle

import pytest
import timm.layers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loop import ONE, RULES, TWO, around, ask, assert_near, assert_unchanged, check, everything, loop, squared
from torch import nn
from transformers.pytorch_utils import Conv1D
from zoo import (
    MODELS,
    Of,
    both,
    floats,
    ids,
    mlp,
    tied_language_model,
    train_only,
)

from dpopt.clipping import Abadi, Automatic, Normalized, engine
from dpopt.errors import ConfigError

few = settings(deadline=None, max_examples=20, database=None, suppress_health_check=list(HealthCheck))
small, booleans = st.integers(1, 6), st.booleans()


# Layers, their options and shapes drawn: name -> (draw) -> (layer, maker of inputs).


def linear(draw):
    wide, narrow = draw(small), draw(small)
    return nn.Linear(wide, narrow, bias=draw(booleans)), floats(*draw(st.lists(small, max_size=3)), wide)


def conv1d(draw):
    """The transformers' one."""
    return Conv1D(draw(small), wide := draw(small)), floats(*draw(st.lists(small, max_size=2)), wide)


def conv(dims, draw):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups, kernel, dilation = draw(st.integers(1, 3)), each(1, 3), each(1, 2)
    size = [d * (k - 1) + 1 + extra for k, d, extra in zip(kernel, dilation, each(0, 2), strict=True)]
    padding = draw(
        st.sampled_from(["same", "valid", tuple(min(p, s - 1) for p, s in zip(each(0, 2), size, strict=True))])
    )
    stride = each(1, 1 if padding == "same" else 2)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    channels = groups * draw(st.integers(1, 2))
    shape = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    made = kind(channels, groups * draw(st.integers(1, 2)), **shape, padding_mode=mode, bias=draw(booleans))
    return made, floats(channels, *size)


def standardised(kind, draw):
    groups, kernel, per = draw(st.integers(1, 2)), draw(st.integers(2, 3)), draw(st.integers(2, 6))
    shape = {
        "kernel_size": kernel,
        "stride": draw(st.integers(1, 2)),
        "padding": 1,
        "groups": groups,
        "bias": draw(booleans),
    }
    return kind(per * groups, 2 * groups, **shape), floats(per * groups, draw(st.integers(3, 4)), 3)


def layer_norm(kind, draw):
    shape = draw(st.lists(st.integers(2, 4), min_size=1, max_size=2))
    options = {"bias": draw(booleans)} if kind is nn.LayerNorm else {}
    return kind(shape, **options), floats(*draw(st.lists(small, max_size=2)), *shape)


def channel_norm(kind, draw):
    return kind(channels := draw(st.integers(2, 4))), floats(channels, draw(small), draw(small))


def group_norm(kind, draw):
    groups, per = draw(st.integers(1, 3)), draw(small)
    return kind(groups, groups * per), floats(groups * per, *draw(st.lists(st.integers(2, 3), min_size=2, max_size=2)))


def plain_group_norm(draw):
    groups, per, space = draw(st.integers(1, 3)), draw(st.integers(2, 4)), draw(st.lists(small, max_size=3))
    return nn.GroupNorm(groups, groups * per), floats(groups * per, *space)


def instance_norm(draw):
    dims = draw(st.integers(1, 3))
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    return kind(channels := draw(small), affine=True), floats(channels, *(draw(st.integers(2, 3)) for _ in range(dims)))


def embedding(draw):
    size = draw(st.integers(2, 5))
    padding = draw(st.sampled_from([None, 0, size - 1]))
    return nn.Embedding(size, draw(small), padding_idx=padding), ids(size, *draw(st.lists(small, max_size=2)))


def layer_scale(draw):
    return timm.layers.LayerScale(dim := draw(small), init_values=0.5), floats(draw(small), dim)


LAYERS = {
    "linear": linear,
    "transformers.Conv1D": conv1d,
    "conv2d": partial(conv, 2),
    "conv1d_and_3d": lambda draw: conv(draw(st.sampled_from([1, 3])), draw),
    "StdConv2d": partial(standardised, timm.layers.StdConv2d),
    "ScaledStdConv2d": partial(standardised, timm.layers.ScaledStdConv2d),
    "layer_norm": partial(layer_norm, nn.LayerNorm),
    "layer_norm_2d": partial(channel_norm, timm.layers.LayerNorm2d),
    "group_norm": plain_group_norm,
    "group_norm_act": partial(group_norm, lambda groups, channels: timm.layers.GroupNormAct(channels, groups)),
    "rms_norm": partial(layer_norm, nn.RMSNorm),
    "instance_norm": instance_norm,
    "embedding": embedding,
    "layer_scale": layer_scale,
}


@pytest.mark.parametrize("name", LAYERS)
@few
@given(data=st.data())
def test_every_layer_equals_a_loop(name, data):
    """Shapes, options, batch size (also 0 and 1), mask, one or two points, clip rule and precision are drawn."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**20)))
    layer, inputs = LAYERS[name](draw)
    n, dtype = draw(st.sampled_from([0, 1, 2, 3, 5])), draw(st.sampled_from([torch.float32, torch.float64]))
    x = inputs(n)
    if x.is_floating_point():
        x = x.to(dtype)
        if draw(booleans):
            layer = nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1]), layer)
    model = nn.Sequential(layer, nn.Tanh()).to(dtype)
    made = engine(model, squared, "bookkeeping")
    mask = torch.tensor(draw(st.lists(booleans, min_size=n, max_size=n)), dtype=torch.bool)
    weights, clip = draw(st.sampled_from([ONE, TWO, (0.5, 0.5), (-2.0, 3.0)])), draw(st.sampled_from(RULES))
    check(model, made, x, torch.randn(n, dtype=dtype), weights=weights, clip=clip, mask=mask)


def test_a_module_may_be_called_in_some_passes_only():
    torch.manual_seed(0)
    model = Of(lambda m, x: m.used(x) + (m.other(x) if m.on else 0), **both())
    made = engine(model, squared, "bookkeeping")
    for model.on in (True, False, True):
        check(model, made, torch.randn(3, 4), torch.randn(3))


def test_a_later_pass_that_cannot_be_followed_is_refused():
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Of(lambda m, x: m.attend(x, x, x)[0] if m.on else m.linear(x), linear=nn.Linear(4, 4), attend=attend)
    made = engine(model, squared, "bookkeeping")
    model.on = False
    check(model, made, torch.randn(3, 2, 4), torch.randn(3))
    model.on = True
    with pytest.raises(ConfigError, match="MultiheadAttention"):
        check(model, made, torch.randn(3, 2, 4), torch.randn(3))


def test_an_input_that_is_changed_in_place_after_its_use_is_refused():
    model = Of(lambda m, x: (m.linear(x), m.on and x.mul_(2))[0], linear=nn.Linear(4, 4))
    made, x = engine(model, squared, "bookkeeping"), torch.randn(3, 4)
    for model.on in (False, True):  # autograd itself would refuse it where it is examined
        with pytest.raises(ConfigError, match="an input of Linear was changed in place") if model.on else nullcontext():
            made.clipped([(1.0, made.theta)], x, torch.randn(3), torch.ones(3), Abadi(1.0))


# Bad rows, and the bound.


@pytest.mark.parametrize(("name", "kind"), [*((n, "bookkeeping") for n in ("mlp", "cnn", "tokens")), ("cnn", "vmap")])
@pytest.mark.parametrize("weights", [ONE, TWO], ids=["one", "two"])
def test_masked_and_bad_rows_count_for_nothing(name, kind, weights):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    made = engine(model, squared, kind)
    x, y, clip = inputs(6), torch.randn(6), Abadi(0.3)
    points = around(made.theta, weights)
    truth = loop(model, squared, points, x, y, torch.arange(6) < 2, clip)
    x[2].view(-1)[0], x[3].view(-1)[-1], x[4] = math.nan, math.inf, -math.inf
    assert_near(made.clipped_sum(points, x, y, torch.arange(6) < 5, clip), truth.total)


def cancelling(positions):
    """Inputs whose positions all but cancel in the gradient of the mean over them."""

    def make(n):
        signs = torch.tensor([1, -1]).repeat_interleave(positions // 2)[:, None]
        return 1e4 * signs * torch.randn(n, 1, 32) + torch.randn(n, positions, 32)

    return make


def pooled(layer):
    return Of(lambda m, x: m.layer(x).mean(1), layer=layer)


def pooled_convolution():
    return Of(lambda m, x: m.conv(x.transpose(1, 2)).mean(2), conv=nn.Conv1d(32, 32, 1))


def parallel():
    """Inputs that a standardised kernel's projection all but removes."""
    layer = timm.layers.StdConv2d(8, 1, 3)
    return layer, lambda n: 1e4 * layer.weight.detach() + torch.randn(n, 8, 3, 3)


def opposed():
    """One row looked up with all but opposite coefficients."""
    coefficients = torch.tensor([1.0, -1.0, 1.0, -0.9999])[:, None]
    return Of(lambda m, x: (m.wte(x) * (1 + m.size * coefficients)).sum(1), wte=nn.Embedding(2, 32)), ids(1, 4)


HUGE = {
    "mlp": lambda: (mlp(), lambda n: 1e4 * torch.randn(n, 6)),
    "tied": lambda: (tied_language_model(torch.arange(3)[None], 16)[0], ids(7, 3)),
    "overflowing_norm": lambda: (
        Of(lambda m, x: m.layer(x).abs().sqrt(), layer=nn.Linear(6, 3)),
        lambda n: 1e30 * torch.randn(n, 6),
    ),
    "cancelling": lambda: (pooled(nn.Linear(32, 32)), cancelling(4)),
    "cancelling_long": lambda: (pooled(nn.Linear(32, 512)), cancelling(80)),
    "cancelling_conv": lambda: (pooled_convolution(), cancelling(4)),
    "cancelling_standardised": parallel,
    "cancelling_embedding": opposed,
}


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize("weights", [ONE, (10.0, -9.0)], ids=["one", "two"])
def test_no_example_contributes_more_than_the_sensitivity(name, weights):
    """Also where the terms of its norm cancel to less than their rounding errors."""
    torch.manual_seed(0)
    model, inputs = HUGE[name]()
    x, y, model.size = inputs(16), torch.randn(16), 0.0
    made = engine(model, squared, "bookkeeping", sample=(torch.randn_like(x) if x.is_floating_point() else x, y))
    model.size = 1e4
    points = around(made.theta, weights, 1e-4)
    for i, clip in zip(range(16), cycle((Abadi(0.1), Automatic(1.0, 0.01), Normalized(0.1))), strict=False):
        alone = made.clipped_sum(points, x, y, torch.arange(16) == i, clip)
        assert alone.isfinite().all()
        assert alone.norm() <= clip.sensitivity * (1 + 1e-4)


# Promises.


@pytest.mark.parametrize("name", ["cnn", "frozen_middle", "tied", "lora"])
def test_the_model_is_left_as_it_was(name):
    """No hooks, no new attributes, the same parameters with the same values and gradients; also after an error."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    made = engine(model, squared)
    tensors, modules, _ = everything(model)
    points, mask = around(made.theta, TWO), torch.ones(3).bool()
    made.clipped(points, inputs(3), torch.randn(3), mask, Abadi())
    made.losses([p for _, p in points], inputs(3), torch.randn(3), mask)
    made.outputs(points[0][1], inputs(3))
    with pytest.raises((RuntimeError, ValueError)):
        made.clipped_sum(points, torch.randn(3, 9, 9), torch.randn(3), mask, Abadi())
    assert_unchanged(model, (tensors, modules, torch.get_rng_state()))
    for p in model.parameters():
        assert torch.equal(p.grad, torch.ones_like(p))


@pytest.mark.parametrize("name", ["bookkeeping", "auto", "vmap"])
def test_theta_and_load(name):
    torch.manual_seed(0)
    model = train_only(mlp(), lambda name: name[0] != "2")
    made = engine(model, squared, name)
    kept = [p for p in model.parameters() if p.requires_grad]
    assert made.dimension == 6 * 5 + 5 + 5 * 3 + 3
    assert torch.equal(made.theta, torch.cat([p.detach().flatten() for p in kept]))
    theta = torch.randn(made.dimension)
    made.load(theta)
    assert torch.equal(made.theta, theta)
    assert torch.equal(torch.cat([p.detach().flatten() for p in kept]), theta)
    x = torch.randn(4, 6)
    torch.testing.assert_close(made.outputs(theta, x), model(x).detach())
    assert made.physical_batch(100.0) >= 1


@pytest.mark.parametrize("name", ["auto", "vmap"])
def test_no_vector_is_shared_with_the_model(name):
    torch.manual_seed(0)
    model, x, y, mask = mlp(), torch.randn(4, 6), torch.randn(4), torch.ones(4).bool()
    made = engine(model, squared, name)
    theta = torch.randn(made.dimension)
    kept = theta.clone()
    made.load(theta)
    first = made.clipped_sum([(1.0, theta)], x, y, mask, Abadi())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    copied = made.theta
    copied += 1
    assert torch.equal(theta, kept)
    assert not made.theta.any()
    assert torch.equal(made.clipped_sum([(1.0, theta)], x, y, mask, Abadi()), first)
    theta.mul_(2)  # nothing may be remembered of the vector it was
    assert_near(
        made.clipped_sum([(1.0, theta)], x, y, mask, Abadi()),
        loop(model, squared, [(1.0, theta)], x, y, mask, Abadi()).total,
    )


@pytest.mark.parametrize("kind", ["bookkeeping", "vmap"])
def test_dropout_is_a_function_of_the_seed_and_the_same_for_all_points(kind):
    """From the first call on, which also checks the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    made = engine(model, squared, kind)
    x, y, mask, clip = torch.randn(8, 6), torch.randn(8), torch.ones(8).bool(), Abadi(0.3)
    theta = made.theta
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(made.clipped([(1.7, theta), (-0.7, theta.clone())], x, y, mask, clip))
    torch.manual_seed(7)
    losses = made.losses([theta, theta.clone()], x, y, mask)
    torch.manual_seed(7)
    one = made.clipped_sum([(1.0, theta)], x, y, mask, clip)
    assert torch.equal(results[0].total, results[1].total)
    assert torch.equal(results[0].losses, results[1].losses)
    torch.testing.assert_close(results[0].losses, losses)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(one, results[0].total, rtol=1e-4, atol=1e-5)
    torch.manual_seed(8)
    assert not torch.allclose(made.losses([theta], x, y, mask), losses[:1])
    dropped = made.losses([theta], x[:1].expand(8, -1), y[:1].expand(8), mask)
    assert len(dropped.unique()) == 8  # every example has a mask of its own


def test_gradients_under_dropout_are_those_of_one_forward_pass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(), nn.Linear(9, 2))
    made = engine(model, squared, "bookkeeping")
    x, y, clip = torch.randn(4, 6), torch.randn(4), Abadi(0.3)
    torch.manual_seed(7)
    losses = squared(model(x), y)
    gradients = [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in losses]
    flat = torch.stack([torch.cat([g.flatten() for g in gradient]) for gradient in gradients])
    torch.manual_seed(7)
    actual = made.clipped_sum([(1.0, made.theta)], x, y, torch.ones(4).bool(), clip)
    torch.testing.assert_close(actual, clip.factor(flat.norm(dim=1)) @ flat, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["cnn", "tied"])
def test_bfloat16_is_close_and_its_results_are_float32(name):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    made = engine(model, squared, "bookkeeping", precision="bfloat16")
    x, y, mask, points = inputs(9), torch.randn(9), torch.ones(9).bool(), around(made.theta, ONE)
    actual, expected = ask(made, points, x, y, mask, Abadi(0.3)), loop(model, squared, points, x, y, mask, Abadi(0.3))
    for value, truth in zip(actual, expected[:3], strict=True):
        assert value.dtype == torch.float32
        assert_near(value, truth, tolerance=5e-2)
