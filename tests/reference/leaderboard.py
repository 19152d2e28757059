"""The leaderboard from its published runs, with nothing of the package: selection, epsilon, ranks, intervals, verdicts.

    python tests/reference/leaderboard.py [RESULTS [PAGE]]

reads RESULTS/leaderboard*/runs.jsonl.xz (results/published) and compares what follows from them with
PAGE/leaderboard*.csv and leaderboard.md (docs/leaderboard). It prints how many numbers it compared and each that
differs by more than rounding; the exit status is 1 if one does. Two things are random: a bootstrap's interval is
compared with the spread of several such bootstraps, the p of a permutation test with its error. Epsilon is that of
`reference.privacy_loss`, which takes minutes, and is compared to `PRECISION`.

Read are suites like those of the leaderboard: a plain grid or one run for each method, two seeds or more, one setting
of B, epochs and C, and a finite score of each test record.
"""

import base64
import csv
import json
import lzma
import math
import re
import sys
import zlib
from collections import Counter, defaultdict
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.append(str(Path(__file__).parents[1]))
from reference import privacy_loss

EQUAL = 1e-9
"""Numbers of a page and of this script agree to this, relatively, and differences that vary by less are one number."""
PRECISION = 1e-3
"""Relative error of the package's epsilon that counts as none."""
BATCHES, SAMPLES, PERMUTATIONS = 12, 4_000, 9_999
MODELS = {"vit_tiny_patch16_224.augreg_in21k_ft_in1k": "ViT-Ti", "scatter": "scattering"}
FREE, TRACKS = "not charged", {"self": "self-tuned", "public": "public constant"}


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
    rows, chosen_on = [], defaultdict(list)
    for suite, entry in lines:
        run = runs.get(entry["run_id"], {})
        cell = run["record"]["cell"] if run else entry["cell"]
        task, label, target = title(cell["workload"]), entry["label"], float(entry.get("target", cell["epsilon"]))
        if target == math.inf:
            continue
        chosen_on[label].append(entry.get("chosen_on"))  # of all suites; None where one does not say
        if owner.setdefault((task, label), suite) != suite or (label, entry["run_id"]) in seen:
            continue
        seen.add((label, entry["run_id"]))
        rule = cell.get("selection", {"rule": "composed"})["rule"]
        is_plain = not entry.get("stage") and not entry.get("widen") and rule == "composed"
        if not is_plain or cell["accountant"] != "pld" or run.get("record", {}).get("test_unscored"):
            raise ValueError(f"{entry['run_id']} of {suite}: not a plain grid by the accountant pld, or not all scored")
        rows.append({"task": task, "label": label, "target": target, "cell": cell, "entry": entry, **run})
    return rows, list(dict.fromkeys(suite for suite, _ in lines)), chosen_on


def title(workload):
    """The name of a task, as `plain` makes it of what pages print."""
    if "data" not in workload:
        return plain(workload["name"])
    model = workload.get("architecture", workload.get("encoder"))
    return plain(MODELS.get(model, model) + (workload["subset"] if workload["pretrained"] else "") + workload["data"])


def plain(name):
    return re.sub("[^a-z0-9]", "", name.lower())


def score_of(record, split):
    score = record.get(f"{split}_{record.get('score', 'accuracy')}")
    return math.nan if score is None else score


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
    record = best["record"]
    ledger = Counter()
    for run in runs:
        for kind, count in run["ledger"]["runs"]:
            draw = run["ledger"]["draws"][kind]
            ledger[draw["rate"], sum(noise**-2 for noise in draw["noises"]) ** -0.5] += count
    test = math.nan if record["status"] == "diverged" else score_of(record, "test")
    is_failed = not math.isfinite(test) or (len(runs) > 1 and selected_by(record) == -math.inf)
    per_draw = [run["entry"].get("gradients_per_draw", 1.0) or 2 / 3 for run in runs]
    points = [
        run["record"]["draws"] * run["cell"]["batch_size"] * each for run, each in zip(runs, per_draw, strict=True)
    ]
    return {
        "run": best,
        "runs": len(runs),
        "tried": [run["entry"]["tuned"] for run in runs],
        "failed": is_failed,
        "test": math.nan if is_failed else test,
        "epsilon": epsilon(frozenset(ledger.items()), best["cell"]["delta"]),
        "draws": sum(run["record"]["draws"] for run in runs),
        "gradients": sum(points),
    }


@cache
def epsilon(ledger, delta):
    """Of draws {((rate, noise multiplier), count)}."""
    return privacy_loss.epsilon([(*draw, count) for draw, count in ledger], delta)[0]


def standing(tests):
    """For methods' scores, seed -> score, of which NaN is a failure: p that no other is better, and marks.

    "**" is the highest mean of those that are compared, "†" another that may be the best. And the difference that can
    be seen. One-sided paired t tests over the seeds that two methods share, three or more, times the number of rivals;
    failures have the worst score of all.
    """
    worst = min((score for of in tests for score in of.values() if math.isfinite(score)), default=math.nan)
    filled = [{seed: score if math.isfinite(score) else worst for seed, score in of.items()} for of in tests]
    rivals, errors = [[] for _ in tests], {}
    for i, j in permutations(range(len(tests)), 2):
        more = np.array([filled[j][seed] - filled[i][seed] for seed in filled[i].keys() & filled[j].keys()])
        if (n := len(more)) > 2 and not math.isnan(worst):
            mean, std = more.mean(), more.std(ddof=1)
            alike = 0.5**n if mean > EQUAL else 1.0
            rivals[i].append(stats.t.sf(mean / std * math.sqrt(n), n - 1) if std > EQUAL else alike)
            errors[i, j] = n, std / math.sqrt(n)
    ps = [min(1.0, len(of) * min(of)) if of else math.nan for of in rivals]
    seen = [stats.t.isf(0.05 / min(len(rivals[i]), len(rivals[j])), n - 1) * error
            for (i, j), (n, error) in errors.items()]  # fmt: skip
    has_score = [any(map(math.isfinite, of.values())) for of in tests]
    means = [round(np.mean(list(of.values())), 12) if some and not math.isnan(p) else -math.inf
             for of, some, p in zip(filled, has_score, ps, strict=True)]  # fmt: skip
    signs = ["" if mean == -math.inf else "**" if mean == max(means) else "†" if p > 0.05 else ""
             for mean, p in zip(means, ps, strict=True)]  # fmt: skip
    best = [p > 0.05 and some for p, some in zip(ps, has_score, strict=True)]
    return ps, best, signs, float(np.median(seen)) if seen else math.nan


def reach(metric):
    """The least and the largest score that there can be."""
    return (0, 1) if metric.endswith("accuracy") else (-math.inf, math.inf)


def expected_score(scores, tested, reach):
    """Student's interval over seeds and Wilson's over test records, whose distances from the mean add as squares."""
    mean, n = scores.mean(), len(scores)
    if not math.isfinite(mean) or n < 3:
        return math.nan, math.nan
    ends = np.array(stats.t.interval(0.95, n - 1, mean, stats.sem(scores))) if np.ptp(scores) > 0 else np.full(2, mean)
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
            blocks[task, budget] = at_epsilon(of_task, budget) if by == "epsilon" else at_cost(of_task, budget, by)
    return blocks


def nothing(entry):
    return entry | {"test": math.nan, "failed": False, "lacking": True}


def at_epsilon(of_task, budget):
    block = {}
    for label in dict.fromkeys(label for _, label in of_task):
        totals = {target: max(entry["epsilon"] for entry in seeds.values())
                  for (target, other), seeds in of_task.items() if other == label and seeds}  # fmt: skip
        fitting = [target for target in totals if totals[target] <= budget * (1 + PRECISION)]
        entries = of_task[max(fitting or totals, key=totals.get), label]
        block[label] = {seed: entry if fitting else nothing(entry) for seed, entry in entries.items()}
    return block


def at_cost(of_task, target, by):
    """All methods have as much as the cheapest takes; the runs of a search advance together."""
    block = {label: seeds for (other, label), seeds in of_task.items() if other == target}
    costs = [[entry[by] for entry in seeds.values() if not entry["failed"]] for seeds in block.values()]
    budget = min((max(cost) for cost in costs if cost), default=math.inf) * (1 + 1e-6)
    return {label: {seed: stopped(entry, by, budget) for seed, entry in seeds.items()}
            for label, seeds in block.items()}  # fmt: skip


def stopped(entry, by, budget):
    if entry["failed"] or entry[by] <= budget:
        return entry
    record, curve = entry["run"]["record"], entry["run"].get("curve", [])
    passed = [mark for mark in curve if mark["draw"] * entry[by] / record["draws"] <= budget]
    if not passed:
        return nothing(entry)
    test = score_of({"score": record.get("score", "accuracy")} | passed[-1], "test")
    return entry | {"test": test, "failed": not math.isfinite(test)}


def is_lacking(seeds):
    return any(entry.get("lacking") for entry in seeds.values())


def scores_of(block):
    """Methods that do not lack the budget, and scores [seeds, methods] over the seeds that all have; NaN: failures."""
    there = {label: seeds for label, seeds in block.items() if not is_lacking(seeds)}
    seeds = sorted(set.intersection(*map(set, there.values()))) if there else []
    return list(there), np.array([[of[seed]["test"] for of in there.values()] for seed in seeds])


def everywhere(blocks):
    """The methods of all blocks, and their scores: task -> [block].

    Failures have the worst score of the block, and methods without any -inf, so that they share the last rank.
    """
    scored = {place: scores_of(block) for place, block in blocks.items() if len(block) > 1}
    scored = {place: (there, tests) for place, (there, tests) in scored.items() if not np.isnan(tests).all()}
    labels = [label for label in next(iter(blocks.values()), ()) if all(label in there for there, _ in scored.values())]
    tasks = defaultdict(list)
    for place, (there, tests) in scored.items():
        scores = np.where(np.isnan(tests).all(axis=0), -np.inf, np.where(np.isnan(tests), np.nanmin(tests), tests))
        tasks[place[0]].append(scores[:, [there.index(label) for label in labels]])
    return labels, dict(tasks)


def ranks_of(scores):
    """Ranks [..., methods] by the means over seeds of scores [..., seeds, methods]."""
    return stats.rankdata(-np.round(scores.mean(axis=-2), 12), axis=-1)


def averages(labels, tasks):
    """Label -> average rank, over the blocks of a task first and then over tasks; and the ranks [tasks, labels]."""
    ranks = np.array([np.mean([ranks_of(scores) for scores in blocks], axis=0) for blocks in tasks.values()])
    return dict(zip(labels, ranks.mean(axis=0), strict=True)) if labels and tasks else {}, ranks


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
    """p of Friedman's test for ranks [tasks, methods], by permuting methods within tasks; Nemenyi's difference."""
    (tasks, methods), generator = ranks.shape, np.random.default_rng(1)
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    least = (centred.sum(axis=0) ** 2).sum() * (1 - EQUAL)
    several = (generator.permuted(centred, axis=1).sum(axis=0) for _ in range(PERMUTATIONS))
    p = (1 + sum((sums**2).sum() >= least for sums in several)) / (1 + PERMUTATIONS)
    quantile = stats.studentized_range.ppf(0.95, methods, np.inf) / math.sqrt(2)
    return p, quantile * math.sqrt(methods * (methods + 1) / (6 * tasks))


def against(blocks, baseline):
    """(label, task) -> its row: the differences from one method, averaged over the budgets of a task."""
    pairs, rows = {}, {}
    for task in dict.fromkeys(task for task, _ in blocks):
        of_task = [block for (other, _), block in blocks.items() if other == task]
        tests = [[entry["test"] for seeds in block.values() for entry in seeds.values()] for block in of_task]
        worst = list(map(np.nanmin, tests))
        there = [[label for label, seeds in block.items() if not is_lacking(seeds)] for block in of_task]
        labels = set.intersection(*map(set, there))
        for label in labels - {baseline} if baseline in labels else ():
            seeds = sorted(set.intersection(*(set(block[name]) for block in of_task for name in (label, baseline))))
            ours, theirs = ([[block[name][seed] for block in of_task] for seed in seeds] for name in (label, baseline))
            means = [
                np.mean(
                    [[worst[k] if entry["failed"] else entry["test"] for k, entry in enumerate(of)] for of in entries],
                    1,
                )
                for entries in (ours, theirs)
            ]
            pairs[label, task] = np.subtract(*means), by_record(ours, theirs), ours[0]
    counts = Counter(label for label, _ in pairs)
    for (label, task), (differences, table, entries) in pairs.items():
        of = over_seeds(differences, counts[label]) if table is None else crossed(table, counts[label])
        row = dict(zip(("mean", "low", "high", "p"), of, strict=True))
        score = entries[0]["run"]["record"].get("score", "accuracy")
        widest = np.subtract(*reach(score)[::-1])
        row |= {end: np.clip(row[end], -widest, widest) for end in ("low", "high")}
        row |= {"score": score, "blocks": len(entries)}
        row |= {"seeds": len(differences), "records": math.nan if table is None else table.shape[1]}
        rows[label, task] = row | {"verdict": int(np.sign(row["mean"])) if row["p"] < 0.05 else 0}
    return rows


def by_record(ours, theirs):
    """Differences [seeds, records] on each test record, averaged over budgets; None unless every run has its bits.

    Nor with fewer than three seeds, whose variance is not told from that of records.
    """
    every = [entry for of in (*ours, *theirs) for entry in of]
    records = [entry["run"]["record"] for entry in every]
    sizes = {record["tested"] if "right" in record else None for record in records}
    if len(ours) < 3 or None in sizes or len(sizes) > 1 or any(entry["failed"] for entry in every):
        return None

    def right(of):
        packed = [zlib.decompress(base64.b64decode(entry["run"]["record"]["right"])) for entry in of]
        bits = [np.unpackbits(np.frombuffer(each, np.uint8), count=records[0]["tested"]) for each in packed]
        return np.mean(bits, axis=0)

    return np.array([right(of) for of in ours]) - [right(of) for of in theirs]


class Leaderboard:
    """All that a page shows of the runs in a folder of published suites."""

    def __init__(self, results, baseline):
        self.baseline, (self.rows, self.suites, chosen_on) = baseline, load(results)
        self.searches = searches(self.rows)
        self.labels = list(dict.fromkeys(row["label"] for row in self.rows))
        self.scores = {place: self._score(place, seeds) for place, seeds in self.searches.items() if seeds}
        self._compare()
        self.chosen_on = {label: {plain(task) for of in every if of for tasks in of.values() for task in tasks}
                          for label, every in chosen_on.items()}  # fmt: skip
        self.table = {label: self._row(label) for label in self.labels}
        ranked = {label for label, row in self.table.items() if row["track"] != FREE}
        self.blocks = blocks_of(self.searches, ranked, "epsilon")
        self.best = {}
        for place, block in self.blocks.items():
            there, tests = scores_of(block)
            _, _, signs, _ = standing([dict(enumerate(of)) for of in tests.T])
            # A page prints the mean over a method's own seeds: its mark is shown where these are those of the block.
            self.best |= {(*place, label): sign for label, sign, of in zip(there, signs, tests.T, strict=True)
                          if math.isclose(of.mean(), self.scores[*place, label]["mean"])}  # fmt: skip
        names, tasks = everywhere(self.blocks)
        is_said = all(None not in chosen_on[label] for label in names)
        unseen = {task: of for task, of in tasks.items()
                  if is_said and all(task not in self.chosen_on[label] for label in names)}  # fmt: skip
        average, ranks = averages(names, tasks)
        several = {"rank": average, "unseen": averages(names, unseen)[0]}
        for by in ("draws", "gradients"):
            several[by], _ = averages(*everywhere(blocks_of(self.searches, ranked, by)))
        for label, row in self.table.items():
            row |= {by: of.get(label, math.nan) for by, of in several.items()}
        self.slack, self.friedman, self.critical = 0.0, None, math.nan
        if len(tasks) >= 6 and len(names) > 1:
            self.friedman, self.critical = friedman(ranks)
        if average:
            ends = bootstrap(tasks)
            self.slack = 6 * ends.std(axis=0, ddof=1).max() + 0.5 / sum(map(len, tasks.values()))  # and a step of ranks
            for label, (low, high) in zip(names, ends.mean(axis=0).T, strict=True):
                is_best = bool(average[label] - min(average.values()) < self.critical)
                self.table[label] |= {"low": low, "high": high, "is_best": is_best}
        self.against = against(self.blocks, baseline) if baseline else {}

    def _row(self, label):
        """A method's row of the table of ranks, without them."""
        rows = [row for place, row in self.scores.items() if place[2] == label]
        tuning, *others = {row["tuning"] for row in rows}
        track = "searched, charged" if others else TRACKS.get(tuning, "searched, charged")
        track = FREE if any(row["is_reference"] for row in rows) else track
        numbers = {"cpu_hours": self.hours({label}), "blocks": len(rows)}
        return {"track": track, **numbers, "low": math.nan, "high": math.nan, "is_best": math.nan}

    def hours(self, labels):
        """CPU hours of the runs of methods; runs of several rows count once."""
        rows = [row for row in self.rows if row["label"] in labels and "record" in row]
        return sum({row["entry"]["run_id"]: row["record"]["seconds_cpu"] for row in rows}.values()) / 3600

    def _score(self, place, seeds):
        every, records = list(seeds.values()), [entry["run"]["record"] for entry in seeds.values()]
        cell, tests = every[0]["run"]["cell"], np.array([score_of(record, "test") for record in records], float)
        metric = records[0].get("score", "accuracy")
        tested = float(records[0].get("tested", math.nan)) if metric == "accuracy" else math.nan
        low, high = expected_score(tests, tested, reach(metric))
        total, tuning = max(entry["epsilon"] for entry in every), every[0]["run"]["entry"]["tuning"]
        by = [entry["released_score"]["value"] if "released_score" in entry else score_of(entry, "validation")
              for entry in records]  # fmt: skip
        row = {
            "tuning": tuning, "score": metric, "batch_size": cell["batch_size"], "epochs": cell["epochs"],
            "tested": tested, "mean": tests.mean(), "std": tests.std(ddof=1), "low": low, "high": high,
            "seeds": len(every), "runs": np.mean([entry["runs"] for entry in every]),
            "diverged": sum(record["status"] == "diverged" for record in records), "edges": edges(every),
            "validation": np.mean([value for value in by if not math.isnan(value)] or [math.nan]),
            **{key: np.mean([record[key] for record in records]) for key in ("examples", "draws") if key in records[0]},
            "noise_gradient": np.mean([record.get("noise", {}).get("gradient", math.nan) for record in records]),
            "delta": max(entry["run"]["cell"]["delta"] for entry in every),
            "epsilon_single": max(record["epsilon"] for record in records),
            "epsilon_with_tuning": total, "epsilon_composed": total,
            "is_reference": total > place[1] * (1 + PRECISION) or tuning == "fixed",
            "p": math.nan, "visible": math.nan, "is_best": False, "is_highest": False,
        }  # fmt: skip
        for name in {name for record in records for name in record.get("scores", {})}:
            values = [record.get("scores", {}).get(name) for record in records]
            if not any(isinstance(value, list | str | dict) for value in values):
                values = np.array(values, float)  # of None NaN
                row |= {f"score_{name}": values.mean(), f"score_{name}_std": values.std(ddof=1)}
        return row

    def _compare(self):
        """Which rows with all seeds of a task and target may be the best, if they spend no more than the target."""
        for block in {place[:2] for place in self.scores}:
            places = [place for place, row in self.scores.items() if place[:2] == block and not row["is_reference"]]
            every = {seed for place in places for seed in self.searches[place]}
            places = [place for place in places if len(self.searches[place]) == len(every)]
            tests = [{seed: score_of(entry["run"]["record"], "test") for seed, entry in self.searches[place].items()}
                     for place in places]  # fmt: skip
            ps, best, signs, visible = standing(tests)
            for place, p, is_best, sign in zip(places, ps, best, signs, strict=True):
                self.scores[place] |= {"p": p, "visible": visible, "is_best": is_best, "is_highest": sign == "**"}


def edges(searches):
    """How often the value that was chosen is an end of the grid."""
    counts = Counter()
    for search in searches:
        for name, value in search["run"]["entry"]["tuned"].items():
            values = [point[name] for point in search["tried"]]
            if type(value) in (int, float) and min(values) < max(values):
                counts.update([f"{name} ↑"] * (value == max(values)) + [f"{name} ↓"] * (value == min(values)))
    return ", ".join(f"{edge} {count}/{len(searches)}" for edge, count in sorted(counts.items()))


MARKS = {"bold": r"\*\*", "italic": r"\*(?!\*)", "°": ".*°", "†": ".*†", "‡": ".*‡"}


class Comparison:
    """Counts what was compared, and keeps what differs."""

    def __init__(self):
        self.count, self.differences, self.skipped = 0, [], set()

    def value(self, where, published, computed, slack=0.0):
        """One number of CSV, or a text."""
        self.count += 1
        if isinstance(computed, bool | np.bool_ | str):
            is_same = published == str(computed)
        else:
            number = float(published) if published else math.nan
            allowed = slack + EQUAL * max(abs(number), abs(computed)) + 1e-12
            is_same = (math.isnan(number) and math.isnan(computed)) or abs(number - computed) <= allowed
        if not is_same:
            self.differences.append(f"{where}: published {published or 'nothing'}, computed {computed}")

    def printed(self, where, text, *numbers, slack=0.0, **marks):
        """A text of a page: its numbers, each rounded to the digits that it shows, and its `MARKS`."""
        texts = re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", text)
        there = [number for number in numbers if not math.isnan(number)]
        if len(texts) != len(there):
            self.value(where, text, str(numbers))
        for shown, number in zip(texts, there, strict=False):
            digits, _, power = shown.replace(",", "").partition("e")
            unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
            self.value(where, shown.replace(",", ""), number, slack + unit / 2)
        self.marks(where, text, **marks)

    def marks(self, where, text, **marks):
        for name, computed in marks.items():
            self.value(f"{where}, {name}", str(bool(re.match(MARKS[name], text))), bool(computed))

    def table(self, path, keys, computed, slack=lambda column, number: 0.0):
        """A file of CSV with the rows `computed`, by the values of `keys`."""
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        published = {tuple(read(row[key]) for key, read in keys.items()): row for row in rows}
        self.value(f"rows of {path.name}", str(sorted(published)), str(sorted(computed)))
        for place in published.keys() & computed.keys():
            row, numbers = published[place], computed[place]
            for key in row.keys() & numbers.keys():
                self.value(f"{path.name}, {place}, {key}", row[key], numbers[key], slack(key, numbers[key]))
            self.skipped |= row.keys() - numbers.keys() - keys.keys()


def read_tables(text):
    """Title -> the table below it: for each row its first cell without marks, and heading -> cell."""
    tables = {}
    for part in text.split("\n## ")[1:]:
        lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
        head, *body = [[cell.strip() for cell in line] for line in lines[:1] + lines[2:]] or [[]]
        tables[part.splitlines()[0]] = {row[0].strip("*"): dict(zip(head, row, strict=True)) for row in body}
    return tables


def labels_of(page):
    """Name on a page -> label: its first table has the rows of `leaderboard.csv` in their order."""
    first, *_ = read_tables((page / "leaderboard.md").read_text()).values()
    with (page / "leaderboard.csv").open(newline="") as file:
        return dict(zip(first, (row["label"] for row in csv.DictReader(file)), strict=True))


def heading(name):
    """The task that a column of scores is of, and what its numbers are multiplied by."""
    return plain(name.rpartition(", ")[0]), 100 if name.endswith("(%)") else 1


def compare(board, page):
    """The comparison of a page with a leaderboard."""
    text, of = (page / "leaderboard.md").read_text(), Comparison()
    labels = labels_of(page)
    tables = {title: {labels.get(name, name): row for name, row in rows.items()}
              for title, rows in read_tables(text).items()}  # fmt: skip
    suites, runs = re.search(r"^Suites: (.*?)\. ([\d,]+) runs", text, re.MULTILINE).groups()
    of.value("suites", suites, ", ".join(board.suites))
    of.printed("runs", runs, len({row["entry"]["run_id"] for row in board.rows}))
    of.printed("CPU hours", re.search(r"runs, ([\d.e+]+) CPU hours", text)[1], board.hours(board.table))
    compare_ranks(of, board, page, text, tables["Average ranks at equal total ε"])
    compare_scores(of, board, page, tables)
    if board.against:
        (printed,) = (rows for title, rows in tables.items() if title.startswith("Against "))
        compare_against(of, board, page, printed, "‡" in text)
    return of


def compare_ranks(of, board, page, text, printed):
    of.table(page / "leaderboard.csv", {"label": str}, {(label,): row for label, row in board.table.items()},
             lambda column, _: board.slack * (column in ("low", "high")))  # fmt: skip
    headings = {"rank": "rank", "draws": "per draw", "gradients": "per gradient", "blocks": "blocks"}
    headings |= {"unseen": "unseen"} if "| unseen |" in text else {}
    least = np.nanmin([row["rank"] for row in board.table.values()])
    for label, row in board.table.items():
        shown, where = printed.get(label, defaultdict(str)), f"leaderboard.md, {label}"
        for key, name in (headings | {"cpu_hours": "CPU hours"}).items():
            of.printed(f"{where}, {name}", shown[name], row[key])
        of.printed(f"{where}, interval", shown["95 % interval"], row["low"], row["high"], slack=board.slack)
        is_first = not math.isnan(board.critical) and row["rank"] == least
        of.marks(where, shown["method"], bold=is_first, italic=row["track"] == FREE)
        of.marks(f"{where}, rank", shown["rank"], **{"†": row["is_best"] is True and not is_first})
    test = re.search(r"test over (\d+) workloads: p ([=≤]) (\S+)\. Average ranks less than (\S+) apart", text)
    of.value("ranks are tested", str(bool(test)), bool(board.friedman))
    if test and board.friedman:
        of.value("workloads of the test", test[1], len({task for task, _ in board.blocks}))
        error = 6 * math.sqrt(board.friedman / PERMUTATIONS)
        of.value("Friedman's p", test[3], board.friedman, error + float(test[3]) / 20)
        of.printed("critical difference", test[4], board.critical)


def compare_scores(of, board, page, tables):
    keys = {"workload": plain, "epsilon_target": float, "label": str}
    of.table(page / "leaderboard_scores.csv", keys, board.scores,
             lambda column, number: PRECISION * number if column.startswith("epsilon") else 0.0)  # fmt: skip
    for target in {place[1] for place in board.scores}:
        for label, row in tables[f"Scores at total ε = {target:g}"].items():
            for name, text in list(row.items())[1:]:
                (task, factor), where = heading(name), f"leaderboard.md, {label}, ε = {target:g}, {name}"
                place = task, target, label
                if place not in board.scores:
                    of.value(where, text, "–")
                    continue
                computed = board.scores[place]
                sign = board.best.get(place)
                signs = {"bold": sign == "**", "†": sign == "†", "italic": computed["is_reference"]}
                signs["°"] = task in board.chosen_on[label]
                of.printed(where, text, factor * computed["mean"], factor * computed["std"], **signs)


def compare_against(of, board, page, printed, has_marks):
    of.table(page / "leaderboard_against.csv", {"label": str, "workload": plain}, board.against)
    columns = {heading(name)[0]: (name, heading(name)[1]) for row in printed.values() for name in row}
    for (label, task), row in board.against.items():
        name, factor = columns[task]
        signs = {"bold": row["verdict"]} | ({"‡": math.isnan(row["records"])} if has_marks else {})
        numbers = (factor * row[key] for key in ("mean", "low", "high"))
        of.printed(f"against the baseline, {label}, {task}", printed[label][name], *numbers, **signs)
    for label, row in printed.items():
        for name, sign in (("better", 1), ("worse", -1)):
            count = sum(of_task["verdict"] == sign for (other, _), of_task in board.against.items() if other == label)
            of.printed(f"against the baseline, {label}, {name}", row[name], count)


def main(results="results/published", page="docs/leaderboard"):
    """Print what was compared; the exit status."""
    name = re.search(r"^## Against (.+), at equal", (Path(page) / "leaderboard.md").read_text(), re.MULTILINE)
    baseline = labels_of(Path(page)).get(name[1], "") if name else ""
    of = compare(Leaderboard(Path(results), baseline), Path(page))
    for difference in of.differences[:30]:
        print(difference)
    print(f"{of.count:,} numbers and marks compared, {len(of.differences)} differ.")
    print(f"Columns that were not compared: {', '.join(sorted(of.skipped))}.")
    return int(bool(of.differences))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
