"""Training, resuming and reading of runs."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from . import _meristem
from ._arguments import configuration, function, integer, optional, refused, sequence, text
from ._arguments import path as path_of
from ._loss import Loss, loss_hook, loss_setting
from .control import Controller, decide

Columns = dict[str, "np.ndarray[Any, Any] | list[Any]"]


class Run:
    """A run folder: complete, in progress, or stopped. Reading does not change it."""

    def __init__(self, path: "str | PathLike[str]") -> None:
        self.path = Path(path_of("path", path))
        self._read = _meristem.read_run(str(self.path))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, state={self.state!r})"

    @property
    def state(self) -> str:
        """``running``, ``complete``, ``stopped``, ``failed`` or ``killed``."""
        state: str = self._read["overview"]["state"]
        return state

    @property
    def overview(self) -> dict[str, Any]:
        """State and main results, as in ``meristem runs --json``."""
        return dict(self._read["overview"])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run by name, as in its ``config.toml``."""
        return dict(self._read["settings"])

    @property
    def summary(self) -> dict[str, Any] | None:
        """The contents of ``summary.json``; ``None`` before the run ends."""
        summary = self._read["summary"]
        return None if summary is None else dict(summary)

    @property
    def leaderboard(self) -> list[dict[str, Any]]:
        """The members from the best to the worst control score, or training score without a control split.

        Each has ``number``, ``member`` (its settings), ``envs``, ``parameters``, ``steps``, ``ended``, and
        the scores ``control``, ``train`` and ``test``. A score has ``mean``, the sample standard deviation
        ``std`` over the envs of the member, and ``ci95``, half the width of the 95 % confidence interval of
        the mean; it is ``None`` if it was not measured. For one env ``std`` and ``ci95`` are ``None``. Empty
        without members.
        """
        return [dict(place) for place in self._read["leaderboard"]]

    @property
    def over_seeds(self) -> list[dict[str, Any]]:
        """Members that differ only by their ``seed`` as one place each, in the form and order of
        :attr:`leaderboard`: the ``envs`` of a place are those of all seeds, and its ``number`` is ``None`` if
        there are several. Empty if no two members differ only by their seed.
        """
        return [dict(place) for place in self._read["over_seeds"]]

    @cached_property
    def events(self) -> dict[str, Columns]:
        """Events by kind, each as a dictionary of columns of equal length.

        Columns of numbers are ``int64`` or ``float64`` arrays, where ``null`` is NaN; other columns
        are lists. An object in an event becomes several columns (``reward_gain``), a list of objects
        a separate table (``step_completed.slots``). ``pandas.DataFrame`` and ``polars.DataFrame``
        accept a table, such as ``run.events["step_completed"]``. Events are read once; create a new
        ``Run`` to read later events.
        """
        return self._events(batches=False)

    @property
    def batches(self) -> Columns:
        """The losses of every batch, if the run has the setting ``log_batches``."""
        return self._events(batches=True).get("batch_completed", {})

    def weights(self, env: int) -> Path:
        """The path of an env's weights file.

        Raises:
            ArgumentError: ``env`` is not an integer.
        """
        return self.path / "weights" / f"env-{integer('env', env)}.safetensors"

    def ensemble(
        self,
        *,
        members: Iterable[int] | None = None,
        top: int | None = None,
        split: str = "test",
        batch: int = 128,
        device: str = "cpu",
        threads: int = 0,
    ) -> dict[str, Any]:
        """Evaluates the mean of the networks' predictions, and each network, on the run's dataset.

        The mean is over probabilities for classes and labels, and over predictions for numbers. By default
        the networks are those of the members that made all steps, or all networks if no member did.
        ``members`` chooses members by number; in a run without members, envs by number. ``top`` chooses the
        networks with the best control scores.

        The result has the figures of the mean (``ensemble``), of the network with the best control score
        (``best``), of all networks (``envs``), and the means of those figures (``mean_of_singles``). Figures
        are ``accuracy`` (or ``f1`` or ``r2``), ``loss`` and ``calibration_error``, the expected calibration
        error, which is ``None`` for numbers. ``left_out`` has the envs that are not part of the ensemble.

        Raises:
            ArgumentError: An argument has a wrong type or range.
            SettingError: The run has not ended, has no such member, or there are fewer than two networks.
            MeristemError: As on the command line.
        """
        if text("split", split) not in ("train", "test"):
            raise refused("split", split, "'train' or 'test'")
        if members is not None:
            members = [integer("members", member) for member in sequence("members", members, "numbers of members")]
        options = {
            "members": members,
            "top": optional("top", top),
            "split": split,
            "batch": integer("batch", batch, 1),
            "device": text("device", device),
            "threads": integer("threads", threads),
        }
        return _meristem.ensemble(str(self.path), options)

    def _events(self, batches: bool) -> dict[str, Columns]:
        tables = _meristem.read_events(str(self.path), batches)
        return {
            kind: {
                name: column if isinstance(column, list) else np.from_dlpack(column)
                for name, column in columns.items()
            }
            for kind, columns in tables.items()
        }


class Searcher:
    """Search over settings of members. A subclass chooses the settings of each member when it begins, and
    may end members after any step. A run calls it between two steps, in the order of the members' numbers.
    """

    def suggest(self, member: int) -> Mapping[str, Any]:
        """The settings of a member that begins, over those of the run. Called in runs with
        ``sampler="external"``."""
        raise NotImplementedError

    def report(self, member: int, steps: int, score: float | None) -> bool:
        """Receives the control score of a member after ``steps`` steps of its own: the mean over its envs,
        or ``None`` without a control split or if training failed. Returns whether the member goes on."""
        return True

    def complete(self, member: int, ended: str | None) -> None:
        """Called when a member is not trained any more. ``ended`` is ``None`` if it has made all its steps,
        or the reason, such as ``"stopped"``, ``"rung"`` or ``"diverged"``."""


def _hooks(on_event: Any, controller: Any, search: Searcher | None, loss: Any) -> dict[str, Any]:
    """The callbacks of a run, as the engine takes them."""
    if search is not None and not isinstance(search, Searcher):
        raise refused("search", search, "a meristem.Searcher")
    on_event = function("on_event", on_event, "a function of an event")
    return {"on_event": on_event, "controller": controller, "searcher": search, "loss": loss}


def _hook(controller: Controller | None) -> Any:
    expected = "a function of an Env, or the name of a controller"
    return None if function("controller", controller, expected) is None else decide(controller)


def train(
    *,
    config: "str | PathLike[str] | Mapping[str, Any] | None" = None,
    controller: str | Controller | None = None,
    loss: "str | Loss | None" = None,
    search: Searcher | None = None,
    on_event: Callable[[dict[str, Any]], object] | None = None,
    **settings: Any,
) -> Run:
    """Trains a fleet, and blocks until the run is done.

    Settings have the names and values of ``meristem train``, with ``_`` for ``-``; see
    ``docs/settings.md``. ``config`` is a TOML or JSON file, or a mapping; settings given by name
    override it. ``controller`` is the name of a built-in controller, or a function from an
    :class:`~meristem.control.Env` to an action, which is called for every env in every step.
    ``loss`` is the name of a built-in loss, or a function of (outputs, targets) that returns the loss of
    each sample and its gradient with respect to the outputs, see ``docs/tasks.md``. ``search`` chooses
    settings of members and ends them, see :class:`Searcher`. ``on_event`` receives the events of the run
    as dictionaries, once a step.

    Ctrl-C ends the run at the next step boundary, with weights, summary and checkpoint, and then
    raises ``KeyboardInterrupt``. An exception in ``on_event`` ends the run in the same way and is
    raised. An exception in a controller, a loss or a searcher ends the run at once and is raised.
    :func:`resume` continues the run from its last checkpoint.

    Raises:
        SettingError: A setting is unknown, or its value is invalid.
        MeristemError: As on the command line.
    """
    hook = None if isinstance(controller, str) else _hook(controller)
    settings["controller"] = controller if hook is None else "external"
    own_loss = loss_setting(loss, settings)
    hooks = _hooks(on_event, hook, search, own_loss)
    return Run(_meristem.train(configuration(config), settings, hooks))


def resume(
    run: "str | PathLike[str] | Run",
    *,
    controller: Controller | None = None,
    loss: "Loss | None" = None,
    search: Searcher | None = None,
    on_event: Callable[[dict[str, Any]], object] | None = None,
    **settings: Any,
) -> Run:
    """Resumes a run that was stopped or killed, and blocks until it is done.

    ``controller``, ``loss`` and ``search`` are those with which the run was started, if they are functions
    of the program. The results have the same bits as an uninterrupted run, if what the functions return
    depends only on their arguments. ``settings`` accepts the settings that ``meristem train --resume``
    accepts.

    Raises:
        ResumeError: The folder cannot be resumed, or a setting cannot be changed.
        MeristemError: As on the command line.
    """
    folder = path_of("run", run.path if isinstance(run, Run) else run)
    hooks = _hooks(on_event, _hook(controller), search, loss_hook(loss))
    return Run(_meristem.resume(folder, settings, hooks))


def verify(folder: "str | PathLike[str]") -> list[dict[str, Any]]:
    """Compares every file of the runs in ``folder`` with its checksum, as ``meristem runs verify``.

    Returns a dictionary for each file: its path as ``file``, its ``state``, and a ``problem`` or
    ``None``. The state is ``whole``, ``damaged`` (changed or missing), or ``unchecked`` for files of
    earlier builds, which have no checksums.

    Raises:
        RunFolderError: There is no run in ``folder``.
    """
    files: list[dict[str, Any]] = _meristem.verify(str(path_of("folder", folder)))
    return files
