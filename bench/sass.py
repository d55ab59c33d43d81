#!/usr/bin/env python3
"""Counts what the machine code of every kernel holds, without a GPU.

    python3 bench/sass.py --save FILE.json [--arch sm_90a] [FILE.cu …]
    python3 bench/sass.py --table BEFORE.json AFTER.json [WORD …]     kernels whose label has one of the words

Compiles as `.ci/compile_kernels.py` does, and reads the code with nvdisasm. Both come from PyPI:
pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-nvdisasm

Of each kernel: registers, bytes of stack and of spills (the compiler's report), instructions, and the loads and
stores by address space: generic (LD, ST), global (LDG, STG), straight to shared memory (LDGSTS), local (LDL, STL).

`in flight` counts loads of global memory, generic ones among them, that are under way together. The control bits of
an instruction (105 to 125 of 128, as published for Volta and later: stall, yield, scoreboard that a write sets,
scoreboard that a read sets, scoreboards that are waited for) say at which later instruction a thread waits for a load.
The number of a load is the maximum number of loads under way between its issue and the wait for it. Loads under way
across a label, as from one turn of a loop to the next, are not counted. `most` is the largest of these numbers,
`mean` the mean over the loads of the code, each counted once however often it runs.
"""

import argparse
import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".ci"))
import compile_kernels as kernels  # noqa: E402

# An instruction: predicate, operation, operands; then the two halves of its encoding.
INSTRUCTION = re.compile(
    r"/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);\s+/\* 0x([0-9a-f]{16}) \*/\s+/\* 0x([0-9a-f]{16}) \*/"
)
KERNEL = re.compile(r"//-+ \.text\.(\w+) +-+")
COUNTED = ("LD", "LDG", "ST", "STG", "LDGSTS", "LDS", "STS", "LDL", "STL", "BAR", "FFMA", "HMMA")
NO_SCOREBOARD = 7


def disassemble(code):
    found = sorted(pathlib.Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/nvdisasm"))
    program = str(found[0]) if found else "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run(
            [program, "-c", "-hex", file.name], capture_output=True, text=True, check=True
        ).stdout


class Flight:
    """Loads that are under way while a thread goes through a piece of code."""

    def __init__(self):
        self.pending = []  # (scoreboard, the most that have been under way with it)
        self.together = []  # for each load that has come

    def wait(self, scoreboards):
        """The loads of these scoreboards have come."""
        self.together += [most for of, most in self.pending if of in scoreboards]
        self.pending = [(of, most) for of, most in self.pending if of not in scoreboards]

    def step(self, operation, control):
        self.wait([n for n in range(6) if control >> 11 >> n & 1])
        scoreboard = control >> 5 & 7
        if operation in ("LD", "LDG") and scoreboard != NO_SCOREBOARD:
            now = len(self.pending) + 1
            self.pending = [(of, max(most, now)) for of, most in self.pending] + [(scoreboard, now)]
        if operation in ("EXIT", "RET", "BRX"):
            self.wait(range(6))


def pieces(text):
    """The lines of one kernel: labels as None, instructions as (operation, control bits)."""
    for line in re.sub(r"(/\* 0x[0-9a-f]{16} \*/)\s*\n\s*(/\* 0x)", r"\1 \2", text).splitlines():
        if re.match(r"\s*\.L_\w+:", line):
            yield None
        found = INSTRUCTION.search(line)
        if found:
            control = int(found.group(5), 16) >> 41 & (1 << 21) - 1
            yield found.group(2).split(".")[0], control


def count(text):
    """Numbers of a kernel's code."""
    flight, numbers = Flight(), dict.fromkeys(("instructions", *COUNTED), 0)
    for piece in pieces(text):
        if piece is None:
            flight.wait(range(6))
            continue
        operation, control = piece
        flight.step(operation, control)
        if operation == "NOP":
            continue
        numbers["instructions"] += 1
        if operation in COUNTED:
            numbers[operation] += 1
    flight.wait(range(6))
    loads = flight.together
    numbers["most"] = max(loads, default=0)
    numbers["mean"] = round(sum(loads) / len(loads), 2) if loads else 0
    return numbers


def reported(log):
    """(registers, stack, spills) of each kernel by the compiler's report."""
    for part in re.split(r"Compiling entry function '", log)[1:]:
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
        stack = int(re.search(r"(\d+) bytes stack frame", part).group(1))
        registers = int(re.search(r"Used (\d+) registers", part).group(1))
        yield part.split("'")[0], {"registers": registers, "stack": stack, "spills": spills}


def measure(job):
    """Numbers of all kernels of a source."""
    (path, variant, headers), arch = job
    succeeded, log, code = kernels.compile_source(((path, variant, headers), arch))
    if not succeeded:
        return {f"{path.stem}{variant}": {"error": log}}
    report, found = dict(reported(log)), {}
    parts = KERNEL.split(disassemble(code))[1:]
    for name, text in zip(parts[::2], parts[1::2]):
        label = f"{path.parent.name}/{path.stem} {name}{variant}"
        found[label] = report[name] | count(text)
    return found


def table(before, after, words):
    columns = ("instructions", "registers", "LD", "LDG", "ST", "STG", "most", "mean")
    print("| kernel | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for label in sorted(after):
        if label not in before or words and not any(word in label for word in words):
            continue
        old, new = before[label], after[label]
        cells = [f"{old[c]} → {new[c]}" if old[c] != new[c] else f"{new[c]}" for c in columns]
        print(f"| `{label}` | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--save", type=pathlib.Path)
    parser.add_argument("--table", nargs=2, type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    if given.table:
        before, after = (json.loads(path.read_text()) for path in given.table)
        table(before["kernels"], after["kernels"], given.words)
        return
    files = [pathlib.Path(word).resolve() for word in given.words]
    files = files or sorted(ROOT.glob("crates/*/src/**/*.cu"))
    jobs = [((path, *variant), given.arch) for path in files for variant in kernels.variants(path).items()]
    found = {}
    with concurrent.futures.ProcessPoolExecutor(given.jobs) as pool:
        for numbers in pool.map(measure, jobs):
            found |= numbers
    text = json.dumps({"arch": given.arch, "nvrtc": kernels.version(), "kernels": found}, indent=1)
    given.save.write_text(text + "\n") if given.save else print(text)


if __name__ == "__main__":
    main()
