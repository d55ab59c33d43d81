"""Sweeps as one run and on executors: the same leaderboard and weights, bit for bit."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

import meristem
from meristem.errors import DivergedError, MeristemError, SettingError

SPACE = {"lr": {"log_uniform": [1e-3, 1]}, "host": {"choice": ["mlp:8", "mlp:4,4"]}}
SETTINGS = {
    "dataset": "mnist1d", "samples": 9, "steps": 5, "max_batches": 3, "batch": 32, "seed": 3,
    "checkpoint_every": 0,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def one_run(**settings):
    return meristem.sweep(SPACE, **SETTINGS, **settings)


def assert_equal(parts, run):
    assert parts.leaderboard == run.leaderboard
    assert parts.over_seeds == run.over_seeds
    for env in range(len(run.summary["envs"])):
        assert parts.weights(env) == run.weights(env).read_bytes(), env


@pytest.mark.parametrize("scheduler", ["halving:2", "hyperband:2", "median:2", "patience:1", "none"])
def test_fleets_on_an_executor_are_the_one_run(scheduler):
    run = one_run(scheduler=scheduler)
    with ThreadPoolExecutor(2) as executor:
        parts = meristem.sweep(SPACE, executor=executor, fleets=4, scheduler=scheduler, **SETTINGS)
    assert_equal(parts, run)
    ended = {place["ended"] for place in run.leaderboard}
    assert (ended == {None}) == (scheduler == "none")


def test_processes_and_members_with_several_envs():
    settings = {**SETTINGS, "envs": 18, "scheduler": "halving:3"}
    run = meristem.sweep(SPACE, **settings)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        parts = meristem.sweep(SPACE, executor=executor, **settings)
    assert_equal(parts, run)


def test_members_over_their_seeds():
    members = {"seed": [1, 2, 3], "train_share": [0.3, 1.0], "controller": ["none", "heuristic"]}
    settings = {**SETTINGS, "members": members, "host": "mlp:8", "scheduler": "halving:2"}
    del settings["samples"]
    run = meristem.sweep(**settings)
    with ThreadPoolExecutor(2) as executor:
        parts = meristem.sweep(executor=executor, fleets=5, **settings)
    assert_equal(parts, run)
    assert [len(place["envs"]) for place in run.over_seeds] == [3, 3, 3, 3]
    few, all_samples = sorted({env["part"]["train_samples"] for env in run.summary["envs"]})
    assert few == round(0.3 * all_samples)


class Suggests(meristem.Searcher):
    """Settings that differ in controller and part of the data."""

    MEMBERS = (
        {"lr": 0.1, "train_share": 0.5},
        {"lr": 0.1, "bootstrap": True, "controller": "random"},
        {"lr": 0.05, "train_share": 0.2, "bootstrap": True, "controller": "heuristic"},
        {"lr": 0.1},
    )

    def suggest(self, member):
        return self.MEMBERS[member]


def test_a_program_chooses_controllers_and_parts_of_the_data():
    settings = {
        "dataset": "mnist1d", "host": "conv1d:4,4", "controller": "none", "control_split": 0.2,
        "steps": 4, "max_batches": 3, "batch": 32,
    }
    given = meristem.train(members=list(Suggests.MEMBERS), **settings)
    for places in [None, 2]:
        run = meristem.sweep(search=Suggests(), samples=4, places=places, **settings)
        for env, part in enumerate(run.summary["envs"]):
            assert run.weights(env).read_bytes() == given.weights(env).read_bytes(), env
            assert part["part"] == given.summary["envs"][env]["part"]
    again = meristem.replay(run, 2)
    assert again.weights(0).read_bytes() == given.weights(2).read_bytes()


class LosesTasks(ThreadPoolExecutor):
    """Every third task is lost."""

    submitted = 0

    def submit(self, function, *arguments):
        self.submitted += 1
        lost = self.submitted % 3 == 0
        return super().submit(self.lose if lost else function, *arguments)

    def lose(self, *_):
        raise ConnectionError("the worker is gone")


def test_a_task_whose_worker_is_lost_is_run_again():
    run = one_run(scheduler="halving:2")
    with LosesTasks(2) as executor:
        parts = meristem.sweep(SPACE, executor=executor, fleets=3, scheduler="halving:2", **SETTINGS)
    assert executor.submitted > 6
    assert_equal(parts, run)


class Breaks(ThreadPoolExecutor):
    """Takes no more than four tasks."""

    submitted = 0

    def submit(self, function, *arguments):
        self.submitted += 1
        if self.submitted > 4:
            raise BrokenExecutor("a process ended")
        return super().submit(function, *arguments)


def test_a_broken_executor_loses_nothing_that_is_done():
    settings = {**SETTINGS, "scheduler": "halving:2", "folder": "kept", "fleets": 3}
    with Breaks(1) as executor, pytest.raises(MeristemError, match="the executor cannot run"):
        meristem.sweep(SPACE, executor=executor, **settings)
    assert sorted(os.listdir("kept")) == ["fleet-0.zip", "fleet-1.zip", "fleet-2.zip"]
    del settings["fleets"]
    with ThreadPoolExecutor(1) as executor:
        parts = meristem.sweep(SPACE, executor=executor, **settings)
    assert_equal(parts, one_run(scheduler="halving:2"))
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(SettingError, match="another sweep"):
            meristem.sweep(SPACE, executor=executor, **{**settings, "lr": 0.3})
        with open("kept/fleet-1.zip", "r+b") as file:
            file.truncate(100)
        with pytest.raises(SettingError, match="fleet-1.zip is damaged"):
            meristem.sweep(SPACE, executor=executor, **settings)


def test_members_that_diverge_are_last():
    settings = {**SETTINGS, "members": {"lr": [1e6, 0.1, 9e5, 0.05]}, "host": "mlp:8"}
    settings.update(clip_norm="off", steps=8)
    del settings["samples"]
    run = meristem.sweep(**settings)
    with ThreadPoolExecutor(1) as executor:
        together = meristem.sweep(executor=executor, fleets=1, **settings)
        # Fleet 0 has both members that diverge.
        apart = meristem.sweep(executor=executor, fleets=2, **settings)
        # One of them diverges before the rung at which it would go on.
        halving = {**settings, "members": {"lr": [1e-6, 1e6, 3e-6]}, "scheduler": "halving:2", "seed": 24}
        rung = meristem.sweep(executor=executor, fleets=2, **halving)
        with pytest.raises(DivergedError):
            meristem.sweep(executor=executor, **{**settings, "members": {"lr": [1e6, 9e5]}})
    assert_equal(together, run)
    assert_equal(apart, run)
    assert_equal(rung, meristem.sweep(**halving))
    assert [place["ended"] for place in run.leaderboard][2:] == ["diverged", "diverged"]
    again = meristem.replay(run, 0)
    assert again.weights(0).read_bytes() == run.weights(0).read_bytes()


def test_wrong_sweeps_say_why():
    with ThreadPoolExecutor(1) as executor:
        for wrong, words in [
            ({"scheduler": "pbt"}, "pbt copies members"),
            ({"scheduler": "halfing"}, "halving"),
            ({"fleets": 0}, "fleets"),
            ({"samples": None}, "samples"),
        ]:
            with pytest.raises(MeristemError, match=words):
                meristem.sweep(SPACE, executor=executor, **{**SETTINGS, **wrong})
        with pytest.raises(SettingError, match="`members`"):
            meristem.sweep(executor=executor, dataset="mnist1d")
        for wrong in [{"run_dir": "run"}, {"stop_after": 2}, {"on_event": print}]:
            with pytest.raises(SettingError, match="none with an executor"):
                meristem.sweep(SPACE, executor=executor, **SETTINGS, **wrong)
        Path("file").write_text("no folder")
        with pytest.raises(SettingError, match="is not a folder"):
            meristem.sweep(SPACE, executor=executor, folder="file", **SETTINGS)
    with pytest.raises(SettingError, match="only with an executor"):
        meristem.sweep(SPACE, folder="kept", **SETTINGS)
    for config in [None, {"steps": 1}]:
        with pytest.raises(SettingError, match="a sweep needs `members`"):
            meristem.sweep(config=config, dataset="mnist1d", run_dir="none")
    assert not Path("none").exists()
    run = meristem.sweep(config={"members": {"lr": [0.1, 0.2]}}, dataset="mnist1d", host="mlp:4", steps=1, max_batches=1)
    assert len(run.leaderboard) == 2


def test_a_copy_follows_the_script_of_its_origin():
    """A script is read once, so that a file that changes meanwhile changes no copy."""
    script = '{"step": 4, "op": "GERMINATE", "slot": "c0", "blueprint": "norm", "then": "FOSSILIZE"}'
    settings = {
        "dataset": "mnist1d", "host": "conv1d:4,8", "controller": "fixed:s.jsonl", "steps": 7, "batch": 32,
        "max_batches": 4, "birth": "joint", "min_training_steps": 1, "scheduler": "pbt:1", "samples": 5, "seed": 3,
    }
    weights = []
    for changes in (False, True):
        Path("s.jsonl").write_text(script)

        def on_event(event, changes=changes):
            if changes and event["event"] == "step_completed" and event["step"] == 0:
                Path("s.jsonl").write_text("")

        run = meristem.sweep({"lr": {"log_uniform": [0.01, 0.5]}}, on_event=on_event, **settings)
        assert len(run.events["member_copied"]["member"]) > 2
        assert all(env["modules"] for env in run.summary["envs"])
        weights.append([run.weights(env).read_bytes() for env in range(5)])
    assert weights[0] == weights[1]
    with pytest.raises(MeristemError, match="Executor"):
        meristem.sweep(SPACE, executor="x", **SETTINGS)


def test_dask_workers_that_are_killed():
    distributed = pytest.importorskip("distributed")
    settings = {**SETTINGS, "scheduler": "halving:2"}
    run = meristem.sweep(SPACE, **settings)
    with (
        distributed.LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        killed = []

        class Kills(type(client.get_executor())):
            """Kills a worker after its first and its fifth task."""

            def submit(self, function, *arguments):
                future = super().submit(function, *arguments)
                if len(killed) < 2 and self.count in (0, 4):
                    worker = cluster.workers[self.count % 3]
                    killed.append(worker.pid)
                    os.kill(worker.pid, 9)
                self.count += 1
                return future

        executor = Kills(client)
        executor.count = 0
        parts = meristem.sweep(SPACE, executor=executor, fleets=6, **settings)
    assert len(killed) == 2
    assert_equal(parts, run)


def test_the_example_with_ray_tune_ends_trials_early():
    """Not in CI, where Ray is not installed."""
    pytest.importorskip("ray")
    example = Path(__file__).parents[1] / "examples" / "ray_tune.py"
    command = [sys.executable, str(example), "--trials", "4", "--steps", "3", "--seeds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "4 trials" in done.stdout and "0 failed" in done.stdout, done.stdout
