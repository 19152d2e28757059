"""Input that nobody should give and somebody will: arguments of `fit` and `create`, command lines, and YAML files.

Each is made by a rule from short lists, so the same ones come every time and a new field gets its share by one line.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pandas as pd
import short
import torch
import torch.nn.functional as F
from short import loss, records
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpopt
from dpopt import cli

RECORDS = 60


class Case(NamedTuple):
    """One call: its name, and what makes it."""

    name: str
    call: Callable[[], Any]


def fit(model: Any = None, loss_: Any = loss, train: Any = None, **changes: Any) -> dpopt.training.FitResult:
    """`dpopt.fit` of a linear classifier in one epoch of three draws."""
    torch.manual_seed(0)
    options = {"optimizer": "dp_sgd", "epsilon": 4.0, "delta": 1e-3, "epochs": 1}
    return short.fit(model, train, loss_, **options | changes)


OF_FIELD: dict[str, list[Any]] = {
    "epsilon": [None, -1],
    "delta": [1j, 10**400],
    "epochs": [math.inf, 1e30],
    "batch_size": [[1], 0],
    "seed": [math.nan, 0.5],
    "physical_batch": ["many", True],
    "accountant": [[["rdp"]]],
    "engine": ["ghost"],
    "precision": [torch.float32],
    "device": ["", 3],
    "optimizer": [type(dpopt.create("dp_sgd")), torch.optim.SGD],
    "transform": [[1]],
    "augment": ["many"],
    "multiplicity": [object()],
    "average": [1],
    "distributed": [True],
    "target": [""],
    "callback": [object()],
    "checkpoint": ["/dev/null/folder", 1j],
    "progress": ["many"],
}
"""Arguments of `fit`; what each kind of field takes is tested with `fields`."""


def _data() -> dict[str, Callable[[], Any]]:
    """Training data that do not fit the model, the loss, or themselves."""
    x, y = records()
    types = ["float16", "bool", "complex64"]
    made: dict[str, Callable[[], Any]] = {f"x_{t}": lambda t=t: (x.to(getattr(torch, t)), y) for t in types}
    made |= {f"y_{t}": lambda t=t: (x, y.to(getattr(torch, t))) for t in [*types, "float32"]}
    shapes = {"scalar": (), "wide": (RECORDS, 5), "narrow": (RECORDS, 3), "flat": (RECORDS,), "empty": (0, 4)}
    made |= {f"x_{name}": lambda s=shape: (torch.zeros(s), y) for name, shape in shapes.items()}
    made |= {"y_scalar": lambda: (x, torch.tensor(1)), "y_column": lambda: (x, y[:, None]), "y_few": lambda: (x, y[:9])}
    made |= {
        "x_meta": lambda: (x.to("meta"), y),
        "x_quantized": lambda: (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), y),
        "x_nested": lambda: (torch.nested.nested_tensor([x[:3], x[:2]]), y[:2]),
        "nones": lambda: [None] * 9,
        "ragged": lambda: [(torch.zeros(k), 1) for k in (4, 5)],
        "iterator": lambda: iter([(x[0], 1)]),
        "raises": lambda: _Raises(),
        "nothing": lambda: [],
        "dataset_of_three": lambda: TensorDataset(x, y, y),
        "frame": lambda: pd.DataFrame(x.numpy()),
        "frame_of_twice_a_column": lambda: pd.DataFrame(x.numpy(), columns=["a", "a", "b", "b"]).assign(y=y.numpy()),
        "frame_of_gaps": lambda: pd.DataFrame({"x": pd.array([1, None] * 30, dtype="Int64"), "y": y.numpy()}),
        "mapping_of_numbers": lambda: {"x": 1, "y": 2},
        "mapping_empty": lambda: {},
        "records_that_change": lambda: [{"x": x[0], "y": 1}, {"z": x[0], "y": 1}],
    }
    return made


class _Raises(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        raise KeyError(index)


class _Answers(nn.Module):
    """A linear classifier that gives its output in a form of its own."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(4, 2), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.linear(x))


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.head = kind(1, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, :, None])[0][:, -1])


def _raise(*_: Any) -> Any:
    raise KeyError("a mistake in it")


def _models() -> dict[str, Callable[[], Any]]:
    """Models that cannot be trained as they are, or not at all."""

    def linear(**kind: Any) -> nn.Module:
        return nn.Linear(4, 2, **kind)

    made: dict[str, Callable[[], Any]] = {
        f"model_{t}": lambda t=t: linear(dtype=getattr(torch, t)) for t in ("float16", "cfloat")
    }
    forms: dict[str, Callable[[Tensor], Any]] = {
        "mapping": lambda z: {"logits": z},
        "complex": lambda z: z.to(torch.complex64),
        "item": lambda z: z * (1 if z.sum().item() < 1e9 else 2),
        "raises": _raise,
        "centred": lambda z: z - z.mean(0),
    }
    made |= {f"model_gives_{name}": lambda f=form: _Answers(f) for name, form in forms.items()}
    made |= {
        "model_class": lambda: nn.Linear,
        "model_frozen": lambda: nn.Linear(4, 2).requires_grad_(False),
        "model_jit": lambda: torch.jit.script(linear()),
        "model_lstm": lambda: _Recurrent(nn.LSTM),
        "model_batchnorm": lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
        "model_quantized": lambda: torch.ao.quantization.quantize_dynamic(linear(), {nn.Linear}),
        "model_sparse_embedding": lambda: nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Flatten()),
        "model_of_dropout": lambda: nn.Sequential(linear(), nn.Dropout(1.0)),
    }
    return made


def blind_losses() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    """Losses that teach nothing, whatever the data."""
    return {
        "nan": lambda output, target: loss(output, target) * math.nan,
        "infinite": lambda output, target: loss(output, target) + math.inf,
        "steep": lambda output, target: loss(output, target) * math.inf,
        "detached": lambda output, target: loss(output, target).detach(),
        "constant": lambda output, target: loss(output, target) * 0 + 1,
        "whole": lambda output, target: loss(output, target).long(),
    }


def _losses() -> dict[str, Any]:
    """What is given as a loss and is none."""
    return {
        "loss_list_of_floats": lambda output, target: loss(output, target).tolist(),
        "loss_numpy": lambda output, target: loss(output, target).detach().numpy(),
        "loss_complex": lambda output, target: loss(output, target).to(torch.complex64),
        "loss_one_argument": lambda output: output.sum(1),
        "loss_raises": _raise,
        "loss_binary": lambda output, target: F.binary_cross_entropy_with_logits(output, target, reduction="none"),
        "loss_of_three": lambda output, target: loss(output, target)[:3],
    }


def of_fit() -> Iterator[Case]:
    """Calls of `fit`: one field wrong at a time."""
    for name, values in OF_FIELD.items():
        for value in values:
            yield Case(f"{name}-{value!r}", lambda n=name, v=value: fit(**{n: v}))
    for name, make in _data().items():
        yield Case(f"train-{name}", lambda m=make: fit(train=m()))
    for name in ("x_wide", "nothing"):
        yield Case(f"test-{name}", lambda n=name: fit(test=_data()[n]()))
    for name, make in _models().items():
        yield Case(name, lambda m=make: fit(model=m()))
    for name, given in _losses().items():
        yield Case(name, lambda g=given: fit(loss_=g))
    transforms: dict[str, Callable[[Tensor], Any]] = {
        "none": lambda x: None,
        "half": lambda x: x.half(),
        "narrow": lambda x: x[:, :2],
        "fewer": lambda x: x[:1],
        "raises": _raise,
        "numpy": lambda x: x.numpy(),
        "nan": lambda x: x * math.nan,
    }
    for name, given in transforms.items():
        yield Case(f"transform-gives-{name}", lambda g=given: fit(transform=g))
        yield Case(f"augment-gives-{name}", lambda g=given: fit(augment=g))


def of_create() -> Iterator[Case]:
    """Calls of `create`: names, and fields of each kind."""
    for what, value in {"none": None, "list": [1], "class": nn.Linear, "near": "dp_adm"}.items():
        yield Case(f"create-{what}", lambda v=value: dpopt.create(v))
    yield Case("create-text-in-a-class", lambda: type(dpopt.create("dp_sgd"))(lr="0.1"))
    fields = [("dp_sgd", "lr"), ("dp_sgd", "clip"), ("dp_adam", "betas"), ("hyfreedp", "probe_every")]
    fields += [("doppler", "base"), ("torch_optim", "optimizer"), ("torch_optim", "arguments"), ("dp_sgd", "momentum")]
    for name, field in fields:
        for value in (object(), torch.tensor(0.5)):
            yield Case(f"create-{name}-{field}", lambda n=name, f=field, v=value: dpopt.create(n, **{f: v}))


def _words(text: str) -> list[str]:
    return text.split()


VALUES = _words(
    "null nan inf -inf 1e400 -1 0 0.5 1 1e12 1e30 1e308 true text [] [1] [1,1] [[rdp]] [null] {} {a:1} {a:{b:[1]}} "
    "[ } ' \\ = a=b ??? ${x} ${epsilon} ε [/nope] 0x10 1_000 !!python/object:os.system *alias .. / ~"
)
VALUES += ["", " ", "{a: 1}", "\x1b[31m", "a\tb", "'a\x00b'", "9" * 5000, "[" * 900, "a" * 300]


COMMANDS = {
    "epsilon": "rate=0.02 noise=1.1 draws=250 delta=1e-5 accountant=rdp",
    "calibrate": "examples=1000 batch_size=100 draws=30 epsilon=3 accountant=rdp",
    "fit": "workload=synthetic_logreg optimizer=dp_sgd epsilon=inf epochs=0.1 to=out",
    "plan": "suite=odd",
    "table": "suite=odd",
    "rank": "suite=odd",
    "status": "suite=odd",
    "cancel": "suite=odd",
    "plot": "suite=odd",
    "report": "suite=odd",
    "verify": "suite=odd",
    "list": "",
    "bench": "cases=mlp engines=none optimizers=none",
    "audit": "suite=odd optimizers=dp_sgd epsilon=inf controls=false trials=20 game_draws=2 canaries=2",
    "new": "optimizer",
}
"""Commands that end at once -> the words that they need."""
BELOW = ["settings.dp_sgd", "settings.dp_sgd.fields.lr", "settings.dp_sgd.grid.lr", "settings.dp_sgd.tuning"]
BELOW += ["settings.dp_sgd.runs", "settings.dp_sgd.selection", "settings.dp_sgd.epsilon", "settings.dp_sgd.seeds"]


def of_cli() -> Iterator[list[str]]:
    """Command lines: every key of every command with every odd value, and each of those as a whole argument."""
    for name, needed in COMMANDS.items():
        keys = [*cli.COMMANDS[name].values(), ""] + BELOW * (name == "plan")
        for key, value in product(keys, VALUES):
            words = [word for word in needed.split() if not word.startswith(f"{key}=")]
            yield [name, *words, f"{key}={value}" if key else value]


SUITE = """
defaults: [suite, _self_]
workloads: [{name: synthetic_logreg, dim: 3}]
optimizers: [dp_sgd]
settings: {dp_sgd: {grid: {lr: [0.1, 1]}}}
epsilon: 4
epochs: 1
accountant: rdp
seeds: 0
engine: inline
"""
"""The suite that the command lines name."""
FILES: dict[str, bytes] = {
    "empty": b"",
    "list": b"- a\n- b",
    "loop": b"defaults: [suite, _self_]\noptimizers: &a [*a]\n",
    "deeper": b"optimizers: " + b"[" * 10**4,
    "many": b"a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    + b"".join(b"%c: &%c [%s]\n" % (k, k, b",".join([b"*%c" % (k - 1)] * 10)) for k in range(98, 108)),
    "latin": "description: Präzision".encode("latin-1"),
    "nul": b"description: a\x00b",
    "twice": SUITE.encode() + b"epochs: 2\n",
    "tag": SUITE.encode() + b"description: !!python/object/apply:os.system [true]\n",
    "date": SUITE.encode() + b"description: 2020-01-01\n",
    "overflow": SUITE.replace("epsilon: 4", "epsilon: 1e400").encode(),
    "surrogate": SUITE.encode() + b'description: "\\ud800"\n',
    "escape": SUITE.encode() + b'description: "\\e[31m"\n',
    "no_defaults": SUITE.replace("defaults: [suite, _self_]\n", "").encode(),
    "defaults_itself": SUITE.replace("[suite, _self_]", "[suite, defaults_itself, _self_]").encode(),
    "interpolation": SUITE.replace("epochs: 1", "epochs: ${epochs}").encode(),
    "keys_that_are_no_words": SUITE.encode() + b"1: a\n1.5: b\non: c\n",
    "large": SUITE.encode() + b"#" * 2 * 10**6,
}
"""YAML files that are no suites, or odd ones."""


def mutated(content: bytes, chance: random.Random) -> bytes:
    """A few bytes lost, or a line lost, doubled, shifted or filled with another value."""
    lines = content.splitlines(keepends=True)
    at, place = chance.randrange(len(lines)), chance.randrange(len(content))
    line = lines[at]
    value = chance.choice(VALUES).encode()
    changed = [b"", line + line, b"  " + line, line.lstrip(), line.partition(b":")[0] + b": " + value + b"\n"]
    if chance.random() < 0.4:
        return content[:place] + chance.choice([b"", b"\xff", b"\t", b":", b"[", b"&a ", value]) + content[place + 3 :]
    return b"".join([*lines[:at], chance.choice(changed), *lines[at + 1 :]])
