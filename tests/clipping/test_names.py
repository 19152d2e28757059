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


class Net(nn.Module):
    """A layer has the name that a module around a model likes to give it."""

    def __init__(self):
        super().__init__()
        self.model, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.model(x).tanh())


def around(model):
    return Views(Adapter(torch.compile(model), Layout(torch.float32)), 2)


def test_a_layout_is_the_users_models():
    model = Net()
    made, plain = (BookkeepingEngine(each, short.loss) for each in (around(model), model))
    assert (made.layout, [*made.trained]) == (plain.layout, [name for name, _ in model.named_parameters()])
    model.head = nn.BatchNorm1d(3)
    with pytest.raises(ConfigError, match=r"^model\.head: 'BatchNorm1d'"):
        engine(around(model), short.loss)
    with pytest.raises(ConfigError, match=r"^model: 'Net'.*no parameter"):
        engine(around(Net().requires_grad_(False)), short.loss)


@pytest.mark.parametrize("options", [{}, {"unit": [*range(30)] * 2}, {"augment": torch.rand_like, "multiplicity": 2}])
def test_groups_find_the_same_parameters_everywhere(options):
    """The first two alternatives find some."""
    with pytest.raises(ConfigError, match=r"'nothere' .* among model\.weight, model\.bias, head\.weight, head\.bias$"):
        short.fit(Net(), optimizer=DPSGD(clip=ByGroup(groups="^model|^head|nothere")), **options)
