"""Generation metrics against values worked out by hand and against NLTK."""

import math
import shutil

import pytest

from dpopt.errors import ConfigError
from dpopt.workloads import generation_metrics
from dpopt.workloads.generation_metrics import _mteval, nist, scores, treebank

TEXTS = ["The Vaults is a cheap pub near Café Adriatic.", "A family friendly coffee shop by the river, The Mill."]
REFERENCES = [
    ["The Vaults, a pub near Café Adriatic, is cheap.", "Near Café Adriatic there is a cheap pub called The Vaults."],
    ["The Mill is a family friendly coffee shop.", "By the river: The Mill.", "The Mill serves coffee by the river."],
]


def test_bleu_by_hand():
    """Precisions 5/6, 3/5, 2/4, 1/3 over both references, and a reference as long as the text."""
    values = _mteval(["the cat sat on a mat"], [["the cat sat on the mat", "there is a cat"]])
    assert values["bleu"] == pytest.approx((6 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_bleu_takes_the_closest_reference_length():
    assert _mteval([r[1] for r in REFERENCES], REFERENCES)["bleu"] == pytest.approx(1)
    text, short, long = "one two three four five", "one two three four", "one two three four five six seven eight"
    assert _mteval([text], [[long]])["bleu"] == pytest.approx(math.exp(1 - 8 / 5))
    assert _mteval([text], [[long, short]])["bleu"] == pytest.approx(1)


def test_case_and_spaces_do_not_count_but_punctuation_does():
    reference = [["The Mill serves food, by the river."]]
    assert _mteval(["the mill  serves FOOD , by the river ."], reference)["bleu"] == pytest.approx(1)
    assert _mteval(["the mill serves food by the river"], reference)["bleu"] < 0.7


def test_nist_with_one_reference_is_nltks():
    from nltk.translate.nist_score import corpus_nist

    texts = [text.split() for text in TEXTS]
    references = [[r[-1].split()] for r in REFERENCES]
    assert nist(texts, references) == pytest.approx(corpus_nist(references, texts))
    assert nist(texts, references) > 0


def test_nist_merges_references_by_hand():
    """Six reference words; a and b occur twice: a unigram counts log2(6/2), or 0 once its reference has no more."""
    references = [[["a", "b", "c"], ["b", "a", "d"]]]
    assert nist([["a", "b", "d"]], references, order=1) == pytest.approx((2 * math.log2(3) + math.log2(6)) / 3)
    assert nist([["a", "a", "a"]], references, order=1) == pytest.approx(math.log2(3) / 3)
    bigram = math.log2(2 / 1) / 2  # "a b" follows an "a", of which there are two
    unigrams = (2 * math.log2(3) + math.log2(6)) / 3
    assert nist([["a", "b", "d"]], references, order=2) == pytest.approx(unigrams + bigram)
    # A text of two thirds of the length is halved.
    assert nist([["a", "b"]], [[["a", "b", "c"]]], order=1) == pytest.approx(0.5 * math.log2(3))


@pytest.mark.parametrize("texts", [["", ""], ["", "a pub"]])
def test_empty_texts_score_low_and_not_an_error(texts):
    values = _mteval(texts, REFERENCES)
    assert 0 <= values["bleu"] < 0.1
    assert 0 <= values["nist"] < 0.1


def test_rouge_and_cider_by_hand(monkeypatch):
    """The longest common subsequence of a b c d and a c d e is a c d: precision and recall 3/4."""
    from pycocoevalcap.meteor import meteor

    class Silent:
        def compute_score(self, references, outputs):
            return 0.25, []

    monkeypatch.setattr(meteor, "Meteor", Silent)
    monkeypatch.setattr(generation_metrics, "treebank", iter)
    values = scores(["a b c d", "x"], [["a c d e", "z"], ["y"]])
    assert values["rouge_l"] == pytest.approx(0.75 / 2)
    assert values["meteor"] == 0.25
    assert 0 < values["cider"] < 5
    assert scores(["a b c d", "x y z w"], [["a b c d"], ["x y z w"]])["cider"] == pytest.approx(10)


def test_without_java_three_scores_are_missing_with_the_reason(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    values = scores(TEXTS, REFERENCES)
    assert values.keys() == {"bleu", "nist", "missing"}
    assert values["missing"].keys() == {"meteor", "rouge_l", "cider"}
    assert "`java` is not there" in values["missing"]["cider"]


@pytest.mark.parametrize(("texts", "references"), [([], []), (["a"], []), (["a"], [[]]), (["a"], [["b"], ["c"]])])
def test_what_cannot_be_scored(texts, references):
    with pytest.raises(ConfigError, match="at least one reference"):
        scores(texts, references)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("java"), reason="METEOR and the treebank's tokenizer are Java programs")
def test_java_programs():
    assert list(treebank(["The Mill isn't cheap, it's GOOD!", "", "Café"])) == [
        "the mill is n't cheap it 's good",
        "",
        "café",
    ]
    same = scores([r[0] for r in REFERENCES], REFERENCES)
    assert "missing" not in same
    assert same["rouge_l"] == pytest.approx(1)
    assert same["meteor"] == pytest.approx(1)
    other = scores(TEXTS, REFERENCES)
    assert all(0 < other[name] < same[name] for name in ("bleu", "nist", "meteor", "rouge_l", "cider"))
