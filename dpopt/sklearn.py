"""scikit-learn's contract over `dpopt.fit`: `DPClassifier` and `DPRegressor`, for pipelines after public preprocessing.

What a step before them computes from the records, such as a mean to scale by, is a release that nobody charges: use
constants. Selection by cross-validation is a search whose price is in no epsilon here. Each row is one person's (there
is no `unit`), and training is on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from dpopt.errors import ConfigError
from dpopt.training import fit
from dpopt.types import Optimizer
from dpopt.workloads.base import mlp

_OTHERS = (
    "This estimator is a clone, as bagging and a grid search make them: others may have been fitted on these data, and "
    "what they and a choice among them cost is not stated here."
)


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """The parameters are those of `dpopt.fit`, but for:

    Args:
        hidden: widths of the hidden layers of a ReLU network; none for a linear model.
        random_state: None keeps the seed secret; a whole number is for tests, as whoever knows it can take the noise
            away. Generators of NumPy are refused.

    Attributes:
        result_: the `FitResult`: its model, its record, its privacy statement.
    """

    _is_clone = False

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

    def _fit(self, x: Any, y: Any, outputs: int, loss: nn.Module, *last: nn.Module) -> Any:
        options = self.get_params()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = mlp(x.shape[1], *options.pop("hidden"), outputs).extend(last)
        seed = options.pop("random_state")
        self.result_ = fit(model, loss, (x, y), seed=seed, progress=False, device="cpu", **options)
        if self._is_clone:
            self.result_.record["tuned"] = [_OTHERS]
        return self

    def __sklearn_clone__(self) -> Any:
        copied: Any = super().__sklearn_clone__()
        copied._is_clone = True
        return copied

    def _predict(self, X: Any, method: str = "predict") -> Any:
        check_is_fitted(self, "result_")
        return getattr(self.result_, method)(validate_data(self, _numbers(X), dtype=np.float32, reset=False))


def _numbers(X: Any) -> Any:
    """X itself; ConfigError where columns of a data frame hold texts."""
    columns = X.columns if hasattr(X, "columns") and hasattr(X, "to_numpy") else ()
    if texts := [f"{name}" for name in columns if any(isinstance(value, str) for value in X[name])]:
        step = "OneHotEncoder(categories=[[...]], handle_unknown='ignore')"
        raise ConfigError("X", texts, f"expected numbers: put {step} before it, of values known without the records")
    return X


class DPClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A private classifier of rows of numbers; `classes_`, in the order of `predict_proba`, are public."""

    def fit(self, X: Any, y: Any) -> DPClassifier:
        """Train on rows X [n, d] with classes y [n]; ConfigError, a ValueError, as of `dpopt.fit`."""
        X, y = validate_data(self, _numbers(X), y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; expected at least two")
        return self._fit(X, numbers, len(self.classes_), nn.CrossEntropyLoss(reduction="none"))

    def predict(self, X: Any) -> Any:
        """The class of each row [n]."""
        numbers = self._predict(X)
        return self.classes_[numbers]

    def predict_proba(self, X: Any) -> Any:
        """The probability of each class, float64 [n, classes]."""
        return self._predict(X, "predict_proba")


class DPRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A private regression by squared error, by default with `dp_adam`; scale targets by constants to about [-1, 1]."""

    def fit(self, X: Any, y: Any) -> DPRegressor:
        """Train on rows X [n, d] with numbers y [n]; ConfigError, a ValueError, as of `dpopt.fit`."""
        X, y = validate_data(self, _numbers(X), y, dtype=np.float32, y_numeric=True, ensure_min_samples=2)
        return self._fit(X, y.astype(np.float32), 1, nn.MSELoss(reduction="none"), nn.Flatten(0))

    def predict(self, X: Any) -> Any:
        """The number for each row [n]."""
        return self._predict(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # on the 200 records of scikit-learn's checks, at a small epsilon
        return tags
