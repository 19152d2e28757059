import pytest
import torch

import dpopt
from dpopt.errors import ConfigError
from dpopt.privacy import TraceOracle

T, LR = 30, 0.2


def sizes(draws=T, **fields):
    """The step sizes of a whole run."""
    optimizer, oracle = dpopt.create("scheduled", lr=LR, **fields), TraceOracle(3, 0.1, draws, device="cpu")
    state, found = optimizer.init(oracle.theta), []
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
        found.append(float(state.eta))
    return found


def torch_sizes(steps, make):
    """The learning rates of a scheduler of `torch.optim.lr_scheduler`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_warm_up_then_torchs_decay_over_what_is_left(schedule):
    found = sizes(schedule=schedule, warmup=0.2)
    assert found[:6] == pytest.approx([LR * k / 6 for k in range(1, 7)])
    make = {
        "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=24),
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=24),
    }[schedule]
    assert found[6:] == pytest.approx(torch_sizes(24, make))


def test_inverse_time_is_the_decay_of_adadps_experiments():
    found = sizes(40, schedule="inverse_time")  # 10 draws an epoch, so the decay begins after two epochs
    assert found == pytest.approx([LR] * 20 + [LR / 1.1] * 10 + [LR / 1.2] * 10)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "inverse_time"])
def test_no_draw_is_spent_on_a_step_of_size_zero(schedule):
    for draws, warmup in ((1, 0.0), (2, 0.5), (7, 0.99)):
        found = sizes(draws, schedule=schedule, warmup=warmup)
        assert len(found) == draws
        assert all(0 < eta <= LR for eta in found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup": 1.0}, r"scheduled\.warmup"),
        ({"base": {"name": "dp_adam", "lr": 0.5}}, r"Scheduled\.base\.lr"),
    ],
)
def test_bad_configuration(fields, message):
    with pytest.raises(ConfigError, match=message):
        dpopt.create("scheduled", **fields)
