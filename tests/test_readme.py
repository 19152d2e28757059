"""What the README shows of the registry is what the registry says."""

from pathlib import Path

from dpopt.cli import main

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- dpopt list format=markdown -->\n", "<!-- end -->"


def test_the_table_of_optimizers_is_generated(capsys):
    text = README.read_text()
    shown = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert main(["list", "format=markdown"]) == 0
    assert shown.strip() == capsys.readouterr().out.strip()
