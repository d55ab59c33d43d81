"""Folds that a file of arrays lists (D14)."""

import numpy as np
import pytest

import meristem
from meristem import errors, network

rng = np.random.default_rng(7)
Y = np.arange(150) % 3
X = rng.normal(size=(150, 4)) + 3 * np.eye(4)[Y]


@pytest.mark.parametrize(
    ("folds", "count", "words"),
    [
        ([[1, 1, 2] * 10, [2, 1, 0] * 10], 3, "`folds`: got 3, expected 2"),
        ([[1, 1, 2] * 10], 1, "integers \\[K, 30\\], K from 2"),
        ([[1, 3, 2] * 10, [2, 1, 0] * 10], 2, "sample 1 in fold 0.*0, 1 or 2.*3"),
        ([[1, 1, 2] * 10, [2, 2, 0] * 10], 2, "fold 1.*samples with 1"),
        ([[1, 1, 2] * 10, [1, 1, 0] * 10], 2, "samples with 2 in fold 1.*some, as in fold 0.*none"),
        ([[0.5] * 30] * 2, 2, "integers"),
    ],
)
def test_wrong_folds_of_a_file_are_named(folds, count, words, tmp_path):
    x, y = X[::5].astype("f4"), Y[::5]
    np.savez(tmp_path / "data.npz", train_inputs=x, train_labels=y, train_folds=np.array(folds))
    settings = {"dataset": "arrays", "data_root": tmp_path / "data.npz", "host": "mlp:4", "controller": "none"}
    with pytest.raises(errors.MeristemError, match=words):
        meristem.train(**settings, folds=max(count, 2), steps=1, run_dir=tmp_path / "run")


def test_the_folds_of_a_file_are_those_of_the_run(tmp_path):
    """Train and control scores are those of the listed samples (D14)."""
    roles = np.random.default_rng(0).integers(0, 3, size=(3, len(X)))
    np.savez(tmp_path / "data.npz", train_inputs=X.astype("f4"), train_labels=Y, train_folds=roles)
    run = meristem.train(
        dataset="arrays", data_root=tmp_path / "data.npz", host="mlp:4", controller="none", folds=3,
        steps=2, run_dir=tmp_path / "run",
    )
    for k, env in enumerate(run.summary["envs"]):
        assert env["part"] == {
            "fold": k, "train_samples": (roles[k] == 1).sum(), "control_samples": (roles[k] == 2).sum()
        }
        weights = meristem.weights.load(run.weights(k))
        mean, std = (np.array(part) for part in network.normalization(weights))
        held_out = roles[k] == 2
        found = network.logits(weights, (X[held_out] - mean) / std).argmax(axis=1)
        assert env["control_accuracy"] == pytest.approx((found == Y[held_out]).mean(), abs=0.02)


def test_a_controller_needs_samples_that_folds_hold_out(tmp_path):
    roles = np.ones((2, len(X)), "u1")
    roles[0, ::2], roles[1, 1::2] = 0, 0
    np.savez(tmp_path / "data.npz", train_inputs=X.astype("f4"), train_labels=Y, train_folds=roles)
    settings = {
        "dataset": "arrays", "data_root": tmp_path / "data.npz", "host": "mlp:4", "blueprints": "vectors",
        "folds": 2, "steps": 2,
    }
    run = meristem.train(**settings, controller="none", run_dir=tmp_path / "run")
    assert [env["control_accuracy"] for env in run.summary["envs"]] == [None, None]
    with pytest.raises(errors.SettingError, match="control-split"):
        meristem.train(**settings, controller="heuristic", run_dir=tmp_path / "other")


def test_a_run_is_not_resumed_on_other_folds(tmp_path):
    # Both have folds of the same sizes, so that only the checksum tells them apart.
    roles = np.array([[1, 1, 2] * 50, [2, 1, 1] * 50])
    arrays = {"train_inputs": X.astype("f4"), "train_labels": Y}
    np.savez(tmp_path / "data.npz", **arrays, train_folds=roles)
    run = meristem.train(
        dataset="arrays", data_root=tmp_path / "data.npz", host="mlp:4", controller="none", folds=2,
        steps=2, run_dir=tmp_path / "run",
    )
    np.savez(tmp_path / "data.npz", **arrays, train_folds=np.ascontiguousarray(roles[::-1]))
    with pytest.raises(errors.ResumeError, match="the data back"):
        meristem.resume(run, steps=4)
    np.savez(tmp_path / "data.npz", **arrays, train_folds=roles)
    assert meristem.resume(run, steps=4).state == "complete"
