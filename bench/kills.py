"""Kills runs at random moments, resumes them, and compares the results with an undisturbed run.

    python3 bench/kills.py target/release/meristem [--kills 20] [--seed 1] [--only PPO]

Each configuration below runs once undisturbed, then repeatedly with `kill -9` at random moments, during resumes too, until
it has been killed `--kills` times. Weights, events, checkpoints, policy and summary must be equal, part by part
(`result_parts.py`), `meristem runs verify` must accept every folder after a kill, and no unfinished file may remain at the
end. Prints a Markdown table; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from result_parts import folder_parts

BASE = "train --preset quick --quiet --max-batches 3 --control-split 0.02 --checkpoint-every 2"
GROW = "--controller heuristic --min-training-steps 1 --min-contribution -100 --envs 2 --steps 24"
LEARN = "--controller ppo --policy none --policy-hidden 16 --envs 2 --rounds 3 --steps 6"
WIDEN = "--controller heuristic --dataset mnist1d --max-modules 0 --widen-by 0.5 --widen-pause 2 --max-gap 99 --envs 2 --steps 24"
RUNS = {
    "none": "--controller none --host minimal --envs 3 --steps 40",
    "heuristic with twins": f"{GROW} --host minimal --twin on",
    "random, every slot": "--controller random --host minimal --slots r0,r1 --envs 3 --steps 30",
    "deep, cosine": f"{GROW} --host cnn:channels=4,blocks=4,kernel=3,pools=4 --lr-schedule cosine",
    "full telemetry, every batch": f"{GROW} --host minimal --telemetry full --log-batches",
    "streamed data": f"{GROW} --host minimal --data-budget 1MB",
    "PPO": f"{LEARN} --host minimal",
    "PPO on two ranks": f"{LEARN} --host minimal --comm threads --ranks 2 --exchange topk:0.1",
    "one host on two ranks": f"{GROW} --host minimal --envs 1 --data-parallel --comm threads --ranks 2 --exchange ok-topk:0.1",
    "modules aside": f"{GROW} --host minimal --birth aside",
    "wider layers": f"{WIDEN} --host conv1d:4,8",
    "wider layers by gradients": f"{WIDEN} --host mlp:4,4 --width-init tiny --widen-trigger gradient_ratio:0.1",
    "wider layers by PPO": f"{LEARN} --dataset mnist1d --host conv1d:4,8 --policy-form set-widen --widen-by 0.5",
    "TensorBoard, two devices": f"{GROW} --host minimal --tensorboard --devices cpu:0,cpu:1",
}


class Killed:
    """One configuration of `program` in the folder `scratch`."""

    def __init__(self, program: Path, settings: str, scratch: Path):
        self.program, self.settings, self.scratch = program, settings, scratch

    def command(self, run: Path) -> list[str]:
        """The command that starts the run, or resumes it."""
        resumed = ["train", "--resume", str(run), "--quiet"]
        new = [*shlex.split(f"{BASE} {self.settings}"), "--run-dir", str(run)]
        return [str(self.program), *(resumed if (run / "config.toml").exists() else new)]

    def until_killed(self, run: Path, after: float) -> bool:
        """Whether the run was killed `after` seconds from its start, before its end."""
        process = subprocess.Popen(self.command(run), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _, said = process.communicate(timeout=after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return True
        if process.returncode != 0:
            raise SystemExit(f"{self.settings}: exit code {process.returncode}: {said.decode()}")
        return False

    def check(self, run: Path) -> None:
        """Checks the folder after a kill, unless the kill came before the settings were written."""
        if (run / "config.toml").exists():
            subprocess.run([self.program, "runs", "verify", run], check=True, stdout=subprocess.DEVNULL)


def differences(expected: dict, got: dict) -> list[str]:
    columns = [(column, part) for column in expected for part in expected[column].keys() | got[column].keys()]
    return [f"{column}: {part}" for column, part in columns if expected[column].get(part) != got[column].get(part)]


def row(program: Path, settings: str, kills: int, chance: random.Random) -> tuple[int, int, list[str]]:
    """Kills and runs of a configuration, and the parts that differ."""
    with tempfile.TemporaryDirectory() as folder:
        killed = Killed(program, settings, Path(folder))
        whole = killed.scratch / "whole"
        started = time.monotonic()
        killed.until_killed(whole, 600)
        seconds = time.monotonic() - started
        expected = folder_parts(whole)
        done, runs, wrong = 0, 0, []
        while done < kills:
            run, runs = killed.scratch / f"run-{runs}", runs + 1
            # Several kills per run, some of them in its first moments.
            while killed.until_killed(run, chance.uniform(0.0, seconds) * chance.choice([0.1, 0.5, 1.0])):
                done += 1
                killed.check(run)
                if done % 7 == 0 and not killed.until_killed(run, 600):
                    break
            wrong += differences(expected, folder_parts(run))
            wrong += [f"left: {path.name}" for path in run.rglob(".*") if path.name != ".lock"]
            shutil.rmtree(run)
        return done, runs, sorted(set(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("--kills", type=int, default=20, help="of each configuration")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=RUNS, metavar="NAME", help="one configuration, by its name")
    args = parser.parse_args()
    program, chance = args.program.resolve(), random.Random(args.seed)
    print("| configuration | kills | runs | differences |\n|---|---|---|---|", flush=True)
    failed = 0
    for name in [args.only] if args.only else RUNS:
        done, runs, wrong = row(program, RUNS[name], args.kills, chance)
        failed += bool(wrong)
        print(f"| {name} | {done} | {runs} | {'; '.join(wrong) or 'none'} |", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
