"""The cost of a step, a draw, a start, a table and of verifying, each over a plain twin that took turns with it.

    python benchmarks/speed/ratios.py             # or make bench: beside the stored ratios, which stand in ratios.json
    python benchmarks/speed/ratios.py rounds=15 store=true

All is CPU time, which other programs disturb less than the clock on the wall. A row is slower or faster only where the
middle halves of its rounds' ratios, today's and the stored ones, do not overlap and their medians differ by a tenth:
two runs of one code differ by less. It ends with 1 where one is slower. The steps of many models, and of Opacus, are
those of `dpopt bench`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_name("ratios.json")
BURST = 20
"""Calls of a step or a draw that are timed together."""
APART = 0.1
"""Medians that differ by less are the same: rounds of one run are more alike than two runs."""
PUBLISHED = "results/published"
SUITE = "quickstart"
_READ = f"import json, lzma, pandas; [*map(json.loads, lzma.open('{PUBLISHED}/{SUITE}/runs.jsonl.xz'))]"
Timed = Callable[[], float]


def ratios(twins: Mapping[str, tuple[Timed, Timed]], rounds: int) -> dict[str, list[float]]:
    """For each pair of a subject and its plain twin, the quartiles of the rounds' ratios; all take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in twins}
    for number in range(rounds + 1):
        for name, (subject, plain) in twins.items():
            ratio = subject() / plain()
            if number:  # the first round warms up
                seconds[name].append(ratio)
    return {name: [*map(float, np.quantile(each, [0.25, 0.5, 0.75]))] for name, each in seconds.items()}


def verdict(now: list[float], stored: list[float] | None) -> str:
    """The difference between two rows of quartiles, where there is one beyond their spread."""
    if stored is None:
        return "new"
    if abs(now[1] / stored[1] - 1) < APART:
        return "same"
    return "slower" if now[0] > stored[2] else "faster" if now[2] < stored[0] else "same"


def twins(cache: str) -> dict[str, tuple[Timed, Timed]]:
    """Each subject and its plain twin; commands keep their numbers in the folder `cache`."""
    import torch

    from dpopt.bench.cases import CASES
    from dpopt.bench.contenders import Task, engine_group
    from dpopt.privacy.sampling import add_gaussian, poisson_rows

    torch.set_num_threads(1)
    case, noised, draws = CASES["mlp"], torch.zeros(CASES["mlp"].counts("full")[0]), iter(range(10**9))
    group = engine_group(("bookkeeping",), Task(case, "full", torch.device("cpu")))
    plain, private = (each.build(10**5) for each in group)

    def draw() -> None:
        poisson_rows(1, number := next(draws), 60_000, 0.01)
        add_gaussian(noised, 1.0, 1, number, 0)

    step, run = partial(_burst, plain), partial(_process, cache)
    read = partial(run, "-c", _READ)
    of_suite = (f"suite={SUITE}", f"results={PUBLISHED}")
    return {
        "a private step / a plain one": (partial(_burst, private), step),
        "rows and noise of a draw / a plain step": (partial(_burst, draw), step),
        "import dpopt / import torch": (partial(run, "-c", "import dpopt"), partial(run, "-c", "import torch")),
        "dpopt list / import torch": (partial(run, "-m", "dpopt", "list"), partial(run, "-c", "import torch")),
        f"dpopt table {SUITE} / a plain reader": (partial(run, "-m", "dpopt", "table", *of_suite), read),
        f"dpopt verify {SUITE} / a plain reader": (partial(run, "-m", "dpopt", "verify", *of_suite), read),
    }


def _burst(call: Callable[[], None]) -> float:
    started = time.process_time()
    for _ in range(BURST):
        call()
    return time.process_time() - started


def _process(cache: str, *words: str) -> float:
    environment = os.environ | {"DPOPT_CACHE": cache, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ends with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main(words: list[str]) -> int:
    """Measure, print beside the stored ratios, and store with `store=true`."""
    from dpopt.store.provenance import code, cpu

    keys = {"rounds": "7", "store": "false"} | dict(word.split("=", 1) for word in words)
    before: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {"ratios": {}}
    with tempfile.TemporaryDirectory() as cache:
        measured = ratios(twins(cache), int(keys["rounds"]))
    said = {name: verdict(row, before["ratios"].get(name)) for name, row in measured.items()}
    for name, row in measured.items():
        texts = ["{1:8.2f} ({0:.2f}-{2:.2f})".format(*each) for each in (row, before["ratios"].get(name)) if each]
        print(f"{name:<42}{said[name]:>7}" + "".join(f"{text:>26}" for text in texts))
    print(
        f"stored ratios: {before.get('cpu', 'nothing')}, code {before.get('code', '')}; those of another CPU may differ"
    )
    if keys["store"] == "true":
        more = {"cpu": cpu(), "code": code(), "rounds": int(keys["rounds"]), "load": os.getloadavg()[0]}
        STORED.write_text(json.dumps(more | {"ratios": measured}, indent=1) + "\n")
    return 1 if "slower" in said.values() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
