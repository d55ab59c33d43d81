"""All-reduce of the MPI library between processes on this machine: the peer of the dense sum of `meristem-comm`.

    mpirun -n 2 python bench/mpi_allreduce.py

N f32, in place. Times are measured on rank 0 from a barrier on, in milliseconds.
"""

import argparse
import json
import statistics
import time

import numpy as np
from mpi4py import MPI


def source(rank: int, n: int) -> np.ndarray:
    """Whole numbers, as in our bench: sums are exact in any order."""
    i = np.arange(n, dtype=np.int64)
    return (((i * 2654435761 + rank * 40503) & 0x3FFFFF) - 2097152).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    me, n = world.Get_rank(), args.elements
    own = source(me, n)
    x = own.copy()
    times = []
    for turn in range(args.rounds + 1):
        x[:] = own
        world.Barrier()
        start = time.perf_counter()
        world.Allreduce(MPI.IN_PLACE, x, op=MPI.SUM)
        if turn:
            times.append((time.perf_counter() - start) * 1e3)
    expected = sum(source(rank, n) for rank in range(world.Get_size()))
    report = {
        "elements": n,
        "ranks": world.Get_size(),
        "library": MPI.Get_library_version().split(",")[0].strip(),
        "dense_ms": statistics.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "wrong": int((x != expected).sum()),
    }
    if me == 0:
        print(json.dumps(report) if args.json else report)


if __name__ == "__main__":
    main()
