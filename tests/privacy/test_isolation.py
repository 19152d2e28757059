"""An optimizer in a process of its own gives the same numbers, and gets at nothing but releases."""

import os
import signal
from dataclasses import dataclass

import pytest
import torch
from wrong import CHEATS, PLAIN, GradThief, Scaled, Spying, TapThief

import dpopt
from dpopt.errors import ConfigError
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy.isolation import Isolated, IsolatedFailure
from dpopt.privacy.wire import Gone
from dpopt.testing.task import Task, require_same


def run(optimizer):
    task = Task()
    oracle = task.oracle(task.plan(optimizer))
    return task.run(optimizer, oracle), oracle


@pytest.mark.parametrize("name", ["dp_sgd", "hyfreedp", "adaptive_clip", "fiber", "scale_then_privatize", "prodigy"])
def test_the_numbers_are_the_same_bit_for_bit(name):
    expected, oracle = run(dpopt.create(name))
    isolated = Isolated(name)
    found, answering = run(isolated)
    require_same(found, expected, "isolation changes numbers")
    assert answering.ledger == oracle.ledger
    assert repr(isolated) == repr(dpopt.create(name))
    assert hasattr(found, "eta") == hasattr(expected, "eta")
    if hasattr(expected, "eta"):
        assert found.eta == expected.eta


def test_a_state_that_was_kept_goes_on_in_another_process():
    """As a checkpoint does: the leaves of one process are those of the next."""
    expected, _ = run(dpopt.create("fiber"))
    task, first = Task(), Isolated("fiber")
    plan = task.plan(first)
    oracle = task.oracle(plan)
    half = task.run(first, oracle, until=6)
    kept = [leaf.clone() for leaf in half.leaves]
    second = Isolated("fiber")
    state = second.init(task.engine.theta)
    leaves, structure = torch.utils._pytree.tree_flatten(state)
    assert len(leaves) == len(kept)
    state = torch.utils._pytree.tree_unflatten(kept, structure)
    require_same(task.run(second, task.oracle(plan, ledger=oracle.ledger), state), expected, "it ends elsewhere")


def without_a_look(cheat):
    """What the cheat does where it sees nothing."""
    if isinstance(cheat, GradThief):
        return cheat  # in this process, where the graph is gone as well
    return Scaled() if isinstance(cheat, TapThief) else PLAIN


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_ends_in_an_error_or_where_it_would_have_without_a_look(name):
    cheat = CHEATS[name]
    try:
        found, _ = run(Isolated(cheat))
    except (IsolatedFailure, ConfigError, Gone):
        return
    assert torch.equal(found.theta, run(without_a_look(cheat))[0].theta)


@pytest.mark.parametrize("name", ["thief", "garbage collector", "stack", "detect"])
def test_in_the_same_process_these_cheats_do_see_something(name):
    """Negative control: the test above would pass for cheats that do not cheat."""

    class Longer(Task):
        def plan(self, optimizer, **changes):
            return dpopt.privacy.calibrate(
                optimizer, rate=0.3, draws=14, dimension=75, epsilon=5.0, delta=1e-5, accountant="rdp"
            )

    ends = []
    for optimizer in (CHEATS[name], PLAIN):
        task = Longer()
        ends.append(task.run(optimizer, task.oracle(task.plan(optimizer))).theta)
    assert not torch.equal(*ends)


def test_a_clip_rule_of_its_own_is_not_evaluated_beside_the_data():
    with pytest.raises((IsolatedFailure, ConfigError), match="kernel's rules"):
        run(Isolated(Spying()))


def test_a_tensor_of_its_own_class_arrives_as_its_numbers():
    found, _ = run(Isolated(TapThief()))
    assert torch.equal(found.theta, run(Scaled())[0].theta)


@dataclass(frozen=True)
class Dies(DPSGD):
    def step(self, state, oracle):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Raises(DPSGD):
    def step(self, state, oracle):
        raise ZeroDivisionError("in its step")


@dataclass(frozen=True)
class Asks(DPSGD):
    """For more than is planned, and goes on."""

    def step(self, state, oracle):
        with oracle.draw() as batch:
            gradient = self.observe(state, batch, self.clip)
            if oracle.draws_left == 3 and oracle.rate != 1:
                try:
                    batch.losses([state.theta], 1.0)
                except dpopt.privacy.UnplannedRelease:
                    gradient = dpopt.privacy.Release(torch.ones_like(gradient.value), 0.0)
        direction, state = self.direction(state, gradient)
        return state._replace(theta=state.theta - self.lr * direction)


@pytest.mark.parametrize(
    ("kind", "error", "message"), [(Dies, Gone, "ended"), (Raises, IsolatedFailure, "in its step")]
)
def test_what_goes_wrong_there_is_told_here(kind, error, message):
    with pytest.raises(error, match=message):
        run(Isolated(kind()))


def test_what_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'fiber'"):
        Isolated("fibre")
    with pytest.raises(ConfigError, match="cannot be sent"):
        Isolated(lambda: None)


def test_its_process_ends_with_it():
    isolated = Isolated("dp_sgd")
    channel = isolated._channel
    isolated.close()
    with pytest.raises((Gone, ValueError)):
        channel.send({"do": "fetch"})


@pytest.mark.filterwarnings("ignore:seed")
def test_fit_is_the_same():
    task = Task()
    data = (task.x, task.y)
    runs = []
    for isolate in (False, True):
        model = Task().model
        result = dpopt.fit(
            model,
            task.loss,
            data,
            optimizer="hyfreedp",
            epsilon=3.0,
            delta=1e-3,
            epochs=2,
            batch_size=10,
            accountant="rdp",
            isolate=isolate,
            progress=False,
            seed=1,
        )
        runs.append((result.curve, [p.clone() for p in result.model.parameters()]))
        assert result.record["isolated"] == isolate
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
