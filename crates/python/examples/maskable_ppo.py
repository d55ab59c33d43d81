"""Trains MaskablePPO of sb3-contrib, a public implementation of PPO, to grow hosts.

    pip install '.[gym]' sb3-contrib            # with PyTorch, which is large
    python crates/python/examples/maskable_ppo.py --episodes 20

Stable-Baselines3 has a different interface for vector environments than Gymnasium. `Growth` adapts
`meristem.gym.GrowthVectorEnv` to it, with the masks of legal choices.
"""

import argparse
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from meristem.gym import GrowthVectorEnv


class Growth(VecEnv):
    """Vector environment of Stable-Baselines3 with hosts that grow."""

    def __init__(self, num_envs: int, **settings: Any) -> None:
        self.envs = GrowthVectorEnv(num_envs, **settings)
        self.render_mode = None
        super().__init__(
            num_envs, self.envs.single_observation_space, self.envs.single_action_space
        )
        self.accuracies = np.full(num_envs, np.nan)

    def action_masks(self) -> "npt.NDArray[np.bool_]":
        """Legal choices of all heads, concatenated, for each env.

        The heads are masked independently: a slot is free if any op is legal in it. An illegal
        combination of choices is replaced by WAIT.
        """
        op, slot = self.info["op_mask"], self.info["slot_mask"][:, 1:].any(axis=1)
        blueprint = self.info["blueprint_mask"].any(axis=1)
        # A head needs a choice even if only WAIT is legal, which uses no other head.
        for mask in (slot, blueprint):
            mask[~mask.any(axis=1)] = True
        others = sum(self.envs.single_action_space.nvec[3:])
        free = np.ones((self.num_envs, others), bool)
        return np.concatenate([op.astype(bool), slot, blueprint, free], axis=1)

    def reset(self) -> Any:
        observation, self.info = self.envs.reset(seed=self._seeds[0])
        self._reset_seeds()
        return observation

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        observation, rewards, _, truncated, self.info = self.envs.step(self.actions)
        self.accuracies = self.info["accuracy"]
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if truncated.all():
            # All envs end at once. Stable-Baselines3 expects the first observation of the next
            # episode, and the last observation of this one in `infos`.
            for info, last in zip(infos, observation, strict=True):
                info |= {"terminal_observation": last, "TimeLimit.truncated": True}
            observation, _, _, _, self.info = self.envs.step(self.actions)
        return observation, rewards.astype(np.float32), truncated, infos

    def env_method(self, method_name: str, *_: Any, **__: Any) -> list[Any]:
        if method_name != "action_masks":
            raise NotImplementedError(method_name)
        return list(self.action_masks())

    def has_attr(self, attr_name: str) -> bool:
        return attr_name == "action_masks"

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError(attr_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def close(self) -> None:
        self.envs.close()


class Report(BaseCallback):
    """Prints the return and the accuracy of every episode."""

    def __init__(self, envs: Growth) -> None:
        super().__init__()
        self.envs, self.returns, self.episodes = envs, np.zeros(envs.num_envs), 0
        self.start = time.monotonic()

    def _on_step(self) -> bool:
        self.returns += self.locals["rewards"]
        if self.locals["dones"].all():
            self.episodes += 1
            print(
                f"episode {self.episodes}: mean return {self.returns.mean():.2f}, "
                f"mean accuracy {self.envs.accuracies.mean():.3f}, "
                f"{time.monotonic() - self.start:.1f} s",
                flush=True,
            )
            self.returns[:] = 0
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="epochs in an episode")
    parser.add_argument("--max-batches", type=int, default=10, help="batches in an epoch")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    envs = Growth(
        given.envs, preset="quick", steps=given.steps, max_batches=given.max_batches
    )
    agent = MaskablePPO(
        "MlpPolicy",
        envs,
        # One update per episode, from all of its steps.
        n_steps=given.steps,
        batch_size=given.envs * given.steps,
        seed=given.seed,
        device="cpu",
    )
    agent.learn(given.episodes * given.steps * given.envs, callback=Report(envs))
    envs.close()


if __name__ == "__main__":
    main()
