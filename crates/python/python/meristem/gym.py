"""Growing as a Gymnasium vector environment. Needs ``gymnasium``."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from .control import Env
from .errors import StateError
from .fleet import Fleet

#: Limit of rounds in a run, which is also that of episodes between two seeds.
ROUNDS = 1_000_000


class GrowthVectorEnv(VectorEnv[Any, Any, Any]):
    """Hosts that grow by an agent's actions, side by side.

    One step of an environment is one epoch of training of its host; an episode has ``steps`` of
    them, and ends by truncation, for all environments at once. As Gymnasium defines it for
    ``AutoresetMode.NEXT_STEP``, the call after that begins the next episode and ignores its
    actions.

    ================== =============================================================================
    observation        float32: the numbers that the engine's own policy gets, before normalisation,
                       then the blueprint of each slot, one-hot
    action             a choice for each head: op, slot, blueprint, style, tempo, alpha_target,
                       alpha_speed, alpha_curve. Heads that an op does not use are ignored
    reward             the setting ``reward``, by default contributions; ``docs/control.md``
    info["op_mask"]    int8 (envs, 6): the legal ops
    info["slot_mask"]  int8 (envs, 6, S): the slots in which each op is legal
    info["blueprint_mask"] int8 (envs, S, B): the blueprints that may germinate in each slot
    info["illegal"]    bool (envs): the last action was not legal, and was replaced by WAIT
    info["accuracy"]   float64 (envs): control accuracy
    ================== =============================================================================
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int = 4, **settings: Any) -> None:
        """Prepares the environments, with the settings of :func:`meristem.train`.

        ``steps`` is the length of an episode, ``run_dir`` a folder that gets a run for each seed; by
        default they are removed at the end. ``twin`` is off but for ``reward="shaped"``.
        """
        super().__init__()
        self._folder = None
        if "run_dir" not in settings:
            self._folder = TemporaryDirectory(prefix="meristem-")
        self._runs = Path(settings.pop("run_dir", None) or self._folder.name)
        # Only this reward compares with a twin, which costs as much as its env.
        twin = settings.get("reward") == "shaped"
        self._settings = {"twin": twin, "rounds": ROUNDS, **settings, "envs": num_envs}
        self._count = 0
        #: The envs as they were observed last.
        self._envs: list[Env] = []
        self._fleet: Fleet | None = None
        self.num_envs = num_envs
        if settings.get("seed") is not None:
            super().reset(seed=settings["seed"])
        fleet = self._start(settings.get("seed"))
        self.single_action_space = spaces.MultiDiscrete(fleet.head_sizes)
        [length] = fleet.envs[0].observation.shape
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (length,), np.float32)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple["npt.NDArray[np.float32]", dict[str, Any]]:
        """Begins an episode with fresh hosts, in a run with this ``seed``.

        Without one, the seed is drawn from ``np_random``. The envs of a run differ by their number,
        so of a list of seeds the first counts.
        """
        [first, *_] = seed if isinstance(seed, list) else [seed]
        if first is not None:
            super().reset(seed=first)
        fleet = self._fleet
        if first is not None or fleet is None:
            fleet = self._start(first)
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
        """Executes the actions, and trains the envs for an epoch."""
        fleet, never = self._fleet, np.zeros(self.num_envs, bool)
        if fleet is None or not self._begun:
            raise StateError("`step`: the environment was not reset", remedy="call `reset` first")
        if fleet.point == "end":
            # The call after the last step of an episode resets, whatever the actions are.
            observed, info = self._observe(fleet.step(), never)
            return observed, np.zeros(self.num_envs), never, never.copy(), info
        given = np.asarray(actions)
        illegal = np.array([not is_legal(a, e) for a, e in zip(given, self._envs, strict=True)])
        chosen = [None if bad else action for action, bad in zip(given, illegal, strict=True)]
        rewards = fleet.apply(chosen).astype(np.float64)
        truncated = np.full(self.num_envs, fleet.point == "end")
        envs = fleet.envs if truncated.all() else fleet.step()
        observed, info = self._observe(envs, illegal)
        return observed, rewards, never, truncated, info

    def close_extras(self, **_: Any) -> None:
        """Ends the run, and removes its folder unless it was given."""
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, seed: int | None) -> Fleet:
        """A fleet before its first step, in a run of its own."""
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
        info["accuracy"] = np.array(
            [env.accuracies[-1] if env.accuracies else np.nan for env in envs]
        )
        return np.stack([env.observation for env in envs]), info


def is_legal(action: Any, env: Env) -> bool:
    """Whether the choices of an action are legal by the masks of its env."""
    op, slot, blueprint = (int(choice) for choice in action[:3])
    if op == 0:
        return True
    return bool(env.slot_mask[op, slot]) and (op != 1 or bool(env.blueprint_mask[slot, blueprint]))
