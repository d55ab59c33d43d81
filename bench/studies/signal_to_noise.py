"""Signal and noise of rewards and measurements, from the runs of a study.

    python3 bench/studies/signal_to_noise.py study --setting embedded --arms none,script,heuristic

An arm makes the same decisions, or nearly the same, with every seed; the seeds differ in weights, order
of samples and split. So for each quantity, in each step, the variance between the means of the arms is
*signal*, from which a controller could learn, and the variance between the seeds of an arm is *noise*. The
mean square of the arms' means contains 1/n of the noise of n seeds, which is subtracted. With `--bare`,
each value is the difference from the bare host (the first arm) with the same seed, as from a twin.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from study import folder_name

Step = dict[str, Any]
Curve = list[float]

# Points of accuracy per nat of control loss, for gains on one scale.
POINTS_PER_NAT = 40.0


def steps_of(folder: Path) -> list[Step]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event for event in events if event["event"] == "step_completed"]


def change(values: Curve) -> Curve:
    return [0.0, *(b - a for a, b in zip(values, values[1:]))]


def quantities() -> dict[str, Callable[[list[Step]], Curve]]:
    """Each quantity as a function from the steps of a run to its values."""
    points: Callable[[list[Step]], Curve] = lambda s: [100 * e["control_accuracy"] for e in s]
    nats: Callable[[list[Step]], Curve] = lambda s: [e["control_loss"] for e in s]
    terms = ["gain", "rent", "potential", "fossilize", "prune", "op"]
    return {
        "control accuracy, points": points,
        "control loss, nats": nats,
        "training loss, nats": lambda s: [e["train_loss"] for e in s],
        "gain of accuracy in a step, points": lambda s: change(points(s)),
        "gain of loss in a step, points": lambda s: [-POINTS_PER_NAT * d for d in change(nats(s))],
        **{f"reward: {t}": lambda s, t=t: [e["reward"][t] for e in s] for t in terms},
    }


def tail_sums(values: Curve) -> Curve:
    """Undiscounted returns from each step on."""
    sums, total = [], 0.0
    for value in reversed(values):
        total += value
        sums.append(total)
    return sums[::-1]


def split(cells: list[list[Curve]]) -> tuple[float, float]:
    """Standard deviations of signal and noise; `cells[arm][seed][step]`."""
    seeds, signal, noise = len(cells[0]), [], []
    for step in range(len(cells[0][0])):
        values = [[curve[step] for curve in arm] for arm in cells]
        within = statistics.fmean(statistics.variance(arm) for arm in values)
        between = statistics.variance([statistics.fmean(arm) for arm in values])
        noise.append(within)
        signal.append(between - within / seeds)
    return max(statistics.fmean(signal), 0.0) ** 0.5, statistics.fmean(noise) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="folder of a study")
    parser.add_argument("--setting", required=True)
    parser.add_argument("--arms", required=True, help="separated by commas; the first is the bare host")
    parser.add_argument("--returns", action="store_true", help="sums over the rest of the episode")
    args = parser.parse_args()
    arms = args.arms.split(",")

    def folders(arm: str, seed: int) -> Path:
        return args.out / folder_name(args.setting, arm, seed)

    complete = lambda seed: all((folders(arm, seed) / "summary.json").exists() for arm in arms)
    seeds = [seed for seed in range(1, 1000) if complete(seed)]
    runs = [[steps_of(folders(arm, seed)) for seed in seeds] for arm in arms]
    print(f"{args.setting}: {', '.join(arms)}; seeds {', '.join(map(str, seeds))}\n")
    print("| | signal | noise | ratio | noise, less the bare host's | ratio |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, of in quantities().items():
        cells = [[of(steps) for steps in arm] for arm in runs]
        if args.returns:
            cells = [[tail_sums(curve) for curve in arm] for arm in cells]
        paired = [
            [[a - b for a, b in zip(curve, bare)] for curve, bare in zip(arm, cells[0])]
            for arm in cells[1:]
        ]
        signal, noise = split(cells)
        less = statistics.fmean(
            statistics.variance([curve[step] for curve in arm])
            for arm in paired
            for step in range(len(arm[0]))
        ) ** 0.5
        ratios = [f"{signal / x:.2f}" if x > 0 else "–" for x in (noise, less)]
        print(f"| {name} | {signal:.4f} | {noise:.4f} | {ratios[0]} | {less:.4f} | {ratios[1]} |")


if __name__ == "__main__":
    main()
