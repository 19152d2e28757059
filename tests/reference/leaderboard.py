"""The leaderboard from its published runs, with nothing of the package: selection, epsilon, ranks, intervals, verdicts.

    python tests/reference/leaderboard.py [RESULTS [PAGE]]

reads RESULTS/leaderboard*/runs.jsonl.xz (results/published) and compares what follows from them with
PAGE/leaderboard*.csv and leaderboard.md (docs/leaderboard). It prints how many numbers it compared and each that
differs by more than rounding; the exit status is 1 if one does. Two things are random: a bootstrap's interval is
compared with the spread of several such bootstraps, the p of a permutation test with its error. Epsilon comes from a
privacy loss distribution on one coarse grid and is compared to `PRECISION`.

Read are suites like those of the leaderboard: a plain grid or one run for each method, one setting of B, epochs and C.
"""

import base64
import csv
import json
import lzma
import math
import re
import sys
import warnings
import zlib
from collections import Counter, defaultdict
from functools import cache
from itertools import zip_longest
from pathlib import Path

import numpy as np
from scipy import optimize, special, stats

EQUAL = 1e-9
"""Numbers of a page and of this script agree to this, relatively, and differences that vary by less are one number."""
PRECISION = 1e-3
"""Relative error of an epsilon that counts as none."""
BATCHES, SAMPLES, PERMUTATIONS = 12, 4_000, 9_999
MODELS = {"vit_tiny_patch16_224.augreg_in21k_ft_in1k": "ViT-Ti", "scatter": "scattering"}
FREE, TRACKS = "not charged", {"self": "self-tuned", "public": "public constant"}


# --- runs


def load(results):
    """The runs of all suites in their order; of suites that have a method on one task, the first counts."""
    lines, runs, owner, seen = [], {}, {}, set()
    for path in sorted(results.glob("leaderboard*/runs.jsonl.xz")):
        suite = json.loads((path.parent / "suite.json").read_text())["suite"]
        with lzma.open(path, "rt") as file:
            for line in map(json.loads, file):
                if "record" in line:
                    line["entry"]["run_id"] = line["record"]["run_id"]
                    runs[line["record"]["run_id"]] = line
                lines.append((suite, line["entry"]))
    rows = []
    for suite, entry in lines:
        run = runs.get(entry["run_id"], {})
        cell = run["record"]["cell"] if run else entry["cell"]
        task, label, target = title(cell["workload"]), entry["label"], float(entry.get("target", cell["epsilon"]))
        place = label, entry["run_id"]
        if target == math.inf or place in seen or owner.setdefault((task, label), suite) != suite:
            continue
        seen.add(place)
        rule = cell.get("selection", {"rule": "composed"})["rule"]
        if entry.get("stage") or entry.get("widen") or rule != "composed" or cell["accountant"] != "pld":
            raise ValueError(f"{entry['run_id']} of {suite}: not a plain grid by the accountant pld")
        rows.append({"task": task, "label": label, "target": target, "cell": cell, "entry": entry, **run})
    tasks = {json.dumps(row["cell"]["workload"], sort_keys=True): row["task"] for row in rows}
    if len(set(tasks.values())) < len(tasks):
        raise ValueError(f"several workloads have one name: {sorted(tasks.values())}")
    return rows, list(dict.fromkeys(suite for suite, _ in lines))


def title(workload):
    """The name of a task, as `plain` makes it of what pages print."""
    if "data" not in workload:
        return plain(workload["name"])
    model = workload.get("architecture", workload.get("encoder"))
    return plain(MODELS.get(model, model) + (workload["subset"] if workload["pretrained"] else "") + workload["data"])


def plain(name):
    return re.sub("[^a-z0-9]", "", name.lower())


def score_of(record, split):
    return record.get(f"{split}_{record.get('score', 'accuracy')}", math.nan)


def selected_by(record):
    """What a search goes by: the released score where it is charged, else that of the validation records."""
    score = record["released_score"]["value"] if "released_score" in record else score_of(record, "validation")
    return -math.inf if record["status"] == "diverged" or math.isnan(score) else score


def searches(rows):
    """(task, target, label) -> seed -> the run that its search releases, and what the search took.

    A search of which a run is missing is left out.
    """
    every = defaultdict(lambda: defaultdict(list))
    for row in rows:
        every[row["task"], row["target"], row["label"]][row["cell"]["seed"]].append(row)
    return {place: {seed: released(of) for seed, of in seeds.items() if all("record" in run for run in of)}
            for place, seeds in every.items()}  # fmt: skip


def released(runs):
    best = max(runs, key=lambda run: selected_by(run["record"]))  # of equal ones the first of the grid
    record, cells = best["record"], [run["cell"] for run in runs]
    if len({cell.get("search", 0) for cell in cells}) < len(cells):
        raise ValueError(f"runs of the search of {record['run_id']} share their draws")
    ledger = Counter()
    for run in runs:
        for kind, count in run["ledger"]["runs"]:
            draw = run["ledger"]["draws"][kind]
            ledger[draw["rate"], sum(noise**-2 for noise in draw["noises"]) ** -0.5] += count
    is_unscored = record.get("test_unscored", 0) > 0
    is_failed = record["status"] == "diverged" or not math.isfinite(score_of(record, "test")) or is_unscored
    is_failed |= len(runs) > 1 and selected_by(record) == -math.inf
    points = [run["record"]["draws"] * cell["batch_size"] * run["entry"].get("gradients_per_draw", 1.0)
              for run, cell in zip(runs, cells, strict=True)]  # fmt: skip
    return {
        "run": best,
        "runs": len(runs),
        "tried": [run["entry"]["tuned"] for run in runs],
        "failed": is_failed,
        "unscored": is_unscored,
        "test": math.nan if is_failed else score_of(record, "test"),
        "epsilon": epsilon(frozenset(ledger.items()), best["cell"]["delta"]),
        "draws": sum(run["record"]["draws"] for run in runs),
        "gradients": sum(points),
    }


@cache
def epsilon(ledger, delta):
    """Of draws {((rate, noise multiplier), count)}: their privacy losses on a grid, added by a Fourier transform.

    The loss of taking a record away is log Q/P under Q = (1 - rate) N(0, s^2) + rate N(1, s^2), for P = N(0, s^2);
    that of adding one is log P/Q under P. Each is rounded to the grid, and then all are shifted so that their mean is
    exact (Gopi et al. 2021, section 5).
    """
    z = np.linspace(-12, 12, 20_001)
    normal = stats.norm.pdf(z) * (z[1] - z[0])

    def loss(rate, s, x):
        return np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + (x - 0.5) / s**2)

    spread = math.sqrt(sum(count * (normal @ loss(rate, s, s * z) ** 2) for (rate, s), count in ledger))
    size, reach = 2**18, 20 * spread + 5
    h = 2 * reach / size
    index = np.arange(size) - size // 2
    edges = np.append(index - 0.5, index[-1] + 0.5) * h
    values = []
    for is_removed in (True, False):
        spectrum, shift = 1.0, 0.0
        for (rate, s), count in ledger:
            at = edges if is_removed else -edges
            with np.errstate(divide="ignore", over="ignore"):
                x = 0.5 + s**2 * np.log(np.maximum((np.expm1(at) + rate) / rate, 0))
            share = rate if is_removed else 0.0
            p = np.abs(np.diff((1 - share) * special.ndtr(x / s) + share * special.ndtr((x - 1) / s)))
            of_p, of_q = (normal @ loss(rate, s, s * z + mean) for mean in (0, 1))
            shift += count * ((1 - rate) * of_p + rate * of_q if is_removed else -of_p) - count * (p @ (index * h))
            spectrum = spectrum * np.fft.rfft(np.fft.ifftshift(p)) ** count
        p = np.fft.fftshift(np.fft.irfft(spectrum, size))
        points = index * h + shift

        def excess(value, points=points, p=p):
            above = points > value
            return -np.expm1(value - points[above]) @ p[above] - delta

        values.append(optimize.brentq(excess, 0, points[-1]) if excess(0) > 0 else 0.0)
    return max(values)


# --- statistics


def standing(scores):
    """For scores [seeds, methods]: p that no method is better, and the difference that can be seen.

    One-sided paired t tests over the seeds that two methods share, times the number of rivals.
    """
    pairs = scores[:, None, :] - scores[:, :, None]
    count = np.isfinite(pairs).sum(axis=0)
    np.fill_diagonal(count, 0)
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):  # of equal differences, see below
        mean, spread = np.nanmean(pairs, axis=0), np.nanstd(pairs, axis=0, ddof=1)
        p = stats.ttest_1samp(pairs, 0, axis=0, alternative="greater", nan_policy="omit").pvalue
    p = np.where(spread > EQUAL, np.asarray(p), np.where(mean > EQUAL, 0.5**count, 1.0))
    p[count < 3] = np.inf
    rivals = np.isfinite(p).sum(axis=1)
    ps = [min(1.0, n * least) if n else math.nan for n, least in zip(rivals, p.min(axis=1), strict=True)]
    seen = [stats.t.isf(0.05 / min(rivals[i], rivals[j]), count[i, j] - 1) * spread[i, j] / math.sqrt(count[i, j])
            for i in range(len(p)) for j in range(i) if count[i, j] > 2]  # fmt: skip
    return np.array(ps), float(np.median(seen)) if seen else math.nan


def reach(metric):
    """The least and the largest score that there can be."""
    return (0, 1) if metric.endswith("accuracy") else (-math.inf, math.inf)


def marks(labels, scores, is_scored):
    """ "**" for the highest mean of those that are compared, "†" for others that may be the best."""
    p, _ = standing(scores)
    means = np.round(np.nanmean(scores, axis=0), 12)
    is_compared = is_scored & ~np.isnan(p)
    for label, mean, value, is_in in zip(labels, means, p, is_compared, strict=True):
        is_first = is_in and mean == means[is_compared].max()
        yield label, "**" if is_first else "†" if is_in and value > 0.05 else ""


def expected_score(scores, tested, reach):
    """Student's interval over seeds and Wilson's over test records, whose distances from the mean add as squares."""
    mean, n = scores.mean(), len(scores)
    if not math.isfinite(mean) or n < 3:
        return math.nan, math.nan
    ends = np.full(2, mean)
    if np.ptp(scores) > 0:
        ends = np.array(stats.t.interval(0.95, n - 1, mean, stats.sem(scores)))
    if not math.isnan(tested):  # Wilson: |mean - x| = z sqrt(x (1 - x) / n)
        square = stats.norm.isf(0.025) ** 2 / tested
        wilson = np.sort(np.roots([1 + square, -2 * mean - square, mean**2]).real)
        ends = mean + np.array([-1, 1]) * np.hypot(ends - mean, wilson - mean)
    return tuple(np.clip(ends, *reach))


def over_seeds(differences, tasks):
    """Mean, interval and p of paired differences by Student, with Bonferroni's correction for the tasks of a row."""
    n, mean = len(differences), differences.mean()
    if n < 3:
        return mean, math.nan, math.nan, math.nan
    if np.ptp(differences) <= EQUAL:
        return mean, math.nan, math.nan, min(1.0, tasks * (2.0 ** (1 - n) if abs(mean) > EQUAL else 1.0))
    test = stats.ttest_1samp(differences, 0)
    return mean, *test.confidence_interval(1 - 0.05 / tasks), min(1.0, tasks * test.pvalue)


def crossed(differences, tasks):
    """The same for differences [seeds, records], with the error of both: the variance of the mean is

    var(rest)/(nS), and what var(means of seeds)/S and var(means of records)/n are more than that.
    """
    (seeds, records), mean = differences.shape, differences.mean()
    if min(seeds, records) == 1:
        return mean, math.nan, math.nan, math.nan
    of_seed, of_record = differences.mean(axis=1), differences.mean(axis=0)
    rest = differences - of_seed[:, None] - of_record + mean
    free = np.array([seeds - 1, records - 1, (seeds - 1) * (records - 1)])
    both = (rest**2).sum() / free[2] / rest.size
    parts = np.array([of_seed.var(ddof=1) / seeds, of_record.var(ddof=1) / records, both])
    variance = parts[2] + max(parts[0] - parts[2], 0) + max(parts[1] - parts[2], 0)
    if variance * rest.size <= EQUAL**2:
        return mean, mean, mean, float(abs(mean) <= EQUAL)
    degrees, error = variance**2 / (parts**2 / free).sum(), math.sqrt(variance)
    p = min(1.0, tasks * 2 * stats.t.sf(abs(mean) / error, degrees))
    return mean, *stats.t.interval(1 - 0.05 / tasks, degrees, mean, error), p


# --- blocks: (task, budget) -> label -> seed -> entry


def blocks_of(chosen, ranked, by):
    """The scores that equal total epsilon, or equal draws or gradients, let methods reach."""
    blocks = {}
    for task in dict.fromkeys(place[0] for place in chosen):
        of_task = {place[1:]: seeds for place, seeds in chosen.items() if place[0] == task and place[2] in ranked}
        for budget in sorted({target for target, _ in of_task}):
            make = at_epsilon if by == "epsilon" else at_cost
            if block := make(of_task, budget, by):
                blocks[task, budget] = block
    return blocks


def nothing(entry):
    return entry | {"test": math.nan, "failed": False, "lacking": True}


def at_epsilon(of_task, budget, _):
    block = {}
    for label in dict.fromkeys(label for _, label in of_task):
        totals = {target: max(entry["epsilon"] for entry in seeds.values())
                  for (target, other), seeds in of_task.items() if other == label and seeds}  # fmt: skip
        fitting = [target for target in totals if totals[target] <= budget * (1 + PRECISION)]
        largest = max(fitting, key=totals.get) if fitting else None
        entries = of_task[largest, label] if fitting else of_task[next(iter(totals)), label]
        block[label] = {seed: entry if fitting else nothing(entry) for seed, entry in entries.items()}
    return block


def at_cost(of_task, target, by):
    """All methods have as much as the cheapest takes; the runs of a search advance together."""
    block = {label: seeds for (other, label), seeds in of_task.items() if other == target}
    costs = [[entry[by] for entry in seeds.values() if not entry["failed"]] for seeds in block.values()]
    budget = min((max(cost) for cost in costs if cost), default=None)
    if budget is None:
        return {}
    return {label: {seed: stopped(entry, by, budget * (1 + 1e-6)) for seed, entry in seeds.items()}
            for label, seeds in block.items()}  # fmt: skip


def stopped(entry, by, budget):
    if entry["failed"] or entry[by] <= budget:
        return entry
    record, curve = entry["run"]["record"], entry["run"].get("curve", [])
    passed = [mark for mark in curve if mark["draw"] * entry[by] / record["draws"] <= budget]
    if not passed:
        return nothing(entry)
    test = score_of(record | {"test_loss": None} | passed[-1], "test")
    is_unscored = passed[-1].get("test_unscored", 0) > 0
    is_failed = test is None or not math.isfinite(test) or is_unscored
    return entry | {"test": math.nan if is_failed else test, "failed": is_failed, "unscored": is_unscored}


def flagged(block, flag):
    return {label for label, seeds in block.items() if any(entry.get(flag) for entry in seeds.values())}


def scores_of(block):
    """Labels and scores [seeds, labels] over the seeds that all have; failures have the worst score of the block.

    A method without any score has -inf; left out are those with test records without a finite score, and those that
    the budget lets reach nothing.
    """
    labels = [label for label in block if label not in flagged(block, "unscored") | flagged(block, "lacking")]
    seeds = sorted(set.intersection(*(set(block[label]) for label in labels))) if labels else []
    tests = np.array([[block[label][seed]["test"] for label in labels] for seed in seeds])
    tests = tests.reshape(len(seeds), len(labels))
    if len(block) < 2 or np.isnan(tests).all():
        return labels, None, tests
    scores = np.where(np.isnan(tests), np.nanmin(tests), tests)
    scores[:, np.isnan(tests).all(axis=0)] = -np.inf
    return labels, scores, tests


def everywhere(blocks):
    """The methods that have a score or share the last rank in every block, and their scores: task -> [block]."""
    scored = {place: scores_of(block) for place, block in blocks.items()}
    scored = {place: (labels, scores) for place, (labels, scores, _) in scored.items() if scores is not None}
    if not scored:
        return [], {}
    labels = [label for label in next(iter(scored.values()))[0] if all(label in names for names, _ in scored.values())]
    tasks = defaultdict(list)
    for (task, _), (names, scores) in scored.items():
        tasks[task].append(scores[:, [names.index(label) for label in labels]])
    return labels, dict(tasks)


def ranks_of(scores):
    """Ranks [..., methods] by the means over seeds of scores [..., seeds, methods]."""
    return stats.rankdata(-np.round(scores.mean(axis=-2), 12), axis=-1)


def by_task(tasks):
    return np.array([np.mean([ranks_of(scores) for scores in blocks], axis=0) for blocks in tasks.values()])


def averages(labels, tasks):
    """Label -> average rank, over the blocks of a task first and then over tasks."""
    return dict(zip(labels, by_task(tasks).mean(axis=0), strict=True)) if labels and tasks else {}


def bootstrap(tasks):
    """Ends [batch, end, method] of bootstrap intervals: tasks are drawn with replacement, and seeds in each of them."""
    generator, names = np.random.default_rng(1), list(tasks)
    ends = []
    for _ in range(BATCHES):
        total = np.zeros((SAMPLES, tasks[names[0]][0].shape[1]))
        drawn = generator.integers(len(names), size=(SAMPLES, len(names)))
        for number, name in enumerate(names):
            rows, _ = np.nonzero(drawn == number)
            shares, ranks = generator.random((len(rows), max(map(len, tasks[name])))), 0.0
            for scores in tasks[name]:  # the same seeds for all budgets of a task
                seeds = np.floor(shares[:, : len(scores)] * len(scores)).astype(int)
                ranks = ranks + ranks_of(scores[seeds])
            np.add.at(total, rows, ranks / len(tasks[name]))
        ends.append(np.quantile(total / len(names), [0.025, 0.975], axis=0))
    return np.array(ends)


def friedman(ranks):
    """p of Friedman's test for ranks [tasks, methods], by permuting methods within tasks."""
    generator, centred = np.random.default_rng(1), ranks - ranks.mean(axis=1, keepdims=True)
    least = (centred.sum(axis=0) ** 2).sum() * (1 - EQUAL)
    several = (generator.permuted(centred, axis=1).sum(axis=0) for _ in range(PERMUTATIONS))
    return (1 + sum((sums**2).sum() >= least for sums in several)) / (1 + PERMUTATIONS)


def critical_difference(tasks, methods):
    """Nemenyi's, of two average ranks."""
    quantile = stats.studentized_range.ppf(0.95, methods, np.inf) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * tasks))


def bits(text, count):
    """The bits [count] that a record keeps of its test records."""
    return np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8), count=count).astype(float)


def against(blocks, baseline):
    """(label, task) -> its row: the differences from one method, averaged over the budgets of a task."""
    pairs = {}
    for task in dict.fromkeys(task for task, _ in blocks):
        of_task = [block for (other, _), block in blocks.items() if other == task]
        left_out = [flagged(block, "lacking") | flagged(block, "unscored") for block in of_task]
        worst = [min((entry["test"] for seeds in block.values() for entry in seeds.values()
                      if not math.isnan(entry["test"])), default=math.nan) for block in of_task]  # fmt: skip
        for label in dict.fromkeys(label for block in of_task for label in block):
            if label == baseline or any(
                not {label, baseline} <= block.keys() - out for block, out in zip(of_task, left_out, strict=True)
            ):
                continue
            seeds = sorted(set.intersection(*(set(block[name]) for block in of_task for name in (label, baseline))))
            entries = {name: [[block[name][seed] for block in of_task] for seed in seeds] for name in (label, baseline)}
            failed, tests = (
                {name: np.array([[entry[key] for entry in of] for of in entries[name]]).reshape(len(seeds), -1)
                 for name in entries} for key in ("failed", "test")
            )  # fmt: skip
            scores = {name: np.where(failed[name], worst, tests[name]) for name in entries}
            differences = (scores[label] - scores[baseline]).mean(axis=1)
            differences = differences[np.isfinite(differences)]
            if len(differences):
                score = next(entry["run"]["record"].get("score", "accuracy") for entry in entries[label][0])
                table = by_record(entries[label], entries[baseline])
                pairs[label, task] = differences, {"score": score, "blocks": len(of_task)}, table
    counts, rows = Counter(label for label, _ in pairs), {}
    for (label, task), (differences, place, table) in pairs.items():
        of = over_seeds(differences, counts[label]) if table is None else crossed(table, counts[label])
        row = dict(zip(("mean", "low", "high", "p"), of, strict=True))
        widest = np.subtract(*reach(place["score"])[::-1])
        row |= {end: np.clip(row[end], -widest, widest) for end in ("low", "high")}
        row |= place | {"seeds": len(differences), "records": math.nan if table is None else table.shape[1]}
        rows[label, task] = row | {"verdict": int(np.sign(row["mean"])) if row["p"] < 0.05 else 0}
    return rows


def by_record(ours, theirs):
    """Differences [seeds, records] on each test record, averaged over budgets; None unless every run has its bits."""
    every = [entry for of in (*ours, *theirs) for entry in of]
    records = [entry["run"]["record"] for entry in every]
    if any(entry["failed"] for entry in every) or any("right" not in record for record in records):
        return None
    if len({record["tested"] for record in records}) > 1:
        return None

    def right(of):
        return np.mean([bits(entry["run"]["record"]["right"], records[0]["tested"]) for entry in of], axis=0)

    return np.array([right(of) for of in ours]) - np.array([right(of) for of in theirs])


# --- the leaderboard


class Leaderboard:
    """All that a page shows of the runs in a folder of published suites."""

    def __init__(self, results, baseline):
        self.rows, self.suites = load(results)
        self.searches = searches(self.rows)
        self.tasks = list(dict.fromkeys(row["task"] for row in self.rows))
        self.labels = list(dict.fromkeys(row["label"] for row in self.rows))
        self.scores = {place: self._score(place, seeds) for place, seeds in self.searches.items() if seeds}
        self._compare()
        self.tracks = {label: self._track(label) for label in self.labels}
        self.chosen_on = {label: self._chosen_on(label) for label in self.labels}
        ranked = {label for label in self.labels if self.tracks[label] != FREE}
        self.blocks = blocks_of(self.searches, ranked, "epsilon")
        self.best = {}
        for place, block in self.blocks.items():
            labels, scores, tests = scores_of(block)
            if scores is not None:
                filled = np.where(np.isnan(tests), np.nanmin(tests), tests)
                self.best |= {(*place, label): mark for label, mark in marks(labels, filled, scores[0] > -np.inf)}
        names, tasks = everywhere(self.blocks)
        known = {task for label in names for task in self.chosen_on[label]}
        self.ranks = {
            "rank": averages(names, tasks),
            "unseen": averages(names, {task: of for task, of in tasks.items() if task not in known}),
            **{by: averages(*everywhere(blocks_of(self.searches, ranked, by))) for by in ("draws", "gradients")},
        }
        self.ends, self.noise, self.friedman, self.critical = {}, {}, None, math.nan
        self.step = 0.5 / max(1, sum(map(len, tasks.values())))  # average ranks are multiples of it
        if names:
            ends = bootstrap(tasks)
            self.ends = dict(zip(names, ends.mean(axis=0).T, strict=True))
            self.noise = dict(zip(names, ends.std(axis=0, ddof=1).T, strict=True))
        if len(tasks) >= 6 and len(names) > 1:
            self.friedman, self.critical = friedman(by_task(tasks)), critical_difference(len(tasks), len(names))
        self.against = against(self.blocks, baseline) if baseline else {}

    def is_known(self, label, task):
        return task in self.chosen_on[label]

    def hours(self, label=None):
        """CPU hours of the runs of a method, or of all."""
        runs = {row["entry"]["run_id"]: row["record"].get("seconds_cpu", math.nan) for row in self.rows
                if label in (None, row["label"]) and "record" in row}  # fmt: skip
        seconds = [value for value in runs.values() if not math.isnan(value)]
        return sum(seconds) / 3600 if seconds else math.nan

    def _chosen_on(self, label):
        entries = [row["entry"].get("chosen_on", {}) for row in self.rows if row["label"] == label]
        return {plain(task) for entry in entries for tasks in entry.values() for task in tasks}

    def _track(self, label):
        rows = [row for place, row in self.scores.items() if place[2] == label]
        tunings = {row["tuning"] for row in rows}
        track = TRACKS.get(*tunings, "searched, charged") if len(tunings) == 1 else "searched, charged"
        return FREE if any(row["is_reference"] for row in rows) else track

    def _score(self, place, seeds):
        task, target, label = place
        every, records = list(seeds.values()), [entry["run"]["record"] for entry in seeds.values()]
        cell, tests = every[0]["run"]["cell"], np.array([score_of(record, "test") for record in records], float)
        metric = records[0].get("score", "accuracy")
        tested = float(records[0].get("tested", math.nan)) if metric == "accuracy" else math.nan
        low, high = expected_score(tests, tested, reach(metric))
        total = max(entry["epsilon"] for entry in every)
        is_unscored = any(entry["unscored"] for entry in every)
        by = [entry["released_score"]["value"] if "released_score" in entry else score_of(entry, "validation")
              for entry in records]  # fmt: skip
        row = {
            "tuning": every[0]["run"]["entry"]["tuning"],
            "score": metric,
            "batch_size": cell["batch_size"],
            "epochs": cell["epochs"],
            "tested": tested,
            "mean": tests.mean(),
            "std": tests.std(ddof=1) if len(tests) > 1 else math.nan,
            "low": low,
            "high": high,
            "seeds": len(every),
            "runs": np.mean([entry["runs"] for entry in every]),
            "diverged": sum(entry["run"]["record"]["status"] == "diverged" or entry["unscored"] for entry in every),
            "validation": np.mean([value for value in by if not math.isnan(value)] or [math.nan]),
            "edges": self._edges(task, label, every),
            **{key: np.mean([record[key] for record in records]) for key in ("examples", "draws") if key in records[0]},
            "noise_gradient": np.mean([record.get("noise", {}).get("gradient", math.nan) for record in records]),
            "delta": max(entry["run"]["cell"]["delta"] for entry in every),
            "epsilon_single": max(record["epsilon"] for record in records),
            "epsilon_with_tuning": total,
            "epsilon_composed": total,
            "is_reference": total > target * (1 + PRECISION) or is_unscored,
            "p": math.nan,
            "visible": math.nan,
            "is_best": False,
            "is_highest": False,
        }
        row["is_reference"] |= row["tuning"] == "fixed"
        for name in {name for record in records for name in record.get("scores", {})}:
            values = [record.get("scores", {}).get(name) for record in records]
            if not any(isinstance(value, list | str | dict) for value in values):
                values = np.array([math.nan if value is None else value for value in values], float)
                spread = values.std(ddof=1) if len(values) > 1 else math.nan
                row |= {f"score_{name}": values.mean(), f"score_{name}_std": spread}
        return row

    def _edges(self, task, label, every):
        """How often the value that was chosen is an end of the grid."""
        grid = [row["entry"]["tuned"] for row in self.rows if (row["task"], row["label"]) == (task, label)]
        counts = Counter()
        for entry in every:
            for name, value in sorted(entry["run"]["entry"]["tuned"].items()):
                values = [point[name] for point in grid if name in point]
                if type(value) in (int, float) and min(values) < max(values):
                    counts[f"{name} ↑"] += value == max(values)
                    counts[f"{name} ↓"] += value == min(values)
        return ", ".join(f"{edge} {count}/{len(every)}" for edge, count in sorted(counts.items()) if count)

    def _compare(self):
        """Which rows of a task and target may be the best, of those that spend no more than the target."""
        for block in {place[:2] for place in self.scores}:
            places = [place for place, row in self.scores.items() if place[:2] == block and not row["is_reference"]]
            seeds = sorted({seed for place in places for seed in self.searches[place]})
            scores = np.full((len(seeds), len(places)), np.nan)
            is_there = np.zeros(scores.shape, bool)
            for at, place in enumerate(places):
                for seed, entry in self.searches[place].items():
                    test = score_of(entry["run"]["record"], "test")
                    scores[seeds.index(seed), at] = test if math.isfinite(test) else math.nan
                    is_there[seeds.index(seed), at] = True
            if not np.isfinite(scores).any():
                continue
            has_any = np.isfinite(scores).any(axis=0)
            scores[np.isnan(scores) & is_there] = np.nanmin(scores)
            p, visible = standing(scores)
            for place, value, some in zip(places, p, has_any, strict=True):
                self.scores[place] |= {"p": value, "visible": visible, "is_best": bool(value > 0.05 and some)}
            for place, mark in marks(places, scores, has_any):
                self.scores[place]["is_highest"] = mark == "**"


# --- comparison with a page


class Comparison:
    """Counts what was compared, and keeps what differs."""

    def __init__(self):
        self.count, self.differences, self.skipped = 0, [], set()

    def value(self, where, published, computed, tolerance=0.0):
        """One number of CSV, or a text."""
        self.count += 1
        if isinstance(computed, bool | np.bool_ | str):
            is_same = published == str(computed)
        else:
            number = float(published) if published else math.nan
            allowed = tolerance + EQUAL * max(abs(number), abs(computed)) + 1e-12
            is_same = (math.isnan(number) and math.isnan(computed)) or abs(number - computed) <= allowed
        if not is_same:
            self.differences.append(f"{where}: published {published or 'nothing'}, computed {computed}")

    def printed(self, where, text, *numbers, tolerances=()):
        """The numbers in a text of a page, each rounded to the digits that it shows."""
        texts = re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", text)
        pairs = [pair for pair in zip_longest(numbers, tolerances, fillvalue=0.0) if not math.isnan(pair[0])]
        if len(texts) != len(pairs):
            self.count += 1
            self.differences.append(f"{where}: printed {text or 'nothing'}, computed {numbers}")
            return
        for shown, (number, slack) in zip(texts, pairs, strict=True):
            digits, _, power = shown.replace(",", "").partition("e")
            unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
            self.value(where, shown.replace(",", ""), number, slack + unit / 2)

    def mark(self, where, published, computed):
        self.value(where, str(bool(published)), bool(computed))


def read_csv(path, keys):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {tuple(row[key] for key in keys): row for row in rows}


def read_tables(text):
    """Title -> the table below it: for each row its first cell without marks, and heading -> cell."""
    tables = {}
    for part in text.split("\n## ")[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        head, *body = [cells[0], *cells[2:]] if cells else [[]]
        tables[part.splitlines()[0]] = {row[0].strip("*"): dict(zip(head, row, strict=True)) for row in body}
    return tables


def compare(results, page):
    """The comparison of a page with the runs in `results`."""
    text, of = (page / "leaderboard.md").read_text(), Comparison()
    baseline = re.search(r"^## Against (\S+),", text, re.MULTILINE)
    board = Leaderboard(results, baseline[1] if baseline else "")
    tables = read_tables(text)
    suites, runs = re.search(r"^Suites: (.*?)\. ([\d,]+) runs", text, re.MULTILINE).groups()
    of.value("suites", suites, ", ".join(board.suites))
    of.printed("runs", runs, len({row["entry"]["run_id"] for row in board.rows}))
    if printed := re.search(r"runs, ([\d.e+]+) CPU hours", text):
        of.printed("CPU hours", printed[1], board.hours())
    compare_ranks(of, board, page, text, tables)
    compare_scores(of, board, page, tables)
    if baseline:
        compare_against(of, board, page, tables, baseline[1], "‡" in text)
    return of


def names(of, where, published, computed):
    """The places that both have; others are differences."""
    of.value(f"rows of {where}", str(sorted(published)), str(sorted(computed)))
    return sorted(set(published) & set(computed))


def compare_ranks(of, board, page, text, tables):
    rows, printed = read_csv(page / "leaderboard.csv", ["label"]), tables["Average ranks at equal total ε"]
    least = min(board.ranks["rank"].values(), default=math.nan)
    columns = {"rank": "rank", "unseen": "unseen", "draws": "per draw", "gradients": "per gradient"}
    for (label,) in names(of, "leaderboard.csv", rows, {(label,) for label in board.labels}):
        row, shown, where = rows[label,], printed.get(label, defaultdict(str)), f"leaderboard, {label}"
        of.value(f"{where}, track", row["track"], board.tracks[label])
        of.value(f"{where}, hours", row["cpu_hours"], hours := board.hours(label))
        of.printed(f"{where}, hours", shown["CPU hours"], hours)
        of.value(f"{where}, blocks", row["blocks"], count := sum(place[2] == label for place in board.scores))
        of.printed(f"{where}, blocks", shown["blocks"], count)
        for key in [key for key in columns if key in row]:
            number = board.ranks[key].get(label, math.nan)
            of.value(f"{where}, {key}", row[key], number)
            of.printed(f"{where}, {key}", shown[columns[key]], number)
        ends, noise = board.ends.get(label, [math.nan] * 2), board.noise.get(label, np.zeros(2))
        slack = [board.step + 6 * end for end in noise]
        for key, end, allowed in zip(("low", "high"), ends, slack, strict=True):
            of.value(f"{where}, {key}", row[key], end, allowed)
        of.printed(f"{where}, interval", shown["95 % interval"], *ends, tolerances=slack)
        if label in board.ranks["rank"]:
            is_best = board.ranks["rank"][label] - least < board.critical
            of.mark(f"{where}, is_best", row["is_best"] == "True", is_best)
            is_first = not math.isnan(board.critical) and board.ranks["rank"][label] == least
            of.mark(f"{where}, bold", shown["method"].startswith("**"), is_first)
            of.mark(f"{where}, †", "†" in shown["rank"], is_best and not is_first)
        of.mark(f"{where}, italic", re.match(r"\*(?!\*)", shown["method"]), board.tracks[label] == FREE)
        compared = {*columns, "label", "track", "cpu_hours", "blocks", "low", "high", "is_best"}
        of.skipped |= row.keys() - compared
    test = re.search(r"test over (\d+) workloads: p ([=≤]) (\S+)\. Average ranks less than (\S+) apart", text)
    of.mark("ranks are tested", test, board.friedman)
    if test and board.friedman:
        of.value("workloads of the test", test[1], len({task for task, _ in board.blocks}))
        error = 6 * math.sqrt(board.friedman / PERMUTATIONS)
        of.value("Friedman's p", test[3], board.friedman, error + float(test[3]) / 20)
        of.printed("critical difference", test[4], board.critical)


def compare_scores(of, board, page, tables):
    rows = read_csv(page / "leaderboard_scores.csv", ["workload", "label", "epsilon_target"])
    rows = {(plain(task), float(target), label): row for (task, label, target), row in rows.items()}
    for place in names(of, "leaderboard_scores.csv", rows, board.scores):
        row, computed = rows[place], board.scores[place]
        for key in row.keys() & computed.keys():
            slack = PRECISION * computed[key] if key.startswith("epsilon") else 0.0
            of.value(f"scores, {place}, {key}", row[key], computed[key], slack)
        of.skipped |= row.keys() - computed.keys() - {"workload", "epsilon_target", "label"}
    for target in {place[1] for place in board.scores}:
        for label, row in tables[f"Scores at total ε = {target:g}"].items():
            for name, text in list(row.items())[1:]:
                task, where = plain(name.rpartition(", ")[0]), f"leaderboard.md, {label}, ε = {target:g}, {name}"
                computed = board.scores.get((task, target, label))
                if computed is None:
                    of.value(where, text, "")
                    continue
                factor = 100 if name.endswith("(%)") else 1
                of.printed(where, text, factor * computed["mean"], factor * computed["std"])
                mark = board.best.get((task, target, label))
                of.mark(f"{where}, bold", text.startswith("**"), mark == "**")
                of.mark(f"{where}, †", "†" in text, mark == "†")
                of.mark(f"{where}, italic", re.match(r"\*(?!\*)", text), computed["is_reference"])
                of.mark(f"{where}, °", "°" in text, board.is_known(label, task))


def compare_against(of, board, page, tables, baseline, has_marks):
    rows = read_csv(page / "leaderboard_against.csv", ["label", "workload"])
    rows = {(label, plain(task)): row for (label, task), row in rows.items()}
    printed = tables[f"Against {baseline}, at equal total ε"]
    cells = {(label, plain(name.rpartition(", ")[0])): (text, 100 if name.endswith("(%)") else 1)
             for label, row in printed.items() for name, text in row.items()}  # fmt: skip
    for place in names(of, "leaderboard_against.csv", rows, board.against):
        row, computed, where = rows[place], board.against[place], f"against {baseline}, {place}"
        for key in row.keys() & computed.keys():
            of.value(f"{where}, {key}", row[key], computed[key])
        of.skipped |= row.keys() - computed.keys() - {"workload", "label"}
        text, factor = cells.get(place, ("", 1))
        of.printed(f"{where}, in leaderboard.md", text, *(factor * computed[key] for key in ("mean", "low", "high")))
        of.mark(f"{where}, bold", text.startswith("**"), computed["verdict"])
        if has_marks:
            of.mark(f"{where}, ‡", "‡" in text, math.isnan(computed["records"]))
    for label, row in printed.items():
        for name, sign in (("better", 1), ("worse", -1)):
            count = sum(of_task["verdict"] == sign for (other, _), of_task in board.against.items() if other == label)
            of.printed(f"against {baseline}, {label}, {name}", row[name], count)


def main(results="results/published", page="docs/leaderboard"):
    """Print what was compared; the exit status."""
    of = compare(Path(results), Path(page))
    for difference in of.differences[:30]:
        print(difference)
    print(f"{of.count:,} numbers and marks compared, {len(of.differences)} differ.")
    print(f"Columns that were not compared: {', '.join(sorted(of.skipped))}.")
    return int(bool(of.differences))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
