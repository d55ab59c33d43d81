"""Training, resuming and reading of runs."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import meristem
from meristem import errors


def losses(run: meristem.Run) -> np.ndarray:
    return run.events["step_completed"]["train_loss"]


def test_a_run_is_trained_and_read(tiny):
    run = meristem.train(**tiny)
    assert run.state == "complete" and run.path == tiny["run_dir"]
    assert run.settings["envs"] == 2 and run.settings["host"] == "minimal"
    assert run.summary["status"] == "completed" and len(run.summary["envs"]) == 2
    steps = run.events["step_completed"]
    assert steps["env"].dtype == np.int64 and list(steps["env"]) == [0, 1] * 4
    assert steps["train_loss"].dtype == np.float64 and np.isfinite(steps["train_loss"]).all()
    assert steps["action"] == ["WAIT"] * 8 or "GERMINATE" in " ".join(steps["action"])
    assert len({len(column) for column in steps.values()}) == 1
    assert run.weights(1).is_file()


def test_folds_are_the_envs_of_one_run(tmp_path):
    settings = {"dataset": "blobs", "host": "mlp:8", "controller": "none", "steps": 1}
    run = meristem.train(**settings, folds=3, run_dir=tmp_path / "folds")
    envs = run.summary["envs"]
    assert [env["part"]["fold"] for env in envs] == [0, 1, 2]
    scores = [env["control_accuracy"] for env in envs]
    folds = run.summary["folds"]
    assert folds["count"] == 3
    assert folds["control_accuracy_mean"] == pytest.approx(np.mean(scores))
    assert folds["control_accuracy_std"] == pytest.approx(np.std(scores, ddof=1))
    parts = {"bootstrap": True, "train_share": 0.5, "classes": [0, "3"]}
    run = meristem.train(**settings, **parts, envs=2, run_dir=tmp_path / "bags")
    assert [env["part"]["train_samples"] for env in run.summary["envs"]] == [800, 800]
    assert "folds" not in run.summary
    with pytest.raises(errors.SettingError, match="`envs`: got 4, expected a multiple of 3"):
        meristem.train(**settings, folds=3, envs=4, run_dir=tmp_path / "refused")


def test_the_envs_of_a_run_are_an_ensemble(tmp_path):
    settings = {"dataset": "blobs", "host": "mlp:8", "controller": "none", "steps": 1, "control_split": 0.2}
    run = meristem.train(**settings, bootstrap=True, envs=3, run_dir=tmp_path / "bag")
    found = run.ensemble()
    tests = [env["test_accuracy"] for env in run.summary["envs"]]
    assert [env["accuracy"] for env in found["envs"]] == tests
    assert found["mean_of_singles"]["accuracy"] == pytest.approx(np.mean(tests))
    control = [env["control_accuracy"] for env in run.summary["envs"]]
    assert found["best"]["env"] == int(np.argmax(control))
    # -ln is convex, so the loss of the mean is at most the mean of the losses.
    assert found["ensemble"]["loss"] <= found["mean_of_singles"]["loss"]
    assert 0 <= found["ensemble"]["calibration_error"] <= 1
    some = run.ensemble(members=(env for env in [2, 0]), split="train", threads=1)
    assert [env["env"] for env in some["envs"]] == [0, 2] and some["left_out"] == [1]
    assert run.ensemble(top=2)["left_out"] == [int(np.argmin(control))]
    with pytest.raises(errors.SettingError, match="at least two"):
        run.ensemble(top=1)
    with pytest.raises(errors.SettingError, match="`members`: got 3, expected numbers from 0 to 2"):
        run.ensemble(members=[3])
    for wrong in ({"split": "control"}, {"split": 1}, {"members": "0"}, {"members": [-1]}, {"batch": 0}, {"top": 1.5}):
        with pytest.raises(errors.ArgumentError):
            run.ensemble(**wrong)
    with pytest.raises(errors.MeristemError):
        run.ensemble(device="gpu")


def test_columns_equal_the_keys_of_the_file(trained):
    with (trained.path / "events.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    steps = [line for line in lines if line["event"] == "step_completed"]
    columns = trained.events["step_completed"]
    assert [line["control_loss"] for line in steps] == columns["control_loss"].tolist()
    assert [line["reward"]["rent"] for line in steps] == columns["reward_rent"].tolist()
    slots = [slot["stage"] for line in steps for slot in line["slots"]]
    assert trained.events.get("step_completed.slots", {"stage": []})["stage"] == slots


def test_batches_are_read_where_they_were_logged(tiny):
    assert meristem.train(**tiny, log_batches=True).batches["loss"].shape == (16,)


def test_a_mapping_and_names_are_settings(tiny):
    config = {**tiny, "steps": 2}
    assert meristem.train(config=config, steps=1).summary["steps"] == 1


def test_a_file_is_settings(tiny, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("steps = 1\n")
    assert meristem.train(config=path, **{**tiny, "steps": None}).summary["steps"] == 1


def test_blueprints_come_from_files(tiny, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "growth.md").read_text()
    own = tmp_path / "own.toml"
    own.write_text(re.search(r"<!-- test: own.toml -->\n```toml\n(.*?)```", page, re.DOTALL)[1])
    settings = {**tiny, "controller": "random", "slots": "all", "steps": 8}
    run = meristem.train(**{**settings, "blueprints": own})
    grown = set(run.events["module_germinated"]["blueprint"])
    assert grown and grown <= {"wide_depthwise", "squeeze"}
    second = {**settings, "run_dir": tmp_path / "fleet", "blueprints": ["standard", own]}
    with meristem.Fleet(**{**second, "controller": None}) as fleet:
        assert len(fleet.blueprints) == 9 and fleet.blueprints[-1] == "squeeze"
    own.write_text(own.read_text().replace("conv =", "convv ="))
    with pytest.raises(errors.SettingError, match="own.toml(?s:.*)line 4(?s:.*)`convv`"):
        meristem.train(**{**settings, "run_dir": tmp_path / "other", "blueprints": own})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"bacth": 3}, "unknown key `bacth`; did you mean `batch`?"),
        ({"batch": 0}, "`batch`: got 0, expected 1 to"),
        ({"batch": "many"}, "`batch`: got `many`, expected a whole number"),
        ({"batch": 2.5}, "`batch`: got `2.5`, expected a whole number"),
        ({"batch": object()}, "`batch`: got a object, expected text, a number, a path or a list"),
        ({"host": "hgue"}, "hgue"),
        ({"dataset": "cifar"}, "`dataset`: got `cifar`, expected one of"),
        ({"devices": "gpu"}, "`gpu` is not a device"),
    ],
)
def test_a_wrong_setting_is_refused(tiny, given, text):
    with pytest.raises(errors.SettingError, match="(?s).*") as caught:
        meristem.train(**{**tiny, **given})
    assert text in str(caught.value)
    assert caught.value.exit_code == 2 and isinstance(caught.value, ValueError)
    assert not Path(tiny["run_dir"]).exists()


def test_truth_values_are_switches_and_flags(tiny):
    run = meristem.train(**{**tiny, "steps": 1}, shuffle=False, log_batches=True, twin=False)
    assert run.settings["shuffle"] == "off" and run.settings["log_batches"] is True


def test_a_folder_is_never_overwritten(trained, tiny):
    with pytest.raises(errors.RunFolderError, match="exists") as caught:
        meristem.train(**tiny)
    assert "help: give another --run-dir" in str(caught.value)


def test_a_folder_of_something_else_is_no_run(tmp_path):
    with pytest.raises(errors.RunFolderError, match="it has neither events.jsonl nor summary.json"):
        meristem.Run(tmp_path)


def test_an_error_survives_a_pickle():
    error = errors.SettingError("a", ["b"], "c", 2)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.remedy) == ("a\n  cause: b\n  help: c", "c")


def test_an_exception_in_on_event_ends_the_run_which_resumes(tiny):
    whole = meristem.train(**{**tiny, "run_dir": tiny["run_dir"].with_name("whole")})

    class Enough(Exception):
        pass

    def stop(event):
        if event["event"] == "step_completed" and event["step"] == 1:
            raise Enough

    with pytest.raises(Enough):
        meristem.train(**tiny, on_event=stop)
    run = meristem.Run(tiny["run_dir"])
    assert run.state == "stopped" and run.summary["steps"] == 2
    assert losses(meristem.resume(run)).tolist() == losses(whole).tolist()
    assert run.weights(0).read_bytes() == whole.weights(0).read_bytes()


def test_only_settings_without_effect_change_on_resume(trained):
    with pytest.raises(errors.ResumeError, match="--batch cannot be changed on resume"):
        meristem.resume(trained, batch=7)
    assert meristem.resume(trained, threads=2).state == "complete"


def test_warnings_of_the_engine_are_warnings_of_python(trained):
    with pytest.warns(UserWarning, match="has planned for an end after 4 steps"):
        assert meristem.resume(trained, steps=6).summary["steps"] == 6


def test_ctrl_c_stops_at_a_step_and_resumes(tiny):
    begun = threading.Event()

    def press():
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        meristem.train(**{**tiny, "steps": 10_000}, on_event=lambda event: begun.set())
    thread.join()
    run = meristem.Run(tiny["run_dir"])
    assert run.state == "stopped" and 0 < run.summary["steps"] < 10_000


def test_other_threads_run_meanwhile(tiny):
    count, done = 0, threading.Event()

    def work():
        nonlocal count
        while not done.is_set():
            count += 1

    thread = threading.Thread(target=work)
    thread.start()
    meristem.train(**tiny)
    done.set()
    thread.join()
    assert count > 1000


def in_fresh_process(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are of Unix")
@pytest.mark.parametrize("used", [False, True])
def test_a_fork_works_before_the_first_use_and_is_refused_after(trained, used):
    code = f"""
import os, meristem
if {used}: meristem.Run({str(trained.path)!r})
child = os.fork()
if child == 0:
    try:
        meristem.Run({str(trained.path)!r})
    except meristem.errors.StateError as error:
        assert "was forked from process" in str(error)
        os._exit(7)
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {7 if used else 5}
"""
    done = in_fresh_process(code)
    assert done.returncode == 0, done.stderr


def test_a_changed_file_is_found(tiny):
    run = meristem.train(**tiny)
    states = {Path(file["file"]).name: file["state"] for file in meristem.verify(run.path)}
    assert {"config.toml", "events.jsonl", "summary.json", "env-0.safetensors"} <= states.keys()
    assert set(states.values()) == {"whole"}
    weights = run.weights(0)
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    damaged = [file for file in meristem.verify(run.path) if file["state"] == "damaged"]
    assert [Path(file["file"]) for file in damaged] == [weights]
    assert "checksum" in damaged[0]["problem"]
    with pytest.raises(errors.RunFolderError):
        meristem.verify(run.path / "weights")
