"""Losses of the program (T3)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meristem
from meristem import errors
from meristem.control import Env

SETTINGS: dict[str, Any] = {
    "host": "mlp:16",
    "blueprints": "vectors",
    "envs": 2,
    "batch": 64,
    "max_batches": 4,
    "control_split": 0.2,
    "steps": 6,
    "rounds": 1,
    "min_training_steps": 1,
}
CASES = {
    "classify": {"dataset": "blobs"},
    "regress": {"dataset": "friedman"},
}


def cross_entropy(outputs, classes):
    """The formula of the built-in loss, in float64."""
    z = outputs.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    p = np.exp(z)
    total = p.sum(axis=1, keepdims=True)
    rows = np.arange(len(z))
    losses = np.log(total[:, 0]) - z[rows, classes]
    p /= total
    p[rows, classes] -= 1
    return losses, p


def squares(outputs, numbers):
    difference = outputs.astype(np.float64) - numbers
    return (difference**2).mean(axis=1), 2 * difference / outputs.shape[1]


LOSSES = {"classify": cross_entropy, "regress": squares}


def grow(env: Env):
    """Grows by the number of the step, so that rounding changes no decision."""
    slot = env.slots[0]
    if env.step == 1:
        return {"op": "GERMINATE", "slot": slot.slot, "blueprint": slot.blueprints[0]}
    return {"op": "ADVANCE", "slot": slot.slot} if "ADVANCE" in slot.ops else None


def columns(run: meristem.Run) -> dict[str, Any]:
    return {**run.events["step_completed"]}


def same_bits(one: meristem.Run, other: meristem.Run) -> bool:
    envs = range(len(one.summary["envs"]))
    return all(one.weights(env).read_bytes() == other.weights(env).read_bytes() for env in envs)


@pytest.mark.parametrize("task", CASES)
@pytest.mark.parametrize("twin", [False, True])
def test_built_in_losses_written_as_functions_give_their_results(task, twin, tmp_path):
    """The only differences are roundings to float32, of 6e-8, in the gradient of each of 24 updates."""
    given = {**SETTINGS, **CASES[task], "controller": grow, "twin": twin, "log_batches": True}
    built_in = meristem.train(**given, run_dir=tmp_path / "built-in")
    own = meristem.train(**given, loss=LOSSES[task], run_dir=tmp_path / "own")
    assert own.settings["loss"] == "external"
    one, two = columns(built_in), columns(own)
    assert any("GERMINATE" in action for action in one["action"]) and one["action"] == two["action"]
    score = "accuracy" if task == "classify" else "r2"
    for name in ("train_loss", "control_loss", f"train_{score}", f"control_{score}"):
        np.testing.assert_allclose(two[name], one[name], rtol=1e-6, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(own.batches["loss"], built_in.batches["loss"], rtol=1e-6)
    modules = [run.events["counterfactuals.modules"] for run in (built_in, own)]
    assert len(modules[0]["env"]) > 0
    # Percentage points of the score.
    np.testing.assert_allclose(modules[1]["contribution"], modules[0]["contribution"], atol=1e-4)
    for name in ("difference", "standard_error"):
        pair = [of[f"contribution_loss_{name}"] for of in modules]
        np.testing.assert_allclose(pair[1], pair[0], atol=1e-6, err_msg=name)
    for a, b in zip(built_in.summary["envs"], own.summary["envs"], strict=True):
        for name in ("test_loss", f"test_{score}"):
            assert b[name] == pytest.approx(a[name], rel=1e-6)
        if twin:
            assert b["twin"]["control_loss"] == pytest.approx(a["twin"]["control_loss"], rel=1e-6)
    for env in range(2):
        weights = [meristem.weights.load(run.weights(env)) for run in (built_in, own)]
        for name, tensor in weights[0].tensors.items():
            np.testing.assert_allclose(weights[1].tensors[name], tensor, atol=1e-6, err_msg=name)
    cost = own.summary["own_loss"]
    assert cost["calls"] > 0 and cost["samples"] > cost["calls"] and cost["seconds"] > 0
    assert "own_loss" not in built_in.summary


def test_several_labels_are_numbers(tmp_path):
    random = np.random.default_rng(1)
    x = random.uniform(size=(300, 4)).astype("f4")
    data = meristem.Dataset(x, x[:, :3] > 0.5)

    def loss(outputs, labels):
        z = outputs.astype(np.float64)
        each = np.maximum(z, 0) - z * labels + np.log1p(np.exp(-np.abs(z)))
        return each.mean(axis=1), (1 / (1 + np.exp(-z)) - labels) / z.shape[1]

    given = {**SETTINGS, "controller": "none", "dataset": data}
    one = columns(meristem.train(**given, run_dir=tmp_path / "a"))
    two = columns(meristem.train(**given, loss=loss, run_dir=tmp_path / "b"))
    for name in ("train_loss", "train_f1", "control_loss", "control_f1"):
        np.testing.assert_allclose(two[name], one[name], rtol=1e-6, err_msg=name)


def test_a_function_gets_views_of_outputs_and_targets(tmp_path):
    seen = []

    def loss(outputs, classes):
        seen.append((outputs, classes))
        return cross_entropy(outputs, classes)

    given = {**SETTINGS, "dataset": "blobs", "controller": "none", "steps": 1, "envs": 1}
    run = meristem.train(**given, loss=loss, run_dir=tmp_path / "run")
    assert {(o.dtype.name, c.dtype.name) for o, c in seen} == {("float32", "int32")}
    assert all(o.shape == (len(c), 5) and not o.flags.owndata for o, c in seen)
    # The loss of guessing, before the first step: outputs of 0.
    guesses = [not o.any() for o, _ in seen]
    samples = run.summary["dataset"]["train_samples"] + run.summary["dataset"]["control_samples"]
    first = guesses.index(False)
    assert sum(len(c) for _, c in seen[:first]) == samples and not any(guesses[first:])
    # Arrays stay valid after the run.
    assert all(np.isfinite(o).all() for o, _ in seen)


def test_a_function_that_writes_to_its_arrays_changes_no_other_call(tmp_path):
    def careless(outputs, classes):
        returned = cross_entropy(outputs, classes)
        outputs[:] = 0
        classes[:] = 0
        return returned

    given = {**SETTINGS, "dataset": "blobs", "controller": grow, "envs": 1}
    runs = [meristem.train(**given, loss=loss, run_dir=tmp_path / loss.__name__) for loss in (cross_entropy, careless)]
    assert same_bits(*runs)
    lines = [(tmp_path / loss.__name__ / "events.jsonl").read_text().splitlines() for loss in (cross_entropy, careless)]
    events = [[json.loads(line) for line in one] for one in lines]
    rows = [[event["configurations"] for event in one if event["event"] == "counterfactuals"] for one in events]
    assert len(rows[0][-1]) > 1 and rows[0] == rows[1]


def test_the_bits_do_not_depend_on_workers_stops_and_kills(tmp_path):
    given = {**SETTINGS, "dataset": "blobs", "controller": grow, "loss": cross_entropy}
    given["checkpoint_every"] = 1
    whole = meristem.train(**given, threads=1, run_dir=tmp_path / "whole")
    other = meristem.train(**given, threads=2, run_dir=tmp_path / "other")
    assert same_bits(whole, other)
    assert str(columns(whole)["control_loss"]) == str(columns(other)["control_loss"])

    meristem.train(**given, stop_after=3, run_dir=tmp_path / "stopped")
    with pytest.raises(errors.SettingError, match="`loss`.* external.*meristem.train"):
        meristem.resume(tmp_path / "stopped", controller=grow)
    resumed = meristem.resume(tmp_path / "stopped", controller=grow, loss=cross_entropy)
    assert resumed.state == "complete" and same_bits(whole, resumed)

    # Killed in the middle of a step.
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import meristem, test_loss
calls = 0
def loss(outputs, classes):
    global calls
    calls += 1
    if calls == 150:
        os.kill(os.getpid(), signal.SIGKILL)
    return test_loss.cross_entropy(outputs, classes)
given = {{**test_loss.SETTINGS, "dataset": "blobs", "controller": test_loss.grow, "checkpoint_every": 1}}
meristem.train(**given, loss=loss, threads=1, run_dir={str(tmp_path / "killed")!r})
"""
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=300)
    assert ended.returncode == -signal.SIGKILL
    killed = meristem.Run(tmp_path / "killed")
    assert killed.state != "complete" and 0 < len(columns(killed)["env"]) < 12
    resumed = meristem.resume(killed, controller=grow, loss=cross_entropy)
    assert resumed.state == "complete" and same_bits(whole, resumed)


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda o, c: cross_entropy(o, c)[0], "expected a pair"),
        (lambda o, c: None, "`loss`: got None, expected a pair"),
        (lambda o, c: (o.mean(), o), "`losses`: got float32 .*, expected numbers of shape .64"),
        (lambda o, c: (o[:-1, 0], o), "`losses`: got float32 .63., expected numbers of shape .64."),
        (lambda o, c: (o[:, 0], o[:, :3]), "`gradient`: got float32 .64, 3., .* shape .64, 5."),
        (lambda o, c: (o[:, 0], [["a"] * 5] * len(o)), "`gradient`: got <U1 .64, 5., expected numbers"),
        (lambda o, c: (o[:, 0], None), "`gradient`: got a NoneType, expected numbers"),
        (lambda o, c: (o[:, 0] > 0, o), "`losses`: got bool"),
    ],
)
def test_wrong_answers_are_named_and_the_run_goes_on(answer, words, tmp_path):
    given = {**SETTINGS, "dataset": "blobs", "controller": "none", "checkpoint_every": 1}
    whole = meristem.train(**given, loss=cross_entropy, run_dir=tmp_path / "whole")
    in_training = 0

    def loss(outputs, classes):
        nonlocal in_training
        in_training += outputs.any() and len(classes) == 64
        return answer(outputs, classes) if in_training > 40 and len(classes) == 64 else cross_entropy(outputs, classes)

    with pytest.raises(errors.ArgumentError, match=words):
        meristem.train(**given, loss=loss, run_dir=tmp_path / "run")
    run = meristem.Run(tmp_path / "run")
    assert run.state == "failed" and "the loss of the program failed" in run.summary["error"]
    resumed = meristem.resume(run, loss=cross_entropy)
    assert resumed.state == "complete" and same_bits(whole, resumed)


def test_an_exception_is_raised(tmp_path):
    def loss(outputs, classes):
        raise ZeroDivisionError("of the function")

    given = {**SETTINGS, "dataset": "blobs", "controller": "none"}
    with pytest.raises(ZeroDivisionError, match="of the function"):
        meristem.train(**given, loss=loss, run_dir=tmp_path / "run")
    with pytest.raises(ZeroDivisionError, match="of the function"):
        meristem.Fleet(**{**given, "controller": None}, loss=loss, run_dir=tmp_path / "fleet")


@pytest.mark.parametrize("place", ["losses", "gradient"])
def test_values_that_are_not_finite_are_for_the_governor(place, tmp_path):
    calls = 0

    def loss(outputs, classes):
        nonlocal calls
        losses, gradient = cross_entropy(outputs, classes)
        calls += bool(outputs.any())
        # In the second step: the first one has 8 calls in training, and 26 on the control split.
        if calls == 38:
            (losses if place == "losses" else gradient)[0] = np.nan
        return losses, gradient

    given = {**SETTINGS, "dataset": "blobs", "controller": "none"}
    run = meristem.train(**given, loss=loss, run_dir=tmp_path / "run")
    assert run.state == "complete"
    assert sum(env["rollbacks"] for env in run.summary["envs"]) == 1
    assert all(np.isfinite(env["test_loss"]) for env in run.summary["envs"])


def test_a_fleet_trains_with_a_function(tmp_path):
    given = {**SETTINGS, "dataset": "blobs", "loss": cross_entropy}
    run = meristem.train(**given, controller=grow, run_dir=tmp_path / "run")
    with meristem.Fleet(**given, run_dir=tmp_path / "fleet") as fleet:
        for _ in range(3):
            fleet.apply([grow(env) for env in fleet.step()])
    with meristem.Fleet.resume(tmp_path / "fleet", loss=cross_entropy) as fleet:
        for _ in range(3):
            fleet.apply([grow(env) for env in fleet.step()])
    assert same_bits(run, meristem.Run(tmp_path / "fleet"))


def test_members_share_a_function_and_are_trained_again_with_it(tmp_path):
    given = {**SETTINGS, "dataset": "blobs", "members": "lr=0.1,0.01", "steps": 2}
    run = meristem.sweep(**given, loss=cross_entropy, run_dir=tmp_path / "sweep")
    again = meristem.replay(run, 1, loss=cross_entropy, run_dir=tmp_path / "again")
    assert again.weights(0).read_bytes() == run.weights(1).read_bytes()
    with pytest.raises(errors.SettingError, match="`loss`: got external"):
        meristem.replay(run, 1, run_dir=tmp_path / "without")


def test_what_a_function_cannot_be_combined_with(tmp_path):
    given = {**SETTINGS, "dataset": "blobs", "controller": "none", "run_dir": tmp_path / "run"}
    for loss, more, words in [
        (cross_entropy, {"label_smoothing": 0.1}, "`label-smoothing`.*external"),
        (cross_entropy, {"class_weights": "balanced"}, "`class-weights`.*external"),
        ("external", {}, "`loss`: got external, expected auto"),
        (3, {}, "`loss`: got 3, expected a function"),
    ]:
        with pytest.raises(errors.SettingError, match=words):
            meristem.train(**{**given, **more}, loss=loss)
    run = meristem.train(**given, loss="cross-entropy")
    assert run.settings["loss"] == "cross-entropy"


@pytest.mark.parametrize("exchange", ["dense", "topk:0.1", "diloco:2"])
def test_replicas_share_a_function(exchange, tmp_path):
    given = {
        **SETTINGS, "dataset": "blobs", "controller": "none", "data_parallel": True, "envs": 1, "ranks": 2,
        "twin": False, "exchange": exchange, "log_batches": True,
    }  # fmt: skip
    one = meristem.train(**given, run_dir=tmp_path / "a")
    two = meristem.train(**given, loss=cross_entropy, run_dir=tmp_path / "b")
    for name in ("train_loss", "control_loss"):
        got, expected = columns(two)[name], columns(one)[name]
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(two.batches["loss"], one.batches["loss"], rtol=1e-6)
    assert two.summary is not None and two.summary["own_loss"]["calls"] > 2 * 4 * 6
    again = meristem.train(**given, loss=cross_entropy, run_dir=tmp_path / "c", threads=2)
    assert same_bits(two, again)


def test_pytorch_computes_the_gradient(tmp_path):
    torch = pytest.importorskip("torch")

    def loss(outputs, classes):
        outputs = torch.from_numpy(outputs).requires_grad_()
        classes = torch.from_numpy(classes).long()
        losses = torch.nn.functional.cross_entropy(outputs, classes, reduction="none")
        return losses, torch.autograd.grad(losses.sum(), outputs)[0]

    given = {**SETTINGS, "dataset": "blobs", "controller": grow}
    one = columns(meristem.train(**given, run_dir=tmp_path / "a"))
    two = columns(meristem.train(**given, loss=loss, run_dir=tmp_path / "b"))
    for name in ("train_loss", "control_loss"):
        np.testing.assert_allclose(two[name], one[name], rtol=1e-6, err_msg=name)
