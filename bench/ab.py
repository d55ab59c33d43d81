"""Compares two commands, A and B, many times over.

    python3 bench/ab.py --pairs 30 \
        --a "target/release/meristem bench host --json --seconds 2" \
        --b "target/release/meristem bench host --json --seconds 2 --trace {}"

The commands run in turns and print one JSON object each. `--key` names the compared numbers,
separated by commas: `fused_ms.median` is a number in an object, `rows.*.ms` a number in each entry
of a list. A slow minute of the machine affects both commands of a pair, and the order within a
pair alternates.

With `--together` both run at the same time, each on a separate core, then again with the cores
exchanged. The numbers are named by `--key`; without it they are the processor time of the whole
command (user and system), which must do a fixed amount of work. The command should keep one core
busy, as with `--threads 1`. Other load on the machine affects both at once, so on a busy machine
the interval is several times narrower. `{}` in a command becomes a fresh path.

The result is the median over the pairs of the ratio B / A, with a distribution-free interval that
contains the true median with 95 % confidence (order statistics, the sign test). A command may begin
with NAME=VALUE for its environment. Run with `--b` equal to `--a`, too: the result shows the noise
of the machine. Another build has another path: `--a "../before/target/release/meristem bench host
--json"`.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compare import REPOSITORY, machine, output


def numbers(report: Any, key: str) -> dict[str, float]:
    """The numbers of a report that a key names; `*` stands for every entry of a list."""
    found = {"": report}
    for word in key.split("."):
        inner = {}
        for name, value in found.items():
            for label, entry in entries(value) if word == "*" else [(word, value[word])]:
                inner[f"{name}.{label}".lstrip(".")] = entry
        found = inner
    return {name: float(value) for name, value in found.items()}


def entries(records: list[Any]) -> list[tuple[str, Any]]:
    """Entries of a list, labelled with their parameters or else their positions."""
    of = ("bytes", "algorithm", "density")
    labels = [" ".join(str(record[key]) for key in of if key in record) for record in records]
    return [(label or str(i), r) for i, (label, r) in enumerate(zip(labels, records, strict=True))]


def run(command: str, keys: str | None, core: int | None = None) -> dict[str, float]:
    """Numbers that a command prints, or else its processor seconds; it may be bound to one core."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w+") as printed:
        words = shlex.split(command.replace("{}", f"{scratch}/x"))
        environment = dict(os.environ)
        while words and "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        if core is not None:
            words = ["taskset", "-c", str(core), *words]
        process = subprocess.Popen(words, cwd=REPOSITORY, env=environment, stdout=printed)
        _, status, used = os.wait4(process.pid, 0)
        if status != 0:
            raise SystemExit(f"{command} ended with status {status}")
        if keys is None:
            return {"processor seconds": used.ru_utime + used.ru_stime}
        printed.seek(0)
        report = json.load(printed)
    return {name: x for key in keys.split(",") for name, x in numbers(report, key).items()}


def together(commands: dict[str, str], keys: str | None) -> dict[str, dict[str, float]]:
    """Numbers of each command: geometric means over both assignments of the cores."""
    means: dict[str, dict[str, float]] = {arm: {} for arm in commands}
    with ThreadPoolExecutor() as pool:
        for cores in ((0, 1), (1, 0)):
            begun = {
                arm: pool.submit(run, command, keys, core)
                for (arm, command), core in zip(commands.items(), cores, strict=True)
            }
            for arm, figures in begun.items():
                for name, x in figures.result().items():
                    means[arm][name] = means[arm].get(name, 1.0) * x**0.5
    return means


def interval(values: list[float]) -> tuple[float, float]:
    """95 % for the median: the k-th least and the k-th greatest, k from the sign test."""
    ordered, n = sorted(values), len(values)
    k = 0
    while sum(math.comb(n, i) for i in range(k + 1)) / 2**n <= 0.025:
        k += 1
    return (ordered[max(k - 1, 0)], ordered[min(n - k, n - 1)])


def compare(a: list[float], b: list[float]) -> dict[str, Any]:
    """Ratios B / A of the pairs, and the spread of each command."""
    ratios = [y / x for x, y in zip(a, b, strict=True)]
    low, high = interval(ratios)
    arms = {"a": a, "b": b}
    return {
        "median": {arm: statistics.median(values) for arm, values in arms.items()},
        "least": {arm: min(values) for arm, values in arms.items()},
        "greatest": {arm: max(values) for arm, values in arms.items()},
        "ratio": {"median": statistics.median(ratios), "low": low, "high": high},
        "figures": arms,
    }


def line(name: str, result: dict[str, Any]) -> str:
    ratio, median = result["ratio"], result["median"]
    change, low, high = (100 * (ratio[key] - 1) for key in ("median", "low", "high"))
    spread = [100 * (result["greatest"][arm] / result["least"][arm] - 1) for arm in ("a", "b")]
    return (
        f"{name}: a {median['a']:,.3f} (spread {spread[0]:.1f} %), b {median['b']:,.3f}"
        f" ({spread[1]:.1f} %); b against a {change:+.2f} % (95 %: {low:+.2f} to {high:+.2f} %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--a", required=True, help="the base")
    parser.add_argument("--b", required=True, help="the command to compare with A")
    parser.add_argument("--key", help="compared numbers in the JSON [images_per_s]")
    parser.add_argument("--together", action="store_true", help="run both at the same time, on a core each")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--out", type=Path, help="JSON file, as records/NAME.json")
    args = parser.parse_args()
    if args.pairs < 6:
        parser.error("--pairs: an interval with 95 % confidence takes at least 6")

    before = machine()
    figures: dict[str, dict[str, list[float]]] = {}
    for pair in range(args.pairs):
        order = ("a", "b") if pair % 2 == 0 else ("b", "a")
        commands = {arm: getattr(args, arm) for arm in order}
        if args.together:
            reports = together(commands, args.key)
        else:
            key = args.key or "images_per_s"
            reports = {arm: run(command, key) for arm, command in commands.items()}
        for name in reports["a"]:
            both = figures.setdefault(name, {"a": [], "b": []})
            for arm in both:
                both[arm].append(reports[arm][name])
            print(f"{pair + 1:>3}  {name:30} a {both['a'][-1]:>12,.3f}  b {both['b'][-1]:>12,.3f}")
    results = {name: compare(both["a"], both["b"]) for name, both in figures.items()}
    print("\n".join(line(name, result) for name, result in results.items()))
    print(f"{args.pairs} pairs, load {before['load_before']} before the start")
    if args.out:
        record: dict[str, Any] = {
            "a": args.a,
            "b": args.b,
            "commit": output("git", "rev-parse", "--short=12", "HEAD"),
            "machine": before,
            "results": results,
        }
        args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
