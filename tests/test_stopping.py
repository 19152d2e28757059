"""`dpopt cancel` and `dpopt status`, as from another shell while a suite is run."""

import re

import pytest
from small_suites import QUICK

from dpopt.cli import console, main
from dpopt.store import Store

SUITE = QUICK + "optimizers: [dp_sgd]\nsettings: {dp_sgd: {tuning: fixed}}\nseeds: [0, 1, 2]\n"


@pytest.fixture
def of_suite(tmp_path):
    (tmp_path / "small.yaml").write_text(SUITE)
    return [f"suite={tmp_path / 'small.yaml'}", f"results={tmp_path / 'results'}"]


@pytest.fixture
def in_the_middle(monkeypatch):
    """Have commands of another shell come in while the second cell runs; gives what they return."""
    answers, append = [], Store.append_curve

    def come_in(*commands):
        begun = set()

        def appended(self, run_id, entry):
            append(self, run_id, entry)
            begun.add(run_id)
            if len(begun) == 2 and not answers:
                answers.extend(main(list(command)) for command in commands)

        monkeypatch.setattr(Store, "append_curve", appended)
        return answers

    return come_in


def test_cancel_stops_a_run_that_goes_on_later(of_suite, in_the_middle, capsys, monkeypatch):
    monkeypatch.setattr(console.OUT, "_width", 140)
    answers = in_the_middle(["status", *of_suite], ["cancel", *of_suite])
    assert main(["run", *of_suite]) == 130
    assert answers == [0, 0]
    printed = capsys.readouterr()
    assert "1 done, 1 running, 1 pending" in printed.out
    assert re.search(r"synthetic logistic regression +DP-SGD +4 +1 +\d+% .* process \d+", printed.out), (
        "what runs, and who runs it"
    )
    assert "2 cells run" in printed.err, "inline finishes the cell that is running"
    assert "run the same command again" in printed.err
    assert main(["run", *of_suite]) == 0, "it was another run that was asked to stop"
    assert "1 cells run, 2 were done" in capsys.readouterr().err


def test_cancel_names_the_suites_that_there_are(of_suite, capsys):
    assert main(["cancel", *of_suite]) == 2
    assert "known: none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine=rai", "did you mean 'ray'"),
        ("retry_on=[bored]", "retry_on"),
        ("grace=0", "grace"),
        ("options.color=red", "options of engine inline"),
    ],
)
def test_what_cannot_be_used_is_said_before_any_work(of_suite, capsys, override, said):
    assert main(["run", *of_suite, override]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra(of_suite, capsys, monkeypatch):
    from dpopt.suites import suite

    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    assert main(["run", *of_suite, "engine=ray"]) == 2
    assert "pip install 'dpopt[ray]'" in capsys.readouterr().err.replace("\n", " ")


def test_slurm_is_refused_where_there_is_none(of_suite, capsys):
    pytest.importorskip("submitit")
    assert main(["run", *of_suite, "engine=slurm"]) == 2
    assert "srun" in capsys.readouterr().err


def test_a_suite_is_watched_until_its_cells_have_ended(of_suite, tmp_path, capsys, monkeypatch):
    """A result that is away for the first look is back for the second."""
    assert main(["run", *of_suite, "seeds=[0, 1]"]) == 0
    capsys.readouterr()
    store = Store(tmp_path / "results")
    (lost, *_) = [cell["run_id"] for cell in store.manifest("small")["cells"]]
    store.folder(lost, "run.json").rename(store.root / "away")

    def come_back(seconds):
        (store.root / "away").rename(store.folder(lost, "run.json"))

    monkeypatch.setattr("dpopt.cli.results.time.sleep", come_back)
    assert main(["status", *of_suite, "watch=true"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert "1 done" in first
    assert "2 done" in last
