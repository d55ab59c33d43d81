"""Optuna chooses learning rate and momentum of 32 trials, which are members of one fleet.

    python optuna_pruning.py --trials 32 --places 8 --steps 8

A trial that is pruned after a step gives its place in the fleet to the next one.
"""

import argparse
from collections.abc import Mapping

import meristem.optuna
import optuna

parser = argparse.ArgumentParser()
parser.add_argument("--trials", type=int, default=32)
parser.add_argument("--places", type=int, default=8)
parser.add_argument("--steps", type=int, default=8)
arguments = parser.parse_args()


def settings(trial: optuna.Trial) -> Mapping[str, float]:
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1, log=True),
        "momentum": trial.suggest_float("momentum", 0, 0.95),
    }


study = optuna.create_study(
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=0),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
)
run = meristem.optuna.optimize(
    study, settings, n_trials=arguments.trials, n_jobs=arguments.places,
    dataset="mnist1d", host="conv1d:8,16", steps=arguments.steps, batch=64,
)
states = [trial.state.name for trial in study.trials]
print(f"{states.count('COMPLETE')} trials complete, {states.count('PRUNED')} pruned")
print(f"best: {study.best_value:.3f} with {study.best_params}, the first of {len(run.leaderboard)} members")
