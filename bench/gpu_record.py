"""Stages of `bench/gpu.sh`, commands with limits, and the record of their results.

A pack is the folder above this one: `bin/` with programs, `digests.json`, `commit`, and the record.
The result of a stage is appended to the record before the next one starts, so that nothing is lost
when the time is up, and a later call goes on with the stages that have no result. The head of
`gpu.sh` lists the settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
PACK = BENCH.parent
MERISTEM = str(PACK / "bin" / "meristem")
# `CUDA_VISIBLE_DEVICES` selects the GPU.
DEVICE = "cuda:0"
PRECISIONS = ("f32", "tf32", "bf16")
# Characters of output that a line of the record keeps.
TAIL = 4000


def setting(name: str, default: str) -> str:
    return os.environ.get(f"GPU_{name}") or default


def small() -> bool:
    """Sizes for the stand-in driver, on which everything is slow."""
    return setting("SMALL", "0") == "1"


@dataclass(frozen=True)
class Stage:
    """A command and its time limit in seconds."""

    name: str
    seconds: float
    command: list[str]
    # Required programs and Python modules; without them the stage is skipped.
    needs: tuple[str, ...] = ()
    # Whether figures count only after its success.
    gates: bool = True

    def limit(self) -> float:
        return float(setting(f"LIMIT_{self.name}", str(self.seconds)))

    def lacks(self) -> str | None:
        """The reason why the stage cannot run here."""
        for need in self.needs:
            if need.startswith("import "):
                found = subprocess.run([sys.executable, "-c", need], capture_output=True)
                there = found.returncode == 0
            else:
                there = shutil.which(need) is not None
            if not there:
                return f"`{need}` fails" if " " in need else f"there is no {need}"
        return None


def build_id() -> str:
    """A digest of programs, scripts and expected digests, for which the figures are valid."""
    whole = hashlib.sha256()
    scripts = [path for folder in ("bench", "reference") for path in PACK.glob(f"{folder}/*.py")]
    for path in sorted([*PACK.glob("bin/*"), *scripts, PACK / "digests.json"]):
        whole.update(path.name.encode() + path.read_bytes())
    return whole.hexdigest()[:16]


class Record:
    """The file of results. A line is an object; lines of one call of a phase share `started`.

    It lies in the pack, since what a call leaves in `OUT` may be gone at the next one. `OUT` gets a
    copy after every line.
    """

    def __init__(self, phase: str) -> None:
        self.path = Path(setting("RECORD", str(PACK / "gpu.jsonl")))
        self.common = {"phase": phase, "started": time.time(), "build": build_id()}
        self.common["commit"] = (PACK / "commit").read_text().strip()
        self.common["gpu"] = gpu_name()

    def lines(self) -> list[dict[str, Any]]:
        text = self.path.read_text() if self.path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def newest(self, phase: str) -> dict[str, dict[str, Any]]:
        """The last result of each stage of a phase, of this build on this GPU, from any call. A
        stage that was skipped or cut off has none."""
        own = {key: self.common[key] for key in ("build", "gpu")} | {"phase": phase}
        lines = [line for line in self.lines() if all(line[key] == own[key] for key in own)]
        return {line["stage"]: line for line in lines if line["exit"] is not None}

    def add(self, **fields: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(self.common | fields) + "\n")
            file.flush()
            os.fsync(file.fileno())
        out = os.environ.get("OUT")
        if out:
            shutil.copy(self.path, Path(out) / "gpu.jsonl")

    def keep_output(self, stage: str, text: str) -> None:
        """Appends the whole output of a stage to a file in `OUT`, if that is set."""
        out = os.environ.get("OUT")
        if out:
            with (Path(out) / "gpu-output.txt").open("a") as file:
                file.write(f"=== {self.common['phase']} {stage}\n{text}\n")


def is_green(line: dict[str, Any] | None, marks: dict[str, Any] | None = None) -> bool:
    """Whether a result is a success. A figure that counts does so in another call that counts."""
    counts = (marks or {}).get("counts")
    return line is not None and line["exit"] == 0 and line.get("counts") == counts


def gpu_name() -> str | None:
    """Name of the GPU; `None` without NVIDIA's driver, such as on the stand-in."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"
    query = ["nvidia-smi", f"--id={index}", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def environment() -> dict[str, str]:
    """Appends the NVRTC of PyTorch's wheels to the library path, after any other."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for path in sys.path:
        folders += sorted(str(lib.parent) for lib in Path(path).glob("nvidia/*/lib/libnvrtc.so*"))
    unique = dict.fromkeys(folder for folder in folders if folder)
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(unique), "PYTHONUNBUFFERED": "1"}


def run_limited(command: list[str], seconds: float, scratch: Path) -> tuple[int, str]:
    """Exit code, 124 if the time ran out, and output of a command in a separate process group."""
    with (scratch / "output").open("w+b") as output:
        child = subprocess.Popen(
            command, cwd=scratch, env=environment(), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # ended, and left nothing behind
            child.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")


def phase_end() -> float:
    """The moment, of `time.monotonic`, at which a phase that starts now ends."""
    return time.monotonic() + float(setting("PHASE_SECONDS", "570"))


def run_stages(record: Record, stages: list[Stage], end: float, **more: Any) -> None:
    """Runs stages one after another until `end`, but those with a green result."""
    only, known = setting("STAGES", "").split(), record.newest(record.common["phase"])
    known = {} if setting("AGAIN", "0") == "1" else known
    for stage in stages:
        if only and stage.name not in only:
            continue
        if is_green(known.get(stage.name), more):
            print(f"{stage.name:12} is green already", flush=True)
            continue
        left = end - time.monotonic()
        reason = stage.lacks() or ("no time is left" if left < 1 else None)
        if reason:
            record.add(stage=stage.name, exit=None, skipped=reason, **more)
            print(f"{stage.name:12} skipped: {reason}", flush=True)
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpu-") as scratch:
            code, text = run_limited(stage.command, min(stage.limit(), left), Path(scratch))
        record.keep_output(stage.name, text)
        if code == 124 and left < stage.limit():
            record.add(stage=stage.name, exit=None, skipped=f"cut off after {left:.0f} s", **more)
            print(f"{stage.name:12} cut off after {left:.0f} s: the phase is over", flush=True)
            continue
        if code == 0 and "test result: ok. 0 passed" in text:
            code, text = 1, text + "no test has this name\n"
        seconds = round(time.monotonic() - start, 1)
        record.add(stage=stage.name, exit=code, seconds=seconds, tail=text[-TAIL:], **more)
        print(f"{stage.name:12} exit {code}, {seconds} s", flush=True)
        if code != 0:
            print("    " + text[-1500:].strip().replace("\n", "\n    "), flush=True)


def helper(name: str, *words: str) -> list[str]:
    return [sys.executable, str(BENCH / name), *words]


def tests(name: str, *words: str) -> list[str]:
    return [str(PACK / "bin" / name), *words]
