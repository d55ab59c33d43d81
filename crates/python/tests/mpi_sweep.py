"""A sweep on processes of MPI: `mpirun -n 3 python -m mpi4py.futures crates/python/tests/mpi_sweep.py`."""

import os
import tempfile

from mpi4py.futures import MPIPoolExecutor

import meristem

SETTINGS = {
    "space": {"lr": {"log_uniform": [1e-3, 1]}}, "samples": 9, "scheduler": "halving:2",
    "dataset": "mnist1d", "host": "mlp:8", "steps": 5, "max_batches": 3, "batch": 32,
}


def main() -> None:
    with MPIPoolExecutor() as executor:
        parts = meristem.sweep(executor=executor, **SETTINGS)
        assert executor.num_workers > 1
    # mpirun started other processes, which are not ranks of this run.
    os.environ.pop("OMPI_COMM_WORLD_SIZE", None)
    with tempfile.TemporaryDirectory() as folder:
        run = meristem.sweep(run_dir=f"{folder}/run", **SETTINGS)
        assert parts.leaderboard == run.leaderboard
        assert all(parts.weights(env) == run.weights(env).read_bytes() for env in range(9))
    print(f"{len(parts.leaderboard)} members as in one run")


if __name__ == "__main__":
    main()
