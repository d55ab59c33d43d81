#!/usr/bin/env python3
"""Imports every script of a pack of `bench/gpu.sh` from a copy elsewhere: `check_pack.py FOLDER|FILE.tar.xz`.

Packages that are not installed here, such as PyTorch and JAX, are replaced by modules that have every name, so what
fails is a module that the pack lacks."""

import importlib.abc
import importlib.machinery
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest.mock

# What the machine with the GPU has.
INSTALLED = {"torch", "jax", "numpy", "safetensors"}


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages of `INSTALLED` that nothing else has found."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in INSTALLED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return unittest.mock.MagicMock(name=spec.name, __path__=[])

    def exec_module(self, module):
        pass


def import_here(script):
    """Imports a script as a program does that starts it, by its folder."""
    sys.meta_path.append(Absent())
    sys.path.insert(0, str(script.parent))
    __import__(script.stem)


def unpack(pack, to):
    """The pack's folder, unpacked or copied into another one."""
    if pack.is_dir():
        return pathlib.Path(shutil.copytree(pack, to / pack.name, ignore=shutil.ignore_patterns("bin")))
    with tarfile.open(pack) as archive:
        archive.extractall(to, filter="data")
    return next(to.iterdir())


def main():
    if sys.argv[1] == "--import":
        return import_here(pathlib.Path(sys.argv[2]))
    with tempfile.TemporaryDirectory() as scratch:
        folder = unpack(pathlib.Path(sys.argv[1]), pathlib.Path(scratch))
        scripts = sorted([*folder.glob("bench/*.py"), *folder.glob("reference/*.py")])
        if not scripts:
            sys.exit(f"{sys.argv[1]} has no scripts")
        for script in scripts:
            # In a folder that has nothing, without what the environment adds.
            command = [sys.executable, "-E", "-s", str(pathlib.Path(__file__).resolve()), "--import", str(script)]
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"{script.relative_to(folder)} cannot be imported where it is unpacked:\n{done.stderr}")
        print(f"{len(scripts)} scripts can be imported where they are unpacked")


if __name__ == "__main__":
    main()
