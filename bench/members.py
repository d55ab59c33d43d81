"""Members with different learning rates on two cores, beside PyTorch and JAX.

    PYTHONPATH=FOLDER python bench/members.py COMMAND --program target/release/meristem [--json FILE]

| command | compares |
|---|---|
| `check` | losses of each epoch from equal weights, in equal order, with PyTorch's and JAX's |
| `screen` | all ways of the peers to train the members, by a few optimiser steps of each |
| `peers` | ours with the ways of `--ways`, in turns |
| `count` | our cost of an optimiser step of one network with 8 to 512 members |
| `mixed` | 8 hosts x 8 rates as one fleet, with eight fleets of one host |

Needs the package meristem for the data, safetensors, torch and jax. A rate is in network-steps a
second: optimiser steps of one network. Start and compilation count nowhere: peers start to count
after three steps; of ours the time of one epoch is subtracted from the time of several. SGD with
momentum and weight decay, no clipping, whole batches; no running statistics are recomputed.
Processor time is the sum over all threads and processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import meristem
import numpy as np

HERE = Path(__file__).resolve().parent
# Name -> dataset, host.
WORKS = {
    "conv": ("mnist1d", "conv1d:16,32,64"),
    "small-conv": ("mnist1d", "conv1d:8,16,32"),
    "strided-conv": ("mnist1d", str(HERE / "mnist1d_cnn.toml")),
    "mlp": ("mnist1d", "mlp:128,128"),
    "small-mlp": ("mnist1d", "mlp:32,32"),
    "images": ("embedded", "mlp:256,256"),
}
SAMPLES = {"mnist1d": 4000, "embedded": 10_000}
WAYS = {
    "torch": ("loop", "loop:compile", "vmap", "vmap:8", "vmap:compile", "vmap:8:compile"),
    "jax": ("loop", "vmap", "vmap:8"),
}
# Further ways for networks with convolutions.
BMM_WAYS = {
    "torch": ("vmap:bmm", "vmap:bmm:8", "vmap:bmm:compile", "vmap:bmm:8:compile"),
    "jax": ("loop:bmm", "vmap:bmm", "vmap:bmm:8"),
}
MIXED = ("conv1d:4,8,16", "conv1d:8,16,32", "conv1d:16,32,64", "conv1d:32,32", "conv1d:16,16,16",
         "mlp:32,32", "mlp:64,64", "mlp:128,128")  # fmt: skip


def rates_of(members: int) -> list[float]:
    """Learning rates from 0.001 to 0.1, evenly in their logarithm."""
    return [float(f"{rate:.4g}") for rate in np.logspace(-3, -1, members)]


class Ours:
    """Runs of our program."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder, self.runs = given, folder, 0

    def run(self, dataset: str, members: dict[str, str], steps: int, *more: str) -> dict[str, Any]:
        """Wall and processor seconds of a process, and its folder."""
        self.runs += 1
        run = self.folder / f"run-{self.runs}"
        grid = [part for key, values in members.items() for part in ("--members", f"{key}={values}")]
        command = [
            self.given.program, "train", "--quiet", "--dataset", dataset, "--controller", "none",
            "--control-split", "0", "--clip-norm", "off", "--momentum", "0.9", "--weight-decay", "0.0005",
            "--batch", str(self.given.batch), "--max-batches", str(batches_of(dataset, self.given.batch)),
            "--steps", str(steps), "--checkpoint-every", "0", "--statistics-batches", self.given.statistics_batches,
            "--run-dir", str(run), *grid, *more,
        ]  # fmt: skip
        start = time.perf_counter()
        process = subprocess.Popen(command)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        cpu = used.ru_utime + used.ru_stime
        return {"seconds": time.perf_counter() - start, "cpu_seconds": cpu, "run": run}

    def epochs(self, dataset: str, members: dict[str, str], epochs: int, *more: str) -> dict[str, float]:
        """Wall and processor seconds of `epochs` epochs: a run of `epochs` + 1, less a run of one."""
        one, all_of_them = (self.run(dataset, members, steps, *more) for steps in (1, 1 + epochs))
        return {key: all_of_them[key] - one[key] for key in ("seconds", "cpu_seconds")}


def samples_of(dataset: str) -> tuple[np.ndarray, np.ndarray]:
    """The training samples [N, channels, points], normalised, and their labels."""
    data = meristem.Dataset(dataset)
    [[(_, x, y)]] = list(meristem.GatherBatches(data, batch=len(data), shuffle=False).epoch(0))
    x = np.ascontiguousarray(np.asarray(x))
    return x.reshape(len(x), x.shape[1], -1), np.asarray(y).copy()


def batches_of(dataset: str, batch: int) -> int:
    """Whole batches in an epoch."""
    return SAMPLES[dataset] // batch


class Peer:
    """Processes of a peer that wait for requests, each with its share of the members."""

    def __init__(
        self, name: str, work: str, given: argparse.Namespace, folder: Path, rates: list[float]
    ) -> None:
        dataset, host = WORKS[work]
        self.name, self.batches = name, batches_of(dataset, given.batch)
        framework, way, arrangement = name.split(" ")
        processes, threads = map(int, arrangement.split("x"))
        self.members = len(rates)
        self.processes = []
        for i in range(processes):
            command = [
                sys.executable, str(HERE / f"members_{framework}.py"), "--way", way,
                "--threads", str(threads), "--host", host, "--init", str(folder / f"{work}.safetensors"),
                "--data", str(folder / f"{dataset}.npz"), "--batch", str(given.batch),
                "--rates", ",".join(map(str, rates[i::processes])),
            ]  # fmt: skip
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.processes.append(subprocess.Popen(command, **pipes))
        self.versions = [self.answer(process)["ready"] for process in self.processes]

    def answer(self, process: subprocess.Popen[str]) -> Any:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {process.wait()}")
        return json.loads(line)

    def train(self, epochs: int, batches: int | None = None, in_order: bool = False) -> dict[str, Any]:
        """Wall seconds from the request to the last answer, processor seconds, and losses."""
        request = {"epochs": epochs, "batches": batches or self.batches, "in_order": in_order}
        start = time.perf_counter()
        for process in self.processes:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        answers = [self.answer(process) for process in self.processes]
        seconds = time.perf_counter() - start
        losses = [[0.0] * self.members for _ in range(epochs)]
        for i, answer in enumerate(answers):
            for into, own in zip(losses, answer["losses"], strict=True):
                into[i :: len(answers)] = own
        cpu = sum(answer["cpu_seconds"] for answer in answers)
        return {"seconds": seconds, "cpu_seconds": cpu, "losses": losses}

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait()


def prepare(work: str, ours: Ours, folder: Path) -> None:
    """Writes data and initial weights of the peers: the weights of a network after one epoch."""
    dataset, host = WORKS[work]
    x, y = samples_of(dataset)
    np.savez(folder / f"{dataset}.npz", x=x, y=y)
    run = ours.run(dataset, {"lr": "0.01"}, 1, "--host", host)["run"]
    (folder / f"{work}.safetensors").write_bytes((run / "weights" / "env-0.safetensors").read_bytes())


def ways_of(work: str, arrangements: list[str]) -> list[str]:
    more = BMM_WAYS if "conv" in work else {}
    return [
        f"{framework} {way} {arrangement}"
        for framework in WAYS
        for way in (*WAYS[framework], *more.get(framework, ()))
        for arrangement in arrangements
    ]


def check(work: str, ours: Ours, folder: Path) -> dict[str, Any]:
    """Mean training losses of each epoch and member, of ours and of each peer."""
    dataset, host = WORKS[work]
    rates, epochs = rates_of(4), ours.given.epochs
    own = ("--host", host, "--shuffle", "off", "--init", str(folder / f"{work}.safetensors"))
    run = ours.run(dataset, {"lr": ",".join(map(str, rates))}, epochs, *own)["run"]
    losses = [[0.0] * len(rates) for _ in range(epochs)]
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step_completed":
            losses[event["step"]][event["env"]] = event["train_loss"]
    found = {"rates": rates, "ours": losses}
    ways = ["torch loop 1x2", "torch vmap 2x1", "jax vmap 1x2"]
    for name in ours.given.ways or ways:
        peer = Peer(name, work, ours.given, folder, rates)
        found[name] = peer.train(epochs, in_order=True)["losses"]
        peer.close()
        difference = np.abs(np.array(found[name]) - np.array(losses)).max(axis=1)
        print(work, name, "largest difference by epoch:", [float(f"{d:.2g}") for d in difference])
    return found


def screen(work: str, ours: Ours, folder: Path) -> dict[str, Any]:
    """Network-steps a second and per processor second, by few steps."""
    found: dict[str, Any] = {}
    for name in ours.given.ways or ways_of(work, ours.given.arrangements.split(",")):
        try:
            start = time.perf_counter()
            peer = Peer(name, work, ours.given, folder, rates_of(64))
        except RuntimeError as error:
            found[name] = {"failed": str(error)}
            print(work, name, error, flush=True)
            continue
        ready = time.perf_counter() - start
        best = [peer.train(1, batches=ours.given.batches) for _ in range(2)]
        peer.close()
        steps = 64 * ours.given.batches
        found[name] = {key: steps / min(b[key] for b in best) for key in ("seconds", "cpu_seconds")}
        found[name]["start_seconds"] = ready
        rates = {key: round(value, 1) for key, value in found[name].items()}
        print(work, name, rates, flush=True)
    return found


def peers(work: str, ours: Ours, folder: Path) -> dict[str, Any]:
    """Seconds of ours and of the ways, in turns, for each round."""
    dataset, host = WORKS[work]
    rates, epochs = rates_of(64), ours.given.epochs
    ways = {name: Peer(name, work, ours.given, folder, rates) for name in ours.given.ways}
    steps = 64 * epochs * batches_of(dataset, ours.given.batch)
    found: dict[str, Any] = {"ours": []}
    for _ in range(ours.given.rounds):
        members = {"lr": ",".join(map(str, rates))}
        found["ours"].append(ours.epochs(dataset, members, epochs, "--host", host))
        for name, peer in ways.items():
            timed = peer.train(epochs)
            timed.pop("losses")
            found.setdefault(name, []).append(timed)
    for peer in ways.values():
        peer.close()
    for name, rounds in found.items():
        line = f"| {work} | {name} |"
        for key in ("seconds", "cpu_seconds"):
            line += f" {spread([steps / r[key] for r in rounds], 0)} |"
            if name != "ours":
                pairs = zip(rounds, found["ours"], strict=True)
                line += f" {spread([theirs[key] / own[key] for theirs, own in pairs], 2)} |"
        print(line, flush=True)
    return {"network_steps": steps, **found}


def count(work: str, ours: Ours, _: Path) -> dict[str, Any]:
    """Seconds of an equal number of network-steps, by the number of members, for each round."""
    dataset, host = WORKS[work]
    found: dict[str, Any] = {}
    for _ in range(ours.given.rounds):
        for members in (8, 32, 64, 128, 512):
            epochs = 512 * ours.given.epochs // members
            rates = {"lr": ",".join(map(str, rates_of(members)))}
            found.setdefault(str(members), []).append(ours.epochs(dataset, rates, epochs, "--host", host))
    steps = 512 * ours.given.epochs * batches_of(dataset, ours.given.batch)
    for members, rounds in found.items():
        micros = [[1e6 * r[key] / steps for r in rounds] for key in ("seconds", "cpu_seconds")]
        print(f"| {work} | {members} | {spread(micros[0], 0)} | {spread(micros[1], 0)} |", flush=True)
    return {"network_steps": steps, **found}


def mixed(_: str, ours: Ours, __: Path) -> dict[str, Any]:
    """Seconds of one fleet of 8 hosts x 8 rates, and of eight fleets, for each round."""
    epochs, rates = ours.given.epochs, ",".join(map(str, rates_of(8)))
    found: dict[str, Any] = {"one fleet": [], "eight fleets": []}
    for _ in range(ours.given.rounds):
        grid = {"host": "|".join(MIXED), "lr": rates}
        found["one fleet"].append(ours.epochs("mnist1d", grid, epochs))
        each = [ours.epochs("mnist1d", {"lr": rates}, epochs, "--host", host) for host in MIXED]
        sums = {key: sum(e[key] for e in each) for key in ("seconds", "cpu_seconds")}
        found["eight fleets"].append({**sums, "each": each})
    for key in ("seconds", "cpu_seconds"):
        pairs = list(zip(found["one fleet"], found["eight fleets"], strict=True))
        columns = [[r[key] for r in found[name]] for name in found]
        ratio = spread([one[key] / eight[key] for one, eight in pairs], 3)
        print(f"| {key} | {spread(columns[0], 2)} | {spread(columns[1], 2)} | {ratio} |", flush=True)
    return found


def spread(values: list[float], digits: int) -> str:
    """Median, least and largest."""
    numbers = (statistics.median(values), min(values), max(values))
    return "{} ({} to {})".format(*(f"{number:,.{digits}f}" for number in numbers))


def main() -> None:
    commands = {"check": check, "screen": screen, "peers": peers, "count": count, "mixed": mixed}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=commands)
    parser.add_argument("--program", default="target/release/meristem")
    parser.add_argument("--works", default="conv,mlp,images", help=f"of {', '.join(WORKS)}")
    parser.add_argument("--ways", nargs="*", default=[], help="such as 'torch loop 2x1'")
    parser.add_argument("--arrangements", default="1x2,2x1", help="of screen: processes x threads")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=3, help="of screen")
    parser.add_argument("--statistics-batches", default="0", help="the setting of ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="results are added to this file")
    given = parser.parse_args()
    results = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    for work in ["mixed"] if given.command == "mixed" else given.works.split(","):
        with tempfile.TemporaryDirectory() as name:
            ours = Ours(given, Path(name))
            if given.command in ("check", "screen", "peers"):
                prepare(work, ours, Path(name))
            load = [os.getloadavg()[0]]
            found = commands[given.command](work, ours, Path(name))
            load.append(os.getloadavg()[0])
        results[f"{given.command} {work}"] = {"load": load, **found}
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
