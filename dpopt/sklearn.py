"""scikit-learn's contract over `dpopt.fit`: `DPClassifier` and `DPRegressor`, for pipelines after public preprocessing.

What a step before them computes from the records, such as a mean to scale by, is a release that nobody charges: use
constants. Selection by cross-validation is a search whose price is in no epsilon here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from dpopt.training import fit
from dpopt.types import Optimizer
from dpopt.workloads.base import mlp


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """The parameters are those of `dpopt.fit`, but for:

    Args:
        hidden: widths of the hidden layers of a ReLU network; none for a linear model.
        random_state: None keeps the seed secret; a number is for tests, as whoever knows it can take the noise away.

    Attributes:
        result_: the `FitResult`: its model, its record, its privacy statement.
    """

    def __init__(
        self,
        epsilon: float = 2.0,
        *,
        delta: float | None = None,
        optimizer: str | Optimizer | None = None,
        epochs: float | None = None,
        batch_size: float | None = None,
        average: float | None = None,
        hidden: Sequence[int] = (64,),
        accountant: str = "pld",
        random_state: int | None = None,
    ) -> None:
        self.epsilon, self.delta, self.optimizer, self.epochs = epsilon, delta, optimizer, epochs
        self.batch_size, self.average, self.hidden = batch_size, average, hidden
        self.accountant, self.random_state = accountant, random_state

    def _fit(self, x: Any, y: Any, outputs: int, loss: Any) -> Any:
        options = self.get_params()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = mlp(x.shape[1], *options.pop("hidden"), outputs)
        seed = options.pop("random_state")
        self.result_ = fit(model, loss, (x, y), seed=seed, progress=False, device="cpu", **options)
        return self

    def _rows(self, X: Any) -> Any:
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float32, reset=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        for kind in filter(None, (tags.classifier_tags, tags.regressor_tags)):
            kind.poor_score = True  # a few hundred records at a small epsilon
        return tags


class DPClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A private classifier of rows of numbers; `classes_`, in the order of `predict_proba`, are public."""

    def fit(self, X: Any, y: Any) -> DPClassifier:
        """Train on rows X [n, d] with classes y [n]; ConfigError, a ValueError, as of `dpopt.fit`."""
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; expected at least two")
        return self._fit(X, numbers, len(self.classes_), _cross_entropy)

    def predict(self, X: Any) -> Any:
        """The class of each row [n]."""
        rows = self._rows(X)
        return self.classes_[self.result_.predict(rows)]

    def predict_proba(self, X: Any) -> Any:
        """The probability of each class, float64 [n, classes]."""
        rows = self._rows(X)
        return self.result_.predict_proba(rows)


class DPRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A private regression by squared error; scale targets by public constants to about [-1, 1]."""

    def fit(self, X: Any, y: Any) -> DPRegressor:
        """Train on rows X [n, d] with numbers y [n]; ConfigError, a ValueError, as of `dpopt.fit`."""
        X, y = validate_data(self, X, y, dtype=np.float32, y_numeric=True, ensure_min_samples=2)
        return self._fit(X, y.astype(np.float32), 1, _squared_error)

    def predict(self, X: Any) -> Any:
        """The number for each row [n]."""
        rows = self._rows(X)
        return self.result_.predict(rows)[:, 0]


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target).square()
