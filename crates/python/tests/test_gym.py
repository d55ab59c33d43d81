"""Growth as a Gymnasium vector environment."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from meristem import errors
from meristem.gym import GrowthVectorEnv, is_legal

SETTINGS = {
    "preset": "quick",
    "host": "minimal",
    "batch": 32,
    "max_batches": 2,
    "control_split": 0.01,
    "steps": 3,
    "threads": 1,
}


@pytest.fixture
def env():
    env = GrowthVectorEnv(2, **SETTINGS, seed=1)
    yield env
    env.close()


class Single(gymnasium.Env):
    """One environment of the vector, for Gymnasium's checker of single environments."""

    metadata = {"render_modes": []}

    def __init__(self):
        self.vector = GrowthVectorEnv(1, **SETTINGS)
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        observed, info = self.vector.reset(seed=seed, options=options)
        return observed[0], {name: value[0] for name, value in info.items()}

    def step(self, action):
        observed, reward, terminated, truncated, info = self.vector.step([action])
        info = {name: value[0] for name, value in info.items()}
        return observed[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def close(self):
        self.vector.close()


def test_gymnasium_s_checker_passes():
    env = Single()
    check_env(env, skip_render_check=True)
    env.close()


def test_shapes_types_and_masks(env):
    observed, info = env.reset(seed=3)
    assert env.observation_space.contains(observed) and observed.dtype == np.float32
    assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    slots = env.single_action_space.nvec[1]
    assert info["op_mask"].shape == (2, 6) and info["slot_mask"].shape == (2, 6, slots)
    assert info["blueprint_mask"].shape == (2, slots, 7)
    assert info["op_mask"].tolist() == [[1, 1, 0, 0, 0, 0]] * 2
    stepped = env.step(env.action_space.sample())
    assert env.observation_space.contains(stepped[0])
    assert [part.shape for part in stepped[1:4]] == [(2,)] * 3
    assert stepped[1].dtype == np.float64 and stepped[2].dtype == stepped[3].dtype == np.bool_


def test_an_episode_is_truncated_and_the_next_call_resets(env):
    first, _ = env.reset(seed=3)
    wait = np.zeros((2, 8), int)
    flags = [env.step(wait)[3].tolist() for _ in range(3)]
    assert flags == [[False] * 2, [False] * 2, [True] * 2]
    observed, rewards, terminated, truncated, _ = env.step(wait)
    assert not truncated.any() and not terminated.any() and not rewards.any()
    assert observed.shape == first.shape and (observed[:, 0] == 0).all()
    assert not env.step(wait)[3].any()


def test_a_seed_repeats_an_episode(env):
    def episode(seed):
        space = env.action_space
        space.seed(5)
        observed = [env.reset(seed=seed)[0]]
        for _ in range(3):
            observed.append(env.step(space.sample())[0])
        return np.stack(observed)

    assert (episode(7) == episode(7)).all() and (episode(7) != episode(8)).any()


def test_a_reset_without_a_seed_is_another_episode(env):
    seven, other = [env.reset(seed=7)[0], env.reset()[0]]
    assert (seven != other).any()
    again = [env.reset(seed=7)[0], env.reset()[0]]
    assert (seven == again[0]).all() and (other == again[1]).all()


def test_illegal_actions_are_replaced_by_wait_and_reported(env):
    env.reset(seed=1)
    illegal = np.array([[5, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]])
    info = env.step(illegal)[4]
    assert info["illegal"].tolist() == [True, False]
    assert info["op_mask"].tolist() == [[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1]]


def test_masks_agree_with_the_rules(env):
    env.reset(seed=1)
    for _ in range(3):
        for index, seen in enumerate(env._fleet.envs):
            for op in range(6):
                for slot in range(len(seen.slots)):
                    action = [op, slot, 0, 0, 0, 0, 0, 0]
                    try:
                        other = [None, None]
                        other[index] = action
                        legal = is_legal(action, seen)
                        if not legal:
                            with pytest.raises(errors.ControllerError):
                                env._fleet.apply(other)
                    finally:
                        pass
        env.step(np.array([[1, 0, 0, 0, 0, 0, 0, 0]] * 2))


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ([[0.9] * 8] * 2, "`actions[0].op`: got 0.9, expected a whole number, 0 to 5"),
        ([[1.9, 1, 1, 0, 0, 0, 0, 0]] * 2, "`actions[0].op`: got 1.9"),
        (np.zeros((2, 8)), "`actions[0].op`: got "),
        ([[0] * 8, [-1] + [0] * 7], "`actions[1].op`: got -1, expected 0 to 5"),
        ([[0] * 8, [0, 0, 99] + [0] * 5], "`actions[1].blueprint`: got 99, expected 0 to 6"),
        ([[0] * 7 + [5]] * 2, "`actions[0].alpha_curve`: got 5, expected 0 to 4"),
        ([[True] * 8] * 2, "`actions[0].op`: got True"),
        ([[0] * 7] * 2, "`actions[0]`: got"),
        ([[0] * 8], "expected 2 actions"),
        (np.zeros((8,), int), "expected 2 actions"),
        (0, "`actions`: got 0, expected 2 actions"),
        (None, "`actions`: got None"),
    ],
)
def test_actions_outside_of_the_space_are_refused_and_change_nothing(env, actions, text):
    env.reset(seed=1)
    with pytest.raises(errors.ControllerError) as caught:
        env.step(actions)
    assert text in str(caught.value)
    assert env._fleet.point == "decision"
    env.step(env.action_space.sample())


def test_a_list_of_seeds_is_honoured_or_refused(env):
    for seeds in ([7, 9], [7, 8], [7, None], [7], [], [None] * 3):
        with pytest.raises(errors.ArgumentError, match="`seed`: got .*, expected one number"):
            env.reset(seed=seeds)
    env.reset(seed=[None, None])
    for seed in (-1, 1.5, True, "7", 2**64):
        with pytest.raises(errors.ArgumentError, match="`seed`: got"):
            env.reset(seed=seed)
    with pytest.raises(errors.ArgumentError, match="`options`: got"):
        env.reset(options={"reset_mask": np.ones(2, bool)})
    single = GrowthVectorEnv(1, **SETTINGS)
    assert (single.reset(seed=[7])[0] == single.reset(seed=np.int64(7))[0]).all()
    single.close()


def test_wrong_settings_are_refused(tmp_path):
    for settings, text in [
        ({"num_envs": 2.5}, "`num_envs`: got 2.5"),
        ({"num_envs": True}, "`num_envs`: got True"),
        ({"envs": 3}, "`envs`: got 3, expected `num_envs` in its place"),
        ({"controller": "heuristic"}, "`controller`: got 'heuristic'"),
        ({"run_dir": 3}, "`run_dir`: got 3, expected a path"),
    ]:
        with pytest.raises(errors.MeristemError) as caught:
            GrowthVectorEnv(**{**SETTINGS, **settings})
        assert text in str(caught.value)


def test_a_step_before_a_reset_is_refused(env):
    with pytest.raises(errors.StateError, match="call `reset` first"):
        env.step(np.zeros((2, 8), int))
