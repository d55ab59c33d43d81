"""Growth as a Gymnasium vector environment. Requires ``gymnasium``."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from ._arguments import integer, path, refused, sequence
from .control import Env
from .errors import ControllerError, SettingError, StateError
from .fleet import Fleet

#: Maximum number of rounds of a run, and of episodes with one seed.
ROUNDS = 1_000_000
#: Heads of an action, in order.
HEADS = (
    "op",
    "slot",
    "blueprint",
    "style",
    "tempo",
    "alpha_target",
    "alpha_speed",
    "alpha_curve",
)
#: Numbers of two ops.
WAIT, GERMINATE = 0, 1
SEED_MAX = 2**64 - 1


class GrowthVectorEnv(VectorEnv[Any, Any, Any]):
    """Hosts that grow by the actions of an agent, trained concurrently.

    One step of an environment is one epoch of training of its host. An episode has ``steps`` steps;
    at its end all environments are truncated. As defined for ``AutoresetMode.NEXT_STEP``, the next
    call begins the next episode and ignores its actions.

    ================== =============================================================================
    observation        float32: the inputs of the built-in policy before normalisation, then the
                       blueprint of each slot, one-hot
    action             a choice for each head: op, slot, blueprint, style, tempo, alpha_target,
                       alpha_speed, alpha_curve. Heads that an op does not use are ignored
    reward             as chosen by the setting ``reward``, by default ``contribution``
                       (``docs/control.md``)
    info["op_mask"]    int8 (envs, 6): the legal ops
    info["slot_mask"]  int8 (envs, 6, S): the slots in which each op is legal
    info["blueprint_mask"] int8 (envs, S, B): the blueprints that may germinate in each slot
    info["illegal"]    bool (envs): the last action was not legal, and was replaced by WAIT
    info["score"]      float64 (envs): control score: accuracy, micro-F1 or R²
    info["accuracy"]   the same
    ================== =============================================================================
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 4, **settings: Any) -> None:
        """Prepares the environments, with the settings of :func:`meristem.train`.

        ``steps`` is the length of an episode. ``run_dir`` is a folder for the runs, one per seed; by
        default the runs are removed at the end. ``twin`` is off, except with ``reward="shaped"``.

        Raises:
            ArgumentError: ``num_envs`` or ``seed`` is not an integer, or out of range.
            SettingError: As :func:`meristem.train`; or ``envs`` or ``controller`` is given.
        """
        super().__init__()
        self._fleet: Fleet | None = None
        num_envs = integer("num_envs", num_envs, 1)
        if "envs" in settings:
            raise refused("envs", settings["envs"], "`num_envs` in its place", SettingError)
        self._folder: TemporaryDirectory[str] | None = None
        folder = settings.pop("run_dir", None)
        if folder is None:
            self._folder = TemporaryDirectory(prefix="meristem-")
            folder = self._folder.name
        self._runs = Path(path("run_dir", folder, SettingError))
        # Only this reward needs twins, which cost as much as their envs.
        twin = settings.get("reward") == "shaped"
        self._settings = {"twin": twin, "rounds": ROUNDS, **settings, "envs": num_envs}
        self._count = 0
        #: The envs at the last observation.
        self._envs: list[Env] = []
        self.num_envs = num_envs
        seed = self._seed(settings.get("seed"))
        if seed is not None:
            super().reset(seed=seed)
        fleet = self._start(seed)
        self.single_action_space = spaces.MultiDiscrete(fleet.head_sizes)
        [length] = fleet.envs[0].observation.shape
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (length,), np.float32)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple["npt.NDArray[np.float32]", dict[str, Any]]:
        """Begins an episode with fresh hosts, in a run with this ``seed``.

        Without ``seed``, the first call uses the run that the constructor started, and every later
        call starts a run whose seed is drawn from ``np_random``. The envs of a run share one seed,
        and differ by their number.

        Raises:
            ArgumentError: ``seed`` is not an integer or is a list of several seeds, or ``options``
                is given.
        """
        if options:
            raise refused("options", options, "none: an episode has the settings of `__init__`")
        seed = self._seed(seed)
        if seed is not None:
            super().reset(seed=seed)
        fleet = self._fleet
        if seed is not None or fleet is None:
            fleet = self._start(seed)
        elif self._begun:
            fleet = self._start(int(self.np_random.integers(2**31)))
        self._begun = True
        return self._observe(fleet.step(), np.zeros(self.num_envs, bool))

    def step(
        self, actions: Any
    ) -> tuple[
        "npt.NDArray[np.float32]",
        "npt.NDArray[np.float64]",
        "npt.NDArray[np.bool_]",
        "npt.NDArray[np.bool_]",
        dict[str, Any],
    ]:
        """Executes the actions, and trains the envs for an epoch.

        Raises:
            ControllerError: An action is outside ``action_space``; nothing was executed.
            StateError: :meth:`reset` was not called.
        """
        fleet, never = self._fleet, np.zeros(self.num_envs, bool)
        if fleet is None or not self._begun:
            raise StateError("`step`: the environment was not reset", remedy="call `reset` first")
        if fleet.point == "end":
            # The call after the last step of an episode resets and ignores the actions.
            observed, info = self._observe(fleet.step(), never)
            return observed, np.zeros(self.num_envs), never, never.copy(), info
        given = self._choices(actions)
        illegal = np.array([not is_legal(a, e) for a, e in zip(given, self._envs, strict=True)])
        chosen = [None if bad else action for action, bad in zip(given, illegal, strict=True)]
        rewards = fleet.apply(chosen).astype(np.float64)
        truncated = np.full(self.num_envs, fleet.point == "end")
        envs = fleet.envs if truncated.all() else fleet.step()
        observed, info = self._observe(envs, illegal)
        return observed, rewards, never, truncated, info

    def close_extras(self, **_: Any) -> None:
        """Ends the run, and removes its folder unless ``run_dir`` was given."""
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _seed(self, seed: object) -> int | None:
        """Returns the seed of a run, which may be given as a list of one seed."""
        if isinstance(seed, list | tuple | np.ndarray):
            seeds = sequence("seed", seed, "a whole number")
            if len(seeds) == self.num_envs and all(given is None for given in seeds):
                return None
            if len(seeds) != 1 or self.num_envs != 1:
                raise refused("seed", seed, "one number: the envs of a run differ by their number")
            [seed] = seeds
        return None if seed is None else integer("seed", seed, 0, SEED_MAX)

    def _choices(self, actions: object) -> list[list[int]]:
        """Checks that actions are integers within the action space."""
        sizes = self.single_action_space.nvec.tolist()
        expected = f"{self.num_envs} actions, each a choice for every head, below {sizes}"
        rows = sequence("actions", actions, expected, ControllerError)
        if len(rows) != self.num_envs:
            raise refused("actions", actions, expected, ControllerError)
        return [_action(f"actions[{env}]", row, sizes) for env, row in enumerate(rows)]

    def _start(self, seed: int | None) -> Fleet:
        """Starts a new run. Returns its fleet before the first step."""
        if self._fleet is not None:
            self._fleet.close()
        settings = self._settings if seed is None else {**self._settings, "seed": seed}
        self._fleet = Fleet(**settings, run_dir=self._runs / f"run-{self._count}")
        self._count += 1
        self._begun = False
        return self._fleet

    def _observe(
        self, envs: list[Env], illegal: "npt.NDArray[np.bool_]"
    ) -> tuple["npt.NDArray[np.float32]", dict[str, Any]]:
        self._envs = envs
        info: dict[str, Any] = {
            name: np.stack([getattr(env, name) for env in envs])
            for name in ("op_mask", "slot_mask", "blueprint_mask")
        }
        info["illegal"] = illegal
        scores = [env.scores[-1] if env.scores else np.nan for env in envs]
        info["score"] = info["accuracy"] = np.array(scores)
        return np.stack([env.observation for env in envs]), info


def _action(name: str, row: object, sizes: list[int]) -> list[int]:
    expected = f"a whole number for each of the heads {', '.join(HEADS)}"
    choices = sequence(name, row, expected, ControllerError)
    if len(choices) != len(sizes):
        raise refused(name, row, expected, ControllerError)
    heads = zip(HEADS, choices, sizes, strict=True)
    return [
        integer(f"{name}.{head}", choice, 0, size - 1, ControllerError)
        for head, choice, size in heads
    ]


def is_legal(action: Sequence[int], env: Env) -> bool:
    """Whether the choices of an action are legal by the masks of its env.

    Raises:
        ControllerError: A choice is outside the action space.
    """
    sizes = (*env.slot_mask.shape, env.blueprint_mask.shape[1])
    op, slot, blueprint = (
        integer(f"action.{head}", choice, 0, size - 1, ControllerError)
        for head, choice, size in zip(HEADS, action, sizes, strict=False)
    )
    if op == WAIT:
        return True
    return bool(env.slot_mask[op, slot]) and (op != GERMINATE or bool(env.blueprint_mask[slot, blueprint]))
