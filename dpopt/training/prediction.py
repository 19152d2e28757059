"""Predictions for new records, which are read and prepared as the training records were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpopt.errors import ConfigError
from dpopt.training.reading import is_array, read_inputs
from dpopt.training.subject import Adapter, Layout, Transform
from dpopt.training.trial import refused
from dpopt.workloads.base import EVALUATION_BATCH, Workload


def outputs(
    model: nn.Module, given: Any, names: Sequence[str], transform: Transform | None, workload: Workload | None
) -> Tensor:
    """The model's outputs [n, ...] for new records, in evaluation mode, on the CPU.

    Args:
        model: as it was trained.
        given: what `workload` reads; or inputs as the training data had them, of which columns `names` count.
        names: of the inputs in training, in their order; empty where they had none.
        transform: of `fit`.
        workload: that loaded the training records, if one did.

    Raises:
        ConfigError: the records cannot be read or are not like the training records, or an output is not finite.
    """
    if workload and not is_array(given):
        given = workload.read(given)
    inputs = read_inputs(given, "x", names)
    layout = Layout.of(inputs, model, "x")
    count = len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))
    x = layout.split(inputs, torch.zeros(count), "x").x
    change = workload.transform if workload else transform
    taken = Adapter(model, layout)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    parts, was_training = [], model.training
    model.eval()
    try:
        with torch.no_grad(), refused("x", type(given).__name__, "the model's outputs"):
            for part in x.split(workload.evaluation_batch if workload else EVALUATION_BATCH):
                part = part.to(device)
                parts.append(taken(layout.converted(change(part.clone()) if change else part)).cpu())
    finally:
        model.train(was_training)
    output = torch.cat(parts)
    if bad := int((~output.isfinite()).reshape(len(output), -1).any(1).sum()):
        raise ConfigError(
            "x", f"{len(output)} records", f"the model gives outputs that are not finite for {bad} of them"
        )
    return output


def probabilities(output: Tensor, classes: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The softmax [n, classes] of a classifier's outputs; ConfigError for a model of another task."""
    if not classes:
        raise ConfigError(
            "predict_proba", f"outputs {list(output.shape)}", "they are no scores of classes: use predict"
        )
    return output.double().softmax(dim=1).numpy()


def labels(output: Tensor, classes: int, names: Sequence[str] = ()) -> np.ndarray[Any, Any]:
    """The classes of the largest outputs, by name where they have names; outputs of another task as they are."""
    if not classes:
        return output.numpy()
    numbers = output.argmax(dim=1).numpy()
    return np.array(names)[numbers] if names else numbers
