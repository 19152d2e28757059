"""What `dpopt run` says at its end, and what it does with --dry-run."""

import json
import re

from fabricated import SMALL

from dpopt.cli import main
from dpopt.cli.running import SHOWN
from dpopt.store import Store

TRACEBACK = (
    "Traceback (most recent call last):\n" + "".join(f"  frame {k}\n" for k in range(9)) + "ValueError: [no] luck\n"
)


def test_failures_are_summed_up_by_reason(tmp_path, capsys):
    arguments = [*SMALL, "seeds=[0,1,2,3,4,5,6,7]", f"results={tmp_path}"]
    assert main(["plan", *arguments]) == 0
    cells = json.loads((tmp_path / "suites" / "quickstart" / "manifest.json").read_text())["cells"]
    for entry in cells[1:]:
        Store(tmp_path).fail(entry["run_id"], "ValueError: [no] luck", TRACEBACK)
    Store(tmp_path).fail(cells[0]["run_id"], "it took too long")
    capsys.readouterr()
    assert main(["run", *arguments]) == 1
    printed = capsys.readouterr().err
    assert printed.count("failed: ValueError: [no] luck") == printed.count("failed: it took too long") == 1
    assert "frame 8" in printed
    assert "frame 3" not in printed, "the end of a traceback is enough"
    assert (
        f"{cells[0]['run_id']}: hyfreedp on synthetic_logreg, target ε = 4, seed {cells[0]['cell']['seed']}" in printed
    )
    assert sum(entry["run_id"] in printed for entry in cells) == 1 + SHOWN
    assert f"and {7 - SHOWN} more" in printed
    assert printed.rstrip().endswith("to run them again: dpopt retry suite=quickstart")


def test_a_dry_run_is_a_plan(tmp_path, capsys):
    arguments = [*SMALL, "seeds=[0,1]", f"results={tmp_path}"]
    assert main(["run", *arguments, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "2 distinct cells of suite quickstart" in shown
    assert not list(tmp_path.rglob("cell.json"))
    assert main(["plan", *arguments]) == 0
    assert capsys.readouterr().out == shown


def test_no_more_hours_than_allowed(tmp_path, capsys):
    arguments = [*SMALL, "seeds=[0,1]", f"results={tmp_path}"]
    assert main(["run", *arguments, "max_hours=1e-9"]) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert "max_hours: 1e-09 cannot be used" in refused
    assert re.search(r"about [\d.e-]+ minutes with workers = 1", refused), "it says what the suite would take"
    assert not list(tmp_path.rglob("cell.json")), "and nothing has begun"
    assert main(["run", *arguments, "max_hours=1"]) == 0
    assert len(list(tmp_path.rglob("record.json"))) == 2
    assert main(["run", *arguments, "max_hours=1e-9"]) == 0, "there is nothing left to take time"
