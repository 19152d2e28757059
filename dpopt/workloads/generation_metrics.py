"""Scores of generated texts against several references: BLEU, NIST, METEOR, ROUGE-L and CIDEr, as the E2E challenge's.

The challenge's script (Dušek, Novikova and Rieser 2020, github tuetschek/e2e-metrics) takes BLEU and NIST as
mteval-v13a computes them, whatever the case of letters, and the others from the COCO caption evaluation, after the
tokenizer of the Penn treebank, without punctuation. Here BLEU and mteval's tokenizer are sacrebleu's, and METEOR,
ROUGE-L and CIDEr are pycocoevalcap's, whose tokenizer and METEOR 1.5 are Java programs: without Java these three are
missing, not computed in another way. NIST is written out here, since NLTK's takes one reference for each n-gram order
where mteval merges the n-grams of all references; with one reference they agree.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from dpopt.errors import ConfigError

_Tokens = Sequence[str]
_References = Sequence[Sequence[str]]
_JAR, _TOKENIZER = "stanford-corenlp-3.4.1.jar", "edu.stanford.nlp.process.PTBTokenizer"


def scores(outputs: Sequence[str], references: _References) -> dict[str, Any]:
    """The five scores of a whole corpus, higher is better: bleu, meteor and rouge_l in [0, 1], nist, cider up to 10.

    Where one cannot be computed, "missing" says for its name why. `ConfigError` for a text without references.
    """
    if len(outputs) != len(references) or not outputs or not all(references):
        counts = f"{len(outputs)} texts, {len(references)} lists of references"
        raise ConfigError("references", counts, "expected at least one reference for each text")
    scores: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for names, function in ((("bleu", "nist"), _mteval), (("meteor", "rouge_l", "cider"), _coco)):
        try:
            scores |= function(outputs, references)
        except (ImportError, OSError, subprocess.SubprocessError) as error:
            missing |= dict.fromkeys(names, f"{type(error).__name__}: {error}")
    return scores | ({"missing": missing} if missing else {})


def _mteval(outputs: Sequence[str], references: _References) -> dict[str, float]:
    """BLEU-4 in [0, 1] (Papineni et al. 2002; closest reference length, no smoothing) and NIST-5."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    most = max(map(len, references))
    columns = [[texts[i] if i < len(texts) else None for texts in references] for i in range(most)]
    bleu = BLEU(lowercase=True, tokenize="13a", smooth_method="none").corpus_score(list(outputs), columns)  # type: ignore[arg-type]
    split = Tokenizer13a()
    words = [split(text.lower()).split() for text in outputs]
    return {"bleu": bleu.score / 100, "nist": nist(words, [[split(t.lower()).split() for t in r] for r in references])}


def nist(outputs: Sequence[_Tokens], references: Sequence[Sequence[_Tokens]], order: int = 5) -> float:
    """The NIST score of tokenised texts (Doddington 2002), with the n-grams of all references of a text merged.

    An n-gram w₁…wₙ that a text shares with its references counts log₂(#(w₁…wₙ₋₁) / #(w₁…wₙ)), # over all references.
    """
    counts = [Counter[_Tokens]() for _ in range(order + 1)]
    for texts in references:
        for text in texts:
            counts[0][()] += len(text)
            for n in range(1, order + 1):
                counts[n].update(_ngrams(text, n))
    total = 0.0
    for n in range(1, order + 1):
        # An n-gram counts at most as often as in the reference that has it most often: repeating it gains nothing.
        gained = sum(
            hits * math.log2(counts[n - 1][ngram[:-1]] / counts[n][ngram])
            for text, texts in zip(outputs, references, strict=True)
            for ngram, hits in (_ngrams(text, n) & reduce(or_, (_ngrams(each, n) for each in texts))).items()
        )
        total += gained / max(1, sum(max(0, len(text) - n + 1) for text in outputs))
    ratio = sum(map(len, outputs)) / sum(sum(map(len, texts)) / len(texts) for texts in references)
    # The brevity penalty is 1/2 where the texts have two thirds of their references' mean length.
    return total * math.exp(math.log(0.5) * (math.log(min(1.0, ratio)) / math.log(1.5)) ** 2) if ratio > 0 else 0.0


def _ngrams(text: _Tokens, n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(text[i:] for i in range(n)), strict=False))


def _coco(outputs: Sequence[str], references: _References) -> dict[str, float]:
    """METEOR 1.5, ROUGE-L and CIDEr of the COCO caption evaluation (Chen et al. 2015); OSError without Java."""
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.rouge.rouge import Rouge

    lines = treebank([*outputs, *(text for texts in references for text in texts)])
    written = {i: [next(lines)] for i in range(len(outputs))}
    expected = {i: [next(lines) for _ in texts] for i, texts in enumerate(references)}
    scorers: dict[str, Callable[[], Any]] = {"meteor": Meteor, "rouge_l": Rouge, "cider": Cider}
    return {name: float(make().compute_score(expected, written)[0]) for name, make in scorers.items()}


def treebank(texts: Sequence[str]) -> Iterator[str]:
    """The texts in lower case, their tokens with spaces between them and without punctuation; OSError without Java."""
    from pycocoevalcap.tokenizer import ptbtokenizer

    java = shutil.which("java")
    if java is None:
        raise FileNotFoundError("the program `java` is not there")
    jar = Path(ptbtokenizer.__file__).parent / _JAR
    command = [java, "-cp", str(jar), _TOKENIZER, "-preserveLines", "-lowerCase", "-encoding", "UTF-8"]
    lines = "".join(" ".join(text.split()) + "\n" for text in texts)
    tokenised = subprocess.run(command, input=lines.encode(), capture_output=True, check=True).stdout.decode()
    for line in tokenised.split("\n")[: len(texts)]:
        yield " ".join(word for word in line.split() if word not in ptbtokenizer.PUNCTUATIONS)
