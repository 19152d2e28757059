"""The page of a leaderboard against `reference.leaderboard`, which shares no code with the package."""

import base64
import hashlib
import json
import lzma
import math
import re
import zlib
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


def ledger_of(noise):
    return Ledger([Draw(0.1, (noise,))] * 10)


class Published:
    """Writes made-up runs in the stored format: sealed lines of JSON, packed."""

    def __init__(self, root):
        self.root, self.lines, self.random, self.count = root, {}, np.random.default_rng(0), 0
        self.spent = {}

    def epsilon(self, noise, runs=1):
        key = noise, runs
        if key not in self.spent:
            self.spent[key] = epsilon_of(Ledger([Draw(0.1, (noise,))] * (10 * runs)), DELTA)
        return self.spent[key]

    def add(self, suite, task, label, target, seed, level, tuning="self", lr=None, paid=1, number=0, entry=(), **more):
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
            "schema": 1, "run_id": run_id, "cell": cell, "status": "done", "epsilon": self.epsilon(noise),
            "epsilon_target": target, "delta": DELTA, "draws": 10, "examples": 1000, "tested": TESTED,
            "validation_accuracy": validation, "test_accuracy": score, "seconds_cpu": 360.0, "provenance": {},
            "noise": {"gradient": noise}, "scores": {"nll": float(self.random.random()), "class_accuracy": [0.5, 0.7]},
        }  # fmt: skip
        if paid > 1:
            record["epsilon_total"] = self.epsilon(noise, paid)
            record["released_score"] = {"value": validation + self.random.normal(0, 0.1), "std": 0.1, "noise": 5.0}
        if task["name"] != "no_bits":
            packed = zlib.compress(np.packbits(right).tobytes(), 9)
            record["right"] = base64.b64encode(packed).decode()
        marks = [{"draw": draw, "epoch": draw / 10, "test_accuracy": score * draw / 10} for draw in (3, 6, 10)]
        ledger = json.loads(ledger_of(noise).to_json())
        content = {"label": label, "tuning": tuning, "tuned": {"lr": lr} if lr else {}, "target": target}
        content |= {"chosen_on": {}, **dict(entry)}
        line = {"record": record | more, "ledger": ledger, "curve": marks, "entry": content}
        self.lines.setdefault(suite, []).append(line)
        return line

    def lose(self, line):
        """Let a run be one that was planned and has not ended."""
        entry = line["entry"] | {"run_id": line["record"]["run_id"], "cell": line["record"]["cell"]}
        line.clear()
        line["entry"] = entry

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
    for place, task in enumerate(TASKS):
        suite, name = "leaderboard" if place < 4 else "leaderboard_more", task["name"]
        for target in (1.0, 3.0):
            for seed in range(SEEDS + (name == "beta")):
                of, level = (suite, task), 0.5 + 0.1 * target + 0.02 * place

                def add(label, level, tuning="self", of=of, target=target, seed=seed, **more):
                    return maker.add(*of, label, target, seed, level, tuning, **more)

                on = {"tau 1": ["alpha"]} if place < 4 else {"tau 1": ["alpha", "ViT-Ti head, GTSRB 32"]}
                resting = add("resting", level, entry={"chosen_on": on})
                add("default", level - 0.1, "public", entry={"chosen_on": {"lr 0.01": []}})
                add("rule", level - 0.05 * place, entry={"gradients_per_draw": 2.0})
                add("by_hand", level, "fixed", lr=0.3)
                for number, lr in enumerate((0.1, 1.0)):
                    paid = add("paid", level - 0.1 * number, "grid", lr=lr, paid=2, number=number)
                    add("free", level, "grid", lr=lr, number=number)
                if name == "gamma":  # the same records right, so the same rank
                    twin = add("twin", level)
                    twin["record"] |= {key: resting["record"][key] for key in ("right", "test_accuracy")}
                else:
                    twin = add("twin", level)
                if name != "alpha":
                    add("guest", 0.95, entry={"chosen_on": {"kappa 2": ["beta"]}})
                if (name, seed) == ("delta", 1):
                    twin["record"]["status"] = "diverged"
                if (name, seed) == ("delta", 2):
                    del twin["record"]["right"]
                if (name, seed, target) == ("beta", 3, 3.0):
                    maker.lose(paid)
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


def test_a_page_is_what_a_script_without_the_package_makes_of_its_runs(published):
    of = reference.compare(*published)
    assert of.differences == []
    assert of.count > 3000
    assert of.skipped == {"clip", "is_refined", "note"}


def test_it_shares_no_code_with_the_package():
    assert not [name for name in imports(Path(reference.__file__).read_text()) if name.startswith("dpopt")]


def test_it_has_what_it_is_about(published):
    """Bits and runs without, both ranks, failures, and a guest without a rank."""
    board = reference.Leaderboard(published[0], "paid")
    records = {place: row["records"] for place, row in board.against.items()}
    assert {records["resting", name] for name in ("alpha", "beta", "gamma")} == {TESTED}
    assert all(math.isnan(records[place]) for place in (("resting", "nobits"), ("twin", "delta")))
    assert board.tracks["default"] == "public constant"
    assert {label for label, track in board.tracks.items() if track == reference.FREE} == {"free", "by_hand"}
    ranks = board.ranks
    assert set(ranks["rank"]) == set(ranks["unseen"]) == {"resting", "default", "rule", "paid", "twin"}
    assert ranks["rank"] != ranks["unseen"]
    assert board.friedman is not None


@pytest.mark.parametrize("name", [".csv", "_scores.csv", "_against.csv", ".md"])
def test_a_number_that_was_changed_shows(published, tmp_path, name, capsys):
    (results, page), name = published, f"leaderboard{name}"
    for path in page.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = (tmp_path / name).read_text()
    first = re.search(r"(?<=\d\.)\d\d", text[(start := text.index("resting")) :])  # the first decimals of that row
    at = start + first.start()
    (tmp_path / name).write_text(text[:at] + str((int(text[at]) + 5) % 10) + text[at + 1 :])
    assert reference.main(results, tmp_path) == 1
    assert " 1 differ." in capsys.readouterr().out


@pytest.mark.slow
def test_the_published_page_is_what_its_runs_say(capsys):
    assert reference.main(ROOT / "results" / "published", ROOT / "docs" / "leaderboard") == 0, capsys.readouterr().out
