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

#: Maximum number of ranks that are threads.
RANKS_MAX = 1024

#: A numpy array, a PyTorch tensor, or another array in host memory, which collectives overwrite.
#: It has float32, float64 or bfloat16 elements and at most four dimensions, and is contiguous or
#: channels last.
Tensor = Any


class Traffic(NamedTuple):
    """Payload that a rank sent and received, without the overhead of the transport."""

    sent_bytes: int
    received_bytes: int
    #: Messages sent.
    messages: int


class Gathered(NamedTuple):
    """Elements of all ranks, by rank: row ``r`` has the elements of rank ``r``, in order of index."""

    #: [ranks, k], of the tensor's type.
    values: Array
    #: int32 [ranks, k]: index of each element in its rank's tensor, in memory order.
    indices: Array


class Comm:
    """One rank of a group of ranks.

    All calls are collective: every rank makes the same calls, in the same order, with tensors of the
    same shape, element type and memory format. Sums are computed in rank order and have the same
    bits on every rank. A call that fails leaves its tensor unchanged. Afterwards the group cannot be
    used: every later call of any rank raises an error that names the failed rank.

    The end of a ``with`` block leaves the group, and reports an exception to the other ranks, whose
    current or next call raises a ``RankError`` at once. Without a ``with`` block they detect a lost
    rank at the deadline. One thread at a time may use a ``Comm``; a concurrent call from another
    thread raises a ``StateError``. Ctrl-C is raised during a call, and closes the ``Comm``.
    """

    _member: _meristem.Membership

    def __init__(self) -> None:
        raise TypeError("create a Comm by Comm.threads(n), Comm.run(n, work) or Comm.mpi()")

    @classmethod
    def _of(cls, member: _meristem.Membership) -> Comm:
        comm = cls.__new__(cls)
        comm._member = member
        return comm

    @classmethod
    def threads(cls, ranks: int, *, deadline: float = 60.0) -> list[Comm]:
        """Creates a group of ranks of this process, one for each thread, and returns its members.

        Args:
            ranks: Number of ranks, at most 1024.
            deadline: Seconds after which a rank stops waiting for the others.

        Raises:
            ArgumentError: A number is out of range.
        """
        ranks = integer("ranks", ranks, 1, RANKS_MAX)
        members = _meristem.Membership.threads(ranks, real("deadline", deadline))
        return [cls._of(member) for member in members]

    @classmethod
    def mpi(cls, *, deadline: float = 60.0) -> Comm:
        """Returns this process's rank under ``mpirun``. Can be called once per process.

        Closing it waits until the other processes have closed theirs.

        Raises:
            RankError: The package was built without the feature ``mpi``, as the wheels are; or not
                all processes have joined within the deadline.
        """
        return cls._of(_meristem.Membership.mpi(real("deadline", deadline)))

    @classmethod
    def run(
        cls, ranks: int, work: Callable[[Comm], Result], *, deadline: float = 60.0
    ) -> list[Result]:
        """Calls ``work`` on every rank, each in a thread. Returns the results by rank.

        Raises:
            Exception: The exception of a rank; the other ranks have ended with a ``RankError``.
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
            # The others end with a RankError because of the first failure.
            first = [error for error in failures if not isinstance(error, RankError)]
            raise (first or failures)[0]
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
        """Bytes and messages that this rank has sent and received."""
        return Traffic(*self._member.traffic())

    def all_reduce(self, tensor: Tensor, *, mean: bool = False) -> None:
        """Sums or averages a tensor over all ranks, in place.

        Raises:
            ArgumentError: The tensor is unsuitable; the other ranks get a ``RankError``.
            RankError: A rank has another tensor or another call, failed, left, or did not join the
                call within the deadline.
        """
        self._member.all_reduce(_lending(tensor), self._checked(flag, "mean", mean))

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> None:
        """Copies rank ``root``'s tensor to all ranks, in place.

        Raises:
            ArgumentError, RankError: As :meth:`all_reduce`.
        """
        self._member.broadcast(_lending(tensor), self._checked(integer, "root", root))

    def barrier(self) -> None:
        """Waits until every rank has called this method.

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
        """Creates a sparse all-reduce, in which each rank sends its largest elements, for tensors of one
        length and type.

        Args:
            density: Share of its elements that each rank sends.
            k: Number of elements that each rank sends, instead of ``density``.
            method: ``topk``: the largest elements of each rank, gathered by all ranks. ``gtopk``:
                the largest elements of the sum, by a tree of merges. ``ok-topk``: the largest
                elements of the sum, by split and reduce.
            residual: Whether unsent elements are added to the next tensor.
            momentum: Factor of momentum correction, which exchanges velocities instead of
                gradients; ``None`` for no correction.
            mean: Whether the sum is divided by the number of ranks.

        Raises:
            ArgumentError: An option is invalid.
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

    def int8(self, *, momentum: float | None = None, mean: bool = False) -> Int8:
        """Creates an all-reduce with eight bits for each element, for float32 tensors of one length.

        256 consecutive elements share a scale, and rounding errors are added to the next tensor. A
        rank sends about a quarter of the bytes of :meth:`all_reduce`. The format is that of
        ``--exchange int8``.

        Args:
            momentum: Factor of momentum correction, as in :meth:`top_k`.
            mean: Whether the sum is divided by the number of ranks.

        Raises:
            ArgumentError: An option is invalid.
        """
        factor = None if momentum is None else real("momentum", momentum)
        return Int8(_meristem.Int8(self._member, factor, flag("mean", mean)))

    def outer_step(
        self,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        method: str = "dense",
        density: float = 0.01,
    ) -> OuterStep:
        """Creates the outer step of weights that each rank trains on its own (DiLoCo).

        It averages over the ranks the change of the weights since the last outer step, and makes a step
        with Nesterov's momentum (Douillard et al. 2023, algorithm 1). With ``lr=1, momentum=0`` it
        averages the weights.

        Args:
            lr: Learning rate, above 0.
            momentum: Momentum, at least 0 and below 1.
            method: Exchange of the differences: ``dense``, ``int8``, ``topk``, ``gtopk`` or ``ok-topk``,
                all but the first with error feedback.
            density: Share of its elements that each rank sends by the last three.

        Raises:
            ArgumentError: The name of the method is unknown; other options are checked by
                :meth:`OuterStep.begin`.
        """
        checked = real("lr", lr), real("momentum", momentum), text("method", method), real("density", density)
        return OuterStep(_meristem.Outer(self._member, *checked))

    def _checked(self, check: Callable[[str, object], Result], name: str, value: object) -> Result:
        """Checks an argument of a collective. If it is invalid, the other ranks get an error."""
        try:
            return check(name, value)
        except ArgumentError as error:
            self._member.close(error.message)
            raise

    def close(self) -> None:
        """Leaves the group. The next call of the other ranks raises a ``RankError``."""
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
    """A sparse all-reduce for tensors of one length and type, from :meth:`Comm.top_k`."""

    def __init__(self, sum: _meristem.TopK) -> None:
        self._sum = sum

    def all_reduce(self, tensor: Tensor) -> None:
        """Overwrites a tensor with the sum over all ranks of the sent elements.

        Raises:
            ArgumentError, RankError: As :meth:`Comm.all_reduce`; or ``k`` exceeds the number of
                elements, or length or type differ from the first tensor.
        """
        self._sum.all_reduce(_lending(tensor))

    def all_gather(self, tensor: Tensor) -> Gathered:
        """The largest elements of every rank's tensor, and their indices in it.

        Does not use the residual, ``method`` and ``mean``. Waits for all ranks.

        Raises:
            ArgumentError, RankError: As :meth:`all_reduce`. A tensor that cannot be gathered is
                unchanged.
        """
        return Gathered(*self._sum.all_gather(_lending(tensor)))

    @property
    def residual(self) -> Array | None:
        """A flat copy of the residual, which has the sums of the unsent elements, in memory order.

        ``None`` before the first sum and with ``residual=False``.
        """
        return self._sum.residual()


class Int8:
    """An all-reduce with eight bits for each element, for float32 tensors of one length, from
    :meth:`Comm.int8`."""

    def __init__(self, sum: _meristem.Int8) -> None:
        self._sum = sum

    def all_reduce(self, tensor: Tensor) -> None:
        """Overwrites a tensor with the sum over all ranks, with the same bits on every rank.

        Raises:
            ArgumentError, RankError: As :meth:`Comm.all_reduce`; or length or type differ from the
                first tensor.
        """
        self._sum.all_reduce(_lending(tensor))

    @property
    def residual(self) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """A flat copy of the rounding errors that the next sum corrects, in memory order.

        ``None`` before the first sum.
        """
        residual = self._sum.residual()
        return None if residual is None else np.frombuffer(residual, np.float32)


class OuterStep:
    """The outer step of weights as one tensor, from :meth:`Comm.outer_step`."""

    def __init__(self, outer: _meristem.Outer) -> None:
        self._outer = outer

    def begin(self, weights: Tensor) -> None:
        """Begins the first round of local steps from weights that are equal on all ranks.

        Raises:
            ArgumentError, RankError: As :meth:`Comm.all_reduce`; or an option is invalid.
        """
        self._outer.begin(_lending(weights))

    def step(self, weights: Tensor) -> None:
        """Replaces the weights of this rank by the new synchronised ones, and begins the next round.

        Raises:
            ArgumentError, RankError: As :meth:`Comm.all_reduce`.
            StateError: It was called before :meth:`begin`.
        """
        self._outer.step(_lending(weights))


def _lending(tensor: Tensor) -> Tensor:
    """The tensor, or a numpy array of its memory if it has only the buffer protocol.

    Other objects are returned unchanged, because the engine refuses them and tells the other ranks.
    """
    if hasattr(tensor, "__dlpack__"):
        return tensor
    try:
        return np.asarray(memoryview(tensor))
    except TypeError:
        return tensor
