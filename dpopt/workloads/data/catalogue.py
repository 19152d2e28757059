"""What is known of each data set: one YAML file in `conf/data` says where it is, what it holds and how to check it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from typing import Any, Literal

import yaml

from dpopt import fields
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Count, NonNegative, Positive

Kind = Literal["image", "text", "pairs"]


@dataclass(frozen=True)
class Part:
    """One split as this suite uses it.

    Attributes:
        source: the hub's name of the split, with which local files begin.
        records: how many records it has.
        inputs: SHA-256 over the inputs in row order, "" where it is not known: of images the decoded pixels as uint8,
            rows before columns before channels; of texts see `checksums.of_texts`.
        targets: the same over the targets: labels as little-endian int64, or texts.
    """

    source: str
    records: Count
    inputs: str = ""
    targets: str = ""

    def __post_init__(self) -> None:
        if bool(self.inputs) != bool(self.targets):
            raise ConfigError(f"{self.source}.targets", self.targets, "expected checksums of both or of none")


@dataclass(frozen=True)
class Entry:
    """What `conf/data/NAME.yaml` says of a data set.

    Attributes:
        name: the data set's name, also of its folder in `$DPOPT_DATA`.
        kind: images with labels, texts with labels, or pairs of texts (source, target).
        inputs, targets: the columns.
        splits: "train", "test" and perhaps others -> what is in them; which of the hub's splits stands for which.
        licence: as the authors or the hub's card say.
        reference: whom to cite.
        hub, config, revision: arguments of `datasets.load_dataset`; no `hub` where only a local folder can give it.
        classes: number of classes; 0 for pairs.
        class_names: names of the classes in label order; empty where the hub's features are the source of them.
        size: height and width of all images; None where they vary, and for texts.
        mean, std: by which pixels in [0, 1] are usually normalised, one value for each channel, and 0.5 where nothing
            is usual. Public constants of the literature, which no run computes from the records that it trains on.
        note: what a reader should know, such as what could not be checked.
    """

    name: str
    kind: Kind
    inputs: str
    targets: str
    splits: dict[str, Part]
    licence: str
    reference: str
    hub: str | None = None
    config: str | None = None
    revision: str | None = None
    classes: int = 0
    class_names: tuple[str, ...] = ()
    size: Count | None = None
    mean: tuple[NonNegative, ...] = ()
    std: tuple[Positive, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        allowed = (1, 3) if self.kind == "image" else (0,)
        if len(self.mean) not in allowed or len(self.std) != len(self.mean):
            numbers = " or ".join(map(str, allowed))
            raise ConfigError(f"{self.name}.mean", self.mean, f"expected {numbers} values, and as many of std")
        if (self.classes < 2) != (self.kind == "pairs") or len(self.class_names) not in (0, self.classes):
            raise ConfigError(f"{self.name}.classes", self.classes, "expected the number of classes and of their names")
        for needed in ("train", "test"):
            self.part(needed)

    @property
    def channels(self) -> int:
        """Colour channels of an image: 1 or 3."""
        return len(self.mean)

    def part(self, split: str) -> Part:
        """The split with this suite's name `split`.

        Raises:
            ConfigError: there is none.
        """
        if split not in self.splits:
            raise unknown(f"{self.name}.split", split, self.splits)
        return self.splits[split]


def names() -> tuple[str, ...]:
    """The names of all data sets, sorted."""
    return tuple(entries())


def entry(name: str) -> Entry:
    """What is known of the data set `name`.

    Raises:
        ConfigError: unknown name; suggests the nearest.
    """
    if name not in entries():
        raise unknown("data", name, entries())
    return entries()[name]


@cache
def entries() -> dict[str, Entry]:
    """All data sets by name, sorted.

    Another distribution brings one by an entry point `NAME = package` of the group "dpopt.data": `NAME.yaml` there.
    """
    found = resources.files("dpopt").joinpath("conf", "data").iterdir()
    texts = {file.name.removesuffix(".yaml"): file.read_text() for file in found if file.name.endswith(".yaml")}
    for point in entry_points(group="dpopt.data"):
        texts[point.name] = resources.files(point.value).joinpath(f"{point.name}.yaml").read_text("utf-8")
    return {name: parse(name, yaml.safe_load(text)) for name, text in sorted(texts.items())}


def parse(name: str, content: Mapping[str, Any]) -> Entry:
    """The entry that a YAML file's content describes.

    Raises:
        ConfigError: an unknown key, or a value that it cannot have.
    """
    given = content.get("splits", {}).items()
    splits = {split: fields.build(Part, part, f"{name}.splits.{split}") for split, part in given}
    return fields.build(Entry, {**content, "name": name, "splits": splits}, name)
