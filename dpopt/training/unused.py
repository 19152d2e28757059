"""Parameters that the loss never uses: their gradient is zero for every record, by the structure of the graph.

Noise alone would carry them away. Where they are is public, as it follows from the model and made-up records, so their
coordinates are set back after each step (`optimizers.held`), which costs nothing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpopt.clipping.flat import gradients
from dpopt.clipping.views import Multiplied
from dpopt.privacy.sampling import send
from dpopt.training.subject import Subject, made_up, unchanged
from dpopt.workloads.base import Split

_RECORDS = 8
"""Records whose graphs are looked at."""
_LOOKS = 8
"""Times that a random model is run before a parameter counts as unused: a block may be left out by chance."""


class Unused(NamedTuple):
    """Parameters that no record has a gradient for.

    Attributes:
        names: of parameters, and of a table's row of padding.
        spans: their places in the flat vector, (start, stop); none where nothing may be held.
        is_whole: a parameter is among them, not rows of padding alone.
    """

    names: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    is_whole: bool = False

    @property
    def record(self) -> dict[str, Any]:
        return {"unused": list(self.names), "unused_are_held": bool(self.spans)} if self.names else {}

    @property
    def warning(self) -> str | None:
        names = ", ".join(self.names)
        if names and not self.spans:
            return f"model: the loss of some records does not use {names}: noise alone moves what none uses"
        return f"model: the loss never uses {names}: they stay as they are" if self.is_whole else None


def unused(seen: Subject | Multiplied, train: Split, device: torch.device, owner: nn.Module) -> Unused:
    """The trained parameters of `owner` that the loss of the records `train`, as they are stored, never uses.

    Args:
        seen: model, loss and transform as the engine trains them.
        device: where the model is.
        owner: the model whose names are shown, with the same parameters in the same order.
    """
    rows = torch.linspace(0, len(train.x) - 1, min(_RECORDS, len(train.x))).long()
    tried = Split(*(part[rows.to(part.device)] for part in train))
    looks: list[set[_Place]] = []
    # Made-up records say nothing of the data; where real ones differ, as with experts, nothing is held.
    for some in (Split(*map(made_up, tried)), tried):
        places: set[_Place] = set()
        with unchanged(seen.model, device, training=True), suppress(Exception), torch.enable_grad():
            x, y = (send(part, device) for part in some)
            for look in range(_LOOKS):
                torch.default_generator.manual_seed(look)
                each = _unreached(owner, seen.loss(seen.model(seen.transform(x)), y))
                places = each & places if look else each
                if not places:  # usually at once
                    break
        looks.append(places)
    public, private = looks
    named = sorted(public | private, key=lambda place: place.start)
    spans = tuple((place.start, place.stop) for place in named if public == private)
    return Unused(tuple(place.name for place in named), spans, any(place.is_whole for place in named))


class _Place(NamedTuple):
    name: str
    start: int
    stop: int
    is_whole: bool


def _unreached(model: nn.Module, losses: Tensor) -> set[_Place]:
    # Without a graph there is nothing to learn, which is another warning.
    if not losses.requires_grad:
        return set()
    trained = [(name.replace("_orig_mod.", ""), p) for name, p in model.named_parameters() if p.requires_grad]
    places, stop, uses = set(), 0, _uses(losses)
    for (name, parameter), grad in zip(trained, gradients(losses.sum(), [p for _, p in trained]), strict=True):
        start, stop = stop, stop + parameter.numel()
        if grad is None:
            places.add(_Place(name, start, stop, True))
        rows = {getattr(node, "_saved_padding_idx", -1) for node in uses.get(id(parameter), ())}
        if len(rows) == 1 and 0 <= (row := rows.pop()) < len(parameter):
            width = parameter[0].numel()
            places.add(_Place(f"{name}[{row}]", start + row * width, start + (row + 1) * width, False))
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
