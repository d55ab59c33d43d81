"""Losses of arrays on the device (T3): on the CPU, and on CUDA where the variable
``MERISTEM_TEST_DEVICE`` names a device of the stand-in."""

import gc
import os
from typing import Any

import numpy as np
import pytest
from device_loss import CPU, CUDA, Lent, Taken, cross_entropy

import meristem
from meristem import errors

DEVICE = os.environ.get("MERISTEM_TEST_DEVICE", "cpu")
WANTED = (CPU, 0) if DEVICE == "cpu" else (CUDA, 0)
RUN: dict[str, Any] = {
    "dataset": "blobs", "host": "mlp:8", "blueprints": "vectors", "envs": 2, "steps": 3, "batch": 16,
    "max_batches": 5, "controller": "none", "twin": False, "seed": 3, "devices": DEVICE,
}  # fmt: skip


def weights_of(run: meristem.Run) -> dict[str, Any]:
    return {
        f"{env} {name}": tensor
        for env in range(2)
        for name, tensor in meristem.weights.load(run.weights(env)).tensors.items()
    }


def on_device(seen: list[Any], streams: list[Any]) -> Any:
    """Cross-entropy of arrays that a library of the test reads and lends."""

    def loss(outputs: Any, classes: Any) -> Any:
        assert outputs.__dlpack_device__() == WANTED == classes.__dlpack_device__()
        mine = None if DEVICE == "cpu" else 1
        x, y = Taken(outputs, mine), Taken(classes, mine)
        assert x.device == y.device == WANTED and x.strides == (x.shape[1], 1)
        assert y.numbers.dtype == np.int32 and x.numbers.dtype == np.float32
        seen.append((x.shape, x.address))
        losses, gradient = cross_entropy(x.numbers, y.numbers)
        return Lent(losses, WANTED, streams), Lent(gradient, WANTED, streams)

    return meristem.OnDevice(loss)


def test_arrays_on_the_device_give_the_results_of_numpy(tmp_path: Any) -> None:
    seen: list[Any] = []
    streams: list[Any] = []
    run = meristem.train(run_dir=tmp_path / "device", loss=on_device(seen, streams), **RUN)
    other = meristem.train(run_dir=tmp_path / "host", loss=cross_entropy, **RUN)
    # The engine scales the gradient of numpy's arrays, the library that of the device's: the same product.
    mine, numpys = weights_of(run), weights_of(other)
    assert all((mine[name] == tensor).all() for name, tensor in numpys.items())
    assert run.summary["envs"] == other.summary["envs"] or DEVICE != "cpu"
    assert {shape[1] for shape, _ in seen} == {len(meristem.Dataset("blobs").classes)}
    # On CUDA the library gets the stream that has to wait for its work, on the CPU none.
    handles = {stream for stream in streams if stream is not None}
    assert (not handles) if DEVICE == "cpu" else handles and min(handles) > 2
    gc.collect()
    assert not Lent.alive, "all memory of the library is given back"


def test_memory_is_not_reused_while_an_array_has_it(tmp_path: Any) -> None:
    kept: list[Any] = []
    loss = on_device([], []).function

    def keeping(outputs: Any, classes: Any) -> Any:
        if len(kept) < 20:
            taken = Taken(outputs, None)
            kept.append((taken, taken.numbers.copy()))
        return loss(outputs, classes)

    meristem.train(run_dir=tmp_path / "kept", loss=meristem.OnDevice(keeping), **RUN)
    assert len({taken.address for taken, _ in kept}) == len(kept) == 20
    assert all((taken.numbers == then).all() for taken, then in kept)
    kept.clear()


def test_a_run_with_such_a_loss_resumes(tmp_path: Any) -> None:
    own = on_device([], [])
    whole = meristem.train(run_dir=tmp_path / "whole", loss=own, checkpoint_every=1, **RUN)
    stopped = meristem.train(run_dir=tmp_path / "part", loss=own, checkpoint_every=1, stop_after=1, **RUN)
    resumed = meristem.resume(stopped, loss=own)
    expected = weights_of(whole)
    assert all((tensor == expected[name]).all() for name, tensor in weights_of(resumed).items())


def test_unfit_answers_are_refused(tmp_path: Any) -> None:
    def answer(change: Any) -> Any:
        def loss(outputs: Any, classes: Any) -> Any:
            losses, gradient = on_device([], []).function(outputs, classes)
            return change(losses, gradient)

        return meristem.OnDevice(loss)

    elsewhere = (CUDA, 7)
    cases = [
        (lambda losses, gradient: (Lent(losses.numbers, elsewhere), gradient), "CUDA device (number 7)"),
        (lambda losses, gradient: (Lent(losses.numbers[:1], WANTED), gradient), "a contiguous array of shape [16]"),
        (lambda losses, gradient: (Lent(losses.numbers.astype("f8"), WANTED), gradient), "got float64"),
        (lambda losses, gradient: losses, "a pair"),
        (lambda losses, gradient: (1.0, gradient), "an array with DLPack support"),
    ]
    for number, (change, text) in enumerate(cases):
        with pytest.raises(errors.ArgumentError) as raised:
            meristem.train(run_dir=tmp_path / str(number), loss=answer(change), **RUN)
        assert text in f"{raised.value}", raised.value
    with pytest.raises(errors.ArgumentError, match="a function of outputs and targets"):
        meristem.train(run_dir=tmp_path / "none", loss=meristem.OnDevice(None), **RUN)


def test_an_array_says_where_it_is(tmp_path: Any) -> None:
    def loss(outputs: Any, classes: Any) -> Any:
        for asked in ({"stream": 0}, {"stream": -2}, {"dl_device": (CUDA, 5)}):
            with pytest.raises(BufferError):
                outputs.__dlpack__(**asked)
        if DEVICE != "cpu":
            with pytest.raises(BufferError, match="copy: got True"):
                outputs.__dlpack__(copy=True)
            for stream in (None, -1, 1, 2, 1 << 40):
                outputs.__dlpack__(stream=stream)
        return on_device([], []).function(outputs, classes)

    meristem.train(run_dir=tmp_path / "run", loss=meristem.OnDevice(loss), **RUN)
