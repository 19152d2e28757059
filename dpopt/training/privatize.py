"""A copy of a model in which what cannot be trained privately is replaced."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpopt import fields
from dpopt.clipping.layers import RECURRENT, refuse_unsafe
from dpopt.errors import ConfigError
from dpopt.training.trial import check_model, refused


class Privatized(NamedTuple):
    """The result of `privatize`.

    Attributes:
        model: the copy; the object that was passed in where there was nothing to change.
        changes: a sentence for each change.
    """

    model: nn.Module
    changes: list[str]


@fields.checked
def privatize(model: nn.Module) -> Privatized:
    """Replace the layers of a model that `fit` refuses; the model that is passed in stays as it is.

    - Batch normalisation mixes the examples of a batch. It becomes `GroupNorm`, of one group in place of `BatchNorm1d`,
      whose inputs may have one value for each channel. Scale and shift are kept and trained on.
    - `InstanceNorm` keeps no running statistics any more: they are averages over records without noise.
    - `nn.RNN`, `nn.LSTM`, `nn.GRU` and their cells become those of `opacus.layers`, which compute the same.
    - `Embedding` loses `max_norm` and `scale_grad_by_freq`.

    `GroupNorm` computes something else than the `BatchNorm` before it. A pretrained one can be kept instead: `fit`
    takes it in evaluation mode (`layer.eval()`), where its statistics are constants. They are then part of what is
    published, so they must not come from records that are to be protected.

    Args:
        model: see `fit`; all its layers of these kinds are replaced, trained or not.

    Returns:
        The model and a sentence for each change.

    Raises:
        ConfigError: the model cannot be copied, has a layer of these kinds that has no replacement, or cannot be
            trained privately for another reason.
    """
    check_model(model)
    with refused("model", type(model).__name__, "copying it"):
        copied = copy.deepcopy(model)
    changes, replaced = [], {}
    # A module that is shared is replaced once, and stays shared.
    for name, module in list(copied.named_modules(remove_duplicate=False)):
        if id(module) not in replaced:
            where = f"model.{name}" if name else "model"
            with refused(where, type(module).__name__, "replacing it"):
                replaced[id(module)] = _replacement(module, where)
        new, change = replaced[id(module)]
        if new is not module and name:
            copied.set_submodule(name, new)
        elif new is not module:
            copied = new
        changes += [f"{name or 'the model'}: {change}"] if change else []
    refuse_unsafe(copied)
    return Privatized(copied if changes else model, changes)


def _replacement(module: nn.Module, where: str) -> tuple[nn.Module, str]:
    """The replacement of `module`, which may be itself, and a sentence on what has changed."""
    if type(module) in RECURRENT:
        new = _recurrent(module)
    elif not isinstance(module, _BatchNorm):
        return module, "; ".join(_switched_off(module))
    else:
        # Of 32 groups, where the channels can be divided so (Wu and He 2018). Inputs of rows may have one value a
        # channel, which a group of one channel would turn into zero.
        groups = 1 if isinstance(module, nn.BatchNorm1d) else math.gcd(32, module.num_features)
        grouped = nn.GroupNorm(groups, module.num_features, eps=module.eps, affine=module.affine)
        grouped.weight, grouped.bias = module.weight, module.bias
        new = _with_activation(module, grouped, where)
    new.train(module.training)
    return new, f"{type(module).__name__} became {' '.join(str(new).split())}"


def _with_activation(module: _BatchNorm, new: nn.Module, where: str) -> nn.Module:
    owner = next(parent for parent in type(module).__mro__ if "forward" in vars(parent))
    # A `forward` of one's own may do more than normalise, which a replacement would lose.
    if owner.__module__.startswith("torch.nn.modules."):
        return new
    if f"{owner.__module__}.{owner.__qualname__}" == "timm.layers.norm_act.BatchNormAct2d":
        rest: Any = module
        # timm's layer drops and activates after it has normalised; the replacement must too.
        return nn.Sequential(new, rest.drop, rest.act)
    raise ConfigError(where, type(module).__name__, "its `forward` is not known: replace it yourself")


def _recurrent(module: nn.Module) -> nn.Module:
    kind = resolve_name(RECURRENT[type(module)])
    new = kind(**{name: getattr(module, name) for name in inspect.signature(kind).parameters})
    tensors = dict(module.named_parameters())
    if isinstance(module, nn.RNNCellBase):
        tensors = {".".join(reversed(name.split("_"))): p for name, p in tensors.items()}  # weight_ih is ih.weight
    new.to(next(iter(tensors.values())))
    new.load_state_dict(tensors)
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(tensors[name].requires_grad)
    return new


def _switched_off(module: nn.Module) -> Iterator[str]:
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
        yield "its running statistics are gone"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            module.max_norm = None
            yield "max_norm is off"
        if module.scale_grad_by_freq:
            module.scale_grad_by_freq = False
            yield "scale_grad_by_freq is off"
