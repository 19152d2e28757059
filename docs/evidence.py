"""The tables of findings, evidence and README, made of the published runs: `python docs/evidence.py` writes them.

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`; `TABLES` says how each is made.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path

import pandas as pd

from dpopt.results import choosing, clip_batch, ranking, tables
from dpopt.results.naming import titles
from dpopt.results.results import load_results
from dpopt.results.scores import shown
from dpopt.training import fitting

HERE = Path(__file__).parent
PUBLISHED = HERE.parent / "results" / "published"
PAGES = [
    HERE.parent / "README.md",
    HERE / "findings.md",
    HERE / "gallery.md",
    *sorted((HERE / "evidence").glob("*.md")),
]
PLOTS = HERE.parent / "plots"
BOARD = tuple(sorted(path.parent.name for path in PUBLISHED.glob("leaderboard*/runs.jsonl.xz")))
MARKED = re.compile(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", re.DOTALL)
EPSILON = {1.0: "ε = 1", 3.0: "3", 8.0: "8"}
TASKS = {
    "digits MLP": "digits",
    "scattering, MNIST": "MNIST",
    "scattering, Fashion-MNIST": "Fashion-MNIST",
    "ViT-Ti head, CIFAR-10": "CIFAR-10",
    "ViT-Ti head, CIFAR-100 subset": "CIFAR-100 subset",
    "ViT-Ti head, GTSRB 32": "GTSRB",
    "MiniLM head, 20 newsgroups": "20 newsgroups",
    "MiniLM head, SST-2": "SST-2",
    "synthetic table": "table",
    "tanh conv, Fashion-MNIST": "CNN",
}
"""The workloads of the leaderboard -> their names in a narrow table."""
OURS = {
    "adadp_equilibrium_average": "ADADP equilibrium, average",
    "adadp_equilibrium": "ADADP equilibrium",
    "hyfreedp_noise_aware": "HyFreeDP, noise-aware",
    "hyfreedp_search_then_decay": "HyFreeDP, search then decay",
    "prodigy": "Prodigy",
    "hyfreedp": "HyFreeDP, the paper's rule",
}
DEFAULTS = {
    "dp_adam_default": "DP-Adam at its default, 0.01",
    "dp_adamw_default": "DP-AdamW at its default, 0.01",
    "dp_sgd_default": "DP-SGD at its default, 0.5",
}
FIRST = (
    *("adadp_equilibrium_average", "dp_adam_default", "hyfreedp_noise_aware"),
    *("hyfreedp_search_then_decay", "dp_sgd_default", "hyfreedp"),
)
"""The rows of the first finding."""
LENGTHS = {
    "dp_adam_default": "0.01, its registered default, one run",
    "dp_adam_2": "two rates, 0.003 and 0.03",
    "dp_adam_3": "three rates, 0.001 to 0.1",
    "dp_adam": "five rates, 0.001 to 0.1",
    "dp_adam_8": "eight rates, 0.0003 to 1",
}
FROZEN = {
    "dp_adamw": (41.4, 43.4),
    "dadapt_adam": (46.8, 50.7),
    "prodigy": (41.7, 45.0),
    "hyfreedp_search_then_decay": (31.5, 34.6),
    "hyfreedp_noise_aware": (26.1, 26.6),
    "hyfreedp": (10.9, 10.9),
}
"""Test accuracy (%) at epsilon = 1, 3 of `hyfreedp_table2_bitfit` before, when its head was not trained."""
OTHERS = {"dp_adam": "DP-Adam", "dp_adamw": "DP-AdamW", "dp_adambc": "DP-AdamBC", "disk": "DiSK", "doppler": "DOPPLER"}
MORE = {
    "dp_sgd": "DP-SGD",
    "fiber": "FiBeR",
    "scheduled": "DP-AdamW with a decay",
    "schedulefree_adamw": "schedule-free AdamW",
    "adaptive_clip": "adaptive clipping",
    "scale_then_privatize": "scale-then-privatize",
}
LABELS = ("fiber", *OTHERS)
RULES = {"paper": "the paper's rule", "noise_aware": "noise-aware", "search_then_decay": "search, then decay"}
STARTS = {f"1e-{k}": f"10⁻{power}" for k, power in ((8, "⁸"), (6, "⁶"), (4, "⁴"), (2, "²"))}
Cells = Mapping[str, str]


def page(rows: Iterable[Cells]) -> str:
    """Rows of texts as a table in Markdown, numbers to the right."""
    frame = pd.DataFrame([*rows]).fillna("")
    is_number = [frame[name].str.contains(r"^\W*\d|^$", regex=True).all() for name in frame.columns[1:]]
    align = ["left", *("right" if each else "left" for each in is_number)]
    return str(frame.to_markdown(index=False, disable_numparse=True, colalign=align))


@cache
def frame(suite: str) -> pd.DataFrame:
    """The numbers of a published suite's table."""
    return pd.read_csv(PUBLISHED / suite / "table.csv")


@cache
def board(name: str) -> pd.DataFrame:
    """The numbers of a table of the leaderboard's page."""
    return pd.read_csv(HERE / "leaderboard" / f"{name}.csv")


def scores(suite: str, labels: Cells, columns: Mapping[float, str] = EPSILON, spread: bool = False) -> str:
    """Mean test accuracy (%) of labels at each epsilon; in italics, with what it spent, where a search spent more."""
    text = shown("accuracy").text
    rows = []
    for label, name in labels.items():
        by = frame(suite)[frame(suite)["label"] == label].set_index("epsilon_target")
        spent = by["epsilon_with_tuning"]
        row = {"test accuracy (%)": f"*{name}*" if by["is_reference"].any() else name}
        if (spent > 1.001 * by.index).any():
            row["test accuracy (%)"] += f" (ε spent: {', '.join(map(tables.upper, spent))})"
        means = {epsilon: by.loc[epsilon, ["mean", "std"]] for epsilon in columns if epsilon in by.index}
        rows.append(row | {columns[e]: text(mean, std if spread else math.nan) for e, (mean, std) in means.items()})
    return page(rows)


def signed(mean: float, low: float, high: float, verdict: int) -> str:
    """Points with their interval, bold where they are told apart."""
    text = f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]".replace("-", "−")
    return f"**{text}**" if verdict else text


def differences(against: pd.DataFrame, names: Cells, workloads: Cells) -> list[dict[str, str]]:
    """A row for each label and a column for each workload, with points against one method."""
    by = against.set_index(["label", "workload"])[["mean", "low", "high", "verdict"]]
    return [
        {"points": name} | {text: signed(*by.loc[label, task]) for task, text in workloads.items()}
        for label, name in names.items()
    ]


def against_dp_adam() -> str:
    """Methods without a search against DP-Adam, whose search is paid for."""
    return page(differences(board("leaderboard_against"), OURS, TASKS))


def summary() -> str:
    """The average ranks, and on how many tasks a method is told apart from DP-Adam, whose search is paid for."""
    ranks, rows = board("leaderboard").set_index("label"), []
    for label in FIRST:
        against = board("leaderboard_against").set_index("label").loc[label]
        rank = ranks.loc[label]
        points = [f"{100 * value:+.1f}".replace("-", "−") for value in (against["mean"].min(), against["mean"].max())]
        counts = [str((against["verdict"] == sign).sum()) for sign in (1, -1)]
        every = f"{rank['rank']:.1f} [{rank['low']:.1f}, {rank['high']:.1f}]"
        columns = {f"average rank of {ranks['rank'].count()}": every, "on unseen tasks": f"{rank['unseen']:.1f}"}
        columns |= dict(zip(("tasks better", "worse", "least", "largest difference"), counts + points, strict=True))
        rows.append({"one run, no search": (OURS | DEFAULTS)[label]} | columns)
    return page(rows)


def price() -> str:
    """Points that paying for the search costs at epsilon = 1, by task, the most records first."""
    of = board("leaderboard_scores").query("epsilon_target == 1").set_index(["label", "workload"])
    records = {task: int(of.loc[("dp_adam", task), "examples"]) for task in TASKS}
    order = sorted(TASKS, key=lambda task: -records[task])
    rows = [{"lost at ε = 1": "training records"} | {TASKS[task]: f"{records[task]:,}" for task in order}]
    for label, name in {"dp_sgd": "DP-SGD", "dp_adam": "DP-Adam"}.items():
        lost = {task: of.loc[(f"{label}_free", task), "mean"] - of.loc[(label, task), "mean"] for task in order}
        rows.append({"lost at ε = 1": name} | {TASKS[task]: f"{100 * lost[task]:.1f}" for task in order})
    return page(rows)


def adadp_rows() -> str:
    """ADADP and its constants on the tasks of the leaderboard, mean over epsilon."""
    names = {"adadp": "ADADP, two draws a step", "adadp_hybrid": "ADADP, then DP-SGD with a decay"} | {
        label: OURS[label] for label in ("adadp_equilibrium", "adadp_equilibrium_average")
    }
    means = board("leaderboard_scores").groupby(["label", "workload"])["mean"].mean()
    return page(
        {"test accuracy (%)": name} | {text: f"{100 * means[label, task]:.1f}" for task, text in TASKS.items()}
        for label, name in names.items()
    )


def probe_ratio() -> str:
    """L₋ minus L₊ over the noise of one probe, at the start of HyFreeDP's paper."""
    signal = pd.read_csv(PUBLISHED / "probe_signal" / "probe_signal.csv").query("eta == 1e-4")
    by = signal.set_index(["trained", "epsilon"])
    models = signal.drop_duplicates("trained").itertuples()
    return page(
        {"trained": row.trained, "parameters": f"{row.dimension:,}"}
        | {text: f"{by.loc[(row.trained, epsilon), 'ratio']:.2g}" for epsilon, text in EPSILON.items()}
        for row in models
    )


def ranges() -> str:
    """The range of the means over four starts, of both rules, for each task."""
    tasks = {
        "digits, MLP": ("hyfreedp_starts", "digits_mlp"),
        "MNIST, MLP": ("tuning_free_mnist", "mnist_mlp"),
        "MNIST, scattering": ("hyfreedp_starts_mnist", "mnist_scatter"),
        "Fashion-MNIST, scattering": ("hyfreedp_starts_mnist", "fashion_mnist_scatter"),
        "CIFAR-10, ViT-Ti head": ("hyfreedp_starts_heads", "images(data=cifar10)"),
        "CIFAR-100 subset, ViT-Ti head": ("hyfreedp_starts_heads", "images(data=cifar100_subset)"),
        "GTSRB, ViT-Ti head at 112 px": ("hyfreedp_starts_heads", "images(data=gtsrb_32, size=112)"),
        "20 newsgroups, MiniLM head": ("hyfreedp_starts_heads", "newsgroups_minilm"),
        "SST-2, MiniLM head": ("hyfreedp_starts_heads", "sst2_minilm"),
        "CIFAR-10, ADADP's convolutions": ("hyfreedp_starts_cifar10", "cifar10_adadp"),
    }
    rows = []
    for name, (suite, workload) in tasks.items():
        for rule in ("noise_aware", "search_then_decay"):
            labels = [rule, *(f"{rule}_{start}" for start in STARTS)]
            of = frame(suite)[(frame(suite)["workload"] == workload) & frame(suite)["label"].isin(labels)]
            means = of.groupby("epsilon_target")["mean"]
            texts = {text: f"{100 * means.min()[e]:.1f} to {100 * means.max()[e]:.1f}" for e, text in EPSILON.items()}
            rows.append({"range over four starts": name, "rule": RULES[rule]} | texts)
    return page(rows)


def few_draws() -> str:
    """Test accuracy from four starts where a run has few draws."""
    suites = {
        "hyfreedp_starts_full": "CIFAR-10, ViT-Ti, all parameters",
        "hyfreedp_starts_bitfit": "CIFAR-10, ViT-Ti, biases and head",
        "hyfreedp_starts_sst2_lora": "SST-2, MiniLM, LoRA",
        "hyfreedp_starts_newsgroups_lora": "20 newsgroups, MiniLM, LoRA",
    }
    rows = []
    for suite, name in suites.items():
        for (draws, epsilon), part in frame(suite).groupby(["draws", "epsilon_target"], sort=False):
            by = part.set_index("label")["mean"]
            for rule in ("noise_aware", "search_then_decay"):
                where = {"trained": f"{name}, ε = {epsilon:g}, {draws:g} draws", "rule": RULES[rule]}
                rows.append(where | {text: f"{100 * by[f'{rule}_{start}']:.1f}" for start, text in STARTS.items()})
    return page(rows)


def settings(suite: str) -> str:
    """Each setting of HyFreeDP's rules alone, at epsilon = 3."""
    parts = {
        "start: 10⁻⁸, 10⁻⁶, 10⁻⁴, 10⁻², 10⁻¹": ["1e-8", "1e-6", "", "1e-2", "1e-1"],
        "K, draws a probe: 1, 2, 5, 10, 20": ["K1", "K2", "", "K10", "K20"],
        "γ: 1.01, 1.03, 1.1, 1.3": ["gamma1.01", "gamma1.03", "gamma1.1", "gamma1.3"],
        "bound of losses: their sum, the middle one": ["", "literal"],
    }
    means = 100 * frame(suite).query("epsilon_target == 3").set_index("label")["mean"]

    def text(rule: str, endings: Sequence[str]) -> str:
        # The default of a setting is the rule's own row.
        labels = [f"{rule}_{end}" if f"{rule}_{end}" in means else rule for end in endings]
        tried = {ending for ending, label in zip(endings, labels, strict=True) if label != rule}
        return ", ".join(f"{means[label]:.1f}" for label in labels) if tried else ""

    return page({"setting": name} | {RULES[rule]: text(rule, of) for rule in RULES} for name, of in parts.items())


def tolerances() -> str:
    """The mean over epsilon for each tolerance of ADADP's resting point and each average."""
    rows = []
    for suite, task in {"public_rate": "digits", "public_rate_heads": "CIFAR-100 subset"}.items():
        means = 100 * frame(suite).groupby("label")["mean"].mean()
        for ending, name in {"": "no average", **{f"_average_{a}": f"average {a}" for a in (0.9, 0.95, 0.98)}}.items():
            taus = {f"τ = {tau}": f"{means[f'tau_{tau}{ending}']:.1f}" for tau in ("0.5", "1", "2", "4")}
            rows.append({"test accuracy (%)": f"{task}, {name}"} | taus)
    return page(rows)


def trial_path() -> str:
    """The rate that the trial finds and the accuracy that follows, from four starts, for both forms of the trial."""
    made = pd.read_csv(PUBLISHED / "trial_path" / "trial_path.csv")
    by = made.groupby(["task", "start", "trial"], sort=False).agg({"eta": "median", "validation_accuracy": "mean"})
    rows = []
    for (task, trial), of in by.groupby(["task", "trial"], sort=False):
        eta, accuracy = of["eta"], 100 * of["validation_accuracy"]
        texts = {"η, medians": f"{eta.min():.2g} to {eta.max():.2g}"}
        texts["validation accuracy (%)"] = f"{accuracy.min():.1f} to {accuracy.max():.1f}"
        rows.append({"task": task, "the trial": trial} | texts)
    return page(rows)


def printed() -> str:
    """The paper's rule as it is printed, beside the rule as it is here, each with the epsilon that it spends."""
    pairs = {
        "guards of the fit, digits, from 10⁻²": ("hyfreedp_guards", "none_1e-2", "gen_1e-2"),
        "guards of the fit, MNIST, from 10⁻²": ("hyfreedp_guards_mnist", "none_1e-2", "gen_1e-2"),
        "guards of the fit, head, from 10⁻²": ("hyfreedp_guards_head", "none_1e-2", "gen_1e-2"),
        "noise of the losses, digits, from 10⁻²": ("hyfreedp_paper_noise", "paper_states{:g}_1e-2", "exact_1e-2"),
        "noise of the losses, MNIST, from 10⁻⁴": ("hyfreedp_paper_noise_mnist", "paper_states{:g}", "exact"),
        "start for LoRA, SST-2: 10⁻³, 10⁻²": ("hyfreedp_lora_start", "paper_1e-3", "paper_1e-2"),
    }
    rows = []
    for name, (suite, before, after) in pairs.items():
        row = {"test accuracy (%)": name}
        for epsilon, (way, label) in product((3.0, 8.0), (("as printed", before), ("here", after))):
            of = frame(suite).query("label == @label.format(@epsilon)")
            # A row of the paper's noise is at the epsilon that it spends, alone under its label.
            (cell,) = (of if "{" in label else of[of["epsilon_target"] == epsilon]).to_dict("records")
            spent = cell["epsilon_with_tuning"]
            text = shown("accuracy").text(cell["mean"], cell["std"])
            row[f"ε = {epsilon:g}, {way}"] = text + f" (spends {tables.upper(spent)})" * (spent > 1.001 * epsilon)
        rows.append(row)
    return page(rows)


def claims(title: str, keep: Sequence[str] = ()) -> str:
    """A table of the published claims on C and B, or the rows of it that begin with one of `keep`."""
    text = (PUBLISHED / "clip_batch_sweep" / "claims.md").read_text("utf-8").partition(f"**{title}**\n\n")[2]
    head, rule, *rows = text.partition("\n\n")[0].splitlines()
    return "\n".join([head, rule, *(row for row in rows if not keep or row[2:].startswith(tuple(keep)))])


@cache
def chosen(suites: tuple[str, ...], labels: tuple[str, ...] | None = None) -> pd.DataFrame:
    """`ranking.reached` for suites whose rows keep to epsilon, without the cost of computing epsilon anew."""
    parts = [load_results(PUBLISHED, suite, optimizers=labels) for suite in suites]
    names = titles([[entry["cell"]["workload"] for entry in part.manifest["cells"]] for part in parts])
    read = zip(parts, names, strict=True)
    cells = pd.concat([part.cells.replace({"workload": of_part}) for part, of_part in read], ignore_index=True)
    every = choosing.best_setting(choosing.select(cells))
    return every.assign(
        by="epsilon", epsilon=every["epsilon_target"], budget=every["epsilon_target"], test=every["test_score"],
        failed=every["state"] != "done", right=None, test_unscored=0, spent=0.0,
    )  # fmt: skip


def bitfit() -> str:
    """BitFit beside what it was before its head was trained."""
    by = 100 * frame("hyfreedp_table2_bitfit").set_index(["label", "epsilon_target"])["mean"]
    names = SHORT | {"dp_adamw": "*DP-AdamW, best rate, not paid for*"}
    rows = []
    for label, name in names.items():
        texts = {"test accuracy (%)": name}
        for epsilon, before in zip((1, 3), FROZEN[label], strict=True):
            texts |= {f"ε = {epsilon}: before": f"{before:.1f}", f"ε = {epsilon}": f"{by[label, epsilon]:.1f}"}
        rows.append(texts)
    return page(rows)


def grid_length_heads() -> str:
    """DP-Adam by the number of rates that are paid for, on three heads at epsilon = 1."""
    means = 100 * frame("grid_length_heads").query("epsilon_target == 1").set_index(["label", "workload"])["mean"]
    names = {"cifar10": "CIFAR-10", "cifar100_subset": "CIFAR-100 subset", "gtsrb_32, size=112": "GTSRB"}
    tasks = {f"images(data={data})": name for data, name in names.items()}
    return page(
        {"test accuracy (%)": name} | {text: f"{means[label, task]:.1f}" for task, text in tasks.items()}
        for label, name in LENGTHS.items()
    )


def default_rate() -> str:
    """Registered rates, one run, against DP-Adam whose search is paid for, beside the averaged resting point."""
    names = DEFAULTS | {"adadp_equilibrium_average": OURS["adadp_equilibrium_average"]}
    return page(differences(board("leaderboard_against"), names, TASKS))


def fiber_board() -> str:
    """The other methods against FiBeR on the tasks of the leaderboard, at equal draws."""
    return page(differences(ranking.against(chosen(BOARD, LABELS), "fiber"), OTHERS, TASKS))


def fiber_claim() -> str:
    """The other methods against FiBeR with searches of two floors, at equal draws and at equal gradients."""
    rows = []
    workloads = {"ViT-Ti head, CIFAR-100 subset": "CIFAR-100 subset", "MiniLM head, 20 newsgroups": "20 newsgroups"}
    forms = {f"fiber_{form}": f"FiBeR, {name}" for form, name in (
        ("off", "no correction"), ("unfiltered", "all noise subtracted"), ("exact", "the noise that is there")
    )}  # fmt: skip
    half = {("disk_half" if label == "disk" else label): name for label, name in OTHERS.items()}
    for of, baseline, names in (("draws", "fiber", OTHERS | forms), ("gradients", "fiber_half", half)):
        digits, heads = (
            differences(ranking.against(chosen((suite,)), baseline), names, of_suite)
            for suite, of_suite in (("fiber_claim", {"digits MLP": "digits"}), ("fiber_claim_heads", workloads))
        )
        named = [{"points": f"{row['points']}, equal {of}"} for row in digits]
        rows += [left | name | right | name for left, name, right in zip(digits, named, heads, strict=True)]
    return page(rows)


def transfer() -> str:
    """What the rate of another epsilon costs."""
    lost = load_results(PUBLISHED, "rate_transfer").transfers.set_index(["label", "epsilon_from", "epsilon_target"])
    rows = []
    for label in dict.fromkeys(lost.index.get_level_values(0)):
        texts = {}
        for way in ((8.0, 1.0), (1.0, 8.0)):
            for part, name in (("", "each seed chooses"), ("shared_", "one for all")):
                mean, low, high = (100 * lost.loc[(label, *way), f"{part}{key}"] for key in ("loss", "low", "high"))
                texts[f"rate of {way[0]:g} at {way[1]:g}: {name}"] = (
                    "same" if math.isnan(low) else f"{mean:.1f} [{low:.1f}, {high:.1f}]"
                ).replace("-", "−")
        rows.append({"points lost": (OTHERS | MORE)[label]} | texts)
    return page(rows)


def gallery() -> str:
    """Each published figure that a command draws, under the name of the figure, with that command."""
    commands = {"audit": "dpopt audit", "speed": "dpopt bench"}
    parts: dict[str, list[str]] = {}
    for path in sorted(PUBLISHED.glob("*/*.svg")):
        folder, name = path.parent.name, path.stem
        script = HERE.parent / "benchmarks" / f"{folder}.py"
        if (path.parent / "suite.json").exists():
            command = f"dpopt plot suite={folder} results=results/published figure={name}"
        else:
            command = f"python benchmarks/{folder}.py" if script.exists() else commands[folder]
        shown_at = f"![{name} of {folder}](../results/published/{folder}/{path.name})"
        parts.setdefault(name, []).append(f"`{command}`\n\n{shown_at}")
    plots = {path.stem: ast.get_docstring(ast.parse(path.read_text("utf-8"))) for path in PLOTS.glob("*.py")}
    sections = ["\n\n".join([f"## {name}", plots.get(name) or "", *of]) for name, of in sorted(parts.items())]
    return "\n\n".join(sections).replace("\n\n\n\n", "\n\n")


def methods(suite: str) -> str:
    """What a step in C and in B costs each method, and what tuning both gains, in points with 95 % intervals."""
    effects = pd.read_csv(PUBLISHED / suite / "clip_batch.csv")
    effects = effects[effects["epochs"] == effects["epochs"].max()]  # at which all methods of the suite were run
    columns = {("lost", "C"): "a step in C", ("lost", "B"): "a step in B", ("gained", "both"): "C and B tuned"}
    rows: dict[str, dict[str, str]] = {}
    for cell in effects.to_dict("records"):
        label = cell["label"]
        row = rows.setdefault(label, {"points": f"*{label}*" if cell["is_failing"] else label})
        if column := columns.get((cell["effect"], cell["part"])):
            text, is_shown = clip_batch.entry(cell)
            text = text.replace("-", "−")
            row[f"{column}, ε = {cell['epsilon_target']:g}"] = f"**{text}**" if is_shown else text
    order = [f"{name}, ε = {at:g}" for name in columns.values() for at in sorted({*effects["epsilon_target"]})]
    return page({"points": row["points"]} | {name: row.get(name, "") for name in order} for row in rows.values())


def default_batch() -> str:
    """Test accuracy (%) of the default optimizers of `fit` by batch size, mean over seeds, and the batch of `fit`."""
    rows: list[dict[str, str]] = []
    names = {"adadp_equilibrium": "ADADP equilibrium, average", "dp_adam": "DP-Adam at 0.01, average"}
    blocks = frame("fit_batch").groupby(["label", "examples", "workload", "epsilon_target"])
    for (label, count, task, epsilon), cells in blocks:
        row = {"task": SMALL_TASKS[task], "N": f"{count:,.0f}", "optimizer": names[label], "ε": f"{epsilon:g}"}
        by_batch = cells.set_index("batch_size")["mean"].sort_index()
        means = {f"B = {batch}": f"{100 * mean:.1f}" for batch, mean in by_batch.items()}
        rows.append(row | means | {"`fit` takes": f"{fitting.default_batch(int(count)):,}"})
    return page(rows)


SMALL_TASKS = {
    "images(data=cifar100_subset)": "ViT-Ti head, CIFAR-100 subset",
    "synthetic_table": "synthetic table",
    "newsgroups_minilm": "MiniLM head, 20 newsgroups",
    "images(data=cifar10, size=64)": "ViT-Ti head, CIFAR-10 at 64 px",
    "mnist_mlp": "MNIST MLP",
    "sst2_minilm": "MiniLM head, SST-2",
}
FREE_RULES = {
    "noise_aware_1e-8": "noise-aware, from 10⁻⁸",
    "noise_aware": "noise-aware, from 10⁻⁴",
    "search_then_decay_1e-8": "search, then decay, from 10⁻⁸",
    "search_then_decay": "search, then decay, from 10⁻⁴",
    "adadp_equilibrium": "ADADP equilibrium",
    "equilibrium_average": "ADADP equilibrium, average",
    "dp_adam_composed": "DP-Adam, five rates paid for",
    "dp_adam_free": "DP-Adam, not paid for",
}
STARTED = {
    "paper_1e-4": "the paper's rule, from 10⁻⁴",
    "paper_1e-2": "the paper's rule, from 10⁻²",
    "noise_aware_1e-8": "noise-aware, from 10⁻⁸",
    "noise_aware_1e-4": "noise-aware, from 10⁻⁴",
    "search_then_decay_1e-8": "search, then decay, from 10⁻⁸",
    "search_then_decay_1e-4": "search, then decay, from 10⁻⁴",
}
SHORT = {
    "dp_adamw": "DP-AdamW, best of five rates, not paid for",
    "dadapt_adam": "D-Adaptation",
    "prodigy": "Prodigy",
    "hyfreedp_search_then_decay": "HyFreeDP, search then decay",
    "hyfreedp_noise_aware": "HyFreeDP, noise-aware",
    "hyfreedp": "HyFreeDP, the paper's rule",
}
ADADP = {
    "adadp_code_decay": "ADADP, rule of the code, decay",
    "adadp_code": "ADADP, rule of the code",
    "adadp": "ADADP, rule as printed",
    "candidates": "best of candidate rates, not paid for",
}
DECAY = {
    "adadp": "rule as printed",
    "adadp_decay": "rule as printed, decay",
    "adadp_decay_0.01": "rule as printed, decay, from η = 0.01",
    "adadp_decay_1": "rule as printed, decay, from η = 1",
    "adadp_code_no_decay": "rule of the code",
    "adadp_code_decay": "rule of the code, decay",
}
NOISES = {value: f"ε = {value}" for value in (0.282, 0.311, 0.385, 0.424, 0.6, 0.661, 1.337, 1.477)}
PAPER = {"hyfreedp": "HyFreeDP, the paper's rule, from 10⁻⁴"}
CHOICES = "C, B and η that are not searched together"
SOME = ("C =", "C searched", "B searched", "C and B of", "η of C = 1, B = 2048 kept at C = 1, B = 128")
OF_RUNS: dict[str, Callable[[], str]] = {
    "default_rate": default_rate,
    "fiber_board": fiber_board,
    "fiber_claim": fiber_claim,
    "transfer": transfer,
}
"""Tables that read every run, which takes a while."""
TABLES: dict[str, Callable[[], str]] = OF_RUNS | {
    "quickstart": partial(
        scores,
        "quickstart",
        {key: OURS.get(key, key) for key in ("adadp_equilibrium_average", "hyfreedp_noise_aware")}
        | {"dp_adam": "DP-Adam, five rates paid for", "adadp": "ADADP", "fiber": "FiBeR, five rates paid for"}
        | PAPER,
        spread=True,
    ),
    "gallery": gallery,
    "methods": partial(methods, "clip_batch_methods"),
    "methods_head": partial(methods, "clip_batch_methods_cifar100"),
    "methods_easy_head": partial(methods, "clip_batch_methods_cifar10"),
    "default_batch": default_batch,
    "methods_network": partial(methods, "clip_batch_methods_mnist"),
    "summary": summary,
    "against_dp_adam": against_dp_adam,
    "tolerances": tolerances,
    "networks_mnist": partial(scores, "tuning_free_mnist", PAPER | FREE_RULES),
    "networks_cifar10": partial(
        scores,
        "tuning_free_cifar10",
        {key: name for key, name in FREE_RULES.items() if not key.endswith(("1e-8", "_free"))},
    ),
    "price": price,
    "grid_length": partial(
        scores,
        "grid_length",
        LENGTHS,
        spread=True,
    ),
    "grid_length_heads": grid_length_heads,
    "price_ways": partial(
        scores,
        "price_of_tuning",
        {
            "adadp": "ADADP, nothing to search",
            "composed": "DP-Adam, five of five, composed",
            "poisson": "DP-Adam, best of a Poisson number, mean 10",
            "logarithmic": "DP-Adam, best of a logarithmic number, mean 10",
            "geometric": "DP-Adam, best of a geometric number, mean 10",
            "linear_scaling": "DP-Adam, linear scaling",
            "free": "DP-Adam, five of five, as most papers report it",
            "dp_hyper": "DP-hyper as HyFreeDP's paper simulates it",
        },
    ),
    "fiber_free": partial(
        scores,
        "fiber_claim",
        {"fiber_free": "FiBeR, fifteen settings", "dp_adambc_free": "DP-AdamBC, fifteen settings"}
        | {"dp_adam_free": "DP-Adam, five rates", "disk_free": "DiSK, five rates"},
        spread=True,
    ),
    "probe_ratio": probe_ratio,
    "printed": printed,
    "settings_head": partial(settings, "hyfreedp_ablation"),
    "settings_mnist": partial(settings, "hyfreedp_ablation_mnist"),
    "started": partial(scores, "hyfreedp_starts", STARTED),
    "ranges": ranges,
    "rules_head": partial(scores, "tuning_free_heads", PAPER | FREE_RULES),
    "few_draws": few_draws,
    "trial_path": trial_path,
    "one_epoch": partial(scores, "hyfreedp_table2_one_epoch", SHORT),
    "biases": bitfit,
    "late": partial(
        scores,
        "learning_rate_free",
        {"dp_adam": "DP-Adam, set by hand", "prodigy": "Prodigy", "dadapt_adam": "D-Adaptation", "dog": "DoG"},
        {0.1: "ε = 0.1", 3.0: "3"},
    ),
    "adadp_rows": adadp_rows,
    "adadp_cifar10": partial(scores, "adadp_cifar10", ADADP, NOISES, spread=True),
    "adadp_noise": partial(
        scores,
        "adadp_cifar10_noise",
        {"adadp_code_decay": ADADP["adadp_code_decay"], "dp_adam": "DP-Adam, best of three", "dp_sgd": "DP-SGD"},
        NOISES,
    ),
    "adadp_decay_cifar10": partial(scores, "adadp_decay_cifar10", DECAY, NOISES, spread=True),
    "adadp_decay_mnist": partial(
        scores,
        "adadp_decay_mnist",
        {key: name for key, name in DECAY.items() if key != "adadp_code_no_decay"},
        NOISES,
        spread=True,
    ),
    "adadp_mnist": partial(
        scores,
        "adadp_mnist_code",
        {"adadp_code": ADADP["adadp_code_decay"], "adadp": ADADP["adadp"], "dp_adam": "DP-Adam, best of three"}
        | {"dp_sgd": "DP-SGD", "fiber": "FiBeR"},
        NOISES,
    ),
    "choices": partial(claims, CHOICES),
    "choices_short": partial(claims, CHOICES, SOME),
    "norms": partial(claims, "Norms and the best bound C\\* at one C and B"),
}  # fmt: skip


def filled(text: str, names: Iterable[str] = TABLES) -> str:
    """A page with the tables `names` made anew."""
    return MARKED.sub(
        lambda part: f"{part[1]}\n\n{TABLES[part[2]]()}\n\n{part[3]}" if part[2] in names else part[0], text
    )


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
