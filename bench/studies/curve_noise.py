"""Noise of control curves from step to step, from the runs of a study.

    python3 bench/studies/curve_noise.py study bench/studies/statistics.toml

The noise of a curve is the root of its mean squared second difference over √6 (the second difference
of independent values has six times their variance), over the last two thirds of the steps. The table
has the root mean square over the seeds that are complete in every arm.
"""

from __future__ import annotations

import argparse
import statistics
import tomllib
from pathlib import Path

from signal_to_noise import Curve, steps_of
from study import folder_name


def noise(curve: Curve) -> float:
    late = curve[len(curve) // 3 :]
    seconds = [a - 2 * b + c for a, b, c in zip(late, late[1:], late[2:])]
    return (statistics.fmean(x * x for x in seconds) / 6) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="folder of a study")
    parser.add_argument("study", type=Path, help="its TOML file")
    args = parser.parse_args()
    study = tomllib.loads(args.study.read_text())
    arms = [arm["name"] for arm in study["arm"]]
    print("| setting | arm | seeds | noise of accuracy, points | noise of loss | last loss, mean of 5 steps |")
    print("|---|---|---:|---:|---:|---:|")
    for setting in (setting["name"] for setting in study["setting"]):
        folder = lambda arm, seed: args.out / folder_name(setting, arm, seed)
        complete = lambda seed: all((folder(arm, seed) / "summary.json").exists() for arm in arms)
        seeds = [seed for seed in study["seeds"] if complete(seed)]
        for arm in arms:
            runs = [steps_of(folder(arm, seed)) for seed in seeds]
            curves = {key: [[step[key] for step in run] for run in runs] for key in ("control_accuracy", "control_loss")}
            rms = {key: statistics.fmean(noise(curve) ** 2 for curve in some) ** 0.5 for key, some in curves.items()}
            last = statistics.fmean(statistics.fmean(curve[-5:]) for curve in curves["control_loss"])
            print(f"| {setting} | {arm} | {len(seeds)} | {100 * rms['control_accuracy']:.2f} "
                  f"| {rms['control_loss']:.4f} | {last:.4f} |")


if __name__ == "__main__":
    main()
