"""The page of a suite: what it says, that it says it without a network, and that nothing stored can break it."""

import csv
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from markdown_it import MarkdownIt

from dpopt import markup
from dpopt.cli import main
from dpopt.results import frames
from dpopt.results.report import page as report
from dpopt.results.report.sheet import grid
from dpopt.results.results import Results
from dpopt.results.writing import Table

FIGURE = '''"""A line for each method.

The more the better.
"""
import matplotlib.pyplot as plt

NEEDS = "comparison"

def draw(frame, styles):
    """Read from left to right."""
    figure, axis = plt.subplots()
    for label, rows in frame.groupby("label"):
        axis.plot(rows["epsilon_single"], rows["mean"], "o-", label=label)
    axis.legend()
    return figure
'''
HOSTILE = "<b onclick='x()'>bold</b> & \"quoted\""
PLOTS = Path(__file__).parents[2] / "plots"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """What a browser would make of a page: its elements in order, its texts, and the cells of its tables."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.tables = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_data(self, data):
        self.texts.append(data)
        if self.tables and self.tables[-1] and self.tables[-1][-1] and self.inside_cell:
            self.tables[-1][-1][-1] += data

    @property
    def inside_cell(self):
        return self.lasttag in ("th", "td", "wbr")

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            self.lasttag = tag + " closed"

    @property
    def text(self):
        return " ".join("".join(self.texts).split())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two figures, so that ids could clash."""
    made = tmp_path_factory.mktemp("plots")
    for name in ("first", "second"):
        (made / f"{name}.py").write_text(FIGURE)
    return made


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """No figures: drawing takes most of the time."""
    return tmp_path_factory.mktemp("none")


@pytest.fixture(scope="module")
def whole(recorded, folder):
    """The text of a page with figures."""
    return page_of(recorded, folder)


def page_of(store, folder, overrides=(), further=()):
    """The page of the suite without ranks, which take most of the time: `further` tables stand in their place."""

    class Unranked(Results):
        def ranks(self):
            return further

    return Unranked(store, "made").report(folder, overrides)


def test_the_tables_hold_the_stored_numbers(recorded, whole):
    every, _ = Page(whole).tables
    table = Results(recorded, "made").show()
    headings = [f"{heading}:" for heading in table.rules.values() if heading]
    assert [row for row in every if len(row) == 1] == [[heading] for heading in headings]
    assert [row for row in every if len(row) > 1] == [list(table.frame), *table.frame.values.tolist()]


def sentence(rows):
    """The sentence of a page on rows of one workload: label, mean, is_highest, is_best."""
    frame = pd.DataFrame(rows, columns=["label", "mean", "is_highest", "is_best"])
    more = {"workload": "digits", "score": "accuracy", "std": 0.01, "epsilon_target": 1.0, "is_reference": False}
    return report._sentence(frame.assign(**more)).removeprefix("digits: the highest mean test accuracy (%) is that of ")


def test_the_first_sentence_says_what_is_shown_and_what_is_not():
    clear = [("a", 0.9, True, True), ("b", 0.5, False, False)]
    assert sentence(clear) == "a at ε = 1 (90.0 ± 1.0)."
    assert sentence([*clear, ("c", 0.8, False, True)]) == "a at ε = 1 (90.0 ± 1.0; 1 more not shown to be worse)."
    untested = [("a", 0.9, False, False), ("b", 0.5, False, False)]
    assert sentence(untested) == "a at ε = 1 (90.0 ± 1.0; not tested)."
    ties = [("a", 0.9, True, True), ("b", 0.9, True, True)]
    assert sentence(ties) == "a and b at ε = 1 (90.0 ± 1.0, 90.0 ± 1.0)."
    assert sentence([("a", 0.95, False, False), *clear[1:], ("c", 0.9, True, True)]).startswith("c "), "as the table"
    assert report._sentence(pd.DataFrame(clear, columns=["label", "mean", "x", "y"]).assign(
        workload="digits", score="accuracy", is_reference=True, epsilon_target=1.0
    )) == "digits: no row keeps to its ε."  # fmt: skip


def test_cells_sort_by_the_number_that_they_begin_with():
    numbers = {"1.0e-05": "1.0e-05", "∞": "Infinity", "−3.447": "-3.447", "+2": "2", "12,345 runs": "12345"}
    numbers |= {"88.5% (table 2)": "88.5", "3d_cnn": "", "2.15.0": ""}
    rows = grid(Table(pd.DataFrame({"shown": [*numbers]})))["rows"]
    assert [cell["number"] for (cell,) in rows] == [*numbers.values()]


def test_text_never_becomes_markup(maker, folder, tmp_path):
    """Labels, the description, errors, and text that figures draw."""
    maker.add(HOSTILE, 0, 0.5, 0.5)
    failed = maker.add("dp_adam", 0, 0.5, 0.5, status="failed")
    store = maker.done()
    store.fail(failed, f"ValueError: {HOSTILE}", f"line\n{HOSTILE}")
    store.extend_suite("made", store.manifest("made") | {"description": HOSTILE})
    part = Table(pd.DataFrame({HOSTILE: [HOSTILE]}), HOSTILE, HOSTILE, HOSTILE)
    page = Page(page_of(store, folder, further=[part], overrides=[HOSTILE]))
    assert page.all("b") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count(HOSTILE) >= 12
    assert [row[0] for row in page.tables[1]] == [HOSTILE, HOSTILE]
    drawn = [text for text in page.texts if text == HOSTILE]
    assert len(drawn) >= 2  # the legends of both figures


def test_nothing_is_loaded_and_every_reference_is_within_the_page(recorded, folder, whole):
    assert whole == page_of(recorded, folder), "the same store gives the same page"
    page = Page(whole)
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert page.all("img") == page.all("iframe") == []
    assert not any("src" in attributes for _, attributes in page.elements)
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    pointed = [attributes["href"] for tag, attributes in page.elements if tag != "link" and "href" in attributes]
    assert {"a", "use"} <= {tag for tag, attributes in page.elements if "href" in attributes}
    assert all(target.startswith("#") for target in pointed)
    named = {attributes["aria-labelledby"] for _, attributes in page.elements if "aria-labelledby" in attributes}
    clips = re.findall(r"url\((.*?)\)", whole)
    assert clips
    assert {target[1:] for target in [*pointed, *clips]} | named <= set(ids)


def test_the_page_can_be_read_by_machines_and_keyboards(whole):
    page = Page(whole)
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("caption")) == len(page.all("table")) == 2
    assert all(header["scope"] == "col" for header in page.all("th"))
    assert [(drawn["role"], drawn["aria-label"]) for drawn in page.all("svg")] == [
        ("img", "A line for each method.")
    ] * 2
    boxes = [box for box in page.all("div") if box.get("class") == "scroll"]
    assert len(boxes) == 4
    assert all(box["tabindex"] == "0" and box.keys() & {"aria-label", "aria-labelledby"} for box in boxes)
    assert "A line for each method. The more the better. Read from left to right." in page.text
    styles = [attributes["style"] for tag, attributes in page.elements if "style" in attributes and tag != "svg"]
    assert any("fill: var(--paper)" in style for style in styles), "a dark page has no white boxes"
    assert not any(colour in style for style in styles for colour in ("#000000", "#ffffff"))


def test_the_page_begins_with_a_sentence_and_a_figure_for_each_workload(maker, tmp_path):
    """And long notes are behind a fold; what is missing is not."""
    (tmp_path / "accuracy_vs_epsilon.py").write_text((PLOTS / "accuracy_vs_epsilon.py").read_text("utf-8"))
    for workload in ("digits_mlp", "gmm"):
        for seed in range(3):
            for epsilon in (1.0, 3.0):
                maker.add("adadp", seed, 0.5, 0.7 + 0.01 * seed, epsilon=epsilon, workload=workload)
                maker.add("dp_adam", seed, 0.5, 0.69 + 0.02 * seed**2, epsilon=epsilon, workload=workload)
                by_hand = {"tuned": {"lr": 0.1}, "tuning": "fixed", "epsilon": epsilon, "workload": workload}
                maker.add("by_hand", seed, 0.5, 0.9, **by_hand)
    maker.add("adadp", 3, 0.5, 0.5, status="missing")
    markup = page_of(maker.done(), tmp_path)
    before, after = markup.split("<table>", 1)
    assert before.count("<svg") == 2, "the figures stand before the first table"
    assert "<svg" not in after, "and not again"
    for workload in ("digits MLP", "Gaussian mixture"):
        assert f"{workload}: the highest mean test accuracy (%) is that of DP-Adam at ε = 1 (72.3 ± 4.2; " in before
    assert "1 more not shown to be worse), DP-Adam at ε = 3" in before
    assert '<details open><summary>How to read it</summary><p class="note">Test score: mean ± standard' in markup
    assert Results(maker.store, "made").missing == "1 of 37 cells have no result; seeds that need them are left out."


def test_commands_repeat_the_arguments(recorded, bare, whole):
    part = Table(pd.DataFrame({"runs": [2, 4]}), "Chances", "Few.", "dpopt dice suite=made")
    text = Page(page_of(recorded, bare, overrides=["suite=made", "optimizers=[a,b]"], further=[part])).text
    for command in (
        "dpopt table suite=made 'optimizers=[a,b]'",
        "dpopt report suite=made 'optim",
        "dpopt dice suite=made",
    ):
        assert command in text
    assert "dpopt plot suite=made figure=second" in Page(whole).text


def test_what_failed_is_told_once_with_its_end(maker, bare):
    cells = [maker.add("dp_adam", seed, 0.5, 0.5, status="failed") for seed in range(3)]
    store = maker.done()
    for run_id in cells[:2]:
        store.fail(run_id, "ValueError: no luck", "\n".join(f"frame {k}" for k in range(20)))
    store.fail(cells[2], "OSError: no disk", "")
    page = Page(page_of(store, bare))
    assert page.text.count("ValueError: no luck") == page.text.count("OSError: no disk") == 1
    assert "frame 19" in page.text
    assert "frame 13" not in page.text
    assert all(f"{run_id}: dp_adam on digits_mlp, target ε = 3, seed" in page.text for run_id in cells)
    assert "dpopt retry suite=made" in page.text
    assert "3 cells: 3 failed." in page.text


def test_damaged_and_missing_cells(matrix, bare, whole):
    assert "None: every planned cell has a result" in Page(whole).text
    damaged, missing = f"{0:016x}", f"{1:016x}"
    (matrix.folder(damaged) / "run.json").write_text("{")
    shutil.rmtree(matrix.folder(missing))
    (matrix.root / "runs" / "stray").write_text("")
    page = Page(page_of(matrix, bare))
    assert "21 cells: 19 done, 1 damaged, 1 pending." in page.text
    assert f"{damaged}/run.json" in page.text
    assert "stray: not a run directory" in page.text
    assert "1 of the cells have not ended" in page.text
    assert "None: every" not in page.text


def test_a_figure_that_cannot_be_drawn_costs_itself_alone(recorded, tmp_path):
    import matplotlib.pyplot as plt

    (tmp_path / "first.py").write_text(FIGURE.replace('frame.groupby("label")', 'frame.groupby("<i>")'))
    (tmp_path / "second.py").write_text(FIGURE)
    (tmp_path / "third.py").write_text(FIGURE.replace("figure, axis = plt", "raise ValueError\n    figure, axis = plt"))
    page = Page(page_of(recorded, tmp_path))
    assert len(page.all("svg")) == 1
    assert "Not drawn: first, KeyError: '<i>'" in page.text
    assert "Not drawn: third, ValueError" in page.text
    assert plt.get_fignums() == []


def test_published_numbers_where_the_suite_names_a_paper(matrix, bare):
    manifest = matrix.manifest("made")
    measured = {"name": "digits_mlp", "is": ["CIFAR10", "ViT-Small", "full"]}
    given = {"paper": "hyfreedp", "workloads": [measured], "methods": {"hyfreedp": "HyFreeDP"}}
    matrix.extend_suite("made", manifest | {"published": given})
    page = Page(page_of(matrix, bare))
    assert "published accuracy (%)" in page.tables[0][0]
    assert "dpopt table suite=made compare=published" in page.text
    matrix.extend_suite("made", manifest | {"published": given | {"paper": "nowhere"}})
    page = Page(page_of(matrix, bare))
    assert "Published numbers are left out: published.paper: 'nowhere'" in page.text
    assert "compare=published" not in page.text


def test_provenance_counts_cells(recorded, bare):
    cells = frames.load(recorded, "made").cells.assign(dirty=False, device="cpu", version_torch="2.6", commit="abc")
    cells.loc[0, ["commit", "dirty", "version_torch"]] = ["abd", True, "2.7"]
    cells.loc[1, "commit"] = None
    cells.loc[2, "state"] = "pending"
    results = Results(recorded, "made")
    results.__dict__["stored"] = frames.Stored(pd.concat([cells, cells.iloc[:1]]), [])
    *_, counts = Page(report.page(results, bare, "")).tables
    assert counts[1:] == [
        ["commit", "abc", "18"],
        ["commit", "abd with changed files", "1"],
        ["device", "cpu", "20"],
        ["torch", "2.6", "19"],
        ["torch", "2.7", "1"],
    ]


LOOK = """
const found = {};
function look(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  const drawn = [...page.querySelectorAll("svg")].map((figure) => figure.getBoundingClientRect());
  const table = page.querySelectorAll("table")[0], headers = [...table.tHead.rows[0].cells];
  const column = headers.findIndex((header) => header.textContent === "ε with tuning");
  const rows = () => [...table.tBodies[0].rows].filter((row) => row.className !== "heading");
  const read = () => [headers[column].ariaSort, ...rows().map((row) => row.cells[column].innerText)];
  const press = () => (headers[column].querySelector("button").click(), read());
  found[frame.width] = {
    overflow: root.scrollWidth - root.clientWidth,
    figures: drawn.map((box) => [box.width, box.height]),
    orders: [read(), press(), press()],
  };
  document.getElementById("found").textContent = JSON.stringify(found);
}
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the path")
def test_in_chromium(maker, folder, tmp_path):
    """At the width of a desk and of a phone: figures are seen, headers sort, only boxes scroll, nothing complains."""
    for lr in (0.1, 1.0):
        maker.add("dp_adam", 0, 0.5, 0.5, tuning="grid", tuned={"lr": lr})
    maker.add("by_hand", 0, 0.5, 0.4, tuning="fixed")
    # The last one spends an ε of two digits before the point, which sorts differently as text.
    for label, epsilon in (("hyfreedp", 3.0), ("adadp_" * 12, 3.0), ("hyfreedp", 8.0)):
        maker.add(label, 0, 0.5, 0.3, epsilon=epsilon)
    page = html.escape(page_of(maker.done(), folder))
    views = "".join(f'<iframe onload="look(this)" width="{width}" srcdoc="{page}"></iframe>' for width in (1280, 375))
    (tmp_path / "views.html").write_text(
        f'<!doctype html><meta charset="utf-8"><script>{LOOK}</script><p id="found"></p>{views}', "utf-8"
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000"]
    command = [CHROMIUM, *options, (tmp_path / "views.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(html.unescape(re.search(r'<p id="found">(.*?)</p>', done.stdout)[1]))
    assert "CONSOLE" not in done.stderr
    assert found.keys() == {"1280", "375"}
    for view in found.values():
        assert view["overflow"] == 0
        assert len(view["figures"]) == 2
        assert all(min(box) > 100 for box in view["figures"])
        (_, *before), (rising, *up), (falling, *down) = view["orders"]
        assert (rising, falling) == ("ascending", "descending")
        assert before != up != sorted(up)
        assert up[:4] == sorted(up[:4], key=float) == down[3::-1]
        assert up[4:] == down[4:] == ["not charged"]


NASTY = ["[/nope]", "=cmd|x", r"\input{x}", "<script>", "a|b", "\x1b[31m$", "@x & _y_ #"]


@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_suite_of_labels_that_mean_harm(maker, capsys, folder):
    """From the status to the report: nothing fails, and every file shows the labels and nothing else."""
    for seed, label in product(range(2), NASTY):
        maker.add(label, seed, 0.5, 0.5 + 0.01 * seed)
    store = maker.done()
    for command in ("status", "table", "rank", "report"):
        assert main([command, "suite=made", f"results={store.root}", f"plots={folder}"]) == 0, command
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        assert command != "table" or all(markup.line(label) in out for label in NASTY)
    files = {path.name: path.read_text("utf-8") for path in store.suite_folder("made").glob("*.*")}
    written = {name: text for name, text in files.items() if not name.endswith(".json")}
    assert not any("\x1b" in text for text in written.values())
    assert "<script>" not in written["report.html"].partition("<body>")[2].partition("<script>")[0]
    assert r"\input{x}" not in written["table.tex"]
    labels = {row["label"] for row in csv.DictReader(written["table.csv"].splitlines())}
    assert {label.removeprefix("'") for label in labels} == {markup.line(label) for label in NASTY}
    assert not any(re.match(r"[=+\-@]", label) for label in labels)
    read = MarkdownIt("commonmark").enable("table").render(written["table.md"])
    assert all(html.escape(markup.line(label)) in read for label in NASTY)
