"""Sums over ranks: threads of one process, or processes over MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from . import _meristem
from ._arguments import flag, integer, optional, real, text
from ._meristem import Array
from .errors import ArgumentError, RankError

Result = TypeVar("Result")

#: Most ranks that are threads.
RANKS_MAX = 1024

#: A numpy array, a PyTorch tensor, or another array in host memory, which a sum overwrites:
#: float32, float64 or bfloat16, contiguous or channels last, of at most four dimensions.
Tensor = Any


class Traffic(NamedTuple):
    """Payload that a rank sent and received, without the transport's own overhead."""

    sent_bytes: int
    received_bytes: int
    #: Messages sent.
    messages: int


class Comm:
    """One rank's membership in a group of ranks.

    All calls are collective: every rank makes the same calls, in the same order, with tensors of the
    same shape, element type and memory format. Sums are made in rank order and have the same bits on
    every rank. A call that fails leaves its tensor as it was; afterwards the group is of no use, and
    every later call of any rank is an error that names the rank that failed.

    A ``with`` block ends the membership, and reports an exception to the other ranks: their call, or
    their next one, is then a ``RankError`` at once. Without it they learn of a lost rank after the
    deadline. A rank is for one thread at a time; a call from another meanwhile is a ``StateError``.
    Ctrl-C is raised during a call, and closes the ``Comm``.
    """

    _member: _meristem.Membership

    def __init__(self) -> None:
        raise TypeError("a Comm is made by Comm.threads(n), Comm.run(n, work) or Comm.mpi()")

    @classmethod
    def _of(cls, member: _meristem.Membership) -> Comm:
        comm = cls.__new__(cls)
        comm._member = member
        return comm

    @classmethod
    def threads(cls, ranks: int, *, deadline: float = 60.0) -> list[Comm]:
        """The members of a group of ranks of this process, one for each thread.

        Args:
            ranks: Number of ranks, at most 1024.
            deadline: Seconds after which a rank stops waiting for the others.

        Raises:
            ArgumentError: A number that does not fit.
        """
        ranks = integer("ranks", ranks, 1, RANKS_MAX)
        members = _meristem.Membership.threads(ranks, real("deadline", deadline))
        return [cls._of(member) for member in members]

    @classmethod
    def mpi(cls, *, deadline: float = 60.0) -> Comm:
        """This process's rank among all that ``mpirun`` started. Once per process.

        The end of the membership waits until the other processes have ended theirs, too.

        Raises:
            RankError: A package that was built without the feature ``mpi``, which the wheels do not
                have; processes that do not join within the deadline.
        """
        return cls._of(_meristem.Membership.mpi(real("deadline", deadline)))

    @classmethod
    def run(
        cls, ranks: int, work: Callable[[Comm], Result], *, deadline: float = 60.0
    ) -> list[Result]:
        """Calls ``work`` on every rank, each in a thread. Returns the results by rank.

        Raises:
            Exception: The one that a rank raised, the others having been told of it.
        """
        group = cls.threads(ranks, deadline=deadline)
        results: list[Any] = [None] * len(group)
        failures: list[BaseException] = []

        def member(comm: Comm) -> None:
            try:
                with comm:
                    results[comm.rank] = work(comm)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=member, args=(comm,), daemon=True) for comm in group]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            for comm in group:
                comm.close()
            raise
        if failures:
            own = [error for error in failures if not isinstance(error, RankError)]
            raise (own or failures)[0]
        return results

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._member.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._member.size

    @property
    def transport(self) -> str:
        """``threads`` or ``mpi``."""
        return self._member.transport

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages that this rank sent and received so far."""
        return Traffic(*self._member.traffic())

    def all_reduce(self, tensor: Tensor, *, mean: bool = False) -> None:
        """Sums a tensor over all ranks, in place, or averages it.

        Raises:
            ArgumentError: A tensor that does not fit; the other ranks get a ``RankError``.
            RankError: A rank with another tensor or another call; one that failed, left, or did not
                come within the deadline.
        """
        self._member.all_reduce(_lending(tensor), self._own(flag, "mean", mean))

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        """Copies rank ``root``'s tensor to all ranks, in place.

        Raises:
            ArgumentError, RankError: As :meth:`all_reduce`.
        """
        self._member.broadcast(_lending(tensor), self._own(integer, "root", root))

    def barrier(self) -> None:
        """Waits until every rank has called it.

        Raises:
            RankError: As :meth:`all_reduce`.
        """
        self._member.barrier()

    def top_k(
        self,
        *,
        density: float = 0.01,
        k: int | None = None,
        method: str = "topk",
        residual: bool = True,
        momentum: float | None = None,
        mean: bool = False,
    ) -> TopK:
        """A sum of the largest elements, for repeated use with tensors of one length and type.

        Args:
            density: Share of its elements that each rank sends.
            k: Number of elements that each rank sends, instead of ``density``.
            method: ``topk``: each rank's largest, gathered by all; ``gtopk`` and ``ok-topk``: the
                largest of the sum, by a tree of merges, or by split and reduce.
            residual: Whether elements that were not sent are added to the next tensor.
            momentum: Factor of momentum correction: velocities are exchanged in place of gradients.
            mean: Whether the sum is divided by the number of ranks.

        Raises:
            ArgumentError: An option that does not fit.
        """
        options = {
            "density": real("density", density),
            "k": optional("k", k),
            "method": text("method", method),
            "residual": flag("residual", residual),
            "momentum": None if momentum is None else real("momentum", momentum),
            "mean": flag("mean", mean),
        }
        return TopK(self._member.top_k(options))

    def _own(self, check: Callable[[str, object], Result], name: str, value: object) -> Result:
        """A checked argument of a collective. The other ranks are told if it does not fit."""
        try:
            return check(name, value)
        except ArgumentError as error:
            self._member.close(error.message)
            raise

    def close(self) -> None:
        """Leaves the group. The other ranks' next call is a ``RankError``."""
        self._member.close(None)

    def __enter__(self) -> Comm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._member.close(None if kind is None else f"{kind.__name__}: {error}")

    def __repr__(self) -> str:
        return f"Comm({self.transport}, rank {self.rank} of {self.size})"


class TopK:
    """A sum of the largest elements of tensors of one length and type, from :meth:`Comm.top_k`."""

    def __init__(self, sum: _meristem.TopK) -> None:
        self._sum = sum

    def all_reduce(self, tensor: Tensor) -> None:
        """Overwrites a tensor with the sum over all ranks of the elements that were sent.

        Raises:
            ArgumentError, RankError: As :meth:`Comm.all_reduce`; more picks than elements; another
                length or type than before.
        """
        self._sum.all_reduce(_lending(tensor))

    @property
    def residual(self) -> Array | None:
        """A flat copy of the sum of the elements that were not sent, in memory order.

        ``None`` before the first sum and with ``residual=False``.
        """
        return self._sum.residual()


def _lending(tensor: Tensor) -> Tensor:
    """The tensor, or an array of its memory if it knows the buffer protocol only.

    Anything else is left for the engine, which tells the other ranks of the error.
    """
    if hasattr(tensor, "__dlpack__"):
        return tensor
    try:
        return np.asarray(memoryview(tensor))
    except TypeError:
        return tensor
