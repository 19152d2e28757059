"""Finding out whether book-keeping can follow a model: what that needs beside the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpopt.clipping.recording import Unsupported
from dpopt.privacy.protocol import Vector


class SavedBytes:
    """Counts the bytes, but for the storages `ignored`, that forward passes keep for their backward passes."""

    def __init__(self, ignored: set[int]) -> None:
        self._storages: dict[int, int] = {}
        self._ignored = ignored
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._ignored:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would keep its graph alive

    @property
    def total(self) -> int:
        return sum(self._storages.values())


@contextmanager
def repeatable(model: nn.Module, forward: Callable[[], object], device: torch.device) -> Iterator[bool]:
    """`model` in training mode, or in what comes nearest to that and draws no random numbers in `forward`.

    Gives whether it would draw some in training. Modes and random generators are as before afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    all_on, dropout_off, all_off = (lambda m: True), (lambda m: "Drop" not in type(m).__name__), (lambda m: False)
    is_random = False
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for is_on in (all_on, dropout_off, all_off):
                for module, _ in modes:
                    module.training = is_on(module)
                before = _random_states(device)
                forward()
                if all(torch.equal(a, b) for a, b in zip(before, _random_states(device), strict=True)):
                    break
                is_random = True
            yield is_random
    finally:
        for module, mode in modes:
            module.training = mode


def beside(parts: Sequence[Tensor]) -> Vector:
    """A point near the parameters `parts`, with a random step for each in proportion to its spread."""
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(part.numel(), generator=generator).to(part) for part in parts]
    scales = [0.01 + 0.1 * part.std(correction=0) for part in parts]
    return torch.cat([p.flatten() + s * step for p, s, step in zip(parts, scales, steps, strict=True)])


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def random_like(x: Tensor, examples: int) -> Tensor:
    """That many random inputs of the shape and type of the records `x`."""
    generator = torch.Generator().manual_seed(0)
    if x.is_floating_point():
        return torch.randn(examples, *x.shape[1:], generator=generator, dtype=torch.float64).to(x)
    values = x.flatten()
    picked = torch.randint(len(values), (examples * x[0].numel(),), generator=generator)
    return values[picked.to(x.device)].view(examples, *x.shape[1:])


def compare(what: str, together: Tensor, alone: Tensor, slack: float = 0.0) -> None:
    """Raise `Unsupported` where the two differ by more than rounding."""
    if not (together - alone).norm() <= 5e-3 * alone.norm() + slack:
        raise Unsupported(f"the {what} of a batch are not those of its examples one at a time")
