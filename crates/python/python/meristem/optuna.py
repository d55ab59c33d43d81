"""Optuna's samplers and pruners for the members of a fleet."""

import uuid
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FixedTrial, FrozenTrial, Trial, TrialState

from ._arguments import function, integer, refused
from ._arguments import path as path_of
from .errors import SettingError
from .runs import Run, Searcher
from .runs import resume as resume_run
from .sweeps import sweep

# Attributes of a trial: the run and the number of the member that it is about.
_RUN, _MEMBER = "meristem_run", "meristem_member"


class Search(Searcher):
    """A searcher whose members are the trials of a study, in the order in which they begin.

    ``suggest`` maps a trial to the settings of its member, such as
    ``lambda trial: {"lr": trial.suggest_float("lr", 1e-3, 1, log=True)}``. ``run`` is the name of the run
    and is stored with each trial. To resume a run, pass the name of the run or of the run's folder, which by
    default ends with ``-`` and the name of the run. If the study already has trials of this run, their
    members get the same settings again.
    """

    def __init__(self, study: optuna.Study, suggest: Callable[[Any], Mapping[str, Any]], run: str) -> None:
        self._study, self._suggest, self._run = study, suggest, run
        known = [trial for trial in study.get_trials(deepcopy=False) if _is_of(trial, run)]
        self._trials: dict[int, Trial | FrozenTrial] = {
            trial.user_attrs[_MEMBER]: trial if trial.state.is_finished() else Trial(study, trial._trial_id)
            for trial in known
        }
        self._scores: dict[int, float] = {}

    def suggest(self, member: int) -> Mapping[str, Any]:
        known = self._trials.get(member)
        if isinstance(known, FrozenTrial):
            return self._suggest(FixedTrial(known.params))
        if known is not None:
            return self._suggest(known)
        trial = self._trials[member] = self._study.ask()
        trial.set_user_attr(_RUN, self._run)
        trial.set_user_attr(_MEMBER, member)
        return self._suggest(trial)

    def report(self, member: int, steps: int, score: float | None) -> bool:
        trial = self._trials[member]
        if score is None:
            self._scores.pop(member, None)
            return True
        self._scores[member] = score
        if isinstance(trial, FrozenTrial):
            # The trial ended after the checkpoint from which the run was resumed, and ends at the same step
            # again.
            return trial.state != TrialState.PRUNED or steps < len(trial.intermediate_values)
        trial.report(score, steps)
        return not trial.should_prune()

    def complete(self, member: int, ended: str | None) -> None:
        trial = self._trials[member]
        if isinstance(trial, FrozenTrial):
            return
        score = self._scores.get(member)
        if score is None or ended == "diverged":
            self._study.tell(trial, state=TrialState.FAIL)
        elif ended is None:
            self._study.tell(trial, score)
        else:
            self._study.tell(trial, state=TrialState.PRUNED)


def _is_of(trial: FrozenTrial, run: str) -> bool:
    """Whether a trial is of the run with this name, or of the one whose default folder has this name."""
    known = trial.user_attrs.get(_RUN)
    return known is not None and (run == known or run.endswith(f"-{known}"))


def optimize(
    study: optuna.Study,
    suggest: Callable[[Any], Mapping[str, Any]],
    *,
    n_trials: int | None = None,
    n_jobs: int = 8,
    resume: "str | PathLike[str] | Run | None" = None,
    on_event: Callable[[dict[str, Any]], object] | None = None,
    **settings: Any,
) -> Run:
    """Trains ``n_trials`` trials of a study as members of one fleet, and blocks until all are done.

    ``n_jobs`` trials are in training at a time. ``suggest`` maps a trial to the settings of its member. The
    value of a trial is its last control score, so the study must maximise. After each step a trial reports
    its score. When the pruner ends a trial, the next one begins in its place. A trial whose training fails
    has the state ``FAIL``. Other settings are those of :func:`sweep`.

    With ``resume``, a run that was stopped or killed goes on. Its trials are read from the study, so the
    study needs a storage. The members of these trials have the same bits; trials that begin later depend on
    the state of the study's sampler, which Optuna does not store.

    Raises:
        SettingError: The study does not maximise one value, or a setting is unusable.
        MeristemError: As on the command line.
    """
    if [direction.name for direction in study.directions] != ["MAXIMIZE"]:
        given = ", ".join(direction.name.lower() for direction in study.directions)
        remedy = 'create it with optuna.create_study(direction="maximize")'
        raise refused("study", given, "one that maximises, because trials have scores", SettingError, remedy)
    suggest = function("suggest", suggest, "a function of a trial")
    if resume is not None:
        folder = Path(path_of("resume", resume.path if isinstance(resume, Run) else resume))
        return resume_run(folder, search=Search(study, suggest, folder.name), on_event=on_event, **settings)
    trials, places = integer("n_trials", n_trials, 1, 4096), integer("n_jobs", n_jobs, 1, 4096)
    if settings.get("run_dir") is None:
        name = str(settings.setdefault("name", f"optuna-{uuid.uuid4().hex[:8]}"))
    else:
        name = Path(path_of("run_dir", settings["run_dir"])).name
    search = Search(study, suggest, name)
    return sweep(
        search=search, sampler="external", samples=trials, places=min(places, trials), on_event=on_event, **settings
    )
