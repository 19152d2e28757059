"""Keys of `dpopt new data` and `dpopt fit from=PATH`, apart from what reads the files: Tab must not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from dpopt.fields import Count, Finite, Name, Probability, Several, key


@dataclass(frozen=True, kw_only=True)
class DataKeys:
    """Keys of `dpopt new data NAME`."""

    from_: Path | None = key("folder of images (CLASS/IMAGE or SPLIT/CLASS/IMAGE), CSV file, or saved `Dataset`", None)
    target: Name | None = key("the column of the classes; label by default", None)
    inputs: Name | None = key("the column of texts or images, where there are other columns", None)
    drop: Several[Name] | None = key("[admitted]: columns of a table that are left out", None)
    unit: Name | None = key(
        "the column that says whose row it is: it is no input, and one person's rows stay together", None
    )
    test: Probability | None = key("the share of the records that becomes the test split; 0.2 by default", None)
    size: Count | None = key("height and width that images are resized to", None)
    public: bool | None = key("true: ranges and values that the records show are public knowledge", None)
    ranges: dict[str, tuple[Finite, Finite]] = key("ranges.COLUMN=[0,100]: the numbers that a column may hold", {})
    values: dict[str, tuple[str, ...]] = key("values.COLUMN=[a,b]: the categories that a column may hold", {})

    @property
    def of_file(self) -> bool:
        """True if any of these keys is set."""
        return any(getattr(self, field.name) not in (None, {}) for field in fields(DataKeys))
