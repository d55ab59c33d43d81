"""Ray Tune chooses learning rate and momentum; each trial is a fleet of networks with other seeds.

    python ray_tune.py --trials 8 --steps 9 --seeds 4

A trial reports the mean score of its networks after each step, and Tune's scheduler ends the worst.
"""

import argparse
from typing import Any

import meristem
from ray import tune
from ray.tune.schedulers import ASHAScheduler

parser = argparse.ArgumentParser()
parser.add_argument("--trials", type=int, default=8)
parser.add_argument("--steps", type=int, default=9)
parser.add_argument("--seeds", type=int, default=4)
arguments = parser.parse_args()


def trial(settings: dict[str, Any]) -> None:
    scores: list[float] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "step_completed":
            scores.append(event["control_accuracy"])
            if len(scores) == arguments.seeds:
                tune.report({"accuracy": sum(scores) / len(scores)})
                scores.clear()

    # A trial has a processor and a working directory of its own, to which the run is written.
    meristem.train(
        dataset="mnist1d", host="conv1d:8,16", controller="none", control_split=0.2, batch=64, threads=1,
        envs=arguments.seeds, steps=arguments.steps, on_event=on_event, **settings,
    )


tuner = tune.Tuner(
    trial,
    param_space={"lr": tune.loguniform(1e-3, 1), "momentum": tune.uniform(0, 0.95)},
    tune_config=tune.TuneConfig(
        metric="accuracy", mode="max", num_samples=arguments.trials,
        scheduler=ASHAScheduler(max_t=arguments.steps, grace_period=1, reduction_factor=3),
    ),
)
results = tuner.fit()
steps = [result.metrics["training_iteration"] for result in results if result.metrics]
best = results.get_best_result()
print(f"{len(steps)} trials, {sum(made < arguments.steps for made in steps)} ended early, {results.num_errors} failed")
print(f"best: {best.metrics['accuracy']:.3f} with {best.config}")
