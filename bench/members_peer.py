"""Parts of the peers of `members.py`: the job, which has a share of the members and the data, and requests."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class Job:
    MOMENTUM: ClassVar[float] = 0.9
    DECAY: ClassVar[float] = 5e-4

    way: str
    options: list[str]
    threads: int
    host: str
    init: str
    batch: int
    rates: list[float]
    x: np.ndarray  # [samples, channels, points], normalised
    y: np.ndarray  # [samples]

    @property
    def family(self) -> str:
        """`conv1d` and `mlp`, families of hosts, or `strided`, the network of `mnist1d_cnn.toml`."""
        return "strided" if self.host.endswith(".toml") else self.host.partition(":")[0]

    @property
    def widths(self) -> list[int]:
        if self.family == "strided":
            return [25, 25, 25]
        return [int(width) for width in self.host.partition(":")[2].split(",")]

    @staticmethod
    def parse() -> Job:
        parser = argparse.ArgumentParser()
        parser.add_argument("--way", required=True)
        parser.add_argument("--threads", type=int, required=True)
        parser.add_argument("--host", required=True)
        parser.add_argument("--init", required=True, help="initial weights, safetensors")
        parser.add_argument("--data", required=True, help=".npz with x and y")
        parser.add_argument("--batch", type=int, required=True)
        parser.add_argument("--rates", required=True, help="learning rates of the members")
        given = parser.parse_args()
        way, *options = given.way.split(":")
        data = np.load(given.data)
        rates = [float(rate) for rate in given.rates.split(",")]
        return Job(
            way, options, given.threads, given.host, given.init, given.batch, rates, data["x"], data["y"],
        )  # fmt: skip


def serve(version: str, train: Callable[[dict[str, Any]], Any]) -> None:
    """Trains as each line of stdin asks, and prints a line with the seconds and the losses."""
    print(json.dumps({"ready": version}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start, start_cpu = time.perf_counter(), time.process_time()
        losses = train(request)
        report = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - start_cpu,
            "losses": losses,
        }
        print(json.dumps(report), flush=True)
