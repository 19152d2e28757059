"""The mutants of a few lines."""

from mutants import mutants

SOURCE = '''
LIMIT: float = 1e30

class Mean:
    """Of 2 numbers."""

    def of(self, x: "3", y=4):
        if not x < 5:
            raise ValueError(f"below {6}")
        return (x + y).clamp(min=True)
'''
EXPECTED = {
    ("Mean.of", "if not x < 5:", "if not x <= 5:"),
    ("Mean.of", "if not x < 5:", "if not x < 6:"),
    ("Mean.of", "if not x < 5:", "if not not x < 5:"),
    ("Mean.of", "return (x + y).clamp(min=True)", "return (x - y).clamp(min=True)"),
    ("Mean.of", "return (x + y).clamp(min=True)", "return x + y"),
}


def test_each_mutant_differs_in_one_line_of_code():
    """Not in annotations, defaults, texts and errors, nor where the number is too large to change."""
    made = list(mutants("a.py", SOURCE))
    assert {(mutant.function, mutant.before, mutant.after) for mutant in made} == EXPECTED
    assert len({mutant.source for mutant in made}) == len(made) == len(EXPECTED)


def test_a_mutant_has_the_same_name_wherever_it_stands():
    names = [{mutant.name for mutant in mutants("a.py", text)} for text in (SOURCE, "\n\nimport math\n" + SOURCE)]
    assert names[0] == names[1]
    assert "a.py Mean.of: if not x < 5: => if not x < 6:" in names[0]
