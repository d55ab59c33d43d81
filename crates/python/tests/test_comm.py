"""Collectives between ranks that are threads."""

import _thread
import array
import gc
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from meristem import Comm, errors

#: Seconds within which a rank learns that another one failed; the deadline is a minute.
SOON = 20.0


def noise(rank: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=shape).astype(np.float32)


def both(one, other, deadline: float = 60.0):
    """The results of two ranks, or the errors that they raised."""
    outcomes = [None, None]

    def member(comm, work):
        try:
            with comm:
                outcomes[comm.rank] = work(comm)
        except BaseException as error:
            outcomes[comm.rank] = error

    pairs = zip(Comm.threads(2, deadline=deadline), (one, other), strict=True)
    threads = [threading.Thread(target=member, args=pair) for pair in pairs]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < SOON
    return outcomes


def summed(comm: Comm, x):
    comm.all_reduce(x)
    return x


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_sum_is_in_place_in_rank_order_and_the_same_everywhere(ranks):
    def work(comm):
        assert (comm.size, comm.transport) == (ranks, "threads")
        x = noise(comm.rank, 3, 1001)
        address = x.ctypes.data
        comm.all_reduce(x)
        assert x.ctypes.data == address
        return x

    results = Comm.run(ranks, work)
    expected = noise(0, 3, 1001)
    for rank in range(1, ranks):
        expected = expected + noise(rank, 3, 1001)
    assert all((x == expected).all() for x in results)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_types_shapes_and_means(dtype):
    def work(comm):
        for shape in [(), (0,), (7,), (2, 3), (2, 3, 4), (2, 0, 3, 4), (2, 3, 4, 5)]:
            x = np.full(shape, comm.rank + 1, dtype)
            comm.all_reduce(x, mean=True)
            assert x.dtype == dtype and (x == 1.5).all()
        strided = np.zeros((1, 4, 1), dtype)[:, :, ::1]
        comm.all_reduce(strided)
        return comm.traffic

    one, other = Comm.run(2, work)
    assert one.sent_bytes == other.received_bytes > 0 and one.messages > 0


def test_channels_last_is_a_separate_layout():
    def last(comm):
        x = noise(comm.rank, 2, 5, 4, 3).transpose(0, 3, 1, 2)
        comm.all_reduce(x)
        return x

    one, other = Comm.run(2, last)
    expected = noise(0, 2, 5, 4, 3) + noise(1, 2, 5, 4, 3)
    assert (one == expected.transpose(0, 3, 1, 2)).all() and (one == other).all()
    row_major = both(last, lambda comm: summed(comm, noise(1, 2, 3, 5, 4)))
    assert all(isinstance(e, errors.RankError) for e in row_major)
    assert "channels last" in str(row_major[0])


def test_memory_of_the_buffer_protocol_is_summed_too():
    def work(comm):
        x = array.array("f", [comm.rank, 1.0])
        comm.all_reduce(x)
        return list(x)

    assert Comm.run(2, work) == [[1.0, 2.0]] * 2


class OfAnOlderProtocol:
    """An array of a library whose `__dlpack__` has no argument for the version."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self):
        return self.x.__dlpack__()

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def test_capsules_of_the_older_protocol_are_consumed_and_freed():
    x = np.ones(4, np.float32)
    before = sys.getrefcount(x)
    [comm] = Comm.threads(1)
    for tensor in (x, OfAnOlderProtocol(x)):
        comm.all_reduce(tensor)
        comm.broadcast(tensor)
    del tensor
    gc.collect()
    assert sys.getrefcount(x) == before and (x == 1).all()


def test_a_broadcast_copies_the_root():
    def work(comm):
        x = np.full(9, comm.rank, np.float32)
        comm.barrier()
        comm.broadcast(x, root=2)
        return x

    assert all((x == 2).all() for x in Comm.run(3, work))


@pytest.mark.parametrize("method", ["topk", "gtopk", "ok-topk"])
def test_unsent_elements_are_added_to_the_next_sum(method):
    steps, n = 12, 400

    def work(comm):
        total = np.zeros(n, np.float32)
        sums = comm.top_k(k=8, method=method)
        assert sums.residual is None
        for step in range(steps):
            x = noise(100 * step + comm.rank, 20, 20)
            sums.all_reduce(x)
            assert 0 < np.count_nonzero(x) <= 16
            total += x.ravel()
        return total, np.from_dlpack(sums.residual)

    (one, kept_one), (other, kept_other) = Comm.run(2, work)
    assert (one == other).all()
    whole = sum(noise(100 * step + rank, n) for step in range(steps) for rank in range(2))
    # Sent plus kept elements equal the input, up to the order of addition.
    np.testing.assert_allclose(one + kept_one + kept_other, whole, atol=1e-4)


def test_eight_bits_sum_with_error_feedback():
    steps, length = 5, 1000

    def work(comm):
        coarse, mean = comm.int8(), comm.int8(mean=True)
        assert coarse.residual is None
        results = []
        for step in range(steps):
            x = noise(10 * step + comm.rank, length)
            coarse.all_reduce(x)
            results.append(x)
        before = comm.traffic.sent_bytes
        y = noise(comm.rank, length)
        mean.all_reduce(y)
        return results, coarse.residual, y, comm.traffic.sent_bytes - before

    ranks = Comm.run(3, work)
    for one, other in zip(ranks[0][0], ranks[2][0], strict=True):
        assert one.tobytes() == other.tobytes()
    # Nothing is lost: what was not in the sums is in the residuals. Sums of 15 numbers below 5 round
    # in f32 by less than 15 · 2 · 75 · 2^-24 = 1.4e-4.
    given = sum(noise(10 * step + rank, length).astype(float) for step in range(steps) for rank in range(3))
    kept = sum(np.stack(results).astype(float).sum(axis=0) for results, *_ in ranks[:1])
    residuals = sum(residual.astype(float) for _, residual, *_ in ranks)
    np.testing.assert_allclose(kept + residuals, given, atol=1.4e-4)
    assert np.abs(residuals).max() > 1e-3
    # Three values and a sum of three are rounded by half a scale each: m / 254 with m below 5 and 15.
    mean = sum(noise(rank, length).astype(float) for rank in range(3)) / 3
    assert 0 < np.abs(ranks[0][2] - mean).max() < (3 * 5 + 15) / 254 / 3
    # Two ranks send the third their codes of its share, and it sends them its sums: four bytes for each
    # element, and a scale of four bytes for every 256. In f32 it would be 16,000.
    assert sum(sent for *_, sent in ranks) == 4 * length + 4 * 4 * 4


def test_an_outer_step_is_nesterovs_of_the_mean_difference():
    start = np.linspace(-1, 1, 12).reshape(3, 4)

    def trained(rank, round, weights):
        return weights - 0.1 * (rank + 1) * (round + 1)

    def work(comm, **options):
        outer = comm.outer_step(**options)
        weights = start.copy()
        outer.begin(weights)
        for round in range(3):
            weights[:] = trained(comm.rank, round, weights)
            outer.step(weights)
        return weights

    for lr, momentum in [(0.7, 0.9), (1.0, 0.0)]:
        one, other = Comm.run(2, lambda comm, own=(lr, momentum): work(comm, lr=own[0], momentum=own[1]))
        theta, velocity = start, np.zeros_like(start)
        for round in range(3):
            delta = sum(theta - trained(rank, round, theta) for rank in range(2)) / 2
            velocity = momentum * velocity + delta
            theta = theta - lr * (delta + momentum * velocity)
        assert one.tobytes() == other.tobytes()
        np.testing.assert_allclose(one, theta, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", ["int8", "topk", "gtopk", "ok-topk"])
def test_outer_steps_with_less_traffic_are_the_same_everywhere(method):
    def work(comm):
        outer = comm.outer_step(method=method, density=0.25)
        weights = np.zeros(512, np.float32)
        outer.begin(weights)
        for round in range(3):
            weights += noise(round * 2 + comm.rank, 512)
            outer.step(weights)
        return weights

    one, other = Comm.run(2, work)
    assert one.tobytes() == other.tobytes() and np.count_nonzero(one) > 100


def test_wrong_outer_steps_and_sums_are_named():
    [comm] = Comm.threads(1)
    with pytest.raises(errors.StateError, match="before `begin`"):
        comm.outer_step().step(np.zeros(3))
    for options, text in [
        ({"method": "dens"}, "got `dens`"),
        ({"lr": "fast"}, "`lr`"),
    ]:
        with pytest.raises(errors.ArgumentError, match=text):
            Comm.threads(1)[0].outer_step(**options)
    for options, text in [({"lr": 0.0}, "lr"), ({"momentum": 1.0}, "momentum")]:
        with pytest.raises(errors.ArgumentError, match=text):
            Comm.threads(1)[0].outer_step(**options).begin(np.zeros(3))
    with pytest.raises(errors.ArgumentError, match="`momentum`"):
        Comm.threads(1)[0].int8(momentum=1.0)
    with pytest.raises(errors.ArgumentError, match="f32"):
        Comm.threads(1)[0].int8().all_reduce(np.zeros(3))


def test_the_largest_elements_of_all_ranks_are_gathered():
    def work(comm):
        x = np.array([[0, 5, -7], [comm.rank, 1, 2]], np.float64)
        before = x.copy()
        largest = comm.top_k(k=3)
        first = largest.all_gather(x)
        # Another call does not change the first result.
        largest.all_gather(x * 0)
        assert (x == before).all()
        return np.from_dlpack(first.values).tolist(), np.from_dlpack(first.indices).tolist()

    values = [[5, -7, 2]] * 3 + [[5, -7, 3]]
    # Rank 2 has two elements of magnitude 2: the first of them counts.
    indices = [[1, 2, 5]] * 2 + [[1, 2, 3]] * 2
    assert Comm.run(4, work) == [(values, indices)] * 4


@pytest.mark.parametrize(
    ("x", "text"),
    [(np.ones(5, np.float32), "[6], got [5]"), (np.ones((1, 2, 3, 1), np.float32), "[6], got")],
)
def test_a_tensor_that_cannot_be_gathered_is_an_error_on_all_ranks(x, text):
    def work(comm):
        largest = comm.top_k(k=2)
        largest.all_gather(np.ones(6, np.float32))
        largest.all_gather(x if comm.rank == 0 else np.ones(6, np.float32))

    with pytest.raises(errors.ArgumentError, match=re.escape(text)):
        Comm.run(2, work)


def test_the_largest_elements_of_each_rank_are_sent():
    def work(comm):
        x = np.array([9, 1, 2, 0], np.float64) if comm.rank else np.array([1, 0, 2, 8], np.float64)
        comm.top_k(k=1, residual=False, mean=True).all_reduce(x)
        y = np.arange(100, dtype=np.float64)
        comm.top_k(density=0.02).all_reduce(y)
        return x.tolist(), y.nonzero()[0].tolist()

    assert Comm.run(2, work) == [([4.5, 0, 0, 4], [98, 99])] * 2


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (np.zeros(3, np.int64), "got int64, expected float32, float64 or bfloat16"),
        (np.zeros(3, np.float16), "got float16"),
        (np.zeros(6, np.float32)[::2], "expected a contiguous or channels-last array"),
        (np.zeros((3, 2), np.float32).T, "shape [2, 3] with strides [1, 2]"),
        (np.broadcast_to(np.float32(1), (3,)), "read-only"),
        (np.zeros((1,) * 5, np.float32), "got 5 dimensions, expected at most four"),
        (np.frombuffer(bytearray(9), np.float32, 2, 1), "aligned"),
        ([1.0, 2.0], "got a `list`, expected an array with DLPack support"),
        (np.array(["a"]), "got a `ndarray` whose `__dlpack__` failed"),
        (None, "got a `NoneType`"),
    ],
)
def test_an_unsuitable_tensor_is_an_error_on_all_ranks(tensor, text):
    x = noise(1, 3)
    before = x.copy()
    own, told = both(lambda comm: comm.all_reduce(tensor), lambda comm: comm.all_reduce(x))
    assert isinstance(own, errors.ArgumentError) and isinstance(own, ValueError)
    assert text in str(own) and own.exit_code == 2 and own.remedy
    assert isinstance(told, errors.RankError)
    assert "rank 0 failed: `tensor`: got" in str(told) and "help:" not in told.message
    assert (x == before).all()


class OnADevice:
    def __dlpack__(self, **asked):
        raise AssertionError("asked for its memory")

    def __dlpack_device__(self):
        return (2, 1)


def test_a_tensor_on_a_device_is_refused_without_requesting_its_capsule():
    [comm] = Comm.threads(1)
    with pytest.raises(errors.ArgumentError, match="on a CUDA device .number 1., expected an array"):
        comm.all_reduce(OnADevice())
    with pytest.raises(errors.StateError, match="the Comm of rank 0 is closed"):
        comm.barrier()


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda comm: summed(comm, np.zeros(4, np.float32)), "element count 4"),
        (lambda comm: summed(comm, np.zeros((3, 1), np.float32)), "shape"),
        (lambda comm: summed(comm, np.zeros(3, np.float64)), "f64"),
        (lambda comm: comm.all_reduce(np.zeros(3, np.float32), mean=True), "parameter"),
        (lambda comm: comm.barrier(), "barrier"),
        (lambda comm: comm.top_k(k=1).all_reduce(np.zeros(3, np.float32)), "topk_all_reduce"),
    ],
)
def test_ranks_whose_calls_differ_all_get_the_error(other, text):
    x = noise(1, 3)
    before = x.copy()
    outcomes = both(lambda comm: comm.all_reduce(x), other)
    assert all(isinstance(e, errors.RankError) for e in outcomes), outcomes
    assert all("rank 1 has" in str(e) or "rank 0 has" in str(e) for e in outcomes)
    assert text in str(outcomes[0])
    assert (x == before).all()


def test_a_rank_that_raises_ends_the_waiting_of_the_others():
    def fails(comm):
        time.sleep(0.2)
        raise KeyError("lost")

    own, told = both(fails, lambda comm: summed(comm, noise(0, 5)))
    assert isinstance(own, KeyError)
    assert isinstance(told, errors.RankError)
    assert "rank 0 failed: KeyError: 'lost'; the other ranks cannot continue" in str(told)

    def work(comm):
        comm.barrier()
        if comm.rank == 1:
            raise KeyError("lost")
        comm.barrier()

    with pytest.raises(KeyError):
        Comm.run(3, work)


def test_a_rank_that_left_or_was_dropped_is_named():
    gone = both(lambda comm: None, lambda comm: comm.barrier())[1]
    assert isinstance(gone, errors.RankError) and "rank 0 is gone: it left the group" in str(gone)
    one, other = Comm.threads(2)
    del one
    with pytest.raises(errors.RankError, match="rank 0 is gone"):
        other.barrier()


def test_a_rank_without_a_call_is_named_after_the_deadline():
    one, other = Comm.threads(2, deadline=0.3)
    with pytest.raises(errors.RankError, match="rank 1 did not arrive within 0.3 s") as caught:
        one.barrier()
    assert "deadline" in caught.value.remedy
    with pytest.raises(errors.RankError, match="rank 1 did not arrive"):
        other.barrier()


def test_a_rank_is_for_one_thread_at_a_time():
    one, other = Comm.threads(2)
    waiting = threading.Thread(target=one.barrier)
    waiting.start()
    refused = None
    end = time.monotonic() + SOON
    while refused is None and time.monotonic() < end:
        try:
            one.traffic  # noqa: B018
        except errors.StateError as error:
            refused = error
    with pytest.raises(errors.StateError, match="the Comm of rank 0 is in use by another thread"):
        one.barrier()
    # Other threads run meanwhile, and the refused call had no effect.
    other.barrier()
    waiting.join()
    assert "in use by another thread" in str(refused)
    one.close()
    one.close()


def test_an_exception_beside_a_call_reaches_the_others_when_the_call_ends():
    [one, other] = Comm.threads(2)
    waiting = threading.Thread(target=one.barrier)
    with pytest.raises(ValueError, match="no more data"):
        with one:
            waiting.start()
            end = time.monotonic() + SOON
            while time.monotonic() < end:
                try:
                    one.traffic  # noqa: B018
                except errors.StateError:
                    break
            raise ValueError("no more data")
    other.barrier()
    waiting.join()
    with pytest.raises(errors.RankError, match="no more data"):
        other.barrier()


def test_ctrl_c_ends_a_call_that_waits():
    [one, other] = Comm.threads(2)
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    x = noise(1, 3)
    before = x.copy()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        one.all_reduce(x)
    assert time.monotonic() - start < SOON and (x == before).all()
    with pytest.raises(errors.StateError, match="closed"):
        one.barrier()
    # The interrupted call may succeed, but later calls fail.
    with pytest.raises(errors.RankError, match="rank 0 is gone"):
        for _ in range(2):
            other.all_reduce(x)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Comm.threads(0), "`ranks`: got 0, expected 1 to 1024"),
        (lambda: Comm.threads(-1), "`ranks`: got -1"),
        (lambda: Comm.threads(2, deadline=0), "`deadline`: got 0"),
        (lambda: Comm.threads(2, deadline=float("nan")), "`deadline`: got NaN"),
        (lambda: Comm.threads(1)[0].top_k(density=0), "`density`: got 0"),
        (lambda: Comm.threads(1)[0].top_k(method="top"), "expected topk, gtopk or ok-topk"),
        (lambda: Comm.threads(1)[0].top_k(momentum=1.0), "`momentum`: got 1"),
        (lambda: Comm.threads(1)[0].top_k(momentum=0.9, residual=False), "`momentum`"),
        (lambda: Comm.threads(1)[0].top_k(k=-1), "`k`: got -1"),
        (lambda: Comm.threads(1)[0].broadcast(noise(0, 3), root=1), "`root` must be below 1"),
        (lambda: Comm.threads(1)[0].top_k(k=4).all_reduce(noise(0, 3)), "`k` must be at most 3"),
    ],
)
def test_an_invalid_argument_is_named(make, text):
    with pytest.raises(errors.ArgumentError) as caught:
        make()
    assert text in str(caught.value)


def test_mpi_is_a_feature_that_the_error_names():
    if os.environ.get("MERISTEM_PYTHON_MPI"):
        pytest.skip("a package with the feature")
    with pytest.raises(errors.RankError) as caught:
        Comm.mpi()
    assert "this build has no MPI" in str(caught.value)
    assert "--features mpi" in caught.value.remedy and caught.value.exit_code == 2


def test_a_fork_is_refused():
    script = (
        "import os, meristem\n"
        "[comm] = meristem.Comm.threads(1)\n"
        "if os.fork() == 0:\n"
        "    try: comm.barrier()\n"
        "    except meristem.errors.StateError as error: os._exit(7 if 'forked' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "7\n", done.stderr
