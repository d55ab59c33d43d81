#!/usr/bin/env python3
"""Compiles every CUDA source of the repository with NVRTC, for each architecture, and reads the compiler's
report. It is an error if a kernel does not compile, has a stack frame (registers spilled to memory, or arrays
that do not lie in registers), or needs more registers for its largest block than a multiprocessor has.

Needs no GPU. NVRTC comes from PyPI: pip install nvidia-cuda-nvrtc

    python3 .ci/compile_kernels.py [--arch sm_80 … | --sample] [FILE.cu …]
"""

import argparse
import concurrent.futures
import ctypes
import functools
import pathlib
import re
import sys
import sysconfig
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Folders whose headers stand for one another: a source that reads "element.cuh" is compiled with each of the
# folder `element`, as crates/comm/src/gpu/mod.rs does, and likewise for crates/nn/src/ops/gpu/mod.rs.
FOLDERS = ["element", "product", "value"]
# All other headers by the name under which they are included.
HEADERS = {path.name: path for path in sorted(ROOT.glob("crates/**/*.cuh")) if path.parent.name not in FOLDERS}
# As `Target::options` in crates/device/src/execution/cuda/compiler.rs, and the report.
OPTIONS = ["--std=c++17", "--fmad=false", "--device-as-default-execution-space", "--ptxas-options=-v"]
ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
# The architecture of the machine in the records. With --sample every source is compiled for this architecture and one other.
FIRST = "sm_90a"
# Registers of a multiprocessor, and threads of a block that says nothing, on all of them.
REGISTERS = 65536
THREADS_MAX = 1024


@functools.cache
def library():
    folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    # NVRTC 13.0 looks for its second library among those that are loaded, not beside itself.
    for second in sorted(folder.glob("*/lib/libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(second))
    found = sorted(folder.glob("*/lib/libnvrtc.so.*")) or ["libnvrtc.so"]
    return ctypes.CDLL(str(found[0]))


def version():
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def text_of(nvrtc, program, size, get):
    length = ctypes.c_size_t()
    getattr(nvrtc, size)(program, ctypes.byref(length))
    text = ctypes.create_string_buffer(length.value)
    getattr(nvrtc, get)(program, text)
    return text.raw


def includes(path):
    """Names of all headers that a source reads."""
    names = set(re.findall(r'#include "(.+)"', path.read_text()))
    return names.union(*(includes(HEADERS[name]) for name in names if name in HEADERS))


def variants(path):
    """The headers with which a source is compiled, by what tells them apart."""
    for folder in FOLDERS:
        if f"{folder}.cuh" in includes(path):
            found = sorted(ROOT.glob(f"crates/**/{folder}/*.cuh"))
            return {f" of {header.stem}": HEADERS | {f"{folder}.cuh": header} for header in found}
    return {"": HEADERS}


def sample(path):
    """The first architecture, and one of the others, which a change to the source or its headers draws anew."""
    others = [arch for arch in ARCHITECTURES if arch != FIRST]
    read = [path, *(HEADERS[name] for name in sorted(includes(path)) if name in HEADERS)]
    return [FIRST, others[zlib.crc32(b"".join(file.read_bytes() for file in read)) % len(others)]]


def compile_source(job):
    """Returns whether a source, with its headers, compiled for an architecture, the compiler's messages, and the
    code."""
    (path, _, headers), arch = job
    nvrtc, program = library(), ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(header.read_bytes() for header in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    source, label = path.read_bytes(), str(path.relative_to(ROOT)).encode()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source, label, len(headers), texts, names
    )
    options = [f"--gpu-architecture={arch}", *OPTIONS]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    log = text_of(nvrtc, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
    code = b"" if failed else text_of(nvrtc, program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return not failed, log.rstrip(b"\0").decode(errors="replace"), code


def report(log):
    """Yields (kernel, registers of a thread, bytes of stack) of the compiler's report."""
    for part in re.split(r"Compiling entry function '", log)[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        stack = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", part)
        yield part.split("'")[0], int(registers.group(1)), sum(map(int, stack))


def bounds(path):
    """The most threads of a block of each kernel that says so."""
    found = re.findall(r"__launch_bounds__\((\d+)[^)]*\)\s*(\w+)\(", path.read_text())
    return {kernel: int(threads) for threads, kernel in found}


def faults(kernel, registers, stack, threads):
    """What is wrong with a kernel by the compiler's report."""
    if stack:
        yield f"{kernel} has {stack} bytes of stack ({registers} registers)"
    # Registers are given out by the warp, eight of each thread at a time.
    block = (registers + 7) // 8 * 8 * threads
    if block > REGISTERS:
        yield f"{kernel} needs {block} registers for {threads} threads, of {REGISTERS}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--arch", nargs="+", default=ARCHITECTURES)
    which.add_argument("--sample", action="store_true", help=f"each source for {FIRST} and one other, not for all")
    parser.add_argument("--allow-stack", action="store_true", help="stack frames, as of an older compiler, are no fault")
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    given = parser.parse_args()
    files = [f.resolve() for f in given.files] or sorted(ROOT.glob("crates/**/*.cu"))
    if not files:
        sys.exit("no CUDA source was found")
    library()  # a missing one is named once
    jobs = [
        ((path, *variant), arch)
        for path in files
        for variant in variants(path).items()
        for arch in (sample(path) if given.sample else given.arch)
    ]
    wrong, kernels = [], 0
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for ((path, variant, _), arch), compiled in zip(jobs, pool.map(compile_source, jobs)):
            label = f"{path.relative_to(ROOT)}{variant} for {arch}"
            succeeded, log, code = compiled
            if not succeeded:
                wrong.append(f"{label} does not compile:\n{log}")
                continue
            found, threads = list(report(log)), bounds(path)
            if not found:
                wrong.append(f"{label}: the compiler reports no kernel:\n{log}")
            kernels += len(found)
            for kernel, registers, stack in found:
                stack = 0 if given.allow_stack else stack
                said = faults(kernel, registers, stack, threads.get(kernel, THREADS_MAX))
                wrong += [f"{label}: {fault}" for fault in said]
            most = max((registers for _, registers, _ in found), default=0)
            print(f"{label}: {len(found)} kernels, at most {most} registers, {len(code)} bytes")
    if wrong:
        sys.exit("\n".join(wrong))
    stacks = "" if given.allow_stack else ", none with a stack frame"
    print(f"{len(files)} sources, {kernels} kernels compiled by NVRTC {version()}{stacks}")


if __name__ == "__main__":
    main()
