"""The layers that hold trained parameters, and their inputs and outputs in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpopt.clipping import layers
from dpopt.errors import ConfigError, cut


class Unsupported(ConfigError):
    """The model does something that the engine `name` cannot follow; `reason` says what, `instead` what to use."""

    def __init__(self, reason: str, name: str = "bookkeeping", instead: str = "") -> None:
        default = "write it with plain tensor operations, not in place" if name == "auto" else "use auto"
        text = f"{instead}: {reason}" if instead else f"it cannot follow the model: {reason}; {default}"
        super().__init__("engine", name, text)
        self.reason = reason

    @classmethod
    def because(cls, error: Exception) -> Unsupported:
        """For an error of the model or of torch, whose messages can be pages."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return cls(cut(text))


@dataclass(frozen=True)
class _Layer:
    """A module that holds trained parameters: `names` in its calls, `expanded` bare ones of shape [1, ...]."""

    module: nn.Module
    names: list[str]
    expanded: list[str]


def layers_of(model: nn.Module) -> list[_Layer]:
    """Every module of `model` that holds trained parameters itself."""
    result = []
    for module in model.modules():
        names = layers.trained(module)
        # A module of unknown kind may use a bare parameter, such as a class token, outside of any layer's call.
        is_handled = layers.handler(module) is not None
        shapes = {name: cast(nn.Parameter, module._parameters[name]).shape for name in names}
        expanded = [n for n, shape in shapes.items() if not is_handled and len(shape) > 1 and shape[0] == 1]
        if names:
            result.append(_Layer(module, [name for name in names if name not in expanded], expanded))
    return result


@dataclass
class Use:
    """One call of a layer, or (without inputs) a bare parameter's expansion over the batch.

    Attributes:
        names: trained parameters that the use is of.
        keywords: further arguments, none of them tensors.
        versions: the versions of the inputs then, which show an in-place change since.
        shape: the output's.
    """

    module: nn.Module
    names: list[str]
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    versions: tuple[int | None, ...]
    shape: torch.Size


class Recorder:
    """While it is entered, notes every use of the trained parameters of `layers` on batches of `examples`.

    A use that depends on no other one is where a backward pass may end: its output gradient is to be asked for. The
    output gradients of all other uses occur on the way there, and `receive` is called with each at once, so that few
    are in memory at a time.

    Attributes:
        ends: where the backward pass ends, and the use whose output gradient arrives there; None for a place that is
            there so that the pass comes by what depends on it.
        hidden: the kind of a layer that was called where no gradients were kept; "" for none.
        is_recording: false in the backward pass, where checkpoints call layers again.
    """

    def __init__(self, layers: Sequence[_Layer], examples: int, receive: Callable[[Use, Tensor], None]) -> None:
        self._layers, self._examples, self._receive = layers, examples, receive
        self._handles: list[Any] = []
        self._bare: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.ends: list[tuple[Use | None, GradientEdge]] = []
        self.hidden = ""
        self.is_recording = True

    def __enter__(self) -> Recorder:
        for layer in self._layers:
            self._expand(layer.module, layer.expanded)
            if layer.names:
                note = partial(self._note, layer.names)
                self._handles.append(layer.module.register_forward_hook(note, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        for module, name, parameter in self._bare:
            module._parameters[name] = parameter

    def _expand(self, module: nn.Module, names: list[str]) -> None:
        for name in names:
            parameter = cast(nn.Parameter, module._parameters[name])
            self._bare.append((module, name, parameter))
            with torch.enable_grad():
                expanded = parameter.expand(self._examples, *parameter.shape[1:])
            module._parameters[name] = cast(nn.Parameter, expanded)
            self.ends.append((Use(module, [name], (), {}, (), expanded.shape), get_gradient_edge(expanded)))

    def _note(
        self, names: list[str], module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            self.hidden = type(module).__name__
            return None
        if not isinstance(output, Tensor) or any(isinstance(x, Tensor) for x in keywords.values()):
            raise Unsupported(f"{type(module).__name__} does not map positional tensors to one tensor")
        if not any(isinstance(x, Tensor) for x in inputs):
            raise Unsupported(f"{type(module).__name__} is called without a tensor")
        if output.shape[0] == 1 != self._examples:
            output = output.expand(self._examples, *output.shape[1:])
            inputs = tuple(x.expand(self._examples, *x.shape[1:]) if isinstance(x, Tensor) else x for x in inputs)
        elif output.shape[0] % self._examples:
            raise Unsupported(f"{type(module).__name__} gives {output.shape[0]} rows for {self._examples} examples")
        if self.is_recording:
            kept = () if names == ["bias"] else tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
            use = Use(module, names, kept, keywords, tuple(version(x) for x in kept), output.shape)
            whole = _whole(output)
            needy = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            if needy:
                whole.register_hook(partial(self._receive, use))
                if not self.ends:  # something else than a use requires gradients, such as frozen embeddings for PEFT
                    self.ends += [(None, get_gradient_edge(x)) for x in needy]
            else:
                self.ends.append((use, get_gradient_edge(whole)))
        return output


def version(x: Any) -> int | None:
    """The number of in-place changes of a tensor; None for anything else."""
    return x._version if isinstance(x, Tensor) else None


def _whole(output: Tensor) -> Tensor:
    """`output`, or what it is a mere reshaping of: an in-place change of a view goes to its base, around the view."""
    base = output._base
    if base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous():
        return base
    return output
