"""Classification of texts by a transformer encoder and a linear classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpopt._extras import absent, optional
from dpopt.errors import ConfigError, Missing, unknown
from dpopt.fields import Arguments, Count
from dpopt.workloads import cache, data, features, language, models
from dpopt.workloads.base import EVALUATION_BATCH, Outline, Split, Workload

_POOLING = {"distilbert": "first"}
"""The vector of a text: the first token's for DistilBERT; the mean over the text for all others,
as sentence-transformers has it for MiniLM, but without its scaling to norm 1: the classifier would need large weights,
and private training finds those slowly."""


@dataclass(frozen=True)
class TextClassification(Workload):
    """A transformer encoder and a linear classifier on a text data set. There is no dropout.

    The classifier above a pretrained encoder starts at zero. Where only the head is trained, the encoder's features are
    computed once and are the data.

    Args:
        data: name of a data set of texts.
        encoder: "minilm" (all-MiniLM-L6-v2), "distilbert" (distilbert-base-uncased) or a hub id.
        pretrained: with the hub's weights; without, random ones, always the same, and texts are read as bytes.
        subset: which parameters are trained, see `models.trainable`.
        length: number of tokens; longer texts are cut, shorter ones padded, so that no example's length shows in a
            batch. The model masks the padding.
        options: sizes of an encoder with random weights, fields of transformers' configuration.
        validation: see `Workload`.
    """

    data: str = "sst2"
    encoder: str = "minilm"
    pretrained: bool = True
    subset: Literal["head", "lora", "full", "bitfit", "film"] = "head"
    length: Count = 128
    options: Arguments = Arguments()

    batch_size: ClassVar[int] = 256
    epochs: ClassVar[float] = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", data.pinned(self.data, "text"))
        super().__post_init__()
        if self.length < 3:
            allowed = "expected at least 3: texts have a first and a last token"
            raise ConfigError("workload.length", self.length, allowed)
        if self.pretrained and self.options:
            raise ConfigError("workload.options", self.options, "a pretrained encoder has its sizes; expected none")
        if not self.pretrained and self.encoder not in ("minilm", "distilbert"):
            raise unknown("workload.encoder", self.encoder, ("minilm", "distilbert"))

    @property
    def revision(self) -> int:  # type: ignore[override]
        return models.REVISIONS.get(self.subset, 1)

    @property
    def pool(self) -> int:  # type: ignore[override]
        return data.entry(self.data).part("train").records

    @property
    def marks(self) -> int:  # type: ignore[override]
        # An evaluation of the whole model costs as much as some draws: there are few, fewest of a large test split.
        if self.subset == "head":
            return 40
        return 4 if data.entry(self.data).part("test").records < 2000 else 2

    @property
    def evaluation_batch(self) -> int:  # type: ignore[override]
        # As many tokens as elsewhere records, where the whole model runs: activations stay in a processor's cache.
        return EVALUATION_BATCH if self.subset == "head" else max(1, EVALUATION_BATCH // self.length)

    @property
    def classes(self) -> int:  # type: ignore[override]
        return data.entry(self.data).classes

    def check(self) -> None:
        if self.pretrained:
            language.check_length(self.encoder, self.length)
        else:
            language.random_configuration(self.encoder, self.options, self.length)

    def missing(self) -> list[Missing]:
        packages = absent("transformers", "tokenizers", *(["peft"] if self.subset == "lora" else []))
        return packages + data.missing(self.data) + (language.missing(self.encoder) if self.pretrained else [])

    def outline(self) -> Outline:
        transformers = optional("transformers")
        if self.pretrained:
            config = language.architecture(self.encoder)
        else:
            config = language.random_configuration(self.encoder, self.options, self.length)
        with torch.device("meta"):
            x, y = torch.empty(1, self.length, dtype=torch.int32), torch.empty(1, dtype=torch.int64)
            encoder = language.Encoder(transformers.AutoModel.from_config(config), _POOLING.get(self.encoder, "mean"))
            model: nn.Module = self.head(encoder.width)
            if self.subset == "head":
                x = torch.empty(1, encoder.width)
            else:
                model = models.trainable(nn.Sequential(encoder, model), self.subset)
        return Outline(model, Split(x, y), data.entry(self.data).part("test").records)

    def load(self) -> tuple[Split, Split]:
        read = self._features if self.subset == "head" else self.tokens
        return read("train"), read("test")

    def read(self, new: Any) -> Tensor:
        ids = torch.from_numpy(self._tokenised(data.incoming(self.data, new)))
        if self.subset != "head":
            return ids
        return torch.from_numpy(features.computed(lambda: language.Trimmed(self.encoder_module()), ids))

    def model(self) -> nn.Module:
        if self.subset == "head":
            return self.head(self._features("test").x.shape[1])
        encoder = self.encoder_module()
        return models.trainable(nn.Sequential(encoder, self.head(encoder.width)), self.subset)

    def unfilled(self) -> nn.Module:
        return self.head(self.outline().record.x.shape[1]) if self.subset == "head" else self.model()

    def head(self, inputs: int) -> nn.Linear:
        """The classifier with its initial weights."""
        layer = nn.Linear(inputs, self.classes)
        if self.pretrained:
            models.zero_head(layer)
        return layer

    def encoder_module(self) -> language.Encoder:
        """The encoder: token ids [n, length] -> features [n, f]."""
        pooling = _POOLING.get(self.encoder, "mean")
        if self.pretrained:
            return language.Encoder(language.load(self.encoder, "AutoModel", self.length), pooling)
        return language.Encoder(language.random_transformer(self.encoder, self.options, self.length), pooling)

    def tokens(self, split: str) -> Split:
        """Token ids, int32 [n, length], and labels of one split; memory-mapped."""

        def tokenised() -> dict[str, NDArray[Any]]:
            texts, labels = data.texts(self.data, split)
            return {"ids": self._tokenised(texts), "labels": labels.numpy()}

        stored = cache.arrays({"kind": "tokens", "split": split, **self._reading()}, tokenised)
        return Split(torch.from_numpy(stored["ids"]), torch.from_numpy(stored["labels"]))

    def _tokenised(self, texts: Sequence[str]) -> NDArray[Any]:
        read = partial(language.tokens, model=self.encoder) if self.pretrained else language.tokens_of_bytes
        return read(texts, length=self.length)

    def _reading(self) -> dict[str, Any]:
        """The key of the token ids."""
        tokenizer = cache.checksum(language.file(self.encoder, language.TOKENIZER)) if self.pretrained else "bytes"
        return {"data": data.fingerprint(self.data), "tokenizer": tokenizer, "length": self.length}

    def _features(self, split: str) -> Split:
        ids, labels = self.tokens(split)
        weights: Any = {"kind": self.encoder, **self.options}
        padding = language.BYTES["pad"]
        if self.pretrained:
            weights = cache.checksum(language.file(self.encoder, language.WEIGHTS))
            padding = int(language.configuration(self.encoder)["pad_token_id"])
        key = {"split": split, "encoder": weights, "pooling": _POOLING.get(self.encoder, "mean"), **self._reading()}
        order = (ids != padding).sum(1).argsort(stable=True)  # texts of one length in one batch need no padding
        vectors = features.cached(key, lambda: language.Trimmed(self.encoder_module()), ids[order])
        return Split(vectors[order.argsort()], labels)
