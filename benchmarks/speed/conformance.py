"""Checks that a device computes what the CPU does: every registered optimizer, every engine, and the noise.

Each check is a row, as plain data: what it is about (`kind`, `name`), `check`, `status` (passed, failed or skipped),
`detail` (the error, or how far two results are apart) and `seconds`.
"""

from __future__ import annotations

import dataclasses
import math
import time
import unittest
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from speed import twins
from torch import Tensor

from dpopt import clipping, registry, testing
from dpopt.bench.cases import Case
from dpopt.clipping import Abadi, ClippingEngine
from dpopt.privacy import sampling
from dpopt.testing import numerics, privacy

CPU = torch.device("cpu")
EXAMPLES, BOUND = 8, 0.1
"""Examples of a batch, and a clipping bound that all of them exceed."""
SAME, BFLOAT16, BOUNDED, REPEATED = 1e-3, 0.1, 1e-4, 0.0
"""Largest distance of results, as a share: on two devices in float32, in bfloat16, over the bound, on one device."""
NORMALS = 2**20
"""Normal numbers whose distribution is tested."""
OPTIMIZER_RULES = (
    twins.releases_as_on_the_cpu,
    privacy.replays_bit_for_bit,
    privacy.adds_the_stated_gradient_noise,
    numerics.resumes_bit_for_bit,
)
"""Rules for releases that are computed on the device, with noise made there."""

Found = float | str | None
"""The result of a check: how far two results are apart, a remark, or None. A check that fails raises an error."""


def optimizers(names: Iterable[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows for the registered optimizers `names`: those rules that a device can break."""
    for name in names:
        optimizer = registry.create(name)
        for rule in OPTIMIZER_RULES:
            yield _row("optimizer", name, rule.__name__, partial(rule, optimizer, str(device)))
        if device.type == "cuda":
            by_name = {check.name: check for check in testing.checks(optimizer)}
            yield _row("optimizer", name, "same_on_cuda", by_name["same_on_cuda"])


def engines(cases: Iterable[Case], device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows for the engines on each case, as they are and with what the device calculates faster allowed."""
    for case in cases:
        pair = _Pair(case, device)
        for engine in ("bookkeeping", "vmap"):
            for name, check in ENGINE_CHECKS.items():
                yield _row("engine", f"{engine}, {case.name}", name, partial(check, pair, engine))
        yield _row("engine", f"bookkeeping, {case.name}", "bfloat16", partial(_in_bfloat16, pair))


def noise(device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows for the noise that is made on the device."""
    for name, check in NOISE_CHECKS.items():
        yield _row("noise", "float32", name, partial(check, device))


class _Pair:
    """A case on the CPU and on a device, with the same parameters and records."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case, self.device = dataclasses.replace(case, batch_size=EXAMPLES), device

    def engine(
        self, name: str, device: torch.device, precision: str = "float32"
    ) -> tuple[ClippingEngine, Tensor, Tensor]:
        """The engine, inputs and targets."""
        model, x, y = self._case.make("full", device)
        return clipping.engine(model, self._case.loss, name, sample=(x[:3], y[:3]), precision=precision), x, y

    def clipped(self, name: str, device: torch.device, precision: str = "float32") -> clipping.Clipped:
        """The clipped sum of all examples, with their norms and losses."""
        engine, x, y = self.engine(name, device, precision)
        return engine.clipped(
            [(1.0, engine.theta)], x, y, torch.ones(len(x), dtype=torch.bool, device=device), Abadi(BOUND)
        )


def _agrees(pair: _Pair, name: str) -> Found:
    """Norms, losses and the clipped sum are those of the CPU."""
    with _exact_model():
        here, there = pair.clipped(name, CPU), pair.clipped(name, pair.device)
    return max(_share(one, other, SAME) for one, other in zip(there, here, strict=True))


def _is_bounded(pair: _Pair, name: str) -> Found:
    """No example adds more than the bound, whatever the settings of the device say about products."""
    worst = 0.0
    engine, x, y = pair.engine(name, pair.device)
    for setting in ("highest", "high"):
        with _matmul_precision(setting):
            worst = max(worst, *(_length(engine, x, y, row) for row in range(len(x) // 2)))
    assert worst <= BOUND * (1 + BOUNDED), f"an example adds {worst:.6g} where the bound is {BOUND}"
    return worst / BOUND - 1


def _length(engine: ClippingEngine, x: Tensor, y: Tensor, row: int) -> float:
    mask = torch.arange(len(x), device=x.device) == row
    return float(engine.clipped_sum([(1.0, engine.theta)], x, y, mask, Abadi(BOUND)).double().norm())


def _leaves_out_bad_ones(pair: _Pair, name: str) -> Found:
    """A record that holds NaN adds nothing, and the others add what they do without it."""
    engine, x, y = pair.engine(name, pair.device)
    if not x.is_floating_point():
        raise unittest.SkipTest("tokens cannot hold NaN")
    bad, mask = x.clone(), torch.ones(len(x), dtype=torch.bool, device=x.device)
    bad[0] = math.nan
    value = engine.clipped_sum([(1.0, engine.theta)], bad, y, mask, Abadi(BOUND))
    mask[0] = False
    return _share(value, engine.clipped_sum([(1.0, engine.theta)], x, y, mask, Abadi(BOUND)), SAME)


def _repeats(pair: _Pair, name: str) -> Found:
    """The same query has the same answer, bit for bit, so that a run that was stopped ends as it would have."""
    engine, x, y = pair.engine(name, pair.device)
    mask = torch.ones(len(x), dtype=torch.bool, device=x.device)
    first, again = (engine.clipped_sum([(1.0, engine.theta)], x, y, mask, Abadi(BOUND)) for _ in range(2))
    return _share(again, first, REPEATED)


ENGINE_CHECKS: dict[str, Callable[[_Pair, str], Found]] = {
    "as on the CPU": _agrees,
    "bounds every example": _is_bounded,
    "leaves bad records out": _leaves_out_bad_ones,
    "repeats bit for bit": _repeats,
}


def _in_bfloat16(pair: _Pair) -> Found:
    """Under autocast losses and norms are near those of float32, and every example keeps its bound."""
    exact, value = (pair.clipped("bookkeeping", pair.device, precision) for precision in ("float32", "bfloat16"))
    apart = max(_share(value.losses, exact.losses, BFLOAT16), _share(value.norms, exact.norms, BFLOAT16))
    engine, x, y = pair.engine("bookkeeping", pair.device, "bfloat16")
    longest = _length(engine, x, y, 0)
    assert longest <= BOUND * (1 + BOUNDED), f"an example adds {longest:.6g} where the bound is {BOUND}"
    return apart


def _noise(seed: int, draw: int, release: int, size: int, device: torch.device) -> Tensor:
    noise = torch.zeros(size, device=device)
    sampling.add_gaussian(noise, 1.0, seed, draw, release)
    return noise


def _is_a_function_of_its_place(device: torch.device) -> Found:
    """Noise is the same for the same (seed, draw, release), and another for any other."""
    first, again = (_noise(1, 2, 3, 1000, device) for _ in range(2))
    assert torch.equal(first, again), "the same release has other noise"
    for place in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        other = _noise(*place, 1000, device)
        assert abs(float(first @ other)) < 6 * math.sqrt(1000), f"noise of {place} is correlated with that of (1, 2, 3)"
    return None


def _has_its_size(device: torch.device) -> Found:
    """Mean and variance of noise of std 3 are within five of their standard errors."""
    total = torch.zeros(NORMALS, device=device)
    sampling.add_gaussian(total, 3.0, seed=1, draw=0, release=0)
    values = total.double().cpu() / 3
    mean, variance = float(values.mean()), float(values.square().mean())
    assert abs(mean) < 5 / math.sqrt(NORMALS), f"the mean is {mean}"
    assert abs(variance - 1) < 5 * math.sqrt(2 / NORMALS), f"the variance is {variance}"
    return abs(variance - 1)


def _is_normal(device: torch.device) -> Found:
    """A test of Kolmogorov and Smirnov does not refuse the normal distribution (1 in 10^6)."""
    from scipy import stats

    values = _noise(1, 0, 0, NORMALS, device).double().cpu().numpy()
    value = stats.kstest(values, "norm")
    assert value.pvalue > 1e-6, f"p = {value.pvalue:.3g}"
    return float(value.statistic)


def _has_blocks_of_its_own(device: torch.device) -> Found:
    """Vectors longer than a block do not repeat the noise of the first."""
    size = (sampling.CPU_BLOCK if device.type == "cpu" else sampling.DEVICE_BLOCK) + 1000
    values = _noise(1, 0, 0, size, device)
    correlation = float(values[:1000] @ values[-1000:])
    assert abs(correlation) < 6 * math.sqrt(1000), "two blocks are correlated"
    return None


NOISE_CHECKS: dict[str, Callable[[torch.device], Found]] = {
    "a function of its place": _is_a_function_of_its_place,
    "has the stated size": _has_its_size,
    "is normal": _is_normal,
    "blocks differ": _has_blocks_of_its_own,
}


def _share(value: Tensor, expected: Tensor, tolerance: float) -> float:
    """The distance of `value` from `expected`, as a share of it."""
    value, expected = value.double().cpu(), expected.double().cpu()
    apart = float((value - expected).norm() / expected.norm())
    assert apart <= tolerance, f"{apart:.3g} apart, as a share; {tolerance:g} is allowed"
    return apart


@contextmanager
def _exact_model() -> Iterator[None]:
    """The model's own convolutions, too, are computed with all digits, so that rounding hides no mistake."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@contextmanager
def _matmul_precision(setting: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _row(kind: str, name: str, check: str, run: Callable[[], Found]) -> dict[str, Any]:
    started, status, detail = time.perf_counter(), "passed", ""
    try:
        value = run()
        detail = f"{value:.2g}" if isinstance(value, float) else value or ""
    except unittest.SkipTest as error:
        status, detail = "skipped", str(error)
    except Exception as error:  # a device can fail in any way, and the other checks are still to be made
        status, detail = "failed", f"{type(error).__name__}: {error}"[:300]
    seconds = time.perf_counter() - started
    return {"kind": kind, "name": name, "check": check, "status": status, "detail": detail, "seconds": seconds}
