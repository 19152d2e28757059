"""Who is timed, how a row comes about, and that the plain loop trains what a cell says."""

import sys

import pytest
from speed import cells_per_hour

ONE = ["optimizers=[dp_sgd]", "settings.dp_sgd.grid.lr=[1.0]", "epsilon=3", "seeds=[0]", "epochs=2", "accountant=rdp"]


def words(script):
    return lambda folder: [sys.executable, "-c", script]


def test_rows_are_medians_and_failures_have_reasons(monkeypatch):
    """Also of some contenders alone."""
    fake = {"good": words("pass"), "bad": words("import sys; sys.exit('no such thing')")}
    monkeypatch.setattr(cells_per_hour, "contenders", lambda *arguments: fake)
    good, bad = cells_per_hour.rows("quickstart", ONE, "cpu", rounds=2)
    assert (good["contender"], good["cells"], good["failure"]) == ("good", 1, "")
    assert good["cells_per_hour"] == pytest.approx(3600 / good["seconds"])
    assert (bad["cells_per_hour"], bad["failure"]) == (None, "exit code 1: no such thing")
    assert [row["contender"] for row in cells_per_hour.rows("quickstart", ONE, "cpu", only=["bad"])] == ["bad"]


def test_every_contender_is_told_the_device_and_the_cells():
    on_gpu = cells_per_hour.contenders("quickstart", ONE, "cuda")
    assert list(on_gpu) == ["Opacus, one model at a time", "dpopt run"]
    for name, command in on_gpu.items():
        arguments = command("somewhere")
        assert set(ONE) < set(arguments)
        assert ("device=cuda" in arguments) or arguments[-3:] == ["--plain", "cuda", "1"], name
    assert "Opacus, one process a core" in cells_per_hour.contenders("quickstart", ONE, "cpu")


@pytest.mark.slow
def test_the_plain_loop_learns():
    (cell,) = cells_per_hour.cells("quickstart", ONE)
    assert cells_per_hour.plain("cpu", cell) > 0.3  # of ten classes


def test_methods_that_opacus_lacks_are_refused():
    with pytest.raises(SystemExit, match="Opacus has no fiber"):
        cells_per_hour.main(["quickstart", "optimizers=[fiber]", "seeds=[0]"])
