"""Cross-validation whose folds are trained as one fleet."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import clone, is_classifier
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv
from sklearn.pipeline import Pipeline
from sklearn.utils import indexable

from .._arguments import refused
from ..errors import SettingError
from ._estimators import MeristemEstimator
from ._fleet import train_folds

Indices = Sequence["tuple[npt.NDArray[Any], npt.NDArray[Any]]"]


def cross_validate(
    estimator: Any,
    X: Any,
    y: Any,
    *,
    groups: Any = None,
    scoring: Any = None,
    cv: Any = None,
    return_train_score: bool = False,
    return_estimator: bool = False,
    return_indices: bool = False,
) -> dict[str, Any]:
    """As ``sklearn.model_selection.cross_validate``, with all folds in one fleet.

    Splits, arguments and results are scikit-learn's. The networks of all folds train side by side on
    all cores, so there is no ``n_jobs``. With an ``int`` as ``random_state``, network m of fold k of K
    has the bits of member m K + k of a classifier that is fitted to the samples of the fold alone;
    of a regressor, they may differ by the rounding of the standardised targets.

    Parameters
    ----------
    estimator : MeristemClassifier or MeristemRegressor, or a Pipeline that ends with one
        It is cloned, not changed. The steps before it are fitted for each fold on its training
        samples.
    X, y, groups, scoring, cv, return_train_score, return_estimator, return_indices
        As in scikit-learn.

    Returns
    -------
    dict
        ``test_score`` (or ``test_NAME`` for each of several metrics), ``fit_time``, ``score_time``,
        and ``train_score``, ``estimator`` and ``indices`` if asked for. ``fit_time`` of each fold is
        the time of the fleet in seconds, divided by the folds, so that the sum is the time of the fleet.

    Raises
    ------
    ValueError
        As ``fit``; also a ``SettingError``, for an estimator of another kind.
    """
    last = estimator[-1] if isinstance(estimator, Pipeline) else estimator
    if not isinstance(last, MeristemEstimator):
        expected = "a MeristemClassifier or MeristemRegressor, or a Pipeline that ends with one"
        remedy = "use sklearn.model_selection.cross_validate for other estimators"
        raise refused("estimator", estimator, expected, SettingError, remedy)
    X, y, groups = indexable(X, y, groups)
    splitter = check_cv(cv, y, classifier=is_classifier(estimator))
    scorer = check_scoring(estimator, scoring=scoring)
    splits: Indices = list(splitter.split(X, y, groups))

    start = time.perf_counter()
    fitted = _fit_all(estimator, last, (X, y), splits)
    fit_time = (time.perf_counter() - start) / len(splits)

    result: dict[str, Any] = {"fit_time": np.full(len(splits), fit_time)}
    scores: dict[str, list[float]] = {}
    times = []
    for one, (train, test) in zip(fitted, splits, strict=True):
        start = time.perf_counter()
        _score(scores, "test", scorer(one, _rows(X, test), _rows(y, test)))
        times.append(time.perf_counter() - start)
        if return_train_score:
            _score(scores, "train", scorer(one, _rows(X, train), _rows(y, train)))
    result["score_time"] = np.array(times)
    if return_estimator:
        result["estimator"] = fitted
    if return_indices:
        trains, tests = zip(*splits, strict=True)
        result["indices"] = {"train": trains, "test": tests}
    return result | {name: np.array(values) for name, values in scores.items()}


def _fit_all(estimator: Any, last: MeristemEstimator, data: tuple[Any, Any], splits: Indices) -> list[Any]:
    """A fitted estimator for each split."""
    X, y = data
    plan = clone(last)._plan()
    # All folds have the outputs of all classes, also a fold whose training samples lack one.
    classes = np.unique(np.asarray(y)) if is_classifier(last) else None
    fitted, folds = [], []
    for train, _ in splits:
        one = clone(estimator)
        samples, targets = _rows(X, train), _rows(y, train)
        end = one
        if isinstance(one, Pipeline):
            end = one[-1]
            if len(one) > 1:
                samples = one[:-1].fit_transform(samples, targets)
        folds.append(end._fold(samples, targets, classes))
        fitted.append((one, end))
    widths = {fold.samples.shape[1] for fold in folds}
    if len(widths) > 1:
        raise ValueError(
            f"the steps before the network make {min(widths)} to {max(widths)} features, depending on "
            "the fold; one fleet needs the same number: name the categories, or use "
            "sklearn.model_selection.cross_validate"
        )
    for (_, end), members in zip(fitted, train_folds(plan, folds), strict=True):
        end._finish(members)
    return [one for one, _ in fitted]


def _rows(values: Any, indices: "npt.NDArray[Any]") -> Any:
    """The samples with these numbers, of an array, a table or a list."""
    if hasattr(values, "iloc"):
        return values.iloc[indices]
    if hasattr(values, "shape"):
        return values[indices]
    return [values[index] for index in indices]


def _score(scores: dict[str, list[float]], split: str, value: Any) -> None:
    """Adds the score of a fold, or of each metric by its name."""
    named = value if isinstance(value, dict) else {"score": value}
    for name, score in named.items():
        scores.setdefault(f"{split}_{name}", []).append(float(score))
