"""Merging copies what is not here, and never a run over another."""

import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pandas as pd
import pytest

from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger
from dpopt.store import Store, archives
from dpopt.store.identity import identity
from dpopt.store.merge import merge
from dpopt.store.published import PublishedStore
from dpopt.store.runs import sealed, unsealed

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published"
CURVE = [{"draw": 1, "test_accuracy": 0.25}, {"draw": 2, "test_accuracy": 0.5}]
LEDGER = Ledger([Draw(0.5, (1.0,))] * 2).to_json()


def cell(seed):
    return {
        "workload": {"name": "digits_mlp"},
        "optimizer": {"name": "dp_sgd"},
        "epsilon": 3.0,
        "delta": 1e-5,
        "accountant": "pld",
        "batch_size": 32,
        "epochs": 1.0,
        "seed": seed,
    }


def add(store, seed, **more):
    """A finished run; gives its id."""
    run_id = identity(cell(seed))
    store.begin(run_id, cell(seed))
    store.restart_curve(run_id, CURVE)
    record = {"schema": 1, "run_id": run_id, "cell": cell(seed), "status": "done", "epsilon": 3.0}
    record |= {"epsilon_target": 3.0, "delta": 1e-5, "provenance": {}, "test_accuracy": 0.5, **more}
    store.finish(run_id, record, LEDGER)
    return run_id


def planned(seed, label="dp_sgd"):
    rest = {"label": label, "tuning": "self", "tuned": {}, "clip": 1.0}
    return {"run_id": identity(cell(seed)), "cell": cell(seed), **rest}


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def there(tmp_path):
    return Store(tmp_path / "there")


@pytest.fixture
def here(tmp_path):
    return Store(tmp_path / "here")


def test_what_is_not_here_is_copied_byte_for_byte(there, here):
    ids = [add(there, seed) for seed in range(3)]
    there.write_manifest("small", {"suite": "small", "cells": [planned(seed) for seed in range(3)]})
    before = contents(there.root)
    merged = merge(there, here)
    assert sorted(merged.copied) == sorted(ids)
    assert contents(there.root) == contents(here.root) == before
    again = merge(there, here)
    assert (again.copied, again.same, again.suites) == ([], 3, {"small": 0})
    assert contents(here.root) == before


def test_equal_results_of_two_machines_are_the_same(there, here):
    run_id = add(here, 0, seconds_train=1.0, peak_memory=5, provenance={"device": "cpu"})
    add(there, 0, seconds_train=2.0, peak_memory=6, provenance={"device": "cuda"})
    merged = merge(there, here)
    assert (merged.same, merged.conflicts) == (1, [])
    assert here.record(run_id)["seconds_train"] == 1.0


def test_a_run_in_a_process_of_its_own_has_the_same_results(there, here):
    add(here, 0)
    add(there, 0, isolated=True)
    merged = merge(there, here)
    assert (merged.same, merged.conflicts) == (1, [])


@pytest.mark.parametrize(
    ("theirs", "same"),
    [
        ({}, 1),
        ({"diagnostics": {"class_norms": [1.0]}, "tested": 100}, 1),
        ({"diagnostics": {"class_norms": [2.0]}}, 0),
        ({"tested": 99}, 0),
    ],
)
def test_what_a_record_may_lack_is_compared_where_both_have_it(there, here, theirs, same):
    """Published are the diagnostics of a method's best setting alone; older records do not say `tested`."""
    run_id = add(here, 0, diagnostics={"class_norms": [1.0]}, tested=100)
    add(there, 0, **theirs)
    merged = merge(there, here)
    assert (merged.same, merged.conflicts) == (same, [] if same else [run_id])


def test_different_results_are_a_conflict_and_stay(there, here):
    ours, theirs = add(here, 0), add(there, 0, test_accuracy=0.6)
    before = contents(here.root), contents(there.root)
    merged = merge(there, here)
    assert ours == theirs
    assert merged.conflicts == [ours]
    assert (contents(here.root), contents(there.root)) == before


def test_what_was_begun_here_is_finished_by_the_merge(there, here):
    run_id = add(there, 0)
    here.begin(run_id, cell(0))
    here.append_curve(run_id, {"draw": 1, "test_accuracy": 0.1})
    here.checkpoint(run_id).write_bytes(b"half way")
    here.fail(run_id, "out of memory")
    assert merge(there, here).copied == [run_id]
    assert here.state(run_id) == "done"
    assert contents(here.folder(run_id)) == contents(there.folder(run_id))


def test_what_has_no_result_there_stays_there(there, here):
    there.begin(identity(cell(0)), cell(0))
    there.fail(identity(cell(1)), "no luck")
    merged = merge(there, here)
    assert merged.unfinished == 2
    assert not here.root.exists()


def test_a_run_that_a_process_has_here_is_left_to_it(there, here):
    run_id = add(there, 0)
    with here.lease(run_id):
        assert merge(there, here).running == [run_id]
        assert here.state(run_id) == "running"
    assert merge(there, here).copied == [run_id]


def tampered(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("name", ["cell.json", "curve.jsonl", "ledger.json", "record.json"])
def test_damaged_runs_are_reported_and_left(there, here, name):
    bad, good = add(there, 0), add(there, 1)
    tampered(there.folder(bad), name)
    merged = merge(there, here)
    assert merged.copied == [good]
    assert len(merged.damaged) == 1
    assert bad in merged.damaged[0]
    assert not here.folder(bad).exists()


def test_a_damaged_run_here_is_never_overwritten(there, here):
    run_id = add(there, 0)
    add(here, 0)
    tampered(here.folder(run_id), "record.json")
    before = contents(here.root)
    merged = merge(there, here)
    assert "record.json" in merged.damaged[0]
    assert contents(here.root) == before


def test_a_record_of_another_cell_is_damaged(there, here):
    run_id = add(there, 0)
    path = there.folder(run_id) / "record.json"
    record = there.record(run_id)
    record["cell"]["seed"] = 5
    path.write_text(json.dumps(sealed(record)))
    assert "do not belong together" in merge(there, here).damaged[0]


@pytest.mark.parametrize("harm", ["checksums", "infinity", "folder"])
def test_a_run_of_the_wrong_content_stops_no_merge(there, here, harm):
    bad, good = add(there, 0), add(there, 1)
    path, record = there.folder(bad) / "record.json", there.record(bad)
    if harm == "checksums":
        path.write_text(json.dumps(record | {"checksums": []}))
    elif harm == "infinity":
        changed = cell(0) | {"delta": float("inf")}
        (there.folder(bad) / "cell.json").write_text(json.dumps(changed))
        path.write_text(json.dumps({**record, "cell": changed, "checksums": {}}))
    else:
        del record["checksums"]
        path.write_text(json.dumps(record))
        (there.folder(bad) / "curve.jsonl").unlink()
        (there.folder(bad) / "curve.jsonl").mkdir()
    merged = merge(there, here)
    assert merged.copied == [good]
    (line,) = merged.damaged
    assert bad in line


def test_suites_are_joined(there, here):
    here.write_manifest("small", {"suite": "small", "description": "ours", "cells": [planned(0)]})
    theirs = [planned(0), planned(0, "other"), planned(1)]
    there.write_manifest("small", {"suite": "small", "description": "theirs", "cells": theirs})
    (there.suite_folder("broken")).mkdir(parents=True)
    (there.suite_folder("broken") / "manifest.json").write_text("{")
    merged = merge(there, here)
    assert merged.suites == {"small": 2}
    assert here.manifest("small")["description"] == "ours"
    assert [entry["label"] for entry in here.manifest("small")["cells"]] == ["dp_sgd", "other", "dp_sgd"]
    assert "broken" in merged.damaged[0]
    assert not here.suite_folder("broken").exists()


def test_measurements_are_copied_whole(there, here):
    folder = there.add("bench", {"schema": 1, "rows": []})
    (folder / "table.md").write_text("| a |")
    forged = there.add("audit", {"schema": 1, "rows": []})
    (forged / "record.json").write_text('{"schema": 1, "rows": [1]}')
    merged = merge(there, here)
    assert merged.measurements == 1
    assert contents(here.root / "bench") == contents(there.root / "bench")
    assert "named by" in merged.damaged[0]
    assert merge(there, here).measurements == 0


SECRET = "do not tell"


@pytest.fixture
def secret(tmp_path):
    """Files outside of both folders."""
    (tmp_path / "outside").mkdir()
    for name in ("secret.txt", "table.md", "step_cost.svg", "curve.jsonl", "record.json", "manifest.json"):
        (tmp_path / "outside" / name).write_text(SECRET)
    return tmp_path / "outside"


def has_secret(store):
    return any(SECRET.encode() in content for content in contents(store.root).values())


def test_only_known_files_of_a_measurement_are_copied(there, here, secret, capsys):
    folder = there.add("bench", {"schema": 1, "rows": []})
    for name in ("table.md", "step_cost.svg", "step_cost.png"):
        (folder / name).write_text(name)
    (folder / "evil.py").write_text("print('run')")
    (folder / "\x1b[31mred.txt").write_text("?")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "table.md").write_text("?")
    (folder / "more.png").symlink_to(secret / "secret.txt")
    os.mkfifo(folder / "pipe.png")
    assert main(["merge", str(there.root), f"results={here.root}"]) == 0
    copied = {path.name for path in (here.root / "bench" / folder.name).rglob("*")}
    assert copied == {"record.json", "table.md", "step_cost.svg", "step_cost.png"}
    assert not has_secret(here)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    for name in ("evil.py", "__pycache__", "more.png", "pipe.png", "[31mred.txt"):
        assert name in line
    assert "\x1b" not in line


@pytest.mark.parametrize("what", ["runs", "group", "run", "curve.jsonl", "record.json", "dangling", "loop"])
def test_no_link_to_a_run_is_followed(there, here, secret, what):
    """Also where the other record has no checksums, by which what lies behind it would be found out."""
    good, bad = add(there, 0), add(there, 1)
    folder = there.folder(bad)
    place = {"runs": there.root / "runs", "group": folder.parent, "run": folder}.get(what, folder / "curve.jsonl")
    if what == "record.json":
        place = folder / what
    record = there.record(bad)
    del record["checksums"]
    (folder / "record.json").write_text(json.dumps(record))
    aside = there.root.parent / "aside"
    place.rename(aside)
    targets = {"curve.jsonl": secret / "curve.jsonl", "dangling": secret / "nothing", "loop": place}
    place.symlink_to(targets.get(what, aside))
    merged = merge(there, here)
    assert merged.copied == ([] if what == "runs" else [good])
    assert merged.left_out == {str(place.relative_to(there.root))}
    assert not has_secret(here)


@pytest.mark.parametrize("place", ["suites", "suites/small", "suites/small/manifest.json", "bench", "bench/{name}"])
def test_no_other_link_is_followed(there, here, place):
    name = there.add("bench", {"schema": 1, "rows": []}).name
    there.write_manifest("small", {"suite": "small", "cells": [planned(0)]})
    path = there.root / place.format(name=name)
    path.rename(there.root.parent / "aside")
    path.symlink_to(there.root.parent / "aside")
    merged = merge(there, here)
    assert merged.left_out == {place.format(name=name)}
    assert (merged.measurements, len(merged.suites)) == ((0, 1) if "bench" in place else (1, 0))


def test_the_folder_itself_may_be_reached_by_a_link(there, here, tmp_path):
    run_id = add(there, 0)
    (tmp_path / "linked").symlink_to(there.root)
    assert merge(Store(tmp_path / "linked"), here).copied == [run_id]


def test_a_folder_is_not_merged_into_itself(there):
    add(there, 0)
    with pytest.raises(ConfigError, match="itself"):
        merge(there, Store(there.root / "." / "runs" / ".."))


def test_a_merge_that_is_killed_goes_on_and_no_record_is_half_copied(there, here):
    ids = [add(there, seed) for seed in range(150)]
    command = [sys.executable, "-c", "import sys; from dpopt.cli import main; sys.exit(main(sys.argv[1:]))"]
    command += ["merge", str(there.root), f"results={here.root}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and len(list((here.root / "runs").glob("*/*/record.json"))) < 10:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    copied = [run_id for run_id in ids if here.state(run_id) == "done"]
    assert 10 <= len(copied) < len(ids), "killed on its way"
    for run_id in copied:
        assert contents(here.folder(run_id)).items() >= contents(there.folder(run_id)).items()
    merged = merge(there, here)
    assert (merged.same, len(merged.copied)) == (len(copied), len(ids) - len(copied))
    assert all(here.record(run_id) == there.record(run_id) for run_id in ids)


def test_the_command_says_what_it_did(there, here, capsys):
    add(there, 0)
    arguments = ["merge", str(there.root), f"results={here.root}"]
    assert main(arguments) == 0
    assert "1 runs copied, 0 were here" in capsys.readouterr().out
    shutil.rmtree(there.root)
    conflict = add(there, 0, test_accuracy=0.9)
    assert main(arguments) == 1
    assert f"conflict {conflict}" in capsys.readouterr().out
    for bad in (["merge"], ["merge", "/nowhere"], ["merge", str(there.root), "result=x"], [*arguments, "more"]):
        assert main(bad) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("kind", ["w", "w:gz", "w:xz"])
def test_an_archive_is_merged_as_its_folder_is(there, here, kind, tmp_path, capsys):
    ids = [add(there, seed) for seed in range(3)]
    archive = tmp_path / "records.tar"
    with tarfile.open(archive, kind) as file:
        file.add(there.root / "runs", "runs")
    assert main(["merge", str(archive), f"results={here.root}"]) == 0
    assert "3 runs copied" in capsys.readouterr().out
    assert all(contents(here.folder(run_id)) == contents(there.folder(run_id)) for run_id in ids)
    archive.write_bytes(archive.read_bytes()[:100])
    assert main(["merge", str(archive), f"results={here.root}"]) == 2
    assert f"error: FROM: '{archive}'" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("is_archive", [True, False])
def test_results_may_lie_in_a_folder_of_what_is_given(there, here, is_archive, tmp_path, capsys):
    """As `tar czf records.tgz results` makes it."""
    run_id = add(there, 0)
    source = tmp_path / "above"
    (source / "plots").mkdir(parents=True)
    (source / "README.md").write_text("ours")
    there.root.rename(source / "results")
    if is_archive:
        with tarfile.open(tmp_path / "records.tgz", "w:gz") as file:
            file.add(source, ".")
        source = tmp_path / "records.tgz"
    assert main(["merge", str(source), f"results={here.root}"]) == 0
    assert "1 runs copied" in capsys.readouterr().out
    assert here.state(run_id) == "done"


@pytest.mark.parametrize("what", ["nothing", "other files", "too deep", "two", "a link"])
def test_what_holds_no_results_is_refused(there, here, what, tmp_path, capsys):
    add(there, 0)
    (source := tmp_path / "source").mkdir()
    if what == "other files":
        (source / "data").mkdir()
        (source / "data" / "cells.csv").write_text("a,b")
    elif what == "too deep":
        shutil.copytree(there.root, source / "backup" / "results")
    elif what == "two":
        shutil.copytree(there.root, source / "old")
        shutil.copytree(there.root, source / "new")
    elif what == "a link":
        (source / "results").symlink_to(there.root)
    assert main(["merge", str(source), f"results={here.root}"]) == 2
    assert f"error: FROM: '{source}' cannot be used; holds no results" in " ".join(capsys.readouterr().err.split())
    with tarfile.open(tmp_path / "records.tar", "w") as file:
        if what != "a link":
            file.add(source, "source" if what == "nothing" else ".")
    assert main(["merge", str(tmp_path / "records.tar"), f"results={here.root}"]) == 2
    assert "records.tar' cannot be used; holds no results" in " ".join(capsys.readouterr().err.split())
    assert not here.root.exists()


@pytest.mark.parametrize("name", ["../escaped", "{tmp}/escaped", "runs/../../escaped"])
def test_an_archive_writes_nowhere_else(here, tmp_path, name, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # archives are unpacked there, and what escapes is seen
    (tmp_path / "evil").write_text("out")
    member = tarfile.TarInfo(name.format(tmp=tmp_path))
    member.size = 3
    with tarfile.open(tmp_path / "records.tar", "w") as file, (tmp_path / "evil").open("rb") as content:
        file.addfile(member, content)
    assert main(["merge", str(tmp_path / "records.tar"), f"results={here.root}"]) == 2
    assert "is no file below the folder" in capsys.readouterr().err.replace("\n", " ")
    assert not any(tmp_path.parent.rglob("escaped"))


def test_a_name_that_no_file_can_have_is_refused(here, tmp_path, capsys):
    member = tarfile.TarInfo("runs/é")
    member.pax_headers = {"path": "runs/\0x"}
    with tarfile.open(tmp_path / "records.tar", "w", format=tarfile.PAX_FORMAT) as file:
        file.addfile(member)
    assert main(["merge", str(tmp_path / "records.tar"), f"results={here.root}"]) == 2
    assert "no tar archive that can be unpacked" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_an_archive_holds_plain_files_alone(here, tmp_path, kind, capsys):
    member = tarfile.TarInfo("runs")
    member.type, member.linkname = kind, str(tmp_path)
    with tarfile.open(tmp_path / "records.tar", "w") as file:
        file.addfile(member)
    assert main(["merge", str(tmp_path / "records.tar"), f"results={here.root}"]) == 2
    assert "is no file below the folder" in capsys.readouterr().err.replace("\n", " ")


def bomb(path, kind, size):
    """An archive of zeros: `size` bytes in one file, in many empty ones, in a header, or in a hole."""
    with tarfile.open(path, "w:xz", format=tarfile.GNU_FORMAT) as file:
        member = tarfile.TarInfo("runs/zeros")
        if kind == "file":
            member.size = size
            file.addfile(member, Zeros(size))
        elif kind == "files":
            for number in range(size // 512 + 1):
                member.name = f"runs/{number}"
                file.addfile(member)
        elif kind == "header":
            member.type, member.size = tarfile.XHDTYPE, size
            file.addfile(member, Zeros(size))
        else:
            member.type = tarfile.GNUTYPE_SPARSE
            content = bytearray(member.tobuf(tarfile.GNU_FORMAT))
            content[386:398] = content[398:410] = b"0" * 11 + b"\0"
            content[483:495] = b"%011o\0" % size
            content[148:156] = b"        "
            content[148:156] = b"%06o\0 " % sum(content[:512])
            file.fileobj.write(content)
    return path


class Zeros:
    def __init__(self, left):
        self.left = left

    def read(self, size):
        given = min(size, self.left)
        self.left -= given
        return bytes(given)


@pytest.mark.parametrize("kind", ["file", "files", "header", "hole"])
def test_an_archive_that_unpacks_to_far_more_than_it_is_is_refused(here, tmp_path, kind, capsys, monkeypatch):
    monkeypatch.setattr(archives, "SMALL", 2**18)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    written = []
    monkeypatch.setattr(archives.shutil, "copyfileobj", lambda read, out: written.append(len(read.read())))
    path = bomb(tmp_path / "bomb.tar.xz", kind, 2**23)
    limit = max(2**18, archives.RATIO * path.stat().st_size)
    assert limit < 2**22
    assert main(["merge", str(path), f"results={here.root}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert ("is no file below the folder" if kind == "hole" else "times its size; unpack it yourself") in said
    assert sum(written) <= limit
    assert not here.root.exists()


def test_what_really_is_published_is_far_from_the_limit():
    """Records shrink to a twentieth; the limit is for what shrinks to a hundredth."""
    found = sorted(ROOT.glob("results/published/*/records.tar.xz"))
    assert found
    for path in found:
        with lzma.open(path) as file:
            assert len(file.read()) < archives.RATIO / 4 * path.stat().st_size


def test_runs_come_back_from_a_published_suite(here, capsys):
    published = PublishedStore(PUBLISHED, only="handcrafted_cnn_mnist")
    assert main(["merge", str(PUBLISHED / "handcrafted_cnn_mnist"), f"results={here.root}"]) == 0
    assert "5 runs copied" in capsys.readouterr().out
    assert sorted(here.run_ids()) == published.run_ids()
    assert here.suites() == published.suites() == ["handcrafted_cnn_mnist"]
    for run_id in here.run_ids():
        record = here.record(run_id) | {"checksums": published.record(run_id)["checksums"]}
        assert record == published.record(run_id)
        assert here.ledger(run_id) == published.ledger(run_id)
        assert here.curve(run_id) == published.curve(run_id) != []
    assert merge(published, here).same == 5
    assert main(["verify", f"results={here.root}"]) == 0


def test_what_is_published_is_what_the_archive_of_its_records_has(here):
    """Byte for byte: the curves of the runs that a table takes, and records and ledgers of all."""
    published = PublishedStore(PUBLISHED, only="adadp_mnist")
    assert len(merge(published, here).copied) == 84
    with archives.unpacked(PUBLISHED / "adadp_mnist" / "records.tar.xz") as folder:
        merged = merge(Store(folder), here)
        kept = [run_id for run_id in here.run_ids() if here.folder(run_id, "curve.jsonl").exists()]
        assert len(kept) == 60
        for run_id in kept:
            ours, theirs = (store.folder(run_id, "curve.jsonl").read_bytes() for store in (here, Store(folder)))
            assert ours == theirs
    assert merged.same == 84
    assert not merged.conflicts


def test_runs_that_were_published_in_part_do_not_come_back(here):
    merged = merge(PublishedStore(PUBLISHED, only="adadp_cifar10_own"), here)
    assert not merged.copied
    assert "published without all of the record" in merged.damaged[0]
    assert here.run_ids() == []


def test_nor_do_those_that_are_not_what_they_are_named_by(here, tmp_path):
    folder = tmp_path / "published" / "changed"
    shutil.copytree(PUBLISHED / "handcrafted_cnn_mnist", folder)
    cells = pd.read_parquet(folder / "cells.parquet")
    record = unsealed(json.loads(cells.loc[0, "record"]), "the row")
    record["cell"]["seed"] = 7
    cells.loc[0, "record"] = json.dumps(sealed(record))
    cells.to_parquet(folder / "cells.parquet")
    merged = merge(PublishedStore(folder.parent), here)
    assert len(merged.copied) == 4
    assert "do not belong together" in merged.damaged[0]


def test_no_link_in_a_published_folder_is_followed(here, tmp_path):
    folder = tmp_path / "published" / "linked"
    folder.mkdir(parents=True)
    (folder / "cells.parquet").symlink_to(PUBLISHED / "handcrafted_cnn_mnist" / "cells.parquet")
    merged = merge(PublishedStore(folder.parent), here)
    assert (merged.copied, merged.left_out) == ([], {"linked/cells.parquet"})
