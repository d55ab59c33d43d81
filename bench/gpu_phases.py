"""The phases of `bench/gpu.sh` on a machine with a GPU: `gpu_phases.py correct`, `fast` or `why`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gpu_record import DEVICE, MERISTEM, PACK, PRECISIONS, Record, Stage, helper, is_green
from gpu_record import phase_end, run_stages, setting, small, tests
from gpu_turns import take_turns


def correct_stages() -> list[Stage]:
    """Stages of `correct`: compute-sanitizer last, which takes longest and refuses some machines."""
    checker = ["compute-sanitizer", "--error-exitcode", "9", "--print-limit", "20", "--tool"]
    suite = tests("nn", "conformance::cuda", "--include-ignored", "--test-threads", "1")
    fault = ("--exact", "cuda::alone_a_fault_fails_every_stream", "--ignored")
    digests = ("--cuda", "--jobs", "2", "--compare", str(PACK / "digests.json"))
    # Faults of the stand-in's NCCL.
    of_a_gpu = ("cuda", "--include-ignored", "--skip", "cuda::exchange", "--skip", "alone_")
    checks = ["devices", "kernels", "residency", "format"] if small() else []
    return [
        Stage("versions", 60, helper("gpu_stages.py", "versions"), ("nvidia-smi", "nvcc")),
        Stage("check", 90, [MERISTEM, "check", *checks, "--device", DEVICE]),
        Stage("device_lib", 60, tests("device-lib", "cuda", "--include-ignored")),
        Stage("device", 90, tests("device", *of_a_gpu)),
        Stage("fault", 30, tests("device", *fault)),
        Stage("data", 60, tests("data", "cuda", "--include-ignored")),
        Stage("nn", 120, tests("nn", "cuda", "--include-ignored")),
        Stage("comm", 60, tests("comm", "cuda", "--include-ignored")),
        Stage("control", 30, tests("control-lib", "gpu", "--include-ignored")),
        Stage("digests", 120, helper("digests.py", MERISTEM, *digests)),
        Stage("killed", 60, helper("gpu_stages.py", "killed")),
        Stage("loss", 90, helper("gpu_stages.py", "loss")),
        Stage("memcheck", 150, [*checker, "memcheck", *suite], ("compute-sanitizer",), gates=False),
        Stage("racecheck", 240, [*checker, "racecheck", *suite], ("compute-sanitizer",), gates=False),
    ]


def why_stages() -> list[Stage]:
    """Launches of one training step after the warm-up, kernel by kernel."""
    sections = ["SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis"]
    sections += ["SchedulerStats", "Occupancy", "LaunchStats"]
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
    # Each precision has its turn before the next arrangement begins.
    kinds = [("torch", of) for of in ("eager", "graphs", "compile-graphs")]
    kinds += [("jax", "scan")] + [("torch", of) for of in ("compile", "vmap-graphs", "vmap")]
    for family, arrangement in kinds:
        for precision in PRECISIONS:
            yield family, arrangement, precision


def not_green(record: Record, chosen: list[str] | None = None) -> str | None:
    """The reason why `correct`, or its chosen stages, do not stand for this build on this GPU: the
    newest result of each stage counts, from whichever call."""
    newest = record.newest("correct")
    if not newest:
        return "`correct` has not run for this build on this GPU"
    gates = [stage.name for stage in correct_stages() if stage.gates]
    bad = [name for name in chosen or gates if not is_green(newest.get(name))]
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
    run_stages(record, correct_stages() if phase == "correct" else why_stages(), phase_end())
    if phase == "why":
        return 0 if is_green(record.newest(phase).get("ncu")) else 1
    reason = not_green(record, setting("STAGES", "").split())
    print(f"gpu.sh: {reason}" if reason else "gpu.sh: all of these stages are green")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
