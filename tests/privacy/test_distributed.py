"""Two processes over Gloo against one. Processes are slow to start: one pair makes all runs, the tests look at them."""

import math
import multiprocessing
import os
import shutil
import traceback
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from noise import gaussian
from torch import nn

import dpopt
from dpopt.clipping import Abadi, engine
from dpopt.errors import ConfigError
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import DataOracle, Draw, Ledger, Plan, distributed, epsilon, sampling
from dpopt.privacy.distributed import ALONE, Processes, digest
from dpopt.testing import Task
from dpopt.testing.privacy import Neighbours
from dpopt.testing.task import DELTA

SIZE, PATIENCE = 2, 300
"""Processes, and seconds that one waits for the other; nothing that passes depends on them."""
SOME = ("fiber", "hyfreedp", "adaptive_clip", "adadp")
"""Optimizers that ask for everything there is: gradients at one and two points, losses, counts, two draws a step."""
REST = tuple(name for name in dpopt.optimizers() if name not in SOME)
ROUNDING = 1e-5
"""Of the sensitivity. A release is the sum of some twenty vectors of at most the sensitivity, and of noise a few times
as long; an addition rounds by 2^-24 of what is there, and two processes add up in another order. Noise drawn twice, or
a record left out, would be 0.1 to 10."""


def probing(noise, rate):
    """A plan of two draws with everything that can be released."""
    draws = [Draw(rate, (noise,) * 4)] * 2
    return Plan(dict.fromkeys(("gradient", "losses", "counts"), noise), Ledger(draws), 1.0, rate, 2, 15, 1e-5, "pld")


def asked(oracle, model):
    """The values of one draw's gradient at two points, losses and count; the first loss is known from the gradient."""
    first, second = model.theta, 2 * model.theta
    with oracle.draw() as batch:
        gradient = batch.gradient([(1.5, first), (-0.5, second)], Abadi(0.3), scale=torch.full_like(first, 0.5))
        losses = batch.losses([first, first + 1], torch.tensor(2.0))
        below = batch.below(0.4)
    return torch.cat([release.value.double() for release in (gradient, losses, below)])


def linear(layers, start, device):
    """A clipping engine over a linear model for five features and three classes."""
    torch.manual_seed(start)
    model = nn.Sequential(*layers, nn.Linear(5, 3, bias=False))
    return engine(model.to(device), partial(F.cross_entropy, reduction="none"))


def releases(processes, examples=60, noise=1.0, layers=(), rate=1.0, start=0, device="cpu", **changes):
    """What is released of the first `examples` records of the task."""
    task, model = Task(), linear(layers, start, device)
    x, y = task.x[:examples].to(device), task.y[:examples].to(device)
    options = {"draw_seed": 1, "noise_seed": 2, "processes": processes, **changes}
    return asked(DataOracle(model, x, y, probing(noise, rate), **options), model)


CASES = {
    "even": {},
    "uneven": {"examples": 7},
    "one record": {"examples": 1},
    "empty": {"rate": 1e-9},
    "physical batches": {"physical_batch": 4, "examples": 23},
    "without noise": {"noise": 0.0},
    # Cut alike, physical batches have the numbers 0 and 1, and so the same random numbers, in one process and in two.
    "dropout": {"physical_batch": 30, "layers": (nn.Dropout(0.5),)},
    "on the grid": {"grid": True},
    "random transform": {"physical_batch": 30, "transform": torch.rand_like},
}


def optimized(name, processes):
    """A run in which every query is also put to one process alone."""
    task, optimizer = Task(), dpopt.create(name)
    plan = task.plan(optimizer)
    together = task.oracle(plan, processes=processes)
    compared = Neighbours(together, task.oracle(plan))
    theta = task.run(optimizer, compared).theta
    alone = task.run(optimizer, task.oracle(plan)).theta
    return {
        "apart": compared.largest,
        "kinds": [asked.kind for asked, _ in compared.queries],
        "theta": theta,
        "off": float((theta - alone).norm() / (alone - task.engine.theta).norm()),
        "ledger": together.ledger.to_json(),
        "planned": plan.ledger.to_json(),
    }


def counted(processes):
    """The lengths of all vectors that `dp_adam` has added up, and how often this process drew noise."""
    task, optimizer, sums, noises = Task(), dpopt.create("dp_adam"), [], []
    oracle = task.oracle(task.plan(optimizer), processes=processes)
    add_up, add_gaussian = dist.all_reduce, sampling.add_gaussian
    dist.all_reduce = lambda total: (sums.append(len(total)), add_up(total))
    sampling.add_gaussian = lambda total, *rest: (noises.append(len(total)), add_gaussian(total, *rest))
    try:
        task.run(optimizer, oracle)
    finally:
        dist.all_reduce, sampling.add_gaussian = add_up, add_gaussian
    return sums, noises


def fitted(processes=ALONE, start=0, spoiled=1.0, **changes):
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    x[0] *= spoiled
    torch.manual_seed(start)
    options = {
        "optimizer": dpopt.create("hyfreedp", lr=0.05),
        "epsilon": 4.0,
        "delta": 1e-4,
        "epochs": 4,
        "batch_size": 100,
        "seed": 0,
    }
    options |= {"accountant": "rdp", "progress": False, "test": (x, x[:, 0].gt(0).long()), **changes}
    options |= {"distributed": processes.size > 1}
    model, loss = nn.Linear(4, 2), partial(F.cross_entropy, reduction="none")
    result = dpopt.fit(model, loss, (x, x[:, 0].gt(0).long()), **options)
    plain = {key: value for key, value in result.record.items() if key not in ("train_seconds", "processes")}
    return {"weight": model.weight.detach(), "record": plain, "curve": result.curve, "ledger": result.ledger.to_json()}


def resumed(processes, folder):
    """A run that goes on from its sixth draw, and the whole of it."""
    for name in ("whole", "resumed", "elsewhere"):
        (folder / name).mkdir(exist_ok=True)

    def callback(entry):
        if entry["draw"] == 6:
            for name in ("resumed", "elsewhere"):
                shutil.copy(folder / "whole" / "checkpoint.pt", folder / name)

    whole = fitted(processes, seed=None, checkpoint=folder / "whole", callback=callback)
    return whole, fitted(processes, seed=None, checkpoint=folder / "resumed")


@dataclass(frozen=True)
class Straying(DPSGD):
    """An optimizer that is not a function of the releases."""

    def direction(self, state, gradient):
        direction, state = super().direction(state, gradient)
        return direction * (1 + Processes.of_group().rank), state


def refusal(make):
    try:
        make()
    except (ConfigError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


REFUSED = {
    "draw seed": ("processes.seeds", lambda p, folder: releases(p, draw_seed=p.rank)),
    "noise seed": ("processes.seeds", lambda p, folder: releases(p, noise_seed=p.rank)),
    "order of records": (
        "processes.records",
        lambda p, folder: Task().oracle(Task().plan(DPSGD()), x=Task().x.roll(p.rank, dims=0), processes=p),
    ),
    "noise": ("processes.plan", lambda p, folder: releases(p, noise=1.0 + p.rank)),
    "ledger": ("processes.ledger", lambda p, folder: releases(p, ledger=probing(1.0, 1.0).ledger.first(p.rank))),
    "parameters": ("processes.parameters", lambda p, folder: releases(p, start=p.rank)),
    "watch of one": ("watch", lambda p, folder: releases(p, watch=print if p.rank else None)),
    "folder of one": ("checkpoint", lambda p, folder: fitted(p, checkpoint=None if p.rank else "/dev/null/there")),
    "records of one": ("finite", lambda p, folder: fitted(p, spoiled=math.nan if p.rank else 1.0)),
    "model": ("processes.model", lambda p, folder: fitted(p, start=p.rank)),
    "checkpoint": (
        "processes.checkpoint",
        lambda p, folder: fitted(p, seed=None, checkpoint=folder / ("nowhere" if p.rank else "elsewhere")),
    ),
    "straying": ("after 1 draws", lambda p, folder: fitted(p, optimizer=Straying())),
}
"""Where the processes differ: a part of what is said, and who says it."""


class Broken:
    """An engine that fails in one of the processes."""

    def __init__(self, inner, is_broken):
        self._inner, self._is_broken = inner, is_broken

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def clipped(self, *query):
        if self._is_broken:
            raise MemoryError("out of memory")
        return self._inner.clipped(*query)


def failed(processes, save):
    """One process fails and ends; what does the other do?"""
    task = Task()
    task.engine = Broken(task.engine, processes.rank == 1)
    oracle = task.oracle(task.plan(DPSGD()), processes=processes)
    try:
        task.run(DPSGD(), oracle)
    except RuntimeError as error:
        save(str(error))


def meet(rank, folder, backend="gloo"):
    """Make the process group."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(backend, meeting, timedelta(seconds=PATIENCE), rank=rank, world_size=SIZE)
    return Processes.of_group()


def work(rank, folder):
    """What each process of the pair does."""
    processes = meet(rank, folder)
    found = {
        "optimized": {name: optimized(name, processes) for name in SOME},
        "releases": {name: releases(processes, **case) for name, case in CASES.items()},
        "counted": counted(processes),
        "fitted": fitted(processes),
        "resumed": resumed(processes, folder),
        "refusals": {name: refusal(partial(make, processes, folder)) for name, (_, make) in REFUSED.items()},
    }
    torch.save(found, folder / f"{rank}.pt")
    failed(processes, (folder / "failed.txt").write_text)


def work_with_the_rest(rank, folder):
    processes = meet(rank, folder)
    torch.save({"optimized": {name: optimized(name, processes) for name in REST}}, folder / f"{rank}.pt")


def work_on_gpus(rank, folder):
    """The releases alone, over NCCL where each process has a GPU of its own."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    processes = meet(rank, folder, "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= SIZE else "gloo")
    found = {name: releases(processes, device="cuda", **case).cpu() for name, case in CASES.items()}
    torch.save(found, folder / f"{rank}.pt")


def guarded(work, rank, folder):
    """Do `work`, and end at once: taking a process group apart waits for the other process, which may have ended."""
    code = 0
    try:
        work(rank, folder)
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        code = 1
    os._exit(code)


def both(work, folder):
    """What each of the two processes that do `work` has left in `folder`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dpopt.training.fitting", "dpopt.testing"])  # both import it but once
    pair = [context.Process(target=guarded, args=(work, rank, folder), daemon=True) for rank in range(SIZE)]
    for process in pair:
        process.start()
    running = {process.sentinel for process in pair}
    while running and (ended := wait(running, PATIENCE)):  # one that ends early is not waited for by the other
        running -= {*ended}
    for process in pair:
        process.kill()
    stories = [path.read_text() for path in sorted(folder.glob("[0-9].txt"))]
    files = [folder / f"{rank}.pt" for rank in range(SIZE)]
    assert all(file.exists() for file in files), "\n".join(stories) or "the processes hang"
    return [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def pair(folder):
    """What each of the two found."""
    return both(work, folder)


def assert_same_run(first, second):
    """What two processes note of one optimizer's run: the releases and the ledger of one process alone."""
    assert Counter(first["kinds"]).most_common(1)[0][1] >= 6
    assert set(first["apart"]) == set(first["kinds"])
    # A difference of losses over a short way magnifies their rounding.
    assert all(apart < (1e-4 if kind == "contrasts" else ROUNDING) for kind, apart in first["apart"].items())
    assert first["off"] < 1e-4  # of the way that it went; some divide by what is nearly zero, which magnifies rounding
    assert torch.equal(first["theta"], second["theta"])
    assert first["ledger"] == second["ledger"] == first["planned"]
    assert epsilon(Ledger.from_json(first["ledger"]), DELTA, "rdp") <= 5.0


@pytest.mark.parametrize("name", SOME)
def test_an_optimizer_gets_the_releases_of_one_process(pair, name):
    assert_same_run(*(found["optimized"][name] for found in pair))
    assert {kind for each in SOME for kind in pair[0]["optimized"][each]["kinds"]} == {"gradient", "losses", "counts"}


@pytest.mark.slow
def test_every_optimizer_gets_the_releases_of_one_process(tmp_path):
    first, second = (found["optimized"] for found in both(work_with_the_rest, tmp_path))
    for name in REST:
        assert_same_run(first[name], second[name])


@pytest.mark.parametrize("name", CASES)
def test_releases_are_those_of_one_process(pair, name):
    expected = releases(ALONE, **CASES[name])
    first, second = (found["releases"][name] for found in pair)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    assert bool(expected.isfinite().all())


@pytest.mark.gpu
def test_releases_on_gpus_are_those_of_one_process(tmp_path):
    first, second = both(work_on_gpus, tmp_path)
    for name, case in CASES.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], releases(ALONE, device="cuda", **case).cpu(), rtol=1e-5, atol=1e-6)


def test_the_noise_is_the_same_vector(pair):
    """And not, say, one draw of each process, which would have the variance of two; bit for bit in an empty draw."""
    assert torch.equal(pair[1]["releases"]["empty"], releases(ALONE, **CASES["empty"]))
    noisy, clean = pair[1]["releases"]["even"][:15], pair[1]["releases"]["without noise"][:15]
    expected = 0.3 * gaussian(2, 0, 0, 15).double() / 60
    torch.testing.assert_close(noisy - clean, expected, rtol=1e-4, atol=1e-7)


def test_a_draw_is_one_vector_and_noise_is_drawn_once(pair):
    (sums, noises), (other_sums, other_noises) = (found["counted"] for found in pair)
    dimension = Task().engine.dimension
    assert sums == other_sums == [dimension] * 12
    assert (noises, other_noises) == ([dimension] * 12, [])


def test_fit_trains_the_model_of_one_process(pair):
    alone = fitted()
    first, second = (found["fitted"] for found in pair)
    torch.testing.assert_close(first["weight"], alone["weight"], rtol=1e-4, atol=1e-5)
    assert first["ledger"] == alone["ledger"]
    measured = ("test_loss", "test_accuracy")
    for key in alone["record"].keys() - measured:
        assert first["record"][key] == alone["record"][key]
    for key in measured:
        assert first["record"][key] == pytest.approx(alone["record"][key], rel=1e-4)
    assert [entry["draw"] for entry in first["curve"]] == [entry["draw"] for entry in alone["curve"]]
    assert torch.equal(first["weight"], second["weight"])
    assert (first["record"], first["curve"]) == (second["record"], second["curve"])


def test_a_run_of_several_goes_on_bit_for_bit_by_a_secret_seed_that_is_shared(pair):
    assert torch.equal(*(found["resumed"][0]["weight"] for found in pair))
    assert not torch.equal(pair[0]["resumed"][0]["weight"], pair[0]["fitted"]["weight"])
    for whole, resumed in (found["resumed"] for found in pair):
        assert torch.equal(whole["weight"], resumed["weight"])
        assert (whole["curve"], whole["ledger"]) == (resumed["curve"], resumed["ledger"])
        assert (whole["record"]["resumed_at"], resumed["record"]["resumed_at"]) == (0, 6)


@pytest.mark.parametrize("name", REFUSED)
def test_processes_that_differ_are_refused(pair, name):
    for found in pair:
        kind, text = found["refusals"][name]
        assert kind == ("RuntimeError" if name == "straying" else "ConfigError")
        assert REFUSED[name][0] in text


def test_a_process_that_fails_takes_the_others_along(pair, folder):
    story = (folder / "failed.txt").read_text()
    assert "Timed out" not in story
    assert "out of memory" not in story
    assert "MemoryError" in (folder / "1.txt").read_text()
    assert not (folder / "0.txt").exists()


def test_the_parts_are_the_whole():
    for rows, size in ((np.arange(10), 3), (np.arange(1), 4), (np.arange(0), 2)):
        parts = [Processes(rank, size).part(rows) for rank in range(size)]
        assert np.concatenate(parts).tolist() == rows.tolist()
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_digest_is_of_bits():
    values = torch.tensor([0.0, -0.0, 1.0])
    assert digest(values) == digest(values.clone())
    assert digest(values) != digest(values.abs())
    assert digest(values, values) == digest(torch.cat([values, values]))
    assert digest(torch.tensor(3)) == digest(torch.tensor([3]))
    assert distributed.digest(torch.zeros(2, 3)[:, ::2]) == digest(torch.zeros(4))
