"""Sweeps: members with different settings, ranked by their control scores."""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from os import PathLike
from pathlib import Path
from typing import Any, overload

from . import _meristem
from ._arguments import configuration, function, integer, optional, refused
from ._arguments import path as path_of
from ._loss import Loss, loss_hook
from ._parts import PartialSweep, fleets_of, without_members
from .errors import SettingError
from .runs import Run, Searcher, train

class Sweep:
    """Results of a sweep on an executor. One run of the same sweep has the same bits."""

    def __init__(self, parts: PartialSweep) -> None:
        self._parts = parts

    def __repr__(self) -> str:
        return f"Sweep({len(self.leaderboard)} members)"

    @property
    def leaderboard(self) -> list[dict[str, Any]]:
        """The members from the best to the worst, as :attr:`Run.leaderboard`."""
        return self._parts.leaderboard()

    @property
    def over_seeds(self) -> list[dict[str, Any]]:
        """Members that differ only by their seed as one place each, as :attr:`Run.over_seeds`."""
        return self._parts.over_seeds()

    def weights(self, env: int) -> bytes:
        """The contents of the weights file of an env, which :func:`meristem.weights.parse` reads.

        Raises:
            ArgumentError: ``env`` is not the number of an env.
        """
        return self._parts.weights(integer("env", env, 0, self._parts.envs - 1))


@overload
def sweep(
    space: str | Mapping[str, Any] | None = None,
    *,
    executor: None = None,
    search: Searcher | None = None,
    on_event: Callable[[dict[str, Any]], object] | None = None,
    **settings: Any,
) -> Run: ...


@overload
def sweep(
    space: str | Mapping[str, Any] | None = None,
    *,
    executor: Executor,
    fleets: int | None = None,
    folder: "str | PathLike[str] | None" = None,
    **settings: Any,
) -> Sweep: ...


def sweep(
    space: str | Mapping[str, Any] | None = None,
    *,
    executor: Executor | None = None,
    fleets: int | None = None,
    folder: "str | PathLike[str] | None" = None,
    search: Searcher | None = None,
    on_event: Callable[[dict[str, Any]], object] | None = None,
    **settings: Any,
) -> Run | Sweep:
    """Trains members with different settings side by side, and blocks until all are done. The
    ``leaderboard`` of the result ranks them by their control scores.

    ``space`` has a distribution for each setting, such as ``{"lr": {"log_uniform": [1e-3, 1]}}``, or is
    the text of ``meristem train --space``; ``samples`` members are drawn from it. Without a space,
    ``members`` lists their settings. ``scheduler``, such as ``"halving:3"``, ends members early or lets them
    copy others; see ``docs/sweeps.md``. Other settings are those of :func:`train`; by default there is no
    controller, and a fifth of the training samples is the control split. ``places`` is the number of members
    in training at a time; when a member ends, the next begins in its place. ``search`` is a
    :class:`Searcher`, which may end members. Without a space and ``members`` it also chooses the settings of
    each member when the member begins.

    Without ``executor`` the sweep is one run in this process. With any ``concurrent.futures.Executor``,
    for example a process pool, ``Client.get_executor()`` of Dask or ``mpi4py.futures``, it is several
    fleets: runs that each have some of the members, trained by tasks of the executor. The leaderboard and
    the weights have the same bits as those of one run. The members are dealt out to ``fleets`` fleets, by
    default as many as the executor has workers. The scores of all fleets are compared after each rung with
    ``halving`` and ``hyperband``, and after each step with ``median`` and ``patience``; ``pbt`` needs one
    run. Every worker needs the files that settings name. A worker uses one thread, unless ``threads`` is
    set. The states of the fleets are written to ``folder``, if given, as soon as they arrive; the same call
    with the same folder continues from these states, also with another executor.

    A task whose worker is lost is given to the executor again, up to three times. If the executor itself
    breaks, as a process pool does when a process dies, the call fails; call it again with a new executor
    and the same ``folder``.

    Raises:
        SettingError: A setting is unknown, or its value is invalid; there are no members; with an executor,
            the folder has another sweep.
        MeristemError: The executor is broken; or as on the command line.
    """
    given = {"controller": "none", "control_split": 0.2, **settings}
    if space is not None:
        given["space"] = space
    if executor is None:
        _refuse({"fleets": fleets, "folder": folder}, "only with an executor")
        if search is not None and space is None and given.get("members") is None:
            given.setdefault("sampler", "external")
        if not _has_members(given):
            raise without_members()
        return train(on_event=on_event, search=search, **given)
    of_a_run = ("run_dir", "resume", "trace", "export", "end_members", "stop_after", "places")
    refused_keys = {key: given.get(key) for key in of_a_run}
    _refuse({**refused_keys, "on_event": on_event, "search": search}, "none with an executor, where a sweep is several runs")
    if not callable(getattr(executor, "submit", None)):
        raise refused("executor", executor, "a concurrent.futures.Executor")
    if callable(given.get("loss")):
        raise refused("loss", given["loss"], "the name of a loss with an executor", SettingError)
    config = configuration(given.pop("config", None))
    resolved = _meristem.resolved(config, {"threads": 1, **given})
    count = optional("fleets", fleets, 1, 4096)
    kept = None if folder is None else Path(path_of("folder", folder))
    parts = PartialSweep(resolved, fleets_of(resolved, executor, count, kept), kept)
    parts.run(executor)
    return Sweep(parts)


def _has_members(given: Mapping[str, Any]) -> bool:
    if given.get("members") is not None or given.get("space") is not None or given.get("samples") is not None:
        return True
    of_file = configuration(given.get("config"))
    return of_file is not None and "members" in _meristem.resolved(of_file, {})


def _refuse(given: Mapping[str, Any], expected: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise refused(name, value, expected, SettingError)


def replay(
    run: "str | PathLike[str] | Run",
    member: int,
    *,
    loss: "Loss | None" = None,
    on_event: Callable[[dict[str, Any]], object] | None = None,
    **settings: Any,
) -> Run:
    """Trains a member of a sweep again, without the other members, to the same bits.

    If the member is a copy, the new run first trains the members that it is a copy of. The envs of the member
    are the last ones of the new run; a member that is no copy has the only envs. ``loss`` is the loss of the
    sweep, if it was a function. ``settings`` may only be those that results do not depend on, such as
    ``run_dir``.

    Raises:
        ArgumentError: ``member`` is not an integer.
        SettingError: The run has no such member.
        ResumeError: A file that the settings of the member name has other contents than before.
        MeristemError: As on the command line.
    """
    folder = path_of("run", run.path if isinstance(run, Run) else run)
    on_event = function("on_event", on_event, "a function of an event")
    return Run(_meristem.replay(folder, integer("member", member), settings, on_event, loss_hook(loss)))
