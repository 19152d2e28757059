"""Names of workloads and rows in tables and in figures; needs no pandas."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dpopt import registry


def workload_names(specs: list[dict[str, Any]]) -> dict[str, str]:
    """A name for each distinct workload, by its JSON: with its data where the name leaves them open, and what differs.

    What differs is named between workloads of one registered name.
    """
    # Revision and number of records held out are part of a name only where nothing else tells two workloads apart.
    distinct = {json.dumps(spec, sort_keys=True): spec for spec in specs}
    short = {key: _named(spec, distinct.values(), {"validation", "revision"}) for key, spec in distinct.items()}
    shared = Counter(short.values())
    return {
        key: short[key] if shared[short[key]] == 1 else _named(spec, distinct.values())
        for key, spec in distinct.items()
    }


def _named(spec: dict[str, Any], all_specs: Iterable[dict[str, Any]], without: Collection[str] = ()) -> str:
    others = [other for other in all_specs if other["name"] == spec["name"]]
    entry = registry.entries("workload").get(spec["name"])  # results may be of a workload that is not installed here
    usual = entry.fields.get("data") if entry else None
    shown = [
        key
        for key, value in spec.items()
        if (key == "data" and value != usual)
        or (key not in without and any(other.get(key) != value for other in others))
    ]
    differing = ", ".join(f"{key}={spec[key]}" for key in shown if spec[key] is not None)  # None: as the model has it
    return f"{spec['name']}({differing})" if differing else spec["name"]


def row_names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The label of each entry of a manifest, with its accountant and its average where these differ within a label."""
    # A suite has one of each, but runs with other ones add their cells to the same manifest.
    fields = [{key: entry["cell"].get(key, 0.0) for key in ("accountant", "average")} for entry in entries]
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


def readable_names(specs: list[dict[str, Any]]) -> dict[str, str]:
    """A name for figures for each distinct workload, by its JSON: its model and data, and what else tells it apart."""
    distinct = {json.dumps(spec, sort_keys=True): spec for spec in specs}

    def spelled(name: str) -> str:
        return _SPELLED.get(name) or " ".join(_SPELLED.get(word, word) for word in name.split("_"))

    short: dict[str, str] = {}
    for key, spec in distinct.items():
        short[key] = spelled(spec["name"])
        if "data" in spec:
            model = spec.get("architecture", spec.get("encoder", spec["name"]))
            subset = "" if spec.get("pretrained") is False else spec.get("subset", "")  # from scratch all is trained
            # Patch size and checkpoint of a pretrained model make a title too long for its panel.
            model = f"{spelled(re.split(r'_patch|[.]', model)[0])} {spelled(subset)}".strip()
            short[key] = f"{model}, {spelled(spec['data'])}"

    def named(key: str, without: Collection[str] = ()) -> str:
        spec, alike = distinct[key], [distinct[other] for other in short if short[other] == short[key]]
        differing = [field for field, value in spec.items() if any(other.get(field) != value for other in alike)]
        fields = [f"{field} {spec[field]}" for field in differing if field not in without and spec[field] is not None]
        return ", ".join([short[key], *fields])

    # The revision is part of a name only where nothing else tells two workloads apart.
    names = {key: named(key, {"revision"}) for key in distinct}
    shared = Counter(names.values())
    return {key: name if shared[name] == 1 else named(key) for key, name in names.items()}


def titles(of_suites: Sequence[list[dict[str, Any]]]) -> list[dict[str, str]]:
    """For the workloads of each suite, the name in its tables -> that in figures, which is one for equal workloads."""
    names = readable_names([spec for specs in of_suites for spec in specs])
    return [{name: names[key] for key, name in workload_names(specs).items()} for specs in of_suites]
