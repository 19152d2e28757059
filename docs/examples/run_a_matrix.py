"""
Run a matrix, rank it, draw it
==============================

A small suite from Python: three optimizers on synthetic data, two values of epsilon, three seeds. It takes about a
minute on one core. What is done is in the folder `results`; run the script again and it trains nothing.
"""

# %%
# A suite is a dictionary, a YAML file, or the name of one that `dpopt list` shows. Whatever it leaves out is as in
# `dpopt/conf/base/suite.yaml`.

import dpopt

suite = dpopt.load_suite(
    {
        "name": "example",
        "workloads": ["synthetic_logreg"],
        "optimizers": ["dp_sgd", "adadp", "hyfreedp"],
        "settings": {"dp_sgd": {"grid": {"lr": [0.3, 3.0]}}},
        "epsilon": [1, 3],
        "epochs": 2,
        "seeds": [0, 1, 2],
    },
    engine="inline",
)
cells = suite.cells()
print(f"{len(cells)} runs, the first one has the id {cells[0].run_id}")

# %%
# Train what is not done. A run that is killed goes on where it was.

outcome = dpopt.run_suite(suite, results="results", progress=False)
print(f"{outcome.ran} trained, {outcome.skipped} were done, {len(outcome.failed)} failed")

# %%
# One row for each method and epsilon: what the released run has spent, and what its whole search has.

results = dpopt.load_results("results", suite="example")
table = results.table()
print(table[["label", "epsilon_target", "mean", "std", "runs", "epsilon_single", "epsilon_with_tuning"]].to_string())

# %%
# Who is best at equal total epsilon, the search included. Three seeds show no differences: p says so.

print(results.ranking()[["epsilon", "label", "mean", "spent", "rank", "p_holm"]].to_string())

# %%
# A figure is a function of a data frame. `results.plot(NAME)` draws those of the folder `plots`; this one is our own.

import matplotlib.pyplot as plt  # noqa: E402

figure, axes = plt.subplots(figsize=(5, 3))
for label, rows in results.curves.query("epsilon_target == 3").groupby("label"):
    mean = rows.groupby("epoch")["test_accuracy"].mean()
    axes.plot(mean.index, 100 * mean, label=label)
axes.set(xlabel="epoch", ylabel="test accuracy (%)", title="ε = 3, mean over seeds")
axes.legend(frameon=False)
figure.savefig("example.png", bbox_inches="tight", dpi=120)

# %%
# One more method: only its cells are trained, and the table shows all of them.

more = dpopt.load_suite(
    {"name": "example", "workloads": ["synthetic_logreg"], "optimizers": ["fiber"], "epsilon": [1, 3], "epochs": 2},
    settings={"fiber": {"grid": {"lr": [0.01, 0.1]}}},
    engine="inline",
)
outcome = dpopt.run_suite(more, results="results", progress=False)
print(f"{outcome.ran} trained; rows: {sorted(set(dpopt.load_results('results', suite='example').table()['label']))}")
