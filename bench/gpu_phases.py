"""The phases of `bench/gpu.sh` on a machine with a GPU: `gpu_phases.py correct`, `fast` or `why`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gpu_record import DEVICE, MERISTEM, PACK, PRECISIONS, Record, Stage, helper, run_stages
from gpu_record import setting, small, tests
from gpu_turns import take_turns


def correct_stages() -> list[Stage]:
    """Stages of `correct`, the longest last, so that these are left out when time runs out."""
    checker = ["compute-sanitizer", "--error-exitcode", "9", "--print-limit", "20", "--tool"]
    suite = tests("nn", "conformance::cuda", "--test-threads", "1")
    fault = ("--exact", "cuda::zz_a_fault_fails_every_stream", "--ignored")
    digests = ("--cuda", "--jobs", "2", "--compare", str(PACK / "digests.json"))
    checks = ["devices", "kernels", "residency", "format"] if small() else []
    return [
        Stage("versions", 60, helper("gpu_stages.py", "versions"), ("nvidia-smi", "nvcc")),
        Stage("check", 90, [MERISTEM, "check", *checks, "--device", DEVICE]),
        Stage("device_lib", 60, tests("device-lib", "cuda")),
        Stage("device", 90, tests("device", "cuda")),
        Stage("fault", 30, tests("device", *fault)),
        Stage("data", 60, tests("data", "cuda")),
        Stage("nn", 120, tests("nn", "cuda")),
        Stage("comm", 60, tests("comm", "cuda")),
        Stage("control", 30, tests("control-lib", "gpu")),
        Stage("digests", 120, helper("digests.py", MERISTEM, *digests)),
        Stage("killed", 60, helper("gpu_stages.py", "killed")),
        Stage("loss", 90, helper("gpu_stages.py", "loss")),
        Stage("memcheck", 150, [*checker, "memcheck", *suite], ("compute-sanitizer",)),
        Stage("racecheck", 240, [*checker, "racecheck", *suite], ("compute-sanitizer",)),
    ]


def why_stages() -> list[Stage]:
    """Launches of one training step after the warm-up, kernel by kernel."""
    sections = ["SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats"]
    words = [word for section in sections for word in ("--section", section)]
    bench = [MERISTEM, "bench", "host", "--device", DEVICE, "--envs", "64", "--seconds", "0.1"]
    # A graph is profiled node by node; the first step is the warm-up of ncu itself.
    ncu = ["ncu", "--graph-profiling", "node", "--clock-control", "none", "--csv", "--page", "raw"]
    count = ["--launch-skip", setting("SKIP", "100"), "--launch-count", setting("LAUNCHES", "60")]
    command = helper("gpu_stages.py", "kernels", *ncu, *count, *words, *bench)
    return [Stage("ncu", 540, command, ("ncu",))]


def peers() -> Iterator[tuple[str, str, str]]:
    """Family, arrangement and precision of the peers."""
    chosen = setting("PEERS", "").split()
    if chosen:
        for name in chosen:
            family, arrangement, precision = name.split(":")
            yield family, arrangement, precision
        return
    for arrangement in ("eager", "graphs", "compile", "compile-graphs", "vmap", "vmap-graphs"):
        for precision in PRECISIONS:
            yield "torch", arrangement, precision
    for precision in PRECISIONS:
        yield "jax", "scan", precision


def not_green(record: Record) -> str | None:
    """The reason why this build has no green `correct` on this GPU; `None` if it has."""
    lines = [line for line in record.lines() if line["phase"] == "correct"]
    lines = [line for line in lines if all(line[key] == record.common[key] for key in ("build", "gpu"))]
    if not lines:
        return "`correct` has not run for this build on this GPU"
    newest = max(line["started"] for line in lines)
    results = {line["stage"]: line for line in lines if line["started"] == newest}
    names = [stage.name for stage in correct_stages()]
    bad = [name for name in names if results.get(name, {}).get("exit") != 0]
    return f"`correct` is not green: {', '.join(bad)}" if bad else None


def phase_fast(record: Record) -> int:
    reason = not_green(record)
    if reason and setting("ANYWAY", "0") != "1":
        print(f"gpu.sh: {reason}; figures of `fast` do not count without it (GPU_ANYWAY=1 runs it anyway)")
        return 2
    if record.common["gpu"] is None:
        reason = reason or "there is no GPU"
    take_turns(record, list(peers()), {"counts": reason is None, "why_not": reason})
    return 0


def main() -> int:
    (phase,) = sys.argv[1:]
    record = Record(phase)
    if phase == "fast":
        return phase_fast(record)
    stages = correct_stages() if phase == "correct" else why_stages()
    return 0 if run_stages(record, stages) else 1


if __name__ == "__main__":
    sys.exit(main())
