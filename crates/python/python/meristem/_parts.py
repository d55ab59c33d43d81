"""A sweep in parts, which are called fleets: runs that each have some of the members. Their training is
divided into tasks that any process can run.

The state of a fleet between two tasks is its run folder, as the bytes of an archive. A fleet stops where the
scheduler decides; the decision needs the scores of all fleets, and the next task ends the members that
the decision names.
"""

import hashlib
import io
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import _meristem
from .errors import DivergedError, MeristemError, SettingError
from .runs import Run, resume, train

#: Attempts to run a task whose worker is lost.
ATTEMPTS = 4
#: Set by mpirun for its processes, which are ranks of a run there. The processes of an executor are not.
RANKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
#: Settings of the whole sweep. A fleet has other values of them, or none.
OF_THE_SWEEP = ("members", "envs", "env_numbers", "scheduler", "space", "sampler", "name", "export")
#: Reason that the leaderboard has for members that each scheduler ends.
REASONS = {"halving": "rung", "hyperband": "rung", "median": "median", "patience": "patience"}


@dataclass
class Task:
    """Training of one fleet from a state to a step."""

    settings: dict[str, Any]
    #: Archive of the run folder; ``None`` to begin.
    archive: bytes | None
    #: Number of completed steps after which the fleet stops; ``None`` for the last.
    stop_after: int | None
    #: Members that end at the beginning of this task, by their index in the fleet.
    ended: list[int]


@dataclass
class State:
    """State of a fleet, and its results so far."""

    archive: bytes
    #: Number of completed steps; -1 at the end.
    steps: int
    #: Leaderboard of the fleet, a row for each member.
    leaderboard: list[dict[str, Any]]
    #: Control scores after each step, for each env of the fleet.
    scores: list[list[float]]


def run_task(task: Task) -> State:
    """Runs a task in a temporary folder, in any process."""
    given: dict[str, Any] = {}
    if task.stop_after is not None:
        given["stop_after"] = task.stop_after
    with tempfile.TemporaryDirectory() as scratch, _without_ranks():
        folder = Path(scratch) / "run"
        if task.archive is None:
            run = train(run_dir=folder, **task.settings, **given)
        else:
            with zipfile.ZipFile(io.BytesIO(task.archive)) as archive:
                archive.extractall(folder)
            if task.ended:
                given["end_members"] = task.ended
            run = resume(folder, **given)
        steps = -1 if task.stop_after is None else task.stop_after
        return State(_archive(folder), steps, run.leaderboard, _scores(run, task.settings["envs"]))


@contextmanager
def _without_ranks() -> Iterator[None]:
    """Hides the variables of mpirun."""
    hidden = {name: os.environ.pop(name) for name in RANKS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _mean(values: list[float]) -> float:
    """The mean as the engine computes it; `sum` adds more exactly from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def _archive(folder: Path) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.name != ".lock":
                archive.write(file, file.relative_to(folder))
    return packed.getvalue()


def _scores(run: Run, envs: int) -> list[list[float]]:
    steps = run.events.get("step_completed", {})
    key = next((key for key in ("control_accuracy", "control_f1", "control_r2") if key in steps), None)
    scores: list[list[float]] = [[] for _ in range(envs)]
    for env, score in zip(steps.get("env", ()), steps[key] if key else (), strict=True):
        # The engine counts a score that is missing as the lowest.
        scores[int(env)].append(-math.inf if score is None or math.isnan(score) else float(score))
    return scores


def without_members() -> SettingError:
    """The error for a sweep of no members."""
    remedy = "use meristem.train, or another setting"
    return SettingError("a sweep needs `members`, or `space` and `samples`", (), remedy, 2)


def fleets_of(
    settings: dict[str, Any], executor: Executor, fleets: int | None, folder: Path | None
) -> int:
    """Number of fleets of a sweep: as given, as in its folder, or one for each worker."""
    if fleets is None and folder is not None:
        kept = next(iter(sorted(folder.glob("fleet-*.zip"))), None)
        fleets = None if kept is None else _read(kept)["fleets"]
    workers = getattr(executor, "_max_workers", None) or getattr(executor, "num_workers", None) or 8
    return min(fleets or int(workers), len(settings.get("members") or [1]))


@dataclass
class PartialSweep:
    """A sweep whose fleets are run one by one."""

    settings: dict[str, Any]
    fleets: int
    folder: Path | None
    #: State of each fleet.
    states: dict[int, State] = field(default_factory=dict)
    #: Members that a decision has ended.
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.members: list[str] = self.settings.get("members") or []
        scheduler = str(self.settings.get("scheduler", "none")).partition(":")[0]
        self.reason = REASONS.get(scheduler)
        remedy = "use meristem.train, or another setting"
        if not self.members:
            raise without_members()
        if scheduler == "pbt":
            message = "`scheduler`: pbt copies members between fleets, so the sweep must be one run"
            raise SettingError(message, (), remedy, 2)
        if self.settings.get("env_numbers") is not None or self.settings.get("member_changes"):
            message = "`env_numbers` and `member_changes` belong to the fleets of a sweep"
            raise SettingError(message, (), remedy, 2)
        self.envs: int = self.settings["envs"]
        # Same settings and fleets: the states in the folder can be used.
        identity = json.dumps([self.settings, self.fleets, _meristem.VERSION], sort_keys=True)
        self.identity = hashlib.sha256(identity.encode()).hexdigest()
        if self.folder is not None:
            self._load(self.folder)

    def run(self, executor: Executor) -> None:
        """Trains all members to their last steps."""
        for stop in [*self._decisions(), None]:
            self._advance(executor, stop)
            self.ended |= self._diverged()
            if stop is not None:
                scores, ended = self._scores_until(stop), sorted(self.ended)
                self.ended |= set(_meristem.losers(None, self.settings, scores, ended, stop))
        diverged = self._diverged()
        if len(diverged) == len(self.members):
            raise DivergedError(f"all {len(diverged)} members diverged", (), "give smaller learning rates", 1)

    def _diverged(self) -> set[int]:
        """The members that have ended because their training failed."""
        return {
            self._members_of(fleet)[row["number"]]
            for fleet, state in self.states.items()
            for row in state.leaderboard
            if row["ended"] == "diverged"
        }

    def leaderboard(self) -> list[dict[str, Any]]:
        """The leaderboard of all members, a row for each member."""
        rows = []
        for fleet, state in self.states.items():
            members = self._members_of(fleet)
            for row in state.leaderboard:
                number = members[row["number"]]
                envs = list(range(number, self.envs, len(self.members)))
                ended = self._ended(number, row["ended"])
                rows.append({**row, "number": number, "envs": envs, "ended": ended})

        def rank(row: dict[str, Any]) -> tuple[float, int]:
            spread = row["control"] or row["train"]
            failed = spread is None or row["ended"] == "diverged"
            return (math.inf if failed else -spread["mean"], row["number"])

        return sorted(rows, key=rank)

    def over_seeds(self) -> list[dict[str, Any]]:
        """The leaderboard with one row for members that differ only by their seed."""
        envs: list[dict[str, Any]] = []
        summary: dict[str, Any] = {}
        for fleet, state in self.states.items():
            members = self._members_of(fleet)
            with zipfile.ZipFile(io.BytesIO(state.archive)) as archive:
                summary = json.loads(archive.read("summary.json"))
            for env in summary["envs"]:
                number = members[env["member_number"]]
                own = env["env"] // len(members) * len(self.members) + number
                ended = self._ended(number, env.get("ended"))
                envs.append({**env, "env": own, "member_number": number, "ended": ended})
        envs.sort(key=lambda env: int(env["env"]))
        return list(_meristem.over_seeds(json.dumps({**summary, "envs": envs})))

    def _ended(self, number: int, ended: str | None) -> str | None:
        """The reason for the end of a member; ``ended`` is the reason in the leaderboard of its fleet."""
        # A fleet whose members have all ended gets no more tasks, so its own leaderboard does not have the last
        # of these ends.
        return self.reason if ended == "planned" or (ended is None and number in self.ended) else ended

    def weights(self, env: int) -> bytes:
        """The weights file of an env of the whole sweep."""
        member, copy = env % len(self.members), env // len(self.members)
        fleet = member % self.fleets
        members = self._members_of(fleet)
        own = copy * len(members) + members.index(member)
        with zipfile.ZipFile(io.BytesIO(self.states[fleet].archive)) as archive:
            return archive.read(f"weights/env-{own}.safetensors")

    def _members_of(self, fleet: int) -> list[int]:
        """The members of a fleet: all are dealt out in turn."""
        return list(range(fleet, len(self.members), self.fleets))

    def _settings_of(self, fleet: int) -> dict[str, Any]:
        members = self._members_of(fleet)
        settings = {key: value for key, value in self.settings.items() if key not in OF_THE_SWEEP}
        copies = range(self.envs // len(self.members))
        numbers = [copy * len(self.members) + member for copy in copies for member in members]
        own = {"members": [self.members[member] for member in members], "envs": len(numbers)}
        return {**settings, **own, "env_numbers": numbers}

    def _decisions(self) -> list[int]:
        """Numbers of completed steps after which the scheduler may decide something."""
        if self.reason is None:
            return []
        steps = range(1, self.settings["steps"])

        def constant(stop: int) -> list[list[float]]:
            """Different scores that do not improve, which every scheduler acts on."""
            return [[float(member)] * stop for member in range(len(self.members))]

        return [stop for stop in steps if _meristem.losers(None, self.settings, constant(stop), [], stop)]

    def _scores_until(self, stop: int) -> list[list[float]]:
        """Control scores of each member, the means over its envs."""
        scores: list[list[float]] = [[] for _ in self.members]
        for fleet, state in self.states.items():
            members = self._members_of(fleet)
            for index, member in enumerate(members):
                envs = state.scores[index :: len(members)]
                made = min([stop, *(len(env) for env in envs)])
                scores[member] = [_mean([env[step] for env in envs]) for step in range(made)]
        return scores

    def _advance(self, executor: Executor, stop: int | None) -> None:
        """Brings every fleet with members in training to ``stop``."""
        due: list[int] = []
        for fleet in range(self.fleets):
            state = self.states.get(fleet)
            reached = state is not None and (state.steps == -1 or (stop is not None and state.steps >= stop))
            left = set(self._members_of(fleet)) - self.ended
            if not reached and left:
                due.append(fleet)
        tasks: dict[Future[State], tuple[int, int]] = {}
        failed: BaseException | None = None

        def begin(fleet: int, attempt: int) -> None:
            tasks[executor.submit(run_task, self._task(fleet, stop))] = (fleet, attempt)

        try:
            for fleet in due:
                begin(fleet, 1)
        except Exception as error:
            failed = self._broken(error)
        # Results of completed tasks are kept, also after another task has failed.
        while tasks:
            done = next(as_completed(tasks))
            fleet, attempt = tasks.pop(done)
            try:
                self._keep(fleet, done.result())
                continue
            except MeristemError as error:
                failed = failed or error
            except BrokenExecutor as error:
                failed = failed or self._broken(error)
            except (Exception, CancelledError) as error:
                if attempt == ATTEMPTS:
                    failed = failed or self._broken(error)
            if failed is None:
                try:
                    begin(fleet, attempt + 1)
                except Exception as error:
                    failed = self._broken(error)
        if failed is not None:
            raise failed

    def _broken(self, error: BaseException) -> MeristemError:
        kept = "" if self.folder is None else f"; {len(self.states)} fleets are kept in {self.folder}"
        remedy = "call it again with a new executor and the same `folder`, which keeps what is done"
        cause = f"{type(error).__name__}: {error}"
        return MeristemError(f"the executor cannot run the tasks of the sweep{kept}", [cause], remedy, 1)

    def _task(self, fleet: int, stop: int | None) -> Task:
        state = self.states.get(fleet)
        members = self._members_of(fleet)
        ended = [index for index, member in enumerate(members) if member in self.ended]
        return Task(self._settings_of(fleet), state.archive if state else None, stop, ended)

    def _keep(self, fleet: int, state: State) -> None:
        self.states[fleet] = state
        if self.folder is None:
            return
        known = {
            "identity": self.identity,
            "fleets": self.fleets,
            "steps": state.steps,
            "places": state.leaderboard,
            "scores": state.scores,
        }
        file = self.folder / f"fleet-{fleet}.zip"
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as partial:
            with zipfile.ZipFile(partial, "w") as archive:
                archive.writestr("state.json", json.dumps(known))
                archive.writestr("run.zip", state.archive)
            partial.flush()
            os.fsync(partial.fileno())
        os.replace(partial.name, file)

    def _load(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = "give a folder that exists or can be created"
            raise SettingError(f"`folder`: {folder} is not a folder", [str(error)], remedy, 2) from error
        for fleet in range(self.fleets):
            file = folder / f"fleet-{fleet}.zip"
            if not file.exists():
                continue
            known = _read(file)
            if known["identity"] != self.identity:
                remedy = "give another folder, or the settings and fleets that it was begun with"
                raise SettingError(f"`folder`: {folder} has another sweep", (), remedy, 2)
            self.states[fleet] = State(known["run"], known["steps"], known["places"], known["scores"])


def _read(file: Path) -> dict[str, Any]:
    """The contents of a file that :meth:`PartialSweep._keep` wrote."""
    try:
        with zipfile.ZipFile(file) as archive:
            known = json.loads(archive.read("state.json"))
            known["run"] = archive.read("run.zip")
        types = {"identity": str, "fleets": int, "steps": int, "places": list, "scores": list}
        for key, kind in types.items():
            if not isinstance(known[key], kind):
                raise ValueError(f"`{key}` is {known[key]!r}")
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        remedy = f"remove {file}; the fleet is then trained again"
        raise SettingError(f"`folder`: {file} is damaged", [str(error)], remedy, 2) from error
    return dict(known)
