"""A user with a wheel, in a folder of his own: his photographs and his CSV file, a suite, a run, a table."""

import re

import numpy as np
import pandas as pd
from PIL import Image

from dpopt.cli import main

SUITE = """
defaults: [suite, _self_]
workloads:
  - {name: table, data: mine, hidden: 0, validation: 30}
  - {name: images, data: flowers, architecture: two_conv}
optimizers: [dp_sgd]
settings: {dp_sgd: {tuning: fixed, fields: {lr: 1}}}
epsilon: 8
epochs: 4
batch_size: 32
accountant: rdp
seeds: 0
engine: inline
device: cpu
"""


def said(capsys, *words):
    code, printed = main(words), capsys.readouterr()
    assert code == 0, printed.err
    return printed.out + printed.err


def test_data_of_ones_own_are_run_and_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    generator = np.random.default_rng(0)
    age = generator.uniform(0, 100, 400)
    pd.DataFrame({"age": age, "is_old": age > 50}).to_csv("mine.csv", index=False)
    for name, mean in (("rose", 60), ("tulip", 190)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(40):
            pixels = generator.normal(mean, 20, (8, 8)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    said(capsys, "new", "data", "mine", "from=mine.csv", "target=is_old", "ranges.age=[0,100]")
    said(capsys, "new", "data", "flowers", "from=photos")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "own.yaml").write_text(SUITE)
    assert "2 distinct cells" in said(capsys, "plan", "suite=own")
    assert "2 cells run, 0 were done, 0 failed" in said(capsys, "run", "suite=own")
    table = said(capsys, "table", "suite=own", "scores=auc")
    rows = {line.split("@")[0]: line for line in table.splitlines() if line.startswith(("table", "images"))}
    assert float(re.search(r"dp_sgd\W+([\d.]+)", rows["table(data=mine"])[1]) > 85
    assert "images(data=flowers" in rows
    assert "auc" in table
    assert "0 mismatches" in said(capsys, "verify")
