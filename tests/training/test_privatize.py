import subprocess
import sys

import opacus
import pytest
import timm
import torch
from opacus.validators import ModuleValidator
from short import loss
from torch import nn

import dpopt
from dpopt.clipping import engine
from dpopt.errors import ConfigError


class Read(nn.Module):
    """The class of a sequence x [n, T, 4], by a recurrent layer and its last output."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.LazyLinear(2)
        self(torch.zeros(1, 3, 4))

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Stepped(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(5, 2)

    def forward(self, x):
        state = None
        for each in x.unbind(1):
            state = self.cell(each, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def convolutional(norm):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 2)
    )


IMAGES, ROWS, WORDS = (3, 16, 16), (4,), (3, 4)
CASES = {
    "batchnorm": (lambda: convolutional(nn.BatchNorm2d(16)), IMAGES),
    "batchnorm_plain": (lambda: convolutional(nn.BatchNorm2d(16, affine=False)), IMAGES),
    "batchnorm_of_rows": (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), ROWS),
    "normalised_and_activated": (lambda: timm.create_model("test_efficientnet", num_classes=2), (3, 32, 32)),
    "instancenorm": (lambda: convolutional(nn.InstanceNorm2d(16, track_running_stats=True)), IMAGES),
    "gru": (lambda: Read(nn.GRU(4, 5, batch_first=True)), WORDS),
    "lstm": (lambda: Read(nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)), WORDS),
    "rnn": (lambda: Read(nn.RNN(4, 5, nonlinearity="relu", batch_first=True)), WORDS),
    "gru_cell": (lambda: Stepped(nn.GRUCell(4, 5)), WORDS),
    "lstm_cell": (lambda: Stepped(nn.LSTMCell(4, 5)), WORDS),
}


def made(name):
    torch.manual_seed(0)
    build, shape = CASES[name]
    return build(), (torch.randn(3, *shape), torch.tensor([0, 1, 1]))


@pytest.mark.parametrize("name", CASES)
def test_what_was_refused_is_followed(name):
    model, sample = made(name)
    with pytest.raises(ConfigError):
        engine(model, loss, sample=sample, batch=4)
    private, changes = dpopt.privatize(model)
    assert changes
    assert engine(private, loss, sample=sample, batch=4).dimension == sum(p.numel() for p in private.parameters())
    assert sum(p.numel() for p in private.parameters()) == sum(p.numel() for p in model.parameters())
    if name in ("gru", "lstm", "rnn", "gru_cell", "lstm_cell"):  # the same is computed
        torch.testing.assert_close(private(sample[0]), model(sample[0]))


def test_groups_are_those_of_opacus():
    model, (x, _) = made("batchnorm")
    fixed, private = ModuleValidator.fix(model), dpopt.privatize(model).model
    assert [str(module) for module in private] == [str(module) for module in fixed]
    torch.testing.assert_close(private(x), fixed(x))


def test_groupnorm_in_place_of_batchnorm_of_rows_is_not_constant():
    """Opacus' is: one channel a group, and one value a channel."""
    model, (x, _) = made("batchnorm_of_rows")
    assert float(ModuleValidator.fix(model)[1](model[0](x)).detach().abs().max()) < 1e-4
    assert dpopt.privatize(model).model[1](model[0](x)).std() > 0.5


def test_type_flags_mode_ties_and_the_model_itself_are_kept():
    model = nn.ModuleList([nn.BatchNorm2d(4), nn.GRU(4, 5), nn.Linear(4, 2)]).double()
    model.append(model[0])
    model[0].weight.data.fill_(3.0)
    model[1].weight_ih_l0.requires_grad_(False)
    model[0].eval()
    before = str(model)
    private, changes = dpopt.privatize(model)
    assert str(model) == before
    assert private[0] is private[3] is not model[0]
    assert len(changes) == 3
    assert changes[0] == "0: BatchNorm2d became GroupNorm(4, 4, eps=1e-05, affine=True, bias=True)"
    assert {p.dtype for p in private.parameters()} == {torch.float64}
    assert bool((private[0].weight == 3).all())
    assert not private[0].training
    frozen = [name for name, p in private.named_parameters() if not p.requires_grad]
    assert frozen == ["1.weight_ih_l0"]
    assert isinstance(private[1], opacus.layers.DPGRU)


def test_what_is_switched_off_is_said_and_nothing_to_change_gives_the_model():
    """Opacus' fixer switches tracking off and leaves the statistics, which torch goes on changing."""
    private, changes = dpopt.privatize(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, track_running_stats=True))
    )
    assert changes == ["1: its running statistics are gone"]
    assert not list(private.buffers())
    private, changes = dpopt.privatize(nn.Embedding(7, 4, max_norm=1.0, scale_grad_by_freq=True))
    assert changes == ["the model: max_norm is off; scale_grad_by_freq is off"]
    private(torch.tensor([1, 2]))
    assert float(private.weight.detach().norm(dim=1).max()) > 1
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    private, changes = dpopt.privatize(model)
    assert private is model
    assert changes == []


class Own(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(Own(4)), r"model\.0: 'Own'.*`forward` is not known"),
        (lambda: Read(nn.LSTM(4, 5, proj_size=2, batch_first=True)), "proj_size"),
        (lambda: nn.LazyBatchNorm2d(), "no shape yet"),
        (lambda: nn.BatchNorm2d(4, affine=False), "no parameter with requires_grad"),
    ],
)
def test_bad_input(model, message):
    with pytest.raises(ConfigError, match=message):
        dpopt.privatize(model())


HEAVY = ("timm", "transformers", "datasets", "matplotlib", "pandas", "opacus")


def test_nothing_heavy_is_imported():
    program = (
        f"import sys, dpopt; dpopt.privatize, dpopt.load, dpopt.fit; print([n for n in {HEAVY} if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"
