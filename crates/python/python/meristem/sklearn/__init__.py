"""Estimators for scikit-learn, and its cross-validation as one fleet.

``MeristemClassifier`` and ``MeristemRegressor`` work in pipelines and searches as other estimators
do. :func:`cross_validate` trains the networks of all folds side by side. The page
``docs/scikit-learn.md`` has examples.
"""

try:
    from sklearn.utils.validation import validate_data as _validate_data
except ImportError as error:
    raise ImportError(
        "meristem.sklearn needs scikit-learn 1.6 or newer: pip install 'scikit-learn>=1.6'"
    ) from error

from ._cross_validation import cross_validate
from ._estimators import MeristemClassifier, MeristemRegressor

del _validate_data

__all__ = ["MeristemClassifier", "MeristemRegressor", "cross_validate"]
