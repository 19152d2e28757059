import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from devices import ON_CUDA, to
from noise import gaussian
from scipy import stats

from dpopt.privacy import sampling
from dpopt.testing.numerics import OneType


def test_rate_one_takes_everyone_and_a_draw_may_be_empty():
    np.testing.assert_array_equal(sampling.poisson_rows(0, 0, 50, 1.0), np.arange(50))
    assert len(sampling.poisson_rows(0, 0, 50, 1e-12)) == 0


@pytest.mark.parametrize("multiple", [1, 8])
def test_physical_batches_hold_every_row_once(multiple):
    for count, size in product((0, 1, 7, 8, 9, 23, 64, 65, 191), (1, 7, 8, 12, 64)):
        rows = np.arange(100, 100 + count)
        batches = sampling.physical_batches(rows, size, multiple)
        np.testing.assert_array_equal(np.concatenate([part[mask] for part, mask in batches] or [rows]), rows)
        assert len(batches) == -(-count // size)
        for part, mask in batches:
            assert mask.any()
            assert len(part) == len(mask) <= size
            assert len(part) % multiple == 0 or len(part) == size
        assert sum(len(part) for part, _ in batches) - count <= len(batches) * multiple


def test_physical_batches_are_of_nearly_equal_length_or_of_one_shape():
    """A full batch and a tiny rest cost two calls' overhead for one call's work; a GPU wants one shape all the same."""
    rows = np.arange(305)
    assert [int(mask.sum()) for _, mask in sampling.physical_batches(rows, 304, 8)] == [160, 145]
    assert [len(part) for part, _ in sampling.physical_batches(rows, 304, 304)] == [304, 304]
    assert [len(part) for part, _ in sampling.physical_batches(rows[:250], 304, 8)] == [256]


def test_bits_of_the_noise_do_not_depend_on_threads_or_memory():
    reference = gaussian(5, 1, 2, 300_001)
    assert len(reference) == 300_001
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(gaussian(5, 1, 2, 300_001), reference)
        unaligned = torch.zeros(300_002)[1:]
        sampling.add_gaussian(unaligned, 1.0, 5, 1, 2)
        assert torch.equal(unaligned, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 5, sampling.CPU_BLOCK, 2 * sampling.CPU_BLOCK + 3])
def test_added_noise_is_the_noise(size, dtype):
    total = torch.linspace(-1, 1, size, dtype=dtype)
    noise = gaussian(5, 1, 2, size, dtype)
    assert noise.shape == (size,)
    expected = total + 0.3 * noise
    sampling.add_gaussian(total, 0.3, 5, 1, 2)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("seed", [0, 7, 2**64 + 5, 2**128 - 3])
def test_a_stream_is_philox_with_the_seed_as_its_key(seed):
    exact = np.random.Generator(np.random.Philox(key=seed, counter=[0, 5, 2, 1]))
    np.testing.assert_array_equal(sampling._stream(seed, 1, 5, 2).random(9), exact.random(9))


def test_membership_and_noise_never_share_a_stream():
    members = sampling._stream(9, sampling._ROWS, 3).random(4)
    noise = sampling._stream(9, sampling._NOISE, 3).random(4)
    assert not np.allclose(members, noise)


def test_draws_and_noise_are_those_of_the_revision():
    """Whoever has to change a number here has to raise `REVISION`, so that no old result passes for a new one."""
    assert sampling.REVISION == 2
    assert sampling.poisson_rows(5, 7, 400, 0.02).tolist() == [32, 89, 95, 97, 185, 193, 202, 222]
    single, double = (gaussian(5, 7, 3, 4, dtype).tolist() for dtype in (torch.float32, torch.float64))
    assert single == pytest.approx([1.7441298, -0.35954726, 0.31353632, 0.43281516], rel=1e-6)
    assert double == pytest.approx([-0.8920426535, 0.02038357221, -0.9799744106, 1.297071283], rel=1e-9)
    assert sampling.derive("transform", 5, 7, 0) == 224425518198788732500572282246873934477


@ON_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_on_a_gpu_is_standard_normal_and_never_waited_for(cuda, dtype, monkeypatch):
    """Numbers are a device's own in float32, and the CPU's in float64."""
    monkeypatch.setattr(sampling, "DEVICE_BLOCK", 3000)
    size, where = 10_000, ((3, 0, 0), (3, 0, 0), (3, 0, 1), (3, 1, 0), (4, 0, 0))
    with cuda.there():
        std = torch.full((), 2.0, dtype=torch.float64, device="cuda")
        total = torch.zeros(size, dtype=dtype, device="cuda")
        with cuda.never_waiting(), OneType(dtype, size):
            noises = [gaussian(*counter, size, dtype, "cuda") for counter in where]
            sampling.add_gaussian(total, std, *where[0])
        first, again, *others = to("cpu", noises)
        assert torch.equal(to("cpu", total), 2 * first)
    assert torch.equal(first, again)
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-6
    blocks = [first[:3000], first[3000:6000], first[6000:9000]]
    for one, other in [*((first, other) for other in others), *pairwise(blocks)]:
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / len(one) ** 0.5
    if dtype is torch.float64:
        assert torch.equal(first, gaussian(*where[0], size, dtype))


@ON_CUDA
def test_noise_on_a_gpu_is_its_own_generators(cuda):
    """With 63 bits of the hash of its place as the seed."""
    with cuda.there():
        generator = torch.Generator("cuda").manual_seed(sampling.derive(3, 1, 2) >> 65)
        first, second = (torch.randn(100, device="cuda", generator=generator) for _ in range(2))
        expected = first.add_(second).mul_(math.sqrt(0.5))
        pair = to("cpu", (gaussian(3, 1, 2, 100, torch.float32, "cuda"), expected))
    assert torch.equal(*pair)


@ON_CUDA
def test_what_is_sent_to_a_gpu_is_not_waited_for(cuda):
    rows = torch.arange(10)
    with cuda.there():
        device = torch.device("cuda", 0)
        with cuda.never_waiting():
            there = sampling.send(rows, device)
            same = sampling.send(there, device)
        assert (there.device, same.device) == (device, device)
        assert torch.equal(to("cpu", there), rows)
