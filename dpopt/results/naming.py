"""Names of workloads and rows in tables and in figures; needs no pandas."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from dpopt import registry


def workload_names(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each workload: with its data where the name leaves them open, and what differs.

    What differs is named between workloads of one registered name.
    """
    entries = registry.entries("workload")  # results may be of a workload that is not installed here
    usual = {name: entry.fields.get("data") for name, entry in entries.items()}
    names = [spec["name"] for spec in specs]
    # Revision and number of records held out are part of a name only where nothing else tells two workloads apart.
    fields = _apart(specs, names, "=", {"validation", "revision"}, usual)
    return [f"{name}({', '.join(each)})" if each else name for name, each in zip(names, fields, strict=True)]


def _apart(
    specs: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    sign: str,
    rare: Collection[str],
    usual: Mapping[str, Any] | None = None,
) -> list[list[str]]:
    """The fields that tell each workload from others of its name, as texts; `rare` ones where it takes them.

    With `usual`, name -> data, other data are among them.
    """
    distinct = {json.dumps(spec, sort_keys=True): (spec, name) for spec, name in zip(specs, names, strict=True)}

    def texts(spec: Mapping[str, Any], name: str, without: Collection[str]) -> list[str]:
        alike = [other for other, of_other in distinct.values() if of_other == name]
        differing = {key for key in spec if any(other.get(key) != spec[key] for other in alike)} - {*without}
        if usual is not None and spec.get("data") != usual.get(name):
            differing.add("data")
        return [f"{key}{sign}{spec[key]}" for key in spec if key in differing and spec[key] is not None]

    fields = {key: texts(*pair, rare) for key, pair in distinct.items()}
    shared = Counter((distinct[key][1], *each) for key, each in fields.items())
    fields = {k: each if shared[distinct[k][1], *each] == 1 else texts(*distinct[k], ()) for k, each in fields.items()}
    return [fields[json.dumps(spec, sort_keys=True)] for spec in specs]


_OF_A_ROW = {"accountant": "", "average": 0.0, "diagnostics": False, "grid": False, "kernel": 1}
"""Fields of a cell, with defaults, that make rows of their own within a label, as its optimizer's revision does."""


def row_names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The label of each entry of a manifest, with those of `_OF_A_ROW` that differ within a label."""
    # A suite has one of each, but runs with other ones, or by other code, add their cells to the same manifest.
    cells = [entry["cell"] for entry in entries]
    fields = [
        {key: cell.get(key, usual) for key, usual in _OF_A_ROW.items()}
        | {"revision": cell["optimizer"].get("revision", 1)}
        for cell in cells
    ]
    values = {
        (entry["label"], *item) for entry, of_entry in zip(entries, fields, strict=True) for item in of_entry.items()
    }
    count = Counter((label, key) for label, key, _ in values)
    names = []
    for label, of_entry in zip((entry["label"] for entry in entries), fields, strict=True):
        differing = [f"{key}={value}" for key, value in of_entry.items() if count[label, key] > 1]
        names.append(f"{label} ({', '.join(differing)})" if differing else label)
    return names


def display_names(rows: Mapping[str, str], stated: Mapping[str, str]) -> dict[str, str]:
    """The name in tables and figures of each of `row_names` (-> its optimizer): as stated for its label, or by rule.

    A label that is the registered name of its own optimizer or the end of it (`noise_aware`), or adds to that, has or
    adds to the display name of that optimizer. Any other label is shown as it is.
    """
    entries, names = registry.entries("optimizer"), dict[str, str]()
    for row, optimizer in rows.items():
        label, bracket, rest = row.partition(" (")  # which `row_names` adds
        display, words = entries[optimizer].display if optimizer in entries else "", optimizer.split("_")
        ends = ("_".join(words[k:]) for k in range(len(words)) if display)
        if name := stated.get(label):
            label = name
        elif end := next((end for end in ends if f"{label}_".startswith(f"{end}_")), ""):
            label = ", ".join(filter(None, [display, label[len(end) + 1 :].replace("_", " ")]))
        names[row] = label + bracket + rest
    shared = Counter(names.values())
    return {row: name if shared[name] == 1 else f"{name} ({row})" for row, name in names.items()}


# The field's spelling of words that keys have in small letters.
_SPELLED = {
    "20_newsgroups": "20 newsgroups",
    "adadp": "ADADP",
    "bitfit": "BitFit",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "e2e": "E2E",
    "fashion_mnist": "Fashion-MNIST",
    "film": "FiLM",
    "food101": "Food-101",
    "gmm": "Gaussian mixture",
    "gpt2": "GPT-2",
    "gtsrb": "GTSRB",
    "logreg": "logistic regression",
    "lora": "LoRA",
    "minilm": "MiniLM",
    "mlp": "MLP",
    "mnist": "MNIST",
    "nlg": "NLG",
    "scatter": "scattering",
    "sst2": "SST-2",
    "sun397": "SUN397",
    "svhn": "SVHN",
    "vit_base": "ViT-B",
    "vit_small": "ViT-S",
    "vit_tiny": "ViT-Ti",
    "wrn_16_4": "WRN-16-4",
}


def readable_names(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for figures for each workload: its model and data, and what else tells it apart."""

    def spelled(name: str) -> str:
        return _SPELLED.get(name) or " ".join(_SPELLED.get(word, word) for word in name.split("_"))

    def short(spec: Mapping[str, Any]) -> str:
        if "data" not in spec:
            return spelled(spec["name"])
        model = spec.get("architecture", spec.get("encoder", spec["name"]))
        subset = "" if spec.get("pretrained") is False else spec.get("subset", "")  # from scratch all is trained
        # Patch size and checkpoint of a pretrained model make a title too long for its panel.
        model = f"{spelled(re.split(r'_patch|[.]', model)[0])} {spelled(subset)}".strip()
        return f"{model}, {spelled(spec['data'])}"

    names = [short(spec) for spec in specs]
    fields = _apart(specs, names, " ", {"revision"})
    return [", ".join([name, *each]) for name, each in zip(names, fields, strict=True)]


def titles(of_suites: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """For the workloads of each suite, the name in its tables -> that in figures, which is one for equal workloads."""
    names = iter(readable_names([spec for specs in of_suites for spec in specs]))
    return [dict(zip(workload_names(specs), islice(names, len(specs)), strict=True)) for specs in of_suites]
