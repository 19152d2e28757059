"""One release, one noise: whatever an optimizer does, its releases have different places, which are the ledger's.

And what it hands over is a value: a change in place, from wherever, reaches neither what is summed nor its bound.
"""

import copy
import os
import pickle
import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpopt.audit.games import Prescribed
from dpopt.clipping import Abadi, engine
from dpopt.clipping.rules import AtBound, Bounded
from dpopt.errors import ConfigError
from dpopt.privacy import BudgetSpent, DataOracle, Draw, Ledger, Plan, Query, TraceOracle, UnplannedRelease, sampling
from dpopt.privacy.oracle import OpenDraw

D, DRAWS = 3, 4
MULTIPLES = {"gradient": 1.0, "losses": 1.0, "counts": 1.0}
COPIERS = (copy.copy, copy.deepcopy, pickle.dumps)
REFUSED = (UnplannedRelease, BudgetSpent, ConfigError, TypeError)


class Interrupting(Prescribed):
    """An engine in the middle of which something happens."""

    def __init__(self):
        super().__init__(D)
        self.during = []

    def clipped(self, *query):
        for happens in self.during:
            happens()
        return super().clipped(*query)


class Rule:
    """A clip rule in the middle of which something happens, while it is read and while it is used."""

    sensitivity = 1.0

    def __init__(self, during):
        self.during = during

    def factor(self, norm):
        for happens in self.during:
            happens()
        return (1 / norm).clamp(max=1)


class Failing(Exception):
    pass


class Play:
    """An oracle, all draws that were ever opened, and the places of the noise that was drawn."""

    def __init__(self):
        plan = Plan(MULTIPLES, Ledger([Draw(1.0, (1.0,) * 60)] * DRAWS), 1.0, 1.0, DRAWS, D, 1e-5, "pld")
        self.engine = Interrupting()
        x, y = torch.ones(5, D, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
        self.oracle = DataOracle(self.engine, x, y, plan, draw_seed=1, noise_seed=2)
        self.contexts, self.batches, self.places, self.charged = [], [], [], 0

    def happens(self, action):
        """Do one thing of those that may be done at any time; what is refused has not happened."""
        name, which, inner = action
        with suppress(*REFUSED):
            if name == "open":
                context = self.oracle.draw()
                self.batches.append(context.__enter__())
                self.contexts.append(context)
            elif name == "copy":
                COPIERS[which](self.oracle if which else self.batches[-1])
            elif name == "fail" and self.engine.during:
                raise Failing
            elif not self.contexts:
                return
            elif name == "close":
                self.contexts.pop().__exit__(None, None, None)
            elif name == "crash":
                with suppress(Failing):
                    self.contexts.pop().__exit__(Failing, Failing(), None)
            elif name == "ask":
                self.ask(self.batches[-1 - which % len(self.batches)], which, inner)

    def ask(self, batch, which, inner):
        theta = torch.zeros(D)
        if which == 0 and not inner:
            batch.losses([theta, theta], 1.0)
        elif which == 1 and not inner:
            batch.below(1.0)
        else:
            todo = [lambda action=action: self.somewhere(action) for action in inner]
            if which % 2:
                batch.gradient(theta, Rule(todo))
                return
            outer, self.engine.during = self.engine.during, todo
            try:
                batch.gradient(theta, Abadi(1.0))
            finally:
                self.engine.during = outer

    def somewhere(self, action):
        """Do it in this thread, or in another one that is waited for."""
        if action[1] % 2 or action[0] == "fail":
            self.happens(action)
        else:
            thread = threading.Thread(target=self.happens, args=(action,))
            thread.start()
            thread.join()


NAMES = st.sampled_from(["open", "close", "crash", "copy", "fail", "ask", "ask", "ask"])
INNER = st.lists(st.tuples(NAMES, st.integers(0, 2), st.just(())), max_size=3)
ACTIONS = st.lists(st.tuples(NAMES, st.integers(0, 2), INNER), min_size=3, max_size=16)


@given(ACTIONS)
def test_whatever_happens_no_two_releases_share_their_noise(actions):
    play = Play()
    with pytest.MonkeyPatch.context() as patch:
        add_gaussian, charge = sampling.add_gaussian, OpenDraw._charge

        def noted(total, std, seed, draw, number):
            releases = 1 if total.dtype == torch.float32 else len(total)
            play.places += [(draw, number + i) for i in range(releases)]
            add_gaussian(total, std, seed, draw, number)

        def counted(batch, asked):
            charged = charge(batch, asked)
            play.charged += asked.releases
            return charged

        patch.setattr(sampling, "add_gaussian", noted)
        patch.setattr(OpenDraw, "_charge", counted)
        for action in [("open", 0, ()), *actions, ("close", 0, ())]:
            with suppress(Failing):
                play.happens(action)
        while play.contexts:
            play.contexts.pop().__exit__(None, None, None)
    ledger = [(draw, number) for draw, taken in enumerate(play.oracle.ledger) for number in range(len(taken.noises))]
    assert len(set(play.places)) == len(play.places)
    assert set(play.places) <= set(ledger)
    assert len(ledger) == play.charged
    if not any("fail" in str(action) for action in actions):
        assert sorted(play.places) == ledger


@pytest.mark.parametrize("copier", COPIERS)
def test_what_counts_cannot_be_copied(copier):
    play = Play()
    for oracle in (play.oracle, TraceOracle(D, 0.1, 1)):
        with oracle.draw() as batch:
            for counting in (oracle, batch):
                with pytest.raises(TypeError, match="cannot be copied: the copy would release the same noise"):
                    copier(counting)


def test_two_threads_do_not_ask_at_once():
    play, theta, refused = Play(), torch.zeros(D), []

    def ask():
        try:
            batch.losses([theta], 1.0)
        except UnplannedRelease as error:
            refused.append(str(error))

    thread = threading.Thread(target=ask)
    play.engine.during = [thread.start, thread.join]
    with play.oracle.draw() as batch:
        batch.gradient(theta, Abadi(1.0))
        play.engine.during = []
        batch.losses([theta], 1.0)  # and afterwards it is free again
    assert refused == ["another query is being answered: an oracle answers one after the other"]
    assert play.oracle.ledger == Ledger([Draw(1.0, (1.0, 1.0))])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_is_a_copy_and_gets_nothing():
    play = Play()
    with play.oracle.draw() as batch:
        child = os.fork()
        if not child:
            try:
                batch.losses([torch.zeros(D)], 1.0)
            except UnplannedRelease as error:
                os._exit(0 if "forked" in str(error) else 1)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


N, WIDTH, BOUND = 6, 4, 0.5


class Latent(nn.Module):
    """A layer sees a parameter itself, as in a Perceiver: what is kept for the sum is a view of the point."""

    def __init__(self):
        super().__init__()
        self.latent = nn.Parameter(torch.ones(1, 2, WIDTH))
        self.inner, self.outer = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return (self.inner(self.latent.expand(len(x), -1, -1)) * self.outer(x)[:, None]).sum((1, 2))


class Changing:
    """A rule of one's own that bounds as `Abadi(BOUND)` and changes something in place before it answers."""

    sensitivity = BOUND

    def __init__(self, change):
        self.change = change

    def factor(self, norm):
        self.change()
        return (BOUND / norm).clamp(max=1)


def asked(name, change_where, changed):
    """The un-noised sums of one draw, where the tensors that are `changed` grow in place while a query is answered."""
    torch.manual_seed(0)
    model = Latent()
    made = engine(model, lambda output, target: (output - target).square(), name)
    x, y = torch.randn(N, WIDTH), torch.randn(N)
    noise = dict.fromkeys(MULTIPLES, 0.0)
    plan = Plan(noise, Ledger([Draw(1.0, (0.0,) * 4)]), 1.0, 1.0, 1, made.dimension, 1e-5, "pld")
    oracle = DataOracle(made, x, y, plan, draw_seed=1, noise_seed=2)
    handed = {
        "point": made.theta,
        "weight": torch.tensor(0.7, dtype=torch.float64),
        "scale": torch.full_like(made.theta, 0.5),
        "clip": torch.tensor(2.0, dtype=torch.float64),
        "bound": torch.tensor(BOUND, dtype=torch.float64),
    }

    def change():
        for each in changed:
            handed[each].data.mul_(1e4)

    def hook(*_):
        if change_where == "hook":
            change()
        elif change_where == "thread":
            thread = threading.Thread(target=change)
            thread.start()
            thread.join()

    rule = Changing(change) if change_where == "rule" else AtBound(handed["clip"])
    with oracle.draw() as batch:
        model.register_forward_hook(hook)  # not before: the records are looked at when the draw is opened
        gradient = batch.gradient([(handed["weight"], handed["point"])], rule, handed["scale"]).value * N
        losses = (batch.losses([made.theta], handed["bound"]).value / handed["bound"] - 0.5).sum()
    return gradient, losses


@pytest.mark.parametrize(
    ("name", "where"),  # under `torch.func` a hook cannot change in place what was handed over
    [*(("bookkeeping", where) for where in ("rule", "hook", "thread")), ("vmap", "rule"), ("vmap", "thread")],
)
@pytest.mark.parametrize("changed", ["point", "weight", "scale", "clip"])
def test_a_change_in_place_does_not_reach_a_query(name, where, changed):
    expected, _ = asked(name, where, [])
    gradient, _ = asked(name, where, [changed])
    assert float(gradient.norm()) <= N * (BOUND if where == "rule" else 1.0) * (1 + 1e-6)
    if where != "rule":  # which is also tried while the query is read
        torch.testing.assert_close(gradient, expected)


class Printing(Query):
    """A query of one's own that looks at the record in every way that prints."""

    kind, releases, sensitivity = "counts", 1, 1.0

    def contribution(self, record):
        PRINTED.extend([f"{record}", repr(record.norm * 2), str(record.losses.detach()), f"{record.norm.sqrt()}"])
        return (record.norm > 1).double().reshape(1)


PRINTED = []


class PrintingRule:
    sensitivity = 1.0

    def factor(self, norm):
        PRINTED.extend([f"{norm}", repr(norm + 1), str([norm.detach()])])
        return (1 / norm).clamp(max=1)


def test_one_record_cannot_be_printed():
    PRINTED.clear()
    play = Play()
    with play.oracle.draw() as batch:
        batch.gradient(torch.zeros(D), PrintingRule())
        batch.ask(Printing())
    assert not any("1.73" in text or "2.73" in text for text in PRINTED)  # sqrt(3), and one more
    # A rule is also tried on made-up norms, all at once: those may be printed.
    assert sum("of one record, shape" in text for text in PRINTED) == len(PRINTED) - 3


class Odd:
    """A rule whose factor is of another type."""

    sensitivity = 1.0

    def __init__(self, convert):
        self.convert = convert

    def factor(self, norm):
        return self.convert((1 / norm).clamp(max=1))


@pytest.mark.parametrize("convert", [torch.Tensor.half, lambda factor: factor > 2], ids=range(2))
def test_a_factor_of_another_real_type_is_converted(convert):
    made = engine(nn.Linear(D, 1), lambda output, target: (output.squeeze(1) - target).square(), "vmap")
    everyone = torch.ones(N, dtype=torch.bool)
    total = made.clipped_sum([(1.0, made.theta)], torch.ones(N, D), torch.ones(N), everyone, Bounded(Odd(convert), 1.0))
    assert (total.dtype, bool(total.isfinite().all())) == (torch.float32, True)


THETA = torch.zeros(D)
BAD = {
    "losses.bound": lambda batch: batch.losses([THETA], 10**400),
    "counts.bound": lambda batch: batch.below(torch.ones(1, 1)),
    r"gradient.at\[0\]": lambda batch: batch.gradient([(10**400, THETA)], Abadi(1.0)),
    r"gradient.at\[1\].* one number": lambda batch: batch.gradient(
        [(1.0, THETA), (torch.ones(N, 1), THETA)], Abadi(1.0)
    ),
    "gradient.clip.bound": lambda batch: batch.gradient(THETA, AtBound(torch.ones(5))),
    "clip": lambda batch: batch.gradient(THETA, Odd(lambda factor: factor + 0j)),
}


def test_what_is_no_number_is_one_error_and_not_charged():
    play = Play()
    with play.oracle.draw() as batch:
        for field, query in BAD.items():
            with pytest.raises(ConfigError, match=f"^{field}"):
                query(batch)
    assert play.oracle.ledger == Ledger([Draw(1.0, ())])
