"""The page of a leaderboard against `reference.leaderboard`, which shares no code with the package."""

import base64
import hashlib
import json
import lzma
import math
import re
import zlib
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from reference import leaderboard as reference

from dpopt.cli import main
from dpopt.privacy import Draw, Ledger
from dpopt.privacy import epsilon as epsilon_of
from dpopt.testing.imports import imports

ROOT = Path(__file__).parents[2]
DELTA, TESTED, HELD_OUT, SEEDS = 1e-5, 60, 12, 3
HEAD = {"architecture": "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "data": "gtsrb_32", "pretrained": True}
TASKS = [{"name": name} for name in ("alpha", "beta", "gamma", "delta", "no_bits")]
TASKS += [{"name": "images", "subset": "head", **HEAD}]
NOISES = {(1.0, 1): 1.9, (1.0, 2): 2.4, (3.0, 1): 1.0, (3.0, 2): 1.3}
"""(target, runs that it pays for) -> noise multiplier."""


def ledger_of(noise, runs=1):
    return Ledger([Draw(0.1, (noise,))] * (10 * runs))


@cache
def spent(noise, runs=1):
    return epsilon_of(ledger_of(noise, runs), DELTA)


class Published:
    """Writes made-up runs in the stored format: sealed lines of JSON, packed."""

    def __init__(self, root):
        self.root, self.lines, self.random, self.count = root, {}, np.random.default_rng(0), 0

    def add(self, suite, task, label, target, seed, level, tuning="self", lr=None, paid=1, number=0, entry=()):
        """A run; `level` is about its accuracy, and `paid` the runs that the target pays for."""
        noise = NOISES[target, paid]
        right = self.random.random(TESTED) < level
        score, validation = right.mean(), self.random.binomial(HELD_OUT, level) / HELD_OUT
        run_id, self.count = f"{self.count:016x}", self.count + 1
        cell = {
            "workload": {"revision": 1, **task},
            "optimizer": {"name": label, "clip": {"rule": "automatic"}},
            "epsilon": target, "delta": DELTA, "accountant": "pld", "batch_size": 100, "epochs": 1.0, "seed": seed,
            "search": number, **({"selection": {"rule": "composed", "runs": paid}} if paid > 1 else {}),
        }  # fmt: skip
        record = {
            "schema": 1, "run_id": run_id, "cell": cell, "status": "done", "epsilon": spent(noise),
            "epsilon_target": target, "delta": DELTA, "draws": 10, "examples": 1000, "tested": TESTED,
            "validation_accuracy": validation, "test_accuracy": score, "seconds_cpu": 360.0, "provenance": {},
            "noise": {"gradient": noise}, "scores": {"nll": float(self.random.random()), "class_accuracy": [0.5, 0.7]},
        }  # fmt: skip
        if paid > 1:
            record["epsilon_total"] = spent(noise, paid)
            record["released_score"] = {"value": validation + self.random.normal(0, 0.1), "std": 0.1, "noise": 5.0}
        if task["name"] != "no_bits":
            packed = zlib.compress(np.packbits(right).tobytes(), 9)
            record["right"] = base64.b64encode(packed).decode()
        marks = [{"draw": draw, "epoch": draw / 10, "test_accuracy": score * draw / 10} for draw in (3, 6, 10)]
        ledger = json.loads(ledger_of(noise).to_json())
        content = {"label": label, "tuning": tuning, "tuned": {"lr": lr} if lr else {}, "target": target}
        line = {"record": record, "ledger": ledger, "curve": marks, "entry": content | {"chosen_on": {}, **dict(entry)}}
        self.lines.setdefault(suite, []).append(line)
        return line

    def done(self):
        for suite, lines in self.lines.items():
            (self.root / suite).mkdir(parents=True)
            (self.root / suite / "suite.json").write_bytes(sealed({"suite": suite, "description": ""}))
            (self.root / suite / "runs.jsonl.xz").write_bytes(lzma.compress(b"".join(map(sealed, lines))))
        return self.root


def sealed(content):
    body = json.dumps(content)[:-1].encode()
    return body + b',"seal":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def made_up(root):
    """All tracks, bits with gaps, ties, failures, a run that is missing, a guest, and a method that two suites have."""
    maker = Published(root)
    for (place, task), target in product(enumerate(TASKS), (1.0, 3.0)):
        suite, name = "leaderboard" if place < 4 else "leaderboard_more", task["name"]
        for seed in range(SEEDS + (name == "beta")):
            add, level = partial(maker.add, suite, task, target=target, seed=seed), 0.5 + 0.1 * target + 0.02 * place
            on = {"tau 1": ["alpha"] if place < 4 else ["alpha", "ViT-Ti head, GTSRB 32"]}
            resting = add("resting", level=level, entry={"chosen_on": on})
            add("default", level=level - 0.1, tuning="public", entry={"chosen_on": {"lr 0.01": []}})
            add("dp_adam", level=level - 0.05 * place, entry={"gradients_per_draw": 2.0})
            add("by_hand", level=level, tuning="fixed", lr=0.3)
            for number, lr in enumerate((0.1, 1.0)):
                paid = add("paid", level=level - 0.1 * number, tuning="grid", lr=lr, paid=2, number=number)
                add("free", level=level, tuning="grid", lr=lr, number=number)
            twin = add("twin", level=level)
            if name == "gamma":  # the same records right, so the same rank
                twin["record"] |= {key: resting["record"][key] for key in ("right", "test_accuracy")}
            if name != "alpha":
                add("guest", level=0.95, entry={"chosen_on": {"kappa 2": ["beta"]}})
            if (name, seed) == ("delta", 1):
                twin["record"]["status"] = "diverged"
            if (name, seed) == ("delta", 2):
                del twin["record"]["right"]
            if (name, seed, target) == ("beta", 3, 3.0):  # planned, and not ended
                record = paid.pop("record")
                paid["entry"] |= {key: record[key] for key in ("run_id", "cell")}
                del paid["ledger"], paid["curve"]
            if name == "alpha":
                maker.add("leaderboard_more", task, "resting", target, seed, 0.01)
    return maker.done()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of made-up suites, and the page that the package makes of it."""
    root = tmp_path_factory.mktemp("again")
    results = made_up(root / "published")
    suites, to = "suite=[leaderboard,leaderboard_more]", root / "page"
    assert main(["leaderboard", suites, f"results={results}", "against=paid", f"to={to}"]) == 0
    return results, to


@pytest.fixture(scope="module")
def board(published):
    return reference.Leaderboard(published[0], "paid")


def test_a_page_is_what_a_script_without_the_package_makes_of_its_runs(board, published):
    of = reference.compare(board, published[1])
    assert of.differences == []
    assert of.count > 3000
    assert of.skipped == {"clip", "note"}


def test_it_shares_no_code_with_the_package():
    for module in (reference, reference.privacy_loss):
        assert not [name for name in imports(Path(module.__file__).read_text()) if name.startswith("dpopt")]


def test_it_has_what_it_is_about(board, published):
    """Bits and runs without, both ranks, failures, and a guest without a rank."""
    records = {place: row["records"] for place, row in board.against.items()}
    assert {records["resting", name] for name in ("alpha", "beta", "gamma")} == {TESTED}
    assert all(math.isnan(records[place]) for place in (("resting", "nobits"), ("twin", "delta")))
    tracks = {label: row["track"] for label, row in board.table.items()}
    assert tracks["default"] == "public constant"
    assert {label for label, track in tracks.items() if track == reference.FREE} == {"free", "by_hand"}
    ranks, unseen = (
        {label: row[key] for label, row in board.table.items() if not math.isnan(row[key])}
        for key in ("rank", "unseen")
    )
    assert ranks.keys() == unseen.keys() == {"resting", "default", "dp_adam", "paid", "twin"}
    assert ranks != unseen
    assert board.friedman is not None
    assert reference.labels_of(published[1])["DP-Adam"] == "dp_adam", "a page has names that are read"


@pytest.mark.parametrize("name", [".csv", "_scores.csv", "_against.csv", ".md"])
def test_a_number_that_was_changed_shows(board, published, tmp_path, name, capsys, monkeypatch):
    monkeypatch.setattr(reference, "Leaderboard", lambda *_: board)
    for path in published[1].glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / f"leaderboard{name}"
    text = path.read_text()
    start = text.index("resting")
    at = start + re.search(r"(?<=\d\.)\d\d", text[start:]).start()  # the first decimals of that row
    path.write_text(text[:at] + str((int(text[at]) + 5) % 10) + text[at + 1 :])
    assert reference.main(published[0], tmp_path) == 1
    assert " 1 differ." in capsys.readouterr().out


@pytest.mark.slow
def test_the_published_page_is_what_its_runs_say(capsys):
    assert reference.main(ROOT / "results" / "published", ROOT / "docs" / "leaderboard") == 0, capsys.readouterr().out
