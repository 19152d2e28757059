"""The names that a user's model has for its modules and parameters, whatever is put around it."""

from __future__ import annotations

from typing import cast

from torch import nn

_WRAPPED = "_orig_mod"
"""What `torch.compile` calls the module that it is put around; a module of dpopt's calls it the same."""


class Wrapper(nn.Module):
    """A module without parameters around a user's `model`, in the model's mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.add_module(_WRAPPED, model)
        self.training = model.training

    @property
    def model(self) -> nn.Module:
        return cast(nn.Module, self._modules[_WRAPPED])


def plain(name: str) -> str:
    """The name that a module, a parameter or a buffer has in the user's model; `name` may have more around it."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def class_name(model: nn.Module) -> str:
    """The name of the class of the user's model."""
    return [type(module).__name__ for name, module in model.named_modules() if not plain(name)][-1]
