"""Parameters have the names of the user's model, whatever is put around it."""

import pytest
import short
import torch
from torch import nn

from dpopt.clipping import ByGroup, engine
from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.views import Views
from dpopt.errors import ConfigError
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.training.subject import Adapter, Layout

pytestmark = pytest.mark.filterwarnings("ignore:seed", "ignore:model")
X, Y = short.records()
COLUMNS = {"a": X[:, 0], "b": X[:, 1], "label": Y}
JITTER = {"augment": lambda x: x + torch.randn_like(x), "multiplicity": 2}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.model(x).tanh())


class Named(Net):
    """Takes its inputs by name."""

    def forward(self, a, b):
        return super().forward(torch.stack([a, b, a, b], dim=1))


AROUND = [
    lambda model: Views(model, 2),
    lambda model: Adapter(model, Layout(torch.float32)),
    torch.compile,
    lambda model: Views(Adapter(torch.compile(model), Layout(torch.float32)), 2),
]


@pytest.mark.parametrize("around", AROUND)
def test_a_layout_is_the_users_models(around):
    model = Net()
    expected = [name for name, _ in model.named_parameters()]
    made = BookkeepingEngine(around(model), short.loss)
    assert made.layout == BookkeepingEngine(model, short.loss).layout
    assert [part.name for part in made.layout] == list(made.trained) == expected
    model.head = nn.BatchNorm1d(3)
    with pytest.raises(ConfigError, match=r"^model\.head: 'BatchNorm1d'"):
        engine(around(model), short.loss)
    with pytest.raises(ConfigError, match=r"^model: 'Net'.*no parameter"):
        engine(around(Net().requires_grad_(False)), short.loss)


@pytest.mark.parametrize("options", [{}, {"unit": [*range(30)] * 2}, JITTER, {"train": COLUMNS}])
def test_groups_find_the_same_parameters_everywhere(options):
    def run(groups):
        optimizer = DPSGD(clip=ByGroup(groups=groups))
        return short.fit(Named() if "train" in options else Net(), optimizer=optimizer, **options)

    assert run("^model|^head").record["status"] == "done"
    for groups in ("_orig_mod", r"^model\.head"):
        with pytest.raises(ConfigError, match=r"among model\.weight, model\.bias, head\.weight, head\.bias$"):
            run(groups)
