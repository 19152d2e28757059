"""Two wrapped optimizers, one for matrices and one for the rest, over one vector; see `torch_optim`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpopt.optimizers.base import is_matrix
from dpopt.types import Layout


class Split(Optimizer):
    """Two optimizers as one over a vector: the first for the matrices in it, the second for the rest.

    What they keep for a parameter lies in a vector as the parameter does. `stepped` is the field of `torch_optim` that
    names the one whose step was called last.

    Args:
        make, make_rest: parameters -> the optimizer. Each gets one more, without entries, so that what it keeps does
            not depend on the layout, which the state before the first step does not know.
    """

    def __init__(self, parameter: nn.Parameter, layout: Layout, make: Any, make_rest: Any) -> None:
        self._inner: list[tuple[Optimizer, list[slice]]] = []
        for is_rest, of in enumerate((make, make_rest)):
            parts = [part for part in layout if is_matrix(part) != is_rest]
            # Views: what is done to them is done to the vector. No part is a number, which would look like a count.
            views = [parameter.data[part.slice].view(-1 if is_rest else (part.shape[0], -1)) for part in parts]
            views.append(parameter.data[:0].view(0 if is_rest else (0, 1)))
            self._inner.append((of(list(map(nn.Parameter, views))), [*(part.slice for part in parts), slice(0)]))
        first, second = (_numbers(optimizer.param_groups[0]) for optimizer, _ in self._inner)
        super().__init__([parameter], {**first, "rest": second})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,), parameter = self.param_groups, cast(Any, parameter_of(self))
        kept = self.state[parameter]
        for name, (optimizer, places) in zip(("optimizer", "rest"), self._inner, strict=True):
            self.stepped = name
            (inner,) = optimizer.param_groups
            inner.update(group["rest"] if name == "rest" else {k: v for k, v in _numbers(group).items() if k != "rest"})
            for p, place in zip(inner["params"], places, strict=True):
                p.grad = parameter.grad[place].view_as(p)
                for key, value in kept.get(name, {}).items():
                    if isinstance(value, Tensor):  # a number is one for each, as a step may change it in place
                        value = value[place].view_as(p) if value.dim() else value.clone()
                    optimizer.state[p][key] = value
            optimizer.step()
            states = [(p.shape, optimizer.state[p]) for p in inner["params"]]
            kept[name] = {key: self._packed(key, states, places) for key in states[0][1]}
            group.update(_numbers(inner) if name == "optimizer" else {"rest": _numbers(inner)})

    def _packed(self, key: str, states: list[tuple[torch.Size, dict[str, Any]]], places: list[slice]) -> Any:
        values = [state[key] for _, state in states]
        if any(getattr(state[key], "shape", None) != shape for shape, state in states):
            if any(torch.as_tensor(value).dim() or value != values[0] for value in values):
                raise ValueError(f"its {key!r} is neither of a parameter's shape nor one number for all")
            return values[0]
        vector = torch.zeros_like(parameter_of(self), dtype=values[0].dtype)
        for value, place in zip(values, places, strict=True):
            vector[place] = value.flatten()
        return vector


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def parameter_of(optimizer: Optimizer) -> nn.Parameter:
    """The one vector that `optimizer` is made over."""
    return optimizer.param_groups[0]["params"][0]
