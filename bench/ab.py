"""Compares two commands, A and B, many times over.

    python3 bench/ab.py --pairs 30 \
        --a "target/release/meristem bench host --json --seconds 2" \
        --b "target/release/meristem bench host --json --seconds 2 --trace {}"

They run in turns and print one JSON object each, of which a number is taken. A slow minute of
the machine hits both of a pair, and the order within a pair changes from one to the next.

With `--together` both run at the same time, each on a core of its own, then again with the cores
exchanged, and the figure is the processor time of the whole command (user and system), so that the
work must be fixed and on one thread. `{}` in a command becomes a fresh path. What hits the machine
hits both at once: on a busy machine the interval is several times narrower.

The result is the median over the pairs of B's figure over A's, with an
interval that holds the true median with 95 % confidence and assumes nothing of the distribution
(order statistics, the sign test). A command may begin with NAME=VALUE for its environment.
`--b` equal to `--a` shows what the machine itself makes of no difference: run that too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from compare import REPOSITORY, machine, output


def run(command: str, key: str) -> float:
    words = shlex.split(command)
    environment = dict(os.environ)
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    done = subprocess.run(
        words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{command}\n{done.stderr}")
    return float(json.loads(done.stdout)[key])


def together(commands: dict[str, str]) -> dict[str, float]:
    """Processor seconds of each, the geometric mean over both ways to deal the cores."""
    seconds = dict.fromkeys(commands, 1.0)
    for cores in ((0, 1), (1, 0)):
        with tempfile.TemporaryDirectory() as scratch:
            running = {}
            for (arm, command), core in zip(commands.items(), cores, strict=True):
                words = shlex.split(command.replace("{}", f"{scratch}/{arm}"))
                words = ["taskset", "-c", str(core), *words]
                running[arm] = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
            for arm, process in running.items():
                _, status, used = os.wait4(process.pid, 0)
                if status != 0:
                    raise SystemExit(f"{commands[arm]} ended with status {status}")
                seconds[arm] *= (used.ru_utime + used.ru_stime) ** 0.5
    return seconds


def interval(values: list[float]) -> tuple[float, float]:
    """95 % for the median: the k-th least and the k-th greatest, k from the sign test."""
    ordered, n = sorted(values), len(values)
    k = 0
    while sum(math.comb(n, i) for i in range(k + 1)) / 2**n <= 0.025:
        k += 1
    return (ordered[max(k - 1, 0)], ordered[min(n - k, n - 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--a", required=True, help="the base")
    parser.add_argument("--b", required=True, help="what is compared with it")
    parser.add_argument("--key", default="images_per_s", help="the number in the JSON that counts")
    parser.add_argument("--together", action="store_true", help="at the same time, processor time")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--out", type=Path, help="JSON file, as records/NAME.json")
    args = parser.parse_args()

    key = "processor seconds" if args.together else args.key
    before = machine()
    figures: dict[str, list[float]] = {"a": [], "b": []}
    for pair in range(args.pairs):
        order = ("a", "b") if pair % 2 == 0 else ("b", "a")
        commands = {arm: getattr(args, arm) for arm in order}
        if args.together:
            pair_figures = together(commands)
        else:
            pair_figures = {arm: run(command, args.key) for arm, command in commands.items()}
        for arm in order:
            figures[arm].append(pair_figures[arm])
        print(f"{pair + 1:>3}  a {figures['a'][-1]:>12,.3f}  b {figures['b'][-1]:>12,.3f}")
    ratios = [b / a for a, b in zip(figures["a"], figures["b"], strict=True)]
    low, high = interval(ratios)
    record: dict[str, Any] = {
        "a": args.a,
        "b": args.b,
        "key": key,
        "commit": output("git", "rev-parse", "--short=12", "HEAD"),
        "machine": before,
        "figures": figures,
        "median": {arm: statistics.median(values) for arm, values in figures.items()},
        "ratio": {"median": statistics.median(ratios), "low": low, "high": high},
    }
    change = [100 * (value - 1) for value in (statistics.median(ratios), low, high)]
    print(
        f"{key}: a {record['median']['a']:,.3f}, b {record['median']['b']:,.3f};"
        f" b against a {change[0]:+.2f} % (95 %: {change[1]:+.2f} to {change[2]:+.2f} %),"
        f" {args.pairs} pairs, load {before['load_before']} before the start"
    )
    if args.out:
        args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
