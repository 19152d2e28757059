"""Rules for workloads: what they load, and that their models can be trained privately by every engine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import unittest
from collections import Counter

import torch
import yaml
from torch import Tensor, nn

from dpopt import clipping, registry
from dpopt.clipping.mixing import repeatable
from dpopt.clipping.views import refuse_mixing, shares_randomness
from dpopt.errors import ConfigError
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.workloads import data
from dpopt.workloads.base import Split, Workload
from dpopt.workloads.data import records, source

_RECORDS = 6
"""Training records that the rules about the model are tried on."""
_ROUNDING = 1e-4
"""Distance that is allowed between two ways to compute a loss or a sum in float32, as a share of it."""
_ENGINES = ("bookkeeping", "vmap")


def is_frozen_configuration(workload: Workload) -> None:
    """A frozen dataclass that equals a copy of itself, and where it is registered also what YAML makes of it."""
    copy = dataclasses.replace(workload)
    assert copy == workload, "a copy is not equal"
    assert hash(copy) == hash(workload), "not frozen, so it has no stable hash"
    for entry in registry.entries("workload").values():
        if entry.load() is type(workload):
            content = yaml.safe_load(yaml.safe_dump(registry.spec("workload", entry.name, workload)))
            assert registry.from_spec("workload", content) == workload, "it comes back from YAML as another"
            assert entry.summary, f"{entry.name}: the summary is missing"
            assert entry.reference, f"{entry.name}: the reference is missing"


def can_be_planned(workload: Workload) -> None:
    """`check` passes, and what a suite takes from the workload where it names none can be used."""
    workload.check()
    assert 1 <= workload.batch_size <= workload.examples, f"batch_size is {workload.batch_size}"
    assert workload.epochs > 0, f"epochs is {workload.epochs}"
    assert workload.clip > 0, f"clip is {workload.clip}"


def outline_is_that_of_model_and_records(workload: Workload) -> None:
    """`outline` has the model's parameters and the shape of a record as the model takes it, and holds no values."""
    model, x, y = _prepared(workload)
    outline = workload.outline()
    shapes, expected = (
        [(name, parameter.shape, parameter.requires_grad) for name, parameter in each.named_parameters()]
        for each in (outline.model, model)
    )
    assert shapes == expected, "the outline's parameters are not the model's"
    for name, part, loaded in (("inputs", outline.record.x, x), ("targets", outline.record.y, y)):
        same = (part.shape, part.dtype) == (loaded[:1].shape, loaded.dtype)
        assert same, f"the outline's {name} are {part.dtype} {list(part.shape)}"
    tensors = [*outline.model.parameters(), *outline.record]
    assert all(tensor.is_meta for tensor in tensors), "the outline holds values"
    assert outline.tested >= len(workload.splits(0).test.x), f"the outline has {outline.tested} test records"


def counts_are_as_declared(workload: Workload) -> None:
    """As many training and validation records as it says, in both inputs and targets, and a test split."""
    splits = workload.splits(0)
    for name, split in splits._asdict().items():
        assert len(split.x) == len(split.y), f"{name}: {len(split.x)} inputs and {len(split.y)} targets"
    train, validation, test = (len(split.x) for split in splits)
    assert train == workload.examples == workload.pool - workload.validation, f"{train} training records"
    assert validation == workload.validation, f"{validation} validation records"
    assert test, "no test records"


def data_are_the_known_ones(workload: Workload) -> None:
    """The data set that the workload names (`data`) has the checksums of its entry."""
    name = getattr(workload, "data", None)
    if name is None:
        raise unittest.SkipTest("it names no data set")
    entry = data.entry(name)
    for split, part in entry.splits.items():
        if not part.inputs:
            raise unittest.SkipTest(f"no checksum of {name}.{split} is known")
        inputs, targets = _checksums(entry, split)
        assert inputs == part.inputs, f"{name}.{split}: the inputs are not the known ones"
        assert targets == part.targets, f"{name}.{split}: the targets are not the known ones"


def splits_are_disjoint(workload: Workload) -> None:
    """Training and validation records are together those of the pool, each as often as there."""

    def rows(split: Split) -> Counter[bytes]:
        pairs = zip(*split, strict=True)
        return Counter(hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).digest() for x, y in pairs)

    pool, _ = workload.load()
    splits = workload.splits(0)
    assert rows(splits.train) + rows(splits.validation) == rows(pool), "a record of the pool is in both splits or none"


def splits_depend_on_the_seed_alone(workload: Workload) -> None:
    """One seed, one split, whatever the random generators hold; other seeds validate on others; one test split."""
    # Two states of the global generator: a split that reads it differs.
    torch.manual_seed(0)
    first = workload.splits(0)
    torch.manual_seed(1)
    again, other = workload.splits(0), workload.splits(1)
    for name, split in first._asdict().items():
        assert all(map(torch.equal, split, getattr(again, name))), f"{name}: the same seed gives another split"
    assert all(map(torch.equal, first.test, other.test)), "the test split depends on the seed"
    is_same = all(map(torch.equal, first.validation, other.validation))
    assert not (workload.validation and is_same), "another seed validates on the same records"


def transform_is_a_function_of_each_record(workload: Workload) -> None:
    """`transform` gives the same for a record alone and among others, and changes nothing in place.

    `augment` gives as many as it takes, changes each on its own, and says if they share random numbers.
    """
    x = workload.splits(0).train.x[:_RECORDS]
    before = x.clone()
    together = workload.transform(x)
    assert torch.equal(x, before), "`transform` changes the stored records"
    assert len(together) == len(x), f"`transform` makes {len(together)} of {len(x)} records"
    for row in range(len(x)):
        assert _near(workload.transform(x[row : row + 1]), together[row : row + 1]), "`transform` mixes records"
    assert len(workload.augment(together)) == len(x), "`augment` changes the number of records"
    try:
        refuse_mixing(workload.augment, together, "augment")
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    is_shared = shares_randomness(workload.augment, together)
    assert is_shared == workload.shares_randomness, f"`shares_randomness` is {workload.shares_randomness}"


def model_is_drawn_from_the_generator(workload: Workload) -> None:
    """The same state of torch's generator, the same weights: optimizers are compared from one start."""
    first, again = (_prepared(workload)[0].state_dict() for _ in range(2))
    assert first.keys() == again.keys(), "two models have other parameters"
    for name, value in first.items():
        assert torch.equal(value, again[name]), f"{name} differs between two models of one seed"


def losses_and_scores_are_one_for_each_record(workload: Workload) -> None:
    """Finite losses and scores of shape [n], and a finite gradient that is not zero."""
    model, x, y = _prepared(workload)
    with repeatable(model, lambda: model(x), x.device):
        output = model(x)
        loss = workload.loss(output, y)
    assert loss.shape == (len(x),), f"the loss has shape {list(loss.shape)}"
    assert loss.isfinite().all(), "the loss is not finite"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [g for g in torch.autograd.grad(loss.sum(), trained, allow_unused=True) if g is not None]
    assert all(g.isfinite().all() for g in gradients), "the gradient is not finite"
    assert any(g.any() for g in gradients), "the gradient is zero"
    model.eval()
    scores = workload.metric(model(workload.transform(workload.splits(0).train.x[:_RECORDS])), y)
    assert scores.shape == (len(x),), f"the score has shape {list(scores.shape)}"
    assert scores.isfinite().all(), "the score is not finite"


def records_do_not_meet(workload: Workload) -> None:
    """In training mode a record's loss is the same alone and among others."""
    model, x, y = _prepared(workload)
    with torch.no_grad(), repeatable(model, lambda: model(x), x.device):
        together = workload.loss(model(x), y)
        reverse = workload.loss(model(x.flip(0)), y.flip(0)).flip(0)
        alone = torch.cat([workload.loss(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))])
    assert _near(alone, together), "a record's loss depends on the others of its batch"
    assert _near(reverse, together), "a record's loss depends on its place in the batch"


def batch_normalisation_is_refused(workload: Workload) -> None:
    """The engine takes the model, and refuses it with batch normalisation added."""
    model, x, y = _prepared(workload)
    clipping.engine(model, workload.loss, sample=(x, y))
    try:
        clipping.engine(nn.Sequential(model, nn.BatchNorm1d(1)), workload.loss)
    except ConfigError:
        return
    raise AssertionError("a model with batch normalisation is accepted")


def engines_agree(workload: Workload) -> None:
    """Every engine that takes the model finds the same clipped sum, and the same parameters after a private step."""
    results = {name: result for name in _ENGINES if (result := _private_step(workload, name)) is not None}
    assert results, f"none of the engines {', '.join(_ENGINES)} takes the model"
    for name, (total, theta) in results.items():
        expected_total, expected = next(iter(results.values()))
        assert _near(total, expected_total, 10 * _ROUNDING), f"{name} finds another clipped sum"
        assert _near(theta, expected, 10 * _ROUNDING), f"{name} ends elsewhere after a private step"


def report_is_plain_data(workload: Workload) -> None:
    """The report of the untrained model can be written as JSON."""
    model, *_ = _prepared(workload)
    model.eval()
    test = Split(*(part[:_RECORDS] for part in workload.splits(0).test))
    with torch.no_grad():
        report = workload.report(lambda x: model(workload.transform(x)), test)
    assert json.loads(json.dumps(report, allow_nan=False)) == report, "JSON makes something else of the report"


RULES = (
    is_frozen_configuration,
    can_be_planned,
    outline_is_that_of_model_and_records,
    counts_are_as_declared,
    data_are_the_known_ones,
    splits_are_disjoint,
    splits_depend_on_the_seed_alone,
    transform_is_a_function_of_each_record,
    model_is_drawn_from_the_generator,
    losses_and_scores_are_one_for_each_record,
    records_do_not_meet,
    batch_normalisation_is_refused,
    engines_agree,
    report_is_plain_data,
)


def _prepared(workload: Workload) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in training mode, and inputs and targets of a few training records as it sees them."""
    stored, y = (part[:_RECORDS] for part in workload.splits(0).train)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = workload.model().train()
        return model, workload.augment(workload.transform(stored)), y


def _private_step(workload: Workload, name: str) -> tuple[Tensor, Tensor] | None:
    """The clipped sum at the start, and the parameters after a step of DP-SGD; None where the engine refuses."""
    model, x, y = _prepared(workload)
    try:
        engine = clipping.engine(model, workload.loss, name, sample=(x, y))
    except ConfigError:
        return None
    mask = torch.ones(len(x), dtype=torch.bool)
    norms = engine.clipped([(1.0, engine.theta)], x, y, mask, clipping.Abadi(1.0)).norms
    # A bound in the middle of the norms: some records are clipped and some are not.
    optimizer = registry.create("dp_sgd", lr=0.1, clip=float(norms.median()))
    plan = calibrate(
        optimizer, rate=0.9, draws=1, dimension=engine.dimension, epsilon=8.0, delta=1e-3, accountant="rdp"
    )
    with repeatable(model, lambda: model(x), x.device):
        total = engine.clipped_sum([(1.0, engine.theta)], x, y, mask, optimizer.clip)
        oracle = DataOracle(engine, x, y, plan, draw_seed=1, noise_seed=2)
        state = optimizer.step(optimizer.init(engine.theta), oracle)
    return total, state.theta - engine.theta


def _checksums(entry: data.Entry, split: str) -> tuple[str, str]:
    if entry.kind == "image":
        x, y = data.images(entry.name, split)
        pixels = x.permute(0, 2, 3, 1) if x.ndim == 4 else x
        return records.of_arrays(rows.numpy() for rows in pixels.split(1000)), records.of_arrays([y.numpy()])
    if entry.kind == "table":
        of_columns = records.of_columns(entry, source.open_source(entry, split))
        return of_columns, records.of_arrays([data.table(entry.name, split).y.numpy()])
    texts, labels = data.texts(entry.name, split)
    if entry.kind == "pairs":
        return records.of_texts(texts[0]), records.of_texts(texts[1])
    return records.of_texts(texts), records.of_arrays([labels.numpy()])


def _near(one: Tensor, other: Tensor, share: float = _ROUNDING) -> bool:
    one, other = one.double(), other.double()
    return one.shape == other.shape and bool((one - other).norm() <= share * other.norm() + 1e-9)
