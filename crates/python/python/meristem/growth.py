"""Comparisons of networks that grow with networks that do not."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from . import _meristem
from ._arguments import function, optional, real, sequence, text
from ._arguments import path as path_of
from .errors import SettingError

#: Largest number of seeds that is passed to the engine, which has a lower limit of its own.
SEEDS_MAX = 2**32


def growth_bench(
    folder: "str | PathLike[str]",
    *,
    suite: str = "small",
    tasks: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: int | None = None,
    tuning_seeds: int | None = None,
    rates: Sequence[float] | None = None,
    on_event: Callable[[dict[str, Any]], object] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Compares methods on the tasks of a suite, each with its best learning rate, and blocks until it is
    done. Returns the contents of ``growth.json`` in ``folder``, which also gets ``growth.md``; see
    ``docs/growth-bench.md``.

    ``suite`` is ``quick``, ``small`` or ``full``. ``tasks`` and ``methods`` restrict the suite; methods that
    the given ones need are added. ``seeds`` is the number of seeds of the table, ``tuning_seeds`` the number
    of seeds on which learning rates are chosen. ``rates`` are the learning rates to choose from, in
    increasing order; with a single rate nothing is chosen. ``settings`` are those of :func:`train`, such as
    ``optimizer="adamw"``, ``threads=1`` or ``data_root`` for the suite ``full``. They apply to all runs and
    override the settings of the suite. ``on_event`` receives the events of all runs.

    Ctrl-C ends the bench at the next step boundary, with the results of complete runs, and then raises
    ``KeyboardInterrupt``. The same call continues after the last complete run, also after a kill, with the
    same results.

    Raises:
        SettingError: An unknown suite, task, method or setting, or a value that is invalid.
        ResumeError: The folder has a bench of another suite or with other settings.
        MeristemError: As on the command line.
    """

    def names(name: str, given: Sequence[str] | None) -> list[str]:
        all = [] if given is None else sequence(name, given, "a list of names", SettingError)
        return [text(name, one, SettingError) for one in all]

    numbers = [] if rates is None else sequence("rates", rates, "a list of numbers", SettingError)
    request = {
        "suite": text("suite", suite, SettingError),
        "tasks": names("tasks", tasks),
        "methods": names("methods", methods),
        "seeds": optional("seeds", seeds, 0, SEEDS_MAX, SettingError),
        "tuning_seeds": optional("tuning_seeds", tuning_seeds, 0, SEEDS_MAX, SettingError),
        "rates": [real("rates", rate, SettingError) for rate in numbers],
    }
    on_event = function("on_event", on_event, "a function of an event")
    return _meristem.growth_bench(path_of("folder", folder), request, settings, on_event)
