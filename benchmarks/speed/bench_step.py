"""The contenders of `dpopt bench` under pytest-benchmark:

    pytest benchmarks/speed/bench_step.py -k "mlp and full" --benchmark-columns=median,iqr

Groups are what `dpopt bench` compares. Its own ratios are the ones to quote: there, contenders take turns, each in a
process of its own; here they share one heap, and who runs first changes what the next finds.
"""

import warnings

import pytest
import torch

from dpopt.bench import run

CHOSEN = run.settings(["cases=all", "subsets=all"])
ROUNDS, WARM_UP = 10, 2
STEPS = {
    f"{kind}-{case.name}-{subset}-{contender.name}": (kind, case, subset, contender)
    for kind, case, subset, contenders in run.find_groups(CHOSEN)[0]
    for contender in contenders
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus' hooks warn at every step
        yield


@pytest.mark.parametrize("name", STEPS)
def test_step(benchmark, name):
    """One call of one contender."""
    kind, case, subset, contender = STEPS[name]
    benchmark.group = f"{kind}s, {case.name}, {subset}, {torch.get_num_threads()} threads"
    benchmark.extra_info |= {"batch_size": case.batch_size, "draws_per_call": contender.draws}
    try:
        step = contender.build(WARM_UP + ROUNDS)
        step()
    except Exception as error:  # what other libraries cannot do is left out
        pytest.skip(f"fails: {error}")
    benchmark.pedantic(step, rounds=ROUNDS, warmup_rounds=WARM_UP - 1)
