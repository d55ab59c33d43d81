"""Runs Meristem's benchmarks and their PyTorch peers in turns, and writes a dated record.

    bench/.venv/bin/python bench/compare.py --out records/NAME.json [WORKLOAD ...]

Every round runs our binary once and every peer once, so that a slow minute of the machine affects
all of them. The result of a workload is the median over the rounds, with minimum and maximum; the
ratio is to the peer arrangement with the best median. A markdown table of the same name is written
next to the JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
WORKLOADS = (
    "host:baseline",
    "host:wide",
    "host:deep",
    "host:large",
    "host:resnet8",
    "host:mobile",
    "host:mlp:256,256",
    "grown:baseline",
    "validation:baseline",
    "epoch:baseline",
    "waits:baseline",
    "waits:minimal",
    "gather",
    "ppo",
    "sum:dense",
    "sum:topk",
)
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16")


@dataclass(frozen=True)
class Contender:
    """A command that prints one JSON object, and the key of the compared number."""

    name: str
    command: tuple[str, ...]
    key: str


@dataclass(frozen=True)
class Workload:
    name: str
    unit: str
    higher_is_better: bool
    ours: Contender
    # Group -> contenders; the best contender of a group is one line of the table.
    peers: dict[str, tuple[Contender, ...]]


# Three live modules, one of them in training.
MODULES = "r0c0=conv_heavy,r0c1=depthwise,r0c2=attention:training"


def host_workload(kind: str, host: str, args: argparse.Namespace) -> Workload:
    work: tuple[str, ...] = ("--validate",) if kind == "validation" else ()
    if kind == "grown":
        work = ("--modules", MODULES)
    size = (*work, "--host", host, "--envs", str(args.envs), "--batch", str(args.batch), "--json")
    script = (args.python, "bench/torch_host.py", *size, "--seconds", str(args.seconds))
    arrangements = tuple(
        Contender(f"PyTorch {a}", (*script, "--arrangement", a), "images_per_s")
        for a in ("1x1", "1x2", "2x1")
    )
    ours = Contender("Meristem", (args.ours, "bench", "host", *size), "images_per_s")
    peers = {"PyTorch eager, channels_last": arrangements}
    if kind != "validation":
        peers["PyTorch compiled, channels_last"] = tuple(
            Contender(f"{eager.name} compiled", (*eager.command, "--compile"), eager.key)
            for eager in arrangements[1:]
        )
    return Workload(f"{kind}:{host}", "images/s", True, ours, peers)


def epoch_workload(host: str, args: argparse.Namespace) -> Workload:
    """Training in two memory formats, and with batches from a DataLoader."""
    size = ("--host", host, "--envs", str(args.envs), "--batch", str(args.batch), "--json")
    script = (args.python, "bench/torch_host.py", *size, "--seconds", str(args.seconds))
    ways = {
        "PyTorch, channels_last": (),
        "PyTorch, NCHW": ("--format", "nchw"),
        "PyTorch, channels_last, DataLoader": ("--loader",),
    }
    peers = {
        name: tuple(
            Contender(f"{name} {a}", (*script, *way, "--arrangement", a), "images_per_s")
            for a in ("1x2", "2x1")
        )
        for name, way in ways.items()
    }
    ours = Contender("Meristem", (args.ours, "bench", "host", *size), "images_per_s")
    return Workload(f"epoch:{host}", "images/s", True, ours, peers)


def waits_workload(host: str, args: argparse.Namespace) -> Workload:
    """Ours with one wait for each block of batches, beside ours with hidden waits."""
    size = ("--host", host, "--envs", str(args.envs), "--batch", str(args.batch), "--json")
    ours = (args.ours, "bench", "host", *size)
    blocking = ("env", "MERISTEM_LAUNCH_BLOCKING=1", *ours)
    ways = {
        "a loss read for each env and batch": (*ours, "--read-losses"),
        "every launch waits": blocking,
    }
    peers = {
        name: (Contender(name, command, "images_per_s"),) for name, command in ways.items()
    }
    return Workload(
        f"waits:{host}", "images/s", True, Contender("Meristem", ours, "images_per_s"), peers
    )


def gather_workload(args: argparse.Namespace) -> Workload:
    script = (args.python, "bench/torch_gather.py", "--json")
    return Workload(
        "gather",
        "µs/batch",
        False,
        Contender("Meristem", (args.ours, "bench", "gather", "--json"), "us_per_batch"),
        {
            "PyTorch DataLoader": (
                Contender("PyTorch DataLoader", script, "dataloader_us_per_batch"),
            ),
            "PyTorch direct indexing": (
                Contender("PyTorch direct indexing", script, "direct_us_per_batch"),
            ),
        },
    )


def ppo_workload(args: argparse.Namespace) -> Workload:
    ours = ("cargo", "bench", "-q", "-p", "meristem-control", "--bench", "policy", "--", "--json")
    peer = Contender("PyTorch", (args.python, "bench/torch_ppo.py", "--json"), "update_us")
    return Workload(
        "ppo", "µs/update", False, Contender("Meristem", ours, "update_us"), {"PyTorch": (peer,)}
    )


def sum_workload(which: str, args: argparse.Namespace) -> Workload:
    """Sum of 16 Mi f32 over two ranks; top-k also against Gloo's dense sum. Needs Open MPI."""
    ours = ("cargo", "bench", "-q", "-p", "meristem-comm", "--bench", "exchange", "--", "--json")
    script = (args.python, "bench/torch_gloo.py", "--json")
    dense = Contender("Gloo, dense", script, "dense_ms")
    # A container runs as root; a small machine has fewer cores than processes.
    launcher = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
    library = (*launcher, args.python, "bench/mpi_allreduce.py", "--json")
    peers = {
        "dense": {
            "Gloo, dense": (dense,),
            "Open MPI, dense": (Contender("Open MPI, dense", library, "dense_ms"),),
        },
        "topk": {
            "Gloo, dense": (dense,),
            "PyTorch top-k over Gloo": (Contender("PyTorch top-k over Gloo", script, "topk_ms"),),
        },
    }
    return Workload(
        f"sum:{which}", "ms", False, Contender("Meristem", ours, f"{which}_ms"), peers[which]
    )


def call(contender: Contender) -> dict[str, Any]:
    """The contender's report: the last line of its output, a JSON object with its key."""
    done = subprocess.run(
        contender.command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode != 0:
        sys.exit(f"{contender.name} failed with {done.returncode}:\n{done.stderr.strip()}")
    try:
        report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        float(report[contender.key])
        return report
    except (IndexError, ValueError, KeyError) as error:
        sys.exit(f"{contender.name}: no `{contender.key}` in its output ({error!r})")


def summary(values: list[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(values), 1),
        "min": round(min(values), 1),
        "max": round(max(values), 1),
        "values": [round(v, 1) for v in values],
    }


def compare(workload: Workload, rounds: int) -> dict[str, Any]:
    """Runs all contenders in turns and compares ours with the best of each group of peers."""
    contenders = [workload.ours, *(c for group in workload.peers.values() for c in group)]
    values: dict[str, list[float]] = {c.name: [] for c in contenders}
    reports: dict[str, dict[str, Any]] = {}
    for number in range(1, rounds + 1):
        said: dict[tuple[str, ...], dict[str, Any]] = {}
        for contender in contenders:
            # One command may report the numbers of two contenders; it runs once per round.
            if contender.command not in said:
                said[contender.command] = call(contender)
            reports[contender.name] = said[contender.command]
            value = float(reports[contender.name][contender.key])
            values[contender.name].append(value)
            print(
                f"{workload.name} round {number}/{rounds}: {contender.name} {value:,.1f}",
                file=sys.stderr,
                flush=True,
            )

    def advantage(ours: float, peer: float) -> float:
        return ours / peer if workload.higher_is_better else peer / ours

    ours = values[workload.ours.name]
    medians = {name: statistics.median(v) for name, v in values.items()}
    ratios: dict[str, Any] = {}
    for group, members in workload.peers.items():
        names = [m.name for m in members]
        best = (max if workload.higher_is_better else min)(names, key=lambda n: medians[n])
        by_round = [advantage(a, b) for a, b in zip(ours, values[best], strict=True)]
        ratios[group] = {
            "best": best,
            "ratio": round(advantage(statistics.median(ours), medians[best]), 3),
            "ratio_min": round(min(by_round), 3),
            "ratio_max": round(max(by_round), 3),
        }
    return {
        "unit": workload.unit,
        "results": {name: summary(v) for name, v in values.items()},
        "ratios": ratios,
        "last_reports": reports,
    }


def output(*command: str) -> str:
    """First line of a command's output, empty where it cannot run."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip().split("\n")[0]


def machine() -> dict[str, Any]:
    """Processor, cores, memory and load, from /proc where it exists."""
    found: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}"}
    found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line]
        fields = {key.strip(): value.strip() for key, value in lines}
        found["cpu"] = fields.get("model name", "")
        found["cpu_family"] = f"{fields.get('cpu family', '')}/{fields.get('model', '')}"
        present = fields.get("flags", "").split()
        found["cpu_flags"] = [flag for flag in CPU_FLAGS if flag in present]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found["memory_gib"] = round(int(meminfo.read_text().split()[1]) / 2**20, 1)
    found["load_before"] = round(os.getloadavg()[0], 2)
    return found


def table(record: dict[str, Any]) -> str:
    """The record as markdown: one line per contender, then one per ratio."""
    host = record["machine"]
    lines = [
        f"# Benchmark of {record['date']}",
        "",
        f"{host.get('cpu', '')} (family/model {host.get('cpu_family', '')}), {host['cores']} cores,"
        f" {', '.join(host.get('cpu_flags', []))}; load {host['load_before']} before the start;"
        f" commit {record['commit']}; {record['rustc']}; PyTorch {record['torch']};"
        f" {record['rounds']} rounds in turns.",
        "",
        "| workload | contender | median | min | max |",
        "|---|---|---:|---:|---:|",
    ]
    for name, result in record["workloads"].items():
        for contender, numbers in result["results"].items():
            cells = " | ".join(f"{numbers[k]:,.1f}" for k in ("median", "min", "max"))
            lines.append(f"| {name} ({result['unit']}) | {contender} | {cells} |")
    lines += [
        "",
        "| workload | compared with the best of | ratio | min | max |",
        "|---|---|---:|---:|---:|",
    ]
    for name, result in record["workloads"].items():
        for group, ratio in result["ratios"].items():
            against = group if ratio["best"] == group else f"{group} ({ratio['best']})"
            lines.append(
                f"| {name} | {against} | {ratio['ratio']:.2f} ×"
                f" | {ratio['ratio_min']:.2f} | {ratio['ratio_max']:.2f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--out", type=Path, required=True, help="JSON file, as records/NAME.json")
    parser.add_argument("--ours", default="target/release/meristem", help="our binary")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with PyTorch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="window of a PyTorch host run")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    chosen = args.workloads or list(WORKLOADS)
    if unknown := [name for name in chosen if name not in WORKLOADS]:
        parser.error(f"unknown workload {unknown[0]}; there are {', '.join(WORKLOADS)}")
    if not (REPOSITORY / args.ours).exists():
        parser.error(f"{args.ours} is not there; run `cargo build --release` first")

    changed = output("git", "status", "--porcelain", "--untracked-files=no")
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": output("git", "rev-parse", "--short=12", "HEAD")
        + ("+changes" if changed else ""),
        "rustc": output("rustc", "--version"),
        "torch": output(args.python, "-c", "import torch; print(torch.__version__)"),
        "python": platform.python_version(),
        "machine": machine(),
        "rounds": args.rounds,
        "workloads": {},
    }
    for name in chosen:
        kind, _, which = name.partition(":")
        match kind:
            case "host" | "grown" | "validation":
                workload = host_workload(kind, which, args)
            case "epoch":
                workload = epoch_workload(which, args)
            case "waits":
                workload = waits_workload(which, args)
            case "sum":
                workload = sum_workload(which, args)
            case "ppo":
                workload = ppo_workload(args)
            case _:
                workload = gather_workload(args)
        record["workloads"][name] = compare(workload, args.rounds)
    record["machine"]["load_after"] = round(os.getloadavg()[0], 2)

    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    markdown = table(record)
    args.out.with_suffix(".md").write_text(markdown)
    print(markdown)


if __name__ == "__main__":
    main()
