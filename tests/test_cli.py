import csv
import json
import re
from pathlib import Path

import pytest

from dpopt.cli import main

KNOWN = Path(__file__).parent / "privacy" / "known_answers.csv"
ROWS = list(csv.DictReader(KNOWN.read_text().splitlines()[1:]))


def spent(text):
    return {name: float(value) for value, name in re.findall(r"epsilon = (\S+)  \((\w+)", text)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['rate']}-{row['noises']}")
def test_epsilon_reproduces_known_answers(row, capsys):
    noises = row["noises"].split(";")
    noise = f"[{','.join(noises)}]" if len(noises) > 1 else noises[0]
    arguments = [f"rate={row['rate']}", f"noise={noise}", f"draws={row['draws']}", f"delta={row['delta']}"]
    assert main(["epsilon", *arguments, "accountant=[pld,rdp]"]) == 0
    found = spent(capsys.readouterr().out)
    assert found["pld"] == pytest.approx(float(row["pld"]), abs=2e-3)
    if row["rdp"]:
        assert found["rdp"] == pytest.approx(float(row["rdp"]), rel=1e-3)


def test_epsilon_of_a_probed_run(capsys):
    base = ["epsilon", "rate=0.02", "draws=250", "delta=1e-5", "accountant=rdp"]
    assert main([*base, "noise=1.1"]) == 0
    plain = spent(capsys.readouterr().out)["rdp"]
    assert main([*base, "noise=1.1", "probe_noise=4", "probe_every=5"]) == 0
    probed = spent(capsys.readouterr().out)["rdp"]
    assert main([*base, "noise=1.1", "probe_noise=4", "probe_every=1"]) == 0
    always = spent(capsys.readouterr().out)["rdp"]
    assert main([*base, "noise=[1.1,4,4,4]"]) == 0
    assert plain < probed < always == spent(capsys.readouterr().out)["rdp"]


@pytest.mark.parametrize(("target", "losses"), [(1, 9.266), (3, 5.717), (8, 3.835)])
def test_calibrate_hyfreedp(target, losses, capsys):
    sizes = ["examples=50000", "batch_size=1000", "draws=250"]
    fields = ["optimizer=hyfreedp", "fields.probe_every=5", "fields.noise_inflation=1.01"]
    assert main(["calibrate", *sizes, *fields, f"epsilon={target}", "accountant=rdp"]) == 0
    found = re.search(r"\(losses\) = (\S+)", capsys.readouterr().out)
    assert float(found[1]) == pytest.approx(losses, rel=1e-2)


def test_printed_noise_is_enough(capsys):
    sizes = ["examples=1000", "batch_size=100", "draws=400", "delta=1e-5", "accountant=rdp"]
    for target in (1, 2, 8):
        main(["calibrate", *sizes, f"epsilon={target}"])
        noise = re.search(r"\(gradient\) = (\S+)", capsys.readouterr().out)[1]
        main(["epsilon", "rate=0.1", f"noise={noise}", "draws=400", "delta=1e-5", "accountant=rdp"])
        assert spent(capsys.readouterr().out)["rdp"] <= target


def test_list(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for name in ("hyfreedp", "fiber", "adadp", "digits_mlp", "quickstart"):
        assert name in printed


SMALL = [
    "suite=quickstart",
    "workloads=[{name: synthetic_logreg, dim: 3}]",
    "accountant=rdp",
    "epsilon=4",
    "epochs=1",
    "seeds=[0,1]",
    "engine=inline",
    "settings.dp_sgd.grid.lr=[0.1,1]",
    "optimizers=[dp_sgd,hyfreedp,adadp]",
]


def test_a_suite_from_plan_to_figures(tmp_path, monkeypatch, capsys):
    here = f"results={tmp_path / 'results'}"
    assert main(["plan", *SMALL, here]) == 0
    assert "8 distinct cells" in capsys.readouterr().out
    assert main(["run", *SMALL, here]) == 0
    assert "8 cells run" in capsys.readouterr().err
    assert main(["run", *SMALL, here]) == 0
    assert "0 cells run, 8 were done" in capsys.readouterr().err
    assert main(["status", "suite=quickstart", here]) == 0
    assert "8 done" in capsys.readouterr().out
    assert main(["table", "suite=quickstart", here]) == 0
    printed = capsys.readouterr().out
    assert "hyfreedp" in printed
    assert "ε with tuning" in printed
    assert main(["collect", "suite=quickstart", here]) == 0
    figures = tmp_path / "plots"
    figures.mkdir()
    for file in (Path(__file__).parents[1] / "plots").glob("*.py"):
        (figures / file.name).write_text(file.read_text())
    assert main(["plot", "suite=quickstart", here, f"plots={figures}"]) == 0
    folder = tmp_path / "results" / "suites" / "quickstart"
    kinds = {"table.md", "table.csv", "table.tex", "table.html", "manifest.json", "cells.parquet", "curves.parquet"}
    assert {path.name for path in folder.iterdir()} == kinds
    assert len(list((figures / "out" / "quickstart").iterdir())) == 12
    assert main(["table", "suite=quickstart", here, "optimizers=[adadp]"]) == 0
    assert "hyfreedp" not in capsys.readouterr().out


def test_failures_are_listed_and_can_be_retried(tmp_path, capsys):
    arguments = [*SMALL, f"results={tmp_path}"]
    main(["plan", *arguments])
    (entry, *_) = json.loads((tmp_path / "suites" / "quickstart" / "manifest.json").read_text())["cells"]
    from dpopt.store import Store

    Store(tmp_path).fail(entry["run_id"], "ValueError: [no] luck")
    assert main(["run", *arguments]) == 1
    printed = capsys.readouterr().err
    assert "7 cells run, 0 were done, 1 failed" in printed
    assert "[no] luck" in printed
    main(["table", "suite=quickstart", f"results={tmp_path}"])
    captured = capsys.readouterr()
    assert "1 cells have no result" in captured.err
    assert main(["status", "suite=quickstart", f"results={tmp_path}"]) == 0
    assert "[no] luck" in capsys.readouterr().out
    assert main(["retry", *arguments]) == 0
    assert "1 cells run, 7 were done, 0 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "suite"),
        (["run", "suite=quickstrat"], "did you mean 'quickstart'"),
        (["run", "suite=quickstart", "seed=[1]"], "did you mean 'seeds'"),
        (["run", "suite=quickstart", "device=cudda"], "device"),
        (["table", "suite=quickstart", "results=/nowhere"], "suite in /nowhere"),
        (["epsilon", "rate=0.1", "noise=1", "draws=10"], "delta"),
        (["epsilon", "rate=2", "noise=1", "draws=10", "delta=1e-5"], "rate"),
        (["epsilon", "rate=0.1", "noise=-1", "draws=10", "delta=1e-5"], "noise"),
        (["epsilon", "rate=0.1", "noise=1", "drawz=10", "delta=1e-5"], "did you mean 'draws'"),
        (["calibrate", "epsilon=1", "examples=100", "batch_size=200", "draws=10"], "batch_size"),
        (["calibrate", "epsilon=0", "examples=100", "batch_size=20", "draws=10"], "epsilon"),
        (["calibrate", "epsilon=1", "draws=10"], "batch_size|examples"),
        (["calibrate", "epsilon=1", "rate=0.1", "draws=10", "delta=1e-5", "optimizer=fibre"], "did you mean 'fiber'"),
    ],
)
def test_bad_input_gets_one_clear_error(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert re.search(message, captured.err)
    assert "Traceback" not in captured.err + captured.out
