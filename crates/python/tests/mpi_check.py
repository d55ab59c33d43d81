"""Sums between processes: `mpirun -n 3 python crates/python/tests/mpi_check.py`.

Needs a package with the feature `mpi`.
"""

import numpy as np

from meristem import Comm, errors


def main() -> None:
    with Comm.mpi(deadline=30) as comm:
        last = comm.size - 1
        assert comm.transport == "mpi" and comm.size > 1
        x = np.full(1000, 2.0**comm.rank, np.float32)
        comm.all_reduce(x)
        assert (x == 2**comm.size - 1).all()
        y = np.zeros(100, np.float32)
        y[comm.rank] = 5
        comm.top_k(k=1, mean=True).all_reduce(y)
        assert np.count_nonzero(y) == comm.size and np.isclose(y.sum(), 5)
        comm.broadcast(x[:1], root=last)
        comm.barrier()
        try:
            Comm.mpi()
        except errors.RankError as error:
            assert "already runs in this process" in error.message and error.remedy is None
        else:
            raise AssertionError("MPI started twice")
        print(f"rank {comm.rank} of {comm.size}: sums over MPI are right")


if __name__ == "__main__":
    main()
