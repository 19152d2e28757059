"""What `dpopt run` says at its end, and what `dpopt plan` shows."""

import re
import shlex

import pytest
from fabricated import SMALL, noted

from dpopt.cli import console, main
from dpopt.cli.running import SHOWN
from dpopt.store import Store

TRACEBACK = (
    "Traceback (most recent call last):\n" + "".join(f"  frame {k}\n" for k in range(9)) + "ValueError: [no] luck\n"
)


def test_failures_are_summed_up_by_reason(tmp_path, capsys):
    arguments = [*SMALL, "seeds=[0,1,2,3,4,5,6,7]", f"results={tmp_path}"]
    noted(arguments)
    cells = Store(tmp_path).manifest("quickstart")["cells"]
    for entry in cells[1:]:
        Store(tmp_path).fail(entry["run_id"], "ValueError: [no] luck", TRACEBACK)
    Store(tmp_path).fail(cells[0]["run_id"], "it took too long")
    capsys.readouterr()
    assert main(["run", *arguments]) == 1
    printed = capsys.readouterr().err
    assert printed.count("failed: ValueError: [no] luck") == printed.count("failed: it took too long") == 1
    assert "frame 8" in printed
    assert "frame 3" not in printed, "the end of a traceback is enough"
    assert f"{cells[0]['run_id']}: hyfreedp on synthetic_logreg, target ε = 4, seed 0" in printed
    assert sum(entry["run_id"] in printed for entry in cells) == 1 + SHOWN
    assert f"and {7 - SHOWN} more" in printed
    assert printed.rstrip().endswith(f"to run them again: {shlex.join(['dpopt', 'retry', *arguments])}")


def test_a_plan_writes_nothing(tmp_path, capsys):
    assert main(["plan", *SMALL, "seeds=[0,1]", f"results={tmp_path}"]) == 0
    assert "2 distinct cells of suite quickstart" in capsys.readouterr().out
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_no_row_of_a_plan_breaks_at_eighty_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "quickstart", f"results={tmp_path}"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in printed if str(tmp_path) not in line) <= 80
    assert "**" not in "".join(printed), "no asterisks where it is read elsewhere"
    table = printed[: next(at for at, line in enumerate(printed) if line.startswith("protocol: "))]
    assert {"adadp_equilibrium_average", "hours"} <= set(" ".join(table).split())


HYFREEDP = "suite=hyfreedp_table2_small"
WEIGHTS = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A machine without data and weights; whoever asks the network is noted."""
    asked = []
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda hub, name: None)
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **others: asked.append(arguments) or [])
    return asked


def test_a_plan_needs_neither_data_nor_weights(tmp_path, nowhere, capsys, monkeypatch):
    monkeypatch.setattr(console.OUT, "_width", 200)
    assert main(["plan", HYFREEDP, "workers=1", f"results={tmp_path}"]) == 0
    assert not nowhere
    *tables, cells, estimate, basis, _, absent = capsys.readouterr().out.splitlines()
    assert "ViT-Ti BitFit, CIFAR-10: d = 27,658, 5.3e+09 FLOPs a gradient" in "\n".join(tables)
    assert cells.startswith("36 distinct cells")
    assert re.fullmatch(r"8.6e\+06 gradient evaluations, 6.6e\+16 FLOPs to run, about .* with workers = 1", estimate)
    assert basis == "~ by FLOPs (50% of a product of matrices here), 2 ms a gradient and 0.1 s to prepare a cell"
    assert absent == f"loaded from the hub when first needed: data cifar10; weights {WEIGHTS}"


def test_a_run_needs_both(tmp_path, nowhere, capsys, monkeypatch):
    """In a folder that does not hold them, and where the hub may not be asked; nothing has begun."""
    arguments = [HYFREEDP, f"results={tmp_path / 'results'}"]
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    for split in ("train", "test"):
        (tmp_path / "data" / "cifar10" / f"{split}-0.parquet").touch()
    monkeypatch.setenv("DPOPT_DATA", str(tmp_path / "data"))
    assert main(["plan", *arguments]) == 0
    missing, refusal = capsys.readouterr().out.splitlines()[-2:]
    assert missing == f"missing: weights {WEIGHTS}"
    assert not (tmp_path / "results").exists()
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert f"checkpoint: '{WEIGHTS}.' cannot be used; expected one such file in" in error
    assert refusal.removeprefix("`dpopt run` refuses: ") in error
    monkeypatch.delenv("DPOPT_DATA")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["run", *arguments]) == 2
    assert "go online once to load uoft-cs/cifar10" in capsys.readouterr().err
    assert not nowhere
    assert not [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
