import dataclasses
import json
import math
import multiprocessing
import os
import pickle
import signal
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from dpopt import registry
from dpopt.bench import measure as bench_measure
from dpopt.bench import run
from dpopt.bench.cases import CASES, Case
from dpopt.bench.contenders import ENGINES, Contender, Task, engine_group, optimizer_group
from dpopt.bench.measure import SLOW_ROUNDS, WARM_UP, Measurement, TimedContender, measure, ratios
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.optimizers.adadp_hybrid import ADADPHybrid
from dpopt.privacy import BudgetSpent
from dpopt.results import figures, speed
from dpopt.runs.remote import Remote
from dpopt.workloads.base import mlp
from dpopt.workloads.models import SUBSETS

PLOTS = Path(__file__).parents[2] / "plots"
CPU = torch.device("cpu")


def class_loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none")


def images(n):
    return torch.randn(n, 6), torch.randint(3, (n,))


TINY = Case("tiny", partial(mlp, 6, 5, 3), images, 8, class_loss)
WITHOUT = {("gpt2", "head"), ("gpt2_small", "head")}
WITHOUT |= {(name, subset) for name in ("mlp", "cnn") for subset in ("film", "lora")} | {("wrn", "lora")}
MIXING = Case("mixing", lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), TINY.data, 8, class_loss)


def note(file, name, calls):
    """A contender that notes its calls; b dies in its second round, a has no memory to measure."""
    return partial(_note, file, name)


def _note(file, name):
    bench_measure.SHORT = math.inf  # in the contender's own process: no pause of a busy machine makes a call long
    with file.open("a") as lines:
        lines.write(f"{name} {os.getpid()} {torch.get_num_threads()}\n")
    if name == "b" and file.read_text().count("b ") == WARM_UP + 2 * 2:
        os._exit(3)
    if name == "a" and file.read_text().count("a ") > WARM_UP + 3 * 2:
        raise ZeroDivisionError("no memory to measure")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(CASES, "tiny", TINY)


def memory(build):
    contender = TimedContender(build, 1, CPU)
    contender.warm_up()
    return contender.memory()


def test_memory_is_the_peak_of_live_bytes():
    def build(calls):
        held = torch.ones(1000)

        def step():
            large = held.new_empty(5000)
            del large
            return held.new_empty(2000) + held.new_empty(2000)

        return step

    assert memory(build) == 4 * (1000 + 2000 + 2000 + 2000)

    def forgetful(calls):
        torch.ones(10**6).sum()  # what setting up needed is not counted, what a call leaves is
        left = []
        return lambda: left.append(torch.ones(700, dtype=torch.float64))

    assert memory(forgetful) == 2 * 8 * 700
    parameters, data = 4 * (6 * 5 + 5 + 5 * 3 + 3), 8 * (4 * 6 + 8)
    assert (
        2 * parameters + data
        <= memory(engine_group((), Task(TINY, "full", CPU))[0].build)
        <= 2 * parameters + data + 2000
    )


@pytest.mark.slow
def test_contenders_take_turns_each_in_a_process_of_its_own(tmp_path):
    log = tmp_path / "log"
    group = [Contender(name, partial(note, log, name), "a") for name in "ab"]
    rows = measure(group, 3, CPU)
    calls, processes, threads = zip(*map(str.split, log.read_text().splitlines()), strict=True)
    warm_up, rounds, rest = ["a"] * WARM_UP + ["b"] * WARM_UP, ["a", "a", "b", "b"] * 2, ["a", "a", "a"]
    assert [*calls] == warm_up + rounds + rest  # short calls are made twice; the last one is for the memory
    assert len({*zip(calls, processes, strict=True)}) == 2
    assert len({*processes, str(os.getpid())}) == 3
    assert {*threads} == {str(torch.get_num_threads())}
    assert [len(rows[name].seconds) for name in "ab"] == [3, 1]
    failures = ["ZeroDivisionError: no memory to measure", "the process died (exit code 3)"]
    assert [rows[name].failure for name in "ab"] == failures
    assert not multiprocessing.active_children()


class Scripted:
    """Stands in for `Remote`: its contender's `build` is its name and a list of answers; a text is a failure."""

    asked, closed = [], []

    def __init__(self, timed):
        self.name, answers = timed._build
        self.answers = iter(answers)

    def ask(self, method, limit):
        self.asked.append((self.name, method, limit))
        answer = next(self.answers)
        return (None, answer) if isinstance(answer, str) else (answer, "")

    def close(self):
        self.closed.append(self)


def test_rounds_failures_limits_and_interrupts(monkeypatch):
    monkeypatch.setattr(bench_measure, "Remote", Scripted)
    rounds = SLOW_ROUNDS + 2
    scripts = {"good": [0, *[1.0] * rounds, 70], "slow": [0, *[42.0] * SLOW_ROUNDS, 90]}
    scripts |= {"early": ["out of luck"], "late": [0, 1.0, "enough"], "last": [0, *[1.0] * rounds, "no memory"]}
    group = [Contender(name, (name, script), "good", 2 if name == "slow" else 1) for name, script in scripts.items()]
    rows = {row["contender"]: row for row in ratios(group, measure(group, rounds, CPU, limit=7.0))}
    assert {name: row["rounds"] for name, row in rows.items()} == {
        "good": rounds, "slow": SLOW_ROUNDS, "early": 0, "late": 1, "last": rounds
    }  # fmt: skip
    assert (rows["slow"]["time_ratio"], rows["slow"]["memory_ratio"]) == (21, 90 / 70)  # of a draw
    assert [row["failure"] for row in rows.values()] == ["", "", "out of luck", "enough", "no memory"]
    assert [row["time_ratio"] for row in rows.values()][2:] == [None] * 3
    assert {limit for _, _, limit in Scripted.asked} == {7.0}
    timed = [name for name, method, _ in Scripted.asked if method == "seconds"]
    assert timed[:8] == ["good", "slow", "late", "last", "good", "slow", "late", "last"], "they take turns"
    Scripted.closed.clear()

    def interrupt(name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([Contender("a", ("a", [0, 1.0, 70]), "a")], 1, CPU, interrupt)
    assert len(Scripted.closed) == 1


class Subject:
    def sleep(self):
        time.sleep(600)

    def wake(self):
        return "awake"


@pytest.mark.slow
def test_what_takes_too_long_is_ended_and_is_a_result():
    remote = Remote(Subject())
    assert remote.ask("wake") == ("awake", "")
    assert remote.ask("sleep", 0.5) == (None, "it takes more than 0.5 seconds")
    assert remote.process.exitcode == -signal.SIGKILL  # and has not slept to its end
    assert remote.ask("wake")[0] is None
    assert not multiprocessing.active_children()


def test_a_short_call_is_made_twice_and_the_second_is_timed(monkeypatch):
    clock = iter([0.05, 0.01, 0.2])
    monkeypatch.setattr(TimedContender, "_timed", lambda self: next(clock))
    assert [TimedContender(lambda calls: print, 1, CPU).seconds() for _ in range(2)] == [0.01, 0.2]


def test_ratios_are_of_medians_within_the_run():
    group = [Contender("a", print, "a"), Contender("b", print, "a", draws=2)]
    results = {"a": Measurement([1.0, 2.0, 9.0], 100), "b": Measurement([2.0, 6.0, 9.0], 250)}
    a, b = ratios(group, results)
    assert (a["time_ratio"], a["memory_ratio"]) == (1, 1)
    assert (b["time_ratio"], b["memory_ratio"], b["seconds"]) == (3, 2.5, 6)
    assert (b["time_ratio_low"], b["time_ratio_high"]) == (1.5, 2.5)


def test_engines_that_cannot_take_a_model_say_why():
    for engine in ("bookkeeping", "opacus_hooks", "opacus_ghost", "vmap"):
        with pytest.raises(Exception, match="BatchNorm"):
            ENGINES[engine](Task(MIXING, "full", CPU), 1)()


def test_every_contender_can_be_sent_to_a_process():
    for case in CASES.values():
        group = engine_group(tuple(ENGINES), Task(case, "full", CPU))
        group += optimizer_group(registry.optimizers(), (1, 3), Task(case, "full", CPU))
        for contender in group:
            there = pickle.loads(pickle.dumps(contender))
            assert (there.name, repr(there.build)) == (contender.name, repr(contender.build))


def test_optimizers_run_as_often_as_they_are_called():
    group = optimizer_group(("adadp", "dp_sgd", "fiber", "hyfreedp"), (1, 3), Task(TINY, "full", CPU))
    names = ["dp_adam", "adadp", "dp_sgd", "fiber", "base of hyfreedp", "hyfreedp K=1", "hyfreedp K=3"]
    assert [contender.name for contender in group] == names
    assert [contender.draws for contender in group] == [1, 2, 1, 1, 1, 1, 3]
    assert [contender.baseline for contender in group[-2:]] == ["base of hyfreedp"] * 2
    for contender in group:
        step = contender.build(3)
        for _ in range(2 * 3):
            step()
        with pytest.raises(BudgetSpent):
            step()


def test_a_method_that_changes_half_way_is_measured_as_it_begins(monkeypatch):
    taken, original = [], ADADPHybrid.step

    def step_and_note(self, state, oracle):
        state = original(self, state, oracle)
        taken.append(oracle.draws_total - oracle.draws_left)
        return state

    monkeypatch.setattr(ADADPHybrid, "step", step_and_note)
    contender = optimizer_group(("adadp_hybrid",), (1,), Task(TINY, "full", CPU))[-1]
    step = contender.build(4)
    taken.clear()  # what tracing the plan took
    for _ in range(4):
        step()
    assert contender.draws == 2
    assert taken == [2, 4, 6, 8]


@pytest.mark.parametrize(("name", "parameters"), [("vit_small_224", 21_669_514), ("gpt2_small", 124_439_808)])
def test_large_cases_are_the_usual_models(name, parameters):
    """Published sizes: ImageNet's 22.1 M with 10 classes in place of 1,000; 124 M."""
    assert CASES[name].counts("full") == (parameters, parameters)
    chosen = run.settings([f"cases=[{name}]", "tiny=true", "batch_size=3", "precision=bfloat16", "limit=5"])
    (tiny,) = chosen.cases
    model, x, _ = tiny.make("bitfit", CPU)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (len(x), tiny.counts("bitfit")[1], chosen.precision, chosen.limit) == (3, trained, "bfloat16", 5.0)


@pytest.mark.parametrize("name", CASES)
def test_rehearsals_can_be_trained_privately(name):
    case = CASES[name].rehearsal()
    (model, *data), (again, *same) = (case.make("full", CPU) for _ in range(2))
    assert all(map(torch.equal, [*data, *model.parameters()], [*same, *again.parameters()]))
    assert len(data[0]) == case.batch_size
    assert min(float(part.double().std()) for part in data) > 0.5
    for subset in SUBSETS:
        try:
            case.counts(subset)
        except ConfigError:
            assert (name, subset) in WITHOUT
            continue
        if subset in ("full", "lora"):
            for contender in engine_group(("bookkeeping",), Task(case, subset, CPU)):
                contender.build(1)()


def test_draws_of_random_size_are_those_of_a_run():
    """Their records are four times the batch, of which each joins with a quarter's chance."""
    seen = SimpleQueue()
    case = dataclasses.replace(TINY, batch_size=64, model=partial(noted, seen, len))
    step = ENGINES["poisson"](Task(case, "full", CPU), 30)
    drained(seen)
    for _ in range(30):
        step()
    sizes = [size for size in drained(seen) if size > 3]  # verification of the engine looks at three records
    assert len(set(sizes)) > 3
    assert all(size % 8 == 0 for size in sizes)
    assert sum(sizes) / len(sizes) == pytest.approx(68, abs=6)  # 64 on average, rounded up to a multiple of 8


@pytest.mark.parametrize("name", ["non_private", "bookkeeping"])
def test_bfloat16_models_run_under_autocast(name):
    kinds = SimpleQueue()
    case = dataclasses.replace(
        TINY, loss=partial(note_kind, kinds), model=partial(noted, kinds, lambda output: output.dtype)
    )
    for precision in ("float32", "bfloat16"):
        group = engine_group(("bookkeeping",), Task(case, "full", CPU, precision))
        contender = next(each for each in group if each.name == name)
        step = contender.build(1)
        step()  # before the first one, the engine is looked at in float32 too
        drained(kinds)
        step()
        assert set(drained(kinds)) == {getattr(torch, precision)}


def drained(notes):
    """What was noted, in a queue, as a list would be put back after each pass."""
    return [notes.get() for _ in range(notes.qsize())]


def noted(notes, of):
    model = mlp(6, 5, 3)
    model[-1].register_forward_hook(lambda module, inputs, output: notes.put(of(output)))
    return model


def note_kind(kinds, output, target):
    return class_loss(output.float(), target)


def test_subsets_that_a_model_lacks_are_left_out():
    assert [case.name for case in run.settings(["cases=all", "engines=none"]).cases] == [*CASES]
    chosen = run.settings(["cases=[tiny,gpt2]", "subsets=[head,bitfit,lora]", "engines=[vmap]", "optimizers=adadp"])
    groups, skipped = run.find_groups(chosen)
    assert [(kind, case.name, subset) for kind, case, subset, _ in groups] == [
        ("engine", "tiny", "head"),
        ("engine", "tiny", "bitfit"),
        ("optimizer", "tiny", "head"),
        ("engine", "gpt2", "bitfit"),
        ("engine", "gpt2", "lora"),
        ("optimizer", "gpt2", "bitfit"),
    ]
    assert [line.split(":")[0] for line in skipped] == ["tiny", "gpt2"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cases=[mpl]"], "did you mean 'mlp'"),
        (["case=[mlp]"], "did you mean 'cases'"),
        (["subsets=[heads]"], "did you mean 'head'"),
        (["engines=[ghost]"], "did you mean 'opacus_ghost'"),
        (["optimizers=[fibre]"], "did you mean 'fiber'"),
        (["precision=float16"], "precision"),
        (["limit=0"], "limit"),
        (["probe_every=[0]"], "probe_every"),
        (["device=cudda"], "device"),
        (["cases=[tiny]", "subsets=[lora]"], "nothing to measure"),
        (["cases=[tiny]", "engines=none", "optimizers=none"], "nothing to measure"),
        (["plots=/nowhere"], "plots"),
    ],
)
def test_bad_input_gets_one_clear_error(overrides, message, capsys, tmp_path):
    assert main(["bench", *overrides, f"results={tmp_path}"]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_process")
def test_a_run_leaves_record_table_and_figure(tmp_path, capsys):
    before = torch.get_num_threads()
    arguments = ["cases=[tiny]", "engines=[opacus_ghost]", "optimizers=[dp_adam]"]
    assert main(["bench", *arguments, "rounds=2", "threads=1", f"results={tmp_path}"]) == 0
    assert torch.get_num_threads() == before
    (folder,) = (tmp_path / "bench").iterdir()
    assert {file.name for file in folder.iterdir()} == {"record.json", "table.md", "step_cost.svg", "step_cost.png"}
    record = json.loads((folder / "record.json").read_text())
    rows = {row["contender"]: row for row in record["rows"]}
    assert list(rows) == ["non_private", "opacus_ghost", "dp_adam"]
    assert record["threads"] == [1]
    assert rows["opacus_ghost"]["trained"] == 53
    assert rows["opacus_ghost"]["batch_size"] == 8
    assert {"torch", "opacus", "timm", "transformers", "peft"} <= record["provenance"]["versions"].keys()
    table = (folder / "table.md").read_text()
    assert table in capsys.readouterr().out.replace("\n\nwritten", "\nwritten")
    for name, row in rows.items():
        (line,) = [line for line in table.splitlines() if f"| {name} " in line.partition("| 8 ")[2][:30]]
        assert f" {row['memory'] / 1e6:.1f} " in line


@pytest.mark.usefixtures("in_process")
def test_several_numbers_of_threads_have_a_row_each():
    keys = ["cases=[tiny]", "engines=[bookkeeping]", "optimizers=none", "rounds=2", "threads=[1,2]"]
    before, record = torch.get_num_threads(), run.bench(run.settings(keys))
    assert torch.get_num_threads() == before
    assert [row["threads"] for row in record["rows"]] == [1, 1, 2, 2]
    assert list(speed.frame(record)["threads"]) == [1, 1, 2, 2]
    text = speed.markdown(record | {"provenance": ORIGIN})
    assert "| threads " in text
    assert "1 and 2 threads of" in text
    assert "| threads " not in speed.markdown(RECORD)


def row(**values):
    common = {"kind": "engine", "case": "tiny", "subset": "full", "trained": 53, "batch_size": 8}
    common["baseline"] = "non_private"
    numbers = {"seconds": 1.0, "time_ratio": 1.0, "time_ratio_low": 1.0, "time_ratio_high": 1.0, "memory": 10**6}
    return common | numbers | {"memory_ratio": 1.0, "failure": ""} | values


FAILED = dict.fromkeys(["seconds", "time_ratio", "time_ratio_low", "time_ratio_high", "memory", "memory_ratio"])
ROWS = [
    row(contender="non_private"),
    row(contender="bookkeeping", seconds=1.5, time_ratio=1.5, time_ratio_low=1.25, time_ratio_high=1.75),
    row(contender="opacus_hooks", **FAILED | {"failure": "NotImplementedError: no such layer"}),
    row(contender="opacus_ghost", seconds=3.0, time_ratio=3.0, memory_ratio=2.0),
    row(contender="vmap", seconds=40.0, time_ratio=40.0, memory=None, memory_ratio=None),
    row(kind="optimizer", contender="fiber", time_ratio=2.0, baseline="dp_adam"),
]
ORIGIN = {"device": "cpu", "commit": "0" * 40, "dirty": False, "versions": {"torch": "2", "opacus": "1"}}
RECORD = {"rows": ROWS, "skipped": ["x: y"], "threads": 2, "cores": 2, "started": "now", "provenance": ORIGIN}


def test_tables_say_what_was_measured():
    text = speed.markdown(RECORD)
    cells = {
        line.split("|")[4].strip(): [cell.strip() for cell in line.split("|")[5:-1]]
        for line in text.splitlines()
        if line.startswith("| tiny")
    }
    assert cells["bookkeeping"] == ["1,500.0", "1.50 (1.25-1.75)", "1.0", "1.00", "2.00"]
    assert cells["opacus_hooks"] == ["fails", "NotImplementedError: no such layer", "", "", ""]
    assert cells["opacus_ghost"][-1] == "1.00"
    assert cells["vmap"] == ["40,000.0", "40.0 (1.00-1.00)", "", "", "0.07"]
    assert cells["fiber"][0] == "dp_adam"
    assert "Left out: x: y." in text


def test_the_figure_shows_every_ratio():
    (plot,) = [plot for plot in figures.plots(PLOTS) if plot.needs == "speed"]
    figure = plot.figure(speed.frame(RECORD))
    times, memory, optimizers = figure.axes
    assert [patch.get_width() for patch in times.patches] == pytest.approx([1, 1.5, 3, 40])
    assert [patch.get_width() for patch in memory.patches] == pytest.approx([1, 1, 2])
    assert [patch.get_width() for patch in optimizers.patches] == [2]
    assert [label.get_text() for label in times.get_yticklabels()] == [row["contender"] for row in ROWS[:5]]
    assert "fails" in {text.get_text() for text in times.texts}
    assert (times.get_xscale(), memory.get_xscale()) == ("log", "linear")
