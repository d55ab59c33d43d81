"""A loss of one's own on two processes, each of which calls its own function for its part of every
batch: `mpirun -n 2 python crates/python/tests/mpi_loss.py FOLDER`. The same without `mpirun` trains with
two threads, and compares the weights bit for bit. Needs a package with the feature `mpi`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import meristem


def cross_entropy(outputs: Any, classes: Any) -> tuple[Any, Any]:
    """The built-in loss of classes."""
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    p, rows = powers / powers.sum(axis=1, keepdims=True), np.arange(len(classes))
    slopes = p.copy()
    slopes[rows, classes] -= 1
    return -np.log(p[rows, classes]), slopes


def main(folder: Path) -> None:
    settings: dict[str, Any] = {
        "dataset": "blobs", "host": "mlp:16", "blueprints": "vectors", "controller": "none", "envs": 1,
        "steps": 3, "batch": 64, "max_batches": 4, "control_split": 0.2, "twin": False,
        "data_parallel": True, "loss": cross_entropy,
    }  # fmt: skip
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        meristem.train(**settings, comm="mpi", run_dir=folder / "processes")
        return
    threads = meristem.train(**settings, ranks=2, run_dir=folder / "threads")
    processes = meristem.Run(folder / "processes")
    assert processes.weights(0).read_bytes() == threads.weights(0).read_bytes()
    print("a loss of one's own: two processes have the bits of two threads")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
