"""Training of the members of one or several folds as one fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import refused
from ..errors import SettingError
from ..runs import Run, train
from ..weights import Weights, load

#: Roles of a sample in a fold of the array ``train_folds``.
TRAIN, HELD_OUT = 1, 2
#: Share of the training samples that a controller judges modules on, unless given.
CONTROL_SPLIT = 0.1
#: Settings of a run of one round whose files nobody reads, unless given otherwise.
QUIET = {"telemetry": "off", "checkpoint_every": 0, "twin": False, "rounds": 1}
#: Settings that a fleet of folds decides itself.
OWN = (
    "dataset data_root target missing task loss folds classes envs members rounds seed run_dir "
    "normalize control_split bootstrap train_share data_parallel"
).split()


@dataclass(frozen=True)
class Fold:
    """Training samples of one fold, in their order, as the engine reads them."""

    #: float32 [N, F], finite.
    samples: "npt.NDArray[np.float32]"
    #: Classes int64 [N], or numbers float32 [N, K].
    targets: "npt.NDArray[Any]"


@dataclass(frozen=True)
class Members:
    """The trained members of one fold."""

    #: Weights and description of each network.
    weights: list[Weights]
    #: float64 [members, steps]: the training loss of each epoch.
    losses: "npt.NDArray[np.float64]"
    #: Trained parameters of each member, modules included.
    parameters: list[int]


@dataclass(frozen=True)
class Plan:
    """Settings of a fleet."""

    settings: Mapping[str, Any]
    controller: Any
    #: Members of a fold.
    members: int
    bootstrap: bool
    train_share: float
    control_split: float | None
    seed: int


def check_settings(given: "Mapping[str, Any] | None", parameters: Sequence[str]) -> dict[str, Any]:
    """The additional settings of an estimator.

    Raises:
        SettingError: A setting that is a parameter of the estimator, or that it decides itself.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise refused("settings", given, "a mapping of settings, or None", SettingError)
    for name in given:
        if name in parameters:
            raise refused("settings", name, f"no parameter of the estimator; give `{name}=`", SettingError)
        if name in OWN:
            raise refused("settings", name, "settings that the estimator leaves open", SettingError)
    return dict(given)


def train_folds(plan: Plan, folds: Sequence[Fold]) -> list[Members]:
    """Trains ``plan.members`` networks for each fold, all of them as one fleet.

    Network m of fold k is env ``m * len(folds) + k`` of the run. All files are temporary.
    """
    with TemporaryDirectory(prefix="meristem-") as folder:
        file, run_dir = Path(folder) / "samples.npz", Path(folder) / "run"
        arrays, settings = arrays_of(plan, folds)
        np.savez(file, **arrays)  # type: ignore[arg-type]
        run = train(
            dataset="arrays",
            data_root=file,
            run_dir=run_dir,
            controller=plan.controller,
            envs=plan.members * len(folds),
            seed=plan.seed,
            bootstrap=plan.bootstrap,
            train_share=plan.train_share,
            **settings,
        )
        return [members_of(run, range(k, plan.members * len(folds), len(folds))) for k in range(len(folds))]


def arrays_of(
    plan: Plan, folds: Sequence[Fold]
) -> "tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]":
    """The file of the samples of all folds, one fold after the other, and settings for it."""
    targets = np.concatenate([fold.targets for fold in folds])
    name = "train_labels" if targets.dtype.kind == "i" else "train_targets"
    arrays = {"train_inputs": np.concatenate([fold.samples for fold in folds]), name: targets}
    features = arrays["train_inputs"].shape[1]
    # Folds are standardised before, each by its own training samples.
    identity = f"mean={','.join('0' * features)};std={','.join('1' * features)}"
    settings = {**QUIET, "normalize": identity, **plan.settings}
    if name == "train_labels":
        # All folds have outputs for all classes, also a fold whose samples lack some.
        settings["task"] = "classify"
    else:
        settings["task"] = "regress"
    if len(folds) == 1:
        settings["control_split"] = plan.control_split
        return arrays, settings
    roles = np.zeros((len(folds), len(targets)), np.uint8)
    start = 0
    for number, fold in enumerate(folds):
        end = start + len(fold.targets)
        roles[number, start:end] = roles_of(plan, number, end - start)
        start = end
    return {**arrays, "train_folds": roles}, {**settings, "folds": len(folds)}


def roles_of(plan: Plan, number: int, samples: int) -> "npt.NDArray[np.uint8]":
    """The roles of the samples of a fold, of which a share is its control split."""
    roles = np.full(samples, TRAIN, np.uint8)
    default = 0.0 if plan.controller == "none" else CONTROL_SPLIT
    share = default if plan.control_split is None else plan.control_split
    if share > 0:
        order = np.random.default_rng([plan.seed, number]).permutation(samples)
        roles[order[: max(1, round(share * samples))]] = HELD_OUT
    return roles


def members_of(run: Run, envs: Sequence[int]) -> Members:
    """Weights and losses of some envs of a run."""
    summary = run.summary
    assert summary is not None, "a run that returned is complete"
    steps = run.events["step_completed"]
    losses = [np.asarray(steps["train_loss"])[np.asarray(steps["env"]) == env] for env in envs]
    return Members(
        [load(run.weights(env)) for env in envs],
        np.stack(losses),
        [int(summary["envs"][env]["parameters"]) for env in envs],
    )
