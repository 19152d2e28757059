"""The names that a user's model has for its modules and parameters, whatever is put around it."""

from __future__ import annotations

from torch import nn


class Wrapper(nn.Module):
    """A module without parameters around a user's model, in the model's mode; it has the place that compiling gives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod, self.training = model, model.training


def plain(name: str) -> str:
    """The name that a module, a parameter or a buffer has in the user's model; `name` may have more around it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def class_name(model: nn.Module) -> str:
    """The name of the class of the user's model."""
    return [type(module).__name__ for name, module in model.named_modules() if not plain(name)][-1]
