"""Trains CartPole by PPO (Schulman et al. 2017) with 16 agents that grow, in one fleet.

    python crates/python/examples/cartpole.py

Each agent is a small network with three outputs: logits of the two actions, and the value. It plays
eight games at once, and grows modules while it learns. The program needs numpy only.
"""

import argparse
import time
from typing import Any

import numpy as np

import meristem

AGENTS, GAMES, STEPS, LAST = 16, 8, 128, 500
PASSES, PARTS, GROWTH_EVERY = 10, 4, 4
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
#: The third output is the value divided by this, so that it has the size of the logits.
SCALE = 50.0
Array = Any


class CartPole:
    """Many games of a pole on a cart, with the physics of Barto, Sutton and Anderson (1983)."""

    def __init__(self, shape: tuple[int, ...], rng: np.random.Generator) -> None:
        self.rng, self.states, self.ages = rng, np.zeros((*shape, 4)), np.zeros(shape, int)
        self.start(np.ones(shape, bool))

    def start(self, over: Array) -> None:
        """Starts games anew."""
        self.states[over] = self.rng.uniform(-0.05, 0.05, (over.sum(), 4))
        self.ages[over] = 0

    def step(self, actions: Array) -> tuple[Array, Array, Array]:
        """Pushes each cart to the right (1) or left (0) for 0.02 s. Every step has a reward of 1.

        Returns which games fell, which ended after 500 steps, and the states before new games.
        """
        x, v, angle, turn = np.moveaxis(self.states, -1, 0)
        cos, sin, force = np.cos(angle), np.sin(angle), np.where(actions == 1, 10.0, -10.0)
        push = (force + 0.05 * turn**2 * sin) / 1.1
        bend = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        speeds = np.stack([v, push - 0.05 * bend * cos / 1.1, turn, bend], -1)
        self.states = self.states + 0.02 * speeds
        self.ages += 1
        after = self.states.copy()
        fell = (np.abs(after[..., 0]) > 2.4) | (np.abs(after[..., 2]) > np.pi / 15)
        late = (self.ages >= LAST) & ~fell
        self.start(fell | late)
        return fell, late, after


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def gradient_of_ppo(outputs: Array, actions: Array, before: Array, gains: Array, returns: Array) -> Array:
    """The gradient of PPO's loss with respect to the outputs [agents, batch, 3]; each agent's loss is a mean."""
    logs = log_softmax(outputs[..., :2])
    chosen = np.eye(2)[actions]
    ratio = np.exp((logs * chosen).sum(-1) - before)
    active = np.where(gains > 0, ratio < 1 + CLIP, ratio > 1 - CLIP)
    policy = -(active * ratio * gains)[..., None] * (chosen - np.exp(logs))
    value = 0.5 * (outputs[..., 2] - returns / SCALE)[..., None]
    return np.concatenate([policy, value], -1) / outputs.shape[1]


def collect(learners: meristem.Learners, carts: CartPole, rng: np.random.Generator) -> list[Array]:
    """Plays 128 steps of all games: states, actions, log-probabilities, gains, returns; by agent."""
    played = []
    for _ in range(STEPS):
        states = carts.states.copy()
        outputs = learners.eval(states)
        logs = log_softmax(outputs[..., :2])
        actions = (rng.random(logs.shape[:-1]) < np.exp(logs[..., 1])).astype(int)
        fell, late, after = carts.step(actions)
        # A game that ended after 500 steps would have gone on: its last state has a value.
        rest = SCALE * learners.eval(after)[..., 2] if late.any() else np.zeros(fell.shape)
        played.append((states, actions, np.take_along_axis(logs, actions[..., None], -1)[..., 0],
                       SCALE * outputs[..., 2], fell, late, rest))
    states, actions, before, values, fell, late, rest = map(np.array, zip(*played))
    following = np.concatenate([values[1:], SCALE * learners.eval(carts.states)[None, ..., 2]])
    following = np.where(late, rest, following)
    change = 1 + GAMMA * following * ~fell - values
    gains = np.zeros_like(values)
    for t in reversed(range(STEPS)):
        later = gains[t + 1] if t + 1 < STEPS else 0
        gains[t] = change[t] + GAMMA * LAMBDA * later * ~(fell | late)[t]
    by_agent = lambda x: np.moveaxis(x, 1, 0).reshape(x.shape[1], -1, *x.shape[3:])  # noqa: E731
    return [by_agent(x) for x in (states, actions, before, gains, values + gains)]


def play(learners: meristem.Learners, games: int = 10, without: str | None = None) -> Array:
    """The mean return of each agent in games without chance, as a share of 500."""
    carts = CartPole((len(learners), games), np.random.default_rng(0))
    returns, alive = np.zeros(carts.ages.shape), np.ones(carts.ages.shape, bool)
    for _ in range(LAST):
        returns += alive
        fell, _, _ = carts.step(learners.eval(carts.states, without=without)[..., :2].argmax(-1))
        alive &= ~fell
        if not alive.any():
            break
    return returns.mean(1) / LAST


def grow(env: meristem.control.Env) -> Any:
    """Germinates a module, and takes it through its stages as its gates pass."""
    for slot in env.slots:
        if slot.gate_passes and slot.stage == "holding":
            return {"op": "FOSSILIZE", "slot": slot.slot}
        if slot.gate_passes and "ADVANCE" in slot.ops:
            return {"op": "ADVANCE", "slot": slot.slot}
        if "GERMINATE" in slot.ops and all(s.stage == "dormant" for s in env.slots):
            return {"op": "GERMINATE", "slot": slot.slot, "blueprint": slot.blueprints[0], "tempo": "fast"}
    return None


def train(iterations: int, seed: int = 0, **settings: Any) -> meristem.Learners:
    """Trains the agents, and prints their mean returns."""
    learners = meristem.Learners(
        input=4, outputs=3, envs=AGENTS, batch=GAMES * STEPS, seed=seed, host="mlp:32,32",
        blueprints="vectors", lr=0.03, lr_schedule="cosine", steps=iterations // GROWTH_EVERY, clip_norm=2,
        min_training_steps=2, min_contribution=-5, **settings,
    )
    rng = np.random.default_rng(seed)
    carts = CartPole((AGENTS, GAMES), rng)
    for iteration in range(1, iterations + 1):
        data = collect(learners, carts, rng)
        data[3] = (data[3] - data[3].mean(1, keepdims=True)) / (data[3].std(1, keepdims=True) + 1e-8)
        for _ in range(PASSES):
            for part in np.split(rng.permutation(GAMES * STEPS), PARTS):
                states, *others = (x[:, part] for x in data)
                learners.backward(gradient_of_ppo(learners.forward(states), *others))
                learners.update()
        if iteration % GROWTH_EVERY == 0:
            scores = play(learners)
            holding = {slot.slot for env in learners.envs for slot in env.slots if slot.stage == "holding"}
            removed = {slot: play(learners, without=slot) for slot in holding}
            without = [{slot.slot: removed[slot.slot][env.env] for slot in env.slots if slot.stage == "holding"}
                       for env in learners.envs]
            learners.apply([grow(env) for env in learners.step(scores, without)])
            print(f"{iteration:4}  mean return {LAST * scores.mean():5.1f}, solved {(scores >= 0.95).sum():2}")
    return learners


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.perf_counter()
    agents = train(given.iterations, given.seed)
    spent = time.perf_counter() - began
    returns = LAST * play(agents, games=100)
    print("returns of 100 games:", np.round(returns).astype(int).tolist())
    print("modules:", [[slot.stage for slot in env.slots if slot.blueprint] for env in agents.envs][:4], "…")
    print("parameters:", agents.parameters)
    print(f"{(returns >= 475).sum()} of {AGENTS} agents solve CartPole, after {spent:.0f} s")
