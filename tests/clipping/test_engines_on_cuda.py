"""The engines on a GPU: for no kind of layer do they wait, nor find anything else than on the CPU."""

import copy
import math

import pytest
import torch
from devices import ON_CUDA, to
from loop import RULES, TWO, around, cross_entropy, squared
from test_real_models import LANGUAGE, VISION, images, next_token, tokens
from transformers import masking_utils
from zoo import MODELS

from dpopt.clipping import Abadi, engine
from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.vmap import VmapEngine

N = 4
SMALL = ["tokens", "frames", "tied_across_kinds", "tied_standardised", "lora", "elementwise", "in_place"]
SAMPLE = [*SMALL, "bit", "gpt2_lora"]
LEFT = [name for name in MODELS if name not in (*SMALL, "tied", "tied_wide")]  # these two keep ids that are on the CPU


@pytest.fixture
def _without_packed_sequences(monkeypatch):
    """Transformers looks for these in each forward pass, and waits for what it sees."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None, raising=False)


def problem(name):
    """A model, its loss, and N examples of which one is bad where inputs are no ids."""
    torch.manual_seed(0)
    if name in MODELS:
        model, inputs = MODELS[name]()
        model, loss, x, y = model, squared, inputs(N), torch.randn(N)
    elif name in VISION:
        model, loss, (x, y) = VISION[name](), cross_entropy, images()
    else:
        model, loss, (x, y) = LANGUAGE[name](), next_token, tokens()
    if x.is_floating_point():
        x[-1] = math.nan
    return model, loss, x, y


def asked(made, points, scale, x, y, mask):
    """Everything that an engine is asked for."""
    one, two = made.clipped(points[:1], x, y, mask, RULES[0]), made.clipped(points, x, y, mask, RULES[2], scale)
    return [*one, *two, made.losses([theta for _, theta in points], x, y, mask), made.outputs(points[0][1], x)]


def compare(cuda, kind, name):
    model, loss, x, y = problem(name)
    twin, made = copy.deepcopy(model), kind(model, loss)
    theta = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    problem_of_both = [around(theta, TWO), torch.rand_like(theta), x, y, torch.arange(len(x)) != 1]
    expected = asked(made, *problem_of_both)
    with cuda.there():
        on_gpu, inputs = kind(twin.to("cuda"), loss), to("cuda", problem_of_both)
        on_gpu.clipped(inputs[0][:1], *inputs[2:], RULES[0])  # the first batch is watched for mixing, which waits
        with cuda.never_waiting():
            found = asked(on_gpu, *inputs)
        assert all(part.device.type == "cuda" for part in found)
        found = to("cpu", found)
    for part, other in zip(found, expected, strict=True):
        size = other.nan_to_num(posinf=0.0, neginf=0.0).abs().max()
        torch.testing.assert_close(part, other, rtol=1e-4, atol=2e-5 * float(size), equal_nan=True)


@ON_CUDA
@pytest.mark.usefixtures("_without_packed_sequences")
@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in LEFT)])
def test_bookkeeping_never_waits_for_a_gpu(cuda, name):
    compare(cuda, BookkeepingEngine, name)


@ON_CUDA
@pytest.mark.parametrize("name", ["frames", "tokens"])
def test_vmap_never_waits_for_a_gpu(cuda, name):
    compare(cuda, VmapEngine, name)


@ON_CUDA
@pytest.mark.parametrize("name", ["auto", "bookkeeping", "vmap"])
def test_an_engine_is_verified_on_the_gpu_and_never_waits_afterwards(cuda, name):
    model, loss, x, y = problem("cnn")
    x[-1] = 0.5
    with cuda.there():
        x, y, mask = to("cuda", (x, y, torch.ones(N).bool()))
        made = engine(model.to("cuda"), loss, name)
        points = [(1.0, made.theta)]
        first = made.clipped(points, x, y, mask, Abadi(0.3))
        with cuda.never_waiting():
            second = made.clipped(points, x, y, mask, Abadi(0.3))
        assert torch.equal(*to("cpu", (first.total, second.total)))
        assert made.physical_batch(100) == 130
