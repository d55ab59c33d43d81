"""The classifier and the regressor."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from .. import network
from .._arguments import flag, integer
from ..errors import SettingError
from ._fleet import Fold, Members, Plan, check_settings, train_folds

#: Most members of a fleet.
ENVS_MAX = 4096
#: Samples of a forward pass, which bounds the memory of a prediction.
PASS = 4096


class MeristemEstimator(BaseEstimator):  # type: ignore[misc]
    """Common parts of classifier and regressor."""

    def __init__(
        self,
        host: Any = "mlp:64,64",
        *,
        n_members: int = 1,
        bootstrap: bool = False,
        train_share: float = 1.0,
        steps: int = 100,
        batch: int = 32,
        lr: float = 0.01,
        lr_schedule: str = "constant",
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        clip_norm: Any = 1.0,
        controller: Any = "none",
        blueprints: Any = "vectors",
        control_split: float | None = None,
        standardize: bool = True,
        threads: int = 0,
        settings: "Mapping[str, Any] | None" = None,
        random_state: Any = None,
    ) -> None:
        # As scikit-learn asks: parameters are stored as given, and checked by `fit`.
        self.host = host
        self.n_members = n_members
        self.bootstrap = bootstrap
        self.train_share = train_share
        self.steps = steps
        self.batch = batch
        self.lr = lr
        self.lr_schedule = lr_schedule
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm
        self.controller = controller
        self.blueprints = blueprints
        self.control_split = control_split
        self.standardize = standardize
        self.threads = threads
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Any:
        """Trains the members on samples ``X`` [N, F] and targets ``y``. Returns the estimator.

        Waits until training is done. Its files are temporary.

        Raises:
            ValueError: Samples or targets that are not finite, too few, or of another form; also a
                ``SettingError``, for a parameter.
            MeristemError: As :func:`meristem.train`.
        """
        plan = self._plan()
        fold = self._fold(X, y)
        [members] = train_folds(plan, [fold])
        return self._finish(members)

    def _plan(self) -> Plan:
        """Checks the parameters. Draws the seed from ``random_state``."""
        parameters = self.get_params(deep=False)
        settings = check_settings(self.settings, list(parameters))
        for name in ("host", "steps", "batch", "lr", "lr_schedule", "momentum", "weight_decay", "clip_norm", "blueprints", "threads"):
            settings[name] = parameters[name]
        return Plan(
            settings,
            "none" if self.controller is None else self.controller,
            integer("n_members", self.n_members, 1, ENVS_MAX, SettingError),
            flag("bootstrap", self.bootstrap, SettingError),
            self.train_share,
            self.control_split,
            int(check_random_state(self.random_state).randint(2**31 - 1)),
        )

    def _fold(self, X: Any, y: Any, classes: "npt.NDArray[Any] | None" = None) -> Fold:
        """The validated training samples; keeps what follows from them."""
        raise NotImplementedError

    def _scaled(self, X: "npt.NDArray[np.float64]", fit: bool = False) -> "npt.NDArray[np.float32]":
        """Standardised samples as the engine reads them."""
        if fit:
            self.scaler_ = StandardScaler().fit(X) if self.standardize else None
        scaled = X if self.scaler_ is None else self.scaler_.transform(X)
        with np.errstate(over="ignore"):
            samples = scaled.astype(np.float32, order="C")
        if not np.isfinite(samples).all():
            raise ValueError(
                "X has values beyond the range of float32 (3.4e38); scale the features before"
            )
        return samples

    def _finish(self, members: Members) -> Any:
        """Keeps the trained members."""
        self.members_ = members.weights
        self.loss_curves_ = members.losses
        self.parameters_ = members.parameters
        return self

    def _outputs(self, X: Any) -> "npt.NDArray[np.float64]":
        """Predictions of each member [members, N, K].

        In numpy and float64, so that a prediction does not depend on the other samples, and a
        forked process, which has no threads of the engine, can predict.
        """
        check_is_fitted(self)
        samples = self._scaled(validate_data(self, X, reset=False, dtype=np.float64))
        passes = [samples[start : start + PASS] for start in range(0, len(samples), PASS)]
        outputs = [
            [network.predictions(weights, network.logits(weights, part)) for part in passes]
            for weights in self.members_
        ]
        return np.stack([np.concatenate(parts) for parts in outputs])


PARAMETERS = """

    Parameters
    ----------
    host : str or meristem.Host, default="mlp:64,64"
        The network: hidden layers of a multilayer perceptron, or any host.
    n_members : int, default=1
        Networks with different initial weights and orders of samples. Predictions are the mean.
    bootstrap : bool, default=False
        Whether each member trains on samples drawn with replacement, as in bagging.
    train_share : float, default=1.0
        Share of the samples that each member trains on, drawn for each.
    steps : int, default=100
        Epochs.
    batch : int, default=32
        Samples of a batch.
    lr, lr_schedule, momentum, weight_decay, clip_norm
        Learning rate and its schedule (constant, cosine or one-cycle), momentum, weight decay, and
        maximum norm of the gradient (or "off") of stochastic gradient descent.
    controller : str or callable, default="none"
        Decides what grows: "none", "heuristic", "random", or a function of an env.
    blueprints : str, default="vectors"
        Modules that may grow.
    control_split : float, default=None
        Share of the samples on which a controller judges modules, 0.1 by default. Members do not
        train on it.
    standardize : bool, default=True
        Whether features are standardised by mean and deviation of the training samples.
    threads : int, default=0
        Worker threads; 0 for one per core. Results do not depend on it.
    settings : dict, default=None
        Other settings of ``meristem.train``, by name.
    random_state : int, RandomState or None, default=None
        Seed. The same int gives the same bits.

    Attributes
    ----------
    members_ : list of meristem.weights.Weights
        The weights of each member; their ``save`` writes a weights file.
    loss_curves_ : ndarray of shape (n_members, steps)
        Training loss of each epoch.
    parameters_ : list of int
        Trained parameters of each member, modules included.
    scaler_ : StandardScaler or None
        Scale of the features.
    n_features_in_ : int
        Number of features.
    feature_names_in_ : ndarray of str
        Their names, if ``X`` had names that are all text.
"""


class MeristemClassifier(ClassifierMixin, MeristemEstimator):  # type: ignore[misc]
    __doc__ = (
        """Classifier: members vote by the mean of their probabilities."""
        + PARAMETERS
        + """    classes_ : ndarray
        Classes, sorted.
    """
    )

    def predict(self, X: Any) -> "npt.NDArray[Any]":
        """The class with the largest probability, for each sample."""
        # `predict_proba` checks that there are classes.
        best = self.predict_proba(X).argmax(axis=1)
        labels: npt.NDArray[Any] = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> "npt.NDArray[np.float64]":
        """Probabilities [N, classes]: the mean over the members."""
        mean: npt.NDArray[np.float64] = self._outputs(X).mean(axis=0)
        return mean

    def member_probabilities(self, X: Any) -> "npt.NDArray[np.float64]":
        """Probabilities of each member, [members, N, classes]."""
        return self._outputs(X)

    def _fold(self, X: Any, y: Any, classes: "npt.NDArray[Any] | None" = None) -> Fold:
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        found = np.unique(y)
        if len(found) < 2:
            raise ValueError(
                f"y has 1 class, `{found[0]}`; a classifier needs samples of at least 2 classes"
            )
        self.classes_ = found if classes is None else classes
        return Fold(self._scaled(X, fit=True), np.searchsorted(self.classes_, y).astype(np.int64))


class MeristemRegressor(RegressorMixin, MeristemEstimator):  # type: ignore[misc]
    __doc__ = (
        """Regressor of one or several numbers: the mean of the members."""
        + PARAMETERS
        + """    target_scaler_ : StandardScaler
        Scale of the targets, which are standardised for training.
    """
    )

    def predict(self, X: Any) -> "npt.NDArray[np.float64]":
        """Numbers [N], or [N, K] if ``y`` had two axes: the mean over the members."""
        mean: npt.NDArray[np.float64] = self.member_predictions(X).mean(axis=0)
        return mean

    def member_predictions(self, X: Any) -> "npt.NDArray[np.float64]":
        """Numbers of each member, [members, N] or [members, N, K]."""
        outputs = self._outputs(X)
        scaled = self.target_scaler_.inverse_transform(outputs.reshape(-1, outputs.shape[2]))
        numbers: npt.NDArray[np.float64] = scaled.reshape(outputs.shape)
        return numbers[:, :, 0] if self._flat_targets else numbers

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _fold(self, X: Any, y: Any, classes: "npt.NDArray[Any] | None" = None) -> Fold:
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        self._flat_targets = y.ndim == 1
        y = y.reshape(len(y), -1).astype(np.float64)
        self.target_scaler_ = StandardScaler().fit(y)
        return Fold(self._scaled(X, fit=True), self.target_scaler_.transform(y).astype(np.float32, order="C"))
