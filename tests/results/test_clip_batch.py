"""Which methods need C and B tuned, on made-up runs whose answer is counted by hand."""

import math
from itertools import product
from pathlib import Path
from runpy import run_path

import numpy as np
import pandas as pd
import pytest
from intervals import student
from matplotlib.text import Text

from dpopt.results import clip_batch, figures
from dpopt.results.clip_batch import GAINED, LOST, NO_CLIP
from dpopt.results.drawing import styles_of
from dpopt.results.results import Results

ROOT = Path(__file__).parents[2]
(ANSWER,) = figures.plots(ROOT / "plots", "clip_batch_answer")
SIZES, CLIPS = (32, 128, 512), (0.1, 1.0, 20.0)
TESTS = {32: (0.80, 0.86, 0.50), 128: (0.84, 0.88, 0.70), 512: (0.90, 0.60, 0.40)}
"""Test accuracy by B, for each C: B = 512 and C = 0.1 is the best."""
SEEDS = (0.00, 0.01, -0.01)


def runs(label, tests, validations=None, clips=CLIPS, epsilon=1.0, seeds=SEEDS):
    """A method's runs; `tests` and `validations`, by default the same, give a score for B, place of C and seed."""
    rows = []
    for size, (place, clip), seed in product(SIZES, enumerate(clips), range(len(seeds))):
        cell = {"label": label, "epsilon_target": epsilon, "batch_size": size, "clip": clip, "seed": seed}
        scores = [score(size, place, seed) for score in (tests, validations or tests)]
        rows.append(cell | dict(zip(("test_score", "selected_by"), scores, strict=True)))
    return pd.DataFrame(rows).assign(workload="easy", epochs=10.0, score="accuracy")


def adam(**more):
    """Validates best at B = 128 and C = 1, not where the test score is the best; seeds agree but for noise."""
    return runs(
        "adam",
        lambda size, place, seed: TESTS[size][place] + SEEDS[seed] * (size == 128),
        lambda size, place, seed: 0.9 if (size, place) == (128, 1) else 0.5,
        **more,
    )


def automatic(**more):
    """A method without C, whose seeds disagree on B = 32 and 128; B = 512 is never chosen."""
    validations, tests = {32: (0.9, 0.5, 0.5), 128: (0.1, 0.6, 0.6), 512: [0.0] * 3}, {32: 0.7, 128: 0.8, 512: 0.6}
    of = (lambda size, place, seed: tests[size], lambda size, place, seed: validations[size][seed])
    return runs("auto", *of, clips=(math.nan,), **more)


def effect(frame, label, effect, part):
    (row,) = frame.query("label == @label and effect == @effect and part == @part").to_dict("records")
    return row


@pytest.fixture(scope="module")
def both():
    return pd.concat([adam(), automatic()], ignore_index=True)


def test_a_step_away_from_the_cell_that_validates_best(both):
    numbers = clip_batch.effects(both)
    # B = 128 and C = 1 has 88 points; its neighbours 84 and 70 along C (with the same seed), 86 and 60 along B.
    assert effect(numbers, "adam", LOST, "C")["mean"] == pytest.approx(88 - (84 + 70) / 2)
    along_b = effect(numbers, "adam", LOST, "B")
    by_seed = 100 * (0.88 + np.array(SEEDS)) - (86 + 60) / 2
    expected = [by_seed.mean(), *student(by_seed), 3]
    assert [along_b[key] for key in ("mean", "low", "high", "seeds")] == pytest.approx(expected)
    # Without C there is no step in C. B = 32 validates best by its mean, and is at the edge.
    assert numbers.query("label == 'auto' and part == 'C'").empty
    assert effect(numbers, "auto", LOST, "B")["mean"] == pytest.approx(70 - 80)


def test_a_seed_is_tuned_by_the_other_seeds(both):
    numbers = clip_batch.effects(both)
    # The fixed pair has B = 128. Seed 0 alone prefers B = 32, which the mean over others takes for 1 and 2; each by its
    # own records would gain (-10 + 0 + 0) / 3.
    for part in ("B", "both"):
        assert effect(numbers, "auto", GAINED, part)["mean"] == pytest.approx((0 - 10 - 10) / 3)
    assert effect(numbers, "adam", GAINED, "both")["mean"] == pytest.approx(0)


def test_the_fixed_pair_is_one_that_all_methods_have(both):
    (block,) = clip_batch.blocks(both)
    assert clip_batch.fixed_pair(block) == (128, 1.0)
    others = block.replace({"clip": {1.0: 3.0}})
    assert clip_batch.fixed_pair(others) == (128, 3.0), "the middle where none is 1"
    fewer = block[(block["label"] == "adam") | (block["batch_size"] != 128)]
    assert clip_batch.fixed_pair(fewer) == (512, 1.0), "of 32 and 512 the larger, as one lacks 128"
    grids = clip_batch.grids(block)
    assert grids["adam", 1.0].fixed == (128, 1.0)
    assert grids["auto", 1.0].fixed == (128, NO_CLIP)


def test_methods_are_compared_on_the_values_that_all_have():
    """On a finer grid a step would cost less; a method without C takes none from the others."""
    coarse = adam(clips=(0.1, 20.0)).query("batch_size != 128").assign(label="coarse")
    (block,) = clip_batch.blocks(pd.concat([adam(), coarse, automatic()]))
    values = block.groupby("label")[["batch_size", "clip"]].agg(lambda column: sorted(set(column))).T.to_dict()
    assert values["adam"] == values["coarse"] == {"batch_size": [32, 512], "clip": [0.1, 20.0]}
    assert values["auto"] == {"batch_size": [32, 512], "clip": [NO_CLIP]}


def test_a_block_that_no_seed_has_whole_is_left_out(both):
    seeds = both["seed"].where(both["clip"] != 20.0, both["seed"] + 9)
    assert list(clip_batch.blocks(both[both["label"] == "adam"].assign(seed=seeds))) == []


def test_seeds_that_lack_a_setting_are_left_out_and_runs_that_fail_are_the_worst():
    frame = adam()
    is_missing = (frame["seed"] == 2) & (frame["batch_size"] == 512) & (frame["clip"] == 20)
    (grid,) = clip_batch.grids(next(clip_batch.blocks(frame[~is_missing]))).values()
    assert list(grid.tests) == [0, 1]
    has_failed = (frame["seed"] == 0) & (frame["batch_size"] == 128) & (frame["clip"] == 1)
    failed = frame.assign(test_score=frame["test_score"].mask(has_failed))
    failed["selected_by"] = frame["selected_by"].mask(has_failed, -math.inf)
    (grid,) = clip_batch.grids(next(clip_batch.blocks(failed))).values()
    assert grid.chosen != (128, 1.0)
    assert grid.tests.at[(128, 1.0), 0] == 40
    unscored = frame.assign(selected_by=-math.inf)
    assert clip_batch.effects(unscored).empty, "nothing is chosen by test scores"
    (frames,) = [axis.patches for axis in ANSWER.figure(unscored, styles_of(["adam"])).axes if axis.images]
    assert [patch.get_label() for patch in frames] == ["the fixed pair"]


def test_with_one_seed_nothing_is_claimed(both):
    one = both[both["seed"] == 0]
    numbers = clip_batch.effects(one)
    assert set(numbers["effect"]) == {LOST}
    assert numbers["high"].isna().all()
    assert clip_batch.claims(next(clip_batch.blocks(one))) == [clip_batch._NO_CLAIM]
    bars = [held for axis in ANSWER.figure(one, styles_of(one["label"])).axes for held in axis.containers]
    assert len(bars) == len(numbers)
    ends = [line.get_paths()[0].vertices for held in bars for line in held.lines[2] if line.get_paths()]
    assert not any(np.isfinite(end[:, 0]).any() for end in ends), "there are no intervals"


def peaked(label, cost, epsilon, noise=0.3, level=0.9, count=8):
    """A method that loses `cost` points a step in B, less noise."""
    generator = np.random.default_rng([len(label), int(8 * epsilon)])
    errors = {size: generator.normal(0, noise / 100, count) for size in SIZES}

    def test(size, place, seed):
        return level - cost / 100 * (size != 128) + errors[size][seed]

    return runs(label, test, lambda size, place, seed: float(size == 128), (math.nan,), epsilon, range(count))


def test_the_title_says_what_seeds_show():
    clear = [peaked("steep", 12, 8.0), peaked("steep", 12, 1.0), peaked("middling", 6, 8.0), peaked("middling", 6, 1.0)]
    clear += [peaked("flat", 1, 8.0), peaked("flat", 3, 1.0), peaked("failing one", 0, 8.0, level=0.1)]
    (block,) = clip_batch.blocks(pd.concat([*clear, peaked("failing one", 0, 1.0, level=0.1)]))
    first, change, left_out = clip_batch.claims(block)
    needs = clip_batch.needs(clip_batch.grids(block)).mean()
    assert needs["flat"] == pytest.approx(2, abs=0.5)
    beginning = f"Needs C and B tuned least: flat ({needs['flat']:.1f}); most: steep ({needs['steep']:.1f})"
    assert first.startswith(beginning)
    assert change == "At ε = 1 a step costs more in B for flat than at ε = 8."
    assert left_out == "Not compared, as more than 20 points behind: failing one."
    assert clip_batch.by_need(clip_batch.grids(block)) == ["flat", "middling", "steep", "failing one"]


def test_the_title_claims_nothing_of_methods_that_are_alike():
    alike = [peaked(label, 4, target, noise=3) for label, target in product(("a", "bb", "ccc"), (1.0, 8.0))]
    claims = clip_batch.claims(next(clip_batch.blocks(pd.concat(alike))))
    nothing = "No step is shown to cost more or less at ε = 1 than at 8."
    assert claims == [clip_batch._NO_CLAIM, nothing]
    assert clip_batch.claims(next(clip_batch.blocks(pd.concat(alike[:2])))) == [nothing], "of one method"


@pytest.fixture(scope="module")
def two(both):
    """At two epsilons."""
    return pd.concat([both, adam(epsilon=8.0), automatic(epsilon=8.0)], ignore_index=True)


@pytest.fixture(scope="module")
def drawn(two):
    figure = ANSWER.figure(two, styles_of(two["label"]))
    return figure, {axis.get_ylabel(): axis for axis in figure.axes if axis.images and axis.get_ylabel()}


def test_the_maps_show_what_is_lost_on_one_scale(drawn):
    _, maps = drawn
    assert list(maps) == ["auto", "adam"], "in order of need"
    assert {axis.images[0].get_clim() for axis in maps.values()} == {(0, 20)}
    expected = 90 - 100 * np.array([TESTS[size] for size in SIZES])
    assert np.asarray(maps["adam"].images[0].get_array()) == pytest.approx(expected)
    texts = {text.get_position(): text for text in maps["adam"].texts}
    assert [texts[0, 2].get_text(), texts[0, 2].get_weight()] == ["90", "bold"]
    assert [texts[2, 0].get_text(), texts[2, 0].get_weight()] == ["−40", "normal"]
    for patch in maps["adam"].patches:
        middle = patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2
        assert middle == pytest.approx((1, 1)), patch.get_label()
    assert {patch.get_label() for patch in maps["adam"].patches} == {"validates best", "the fixed pair"}


def test_a_method_without_a_bound_has_one_wide_column(drawn):
    figure, maps = drawn
    assert [text.get_text() for text in maps["auto"].get_xticklabels()] == ["no C"]
    assert maps["auto"].images[0].get_array().shape == (3, 1)
    assert maps["auto"].get_position().width == pytest.approx(maps["adam"].get_position().width)
    dots = [axis for axis in figure.axes if "no C" in [text.get_text() for text in axis.get_yticklabels()]]
    assert len(dots) == 2
    assert all(held.lines[0].get_ydata()[0] > 0.5 for axis in dots for held in axis.containers)


def test_nothing_is_drawn_over_another(drawn):
    """No two texts of the figure overlap."""
    figure, _ = drawn
    figure.draw_without_rendering()
    texts = [text for axis in figure.axes for text in axis.findobj(Text)]
    boxes = [text.get_window_extent() for text in texts if text.get_visible() and text.get_text().strip()]
    for k, box in enumerate(boxes):
        assert not any(box.count_overlaps([other]) for other in boxes[k + 1 :])


def test_the_table_has_a_row_for_each_method_and_epsilon(two):
    table = clip_batch.as_table(clip_batch.effects(two))
    place = ["optimizer", "target ε"]
    assert table.frame[place].to_numpy().tolist() == [["auto", "1"], ["auto", "8"], ["adam", "1"], ["adam", "8"]]
    adams = table.frame.iloc[2]
    assert adams["C: lost a step away"] == "11.0", "seeds agree, so that there is no interval"
    assert adams["B: lost a step away"] == "15.0 ± 2.5"
    assert (2, "B: lost a step away") in table.bold
    assert table.frame.iloc[0]["C: gained"] == ""


def test_the_table_of_several_workloads_has_a_column_for_each(both):
    several = [clip_batch.effects(frame) for frame in (both, adam(epsilon=8.0).assign(workload="hard"))]
    failing = pd.concat([peaked("steady", 1, 8.0), peaked("failing", 3, 8.0, noise=0, level=0.2)])
    several.append(clip_batch.effects(failing.assign(workload="other")))
    across = run_path(str(ROOT / "benchmarks" / "clip_batch_workloads.py"))["across"]
    table = across(pd.concat(several, ignore_index=True), (1, 8))
    columns = [f"{name}, 10 epochs, ε = {target}" for name, target in (("easy", 1), ("hard", 8), ("other", 8))]
    rows = table.frame.set_index(["step in", "optimizer"])[columns]
    assert rows.loc["C"].to_dict("index") == {"adam": dict(zip(columns, ["11.0", "11.0", ""], strict=True))}
    # The numbers of the first tests: 88 against the mean of 86 and 60, and 70 against 80 with seeds alike.
    assert rows.loc[("B", "adam")].tolist() == ["15.0 ± 2.5", "15.0 ± 2.5", ""]
    assert rows.loc[("B", "auto")].tolist() == ["-10.0", "", ""]
    assert rows.loc[("B", "failing")].tolist() == ["", "", "3.0"]
    at = list(rows.index)
    assert table.italic == {(at.index(("B", "failing")), columns[2])}
    assert (at.index(("B", "adam")), columns[0]) in table.bold
    assert list(across(pd.concat(several), (1,)).frame.columns[2:]) == columns[:1]


def test_the_script_reads_suites_that_share_epsilons_and_a_report_has_the_table(maker, tmp_path):
    workloads, targets = ("digits_mlp", "mnist_mlp"), ((1.0, 2.0, 8.0), (0.5, 1.0, 8.0))
    for (number, name), size, clip, seed in product(enumerate(workloads), (64, 128), (0.1, 1.0), (0, 1)):
        for target in targets[number]:
            score, place = 0.5 + clip / 10 + (1 + number) * size / 1000, {"workload": name, "epsilon": target}
            maker.add("adadp", seed, score, score, **place, batch_size=size)
            maker.clip(clip)
    store = maker.done()
    for name in workloads:
        of_suite = [entry for entry in maker.cells if entry["cell"]["workload"]["name"] == name]
        store.extend_suite(name, {"suite": name, "description": "", "cells": of_suite})
        (store.root / name).mkdir(exist_ok=True)
    run_path(str(ROOT / "benchmarks" / "clip_batch_workloads.py"))["main"](*(store.root / name for name in workloads))
    header, _, in_c, in_b, *_ = (store.root / "digits_mlp" / "workloads.md").read_text().splitlines()
    titles = [f"{name} MLP, 20 epochs, ε = {target}" for name in ("digits", "MNIST") for target in (1, 8)]
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["step in", "optimizer", *titles]
    # A step in C is 9 points; one in B is 6.4, and twice as many on the second workload.
    shown = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in (in_c, in_b)]
    assert shown == [["C", "ADADP", "9.0", "9.0", "9.0", "9.0"], ["B", "ADADP", "6.4", "6.4", "12.8", "12.8"]]
    assert "Which methods need C and B tuned" in Results(store, "digits_mlp").report(tmp_path)


def test_a_page_holds_all_texts(two):
    """Names of methods too, at a size that can be read."""
    named = two.replace({"label": {"adam": "HyFreeDP, noise-aware, auto", "auto": "ADADP equilibrium, abadi"}})
    figure = ANSWER.figure(named, styles_of(named["label"]), 4.5)
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    boxes = [text.get_window_extent() for text in texts]
    page = figure.bbox
    for text, box in zip(texts, boxes, strict=True):
        assert page.x0 <= box.x0 < box.x1 <= page.x1 + 1, text.get_text()
        assert page.y0 - 1 <= box.y0, text.get_text()
    assert min(text.get_fontsize() for text in texts) >= 5
