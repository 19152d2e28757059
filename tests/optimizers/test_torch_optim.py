"""Optimizers behind `torch_optim` move as the packages themselves do on the same released gradients."""

import copy
import dataclasses
import math
import sys

import pytest
import torch
from dog import PolynomialDecayAverager
from imitation import imitated_cuda
from torch import nn

import dpopt
import dpopt.testing
from dpopt import registry
from dpopt.errors import ConfigError
from dpopt.optimizers.torch_optim import TorchOptim
from dpopt.privacy.oracle import ReplayOracle
from dpopt.testing import Task
from dpopt.types import Release

CASES = {
    "sgd": TorchOptim("torch.optim.SGD", 0.5, arguments={"momentum": 0.9, "weight_decay": 0.01}),
    "adam": TorchOptim("torch.optim.Adam", 0.01),
    "adamw-amsgrad": TorchOptim("torch.optim.AdamW", 0.01, arguments={"amsgrad": True, "betas": [0.8, 0.99]}),
    "adafactor": TorchOptim("torch.optim.Adafactor", 0.01),
    "prodigy": dpopt.create("prodigy"),
    "dadapt_adam": dpopt.create("dadapt_adam"),
    "dog-averaged": dpopt.create("dog", arguments={"reps_rel": 0.1}),
    "ldog": TorchOptim("dog.LDoG", 1.0, arguments={"init_eta": 0.3}, averaging=2.0, step_size="eta"),
    "schedulefree-adamw": dpopt.create("schedulefree_adamw", arguments={"warmup_steps": 4, "weight_decay": 0.1}),
    "schedulefree-radam": TorchOptim("schedulefree.RAdamScheduleFree", 0.01, arguments={"betas": [0.9, 0.9]}),
}


def states(optimizer, oracle, state):
    """The states after each step, until the budget is spent."""
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
        yield state


def package(optimizer, theta):
    """One object of the wrapped class, made and stepped by hand, over a model whose only parameter is theta."""
    model = nn.Module()
    model.theta = nn.Parameter(theta.clone())
    module, _, name = optimizer.optimizer.rpartition(".")
    cls = getattr(__import__(module, fromlist=[name]), name)
    return model, cls(model.parameters(), lr=optimizer.lr, **optimizer.arguments)


def evaluated(model, wrapped):
    """Where a schedule-free optimizer is to be evaluated; the model's parameter for any other."""
    if not hasattr(wrapped, "eval"):
        return model
    # A copy, as going there and back would round.
    point, twin = copy.deepcopy((model, wrapped))
    twin.eval()
    return point


@pytest.mark.parametrize("optimizer", CASES.values(), ids=CASES)
def test_iterates_are_those_of_the_package(optimizer, capsys):
    task, transcript = Task(), []
    oracle = task.oracle(task.plan(optimizer), transcript)
    start = task.engine.theta
    reached = list(states(optimizer, oracle, optimizer.init(start)))
    model, wrapped = package(optimizer, start)
    averager = PolynomialDecayAverager(model, optimizer.averaging) if optimizer.averaging else None
    for state, (release,) in zip(reached, transcript, strict=True):
        if hasattr(wrapped, "train"):
            wrapped.train()
        model.theta.grad = release.value.clone()
        wrapped.step()
        assert torch.equal(state.point, model.theta)
        expected = evaluated(model, wrapped)
        if averager:
            averager.model = expected
            averager.step()
            expected = averager.averaged_model
        assert torch.equal(state.theta, expected.theta)
        size = wrapped.param_groups[0][optimizer.step_size]
        assert float(state.eta) == float(size[0] if isinstance(size, list) else size)
    assert not torch.equal(reached[-1].theta, start)
    assert capsys.readouterr().out == ""  # some print when they are made, here before every step


class Constant(ReplayOracle):
    """Hands out the given gradients."""

    def __init__(self, optimizer, gradients):
        task = Task()
        plan = dataclasses.replace(task.plan(optimizer, epsilon=math.inf), dimension=len(gradients[0]))
        filled = [*gradients, *[gradients[-1]] * (plan.draws - len(gradients))]
        super().__init__([[Release(gradient, 0.0)] for gradient in filled], plan)


@pytest.mark.parametrize("theta", [torch.ones(107), torch.zeros(107)], ids=["ones", "zeros"])
def test_a_first_gradient_of_zero_leaves_prodigy_unbegun(theta):
    optimizer, g = CASES["prodigy"], torch.linspace(-1, 1, 107)
    delayed = list(states(optimizer, Constant(optimizer, [torch.zeros(107), g]), optimizer.init(theta)))
    straight = list(states(optimizer, Constant(optimizer, [g]), optimizer.init(theta)))
    assert not delayed[0].begun
    assert all(torch.equal(a.theta, b.theta) for a, b in zip(delayed[1:], straight, strict=False))
    assert not torch.equal(straight[-1].theta, theta)


def test_specs_round_trip_and_hash():
    made = dpopt.create("torch_optim", arguments={"weight_decay": "1e-3", "betas": [0.8, 0.9], "amsgrad": True})
    spec = registry.spec("optimizer", "torch_optim", made)
    assert spec["arguments"] == {"amsgrad": True, "betas": [0.8, 0.9], "weight_decay": 1e-3}
    assert registry.from_spec("optimizer", spec) == made
    again = TorchOptim(arguments={"betas": (0.8, 0.9), "amsgrad": True, "weight_decay": 1e-3})
    assert (again, hash(again), repr(again)) == (made, hash(made), repr(made))
    assert hash(made) != hash(TorchOptim())
    assert dict(made.arguments) == {"amsgrad": True, "betas": (0.8, 0.9), "weight_decay": 1e-3}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "nowhere_at_all.Adam"}, r"No module named 'nowhere_at_all'.*pip install nowhere_at_all"),
        (
            {"optimizer": "dadaptation.Cat"},
            r"dadaptation.Cat' cannot be used; it needs pip install 'dpopt\[param",
        ),
        ({"optimizer": "dog.Cat"}, r"cannot be imported.*pip install 'dpopt\[parameter-free\]'"),
        ({"arguments": {"beta": 1}}, r"TorchOptim.arguments: \{'lr': 0.01, 'beta': 1\}.*unexpected keyword.*'beta'"),
        ({"optimizer": "torch.optim.Muon"}, r"TorchOptim.arguments.*2D.*with `rest`"),
        ({"arguments": {"lr": 3, "clip": 1}}, r"^TorchOptim\.arguments: \['clip', 'lr'\].*the field of that name"),
        ({"arguments": {"hook": print}}, r"arguments.hook.*expected a number, a string"),
        ({"optimizer": "torch.optim.LBFGS"}, "no step from a gradient alone.*closure"),
        ({"rest": "torch.optim.AdamWW"}, r"^TorchOptim\.rest: 'torch\.optim\.AdamWW'.*cannot be imported"),
        ({"rest": "torch.optim.LBFGS"}, r"^TorchOptim\.rest: 'torch\.optim\.LBFGS'.*no step from a gradient alone"),
        ({"rest": "torch.optim.SGD", "rest_arguments": {"lrr": 1}}, r"^TorchOptim\.rest_arguments.*SGD refuses.*'lrr'"),
        ({"rest_arguments": {"lr": 1}}, r"^TorchOptim\.rest_arguments: .*none without `rest`"),
        ({"step_size": "eta"}, "TorchOptim.step_size: 'eta' cannot be used.*known: .*lr"),
    ],
)
def test_refused_before_any_work(values, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "dadaptation", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=message):
        TorchOptim(**values)


class Precise(torch.optim.SGD):
    """Keeps its sums in float64, though loading casts them: torch what belongs to a parameter, this class its group."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.param_groups[0]["length"] = self.param_groups[0]["length"].float()

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        (parameter,) = group["params"]
        state, g = self.state[parameter], parameter.grad.double()
        state["sum"] = state.get("sum", 0) + g / 3
        group["length"] = group.get("length", 0) + g.norm() / 3
        parameter.sub_(group["lr"] * state["sum"] / group["length"])


def test_state_keeps_its_precision(monkeypatch):
    monkeypatch.setattr(torch.optim, "Precise", Precise, raising=False)
    optimizer, theta, g = TorchOptim("torch.optim.Precise", 0.3), torch.ones(107), torch.linspace(-1, 2, 107)
    *_, state = states(optimizer, Constant(optimizer, [g]), optimizer.init(theta))
    model, wrapped = package(optimizer, theta)
    for _ in range(12):
        model.theta.grad = g.clone()
        wrapped.step()
    assert torch.equal(state.theta, model.theta)
    assert [tensor.dtype for tensor in state.tensors] == [torch.float64] * 2
    kept = (wrapped.state[model.theta]["sum"], wrapped.param_groups[0]["length"])
    assert all(map(torch.equal, state.tensors, kept))


class Forgetful(torch.optim.SGD):
    """Keeps a list that grows, or an object that is no number: no state of one structure."""

    keeps = staticmethod(lambda history: [*(history or []), 1.0])

    def step(self, closure=None):
        super().step(closure)
        group = self.param_groups[0]
        group["history"] = self.keeps(group.get("history"))


def test_state_that_is_not_tensors_and_numbers_is_refused(monkeypatch):
    for name, keeps in (("Growing", Forgetful.keeps), ("Secretive", lambda history: object())):
        monkeypatch.setattr(torch.optim, name, type(name, (Forgetful,), {"keeps": staticmethod(keeps)}), raising=False)
        with pytest.raises(ConfigError, match="tensors and numbers of one structure"):
            TorchOptim(f"torch.optim.{name}")


class Late(torch.optim.SGD):
    """Begins to keep something in its third step."""

    def step(self, closure=None):
        super().step(closure)
        state = self.state[self.param_groups[0]["params"][0]]
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 3:
            state["late"] = 1.0


def test_a_structure_that_changes_later_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.optim, "Late", Late, raising=False)
    optimizer = TorchOptim("torch.optim.Late")
    with pytest.raises(RuntimeError, match="Late keeps other things"):
        list(states(optimizer, Constant(optimizer, [torch.ones(107)]), optimizer.init(torch.ones(107))))


@pytest.mark.parametrize(
    ("name", "most"), [("torch_optim", 0), ("schedulefree_adamw", 0), ("prodigy", 2), ("dadapt_adam", 2), ("dog", 5)]
)
def test_a_step_on_a_gpu_waits_where_the_package_reads_a_value_and_nowhere_else(name, most):
    optimizer, seen = dpopt.create(name), []
    recording = Task().record(optimizer)
    with imitated_cuda(seen.append):
        oracle = recording.oracle(lambda value: value.to("cuda"))
        state = optimizer.step(optimizer.init(recording.start.to("cuda")), oracle)
        seen.clear()
        state = optimizer.step(state, oracle)
        assert len(seen) <= most, seen
    assert (state.theta.is_cuda, state.eta.is_cuda) == (True, True)
    assert (state.begun.is_cuda, state.numbers.is_cuda) == (False, False)


MUON = TorchOptim(
    "torch.optim.Muon",
    0.02,
    arguments={"adjust_lr_fn": "match_rms_adamw"},
    rest="torch.optim.AdamW",
    rest_arguments={"betas": [0.9, 0.95]},
)
SPLIT = {"muon": MUON, "sgd": TorchOptim("torch.optim.SGD", 0.1, arguments={"momentum": 0.9}, rest="torch.optim.Adam")}


@pytest.mark.parametrize("optimizer", SPLIT.values(), ids=SPLIT)
def test_matrices_and_the_rest_have_an_optimizer_each(optimizer):
    task, transcript = Task(), []
    oracle = task.oracle(task.plan(optimizer), transcript)
    reached = list(states(optimizer, oracle, optimizer.init(task.engine.theta)))
    model = copy.deepcopy(task.model)
    matrices, others = ([p for p in model.parameters() if (p.dim() == 2) == is_its] for is_its in (True, False))
    one, two = (getattr(torch.optim, path.rpartition(".")[2]) for path in (optimizer.optimizer, optimizer.rest))
    pair = (
        one(matrices, lr=optimizer.lr, **optimizer.arguments),
        two(others, **{"lr": optimizer.lr, **optimizer.rest_arguments}),
    )
    for state, (release,) in zip(reached, transcript, strict=True):
        for part, parameter in zip(oracle.layout, model.parameters(), strict=True):
            parameter.grad = part.of(release.value).clone()
        for each in pair:
            each.step()
        torch.testing.assert_close(state.theta, nn.utils.parameters_to_vector(model.parameters()), rtol=1e-6, atol=1e-7)


def test_two_optimizers_conform():
    kept = {
        "can_be_traced",
        "survives_yaml",
        "replays_bit_for_bit",
        "resumes_bit_for_bit",
        "is_pure",
        "imports_no_data",
    }
    checks = [check for check in dpopt.testing.checks(MUON) if check.name in kept]
    assert len(checks) == len(kept)
    for check in checks:
        check()


def test_a_model_without_matrices_has_the_rest_alone():
    g = torch.linspace(-1, 1, 107)
    *_, state = states(MUON, Constant(MUON, [g]), MUON.init(torch.zeros(107)))
    *_, alone = states(CASES["adam"], Constant(CASES["adam"], [g]), CASES["adam"].init(torch.zeros(107)))
    assert (
        state.theta.abs().max() < 1 < 10 * alone.theta.abs().max()
    )  # the whole vector is one part, which is no matrix
