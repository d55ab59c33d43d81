"""Runs a study: every combination of setting, arm and seed, each as one `meristem train`.

    python3 bench/studies/study.py bench/studies/growth.toml --out study --data cifar10=DIR
    python3 bench/studies/study.py bench/studies/growth.toml --out study --table

A study is a TOML file with `seeds`, `[train]` (settings of all runs), and lists of `[[setting]]`
(dataset and host) and `[[arm]]` (controller), each with a `name` and settings of `train`. Settings
of an arm override its setting's, which override `[train]`. `{NAME}` in a value is a path from
`--data NAME=DIR`, or a word from `[setting.words]`, so that an arm may use another host in each
setting. `{here}` is the folder of the TOML file, `{seed}` the seed, and `{run:ARM}` the run folder
of an earlier arm with the same setting and seed, whose grown network an arm may start from. An arm
with `program = "NAME"` runs the build from `--program NAME=PATH`, for comparisons with the state
before a change.

Each run has a folder in `--out`, and one line in `results.jsonl` there once it is complete. The
study can be stopped at any moment, by Ctrl-C or by a kill: the next call resumes the interrupted
run and continues with the rest. The table has the mean over the seeds and its 95 % interval
(Student's t); differences from the first arm are paired by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom, and for more.
T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160]
T_MANY = 2.145

# Exit code of a run that was stopped by request.
STOPPED = 3


def folder_name(setting: str, arm: str, seed: int) -> str:
    label = f"{setting}.{arm}.{seed}"
    return "".join(c if c.isalnum() or c in "-." else "-" for c in label)


@dataclass
class Folders:
    """Run folders of the other arms with one setting and seed: `{run:ARM}` formats one of them."""

    out: Path
    setting: str
    seed: int

    def __format__(self, arm: str) -> str:
        return str(self.out / folder_name(self.setting, arm, self.seed))


@dataclass
class Run:
    """One run of a study."""

    setting: str
    arm: str
    seed: int
    program: str
    settings: dict[str, Any]

    def name(self) -> str:
        """The name of its folder."""
        return folder_name(self.setting, self.arm, self.seed)

    def words(self) -> list[str]:
        """Arguments of `train`, without the run folder."""
        words = ["train"]
        for key, value in self.settings.items():
            flag = "--" + key.replace("_", "-")
            words += [flag] if value is True else [flag, str(value)]
        return [*words, "--seed", str(self.seed), "--quiet"]


def runs_of(path: Path, out: Path, places: dict[str, str]) -> list[Run]:
    """All runs of a study, seed by seed, so that an interrupted study has some seeds of all arms."""
    study = tomllib.loads(path.read_text())
    places = {"here": str(path.resolve().parent), **places}

    def run(seed: int, setting: dict[str, Any], arm: dict[str, Any]) -> Run:
        run = Folders(out, setting["name"], seed)
        words = {**places, **setting.get("words", {}), "seed": seed, "run": run}
        both = {**study.get("train", {}), **setting, **arm}
        both = {k: v for k, v in both.items() if k not in ("name", "program", "words")}
        settings = {k: v.format_map(words) if isinstance(v, str) else v for k, v in both.items()}
        return Run(setting["name"], arm["name"], seed, arm.get("program", ""), settings)

    settings, arms = study["setting"], study["arm"]
    try:
        return [run(seed, s, a) for seed in study["seeds"] for s in settings for a in arms]
    except KeyError as missing:
        raise SystemExit(f"{path} needs a path for {missing}: --data {missing.args[0]}=DIR") from None


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    """Complete lines by run; a line that a kill cut off is ignored."""
    path = out / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for line in lines:
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[result["run"]] = result
    return found


def write_result(out: Path, result: dict[str, Any]) -> None:
    path = out / "results.jsonl"
    cut = path.exists() and path.stat().st_size and not path.read_text().endswith("\n")
    with path.open("a") as file:
        file.write(("\n" if cut else "") + json.dumps(result) + "\n")
        file.flush()
        os.fsync(file.fileno())


def completed(folder: Path) -> dict[str, Any] | None:
    """The summary of a complete run; `None` for any other."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return summary if summary["status"] == "completed" else None


def execute(run: Run, program: str, folder: Path) -> dict[str, Any]:
    """Runs `train` in its folder, or resumes it, and returns its summary."""
    summary = completed(folder)
    while summary is None:
        command = [program, *run.words(), "--run-dir", str(folder)]
        if any(folder.glob("checkpoints/*.safetensors")):
            command = [program, "train", "--resume", str(folder), "--quiet"]
        elif folder.exists():
            shutil.rmtree(folder)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == STOPPED:
            raise KeyboardInterrupt
        summary = completed(folder)
        if summary is None:
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return summary


def result_of(run: Run, program: str, summary: dict[str, Any]) -> dict[str, Any]:
    """A line of the results: means over the envs of a run."""
    envs = summary["envs"]

    def mean(key: str) -> float | None:
        values = [env[key] for env in envs]
        return None if None in values else statistics.fmean(values)

    keys = ["control_accuracy", "control_loss", "test_accuracy", "test_loss", "train_loss"]
    modules = [[f"{m['slot']} {m['blueprint']} {m['stage']}" for m in e["modules"]] for e in envs]
    return {
        "run": run.name(),
        "setting": run.setting,
        "arm": run.arm,
        "seed": run.seed,
        "command": [program, *run.words()],
        "version": summary["program_version"],
        **{key: mean(key) for key in [*keys, "parameters"]},
        "modules": modules,
        "images": summary["images"],
        "seconds": summary["wall_seconds"],
        "sent_bytes_per_batch": summary.get("exchange_bytes", 0) / summary["training_steps"],
    }


def interval(values: list[float]) -> float:
    """Half the width of the 95 % interval of the mean; infinite for a single value."""
    n = len(values)
    if n < 2:
        return math.inf
    t = T[n - 2] if n - 2 < len(T) else T_MANY
    return t * statistics.stdev(values) / math.sqrt(n)


def shown(values: list[float], form: str) -> str:
    if not values:
        return "–"
    half = interval(values)
    spread = f" ± {half:{form.lstrip('+')}}" if math.isfinite(half) else ""
    return f"{statistics.fmean(values):{form}}{spread}"


def rows(results: list[dict[str, Any]], base: str) -> Iterator[list[str]]:
    """Rows of one setting's table, arm by arm."""
    arms = list(dict.fromkeys(result["arm"] for result in results))
    bare = {r["seed"]: r for r in results if r["arm"] == base}

    def points(of: list[dict[str, Any]], key: str) -> list[float]:
        return [100 * r[key] for r in of if r[key] is not None]

    for arm in arms:
        of = sorted((r for r in results if r["arm"] == arm), key=lambda r: r["seed"])
        paired: Callable[[str], list[float]] = lambda key, of=of: [
            100 * (r[key] - bare[r["seed"]][key])
            for r in of
            if r["seed"] in bare and None not in (r[key], bare[r["seed"]][key])
        ]
        yield [
            arm,
            str(len(of)),
            shown(points(of, "control_accuracy"), ".2f"),
            shown([r["control_loss"] for r in of if r["control_loss"] is not None], ".4f"),
            shown(points(of, "test_accuracy"), ".2f"),
            "" if arm == base else shown(paired("control_accuracy"), "+.2f"),
            "" if arm == base else shown(paired("test_accuracy"), "+.2f"),
            shown([r["parameters"] for r in of], ",.0f"),
            f"{statistics.fmean(r['seconds'] for r in of):,.0f}",
            f"{statistics.fmean(r.get('sent_bytes_per_batch', 0) for r in of):,.0f}",
        ]


def table(results: list[dict[str, Any]], base: str) -> str:
    """Tables in Markdown, one per setting, and the total compute."""
    head = ["arm", "seeds", "control accuracy", "control loss", "test accuracy"]
    head += [f"control, over {base}", f"test, over {base}", "parameters", "seconds", "bytes per batch"]
    lines = []
    for setting in dict.fromkeys(result["setting"] for result in results):
        lines += [f"### {setting}", "", "| " + " | ".join(head) + " |"]
        lines += ["|---|" + "---:|" * (len(head) - 1)]
        of = [result for result in results if result["setting"] == setting]
        lines += ["| " + " | ".join(row) + " |" for row in rows(of, base)] + [""]
    hours = sum(result["seconds"] for result in results) / 3600
    images = sum(result["images"] for result in results)
    return "\n".join([*lines, f"{len(results)} runs, {images:,} images, {hours:.2f} hours of runs"])


def named(words: list[str]) -> dict[str, str]:
    """NAME=PATH as a table; a path alone has the empty name."""
    pairs = [word.partition("=") for word in words]
    return {name if sep else "": path if sep else name for name, sep, path in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("study", type=Path, help="TOML file")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="runs and results")
    program = "the build to run, target/release/meristem by default; NAME=PATH for an arm's program"
    parser.add_argument("--program", action="append", default=[], metavar="PATH", help=program)
    parser.add_argument("--data", action="append", default=[], metavar="NAME=DIR")
    only = "run only names (SETTING.ARM.SEED) with one of these words, separated by commas"
    parser.add_argument("--only", metavar="WORDS", help=only)
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    args = parser.parse_args()
    programs = {"": "target/release/meristem", **named(args.program)}
    runs = runs_of(args.study, args.out, named(args.data))
    chosen = [r for r in runs if not args.only or any(w in r.name() for w in args.only.split(","))]
    args.out.mkdir(parents=True, exist_ok=True)
    results = read_results(args.out)
    for place, run in enumerate([] if args.table else chosen, 1):
        if run.program not in programs:
            raise SystemExit(f"{run.name()} needs --program {run.program}=PATH, or --only others")
        program = programs[run.program]
        done = results.get(run.name())
        if done and done["command"][1:] != run.words():
            problem = f"{run.name()} was run with other settings: {' '.join(done['command'])}"
            raise SystemExit(f"{problem}\nchoose another --out")
        if done:
            continue
        print(f"{place}/{len(chosen)} {run.name()}", file=sys.stderr, flush=True)
        summary = execute(run, program, args.out / run.name())
        results[run.name()] = result_of(run, program, summary)
        write_result(args.out, results[run.name()])
    # In the order of the study, and without runs that it no longer has.
    found = [results[run.name()] for run in runs if run.name() in results]
    print(table(found, runs[0].arm))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command continues") from None
