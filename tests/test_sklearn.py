"""scikit-learn's own checks of an estimator, and what is ours."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import BaggingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder
from sklearn.utils.estimator_checks import check_estimator

from dpopt.errors import ConfigError
from dpopt.privacy import epsilon
from dpopt.sklearn import DPClassifier, DPRegressor

pytestmark = pytest.mark.filterwarnings("ignore:seed", "ignore:delta")
DOCS = Path(__file__).parents[1] / "docs" / "tutorials" / "fit.md"


def records(n=400, seed=0):
    random = np.random.default_rng(seed)
    x = random.uniform(0, 10, (n, 3))
    return x, x[:, 0] > x[:, 1]


@pytest.mark.parametrize("kind", [DPClassifier, DPRegressor])
@pytest.mark.filterwarnings("ignore")
def test_its_own_checks(kind):
    """The guide lists those that pass, and each exception with its reason; another release may have others."""
    text = DOCS.read_text().partition("scikit-learn's own checks")[2].partition("\n## ")[0]
    listed, excepted = (set(re.findall("`(check_[a-z0-9_]+)`", part)) for part in text.split("Not passed:"))
    outcomes = check_estimator(kind(epochs=2, accountant="rdp"), on_fail=None, on_skip=None)
    failed = {each["check_name"] for each in outcomes if each["status"] != "passed"}
    assert failed <= excepted
    assert len(listed & {each["check_name"] for each in outcomes}) > 40
    assert not listed & excepted


def test_a_fit_that_failed_leaves_nothing_to_predict_with():
    model = DPClassifier(epsilon=-1.0)
    with pytest.raises(ValueError, match="epsilon"):
        model.fit(*records(20))
    for predict in (model.predict, model.predict_proba):
        with pytest.raises(NotFittedError):
            predict(records(20)[0])


def test_a_pipeline_with_public_preprocessing():
    x, is_left = records()
    y = np.where(is_left, "left", "right")
    scaled = FunctionTransformer(lambda x: x / 5 - 1)
    pipeline = make_pipeline(scaled, DPClassifier(epsilon=8.0, hidden=(), accountant="rdp", batch_size=100, epochs=20))
    pipeline.fit(x, y)
    model = pipeline[-1]
    assert model.classes_.tolist() == ["left", "right"]
    assert (pipeline.predict(x) == y).mean() > 0.8
    probabilities = pipeline.predict_proba(x)
    linear = model.result_.model[1]
    outputs = torch.tensor(x / 5 - 1).float() @ linear.weight.T + linear.bias
    assert np.allclose(probabilities, outputs.detach().softmax(1), atol=1e-5)
    assert model.result_.record["epsilon"] <= 8
    assert model.result_.record["seed_is_secret"]
    assert "epsilon = " in str(model.result_.statement())


def test_cross_validation_and_grid_search():
    x, is_left = records(600)
    pipeline = make_pipeline(
        FunctionTransformer(lambda x: x / 5 - 1), DPClassifier(hidden=(), accountant="rdp", batch_size=100, epochs=10)
    )
    search = GridSearchCV(pipeline, {"dpclassifier__epsilon": [0.01, 20.0]}, cv=3).fit(x, is_left)
    assert search.best_params_ == {"dpclassifier__epsilon": 20.0}
    pipeline.set_params(dpclassifier__epsilon=20.0)
    scores = cross_validate(pipeline, x, is_left, cv=3, return_estimator=True)
    assert min(scores["test_score"]) > 0.8
    ledgers = [fold[-1].result_.ledger for fold in scores["estimator"]]
    # each record is in two of the three sets of training rows
    assert 20 < epsilon(ledgers[0] + ledgers[1], 600**-1.1, accountant="rdp") < 40


def test_parameters_are_those_of_fit():
    model = DPClassifier(epsilon=1.5, optimizer="dp_sgd", batch_size=50, epochs=1, accountant="rdp", random_state=3)
    assert clone(model).get_params() == model.get_params()
    x, y = records(100)
    record = model.fit(x, y).result_.record
    assert [record[name] for name in ("epsilon_target", "optimizer", "batch_size", "epochs", "seed")] == [
        *(1.5, "dp_sgd", 50, 1, 3)
    ]
    default = DPRegressor(accountant="rdp").fit(x / 5 - 1, x[:, 0] / 5 - 1).result_.record
    assert (default["epsilon_target"], default["average"], default["epochs"]) == (2.0, 0.95, 10)
    assert default["defaults"] == ["average", "batch_size", "delta", "epochs", "optimizer"]
    assert default["optimizer"].startswith("DPAdam(")


def test_a_regression_learns():
    x, _ = records(600)
    model = DPRegressor(epsilon=20.0, hidden=(), accountant="rdp", batch_size=100, epochs=20)
    target = x[:, 0] / 5 - 1
    model.fit(x / 5 - 1, target)
    assert model.predict(x / 5 - 1).shape == (600,)
    assert model.score(x / 5 - 1, target) > 0.5


def test_a_clone_says_that_others_may_have_been_fitted():
    own, data = DPClassifier(hidden=(), accountant="rdp", epochs=1), records(60)
    bagged = BaggingClassifier(make_pipeline(own), n_estimators=2).fit(*data)
    for each in (own.fit(*data), bagged.estimators_[1][-1]):
        assert ("others may have been fitted" in str(each.result_.statement())) == (each is not own)


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="y has one class"):
        DPClassifier().fit(np.ones((5, 2)), np.zeros(5))


def test_columns_of_texts_are_named_and_encoded_by_a_step_before():
    x, is_left = records(60)
    frame = pd.DataFrame({"age": x[:, 0] / 5 - 1, "city": np.where(is_left, "Bonn", "Delft")})
    with pytest.raises(ConfigError, match=r"X: \['city'\] .* OneHotEncoder"):
        DPClassifier().fit(frame, is_left)
    encoder = OneHotEncoder(categories=[["Bonn", "Graz"]], handle_unknown="ignore")
    stated = ColumnTransformer([("city", encoder, ["city"])], remainder="passthrough", sparse_threshold=0)
    model = make_pipeline(stated, DPClassifier(epsilon=8.0, hidden=(), accountant="rdp", epochs=1))
    assert model.fit(frame, is_left)[-1].n_features_in_ == 3
    assert model.predict(frame[::-1]).shape == (60,)
