#!/usr/bin/env python3
"""Programs that a cargo command built: lines of crate, target and path.

Reads what `--message-format=json` prints. The target is `bin` for a program, and for a test program `lib`, `main` (the
unit tests of a program) or the name of the integration test."""
import json
import os
import sys

for line in sys.stdin:
    built = json.loads(line)
    if not built.get("executable"):
        continue
    target = built["target"]
    kind = target["kind"][0]
    if kind == "example":
        continue
    tests = built["profile"]["test"]
    name = target["name"] if kind == "test" else "lib" if kind != "bin" else "main" if tests else "bin"
    print(os.path.basename(os.path.dirname(built["manifest_path"])), name, built["executable"])
