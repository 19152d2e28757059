"""A published suite is the store's own: read like a results folder, copied into one, and added to."""

import json
import lzma
import shutil
import sys
import zlib
from pathlib import Path

import pytest
from small_suites import QUICK

from dpopt import files, load_suite, run_suite
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.results.publishing import differences, publish, remake
from dpopt.results.results import Results, load_results
from dpopt.results.verify import verify
from dpopt.store import Store, manifests

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
SUITE = (
    QUICK
    + """
optimizers: [hyfreedp, twice, dp_sgd]
settings: {dp_sgd: {grid: {lr: [0.1, 1.0]}}, twice: {name: hyfreedp}}
seeds: [0]
"""
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A results folder, the same published, and the suite's file; a run stands for two labels, one cell has failed."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "mixed.yaml").write_text(SUITE)
    (folder / "plots").mkdir()
    suite, store = load_suite(folder / "mixed.yaml"), Store(folder / "results")
    run_suite(suite, store.root, progress=False)
    lost = store.manifest("mixed")["cells"][-1]["run_id"]
    shutil.rmtree(store.folder(lost))
    publish(Results(store, "mixed"), folder / "published", folder / "plots", partial=True)
    return folder


def test_the_same_is_read_of_both(mixed, tmp_path):
    store, published = Store(mixed / "results"), Store(mixed / "published")
    assert published.archive("another") == ([], {}), "a suite without an archive, asked for first"
    assert {path.name for path in (mixed / "published" / "mixed").iterdir()} >= {
        "suite.json",
        manifests.RUNS,
        "table.md",
    }
    assert published.suites() == ["mixed"]
    assert published.manifest("mixed")["cells"] == store.manifest("mixed")["cells"]
    for entry in store.manifest("mixed")["cells"]:
        assert published.state(entry["run_id"]) == store.state(entry["run_id"])
    selected = set(Results(store, "mixed").every["run_id"])
    for run_id in store.run_ids():
        assert Store(published.root).is_settled(run_id), "one that has read nothing yet"
        run = store.run(run_id)
        assert store.place(run_id) == str(store.folder(run_id) / "run.json")
        assert published.place(run_id) == f"{mixed / 'published' / 'mixed' / manifests.RUNS}, {run_id}"
        assert published.run(run_id) == (run if run_id in selected else run._replace(curve=None))
    assert verify(published).findings == []
    for name in ("table.md", "table.tex", "ranking_epsilon.md"):
        text = (mixed / "published" / "mixed" / name).read_text()
        assert "1 of 3 cells have no result; seeds that need them are left out." in text
    with pytest.raises(ConfigError, match="1 of 3 cells have no result; partial=true publishes what is there"):
        publish(Results(store, "mixed"), tmp_path / "again", mixed / "plots")
    assert not (tmp_path / "again").exists()
    publish(Results(store, "mixed"), tmp_path / "again", mixed / "plots", partial=True)
    for path in (mixed / "published" / "mixed").iterdir():
        assert (tmp_path / "again" / "mixed" / path.name).read_bytes() == path.read_bytes(), "the same bytes each time"


def test_published_runs_are_dropped_only_where_that_is_said(mixed, tmp_path):
    shutil.copytree(mixed / "published", tmp_path / "published")
    one = load_suite(mixed / "mixed.yaml", ["optimizers=[hyfreedp]"])
    run_suite(one, tmp_path / "results", progress=False)
    results, plots = Results(Store(tmp_path / "results"), "mixed"), mixed / "plots"
    for chosen, message in (((), "1 runs that are published have no result in"), (["bars"], "figure: 'bars'")):
        with pytest.raises(ConfigError, match=message):
            publish(results, tmp_path / "published", plots, chosen)
    for path in (mixed / "published" / "mixed").iterdir():
        assert (tmp_path / "published" / "mixed" / path.name).read_bytes() == path.read_bytes()
    publish(results, tmp_path / "published", plots, partial=True)
    assert len(Store(tmp_path / "published").archive("mixed").runs) == 1


def test_nothing_is_written_among_published_suites(mixed):
    published = Store(mixed / "published")
    for write in (published.check_writable, lambda: published.write(published.root / "mixed" / "page.html", "")):
        with pytest.raises(ConfigError, match="only read"):
            write()
    assert main(["run", f"suite={mixed / 'mixed.yaml'}", f"results={published.root}"]) == 2


def test_a_published_suite_that_is_copied_and_extended_trains_what_is_new(mixed, tmp_path):
    shutil.copytree(mixed / "published" / "mixed", tmp_path / "suites" / "mixed")
    before = (tmp_path / "suites" / "mixed" / manifests.RUNS).read_bytes()
    suite = load_suite(mixed / "mixed.yaml", optimizers=["hyfreedp", "twice", "adadp"])
    outcome = run_suite(suite, tmp_path, progress=False)
    store = Store(tmp_path)
    assert outcome.ran == len(store.run_ids()) == 1
    assert store.record(store.run_ids()[0])["cell"]["optimizer"]["name"] == "adadp"
    whole = load_results(tmp_path, "mixed")
    assert set(whole.table()["label"]) == {"hyfreedp", "twice", "adadp"}, "a search that lacks a run has no row"
    assert len(whole.cells) == 5
    assert (tmp_path / "suites" / "mixed" / manifests.RUNS).read_bytes() == before
    assert verify(store).findings == []
    again = run_suite(load_suite(mixed / "mixed.yaml"), tmp_path, progress=False)
    assert (again.ran, len(store.run_ids())) == (1, 2), "the one that was not published"


def repacked(path, change):
    """Write the lines of an archive again, each as `change` returns it."""
    lines = [change(number, line) for number, line in enumerate(manifests.unpack(path))]
    path.write_bytes(manifests.pack(files.sealed(line) for line in lines if line is not None))


def cheaper(number, line):
    if "record" in line:
        line["record"]["epsilon"] *= 0.9
    return line


CHANGES = {
    "a lower epsilon": (cheaper, "epsilon"),
    "another ledger": (lambda number, line: {**line, "ledger": {**line.get("ledger", {}), "runs": [[0, 1]]}}, "draws"),
    "a label": (lambda number, line: {**line, "entry": {**line["entry"], "label": f"{number}"}}, "another table"),
    "a run is gone": (lambda number, line: line if number else None, "mixed"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_follow_is_a_finding_though_it_was_sealed_again(mixed, tmp_path, name):
    change, word = CHANGES[name]
    shutil.copytree(mixed / "published", tmp_path / "published")
    path = tmp_path / "published" / "mixed" / manifests.RUNS
    repacked(path, change)
    lines = [str(finding) for finding in verify(Store(tmp_path)).findings]
    assert any(word in line for line in lines), lines


def greedy(content):
    """An archive that asks for a dictionary of 4 GiB to be unpacked."""
    content = bytearray(lzma.compress(lzma.decompress(content)))
    end = 12 + 4 * (content[12] + 1)  # of the block's header, behind the stream's
    content[content.index(b"\x21\x01", 12) + 2] = 40  # LZMA2, one byte of properties
    content[end - 4 : end] = zlib.crc32(content[12 : end - 4]).to_bytes(4, "little")
    return bytes(content)


BROKEN = {
    "cut": lambda content: content[:-20],
    "empty": lambda content: b"",
    "text": lambda content: b"what is this?",
    "longer": lambda content: content + content,
    "half a line": lambda content: lzma.compress(lzma.decompress(content)[:-3]),
    "a bomb": lambda content: lzma.compress(bytes(2**26 + 1)),
    "a dictionary of gigabytes": greedy,
    "no entries": lambda content: manifests.pack([files.sealed({"entry": 3}), files.sealed({"run": 3})]),
    "deep": lambda content: manifests.pack([files.sealed({"entry": json.loads("[" * 900 + "]" * 900)})]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_archive_is_one_error_that_names_it(mixed, tmp_path, kind):
    shutil.copytree(mixed / "published", tmp_path / "published")
    path = tmp_path / "published" / "mixed" / manifests.RUNS
    path.write_bytes(BROKEN[kind](path.read_bytes()))
    store = Store(tmp_path / "published")
    with pytest.raises(ConfigError, match=r"runs\.jsonl\.xz"):
        store.manifest("mixed")
    assert store.state("ab" + "0" * 14) == "pending"
    assert len(verify(Store(tmp_path)).findings) == 1


def test_a_line_that_was_changed_is_named_by_its_number(mixed, tmp_path):
    path, archive = tmp_path / manifests.RUNS, mixed / "published" / "mixed" / manifests.RUNS
    first, second, *rest = lzma.decompress(archive.read_bytes()).splitlines(keepends=True)
    for lines, number in (([b"?" + first[1:], second, *rest], 1), ([first, b"?" + second[1:], *rest], 2)):
        path.write_bytes(lzma.compress(b"".join(lines)))
        with pytest.raises(files.Damaged, match=rf"{manifests.RUNS}, line {number}\b"):
            [*manifests.unpack(path)]


def test_a_figure_that_a_suite_names_is_drawn_and_compared(mixed, tmp_path):
    plots = tmp_path / "plots"
    plots.mkdir()
    (plots / "bars.py").write_text(
        'NEEDS = "comparison"\n\n\ndef draw(frame, styles):\n    import matplotlib.pyplot as plt\n\n'
        '    figure, axes = plt.subplots()\n    axes.bar(frame["label"], frame["mean"])\n    return figure\n'
    )
    to, folder = tmp_path / "published", tmp_path / "published" / "mixed"
    results = Results(Store(mixed / "results"), "mixed")
    publish(results, to, plots, partial=True)
    assert Store(to).manifest("mixed")["figures"] == ["bars"]
    assert verify(Store(to), plots=plots).findings == []
    (folder / "bars.svg").unlink()
    assert verify(Store(to), plots=plots).findings == [], "drawn, as the suite names it, and not compared"
    publish(results, to, plots, partial=True)
    assert not (folder / "bars.svg").exists(), "published again without what no page links"
    (folder / "other.svg").write_text("<svg/>")
    (plots / "bars.py").write_text('NEEDS = "comparison"\n\n\ndef draw(frame, styles):\n    return None\n')
    lines = [str(finding) for finding in verify(Store(to), plots=plots).findings]
    assert any("bars.svg" in line and "cannot be drawn" in line for line in lines)
    assert any("other.svg" in line and "does not name" in line for line in lines)


def test_the_old_layout_is_rewritten(mixed, tmp_path, monkeypatch):
    """Runs and manifests as they were before a run was one file."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import migrate

    store, old = Store(mixed / "results"), tmp_path / "old"
    for run_id in store.run_ids():
        run, folder = store.run(run_id), old / "runs" / run_id[:2] / run_id
        folder.mkdir(parents=True)
        (folder / "cell.json").write_text(json.dumps(run.record["cell"]))
        (folder / "ledger.json").write_text(json.dumps(run.ledger))
        (folder / "curve.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in run.curve))
        (folder / "record.json").write_text(json.dumps(run.record))
    (old / "suites" / "mixed").mkdir(parents=True)
    (old / "suites" / "mixed" / "manifest.json").write_text(json.dumps(store.manifest("mixed")))
    with pytest.raises(ConfigError, match=r"benchmarks/migrate\.py"):
        load_results(old, "mixed")
    migrate.main(str(old))
    again = Store(old)
    assert again.manifest("mixed") == store.manifest("mixed")
    assert [again.run(run_id) for run_id in again.run_ids()] == [store.run(run_id) for run_id in store.run_ids()]
    assert {path.name for path in again.folder(again.run_ids()[0]).iterdir()} == {"run.json"}
    sys.modules.pop("migrate")


def test_tuning_free_cifar10_is_published_as_a_whole():
    """Its file names the cells that were run, and no more."""
    published = Store(Path(__file__).parents[2] / "results" / "published").manifest("tuning_free_cifar10")["cells"]
    planned = [cell.run_id for cell in load_suite("tuning_free_cifar10").cells()]
    assert sorted(planned) == sorted(entry["run_id"] for entry in published)


def test_the_table_of_c_and_b_is_one_that_the_runs_give(tmp_path):
    shutil.copytree(PUBLISHED / "film_small", tmp_path / "film_small")
    results, table = Results(Store(tmp_path), "film_small"), tmp_path / "film_small" / "clip_batch.csv"
    assert list(differences(results)) == []
    table.write_text(table.read_text().replace(",lost,", ",gained,", 1))
    assert list(differences(results)) == [(table, "the runs give another table")]
    table.unlink()
    assert list(differences(results)) == [(table, "the runs give another table")]
    # A table that an older version made, and today's runs do not give, goes with the next publication.
    (stale := table.with_name("ranking_epsilon.md")).write_text("| rank |")
    assert {path for path, _ in differences(results)} == {table, stale}
    remake(tmp_path, "film_small", Path("plots"))
    assert list(differences(results)) == []
    assert not stale.exists()
