"""Runs whose targets are numbers or several labels (T1, T2), from arrays in memory."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meristem
from meristem import errors, network

RNG = np.random.default_rng(5)
X = RNG.uniform(size=(300, 4)).astype(np.float32)
#: Two outputs of very different size.
Y = np.stack([X[:, 0] + X[:, 1], 1000 * X[:, 2] - 20], axis=1)
LABELS = X[:, :3] > 0.5

SETTINGS: dict[str, Any] = {
    "host": "mlp:16",
    "blueprints": "vectors",
    "envs": 2,
    "batch": 16,
    "steps": 8,
    "controller": "none",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MERISTEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "arrays"


def targets(data: meristem.Dataset) -> "np.ndarray[Any, Any]":
    """The targets in the order of the samples, as a network learns them."""
    [[batch]] = meristem.GatherBatches(data, len(data), shuffle=False).epoch()
    return np.array(batch.targets)


def test_targets_decide_the_task() -> None:
    data = meristem.Dataset(X, Y, classes=["sum", "large"])
    assert (data.targets, data.classes) == ("numbers", ["sum", "large"])
    np.testing.assert_allclose(data.target_mean, Y.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(data.target_std, Y.std(axis=0), rtol=1e-6)
    expected = (Y - Y.mean(axis=0)) / Y.std(axis=0)
    np.testing.assert_allclose(targets(data), expected, atol=1e-5)
    for one in (Y[:, 0], Y[:, :1], Y[:, 0].tolist()):
        assert targets(meristem.Dataset(X, one)).shape == (300, 1)
    for bits in (LABELS, LABELS.astype(np.int64), LABELS.astype(np.float32)):
        data = meristem.Dataset(X, bits)
        assert (data.targets, data.classes, data.target_mean) == ("labels", ["0", "1", "2"], [])
        assert np.array_equal(targets(data), LABELS)
    with pytest.warns(UserWarning, match="exactly one label"):
        assert meristem.Dataset(X, np.eye(3)[np.arange(300) % 3]).targets == "labels"
    # Whole numbers are classes unless it is said that they are not.
    whole = np.arange(300) % 5
    assert meristem.Dataset(X, whole.astype(float)).targets == "classes"
    assert meristem.Dataset(X, whole, task="regress").targets == "numbers"
    shares = meristem.Dataset(X, X[:, :2], task="multilabel")
    assert shares.targets == "labels" and np.array_equal(targets(shares), X[:, :2])
    # The training targets decide for both splits.
    mixed = meristem.Dataset(X, Y[:, 0], test=(X[:3], [1.0, 2.0, 3.0]), split="test")
    assert mixed.targets == "numbers" and len(mixed) == 3


def test_columns_of_a_table_are_named() -> None:
    data = meristem.Dataset(X, {"sum": Y[:, 0], "large": Y[:, 1]})
    assert (data.targets, data.classes) == ("numbers", ["sum", "large"])
    assert meristem.Dataset(X, {"sum": Y[:, 0]}).targets == "numbers"
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(LABELS, columns=["a", "b", "c"])
    data = meristem.Dataset(X, table, test=(X, table))
    assert (data.targets, data.classes) == ("labels", ["a", "b", "c"])
    with pytest.raises(errors.DataError, match="the columns of training"):
        meristem.Dataset(X, table, test=(X, table[["b", "a", "c"]]))


@pytest.mark.parametrize(
    "words, y, options",
    [
        ("classify, multilabel or regress", Y, {"task": "guess"}),
        (r"expected labels \[N\]", Y, {"task": "classify"}),
        (r"bits \[N, K\]", Y[:, 0], {"task": "multilabel"}),
        (r"at sample 0, column 0, expected labels from 0 to 1", Y + 5, {"task": "multilabel"}),
        (r"labels \[N\], bits \[N, K\], or floats", np.arange(600).reshape(300, 2), {}),
        (r"numbers \[N\] or \[N, K\]", ["a"] * 300, {"task": "regress"}),
        (r"numbers \[N\] or \[N, K\]", np.zeros((300, 2, 2)), {"task": "regress"}),
        ("a task", np.arange(300.0), {}),
        ("a task", np.arange(300) % 3 - 1.0, {}),
        ("nan", np.where(X[:, :2] > 0.999, np.nan, X[:, :2]) * np.nan, {}),
        ("sample|row", Y[:200], {}),
        ("names", Y, {"classes": ["a", "b", "c"]}),
        ("of `classes`", Y, {"classes": ["a", "a"]}),
    ],
)
def test_mistakes_are_named(words: str, y: Any, options: dict[str, Any], cache: Path) -> None:
    with pytest.raises(errors.DataError, match=words):
        meristem.Dataset(X, y, **options)
    assert not cache.exists() or list(cache.iterdir()) == []


def r2(outputs: Any, y: Any) -> float:
    """R² over all outputs, of targets that are standardised."""
    return float(1 - ((outputs - y) ** 2).sum() / ((y - y.mean(axis=0)) ** 2).sum())


def test_a_run_on_numbers(tmp_path: Path) -> None:
    data = meristem.Dataset(X, Y, test=(X[:100], Y[:100]))
    run = meristem.train(dataset=data, **SETTINGS, run_dir=tmp_path / "run")
    summary = run.summary
    assert summary["task"] == "regress"
    env = summary["envs"][0]
    assert env["test_r2"] > 0.9 and "test_accuracy" not in env
    steps = run.events["step_completed"]
    assert "train_r2" in steps and not any("accuracy" in name for name in steps)
    # The outputs by numpy give the same score, and the units of the targets.
    weights = meristem.weights.load(run.weights(0))
    x = (X[:100] - np.array(data.mean)) / np.array(data.std)
    outputs = network.logits(weights, x)
    standardised = (Y - Y.mean(axis=0)) / Y.std(axis=0)
    assert r2(outputs, standardised[:100]) == pytest.approx(env["test_r2"], abs=1e-5)
    predicted = network.predictions(weights, outputs)
    assert np.abs(predicted - Y[:100]).mean(axis=0)[1] < 100
    mean, std = np.array(data.target_mean), np.array(data.target_std)
    np.testing.assert_allclose(predicted, outputs * std + mean, rtol=1e-12)
    for shape in ((4, 1), (4, 3), (4,)):
        with pytest.raises(errors.WeightsError, match=r"expected \[N, 2\]"):
            network.predictions(weights, np.zeros(shape))


def test_a_run_on_labels() -> None:
    data = meristem.Dataset(X, LABELS, test=(X, LABELS))
    run = meristem.train(dataset=data, **SETTINGS)
    env = run.summary["envs"][0]
    x = (X - np.array(data.mean)) / np.array(data.std)
    probabilities = network.predictions(run.weights(0), network.logits(run.weights(0), x))
    found = probabilities > 0.5
    f1 = 2 * (found & LABELS).sum() / (found.sum() + LABELS.sum())
    assert env["test_f1"] == pytest.approx(f1, abs=1e-12) and f1 > 0.8


def test_a_fleet_has_scores(tiny: dict[str, Any]) -> None:
    data = meristem.Dataset(X, Y)
    settings = {**SETTINGS, "control_split": 0.2}
    del settings["controller"]
    with meristem.Fleet(dataset=data, **settings) as fleet:
        [env, _] = fleet.step()
        [figures, _] = fleet.figures
        assert figures.score == "r2" and env.scores == [pytest.approx(figures.control_score)]
        assert not math.isnan(figures.train_score)
        with pytest.raises(errors.StateError, match="its score is r2"):
            figures.control_accuracy
    with meristem.Fleet(**tiny) as fleet:
        [env, _] = fleet.step()
        figures = fleet.figures[0]
        assert figures.control_accuracy == figures.control_score == pytest.approx(env.accuracies[-1])


def test_events_of_a_callback_have_the_names_of_scores() -> None:
    seen = []
    data = meristem.Dataset(X, Y)
    meristem.train(dataset=data, **SETTINGS, on_event=seen.append)
    [first, *_] = [event for event in seen if event["event"] == "step_completed"]
    assert "train_r2" in first and "train_accuracy" not in first
