"""What the README shows of the registry and the models is what they say."""

from pathlib import Path

import pytest

from dpopt.cli import main

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("arguments", ["format=markdown", "what=models format=markdown"])
def test_tables_are_generated(arguments, capsys):
    text, begin, end = README.read_text(), f"<!-- dpopt list {arguments} -->\n", "<!-- end -->"
    shown = text[text.index(begin) + len(begin) :]
    assert main(["list", *arguments.split()]) == 0
    assert shown[: shown.index(end)].strip() == capsys.readouterr().out.strip()
