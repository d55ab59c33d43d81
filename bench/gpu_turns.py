"""Phase `fast` of `bench/gpu.sh`: ceilings of the GPU, our throughput, and turns of ours and the peers.

Peers stay alive between turns: each starts once, compiles, warms up, reports `ready`, and then
trains for some seconds per request. Ours and the peers are grouped by precision, so that memory
suffices and equal precisions are compared. Ours restarts for each turn; its start and warm-up are
outside of the measured time.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_record import BENCH, DEVICE, MERISTEM, PRECISIONS, Record, Stage, environment
from gpu_record import run_stages, setting, small

SECONDS = setting("SECONDS", "0.1" if small() else "1")
ROUNDS = int(setting("ROUNDS", "1" if small() else "3"))
ENVS = setting("ENVS", "1 2" if small() else "1 4 16 64 128").split()
PEER_ENVS = setting("PEER_ENVS", "2" if small() else "64")
HOST = setting("HOST", "minimal" if small() else "baseline")
BATCH = setting("BATCH", "4" if small() else "128")
# `cpu` tries the peers' scripts without a GPU.
PEER_DEVICE = setting("PEER_DEVICE", "cuda")

Values = dict[str, list[float]]


def summary(values: Values) -> dict[str, Any]:
    """Median and spread of each contender."""
    return {
        name: {"median": statistics.median(v), "min": min(v), "max": max(v), "values": v}
        for name, v in values.items()
        if v
    }


def ours(envs: str, precision: str, seconds_max: float) -> float:
    """Images per second of one turn of ours."""
    which = ["--envs", envs, "--precision", precision]
    words = ["--host", HOST, "--device", DEVICE, "--batch", BATCH, "--seconds", SECONDS, "--json"]
    done = subprocess.run(
        [MERISTEM, "bench", "host", *which, *words],
        env=environment(), capture_output=True, text=True, timeout=seconds_max, check=True,
    )  # fmt: skip
    return float(json.loads(done.stdout)["images_per_s"])


class Peer:
    """A script that trains on request."""

    def __init__(self, family: str, arrangement: str, precision: str) -> None:
        self.name = f"{family}:{arrangement}:{precision}"
        words = ["--arrangement", arrangement, "--precision", precision, "--device", PEER_DEVICE]
        words += ["--host", HOST, "--envs", PEER_ENVS, "--batch", BATCH]
        self.errors = Path(f"gpu-{self.name.replace(':', '-')}.err")
        # JAX would take most of the memory for itself.
        variables = environment() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(BENCH / f"{family}_gpu.py"), *words],
                env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    def line(self, end: float) -> dict[str, Any]:
        """The next object that the script prints; a `RuntimeError` if none comes before `end`."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))
        text = self.process.stdout.readline() if ready else b""
        if not text:
            why = "ended" if ready else "took too long"
            raise RuntimeError(f"{why}: {self.errors.read_text(errors='replace')[-1500:]}")
        found: dict[str, Any] = json.loads(text)
        return found

    def turn(self, end: float) -> float:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{SECONDS}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `line` says why it ended
        return float(self.line(end)["images_per_s"])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.unlink(missing_ok=True)


def sweep(record: Record, end: float, marks: dict[str, Any]) -> None:
    """Ours for each number of hosts, in f32."""
    values: Values = {f"ours:{envs}": [] for envs in ENVS}
    problems = {}
    for _ in range(ROUNDS):
        for envs in ENVS:
            name = f"ours:{envs}"
            try:
                if name not in problems:
                    left = max(1, min(60, end - time.monotonic()))
                    values[name].append(ours(envs, "f32", left))
            except (subprocess.SubprocessError, ValueError) as error:
                problems[name] = f"{error} {getattr(error, 'stderr', '')}"[-1500:]
    results = summary(values)
    record.add(stage="ours", results=results, problems=problems, exit=len(problems), **marks)
    show("ours", results, problems)


def compare(
    record: Record, precision: str, peers: list[Peer], end: float, marks: dict[str, Any]
) -> None:
    """Turns of ours and the peers at one precision; ours alone if there are no peers."""
    mine = f"ours:{PEER_ENVS}:{precision}"
    values: Values = {name: [] for name in [mine, *(peer.name for peer in peers)]}
    problems: dict[str, str] = {}
    ready = {}
    limit = min(end, time.monotonic() + float(setting("LIMIT_peers", "110")))
    turns: list[Any] = []
    for peer in peers:
        try:
            ready[peer.name] = peer.line(limit)
            turns.append(peer)
        except (RuntimeError, ValueError) as error:
            problems[peer.name] = str(error)
            peer.close()
    for _ in range(ROUNDS):
        for peer in [None, *turns]:
            name = mine if peer is None else peer.name
            until = min(end, time.monotonic() + 30)
            try:
                if name not in problems:
                    left = max(1, until - time.monotonic())
                    if peer is None:
                        values[name].append(ours(PEER_ENVS, precision, left))
                    else:
                        values[name].append(peer.turn(until))
            except (RuntimeError, ValueError, subprocess.SubprocessError) as error:
                problems[name] = str(error)[-1500:]
    results = summary(values)
    record.add(stage=f"turns_{precision}", results=results, problems=problems, ready=ready,
               exit=len(problems), **marks)  # fmt: skip
    show(f"turns_{precision}", results, problems)


def show(title: str, results: dict[str, Any], problems: dict[str, str]) -> None:
    print(f"{title}, images/s")
    for name, of in results.items():
        print(f"  {name:26} {of['median']:14,.0f}   {of['min']:,.0f} to {of['max']:,.0f}")
    for name, problem in problems.items():
        last = (problem.strip().splitlines() or ["no message"])[-1]
        print(f"  {name:26} failed: {last}")
    sys.stdout.flush()


def lacking(family: str) -> str | None:
    """The reason why peers of a family cannot run here."""
    test = {"torch": "torch.cuda.is_available()", "jax": "jax.default_backend() == 'gpu'"}[family]
    test = "True" if PEER_DEVICE == "cpu" else test
    code = f"import {family}, sys; sys.exit(0 if {test} else 3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment())
    if done.returncode == 0:
        return None
    return f"{family} sees no GPU" if done.returncode == 3 else f"there is no {family}"


def take_turns(record: Record, peers: list[tuple[str, str, str]], marks: dict[str, Any]) -> None:
    """The whole phase. All its results in the record carry `marks`: whether they count."""
    end = time.monotonic() + float(setting("PHASE_SECONDS", "570"))
    if not marks["counts"]:
        print(f"these results do not count: {marks['why_not']}")
    missing = {family: lacking(family) for family in {family for family, _, _ in peers}}
    for family, reason in missing.items():
        if reason:
            record.add(stage=f"peers_{family}", exit=None, skipped=reason, **marks)
            print(f"peers of {family} skipped: {reason}")
    peers = [peer for peer in peers if missing[peer[0]] is None]
    command = [sys.executable, str(BENCH / "torch_gpu.py"), "--ceilings", "--device", PEER_DEVICE]
    bench = [MERISTEM, "bench"]
    more = ["--device", DEVICE, "--batch", BATCH, "--seconds", SECONDS, "--json"]
    stages = [
        Stage("ceilings", 60, command, ("import torch",)),
        Stage("gather", 40, [*bench, "gather", *more]),
        Stage("several", 40, [*bench, "counterfactual", "--host", HOST, "--slots",
                              "r0c0" if HOST == "minimal" else "r0c0,r0c1,r0c2", *more]),
    ]  # fmt: skip
    run_stages(record, stages, **marks)
    sweep(record, end, marks)
    for precision in PRECISIONS:
        if time.monotonic() > end:
            record.add(stage=f"turns_{precision}", exit=None, skipped="no time is left", **marks)
            continue
        started = [Peer(*peer) for peer in peers if peer[2] == precision]
        try:
            compare(record, precision, started, end, marks)
        finally:
            for peer in started:
                peer.close()
    os.sync()
