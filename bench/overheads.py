"""Overhead of Python and of watchers: our program with and without them, in turns.

    python bench/overheads.py gather --program target/release/meristem
    python bench/overheads.py env
    python bench/overheads.py watch --program target/release/meristem

| part | compares |
|---|---|
| `gather` | batches per second of `GatherBatches` in Python, with arrays by `numpy.from_dlpack`, and of `meristem bench gather` |
| `env` | the time per step of `GrowthVectorEnv` and of a run of the engine, with the smallest hosts |
| `watch` | a run alone, with `meristem watch` attached, and with a browser's connection to `meristem serve` |

Needs a release build of the package (`maturin build --release`) and of the program, with the feature `serve`. Prints
the figures of every round as JSON, then medians with minimum and maximum. `records/` has results.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import signal
import statistics
import struct
import subprocess
import tempfile
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import meristem

ENVS, BATCH, IMAGES = 4, 128, 50_000


def gather_rust(program: str, seconds: float) -> float:
    """Batches per second of the engine."""
    command = [program, "bench", "gather", "--json", "--seconds", str(seconds)]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    config = report["config"]
    assert (config["envs"], config["batch"], config["images"]) == (ENVS, BATCH, IMAGES), config
    return 1e6 / report["us_per_batch"]


def gather_python(batches: meristem.GatherBatches, seconds: float) -> float:
    """Batches per second, each as two numpy arrays."""
    count, epoch, start = 0, 0, time.perf_counter()
    while True:
        for parts in batches.epoch(epoch):
            for part in parts:
                np.from_dlpack(part.inputs), np.from_dlpack(part.targets)  # noqa: B018
            count += len(parts)
            if time.perf_counter() - start > seconds:
                return count / (time.perf_counter() - start)
        epoch += 1


def gather(program: str, rounds: int, folder: Path) -> Iterator[dict[str, float]]:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (IMAGES, 32, 32, 3), np.uint8)
    path = folder / "images.npz"
    np.savez(path, train_images=images, train_labels=random.integers(0, 10, IMAGES, np.uint8))
    data = meristem.Dataset("arrays", root=path)
    batches = meristem.GatherBatches(data, BATCH, envs=ENVS, drop_last=True)
    gather_python(batches, 0.5)
    for number in range(rounds):
        turns: list[tuple[str, Callable[[], float]]] = [
            ("python", lambda: gather_python(batches, 1.0)),
            ("rust", lambda: gather_rust(program, 1.0)),
        ]
        figures = {name: turn() for name, turn in turns[:: 1 if number % 2 else -1]}
        yield {**figures, "ratio": figures["python"] / figures["rust"]}


#: The shortest possible steps, so that the engine's work around them dominates.
SMALL: dict[str, Any] = {
    "preset": "quick",
    "host": "minimal",
    "batch": 8,
    "max_batches": 1,
    "control_split": 0.01,
    "threads": 1,
    "twin": False,
}


def env_engine(steps: int, folder: Path) -> float:
    """Median milliseconds from step to step of a run."""
    run = meristem.train(
        **SMALL, envs=ENVS, steps=steps, rounds=1, controller="none", run_dir=folder / "engine"
    )
    completed = run.events["step_completed"]
    times = np.asarray(completed["seconds"])[np.asarray(completed["env"]) == 0]
    return float(np.median(np.diff(times[5:]))) * 1e3


def env_python(steps: int, folder: Path) -> float:
    """Median milliseconds of `step`, in which all envs wait."""
    from meristem.gym import GrowthVectorEnv

    envs = GrowthVectorEnv(ENVS, **SMALL, steps=steps, run_dir=folder / "python")
    envs.reset(seed=0)
    wait = np.zeros((ENVS, len(envs.single_action_space.nvec)), np.int64)
    times = []
    for _ in range(steps - 1):
        start = time.perf_counter()
        envs.step(wait)
        times.append(time.perf_counter() - start)
    envs.close()
    return float(np.median(times[5:])) * 1e3


def env(steps: int, rounds: int) -> Iterator[dict[str, float]]:
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            turns = [("python_ms", env_python), ("engine_ms", env_engine)]
            figures = {
                name: turn(steps, Path(folder)) for name, turn in turns[:: 1 if number % 2 else -1]
            }
        if number > 0:  # the first is a warm-up
            yield {**figures, "over_ms": figures["python_ms"] - figures["engine_ms"]}


@contextmanager
def watched_by_terminal(program: str, folder: Path) -> Iterator[None]:
    """`meristem watch` on a terminal of 80×24, with its output discarded."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    while not (folder / "events.jsonl").exists():
        time.sleep(0.01)
    command = [program, "watch", str(folder)]
    watch = subprocess.Popen(command, stdin=inner, stdout=inner, start_new_session=True)
    os.close(inner)
    seen = []
    threading.Thread(target=drain, args=(lambda: os.read(outer, 1 << 16), seen), daemon=True).start()
    try:
        yield
        assert watch.poll() is None, "watch ended"
        assert sum(map(len, seen)) > 2000, "watch drew nothing"
    finally:
        watch.send_signal(signal.SIGINT)
        watch.wait(10)
        os.close(outer)


@contextmanager
def watched_by_browser(program: str, folder: Path) -> Iterator[None]:
    """`meristem serve`, and a connection to the run's live page."""
    command = [program, "serve", str(folder.parent), "--port", "0"]
    serve = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not (folder / "events.jsonl").exists():
        time.sleep(0.01)
    assert serve.stdout is not None
    line = serve.stdout.readline()
    address = next(word for word in line.split() if word.startswith("http")).rstrip("/")
    live = urllib.request.urlopen(f"{address}/live/run/{folder.name}", timeout=60)
    seen: list[bytes] = []
    threading.Thread(target=drain, args=(lambda: live.read1(1 << 16), seen), daemon=True).start()
    try:
        yield
        assert sum(map(len, seen)) > 2000, "the server sent nothing"
    finally:
        serve.send_signal(signal.SIGINT)
        serve.wait(10)


def drain(read: Callable[[], bytes], seen: list[bytes]) -> None:
    try:
        while part := read():
            seen.append(part)
    except OSError:
        pass


@contextmanager
def alone(program: str, folder: Path) -> Iterator[None]:
    yield


def watched(program: str, settings: str, watcher: Callable[..., Any]) -> tuple[float, float]:
    """Seconds and processor seconds of a run with a watcher."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [program, "train", "--quiet", "--run-dir", str(folder), *settings.split()]
        start = time.perf_counter()
        train = subprocess.Popen(command)
        with watcher(program, folder):
            _, status, used = os.wait4(train.pid, 0)
            seconds = time.perf_counter() - start
        assert status == 0, status
        return seconds, used.ru_utime + used.ru_stime


WATCHERS: dict[str, Callable[..., Any]] = {
    "alone": alone,
    "again": alone,
    "watch": watched_by_terminal,
    "serve": watched_by_browser,
}


def watch(
    program: str, rounds: int, settings: str, watchers: list[str]
) -> Iterator[dict[str, float]]:
    ways = [(name, WATCHERS[name]) for name in ("alone", *watchers)]
    for number in range(rounds):
        turned = ways[number % len(ways) :] + ways[: number % len(ways)]
        figures = {name: watched(program, settings, watcher) for name, watcher in turned}
        row = {f"{name}_s": seconds for name, (seconds, _) in figures.items()}
        row |= {f"{name}_cpu_s": cpu for name, (_, cpu) in figures.items()}
        for name in watchers:
            for kind, at in (("", 0), ("_cpu", 1)):
                row[f"{name}{kind}_ratio"] = figures[name][at] / figures["alone"][at]
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["gather", "env", "watch"])
    parser.add_argument("--program", default="target/release/meristem")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300, help="of `env`")
    parser.add_argument(
        "--settings",
        default="--preset quick --envs 2 --threads 1 --steps 20 --rounds 1 --max-batches 20",
        help="of the runs of `watch`",
    )
    parser.add_argument(
        "--watchers",
        nargs="+",
        choices=["again", "watch", "serve"],
        default=["again", "watch", "serve"],
        help="of `watch`; `serve` needs a program with that feature",
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "gather": lambda: gather(given.program, given.rounds, Path(folder)),
            "env": lambda: env(given.steps, given.rounds),
            "watch": lambda: watch(
            given.program, given.rounds, given.settings, given.watchers
        ),
        }[given.part]()
        kept = []
        for row in rows:
            print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)
            kept.append(row)
    for name in kept[0]:
        values = [row[name] for row in kept]
        low, median, high = min(values), statistics.median(values), max(values)
        print(f"{name:>18}: median {median:.4f} ({low:.4f} to {high:.4f}, {len(values)} rounds)")


if __name__ == "__main__":
    main()
