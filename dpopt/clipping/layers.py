"""Per-example gradients of each kind of layer's parameters, from the layer's inputs and its output gradients.

The class that defines a layer's `forward` decides its kind, so a subclass with another `forward` is not mistaken for
its parent. Layers of other kinds go through `torch.func` (`by_vmap`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from dpopt.clipping.convolution import convolved, standardized
from dpopt.clipping.factors import Dense, Factor, Rows, outer
from dpopt.clipping.names import class_name, plain
from dpopt.errors import ConfigError

Handler = Callable[[Any, list[str], Tensor, Tensor, int], dict[str, Factor]]
"""(module, trained names, input, output gradient, n) -> gradients; both have n r rows, r of one example."""

_HANDLERS: dict[str, Handler] = {}


def handler(module: nn.Module) -> Handler | None:
    """The function for the layer's kind, or None."""
    return _handler_of(type(module))


@cache
def _handler_of(kind: type[nn.Module]) -> Handler | None:
    # A subclass with a `forward` of its own is another kind of layer.
    owner = next(parent for parent in kind.__mro__ if "forward" in vars(parent))
    return _HANDLERS.get(f"{owner.__module__}.{owner.__qualname__}")


def trained(module: nn.Module) -> list[str]:
    """Names of the trained parameters that `module` itself holds, not those of its children."""
    return [name for name, p in module._parameters.items() if p is not None and p.requires_grad]


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, function))
        return function

    return register


@_handles("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")
def _linear(module: Any, names: list[str], x: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    gradient = gradient.reshape(examples, -1, gradient.shape[-1])
    factors: dict[str, Factor] = {}
    if "weight" in names:
        is_transposed = not isinstance(module, nn.Linear)  # GPT's Conv1D stores [inputs, outputs]
        factors["weight"] = outer(gradient, x.reshape(examples, -1, x.shape[-1]), is_transposed)
    if "bias" in names:
        factors["bias"] = Dense(_sum(gradient))
    return factors


@_handles(*(f"torch.nn.modules.conv.Conv{dims}d" for dims in (1, 2, 3)))
def _convolution(module: Any, names: list[str], x: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    factors = _channel_bias(names, gradient, examples)
    return factors | {"weight": convolved(module, x, gradient, examples)} if "weight" in names else factors


@_handles("timm.layers.std_conv.StdConv2d", "timm.layers.std_conv.ScaledStdConv2d")
def _standardized(module: Any, names: list[str], x: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    factors = _channel_bias(names, gradient, examples)
    if names != ["bias"]:
        factors |= standardized(module, x, gradient, examples)
    return {name: factors[name] for name in names}


@_handles("torch.nn.modules.normalization.LayerNorm", "timm.layers.norm.LayerNorm")
def _layer_norm(module: Any, names: list[str], x: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    shape = module.normalized_shape
    return _affine(names, lambda: F.layer_norm(x, shape, eps=module.eps), gradient, (examples, -1, *shape))


@_handles("timm.layers.norm.LayerNorm2d")
def _layer_norm_2d(module: Any, names: list[str], x: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    x = x if names == ["bias"] else x.movedim(1, -1)
    return _layer_norm(module, names, x, gradient.movedim(1, -1), examples)


@_handles("torch.nn.modules.normalization.RMSNorm")
def _rms_norm(module: Any, names: list[str], x: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    shape = module.normalized_shape
    return _affine(names, lambda: F.rms_norm(x, shape, eps=module.eps), gradient, (examples, -1, *shape))


@_handles("torch.nn.modules.normalization.GroupNorm", "timm.layers.norm.GroupNorm", "timm.layers.norm.GroupNorm1")
def _group_norm(module: Any, names: list[str], x: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    return _affine_channels(names, lambda: F.group_norm(x, module.num_groups, eps=module.eps), gradient, examples)


@_handles("torch.nn.modules.instancenorm._InstanceNorm")
def _instance_norm(module: Any, names: list[str], x: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    return _affine_channels(names, lambda: F.instance_norm(x, eps=module.eps), gradient, examples)


@_handles("torch.nn.modules.batchnorm._BatchNorm")
def _frozen_norm(module: Any, names: list[str], x: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    statistics = module.running_mean, module.running_var
    return _affine_channels(names, lambda: F.batch_norm(x, *statistics, eps=module.eps), gradient, examples)


@_handles("torch.nn.modules.sparse.Embedding")
def _embedding(module: Any, names: list[str], ids: Tensor, gradient: Tensor, examples: int) -> dict[str, Factor]:
    # torch leaves the padding row out of its gradient, so the norm must leave it out too.
    if module.padding_idx is not None:
        gradient = torch.where((ids == module.padding_idx).unsqueeze(-1), 0.0, gradient)
    values = gradient.reshape(examples, -1, gradient.shape[-1])
    return {"weight": Rows(ids.reshape(examples, -1), values, module.weight.shape)}


def _affine(
    names: list[str], normalized: Callable[[], Tensor], gradient: Tensor, shape: tuple[int, ...]
) -> dict[str, Factor]:
    parts = {name: gradient * normalized() if name == "weight" else gradient for name in names}
    return {name: Dense(_sum(part.reshape(shape))) for name, part in parts.items()}


def _affine_channels(
    names: list[str], normalized: Callable[[], Tensor], gradient: Tensor, examples: int
) -> dict[str, Factor]:
    parts = {name: gradient * normalized() if name == "weight" else gradient for name in names}
    return {name: Dense(_sum_channels(part, examples)) for name, part in parts.items()}


def _channel_bias(names: list[str], gradient: Tensor, examples: int) -> dict[str, Factor]:
    return {"bias": Dense(_sum_channels(gradient, examples))} if "bias" in names else {}


def _sum(values: Tensor) -> Tensor:
    return values.squeeze(1) if values.shape[1] == 1 else values.sum(1)


def _sum_channels(values: Tensor, examples: int) -> Tensor:
    rows, channels = values.shape[:2]
    return _sum(values.reshape(rows, channels, -1).sum(2).reshape(examples, -1, channels))


def by_vmap(
    module: nn.Module, names: list[str], inputs: tuple[Any, ...], keywords: dict[str, Any], gradient: Tensor
) -> dict[str, Factor]:
    """The gradients of the parameters `names` of any module, from its forward pass once more for each example.

    Raises RuntimeError if the module draws random numbers, as its forward pass cannot be repeated then.
    """
    parameters = {name: module._parameters[name].detach() for name in names}  # type: ignore[union-attr]

    def pull(gradient: Tensor, *inputs: Any) -> dict[str, Tensor]:
        def forward(parameters: dict[str, Tensor]) -> Tensor:
            batch = tuple(x.unsqueeze(0) if isinstance(x, Tensor) else x for x in inputs)
            return functional_call(module, parameters, batch, keywords).squeeze(0)

        return vjp(forward, parameters)[1](gradient)[0]

    dims = (0, *(0 if isinstance(x, Tensor) else None for x in inputs))
    # Random numbers would be others than in the pass that gave the output gradients.
    gradients = vmap(pull, in_dims=dims, randomness="error")(gradient, *inputs)
    return {name: Dense(g.detach()) for name, g in gradients.items()}


def refuse_unsafe(model: nn.Module) -> None:
    """Raise `ConfigError` for a model with nothing to train, a layer that mixes examples or keeps what it sees, or
    trained parameters that share memory, which cannot hold the values of one vector.
    """
    for path, module in model.named_modules():
        name = plain(path)
        for kinds, (is_unsafe, hint) in _UNSAFE.items():
            if isinstance(module, kinds) and is_unsafe(module):
                raise ConfigError(f"model.{name}" if name else "model", type(module).__name__, hint)
    parameters = {plain(name): p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError("model", class_name(model), "has no parameter with requires_grad")
    ends: dict[int, tuple[int, str]] = {}  # storage -> where the last parameter in it ends
    for name, p in sorted(parameters.items(), key=lambda pair: pair[1].storage_offset()):
        place, start = p.untyped_storage()._cdata, int(p.storage_offset())
        end, other = ends.get(place, (0, name))
        if start < end or torch._debug_has_internal_overlap(p) == 1:  # pyright: ignore[reportPrivateImportUsage]
            raise ConfigError(
                f"model.{name}", "parameter", f"shares memory with {other}: use one parameter in both places"
            )
        ends[place] = start + sum(s * (n - 1) for s, n in zip(p.stride(), p.shape, strict=True)) + 1, name


def frozen_statistics(model: nn.Module) -> list[nn.Module]:
    """Layers of `model` in evaluation mode, where they normalise by the statistics that they keep."""
    return [module for module in model.modules() if isinstance(module, _STATISTICS) and not module.training]


def replacements(model: nn.Module) -> str:
    """A sentence on what replaces trained layers of `model` that no fast engine can follow; "" for none."""
    kinds = {type(module) for module in model.modules() if trained(module)}
    pairs = [f"{new} in place of nn.{old.__name__}" for old, new in RECURRENT.items() if old in kinds]
    return f"use {', '.join(pairs)} (`dpopt.privatize` does it)" if pairs else ""


_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.utils.parametrizations._SpectralNorm)
RECURRENT: dict[type[nn.Module], str] = {
    nn.RNN: "opacus.layers.DPRNN",
    nn.LSTM: "opacus.layers.DPLSTM",
    nn.GRU: "opacus.layers.DPGRU",
    nn.RNNCell: "opacus.layers.dp_rnn.DPRNNCell",
    nn.LSTMCell: "opacus.layers.dp_rnn.DPLSTMCell",
    nn.GRUCell: "opacus.layers.dp_rnn.DPGRUCell",
}

_UNSAFE: dict[tuple[type[nn.Module], ...], tuple[Callable[[Any], bool], str]] = {
    (nn.modules.batchnorm._BatchNorm,): (
        lambda module: module.training or module.running_mean is None,
        "it mixes the examples of a batch, so no example's gradient is bounded; `dpopt.privatize` puts GroupNorm in "
        "its place, or put it in evaluation mode, where it keeps the statistics that it has",
    ),
    (nn.modules.instancenorm._InstanceNorm,): (
        lambda module: module.track_running_stats,
        "its running statistics are averages over records without noise; use track_running_stats=False",
    ),
    (nn.Embedding, nn.EmbeddingBag): (
        lambda module: module.max_norm is not None or module.scale_grad_by_freq,
        "max_norm changes the table by what is looked up, and scale_grad_by_freq mixes examples; use neither",
    ),
}
