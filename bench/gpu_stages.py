"""Stages of `gpu_phases.py` that are more than one command: `gpu_stages.py STAGE`.

    versions   driver, GPU, nvcc, PyTorch and JAX
    killed     a killed and resumed run has the results of an undisturbed run
    loss       losses on the GPU and on the processor, step by step, and at lower precision
    kernels    ncu with the following arguments; prints its kernels by time
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from digests import GROW, Run, arguments, differences, small_images
from gpu_record import DEVICE, MERISTEM, PRECISIONS, setting, small
from result_parts import folder_parts

HOST: dict[str, Any] = {"devices": DEVICE, "host": "minimal", "envs": 2, "batch": 16, "control-split": 0.2}
HOST |= {"dataset": "arrays", "data-root": "images.safetensors"}


def versions() -> int:
    query = "--query-gpu=name,driver_version,compute_cap,memory.total,clocks.max.sm,clocks.max.mem"
    codes = [subprocess.run(["nvidia-smi", query, "--format=csv"]).returncode]
    codes.append(subprocess.run(["nvcc", "--version"]).returncode)
    for module in ("torch", "jax", "numpy", "safetensors"):
        code = f"import {module}; print('{module}', {module}.__version__)"
        if subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode:
            print(f"there is no {module}", flush=True)
    return max(codes)


def completed(folder: Path) -> list[dict[str, Any]]:
    """The step events that a run has written so far."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # A run in progress may have written a part of its last line.
    return [json.loads(line) for line in lines if '"step_completed"' in line and line.endswith("\n")]


def killed() -> int:
    Path("images.safetensors").write_bytes(small_images())
    steps = 16 if small() else 200
    settings = GROW | HOST | {"slots": "r0,r1", "steps": steps, "checkpoint-every": 2}
    runs = [Run(name, settings, isa="portable") for name in ("whole", "killed")]
    subprocess.run([MERISTEM, *arguments(runs[0], {})], check=True)
    child = subprocess.Popen([MERISTEM, *arguments(runs[1], {})])
    while child.poll() is None and len(completed(Path("killed"))) < 10:
        time.sleep(0.002)
    child.kill()
    if child.wait() != -signal.SIGKILL:
        print(f"the run ended with {child.returncode} before it was killed")
        return 1
    subprocess.run([MERISTEM, "train", "--quiet", "--resume", "killed"], check=True)
    whole, resumed = folder_parts(Path("whole")), folder_parts(Path("killed"))
    found, _ = differences(whole, resumed)
    print("\n".join(found) or f"killed after {steps} steps or fewer, and resumed: the same bits")
    return 1 if found else 0


def losses(name: str, isa: str, settings: dict[str, Any]) -> list[float]:
    """Training loss of each env in each step."""
    words = arguments(Run(name, settings), {})
    subprocess.run([MERISTEM, *words], check=True, env=os.environ | {"MERISTEM_ISA": isa})
    return [step["train_loss"] for step in completed(Path(name))]


def loss() -> int:
    """Compares the losses of the GPU with two instruction sets of the processor. The distance
    between the two sets measures the effect of rounding on training. The GPU's distance may be ten
    times that, or a thousandth, as in the tests of short runs. At lower precision the loss must
    fall."""
    settings: dict[str, Any] = {"controller": "none", "steps": 5}
    settings |= {"host": setting("HOST", "baseline"), "envs": 4, "batch": 128, "epoch": "full"}
    settings |= {"max-batches": "all", "control-split": 0.1}
    if small():
        Path("images.safetensors").write_bytes(small_images())
        settings |= HOST | {"steps": 3, "max-batches": 4}
    settings.pop("devices", None)
    other = losses("portable", "portable", settings)
    cpu = losses("cpu", "avx2", settings)
    settings |= {"devices": DEVICE}
    gpu, *rounded = (losses(of, "avx2", settings | {"precision": of}) for of in PRECISIONS)
    apart = max(abs(a - b) for a, b in zip(cpu, other, strict=True))
    allowed = max(10 * apart, 1e-3 * max(cpu))
    print("     cpu portable  gpu f32     tf32     bf16")
    for row in zip(cpu, other, gpu, *rounded, strict=True):
        print(" ".join(f"{value:8.5f}" for value in row))
    farthest = max(abs(a - b) for a, b in zip(gpu, cpu, strict=True))
    print(f"farthest from the processor: {farthest:.2e}, allowed {allowed:.2e}")
    # Losses are ordered by step, then env. Both tests fail for NaN.
    envs = settings["envs"]
    learns = all(sum(of[-envs:]) < sum(of[:envs]) for of in rounded)
    print(f"the loss falls at lower precision: {learns}")
    return 0 if farthest <= allowed and learns else 1


def kernels(command: list[str]) -> int:
    """Launches by kernel: share of the time, achieved bandwidth, occupancy."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode != 0 or len(lines) < 3:
        print(done.stdout[-3000:])
        return done.returncode or 1
    # The second line has the units.
    names = next(csv.reader(lines[:1]))
    units = dict(zip(names, next(csv.reader(lines[1:2])), strict=True))
    columns = {
        "time": "gpu__time_duration.sum",
        "bandwidth %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
        "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "fma %": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    }
    rows = list(csv.DictReader([lines[0], *lines[2:]]))
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        values = [float((row.get(key) or "nan").replace(",", "")) for key in columns.values()]
        found.setdefault(row["Kernel Name"], []).append(values)
    total = sum(values[0] for launches in found.values() for values in launches)
    print(f"time in {units.get(columns['time'])}; {', '.join(columns)} by kernel")
    by_time = sorted(found.items(), key=lambda item: -sum(values[0] for values in item[1]))
    for name, launches in by_time[:15]:
        time_sum = sum(values[0] for values in launches)
        # Means weighted by time.
        means = [sum(v[0] * v[i] for v in launches) / time_sum for i in range(1, len(columns))]
        rates = " ".join(f"{mean:6.1f}" for mean in means)
        print(f"{time_sum / total:6.1%} {time_sum:10.1f} {rates}  {len(launches):3} x {name[:60]}")
    return 0


if __name__ == "__main__":
    stage, *words = sys.argv[1:]
    if stage == "kernels":
        sys.exit(kernels(words))
    sys.exit({"versions": versions, "killed": killed, "loss": loss}[stage]())
