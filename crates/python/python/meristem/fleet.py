"""Fleets: runs that the program steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _meristem
from ._arguments import configuration, integer, path, refused, sequence
from ._loss import Loss, loss_hook, loss_setting
from .control import Action, Env, env_of, to_engine
from .errors import ControllerError, SettingError, StateError
from .runs import Run
from .weights import Weights, parse


#: Error text for the setting ``controller`` of a fleet.
PROGRAM = "none: a fleet executes the actions given to `apply`; meristem.train takes a controller"


@dataclass(frozen=True)
class Figures:
    """Results of the last step of an env. Control results are ``None`` without a control split."""

    #: Kind of ``train_score`` and ``control_score``, not a number: ``"accuracy"``, ``"f1"`` or ``"r2"``.
    score: str
    train_loss: float
    #: NaN if the score is undefined: F1 if no label is present and none is predicted.
    train_score: float
    control_loss: float | None
    control_score: float | None
    host_parameters: int
    grown_parameters: int

    @property
    def train_accuracy(self) -> float:
        """The training score of a run that classifies, 0..1.

        Raises:
            StateError: The run has another score.
        """
        self._check_is_accuracy()
        return self.train_score

    @property
    def control_accuracy(self) -> float | None:
        """The control score of a run that classifies, 0..1.

        Raises:
            StateError: The run has another score.
        """
        self._check_is_accuracy()
        return self.control_score

    def _check_is_accuracy(self) -> None:
        if self.score != "accuracy":
            raise StateError(f"this run has no accuracy; its score is {self.score}: use `control_score`")


def figures_of(given: dict[str, Any]) -> Figures:
    """Converts the engine's figures; JSON has no NaN."""
    score = given.pop("train_score")
    return Figures(train_score=math.nan if score is None else score, **given)


class Fleet:
    """A run that the program steps, with actions chosen by the program.

    It has a run folder, events and checkpoints like any other run::

        with meristem.Fleet(preset="quick", envs=2) as fleet:
            for _ in range(5):
                envs = fleet.step()
                fleet.apply([choose(env) for env in envs])

    One thread at a time may use a fleet; a concurrent call from another thread raises a
    ``StateError``. Ctrl-C during a call is raised at the end of the call; the fleet stays usable.
    """

    def __init__(
        self,
        *,
        config: "str | PathLike[str] | Mapping[str, Any] | None" = None,
        loss: "str | Loss | None" = None,
        **settings: Any,
    ) -> None:
        """Starts a run with the settings of :func:`meristem.train`. It ends after ``rounds`` rounds.

        ``loss`` is the name of a built-in loss, or a function, as in :func:`meristem.train`.

        Raises:
            SettingError: As :func:`meristem.train`; or ``controller`` is given.
        """
        if settings.get("controller") not in (None, "external"):
            raise refused("controller", settings["controller"], PROGRAM, SettingError)
        settings = {**settings, "controller": "external"}
        own_loss = loss_setting(loss, settings)
        self._run = _meristem.FleetSession(configuration(config), settings, None, own_loss)

    @classmethod
    def resume(
        cls, run: "str | PathLike[str] | Run", *, loss: "Loss | None" = None, **settings: Any
    ) -> "Fleet":
        """Resumes the run of an earlier fleet at its last checkpoint. ``loss`` is that of the run, if it is
        a function.

        With other devices or another length, the results may differ from the results of an
        uninterrupted run; then a ``UserWarning`` is issued.
        """
        fleet = cls.__new__(cls)
        folder = path("run", run.path if isinstance(run, Run) else run)
        fleet._run = _meristem.FleetSession(None, settings, folder, loss_hook(loss))
        return fleet

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def step(self) -> list[Env]:
        """Trains all envs for one step, which is one epoch, and measures them. Returns the envs.

        The call after the last step of a round trains the first step of the next round, with fresh
        hosts. If actions are due and were not given, the action of all envs is WAIT.

        Raises:
            StateError: The run is over, or another thread uses the fleet.
            DivergedError: Training failed; the run has ended.
        """
        if self._run.point() == "decision":
            self.apply([None] * len(self))
        self._run.step()
        return self.envs

    def apply(self, actions: Sequence[Action]) -> "npt.NDArray[np.float32]":
        """Executes an action for each env, in order. Returns their rewards.

        Raises:
            ControllerError: A value is not an action, or an action is illegal; the error has the
                rule. Nothing was executed.
            StateError: No actions are due.
        """
        given = sequence("actions", actions, "an action for each env", ControllerError)
        return np.array(self._run.act([to_engine(action) for action in given]), np.float32)

    @property
    def point(self) -> str:
        """``boundary``: before a step; ``decision``: actions are due; ``end``: end of a round."""
        return self._run.point()

    @property
    def envs(self) -> list[Env]:
        """The current envs."""
        return [env_of(self._view(env)) for env in self._run.envs()]

    @property
    def figures(self) -> list[Figures]:
        """Results of the last step of each env."""
        return [figures_of(env["figures"]) for env in self._run.envs()]

    @property
    def slots(self) -> list[str]:
        """Names of the slots, in the order of the slot head."""
        return self._run.names()[0]

    @property
    def blueprints(self) -> list[str]:
        """Names of the blueprints, in the order of the blueprint head."""
        return self._run.names()[1]

    @property
    def head_sizes(self) -> list[int]:
        """Number of choices of each head of an action: op, slot, blueprint, style, tempo,
        alpha_target, alpha_speed, alpha_curve."""
        return self._run.head_sizes()

    def __len__(self) -> int:
        return len(self._run.envs())

    def weights(self, env: int) -> Weights:
        """A copy of an env's weights, as numpy arrays.

        Raises:
            ArgumentError: ``env`` is not an integer.
            StateError: The env does not exist; or a round has ended, so the run has written the
                weights to its folder.
        """
        return parse(self._run.weights(integer("env", env)))

    def snapshot(self) -> list[Weights]:
        """Copies of the weights of all envs."""
        return [self.weights(env) for env in range(len(self))]

    def checkpoint(self) -> None:
        """Writes a checkpoint, from which :meth:`resume` continues at this boundary.

        Before the first step of a round there is nothing to write.
        """
        self._run.checkpoint()

    def close(self) -> Run | None:
        """Ends the run at this boundary, with weights, summary and checkpoint.

        Returns the run; ``None`` if the fleet was closed before.
        """
        folder: Path | None = self._run.close()
        return None if folder is None else Run(folder)

    @staticmethod
    def _view(env: dict[str, Any]) -> dict[str, Any]:
        others = ("round", "reward", "figures")
        return {name: value for name, value in env.items() if name not in others}
