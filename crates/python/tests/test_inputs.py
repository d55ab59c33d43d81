"""Vectors and signals: generated datasets, and arrays of any number type."""

from pathlib import Path

import numpy as np
import pytest

import meristem
from meristem import errors, network, nn

SIGNALS = meristem.Host(
    nn.Conv2d(8, (1, 5), stride=(1, 2), padding=(0, 2)),
    nn.BatchNorm(),
    nn.ReLU(),
    nn.Slot("early"),
    nn.Flatten(),
    nn.Linear("classes"),
)


def test_generated_datasets_have_their_kind_and_shape() -> None:
    signals = meristem.Dataset("mnist1d")
    assert (signals.kind, signals.shape, len(signals)) == ("signal", (1, 40), 4000)
    assert repr(signals) == "Dataset('mnist1d', 4000 signals of (1, 40))"
    points = meristem.Dataset("spirals", split="test")
    assert (points.kind, points.shape, len(points)) == ("vector", (2,), 750)
    # The first test samples of another process, or of another machine up to rounding.
    batches = meristem.GatherBatches(points, 750, shuffle=False, normalize=([0, 0], [1, 1]))
    [[batch]] = batches.epoch()
    x, y = np.asarray(batch.inputs), np.asarray(batch.targets)
    assert x.shape == (750, 2) and y.shape == (750,)
    # Noise of 0.03 in each direction: no sample is five deviations outside of the circle.
    assert np.linalg.norm(x, axis=1).max() < 1.22
    angles = np.arctan2(x[:, 1], x[:, 0]) / (2 * np.pi) - 1.75 * np.linalg.norm(x, axis=1)
    far = np.linalg.norm(x, axis=1) > 0.5
    turns = (angles - y / 3 + 0.5) % 1 - 0.5
    # Noise of 0.03 along the radius is 1.75 * 0.03 turns, and across it at most 0.03 / pi turns:
    # a deviation of 0.053. Its estimate from some 500 samples is within five errors of 3 %.
    assert abs(np.sqrt(np.mean(turns[far] ** 2)) / 0.053 - 1) < 0.16


def test_arrays_of_floats_are_normalised_per_feature(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal([5, -3, 0], [2, 0.1, 1], (200, 3)).astype(np.float32)
    path = tmp_path / "data.npz"
    np.savez(path, train_inputs=x, train_labels=np.arange(200) % 4)
    data = meristem.Dataset("arrays", root=path)
    assert (data.kind, data.shape, data.classes) == ("vector", (3,), ["0", "1", "2", "3"])
    np.testing.assert_allclose(data.mean, x.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(data.std, x.std(0), rtol=1e-5)
    [[batch]] = meristem.GatherBatches(data, 200, shuffle=False).epoch()
    inputs = np.asarray(batch.inputs)
    np.testing.assert_allclose(inputs, (x - data.mean) / data.std, rtol=1e-5, atol=1e-5)
    np.savez(path, train_inputs=x * np.nan, train_labels=np.arange(200) % 4)
    with pytest.raises(errors.DataError, match="value 0 of sample 0"):
        meristem.Dataset("arrays", root=path)


def test_a_grown_network_for_signals_is_the_same_in_numpy_and_torch(tmp_path: Path) -> None:
    run = meristem.train(
        dataset="mnist1d",
        host=SIGNALS,
        controller="random",
        envs=1,
        steps=8,
        max_batches=4,
        batch=32,
        run_dir=tmp_path / "run",
    )
    weights = meristem.weights.load(next((run.path / "weights").glob("*.safetensors")))
    assert network.input_kind(weights) == "signal"
    x = np.random.default_rng(1).normal(size=(5, 1, 40)).astype(np.float32)
    logits = network.logits(weights, x)
    assert logits.shape == (5, 10)
    torch = pytest.importorskip("torch")
    from meristem.torch import load

    module = load(weights)
    with torch.no_grad():
        given = module(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(given, logits, atol=1e-5 * np.abs(logits).max())
    mean, std = network.normalization(weights)
    np.testing.assert_allclose(
        module.normalized(torch.from_numpy(x)).numpy(), (x - mean[0]) / std[0], rtol=1e-5
    )
