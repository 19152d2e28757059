"""Text from data: a restaurant's attributes -> a sentence, the E2E challenge's task, learnt by a GPT-2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dpopt._extras import absent, optional
from dpopt.errors import ConfigError, Missing
from dpopt.fields import Count
from dpopt.workloads import cache as kept
from dpopt.workloads import data, generation_metrics, language, models
from dpopt.workloads.base import Outline, Predict, Split, Workload

_DATA = "e2e_nlg"
_END = "<|endoftext|>"
IGNORED = -100
"""Target of positions that the loss leaves out."""
_BATCH = 128


@dataclass(frozen=True)
class E2E(Workload):
    """A GPT-2 that continues a meaning representation with a sentence; all records are sequences of one length.

    The unit of privacy is one pair of a meaning representation and a sentence; several share a representation.

    A sequence is the meaning representation, an end token, the sentence, and end tokens to the last position. A
    record's loss is the mean over the sentence's tokens and the first end token behind it. There is no dropout.

    The vocabulary of a model with random weights is a byte-level BPE of the challenge's validation split, which shares
    no meaning representation with the training split and which the guarantee does not cover.

    The curve is about one record for each of the 630 meaning representations of the test split, the first reference;
    `report` is about all references.

    Args:
        pretrained: the hub's GPT-2 (124 million parameters); without, random weights of the sizes below.
        layers, width, heads, vocabulary: sizes of a model with random weights.
        subset: which parameters are trained, see `models.trainable`; the output layer is the embedding.
        length: tokens of a sequence; the sentence is cut where it does not fit.
        generations: how many meaning representations of the test split, which has 630, are put into words at the end of
            a run at most; 0 leaves the generation metrics out.
        beams: partial sentences that are kept at each token; 1 takes the likeliest token.
        validation: see `Workload`.
    """

    pretrained: bool = False
    layers: Count = 2
    width: Count = 128
    heads: Count = 4
    vocabulary: Count = 2048
    subset: Literal["full", "lora", "bitfit"] = "full"
    length: Count = 80
    generations: int = 630
    beams: Count = 1

    data: ClassVar[str] = _DATA
    batch_size: ClassVar[int] = 512
    epochs: ClassVar[float] = 1.0
    marks: ClassVar[int] = 10
    evaluation_batch: ClassVar[int] = 64
    score: ClassVar[str] = "log_likelihood"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise ConfigError("workload.heads", self.heads, f"expected a divisor of the width {self.width}")
        if self.vocabulary < 257:
            raise ConfigError("workload.vocabulary", self.vocabulary, "expected at least 257: all bytes and the end")
        if self.length < 4:
            raise ConfigError("workload.length", self.length, "expected at least 4")
        if self.generations < 0:
            raise ConfigError("workload.generations", self.generations, "expected at least 0")

    @property
    def pool(self) -> int:  # type: ignore[override]
        return data.entry(_DATA).part("train").records

    def check(self) -> None:
        if self.pretrained:
            language.check_length("gpt2", self.length)

    def missing(self) -> list[Missing]:
        packages = absent("transformers", "tokenizers", *(["peft"] if self.subset == "lora" else []))
        return packages + data.missing(_DATA) + (language.missing("gpt2") if self.pretrained else [])

    def outline(self) -> Outline:
        transformers = optional("transformers")
        with torch.device("meta"):
            x, y = (torch.empty(1, self.length, dtype=kind) for kind in (torch.int32, torch.int64))
            if self.pretrained:
                config = language.architecture("gpt2")
                model: nn.Module = models.LanguageModel(transformers.AutoModelForCausalLM.from_config(config))
            else:
                model = self._random()
            return Outline(models.trainable(model, self.subset), Split(x, y), data.entry(_DATA).part("test").records)

    def load(self) -> tuple[Split, Split]:
        test = self.tokens("test")
        # One record for each meaning, or those with most references would count most.
        first: dict[str, int] = {}
        for row, source in enumerate(read("test")[0]):
            first.setdefault(source, row)
        rows = torch.tensor(list(first.values()))
        return self.tokens("train"), Split(test.x[rows], test.y[rows])

    def model(self) -> nn.Module:
        if self.pretrained:
            model: nn.Module = models.LanguageModel(language.load("gpt2", "AutoModelForCausalLM", self.length))
        else:
            model = self._random()
        return models.trainable(model, self.subset)

    def _random(self) -> nn.Module:
        return models.gpt2(self.layers, self.width, self.heads, self.vocabulary, self.length)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return -log_likelihood(output, target)

    def metric(self, output: Tensor, target: Tensor) -> Tensor:
        return log_likelihood(output, target)

    def report(self, predict: Predict, split: Split) -> dict[str, Any]:
        """Mean loss over all references of the test split, the five generation metrics, and the first sentences."""
        x, y = self.tokens("test")
        losses = [self.loss(predict(a), b) for a, b in zip(x.split(_BATCH), y.split(_BATCH), strict=True)]
        nll = {"nll": float(torch.cat(losses).double().mean())}
        if not self.generations:
            return nll
        references: dict[str, list[str]] = {}
        for source, reference in zip(*read("test"), strict=True):
            references.setdefault(source, []).append(reference)
        meanings = list(references)[: self.generations]
        tokenizer, end = self.tokenizer()
        prompts = [[*self._prompt(text.ids), end] for text in tokenizer.encode_batch(meanings)]
        written = tokenizer.decode_batch(generate(predict, prompts, end, self.length, self.beams))
        texts = [text.strip() for text in written]
        scores = generation_metrics.scores(texts, [references[meaning] for meaning in meanings])
        return {**nll, **scores, "samples": texts[:5]}

    def tokens(self, split: str) -> Split:
        """Sequences, int32 [n, length], and targets, int64 [n, length], of one split; memory-mapped."""
        key = {"kind": "tokens", "split": split, "length": self.length, **self._reading()}
        stored = kept.arrays(key, lambda: self._sequences(*read(split)))
        return Split(torch.from_numpy(stored["ids"]), torch.from_numpy(stored["targets"]))

    def tokenizer(self) -> tuple[Any, int]:
        """The tokenizer, and the id of the end token."""
        tokenizers = optional("tokenizers")
        if self.pretrained:
            tokenizer = tokenizers.Tokenizer.from_file(str(language.file("gpt2", language.TOKENIZER)))
        else:
            key = {"kind": "tokenizer", **self._reading()}
            stored = kept.arrays(key, lambda: {"json": _byte_pairs(chain(*read("validation")), self.vocabulary)})
            tokenizer = tokenizers.Tokenizer.from_str(stored["json"].tobytes().decode())
        return tokenizer, int(tokenizer.token_to_id(_END) or 0)

    def _reading(self) -> dict[str, Any]:
        # The key of the token ids, but for the length.
        gpt2 = kept.checksum(language.file("gpt2", language.TOKENIZER)) if self.pretrained else None
        return {"data": data.fingerprint(_DATA), "tokenizer": gpt2 or ["pairs of validation", self.vocabulary]}

    def _prompt(self, meaning: Sequence[int]) -> Sequence[int]:
        return meaning[: self.length - 2]  # an end token and one of the sentence have room

    def _sequences(self, sources: Sequence[str], references: Sequence[str]) -> dict[str, NDArray[Any]]:
        tokenizer, end = self.tokenizer()
        ids = np.full((len(sources), self.length), end, np.int32)
        targets = np.full(ids.shape, IGNORED, np.int64)
        pairs = zip(tokenizer.encode_batch(sources), tokenizer.encode_batch(references), strict=True)
        for row, (meaning, sentence) in enumerate(pairs):
            prompt = [*self._prompt(meaning.ids), end]
            answer = [*sentence.ids, end][: self.length - len(prompt)]
            both = slice(len(prompt), len(prompt) + len(answer))
            ids[row, : both.stop] = [*prompt, *answer]
            targets[row, both] = answer
        return {"ids": ids, "targets": targets}


def log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean log-probability [n] of targets [n, t] but `IGNORED`; logits [n, t, vocabulary] are of the next token."""
    following = targets[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), following, reduction="none", ignore_index=IGNORED)
    return -losses.sum(1) / (following != IGNORED).sum(1)


def read(split: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Meaning representations and what people wrote for them, n of each, of one split of the E2E data."""
    (sources, references), _ = data.texts(_DATA, split)
    return sources, references


def _byte_pairs(texts: Iterable[str], size: int) -> NDArray[np.uint8]:
    """A byte-level BPE tokenizer of at most `size` tokens, `_END` among them, as JSON.

    Tokens may reach over words, which makes the sequences of this narrow domain nearly half as long.
    """
    tokenizers = optional("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return np.frombuffer(tokenizer.to_str().encode(), np.uint8)


def generate(
    predict: Predict, prompts: Sequence[Sequence[int]], end: int, length: int, beams: int = 1
) -> list[list[int]]:
    """Continue each prompt with its likeliest continuation that beam search finds, without the prompt and `end`.

    A prompt and its continuation have `length` tokens at most. For each prompt as many partial texts are kept as there
    are beams, by total log-probability; 1 is greedy search.
    """
    parts = (prompts[i : i + _BATCH] for i in range(0, len(prompts), _BATCH))
    return [text for part in parts for text in _search(predict, part, end, length, beams)]


def _search(predict: Predict, prompts: Sequence[Sequence[int]], end: int, length: int, beams: int) -> list[list[int]]:
    starts = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.full((len(prompts), beams, length), end, dtype=torch.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[:, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
    totals = torch.full((len(prompts), beams), -torch.inf)
    totals[:, 0] = 0  # the beams of a prompt begin alike, so only one counts
    is_open, every = totals == 0, torch.arange(len(prompts)).unsqueeze(1)
    for step in range(length - int(starts.min())):
        is_open &= (starts + step < length).unsqueeze(1)
        if not is_open.any():
            break
        at = starts + step
        rows, columns = is_open.nonzero(as_tuple=True)
        logits = predict(ids[rows, columns, : int(at[rows].max())])
        following = logits[torch.arange(len(rows)), at[rows] - 1].log_softmax(-1)
        candidates = torch.full((*totals.shape, following.shape[-1]), -torch.inf)
        candidates[:, :, end] = totals  # a closed beam stays as it is
        candidates[rows, columns] = totals[rows, columns].unsqueeze(1) + following
        totals, chosen = candidates.flatten(1).topk(beams)
        parents, tokens = chosen // following.shape[-1], chosen % following.shape[-1]
        ids, was_open = ids[every, parents], is_open[every, parents]
        is_open = was_open & (tokens != end) & totals.isfinite()
        row, column = is_open.nonzero(as_tuple=True)
        ids[row, column, at[row]] = tokens[is_open].int()
    best = ids[torch.arange(len(prompts)), totals.argmax(1)].tolist()
    texts = [row[start:] for row, start in zip(best, starts.tolist(), strict=True)]
    return [text[: text.index(end)] if end in text else text for text in texts]
