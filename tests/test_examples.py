"""The scripts of `docs/examples` run as they are, in an empty folder."""

import runpy
from pathlib import Path

import matplotlib as mpl
import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "docs" / "examples").glob("*.py"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path, monkeypatch, capsys):
    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(path), run_name="__main__")
    assert names["outcome"].ran == 12
    assert not names["outcome"].failed
    assert (tmp_path / "example.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert "24 runs" in printed
    assert "rows: ['adadp', 'dp_sgd', 'fiber', 'hyfreedp']" in printed
    runpy.run_path(str(path), run_name="__main__")
    assert "0 trained, 24 were done, 0 failed" in capsys.readouterr().out
