"""Fleets, and functions as controllers."""

import dataclasses
import os
import signal
import threading
import warnings

import numpy as np
import pytest

import meristem
from meristem import errors
from meristem.control import Env

GERMINATE = {"op": "GERMINATE", "slot": "r0c1", "blueprint": "conv_small"}


def grow(env: Env):
    """Germinates in the first slot, and advances when gates pass."""
    for slot in env.slots:
        if slot.stage == "dormant" and "GERMINATE" in slot.ops:
            return {"op": "GERMINATE", "slot": slot.slot, "blueprint": slot.blueprints[0]}
        if slot.gate_passes and "ADVANCE" in slot.ops:
            return {"op": "ADVANCE", "slot": slot.slot}
    return None


def same_weights(one: meristem.Run, other: meristem.Run) -> bool:
    return all(one.weights(e).read_bytes() == other.weights(e).read_bytes() for e in range(2))


def test_a_function_decides(tiny):
    seen = []

    def controller(env: Env):
        seen.append(env)
        return grow(env)

    run = meristem.train(**tiny, controller=controller)
    assert [(env.env, env.step) for env in seen] == [(e, s) for s in range(4) for e in range(2)]
    steps = run.events["step_completed"]
    assert steps["action"][:2] == ["GERMINATE r0c0 norm"] * 2
    assert np.allclose([env.accuracies[-1] for env in seen], steps["control_accuracy"])
    slots = len(seen[0].slots)
    assert seen[0].observation.shape == (23 + 31 * slots + 8 * slots,)
    assert seen[0].op_mask.tolist() == [1, 1, 0, 0, 0, 0]
    assert seen[2].last == ("GERMINATE", True) and seen[2].slots[0].stage == "germinated"
    assert run.settings["controller"] == "external"


def test_a_fleet_has_the_bits_of_the_run_with_the_same_actions(tiny):
    run = meristem.train(**tiny, controller=grow)
    folder = tiny["run_dir"].with_name("fleet")
    with meristem.Fleet(**{**tiny, "run_dir": folder}) as fleet:
        for _ in range(4):
            rewards = fleet.apply([grow(env) for env in fleet.step()])
            assert rewards.dtype == np.float32 and np.isfinite(rewards).all()
        assert fleet.point == "end"
    other = meristem.Run(folder)
    assert other.state == "complete" and same_weights(run, other)
    for column in ("train_loss", "control_loss", "action", "reward_gain"):
        one, two = (r.events["step_completed"][column] for r in (run, other))
        assert list(map(str, one)) == list(map(str, two)), column


def test_a_fleet_has_envs_figures_and_weights(tiny):
    with meristem.Fleet(**tiny) as fleet:
        assert (len(fleet), fleet.point) == (2, "boundary")
        assert "r0c1" in fleet.slots and len(fleet.blueprints) == 7
        assert fleet.head_sizes == [6, len(fleet.slots), 7, 4, 3, 3, 4, 5]
        [first, _] = fleet.step()
        assert fleet.point == "decision" and first.step == 0 and len(first.train_losses) == 1
        figures = fleet.figures[0]
        assert figures.train_loss == pytest.approx(first.train_losses[0])
        assert figures.host_parameters > 0 == figures.grown_parameters
        before = fleet.weights(0)
        assert before.metadata["classes"] and before.metadata["topology"]
        fleet.step()
        after = fleet.weights(0)
        assert before.tensors.keys() == after.tensors.keys()
        name = "blocks.0.conv.weight"
        assert (before.tensors[name] != after.tensors[name]).any()
        assert len(fleet.snapshot()) == 2


def test_weights_of_a_fleet_equal_those_in_its_folder(tiny, tmp_path):
    with meristem.Fleet(**tiny) as fleet:
        for _ in range(4):
            fleet.step()
            weights = fleet.weights(1)
            fleet.apply([None, None])
    weights.save(tmp_path / "w.safetensors")
    of_run = meristem.weights.load(meristem.Run(tiny["run_dir"]).weights(1))
    assert all((of_run.tensors[name] == x).all() for name, x in weights.tensors.items())
    with pytest.raises(FileExistsError):
        weights.save(tmp_path / "w.safetensors")


def test_an_illegal_action_changes_nothing(tiny):
    with meristem.Fleet(**tiny) as fleet:
        fleet.step()
        for action, text in [
            ({"op": "ADVANCE", "slot": "r0c1"}, "ADVANCE is not legal in env 1 at step 0"),
            ({"op": "ADVANCE", "slot": "r9c9"}, "r9c9"),
            ({"op": "JUMP"}, "unknown variant `JUMP`"),
            ({"op": "WAIT", "step": 3}, "`step` belongs to a script"),
            ([1, 0, 99, 0, 0, 0, 0, 0], "blueprint"),
            ([9, 0, 0, 0, 0, 0, 0, 0], "expected one choice per head"),
            ([1, 0], "expected one choice per head"),
        ]:
            with pytest.raises(errors.ControllerError) as caught:
                fleet.apply([None, action])
            assert text in str(caught.value), caught.value
        with pytest.raises(errors.ControllerError, match="each of 2 envs, got 1"):
            fleet.apply([None])
        for action in ["WAIT", b"\0" * 8, 3, [0.9] * 8, [1.9, 1, 0, 0, 0, 0, 0, 0], [False] * 8]:
            with pytest.raises(errors.ControllerError, match="`action`: got .*, expected None, a map"):
                fleet.apply([None, action])
        fleet.apply([None, GERMINATE])
        assert [env.slots[1].stage for env in fleet.envs] == ["dormant", "germinated"]
        with pytest.raises(errors.StateError, match="no actions are due"):
            fleet.apply([None, None])


@pytest.mark.parametrize("choices", [list, tuple, np.array, np.uint8, iter])
def test_choices_are_whole_numbers_of_python_or_numpy(tiny, choices):
    germinate = [1, 1, 1, 0, 0, 0, 0, 0]
    with meristem.Fleet(**tiny) as fleet:
        fleet.step()
        fleet.apply([choices(germinate), {"op": np.str_("WAIT")}])
        assert [env.slots[1].stage for env in fleet.envs] == ["germinated", "dormant"]


@pytest.mark.parametrize("value", [0.9, np.float32(1), float("nan"), -1, 2**70, True, np.True_, "1"])
def test_a_choice_that_is_not_an_integer_is_refused(tiny, value):
    with meristem.Fleet(**tiny) as fleet:
        fleet.step()
        for choices in ([value] * 8, [1, 1, 1, value, 0, 0, 0, 0], np.array([value] * 8)):
            with pytest.raises(errors.ControllerError) as caught:
                fleet.apply([choices, None])
            assert caught.value.exit_code == 2 and caught.value.remedy
        assert fleet.point == "decision"

    def decides(env: Env):
        return [value] * 8

    with pytest.raises(errors.ControllerError):
        meristem.train(**{**tiny, "run_dir": tiny["run_dir"].with_name("other")}, controller=decides)


def test_a_fleet_accepts_no_controller(tiny):
    with pytest.raises(errors.SettingError, match="`controller`: got .*, expected none: a fleet executes"):
        meristem.Fleet(**tiny, controller=grow)
    with pytest.raises(errors.SettingError, match="`controller`: got 'heuristic'"):
        meristem.Fleet(**tiny, controller="heuristic")


def test_changed_weights_of_a_fleet_are_saved(tiny, tmp_path):
    with meristem.Fleet(**tiny) as fleet:
        fleet.step()
        weights = fleet.weights(0)
    path = tmp_path / "w.safetensors"
    doubled = {name: 2 * x for name, x in weights.tensors.items()}
    changed = dataclasses.replace(weights, tensors=doubled)
    changed.save(path)
    read = meristem.weights.load(path)
    assert all((read.tensors[name] == x).all() for name, x in doubled.items())
    assert read.metadata == weights.metadata and read.contents == changed.contents
    weights.tensors["classifier.bias"] = np.full_like(weights.tensors["classifier.bias"], 7)
    again = meristem.weights.parse(weights.contents)
    assert (again.tensors["classifier.bias"] == 7).all()
    # The engine accepts the file.
    run = meristem.train(**{**tiny, "run_dir": tmp_path / "next"}, init=path)
    assert run.state == "complete"


def test_a_fleet_resumes_with_the_same_bits(tiny):
    whole = meristem.train(
        **{**tiny, "run_dir": tiny["run_dir"].with_name("whole")}, controller=grow
    )
    with meristem.Fleet(**tiny) as fleet:
        for _ in range(2):
            fleet.apply([grow(env) for env in fleet.step()])
        fleet.checkpoint()
        fleet.apply([grow(env) for env in fleet.step()])
    run = meristem.Run(tiny["run_dir"])
    assert run.state == "stopped" and run.summary["steps"] == 3
    with meristem.Fleet.resume(run) as fleet:
        fleet.apply([grow(env) for env in fleet.step()])
    assert meristem.Run(run.path).state == "complete" and same_weights(whole, run)


def test_warnings_of_a_resumed_fleet_are_warnings_of_python(tiny):
    with meristem.Fleet(**tiny) as fleet:
        fleet.apply([grow(env) for env in fleet.step()])
        fleet.checkpoint()
    with pytest.warns(UserWarning, match="has planned for an end after 4 steps"):
        meristem.Fleet.resume(tiny["run_dir"], steps=6).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="after 6 steps"):
            meristem.Fleet.resume(tiny["run_dir"], steps=8)
    # The run of the failed fleet has ended and can be resumed.
    assert meristem.Run(tiny["run_dir"]).state == "stopped"
    meristem.Fleet.resume(tiny["run_dir"]).close()


def test_rounds_follow_one_another(tiny):
    with meristem.Fleet(**{**tiny, "steps": 2, "rounds": 2}) as fleet:
        for expected in [(0, 1), (1, 2), (0, 1), (1, 2)]:
            env = fleet.step()[0]
            assert (env.step, len(env.train_losses)) == expected
            fleet.apply([None, None])
        with pytest.raises(errors.StateError, match="the run is over"):
            fleet.step()
    assert meristem.Run(tiny["run_dir"]).state == "complete"


def test_a_fleet_closed_between_rounds_keeps_the_weights_of_the_round(tiny):
    fleet = meristem.Fleet(**{**tiny, "steps": 2, "rounds": 2})
    for _ in range(2):
        fleet.step()
        weights = fleet.weights(0)
        fleet.apply([None, None])
    run = fleet.close()
    assert run.state == "stopped" and fleet.close() is None
    of_run = meristem.weights.load(run.weights(0))
    assert all((of_run.tensors[name] == x).all() for name, x in weights.tensors.items())
    with pytest.raises(errors.StateError, match="this fleet is closed"):
        fleet.step()


def test_a_fleet_is_used_by_one_thread_at_a_time(tiny):
    with meristem.Fleet(**{**tiny, "steps": 500}) as fleet:
        refused, done = [], threading.Event()

        def look():
            while not done.is_set():
                try:
                    fleet.point
                except errors.StateError as error:
                    refused.append(str(error))

        thread = threading.Thread(target=look)
        thread.start()
        for _ in range(20):
            try:
                fleet.step()
            except errors.StateError as error:
                refused.append(str(error))
        done.set()
        thread.join()
        assert refused and all("in use by another thread" in text for text in refused)


def test_ctrl_c_is_raised_after_the_step(tiny):
    with meristem.Fleet(**{**tiny, "max_batches": 280, "envs": 2}) as fleet:
        timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                fleet.step()
        fleet.checkpoint() if fleet.point == "boundary" else fleet.apply([None, None])


def test_an_exception_of_a_controller_reaches_the_caller_and_the_run_resumes(tiny):
    whole = meristem.train(
        **{**tiny, "run_dir": tiny["run_dir"].with_name("whole")}, controller=grow
    )

    class Broken(Exception):
        pass

    def breaks(env: Env):
        if env.step == 2:
            raise Broken("here")
        return grow(env)

    with pytest.raises(Broken, match="here"):
        meristem.train(**tiny, controller=breaks)
    run = meristem.Run(tiny["run_dir"])
    assert run.state == "failed" and "the controller of the calling program failed" in run.summary["error"]
    resumed = meristem.resume(run, controller=grow)
    assert resumed.state == "complete" and same_weights(whole, resumed)


def test_a_controller_that_gives_no_action_is_refused(tiny):
    with pytest.raises(errors.ControllerError, match="ADVANCE is not legal in env 0 at step 0"):
        meristem.train(**tiny, controller=lambda env: {"op": "ADVANCE", "slot": "r0c1"})


def test_external_without_a_function_is_refused(tiny):
    with pytest.raises(
        errors.SettingError, match="got external, expected the controller of a program"
    ):
        meristem.train(**tiny, controller="external")
    with pytest.raises(errors.SettingError, match="`controller`: got 3, expected a function of an"):
        meristem.train(**tiny, controller=3)


def test_wrong_settings_of_a_fleet_are_errors(tiny):
    with pytest.raises(errors.SettingError, match="`batch`: got 0"):
        meristem.Fleet(**{**tiny, "batch": 0})
    with pytest.raises(errors.SettingError, match="hgue"):
        meristem.Fleet(**{**tiny, "host": "hgue"})
