"""Phase `fast` of `bench/gpu.sh`: ceilings of the GPU, our throughput, and turns of ours and the peers.

Peers come one after another, so that no two of them share the memory, each with ours at the same
precision. A peer starts once, compiles and warms up, says `ready`, and then trains for some seconds
whenever it is asked to; ours and the peer take turns. Ours starts anew for each turn; its start and
its warm-up are outside the time that it measures.
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

from gpu_record import BENCH, DEVICE, MERISTEM, PRECISIONS, Record, Stage, environment, is_green
from gpu_record import phase_end, run_stages, setting, small

SECONDS = setting("SECONDS", "0.1" if small() else "1")
ROUNDS = int(setting("ROUNDS", "1" if small() else "3"))
ENVS = setting("ENVS", "1 2" if small() else "1 4 16 64 128").split()
PEER_ENVS = setting("PEER_ENVS", "2" if small() else "64")
HOST = setting("HOST", "minimal" if small() else "baseline")
BATCH = setting("BATCH", "4" if small() else "128")
# `cpu` tries the peers' scripts without a GPU.
PEER_DEVICE = setting("PEER_DEVICE", "cuda")

Values = dict[str, list[float]]
# Family, arrangement, precision.
PeerSpec = tuple[str, str, str]


def stage_of(spec: PeerSpec) -> str:
    """Name of the turns of ours and a peer."""
    return "turns:" + ":".join(spec)


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
    """Ours for each number of hosts in f32, and at the other precisions for the peers' number."""
    kinds = [(envs, "f32") for envs in ENVS]
    kinds += [(PEER_ENVS, precision) for precision in PRECISIONS if precision != "f32"]
    values: Values = {f"ours:{envs}:{precision}": [] for envs, precision in kinds}
    problems = {}
    for _ in range(ROUNDS):
        for name, (envs, precision) in zip(values, kinds, strict=True):
            try:
                if name not in problems:
                    left = max(1, min(60, end - time.monotonic()))
                    values[name].append(ours(envs, precision, left))
            except (subprocess.SubprocessError, ValueError) as error:
                problems[name] = f"{error} {getattr(error, 'stderr', '')}"[-1500:]
    results = summary(values)
    record.add(stage="ours", results=results, problems=problems, exit=len(problems), **marks)
    show("ours", results, problems)


def compare(record: Record, spec: PeerSpec, end: float, marks: dict[str, Any]) -> None:
    """Ours and one peer in turns."""
    mine = f"ours:{PEER_ENVS}:{spec[2]}"
    peer = Peer(*spec)
    values: Values = {mine: [], peer.name: []}
    problems: dict[str, str] = {}
    ready = None
    try:
        ready = peer.line(min(end, time.monotonic() + float(setting("LIMIT_peers", "110"))))
        for _ in range(ROUNDS):
            until = min(end, time.monotonic() + 30)
            values[mine].append(ours(PEER_ENVS, spec[2], max(1, until - time.monotonic())))
            values[peer.name].append(peer.turn(min(end, time.monotonic() + 30)))
    except (RuntimeError, ValueError) as error:
        problems[peer.name] = str(error)[-1500:]
    except subprocess.SubprocessError as error:
        problems[mine] = f"{error} {getattr(error, 'stderr', '')}"[-1500:]
    finally:
        peer.close()
    # A peer that the phase had no time for has no result, and comes again.
    late = bool(problems) and time.monotonic() >= end
    results, stage = summary(values), stage_of(spec)
    record.add(stage=stage, results=results, problems=problems, ready=ready,
               exit=None if late else len(problems), **marks)  # fmt: skip
    show(stage, results, problems)


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


def take_turns(record: Record, peers: list[PeerSpec], marks: dict[str, Any]) -> None:
    """The whole phase. Everything that it adds to the record has `marks`: whether it counts. What a
    call before this one has measured is not measured again."""
    end = phase_end()
    if not marks["counts"]:
        print(f"these results do not count: {marks['why_not']}")
    missing = {family: lacking(family) for family in {family for family, _, _ in peers}}
    for family, reason in missing.items():
        if reason:
            record.add(stage=f"peers_{family}", exit=None, skipped=reason, **marks)
            print(f"peers of {family} skipped: {reason}")
    command = [sys.executable, str(BENCH / "torch_gpu.py"), "--ceilings", "--device", PEER_DEVICE]
    bench = [MERISTEM, "bench"]
    more = ["--device", DEVICE, "--batch", BATCH, "--seconds", SECONDS, "--json"]
    stages = [
        Stage("ceilings", 60, command, ("import torch",)),
        Stage("gather", 40, [*bench, "gather", *more]),
        Stage("several", 40, [*bench, "counterfactual", "--host", HOST, "--slots",
                              "r0c0" if HOST == "minimal" else "r0c0,r0c1,r0c2", *more]),
    ]  # fmt: skip
    run_stages(record, stages, end, **marks)
    known = {} if setting("AGAIN", "0") == "1" else record.newest("fast")
    if not is_green(known.get("ours"), marks):
        sweep(record, end, marks)
    for spec in peers:
        if missing[spec[0]] or is_green(known.get(stage_of(spec)), marks):
            continue
        if time.monotonic() > end:
            record.add(stage=stage_of(spec), exit=None, skipped="no time is left", **marks)
            print(f"{stage_of(spec)} skipped: no time is left")
            continue
        compare(record, spec, end, marks)
    os.sync()
