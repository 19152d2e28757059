"""Model, loss and data are tried together before anything is spent, and one error says what does not fit.

The trial looks at some records without noise, which no epsilon covers. What follows from it is for whoever owns the
records and calls `fit`: an error, or a warning and the status "no_signal".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpopt import clipping
from dpopt.clipping import ClippingEngine
from dpopt.clipping.flat import gradient
from dpopt.clipping.losses import named
from dpopt.clipping.mixing import trial
from dpopt.clipping.recording import Unsupported
from dpopt.clipping.views import refuse_mixing, refuse_sharing
from dpopt.clipping.vmap import VmapEngine
from dpopt.errors import ConfigError, cut
from dpopt.privacy.sampling import send
from dpopt.training.layout import WHOLE, Adapter, Transform, described, sample, scores, telling
from dpopt.training.subject import Subject, unchanged
from dpopt.workloads.base import Split, accuracy

_EXAMINED = 256
"""The most records that are looked at for a gradient."""
_TRAINED = (torch.float32, torch.float64)


@contextmanager
def refused(field: str, value: object, what: str) -> Iterator[None]:
    """Turn every error of code that dpopt does not know into a `ConfigError`; `what` says what was done."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = cut(" ".join(str(error).split()))
        raise ConfigError(field, value, f"{what} ends in {type(error).__name__}: {reason}") from error


def check_model(model: nn.Module) -> None:
    """Raise `ConfigError` for a model that has no values, or whose parameters are not of one type to train in."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError("model", type(model).__name__, "TorchScript cannot be followed: give what it was made from")
    for name, part in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(part):
            raise ConfigError(f"model.{name}", type(part).__name__, "it has no shape yet: run the model on a record")
        if part.is_meta:
            raise ConfigError(f"model.{name}", "device meta", "it has no values: initialise it first")
    types = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad}
    for dtype, name in types.items():
        if dtype not in _TRAINED or len(types) > 1:
            allowed = "expected trained parameters of one type, float32 or float64 (see `precision` for bfloat16)"
            raise ConfigError(f"model.{name}", str(dtype), allowed)


def tried(subject: Subject) -> Subject:
    """`subject` after model and loss were tried on a few records, with its metric; raises as `attempt`."""
    output, _ = attempt(subject, subject.train, "train", training=True)
    model = subject.model if scores(output) is output else Adapter(subject.model, subject.layout)
    metric = None
    for name, split in subject.held_out.items():
        output, y = attempt(subject, split, name, training=False)
        is_classes = not y.is_floating_point() and y.ndim == 1
        has_scores = isinstance(scores(output), Tensor) and scores(output).ndim == 2
        metric = accuracy if is_classes and has_scores else None
    return replace(subject, model=model, metric=metric)


def attempt(subject: Subject, split: Split, where: str, training: bool) -> tuple[Any, Tensor]:
    """Evaluate model and loss on a few records of `split`: the first ones, and those with extreme targets and numbers.

    Args:
        subject: its model is on its device and stays as it is.
        split, where: the records, and how errors name them.
        training: true if the model is in training mode meanwhile.

    Returns the model's outputs, and the targets, [n].

    Raises:
        ConfigError: one of them fails, or the loss is not one real number for each record.
    """
    model, loss, device = subject.model, subject.loss, subject.device
    rows = _telling(split.y, [part for part in subject.layout.whole(split.x) if part.numel()])
    x, y = (send(part[rows.to(part.device)], device) for part in split)
    with unchanged(model, device, training), torch.no_grad():
        with refused("transform", where, f"transforming {described(x)}"):
            inputs = subject.transform(x)
        if not isinstance(inputs, Tensor) or inputs.ndim == 0 or len(inputs) != len(x):
            seen = described(inputs) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ConfigError("transform", seen, f"expected a tensor with a row for each of {len(x)} records")
        about = f"{where}: inputs {described(inputs)}{_names(subject)}"
        with refused("model", subject.name, f"a pass over records of {about}{_hint(model, inputs)}"):
            output = model(inputs)
        shown = scores(output)
        about += f", outputs {described(shown)}" if isinstance(shown, Tensor) else ""
        with refused("loss", named(loss), f"the loss of records of {about}, targets {described(y)}"):
            losses = loss(shown, y)
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (len(x),) or losses.is_complex():
        seen = described(losses) if isinstance(losses, Tensor) else type(losses).__name__
        allowed = f"expected one loss per example, a real tensor of shape ({len(x)},){_remedy(losses, len(x))}"
        raise ConfigError("loss", seen, allowed)
    return output, y


def augmented(subject: Subject, augment: Transform, multiplicity: int) -> Subject:
    """`subject` on random views of its records, after `augment` was tried; ConfigError if it cannot be used."""
    name, x = named(augment), sample(subject.train, subject.transform, subject.device, count=8).x
    if subject.layout.fields:
        raise ConfigError("augment", name, f"inputs have names{_names(subject)}: they are no single tensor to change")
    with torch.random.fork_rng([x.device] if x.is_cuda else []), refused("augment", name, f"changing {described(x)}"):
        changed = augment(x.clone())
    is_like = isinstance(changed, Tensor) and (len(changed), changed.ndim, changed.dtype) == (len(x), x.ndim, x.dtype)
    if not is_like:
        seen = described(changed) if isinstance(changed, Tensor) else type(changed).__name__
        raise ConfigError("augment", seen, f"expected a tensor such as the inputs, {described(x)}")
    refuse_mixing(augment, x, "augment")
    refuse_sharing(augment, x, "augment")
    return subject.augmented(augment, multiplicity)


def clipping_engine(subject: Subject, name: str, batch: float, precision: str) -> tuple[ClippingEngine, str | None]:
    """The clipping engine `name`, see `clipping.engine`, and why there is nothing to learn where that is so."""
    with refused("model", subject.name, "making its clipping engine"):
        try:
            sample = subject.first
            clipper = clipping.engine(
                subject.model, subject.loss, name, sample=sample, batch=batch, precision=precision
            )
            return clipper, _blindness(subject)
        except Unsupported:  # where nothing can be learnt, there is nothing to compare an engine by
            problem = _blindness(subject)
            if not problem:
                raise
            return VmapEngine(subject.model, subject.loss), problem


def _blindness(subject: Subject) -> str | None:
    """The reason, in words, why no record looked at has a finite loss and a finite gradient but zero; else None."""
    split, device, model, is_finite = subject.train, subject.device, subject.model, False
    rows = torch.linspace(0, len(split.x) - 1, min(_EXAMINED, len(split.x))).long()
    parameters = [p for p in model.parameters() if p.requires_grad]
    with unchanged(model, device, training=True), trial(model):
        for is_beside in (False, True):
            generator = torch.Generator().manual_seed(0)
            # Beside the parameters no initial zero hides a gradient.
            for p in parameters if is_beside else ():
                p.data += (0.01 + 0.1 * p.data.std(correction=0)) * torch.randn(p.shape, generator=generator).to(p)
            for row in rows.split(1):
                x, y = (send(each[row.to(each.device)], device) for each in split)
                with refused("model", subject.name, f"its gradients on {described(x)}"):
                    loss = subject.loss(model(subject.transform(x)), y).sum()
                    square = gradient(loss, parameters).square().sum()
                if bool(loss.isfinite() & square.isfinite() & (square > 0)):
                    return None
                is_finite |= bool(loss.isfinite())
    what = "has a finite gradient other than zero" if is_finite else "has a finite loss"
    return f"none of {len(rows)} records that were looked at {what}"


def _telling(y: Tensor, parts: Sequence[Tensor]) -> Tensor:
    rows = dict.fromkeys(telling(y).tolist())
    for part in parts:
        # A token beyond the table is a mistake that the first records need not show.
        per_row = part.numel() // len(part)
        rows |= dict.fromkeys(int(at) // per_row for at in (part.flatten().argmin(), part.flatten().argmax()))
    return torch.tensor(list(rows))


def _names(subject: Subject) -> str:
    return f" ({', '.join(subject.layout.names)})" if subject.layout.names else ""


def _hint(model: nn.Module, inputs: Tensor) -> str:
    dtype = next((p.dtype for p in model.parameters() if p.requires_grad), inputs.dtype)
    if inputs.dtype not in WHOLE or isinstance(model, Adapter):
        return ""
    return f" (the model's parameters are {dtype}; whole numbers stay so, give floats)".replace("torch.", "")


def _remedy(losses: object, count: int) -> str:
    if isinstance(losses, Tensor) and losses.ndim == 0:
        return ": use reduction='none'"
    if isinstance(losses, Tensor) and losses.ndim > 1 and len(losses) == count:
        return ": squeeze or average it over all but the first axis"
    return ""
