import csv
import math
import re
from pathlib import Path

import pytest
from fabricated import noted

from dpopt.cli import COMMANDS, listing, main
from dpopt.cli.keys import read
from dpopt.cli.privacy import Calibrate
from dpopt.cli.results import Rank
from dpopt.errors import ConfigError
from dpopt.suites.suite import load_suite, suite_files

KNOWN = Path(__file__).parent / "privacy" / "known_answers.csv"
ROWS = list(csv.DictReader(KNOWN.read_text().splitlines()[1:]))


def spent(text):
    return {name: float(value) for value, name in re.findall(r"epsilon = (\S+)  \((\w+)", text)}


def test_epsilon_reproduces_known_answers(capsys):
    for row in ROWS[::4]:  # `tests/privacy` has them all
        noises = row["noises"].split(";")
        noise = f"[{','.join(noises)}]" if len(noises) > 1 else noises[0]
        arguments = [f"rate={row['rate']}", f"noise={noise}", f"draws={row['draws']}", f"delta={row['delta']}"]
        assert main(["epsilon", *arguments, "accountant=[pld,rdp]"]) == 0
        found = spent(capsys.readouterr().out)
        assert found["pld"] == pytest.approx(float(row["pld"]), abs=2e-3)
        if row["rdp"]:
            assert found["rdp"] == pytest.approx(float(row["rdp"]), rel=1e-3)


def test_epsilon_of_a_probed_run(capsys):
    """Three probes in every fifth draw cost less than in every one, which is a draw of four releases."""
    of_run = ["epsilon", "rate=0.02", "draws=250", "delta=1e-5", "accountant=rdp"]
    found = []
    for probes in (
        ["noise=1.1"],
        *(["noise=1.1", "probe_noise=4", f"probe_every={k}"] for k in (5, 1)),
        ["noise=[1.1,4,4,4]"],
    ):
        assert main([*of_run, *probes]) == 0
        found.append(spent(capsys.readouterr().out)["rdp"])
    assert found[0] < found[1] < found[2] == found[3]


@pytest.mark.slow
def test_calibrate_hyfreedp(capsys):
    sizes = ["examples=50000", "batch_size=1000", "draws=250"]
    fields = ["optimizer=hyfreedp", "fields.probe_every=5", "fields.noise_inflation=1.01"]
    assert main(["calibrate", *sizes, *fields, "epsilon=3", "accountant=rdp"]) == 0
    found = re.search(r"\(losses\) = (\S+)", capsys.readouterr().out)
    assert float(found[1]) == pytest.approx(5.717, rel=1e-2)


def test_printed_noise_is_enough(capsys):
    sizes = ["examples=1000", "batch_size=100", "draws=400", "delta=1e-5", "accountant=rdp"]
    for target in (1, 8):
        main(["calibrate", *sizes, f"epsilon={target}"])
        noise = re.search(r"\(gradient\) = (\S+)", capsys.readouterr().out)[1]
        main(["epsilon", "rate=0.1", f"noise={noise}", "draws=400", "delta=1e-5", "accountant=rdp"])
        assert spent(capsys.readouterr().out)["rdp"] <= target


def test_keys_are_read_by_their_annotations():
    words = ["suite=a", "seeds=[0,1]", "epsilon=3", "against=a [b]: c", "budgets=[1e3, 2]", "results=~", "by=draws"]
    asked = read(Rank, words, "rank")
    assert (asked.seeds, asked.epsilon, asked.against, asked.budgets) == ((0, 1), (3.0,), "a [b]: c", (1000.0, 2.0))
    assert (asked.results, asked.by, asked.optimizers) == (Path.home(), "draws", None)
    assert asked.overrides == ["suite=a", "epsilon=[3]", "seeds=[0,1]", f"results={Path.home()}"]
    fields = ["fields.lr=1e-3", "fields.base={name: fiber}", "fields.base.kappa=0.5", "delta=null"]
    asked = read(Calibrate, ["epsilon=inf", *fields], "calibrate")
    assert (asked.epsilon, asked.delta) == (math.inf, None)
    assert asked.fields == {"lr": "1e-3", "base": {"name": "fiber", "kappa": 0.5}}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("budget=3", "did you mean 'budgets'"),
        ("budgets", "did you mean"),
        ("budgets.x=3", "budgets.x"),
        ("by=draw", "did you mean 'draws'"),
        ("budgets=[&a [*a]]", "budgets: .* cannot be used"),
        ("budgets=" + "[" * 60, "budgets"),
        ("seeds=", "seeds: '' cannot be used"),
        ("optimizers=[]", "optimizers"),
        ("results=", "results"),
    ],
)
def test_a_key_that_cannot_be_read_is_named(word, message):
    with pytest.raises(ConfigError, match=message):
        read(Rank, ["suite=a", word], "rank")
    with pytest.raises(ConfigError, match="the key `suite` is missing"):
        read(Rank, [], "rank")


SMALL = [
    "suite=quickstart",
    "workloads=[{name: synthetic_logreg, dim: 3}]",
    "accountant=rdp",
    "epsilon=4",
    "epochs=1",
    "seeds=0",
    "engine=inline",
    "settings.dp_sgd.grid.lr=[0.1,1]",
    "optimizers=[dp_sgd,adadp]",
]


def test_a_suite_from_plan_to_figures(tmp_path, monkeypatch, capsys):
    here = f"results={tmp_path / 'results'}"
    told = {"plan": "3 distinct cells", "run": "3 cells run", "retry": "0 cells run, 3 were done"}
    told |= {"status": "3 done", "table": "ε with tuning"}
    for command, text in told.items():
        keys = SMALL if command in ("plan", "run", "retry") else SMALL[:1]
        assert main([command, *keys, here]) == 0
        assert text in " ".join("".join(capsys.readouterr()).split())
    figures = tmp_path / "plots"
    figures.mkdir()
    for name in ("accuracy_vs_epsilon", "learning_rate", "audit"):
        (figures / f"{name}.py").write_text((Path(__file__).parents[1] / "plots" / f"{name}.py").read_text())
    assert main(["plot", "suite=quickstart", here, f"plots={figures}"]) == 0
    drawn = sorted(path.name for path in (figures / "out" / "quickstart").iterdir())
    assert drawn == [f"{name}.{kind}" for name in ("accuracy_vs_epsilon", "learning_rate") for kind in ("png", "svg")]
    (figures / "out" / "quickstart" / "learning_rate.svg").unlink()
    assert main(["plot", "suite=quickstart", here, f"plots={figures}", "figure=learning_rate"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].count("learning_rate.") == 2
    assert main(["rank", "suite=quickstart", here, "budgets=[4]"]) == 0
    assert main(["rank", "suite=quickstart", here, "by=draws"]) == 0
    assert "Ranks at equal draws, on average" in capsys.readouterr().out
    assert main(["report", "suite=quickstart", here, f"plots={figures}"]) == 0
    folder = tmp_path / "results" / "suites" / "quickstart"
    assert "<svg" in (folder / "report.html").read_text()
    kinds = {f"table.{kind}" for kind in ("md", "csv", "tex", "html")} | {"suite.json", "parts", "report.html"}
    kinds |= {f"ranking_{by}.{kind}" for by in ("epsilon", "draws") for kind in ("md", "csv")}
    assert {path.name for path in folder.iterdir()} == kinds
    assert main(["table", "suite=quickstart", here, "optimizers=[adadp]"]) == 0
    assert {path.name for path in folder.iterdir()} == kinds | {"part"}
    assert "dp_sgd" not in capsys.readouterr().out


SEARCHES = """
defaults: [suite, _self_]
workloads: [{name: synthetic_logreg, dim: 3}]
optimizers: [free, private, linear]
settings:
  free: {name: dp_sgd, grid: {lr: [0.1, 1]}}
  private: {name: dp_sgd, grid: {lr: [0.1, 1]}, tuning: private, selection: {rule: poisson, runs: 1}}
  linear: {name: dp_sgd, grid: {lr: [0.1, 1]}, tuning: linear_scaling, runs: 1}
epsilon: 4
batch_size: 8000
epochs: 2
seeds: [0, 1, 2, 3]
accountant: rdp
engine: inline
"""


@pytest.fixture
def searches(tmp_path):
    """Arguments of a suite whose searches are charged, and its cells in the manifest."""
    from dpopt.store import Store

    (tmp_path / "searches.yaml").write_text(SEARCHES)

    def cells():
        return Store(tmp_path / "results").manifest("searches")["cells"]

    return [f"suite={tmp_path / 'searches.yaml'}", f"results={tmp_path / 'results'}"], cells


def test_runs_that_follow_from_others_are_run_by_the_same_command(searches, capsys):
    arguments, cells = searches
    assert main(["plan", *arguments]) == 0
    noted(arguments)
    before = {cell["run_id"] for cell in cells()}
    assert {cell["stage"] for cell in cells() if cell["label"] == "linear"} == {"search"}
    assert f"{len(before)} distinct cells" in capsys.readouterr().out
    assert main(["run", *arguments]) == 0
    assert f"{len(before) + 4} cells run, 0 were done, 0 failed" in capsys.readouterr().err
    last = [cell for cell in cells() if cell["run_id"] not in before]
    assert [(cell["label"], cell["stage"]) for cell in last] == [("linear", "final")] * 4
    assert main(["run", *arguments]) == 0
    assert f"0 cells run, {len(before) + 4} were done" in capsys.readouterr().err
    assert main(["table", *arguments]) == 0
    folder = Path(arguments[1].partition("=")[2]) / "suites" / "searches"
    assert "| ε composed " in (folder / "table.md").read_text()
    rows = {row["label"]: row for row in csv.DictReader((folder / "table.csv").read_text().splitlines())}
    spent = {label: float(row["epsilon_with_tuning"]) for label, row in rows.items()}
    assert 4 < 1.2 * spent["linear"] < 1.2 * spent["free"]
    assert max(spent["linear"], spent["private"]) <= 4 < spent["free"]
    assert float(rows["linear"]["runs"]) == 3


def test_no_last_run_follows_from_a_search_that_failed(searches, capsys):
    from dpopt.store import Store

    arguments, cells = searches
    arguments += ["optimizers=[linear]", "seeds=[0,1]"]
    noted(arguments)
    lost = next(cell for cell in cells() if cell["cell"]["seed"] == 0)
    Store(Path(arguments[1].partition("=")[2])).fail(lost["run_id"], "ValueError: no luck")
    for command, code, told, seeds in (("run", 1, "4 cells run, 0", [1]), ("retry", 0, "2 cells run, 4", [0, 1])):
        assert main([command, *arguments]) == code
        assert told in capsys.readouterr().err
        assert sorted(cell["cell"]["seed"] for cell in cells() if cell["stage"] == "final") == seeds


def test_a_run_of_a_search_that_has_was_cut_short_is_damaged(searches, capsys):
    arguments, cells = searches
    arguments += ["optimizers=[linear]", "seeds=0"]
    assert main(["run", *arguments]) == 0
    lost = next(cell["run_id"] for cell in cells() if cell["stage"] == "search")
    (file,) = Path(arguments[1].partition("=")[2]).glob(f"runs/*/{lost}/run.json")
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["run", *arguments]) == 1
    assert f"damaged {file.parent}: move it away to run the cell again" in capsys.readouterr().err
    assert main(["status", *arguments[:2]]) == 0
    assert f"{file}: not as it was written" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "suite"),
        (["run", "quickstrat"], "^error: suite: .*there is no such suite; did you mean 'quickstart'\\?$"),
        (["list", "optimisers"], "what: .* did you mean 'optimizers'"),
        (["run", "suite=quickstart", "seed=[1]"], "did you mean 'seeds'"),
        (["run", "suite=quickstart", "device=gpu"], "device: 'gpu' cannot be used; expected auto, cpu, cuda or cuda:N"),
        (
            ["plan", "suite=quickstart", "optimizers=[doppler]", "settings.doppler.tuning=private"],
            r"doppler\.selection: None",
        ),
        (["plot", "suite=quickstart", "figure=acuracy_vs_epsilon"], "did you mean 'accuracy_vs_epsilon'"),
        (["table", "suite=quickstart", "results=/nowhere"], "/nowhere holds nothing of it"),
        (["epsilon", "rate=0.1", "noise=1", "draws=10"], "delta"),
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


def test_a_suite_is_named_by_a_word_alone(capsys):
    arguments = ["workloads=[{name: synthetic_logreg, dim: 3}]", "optimizers=[adadp]", "seeds=0", "epsilon=inf"]
    assert main(["plan", "quickstart", *arguments]) == 0
    assert "1 distinct cells of suite quickstart" in capsys.readouterr().out


def test_suites_are_listed_with_what_they_are_and_need():
    rows, suite = {row["suite"]: row for row in listing.LISTED["suites"]()}, load_suite("quickstart")
    assert rows.keys() == suite_files().keys()
    assert rows["quickstart"]["what it is"] == suite.description
    counts = len(suite.optimizers), len(suite.workloads), len(suite.epsilon), len(suite.seeds)
    assert rows["quickstart"][listing.SIZE] == " × ".join(map(str, counts))
    assert rows["sst2_lora"]["needs"] == "text"
    assert rows["learning_rate_free"]["needs"].startswith("parameter-free")


def test_the_first_help_groups_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    groups = [block.splitlines() for block in shown.split("\n\n")]
    listed = {lines[0]: [line.split()[0] for line in lines[1:]] for lines in groups if lines[0].endswith(":")}
    assert listed["run a suite:"] == ["plan", "run", "status", "cancel", "retry"]
    assert [name for names in listed.values() for name in names if name in COMMANDS] == list(COMMANDS)


def test_help_of_list_says_what_there_is_to_list(capsys):
    with pytest.raises(SystemExit):
        main(["list", "--help"])
    assert f"what={'|'.join(listing.LISTED)}\n" in capsys.readouterr().out
