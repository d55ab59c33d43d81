"""Optuna chooses learning rate and momentum: each trial is a run, which Optuna may end after any step.

    python optuna_pruning.py --trials 32 --steps 8

Several trials run side by side, in threads with one worker each. A trial that is pruned ends at the next step
boundary, and the next trial begins.
"""

import argparse
import tempfile

import meristem
import optuna

parser = argparse.ArgumentParser()
parser.add_argument("--trials", type=int, default=32)
parser.add_argument("--steps", type=int, default=8)
arguments = parser.parse_args()


def objective(trial: optuna.Trial) -> float:
    def report(event: dict) -> None:
        if event["event"] == "step_completed":
            trial.report(event["control_accuracy"], event["step"])
            if trial.should_prune():
                raise optuna.TrialPruned

    with tempfile.TemporaryDirectory() as folder:
        run = meristem.train(
            dataset="mnist1d", host="conv1d:8,16", controller="none", control_split=0.2, envs=1, threads=1,
            steps=arguments.steps, batch=64, run_dir=f"{folder}/run", on_event=report,
            lr=trial.suggest_float("lr", 1e-3, 1, log=True),
            momentum=trial.suggest_float("momentum", 0, 0.95),
        )
        return run.summary["envs"][0]["control_accuracy"]


study = optuna.create_study(
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=0),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
)
study.optimize(objective, n_trials=arguments.trials, n_jobs=2)
states = [trial.state.name for trial in study.trials]
print(f"{states.count('COMPLETE')} trials complete, {states.count('PRUNED')} pruned")
print(f"best: {study.best_value:.3f} with {study.best_params}")
