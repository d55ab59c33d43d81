"""Training of a policy that serves any host."""

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from . import _meristem
from ._arguments import function
from ._arguments import path as path_of
from .errors import SettingError


def train_policy(
    folder: "str | PathLike[str]",
    *,
    rounds: int,
    settings: Mapping[str, Any] | None = None,
    task: Mapping[str, Any] | None = None,
    members: Mapping[str, Any] | None = None,
    families: Sequence[Mapping[str, Any]] | None = None,
    on_line: Callable[[dict[str, Any]], object] | None = None,
    **numbers: int,
) -> list[dict[str, Any]]:
    """Trains a policy on drawn tasks, and blocks until it is done. Returns the lines of ``curves.jsonl`` in
    ``folder``, which also gets ``policy.safetensors``; see ``docs/control.md``.

    ``rounds`` is the number of rounds. ``settings`` are those of :func:`train` for all runs. ``task`` and
    ``members`` are spaces, such as ``{"lr": {"log_uniform": [0.01, 0.3]}}``: the values of ``task`` are
    drawn for each round, the values of ``members`` for each env of each round. ``families`` are families of
    tasks with a ``weight`` and dimensions of ``task`` and ``members`` for each. ``numbers`` are the other keys
    of the file of ``meristem control train-policy``: ``envs``, ``seed``, ``teacher_rounds``,
    ``evaluate_every`` and so on. ``on_line`` receives each line of the curves.

    Ctrl-C ends the training with the rounds that are complete, and then raises ``KeyboardInterrupt``. The
    same call continues from there, also after a kill, to the same bits.

    Raises:
        SettingError: An unknown key, or a value that is invalid.
        ResumeError: The folder has a training with another request.
        MeristemError: As on the command line.
    """
    request: dict[str, Any] = {"rounds": rounds, **numbers}
    try:
        for name, table in [("settings", settings), ("task", task), ("members", members)]:
            if table is not None:
                request[name] = dict(table)
        if families is not None:
            request["families"] = [dict(family) for family in families]
        text = json.dumps(request, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingError(f"request: expected numbers, texts, lists and tables ({error})") from None
    on_line = function("on_line", on_line, "a function of a line of the curves")
    return _meristem.train_policy(path_of("folder", folder), text, on_line)
