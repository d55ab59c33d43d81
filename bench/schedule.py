"""Estimated throughput of a fleet on more cores than this machine has: a simulation of the schedule.

    cargo bench -p meristem-nn --bench steps -- baseline train | python3 bench/schedule.py --cores 1,2,8,64 --envs 1,4,64

Reads the times of a plan's steps on one core. A worker takes an env for a turn of 10 ms; workers without an env take over
parts of the steps of other envs (`crates/kernels/src/parts.rs`). A step has at most 8 parts of at least 6 million
multiply-adds, where one access to an element counts as 16; handing over a part takes a microsecond. The estimate assumes
that memory is as fast for many cores as for one, and that clocks do not fall. It ignores unfinished batches at the end, and
steps that the benchmark does not print.
"""

from __future__ import annotations

import argparse
import heapq
import re
import sys
from collections import deque
from dataclasses import dataclass, field

PARTS_MOST, PART_LEAST, TOUCH = 8, 6e6, 16
HANDOVER, TURN = 1e-6, 10e-3
STEP = re.compile(r"([\d.]+) µs +[\d.]+ % +([\d.]+) GFLOP/s +([\d.]+) GB/s")


@dataclass(frozen=True)
class Step:
    seconds: float
    parts: int


def read_steps(text: str) -> list[Step]:
    steps = []
    for micros, gflops, gbytes in STEP.findall(text):
        seconds = float(micros) * 1e-6
        work = seconds * max(float(gflops) * 1e9 / 2, float(gbytes) * 1e9 / 4 * TOUCH)
        steps.append(Step(seconds, int(min(max(work // PART_LEAST, 1), PARTS_MOST))))
    return steps


@dataclass
class Env:
    """One batch after another; of the current step `left` parts are not taken and `open` parts not done."""

    at: int = 0
    batches: int = 0
    left: int = 0
    open: int = 0


@dataclass
class Schedule:
    steps: list[Step]
    cores: int
    envs: list[Env]
    now: float = 0.0
    waiting: deque[int] = field(default_factory=deque)  # envs without a worker
    turn_ends: dict[int, float] = field(default_factory=dict)  # of envs with a worker
    owner: dict[int, int] = field(default_factory=dict)
    events: list[tuple[float, int, int]] = field(default_factory=list)  # time, worker, env

    def part(self, worker: int, env: int) -> None:
        """The worker takes a part of the env's step."""
        state = self.envs[env]
        step = self.steps[state.at]
        state.left -= 1
        cost = HANDOVER if self.owner[env] != worker else 0.0
        heapq.heappush(self.events, (self.now + step.seconds / step.parts + cost, worker, env))

    def begin(self, env: int) -> None:
        state = self.envs[env]
        state.left = state.open = self.steps[state.at].parts

    def find_work(self, idle: set[int]) -> None:
        """Owners continue with their envs; other workers take waiting envs, then parts."""
        owned = {worker: env for env, worker in self.owner.items()}
        for worker in sorted(idle):
            env = owned.get(worker)
            if env is None and self.waiting:
                env = self.waiting.popleft()
                self.owner[env], self.turn_ends[env] = worker, self.now + TURN
                self.begin(env)
            if env is not None and self.envs[env].left:
                self.part(worker, env)
                idle.discard(worker)
        for worker in sorted(idle):
            others = [env for env in self.owner if self.envs[env].left]
            if self.owner and worker not in self.owner.values() and others:
                self.part(worker, max(others, key=lambda env: self.envs[env].left))
                idle.discard(worker)

    def run(self, seconds: float) -> float:
        """Batches a second."""
        self.waiting.extend(range(len(self.envs)))
        idle = set(range(self.cores))
        while True:
            self.find_work(idle)
            self.now, worker, env = heapq.heappop(self.events)
            if self.now > seconds:
                return sum(state.batches for state in self.envs) / seconds
            idle.add(worker)
            state = self.envs[env]
            state.open -= 1
            if state.open == 0:
                state.at += 1
                if state.at == len(self.steps):
                    state.at, state.batches = 0, state.batches + 1
                    if self.waiting and self.now >= self.turn_ends[env]:
                        del self.owner[env]
                        self.waiting.append(env)
                        continue
                self.begin(env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(n) for n in text.split(",")]
    parser.add_argument("--cores", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--envs", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=0.5, help="simulated time")
    options = parser.parse_args()
    steps = read_steps(sys.stdin.read())
    if not steps:
        parser.error("no steps on standard input; pipe the output of `--bench steps` for one host and mode")
    alone = 1 / sum(step.seconds for step in steps)
    print(f"{len(steps)} steps of {1e6 / alone:.0f} µs; times as fast as one core\n")
    print("| envs | " + " | ".join(f"{cores} cores" for cores in options.cores) + " |")
    print("|---:|" + "---:|" * len(options.cores))
    for count in options.envs:
        rates = [Schedule(steps, cores, [Env() for _ in range(count)]).run(options.seconds) for cores in options.cores]
        print(f"| {count} | " + " | ".join(f"{rate / alone:.1f}" for rate in rates) + " |")


if __name__ == "__main__":
    main()
