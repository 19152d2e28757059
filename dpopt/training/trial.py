"""Model, loss and data are tried together before anything is spent, and one error says what does not fit.

The trial looks at some records without noise, which no epsilon covers. What follows from it is for whoever owns the
records and calls `fit`: an error, or a warning and the status "no_signal".

It also finds parameters that the loss never uses, which noise alone would carry away. Where they are is public, as it
follows from the model and made-up records, and they are set back after each step (`optimizers.held`) at no cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpopt.clipping.flat import gradient, gradients
from dpopt.clipping.losses import named
from dpopt.clipping.mixing import beside, forked
from dpopt.clipping.names import plain
from dpopt.clipping.views import Multiplied, multiplied, refuse_mixing, refuse_sharing
from dpopt.errors import ConfigError, cut
from dpopt.privacy.sampling import send
from dpopt.training.subject import WHOLE, Adapter, Subject, Transform, described, sample, scores, telling, unchanged
from dpopt.workloads.base import Split, accuracy


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
        if dtype not in (torch.float32, torch.float64) or len(types) > 1:
            allowed = "expected trained parameters of one type, float32 or float64 (see `precision` for bfloat16)"
            raise ConfigError(f"model.{name}", str(dtype), allowed)


def try_model(subject: Subject) -> Subject:
    """`subject` with its metric, after model and loss were tried on a few records of each split; else ConfigError."""
    output, y = _attempt(subject, subject.train, "train", is_training=True)
    classes = _classes(output, y)
    model = subject.model if scores(output) is output else Adapter(subject.model, subject.layout)
    metric = None
    for name, split in subject.held_out.items():
        output, y = _attempt(subject, split, name, is_training=False)
        metric = accuracy if _classes(output, y) else None
    return replace(subject, model=model, metric=metric, classes=classes)


def _classes(output: Any, y: Tensor) -> int:
    """The number of classes that outputs are scores for; 0 for another task."""
    output = scores(output)
    is_classes = not y.is_floating_point() and y.ndim == 1
    # One column is one number: a count, or one logit.
    has_scores = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1
    return output.shape[1] if is_classes and has_scores else 0


def _attempt(subject: Subject, split: Split, where: str, is_training: bool) -> tuple[Any, Tensor]:
    """Outputs and targets of a few records of `split`: the first, and those with extreme targets or whole numbers."""
    model, loss, device = subject.model, subject.loss, subject.device
    x, y = telling(split, subject.layout.whole(split.x), device)
    with unchanged(model, is_training, subject.state), torch.no_grad():
        with refused("transform", where, f"transforming {described(x)}"):
            inputs = subject.transform(x)
        if not isinstance(inputs, Tensor) or inputs.ndim == 0 or len(inputs) != len(x):
            allowed = f"expected a tensor with a row for each of {len(x)} records"
            raise ConfigError("transform", described(inputs), allowed)
        about = f"{where}: inputs {described(inputs)}{_names(subject)}"
        hint = ""
        if inputs.dtype in WHOLE and not isinstance(model, Adapter):
            dtype = str(next((p.dtype for p in model.parameters() if p.requires_grad), inputs.dtype))
            hint = f" (the model's parameters are {dtype[6:]}; whole numbers stay so, give floats)"
        with refused("model", subject.name, f"a pass over records of {about}{hint}"):
            output = model(inputs)
        shown = scores(output)
        about += f", outputs {described(shown)}, targets {described(y)}"
        with refused("loss", named(loss), f"the loss of records of {about}"):
            losses = loss(shown, y)
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (len(x),) or losses.is_complex():
        shape, remedy = tuple(losses.shape) if isinstance(losses, Tensor) else None, ""
        if shape == ():
            remedy = ": use reduction='none'"
        elif shape and len(shape) > 1 and shape[0] == len(x):
            remedy = ": squeeze or average it over all but the first axis"
        allowed = f"expected one loss per example, a real tensor of shape ({len(x)},){remedy}"
        raise ConfigError("loss", described(losses), allowed)
    return output, y


def augmented(subject: Subject, augment: Transform, multiplicity: int) -> Subject:
    """`subject` on random views of its records, after `augment` was tried; ConfigError if it cannot be used."""
    name, x = named(augment), sample(subject.train, subject.transform, subject.device, count=8).x
    if subject.layout.fields:
        raise ConfigError("augment", name, f"inputs have names{_names(subject)}: they are no single tensor to change")
    with forked(x.device), refused("augment", name, f"changing {described(x)}"):
        changed = augment(x.clone())
    form = (changed.shape[:1], changed.ndim, changed.dtype) if isinstance(changed, Tensor) else None
    if form != (x.shape[:1], x.ndim, x.dtype):
        raise ConfigError("augment", described(changed), f"expected a tensor such as the inputs, {described(x)}")
    refuse_mixing(augment, x, "augment")
    refuse_sharing(augment, x, "augment")

    def forgetful(x: Tensor) -> Tensor:
        with subject.state:
            return augment(x)

    views: dict[str, Any] = {"transform": subject.transform, "augment": forgetful, "multiplicity": multiplicity}
    seen = multiplied(subject.model, subject.loss, dims=subject.first.x.ndim, **views)
    return replace(subject, **seen._asdict())


def blindness(subject: Subject) -> str | None:
    """The reason, in words, why no record looked at has a finite loss and a finite gradient but zero; else None."""
    split, device, model, is_finite = subject.train, subject.device, subject.model, False
    rows = torch.linspace(0, len(split.x) - 1, min(256, len(split.x))).long()  # enough to see one gradient
    parameters = [p for p in model.parameters() if p.requires_grad]
    with unchanged(model, True, subject.state):
        for is_beside in (False, True):
            if is_beside:  # no initial zero hides a gradient there
                nn.utils.vector_to_parameters(beside([p.data for p in parameters]), parameters)
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


def is_compiled(model: nn.Module) -> bool:
    """True if the model or one of its modules was compiled, by `torch.compile` or `Module.compile`."""
    return any("_orig_mod" in each._modules or each._compiled_call_impl is not None for each in model.modules())


def _names(subject: Subject) -> str:
    return f" ({', '.join(subject.layout.names)})" if subject.layout.names else ""


class Unused(NamedTuple):
    """Parameters, and a table's rows of padding, that the loss uses for no record."""

    names: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()  # (start, stop) in the flat vector
    is_whole: bool = False  # a parameter is among them, not rows of padding alone

    @property
    def record(self) -> dict[str, Any]:
        return {"unused": list(self.names)} if self.names else {}

    @property
    def warning(self) -> str | None:
        return f"model: the loss never uses {', '.join(self.names)}: they stay as they are" if self.is_whole else None


def unused(seen: Subject | Multiplied, train: Split, device: torch.device, owner: nn.Module) -> Unused:
    """The trained parameters of `seen` that the loss of made-up records such as `train`, as stored, never uses.

    Their names are those of `owner`, which has the same parameters in the same order.

    Raises:
        ConfigError: a record of `train` that is looked at uses one of them.
    """
    rows = torch.linspace(0, len(train.x) - 1, min(8, len(train.x))).long()  # whose graphs are kept
    tried = Split(*(part[rows.to(part.device)] for part in train))

    def unreached_by(some: Split) -> set[_Place] | None:
        places = None  # where the loss cannot be evaluated
        with unchanged(seen.model, is_training=True), suppress(Exception), torch.enable_grad():
            x, y = (send(part, device) for part in some)
            for look in range(8):  # a random model may leave a block out by chance
                torch.default_generator.manual_seed(look)
                each = _unreached(owner, seen.loss(seen.model(seen.transform(x)), y))
                places = each if places is None else each & places
                if not places:  # usually at once
                    break
        return places

    # The released model shows what is held, without noise: so made-up records decide it, and real ones can only refuse.
    places = unreached_by(Split(*map(_made_up, tried))) or set()
    of_records = unreached_by(tried) if places else None
    if of_records is not None and (used := places - of_records):
        reason = (
            "some records use it, made-up records do not, and no record may decide what is trained: set "
            "requires_grad=False, or use it for each record, as by adding 0 times its sum to the outputs"
        )
        raise ConfigError("model", ", ".join(name for _, _, name, _ in sorted(used)), reason)
    spans = tuple((start, stop) for start, stop, *_ in sorted(places))
    return Unused(tuple(name for _, _, name, _ in sorted(places)), spans, any(is_whole for *_, is_whole in places))


def _made_up(like: Tensor) -> Tensor:
    """Records of the type and shape of `like` that say nothing of it: bytes, numbers from 0 to 1, or zeros."""
    # Whole numbers may be indices into a table, where only 0 is sure to exist.
    if like.dtype != torch.uint8 and not like.is_floating_point():
        return torch.zeros_like(like)
    values = torch.arange(like.numel()).sin().abs().view(like.shape)
    return (values * (255 if like.dtype == torch.uint8 else 1)).to(like.dtype)


_Place = tuple[int, int, str, bool]
"""Start and stop in the flat vector, the name, and if it is a whole parameter."""


def _unreached(model: nn.Module, losses: Tensor) -> set[_Place]:
    # Without a graph there is nothing to learn, which is another warning.
    if not losses.requires_grad:
        return set()
    trained = [(plain(name), p) for name, p in model.named_parameters() if p.requires_grad]
    places, stop, uses = set(), 0, _uses(losses)
    for (name, parameter), grad in zip(trained, gradients(losses.sum(), [p for _, p in trained]), strict=True):
        start, stop = stop, stop + parameter.numel()
        if grad is None:
            places.add((start, stop, name, True))
        rows = {getattr(node, "_saved_padding_idx", -1) for node in uses.get(id(parameter), ())}
        if len(rows) == 1 and 0 <= (row := rows.pop()) < len(parameter):
            width = parameter[0].numel()
            places.add((start + row * width, start + (row + 1) * width, f"{name}[{row}]", False))
    return places


def _uses(losses: Tensor) -> dict[int, list[Any]]:
    uses: dict[int, list[Any]] = {}
    waiting: list[Any] = [losses.grad_fn]
    nodes = set(waiting)
    while waiting:
        node = waiting.pop()
        # A function of one's own may use a leaf without showing it.
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return {}
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                uses.setdefault(id(following.variable), []).append(node)
            elif following is not None and following not in nodes:
                nodes.add(following)
                waiting.append(following)
    return uses
