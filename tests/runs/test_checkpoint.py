"""Nothing of a damaged checkpoint is used, and who has lost a cell while it was busy writes nothing."""

import hashlib
import io
import os
import random

import pytest
import torch
from small_suites import train_cell
from stored import stable
from torch.utils import _pytree as pytree

from dpopt.errors import Held
from dpopt.privacy import Ledger
from dpopt.runs import prepare as preparing
from dpopt.runs import train as cells
from dpopt.store import Damaged, Store
from dpopt.suites.plan import plan
from dpopt.training.checkpoint import Elapsed, Reached


def alike(one, other):
    """Whether two states are the same bit for bit."""
    leaves, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(leaves) == len(others) and all(map(torch.equal, leaves, others))


@pytest.fixture
def every(write_suite):
    return [entry.cell for entry in plan(write_suite(overrides=["optimizers=[hyfreedp]", "diagnostics=true"]))]


@pytest.fixture
def cell(every):
    return every[0]


@pytest.fixture
def stopped(cell, store):
    """A store where the cell was stopped after its eighth draw, and its checkpoint's file."""
    answers = iter([False] * 7 + [True])
    with pytest.raises(cells.Interrupted):
        train_cell(cell, store, device="cpu", stop=lambda: next(answers))
    assert (store.state(cell.run_id), store.holder(cell.run_id)) == ("interrupted", None)
    return store, store.folder(cell.run_id, "checkpoint.pt").read_bytes()


@pytest.fixture
def load(cell, stopped):
    """What a file in place of the checkpoint gives: how far the run is then, and how far it is from the sound one."""
    ready, (store, _) = cells.prepare(cell, device="cpu"), stopped
    beginning = Reached(ready.state, Ledger(), Elapsed(), [])

    def loaded(content):
        store.folder(cell.run_id, "checkpoint.pt").write_bytes(content)
        return preparing._resumed(store, cell.run_id, beginning, ready.plan, ready.diagnostics)

    return loaded, ready.state


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def begins_anew(reached, initial):
    return alike(reached.state, initial) and reached[1:] == (Ledger(), (0.0, 0.0), [])


def test_no_flipped_bit_is_used(load, stopped, capsys):
    loaded, initial = load
    _, sound = stopped
    assert len(loaded(sound).ledger) == 8
    chance, count = random.Random(0), 400
    for bit in chance.sample(range(8 * len(sound)), count):
        assert begins_anew(loaded(flipped(sound, bit)), initial)
    assert capsys.readouterr().out.count("starting over") == count, "a line for each"


def test_no_other_harm_is_used_either(load, stopped, store, capsys):
    loaded, initial = load
    _, sound = stopped
    middle = len(sound) // 2
    other = io.BytesIO()
    torch.save({**torch.load(io.BytesIO(sound[:-32]), weights_only=True), "run_id": "ab" * 8}, other)
    harmed = {
        "empty": b"",
        "half": sound[:middle],
        "all but a byte": sound[:-1],
        "longer": sound + b"\0",
        "swapped": sound[middle:] + sound[:middle],
        "unsealed": sound[:-32],  # as older versions wrote it
        "of another": other.getvalue() + hashlib.sha256(other.getvalue()).digest(),
    }
    for harm, content in harmed.items():
        assert begins_anew(loaded(content), initial), harm
        assert capsys.readouterr().out.count("starting over") == 1


def test_a_missing_checkpoint_is_no_harm(cell, stopped, capsys):
    store, _ = stopped
    store.folder(cell.run_id, "checkpoint.pt").unlink()
    cells.prepare(cell, device="cpu", store=store)
    assert capsys.readouterr().out == ""
    with pytest.raises(FileNotFoundError):
        store.load_checkpoint(cell.run_id)
    store.folder(cell.run_id, "checkpoint.pt").mkdir()
    cells.prepare(cell, device="cpu", store=store)
    assert "starting over" in capsys.readouterr().out


def test_a_cell_with_a_damaged_checkpoint_ends_as_if_it_had_none(cell, stopped, tmp_path, at_marks):
    store, sound = stopped
    store.folder(cell.run_id, "checkpoint.pt").write_bytes(flipped(sound, 4 * len(sound)))
    with pytest.raises(Damaged, match="checksum"):
        store.load_checkpoint(cell.run_id)
    quiet, draws = Store(tmp_path / "quiet"), []
    with at_marks(draws.append):
        assert stable(train_cell(cell, store)) == stable(train_cell(cell, quiet))
    assert draws[0] == 1
    assert store.curve(cell.run_id) == quiet.curve(cell.run_id)


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_the_curve_goes_on_from_the_checkpoint_too(cell, stopped, tmp_path, at_marks, damage):
    """Not from its file, which has no checksum while the cell is unfinished."""
    store, _ = stopped
    path, quiet = store.folder(cell.run_id) / "curve.jsonl", Store(tmp_path / "quiet")
    text = path.read_text()
    path.write_text(text.replace('"test_accuracy":0.', '"test_accuracy":0.1', 1))
    assert path.read_text() != text
    if damage == "gone":
        path.unlink()
    draws = []
    with at_marks(draws.append):
        assert stable(train_cell(cell, store)) == stable(train_cell(cell, quiet))
    assert draws[0] == 9
    assert store.curve(cell.run_id) == quiet.curve(cell.run_id)


class Witness(Store):
    """Notes what is written after another process has taken over."""

    taken_over = False
    late = ()


def noted(name):
    def write(self, *given):
        if Witness.taken_over:
            Witness.late = (*Witness.late, name)
        return getattr(Store, name)(self, *given)

    return write


for name in ("begin", "append_curve", "restart_curve", "save_checkpoint", "finish"):
    setattr(Witness, name, noted(name))
WORK = {
    "while it is prepared": (preparing, "_resumed", 1),
    "in an evaluation": (cells.Prepared, "observe", 5),
    "in the last evaluation": (cells.Prepared, "observe", 20),
    "while a checkpoint is made": (cells.checkpoint, "dump", 3),
    "while the record is made": (cells, "_record", 1),
}


@pytest.mark.parametrize("when", WORK)
def test_who_loses_a_lease_at_work_writes_nothing_of_it(write_suite, store, tmp_path, monkeypatch, when):
    cell = plan(write_suite(overrides=["optimizers=[hyfreedp]"]))[0].cell
    where, name, number = WORK[when]
    calls, work = [], getattr(where, name)

    def overtaken(*given, **how):
        made = work(*given, **how)
        calls.append(1)
        if len(calls) == number and not Witness.taken_over:
            (store.folder(cell.run_id) / "lease").unlink()
            os.close(os.open(store.folder(cell.run_id) / "lease", os.O_CREAT))
            Witness.taken_over = True
        return made

    monkeypatch.setattr(Witness, "taken_over", False)
    monkeypatch.setattr(Witness, "late", ())
    with monkeypatch.context() as patch:
        patch.setattr(where, name, overtaken)
        with pytest.raises(Held, match="taken over"):
            train_cell(cell, Witness(store.root), device="cpu", checkpoint_seconds=0)
    assert Witness.taken_over
    assert Witness.late == ()
    draws = [entry["draw"] for entry in store.curve(cell.run_id)]
    assert draws == sorted(set(draws)), "no entry twice"
    (store.folder(cell.run_id) / "lease").unlink()
    quiet = Store(tmp_path / "quiet")
    assert stable(train_cell(cell, store)) == stable(train_cell(cell, quiet))
    assert store.curve(cell.run_id) == quiet.curve(cell.run_id)
