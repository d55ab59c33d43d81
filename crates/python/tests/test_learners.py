"""Learners: training by the program's own loop."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import meristem
from meristem import errors
from meristem.network import logits

EXAMPLES = Path(__file__).parents[1] / "examples"


def made(**settings):
    given = {"input": 3, "outputs": 2, "envs": 2, "batch": 16, "seed": 5, "host": "mlp:8,8", "blueprints": "vectors"}
    return meristem.Learners(**{**given, "min_training_steps": 1, **settings})


def arrays(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def train(learners, steps: range, size: int = 16) -> None:
    """Training steps towards targets that follow from the inputs."""
    for step in steps:
        x = arrays(step, len(learners), size, 3)
        outputs = learners.forward(x)
        learners.backward((outputs - np.sin(x[..., :2])) / size)
        learners.update()


def grow(env):
    for slot in env.slots:
        if "GERMINATE" in slot.ops:
            return {"op": "GERMINATE", "slot": slot.slot, "blueprint": slot.blueprints[0]}
        if slot.gate_passes and "ADVANCE" in slot.ops:
            return {"op": "ADVANCE", "slot": slot.slot}
    return None


def tensors(learners) -> list[dict[str, bytes]]:
    return [{name: x.tobytes() for name, x in w.tensors.items()} for w in learners.snapshot()]


def test_the_outputs_and_the_step_are_those_of_the_weights():
    learners = made(momentum=0.0, weight_decay=0.0, clip_norm="off", lr=0.5)
    x, gradient = arrays(1, 2, 16, 3), arrays(2, 2, 16, 2) / 16
    outputs = learners.forward(x)
    assert outputs.dtype == np.float32 and outputs.shape == (2, 16, 2) and outputs.flags.writeable
    before = learners.snapshot()
    for env in range(2):
        assert np.allclose(outputs[env], logits(before[env], x[env]), atol=1e-5)
    assert np.array_equal(learners.eval(x), outputs)  # there is no batch norm
    learners.backward(gradient)
    learners.update()
    # The bias of the last layer has the sum of the gradients; all else follows PyTorch's in Rust.
    [name] = [name for name, x in before[0].tensors.items() if x.shape == (2,)]
    for env, after in enumerate(learners.snapshot()):
        expected = before[env].tensors[name] - 0.5 * gradient[env].sum(axis=0)
        assert np.allclose(after.tensors[name], expected, atol=1e-6)


def test_it_learns():
    learners = made(lr=0.05)
    train(learners, range(300))
    x = arrays(1000, 2, 16, 3)
    assert (np.abs(learners.eval(x) - np.sin(x[..., :2])).mean(axis=(1, 2)) < 0.12).all()


def test_gradients_of_several_passes_add_up():
    one, two = made(), made()
    x, gradient = arrays(1, 2, 16, 3), arrays(2, 2, 16, 2)
    for part in (slice(0, 6), slice(6, 16)):
        one.forward(x[:, part])
        one.backward(gradient[:, part])
    one.update()
    two.forward(x)
    two.backward(gradient)
    two.update()
    for a, b in zip(one.snapshot(), two.snapshot(), strict=True):
        assert all(np.allclose(a.tensors[name], b.tensors[name], atol=1e-6) for name in a.tensors)


def test_envs_alone_in_lists_and_in_one_array_have_the_same_bits():
    together, listed, alone = made(), made(threads=1), made(threads=2)
    for step in range(3):
        x = arrays(step, 2, 8, 3)
        gradients = [together.forward(x), *(alone.forward(x[env], env=env) for env in range(2))]
        as_list = listed.forward([x[0], x[1]])
        assert isinstance(as_list, list)
        assert np.array_equal(gradients[0], np.stack(as_list)) and np.array_equal(gradients[0], np.stack(gradients[1:]))
        together.backward(gradients[0])
        listed.backward(as_list)
        for env in range(2):
            alone.backward(gradients[0][env], env=env)
            alone.update(env=env)
        together.update()
        listed.update()
    assert tensors(together) == tensors(listed) == tensors(alone)
    # Batches of different sizes.
    sizes = [y.shape for y in listed.forward([arrays(1, 3, 3), arrays(2, 5, 3)])]
    assert sizes == [(3, 2), (5, 2)]


def test_images_and_signals_are_in_pytorchs_order():
    learners = meristem.Learners(input=(2, 6, 5), outputs=3, envs=1, batch=4, host="minimal", seed=1)
    x = arrays(1, 1, 4, 2, 6, 5)
    assert np.allclose(learners.eval(x)[0], logits(learners.weights(0), x[0]), atol=1e-4)
    learners.forward(x)
    learners.backward(np.ones((1, 4, 3)))
    learners.update()
    signals = meristem.Learners(input=(2, 20), outputs=1, envs=1, batch=4, host="conv1d:4,8", seed=1)
    assert signals.forward(arrays(1, 1, 4, 2, 20)).shape == (1, 4, 1)


def test_inputs_of_any_kind():
    learners = made()
    x = arrays(1, 2, 4, 3)
    expected = learners.eval(x)
    read_only = x.copy()
    read_only.flags.writeable = False
    for given in (x.astype(np.float64), np.asfortranarray(x), x[:, ::-1][:, ::-1], read_only, [x[0].tolist(), x[1]]):
        assert np.array_equal(np.stack(list(learners.eval(given))), expected)
    assert learners.eval(np.ones((2, 4, 3), bool)).shape == (2, 4, 2)


def test_growth_changes_the_networks_and_keeps_their_function():
    learners = made()
    [first, _] = learners.envs
    assert learners.slots and learners.blueprints and first.scores == [] and first.last is None
    bare = learners.parameters
    stages = []
    for step in range(9):
        train(learners, range(10 * step, 10 * step + 10))
        x = arrays(step, 2, 16, 3)
        before = learners.eval(x)
        envs = learners.step(scores=[0.5, None])
        assert [len(env.scores) for env in envs] == [step + 1, 0]
        rewards = learners.apply([grow(envs[0]), None])
        assert rewards.shape == (2,) and np.isfinite(rewards).all()
        stages.append(learners.envs[0].slots[0].stage)
        if stages[-1] in ("germinated", "training"):
            assert np.array_equal(learners.eval(x), before)
    assert stages[0] == "germinated" and "training" in stages and "blending" in stages
    assert learners.parameters[0] > bare[0] and learners.parameters[1] == bare[1]
    slot = learners.slots[0]
    whole, without = learners.eval(x), learners.eval(x, without=slot)
    assert not np.array_equal(whole[0], without[0]) and np.array_equal(whole[1], without[1])
    assert np.allclose(whole[0], logits(learners.weights(0), x[0]), atol=1e-5)


def test_a_contribution_fossilizes_a_module_and_a_prune_removes_it():
    learners = made(min_contribution=1.0)
    for step in range(20):
        train(learners, range(10 * step, 10 * step + 5))
        slots = [slot.slot for slot in learners.envs[0].slots if slot.blueprint is not None]
        without = [{slot: 0.5 for slot in slots}, {}]
        env, _ = learners.step([0.9, 0.9], without)
        contributions = {slot.slot: slot.contribution for slot in env.slots if slot.contribution is not None}
        assert contributions == pytest.approx({slot: 40.0 for slot in slots})
        holding = [slot for slot in env.slots if slot.stage == "holding"]
        if holding:
            assert holding[0].gate_passes
            learners.apply([{"op": "FOSSILIZE", "slot": holding[0].slot}, None])
            break
        learners.apply([grow(env), None])
    assert [slot.stage for slot in learners.envs[0].slots if slot.blueprint][0] == "fossilized"
    learners = made()
    learners.step()
    learners.apply([grow(env) for env in learners.envs])
    for _ in range(6):
        learners.step()
    learners.apply([{"op": "PRUNE", "slot": learners.slots[0]}, None])
    assert [env.slots[0].stage for env in learners.envs] != ["germinated"] * 2


@pytest.mark.parametrize("decides", [False, True])
def test_a_checkpoint_resumes_with_the_same_bits(tmp_path, decides):
    def advance(learners, steps: range) -> None:
        for step in steps:
            train(learners, range(7 * step, 7 * step + 7))
            envs = learners.step(scores=[step / 10] * 2)
            learners.apply([grow(envs[0]), None])

    learners = made(lr_schedule="cosine", steps=8)
    advance(learners, range(4))
    train(learners, range(100, 103))  # within a step
    if decides:
        learners.step(scores=[0.1, 0.2])
    file = tmp_path / "state.safetensors"
    learners.checkpoint(file)
    learners.checkpoint(file)  # replaces the file
    resumed = meristem.Learners.resume(file, threads=1)
    assert len(resumed) == 2 and tensors(resumed) == tensors(learners)
    for each in (learners, resumed):
        train(each, range(200, 203))
        advance(each, range(4, 7))
    assert tensors(resumed) == tensors(learners)
    described = [[(s.stage, s.alpha, s.gradient_health, s.age) for s in env.slots] for env in learners.envs]
    assert described == [[(s.stage, s.alpha, s.gradient_health, s.age) for s in env.slots] for env in resumed.envs]
    assert [env.scores for env in learners.envs] == [env.scores for env in resumed.envs]


def test_weights_are_saved_and_loaded(tmp_path):
    learners = made()
    train(learners, range(3))
    file = tmp_path / "weights.safetensors"
    learners.weights(1).save(file)
    fresh = made(seed=9)
    fresh.load(file)
    x = arrays(1, 1, 4, 3).repeat(2, axis=0)
    assert np.array_equal(fresh.eval(x)[0], learners.eval(x)[1])
    assert np.array_equal(fresh.eval(x)[1], learners.eval(x)[1])
    assert np.array_equal(made(init=file).eval(x)[0], learners.eval(x)[1])
    learners.load(fresh.weights(0), env=0)
    assert np.array_equal(learners.eval(x)[0], fresh.eval(x)[0])
    with pytest.raises(errors.WeightsError, match="the weights do not fit the network"):
        made(host="mlp:4").load(file)


def test_an_env_that_fails_is_restored(tmp_path):
    learners = made(governor_failures_max=2)
    train(learners, range(3))
    learners.step()
    train(learners, range(3))
    learners.forward(arrays(1, 16, 3), env=0)
    learners.backward(np.full((16, 2), np.nan), env=0)
    learners.update(env=0)
    assert np.isnan(learners.eval(arrays(1, 16, 3), env=0)).any()
    learners.step()
    assert learners.rollbacks == [1, 0]
    assert np.isfinite(learners.eval(arrays(1, 2, 16, 3))).all()
    learners.forward(arrays(1, 16, 3), env=0)
    learners.backward(np.full((16, 2), np.inf), env=0)
    learners.update(env=0)
    with pytest.raises(errors.DivergedError, match="env 0 diverged"):
        learners.step()


def test_calls_in_the_wrong_order_are_refused():
    learners = made()
    x, gradient = arrays(1, 2, 4, 3), np.ones((2, 4, 2))
    with pytest.raises(errors.StateError, match="env 0 has no forward pass; call forward first"):
        learners.backward(gradient)
    with pytest.raises(errors.StateError, match="env 0 has no gradient; call backward first"):
        learners.update()
    with pytest.raises(errors.StateError, match="no actions are due"):
        learners.apply([None, None])
    learners.forward(x)
    learners.backward(gradient[1], env=1)
    with pytest.raises(errors.StateError, match="env 1 has no forward pass"):
        learners.backward(gradient)
    with pytest.raises(errors.StateError, match="env 0 has no gradient"):
        learners.update()
    for call in (learners.step, lambda: learners.checkpoint("never.safetensors")):
        with pytest.raises(errors.StateError, match="a gradient of env 1 waits"):
            call()
    learners.drop_gradients()
    learners.step()
    with pytest.raises(errors.ControllerError, match="an action for each of 2 envs, got 1"):
        learners.apply([None])
    with pytest.raises(errors.ControllerError, match="not legal"):
        learners.apply([{"op": "ADVANCE", "slot": learners.slots[0]}, None])
    learners.forward(x)  # WAIT for all envs


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda it: it.forward(arrays(1, 3, 4, 3)), r"`inputs`: got 3, expected an array for each of 2 envs"),
        (lambda it: it.forward(arrays(1, 2, 4, 2)), r"`inputs`: got shape \[4, 2\] for an env, expected \[batch, 3\]"),
        (lambda it: it.forward(arrays(1, 2, 3)), r"expected \[batch, 3\]"),
        (lambda it: it.forward(arrays(1, 2, 0, 3)), r"got shape \[0, 3\]"),
        (lambda it: it.forward("abc"), "`inputs`: got .*, expected an array of numbers"),
        (lambda it: it.forward(None), "`inputs`: got .*, expected an array of numbers"),
        (lambda it: it.forward(np.ones((2, 4, 3), complex)), "expected an array of numbers"),
        (lambda it: it.forward([arrays(1, 4, 3)]), "an array for each of 2 envs"),
        (lambda it: it.forward(arrays(1, 4, 3), env=2), "`env`: got 2, expected 0 to 1"),
        (lambda it: it.forward(arrays(1, 4, 3), env=True), "`env`"),
        (lambda it: it.backward(arrays(1, 2, 4, 3)), r"`gradients`: got shape \[4, 3\] for an env, expected \[batch, 2\]"),
        (lambda it: it.eval(arrays(1, 2, 4, 3), without="r9"), "`without`: got 'r9', expected one of the slots"),
        (lambda it: it.step(scores=[1.0]), "`scores`"),
        (lambda it: it.step(scores=["a", 1]), "`scores`: got 'a', expected a number"),
        (lambda it: it.step(without=[{}, {}]), "`without`"),
        (lambda it: it.step([1, 1], [1, 2]), "`without`"),
        (lambda it: it.weights(-1), "`env`"),
    ],
)
def test_bad_arguments_name_the_argument(call, words):
    learners = made()
    with pytest.raises(errors.ArgumentError) as caught:
        call(learners)
    assert re.search(words, caught.value.message), caught.value.message
    assert caught.value.remedy and caught.value.exit_code == 2


def test_bad_settings_name_the_setting():
    for argument, value in {"input": [], "outputs": 0}.items():
        with pytest.raises(errors.ArgumentError, match=f"`{argument}`"):
            made(**{argument: value})
    for value in ("4", 4.5, [4, 0], [1, 2, 3, 4], None):
        with pytest.raises(errors.ArgumentError, match="`input`"):
            made(input=value)
    for key, value in {"dataset": "embedded", "loss": "mse", "run_dir": "x", "controller": "none"}.items():
        with pytest.raises(errors.SettingError, match=f"`{key}`: got a value, expected no value"):
            made(**{key: value})
    with pytest.raises(errors.SettingError, match="did you mean `batch`"):
        made(bacth=3)
    with pytest.raises(errors.SettingError, match="a host for vectors of 3 features"):
        made(host="baseline")
    with pytest.raises(errors.SettingError, match="`batch`: got 16, expected at least 17"):
        made().forward(arrays(1, 2, 17, 3))
    with pytest.raises(errors.StateError, match="finite score"):
        made().step(scores=[float("nan"), 1.0])


def test_files_that_are_no_state_of_learners(tmp_path):
    learners = made()
    file = tmp_path / "state.safetensors"
    learners.checkpoint(file)
    contents = file.read_bytes()
    weights = tmp_path / "weights.safetensors"
    learners.weights(0).save(weights)
    changed = bytearray(contents)
    changed[len(changed) // 2] ^= 1
    for name, broken in {"short": contents[:-9], "changed": bytes(changed), "empty": b"", "text": b"abc"}.items():
        (tmp_path / name).write_bytes(broken)
        with pytest.raises(errors.ResumeError):
            meristem.Learners.resume(tmp_path / name)
    for path in (weights, tmp_path / "missing", tmp_path):
        with pytest.raises(errors.ResumeError, match="cannot resume"):
            meristem.Learners.resume(path)
    with pytest.raises(errors.SettingError, match="`seed`: got a value, expected no value"):
        meristem.Learners.resume(file, seed=3)
    with pytest.raises(errors.RunFolderError):
        learners.checkpoint(tmp_path / "none" / "state")


def test_the_example_learns_cartpole():
    """A short run: returns rise well above the 20 of chance."""
    command = [sys.executable, str(EXAMPLES / "cartpole.py"), "--iterations", "10"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r"returns of 100 games: \[(.*)\]", run.stdout)
    assert found and np.mean([int(text) for text in found[1].split(",")]) > 60, run.stdout


def test_weights_that_are_not_finite_are_not_widened_into_a_snapshot():
    learners = made()
    train(learners, range(3))
    learners.step()
    learners.apply([None, None])
    x = arrays(1, 16, 3)
    learners.forward(x, env=0)
    learners.backward(np.full((16, 2), np.nan, np.float32), env=0)
    learners.update(env=0)
    with pytest.raises(errors.StateError, match="not finite"):
        learners.widen(0, "hidden.0", 4)
    learners.step()
    assert learners.rollbacks == [1, 0] and np.isfinite(learners.eval(x, env=0)).all()
    learners.widen(0, "hidden.0", 4)


def test_layers_get_wider_with_the_function_kept_and_through_a_checkpoint(tmp_path):
    learners = made(width_init="net2wider", optimizer="adam")
    train(learners, range(3))
    x = arrays(9, 2, 16, 3)
    before = learners.eval(x)
    assert [(layer.layer, layer.features) for layer in learners.envs[0].layers] == [("hidden.0", 8), ("hidden.1", 8)]
    learners.widen(1, "hidden.1", 3)
    after = learners.eval(x)
    # Copied products are split in two, which moves a sum of 8 by at most 8 roundings.
    assert np.array_equal(after[0], before[0]) and np.allclose(after[1], before[1], atol=1e-6)
    assert [layer.features for env in learners.envs for layer in env.layers] == [8, 8, 8, 11]
    assert learners.parameters[1] - learners.parameters[0] == 3 * (8 + 1 + 2)
    learners.checkpoint(tmp_path / "saved")
    resumed = meristem.Learners.resume(tmp_path / "saved")
    for each in (learners, resumed):
        train(each, range(3, 6))
        each.step()
        each.apply([None, {"op": "WIDEN", "layer": "hidden.0", "by": 1}])
        train(each, range(6, 8))
    assert tensors(learners) == tensors(resumed)
    assert np.allclose(logits(learners.weights(1), x[1]), learners.eval(x)[1], atol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda it: it.widen(0, "hiden.1", 1), errors.StateError, "did you mean"),
        (lambda it: it.widen(2, "hidden.0", 1), errors.ArgumentError, "env"),
        (lambda it: it.widen(0, "hidden.0", 0), errors.ArgumentError, "by"),
        (lambda it: it.widen(0, 3, 1), errors.ArgumentError, "layer"),
        (lambda it: it.widen(0, "hidden.0", 65_536), errors.StateError, "hidden.0"),
        (lambda it: it.widen(0, "hidden.0", 10**9), errors.ArgumentError, "1 to 65536"),
    ],
)
def test_a_layer_that_cannot_get_wider_is_named(call, error, text):
    learners = made()
    before = tensors(learners)
    with pytest.raises(error, match=text):
        call(learners)
    assert tensors(learners) == before
