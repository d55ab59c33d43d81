"""Digests of the results of many short runs, for comparison with another build.

    python3 bench/digests.py target/release/meristem --save before.json
    python3 bench/digests.py target/release/meristem --compare before.json

Equal digests mean equal bits of weights, events, checkpoints, policies and summaries. Every run is
on the embedded data, with few batches and steps. Together the runs cover hosts, controllers, every
blueprint and blending style, ranks, exchanges, instruction sets, numbers of threads, and resuming.
With `--cuda` a few runs on `cuda:0` replace them, for builds with the feature `cuda`.

A result is digested field by field, so that a difference has a name (`events:
step_completed.train_loss`). Fields, events and tensors of a checkpoint's controller that the other
table lacks are counted, but are no difference, because later versions may add some. A missing one
is a difference.

Rows marked as equal to another row (more threads, a resume) are also compared with that row of the
same table. Instruction sets that this machine lacks are left out. The head of `result_parts.py`
lists the parts that are no results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from result_parts import Parts, digest, folder_parts, output_parts

# Row -> column -> parts.
Table = dict[str, dict[str, Parts]]

BLUEPRINTS = "norm attention depthwise bottleneck conv_small conv_light conv_heavy".split()
STYLES = ["linear_add", "linear_multiply", "sigmoid_add", "linear_gate"]
TEMPI = ["fast", "standard", "slow"]
CURVES = ["linear", "cosine", "sigmoid_gentle", "sigmoid", "sigmoid_sharp"]
HOSTS = ["baseline", "wide", "cnn:channels=12,blocks=2,kernel=5,pools=2", "impaired", "minimal"]
EXCHANGES = ["dense", "topk:0.01", "gtopk:0.01", "ok-topk:0.01"]

# Vectors of most rows, and instruction sets of x86-64 with the flag of /proc/cpuinfo that each requires.
VECTORS = "neon" if platform.machine() in ("aarch64", "arm64") else "avx2"
X86_FLAGS = {"avx2": "avx2", "avx512": "avx512f", "avx512-256": "avx512f"}

@dataclass
class Run:
    """A row: a command, and the file or run folder that it writes."""

    name: str
    settings: dict[str, Any]
    command: str = "train"
    isa: str = VECTORS
    quick: bool = False
    same_as: str | None = None
    resume_at: tuple[int, int] | None = None
    script_envs: int = 0
    words: list[str] = field(default_factory=list)
    # A flag and its value, omitted for builds without the flag, whose behaviour is this value.
    newer: tuple[str, str] | None = None

    def folder(self) -> str:
        return self.name.translate(str.maketrans(" :,=", "----"))


def script(envs: int) -> str:
    """Actions for `controller fixed:`: env e grows blueprint e, with every kind of blending.

    The module in r0c0 passes all stages, changes its style and target, and becomes permanent. The
    module in r0c1 blends at the same time and is pruned gradually.
    """
    lines = []
    for env in range(envs):
        style, curve = STYLES[env % 4], CURVES[env % 5]
        first = {"slot": "r0c0", "blueprint": BLUEPRINTS[env % 7], "style": style}
        second = {"slot": "r0c1", "blueprint": BLUEPRINTS[(env + 3) % 7], "style": STYLES[env // 4]}
        aim = {"style": STYLES[(env + 2) % 4], "alpha_target": ["0.5", "1.0"][env % 2]}
        actions = {
            0: {"op": "GERMINATE", **first, "tempo": "fast", "alpha_target": "0.7"},
            1: {"op": "ADVANCE", "slot": "r0c0"},
            3: {"op": "ADVANCE", "slot": "r0c0"},
            4: {"op": "GERMINATE", **second, "tempo": "fast"},
            5: {"op": "ADVANCE", "slot": "r0c1"},
            7: {"op": "ADVANCE", "slot": "r0c1"},
            8: {"op": "ADVANCE", "slot": "r0c0"},
            9: {"op": "SET_ALPHA_TARGET", "slot": "r0c0", **aim, "alpha_speed": "fast"},
            11: {"op": "ADVANCE", "slot": "r0c1"},
            12: {"op": "PRUNE", "slot": "r0c1", "alpha_speed": "fast", "alpha_curve": curve},
            13: {"op": "ADVANCE", "slot": "r0c0"},
            14: {"op": "FOSSILIZE", "slot": "r0c0"},
        }
        actions[9]["alpha_curve"] = curve
        lines += [json.dumps({"step": step, "env": env, **a}) for step, a in actions.items()]
    return "\n".join(lines) + "\n"


# Preset quick deals the samples out to the envs, like builds without `--epoch`.
BASE = {"preset": "quick", "rounds": 1, "steps": 4, "max-batches": 2, "control-split": 0.01}
BASE |= {"host": "baseline", "envs": 2, "threads": 1, "checkpoint-every": 2, "seed": 42}
SCRIPT = {"steps": 16, "max-batches": 1, "batch": 32, "min-training-steps": 1}
SCRIPT |= {"min-contribution": -100, "checkpoint-every": 5}
LEARN = {"controller": "ppo", "envs": 4, "rounds": 2, "steps": 3}
# The heuristic germinates modules that it can finish, within a budget, if hosts do not overfit.
GROW = {"controller": "heuristic", "steps": 9, "min-training-steps": 1, "min-contribution": -100}
GROW |= {"parameters-per-image": 99, "max-gap": 99}
TOGETHER = {"data-parallel": True, "ranks": 2, "envs": 1}
SHARE = GROW | TOGETHER


def scripted(name: str, envs: int = 7, **more: Any) -> Run:
    settings = {"controller": f"fixed:script-{envs}.jsonl", "envs": envs, **SCRIPT}
    run = Run(name, settings, script_envs=envs)
    run.settings |= more.pop("settings", {})
    run.__dict__.update(more)
    return run


def first_runs() -> list[Run]:
    """Rows whose files are inputs of other rows."""
    bare = {"controller": "none", "log-batches": True}
    # Without a choice of actions, a policy's file does not depend on their sampling.
    forced = LEARN | {"max-modules": 0, "policy-hidden": 64}
    return [
        Run("baseline none", bare, quick=True),
        Run("ppo without choice", forced, quick=True),
    ]


def rows_of_hosts() -> Iterator[Run]:
    for host in HOSTS:
        plain, name = host == "baseline", host.partition(":")[0]
        if host != "impaired":
            script = scripted(f"{name} script", 7 if plain else 4, quick=plain)
            script.settings["host"] = host
            yield script
        for controller in ("none", "heuristic", "random", "ppo"):
            if not plain or controller != "none":
                settings = {"host": host, "controller": controller, "steps": 6}
                settings |= GROW if controller == "heuristic" else {}
                yield Run(f"{name} {controller}", settings, quick=plain)
    large = {"host": "large", "envs": 1, "steps": 2}
    yield Run("large none", large | {"controller": "none"})
    yield Run("large heuristic", large | GROW)


def rows_of_ranks() -> Iterator[Run]:
    for exchange in EXCHANGES:
        quick = exchange == "topk:0.01"
        both = {"ranks": 2, "exchange": exchange}
        yield Run(f"ppo ranks=2 {exchange}", LEARN | both, quick=quick)
        yield Run(f"data-parallel ranks=2 {exchange}", SHARE | both, quick=quick)
    long = LEARN | {"steps": 12, "max-batches": 1, "min-training-steps": 1}
    yield Run("ppo long", long)
    yield Run("ppo long ranks=2 dense", long | {"ranks": 2})
    three = {"ranks": 3, "exchange": "gtopk:0.05"}
    yield Run("ppo ranks=3 gtopk:0.05", LEARN | three | {"envs": 3})
    yield Run("data-parallel ranks=3 gtopk:0.05", SHARE | three | {"batch": 51})
    for exchange in ("dense", "topk:0.05"):
        settings = {**TOGETHER, "exchange": exchange, "controller": "fixed:script-1.jsonl"}
        name = f"data-parallel script {exchange}"
        yield scripted(name, 1, settings=settings, quick=exchange == "dense")
    yield Run("data-parallel wide topk:0.01", SHARE | {"host": "wide", "exchange": "topk:0.01"})


def rows_of_machines() -> Iterator[Run]:
    """Instruction sets, and numbers of threads, which do not affect results."""
    for isa in ("portable", "avx512", "avx512-256"):
        yield Run(f"{isa} none", {"controller": "none"}, isa=isa, quick=True)
        yield scripted(f"{isa} script", 4, isa=isa, quick=isa == "avx512")
        cnn = GROW | {"host": HOSTS[2], "envs": 1}
        yield Run(f"{isa} cnn heuristic", cnn, isa=isa)
        yield Run(f"{isa} wide none", {"host": "wide", "controller": "none", "envs": 1}, isa=isa)
        yield Run(f"{isa} large none", {"host": "large", "controller": "none", "envs": 1}, isa=isa)
        yield Run(f"{isa} ppo", LEARN, isa=isa, quick=isa == "avx512")
        greedy = {"controller": "greedy:ppo-without-choice/policy.safetensors"}
        yield Run(f"{isa} greedy", greedy, isa=isa)
        yield Run(f"{isa} data-parallel", SHARE | {"exchange": "topk:0.01"}, isa=isa)
    for threads in (2, 4):
        more = {"threads": threads}
        same = "baseline script"
        quick = threads == 2
        yield scripted(f"{same} threads={threads}", settings=more, same_as=same, quick=quick)
        same = "ppo ranks=2 topk:0.01"
        both = {"ranks": 2, "exchange": "topk:0.01"}
        yield Run(f"{same} threads={threads}", LEARN | both | more, same_as=same)
        same = "ppo without choice"
        forced = LEARN | {"max-modules": 0, "policy-hidden": 64}
        yield Run(f"{same} threads={threads}", forced | more, same_as=same)
        same = "wide none"
        wide = {"host": "wide", "controller": "none", "steps": 6}
        yield Run(f"{same} threads={threads}", wide | more, same_as=same)


def rows_of_resumes() -> Iterator[Run]:
    """Runs that lose everything after a checkpoint, resume, and end like undisturbed runs."""
    yield scripted("baseline script resumed", resume_at=(0, 10), same_as="baseline script")
    ppo = LEARN | {"checkpoint-every": 1}
    yield Run("ppo", ppo)
    yield Run("ppo resumed", ppo, resume_at=(1, 1), same_as="ppo", quick=True)
    for name, base in (("ppo", LEARN), ("data-parallel", SHARE)):
        same = f"{name} ranks=2 topk:0.01"
        settings = base | {"ranks": 2, "exchange": "topk:0.01"}
        at = (1, 0) if name == "ppo" else (0, 6)
        yield Run(f"{same} resumed", settings, resume_at=at, same_as=same, quick=name != "ppo")


def rows_of_settings() -> Iterator[Run]:
    bare = {"controller": "none", "log-batches": True}
    wild = {"lr": 1000, "clip-norm": "off", "steps": 8, "governor-failures-max": 100}
    for name, settings in {
        "augment": bare | {"augment": "crop,flip,cutout"},
        "augment odd batch": bare | {"augment": "flip,crop", "batch": 50},
        "file order": bare | {"shuffle": "off"},
        "streamed": bare | {"data-budget": "1MiB"},
        "all batches": {"controller": "none", "max-batches": "all", "steps": 1},
        "no clip": bare | {"clip-norm": "off", "momentum": 0, "weight-decay": 0},
        "from weights": bare | {"init": "baseline-none/weights/env-0.safetensors"},
        "rollback": GROW | wild,
        "rollback ppo": wild | LEARN | {"steps": 6, "ranks": 2},
        "slots r0,r1": {"controller": "random", "slots": "r0,r1", "steps": 8},
        "reward basic": LEARN | {"reward": "basic"},
        "reward sparse": LEARN | {"reward": "sparse", "ppo-epochs": 2, "policy-hidden": 64},
        "policy draws": {"controller": "ppo:ppo-without-choice/policy.safetensors"},
        "policy greedy": {"controller": "greedy:ppo-without-choice/policy.safetensors"},
    }.items():
        yield Run(name, settings, quick=name in ("augment", "rollback", "policy greedy"))


def rows_of_commands() -> Iterator[Run]:
    weights = ["--weights", "baseline-none/weights/env-1.safetensors", "--threads", "1", "--json"]
    yield Run("eval", {}, "eval", words=weights, quick=True)
    study = {"controllers": "none,random,heuristic", "seeds": 2, "steps": 3, "json": True}
    yield Run("control eval", study, "control eval", quick=True)
    learning = study | {"controllers": "none,ppo@sparse", "seeds": 1, "rounds": 2}
    yield Run("control eval learning", learning, "control eval")
    plan = ["--len", "50", "--batch", "5", "--devices", "cpu,cpu,cpu", "--seed", "42"]
    plan += ["--epochs", "2", "--json"]
    yield Run("data plan", {}, "data plan", words=plan, newer=("--epoch", "dealt"), quick=True)


def rows_of_gpus() -> list[Run]:
    """Runs on a GPU, small enough for the stand-in of its driver. The processor's part does not
    depend on the instruction set."""
    gpu: dict[str, Any] = {"devices": "cuda:0", "host": "minimal", "envs": 3, "batch": 16, "control-split": 0.2}
    gpu |= {"dataset": "arrays", "data-root": "images.safetensors"}
    bare = gpu | {"controller": "none", "augment": "crop,flip"}
    grown = GROW | gpu | {"slots": "r0,r1", "envs": 2, "checkpoint-every": 3}
    learn = LEARN | gpu | {"slots": "r0", "envs": 2, "policy-hidden": 16}
    runs = [
        Run("cuda none", bare),
        Run("cuda none threads=3", bare | {"threads": 3}, same_as="cuda none"),
        Run("cuda baseline", bare | {"host": "baseline", "envs": 1, "steps": 2}),
        Run("cuda heuristic", grown),
        Run("cuda heuristic resumed", grown, resume_at=(0, 6), same_as="cuda heuristic"),
        scripted("cuda script", 4, settings=gpu | {"envs": 4, "slots": "r0"}),
        Run("cuda ppo", learn),
    ]
    for run in runs:
        run.isa = "portable"
    return runs


def small_images() -> bytes:
    """A dataset of 600 images of 8x8 bytes in four classes, by the bright half of the image."""
    random, header, data = Random(1), {}, b""
    for split, count in (("train", 500), ("test", 100)):
        labels = [random.randrange(4) for _ in range(count)]
        bright = [(i % 8 < 4, i % 8 >= 4, i < 32, i >= 32) for i in range(64)]
        pixels = [random.randrange(160) + 90 * half[k] for k in labels for half in bright]
        arrays = {"images": ("U8", [count, 8, 8], bytes(pixels))}
        arrays["labels"] = ("I64", [count], struct.pack(f"<{count}q", *labels))
        for name, (dtype, shape, content) in arrays.items():
            offsets = [len(data), len(data) + len(content)]
            header[f"{split}_{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def all_runs() -> list[Run]:
    parts = (rows_of_hosts, rows_of_ranks, rows_of_machines, rows_of_resumes, rows_of_settings)
    return [run for part in (*parts, rows_of_commands) for run in part()]


def arguments(run: Run, changed: dict[str, str]) -> list[str]:
    """Arguments of a row. Paths are relative, as in the other table."""
    if run.words:
        return [*run.command.split(), *run.words]
    settings = BASE | run.settings
    if run.command == "train":
        # A twin is an env without a controller, which has separate rows.
        settings |= {"twin": "off", "run-dir": run.folder(), "quiet": True}
    else:
        settings.pop("checkpoint-every")
    words = run.command.split()
    for name, value in (settings | changed).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def call(program: Path, run: Run, words: list[str], scratch: Path) -> str:
    """Standard output of the program; a failure raises an error."""
    environment = {**os.environ, "MERISTEM_ISA": run.isa}
    done = subprocess.run(
        [program, *words], cwd=scratch, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)}\n{done.stderr}")
    return done.stdout


def forget(folder: Path, after: tuple[int, int]) -> None:
    """Removes everything that a run wrote after a checkpoint, as after a kill."""
    kept = folder / "checkpoints" / "round-{:06}-step-{:06}.safetensors".format(*after)
    for path in folder.glob("checkpoints/*"):
        if path > kept:
            path.unlink()
    if not kept.exists():
        raise RuntimeError(f"{kept.name} is not there to be resumed from")
    for path in [folder / "summary.json", folder / "policy.safetensors", *folder.glob("weights/*")]:
        path.unlink(missing_ok=True)


def measure(program: Path, run: Run, changed: dict[str, str], scratch: Path) -> dict[str, Parts]:
    """The columns of a row."""
    if run.script_envs:
        (scratch / f"script-{run.script_envs}.jsonl").write_text(script(run.script_envs))
    words = arguments(run, changed)
    if run.newer:
        known = call(program, run, [*run.command.split(), "--help"], scratch)
        words += run.newer if f"{run.newer[0]} " in known else ()
    output = call(program, run, words, scratch)
    if run.command != "train":
        return {"output": output_parts(output)}
    folder = scratch / run.folder()
    if run.resume_at:
        forget(folder, run.resume_at)
        call(program, run, ["train", "--quiet", "--resume", run.folder()], scratch)
    return folder_parts(folder)


def instruction_sets() -> set[str]:
    """Instruction sets of this machine; every aarch64 has NEON."""
    if VECTORS == "neon":
        return {"portable", "neon"}
    with open("/proc/cpuinfo") as cpu:
        flags = next(line for line in cpu if line.startswith("flags")).split()
    return {"portable", *(isa for isa, flag in X86_FLAGS.items() if flag in flags)}


def make_table(args: argparse.Namespace, scratch: Path) -> tuple[list[Run], Table]:
    """The requested rows and their columns; no columns for a failed run."""
    present = instruction_sets()
    changed = dict(pair.split("=", 1) for pair in args.set)
    done: list[Run] = []
    table: Table = {}

    def add(run: Run) -> None:
        try:
            columns = measure(args.program.resolve(), run, changed, scratch)
        except RuntimeError as error:
            columns = {}
            print(f"{run.name}: {error}", file=sys.stderr)
        table[run.name] = columns
        cells = [f"{column} {digest(parts)[:10]}" for column, parts in columns.items() if parts]
        print(f"{run.name:42} {'  '.join(cells) or 'FAILED'}", flush=True)

    if args.cuda:
        (scratch / "images.safetensors").write_bytes(small_images())
    for runs in (rows_of_gpus(),) if args.cuda else (first_runs(), all_runs()):
        runs = [run for run in runs if run.isa in present and (run.quick or not args.quick)]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(add, runs))
        done += runs
    return done, table


def differences(before: dict[str, Parts], now: dict[str, Parts]) -> tuple[list[str], int]:
    """Differences of two rows, a line per column, and the number of parts only in the new row."""
    lines, gained = [], 0
    for column in before.keys() | now.keys():
        old, new = before.get(column, {}), now.get(column, {})
        found = sorted(part for part in old if old[part] != new.get(part))
        names = ", ".join(part if part in new else f"{part} (gone)" for part in found[:6])
        gained += len(new.keys() - old.keys())
        if found:
            rest = f" and {len(found) - 6} more" if len(found) > 6 else ""
            lines.append(f"{column}: {names}{rest}")
    return sorted(lines), gained


def compare(runs: list[Run], table: Table, before: Table) -> list[str]:
    """Differences from the other table."""
    problems, gained = [], 0
    for run in runs:
        if run.name not in before:
            problems.append(f"{run.name}: not in the other table; make that table with these rows, too")
            continue
        lines, more = differences(before[run.name], table[run.name])
        problems += [f"{run.name}: {line}" for line in lines]
        gained += more
    print(f"{len(runs)} rows compared; {gained} parts that the other table does not have")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("program", type=Path, help="target/release/meristem of the build")
    parser.add_argument("--quick", action="store_true", help="a fourth of the rows")
    parser.add_argument("--cuda", action="store_true", help="rows that run on cuda:0 instead")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    changes = "changes a setting of all rows, to check that the table changes"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=changes)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run folders here; new")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    args = parser.parse_args()
    before = json.loads(args.compare.read_text()) if args.compare else None

    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=not args.keep)
        runs, table = make_table(args, scratch)
    problems = [f"{run.name}: the run failed" for run in runs if not table[run.name]]
    for run in runs:
        if run.same_as in table and table[run.name]:
            lines, _ = differences(table[run.same_as], table[run.name])
            problems += [f"{run.name}: not as `{run.same_as}`: {line}" for line in lines]
    if before is not None:
        problems += compare(runs, table, before)
    if problems:
        raise SystemExit("\n".join([f"{len(problems)} differences:", *problems]))
    if args.save:
        args.save.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
